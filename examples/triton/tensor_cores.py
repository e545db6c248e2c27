"""tl.dot by precision: what float32, tf32, bf16, fp16 and int8 cost in time and in error.

tl.dot multiplies in the format of its operands, on the tensor cores where these have that format. They have no
float32: unless told otherwise Triton takes it as tf32, the first 10 bits of each mantissa. input_precision="ieee" keeps
all 23 bits, on the CUDA cores; "tf32x3" writes each number as the sum of two in tf32 and adds three products.

A GEMM is 2 M N K FLOPs in every precision: on paper each halving of the operands' 4, 2 or 1 bytes doubles the rate
of the tensor cores. It also costs bits: an operand rounded to p bits of mantissa is off by about 2^-p / 5 (rms). The
accumulator is float32, or int32 for int8, which is exact. In the kernel only dtype, input_precision and tile change.

Question   What does each precision of tl.dot cost in time and in error, and which of them use the tensor cores?
Needs      triton
Wins when  it is fused with something; a plain GEMM is the library's, save int8's (1.17x cuBLAS on an H200). There
           tf32x3 loses to ieee in time, though tf32 takes an eighth of ieee's time, and wins in error (2e-7, not 1e-6).
Variants   tensor_cores_precisions.py (no kernel: the tile and layout of each precision)
Study      studies/triton/tensor_cores.py
Source     chapter section "Tensor Cores", which does not say what tl.dot makes of float32: tf32, off by 8e-4 (rms)
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Table, Work, run

import torch
import triton
import triton.language as tl

from examples.common.operands import check_choice, check_gemm, short_of_k
from examples.common.pointers import load_tiles, store_tile, tile_pointers
from examples.common.tiles import tile_coords
from examples.triton.tensor_cores_precisions import INT8_STEP, PRECISIONS, TENSOR_CORES, budget, convert

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
NONE = "CUDA cores"
MAX_K_INT8 = 2**17 - 1  # 2**17 products of -128 * -128 are 2**31, one more than an int32 holds


@triton.jit
def dot_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    PRECISION: tl.constexpr, ACC: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    row, col = tile_coords(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    a_ptrs, b_ptrs, step_a, step_b = tile_pointers(
        a_ptr, b_ptr, row, col, M, N, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for k in range(0, K, BLOCK_K):
        a, b = load_tiles(a_ptrs, b_ptrs, K - k, EVEN_K)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)  # the one line that this file is about
        a_ptrs += step_a
        b_ptrs += step_b
    store_tile(c_ptr, acc, row, col, M, N, stride_cm, stride_cn)


def dot(a: torch.Tensor, b: torch.Tensor, input_precision: str | None = None) -> torch.Tensor:
    """a @ b for a [M, K] and b [K, N] of any strides and sizes (0 too): c [M, N], contiguous.

    Both are float32, bfloat16 or float16, and so is c; or int8, and c is int32. float32 takes an `input_precision`:
    "ieee", "tf32", "tf32x3", or None for Triton's default, tf32. tf32 and int8 are fast when b is K-major (stride 1
    along K, as in x @ weight.t()). Raises TypeError for another dtype or two dtypes; ValueError for rank, inner sizes,
    two devices, an input_precision unknown or for another dtype, or int8 with a K whose sums may overflow int32;
    RuntimeError for a device without Triton or an input that requires grad.
    """
    M, N, K = check_gemm("dot", a, b, DTYPES)
    check_choice("dot", ("ieee", "tf32", "tf32x3", None), input_precision=input_precision)
    if input_precision is not None and a.dtype is not torch.float32:
        raise ValueError(f"dot: input_precision {input_precision!r} is for float32, not {a.dtype}; leave it out")
    exact = a.dtype is torch.int8
    if exact and K > MAX_K_INT8:
        raise ValueError(f"dot: K is {K}, and a sum of more than {MAX_K_INT8} int8 products may overflow; split K")
    c = torch.empty((M, N), dtype=torch.int32 if exact else a.dtype, device=a.device)
    if c.numel():
        name = (input_precision or "tf32") if a.dtype is torch.float32 else str(a.dtype).removeprefix("torch.")
        block_m, block_n, block_k, num_warps, num_stages = PRECISIONS[name].tile
        dot_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
            a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(),
            PRECISION=input_precision, ACC=tl.int32 if exact else tl.float32, GROUP_M=8,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=K % block_k == 0, num_warps=num_warps,
            num_stages=num_stages,
        )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def product(a: torch.Tensor, b: torch.Tensor, name: str) -> torch.Tensor:
    """dot of two float32 matrices converted to a precision, in float64."""
    c = dot(*convert(name, a, b), PRECISIONS[name].input_precision).double()
    return c * INT8_STEP**2 if name == "int8" else c


def rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).square().mean() / want.square().mean()).sqrt().item()


def matrices(h: Harness, name: str, M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random float32 a and b, b laid out as a precision likes it."""
    return h.randn(M, K), h.randn(N, K).t() if PRECISIONS[name].k_major else h.randn(K, N)


