"""Blackwell: accumulators in tensor memory, one thread that issues MMAs, and what the compiler makes of tl.dot.

sm_100 and sm_103 have tensor memory in every SM: 128 lanes of 512 columns of 32 bits. tcgen05.mma accumulates there,
not in registers; one thread issues it, TMA puts its operands into shared memory, and it returns at once.
tcgen05.commit completes an mbarrier when all that was issued is done; tcgen05.ld brings an accumulator to registers. So
no warp is needed to multiply, and kernels are warp-specialized. sm_120 has TMA, but neither tensor memory nor tcgen05:
all warps multiply by mma.sync, in 99 KiB of shared memory. One persistent GEMM, its operands and result by TMA:

  pipelined    Triton, tl.range(flatten=True): all warps load, multiply and store;
  specialized  the same with warp_specialize=True: the compiler makes partitions, or drops the request (Hopper);
  by hand      partitions in Gluon (this file): a warp loads operands into a ring, a warp issues MMAs into one of two
               accumulators (2 x 256 columns, all there are), and eight warps empty the other and store it.

Question   What does a GEMM look like on Blackwell, and what of it does the compiler generate for each architecture?
Needs      triton, sm_90
Wins when  not yet known: until a record names a GPU with tensor memory, by hand and block-scaled are compiled, and run
           on a model of an SM by the tests, but never on a GPU.
Variants   blackwell_compiled.py (pipelined, specialized), blackwell_scaled.py (mxfp8, mxfp4, nvfp4), blackwell_store.py
           (the epilogue partition), blackwell_plan.py (checks, what fits shared and tensor memory)
Study      studies/tma/blackwell.py
Source     chapter section "5. NVIDIA GPU-Specific Features Testing", whose 1850 TFLOP/s in FP16 and 3700 in FP8 are not
           measured here: they need sm_100; PTX ISA, "tcgen05" and "mbarrier"; Gluon as Triton 3.6 to 3.9 have it
"""

from __future__ import annotations

import functools

from harness import Harness, Work, run

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from examples.common.device import device_limits
from examples.common.fp8 import E4M3
from examples.common.gluon import async_load, barriers, buffers, init_ring, next_slot
from examples.common.operands import check_choice
from examples.common.tiles import tile_coords
from examples.common.tma import gluon_descriptor
from examples.common.untraced import untraced
from examples.tma import blackwell_plan as plan
from examples.tma.blackwell_compiled import launch_by_the_compiler
from examples.tma.blackwell_store import epilogue_partition


