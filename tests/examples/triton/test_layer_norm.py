"""layer_norm: two forward and three backward kernels against float64, autograd, and the exchange between programs."""

from harness.catalog import Needs
from harness.check import judge, poisoned_outputs
from harness.codegen import compile_for
from harness.hardware import interpreted
from harness.session import Harness

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.common.rows import DTYPES, column_sums
from examples.triton import layer_norm_backward_split as split
from examples.triton.layer_norm import (
    ROWS_MAX,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    layer_norm_rows,
    reference,
    reference_step,
    step,
)
from examples.triton.layer_norm_backward import (
    BACKWARD_ROWS_MAX,
    layer_norm_backward_loop,
    layer_norm_backward_rows,
    reference_backward,
)
from examples.triton.layer_norm_backward_split import SPLIT_BLOCK, layer_norm_backward_split, split_max_cols
from examples.triton.layer_norm_resident import layer_norm_resident

FORWARDS = [layer_norm_rows, layer_norm_resident]
BACKWARDS = [layer_norm_backward_rows, layer_norm_backward_loop]
ALL_BACKWARDS = [*BACKWARDS, pytest.param(layer_norm_backward_split, marks=pytest.mark.gpu)]
by_forward = pytest.mark.parametrize("forward", FORWARDS)
by_backward = pytest.mark.parametrize("backward", ALL_BACKWARDS)
# One element, a prime, around one tile of several kernels, more rows than a program or a group takes.
SHAPES = [(1, 1), (70, 1), (3, 781), (5, 256), (17, 257), (2, 4096), (2, 4097), (75, 33)]


def width(forward, cols):
    """As many columns as the kernel takes."""
    return min(cols, ROWS_MAX) if forward is layer_norm_rows else cols


def inputs(h, rows, cols, dtype=torch.float32, wide=None):
    """x, weight, bias, dy; weight and bias in `wide` if given."""
    x, dy = h.randn(rows, cols, dtype=dtype, scale=2.0), h.randn(rows, cols, dtype=dtype)
    weight, bias = (h.randn(cols, dtype=wide or dtype) for _ in range(2))
    return x + 1, weight, bias, dy


def statistics(x, eps=1e-5):
    """mean and rstd in float64, rounded once."""
    x = x.double()
    return x.mean(1).float(), ((x - x.mean(1, keepdim=True)).square().mean(1) + eps).rsqrt().float()


def check_forward(forward, x, weight, bias, eps=1e-5, **budget):
    """y against float64, and mean and rstd, which are float32 whatever x is."""
    what = f"{forward.__name__} {tuple(x.shape)}"
    with poisoned_outputs(what):
        y, mean, rstd = forward(x, weight, bias, eps)
    judge(y, reference(x, weight, bias, eps), what=what, dtype=x.dtype, terms=x.shape[1], **budget)
    x = x.double()
    for got, want in ((mean, x.mean(1)), (rstd, (x.var(1, unbiased=False) + eps).rsqrt())):
        judge(got, want, what=what, dtype=torch.float32, terms=x.shape[1], constant_ok=True, **budget)


def check_backward(backward, dy, x, weight, **budget):
    """dx sums over columns, the gradients of weight and bias over rows: each with its own budget."""
    args = (dy, x, weight, *statistics(x))
    what = f"{backward.__name__} {tuple(x.shape)}"
    with poisoned_outputs(what):
        dx, dweight, dbias = backward(*args)
    want = reference_backward(*args)
    judge(dx, want[0], what=f"{what} dx", dtype=x.dtype, terms=x.shape[1], **budget)
    for name, got, sums in (("dweight", dweight, want[1]), ("dbias", dbias, want[2])):
        judge(got, sums, what=f"{what} {name}", dtype=weight.dtype, terms=x.shape[0], **budget)


