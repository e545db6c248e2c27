"""Warp specialization: some warps only load, others only multiply, and when the compiler really does that.

Technique  In an ordinary kernel every warp waits for loads, multiplies and stores. In a specialized one a producer warp
           keeps the loads going and consumer warps do nothing but multiply; they meet at barriers in shared memory
           (mbarrier), and setmaxnreg moves registers from the producer to the consumers. In Triton it is one word,
           tl.range(..., warp_specialize=True), and the compiler may ignore it without saying so. What really happened
           is in the code: a specialized kernel has setmaxnreg, and more warps than were asked for.
           Hopper's compiler specializes tiles of 64 rows and 4 warps that are loaded by descriptors. With 128 rows and
           4 warps it gives up with an error; with 8 warps, or on a loop that was flattened, it drops the request.
           Blackwell's takes each of these (Triton 3.6: not an unflattened loop over tiles). A loop without tensor cores
           is never specialized, and on Blackwell the request may even be an error.
Question   When does warp_specialize=True specialize warps, and what is it worth?
Needs      triton, sm_90
Shapes     a [M, K], b [K, N], both with contiguous rows, K and N multiples of 8, any M (0 too) -> c [M, N], contiguous.
           copy: x of any shape, contiguous -> the same.
Dtypes     float16, bfloat16, both the same; sums are float32.
Errors     TypeError for another dtype, two dtypes or a warp_specialize that is no bool; ValueError for rank, inner
           sizes that differ, a layout TMA cannot load, an unknown loop, block_m that is not 64 or 128, or num_warps
           that is not 4 or 8; RuntimeError for a form that the compiler cannot specialize, a tile too large for the
           GPU's shared memory, a device without Triton or an input that requires grad.
Wins when  not on Hopper with Triton 3.6 or 3.7: the table says what it costs, and the code why. The place to write it
           by hand is Gluon, in the topic on TMA. Compute Sanitizer's synccheck says of this kernel that a barrier is
           initialized twice, and under its tools an H200 got wrong results, though none without them (Triton 3.6).
Source     chapter section "Warp specialization"; its example, an elementwise loop, is the copy below.
Run        python examples/triton/warp_specialized_matmul.py
"""

from __future__ import annotations

import contextlib
import functools

from harness import (
    Harness,
    Work,
    device_limits,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)
from harness.codegen import CodegenError, Kernel, compile_for

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16)
LOOPS = ("k", "tiles", "flattened tiles")  # which loop is specialized
BLOCK_N, BLOCK_K, STAGES, GROUP_M = 128, 64, 4, 8
COPY_BLOCK = 1024


@triton.jit
def matmul_specialized_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    OVER_K: tl.constexpr, OVER_TILES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # With one program for each tile this loop runs once; a persistent kernel has fewer programs than tiles.
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN, warp_specialize=OVER_TILES
    ):
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        band = min(tiles_m - first_m, GROUP_M)
        row = (first_m + tile % (GROUP_M * tiles_n) % band) * BLOCK_M
        col = tile % (GROUP_M * tiles_n) // band * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES, warp_specialize=OVER_K):
            acc = tl.dot(a_desc.load([row, k]), b_desc.load([k, col]), acc)
        c_desc.store([row, col], acc.to(c_desc.dtype))


@triton.jit
def copy_specialized_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    # The chapter's form: a loop over blocks of elements. There is nothing here that a second kind of warp could do.
    first = tl.program_id(0).to(tl.int64) * BLOCK  # so that offsets near 2**31 elements do not wrap
    for start in tl.range(first, n_elements, tl.num_programs(0) * BLOCK, num_stages=3, warp_specialize=True):
        offsets = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n_elements), mask=offsets < n_elements)


@contextlib.contextmanager
def _telling(name: str, what: str, instead: str):
    """Say which form a failing compiler or launch is about, and what to use instead."""
    try:
        yield
    except triton.OutOfResources as error:
        raise RuntimeError(f"{name}: {what} does not fit this GPU ({error}); use {instead}") from error
    except RuntimeError as error:
        if "PassManager" not in str(error):
            raise
        raise RuntimeError(
            f"{name}: Triton {triton.__version__} fails to specialize {what} for this GPU ({error}); use {instead}"
        ) from error


