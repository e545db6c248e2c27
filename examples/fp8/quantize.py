"""FP8 quantization in one pass: amax, scale and cast of the rows, groups or blocks of a matrix.

A scale is amax / max of the format, so no element can be written before all that share its scale were read. What that
costs depends only on how much shares one:

  group, block   128 columns of a row, or 128 x 128: a program reads its tile, finds amax and writes. From 16 bits that
                 is 3 bytes an element, plus scales. A block is read again, from L1, to be written;
  row            a tile as wide as the row; above 8192 columns two reads, the second from cache (quantize_long_row.py);
  tensor         everything is read before anything is written: two kernels, 5 bytes an element (quantize_tensor.py).

amax is a maximum of integers: the bits of |x| sort as the floats do, with NaN above infinity. So NaN is not lost, as it
would be in a GPU's floating-point maximum, and programs can share an amax by an atomic. The cast saturates.

Question   What does dynamic quantization to FP8 cost beside copying the tensor, and which recipe needs a second pass?
Needs      triton, sm_89
Wins when  x is in memory already. Where a kernel of your own makes x, let that one quantize: fused_gelu_quantize.py.
Variants   quantize_long_row.py, quantize_tensor.py
Study      studies/fp8/quantize.py
Source     goes beyond the chapter; groups of 1 x 128 and blocks of 128 x 128 are DeepSeek-V3's (2024, section 3.3)
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.compiled import compiled_modes, over_library
from examples.common.fp8 import E4M3, FLOOR, dequantize_reference, fp8_max, quantize_reference
from examples.common.quantize import (
    GROUP,
    READ_BACK,
    block_of,
    check_quantize,
    empty_group_scales,
    magnitude_bits,
    scale_and_factor,
    torch_quantize_blocks,
)
from examples.fp8.quantize_long_row import launch_long_rows
from examples.fp8.quantize_tensor import quantize_tensor

# Chosen by timing bf16 16384x16384 on an H200. From 16 elements a thread up, q is written 16 bytes at a time.
GROUP_ROWS, GROUP_TILE = 32, {"num_warps": 4, "REREAD": False}
BLOCK_TILE = {"num_warps": 16, "REREAD": True}
ROWS_MAX = 8192  # columns that a program takes at once
ROWS_ELEMENTS, ROWS_TILE = 8192, {"num_warps": 8, "REREAD": False}


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
        scale, inverse = scale_and_factor(tl.max(magnitude_bits(x)), MOST)
        tl.store(scale_ptr + tile_m * stride_sm + tile_n * stride_sn, scale)
    else:
        scale, inverse = scale_and_factor(tl.max(magnitude_bits(x), axis=1), MOST)
        tl.store(scale_ptr + rows * stride_sm + tile_n.to(tl.int64) * stride_sn, scale, mask=rows < n_rows)
        inverse = inverse[:, None]
    if REREAD:  # from the cache of the SM: x in registers until here would leave room for fewer programs
        x = tl.load(x_ptrs, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    q = x * inverse
    tl.store(q_ptr + rows[:, None] * stride_qm + cols[None, :], q.to(q_ptr.dtype.element_ty), mask=inside)


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
    """(q, scales [M, ceil(K / 128)]): one scale for 128 columns of a row; those of one group are contiguous."""
    check_quantize("quantize_group", x, dtype)
    return _quantize_tiles(x, dtype, empty_group_scales(x), GROUP_ROWS, GROUP, False, **GROUP_TILE)


def quantize_block(x: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales [ceil(M / 128), ceil(K / 128)]): one scale for 128 x 128 elements."""
    check_quantize("quantize_block", x, dtype)
    scale = torch.empty([triton.cdiv(n, GROUP) for n in x.shape], dtype=torch.float32, device=x.device)
    return _quantize_tiles(x, dtype, scale, GROUP, GROUP, True, **BLOCK_TILE)


