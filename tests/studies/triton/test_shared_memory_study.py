"""shared_memory's study: what is read from the compiler's IR."""

from harness.codegen import dump

import torch

from examples.triton.shared_memory import BLOCK_K, matmul_tile
from studies.triton.shared_memory import allocations


def test_ttgir_names_the_buffers():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    found = sorted(allocations(dump(matmul_tile, (x, x, 128, 256), sm=90)["ttgir"]))
    assert found == [f"3x128x{BLOCK_K}xbf16", f"3x{BLOCK_K}x256xbf16"]
