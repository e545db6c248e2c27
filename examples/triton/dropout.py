"""Dropout: eight bytes of seed instead of a mask tensor, and every number of a Philox call put to use.

Technique  Philox makes a random number out of a seed and a counter, so that whoever knows both can make it again.
           Here the counter comes from the element's index: backward needs no stored mask, only the seed, and is the
           same kernel on the gradient. In 16 bits, forward moves 2 passes where a mask of bytes makes it 2.5, and so
           does backward. The price is arithmetic: ten rounds of integer multiplies for each call of Philox, which
           returns four numbers of 32 bits. A kernel that uses one of them and drops three is limited by multiplies.
Question   What does regenerating a dropout mask cost and save against storing it, and what limits it?
Needs      triton
Shapes     x of any shape, contiguous -> x * keep / (1 - p), same shape and dtype. The mask depends on the seed, p,
           per_call and an element's flat index alone (plus `start`, a multiple of 8): a slice of a tensor has the slice
           of its mask, however it is launched. The index has 64 bits.
Dtypes     float32, float16, bfloat16; the product is float32, rounded once. seed: int64, one element, on x's device.
           p counts in steps of 2**-32, with per_call=8 of 2**-16, and the scale is that of the p so rounded.
Errors     TypeError for another dtype, a seed or p or start of another type; ValueError for p outside [0, 1] (NaN
           too), a layout that is not contiguous, a seed of another size, an unknown per_call or a start that is not a
           multiple of 8; RuntimeError for a device without Triton.
           A dropped NaN or infinity is NaN, as in torch, which multiplies by 0 too. p = 0 returns x itself, as torch.
Wins when  memory is the limit: large tensors in 16 bits, and activations that must fit.
Source     Triton tutorial 04 (low-memory dropout); Philox from "Parallel random numbers: as easy as 1, 2, 3".
Run        python examples/triton/dropout.py
"""

from __future__ import annotations

import itertools

from harness import Harness, Work, require_triton_device, run

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PER_CALL = (1, 4, 8)  # elements that one call of Philox serves: one number, all four, or both halves of each
ALIGN = max(PER_CALL)
MAX_BLOCK = 2**14  # more elements than this take the compiler minutes
BLOCK = 2048
NUM_WARPS = 4  # 16 elements a thread: two 128-bit loads in 16 bits
SIGMAS = 5


@triton.jit
def in_order(a, b, c, d):
    """[n] x 4 -> [n, 2, 2] whose flat order is a0 b0 c0 d0 a1 ...: neighbours come from one call."""
    return tl.join(tl.join(a, c), tl.join(b, d))


