"""What becomes one kernel, and why it ends where it ends."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.triton_compiler.helpers import DEVICE, check, compiled
from triton_compiler import lowering
from triton_compiler.capture import plan_graph
from triton_compiler.decompose import decompositions
from triton_compiler.explain import bytes_of
from triton_compiler.ir import Reduction


def x(*shape):
    return torch.randn(*shape, device=DEVICE)


ONE = {
    "a chain": lambda x: torch.sin(x) * x + 1,
    "siblings": lambda x: (x * 2, x + 1, x.exp()),
    "softmax": lambda x: torch.softmax(x, -1),
    "layer norm and what follows": lambda x: F.gelu(F.layer_norm(x, (x.shape[-1],))) + x,
    "row statistics": lambda x: (x.mean(1), x.var(1), x.amax(1), x.argmax(1)),
    "an activation and its column sums": lambda x: (lambda y: (y, y.sum(0)))(F.relu(x)),
    "cat, slices and a rotation": lambda x: x * 2 + torch.cat([-x[:, 8:], x[:, :8]], 1),
    "a reduction of a broadcast": lambda x: (x.unsqueeze(1) - x.unsqueeze(0)).square().sum(-1),
    "a permutation": lambda x: (x.t().reshape(4, 4, 12) + 1).sum(-1) * 2,
}


@pytest.mark.parametrize("name", ONE)
def test_one_kernel(name):
    check(ONE[name], x(12, 16), kernels=1)


def test_a_matmul_has_its_epilogue_in_one_kernel():
    graph = check(lambda x, w, b: F.gelu(x @ w + b) * 2, x(8, 6), x(6, 10), x(10), kernels=1)
    assert len(graph.lowered.externs) == 1
    assert {each.reason for each in graph.fusion.boundaries} == set()


def test_a_convolutions_bias_is_added_by_what_reads_its_result():
    graph = check(lambda x, w, b: F.conv2d(x, w, b).relu(), x(2, 3, 8, 8), x(4, 3, 3, 3), x(4), kernels=1)
    (call,) = graph.lowered.externs
    assert len(call.reads) == 2


def halves(x, w):
    """Rotary positions read a product through a reshape of a reshape, half against half."""
    q, k, _ = (x @ w).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    q1, q2 = q.chunk(2, -1)
    return q * 2 + torch.cat([-q2, q1], -1), k + 1


def test_what_a_library_reads_or_made_is_not_copied():
    check(halves, x(2, 5, 16), x(16, 48), kernels=1)
    heads = x(2, 5, 3, 8).transpose(1, 2)  # as attention leaves them: the reshape makes one axis of two
    check(lambda a, w: a.transpose(1, 2).flatten(2) @ w, heads, x(24, 6), kernels=0)


def test_the_same_value_is_computed_once():
    """Two rotations have one table, whoever wrote it twice."""
    graph = check(lambda x, y: (x * torch.sin(x + 1), y * torch.sin(x + 1)), x(12, 16), x(12, 16), kernels=1)
    assert next(iter(graph.sources.values())).text.count("tl.sin(") == 1


def test_the_reason_of_a_boundary():
    graph = check(lambda x: (lambda y: y.sum(1, keepdim=True) * y.sum(0))(x * x.exp()), x(12, 16))
    assert {each.reason for each in graph.fusion.boundaries} <= {
        "other sizes",
        "reductions of other sizes",
        "reductions over other axes",
    }
    assert graph.fusion.boundaries


def test_only_what_others_read_is_stored():
    graph = check(lambda x: torch.softmax(x * 2, -1), x(12, 16), kernels=1)
    (kernel,) = graph.sources
    assert len(kernel.stored) == 1
    assert bytes_of(kernel, graph.fusion) == 2 * 12 * 16 * 4


def test_cheap_values_are_computed_again():
    """Casts and constants, in each kernel that needs them: nothing but the two outputs is stored."""
    graph = check(lambda x: (lambda y: (y.sum(0), y.sum(1)))(x.float() * 1.5), x(12, 16).half())
    assert sum(len(kernel.stored) for kernel in graph.sources) == 2


def test_a_producer_between_two_calls_waits_for_neither():
    """Merging what comes before a matmul with what comes after it would be a cycle."""
    graph = check(lambda x: (lambda y: (y @ y.t()) @ y + x.sin())(x.cos()), x(12, 16))
    assert len(graph.sources) == 2


def test_a_row_that_does_not_fit_is_walked(monkeypatch):
    from triton_compiler import schedule

    monkeypatch.setattr(schedule, "PERSISTENT", 8)
    graph = check(lambda x: (torch.softmax(x, -1), F.layer_norm(x, (50,)).relu()), x(12, 50))
    assert all("for rbase in range" in source.text for source in graph.sources.values())
    (source,) = check(lambda x: torch.softmax(x, -1), x(12, 50), kernels=1).sources.values()
    assert source.text.count("for rbase") == 2, "maximum and sum in one pass"
    infinite = x(4, 50)
    infinite[0, :20] = infinite[1, 25:] = float("-inf")
    check(lambda x: torch.log_softmax(x, -1), infinite)
    got = compiled(lambda x: torch.softmax(x, -1), torch.full((2, 50), float("-inf"), device=DEVICE))[1][0]
    assert got.isnan().all()


PLACES_OF_A_ROW = {
    "a row times an element": lambda x, t, i: x * t[i(x), 0, None],
    "a row and another": lambda x, t, i: x + t[i(x)],
    "reduced again": lambda x, t, i: (x * t[i(x), 0, None]).amax(1),
    "of a place that was gathered": lambda x, t, i: (x * t[i(t[i(x)]), 0, None]).sum(1),
    "of each element": lambda x, t, i: torch.softmax(t[i(x)[:, None] - x.long() % 3, 0], 1),
    "in a cat": lambda x, t, i: x + torch.cat([t[:, 0].sin(), t[:, 1]])[i(x) + 3, None],
    "in an arange": lambda x, t, i: x + torch.arange(7, device=x.device)[i(x), None],
    "rows are added": lambda x, t, i: t.index_put((i(x),), x, accumulate=True),
    "elements are added": lambda x, t, i: t.scatter_add(0, i(x)[:, None] - x.long() % 2, x),
    "all to one": lambda x, t, i: t[:, 0].index_put((i(x)[:, None].expand_as(x),), x, accumulate=True),
    "others are added": lambda x, t, i: t.index_add(0, i(x), x.sin()),
    "an embedding": lambda x, t, i: torch.ops.aten.embedding_dense_backward(x.softmax(1), i(x), 7, 2, False),
    "added, and gathered": lambda x, t, i: t.index_add(0, i(x), x)[i(x)] * x.sum(1, keepdim=True),
}


@pytest.mark.parametrize("persistent", [8, 16384])
@pytest.mark.parametrize("name", PLACES_OF_A_ROW)
def test_places_that_a_reduction_computes(monkeypatch, name, persistent):
    """A gather, or an addition, waits for its place: rows that are walked are read again for it."""
    from triton_compiler import schedule

    monkeypatch.setattr(schedule, "PERSISTENT", persistent)
    torch.manual_seed(0)
    numbers = torch.randint(-2, 3, (12, 50), device=DEVICE).float()  # whose sums no order of additions changes
    check(lambda x, t: PLACES_OF_A_ROW[name](x, t, lambda row: row.sum(1).long() % 5 + 2), numbers, numbers[:7] / 2)


def test_a_large_reduction_is_split(monkeypatch):
    """Few results of many numbers: parts in programs of their own, and their results in a second kernel."""
    monkeypatch.setattr(lowering, "SPLIT_PROGRAMS", 16)
    monkeypatch.setattr(lowering, "REGISTER_ROW", 64)
    check(lambda x: x.sum(), x(64, 1024), kernels=2)
    check(lambda x: (x * 2).amax(0), x(2048, 8), kernels=2)
    check(lambda x: (*torch.var_mean(x, (0, 2)), x.argmax()), x(16, 4, 1024))
    check(lambda x: F.batch_norm(x, None, None, training=True), x(16, 4, 1024))


BETWEEN = {
    "a value": lambda a, b, c: (a + b + c).contiguous().sin(),
    "sums of windows": lambda a, b, c: a.contiguous().unflatten(2, (3, 2)).unflatten(4, (3, 2)).sum((3, 5)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_memory_between_kernels_lies_as_what_it_is_computed_from(name):
    """Channels last, though torch's own kernels would make it contiguous there; what is returned is as torch has it."""

    def between(a, b, c):
        y = BETWEEN[name](a, b, c)
        return (y / y.sum()).contiguous(memory_format=torch.channels_last), y.sum((2, 3))

    graph = check(between, *(x(2, 4, 6, 6).to(memory_format=torch.channels_last) for _ in range(3)))
    made = [root for kernel in graph.sources for root in kernel.stored if len(root.shape) == 4 and root.strides[1] == 1]
    assert len(made) == 2, "the value and the result"
    check(BETWEEN[name], *(x(2, 4, 6, 6).to(memory_format=torch.channels_last) for _ in range(3)))


