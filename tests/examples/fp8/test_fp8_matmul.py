"""fp8_matmul: every variant at every edge, formats, scales, bias, layouts, extremes, bad input, the code."""

import functools
import itertools
import math
import random
import re
import threading
from types import SimpleNamespace

from harness.codegen import CodegenError, Kernel, compile_for
from harness.hardware import SHARED_LIMIT, Limits

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.fp8 import fp8_matmul as module
from examples.fp8.fp8_matmul import (
    CODE,
    E4M3,
    E5M2,
    GROUP_M,
    OUT_DTYPES,
    POINTER_TILES,
    TMA_TILES,
    VARIANTS,
    budget,
    fitting_tile,
    fp8_matmul,
    operands,
    reference,
)

FORMATS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]


def check(h, inputs, variant, out=torch.bfloat16, what=None, **more):
    fn = functools.partial(fp8_matmul, out_dtype=out, variant=variant)
    M, K = inputs[0].shape
    what = what or f"{variant} {M}x{inputs[1].shape[1]}x{K} {out}"
    h.check(fn, reference, *inputs, what=what, dtype=out, **budget(h, K) | more)


def runs(h, variant):
    if variant not in module.runnable(h):
        pytest.skip(f"{variant} needs another GPU")


@pytest.fixture
def gpu_of(monkeypatch):
    """Let the wrapper believe in another GPU: so many SMs, so much shared memory (the interpreter has no limit)."""

    def pretend(sms, sm=90):
        monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[sm]))

    return pretend


# One row, one column, one tile and one more in each dimension, half a tile of columns and 8 more, nothing to sum.
SHAPES = [(1, 16, 16), (37, 8, 112), (128, 256, 128), (129, 264, 144), (5, 136, 16), (5, 16, 0), (0, 8, 16), (5, 0, 16)]
RAGGED = [(1, 1, 1), (37, 53, 101), (129, 257, 129), (3, 5, 0)]  # primes, one more than a tile: only by pointers
COMBINATIONS = [(v, s) for v in VARIANTS for s in SHAPES] + [("pointers", s) for s in RAGGED]


