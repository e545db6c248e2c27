"""Where the seconds of a compilation go: torch's compile-time events, as parts that do not overlap."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch._dynamo.utils import ChromiumEventLogger

# torch's compile-time events by how their names begin; one that is not listed belongs to the part that it lies in.
PARTS = {
    "Dynamo": ("dynamo", "entire_frame_compile"),
    "AOTAutograd": ("create_aot_dispatcher_function", "aot_"),
    "Inductor: graph passes": ("_recursive_", "additional_fake_tensor_prop"),
    "Inductor: lowering": ("compile_fx", "inductor_compile", "fx_codegen", "GraphLowering.run", "entire_backward"),
    "Inductor: scheduling": ("Scheduler.__init__",),
    "code generation": ("code_gen", "GraphLowering.co", "Scheduler.codegen"),
    "C++ or Triton compiler": ("async_compile", "PyCodeCache", "CachingAutotuner", "TritonBundler", "compile_file"),
}


@contextmanager
def seconds_by_part() -> Iterator[dict[str, float]]:
    """Seconds of each of PARTS in what is compiled within, each without the parts that lie in it."""
    spent, stacks, main = dict.fromkeys(PARTS, 0.0), defaultdict(list), threading.get_ident()
    starts, ends = ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end

    def start(self, name, ns, *rest, **more):
        stack = stacks[threading.get_ident()]
        outer = stack[-1][0] if stack else None
        stack.append([next((part for part, names in PARTS.items() if name.startswith(names)), outer), ns, 0])
        return starts(self, name, ns, *rest, **more)

    def end(self, name, ns, *rest, **more):
        stack = stacks[threading.get_ident()]
        if stack:
            part, since, inner = stack.pop()
            if stack:
                stack[-1][2] += ns - since
            # Threads that run the C++ compiler, which the main thread waits for, are not counted twice.
            if part and (stack or name != "compile_file" or threading.get_ident() == main):
                spent[part] += (ns - since - inner) / 1e9
        return ends(self, name, ns, *rest, **more)

    with patch.multiple(ChromiumEventLogger, log_event_start=start, log_event_end=end):
        yield spent
