"""FP8 GEMM: with scales per tensor or per row, the tensor cores multiply FP8 as it lies in memory.

A scale that does not vary along K factors out of the sum: (a * scale_a) @ (b * scale_b) is a @ b, scaled once per
element of the result. Casting to 16 bits first gives the same products at half the rate. For n = 4096 that is 2 n^3 =
137 GFLOP and n^2 (1 + 1 + 2) = 67 MB: at the data sheet's rates 70 us of an H200's tensor cores, 14 us of its memory.

The MMAs of a tile take half the time that they take in bf16; its epilogue (scales, bias, 64 KiB to store) takes as long
as in bf16. While the epilogue is exposed, the tensor cores idle, so the kernels differ in what runs meanwhile:

  pointers          one program per tile; any layout with K contiguous, which is what FP8 tensor cores take (this file);
  persistent        one program per SM, by TMA: the loads of the next tile run during the store;
  warp specialized  in Gluon, for Hopper: one warpgroup stores its half of a tile while the other multiplies.

fp8_matmul takes warp specialized on sm_90, persistent on later GPUs, pointers on sm_89 or where TMA does not apply.

Question   What does an FP8 GEMM need to be twice as fast as bf16, and as fast as cuBLASLt?
Needs      triton, sm_89
Wins when  scales are per tensor or per row, and K is short enough for an accumulator of about 14 bits, which is what
           Hopper's FP8 tensor cores have. Scales along K, and accumulators in float32: blockwise_matmul.py.
Variants   fp8_matmul_persistent.py, fp8_matmul_warp_specialized.py
Study      studies/fp8/fp8_matmul.py, studies/fp8/fp8_matmul_models.py
Source     chapter section "3. `triton_fp8_advanced.py` - FP8 Operations in Triton", whose kernel has no scales, and
           whose 90-95 % of cuBLAS holds for "pointers": 92 % on average (H200); chapter section "Key Takeaways", whose
           2x FP16 is 1.75x at 4096, 1.88x at 8192, 1.5 to 2.1x in the study (H200); layouts, arguments: _scaled_mm's
"""

from __future__ import annotations

import functools
import itertools
import math

from harness import Harness, Work, geomean, run

import torch
import triton
import triton.language as tl

from examples.common.device import architecture
from examples.common.fp8 import E4M3, E5M2
from examples.common.fp8_gemm import check_scaled_gemm, operands, torch_dequantized
from examples.common.gluon import gluon_architecture, require_wgmma
from examples.common.operands import check_choice, check_fp8_tma, fp8_tma_takes
from examples.common.tiles import tile_coords
from examples.common.untraced import untraced
from examples.fp8.fp8_matmul_persistent import GROUP_M, fitting_tile, launch_persistent, scale_strides
from examples.fp8.fp8_matmul_warp_specialized import launch_warp_specialized

# BLOCK_M, BLOCK_N, BLOCK_K, warps; the first that fits is taken. BLOCK_K is 128 bytes of a row, the widest swizzle of
# shared memory.
POINTER_TILES = [(128, 256, 128, 8), (128, 128, 128, 8), (64, 128, 128, 4)]


@triton.jit
def fp8_matmul_pointers_kernel(
    a_ptr, b_ptr, c_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, M, N, K,
    stride_am, stride_bn, stride_cm, stride_sa, stride_sb,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row, col = tile_coords(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows, cols, inner = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows and columns past the edge wrap around; the masked store discards them.
    a_ptrs = a_ptr + (rows % M)[:, None].to(tl.int64) * stride_am + inner[None, :]
    b_ptrs = b_ptr + inner[:, None] + (cols % N)[None, :].to(tl.int64) * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc)  # FP8 goes in as it is
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    # With a stride of 0 one scale serves all.
    scale_a = tl.load(scale_a_ptr + rows.to(tl.int64) * stride_sa, mask=rows < M, other=0.0)
    scale_b = tl.load(scale_b_ptr + cols.to(tl.int64) * stride_sb, mask=cols < N, other=0.0)
    acc = acc * (scale_a[:, None] * scale_b[None, :])
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


def _launch_pointers(a, b, c, scale_a, scale_b, bias) -> None:
    (M, K), N = a.shape, b.shape[1]
    block_m, block_n, block_k, num_warps, stages = fitting_tile(a.device, POINTER_TILES, c.element_size())
    fp8_matmul_pointers_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        a, b, c, scale_a, scale_b, bias, M, N, K,
        a.stride(0), b.stride(1), c.stride(0), *scale_strides(scale_a, scale_b),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=K % block_k == 0, GROUP_M=GROUP_M,
        num_warps=num_warps, num_stages=stages,
    )  # fmt: skip


