"""Where shared memory comes from: not from tl.zeros, but from tl.dot, num_stages and reductions; and what reuse saves.

Triton has no call that allocates shared memory. A tensor, even one of tl.zeros, lives in registers. The compiler takes
shared memory for what threads hand to each other (the operands of tl.dot, the partial results of a reduction that spans
warps), and for loads that num_stages issues ahead. How much follows from the tile: num_stages * (BLOCK_M + BLOCK_N) *
BLOCK_K values for a matmul on Hopper and Blackwell, one stage less where mma.sync reads from registers.

Its main use is reuse. A value of A, once there, serves BLOCK_N columns, and one of B BLOCK_M rows: a matmul of
M x N x K loads M * N * K * (1 / BLOCK_M + 1 / BLOCK_N) values for its 2 * M * N * K FLOPs. With tiles of 128 x 256 that
is 10.7 times fewer than with 16 x 16.

Question   What in a kernel takes shared memory, how much, and what does reusing a loaded value save?
Needs      triton
Wins when  a value is used more than once by the same program; one used once gains a place for loads issued ahead.
Variants   shared_memory_single_use.py (the chapter's kernel, sums of columns and rows, a matmul without reuse)
Study      studies/triton/shared_memory.py
Source     chapter sections "Shared Memory" and "3. Optimize Triton Kernels", whose tl.zeros takes 0 bytes of it
"""

from __future__ import annotations

import functools

from harness import Harness, Work, run
from harness.codegen import CodegenError

import torch
import triton
import triton.language as tl

from examples.common.operands import check_choice, check_gemm, short_of_k
from examples.common.pointers import load_tiles, store_tile, tile_pointers
from examples.triton.shared_memory_single_use import BLOCK, HALF, WARPS, column_sum, matmul_strip, row_sum, scale

BLOCK_K = 64
# (BLOCK_M, BLOCK_N) and its warps: so many that a thread has no more than 128 elements of the accumulator. wgmma starts
# at 64 rows, 4 warps.
TILES = {(16, 16): 1, (32, 32): 2, (64, 64): 4, (128, 128): 8, (128, 256): 8}
STAGES = 3


@triton.jit
def matmul_tile_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    row, col = tl.program_id(0) // tiles_n * BLOCK_M, tl.program_id(0) % tiles_n * BLOCK_N
    a_ptrs, b_ptrs, step_a, step_b = tile_pointers(
        a_ptr, b_ptr, row, col, M, N, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)  # in registers
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a, b = load_tiles(a_ptrs, b_ptrs, K - k, EVEN_K)
        acc = tl.dot(a, b, acc)  # its threads hand a and b to each other in shared memory
        a_ptrs += step_a
        b_ptrs += step_b
    store_tile(c_ptr, acc, row, col, M, N, stride_cm, 1)


def matmul_tile(
    a: torch.Tensor, b: torch.Tensor, block_m: int = 128, block_n: int = 256, num_stages: int = STAGES
) -> torch.Tensor:
    """a [M, K] @ b [K, N] on the tensor cores in tiles of block_m x block_n, one of TILES: c [M, N], dtype of a.

    Any strides and sizes (0 too); float16 or bfloat16, both the same, with a float32 accumulator. Raises TypeError for
    another dtype or two dtypes; ValueError for rank, inner sizes that differ, two devices, another tile or num_stages
    outside 1 to 4; RuntimeError for a device without Triton or an input that requires grad; triton.OutOfResources for
    stages that do not fit the GPU's shared memory.
    """
    M, N, K = check_gemm("matmul_tile", a, b, HALF)
    if type(block_m) is not int or type(block_n) is not int or (block_m, block_n) not in TILES:
        raise ValueError(f"matmul_tile: no tile {block_m!r} x {block_n!r}; there are {', '.join(map(str, TILES))}")
    check_choice("matmul_tile", (1, 2, 3, 4), num_stages=num_stages)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:
        matmul_tile_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
            a, b, c, M, N, K, *a.stride(), *b.stride(), c.stride(0),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, STAGES=num_stages, EVEN_K=K % BLOCK_K == 0,
            num_warps=TILES[block_m, block_n],
        )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def tile_bytes(kernel, block_m: int, block_n: int, num_stages: int) -> int:
    """Shared memory of matmul_tile, compiled to `kernel`: operands of 2 bytes times buffers, and 8 for a barrier."""
    # mma.sync reads its operands from registers, so the buffer in use is free again; wgmma and tcgen05 read in place.
    in_place = "wgmma" in kernel.found or "tcgen05.mma" in kernel.found
    buffers = num_stages if in_place else max(1, num_stages - 1)
    barriers = min(num_stages, 2) if "tcgen05.mma" in kernel.found else 0
    return buffers * (block_m + block_n) * BLOCK_K * 2 + 8 * barriers


