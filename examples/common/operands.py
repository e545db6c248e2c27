"""The checks of operands that many wrappers make: each message names the function, what it got, and the fix."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from examples.common.device import architecture, require_triton_device
from examples.common.fp8 import OUT_DTYPES, require_fp8
from examples.common.tma import require_tma_layout, tma_takes


def check_choice(name: str, choices: tuple, **options) -> None:
    """Raises ValueError for an option that is not one of `choices` (True is no 1, and 8.0 no 8)."""
    for label, value in options.items():
        if not any(type(value) is type(each) and value == each for each in choices):
            raise ValueError(f"{name}: {label} {value!r} is not one of {choices}")


def check_gemm(
    name: str, a: torch.Tensor, b: torch.Tensor, dtypes: tuple[torch.dtype, ...], tma: bool = False
) -> tuple[int, int, int]:
    """M, N and K of a [M, K] @ b [K, N], both of one dtype of `dtypes`; with `tma` in a layout that TMA loads.

    Raises what require_triton_device does; TypeError for another dtype or two dtypes; ValueError for rank or inner
    sizes and, with `tma`, for rows that are no multiples of 16 bytes and what require_tma_layout refuses.
    """
    require_triton_device(name, a, b)
    if a.dtype not in dtypes or b.dtype != a.dtype:
        raise TypeError(f"{name}: dtypes {a.dtype} and {b.dtype}; both must be the same one of {dtypes}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    (M, K), N = a.shape, b.shape[1]
    if tma:
        _check_tma_sizes(name, a, K, N)
        require_tma_layout(name, a=a, b=b)
    return M, N, K


def check_tma_gemm(
    name: str, a: torch.Tensor, b: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> tuple[int, int, int, bool]:
    """M, N and K as check_gemm(tma=True) has them, for b with contiguous rows or, as weight.t() has them, columns.

    Also whether b has contiguous columns: TMA then loads b.t(), and the tensor cores read 16-bit operands either way.
    """
    M, N, K = check_gemm(name, a, b, dtypes)
    _check_tma_sizes(name, a, K, N)
    columns = b.stride(1) != 1 and b.stride(0) == 1
    require_tma_layout(name, a=a, **({"b.t()": b.t()} if columns else {"b": b}))
    return M, N, K, columns


def check_fp8_gemm(
    name: str, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> tuple[int, int, int]:
    """M, N and K of a [M, K] @ b [K, N] as FP8 tensor cores take it: K contiguous in both, so b is weight.t().

    Raises what require_triton_device and require_fp8 do; TypeError for an out_dtype that is not one of OUT_DTYPES;
    ValueError for rank, inner sizes or another layout; RuntimeError for a GPU before sm_89.
    """
    require_triton_device(name, a, b)
    require_fp8(name, a=a, b=b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    (M, K), N = a.shape, b.shape[1]
    if K > 1 and a.stride(1) != 1:
        raise ValueError(
            f"{name}: a has strides {a.stride()}; FP8 tensor cores take operands with K contiguous: a.contiguous()"
        )
    if K > 1 and b.stride(0) != 1:
        raise ValueError(
            f"{name}: b has strides {b.stride()}; FP8 tensor cores take operands with K contiguous, so b must be "
            f"column-major: keep weights as [N, K] and pass weights.t(), or b.t().contiguous().t()"
        )
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {OUT_DTYPES}")
    if (sm := architecture(a.device)) < 89:
        raise RuntimeError(f"{name}: this GPU is sm_{sm}; FP8 tensor cores come with sm_89")
    return M, N, K


def check_fp8_tma(name: str, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, instead: str) -> None:
    """What a kernel needs that loads the operands of check_fp8_gemm, and stores their product, by TMA.

    Raises ValueError for rows that are no multiples of 16 bytes and what require_tma_layout refuses; RuntimeError for a
    GPU before sm_90. `instead` is what a caller can use all the same.
    """
    K, N = b.shape
    if K % 16 or N * out_dtype.itemsize % 16:
        raise ValueError(
            f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples: pad K to a multiple of 16 and N to one "
            f"of {16 // out_dtype.itemsize}, or use {instead}"
        )
    require_tma_layout(name, a=a, **{"b.t()": b.t()})
    if (sm := architecture(a.device)) < 90:
        raise RuntimeError(f"{name}: TMA comes with sm_90 (this is sm_{sm}): use {instead}")


def fp8_tma_takes(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether check_fp8_tma would pass for their layout and sizes."""
    K, N = b.shape
    return K % 16 == 0 and N * out_dtype.itemsize % 16 == 0 and tma_takes(a) and tma_takes(b.t())


