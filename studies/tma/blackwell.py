"""Study of blackwell: what becomes of every kernel on every architecture, columns of tensor memory, FP8.

1. Each variant in 16 bits and FP8, and the block-scaled kernel beside tl.dot_scaled, compiled for sm_80 to sm_120.
2. The columns of tensor memory that a plan counts, beside those the compiler takes.
3. pipelined and specialized (by hand on a GPU with tensor memory) beside the library in FP8.
4. On such a GPU, block-scaled products beside the library and tl.dot_scaled.
"""

from __future__ import annotations

import functools

from harness import Harness, Work
from harness.codegen import CodegenError, Kernel

import torch

from examples.common.device import SHARED_LIMIT
from examples.common.fp8 import E4M3
from examples.common.gluon import gluon_architecture
from examples.common.microscaling import FORMATS
from examples.tma.blackwell import blackwell_matmul, reference
from examples.tma.blackwell_plan import (
    BLOCK_BYTES,
    COLUMNS,
    FIND,
    PARTITIONED,
    VARIANTS,
    allocated_columns,
    budget,
    by_hand_plan,
    has_tensor_memory,
    runnable,
    scale_columns,
)
from examples.tma.blackwell_scaled import blackwell_mx_matmul

KINDS = {"mxfp8": "kind::mxf8f6f4", "mxfp4": "kind::mxf4", "nvfp4": "kind::mxf4nvf4"}  # as PTX names them
TMA = "cp.async.bulk.tensor"
SHOWN = (
    "wgmma", "mma.sync", "tcgen05.mma", "mma f8", "block_scale", "tcgen05.cp", "tcgen05.ld", "tcgen05.commit",
    "setmaxnreg", TMA,
)  # fmt: skip


def cells(kernel: Kernel) -> dict:
    """One row of the table: what the compiler made of a kernel, or why it did not."""
    if kernel.error:
        reason = kernel.error.split(f"{kernel.kernel}: ")[-1].split("; use")[0]  # of a wrapper, what it says itself
        return {"code": f"not supported: {reason}"}
    return {
        "warps": kernel.warps, "registers": kernel.registers, "spill bytes": kernel.spills,
        "shared KiB": round(kernel.shared / 1024, 1),
        "tensor memory": "none" if kernel.tensor_memory is None else kernel.tensor_memory,
        "code": ", ".join(f"{kernel.found[name]} {name}" for name in SHOWN if name in kernel.found),
    }  # fmt: skip


