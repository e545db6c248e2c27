"""Models with random weights for tests and the benchmark: models(large) makes each, small enough for the interpreter or
large enough to be timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """What `function(model, *inputs)` computes with these parts: modules, parameters, numbers."""

    def __init__(self, function: Callable, **parts) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


# ---------------------------------------------------------------------------------------------- transformers
def block(width: int, heads: int, causal: bool = False, llama: bool = False) -> nn.Module:
    """Norm, attention, norm, MLP: an encoder's, a decoder's where it is `causal`; Llama's has rotary positions, RMSNorm
    and SwiGLU."""
    inner, norm = (3 if llama else 4) * width, nn.RMSNorm if llama else nn.LayerNorm
    gelu = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
    return Model(
        attend_and_feed, heads=heads, causal=causal or llama, llama=llama, norm_1=norm(width), norm_2=norm(width),
        qkv=nn.Linear(width, 3 * width, not llama), out=nn.Linear(width, width, not llama),
        mlp=Model(swiglu, gate=nn.Linear(width, inner, False), up=nn.Linear(width, inner, False),
                  down=nn.Linear(inner, width, False)) if llama else gelu,
    )  # fmt: skip


def attend_and_feed(m, x):
    q, k, v = m.qkv(m.norm_1(x)).unflatten(-1, (3, m.heads, -1)).permute(2, 0, 3, 1, 4)
    if m.llama:
        q, k = rotate(q), rotate(k)
    x = x + m.out(F.scaled_dot_product_attention(q, k, v, is_causal=m.causal).transpose(1, 2).flatten(2))
    return x + m.mlp(m.norm_2(x))


def swiglu(m, x):
    return m.down(F.silu(m.gate(x)) * m.up(x))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, half against half."""
    tokens, size = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angle = torch.arange(tokens, device=x.device)[:, None] * frequency
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(x.dtype), torch.cat([angle.sin()] * 2, -1).to(x.dtype)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def embed(m, tokens):
    return m.embedding(tokens) + m.positions(torch.arange(tokens.shape[1], device=tokens.device))


def patches_and_class(m, images):
    x = m.patches(images).flatten(2).transpose(1, 2)
    return torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1) + m.positions


# ---------------------------------------------------------------------------------------------- convolutions
def residual(width: int, out: int) -> nn.Module:
    stride = 1 + (out != width)
    body = nn.Sequential(
        nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
        nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
    )  # fmt: skip
    short = nn.Identity() if width == out else nn.Conv2d(width, out, 1, stride, bias=False)
    return Model(lambda m, x: F.relu(m.body(x) + m.short(x)), body=body, short=short)


def resnet(width: int) -> nn.Module:
    stem = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    blocks = residual(width, width), residual(width, 2 * width), residual(2 * width, 4 * width)
    return nn.Sequential(*stem, *blocks, Model(lambda m, x: x.mean((2, 3))), nn.Linear(4 * width, 10))


def unet(width: int) -> nn.Module:
    sizes = [(3, width), (width, 2 * width), (2 * width, 2 * width), (4 * width, width), (2 * width, width)]
    steps = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU()) for a, b in sizes]
    return Model(down_and_up, steps=nn.ModuleList(steps), head=nn.Conv2d(width, 3, 1))


def down_and_up(m, x):
    """Two levels down and up, with skips."""
    first, down, deep, up, last = m.steps
    a = first(x)
    b = down(F.avg_pool2d(a, 2))
    c = deep(F.avg_pool2d(b, 2))
    b = up(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
    return m.head(last(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1)))


# ---------------------------------------------------------------------------------------------- others
def mixture_of_experts(m, x):
    """Every expert sees every token, weighted by the two largest gates: static shapes."""
    y = m.norm(x)
    gates = m.gate(y).softmax(-1)
    kept, _ = gates.topk(2, -1)
    gates = torch.where(gates >= kept[..., 1:], gates, 0.0)
    gates = gates / gates.sum(-1, keepdim=True)
    hidden = F.silu(torch.einsum("nd,edh->enh", y, m.up))
    return x + (torch.einsum("enh,ehd->end", hidden, m.down) * gates.t().unsqueeze(-1)).sum(0)


