"""The rules of TMA descriptors: what checks every one of them, and a tensor that breaks each.

Triton checks some of the rules on the host, and fewer in the kernel, where a row stride that is no multiple of 16 bytes
goes through. It checks no coordinates. A box may lie partly or fully outside its tensor, also at negative coordinates:
loads fill in zeros there. But its last coordinate must be a multiple of 16 bytes, and no coordinate of a store may be
negative: else the kernel dies of an illegal instruction. A store writes up to the next multiple of 16 bytes in the last
dimension, so rows that end elsewhere need their own padding. (studies/tma/descriptors.py tries all of it.)

Two rules are here because the driver does not document what breaking them does, not because it does harm: a stride of 0
(an expanded tensor) was copied correctly by an H200, by either descriptor, and for a size of 0 no program is launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from examples.common.device import device_limits
from examples.common.tma import require_tma_layout

NAN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, *NAN_DTYPES
)  # fmt: skip
MAX_BLOCK = 2**20  # elements: Triton's limit of any tensor in a kernel
BARRIERS = 64  # bytes of shared memory beside a block


def require_descriptor(name: str, x: torch.Tensor, block: tuple, padding: str = "zero") -> None:
    """Every rule of a descriptor of x with this block: raises TypeError or ValueError that says which and what to do.

    After require_triton_device, which refuses memory that the GPU cannot reach: Triton encodes its address unasked.
    """
    shape, itemsize = tuple(x.shape), x.element_size()
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: x has dtype {x.dtype}; TMA copies {', '.join(map(str, DTYPES))}: view it as one")
    if not 1 <= x.ndim <= 5:
        raise ValueError(f"{name}: x has {x.ndim} dimensions {shape}; a descriptor has 1 to 5: reshape or split it")
    if not isinstance(block, (tuple, list)) or len(block) != x.ndim:
        raise ValueError(f"{name}: block {block!r} for x of shape {shape}; one size for each dimension: reshape either")
    if any(type(n) is not int or n < 1 or n & (n - 1) for n in block):
        raise ValueError(f"{name}: block {tuple(block)}; each size must be a power of two")
    if block[-1] * itemsize < 16:
        raise ValueError(
            f"{name}: block {tuple(block)} of {itemsize} bytes each; the last size must be at least 16 bytes, so at "
            f"least {16 // itemsize}"
        )
    if math.prod(block) > MAX_BLOCK:
        raise ValueError(f"{name}: block {tuple(block)} has more than {MAX_BLOCK} elements; take a smaller one")
    if padding not in ("zero", "nan"):
        raise ValueError(f"{name}: padding is {padding!r}; it is 'zero' or 'nan'")
    if padding == "nan" and x.dtype not in NAN_DTYPES:
        raise ValueError(f"{name}: padding 'nan' for x of {x.dtype}; that is for {', '.join(map(str, NAN_DTYPES))}")
    if not x.numel():
        raise ValueError(f"{name}: x of shape {shape} is empty; a descriptor has sizes from 1: return before it")
    if any(n > 2**31 - size for n, size in zip(shape, block, strict=True)):  # kernels round up to whole blocks in int32
        raise ValueError(f"{name}: x has shape {shape}; coordinates are int32, so split it below 2**31 less a block")
    if any(step * itemsize >= 2**40 for step in x.stride()):
        raise ValueError(f"{name}: x has strides {x.stride()}; each must be below 2**40 bytes: call x.contiguous()")
    contiguous = [d for d, n in enumerate(shape) if n > 1 and x.stride(d) == 1]
    if shape[-1] > 1 and x.stride(-1) != 1 and contiguous:
        raise ValueError(
            f"{name}: x has strides {x.stride()}; the last dimension must be contiguous: describe "
            f"x.transpose({contiguous[0]}, -1) and transpose the block in the kernel, or call x.contiguous()"
        )
    require_tma_layout(name, x=x)
    if (need := math.prod(block) * itemsize + BARRIERS) > (limit := device_limits(x.device).shared_bytes):
        raise ValueError(
            f"{name}: block {tuple(block)} takes {need} bytes of the {limit} of shared memory: take a smaller one"
        )


def numbered(device: torch.device | str, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Small positive numbers, neighbours different; without data on device meta."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    return (torch.arange(math.prod(shape), device=device) % 251 + 1).reshape(shape).to(dtype)


# Each rule: a tensor that breaks it and nothing else (on `device`), the padding, the block. Those in OFFLINE would
# take too much memory to run. cuTensorMapEncodeTiled asks for sizes from 1, and the strides that its documentation
# computes are never 0: what becomes of others is promised nowhere, even where it goes well.
RULES: dict[str, tuple[str, Callable]] = {
    "start at 16 bytes": ("x[:, 1:]", lambda d: (numbered(d, 64, 64)[:, 1:], "zero", (16, 32))),
    "row stride of 16 bytes": ("rows of 63", lambda d: (numbered(d, 64, 63), "zero", (16, 32))),
    "adjacent columns": ("x.t()", lambda d: (numbered(d, 64, 64).t(), "zero", (16, 32))),
    "adjacent columns (sliced)": ("x[:, ::2]", lambda d: (numbered(d, 64, 64)[:, ::2], "zero", (16, 32))),
    "no stride of 0": ("x[:1].expand", lambda d: (numbered(d, 1, 64).expand(64, 64), "zero", (16, 32))),
    "strides below 2**40 bytes": ("2**41 bytes", lambda d: (
        torch.empty(2**40 + 64, dtype=torch.float16, device="meta").as_strided((2, 64), (2**40, 1)), "zero", (1, 64))),
    "sizes below 2**31": ("2**31 rows", lambda d: (numbered("meta", 2**31, 16), "zero", (16, 16))),
    "sizes from 1": ("no rows", lambda d: (numbered(d, 0, 64), "zero", (16, 32))),
    "1 to 5 dimensions": ("6", lambda d: (numbered(d, 2, 2, 2, 2, 2, 8), "zero", (1, 1, 1, 1, 1, 8))),
    "a block size each": ("1 for 2", lambda d: (numbered(d, 64, 64), "zero", (32,))),
    "powers of two": ("16 x 24", lambda d: (numbered(d, 64, 64), "zero", (16, 24))),
    "16 bytes a block row": ("4 of 2 bytes", lambda d: (numbered(d, 64, 64), "zero", (16, 4))),
    "2**20 in a block": ("2048 x 1024", lambda d: (numbered(d, 64, 64), "zero", (2048, 1024))),
    "block fits shared memory": ("512 KiB", lambda d: (numbered(d, 1024, 256), "zero", (1024, 256))),
    "a dtype of TMA": ("bool", lambda d: (numbered(d, 64, 64, dtype=torch.bool), "zero", (16, 32))),
    "a dtype of TMA (complex)": ("complex64", lambda d: (numbered(d, 64, 64, dtype=torch.complex64), "zero", (16, 32))),
    "zero or nan": ("'edge'", lambda d: (numbered(d, 64, 64), "edge", (16, 32))),
    "NaN for floats": ("int32", lambda d: (numbered(d, 64, 64, dtype=torch.int32), "nan", (16, 32))),
    "NaN for floats (float8)": ("e4m3", lambda d: (numbered(d, 64, 64, dtype=torch.float8_e4m3fn), "nan", (16, 32))),
}  # fmt: skip
OFFLINE = ("strides below 2**40 bytes", "sizes below 2**31")


def noticed(device: torch.device) -> list[str]:
    """The rules whose breach a TensorDescriptor notices when it is made; require_descriptor has to notice each."""
    rules = []
    for rule, (_, broken) in RULES.items():
        x, padding, block = broken(device)
        try:
            TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), padding)
        except (AssertionError, TypeError, ValueError):
            rules.append(rule)
        try:
            require_descriptor("copy", x, block, padding)
        except (TypeError, ValueError):
            continue
        raise AssertionError(f"require_descriptor let {rule!r} pass")
    return rules