def demo(h: Harness) -> None:
    # The interpreter multiplies every float32 in float32 and has no bfloat16.
    names = ["ieee", "float16", "int8"] if h.interpreted else list(PRECISIONS)
    for name in names:
        fn = partial(dot, input_precision=PRECISIONS[name].input_precision)
        for M, N, K in [(129, 257, 129), (5, 7, 0)]:  # one tile plus one of K and of each side; nothing to sum
            a, b = convert(name, *matrices(h, name, M, N, K))
            h.check(fn, reference, a, b, what=f"dot {name} {M}x{N}x{K}", **budget(name, K))

    n, rows, tables = h.pick(interpreted=160, quick=2048, full=4096), {}, {}
    n = h.fit(n, bytes_each=60 * n)
    for name, precision in PRECISIONS.items():
        x = h.meta(4096, 4096, dtype=precision.dtype)
        find = {sm: precision.code or (TENSOR_CORES[sm],) for sm in (90, 100)}
        kernels = h.codegen(dot, x, x.t() if precision.k_major else x, precision.input_precision, find=find)
        rows[name] = {f"sm_{k.sm}": next((u for u in TENSOR_CORES.values() if u in k.found), NONE) for k in kernels}
        if name in names:
            a, b = matrices(h, name, n, n, n)
            rows[name]["rms error"] = float(f"{rms_error(product(a, b, name), reference(a, b)):.1e}")
            tables[name] = compare(h, name, *convert(name, a, b))
    h.table(f"what multiplies, and the error of float32 matrices of {n}x{n} in each precision", rows)
    h.answer(lambda: answer(tables, rows, n))


def compare(h: Harness, name: str, a: torch.Tensor, b: torch.Tensor) -> Table:
    library, n = "torch" if h.interpreted else "cuBLAS", len(a)
    variants = {library: torch._int_mm if name == "int8" else torch.matmul}
    variants["triton"] = partial(dot, input_precision=PRECISIONS[name].input_precision)
    # No bytes for int8: there is no ceiling for its products, and one of memory alone would say nothing.
    work = Work(bytes=0 if name == "int8" else 3 * a.nbytes, flops=2 * n**3, dtype=a.dtype)
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")  # the library is to use tf32 too
    case = f"{n}x{n}x{n} {name}"
    wrong = short_of_k(reference)
    return h.compare(variants, reference, a, b, baseline=library, work=work, case=case, wrong=wrong, **budget(name, n))


def answer(tables: dict[str, Table], rows: dict[str, dict], n: int) -> str:
    costs = ", ".join(f"{name} {t['triton'].ms:.3g} ({rows[name]['rms error']:.0e})" for name, t in tables.items())
    without = " and ".join(name for name, row in rows.items() if NONE in row.values())
    return f"Products of {n}x{n}, in ms (rms error): {costs}. All{without and f' but {without}'} use the tensor cores."


if __name__ == "__main__":
    run(demo)
