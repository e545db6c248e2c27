"""Matrix multiplication: tiles on the tensor cores, in an order that hits L2, of a size that a search finds.

A GEMM of two n x n matrices in bf16 is 2 n^3 FLOPs on 6 n^2 bytes: compute-bound, if each value is read once. One
program computes a BLOCK_M x BLOCK_N tile of C. A step along K loads BLOCK_M + BLOCK_N values for 2 BLOCK_M * BLOCK_N
FLOPs: 32 a byte for a 64 x 64 tile, 85 for 128 x 256. Larger tiles load less, until registers or shared memory run out.

Most of these loads hit L2 if tiles in flight share rows of A and columns of B. Row by row they read all of B; in groups
of GROUP_M rows (grouped rasterization) they are a patch of C, and read less. Large tiles hide that up to 8192 (H100).

Question   How close to cuBLAS does a page of Triton get, and how much does the order of tiles matter?
Needs      triton
Wins when  something is fused into it. Large squares are about equal; for few rows, odd sizes or a short K take cuBLAS.
Variants   matmul_tiles.py (no kernel: the tiles that are timed, and which of them fit)
Study      studies/triton/matmul.py
Source     chapter section "Tensor Cores"; chapter section "Key Takeaways", whose 90-95 % of hand-tuned kernels' speed
           is 96 to 100 % of cuBLAS here, and 102 to 111 % of cuDNN in flash_attention; order as in Triton tutorial 03
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.device import autotune_configs
from examples.common.operands import check_choice, check_gemm, short_of_k
from examples.triton.matmul_tiles import BLOCK_K_MAX, CONFIGS, fitting_configs

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GROUP_M = 8


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    GROUP_M: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # Walk C in groups of GROUP_M rows of tiles, down each column of the group before the next column.
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    group = min(tiles_m - first_m, GROUP_M)  # the last group may have fewer rows
    pid_m = first_m + pid % (GROUP_M * tiles_n) % group
    pid_n = pid % (GROUP_M * tiles_n) // group

    # Rows and columns past the edge wrap around; the masked store discards them.
    rows = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    cols = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    inner = tl.arange(0, BLOCK_K)
    # int64 once, before the loop: a matrix may have more than 2**31 elements.
    a_ptrs = a_ptr + rows[:, None].to(tl.int64) * stride_am + inner[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + inner[:, None].to(tl.int64) * stride_bk + cols[None, :].to(tl.int64) * stride_bn
    step_a, step_b = BLOCK_K * tl.cast(stride_ak, tl.int64), BLOCK_K * tl.cast(stride_bk, tl.int64)

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:  # a mask costs a predicate per load; most sizes need none
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += step_a
        b_ptrs += step_b

    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :].to(tl.int64) * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


tuned_kernel = triton.autotune(
    configs=autotune_configs(CONFIGS),
    key=["M", "N", "K", "stride_ak", "stride_bk", "GROUP_M", "PRECISION"],
    prune_configs_by={"early_config_prune": fitting_configs},
    # In a CUDA graph: around one launch of a small kernel, events on a slow host would time Python, and rank at random.
    do_bench=lambda fn, quantiles: triton.testing.do_bench_cudagraph(fn, rep=2, quantiles=quantiles),
)(matmul_kernel)


def matmul(a: torch.Tensor, b: torch.Tensor, input_precision: str = "ieee", group_m: int = GROUP_M) -> torch.Tensor:
    """a @ b for a [M, K] and b [K, N] of any strides and sizes (0 too): c [M, N], contiguous, in the dtype of a.

    Both are float16, bfloat16 or float32; the accumulator is float32. `input_precision` is for float32, and ignored
    otherwise: "ieee" (on the CUDA cores), "tf32" or "tf32x3" (tensor cores). A group has `group_m` rows of tiles, 1 to
    1024, with group_m * N below 2**37. The first call with a new size, inner stride, group_m, dtype or input_precision
    runs the search. Raises TypeError for another dtype or two dtypes; ValueError for rank, inner sizes, two devices,
    input_precision or group_m; RuntimeError for a device without Triton or an input that requires grad.
    """
    M, N, K = check_gemm("matmul", a, b, DTYPES)
    check_choice("matmul", ("ieee", "tf32", "tf32x3"), input_precision=input_precision)
    if not isinstance(group_m, int) or not 1 <= group_m <= 1024:
        raise ValueError(f"matmul: group_m is {group_m!r}; it counts rows of tiles, an int from 1 to 1024")
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if c.numel():

        def grid(meta: dict) -> tuple[int]:
            # From the configuration that runs: a grid fixed for one tile size computes part of C with another.
            return (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)

        strides = (*a.stride(), *b.stride(), *c.stride())
        # Not by triton.heuristics: torch 2.11 cannot compile that with autotune (pytorch issue 178179).
        tuned_kernel[grid](
            a, b, c, M, N, K, *strides, GROUP_M=group_m, PRECISION=input_precision, EVEN_K=K % BLOCK_K_MAX == 0
        )
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def demo(h: Harness) -> None:
    for M, N, K in [(1, 1, 1), (37, 53, 61), (129, 257, 65), (5, 7, 0)]:  # primes, a tile plus one, nothing to sum
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        h.check(matmul, reference, a, b, terms=K, what=f"matmul {M}x{N}x{K}")
    h.check(matmul, reference, h.randn(96, 80, dtype=h.half).t(), h.randn(96, 200, dtype=h.half)[:, ::2], terms=96)

    find = {80: ("cp.async", "mma.sync"), 90: ("cp.async", "wgmma"), 100: ("cp.async", "tcgen05.mma")}
    h.codegen(matmul, h.meta(4096, 4096), h.meta(4096, 4096), find=find | {120: find[80]})

    library, tables = "torch" if h.interpreted else "cuBLAS", {}
    variants = {library: torch.matmul, "triton grouped": matmul, "triton row by row": partial(matmul, group_m=1)}
    for n in h.pick(interpreted=(192,), quick=(2048, 8192), full=(2048, 4096, 8192, 16384)):
        n = h.fit(n, bytes_each=60 * n)
        a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
        work = Work(bytes=3 * a.nbytes, flops=2 * n**3, dtype=h.half)
        case = f"{n}x{n}x{n} {str(h.half).removeprefix('torch.')}"
        budget = {"terms": n, "wrong": short_of_k(reference)}
        tables[n] = h.compare(variants, reference, a, b, baseline=library, work=work, case=case, **budget)
    h.answer(lambda: answer(tables, library))


def answer(tables: dict, library: str) -> str:
    speeds = ", ".join(f"{table.over(library, 'triton grouped'):.2f}x at {n}" for n, table in tables.items())
    gains = ", ".join(f"{table.over('triton row by row', 'triton grouped'):.2f}x" for table in tables.values())
    return (
        f"Speed against {library}: {speeds}. Groups of {GROUP_M} rows of tiles against row by row, at the same sizes: "
        f"{gains}."
    )


if __name__ == "__main__":
    run(demo)
