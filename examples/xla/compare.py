"""One model, six ways to run it: eager, Inductor, openxla, lazy XLA, torch_xla.compile, JAX; and when each one pays.

Technique  The same weights through every compiler of this environment, each cold: what the first call costs, what a
           later one takes, how far its result is from float64, and how long it keeps the host. Three of them differ
           only in how torch_xla learns what to compile: lazy mode by recording each call, torch_xla.compile by
           recording each call between two syncs, openxla by Dynamo, once. JAX's is the same compiler with its own front
           end. A compiler is paid at the first call and earns at the later ones: the number of calls decides.
Question   Which compiler for this model, given how often it will be called with these sizes?
Needs      torch_xla>=2.9
Shapes     tokens [batch, tokens] int64 -> the logits of each row's last token, [batch, vocab]; --full: gradients, too.
Dtypes     float32.
Errors     weights_for_jax() raises ImportError where JAX is not installed, with the command; jax_forward() raises
           TypeError for anything but the Config of harness.transformer; break_even() and seconds_of() raise ValueError
           for what cannot be a time or a number of calls.
Wins when  a compiler's first call is earned back: the last lines of a run say when. For one call, nothing does.
Source     chapter section "XLA": compare.
Run        python examples/xla/compare.py
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from harness import Harness, Work, run, xla
from harness.compiler import empty_cache, logs, wake_compiler
from harness.transformer import Config, Transformer, pieces

import torch
import torch_xla

EAGER, INDUCTOR, OPENXLA = "torch eager", "torch.compile inductor", "torch.compile openxla"
LAZY, COMPILE, JAX = "torch_xla lazy", "torch_xla.compile", "JAX"
JAX_PACKAGE = "jax==0.7.1"
LIKE_EAGER = 2.0  # times eager's own error from float64
CALLS = (1, 100, 10_000, 1_000_000)


# --- the model in JAX


def have_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


def weights_for_jax(model: Transformer) -> dict:
    """The very weights of the model, and its tables of angles, as JAX's arrays on the CPU, by their torch names."""
    if not have_jax():
        raise ImportError(f"weights_for_jax: JAX is not installed here; pip install {JAX_PACKAGE}")
    import jax

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: jax.device_put(x.detach().numpy(), jax.devices("cpu")[0]) for name, x in tensors.items()}