def allocated(h: Harness) -> dict[str, dict[str, int]]:
    """Bytes of shared memory of each kernel as compiled; raises where they are not as predicted."""
    x, a, took = h.meta(4096, 4096, dtype=torch.float32), h.meta(4096, 4096), {}
    cases = {
        "tl.zeros (scale)": (scale, (x,), lambda kernel: 0),
        "tl.sum by 4 warps (row_sum)": (row_sum, (x,), lambda kernel: 4 * WARPS),
        "tl.load, 1 stage (column_sum)": (column_sum, (x, 1), lambda kernel: 0),
        "tl.load, 4 stages": (column_sum, (x, 4), lambda kernel: 3 * BLOCK * x.element_size()),
    }
    for tile in ((16, 16, 3), (128, 128, 2), (128, 128, 4)):
        label = "tl.dot {}x{}, {} stages".format(*tile)
        cases[label] = (matmul_tile, (a, a, *tile), lambda kernel, tile=tile: tile_bytes(kernel, *tile))
    for label, (wrapper, args, predicted) in cases.items():
        find = dict.fromkeys((80, 90, 100), ("cp.async",) if label.endswith("stages") else ())
        for kernel in h.codegen(wrapper, *args, find=find):
            if kernel.error or kernel.shared != predicted(kernel):
                raise CodegenError(f"{label} on sm_{kernel.sm}: {kernel.shared} bytes, not {predicted(kernel)}")
            took.setdefault(label, {})[f"sm_{kernel.sm}"] = kernel.shared
    return took


def demo(h: Harness) -> None:
    for shape in [(1, 1), (3, 781), (37, BLOCK + 1)]:
        x = h.randn(*shape, dtype=h.half)
        h.check(scale, lambda x: 2 * x.double(), x, terms=0, roundings=1)
        h.check(row_sum, lambda x: x.double().sum(1), x, terms=shape[1])
        h.check(lambda x: column_sum(x, 4), lambda x: x.double().sum(0), x, what=f"column_sum {shape}", terms=shape[0])
    a, b = h.randn(129, 65, dtype=h.half), h.randn(65, 257, dtype=h.half)
    h.check(matmul_strip, reference, a[:5], b, terms=65)
    h.check(matmul_tile, reference, a, b, terms=65)
    h.table("bytes of shared memory", took := allocated(h))

    n = h.fit(h.pick(interpreted=32, quick=2048, full=4096), bytes_each=60 * 4096)
    a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
    baseline, case = "cuBLAS" if a.is_cuda else "torch", f"{n}x{n}x{n}"
    variants = {baseline: torch.matmul, "strip of a row": matmul_strip}
    variants |= {f"{rows}x{cols}": functools.partial(matmul_tile, block_m=rows, block_n=cols) for rows, cols in TILES}
    work = Work(bytes=6 * n * n, flops=2 * n**3, dtype=h.half)
    budget = {"terms": n, "wrong": short_of_k(reference), "default": "128x256"}
    table = h.compare(variants, reference, a, b, baseline=baseline, work=work, case=case, **budget)

    def answer() -> str:
        kib, gain = took.get("tl.dot 128x128, 4 stages", {}).get("sm_90", 0) // 1024, table.over("16x16", "128x256")
        return (
            f"tl.dot's operands ({kib} KiB for 4 stages of 128x128), loads issued ahead, reductions; never tl.zeros. "
            f"Programs with tiles of 128x256 load 10.7x fewer bytes than with 16x16, and are {gain:.1f}x as fast."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
