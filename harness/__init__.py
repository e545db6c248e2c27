"""The harness: everything a technique file imports besides torch and triton.

    from harness import Harness, Work, run

Import it before triton. Where there is no GPU the harness switches Triton's interpreter on, and triton
reads that switch once, when it is imported. Names are resolved on first use, so that `--list` does not
pay for importing torch.
"""

import atexit
import os
import sys
from importlib import import_module

_HOME = {
    "Harness": "harness.session",
    "Skip": "harness.hardware",
    "Table": "harness.bench",
    "Timing": "harness.bench",
    "Work": "harness.bench",
    "geomean": "harness.bench",
    "interpreted": "harness.hardware",
    "near": "harness.bench",
    "run": "harness.cli",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'harness' has no attribute {name!r}; it has {', '.join(__all__)}")
    import_module("harness.hardware")  # decides about the interpreter before any caller imports triton
    if name == "run":  # a technique file is being imported, or run: in the second case this may be its end
        import_module("harness.cli").skip_without_packages()
    return getattr(import_module(_HOME[name]), name)


@atexit.register  # before anything else is, so that it runs last
def _no_list_of_leaks() -> None:
    """Triton 3.9's bindings (nanobind) list what they find alive when the interpreter ends, in dozens of lines after
    the answer; whether they find anything depends on the order in which modules go."""
    if "triton" in sys.modules and sys.stderr and not sys.stderr.closed:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
