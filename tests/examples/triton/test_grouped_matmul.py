"""grouped_matmul: groups of any sizes, FP8, offsets that make no sense, bad input, the generated code."""

from harness.check import poisoned_outputs
from harness.codegen import compile_for

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, architecture, interpreted
from examples.common.fp8 import E4M3
from examples.triton import grouped_matmul as lesson
from examples.triton import grouped_matmul_operands as cases
from examples.triton.grouped_matmul import grouped_matmul, reference
from tests.examples.triton.helpers import INF, NAN, code, harness, meta, refused


def offsets(h, *sizes: int) -> torch.Tensor:
    return torch.tensor(sizes, device=h.device).cumsum(0).int()


def inputs(h, sizes, N: int, K: int, fp8: bool = False) -> tuple:
    a, b, *scales = cases.experts(h, sum(sizes), len(sizes), N, K, fp8)
    return a, b, offsets(h, *sizes), *scales


def check(h, operands: tuple, fn=grouped_matmul) -> None:
    a, _, offs, *scales = operands
    h.check(fn, reference, *operands, what=f"{offs.tolist()}", **cases.budget(h, a.shape[1], bool(scales)))


@given(
    sizes=st.lists(st.sampled_from((0, 0, 1, 5, 63, 64, 65, 127, 128, 129, 200)), min_size=1, max_size=9),
    N=st.integers(1, 300), K=st.integers(1, 10), fp8=st.booleans(),
)  # fmt: skip
def test_groups_of_any_sizes(sizes, N, K, fp8):
    if sum(sizes) <= 500:
        h = harness()
        check(h, inputs(h, sizes, N, 16 * K, fp8 and architecture(h.device) >= 89))


def test_as_many_tiles_as_there_can_be(h):
    """One row more than full tiles in each group: every program that starts has a tile."""
    rows = lesson.BLOCK_M
    for sizes in ((1,) * 7, (rows + 1, 1, 1), (1, 2 * rows + 1)):
        assert (sum(sizes) + len(sizes) * (rows - 1)) // rows == sum(-(-each // rows) for each in sizes)
        for fp8 in (False, True) if architecture(h.device) >= 89 else (False,):
            check(h, inputs(h, sizes, 24, 64, fp8))


def test_products_of_integers_are_exact(h):
    """Nothing rounds, so that a row of another group, or a step that is left out, shows as itself."""
    offs = offsets(h, 0, 70, 1, 130, 0, 64)
    a, w = (torch.randint(-3, 4, size, device=h.device).half() for size in ((265, 208), (6, 270, 208)))
    want = reference(a, w.transpose(1, 2), offs)
    assert torch.equal(grouped_matmul(a, w.transpose(1, 2), offs).double(), want)


def test_layouts_and_extremes(h):
    """Rows apart in memory, experts apart in memory; rows that no group has; NaN and infinities stay in their rows."""
    wide, experts = h.randn(150, 96, dtype=h.half), h.randn(3, 2, 40, 96, dtype=h.half)
    a, b, offs = wide[:, 8:72], experts[:, 1, :, 16:80].transpose(1, 2), offsets(h, 20, 129, 1)
    check(h, (a, b, offs))
    a, b = a.clone(), b.mT.clone().mT
    a[20, 3], a[148, 5], b[2, 7, 9] = NAN, INF, -INF
    check(h, (a, b, offs))
    check(h, (a[:149] * 2.0**-12, b, offsets(h, 20, 0, 129)))
    fewer = offsets(h, 20, 0, 65)
    check(h, (a, b, fewer), lambda *x: torch.cat([grouped_matmul(*x)[:85], a.new_zeros(65, 40)]))
    for sizes, N, K in [((0, 0), 8, 8), ((3, 4), 8, 0), ((), 8, 8)]:
        a, b = h.randn(sum(sizes), K, dtype=h.half), h.randn(len(sizes), N, K, dtype=h.half).transpose(1, 2)
        assert torch.equal(grouped_matmul(a, b, offsets(h, *sizes)), a.new_zeros(sum(sizes), N))


