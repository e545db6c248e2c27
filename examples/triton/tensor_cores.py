"""tl.dot by precision: float32 as ieee, tf32 or tf32x3, bf16, fp16 and int8: speed, error, instruction.

Technique  tl.dot multiplies on the tensor cores, in the format of its operands. float32 is no such format: unless told
           otherwise Triton keeps the first 10 bits of each mantissa and calls it tf32. input_precision="ieee" keeps all
           23, on the CUDA cores; "tf32x3" writes each number as two of tf32 and adds three products. One kernel
           does them all; only dtype and input_precision change, and with them the tile that fits. On paper each
           halving of the operand doubles the rate of the tensor cores; it also takes bits from the result. Sums are
           float32, for int8 int32 and exact.
Question   What does each precision of tl.dot cost in time and in error, and which of them uses the tensor cores at all?
Needs      triton
Shapes     a [M, K], b [K, N], any strides, any sizes (0 too) -> c [M, N], contiguous. tf32 and int8 are fast when b
           is K-major (stride 1 along K, as in x @ weight.t()).
Dtypes     both the same: float32, bfloat16, float16 -> the same; int8 -> int32. input_precision is for float32: "ieee",
           "tf32", "tf32x3", or None for Triton's default.
Errors     TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, an unknown
           input_precision or one for another dtype than float32, or int8 with a K whose sums may overflow int32;
           RuntimeError for a device without Triton or an input that requires grad.
Wins when  it is fused with something; a plain product is the library's. tf32x3 is for float32 accuracy on GPUs whose
           tensor cores are more than three times as fast as their float32 units.
Source     chapter section "Tensor Cores", which leaves open what tl.dot makes of float32.
Run        python examples/triton/tensor_cores.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from harness import Harness, Work, require_triton_device, run
from harness.codegen import CodegenError

import torch
import triton
import triton.language as tl

GROUP_M = 8
MAX_K_INT8 = 2**17 - 1  # 2**17 products of -128 * -128 are 2**31, one more than an int32 holds


class Precision(NamedTuple):
    """One way to call tl.dot: its operands, the bits of their mantissa, and the tile that suits it."""

    dtype: torch.dtype
    input_precision: str | None
    bits: int | None
    tile: tuple[int, int, int, int, int]  # BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages
    k_major: bool  # how b should lie in memory


# BLOCK_K is 128 bytes of a row, the widest swizzle of shared memory. A 128 x 256 tile asks for the least bandwidth that
# registers allow. ieee and tf32x3 pass their operands through registers too, and there it spills.
# wgmma reads operands of one or four bytes from shared memory only with K contiguous. Products on the CUDA cores are
# the other way round: there neighbouring threads read neighbouring columns, which must not share a bank.
PRECISIONS = {
    "ieee": Precision(torch.float32, "ieee", 23, (128, 128, 32, 8, 3), False),
    "tf32x3": Precision(torch.float32, "tf32x3", 21, (128, 128, 32, 8, 3), False),
    "tf32": Precision(torch.float32, "tf32", 10, (128, 256, 32, 8, 3), True),
    "bfloat16": Precision(torch.bfloat16, None, 7, (128, 256, 64, 8, 3), False),
    "float16": Precision(torch.float16, None, 10, (128, 256, 64, 8, 3), False),
    "int8": Precision(torch.int8, None, None, (128, 256, 128, 8, 3), True),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
INPUT_PRECISIONS = ("ieee", "tf32", "tf32x3")
TF32_EPS = 2**-10  # 10 bits, and what is beyond them may be cut off rather than rounded
TENSOR_CORES = ("mma.sync", "wgmma", "tcgen05.mma")


@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0})
@triton.jit
def dot_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    PRECISION: tl.constexpr, ACC: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # Bands of GROUP_M rows of tiles: what runs at the same time shares its inputs in L2 (matmul.py measures that).
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    band = min(tiles_m - first_m, GROUP_M)
    pid_m = first_m + pid % (GROUP_M * tiles_n) % band
    pid_n = pid % (GROUP_M * tiles_n) // band

    # Rows and columns past the edge wrap around: they load something valid, and the store drops what it makes.
    rows = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    cols = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None].to(tl.int64) * stride_am + inner[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + inner[:, None].to(tl.int64) * stride_bk + cols[None, :].to(tl.int64) * stride_bn
    step_a, step_b = BLOCK_K * tl.cast(stride_ak, tl.int64), BLOCK_K * tl.cast(stride_bk, tl.int64)

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)  # the one line that this file is about
        a_ptrs += step_a
        b_ptrs += step_b

    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :].to(tl.int64) * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def dot(a: torch.Tensor, b: torch.Tensor, input_precision: str | None = None) -> torch.Tensor:
    """a @ b for two matrices; limits and errors are in the module docstring."""
    require_triton_device("dot", a, b)
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise TypeError(f"dot: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"dot: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    if not (input_precision is None or (isinstance(input_precision, str) and input_precision in INPUT_PRECISIONS)):
        raise ValueError(f"dot: input_precision {input_precision!r} is not one of {INPUT_PRECISIONS}, nor None")
    if input_precision is not None and a.dtype is not torch.float32:
        raise ValueError(f"dot: input_precision {input_precision!r} is for float32, not {a.dtype}; leave it out")
    M, K = a.shape
    N = b.shape[1]
    exact = a.dtype is torch.int8
    if exact and K > MAX_K_INT8:
        raise ValueError(f"dot: K is {K}, and a sum of more than {MAX_K_INT8} int8 products may overflow; split K")
    c = torch.empty((M, N), dtype=torch.int32 if exact else a.dtype, device=a.device)
    if M and N:
        name = (input_precision or "tf32") if a.dtype is torch.float32 else str(a.dtype).removeprefix("torch.")
        block_m, block_n, block_k, num_warps, num_stages = PRECISIONS[name].tile
        dot_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
            a, b, c, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
            PRECISION=input_precision, ACC=tl.int32 if exact else tl.float32, GROUP_M=GROUP_M,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def budget(name: str, K: int) -> dict:
    """What h.check and h.compare need to know of a precision: an int8 product is exact and comes back as int32."""
    if name == "int8":
        return {"dtype": torch.int32}
    return {"terms": K, "operand_eps": TF32_EPS if name == "tf32" else 0.0}


def operands(h: Harness, name: str, M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random a and b of a precision's dtype, b laid out as it likes it."""

    def matrix(rows: int, cols: int) -> torch.Tensor:
        if name == "int8":
            return h.randn(rows, cols, scale=40.0).round_().clamp_(-128, 127).to(torch.int8)
        return h.randn(rows, cols, dtype=PRECISIONS[name].dtype)

    return matrix(M, K), matrix(N, K).t() if PRECISIONS[name].k_major else matrix(K, N)