def test_a_reduction_is_split_along_what_is_outermost_in_memory(monkeypatch):
    """A group norm of channels last, which torch would copy first: parts of the image, not a part for each channel."""
    monkeypatch.setattr(lowering, "SPLIT_PROGRAMS", 16)
    image = x(2, 8, 64, 64).to(memory_format=torch.channels_last)
    graph = check(lambda x: torch.var_mean(x.contiguous().view(2, 1, 8, 64 * 64), (2, 3)), image)
    sums = [root for kernel in graph.sources for root in kernel.roots if isinstance(root, Reduction)]
    assert all(64 * 64 not in root.args[0].shape for root in sums), [root.args[0].shape for root in sums]


def test_a_convolutions_backward_reads_channels_last_where_its_input_has_them():
    def backward(grad, image, weight):
        arguments = [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        return torch.ops.aten.convolution_backward(grad.sin(), image, weight, *arguments)

    inputs = x(2, 4, 6, 6), x(2, 3, 6, 6).to(memory_format=torch.channels_last), x(4, 3, 3, 3)
    graph, got = compiled(backward, *inputs)
    (call,) = graph.lowered.externs
    assert call.reads[0].strides[1] == 1
    torch.testing.assert_close(got, list(backward(*inputs)), rtol=1e-3, atol=1e-3)


def test_memory_of_dead_buffers_is_used_again():
    graph, _ = compiled(lambda x, w: ((((x @ w).relu() @ w).relu() @ w).relu() @ w).relu(), x(8, 8), x(8, 8))
    assert "view(buf" in graph.wrapper.source


def test_indices_have_64_bits_where_32_are_too_few():
    with FakeTensorMode():
        gm = make_fx(lambda x: [x * 2], decomposition_table=decompositions())(torch.empty(3, 2**30, device=DEVICE))
    (source,) = plan_graph(gm).sources.values()
    assert "tl.program_id(0).to(tl.int64)" in source.text


def test_column_sums_beside_reductions_of_rows(monkeypatch):
    """The backward of a norm: one kernel reads gradient and input once, a second adds the parts of the sums."""
    from triton_compiler import fusion

    monkeypatch.setattr(lowering, "SPLIT_PROGRAMS", 16)
    monkeypatch.setattr(fusion, "WALKERS", 16)

    def backward(g, x, mean, rstd, w, b):
        return torch.ops.aten.native_layer_norm_backward(g, x, [50], mean, rstd, w, b, [True, True, True])

    rows = 512
    graph = check(backward, x(rows, 50), x(rows, 50), x(rows, 1), x(rows, 1).abs(), x(50), x(50))
    assert any("for windex in range" in source.text for source in graph.sources.values())
