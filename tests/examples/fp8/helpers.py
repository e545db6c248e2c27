"""What several tests of FP8 need: operands that are only shapes or not finite, bad input, reading back, GEMMs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from harness.session import Harness

import torch

from examples.common.fp8 import E4M3, E5M2, quantize_reference
from examples.common.quantize import GROUP, READ_BACK, read_back, scales_of
from tests.examples.triton import helpers as shared
from tests.examples.triton.helpers import INF, NAN

FORMATS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
PER = ("row", "group")
code, meta = shared.code, functools.partial(shared.meta, dtype=E4M3)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def not_finite(h: Harness, M: int, N: int, K: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """a and b with a few NaN, also where a mask that is too wide reads after the end of a row; then infinities, too."""
    a, b = h.randn(M, K), h.randn(N, K)
    a[3, 5], b[9, 2], a[70, 0], b[200, 0] = 4 * (NAN,)
    yield "NaN", a.to(E4M3), b.to(E4M3).t()  # e4m3fn has no infinity
    a[-1, -1], b[-1, -1], b[130, 7] = INF, -INF, INF
    yield "NaN and infinities", a.to(E5M2), b.to(E5M2).t()


def hold(h: Harness, fn: Callable, reference: Callable, *args, per: str, scales: bool = True) -> None:
    """Codes times scales, and the scales themselves, against float64."""
    h.check(lambda *args: read_back(*fn(*args, per=per), per), reference, *args, what=per, **READ_BACK)
    if scales:
        budget = {"dtype": torch.float32, "terms": 0, "roundings": 64, "constant_ok": True}
        h.check(lambda *args: fn(*args, per=per)[1], lambda *args: scales_of(reference(*args), per), *args, **budget)


def refused(cases: list[tuple], **good) -> None:
    """Each case is a wrapper, what is wrong (arguments, or names of `good` and others), and its error and message."""
    for fn, wrong, error, message in cases:
        args, options = ((), good | wrong) if isinstance(wrong, dict) else (wrong, {})
        shared.refused(fn, error, message, *args, **options)


def check_gemm(fn: Callable, lesson, h: Harness, inputs, variant=None, out=torch.bfloat16, what=None) -> None:
    """fn, the lesson's product, against its reference."""
    M, K = inputs[0].shape
    what = what or f"{variant} {M}x{inputs[1].shape[1]}x{K} {out}"
    options = {"what": what, "dtype": out} | lesson.budget(h, K)
    h.check(functools.partial(fn, out_dtype=out, variant=variant), lesson.reference, *inputs, **options)


def same_codes(h: Harness, q: torch.Tensor, want: torch.Tensor) -> bool:
    """To the bit, but on sm_89, where Triton casts by way of float16: next to a tie it may be the other neighbour."""
    return (q.view(torch.uint8).int() - want.view(torch.uint8).int()).abs().max() <= (h.machine.sm == 89)


def hold_bits(h: Harness, got: tuple, y: torch.Tensor, per: str, dtype: torch.dtype, codes: Callable = bits) -> None:
    """Codes and scales are those of the reference quantizer, for a y that is computed without rounding."""
    (q, scale), cols = got, y.shape[1] if per == "row" else GROUP
    want_q, want_scale = quantize_reference(y, (1, cols), dtype)
    assert (q.shape, q.dtype, q.is_contiguous(), scale.dtype) == (y.shape, dtype, True, torch.float32)
    assert not q.numel() or per == "row" or y.shape[1] == 1 or scale.stride() == (1, len(y))
    assert torch.equal(scale, want_scale)
    assert not q.numel() or same_codes(h, codes(q), codes(want_q))
