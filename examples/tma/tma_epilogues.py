"""TMA epilogues: bias, activation, gate and FP8 quantizer in the GEMM's store, before the result goes to memory.

Technique  A layer is a GEMM and something done to each element of its result. As two kernels the result goes to memory
           and comes back; in the GEMM's store it is still in registers, or in the shared memory that TMA stores from:
           linear       x @ w.t() + bias, then SiLU, GELU or nothing;
           swiglu       silu(x @ w_gate.t()) * (x @ w_up.t()): half of a tile's columns from each weight, so that gate
                        and value of an element meet in one program, and one matrix is written, not three;
           linear_fp8   quantized too: by a scale that is given, or with one per group of 128 columns of a row, which a
                        tile holds whole. A scale per row cannot be had in this store: a row is spread over many tiles,
                        and the first would have to wait for the last. Write y and quantize rows after, or take the
                        scale from earlier steps.
           What is left is the time of the arithmetic, in which tensor cores idle. Two kernels, the same operands:
           persistent        one program per SM, all by TMA, the loops over tiles and K flattened into one
                             (persistent_matmul.py has the steps). All warps do the epilogue, in float32 and in parts,
                             when they have multiplied: one special operation an element (tanh.approx) is what it costs.
           warp specialized  the same in Gluon, on Hopper, with roles for warps. A producer, one warp, brings operands
                             into a ring. Two consumers, a warpgroup each, multiply half of the rows of every tile,
                             leave it in shared memory, rounded to 16 bits as two kernels would, and go on. A finisher,
                             two warps, does the epilogue and stores while they multiply the next tile.
Question   What does an epilogue cost in the store of a GEMM, against a kernel of its own, and which do not fit there?
Needs      triton, sm_90
Shapes     x [M, K], w [N, K] as torch.nn.Linear has it, bias [N] or None; w_gate and w_up [N, K]. Rows contiguous; K a
           multiple of 8, N one of 8, or of 16 for FP8; any M (0 too) -> y [M, N], contiguous; linear_fp8: q [M, N] and
           scales, [1] as given, or [M, ceil(N / 128)] with strides (1, M), as 1x128 scales of a GEMM lie.
Dtypes     float16, bfloat16, all the same; sums and epilogues are float32; q float8_e4m3fn. Group scales are
           amax / 448 with amax at least 2**-100; q = y * (448 / amax) or y * (1 / scale), saturated.
Errors     TypeError for another dtype or different ones; ValueError for rank, sizes that differ, K of 0, a layout TMA
           cannot load, an activation or variant that does not exist, a bias or scale of another shape or device, a
           scale that is not positive and finite (looked for with check_scales, which waits for the GPU); RuntimeError
           for a device without Triton, an architecture without TMA or (warp specialized: sm_90 alone, nor is Gluon
           interpreted) Hopper's tensor cores, too little shared memory, or an input that requires grad.
Wins when  nobody needs the sums themselves, as training does. What is saved is 4 bytes an element, whatever K is: the
           shorter the sums, the larger its share. But where K is a few hundred, consumers wait for the finisher. And
           swiglu on an H200 wins warp specialized only, its default there: persistent, it is slower than two kernels.
Source     chapter section "TMA"; SwiGLU: Shazeer 2020; GELU: Hendrycks and Gimpel 2016; roles of warps: fp8_matmul.py.
Run        python examples/tma/tma_epilogues.py
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

from harness import (
    Harness,
    Work,
    device_limits,
    fp8_max,
    gluon_descriptor,
    hardware,
    interpreted,
    require_scales,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)
from harness.compare import time_rounds
from harness.hardware import enqueue_ms

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

DTYPES = (torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
ACTIVATIONS = ("none", "silu", "gelu", "gelu exact")
VARIANTS = ("persistent", "warp specialized")
GROUP = tl.constexpr(128)  # columns that share a scale
FLOOR = tl.constexpr(2.0**-100)  # amax of a group, at least
ASSEMBLY = tl.constexpr(not interpreted())  # of which the interpreter has none
# BLOCK_M, BLOCK_N, BLOCK_K, warps: the first that fits shared memory is taken, with as many stages of K as it holds.
# GROUP_M is the rows of tiles in a band.
TILES = [(128, 256, 64, 8), (128, 128, 64, 8)]
BUFFERS = (4, 3, 2)
GROUP_M = 8
STORE_COLUMNS = {2: 64, 1: 128}  # of a tile stored at a time, by bytes an element; for FP8 a whole group
FAST = True  # tanh.approx in the persistent kernel, whose epilogue is not hidden
# Warp specialized: the tile, stages of K in the ring, rows and columns that the finisher stores at a time, buffers it
# stores from, its warps, and the registers of a thread of the consumers and of the finisher. With 4 warps for it all
# threads would start with 128 registers, and the assembler refuses the consumers' instruction, which needs 154. Shared
# memory also holds a tile of 16-bit sums on their way from the consumers to the finisher.
HOPPER_TILE, HOPPER_STAGES, HOPPER_STORE, HOPPER_BUFFERS = (128, 256, 64), 3, [32, 64], 2
HOPPER_FINISHERS, HOPPER_REGISTERS = 2, (168, 168)
HOPPER_FAST = False  # nobody waits for the finisher where K is long


def _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M):
    """Rows and columns at which a tile starts, in bands of GROUP_M rows of tiles, so that L2 serves most loads."""
    tiles_m, tiles_n = (M + BLOCK_M - 1) // BLOCK_M, (N + BLOCK_N - 1) // BLOCK_N
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    band = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % (GROUP_M * tiles_n) % band
    tile_n = tile % (GROUP_M * tiles_n) // band
    return tile_m * BLOCK_M, tile_n * BLOCK_N


def _activate(x, ACT: tl.constexpr, FAST: tl.constexpr):
    """SiLU or GELU in float32. FAST: one special operation, absolute error up to 2**-12 |x|; else 2, or erf."""
    if ACT == "silu" or ACT == "swiglu":
        if FAST and ASSEMBLY:
            half = 0.5 * x
            t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], tl.float32, True, 1)
            return tl.fma(half, t, half)
        else:
            root = tl.rsqrt(1.0 + tl.exp2(-1.4426950409 * x))  # squared, it takes fewer instructions than a division
            return x * (root * root)
    elif ACT == "gelu":
        if FAST and ASSEMBLY:
            inner = x * (0.7978845608 + 0.0356774081 * (x * x))
            t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [inner], tl.float32, True, 1)
            half = 0.5 * x
            return tl.fma(half, t, half)
        else:
            # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), and exp2 wants -2 log2(e) u.
            root = tl.rsqrt(1.0 + tl.exp2(x * (-2.302208198 + -0.1029432397 * (x * x))))
            return x * (root * root)
    elif ACT == "gelu exact":
        half = 0.5 * x
        return half + half * tl.erf(0.7071067812 * x)
    else:
        return x


def _scale_and_inverse(amax_bits, MOST: tl.constexpr):
    """amax / MOST and MOST / amax, each rounded once, of amax as an integer: there NaN is the largest."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    amax = tl.maximum(amax, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return tl.div_rn(amax, MOST), tl.div_rn(MOST, amax)


