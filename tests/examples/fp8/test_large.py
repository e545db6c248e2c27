"""More elements than an int32 counts: every quantizer, by its last rows alone; every GEMM, tall and wide."""

import functools
import itertools

import pytest
import torch

from examples.common.fp8 import E4M3
from examples.common.microscaling import FORMATS, unswizzle_scales
from examples.fp8 import blockwise_matmul as blockwise
from examples.fp8 import fp8_matmul as matmul
from examples.fp8.fused_gelu_quantize import fused_gelu_quantize
from examples.fp8.fused_layer_norm_quantize import fused_layer_norm_quantize
from examples.fp8.microscaling_quantize import mx_quantize
from examples.fp8.quantize import GROUP, RECIPES

pytestmark = pytest.mark.gpu


def layer_norm(x, per):
    return fused_layer_norm_quantize(x, x.new_ones(x.shape[1]), x.new_ones(x.shape[1]), per=per)


def microscaling(x, fmt):
    whole = torch.ones(1, device=x.device) if fmt == "nvfp4" else None
    q, scale, _ = mx_quantize(x, fmt, tensor_scale=whole, swizzled=True)
    return q, unswizzle_scales(scale, x.shape[0], x.shape[1] // FORMATS[fmt].group)


QUANTIZERS = dict(RECIPES)
QUANTIZERS |= {f"gelu {per}": functools.partial(fused_gelu_quantize, per=per) for per in ("row", "group")}
QUANTIZERS |= {f"norm {per}": functools.partial(layer_norm, per=per) for per in ("row", "group")}
QUANTIZERS |= {fmt: functools.partial(microscaling, fmt=fmt) for fmt in FORMATS}


@pytest.mark.parametrize("cols", [1024, 8192, 20480])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers(h, gpu_gib, name, cols):
    gpu_gib(24)
    rows = 2**31 // cols // GROUP * GROUP + 256
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device=h.device).normal_()
    x[-1, -1] = 40.0  # the amax of all
    q, scale = QUANTIZERS[name](x)
    few, its = QUANTIZERS[name](x[-GROUP:])
    assert torch.equal(q[-GROUP:].view(torch.uint8), few.view(torch.uint8))
    assert torch.equal((scale[-len(its) :] if its.ndim else scale).float(), its.float())


@pytest.mark.parametrize("tall", [True, False])
@pytest.mark.parametrize("lesson", [matmul, blockwise], ids=["fp8_matmul", "blockwise_matmul"])
def test_products(h, gpu_gib, lesson, tall):
    gpu_gib(60)
    long, K = 2**31 // GROUP + 128, GROUP
    a = torch.empty(long, K, dtype=torch.bfloat16, device=h.device).normal_().to(E4M3)
    w, many = h.randn(136, K, dtype=E4M3), torch.rand(long, 1, device=h.device) + 0.5
    for variant, edge in itertools.product(lesson.runnable(h.device), (slice(0, 256), slice(-256, None))):
        if lesson is matmul:
            fn, scales = matmul.fp8_matmul, (many[:136], many.t()) if not tall else (many, many[:136].t())
            its = (many[edge], scales[1]) if tall else (scales[0], scales[1][:, edge])
        else:
            fn, blocks = blockwise.blockwise_matmul, many[: long // GROUP].t()
            scales = (many, blocks[:, :2]) if tall else (many[:136], blocks)
            its = (many[edge], scales[1]) if tall else (scales[0], blocks[:, :2] if edge.start == 0 else blocks[:, -2:])
        c = fn(*((a, w.t()) if tall else (w, a.t())), *scales, variant=variant)
        got = c[edge] if tall else c[:, edge].contiguous()
        inputs = (a[edge], w.t(), *its) if tall else (w, a[edge].t(), *its)
        budget = lesson.budget(h, K)
        h.check(lambda *_, got=got: got, lesson.reference, *inputs, what=variant, dtype=c.dtype, **budget)
        del c, got
