"""GELU that writes FP8: an activation quantizes its own result, in one pass, unless the recipe forbids it.

GELU and a quantizer as two kernels move 7 bytes an element, 2 + 2 and 2 + 1; one kernel that keeps y in float32
registers moves 3. What must be known before anything is written depends on the recipe:

  group    the largest of 128 columns: a tile holds many such groups whole. One pass, whatever the row's length;
  row      the largest of a row: a program holds whole rows, so they have at most 16384 columns;
  static   nothing: the scale is given, from calibration or an earlier step (delayed scaling). What is larger than
           scale * max saturates; amax of every tile is returned, for the caller to see that, and for the next scale.

At 3 bytes an element arithmetic is no longer free: an H200's memory delivers 6 elements per clock and SM, whose special
functions give 16 results. So GELU takes an exponential and a reciprocal square root, no division, no erf.

Question   When does an activation get its FP8 scales in the same pass, and what does that save?
Needs      triton, sm_89
Wins when  what reads y is an FP8 GEMM, and x is larger than L2; the gradient of GELU needs x, not y.
Study      studies/fp8/fused_gelu_quantize.py
Source     goes beyond the chapter; GELU: Hendrycks and Gimpel 2016; delayed scaling: Micikevicius et al. 2022
"""

from __future__ import annotations

import functools

from harness import Harness, Table, Work, run

import torch
import triton
import triton.language as tl

from examples.common.activations import gelu_fitted, gelu_tanh
from examples.common.compiled import over_library
from examples.common.fp8 import E4M3, fp8_max, require_scales
from examples.common.operands import check_choice, check_rows
from examples.common.quantize import (
    GROUP,
    READ_BACK,
    absmax,
    codes_of,
    empty_quantized,
    fused_variants,
    quantize_groups,
    read_back,
    scale_and_inverse,
    torch_quantize,
    widen_bfloat16,
)
from examples.common.rows import DTYPES, check_length

TILE = (8, 512)  # rows and columns that a program takes where scales are per group or given
COLUMNS_MAX = 65535 * TILE[1]  # the second dimension of a grid has at most 65535 programs
ROW_MAX = 16384  # columns of a row that one program holds
ROW_TILE = 2048  # values a program takes at least, from several rows where one is shorter
VECTOR = 16  # neighbouring columns of a thread
PER_THREAD = 32  # values a thread holds: two 16-byte stores of FP8


@triton.jit
def gelu_quantize_tiles_kernel(
    x_ptr, q_ptr, scale_ptr, amax_ptr, stride_xm, stride_sg, n_rows, n_cols,
    PER: tl.constexpr, TANH: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    # int64 because row * stride passes 2**31 elements on tensors that still fit in memory.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_exists = rows < n_rows
    first = tl.program_id(1) * BLOCK_N
    cols = tl.broadcast_to((first + tl.arange(0, BLOCK_N))[None, :], (ROWS, BLOCK_N))
    cols = tl.max_contiguous(cols, (1, VECTOR))
    inside = tl.broadcast_to(row_exists[:, None], (ROWS, BLOCK_N))
    if not FULL:
        inside = inside & (cols < n_cols)
    # Outside x is 0, and so is GELU.
    x = tl.load(x_ptr + (rows * stride_xm)[:, None] + cols, mask=inside, other=0.0)
    x = widen_bfloat16(x)
    y = gelu_tanh(x) if TANH else gelu_fitted(x)
    if PER == "group":
        y = quantize_groups(y, scale_ptr, stride_sg, rows, row_exists, first, n_cols, MOST, GROUP, True, False)
    elif PER == "row":
        scale, inverse = scale_and_inverse(absmax(y, 1), MOST, INFINITE=True)
        tl.store(scale_ptr + rows, scale, mask=row_exists)
        y *= inverse[:, None]
    else:
        tl.store(
            amax_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0),
            absmax(absmax(y, 1), 0),
        )
        y *= tl.div_rn(1.0, tl.load(scale_ptr))
    tl.store(q_ptr + (rows * n_cols)[:, None] + cols, y.to(q_ptr.dtype.element_ty), mask=inside)  # saturates