# The same arithmetic in both languages.
_triton_tile_of, _gluon_tile_of = triton.jit(_tile_of), gluon.jit(_tile_of)
_triton_activate, _gluon_activate = triton.jit(_activate), gluon.jit(_activate)
_triton_scale, _gluon_scale = triton.jit(_scale_and_inverse), gluon.jit(_scale_and_inverse)


@triton.jit
def _finish_and_store(
    y_desc, acc, up, bias, inverse, scale_ptr, row, col, M, N,
    ACT: tl.constexpr, BIAS: tl.constexpr, PER: tl.constexpr, MOST: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile, as many columns at a time as y_desc stores: fewer registers and less shared memory."""
    rows: tl.constexpr = acc.shape[0]
    columns: tl.constexpr = acc.shape[1]
    if columns > y_desc.block_shape[1]:
        half: tl.constexpr = columns // 2
        left, right = acc.reshape(rows, 2, half).permute(0, 2, 1).split()
        up_left, up_right, bias_left, bias_right = left, right, bias, bias
        if ACT == "swiglu":
            up_left, up_right = up.reshape(rows, 2, half).permute(0, 2, 1).split()
        if BIAS:
            bias_left, bias_right = bias.reshape(2, half).permute(1, 0).split()
        _finish_and_store(
            y_desc, left, up_left, bias_left, inverse, scale_ptr, row, col, M, N, ACT, BIAS, PER, MOST, FAST
        )
        _finish_and_store(
            y_desc, right, up_right, bias_right, inverse, scale_ptr, row, col + half, M, N, ACT, BIAS, PER, MOST, FAST
        )
    else:
        if BIAS:
            acc += bias[None, :].to(tl.float32)
        y = _triton_activate(acc, ACT, FAST)
        if ACT == "swiglu":
            y *= up
        if PER == "tensor":
            y *= inverse
        elif PER == "group":
            scale, inverse = _triton_scale(tl.max(tl.abs(y).to(tl.int32, bitcast=True), 1), MOST)
            at = row + tl.arange(0, rows)
            tl.store(scale_ptr + (col // GROUP).to(tl.int64) * M + at, scale, mask=(at < M) & (col < N))
            y *= inverse[:, None]
        y_desc.store([row, col], y.to(y_desc.dtype))  # to FP8 it saturates


@triton.jit
def linear_persistent_kernel(
    x_desc, w_desc, up_desc, y_desc, bias_ptr, scale_ptr, M, N, K,
    ACT: tl.constexpr, PER: tl.constexpr, MOST: tl.constexpr, FAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    GLU: tl.constexpr = ACT == "swiglu"
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GLU else BLOCK_N
    BIAS: tl.constexpr = bias_ptr is not None
    tl.assume(K > 0)  # else the flattened loop comes with a second epilogue, for tiles without a step
    inverse = tl.div_rn(1.0, tl.load(scale_ptr)) if PER == "tensor" else 1.0
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, col = _triton_tile_of(tile, M, N, BLOCK_M, COLUMNS, GROUP_M)
        acc = tl.zeros((BLOCK_M, COLUMNS), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, COLUMNS), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            x = x_desc.load([row, k])
            acc = tl.dot(x, w_desc.load([col, k]).T, acc)
            if GLU:
                up = tl.dot(x, up_desc.load([col, k]).T, up)
        bias = 0.0
        if BIAS:
            cols = col + tl.arange(0, COLUMNS)
            bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
        _finish_and_store(y_desc, acc, up, bias, inverse, scale_ptr, row, col, M, N, ACT, BIAS, PER, MOST, FAST)


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The next buffer of the ring; the phase that its barriers wait for changes with every round."""
    slot += 1
    again = slot == STAGES
    return gl.where(again, 0, slot), gl.where(again, phase ^ 1, phase)


@gluon.jit
def _produce(ring, x_desc, w_desc, up_desc, M, N, K, GLU: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
    """One warp: the operands of every step of every tile. Boxes count whole at their barrier; what lies past the edge
    is filled with zeros."""
    x_bufs, w_bufs, _, _, full, empty = ring
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    HALF_N: gl.constexpr = w_desc.block_shape[0]
    COLUMNS: gl.constexpr = HALF_N if GLU else 2 * HALF_N
    slot = 0
    phase = 1  # of a barrier at which nobody has arrived: all is empty
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, COLUMNS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = _gluon_tile_of(tile, M, N, BLOCK_M, COLUMNS, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, 2 * (BLOCK_M + 2 * HALF_N) * BLOCK_K)
            tma.async_copy_global_to_shared(w_desc, [col, k], ready, w_bufs.index(2 * slot))
            if GLU:
                tma.async_copy_global_to_shared(up_desc, [col, k], ready, w_bufs.index(2 * slot + 1))
            else:
                tma.async_copy_global_to_shared(w_desc, [col + HALF_N, k], ready, w_bufs.index(2 * slot + 1))
            tma.async_copy_global_to_shared(x_desc, [row, k], ready, x_bufs.index(slot))
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _sum_products(acc, ring, slot, phase, start, stop, BLOCK_K: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr):
    """acc and the products of K from start to stop. A buffer is empty when both consumers have arrived."""
    _, _, x_halves, w_tiles, full, empty = ring
    for _ in range(start, stop, BLOCK_K):
        mbarrier.wait(full.index(slot), phase)
        w = w_tiles.index(slot).permute((1, 0))
        acc = warpgroup_mma(x_halves.index(2 * slot + HALF), w, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(slot))
        slot, phase = _next(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def _hand_over(sums, acc, FIRST: gl.constexpr, PARTS: gl.constexpr):
    """acc, rounded to 16 bits, in PARTS buffers from FIRST on."""
    if PARTS > 1:
        left, right = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()
        _hand_over(sums, left, FIRST, PARTS // 2)
        _hand_over(sums, right, FIRST + PARTS // 2, PARTS // 2)
    else:
        sums.index(FIRST).store(acc.to(sums.dtype))


@gluon.jit
def _consume(
    ring, handed, lead, M, N, K, GLU: gl.constexpr, STAGES: gl.constexpr, STAGGER: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """A warpgroup: one half of the rows of every tile. With STAGGER the second is a step behind the first, so that one
    multiplies while the other hands its sums over."""
    _, _, x_halves, w_tiles, _, _ = ring
    sums, summed, taken = handed
    HALF_M: gl.constexpr = x_halves.shape[1]
    BLOCK_K: gl.constexpr = x_halves.shape[2]
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    PARTS: gl.constexpr = BLOCK_N // sums.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    slot = 0
    phase = 0
    tile_phase = 0
    tiles = gl.cdiv(M, 2 * HALF_M) * gl.cdiv(N, BLOCK_N // 2 if GLU else BLOCK_N)
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, MMA)
        start = 0
        if STAGGER:
            if HALF == 0:
                acc, slot, phase = _sum_products(acc, ring, slot, phase, 0, BLOCK_K, BLOCK_K, HALF, STAGES)
                mbarrier.arrive(lead)
                start = BLOCK_K
            else:
                mbarrier.wait(lead, tile_phase)
        acc, slot, phase = _sum_products(acc, ring, slot, phase, start, K, BLOCK_K, HALF, STAGES)
        mbarrier.wait(taken.index(HALF), tile_phase ^ 1)
        _hand_over(sums, acc, PARTS * HALF, PARTS)
        mbarrier.arrive(summed.index(HALF))
        tile_phase ^= 1


@gluon.jit
def _columns_of(bias, first, N, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """WIDTH numbers of the bias from column `first` on, as a row; 0 without one."""
    if bias is None:
        return 0.0
    else:
        cols = first + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        return gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _value(pieces, piece, up_piece, bias, ACT: gl.constexpr, FAST: gl.constexpr, LAYOUT: gl.constexpr):
    """A piece of the result before its scale, in float32."""
    y = _gluon_activate(pieces.index(piece).load(LAYOUT).to(gl.float32) + bias, ACT, FAST)
    if ACT == "swiglu":
        y *= pieces.index(up_piece).load(LAYOUT).to(gl.float32)
    return y


@gluon.jit
def _send(y_desc, y_buf, y, row, col, BUFFERS: gl.constexpr):
    tma.store_wait(BUFFERS - 1)  # all but the latest have been read: this buffer too
    y_buf.store(y.to(y_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [row, col], y_buf)


@gluon.jit
def _finish(
    handed, y_desc, y_bufs, bias, scale_ptr, M, N, ACT: gl.constexpr, PER: gl.constexpr, MOST: gl.constexpr,
    FAST: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The epilogue of every tile, from the halves of the consumers, a few rows of two parts (a group) at a time.

    In loops, though all counts are known: unrolled, it would take the instruction cache from the consumers.
    """
    sums, summed, taken = handed
    HALF_M: gl.constexpr = sums.shape[1]
    WIDTH: gl.constexpr = sums.shape[2]
    PARTS: gl.constexpr = sums.shape[0] // 2
    COLUMNS: gl.constexpr = WIDTH * PARTS // 2 if ACT == "swiglu" else WIDTH * PARTS
    ROWS: gl.constexpr = y_desc.block_shape[0]
    PIECES: gl.constexpr = HALF_M // ROWS  # of a part
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    BUFFERS: gl.constexpr = y_bufs.shape[0]
    pieces = sums._reinterpret(sums.dtype, [2 * PARTS * PIECES, ROWS, WIDTH], sums.layout)
    inverse = gl.div_rn(1.0, gl.load(scale_ptr)) if PER == "tensor" else 1.0
    tile_phase = 0
    tiles = gl.cdiv(M, 2 * HALF_M) * gl.cdiv(N, COLUMNS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_row, first_col = _gluon_tile_of(tile, M, N, 2 * HALF_M, COLUMNS, GROUP_M)
        for half in range(2):
            mbarrier.wait(summed.index(half), tile_phase)
            for part in range(0, COLUMNS // WIDTH, 2):
                col = first_col + part * WIDTH
                left_bias = _columns_of(bias, col, N, WIDTH, LAYOUT)
                right_bias = _columns_of(bias, col + WIDTH, N, WIDTH, LAYOUT)
                for above in range(PIECES):
                    row = first_row + half * HALF_M + above * ROWS
                    at = (half * PARTS + part) * PIECES + above
                    up = at + PARTS // 2 * PIECES  # the second half of a consumer's parts, for swiglu
                    left = _value(pieces, at, up, left_bias, ACT, FAST, LAYOUT)
                    if PER != "group":
                        _send(y_desc, y_bufs.index(0), left * inverse, row, col, BUFFERS)
                    right = _value(pieces, at + PIECES, up + PIECES, right_bias, ACT, FAST, LAYOUT)
                    if PER == "group":
                        largest = gl.max(gl.abs(left).to(gl.int32, bitcast=True), 1)
                        largest = gl.maximum(largest, gl.max(gl.abs(right).to(gl.int32, bitcast=True), 1))
                        scale, by_row = _gluon_scale(largest, MOST)
                        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
                        to = scale_ptr + (col // GROUP).to(gl.int64) * M + rows
                        gl.store(to, scale, mask=(rows < M) & (col < N))
                        right *= by_row[:, None]
                        _send(y_desc, y_bufs.index(0), left * by_row[:, None], row, col, BUFFERS)
                    else:
                        right *= inverse
                    _send(y_desc, y_bufs.index(BUFFERS - 1), right, row, col + WIDTH, BUFFERS)
            mbarrier.arrive(taken.index(half))
        tile_phase ^= 1
    tma.store_wait(0)


@gluon.jit
def linear_warp_specialized_kernel(
    x_desc, w_desc, up_desc, y_desc, bias, scale_ptr, M, N, K, ACT: gl.constexpr, PER: gl.constexpr,
    MOST: gl.constexpr, FAST: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, STAGGER: gl.constexpr,
    FINISHERS: gl.constexpr, REGISTERS: gl.constexpr, FINISHER_REGISTERS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """w_desc and up_desc have boxes of half a tile's columns: both halves of w, or one of w and one of up."""
    GLU: gl.constexpr = ACT == "swiglu"
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    HALF_N: gl.constexpr = w_desc.block_shape[0]
    HALF_M: gl.constexpr = BLOCK_M // 2
    WIDTH: gl.constexpr = y_desc.block_shape[1]
    SUMS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_M, WIDTH], x_desc.dtype)
    # A buffer of x is two halves of rows, one for each consumer; two of w are a tile's columns, for both.
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, HALF_N, BLOCK_K], w_desc.layout)
    x_halves = x_bufs._reinterpret(x_desc.dtype, [2 * STAGES, HALF_M, BLOCK_K], x_desc.layout)
    w_tiles = w_bufs._reinterpret(w_desc.dtype, [STAGES, 2 * HALF_N, BLOCK_K], w_desc.layout)
    sums = gl.allocate_shared_memory(x_desc.dtype, [4 * HALF_N // WIDTH, HALF_M, WIDTH], SUMS)
    y_bufs = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, y_desc.block_shape[0], WIDTH], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(summed.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    mbarrier.init(lead, count=1)
    fence_async_shared()
    ring = (x_bufs, w_bufs, x_halves, w_tiles, full, empty)
    handed = (sums, summed, taken)
    gl.warp_specialize([
        (_consume, (ring, handed, lead, M, N, K, GLU, STAGES, STAGGER, 0)),
        (_consume, (ring, handed, lead, M, N, K, GLU, STAGES, STAGGER, 1)),
        (_finish, (handed, y_desc, y_bufs, bias, scale_ptr, M, N, ACT, PER, MOST, FAST, GROUP_M)),
        (_produce, (ring, x_desc, w_desc, up_desc, M, N, K, GLU, STAGES, GROUP_M)),
    ], [4, FINISHERS, 1], [REGISTERS, FINISHER_REGISTERS, 24])  # fmt: skip  # warps and registers of all but the first


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU, or of that compiled for; None where kernels are interpreted."""
    if hardware.OFFLINE_SM:
        return divmod(hardware.OFFLINE_SM, 10)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def fitting_tile(device: torch.device, out_itemsize: int) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps and stages: the largest tile, then most stages, that shared memory holds."""
    limit = device_limits(device).shared_bytes
    # GPUs with little shared memory multiply by mma.sync, from registers: one stage more than there are buffers.
    in_registers = 1 if limit < 128 * 1024 else 0
    for m, n, k, warps in TILES:
        stored = out_itemsize * m * STORE_COLUMNS[out_itemsize]
        for buffers in BUFFERS:
            if 2 * buffers * (m + n) * k + stored + 2048 <= limit:  # and barriers, bias on its way to registers
                return m, n, k, warps, buffers + in_registers
    raise RuntimeError(f"tma_epilogues: no tile fits the {limit} bytes of shared memory of {device}")


def _validate(name: str, x, bias, activation, variant, out_itemsize: int, **weights) -> None:
    """The checks that all layers share: see Errors in the module docstring."""
    require_triton_device(name, x, *weights.values(), *([] if bias is None else [bias]))
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: x is {x.dtype}; cast x and its weights to one of {DTYPES}")
    if x.ndim != 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; need [M, K]: pass x.reshape(-1, x.shape[-1])")
    for label, w in weights.items():
        if w.dtype is not x.dtype:
            raise TypeError(f"{name}: x is {x.dtype} and {label} {w.dtype}; both must be the same one of {DTYPES}")
        if w.ndim != 2 or w.shape[1] != x.shape[1]:
            raise ValueError(
                f"{name}: x has shape {tuple(x.shape)} and {label} {tuple(w.shape)}; need x [M, K] and, as "
                "torch.nn.Linear has it, weights [N, K]"
            )
    if len({w.shape[0] for w in weights.values()}) > 1:
        raise ValueError(f"{name}: {' and '.join(f'{k} {tuple(w.shape)}' for k, w in weights.items())} must be alike")
    K, N = x.shape[1], next(iter(weights.values())).shape[0]
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation {activation!r} is not one of {ACTIVATIONS}")
    if variant not in VARIANTS:
        raise ValueError(f"{name}: variant {variant!r} is not one of {VARIANTS}")
    if K == 0 or K % 8 or N * out_itemsize % 16:
        raise ValueError(
            f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples: pad K to a multiple of 8 and N to one "
            f"of {16 // out_itemsize}"
        )
    if bias is not None and bias.dtype is not x.dtype:
        raise TypeError(f"{name}: bias is {bias.dtype}, x {x.dtype}; both must be the same")
    if bias is not None and (tuple(bias.shape) != (N,) or (N > 1 and bias.stride(0) != 1)):
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, strides {bias.stride()}; need [{N}], contiguous")
    require_tma_layout(name, x=x, **weights)
    if (have := capability(x.device)) and have < (9, 0):
        raise RuntimeError(f"{name}: TMA comes with sm_90 (this is sm_{have[0]}{have[1]})")
    if variant == "warp specialized" and have != (9, 0):
        here = f"this is sm_{have[0]}{have[1]}" if have else "and Gluon kernels are not interpreted"
        raise RuntimeError(f"{name}: {variant!r} needs sm_90's wgmma ({here}): use variant='persistent'")


def _launch(x, w, up, y, bias, scale, activation: str, per: str, variant: str) -> None:
    (M, K), N = x.shape, y.shape[1]
    glu = activation == "swiglu"
    common = {"ACT": activation, "PER": per, "MOST": fp8_max(E4M3), "GROUP_M": GROUP_M}
    if variant == "persistent":
        block_m, block_n, block_k, num_warps, stages = fitting_tile(x.device, y.element_size())
        columns = block_n // 2 if glu else block_n
        tiles = triton.cdiv(M, block_m) * triton.cdiv(N, columns)
        linear_persistent_kernel[(min(tiles, device_limits(x.device).sms),)](
            tma_descriptor(x, [block_m, block_k]), tma_descriptor(w, [columns, block_k]),
            tma_descriptor(up, [columns, block_k]),
            tma_descriptor(y, [block_m, STORE_COLUMNS[y.element_size()]]), bias, scale, M, N, K,
            FAST=FAST, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, **common,
            num_warps=num_warps, num_stages=stages,
        )  # fmt: skip
        return
    block_m, block_n, block_k = HOPPER_TILE
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n // 2 if glu else block_n)
    linear_warp_specialized_kernel[(min(tiles, device_limits(x.device).sms),)](
        gluon_descriptor(x, [block_m, block_k]), gluon_descriptor(w, [block_n // 2, block_k]),
        gluon_descriptor(up, [block_n // 2, block_k]), gluon_descriptor(y, HOPPER_STORE), bias, scale, M, N, K,
        FAST=HOPPER_FAST, STAGES=HOPPER_STAGES, BUFFERS=HOPPER_BUFFERS, FINISHERS=HOPPER_FINISHERS,
        # The first consumer must not signal its next tile before the second has seen the signal of this one. A tile of
        # at least as many steps as the ring holds keeps it from that.
        STAGGER=triton.cdiv(K, block_k) >= HOPPER_STAGES,
        REGISTERS=HOPPER_REGISTERS[0], FINISHER_REGISTERS=HOPPER_REGISTERS[1], **common, num_warps=4,
    )  # fmt: skip


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    variant: str = "persistent",
) -> torch.Tensor:
    """activation(x @ w.t() + bias) by one of VARIANTS; limits and errors are in the module docstring."""
    _validate("linear", x, bias, activation, variant, 2, w=w)
    y = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    if y.numel():
        _launch(x, w, w, y, bias, None, activation, "none", variant)
    return y


def swiglu(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, variant: str | None = None
) -> torch.Tensor:  # fmt: skip
    """silu(x @ w_gate.t()) * (x @ w_up.t()) by one of VARIANTS; None takes warp specialized where it runs.

    Limits and errors are in the module docstring.
    """
    _validate("swiglu", x, None, "silu", "persistent" if variant is None else variant, 2, w_gate=w_gate, w_up=w_up)
    if variant is None:
        variant = "warp specialized" if capability(x.device) == (9, 0) else "persistent"
    y = torch.empty(x.shape[0], w_gate.shape[0], dtype=x.dtype, device=x.device)
    if y.numel():
        _launch(x, w_gate, w_up, y, None, None, "swiglu", "none", variant)
    return y


def linear_fp8(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    scale: torch.Tensor | None = None,
    variant: str = "persistent",
    check_scales: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of linear(): q * scales is the result. With `scale` it serves all, else each group has its own.

    check_scales reads `scale`, which waits for the GPU; pass False where it is known to be good.
    """
    _validate("linear_fp8", x, bias, activation, variant, 1, w=w)
    if scale is not None:
        require_scales("linear_fp8", x, check_scales, scale=(scale, ((1,),)))
    M, N = x.shape[0], w.shape[0]
    q = torch.empty(M, N, dtype=E4M3, device=x.device)
    per = "group" if scale is None else "tensor"
    if scale is None:
        scale = torch.empty(triton.cdiv(N, GROUP.value), M, dtype=torch.float32, device=x.device).t()
    if q.numel():
        _launch(x, w, w, q, bias, scale, activation, per, variant)
    return q, scale


def _activated(y: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(y)
    if activation == "none":
        return y
    return torch.nn.functional.gelu(y, approximate="none" if activation == "gelu exact" else "tanh")


def reference(x, w, bias=None, activation: str = "none") -> torch.Tensor:
    y = x.double() @ w.double().t()
    return _activated(y if bias is None else y + bias.double(), activation)


def reference_swiglu(x, w_gate, w_up) -> torch.Tensor:
    return reference(x, w_gate, None, "silu") * reference(x, w_up)


def _groups(y: torch.Tensor) -> torch.Tensor:
    """y [M, N] as [M, groups, 128], padded with zeros."""
    return torch.nn.functional.pad(y, (0, -y.shape[1] % GROUP.value)).unflatten(1, (-1, GROUP.value))


def group_scales(y: torch.Tensor) -> torch.Tensor:
    return _groups(y).abs().amax(dim=2).clamp(min=FLOOR.value) / fp8_max(E4M3)


def codes(y: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """What is rounded to FP8: y in units of its scale, given or of each group."""
    if scale is not None:
        return y / scale.to(y.dtype)
    return (_groups(y) / group_scales(y)[:, :, None]).flatten(1)[:, : y.shape[1]]


def read_back(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() == 1:
        return q.float() * scale
    return (_groups(q.float()) * scale[:, :, None]).flatten(1)[:, : q.shape[1]]


# Epilogues as kernels of their own, for the compiler to fuse each into one.


def torch_bias_activation(y: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    return _activated(y.float() + bias, activation).to(y.dtype)


def torch_gate(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(both.dtype)


def torch_quantize(y: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 steps as in the kernels; torch's cast does not saturate, so it clamps."""
    most = fp8_max(E4M3)
    if scale is not None:
        return (y.float() * (1.0 / scale)).clamp(-most, most).to(E4M3), scale
    groups = _groups(y.float())
    amax = groups.abs().amax(dim=2).clamp(min=FLOOR.value)
    q = (groups * (most / amax)[:, :, None]).clamp(-most, most).to(E4M3)
    return q.flatten(1)[:, : y.shape[1]], amax / most


def runnable(h: Harness) -> tuple[str, ...]:
    """The variants that this machine can run."""
    return VARIANTS if not h.interpreted and h.machine.sm == 90 else VARIANTS[:1]


def budget(h: Harness, K: int) -> dict:
    """Sums of K products; and they may be rounded to 16 bits before the epilogue, as two kernels do. An activation
    passes that on in proportion to its result, save where a sum is large and the bias, or a tail, leaves little of it:
    the second part is for sums of 6 times their usual size."""
    return {"terms": K, "operand_eps": torch.finfo(h.half).eps / 2}


def layer(h: Harness, M: int, N: int, K: int, weights: int = 1) -> tuple[torch.Tensor, ...]:
    """x, so many weights one after the other in memory, bias: sums of about unit size."""
    w = h.randn(weights * N, K, dtype=h.half, scale=max(K, 1) ** -0.5)
    return h.randn(M, K, dtype=h.half), *w.split(N), h.randn(N, dtype=h.half)


def two_kernels(h: Harness, epilogue: Callable) -> Callable:
    """An epilogue compiled, as a kernel after the library's GEMM; interpreted, as torch has it."""
    return epilogue if h.interpreted else h.compiled(epilogue)


def forms(h: Harness, M: int, N: int, K: int):
    """Of each layer: name, inputs, reference, ours(variant), the library's two kernels, its others, dtype, bytes."""
    x, w, bias = layer(h, M, N, K)
    scale = torch.full((1,), 6.0 / fp8_max(E4M3), device=h.device)
    read, write = x.nbytes + w.nbytes, 2 * M * N

    for activation in ("silu", "gelu"):
        act = two_kernels(h, torch_bias_activation)
        others = {}
        if activation == "gelu" and not h.interpreted:
            others["cuBLAS, its own bias and GELU"] = lambda x, w, bias: torch._addmm_activation(
                bias, x, w.t(), use_gelu=True
            )
        yield (
            f"bias + {'SiLU' if activation == 'silu' else 'GELU'}", (x, w, bias),
            lambda x, w, bias, a=activation: reference(x, w, bias, a),
            lambda variant, a=activation: functools.partial(linear, activation=a, variant=variant),
            lambda x, w, bias, a=activation, act=act: act(torch.matmul(x, w.t()), bias, a),
            others, h.half, read + write + bias.nbytes,
        )  # fmt: skip

    quantize = two_kernels(h, torch_quantize)
    for given, what in ((scale, "FP8, scale given"), (None, "FP8, per group")):
        yield (
            what, (x, w),
            lambda x, w, s=given: codes(reference(x, w), s),
            lambda variant, s=given: lambda x, w: linear_fp8(x, w, scale=s, variant=variant, check_scales=False)[0],
            lambda x, w, s=given, quantize=quantize: quantize(torch.matmul(x, w.t()), s)[0],
            {}, E4M3, read + write // 2 + (0 if given is not None else 4 * M * triton.cdiv(N, GROUP.value)),
        )  # fmt: skip

    x, w_gate, w_up, _ = layer(h, M, N, K, weights=2)
    both, gate = w_gate.as_strided((2 * N, K), w_gate.stride()), two_kernels(h, torch_gate)
    yield (
        "SwiGLU", (x, w_gate, w_up), reference_swiglu,
        lambda variant: functools.partial(swiglu, variant=variant),
        lambda x, w_gate, w_up: gate(torch.matmul(x, both.t())),  # one GEMM for both, gate and up as columns of one
        {}, h.half, x.nbytes + both.nbytes + write,
    )  # fmt: skip


def compare_gemms(h: Harness, M: int, N: int, K: int) -> dict[str, Callable]:
    """The table without an epilogue, and its variants: what of a ratio below is the GEMM's, and what the epilogue's."""
    x, w, _ = layer(h, M, N, K)
    library = "torch" if h.interpreted else "cuBLAS"
    variants = {library: lambda x, w: torch.matmul(x, w.t())}
    variants |= {f"triton {variant}": functools.partial(linear, variant=variant) for variant in runnable(h)}
    h.compare(
        variants, reference, x, w, title="no epilogue", baseline=library, case=case_of(h, M, N, K), terms=K,
        work=Work(bytes=x.nbytes + w.nbytes + 2 * M * N, flops=2 * M * N * K, dtype=h.half),
    )  # fmt: skip
    return variants


def epilogue_us(inputs: tuple, fused: dict[str, Callable], gemms: dict[str, Callable]) -> dict[str, float]:
    """What each of `fused` takes beyond the GEMM of the same name in `gemms`: the median of the rounds' differences.

    Two tables would not say: between them the clocks of a GPU at its power limit change by more than an epilogue takes.
    """
    calls = {(name, True): functools.partial(fn, *inputs) for name, fn in fused.items()}
    calls |= {(name, False): functools.partial(gemms[name], *inputs[:2]) for name in fused}
    rounds = time_rounds(calls, {name: enqueue_ms(call) for name, call in calls.items()})
    with_and_without = {name: zip(rounds[name, True], rounds[name, False], strict=True) for name in fused}
    return {
        name: round(1000 * statistics.median(ours[0] - alone[0] for ours, alone in pairs), 1)
        for name, pairs in with_and_without.items()
    }


def case_of(h: Harness, M: int, N: int, K: int) -> str:
    return f"{M}x{N}x{K} {str(h.half).removeprefix('torch.')}"


def compare_layers(h: Harness, M: int, N: int, K: int) -> None:
    gemm = compare_gemms(h, M, N, K)
    ratios, costs = {}, {}
    baseline = "torch" if h.interpreted else "cuBLAS, then torch.compile"
    for form, inputs, want, ours, library, others, dtype, moved in forms(h, M, N, K):
        gemms = len(inputs) - 1 if form == "SwiGLU" else 1
        variants = {baseline: library, **others} | {f"triton {v}": ours(v) for v in runnable(h)}
        table = h.compare(
            variants, want, *inputs, title=form, baseline=baseline, case=case_of(h, M, N, K), dtype=dtype,
            work=Work(bytes=moved, flops=gemms * 2 * M * N * K, dtype=h.half), **budget(h, K),
        )  # fmt: skip
        if not table or not table.rows[-1].ms:
            continue
        took = {row.variant: row for row in table.rows}
        best = max((row for row in table.rows if row.ours), key=lambda row: row.speedup)
        ratios[form] = {v.removeprefix("triton "): round(r.speedup, 4) for v, r in took.items() if v in gemm}
        ratios[form]["best"] = round(best.speedup, 4)
        if gemms == 1:
            fused = {name: variants[baseline if name == "cuBLAS" else name] for name in gemm}
            us = epilogue_us(inputs, fused, gemm)
            costs[form] = {
                "kernel of its own, us": us.pop("cuBLAS"),
                **{f"{name}, us": each for name, each in us.items()},
            }
    if ratios:
        h.fact(f"over cuBLAS, then torch.compile, {case_of(h, M, N, K)}", ratios)
        h.fact(f"time of the epilogue beyond that of its own GEMM, {case_of(h, M, N, K)}", costs)
        least = min(ratios, key=lambda form: ratios[form]["best"])
        h.say(
            f"{sum(r['best'] > 1 for r in ratios.values())} of {len(ratios)} epilogues are faster in the GEMM's store "
            f"than as a kernel of their own; least for {least}, {ratios[least]['best']:.3f}x"
        )


def explain_rows(h: Harness, M: int, N: int) -> None:
    """Why one scale per row is not among the forms."""
    block_m, block_n, *_ = fitting_tile(h.device, 1)
    across, sms = triton.cdiv(N, block_n), device_limits(h.device).sms
    tiles = across * triton.cdiv(M, block_m)
    h.fact(
        f"a row of {N} columns",
        {"tiles across": across, "groups in a tile": block_n // GROUP.value, "tiles": tiles, "tiles at a time": sms},
    )
    h.say(
        f"{block_n // GROUP.value} groups lie within a tile, a row in {across}: "
        + (
            "its amax is known when the last of them is done, and by then programs have other tiles in their registers"
            if across > 1
            else "only here would a tile also know the amax of a row"
        )
    )


TMA = ("cp.async.bulk.tensor", "mbarrier")
CORES = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


def show_code(h: Harness, M: int = 8192, N: int = 14336, K: int = 4096) -> None:
    x, w, bias = h.meta(M, K), h.meta(N, K), h.meta(N)
    find = {80: (), 89: ()} | {sm: (*TMA, core) for sm, core in CORES.items()}
    h.codegen(linear, x, w, bias, "silu", find=find)
    roles = (*find[90], "setmaxnreg")
    h.codegen(swiglu, x, w, w, find={90: roles, 100: find[100]})
    h.codegen(linear_fp8, x, w, find={90: (*find[90], "cvt f8")})
    h.codegen(linear, x, w, bias, "silu", "warp specialized", find={90: roles})
    h.codegen(linear_fp8, x, w, variant="warp specialized", find={90: (*roles, "cvt f8")})


# One rounding to e4m3, relative or, below its smallest normal, by the size of the row.
FP8_BUDGET = {"dtype": torch.float32, "roundings": 1, "acc": 2.0**-4 * 1.001, "terms": 0}


def demo(h: Harness) -> None:
    # One row; tails in each dimension and more tiles than SMs (the interpreter plays a GPU of four).
    for M, N, K in [(1, 16, 8), (129, 528, 72)]:
        x, w, up, bias = layer(h, M, N, K, weights=2)
        for variant in runnable(h):
            what = f"{variant} {M}x{N}x{K}"
            for activation in ACTIVATIONS if M > 1 else ("silu",):
                fn = functools.partial(linear, activation=activation, variant=variant)
                want = functools.partial(reference, activation=activation)
                h.check(fn, want, x, w, bias, what=f"linear, {activation}, {what}", **budget(h, K))
            gated = functools.partial(swiglu, variant=variant)
            h.check(gated, reference_swiglu, x, w, up, what=f"swiglu, {what}", **budget(h, K))
            for scale in (torch.full((1,), 8.0 / fp8_max(E4M3), device=h.device), None):

                def quantized(x, w, bias, scale=scale, variant=variant):
                    return read_back(*linear_fp8(x, w, bias, "gelu", scale, variant))

                h.check(
                    quantized, lambda x, w, bias: reference(x, w, bias, "gelu"), x, w, bias,
                    what=f"linear_fp8, gelu, {'per group' if scale is None else 'scale given'}, {what}",
                    **FP8_BUDGET, operand_eps=torch.finfo(h.half).eps / 2,
                )  # fmt: skip

    show_code(h)
    small, full = [(260, 272, 392)], [(8192, 14336, 4096)]
    cases = small if not h.timing else h.pick(interpreted=small, quick=[(4096, 4096, 4096)], full=full)
    for M, N, K in cases:
        compare_layers(h, M, N, K)
    if not h.profile:
        explain_rows(h, *cases[-1][:2])


if __name__ == "__main__":
    run(demo)
