"""modes, measured: max-autotune at 128 tokens, where it has matrix products to tune, and how long that takes."""

from __future__ import annotations

from harness import Harness

from compile_inspect import warm_up
from examples.compiler.modes import MODES, make_model, one_size, report


def study(h: Harness) -> None:
    model = make_model(h)
    warm_up(h.device)
    tokens = h.pick(quick=16, full=128)
    report(h, *one_size(h, model, tokens, MODES[1:] if h.full else MODES[::2]))
