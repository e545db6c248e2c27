"""examples.common.transformer in JAX, with the very weights of a torch model."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import torch

from examples.common.transformer import Config, Transformer


def have_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


def weights_for_jax(model: Transformer) -> dict:
    """The model's own weights, and its tables of angles, as JAX's arrays on the CPU, by their torch names."""
    import jax

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: jax.device_put(x.detach().numpy(), jax.devices("cpu")[0]) for name, x in tensors.items()}


def ids_for_jax(tokens: torch.Tensor):
    import jax

    return jax.device_put(tokens.to(torch.int32).numpy(), jax.devices("cpu")[0])


def jax_way(model: Transformer, tokens: torch.Tensor) -> Callable:
    """A function that runs the forward pass on these tokens, ignoring its arguments; the result is a torch tensor."""
    import jax

    weights, ids, compiled = weights_for_jax(model), ids_for_jax(tokens), jax.jit(jax_forward(model.config))
    return lambda _: to_torch(compiled(weights, ids))


def warm_up_jax() -> None:
    if have_jax():
        import jax

        jax.jit(lambda x: jax.numpy.sin(x) + 1)(ids_for_jax(torch.ones(8)))


def jax_forward(config: Config) -> Callable:
    """The forward pass of examples.common.transformer as a function of JAX: (weights, tokens) -> logits."""
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


def to_torch(value) -> torch.Tensor:
    """Wait for JAX's result, and return it as a torch tensor that shares its memory."""
    return torch.from_dlpack(value.block_until_ready())