def _check_tma_sizes(name: str, a: torch.Tensor, K: int, N: int) -> None:
    step = 16 // a.element_size()
    if K % step or N % step:
        raise ValueError(
            f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples: pad both to multiples of {step}"
        )


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the memory of two tensors, from the first to the last element of each, has bytes in common."""

    def ends(t: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    if x.device.type == "meta" or not (x.numel() and y.numel()):
        return False
    (x_first, x_end), (y_first, y_end) = ends(x), ends(y)
    return x_first < y_end and y_first < x_end


def check_tma_out(name: str, out: torch.Tensor, shape: tuple[int, ...], **inputs: torch.Tensor) -> None:
    """An output that TMA stores to while `inputs`, of its dtype, are still read.

    Raises what require_triton_device does; ValueError for another dtype, shape or layout, or memory of an input.
    """
    require_triton_device(name, out, *inputs.values())
    dtype = next(iter(inputs.values())).dtype
    if out.dtype != dtype or tuple(out.shape) != shape or not out.is_contiguous():
        raise ValueError(
            f"{name}: out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; need {dtype} {shape}, "
            "contiguous"
        )
    require_tma_layout(name, out=out)
    for label, x in inputs.items():
        if _overlap(out, x):
            raise ValueError(f"{name}: out lies over {label}, which is still read then: pass memory of its own")


def check_tma_matrix(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], tma: bool = True) -> None:
    """A matrix that a kernel copies in tiles, its coordinates int32; with `tma` in a layout that TMA loads.

    Raises what require_triton_device does; TypeError for another dtype; ValueError for rank, an inner stride other
    than 1, sizes from 2**31 - 256 on (a tile may reach past the end) and, with `tma`, what require_tma_layout refuses.
    """
    require_triton_device(name, x)
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name}: dtype {x.dtype} is not one of {dtypes}; convert it to one (only a copy may view the bits as one)"
        )
    if x.ndim != 2:
        raise ValueError(f"{name}: need a matrix [M, N], got shape {tuple(x.shape)}; call x.reshape first")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name}: strides {x.stride()}; the columns must be adjacent, call x.contiguous() first")
    if max(x.shape) >= 2**31 - 256:
        raise ValueError(f"{name}: shape {tuple(x.shape)}; each size must be below {2**31 - 256}, split the matrix")
    if tma:
        require_tma_layout(name, x=x)


def check_rows(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
    """n_rows and n_cols of x [n_rows, n_cols] with contiguous rows, any row stride, at least one column.

    Raises what require_triton_device does; TypeError for another dtype; ValueError for rank, an inner stride other
    than 1, or no columns.
    """
    require_triton_device(name, x)
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {dtypes}")
    if x.ndim != 2:
        raise ValueError(f"{name}: shape {tuple(x.shape)}; need [n_rows, n_cols]: reshape it")
    n_rows, n_cols = x.shape[0], operator.index(x.shape[1])  # the length of a row is no symbol to torch.compile
    if n_cols == 0:
        raise ValueError(f"{name}: shape {tuple(x.shape)} has no columns; a row needs at least one element")
    if n_cols > 1 and x.stride(1) != 1:
        raise ValueError(f"{name}: strides {x.stride()}; the last dimension must be contiguous: call x.contiguous()")
    return n_rows, n_cols


def check_elementwise(name: str, dtypes: tuple[torch.dtype, ...], *tensors: torch.Tensor) -> None:
    """Contiguous tensors of one shape and of one dtype of `dtypes`: what a kernel over flat offsets can read.

    Raises what require_triton_device does; TypeError for another dtype or two dtypes; ValueError for two shapes or a
    layout that is not contiguous.
    """
    require_triton_device(name, *tensors)
    if any(x.dtype not in dtypes or x.dtype != tensors[0].dtype for x in tensors):
        found = " and ".join(str(x.dtype) for x in tensors)
        raise TypeError(f"{name}: dtype {found}; need one of {dtypes}, the same for every tensor")
    if any(x.shape != tensors[0].shape for x in tensors):
        shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"{name}: shapes {shapes} differ; expand or slice one first")
    if not all(x.is_contiguous() for x in tensors):
        strides = " and ".join(str(x.stride()) for x in tensors)
        raise ValueError(f"{name}: strides {strides}; call .contiguous() first")


def short_of_k(reference: Callable, step: int = 32) -> dict[str, Callable]:
    """A GEMM without its last `step` products, which no error budget may let through: for h.compare(wrong=...)."""
    return {f"without its last {step} of K": lambda a, b: reference(a[:, :-step], b[:-step])}
