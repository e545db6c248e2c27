"""Study of dropout: how many elements a call of Philox should serve, and how random the masks are.

1. What limits the kernel: the multiplies of an element, counted in the PTX, beside the share of a copy's speed, with
   one, four and eight elements to a call (one to a call is what `tl.rand` makes).
2. What a mask of bytes would cost by its traffic alone, beside what torch and torch.compile take.
3. The masks: the share of kept elements on the whole and in parts, the correlation of neighbouring seeds, and the bytes
   that autograd keeps for backward.
"""

from __future__ import annotations

import functools
import itertools

from harness import Harness, Work

import torch
import torch.nn.functional as F

from examples.triton.dropout import BLOCK, PER_CALL, dropout, own_mask, reference, step

P = 0.1
SIGMAS = 5  # standard deviations: where chance hardly comes


def deviation(ones: torch.Tensor, p: float, chunks: int = 64) -> float:
    """How far dropout(ones) is from keeping 1 - p of the elements, in standard deviations: its worst chunk, or all.

    Raises AssertionError beyond SIGMAS.
    """
    kept = (ones.view(chunks, -1) != 0).sum(dim=1).double()
    kept = torch.cat([kept / (ones.numel() / chunks), kept.sum().view(1) / ones.numel()])
    sizes = torch.tensor([ones.numel() / chunks] * chunks + [ones.numel()], device=ones.device, dtype=torch.float64)
    worst = ((kept - (1 - p)).abs() / (p * (1 - p) / sizes).sqrt()).max().item()
    if worst > SIGMAS:
        raise AssertionError(f"keeps a share {worst:.1f} standard deviations away from {1 - p}")
    return worst


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation of two masks, in units of what chance makes of independent ones (about 1)."""
    a, b = ((mask != 0).double() for mask in (a, b))
    a, b = a - a.mean(), b - b.mean()
    return ((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()).item() * a.numel() ** 0.5


def saved_bytes(fn, x: torch.Tensor) -> int:
    """Bytes that autograd keeps from fn(x) for backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.nbytes), x)[1], lambda x: x):
        fn(x.detach().requires_grad_())
    return sum(saved)


def mask_facts(h: Harness, calls: dict, n: int) -> None:
    ones = torch.ones(n, dtype=h.half, device=h.device)
    h.fact("kept elements, standard deviations off", {v: round(deviation(f(ones), P), 2) for v, f in calls.items()})
    masks = [dropout(ones, P, torch.tensor([s], device=h.device)) for s in (1, 2, 3)]
    worst = max(abs(correlation(a, b)) for a, b in itertools.combinations(masks, 2))
    if worst > SIGMAS:
        raise AssertionError(f"masks of neighbouring seeds correlate by {worst:.1f} standard deviations")
    h.fact("correlation of neighbouring seeds, standard deviations", round(worst, 2))
    h.fact(f"bytes kept for the backward of {n} elements", {v: saved_bytes(f, ones) for v, f in calls.items()})


def study(h: Harness) -> None:
    seed, counts = torch.tensor([42], device=h.device), {}
    for k in PER_CALL:
        meta = h.meta(1 << 20), P, h.meta(1, dtype=torch.int64)
        for kernel in h.codegen(dropout, *meta, find={90: ("mul.hi",)}, per_call=k):
            counts[f"triton {k} per call"] = round(kernel.found["mul.hi"] / (BLOCK / (32 * kernel.warps)), 1)
    h.fact("mul.hi an element, sm_90", counts)

    def wants(*inputs, per_call=4):
        return tuple(reference(x, P, seed, per_call=per_call) for x in inputs)

    n = h.fit(h.pick(interpreted=1 << 15, quick=1 << 26, full=1 << 28), bytes_each=64)
    x, g = h.randn(n, dtype=h.half), h.randn(n, dtype=h.half)
    ours = {f"triton {k} per call": functools.partial(dropout, p=P, seed=seed, per_call=k) for k in PER_CALL}
    own = {f"triton {k} per call": functools.partial(wants, per_call=k) for k in PER_CALL}
    for title, wrap, inputs in (("forward", lambda fn: fn, (x,)), ("forward + backward", step, (x, g))):
        calls = {"torch": lambda x: F.dropout(x, P), "torch.compile": h.compiled(lambda x: F.dropout(x, P)), **ours}
        variants = {name: wrap(fn) for name, fn in calls.items()}
        table = h.compare(
            variants, wants, *inputs, baseline="torch", title=title, work=Work(bytes=2 * len(inputs) * x.nbytes),
            references=own | {name: own_mask(variants[name], P) for name in ("torch", "torch.compile")}, terms=0,
        )  # fmt: skip
        if not table.timed:
            continue
        shares = ", ".join(f"{name} {table[name].of_ceiling:.0%} ({count} mul.hi)" for name, count in counts.items())
        h.say(
            f"{title}: a mask of bytes makes {1 + 1 / (2 * x.element_size()):.2f}x the traffic; four to a call is "
            f"{table.over('torch', 'triton 4 per call'):.2f}x torch, "
            f"{table.over('torch.compile', 'triton 4 per call'):.2f}x torch.compile; share of a copy's speed: {shares}"
        )
    if not h.profile:
        if h.interpreted:  # the library is compiled only where it is also timed
            del calls["torch.compile"]
        mask_facts(h, calls, min(n, 1 << 26))
