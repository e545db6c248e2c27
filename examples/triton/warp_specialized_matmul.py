"""Warp specialization: some warps only load, others only multiply, and when the compiler really does that.

Technique  In an ordinary kernel every warp waits for loads, multiplies and stores. In a specialized one a producer warp
           keeps the loads going and consumer warps do nothing but multiply; they meet at barriers in shared memory
           (mbarrier), and setmaxnreg moves registers from the producer to the consumers. In Triton it is one word,
           tl.range(..., warp_specialize=True), and the compiler may ignore it without saying so. What really happened
           is in the code: a specialized kernel has setmaxnreg, and more warps than were asked for.
           Hopper's compiler wants 4 warps and makes of them three groups of 4: one loads, two multiply. A tile of 128
           rows loaded by descriptors that the kernel makes is split between the two; with descriptors from the host it
           gives up with an error; and of a tile of 64 rows both multiply the whole, each for itself, and store it
           twice. With 8 warps, or on a loop that was flattened, it drops the request. Blackwell's takes each of these
           (Triton 3.6: not an unflattened loop over tiles). A loop without tensor cores is never specialized, and on
           Blackwell the request may even be an error.
           On Hopper it also leaves barriers that no role uses in the first bytes of the ring of loaded tiles, without
           invalidating them as PTX demands. Without tools no result was ever wrong on an H200. Compute Sanitizer calls
           them initialized twice, and results were wrong under its racecheck and synccheck, and once under memcheck.
           Where the wrong columns were looked at (the first two), they were those whose elements of b lie in those
           bytes, 4 for each buffer of the ring.
Question   When does warp_specialize=True specialize warps, and what is it worth?
Needs      triton, sm_90
Shapes     a [M, K], b [K, N], both with contiguous rows, K and N multiples of 8, any M (0 too) -> c [M, N], contiguous.
           copy: x of any shape, contiguous -> the same.
Dtypes     float16, bfloat16, both the same; sums are float32.
Errors     TypeError for another dtype, two dtypes or a warp_specialize that is no bool; ValueError for rank, two
           devices, inner sizes that differ, a layout TMA cannot load, an unknown loop or descriptors, block_m that is
           not 64 or 128, or num_warps that is not 4 or 8; RuntimeError for a form that the compiler cannot specialize,
           a tile too large for the GPU's shared memory, a device without Triton or an input that requires grad.
Wins when  not on Hopper with Triton 3.6: split in two it is about as fast as one role of the same tile, and slower
           where both multiply everything. Triton 3.7 makes the same roles; it was compiled, not timed. The place to
           write it by hand is Gluon, in the topic on TMA.
Source     chapter section "Warp specialization"; its example, an elementwise loop, is the copy below.
Run        python examples/triton/warp_specialized_matmul.py
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re

from harness import (
    Harness,
    Work,
    device_limits,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)
from harness.codegen import CodegenError, Kernel, compile_for, dump

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16)
LOOPS = ("k", "tiles", "flattened tiles")  # which loop is specialized
DESCRIPTORS = ("kernel", "host")  # who makes them
BLOCK_K, GROUP_M = 64, 8
BLOCKS = {64: (128, 4), 128: (256, 3)}  # rows of a tile: its columns, and how many steps of K are in shared memory
COPY_BLOCK = 1024


@triton.jit
def matmul_specialized_kernel(
    a, b, c, M, N, K, stride_am, stride_bk, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr, OVER_K: tl.constexpr, OVER_TILES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    if DESCRIPTORS == "host":
        a_desc, b_desc, c_desc = a, b, c
    else:
        a_desc = tl.make_tensor_descriptor(a, [M, K], [stride_am, 1], [BLOCK_M, BLOCK_K])
        b_desc = tl.make_tensor_descriptor(b, [K, N], [stride_bk, 1], [BLOCK_K, BLOCK_N])
        c_desc = tl.make_tensor_descriptor(c, [M, N], [stride_cm, 1], [BLOCK_M, BLOCK_N])
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
    block_m: int | None = None,
    num_warps: int | None = None,
    descriptors: str = "kernel",
) -> torch.Tensor:
    """a @ b with `loop` of LOOPS asked to be specialized, or not; limits and errors are in the module docstring.

    "k" runs one program per tile, the others one per SM. None takes the larger tile that shared memory has room for
    and Hopper's compiler takes; and the 4 warps of which that one makes 12, or what the tile needs with one role.
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
    if not isinstance(descriptors, str) or descriptors not in DESCRIPTORS:
        raise ValueError(f"{name}: descriptors {descriptors!r} is not one of {DESCRIPTORS}")
    limits = device_limits(a.device)
    if block_m is None:
        small = warp_specialize and descriptors == "host" and loop != "flattened tiles"
        block_m = 64 if small or _shared_bytes(128) > limits.shared_bytes else 128
    if num_warps is None:
        num_warps = 4 if block_m == 64 or (warp_specialize and loop != "flattened tiles") else 8
    ints = type(block_m) is int and type(num_warps) is int
    if not ints or block_m not in BLOCKS or num_warps not in (4, 8):
        raise ValueError(f"{name}: block_m {block_m!r} and num_warps {num_warps!r}; need 64 or 128, and 4 or 8")
    M, K = a.shape
    N = b.shape[1]
    if K % 8 or N % 8:
        raise ValueError(f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples: pad both to multiples of 8")
    require_tma_layout(name, a=a, b=b)
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    block_n, stages = BLOCKS[block_m]
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    described = (
        tma_descriptor(a, [block_m, BLOCK_K]), tma_descriptor(b, [BLOCK_K, block_n]),
        tma_descriptor(c, [block_m, block_n]),
    )  # fmt: skip
    launch = functools.partial(
        matmul_specialized_kernel[(tiles if loop == "k" else min(tiles, limits.sms),)],
        *(described if descriptors == "host" else (a, b, c)), M, N, K, *(each.strides[0] for each in described),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, STAGES=stages, DESCRIPTORS=descriptors,
        OVER_K=warp_specialize and loop == "k", OVER_TILES=warp_specialize and loop != "k",
        FLATTEN=loop == "flattened tiles", num_warps=num_warps,
    )  # fmt: skip

    # A kernel that makes descriptors needs memory for them, from an allocator that is set for everybody: a copy of
    # the context keeps it to this call.
    def with_scratch() -> None:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=a.device))
        launch()

    what = f"loop {loop!r} of a tile of {block_m} rows, {num_warps} warps and {descriptors} descriptors"
    instead = "another of loop, block_m, num_warps and descriptors" + ", or warp_specialize=False" * warp_specialize
    with _telling(name, what, instead):
        contextvars.copy_context().run(with_scratch)
    return c


