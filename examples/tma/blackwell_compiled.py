"""blackwell_matmul by Triton's compiler: a persistent GEMM, its operands and result by TMA, pipelined or specialized.

pipelined is tl.range(flatten=True): all warps load, multiply and store. specialized asks for warp_specialize=True, too:
the compiler makes partitions on Blackwell, and drops the request on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.tiles import store_parts, tile_coords
from examples.common.tma import tma_descriptor
from examples.tma.blackwell_plan import BLOCK_BYTES, GROUP_M

# BLOCK_M, BLOCK_N, warps, in how many parts a tile is stored, buffers. The second is for GPUs with 99 KiB.
LARGE, SMALL = (128, 256, 8, 4, 4), (128, 128, 8, 2, 2)


@triton.jit
def matmul_persistent_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GROUP_M: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    # Flattened in both: Triton 3.6 can specialize no other loop over tiles.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True, warp_specialize=SPECIALIZE):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            acc = tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T, acc)
        store_parts(c_desc, acc, row, col, PARTS)


def launch_by_the_compiler(a, b, c, specialize: bool) -> None:
    """c = a @ b.T, all of them checked by blackwell_matmul."""
    (M, K), N = a.shape, b.shape[0]
    limits = device_limits(a.device)
    small = limits.shared_bytes < 200 * 1024
    block_m, block_n, num_warps, parts, buffers = SMALL if small else LARGE
    # mma.sync multiplies from registers: where all warps load, that is one stage more than there are buffers.
    stages = buffers + 1 if small and not specialize else buffers
    block_k = BLOCK_BYTES // a.element_size()
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    matmul_persistent_kernel[(min(tiles, limits.sms),)](
        tma_descriptor(a, [block_m, block_k]), tma_descriptor(b, [block_n, block_k]),
        tma_descriptor(c, [block_m, block_n // parts]), M, N, K,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PARTS=parts, GROUP_M=GROUP_M, SPECIALIZE=specialize,
        num_warps=num_warps, num_stages=stages,
    )  # fmt: skip
