"""What this compiler leaves to torch: library calls on purpose, and everything it does not know as a fallback."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

from triton_compiler.device import INTERPRETED
from triton_compiler.ops import TRITON

# Calls of a library (cuBLAS, cuDNN, attention kernels): no kernel of this compiler would be faster.
LIBRARY = """
mm addmm bmm baddbmm convolution convolution_backward _scaled_mm cudnn_convolution empty new_empty
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
""".split()  # noqa: SIM905


class Unsupported(Exception):
    """This operation is called in eager; the message says why."""


def check(fx: torch.fx.Node, value, device: torch.device | None) -> None:
    """Raises Unsupported where a result or an argument is nothing that a kernel on `device` reads or writes."""
    for each in tree_leaves(value):
        check_tensor(each)
        if each.device != device:
            raise Unsupported(f"device {each.device}")
    for each in tree_leaves([arg.meta.get("val") for arg in fx.all_input_nodes]):
        if isinstance(each, torch.Tensor):
            check_tensor(each)
            if each.device != device and not (each.device.type == "cpu" and each.ndim == 0):
                raise Unsupported("tensors of two devices")


def check_tensor(value) -> None:
    if not isinstance(value, torch.Tensor):
        raise Unsupported(f"a result of type {type(value).__name__}")
    if value.layout is not torch.strided:
        raise Unsupported(f"layout {value.layout}")
    if value.dtype not in TRITON or (INTERPRETED and value.dtype is torch.bfloat16):
        raise Unsupported(f"dtype {value.dtype}")
    if value.is_neg() or value.is_conj() or value.is_quantized:
        raise Unsupported("a lazy negation or conjugate, or a quantized tensor")
    if any(isinstance(size, int) and size == 0 for size in value.shape):
        raise Unsupported("an empty tensor")


def is_random(target) -> bool:
    """Whether it draws random numbers: such calls keep their order, and so torch's seed decides the result."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
