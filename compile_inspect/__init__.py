"""Look inside torch.compile: what it compiled, where it broke, why it compiled again, and the code that it wrote.

    from compile_inspect import find_breaks

    for each in find_breaks(model, x).breaks:
        print(each, each.reason, each.lost)

inspect(fn, *inputs), and `python -m compile_inspect.main`, look at a model phase by phase and say what to change first;
the other names, each with a docstring of its own, look at one thing in your code. The package imports torch alone, and
uses torch's private names (a leading underscore) only in the form that torch 2.9 to 2.15 share.
"""

import importlib

from compile_inspect.breaks import ALL, REST, SPLIT, Break, Breaks, find_breaks
from compile_inspect.code import aten_graphs, cuda_graphs_held, generated_code, guards_of, kernels_run
from compile_inspect.entries import Entries, count_entries
from compile_inspect.fresh import fresh_cache, fresh_compiler, own_code, warm_up
from compile_inspect.logs import logs
from compile_inspect.partition import Split, splits
from compile_inspect.watching import Compiled, Frame, watch

__all__ = [
    "ALL", "REST", "SPLIT", "Break", "Breaks", "Compiled", "Entries", "Frame", "Split", "aten_graphs", "count_entries",
    "cuda_graphs_held", "find_breaks", "fresh_cache", "fresh_compiler", "generated_code", "guards_of", "inspect",
    "kernels_run", "logs", "own_code", "splits", "warm_up", "watch",
]  # fmt: skip


def __getattr__(name: str):
    # Imported when it is asked for: a lesson that counts graphs needs none of the phases.
    if name == "inspect":
        return importlib.import_module("compile_inspect.inspecting").inspect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
