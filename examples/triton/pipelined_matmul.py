"""Software pipelining: one matmul with num_stages 1 to 5, and what each further stage gains and costs.

A step of the loop loads a tile of A and one of B and multiplies them. With one stage the program waits for memory in
every step. With num_stages = s the compiler issues loads ahead, by cp.async into shared memory: those of the next
s - 1 steps are in flight while the tensor cores work on this one, so a load has s - 1 steps to arrive. Once that covers
the latency of memory, a further stage hides nothing more.

wgmma and tcgen05 read shared memory, which must hold s stages; mma.sync has the current tile in registers, which leaves
s - 1. A stage, (BLOCK_M + BLOCK_N) * BLOCK_K * 2 bytes, is 32 KiB here, and an SM of Hopper has 228 KiB: two programs
of three stages share it, four stages leave room for one, and a second program hides latency too. So the best count is
found by timing, as autotuning does; only num_stages changes below. Without timing take five where they fit: on an H200,
where seven would, five was the fastest of these counts at both sizes here, and three took at most 3 % longer.

Question   How many stages does a matmul need, and what does one more cost?
Needs      triton
Wins when  each step of a loop both loads and computes, and its loads do not depend on what it computes.
Study      studies/triton/pipelined_matmul.py
Source     chapter section "Pipelined Kernels", which stops at double buffering: two stages, which take 21 to 22 %
           longer than the best count on an H200; num_stages of triton.Config
"""

from __future__ import annotations

import itertools
import operator
from functools import partial

from harness import Harness, Work, near, run

import torch
import triton
import triton.language as tl

from examples.common.device import architecture, device_limits
from examples.common.operands import check_choice, check_gemm, short_of_k
from examples.common.pointers import load_tiles, store_tile, tile_pointers
from examples.common.tiles import tile_coords

DTYPES = (torch.float16, torch.bfloat16)
STAGES = (1, 2, 3, 4, 5)
BLOCK_M, BLOCK_N, BLOCK_K, NUM_WARPS = 128, 128, 64, 8


@triton.jit
def matmul_pipelined_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, col = tile_coords(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    a_ptrs, b_ptrs, step_a, step_b = tile_pointers(
        a_ptr, b_ptr, row, col, M, N, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # The loop that num_stages is about. Its loads depend on nothing that it computes, so they can be issued ahead.
    for k in range(0, K, BLOCK_K):
        a, b = load_tiles(a_ptrs, b_ptrs, K - k, EVEN_K)
        acc = tl.dot(a, b, acc)
        a_ptrs += step_a
        b_ptrs += step_b
    store_tile(c_ptr, acc, row, col, M, N, stride_cm, stride_cn)


def shared_bytes(num_stages: int, sm: int) -> int:
    """Shared memory of the loop on architecture `sm`, for values of two bytes.

    mma.sync has read its operands into registers when the next copy starts, so s stages need s - 1 buffers. wgmma
    (sm_90) and tcgen05 (sm_100) read shared memory while the program runs on: the buffer of the last step is still in
    use, so s stages need s. One stage copies nothing ahead and still needs a place for its operands.
    """
    reads_later = sm // 10 in (9, 10, 11)
    buffers = max(1, num_stages - (0 if reads_later else 1))
    barriers = 8 * min(num_stages, 2) if sm // 10 in (10, 11) else 0
    return (BLOCK_M + BLOCK_N) * BLOCK_K * 2 * buffers + barriers


def stages_that_fit(sm: int, shared: int) -> tuple[int, ...]:
    """The counts whose buffers fit `shared` bytes."""
    return tuple(s for s in STAGES if shared_bytes(s, sm) <= shared)


def matmul_pipelined(a: torch.Tensor, b: torch.Tensor, num_stages: int = 3) -> torch.Tensor:
    """a [M, K] @ b [K, N] in tiles of 128 x 128 x 64 with num_stages stages: c [M, N], contiguous, dtype of a.

    Any strides and sizes (0 too); float16 or bfloat16, both the same, with a float32 accumulator. Raises TypeError for
    another dtype or two dtypes; ValueError for rank, inner sizes that differ, two devices, num_stages outside 1 to 5,
    or stages that do not fit shared memory; RuntimeError for a device without Triton or an input that requires grad.
    """
    M, N, K = check_gemm("matmul_pipelined", a, b, DTYPES)
    check_choice("matmul_pipelined", STAGES, num_stages=num_stages)
    sm, limit = architecture(a.device), device_limits(a.device).shared_bytes
    if (need := shared_bytes(num_stages, sm)) > limit:
        raise ValueError(
            f"matmul_pipelined: {num_stages} stages need {need} bytes of shared memory, and a program may have {limit} "
            f"here; take one of {stages_that_fit(sm, limit)}"
        )
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:
        matmul_pipelined_kernel[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)](
            a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), EVEN_K=K % BLOCK_K == 0,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=NUM_WARPS,
            num_stages=operator.index(num_stages),  # not a symbol, which torch.compile would make of a second count
        )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def recommended(table) -> str:
    """The fewest stages within 2 % of the best count of this table, and what one more gains."""
    counts = [row.variant for row in table.rows if row.ours]
    enough = next(i for i, name in enumerate(counts) if near(table[name], table.best))
    take = counts[enough]
    one, library = (table.over(name, take) for name in (counts[0], table.baseline))
    gains = f"{one:.2f}x as fast as one, {library:.2f}x {table.baseline}"
    if more := counts[enough + 1 : enough + 2]:
        gains += f"; one more: {table.over(take, more[0]):.2f}x"
    most = "" if more else ", the most that was tried"
    return f" At {table.case.split('x')[0]}: {take}{most} ({gains})."


def demo(h: Harness) -> None:
    counts = stages_that_fit(architecture(h.device), device_limits(h.device).shared_bytes)
    edges = [(1, 1, 1), (37, 53, 61), (129, 257, 65), (130, 70, 320), (5, 7, 0)]
    for (M, N, K), s in zip(edges, itertools.cycle(counts), strict=False):
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        h.check(partial(matmul_pipelined, num_stages=s), reference, a, b, terms=K, what=f"{M}x{N}x{K}, stages: {s}")

    x, tensor_cores = h.meta(8192, 8192), {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
    h.codegen(matmul_pipelined, x, x, find={sm: ("cp.async", name) for sm, name in tensor_cores.items()})

    tables = []
    for n in h.pick(interpreted=(192,), quick=(4096,), full=(4096, 8192)):
        n = h.fit(n, bytes_each=60 * n)
        a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
        baseline = "cuBLAS" if a.is_cuda else "torch"
        variants = {baseline: torch.matmul}
        variants |= {f"{s} stage{'s' * (s > 1)}": partial(matmul_pipelined, num_stages=s) for s in counts}
        work, case = Work(bytes=6 * n * n, flops=2 * n**3, dtype=h.half), f"{n}x{n}x{n}"
        more = {"terms": n, "wrong": short_of_k(reference), "default": "3 stages"}
        tables.append(h.compare(variants, reference, a, b, baseline=baseline, work=work, case=case, **more))
    what = f"tile {BLOCK_M}x{BLOCK_N}x{BLOCK_K}, {(BLOCK_M + BLOCK_N) * BLOCK_K * 2 // 1024} KiB a stage"
    h.answer(lambda: f"Fewest stages within 2% of the best ({what})." + "".join(map(recommended, tables)))


if __name__ == "__main__":
    run(demo)