def mantissa(x: torch.Tensor, bits: int, cut: bool = False) -> torch.Tensor:
    """float32 numbers with `bits` of their 23 bits of mantissa: rounded to the nearest, or cut off."""
    drop = 23 - bits
    as_int = x.view(torch.int32) + (0 if cut else 1 << (drop - 1))
    return (as_int & -(1 << drop)).view(torch.float32)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """int8 and the scale that brings it back, one for the whole matrix."""
    scale = x.abs().max().item() / 127
    return (x / scale).round().to(torch.int8), scale


def product(a: torch.Tensor, b: torch.Tensor, name: str) -> torch.Tensor:
    """dot of two float32 matrices converted to a precision, in float64."""
    precision = PRECISIONS[name]
    if name == "int8":
        (a8, scale_a), (b8, scale_b) = quantized(a), quantized(b)
        return dot(a8, b8).double() * (scale_a * scale_b)
    return dot(a.to(precision.dtype), b.to(precision.dtype), precision.input_precision).double()


def predicted(a: torch.Tensor, b: torch.Tensor, name: str, cut: bool = False) -> torch.Tensor:
    """What rounding alone makes of it: operands in their precision, exact products and sums, the output rounded."""
    if name == "int8":
        (a8, scale_a), (b8, scale_b) = quantized(a), quantized(b)
        return (a8.double() @ b8.double()) * (scale_a * scale_b)
    if name == "tf32x3":  # each operand in two parts of tf32, and the product of the small parts left out
        high = [mantissa(x, 10) for x in (a, b)]
        low = [mantissa(x - part, 10) for x, part in zip((a, b), high, strict=True)]
        (ah, bh), (al, bl) = ([part.double() for part in parts] for parts in (high, low))
        exact = (ah + al) @ (bh + bl) - al @ bl
    elif name == "tf32":
        exact = mantissa(a, 10, cut).double() @ mantissa(b, 10, cut).double()
    else:
        exact = a.to(PRECISIONS[name].dtype).double() @ b.to(PRECISIONS[name].dtype).double()
    return exact.to(PRECISIONS[name].dtype).double()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(rms, largest) error relative to the rms of the result."""
    size, error = want.square().mean().sqrt(), (got - want).abs()
    return (error.square().mean().sqrt() / size).item(), (error.max() / size).item()


def show_errors(h: Harness, names: list[str], M: int, N: int, K: int) -> None:
    """The same float32 inputs in every precision, against float64, next to what rounding alone would do."""
    a, b = h.randn(M, K), h.randn(N, K).t()
    want = reference(a, b)
    found = {}
    for name in names:
        laid_out = b if PRECISIONS[name].k_major else b.contiguous()
        rms, largest = relative_error(product(a, laid_out, name), want)
        entry = {"mantissa_bits": PRECISIONS[name].bits, "rms": rms, "max": largest}
        entry["rms_of_rounding"], _ = relative_error(predicted(a, b, name), want)
        if name == "tf32":
            entry["rms_of_cutting"], _ = relative_error(predicted(a, b, name, cut=True), want)
        found[name] = {key: float(f"{x:.3g}") if isinstance(x, float) else x for key, x in entry.items()}
    h.fact(f"error relative to the rms of the result, {M}x{N}x{K}", found)

    for name, error in found.items():
        rounding, cutting = error["rms_of_rounding"], error.get("rms_of_cutting")
        said = f"{name}: rms error {error['rms']:.1e}; "
        if cutting:
            is_cut = abs(math.log(error["rms"] / cutting)) < abs(math.log(error["rms"] / rounding))
            said += f"operands rounded to 10 bits explain {rounding:.1e}, cut to 10 bits {cutting:.1e}: "
            said += f"here they are {'cut' if is_cut else 'rounded'}"
        elif error["rms"] < 1.1 * rounding:
            kept = f"{error['mantissa_bits']} bits" if error["mantissa_bits"] else "one of 255 steps"
            said += f"the rounding to {kept} explains {rounding:.1e}, so {K} additions add next to nothing"
        else:
            said += f"the rounding of operands and result explains {rounding:.1e}, the {K} additions the rest"
        h.say(said)


def show_code(h: Harness, n: int = 4096) -> None:
    """The instruction that each precision becomes, and that for ieee it is none of the tensor cores'."""
    if not h.shows_code:
        return
    used: dict[str, dict[str, list[str]]] = {}
    for name, precision in PRECISIONS.items():
        h.say(f"{name}:")
        a = h.meta(n, n, dtype=precision.dtype)
        kernels = h.codegen(dot, a, a.t() if precision.k_major else a, precision.input_precision, find=evidence(name))
        for kernel in kernels:
            on_tensor_cores = [x for x in TENSOR_CORES if x in kernel.found]
            if name == "ieee" and on_tensor_cores:
                raise CodegenError(f"dot ieee on sm_{kernel.sm}: {on_tensor_cores} in what should be float32 products")
            format_of = [x for x in kernel.found if x.startswith(("mma ", "kind::", "cvt", "fma"))]
            used.setdefault(name, {})[f"sm_{kernel.sm}"] = on_tensor_cores + format_of
    h.fact("instructions of each precision", used)
    if "tcgen05.mma" not in used["int8"]["sm_100"]:
        h.say(
            f"int8 on sm_100 is {used['int8']['sm_100'][0]} with Triton {triton.__version__}, not its own tcgen05.mma"
        )

    h.say("float32 with input_precision left out:")
    a = h.meta(n, n, dtype=torch.float32)
    (default,) = h.codegen(dot, a, a.t(), find={90: ("wgmma", "mma tf32")})
    h.say(f"so unless told otherwise tl.dot takes float32 as tf32: mma tf32 x{default.found['mma tf32']} on sm_90")


