"""The GPU suite: does every hardware feature of this project still give right numbers, and the speed it is there for?

    pytest tests/test_blackwell_optimizations.py -v                 all of it: under 3 minutes on an H100
    pytest tests/test_blackwell_optimizations.py -k test_fp8        one group: test_fp8, test_tma, test_mx
    pytest tests/test_blackwell_optimizations.py -m "not slow"      without the thousands of launches of the stress test

Each test on the GPU first holds every variant to a float64 reference, ours on outputs filled with NaN before. Then it
times them all in the same rounds, in a random order within each, and takes ratios within a round: a GPU that slows down
as it warms slows both sides. TABLE below says which ratios are asked for; the run ends with what it measured beside it.
Beside other processes (pytest -n auto) nothing is timed. Without a GPU every such test skips and says what it needs;
the tests of TABLE run anywhere. Odd sizes and generated code are left to each technique's own tests.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

from harness.bench import is_compiled, is_ours, time_rounds
from harness.catalog import Needs
from harness.check import CheckError
from harness.hardware import enqueue_ms, machine

import pytest
import torch

from examples.common.fp8_gemm import scaled_mm_blockwise
from examples.compiler import cuda_graphs
from examples.fp8 import blockwise_matmul as blockwise
from examples.fp8 import fp8_matmul as fp8
from examples.fp8 import microscaling as mx
from examples.fp8.microscaling_quantize import expected_bytes, mx_quantize, quantized_bytes
from examples.tma import blackwell, blackwell_plan
from examples.tma import tma_copy as copying
from examples.tma import tma_persistent_matmul as persistent
from examples.tma.tma_matmul import STEPS, tma_matmul
from examples.triton import fused_add_relu_mul as fused
from examples.triton import softmax
from examples.triton import tensor_cores as formats
from examples.triton import warp_specialized_matmul as specialized
from examples.triton.persistent_matmul import matmul_persistent
from examples.triton.pipelined_matmul import matmul_pipelined
from studies.fp8.microscaling import quantize_torch
from studies.tma import tma_epilogues as epilogues
from studies.tma.tma_copy import padded
from tests.examples.tma.test_gluon_matmul import KERNELS as GLUON

LAUNCHES = 2000  # of each kernel, under stress


class Row(NamedTuple):
    """One ratio that a test measures: "A over B", so many times as fast is variant A as variant B.

    `measured` is what each GPU reached; where nobody measured, nothing is asked, so that correctness alone decides.
    `margin` is how much less than that still passes.
    """

    ratio: str
    measured: dict[str, float]
    margin: float

    def least(self, gpu: str | None) -> float | None:
        return self.measured[gpu] * (1 - self.margin) if gpu in self.measured else None


def read_table(text: str) -> dict[str, list[Row]]:
    table: dict[str, list[Row]] = {}
    for line in text.strip().splitlines():
        test, ratio, *values = re.split(r" {2,}", line.partition("  #")[0].strip())
        measured = {gpu: float(value) for gpu, value in zip(GPUS, values, strict=False) if value != "-"}
        margin = values[len(GPUS) :]
        table.setdefault(test, []).append(Row(ratio, measured, float(margin[0]) if margin else 0.10))
    return table


# The thresholds: the ratios that each of GPUS reached (torch 2.11, Triton 3.6), in results/ or in a run of this suite,
# and the margin, 0.10 unless given: for what a power limit and another board change; where it is the host that is
# measured, hosts differ by more. "-": nothing is asked; the end of a run prints what was measured. A name in a ratio is
# that of a variant in the test, or stands for the fastest of those that start with it. Two spaces or more end a column.
GPUS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
TABLE = read_table("""
test_tensor_core_formats                     tf32 over float32                     7.55   7.901
test_tensor_core_formats                     bfloat16 over tf32                    2.12   2.196
test_tensor_core_formats                     float16 over cuBLAS float16           0.957  0.957
test_fp8_over_fp16                           FP8 over float16                      1.94   1.879
test_fp8_over_fp16                           FP8 over _scaled_mm                   1.034  1.019
test_fp8_blockwise                           warp specialized over plain           1.80   1.821  # H200: median of 4
test_fp8_blockwise                           warp specialized over _scaled_mm      1.081  1.021
test_mx_quantize[mxfp8]                      one kernel over torch.compile         1.80   1.622
test_mx_quantize[mxfp4]                      one kernel over torch.compile         3.94   5.267
test_mx_quantize[nvfp4]                      one kernel over torch.compile         3.50   4.435
test_mx_matmul[mxfp8]                        block-scaled over cuBLAS              -      -  # sm_90 decodes: slower
test_mx_matmul[mxfp4]                        block-scaled over cuBLAS              -      -
test_mx_matmul[nvfp4]                        block-scaled over cuBLAS              -      -
test_persistent[512]                         persistent over one program per tile  1.206  1.202
test_persistent[512]                         persistent over cuBLAS                0.961  0.965
test_persistent[4096]                        persistent over cuBLAS                0.998  0.993
test_tma_copy                                TMA over torch copy                   0.967  0.972  0.05
test_tma_matmul[4096x4096x4096]              parts over cuBLAS                     0.960  0.97
test_tma_matmul[4072x4104x4072]              loads over pointers                   1.213  1.172  # pointers need masks
test_tma_persistent_matmul[8192x8192x512]    persistent over one program per tile  1.291  1.277
test_tma_persistent_matmul[8192x8192x512]    persistent over cuBLAS                1.008  1.028
test_tma_persistent_matmul[8192x8192x8192]   persistent over cuBLAS                1.021  1.026
test_tma_persistent_matmul[4096x14336x4096]  persistent over cuBLAS                0.998  0.993
test_tma_descriptors                         prepared over each call               5.13   6.933  0.30
test_tma_epilogues[bias + SiLU]              fused over cuBLAS + torch.compile     1.116  1.123  0.05
test_tma_epilogues[bias + GELU]              fused over cuBLAS + torch.compile     1.140  1.139  0.05
test_tma_epilogues[FP8, scale given]         fused over cuBLAS + torch.compile     1.079  1.093  0.05
test_tma_epilogues[FP8, per group]           fused over cuBLAS + torch.compile     1.089  1.097  0.05
test_tma_epilogues[SwiGLU]                   fused over cuBLAS + torch.compile     1.074  1.111  0.068
test_tma_gluon_matmul[4096]                  ring over one buffer                  2.30   2.235
test_tma_gluon_matmul[4096]                  staggered over cuBLAS                 0.998  1.008
test_tma_gluon_matmul[8192]                  ring over one buffer                  2.29   2.331
test_tma_gluon_matmul[8192]                  staggered over cuBLAS                 1.031  1.028
test_tma_blackwell_matmul                    specialized over pipelined            -      -  # even on sm_90
test_tma_blackwell_matmul                    by hand over cuBLAS                   -      -  # none on sm_90
test_warp_specialized                        specialized over plain                -      -  # even on sm_90
test_pipelined                               2 stages over 1 stage                 1.41   1.287
test_pipelined                               3 stages over 1 stage                 1.76   1.46
test_fusion                                  fused over torch eager                2.38   2.354
test_fused_softmax                           fused over torch.softmax              1.90   1.366
test_fusion                                  torch.compile over torch eager        2.37   2.37
test_cuda_graph                              CUDA graph over torch eager           6.63   7.009  0.50
test_cuda_graph                              reduce-overhead over torch eager      13.4   11.58  0.50
""")


def needs(what: str, sm: tuple[int, int] = (8, 0), only: bool = False) -> Callable:
    """A test of `what`, which needs a GPU of architecture `sm` or newer (`only`: of that one); elsewhere it skips."""
    here = machine()
    reason = here.lacks(Needs(sm=sm, gpu=True))
    if not reason and only and here.capability != sm:
        reason = f"needs sm_{sm[0]}{sm[1]} and no other (this is sm_{here.sm})"
    where = f"sm_{sm[0]}{sm[1]}{'' if only else ' or newer'}"
    skip = pytest.mark.skipif(bool(reason), reason=f"{what} ({where}): {reason}")
    return lambda test: pytest.mark.gpu(skip(test))


def ratio_of(rounds: dict[str, list[float]], ratio: str) -> float | None:
    """The median over rounds of "A over B", from each variant's times; None where A or B was not run."""

    def fastest(name: str) -> list[float] | None:
        named = [times for each, times in rounds.items() if each == name] or [
            times for each, times in rounds.items() if each.startswith(f"{name} ")
        ]
        return min(named, key=statistics.median, default=None)

    ours, over = map(fastest, ratio.split(" over "))
    if ours is None or over is None:
        return None
    return statistics.median(base / own for own, base in zip(ours, over, strict=True))


