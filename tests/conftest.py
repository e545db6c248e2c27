"""Fixtures for all tests. Harness first: without a GPU it turns Triton's interpreter on before triton is imported.

On a GPU box `pytest -n auto` compiles on all cores; nothing is timed then, and one test at a time gets most of the
memory.
"""

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from harness.catalog import Needs
from harness.hardware import interpreted, machine
from harness.session import Harness

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# The same examples in every run: a failure in CI is the failure at the desk.
settings.register_profile("companion", deadline=None, max_examples=12, derandomize=True)
settings.load_profile("companion")


# A technique file imports what its topic needs, so without it its tests cannot even be collected.
FOLDERS = {"triton": ("common", "triton", "fp8", "tma"), "torch_xla": ("xla",)}
LEFT_OUT = {package: folders for package, folders in FOLDERS.items() if find_spec(package) is None}
collect_ignore_glob = [f"examples/{folder}/*" for folders in LEFT_OUT.values() for folder in folders]
if "triton" in LEFT_OUT:
    collect_ignore_glob.append("test_blackwell_optimizations.py")


def pytest_report_header():
    return [
        f"{package} is not installed: tests/examples/{folder} is left out"
        for package, folders in LEFT_OUT.items()
        for folder in folders
    ]


# What is the same on every machine: the text of the project, its records and pages, the tools that start processes,
# what Dynamo and AOTAutograd do with Python and a graph, and code that is compiled from shapes alone.
OFFLINE = ("companion", "faults", "test_compile_inspect.py", "test_container.py", "test_house.py", "test_order.py")
OFFLINE += ("examples/test_headlines.py", "test_profile_read.py", "test_profiling.py", "test_readme.py")
LOOKED_AT = "aot_autograd", "dynamo_capture", "frame_evaluation", "graph_breaks_phase", "guards", "subject", "triage"
OFFLINE += tuple(f"compile_inspect/test_{phase}.py" for phase in LOOKED_AT)
TOOLS = ("catalog", "codegen", "console", "process", "ranks", "record", "settings", "sources")
OFFLINE += tuple(f"harness/test_{name}.py" for name in TOOLS)
COMPILING = ("harness.codegen", "tests.examples.triton.helpers")
COMPILED_ALONE = ("code", "compile_for", "dump")  # of these modules, in a test that takes no harness


def is_offline(item: pytest.Item) -> bool:
    if item.get_closest_marker("gpu"):
        return False
    place = item.path.relative_to(ROOT / "tests").as_posix()
    if place.startswith(OFFLINE):
        return True
    named = [item.function.__globals__.get(n) for n in COMPILED_ALONE if n in item.function.__code__.co_names]
    return any(getattr(fn, "__module__", "") in COMPILING for fn in named) and "h" not in item.fixturenames


# --- several processes: threads of each would spin while they wait for one that has no core

WORKER, GIB_A_WORKER = "PYTEST_XDIST_WORKER" in os.environ, 6
SHARED = WORKER and machine().mode == "gpu"  # one GPU for all: each compiles on a core of its own
if WORKER:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
if SHARED:
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    if machine().mode == "gpu":
        room = torch.cuda.get_device_properties(0).total_memory // (GIB_A_WORKER * 2**30)
        return int(min(16, room, os.cpu_count()))


def pytest_configure(config):
    """On a GPU tests are handed out one by one, in the order of pytest_collection_modifyitems."""
    if machine().mode == "gpu" and getattr(config.option, "dist", "no") == "load":
        config.option.maxschedchunk = config.option.maxschedchunk or 1


def in_turns(items: list[pytest.Item]) -> list[pytest.Item]:
    """What compiles most first, and what waits for memory spread between the others."""
    large = [item for item in items if "gpu_gib" in item.fixturenames]
    others = sorted(set(items) - set(large), key=lambda item: (not item.get_closest_marker("gpu"), item.nodeid))
    ends = [*itertools.accumulate(10 if item.get_closest_marker("gpu") else 1 for item in others)]  # seconds, about
    place = {item: end / ends[-1] for item, end in zip(others, ends, strict=True)}
    place |= {item: i / len(large) for i, item in enumerate(large)}
    return sorted(place, key=place.__getitem__)


