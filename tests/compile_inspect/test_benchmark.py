"""The phase benchmark: batch sizes, what is counted for the roofline, and the plot."""

import math
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compile_inspect import benchmark
from compile_inspect.benchmark import TF32, count, in_tf32, relative_error, roofline, tf32_unused, try_tf32
from compile_inspect.inspecting import run_phase
from compile_inspect.models import BUNDLED
from compile_inspect.report import Phase
from compile_inspect.subject import Subject, Timed

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


BACKENDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def precisions() -> tuple[str, ...]:
    """How float32 matmuls are computed, by torch's function and by each backend's own setting."""
    return torch.get_float32_matmul_precision(), *(backend.fp32_precision for backend in BACKENDS)


@pytest.fixture
def new_process():
    """Nobody has set a precision: that is another state than "highest", once set."""
    before = [backend.fp32_precision for backend in BACKENDS]
    for backend in BACKENDS:
        backend.fp32_precision = "none"
    yield
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


def test_float32_matmuls_are_counted_and_nothing_else():
    x, image, filters = torch.randn(8, 8), torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    calls = {
        "matmul": (lambda x: x @ x.sin(), (x,)), "bfloat16": (lambda x: x @ x, (x.bfloat16(),)),
        "convolution": (nn.functional.conv2d, (image, filters)), "pointwise": (torch.sin, (x,)),
    }  # fmt: skip
    counted = {name: count(Subject(fn, args), fn, args, {})["float32_matmuls"] for name, (fn, args) in calls.items()}
    assert counted == {"matmul": 1, "bfloat16": 0, "convolution": 0, "pointwise": 0}

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    assert count(Subject(cast, (x,)), cast, (x,), {})["float32_matmuls"] == 0
    layer, x = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval(), x[None]
    assert count(Subject(layer, (x,)), layer, (x,), {})["float32_matmuls"] == 1, "torch has one operator for all of it"


def test_tf32_is_tried_where_the_gpu_has_it_and_torch_leaves_it_unused(monkeypatch):
    subject, found = Subject(torch.sin, (torch.ones(4),)), {}
    assert not tf32_unused(subject)
    monkeypatch.setattr(Subject, "on_gpu", True)
    for capability in (7, 5), (8, 0), (12, 0):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, held=capability: held)
        found[capability] = tf32_unused(subject)
    assert found == {(7, 5): False, (8, 0): True, (12, 0): True}
    with in_tf32():
        assert not tf32_unused(subject)

    def mixed():
        raise RuntimeError("you have used mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert not tf32_unused(subject)


def test_the_precision_is_put_back_as_it_was(new_process):
    before = precisions()
    assert before == ("highest", "none", "none")
    with in_tf32():
        assert precisions() == ("high", "tf32", "tf32")
    assert precisions() == before
    with pytest.raises(ZeroDivisionError), in_tf32():
        1 / 0  # noqa: B018
    assert precisions() == before


@pytest.mark.parametrize("train", [False, True])
def test_the_model_is_compiled_again_in_tf32(monkeypatch, new_process, train):
    monkeypatch.setattr(benchmark, "SIZES", 1)
    monkeypatch.setattr(benchmark, "tf32_unused", lambda subject: True)
    before, compiled = precisions(), []

    def backend(graph, inputs):
        compiled.append(torch.get_float32_matmul_precision())
        return graph.forward

    compile_as_it_is = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_as_it_is(model, backend=backend))
    monkeypatch.setattr(benchmark, "warm_up", lambda device: None)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    phase = run_phase("benchmark", Subject(model, (torch.randn(4, 16),), train=train))
    assert phase.status == "passed", phase.reason
    assert compiled == ["highest", "high"], "a call in full precision finds its own cache entry again"
    assert phase.facts["tf32"]["speedup"] > 0
    assert phase.facts["tf32"]["error"] < 0.1
    assert precisions() == before


def test_inductor_compiles_it_again_in_tf32(monkeypatch):
    monkeypatch.setattr(benchmark, "SIZES", 1)
    monkeypatch.setattr(benchmark, "tf32_unused", lambda subject: True)
    before = precisions()
    phase = run_phase("benchmark", Subject(nn.Linear(16, 16), (torch.randn(4, 16),), train=True))
    assert phase.status == "passed", phase.reason
    facts = phase.facts["tf32"]
    assert facts["ms"] > 0
    assert facts["error"] < 0.01
    assert any(finding.fix == TF32 for finding in phase.findings) == (facts["from"] > benchmark.GAIN)
    assert precisions() == before