def shortfalls(rows: list[Row], found: dict[str, float | None], gpu: str | None) -> list[str]:
    """What is below its threshold on this GPU, or was asked for and not measured (0)."""
    asked = [(row, row.least(gpu), found.get(row.ratio) or 0.0) for row in rows if row.least(gpu) is not None]
    return [f"{row.ratio} is {got:.3f}x, at least {least:.3f}x is asked" for row, least, got in asked if got < least]


class Speed:
    """The variants of one test: each is found right before any is timed."""

    def __init__(self, h, test: str, keep: Callable, alone: bool = True) -> None:
        self.h, self.rows, self.keep, self.alone = h, TABLE[test], keep, alone
        self.calls: dict[str, Callable] = {}

    def add(self, name: str, fn: Callable, *inputs, want, **budget) -> None:
        """Hold fn(*inputs) to the float64 `want`, ours on poisoned memory, and enter it into the race as `name`."""
        poison = is_ours(name) and not is_compiled(fn)
        self.h.check(fn, lambda *_: want, *inputs, what=name, poison=poison, **budget)
        self.calls[name] = functools.partial(fn, *inputs)

    def race(self, whole_calls: bool = False) -> None:
        """Time all variants, where nobody else uses the GPU, and hold this test's rows of TABLE to their thresholds.
        Lets go of the inputs.

        What falls short is measured once more before it fails: for a moment something else may have had the GPU.
        """
        if not self.alone:
            return self.calls.clear()
        gpu, found = self.h.machine.gpu, {}
        enqueue = {name: enqueue_ms(call) for name, call in self.calls.items()}
        for _ in range(2):
            samples = time_rounds(self.calls, enqueue, whole_calls)
            rounds = {name: [statistics.median(times) for times in each] for name, each in samples.items()}
            for row in self.rows:
                both = [x for x in (found.get(row.ratio), ratio_of(rounds, row.ratio)) if x is not None]
                found[row.ratio] = max(both, default=None)
            if not (short := shortfalls(self.rows, found, gpu)):
                break
        self.calls.clear()
        for row in self.rows:
            self.keep(row.ratio, found[row.ratio], row.measured.get(gpu), row.least(gpu))
        assert not short, f"{gpu}: {'; '.join(short)}"


