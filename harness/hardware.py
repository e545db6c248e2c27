"""What this machine is, what it can run, and its own measured ceilings.

Importing this module settles the one thing that cannot wait: without a GPU, TRITON_INTERPRET=1 is set
before triton is imported, because Triton decides at import whether its own library is compiled or
interpreted.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

from harness.catalog import Needs
from harness.interpreter import mend_interpreter

import torch

# Shared memory one block may use, in bytes, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability": the opt-in maximum of one thread block).
SHARED_LIMIT = {
    **dict.fromkeys((80, 87), 163 * 1024),
    **dict.fromkeys((86, 89, 120, 121), 99 * 1024),
    **dict.fromkeys((90, 100, 103, 110), 227 * 1024),
}

# What pins a torch of its own and so cannot stand beside the others: how to have it.
OWN_ENVIRONMENT = {"torch_xla": "`make xla` sets it up in .venv-xla and runs the topic there"}

# Set by the offline compiler's worker, where wrappers run on meta tensors and nothing is launched: the
# architecture that is being compiled for.
OFFLINE_SM: int | None = None

# Set under a sanitizer, where sizes are the interpreter's: with as many SMs as a GPU has, no program of a persistent
# kernel would come to a second tile. The rows of those sizes that are split over programs need five.
FEW_SMS: int | None = None


class Skip(Exception):
    """Raised by a technique that cannot run here; the message is the reason."""


def _choose_interpreter() -> None:
    if find_spec("triton") is None or torch.cuda.is_available():
        return
    if not os.environ.get("TRITON_INTERPRET"):
        if "triton" in sys.modules:
            raise ImportError(
                "harness: triton was imported before harness, so its interpreter can no longer be switched on and "
                "this machine has no GPU; import harness first, or set TRITON_INTERPRET=1 in the environment"
            )
        os.environ["TRITON_INTERPRET"] = "1"


_choose_interpreter()


def interpreted() -> bool:
    """True where Triton kernels run in Triton's interpreter, on the CPU."""
    said = os.environ.get("TRITON_INTERPRET", "").lower()
    return said in ("1", "true", "yes", "on", "y") and find_spec("triton") is not None  # the words triton knows


def autotune_configs(configs: list) -> list:
    """All of them on a GPU; the first in the interpreter, where there is nothing to time and no driver to time it."""
    return configs[:1] if interpreted() else configs


class Limits(NamedTuple):
    """What a wrapper needs to know of a device to choose a grid or a number of stages."""

    sms: int
    shared_bytes: int


def device_limits(device: torch.device) -> Limits:
    """SMs and shared memory per block of a CUDA device, or of the architecture that is compiled for.

    In the interpreter, which has neither, four SMs: persistent kernels then loop, as they do on a GPU. Under a
    sanitizer FEW_SMS, for the same reason.
    """
    if OFFLINE_SM:
        return Limits(132, SHARED_LIMIT[OFFLINE_SM])
    if interpreted():
        return Limits(4, SHARED_LIMIT[90])
    properties = torch.cuda.get_device_properties(device)
    return Limits(FEW_SMS or properties.multi_processor_count, properties.shared_memory_per_block_optin)


