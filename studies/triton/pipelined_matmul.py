"""pipelined_matmul, in detail: what a stage takes, as predicted and as compiled, and where a further one stops helping.

Predicted and compiled shared memory must agree: the wrapper refuses counts by the prediction. Where the time goes is
estimated from the lesson's own times: with one stage a step contains the whole wait for a load.
"""

from __future__ import annotations

from harness import Harness
from harness.codegen import CodegenError

import triton

from examples.common.device import SHARED_LIMIT, device_limits
from examples.triton.pipelined_matmul import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_NS,
    NUM_WARPS,
    STAGES,
    matmul_pipelined,
    shared_bytes,
    stages_that_fit,
)

TENSOR_CORES = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


def study(h: Harness) -> None:
    fits = {f"sm_{sm}": {f"128x{n}x64": max(stages_that_fit(n, sm, SHARED_LIMIT[sm])) for n in BLOCK_NS}
            for sm in (80, 89, 90, 100, 120)}  # fmt: skip
    h.table(f"stages that fit, of {len(STAGES)}", fits)
    programs = show_code(h)
    for table in h.lesson:
        if table and programs:
            ms = dict(zip(programs, (row.ms for row in table.rows if row.ours), strict=False))
            show_gains(h, int(table.case.split("x")[0]), ms, programs)


def programs_per_sm(shared: int, registers: int, shared_limit: int) -> int:
    """How many programs of 8 warps an SM holds: by shared memory, of which each loses 1 KiB, or by registers."""
    registers_per_program = triton.cdiv(registers, 8) * 8 * 32 * NUM_WARPS  # handed out in eights
    return min((shared_limit + 1024) // (shared + 1024), 65536 // registers_per_program)


def show_code(h: Harness) -> dict[int, int]:
    """What each count of stages compiles to; returns how many of its programs an SM of this GPU holds."""
    x, programs = h.meta(8192, 8192), {}
    here = h.machine.sm if h.machine.sm in SHARED_LIMIT else 90
    for sm in sorted({80, 90, 100, here}):
        rows = {}
        for s in stages_that_fit(128, sm, SHARED_LIMIT[sm]):
            for kernel in h.codegen(matmul_pipelined, x, x, s, find={sm: ("cp.async",) if s > 1 else ()}):
                if kernel.shared != (predicted := shared_bytes(s, 128, sm)):
                    raise CodegenError(
                        f"{s} stages on sm_{sm}: {kernel.shared} bytes of shared memory, predicted {predicted}"
                    )
                room = programs_per_sm(kernel.shared, kernel.registers, SHARED_LIMIT[sm])
                programs |= {s: room} if sm == here else {}
                copies = kernel.found.get("cp.async", 0)
                rows[f"{s} stages"] = {
                    "shared bytes": kernel.shared, "cp.async": copies, "registers": kernel.registers,
                    "programs per SM": room,
                }  # fmt: skip
        h.table(f"128x128x64 on sm_{sm}", rows)
    return programs


def show_gains(h: Harness, n: int, ms: dict[int, float], programs: dict[int, int]) -> None:
    """Whether the wait for a load, estimated from the times, explains where a further stage stops helping."""
    tiles_per_sm = triton.cdiv(triton.cdiv(n, BLOCK_M) * triton.cdiv(n, 128), device_limits(h.device).sms)
    step_ns = {s: 1e6 * t / tiles_per_sm / triton.cdiv(n, BLOCK_K) for s, t in ms.items()}
    least = min(step_ns.values())
    # Programs that share an SM take turns: a step of one lasts as many of the SM's steps. With one stage it contains
    # the whole wait for a load, with s stages a load has s - 1 such steps to arrive.
    turns = {s: min(programs[s], tiles_per_sm) for s in ms}
    wait = max(turns[1] * step_ns[1] - least, 0.0)
    covered = {s: min((s - 1) * turns[s] * least / wait, 9.99) if wait else 1.0 for s in ms}
    rows = {
        f"{s} stages": {"ns per step of an SM": round(step_ns[s]), "programs on it": turns[s],
                        "of a load's wait covered": round(covered[s], 2),
                        "gain over one less": round(ms[s - 1] / ms[s], 2) if s > 1 else ""}
        for s in ms
    }  # fmt: skip
    h.table(f"where the time goes, n = {n}", rows)
    enough = next((f"{s} stages" for s in ms if covered[s] >= 1), f"none of {len(ms)} counts")
    h.say(f"n = {n}: a load of {wait:.0f} ns is covered by {enough} in SM steps of {least:.0f} ns")
