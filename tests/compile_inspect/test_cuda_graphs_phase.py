"""The phase cuda_graphs: what keeps a graph from being recorded, where there is no GPU to record it."""

import torch
from torch import nn

from compile_inspect import cuda_graphs
from compile_inspect.cuda_graphs import graphs_of
from compile_inspect.inspecting import run_phase
from compile_inspect.subject import Subject


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
    monkeypatch.setattr(cuda_graphs, "measure", lambda subject, mode: graphs if mode else run)
    monkeypatch.setattr(Subject, "on_gpu", True)
    monkeypatch.setattr(Subject, "synchronize", lambda subject: None)
    phase = run_phase("cuda_graphs", Subject(torch.tanh, (torch.ones(4),)))
    assert phase.status == "passed", phase.reason
    faster, skipped = phase.findings
    assert (faster.ms, faster.share) == (1.0, 0.5)
    assert "registered buffer" in skipped.fix
    assert phase.facts["graphs"][0]["on_cpu"][0].startswith("tanh")  # a CPU tensor in a model that is on a GPU
    assert phase.facts["recorded"] == 1


def test_the_backward_of_a_step_is_not_a_graph_of_dynamos():
    graphs = graphs_of(Subject(nn.Linear(4, 4), (torch.ones(2, 4),), train=True))
    assert len(graphs) == 1