@by_forward
def test_forward_shapes(h, forward):
    for rows, cols in SHAPES:
        for dtype in (torch.float32, torch.float16):
            x, weight, bias, _ = inputs(h, rows, width(forward, cols), dtype=dtype)
            check_forward(forward, x, weight, bias)
    x, weight, bias, _ = inputs(h, 0, 300)
    y, mean, rstd = forward(x, weight, bias)
    assert (y.shape, mean.shape, rstd.shape) == (x.shape, (0,), (0,))


@by_backward
def test_backward_shapes(h, backward):
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float16):
            x, weight, _, dy = inputs(h, *shape, dtype=dtype)
            if shape[1] > 1:
                check_backward(backward, dy, x, weight)
                continue
            dx, dweight, dbias = backward(dy, x, weight, *statistics(x))  # one column: y is the bias, whatever x is
            assert dx.abs().max() < 1e-3 * dy.abs().max()  # rstd is 316 here: what is left is the rounding of 316 - 316
            assert torch.equal(dweight, torch.zeros_like(weight))
            assert torch.allclose(dbias.double(), dy.double().sum(0), rtol=1e-3, atol=1e-3)
    x, weight, _, dy = inputs(h, 0, 300)
    dx, dweight, dbias = backward(dy, x, weight, *statistics(x))
    assert dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros_like(weight))  # sums of nothing
    assert torch.equal(dbias, torch.zeros_like(weight))


# From 30 columns on: of few, mean and variance leave next to nothing, and dx is what is left of a subtraction.
@settings(max_examples=6)
@given(rows=st.integers(1, 12), cols=st.integers(30, 1500), offset=st.sampled_from([0.0, -3.0]))
def test_any_shape(rows, cols, offset):
    h = Harness("test", Needs.parse("triton"))
    x, weight, bias, dy = inputs(h, rows, cols)
    for forward in FORWARDS:
        n = width(forward, cols)
        check_forward(forward, (x + offset)[:, :n], weight[:n], bias[:n])
    for backward in BACKWARDS if interpreted() else [*BACKWARDS, layer_norm_backward_split]:
        check_backward(backward, dy, x, weight)


@pytest.mark.parametrize(("rows", "cols"), [(5, 300), (3, BACKWARD_ROWS_MAX + 1)])
def test_float32_weights(h, rows, cols):
    for dtype in {torch.float16, h.half}:
        x, weight, bias, dy = inputs(h, rows, cols, dtype=dtype, wide=torch.float32)
        check_forward(layer_norm_forward, x, weight, bias)
        check_backward(layer_norm_backward, dy, x, weight)


@pytest.mark.parametrize(
    ("cols", "rows"),
    # Of layer_norm_resident too, whose steps change with the length of a row.
    [(ROWS_MAX, 2), (ROWS_MAX + 1, 2), (2049, 2), (4097, 2), (BACKWARD_ROWS_MAX, 2), (BACKWARD_ROWS_MAX + 1, 2),
     (16 * 1024 + 1, 1), (32 * 1024 + 1, 1), (64 * 1024 + 1, 1)],
)  # fmt: skip
def test_where_one_kernel_ends_and_the_next_begins(h, cols, rows):
    x, weight, bias, dy = inputs(h, rows, cols, dtype=h.half)
    check_forward(layer_norm_forward, x, weight, bias)
    check_backward(layer_norm_backward, dy, x, weight)


@by_forward
def test_forward_of_rows_apart_in_memory(h, forward):
    x, weight, bias, _ = inputs(h, 9, 1000)
    for rows in (x[:, 100:881], x[::2, :781], x[:1, :781].expand(6, 781)):  # the last: one row in memory, six in view
        check_forward(forward, rows, weight[:781], bias[:781])


@by_backward
def test_backward_of_rows_apart_in_memory(h, backward):
    x, weight, _, dy = inputs(h, 9, 1000)
    check_backward(backward, dy[:, 3:784], x[:, 100:881], weight[:781])
    check_backward(backward, dy[::2, :781], x[:5, :781], weight[:781])
    check_backward(backward, dy[:1, :781].expand(9, 781), x[:, :781], weight[:781])