LAUNCH = {
    "pointers": _launch_pointers,
    "persistent": launch_persistent,
    "warp specialized": launch_warp_specialized,
}
VARIANTS = tuple(LAUNCH)
HALF = "cuBLAS bfloat16"


def runnable(device: torch.device) -> tuple[str, ...]:
    """The variants that a GPU, or the interpreter, runs: TMA comes with sm_90, warp specialized is for sm_90 alone."""
    return VARIANTS[: 1 if architecture(device) < 90 else 3 if gluon_architecture(device) == 90 else 2]


def choose(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> str:
    """The last variant that runs here, where TMA can load a and b and store the result; else pointers."""
    return runnable(a.device)[-1] if fp8_tma_takes(a, b, out_dtype) else "pointers"


@untraced
def fp8_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, variant: str | None = None, check_scales: bool = True,
) -> torch.Tensor:  # fmt: skip
    """(a * scale_a) @ (b * scale_b) + bias -> [M, N], contiguous, by the variant of choose(), or by one of VARIANTS.

    a [M, K] has contiguous rows, b [K, N] contiguous columns (weight.t()); each is float8_e4m3fn or float8_e5m2.
    scale_a is [], [1] or [M, 1], scale_b [], [1] or [1, N], in float32; their product is made first, and what it loses
    below 2**-126 is lost. out_dtype is bfloat16, float16 or float32; bias [N] has it, and is added after scaling. Any
    M, N and K, 0 too; by TMA K is a multiple of 16, N one of 16 bytes of the result. check_scales reads the scales,
    which waits for the GPU; pass False where they are known to be good.

    Raises TypeError for another dtype; ValueError for rank, shapes, devices or layouts, an unknown variant, a scale
    that is not positive and finite; RuntimeError for a GPU that cannot run it, or an input that requires grad.
    """
    name = "fp8_matmul"
    M, N, K = check_scaled_gemm(name, a, b, scale_a, scale_b, bias, out_dtype, check_scales)
    check_choice(name, (None, *VARIANTS), variant=variant)
    if variant in ("persistent", "warp specialized"):
        check_fp8_tma(name, a, b, out_dtype, "variant='pointers'")
    if variant == "warp specialized":
        require_wgmma(name, a.device, "variant='persistent'")
    c = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if c.numel():
        # TMA cannot describe a matrix without columns; the pointer kernel then writes the bias.
        LAUNCH[(variant or choose(a, b, out_dtype)) if K else "pointers"](a, b, c, scale_a, scale_b, bias)
    return c


def reference(a, b, scale_a, scale_b, bias=None) -> torch.Tensor:
    want = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
    return want if bias is None else want + bias.double()


def without_last_step(a, b, scale_a, scale_b) -> torch.Tensor:
    """A fault: the result of a loop over K that ends a step too early."""
    step = POINTER_TILES[0][2]
    return reference(a[:, :-step], b[:-step], scale_a, scale_b)


def budget(h: Harness, K: int) -> dict:
    """On Hopper an FP8 instruction cuts 32 products and the sum so far to about 14 bits. The largest error seen on an
    H200 takes 76 % of this budget, which stops growing at K = 4096: with K of 16384 it would otherwise hide the loss
    of 32 products. The interpreter sums in float32."""
    return {"terms": K} if h.interpreted else {"terms": min(K, 4096), "acc": 2.0**-12}


