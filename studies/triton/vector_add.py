"""vector_add, measured: from which size on memory is its limit, and what a size that 16 does not divide costs.

Triton specializes a kernel on integers that are divisible by 16. Only then does it know that the mask has one value for
all of a 128-bit access; with one element more, each thread loads and stores single elements.
"""

from __future__ import annotations

from harness import Harness, Work

import torch

from examples.triton.vector_add import reference, vector_add


def study(h: Harness) -> None:
    powers = h.pick(interpreted=[12], quick=range(12, 27, 2), full=range(12, 29, 2))
    sizes = [h.fit(1 << power, bytes_each=48) for power in powers]
    tables = [add(h, n, torch.float32, "sizes") for n in sizes]
    if all(tables):
        enough = next((table.case for table in tables if table["triton"].of_ceiling > 0.9), "no size")
        h.say(f"more than 90% of a copy's bandwidth from {enough} on")

    for dtype in (torch.float32, torch.float16):
        divisible, odd = sizes[-1], sizes[-1] + 1
        for n in (divisible, odd):
            x = h.meta(n, dtype=dtype)
            kernels, names = h.codegen(vector_add, x, x, find={90: (), 100: ()}), ("ld.global.v4", "st.global.v4")
            found = {f"sm_{kernel.sm}": {name: kernel.found.get(name, 0) for name in names} for kernel in kernels}
            h.fact(f"128-bit accesses of {n} elements, {dtype}", found)
        wide, narrow = (add(h, n, dtype, "one element more") for n in (divisible, odd))
        if wide and narrow:
            ratio = narrow["triton"].ms / wide["triton"].ms
            h.say(f"{dtype}: with one element more, a thread moves single elements, in {ratio:.2f} times the time")


def add(h: Harness, n: int, dtype: torch.dtype, title: str):
    x, y = h.randn(n, dtype=dtype), h.randn(n, dtype=dtype)
    variants = {"torch": torch.add, "triton": vector_add}
    return h.compare(variants, reference, x, y, baseline="torch", work=Work(bytes=3 * x.nbytes), title=title, terms=0)
