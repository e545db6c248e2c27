"""Each operation against eager: special values, dtypes, promotion, and the shapes that views and reductions meet."""

import pytest
import torch
import torch.nn.functional as F

from tests.triton_compiler.helpers import DEVICE, check, compiled

NAN, INF = float("nan"), float("inf")
SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5, 2.5, 0.5, -0.5, 1e-3, 30.0, -30.0]
UNARY = """
exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc
erfinv sigmoid reciprocal neg abs sign floor ceil round trunc relu square isnan isinf isfinite logical_not frac sgn
positive nan_to_num deg2rad
"""
NO_INTEGERS = {"erfinv", "frac"}
BINARY = """
add sub mul div maximum minimum fmax fmin fmod remainder atan2 copysign eq ne lt le gt ge logical_and logical_or
logical_xor pow floor_divide hypot xlogy logaddexp
"""
INTEGER = """
add sub mul div maximum minimum fmod remainder eq lt bitwise_and bitwise_or bitwise_xor floor_divide
"""
BOOLEAN = """
add mul maximum minimum logical_and bitwise_and bitwise_xor eq ne gt
"""
FLOATS = [torch.float16, torch.float32, torch.float64] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def special(dtype=torch.float32):
    return torch.tensor(SPECIAL, device=DEVICE).to(dtype)


def pairs(a, b):
    return [each.contiguous().to(DEVICE) for each in torch.meshgrid(a, b, indexing="ij")]


def same(fn, *inputs, rtol=2e-5):
    """As eager on special values, where a float64 run would round to others."""
    graph, got = compiled(fn, *inputs)
    torch.testing.assert_close(got[0], fn(*inputs), rtol=rtol, atol=1e-5, equal_nan=True)
    assert not graph.lowered.fallbacks, graph.lowered.reasons


@pytest.mark.parametrize("name", UNARY.split())
def test_a_function_of_one_number(name):
    same(lambda x: getattr(torch, name)(x), special())
    same(lambda x: getattr(torch, name)(x), special(torch.float64))
    if name not in NO_INTEGERS:
        same(lambda x: getattr(torch, name)(x), torch.arange(-3, 4, device=DEVICE))


@pytest.mark.parametrize("name", BINARY.split())
def test_a_function_of_two_numbers(name):
    same(lambda x, y: getattr(torch, name)(x, y), *pairs(torch.tensor(SPECIAL), torch.tensor(SPECIAL)))


@pytest.mark.parametrize("name", INTEGER.split())
def test_integers(name):
    a, b = pairs(torch.arange(-6, 7), torch.tensor([-5, -3, -2, -1, 1, 2, 3, 7]))
    same(lambda x, y: getattr(torch, name)(x, y), a, b)
    same(lambda x, y: getattr(torch, name)(x, y), a.int(), b.to(torch.int8))  # the wider of two dtypes
    if "imum" not in name:
        same(lambda x: getattr(torch, name)(x, 3), a.to(torch.int16))


def test_small_integers_stay_as_small():
    """Between operations of one kernel too: 100 + 100 in int8 is -56."""
    x = torch.tensor([-100, -1, 0, 1, 100], dtype=torch.int8, device=DEVICE)
    same(lambda x: (torch.relu(x) + torch.relu(x)).float(), x)
    same(lambda x: (torch.sign(x) * 100 + x).float(), x)


@pytest.mark.parametrize("name", BOOLEAN.split())
def test_booleans(name):
    a, b = pairs(torch.tensor([True, False]), torch.tensor([True, False]))
    same(lambda x, y: torch.where(~x, y, x), a, b)
    same(lambda x, y: getattr(torch, name)(x, y), a, b)


@pytest.mark.parametrize("one", FLOATS)
@pytest.mark.parametrize("other", [*FLOATS, torch.int64, torch.uint8, torch.bool])
def test_types_are_promoted(one, other):
    x, y = torch.randn(6, 5, device=DEVICE).to(one), torch.randint(0, 2, (6, 5), device=DEVICE).to(other)
    check(lambda x, y: (x * y + 2, x / 3, x > y, torch.where(x > 0, x, y)), x, y)


