"""A function of a technique file in a process of its own: for switches that are read once, and for tools that crash.

    with Child(child_cold, folder, env={"TORCHINDUCTOR_CACHE_DIR": folder}) as child:
        result = child.result()      # what child_cold handed to report()
        text = child.output()        # all that the process printed, its log messages too

Only what the process is given steers it: torch's and Triton's own switches in the environment are not inherited. Where
their caches are is inherited, like every other folder: a user chose it because the default cannot be written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.catalog import ROOT, load_module

TIMEOUT_S = 120
# Switches that change what a child shows. Where a toolkit, a library or a cache lies is no such switch.
STEERING = re.compile(
    r"TORCH_(LOGS|TRACE|COMPILE|SHOW|STANCE)|TORCHINDUCTOR_(?!CACHE_DIR$)|TORCHDYNAMO_|TORCH_DYNAMO_|TORCH_FUNCTORCH"
    r"|FORCE_DISABLE|TRITON_(?!.*_PATH$|CACHE_DIR$|HOME$)|MLIR_"
    r"|PYTORCH_(NO_CUDA_MEMORY_CACHING|CUDA_ALLOC_CONF|ALLOC_CONF)$|XLA_|PT_XLA_|CPU_NUM_DEVICES$"
)


class ChildFailed(RuntimeError):
    """The process ended before it reported a result."""


def report(**result) -> None:
    """Called in the child: its result, as JSON, in one line."""
    print(f"result: {json.dumps(result)}", flush=True)


class Child:
    """function(*args) in a new process; the arguments as JSON. Leaving the `with` kills it and all that it started.

    `function` stands at the top level of its file, which the process loads. `before` is a tool that runs it, and `log`
    the file into which that tool writes: in one pipe, the lines of two processes can cut each other in two. `env` are
    its switches (None: without it), `timeout` the seconds that output() waits.
    """

    def __init__(
        self, function: Callable, *args, before: tuple[str, ...] = (), log: Path | None = None,
        env: dict[str, str | None] | None = None, timeout: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        self.name, self.log, self.timeout, self.text = function.__name__, log, timeout, None
        file = str(Path(function.__code__.co_filename).resolve())
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        inherited = {name: value for name, value in os.environ.items() if not STEERING.match(name)}
        given = inherited | {"PYTHONPATH": path} | (env or {})
        environment = {name: value for name, value in given.items() if value is not None}
        code = f"from harness.process import _child; _child({file!r}, {self.name!r}, {json.dumps(args)!r})"
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", code],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environment,
            start_new_session=True,  # a group of its own: a tool and the process it watches end together
        )  # fmt: skip
        # Also when Ctrl-C comes in before the `with` has begun, and at the end of this process.
        self._end = weakref.finalize(self, _end, self.process)

    def output(self) -> str:
        """All that it printed, once it has ended, and what is in its log."""
        if self.text is None:
            try:
                self.text = self.process.communicate(timeout=self.timeout)[0]
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{self.name} has not ended after {self.timeout} s") from None
        return self.text + (self.log.read_text(errors="replace") if self.log and self.log.exists() else "")

    def result(self) -> dict:
        """result_of() its output."""
        return result_of(self.output())

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception) -> None:
        self._end()


def _end(process: subprocess.Popen) -> None:
    # The group outlives its first process as long as another one runs; macOS has no permission to kill the dead.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def result_of(output: str) -> dict:
    """What the process that printed this reported. Raises ChildFailed, with its last words, when it did not."""
    reported = re.findall(r"^result: (\{.*\})$", output, re.MULTILINE)
    if len(reported) != 1:
        raise ChildFailed(f"the process ended early; its last words:\n{output[-2000:]}")
    return json.loads(reported[0])


def _child(file: str, function: str, args: str) -> None:
    """What runs in the process."""
    getattr(load_module(Path(file)), function)(*json.loads(args))
