"""FP8 quantization in one pass: amax, scale and cast of a tensor, of its rows, groups or blocks.

Technique  A scale is amax / max: no element can be written before all of its group were read. What that costs depends
           only on how much shares a scale:
           group, block   128 numbers of a row, or 128 x 128: a program reads its tile, finds amax and writes. Memory
                          is read once, 3 bytes an element from 16 bits, and the scales. What does not fit the
                          registers of enough programs is read again, from the cache of the SM;
           row            the same with a tile as wide as the row, or several short rows high; a long row is read in
                          steps, the second time backwards;
           tensor         nothing may be written before everything was read: two kernels, 5 bytes an element. The
                          second goes backwards, and finds in L2 what the first read last.
           amax is the largest |x| as an integer: the bits of floats that are not negative sort like the floats, with
           NaN above infinity. So NaN is not lost, as it is in a floating-point maximum of a GPU, and programs can
           share one amax by an atomic maximum of integers. The cast saturates, so nothing is clamped.
Question   What does dynamic quantization to FP8 cost beside copying the tensor, and which recipe needs a second pass?
Needs      triton, sm_89
Shapes     x [M, K], last dimension contiguous, any row stride -> q [M, K] contiguous, and float32 scales so that x is
           about q * scale: [] (tensor), [M, 1] (row), [M, ceil(K / 128)] with strides (1, M), as a blockwise
           torch._scaled_mm wants them (group), [ceil(M / 128), ceil(K / 128)] (block).
Dtypes     x float32, float16 or bfloat16; q float8_e4m3fn or float8_e5m2. The arithmetic is float32, in the steps that
           harness/fp8.py states and to the bit: scale = amax / max, q = round(x * (max / amax)). (On sm_89 Triton casts
           by way of float16: there a q next to a tie may be its other neighbour.)
           Zeros come back as zeros, with the scale of an amax of 2**-100; what shares a scale with an infinity or a NaN
           comes back as NaN, and nothing else does.
Errors     TypeError for another dtype of x or q; ValueError for another recipe or rank, or columns apart in memory;
           RuntimeError for a device without Triton or FP8, or an input that requires grad.
Wins when  x is in memory already: where a kernel of one's own makes x, let that one quantize (fused_gelu_quantize).
Source     the scales of 1 x 128 groups and 128 x 128 blocks are those of DeepSeek-V3 (2024), section 3.3.
Run        python examples/fp8/quantize.py
"""

from __future__ import annotations

import struct
from functools import partial

from harness import Harness, Work, dequantize_reference, fp8_max, quantize_reference, require_triton_device, run
from harness.compare import describe
from harness.fp8 import E4M3, E5M2, FLOOR, FORMATS

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUP = 128
FLOOR_BITS = tl.constexpr(struct.unpack("i", struct.pack("f", FLOOR))[0])

# Chosen by timing bf16 16384x16384 on an H200. From 16 elements a thread up, q is written 16 bytes at a time.
GROUP_ROWS, GROUP_TILE = 32, {"num_warps": 4, "REREAD": False}
BLOCK_TILE = {"num_warps": 16, "REREAD": True}
ROWS_MAX = 8192  # columns that a program takes at once
ROWS_ELEMENTS, ROWS_TILE = 8192, {"num_warps": 8, "REREAD": False}
LONG_STEP, LONG_UNROLL = 8192, 2  # twice that, of rows of more than two steps
AMAX_TILE, AMAX_STEPS, AMAX_WARPS = 8192, 2, 8
CAST_TILE, CAST_WARPS = 2048, 4


