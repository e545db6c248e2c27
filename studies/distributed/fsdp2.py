"""fsdp2: bytes that are gathered against theory, and what keeping weights until backward changes."""

from __future__ import annotations

from collections.abc import Iterable

from harness import Harness, Timing, Work

import torch

from compile_inspect import logs
from examples.common.collectives import traced
from examples.common.data_parallel import first_and_last_norm, reference
from examples.distributed.fsdp2 import BEFORE, Step, row_of, sizes


def part_of(parameters: Iterable[torch.Tensor], ranks: int) -> int:
    """The elements of a rank's part of the parameters: rows are padded to a multiple of the ranks and split evenly."""
    return sum(-(-len(each) // ranks) * (each.numel() // len(each)) for each in parameters)


def study(h: Harness) -> None:
    new, tokens = sizes(h)
    want = reference(new(), tokens, h.ranks, h.rank)
    kept = {"torch FSDP2, gathered twice": False, "torch FSDP2, kept until backward": True}
    steps = {name: Step(new(), h.ranks, h.rank, BEFORE, keep) for name, keep in kept.items()}
    twice, once = steps
    with logs():
        table = h.compare(
            steps, lambda _: want, tokens, baseline=twice, work=Work(), title="gathered again for backward",
            case=f"{len(tokens) // h.ranks}x{tokens.shape[1] - 1} tokens a rank", timing=Timing(end_to_end=True),
            max_error_ratio=2.0, dtype=torch.float32,
        )  # fmt: skip
        if h.profile:
            return
        rows = {name: row_of(step, tokens) for name, step in steps.items()}
        sent = {name: traced(step, tokens).sent for name, step in steps.items()}
    gathered = 2 if tokens.is_cuda else 4  # bytes of an element: the policy's on a GPU
    model = new()
    whole, blocks = (part_of(each.parameters(), h.ranks) for each in (model, model.body.blocks))
    norms = 4 * part_of((norm.weight for norm in first_and_last_norm(model)), h.ranks)  # gradients that Step looks at
    for name, keep in kept.items():
        theory = gathered * (whole + (0 if keep else blocks))
        rows[name]["gathers by theory"] = f"{theory * (h.ranks - 1) / 1e6:.1f} MB"  # in a ring each part is sent on
        found = sum(total for kind, (_, total) in sent[name].items() if "gather" in kind)
        if h.ranks > 1 and not 0 <= found - theory <= norms:
            raise AssertionError(f"{name}: a rank gave {found} bytes to be gathered, {theory} by theory")
    h.table("what a rank sends, by what is gathered again", rows)
    h.answer(lambda: f"Kept until backward: {table.over(twice, once):.2f}x gathered twice.")
