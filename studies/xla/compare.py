"""compare, measured: what torch_xla and JAX hand to the same compiler."""

from __future__ import annotations

import copy

from harness import Harness

import torch

from examples.common import xla
from examples.common.transformer import Transformer
from examples.xla.compare import sizes
from examples.xla.compare_jax import have_jax, ids_for_jax, jax_forward, weights_for_jax


@torch.no_grad()
def study(h: Harness) -> None:
    """The operations in the StableHLO of each front end."""
    if h.profile or not have_jax():
        return
    import jax

    config, shapes = sizes(h)
    model, tokens = Transformer.random(config, h.device, torch.float32, h.seed), h.randint(config.vocab, *shapes[0])
    recorded = copy.deepcopy(model).to(xla.device())(tokens.to(xla.device()))
    lowered = jax.jit(jax_forward(config)).lower(weights_for_jax(model), ids_for_jax(tokens))
    counts = {}
    for name, text in {"torch_xla": xla.stablehlo(recorded), "JAX": lowered.as_text()}.items():
        found = xla.operations(text)
        counts[name] = {"operations": found.total(), "matrix products": found["dot_general"] + found["dot"]}
    h.fact("StableHLO of the model", counts)
