"""GELU that writes FP8: an activation quantizes its own result, in one pass, unless the recipe forbids it.

Technique  GELU and a quantizer as two kernels move 7 bytes an element, 2 + 2 and 2 + 1; one kernel that keeps y in
           float32 registers moves 3. What one pass needs to know before it may write depends on the recipe:
           group     the largest of 128 neighbours: a tile has many such groups, complete. Any row length, one pass;
           row       the largest of a row: a program holds whole rows, up to ROW_MAX columns. A longer row is read twice
                     and GELU computed twice, which is cheaper than writing y;
           static    nothing: the scale is given, from calibration or from earlier steps (delayed scaling). What is
                     larger than scale * max saturates; amax of every tile is returned, so that the caller sees
                     saturation, and has what the next step's scale is made of.
           At 3 bytes an element arithmetic is no longer free. Of exponential and division, the special units make 16 a
           clock and SM, and memory delivers some 6 elements in a clock: so one exponential, one reciprocal root, no
           IEEE division, and no call of erf.
Question   When does an activation get its FP8 scales in the same pass, and what does that save?
Needs      triton, sm_89
Shapes     x [n_rows, n_cols], last dimension contiguous, any row stride -> q [n_rows, n_cols], contiguous, and scales:
           per="row" [n_rows, 1]; per="group" [n_rows, ceil(n_cols / 128)], strides (1, n_rows), as 1x128 scales of a
           GEMM lie. fused_gelu_quantize_static: scale [1] -> q and amax [tiles]. gelu(x) is q * scale.
Dtypes     x float32, float16, bfloat16; q float8_e4m3fn or float8_e5m2; scales and the arithmetic are float32.
           scale = amax / max of the format, q = y * (max / amax), each rounded once; static: q = y * (1 / scale).
           approximate="tanh" as torch's, or "none": the exact GELU to 1e-5 of its size, where FP8 rounds by up to
           6e-2. NaN stays NaN and turns its row or group to NaN when it is read back, as an infinity does.
Errors     TypeError for another dtype, or a scale that is no float32 tensor; ValueError for another rank, no columns,
           an inner stride other than 1, an unknown `per` or `approximate`, a scale of another shape or device, or one
           that is not positive and finite (check_scales=False leaves that out: it waits for the GPU); RuntimeError for
           a device without Triton or an input that requires grad.
Wins when  what reads y is an FP8 GEMM, and x is larger than L2; the gradient of GELU needs x, not y.
Source     GELU: Hendrycks and Gimpel 2016; delayed scaling: Micikevicius et al. 2022; bytes counted here.
Run        python examples/fp8/fused_gelu_quantize.py
"""

from __future__ import annotations

from harness import Harness, Work, fp8_max, interpreted, require_fp8, require_scales, require_triton_device, run

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
GROUP = 128
TILE = (8, 512)  # rows and columns that a program takes where scales are per group or given
ROW_MAX = 16384  # columns of a row that one program holds
ROW_TILE = 2048  # values a program takes at least, from several rows where one is shorter
ROW_STEP = 8192  # of a longer row
PER_THREAD = 32  # values a thread holds: two 16-byte stores of FP8
VECTOR = 16  # neighbouring columns of a thread
ASSEMBLY = tl.constexpr(not interpreted())  # of which the interpreter has none
AMAX_MIN = 2.0**-100  # what counts as amax of a group of zeros
FLOOR = tl.constexpr(AMAX_MIN)


@triton.jit
def _widen(x):
    """x in float32: pairs of 16-bit values, as they lie in 32-bit registers, with one instruction each."""
    if x.dtype == tl.bfloat16 and ASSEMBLY:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """GELU in float32: 2 operations of the special units, and few enough others."""
    if TANH:
        # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)); u = sqrt(2 / pi) (x + 0.044715 x^3), and exp2 wants -2 log2(e) u.
        power = x * (-2.302208198 + -0.1029432397 * (x * x))
        root = tl.rsqrt(1.0 + tl.exp2(power))  # squared, it takes 3 instructions; `/` takes 5
        return x * (root * root)
    else:
        # x Phi(x) is max(x, 0) - |x| Phi(-|x|), and Phi(-a) = exp(-a^2 / 2) t P(t) with t = 1 / (1 + 0.28 a), P fitted
        # to the least relative error (4e-6): small where Phi is, so the negative tail keeps its digits.
        magnitude = tl.abs(x)
        root = tl.rsqrt(1.0 + 0.28 * magnitude)
        t = root * root
        poly = 0.02495613 + t * (0.10543722 + t * -0.05022897)
        poly = 0.11170385 + t * (0.11174059 + t * (0.10193651 + t * (0.09445284 + t * poly)))
        tail = poly * t * tl.exp2(-0.7213475204 * (x * x))
        return _larger(x, 0.0) - magnitude * tail


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(y, axis: tl.constexpr):
    """Largest magnitude along an axis, or NaN where there is one, which tl.max would pass over."""
    if ASSEMBLY:
        return tl.reduce(tl.abs(y), axis, _larger)
    else:  # the interpreter is slow at reductions of our own; as integers, NaN is the largest
        return tl.max(tl.abs(y).to(tl.int32, bitcast=True), axis).to(tl.float32, bitcast=True)