def _launch_tiles(x, q, scale, amax, per: str, approximate: str, rows: int, columns: int) -> None:
    n_rows, n_cols = x.shape
    # Programs start in the order of rows: neighbours write neighbouring scales of a group's column.
    gelu_quantize_tiles_kernel[(triton.cdiv(n_rows, rows), triton.cdiv(n_cols, columns))](
        x, q, scale, amax, x.stride(0), n_rows, n_rows, n_cols,
        PER=per, TANH=approximate == "tanh", MOST=fp8_max(q.dtype), GROUP=GROUP,
        ROWS=rows, BLOCK_N=columns, FULL=n_cols % columns == 0, VECTOR=VECTOR,
        num_warps=max(4, min(32, rows * columns // (32 * PER_THREAD))),
    )  # fmt: skip


def _tile(n_cols: int, per: str) -> tuple[int, int]:
    """Rows and columns of a program: whole rows, or TILE, with more rows and fewer columns where rows are shorter."""
    whole = max(GROUP, triton.next_power_of_2(n_cols))
    columns = whole if per == "row" else min(TILE[1], whole)
    return max(1, (ROW_TILE if per == "row" else TILE[0] * TILE[1]) // columns), columns


def fused_gelu_quantize(
    x: torch.Tensor, per: str = "group", approximate: str = "tanh", dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales), q * scales approximating gelu(x), with a scale per row [n_rows, 1] or per group of 128 columns.

    x [n_rows, n_cols] is float32, float16 or bfloat16, with contiguous rows and any row stride; q is contiguous and
    float8_e4m3fn or float8_e5m2; scales of groups [n_rows, ceil(n_cols / 128)] have strides (1, n_rows), as a GEMM
    reads them. scale = amax / max of the format, q = y * (max / amax), in float32, each rounded once. approximate is
    "tanh", as torch has it, or "none": the exact GELU to 1e-5 of its size. What shares a scale with a NaN or an
    infinity comes back as NaN.

    Raises TypeError for another dtype; ValueError for another rank, no columns, an inner stride other than 1, an
    unknown `per` or `approximate`, more than 16384 columns with per="row", or 33,553,920 in any case; RuntimeError for
    a device without Triton or an input that requires grad.
    """
    name = "fused_gelu_quantize"
    n_rows, n_cols = check_rows(name, x, DTYPES)
    check_choice(name, ("tanh", "none"), approximate=approximate)
    if per not in ("row", "group"):
        raise ValueError(f"{name}: per is {per!r}; pass 'row' or 'group', or call {name}_static with a scale")
    if per == "row":
        check_length(name, n_cols, ROW_MAX, f"{name}(per='group')")
    check_length(name, n_cols, COLUMNS_MAX, "it on parts of the columns")
    q, scale = empty_quantized(name, x, per, dtype)
    if n_rows:  # a grid of zero programs is a launch error
        _launch_tiles(x, q, scale, None, per, approximate, *_tile(n_cols, per))
    return q, scale


def fused_gelu_quantize_static(
    x: torch.Tensor, scale: torch.Tensor, approximate: str = "tanh", dtype: torch.dtype = E4M3, check_scales=True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, amax [tiles]) of GELU with one scale [1] that is given: q = y * (1 / scale) saturates.

    amax.max() is the largest magnitude of gelu(x): above scale * max of the format, something was cut off.
    Raises what fused_gelu_quantize does, and what require_scales does for a scale that is not one positive, finite
    float32 (check_scales=False does not read it, which waits for the GPU).
    """
    name = "fused_gelu_quantize_static"
    n_rows, n_cols = check_rows(name, x, DTYPES)
    check_choice(name, ("tanh", "none"), approximate=approximate)
    check_length(name, n_cols, COLUMNS_MAX, "it on parts of the columns")
    q, _ = empty_quantized(name, x, "row", dtype)
    require_scales(name, x, values=check_scales, scale=(scale, ((1,), (1, 1), ())))
    rows, columns = _tile(n_cols, "static")
    tiles = triton.cdiv(n_rows, rows) * triton.cdiv(n_cols, columns)
    amax = torch.empty(tiles, dtype=torch.float32, device=x.device)
    if tiles:
        _launch_tiles(x, q, scale, amax, "static", approximate, rows, columns)
    return q, amax


def reference(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    return torch.nn.functional.gelu(x.double(), approximate=approximate)


def compare(h: Harness, x: torch.Tensor, per: str, approximate: str = "tanh") -> Table:
    """q of one recipe: by two kernels, by one compiled function, and by ours."""

    def act(x, scale):
        return torch.nn.functional.gelu(x, approximate=approximate)

    def to_fp8(y, x, scale):  # torch's cast need not saturate, so it clamps
        if per != "static":
            return torch_quantize(y, per)
        amax = y.abs().amax(dim=1).amax()  # by rows, for Inductor to take it in the pass that quantizes
        return (y.float() * (1.0 / scale)).clamp(-fp8_max(E4M3), fp8_max(E4M3)).to(E4M3), amax

    def ours(x, scale):
        if per == "static":
            q, amax = fused_gelu_quantize_static(x, scale, approximate, check_scales=False)
            return q, amax.amax()  # of all tiles, as the baselines compute it
        return fused_gelu_quantize(x, per, approximate)

    def codes(x, scale, shift=0):
        y = reference(x, approximate)
        return y / scale.double() if per == "static" else codes_of(y, per, shift)

    # Interpreted, the baseline is checked too, and compiling takes longer than all else.
    return h.compare(
        fused_variants(h.compiled, act, ours, per, to_fp8), codes, x, torch.full((1,), 8.0 / 448, device=h.device),
        baseline="torch" if h.interpreted else "torch.compile, two kernels", dtype=E4M3,
        # More numbers lie in the lower half of a binade: e4m3's roundings leave up to 0.2 % of the gain.
        case=f"{x.shape[0]}x{x.shape[1]} {per}, {approximate}", terms=1, gain=3e-3,
        wrong={"with another row's scale": functools.partial(codes, shift=1)} if per != "static" else None,
        library={"operand_eps": 2.0**-15},  # as two kernels: y in 16 bits, of which float16 has few for the smallest
        work=Work(bytes=x.nbytes + x.numel() + (0 if per == "static" else fused_gelu_quantize(x, per)[1].nbytes)),
    )  # fmt: skip


def answer(tables: dict[str, Table]) -> str:
    gains = {per: over_library([table]) for per, table in tables.items()}
    said = ", ".join(f"{gain:.2f}x ({per})" for per, gain in gains.items())
    return (
        f"One pass is possible per group, per row of up to {ROW_MAX} columns, and with a given scale. It is {said} as "
        f"fast as torch.compile's fastest at {tables['row'].case.split()[0]}; bytes alone would give 2.33x, which "
        f"{'all' if min(gains.values()) > 7 / 3 else 'not all'} exceed."
    )


def demo(h: Harness) -> None:
    for rows, cols in [(3, 5), (3, 781), (1, 9000)]:
        x = h.rows(rows, cols, dtype=h.half)
        for per, approximate in [("row", "tanh"), ("row", "none"), ("group", "tanh"), ("group", "none")]:
            gelu_back = lambda x, a, per=per: read_back(*fused_gelu_quantize(x, per, a), per)  # noqa: E731
            h.check(gelu_back, reference, x, approximate, what=f"{rows}x{cols} per {per}, {approximate}", **READ_BACK)
    x, scale = h.meta(16384, 8192), h.meta(1, dtype=torch.float32)
    find = dict.fromkeys((89, 90, 100, 120), ("ld.global.v4", "st.global.v4"))
    h.codegen(fused_gelu_quantize, x, find=find)
    h.codegen(fused_gelu_quantize_static, x, scale, check_scales=False, find={90: find[90]})

    rows, cols = h.pick(interpreted=(16, 1024), quick=(16384, 8192), full=(16384, 8192))
    x = h.rows(h.fit(rows, bytes_each=60 * cols), cols, dtype=h.half)
    tables = {per: compare(h, x, per) for per in ("group", "row", "static")}
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
