"""Weight-only quantization: 4-bit or FP8 weights, 16-bit activations, dequantized between shared memory and the MMA.

A linear layer of few rows takes as long as reading its weights (skinny_matmul). At a long copy's speed an H200 reads
8192 x 8192 in 8 us at 4 bits (0.52 bytes with a scale for 128), 16 us in FP8 and 32 us in bf16; short reads are slower
(study). And arithmetic is in the way: an SM receives 35 4-bit weights a cycle, and does 64 integer operations.

  layout      A 16-bit word has 4 (2) weights that are 64 columns apart, so a tile of words is 4 (2) tiles of weights,
              each in the very layout in which the MMA wants it: no weight moves between threads.
  operations  A nibble is or-ed into the mantissa of 128.0, two at a time, and 136 is subtracted: bf16 from -8 to 7.
              FP8 is shifted into bf16's exponent and mantissa, and multiplied by 2^120, as the biases differ.
  scales      multiply sums, not weights: the products of rounded weights and x are then exact.

The MMA computes y^T = w x^T, since Hopper's takes its left operand from registers; stream-K as in skinny_matmul.

Question   How much faster than a bf16 GEMM are 4-bit and FP8 weights, with 1 to 64 rows?
Needs      triton, sm_90
Wins when  M is at most 64, most of all at 1, in a CUDA graph: the host takes longer to launch a call than the GPU to
           run it. More rows would gain more from weights dequantized once for many rows, and then from FP8 activations.
Variants   weight_only_matmul_gemv.py (one row, unsplit), weight_only_matmul_packing.py (quantizing and its inverse)
Study      studies/triton/weight_only_matmul.py
Source     goes beyond the chapter; bits into a mantissa as in FasterTransformer's and Marlin's kernels
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.compiled import SEARCH
from examples.common.device import architecture
from examples.common.stream_k import first_unit, launch_stream_k, stages_that_fit, start_dependents, store_share
from examples.common.tma import rows_for_tma, tma_descriptor, tma_takes
from examples.common.untraced import untraced
from examples.triton.weight_only_matmul_gemv import fills_gpu, weight_only_matmul_gemv
from examples.triton.weight_only_matmul_packing import (
    FORMATS,
    GROUP,
    WORDS,
    PackedWeight,
    check_packed,
    dequantized,
    quantize_weight,
    torch_int4pack,
    two_parts,
)  # fmt: skip

# BLOCK_M, BLOCK_N, warps: the first that holds all rows, else the last.
TILES = [(8, 128, 4), (16, 64, 4), (32, 64, 4), (64, 128, 8)]
STAGES, PER_SM = 8, 4  # at most; of the programs of an SM one dequantizes while another multiplies
linear = torch.nn.functional.linear


@triton.jit(do_not_specialize=["steps"])
def weight_only_matmul_kernel(
    x_desc, w_desc, scale_ptr, y_ptr, parked_ptr, M, N, steps, units, INT4: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_dependents(EARLY)
    PARTS: tl.constexpr = 4 if INT4 else 2
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    first, end = first_unit(program, units, programs), first_unit(program + 1, units, programs)
    tile, step, count = (first // steps).to(tl.int32), (first % steps).to(tl.int32), (end - first).to(tl.int32)
    begun = step
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # The loop of skinny_matmul, save that weights pass through registers between shared memory and the MMA.
    for i in tl.range(0, count, num_stages=STAGES):
        row, col, k = tile // tiles_m * BLOCK_N, tile % tiles_m * BLOCK_M, step * (PARTS * WORDS)
        words = w_desc.load([row, step * WORDS])
        # cp.async copies 4 bytes at least: int4's two scales of a row and step (16 bits each) are one word.
        n = tl.minimum(row + tl.arange(0, BLOCK_N), N - 1)
        if INT4:
            scales = tl.load(scale_ptr + step.to(tl.int64) * N + n)
            left = scales.to(tl.int16).to(dtype, bitcast=True)
            right = (scales >> 16).to(tl.int16).to(dtype, bitcast=True)
            part = tl.dot(two_parts(words, 0, INT4, dtype), x_desc.load([col, k]).T)
            acc += part * left.to(tl.float32)[:, None]
            part = tl.dot(two_parts(words, 2, INT4, dtype), x_desc.load([col, k + 2 * WORDS]).T)
            acc += part * right.to(tl.float32)[:, None]
        else:
            part = tl.dot(two_parts(words, 0, INT4, dtype), x_desc.load([col, k]).T)
            acc += part * tl.load(scale_ptr + n)[:, None]
        last = step == steps - 1
        if last | (i == count - 1):
            whole, slot = last & (begun == 0), 2 * program + (begun == 0)
            store_share(y_ptr, parked_ptr, acc, whole, slot, row, col, 0, M, N, BLOCK_M)
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        begun = tl.where(last, 0, begun)
        tile = tl.where(last, tile + 1, tile)
        step = tl.where(last, 0, step + 1)


def choose_tile(M: int, format: str, device: torch.device) -> tuple[int, ...]:
    """(BLOCK_M, BLOCK_N, warps, programs of an SM, stages): the most programs that have three stages or more each, else
    one program with what fits."""
    m, n, num_warps = next((tile for tile in TILES if tile[0] >= M), TILES[-1])
    if (m, format) == (16, "fp8") and architecture(device) // 10 == 10:
        num_warps = 8  # with Triton 3.9, tcgen05 and 4 warps it spills
    step_bytes = 2 * WORDS.value * (n + m * FORMATS[format])
    for per_sm in range(PER_SM, 0, -1):
        stages = stages_that_fit(device, m, n, step_bytes, STAGES, per_sm)
        if stages >= 3:
            break
    return m, n, num_warps, per_sm, stages


@untraced
def weight_only_matmul_stream_k(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """weight_only_matmul by stream-K, for any number of rows."""
    M, N, K = check_packed("weight_only_matmul_stream_k", x, packed)
    if not (M and N and K):
        return torch.zeros((M, N), dtype=x.dtype, device=x.device)
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if not tma_takes(x):
        x = rows_for_tma(x).copy_(x)
    int4, words = packed.format == "int4", WORDS.value
    scales = packed.scales.view(torch.int32) if int4 else packed.scales
    m, n, num_warps, per_sm, stages = choose_tile(M, packed.format, x.device)

    def launch(programs: int, parked: torch.Tensor, steps: int, units: int, early: bool) -> None:
        weight_only_matmul_kernel[(programs,)](
            tma_descriptor(x, [m, 2 * words]), tma_descriptor(packed.words, [n, words]), scales, y, parked,
            M, N, steps, units,
            INT4=int4, BLOCK_M=m, BLOCK_N=n, STAGES=stages, EARLY=early, num_warps=num_warps,
        )  # fmt: skip

    launch_stream_k(launch, y, packed.words.shape[1], (m, n, words), per_sm=per_sm)
    return y


@untraced
def weight_only_matmul(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """x [M, K] times the weights [N, K] of quantize_weight, transposed: y [M, N], contiguous, in the dtype of x.

    float16 or bfloat16, for int4 that of the original weights; any sizes (0 too) and strides of x, which is copied
    where it cannot be loaded. The accumulator is float32. One row takes weight_only_matmul_gemv where N has work for
    all SMs, all else weight_only_matmul_stream_k.

    Raises TypeError for another dtype, or weights that are not packed; ValueError for rank, inner sizes or a device;
    RuntimeError for a device without Triton or before sm_90, or an input that requires grad.
    """
    M, N, _ = check_packed("weight_only_matmul", x, packed)
    one = M == 1 and fills_gpu(N, x.device)
    return (weight_only_matmul_gemv if one else weight_only_matmul_stream_k)(x, packed)


def in_float64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


def torch_dequantized(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    return linear(x, dequantized(packed, x.dtype))


def reference(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    return in_float64(x, dequantized(packed))


def compare(h: Harness, M: int, N: int, K: int, title: str | None = None):
    """A GEMM of 16-bit weights, and for each format ours and what torch.compile makes of the same packed weights."""
    x, w = h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half, scale=K**-0.5)
    library = "torch" if h.interpreted else "cuBLAS 16 bit"
    variants, references = {library: partial(linear, weight=w)}, {library: partial(in_float64, weight=w)}
    moved = {}
    for format in FORMATS:
        packed = quantize_weight(w, format)
        moved[format] = packed.words.nbytes + packed.scales.nbytes + x.nbytes + x.element_size() * M * N
        compiled = h.compiled(partial(torch_dequantized, packed=packed), options=SEARCH)
        dequantizing = {f"torch.compile {format}": compiled}
        if format == "int4" and K % GROUP == 0 and h.half == torch.bfloat16:
            dequantizing["torch int4pack"] = torch_int4pack(packed)
        ours = {f"triton {format}": partial(weight_only_matmul, packed=packed)}
        variants |= dequantizing | ours
        references |= dict.fromkeys(dequantizing | ours, partial(reference, packed=packed))
    # torch.compile may round weights to 16 bits, or not.
    rounded = {name: {"operand_eps": 2.0**-9} for name in variants if name.startswith("torch") and name != library}
    work = Work(bytes=min(moved.values()), flops=2 * M * N * K, dtype=h.half)  # the others read more
    return h.compare(
        variants, references["triton int4"], x, baseline=library, work=work, title=title, case=f"{M}x{N}x{K}",
        terms=K, references=references, budgets=rounded, default="triton int4",
    )  # fmt: skip


def answer(tables: dict) -> str:
    one = tables[1]
    row, library = one["triton int4"], one.baseline
    speeds = {f: ", ".join(f"{t.over(library, f'triton {f}'):.2f}x" for t in tables.values()) for f in FORMATS}
    theirs = min(one.over(v, row.variant) for v in ("torch.compile int4", "torch int4pack") if v in one)
    slow = f"a launch takes the host {row.enqueue_us:.0f} us, the GPU {row.ms * 1000:.0f}: use a CUDA graph"
    alone = slow if row.enqueue_us > row.ms * 1000 else "no CUDA graph is needed"
    return (
        f"Over {library} at {', '.join(map(str, tables))} rows: int4 {speeds['int4']}; FP8 {speeds['fp8']}. int4, one "
        f"row: {theirs:.2f}x torch's fastest int4, weights at {row.of_ceiling:.0%} of a copy's speed; {alone}."
    )


def demo(h: Harness) -> None:
    # One of each; one row (unsplit on few SMs); tails everywhere, rows TMA cannot load; shared tiles; nothing to sum.
    for format in FORMATS:
        for M, N, K in [(1, 1, 1), (1, 163, 517), (5, 131, 517), (33, 72, 1700), (3, 7, 0)]:
            packed = quantize_weight(h.randn(N, K, dtype=h.half), format)
            x, fn = h.randn(M, K, dtype=h.half), partial(weight_only_matmul, packed=packed)
            h.check(fn, partial(reference, packed=packed), x, terms=K, what=f"{format} {M}x{N}x{K}")

    tma, N = ("cp.async.bulk.tensor", "mbarrier"), 8192
    find = {90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")}
    words, scales = h.meta(N, N // 4, dtype=torch.int16), h.meta(N // (2 * GROUP), N, 2)
    packed = PackedWeight(words, scales, N, "int4")
    h.codegen(weight_only_matmul, h.meta(16, N), packed, find=find)
    h.codegen(weight_only_matmul, h.meta(1, N), packed, find=dict.fromkeys(find, ("cp.async",)))

    rows = h.pick(interpreted=(1,), quick=(1, 16), full=(1, 16, 64))
    size = h.pick(interpreted=(72, 264), quick=(4096, 4096), full=(8192, 8192))
    tables = {M: compare(h, M, *size) for M in rows}

    if tables[1]:
        h.say("TB/s and % of ceiling count int4's 0.52 bytes a weight, in each row: FP8 reads 1, 16 bits 2.")
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
