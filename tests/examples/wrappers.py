"""Every public wrapper of a kernel with operands that it takes: what a test of all wrappers goes over.

`dims` has a word for each tensor among the arguments and a letter for each of its dimensions. A capital letter is a
size that the caller chooses: where it stands in two operands it must be the same in both. A small letter is a size that
follows from another; "." is a dimension of 1 or one that may have any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.session import Harness

import torch

from examples.common.fp8 import E4M3
from examples.fp8.blockwise_matmul import blockwise_matmul
from examples.fp8.blockwise_matmul import operands as blockwise_operands
from examples.fp8.formats import cast
from examples.fp8.fp8_attention import fp8_attention, prepare
from examples.fp8.fp8_matmul import fp8_matmul
from examples.fp8.fp8_matmul import operands as fp8_operands
from examples.fp8.fused_gelu_quantize import fused_gelu_quantize, fused_gelu_quantize_static
from examples.fp8.fused_layer_norm_quantize import fused_layer_norm_quantize, fused_rms_norm_quantize
from examples.fp8.llama_block_quantize import quantize_transposed, swiglu_quantize
from examples.fp8.microscaling import mx_matmul
from examples.fp8.microscaling_quantize import Operands, mx_quantize
from examples.fp8.quantize import quantize, quantize_block, quantize_group, quantize_row, quantize_tensor
from examples.tma import descriptors
from examples.tma.blackwell import blackwell_matmul
from examples.tma.blackwell_scaled import blackwell_mx_matmul
from examples.tma.gluon_matmul import gluon_matmul
from examples.tma.gluon_matmul_cluster import gluon_matmul_cluster
from examples.tma.gluon_matmul_ring import gluon_matmul_one_buffer, gluon_matmul_ring
from examples.tma.tma_copy import tma_copy
from examples.tma.tma_epilogues import linear
from examples.tma.tma_epilogues_fp8 import linear_fp8
from examples.tma.tma_epilogues_swiglu import swiglu
from examples.tma.tma_matmul import tma_matmul
from examples.tma.tma_persistent_matmul import matmul_tma_persistent, prepare_matmul
from examples.tma.what_is_tma import scale_descriptors, scale_pointers
from examples.triton import custom_op, debugging, shared_memory, shared_memory_single_use
from examples.triton.autotune import matmul_config, matmul_fixed, matmul_tuned
from examples.triton.cross_entropy import cross_entropy
from examples.triton.custom_op import silu_mul, silu_mul_backward
from examples.triton.decode_attention import decode_attention
from examples.triton.decode_attention_operands import inputs as cache_inputs
from examples.triton.dropout import dropout
from examples.triton.flash_attention import flash_attention
from examples.triton.fused_add_relu_mul import fused_add_relu_mul
from examples.triton.grouped_matmul import grouped_matmul
from examples.triton.grouped_matmul_operands import experts
from examples.triton.layer_norm import layer_norm, layer_norm_backward, layer_norm_forward, layer_norm_rows
from examples.triton.layer_norm_backward import layer_norm_backward_loop, layer_norm_backward_rows
from examples.triton.layer_norm_backward_split import layer_norm_backward_split
from examples.triton.layer_norm_long import layer_norm_split
from examples.triton.layer_norm_resident import layer_norm_resident
from examples.triton.matmul import matmul
from examples.triton.persistent_matmul import matmul_persistent
from examples.triton.pipelined_matmul import matmul_pipelined
from examples.triton.rms_norm import rms_norm, rms_norm_forward
from examples.triton.rms_norm_backward import (
    rms_norm_backward,
    rms_norm_backward_loop,
    rms_norm_backward_rows,
    rms_norm_backward_split,
)
from examples.triton.shared_memory_single_use import column_sum, matmul_strip, row_sum
from examples.triton.skinny_matmul import skinny_matmul, skinny_matmul_stream_k
from examples.triton.skinny_matmul_gemv import skinny_matmul_gemv
from examples.triton.softmax import softmax, softmax_rows
from examples.triton.softmax_long import softmax_split
from examples.triton.softmax_resident import softmax_resident
from examples.triton.tensor_cores import dot
from examples.triton.vector_add import vector_add
from examples.triton.warp_specialized_matmul import matmul_specialized
from examples.triton.weight_only_matmul import weight_only_matmul, weight_only_matmul_stream_k
from examples.triton.weight_only_matmul_gemv import weight_only_matmul_gemv
from examples.triton.weight_only_matmul_packing import quantize_weight


@dataclass(frozen=True)
class Wrapper:
    """A wrapper, the dimensions of its tensors, and what makes its arguments."""

    fn: Callable
    dims: str
    arguments: Callable[[Harness], tuple]
    takes: tuple[str, ...] = ()  # what is bad input for most and not for this one

    says: str = ""  # the name that its messages begin with, where it is not the function's

    def __post_init__(self) -> None:
        object.__setattr__(self, "says", self.says or str(self))

    def __str__(self) -> str:
        return getattr(self.fn, "__name__", None) or self.fn._name  # of an operator of torch

    def __call__(self, *arguments):
        result = self.fn(*arguments)
        return result() if callable(result) else result  # prepare_matmul's


def ones(h: Harness, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=h.device)


def randoms(*shapes: tuple[int, ...]) -> Callable[[Harness], tuple]:
    return lambda h: tuple(h.randn(*shape, dtype=h.half) for shape in shapes)


def norm(*more: str, cols: int = 48) -> Callable[[Harness], tuple]:
    """x, weight and bias; dy, mean and rstd of the backward where they are named."""

    def arguments(h: Harness) -> tuple:
        x, weight, bias = h.randn(6, cols), h.randn(cols), h.randn(cols)
        if not more:
            return x, weight, bias
        return h.randn(6, cols), x, weight, x.mean(1), x.var(1, unbiased=False).add(1e-5).rsqrt()

    return arguments


def rms(of: str, cols: int = 48) -> Callable[[Harness], tuple]:
    """x, weight and a residual; or dy, x, weight, rstd and the gradient of the sum."""

    def arguments(h: Harness) -> tuple:
        dy, x, other, weight = h.randn(6, cols), h.randn(6, cols), h.randn(6, cols), h.randn(cols)
        if of == "residual":
            return x, weight, other
        return dy, x, weight, x.square().mean(1).add(1e-6).rsqrt(), other

    return arguments


def microscaled(h: Harness) -> tuple:
    return *Operands.random(h, 32, 48, 64, "mxfp8").packed, "mxfp8"


def attention(h: Harness) -> tuple:
    return prepare(*(h.randn(1, 2, 128, 64, dtype=h.half) for _ in range(3)))


def paged(h: Harness) -> tuple:
    return cache_inputs(h, 3, 4, 2, 2, 40 if h.interpreted else 1000, 64, 16)  # a GPU splits 1000 keys


def quantized_linear(h: Harness) -> tuple:
    x, w = randoms((48, 64), (32, 64))(h)
    return x, w, h.randn(32, dtype=h.half), "none", ones(h, 1)


def grouped(h: Harness, fp8: bool = False) -> tuple:
    a, b, *scales = experts(h, 150, 5, 24, 64, fp8)
    return a, b, torch.tensor([0, 3, 132, 132, 150], dtype=torch.int32, device=h.device), *scales


def packed(h: Harness, format: str) -> tuple:
    """The same weights in each call: these are no tensor that a caller overwrites."""
    weights = torch.linspace(-1, 1, 72 * 264, device=h.device).sin().view(72, 264)
    return quantize_weight(weights.to(h.half), format)


def weight_columns(h: Harness) -> tuple:
    a, w = randoms((48, 64), (32, 64))(h)
    return a, w.t()


SCALES = ("grad", "sparse")  # of scales: seen by some wrappers, not by all
GEMM = randoms((48, 64), (64, 32))
ROWS = randoms((6, 48))
FLAT = randoms((70,), (70,))
WRAPPERS = [
    Wrapper(vector_add, "N N", FLAT),
    Wrapper(fused_add_relu_mul, "N N", lambda h: (*FLAT(h), 0.5)),
    *(Wrapper(fn, "MN", ROWS) for fn in (softmax, softmax_rows, softmax_split, softmax_resident)),
    *(Wrapper(fn, "MK KN", GEMM) for fn in (matmul, matmul_persistent, matmul_pipelined, dot)),
    *(Wrapper(fn, "MK NK", randoms((5, 264), (72, 264))) for fn in (skinny_matmul, skinny_matmul_stream_k)),
    *(
        Wrapper(fn, "MK", lambda h, rows=rows, f=f: (h.randn(rows, 264, dtype=h.half), packed(h, f)))
        for fn, rows in ((weight_only_matmul, 5), (weight_only_matmul_stream_k, 5), (weight_only_matmul_gemv, 1))
        for f in ("int4", "fp8")
    ),
    Wrapper(skinny_matmul_gemv, "MK NK", randoms((1, 264), (72, 264))),
    Wrapper(grouped_matmul, "TK EKN E", grouped, takes=("int32",)),  # which offs are
    Wrapper(grouped_matmul, "TK EKN E T EN", lambda h: grouped(h, fp8=True), takes=(*SCALES, "int32")),
    Wrapper(matmul_fixed, "MK KN", GEMM, says="matmul_config"),
    Wrapper(matmul_tuned, "MK KN", GEMM),
    Wrapper(matmul_config, "MK KN", lambda h: (*GEMM(h), 64, 32, 64, 4, 3)),
    Wrapper(matmul_specialized, "MK KN", GEMM),
    Wrapper(shared_memory.matmul_tile, "MK KN", lambda h: (*GEMM(h), 32, 32, 2)),
    Wrapper(matmul_strip, "MK KN", randoms((3, 8), (8, 16))),
    *(Wrapper(fn, "MN", ROWS) for fn in (column_sum, row_sum)),
    *(
        Wrapper(fn, "MC C C", norm())
        for fn in (layer_norm_rows, layer_norm_resident, layer_norm_split, layer_norm_forward)
    ),
    Wrapper(layer_norm, "MC C C", norm(), takes=("grad", "rank")),
    *(
        Wrapper(fn, "MC MC C M M", norm("backward"))
        for fn in (layer_norm_backward, layer_norm_backward_rows, layer_norm_backward_loop)
    ),
    Wrapper(rms_norm_forward, "MC C MC", rms("residual")),
    Wrapper(rms_norm, "MC C", lambda h: rms("residual")(h)[:2], takes=("grad", "rank")),
    *(
        Wrapper(fn, "MC MC C M MC", rms("backward"))
        for fn in (rms_norm_backward, rms_norm_backward_rows, rms_norm_backward_loop)
    ),
    Wrapper(cross_entropy, "NC N", lambda h: (*ROWS(h), h.randint(48, 6)), takes=("grad",)),
    Wrapper(dropout, "N .", lambda h: (h.randn(70), 0.5, torch.tensor([7], device=h.device)), takes=("grad", "rank")),
    Wrapper(flash_attention, "BHQD BHSD BHSD", randoms(*[(1, 2, 48, 64)] * 3), takes=("grad",)),
    Wrapper(decode_attention, "BHQD BHSD BHSD", randoms((1, 2, 5, 64), *[(1, 2, 48, 64)] * 2)),
    Wrapper(silu_mul, "N N", FLAT, takes=("rank",)),
    Wrapper(silu_mul_backward, "N N N", randoms((70,), (70,), (70,))),
    *(
        Wrapper(fn, "N", lambda h: (h.randn(70).abs(),), takes=("rank",))
        for fn in (debugging.scale, debugging.sqrt, debugging.total)
    ),
    Wrapper(cast, "N", lambda h: (h.randn(70), E4M3), takes=("rank",)),
    *(Wrapper(fn, "MN", ROWS) for fn in (quantize_group, quantize_block, quantize_row, quantize_tensor)),
    Wrapper(quantize, "MN", ROWS, says="quantize_row"),
    Wrapper(fp8_matmul, "MK KN M. .N", lambda h: fp8_operands(h, 48, 32, 64, True), takes=SCALES),
    Wrapper(blockwise_matmul, "MK KN Mg gn", lambda h: blockwise_operands(h, 48, 256, 256), takes=SCALES),
    Wrapper(fp8_attention, "BHQD BHSD BHDs BH BH BH", attention, takes=SCALES),
    Wrapper(fused_gelu_quantize, "MN", ROWS),
    Wrapper(fused_gelu_quantize_static, "MN .", lambda h: (*ROWS(h), ones(h, 1)), takes=(*SCALES, "rank")),
    Wrapper(fused_layer_norm_quantize, "MC C C", norm()),
    Wrapper(fused_rms_norm_quantize, "MC C", lambda h: norm()(h)[:2]),
    Wrapper(quantize_transposed, "MK .", lambda h: (*ROWS(h), ones(h, 1)), takes=(*SCALES, "rank")),
    Wrapper(swiglu_quantize, "MN", ROWS),
    Wrapper(mx_quantize, "MK", lambda h: (h.randn(32, 64), "mxfp8")),
    Wrapper(mx_matmul, "MK mkxy NK nkxy", microscaled),
    Wrapper(tma_matmul, "MK KN", GEMM),
    Wrapper(matmul_tma_persistent, "MK KN", GEMM),
    Wrapper(prepare_matmul, "MK KN", GEMM),
    Wrapper(linear, "MK NK N", randoms((48, 64), (32, 64), (32,))),
    Wrapper(linear_fp8, "MK NK N .", quantized_linear, takes=SCALES),
    Wrapper(swiglu, "MK NK NK", randoms((48, 64), (32, 64), (32, 64))),
    Wrapper(tma_copy, "MN", ROWS),
    Wrapper(scale_pointers, "MN", lambda h: (*ROWS(h), 2.0)),
    Wrapper(scale_descriptors, "MN", lambda h: (*ROWS(h), 2.0)),
    Wrapper(descriptors.copy, "MN", lambda h: ("host", *ROWS(h)), takes=("int32", "float64")),
    Wrapper(shared_memory_single_use.scale, "N", randoms((70,)), takes=("rank",)),
]
# For these there is no battery of bad operands: operators of torch, other forms of the above, and Gluon kernels.
OTHERS = [
    *(Wrapper(fn, "N N", FLAT) for fn in (custom_op.silu_mul_opaque, custom_op.silu_mul_traced)),
    *(
        Wrapper(fn, "N N N", randoms((70,), (70,), (70,)))
        for fn in (custom_op.silu_mul_opaque_backward, custom_op.silu_mul_traced_backward)
    ),
    Wrapper(  # two programs to a row
        layer_norm_backward_split, "MC MC C M M", lambda h: norm("backward", cols=48 if h.interpreted else 4112)(h)
    ),
    Wrapper(decode_attention, "BHQD PGSD PGSD B BT", paged),
    Wrapper(rms_norm_backward_split, "MC MC C M MC", lambda h: rms("backward", 48 if h.interpreted else 4100)(h)),
    *(Wrapper(fn, "MK KN", GEMM) for fn in (gluon_matmul, gluon_matmul_one_buffer, gluon_matmul_ring)),
    Wrapper(gluon_matmul_cluster, "MK KN", weight_columns),
    Wrapper(blackwell_matmul, "MK NK", randoms((48, 64), (32, 64))),
    Wrapper(blackwell_mx_matmul, "MK mkxy NK nkxy", microscaled),
    Wrapper(descriptors.copy, "MN", lambda h: ("device", *ROWS(h))),
    Wrapper(softmax_split, "MN", lambda h: randoms((3, 48 if h.interpreted else 20000))(h)),
    Wrapper(layer_norm_split, "MC C C", lambda h: norm(cols=48 if h.interpreted else 20000)(h)),
]