@dataclass(frozen=True)
class Machine:
    """The machine as the record of a run names it."""

    gpu: str | None
    capability: tuple[int, int] | None
    sms: int | None
    memory_gib: float | None
    shared_bytes: int | None
    power_limit_w: float | None
    max_clock_mhz: int | None
    driver: str | None
    torch: str
    triton: str | None
    python: str
    cpu: str
    cores: int
    torch_xla: str | None = None

    @property
    def mode(self) -> str:
        """What Triton kernels meet here: "gpu", "interpreted" (on the CPU), or "cpu" (they cannot run)."""
        if interpreted():
            return "interpreted"
        return "gpu" if self.gpu else "cpu"

    @property
    def device(self) -> str:
        return "cuda" if self.mode == "gpu" else "cpu"

    @property
    def sm(self) -> int | None:
        return self.capability[0] * 10 + self.capability[1] if self.capability else None

    def lacks(self, needs: Needs) -> str | None:
        """Why a technique with these needs cannot run here; None when it can."""
        for name, least in needs.packages:
            have = package_version(name)
            if have is None:
                wanted = f"{name}>={least}" if least else name
                linux_only = ", which exists on Linux only" if name == "triton" and sys.platform != "linux" else ""
                return f"needs {wanted} (not installed: {OWN_ENVIRONMENT.get(name, f'pip install {name}')}{linux_only})"
            if least and _numbers(have) < _numbers(least):
                return f"needs {name}>={least} (this is {have})"
        if self.mode != "gpu":
            if needs.gpu:
                return "needs a GPU"
            if needs.triton and self.mode == "cpu":
                return "needs a GPU, or TRITON_INTERPRET=1 to interpret its kernels"
            numpy = package_version("numpy")
            if needs.triton and _numbers(self.triton) < (3, 7) and _numbers(numpy) >= (2, 4):
                return f"needs numpy<2.4, for the interpreter of Triton {self.triton} (this is {numpy})"
            return None
        if needs.sm and self.capability < needs.sm:
            return f"needs sm_{needs.sm[0]}{needs.sm[1]} (this is sm_{self.sm})"
        if needs.gib and self.memory_gib < needs.gib:
            return f"needs {needs.gib:g} GiB of GPU memory (this GPU has {self.memory_gib:.0f})"
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".") if part.isdigit())


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@functools.cache
def _nvml():
    """(pynvml, handle of torch's current device), or None where NVML does not answer."""
    if not torch.cuda.is_available():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception:  # a missing library, driver or permission: numbers are then printed as unknown
        return None


def _ask_nvml(function: str, *args):
    """One NVML number, or None: a virtual machine answers some of them and not others."""
    if (nvml := _nvml()) is None:
        return None
    library, handle = nvml
    try:
        return getattr(library, function)(handle, *args)
    except library.NVMLError:
        return None


def _driver_version() -> str | None:
    if (nvml := _nvml()) is None:
        return None
    text = nvml[0].nvmlSystemGetDriverVersion()
    return text.decode() if isinstance(text, bytes) else text


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def machine() -> Machine:
    """This machine, read once."""
    gpu = capability = sms = memory = shared = power = clock = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu, capability, sms = properties.name, (properties.major, properties.minor), properties.multi_processor_count
        memory = properties.total_memory / 2**30
        shared = properties.shared_memory_per_block_optin
        limit = _ask_nvml("nvmlDeviceGetEnforcedPowerLimit")
        power = limit / 1000 if limit else None
        clock = _ask_nvml("nvmlDeviceGetMaxClockInfo", 1)  # 1: the SM clock
    return Machine(
        gpu=gpu, capability=capability, sms=sms, memory_gib=memory, shared_bytes=shared, power_limit_w=power,
        max_clock_mhz=clock, driver=_driver_version(), torch=torch.__version__, triton=package_version("triton"),
        python=platform.python_version(), cpu=_cpu_name(), cores=os.cpu_count() or 1,
        torch_xla=package_version("torch_xla"),
    )  # fmt: skip


def power_watch() -> Callable[[], float | None]:
    """Start watching; what is returned gives the share of the time since in which the power limit held clocks down.

    NVML counts those nanoseconds itself, so nothing runs beside the measurement. None where it does not say.
    """

    def held_ns() -> int | None:
        status = _ask_nvml("nvmlDeviceGetViolationStatus", 0)  # 0: the power policy
        return status.violationTime if status else None

    before, started = held_ns(), time.perf_counter()

    def share() -> float | None:
        after, seconds = held_ns(), time.perf_counter() - started
        return None if before is None or after is None else (after - before) / 1e9 / seconds

    return share


def enqueue_ms(fn: Callable) -> float:
    """Milliseconds the host needs to launch fn() on an idle GPU, without waiting for it; median of 7."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        started = time.perf_counter()
        fn()
        times.append((time.perf_counter() - started) * 1000)
    torch.cuda.synchronize()
    return statistics.median(times)


@functools.cache
def _flush_ms() -> float:
    """Milliseconds triton's timer needs to empty L2, by overwriting a buffer of 256 MB."""
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    driver.active.clear_cache(cache)
    events[0].record()
    for _ in range(10):
        driver.active.clear_cache(cache)
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 10


def _flushes(enqueue: float) -> int:
    """How often to empty L2 before a call, so that the GPU is still busy with that when the host has launched it."""
    return min(50, math.ceil((2 * enqueue + 0.02) / _flush_ms()))  # twice, and two events: hosts are uneven


