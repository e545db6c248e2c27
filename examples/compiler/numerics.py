"""Numerics: how far compiled results are from float64, from eager's, and from themselves in the next run.

A compiled function rounds in other places than eager. Fused operations keep float32 between them where eager rounds
each result to bfloat16, whose 8 bits of mantissa make an error of up to 0.4 % a rounding; sums run in another order; a
product and a sum may become one instruction. The result is often nearer to float64 and seldom bit-equal to eager's.

Three settings make results agree, with eager's or with the last run's: emulate_precision_casts rounds where eager
rounds, deterministic algorithms replace atomic additions, whose order varies, fallback_random draws what eager draws.

Question   Are compiled results worse than eager's, why do they differ, and which settings give the same bits again?
Needs      torch
Wins when  (when to set what) deterministic algorithms to compare two runs; emulate_precision_casts and fallback_random
           to find out whether a difference from eager is rounding or a fault. Each has its price.
Study      studies/compiler/numerics.py (float32, dropout)
Source     chapter section "Common Issues" (numerical differences).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness import Harness, Table, Work, run

import torch
import torch.nn.functional as F

from compile_inspect import own_code
from examples.common.determinism import deterministic
from examples.common.transformer import SMALL, TINY, Transformer

CALLS = 20
NAMES = ("softmax", "layer norm", "gelu", "multiply-add", "sum", "transformer")
EAGER, DETERMINISTIC = "torch eager", "torch.compile, deterministic"


def cases(model: Transformer) -> Callable:
    """Operations that may round in other places when compiled, and a model made of several of them, as one function."""

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
    """The share of elements that are not equal bit for bit (0 and -0 count as equal)."""
    return (a != b).double().mean().item()


def distinct(fn: Callable[[], torch.Tensor], calls: int) -> int:
    """How many different results, bit for bit, that many calls of fn give; a call may overwrite the last result."""
    seen: list[torch.Tensor] = []
    for _ in range(calls):
        result = fn()
        if not any(torch.equal(result, other) for other in seen):
            seen.append(result.clone())
    return len(seen)


def measure(h: Harness, dtype: torch.dtype) -> dict[str, dict]:
    """Each operation: errors of eager, compiled and emulated from float64, and the share of elements unlike eager's."""
    config = replace(h.pick(quick=TINY, full=SMALL), layers=h.pick(quick=1, full=2), vocab=512, max_tokens=128)
    rows, cols = h.pick(quick=(256, 512), full=(4096, 2048))
    inputs = h.randn(rows, cols), h.randn(rows, cols), h.randn(cols), h.randn(cols, cols, scale=cols**-0.5)
    tokens, model = h.randint(config.vocab, 8, 64), Transformer.random(config, h.device, dtype)
    args = (*(t.to(dtype) for t in inputs), tokens)
    exact = cases(model)(*(t.double() for t in args[:4]), tokens)  # its last result, the model's, is not exact
    want = (*exact[:-1], model.float64(tokens))
    eager, results = cases(model)(*args), {}
    for name, options in {"compiled": {}, "emulated": {"emulate_precision_casts": True}}.items():
        got = results[name] = h.compiled(cases(model), options=options)(*args)
        budget = {"terms": 1, "acc": dtype} if dtype is torch.bfloat16 else {"terms": 4 * cols}
        what = f"{name} {str(dtype)[6:]}"
        h.check(lambda *_, got=got: got, lambda *_: want, *args, what=what, poison=False, **budget)
    table = {}
    for i, name in enumerate(NAMES):
        row = {"eager error": off_by(eager[i], want[i])}
        for which, got in results.items():
            row[f"{which} error"] = off_by(got[i], want[i])
            row[f"{which} differs"] = share_differing(got[i], eager[i])
        table[name] = {what: float(f"{value:.3g}") for what, value in row.items()}
    return table


def repeat(h: Harness) -> tuple[Table, dict[str, int]]:
    """index_add, which adds by atomics on a GPU: its times, and how many different results CALLS calls have."""
    rows, cols, bins = h.pick(quick=(65536, 32, 16), full=(1 << 20, 64, 1024))
    values, index = h.randn(rows, cols), h.randint(bins, rows)

    def add(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.zeros(bins, cols, dtype=values.dtype, device=values.device).index_add(0, index, values)

    compiled, tuned = h.compiled(add), torch.compile(own_code(add), dynamic=False, mode="max-autotune-no-cudagraphs")
    variants = {
        EAGER: add, "torch.compile": compiled, "torch.compile max-autotune-no-cudagraphs": tuned,
        "torch eager, deterministic": within(deterministic, add), DETERMINISTIC: within(deterministic, compiled),
    }  # fmt: skip
    table = h.compare(
        variants, lambda values, index: add(values.double(), index), values, index, baseline=EAGER,
        work=Work(bytes=values.nbytes + index.nbytes), title="index_add",
        case=f"{rows}x{cols} float32 into {bins} rows", terms=2 * rows // bins,
    )  # fmt: skip
    calls = 2 if h.profile else CALLS
    return table, {name: distinct(lambda fn=fn: fn(values, index), calls) for name, fn in variants.items()}


def demo(h: Harness) -> None:
    errors = {} if h.profile else measure(h, torch.bfloat16)
    h.table("bfloat16: rms error from float64, share of bits that differ from eager's", errors)
    table, results = repeat(h)
    h.table(f"index_add: different results in {CALLS} calls", {n: {"results": count} for n, count in results.items()})

    def answer() -> str:
        ratios = [row["compiled error"] / max(row["eager error"], 1e-30) for row in errors.values()]
        nearer = sum(row["emulated differs"] < row["compiled differs"] for row in errors.values())
        speed = f", at {table.over('torch.compile', DETERMINISTIC):.2f}x the speed" if table.timed else ""
        return (
            f"Compiled bfloat16: {min(ratios):.2f} to {max(ratios):.2f}x eager's error. emulate_precision_casts brings "
            f"{nearer} of {len(errors)} operations nearer to eager's bits. index_add: {results['torch.compile']} "
            f"different results in {CALLS} calls, {results[DETERMINISTIC]} if deterministic{speed}."
        )

    h.answer(answer, timed=False)


if __name__ == "__main__":
    run(demo)
