"""One decoder block of Llama, step by step: eager, torch.compile, our kernels as operators, FP8; prefill and training.

At 8x2048 tokens 96 % of the FLOPs of Llama 3 8B's block are in four Linears (qkv, out, gate and up, down). The compiler
fuses what lies between them, custom kernels are for what it cannot fuse, and FP8 doubles the rate of the products
themselves. What FP8 asks for:

  forward   y = x w^T. Both are quantized by rows, x where it is made: in the norm, in SwiGLU, after attention. Weights
            are quantized once for prefill, but in each training step, as part of its time.
  dx        = dy w, summed over the outputs. dy is quantized by rows again; w is transposed, since FP8 tensor cores read
            both operands along the summed dimension, and has one scale, since its rows are what is summed.
  dw        = dy^T x, summed over the tokens: both are transposed, in a pass of their own. Scales must factor out of
            that sum, so each whole operand has one: the largest of its scales by row, which are known already.

Norms, attention, residuals, and what is saved for their backward, stay in 16 bits. Gradients are e4m3, too.

Question   What do the compiler, kernels of one's own and FP8 each add to a decoder block, in prefill and in training?
Needs      triton, sm_90
Wins when  there are many tokens, so that products are compute-bound: quantizing then costs less than it saves. Only the
           loss of a whole run, not a single step, can show whether training tolerates the error of its gradients.
Variants   llama_block_model.py (the block around the kernels, a training step, the reference), llama_block_ops.py
           (kernels of other lessons as operators), llama_block_quantize.py (two quantizers)
Study      studies/fp8/llama_block.py
Source     goes beyond the chapter; Micikevicius et al. 2022 (FP8 formats); Grattafiori et al. 2024 (Llama 3)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from harness import Harness, Table, Work, run

import torch
from torch import nn

from examples.common.fp8 import E4M3
from examples.common.memory import peak_bytes
from examples.common.quantize import READ_BACK, read_back, torch_quantize_blocks
from examples.common.transformer import TINY, WIDE, Block, Transformer
from examples.fp8 import llama_block_ops as ops
from examples.fp8.llama_block_model import Kernels, Prefill, Training, off_by, reference
from examples.fp8.llama_block_quantize import (
    quantize_transposed,
    swiglu_quantize,
    swiglu_reference,
    transposed_reference,
)


def product(a: torch.Tensor, w: torch.Tensor, scale_a: torch.Tensor, scale_w: torch.Tensor, dtype: torch.dtype):
    """(a * scale_a) @ (w * scale_w).t() of FP8 a [M, K] and w [N, K], with scales [M, 1] and [N, 1], or [] for all."""
    # Written out by rows: that cuBLASLt call is the faster one in all but one size of studies/fp8/fp8_matmul.py.
    scale_a, scale_w = (s if s.ndim else s.expand(len(q), 1).contiguous() for q, s in ((a, scale_a), (w, scale_w)))
    if PRODUCT == "fp8_matmul" or not a.is_cuda:
        return ops.fp8_product(a, w, scale_a, scale_w, dtype)
    return torch._scaled_mm(a, w.t(), scale_a, scale_w.t(), out_dtype=dtype, use_fast_accum=True)


class FP8Linear(torch.autograd.Function):
    """x [M, K] @ weight [N, K].t(), its products in FP8, forward and backward; `fp8_dw` is whether dw's is, too.

    `quantize` makes (q, scales [rows, 1]) of a matrix. by_rows does so in torch's operations: torch.compile fuses them
    with what makes x and dy, and of x and its FP8 transpose saves for backward the one with fewer bytes, the latter.
    """

    @staticmethod
    def forward(ctx, x, weight, quantize, fp8_dw):
        (q, scale), (w, w_scale) = quantize(x), quantize(weight)
        ctx.save_for_backward(x, weight, scale.amax(), w_scale.amax())
        ctx.quantize, ctx.fp8_dw = quantize, fp8_dw
        return product(q, w, scale, w_scale, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight, x_scale, w_scale = ctx.saved_tensors
        dy = dy.contiguous()
        q, scale = ctx.quantize(dy)
        dx = product(q, ops.transposed(weight, w_scale), scale, w_scale, dy.dtype)
        if not ctx.fp8_dw:
            return dx, dy.t() @ x, None, None
        turned = ops.transposed(dy, scale.amax()), ops.transposed(x, x_scale)
        return dx, product(*turned, scale.amax(), x_scale, dy.dtype), None, None


def by_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch_quantize_blocks(x, "row")


class FP8Training(Kernels):
    """Kernels with FP8Linear for its Linears. Without `fuse` a kernel of its own quantizes what a Linear reads."""

    USES = ("norm", "attention")

    def __init__(self, block: Block, use=(), fuse: bool = True, fp8_dw: bool = True) -> None:
        super().__init__(block, use)
        self.quantize, self.fp8_dw = by_rows if fuse else ops.rows_quantized, fp8_dw

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return FP8Linear.apply(x, getattr(self.block, name).weight, self.quantize, self.fp8_dw)


class FP8Prefill(Kernels):
    """Kernels whose weights are in FP8, quantized here; "norm" and "swiglu" write FP8 themselves."""

    USES = ("norm", "attention", "swiglu")

    def __init__(self, block: Block, use=(), fuse: bool = True) -> None:
        super().__init__(block, use)
        self.quantize = by_rows if fuse else ops.rows_quantized
        for name in ("qkv", "attention_out", "gate_up", "down"):
            q, scale = by_rows(getattr(block, name).weight.detach())
            self.register_buffer(name, q)
            self.register_buffer(f"{name}_scale", scale)

    def linear(self, x: torch.Tensor | tuple, name: str) -> torch.Tensor:
        q, scale = x if isinstance(x, tuple) else self.quantize(x)
        return product(q, getattr(self, name), scale, getattr(self, f"{name}_scale"), self.block.qkv.weight.dtype)

    def norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: nn.RMSNorm) -> tuple:
        if "norm" not in self.use:
            return super().norm(x, residual, norm)
        x = x if residual is None else x + residual
        return ops.norm_quantized(x, norm.weight, norm.eps), x

    def gated(self, x: torch.Tensor | tuple) -> torch.Tensor | tuple:
        packed = self.linear(x, "gate_up")
        if "swiglu" in self.use:
            return ops.swiglu_quantized(packed)
        gate, up = packed.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


# By what the lessons of these kernels recorded. In the block no other choice is over 3 % faster (the study, H200).
PRODUCT = "_scaled_mm"  # or "fp8_matmul"
USE = {
    "prefill": {"ours": ("attention", "linear", "swiglu"), "FP8": ("norm", "attention", "swiglu")},
    "training": {"ours": ("norm", "linear"), "FP8": ()},
}
# What is timed; the last two have kernels of USE, each its own.
EAGER, COMPILED, OURS, FP8 = "torch eager", "torch.compile", "our kernels", "FP8"
# The relative rms error that FP8 may have, of any result of a phase: twice what a small block on a CPU shows. The other
# rows are held to twice eager's.
FP8_ERROR = {"prefill": 0.08, "training": 0.2}


def variants(h: Harness, block: Block, phase: str) -> dict[str, Callable]:
    """The block by each step; `phase` is "prefill" or "training"."""
    how = {"fullgraph": True} | ({"backend": "aot_eager"} if h.interpreted else {})
    fp8 = FP8Prefill if phase == "prefill" else FP8Training
    ours, in_fp8 = Kernels(block, USE[phase]["ours"]), fp8(block, USE[phase]["FP8"])
    return {EAGER: block, COMPILED: h.compiled(block, fullgraph=True)} | {
        name: h.compiled(each, **how) for name, each in {OURS: ours, FP8: in_fp8}.items()
    }


def compare(h: Harness, phase: str, block: Block, angles: tuple, *inputs: torch.Tensor) -> tuple[Table, dict]:
    """The table of one phase, and the peak GiB and the error of each of its rows."""
    calls = {
        name: Prefill(each, angles) if phase == "prefill" else Training(each, angles, block.parameters())
        for name, each in variants(h, block, phase).items()
    }
    want, half = reference(block, angles, *inputs), inputs[0].dtype
    # A rounding to e4m3 is as much coarser than one to 16 bits, and both operands of a product are rounded.
    coarser = math.sqrt(2) * torch.finfo(E4M3).eps / torch.finfo(half).eps
    table = h.compare(
        calls, lambda *_: want, *inputs, baseline=EAGER, work=Work(), title=phase,
        case=f"{inputs[0].shape[0]}x{inputs[0].shape[1]} tokens", max_error_ratio=coarser, default=FP8,
    )  # fmt: skip
    rows = {name: {"error": off_by(call(*inputs), want)} for name, call in calls.items() if name in table}
    for name, row in rows.items():
        limit = FP8_ERROR[phase] if name == FP8 else 2 * rows[EAGER]["error"]
        if not row["error"] <= limit:
            raise AssertionError(f"{phase}, {name}: relative error {row['error']:.2%}, where {limit:.2%} is allowed")
        if h.device.type == "cuda":
            row["peak GiB"] = round(peak_bytes(calls[name], *inputs) / 2**30, 2)
    return table, rows


def answer(tables: list[Table], rows: list[dict]) -> str:
    told = ", ".join(
        f"{step} {' and '.join(f'{table.over(EAGER, step):.2f}x' for table in tables)}"
        for step in (COMPILED, OURS, FP8)
    )
    gain = " and ".join(f"{table.over(COMPILED, FP8):.2f}x" for table in tables)
    off = [f"{row[COMPILED]['error']:.1%}, FP8 {row[FP8]['error']:.1%}" for row in rows]
    return (
        f"{tables[0].case}, prefill and training, over eager: {told} ({gain} torch.compile). "
        f"Error of y {off[0]}; of gradients {off[1]}."
    )


def demo(h: Harness) -> None:
    for rows, cols in [(1, 16), (131, 257)]:
        x, scale = h.rows(rows, cols, dtype=h.half), torch.full((), 8.0 / 448, device=h.device)
        h.check(quantize_transposed, transposed_reference, x, scale, dtype=E4M3, terms=0)
        gated = lambda x: read_back(*swiglu_quantize(x), "row")  # noqa: E731
        h.check(gated, swiglu_reference, h.rows(rows, 2 * cols, dtype=h.half), what=f"SwiGLU {cols}", **READ_BACK)
    wide = ("ld.global.v4", "st.global.v4", "cvt f8")
    x, scale = h.meta(16384, 4096), h.meta(1, dtype=torch.float32)
    h.codegen(quantize_transposed, x, scale, check_scales=False, find={90: wide})
    h.codegen(swiglu_quantize, h.meta(16384, 28672), find={90: wide})

    ops.provide(h.peer)
    config, batch, tokens = h.pick(interpreted=(TINY, 2, 64), quick=(WIDE, 1, 2048), full=(WIDE, 8, 2048))
    batch = h.fit(batch, bytes_each=4 * 2**30)
    model = Transformer.random(replace(config, layers=1, vocab=1), h.device, h.half, h.seed).requires_grad_(True)
    block, angles = model.blocks[0], (model.cos[:tokens], model.sin[:tokens])
    x, dy = (h.randn(batch, tokens, config.width, dtype=h.half) for _ in range(2))
    tables, found = zip(*(compare(h, *case) for case in (
        ("prefill", block, angles, x), ("training", block, angles, x, dy),
    )), strict=True)  # fmt: skip
    if h.profile:
        return
    shown = {name: {key: [f"{each[name][key]:.3g}" for each in found] for key in row} for name, row in found[0].items()}
    h.table(f"{tables[0].case}: prefill / training", shown)
    h.answer(lambda: answer(tables, found))


if __name__ == "__main__":
    run(demo)