@by_forward
def test_a_mean_far_above_the_spread(h, forward):
    """A variance made as E[x^2] - E[x]^2 would be noise: at a mean of 3000, float32 keeps 1 of the 9000001 apart."""
    x, weight, bias, _ = inputs(h, 4, width(forward, 3000))
    for offset in (300.0, -3000.0):
        # x is exact; what float32 cannot hold is the mean, and y carries half a unit in its last place.
        half_a_unit = abs(offset) * torch.finfo(torch.float32).eps
        check_forward(forward, x + offset, weight, bias, operand_eps=half_a_unit)


@by_forward
def test_lanes_without_an_element_do_not_count(h, forward):
    """Of a power of two, 300 columns leave some empty, which lie at 0: here that is 1e20 from the row, whose square is
    infinite."""
    x, weight, bias, _ = inputs(h, 4, 300)
    check_forward(forward, (1 + 1e-3 * x) * 1e20, weight, bias, operand_eps=1e3 * torch.finfo(torch.float32).eps)


@by_forward
def test_rows_without_variance_are_the_bias(h, forward):
    for cols in (781, width(forward, 4096), width(forward, 5000)):
        weight, bias = h.randn(cols), h.randn(cols)
        x = torch.tensor([0.0, 1.0, -0.1, 1000.1], device=h.device)[:, None].expand(4, cols).contiguous()
        y, mean, rstd = forward(x, weight, bias)
        assert torch.equal(y, bias.expand(4, cols))
        assert torch.equal(mean, x[:, 0])
        assert torch.allclose(rstd, torch.full_like(rstd, 1e-5**-0.5), rtol=1e-2)


@by_forward
def test_large_tiny_and_eps(h, forward):
    x, weight, bias, _ = inputs(h, 4, width(forward, 3000))
    check_forward(forward, x * 1e15, weight, bias)
    check_forward(forward, x * 1e-15, weight, bias, eps=1e-30)
    check_forward(forward, x, weight, bias, eps=0.0)
    check_forward(forward, x * 1e-3, weight, bias, eps=10.0)


@by_forward
def test_infinities_and_nan_forward(h, forward):
    x, weight, bias, _ = inputs(h, 8, width(forward, 5000))
    inf, nan = float("inf"), float("nan")
    x[0, 0], x[1, 7], x[2, -1], x[3, 11], x[4, -1] = inf, inf, -inf, nan, nan
    x[5] = inf
    h.check(lambda *args: forward(*args)[0], reference, x, weight, bias, terms=x.shape[1], what="rows with inf and NaN")


@by_backward
def test_nan_backward(h, backward):
    x, weight, _, dy = inputs(h, 8, SPLIT_BLOCK[32] + 900)
    mean, rstd = statistics(x)
    dy[2, 5] = dy[3, -1] = float("nan")
    rstd[6] = float("nan")  # as the forward leaves it where x has one
    dx, dweight, dbias = backward(dy, x, weight, mean, rstd)
    assert dx.isnan().all(dim=1).tolist() == [False, False, True, True, False, False, True, False]
    assert not dx[[0, 1, 4, 5, 7]].isnan().any()
    assert dweight.isnan().all()
    assert dbias.isnan().nonzero().flatten().tolist() == [5, x.shape[1] - 1]


@by_forward
def test_rows_have_mean_0_and_variance_1(h, forward):
    x, weight, bias, _ = inputs(h, 20, width(forward, 5000))
    y = forward(x, torch.ones_like(weight), torch.zeros_like(bias))[0].double()
    assert y.mean(1).abs().max() < 1e-5
    assert (y.var(1, unbiased=False) - 1).abs().max() < 1e-4


@by_backward
def test_dx_is_orthogonal_to_what_layer_norm_removes(h, backward):
    """Shifting or scaling a row does not change y, so its gradient has no part along either."""
    x, weight, _, dy = inputs(h, 20, 5000)
    mean, rstd = statistics(x)
    dx = backward(dy, x, weight, mean, rstd)[0].double()
    assert dx.square().mean() > 0.01  # nothing would be orthogonal too
    assert dx.sum(1).abs().max() < 1e-3
    assert (dx * (x - mean[:, None]).double()).sum(1).abs().max() < 1e-2


