"""numerics, measured: TF32, float32 and its emulation, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from harness import Harness, Work

import torch
import torch.nn.functional as F

from compile_inspect import watch
from examples.compiler.numerics import measure, off_by, share_differing, within

PRECISIONS = {"highest": 0.0, "high": 2**-11, "medium": 2**-8}  # and the rounding of an operand at each


def digits(value: float) -> float:
    return float(f"{value:.3g}")


def study(h: Harness) -> None:
    show_precision(h)
    if h.profile:
        return
    # What is left in float32 is the order of sums and the fused multiply-add: one instruction of a GPU, which Triton
    # uses unless it emulates; g++ is told to contract nothing.
    h.table("float32: rms error from float64, share of bits that differ from eager's", measure(h, torch.float32))
    show_random(h)


@contextmanager
def precision_kept() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    newer = [backend.fp32_precision for backend in backends]
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for backend, value in zip(backends, newer, strict=True):  # which the line above overwrote: "none" became "ieee"
            backend.fp32_precision = value


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """float32 products at this precision within, and the newer settings that it writes too as they were afterwards."""
    with precision_kept():
        torch.set_float32_matmul_precision(precision)
        yield


def show_precision(h: Harness) -> None:
    """A float32 product at each precision: its speed, its error, and what is compiled again for it."""
    n = h.pick(quick=512, full=4096)
    x, weight = h.randn(n, n), h.randn(n, n, scale=n**-0.5)

    def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.double() @ b.double()

    fast, want, facts, variants = h.compiled(lambda a, b: a @ b), exact(x, weight), {}, {}
    for precision, rounding in PRECISIONS.items():
        setting = partial(matmul_precision, precision)
        eager, compiled = within(setting, torch.matmul), within(setting, fast)
        variants |= {f"torch {precision}": eager, f"torch.compile {precision}": compiled}
        if h.profile:
            continue
        with watch() as seen:
            ours = compiled(x, weight)
        budget = {"terms": n, "operand_eps": rounding, "poison": False}
        h.check(compiled, exact, x, weight, what=f"compiled {precision}", **budget)
        facts[precision] = {
            "eager error": digits(off_by(eager(x, weight), want)), "compiled error": digits(off_by(ours, want)),
            "compiled differs": share_differing(ours, eager(x, weight)), "compilations": len(seen.frames),
            "guards that failed": [reason.partition(": ")[2].strip() for reason in seen.recompiles],
        }  # fmt: skip
    h.compare(
        variants, exact, x, weight, baseline="torch highest", work=Work(), title="float32 product",
        case=f"{n}x{n}x{n} float32", terms=n, operand_eps=2**-8,
    )  # fmt: skip
    if facts:
        rounded = off_by(exact(x.bfloat16(), weight.bfloat16()), want)
        h.table("float32 product", facts | {"operands rounded to bfloat16": {"eager error": digits(rounded)}})


def show_random(h: Harness) -> None:
    """Dropout from one seed: whether compiled code drops what eager drops."""
    ones, keep = torch.ones(256, 256, device=h.device), 0.75

    def drop(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 1 - keep)

    def seeded(fn: Callable) -> torch.Tensor:
        torch.manual_seed(h.seed % 2**32)
        return fn(ones)

    eager, facts = seeded(drop), {}
    for fallback in (False, True):
        compiled = h.compiled(drop, options={"fallback_random": fallback})
        got = seeded(compiled)
        facts[f"fallback_random {fallback}"] = {
            "kept": digits((got != 0).double().mean().item()), "same as eager": digits(1 - share_differing(got, eager)),
            "same again": torch.equal(got, seeded(compiled)),
        }  # fmt: skip
    h.fact("dropout from one seed", facts)
