"""When it helps: one model from launch-bound to compute-bound, and a roofline that predicts each ratio beforehand.

A call takes as long as the slower of two: the host, which launches kernels, and the GPU, which runs them. The GPU's
time is a sum over kernels: for each a fixed cost, plus the longer of moving its bytes and doing its arithmetic. So
three things predict what a compiler can change:

  fixed costs   of the host and of each kernel, timed on a twin: the same model, so narrow that little else takes time;
  work          bytes and FLOPs, counted: of eager's operations, and with everything between the products fused;
  rates         of this machine, timed: a copy and a matrix product.

At the compute-bound end the library's matrix products take most of the time, compiled or not, and there is least to
gain: the opposite of the chapter's "works best for compute-bound workloads". The model here has 2 layers of width 4096,
567 million parameters. At one token its ratio depends on the host. modes and large_models use another model: 16 layers
of width 2048, whose kernels read a third of the bytes each.

Question   What will torch.compile give this model at this size, and can that be known before trying?
Needs      torch
Wins when  the host is slower than the GPU (CUDA graphs), or memory traffic between matrix products counts (fusion).
Variants   when_it_helps_work.py (counts the work of eager execution)
Study      studies/compiler/when_it_helps.py (one operation by itself; when the first call has paid for itself)
Source     chapter sections "When torch.compile Helps", "Key Takeaways" and "Pitfall 3: Assuming Compilation Always
           Helps"; chapter section "Phase 5: Benchmarking & Profiling (~15 min) --- Docker Recommended", which asks
           why very small batches do not gain: they gain more than large ones (H200); roofline: Williams,
           Waterman, Patterson 2009.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness import Harness, Timing, Work, run

import torch

from compile_inspect import warm_up
from examples.common.transformer import TINY, WIDE, Transformer, steps
from examples.compiler.when_it_helps_work import eager_steps, twin

EAGER, DEFAULT, REDUCE = "torch eager", "torch.compile default", "torch.compile reduce-overhead"
TWIN, LOST_IN_NOISE = "twin", 0.03
Steps = list[tuple[int, int]]  # bytes and FLOPs of each kernel
Rates = tuple[float, float]  # bytes and FLOPs a millisecond


def predict(steps: Steps, rates: Rates, host: float, kernels: float) -> float:
    """Milliseconds of a call: the slower of host and GPU; `host` and `kernels` are their fixed costs."""
    return max(host, kernels + sum(max(moved / rates[0], flops / rates[1]) for moved, flops in steps))


def bound_of(steps: Steps, rates: Rates, host: float) -> str:
    moving, computing = (sum(step[i] for step in steps) / rate for i, rate in enumerate(rates))
    if host > max(moving, computing):
        return "launch-bound"
    return "compute-bound" if computing > moving else "bandwidth-bound"


def fixed_costs(table, n_eager: int, n_fused: int) -> dict[str, tuple[float, float]]:
    """Of each variant, in ms: (launching a call, running its kernels) at no work, from the twin's times and counts."""
    ms = {row.variant: row.ms for row in table.rows}
    if REDUCE not in ms:  # on a CPU the same processor launches and computes
        return {name: (0.0, time) for name, time in ms.items()}
    # Without a graph the twin's time is the host's; each of its kernels takes as long as one in a graph.
    return {name: (time, ms[REDUCE] * (n_eager / n_fused if name == EAGER else 1)) for name, time in ms.items()}


def compare(h: Harness, model: Transformer, batch: int, tokens: int, title: str):
    """Eager and compiled; on a CPU, which has no CUDA graphs, reduce-overhead would compile what default does."""
    config, dtype = model.config, model.embedding.weight.dtype
    torch.compiler.reset()
    variants: dict[str, Callable] = {EAGER: model, DEFAULT: torch.compile(model, dynamic=False)}
    if h.device.type == "cuda":
        variants[REDUCE] = torch.compile(model, mode="reduce-overhead", dynamic=False)
    return h.compare(
        variants, model.float64, h.randint(config.vocab, batch, tokens), baseline=EAGER, title=title,
        work=Work.in_steps(steps(config, batch, tokens, dtype.itemsize), dtype), case=f"{batch}x{tokens} tokens",
        timing=Timing(end_to_end=True, cold=title != TWIN), max_error_ratio=2.0, dtype=dtype,
    )  # fmt: skip