def _shared_bytes(block_m: int) -> int:
    """What a specialized kernel keeps in shared memory: tiles of a and b, the tile of c, and 1 KiB for barriers."""
    block_n, stages = BLOCKS[block_m]
    return 2 * (stages * (block_m + block_n) * BLOCK_K + block_m * block_n) + 1024


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


SPECIALIZED, DROPPED, REFUSED = "specialized", "dropped", "does not compile"  # what verdict() begins with


def verdict(kernel: Kernel, asked: int) -> str:
    """What became of the request, read from the generated code."""
    if kernel.error:
        return f"{REFUSED}: {kernel.error}"
    if kernel.found.get("setmaxnreg"):
        return f"{SPECIALIZED}: setmaxnreg, {kernel.warps} warps for {asked} asked"
    return f"{DROPPED}: no setmaxnreg, {kernel.warps} warps"


def share_of_products(ptx: str, block_m: int) -> float:
    """How often a specialized Hopper kernel multiplies its tile: each wgmma in its code belongs to one role alone."""
    columns = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16\.", ptx)
    return sum(64 * int(n) * 16 for n in columns) / (block_m * BLOCKS[block_m][0] * BLOCK_K)


# Architecture, loop, rows of the tile, warps, descriptors: the rules of the lesson, and what this repository relies on.
FORMS = {
    (90, "k", 64, 4, "host"): SPECIALIZED, (90, "k", 128, 4, "host"): REFUSED, (90, "k", 128, 4, "kernel"): SPECIALIZED,
    (90, "k", 128, 8, "kernel"): DROPPED, (90, "tiles", 64, 4, "kernel"): SPECIALIZED,
    (90, "tiles", 128, 4, "kernel"): SPECIALIZED, (90, "flattened tiles", 64, 4, "kernel"): DROPPED,
    (100, "k", 128, 8, "kernel"): SPECIALIZED, (100, "flattened tiles", 128, 8, "host"): SPECIALIZED,
    (120, "k", 64, 4, "host"): SPECIALIZED,
}  # fmt: skip
TIMED = {  # what is timed, with one role and specialized: loop, rows of the tile, who makes the descriptors
    "64 rows, tile per program": ("k", 64, "host"),  # at this size one role is faster with the host's
    "128 rows, tile per program": ("k", 128, "kernel"),
    "128 rows, persistent": ("tiles", 128, "kernel"),
}


