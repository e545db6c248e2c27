"""compare, measured: gradients too, when a first call is earned back, and what JAX hands to XLA."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

from harness import Harness, Timing, Work

import torch
import torch_xla

from examples.common import xla
from examples.common.transformer import Transformer
from examples.xla.compare import (
    COMPILE,
    EAGER,
    INDUCTOR,
    JAX,
    LAZY,
    LIKE_EAGER,
    OPENXLA,
    another_program,
    sizes,
    start,
)  # fmt: skip
from examples.xla.compare_jax import have_jax, ids_for_jax, jax_forward, to_torch, weights_for_jax


def study(h: Harness) -> None:
    if h.profile:
        return
    config, shapes = sizes(h)
    torch.compiler.reset()
    model = Transformer.random(config, h.device, torch.float32, h.seed)
    tokens = h.randint(config.vocab, *shapes[0])
    if h.lesson and h.lesson[0].timed:
        first_calls(h)
    if have_jax():
        with torch.no_grad():
            front_ends(h, model, tokens)
    with_gradients(h, model, h.randint(config.vocab, *shapes[1]))


def break_even(first_s: float, ms: float, than_first_s: float, than_ms: float) -> int | None:
    """From how many calls on the one takes no longer, in all, than the other; None: never."""
    extra, saved = first_s - than_first_s, (than_ms - ms) / 1000
    if saved < 0:
        return None
    if extra <= 0:
        return 1
    return 1 + math.ceil(extra / saved) if saved else None


def first_calls(h: Harness) -> None:
    """When each first call is earned back."""
    for table in h.lesson:
        rows = {row.variant: row for row in table.rows}
        for name, row in rows.items():
            if name != EAGER:
                # Eager as slow as it was in the rounds of this way, so that it agrees with the table's ratio.
                calls = break_even(row.first_call_s, row.ms, rows[EAGER].first_call_s, row.ms * row.speedup)
                pays = f"pays from {calls:,} calls on" if calls else "never pays: no call is faster than eager's"
                h.say(
                    f"{table.case}, {name}: first call {row.first_call_s:.2f} s, then {row.speedup:.2f}x eager: {pays}"
                )


def gradients(model: Transformer, tokens: torch.Tensor) -> dict[str, Callable]:
    """The gradient of the mean square of the logits by each weight."""

    def of(model: Transformer, forward: Callable, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autograd.set_multithreading_enabled(False):  # see xla.watch: else programs vary by luck
            return torch.autograd.grad(forward(tokens).square().mean(), list(model.parameters()))

    there, moved = copy.deepcopy(model).to(xla.device()), tokens.to(xla.device())
    longer = another_program(model)
    inductor = torch.compile(model, fullgraph=True, dynamic=False)
    openxla = torch.compile(there, backend="openxla", fullgraph=True, dynamic=False)
    bounded = torch_xla.compile(lambda tokens: of(longer, longer, tokens), full_graph=True)
    ways = {
        EAGER: lambda tokens: of(model, model, tokens),
        INDUCTOR: lambda tokens: of(model, inductor, tokens),
        OPENXLA: xla.waited(lambda _: of(there, openxla, moved)),
        LAZY: xla.waited(lambda _: of(there, there, moved)),
        COMPILE: xla.waited(lambda _: bounded(moved)),
    }
    if have_jax():
        import jax

        forward, weights, names = jax_forward(model.config), weights_for_jax(model), dict(model.named_parameters())
        tables = {name: weights.pop(name) for name in ("cos", "sin")}
        compiled = jax.jit(jax.grad(lambda weights, tables, ids: (forward(weights | tables, ids) ** 2).mean()))
        ids = ids_for_jax(tokens)

        def call(_) -> tuple:
            found = compiled(weights, tables, ids)
            return to_torch(tuple(found[name] for name in names))

        ways[JAX] = call
    return ways


def with_gradients(h: Harness, model: Transformer, tokens: torch.Tensor) -> None:
    """The table of the lesson again, for a training step's gradients."""
    model = copy.deepcopy(model).train().requires_grad_(True)
    exact = copy.deepcopy(model).double()
    exact.cos, exact.sin = exact.angles(model.config.max_tokens, h.device)
    torch.compiler.reset()
    ways = gradients(model, tokens)
    seconds, programs = start(ways, tokens)
    h.fact("programs of XLA that torch_xla compiled, gradients", programs)
    h.compare(
        ways, lambda tokens: torch.autograd.grad(exact(tokens).square().mean(), list(exact.parameters())), tokens,
        baseline=EAGER, work=Work(), title="gradients", case=f"{'x'.join(map(str, tokens.shape))} tokens",
        max_error_ratio=LIKE_EAGER, timing=Timing(first_calls=seconds), dtype=torch.float32,
    )  # fmt: skip


def front_ends(h: Harness, model: Transformer, tokens: torch.Tensor) -> None:
    """What torch_xla and JAX hand to the same compiler: the operations in their StableHLO."""
    import jax

    lowered = jax.jit(jax_forward(model.config)).lower(weights_for_jax(model), ids_for_jax(tokens))
    there = copy.deepcopy(model).to(xla.device())
    recorded = there(tokens.to(xla.device()))
    texts = {"torch_xla": xla.stablehlo(recorded), "JAX": lowered.as_text()}
    found = {name: xla.operations(text) for name, text in texts.items()}
    counts = {
        name: {"operations": sum(each.values()), "matrix products": each["dot_general"] + each["dot"]}
        for name, each in found.items()
    }
    h.fact("StableHLO of the model", counts)