def rates(h: Harness, width: int, hidden: int, dtype: torch.dtype) -> list:
    """Tables of a copy and of a matrix product: bytes and FLOPs per second of this machine."""
    rows, names = h.pick(quick=512, full=16384), ("torch copy", "torch product")
    x, a, b = h.randn(16 * 2**20), h.randn(rows, width, dtype=dtype), h.randn(width, hidden, dtype=dtype)
    product = Work(flops=2 * rows * width * hidden, dtype=dtype)
    return [
        h.compare({names[0]: torch.clone}, lambda x: x.double(), x, baseline=names[0], work=Work(bytes=2 * x.nbytes),
                  title="rate of copying", terms=0),
        h.compare({names[1]: torch.mm}, lambda a, b: a.double() @ b.double(), a, b, baseline=names[1], work=product,
                  title="rate of multiplying", terms=width, dtype=dtype),
    ]  # fmt: skip


def judge(table, eager: Steps, fused: Steps, rates: Rates, costs: dict[str, tuple[float, float]]) -> dict[str, dict]:
    """A row for each compiled variant: its speed over eager as predicted, and as measured."""
    ms = {name: predict(eager if name == EAGER else fused, rates, *cost) for name, cost in costs.items()}
    return {
        f"{table.case}, {name.removeprefix('torch.compile ')}": {
            "bound": bound_of(fused, rates, costs[EAGER][0]),
            "predicted ms": round(ms[name], 3), "ms": round(table[name].ms, 3),
            "predicted x": round(ms[EAGER] / ms[name], 2), "x eager": round(table.over(EAGER, name), 2),
            "by host": table.by_host(EAGER, name),
        }
        for name in ms if name != EAGER
    }  # fmt: skip


def answer(model: str, rows: dict[str, dict]) -> str:
    best = {}  # of each size, the row that gains most
    for name, row in rows.items():
        size = name.partition(",")[0]
        best[size] = max(best.get(size, row), row, key=lambda row: row["x eager"])
    ends = list(best.items())[:: max(1, len(best) - 1)]
    gains = [f"{row['by host']} at {size} ({row['bound']})" for size, row in ends]
    off = max(abs(row["x eager"] / row["predicted x"] - 1) for row in rows.values())
    losses = [name.replace(" tokens,", "") for name, row in rows.items() if row["x eager"] < 1 - LOST_IN_NOISE]
    lost = f"Slower: {', '.join(losses)}" if losses else "No size is slower than eager"
    return f"{model}, over eager: {' to '.join(gains)}. Predicted ratios: up to {off:.0%} off. {lost}."


def demo(h: Harness) -> None:
    on_gpu = h.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    config = h.pick(quick=replace(TINY, layers=2 if on_gpu else 1), full=replace(WIDE, layers=2) if on_gpu else TINY)
    sizes = h.pick(quick=((1, 1), (2, 128)), full=((1, 1), (1, 256), (8, 2048)))
    warm_up(h.device)
    with torch.no_grad():
        copy, product = rates(h, config.width, config.hidden, dtype)
        small = Transformer.random(twin(config), h.device, dtype, h.seed)
        twins = [compare(h, small, 1, tokens, TWIN) for tokens in (1, 16)]  # matrix x vector: other kernels
        model = Transformer.random(config, h.device, dtype, h.seed)
        tables = {size: compare(h, model, *size, "when_it_helps") for size in sizes}

    def work(config, size: tuple[int, int]) -> tuple[Steps, Steps]:
        return eager_steps(config, *size, dtype, on_gpu), steps(config, *size, dtype.itemsize)

    def judged() -> dict[str, dict]:
        per_ms, rows = (copy.rows[0].tbps * 1e9, product.rows[0].tflops * 1e9), {}
        for size, table in tables.items():
            several = size != (1, 1)
            counts = map(len, work(small.config, (1, 16 if several else 1)))
            rows |= judge(table, *work(config, size), per_ms, fixed_costs(twins[several], *counts))
        return rows

    h.table("predicted from the twin, the work and the rates; measured", judged() if h.timed else {})
    h.answer(lambda: answer(f"{config.layers} layer{'s' * (config.layers > 1)} of width {config.width}", judged()))


if __name__ == "__main__":
    run(demo)
