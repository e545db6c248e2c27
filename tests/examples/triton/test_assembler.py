"""What docs/running.md says of registers that spill on sm_90: Triton 3.9 asks its assembler for less than it can do."""

import re
import subprocess

from harness.codegen import dump

import pytest
import torch

from examples.triton.cross_entropy import loss_and_gradient
from examples.triton.decode_attention import decode_attention
from examples.triton.flash_attention import flash_attention
from tests.examples.triton.helpers import BEFORE_39, meta

LOGITS, QUERY, KEYS, LONG = meta(8192, 128256), meta(1, 32, 1, 128), meta(1, 8, 16384, 128), meta(4, 32, 4096, 64)
CALLS = [
    (loss_and_gradient, (LOGITS, meta(8192, dtype=torch.int64)), "cross_entropy_split_kernel"),
    (decode_attention, (QUERY, KEYS, KEYS), "decode_attention_kernel"),
    (flash_attention, (LONG, LONG, LONG, True), "flash_attention_hopper_kernel"),
]


@pytest.mark.skipif(BEFORE_39, reason="Triton 3.9 brings that assembler, and the option")
@pytest.mark.parametrize(("wrapper", "args", "kernel"), CALLS, ids=[kernel for *_, kernel in CALLS])
def test_what_triton_has_it_spill(tmp_path, wrapper, args, kernel):
    from triton.backends.nvidia.compiler import get_ptxas

    path = tmp_path / "kernel.ptx"
    path.write_text(dump(wrapper, args, sm=90, kernel=kernel)["ptx"], encoding="utf-8")
    spilled = []
    for levels in ([2], [], [2, 4]):
        options = [f"--regAllocOptLevel={level}" for level in levels]
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", *options, path, "-o", tmp_path / "kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled.append(int(re.search(r"(\d+) bytes spill stores", log)[1]))
    as_triton, by_itself, taken_back = spilled
    assert as_triton > 0
    assert by_itself == taken_back == 0
