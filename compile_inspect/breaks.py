"""Graph breaks: the line of the user's own code, torch's reason, and what is left to eager there."""

from __future__ import annotations

import inspect
import linecache
import re
import sysconfig
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compile_inspect.logs import logs
from compile_inspect.watching import require_uncompiled, watch

SPLIT, REST, ALL = "only fusion", "the rest of the function", "the whole function"
# How torch's log begins a break that it cannot resume from; any other leaves two graphs.
SEVERITY = {"Failed to handle graph break gracefully": ALL, "Encountered graph break that we cannot resume": REST}
NOT_THE_USERS = tuple(str(Path(path).resolve()) for path in {Path(torch.__file__).parent, sysconfig.get_path("stdlib")})


@dataclass(frozen=True)
class Break:
    """A graph break: the innermost line of the user's own code, torch's reason, and what is left to eager there."""

    file: str
    line: int
    reason: str
    lost: str

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}: {self.source}"


@dataclass(frozen=True)
class Breaks:
    """What Dynamo made of one call: graphs, the operations in them together, and the breaks between them."""

    graphs: int
    operations: int
    breaks: list[Break]


def _parse(record: str) -> tuple[tuple[str, int], Break]:
    """Where torch says that it broke, which may be deep in a library that Dynamo followed, and the break."""
    head = re.search(r"in user code at (.+):(\d+)", record)
    at = (head[1], int(head[2]))
    reason = re.search(r"Graph Break Reason: (.*)", record)[1]
    lost = next((lost for words, lost in SEVERITY.items() if reason.startswith(words)), SPLIT)
    if lost != SPLIT or reason.startswith("Encountered graph break when"):  # the reason itself is the next paragraph
        reason = record.split(reason, 1)[1].strip().splitlines()[0]
    if reason.endswith("(delayed)") and (why := re.search(r"Explanation: .*?Reason: (.+)", record)):
        reason = why[1]
    _, _, stack = record.partition("User code traceback:")
    frames = [
        (file, int(line))
        for file, line in re.findall(r'File "(.+)", line (\d+)', stack.rpartition("in find_breaks")[2])
        if not str(Path(file).resolve()).startswith(NOT_THE_USERS)
    ]
    return at, Break(*(frames[-1] if frames else at), reason, lost)


def find_breaks(fn: Callable, *inputs, **keywords) -> Breaks:
    """Compile fn from nothing for backend eager, call it once, and report what torch's log says that Dynamo made of it.

    Unlike torch._dynamo.explain it counts breaks that Dynamo cannot resume from. Raises TypeError for what cannot be
    called, ValueError for a function that is compiled already and for a generator function, and what fn raises.
    """
    require_uncompiled("find_breaks", fn)
    if inspect.isgeneratorfunction(fn):
        raise ValueError(
            f"find_breaks: {fn.__name__} is a generator function, which torch.compile runs eagerly as a whole; "
            "compile a function that calls it"
        )
    torch.compiler.reset()
    with watch() as seen, logs(graph_breaks=True) as records, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of calls that Dynamo does not know: the log has them too
        torch.compile(fn, backend="eager")(*inputs, **keywords)
    torch.compiler.reset()
    breaks: dict[tuple[str, int], Break] = {}
    for artifact, text in records:
        if artifact == "graph_breaks":
            at, found = _parse(text)
            # One that cannot be resumed from may be logged twice, the second time with what is lost, without the stack.
            breaks[at] = replace(breaks[at], lost=found.lost) if at in breaks else found
    return Breaks(seen.graphs, seen.counters.get("stats", {}).get("calls_captured", 0), list(breaks.values()))
