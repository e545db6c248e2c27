"""softmax: four kernels against one reference, at every row length where one of them ends and another begins."""

import math
from functools import partial

from harness.codegen import compile_for
from harness.hardware import interpreted

import pytest
import torch

from examples.common.rows import DTYPES
from examples.triton import softmax_long
from examples.triton.softmax import (
    BUDGET,
    L1_BEST_KIB,
    REGISTERS_BEST,
    REGISTERS_MAX,
    reference,
    softmax,
    softmax_rows,
)
from examples.triton.softmax_long import softmax_split, split_limit, split_shape
from examples.triton.softmax_resident import softmax_resident
from tests.examples.triton.helpers import FUSED, INF, NAN, code, meta, refused
from tests.examples.triton.test_layer_norm import fit, twice_in_turn

EVERYWHERE = [softmax_rows, softmax_resident, softmax]
by_kernel = pytest.mark.parametrize("kernel", [*EVERYWHERE, pytest.param(softmax_split, marks=pytest.mark.gpu)])


@by_kernel
def test_shapes_and_layouts(h, kernel):
    """One element, a prime, around one tile of several kernels, more rows than a program takes, none; rows apart."""
    for i, shape in enumerate([(1, 1), (70, 1), (3, 781), (5, 256), (9, 257), (2, 4096), (3, 4097), (0, 5), (133, 3)]):
        h.check(kernel, reference, h.randn(*shape, dtype=(torch.float32, torch.float16)[i % 2], scale=2.0), **BUDGET)
    x = h.randn(9, 1000, dtype=torch.float32, scale=2.0)
    # A row stride above n_cols, a start that is not aligned; the last: one row in memory, six in the view.
    for rows in (x[:, 100:881], x[::2, :781], x[:1, :781].expand(6, 781)):
        h.check(kernel, reference, rows, **BUDGET)


# The limits of `softmax`, those of softmax_resident's steps, and a broken part of a long row.
@pytest.mark.parametrize("cols", [REGISTERS_BEST, REGISTERS_BEST + 1, 16 * 1024 + 1, L1_BEST_KIB * 512 + 1, 100_003])
def test_where_one_kernel_ends_and_the_next_begins(h, cols):
    h.check(softmax, reference, h.randn(1, cols, dtype=h.half, scale=2.0), **BUDGET)


@by_kernel
def test_extreme_rows(h, kernel):
    x = h.randn(2, 3000)
    for values in (x * 1e4, x + 1e4, x - 1e4, x.clamp(min=0) * -1e30):
        h.check(kernel, reference, values, **BUDGET)
    h.check(kernel, reference, x * 1e-30, constant_ok=True, **BUDGET)
    for cols, part in ((4996, 4096), (1984, 1024)):  # whose rows are read 4 bytes at a time, and 16
        h.check(kernel, reference, hard_rows(h, torch.float32, cols, part), **BUDGET)