def evidence(name: str) -> dict[int, tuple[str, ...]]:
    """What the PTX of a precision must hold on each architecture."""
    tensor_core = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
    if name == "ieee":
        return dict.fromkeys(tensor_core, ("fma.f32",))
    if name == "int8":  # on sm_100 Triton 3.6 and 3.7 fall back to mma.sync; a later one may not, so that is not asked
        return {80: ("mma.sync", "mma s8"), 90: ("wgmma", "mma s8"), 100: ("mma s8",)}
    # tf32 hands over all 32 bits and leaves the rest to the unit; tf32x3 rounds first, to know what is left.
    formats = {"tf32": ("mma tf32",), "tf32x3": ("mma tf32", "cvt tf32")}.get(name, ())
    return {sm: (instruction, *formats) for sm, instruction in tensor_core.items()}


@contextmanager
def torch_tf32() -> Iterator[None]:
    """Within it, torch multiplies float32 matrices in tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compare(h: Harness, name: str, n: int) -> float | None:
    """One precision against the library's in the same precision; the time of ours in ms."""
    precision = PRECISIONS[name]
    n = h.fit(n, bytes_each=60 * n)
    a, b = operands(h, name, n, n, n)
    library = torch._int_mm if name == "int8" else torch.matmul
    variants = {
        "cuBLAS" if a.is_cuda else "torch": library,
        f"triton {name}": lambda a, b: dot(a, b, precision.input_precision),
    }
    # No bytes for int8: there is no ceiling for its products, and one of memory alone would say nothing.
    moved = 0 if name == "int8" else 3 * a.nbytes
    work = Work(bytes=moved, flops=2 * n**3, dtype=precision.dtype)
    case = f"{n}x{n}x{n} {name if precision.input_precision is None else f'float32 as {name}'}"
    table = h.compare(variants, reference, a, b, baseline=next(iter(variants)), work=work, case=case, **budget(name, n))
    return table.rows[-1].ms if table else None