def show_code(h: Harness, n: int = 4096) -> None:
    """Every kernel on every architecture, in one table; raises where what is required is missing."""
    mx_matmul = h.peer("fp8/microscaling").mx_matmul
    half, e4m3, short = h.meta(n, n, dtype=h.half), h.meta(n, n, dtype=E4M3), str(h.half).removeprefix("torch.")
    kernels: dict[str, Kernel] = {}
    columns = {"by hand": COLUMNS}  # on sm_100, counted
    for variant, find in FIND.items():
        for kernel in h.codegen(blackwell_matmul, half, half, variant, find=find):
            kernels[f"{variant} {short}, sm_{kernel.sm}"] = kernel
    for variant in VARIANTS[1:]:  # the same code with other operands
        find = {sm: (*FIND[variant][sm], "mma f8") for sm in (90, 100, 120) if FIND[variant][sm]}
        for kernel in h.codegen(blackwell_matmul, e4m3, e4m3, variant, h.half, find=find):
            kernels[f"{variant} e4m3, sm_{kernel.sm}"] = kernel
    for fmt, form in FORMATS.items():
        q, scale = h.meta(n, n // form.pack, dtype=form.element), h.meta(n // 128, n // form.group // 4, 32, 16)
        scale = scale.to(form.scale)
        whole = h.meta(1, dtype=torch.float32) if fmt == "nvfp4" else None
        operands = (q, scale, q, scale, fmt, h.half, whole, whole)
        native = (*PARTITIONED, "block_scale", "tcgen05.cp", KINDS[fmt])
        for kernel in h.codegen(blackwell_mx_matmul, *operands, find={90: (), 100: native, 103: native, 120: ()}):
            kernels[f"scaled {fmt}, sm_{kernel.sm}"] = kernel
        for kernel in h.codegen(mx_matmul, *operands, find={120: (TMA, "mma.sync", "block_scale")}):
            kernels[f"tl.dot_scaled {fmt}, sm_{kernel.sm}"] = kernel
        groups = BLOCK_BYTES * form.pack // form.group
        block_m, block_n, _, _, stages, accs = by_hand_plan(SHARED_LIMIT[100], groups)
        columns[f"scaled {fmt}"] = accs * block_n + scale_columns(block_m, block_n, groups, stages)
    h.table("what becomes of each kernel", {name: cells(kernel) for name, kernel in kernels.items()})
    taken = {}
    for what, used in columns.items():
        kernel = next(kernel for name, kernel in kernels.items() if name.startswith(what) and kernel.sm == 100)
        taken[what] = {"used": used, "taken": kernel.tensor_memory, "of": COLUMNS}
        if kernel.tensor_memory != allocated_columns(used):
            raise CodegenError(f"{what}: {used} columns counted, {kernel.tensor_memory} taken: count them again")
    h.table("columns of tensor memory", taken)


def compare_fp8(h: Harness, n: int) -> None:
    """n x n x n in FP8: every variant that runs here beside the library, whose scales by row are the faster ones."""
    a, b, one = h.randn(n, n, dtype=E4M3), h.randn(n, n, dtype=E4M3), torch.ones((), device=h.device)

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b.T, *scales, out_dtype=h.half, use_fast_accum=True)

    by_row = one.new_ones(n, 1), one.new_ones(1, n)
    known = {
        "_scaled_mm": lambda a, b: scaled_mm(a, b, *by_row),
        "_scaled_mm tensor": lambda a, b: scaled_mm(a, b, one, one),
    }
    if h.interpreted:
        known = {"torch": lambda a, b: a.to(h.half) @ b.to(h.half).T}
    ours = {v: functools.partial(blackwell_matmul, variant=v, out_dtype=h.half) for v in runnable(h.device)}
    h.compare(
        known | ours, reference, a, b, baseline=next(iter(known)), dtype=h.half, **budget(E4M3, n),
        work=Work(bytes=4 * n * n, flops=2 * n**3, dtype=E4M3),
        wrong={"without its last K step": lambda a, b: reference(a[:, :-128], b[:, :-128])}, default="specialized",
        case=f"{n}x{n}x{n} float8_e4m3fn", title=f"beside {next(iter(known))}",
    )  # fmt: skip


def compare_scaled(h: Harness, n: int) -> None:
    """Block-scaled products by hand beside the library and tl.dot_scaled, on a GPU with tensor memory."""
    mx = h.peer("fp8/microscaling")
    for fmt, form in FORMATS.items():
        x = mx.Operands.random(h, n, n, n, fmt)
        wholes = dict(zip(("a_tensor_scale", "b_tensor_scale"), x.tensor_scales, strict=True))
        variants = {} if fmt == "mxfp4" else {"_scaled_mm": mx.scaled_mm(x, fmt, torch.bfloat16)}  # torch has no mxfp4
        variants["tl.dot_scaled"] = functools.partial(mx.mx_matmul, fmt=fmt, check_scales=False, **wholes)
        variants["by hand"] = functools.partial(blackwell_mx_matmul, fmt=fmt, **wholes)
        work = Work(bytes=sum(t.nbytes for t in x.packed) + 2 * n * n, flops=2 * n**3, dtype=form.element)
        h.compare(
            variants, x.reference, *x.packed, baseline=next(iter(variants)), work=work, title=f"scaled {fmt}",
            case=f"{n}x{n}x{n} {fmt}", dtype=torch.bfloat16, peers=["tl.dot_scaled"], **mx.budget(n),
            wrong={"without its last K step": functools.partial(x.reference, short=128)},
        )  # fmt: skip


def study(h: Harness) -> None:
    here = has_tensor_memory(gluon_architecture(h.device))
    if h.shows_code:
        show_code(h)
    sizes = h.pick(interpreted=(160,), quick=(4096,), full=(4096, 8192)) if h.timing else (160,)
    for n in sizes:
        compare_fp8(h, n)
        if here:
            compare_scaled(h, n)