@pytest.fixture
def speed(request, h, alone):
    """The race of the test that asks for it; conftest.py prints what is kept here at the end of the run."""

    def keep(ratio: str, found: float | None, measured: float | None, least: float | None) -> None:
        request.node.user_properties.append(("speed", [request.node.name, ratio, found, measured, least]))

    yield Speed(h, request.node.name, keep, alone)
    torch.compiler.reset()
    torch.cuda.empty_cache()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def race_gemm(h, speed: Speed, size: str, variants: dict[str, Callable]) -> None:
    """cuBLAS and each variant on "MxNxK"."""
    M, N, K = map(int, size.split("x"))
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    race(speed, {"cuBLAS": torch.matmul} | variants, a, b, want=product(a, b), terms=K)


def race(speed: Speed, calls: dict[str, Callable], *inputs, whole_calls: bool = False, **options) -> None:
    for name, fn in calls.items():
        speed.add(name, fn, *inputs, **options)
    speed.race(whole_calls)


# --- tensor-core formats


@needs("TF32, FP16 and BF16 tensor cores")
def test_tensor_core_formats(h, speed):
    n = 4096
    names = {"ieee": "float32", "tf32": "tf32", "bfloat16": "bfloat16", "float16": "float16"}
    for name, label in names.items():
        precision = formats.PRECISIONS[name].input_precision
        dot = functools.partial(formats.dot, input_precision=precision)
        a, b = formats.convert(name, *formats.matrices(h, name, n, n, n))
        speed.add(label, dot, a, b, want=product(a, b), **formats.budget(name, n))
        if name == "float16":
            speed.add("cuBLAS float16", torch.matmul, a, b, want=product(a, b), terms=n)
    speed.race()