# threshold and start are data, not structure: specialised, each p and each start would be a kernel of its own.
@triton.jit(do_not_specialize=["threshold", "start"])
def dropout_kernel(
    x_ptr, y_ptr, seed_ptr, threshold, scale, start, n_elements, PER_CALL: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    inside = offsets < n_elements
    # From memory, so that a CUDA graph draws a new mask when its seed changes.
    seed = tl.load(seed_ptr)
    # An int64 counter fills two of Philox's four words; an int32 one would repeat the mask after 2**32 calls.
    calls = (start + first) // PER_CALL + tl.arange(0, BLOCK // PER_CALL)
    if PER_CALL == 1:
        bits = tl.randint(seed, calls)
    else:
        a, b, c, d = tl.randint4x(seed, calls)
        if PER_CALL == 4:
            bits = tl.reshape(in_order(a, b, c, d), (BLOCK,))
        else:  # the lower halves, shifted up; the upper ones need no mask against a threshold whose lower bits are 0
            lower = in_order(a << 16, b << 16, c << 16, d << 16)
            bits = tl.reshape(tl.join(in_order(a, b, c, d), lower), (BLOCK,))
    # Random bits are as uniform as an int32: one comparison, where a float in [0, 1) takes three steps to make.
    factor = tl.where(bits.to(tl.int32, bitcast=True) < threshold, 0.0, scale)
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    tl.store(y_ptr + offsets, (x * factor).to(y_ptr.dtype.element_ty), mask=inside)


def dropped_of(p: float, per_call: int) -> tuple[int, int]:
    """p as a fraction of whole numbers: how many of how many values of a random number drop the element."""
    values = 2**16 if per_call == 8 else 2**32
    return round(p * values), values


def _launch(x: torch.Tensor, p: float, seed: torch.Tensor, start: int, per_call: int, block: int) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_elements = x.numel()
    if n_elements:
        dropped, values = dropped_of(p, per_call)
        # As int32: -2**31 drops nothing. All of them, 2**32, is one too many to say; then the scale is 0 anyway.
        threshold = min(dropped * (2**32 // values), 2**32 - 1) - 2**31
        scale = values / (values - dropped) if dropped < values else 0.0
        dropout_kernel[(triton.cdiv(n_elements, block),)](
            x, y, seed, threshold, scale, start, n_elements, PER_CALL=per_call, BLOCK=block, num_warps=NUM_WARPS
        )
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed, start, per_call, block):
        ctx.save_for_backward(seed)  # saved, and not just kept: autograd notices when it is overwritten
        ctx.options = (start, per_call, block)
        ctx.p = p
        return _launch(x, p, seed, start, per_call, block)

    @staticmethod
    def backward(ctx, grad):
        # Dropout is linear in x, so its derivative is itself. Through apply, that can be differentiated again.
        (seed,) = ctx.saved_tensors
        return _Dropout.apply(grad.contiguous(), ctx.p, seed, *ctx.options), None, None, None, None, None


def dropout(
    x: torch.Tensor,
    p: float = 0.5,
    seed: torch.Tensor | None = None,
    *,
    start: int = 0,
    per_call: int = 4,
    block: int = BLOCK,
) -> torch.Tensor:
    """x with each element dropped with probability p and the rest scaled by 1 / (1 - p); differentiable.

    Without a seed, one is drawn from torch's generator on x's device, which costs a small launch. `start` is the flat
    index of x's first element in the tensor whose mask this is. Limits and errors are in the module docstring.
    """
    name = "dropout"
    if seed is not None and not isinstance(seed, torch.Tensor):
        raise TypeError(f"{name}: seed is {seed!r}; pass torch.tensor([7], device=x.device), an int64")
    with torch.no_grad():  # this kernel has a backward
        require_triton_device(name, x, *(() if seed is None else (seed,)))
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}; convert with x.float() first")
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise TypeError(f"{name}: p is a {type(p).__name__}; pass a Python number")
    if not 0 <= p <= 1:  # NaN is not
        raise ValueError(f"{name}: p is {p}; a probability lies between 0 and 1")
    if not x.is_contiguous():
        raise ValueError(f"{name}: strides {x.stride()}; call x.contiguous() first")
    if type(per_call) is not int or per_call not in PER_CALL:
        raise ValueError(f"{name}: per_call is {per_call!r}; one call of Philox serves one of {PER_CALL} elements")
    if isinstance(start, bool) or not isinstance(start, int):
        raise TypeError(f"{name}: start is a {type(start).__name__}; pass an int")
    if not 0 <= start <= 2**62 or start % ALIGN:
        raise ValueError(f"{name}: start is {start}; pass a multiple of {ALIGN} from 0 to 2**62")
    if type(block) is not int or not ALIGN <= block <= MAX_BLOCK or block & (block - 1):
        raise ValueError(f"{name}: block is {block!r}; pass a power of two from {ALIGN} to {MAX_BLOCK}")
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=x.device)
    elif seed.dtype is not torch.int64:
        raise TypeError(f"{name}: seed has dtype {seed.dtype}; pass torch.tensor([7], device=x.device), an int64")
    elif seed.numel() != 1:
        raise ValueError(f"{name}: seed has shape {tuple(seed.shape)}; pass one element")
    return x if p == 0 else _Dropout.apply(x, p, seed, start, per_call, block)