def compare(h: Harness, inputs: tuple, libraries: dict, title: str | None = None):
    """The table of one size: `libraries`, the first the baseline, all variants, and the same numbers in bfloat16."""
    (M, K), N = inputs[0].shape, inputs[1].shape[1]
    wide = [x.bfloat16() for x in inputs[:2]]  # exact; their product is left unscaled
    ours = {"triton": functools.partial(fp8_matmul, check_scales=False)}
    ours |= {name: functools.partial(fp8_matmul, variant=name, check_scales=False) for name in runnable(h.device)}
    return h.compare(
        libraries | {HALF: lambda *_: torch.matmul(*wide)} | ours, reference, *inputs, title=title,
        references={HALF: lambda a, b, *_: a.double() @ b.double()}, baseline=next(iter(libraries)),
        work=Work(bytes=M * K + K * N + 2 * M * N, flops=2 * M * N * K, dtype=E4M3),
        case=f"{M}x{N}x{K}", dtype=torch.bfloat16, **budget(h, K),
        budgets={HALF: {"acc": torch.float32, "roundings": 0}}, wrong={"without its last K step": without_last_step},
    )  # fmt: skip


def answer(tables: list) -> str:
    library, reached = tables[0].baseline, geomean(tables, tables[0].baseline, "triton")
    rates = " and ".join(f"{table.over(HALF, 'triton'):.2f}x at {table.case.split('x')[0]}" for table in tables)
    steps = {pair: geomean(tables, *pair) for pair in itertools.pairwise(VARIANTS) if pair[1] in tables[0]}
    won = ", ".join(f"{after} is {ratio:.2f}x {before}" for (before, after), ratio in steps.items())
    pays = "pays" if math.prod(steps.values()) > 1.02 else "does not pay"
    return (
        f"FP8 beside {HALF}: {rates}; it {'keeps up with' if reached > 0.97 else 'stays behind'} {library} "
        f"({reached:.2f}x). Overlapping the store {f'{pays}: {won}' if won else 'takes TMA, from sm_90 on'}."
    )


def demo(h: Harness) -> None:
    # One row; tails in each dimension and more tiles than SMs (the interpreter plays a GPU of four); nothing to add up.
    for M, N, K in [(1, 16, 16), (129, 520, 272), (5, 16, 0)]:
        for variant in runnable(h.device):
            for dtypes, rows, out in [((E4M3, E4M3), False, torch.bfloat16), ((E5M2, E4M3), True, torch.float16)]:
                inputs = operands(h, M, N, K or 16, rows, dtypes)
                inputs = (inputs[0][:, :K], inputs[1][:K], *inputs[2:], h.randn(N, dtype=out) if rows else None)
                fn = functools.partial(fp8_matmul, out_dtype=out, variant=variant)
                h.check(fn, reference, *inputs, what=f"{variant} {M}x{N}x{K} {out}", dtype=out, **budget(h, K))

    a, b = h.meta(4096, 4096, dtype=E4M3), h.meta(4096, 4096, dtype=E5M2).t()
    scales, tma = [h.meta(*shape, dtype=torch.float32) for shape in ((4096, 1), (1, 4096))], "cp.async.bulk.tensor"
    find = {89: ("mma.sync", "cp.async"), 90: ("wgmma", tma, "setmaxnreg"), 100: ("tcgen05.mma", tma), 120: (tma,)}
    h.codegen(fp8_matmul, a, b, *scales, find={sm: ("mma f8", *names) for sm, names in find.items()})

    cublaslt = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
    libraries = {"torch": torch_dequantized} if h.interpreted else {"_scaled_mm": cublaslt}
    sizes = h.pick(interpreted=(272,), quick=(4096,), full=(4096, 8192))
    tables = [compare(h, operands(h, n, n, n, rows=True), libraries) for n in sizes]
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
