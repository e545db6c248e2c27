"""An operator of its own for code that reads its data: isotonic regression, with its fake kernel and its gradient.

Isotonic regression (the nondecreasing fit nearest to a row) pools neighbours on a stack whose height depends on the
data: no graph can hold that. torch.library.custom_op makes it one node; the compiler learns its shapes from
register_fake, and its gradient from register_autograd. The min-max formula is the reference.
"""

# No `from __future__ import annotations` here: torch reads an operator's schema from its annotations.

import torch

# Defining an operator's name again frees the first one: a copy of this file under another name gets its own namespace.
NAMESPACE = "companion_ops"
if __name__ != "examples.compiler.custom_ops_isotonic":
    NAMESPACE += f"_{__name__.replace('.', '_')}"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check(name: str, *tensors: torch.Tensor) -> None:
    """Checks that need no data, so that compiling raises the same errors as running does."""
    first = tensors[0]
    if first.dtype not in DTYPES or any(t.dtype != first.dtype for t in tensors):
        raise TypeError(f"{name}: dtypes {[t.dtype for t in tensors]}; all must be the same one of {DTYPES}")
    if not first.ndim or any(t.shape != first.shape for t in tensors):
        raise ValueError(f"{name}: shapes {[tuple(t.shape) for t in tensors]}; all must be the same [..., n]")
    if any(t.device != first.device for t in tensors):
        raise ValueError(f"{name}: devices {[str(t.device) for t in tensors]}; move them to one")


def pool(row: list[float]) -> tuple[list[float], list[int]]:
    """The fit of one row and the block of each element: neighbours whose means fall or tie are pooled (O(n))."""
    sums, counts = [], []
    for value in row:
        sums.append(value)
        counts.append(1)
        while len(sums) > 1 and sums[-2] * counts[-1] >= sums[-1] * counts[-2]:
            sums[-2:], counts[-2:] = [sums[-2] + sums[-1]], [counts[-2] + counts[-1]]
    blocks = [block for block, count in enumerate(counts) for _ in range(count)]
    return [sums[block] / counts[block] for block in blocks], blocks


def pooled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operator does, as a plain function: it reads its data, on the host."""
    rows = [pool(row) for row in x.reshape(-1, x.shape[-1]).tolist()] if x.numel() else []
    fit, blocks = ([row[i] for row in rows] for i in range(2))
    return (
        torch.tensor(fit, dtype=x.dtype, device=x.device).reshape(x.shape),
        torch.tensor(blocks, dtype=torch.int64, device=x.device).reshape(x.shape),
    )


@torch.library.custom_op(f"{NAMESPACE}::isotonic", mutates_args=())
def isotonic_with_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _check("isotonic", x)
    return pooled(x)


@isotonic_with_blocks.register_fake
def _(x):
    _check("isotonic", x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(x.shape, dtype=torch.int64)


def _save_blocks(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])


def _mean_of_each_block(ctx, grad: torch.Tensor, _) -> torch.Tensor:
    """Within a block every element contributes to the mean equally. Plain torch: the compiler sees it and fuses it."""
    (blocks,) = ctx.saved_tensors
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    sums = torch.zeros_like(wide).scatter_add(-1, blocks, wide)
    counts = torch.zeros_like(wide).scatter_add(-1, blocks, torch.ones_like(wide))
    return (sums / counts).gather(-1, blocks).to(grad.dtype)


isotonic_with_blocks.register_autograd(_mean_of_each_block, setup_context=_save_blocks)


def isotonic(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] of any strides and sizes, even 0 -> the nondecreasing fit nearest to each row, contiguous, same shape.

    float16, bfloat16, float32 or float64; sums are Python's float64, rounded once. On a GPU the values are copied to
    the host and back, which waits for everything launched before. NaN stays in its place and is a block of its own. The
    gradient holds the blocks fixed. Raises TypeError for another dtype, ValueError for a tensor without dimensions.
    """
    return isotonic_with_blocks(x)[0]


def reference(x: torch.Tensor) -> torch.Tensor:
    """max over j <= i of min over k >= i of mean(x[j..k]), in float64: another way to the same fit, and traceable."""
    x, n = x.double(), x.shape[-1]
    if not n:
        return x
    ends = torch.nn.functional.pad(x.cumsum(-1), (1, 0))
    j = torch.arange(n, device=x.device)
    means = (ends[..., None, 1:] - ends[..., :-1, None]) / (j - j[:, None] + 1).clamp(min=1)
    least = means.masked_fill(j < j[:, None], float("inf")).flip(-1).cummin(-1).values.flip(-1)
    return least.masked_fill(j < j[:, None], -float("inf")).amax(-2)