def demo(h: Harness) -> None:
    names = [name for name in PRECISIONS if not (h.interpreted and name == "bfloat16")]
    for name in names:  # one tile plus one of K and of each side; then nothing to sum
        precision = PRECISIONS[name].input_precision
        for M, N, K in [(129, 257, 129)] + [(5, 7, 0)] * (name == "ieee"):
            h.check(
                lambda a, b, precision=precision: dot(a, b, precision), reference, *operands(h, name, M, N, K),
                what=f"dot {name} {M}x{N}x{K}", **budget(name, K),
            )  # fmt: skip

    show_code(h)

    if h.interpreted:
        h.say("the interpreter multiplies every float32 in float32 and has no bfloat16: tf32, tf32x3, bf16 need a GPU")
        names = ["ieee", "float16", "int8"]
    if not h.profile:
        show_errors(h, names, *h.pick(interpreted=(128, 128, 256), quick=(512, 512, 1024), full=(1024, 1024, 4096)))

    n = h.pick(interpreted=160, quick=2048, full=4096)
    times = {}
    for name in names:
        if name == "tf32":
            with torch_tf32():
                times[name] = compare(h, name, n)
        else:
            times[name] = compare(h, name, n)
    if times.get("ieee"):
        ladder = ", ".join(f"{name} {times['ieee'] / ms:.1f}x" for name, ms in times.items())
        h.say(f"the same kernel by precision, as speed over ieee: {ladder}")


if __name__ == "__main__":
    run(demo)