@triton.jit
def _magnitude(x):
    """|x| as an integer: the order of floats, with NaN above infinity."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _scales(bits, MOST: tl.constexpr):
    """The scale that dequantizes and the factor that quantizes, from the bits of amax. Plain division is inexact."""
    amax = tl.maximum(bits, FLOOR_BITS).to(tl.float32, bitcast=True)
    return tl.div_rn(amax, MOST), tl.div_rn(MOST, amax)


@triton.jit
def quantize_tile_kernel(
    x_ptr, q_ptr, scale_ptr, stride_xm, stride_qm, stride_sm, stride_sn, n_rows, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, REREAD: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    # int64 because row * stride passes 2**31 elements on tensors that still fit in memory.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x_ptrs = x_ptr + rows[:, None] * stride_xm + cols[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    if WHOLE:  # one scale for the tile, not one for each of its rows
        scale, inverse = _scales(tl.max(_magnitude(x)), MOST)
        tl.store(scale_ptr + tile_m * stride_sm + tile_n * stride_sn, scale)
    else:
        scale, inverse = _scales(tl.max(_magnitude(x), axis=1), MOST)
        tl.store(scale_ptr + rows * stride_sm + tile_n.to(tl.int64) * stride_sn, scale, mask=rows < n_rows)
        inverse = inverse[:, None]
    if REREAD:  # from the cache of the SM: x in registers until here would leave room for fewer programs
        x = tl.load(x_ptrs, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    q = x * inverse
    tl.store(q_ptr + rows[:, None] * stride_qm + cols[None, :], q.to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_row(x_row, cols, N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, HINT: tl.constexpr):
    if N_COLS % BLOCK_N:
        x = tl.load(x_row + cols, mask=cols < N_COLS, other=0.0, eviction_policy=HINT)
    else:  # a mask costs a predicate per load; most lengths need none
        x = tl.load(x_row + cols, eviction_policy=HINT)
    return x.to(tl.float32)


@triton.jit
def quantize_long_row_kernel(
    x_ptr, q_ptr, scale_ptr, stride_xm, stride_qm,
    N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, q_row = x_ptr + row * stride_xm, q_ptr + row * stride_qm
    lane = tl.arange(0, BLOCK_N)
    largest = tl.zeros((BLOCK_N,), tl.int32)  # one per lane: no reduction inside the loop
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        largest = tl.maximum(largest, _magnitude(_load_row(x_row, start + lane, N_COLS, BLOCK_N, "evict_last")))
    scale, inverse = _scales(tl.max(largest, axis=0), MOST)
    tl.store(scale_ptr + row, scale)
    # Backwards: what was read last is the surest to be still there.
    LAST: tl.constexpr = (N_COLS - 1) // BLOCK_N * BLOCK_N
    for done in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        cols = LAST - done + lane
        q = _load_row(x_row, cols, N_COLS, BLOCK_N, "evict_first") * inverse
        tl.store(q_row + cols, q.to(q_ptr.dtype.element_ty), mask=cols < N_COLS)


@triton.jit
def _tile(number, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a tile, int64 as there may be one row of all elements, and what of it is inside."""
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    rows = (number // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (number % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows[:, None], cols[None, :], (rows < n_rows)[:, None] & (cols < n_cols)[None, :]


@triton.jit
def amax_kernel(
    x_ptr, amax_ptr, stride_xm, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr
):
    largest = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for step in range(STEPS):
        rows, cols, inside = _tile(tl.program_id(0) * STEPS + step, n_rows, n_cols, BLOCK_M, BLOCK_N)
        x = tl.load(x_ptr + rows * stride_xm + cols, mask=inside, other=0.0, eviction_policy="evict_last")
        largest = tl.maximum(largest, _magnitude(x.to(tl.float32)))
    tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")


@triton.jit
def cast_kernel(
    x_ptr, q_ptr, amax_ptr, scale_ptr, stride_xm, stride_qm, n_rows, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    # Last tile first: it is the likeliest to be still in L2.
    rows, cols, inside = _tile(tl.num_programs(0) - 1 - tl.program_id(0), n_rows, n_cols, BLOCK_M, BLOCK_N)
    x = tl.load(x_ptr + rows * stride_xm + cols, mask=inside, eviction_policy="evict_first").to(tl.float32)
    scale, inverse = _scales(tl.load(amax_ptr), MOST)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    q = (x * inverse).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows * stride_qm + cols, q, mask=inside, cache_modifier=".cs")


def _check_input(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    require_triton_device(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: x is {x.dtype}, which is not one of {DTYPES}; convert with x.float() first")
    if dtype not in FORMATS:
        hint = "; the fnuz formats are AMD's" if "fnuz" in str(dtype) else ""
        raise TypeError(f"{name}: dtype is {dtype}; pass {E4M3} or {E5M2}{hint}")
    if x.ndim != 2:
        raise ValueError(f"{name}: need a matrix [M, K], got shape {tuple(x.shape)}; call x.reshape(-1, K)")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"{name}: strides {x.stride()}, but columns must be contiguous; call x.contiguous() first")
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        raise RuntimeError(f"{name}: {torch.cuda.get_device_name(x.device)} has no FP8; use one of sm_89 or later")


def _quantize_tiles(x, dtype, scale, block_m: int, block_n: int, whole: bool, **options):
    """(q, scale) by programs of one tile each; the strides of `scale` say where its scales go."""
    n_rows, n_cols = x.shape
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.numel():  # a grid of zero programs is a launch error
        return q, scale.fill_(FLOOR / fp8_max(dtype))  # of no elements, as of zeros
    grid = (triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, block_n),)
    quantize_tile_kernel[grid](
        x, q, scale, x.stride(0), q.stride(0), *scale.stride(), n_rows, n_cols,
        BLOCK_M=block_m, BLOCK_N=block_n, WHOLE=whole, MOST=fp8_max(dtype), **options,
    )  # fmt: skip
    return q, scale


def quantize_group(x: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales [M, ceil(K / 128)]) with one scale for 128 numbers of a row; the scales of a column are contiguous."""
    _check_input("quantize_group", x, dtype)
    n_rows, n_groups = x.shape[0], triton.cdiv(x.shape[1], GROUP)
    scale = torch.empty_strided((n_rows, n_groups), (1, max(1, n_rows)), dtype=torch.float32, device=x.device)
    return _quantize_tiles(x, dtype, scale, GROUP_ROWS, GROUP, False, **GROUP_TILE)


def quantize_block(x: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales [ceil(M / 128), ceil(K / 128)]) with one scale for 128 x 128 numbers."""
    _check_input("quantize_block", x, dtype)
    shape = [triton.cdiv(n, GROUP) for n in x.shape]
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    return _quantize_tiles(x, dtype, scale, GROUP, GROUP, True, **BLOCK_TILE)


def quantize_row(x: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales [M, 1]) with one scale for a row of any length."""
    _check_input("quantize_row", x, dtype)
    n_rows, n_cols = x.shape
    scale = torch.empty(n_rows, 1, dtype=torch.float32, device=x.device)
    if n_cols <= ROWS_MAX:
        block_n = max(16, triton.next_power_of_2(n_cols))
        return _quantize_tiles(x, dtype, scale, max(1, ROWS_ELEMENTS // block_n), block_n, False, **ROWS_TILE)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    if n_rows:
        step = LONG_STEP if n_cols <= 2 * LONG_STEP else 2 * LONG_STEP
        quantize_long_row_kernel[(n_rows,)](
            x, q, scale, x.stride(0), q.stride(0),
            N_COLS=n_cols, BLOCK_N=step, UNROLL=LONG_UNROLL, MOST=fp8_max(dtype), num_warps=step // 512,
        )  # fmt: skip
    return q, scale


def quantize_tensor(x: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale []) with one scale for all elements, in two passes over x."""
    _check_input("quantize_tensor", x, dtype)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    if not x.numel():
        return q, scale.fill_(FLOOR / fp8_max(dtype))
    n_rows, n_cols = (1, x.numel()) if x.is_contiguous() else x.shape

    def tile(elements: int) -> tuple[dict[str, int], int]:
        block_n = min(elements, max(16, triton.next_power_of_2(n_cols)))
        block_m = min(elements // block_n, triton.next_power_of_2(n_rows))
        return {"BLOCK_M": block_m, "BLOCK_N": block_n}, triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, block_n)

    amax = torch.zeros((), dtype=torch.int32, device=x.device)  # a memset, which the times below include
    blocks, tiles = tile(AMAX_TILE)
    amax_kernel[(triton.cdiv(tiles, AMAX_STEPS),)](
        x, amax, x.stride(0), n_rows, n_cols, **blocks, STEPS=AMAX_STEPS, num_warps=AMAX_WARPS
    )
    blocks, tiles = tile(CAST_TILE)
    cast_kernel[(tiles,)](
        x, q, amax, scale, x.stride(0), q.stride(0), n_rows, n_cols, **blocks,
        MOST=fp8_max(dtype), num_warps=CAST_WARPS,
    )  # fmt: skip
    return q, scale


RECIPES = {"tensor": quantize_tensor, "row": quantize_row, "group": quantize_group, "block": quantize_block}


def quantize(x: torch.Tensor, recipe: str = "row", dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of a matrix: one scale per "tensor", "row", "group" (1 x 128) or "block" (128 x 128)."""
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(f"quantize: recipe {recipe!r} is not one of {list(RECIPES)}")
    return RECIPES[recipe](x, dtype)


def block_of(x: torch.Tensor, recipe: str) -> tuple[int, int]:
    """Rows and columns of x that share a scale."""
    return {"tensor": tuple(x.shape), "row": (1, x.shape[1]), "group": (1, GROUP), "block": (GROUP, GROUP)}[recipe]


def bits(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of a quantizer's results as int32, scales as a matrix; -1 for every NaN, whose bits are not defined."""
    scale = scale.reshape(scale.shape or (1, 1)).contiguous()
    codes = q.view(torch.uint8).int().masked_fill_(q.float().isnan(), -1)
    return codes, scale.view(torch.int32).masked_fill(scale.isnan(), -1)


def eager(x: torch.Tensor, recipe: str, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch, for sizes that are multiples of the groups; its reciprocals round once more."""
    rows, columns = block_of(x, recipe)
    most = fp8_max(dtype)
    groups = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = groups.abs().amax(dim=(1, 3), keepdim=True).float().clamp(min=FLOOR)
    q = (groups.float() * (most / amax)).clamp(-most, most).to(dtype)
    scale = (amax / most)[:, 0, :, 0]
    return q.view(x.shape), scale.t().contiguous().t() if recipe == "group" else scale


def reference(x: torch.Tensor, recipe: str) -> torch.Tensor:
    """What rounds to q, in float64."""
    rows, columns = block_of(x, recipe)
    groups = x.double().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = groups.abs().amax(dim=(1, 3), keepdim=True).clamp(min=FLOOR)
    return (groups * (fp8_max(E4M3) / amax)).view(x.shape)


def only_q(quantizer, **options):
    """quantizer() without the scales, which the tables cannot hold to the dtype of q."""
    return lambda x: quantizer(x, **options)[0]


def with_extremes(x: torch.Tensor) -> torch.Tensor:
    """x with a row each of zeros, of numbers below what a scale resolves and near the end of float16, inf and NaN."""
    x = x.clone()
    x[1::7] = 0.0
    x[2::7] *= 1e-7
    x[3::7] *= 1e4
    x[4::14, 3::300] = float("inf")
    x[11::14, 5::300] = float("nan")
    return x


def demo(h: Harness) -> None:
    by_float16 = h.machine.sm == 89  # there Triton's cast rounds twice: a code may be the neighbour of the right one

    def exact(x, recipe, dtype, what):
        def wanted(x):
            return quantize_reference(x, block_of(x, recipe), dtype)

        def ours(x):
            return bits(*quantize(x, recipe, dtype))[by_float16:]

        def theirs(x):
            return tuple(t.double() for t in bits(*wanted(x))[by_float16:])

        what = f"{what} {str(dtype).removeprefix('torch.float8_')} per {recipe}"
        exactly = "scales" if by_float16 else "q and scales"
        h.check(ours, theirs, x, dtype=torch.int32, what=f"{what}, bit for bit: {exactly}")
        if by_float16:
            q = only_q(quantize, recipe=recipe, dtype=dtype)
            h.check(q, lambda x: wanted(x)[0].double(), x, dtype=dtype, terms=0, constant_ok=True, what=f"{what}: q")

    # Tails before sizes.
    for recipe in RECIPES:
        for rows, cols in [(1, 1), (17, 781), (131, 257), (2, 9001)]:
            exact(h.randn(rows, cols, dtype=h.half), recipe, E4M3, f"{rows}x{cols}")
        x = with_extremes(h.randn(15, 1024, dtype=h.half))[:, :901]  # a row stride above the columns
        for dtype in FORMATS:
            exact(x, recipe, dtype, "zeros, extremes, infinities and NaN 15x901")

    if not h.profile:
        x = h.randn(256, 512, dtype=h.half)
        x[100, 200] = float("inf")
        lost = {}
        for recipe in RECIPES:
            q, scale = quantize(x, recipe)
            back = dequantize_reference(q, scale.reshape(scale.shape or (1, 1)), block_of(x, recipe))
            lost[recipe] = int(back.isnan().sum())
        h.fact("elements of 256x512 that one infinity turns to NaN, by recipe", lost)

    wide = ("ld.global.v4", "st.global.v4")
    for quantizer in RECIPES.values():
        h.codegen(quantizer, h.meta(16384, 16384), find={89: wide, 90: (*wide, "cvt f8"), 100: (*wide, "cvt f8")})

    size = h.pick(interpreted=256, quick=8192, full=16384)
    x = h.randn(h.fit(size * size, bytes_each=64) // size, size, dtype=h.half)
    rates = {}
    for recipe, quantizer in RECIPES.items():
        exact(x, recipe, E4M3, describe((x,)))
        torch_call = partial(eager, recipe=recipe)
        passes = 2 if recipe == "tensor" else 1
        table = h.compare(
            {
                "torch": only_q(torch_call),
                "torch.compile": only_q(h.compiled(torch_call)),
                f"triton {recipe}": only_q(quantizer),
            },
            partial(reference, recipe=recipe), x,
            title=f"quantize per {recipe}", baseline="torch", dtype=E4M3, terms=0,
            work=Work(bytes=passes * x.nbytes + x.numel() + quantizer(x)[1].nbytes),
        )  # fmt: skip
        if table and table.rows[-1].of_ceiling:
            compiled, ours = table.rows[-2:]
            shares = {"of the copy ceiling": round(ours.of_ceiling, 3), "over torch.compile": compiled.ms / ours.ms}
            rates[recipe] = {name: round(value, 3) for name, value in shares.items()} | {"ms": round(ours.ms, 4)}
    if rates:
        h.table(f"ours, {describe((x,))}", rates)
        h.say(
            f"one scale for all elements costs {rates['tensor']['ms'] / rates['row']['ms']:.2f}x the time of one per "
            f"row; bytes say {(2 * x.nbytes + x.numel()) / (x.nbytes + x.numel()):.2f}x, as x is read twice"
        )


if __name__ == "__main__":
    run(demo)
