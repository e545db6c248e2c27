"""Numerics: how far compiled results are from float64, from eager's, and from themselves in the next run.

Technique  A compiled function rounds elsewhere than eager: fused operations keep float32 between them where eager
           rounds each result to bfloat16, sums run in another order, a product and a sum may become one instruction.
           That is often nearer to float64, and seldom equal to eager bit for bit; a switch reproduces eager's
           roundings. What torch is told about TF32, deterministic algorithms and random numbers holds for compiled code
           as well, which is compiled again where it depends on that setting.
Question   Are compiled results worse than eager's, why do they differ, and which settings give the same bits again?
Needs      torch
Shapes     x, residual [rows, cols], vector [cols], weight [cols, cols]; tokens [batch, tokens] int64 for the model;
           values [rows, cols] added to the rows of a smaller matrix that an index [rows] names.
Dtypes     float32 and bfloat16; products of float32 also in TF32, or what a CPU has in its place.
Errors     matmul_precision: ValueError for a precision torch does not have. distinct: ValueError for fewer than two
           calls, of which nothing can be learnt.
Wins when  (when to set what) TF32 when float32 products dominate and 3 decimal digits of an operand suffice;
           deterministic algorithms to compare two runs; emulate_precision_casts and fallback_random to find out whether
           a difference from eager is rounding or a fault. Each has its price, which the tables show.
Source     chapter sections "torch.compile fundamentals" and "Debugging".
Run        python examples/compiler/numerics.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from harness import Harness, Work, run
from harness.compiler import watch
from harness.transformer import SMALL, TINY, Transformer

import torch
import torch._inductor.config
import torch.nn.functional as F

PRECISIONS = ("highest", "high", "medium")
CALLS = 20
NAMES = ("softmax", "layer norm", "gelu", "multiply-add", "sum", "transformer")


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


@contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def within(context: Callable, fn: Callable) -> Callable:
    """fn, called within context()."""

    def call(*inputs):
        with context():
            return fn(*inputs)

    return call


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of the error, as a fraction of that of the float64 result."""
    return ((got.double() - want).square().mean() / want.square().mean()).sqrt().item()


