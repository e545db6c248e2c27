"""Warp specialization: some warps only load, others only multiply, and when the compiler really does that.

In an ordinary kernel every warp waits for loads, multiplies and stores. In a warp-specialized one the warps form
partitions: a producer keeps the loads in flight, and consumers do nothing but multiply. They meet at barriers in shared
memory (mbarrier), and setmaxnreg moves registers from the producer to the consumers. In Triton one argument asks for
it, tl.range(..., warp_specialize=True), and the compiler may ignore it without saying so. The generated code shows what
really happened: a specialized kernel has setmaxnreg, and more warps than were asked for.

Hopper's compiler wants 4 warps and makes three partitions of 4: one producer, two consumers. It splits a tile of 128
rows between the consumers if the kernel makes the descriptors; with descriptors from the host it fails with an error. A
tile of 64 rows is multiplied by both consumers and stored twice. With 8 warps, or on a flattened loop, it drops the
request. Blackwell's compiler takes each of these (Triton 3.6: except an unflattened loop over tiles). A loop without
tensor cores, such as the chapter's, is never specialized.

Question   When does warp_specialize=True specialize warps, and what is it worth?
Needs      triton, sm_90
Wins when  not on Hopper with Triton 3.6: a tile that is split is as fast as without partitions, and one that is not
           split is slower. There, write the partitions yourself, in Gluon (examples/tma/gluon_matmul.py).
Study      studies/triton/warp_specialized_matmul.py (more loops, the chapter's own, Compute Sanitizer's reports)
Source     chapter section "Warp Specialization", whose elementwise loop stays as it is: 4 warps and no setmaxnreg, on
           sm_90 and on sm_100
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Table, Work, run

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.operands import check_choice, check_gemm, short_of_k
from examples.common.quiet import stderr_closed
from examples.common.tiles import tile_coords
from examples.common.tma import launch_with_scratch, tma_descriptor
from examples.common.untraced import untraced

DTYPES = (torch.float16, torch.bfloat16)
LOOPS = ("k", "tiles", "flattened tiles")  # which loop is specialized
BLOCK_K, GROUP_M = 64, 8
BLOCKS = {64: (128, 4), 128: (256, 3)}  # rows of a tile: its columns, and how many steps of K are in shared memory
LARGE_BYTES = 2 * (3 * (128 + 256) * BLOCK_K + 128 * 256) + 1024  # those of 128 rows, the tile of c, and barriers


@triton.jit
def matmul_specialized_kernel(
    a, b, c, M, N, K, stride_am, stride_bk, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr, OVER_K: tl.constexpr, OVER_TILES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    if DESCRIPTORS == "host":
        a_desc, b_desc, c_desc = a, b, c
    else:
        a_desc = tl.make_tensor_descriptor(a, [M, K], [stride_am, 1], [BLOCK_M, BLOCK_K])
        b_desc = tl.make_tensor_descriptor(b, [K, N], [stride_bk, 1], [BLOCK_K, BLOCK_N])
        c_desc = tl.make_tensor_descriptor(c, [M, N], [stride_cm, 1], [BLOCK_M, BLOCK_N])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    # With one program for each tile this loop runs once; a persistent kernel has fewer programs than tiles.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=OVER_TILES):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES, warp_specialize=OVER_K):
            acc = tl.dot(a_desc.load([row, k]), b_desc.load([k, col]), acc)
        c_desc.store([row, col], acc.to(c_desc.dtype))


@untraced
def matmul_specialized(
    a: torch.Tensor, b: torch.Tensor, loop: str = "tiles", warp_specialize: bool = True, block_m: int | None = None,
    num_warps: int | None = None, descriptors: str = "kernel",
) -> torch.Tensor:  # fmt: skip
    """a [M, K] @ b [K, N] with `loop` of LOOPS asked to be specialized, or not: c [M, N], contiguous, dtype of a.

    "k" runs one program per tile, the others one per SM. `descriptors` says who makes those of TMA: "kernel" or "host".
    block_m is 64 or 128; None is 128 where shared memory and Hopper's compiler take it, else 64. num_warps is 4 or 8;
    None is 4, which that compiler makes 12, or what the tile needs without partitions.
    float16 or bfloat16, both the same, with a float32 accumulator. Rows are contiguous, K and N multiples of 8, M any
    (0 too). Raises TypeError for another dtype or two dtypes; ValueError for rank, two devices, inner sizes that
    differ, a layout that TMA cannot load, or an option that does not exist; RuntimeError for options that the compiler
    fails on, a device without Triton or an input that requires grad; triton.OutOfResources for too large a tile.
    """
    name = "matmul_specialized"
    M, N, K = check_gemm(name, a, b, DTYPES, tma=True)
    check_choice(name, LOOPS, loop=loop)
    check_choice(name, ("kernel", "host"), descriptors=descriptors)
    limits = device_limits(a.device)
    if block_m is None:
        small = warp_specialize and descriptors == "host" and loop != "flattened tiles"
        block_m = 64 if small or limits.shared_bytes < LARGE_BYTES else 128
    if num_warps is None:
        num_warps = 4 if block_m == 64 or (warp_specialize and loop != "flattened tiles") else 8
    check_choice(name, tuple(BLOCKS), block_m=block_m)
    check_choice(name, (4, 8), num_warps=num_warps)
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    block_n, stages = BLOCKS[block_m]
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    blocks = [block_m, BLOCK_K], [BLOCK_K, block_n], [block_m, block_n]
    described = [tma_descriptor(x, block) for x, block in zip((a, b, c), blocks, strict=True)]
    launch = partial(
        matmul_specialized_kernel[(tiles if loop == "k" else min(tiles, limits.sms),)],
        *(described if descriptors == "host" else (a, b, c)), M, N, K, *(each.strides[0] for each in described),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, STAGES=stages, DESCRIPTORS=descriptors,
        OVER_K=warp_specialize and loop == "k", OVER_TILES=warp_specialize and loop != "k",
        FLATTEN=loop == "flattened tiles", num_warps=num_warps,
    )  # fmt: skip
    launch_with_scratch(a.device, launch)
    return c


def runs(fn, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether this GPU's compiler takes the form, and its tile fits."""
    try:
        with stderr_closed():  # MLIR prints the module that it refuses
            fn(a, b)
    except (triton.OutOfResources, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PassManager" not in str(error):
            raise
        return False
    return True


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


TIMED = {  # each without and with the request
    "64 rows": {"loop": "k", "block_m": 64, "descriptors": "host"},  # without partitions, the host's are faster
    "128 rows": {"loop": "k", "block_m": 128},
    "persistent": {"loop": "tiles", "block_m": 128},
}
ASKED = TIMED | {
    "128 rows + host descriptors": {"loop": "k", "block_m": 128, "descriptors": "host"},
    "128 rows + 8 warps": {"loop": "k", "block_m": 128, "num_warps": 8},
    "flattened": {"loop": "flattened tiles"},
}


def outcome(kernel) -> str:
    """What became of warp_specialize=True, read from the generated code."""
    if kernel.error:
        return "not supported"
    return f"{'specialized' if kernel.found.get('setmaxnreg') else 'ignored'}, {kernel.warps} warps"


def demo(h: Harness) -> None:
    x, became = h.meta(4096, 4096), {}
    for label, form in ASKED.items():
        find = {90: ("cp.async.bulk.tensor", "wgmma", "setmaxnreg") if label in TIMED else (), 100: ()}
        became[label] = {f"sm_{k.sm}": outcome(k) for k in h.codegen(matmul_specialized, x, x, find=find, **form)}
    h.table("what becomes of warp_specialize=True", became)

    for M, N, K in [(1, 8, 8), (129, 520, 264), (5, 16, 0)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        for label, form in ASKED.items():
            fn = partial(matmul_specialized, **form)
            if runs(fn, a, b) and not h.SANITIZED:  # a sanitizer makes results wrong (see the study): it sees them run
                h.check(fn, reference, a, b, terms=K, what=f"matmul_specialized {label} {M}x{N}x{K}")

    tables = [compare(h, n) for n in h.pick(interpreted=(320,), quick=(4096,), full=(4096, 8192))]

    def answer() -> str:
        last = tables[-1]
        taken = [label for label, cells in became.items() if cells.get("sm_90", "").startswith("specialized")]
        worth = {label: last.over(label, f"{label}, WS") for label in TIMED if f"{label}, WS" in last}
        best = max(worth, key=worth.get)
        advice = f"use it with {best}" if worth[best] > 1.02 else "leave it out"
        ratios = ", ".join(f"{label} {ratio:.2f}x" for label, ratio in worth.items())
        return (
            f"sm_90 specializes warps only for: {', '.join(taken) or 'nothing'}. Speed with it over without, at "
            f"{last.case.split('x')[0]}: {ratios}: {advice}."
        ).replace(" rows", "-row tiles")

    h.answer(answer)


def compare(h: Harness, n: int) -> Table:
    """Each form without and with warp specialization (WS), beside cuBLAS."""
    a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
    baseline = "cuBLAS" if a.is_cuda else "torch"
    variants = {baseline: torch.matmul}
    for label, form in TIMED.items():
        for asked in (False, True):
            fn = partial(matmul_specialized, warp_specialize=asked, **form)
            if runs(fn, a[:16, :16], b[:16, :16]) and not (asked and h.SANITIZED):
                variants[label + ", WS" * asked] = fn
    work, case = Work(bytes=6 * n * n, flops=2 * n**3, dtype=h.half), f"{n}x{n}x{n}"
    return h.compare(
        variants, reference, a, b, baseline=baseline, work=work, case=case, terms=n, wrong=short_of_k(reference),
        default=next((name for name in reversed(variants) if name.endswith("WS")), None),
    )  # fmt: skip


if __name__ == "__main__":
    run(demo)
