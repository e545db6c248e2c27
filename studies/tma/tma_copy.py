"""Study of tma_copy: every variant and its code, the ring with more bytes in flight, and where stores end.

1. sm_90's code: what a thread holds, and whether tiles go through it.
2. Every variant on whole and ragged matrices.
3. The ring with more and more bytes in flight: what Little's law asks for.
4. A copy into the middle of a poisoned matrix, an output that tma_copy itself would refuse. In a row a TMA store ends
   at the next multiple of 16 bytes; pointers, the interpreter, and Triton's code for GPUs without TMA at the element.
"""

from __future__ import annotations

import functools
import re

from harness import Harness
from harness.check import CheckError
from harness.codegen import dump

import torch

from examples.common.device import device_limits
from examples.common.tma import rows_for_tma
from examples.tma.tma_copy import compare, launch_copy, tma_copy
from examples.tma.tma_copy_triton import PLANS, VARIANTS, Plan, kib_in_flight, runnable

THROUGH_REGISTERS = re.compile(r"\b(?:ld|st)\.shared\.v\d")  # of a tile; barriers are single words
DEPTHS = [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (6, 2), (12, 1)]  # stages, and programs on an SM


def padded(h: Harness, M: int, N: int, dtype: torch.dtype) -> torch.Tensor:
    """An M x N matrix whose rows are a multiple of 16 bytes apart, and its padding poison."""
    x = rows_for_tma(torch.empty(M, N, dtype=dtype, device=h.device))
    if x.numel():
        x.as_strided((M, x.stride(0)), x.stride()).fill_(float("nan"))
    return x.copy_(h.randn(M, N, dtype=dtype))


def copy_each(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A copy of x by every variant that can run here."""
    return tuple(tma_copy(x, variant) for variant in runnable())


def show_code(h: Harness) -> None:
    x, find = h.meta(16384, 16384, dtype=torch.float16), ("cp.async.bulk.tensor", "mbarrier")
    table = {
        variant: {
            "registers": kernel.registers,
            "shared bytes": kernel.shared,
            "TMA instructions": kernel.found.get("cp.async.bulk.tensor", 0),
            "shared loads and stores": len(THROUGH_REGISTERS.findall(dump(tma_copy, (x, variant), sm=90)["ptx"])),
        }
        for variant, kernel in zip(VARIANTS, h.codegen(copy_each, x, find={90: (*find, "ld.global.v4")}), strict=False)
    }
    h.table("each variant on sm_90; a loop's instructions counted once", table)


def show_depth(h: Harness, x: torch.Tensor) -> None:
    """Until memory is busy, the rate of the ring is its bytes in flight over the latency."""
    plans = {f"ring {stages} x {n}": PLANS["ring"]._replace(stages=stages, programs=n) for stages, n in DEPTHS}
    ours = {name: functools.partial(tma_copy, variant="ring", plan=plan) for name, plan in plans.items()}
    table = compare(h, x, ours, title="bytes in flight", default=next(reversed(ours)))
    if not table:
        return
    rows, limit = {}, device_limits(h.device).shared_bytes
    for name, plan in plans.items():
        kib, tbps = kib_in_flight("ring", plan, limit), table[name].tbps
        # The loads are half of the bytes that a copy moves.
        ns = round(1024 * kib * h.machine.sms / (tbps / 2) / 1e3)
        rows[name] = {"KiB of loads in flight": kib, "TB/s": round(tbps, 3), "ns a load takes": ns}
    h.table(f"bytes in flight in an SM and what they give, {table.case}", rows)
    most = max(row["TB/s"] for row in rows.values())
    shortest = min(row["ns a load takes"] for row in rows.values())
    enough = min(row["KiB of loads in flight"] for row in rows.values() if row["TB/s"] > 0.97 * most)
    h.say(
        f"{enough} KiB in flight are within 3 % of the most, {most:.2f} TB/s; with the shortest latency here, "
        f"{shortest} ns, Little's law asks for {most / 2 * 1e3 * shortest / h.machine.sms / 1024:.0f} KiB"
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def up_to_16_bytes(x: torch.Tensor) -> int:
    """Elements between the rows of x and the next multiples of 16 bytes: what a TMA store may write outside."""
    return x.shape[0] * (-x.shape[1] % (16 // x.element_size()))


def written_beside(x: torch.Tensor, variant: str, margin: int = 16, plan: Plan | None = None) -> int:
    """Elements that a copy into the middle of a larger, poisoned matrix writes between its rows and 16 bytes.

    x is read from the middle of another, of which nothing else may arrive. CheckError for a wrong element inside, for
    one written elsewhere, and for any outside that pointers wrote.
    """
    M, N = x.shape
    end = N + up_to_16_bytes(x[:1])
    whole = M + 2 * margin, end + 2 * margin
    around, canvas = torch.full(whole, 7.0, dtype=x.dtype, device=x.device), x.new_full(whole, float("nan"))
    middle = slice(margin, margin + M), slice(margin, margin + N)
    around[middle] = x
    before = bits(canvas).clone()
    if x.numel():
        launch_copy(around[middle], canvas[middle], variant, plan or PLANS[variant])
    after, wanted = bits(canvas), bits(around)
    if wrong := int((after[middle] != wanted[middle]).sum()):
        raise CheckError(f"tma_copy {variant}: {wrong} elements are not those of x")
    changed = after != before
    changed[middle] = False
    beside, outside = int(changed[middle[0], margin + N : margin + end].sum()), int(changed.sum())
    if outside > beside or (variant == "pointers" and beside):
        raise CheckError(f"tma_copy {variant} wrote outside its output: {outside} elements, {beside} within 16 bytes")
    return beside


def study(h: Harness) -> None:
    show_code(h)
    if not h.profile:
        x = h.randn(101, 203, dtype=torch.float16)
        beside = {variant: {"elements": written_beside(x, variant)} for variant in runnable()}
        h.table(f"written into the {up_to_16_bytes(x)} elements between the ends of rows and 16 bytes", beside)
    small = h.interpreted or not (h.timing or h.profile)  # nothing to time
    cases = h.pick(quick=[(4096, 4096)], full=[(16384, 16384), (4096, 4096), (16381, 16371)])
    ours = {variant: functools.partial(tma_copy, variant=variant) for variant in runnable()}
    for M, N in [(133, 261)] if small else cases:
        compare(h, padded(h, h.fit(M, bytes_each=30 * N), N, torch.float16), ours, title="every variant")
    if "ring" in runnable():
        n = 128 if small else h.pick(quick=4096, full=16384)
        show_depth(h, padded(h, h.fit(n, bytes_each=30 * n), n, torch.float16))
