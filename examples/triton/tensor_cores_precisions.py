"""The precisions of tl.dot: the tile that suits each, how b should lie, what its PTX must hold, conversion, budget."""

from __future__ import annotations

from typing import NamedTuple

import torch

TENSOR_CORES = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
TF32_EPS = 2**-10  # 10 bits, and what is beyond them may be cut off rather than rounded
INT8_STEP = 0.04  # what one step of int8 stands for: 127 of them reach 5.08, beyond which few of randn's values lie


class Precision(NamedTuple):
    """One way to call tl.dot; `code` is what its PTX must hold on every architecture."""

    dtype: torch.dtype
    input_precision: str | None
    tile: tuple[int, int, int, int, int]  # BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages
    k_major: bool  # how b should lie in memory
    code: tuple[str, ...] = ()


# BLOCK_K is 128 bytes of a row, the widest swizzle of shared memory. A 128 x 256 tile asks for the least bandwidth that
# registers allow. ieee and tf32x3 pass their operands through registers too, and there it spills. wgmma reads operands
# of one or four bytes from shared memory only with K contiguous: b is then best K-major. On the CUDA cores it is the
# other way round: neighbouring threads read neighbouring columns, without bank conflicts.
PRECISIONS = {
    "ieee": Precision(torch.float32, "ieee", (128, 128, 32, 8, 3), False, ("fma.f32",)),
    # tf32 hands over all 32 bits and leaves the rest to the unit; tf32x3 rounds first, to know what is left.
    "tf32x3": Precision(torch.float32, "tf32x3", (128, 128, 32, 8, 3), False, ("mma tf32", "cvt tf32")),
    "tf32": Precision(torch.float32, "tf32", (128, 256, 32, 8, 3), True, ("mma tf32",)),
    "bfloat16": Precision(torch.bfloat16, None, (128, 256, 64, 8, 3), False),
    "float16": Precision(torch.float16, None, (128, 256, 64, 8, 3), False),
    "int8": Precision(torch.int8, None, (128, 256, 128, 8, 3), True, ("mma s8",)),
}


def convert(name: str, *matrices: torch.Tensor) -> list[torch.Tensor]:
    """float32 matrices in a precision."""
    if name == "int8":
        return [(x / INT8_STEP).round().clamp(-128, 127).to(torch.int8) for x in matrices]
    return [x.to(PRECISIONS[name].dtype) for x in matrices]


def budget(name: str, K: int) -> dict:
    """What h.check and h.compare need to know of a precision: an int8 product is exact and comes back as int32."""
    if name == "int8":
        return {"dtype": torch.int32}
    return {"terms": K, "operand_eps": TF32_EPS if name == "tf32" else 0.0}
