"""regional_compilation: what each way compiles, that all are right, and bad input."""

import functools
from dataclasses import replace

from harness import Harness
from harness.catalog import Needs
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from compile_inspect import fresh_compiler, watch
from examples.common.transformer import TINY, Transformer
from examples.compiler import regional_compilation
from examples.compiler.regional_compilation import EACH, EAGER, NESTED, WAYS, WHOLE, cold, demo, each_block

MINI = replace(TINY, width=64, hidden=128, vocab=256, layers=3)


@pytest.fixture
def h() -> Harness:
    return Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False)


@pytest.fixture(autouse=True)
def _forget():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def mini(h, layers: int = 3) -> Transformer:
    return Transformer.random(replace(MINI, layers=layers), h.device, torch.float32)


def small(monkeypatch, **options) -> None:
    """The demo on tiny models; with a backend that generates no code it needs seconds."""
    monkeypatch.setattr(regional_compilation, "TINY", MINI)
    ways = {name: functools.partial(way, **options) for name, way in WAYS.items()}
    monkeypatch.setattr(regional_compilation, "WAYS", ways)
    monkeypatch.setattr(regional_compilation, "warm_up", lambda device: None)


def test_demo(h, monkeypatch):
    small(monkeypatch, backend="aot_eager")
    with settings_kept("demo", 0):
        demo(h)
    (rows,) = h.record.facts.values()
    depths = (2, 4) if h.machine.mode == "gpu" else (2,)
    assert len(rows) == len(WAYS) * len(depths)
    assert all(way["graphs"] == 1 for way in rows.values())
    for layers in depths:
        whole, each, region = (
            rows[f"{layers} layers, {way}"]["ops traced"] for way in ("whole", "each block", "region")
        )
        assert whole > 1.5 * each
        assert region < each  # a call of the region is one
    (table,) = h.record.tables
    assert [row["variant"] for row in table["rows"]] == [EAGER, *WAYS]


def test_kernels_are_generated_once_for_all_blocks(h):
    counts = {}
    with torch.no_grad():
        for name, way in WAYS.items():
            torch.compiler.reset()
            counts[name] = cold(way, mini(h), h.randint(MINI.vocab, 1, 8))[1].kernels
    assert counts[WHOLE] > counts[NESTED] > counts[EACH] > 0


def test_profiling_calls_the_variants_and_nothing_else(monkeypatch):
    small(monkeypatch, backend="eager")
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True), profile=True)
    demo(h)
    assert not any(h.record.facts.values())


@pytest.mark.parametrize("way", WAYS.values(), ids=lambda way: way.__name__)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 16)])
def test_each_way_computes_what_eager_does(h, way, shape):
    model, tokens = mini(h), h.randint(MINI.vocab, *shape)
    with torch.no_grad():
        got = way(model, backend="aot_eager")(tokens)
        torch.testing.assert_close(got, model(tokens), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.double(), model.float64(tokens), rtol=1e-3, atol=1e-3)


def test_blocks_use_their_own_weights(h):
    """One graph for all blocks, and yet a change in the last block's weights shows."""
    model, tokens = mini(h), h.randint(MINI.vocab, 1, 8)
    fn = each_block(model, backend="aot_eager")
    with torch.no_grad(), watch() as seen:
        before = fn(tokens)
        model.blocks[-1].down.weight.mul_(2)
        after = fn(tokens)
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, model(tokens), rtol=1e-4, atol=1e-4)
    assert seen.graphs == 1


def test_module_compile_is_the_same(h):
    model, tokens = mini(h), h.randint(MINI.vocab, 1, 8)
    want = model(tokens)
    with fresh_compiler(), watch() as seen:
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(model(tokens), want)
    assert seen.graphs == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=lambda way: way.__name__)
def test_bad_input(h, way):
    with pytest.raises(TypeError, match=rf"{way.__name__}: got a Linear; pass an examples"):
        way(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("way", WAYS.values(), ids=lambda way: way.__name__)
def test_a_block_that_cannot_be_one_graph(h, way):
    model, tokens = mini(h), h.randint(MINI.vocab, 1, 8)
    plain = model.blocks[0].attention

    def breaks(*inputs):
        torch._dynamo.graph_break()
        return plain(*inputs)

    model.blocks[0].attention = breaks
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"Call to `torch._dynamo.graph_break\(\)`"):
        way(model, backend="eager")(tokens)


@pytest.mark.gpu
def test_on_the_gpu():
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True), full=True)
    with settings_kept("demo", 0):
        demo(h)
    (rows,) = h.record.facts.values()
    assert rows["16 layers, each block"]["kernels generated"] == rows["4 layers, each block"]["kernels generated"]
    assert rows["16 layers, each block"]["cold s"] < 0.7 * rows["16 layers, whole"]["cold s"]
