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
        """The fewest bytes that a device can send, as in a ring; an all-reduce goes around twice."""
        if self.op == "collective-permute":
            return self.bytes
        parts = {"reduce-scatter": self.devices, "all-reduce": 2}.get(self.op, 1)
        return parts * self.bytes * (self.devices - 1) / self.devices


def collectives(text: str) -> Iterator[tuple[str, int, int]]:
    """The collectives in a program's optimized HLO, each as the fields of a Collective, which JSON can hold.

    Pairs of -start and -done, as XLA has them on GPUs and TPUs, are not read.
    """
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
        yield op, devices, size


class Programs:
    """The optimized HLO that XLA dumps into a folder: XLA_FLAGS=--xla_dump_to=folder --xla_dump_hlo_as_text."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, set()

    def new(self) -> list[str]:
        """The HLO of each lazy graph compiled since the last call, without what .cpu() compiles to gather a tensor."""
        found = set(self.folder.glob("*SyncTensorsGraph*after_optimizations.txt")) - self.seen
        self.seen |= found
        return [path.read_text() for path in sorted(found)]


def communication(found: list[tuple], theory: list[tuple[str, int, int]]) -> dict[str, str | int | list[int]]:
    """What a program's collectives send, next to theory: (op, devices, float32 elements of its result)."""

    def ops(found: list[Collective]) -> str:
        return ", ".join(f"{count} {op}" for op, count in Counter(c.op for c in found).items()) or "none"

    found = [Collective(*each) for each in found]
    wanted = [Collective(op, devices, 4 * elements) for op, devices, elements in theory]
    return {
        "collectives": ops(found), "by theory": "the same" if Counter(found) == Counter(wanted) else ops(wanted),
        "bytes": sum(c.bytes for c in found),
        "sent / by theory": [round(sum(c.sent for c in each)) for each in (found, wanted)],
    }  # fmt: skip
