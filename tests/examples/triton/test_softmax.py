"""softmax: four kernels against one reference, at every row length where one of them ends and another begins."""

from harness.catalog import Needs
from harness.codegen import compile_for
from harness.hardware import interpreted
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.rows import DTYPES
from examples.triton.softmax import (
    BUDGET,
    RESIDENT_MAX_KIB,
    RESIDENT_MIN,
    ROWS_MAX,
    reference,
    softmax,
    softmax_rows,
    softmax_rows_kernel,
)
from examples.triton.softmax_long import SPLIT_BLOCK, softmax_loop, softmax_split, split_max_cols
from examples.triton.softmax_resident import softmax_resident

EVERYWHERE = [softmax_rows, softmax_resident, softmax_loop, softmax]
KERNELS = [*EVERYWHERE, pytest.param(softmax_split, marks=pytest.mark.gpu)]
by_kernel = pytest.mark.parametrize("kernel", KERNELS)
# One element, a prime, around one tile of several kernels, more rows than a program takes.
SHAPES = [(1, 1), (70, 1), (3, 781), (5, 256), (17, 257), (2, 4096), (3, 4097), (0, 5), (133, 3)]


@by_kernel
def test_shapes(h, kernel):
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float16):
            h.check(kernel, reference, h.randn(*shape, dtype=dtype, scale=2.0), **BUDGET)


@given(rows=st.integers(0, 12), cols=st.integers(1, 3000), scale=st.sampled_from([0.5, 4.0, 20.0]))
def test_any_shape(rows, cols, scale):
    h = Harness("test", Needs.parse("triton"))
    x = h.randn(rows, cols, scale=scale)
    for kernel in EVERYWHERE if interpreted() else [*EVERYWHERE, softmax_split]:
        h.check(kernel, reference, x, **BUDGET)


# The limits of `softmax`, those of softmax_resident's steps, and whole and broken parts of a long row.
@pytest.mark.parametrize(
    "cols",
    [RESIDENT_MIN, RESIDENT_MIN + 1, 16 * 1024, 16 * 1024 + 1, RESIDENT_MAX_KIB * 512, RESIDENT_MAX_KIB * 512 + 1,
     SPLIT_BLOCK * 5, 100_003],
)  # fmt: skip
def test_where_one_kernel_ends_and_the_next_begins(h, cols):
    h.check(softmax, reference, h.randn(2, cols, dtype=h.half, scale=2.0), **BUDGET)


@by_kernel
def test_rows_apart_in_memory(h, kernel):
    x = h.randn(9, 1000, dtype=torch.float32, scale=2.0)
    h.check(kernel, reference, x[:, 100:881], **BUDGET)  # a row stride above n_cols, a start that is not aligned
    h.check(kernel, reference, x[::2, :781], **BUDGET)
    h.check(kernel, reference, x[:1, :781].expand(6, 781), **BUDGET)  # one row in memory, six in the view


@by_kernel
def test_large_tiny_and_shifted_values(h, kernel):
    x = h.randn(4, 3000)
    for values in (x * 1e4, x + 1e4, x - 1e4, x.clamp(min=0) * -1e30):
        h.check(kernel, reference, values, **BUDGET)
    h.check(kernel, reference, x * 1e-30, constant_ok=True, **BUDGET)


@by_kernel
def test_infinities_and_nan_are_those_of_torch(h, kernel):
    inf, nan = float("inf"), float("nan")
    x = h.randn(9, SPLIT_BLOCK + 900, scale=2.0)
    x[0] = -inf  # nothing in the row: NaN
    x[1, :SPLIT_BLOCK] = -inf  # a whole part of nothing
    x[2, SPLIT_BLOCK:] = -inf
    x[3, 7] = inf
    x[4, 11] = nan
    x[5, :] = -inf
    x[5, 3] = -1000.0  # one finite value far below zero
    x[6, :SPLIT_BLOCK] = -inf
    x[6, 5] = nan  # NaN in a part that is otherwise nothing
    x[7, -1] = nan
    x[8] = 0.0
    h.check(kernel, reference, x, **BUDGET)


