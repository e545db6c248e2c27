"""rms_norm: forward and backward kernels against float64, with and without the residual, and autograd."""

from functools import partial
from unittest.mock import patch

from harness.check import judge, poisoned_outputs
from harness.codegen import compile_for
from harness.hardware import interpreted

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.rows import DTYPES
from examples.common.training import forward_backward, in_float64
from examples.triton import layer_norm_long
from examples.triton import rms_norm as lesson
from examples.triton import rms_norm_backward as backwards
from examples.triton import rms_norm_long as long
from examples.triton.rms_norm import (
    reference,
    reference_step,
    rms_norm,
    rms_norm_forward,
    torch_add,
    torch_norm,
)
from examples.triton.rms_norm_backward import reference_backward
from tests.examples.triton.helpers import INF, NAN, harness, meta, refused
from tests.examples.triton.test_layer_norm import (
    fit,
    one_graph,
    peek_at_once,
    receive_at_once,
    refused_by_compiled,
    twice_in_turn,
)

SPLIT = backwards.rms_norm_backward_split
BACKWARDS = [backwards.rms_norm_backward_rows, backwards.rms_norm_backward_loop]
by_backward = pytest.mark.parametrize("backward", [*BACKWARDS, pytest.param(SPLIT, marks=pytest.mark.gpu)])


def operands(h, *shape, dtype=torch.float32, wide=None):
    """x, weight, residual, dy; weight in `wide` if given."""
    x, residual, dy = (h.randn(*shape, dtype=dtype, scale=2.0) for _ in range(3))
    return x, h.randn(shape[-1], dtype=wide or dtype), residual, dy


def rstd_of(x, eps=1e-6):
    return (x.double().square().mean(1) + eps).rsqrt().float()