def test_column_sums_of_more_parts_than_a_step_takes(h):
    for cols in (70, 4200):
        parts, like = h.randn(2, 130, cols), h.randn(cols, dtype=torch.float16)
        h.check(lambda p, like=like: column_sums(p, like), lambda p: p.double().sum(1).unbind(), parts,
                dtype=torch.float16, terms=130)  # fmt: skip


@pytest.mark.parametrize("shape", [(300,), (4, 300), (2, 3, 5, 300), (2, 0, 300), (1, ROWS_MAX + 5)])
def test_autograd(h, shape):
    x, weight, bias, dy = h.randn(*shape), h.randn(shape[-1]), h.randn(shape[-1]), h.randn(*shape)
    h.check(layer_norm, reference, x, weight, bias, terms=shape[-1])
    h.check(step(layer_norm), reference_step, x, weight, bias, dy, terms=max(shape[-1], x.numel() // shape[-1]))


def test_autograd_of_layouts_that_must_be_copied(h):
    """Leading dimensions that cannot be merged; gradients that are one number expanded, or a transposed matrix."""
    x, weight, bias = h.randn(6, 4, 300).transpose(0, 1), h.randn(300), h.randn(300)
    h.check(step(layer_norm), reference_step, x, weight, bias, h.randn(4, 6, 300), terms=300)
    for dy in (h.randn(1).expand(6, 300), h.randn(300, 6).t()):
        h.check(step(layer_norm), reference_step, x[0], weight, bias, dy, terms=300, constant_ok=True)


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()])
def test_a_second_derivative_is_refused(h, loss):
    """Of a linear loss too, whose dy requires no grad: there a derivative of 0 would go unnoticed."""
    x = h.randn(4, 8).requires_grad_()
    weight, bias = h.randn(8).requires_grad_(), h.randn(8)
    (dx,) = torch.autograd.grad(loss(layer_norm(x, weight, bias)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="layer_norm: its gradient has no derivative"):
        dx.square().sum().backward()


@pytest.mark.parametrize("forward", [*FORWARDS, layer_norm_forward, layer_norm])
def test_bad_eps(h, forward):
    x, weight, bias, _ = inputs(h, 2, 8)
    for eps in (None, "x", True, torch.tensor(1e-5)):
        with pytest.raises(TypeError, match=r"layer_norm[a-z_]*: eps is .*; pass a Python number"):
            forward(x, weight, bias, eps)
    for eps in (-1e-5, float("nan"), float("inf"), 1e300):
        with pytest.raises(ValueError, match=r"layer_norm[a-z_]*: eps is .*from 0 up"):
            forward(x, weight, bias, eps)


def test_a_module_learns_with_it(h):
    """A few steps of gradient descent: autograd's leaves get their gradients, and they point downhill."""
    x, target = h.randn(64, 100), h.randn(64, 100)
    weight, bias = torch.ones(100, device=h.device).requires_grad_(), torch.zeros(100, device=h.device).requires_grad_()
    losses = []
    for _ in range(3):
        loss = (layer_norm(x, weight, bias) - target).square().mean()
        loss.backward()
        with torch.no_grad():
            for leaf in (weight, bias):
                leaf -= 5 * leaf.grad
                leaf.grad = None
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


@triton.jit
def peek_at_once(ptr):
    """What is in the mailbox now, in place of _peek, which is assembly."""
    return tl.load(ptr)


@triton.jit
def receive_at_once(ptr, word):
    """What was in the mailbox, in place of _receive, which waits."""
    first = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    second = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return first, second


def in_two_runs(monkeypatch):
    """layer_norm_backward_split where programs run one after the other: what a program sends does not depend on what it
    receives, so after a first run over every program the mailbox is full, and a second one computes with it."""
    mailboxes = []

    def mailbox(x, parts):
        if not mailboxes:
            mailboxes.append(torch.full((1 + x.shape[0] * parts,), -1, dtype=torch.int64, device=x.device))
        mailboxes[0][0] = -1  # the tickets start again
        return mailboxes[0]

    monkeypatch.setattr(split, "interpreted", lambda: False)
    monkeypatch.setattr(split, "_peek", peek_at_once)
    monkeypatch.setattr(split, "_receive", receive_at_once)
    monkeypatch.setattr(split, "_mailbox", mailbox)
    monkeypatch.setattr(split, "SPLIT_BLOCK", {16: 64, 32: 64})
    monkeypatch.setattr(split, "split_max_cols", lambda device: 1000)  # nothing waits, so any number of parts will do

    def twice(*args):
        mailboxes.clear()
        layer_norm_backward_split(*args)
        return layer_norm_backward_split(*args)

    twice.__name__ = "layer_norm_backward_split"
    return twice


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # what the first of two runs finds in empty mailboxes
@pytest.mark.parametrize(("rows", "cols"), [(2, 64), (11, 60), (5, 320), (25, 100), (2, 500)])
def test_the_split_kernel_interpreted(h, monkeypatch, rows, cols):
    if not interpreted():
        pytest.skip("compiled kernels cannot be given another way to receive")
    for dtype in (torch.float32, torch.float16):
        x, weight, _, dy = inputs(h, rows, cols, dtype=dtype)
        check_backward(in_two_runs(monkeypatch), dy, x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [64, 1024, 4096, 8192, 12000, 16384, 20000, 65536, 131072, 200_000])
def test_benchmark_widths(h, cols):
    for dtype in DTYPES:
        for wide in {dtype, torch.float32}:
            x, weight, bias, dy = inputs(h, 300, cols, dtype=dtype, wide=wide)
            check_forward(layer_norm_forward, x, weight, bias)
            check_backward(layer_norm_backward, dy, x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_rows_finish_many_times_over(h, dtype):
    """Programs of one group wait for each other: many launches, few and many rows, odd numbers of parts."""
    for rows, cols in ((1, 131072), (1000, 40000), (5000, 3 * 8192 + 1), (3, split_max_cols(h.device)), (2, 50)):
        x, weight, _, dy = inputs(h, rows, cols, dtype=dtype)
        for _ in range(4):
            check_backward(layer_norm_backward_split, dy, x, weight)


@pytest.mark.gpu
def test_split_rows_of_several_streams_finish(h):
    x, weight, _, dy = inputs(h, 500, 65536, dtype=torch.bfloat16)
    mean, rstd = statistics(x)
    want = layer_norm_backward_split(dy, x, weight, mean, rstd)[0]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    got = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(layer_norm_backward_split(dy, x, weight, mean, rstd)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(dx, want) for dx in got)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [1024, 8192, 20000, 65536])
def test_the_same_bits_each_run(h, cols):
    """No atomic adds: which program does a group's work varies, what is added to what does not."""
    x, weight, bias, dy = inputs(h, 3001, cols, dtype=torch.bfloat16)
    mean, rstd = statistics(x)
    first = *layer_norm_forward(x, weight, bias), *layer_norm_backward(dy, x, weight, mean, rstd)
    for _ in range(3):
        again = *layer_norm_forward(x, weight, bias), *layer_norm_backward(dy, x, weight, mean, rstd)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(40)
    for cols in (1000, 12000, 50000):
        rows = 2**31 // cols + 5
        x, dy = (torch.empty(rows, cols, dtype=torch.bfloat16, device=h.device).normal_() for _ in range(2))
        weight, bias = (h.randn(cols, dtype=torch.bfloat16) for _ in range(2))
        y, mean, rstd = layer_norm_forward(x, weight, bias)
        dx, dweight, dbias = layer_norm_backward(dy, x, weight, mean, rstd)
        for part in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(-3, None)):
            h.check(lambda *_, y=y, part=part: y[part], reference, x[part], weight, bias, terms=cols, what="y")
            h.check(
                lambda *_, dx=dx, part=part: dx[part], lambda *a: reference_backward(*a)[0],
                dy[part], x[part], weight, mean[part], rstd[part], terms=cols, what="dx",
            )  # fmt: skip
        assert torch.isfinite(y).all()
        assert torch.isfinite(dx).all()
        h.check(lambda *_, got=dbias: got, lambda dy: dy.sum(0, dtype=torch.float64), dy, terms=rows, what="dbias")
        assert torch.isfinite(dweight).all()
        del x, dy, y, dx


