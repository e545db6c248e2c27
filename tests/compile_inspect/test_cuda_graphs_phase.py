"""The phase cuda_graphs: what keeps a graph from being recorded, where there is no GPU to record it."""

from collections import Counter
from contextlib import nullcontext
from statistics import median
from types import SimpleNamespace

import torch
from torch import nn
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

from compile_inspect import cuda_graphs, watch
from compile_inspect.cuda_graphs import graphs_of, measure
from compile_inspect.inspecting import run_phase
from compile_inspect.subject import Subject, Timed


def step(x, cache):
    cache.add_(x)
    y = x / x.abs().max().item()
    return y + torch.arange(4)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + torch.ones(4, device=x.device)


def test_what_keeps_a_graph_from_being_recorded():
    phase = run_phase("cuda_graphs", Subject(step, (torch.randn(4), torch.zeros(4))))
    assert phase.status == "passed", phase.reason
    first, second = phase.facts["graphs"]
    assert (first["writes_to"], first["on_cpu"]) == (["cache"], [])
    assert second["writes_to"] == []
    assert second["on_cpu"][0].startswith("arange (test_cuda_graphs_phase.py:")
    assert phase.facts["hindered"] == 2
    assert phase.facts["breaks"][0].endswith("y = x / x.abs().max().item()")
    if not torch.cuda.is_available():
        assert phase.facts["recorded"] == 0
        assert "cpu device" in first["skip"]
        assert phase.findings == []


def test_a_buffer_may_be_written_to():
    (graph,) = graphs_of(Subject(Counts(), (torch.ones(4),)))
    assert (graph["writes_to"], graph["on_cpu"], graph["unsafe"]) == ([], [], [])


def test_an_operation_whose_result_has_no_fixed_size():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (graph,) = graphs_of(Subject(lambda x: x.nonzero() + 1, (torch.ones(4),)))
    assert graph["unsafe"][0].startswith("nonzero")


def test_a_function_without_a_graph():
    phase = run_phase("cuda_graphs", Subject(lambda x: x, (torch.ones(4),)))
    assert (phase.status, phase.facts["graphs"]) == ("passed", [])


def test_what_is_said_on_a_gpu(monkeypatch):
    run = {"ms": 2.0, "host_ms": 1.9, "reserved": 10.0, "kernels": 30, "launched": 0, "held": 0, "idle": 0.6,
           "reasons": [], "skips": 0}  # fmt: skip
    reasons = ["skipping cudagraphs due to mutated inputs (1 instances)"]
    graphs = run | {"ms": 1.0, "held": 1, "launched": 1, "idle": 0.1, "reasons": reasons, "skips": 1}
    monkeypatch.setattr(cuda_graphs, "measure", lambda subject: (run, graphs, 2.0))
    monkeypatch.setattr(Subject, "on_gpu", True)
    monkeypatch.setattr(Subject, "synchronize", lambda subject: None)
    phase = run_phase("cuda_graphs", Subject(torch.tanh, (torch.ones(4),)))
    assert phase.status == "passed", phase.reason
    faster, skipped = phase.findings
    assert (faster.ms, faster.share) == (1.0, 0.5)
    assert "registered buffer" in skipped.fix
    assert phase.facts["graphs"][0]["on_cpu"][0].startswith("tanh")  # a CPU tensor in a model that is on a GPU
    assert phase.facts["recorded"] == 1


def test_both_modes_are_timed_in_turns_once_they_are_compiled(monkeypatch):
    """Of made-up times and a made-up GPU: what is logged, held and reserved is that of the mode whose calls made it."""
    held, compiled, turns = [0], [], []

    def in_turns(self, calls):
        with watch() as seen:
            turns.append([call() for call in calls])
        compiled.append(seen.graphs)
        columns = [[4.0, 2.0, 9.0], [2.0, 1.0, 3.0]]
        return [Timed(median(ms), 1.0, ms) for ms in columns]

    def kernels_run(call):
        held[0] += 100  # what comes after the calls have settled is no mode's
        return ["a", "b"], int(call is list(calls)[1])

    def graphs_held():  # the second mode's are there once both were asked for and its calls have been made
        return held[0] + 3 * (len(asked) == 2 and made["reduce-overhead"] >= 3)

    def snapshot():  # of the allocator, of a graph that was there before, and of this one
        pools = [(0, 0), (0, 1)] + [(0, 2)] * (graphs_held() % 100)
        return [{"segment_pool_id": pool, "total_size": 2**20} for pool in pools]

    calls, asked, made = {}, [], Counter()
    compiled_by = Subject.compiled

    def compile_in(self, mode):
        call = compiled_by(self, mode=mode)

        def counted():
            made[mode] += 1
            if mode and made[mode] == 2:
                log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs\nat line 3")
            return call()

        asked.append(mode)
        calls[counted] = mode
        return counted

    kernel = SimpleNamespace(time_range=SimpleNamespace(start=0.0, end=1e3), is_user_annotation=False,
                             device_type=torch.autograd.DeviceType.CUDA)  # fmt: skip
    twice = SimpleNamespace(events=lambda: [kernel, kernel])
    monkeypatch.setattr(Subject, "in_turns", in_turns)
    monkeypatch.setattr(Subject, "compiled", compile_in)
    monkeypatch.setattr(Subject, "profiled", lambda subject, call: twice)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda_graphs, "kernels_run", kernels_run)
    monkeypatch.setattr(cuda_graphs, "cuda_graphs_held", graphs_held)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    default, recorded, faster = measure(Subject(nn.Linear(4, 4), (torch.ones(2, 4),)))
    assert asked == [None, "reduce-overhead"]
    assert compiled == [0]  # neither call is compiled again beside the other
    assert torch.equal(*turns[0])
    assert (default["ms"], recorded["ms"], faster) == (4.0, 2.0, 2.0)
    assert (default["held"], recorded["held"]) == (0, 3)
    assert (default["reserved"], recorded["reserved"]) == (0.0, 3.0)
    assert (default["launched"], recorded["launched"]) == (0, 1)
    assert (default["idle"], recorded["idle"]) == (0.75, 0.5)
    assert (default["reasons"], default["skips"]) == ([], 0)
    assert recorded["reasons"] == ["skipping cudagraphs due to mutated inputs"]
    assert recorded["skips"] >= 1
    assert default.keys() == recorded.keys() == {"ms", "host_ms", "idle", "kernels", "launched", "held", "reserved",
                                                 "reasons", "skips"}  # fmt: skip


def test_the_backward_of_a_step_is_not_a_graph_of_dynamos():
    graphs = graphs_of(Subject(nn.Linear(4, 4), (torch.ones(2, 4),), train=True))
    assert len(graphs) == 1