def gpu_ms(fn: Callable, warmup: int = 10, rep: int = 50, enqueue: float | None = None) -> list[float]:
    """Times of fn() in ms, cold L2, from triton's own timer (`rep` is a time budget in ms, not a count).

    The timer empties L2, records an event, calls fn and records another. A wrapper whose Python takes longer than the
    GPU is busy with the first step lets it run dry, and then the events measure Python. So L2 is emptied as
    often as the host needs (`enqueue`, in ms, measured when not given) to stay ahead.
    """
    from triton.runtime import driver
    from triton.testing import do_bench

    flushes = _flushes(enqueue_ms(fn) if enqueue is None else enqueue)
    active = driver.active
    flush_once = active.clear_cache

    def flush(cache) -> None:
        for _ in range(flushes):
            flush_once(cache)

    active.clear_cache = flush  # on the object: the class keeps its method, and `del` brings it back
    try:
        return do_bench(fn, warmup=warmup, rep=rep, return_mode="all")
    finally:
        del active.clear_cache


def gpu_round_ms(calls: dict[str, Callable], enqueue: dict[str, float], orders: Iterable[list[str]]) -> list[dict]:
    """The time in ms of each call, cold L2, in rounds: `orders` names the calls of each. One dict a round.

    What triton's timer does for one function (empty L2, event, call, event) for several that are to be put
    next to each other: their calls alternate, so that a GPU that changes its clocks changes them for all. The host
    waits only at the end.
    """
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()
    flushes = {name: _flushes(enqueue[name]) for name in calls}
    rounds = []
    for order in orders:
        rounds.append({name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in order})
        for name, (start, end) in rounds[-1].items():
            for _ in range(flushes[name]):
                driver.active.clear_cache(cache)
            start.record()
            calls[name]()
            end.record()
    torch.cuda.synchronize()
    return [{name: start.elapsed_time(end) for name, (start, end) in each.items()} for each in rounds]


