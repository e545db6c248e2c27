"""TMA descriptors: which layouts they take, how the host makes them, and scratch memory for those a kernel makes."""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import torch
import triton

from examples.common.device import interpreted


def tma_takes(x: torch.Tensor) -> bool:
    """Whether TMA can load x: its last dimension is contiguous, its start and other strides multiples of 16 bytes."""
    if not x.numel():
        return True  # nothing will be loaded
    steps = [step * x.element_size() for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
    return contiguous and not (x.data_ptr() % 16 or any(step % 16 or step == 0 for step in steps))


def require_tma_layout(name: str, **tensors: torch.Tensor) -> None:
    """The checks of a wrapper whose kernel loads its tensors by TMA, after require_triton_device.

    Raises ValueError unless the last dimension is contiguous and the start and all other strides are multiples of 16
    bytes (and no stride is 0). Triton 3.6 and 3.7 assert nearly the same, but name neither the argument nor a way out.
    """
    for label, x in tensors.items():
        if not tma_takes(x):
            multiple = 16 // x.element_size()
            pad = f"pad the last dimension to a multiple of {multiple}, and " if x.shape[-1] % multiple else ""
            raise ValueError(
                f"{name}: {label} has shape {tuple(x.shape)}, strides {x.stride()} and starts {x.data_ptr() % 16} "
                f"bytes past a multiple of 16; TMA needs a contiguous last dimension and 16-byte multiples elsewhere; "
                f"{pad}call {label}.clone(memory_format=torch.contiguous_format)"
                f"{'.t()' if label.endswith('.t()') else ''}"
            )


def tma_descriptor(x: torch.Tensor, block_shape: list[int], padding: str = "zero"):
    """TensorDescriptor.from_tensor for a tensor that passed require_tma_layout; `padding` fills what lies outside it.

    The stride of a dimension of one element is never used, but Triton wants a multiple of 16 bytes even there.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), tma_strides(x), block_shape, padding)


def gluon_descriptor(x: torch.Tensor, block_shape: list[int]):
    """tma_descriptor for a Gluon kernel; its blocks lie in shared memory as Gluon lays them out by default.

    The kernel finds that layout, which the tensor cores read, as desc.layout.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    like = {1: gl.int8, 2: gl.int16, 4: gl.int32}[x.element_size()]  # the layout depends on the size alone
    layout = gl.NVMMASharedLayout.get_default_for(block_shape, like)
    return TensorDescriptor(x, list(x.shape), tma_strides(x), block_shape, layout)


def rows_for_tma(x: torch.Tensor, sizes: tuple[int, ...] | None = None) -> torch.Tensor:
    """Memory like x, or of these sizes, its rows apart by a multiple of 16 bytes as a descriptor wants.

    What lies between belongs to it: a TMA store may write there, as it ends at a multiple of 16 bytes.
    """
    *outer, last = x.shape if sizes is None else sizes
    step = 16 // x.element_size()
    rows = torch.empty((*outer, triton.cdiv(last, step) * step), dtype=x.dtype, device=x.device)
    return rows[..., :last]


def tma_strides(x: torch.Tensor) -> list[int]:
    """The strides of x in elements as a descriptor takes them: the last is 1, that of a single element 16."""
    return [*(step if size > 1 else 16 for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)), 1]


def launch_with_scratch(device: torch.device, launch: Callable[[], object]) -> None:
    """Call `launch`, whose kernel makes descriptors on the device: each takes 128 bytes of global memory.

    Triton asks an allocator for that memory, and the allocator is a context variable: a copy of the context keeps this
    one to this call, so that the caller's own is left alone.
    """

    def run() -> None:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
        launch()

    contextvars.copy_context().run(run)


def prepare_launch(kernel, programs: int, arguments: tuple, options: dict) -> Callable[[], object]:
    """A function that launches the kernel on these very arguments: which compiled kernel that is, is looked up once.

    The arguments stay alive with it. It launches on the current stream; the current device must be the arguments'.
    """
    if interpreted():
        return lambda: kernel[(programs,)](*arguments, **options)
    compiled = kernel.warmup(*arguments, grid=(programs,), **options)
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    every = [given[name] for name in kernel.arg_names]  # a compiled kernel takes them all, in this order
    launch = compiled[(programs, 1, 1)]
    return lambda: launch(*every)
