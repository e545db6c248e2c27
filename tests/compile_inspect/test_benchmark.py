"""The phase benchmark: batch sizes, what is counted for the roofline, and the plot."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compile_inspect import benchmark
from compile_inspect.benchmark import count, roofline
from compile_inspect.inspecting import run_phase
from compile_inspect.models import BUNDLED
from compile_inspect.subject import Subject

N = 64 * 64 * 4  # bytes


def test_one_graph_serves_every_batch(monkeypatch):
    monkeypatch.setattr(benchmark, "SIZES", 3)
    weight = torch.randn(16, 16)
    phase = run_phase("benchmark", Subject(lambda x: torch.tanh(x @ weight), (torch.randn(4, 16),)))
    assert phase.status == "passed", phase.reason
    facts = phase.facts
    assert [row["batch"] for row in facts["sizes"]] == [2, 4, 8]
    assert [row["recompiled"] for row in facts["sizes"]] == [0, 0, 0]
    assert facts["graphs"] == 1
    assert [row["flops"] for row in facts["sizes"]] == [2 * batch * 16 * 16 for batch in (2, 4, 8)]
    here = facts["sizes"][1]
    assert (facts["batch"], facts["eager_ms"], facts["speedup"]) == (4, here["eager_ms"], here["speedup"])
    assert all(facts["ceilings"][key] > 0 for key in ("bytes_per_s", "flops_per_s", "launch_us"))


def test_a_size_that_fails_is_left_out(monkeypatch):
    monkeypatch.setattr(benchmark, "SIZES", 2)
    sent = []
    subject = Subject(lambda x: x.view(4, 4) + 1, (torch.ones(4, 4),))
    phase = run_phase("benchmark", subject, lambda phase: sent.append("speedup" in phase.facts))
    assert sent[1], "the given size is told before another one may take too long"
    assert [row["batch"] for row in phase.facts["sizes"]] == [4]
    assert phase.facts["left_out"][0].startswith("8 (RuntimeError")


def test_what_dynamo_leaves_to_eager_is_skipped():
    phase = run_phase("benchmark", Subject(lambda x: x.tolist(), (torch.ones(4),)))
    assert (phase.status, phase.facts) == ("skipped", {})


def test_sizes_and_the_tensors_that_have_the_batch():
    assert benchmark.sizes_around(4) == [4, 8, 2, 16, 1]
    assert benchmark.sizes_around(100) == [100, 128, 64, 256, 32, 16, 8, 4]
    assert benchmark.sizes_around(None) == [None]
    x, w = torch.arange(6.0).view(3, 2), torch.ones(2, 2)
    (grown, kept), kwargs = Subject(torch.add, (x, w), {"m": [x, "s"]}).resized(5)
    assert torch.equal(grown, x[[0, 1, 2, 0, 1]])
    assert kept.shape == w.shape
    assert kwargs["m"][0].shape == (5, 2)


def test_no_batch_is_smaller_than_an_index_into_it():
    nodes, edges = torch.randn(8, 3), torch.tensor([[0, 5], [5, 1]])
    phase = run_phase("benchmark", Subject(lambda x, edges: x.index_select(0, edges[0]), (nodes, edges)))
    assert min(row["batch"] for row in phase.facts["sizes"]) == 8
    assert "4 (another input may index 6 rows)" in phase.facts["left_out"]
    least = [Subject(torch.add, (nodes, each)).least_batch for each in (edges + 3, torch.arange(8), edges > 0, nodes)]
    assert least == [1, 1, 1, 1]  # past the batch, of the batch, no indices


def test_bytes_of_operations_and_of_the_call():
    x, y = torch.randn(64, 64), torch.randn(64, 64)

    def fn(x, y):
        return torch.sin(x.t()) * y.view(-1).view(64, 64) + x

    work = count(Subject(fn, (x, y)), fn, (x, y), {})
    assert [moved for _, moved in work["operations"]] == [2 * N, 3 * N, 3 * N]  # the views are free
    assert work["compiled_bytes"] == 3 * N


def test_flops_are_torchs_and_an_embedding_reads_its_rows():
    model, args = BUNDLED["mlp"]()
    with FlopCounterMode(display=False) as counter:
        model(*args)
    assert count(Subject(model, args), model, args, {})["flops"] == counter.get_total_flops() > 0
    table, rows = nn.Embedding(1000, 16), torch.tensor([3, 5])
    work = count(Subject(table, (rows,)), table, (rows,), {})
    assert work["operations"] == [(0, 2 * 2 * 16 * 4 + 2 * 8)]
    assert work["compiled_bytes"] == 2 * 2 * 16 * 4 + 2 * 8


def test_launches_hide_on_a_gpu_and_add_up_on_a_cpu():
    work = {"operations": [(0, 1000), (2000, 0)], "flops": 2000, "compiled_bytes": 500}
    top = {"bytes_per_s": 1e6, "flops_per_s": 1e6, "launch_us": 1500.0}
    gpu, cpu = roofline(work, 1, top, True), roofline(work, 1, top, False)
    assert (gpu["roofline_eager_ms"], gpu["roofline_compiled_ms"], gpu["bound"]) == (3.0, 2.0, "arithmetic")
    assert (cpu["roofline_eager_ms"], cpu["roofline_compiled_ms"]) == (6.0, 3.5)


def test_the_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    row = {"batch": 4, "eager_ms": 2.0, "compiled_ms": 1.0, "roofline_eager_ms": 0.5, "roofline_compiled_ms": 0.2}
    benchmark.png({"sizes": [row, {"batch": 8, "eager_ms": 4.0, "compiled_ms": 2.0}]}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RuntimeError, match="nothing was measured"):
        benchmark.png({}, tmp_path / "b.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="matplotlib"):
        benchmark.png({"sizes": [row]}, tmp_path / "c.png")
