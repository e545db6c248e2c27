"""What TMA is and is not: a cache hint on tl.load leaves an ordinary load; a descriptor load is another instruction.

TMA, the Tensor Memory Accelerator, is a unit of the SM that copies a whole box of a tensor between memory and shared
memory. One elected thread issues the copy with coordinates; the unit computes the addresses and checks the bounds, and
an mbarrier counts the bytes that have arrived. What proves it is cp.async.bulk.tensor in the PTX. A hint, which the
chapter takes for TMA, says only which lines L1 and L2 should keep: each thread still computes addresses and masks of
its own. Below sm_90 there is no such unit, and Triton turns the descriptor back into pointers.

Here y = factor * x, in tiles of 16 KiB, one program each, by tl.load, by tl.load with the hint, and by a descriptor.
Every element is read once and written once, 4 bytes of a 16-bit dtype for one multiplication: memory is the limit, so
at best all three reach a copy's bandwidth.

Question   Is a load with an eviction policy a TMA load, and what does each of the two give?
Needs      triton
Wins when  TMA: other threads need the tile (the operands of tl.dot), or registers and instructions are short. Data
           that pass through a thread once need no shared memory. The hint: for data that are read again, though even
           there it gains little on an H200, evict_first as much as evict_last, and nothing on an H100 (the study).
Study      studies/tma/what_is_tma.py (registers; what the hint is for)
Source     chapter section "4. `triton_tma_blackwell.py` - TMA in Triton (NVIDIA GPU)", whose kernel, with its
           `eviction_policy="evict_last"  # TMA hint`, is scale_pointers here: no cp.async.bulk in its PTX
"""

from __future__ import annotations

import functools

from harness import Harness, Work, near, run

import torch
import triton
import triton.language as tl

from examples.common.operands import check_choice, check_tma_matrix
from examples.common.tiles import tile_corner
from examples.common.tma import rows_for_tma, tma_descriptor
from examples.common.untraced import untraced

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK_M, BLOCK_BYTES, WARPS = 64, 256, 4  # 16 KiB a tile: 128 bytes of it a thread, or two boxes of TMA
EVICTIONS = ("", "evict_first", "evict_last")


@triton.jit
def scale_pointers_kernel(
    x_ptr, y_ptr, M, N, stride_xm, stride_ym, factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    row, col = tile_corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    rows, cols = row + tl.arange(0, BLOCK_M)[:, None], col + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < M) & (cols < N)
    rows = rows.to(tl.int64)
    x = tl.load(x_ptr + rows * stride_xm + cols, mask=inside, eviction_policy=EVICTION)
    factor = tl.cast(factor, tl.float32)  # torch.compile passes a float in 64 bits
    y = (x.to(tl.float32) * factor).to(x.dtype)
    tl.store(y_ptr + rows * stride_ym + cols, y, mask=inside)


@triton.jit
def scale_descriptors_kernel(x_desc, y_desc, N, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col = tile_corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    x = x_desc.load([row, col])  # no addresses, no mask: what lies outside x arrives as zeros, and is not stored
    y_desc.store([row, col], (x.to(tl.float32) * factor).to(x.dtype))


def _check(name: str, x: torch.Tensor, factor: float, tma: bool) -> float:
    check_tma_matrix(name, x, DTYPES, tma)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"{name}: factor is a {type(factor).__name__}; pass a Python number")
    return float(factor)


def _tiling(x: torch.Tensor) -> tuple[int, tuple[int, int]]:
    """How many tiles x has, and their size."""
    block_n = BLOCK_BYTES // x.element_size()
    return triton.cdiv(x.shape[0], BLOCK_M) * triton.cdiv(x.shape[1], block_n), (BLOCK_M, block_n)


def scale_pointers(x: torch.Tensor, factor: float, eviction: str = "") -> torch.Tensor:
    """factor * x, in float32 and rounded to x's dtype, by tl.load with one of EVICTIONS as its hint.

    x [M, N] in float32, float16 or bfloat16, with contiguous rows; any M and N (0 too) below 2**31 - 256. Rows of
    the result begin at multiples of 16 bytes.

    Raises TypeError for another dtype or a factor that is no number; ValueError for rank, an inner stride other than 1,
    larger sizes or another eviction; RuntimeError for a device without Triton or an input that requires grad.
    """
    factor = _check("scale_pointers", x, factor, tma=False)
    check_choice("scale_pointers", EVICTIONS, eviction=eviction)
    y, (tiles, block) = rows_for_tma(x), _tiling(x)
    if tiles:
        scale_pointers_kernel[(tiles,)](
            x, y, *x.shape, x.stride(0), y.stride(0), factor, *block, EVICTION=eviction, num_warps=WARPS
        )
    return y


@untraced
def scale_descriptors(x: torch.Tensor, factor: float) -> torch.Tensor:
    """factor * x by TMA. As scale_pointers; x's start and row stride are multiples of 16 bytes, or ValueError."""
    factor = _check("scale_descriptors", x, factor, tma=True)
    y, (tiles, block) = rows_for_tma(x), _tiling(x)
    if tiles:
        x_desc, y_desc = (tma_descriptor(each, list(block)) for each in (x, y))
        scale_descriptors_kernel[(tiles,)](x_desc, y_desc, x.shape[1], factor, *block, num_warps=WARPS)
    return y


KERNELS = {
    "pointers": scale_pointers,
    "evict_last": functools.partial(scale_pointers, eviction="evict_last"),
    "descriptor": scale_descriptors,
}


def reference(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.double() * torch.tensor(factor, dtype=torch.float32).double().item()  # factor is float32 on the device


def answer(table, hinted: list) -> str:
    is_tma = any("cp.async.bulk.tensor" in kernel.found for kernel in hinted)
    hint, tma = (table.over("pointers", name) for name in ("evict_last", "descriptor"))
    more = "no faster than" if near(tma, 1) else "slower than" if tma < 1 else "faster than"
    return (
        f"{'Yes' if is_tma else 'No: it stays an ordinary load'}, {hint:.2f}x as fast as without the hint. "
        f"A descriptor load is TMA; for data used once it is {more} tl.load: {tma:.2f}x."
    )


def demo(h: Harness) -> None:
    step = 16 // h.half.itemsize
    for M, N in [(0, step), (1, 1), (3, 781), (BLOCK_M + 1, 129), (2 * BLOCK_M, 7 * 128)]:
        x = h.randn(M, triton.cdiv(N, step) * step, dtype=h.half)[:, :N]  # rows apart, as TMA needs them
        for name, fn in KERNELS.items():
            h.check(fn, reference, x, -2.5, what=f"{name} {M}x{N}", terms=0, roundings=1)

    x, tma = h.meta(8192, 8192, dtype=torch.float16), ("cp.async.bulk.tensor", "mbarrier")
    hinted = h.codegen(scale_pointers, x, 2.5, "evict_last", find={90: ("ld.global.v4",)})
    h.codegen(scale_descriptors, x, 2.5, find={80: (), 89: (), 90: tma, 100: tma, 120: tma})

    M, N = h.pick(interpreted=(130, 264), quick=(4096, 4096), full=(16384, 16384)) if h.timing else (130, 264)
    x = h.randn(h.fit(M, bytes_each=40 * N), N, dtype=h.half)
    table = h.compare(
        {"torch": torch.mul} | KERNELS, reference, x, 1.5, baseline="torch", work=Work(bytes=2 * x.nbytes), terms=0,
        roundings=1, peers=["pointers", "evict_last"],
    )  # fmt: skip
    h.answer(lambda: answer(table, hinted))


if __name__ == "__main__":
    run(demo)
