"""When it helps: one model from launch-bound to compute-bound, and a roofline that predicts each ratio beforehand.

Technique  A call takes as long as the slower of two: the host, which launches kernels, and the GPU, which runs them.
           The GPU's part is a sum over kernels of the slower of moving their bytes and doing their arithmetic, and of
           a fixed cost each. So three things are enough to predict what a compiler can change: what the host and each
           kernel cost at no work (measured on a twin: the same model, so narrow that it does nothing else; on a GPU
           its host's speed again beside each size), the bytes and FLOPs of each step (counted: what eager's operations
           read and write, and what is left when all between the matrix products is fused), and the rates of this
           machine (measured: copy and matrix product).
           Where the prediction says 1.0x, compile time is lost: at the compute-bound end the library's matrix products
           take nearly all of the time, compiled or not. And one operation by itself is slower compiled.
Question   What will torch.compile give this model at this size, and can that be known before trying?
Needs      torch
Shapes     tokens [batch, tokens] int64 from 1x1 to 8x2048 -> logits of each row's last token, [batch, vocab].
Dtypes     bfloat16 on a GPU, float32 on a CPU.
Errors     ValueError from predict() for a rate that is not positive.
Wins when  the host is slower than the GPU (CUDA graphs), or memory traffic between matrix products counts (fusion).
Source     roofline: Williams, Waterman, Patterson 2009; chapter sections "When torch.compile helps" and "Key question",
           which says that it does not help, or hurts, at very small batches.
Run        python examples/compiler/when_it_helps.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness import Harness, Work, run
from harness.compare import cpu_ms
from harness.compiler import wake_compiler
from harness.hardware import ceilings, whole_call_ms
from harness.transformer import TINY, WIDE, Config, Transformer, pieces

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

EAGER, DEFAULT, REDUCE = "torch eager", "torch.compile default", "torch.compile reduce-overhead"
LOST_IN_NOISE = 0.03


@dataclass(frozen=True)
class Rates:
    """What this machine does: bytes and FLOPs a millisecond, and what the twin measured of each variant, in ms.

    `host` is what launching one call takes, `fixed` what its kernels take on the GPU when there is nothing to do; each
    for one token, where products of a matrix and a vector are other kernels, and for several.
    """

    bytes: float
    flops: float
    host: dict[bool, dict[str, float]]  # by whether there are several tokens
    fixed: dict[bool, dict[str, float]]
    eager_twin: Callable[[bool], float] | None = None  # ms of the eager twin, measured again


class EagerWork(TorchDispatchMode):
    """(bytes, FLOPs) of each operation that eager execution dispatches: all it reads and writes. Views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.is_view or func in (torch.ops.aten._unsafe_view.default, torch.ops.aten.empty_like.default):
            return out
        tensors = [x for x in tree_leaves((args, kwargs or {}, out)) if isinstance(x, torch.Tensor)]
        flops = 0
        if count := flop_registry.get(func.overloadpacket):
            flops = count(*args, **(kwargs or {}), out_val=out)
        if func is torch.ops.aten.embedding.default:
            tensors = [out, out]  # the rows that are looked up, not the table
        self.steps.append((sum(x.numel() * x.element_size() for x in tensors), flops))
        return out


class _OneStep(TorchFunctionMode):
    """What the meta device takes apart and eager does not: attention anywhere, and RMSNorm on a GPU (one kernel)."""

    def __init__(self, work: EagerWork, on_gpu: bool) -> None:
        super().__init__()
        self.work, self.on_gpu = work, on_gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.rms_norm and self.on_gpu:
            x, weight = args[0], kwargs["weight"]
            self.work.steps.append(((2 * x.numel() + weight.numel()) * x.element_size(), 0))
            return torch.empty_like(x)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        batch, heads, tokens, width = q.shape
        moved = sum(x.numel() for x in (q, k, v, q)) * q.element_size()
        self.work.steps.append((moved, 2 * batch * heads * tokens * (tokens + 1) * width))
        return torch.empty_like(q)


def eager_steps(
    config: Config, batch: int, tokens: int, dtype: torch.dtype, on_gpu: bool = False
) -> list[tuple[int, int]]:
    """(bytes, FLOPs) of each operation of an eager forward pass, from running it without data."""
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
    with EagerWork() as work, _OneStep(work, on_gpu), torch.no_grad():
        model(ids)
    return work.steps


