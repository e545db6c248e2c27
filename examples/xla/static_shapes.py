"""Static shapes: XLA compiles for each size; batches of 1 to 64 are 64 programs, one, or seven, depending on padding.

An XLA program is valid only for the sizes it was compiled for. Padding saves compilations: all batches padded to the
largest size (one program, half of the rows wasted), or to the next power of two (seven programs, a quarter wasted).

Pad before the transfer to the device, and cut after the transfer back. On the device both are operations of the graph,
and bring back one program for each size. Row by row, padding cannot be seen; whatever looks across rows (a mean over
the batch, batch norm) needs the mask of the real rows as one more input.

Question   How often does a model compile for batches of 1 to 64, how much does padding waste, and when does it pay?
Needs      torch_xla>=2.9
Wins when  there are many sizes. Buckets pay after a number of calls that each run measures; one padded size is best for
           a shorter life, no padding for a few fixed sizes. In the recorded run, on a CPU, eager is faster.
Study      studies/xla/static_shapes.py (padding on the device, masks, torch.compile)
Source     chapter section "PyTorch XLA Backend", whose padding to one fixed size wastes half of the rows here
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

from harness import Harness, Timing, Work, run

import torch
import torch_xla
from torch import nn

from examples.common import xla

LARGEST = 64
POWERS = (1, 2, 4, 8, 16, 32, 64)
FIXED, BUCKETS, NONE = f"padded to {LARGEST}", "powers of two", "no padding"
POLICIES = {NONE: None, FIXED: (LARGEST,), BUCKETS: POWERS}


def pad_batch(x: torch.Tensor, sizes: Sequence[int] = POWERS) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, ...] with zeros up to the smallest of `sizes` that holds its rows, and the mask of its real rows.

    On the host, in x's dtype; the mask is bool [size]. Raises TypeError for what is no tensor; ValueError for one on
    the XLA device, of no dimensions or rows, or of more rows than the largest of `sizes`.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"pad_batch: got {type(x).__name__}, need a tensor [rows, ...]; use torch.as_tensor")
    if x.device.type == "xla":
        raise ValueError(f"pad_batch: x is on {x.device}, where padding compiles for each size; pad, then move it")
    if not sizes or x.ndim < 1 or not 1 <= len(x) <= max(sizes):
        raise ValueError(
            f"pad_batch: shape {tuple(x.shape)} into sizes {tuple(sizes)}; need [rows, ...] of 1 to "
            f"{max(sizes, default=0)} rows: split the batch, or add a larger size"
        )
    size = min(size for size in sizes if size >= len(x))
    padded = x if size == len(x) else torch.cat((x, x.new_zeros(size - len(x), *x.shape[1:])))
    return padded, torch.arange(size) < len(x)


class Served:
    """A model on the XLA device, called with batches on the host.

    XLA keeps a program for the whole process, whoever compiled it, and policies can share a size. So that each compiles
    its own, its programs have one more output: a few zeros, as many as the policy's number.
    """

    def __init__(self, model: nn.Module, policy: str) -> None:
        self.sizes, self.number = POLICIES[policy], 1 + list(POLICIES).index(policy)
        self.model = copy.deepcopy(model).to(xla.device())
        xla.settle()

    def rows(self, rows: int) -> int:
        return rows if self.sizes is None else min(size for size in self.sizes if size >= rows)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        padded = x if self.sizes is None else pad_batch(x, self.sizes)[0]
        out = self.model(padded.to(xla.device()))
        own = torch.zeros(self.number, device=xla.device())
        torch_xla.sync()
        del own
        return out.cpu()[: len(x)]

    def mix(self, *batches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self(x) for x in batches)


def mlp(width: int) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).requires_grad_(False)


def reference_of(model: nn.Module) -> Callable:
    exact = copy.deepcopy(model).double()
    return lambda *batches: tuple(exact(x.double()) for x in batches)


def stream_of(requests: int, seed: int) -> list[int]:
    """Batch sizes as they come: mostly small, with a long tail, 64 at most."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(requests, generator=generator).exp().mul(8).round()
    return [int(size) for size in sizes.clamp(1, LARGEST)]


def break_even(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    """The number of calls after which `ours` has taken less total time than `theirs` for good; None: never."""
    behind = [a >= b for a, b in zip(accumulate(ours), accumulate(theirs), strict=True)]
    calls = max((i + 1 for i, late in enumerate(behind) if late), default=0) + 1
    return calls if calls <= len(ours) else None


def count(h: Harness, model: nn.Module, served: dict[str, Served]) -> tuple[dict, dict]:
    """A stream of random sizes from cold, then all sizes, held to float64; and the seconds of the stream's calls."""
    width, stream = model[0].in_features, stream_of(h.pick(quick=500, full=1500), h.seed)
    batches = {size: h.randn(size, width) for size in range(1, LARGEST + 1)}
    rows, seconds = {}, {name: [] for name in served}
    served[NONE](h.randn(LARGEST + 1, width))  # takes the extra cost of a process's first compilation
    for name, one in served.items():
        with xla.watch() as ran:
            for size in stream:
                started = time.perf_counter()
                one(batches[size])
                seconds[name].append(time.perf_counter() - started)
            one.mix(*batches.values())
        h.check(one.mix, reference_of(model), *batches.values(), what=f"{name}, 1 to {LARGEST} rows", terms=4 * width,
                poison=False)  # fmt: skip
        computed = sum(map(one.rows, batches))
        rows[name] = {
            "compiles": ran.compiles, "compile s": round(ran.compile_s, 2), "rows computed": computed,
            "wasted %": round(100 * (1 - sum(batches) / computed), 1),
        }  # fmt: skip
    h.table(f"batches of 1 to {LARGEST}; a stream of {len(stream)} batches, {len(set(stream))} sizes, from cold", rows)
    return rows, seconds


def demo(h: Harness) -> None:
    # For narrower products of 8 to 31 rows XLA:CPU writes loops of its own, some of which take much longer to compile.
    width = h.pick(quick=520, full=776)
    model = mlp(width)
    served = {name: Served(model, name) for name in POLICIES}
    rows, seconds = ({}, {}) if h.profile else count(h, model, served)
    sizes = stream_of(32, h.seed + 1)
    batches = [h.randn(size, width) for size in sizes]
    variants = {f"torch_xla {name}": one.mix for name, one in served.items()}
    table = h.compare(
        {"torch eager": lambda *xs: tuple(model(x) for x in xs), **variants}, reference_of(model), *batches,
        baseline="torch eager", work=Work(flops=16 * width * width * sum(sizes), dtype=torch.float32),
        title="32 batches, from host to host", case=f"{sum(sizes)}x{width} float32", terms=4 * width,
        timing=Timing(first_calls=dict.fromkeys(variants)),  # already compiled for the stream, except new sizes
    )  # fmt: skip

    def answer() -> str:
        counts = ", ".join(f"{name} {row['compiles']} ({row['wasted %']}%)" for name, row in rows.items())
        gain = table.over(f"torch_xla {FIXED}", f"torch_xla {BUCKETS}")
        # If none was compiled, this process had compiled them before the stream.
        call = break_even(seconds[BUCKETS], seconds[FIXED]) if rows[BUCKETS]["compiles"] else None
        when = f"; with compiling included they are ahead from call {call} on" if call else ""
        speed = f"Once compiled, {BUCKETS} run at {gain:.2f}x the speed of {FIXED}{when}."
        return f"Programs (rows wasted): {counts}. {speed}"

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
