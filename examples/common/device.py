"""What a wrapper asks of its device before it launches: may the kernel run there, and how large may its grid be."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from examples.common.interpreter import mend_interpreter

# Shared memory one block may use, in bytes, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability": the opt-in maximum of one thread block).
SHARED_LIMIT = {
    **dict.fromkeys((80, 87), 163 * 1024),
    **dict.fromkeys((86, 89, 120, 121), 99 * 1024),
    **dict.fromkeys((90, 100, 103, 110), 227 * 1024),
}

# Set under a sanitizer, where sizes are the interpreter's: with as many SMs as a GPU has, no program of a persistent
# kernel would reach a second tile.
FEW_SMS: int | None = None

INTERPRETED = triton.knobs.runtime.interpret  # as @triton.jit reads it; torch.compile cannot trace the knob
if INTERPRETED:
    mend_interpreter()


class Limits(NamedTuple):
    """What a wrapper needs to know of a device to choose a grid or a number of stages; shared memory in bytes."""

    sms: int
    shared_bytes: int


def interpreted() -> bool:
    """True where Triton kernels run in Triton's interpreter, on the CPU."""
    return INTERPRETED


def autotune_configs(configs: list) -> list:
    """All of them on a GPU; the first in the interpreter, where there is nothing to time and no driver to time it."""
    return configs[:1] if interpreted() else configs


def compiling_for() -> int | None:
    """The architecture (90 for sm_90) where kernels are compiled and never launched, on meta tensors; else None.

    A driver that only compiles says so: `compile_only` (harness/codegen.py has one).
    """
    try:
        active = triton.runtime.driver.active
    except RuntimeError:  # no GPU, and nothing in its place
        return None
    return active.get_current_target().arch if getattr(active, "compile_only", False) else None


def architecture(device: torch.device) -> int:
    """90 for sm_90: of a CUDA device, or what is compiled for. In the interpreter, which is neither, 90."""
    if device.type == "cuda":
        return _properties(torch.cuda.current_device() if device.index is None else device.index)[0]
    return (device.type == "meta" and compiling_for()) or 90


def device_limits(device: torch.device) -> Limits:
    """SMs and shared memory per block of a CUDA device, or of the architecture that is compiled for.

    In the interpreter, which has neither, four SMs: persistent kernels then loop, as they do on a GPU. Under a
    sanitizer FEW_SMS, for the same reason.
    """
    if device.type == "cuda":
        _, sms, shared = _properties(torch.cuda.current_device() if device.index is None else device.index)
        return Limits(FEW_SMS or sms, shared)
    if device.type == "meta" and (sm := compiling_for()):
        return Limits(132, SHARED_LIMIT[sm])
    return Limits(4, SHARED_LIMIT[90])


def sms_to_wait_on(device: torch.device) -> int:
    """SMs that programs waiting for each other may count on, an eighth: NCCL or another stream may hold the rest."""
    return max(1, device_limits(device).sms // 8)


def _properties(index: int) -> tuple[int, int, int]:
    # torch.compile warns of a cache that it traces through.
    return (_read_properties.__wrapped__ if torch.compiler.is_compiling() else _read_properties)(index)


@functools.cache
def _read_properties(index: int) -> tuple[int, int, int]:
    found = torch.cuda.get_device_properties(index)
    return found.major * 10 + found.minor, found.multi_processor_count, found.shared_memory_per_block_optin


def require_triton_device(name: str, *tensors: torch.Tensor) -> None:
    """The checks every wrapper of a forward-only Triton kernel makes first.

    Raises TypeError for an argument that is no tensor, a sparse one and, in the interpreter, for bfloat16 (Triton
    computes it on its uint16 bits there); ValueError for tensors on different devices and for views that negate or
    conjugate lazily, whose memory holds other numbers than they show; RuntimeError for a device that cannot run the
    kernel, or for an input that requires grad where autograd is on.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: a tensor has layout {tensor.layout}; call x.to_dense() first")
        # torch.compile cannot trace this question.
        if not torch.compiler.is_compiling() and (tensor.is_neg() or tensor.is_conj()):
            raise ValueError(f"{name}: a tensor is a lazy negation or conjugate; call x.resolve_neg().resolve_conj()")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"{name}: tensors are on {', '.join(sorted(map(str, devices)))}; move them to one device")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            f"{name}: an input requires grad and this kernel has no backward; "
            "pass x.detach() or call it under torch.no_grad()"
        )
    device = devices.pop() if devices else torch.device("cpu")
    if device.type == "meta" and compiling_for():
        return
    if interpreted():
        if device.type != "cpu":
            raise RuntimeError(
                f"{name}: TRITON_INTERPRET=1 runs kernels on the CPU, got a tensor on {device}; unset it"
            )
        if any(tensor.dtype is torch.bfloat16 for tensor in tensors):
            raise TypeError(
                f"{name}: Triton's interpreter computes bfloat16 wrongly (triton issue 11584); "
                "use float16 or float32 here, or a GPU"
            )
    elif device.type != "cuda":
        raise RuntimeError(
            f"{name}: tensors are on {device}; move them to a CUDA device, or set "
            "TRITON_INTERPRET=1 before triton is imported"
        )
    elif device.index != torch.cuda.current_device():
        raise RuntimeError(
            f"{name}: tensors are on {device}, but Triton launches on the current device, "
            f"cuda:{torch.cuda.current_device()}; call it within torch.cuda.device({device.index})"
        )