def refused(call, bad):
    for *args, error, message in bad.values():
        with pytest.raises(error, match=f"{call.__name__}: .*{message}"):
            call(*args)


@pytest.mark.parametrize("forward", [*FORWARDS, layer_norm_forward])
def test_bad_input_forward(h, forward):
    x, weight, bias = h.randn(4, 8), torch.ones(8, device=h.device), torch.zeros(8, device=h.device)
    refused(forward, {
        "no tensor": ([1.0], weight, bias, TypeError, r"torch\.Tensor"),
        "integers": (x.int(), weight, bias, TypeError, r"torch\.int32"),
        "float64": (x.double(), weight, bias, TypeError, r"torch\.float64"),
        "a vector": (x[0], weight, bias, ValueError, r"\(8,\)"),
        "no columns": (x[:, :0], weight[:0], bias[:0], ValueError, r"\(4, 0\) has no columns"),
        "columns apart": (x.t(), weight[:4], bias[:4], ValueError, r"strides \(1, 8\)"),
        "no weight": (x, None, bias, TypeError, "weight is None"),
        "no bias": (x, weight, None, TypeError, "bias is None"),
        "a short weight": (x, weight[:7], bias, ValueError, r"weight has shape \(7,\)"),
        "a matrix as bias": (x, weight, bias[None], ValueError, r"bias has shape \(1, 8\)"),
        "weights apart": (x[:, :4].contiguous(), weight[::2], bias[::2], ValueError, r"strides \(2,\)"),
        "half weights": (x, weight.half(), bias.half(), TypeError, r"weight is torch\.float16"),
        "two dtypes": (x.half(), weight.half(), bias, TypeError, r"bias is torch\.float32"),
        "requires grad": (x, weight.clone().requires_grad_(), bias, RuntimeError, "no backward"),
        "another device": (x, weight.to("meta"), bias, ValueError, "one device"),
        "a device without kernels": (x.to("meta"), weight.to("meta"), bias.to("meta"), RuntimeError, "on meta"),
    })  # fmt: skip