def matmul_specialized(
    a: torch.Tensor,
    b: torch.Tensor,
    loop: str = "k",
    warp_specialize: bool = True,
    block_m: int = 64,
    num_warps: int = 4,
) -> torch.Tensor:
    """a @ b with `loop` of LOOPS asked to be specialized, or not; limits and errors are in the module docstring.

    "k" runs one program per tile, the others one per SM.
    """
    name = "matmul_specialized"
    require_triton_device(name, a, b)
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise TypeError(f"{name}: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    if not isinstance(loop, str) or loop not in LOOPS:
        raise ValueError(f"{name}: loop {loop!r} is not one of {LOOPS}")
    if not isinstance(warp_specialize, bool):
        raise TypeError(f"{name}: warp_specialize is {warp_specialize!r}; pass True or False")
    ints = type(block_m) is int and type(num_warps) is int
    if not ints or block_m not in (64, 128) or num_warps not in (4, 8):
        raise ValueError(f"{name}: block_m {block_m!r} and num_warps {num_warps!r}; need 64 or 128, and 4 or 8")
    M, K = a.shape
    N = b.shape[1]
    if K % 8 or N % 8:
        raise ValueError(f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples: pad both to multiples of 8")
    require_tma_layout(name, a=a, b=b)
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, BLOCK_N)
    launch = matmul_specialized_kernel[(tiles if loop == "k" else min(tiles, device_limits(a.device).sms),)]
    what = f"loop {loop!r} of a tile of {block_m} rows and {num_warps} warps"
    with _telling(name, what, "block_m=64 and num_warps=4, or warp_specialize=False"):
        launch(
            tma_descriptor(a, [block_m, BLOCK_K]), tma_descriptor(b, [BLOCK_K, BLOCK_N]),
            tma_descriptor(c, [block_m, BLOCK_N]), M, N, K,
            BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, STAGES=STAGES,
            OVER_K=warp_specialize and loop == "k", OVER_TILES=warp_specialize and loop != "k",
            FLATTEN=loop == "flattened tiles", num_warps=num_warps,
        )  # fmt: skip
    return c


def copy_specialized(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a contiguous x by a loop that asks for warp specialization and cannot have it."""
    require_triton_device("copy_specialized", x)
    if x.dtype not in DTYPES:
        raise TypeError(f"copy_specialized: dtype {x.dtype} is not one of {DTYPES}")
    if not x.is_contiguous():
        raise ValueError(f"copy_specialized: strides {x.stride()}; call x.contiguous() first")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        programs = min(triton.cdiv(x.numel(), COPY_BLOCK), 4 * device_limits(x.device).sms)
        with _telling("copy_specialized", "a loop without tensor cores", "x.clone()"):
            copy_specialized_kernel[(programs,)](x, y, x.numel(), BLOCK=COPY_BLOCK, num_warps=4)
    return y


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def verdict(kernel: Kernel, asked: int) -> str:
    """What became of the request, read from the generated code."""
    if kernel.error:
        return f"does not compile: {kernel.error}"
    if kernel.found.get("setmaxnreg"):
        return f"specialized: setmaxnreg, {kernel.warps} warps for {asked} asked"
    return f"dropped: no setmaxnreg, {kernel.warps} warps"


# Architecture, loop, rows of the tile, warps: each rule of the lesson, and what this repository relies on.
FORMS = [
    (90, "k", 64, 4), (90, "k", 128, 4), (90, "k", 64, 8), (90, "k", 128, 8), (90, "tiles", 64, 4),
    (90, "flattened tiles", 64, 4), (100, "k", 128, 8), (100, "flattened tiles", 128, 8), (120, "k", 64, 4),
]  # fmt: skip
SPECIALIZED = {(90, "k", 64, 4), (90, "tiles", 64, 4), *FORMS[6:]}
LAUNCHES = {"tile per program": "k", "persistent": "tiles"}  # what is timed


def show_code(h: Harness) -> None:
    """Ask the compiler for every form and read from its code what it did; raises when the lesson is out of date."""
    x = h.meta(4096, 4096)
    verdicts = {}
    for form in FORMS:
        sm, loop, block_m, num_warps = form
        with h.progress(f"compiling the loop over {loop} for sm_{sm}"):
            (kernel,) = compile_for(matmul_specialized, (x, x, loop, True, block_m, num_warps), sms=(sm,))
        h.record.codegen.append(kernel.record())
        said = verdict(kernel, num_warps)
        verdicts[f"sm_{sm}, loop over {loop}, {block_m} rows, {num_warps} warps"] = said
        if (form in SPECIALIZED) != said.startswith("specialized"):
            raise CodegenError(f"matmul_specialized on sm_{sm}, loop over {loop}: {said}; the lesson is out of date")
    for sm in (90, 100):
        (kernel,) = compile_for(copy_specialized, (h.meta(1 << 20),), sms=(sm,))
        h.record.codegen.append(kernel.record())
        verdicts[f"sm_{sm}, elementwise copy, 4 warps"] = verdict(kernel, 4)
        if kernel.found.get("setmaxnreg") or (kernel.error and sm == 90):
            raise CodegenError(f"copy_specialized on sm_{sm}: {verdicts.popitem()[1]}; the lesson is out of date")
    h.fact("warp_specialize=True", verdicts)


def programs_per_sm(kernel: Kernel) -> int:
    """How many programs the registers (65536), shared memory (228 KiB) and warps (64) of a Hopper SM hold."""
    threads = 32 * kernel.warps
    # Registers are dealt to a warp in units of 256; each program takes 1 KiB of shared memory for the system.
    by_registers = 65536 // (-(-32 * kernel.registers // 256) * 256 * kernel.warps)
    return min(by_registers, 228 * 1024 // (kernel.shared + 1024), 2048 // threads)


def compiles(h: Harness, wrapper, *args) -> bool:
    """Whether this machine's compiler takes the form at all: on Blackwell the request is an error in some."""
    return h.interpreted or not compile_for(wrapper, args, sms=(h.machine.sm,))[0].error


def demo(h: Harness) -> None:
    x = h.meta(4096, 4096)
    loops = [loop for loop in LOOPS if compiles(h, matmul_specialized, x, x, loop)]
    for M, N, K in [(1, 8, 8), (129, 264, 72), (5, 16, 0)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        for loop in loops:
            fn = functools.partial(matmul_specialized, loop=loop)
            h.check(fn, reference, a, b, terms=K, what=f"matmul_specialized over {loop} {M}x{N}x{K}")
    if compiles(h, copy_specialized, x):
        h.check(copy_specialized, torch.Tensor.double, h.randn(4097, dtype=h.half), terms=0)
    if h.shows_code:
        show_code(h)

    for n in h.pick(interpreted=(192,), quick=(4096,), full=(4096, 8192)):
        a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
        variants = {"cuBLAS" if a.is_cuda else "torch": torch.matmul}
        for label, loop in LAUNCHES.items():
            for word, asked in (("one role", False), ("specialized", True)):
                if not asked or loop in loops:
                    fn = functools.partial(matmul_specialized, loop=loop, warp_specialize=asked)
                    variants[f"triton {label}, {word}"] = fn
        case = f"{n}x{n}x{n} {str(h.half).removeprefix('torch.')}"
        work = Work(bytes=6 * n * n, flops=2 * n**3, dtype=h.half)
        table = h.compare(variants, reference, a, b, baseline=next(iter(variants)), work=work, case=case, terms=n)
        if table and table.rows[-1].ms and h.machine.sm == 90:
            rows = {row.variant: row for row in table.rows}
            for label, loop in LAUNCHES.items():
                plain, special = (rows[f"triton {label}, {word}"] for word in ("one role", "specialized"))
                kernels = [
                    compile_for(matmul_specialized, (a, b, loop, asked), sms=(90,))[0] for asked in (False, True)
                ]
                fit = [programs_per_sm(kernel) for kernel in kernels]
                h.say(
                    f"{special.variant}: {plain.ms / special.ms:.2f}x one role; "
                    f"{kernels[1].warps} warps of {kernels[1].registers} registers and {kernels[1].shared // 1024} "
                    f"KiB, so {fit[1]} program an SM, where {kernels[0].warps} warps of {kernels[0].registers} and "
                    f"{kernels[0].shared // 1024} KiB leave room for {fit[0]}"
                )


if __name__ == "__main__":
    run(demo)
