"""Models with random weights for tests and the benchmark: models(large) makes each, small enough for the interpreter or
of a size to be timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Norm, attention, norm, MLP: an encoder's, a decoder's where it is `causal`; Llama's has rotary positions, RMSNorm
    and SwiGLU."""

    def __init__(self, width: int, heads: int, causal: bool = False, llama: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.llama = heads, causal or llama, llama
        self.norms = nn.ModuleList((nn.RMSNorm if llama else nn.LayerNorm)(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, not llama), nn.Linear(width, width, not llama)
        inner = 3 * width if llama else 4 * width
        mlp = (nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.mlp = SwiGLU(width, inner) if llama else nn.Sequential(*mlp)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.llama:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, half against half."""
    tokens, size = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angle = torch.arange(tokens, device=x.device)[:, None] * frequency
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(x.dtype), torch.cat([angle.sin()] * 2, -1).to(x.dtype)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Tokens(nn.Module):
    """Embeddings of tokens and of their positions."""

    def __init__(self, vocabulary: int, width: int, tokens: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)

    def forward(self, tokens):
        return self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Patches(nn.Module):
    """What a ViT's blocks get of an image: a token for the class, then the patches, and their positions."""

    def __init__(self, width: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Residual(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        stride = 1 + (out != width)
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.short = nn.Identity() if width == out else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x))


def resnet(width: int) -> nn.Module:
    stem = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    blocks = Residual(width, width), Residual(width, 2 * width), Residual(2 * width, 4 * width)
    return nn.Sequential(*stem, *blocks, Apply(lambda x: x.mean((2, 3))), nn.Linear(4 * width, 10))


class UNet(nn.Module):
    """Two levels down and up, with group norms and skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [(3, width), (width, 2 * width), (2 * width, 2 * width), (4 * width, width), (2 * width, width)]
        self.steps = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU()) for a, b in sizes
        )
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        first, down, deep, up, last = self.steps
        a = first(x)
        b = down(F.avg_pool2d(a, 2))
        c = deep(F.avg_pool2d(b, 2))
        b = up(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        return self.head(last(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1)))


class MixtureOfExperts(nn.Module):
    """Every expert sees every token, weighted by the two largest gates: static shapes."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x):
        y = self.norm(x)
        gates = self.gate(y).softmax(-1)
        kept, _ = gates.topk(2, -1)
        gates = torch.where(gates >= kept[..., 1:], gates, 0.0)
        gates = gates / gates.sum(-1, keepdim=True)
        hidden = F.silu(torch.einsum("nd,edh->enh", y, self.up))
        return x + (torch.einsum("enh,ehd->end", hidden, self.down) * gates.t().unsqueeze(-1)).sum(0)


class LSTM(nn.Module):
    """Unrolled: a cell for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.x, self.h, self.head = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width), nn.Linear(width, 10)

    def forward(self, x):
        hidden = cell = x.new_zeros(x.shape[0], x.shape[2])
        for step in x.unbind(1):
            i, f, g, o = (self.x(step) + self.h(hidden)).chunk(4, 1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
        return self.head(hidden)


class Recommender(nn.Module):
    """Embeddings of categories, their pairwise products, and an MLP: DLRM in small."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, width), nn.ReLU())
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1))
        self.top = nn.Sequential(nn.Linear(width + self.pairs.shape[1], 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))

    def forward(self, dense, categories):
        x = self.dense(dense)
        all_of = torch.stack([x, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = all_of @ all_of.transpose(1, 2)
        return torch.sigmoid(self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1)))


def models(large: bool) -> dict[str, Callable[[], tuple[nn.Module, tuple]]]:
    """{name: function that makes (model, inputs)}."""
    w, n, t = (1024, 8, 512) if large else (32, 2, 8)
    heads, depth, vocabulary = (16, 4, 8192) if large else (2, 2, 64)
    image, patch, conv = (224, 16, 64) if large else (16, 4, 8)
    side, tables = image if large else 2 * image, 8 if large else 3

    def blocks(out: int, bias: bool = True, pool=(), **kind) -> list[nn.Module]:
        return [*(Block(w, heads, **kind) for _ in range(depth)), nn.LayerNorm(w), *pool, nn.Linear(w, out, bias)]

    def ids(size: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, size, shape)

    return {
        "MLP": lambda: (nn.Sequential(*(layer for _ in range(depth) for layer in (
            nn.Linear(w, w), nn.LayerNorm(w), nn.GELU())), nn.Linear(w, 10)), (torch.randn(n * t, w),)),
        "encoder": lambda: (nn.Sequential(*blocks(1)[:depth]), (torch.randn(n, t, w),)),
        "GPT": lambda: (nn.Sequential(Tokens(vocabulary, w, t), *blocks(vocabulary, False, causal=True)),
                        (ids(vocabulary, n, t),)),
        "Llama": lambda: (nn.Sequential(nn.Embedding(vocabulary, w), *blocks(vocabulary, False, llama=True)),
                          (ids(vocabulary, n, t),)),
        "ViT": lambda: (nn.Sequential(Patches(w, image, patch), *blocks(10, pool=[Apply(lambda x: x[:, 0])])),
                        (torch.randn(4 * n, 3, image, image),)),
        "ResNet": lambda: (resnet(conv), (torch.randn(4 * n, 3, side, side),)),
        "U-Net": lambda: (UNet(conv), (torch.randn(n, 3, image, image),)),
        "MoE": lambda: (MixtureOfExperts(w, tables), (torch.randn(n * t, w),)),
        "LSTM": lambda: (LSTM(w), (torch.randn(8 * n, 16 if large else 3, w),)),
        "recommender": lambda: (Recommender(tables, 1000, w // 8), (torch.randn(t * n, 13), ids(1000, t * n, tables))),
    }  # fmt: skip
