"""Study of microscaling: the quantizers, bit for bit and beside torch.compile.

1. Every bit of values and scales against the formats' descriptions, by every rule.
2. Each quantizer beside the same operations compiled; a copy of its bytes is the ceiling.
"""

from __future__ import annotations

import functools

from harness import Harness, Work

import torch

from examples.common.compiled import compiled_modes, over_library
from examples.common.microscaling import FORMATS, RECIPES, bytes_of
from examples.fp8.microscaling import native
from examples.fp8.microscaling_quantize import expected_bytes, mx_quantize, quantized_bytes

SMALLEST_E4M3 = 2.0**-9


def quantize_torch(x: torch.Tensor, fmt: str, tensor_scale: torch.Tensor | None = None) -> tuple:
    """mx_quantize in torch's operations, to be compiled: the baseline, with the same bits."""
    form = FORMATS[fmt]
    groups = x.float().unflatten(1, (-1, form.group))
    amax = (groups.view(torch.int32) & 0x7FFFFFFF).amax(2)
    finite = amax < 0x7F800000
    if fmt == "nvfp4":
        # Divided in float64 and rounded to float32: the same number, also where a compiler's float32 division is not.
        code = (amax.view(torch.float32).double() / (6 * tensor_scale).double()).float()
        code = code.clamp(SMALLEST_E4M3, 448.0).where(finite, torch.nan).to(form.scale)
        factor = (1 / (code.float() * tensor_scale).double()).float()
    else:
        code = ((amax >> 23) - (8 if form.pack == 1 else 2)).clamp(min=0)
        factor = ((254 - code) << 23).view(torch.float32)
        code = code.where(finite, 0xFF).to(torch.uint8)
    scaled = (groups * factor[..., None]).where(finite[..., None], 0.0).flatten(1)
    if form.pack == 1:
        return scaled.clamp(-448.0, 448.0).to(form.element), code
    a = scaled.abs().clamp(max=6.0)
    big = (a.view(torch.int32) & 0x7F800000).clamp(min=127 << 23) + (22 << 23)
    q = (a + big.view(torch.float32)).view(torch.int32) - big + (big >> 22) - 2 * (127 + 22)
    q = q | ((scaled.view(torch.int32) >> 28) & 8)
    return (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8), code


def checks(h: Harness) -> None:
    for shape in [(1, 32), (130, 160), (0, 64)]:  # one group; tails, and more than one tile of scales; nothing
        x = h.randn(*shape, dtype=h.half, scale=3.0)
        for name, recipe in RECIPES.items():
            what = f"mx_quantize {name} {shape[0]}x{shape[1]}, every bit"
            h.check(quantized_bytes, expected_bytes, x, *recipe, what=what, dtype=torch.uint8)


def compare_quantizers(h: Harness, rows: int, cols: int) -> None:
    """A table for each format; nvfp4's scale of the tensor is given."""
    x, tables = h.rows(rows, cols, dtype=h.half), {}
    for fmt, form in FORMATS.items():
        whole = mx_quantize(x, fmt)[2]
        in_torch = compiled_modes(h, quantize_torch) if x.is_cuda else {"torch": quantize_torch}
        variants = {
            name: lambda x, f=fn, n=fmt, t=whole: tuple(map(bytes_of, f(x, n, t))) for name, fn in in_torch.items()
        }
        variants["triton"] = functools.partial(quantized_bytes, fmt=fmt, tensor_scale=whole)
        tables[fmt] = h.compare(
            variants, lambda x, n=fmt, t=whole: expected_bytes(x, n, "floor", t), x, baseline=next(iter(in_torch)),
            work=Work(bytes=x.nbytes + int(x.numel() * form.bits / 8)), title="quantize", dtype=torch.uint8,
            case=f"{fmt} {rows}x{cols}",
            wrong={"of its neighbour's rows": lambda x, n=fmt, t=whole: expected_bytes(x.roll(1, 0), n, "floor", t)},
        )  # fmt: skip
    if all(tables.values()):
        each = ", ".join(f"{fmt} {over_library([table]):.2f}x" for fmt, table in tables.items())
        h.say(f"the quantizers over torch.compile's faster mode: {each}; the products are the lesson's tables")


def study(h: Harness) -> None:
    checks(h)
    h.fact("block-scaled instructions", "run here" if native() else "do not run here: the products are emulations")
    compare_quantizers(h, *h.pick(interpreted=(32, 512), quick=(8192, 8192), full=(16384, 16384)))
