"""Study of flash attention: how many programs share an SM, and where their wgmma find the left operand.

In registers or in shared memory: the weights come from registers, and at a head dim of 64 the queries too (the kernel
adds 0 to them). At 128 the queries would spill.
"""

from __future__ import annotations

import itertools
import re

from harness import Harness
from harness.codegen import Kernel, dump

from examples.triton.flash_attention import TILES, flash_attention


def programs_per_sm(kernel: Kernel) -> int:
    """How many programs the registers (65536), shared memory (228 KiB) and threads (2048) of a Hopper SM hold."""
    # Registers are dealt to a warp in units of 256; each program takes 1 KiB of shared memory for the system.
    by_registers = 65536 // (-(-32 * kernel.registers // 256) * 256 * kernel.warps)
    return min(by_registers, 228 * 1024 // (kernel.shared + 1024), 2048 // (32 * kernel.warps))


def left_operands(*args) -> dict[str, int]:
    """How many wgmma of flash_attention(*args) take their left operand from registers, and from shared memory."""
    ptx = dump(flash_attention, args, sm=90)["ptx"]
    first = re.findall(r"wgmma\.mma_async\.sync\.aligned\.\S+\s*\{[^}]*\},\s*(\{|%)", ptx)
    return {"left in registers": first.count("{"), "left in memory": first.count("%")}


def study(h: Harness) -> None:
    code = {}
    for D, causal in itertools.product(TILES, (False, True)):
        x = h.meta(4, 32, 4096, D)
        for kernel in h.codegen(flash_attention, x, x, x, causal, find={90: ("wgmma",)}):
            code[f"head dim {D}{' causal' * causal}"] = {
                "programs/SM": programs_per_sm(kernel), "registers": kernel.registers, "spill bytes": kernel.spills,
                **left_operands(x, x, x, causal),
            }  # fmt: skip
    if code:
        h.table("code for sm_90, and where its wgmma have their left operands", code)
