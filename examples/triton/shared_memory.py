"""Where shared memory comes from: not from tl.zeros, but from tl.dot, num_stages and reductions; what reuse is worth.

Technique  Triton has no call that allocates shared memory. A tensor, tl.zeros too, lives in registers. The compiler
           takes shared memory for the operands of tl.dot and for a reduction across warps, which need values of other
           threads, and for loads that num_stages sends ahead; how many bytes follows from the tile. What it is for is
           reuse: a value of A, once there, serves BLOCK_N columns, one of B BLOCK_M rows. A product of M x N x K loads
           M * N * K * (1 / BLOCK_M + 1 / BLOCK_N) values, so a larger tile is fewer bytes for the same work.
Question   What in a kernel takes shared memory, how much, and what does reusing a loaded value save?
Needs      triton
Shapes     matmul_tile, matmul_strip: a [M, K], b [K, N], any strides, any sizes (0 too) -> c [M, N], contiguous.
           scale: any contiguous x. column_sum, row_sum: x [n_rows, n_cols], inner stride 1 -> [n_cols], [n_rows].
Dtypes     float16, bfloat16 for the products; float32 too for the others. Sums are float32, the output has x's dtype.
Errors     TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, an inner stride
           other than 1, a tile that is not in TILES or a number of stages outside 1 to 4; RuntimeError for what
           does not fit the GPU's shared memory, a device without Triton or an input that requires grad.
Wins when  a value is used more than once by the same program; what is used once gains nothing from shared memory.
Source     chapter section "Shared Memory", whose `shared_data = tl.zeros(...)` allocates none: shown below.
Run        python examples/triton/shared_memory.py
"""

from __future__ import annotations

import re
from itertools import pairwise

from harness import Harness, Work, require_triton_device, run
from harness.codegen import CodegenError, Kernel, dump
from harness.hardware import ceilings

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)
BLOCK = 1024  # columns of a program that is no tile: 8 values a thread, one 128-bit load of 16-bit values
WARPS = 4
BLOCK_K = 64
# (BLOCK_M, BLOCK_N) and its warps: as many as leave a thread no more than 128 sums. wgmma starts at 64 rows, 4 warps.
TILES = {(16, 16): 1, (32, 32): 2, (64, 64): 4, (128, 128): 8, (128, 256): 8}
STAGES = 3