@needs("FP8 tensor cores", (8, 9))
def test_fp8_over_fp16(h, speed):
    """The same numbers, which float16 holds exactly, in both formats, by the library and by our fastest kernels."""
    n, one = 8192, torch.ones((), device=h.device)
    a, b = h.randn(n, n, dtype=fp8.E4M3), h.randn(n, n, dtype=fp8.E4M3).t()
    wide, want = (a.half(), b.half().contiguous()), product(a, b)
    speed.add("float16 cuBLAS", torch.matmul, *wide, want=want, terms=n)
    if h.machine.sm >= 90:
        speed.add("float16 triton", matmul_persistent, *wide, want=want, terms=n)
    budget = {"dtype": torch.bfloat16} | fp8.budget(h, n)
    library = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
    speed.add("_scaled_mm", library, a, b, one, one, want=want, **budget)
    for variant in fp8.runnable(h.device):
        fn = functools.partial(fp8.fp8_matmul, variant=variant, check_scales=False)
        speed.add(f"FP8 {variant}", fn, a, b, one, one, want=want, **budget)
    speed.race()


@needs("FP8 tensor cores", (8, 9))
def test_fp8_blockwise(h, speed):
    """Scales along K: promoted sums. Specialized warps promote while others multiply."""
    n = 8192
    inputs = blockwise.operands(h, n, n, n)
    want, budget = blockwise.reference(*inputs), {"dtype": torch.bfloat16} | blockwise.budget(h, n)
    if "torch" not in blockwise.library(*inputs):
        speed.add("_scaled_mm", scaled_mm_blockwise, *inputs, want=want, **budget)
    for variant in blockwise.runnable(h.device):
        fn = functools.partial(blockwise.blockwise_matmul, variant=variant, check_scales=False)
        name = {"pointers": "plain", "warp specialized": "warp specialized"}[variant]
        speed.add(name, fn, *inputs, want=want, **budget)
    speed.race()


@needs("descriptors of scales", (9, 0))
@pytest.mark.parametrize("fmt", mx.FORMATS)
def test_mx_matmul(h, speed, fmt):
    """Block-scaled products, by the instruction from sm_100 on and decoded in the kernel before."""
    M = N = K = 4096
    x = mx.Operands.random(h, M, N, K, fmt)
    whole_a, whole_b = x.tensor_scales
    fn = functools.partial(mx.mx_matmul, fmt=fmt, out_dtype=h.half, a_tensor_scale=whole_a, b_tensor_scale=whole_b)
    alpha = math.prod(1.0 if whole is None else whole.item() for whole in x.tensor_scales)
    (a, b), want, budget = x.decoded, x.reference(*x.packed), {"dtype": h.half} | mx.budget(K)
    unused = torch.empty(M, N, dtype=h.half, device=h.device)  # beta=0: it is not read
    speed.add("cuBLAS", functools.partial(torch.addmm, beta=0, alpha=alpha), unused, a, b.T, want=want, **budget)
    speed.add("block-scaled", functools.partial(fn, check_scales=False), *x.packed, want=want, **budget)
    speed.race()


@needs("Triton", (9, 0))
@pytest.mark.parametrize("fmt", mx.FORMATS)
def test_mx_quantize(h, speed, fmt):
    """Every bit of values and scales."""
    n = h.fit(16384, bytes_each=64 * 16384)
    x = h.randn(n, n, dtype=h.half)
    whole = mx_quantize(x, fmt)[2]
    want = expected_bytes(x, fmt, "floor", whole)
    compiled = h.compiled(quantize_torch)
    library = lambda x: tuple(part.view(torch.uint8) for part in compiled(x, fmt, whole))  # noqa: E731
    ours = functools.partial(quantized_bytes, fmt=fmt, tensor_scale=whole)
    speed.add("torch.compile", library, x, want=want, dtype=torch.uint8)
    speed.add("one kernel", ours, x, want=want, dtype=torch.uint8)
    speed.race()


# --- how a kernel is scheduled


@needs("Triton's GEMM")
def test_pipelined(h, speed):
    """The same tile with 1, 2 and 3 stages: loads that run ahead of the MMAs."""
    names = ("1 stage", "2 stages", "3 stages")
    variants = {name: functools.partial(matmul_pipelined, num_stages=i) for i, name in enumerate(names, 1)}
    race_gemm(h, speed, "4096x4096x4096", variants)


