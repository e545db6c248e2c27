"""large_models: one graph for all layers, memory asked for before it is taken, a captured graph's rules."""

from dataclasses import replace

from harness.bench import Row, Table

import pytest
import torch

from compile_inspect import watch
from examples.common.transformer import FORTY_BILLION, TINY, Transformer
from examples.compiler import large_models
from examples.compiler.large_models import (
    BLOCKS,
    CAPTURED,
    EAGER,
    WHOLE,
    captured,
    compiled_blocks,
    demo,
    fitting,
    models,
)
from studies.compiler.large_models import TEN_BILLION


def test_too_little_memory_takes_fewer_layers_or_none_and_does_not_crash(h, monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert fitting(TINY, cpu, torch.float32) == TINY
    assert fitting(FORTY_BILLION, cpu, torch.float32) is None
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for free, layers in {140: 60, 79: 57, 40: 25, 9: None}.items():  # GiB; a layer has 1.22, the rest takes 9.4
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free * 2**30, 2**40))
        config = fitting(FORTY_BILLION, gpu, torch.bfloat16)
        assert (config and config.layers) == layers
    assert fitting(TINY, gpu, torch.bfloat16) == TINY


def test_models_are_named_for_what_they_are_here(h, monkeypatch):
    fewer = {"whole": TINY, "cut": replace(TINY, layers=2), "none": None}
    asked = dict.fromkeys(fewer, TINY)
    left = iter(fewer.values())
    monkeypatch.setattr(large_models, "fitting", lambda *_: next(left))
    found = [(name, here, model.config.layers) for name, here, model in models(h, asked, torch.float32)]
    assert found == [("whole", "whole", 4), ("cut", "0 B", 2)]
    cut, none = h.record.conclusions
    assert cut == "cut is 0 B here: 2 of 4 layers fit into the memory"
    assert none == "none skipped: no GPU here has memory for one layer of it"
    monkeypatch.setattr(large_models, "fitting", lambda *_: None)
    monkeypatch.setattr(large_models, "warm_up", lambda device: None)
    demo(h)  # has nothing to answer
    assert h.record.tables == []


def test_the_answer_fits_and_has_the_hosts_share():
    def table(ms, whole=True, **more):
        times = {EAGER: 4.0, **({WHOLE: 3.0} if whole else {}), BLOCKS: 3.5, CAPTURED: ms}
        return Table("large_models", "", EAGER, [
            Row(n, False, 29.7, 0.0, ms=t, speedup=4.0 / t, gpu_ms=more.get("gpu", t)) for n, t in times.items()
        ])  # fmt: skip

    tables = {name: [table(1.0, name == "1 B", gpu=1.0), table(2.0, False)] for name in ("1 B", "40 B")}
    told = large_models.answer(tables)
    assert told.startswith(
        "Blocks compiled, in one CUDA graph, over eager (host twice as fast), 1 and 512 tokens: "
        "1 B 4.00x (2.00x) and 2.00x (2.00x), 40 B "
    )
    assert told.endswith(". Compiling one block takes 29.7 s at 1 B (all layers: 30 s), 29.7 s at 40 B.")
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
