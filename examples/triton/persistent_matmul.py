"""Persistent matmul: one program per SM walks over the tiles, so that tiles overlap instead of following each other.

Technique  With one program per tile, every program starts with empty buffers and ends by storing its tile while the
           tensor cores idle; and the last wave of programs may fill only part of the GPU. A persistent kernel starts
           one program per SM, which takes tiles p, p + SMS, p + 2 SMS, ... Each step here changes one thing, on the
           same tile of 128 x 256 x 64 and the same loads (TMA, as the next topic explains; here only their being
           asynchronous matters):
           tile        one program per tile;
           persistent  one program per SM, a loop over tiles around the loop over K: no more launches of programs, but
                       the pipeline still drains at the end of each tile;
           flattened   tl.range(..., flatten=True) makes one loop of the two, so the pipeline runs through: while a tile
                       is stored, the loads of the next are on their way;
           split       the tile is stored in two halves. The store needs shared memory of its own, as the loads of the
                       next tile already own the rest: half the tile takes half of it, which pays for a fourth stage.
Question   What does a persistent kernel win over one program per tile, and what does it need to beat cuBLAS?
Needs      triton, sm_90
Shapes     a [M, K], b [K, N], both with contiguous rows, K and N multiples of 8, any M (0 too) -> c [M, N], contiguous.
Dtypes     float16, bfloat16, both the same; sums are float32.
Errors     TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, a layout TMA cannot
           load (last dimension contiguous, other strides and the start multiples of 16 bytes) or a variant that does
           not exist; RuntimeError for a device without Triton or with too little shared memory for any tile, or an
           input that requires grad.
Wins when  there are several tiles per SM. Where one wave covers the matrix, there is no next tile to overlap with.
Source     chapter section "Persistent kernels"; tile order as in Triton tutorial 03, the loop as in tutorial 09.
Run        python examples/triton/persistent_matmul.py
"""

from __future__ import annotations

import functools
import itertools
import statistics

from harness import (
    Harness,
    Work,
    device_limits,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16)
# Largest first: the tile and stages that fit the shared memory of the device are taken. 128 x 256 is what feeds the
# tensor cores of Hopper and Blackwell; GPUs with 99 KiB take the second.
TILES = [(128, 256, 64, 8), (128, 128, 64, 8)]
GROUP_M = 8
VARIANTS = ("tile", "persistent", "flattened", "split")


@triton.jit
def _tile_of(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Rows and columns at which a tile starts, in bands of GROUP_M rows of tiles, as in matmul.py."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    band = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % (GROUP_M * tiles_n) % band
    tile_n = tile % (GROUP_M * tiles_n) // band
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def matmul_tile_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, col = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([k, col]), acc)
    c_desc.store([row, col], acc.to(c_desc.dtype))


@triton.jit
def matmul_persistent_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    FLATTEN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, col = _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            acc = tl.dot(a_desc.load([row, k]), b_desc.load([k, col]), acc)
        if SPLIT:
            halves = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1)
            left, right = halves.split()
            c_desc.store([row, col], left.to(c_desc.dtype))
            c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))
        else:
            c_desc.store([row, col], acc.to(c_desc.dtype))


def shared_bytes(block_m: int, block_n: int, block_k: int, itemsize: int, stages: int, store_cols: int) -> int:
    """Bytes a program holds: `stages` tiles of a and b, and the part of c that is stored at a time."""
    return itemsize * (stages * (block_m + block_n) * block_k + block_m * store_cols) + 256  # and a few barriers


