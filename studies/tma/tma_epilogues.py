"""Study of tma_epilogues: every layer by both kernels, its code and its speed beside cuBLAS and torch.compile."""

from __future__ import annotations

import functools

from harness import Harness, Work

import torch
import triton

from examples.common.compiled import MODES, over_library
from examples.common.fp8 import E4M3, fp8_max
from examples.common.quantize import codes_of, torch_quantize
from examples.tma.tma_epilogues import (
    FUSED,
    budget,
    budgets,
    layer,
    linear,
    reference,
    torch_bias_activation,
    torch_linear,
)
from examples.tma.tma_epilogues_fp8 import linear_fp8
from examples.tma.tma_epilogues_shared import GROUP, choose, runnable
from examples.tma.tma_epilogues_swiglu import swiglu


def reference_swiglu(x, w_gate, w_up) -> torch.Tensor:
    return reference(x, w_gate, None, "silu") * reference(x, w_up)


def codes(y: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """What is rounded to FP8: y in units of its scale, given or of each group."""
    return codes_of(y, "group") if scale is None else y / scale.to(y.dtype)


def torch_gate(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(both.dtype)


def quantize_as_torch(y: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 steps as in the kernels; torch's cast need not saturate, so it clamps."""
    if scale is None:
        return torch_quantize(y, "group")
    return (y.float() * (1.0 / scale)).clamp(-fp8_max(E4M3), fp8_max(E4M3)).to(E4M3), scale


def layers(h: Harness, M: int, N: int, K: int):
    """Of each layer: name, inputs, reference, ours(variant), the library's two kernels, both as one function, dtype,
    bytes."""
    compiled = (lambda epilogue: epilogue) if h.interpreted else h.compiled
    x, w, bias = layer(h, M, N, K)
    scale = torch.full((1,), 6.0 / fp8_max(E4M3), device=h.device)
    read, write = x.nbytes + w.nbytes, 2 * M * N

    for activation in ("silu", "gelu"):
        act = compiled(torch_bias_activation)
        yield (
            f"bias + {'SiLU' if activation == 'silu' else 'GELU'}", (x, w, bias),
            lambda x, w, bias, a=activation: reference(x, w, bias, a),
            lambda variant, a=activation: functools.partial(linear, activation=a, variant=variant),
            lambda x, w, bias, a=activation, act=act: act(torch.matmul(x, w.t()), bias, a),
            functools.partial(torch_linear, activation=activation), h.half, read + write + bias.nbytes,
        )  # fmt: skip

    quantize = compiled(quantize_as_torch)
    for given, what in ((scale, "FP8, scale given"), (None, "FP8, per group")):
        yield (
            what, (x, w),
            lambda x, w, s=given: codes(reference(x, w), s),
            lambda variant, s=given: lambda x, w: linear_fp8(x, w, scale=s, variant=variant, check_scales=False)[0],
            lambda x, w, s=given, quantize=quantize: quantize(torch.matmul(x, w.t()), s)[0],
            lambda x, w, s=given: quantize_as_torch(torch.matmul(x, w.t()), s)[0],
            E4M3, read + write // 2 + (0 if given is not None else 4 * M * triton.cdiv(N, GROUP.value)),
        )  # fmt: skip

    x, w_gate, w_up, _ = layer(h, M, N, K, weights=2)
    both, gate = w_gate.as_strided((2 * N, K), w_gate.stride()), compiled(torch_gate)
    yield (
        "SwiGLU", (x, w_gate, w_up), reference_swiglu,
        lambda variant: functools.partial(swiglu, variant=variant),
        lambda x, w_gate, w_up: gate(torch.matmul(x, both.t())),  # one GEMM for both, gate and up as columns of one
        lambda x, w_gate, w_up: torch_gate(torch.matmul(x, both.t())), h.half, x.nbytes + both.nbytes + write,
    )  # fmt: skip


def without_last_step(inputs: tuple) -> list[torch.Tensor]:
    return [x[:, :-64] if x.ndim == 2 else x for x in inputs]


def allowed(h: Harness, name: str, dtype: torch.dtype, K: int) -> tuple[dict, dict[str, dict]]:
    """The budget of a layer's rows, and what differs for some of them.

    e4m3's roundings leave 0.2 % of the gain. SwiGLU's gate and up are rounded to 16 bits, and then their product; only
    the persistent kernel has both in float32.
    """
    common, exact = budget(h, K) | {"gain": 3e-3 if dtype is E4M3 else 1e-3}, budgets(h)["persistent"]
    return (
        (common | {"stores": 3}, {"persistent": exact | {"stores": 1}})
        if name == "SwiGLU"
        else (common, {"persistent": exact})
    )


def compare_layers(h: Harness, M: int, N: int, K: int) -> None:
    ratios, case = {}, f"{M}x{N}x{K} {str(h.half).removeprefix('torch.')}"
    baseline = "torch" if h.interpreted else "cuBLAS, then torch.compile"
    for name, inputs, want, ours, library, whole, dtype, moved in layers(h, M, N, K):
        if name == "bias + SiLU":
            continue  # the lesson's table
        gemms = len(inputs) - 1 if name == "SwiGLU" else 1
        common, limits = allowed(h, name, dtype, K)
        fused = {} if h.interpreted else {FUSED: h.compiled(whole, **MODES[FUSED])}
        variants = {baseline: library} | fused | {v: ours(v) for v in runnable(h.device)}
        table = h.compare(
            variants, want, *inputs, title=name, baseline=baseline, case=case, dtype=dtype,
            work=Work(bytes=moved, flops=gemms * 2 * M * N * K, dtype=h.half), **common, budgets=limits,
            default=choose(h.device),
            wrong={"without its last K step": lambda *args, want=want: want(*without_last_step(args))},
        )  # fmt: skip
        if table:
            ratios[name] = {v: round(over_library([table], v), 4) for v in runnable(h.device)}
    h.table(f"over the faster call of torch, {case}", ratios)


def show_code(h: Harness, M: int = 8192, N: int = 14336, K: int = 4096) -> None:
    x, w, bias = h.meta(M, K), h.meta(N, K), h.meta(N)
    tma = ("cp.async.bulk.tensor", "mbarrier")
    partitions = (*tma, "wgmma", "setmaxnreg")
    h.codegen(swiglu, x, w, w, find={90: partitions, 100: (*tma, "tcgen05.mma")})
    h.codegen(linear, x, w, bias, "silu", "persistent", find={90: (*tma, "wgmma")})
    h.codegen(linear_fp8, x, w, variant="persistent", find={90: (*tma, "wgmma", "cvt f8")})
    h.codegen(linear, x, w, bias, "silu", "warp specialized", find={90: partitions})
    h.codegen(linear_fp8, x, w, variant="warp specialized", find={90: (*partitions, "cvt f8")})


def study(h: Harness) -> None:
    show_code(h)
    small = (260, 272, 392)
    sizes = h.pick(interpreted=small, quick=(4096, 4096, 4096), full=(8192, 14336, 4096)) if h.timing else small
    compare_layers(h, *sizes)
