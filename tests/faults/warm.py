"""Modules run in forks of one process that has imported torch and triton: importing is half of a short run.

    python -m tests.faults.warm     a line {"argv": [module, ...], "limit": seconds} in, a line {"status", "output"} out

Without a GPU only: CUDA cannot be forked. Nothing of the tree itself is imported here, since every fault changes it.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from contextlib import suppress

IMPORTS = ("numpy", "torch", "torch.testing", "triton", "triton.language", "rich.console", "pytest", "hypothesis")


def in_fork(argv: list[str], limit: float) -> dict:
    """The exit status of `python -m argv...` in a fork, None when it took too long, and what it printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = os.fork()
        if child == 0:
            os.setsid()
            for number in (1, 2):
                os.dup2(output.fileno(), number)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what is started in the background
            sys.argv = argv
            status = 1
            try:
                runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
                status = 0
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                with suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                    atexit._run_exitfuncs()  # which ends the compiling processes
                os._exit(status & 255)
        done, code, spent, last = 0, 0, 0.0, time.monotonic()
        while not done and spent < limit:
            done, code = os.waitpid(child, os.WNOHANG)
            time.sleep(0.05)
            now = time.monotonic()
            spent, last = spent + min(now - last, 1.0), now  # what is longer somebody has stopped: it does not count
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what the child has left behind
        if not done:
            os.waitpid(child, 0)
        output.seek(0)
        return {"status": os.waitstatus_to_exitcode(code) if done else None, "output": output.read()[-20000:]}


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # as harness does before it imports triton
    answers = os.fdopen(os.dup(1), "w")
    for name in IMPORTS:
        with suppress(ImportError):
            __import__(name)
    for line in sys.stdin:
        answers.write(json.dumps(in_fork(**json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
