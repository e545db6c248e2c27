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

from harness.catalog import Needs
from harness.ranks import align, gathered

import torch

# What pins a torch of its own and so cannot stand beside the others: how to have it.
OWN_ENVIRONMENT = {"torch_xla": "`make xla` sets it up in .venv-xla and runs the topic there"}


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

    def record(self) -> dict:
        """As JSON, with what waits for the host apart: its cores decide what a launch costs."""
        held = {**vars(self), "mode": self.mode}
        return held | {"host": {name: held.pop(name) for name in ("cpu", "cores")}}

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
def _l2_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


class _Flush:
    """Empties L2 by reading 256 MB (four times L2 where that is more), then leaves lines in it that are not yet in
    memory: as many as a call that writes `written` bytes, so that such a call pays for those it finds and not for those
    that it leaves. After a flush that only writes, a kernel that only reads would pay for up to all of L2.
    """

    def __init__(self, written: int) -> None:
        size = max(256 * 2**20, 4 * _l2_bytes())
        self.cache = torch.zeros(4096, size // 4 // 4096, device="cuda")
        self.sums = torch.empty(4096, device="cuda")
        self.dirty = self.cache.view(-1)[: min(written, _l2_bytes()) // 4]

    def __call__(self) -> None:
        torch.sum(self.cache, 1, out=self.sums)
        if self.dirty.numel():
            self.dirty.zero_()


@functools.cache
def _flush_ms() -> float:
    """Milliseconds it takes at least to empty L2."""
    flush = _Flush(written=0)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    flush()
    events[0].record()
    for _ in range(10):
        flush()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 10


def _flushes(enqueue: float) -> int:
    """How often to empty L2 before a call, so that the GPU is still busy with that when the host has launched it."""
    return min(50, math.ceil((2 * enqueue + 0.02) / _flush_ms()))  # twice, and two events: hosts are uneven


def written_bytes(result) -> int:
    """The bytes of the tensors that a call returned, one or a tuple of them."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return sum(x.nbytes for x in results if isinstance(x, torch.Tensor))


def gpu_busy_ms(fn: Callable, enqueue: float) -> float:
    """The GPU's part of a call of fn(), in ms: its kernels as they follow each other when the host is ahead.

    Median of 5. The GPU sleeps while the host launches (`enqueue`, in ms). A call that waits for the GPU itself cannot
    be launched ahead: the host's part after that wait counts as the GPU's.
    """
    cycles = int((machine().max_clock_mhz or 2000) * 1000 * (2 * enqueue + 0.1))
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def gpu_round_ms(
    calls: dict[str, Callable], enqueue: float, orders: Iterable[list[str]], written: int = 0
) -> list[dict[str, float]]:
    """The time in ms of each call, cold L2, in rounds: `orders` names the calls of each. One dict a round.

    What triton's timer does for one function (empty L2, event, call, event) for several that are to be put
    next to each other: their calls alternate, so that a GPU that changes its clocks changes them for all. L2 is emptied
    as often as the host needs to stay ahead of the GPU, else the events would measure Python; it waits only at the end.
    `enqueue` is the longest launch in ms: before every call there are as many flushes, whose power counts. `written` is
    what a call writes, in bytes: see _Flush.
    """
    flush, flushes = _Flush(written), _flushes(enqueue)
    rounds = []
    for order in orders:
        rounds.append({name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in order})
        for name, (start, end) in rounds[-1].items():
            for _ in range(flushes):
                flush()
            align()
            start.record()
            calls[name]()
            end.record()
    torch.cuda.synchronize()
    return [{name: start.elapsed_time(end) for name, (start, end) in each.items()} for each in rounds]


def gpu_ms(fn: Callable) -> float:
    """The time of fn() in ms, cold L2: the median of 50 calls, after 10 that warm it up."""
    rounds = gpu_round_ms({"": fn}, enqueue_ms(fn), [[""]] * 60, written_bytes(fn()))
    return statistics.median(each[""] for each in rounds[10:])


def whole_call_ms(fn: Callable, budget: float) -> list[tuple[float, float]]:
    """Times of fn() in ms as a caller in a loop sees them, and of these what the host takes to launch it; `budget` is
    in ms.

    Three batches of calls back to back, each batch between two synchronizations. Whatever the calls leave in L2 is
    there for the next: meant for models whose weights are larger.
    """

    def batch(calls: int) -> tuple[float, float]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            fn()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1000 / calls, (launched - started) * 1000 / calls

    calls = max(1, math.ceil(budget / 3 / max(*gathered(batch(1)[0]), 1e-3)))
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
            largest = min(2 * 2**30, torch.cuda.mem_get_info()[0] // 4) // 4
            source = torch.empty(largest, dtype=torch.float32, device="cuda").normal_()
            target = torch.empty_like(source)
            sizes = (largest // 4, largest // 2, largest)
            self.copy = max(2 * n * 4 / gpu_ms(lambda n=n: target[:n].copy_(source[:n])) / 1e9 for n in sizes)
            del source, target
            torch.cuda.empty_cache()
        return self.copy

    def gemm_tflops(self, dtype: torch.dtype) -> float | None:
        """TFLOP/s of cuBLAS for square GEMMs of this dtype, the best of n = 4096 and 8192, as torch is set now.

        FP8: cuBLASLt's, e4m3 by e4m3 with one scale each and fast accumulation, as every FP8 format has that rate.
        """
        key = str(dtype).removeprefix("torch.")
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and torch.cuda.get_device_capability() >= (8, 9):
            key, dtype = "float8", torch.float8_e4m3fn
        elif dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return None
        elif dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
            key = "tf32"
        if key not in self.gemm:
            self.gemm[key] = max(2 * n**3 / self._gemm_ms(n, dtype) / 1e9 for n in (4096, 8192))
        return self.gemm[key]

    def _gemm_ms(self, n: int, dtype: torch.dtype) -> float:
        a, b = (torch.empty(n, n, device="cuda").normal_().to(dtype) for _ in range(2))
        if dtype.itemsize > 1:
            out = torch.empty_like(a)
            return gpu_ms(lambda: torch.mm(a, b, out=out))
        one, options = torch.ones((), device="cuda"), {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return gpu_ms(lambda: torch._scaled_mm(a, b.t(), one, one, **options))

    def launch_floor_us(self) -> float:
        """Microseconds the timer reports for a kernel that does almost nothing."""
        if self.launch_us is None:
            tiny = torch.zeros(32, device="cuda")
            self.launch_us = 1000 * gpu_ms(lambda: tiny.add_(1))
        return self.launch_us

    def record(self) -> dict:
        return {"copy_tbps": self.copy, "gemm_tflops": dict(self.gemm), "launch_us": self.launch_us}


@functools.cache
def ceilings() -> Ceilings:
    return Ceilings()