WORD = 2**32 - 1


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
    """Which of n elements stay: what the kernel must do, said without it."""
    keep = torch.empty(n, dtype=torch.bool, device=seed.device)
    dropped, values = dropped_of(p, per_call)
    step = 2**24  # elements at a time: int64 temporaries stay small
    for begin in range(0, n, step):
        end = min(n, begin + step)
        first, last = (start + begin) // per_call, -(-(start + end) // per_call)
        calls = torch.arange(first, last, device=seed.device)
        zero = torch.zeros_like(calls)
        numbers = philox([calls & WORD, calls >> 32, zero, zero], seed.item())
        if per_call == 1:
            numbers = numbers[:1]
        elif per_call == 8:
            numbers = [half for number in numbers for half in (number >> 16, number & 0xFFFF)]
        # The order of an int32: its sign bit counts down.
        signed = torch.stack(numbers, dim=1).reshape(-1) ^ values // 2
        keep[begin:end] = (signed >= dropped)[: end - begin]
    return keep


def masked(x: torch.Tensor, keep: torch.Tensor, p: float, per_call: int = 4) -> torch.Tensor:
    """x * keep / (1 - p) in float64."""
    dropped, values = dropped_of(p, per_call)
    return x.double() * keep.view(x.shape) * (values / (values - dropped) if dropped < values else 0.0)


def reference(x: torch.Tensor, p: float, seed: torch.Tensor, start: int = 0, per_call: int = 4) -> torch.Tensor:
    return masked(x, keep_mask(x.numel(), p, seed, start, per_call), p, per_call)


