"""Compile modes: what default, reduce-overhead and max-autotune change, and what each costs before it pays.

torch.compile has four modes. default fuses what lies between the matrix products. reduce-overhead also records the
launches into a CUDA graph, so that the host launches once a call. max-autotune times several implementations of each
matrix product, tunes the generated kernels, and records a CUDA graph too; max-autotune-no-cudagraphs leaves that out,
and is in the study.

Which of them helps follows from what the model waits for. At one token this one (16 layers of width 2048, 1.24 billion
parameters: 1 B in large_models) reads 2.5 GB of weights: 0.6 ms at an H200's bandwidth. Eager launches some 300 kernels
for it, which takes a host many times as long. So the ratio for one token depends on the host, and large_models may
report another for this model; its method, compiled blocks in a CUDA graph, compiles faster than any mode. The chapter's
ratios for a 1 B model (1.03x, 1.16x, 1.18x) name no batch, tokens or host, and so cannot be checked; its advice,
max-autotune for production, can.

Question   Which mode is the fastest, how many calls until it is as fast as it gets, and when has it paid?
Needs      torch
Wins when  calls repeat one shape often enough to pay for compiling. For many tokens and for large models, whose blocks
           are compiled once, see when_it_helps and large_models. On a CPU there are no CUDA graphs, and the modes with
           and without them compile the same code.
Variants   modes_first_calls.py (how it is found out when a call has settled)
Study      studies/compiler/modes.py (128 tokens; max-autotune with and without CUDA graphs)
Source     chapter sections "Compilation Modes", "Compiler Modes" and "Mode Comparison"; chapter section "Pitfall 5:
           Forgetting Warmup", which asks for 10 calls and more: the lesson counts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from harness import Harness, Timing, Work, run

import torch

from compile_inspect import warm_up
from examples.common.transformer import ONE_BILLION, SMALL, TINY, Transformer, steps
from examples.compiler.modes_first_calls import CALLS, start

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
EAGER, DEFAULT, REDUCED, TUNED = "torch eager", *(f"torch {mode}" for mode in MODES[:3])
NEAR = 1.03  # times the fastest mode's time: of the modes within it, the answer takes the shortest first call


def first_calls_s(facts: dict[str, dict]) -> dict[str, float]:
    return {name: fact["first call s"] for name, fact in facts.items()}


def paid(table, variant: str, first_call_s: float) -> str:
    """When a compiled variant has made up for its first call."""
    saved = table[EAGER].ms - table[variant].ms
    return f"in {first_call_s / saved * 1000:.0f} calls" if saved > 0 else "never"


def one_size(h: Harness, model: Transformer, tokens: int, modes: Iterable[str]) -> tuple:
    """(table, facts of the first calls) of these modes at one row of so many tokens."""
    config, dtype = model.config, model.embedding.weight.dtype
    case, ids = f"1x{tokens} tokens", h.randint(config.vocab, 1, tokens)
    variants = {EAGER: model} | {f"torch {mode}": h.compiled(model, mode=mode) for mode in modes}
    with torch.no_grad(), h.progress(f"first calls at {case}"):
        untimed = variants.get(f"{TUNED}-no-cudagraphs")  # compiled after max-autotune: its choices are in the cache
        facts = {} if h.profile else {
            name: start(fn, ids, untimed if name == TUNED else None)
            for name, fn in variants.items() if fn is not untimed
        }  # fmt: skip
        table = h.compare(
            variants, model.float64, ids, baseline=EAGER, title="modes", case=case,
            work=Work.in_steps(steps(config, 1, tokens, dtype.itemsize), dtype),
            timing=Timing(end_to_end=True, first_calls=dict.fromkeys(variants) | first_calls_s(facts)),
            max_error_ratio=2.0, dtype=dtype,
        )  # fmt: skip
    return table, facts


def make_model(h: Harness) -> Transformer:
    gpu = h.device.type == "cuda"
    config = h.pick(quick=SMALL, full=ONE_BILLION) if gpu else h.pick(quick=replace(TINY, layers=1), full=SMALL)
    return Transformer.random(config, h.device, torch.bfloat16 if gpu else torch.float32, h.seed)


def demo(h: Harness) -> None:
    model = make_model(h)
    modes = MODES[:3] if h.device.type == "cuda" or h.full else MODES[::2]  # the ones that differ on a CPU
    warm_up(h.device)
    table, facts = one_size(h, model, h.pick(quick=16, full=1), modes)
    report(h, table, facts)
    h.answer(lambda: answer(model.config.parameters, table, facts))


def report(h: Harness, table, facts: dict[str, dict]) -> None:
    rows = {}
    for name, fact in facts.items():
        row = rows[f"{table.case}, {name.removeprefix('torch ')}"] = dict(fact)
        if table.timed and name != EAGER:
            row["paid"] = paid(table, name, fact["first call s"])
    if table.timed and TUNED in table:
        other = REDUCED if REDUCED in table else DEFAULT
        cost, less = (f"{facts[name]['first call s']:.0f} s" for name in (TUNED, other))
        h.say(
            f'"max-autotune for production", {table.case}: {table.by_host(other, TUNED)} {other[6:]}, for {cost} of '
            f"compiling against {less}"
        )
    h.table("first calls", rows)


def answer(parameters: int, table, facts: dict[str, dict]) -> str:
    first_s = {row.variant: facts[row.variant]["first call s"] for row in table.rows[1:]}
    best = min((name for name in first_s if table[name].ms <= NEAR * table.best.ms), key=first_s.get)
    told = [f"{n[6:]} {table.over(EAGER, n):.2f}x ({table.over(EAGER, n, host=2):.2f}x)" for n in first_s]
    last = facts[best]["calls until stable"]
    settled = f"settled after {last} calls" if last < CALLS else f"not settled in {CALLS} calls"
    size = f"{parameters / 1e9:.1f} B" if parameters > 1e9 else f"{parameters / 1e6:.0f} M"
    take = "eager"
    if table[EAGER].ms > table.best.ms:
        back = paid(table, best, first_s[best])
        take = f"{best[6:]}, {settled}; {first_s[best]:.0f} s of compiling paid back {back}"
    return f"{size} parameters, {table.case}: take {take}. Over eager (host twice as fast): {', '.join(told)}."


if __name__ == "__main__":
    run(demo)