def fused_steps(config: Config, batch: int, tokens: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """(bytes, FLOPs) of each step that is left when everything between the matrix products is fused."""
    return [(p.bytes, p.flops) for p in pieces(config, batch, tokens, dtype.itemsize) for _ in range(p.count)]


def predict(variant: str, steps: list[tuple[int, int]], rates: Rates, several: bool, host_slower: float = 1.0) -> float:
    """Milliseconds of a call: the slower of host and GPU. Raises ValueError for rates that are not positive.

    `host_slower` is how many times as long the host takes now as when the twin was measured.
    """
    if rates.bytes <= 0 or rates.flops <= 0:
        raise ValueError(f"predict: {rates.bytes} bytes and {rates.flops} FLOPs a ms; pass measured, positive rates")
    work = sum(max(moved / rates.bytes, flops / rates.flops) for moved, flops in steps)
    return max(host_slower * rates.host[several][variant], rates.fixed[several][variant] + work)


def twin(config: Config) -> Config:
    """The same model as far as the host sees it: as many layers and operations, on next to nothing."""
    return replace(config, width=256, heads=4, kv_heads=2, hidden=512, vocab=512)


def variants_of(model: Transformer) -> dict[str, Callable]:
    """Eager and compiled; on a CPU, which has no CUDA graphs, reduce-overhead would compile what default does."""
    torch.compiler.reset()
    variants = {EAGER: model, DEFAULT: torch.compile(model, dynamic=False)}
    if model.embedding.weight.is_cuda:
        variants[REDUCE] = torch.compile(model, mode="reduce-overhead", dynamic=False)
    return variants


def settled(fn: Callable, ids: torch.Tensor) -> Callable:
    for _ in range(4):  # compile, record, replay
        fn(ids)
    return lambda: fn(ids)


def call_ms(fn: Callable, on_gpu: bool, budget: float = 40) -> float:
    return statistics.median(whole_call_ms(fn, budget) if on_gpu else cpu_ms(fn))


def measure_rates(h: Harness, config: Config, dtype: torch.dtype) -> Rates:
    """The machine, and the fixed costs of each variant, without running the model that is to be predicted."""
    on_gpu = h.device.type == "cuda"
    rows = h.pick(quick=512, full=16384)
    # Back to back and not at first: under its power limit a GPU does not keep up the rate of a single product.
    a, b = h.randn(rows, config.width, dtype=dtype), h.randn(config.width, config.hidden, dtype=dtype)
    for _ in range(2):
        product_ms = call_ms(lambda: a @ b, on_gpu, budget=1000)
    flops = 2 * rows * config.width * config.hidden / product_ms
    if on_gpu:
        moved = ceilings().copy_tbps() * 1e9
    else:
        source = h.randn(16 * 2**20)
        target = torch.empty_like(source)
        moved = 2 * source.nbytes / call_ms(lambda: target.copy_(source), on_gpu)
    small = Transformer.random(twin(config), h.device, dtype, h.seed)
    h.fact("measured", {"TB/s": round(moved / 1e9, 3), "TFLOP/s": round(flops / 1e9, 3)})
    tokens = {several: h.randint(small.config.vocab, 1, 16 if several else 1) for several in (False, True)}
    rates = Rates(moved, flops, {}, {}, lambda several: call_ms(lambda: small(tokens[several]), on_gpu))
    for several, ids in tokens.items():
        took = {name: call_ms(settled(fn, ids), on_gpu) for name, fn in variants_of(small).items()}
        rates.host[several], rates.fixed[several] = took, dict(took)
        if on_gpu:  # without a graph the twin's time is the host's; its kernels, one for one, take what a graph's do
            per_kernel = took[REDUCE] / len(fused_steps(small.config, *ids.shape, dtype))
            rates.fixed[several][DEFAULT] = took[REDUCE]
            rates.fixed[several][EAGER] = per_kernel * len(eager_steps(small.config, *ids.shape, dtype, on_gpu))
        else:  # who launches is who computes
            rates.host[several] = dict.fromkeys(took, 0.0)
        costs = {
            name: {
                "host us": round(rates.host[several][name] * 1000, 1),
                "kernels us": round(rates.fixed[several][name] * 1000, 1),
            }
            for name in took
        }
        h.fact(f"fixed costs of the twin, {'several tokens' if several else 'one token'}", costs)
    return rates


def demo(h: Harness) -> None:
    on_gpu = h.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    config = h.pick(quick=replace(TINY, layers=2 if on_gpu else 1), full=WIDE if on_gpu else TINY)
    cases = h.pick(quick=((1, 1), (2, 128)), full=((1, 1), (1, 64), (1, 256), (1, 1024), (8, 2048)))
    h.fact("parameters", config.parameters)
    wake_compiler(h.device)
    with torch.no_grad():
        if not h.profile and h.timing:
            with h.progress("the rates of this machine and the twin"):
                rates = measure_rates(h, config, dtype)
        model = Transformer.random(config, h.device, dtype, h.seed)
        seen = []
        for batch, tokens in cases:
            # A host that others use too changes its speed within minutes: the eager twin tells, before and after.
            several, again = batch * tokens > 1, on_gpu and h.timing and not h.profile
            before = rates.eager_twin(several) if again else 0.0
            table = one_size(h, model, batch, tokens)
            if table and table.rows[0].ms:
                slower = (before + rates.eager_twin(several)) / 2 / rates.host[several][EAGER] if again else 1.0
                seen.append(compare_with_prediction(h, table, config, batch, tokens, dtype, rates, slower))
        if seen:
            conclude(h, seen)
    one_operation(h)


def one_size(h: Harness, model: Transformer, batch: int, tokens: int):
    config, dtype = model.config, model.embedding.weight.dtype
    ids = h.randint(config.vocab, batch, tokens)
    work = Work.in_steps(fused_steps(config, batch, tokens, dtype), dtype)
    return h.compare(
        variants_of(model), model.float64, ids, baseline=EAGER, work=work, title="when_it_helps",
        case=f"{batch}x{tokens} tokens", whole_calls=True, beside=2.0, cold=True, dtype=dtype,
    )  # fmt: skip


def compare_with_prediction(h: Harness, table, config, batch, tokens, dtype, rates: Rates, slower: float) -> dict:
    eager = eager_steps(config, batch, tokens, dtype, h.device.type == "cuda")
    fused = fused_steps(config, batch, tokens, dtype)
    row = {row.variant: row for row in table.rows}
    several = batch * tokens > 1
    predicted = {name: predict(name, eager if name == EAGER else fused, rates, several, slower) for name in row}
    moving, computing = (sum(step[i] for step in fused) / rate for i, rate in ((0, rates.bytes), (1, rates.flops)))
    bound = "compute-bound" if computing > moving else "bandwidth-bound"
    if slower * rates.host[several][EAGER] > max(computing, moving):
        bound = f"launch-bound, {bound} once launches are gone"
    shown = {
        name: {
            "predicted ms": round(predicted[name], 3), "measured ms": round(row[name].ms, 3),
            "measured / predicted": round(row[name].ms / predicted[name], 3),
            "predicted x": round(predicted[EAGER] / predicted[name], 2), "measured x": round(row[name].speedup, 2),
        }
        for name in row
    }  # fmt: skip
    h.fact(f"{table.case}: {bound}", shown)
    best = max(table.rows[1:], key=lambda r: r.speedup)
    calls = best.first_call_s * 1000 / (row[EAGER].ms - best.ms) if best.ms < row[EAGER].ms else None
    traffic = sum(b for b, _ in eager) / sum(b for b, _ in fused)
    h.say(
        f"{table.case}: {bound}; eager moves {traffic:.2f}x the bytes; best {best.variant} {best.speedup:.2f}x, "
        + (f"has paid for its {best.first_call_s:.1f} s after {calls:.0f} calls" if calls else "never pays")
    )
    return {"case": table.case, "bound": bound, "best": best, "shown": shown, "calls": calls}


def conclude(h: Harness, seen: list[dict]) -> None:
    """The trend, and where a compiler is not worth its time: from this run's rows."""
    h.fact("break-even in calls", {one["case"]: round(one["calls"]) if one["calls"] else None for one in seen})
    worst = {}
    for one in seen:
        for name, row in one["shown"].items():
            off = abs(row["measured / predicted"] - 1)
            worst[name] = max(worst.get(name, (0, "")), (off, one["case"]))
    for name, (off, case) in worst.items():
        h.say(f"{name}: the prediction is off by at most {off:.0%}, at {case}")
    losses = [
        f"{name} at {one['case']} ({row['measured x']:.2f}x)"
        for one in seen for name, row in one["shown"].items() if row["measured x"] < 1 - LOST_IN_NOISE
    ]  # fmt: skip
    h.say(f"slower than eager: {', '.join(losses) if losses else 'none of these sizes'}")


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


def one_operation(h: Harness) -> None:
    """Nothing to fuse and next to nothing to do: what is left of torch.compile is its own cost per call."""
    x = h.randn(64, 64)
    table = h.compare(
        {EAGER: scaled, "torch.compile": h.compiled(scaled)}, lambda x: x.double() * 1.5, x,
        baseline=EAGER, work=Work(), title="one multiplication", whole_calls=True, terms=0,
    )  # fmt: skip
    if table and table.rows[0].ms:
        eager, compiled = table.rows
        what = "loses" if compiled.speedup < 1 else "wins here"
        h.say(
            f"one operation: torch.compile {what}, {compiled.speedup:.2f}x: guards and calling what it compiled take "
            f"{(compiled.ms - eager.ms) * 1000:+.1f} us beside eager's dispatch, and there is nothing to fuse"
        )


if __name__ == "__main__":
    run(demo)
