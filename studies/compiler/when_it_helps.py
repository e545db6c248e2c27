"""when_it_helps, further: one operation by itself, after how many calls compiling has paid for itself, and a map.

The map is eager against compiled over batch x tokens, on a GPU. One function with dynamic=True serves all cells: sizes
of 1 are always specialized, so it compiles up to four times instead of once for each cell, and its kernels may be a
little slower than the lesson's, which are compiled for one size each.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

from harness import Harness, Timing, Work
from harness.hardware import enqueue_ms, gpu_busy_ms, whole_call_ms

import torch
import torch._dynamo

from examples.common.shown import require
from examples.common.transformer import TINY, WIDE, Transformer, steps
from examples.compiler.when_it_helps import EAGER, bound_of

BATCHES, TOKENS = (1, 2, 8, 32), (1, 16, 128, 512, 2048)
MAP = "eager against compiled by batch x tokens"
BLOCK_MS, TURNS = 12, 5  # of whole calls in a turn, which are three batches; turns of eager and compiled
FAR = 0.05  # of the logits' norm: two bfloat16 runs are nearer than that to each other, zeros are not


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


def one_operation(h: Harness) -> None:
    """Nothing to fuse and next to nothing to do: what is left of torch.compile is its own cost per call."""
    variants = {EAGER: scaled, "torch.compile": h.compiled(scaled)}
    if h.device.type == "cuda":
        variants["torch.compile max-autotune"] = h.compiled(scaled, mode="max-autotune")
    table = h.compare(
        variants, lambda x: x.double() * 1.5, h.randn(64, 64), baseline=EAGER, work=Work(),
        title="one multiplication", timing=Timing(end_to_end=True), terms=0,
    )  # fmt: skip
    if table.timed:
        eager, compiled = table[EAGER], table["torch.compile"]
        what = "loses" if compiled.speedup < 1 else "wins here"
        h.say(
            f"one operation: torch.compile {what}, {table.by_host(EAGER, compiled.variant)}: guards and calling what "
            f"it compiled take {(compiled.ms - eager.ms) * 1000:+.1f} us beside eager's dispatch; nothing is fused"
        )


def study(h: Harness) -> None:
    paid = {}
    for table in h.lesson or ():
        if table.timed and table.title == "when_it_helps":
            eager, best = table[EAGER], max(table.rows[1:], key=lambda row: row.speedup)
            if best.ms < eager.ms:
                paid[table.case] = f"{best.variant}: {best.first_call_s * 1000 / (eager.ms - best.ms):,.0f} calls"
            else:
                paid[table.case] = "never"
    h.fact("the first call has paid for itself after", paid)
    one_operation(h)
    if h.device.type != "cuda":
        h.say("no map of batch x tokens: it needs a GPU, which works while the host launches")
    elif h.timing and not h.profile and not h.SANITIZED:
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=len(BATCHES) * len(TOKENS)):
            speed_up_map(h)


def measure(calls: list) -> tuple[float, list[tuple[float, float, float]]]:
    """How many times as fast as the first the second is, and for each the milliseconds of a call, of its host part and
    its GPU part (see harness.bench): timed in turns, as a host's speed drifts more than the difference."""
    alone = [enqueue_ms(call) for call in calls]
    turns = [[median_pair(whole_call_ms(call, BLOCK_MS)) for call in calls] for _ in range(TURNS)]
    ratio = statistics.median(first / second for (first, _), (second, _) in turns)
    found = []
    for call, enqueue, each in zip(calls, alone, zip(*turns, strict=True), strict=True):
        whole, launches = median_pair(each)
        found.append((whole, min(enqueue, launches), min(whole, gpu_busy_ms(call, enqueue))))
    return ratio, found


def median_pair(pairs) -> tuple[float, float]:
    return tuple(map(statistics.median, zip(*pairs, strict=True)))


def speed_up_map(h: Harness) -> None:
    config = replace(h.pick(quick=TINY, full=WIDE), layers=2)
    model = Transformer.random(config, h.device, torch.bfloat16, h.seed)
    copy, product = (next(t for t in h.lesson if t.title == f"rate of {what}") for what in ("copying", "multiplying"))
    rates = copy.rows[0].tbps * 1e9, product.rows[0].tflops * 1e9  # a millisecond
    torch.compiler.reset()
    compiled, rows = torch.compile(model, dynamic=True), {}
    for batch in h.pick(quick=BATCHES[:2], full=BATCHES):
        for tokens in h.pick(quick=TOKENS[:3], full=TOKENS):
            x = h.randint(config.vocab, batch, tokens)
            with h.progress(f"{batch}x{tokens} tokens"):
                want, got = (fn(x).double() for fn in (model, compiled))
                off = ((got - want).norm() / want.norm()).item()
                require(off < FAR, f"compiled, {batch}x{tokens} tokens: {off:.1%} from eager's logits")
                ratio, ((ms, host, gpu), (ms_c, host_c, gpu_c)) = measure([partial(fn, x) for fn in (model, compiled)])
            work = steps(config, batch, tokens, 2)
            rows[f"{batch}x{tokens} tokens"] = {
                "bound": "launch-bound" if host > gpu else bound_of(work, rates, 0.0), "x eager": round(ratio, 3),
                "eager ms": round(ms, 3), "host ms": round(host, 3), "GPU ms": round(gpu, 3),
                "compiled ms": round(ms_c, 3), "its host ms": round(host_c, 3), "its GPU ms": round(gpu_c, 3),
            }  # fmt: skip
    h.table(MAP, rows)
    for bound in dict.fromkeys(row["bound"] for row in rows.values()):
        gains = [row["x eager"] for row in rows.values() if row["bound"] == bound]
        h.say(f"{len(gains)} of {len(rows)} sizes are {bound} in eager: compiled {min(gains):.2f} to {max(gains):.2f}x")
    torch.compiler.reset()