def whole_call_ms(fn: Callable, budget: float) -> list[float]:
    """Times of fn() in ms as a caller in a loop sees them, the host's launching included; `budget` is in ms.

    Three batches of calls back to back, each batch between two synchronizations. Whatever the calls leave in L2 is
    there for the next: meant for models whose weights are larger.
    """

    def batch(calls: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1000 / calls

    calls = max(1, math.ceil(budget / 3 / max(batch(1), 1e-3)))
    return [batch(calls) for _ in range(3)]


class Ceilings:
    """What this GPU really reaches, measured once per process and only when a table asks."""

    def __init__(self) -> None:
        self.copy: float | None = None
        self.gemm: dict[str, float] = {}
        self.launch_us: float | None = None

    def copy_tbps(self) -> float:
        """TB/s of torch's copy, read plus write, the best of 0.5, 1 and 2 GiB (less where memory is short)."""
        if self.copy is None:
            free = torch.cuda.mem_get_info()[0]
            largest = min(2 * 2**30, free // 4) // 4
            source = torch.empty(largest, dtype=torch.float32, device="cuda").normal_()
            target = torch.empty_like(source)
            rates = []
            for n in (largest // 4, largest // 2, largest):
                ms = statistics.median(gpu_ms(lambda n=n: target[:n].copy_(source[:n])))
                rates.append(2 * n * 4 / ms / 1e9)
            self.copy = max(rates)
            del source, target
            torch.cuda.empty_cache()
        return self.copy

    def gemm_tflops(self, dtype: torch.dtype) -> float | None:
        """TFLOP/s of cuBLAS for square GEMMs of this dtype, the best of n = 4096 and 8192, as torch is set now.

        FP8: cuBLASLt's, e4m3 by e4m3 with one scale each and fast accumulation, as every FP8 format has that rate.
        """
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            return self._fp8_tflops()
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return None
        key = str(dtype).removeprefix("torch.")
        if key == "float32" and torch.get_float32_matmul_precision() != "highest":
            key = "tf32"
        if key not in self.gemm:
            rates = []
            for n in (4096, 8192):
                a, b = (torch.empty(n, n, dtype=dtype, device="cuda").normal_() for _ in range(2))
                out = torch.empty_like(a)
                ms = statistics.median(gpu_ms(lambda a=a, b=b, out=out: torch.mm(a, b, out=out)))
                rates.append(2 * n**3 / ms / 1e9)
                del a, b, out
            self.gemm[key] = max(rates)
        return self.gemm[key]

    def _fp8_tflops(self) -> float | None:
        if torch.cuda.get_device_capability() < (8, 9):
            return None
        if "float8" not in self.gemm:
            rates, one = [], torch.ones((), device="cuda")
            for n in (4096, 8192):
                a, b = (torch.empty(n, n, device="cuda").normal_().to(torch.float8_e4m3fn) for _ in range(2))
                options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
                ms = statistics.median(gpu_ms(lambda a=a, b=b, o=options: torch._scaled_mm(a, b.t(), one, one, **o)))
                rates.append(2 * n**3 / ms / 1e9)
                del a, b
            self.gemm["float8"] = max(rates)
        return self.gemm["float8"]

    def launch_floor_us(self) -> float:
        """Microseconds the timer reports for a kernel that does almost nothing."""
        if self.launch_us is None:
            tiny = torch.zeros(32, device="cuda")
            self.launch_us = 1000 * statistics.median(gpu_ms(lambda: tiny.add_(1)))
        return self.launch_us

    def record(self) -> dict:
        return {"copy_tbps": self.copy, "gemm_tflops": dict(self.gemm), "launch_us": self.launch_us}


@functools.cache
def ceilings() -> Ceilings:
    return Ceilings()


def require_triton_device(name: str, *tensors: torch.Tensor) -> None:
    """The checks every wrapper of a forward-only Triton kernel makes first.

    Raises TypeError for an argument that is no tensor, a sparse one and, in the interpreter, for bfloat16 (Triton
    computes it on its uint16 bits there); ValueError for tensors on different devices and for views that negate or
    conjugate lazily, whose memory holds other numbers than they show; RuntimeError for a device
    that cannot run the kernel, or for an input that requires grad where autograd is on.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: a tensor has layout {tensor.layout}; call x.to_dense() first")
        if tensor.is_neg() or tensor.is_conj():
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
    if OFFLINE_SM and device.type == "meta":
        return
    if interpreted():
        mend_interpreter()
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
        raise RuntimeError(f"{name}: tensors are on {device}; move them to a CUDA device, or set TRITON_INTERPRET=1")
    elif device.index != torch.cuda.current_device():
        raise RuntimeError(
            f"{name}: tensors are on {device}, but Triton launches on the current device, "
            f"cuda:{torch.cuda.current_device()}; call it within torch.cuda.device({device.index})"
        )


def require_tma_layout(name: str, **tensors: torch.Tensor) -> None:
    """The checks of a wrapper whose kernel loads its tensors by TMA, after require_triton_device.

    Raises ValueError unless the last dimension is contiguous and the start and all other strides are multiples of 16
    bytes (and no stride is 0). Triton 3.6 and 3.7 assert nearly the same, but name neither the argument nor a way out.
    """
    for label, x in tensors.items():
        if not x.numel():
            continue  # nothing will be loaded
        steps = [step * x.element_size() for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
        contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
        if not contiguous or x.data_ptr() % 16 or any(step % 16 or step == 0 for step in steps):
            raise ValueError(
                f"{name}: {label} has shape {tuple(x.shape)}, strides {x.stride()} and starts {x.data_ptr() % 16} "
                f"bytes past a multiple of 16; TMA needs a contiguous last dimension and 16-byte multiples elsewhere; "
                f"pad the last dimension to a multiple of {16 // x.element_size()} and call {label}.contiguous()"
            )


def tma_descriptor(x: torch.Tensor, block_shape: list[int], padding: str = "zero"):
    """TensorDescriptor.from_tensor for a tensor that passed require_tma_layout; `padding` fills what lies outside it.

    The stride of a dimension of one element is never used, but Triton wants a multiple of 16 bytes even there.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), _tma_strides(x), block_shape, padding)


def gluon_descriptor(x: torch.Tensor, block_shape: list[int]):
    """tma_descriptor for a Gluon kernel; its blocks lie in shared memory as Gluon lays them out by default.

    The kernel finds that layout, which the tensor cores read, as desc.layout.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    like = {1: gl.int8, 2: gl.int16, 4: gl.int32}[x.element_size()]  # the layout depends on the size alone
    layout = gl.NVMMASharedLayout.get_default_for(block_shape, like)
    return TensorDescriptor(x, list(x.shape), _tma_strides(x), block_shape, layout)


def _tma_strides(x: torch.Tensor) -> list[int]:
    return [*(step if size > 1 else 16 for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)), 1]
