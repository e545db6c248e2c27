"""Loops that load a number ahead of its use: what nvdisasm shows of them."""

import re

from harness.codegen import dump

import pytest
import torch

from examples.triton.layer_norm_backward_split import layer_norm_backward_split
from examples.triton.rms_norm_backward import rms_norm_backward_split
from tests.examples.triton.helpers import meta

CASES = [
    (layer_norm_backward_split, 65536, 2),
    (layer_norm_backward_split, 131072, 2),
    (rms_norm_backward_split, 131072, 1),
]


@pytest.mark.parametrize(("backward", "cols", "loads"), CASES)
def test_what_is_loaded_ahead_is_not_moved_to_a_uniform_register(backward, cols, loads):
    half = torch.bfloat16
    x, weight, stats = meta(2048, cols, dtype=half), meta(cols, dtype=half), meta(2048, dtype=torch.float32)
    args = (x, x, weight, stats, stats) if backward is layer_norm_backward_split else (x, x, weight, stats)
    sass = dump(backward, args, {}, sm=90, kernel=f"{backward.__name__}_kernel")["sass"]
    loop = sass[sass.index("DEPBAR.LE") : sass.rindex("LDGDEPBAR")]
    loaded, moved = set(), set()  # registers with what a load has brought
    for operation, operands in re.findall(r"\b([A-Z][A-Z0-9_.]+) ((?:U?R\d+\b|desc|\[)[^;]*);", loop):
        if operation.startswith("R2UR"):
            moved |= loaded & set(re.findall(r"\bR\d+", operands))
        elif operation.startswith("LDG."):
            loaded.add(operands.split(",")[0])
        else:
            loaded.discard(operands.split(",")[0])
    assert len(re.findall(r"\bLDG\.E R", loop)) >= loads
    assert not moved
