"""Triton's interpreter, mended: its conversions between float formats round as a GPU's do.

Triton 3.6 and 3.7 lose the carry when a float32 is rounded to FP8 (-7.94 becomes -4), read the codes of NaN as numbers,
and truncate to bfloat16. Here torch converts, which rounds to nearest even; numbers beyond the range of an FP8 format,
infinities too, become its largest, as with cvt.rn.satfinite. Arithmetic on bfloat16 stays wrong there. Triton 3.9
refuses a mask that has a comparison of two scalars in it, since it makes that an int32: here it is a bool again. And
torch.compile, which would trace into the interpreter and fail, leaves each launch to it.
"""

from __future__ import annotations

import functools

import torch

from examples.common.untraced import untraced


@functools.cache
def mend_interpreter() -> None:
    """Once per process, before the first kernel is interpreted; changes conversions, and what torch.compile sees."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    known = {
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.uint8),
        tl.bfloat16: (torch.bfloat16, torch.uint16),
        tl.float16: (torch.float16, torch.uint16),
        tl.float32: (torch.float32, torch.uint32),
        tl.float64: (torch.float64, torch.uint64),
    }
    saturating = (tl.float8e4nv, tl.float8e5)
    convert = interpreter._convert_float

    def convert_as_gpus_do(data, source, target, rounding):
        truncating = rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if truncating or source not in known or target not in known:
            return convert(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(np.dtype(f"uint{source.primitive_bitwidth}"))
        values = torch.from_numpy(bits.copy()).view(known[source][0])
        dtype, unsigned = known[target]
        if target in saturating and source is not target:
            most = torch.finfo(dtype).max
            values = values.to(torch.float64).clamp(-most, most)  # NaN stays NaN
        return values.to(dtype).view(unsigned).numpy()

    def with_masks_of_bool(method, at: int):
        def called(self, *args, **kwargs):
            mask = args[at]
            if isinstance(mask, interpreter.TensorHandle) and mask.dtype == tl.int32:
                args = (*args[:at], interpreter.TensorHandle(mask.data.astype(bool), tl.int1), *args[at + 1 :])
            return method(self, *args, **kwargs)

        return called

    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = with_masks_of_bool(builder.create_masked_load, at=1)
    builder.create_masked_store = with_masks_of_bool(builder.create_masked_store, at=2)
    interpreter._convert_float = convert_as_gpus_do
    interpreter.GridExecutor.__call__ = untraced(interpreter.GridExecutor.__call__)
    Autotuner.run = untraced(Autotuner.run)
