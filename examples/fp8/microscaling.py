"""Microscaling: FP8 and FP4 with a scale for every 32 or 16 values, which Blackwell's tensor cores multiply themselves.

A group of 32 or 16 values along K shares a scale of 8 bits:

  mxfp8    e4m3 values, one power of two (e8m0) for 32: 8.25 bits a value;
  mxfp4    e2m1 values, one power of two for 32: 4.25 bits;
  nvfp4    e2m1 values, one e4m3 scale for 16 and one float32 scale for the tensor: 4.5 bits.

tl.dot_scaled hands values and scales to the instruction: tcgen05.mma with block_scale on sm_100, mma.sync with
block_scale on sm_120. On earlier GPUs the same kernel decodes both to 16-bit operands (in the interpreter, float32
replaces bfloat16). That is exact, save for mxfp8 groups below 2**-116, but an emulation: no block-scaled instruction
runs.

Question   What do mxfp8, mxfp4 and nvfp4 lose, and what does a GPU without their instructions gain by them?
Needs      triton, sm_90
Wins when  the GPU has the instructions. On earlier GPUs the formats save memory; the tables say what they cost in time.
Variants   microscaling_quantize.py (how the operands are made)
Study      studies/fp8/microscaling.py
Source     goes beyond the chapter; OCP Microscaling Formats (MX) 1.0, section 6.3; NVIDIA's description of NVFP4
"""

from __future__ import annotations

import functools
import math

from harness import Harness, Work, geomean, run

import torch
import triton
import triton.language as tl

from examples.common.device import interpreted
from examples.common.microscaling import FORMATS, check_mx_gemm, decode, mx_descriptor, scales_shape, unswizzled
from examples.common.rows import DTYPES
from examples.common.untraced import untraced
from examples.fp8.microscaling_quantize import EMULATED, Operands, losses, native, scaled_mm, tile_for

GROUP_M = 8


