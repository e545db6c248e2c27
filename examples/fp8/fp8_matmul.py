"""FP8 GEMM: with scales per tensor or per row, the tensor cores multiply FP8 as it lies in memory.

A scale that does not vary along K leaves the sum: (a * scale_a) @ (b * scale_b) is a @ b, scaled once per element of
the result. Casting to 16 bits first gives the same products at half the rate. With n = 4096 these are 2 n^3 = 137 GFLOP
and n^2 (1 + 1 + 2) = 67 MB: 70 us of an H200's tensor cores, 14 us of its memory.

The MMAs of a tile take half the time that they take in bf16, its epilogue (scales, bias, 64 KiB to store) all of it.
While it is exposed the tensor cores idle, so the kernels differ in what runs meanwhile:

  pointers          one program per tile; any layout with K contiguous, which is what FP8 tensor cores take;
  persistent        one program per SM, by TMA: the loads of the next tile run during the store (this file);
  warp specialized  in Gluon, for Hopper: one warpgroup stores its half of a tile while the other multiplies.

fp8_matmul takes warp specialized on sm_90, persistent on later GPUs, and pointers for what TMA cannot load.

Question   What does an FP8 GEMM need to run at twice the speed of bf16, and to keep up with cuBLASLt?
Needs      triton, sm_89
Wins when  scales are per tensor or per row, and K is short enough for a sum that Hopper's tensor cores keep in about
           14 bits. Finer scales along K, and better sums: blockwise_matmul.py.
Variants   fp8_matmul_pointers.py, fp8_matmul_warp_specialized.py
Study      studies/fp8/fp8_matmul.py
Source     chapter section "FP8"; layouts and arguments as torch._scaled_mm has them
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

from harness import Harness, Work, geomean, run

import torch
import triton
import triton.language as tl

from examples.common.device import architecture, device_limits, require_triton_device
from examples.common.fp8 import E4M3, E5M2, OUT_DTYPES, quantize_reference, require_scales  # noqa: F401
from examples.common.gluon import gluon_architecture, require_wgmma
from examples.common.operands import check_choice, check_fp8_gemm, check_fp8_tma, fp8_tma_takes
from examples.common.tiles import split_columns, tile_coords
from examples.common.tma import tma_descriptor
from examples.fp8.fp8_matmul_pointers import GROUP_M, fitting_tile, launch_pointers, scale_strides
from examples.fp8.fp8_matmul_warp_specialized import launch_warp_specialized


@triton.jit
def _store(c_desc, acc, row, col, scale_a, scale_b, bias, ROWS: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr):
    """Scale a tile and store it, PARTS times a part of its columns; without ROWS scale_a is the product of both."""
    if PARTS > 1:
        width: tl.constexpr = acc.shape[1] // 2
        left, right = split_columns(acc)
        scale_left, scale_right = scale_b, scale_b
        if ROWS:
            scale_left, scale_right = scale_b.reshape(2, width).permute(1, 0).split()
        bias_left, bias_right = bias, bias
        if BIAS:
            bias_left, bias_right = bias.reshape(2, width).permute(1, 0).split()
        _store(c_desc, left, row, col, scale_a, scale_left, bias_left, ROWS, BIAS, PARTS // 2)
        _store(c_desc, right, row, col + width, scale_a, scale_right, bias_right, ROWS, BIAS, PARTS // 2)
    else:
        acc = acc * (scale_a[:, None] * scale_b[None, :]) if ROWS else acc * scale_a
        if BIAS:
            acc += bias[None, :].to(tl.float32)
        c_desc.store([row, col], acc.to(c_desc.dtype))


@triton.jit
def fp8_matmul_persistent_kernel(
    a_desc, bt_desc, c_desc, scale_a_ptr, scale_b_ptr, bias_ptr, M, N, K, stride_sa, stride_sb, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    BIAS: tl.constexpr = bias_ptr is not None
    scale = 1.0 if ROWS else tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    # flatten: the loops over tiles and K are one pipeline, so loads of the next tile run while this one is stored.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            acc = tl.dot(a_desc.load([row, k]), bt_desc.load([col, k]).T, acc)  # FP8 goes in as it is
        rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        scale_a, scale_b, bias = scale, scale, scale
        if ROWS:
            scale_a = tl.load(scale_a_ptr + rows.to(tl.int64) * stride_sa, mask=rows < M, other=0.0)
            scale_b = tl.load(scale_b_ptr + cols.to(tl.int64) * stride_sb, mask=cols < N, other=0.0)
        if BIAS:
            bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
        _store(c_desc, acc, row, col, scale_a, scale_b, bias, ROWS, BIAS, PARTS)


# BLOCK_M, BLOCK_N, BLOCK_K, warps, and in how many parts a tile is stored: a part needs shared memory of its own, as
# the loads of the next tile already own the rest.
TMA_TILES = [(128, 256, 128, 8, 4), (128, 128, 128, 8, 2)]


def _launch_persistent(a, b, c, scale_a, scale_b, bias) -> None:
    (M, K), N = a.shape, b.shape[1]
    block_m, block_n, block_k, num_warps, parts, stages = fitting_tile(a.device, TMA_TILES, c.element_size())
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    fp8_matmul_persistent_kernel[(min(tiles, device_limits(a.device).sms),)](
        tma_descriptor(a, [block_m, block_k]), tma_descriptor(b.t(), [block_n, block_k]),
        tma_descriptor(c, [block_m, block_n // parts]), scale_a, scale_b, bias, M, N, K,
        *scale_strides(scale_a, scale_b), ROWS=max(scale_a.numel(), scale_b.numel()) > 1,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PARTS=parts, GROUP_M=GROUP_M,
        num_warps=num_warps, num_stages=stages,
    )  # fmt: skip


LAUNCH: dict[str, Callable] = {
    "pointers": launch_pointers,
    "persistent": _launch_persistent,
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


def fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    variant: str | None = None,
    check_scales: bool = True,
) -> torch.Tensor:
    """(a * scale_a) @ (b * scale_b) + bias -> [M, N], contiguous, by the variant of choose(), or by one of VARIANTS.

    a [M, K] has contiguous rows, b [K, N] contiguous columns (weight.t()); each is float8_e4m3fn or float8_e5m2.
    scale_a is [], [1] or [M, 1], scale_b [], [1] or [1, N], in float32; their product is made first, and what it loses
    below 2**-126 is lost. out_dtype is bfloat16, float16 or float32; bias [N] has it, and is added after scaling. Any
    M, N and K, 0 too; by TMA K is a multiple of 16, N one of 16 bytes of the result. check_scales reads the scales,
    which waits for the GPU; pass False where they are known to be good.

    Raises TypeError for another dtype; ValueError for rank, shapes, devices or layouts, an unknown variant, a scale
    that is not positive and finite; RuntimeError for a device or GPU that cannot run it, too little shared memory, or
    an input that requires grad.
    """
    name = "fp8_matmul"
    M, N, K = check_fp8_gemm(name, a, b, out_dtype)
    scales = {"scale_a": (scale_a, ((), (1,), (M, 1))), "scale_b": (scale_b, ((), (1,), (1, N)))}
    require_scales(name, a, check_scales, **scales)
    require_triton_device(name, a, scale_a, scale_b, *([] if bias is None else [bias]))
    if bias is not None and bias.dtype is not out_dtype:
        raise TypeError(f"{name}: bias is {bias.dtype}; it must be that of the result, {out_dtype}")
    if bias is not None and (tuple(bias.shape) != (N,) or (N > 1 and bias.stride(0) != 1)):
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, strides {bias.stride()}; need [{N}], contiguous")
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


def budget(h: Harness, K: int) -> dict:
    """On Hopper an FP8 instruction cuts 32 products and the sum so far to about 14 bits; the interpreter does not."""
    return {"terms": K} if h.interpreted else {"terms": K, "acc": 2.0**-13, "roundings": K // 32}


def operands(h: Harness, M: int, N: int, K: int, rows: bool, dtypes=(E4M3, E4M3)) -> tuple[torch.Tensor, ...]:
    """a, b, scale_a and scale_b of a layer: activations, and weights as [N, K]; rows of different sizes."""
    quantized = []
    for n, dtype in zip((M, N), dtypes, strict=True):
        x = h.randn(n, K).mul_(h.randn(n, 1, scale=0.5).exp_())
        q, scale = quantize_reference(x, (1, K) if rows else (n, K), dtype)
        quantized += [q, scale if rows else scale.reshape(())]
    a, scale_a, w, scale_w = quantized
    return a, w.t(), scale_a, scale_w.t()


def torch_dequantized(a, b, scale_a, scale_b) -> torch.Tensor:
    return ((a.float() * scale_a) @ (b.float() * scale_b)).bfloat16()


def compare(h: Harness, inputs: tuple, libraries: dict[str, Callable], title: str | None = None):
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
    )  # fmt: skip


def answer(tables: list) -> str:
    library, rate = tables[0].baseline, geomean(tables, HALF, "triton")
    reached = geomean(tables, library, "triton")
    steps = {pair: geomean(tables, *pair) for pair in itertools.pairwise(VARIANTS) if pair[1] in tables[0]}
    won = ", ".join(f"{after} is {ratio:.2f}x {before}" for (before, after), ratio in steps.items())
    pays = "pays" if math.prod(steps.values()) > 1.02 else "does not pay"
    return (
        f"FP8 runs at {rate:.2f}x {HALF} and {'keeps up with' if reached > 0.97 else 'stays behind'} {library} "
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
