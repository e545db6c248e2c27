"""Models with random weights for tests and the benchmark, each in a few lines: build(size) gives (model, inputs, loss).

Sizes are "small" (a test, also in the interpreter) and "large" (a GPU). Those of transformers, timm and torchvision are
here where these packages are installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)]
        self.net = nn.Sequential(*(layer for each in layers for layer in each), nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    """Rotary positions where `rotary`; causal where asked."""

    def __init__(self, width: int, heads: int, causal: bool, rotary: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.causal, self.rotary = heads, causal, rotary
        self.qkv, self.out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, half against half."""
    tokens, size = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angle = torch.arange(tokens, device=x.device)[:, None] * frequency
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(x.dtype), torch.cat([angle.sin()] * 2, -1).to(x.dtype)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class EncoderBlock(nn.Module):
    """Norm, attention, norm, MLP; `causal` makes it a decoder's."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, True, True, False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Tokens to logits; GPT-like with learned positions, or Llama-like."""

    def __init__(self, block: Callable, width: int, depth: int, vocabulary: int, tokens: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(tokens, width) if tokens else None
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self, width: int, heads: int, depth: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class ResidualBlock(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = nn.Identity() if width == out and stride == 1 else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x):
        y = self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = [width, width, 2 * width, 4 * width]
        self.blocks = nn.Sequential(*(ResidualBlock(a, b, 1 + (a != b)) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class UNet(nn.Module):
    """Two levels down and up, with group norms and skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.down = self.step(3, width), self.step(width, 2 * width)
        self.deep = self.step(2 * width, 2 * width)
        self.up, self.last = self.step(4 * width, width), self.step(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def step(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())

    def forward(self, x):
        a = self.first(x)
        b = self.down(F.avg_pool2d(a, 2))
        c = self.deep(F.avg_pool2d(b, 2))
        b = self.up(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        return self.head(self.last(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1)))


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
        pairs = torch.triu_indices(tables + 1, tables + 1, 1)
        self.register_buffer("a", pairs[0])
        self.register_buffer("b", pairs[1])
        self.top = nn.Sequential(nn.Linear(width + pairs.shape[1], 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))

    def forward(self, dense, categories):
        x = self.dense(dense)
        all_of = torch.stack([x, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = all_of @ all_of.transpose(1, 2)
        return torch.sigmoid(self.top(torch.cat([x, products[:, self.a, self.b]], 1)))


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(depth)))

    def forward(self, x):
        return self.blocks(x)


def tokens_of(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape)


def small_or_large(large: bool) -> dict[str, Callable[[], tuple[nn.Module, tuple]]]:
    """{name: function that makes (model, inputs)} of this repository's own."""
    w, n, t = (1024, 8, 512) if large else (32, 2, 8)
    heads, depth, vocabulary = (16, 4, 8192) if large else (2, 2, 64)
    image, patch, conv = (224, 16, 64) if large else (16, 4, 8)
    tokens, side, tables = (tokens_of(vocabulary, n, t),), image if large else 2 * image, 8 if large else 3
    return {
        "MLP": lambda: (MLP(w, depth), (torch.randn(n * t, w),)),
        "encoder": lambda: (Encoder(w, heads, depth), (torch.randn(n, t, w),)),
        "GPT": lambda: (Decoder(lambda: EncoderBlock(w, heads, True), w, depth, vocabulary, t), tokens),
        "Llama": lambda: (Decoder(lambda: LlamaBlock(w, heads), w, depth, vocabulary, None), tokens),
        "ViT": lambda: (ViT(w, heads, depth, image, patch), (torch.randn(4 * n, 3, image, image),)),
        "ResNet": lambda: (ResNet(conv), (torch.randn(4 * n, 3, side, side),)),
        "U-Net": lambda: (UNet(conv), (torch.randn(n, 3, image, image),)),
        "MoE": lambda: (MixtureOfExperts(w, tables), (torch.randn(n * t, w),)),
        "LSTM": lambda: (LSTM(w), (torch.randn(8 * n, 16 if large else 3, w),)),
        "recommender": lambda: (
            Recommender(tables, 1000, w // 8), (torch.randn(t * n, 13), tokens_of(1000, t * n, tables))),
    }  # fmt: skip


def of_libraries(large: bool) -> dict[str, Callable[[], tuple[nn.Module, tuple]]]:
    """Models that nobody here wrote, of the packages that are installed."""
    found: dict[str, Callable] = {}
    w, n, t, depth = (768, 8, 256, 4) if large else (32, 2, 8, 2)
    if find_spec("transformers"):
        import transformers as hf

        def text(config, cls):
            class Wrapped(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.model = cls(config)

                def forward(self, tokens):
                    return self.model(tokens, **({} if "Bert" in cls.__name__ else {"use_cache": False}))[0]

            return lambda: (Wrapped(), (tokens_of(96, n, t),))

        common = {"vocab_size": 96, "hidden_size": w, "num_hidden_layers": depth, "num_attention_heads": 4}
        common["intermediate_size"] = 2 * w
        none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        found["hf BERT"] = text(hf.BertConfig(**common, **none), hf.BertModel)
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        gpt = hf.GPT2Config(vocab_size=96, n_embd=w, n_layer=depth, n_head=4, **none)
        found["hf GPT-2"] = text(gpt, hf.GPT2LMHeadModel)
        found["hf Llama"] = text(hf.LlamaConfig(**common, num_key_value_heads=2), hf.LlamaForCausalLM)
    side = 224 if large else 64

    def images() -> tuple[torch.Tensor]:
        return (torch.randn(n, 3, side, side),)

    if find_spec("torchvision"):
        from torchvision.models import mobilenet_v3_small, resnet18

        found["tv ResNet-18"] = lambda: (resnet18(num_classes=10), images())
        found["tv MobileNet"] = lambda: (mobilenet_v3_small(num_classes=10, dropout=0.0), images())
    if find_spec("timm"):
        from timm.models import VisionTransformer

        sizes = {"embed_dim": w, "depth": depth, "num_heads": 4, "num_classes": 10}
        found["timm ViT"] = lambda: (VisionTransformer(side, 16, **sizes), images())
    return found