def pytest_collection_modifyitems(items):
    if SHARED:
        items[:] = in_turns(items)
    for item in items:
        if "alone" in item.fixturenames:
            item.add_marker(pytest.mark.timed)
        if is_offline(item):
            item.add_marker(pytest.mark.offline)
        if machine().mode != "gpu" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_terminal_summary(terminalreporter):
    """The ratios that test_blackwell_optimizations.py measured, beside what its TABLE asks."""
    reports = [r for status in ("passed", "failed") for r in terminalreporter.getreports(status) if r.when == "call"]
    rows = [row for report in reports for name, row in report.user_properties if name == "speed"]
    if not rows:
        return
    terminalreporter.section(f"speed on {machine().gpu} (sm_{machine().sm}): ratios measured in this run")
    shown = [["test", "ratio", "measured", "at least", "in TABLE"]]
    for test, ratio, *values in rows:
        shown.append([test, ratio, *("-" if values[i] is None else f"{values[i]:.3f}x" for i in (0, 2, 1))])
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


@pytest.fixture(scope="session", autouse=True)
def bounds():
    """Interpreted kernels touch no memory but that of their tensors."""
    if "triton" in LEFT_OUT or not interpreted():
        yield
        return
    from tests.bounds import checked_bounds

    with checked_bounds():
        yield


@pytest.fixture
def h() -> Harness:
    """A quiet harness for Triton techniques on this machine's device: the GPU, or the interpreter's CPU."""
    from rich.console import Console

    return Harness("test", Needs.parse("triton"), console=Console(quiet=True))


@pytest.fixture
def hopper(h) -> Harness:
    """h, where Gluon's kernels for sm_90 run."""
    if h.interpreted or h.machine.sm != 90:
        pytest.skip("needs sm_90, and Gluon is not interpreted")
    return h


@pytest.fixture
def cli():
    """Run a script as a user would, in a process of its own; returns the finished process."""

    def run(script, *args, cwd=ROOT, timeout=300, **env):
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # each process decides for itself
        return subprocess.run(
            [sys.executable, *map(str, script if isinstance(script, tuple) else (script,)), *map(str, args)],
            capture_output=True, text=True, cwd=cwd, timeout=timeout, env=inherited | {"PYTHONPATH": path} | env,
        )  # fmt: skip

    return run


@pytest.fixture
def alone() -> bool:
    """Whether what is timed here has the GPU to itself: who asks is marked `timed`."""
    return not SHARED


@pytest.fixture(autouse=True)
def memory_for_others():
    yield
    if SHARED:
        with contextlib.suppress(RuntimeError):  # of CUDA, after a device assert
            torch.cuda.empty_cache()


@contextlib.contextmanager
def locked(path: Path):
    """One process at a time."""
    import fcntl  # not on Windows, which has no Triton

    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def gpu_gib():
    """Skip a test that needs more GPU memory than there is: gpu_gib(40). Of several processes one at a time gets it."""
    with contextlib.ExitStack() as held:
        take_turn = functools.cache(lambda: held.enter_context(locked(Path(__file__))))  # twice would wait for itself

        def need(gib: float) -> None:
            if SHARED:
                take_turn()
            for spare in range(20, -1, -1) if SHARED else [0]:  # for tests that need less, which let go of theirs
                free = torch.cuda.mem_get_info()[0] / 2**30
                if free >= gib + spare:
                    return
                time.sleep(2 if spare else 0)
            pytest.skip(f"needs {gib} GiB of GPU memory, {free:.0f} are free")

        yield need
        torch.cuda.empty_cache()
