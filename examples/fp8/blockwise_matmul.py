"""Blockwise matmul: FP8 with scales of 1x128 and 128x128, partial sums promoted to float32 between the MMAs.

A scale that varies along K cannot be taken out of the sum. Each group of 128 along K is summed by itself, scaled, and
added to a float32 accumulator: it is promoted. That also helps precision: Hopper's FP8 tensor cores accumulate in about
14 bits, and now sum only 128 products at a time.

The price: a group of a 128 x 128 tile is 4.2 MFLOP, 512 clocks of an SM's tensor cores (Hopper). Promoting it is 16384
FMAs, 128 clocks: a quarter more, if the tensor cores idle meanwhile. So one warpgroup should promote while another
multiplies:

  pointers          plain Triton (this file): tiles of 64 x 128, two programs share an SM; half of the ceiling (H200);
  warp specialized  in Gluon, for Hopper: TMA, one program per SM, tiles of 128 or 192 x 128, warpgroups out of step.

blockwise_matmul takes warp specialized on sm_90 where TMA can load the operands, for which scale_a must be contiguous
along M, as m_major(scale_a) of examples/common/fp8_gemm.py returns it; else pointers.

Question   What do fine scales along K cost in an FP8 GEMM, and what does promotion buy at long K?
Needs      triton, sm_89
Wins when  ranges differ along K. Else fp8_matmul.py, which never stops to promote. If only its accumulator is too
           coarse (K is long, products do not cancel): torch._scaled_mm(use_fast_accum=False) promotes without scales
           along K, as tl.dot(..., max_num_imprecise_acc=128) does in Triton (FP8 on sm_90).
Variants   blockwise_matmul_warp_specialized.py
Study      studies/fp8/blockwise_matmul.py
Source     goes beyond the chapter: the recipe of DeepSeek-V3's report; layouts as torch.nn.functional.scaled_mm's
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from harness import Harness, Work, geomean, run

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits, require_triton_device
from examples.common.fp8 import E4M3, E5M2, dequantize_reference, require_scales
from examples.common.fp8_gemm import blockwise_library as library
from examples.common.fp8_gemm import blockwise_operands as operands
from examples.common.gluon import gluon_architecture
from examples.common.operands import check_choice, check_fp8_gemm, fp8_tma_takes
from examples.common.quantize import GROUP
from examples.common.tiles import tile_coords
from examples.common.untraced import untraced
from examples.fp8.blockwise_matmul_warp_specialized import launch_warp_specialized, require_hopper_layout, scales_fit

# A program takes 96 KiB of shared memory, so two of 4 warps share an SM of Hopper or datacenter Blackwell. An SM of
# 100 KiB (Ada, consumer Blackwell: mma.sync, 72 KiB) holds one, so that one has 8 warps.
TILE = {"BLOCK_M": 64, "num_stages": 4, "GROUP_M": 16}
LITTLE_SHARED = 128 * 1024


@triton.jit
def blockwise_matmul_pointers_kernel(
    a_ptr, b_ptr, c_ptr, scale_a_ptr, scale_b_ptr, M, N, K,
    stride_am, stride_bn, stride_cm, stride_sam, stride_sak, stride_sbk, stride_sbn,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # GROUP is BLOCK_N and BLOCK_K too: in each step one scale of b serves the tile, and K needs no mask.
    row, col = tile_coords(tl.program_id(0), M, N, BLOCK_M, GROUP, GROUP_M)
    rows, cols, inner = row + tl.arange(0, BLOCK_M), col + tl.arange(0, GROUP), tl.arange(0, GROUP)
    # Rows and columns past the edge wrap around; the masked store discards them.
    wrapped_rows, wrapped_cols = (rows % M).to(tl.int64), (cols % N).to(tl.int64)
    a_ptrs = a_ptr + wrapped_rows[:, None] * stride_am + inner[None, :]
    b_ptrs = b_ptr + inner[:, None] + wrapped_cols[None, :] * stride_bn
    scale_a_ptrs = scale_a_ptr + wrapped_rows * stride_sam
    scale_b_ptr += col // GROUP * stride_sbn
    acc = tl.zeros((BLOCK_M, GROUP), dtype=tl.float32)
    for _ in range(0, K, GROUP):
        scale = tl.load(scale_a_ptrs) * tl.load(scale_b_ptr)
        partial = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs))  # from zero: only these 128 products are summed in 14 bits
        acc += partial * scale[:, None]  # promoted: added in float32, one fused multiply-add each
        a_ptrs += GROUP
        b_ptrs += GROUP
        scale_a_ptrs += stride_sak
        scale_b_ptr += stride_sbk
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


def _launch_pointers(a, b, c, scale_a, scale_b) -> None:
    (M, K), N = a.shape, b.shape[1]
    num_warps = 8 if device_limits(a.device).shared_bytes < LITTLE_SHARED else 4
    blockwise_matmul_pointers_kernel[(triton.cdiv(M, TILE["BLOCK_M"]) * triton.cdiv(N, GROUP),)](
        a, b, c, scale_a, scale_b, M, N, K,
        a.stride(0), b.stride(1), c.stride(0), *scale_a.stride(), *scale_b.stride(),
        GROUP=GROUP, **TILE, num_warps=num_warps,
    )  # fmt: skip


LAUNCH = {"pointers": _launch_pointers, "warp specialized": launch_warp_specialized}
VARIANTS = tuple(LAUNCH)
ROUNDED = "rounding to e4m3"


def runnable(device: torch.device) -> tuple[str, ...]:
    """The variants that a GPU, or the interpreter, runs."""
    return VARIANTS if gluon_architecture(device) == 90 else ("pointers",)


def choose(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, out_dtype: torch.dtype) -> str:
    """The last variant that runs here, where TMA can load a, b and scale_a and store the result; else pointers."""
    return runnable(a.device)[-1] if fp8_tma_takes(a, b, out_dtype) and scales_fit(scale_a) else "pointers"


@untraced
def blockwise_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16, variant: str | None = None, check_scales: bool = True,
) -> torch.Tensor:  # fmt: skip
    """(a * scale_a) @ (b * scale_b) -> [M, N], contiguous, by the variant of choose(), or by one of VARIANTS.

    a [M, K] has contiguous rows, b [K, N] contiguous columns (weight.t()); each is float8_e4m3fn or float8_e5m2. K is a
    multiple of 128, or 0. scale_a [M, K / 128] and scale_b [K / 128, ceil(N / 128)] are float32, and so is their
    product, which underflows below 2**-126. out_dtype is bfloat16, float16 or float32. "pointers" takes any M and N (0
    too) and scales of any strides, scale_b's below 2**31 elements apart; "warp specialized" needs rows of the result
    that are multiples of 16 bytes (N % 8 == 0 in bfloat16), scale_a with strides (1, a multiple of 4), and a and b that
    TMA can load. check_scales reads the scales, which waits for the GPU; pass False where they are known to be good.

    Raises TypeError for another dtype; ValueError for rank, shapes, devices or layouts, an unknown variant, a scale
    that is not positive and finite; RuntimeError for a GPU that cannot run it, or an input that requires grad.
    """
    name = "blockwise_matmul"
    M, N, K = check_fp8_gemm(name, a, b, out_dtype)
    if K % GROUP:
        raise ValueError(f"{name}: K is {K}, but a scale covers {GROUP} of it: pad K to a multiple, with zeros")
    groups = K // GROUP
    scales = {"scale_a": (scale_a, ((M, groups),)), "scale_b": (scale_b, ((groups, triton.cdiv(N, GROUP)),))}
    require_scales(name, a, check_scales, **scales)
    require_triton_device(name, a, scale_a, scale_b)
    check_choice(name, (None, *VARIANTS), variant=variant)
    if variant == "warp specialized":
        require_hopper_layout(name, a, b, scale_a, out_dtype)
    c = (torch.empty if K else torch.zeros)((M, N), dtype=out_dtype, device=a.device)
    if K and c.numel():
        LAUNCH[variant or choose(a, b, scale_a, out_dtype)](a, b, c, scale_a, scale_b)
    return c


def reference(a, b, scale_a, scale_b) -> torch.Tensor:
    weight = dequantize_reference(b.t(), scale_b.t(), (GROUP, GROUP))
    return dequantize_reference(a, scale_a, (1, GROUP)) @ weight.t()


def without_last_step(a, b, scale_a, scale_b) -> torch.Tensor:
    """A fault: the result of a loop over K that ends a group too early."""
    return reference(a[:, :-GROUP], b[:-GROUP], scale_a[:, :-1], scale_b[:-1])


def budget(h: Harness, K: int) -> dict:
    """On Hopper only a group is summed in about 14 bits, however long K is, and the errors of groups cancel: twice the
    largest error seen on an H200. The interpreter sums all in float32."""
    return {"terms": K} if h.interpreted else {"terms": GROUP, "acc": 2.0**-15}


def rms_errors(h: Harness, n: int, K: int, mean: float) -> dict[str, float]:
    """rms error over the rms of the result, all scales 1: of each kind of sum against float64, and of rounding a and b.

    With a mean of 0, products cancel; otherwise the sum grows with K, and what is added to it loses its low bits.
    """
    one, out = torch.ones((), device=h.device), {"out_dtype": torch.float32}
    x, w = h.randn(n, K) + mean, h.randn(n, K) + mean
    a, b = x.to(E4M3), w.to(E4M3).t()
    scale_a, scale_b = (torch.ones(K // GROUP, m, device=h.device).t() for m in (n, n // GROUP))
    got = {
        "unpromoted": h.peer("fp8/fp8_matmul").fp8_matmul(a, b, one, one, **out),
        "promoted": blockwise_matmul(a, b, scale_a, scale_b.t(), **out),
    }
    if h.device.type == "cuda":
        got["_scaled_mm, not fast"] = torch._scaled_mm(a, b, one, one, **out, use_fast_accum=False)
    want, exact = a.double() @ b.double(), x.double() @ w.double().t()
    errors = {name: ((each.double() - want).norm() / want.norm()).item() for name, each in got.items()}
    return errors | {ROUNDED: ((want - exact).norm() / exact.norm()).item()}


def every_variant(device: torch.device) -> dict[str, Callable]:
    """The call without options, "triton", and by each variant that runs here."""
    names = None, *runnable(device)
    return {name or "triton": functools.partial(blockwise_matmul, variant=name, check_scales=False) for name in names}


def compare(h: Harness, inputs: tuple, variants: dict[str, Callable], **options):
    """The table of one size; the first variant is the baseline."""
    (M, K), N = inputs[0].shape, inputs[1].shape[1]
    return h.compare(
        variants, reference, *inputs, baseline=next(iter(variants)), case=f"{M}x{N}x{K}", dtype=torch.bfloat16,
        work=Work(bytes=M * K + K * N + 2 * M * N, flops=2 * M * N * K, dtype=E4M3),
        wrong={"without its last K step": without_last_step}, **budget(h, K), **options,
    )  # fmt: skip


def answer(tables: list, plain: list, K: int, errors: dict) -> str:
    library, zero, one = tables[0].baseline, *errors.values()
    times = [f"{1 / table.over('fp8_matmul', 'triton'):.2f}x ({table.case.split('x')[0]})" for table in plain]
    return (
        f"Scales along K take {' and '.join(times)} fp8_matmul's time, at {geomean(tables, library, 'triton'):.2f}x "
        f"the speed of {library}. Relative rms error of K = {K}: {zero['promoted']:.0e} promoted, without "
        f"{zero['unpromoted']:.0e} ({one['unpromoted']:.0e} where inputs have mean 1)."
    )


def demo(h: Harness) -> None:
    # One row; one group; a tail of columns within a block, tails of rows, an odd number of groups; nothing to add up.
    for M, N, K in [(1, 8, 128), (129, 264, 384), (5, 16, 0)]:
        for variant in runnable(h.device):
            for dtypes, out in [((E4M3, E4M3), torch.bfloat16), ((E5M2, E4M3), torch.float16)]:
                a, b, scale_a, scale_b = operands(h, M, N, K or GROUP, dtypes)
                inputs = (a, b, scale_a, scale_b) if K else (a[:, :0], b[:0], scale_a[:, :0], scale_b[:0])
                fn = functools.partial(blockwise_matmul, out_dtype=out, variant=variant)
                h.check(fn, reference, *inputs, what=f"{variant} {M}x{N}x{K} {out}", dtype=out, **budget(h, K))

    x, scale_a, scale_b = h.meta(4096, 4096, dtype=E4M3), h.meta(32, 4096).float().t(), h.meta(32, 32).float().t()
    mma = {89: ("mma.sync",), 90: ("wgmma", "setmaxnreg"), 100: ("tcgen05.mma",), 120: ("mma.sync",)}
    h.codegen(blockwise_matmul, x, x.t(), scale_a, scale_b, find={sm: ("mma f8", *each) for sm, each in mma.items()})

    peer, one = h.peer("fp8/fp8_matmul"), torch.ones((), device=h.device)
    single = {"fp8_matmul": lambda a, b, *_: peer.fp8_matmul(a, b, one, one, check_scales=False)}
    ours, tables, plain = every_variant(h.device), [], []
    for n in h.pick(interpreted=(256,), quick=(4096,), full=(4096, 8192)):
        inputs = operands(h, n, n, n)
        tables.append(compare(h, inputs, library(*inputs) | ours))
        unscaled = {"references": {"fp8_matmul": lambda a, b, *_: a.double() @ b.double()}, "peers": list(single)}
        unscaled["budgets"] = {"fp8_matmul": {"roundings": 0} | peer.budget(h, n)}
        plain.append(compare(h, inputs, single | {"triton": ours["triton"]}, **unscaled))

    n, K = h.pick(interpreted=(128, 512), quick=(1024, 16384), full=(1024, 32768))
    errors = {mean: rms_errors(h, n, K, mean) for mean in (0, 1)}
    rows = {f"mean {mean}": {name: f"{error:.1e}" for name, error in each.items()} for mean, each in errors.items()}
    h.table(f"rms error over the rms of the result, K = {K}", rows)
    h.answer(lambda: answer(tables, plain, K, errors))


if __name__ == "__main__":
    run(demo)
