"""Persistent matmul: one program per SM walks over the tiles, so that the end of a tile overlaps with the next.

With one program per tile, the tensor cores idle at the start of every program and while it stores. A persistent kernel
has one program per SM, which takes tiles p, p + NUM_SMS, ... That alone (`persistent`) overlaps nothing: its pipeline
drains after each tile. `flattened` makes one loop of those over tiles and K: the next tile is loaded while this one is
stored. `split` stores halves of a tile, which frees shared memory for a fourth stage.

Question   What does a persistent kernel win over one program per tile, and over cuBLAS, by size?
Needs      triton, sm_90
Wins when  there are several tiles per SM. What remains is wave quantization: a partial last wave.
Study      studies/triton/persistent_matmul.py
Source     chapter section "Persistent Kernels", whose kernel is not persistent: a loop over K alone; Triton tutorial 09
"""

from __future__ import annotations

import itertools
from functools import partial

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.operands import check_choice, check_gemm, short_of_k
from examples.common.tiles import split_columns, tile_coords
from examples.common.tma import tma_descriptor
from examples.common.untraced import untraced

DTYPES = (torch.float16, torch.bfloat16)
BLOCK_M, BLOCK_K, GROUP_M = 128, 64, 8
VARIANTS = ("tile", "persistent", "flattened", "split")


@triton.jit
def matmul_tile_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, col = tile_coords(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
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
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            acc = tl.dot(a_desc.load([row, k]), b_desc.load([k, col]), acc)
        if SPLIT:
            left, right = split_columns(acc)
            c_desc.store([row, col], left.to(c_desc.dtype))
            c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))
        else:
            c_desc.store([row, col], acc.to(c_desc.dtype))


def shared_bytes(block_n: int, stages: int, split: bool) -> int:
    """Bytes a program holds: `stages` tiles of a and b, and the part of c that is stored at a time."""
    return 2 * (stages * (BLOCK_M + block_n) * BLOCK_K + BLOCK_M * block_n // (1 + split)) + 256  # and a few barriers


def fitting_tile(device: torch.device, split: bool) -> tuple[int, int]:
    """BLOCK_N and stages, the largest that the device can hold: 256 feeds the tensor cores of Hopper and Blackwell."""
    limit = device_limits(device).shared_bytes
    for block_n, stages in itertools.product((256, 128), (4, 3, 2)):
        if shared_bytes(block_n, stages, split) <= limit:
            return block_n, stages
    raise RuntimeError(f"matmul_persistent: no tile fits the {limit} bytes of shared memory of {device}")


@untraced
def matmul_persistent(a: torch.Tensor, b: torch.Tensor, variant: str = "split") -> torch.Tensor:
    """a [M, K] @ b [K, N] by one of VARIANTS, each a step from the one before: c [M, N], contiguous, dtype of a.

    Both float16 or bfloat16, with a float32 accumulator. Rows are contiguous, K and N multiples of 8, M any (0 too).
    Raises TypeError for dtypes; ValueError for rank, inner sizes that differ, a layout TMA cannot load or an unknown
    variant; RuntimeError without Triton, with too little shared memory for any tile, for an input that requires grad.
    """
    M, N, K = check_gemm("matmul_persistent", a, b, DTYPES, tma=True)
    check_choice("matmul_persistent", VARIANTS, variant=variant)
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)  # nothing to sum, or nothing to write
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    split = variant == "split"
    block_n, stages = fitting_tile(a.device, split)
    tiles = triton.cdiv(M, BLOCK_M) * triton.cdiv(N, block_n)
    kernel = matmul_tile_kernel if variant == "tile" else matmul_persistent_kernel
    extra = {} if variant == "tile" else {"FLATTEN": variant != "persistent", "SPLIT": split}
    kernel[(tiles if variant == "tile" else min(tiles, device_limits(a.device).sms),)](
        tma_descriptor(a, [BLOCK_M, BLOCK_K]), tma_descriptor(b, [BLOCK_K, block_n]),
        tma_descriptor(c, [BLOCK_M, block_n // 2 if split else block_n]), M, N, K,
        BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, STAGES=stages, num_warps=8, **extra,
    )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def compare(h: Harness, M: int, N: int, K: int):
    """Every step beside cuBLAS, at one size."""
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    library = "cuBLAS" if a.is_cuda else "torch"
    variants = {library: torch.matmul} | {step: partial(matmul_persistent, variant=step) for step in VARIANTS}
    work, case = Work(bytes=2 * (M * K + K * N + M * N), flops=2 * M * N * K, dtype=h.half), f"{M}x{N}x{K}"
    return h.compare(
        variants, reference, a, b, baseline=library, work=work, case=case, terms=K, wrong=short_of_k(reference),
        default="split",
    )  # fmt: skip


def demo(h: Harness) -> None:
    # One row, tails in each dimension, more tiles than SMs (the interpreter plays a GPU of four), nothing to sum.
    for M, N, K in [(1, 8, 8), (129, 264, 72), (257, 520, 8), (5, 16, 0)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        for variant in VARIANTS if M > 128 else VARIANTS[-1:]:
            fn = partial(matmul_persistent, variant=variant)
            h.check(fn, reference, a, b, terms=K, what=f"matmul_persistent {variant} {M}x{N}x{K}")

    x, tma = h.meta(4096, 4096), ("cp.async.bulk.tensor", "mbarrier")
    h.codegen(matmul_persistent, x, x, find={90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")})

    sizes = h.pick(interpreted=(264,), quick=(2048, 4096), full=(2048, 4096, 8192))
    tables = [compare(h, n, n, n) for n in sizes]

    def answer() -> str:
        library, last = tables[0].baseline, tables[-1]
        tile, cublas = (", ".join(f"{t.over(row, 'split'):.2f}x" for t in tables) for row in ("tile", library))
        steps = [f"{after} {last.over(before, after):.2f}x" for before, after in itertools.pairwise(VARIANTS)]
        return (f"At {', '.join(map(str, sizes))}: {tile} the speed of one program per tile and {cublas} "
                f"{library}'s. Each step over the one before, at {sizes[-1]}: {', '.join(steps)}.")  # fmt: skip

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
