"""What docs/running.md says of registers that spill on sm_90: Triton 3.9 asks its assembler for less than it can do."""

import re
import subprocess

from harness.codegen import dump

import pytest

from examples.triton.flash_attention import flash_attention
from tests.examples.triton.helpers import BEFORE_39, meta

LONG, RAGGED = meta(4, 32, 4096, 64), meta(4, 32, 4100, 64)
CALLS = {"no multiple of 128 keys": (RAGGED, RAGGED, RAGGED), "causal": (LONG, LONG, LONG, True)}


@pytest.mark.skipif(BEFORE_39, reason="Triton 3.9 brings that assembler, and the option")
@pytest.mark.parametrize("args", CALLS.values(), ids=CALLS)
def test_what_triton_has_it_spill(tmp_path, args):
    from triton.backends.nvidia.compiler import get_ptxas

    text, path = dump(flash_attention, args, sm=90), tmp_path / "kernel.ptx"
    path.write_text(text["ptx"], encoding="utf-8")

    def assembled(*options):
        command = [get_ptxas(90).path, "-v", "-lineinfo", "--gpu-name=sm_90a", *options, path, "-o", tmp_path / "cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return spilled(log), (tmp_path / "cubin").read_bytes()

    assert spilled(text["log"]) > 0
    by_itself, code = assembled()
    assert by_itself == 0
    assert assembled("--regAllocOptLevel=2")[0] == spilled(text["log"])
    assert assembled("--regAllocOptLevel=2", "--regAllocOptLevel=4") == (0, code)


SCRIPT = """
import harness
from harness.codegen import dump
import torch
from examples.triton.flash_attention import flash_attention
if __name__ == "__main__":
    x = torch.empty(4, 32, 4096, 64, dtype=torch.bfloat16, device="meta")
    print(dump(flash_attention, (x, x, x, True), sm=90)["log"])
"""


@pytest.mark.skipif(BEFORE_39, reason="Triton 3.9 brings that assembler, and the option")
def test_the_environment_comes_later(cli, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = cli(tmp_path / "script.py", PTXAS_OPTIONS="--regAllocOptLevel=4", TRITON_CACHE_DIR=str(tmp_path))
    assert spilled(done.stdout) == 0, done.stderr


def spilled(log: str) -> int:
    return int(re.search(r"(\d+) bytes spill stores", log)[1])
