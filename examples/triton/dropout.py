"""Dropout: backward draws the mask again from an eight-byte seed, so no mask is stored.

Dropout uses one random mask twice: on x in forward, on the gradient in backward. Philox computes a random number from a
seed and a counter, here the element's index, so backward can draw the same mask again: it is the same kernel applied to
the gradient, and autograd keeps only the seed. In 16 bits, forward then moves 4 bytes an element; writing a mask of one
byte makes it 5, and so does reading it in backward: bytes alone allow a gain of 1.25x. (torch's kernels do not reach a
copy's speed, so the measured gain is larger.)

The price is integer arithmetic: a call of Philox is ten rounds of two 32-bit multiplies whose upper halves are needed
too. It returns four numbers of 32 bits; a kernel that uses one, as `tl.rand` does, is limited by these multiplies, so
here one call serves four neighbours. Numbers of 16 bits halve the arithmetic again, with less randomness than torch's.

Question   What does it cost to draw a dropout mask again in backward, and what does it save against storing it?
Needs      triton
Wins when  memory is the limit: large tensors in 16 bits, and activations that must fit.
Variants   dropout_reference.py (no kernel: the same masks in torch, to check against)
Study      studies/triton/dropout.py
Source     goes beyond the chapter; Triton tutorial 04 (low-memory dropout); Philox: Salmon et al. 2011, "Parallel
           random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import functools

from harness import Harness, Work, run

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from examples.common.compiled import MODES, compiled_modes, over_library
from examples.common.device import require_triton_device
from examples.common.operands import check_choice, check_elementwise
from examples.common.training import forward_backward
from examples.triton.dropout_reference import dropped_of, own_mask, reference, same_mask

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PER_CALL = (1, 4, 8)  # elements that one call of Philox serves: one number, all four, or both halves of each
ALIGN = max(PER_CALL)
BLOCK = 2048
BITS16 = "triton, 16-bit randoms"  # half as much randomness as torch draws
NUM_WARPS = 4  # 16 elements a thread: two 128-bit loads in 16 bits


@triton.jit
def in_order(a, b, c, d):
    """[n] x 4 -> [n, 2, 2] whose flat order is a0 b0 c0 d0 a1 ...: neighbours come from one call."""
    return tl.join(tl.join(a, c), tl.join(b, d))


# threshold and start are data: if they were specialized, 1 and multiples of 16 would each be a kernel of their own.
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
    factor = tl.where(bits.to(tl.int32, bitcast=True) < threshold, 0.0, tl.cast(scale, tl.float32))
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    tl.store(y_ptr + offsets, (x * factor).to(y_ptr.dtype.element_ty), mask=inside)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed, start, per_call):
        ctx.save_for_backward(seed)  # saved, and not just kept: autograd notices when it is overwritten
        ctx.p, ctx.options = p, (start, per_call)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        n_elements = x.numel()
        if n_elements:
            dropped, values = dropped_of(p, per_call)
            # As int32, where -2**31 drops nothing. p = 1 makes 2**32, one too many; there the scale is 0 anyway.
            threshold = min(dropped * (2**32 // values), 2**32 - 1) - 2**31
            scale = values / (values - dropped) if dropped < values else 0.0
            dropout_kernel[(triton.cdiv(n_elements, BLOCK),)](
                x, y, seed, threshold, scale, start, n_elements, PER_CALL=per_call, BLOCK=BLOCK, num_warps=NUM_WARPS
            )
        return y

    @staticmethod
    def backward(ctx, grad):
        # Dropout is linear in x, so its derivative is itself. Through apply, that can be differentiated again.
        (seed,) = ctx.saved_tensors
        return _Dropout.apply(grad.contiguous(), ctx.p, seed, *ctx.options), None, None, None, None


def dropout(
    x: torch.Tensor, p: float = 0.5, seed: torch.Tensor | None = None, *, start: int = 0, per_call: int = 4
) -> torch.Tensor:
    """x with each element dropped with probability p and the rest scaled by 1 / (1 - p); differentiable.

    x: float32, float16 or bfloat16, contiguous, any shape; the product is float32, rounded once. p = 0 returns x
    itself; a dropped NaN or infinity is NaN, because dropping multiplies by 0. Both are as in torch.
    seed: one int64 on x's device. Without it one is drawn from torch's generator, which costs a small launch.
    start: for a part of a larger tensor, the flat index there of x's first element, a multiple of 8: x gets that part
    of the mask, which depends on seed, p, per_call and the flat index alone.
    per_call: how many elements a call of Philox serves, in PER_CALL; p counts in steps of 2**-32, with 8 of 2**-16.

    Raises TypeError for another dtype or seed; ValueError for p outside [0, 1], two devices, a layout that is not
    contiguous, and other options than these; RuntimeError for a device without Triton.
    """
    name = "dropout"
    with torch.no_grad():  # this kernel has a backward
        check_elementwise(name, DTYPES, x)
        if seed is None:
            seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=x.device)
        elif not isinstance(seed, torch.Tensor) or seed.dtype is not torch.int64 or seed.numel() != 1:
            raise TypeError(f"{name}: seed is {seed!r}; pass one int64: torch.tensor([7], device=x.device)")
        require_triton_device(name, x, seed)
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:  # NaN is not
        raise ValueError(f"{name}: p is {p!r}; pass a Python number from 0 to 1")
    if type(start) is not int or not 0 <= start <= 2**62 or start % ALIGN:
        raise ValueError(f"{name}: start is {start!r}; pass a multiple of {ALIGN} from 0 to 2**62")
    check_choice(name, PER_CALL, per_call=per_call)
    return x if p == 0 else _Dropout.apply(x, p, seed, start, per_call)


def demo(h: Harness) -> None:
    p, seed = 0.1, torch.tensor([42], device=h.device)
    # Nothing, one element, a prime, one block and one more; a part so far into a tensor that its counter needs 64 bits.
    for n, k, start in [(0, 4, 0), (1, 4, 0), (997, 1, 0), (BLOCK + 1, 8, 0), (2343, 4, 2**35)]:
        ours, want = (functools.partial(fn, p=p, seed=seed, start=start, per_call=k) for fn in (dropout, reference))
        h.check(ours, want, h.randn(n), what=f"{n} elements from {start}, {k} to a call", terms=0, roundings=1)
    find = dict.fromkeys((80, 90, 100, 120), ("ld.global.v4", "st.global.v4", "mul.hi"))
    h.codegen(dropout, h.meta(1 << 20), p, h.meta(1, dtype=torch.int64), find=find)

    n = h.fit(h.pick(interpreted=1 << 15, quick=1 << 26, full=1 << 28), bytes_each=64)
    calls = {"torch": lambda x: F.dropout(x, p)} | compiled_modes(h, lambda x: F.dropout(x, p))
    calls |= {"triton": lambda x: dropout(x, p, seed), BITS16: lambda x: dropout(x, p, seed, per_call=8)}
    variants = {name: forward_backward(fn) for name, fn in calls.items()}
    own = {name: own_mask(variants[name], p) for name in ("torch", *MODES)}
    table = h.compare(
        variants, same_mask(p, seed), *(h.randn(n, dtype=h.half) for _ in range(2)), baseline="torch",
        title="forward + backward", work=Work(bytes=4 * n * h.half.itemsize),
        references=own | {BITS16: same_mask(p, seed, per_call=8)}, peers=(BITS16,), terms=0, roundings=1,
    )  # fmt: skip

    def answer() -> str:
        over = over_library([table])
        return (
            f"Drawing the mask again {'saves' if over > 1 else 'costs'} time: {over:.2f}x as fast as torch's fastest "
            f"call, which stores it, with 8 bytes kept instead of {n >> 20} MiB. It runs at "
            f"{table['triton'].of_ceiling:.0%} of a copy's speed; the rest goes into random numbers "
            f"({table[BITS16].of_ceiling:.0%} if they have 16 bits)."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
