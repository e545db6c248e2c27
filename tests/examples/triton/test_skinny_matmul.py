"""skinny_matmul: any share of any tile, both kernels at every edge, layouts, tiles that fit, bad input, the code."""

import itertools
import re

from harness.codegen import compile_for, dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common import stream_k
from examples.common.device import SHARED_LIMIT, Limits
from examples.common.overlapping_rows import rows_descriptor, spare_rows
from examples.triton import skinny_matmul as lesson
from examples.triton.skinny_matmul import skinny_matmul, skinny_matmul_gemv, skinny_matmul_stream_k
from examples.triton.skinny_matmul_gemv import block_of
from tests.examples.triton import helpers
from tests.examples.triton.helpers import INF, NAN, check_product, code, meta, products, refused


def rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def as_matmul(fn):
    """fn(x, w) as a @ b, which the helpers check."""
    return lambda a, b, **options: fn(rows(a), rows(b.t()), **options)


@pytest.mark.parametrize("tma", [False, True])
def test_edges_layouts_and_extremes(h, tma):
    """By pointers, and where TMA can load; more rows than a tile; one row, few and many outputs."""
    for a, b in products(h, (1, 264, 72), (1, 8, 520), (257, 8, 72), (1, 64, 1048), tma=tma):
        check_product(h, as_matmul(skinny_matmul), a, b)
    a, b = h.randn(1, 600, dtype=h.half), h.randn(600, 131, dtype=h.half)
    b[3, 7], b[599, 11], b[0, 130] = NAN, INF, -INF
    for values in (a, a * 2000, a * 2.0**-12):
        check_product(h, as_matmul(skinny_matmul_gemv), values, b)
        check_product(h, as_matmul(skinny_matmul_stream_k), values, b, programs=5)


