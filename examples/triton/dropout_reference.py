"""The masks of dropout in torch: Philox as published, and float64 results with the kernel's mask or a library's own."""

from __future__ import annotations

import torch

WORD = 2**32 - 1


def dropped_of(p: float, per_call: int) -> tuple[int, int]:
    """p as a fraction of integers: how many of how many values of a random number drop the element."""
    values = 2**16 if per_call == 8 else 2**32
    return round(p * values), values


def philox(counter: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """The four numbers of Philox-4x32-10 for counters of four words, all in int64: the published algorithm in torch."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64-bit products; int64 wraps to the right bits
        c0, c1, c2, c3 = (b >> 32 & WORD) ^ c1 ^ k0, b & WORD, (a >> 32 & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return [c0, c1, c2, c3]


def keep_mask(n: int, p: float, seed: torch.Tensor, start: int = 0, per_call: int = 4) -> torch.Tensor:
    """Which of n elements stay."""
    dropped, values = dropped_of(p, per_call)
    calls = torch.arange(start // per_call, -(-(start + n) // per_call), device=seed.device)
    zero = torch.zeros_like(calls)
    numbers = philox([calls & WORD, calls >> 32, zero, zero], seed.item())
    if per_call == 8:
        numbers = [half for number in numbers for half in (number >> 16, number & 0xFFFF)]
    # An int32 orders the same bits with its sign bit flipped: numbers whose highest bit is set come first.
    return (torch.stack(numbers[:per_call], dim=1).reshape(-1)[:n] ^ values // 2) >= dropped


def masked(x: torch.Tensor, keep: torch.Tensor, p: float, per_call: int = 4) -> torch.Tensor:
    """x * keep / (1 - p) in float64, with p as the kernel has it: the fraction of integers that dropped_of makes."""
    dropped, values = dropped_of(p, per_call)
    return x.double() * keep.view(x.shape) * (values / (values - dropped) if dropped < values else 0.0)


def reference(x: torch.Tensor, p: float, seed: torch.Tensor, start: int = 0, per_call: int = 4) -> torch.Tensor:
    return masked(x, keep_mask(x.numel(), p, seed, start, per_call), p, per_call)


def same_mask(p: float, seed: torch.Tensor, per_call: int = 4):
    """The reference of a training step of dropout: one mask for x and for the gradient."""
    return lambda *inputs: tuple(reference(x, p, seed, per_call=per_call) for x in inputs)


def own_mask(fn, p: float):
    """Float64 reference of a library's dropout. A call on ones, in the same random state, shows the library's mask."""

    def on_ones(*inputs: torch.Tensor):
        out = fn(*map(torch.ones_like, inputs))
        return tuple(masked(x, (out[0] if isinstance(out, tuple) else out) != 0, p) for x in inputs)

    return on_ones
