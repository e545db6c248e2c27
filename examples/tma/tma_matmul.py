"""TMA matmul, one change at a time: pointer loads, TMA loads, a TMA store, the store in parts; what each is worth.

A claim such as "TMA is 20 to 30 % faster" often compares a different tile or number of stages, too. Here the program
stays as it is: the same tile of c, 128 x 256, 64 deep, the same stages and warps, one program for each tile in the same
order. A step of K loads 48 KiB: by pointers 3072 copies of 16 bytes, 12 per thread, by TMA five boxes of 128 bytes
a row. Each step changes one more thing:
  pointers  tl.load: all threads copy to shared memory (cp.async) and advance a pointer for each copy; what lies past an
            edge is masked, or wraps around and is discarded by the masked store;
  loads     descriptor.load: one thread asks TMA for each box; an mbarrier counts bytes;
  store     descriptor.store: the tile of c goes to shared memory, to where a and b were, and TMA writes it out;
  parts     the same in two parts, through less shared memory: of use to a persistent kernel (tma_persistent_matmul.py).

Question   How much faster is a matmul by TMA, with nothing else changed?
Needs      triton, sm_90
Wins when  pointers need masks (a K that 64 does not divide), where cuBLAS is faster still; on whole tiles it is a tie.
           Persistent and warp-specialized kernels build on it: tma_persistent_matmul, gluon_matmul.
Study      studies/tma/tma_matmul.py
Source     chapter section "4. `triton_tma_blackwell.py` - TMA in Triton (NVIDIA GPU)", which claims loads 20-30 %
           faster: about 1 % for whole tiles, 23 % where pointers mask (H200); the tile order as in Triton tutorial 03
"""

from __future__ import annotations

import functools
import itertools

from harness import Harness, Work, near, run

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.operands import check_choice, check_gemm, short_of_k
from examples.common.tiles import store_parts, tile_coords
from examples.common.tma import tma_descriptor
from examples.common.untraced import untraced

DTYPES = (torch.float16, torch.bfloat16)
BLOCK_M, BLOCK_NS, BLOCK_K, WARPS, GROUP_M, PARTS = 128, (256, 128), 64, 8, 8, 2
STAGES = (4, 3)  # most first: the most that shared memory holds
STEPS = ("pointers", "loads", "store", "parts")


@triton.jit
def matmul_steps_kernel(
    a, b, c, M, N8, K8, stride_a8, stride_b8, stride_c8, TMA_LOADS: tl.constexpr, TMA_STORE: tl.constexpr,
    PARTS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """a and b are descriptors where TMA loads them, c where TMA stores it, and pointers elsewhere."""
    # N, K and the strides come in eights: so the compiler knows that 16 bytes at a time are aligned, and within one
    # mask. By itself it sees that only in multiples of 16 elements, and pointers would pay for it.
    N, K = N8 * 8, K8 * 8
    stride_a, stride_b = tl.cast(stride_a8, tl.int64) * 8, tl.cast(stride_b8, tl.int64) * 8
    stride_c = tl.cast(stride_c8, tl.int64) * 8
    row, col = tile_coords(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if TMA_LOADS:
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            acc = tl.dot(a.load([row, k]), b.load([k, col]), acc)
    else:
        # Rows and columns past the edge wrap around; the masked store discards them.
        rows = (row + tl.arange(0, BLOCK_M)) % M
        cols = (col + tl.arange(0, BLOCK_N)) % N
        inner = tl.arange(0, BLOCK_K)
        a_ptrs = a + rows[:, None] * stride_a + inner[None, :]
        b_ptrs = b + inner[:, None] * stride_b + cols[None, :]
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if EVEN_K:
                acc = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), acc)
            else:
                x = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
                y = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
                acc = tl.dot(x, y, acc)
            a_ptrs += BLOCK_K
            b_ptrs += BLOCK_K * stride_b
    if TMA_STORE:
        store_parts(c, acc, row, col, PARTS)
    else:
        rows, cols = row + tl.arange(0, BLOCK_M)[:, None], col + tl.arange(0, BLOCK_N)[None, :]
        tl.store(c + rows * stride_c + cols, acc.to(c.dtype.element_ty), mask=(rows < M) & (cols < N))


def fitting(device: torch.device) -> tuple[int, int]:
    """The columns of a tile and the stages: the largest tile, then most stages, that shared memory holds."""
    limit = device_limits(device).shared_bytes
    for columns, stages in itertools.product(BLOCK_NS, STAGES):
        # The tiles of a and b, two bytes a value, and a few barriers; c takes their place.
        if 2 * max(stages * (BLOCK_M + columns) * BLOCK_K, BLOCK_M * columns) + 256 <= limit:
            return columns, stages
    raise RuntimeError(f"tma_matmul: no tile fits the {limit} bytes of shared memory of {device}; use torch.matmul")


