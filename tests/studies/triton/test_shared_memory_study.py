"""shared_memory's study: what is read from the compiler's IR."""

from harness.codegen import dump

import torch

from examples.triton.shared_memory import BLOCK_K, matmul_tile, scale
from examples.triton.shared_memory_single_use import BLOCK, column_sum
from studies.triton.shared_memory import allocations


def test_ttgir_names_the_buffers():
    x = torch.empty(4096, 4096, device="meta")
    for wrapper, args, buffers in (
        (scale, (x,), []),
        (column_sum, (x, 1), []),
        (column_sum, (x, 4), [f"3x{BLOCK}xf32"]),
        (matmul_tile, (x.bfloat16(), x.bfloat16(), 128, 256), [f"3x128x{BLOCK_K}xbf16", f"3x{BLOCK_K}x256xbf16"]),
    ):
        assert sorted(allocations(dump(wrapper, args, sm=90)["ttgir"])) == buffers