@triton.jit
def _scale_and_inverse(amax, MOST: tl.constexpr):
    """amax / MOST and MOST / amax, each rounded once.

    tl.div_rn rounds so too, but branches on operands that are extreme: a thread with several groups would divide for
    one after the other. Here the branch is not needed: amax has a floor, and SMALL keeps its inverse normal.
    """
    amax = _larger(amax, FLOOR)
    if ASSEMBLY:
        PART: tl.constexpr = 1.0 / MOST
        SMALL: tl.constexpr = 2.0**-16
        near = amax * PART
        scale = tl.fma(tl.fma(near, -MOST, amax), PART, near)  # the remainder, exact, makes the quotient so
        down = amax * SMALL
        guess = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [down], tl.float32, True, 1)
        guess = tl.fma(tl.fma(guess, -down, 1.0), guess, guess)  # a step of Newton
        near = guess * (MOST * SMALL)
        inverse = tl.fma(tl.fma(near, -down, MOST * SMALL), guess, near)
        infinite = amax == float("inf")
        return tl.where(infinite, amax, scale), tl.where(infinite, 0.0, inverse)
    else:
        return tl.div_rn(amax, MOST), tl.div_rn(MOST, amax)


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
    y = _gelu(_widen(x), TANH)
    if PER == "group":
        grouped = tl.reshape(y, (ROWS, BLOCK_N // GROUP, GROUP))
        scale, inverse = _scale_and_inverse(_amax(grouped, 2), MOST)
        groups = first // GROUP + tl.arange(0, BLOCK_N // GROUP)
        group_exists = row_exists[:, None] & (groups * GROUP < n_cols)[None, :]
        tl.store(scale_ptr + rows[:, None] + groups[None, :].to(tl.int64) * stride_sg, scale, mask=group_exists)
        y = tl.reshape(grouped * inverse[:, :, None], (ROWS, BLOCK_N))
    elif PER == "row":
        scale, inverse = _scale_and_inverse(_amax(y, 1), MOST)
        tl.store(scale_ptr + rows, scale, mask=row_exists)
        y *= inverse[:, None]
    else:
        tl.store(amax_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), _amax(_amax(y, 1), 0))
        y *= tl.div_rn(1.0, tl.load(scale_ptr))
    tl.store(q_ptr + (rows * n_cols)[:, None] + cols, y.to(q_ptr.dtype.element_ty), mask=inside)  # saturates


@triton.jit
def gelu_quantize_long_rows_kernel(
    x_ptr, q_ptr, scale_ptr, stride_xm, n_cols, TANH: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_row, q_row = x_ptr + row * stride_xm, q_ptr + row * n_cols
    lane = tl.arange(0, STEP)
    largest = tl.zeros((STEP,), tl.float32)
    for start in tl.range(0, n_cols, STEP):
        cols = start + lane
        x = tl.load(x_row + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last")
        largest = _larger(largest, tl.abs(_gelu(_widen(x), TANH)))
    scale, inverse = _scale_and_inverse(_amax(largest, 0), MOST)
    tl.store(scale_ptr + row, scale)
    for start in tl.range(0, n_cols, STEP):
        cols = start + lane
        x = tl.load(x_row + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_first")
        q = (_gelu(_widen(x), TANH) * inverse).to(q_ptr.dtype.element_ty)
        tl.store(q_row + cols, q, mask=cols < n_cols)


def _checked(name: str, x: torch.Tensor, approximate: str, dtype: torch.dtype) -> torch.Tensor:
    """An empty q for x, or the error that the module docstring documents."""
    require_triton_device(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}; convert with x.float() first")
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"{name}: need a matrix [n_rows, 1 or more columns], got shape {tuple(x.shape)}; call x.reshape(-1, n_cols)"
        )
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"{name}: strides {x.stride()}, but columns must be contiguous; call x.contiguous() first")
    if approximate not in ("tanh", "none"):
        raise ValueError(f"{name}: approximate is {approximate!r}; pass 'tanh' or 'none'")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: dtype is {dtype!r}; pass {E4M3} or torch.float8_e5m2")
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    require_fp8(name, q=q)
    return q


def _launch_tiles(x, q, scale, amax, per: str, approximate: str, rows: int, columns: int) -> None:
    n_rows, n_cols = x.shape
    # Programs start in the order of rows: neighbours write neighbouring scales of a group's column.
    gelu_quantize_tiles_kernel[(triton.cdiv(n_rows, rows), triton.cdiv(n_cols, columns))](
        x, q, scale, amax, x.stride(0), n_rows, n_rows, n_cols,
        PER=per, TANH=approximate == "tanh", MOST=fp8_max(q.dtype), GROUP=GROUP,
        ROWS=rows, BLOCK_N=columns, FULL=n_cols % columns == 0, VECTOR=VECTOR,
        num_warps=max(4, min(32, rows * columns // (32 * PER_THREAD))),
    )  # fmt: skip


def _tile(x: torch.Tensor) -> tuple[int, int]:
    """TILE, with more rows and fewer columns where rows are shorter."""
    rows, columns = TILE
    fits = max(GROUP, min(columns, triton.next_power_of_2(x.shape[1])))
    return rows * columns // fits, fits


def fused_gelu_quantize(
    x: torch.Tensor, per: str = "group", approximate: str = "tanh", dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of GELU, with a scale per 1x128 group or per row; limits and errors are in the module docstring."""
    q = _checked("fused_gelu_quantize", x, approximate, dtype)
    if per not in ("row", "group"):
        raise ValueError(
            f"fused_gelu_quantize: per is {per!r}; pass 'row' or 'group' (of {GROUP} columns), or call "
            "fused_gelu_quantize_static with one scale for all"
        )
    n_rows, n_cols = x.shape
    if per == "group":
        scale = torch.empty(triton.cdiv(n_cols, GROUP), n_rows, dtype=torch.float32, device=x.device).t()
        if n_rows:  # a grid of zero programs is a launch error
            _launch_tiles(x, q, scale, None, per, approximate, *_tile(x))
        return q, scale
    scale = torch.empty(n_rows, 1, dtype=torch.float32, device=x.device)
    if n_rows and n_cols <= ROW_MAX:
        block_n = max(GROUP, triton.next_power_of_2(n_cols))
        _launch_tiles(x, q, scale, None, per, approximate, max(1, ROW_TILE // block_n), block_n)
    elif n_rows:
        gelu_quantize_long_rows_kernel[(n_rows,)](
            x, q, scale, x.stride(0), n_cols,
            TANH=approximate == "tanh", MOST=fp8_max(dtype), STEP=ROW_STEP, num_warps=ROW_STEP // (32 * PER_THREAD),
        )  # fmt: skip
    return q, scale


def fused_gelu_quantize_static(
    x: torch.Tensor,
    scale: torch.Tensor,
    approximate: str = "tanh",
    dtype: torch.dtype = E4M3,
    check_scales: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, amax) of GELU with one scale that is given: q saturates, and amax [tiles] says by how much.

    amax.max() is the largest magnitude of gelu(x): above scale * max of the format, something was cut off.
    """
    q = _checked("fused_gelu_quantize_static", x, approximate, dtype)
    require_scales("fused_gelu_quantize_static", x, values=check_scales, scale=(scale, ((1,), (1, 1), ())))
    rows, columns = _tile(x)
    tiles = triton.cdiv(x.shape[0], rows) * triton.cdiv(x.shape[1], columns)
    amax = torch.empty(tiles, dtype=torch.float32, device=x.device)
    if tiles:
        _launch_tiles(x, q, scale, amax, "static", approximate, rows, columns)
    return q, amax


def reference(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    return torch.nn.functional.gelu(x.double(), approximate=approximate)


def _groups(y: torch.Tensor, per: str) -> torch.Tensor:
    """y [n_rows, n_cols] as [n_rows, groups, columns of a group], padded with zeros."""
    size = y.shape[1] if per == "row" else GROUP
    return torch.nn.functional.pad(y, (0, -y.shape[1] % size)).unflatten(1, (-1, size))


def scales_of(y: torch.Tensor, per: str) -> torch.Tensor:
    """The scales of a result, in the precision of y."""
    return _groups(y, per).abs().amax(dim=2).clamp(min=AMAX_MIN) / fp8_max(E4M3)


def codes_of(y: torch.Tensor, per: str) -> torch.Tensor:
    """What is rounded to FP8: y in units of its scale."""
    return (_groups(y, per) / scales_of(y, per)[:, :, None]).flatten(1)[:, : y.shape[1]]


def read_back(q: torch.Tensor, scale: torch.Tensor, per: str) -> torch.Tensor:
    return (_groups(q.float(), per) * scale[:, :, None]).flatten(1)[:, : q.shape[1]]


def torch_gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def torch_quantize(y: torch.Tensor, per: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantizer in torch, float32 steps as in the kernels; torch's cast does not saturate, so it clamps."""
    groups, most = _groups(y.float(), per), fp8_max(E4M3)
    amax = groups.abs().amax(dim=2).clamp(min=AMAX_MIN)
    q = (groups * (most / amax)[:, :, None]).clamp(-most, most).to(E4M3)
    return q.flatten(1)[:, : y.shape[1]], amax / most


def torch_fused(x: torch.Tensor, per: str, approximate: str) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU and quantizer in one function, y in float32 as in our kernels: for the compiler to fuse."""
    return torch_quantize(torch_gelu(x.float(), approximate), per)


def torch_static(y: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    most = fp8_max(E4M3)
    return (y.float() * (1.0 / scale)).clamp(-most, most).to(E4M3), y.abs().amax()


def torch_static_fused(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch_static(torch_gelu(x.float(), "tanh"), scale)


def explain(h: Harness, x: torch.Tensor, recipe: str, table) -> None:
    """Put the bytes that fusing saves next to the time that it saved."""
    took = {row.variant: row.ms for row in table.rows}
    size = x.element_size()
    moved = {"two kernels": 3 * size + 1, "fused": size + 1}  # bytes an element
    ms = {"two kernels": took["torch.compile, two kernels"], "fused": took["triton fused"]}
    h.fact(
        f"two kernels and one, {recipe}, {table.case}",
        {way: {"MiB": round(moved[way] * x.numel() / 2**20), "ms": round(ms[way], 4)} for way in moved},
    )
    allowed = moved["two kernels"] / moved["fused"]
    h.say(f"bytes allow {allowed:.2f}x over two kernels, measured {ms['two kernels'] / ms['fused']:.2f}x")


def show_saturation(h: Harness, x: torch.Tensor) -> None:
    """What a scale that is too small costs, and that amax tells."""
    y = reference(x)
    seen = {}
    for share in (1.0, 0.5, 0.1):
        scale = (share * y.abs().amax() / fp8_max(E4M3)).float().reshape(1)
        q, amax = fused_gelu_quantize_static(x, scale)
        cut = (q.float().abs() == fp8_max(E4M3)).double().mean().item()
        error = ((q.double() * scale.double() - y).norm() / y.norm()).item()
        reported = amax.max().item() / (scale.item() * fp8_max(E4M3))
        seen[f"scale for {share:g} of amax"] = {
            "at the maximum": float(f"{cut:.2g}"), "error": float(f"{error:.2g}"), "amax / range": round(reported, 2),
        }  # fmt: skip
    h.fact(f"a given scale that is too small, {x.shape[0]}x{x.shape[1]}", seen)


# One rounding to e4m3, relative or, below its smallest normal, by the size of the row; float32 on the way to it.
BUDGET = {"dtype": torch.float32, "roundings": 1, "acc": 2.0**-4 * 1.001, "terms": 0, "operand_eps": 4e-6}


def demo(h: Harness) -> None:
    # Tails before sizes.
    for rows, cols in [(3, 5), (3, 781), (1, 17000)]:
        x = h.randn(rows, cols, dtype=h.half, scale=2.0)
        for per, approximate in [("row", "tanh"), ("row", "none"), ("group", "tanh"), ("group", "none")]:

            def gelu(x, approximate, per=per):
                return read_back(*fused_gelu_quantize(x, per, approximate), per)

            def scales(x, approximate, per=per):
                return fused_gelu_quantize(x, per, approximate)[1]

            def reference_scales(x, approximate, per=per):
                return scales_of(reference(x, approximate), per)

            what = f"{rows}x{cols} per {per}, {approximate}"
            h.check(gelu, reference, x, approximate, what=f"GELU read back, {what}", **BUDGET)
            h.check(
                scales, reference_scales, x, approximate,
                what=f"scales of GELU, {what}", dtype=torch.float32, terms=0, roundings=64, constant_ok=True,
            )  # fmt: skip

        scale = torch.full((1,), 4.0 / fp8_max(E4M3), device=h.device)

        def static(x, scale):
            return fused_gelu_quantize_static(x, scale)[0].float() * scale

        def reference_static(x, scale):
            most = scale.double() * fp8_max(E4M3)
            return torch.minimum(reference(x), most)  # GELU has no large negative values to cut

        h.check(static, reference_static, x, scale, what=f"GELU with a given scale, {rows}x{cols}", **BUDGET)

    x, scale = h.meta(16384, 8192), h.meta(1, dtype=torch.float32)
    wide = dict.fromkeys((89, 90, 100, 120), ("ld.global.v4", "st.global.v4"))
    h.codegen(fused_gelu_quantize, x, find=wide)
    h.codegen(fused_gelu_quantize, x, per="row", find={90: wide[90]})
    h.codegen(fused_gelu_quantize_static, x, scale, check_scales=False, find={90: wide[90]})
    if not h.profile:
        show_saturation(h, h.randn(64, 1024, dtype=h.half))

    # Interpreted, the baseline is checked too, and compiling takes longer than all else.
    baseline = "torch" if h.interpreted else "torch.compile, two kernels"
    rows, cols = h.pick(interpreted=(16, 1024), quick=(16384, 8192), full=(16384, 8192))
    x = h.randn(h.fit(rows, bytes_each=60 * cols), cols, dtype=h.half, scale=2.0)
    for per, approximate in [("group", "tanh"), ("row", "tanh"), ("group", "none")]:
        act, quantize, together = h.compiled(torch_gelu), h.compiled(torch_quantize), h.compiled(torch_fused)
        variants = {
            "torch": lambda x, p=per, a=approximate: torch_quantize(torch_gelu(x, a), p)[0],
            "torch.compile, two kernels": lambda x, p=per, a=approximate, g=act, q=quantize: q(g(x, a), p)[0],
            "torch.compile": lambda x, p=per, a=approximate, f=together: f(x, p, a)[0],
            "triton fused": lambda x, p=per, a=approximate: fused_gelu_quantize(x, p, a)[0],
        }
        scale_bytes = 4 * x.shape[0] * (1 if per == "row" else triton.cdiv(cols, GROUP))
        recipe = f"{'tanh' if approximate == 'tanh' else 'exact'} GELU to FP8, per {per}"
        table = h.compare(
            variants, lambda x, p=per, a=approximate: codes_of(reference(x, a), p), x,
            title=recipe, baseline=baseline, dtype=E4M3,
            work=Work(bytes=x.nbytes + x.numel() + scale_bytes), terms=1,
        )  # fmt: skip
        if table and table.rows[-1].ms and x.is_cuda:
            explain(h, x, recipe, table)

    scale = torch.full((1,), 8.0 / fp8_max(E4M3), device=h.device)
    act, quantize, together = h.compiled(torch_gelu), h.compiled(torch_static), h.compiled(torch_static_fused)
    variants = {
        "torch": lambda x, scale: torch_static(torch_gelu(x, "tanh"), scale)[0],
        "torch.compile, two kernels": lambda x, scale: quantize(act(x, "tanh"), scale)[0],
        "torch.compile": lambda x, scale: together(x, scale)[0],
        "triton fused": lambda x, scale: fused_gelu_quantize_static(x, scale, check_scales=False)[0],
    }
    recipe = "tanh GELU to FP8, scale given"
    table = h.compare(
        variants, lambda x, scale: reference(x) / scale.double(), x, scale,
        title=recipe, baseline=baseline, dtype=E4M3, work=Work(bytes=x.nbytes + x.numel()), terms=1,
    )  # fmt: skip
    if table and table.rows[-1].ms and x.is_cuda:
        explain(h, x, recipe, table)


if __name__ == "__main__":
    run(demo)