@pytest.mark.parametrize("backward", [*BACKWARDS, layer_norm_backward_split, layer_norm_backward])
def test_bad_input_backward(h, backward):
    x, weight = h.randn(4, 8), torch.ones(8, device=h.device)
    mean, rstd = statistics(x)
    refused(backward, {
        "no weight": (x, x, None, mean, rstd, TypeError, "weight is None"),
        "dy of another shape": (x[:3], x, weight, mean, rstd, ValueError, r"dy is \(3, 8\)"),
        "dy of another dtype": (x.half(), x, weight, mean, rstd, ValueError, r"dy is .*float16, but x is .*float32"),
        "dy apart": (x[0, 0].expand(4, 8), x, weight, mean, rstd, ValueError, r"dy has strides \(0, 0\)"),
        "mean of another dtype": (x, x, weight, mean.half(), rstd, TypeError, r"mean is torch\.float16"),
        "mean as a column": (x, x, weight, mean[:, None], rstd, ValueError, r"mean has shape \(4, 1\)"),
        "rstd of other rows": (x, x, weight, mean, rstd[:3], ValueError, r"rstd has shape \(3,\)"),
        "requires grad": (x, x.clone().requires_grad_(), weight, mean, rstd, RuntimeError, "no backward"),
    })  # fmt: skip