@untraced
def tma_matmul(a: torch.Tensor, b: torch.Tensor, step: str = "parts") -> torch.Tensor:
    """a [M, K] @ b [K, N] -> c [M, N], contiguous, by one of STEPS, each one change from the one before.

    float16 or bfloat16, both the same, with a float32 accumulator. a and b have contiguous rows; K and N are multiples
    of 8, M is any (0 too).

    Raises TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, a layout that TMA
    cannot load (of pointers, too: every step gets the same) or an unknown step; RuntimeError for a device without
    Triton or with too little shared memory, or for an input that requires grad.
    """
    M, N, K = check_gemm("tma_matmul", a, b, DTYPES, tma=True)
    check_choice("tma_matmul", STEPS, step=step)
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)  # nothing to add up, or nothing to write
    columns, stages = fitting(a.device)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    loads, store, parts = step != "pointers", step in ("store", "parts"), PARTS if step == "parts" else 1
    a_desc, b_desc = tma_descriptor(a, [BLOCK_M, BLOCK_K]), tma_descriptor(b, [BLOCK_K, columns])
    c_desc = tma_descriptor(c, [BLOCK_M, columns // parts])
    # In eights: a multiple of 16 bytes also where there is but one row.
    strides = [each.strides[0] // 8 for each in (a_desc, b_desc, c_desc)]
    matmul_steps_kernel[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, columns),)](
        a_desc if loads else a, b_desc if loads else b, c_desc if store else c, M, N // 8, K // 8, *strides,
        TMA_LOADS=loads, TMA_STORE=store, PARTS=parts, EVEN_K=K % BLOCK_K == 0,
        BLOCK_M=BLOCK_M, BLOCK_N=columns, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, STAGES=stages, num_warps=WARPS,
    )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


# Whole tiles; tails in each dimension, where pointers load by masks; for the interpreter.
WHOLE, RAGGED, SMALL = (4096, 4096, 4096), (4072, 4104, 4072), (260, 264, 72)


def compare(h: Harness, M: int, N: int, K: int):
    """The table of one size: every step beside the library."""
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    library = "cuBLAS" if a.is_cuda else "torch"
    variants = {step: functools.partial(tma_matmul, step=step) for step in STEPS}
    work = Work(bytes=2 * (M * K + K * N + M * N), flops=2 * M * N * K, dtype=h.half)
    return h.compare(
        {library: torch.matmul} | variants, reference, a, b, baseline=library, work=work, terms=K,
        peers=["pointers"], case=f"{M}x{N}x{K}",
        wrong=short_of_k(reference), default="parts",
    )  # fmt: skip


def answer(tables: list) -> str:
    loads = {table.case: table.over("pointers", "loads") for table in tables}
    each = ", ".join(f"{gain:.2f}x at {case}" for case, gain in loads.items())
    masks = " (masked pointers)" if len(tables) > 1 else ""
    stored = tables[0].over("loads", "store")
    more = "adds nothing" if near(stored, 1) else f"is another {stored:.2f}x"
    within, library = sum(1.2 <= gain <= 1.3 for gain in loads.values()), tables[0].baseline
    whole = " and ".join(f"{table.over(library, 'parts'):.2f}x" for table in tables)
    return (
        f"TMA loads over pointer loads: {each}{masks}; a TMA store over that {more}. All by TMA over {library}: "
        f"{whole}. The chapter's 20 to 30 % holds at {within} of {len(loads)} sizes."
    )


def demo(h: Harness) -> None:
    # One row, tails in each dimension, nothing to add up.
    for M, N, K in [(1, 8, 8), (129, 264, 72), (5, 16, 0)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        for step in STEPS:
            h.check(functools.partial(tma_matmul, step=step), reference, a, b, terms=K, what=f"{step} {M}x{N}x{K}")

    x, tma = h.meta(4096, 4096), ("cp.async.bulk.tensor", "mbarrier")
    h.codegen(tma_matmul, x, x, "pointers", find={90: ("cp.async", "wgmma")})
    find = {80: (), 89: (), 90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")}
    h.codegen(tma_matmul, x, x, find=find)

    small = h.interpreted or not (h.timing or h.profile)  # nothing to time
    tables = [compare(h, *size) for size in ([SMALL] if small else [WHOLE, RAGGED])]
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
