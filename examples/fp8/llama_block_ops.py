"""llama_block: kernels of this repository as operators of torch, opaque to torch.compile, and their gradients.

A wrapper that makes descriptors on the host or launches a Gluon kernel cannot be traced; as an operator it is one node
of the graph, with a rule for shapes (register_fake) and a gradient (register_autograd). The wrappers of other lessons
come by `provide`.
"""

# No `from __future__ import annotations` here: torch reads an operator's schema from its annotations.

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.library import custom_op

from examples.fp8.llama_block_quantize import quantize_transposed, swiglu_quantize

NAMESPACE = "companion_llama_block"  # of the operators, in torch's registry
PEERS = {
    "triton/rms_norm": "rms_norm_forward",
    "triton/rms_norm_backward": "rms_norm_backward",
    "triton/flash_attention": "flash_attention",
    "triton/flash_attention_backward": "launch_backward",
    "tma/tma_epilogues": "linear",
    "tma/tma_epilogues_swiglu": "swiglu",
    "fp8/fused_layer_norm_quantize": "fused_rms_norm_quantize",
    "fp8/quantize": "quantize_row",
    "fp8/fp8_matmul": "fp8_matmul",
}
WRAPPERS: dict[str, Callable] = {}  # what the operators of other lessons' kernels call


def provide(peer: Callable[[str], ModuleType]) -> None:
    """Fetch the wrappers of PEERS: `peer` is the harness's, by which a lesson names another's kernels."""
    WRAPPERS.update({name: getattr(peer(technique), name) for technique, name in PEERS.items()})


def _wrapper(name: str) -> Callable:
    if name not in WRAPPERS:
        raise RuntimeError(f"llama_block: {name} of another lesson is not here; call provide() first")
    return WRAPPERS[name]


def _quantized(rows: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The shapes of q and its scales by row."""
    q = rows.new_empty((rows.shape[0], columns), dtype=torch.float8_e4m3fn)
    return q, rows.new_empty((rows.shape[0], 1), dtype=torch.float32)


# --- RMSNorm


@custom_op(f"{NAMESPACE}::rms_norm", mutates_args=())
def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual, rstd) of matrices; without a residual the second is empty, as no result may be an input."""
    y, summed, rstd = _wrapper("rms_norm_forward")(x, weight, residual, eps)
    return y, x.new_empty(0) if residual is None else summed, rstd


@custom_op(f"{NAMESPACE}::rms_norm_backward", mutates_args=())
def rms_norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dsum: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _wrapper("rms_norm_backward")(dy, x, weight, rstd, dsum)


def _save_norm(ctx, inputs, output):
    x, residual, weight, _ = inputs
    _, summed, rstd = output
    ctx.save_for_backward(x if residual is None else summed, weight, rstd)
    ctx.added = residual is not None


def _norm_gradients(ctx, dy, dsum, _):
    dsum = dsum.contiguous() if ctx.added else None
    dx, dweight = rms_norm_gradient(dy.contiguous(), *ctx.saved_tensors, dsum)
    return dx, dx if ctx.added else None, dweight, None


def _empty_norm(x, residual, weight, eps):
    summed = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), summed, x.new_empty(x.shape[0], dtype=torch.float32)


rms_norm.register_fake(_empty_norm)
rms_norm_gradient.register_fake(lambda dy, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)))
rms_norm.register_autograd(_norm_gradients, setup_context=_save_norm)


# --- Attention


@custom_op(f"{NAMESPACE}::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal, grouped heads: (o [B, H, S, D], float32 lse [B, H, S]) of q [B, H, S, D], k and v [B, H_kv, S, D]."""
    return _wrapper("flash_attention")(q, k, v, causal=True, return_lse=True)


@custom_op(f"{NAMESPACE}::attention_backward", mutates_args=())
def attention_gradient(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[3] ** -0.5 * math.log2(math.e)
    return _wrapper("launch_backward")(q, k, v, o, lse, do, scale, True)


attention.register_fake(lambda q, k, v: (q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)))
attention_gradient.register_fake(lambda do, q, k, v, o, lse: tuple(x.new_empty(x.shape) for x in (q, k, v)))
attention.register_autograd(
    lambda ctx, do, _: attention_gradient(do.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


# --- Products in 16 bits


@custom_op(f"{NAMESPACE}::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] @ weight [N, K].t(); its gradients are torch's products."""
    return _wrapper("linear")(x, weight)


linear.register_fake(lambda x, weight: x.new_empty((x.shape[0], weight.shape[0])))
linear.register_autograd(
    lambda ctx, dy: (dy @ ctx.saved_tensors[1], dy.t() @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@custom_op(f"{NAMESPACE}::swiglu", mutates_args=())
def swiglu_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """silu(x @ gate.t()) * (x @ up.t()), of gate_up [2 * N, K] the halves; without a gradient, which needs both."""
    return _wrapper("swiglu")(x, *gate_up.chunk(2))


swiglu_linear.register_fake(lambda x, gate_up: x.new_empty((x.shape[0], gate_up.shape[0] // 2)))


# --- FP8


@custom_op(f"{NAMESPACE}::fp8_product", mutates_args=())
def fp8_product(a: Tensor, w: Tensor, scale_a: Tensor, scale_w: Tensor, dtype: torch.dtype) -> Tensor:
    """(a * scale_a) @ (w * scale_w).t() of a [M, K] and w [N, K], scales [M, 1] and [N, 1]."""
    return _wrapper("fp8_matmul")(a, w.t(), scale_a, scale_w.t(), out_dtype=dtype, check_scales=False)


@custom_op(f"{NAMESPACE}::transposed", mutates_args=())
def transposed(x: Tensor, scale: Tensor) -> Tensor:
    return quantize_transposed(x, scale, check_scales=False)


@custom_op(f"{NAMESPACE}::rows_quantized", mutates_args=())
def rows_quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    return _wrapper("quantize_row")(x)


@custom_op(f"{NAMESPACE}::norm_quantized", mutates_args=())
def norm_quantized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _wrapper("fused_rms_norm_quantize")(x, weight, eps)


@custom_op(f"{NAMESPACE}::swiglu_quantized", mutates_args=())
def swiglu_quantized(packed: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_quantize(packed)


fp8_product.register_fake(lambda a, w, sa, sw, dtype: a.new_empty((a.shape[0], w.shape[0]), dtype=dtype))
transposed.register_fake(lambda x, scale: x.new_empty((x.shape[1], x.shape[0]), dtype=torch.float8_e4m3fn))
rows_quantized.register_fake(lambda x: _quantized(x, x.shape[1]))
norm_quantized.register_fake(lambda x, weight, eps: _quantized(x, x.shape[1]))
swiglu_quantized.register_fake(lambda packed: _quantized(packed, packed.shape[1] // 2))
