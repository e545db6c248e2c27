"""debugging, the compiler's stages: what one load is at each, which pass made it so, and the switches that show them.

The texts come from harness.codegen.dump, for GPUs that need not be here. With TRITON_DUMP_DIR=folder in front of the
command they are kept there. Triton's own switches are listed in triton/knobs.py.
"""

from __future__ import annotations

import os
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
    texts = {}
    for sm in (90, 100):
        with h.progress(f"compiling scale for sm_{sm}"):
            texts[sm] = dump(scale, (h.meta(WIDE, dtype=torch.float32),), sm=sm)
    for stage, pattern in LOADS.items():
        found = {sm: re.search(pattern, text[stage]) for sm, text in texts.items()}
        require(all(found.values()), f"{stage} has no {pattern}")
        for sm, text in texts.items():
            h.fact(f"{stage} for sm_{sm}", f"{len(text[stage].splitlines())} lines; the load: {found[sm][0]}")
    ptx, sass = (re.findall(LOADS[stage], texts[90][stage]) for stage in ("ptx", "sass"))
    require(ptx[0].endswith(".v4.b32") and sass[0].endswith(".128"), f"not 16 bytes at a time: {ptx[0]}, {sass[0]}")

    one_more = dump(scale, (h.meta(WIDE + 1, dtype=torch.float32),), sm=90)
    narrow = re.findall(LOADS["sass"], one_more["sass"])
    hint = r"%n_elements: i32 \{tt\.divisibility = 16"
    require(".128" not in narrow[0], f"{WIDE + 1} elements still load {narrow[0]}")
    require(bool(re.search(hint, texts[90]["ttir"])), "TTIR does not say that n_elements divides by 16")
    require(not re.search(hint, one_more["ttir"]), f"TTIR says that {WIDE + 1} divides by 16")
    h.fact(f"the load of {WIDE + 1} elements", f"{narrow[0]}: in its TTIR n_elements has lost tt.divisibility = 16")
    if folder := os.environ.get("TRITON_DUMP_DIR"):
        for sm, text in texts.items():
            place = Path(folder) / f"sm_{sm}"
            place.mkdir(parents=True, exist_ok=True)
            for stage in STAGES:
                (place / f"scale_kernel.{stage}").write_text(text[stage], encoding="utf-8")
        h.say(f"kept: scale_kernel.{{{','.join(STAGES)}}} in {folder}/sm_90 and {folder}/sm_100")


def switches(h: Harness) -> None:
    """What Triton's own switches write, in a process that has them from its start."""
    with TemporaryDirectory(prefix="triton-debugging-", ignore_cleanup_errors=True) as folder:
        env = {
            "TRITON_INTERPRET": "0", "TRITON_KERNEL_DUMP": "1", "TRITON_DUMP_DIR": f"{folder}/dump", "TMPDIR": folder,
            "TRITON_ALWAYS_COMPILE": "1",  # a kernel found in the cache is not dumped
            "MLIR_ENABLE_DUMP": "scale_kernel", "MLIR_DUMP_PATH": f"{folder}/passes.mlir",
        }  # fmt: skip
        with Child(child_compiled, env=env) as child, h.progress("the dump switches"):
            read_dumps(h, child.output(), Path(folder))


def child_compiled() -> None:
    """Compile for a GPU that need not be here, under Triton's own dump switches."""
    (kernel,) = compile_for(scale, (torch.empty(WIDE, device="meta"),), sms=(90,))
    report(error=kernel.error)


def read_dumps(h: Harness, output: str, folder: Path) -> None:
    error = result_of(output)["error"]
    require(error is None, f"scale did not compile: {error}")
    wrote = {path.suffix[1:]: path for path in folder.glob("dump/*/scale_kernel.*")}
    require({*STAGES, "cubin"} <= set(wrote), f"TRITON_KERNEL_DUMP wrote {sorted(wrote)}")
    # Its instructions: the lines that name places in the source may be switched off, as Inductor does for a process.
    usual = dump(scale, (h.meta(WIDE, dtype=torch.float32),), sm=90)["ptx"]
    same = instructions(wrote["ptx"].read_text()) == instructions(usual)
    require(same, "TRITON_KERNEL_DUMP wrote another PTX than the kernel has")
    # The folder's name is a hash of the source and its constants: another num_warps, num_stages or GPU writes over it.
    h.fact("TRITON_KERNEL_DUMP=1, with TRITON_ALWAYS_COMPILE=1, wrote", sorted(wrote))
    count, name = passes_of((folder / "passes.mlir").read_text(), r"sizePerThread = \[4\]")
    h.fact("MLIR_ENABLE_DUMP", {"passes": count, "sizePerThread = [4] comes from": name})


def instructions(ptx: str) -> list[str]:
    return [line.split("//")[0].strip() for line in ptx.splitlines() if re.match(r"\t[@a-z]", line)]


def passes_of(text: str, pattern: str) -> tuple[int, str]:
    """How many passes MLIR_ENABLE_DUMP showed, and the first whose output has `pattern`; it prints before each."""
    # A name, then the pass in brackets, or after a colon (Triton 3.9).
    parts = re.split(r"^// -----// IR Dump Before (\w+).*$", text, flags=re.MULTILINE)
    names, bodies = parts[1::2], parts[2::2]
    first = next((i for i, body in enumerate(bodies) if re.search(pattern, body)), 0)
    require(first > 0, f"no pass of {len(names)} introduces {pattern}")
    return len(names), names[first - 1]
