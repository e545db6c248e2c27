"""FP8 as all files of that topic mean it: formats, scales, the checks of a wrapper, and a quantizer to hold kernels to.

A float8 tensor q and its float32 scales stand for q * scale. A scale covers a group of `block` = (rows, columns), where
(1, columns of x) is one scale per row, (1, 128) per group, (128, 128) per block, the shape of x one for all. A scale is
amax / max: amax the largest magnitude in the group, max that of the format, so nothing saturates. amax is at least
FLOOR, so zeros come back as zeros and no scale is 0. An infinity or NaN turns its whole group, but no other, to NaN
when it is read back, so it does not go unnoticed.
"""

from __future__ import annotations

import math

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E5M2)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of a GEMM, which accumulates in float32
FLOOR = 2.0**-100  # amax of a group, at least: 1 / scale stays finite in float32


def fp8_max(dtype: torch.dtype) -> float:
    """The largest finite number of a float8 format: 448 for e4m3fn, 57344 for e5m2."""
    return torch.finfo(dtype).max


def require_fp8(name: str, **tensors: torch.Tensor) -> None:
    """Raises TypeError unless every tensor is float8_e4m3fn or float8_e5m2."""
    for label, x in tensors.items():
        dtype = getattr(x, "dtype", type(x).__name__)
        if dtype in FORMATS:
            continue
        if "fnuz" in str(dtype):
            hint = f"the fnuz formats are AMD's; quantize to {E4M3} or {E5M2} instead"
        else:
            hint = f"it must be {E4M3} or {E5M2}: quantize it and pass its scales"
        raise TypeError(f"{name}: {label} is {dtype}; {hint}")


def may_read(x: torch.Tensor) -> bool:
    """Whether a wrapper may look at values of x: not on meta, in torch.compile, or while a CUDA graph is captured."""
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def require_scales(name: str, like: torch.Tensor, values: bool = True, **scales) -> None:
    """The checks of scales: each argument is (tensor, shapes allowed), with the label as its name.

    Raises TypeError for what is no float32 tensor; ValueError for another device than that of `like`, another shape
    and, if `values` and may_read, for a scale that is zero, negative, infinite or NaN (which waits for the GPU).
    """
    for label, (scale, shapes) in scales.items():
        if not isinstance(scale, torch.Tensor) or scale.dtype is not torch.float32:
            got = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
            raise TypeError(f"{name}: {label} is {got}; pass a float32 tensor")
        if scale.device != like.device:
            raise ValueError(f"{name}: {label} is on {scale.device}, the data on {like.device}; move it there")
        if tuple(scale.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{name}: {label} has shape {list(scale.shape)}; need {wanted}")
        if values and may_read(scale) and not ((scale > 0) & (scale < math.inf)).all():
            wrong = int(scale.numel() - ((scale > 0) & (scale < math.inf)).sum())
            raise ValueError(
                f"{name}: {label} has {wrong} of {scale.numel()} values that are not positive and finite; a scale is "
                f"amax / {fp8_max(E4M3):g} (of {E4M3}) with amax at least {FLOOR:.2g}"
            )


def _grouped(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """x [M, K] as [M / rows, rows, K / columns, columns], padded with zeros."""
    rows, columns = block
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def quantize_reference(
    x: torch.Tensor, block: tuple[int, int], dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> q [M, K] in `dtype`, scales [ceil(M / rows), ceil(K / columns)] in float32; block = (rows, columns).

    In plain torch and float32, each step rounded once, so a kernel can be held to the very bits:
    amax = max(|x|, FLOOR); scale = amax / max; q = round(x * (max / amax)). Raises ValueError for a block without rows
    or columns.
    """
    if min(block) < 1:
        raise ValueError(f"quantize_reference: block is {block}; a group has at least one row and one column")
    groups = _grouped(x.float(), block)
    most = fp8_max(dtype)
    amax = groups.abs().amax(dim=(1, 3)).clamp(min=FLOOR)
    top = amax.new_full((), most)  # with a Python number torch would multiply by a reciprocal, and round twice
    scaled = groups * (top / amax)[:, None, :, None]
    # A product may round to a little above `most`; NaN passes clamp.
    q = scaled.clamp(-most, most).to(dtype).flatten(2, 3).flatten(0, 1)[: x.shape[0], : x.shape[1]]
    return q.contiguous(), amax / top


def dequantize_reference(q: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """q * scale in float64; shapes as in quantize_reference."""
    groups = _grouped(q.double(), block) * scale.double()[:, None, :, None]
    return groups.flatten(2, 3).flatten(0, 1)[: q.shape[0], : q.shape[1]]
