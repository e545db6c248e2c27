"""large_models: one graph for all layers, memory asked for before it is taken, a captured graph's rules."""

from harness.bench import Row, Table

import pytest
import torch

from compile_inspect import watch
from examples.common.transformer import FORTY_BILLION, TINY, Transformer
from examples.compiler import large_models
from examples.compiler.large_models import BLOCKS, CAPTURED, EAGER, WHOLE, captured, compiled_blocks, demo, lacks_memory
from studies.compiler.large_models import TEN_BILLION


def test_too_little_memory_is_a_reason_and_not_a_crash(h, monkeypatch):
    assert lacks_memory(TINY, h.device, torch.float32) is None
    if h.device.type == "cpu":
        assert "needs a GPU with" in lacks_memory(FORTY_BILLION, h.device, torch.float32)
    else:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
        assert "needs 80 GiB of GPU memory, 1 are free" in lacks_memory(FORTY_BILLION, h.device, torch.bfloat16)
    monkeypatch.setattr(large_models, "lacks_memory", lambda *_: "needs more than there is")
    monkeypatch.setattr(large_models, "warm_up", lambda device: None)
    demo(h)
    assert (len(h.record.conclusions), h.record.tables) == (1, [])


def test_the_answer_fits_and_has_the_hosts_share():
    def table(ms, whole=True, **more):
        times = {EAGER: 4.0, **({WHOLE: 3.0} if whole else {}), BLOCKS: 3.5, CAPTURED: ms}
        return Table("large_models", "", EAGER, [
            Row(n, False, 29.7, 0.0, ms=t, speedup=4.0 / t, gpu_ms=more.get("gpu", t)) for n, t in times.items()
        ])  # fmt: skip

    tables = {name: [table(1.0, name == "1 B", gpu=1.0), table(2.0, False)] for name in ("1 B", "40 B")}
    told = large_models.answer(tables)
    assert told.startswith(
        "CUDA graph of blocks over eager (host twice as fast), 1 and 512 tokens: 1 B 4.00x (2.00x) and 2.00x (2.00x); "
        "a block compiles in 29.7 s, the whole in 30 s. 40 B "
    )
    assert told.endswith("; a block compiles in 29.7 s.")
    assert len(told) <= 240


def test_ten_billion_is_ten_billion():
    assert 9.5e9 < TEN_BILLION.parameters < 10.5e9


def test_layers_share_their_compiled_code(h):
    model, ids = Transformer.random(TINY, h.device, torch.float32), h.randint(TINY.vocab, 2, 7)
    with torch.no_grad(), watch() as seen:
        out = compiled_blocks(model)(ids)
    assert (seen.graphs, seen.recompiles) == (1, [])
    assert (out - model.float64(ids)).abs().max() < 1e-4


@pytest.mark.gpu
def test_a_captured_graph_follows_new_tokens_and_refuses_new_shapes(h):
    model = Transformer.random(TINY, h.device, torch.float32)
    with torch.no_grad():
        model(h.randint(TINY.vocab, 1, 5))
        replay = captured(model, h.randint(TINY.vocab, 1, 5))
        for _ in range(3):
            ids = h.randint(TINY.vocab, 1, 5)
            assert (replay(ids) - model.float64(ids)).abs().max() < 1e-3
        with pytest.raises(ValueError, match=r"captured: tokens \(1, 6\), captured \(1, 5\); capture again"):
            replay(h.randint(TINY.vocab, 1, 6))
