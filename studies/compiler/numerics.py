"""numerics, measured: TF32 and the settings that mean it, float32 and its emulation, batches, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harness import Harness, Work

import torch
import torch.nn.functional as F

from compile_inspect import watch
from examples.compiler.numerics import digits, measure, off_by, share_differing, within

PRECISIONS = ("highest", "high", "medium")


def study(h: Harness) -> None:
    show_precision(h)
    if h.profile:
        return
    show_rounding(h)
    show_batches(h)
    show_random(h)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """float32 products at this precision within, and the newer settings that it writes too as they were afterwards."""
    if precision not in PRECISIONS:
        raise ValueError(f"matmul_precision: {precision!r} is not one of {PRECISIONS}")
    with precision_kept():
        torch.set_float32_matmul_precision(precision)
        yield


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


# --- settings of the precision of float32 products


def readings() -> dict[str, str]:
    """What each way to ask torch says now. Mixing the older names with the newer can make the older ones raise."""
    ask = {
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
        "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "cuda.matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
        "mkldnn.matmul.fp32_precision": lambda: torch.backends.mkldnn.matmul.fp32_precision,
    }
    said = {}
    for name, read in ask.items():
        try:
            said[name] = str(read())
        except RuntimeError:
            said[name] = "RuntimeError"
    return said


def ways_to_set() -> dict[str, dict[str, str]]:
    """For each way to set the precision, what every way to ask then says."""
    matmul = torch.backends.cuda.matmul
    ways = {
        f'set_float32_matmul_precision("{p}")': lambda p=p: torch.set_float32_matmul_precision(p) for p in PRECISIONS
    }
    ways["allow_tf32 = True"] = lambda: setattr(matmul, "allow_tf32", True)
    ways['fp32_precision = "tf32"'] = lambda: setattr(matmul, "fp32_precision", "tf32")
    said = {"as found": readings()}
    for name, write in ways.items():
        with precision_kept():
            write()
            said[name] = readings()
    return said


def show_precision(h: Harness) -> None:
    if not h.profile:
        h.fact("setting, and what it reads as", ways_to_set())
    n = h.pick(quick=512, full=4096)
    x, weight = h.randn(n, n), h.randn(n, n, scale=n**-0.5)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.double() @ b.double()

    torch.compiler.reset()
    fast, want, facts, variants = torch.compile(product, dynamic=False), exact(x, weight), {}, {}
    for precision in PRECISIONS:
        setting = lambda p=precision: matmul_precision(p)  # noqa: E731
        eager, compiled = within(setting, product), within(setting, fast)
        variants |= {f"torch {precision}": eager, f"torch.compile {precision}": compiled}
        if h.profile:
            continue
        with watch() as seen:
            ours = compiled(x, weight)
        theirs = eager(x, weight)
        operand_eps = {"highest": 0.0, "high": 2**-11, "medium": 2**-8}[precision]
        h.check(
            compiled, exact, x, weight, what=f"compiled {precision}", poison=False, terms=n, operand_eps=operand_eps
        )
        facts[precision] = {
            "eager error": digits(off_by(theirs, want)), "compiled error": digits(off_by(ours, want)),
            "compiled differs": share_differing(ours, theirs), "compilations": len(seen.frames),
            "guards that failed": [reason.partition(": ")[2].strip() for reason in seen.recompiles],
        }  # fmt: skip
    table = h.compare(
        variants, exact, x, weight, baseline="torch highest", work=Work(), title="float32 product",
        case=f"{n}x{n}x{n} float32", terms=n, operand_eps=2**-8,
    )  # fmt: skip
    if h.profile:
        return
    h.fact("float32 product", facts)
    rounded = off_by(product(x.bfloat16().float(), weight.bfloat16().float()), want)
    speed = {row.variant: row.speedup for row in table.rows}
    for precision in PRECISIONS[1:]:
        off = facts[precision]["compiled error"]
        much = f", {speed[f'torch.compile {precision}']:.2f}x the speed" if h.timing else ""
        h.say(
            f'"{precision}": {off / facts["highest"]["compiled error"]:.1f}x the error of "highest"{much}; '
            f"operands rounded to bfloat16 would make an error {rounded / off:.3g}x this one"
        )


# --- rounding


def show_rounding(h: Harness) -> None:
    """float32, where what is left is the order of sums and the fused multiply-add."""
    errors = measure(h, torch.float32)
    h.table("float32: rms error from float64, share of bits that differ from eager's", errors)
    ratio = {name: row["compiled error"] / max(row["eager error"], 1e-30) for name, row in errors.items()}
    same = [name for name, row in errors.items() if not row["compiled differs"]]
    h.say(
        f"float32: compiled errors are {min(ratio.values()):.2f}x to {max(ratio.values()):.2f}x eager's "
        f"({min(ratio, key=ratio.get)}, {max(ratio, key=ratio.get)}); bit for bit as eager: {', '.join(same) or 'none'}"
    )
    # A GPU has one instruction for it, which Triton uses unless it emulates; g++ is told to contract nothing.
    row = errors["multiply-add"]
    once = row["compiled error"] < 0.9 * row["eager error"]
    h.say(
        f"float32 x * y + z: {row['compiled differs']:.1%} of the elements differ from eager's, and "
        f"{row['emulated differs']:.1%} when emulated; the error is that of "
        f"{'one rounding, not two' if once else 'two roundings, as in eager'}"
    )


def show_batches(h: Harness) -> None:
    """The same two rows, by themselves and among others."""
    n = h.pick(quick=512, full=2048)
    x, weight = h.randn(64, n), h.randn(n, n, scale=n**-0.5)

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ weight, -1)

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return layer(x.double(), weight.double())

    torch.compiler.reset()
    facts = {}
    for name, fn in {"eager": layer, "compiled": torch.compile(layer, dynamic=True)}.items():
        h.check(fn, exact, x, weight, what=f"{name} layer", poison=False, terms=n)
        facts[name] = digits(share_differing(fn(x[:2].clone(), weight), fn(x, weight)[:2]))
    h.fact("of two rows, the share that differs between a batch of 2 and of 64", facts)


# --- random numbers


def show_random(h: Harness) -> None:
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
        h.check(
            lambda _, got=got: got, lambda _, got=got: (got != 0).double() / keep, ones, what="dropout", poison=False
        )
    h.fact("dropout from one seed", facts)