@needs("one program per SM, loads by TMA", (9, 0))
@pytest.mark.parametrize("K", [512, 4096])
def test_persistent(h, speed, K):
    """A loop over tiles in each program: what it wins is the start and the end of a tile, so most where K is short."""
    names = {"one program per tile": "tile", "persistent": "split"}
    variants = {name: functools.partial(matmul_persistent, variant=variant) for name, variant in names.items()}
    race_gemm(h, speed, "8192x8192x512" if K == 512 else "4096x4096x4096", variants)


@needs("TMA", (9, 0))
def test_tma_copy(h, speed):
    """Every variant, on a matrix of 512 MiB."""
    n = h.fit(16384, bytes_each=30 * 16384)
    x = h.randn(n, n, dtype=torch.float16)
    names = {variant: f"TMA {variant}" if variant != "pointers" else variant for variant in copying.runnable()}
    calls = {name: functools.partial(copying.tma_copy, variant=variant) for variant, name in names.items()}
    race(speed, {"torch copy": copying.torch_copy} | calls, x, want=copying.reference(x), terms=0)


@needs("TMA", (9, 0))
@pytest.mark.parametrize("case", ["4096x4096x4096", "4072x4104x4072"])
def test_tma_matmul(h, speed, case):
    """One tile, one change at a time, from pointer loads to a store in parts."""
    race_gemm(h, speed, case, {step: functools.partial(tma_matmul, step=step) for step in STEPS})


@needs("TMA", (9, 0))
@pytest.mark.parametrize("case", ["8192x8192x512", "8192x8192x8192", "4096x14336x4096"])
def test_tma_persistent_matmul(h, speed, case):
    """The schedule that its rule takes."""
    per_tile = functools.partial(persistent.matmul_tma_persistent, schedule="tile")
    variants = {"persistent": persistent.matmul_tma_persistent, "one program per tile": per_tile}
    race_gemm(h, speed, case, variants)


@needs("TMA", (9, 0))
def test_tma_descriptors(h, speed):
    """Made by the host for each call, or once: what a caller in a loop waits for."""
    a, b = h.randn(1024, 1024, dtype=h.half), h.randn(1024, 1024, dtype=h.half)
    prepared = persistent.prepare_matmul(a, b, torch.full_like(a, math.nan))
    speed.add("prepared", prepared, want=product(a, b), dtype=h.half, terms=1024)
    speed.add("each call", persistent.matmul_tma_persistent, a, b, want=product(a, b), terms=1024)
    speed.race(whole_calls=True)


@needs("TMA", (9, 0))
@pytest.mark.parametrize("form", ["bias + SiLU", "bias + GELU", "FP8, scale given", "FP8, per group", "SwiGLU"])
def test_tma_epilogues(h, speed, form):
    """In the GEMM's store, against cuBLAS and then the epilogue as one kernel by torch.compile."""
    sizes = (8192, 14336, 4096)
    every = epilogues.layers(h, *sizes)
    _, inputs, reference, ours, two_kernels, _, dtype, _ = next(each for each in every if each[0] == form)
    common, differ = epilogues.allowed(h, form, dtype, sizes[2])
    want, budget = reference(*inputs), {"dtype": dtype} | common
    for variant in epilogues.runnable(h.device):
        speed.add(f"fused {variant}", ours(variant), *inputs, want=want, **budget | differ.get(variant, {}))
    speed.add("cuBLAS + torch.compile", two_kernels, *inputs, want=want, **budget)
    speed.race()


@needs("wgmma by hand", (9, 0), only=True)
@pytest.mark.parametrize("n", [4096, 8192])
def test_tma_gluon_matmul(h, speed, n):
    race_gemm(h, speed, f"{n}x{n}x{n}", GLUON)


@needs("TMA", (9, 0))
def test_tma_blackwell_matmul(h, speed):
    """By hand in tensor memory where there is some; the two that the compiler schedules anywhere with TMA."""
    a, b = h.randn(4096, 4096, dtype=h.half), h.randn(4096, 4096, dtype=h.half)
    want = blackwell.reference(a, b)
    calls = {"cuBLAS": lambda a, b: a @ b.T}
    for variant in blackwell_plan.runnable(h.device):
        calls[variant] = functools.partial(blackwell.blackwell_matmul, variant=variant)
    race(speed, calls, a, b, want=want, terms=4096)