def written_out(x, weight, residual):
    """The formula, for rows with an infinity: rstd is 0, finite elements are too, and the infinity is NaN. Not torch's
    kernel, whose CUDA version in float64, and only there in these tests, makes the whole row NaN."""
    summed = x.double() + residual.double()
    return summed * (summed.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double(), summed


def check_forward(h, x, weight, residual=None, eps=1e-6, **budget):
    """y and the sum against float64, and rstd, which is float32 whatever x is."""
    what = f"{tuple(x.shape)} {x.dtype}{' residual' * (residual is not None)}"
    with poisoned_outputs(what):
        y, summed, rstd = rms_norm_forward(x, weight, residual, eps)
    exact = x.double() if residual is None else (x.double() + residual.double()).to(x.dtype).double()
    judge(y, reference(exact, weight, eps), what=what, dtype=x.dtype, terms=x.shape[1], **budget)
    if residual is None:
        assert summed is None
    else:
        judge(summed, x.double() + residual.double(), what=what, dtype=x.dtype, terms=0, roundings=1, constant_ok=True)
    want = (exact.square().mean(1) + eps).rsqrt()
    judge(rstd, want, what=what, dtype=torch.float32, terms=x.shape[1], constant_ok=True)


def check_backward(backward, dy, x, weight, dsum=None):
    """dx sums over columns, the gradient of weight over rows: each with its own budget."""
    args = (dy, x, weight, rstd_of(x), dsum)
    what = f"{backward.__name__} {tuple(x.shape)}"
    with poisoned_outputs(what):
        got = backward(*args)
    for name, part, want in zip(("dx", "dweight"), got, reference_backward(*args), strict=True):
        dtype, terms = (x.dtype, x.shape[1]) if name == "dx" else (weight.dtype, x.shape[0])
        judge(part, want, what=f"{what} {name}", dtype=dtype, terms=terms, constant_ok=x.shape[0] == 0)


def test_layouts(h):
    """Rows apart, a start that is not aligned, one row in memory and six in view; rows of both kernels."""
    x, weight, residual, dy = operands(h, 9, 9000, dtype=torch.float16)
    for cols in (781, 8400):
        for of in (lambda t, c=cols: t[:, 100 : 100 + c], lambda t, c=cols: t[:1, :c].expand(3, c)):
            check_forward(h, of(x)[:3], weight[:cols], of(residual)[:3])
        check_backward(backwards.rms_norm_backward, dy[:3, 3 : 3 + cols], x[:3, 100 : 100 + cols], weight[:cols])


@by_backward
def test_nan_in_backward(h, backward):
    x, weight, residual, dy = operands(h, 9, 1100)
    dy[2, 5] = dy[3, -1] = x[6, 7] = residual[1, 1] = NAN
    check_backward(backward, dy, x, weight, residual)


def test_extreme_rows(h):
    for cols in (3000, 8200):
        x, weight, residual, _ = operands(h, 5, cols)
        for factor, eps in ((1e15, 1e-6), (1e-15, 1e-36), (1, 0.0), (1e-3, 10.0)):
            check_forward(h, x[:2] * factor, weight, eps=eps)
        x[0, 0], x[1, 7], x[2, -1], x[3, 11], residual[4, -1] = INF, -INF, NAN, INF, NAN
        h.check(rms_norm, written_out, x, weight, residual, terms=cols, stores=2, what="rows with inf and NaN")
        x = torch.tensor([0.0, 1.0, -0.1], device=h.device)[:, None].expand(3, cols).contiguous()
        check_forward(h, x, weight, constant_ok=True)


def both_gradients(fn, x, weight, residual, dy, dsum):
    leaves = [t.detach().requires_grad_() for t in (x, weight, residual)]
    with torch.enable_grad():
        y, summed = fn(*leaves)
        return torch.autograd.grad((y, summed), leaves, (dy, dsum))


def test_autograd(h):
    """Any number of dimensions, also some that cannot be merged; gradients of one number expanded, or transposed; of y
    or of the sum alone; and no second derivative, of a linear loss neither, whose dy requires no grad."""
    weight = h.randn(300)
    for x in (h.randn(300), h.randn(2, 3, 5, 300), h.randn(2, 0, 300), h.randn(6, 4, 300).transpose(0, 1)):
        h.check(forward_backward(rms_norm), reference_step, x, weight, h.randn(*x.shape), terms=300)
        inputs = x, weight, h.randn(*x.shape), h.randn(*x.shape), h.randn(*x.shape)
        h.check(partial(both_gradients, rms_norm), in_float64(partial(both_gradients, torch_add)), *inputs, terms=300)
    x, residual = h.randn(6, 300), h.randn(6, 300)
    for dy in (h.randn(1).expand(6, 300), h.randn(300, 6).t()):
        h.check(forward_backward(rms_norm), reference_step, x, weight, dy, terms=300, constant_ok=True)
    for i in (0, 1):
        one, want = (forward_backward(lambda *args, fn=fn, i=i: fn(*args)[i]) for fn in (rms_norm, torch_add))
        inputs = (x, weight, residual) if i == 0 else (x, residual)
        if i == 1:  # the sum does not depend on the weight
            one, want = (
                forward_backward(lambda x, r, fn=fn: fn(x, weight.to(x), r)[1]) for fn in (rms_norm, torch_add)
            )
        h.check(one, in_float64(want), *inputs, h.randn(6, 300), terms=300)
    x.requires_grad_()
    for loss in (torch.sum, lambda y: y.square().sum()):
        (dx,) = torch.autograd.grad(loss(rms_norm(x, weight.requires_grad_())), x, create_graph=True)
        with pytest.raises(RuntimeError, match="rms_norm: its gradient has no derivative"):
            dx.square().sum().backward()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # what the first of two runs finds in empty mailboxes
@pytest.mark.skipif(not interpreted(), reason="compiled kernels cannot be given another way to receive")
def test_the_split_kernel_interpreted(h, monkeypatch):
    """Programs run one after the other. What they send does not depend on what they receive, so after a first run the
    mailbox is full, and a second one computes with it."""
    box = torch.empty(100, dtype=torch.int64)
    stand_ins = {
        "interpreted": lambda: False, "peek": peek_at_once, "receive": receive_at_once, "new_mailbox": lambda *_: box,
        "split_shape": lambda *_: (64, 1, 1),
        "split_limit": lambda *_: 1000,  # nothing waits, so any number of parts will do
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(backwards, name, stand_in)
    for i, shape in enumerate([(2, 64), (5, 320), (7, 100)]):
        x, weight, residual, dy = operands(h, *shape, dtype=(torch.float32, torch.float16)[i % 2])
        for dsum in (None, residual):
            box.fill_(-1)
            SPLIT(dy, x, weight, rstd_of(x), dsum)
            box[0] = -1  # the tickets start again
            check_backward(SPLIT, dy, x, weight, dsum)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # what the first of two runs finds in empty mailboxes
@pytest.mark.skipif(not interpreted(), reason="compiled kernels cannot be given another way to receive")
def test_the_split_forward_interpreted(h, monkeypatch):
    """Of long rows, by programs that own 64 columns: slices that are not full, more rows than groups."""
    run = twice_in_turn(monkeypatch, layer_norm_long, 64)
    launch = layer_norm_long.launch_split
    for name, stand_in in {
        "interpreted": lambda: False, "split_limit": lambda *_: 1000,
        "launch_split": lambda *args: run(launch, *args),
    }.items():  # fmt: skip
        monkeypatch.setattr(long, name, stand_in)
    monkeypatch.setattr(lesson, "ROWS_BYTES", 0)
    for i, shape in enumerate([(2, 64), (5, 320), (7, 100), (9, 65), (1, 300)]):
        x, weight, residual, _ = operands(h, *shape, dtype=(torch.float32, torch.float16)[i % 2])
        for other in (None, residual):
            check_forward(h, x, weight, other)
    x, weight, residual, _ = operands(h, 5, 300)
    check_forward(h, x[:, 100:250], weight[:150], residual[:, 7:157])
    for factor, eps in ((1e15, 1e-6), (1e-15, 1e-36), (1, 0.0), (1e-3, 10.0)):
        check_forward(h, x[:2] * factor, weight, eps=eps)
    x[0, 0], x[1, 7], x[2, -1], x[3, 11], residual[4, -1] = INF, -INF, NAN, INF, NAN
    h.check(rms_norm, written_out, x, weight, residual, terms=300, stores=2, what="rows with inf and NaN")


@given(
    rows=st.integers(0, 12), cols=st.integers(2, 300), block=st.sampled_from((64, 128, 1 << 20)),
    dtype=st.sampled_from(DTYPES[:2]), residual=st.booleans(), wide=st.booleans(),
)  # fmt: skip
def test_any_shape(rows, cols, block, dtype, residual, wide):
    """In steps of some columns: none, one or several whole blocks and a rest or none; or held in registers."""
    h = harness()
    x, weight, other, dy = operands(h, rows, cols, dtype=dtype, wide=torch.float32 if wide else None)
    stand_ins = {"BLOCK_BYTES": block, "split_limit": lambda *_: 0}  # on a GPU, too, no programs that share rows
    with patch.object(lesson, "ROWS_BYTES", 0 if block < 1 << 20 else block), patch.multiple(long, **stand_ins):
        check_forward(h, x, weight, other if residual else None, constant_ok=True)
    for backward in BACKWARDS:
        check_backward(backward, dy, x, weight, other if residual else None)


def test_bad_input(h):
    x, weight, residual, dy = operands(h, 4, 8)
    for forward in (rms_norm, rms_norm_forward):
        refused(forward, ValueError, r"residual is \(3, 8\)", x, weight, residual[:3])
        refused(forward, ValueError, r"residual is .*float16, but x is", x, weight, residual.half())
    refused(rms_norm_forward, TypeError, "weight is None", x, None)
    for error, eps in ((TypeError, True), (ValueError, -1e-5), (ValueError, NAN)):
        refused(rms_norm_forward, error, "eps is .*; pass a", x, weight, None, eps)
    for backward in (*BACKWARDS, SPLIT, backwards.rms_norm_backward):
        refused(backward, ValueError, "dy is .*float16, but x is .*float32", dy.half(), x, weight, rstd_of(x))
    refused(rms_norm, ValueError, "has no columns", x[:, :0], weight)
    for cols, more in ((64, 16), (65, 1)):
        x, weight, _, dy = operands(h, 2, cols)
        longest = backwards.split_limit(dy, x, weight)
        x, weight, _, dy = operands(h, 1, max(longest, backwards.BACKWARD_ROWS_MAX) + more)
        for call, limit in ((BACKWARDS[0], backwards.BACKWARD_ROWS_MAX), (SPLIT, longest)):
            too_long = f"a row may have {limit} here; call rms_norm_backward"
            refused(call, ValueError, too_long, dy, x, weight, rstd_of(x))


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_generated_code(sm):
    """It fits, on sm_80 with fewer stages, and spills next to nothing."""
    x, weight, rstd = meta(4096, 65536), meta(65536), meta(4096, dtype=torch.float32)
    for call, args, found in (
        (rms_norm_forward, (x, weight, x), "cp.async st.global.v4"),
        (SPLIT, (x, x, weight, rstd, x), "cp.async atom st.global.v4"),
    ):
        (kernel,) = compile_for(call, args, sms=(sm,))
        assert (kernel.error, kernel.too_much) == (None, None)
        assert kernel.spills <= 16
        assert all(kernel.found.get(name) for name in found.split()), kernel.found


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, DTYPES[::-2]])
def test_long_rows_fit_shared_memory(dtype, wide):
    """The loop: the weight's share depends on its own dtype; of rows of 16000 columns two programs fit an SM."""
    for cols, programs in ((16000, 2), (300_000, 1)):
        x, weight, rstd = meta(4096, cols, dtype=dtype), meta(cols, dtype=wide), meta(4096, dtype=torch.float32)
        for residual in (None, x):
            for kernel in compile_for(long.launch_loop, (x, residual, weight, x, residual, rstd, 1e-6), sms=(90, 100)):
                assert (kernel.error, kernel.kernel) == (None, "rms_norm_long_kernel")
                assert kernel.shared * programs <= kernel.shared_limit
                assert kernel.registers * kernel.warps * 32 * programs <= 65536
                assert kernel.spills <= 32  # of the last block, which is held while the others pass


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, DTYPES[::-2]])
def test_generated_code_of_the_split_forward(dtype, wide):
    """Twelve programs fit an SM, with the residual too; nothing spills."""
    x, weight = meta(1024, 65536, dtype=dtype), meta(65536, dtype=wide)
    for residual in (None, x):
        for kernel in compile_for(rms_norm_forward, (x, weight, residual), sms=(90, 100)):
            assert (kernel.error, kernel.kernel, kernel.spills) == (None, "norm_split_kernel", 0)
            fit(kernel, layer_norm_long.split_shape(x, weight, residual)[2])
            assert all(kernel.found.get(name) for name in ("cp.async", "atom", "st.global.v4")), kernel.found