@triton.jit
def mx_matmul_kernel(
    a_desc, a_scale_desc, b_desc, b_scale_desc, c_ptr, a_tensor_scale_ptr, b_tensor_scale_ptr, M, N, K, stride_cm,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, NV: tl.constexpr,
    EMULATE: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % (GROUP_M * tiles_n) % group
    tile_n = tile % (GROUP_M * tiles_n) // group
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = a_desc.load([tile_m * BLOCK_M, k // PACK])
        b = b_desc.load([tile_n * BLOCK_N, k // PACK])
        step = k // GROUP // 4
        a_scale = unswizzled(a_scale_desc.load([tile_m * (BLOCK_M // 128), step, 0, 0]), BLOCK_M, GROUPS)
        b_scale = unswizzled(b_scale_desc.load([tile_n * (BLOCK_N // 128), step, 0, 0]), BLOCK_N, GROUPS)
        if EMULATE:
            a = decode(a, a_scale, PACK == 2, GROUP, OPERAND)
            b = decode(b, b_scale, PACK == 2, GROUP, OPERAND)
            acc = tl.dot(a, b.T, acc)
        else:
            acc = tl.dot_scaled(a, a_scale, FORMAT, b.T, b_scale, FORMAT, acc)
    if NV:
        acc *= tl.load(a_tensor_scale_ptr) * tl.load(b_tensor_scale_ptr)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    c = acc.to(c_ptr.dtype.element_ty)
    tl.store(c_ptr + rows.to(tl.int64) * stride_cm + cols, c, mask=(rows < M) & (cols < N))


@untraced
def mx_matmul(
    a_q: torch.Tensor, a_scale: torch.Tensor, b_q: torch.Tensor, b_scale: torch.Tensor, fmt: str,
    out_dtype: torch.dtype = torch.bfloat16,
    a_tensor_scale: torch.Tensor | None = None, b_tensor_scale: torch.Tensor | None = None,
    emulate: bool | None = None, check_scales: bool = True,
) -> torch.Tensor:  # fmt: skip
    """a @ b.T -> [M, N], for a [M, K] and b [N, K] as mx_quantize(swizzled=True) makes them, K a multiple of 32.

    fmt is "mxfp8", "mxfp4" or "nvfp4". Values are [rows, K / values in a byte], float8_e4m3fn or float4_e2m1fn_x2;
    scales float8_e8m0fnu or (nvfp4) float8_e4m3fn, [ceil(rows / 128), ceil(K / group / 4), 32, 16]; the tensors' scales
    (nvfp4 alone) float32, one number each. out_dtype is float32, float16 or bfloat16.
    `emulate` decodes in the kernel: by default where there are no block-scaled instructions. False there leaves the
    decoding to tl.dot_scaled, which Triton then turns into bfloat16 products; ValueError for nvfp4, or interpreted.

    Raises TypeError for another dtype; ValueError for an unknown format, sizes or a layout that do not fit, a tensor's
    scale that is missing, superfluous or not positive and finite (check_scales=False does not read it); RuntimeError
    for no Triton or an input that requires grad.
    """
    name = "mx_matmul"
    a, b = (a_q, a_scale, a_tensor_scale), (b_q, b_scale, b_tensor_scale)
    M, N, K = check_mx_gemm(name, a, b, fmt, check_scales)
    form = FORMATS[fmt]
    if out_dtype not in DTYPES:
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {DTYPES}")
    if not (M and N and K):
        return torch.zeros((M, N), dtype=out_dtype, device=a_q.device)  # nothing to sum, or nothing to write
    c = torch.empty((M, N), dtype=out_dtype, device=a_q.device)
    emulate = not native() if emulate is None else emulate
    if not emulate and not native() and (interpreted() or fmt == "nvfp4"):
        where = "in the interpreter" if interpreted() else "before sm_100"
        raise ValueError(f"{name}: tl.dot_scaled cannot decode {fmt} {where}; leave out emulate=False")
    block_m, block_n, block_k, warps, stages = tile_for(a_q.device, form, emulate)
    boxes = [(block_m, block_k), (block_m, block_k), (block_n, block_k), (block_n, block_k)]
    descriptors = [mx_descriptor(x, *box, form) for x, box in zip((a_q, a_scale, b_q, b_scale), boxes, strict=True)]
    mx_matmul_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        *descriptors, c, a_tensor_scale, b_tensor_scale, M, N, K, c.stride(0),
        FORMAT=form.dot, GROUP=form.group, PACK=form.pack, NV=fmt == "nvfp4",
        EMULATE=emulate, OPERAND=tl.float32 if interpreted() and form.emulated == tl.bfloat16 else form.emulated,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=GROUP_M, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return c


# The kind of block-scaled instruction on sm_100 and on sm_120, as PTX names it.
KINDS = {
    "mxfp8": ("kind::mxf8f6f4", "kind::mxf8f6f4"),
    "mxfp4": ("kind::mxf4", "kind::mxf4nvf4"),
    "nvfp4": ("kind::mxf4nvf4", "kind::mxf4nvf4"),
}


def budget(K: int) -> dict:
    """How an instruction adds up the products of one step is not documented for all: it gets a wider budget."""
    return {"terms": K, "roundings": 2} | ({"acc": 2.0**-13} if native() else {})


def ours() -> str:
    return "triton block-scaled" if native() else "triton emulation"


def compare(h: Harness, n: int, fmt: str):
    """The product of packed operands beside that of 16-bit operands that were decoded before."""
    x = Operands.random(h, n, n, n, fmt)
    (a, b), unused = x.decoded, torch.empty(n, n, dtype=h.half, device=h.device)  # beta=0: it is not read
    alpha = math.prod(1.0 if scale is None else scale.item() for scale in x.tensor_scales)
    library = f"{'cuBLAS' if a.is_cuda else 'torch'} {str(h.half).removeprefix('torch.')}, decoded before"
    variants = {library: lambda *_: torch.addmm(unused, a, b.T, beta=0, alpha=alpha)}
    if native() and fmt != "mxfp4":
        variants["_scaled_mm"] = scaled_mm(x, fmt, h.half)
    variants[ours()] = functools.partial(mx_matmul, fmt=fmt, out_dtype=h.half, **x.wholes, check_scales=False)
    if not native() and a.is_cuda and fmt != "nvfp4":  # which Triton cannot lower there
        variants["triton emulation by tl.dot_scaled"] = functools.partial(variants[ours()], emulate=False)
    work = Work(sum(t.nbytes for t in x.packed) + 2 * n * n, 2 * n**3, FORMATS[fmt].element if native() else h.half)
    return h.compare(
        variants, x.reference, *x.packed, baseline=library, case=f"{fmt} {n}x{n}x{n}", work=work, dtype=h.half,
        wrong={"without its last K step": functools.partial(x.reference, short=EMULATED[2])}, **budget(n),
    )  # fmt: skip


def answer(lost: dict, tables: dict[str, list]) -> str:
    rows = [lost[name] for name in ("mxfp8, scales floor", "mxfp4, scales floor", "nvfp4")]  # the specification's rule
    plain, beside = (", ".join(f"{row[name]:.0%}" for row in rows) for name in ("normal", "outliers x100"))
    speeds = [geomean(cases, cases[0].baseline, ours()) for cases in tables.values()]
    pays = "it pays" if min(speeds) > 1 else "it saves memory only" if max(speeds) < 1 else "it pays in part"
    return (
        f"Relative rms error of {', '.join(FORMATS)}: {plain}, and {beside} beside outliers of 100x. At "
        f"{', '.join(f'{form.bits / 16:.2f}' for form in FORMATS.values())} of 16-bit operands' bytes a GEMM"
        f"{'' if native() else ', emulated,'} runs at {', '.join(f'{speed:.2f}x' for speed in speeds)} their speed: "
        f"{pays}."
    )


def demo(h: Harness) -> None:
    for M, N, K in [(1, 1, 32), (130, 129, 160)]:  # one group; a tail in each dimension, more than one tile of scales
        for fmt in FORMATS:
            x = Operands.random(h, M, N, K, fmt)
            fn = functools.partial(mx_matmul, fmt=fmt, out_dtype=torch.float32, **x.wholes)
            h.check(fn, x.reference, *x.packed, what=f"{fmt} {M}x{N}x{K}", dtype=torch.float32, **budget(K))
    for fmt, form in FORMATS.items():
        q = h.meta(4096, 4096 // form.pack, dtype=form.element)
        scale = h.meta(*scales_shape(4096, 4096 // form.group, swizzled=True), dtype=form.scale)
        whole, tma = h.meta(1, dtype=torch.float32) if fmt == "nvfp4" else None, "cp.async.bulk.tensor"
        sm_100, sm_120 = ((tma, "block_scale", kind) for kind in KINDS[fmt])
        find = {90: (tma, "wgmma"), 100: ("tcgen05.mma", *sm_100), 120: ("mma.sync", *sm_120)}
        h.codegen(mx_matmul, q, scale, q, scale, fmt, h.half, whole, whole, find=find)

    lost = {} if h.profile else losses(h, *h.pick(interpreted=(32, 512), quick=(4096, 4096), full=(4096, 4096)))
    h.table("relative rms error of ordinary values", lost)
    sizes = h.pick(interpreted=(160,), quick=(4096,), full=(4096, 8192))
    tables = {fmt: [compare(h, n, fmt) for n in sizes] for fmt in FORMATS}
    h.answer(lambda: answer(lost, tables))


if __name__ == "__main__":
    run(demo)