def jax_forward(config: Config) -> Callable:
    """The forward pass of harness.transformer as a function of JAX: (weights, tokens) -> logits."""
    if not isinstance(config, Config):
        raise TypeError(f"jax_forward: got {type(config).__name__}; need the Config of harness.transformer")
    import jax
    import jax.numpy as jnp

    c, groups = config, config.heads // config.kv_heads

    def norm(x, weight):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight

    def attention(x, w, cos, sin):
        batch, tokens, _ = x.shape
        heads = (x @ w["qkv.weight"].T).reshape(batch, tokens, c.heads + 2 * c.kv_heads, c.head_width)
        turned, v = jnp.split(heads.swapaxes(1, 2), [c.heads + c.kv_heads], axis=1)
        left, right = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1)
        q, k = jnp.split(turned, [c.heads], axis=1)
        q = q.reshape(batch, c.kv_heads, groups, tokens, c.head_width)
        scores = jnp.einsum("bkgqd,bktd->bkgqt", q, k) / math.sqrt(c.head_width)
        scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf)
        out = jnp.einsum("bkgqt,bktd->bkgqd", jax.nn.softmax(scores, axis=-1), v)
        out = out.reshape(batch, c.heads, tokens, c.head_width).swapaxes(1, 2).reshape(batch, tokens, c.width)
        return out @ w["attention_out.weight"].T

    def forward(weights, tokens):
        cos, sin = weights["cos"][: tokens.shape[1]], weights["sin"][: tokens.shape[1]]
        x = weights["embedding.weight"][tokens]
        for i in range(c.layers):
            prefix = f"blocks.{i}."
            w = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            x = x + attention(norm(x, w["attention_norm.weight"]), w, cos, sin)
            gate, up = jnp.split(norm(x, w["mlp_norm.weight"]) @ w["gate_up.weight"].T, 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ w["down.weight"].T
        return norm(x[:, -1], weights["norm.weight"]) @ weights["embedding.weight"].T

    return forward


def to_torch(values) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """JAX's results, waited for, as torch tensors of the same memory."""
    if isinstance(values, tuple):
        return tuple(to_torch(value) for value in values)
    return torch.from_dlpack(values.block_until_ready())


# --- the six


@dataclass
class Way:
    """One way: `call` returns when the host is free again, `finish` waits for its result and brings it to torch."""

    call: Callable
    finish: Callable

    def __call__(self, *_) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.finish(self.call())


def settled(result):
    xla.settle()
    return result


def finished(result):
    xla.wait()  # started already, and nothing is left to synchronize
    return result


def as_it_is(result):
    return result


def another_program(model: Transformer) -> Transformer:
    """The same model on the XLA device, with a row more in its tables of angles, which nothing reads.

    torch_xla.compile records the graph that lazy mode does, and would find it compiled. Of another input size, it is
    another program, of the same work.
    """
    longer = copy.deepcopy(model)
    longer.cos, longer.sin = (torch.cat((table, table[-1:])) for table in (model.cos, model.sin))
    return longer.to(xla.device())


def forwards(model: Transformer, tokens: torch.Tensor) -> dict[str, Way]:
    """The forward pass, each way with its own copy of the weights and of the tokens where it needs them."""
    there, moved = copy.deepcopy(model).to(xla.device()), tokens.to(xla.device())
    inductor = torch.compile(model, fullgraph=True, dynamic=False)
    openxla = torch.compile(there, backend="openxla", fullgraph=True, dynamic=False)
    bounded = torch_xla.compile(another_program(model), full_graph=True)
    ways = {
        EAGER: Way(lambda: model(tokens), as_it_is),
        INDUCTOR: Way(lambda: inductor(tokens), as_it_is),
        OPENXLA: Way(lambda: openxla(moved), finished),
        LAZY: Way(lambda: synced(there(moved)), finished),
        COMPILE: Way(lambda: bounded(moved), finished),
    }
    if have_jax():
        import jax

        weights, compiled = weights_for_jax(model), jax.jit(jax_forward(model.config))
        ids = jax.device_put(tokens.to(torch.int32).numpy(), jax.devices("cpu")[0])
        ways[JAX] = Way(lambda: compiled(weights, ids), to_torch)
    return ways


def gradients(model: Transformer, tokens: torch.Tensor) -> dict[str, Way]:
    """The gradient of the mean square of the logits by each weight."""

    def of(model: Transformer, forward: Callable, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autograd.set_multithreading_enabled(False):  # see harness.xla.watch: else programs vary by luck
            return torch.autograd.grad(forward(tokens).square().mean(), list(model.parameters()))

    there, moved = copy.deepcopy(model).to(xla.device()), tokens.to(xla.device())
    longer = another_program(model)
    inductor = torch.compile(model, fullgraph=True, dynamic=False)
    openxla = torch.compile(there, backend="openxla", fullgraph=True, dynamic=False)
    bounded = torch_xla.compile(lambda tokens: of(longer, longer, tokens), full_graph=True)
    ways = {
        EAGER: Way(lambda: of(model, model, tokens), as_it_is),
        INDUCTOR: Way(lambda: of(model, inductor, tokens), as_it_is),
        OPENXLA: Way(lambda: of(there, openxla, moved), settled),
        LAZY: Way(lambda: synced(of(there, there, moved)), finished),
        COMPILE: Way(lambda: bounded(moved), finished),
    }
    if have_jax():
        import jax

        forward, weights, names = jax_forward(model.config), weights_for_jax(model), dict(model.named_parameters())
        tables = {name: weights.pop(name) for name in ("cos", "sin")}
        compiled = jax.jit(jax.grad(lambda weights, tables, ids: (forward(weights | tables, ids) ** 2).mean()))
        ids = jax.device_put(tokens.to(torch.int32).numpy(), jax.devices("cpu")[0])

        def call() -> tuple:
            found = compiled(weights, tables, ids)
            return tuple(found[name] for name in names)

        ways[JAX] = Way(call, to_torch)
    return ways


def synced(result):
    """Lazy mode has then been asked to run what it recorded: the host's part is done."""
    torch_xla.sync()
    return result


# --- measuring


def host_ms(way: Way, calls: int = 15) -> float:
    """Median time in ms until the host is free again; the rest is waited for outside of the clock."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        result = way.call()
        times.append(1000 * (time.perf_counter() - started))
        way.finish(result)
    return statistics.median(times)


def cores_busy(way: Way, seconds: float = 0.1) -> float:
    """CPU time over wall time while it is called again and again: how many cores it keeps busy."""
    way()
    started, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        way()
    return (time.process_time() - cpu) / (time.perf_counter() - started)


def seconds_of(first_s: float, ms: float, calls: int) -> float:
    """All of so many calls: the first, and the later ones at their time each."""
    if not (first_s >= 0 and ms >= 0 and calls >= 1):
        raise ValueError(f"seconds_of: first call {first_s} s, then {ms} ms, {calls} calls; need times, and a call")
    return first_s + (calls - 1) * ms / 1000


def break_even(first_s: float, ms: float, than_first_s: float, than_ms: float) -> int | None:
    """From how many calls on the one takes no longer, in all, than the other; None: never."""
    if not all(0 <= value < math.inf for value in (first_s, ms, than_first_s, than_ms)):
        raise ValueError(f"break_even: {(first_s, ms, than_first_s, than_ms)}; need times, none negative or infinite")
    extra, saved = first_s - than_first_s, (than_ms - ms) / 1000
    if saved < 0:
        return None
    if extra <= 0:
        return 1
    return 1 + math.ceil(extra / saved) if saved else None


def wake(h: Harness) -> None:
    """What only the first compilation of a process costs is no model's."""
    with h.progress("waking the compilers"), logs():
        wake_compiler(h.device)
        torch.compile(lambda x: x.sin() + 1, backend="openxla")(torch.ones(8, device=xla.device()))
        xla.settle()
        if have_jax():
            import jax

            jax.jit(lambda x: jax.numpy.sin(x) + 1)(jax.device_put(torch.ones(8).numpy(), jax.devices("cpu")[0]))
        torch.compiler.reset()


def table_of(
    h: Harness, title: str, ways: dict[str, Way], reference: Callable, tokens: torch.Tensor, work: Work
) -> dict:
    """One table, each way compiled cold; {way: its row}, empty under --profile."""
    seconds, compiled = {}, {}
    for name, way in {} if h.profile else ways.items():
        with h.progress(f"first call of {name}"), empty_cache(), xla.watch() as ran:
            started = time.perf_counter()
            way()
            seconds[name] = time.perf_counter() - started
        if name in (OPENXLA, LAZY, COMPILE):
            compiled[name] = ran.compiles
    case = f"{'x'.join(map(str, tokens.shape))} tokens"
    table = h.compare(
        ways, reference, tokens, baseline=EAGER, work=work, title=title, case=case, beside=LIKE_EAGER,
        first_calls=seconds or None, dtype=torch.float32,
    )  # fmt: skip
    if h.profile:
        return {}
    h.fact(f"programs of XLA that torch_xla compiled, {title} {case}", compiled)
    rows = {row.variant: row for row in table.rows}
    most = max(row.error for row in rows.values())
    worst = ", ".join(name for name, row in rows.items() if math.isclose(row.error, most, rel_tol=1e-3))
    h.fact(f"error over eager's, {title} {case}", {n: round(r.error * LIKE_EAGER, 2) for n, r in rows.items()})
    if h.timing:
        lesson(h, f"{title} {case}", ways, rows)
        h.say(f"furthest from float64: {worst}, at {most * LIKE_EAGER:.2f} times eager's own error")
    return rows


def lesson(h: Harness, what: str, ways: dict[str, Way], rows: dict) -> None:
    """What the host does, how many cores each takes, and when each first call is earned back."""
    busy = {name: cores_busy(way) for name, way in ways.items()}
    h.say("cores busy: " + ", ".join(f"{name} {share:.1f}" for name, share in busy.items()))
    free = {name: host_ms(way) for name, way in ways.items() if name not in (EAGER, INDUCTOR)}
    shown = ", ".join(f"{name} {ms:.2f} of {rows[name].ms:.2f}" for name, ms in free.items())
    h.say(f"ms until the host is free, of ms in all: {shown}; eager and Inductor return with the result")
    if noisy := [name for name, row in rows.items() if row.p80 > 3 * row.p20]:
        h.say(f"{', '.join(noisy)}: times within this run differ 3 times and more, as on cores with other work to do")
    for name, row in rows.items():
        if name != EAGER:
            # Eager as slow as it was in the rounds of this way, so that it agrees with the table's ratio.
            calls = break_even(row.first_call_s, row.ms, rows[EAGER].first_call_s, row.ms * row.speedup)
            pays = f"pays from {calls:,} calls on" if calls else "never pays: no call is faster than eager's"
            h.say(f"{name}: first call {row.first_call_s:.2f} s, then {row.speedup:.2f}x eager: {pays}")
    totals = {name: [seconds_of(row.first_call_s, row.ms, calls) for calls in CALLS] for name, row in rows.items()}
    h.say(f"{what}, seconds in all for this many calls, the first among them:")
    h.say(" " * 24 + "".join(f"{calls:>12,}" for calls in CALLS))
    for name, seconds in totals.items():
        h.say(f"{name:24}" + "".join(f"{each:>12,.1f}" for each in seconds))
    least = [min(totals, key=lambda name: totals[name][i]) for i in range(len(CALLS))]
    h.say("least: " + "; ".join(f"{name} for {calls:,}" for name, calls in zip(least, CALLS, strict=True)))


def front_ends(h: Harness, model: Transformer, tokens: torch.Tensor) -> None:
    """What torch_xla and JAX hand to the same compiler: the operations in their StableHLO."""
    import jax

    ids = jax.device_put(tokens.to(torch.int32).numpy(), jax.devices("cpu")[0])
    lowered = jax.jit(jax_forward(model.config)).lower(weights_for_jax(model), ids)
    there = copy.deepcopy(model).to(xla.device())
    recorded = there(tokens.to(xla.device()))
    texts = {"torch_xla": xla.stablehlo(recorded), "JAX": lowered.as_text()}
    found = {name: xla.operations(text) for name, text in texts.items()}
    told = {
        name: {"operations": sum(each.values()), "matrix products": each["dot_general"] + each["dot"]}
        for name, each in found.items()
    }
    h.fact("StableHLO of the model", told)
    h.say(
        "one compiler, two front ends: "
        + ", ".join(f"{name} hands it {each['operations']} operations" for name, each in told.items())
    )


def demo(h: Harness) -> None:
    config = h.pick(
        quick=Config(width=264, layers=1, heads=4, kv_heads=2, hidden=712, vocab=2056, max_tokens=128),
        full=Config(width=520, layers=2, heads=4, kv_heads=2, hidden=1400, vocab=8200, max_tokens=256),
    )
    sizes = h.pick(quick=((1, 32), (4, 64)), full=((1, 16), (4, 64), (8, 128)))
    torch.compiler.reset()
    wake(h)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not h.profile:
        h.fact("threads", {"torch, Inductor": torch.get_num_threads(), "XLA and JAX, one for each core": cores})
    if torch.get_num_threads() != cores:
        h.say("not the same number of threads for all of them: read the times with that in mind")
    if not have_jax():
        h.say(f"JAX is not installed, so its rows are missing: pip install {JAX_PACKAGE}")
    model = Transformer.random(config, h.device, torch.float32, h.seed)
    tables = []
    for batch, length in sizes:
        tokens = h.randint(config.vocab, batch, length)
        work = Work(flops=sum(p.count * p.flops for p in pieces(config, batch, length, 4)), dtype=torch.float32)
        torch.compiler.reset()
        with torch.no_grad():
            tables.append(table_of(h, "forward", forwards(model, tokens), model.float64, tokens, work))
    if have_jax() and not h.profile:
        with torch.no_grad():
            front_ends(h, model, tokens)
    if h.timing and not h.profile:
        for name in (INDUCTOR, OPENXLA, JAX):
            if name in tables[0]:
                seconds = ", ".join(f"{rows[name].first_call_s:.2f}" for rows in tables)
                h.say(f"{name}, first call in s for {', '.join(f'{b}x{t}' for b, t in sizes)} tokens: {seconds}")
    if h.full:
        model = copy.deepcopy(model).train().requires_grad_(True)
        exact = copy.deepcopy(model).double()
        exact.cos, exact.sin = exact.angles(config.max_tokens, h.device)
        tokens = h.randint(config.vocab, *sizes[1])
        torch.compiler.reset()
        table_of(
            h, "gradients", gradients(model, tokens),
            lambda tokens: torch.autograd.grad(exact(tokens).square().mean(), list(exact.parameters())), tokens, Work(),
        )  # fmt: skip
    torch.compiler.reset()
    xla.settle()


if __name__ == "__main__":
    run(demo)