@triton.jit
def scale_kernel(x_ptr, out_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_elements
    # The chapter's "allocate shared memory, load data into it": a name for zeros, then the same name for x.
    shared_data = tl.zeros((BLOCK,), dtype=tl.float32)
    shared_data += tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    tl.store(out_ptr + offsets, (shared_data * 2.0).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def column_sum_kernel(x_ptr, out_ptr, stride_xm, n_rows, n_cols, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    stride_xm = tl.cast(stride_xm, tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # A thread adds up its own columns and needs nothing from another. Loads that are sent ahead have to wait somewhere.
    for row in tl.range(0, n_rows, num_stages=STAGES):
        total += tl.load(x_ptr + row * stride_xm + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, stride_xm, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * stride_xm + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    # Threads of a warp exchange registers; warps meet in shared memory, one float32 each.
    tl.store(out_ptr + row, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty))


@triton.jit
def matmul_strip_kernel(
    a_ptr, b_ptr, c_ptr, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, BLOCK_N: tl.constexpr
):  # fmt: skip
    # One row of C at a time: every row loads all of B again.
    tiles_n = tl.cdiv(N, BLOCK_N)
    row = (tl.program_id(0) // tiles_n).to(tl.int64)
    cols = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < N
    a_ptrs, b_ptrs = a_ptr + row * stride_am, b_ptr + cols * stride_bn
    stride_ak, stride_bk = tl.cast(stride_ak, tl.int64), tl.cast(stride_bk, tl.int64)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for _ in range(0, K):
        acc += tl.load(a_ptrs).to(tl.float32) * tl.load(b_ptrs, mask=inside, other=0.0).to(tl.float32)
        a_ptrs += stride_ak
        b_ptrs += stride_bk
    tl.store(c_ptr + row * stride_cm + cols, acc.to(c_ptr.dtype.element_ty), mask=inside)


@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0})
@triton.jit
def matmul_tile_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_row, first_col = tl.program_id(0) // tiles_n * BLOCK_M, tl.program_id(0) % tiles_n * BLOCK_N
    # Rows and columns past the edge wrap around: they load something valid, and the store drops what it makes.
    rows, cols = (first_row + tl.arange(0, BLOCK_M)) % M, (first_col + tl.arange(0, BLOCK_N)) % N
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None].to(tl.int64) * stride_am + inner[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + inner[:, None].to(tl.int64) * stride_bk + cols[None, :].to(tl.int64) * stride_bn
    step_a, step_b = BLOCK_K * tl.cast(stride_ak, tl.int64), BLOCK_K * tl.cast(stride_bk, tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += step_a
        b_ptrs += step_b
    rows, cols = first_row + tl.arange(0, BLOCK_M), first_col + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :].to(tl.int64)
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def _check_stages(name: str, num_stages: int) -> None:
    if type(num_stages) is not int or not 1 <= num_stages <= 4:
        raise ValueError(f"{name}: num_stages is {num_stages!r}; pass an int from 1 to 4")


def _check_matrix(name: str, x: torch.Tensor) -> None:
    require_triton_device(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}")
    if x.ndim != 2:
        raise ValueError(f"{name}: need a matrix [n_rows, n_cols], got shape {tuple(x.shape)}; call x.reshape first")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name}: strides {x.stride()}; the columns must be adjacent, call x.contiguous() first")


def _check_product(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    require_triton_device(name, a, b)
    if a.dtype not in HALF or b.dtype != a.dtype:
        raise TypeError(f"{name}: dtypes {a.dtype} and {b.dtype}; both must be the same one of {HALF}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")


def scale(x: torch.Tensor) -> torch.Tensor:
    """2 * x, by the chapter's kernel."""
    require_triton_device("scale", x)
    if x.dtype not in DTYPES:
        raise TypeError(f"scale: dtype {x.dtype} is not one of {DTYPES}")
    if not x.is_contiguous():
        raise ValueError(f"scale: strides {x.stride()}; call x.contiguous() first")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        scale_kernel[grid](x, out, x.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return out


def column_sum(x: torch.Tensor, num_stages: int = 1) -> torch.Tensor:
    """Sums over the rows of a matrix; num_stages - 1 rows are loaded ahead."""
    _check_matrix("column_sum", x)
    _check_stages("column_sum", num_stages)
    n_rows, n_cols = x.shape
    out = torch.empty(n_cols, dtype=x.dtype, device=x.device)
    if n_cols:
        grid = (triton.cdiv(n_cols, BLOCK),)
        column_sum_kernel[grid](
            x, out, x.stride(0), n_rows, n_cols, BLOCK=BLOCK, STAGES=num_stages, num_warps=WARPS
        )  # fmt: skip
    return out


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums over the columns of a matrix."""
    _check_matrix("row_sum", x)
    n_rows, n_cols = x.shape
    out = torch.empty(n_rows, dtype=x.dtype, device=x.device)
    if n_rows:
        row_sum_kernel[(n_rows,)](x, out, x.stride(0), n_cols, BLOCK=BLOCK, num_warps=WARPS)
    return out


def matmul_strip(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b without reuse: a program computes BLOCK columns of one row."""
    _check_product("matmul_strip", a, b)
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:
        matmul_strip_kernel[(M * triton.cdiv(N, BLOCK),)](
            a, b, c, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0),
            BLOCK_N=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return c


def matmul_tile(
    a: torch.Tensor, b: torch.Tensor, block_m: int = 128, block_n: int = 256, num_stages: int = STAGES
) -> torch.Tensor:
    """a @ b in tiles of block_m x block_n, one of TILES, on the tensor cores."""
    _check_product("matmul_tile", a, b)
    if type(block_m) is not int or type(block_n) is not int or (block_m, block_n) not in TILES:
        raise ValueError(f"matmul_tile: no tile {block_m!r} x {block_n!r}; there are {', '.join(map(str, TILES))}")
    _check_stages("matmul_tile", num_stages)
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:
        try:
            matmul_tile_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
                a, b, c, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0),
                BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, STAGES=num_stages,
                num_warps=TILES[block_m, block_n],
            )  # fmt: skip
        except triton.OutOfResources as error:
            raise RuntimeError(
                f"matmul_tile: {num_stages} stages of a {block_m} x {block_n} tile do not fit this GPU ({error}); "
                "take fewer stages or a smaller tile"
            ) from error
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def tile_bytes(kernel: Kernel, block_m: int, block_n: int, num_stages: int, itemsize: int = 2) -> int:
    """Shared memory of matmul_tile: its operands, times the buffers, and on Blackwell barriers of 8 bytes.

    mma.sync takes its operands from registers, so the buffer in use is free again; wgmma and tcgen05 read it in place.
    """
    in_place = "wgmma" in kernel.found or "tcgen05.mma" in kernel.found
    buffers = num_stages if in_place else max(1, num_stages - 1)
    barriers = (1 if num_stages == 1 else 2) if "tcgen05.mma" in kernel.found else 0
    return buffers * (block_m + block_n) * BLOCK_K * itemsize + 8 * barriers


def allocations(ttgir: str) -> list[str]:
    """The shared buffers that a kernel's TTGIR allocates: buffers x shape x dtype."""
    return re.findall(r"ttg\.local_alloc.*?!ttg\.memdesc<([^,]+),", ttgir)


def show_shared(h: Harness, n: int = 4096) -> None:
    """Predict the shared memory of each kernel, compile it, and raise where the two differ."""
    if not h.shows_code:
        return
    x, a = h.meta(n, n, dtype=torch.float32), h.meta(n, n)
    cases = {
        "scale (the chapter's kernel)": (scale, (x,), (), lambda kernel: 0),
        "column_sum, 1 stage": (column_sum, (x, 1), (), lambda kernel: 0),
        "column_sum, 4 stages": (column_sum, (x, 4), ("cp.async",), lambda kernel: 3 * BLOCK * x.element_size()),
        "row_sum": (row_sum, (x,), (), lambda kernel: WARPS * 4),
        "matmul_strip": (matmul_strip, (a, a), (), lambda kernel: 0),
    }
    for block_m, block_n, stages in [(16, 16, 3), (128, 128, 2), (128, 128, 4)]:
        cases[f"matmul_tile {block_m}x{block_n}, {stages} stages"] = (
            matmul_tile, (a, a, block_m, block_n, stages), ("cp.async",),
            lambda kernel, tile=(block_m, block_n, stages): tile_bytes(kernel, *tile),
        )  # fmt: skip
    found: dict[str, dict[str, list[int]]] = {}
    for label, (wrapper, args, instructions, predict) in cases.items():
        h.say(f"{label}:")
        kernels = h.codegen(wrapper, *args, find=dict.fromkeys((80, 90, 100), instructions))
        for kernel in kernels:
            if kernel.error or kernel.shared != predict(kernel):
                what = kernel.error or f"{kernel.shared} bytes of shared memory, predicted {predict(kernel)}"
                raise CodegenError(f"{label} on sm_{kernel.sm}: {what}")
        found[label] = {f"sm_{kernel.sm}": [predict(kernel), kernel.shared] for kernel in kernels}
    h.fact("bytes of shared memory, [predicted, compiled]", found)

    for label, wrapper, args, shape in (
        ("column_sum, 1 stage", column_sum, (x, 1), f"{BLOCK}"),
        ("column_sum, 4 stages", column_sum, (x, 4), f"{BLOCK}"),
        ("matmul_tile 128x128, 3 stages", matmul_tile, (a, a, 128, 128, 3), "128x128"),
    ):
        ttgir = dump(wrapper, args, sm=90)["ttgir"]
        zeros = re.search(rf"dense<0\.0+e\+00> : (tensor<{shape}xf32, #(?:blocked|mma)\d*>)", ttgir)
        if not zeros:
            raise CodegenError(f"{label} on sm_90: no zeros in registers in its TTGIR")
        buffers = allocations(ttgir)
        shared = f"shared buffers: {' and '.join(buffers)}" if buffers else "no shared buffer"
        h.say(f"TTGIR of {label} on sm_90: tl.zeros is {zeros[1]}, a layout of registers; {shared}")


def loaded_bytes(M: int, N: int, K: int, block_m: int, block_n: int, itemsize: int) -> int:
    """What the programs of a product load, the same value as often as it is loaded."""
    return triton.cdiv(M, block_m) * triton.cdiv(N, block_n) * (block_m + block_n) * K * itemsize


def show_reuse(h: Harness, n: int) -> None:
    """The same product in tiles of growing size: bytes loaded, time, and the rate at which they arrive."""
    n = h.fit(n, bytes_each=60 * n)
    a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
    variants = {"cuBLAS" if a.is_cuda else "torch": torch.matmul, "triton 1-row strip": matmul_strip}
    loaded = {"triton 1-row strip": loaded_bytes(n, n, n, 1, min(n, BLOCK), a.element_size())}
    for block_m, block_n in TILES:
        name = f"triton {block_m}x{block_n}"
        variants[name] = lambda a, b, tile=(block_m, block_n): matmul_tile(a, b, *tile)
        loaded[name] = loaded_bytes(n, n, n, block_m, block_n, a.element_size())
    h.fact(f"bytes loaded by {n}x{n}x{n}", loaded)
    work = Work(bytes=3 * a.nbytes, flops=2 * n**3, dtype=h.half)
    case = f"{n}x{n}x{n} {str(h.half).removeprefix('torch.')}"
    table = h.compare(variants, reference, a, b, baseline=next(iter(variants)), work=work, case=case, terms=n)
    if not table or table.rows[-1].ms is None:
        return
    ms = {row.variant: row.ms for row in table.rows}
    rates = {name: count / ms[name] / 1e9 for name, count in loaded.items()}
    for name, count in loaded.items():
        again = f"each input value {count / (a.nbytes + b.nbytes):.0f} times on average"
        h.say(f"{name}: loads {count / 1e9:.2f} GB, {again}, at {rates[name]:.1f} TB/s")
    if max(rates.values()) > (copy := ceilings().copy_tbps()):
        h.say(f"memory itself copies {copy:.1f} TB/s here: what comes faster comes from L2 and L1")
    for first, second in pairwise(list(loaded)[1:]):  # tile to tile: one kernel, one change
        fewer, faster = loaded[first] / loaded[second], ms[first] / ms[second]
        h.say(f"{first} to {second}: {fewer:.2f}x fewer bytes, {faster:.2f}x the speed")


def demo(h: Harness) -> None:
    for shape in [(1, 1), (3, 781), (37, BLOCK + 1)]:
        x = h.randn(*shape, dtype=h.half)
        h.check(scale, lambda x: 2 * x.double(), x, terms=0, roundings=1)
        h.check(row_sum, lambda x: x.double().sum(1), x, terms=shape[1])
        for stages in (1, 4):
            h.check(
                lambda x, stages=stages: column_sum(x, stages), lambda x: x.double().sum(0), x,
                what=f"column_sum {shape[0]}x{shape[1]}, num_stages {stages}", terms=shape[0],
            )  # fmt: skip
    for M, N, K in [(37, 53, 61), (129, 257, 65)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        h.check(matmul_strip, reference, a[:5], b, what=f"matmul_strip 5x{N}x{K}", terms=K)
        h.check(matmul_tile, reference, a, b, what=f"matmul_tile {M}x{N}x{K}", terms=K)

    show_shared(h)
    show_reuse(h, h.pick(interpreted=32, quick=2048, full=4096))


if __name__ == "__main__":
    run(demo)