@pytest.mark.parametrize(("variant", "shape"), COMBINATIONS)
@pytest.mark.parametrize("rows", [False, True])
def test_shapes(h, variant, shape, rows):
    runs(h, variant)
    M, N, K = shape
    if min(shape) > 0:
        inputs = operands(h, M, N, K, rows)
    else:  # no amax of nothing
        scales = (h.randn(M, 1).exp_(), h.randn(1, N).exp_()) if rows else (h.randn(1).exp_(), h.randn(1).exp_())
        inputs = (h.randn(M, K, dtype=E4M3), h.randn(N, K, dtype=E4M3).t(), *scales)
    check(h, inputs, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("out", OUT_DTYPES)
def test_every_format_to_every_dtype(h, variant, formats, out):
    runs(h, variant)
    for rows in (False, True):
        inputs = operands(h, 133, 264, 144, rows, formats)
        check(h, inputs, variant, out)
        if not (h.interpreted and out is torch.bfloat16):  # the interpreter takes no bfloat16
            check(h, (*inputs, h.randn(264, dtype=out)), variant, out, what=f"{variant} {formats} bias {out}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_bias_is_added_in_float32_after_scaling(h, variant):
    """All products 0: the bias comes back bit for bit, also where K is 0."""
    runs(h, variant)
    bias, one = h.randn(264), torch.ones((), device=h.device)
    for K in (0, 16):
        a, b = torch.zeros(3, K, device=h.device).to(E4M3), torch.zeros(264, K, device=h.device).to(E5M2).t()
        got = fp8_matmul(a, b, one, one, bias, torch.float32, variant)
        assert torch.equal(got, bias.expand(3, -1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_scales_of_every_shape(h, variant):
    """None, one or many for each side, contiguous or not: a stride nobody expects, a column of a wider matrix."""
    runs(h, variant)
    M, N, K = 130, 264, 32
    a, b, scale_a, scale_b = operands(h, M, N, K, rows=True)
    every_a = [scale_a[:1, 0], scale_a[0, 0], scale_a, h.randn(M, 3).exp_()[:, 1:2], h.randn(M + 1, 1).exp_()[1:]]
    every_b = [scale_b[0, :1], scale_b[0, 0], scale_b, h.randn(2, N).exp_()[:1], h.randn(N, 2).exp_().t()[1:]]
    for i, one in enumerate(every_a):
        for j, other in enumerate(every_b):
            check(h, (a, b, one, other), variant, what=f"{variant} scales {i}, {j}")
    check(h, (a[:1], b, scale_a[:1], scale_b), variant, what=f"{variant}, a row of one")
    bias = h.randn(N + 1, dtype=torch.float32)[1:]  # starts where no TMA could
    check(h, (a, b, scale_a, scale_b, bias), variant, torch.float32, what=f"{variant}, bias from 4 bytes on")


def test_what_tma_cannot_read_as_a_vector_is_copied():
    x = torch.rand(3, 260)
    for vector, kept in [(x[:1], True), (x[1:2, 4:], True), (x[:1, 1:], False), (x[:, 4:5], False), (x[0, 0], False)]:
        n = 3 if vector.shape == (3, 1) else 260 if vector.ndim == 0 else vector.shape[1]
        desc = module._tma_vector(vector, n, 64)
        assert desc.base.data_ptr() % 16 == 0
        assert (desc.base.data_ptr() == vector.data_ptr()) == kept
        assert torch.equal(desc.base, vector.reshape(1, -1).expand(1, n))
        assert (desc.shape, desc.strides[1], desc.block_shape) == ([1, n], 1, [1, 64])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sms", [1, 3, 1000])
def test_every_tile_is_taken_once(h, variant, sms, gpu_of):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles."""
    runs(h, variant)
    gpu_of(sms)  # fewer than there are, or more, which is then as many as tiles
    check(h, operands(h, 300, 520, 16, rows=True), variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bands_of_tiles(h, variant):
    """More rows of tiles than a band has, a last band that is not full, two columns of tiles."""
    runs(h, variant)
    check(h, operands(h, (GROUP_M + 1) * TMA_TILES[0][0] + 1, 264, 16, rows=True), variant)


@given(
    M=st.integers(1, 300), N=st.integers(1, 560), K=st.integers(1, 300), rows=st.booleans(),
    out=st.sampled_from(OUT_DTYPES), formats=st.sampled_from(FORMATS), variant=st.sampled_from(VARIANTS),
)  # fmt: skip
def test_any_shape(M, N, K, rows, out, formats, variant):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    if variant not in module.runnable(h):
        return
    if variant != "pointers":
        K, N = -(-K // 16) * 16, -(-N // 8) * 8
    check(h, operands(h, M, N, K, rows, formats), variant, out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts(h, variant):
    runs(h, variant)
    one = torch.ones((), device=h.device)
    a, w = h.randn(140, 320, dtype=E4M3), h.randn(300, 480, dtype=E4M3)
    pairs = [
        (a, w[:104, :320].t()),  # columns apart: what lies between them must not be summed
        (a[:, 16:160], w[:264, :144].t()),  # a start 16 bytes later
        (a[::3, :144], w[16::2, 32:176].t()[:, :136]),  # every third row, every second column
        (a[:1, :144].as_strided((1, 144), (5, 1)), w[:40, :144].t()),  # one row, with a stride nobody steps by
        (a[:, :1], w[:8, :1].t()) if variant == "pointers" else (a[:, :16], w[:8, :16].t()),  # K of one
    ]
    if variant == "pointers":  # what TMA refuses
        pairs += [(a[:, 1:38], w[:264, 3:40].t()), (a[:1].expand(7, 320), w[:9, :320].t())]
    for left, right in pairs:
        check(h, (left, right, one, one), variant, what=f"{variant} strides {left.stride()}, {right.stride()}")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [False, True])
def test_extremes(h, variant, rows):
    """NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile."""
    runs(h, variant)
    scales = (h.randn(130, 1).exp_(), h.randn(1, 264).exp_()) if rows else (h.randn(1).exp_(), h.randn(1).exp_())
    a, b = h.randn(130, 144), h.randn(264, 144)
    a[3, 5], b[9, 2] = float("nan"), float("nan")  # e4m3fn has no infinity
    check(h, (a.to(E4M3), b.to(E4M3).t(), *scales), variant, what="NaN")
    a[129, 143], b[263, 143], b[130, 7] = (float(x) for x in ("inf", "-inf", "inf"))
    check(h, (a.to(E5M2), b.to(E5M2).t(), *scales), variant, what="NaN and infinities")
    largest = torch.full((5, 144), 448.0, device=h.device).to(E4M3)
    signs = torch.where(h.randn(264, 144) > 0, 448.0, -448.0).to(E4M3).t()
    check(h, (largest, signs, scales[0][:5] if rows else scales[0], scales[1]), variant, what="the largest numbers")
    least = (h.randn(130, 144) * 2.0**-8).to(E4M3)  # mostly subnormal
    small = tuple(2.0**-30 * scale for scale in scales)
    check(h, (least, b.nan_to_num(0, 1, 1).to(E5M2).t(), *small), variant, torch.float32, what="subnormal")
    huge = tuple(40.0 * scale for scale in scales)
    finite = a.nan_to_num(0, 1, 1).to(E4M3), b.nan_to_num(0, 1, 1).to(E4M3).t()
    check(h, (*finite, *huge), variant, torch.float16, what="beyond the range of float16, in part")


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantized_zeros_stay_zeros(h, variant):
    """Their scale is the least there is, and the product of two underflows: 0 all the same."""
    from harness import quantize_reference

    runs(h, variant)
    q, scale = quantize_reference(torch.zeros(16, 32, device=h.device), (16, 32))
    for scales in ((scale.reshape(()), scale.reshape(1)), (scale.expand(16, 1), scale.expand(1, 16))):
        assert not fp8_matmul(q, q.t(), *scales, variant=variant).any()


def test_less_shared_memory(h, gpu_of):
    if not h.interpreted:
        pytest.skip("shared memory is real here")
    gpu_of(4, sm=120)
    for variant in module.runnable(h):
        check(h, operands(h, 200, 264, 144, rows=True), variant, torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gpu_without_room_for_any_tile(h, monkeypatch, variant):
    if variant == "warp specialized":
        pytest.skip("runs where there is room only")
    runs(h, variant)
    monkeypatch.setattr(module, "device_limits", lambda device: Limits(40, 16 * 1024))
    with pytest.raises(RuntimeError, match="fp8_matmul: no tile fits the 16384 bytes of shared memory of"):
        fp8_matmul(*operands(h, 16, 16, 16, False), variant=variant)


@pytest.mark.parametrize(
    ("have", "variant", "message"),
    [((8, 0), "pointers", "this GPU is sm_80; FP8 tensor cores come with sm_89"),
     ((8, 9), "persistent", r"TMA comes with sm_90 \(this is sm_89\): use variant='pointers'"),
     ((8, 9), "warp specialized", r"TMA comes with sm_90 \(this is sm_89\): use variant='pointers'"),
     ((10, 0), "warp specialized", r"'warp specialized' needs sm_90's wgmma \(this is sm_100\): use .*'persistent'"),
     (None, "warp specialized", r"'warp specialized' needs .* \(and Gluon kernels are not interpreted\): use "),
     ((8, 9), "pointers", None)],
)  # fmt: skip
def test_other_gpus(h, monkeypatch, have, variant, message):
    if not h.interpreted:
        pytest.skip("the architecture is real here")
    monkeypatch.setattr(module, "capability", lambda device: have)
    inputs = operands(h, 16, 16, 16, False)
    if message is None:
        check(h, inputs, variant)
        return
    with pytest.raises(RuntimeError, match=f"fp8_matmul: {message}"):
        fp8_matmul(*inputs, variant=variant)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("which", [2, 3])
def test_bad_scales(h, which, value):
    inputs = [*operands(h, 20, 16, 16, rows=True)]
    inputs[which] = inputs[which].clone()
    inputs[which].view(-1)[5] = value
    with pytest.raises(ValueError, match=rf"fp8_matmul: scale_{'ab'[which - 2]} has 1 of .* not positive and finite"):
        fp8_matmul(*inputs)
    fp8_matmul(*inputs, check_scales=False)  # not looked at, so not refused


@pytest.mark.gpu
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 5208, 784), (16, 8192, 4096), (8191, 264, 512)])
def test_shapes_on_the_gpu(h, formats, shape):
    for variant in module.runnable(h):
        for out, rows in zip(OUT_DTYPES, (True, False, True), strict=True):
            inputs = operands(h, *shape, rows, formats)
            check(h, (*inputs, h.randn(shape[1], dtype=out)), variant, out)


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 2, 7, 132])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7, 8, 9])
def test_barriers_across_tiles(h, gpu_of, sms, steps):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them."""
    gpu_of(sms)
    K = 128 * steps - 64 * (steps % 2)
    for variant in module.runnable(h):
        for rows, with_bias in [(False, False), (False, True), (True, False), (True, True)]:
            inputs = operands(h, 700, 1288, K, rows)
            bias = h.randn(1288, dtype=torch.bfloat16) if with_bias else None
            check(h, (*inputs, bias), variant, what=f"{variant} {steps} steps {sms} SMs {rows} {with_bias}")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("out", OUT_DTYPES)
def test_every_launch_gives_the_same_bits(h, rows, out):
    """A buffer that is read too early or written too early does not do so the same way every time."""
    for shape in [(4096, 4096, 256), (1000, 8200, 1040), (16384, 512, 128), (300, 264, 8192)]:
        inputs = (*operands(h, *shape, rows), h.randn(shape[1], dtype=out))
        for variant in module.runnable(h):
            fn = functools.partial(fp8_matmul, *inputs, out, variant, check_scales=False)
            first = fn()
            assert all(torch.equal(fn(), first) for _ in range(50)), (variant, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [False, True])
def test_long_sums_stay_beside_the_librarys(h, rows):
    """An error that grows with K must be that of the instruction, not of this kernel: at most twice _scaled_mm's."""
    for K in (512, 4096, 16384):
        inputs = operands(h, 4096, 4096, K, rows)
        want = reference(*inputs)

        def error(got, want=want):
            return ((got.double() - want).square().mean() / want.square().mean()).sqrt().item()

        library = error(torch._scaled_mm(*inputs, out_dtype=torch.bfloat16, use_fast_accum=True))
        library = max(library, torch.finfo(torch.bfloat16).eps)
        for variant in module.runnable(h):
            assert error(fp8_matmul(*inputs, variant=variant)) < 2 * library, (variant, K)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(40)
    long, K = 2**31 // 64 + 64, 64
    a = torch.empty(long, K, dtype=torch.bfloat16, device=h.device).normal_().to(E4M3)
    w, one = h.randn(64, K, dtype=E4M3), torch.ones((), device=h.device)
    many = torch.rand(long, 1, device=h.device) + 0.5
    for variant in module.runnable(h):
        tall = fp8_matmul(a, w.t(), many, one, variant=variant)
        for part in (slice(0, 300), slice(-300, None)):
            inputs = (a[part], w.t(), many[part], one)
            h.check(lambda *_, p=part, c=tall: c[p], reference, *inputs, what="tall", dtype=tall.dtype, **budget(h, K))
        del tall
        wide = fp8_matmul(w, a.t(), one, many.t(), variant=variant)
        for part in (slice(0, 300), slice(-300, None)):
            inputs = (w, a[part].t(), one, many[part].t())
            h.check(
                lambda *_, p=part, c=wide: c[:, p].contiguous(), reference, *inputs,
                what="wide", dtype=wide.dtype, **budget(h, K),
            )  # fmt: skip
        del wide


def meta(*shape, dtype=E4M3):
    return torch.empty(shape, dtype=dtype, device="meta")


def layer(rows, n=4096, formats=(E4M3, E4M3)):
    f32 = torch.float32
    scales = (meta(n, 1, dtype=f32), meta(1, n, dtype=f32)) if rows else (meta(dtype=f32), meta(1, dtype=f32))
    return meta(n, n, dtype=formats[0]), meta(n, n, dtype=formats[1]).t(), *scales


TENSOR_CORES = {89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize(("variant", "sm"), [(v, sm) for v, find in CODE.items() for sm in find])
@pytest.mark.parametrize("rows", [False, True])
def test_generated_code(variant, sm, rows):
    (kernel,) = compile_for(fp8_matmul, (*layer(rows), None, torch.bfloat16, variant), sms=(sm,))
    assert kernel.error is None
    assert all(kernel.found.get(name) for name in CODE[variant][sm]), kernel.found
    assert kernel.found["mma f8"] == kernel.found[TENSOR_CORES[sm]], "a tensor-core instruction that is not FP8's"
    assert kernel.spills == 0
    assert kernel.fits
    if variant != "warp specialized":  # which has one tile
        # What the wrapper reckons with is enough and used, and not one step of K more would fit.
        reckoned, one_more = shared_for(sm, POINTER_TILES if variant == "pointers" else TMA_TILES)
        assert kernel.shared <= reckoned <= kernel.shared_limit == SHARED_LIMIT[sm] < one_more
        assert reckoned - kernel.shared <= 2048


@pytest.mark.parametrize("sm", [89, 100, 120])
def test_warp_specialized_is_not_compiled_for_others(sm):
    """The compiler would end this process instead of saying no."""
    (kernel,) = compile_for(fp8_matmul, (*layer(True), None, torch.bfloat16, "warp specialized"), sms=(sm,))
    assert kernel.error.startswith("RuntimeError: fp8_matmul: ")


@pytest.mark.parametrize(("rows", "out"), [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float32)])
def test_warps_with_roles(rows, out):
    """With scales and bias there is room, and the products of a step are issued together."""
    from harness.codegen import dump

    args = (*layer(rows), meta(4096, dtype=out), out, "warp specialized")
    (kernel,) = compile_for(fp8_matmul, args, sms=(90,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    text = dump(fp8_matmul, args, sm=90)
    assert not re.search("serialized|C75", text["log"])  # ptxas could wait for each before the next is started
    # The first step, which nothing was summed before, and one loop; the second consumer has another after its pause.
    assert text["ttgir"].count("ttng.warp_group_dot ") == 5
    assert "requestedRegisters = array<i32: 240, 24>" in text["ttgir"]
    # One commit for each of them: four products of K = 32 before it.
    assert text["ptx"].count("wgmma.commit_group") == 5
    assert kernel.found["wgmma"] == 4 * 5
    # Each waits with one in flight; all are waited for where a tile ends, and by the second before its pause.
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d);", text["ptx"])
    assert sorted(waits) == ["0"] * 3 + ["1"] * 5
    # By TMA: three boxes of operands, scales in three, the bias in one; nothing but two scales is loaded otherwise.
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", text["ptx"])) == (7 if rows else 4)
    assert text["ptx"].count("ld.global") == (0 if rows else 2 * 2)


class Stopped(BaseException):
    """Ends a role that still waits when a run has failed."""


class Machine:
    """Runs the roles of the warp-specialized kernel as Python, in random turns, on barriers and buffers of its own.

    A role stops at whatever it waits for and wherever another may come between. Copies are jobs: done whenever chance
    likes. A product has read its operands only when it was waited for.
    """

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.jobs, self.waiting, self.turns, self.errors = [], {}, {}, []
        self.back, self.over = threading.Semaphore(0), False
        self.flight, self.stores, self.log = {}, {}, []

    def turn(self, condition=lambda: True):
        me = threading.get_ident()
        self.waiting[me] = condition
        self.back.release()
        self.turns[me].acquire()
        if self.over:
            raise Stopped

    def role(self, fn, args):
        me = threading.get_ident()
        self.turns[me], self.flight[me], self.stores[me] = threading.Semaphore(0), [], []
        try:
            self.turn()
            fn(*args)
            assert not self.flight[me], "ended with products in flight"
            assert not self.stores[me], "ended before TMA had read what was stored"
        except Stopped:
            pass
        except BaseException as error:  # shown by run
            self.errors.append(error)
        self.waiting.pop(me, None)
        self.back.release()

    def run(self, roles):
        threads = [threading.Thread(target=self.role, args=role, daemon=True) for role in roles]
        for thread in threads:
            thread.start()
            self.back.acquire()
        speed = {key: self.chance.choice([1, 1, 30]) for key in [*self.waiting, "copies"]}
        try:
            while self.waiting and not self.errors:
                ready = [key for key, condition in self.waiting.items() if condition()] + ["copies"] * bool(self.jobs)
                assert ready, f"all wait: {self.log}"
                (key,) = self.chance.choices(ready, [speed[key] for key in ready])
                if key == "copies":
                    self.jobs.pop(self.chance.randrange(len(self.jobs)))()
                else:
                    self.turns[key].release()
                    self.back.acquire()
        finally:
            self.over = True
            for turn in self.turns.values():
                turn.release()
            for thread in threads:
                thread.join()
        if self.errors:
            raise self.errors[0]

    # What the roles call.

    def wait(self, barrier, parity):
        self.turn(lambda: barrier.phase % 2 != parity)

    def arrive(self, barrier, pred=True):
        self.turn()
        if pred:
            barrier.arrive()

    def expect(self, barrier, size):
        self.turn()
        barrier.bytes += size
        barrier.arrive()

    def load(self, desc, at, barrier, buffer):
        def copy():
            buffer.content = (desc.name, *at)
            barrier.bytes -= math.prod(desc.block_shape) * desc.dtype.primitive_bitwidth // 8
            barrier.complete()

        self.turn()
        self.jobs.append(copy)

    def multiply(self, a, b, acc, use_acc=True, is_async=False):
        self.turn()
        product = (a.content, b.content)
        self.flight[threading.get_ident()].append((a, b, product))
        return [*(acc if use_acc else ()), product]

    def products_done(self, pending, deps):
        flight = self.flight[threading.get_ident()]
        while len(flight) > pending:
            a, b, product = flight.pop(0)
            self.turn()
            assert (a.content, b.content) == product, "overwritten while it was multiplied"
        return deps[0]

    def store_wait(self, pending):
        assert pending == 0
        mine = self.stores[threading.get_ident()]
        self.turn(lambda: not mine)

    def store_parts(self, c_desc, c_buf, free, phase, acc, row, col, scale_a, scale_b, bias, *more):
        _, _, half, *_ = more
        assert not self.flight[threading.get_ident()], "stored before all was summed"
        if half == 1:
            self.wait(free, phase)
        lasts = [("scale_a", 0, row), ("scale_b", 0, col), ("bias", 0, col)]
        assert [scale_a, scale_b.content, bias.content] == lasts
        assert not any(self.stores.values()), "the buffer of results is still being read"
        c_buf.content = (row, acc)
        self.turn()
        assert [scale_b.content, bias.content] == lasts[1:]
        assert c_buf.content == (row, acc)
        mine = self.stores[threading.get_ident()]
        mine.append(row)

        def copy():
            assert c_buf.content == (row, acc), "overwritten while it was stored"
            mine.remove(row)

        self.jobs.append(copy)
        self.log.append((row, col, acc))


class Barrier:
    """An mbarrier: a phase completes with `count` arrivals and all bytes that were announced."""

    def __init__(self, count):
        self.count, self.arrived, self.bytes, self.phase = count, set(), 0, 0

    def arrive(self):
        me = threading.get_ident()
        assert me not in self.arrived, "arrived twice in a phase"
        self.arrived.add(me)
        self.complete()

    def complete(self):
        if len(self.arrived) == self.count and self.bytes == 0:
            self.arrived, self.phase = set(), self.phase + 1


class Buffer:
    content = None

    def permute(self, order):
        return self

    def reshape(self, shape):
        return self

    def load(self, layout):
        return self.content


class Several:
    def __init__(self, new, count, *shape):
        self.items, self.shape = [new() for _ in range(count)], [count, *shape]

    def index(self, i):
        assert 0 <= i < len(self.items)  # not from the end
        return self.items[i]


def run_roles(steps, tiles, stages, behind, seed):
    """Every tile by one program, with scales and bias; two columns of tiles, and rows of tiles as needed."""
    machine = Machine(seed)
    half_m, block_n, block_k = 64, 256, 128
    M, N, K = (tiles + 1) // 2 * 2 * half_m, 2 * block_n if tiles > 1 else block_n, steps * block_k - 64 * (seed % 2)

    def desc(name, bits, *shape):
        return SimpleNamespace(name=name, dtype=SimpleNamespace(primitive_bitwidth=bits), block_shape=shape)

    operands = (
        Several(Buffer, 2 * stages, half_m, block_k), Several(Buffer, stages, block_n, block_k),
        Several(lambda: Barrier(1), stages), Several(lambda: Barrier(2), stages),
    )  # fmt: skip
    last = (Several(Buffer, 2), Buffer(), Buffer(), Barrier(1), Barrier(2))
    c_buf, read, summed = Buffer(), Several(lambda: Barrier(1), 2), Barrier(1)
    c_buf.shape = [half_m, block_n]
    a, b, c = desc("a", 8, half_m, block_k), desc("b", 8, block_n, block_k), desc("c", 16, half_m, block_n)
    scale_a, scale_b, bias = (
        desc("scale_a", 32, 1, half_m),
        desc("scale_b", 32, 1, block_n),
        desc("bias", 16, 1, block_n),
    )
    consumer = (
        operands, last, c, c_buf, scale_a, scale_b, read, summed, M, N, K, True, True, stages, behind, GROUP_M,
    )  # fmt: skip
    fakes = {
        "gl": SimpleNamespace(
            program_id=lambda axis: 0, num_programs=lambda axis: 1, cdiv=lambda x, y: -(-x // y), maximum=max,
            where=lambda which, x, y: x if which else y, static_range=range, zeros=lambda *_: [], float32=None,
            NVMMADistributedLayout=lambda **_: None, SliceLayout=lambda *_: None,
        ),
        "mbarrier": SimpleNamespace(wait=machine.wait, arrive=machine.arrive, expect=machine.expect),
        "tma": SimpleNamespace(async_copy_global_to_shared=machine.load, store_wait=machine.store_wait),
        "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.products_done,
        "_store_parts": machine.store_parts,
        "_gluon_tile_of": module._tile_of,
    }  # fmt: skip
    fakes |= {name: getattr(module, name).fn for name in ("_next", "_before", "_sum_products", "_consume", "_produce")}
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in fakes.items():
            patch.setattr(module, name, fake)
        machine.run([
            (module._produce, (operands, last, a, b, scale_a, scale_b, bias, M, N, K, True, stages, GROUP_M)),
            (module._consume, (*consumer, 0)),
            (module._consume, (*consumer, 1)),
        ])  # fmt: skip
    tile_at = [module._tile_of(tile, M, N, 2 * half_m, block_n, GROUP_M) for tile in range(M // 128 * (N // block_n))]
    assert machine.log == [
        (r, col, [(("a", r, k), ("b", col, k)) for k in range(0, K, block_k)])
        for row, col in tile_at
        for r in (row, row + half_m)
    ]


@given(st.integers(1, 9), st.integers(1, 10), st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_the_roles_neither_wait_for_ever_nor_overwrite(steps, tiles, seed):
    """The kernel's own roles in random turns; tiles of one step, too, and of fewer than the pause."""
    run_roles(steps, tiles, module.HOPPER_STAGES, module.HOPPER_BEHIND, seed)


@pytest.mark.parametrize("behind", [1, 2, 4])
def test_the_roles_with_other_pauses(behind):
    for steps, seed in itertools.product((1, 2, 3, 4, 5, 8), range(2)):
        run_roles(steps, 6, 4, behind, seed)


def test_a_pause_longer_than_the_ring_never_ends():
    """And it is found: the first needs a buffer that the second has not read."""
    with pytest.raises(AssertionError, match="all wait"):
        run_roles(9, 2, 4, 5, 0)


def shared_for(sm, tiles, itemsize=2):
    """What fitting_tile reckons with, and that with one step of K more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "device_limits", lambda device: Limits(1, SHARED_LIMIT[sm]))
        m, n, k, _, *parts, stages = fitting_tile(torch.device("cpu"), tiles, itemsize)
    buffers = stages - (TENSOR_CORES[sm] == "mma.sync")
    rest = (itemsize * m * n // parts[0] if parts else 0) + 2048
    return buffers * (m + n) * k + rest, (buffers + 1) * (m + n) * k + rest


@pytest.mark.parametrize("variant", VARIANTS[1:])
@pytest.mark.parametrize("formats", FORMATS[1:])
def test_mixed_formats_are_multiplied_as_they_are(formats, variant):
    """On Hopper each operand has a format of its own in the instruction: neither is converted."""
    from harness.codegen import dump

    args = (*layer(True, formats=formats), meta(4096, dtype=torch.float16), torch.float16, variant)
    name = {E4M3: "e4m3", E5M2: "e5m2"}
    ptx = dump(fp8_matmul, args, sm=90)["ptx"]
    wanted = f".f32.{name[formats[0]]}.{name[formats[1]]}"
    instructions = [line for line in ptx.splitlines() if "wgmma.mma_async" in line]
    assert instructions
    assert all(wanted in line for line in instructions), instructions[0]


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_scales_and_bias_fit_hoppers_registers(out):
    (kernel,) = compile_for(fp8_matmul, (*layer(True), meta(4096, dtype=out), out), sms=(90,))
    assert (kernel.error, kernel.spills) == (None, 0)
    assert kernel.fits


@pytest.mark.parametrize(
    ("sm", "pointers", "persistent", "wide"),
    [
        (89, (128, 256, 128, 8, 3), (128, 128, 128, 8, 2, 3), (128, 128, 128, 8, 2, 3)),
        (90, (128, 256, 128, 8, 4), (128, 256, 128, 8, 4, 4), (128, 256, 128, 8, 4, 4)),
        (100, (128, 256, 128, 8, 4), (128, 256, 128, 8, 4, 4), (128, 256, 128, 8, 4, 4)),
        (120, (128, 256, 128, 8, 3), (128, 128, 128, 8, 2, 3), (128, 128, 128, 8, 2, 3)),
    ],
)
def test_which_tile_fits(monkeypatch, sm, pointers, persistent, wide):
    monkeypatch.setattr(module, "device_limits", lambda device: Limits(1, SHARED_LIMIT[sm]))
    cpu = torch.device("cpu")
    found = [fitting_tile(cpu, POINTER_TILES, 2), fitting_tile(cpu, TMA_TILES, 2), fitting_tile(cpu, TMA_TILES, 4)]
    assert found == [pointers, persistent, wide]


def test_the_demo_fails_where_anything_but_fp8_multiplies(h, monkeypatch):
    kernel = Kernel("k", 90, {"wgmma": 8, "mma f8": 4})
    monkeypatch.setattr(h, "codegen", lambda *args, **kwargs: [kernel])
    with pytest.raises(CodegenError, match=r"pointers on sm_90: \{'wgmma': 8\}, but FP8 only in 4"):
        module.show_code(h)
    kernel.found["wgmma"] = 4
    module.show_code(h)


def _rows(half="float16 or bfloat16", **speedups):
    return SimpleNamespace(
        rows=[
            SimpleNamespace(variant=name.replace("_", " ").replace(" scaled mm", "_scaled_mm"), ms=1.0, speedup=value,
                            ours=name.startswith("triton"), comparator=half in name)
            for name, value in speedups.items()
        ]
    )  # fmt: skip


def test_ratios_are_over_the_faster_library(h, monkeypatch):
    table = _rows(_scaled_mm_fast=1.0, _scaled_mm=1.25, triton_pointers=0.75, triton_persistent=1.5)
    monkeypatch.setattr(h, "compare", lambda *args, **kwargs: table)
    assert module.compare(h, 16, 16, 16, False) == {"triton pointers": 0.6, "triton persistent": 1.2}
    table.rows[-1].ms = None  # nothing was timed
    assert module.compare(h, 16, 16, 16, False) == {}
    monkeypatch.setattr(h, "compare", lambda *args, **kwargs: None)  # a profiler's run
    assert module.compare(h, 16, 16, 16, True) == {}


def test_fp8_is_put_beside_the_best_bf16(h, monkeypatch):
    half = str(h.half).removeprefix("torch.")
    table = _rows(half, **{f"triton_{half}_tile": 1.0, f"triton_{half}_split": 1.25, "triton_fp8_persistent": 2.0})
    monkeypatch.setattr(h, "compare", lambda *args, **kwargs: table)
    assert module.compare_with_bf16(h, 16) == {"triton fp8 persistent": 1.6}


def test_a_library_that_refuses_is_left_out(h, monkeypatch):
    def refuses(*inputs, out_dtype, use_fast_accum):
        if not use_fast_accum:
            raise RuntimeError("not for these scales\nand more")

    said = []
    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    monkeypatch.setattr(h, "interpreted", False)
    monkeypatch.setattr(h, "say", said.append)
    inputs = operands(h, 16, 16, 16, rows=True)
    assert list(module.libraries(h, *inputs)) == ["_scaled_mm fast"]
    assert said == ["no _scaled_mm for scales of (16, 1) here: not for these scales"]


def test_demo(h):
    if not h.interpreted:
        pytest.skip("its full sizes are run by the topic")
    module.demo(h)
    assert all(each["passed"] for each in h.record.checks)
    assert {kernel["sm"] for kernel in h.record.codegen} == {89, 90, 100, 120}
    names = {row["variant"] for table in h.record.comparisons for row in table["rows"]}
    assert {"torch", "triton pointers", "triton persistent", "triton fp8 persistent"} <= names


def test_the_facts_hold_the_best_of_each_case(h, monkeypatch):
    """The bar is for what a user would choose for a shape; each variant's own mean stands beside it."""
    ratios = iter([{"a": 0.5, "b": 2.0}, {"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 0.5}, {"a": 1.0, "b": 1.0}])
    monkeypatch.setattr(h, "pick", lambda **sizes: [(16, 16, 16), (32, 16, 16)] if len(sizes["quick"]) > 1 else ())
    monkeypatch.setattr(h, "check", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "show_code", lambda h: None)
    monkeypatch.setattr(module, "compare", lambda *args, **kwargs: next(ratios))
    facts = {}
    monkeypatch.setattr(h, "fact", lambda name, value: facts.update({name: value}))
    module.demo(h)
    key = "over the faster _scaled_mm, per tensor"
    assert facts[f"geometric mean {key}"] == {"a": 1.0, "b": 1.0, "best of each case": 2.0}
    assert facts[f"least {key}"] == {"a": 0.5, "b": 0.5, "best of each case": 2.0}


def _bad(device):
    a = torch.randn(4, 32, device=device).to(E4M3)
    w = torch.randn(16, 32, device=device).to(E4M3)
    b, one = w.t(), torch.ones((), device=device)
    col, row = torch.ones(4, 1, device=device), torch.ones(1, 16, device=device)
    flat = torch.zeros(600, device=device).to(E4M3)
    bias = torch.ones(16, dtype=torch.float16, device=device)
    half = {"out_dtype": torch.float16}
    return {
        "no tensor": (([1.0], b, one, one), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "float16": ((a.half(), b, one, one), {}, TypeError, r"a is torch\.float16; .*quantize it and pass its scales"),
        "int8": ((a, w.view(torch.int8).t(), one, one), {}, TypeError, r"b is torch\.int8"),
        "AMD's variant": (
            (a, w.view(torch.float8_e4m3fnuz).t(), one, one), {}, TypeError, "b is .*e4m3fnuz; the fnuz formats",
        ),
        "a vector": ((a, b[:, 0], one, one), {}, ValueError, r"shapes \(4, 32\) and \(32,\); need \[M, K\] and"),
        "a batch": ((a[None], b[None], one, one), {}, ValueError, "need"),
        "inner sizes": ((a, w, one, one), {}, ValueError, r"shapes \(4, 32\) and \(16, 32\)"),
        "a column-major": (
            (a.t().contiguous().t(), b, one, one), {}, ValueError,
            r"a has strides \(1, 4\); FP8 tensor cores take .*a\.contiguous\(\)",
        ),
        "b row-major": (
            (a, b.contiguous(), one, one), {}, ValueError,
            r"b has strides \(16, 1\); FP8 tensor cores take .*b\.t\(\)\.contiguous\(\)\.t\(\)",
        ),
        "scale a number": ((a, b, 1.0, one), {}, TypeError, "scale_a is float; pass a float32 tensor"),
        "scale in float64": ((a, b, one, one.double()), {}, TypeError, r"scale_b is torch\.float64"),
        "scale elsewhere": ((a, b, one.to("meta"), one), {}, ValueError, "scale_a is on meta, the data on"),
        "scales of a as a vector": (
            (a, b, col[:, 0], one), {}, ValueError, r"scale_a has shape \[4\]; need \[\] or \[1\] or \[4, 1\]",
        ),
        "scales of b for a": ((a, b, row, one), {}, ValueError, r"scale_a has shape \[1, 16\]; need"),
        "scales of b transposed": (
            (a, b, one, row.t()), {}, ValueError, r"scale_b has shape \[16, 1\]; need \[\] or \[1\] or \[1, 16\]",
        ),
        "a scale too few": ((a, b, col[1:], row), {}, ValueError, r"scale_a has shape \[3, 1\]"),
        "a scale of zero": ((a, b, col, 0 * row), {}, ValueError, "scale_b has 16 of 16 values that are not positive"),
        "an infinite scale": ((a, b, one / 0, one), {}, ValueError, "scale_a has 1 of 1 values"),
        "bias of another dtype": ((a, b, one, one, bias), {}, TypeError, r"bias is torch\.float16; it must be .*bf"),
        "bias of another shape": ((a, b, one, one, bias[:8]), half, ValueError, r"bias has shape \(8,\).*need \[16\]"),
        "bias as a row": ((a, b, one, one, bias[None]), half, ValueError, r"bias has shape \(1, 16\)"),
        "bias with gaps": (
            (a, b, one, one, bias.repeat(2)[::2]), half, ValueError, r"bias .* strides \(2,\); need .*contiguous",
        ),
        "bias elsewhere": ((a, b, one, one, bias.to("meta")), half, ValueError, "move them to one device"),
        "out in FP8": ((a, b, one, one), {"out_dtype": E4M3}, TypeError, r"out_dtype torch\.float8_e4m3fn is not one"),
        "out in float64": ((a, b, one, one), {"out_dtype": torch.float64}, TypeError, r"torch\.float64 is not one of"),
        "no variant": ((a, b, one, one), {"variant": "faster"}, ValueError, r"'faster' is not one of \('pointers', "),
        "None for a variant": ((a, b, one, one), {"variant": None}, ValueError, "variant None is not one of"),
        "K of 24": (
            (a[:, :24], b[:24], one, one), {}, ValueError, "K is 24 and N 16; TMA .*multiple of 16 and N to one of 8",
        ),
        "N of 4": ((a, b[:, :4], one, one), {}, ValueError, "K is 32 and N 4; .*or use variant='pointers'"),
        "N of 2 in float32": (
            (a, b[:, :2], one, one), {"out_dtype": torch.float32}, ValueError, "N 2; .*of 16 and N to one of 4",
        ),
        "unaligned start": (
            (flat[1:129].view(4, 32), b, one, one), {}, ValueError, "a has .* starts 1 bytes past a multiple of 16",
        ),
        "unaligned columns": (
            (a, flat[:576].view(16, 36)[:, :32].t(), one, one), {}, ValueError, r"b\.t\(\) has .* strides \(36, 1\)",
        ),
        "one row for all": ((a[:1].expand(4, 32), b, one, one), {}, ValueError, r"a has .* strides \(0, 1\)"),
        "requires grad": ((a.clone().requires_grad_(), b, one, one), {}, RuntimeError, "no backward"),
        "a scale that requires grad": ((a, b, one.clone().requires_grad_(), one), {}, RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta"), one, one), {}, ValueError, "move them to one device"),
        "a device without kernels": (
            (a.to("meta"), b.to("meta"), one, one), {}, RuntimeError, "on meta",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, kwargs, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"fp8_matmul: .*{message}"):
        fp8_matmul(*args, **kwargs)
