"""The model that the torch.compile topic asks about: a decoder-only transformer of the Llama family.

Eager is given its best: one projection for queries, keys and values, one for gate and up, torch's fused RMSNorm and
scaled_dot_product_attention with grouped heads. What the compiler gains over it is then the compiler's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from torch import nn

ROPE_BASE = 500_000.0


@dataclass(frozen=True)
class Config:
    """Sizes of a transformer; `hidden` is the width inside its gated MLP.

    `width` must be `heads` times an even number, and `heads` a multiple of `kv_heads`. Raises ValueError otherwise, and
    for a size below 1.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        if min(astuple(self)) < 1:
            raise ValueError(f"{self}: every size must be at least 1")
        if self.width % self.heads or (self.width // self.heads) % 2 or self.heads % self.kv_heads:
            raise ValueError(
                f"Config: width {self.width}, {self.heads} heads, {self.kv_heads} kv_heads; "
                "a head's width, width / heads, must be an even integer, and heads a multiple of kv_heads"
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def block_parameters(self) -> int:
        projections = self.width * (2 * self.width + 2 * self.kv_width) + 3 * self.width * self.hidden
        return projections + 2 * self.width

    @property
    def parameters(self) -> int:
        """All of them; the embedding is also the output head."""
        return self.layers * self.block_parameters + self.width + self.vocab * self.width


TINY = Config(width=256, layers=4, heads=4, kv_heads=2, hidden=704, vocab=2048)  # 3.5 million
SMALL = Config(width=768, layers=6, heads=12, kv_heads=4, hidden=2048, vocab=8192)  # 44 million
ONE_BILLION = Config(width=2048, layers=16, heads=32, kv_heads=8, hidden=8192, vocab=128256)  # 1.24: Llama 3.2 1B
WIDE = Config(width=4096, layers=4, heads=32, kv_heads=8, hidden=14336, vocab=32000)  # 1.00: 4 blocks of Llama 3 8B
FORTY_BILLION = Config(width=8192, layers=60, heads=64, kv_heads=8, hidden=20480, vocab=32000)  # 39.5


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        self.attention_norm, self.mlp_norm = nn.RMSNorm(c.width, eps=1e-5), nn.RMSNorm(c.width, eps=1e-5)
        self.qkv = nn.Linear(c.width, c.width + 2 * c.kv_width, bias=False)
        self.attention_out = nn.Linear(c.width, c.width, bias=False)
        self.gate_up = nn.Linear(c.width, 2 * c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c, (batch, tokens, _) = self.config, x.shape
        heads = self.qkv(x).view(batch, tokens, c.heads + 2 * c.kv_heads, c.head_width).transpose(1, 2)
        turned, v = heads.split([c.heads + c.kv_heads, c.kv_heads], dim=1)
        q, k = rotate(turned, cos, sin).split([c.heads, c.kv_heads], dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.attention_out(out.transpose(1, 2).reshape(batch, tokens, c.width))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: pairs (i, i + half) of each head turned by the angle of their position."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Transformer(nn.Module):
    """tokens [batch, tokens] int64 -> the logits of each row's last token, [batch, vocab] in the model's dtype.

    Raises ValueError for rows of more than config.max_tokens tokens.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        # A table, as every serious model has one. Computed in forward, Inductor would fuse its pow, sin and cos into
        # the rotation of each layer, and compute them again for every head.
        for name, values in zip(("cos", "sin"), self.angles(config.max_tokens), strict=True):
            self.register_buffer(name, values.to(self.embedding.weight.dtype), persistent=False)

    @classmethod
    def random(cls, config: Config, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Transformer:
        """A model for inference with random weights, made where they live: nothing passes through the host."""
        generator = torch.Generator(device).manual_seed(seed)
        with torch.device("meta"):
            model = cls(config).to(dtype)
        model = model.to_empty(device=device).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # of a norm
                parameter.fill_(1)
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
        for buffer, values in zip((model.cos, model.sin), model.angles(config.max_tokens, device), strict=True):
            buffer.copy_(values)
        return model

    def angles(self, tokens: int, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the rotary embedding in float64, each [tokens, head_width / 2]."""
        half = self.config.head_width // 2
        frequency = ROPE_BASE ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        angle = torch.arange(tokens, device=device, dtype=torch.float64)[:, None] * frequency
        return angle.cos(), angle.sin()

    def forward(self, tokens: torch.Tensor, run_block: Callable | None = None) -> torch.Tensor:
        """The logits; `run_block(block, x, cos, sin)` stands in for calling each block, as one compiled function."""
        if tokens.shape[1] > self.config.max_tokens:
            raise ValueError(
                f"Transformer: {tokens.shape[1]} tokens in a row; max_tokens is {self.config.max_tokens}: "
                "pass fewer, or build the model with a larger Config.max_tokens"
            )
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = run_block(block, x, cos, sin) if run_block else block(x, cos, sin)
        return F.linear(self.norm(x[:, -1]), self.embedding.weight)

    def float64(self, tokens: torch.Tensor) -> torch.Tensor:
        """The same computation in float64 with the very weights of this model, one block converted at a time."""
        x = self.embedding(tokens).double()
        cos, sin = self.angles(tokens.shape[1], x.device)
        for block in self.blocks:
            x = copy.deepcopy(block).double()(x, cos, sin)
        last = copy.deepcopy(self.norm).double()(x[:, -1])
        return torch.cat([F.linear(last, rows.double()) for rows in self.embedding.weight.split(16384)], dim=-1)


@dataclass(frozen=True)
class Piece:
    """A step of the forward pass, done `count` times: the bytes and FLOPs of one of them."""

    name: str
    count: int
    bytes: int
    flops: int


def pieces(c: Config, batch: int, tokens: int, itemsize: int) -> list[Piece]:
    """The least work of Transformer.forward, by step: a step reads its weights and inputs once, and writes its result.

    Steps are what fusion leaves: the matrix products, attention, and between them one pass over the activations. So a
    residual is added in the pass that normalizes the sum, and the last one only for the tokens whose logits are asked
    for. Only matrix products that fuse such a pass as their epilogue move less, as Inductor's templates sometimes do
    (mode="max-autotune"). Not counted: the weights of norms and the rotary tables, which are small.
    FLOPs count a multiply and an add as two; causal attention counts half of its square.
    """
    rows = batch * tokens

    def gemm(name: str, count: int, m: int, k: int, n: int) -> Piece:
        return Piece(name, count, (m * k + k * n + m * n) * itemsize, 2 * m * k * n)

    def passes(name: str, count: int, elements: int) -> Piece:
        return Piece(name, count, elements * itemsize, 0)

    qkv = c.width + 2 * c.kv_width
    return [
        passes("embedding, norm", 1, 3 * rows * c.width),
        gemm("qkv", c.layers, rows, c.width, qkv),
        passes("rotate", c.layers, 2 * rows * (c.width + c.kv_width)),
        Piece(
            "attention", c.layers, rows * (qkv + c.width) * itemsize,
            2 * batch * tokens * (tokens + 1) * c.width,
        ),
        gemm("attention_out", c.layers, rows, c.width, c.width),
        passes("residual, norm", 2 * c.layers - 1, 4 * rows * c.width),
        gemm("gate_up", c.layers, rows, c.width, 2 * c.hidden),
        passes("silu", c.layers, 3 * rows * c.hidden),
        gemm("down", c.layers, rows, c.hidden, c.width),
        passes("last residual, norm", 1, 3 * batch * c.width),
        gemm("head", 1, batch, c.width, c.vocab),
    ]  # fmt: skip


def steps(config: Config, batch: int, tokens: int, itemsize: int) -> list[tuple[int, int]]:
    """(bytes, FLOPs) of each step of the forward pass: what is left when everything between the products is fused."""
    return [(p.bytes, p.flops) for p in pieces(config, batch, tokens, itemsize) for _ in range(p.count)]
