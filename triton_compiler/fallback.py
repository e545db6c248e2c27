"""What this compiler leaves to torch: libraries on purpose, everything that it does not know as a fallback."""

from __future__ import annotations

import torch

# Calls of a library (cuBLAS, cuDNN, attention kernels): no kernel of this compiler would be faster.
LIBRARY = """
mm addmm bmm baddbmm convolution convolution_backward _scaled_mm cudnn_convolution
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward empty new_empty
""".split()  # noqa: SIM905


class Unsupported(Exception):
    """This operation is called in eager; the message says why."""


def check_tensor(value, dtypes) -> None:
    """Raises Unsupported for a value that generated kernels do not read or write."""
    from triton_compiler.device import INTERPRETED

    if not isinstance(value, torch.Tensor):
        raise Unsupported(f"a result of type {type(value).__name__}")
    if value.layout is not torch.strided:
        raise Unsupported(f"layout {value.layout}")
    if value.dtype not in dtypes or (INTERPRETED and value.dtype is torch.bfloat16):
        raise Unsupported(f"dtype {value.dtype}")
    if value.is_neg() or value.is_conj() or value.is_quantized:
        raise Unsupported("a lazy negation or conjugate, or a quantized tensor")
    if value.device.type != ("cpu" if INTERPRETED else "cuda") and not (value.device.type == "cpu" and value.ndim == 0):
        raise Unsupported(f"device {value.device.type}")
    if any(isinstance(size, int) and size == 0 for size in value.shape):
        raise Unsupported("an empty tensor")


def is_random(target) -> bool:
    """Whether it draws random numbers: such calls keep their order, and so torch's seed decides the result."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
