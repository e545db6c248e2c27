"""Study of dropout: how many elements a call of Philox should serve.

1. What limits the kernel: the multiplies per element, counted in the PTX, beside the share of a copy's speed, with one,
   four and eight elements to a call (one to a call is what `tl.rand` does).
2. What a mask of bytes would cost by its traffic alone, beside what torch and torch.compile take.
3. The bytes that autograd keeps for backward.
"""

from __future__ import annotations

import functools

from harness import Harness, Work

import torch
import torch.nn.functional as F

from examples.common.training import forward_backward
from examples.triton.dropout import BLOCK, PER_CALL, dropout
from examples.triton.dropout_reference import own_mask, same_mask

P = 0.1


def saved_bytes(fn, x: torch.Tensor) -> int:
    """Bytes that autograd keeps from fn(x) for backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.nbytes), x)[1], lambda x: x):
        fn(x.detach().requires_grad_())
    return sum(saved)


def study(h: Harness) -> None:
    seed, counts, meta = torch.tensor([42], device=h.device), {}, (h.meta(1 << 20), P, h.meta(1, dtype=torch.int64))
    for k in PER_CALL:
        for kernel in h.codegen(dropout, *meta, find={90: ("mul.hi",)}, per_call=k):
            counts[f"triton {k} per call"] = round(kernel.found["mul.hi"] / (BLOCK / (32 * kernel.warps)), 1)
    h.fact("mul.hi an element, sm_90", counts)

    n = h.fit(h.pick(interpreted=1 << 15, quick=1 << 26, full=1 << 28), bytes_each=64)
    x, g = h.randn(n, dtype=h.half), h.randn(n, dtype=h.half)
    ours = {f"triton {k} per call": functools.partial(dropout, p=P, seed=seed, per_call=k) for k in PER_CALL}
    own = {f"triton {k} per call": same_mask(P, seed, per_call=k) for k in PER_CALL}
    if not h.profile:
        kept = {"torch": lambda x: F.dropout(x, P), "triton": ours["triton 4 per call"]}
        h.fact(f"bytes kept for the backward of {n} elements", {name: saved_bytes(fn, x) for name, fn in kept.items()})
    for title, wrap, inputs in (("forward", lambda fn: fn, (x,)), ("forward + backward", forward_backward, (x, g))):
        calls = {"torch": lambda x: F.dropout(x, P), "torch.compile": h.compiled(lambda x: F.dropout(x, P)), **ours}
        variants = {name: wrap(fn) for name, fn in calls.items()}
        table = h.compare(
            variants, same_mask(P, seed), *inputs, baseline="torch", title=title,
            work=Work(bytes=2 * len(inputs) * x.nbytes),
            references=own | {name: own_mask(variants[name], P) for name in ("torch", "torch.compile")}, terms=0,
        )  # fmt: skip
        if table.timed:
            shares = ", ".join(
                f"{name} {table[name].of_ceiling:.0%} ({count} mul.hi)" for name, count in counts.items()
            )
            h.say(
                f"{title}: a mask of bytes makes {1 + 1 / (2 * x.element_size()):.2f}x the traffic; four to a call is "
                f"{table.over('torch', 'triton 4 per call'):.2f}x torch, "
                f"{table.over('torch.compile', 'triton 4 per call'):.2f}x torch.compile; share of a copy's speed: "
                f"{shares}"
            )
