"""debugging, the compiler's stages: what one load is at each, which pass made it so, and the switches that show them.

The texts come from harness.codegen.dump, for GPUs that need not be here; with TRITON_DUMP_DIR=folder and
TRITON_KERNEL_DUMP=1 Triton writes them to that folder. Triton's own switches are in triton/knobs.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness
from harness.codegen import STAGES, compile_for, dump
from harness.process import Child, report, result_of

import torch

from examples.triton.debugging import WIDE, require, scale

INSTRUCTION = r"ld\.global[.\w]*"
LOADS = {  # what a load is in the text of each stage
    "ttir": r"tt\.load", "ttgir": r"sizePerThread = \[\d+\]", "llir": INSTRUCTION, "ptx": INSTRUCTION,
    "sass": r"LDG[.\w]*",
}  # fmt: skip


def study(h: Harness) -> None:
    if h.shows_code:
        stages(h)
        switches(h)


def stages(h: Harness) -> None:
    """What one load is at each stage, and why one element more makes it four times as narrow."""
    for sm in (100, 90):
        with h.progress(f"compiling scale for sm_{sm}"):
            wide = dump(scale, (h.meta(WIDE, dtype=torch.float32),), sm=sm)
        for stage, pattern in LOADS.items():
            load = re.search(pattern, wide[stage])
            require(load is not None, f"{stage} has no {pattern}")
            h.fact(f"{stage} for sm_{sm}", f"{len(wide[stage].splitlines())} lines; the load: {load[0]}")
    one_more = dump(scale, (h.meta(WIDE + 1, dtype=torch.float32),), sm=90)
    loads = [re.findall(LOADS["sass"], texts["sass"])[0] for texts in (wide, one_more)]
    hints = [bool(re.search(r"%n_elements: i32 \{tt\.divisibility = 16", texts["ttir"])) for texts in (wide, one_more)]
    require([".128" in load for load in loads] == [True, False], f"loads of 16 bytes and narrower ones: {loads}")
    require(hints == [True, False], f"n_elements divides by 16: {hints}")
    h.fact(f"the load of {WIDE + 1} elements", f"{loads[1]}: in its TTIR n_elements has lost tt.divisibility = 16")


def switches(h: Harness) -> None:
    """What Triton's own switches write, in a process that has them from its start."""
    with TemporaryDirectory(prefix="triton-debugging-", ignore_cleanup_errors=True) as folder:
        env = {
            "TRITON_INTERPRET": "0", "TRITON_KERNEL_DUMP": "1", "TRITON_DUMP_DIR": f"{folder}/dump", "TMPDIR": folder,
            "TRITON_ALWAYS_COMPILE": "1",  # a kernel found in the cache is not dumped
            "MLIR_ENABLE_DUMP": "scale_kernel", "MLIR_DUMP_PATH": f"{folder}/passes.mlir",
        }  # fmt: skip
        with Child(child_compiled, env=env) as child, h.progress("the dump switches"):
            error = result_of(child.output())["error"]
        require(error is None, f"scale did not compile: {error}")
        wrote = sorted(path.suffix[1:] for path in Path(folder).glob("dump/*/scale_kernel.*"))
        require({*STAGES, "cubin"} <= set(wrote), f"TRITON_KERNEL_DUMP wrote {wrote}")
        count, name = passes_of(Path(folder, "passes.mlir").read_text(), r"sizePerThread = \[4\]")
    # The folder's name is a hash of the source and its constants: another num_warps, num_stages or GPU writes over it.
    h.fact("TRITON_KERNEL_DUMP=1, with TRITON_ALWAYS_COMPILE=1, wrote", wrote)
    h.fact("MLIR_ENABLE_DUMP", {"passes": count, "sizePerThread = [4] comes from": name})


def child_compiled() -> None:
    """Compile for a GPU that need not be here, under Triton's own dump switches."""
    (kernel,) = compile_for(scale, (torch.empty(WIDE, device="meta"),), sms=(90,))
    report(error=kernel.error)


def passes_of(text: str, pattern: str) -> tuple[int, str]:
    """How many passes MLIR_ENABLE_DUMP showed, and the first whose output has `pattern`; it prints before each."""
    # A name, then the pass in brackets, or after a colon (Triton 3.9).
    parts = re.split(r"^// -----// IR Dump Before (\w+).*$", text, flags=re.MULTILINE)
    names, bodies = parts[1::2], parts[2::2]
    first = next((i for i, body in enumerate(bodies) if re.search(pattern, body)), 0)
    require(first > 0, f"no pass of {len(names)} introduces {pattern}")
    return len(names), names[first - 1]
