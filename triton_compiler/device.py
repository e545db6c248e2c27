"""Device functions that generated kernels call. In Triton's interpreter torch and numpy take their places.

Whether Triton interprets is decided when triton is imported; without a GPU this package switches it on (__init__.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    import numpy as np
    import torch
    from triton.runtime.interpreter import TensorHandle

    def _tensor(data, dtype):
        data = np.ascontiguousarray(data)
        scalar = dtype.scalar
        kind = tl.block_type(scalar, list(data.shape)) if data.shape else scalar
        return tl.core.tensor(TensorHandle(data, scalar), kind)

    class _Torch:
        """libdevice by name, computed by torch: the same functions that eager calls."""

        def __getattr__(self, name):
            fn = getattr(torch, "round" if name == "rint" else name)

            def call(*tensors):
                arrays = np.broadcast_arrays(*(each.handle.data for each in tensors))
                found = fn(*(torch.from_numpy(np.array(each)) for each in arrays))
                return _tensor(found.numpy(), tensors[0].dtype)

            return call

    libdevice = _Torch()

    def _reducer(fn):
        return lambda x, axis: _tensor(fn(x.handle.data, axis=axis, dtype=x.handle.data.dtype), x.dtype)

    reduce_sum, reduce_max, reduce_min, reduce_prod = map(
        _reducer, (np.sum, np.maximum.reduce, np.minimum.reduce, np.prod)
    )

    def check(inside):
        """Raises IndexError, as eager on the CPU does."""
        if not np.all(inside.handle.data):
            raise IndexError("index out of range in self")
else:
    from triton.language.extra import libdevice

    @triton.jit
    def reduce_sum(x, axis: tl.constexpr):
        return tl.sum(x, axis)

    @triton.jit
    def _mul(a, b):
        return a * b

    @triton.jit
    def reduce_max(x, axis: tl.constexpr):
        return tl.reduce(x, axis, maximum)

    @triton.jit
    def reduce_min(x, axis: tl.constexpr):
        return tl.reduce(x, axis, minimum)

    @triton.jit
    def reduce_prod(x, axis: tl.constexpr):
        return tl.reduce(x, axis, _mul)

    @triton.jit
    def check(inside):
        """Stops the program where an index is out of range; kernels that call it are compiled with debug=True."""
        tl.device_assert(inside, "index out of range")


@triton.jit
def maximum(a, b):
    """NaN where either is NaN, as torch.maximum; one instruction."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp_difference(x, maximum):
    """exp(x - maximum), and 0 where nothing was seen yet: both are -inf."""
    return tl.where(x == float("-inf"), 0.0, tl.exp(x - maximum))


@triton.jit
def online_sum(total, maximum, x):
    """A sum of exp(x - maximum) after one more x, which may be the new maximum: one exponential serves both cases."""
    e = tl.exp(-tl.abs(x - maximum))
    return tl.where(x > maximum, total * e + 1.0, total + tl.where(x == float("-inf"), 0.0, e))


@triton.jit
def floor_mod(a, b):
    """The remainder of Python and torch, whose sign is the divisor's; % is C's here."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def floor_div(a, b):
    q = a // b
    return tl.where((q * b != a) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def float_mod(a, b):
    r = libdevice.fmod(a, b)
    return tl.where((r != 0.0) & ((r < 0.0) != (b < 0.0)), r + b, r)


@triton.jit
def float_floor_div(a, b):
    """As c10::div_floor_floating: exact also where a / b rounds up to the next whole number."""
    r = libdevice.fmod(a, b)
    q = (a - r) / b
    q = tl.where((r != 0.0) & ((b < 0.0) != (r < 0.0)), q - 1.0, q)
    down = tl.floor(q)
    down = tl.where(q - down > 0.5, down + 1.0, down)
    return tl.where(b == 0.0, a / b, tl.where(q == 0.0, a / b * 0.0, down))