def show_code(h: Harness) -> None:
    """Ask the compiler for every form and read from its code what it did; raises when the lesson is out of date."""
    x = h.meta(4096, 4096)
    verdicts = {}
    for (sm, loop, block_m, num_warps, descriptors), expected in FORMS.items():
        with h.progress(f"compiling the loop over {loop} for sm_{sm}"):
            args = (x, x, loop, True, block_m, num_warps, descriptors)
            (kernel,) = compile_for(matmul_specialized, args, sms=(sm,))
        h.record.codegen.append(kernel.record())
        said = verdict(kernel, num_warps)
        what = f"sm_{sm}, loop over {loop}, {block_m} rows, {num_warps} warps, descriptors of the {descriptors}"
        verdicts[what] = said
        if not said.startswith(expected):
            raise CodegenError(f"matmul_specialized on {what}: {said}; the lesson is out of date")
    for sm in (90, 100):
        (kernel,) = compile_for(copy_specialized, (h.meta(1 << 20),), sms=(sm,))
        h.record.codegen.append(kernel.record())
        verdicts[f"sm_{sm}, elementwise copy, 4 warps"] = verdict(kernel, 4)
        if kernel.found.get("setmaxnreg") or (kernel.error and sm == 90):
            raise CodegenError(f"copy_specialized on sm_{sm}: {verdicts.popitem()[1]}; the lesson is out of date")
    h.fact("warp_specialize=True", verdicts)
    shares = {}
    for label, (loop, rows, descriptors) in TIMED.items():
        ptx = dump(matmul_specialized, (x, x, loop, True, rows, None, descriptors), sm=90)["ptx"]
        shares[f"sm_90, {label}"] = share_of_products(ptx, rows)
    if list(shares.values()) != [2, 1, 1]:
        raise CodegenError(f"matmul_specialized: times that a tile is multiplied {shares}; the lesson is out of date")
    h.fact("times that a tile is multiplied", shares)


def programs_per_sm(kernel: Kernel) -> int:
    """How many programs the registers (65536), shared memory (228 KiB) and warps (64) of a Hopper SM hold."""
    threads = 32 * kernel.warps
    # Registers are dealt to a warp in units of 256; each program takes 1 KiB of shared memory for the system.
    by_registers = 65536 // (-(-32 * kernel.registers // 256) * 256 * kernel.warps)
    return min(by_registers, 228 * 1024 // (kernel.shared + 1024), 2048 // threads)


def compiles(h: Harness, wrapper, *args) -> bool:
    """Whether this machine's compiler takes the form at all: on Blackwell the request is an error in some."""
    if h.interpreted:
        return True
    (kernel,) = compile_for(wrapper, args, sms=(h.machine.sm,))
    return not kernel.error and kernel.fits


def run_or_check(h: Harness, fn, a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Hold a specialized kernel to its reference, but for a sanitizer, which writes to the barriers left behind."""
    if h.SANITIZED:
        fn(a, b)
    else:
        h.check(fn, reference, a, b, terms=a.shape[1], what=f"matmul_specialized {what}")


def demo(h: Harness) -> None:
    x = h.meta(4096, 4096)
    forms = [("k", 64), ("k", 128), ("tiles", 128), ("flattened tiles", 64)]
    forms = [(loop, rows) for loop, rows in forms if compiles(h, matmul_specialized, x, x, loop, True, rows)]
    for M, N, K in [(1, 8, 8), (257, 520, 72), (5, 16, 0)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        for loop, rows in forms:
            fn = functools.partial(matmul_specialized, loop=loop, block_m=rows)
            run_or_check(h, fn, a, b, f"over {loop}, {rows} rows, {M}x{N}x{K}")
    if compiles(h, copy_specialized, x):
        h.check(copy_specialized, torch.Tensor.double, h.randn(4097, dtype=h.half), terms=0)
    if h.shows_code:
        show_code(h)

    for n in h.pick(interpreted=(320,), quick=(4096,), full=(4096, 8192)):
        a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
        variants = {"cuBLAS" if a.is_cuda else "torch": torch.matmul}
        for label, (loop, rows, descriptors) in TIMED.items():
            for word, asked in (("one role", False), ("specialized", True)):
                form = {"loop": loop, "warp_specialize": asked, "block_m": rows, "descriptors": descriptors}
                fn = functools.partial(matmul_specialized, **form)
                if not compiles(h, matmul_specialized, x, x, loop, asked, rows, None, descriptors):
                    continue
                if asked and h.SANITIZED:
                    run_or_check(h, fn, a, b, f"{label} {n}x{n}x{n}")
                else:
                    variants[f"triton {label}, {word}"] = fn
        case = f"{n}x{n}x{n} {str(h.half).removeprefix('torch.')}"
        work = Work(bytes=6 * n * n, flops=2 * n**3, dtype=h.half)
        table = h.compare(variants, reference, a, b, baseline=next(iter(variants)), work=work, case=case, terms=n)
        if table and table.rows[-1].ms and h.machine.sm == 90:
            rows = {row.variant: row for row in table.rows}
            for label, (loop, block_m, descriptors) in TIMED.items():
                plain, special = (rows[f"triton {label}, {word}"] for word in ("one role", "specialized"))
                kernels = [
                    compile_for(matmul_specialized, (a, b, loop, asked, block_m, None, descriptors), sms=(90,))[0]
                    for asked in (False, True)
                ]
                fit = [programs_per_sm(kernel) for kernel in kernels]
                h.say(
                    f"{special.variant}: {special.speedup / plain.speedup:.2f}x one role; "
                    f"{kernels[1].warps} warps of {kernels[1].registers} registers and {kernels[1].shared // 1024} "
                    f"KiB, so {fit[1]} program an SM, where {kernels[0].warps} warps of {kernels[0].registers} and "
                    f"{kernels[0].shared // 1024} KiB leave room for {fit[0]}"
                )


if __name__ == "__main__":
    run(demo)
