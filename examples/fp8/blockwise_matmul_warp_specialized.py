"""blockwise_matmul in Gluon for Hopper: two or three warpgroups, one of which promotes while another multiplies.

One warp fills a ring of buffers by TMA: a, b and the scales of a. Each warpgroup owns 64 rows of a tile. Nothing orders
the warpgroups: while one promotes, another's MMAs run. With two warpgroups, each has registers for two groups in
flight, and promotes the first while the second is multiplied. With three, the tile is larger: a sixth less is loaded
for each element.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from examples.common.device import device_limits
from examples.common.gluon import async_load, barriers, buffers, init_ring, next_slot, require_wgmma, store_parts
from examples.common.operands import check_fp8_tma
from examples.common.quantize import GROUP
from examples.common.tiles import tile_coords
from examples.common.tma import gluon_descriptor, tma_takes

# A scale covers GROUP = 128 of K and, for b, 128 columns: so GROUP is BLOCK_K and BLOCK_N too.
# Warpgroups of 64 rows -> whether each has two groups in flight, slots of the ring (no more fit), GROUP_M, and the
# registers of a thread.
CONFIGS = {
    2: {"PAIRS": True, "STAGES": 5, "GROUP_M": 8, "REGISTERS": 240},
    3: {"PAIRS": False, "STAGES": 4, "GROUP_M": 6, "REGISTERS": 160},
}
LARGE = 8192**3  # M * N * K of a GEMM that is long enough to be held back by power and L2 rather than by its start


@gluon.jit
def _produce(
    a_desc, bt_desc, scale_a_desc, a_bufs, b_bufs, scale_bufs, full, empty, M, N, K,
    GROUP: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warp: fill the ring, for each group of K of each tile. A box that is partly out of bounds is filled with
    zeros and still signals its full byte count."""
    BLOCK_M: gl.constexpr = 64 * WARPGROUPS
    BYTES: gl.constexpr = (BLOCK_M + GROUP) * GROUP + 4 * BLOCK_M
    slot = 0
    phase = 1  # a new barrier counts as past the phase of parity 1: every slot is empty
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, GROUP)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, GROUP, GROUP_M)
        for k in range(0, K, GROUP):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, BYTES)
            async_load(bt_desc, [col, k], ready, b_bufs.index(slot))
            for i in gl.static_range(WARPGROUPS):
                at = slot * WARPGROUPS + i
                async_load(a_desc, [row + 64 * i, k], ready, a_bufs.index(at))
                async_load(scale_a_desc, [k // GROUP, row + 64 * i], ready, scale_bufs.index(at))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _start_group(
    a_bufs, b_bufs, scale_bufs, scale_b_ptr, full, slot, phase, at, GROUP: gl.constexpr, MMA: gl.constexpr
):
    """Wait for a slot and start its MMAs. Returns what will hold their sum, and the scale of each of its rows."""
    scale_b = gl.load(scale_b_ptr)  # on its way while the operands are
    mbarrier.wait(full.index(slot), phase)
    zeros = gl.zeros((64, GROUP), gl.float32, MMA)
    b = b_bufs.index(slot).permute((1, 0))
    partial = warpgroup_mma(a_bufs.index(at), b, zeros, use_acc=False, is_async=True)
    scale_a = scale_bufs.index(at).reshape([64]).load(gl.SliceLayout(1, MMA))
    return partial, scale_a * scale_b


@gluon.jit
def _promote(acc, partial, scale, ORDERED: gl.constexpr):
    """acc + partial * scale. ORDERED: as inline assembly with a side effect, so that the compiler keeps it before the
    wait for the next MMAs, which it overlaps. The compiler would move a plain FMA behind that wait."""
    if ORDERED:
        return gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [partial, scale[:, None] + gl.zeros_like(partial), acc],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return acc + partial * scale[:, None]


@gluon.jit
def _consume(
    a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk, stride_sbn,
    WHICH: gl.constexpr, GROUP: gl.constexpr, WARPGROUPS: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of each tile. A slot is empty again when all warpgroups have arrived at its barrier."""
    BLOCK_M: gl.constexpr = 64 * WARPGROUPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, GROUP, 32])
    groups = K // GROUP
    slot = 0
    phase = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, GROUP)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, GROUP, GROUP_M)
        scale_b_at = scale_b_ptr + col // GROUP * stride_sbn
        acc = gl.zeros((64, GROUP), gl.float32, MMA)
        single = groups
        if PAIRS:
            for _ in range(groups // 2):
                partial, scale = _start_group(
                    a_bufs, b_bufs, scale_bufs, scale_b_at, full, slot, phase, slot * WARPGROUPS + WHICH, GROUP, MMA
                )
                first = slot
                slot, phase = next_slot(slot, phase, STAGES)
                partial_2, scale_2 = _start_group(
                    a_bufs, b_bufs, scale_bufs, scale_b_at + stride_sbk, full, slot, phase,
                    slot * WARPGROUPS + WHICH, GROUP, MMA,
                )  # fmt: skip
                done = warpgroup_mma_wait(1, deps=(partial,))
                mbarrier.arrive(empty.index(first))
                acc = _promote(acc, done, scale, ORDERED=True)
                done = warpgroup_mma_wait(0, deps=(partial_2,))
                mbarrier.arrive(empty.index(slot))
                acc = _promote(acc, done, scale_2, ORDERED=True)
                slot, phase = next_slot(slot, phase, STAGES)
                scale_b_at += 2 * stride_sbk
            single = groups % 2
        for _ in range(single):
            partial, scale = _start_group(
                a_bufs, b_bufs, scale_bufs, scale_b_at, full, slot, phase, slot * WARPGROUPS + WHICH, GROUP, MMA
            )
            done = warpgroup_mma_wait(0, deps=(partial,))
            mbarrier.arrive(empty.index(slot))
            acc = _promote(acc, done, scale, ORDERED=PAIRS)
            slot, phase = next_slot(slot, phase, STAGES)
            scale_b_at += stride_sbk
        store_parts(c_desc, c_bufs, acc, row + 64 * WHICH, col, WHICH, 1, 0, PARTS)
    tma.store_wait(0)


@gluon.jit
def blockwise_matmul_warp_specialized_kernel(
    a_desc, bt_desc, scale_a_desc, scale_b_ptr, c_desc, M, N, K, stride_sbk, stride_sbn,
    GROUP: gl.constexpr, WARPGROUPS: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    GROUP_M: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    a_bufs = buffers(a_desc, STAGES * WARPGROUPS)
    b_bufs = buffers(bt_desc, STAGES)
    scale_bufs = buffers(scale_a_desc, STAGES * WARPGROUPS)
    c_bufs = buffers(c_desc, WARPGROUPS)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    init_ring(full, empty, STAGES, WARPGROUPS)
    fence_async_shared()
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_consume, (a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk,
                         stride_sbn, 0, GROUP, WARPGROUPS, PAIRS, STAGES, PARTS, GROUP_M)),
            (_consume, (a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk,
                         stride_sbn, 1, GROUP, WARPGROUPS, PAIRS, STAGES, PARTS, GROUP_M)),
            (_produce, (a_desc, bt_desc, scale_a_desc, a_bufs, b_bufs, scale_bufs, full, empty, M, N, K, GROUP,
                           WARPGROUPS, STAGES, GROUP_M)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk,
                         stride_sbn, 0, GROUP, WARPGROUPS, PAIRS, STAGES, PARTS, GROUP_M)),
            (_consume, (a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk,
                         stride_sbn, 1, GROUP, WARPGROUPS, PAIRS, STAGES, PARTS, GROUP_M)),
            (_consume, (a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk,
                         stride_sbn, 2, GROUP, WARPGROUPS, PAIRS, STAGES, PARTS, GROUP_M)),
            (_produce, (a_desc, bt_desc, scale_a_desc, a_bufs, b_bufs, scale_bufs, full, empty, M, N, K, GROUP,
                           WARPGROUPS, STAGES, GROUP_M)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


def efficiency(M: int, N: int, warpgroups: int, sms: int) -> float:
    """The share of the SMs' time that goes into the result. The parts of tiles beyond its edges are lost, and so are
    SMs without a tile in the last wave."""
    tiles = triton.cdiv(M, 64 * warpgroups) * triton.cdiv(N, GROUP)
    waves = triton.cdiv(tiles, sms)
    return M * N / (waves * sms * 64 * warpgroups * GROUP)


def choose_warpgroups(M: int, N: int, K: int, sms: int) -> int:
    """Two, or three for a large GEMM whose waves suffer little from the larger tile.

    A tile of 192 x 128 loads (192 + 128) / (192 * 128) bytes for each element and step of K, one of 128 x 128 a fifth
    more. That is what counts once a GEMM is long enough for L2 and power to limit it. In a shorter one it matters more
    that each warpgroup has two groups in flight, for which three have too few registers.
    """
    large = M * N * K >= LARGE
    return 3 if large and efficiency(M, N, 3, sms) >= efficiency(M, N, 2, sms) - 0.01 else 2


def scales_fit(scale_a: torch.Tensor) -> bool:
    """Whether TMA can load the scales of a, along M."""
    M, groups = scale_a.shape
    return tma_takes(scale_a.t()) and (groups < 2 or scale_a.stride(1) >= M)


def require_hopper_layout(name: str, a, b, scale_a, out_dtype) -> None:
    """What this kernel needs beyond the checks that all variants share; raises ValueError or RuntimeError."""
    require_wgmma(name, a.device, "variant='pointers'")
    check_fp8_tma(name, a, b, out_dtype, "variant='pointers'")
    if not scales_fit(scale_a):
        raise ValueError(
            f"{name}: scale_a has strides {scale_a.stride()} and starts {scale_a.data_ptr() % 16} bytes past a "
            f"multiple of 16; TMA loads it along M: pass m_major(scale_a), or use variant='pointers'"
        )


def launch_warp_specialized(a, b, c, scale_a, scale_b, warpgroups: int | None = None) -> None:
    """c = a @ b with its scales, all of them checked by blockwise_matmul."""
    (M, K), N = a.shape, b.shape[1]
    sms = device_limits(a.device).sms
    warpgroups = warpgroups or choose_warpgroups(M, N, K, sms)
    parts = c.element_size() // 2  # the ring leaves no room for more than 64 x 128 x 2 bytes of each warpgroup
    tiles = triton.cdiv(M, 64 * warpgroups) * triton.cdiv(N, GROUP)
    blockwise_matmul_warp_specialized_kernel[(min(tiles, sms),)](
        gluon_descriptor(a, [64, GROUP]), gluon_descriptor(b.t(), [GROUP, GROUP]),
        gluon_descriptor(scale_a.t(), [1, 64]), scale_b, gluon_descriptor(c, [64, GROUP // parts]), M, N, K,
        *scale_b.stride(), GROUP=GROUP, WARPGROUPS=warpgroups, PARTS=parts, **CONFIGS[warpgroups], num_warps=4,
    )  # fmt: skip