def made_up(monkeypatch, full: list[float], high: list[float], first_s: float = 1.0) -> Phase:
    """What try_tf32 makes of these milliseconds, turn by turn."""

    def in_turns(self, calls):
        assert [around is nullcontext for around in calls.values()] == [True, False]
        return [Timed(sum(ms) / len(ms), 0.0, ms) for ms in (full, high)]

    monkeypatch.setattr(Subject, "in_turns", in_turns)
    x, phase = torch.randn(8, 8), Phase("benchmark")
    subject = Subject(lambda x: x @ x, (x,))
    compiled = torch.compile(subject.model, backend="eager")
    compiled(x)
    try_tf32(subject, phase, lambda: subject.caller(compiled, (x.clone(),), {}), first_s)
    torch.compiler.reset()
    return phase


def test_what_tf32_gives_is_a_finding_or_a_note(monkeypatch):
    phase = made_up(monkeypatch, [10.0] * 5, [5.0] * 5)
    (finding,) = phase.findings
    assert (finding.fix, finding.ms, finding.share) == ('torch.set_float32_matmul_precision("high")', 5.0, 0.5)
    assert finding.tried.startswith("5 ms a call for 10, with a relative error of ")
    assert (phase.facts["tf32"]["speedup"], phase.blocks) == (2.0, [])
    noise = made_up(monkeypatch, [10.0] * 5, [5.0, 9.9, 10.0, 10.1, 12.0])
    assert noise.findings == []
    assert noise.blocks[0].text.startswith(f"Tried, without gain: {TF32}: 9.4 ms a call for 10")
    late = made_up(monkeypatch, [10.0] * 5, [5.0] * 5, first_s=benchmark.AGAIN + 1)
    assert (late.findings, late.facts) == ([], {})
    assert late.blocks[0].text == f"Not tried: {TF32}: no time left, as compiling takes 31 s."


def test_what_fails_in_tf32_is_a_note(monkeypatch):
    monkeypatch.setattr(benchmark, "SIZES", 1)
    monkeypatch.setattr(benchmark, "tf32_unused", lambda subject: True)

    @torch.compiler.disable
    def only_exact(x):
        if torch.get_float32_matmul_precision() != "highest":
            raise ValueError("only in full precision")
        return x

    before = precisions()
    phase = run_phase("benchmark", Subject(lambda x: only_exact(x @ x), (torch.randn(4, 4),)))
    assert (phase.status, "tf32" in phase.facts) == ("passed", False)
    assert not any(finding.fix == TF32 for finding in phase.findings)
    assert phase.blocks[-1].text.startswith(f"Tried: {TF32}: it fails: ValueError: only in full precision")
    assert phase.answer
    assert precisions() == before


def test_a_model_without_float32_matmuls_is_not_compiled_again(monkeypatch):
    monkeypatch.setattr(benchmark, "SIZES", 1)
    monkeypatch.setattr(benchmark, "tf32_unused", lambda subject: True)
    monkeypatch.setattr(benchmark, "try_tf32", None)
    phase = run_phase("benchmark", Subject(lambda x: x @ x, (torch.randn(4, 4).bfloat16(),)))
    assert phase.status == "passed", phase.reason
    assert not any(TF32 in block.text for block in phase.blocks)


def test_the_error_is_relative_and_told_where_calls_agree():
    full = [torch.tensor([3.0, 4.0, -math.inf]), torch.tensor([1, 2]), torch.zeros(2)]
    got = [torch.tensor([3.0, 4.5, -math.inf]), torch.tensor([2, 2]), torch.zeros(2)]
    assert relative_error(got, full) == pytest.approx(0.1)
    assert relative_error(full, full) == 0.0
    assert relative_error(full[1:2], full[1:2]) is None
    assert relative_error([torch.zeros(3)], [torch.zeros(2)]) is None
    state = torch.zeros(4)
    assert benchmark.error_in_tf32(lambda: lambda: state.add_(1)) is None
    assert benchmark.error_in_tf32(lambda: lambda: torch.rand(4)) == 0.0


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
