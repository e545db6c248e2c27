"""pipelined_matmul, in detail: what a stage takes, as predicted and as compiled, and where a further one stops helping.

Predicted and compiled shared memory must agree, because the wrapper goes by the prediction when it refuses a count.
Where the time goes is estimated from the lesson's own times: with one stage a step contains the whole wait for a load.
"""

from __future__ import annotations

from harness import Harness
from harness.codegen import CodegenError

import triton

from examples.common.device import SHARED_LIMIT, device_limits
from examples.triton.pipelined_matmul import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    NUM_WARPS,
    matmul_pipelined,
    shared_bytes,
    stages_that_fit,
)


def study(h: Harness) -> None:
    here = h.machine.sm if h.machine.sm in SHARED_LIMIT else 90
    programs = {sm: show_code(h, sm) for sm in sorted({80, 90, 100, here})}[here]
    for table in filter(None, h.lesson):
        if programs:
            ms = dict(zip(programs, (row.ms for row in table.rows if row.ours), strict=False))
            show_gains(h, int(table.case.split("x")[0]), ms, programs)


def programs_per_sm(shared: int, registers: int, shared_limit: int) -> int:
    """How many programs of 8 warps an SM holds: by shared memory, of which each loses 1 KiB, or by registers."""
    registers_per_program = triton.cdiv(registers, 8) * 8 * 32 * NUM_WARPS  # handed out in eights
    return min((shared_limit + 1024) // (shared + 1024), 65536 // registers_per_program)


def show_code(h: Harness, sm: int) -> dict[int, int]:
    """What each count of stages compiles to; returns how many of its programs an SM holds."""
    x, rows, programs = h.meta(8192, 8192), {}, {}
    for s in stages_that_fit(sm, SHARED_LIMIT[sm]):
        for kernel in h.codegen(matmul_pipelined, x, x, s, find={sm: ("cp.async",) if s > 1 else ()}):
            if kernel.shared != (predicted := shared_bytes(s, sm)):
                raise CodegenError(f"{s} stages on sm_{sm}: {kernel.shared} bytes of shared memory, not {predicted}")
            programs[s] = programs_per_sm(kernel.shared, kernel.registers, SHARED_LIMIT[sm])
            rows[f"{s} stage{'s' * (s > 1)}"] = {
                "shared bytes": kernel.shared, "cp.async": kernel.found.get("cp.async", 0),
                "registers": kernel.registers, "programs per SM": programs[s],
            }  # fmt: skip
    h.table(f"128x128x64 on sm_{sm}", rows)
    return programs


def show_gains(h: Harness, n: int, ms: dict[int, float], programs: dict[int, int]) -> None:
    """Whether the wait for a load, estimated from the times, explains where a further stage stops helping."""
    tiles_per_sm = triton.cdiv(triton.cdiv(n, BLOCK_M) * triton.cdiv(n, BLOCK_N), device_limits(h.device).sms)
    step_ns = {s: 1e6 * t / tiles_per_sm / triton.cdiv(n, BLOCK_K) for s, t in ms.items()}
    least = min(step_ns.values())
    # Programs that share an SM take turns: a step of one lasts as many of the SM's steps. With one stage it contains
    # the whole wait for a load, with s stages a load has s - 1 such steps to arrive.
    turns = {s: min(programs[s], tiles_per_sm) for s in ms}
    wait = max(turns[1] * step_ns[1] - least, 0.0)
    enough = next((str(s) for s in ms if (s - 1) * turns[s] * least >= wait), f"more than {max(ms)}")
    h.say(
        f"n = {n}: stages to cover a load of {wait:.0f} ns in SM steps of {least:.0f} ns, by this estimate: {enough}; "
        "the lesson's answer has the count that is best by time"
    )
