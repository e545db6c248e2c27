"""The models that are shown when none is named: small, so that every phase runs on a CPU, and one of them broken."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, TOKENS, VOCABULARY = 128, 4, 64, 512


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Two blocks over 64 tokens. Its temperature is read with .item(), which breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.05)  # also the head: at a larger scale softmax only selects
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.register_buffer("temperature", torch.tensor(0.7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return torch.softmax(logits / self.temperature.item(), dim=-1)


def decoder() -> tuple[Callable, tuple]:
    return Decoder(), (torch.randint(0, VOCABULARY, (4, TOKENS)),)


def mlp() -> tuple[Callable, tuple]:
    """An MLP with a LayerNorm and a softmax: one graph."""
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10), nn.Softmax(-1))
    return model, (torch.randn(32, 64),)


def pointwise() -> tuple[Callable, tuple]:
    """Three operations that fuse into one kernel."""

    def sin_mul_add(x, y):
        return torch.sin(x) * y + x

    return sin_mul_add, (torch.randn(1024, 1024), torch.randn(1024, 1024))


def planted() -> tuple[Callable, tuple]:
    """An MLP whose ReLU Inductor gets wrong, by a fault of torch's own for tests: for the phase triage."""
    import torch._inductor.config as config

    config.cpp.inject_relu_bug_TESTING_ONLY = config.triton.inject_relu_bug_TESTING_ONLY = "accuracy"
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 8)), (torch.randn(16, 32),)


BUNDLED: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    make.__name__: make for make in (decoder, mlp, pointwise, planted)
}
