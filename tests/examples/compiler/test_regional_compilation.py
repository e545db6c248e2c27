import functools
from dataclasses import replace

from harness import Harness
from harness.catalog import Needs
from harness.compiler import empty_compiler, guards, watch
from harness.settings import settings_kept
from harness.transformer import TINY, Transformer

import pytest
import torch
from rich.console import Console

from examples.compiler import regional_compilation
from examples.compiler.regional_compilation import (
    EACH,
    EAGER,
    NESTED,
    SCALES,
    WAYS,
    WHOLE,
    Recorder,
    Scaled,
    by_depth,
    by_width,
    call_block,
    cold,
    demo,
    each_block,
    nested_region,
    one_block_of_another_class,
    training,
    why_one_serves_all,
)

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
    monkeypatch.setattr(regional_compilation, "SMALL", replace(MINI, width=128))
    ways = {name: functools.partial(way, **options) for name, way in WAYS.items()}
    monkeypatch.setattr(regional_compilation, "WAYS", ways)
    monkeypatch.setattr(regional_compilation, "whole", ways[WHOLE])
    monkeypatch.setattr(regional_compilation, "wake_compiler", lambda device: None)


def test_demo(h, monkeypatch):
    small(monkeypatch, backend="aot_eager")
    with settings_kept("demo", 0):
        demo(h)
    facts = h.record.facts
    gpu = h.machine.mode == "gpu"
    many = facts["4 layers" if gpu else "2 layers"]
    assert all(way["graphs"] == 1 for way in many.values())
    assert many[WHOLE]["ops traced"] > 1.5 * many[EACH]["ops traced"]
    assert many[NESTED]["ops traced"] < many[EACH]["ops traced"]  # a call of the region is one
    assert ("2 layers" in facts, "1 layer" in facts, "seconds a layer" in facts) == (True, False, gpu)
    (table,) = h.record.comparisons
    assert [row["variant"] for row in table["rows"]] == [EAGER, *WAYS]
    assert [row["first_call_s"] for row in table["rows"][1:]] == pytest.approx(
        [many[name]["cold s"] for name in WAYS], abs=0.01
    )


def test_as_many_blocks_of_another_width_have_more_parameters(h, monkeypatch):
    small(monkeypatch, backend="aot_eager")
    tokens = h.randint(MINI.vocab, 1, 8)
    with torch.no_grad():
        _, _, found = by_depth(h, MINI, (1, 2), torch.float32, tokens)
        by_width(h, MINI, 1, found[WHOLE][0], torch.float32, tokens)
    few, many = h.record.facts["1 layer"], h.record.facts["2 layers"]
    assert many[EACH]["ops traced"] == few[EACH]["ops traced"]
    assert many[WHOLE]["ops traced"] > 1.5 * few[WHOLE]["ops traced"]
    assert set(h.record.facts["seconds a layer"]) == set(WAYS)
    narrow, wide = h.record.facts["whole, 1 layer"].values()
    assert list(h.record.facts["whole, 1 layer"]) == ["width 64", "width 128"]
    assert wide["parameters"] > 2 * narrow["parameters"]
    assert narrow["cold s"] == round(found[WHOLE][0].seconds, 2)
    assert wide["cold s"] > 0


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
    assert not h.record.facts


def test_what_shares_a_graph(h):
    with torch.no_grad():
        why_one_serves_all(h, layers=10)
    told, limit = h.record.facts["10 blocks"], torch._dynamo.config.recompile_limit
    assert told["equal blocks, each"] == {"graphs": 1}
    assert told["equal blocks, region"] == {"subgraphs": 1, "calls of them": 10}
    assert told["a tensor of its own, each"] == {"graphs": 1}
    assert told["a tensor of its own, region"] == {"subgraphs": 1, "calls of them": 10}
    assert told["an int of its own, each"]["graphs"] == limit
    assert "block.scale ==" in told["an int of its own, each"]["why again"]
    assert told["a float of its own, each"]["graphs"] == 2
    region = told["an int of its own, region"]  # torch 2.13 gives up, 2.11 does not
    assert region == {"subgraphs": 10, "calls of them": 10} or "maximum reuse entries" in region["raises"]
    assert h.record.facts["a block's graph takes in"] == {"tensors": 9, "weights among them": 6}
    assert h.record.facts["its guards"]["on which weight object it is"] == 0


def test_identity_guards_would_be_seen(h):
    """The count of them above is not 0 because no guard is written so."""
    model = mini(h)
    torch.compile(call_block, backend="eager")(model.blocks[0], torch.ones(1, 4, 64), model.cos[:4], model.sin[:4])
    assert any("ID_MATCH" in line for line in guards(call_block)[0])


def test_training(h):
    training(h)
    assert h.record.facts["graphs that each block compiled needs in training"] == {
        "all weights": 1, "embedding frozen": 2,
    }  # fmt: skip
    assert [check["passed"] for check in h.record.checks] == [True]


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


@pytest.mark.parametrize("kind", SCALES)
def test_blocks_with_a_number_are_right(h, kind):
    model, tokens = mini(h), h.randint(MINI.vocab, 1, 8)
    model.blocks = torch.nn.ModuleList(Scaled(MINI, SCALES[kind](i)) for i in range(3)).to(h.device).eval()
    with torch.no_grad():
        want = model(tokens)
        for way in (each_block, nested_region):
            torch.testing.assert_close(way(model, backend=Recorder())(tokens), want)


def test_module_compile_is_the_same(h):
    model, tokens = mini(h), h.randint(MINI.vocab, 1, 8)
    want = model(tokens)
    with empty_compiler(), watch() as seen:
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(model(tokens), want)
    assert seen.graphs == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=lambda way: way.__name__)
def test_bad_input(h, way):
    with pytest.raises(TypeError, match=rf"{way.__name__}: got a Linear; pass a harness.transformer.Transformer"):
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


def test_one_block_of_another_class(h):
    with torch.no_grad():
        one_block_of_another_class(h)
    told = h.record.facts["one block of three is of another class"]
    assert {told[name] for name in WAYS} == {"right"}
    if torch.__version__.startswith("2.11."):
        assert told["region marked on a function"] == "right"


@pytest.mark.gpu
def test_on_the_gpu():
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True), full=True)
    with settings_kept("demo", 0):
        demo(h)
    facts = h.record.facts
    few, many = facts["4 layers"], facts["16 layers"]
    assert many[EACH]["kernels generated"] == few[EACH]["kernels generated"]
    assert many[EACH]["cold s"] < 0.7 * many[WHOLE]["cold s"]
    assert facts["seconds a layer"][EACH] < 0.5 * facts["seconds a layer"][WHOLE]
    assert set(facts["training, 8 layers"]) == set(WAYS)