def test_a_number_keeps_the_tensors_dtype():
    x = torch.arange(-3, 4, device=DEVICE)
    check(lambda x: (x + 1, x * 2.5, x / 2, x.to(torch.int8) * 100, x.bool(), x.double() * 0.1), x)


SHAPED = {
    "where": lambda x: torch.where(x > 0, x, 0.5 * x),
    "clamp": lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0.1), x.clamp(max=x * 0.5)),
    "pow": lambda x: (x**2, x.abs() ** 0.5, x.abs() ** 1.7, 2.0**x, x**3),
    "sums": lambda x: (x.sum(), x.sum(1), x.mean((0, 2)), x.sum(-1, keepdim=True)),
    "var": lambda x: (x.var(1), x.std((0, 1), keepdim=True), *torch.var_mean(x, -1), x.var(correction=0)),
    "prod": lambda x: (x.prod(1), x.prod()),
    "extrema": lambda x: (x.amax((1, 2)), *x.max(1), *x.min(0), x.max(), x.amin(0, keepdim=True)),
    "places": lambda x: (x.argmax(), x.argmin(0), x.argmax(2, keepdim=True)),
    "truth": lambda x: ((x > 1).any(1), (x > -1).all(), x.any(), x.bool().all(0)),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(-1), x.logsumexp(1)),
    "norms": lambda x: (x.norm(dim=1), torch.linalg.vector_norm(x, 1, (0, 1)), F.normalize(x, dim=1)),
    "layer_norm": lambda x: F.layer_norm(x, (5, 4)),
    "group_norm": lambda x: F.group_norm(x.reshape(5, 6, 4), 3),
    "activations": lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.hardswish(x), F.elu(x)),
    "more activations": lambda x: (F.softplus(x), F.logsigmoid(x), F.leaky_relu(x), F.hardsigmoid(x), F.glu(x, 0)),
    "losses": lambda x: (F.mse_loss(x, x * 2), F.l1_loss(x, x * 2), F.smooth_l1_loss(x, x * 2), F.huber_loss(x, x * 3)),
    "reshape": lambda x: (x.reshape(3, 2, 20) + 1, x.permute(2, 0, 1).reshape(8, 15) * 2, x.flatten(1) * 2),
    "as_strided": lambda x: (x.as_strided((4, 30), (1, 4)).reshape(6, 20) + 1, x.as_strided((2, 3), (1, 2)) * 2),
    "uneven reshape": lambda x: (x.transpose(0, 1) * 2).reshape(4, 30) + 1,
    "permute": lambda x: (x.permute(2, 0, 1) * 2, x.permute(2, 0, 1).contiguous(), x.movedim(0, 2) + 1),
    "slices": lambda x: (x[1:5:2, :, 1:] * 2, x[-2:] + 1, x[:, 2] + x[:, -1], x[:, :1] + x),
    "flip and roll": lambda x: (x.flip(0, 2) + 1, x.roll(2, 1) * 2),
    "diagonals": lambda x: (x[0].diagonal() * 2, x.tril(), x.triu(1) + 1),
    "expand": lambda x: (x[:, :1].expand(6, 5, 4) + x, x.repeat(2, 1, 3), x.unsqueeze(1) * 2),
    "cat": lambda x: (torch.cat([x, x * 2], 1), torch.stack([x, x + 1], 1), torch.cat([x, x[:1]], 0).sum(0)),
    "split": lambda x: ([c * 2 for c in x.chunk(2, 1)], sum(x.unbind(1)), x.split([1, 3], 2)[1] + 1),
    "pad": lambda x: (F.pad(x, (1, 2, 0, 1)), F.pad(x, (1, 1), value=3.0) * 2, F.pad(x, (1, 1), mode="reflect")),
    "unfold": lambda x: x.unfold(1, 3, 1) * 2,
    "scatters": lambda x: (torch.slice_scatter(x, x[:, :2] * 2, 1, 1, 3), torch.select_scatter(x, x[0] * 2, 0, 2)),
    "constants": lambda x: (torch.arange(4, device=x.device) * x, torch.full_like(x, 2.0) + x, x.new_ones(3)),
    "casts": lambda x: (x.to(torch.int32), x.half(), x.bool(), (x.abs() * 10).to(torch.uint8), x.double() * 0.1),
    "one number": lambda x: (x.sum() * 2, x[0, 0, 0] * 2 + x, x.mean() - x),
    "division": lambda x: (torch.div(x, 0.3, rounding_mode="floor"), torch.div(x, 0.3, rounding_mode="trunc"), 2 - x),
    "lerp": lambda x: (torch.addcmul(x, x, x, value=0.5), torch.lerp(x, x * 2, 0.3), torch.rsub(x, 1.0)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "products": lambda x: (x @ x.transpose(1, 2), torch.einsum("abc,dbc->ad", x, x), F.conv1d(x, x[:2, :, :3])),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPED)
