"""The collectives of a program, read from the optimized HLO that XLA dumps, and what they send."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Collective:
    """One collective of a program: the devices of a group, and the bytes of the result that one of them gets."""

    op: str
    devices: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that a device must send at least, which a ring does; an all-reduce goes around twice."""
        others = self.devices - 1
        if self.op == "reduce-scatter":
            return self.bytes * others
        return self.bytes if self.op == "collective-permute" else self.bytes * others / self.devices * self.rounds

    @property
    def rounds(self) -> int:
        return 2 if self.op == "all-reduce" else 1


def collectives(text: str) -> Iterator[Collective]:
    """Those of a program's optimized HLO. Pairs of -start and -done, as XLA has them on GPUs and TPUs, are not read."""
    ops = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for shapes, op, rest in re.findall(rf"^.*? = (\(.*?\)|\S+) ({ops})\((.*)$", text, re.MULTILINE):
        sizes = re.findall(r"([a-z]+)(\d*)\[([\d,]*)\]", shapes)
        size = sum(int(bits or 8) // 8 * math.prod(map(int, filter(None, dims.split(",")))) for _, bits, dims in sizes)
        if op == "collective-permute":
            devices = len(re.search(r"source_target_pairs=\{(\{.*?\})\}", rest)[1].split("},"))
        elif listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
            devices = len(listed[1].split(","))
        else:  # [groups, devices]<=[all]
            devices = int(re.search(r"replica_groups=\[\d+,(\d+)\]", rest)[1])
        yield Collective(op, devices, size)


def cut_sums(text: str) -> int:
    """All-reduced results that are cut afterwards. Fusions may repeat a cut, so the results are counted."""
    bodies = re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    cutting = {name for name, body in bodies if " dynamic-slice(" in body}
    found = set()
    for operands, rest in re.findall(r" (?:fusion|dynamic-slice)\(([^)]*)\)(.*)", text.rpartition("ENTRY")[2]):
        called = re.search(r"calls=%?([\w.-]+)", rest)
        if called is None or called[1] in cutting:
            found |= set(re.findall(r"%(all-reduce[\w.-]*)", operands))
    return len(found)


class Programs:
    """The optimized HLO that XLA dumps into a folder: XLA_FLAGS=--xla_dump_to=folder --xla_dump_hlo_as_text."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, set()

    def new(self) -> list[str]:
        """Of each lazy graph compiled since the last call; what .cpu() compiles to gather a tensor is left out."""
        found = set(self.folder.glob("*SyncTensorsGraph*after_optimizations.txt")) - self.seen
        self.seen |= found
        return [path.read_text() for path in sorted(found)]


def described(text: str) -> dict:
    """What communication() asks for; JSON can hold it."""
    return {
        "collectives": [[c.op, c.devices, c.bytes] for c in collectives(text)],
        "cut sums": cut_sums(text),
    }


def communication(reported: dict, theory: list[tuple[str, int, int]]) -> dict[str, str | int | list[int]]:
    """What a program communicates, next to theory: (op, devices, elements of its result)."""

    def ops(found: list[Collective]) -> str:
        return ", ".join(f"{count} {op}" for op, count in Counter(c.op for c in found).items()) or "none"

    found = [Collective(*each) for each in reported["collectives"]]
    wanted = [Collective(op, devices, 4 * elements) for op, devices, elements in theory]
    return {
        "collectives": ops(found), "by theory": "the same" if Counter(found) == Counter(wanted) else ops(wanted),
        "sums cut": reported["cut sums"], "bytes": sum(c.bytes for c in found),
        "sent / by theory": [round(sum(c.sent for c in each)) for each in (found, wanted)],
    }  # fmt: skip