@needs("warp specialization, loads by TMA", (9, 0))
def test_warp_specialized(h, speed):
    """Triton's own, one word in tl.range: over the loop of K, over that of tiles, over both as one (64 rows: small)."""
    a, b = h.randn(4096, 4096, dtype=h.half), h.randn(4096, 4096, dtype=h.half)
    calls = {}
    for word, asked in {"plain": False, "specialized": True}.items():
        for loop, rows in (("k", 64), ("k", 128), ("tiles", 128), ("flattened tiles", 64)):
            fn = functools.partial(specialized.matmul_specialized, loop=loop, warp_specialize=asked, block_m=rows)
            if h.machine.sm == 90 or specialized.runs(fn, a, b):  # sm_90 has these forms, others not all of them
                calls[f"{word} {loop} {rows} rows"] = fn
    race(speed, calls, a, b, want=product(a, b), terms=4096)


# --- fusion, torch.compile, CUDA graphs


@needs("Triton")
def test_fusion(h, speed):
    """Three elementwise kernels as one, by hand and by the compiler."""
    x, y = (h.randn(h.fit(1 << 28, bytes_each=48)) for _ in range(2))
    calls = {"torch eager": fused.eager, "fused": fused.fused_add_relu_mul, "torch.compile": h.compiled(fused.eager)}
    race(speed, calls, x, y, 2.0, want=fused.reference(x, y, 2.0), terms=0, roundings=2)


@needs("Triton")
def test_fused_softmax(h, speed):
    x = h.randn(h.fit(16384, bytes_each=16 * 16384), 16384, dtype=h.half, scale=2.0)
    calls = {"torch.softmax": softmax.torch_softmax, "fused": softmax.softmax}
    race(speed, calls, x, want=softmax.reference(x), **softmax.BUDGET)


@needs("CUDA graphs")
def test_cuda_graph(h, speed):
    """A hundred tiny kernels: launched one by one, replayed as one graph, compiled, both. Whole calls are timed."""
    torch.compiler.reset()
    chain, x = cuda_graphs.make_chain(h), h.randn(cuda_graphs.WIDTH)
    captured = cuda_graphs.Captured(chain, h.randn(cuda_graphs.WIDTH))  # on other numbers than it is replayed with
    compiled = torch.compile(chain, fullgraph=True)
    reduced = torch.compile(chain, fullgraph=True, mode="reduce-overhead")
    for call in (compiled, reduced, reduced):  # the latter runs, then records, then replays
        call(x)
    calls = {"torch eager": chain, "CUDA graph": captured, "torch.compile": compiled, "reduce-overhead": reduced}
    race(speed, calls, x, want=chain.float64(x), terms=cuda_graphs.STEPS, whole_calls=True)


# --- under stress


@pytest.mark.slow
@needs("kernels whose warps wait for each other", (9, 0))
def test_same_bits_in_every_launch(h):
    """Thousands of launches of each asynchronous kernel, in turn: a missing barrier shows only now and then."""
    half, device, bind = h.half, h.device, functools.partial
    a, b = h.randn(1025, 520, dtype=half), h.randn(520, 776, dtype=half)
    w, grouped = b.t().contiguous(), blockwise.operands(h, 1025, 776, 512)
    rows, eight = padded(h, 1025, 777, half), fp8.operands(h, 1025, 776, 528, rows=True)
    calls = {"softmax split": bind(softmax.softmax_split, h.randn(64, 65537, dtype=half))}
    if machine().sm == 90:
        calls |= {f"gluon {step}": bind(fn, a, b) for step, fn in GLUON.items()}
    for name, fn, args, option, values in [
        ("persistent", matmul_persistent, (a, b), "variant", ("tile", "flattened", "split")),
        ("FP8", bind(fp8.fp8_matmul, check_scales=False), eight, "variant", fp8.runnable(device)),
        ("FP8 blockwise", bind(blockwise.blockwise_matmul, check_scales=False), grouped, "variant",
         blockwise.runnable(device)),
        ("TMA persistent", persistent.matmul_tma_persistent, (a, b), "schedule", persistent.runnable(device)),
        ("epilogue", bind(epilogues.linear, activation="silu"), (a, w), "variant", epilogues.runnable(device)),
        ("blackwell", blackwell.blackwell_matmul, (a, w), "variant", blackwell_plan.runnable(device)),
        ("TMA", tma_matmul, (a, b), "step", STEPS),
        ("copy", copying.tma_copy, (rows,), "variant", copying.runnable()),
    ]:  # fmt: skip
        calls |= {f"{name} {value}": bind(fn, *args, **{option: value}) for value in values}
    first = {name: call() for name, call in calls.items()}
    differ = {name: torch.zeros((), dtype=torch.int64, device=h.device) for name in calls}
    for _ in range(LAUNCHES):
        for name, call in calls.items():
            differ[name] += (call() != first[name]).any()
    assert {name: int(count) for name, count in differ.items() if count} == {}


