"""softmax: four kernels against one reference, at every row length where one of them ends and another begins."""

from harness.codegen import compile_for
from harness.hardware import interpreted

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.triton.softmax import (
    BUDGET,
    DTYPES,
    RESIDENT_MAX_KIB,
    RESIDENT_MIN,
    ROWS_MAX,
    SPLIT_BLOCK,
    reference,
    softmax,
    softmax_loop,
    softmax_resident,
    softmax_rows,
    softmax_rows_kernel,
    softmax_split,
    split_max_cols,
)

EVERYWHERE = [softmax_rows, softmax_resident, softmax_loop, softmax]
KERNELS = [*EVERYWHERE, pytest.param(softmax_split, marks=pytest.mark.gpu)]
# One element, a prime, around one tile of several kernels, more rows than a program takes.
SHAPES = [(1, 1), (70, 1), (3, 781), (5, 256), (17, 257), (2, 4096), (3, 4097), (0, 5), (133, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_shapes(h, kernel, shape):
    for dtype in (torch.float32, torch.float16):
        h.check(kernel, reference, h.randn(*shape, dtype=dtype, scale=2.0), **BUDGET)


@given(rows=st.integers(0, 40), cols=st.integers(1, 3000), scale=st.sampled_from([0.5, 4.0, 20.0]))
def test_any_shape(rows, cols, scale):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    x = h.randn(rows, cols, scale=scale)
    for kernel in EVERYWHERE if interpreted() else [*EVERYWHERE, softmax_split]:
        h.check(kernel, reference, x, **BUDGET)


@pytest.mark.parametrize(
    ("cols", "rows"),
    [
        (RESIDENT_MIN, 2),
        (RESIDENT_MIN + 1, 5),
        (16 * 1024, 2),  # the steps of softmax_resident by the length of a row, and one beyond
        (16 * 1024 + 1, 2),
        (RESIDENT_MAX_KIB * 512, 2),
        (RESIDENT_MAX_KIB * 512 + 1, 2),
        (SPLIT_BLOCK * 5, 2),
        (100_003, 1),
    ],
)
def test_where_one_kernel_ends_and_the_next_begins(h, cols, rows):
    h.check(softmax, reference, h.randn(rows, cols, dtype=h.half, scale=2.0), **BUDGET)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_apart_in_memory(h, kernel):
    x = h.randn(9, 1000, dtype=torch.float32, scale=2.0)
    h.check(kernel, reference, x[:, 100:881], **BUDGET)  # a row stride above n_cols, a start that is not aligned
    h.check(kernel, reference, x[::2, :781], **BUDGET)
    h.check(kernel, reference, x[:1, :781].expand(6, 781), **BUDGET)  # one row in memory, six in the view


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_tiny_and_shifted_values(h, kernel):
    x = h.randn(4, 3000)
    for values in (x * 1e4, x + 1e4, x - 1e4, x.clamp(min=0) * -1e30):
        h.check(kernel, reference, values, **BUDGET)
    h.check(kernel, reference, x * 1e-30, constant_ok=True, **BUDGET)


@pytest.mark.parametrize("kernel", KERNELS)
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


@pytest.mark.parametrize("kernel", KERNELS)
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


def _bad(device):
    x = torch.randn(4, 8, device=device)
    return {
        "no tensor": ([1.0], TypeError, r"expected a torch\.Tensor, got list"),
        "integers": (x.int(), TypeError, r"dtype torch\.int32 is not one of"),
        "float64": (x.double(), TypeError, r"torch\.float64"),
        "a vector": (x[0], ValueError, r"need a matrix \[n_rows, n_cols\], got shape \(8,\)"),
        "three dimensions": (x.reshape(2, 2, 8), ValueError, r"shape \(2, 2, 8\); call x\.reshape"),
        "no columns": (x[:, :0], ValueError, r"shape \(4, 0\) has no columns"),
        "columns apart": (x.t(), ValueError, r"strides \(1, 8\).*x\.contiguous\(\)"),
        "requires grad": (x.clone().requires_grad_(), RuntimeError, "no backward"),
        "a device without kernels": (x.to("meta"), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
@pytest.mark.parametrize("kernel", [*EVERYWHERE, softmax_split])
def test_bad_input(h, kernel, name):
    x, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"softmax[a-z_]*: .*{message}"):
        kernel(x)


def test_a_row_too_long_for_a_kernel_is_refused(h):
    with pytest.raises(ValueError, match=rf"{ROWS_MAX + 1} columns, but a row may have {ROWS_MAX} here; call softmax"):
        softmax_rows(h.randn(1, ROWS_MAX + 1))


def test_split_refuses_the_interpreter(h):
    if not interpreted():
        pytest.skip("kernels are compiled here")
    with pytest.raises(RuntimeError, match="wait for each other and cannot be interpreted; use softmax_loop"):
        softmax_split(h.randn(2, 100))


@pytest.mark.gpu
def test_split_refuses_more_parts_than_there_are_sms(h):
    cols = split_max_cols(h.device)
    with pytest.raises(ValueError, match=f"{cols + 1} columns, but a row may have {cols} here"):
        softmax_split(h.randn(1, cols + 1))
    h.check(softmax, reference, h.randn(1, cols + 1, scale=2.0), **BUDGET)  # softmax goes on with the loop


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
@pytest.mark.parametrize(
    ("kernel", "cols", "instruction"),
    [
        (softmax_rows, 256, "ld.global.v4"),
        (softmax_rows, 4096, "ld.global.v4"),
        (softmax_rows, 16384, "ld.global.v4"),
        (softmax_resident, 8192, "ld.global.v4"),
        (softmax_resident, 16384, "ld.global.v4"),
        (softmax_resident, 65536, "ld.global.v4"),
        (softmax_loop, 65536, "ld.global.v4"),
        (softmax_split, 131072, "atom"),
    ],
)
def test_generated_code(kernel, cols, instruction, sm):
    x = torch.empty(1024, cols, dtype=torch.bfloat16, device="meta")
    (compiled,) = compile_for(kernel, (x,), sms=(sm,))
    assert compiled.error is None
    assert compiled.fits
    assert compiled.spills <= 16  # bytes of one thread, in a kernel held to 80 registers; elsewhere 0
    assert compiled.found[instruction]


def rows_beyond_the_limit(x):
    """softmax_rows without its limit, for the test below."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    softmax_rows_kernel[(x.shape[0],)](
        x, y, x.stride(0), y.stride(0), *x.shape, ROWS=1, BLOCK_N=x.shape[1], num_warps=32
    )
    return y


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_why_a_row_of_one_program_ends_where_it_does(sm):
    at_limit, beyond = (torch.empty(1024, n, dtype=torch.bfloat16, device="meta") for n in (ROWS_MAX, 2 * ROWS_MAX))
    (kernel,) = compile_for(softmax_rows, (at_limit,), sms=(sm,))
    assert kernel.spills == 0
    (kernel,) = compile_for(rows_beyond_the_limit, (beyond,), sms=(sm,))
    assert kernel.error is None
    assert kernel.spills > 0
