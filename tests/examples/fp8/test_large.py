"""More elements than an int32 counts: every quantizer, by its last rows alone; every GEMM, tall and wide."""

import functools

import pytest
import torch

from examples.common.fp8 import E4M3
from examples.common.microscaling import FORMATS
from examples.fp8 import blockwise_matmul as blockwise
from examples.fp8 import fp8_matmul as matmul
from examples.fp8.fused_gelu_quantize import fused_gelu_quantize
from examples.fp8.fused_layer_norm_quantize import fused_layer_norm_quantize
from examples.fp8.microscaling_quantize import mx_quantize
from examples.fp8.quantize import GROUP, RECIPES
from tests.examples.fp8.helpers import PER, bits

pytestmark = pytest.mark.gpu


def microscaling(x, fmt):
    whole = torch.ones(1, device=x.device) if fmt == "nvfp4" else None
    return mx_quantize(x, fmt, tensor_scale=whole, swizzled=True)[:2]


QUANTIZERS = dict(RECIPES)
QUANTIZERS |= {f"gelu {per}": functools.partial(fused_gelu_quantize, per=per) for per in PER}
QUANTIZERS |= {
    f"norm {per}": lambda x, per=per: fused_layer_norm_quantize(x, *2 * [x.new_ones(x.shape[1])], per=per)
    for per in PER
}
QUANTIZERS |= {fmt: functools.partial(microscaling, fmt=fmt) for fmt in FORMATS}


@pytest.mark.parametrize("cols", [1024, 16384])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers(h, gpu_gib, name, cols):
    gpu_gib(24)
    rows = 2**31 // cols // GROUP * GROUP + 256
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device=h.device).normal_()
    x[-1, -1] = 40.0  # the amax of all
    q, scale = QUANTIZERS[name](x)
    few, its = QUANTIZERS[name](x[-GROUP:])
    assert torch.equal(bits(q[-GROUP:]), bits(few))
    assert torch.equal((scale[-len(its) :] if its.ndim else scale).float(), its.float())


def test_per_tensor_of_just_under_2_31_elements(h, gpu_gib):
    """Contiguous, it is one row: a tile more would be more than int32 counts."""
    gpu_gib(24)
    x = torch.empty(2**19 - 1, 4096, dtype=torch.bfloat16, device=h.device).normal_()
    x[-1, -1] = 40.0
    q, scale = RECIPES["tensor"](x)
    few, its = RECIPES["tensor"](x[-GROUP:])
    assert torch.equal(bits(q[-GROUP:]), bits(few))
    assert torch.equal(scale, its)


@pytest.mark.parametrize("tall", [True, False])
@pytest.mark.parametrize("lesson", [matmul, blockwise], ids=["fp8_matmul", "blockwise_matmul"])
def test_products(h, gpu_gib, lesson, tall):
    """The last rows, or columns, of a @ w.t() or of w @ a.t()."""
    gpu_gib(60)
    long, last = 2**31 // GROUP + 128, slice(-256, None)
    a = torch.empty(long, GROUP, dtype=torch.bfloat16, device=h.device).normal_().to(E4M3)
    w, many = h.randn(136, GROUP, dtype=E4M3), torch.rand(long, 1, device=h.device) + 0.5
    each = many[: long // GROUP] if lesson is blockwise else many  # a scale of `a` where it is the right operand
    for variant in lesson.runnable(h.device):
        fn = lesson.fp8_matmul if lesson is matmul else lesson.blockwise_matmul
        if tall:
            scale_b = many[:2].t() if lesson is blockwise else many[:136].t()
            c, inputs = fn(a, w.t(), many, scale_b, variant=variant)[last], (a[last], w.t(), many[last], scale_b)
        else:
            c = fn(w, a.t(), many[:136], each.t(), variant=variant)[:, last].contiguous()
            inputs = w, a[last].t(), many[:136], each[-2 if lesson is blockwise else -256 :].t()
        h.check(lambda *_, c=c: c, lesson.reference, *inputs, what=variant, dtype=c.dtype, **lesson.budget(h, GROUP))
        del c
