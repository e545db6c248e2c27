"""fused_add_relu_mul, measured: what fusion is worth from tensors that fit in L2 to those that do not, and why.

Far beyond L2 both sides run at about the same bandwidth, and eager moves 7 passes where the fused kernel moves 3. In L2
the difference is what eager's two further kernels cost by themselves. In between, L2 serves a part of eager's passes.
"""

from __future__ import annotations

from harness import Harness, Work

import torch

from examples.triton.fused_add_relu_mul import EAGER_PASSES, FUSED_PASSES, eager, fused_add_relu_mul, reference

SIZES = (2**16, 2**18, 2**20, 2**22, 10_000_000, 2**24, 2**26, 2**28)  # ten million is the chapter's


def study(h: Harness) -> None:
    for n in h.pick(interpreted=[2**12], quick=SIZES[:-1], full=SIZES):
        x, y = (h.randn(h.fit(n, bytes_each=48)) for _ in range(2))
        table = h.compare(
            {"torch": eager, "triton": fused_add_relu_mul}, reference, x, y, 2.0, baseline="torch",
            work=Work(bytes=FUSED_PASSES * x.nbytes), title="sizes", terms=0, roundings=2,
        )  # fmt: skip
        if table and x.is_cuda:
            h.fact(f"why, at {table.case}", why(x, *(table[name].ms for name in ("torch", "triton"))))


def why(x: torch.Tensor, eager_ms: float, fused_ms: float) -> str:
    cache = torch.cuda.get_device_properties(x.device).L2_cache_size
    # Eager holds x, y, x + y and relu's result at once; its last kernel may write where x + y was.
    held = f"eager's {FUSED_PASSES + 1} tensors of {x.nbytes / 2**20:.4g} MiB"
    if (FUSED_PASSES + 1) * x.nbytes < cache:
        further_us = 1000 * (eager_ms - fused_ms)
        return f"{held} fit in {cache / 2**20:.0f} MiB of L2; its two further kernels cost {further_us:.1f} us"
    eager_tbps, fused_tbps = EAGER_PASSES * x.nbytes / eager_ms / 1e9, FUSED_PASSES * x.nbytes / fused_ms / 1e9
    rates = f"it makes {EAGER_PASSES} passes at {eager_tbps:.2f} TB/s, fused {FUSED_PASSES} at {fused_tbps:.2f}"
    return f"{held} do not fit in {cache / 2**20:.0f} MiB of L2; {rates}"
