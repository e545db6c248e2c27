"""What a trace says of the collectives in it, and of the time in which they are hidden."""

import pytest
import torch

from examples.common.collectives import MARK, Trace, drawn, in_graph, length, read, sent_in_ring, shared, traced, united

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name, start, end):
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}


def call(name, dims, dtype, cat="user_annotation", ts=0):
    return {"cat": cat, "name": name, "ts": ts, "args": {"Input Dims": dims, "Input type": dtype}}


def test_times_are_united_and_shared():
    assert united([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert shared([(0, 4), (5, 7)], [(1, 2), (3, 6)]) == [(1, 2), (3, 4), (5, 6)]
    assert length([(0, 4), (5, 7)]) == 6
    assert united([]) == shared([], [(0, 1)]) == []


def test_communication_is_hidden_where_another_kernel_runs():
    """Two kernels at once hide it once; an annotation on the GPU is no kernel."""
    events = [
        kernel(NCCL, 1000, 5000), kernel("gemm", 0, 2000), kernel("triton_", 1500, 2500), kernel("gemm", 6000, 9000),
        {"cat": "gpu_user_annotation", "name": "nccl:all_reduce", "ts": 1000, "dur": 4000},
    ]  # fmt: skip
    trace = read(events)
    assert (trace.communicating, trace.overlap) == (4.0, 0.375)
    assert trace == Trace({}, [(1.0, 5.0)], [(0.0, 2.5), (6.0, 9.0)])
    assert (read(events[1:]).nccl, read(events[1:]).communicating, read(events[1:]).overlap) == ([], 0, 0.0)


def test_only_the_marked_call_is_read():
    """Kernels and collectives before it belong to the call that warmed the profiler up."""
    mark = {"cat": "user_annotation", "name": MARK, "ts": 5500, "dur": 4000}
    events = [kernel(NCCL, 1000, 5000), kernel(NCCL, 6000, 7000), kernel("gemm", 6500, 9000), mark]
    events += [call("nccl:all_reduce", [[8]], ["float"], ts=ts) for ts in (900, 5600)]
    trace = read(events)
    assert (trace.sent, trace.communicating, trace.overlap) == ({"all_reduce": (1, 32)}, 1.0, 0.5)
    assert trace.others == [(0.5, 3.0)]


def test_spans_that_nearly_touch_are_drawn_as_one():
    assert drawn([(0, 1), (1.01, 2), (2.5, 3)]) == [0, 2, 2.5, 3]
    assert drawn([]) == []


def test_the_second_call_under_the_profiler_is_read():
    calls = []
    assert traced(calls.append, 0) == Trace({}, [], [])
    assert calls == [0, 0]


def test_a_trace_without_kernels():
    assert read([]).overlap == 0.0


def test_bytes_are_counted_by_collective_and_dtype():
    trace = read([
        call("nccl:all_reduce", [[3, 5]], ["float"]), call("nccl:all_reduce", [[8]], ["c10::BFloat16"]),
        call("gloo:_allgather_base", [[4], []], ["signed char", ""]), call("aten::mm", [[3, 5]], ["float"]),
        call("nccl:all_reduce", [[3, 5]], ["float"], cat="gpu_user_annotation"),
        call("nccl:all_gather_into_tensor_coalesced", [], []),
    ])  # fmt: skip
    assert trace.sent == {
        "all_reduce": (2, 76), "allgather_base": (1, 4), "all_gather_into_tensor_coalesced": (1, 0)
    }  # fmt: skip


def test_a_collective_that_has_not_ended_has_no_bytes():
    event = {"cat": "user_annotation", "name": "gloo:all_reduce", "ts": 0, "dur": 1, "args": {"finished": False}}
    with pytest.raises(RuntimeError, match="gloo:all_reduce had not ended when the profiler stopped"):
        read([event])


def test_a_graph_says_what_it_sends():
    graph, ops = torch.fx.Graph(), torch.ops._c10d_functional
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(6, 4, dtype=torch.bfloat16, device="meta")
    for target, options in (
        (ops.all_gather_into_tensor.default, (3, "0")), (ops.reduce_scatter_tensor.default, ("sum", 3, "0")),
        (ops.all_reduce.default, ("sum", "0")), (ops.all_reduce.default, ("sum", "0")),
    ):  # fmt: skip
        graph.call_function(ops.wait_tensor.default, (graph.call_function(target, (x, *options)),))
    sent = in_graph(graph)
    assert sent == {"all_gather": (1, 48), "reduce_scatter": (1, 48), "all_reduce": (2, 96)}
    assert sent_in_ring(sent, 3) == 2 * 48 + 2 * 48 // 3 + 2 * 2 * 96 // 3
    assert sent_in_ring(sent, 1) == 0