def test_bad_input_of_layer_norm(h):
    x, weight, bias = h.randn(2, 8), h.randn(8), h.randn(8)
    refused(layer_norm, {
        "a number": (x[0, 0], weight, bias, ValueError, r"shape \(\) has no columns"),
        "no columns": (x[:, :0], weight, bias, ValueError, r"shape \(2, 0\) has no columns"),
        "no tensor": ([1.0], weight, bias, TypeError, r"torch\.Tensor"),
    })  # fmt: skip
    with pytest.raises(TypeError, match="weight is None"):
        layer_norm(x, None, bias)


def test_a_kernel_refuses_what_it_cannot_do(h):
    x, weight, bias, dy = inputs(h, 1, ROWS_MAX + 1)
    with pytest.raises(ValueError, match=f"a row may have {ROWS_MAX} here; call layer_norm_forward"):
        layer_norm_rows(x, weight, bias)
    x, weight, bias, dy = inputs(h, 1, BACKWARD_ROWS_MAX + 1)
    with pytest.raises(ValueError, match=f"a row may have {BACKWARD_ROWS_MAX} here; call layer_norm_backward"):
        layer_norm_backward_rows(dy, x, weight, *statistics(x))
    if interpreted():
        with pytest.raises(RuntimeError, match="wait for each other; in the interpreter use layer_norm_backward_loop"):
            layer_norm_backward_split(dy, x, weight, *statistics(x))
    cols = split_max_cols(h.device)
    x, weight, _, dy = inputs(h, 1, cols + 1)
    with pytest.raises(ValueError, match=f"{cols + 1} columns, but a row may have {cols} here"):
        layer_norm_backward_split(dy, x, weight, *statistics(x))
    check_backward(layer_norm_backward, dy, x, weight)  # goes on with the loop


def compiled(wrapper, cols, sm, dtype=torch.bfloat16, wide=None):
    """The kernel of that wrapper, on 4096 rows; all that it launches compile and fit."""
    meta = {"device": "meta"}
    x, weight = torch.empty(4096, cols, dtype=dtype, **meta), torch.empty(cols, dtype=wide or dtype, **meta)
    stats = torch.empty(4096, dtype=torch.float32, **meta)
    args = (x, x, weight, stats, stats) if "backward" in wrapper.__name__ else (x, weight, weight)
    kernels = compile_for(wrapper, args, sms=(sm,))
    assert [kernel.error for kernel in kernels] == [None] * len(kernels)
    assert all(kernel.fits for kernel in kernels), [kernel.shared for kernel in kernels]
    (main,) = (kernel for kernel in kernels if kernel.kernel == f"{wrapper.__name__}_kernel")
    return main


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize(
    ("wrapper", "cols", "instructions", "spills"),
    [
        (layer_norm_rows, 1024, ("ld.global.v4", "st.global.v4"), 0),
        (layer_norm_resident, 16384, ("ld.global.v4", "st.global.v4"), 0),
        (layer_norm_resident, 65536, ("ld.global.v4", "st.global.v4"), 16),
        (layer_norm_backward_rows, 8192, ("cp.async", "st.global.v4"), 16),
        (layer_norm_backward_split, 65536, ("cp.async", "atom", "st.global.v4"), 128),
    ],
)
def test_generated_code(wrapper, cols, instructions, spills, sm):
    main = compiled(wrapper, cols, sm)
    assert main.spills <= spills
    assert all(main.found.get(name) for name in instructions), main.found


@pytest.mark.parametrize(
    ("dtype", "wide", "sm"),
    [(torch.float16, torch.float16, 90), (torch.bfloat16, torch.float32, 90), (torch.float32, torch.float32, 120)],
)
def test_generated_code_of_other_dtypes(dtype, wide, sm):
    """Values of 32 bits take twice the registers and shared memory; each kernel still fits and keeps its loads."""
    for wrapper, cols in ((layer_norm_backward_rows, BACKWARD_ROWS_MAX), (layer_norm_backward_split, 65536)):
        main = compiled(wrapper, cols, sm, dtype, wide)
        assert main.spills <= 128
        assert main.found["cp.async"]