def test_shapes(name):
    torch.manual_seed(0)
    check(SHAPED[name], torch.randn(6, 5, 4, device=DEVICE))


@pytest.mark.parametrize("name", ["sums", "extrema", "places", "softmax", "reshape", "cat", "slices", "var"])
def test_shapes_of_a_tensor_that_is_not_contiguous(name):
    torch.manual_seed(0)
    check(SHAPED[name], torch.randn(4, 6, 5, device=DEVICE).permute(1, 2, 0))
    check(SHAPED[name], torch.randn(6, 5, 8, device=DEVICE)[:, :, ::2].half())


INDEXED = {
    "index": lambda x, i: (x[i[:, 0], i[:, 1]], x[:, i], x[i[:, 0] - 5, :, i[:, 1] * 0]),
    "gather": lambda x, i: (x.gather(1, i[:, :, None]), x.index_select(1, i[:, 0])),
    "embedding": lambda x, i: (F.embedding(i, x[0]), F.embedding(i, (x * 2)[0]) + 1),
    "cross entropy": lambda x, i: F.cross_entropy(x[:3, :, 0], i[:, 0]),
    "comparison": lambda x, i: (torch.isin(i, i[:1, 0] + 1), F.one_hot(i[:, 0], 5)),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices(name):
    torch.manual_seed(0)
    i = torch.tensor([[0, 3], [4, 1], [2, 2]], device=DEVICE)
    _, got = compiled(INDEXED[name], torch.randn(6, 5, 4, device=DEVICE), i)
    torch.manual_seed(0)
    want = torch.utils._pytree.tree_leaves(INDEXED[name](torch.randn(6, 5, 4, device=DEVICE), i))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


SCATTERS = {
    "rows": lambda x, v, i: torch.index_put(x, (i,), v[:3, :2, None] * 2, accumulate=True),
    "columns": lambda x, v, i: x.index_add(1, i[:, 0] % 5, v[:, :3], alpha=2),
    "two axes": lambda x, v, i: torch.ops.aten.index_put(x, [i[:, 0], None, i[:, 1] % 4], v[:3, :1, 0], True),
    "later axes": lambda x, v, i: torch.ops.aten.index_put(x, [None, i % 5], v[0, 0, 0], True).relu().sum(1) + 1,
    "each element": lambda x, v, i: x.scatter_add(1, (i % 5)[:, :, None].expand(3, 2, 4), v.sin()),
    "no start": lambda x, v, i: torch.zeros_like(x).index_put((i % 2,), v[:3, :2, None], accumulate=True) * x,
    "twice": lambda x, v, i: [torch.zeros_like(x).index_add(0, i[:, k] % 6, v[:3] * x[:3]) for k in range(2)],
    "and its own sums": lambda x, v, i: (lambda y: (y, y.sum(), x * 2))(x.index_add(0, i[:, 0] % 6, v[:3])),
    "in place": lambda x, v, i: (lambda y: y.index_add_(0, i[:, 0] % 6, v[:3]).mul_(2))(x.clone()),
    "into a view": lambda x, v, i: x.transpose(0, 2).index_add(2, i[:, 0] % 6, v[:3].transpose(0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_additions_at_places_that_come_twice(name, dtype):
    torch.manual_seed(0)
    x, v = (torch.randn(6, 5, 4, device=DEVICE) * (3 if dtype is torch.int64 else 1) for _ in range(2))
    i = torch.tensor([[0, -3], [4, 1], [4, 2]], device=DEVICE)
    if dtype is torch.int64 and name == "each element":
        return  # there is no sine of integers
    check(SCATTERS[name], x.to(dtype), v.to(dtype), i)


@pytest.mark.parametrize("padding", [-1, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_backward_of_an_embedding(padding, dtype):
    """Of two tables: one kernel for the zeros, one for the additions and what comes before them, one for rounding."""
    torch.manual_seed(0)
    backward = torch.ops.aten.embedding_dense_backward
    i = torch.tensor([[0, 3], [4, 1], [4, 4]], device=DEVICE)
    graph = check(
        lambda g, i: (backward(g.sin() * 2, i, 7, padding, False), backward(g, i.flip(0), 7, padding, False)),
        torch.randn(3, 2, 8, device=DEVICE).to(dtype), i, kernels=2 + (dtype.itemsize == 2),
    )  # fmt: skip
    assert graph.wrapper.source.count("kernel") == 2 + (dtype.itemsize == 2)


def test_what_atomic_additions_cannot_do_is_left_to_eager():
    g, i = torch.randn(3, 8, device=DEVICE), torch.tensor([0, 2, 2], device=DEVICE)

    def backward(g, i):
        return torch.ops.aten.embedding_dense_backward(g, i, 5, -1, False)

    try:
        torch.use_deterministic_algorithms(True)
        check(backward, g, i, fallbacks=("aten._unsafe_index_put.default",))
    finally:
        torch.use_deterministic_algorithms(False)
    check(lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 5, -1, True), g, i)  # no fallback: counted here
    put = ("aten.index_put.default",)
    check(lambda g, i: g.to(torch.int8).index_put((i,), g[0].to(torch.int8), accumulate=True), g, i, fallbacks=put)
    check(lambda g, i: g.index_put((g > 0,), g[0, 0], accumulate=True), g, i, fallbacks=put)
    check(lambda g, i: g.index_put((i,), g[0]), g, i, fallbacks=put)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU an assertion ends the process's CUDA context")
def test_an_index_out_of_range_is_no_silent_read():
    with pytest.raises(Exception, match="out of range"):
        compiled(lambda x, i: x[i] * 2, torch.randn(3, device=DEVICE), torch.tensor([1, 3], device=DEVICE))
    x = torch.randn(3, device=DEVICE)
    for call, place in (
        (lambda x, i: x.index_put((i,), x[:2], accumulate=True), 3),
        (lambda x, i: x.scatter_add(0, i, x), -1),  # wraps nowhere but in an index
        (lambda x, i: x.gather(0, i), -1),
    ):
        with pytest.raises(Exception, match="out of range"):
            compiled(call, x, torch.tensor([1, place], device=DEVICE))


def test_nan_is_the_extremum_and_its_place():
    x = torch.tensor([[1.0, NAN, 3.0, NAN], [2.0, 2.0, -1.0, 0.0]], device=DEVICE)
    check(
        lambda x: (*x.max(1), *x.min(1), x.argmax(), x.amax(0), x.argmin(0), x.cummax(1)[0][:, -1]),
        x,
        fallbacks=("aten.cummax.default",),
    )


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 20000), (3, 16385), (2000, 3), (7, 1000), (300, 300)])
def test_rows_and_columns_of_all_lengths(rows, columns):
    x = torch.randn(rows, columns, device=DEVICE)
    check(lambda x: (x.softmax(1), x.sum(0), x.sum(), x.amax(1), x.mean(0, keepdim=True) - x), x)


def test_empty_and_zero_dimensional_tensors():
    x = torch.randn((), device=DEVICE)
    check(lambda x: (x + 1, x.sum(), x.softmax(0), x.expand(3) * 2), x)
    graph, got = compiled(lambda x: (x[:0] * 2, x[:0].sum(), x + 1), torch.randn(3, device=DEVICE))
    assert got[0].shape == (0,)
    assert got[1] == 0
    assert graph.lowered.fallbacks
