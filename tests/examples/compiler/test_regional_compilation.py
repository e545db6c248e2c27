"""regional_compilation: what each way compiles, and that all are right."""

import functools
from dataclasses import replace

from harness import Harness
from harness.bench import Row, Table

import pytest
import torch

from compile_inspect import fresh_compiler, watch
from examples.common.transformer import TINY, Transformer
from examples.compiler import regional_compilation
from examples.compiler.regional_compilation import EACH, EAGER, NESTED, WAYS, WHOLE, demo
from tests.quiet import ran

MINI = replace(TINY, width=64, hidden=128, vocab=256, layers=3)


@pytest.fixture
def model(h) -> Transformer:
    return Transformer.random(MINI, h.device, torch.float32)


def test_what_each_way_traces_at_each_depth(monkeypatch):
    """The full run, on tiny blocks; with a backend that generates no code it needs seconds."""
    ways = {name: functools.partial(way, backend="aot_eager") for name, way in WAYS.items()}
    answers = []  # of times that another process may have made too uneven to answer from
    monkeypatch.setattr(Harness, "answer", lambda self, sentence: answers.append(sentence))
    for name, value in {"SMALL": MINI, "WAYS": ways, "warm_up": lambda device: None}.items():
        monkeypatch.setattr(regional_compilation, name, value)
    h = ran(demo, full=True, timing=True)
    (rows,) = h.record.facts.values()
    assert all(way["graphs"] == 1 for way in rows.values())
    few, many = (
        [rows[f"{layers} layers, {name}"]["ops traced"] for name in ("whole", "each block", "region")]
        for layers in (2, 12)
    )
    assert few[0] > 1.5 * few[1] == 1.5 * many[1]
    assert many[0] > 5 * few[0]
    assert few[2] < few[1]  # a call of the region is one
    assert answers[0]().startswith("Time to compile 2 and 12 layers: whole ")


@torch.no_grad()
def test_each_way_computes_what_eager_does_with_each_blocks_weights(h, model):
    tokens = h.randint(MINI.vocab, 2, 16)
    first = model(tokens)
    compiled = [way(model, backend="eager") for way in WAYS.values()]
    for fn in compiled:
        torch.testing.assert_close(fn(tokens), first, rtol=1e-4, atol=1e-4)
    model.blocks[-1].down.weight.mul_(2)
    want = model(tokens)
    assert not torch.allclose(first, want, rtol=1e-3, atol=1e-3)
    with watch() as seen:
        for fn in compiled:
            torch.testing.assert_close(fn(tokens), want, rtol=1e-4, atol=1e-4)
    assert seen.graphs == 0
    with fresh_compiler(), watch() as seen:  # what each_block's docstring says does the same
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(model(tokens), want)
    assert seen.graphs == 1


def test_the_answer_fits_and_has_the_hosts_share():
    times = {EAGER: (4.0, 1.0), WHOLE: (2.0, 1.0), EACH: (3.0, 1.0), NESTED: (2.0, 2.0)}
    rows = [Row(n, False, None, 0.0, ms=ms, speedup=4.0 / ms, gpu_ms=gpu) for n, (ms, gpu) in times.items()]
    table = Table("12 layers, forward", "", EAGER, rows)
    told = regional_compilation.answer(table, {name: {2: 18.75, 12: 21.75} for name in WAYS})
    assert told == (
        "Time to compile 2 and 12 layers: whole 18.8 and 21.8 s, each block 18.8 and 21.8 s, region 18.8 and 21.8 s. "
        "A call of 12, over eager (host twice as fast): whole 2.00x (2.00x), each block 1.33x (1.33x), "
        "region 2.00x (1.00x)."
    )


@pytest.mark.gpu
def test_on_the_gpu():
    (rows,) = ran(demo, full=True, timing=True, finish=False).record.facts.values()
    assert rows["12 layers, each block"]["kernels generated"] == rows["2 layers, each block"]["kernels generated"]
    kernels = [rows[f"12 layers, {way}"]["kernels generated"] for way in ("whole", "region", "each block")]
    assert kernels[0] > kernels[1] > kernels[2] > 0
    assert rows["12 layers, each block"]["cold s"] < 0.7 * rows["12 layers, whole"]["cold s"]