def step(fn):
    """Forward and backward of fn as one call: (x, g) -> (y, dx)."""

    def both(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        y = fn(x)
        (dx,) = torch.autograd.grad(y, x, g)
        return y.detach(), dx

    return both


def own_mask(fn, p: float):
    """The reference of a library's dropout: with its own mask, which ones show, called in the same random state."""

    def on_ones(x: torch.Tensor, *g: torch.Tensor):
        out = fn(*map(torch.ones_like, (x, *g)))
        keep = (out[0] if g else out) != 0
        wants = tuple(masked(t, keep, p) for t in (x, *g))
        return wants if g else wants[0]

    return on_ones


def deviation(ones: torch.Tensor, p: float, chunks: int = 64) -> float:
    """How far dropout(ones) is from keeping 1 - p of the elements, in standard deviations: its worst chunk, or all.

    Raises AssertionError beyond SIGMAS, where chance hardly comes.
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
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn(x.detach().requires_grad_())
    return sum(kept)


def mask_facts(h: Harness, variants: dict, n: int, p: float) -> None:
    """What each variant's mask is like: its share of kept elements, whether seeds differ, what backward needs of it."""
    if h.profile:
        return
    ones = torch.ones(n, dtype=h.half, device=h.device)
    h.fact("kept elements, standard deviations off", {v: round(deviation(f(ones), p), 2) for v, f in variants.items()})
    masks = [dropout(ones, p, torch.tensor([s], device=h.device)) for s in (1, 2, 3)]
    worst = max(abs(correlation(a, b)) for a, b in itertools.combinations(masks, 2))
    if worst > SIGMAS:
        raise AssertionError(f"masks of neighbouring seeds correlate by {worst:.1f} standard deviations")
    h.fact("correlation of neighbouring seeds, standard deviations", round(worst, 2))
    h.fact(f"bytes kept for the backward of {n} elements", {v: saved_bytes(f, ones) for v, f in variants.items()})


def multiplies(h: Harness, p: float) -> dict[int, float]:
    """How many mul.hi an element costs on sm_90, by the elements that a call of Philox serves."""
    counts = {}
    if h.profile:
        return counts
    x, seed = h.meta(1 << 20), h.meta(1, dtype=torch.int64)
    for per_call in PER_CALL:
        h.say(f"{per_call} to a call:")
        find = dict.fromkeys((80, 90, 100, 120) if per_call == 4 else (90,), ("ld.global.v4", "st.global.v4", "mul.hi"))
        for kernel in h.codegen(dropout, x, p, seed, find=find, per_call=per_call):
            if kernel.sm == 90:
                counts[per_call] = round(kernel.found["mul.hi"] / (BLOCK / (32 * kernel.warps)), 1)
    return counts


def explain(h: Harness, forward, both, counts: dict[int, float], itemsize: int) -> None:
    """Lessons from the numbers of this run: what the multiplies cost, and what the mask would."""
    rows = {row.variant: row for row in forward.rows}
    rates = [f"{counts[k]} and {rows[f'triton {k} per call'].of_ceiling:.0%}" for k in PER_CALL]
    h.say(f"mul.hi an element and % of the copy, {' / '.join(map(str, PER_CALL))} to a call: {', '.join(rates)}")
    for table, passes, masks in ((forward, 2, 1), (both, 4, 2)):
        rows = {row.variant: row for row in table.rows}
        ms = rows["triton 4 per call"].ms
        h.say(
            f"{table.title}: a mask of bytes makes {passes + masks / itemsize:g} passes of {passes}, "
            f"{1 + masks / itemsize / passes:.2f}x; with 4 to a call {rows['torch'].ms / ms:.2f}x over torch, "
            f"{rows['torch.compile'].ms / ms:.2f}x over torch.compile"
        )


def demo(h: Harness) -> None:
    p, seed = 0.1, torch.tensor([42], device=h.device)
    for n, k in [(0, 4), (1, 4), (997, 1), (BLOCK + 1, 4), (BLOCK + 1, 8)]:
        h.check(
            lambda x, k=k: dropout(x, p, seed, per_call=k), lambda x, k=k: reference(x, p, seed, per_call=k),
            h.randn(n), what=f"dropout of {n} float32, {k} to a call", terms=0,
        )  # fmt: skip
    far = 2**35  # counters of more than 32 bits
    h.check(
        lambda x: dropout(x, p, seed, start=far), lambda x: reference(x, p, seed, start=far),
        h.randn(3, 781, dtype=h.half), what="dropout of a part far into a tensor", terms=0,
    )  # fmt: skip

    counts = multiplies(h, p)
    n = h.fit(h.pick(interpreted=1 << 15, quick=1 << 26, full=1 << 28), bytes_each=64)
    x, g = h.randn(n, dtype=h.half), h.randn(n, dtype=h.half)

    def drop(t):
        return F.dropout(t, p)

    def calls():
        ours = {f"triton {k} per call": lambda t, k=k: dropout(t, p, seed, per_call=k) for k in PER_CALL}
        return {"torch": drop, "torch.compile": h.compiled(drop)} | ours

    def references(variants, of):
        """Each variant's own: a library's mask is its own, and how many elements share a call decides ours."""
        ours = {f"triton {k} per call": of(k) for k in PER_CALL}
        return {name: ours.get(name) or own_mask(fn, p) for name, fn in variants.items()}

    variants = calls()
    own = references(variants, lambda k: lambda x: reference(x, p, seed, per_call=k))
    forward = h.compare(
        variants, own["triton 4 per call"], x, references=own, baseline="torch", work=Work(bytes=2 * x.nbytes),
        title="dropout forward", terms=0,
    )  # fmt: skip
    if h.interpreted:  # compile the library only where it is also timed
        del variants["torch.compile"]
    mask_facts(h, variants, min(n, 1 << 26), p)

    variants = {name: step(fn) for name, fn in calls().items()}
    own = references(variants, lambda k: lambda *xs: tuple(reference(t, p, seed, per_call=k) for t in xs))
    both = h.compare(
        variants, own["triton 4 per call"], x, g, references=own, baseline="torch", work=Work(bytes=4 * x.nbytes),
        title="dropout forward and backward", terms=0,
    )  # fmt: skip
    if both and both.rows[-1].ms and x.is_cuda:
        explain(h, forward, both, counts, x.element_size())


if __name__ == "__main__":
    run(demo)