def lstm(m, x):
    """Unrolled: a cell for each token."""
    hidden = cell = x.new_zeros(x.shape[0], x.shape[2])
    for step in x.unbind(1):
        i, f, g, o = (m.x(step) + m.h(hidden)).chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
    return m.head(hidden)


def recommender(tables: int, rows: int, width: int) -> nn.Module:
    """Embeddings of categories, their pairwise products, and an MLP: DLRM in small."""
    pairs = torch.triu_indices(tables + 1, tables + 1, 1)
    return Model(
        products, tables=nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables)), pairs=nn.Buffer(pairs),
        dense=nn.Sequential(nn.Linear(13, width), nn.ReLU()),
        top=nn.Sequential(nn.Linear(width + pairs.shape[1], 4 * width), nn.ReLU(), nn.Linear(4 * width, 1)),
    )  # fmt: skip


def products(m, dense, categories):
    x = m.dense(dense)
    vectors = torch.stack([x, *(table(categories[:, i]) for i, table in enumerate(m.tables))], 1)
    products = vectors @ vectors.transpose(1, 2)
    return torch.sigmoid(m.top(torch.cat([x, products[:, m.pairs[0], m.pairs[1]]], 1)))


def models(large: bool) -> dict[str, Callable[[], tuple[nn.Module, tuple]]]:
    """{name: function that makes (model, inputs)}."""
    w, n, t = (1024, 8, 512) if large else (32, 2, 8)
    heads, depth, vocabulary = (16, 4, 8192) if large else (2, 2, 64)
    image, patch, conv = (224, 16, 64) if large else (16, 4, 8)
    side, tables = image if large else 2 * image, 8 if large else 3

    def blocks(**kind) -> list[nn.Module]:
        return [block(w, heads, **kind) for _ in range(depth)]

    def scaled(*shape: int, by: float) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape) * by)

    def ids(size: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, size, shape)

    return {
        "MLP": lambda: (nn.Sequential(*(layer for _ in range(depth) for layer in (
            nn.Linear(w, w), nn.LayerNorm(w), nn.GELU())), nn.Linear(w, 10)), (torch.randn(n * t, w),)),
        "encoder": lambda: (nn.Sequential(*blocks()), (torch.randn(n, t, w),)),
        "GPT": lambda: (nn.Sequential(
            Model(embed, embedding=nn.Embedding(vocabulary, w), positions=nn.Embedding(t, w)), *blocks(causal=True),
            nn.LayerNorm(w), nn.Linear(w, vocabulary, False)), (ids(vocabulary, n, t),)),
        "Llama": lambda: (nn.Sequential(
            nn.Embedding(vocabulary, w), *blocks(llama=True), nn.LayerNorm(w), nn.Linear(w, vocabulary, False)),
            (ids(vocabulary, n, t),)),
        "ViT": lambda: (nn.Sequential(
            Model(patches_and_class, patches=nn.Conv2d(3, w, patch, patch), token=scaled(1, 1, w, by=0.02),
                  positions=scaled(1, (image // patch) ** 2 + 1, w, by=0.02)), *blocks(),
            nn.LayerNorm(w), Model(lambda m, x: x[:, 0]), nn.Linear(w, 10)), (torch.randn(4 * n, 3, image, image),)),
        "ResNet": lambda: (resnet(conv), (torch.randn(4 * n, 3, side, side),)),
        "U-Net": lambda: (unet(conv), (torch.randn(n, 3, image, image),)),
        "MoE": lambda: (Model(
            mixture_of_experts, norm=nn.RMSNorm(w), gate=nn.Linear(w, tables, bias=False),
            up=scaled(tables, w, 2 * w, by=w**-0.5), down=scaled(tables, 2 * w, w, by=(2 * w) ** -0.5)),
            (torch.randn(n * t, w),)),
        "LSTM": lambda: (Model(lstm, x=nn.Linear(w, 4 * w), h=nn.Linear(w, 4 * w), head=nn.Linear(w, 10)),
                         (torch.randn(8 * n, 16 if large else 3, w),)),
        "recommender": lambda: (recommender(tables, 1000, w // 8), (torch.randn(t * n, 13), ids(1000, t * n, tables))),
    }  # fmt: skip