@gluon.jit
def _load_partition(ring, a_desc, b_desc, M, N, K, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
    """One warp. A box that is partly out of bounds is filled with zeros and still signals its full byte count."""
    a_bufs, b_bufs, full, empty = ring
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    OPERANDS: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    slot = 0
    phase = 1  # of a new barrier, at which nobody has arrived: every slot is empty
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, OPERANDS)
            async_load(a_desc, [row, k], ready, a_bufs.index(slot))
            async_load(b_desc, [col, k], ready, b_bufs.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _mma_partition(ring, accs, M, N, K, STAGES: gl.constexpr, ACCS: gl.constexpr):
    """One warp, of which one thread issues. It waits for operands and for an accumulator that is empty, never for an
    MMA. MMAs signal by themselves, those to the same accumulator in the order in which they were issued."""
    a_bufs, b_bufs, full, empty = ring
    acc_bufs, acc_full, acc_empty = accs
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_N: gl.constexpr = b_bufs.shape[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    slot = 0
    phase = 0
    acc_slot = 0
    acc_phase = 1
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for _tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.wait(acc_empty.index(acc_slot), acc_phase)
        acc = acc_bufs.index(acc_slot)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(full.index(slot), phase)
            a = a_bufs.index(slot)
            b = b_bufs.index(slot).permute((1, 0))
            tcgen05_mma(a, b, acc, mbarriers=[empty.index(slot)], use_acc=k > 0)
            slot, phase = next_slot(slot, phase, STAGES)
        tcgen05_commit(acc_full.index(acc_slot))
        acc_slot, acc_phase = next_slot(acc_slot, acc_phase, ACCS)


@gluon.jit
def matmul_by_hand_kernel(
    a_desc, b_desc, c_desc, M, N, K, STAGES: gl.constexpr, ACCS: gl.constexpr, BUFFERS: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """At each barrier one side signals and the other waits. Each waits for the other's previous round before its next:
    neither is ever two rounds ahead, and one bit of phase tells rounds apart. The tests run these very functions on a
    model of an SM where everything asynchronous is as late, early and disorderly as PTX allows."""
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0]
    ACC: gl.constexpr = TensorMemoryLayout((BLOCK_M, BLOCK_N), col_stride=1)
    a_bufs = buffers(a_desc, STAGES)
    b_bufs = buffers(b_desc, STAGES)
    c_bufs = buffers(c_desc, BUFFERS)
    acc_bufs = allocate_tensor_memory(gl.float32, [ACCS, BLOCK_M, BLOCK_N], ACC)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    acc_full = barriers(ACCS)
    acc_empty = barriers(ACCS)
    init_ring(full, empty, STAGES, 1)
    init_ring(acc_full, acc_empty, ACCS, 1)
    fence_async_shared()
    ring = (a_bufs, b_bufs, full, empty)
    accs = (acc_bufs, acc_full, acc_empty)
    gl.warp_specialize([
        (epilogue_partition, (accs, c_desc, c_bufs, None, None, M, N, BLOCK_N, ACCS, BUFFERS, GROUP_M)),
        (_mma_partition, (ring, accs, M, N, K, STAGES, ACCS)),
        (_load_partition, (ring, a_desc, b_desc, M, N, K, STAGES, GROUP_M)),
    ], [1, 1], [24, 24])  # fmt: skip  # warps of the last two, and registers of their threads


def _launch_by_hand(a, b, c, K: int) -> None:
    limits, (M, N) = device_limits(a.device), c.shape
    block_m, block_n, width, c_buffers, stages, accs = plan.by_hand_plan(limits.shared_bytes)
    block_k = plan.BLOCK_BYTES // a.element_size()
    matmul_by_hand_kernel[(min(triton.cdiv(M, block_m) * triton.cdiv(N, block_n), limits.sms),)](
        gluon_descriptor(a, [block_m, block_k]), gluon_descriptor(b, [block_n, block_k]),
        gluon_descriptor(c, [block_m, width]), M, N, K, STAGES=stages, ACCS=accs, BUFFERS=c_buffers,
        GROUP_M=plan.GROUP_M, num_warps=plan.EPILOGUE_WARPS,
    )  # fmt: skip


@untraced
def blackwell_matmul(
    a: torch.Tensor, b: torch.Tensor, variant: str = "specialized", out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """a [M, K] @ b [N, K].T -> [M, N], contiguous; variant: "pipelined", "specialized" or "by hand"; float32 sums.

    float16, bfloat16, float8_e4m3fn or float8_e5m2, both the same, with contiguous rows; any M, N a multiple of 8, K
    one of 16 bytes (0 too). out_dtype is float16 or bfloat16: that of a unless given, for FP8 bfloat16.

    Raises TypeError for another dtype; ValueError for rank, inner sizes that differ, a layout that TMA cannot load or
    an unknown variant; RuntimeError for an architecture without TMA, a device without Triton, an input that requires
    grad or, by hand, an architecture without tensor memory, and the interpreter.
    """
    M, N, K, out_dtype = plan.check_operands("blackwell_matmul", a, b, out_dtype)
    check_choice("blackwell_matmul", plan.VARIANTS, variant=variant)
    if variant == "by hand":
        plan.require_tensor_memory("blackwell_matmul", a.device, "variant='specialized'")
    if not (M and N and K):
        return torch.zeros((M, N), dtype=out_dtype, device=a.device)  # nothing to add up, or nothing to write
    c = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if variant == "by hand":
        _launch_by_hand(a, b, c, K)
    else:
        launch_by_the_compiler(a, b, c, variant == "specialized")
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double().T


def answer(code: dict, table, ran: bool) -> str:
    if not code:
        return "No code was compiled in this run."

    def made(sm: int) -> str:
        kernel = code["specialized", sm]
        core = next(name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in kernel.found)
        where = f" in {kernel.tensor_memory} columns of tensor memory" if kernel.tensor_memory else ""
        warps = f"{kernel.warps} warps in partitions" if "setmaxnreg" in kernel.found else "no partitions"
        return f"sm_{sm} {core}{where}, {warps}"

    by_hand = f"by hand {code['by hand', 100].warps}; {'run here' if ran else 'compiled, not run'}"
    here = f" Here {table.over(table.baseline, 'specialized'):.2f}x {table.baseline}." if table.timed else ""
    return f"tl.dot with warp_specialize becomes on {made(90)}; {made(100)} ({by_hand}); {made(120)}.{here}"


def demo(h: Harness) -> None:
    for dtype in (h.half, E4M3):
        for M, N, K in plan.EDGES:
            a, b = h.randn(M, K, dtype=dtype), h.randn(N, K, dtype=dtype)
            for variant in plan.runnable(h.device):
                fn = functools.partial(blackwell_matmul, variant=variant, out_dtype=h.half)
                what = f"{variant} {M}x{N}x{K} {str(dtype).removeprefix('torch.')}"
                h.check(fn, reference, a, b, what=what, dtype=h.half, **plan.budget(dtype, K))

    x, code = h.meta(4096, 4096, dtype=h.half), {}
    for variant, find in plan.FIND.items():
        code |= {(variant, kernel.sm): kernel for kernel in h.codegen(blackwell_matmul, x, x, variant, find=find)}

    n = h.pick(interpreted=160, quick=4096, full=8192) if h.timing else 160
    a, b, library = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half), "torch" if h.interpreted else "cuBLAS"
    variants = {variant: functools.partial(blackwell_matmul, variant=variant) for variant in plan.runnable(h.device)}
    table = h.compare(
        {library: lambda a, b: a @ b.T} | variants, reference, a, b, baseline=library, terms=n, case=f"{n}x{n}x{n}",
        work=Work(bytes=6 * n * n, flops=2 * n**3, dtype=h.half),
        wrong={"without its last K step": lambda a, b: reference(a[:, :-64], b[:, :-64])}, default="specialized",
    )  # fmt: skip
    h.answer(lambda: answer(code, table, "by hand" in variants), timed=False)


if __name__ == "__main__":
    run(demo)