def hard_rows(h, dtype, cols, part):
    """Rows with infinities, NaN and numbers far apart; the first of their parts has `part` columns."""
    x = h.randn(12, cols, dtype=dtype, scale=2.0)
    x[0] = x[6] = -INF  # nothing in the row: NaN
    x[1, :part] = x[7, :part] = x[2, part:] = -INF  # a whole part of nothing
    x[3, 7], x[4, 11], x[5, -1] = INF, NAN, NAN
    x[6, 3] = -1000.0  # one finite value far below zero
    x[7, 5] = NAN  # in a part that is otherwise nothing
    x[8, 40 : part // 2] = x[8, part // 2 + 40 : part] = -INF  # whole threads of nothing
    x[9] = x[9, 0]
    x[10, part + 1] = 60.0
    x[11, 2], x[11, part + 2] = torch.finfo(dtype).max, torch.finfo(dtype).max
    return x


def far_rows(h, dtype, cols):
    """Rows of numbers that are far from 0 for their dtype, so that exponents are rounded, or not multiplied by log2(e).
    Of the largest there are 64, whose 1 / 64 every dtype has."""
    centres = (5e4, -5e4) if dtype is torch.float16 else (3e6, -4e6, 5e6, -5e6, 1e30, -1e30)
    x = torch.tensor(centres, dtype=torch.float64, device=h.device)[:, None].repeat(1, cols)
    largest = x[:, :64].clone()
    x -= x.abs() * 2.0**-6
    x[:, torch.arange(64) * (cols // 64)] = largest
    return x.to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_rows_split(h, dtype):
    for cols in (4992, 4997, 3 * 4096):
        part = split_shape(h.randn(2, cols, dtype=dtype))[0]
        h.check(softmax_split, reference, hard_rows(h, dtype, cols, part), **BUDGET)
        h.check(softmax_split, reference, far_rows(h, dtype, cols), **BUDGET)
        check_rest(h, softmax_split, cols)


def check_rest(h, kernel, cols):
    """Threads whose maxima differ by the least that float16 has there, and are rounded in opposite directions when they
    are multiplied by log2(e): with the error left in, or added, the rows are wrong by more than their rounding."""
    factor = torch.tensor(math.log2(math.e), dtype=torch.float32)
    tops = torch.arange(8200, 16000, 8, dtype=torch.float32)
    rest = tops.double() * factor.double() - (tops * factor).double()
    best = (rest[1:] - rest[:-1]).abs().topk(8).indices
    x = torch.full((8, cols), -INF, dtype=torch.float16, device=h.device)
    x[:, 8 * 9], x[:, 8 * 20] = tops[best].to(x), tops[best + 1].to(x)
    h.check(kernel, reference, x, **BUDGET)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # what the first of two runs finds in empty mailboxes
@pytest.mark.skipif(not interpreted(), reason="compiled kernels cannot be given another way to receive")
@pytest.mark.filterwarnings("ignore:divide by zero")  # and in rows of nothing
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_the_split_kernel_interpreted(h, monkeypatch, dtype):
    """Slices and rows that are full and that are not, whose vectors are and are not, more rows than groups, hard rows.
    A thread has 16 values: 2 or 4 vectors, or single ones."""
    block = 512
    run = partial(twice_in_turn(monkeypatch, softmax_long, block), softmax_split)
    for shape in [(2, 512), (5, 1536), (7, 900), (17, 1280), (1, 513), (20, 65)]:
        h.check(run, reference, h.randn(*shape, dtype=dtype, scale=2.0), what=f"{shape}", **BUDGET)
    x = h.randn(5, 1600, dtype=dtype, scale=2.0)
    for rows in (x[:, 1:1025], x[:, 16:1050], x[:1, :700].expand(3, 700)):
        h.check(run, reference, rows, what=f"{tuple(rows.shape)} {rows.stride()}", **BUDGET)
    for cols in (1008, 1000):
        h.check(run, reference, hard_rows(h, dtype, cols, block), what=f"hard rows of {cols}", **BUDGET)
        if FUSED:
            h.check(run, reference, far_rows(h, dtype, cols), what=f"far rows of {cols}", **BUDGET)
    if FUSED:
        check_rest(h, run, 1024)


def longest(h, cols, dtype=torch.float32) -> int:
    """Row that the split kernel takes, of those that are read as rows of so many columns are."""
    return split_limit(h.randn(2, cols, dtype=dtype))


@pytest.mark.gpu
def test_split_rows_finish_many_times_over(h):
    """Programs of one row wait for each other: many launches, few and many rows, odd numbers of parts."""
    aligned, anywhere = longest(h, 64, h.half), longest(h, 65, h.half) - 1
    for rows, cols in ((1, 131072), (1000, 40000), (5000, 12289), (3, aligned), (3, anywhere)):
        x = h.randn(rows, cols, dtype=h.half, scale=2.0)
        want = reference(x)
        for _ in range(5):
            h.check(softmax_split, lambda _, want=want: want, x, **BUDGET)


@pytest.mark.gpu
def test_benchmark_widths_and_more_elements_than_an_int32_counts(h, gpu_gib):
    for cols in (256, 1024, 8192, 16384, 20000, 32768, 65536, 131072, 200_000):
        for dtype in DTYPES:
            h.check(softmax, reference, h.randn(300, cols, dtype=dtype, scale=2.0), **BUDGET)
    gpu_gib(30)
    for cols in (1000, 20000, 50000):
        x = torch.empty(2**31 // cols + 5, cols, dtype=torch.bfloat16, device=h.device).normal_()
        y = softmax(x)
        for part in (slice(0, 3), slice(-3, None)):
            h.check(lambda _, y=y, part=part: y[part], reference, x[part].contiguous(), what=f"{cols}", **BUDGET)
        del x, y


def test_bad_input(h):
    for kernel in (*EVERYWHERE, softmax_split):
        refused(kernel, ValueError, "", h.randn(4, 0))
    most = REGISTERS_MAX
    refused(softmax_rows, ValueError, f"a row may have {most} here; call softmax", h.randn(1, most + 1))
    for cols, more in ((64, 16), (65, 1)):
        most = longest(h, cols)
        long = h.randn(1, most + more, scale=2.0)
        refused(softmax_split, ValueError, f"columns, but a row may have {most} here", long)
        h.check(softmax, reference, long, **BUDGET)  # softmax goes on with softmax_resident


def test_generated_code():
    code(80, "ld.global.v4", softmax_resident, meta(1024, 65536), spills=16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_generated_code_of_the_split_kernel(dtype):
    """The programs fit an SM, with rows on their way to each: nothing spills where slices are full."""
    for cols in (131072, 100000):
        x = meta(1024, cols, dtype=dtype)
        for kernel in compile_for(softmax_split, (x,), sms=(90, 100)):
            assert (kernel.error, kernel.kernel) == (None, "softmax_split_kernel")
            assert kernel.spills <= (0 if cols == 131072 or dtype == torch.float32 else 32)
            assert all(kernel.found.get(name) for name in ("cp.async", "atom", "st.global.v4")), kernel.found
            fit(kernel, split_shape(x)[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_generated_code_of_rows_that_begin_anywhere(dtype):
    """A thread's values are in its registers, and shared memory has sums and the next rows alone."""
    x = meta(1024, 50257, dtype=dtype)
    for kernel in compile_for(softmax_split, (x,), sms=(90, 100)):
        assert (kernel.error, kernel.kernel) == (None, "softmax_split_kernel")
        assert kernel.spills <= 64  # addresses: each value has a load and a store of its own
        assert kernel.shared <= 64 + (2 * 4096 * 4 if dtype == torch.float32 else 0)  # 16 bits are not copied
        fit(kernel, split_shape(x)[2])
