"""What the ranks of a step send each other, and whether the GPU computes meanwhile, read from torch.profiler."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# Bytes of an element, by the names that the trace has for dtypes; any other counts as 1.
BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2}
# What a rank sends in a ring for each byte that it puts into a collective, times the number of ranks.
RING = {"all_reduce": lambda n: 2 * (n - 1), "all_gather": lambda n: n * (n - 1), "reduce_scatter": lambda n: n - 1}
MARK = "the call that is read"
# Gloo's threads tell the profiler that a call has ended after its waiter goes on: by then its size is not known yet.
SETTLE_S = 0.2
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Trace:
    """One call: `sent` has for each collective how often it was called and the bytes that a rank put into all of them.

    `nccl` and `others` are when NCCL's kernels ran and when others did, in ms from the first of all; empty where there
    is no GPU. The largest input of each call counts, as backends list its outputs too.
    """

    sent: dict[str, tuple[int, int]]
    nccl: Spans
    others: Spans

    @property
    def communicating(self) -> float:
        """Milliseconds of NCCL's kernels, in which they wait for the other ranks too."""
        return length(self.nccl)

    @property
    def overlap(self) -> float:
        """The part of the time of NCCL's kernels that is hidden behind others, 0 to 1."""
        return length(shared(self.nccl, self.others)) / self.communicating if self.nccl else 0.0


def traced(fn: Callable, *args) -> Trace:
    """What the second of two calls of fn(*args) under the profiler does; call it on every rank. In the first, ranks are
    out of step, as the profiler starts. Warm fn up before. Raises RuntimeError where a collective had not ended."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with TemporaryDirectory() as folder:
        with profile(activities=kinds, record_shapes=True, acc_events=True) as held:
            for name in ("first", MARK):
                with record_function(name):
                    fn(*args)
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
            time.sleep(0 if torch.cuda.is_available() else SETTLE_S)
        path = Path(folder, "trace.json")
        held.export_chrome_trace(str(path))
        return read(json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"])


def in_graph(graph: torch.fx.Graph) -> dict[str, tuple[int, int]]:
    """What a compiled graph sends, in the form of Trace.sent: functional collectives and their inputs' bytes."""
    sent: dict[str, tuple[int, int]] = {}
    for node in graph.nodes:
        if match := re.match(r"_c10d_functional\.(all_reduce|all_gather|reduce_scatter)", str(node.target)):
            calls, total = sent.get(match[1], (0, 0))
            sent[match[1]] = calls + 1, total + node.args[0].meta["val"].nbytes
    return sent


def sent_in_ring(sent: dict[str, tuple[int, int]], ranks: int) -> int:
    """The bytes that a rank sends for what in_graph() has found, where each collective is a ring."""
    return sum(total * RING[kind](ranks) // ranks for kind, (_, total) in sent.items())


def in_rings(sent: dict[str, tuple[int, int]], ranks: int) -> dict[str, str]:
    """For each kind of collective, which a backend has under several names, how often it was called and the megabytes
    that a rank sends for all of its calls where it is a ring."""
    told = {}
    for kind in RING:
        found = [(0, 0), *(each for name, each in sent.items() if name.startswith(kind))]
        calls, total = map(sum, zip(*found, strict=True))
        if calls:
            told[kind] = f"{calls}, {sent_in_ring({kind: (calls, total)}, ranks) / 1e6:.1f} MB in all"
    return told


def read(events: list[dict]) -> Trace:
    """What the events of a Chrome trace say: of those within the mark, where there is one."""
    sent: dict[str, tuple[int, int]] = {}
    spans: dict[bool, Spans] = {True: [], False: []}
    marks = [e for e in events if e.get("name") == MARK and e.get("cat") == "user_annotation"]
    for event in events:
        kind, name, args = event.get("cat"), event.get("name", ""), event.get("args", {})
        if kind not in ("user_annotation", "kernel"):
            continue
        if not all(mark["ts"] <= event["ts"] <= mark["ts"] + mark["dur"] for mark in marks):
            continue
        if kind == "kernel":
            spans[name.startswith("ncclDevKernel")].append((event["ts"], event["ts"] + event["dur"]))
        elif match := re.fullmatch(r"(?:nccl|gloo):_?(\w+)", name):
            if not args.get("finished", True):
                raise RuntimeError(
                    f"read: {name} had not ended when the profiler stopped, so its bytes are unknown; run it again"
                )
            sizes = zip(args.get("Input Dims", ()), args.get("Input type", ()), strict=False)
            held = max((_bytes(dims, dtype) for dims, dtype in sizes), default=0)
            calls, total = sent.get(match[1], (0, 0))
            sent[match[1]] = calls + 1, total + held
    first = min((start for each in spans.values() for start, _ in each), default=0)
    nccl, others = (
        [((a - first) / 1e3, (b - first) / 1e3) for a, b in united(spans[which])] for which in (True, False)
    )
    return Trace(sent, nccl, others)


def _bytes(dims: list, dtype: str) -> int:
    whole = dims if all(isinstance(each, int) for each in dims) else ()
    return math.prod(whole) * BYTES.get(dtype, 1) if whole else 0


def united(spans: Spans) -> Spans:
    """The same times without overlaps, in order."""
    out: Spans = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def shared(a: Spans, b: Spans) -> Spans:
    """The times in both; each is in order and has no overlaps."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            out.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def drawn(spans: Spans, gap: float = 0.05) -> list[float]:
    """Starts and ends in turn, as a picture needs them: spans that are less than `gap` ms apart are one."""
    wider = united([(start, end + gap) for start, end in spans])
    return [round(each, 2) for start, end in wider for each in (start, end - gap)]


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
