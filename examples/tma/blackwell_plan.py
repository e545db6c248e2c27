"""What blackwell.py and its variants share: checks, which GPU runs what, and what fits shared and tensor memory."""

from __future__ import annotations

import torch
import triton

from examples.common.device import interpreted, require_triton_device
from examples.common.fp8 import E4M3, E5M2
from examples.common.gluon import gluon_architecture
from examples.common.tma import require_tma_layout

VARIANTS = ("pipelined", "specialized", "by hand")
DTYPES = (torch.float16, torch.bfloat16, E4M3, E5M2)
TENSOR_MEMORY = (10, 11)  # the generations that have it, by their major number: sm_120 has none
COLUMNS = 512  # of tensor memory, each 128 lanes of 32 bits
OUT_DTYPES = (torch.float16, torch.bfloat16)
# BLOCK_K is 128 bytes of a row everywhere, the widest swizzle of shared memory; GROUP_M, the rows of tiles in a group.
BLOCK_BYTES, GROUP_M = 128, 8
# By hand: BLOCK_M, BLOCK_N, columns of a part that is stored, buffers of such parts. Scales take shared memory too.
BY_HAND, SCALED = (128, 256, 64, 2), (128, 256, 32, 2)
EPILOGUE_WARPS = 8  # with four a tile is half of a thread's registers, and some are spilled


def has_tensor_memory(sm: int | None) -> bool:
    return sm is not None and sm // 10 in TENSOR_MEMORY


def runnable(device: torch.device) -> tuple[str, ...]:
    return VARIANTS if has_tensor_memory(gluon_architecture(device)) else VARIANTS[:2]


def require_tensor_memory(name: str, device: torch.device, instead: str) -> None:
    # Asked before Gluon is: for another architecture its compiler does not fail, it takes the process down.
    if not has_tensor_memory(sm := gluon_architecture(device)):
        here = f"this is sm_{sm}" if sm else "and Gluon kernels are not interpreted"
        raise RuntimeError(f"{name}: tcgen05 and tensor memory come with sm_100 and sm_103 ({here}); use {instead}")


def check_out(name: str, out_dtype: torch.dtype, N: int) -> None:
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {OUT_DTYPES}")
    if N % 8:
        raise ValueError(f"{name}: N is {N}; TMA stores rows of 16-byte multiples: pad b to a multiple of 8 rows")


def check_operands(
    name: str, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None
) -> tuple[int, int, int, torch.dtype]:
    """M, N, K and the dtype of a [M, K] @ b [N, K].T. Raises what blackwell_matmul says it raises."""
    require_triton_device(name, a, b)
    if a.dtype not in DTYPES or b.dtype is not a.dtype:
        raise TypeError(f"{name}: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [N, K]")
    out_dtype = out_dtype or (a.dtype if a.element_size() == 2 else torch.bfloat16)
    (M, K), N = a.shape, b.shape[0]
    check_out(name, out_dtype, N)
    if K % (each := 16 // a.element_size()):
        raise ValueError(f"{name}: K is {K}; TMA loads rows of 16-byte multiples: pad it to a multiple of {each}")
    require_tma_layout(name, a=a, b=b)
    if (sm := gluon_architecture(a.device)) and sm < 90:
        raise RuntimeError(f"{name}: TMA comes with sm_90 (this is sm_{sm}); use examples/triton/matmul.py")
    return M, N, K, out_dtype


def scale_columns(block_m: int, block_n: int, groups: int, stages: int) -> int:
    """Columns of tensor memory that the scales of a ring take: a column holds 32 rows by 4 groups."""
    return stages * (block_m + block_n) // 32 * (groups // 4)


def allocated_columns(used: int) -> int:
    """What is taken for so many columns: a power of two, at least 32."""
    return max(32, triton.next_power_of_2(used))


def by_hand_plan(shared_bytes: int, scale_groups: int = 0) -> tuple[int, ...]:
    """BLOCK_M, BLOCK_N, columns of a part, its buffers, then as many stages (2 to 4) and accumulators (1 or 2) as fit.

    `scale_groups` counts the scales of a row in a step of K; 0: there are none.
    """
    block_m, block_n, width, buffers = SCALED if scale_groups else BY_HAND
    for stages in (4, 3, 2):
        ring = stages * (block_m + block_n) * (BLOCK_BYTES + scale_groups)
        if ring + buffers * block_m * width * 2 + 1024 <= shared_bytes:  # parts of two bytes a number, and barriers
            left = COLUMNS - scale_columns(block_m, block_n, scale_groups, stages)
            return block_m, block_n, width, buffers, stages, min(2, left // block_n)
    raise RuntimeError(f"blackwell: no ring of {block_m} x {block_n} fits {shared_bytes} bytes of shared memory")


def budget(dtype: torch.dtype, K: int) -> dict:
    """On Hopper an FP8 instruction cuts 32 products and the accumulator so far to about 14 bits."""
    rough = dtype in (E4M3, E5M2) and not interpreted()
    return {"terms": K, "acc": 2.0**-13} if rough else {"terms": K}


# Nothing but a tail; one more than a tile in each dimension, which steps of K do not divide; nothing to add up.
EDGES = [(1, 8, 16), (129, 264, 144), (5, 16, 0)]
# What the code of each variant must hold; where nothing is required, the answer is still recorded.
_TMA, _PARTITIONS = "cp.async.bulk.tensor", ("setmaxnreg", "mbarrier")
TCGEN05 = (_TMA, "tcgen05.mma", "tcgen05.alloc", "tcgen05.commit", "tcgen05.ld")
PARTITIONED = (*TCGEN05, *_PARTITIONS)
FIND = {
    "pipelined": {90: (_TMA, "wgmma"), 100: TCGEN05, 103: TCGEN05, 120: (_TMA, "mma.sync")},
    "by hand": {90: (), 100: PARTITIONED, 103: PARTITIONED, 120: ()},
    # On sm_90 a flattened loop is not specialized.
    "specialized": {
        80: (), 89: (), 90: (_TMA, "wgmma"), 100: PARTITIONED, 103: PARTITIONED, 120: (_TMA, "mma.sync", *_PARTITIONS),
    },
}  # fmt: skip
