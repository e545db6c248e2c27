"""`python -m companion doctor`: what this machine is and reaches, and which techniques run on it."""

from __future__ import annotations

from harness import console as show
from harness.catalog import ROOT, topics
from harness.hardware import ceilings, machine, package_version
from harness.record import git_state

import torch


def doctor() -> int:
    """This machine, its versions and ceilings, and for every technique: runs, interpreted, or why it is skipped."""
    console, this = show.make_console(), machine()
    show.header(console, this.record(), "doctor", *git_state())
    versions = ("numpy", "rich", "nvidia-ml-py", "pytest", "hypothesis", "matplotlib", "torch_xla")
    console.print("  " + "  ".join(f"{name} {package_version(name) or 'not installed'}" for name in versions))
    if this.mode == "gpu":
        with show.progress(console, "measuring this GPU's ceilings"):
            limits = ceilings()
            copy = f"copy {limits.copy_tbps():.2f} TB/s"
            dtypes = (torch.bfloat16, torch.float16, torch.float32)
            gemms = [f"cuBLAS {str(d)[6:]} {limits.gemm_tflops(d):.0f} TFLOP/s" for d in dtypes]
        console.print("  measured: " + ", ".join([copy, *gemms, f"empty launch {limits.launch_floor_us():.1f} us"]))
    table = show.plain_grid()
    for head in ("topic", "technique", "needs", "here"):
        table.add_column(head)
    for topic in topics(ROOT):
        for technique in topic.techniques:
            if technique.error:
                here = f"broken: {technique.error}"
            elif reason := this.lacks(technique.needs):
                here = f"skipped: {reason}"
            elif this.mode == "interpreted" and technique.needs.triton:
                here = "interpreted"
            else:
                here = "runs"
            table.add_row(topic.name, technique.name, technique.needs.text, here)
    show.show_grid(console, table)
    return 0