def share_differing(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of the elements, the share that is not equal bit for bit (0 and -0 count as equal)."""
    return (a != b).double().mean().item()


def distinct(fn: Callable[[], torch.Tensor], calls: int = CALLS) -> int:
    """How many different results, bit for bit, so many calls of fn have. Raises ValueError for fewer than 2 calls."""
    if calls < 2:
        raise ValueError(f"distinct: {calls} calls; it takes two to see a difference")
    seen: list[torch.Tensor] = []
    for _ in range(calls):
        result = fn()
        if not any(torch.equal(result, other) for other in seen):
            seen.append(result.clone())
    return len(seen)


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


def digits(value: float) -> float:
    return float(f"{value:.3g}")


# --- rounding


def cases(model: Transformer) -> Callable:
    """Operations whose compiled form may round elsewhere than eager, as one function."""

    def run_all(x, residual, vector, weight, tokens):
        return (
            torch.softmax(x * 0.7, -1),
            F.layer_norm(x + residual, vector.shape, vector, vector),
            residual + F.gelu(x @ weight),
            x * residual + vector,
            x.sum(-1),
            model(tokens),
        )

    return run_all


def show_rounding(h: Harness) -> None:
    config = replace(h.pick(quick=TINY, full=SMALL), layers=h.pick(quick=1, full=2), vocab=512, max_tokens=128)
    rows, cols = h.pick(quick=(256, 512), full=(4096, 2048))
    inputs = h.randn(rows, cols), h.randn(rows, cols), h.randn(cols), h.randn(cols, cols, scale=cols**-0.5)
    tokens, facts = h.randint(config.vocab, 8, 64), {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Transformer.random(config, h.device, dtype)
        args = (*(t.to(dtype) for t in inputs), tokens)
        exact = cases(model)(*(t.double() for t in args[:4]), tokens)  # its last result is not exact: it is the model's
        want = (*exact[:-1], model.float64(tokens))
        eager, results = cases(model)(*args), {}
        for name, emulate in {"compiled": False, "emulated": True}.items():
            if emulate and dtype is torch.float32 and not args[0].is_cuda:
                continue  # nothing to emulate: C++ contracts nothing. bfloat16's roundings it emulates since torch 2.13
            with torch._inductor.config.patch(emulate_precision_casts=emulate):
                results[name] = h.compiled(cases(model))(*args)
            budget = {"terms": 1, "acc": dtype} if dtype is torch.bfloat16 else {"terms": 4 * cols}
            h.check(
                lambda *_, got=results[name]: got, lambda *_, want=want: want, *args, what=f"{name} {str(dtype)[6:]}",
                poison=False, **budget,
            )  # fmt: skip
        for i, name in enumerate(NAMES):
            entry = facts.setdefault(f"{str(dtype)[6:]} {name}", {"eager error": digits(off_by(eager[i], want[i]))})
            for which, got in results.items():
                entry[f"{which} error"] = digits(off_by(got[i], want[i]))
                entry[f"{which} differs"] = digits(share_differing(got[i], eager[i]))
    h.fact("rms error from float64", facts)
    for dtype in ("float32", "bfloat16"):
        mine = {name: facts[f"{dtype} {name}"] for name in NAMES}
        ratio = {name: entry["compiled error"] / max(entry["eager error"], 1e-30) for name, entry in mine.items()}
        same = [name for name, entry in mine.items() if not entry["compiled differs"]]
        h.say(
            f"{dtype}: compiled errors are {min(ratio.values()):.2f}x to {max(ratio.values()):.2f}x eager's "
            f"({min(ratio, key=ratio.get)}, {max(ratio, key=ratio.get)}); "
            f"bit for bit as eager: {', '.join(same) or 'none'}"
        )
        if "emulated error" in mine["sum"]:
            nearer = [n for n, e in mine.items() if e["emulated differs"] < e["compiled differs"]]
            h.say(f"{dtype}: emulate_precision_casts brings nearer to eager: {', '.join(nearer) or 'nothing here'}")
    # A GPU has one instruction for it, which Triton uses unless it emulates; g++ is told to contract nothing.
    entry = facts["float32 multiply-add"]
    once = entry["compiled error"] < 0.9 * entry["eager error"]
    emulated = f", and {entry['emulated differs']:.1%} when emulated" if "emulated differs" in entry else ""
    h.say(
        f"float32 x * y + z: {entry['compiled differs']:.1%} of the elements differ from eager's{emulated}; "
        f"the error is that of {'one rounding, not two' if once else 'two roundings, as in eager'}"
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


# --- the same result again


def show_determinism(h: Harness) -> None:
    rows, cols, bins = h.pick(quick=(65536, 32, 16), full=(1 << 20, 64, 1024))
    values, index = h.randn(rows, cols), h.randint(bins, rows)

    def add(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.zeros(bins, cols, dtype=values.dtype, device=values.device).index_add(0, index, values)

    compiled = h.compiled(add)
    variants = {
        "torch eager": add, "torch.compile": compiled, "torch eager, deterministic": within(deterministic, add),
        "torch.compile, deterministic": within(deterministic, compiled),
    }  # fmt: skip
    table = h.compare(
        variants, lambda values, index: add(values.double(), index), values, index, baseline="torch eager",
        work=Work(bytes=values.nbytes + index.nbytes), title="index_add",
        case=f"{rows}x{cols} float32 into {bins} rows", terms=2 * rows // bins,
    )  # fmt: skip
    if h.profile:
        return
    found = {name: distinct(lambda fn=fn: fn(values, index)) for name, fn in variants.items()}
    h.fact(f"different results of index_add in {CALLS} calls", found)
    for row in table.rows:
        speed = f", at {row.speedup:.2f}x the speed of eager" if h.timing and row is not table.rows[0] else ""
        what = "the same bits each time" if found[row.variant] == 1 else f"{found[row.variant]} different results"
        h.say(f"{row.variant}: {what} in {CALLS} calls{speed}")


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


def demo(h: Harness) -> None:
    show_precision(h)
    if not h.profile:
        show_rounding(h)
        show_batches(h)
    show_determinism(h)
    if not h.profile:
        show_random(h)


if __name__ == "__main__":
    run(demo)
