"""What several tests of FP8 need: operands that are only shapes or not finite, bad input, the code, reading back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.codegen import Kernel, compile_for
from harness.session import Harness

import pytest
import torch

from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3, E5M2
from examples.common.quantize import READ_BACK, read_back, scales_of

FORMATS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
PER = ("row", "group")
INF, NAN = float("inf"), float("nan")


def meta(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def as_if(monkeypatch, sms: int, *modules) -> None:
    """The modules see a GPU of so many SMs."""
    for module in modules:
        monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[90]))


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
        with pytest.raises(error, match=f"{fn.__name__}: .*{message}"):
            fn(*args, **options)


def code(sm: int, find: tuple, wrapper: Callable, *args, spills: int = 0, **options) -> Kernel:
    """The one kernel of wrapper(*args), which compiles for sm, fits, has these instructions and spills no more."""
    (kernel,) = compile_for(wrapper, args, options, sms=(sm,))
    assert (kernel.error, kernel.too_much) == (None, None)
    assert all(kernel.found.get(name) for name in find), kernel.found
    assert kernel.spills <= spills
    return kernel


def same_codes(h: Harness, q: torch.Tensor, want: torch.Tensor) -> bool:
    """To the bit, but on sm_89, where Triton casts by way of float16: next to a tie it may be the other neighbour."""
    return (q.view(torch.uint8).int() - want.view(torch.uint8).int()).abs().max() <= (h.machine.sm == 89)