@pytest.mark.gpu
def test_benchmark_widths_and_more_elements_than_an_int32_counts(h, gpu_gib):
    for cols in (64, 1024, 4096, 8192, 12000, 16384, 20000, 65536, 131072, 200_000):
        for dtype, wide in ((torch.float32, None), (torch.float16, None), *((torch.bfloat16, w) for w in DTYPES[::2])):
            x, weight, residual, dy = operands(h, 300, cols, dtype=dtype, wide=wide)
            for other in (None, residual):
                check_forward(h, x, weight, other)
                check_backward(backwards.rms_norm_backward, dy, x, weight, other)
                one, two = (backwards.rms_norm_backward(dy, x, weight, rstd_of(x), other) for _ in range(2))
                assert all(map(torch.equal, one, two))
    gpu_gib(40)
    half = torch.bfloat16
    for cols in (1000, 12000, 50000):
        x, dy = (torch.empty(2**31 // cols + 5, cols, dtype=half, device=h.device).normal_() for _ in range(2))
        weight = h.randn(cols, dtype=half)
        y, _, rstd = rms_norm_forward(x, weight)
        dx, _ = backwards.rms_norm_backward(dy, x, weight, rstd)
        for part in (slice(0, 3), slice(-3, None)):
            want = reference_backward(dy[part], x[part], weight, rstd[part])[0]
            judge(dx[part], want, what="dx", dtype=half, terms=cols)
            judge(y[part], reference(x[part], weight), what="y", dtype=half, terms=cols)
        del x, dy, y, dx


@pytest.mark.parametrize("residual", [False, True])
def test_backward_as_an_operator(h, residual):
    """What torch.compile calls: its schema, and shapes and dtypes without data; errors while compiling."""
    fn = backwards.rms_norm_backward
    x, weight, dsum, dy = operands(h, 3, 32, dtype=torch.float16, wide=torch.float32)
    rest = (weight, rstd_of(x), *((dsum,) if residual else ()))
    torch.library.opcheck(fn.operator, (dy, x, *rest))
    refused_by_compiled(fn, "dy is .*float32, but x is .*float16", dy.float(), x, *rest)
    refused_by_compiled(fn, "an input requires grad", dy, x.clone().requires_grad_(), *rest)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("summed", [False, True])  # the gradient of a sum is one number, with strides of 0
def test_a_compiled_step_has_no_graph_break(h, residual, summed):
    """The forward is torch's here: no interpreted kernel can be traced."""

    def forward(rows, weight, residual, eps):
        total = rows if residual is None else rows + residual
        y = torch.nn.functional.rms_norm(total, rows.shape[-1:], weight, eps)
        return y, None if residual is None else total, (total.square().mean(1) + eps).rsqrt()

    def ours(x, weight, residual=None):
        return backwards.RmsNorm.apply(x, weight, residual, 1e-6, forward)

    def loss(fn):
        def call(*args):
            out = fn(*args)
            out = sum(out) if isinstance(out, tuple) else out
            return out.sum() if summed else out

        return call

    x, weight, other, dy = operands(h, 2, 3, 300)
    inputs = (x, weight, other) if residual else (x, weight)
    one_graph(loss(ours), loss(torch_add if residual else torch_norm), *inputs, dy.sum() if summed else dy)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [4096, 65536, 200_000])
def test_the_lesson_compiles_without_a_graph_break(h, cols):
    x, weight, residual, dy = operands(h, 40, cols)
    one_graph(rms_norm, torch_norm, x, weight, dy, backend="inductor")
    inputs = (x, weight, residual, dy)
    one_graph(lambda *args: sum(rms_norm(*args)), lambda *args: sum(torch_add(*args)), *inputs, backend="inductor")