# --- TABLE and what holds to it


def test_table_asks_for_what_it_can_notice():
    """A gain no larger than its margin is not asked for: a technique that does nothing would pass."""
    for test, rows in TABLE.items():
        assert test.split("[")[0] in globals()
        assert len({row.ratio for row in rows}) == len(rows)
        for row in rows:
            library = row.ratio.split(" over ")[1].startswith(("cuBLAS", "_scaled_mm", "torch copy"))
            assert all(library or row.least(gpu) > 1 for gpu in row.measured), row
        assert not any(shortfalls(rows, {}, gpu) for gpu in (None, "NVIDIA H100 PCIe"))
    assert TABLE["test_tma_epilogues[FP8, scale given]"][0].least(GPUS[0]) == pytest.approx(1.079 * 0.95)


def test_a_ratio_is_taken_within_rounds():
    """A GPU that slows down threefold from round to round slows both sides, and the ratio stays."""
    rounds = {"ours": [1.0, 3.0, 9.0], "theirs": [2.0, 6.0, 18.0]}
    rounds |= {"their slow": [5.0] * 3, "their fast": [3.0] * 3, "theirs too": [0.1] * 3}
    assert ratio_of(rounds, "ours over theirs") == 2.0  # a name that is a variant's is that variant's
    assert ratio_of(rounds, "their over ours") == 1.0  # the fastest of both, and none whose name begins otherwise
    assert ratio_of(rounds, "ours over nobody") is None


def test_a_slow_or_wrong_variant_fails_where_something_is_asked(h, monkeypatch):
    """What is fast at the second measurement passes; what is fast at the first is not measured again."""
    module, x = sys.modules[__name__], h.randn(64, 64)
    made_up = [Row("fast over slow", {"a": 2.0, "b": 1.5}, 0.1), Row("fast over library", {"b": 1.0}, 0.1)]
    monkeypatch.setitem(TABLE, "made up", made_up)
    monkeypatch.setattr(module, "enqueue_ms", lambda call: 0.0)

    def race_of(gpu: str, *slow: float) -> list:
        left, kept = list(slow), []
        monkeypatch.setattr(module, "time_rounds", lambda *_: {"fast": [[1.0]], "slow": [[left.pop(0)]]})
        monkeypatch.setattr(h, "machine", dataclasses.replace(h.machine, gpu=gpu))
        speed = Speed(h, "made up", lambda *row: kept.append(row))
        try:
            race(speed, dict.fromkeys(("fast", "slow"), lambda x: x * 2), x, want=x.double() * 2)
        finally:
            assert (left, speed.calls) == ([], {}), "it was not measured again, or inputs would stay in memory"
        return kept

    with pytest.raises(AssertionError, match=r"a: fast over slow is 1\.000x, at least 1\.800x"):
        race_of("a", 1.0, 0.9)
    assert race_of("a", 1.0, 2.0) == [("fast over slow", 2.0, 2.0, 1.8), ("fast over library", None, None, None)]
    assert race_of("a", 1.9)[0] == ("fast over slow", 1.9, 2.0, 1.8)
    assert race_of("c", 0.1)[0] == ("fast over slow", 0.1, None, None)
    for wrong in (lambda x: x * 2.001, torch.empty_like):
        with pytest.raises(CheckError, match=r"fused|nobody wrote"):
            Speed(h, "made up", print).add("fused", wrong, x, want=x.double() * 2)
