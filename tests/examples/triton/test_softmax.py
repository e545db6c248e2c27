"""softmax: four kernels against one reference, at every row length where one of them ends and another begins."""

from functools import partial

from harness.codegen import compile_for
from harness.hardware import interpreted

import pytest
import torch

from examples.common.device import sms_to_wait_on
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
from examples.triton.softmax_long import PER_SM, SPLIT_BLOCK, softmax_split
from examples.triton.softmax_resident import softmax_resident
from tests.examples.triton.helpers import INF, NAN, code, meta, refused
from tests.examples.triton.test_layer_norm import twice_in_turn

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
    x = h.randn(8, SPLIT_BLOCK + 900, scale=2.0)
    x[0] = x[6] = -INF  # nothing in the row: NaN
    x[1, :SPLIT_BLOCK] = x[7, :SPLIT_BLOCK] = x[2, SPLIT_BLOCK:] = -INF  # a whole part of nothing
    x[3, 7], x[4, 11], x[5, -1] = INF, NAN, NAN
    x[6, 3] = -1000.0  # one finite value far below zero
    x[7, 5] = NAN  # in a part that is otherwise nothing
    h.check(kernel, reference, x, **BUDGET)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # what the first of two runs finds in empty mailboxes
@pytest.mark.skipif(not interpreted(), reason="compiled kernels cannot be given another way to receive")
def test_the_split_kernel_interpreted(h, monkeypatch):
    """Slices and rows that are not full, rows of nothing and slices of nothing, with what is kept of either kind."""
    run = twice_in_turn(monkeypatch, softmax_long, 64)
    for keep in (True, False):
        monkeypatch.setattr(softmax_long, "KEEP", keep)
        for i, shape in enumerate([(2, 64), (5, 320), (7, 100), (1, 65)]):
            x = h.randn(*shape, dtype=(torch.float32, torch.float16)[i % 2], scale=2.0)
            h.check(partial(run, softmax_split), reference, x, what=f"{shape} {keep}", **BUDGET)
        x = h.randn(8, 100, scale=2.0)
        x[0] = x[6] = -INF
        x[1, :64] = x[7, :64] = x[2, 64:] = -INF
        x[3, 7], x[4, 11], x[5, -1] = INF, NAN, NAN
        x[6, 3], x[7, 5] = -1000.0, NAN
        h.check(partial(run, softmax_split), reference, x, what=f"extreme rows {keep}", **BUDGET)


def longest(h) -> int:
    return SPLIT_BLOCK * PER_SM * sms_to_wait_on(h.device)


@pytest.mark.gpu
def test_split_rows_finish_many_times_over(h):
    """Programs of one row wait for each other: many launches, few and many rows, odd numbers of parts."""
    for rows, cols in ((1, 131072), (1000, 40000), (5000, SPLIT_BLOCK * 3 + 1), (3, longest(h))):
        x = h.randn(rows, cols, dtype=torch.bfloat16, scale=2.0)
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
    long = h.randn(1, longest(h) + 1, scale=2.0)
    refused(softmax_split, ValueError, f"columns, but a row may have {longest(h)} here", long)
    h.check(softmax, reference, long, **BUDGET)  # softmax goes on with softmax_resident


def test_generated_code():
    code(80, "ld.global.v4", softmax_resident, meta(1024, 65536), spills=16)


def test_generated_code_of_the_split_kernel():
    """Two programs fit an SM, with three rows on their way to each: nothing spills."""
    for dtype in (torch.bfloat16, torch.float32):
        for kernel in compile_for(softmax_split, (meta(1024, 131072, dtype=dtype),), sms=(90, 100)):
            assert (kernel.error, kernel.kernel, kernel.spills) == (None, "softmax_split_kernel", 0)
            assert (kernel.shared + 1024) * softmax_long.PER_SM <= kernel.shared_limit + 1024
            assert kernel.registers * kernel.warps * 32 * softmax_long.PER_SM <= 65536
            assert all(kernel.found.get(name) for name in ("cp.async", "atom", "st.global.v4")), kernel.found
