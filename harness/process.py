"""A function of a technique file in a process of its own: for switches that are read once, and for tools that crash.

    with Child(child_cold, folder, env={"TORCHINDUCTOR_CACHE_DIR": folder}) as child:
        result = child.result()      # what child_cold handed to report()
        text = child.output()        # all that the process printed, its log messages too

Only what the process is given steers it: torch's and Triton's own switches in the environment are not inherited.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.catalog import ROOT

TIMEOUT_S = 120
# Switches that change what a child shows. Where a toolkit or a library lies is no such switch.
STEERING = re.compile(
    r"TORCH_(LOGS|TRACE|COMPILE|SHOW|STANCE)|TORCHINDUCTOR_|TORCHDYNAMO_|TORCH_DYNAMO_|TORCH_FUNCTORCH|FORCE_DISABLE"
    r"|TRITON_(?!.*_PATH$)|MLIR_|PYTORCH_(NO_CUDA_MEMORY_CACHING|CUDA_ALLOC_CONF|ALLOC_CONF)$"
)


class ChildFailed(RuntimeError):
    """The process ended before it reported a result."""


def report(**result) -> None:
    """Called in the child: its result, as JSON, in one line."""
    print(f"result: {json.dumps(result)}", flush=True)


class Child:
    """function(*args) in a new process; the arguments as JSON. Leaving the `with` kills it and all that it started.

    `before` is a tool that runs it, and `log` the file into which that tool writes: in one pipe, the lines of two
    processes can cut each other in two. `env` are its switches.
    """

    def __init__(
        self,
        function: Callable,
        *args,
        before: tuple[str, ...] = (),
        log: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self.name, self.log, self.timeout, self.text = function.__name__, log, timeout, None
        file = str(Path(function.__code__.co_filename).resolve())
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        inherited = {name: value for name, value in os.environ.items() if not STEERING.match(name)}
        code = f"from harness.process import _child; _child({file!r}, {self.name!r}, {json.dumps(args)!r})"
        self.started = time.perf_counter()
        with interrupts_held():  # Ctrl-C between starting and holding it would leave a child that nobody ends
            self.process = subprocess.Popen(
                [*before, sys.executable, "-c", code],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", env=inherited | {"PYTHONPATH": path} | (env or {}),
                start_new_session=True,  # a group of its own: a tool and the process it watches end together
            )  # fmt: skip

    def output(self) -> str:
        """All that it printed, once it has ended, and what is in its log."""
        if self.text is None:
            try:
                self.text = self.process.communicate(timeout=self.timeout)[0]
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{self.name} has not ended after {self.timeout} s") from None
            self.seconds = time.perf_counter() - self.started
        return self.text + (self.log.read_text(errors="replace") if self.log and self.log.exists() else "")

    def result(self) -> dict:
        """What it reported. Raises ChildFailed, with the end of its output, when it never came to that."""
        return result_of(self.output())

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def result_of(output: str) -> dict:
    reported = re.findall(r"^result: (\{.*\})$", output, re.MULTILINE)
    if len(reported) != 1:
        raise ChildFailed(f"the process ended early; its last words:\n{output[-2000:]}")
    return json.loads(reported[0])


def _child(file: str, function: str, args: str) -> None:
    """What runs in the process."""
    from harness.catalog import load_module

    getattr(load_module(Path(file)), function)(*json.loads(args))


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C within waits for the end of it."""
    if threading.current_thread() is not threading.main_thread():  # there Ctrl-C never arrives
        yield
        return
    asked = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