def quantize_row(x: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales [M, 1]): one scale for a row of any length."""
    check_quantize("quantize_row", x, dtype)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    if x.shape[1] <= ROWS_MAX:
        block_n = max(16, triton.next_power_of_2(x.shape[1]))
        return _quantize_tiles(x, dtype, scale, max(1, ROWS_ELEMENTS // block_n), block_n, False, **ROWS_TILE)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    launch_long_rows(x, q, scale)
    return q, scale


RECIPES = {"tensor": quantize_tensor, "row": quantize_row, "group": quantize_group, "block": quantize_block}


def quantize(x: torch.Tensor, recipe: str = "row", dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales), q * scales approximating x: one scale per "tensor", "row", "group" (1 x 128) or "block" (128 x 128).

    Scales are float32: [], [M, 1], [M, ceil(K / 128)] with strides (1, M), [ceil(M / 128), ceil(K / 128)].
    x [M, K] is float32, float16 or bfloat16, with contiguous columns and any row stride; q is contiguous, float8_e4m3fn
    or float8_e5m2. The arithmetic is that of quantize_reference, to the bit; on sm_89, where Triton casts by way of
    float16, a q next to a tie may be its other neighbour. Zeros come back as zeros. What shares a scale with an
    infinity or a NaN comes back as NaN, and nothing else does.

    Raises TypeError for another dtype of x or q; ValueError for another recipe or rank, or columns that are not
    contiguous; RuntimeError for a device without Triton or FP8, or an input that requires grad.
    """
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(f"quantize: recipe {recipe!r} is not one of {list(RECIPES)}")
    return RECIPES[recipe](x, dtype)


def reference(x: torch.Tensor, recipe: str) -> torch.Tensor:
    return quantize_reference(x, block_of(x, recipe))[0].double()


def with_another_scale(x: torch.Tensor, recipe: str) -> torch.Tensor:
    """A fault: the codes where each row of groups has the scales of the one before it."""
    block = block_of(x, recipe)
    return dequantize_reference(x, 1 / quantize_reference(x, block)[1].roll(1, 0), block)


def read_back(x: torch.Tensor, recipe: str) -> torch.Tensor:
    q, scale = quantize(x, recipe)
    return dequantize_reference(q, scale.reshape(scale.shape or (1, 1)), block_of(x, recipe)).float()


def answer(tables: dict, columns: int) -> str:
    ours = {recipe: table["triton"] for recipe, table in tables.items()}
    one_pass = {recipe: row.of_ceiling for recipe, row in ours.items() if recipe != "tensor"}
    shares = ", ".join(f"{recipe} {share:.0%}" for recipe, share in one_pass.items())
    cached = "row and block" if columns > ROWS_MAX else "block"  # what registers do not hold until it is written
    return (
        f"One read of memory runs {'at' if min(one_pass.values()) > 0.95 else 'below'} a copy's speed: {shares} of it "
        f"({cached} read again from cache). A scale for the tensor reads memory twice: "
        f"{ours['tensor'].ms / ours['row'].ms:.2f}x row's time. On average "
        f"{over_library(tables.values()):.2f}x torch.compile's faster mode."
    )


def demo(h: Harness) -> None:
    for recipe in RECIPES:  # one element; primes; one more than a group and a block; a long row
        for rows, cols in [(1, 1), (17, 781), (131, 257), (2, 9001)]:
            # Where rows share a scale, FP8 has few bits for those far below it: here all are of one size.
            make, what = h.randn if recipe in ("tensor", "block") else h.rows, f"{rows}x{cols} per {recipe}"
            x = make(rows, cols, dtype=h.half)
            h.check(partial(read_back, recipe=recipe), torch.Tensor.double, x, what=what, **READ_BACK)
    wide = ("ld.global.v4", "st.global.v4")
    h.codegen(quantize_group, h.meta(16384, 16384), find={89: wide, 90: (*wide, "cvt f8"), 100: (*wide, "cvt f8")})

    size = h.pick(interpreted=256, quick=8192, full=16384)
    x = h.rows(h.fit(size * size, bytes_each=64) // size, size, dtype=h.half)
    tables = {}
    for recipe, quantizer in RECIPES.items():
        in_torch = partial(torch_quantize_blocks, recipe=recipe)
        variants = {"torch": in_torch} | compiled_modes(h, in_torch) | {"triton": quantizer}
        only_q = {name: lambda x, fn=fn: fn(x)[0] for name, fn in variants.items()}  # scales have another dtype
        passes = 2 if recipe == "tensor" else 1
        wrong = {"with another row's scale": partial(with_another_scale, recipe=recipe)} if passes == 1 else None
        tables[recipe] = h.compare(
            only_q, partial(reference, recipe=recipe), x, wrong=wrong,
            case=f"{x.shape[0]}x{size} per {recipe}", baseline="torch", dtype=E4M3, terms=0,
            work=Work(bytes=passes * x.nbytes + x.numel() + quantizer(x)[1].nbytes),
        )  # fmt: skip
    h.answer(lambda: answer(tables, size))


if __name__ == "__main__":
    run(demo)