@by_kernel
def test_rows_sum_to_one(h, kernel):
    y = kernel(h.randn(20, 5000, dtype=torch.float32, scale=8.0))
    assert torch.allclose(y.double().sum(-1), torch.ones(20, dtype=torch.float64, device=h.device), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [256, 1024, 8192, 16384, 20000, 32768, 65536, 131072, 200_000])
def test_benchmark_widths(h, cols):
    for dtype in DTYPES:
        h.check(softmax, reference, h.randn(300, cols, dtype=dtype, scale=2.0), **BUDGET)


@pytest.mark.gpu
def test_split_rows_finish_many_times_over(h):
    """Programs of one row wait for each other: many launches, few and many rows, odd numbers of parts."""
    for rows, cols in ((1, 131072), (1000, 40000), (5000, SPLIT_BLOCK * 3 + 1), (3, split_max_cols(h.device))):
        x = h.randn(rows, cols, dtype=torch.bfloat16, scale=2.0)
        want = reference(x)
        for _ in range(5):
            h.check(softmax_split, lambda _, want=want: want, x, **BUDGET)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(30)
    for rows, cols in ((2**31 // 1000 + 5, 1000), (2**31 // 20000 + 5, 20000), (2**31 // 50000 + 5, 50000)):
        x = torch.empty(rows, cols, dtype=torch.bfloat16, device=h.device).normal_()
        y = softmax(x)
        for part in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(-3, None)):
            h.check(lambda _, y=y, part=part: y[part], reference, x[part].contiguous(), what=f"{cols}", **BUDGET)
        assert not torch.isnan(y).any()
        del x, y


@pytest.mark.parametrize("kernel", [*EVERYWHERE, softmax_split])
def test_bad_input(h, kernel):
    x = h.randn(4, 8)
    bad = [
        ([1.0], TypeError), (x.int(), TypeError), (x.double(), TypeError), (x[0], ValueError),
        (x.reshape(2, 2, 8), ValueError), (x[:, :0], ValueError), (x.t(), ValueError),
        (x.clone().requires_grad_(), RuntimeError), (x.to("meta"), RuntimeError),
    ]  # fmt: skip
    for value, error in bad:
        with pytest.raises(error, match=f"^{kernel.__name__}: "):
            kernel(value)


def test_a_kernel_refuses_what_it_cannot_do(h):
    with pytest.raises(ValueError, match=f"a row may have {ROWS_MAX} here; call softmax"):
        softmax_rows(h.randn(1, ROWS_MAX + 1))
    if interpreted():
        with pytest.raises(RuntimeError, match="wait for each other; in the interpreter use softmax_loop"):
            softmax_split(h.randn(2, 100))
    cols = split_max_cols(h.device)
    with pytest.raises(ValueError, match=f"{cols + 1} columns, but a row may have {cols} here"):
        softmax_split(h.randn(1, cols + 1))
    h.check(softmax, reference, h.randn(1, cols + 1, scale=2.0), **BUDGET)  # softmax goes on with the loop


def compiled(wrapper, cols, sm):
    (kernel,) = compile_for(wrapper, (torch.empty(1024, cols, dtype=torch.bfloat16, device="meta"),), sms=(sm,))
    assert kernel.error is None
    return kernel


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_generated_code(sm):
    wanted = [(softmax_rows, 16384), (softmax_resident, 65536), (softmax_loop, 65536), (softmax_split, 131072)]
    for wrapper, cols in wanted + [(softmax_rows, 256), (softmax_rows, 4096), (softmax_resident, 8192)] * (sm == 90):
        kernel = compiled(wrapper, cols, sm)
        assert kernel.fits
        assert kernel.spills <= 16  # bytes of one thread, in a kernel held to 80 registers; elsewhere 0
        assert kernel.found["atom" if wrapper is softmax_split else "ld.global.v4"]


def rows_beyond_the_limit(x):
    """softmax_rows without its limit, for the test below."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    softmax_rows_kernel[(x.shape[0],)](
        x, y, x.stride(0), y.stride(0), *x.shape, ROWS=1, BLOCK_N=x.shape[1], num_warps=32
    )
    return y


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_why_a_row_of_one_program_ends_where_it_does(sm):
    assert compiled(softmax_rows, ROWS_MAX, sm).spills == 0
    assert compiled(rows_beyond_the_limit, 2 * ROWS_MAX, sm).spills > 0
