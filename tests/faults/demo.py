"""A technique's demo in a process of its own, its checks alone: generated code would take most of the time.

    python -m tests.faults.demo triton/softmax

Ends as the technique's script would: 0 passed or skipped, 1 failed.
"""

import sys
from importlib import import_module

from harness import cli
from harness.session import Harness

if __name__ == "__main__":
    Harness.shows_code = property(lambda self: False)
    module = import_module("examples." + sys.argv[1].replace("/", "."))
    cli.run(module.demo, ["--check-only"])