def fitting_tile(device: torch.device, itemsize: int, split: bool) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps and stages (2 to 4): the largest tile, then most stages, the device can hold."""
    limit = device_limits(device).shared_bytes
    for m, n, k, warps in TILES:
        for stages in (4, 3, 2):
            if shared_bytes(m, n, k, itemsize, stages, n // 2 if split else n) <= limit:
                return m, n, k, warps, stages
    raise RuntimeError(f"matmul_persistent: no tile fits the {limit} bytes of shared memory of {device}")


def matmul_persistent(a: torch.Tensor, b: torch.Tensor, variant: str = "split") -> torch.Tensor:
    """a @ b by one of VARIANTS, each a step from the one before; limits and errors are in the module docstring."""
    name = "matmul_persistent"
    require_triton_device(name, a, b)
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise TypeError(f"{name}: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    if not isinstance(variant, str) or variant not in VARIANTS:
        raise ValueError(f"{name}: variant {variant!r} is not one of {VARIANTS}")
    M, K = a.shape
    N = b.shape[1]
    if K % 8 or N % 8:
        raise ValueError(f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples: pad both to multiples of 8")
    require_tma_layout(name, a=a, b=b)
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)  # nothing to sum, or nothing to write
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    split = variant == "split"
    block_m, block_n, block_k, num_warps, stages = fitting_tile(a.device, a.element_size(), split)
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    kernel = matmul_tile_kernel if variant == "tile" else matmul_persistent_kernel
    extra = {} if variant == "tile" else {"FLATTEN": variant != "persistent", "SPLIT": split}
    programs = tiles if variant == "tile" else min(tiles, device_limits(a.device).sms)
    kernel[(programs,)](
        tma_descriptor(a, [block_m, block_k]), tma_descriptor(b, [block_k, block_n]),
        tma_descriptor(c, [block_m, block_n // 2 if split else block_n]), M, N, K,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=GROUP_M, STAGES=stages,
        num_warps=num_warps, **extra,
    )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


SQUARES = [(n, n, n) for n in (2048, 4096, 8192, 16384)]
LAYERS = [(4096, 14336, 4096), (4096, 4096, 14336), (2048, 28672, 8192), (8192, 28672, 8192)]


def explain(h: Harness, table, M: int, N: int) -> None:
    """What each step won, as time per tile and SM."""
    rows = {row.variant.removeprefix("triton "): row for row in table.rows}
    if not all(name in rows for name in VARIANTS):
        return
    sms = h.machine.sms
    block_m, block_n, *_ = fitting_tile(h.device, h.half.itemsize, split=True)
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    waves = triton.cdiv(tiles, sms)
    steps = ", ".join(
        f"{after} {1000 * (rows[before].ms - rows[after].ms) / waves:+.2f} us"
        for before, after in itertools.pairwise(VARIANTS)
    )
    h.say(
        f"{tiles} tiles on {sms} SMs are {tiles / sms:.2f} waves, paid as {waves}; won per wave of "
        f"{1000 * rows['tile'].ms / waves:.1f} us by each step: {steps}"
    )


def demo(h: Harness) -> None:
    # One row, tails in each dimension, more tiles than SMs (the interpreter plays a GPU of four), nothing to sum.
    for M, N, K in [(1, 8, 8), (129, 264, 72), (257, 520, 8), (5, 16, 0)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        for variant in VARIANTS if M > 128 else VARIANTS[-1:]:
            fn = functools.partial(matmul_persistent, variant=variant)
            h.check(fn, reference, a, b, terms=K, what=f"matmul_persistent {variant} {M}x{N}x{K}")

    x, tma = h.meta(4096, 4096), ("cp.async.bulk.tensor", "mbarrier")
    h.codegen(matmul_persistent, x, x, find={90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")})
    for variant in VARIANTS[:-1]:
        h.codegen(matmul_persistent, x, x, variant, find={90: (*tma, "wgmma")})

    speedups = {}
    for M, N, K in h.pick(interpreted=[(260, 264, 328)], quick=SQUARES[:2], full=SQUARES + LAYERS):
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        variants = {"cuBLAS" if a.is_cuda else "torch": torch.matmul}
        variants |= {f"triton {step}": functools.partial(matmul_persistent, variant=step) for step in VARIANTS}
        work = Work(bytes=2 * (M * K + K * N + M * N), flops=2 * M * N * K, dtype=h.half)
        case = f"{M}x{N}x{K} {str(h.half).removeprefix('torch.')}"
        table = h.compare(variants, reference, a, b, baseline=next(iter(variants)), work=work, case=case, terms=K)
        if table and table.rows[-1].ms:
            explain(h, table, M, N)
            for row in table.rows[1:]:
                speedups.setdefault(row.variant, []).append(row.speedup)
    if speedups:
        best = {"the best of them in each case": [max(each) for each in zip(*speedups.values(), strict=True)]}
        means = {name: round(statistics.geometric_mean(each), 4) for name, each in (speedups | best).items()}
        h.fact("geometric mean over cuBLAS", means)


if __name__ == "__main__":
    run(demo)