def test_overlapping_halves_have_every_row_once(h):
    """What a descriptor loads and store_outputs keeps, followed by hand; then by the kernel, shared and whole."""
    for M, block in itertools.product(range(1, 400), (16, 32, 64, 128, 256)):
        tiles, half, spare = -(-M // block), block // 2, spare_rows(M, block)
        x = torch.arange(1, M + 1, dtype=torch.int16)[:, None].expand(M, 8).contiguous()
        box = rows_descriptor(x, block, 8)
        seen = x.as_strided(box.shape, box.strides)[..., 0]  # which it refuses beyond the memory of x
        seen = torch.nn.functional.pad(seen, (0, block))  # zeros, as beyond a descriptor
        column = torch.arange(block)
        mine, kept = (column >= half) | (column < half - spare), []
        for tile in range(tiles):
            first = tile * (block - spare)
            rows = first + column - torch.where(column >= half, spare, 0)
            loaded, keep = seen[:, first : first + box.block_shape[1]].flatten(), mine & (rows < M)
            assert torch.equal(loaded[keep], rows[keep].to(torch.int16) + 1), (M, block, tile)
            kept += rows[keep].tolist()
        assert sorted(kept) == list(range(M)), (M, block)
        few = tiles * block - M < tiles * tiles  # rows of zeros: less for each tile than there are tiles
        assert spare or half >= M or few, (M, block)
    for M in (9, 12, 24, 33, 40, 65, 96, 127, 130, 190, 191, 255, 300):
        K = 8 if M in (33, 65, 130) else 264  # 8: the smallest stride
        x, w = h.randn(M, K, dtype=h.half), h.randn(72, K, dtype=h.half)
        for programs in (None, 2, 5):
            h.check(lambda x, w, p=programs: skinny_matmul_stream_k(x, w, p), lesson.reference, x, w, terms=K)


test_any_shape = helpers.any_product(
    as_matmul(skinny_matmul_stream_k), M=70, N=150, K=400, programs=st.none() | st.integers(1, 12)
)
test_any_share_by_tma = helpers.any_product(
    as_matmul(skinny_matmul_stream_k), M=20, N=150, K=900, tma=True, programs=st.integers(1, 20)
)


def test_one_row_longer_than_is_unrolled(h):
    for K in (4096 * 16 - 1, 4096 * 16, 4096 * 35 + 9):
        h.check(skinny_matmul_gemv, lesson.reference, h.randn(1, K, dtype=h.half), h.randn(3, K, dtype=h.half), terms=K)


def one_row_without_mmas(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (skinny_matmul_gemv if len(x) == 1 else skinny_matmul)(x, w)


test_one_row_of_any_length = helpers.any_product(as_matmul(one_row_without_mmas), M=1, N=40, K=2500)


@given(tiles=st.integers(1, 700), steps=st.integers(1, 500), slots=st.integers(1, 300))
def test_programs_share_out_all_steps(tiles, steps, slots):
    """No more programs than run at once, none without a step; what they get differs by a step at most."""
    programs = stream_k.share_out(tiles, steps, slots)
    assert 1 <= programs <= min(slots, max(1, tiles * steps))
    units = tiles * steps
    firsts = [program * units // programs for program in range(programs + 1)]
    assert {b - a for a, b in itertools.pairwise(firsts)} <= {units // programs, -(-units // programs)}
    assert programs == tiles or programs % tiles == 0 or tiles * steps // programs >= min(steps, stream_k.LEAST_STEPS)


def test_shares_even_where_that_costs_few_programs():
    share_out = stream_k.share_out
    assert [share_out(64, 64, 132), share_out(128, 64, 132), share_out(224, 64, 132)] == [128, 128, 132]
    assert [share_out(40, 64, 132), share_out(1, 8, 132), share_out(1, 1, 132)] == [120, 2, 1]


def test_products_of_integers_are_exact_however_they_are_shared(h):
    """Nothing rounds, so a step that is left out or added twice shows as itself.

    There are 18 steps in two tiles: with 11 programs a share of broken length ends where a tile begins.
    """
    x, w = (torch.randint(-4, 5, shape, device=h.device).to(h.half) for shape in ((5, 1100), (100, 1100)))
    want = (x.double() @ w.double().t()).to(h.half)
    for programs in (1, 2, 3, 5, 11, 50):
        assert torch.equal(skinny_matmul_stream_k(x, w, programs=programs), want), programs


def test_tiles_that_the_sms_hold_at_once_beyond_64_rows(h, monkeypatch):
    """What was measured to be faster with 132 SMs: 8192 outputs are 128 tiles, whole ones; 28672 are too many."""
    for M, N in ((130, 150), (100, 250), (70, 700)):  # of both, and of more than four SMs hold
        check_product(h, as_matmul(skinny_matmul), h.randn(M, 264, dtype=h.half), h.randn(264, N, dtype=h.half))
    monkeypatch.setattr(lesson, "device_limits", lambda _: Limits(132, SHARED_LIMIT[90]))
    narrow, square = lesson.ONE_WAVE
    assert [lesson.tiles_for(M, 8192, h.device) for M in (64, 128, 256)] == [lesson.TILES, [narrow, square], [square]]
    assert lesson.tiles_for(128, 28672, h.device) is lesson.tiles_for(256, 28672, h.device) is lesson.TILES


def test_one_row_takes_fmas_and_more_take_mmas(h, monkeypatch):
    called = []
    for name in ("skinny_matmul_gemv", "skinny_matmul_stream_k"):
        monkeypatch.setattr(lesson, name, lambda *_, name=name: called.append(name.removeprefix("skinny_matmul_")))
    for M in (1, 2):
        skinny_matmul(h.randn(M, 8, dtype=h.half), h.randn(9, 8, dtype=h.half))
    assert called == ["gemv", "stream_k"]


@pytest.mark.parametrize(("K", "vectors"), [(304, 2), (1000, 4), (4096, 2), (5120, 5), (14336, 7)])
def test_vectors_of_a_thread_for_one_row(K, vectors):
    """16 bytes at a time where K is a multiple of 8, of weights and x; what K has beyond whole blocks is one more."""
    for sm in (80, 90, 100, 120):
        ptx = dump(skinny_matmul_gemv, (meta(1, K), meta(64, K)), sm=sm)["ptx"]
        loads = [len(re.findall(rf"ld\.global\.L1::{name}\S*\.v4\.b32", ptx)) for name in ("evict_first", "evict_last")]
        assert loads == [vectors, vectors]
    wide = meta(64, K + 4)[:, :K]  # whose rows do not all start at a multiple of 16 bytes
    ptx = dump(skinny_matmul_gemv, (meta(1, K), wide), sm=90)["ptx"]
    assert set(re.findall(r"ld\.global\.L1::evict_first\S*(\..\d+)", ptx)) == {".b16"}


def test_blocks_of_one_row_leave_few_loads_masked():
    """Sizes of real models: none masks more than a 17th, spills more than 8 registers, takes more than 16 vectors."""
    for K, warps in ((4096, 8), (5120, 4), (8192, 16), (11008, 4), (14336, 8), (28672, 16), (29568, 8), (53248, 16)):
        (kernel,) = compile_for(skinny_matmul_gemv, (meta(1, K), meta(64, K)), sms=(90,))
        assert kernel.warps == warps, K
        assert kernel.spills <= (32 if K in (11008, 29568, 53248) else 0), K
        vectors = -(-K // block_of(K))
        assert vectors <= 16
        assert vectors * block_of(K) * 16 <= 17 * K
    assert [block_of(K) for K in (0, 1, 300, 512, 4097, 7681, 100_000, 1_000_000)] == [256] * 4 + [512] * 2 + [4096] * 2


@pytest.mark.parametrize("sm", SHARED_LIMIT)
def test_a_tile_fits_every_gpu(sm, monkeypatch):
    monkeypatch.setattr(stream_k, "device_limits", lambda _: Limits(100, SHARED_LIMIT[sm]))
    for M in (1, 16, 17, 33, 64, 128, 256, 10_000):
        m, n, k, _, stages = stream_k.fit_tile(lesson.TILES, M, lesson.STAGES, torch.device("cpu"))
        assert 2 <= stages <= lesson.STAGES
        assert 2 * stages * (m + n) * k + 4 * n * min(m, stream_k.STORE_M.value) < SHARED_LIMIT[sm]
        assert m >= min(M, 128)


@pytest.mark.gpu
def test_real_sizes_bits_and_more_elements_than_an_int32_counts(h, gpu_gib):
    for i, (M, N, K) in enumerate(
        [(1, 8192, 8192), (1, 28672, 8192), (2, 28672, 8192), (16, 8192, 8192), (16, 1000, 8192), (33, 4096, 11008),
         (64, 8192, 8192), (100, 5003, 4095), (128, 8192, 8192), (200, 28672, 8192), (256, 8192, 8192),
         (600, 1024, 4096)]
    ):  # fmt: skip
        x, w = (h.randn(n, K, dtype=lesson.DTYPES[i % 2]) for n in (M, N))
        short = lesson.reference(x[:, :-32], w[:, :-32])
        h.check(skinny_matmul, lesson.reference, x, w, terms=K, wrong={"short": short})
        for fn in (skinny_matmul, skinny_matmul_stream_k):
            first = fn(x, w)
            assert all(torch.equal(fn(x, w), first) for _ in range(5))
    helpers.check_beyond_int32(h, gpu_gib, as_matmul(skinny_matmul), transposed=True)
    row = h.randn(1, 64, dtype=torch.bfloat16)
    w = torch.empty(2**31 // 64 + 64, 64, dtype=torch.bfloat16, device=h.device).normal_()
    y = skinny_matmul_gemv(row, w)
    h.check(lambda *_: y[:, -300:].contiguous(), lesson.reference, row, w[-300:], terms=64)


def test_bad_input(h):
    x, w = h.randn(4, 16, dtype=h.half), h.randn(8, 16, dtype=h.half)
    refused(skinny_matmul, ValueError, r"need x \[M, K\] and w \[N, K\]", x, w[:, :8])
    refused(skinny_matmul, ValueError, "K must be contiguous: w.contiguous", x, h.randn(16, 8, dtype=h.half).t())
    refused(skinny_matmul, TypeError, "both must be the same one of", x.float(), w.float())
    refused(skinny_matmul_gemv, ValueError, "x has 4 rows; it takes one", x, w)


TMA = "cp.async.bulk.tensor mbarrier"


def test_it_compiles_for_sizes_of_1_and_any_layout():
    """Triton makes a constant of a size or a stride of 1; where it can tell that no tile is shared, 3.6 crashes."""
    wide = meta(20, 160)
    for fn, x, w, options in (
        (skinny_matmul, meta(1, 1), meta(1, 1), {}),
        (skinny_matmul, meta(1, 1), meta(28672, 1), {}),
        (skinny_matmul_stream_k, meta(1, 1), meta(8192, 1), {}),
        (skinny_matmul_stream_k, meta(20, 1), meta(150, 1), {"programs": 2}),  # 3 tiles, of a step each
        (skinny_matmul_stream_k, meta(1, 900), meta(1, 900), {"programs": 3}),
        (skinny_matmul, wide[:1, 1:].expand(20, 159), wide[:9, 1:], {}),
        (skinny_matmul, meta(1, 72).as_strided((1, 72), (5, 1)), wide[:, 8:80], {}),
        (skinny_matmul_gemv, meta(1, 72).as_strided((1, 72), (5, 1)), wide[:, 8:80], {}),
    ):
        kernels = compile_for(fn, (x, w), options, sms=(90,))
        assert all((each.error, each.spills) == (None, 0) for each in kernels), (x.shape, x.stride(), w.shape, kernels)


@pytest.mark.parametrize(
    ("sm", "found", "rows"),
    [
        (80, "cp.async mma.sync", [16]),
        (90, f"{TMA} wgmma", [16, 24, 64, 96, 192, 256]),
        (100, f"{TMA} tcgen05.mma", [24, 128, 192]),
    ],
)
def test_generated_code(sm, found, rows):
    """Hardly a spill; on sm_90, none, and one program to an SM has more bytes in flight than saturate its memory."""
    for M in rows:
        x, w, few = meta(M, 8192), meta(8192, 8192), (48 if M < 64 else 16) if sm == 100 else 0
        kernel = code(sm, found, skinny_matmul_stream_k, x, w, programs=64, spills=few)
        tiles = lesson.TILES if M <= 64 else lesson.ONE_WAVE[M > 128 :]
        m, n, *_ = stream_k.fit_tile(tiles, M, lesson.STAGES, torch.device("cpu"))
        assert kernel.shared * n / (m + n) >= 64 * 1024 or sm != 90
    kernel = code(sm, "ld.global.v4 fma.f32", skinny_matmul, meta(1, 8192), meta(28672, 8192))
    assert kernel.registers * kernel.warps * 32 <= 65536 // 4, "four programs to an SM"
