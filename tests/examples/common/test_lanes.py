"""Loops that load a number ahead of its use: what nvdisasm shows of them."""

import re

from harness.codegen import dump

import pytest
import torch

from examples.triton.layer_norm_backward_split import layer_norm_backward_split
from examples.triton.rms_norm_backward import rms_norm_backward_split
from tests.examples.triton.helpers import meta


@pytest.mark.parametrize("cols", [65536, 131072])
@pytest.mark.parametrize(("backward", "more"), [(layer_norm_backward_split, 2), (rms_norm_backward_split, 1)])
def test_what_is_loaded_ahead_is_not_moved_to_a_uniform_register(backward, more, cols):
    half = torch.bfloat16
    x, weight, stats = meta(2048, cols, dtype=half), meta(cols, dtype=half), meta(2048, dtype=torch.float32)
    sass = dump(backward, (x, x, weight, *[stats] * more), {}, sm=90, kernel=f"{backward.__name__}_kernel")["sass"]
    loop = sass[sass.index("DEPBAR") : sass.rindex("LDGDEPBAR")]
    loaded, moved = set(), set()  # registers with what a load has brought
    for operation, operands in re.findall(r"\b([A-Z][A-Z0-9_.]+) ((?:U?R\d+|desc|\[)[^;]*);", loop):
        if operation.startswith("R2UR"):
            moved |= loaded & set(re.findall(r"\bR\d+", operands))
        elif operation.startswith("LDG."):
            loaded.add(operands.split(",")[0])
        else:
            loaded.discard(operands.split(",")[0])
    assert len(re.findall(r"\bLDG\.E R", loop)) >= more
    assert not moved