@pytest.mark.parametrize("ends", [(-5, 40, 10_000), (50, 20, 60), (2**31 - 1, -(2**31), 60)])
def test_offsets_that_make_no_sense_write_nothing_outside_the_result(h, ends):
    a, b = cases.experts(h, 60, 3, 40, 64)
    with poisoned_outputs("grouped_matmul"):
        assert grouped_matmul(a, b, torch.tensor(ends, dtype=torch.int32, device=h.device)).shape == (60, 40)


@triton.jit
def note_tile(_a, _w, tiles_ptr, _scale_a, _scale_b, group, row, end, col, N, K, ROWS, BLOCK_N, BLOCK_K, STAGES):
    """Which tile this is, in place of grouped_matmul_tile, which multiplies it."""
    at = tiles_ptr + 4 * tl.program_id(0)
    for i, value in enumerate((group, row, end, col)):
        tl.store(at + i, value)


@pytest.mark.skipif(not interpreted(), reason="a compiled kernel cannot be given another function to call")
def test_tiles_stay_inside_where_the_sum_of_nonsense_passes_32_bits(monkeypatch):
    """4096 groups that end anywhere within 2**27 rows, or beyond. Sizes alone, without the data."""
    T, N, E = 2**27 - 77, 2**16 - 5, cases.MOST_GROUPS
    offs = torch.randint(-(2**31), 2**31, (E,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(lesson, "grouped_matmul_tile", note_tile)
    tiles = torch.full((64, 4), -1, dtype=torch.int64)
    lesson.grouped_matmul_kernel[(64,)](
        None, None, None, tiles, None, None, offs.int(), T, N, 16, E,
        BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, SLOTS=E, STAGES=1,
    )  # fmt: skip
    group, row, end, col = tiles.T
    assert ((group >= 0) & (group < E)).all()
    assert ((row >= 0) & (row < end) & (end <= T)).all()
    assert ((col >= 0) & (col < N)).all()


def test_routing_shares_out_all_tokens(h):
    for how in ("even", "skewed", "hot"):
        for T, E in ((8192, 64), (170, 5), (9, 37), (5, 1)):
            offs = cases.routed(h, T, E, how)
            sizes = offs.diff(prepend=offs.new_zeros(1))
            assert offs.dtype is torch.int32
            assert (len(offs), offs[-1].item(), sizes.min().item() >= 0) == (E, T, True)
    sizes = {how: cases.routed(h, 8192, 64, how).diff(prepend=offs.new_zeros(1)) for how in ("even", "skewed", "hot")}
    assert set(sizes["even"].tolist()) == {128}
    assert sizes["skewed"].max() > 1000
    assert (sizes["skewed"] == 0).sum() == 4
    assert abs(sizes["hot"].max() - 2048) <= 1


def test_the_loop_that_it_is_put_beside(h):
    operands = inputs(h, (3, 0, 40), 32, 64)
    loop = cases.libraries(h, *operands)["torch loop"]
    h.check(loop, reference, *operands, stores=2, **cases.budget(h, 64, False))


def test_bad_input(h):
    a, b, offs, *scales = inputs(h, (3, 0, 40), 32, 64, fp8=True)
    x, y, _ = inputs(h, (3, 0, 40), 32, 64)
    refused(grouped_matmul, TypeError, "offs torch.int64", x, y, offs.long())
    refused(grouped_matmul, TypeError, "the same one of", x, b, offs)
    refused(grouped_matmul, ValueError, r"b \[E, K, N\] and offs \[E\]", x, y, offs[:2])
    refused(grouped_matmul, ValueError, r"b.transpose\(1, 2\) has", x, y.contiguous(), offs)
    refused(grouped_matmul, ValueError, "K is 60; TMA needs", x[:, :60], y[:, :60], offs)
    refused(grouped_matmul, ValueError, "5000 groups; at most", x, y[:1].expand(5000, -1, -1), offs[:1].repeat(5000))
    refused(grouped_matmul, ValueError, "FP8 operands have", a, b, offs)
    refused(grouped_matmul, ValueError, "FP8 operands have", x, y, offs, *scales)
    refused(grouped_matmul, ValueError, "values that are not positive", a, b, offs, scales[0] * 0, scales[1])
    refused(grouped_matmul, ValueError, "strides", a, b, offs, scales[0], scales[1].t().contiguous().t())
    grouped_matmul(a, b, offs, scales[0] * 0, scales[1], check_scales=False)


@pytest.mark.gpu
def test_real_sizes_bits_and_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(40)
    for how in ("even", "skewed", "hot"):
        for fp8 in (False, True) if architecture(h.device) >= 89 else (False,):
            a, b, *scales = cases.experts(h, 2048, 16, 1032, 2064, fp8)
            operands = (a, b, cases.routed(h, 2048, 16, how), *scales)
            check(h, operands)
            first = grouped_matmul(*operands)
            assert all(torch.equal(grouped_matmul(*operands), first) for _ in range(5))
    half = {"dtype": h.half, "device": h.device}
    w = torch.empty(3, 2**24 + 8, 64, **half).normal_()
    h.check(grouped_matmul, reference, h.randn(8, 64, dtype=h.half), w.transpose(1, 2), offsets(h, 3, 0, 5), terms=64)
    a, b = torch.empty(2**31 // 1024 + 200, 64, **half).normal_(), w[:1, :1024].transpose(1, 2)
    y = grouped_matmul(a, b, offsets(h, len(a)))
    h.check(lambda *_: y[-300:].contiguous(), reference, a[-300:], b, offsets(h, 300), terms=64)


TMA = "cp.async.bulk.tensor mbarrier"


@pytest.mark.parametrize(
    ("sm", "found", "kinds"),
    [(80, "mma.sync", [False]), (90, f"{TMA} wgmma", [False, True]), (100, f"{TMA} tcgen05.mma", [False, True]),
     (120, f"{TMA} mma.sync", [False, True])],
)  # fmt: skip
def test_generated_code(sm, found, kinds):
    """Without a spill where there is TMA; on sm_90 with three steps in flight beside the one that is multiplied."""
    for fp8 in kinds:
        kernel = code(sm, found, grouped_matmul, *cases.described(harness(), fp8), spills=0 if sm >= 90 else 200)
        assert not fp8 or kernel.found["mma f8"]
        assert kernel.shared <= SHARED_LIMIT[sm]
        assert sm != 90 or kernel.shared >= 4 * (lesson.BLOCK_M + 256) * lesson.ROW_BYTES


def test_it_compiles_for_sizes_of_1_and_odd_layouts():
    """Triton makes a constant of a size or a stride of 1. (Where N is no multiple of 16, Triton 3.6 spills at a tile's
    end, once, for addresses of single elements.)"""
    offs = meta(1, dtype=torch.int32)
    for a, w in ((meta(1, 8), meta(1, 1, 8)), (meta(300, 64), meta(1, 1, 64)), (meta(1, 64), meta(1, 300, 64))):
        (kernel,) = compile_for(grouped_matmul, (a, w.transpose(1, 2), offs), sms=(90,))
        assert (kernel.error, kernel.too_much) == (None, None), (a.shape, w.shape)
    a, w = meta(5, 16, dtype=E4M3), meta(1, 7, 16, dtype=E4M3)
    scales = meta(5, dtype=torch.float32), meta(1, 7, dtype=torch.float32)
    (kernel,) = compile_for(grouped_matmul, (a, w.transpose(1, 2), offs, *scales), sms=(90,))
    assert (kernel.error, kernel.too_much) == (None, None)
