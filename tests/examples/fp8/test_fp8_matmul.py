"""fp8_matmul: every variant at every edge, formats, scales, bias, layouts, extremes, bad input, the code.

The partitions of the warp-specialized kernel are also run as Python, in random turns: no GPU is needed for that.
"""

import functools
import itertools
import math
import random
import re
from types import SimpleNamespace

from harness.bench import Row, Table
from harness.codegen import compile_for, dump

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.common import gluon as common
from examples.common import operands as checks
from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3, E5M2, OUT_DTYPES, quantize_reference
from examples.fp8 import fp8_matmul as lesson
from examples.fp8 import fp8_matmul_pointers as pointers
from examples.fp8 import fp8_matmul_warp_specialized as hopper
from examples.fp8.fp8_matmul import TMA_TILES, VARIANTS, budget, fp8_matmul, operands, reference, runnable
from examples.fp8.fp8_matmul_pointers import GROUP_M, POINTER_TILES, fitting_tile
from studies.fp8.fp8_matmul import CODE

FORMATS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def check(h, inputs, variant=None, out=torch.bfloat16, what=None, **more):
    fn = functools.partial(fp8_matmul, out_dtype=out, variant=variant)
    M, K = inputs[0].shape
    what = what or f"{variant} {M}x{inputs[1].shape[1]}x{K} {out}"
    h.check(fn, reference, *inputs, what=what, dtype=out, **budget(h, K) | more)


def runs(h, variant):
    if variant not in runnable(h.device):
        pytest.skip(f"{variant} needs another GPU")


@pytest.fixture
def gpu_of(monkeypatch):
    """Let the wrapper believe in another GPU: so many SMs, so much shared memory (the interpreter has no limit)."""

    def pretend(sms, shared_bytes=SHARED_LIMIT[90]):
        for module in (lesson, pointers, hopper):
            monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, shared_bytes))

    return pretend


# One row, one column, one tile and one more in each dimension, half a tile of columns and 8 more, nothing to add up.
SHAPES = [(1, 16, 16), (37, 8, 112), (128, 256, 128), (129, 264, 144), (5, 136, 16), (5, 16, 0), (0, 8, 16), (5, 0, 16)]
RAGGED = [(1, 1, 1), (37, 53, 101), (129, 257, 129), (3, 5, 0)]  # primes, one more than a tile: only by pointers


@pytest.mark.parametrize("shape", SHAPES + RAGGED, ids=str)
def test_shapes(h, shape):
    """By every kernel that takes the shape, and by the one that is chosen."""
    M, N, K = shape
    ragged = shape in RAGGED
    for i, variant in enumerate((None, "pointers") if ragged else (None, *runnable(h.device))):
        rows = (i + M) % 2 == 1
        if min(shape) > 0:
            inputs = operands(h, M, N, K, rows)
        else:  # no amax of nothing
            scales = (h.randn(M, 1).exp_(), h.randn(1, N).exp_()) if rows else (h.randn(1).exp_(), h.randn(1).exp_())
            inputs = (h.randn(M, K, dtype=E4M3), h.randn(N, K, dtype=E4M3).t(), *scales)
        check(h, inputs, variant)


@every_variant
def test_every_format_to_every_dtype(h, variant):
    runs(h, variant)
    outs = (torch.float16, torch.bfloat16, torch.float32, torch.float16)
    for i, (formats, out) in enumerate(zip(FORMATS, outs, strict=True)):
        inputs = operands(h, 133, 264, 144, i < 2, formats)
        if not (h.interpreted and out is torch.bfloat16):  # the interpreter takes no bfloat16
            inputs = (*inputs, h.randn(264, dtype=out))
        check(h, inputs, variant, out, what=f"{variant} {formats} {out}")


@every_variant
def test_bias_is_added_in_float32_after_scaling(h, variant):
    """All products 0: the bias comes back bit for bit, also where K is 0."""
    runs(h, variant)
    bias, one = h.randn(264), torch.ones((), device=h.device)
    for K in (0, 16):
        a, b = torch.zeros(3, K, device=h.device).to(E4M3), torch.zeros(264, K, device=h.device).to(E5M2).t()
        assert torch.equal(fp8_matmul(a, b, one, one, bias, torch.float32, variant), bias.expand(3, -1))


@every_variant
def test_scales_of_every_shape(h, variant):
    """None, one or many for each side, contiguous or not: a stride nobody expects, a column of a wider matrix."""
    runs(h, variant)
    M, N, K = 130, 264, 32
    a, b, scale_a, scale_b = operands(h, M, N, K, rows=True)
    every_a = [scale_a[:1, 0], scale_a[0, 0], scale_a, h.randn(M, 3).exp_()[:, 1:2], h.randn(M + 1, 1).exp_()[1:]]
    every_b = [scale_b[0, :1], scale_b[0, 0], scale_b, h.randn(2, N).exp_()[:1], h.randn(N, 2).exp_().t()[1:]]
    for i, one in enumerate(every_a):
        for j in (i, (i + 2) % 5):
            check(h, (a, b, one, every_b[j]), variant, what=f"{variant} scales {i}, {j}")
    check(h, (a[:1], b, scale_a[:1], scale_b), variant, what=f"{variant}, a row of one")
    bias = h.randn(N + 1, dtype=torch.float32)[1:]  # starts where no TMA could
    check(h, (a, b, scale_a, scale_b, bias), variant, torch.float32, what=f"{variant}, bias from 4 bytes on")


def test_what_tma_cannot_read_as_a_vector_is_copied():
    x = torch.rand(3, 260)
    for vector, kept in [(x[:1], True), (x[1:2, 4:], True), (x[:1, 1:], False), (x[:, 4:5], False), (x[0, 0], False)]:
        n = 3 if vector.shape == (3, 1) else 260 if vector.ndim == 0 else vector.shape[1]
        desc = hopper.tma_vector(vector, n, 64)
        assert desc.base.data_ptr() % 16 == 0
        assert (desc.base.data_ptr() == vector.data_ptr()) == kept
        assert torch.equal(desc.base, vector.reshape(1, -1).expand(1, n))
        assert (desc.shape, desc.strides[1], desc.block_shape) == ([1, n], 1, [1, 64])


@every_variant
def test_every_tile_is_taken_once(h, variant, gpu_of):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles; then more rows of
    tiles than a group has, a last group that is not full, two columns of tiles."""
    runs(h, variant)
    for sms in (1, 3, 1000):
        gpu_of(sms)
        check(h, operands(h, 300, 520, 16, rows=True), variant)
    check(h, operands(h, (GROUP_M + 1) * TMA_TILES[0][0] + 1, 264, 16, rows=True), variant)


@every_variant
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


@every_variant
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


@every_variant
def test_quantized_zeros_stay_zeros(h, variant):
    """Their scale is the least there is, and the product of two underflows: 0 all the same."""
    runs(h, variant)
    q, scale = quantize_reference(torch.zeros(16, 32, device=h.device), (16, 32))
    for scales in ((scale.reshape(()), scale.reshape(1)), (scale.expand(16, 1), scale.expand(1, 16))):
        assert not fp8_matmul(q, q.t(), *scales, variant=variant).any()


def test_less_shared_memory(h, gpu_of):
    if not h.interpreted:
        pytest.skip("shared memory is real here")
    inputs = operands(h, 200, 264, 144, rows=True)
    for variant in runnable(h.device):
        gpu_of(4, SHARED_LIMIT[120])
        check(h, inputs, variant, torch.float32)
        gpu_of(4, 16 * 1024)
        with pytest.raises(RuntimeError, match="fp8_matmul: no tile fits the 16384 bytes of shared memory of"):
            fp8_matmul(*inputs, variant=variant)


def test_which_kernel_is_chosen(monkeypatch):
    """The last that the GPU has; pointers for what TMA cannot load or store."""
    for sm, last in [(89, "pointers"), (90, "warp specialized"), (100, "persistent"), (120, "persistent")]:
        monkeypatch.setattr(lesson, "architecture", lambda device, sm=sm: sm)
        monkeypatch.setattr(lesson, "gluon_architecture", lambda device, sm=sm: sm)
        a, b = meta(40, 64), meta(48, 64).t()
        assert lesson.choose(a, b, torch.bfloat16) == last
        for left, right in [(a[:, :40], b[:40]), (a, b[:, :44]), (a[:, 1:33], b[:32]), (a[:1].expand(40, 64), b)]:
            assert lesson.choose(left, right, torch.bfloat16) == "pointers"
        assert lesson.choose(a, b[:, :44], torch.float32) == last
    monkeypatch.setattr(lesson, "gluon_architecture", lambda device: None)  # the interpreter's
    monkeypatch.setattr(lesson, "architecture", lambda device: 90)
    assert lesson.choose(a, b, torch.bfloat16) == "persistent"


@pytest.mark.parametrize(
    ("sm", "variant", "message"),
    [(80, None, "this GPU is sm_80; FP8 tensor cores come with sm_89"),
     (89, "persistent", r"TMA comes with sm_90 \(this is sm_89\): use variant='pointers'"),
     (89, "warp specialized", r"TMA comes with sm_90 \(this is sm_89\)"),
     (100, "warp specialized", r"needs sm_90, for its wgmma \(this is sm_100\): use variant='persistent'"),
     (None, "warp specialized", r"needs sm_90, .*Gluon kernels are not interpreted\): use variant='persistent'")],
)  # fmt: skip
def test_other_gpus(h, monkeypatch, sm, variant, message):
    monkeypatch.setattr(checks, "architecture", lambda device: sm or 90)
    monkeypatch.setattr(common, "gluon_architecture", lambda device: sm)
    with pytest.raises(RuntimeError, match=f"fp8_matmul: {message}"):
        fp8_matmul(*operands(h, 16, 16, 16, False), variant=variant)


@pytest.mark.parametrize("which", [2, 3])
def test_bad_scales(h, which):
    inputs = [*operands(h, 20, 16, 16, rows=True)]
    inputs[which] = inputs[which].clone()
    inputs[which].view(-1)[5] = float("nan")
    with pytest.raises(ValueError, match=f"fp8_matmul: scale_{'ab'[which - 2]} has 1 of .* not positive and finite"):
        fp8_matmul(*inputs)
    fp8_matmul(*inputs, check_scales=False)  # not looked at, so not refused


def _bad(device):
    a, w = torch.randn(4, 32, device=device).to(E4M3), torch.randn(16, 32, device=device).to(E4M3)
    b, one, row = w.t(), torch.ones((), device=device), torch.ones(1, 16, device=device)
    flat, bias = torch.zeros(600, device=device).to(E4M3), torch.ones(16, dtype=torch.float16, device=device)
    half, tma, wide = {"out_dtype": torch.float16}, {"variant": "persistent"}, {"out_dtype": torch.float32}
    shared, apart = flat[1:129].view(4, 32), flat[:576].view(16, 36)[:, :32].t()
    return {
        "no tensor": (([1.0], b, one, one), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "float16": ((a.half(), b, one, one), {}, TypeError, r"a is torch\.float16; .*quantize it and pass its scales"),
        "a vector": ((a, b[:, 0], one, one), {}, ValueError, r"shapes \(4, 32\) and \(32,\); need \[M, K\] and"),
        "inner sizes": ((a, w, one, one), {}, ValueError, r"shapes \(4, 32\) and \(16, 32\)"),
        "a by columns": ((a.t().contiguous().t(), b, one, one), {}, ValueError, r"a has strides \(1, 4\); .*contig"),
        "b by rows": ((a, b.contiguous(), one, one), {}, ValueError, r"b has strides \(16, 1\); .*contiguous\(\)\.t"),
        "scale in float64": ((a, b, one, one.double()), {}, TypeError, r"scale_b is torch\.float64"),
        "scales of b for a": ((a, b, row, one), {}, ValueError, r"scale_a has shape \[1, 16\]; .* or \[4, 1\]"),
        "scales transposed": ((a, b, one, row.t()), {}, ValueError, r"scale_b has shape \[16, 1\]; .* or \[1, 16\]"),
        "bias of a dtype": ((a, b, one, one, bias), {}, TypeError, r"bias is torch\.float16; it must be .*bf"),
        "bias too short": ((a, b, one, one, bias[:8]), half, ValueError, r"bias has shape \(8,\).*need \[16\]"),
        "bias with gaps": ((a, b, one, one, bias.repeat(2)[::2]), half, ValueError, r"bias .* strides \(2,\); need"),
        "bias elsewhere": ((a, b, one, one, bias.to("meta")), half, ValueError, "move them to one device"),
        "out in FP8": ((a, b, one, one), {"out_dtype": E4M3}, TypeError, r"out_dtype torch\.float8_e4m3fn is not one"),
        "no variant": ((a, b, one, one), {"variant": "faster"}, ValueError, "variant 'faster' is not one of"),
        "K of 24": ((a[:, :24], b[:24], one, one), tma, ValueError, "K is 24 and N 16; TMA .*multiple of 16 and N"),
        "N of 4": ((a, b[:, :4], one, one), tma, ValueError, "K is 32 and N 4; .* one of 8, or use variant='pointers'"),
        "N of 2": ((a, b[:, :2], one, one), tma | wide, ValueError, "N 2; .*N to one of 4"),
        "start": ((shared, b, one, one), tma, ValueError, "a has .* starts 1 bytes past a multiple"),
        "columns": ((a, apart, one, one), tma, ValueError, r"b\.t\(\) has .* strides \(36, 1\)"),
        "requires grad": ((a.clone().requires_grad_(), b, one, one), {}, RuntimeError, "no backward"),
        "a scale with grad": ((a, b, one.clone().requires_grad_(), one), {}, RuntimeError, "no backward"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, kwargs, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"fp8_matmul: .*{message}"):
        fp8_matmul(*args, **kwargs)


# --- code


def meta(*shape, dtype=E4M3):
    return torch.empty(shape, dtype=dtype, device="meta")


def layer(rows, n=4096, formats=(E4M3, E4M3)):
    f32 = torch.float32
    scales = (meta(n, 1, dtype=f32), meta(1, n, dtype=f32)) if rows else (meta(dtype=f32), meta(1, dtype=f32))
    return meta(n, n, dtype=formats[0]), meta(n, n, dtype=formats[1]).t(), *scales


TENSOR_CORES = {89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


def shared_for(sm, tiles, itemsize=2):
    """What fitting_tile reckons with, and that with one step of K more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pointers, "device_limits", lambda device: Limits(1, SHARED_LIMIT[sm]))
        m, n, k, _, *parts, stages = fitting_tile(torch.device("cpu"), tiles, itemsize)
    in_use = stages - (TENSOR_CORES[sm] == "mma.sync")
    rest = (itemsize * m * n // parts[0] if parts else 0) + 2048
    return in_use * (m + n) * k + rest, (in_use + 1) * (m + n) * k + rest


@pytest.mark.parametrize(("variant", "sm"), [(v, sm) for v, find in CODE.items() for sm in find if v != VARIANTS[2]])
def test_generated_code(variant, sm):
    for rows in (False, True) if sm == 90 else (True,):
        (kernel,) = compile_for(fp8_matmul, (*layer(rows), None, torch.bfloat16, variant), sms=(sm,))
        assert kernel.error is None
        assert all(kernel.found.get(name) for name in CODE[variant][sm]), kernel.found
        assert kernel.found["mma f8"] == kernel.found[TENSOR_CORES[sm]], "a tensor-core instruction that is not FP8's"
        assert (kernel.spills, kernel.fits) == (0, True)
        # What the wrapper reckons with is enough and used, and not one step of K more would fit.
        reckoned, one_more = shared_for(sm, POINTER_TILES if variant == "pointers" else TMA_TILES)
        assert kernel.shared <= reckoned <= kernel.shared_limit == SHARED_LIMIT[sm] < one_more
        assert reckoned - kernel.shared <= 2048


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_scales_and_bias_fit_hoppers_registers(out):
    args = (*layer(True), meta(4096, dtype=out), out, "persistent")
    (kernel,) = compile_for(fp8_matmul, args, sms=(90,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)


@pytest.mark.parametrize("variant", VARIANTS[1:])
@pytest.mark.parametrize("formats", FORMATS[1:3])
def test_mixed_formats_are_multiplied_as_they_are(formats, variant):
    """On Hopper each operand has a format of its own in the instruction: neither is converted."""
    args = (*layer(True, formats=formats), meta(4096, dtype=torch.float16), torch.float16, variant)
    name = {E4M3: "e4m3", E5M2: "e5m2"}
    instructions = [line for line in dump(fp8_matmul, args, sm=90)["ptx"].splitlines() if "wgmma.mma_async" in line]
    assert instructions
    assert all(f".f32.{name[formats[0]]}.{name[formats[1]]}" in line for line in instructions), instructions[0]


@pytest.mark.parametrize("sm", [89, 90, 120])
def test_which_tile_fits(gpu_of, sm):
    gpu_of(1, SHARED_LIMIT[sm])
    cpu = torch.device("cpu")
    found = [fitting_tile(cpu, POINTER_TILES, 2), fitting_tile(cpu, TMA_TILES, 2), fitting_tile(cpu, TMA_TILES, 4)]
    if sm == 90:
        assert found == [(128, 256, 128, 8, 4), *[(128, 256, 128, 8, 4, 4)] * 2]
    else:
        assert found == [(128, 256, 128, 8, 3), *[(128, 128, 128, 8, 2, 3)] * 2]


@pytest.mark.parametrize("sm", [100, 120])
def test_warp_specialized_is_not_compiled_for_others(sm):
    """The compiler would end this process instead of saying no."""
    (kernel,) = compile_for(fp8_matmul, (*layer(True), None, torch.bfloat16, "warp specialized"), sms=(sm,))
    assert kernel.error.startswith("RuntimeError: fp8_matmul: ")


@pytest.mark.parametrize(("rows", "out"), [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float32)])
def test_the_partitions_code(rows, out):
    """With scales and bias there is room, and the MMAs of a step are issued together."""
    args = (*layer(rows), meta(4096, dtype=out), out)  # it is what is chosen
    (kernel,) = compile_for(fp8_matmul, args, sms=(90,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    assert all(kernel.found.get(name) for name in CODE["warp specialized"][90]), kernel.found
    text = dump(fp8_matmul, args, sm=90)
    assert not re.search("serialized|C75", text["log"])  # ptxas could wait for each before the next is started
    # The first step, which nothing was added to before, and one loop; the second consumer has another after its pause.
    assert text["ttgir"].count("ttng.warp_group_dot ") == 5
    assert "requestedRegisters = array<i32: 240, 24>" in text["ttgir"]
    # One commit for each of them: four MMAs of K = 32 before it.
    assert text["ptx"].count("wgmma.commit_group") == 5
    assert kernel.found["wgmma"] == kernel.found["mma f8"] == 4 * 5
    # Each waits with one in flight; all are waited for where a tile ends, and by the second before its pause.
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d);", text["ptx"])
    assert sorted(waits) == ["0"] * 3 + ["1"] * 5
    # By TMA: three boxes of operands, scales in three, the bias in one; nothing but two scales is loaded otherwise.
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", text["ptx"])) == (7 if rows else 4)
    assert text["ptx"].count("ld.global") == (0 if rows else 2 * 2)


# --- the protocol of the partitions


class Piece:
    """A barrier or a buffer, or several of them."""

    def __init__(self, arrivals=0, several=0, shape=()):
        self.arrivals, self.shape = arrivals, (several, *shape)
        self.phase, self.arrived, self.bytes, self.content = 0, set(), 0, None
        self.parts = [Piece(arrivals) for _ in range(several)]

    def index(self, i):
        assert 0 <= i < len(self.parts)  # not from the end
        return self.parts[i]

    def permute(self, order):
        return self

    reshape = permute

    def settle(self):
        """A phase completes with all arrivals, and all bytes that were announced."""
        if len(self.arrived) == self.arrivals and self.bytes == 0:
            self.arrived, self.phase = set(), self.phase + 1


def play(traces, seed):
    """The partitions' actions in random turns. TMA's copies are done whenever chance likes; an MMA has read its
    operands only when it was waited for. What was stored: rows, columns, and the operands of each MMA."""
    chance = random.Random(seed)
    at, stores, jobs, seen, products, log = [0] * len(traces), [0] * len(traces), [], {}, {}, []
    speed = [chance.choice([1, 1, 30]) for _ in (*traces, "copies")]

    def arrive(me, barrier):
        assert me not in barrier.arrived, "arrived twice in a phase"
        barrier.arrived.add(me)
        barrier.settle()

    def land(buffer, content, barrier, size):
        buffer.content = content
        barrier.bytes -= size
        barrier.settle()

    def send(me, c_buf, content):
        assert c_buf.content == content, "overwritten while it was stored"
        stores[me] -= 1

    def ready(me):
        if at[me] == len(traces[me]):
            return False
        kind, *what = traces[me][at[me]]
        return what[0].phase % 2 != what[1] if kind == "wait" else kind != "store wait" or not stores[me]

    while able := [me for me in range(len(traces)) if ready(me)] + [len(traces)] * bool(jobs):
        (me,) = chance.choices(able, [speed[each] for each in able])
        if me == len(traces):
            jobs.pop(chance.randrange(len(jobs)))()
            continue
        kind, *what = traces[me][at[me]]
        at[me] += 1
        if kind == "arrive":
            arrive(me, *what)
        elif kind == "expect":
            what[0].bytes += what[1]
            arrive(me, what[0])
        elif kind == "load":
            jobs.append(functools.partial(land, *what))
        elif kind == "MMA":
            products[me, what[2]] = tuple(each.content for each in what[:2])
        elif kind == "MMA done":
            assert products[me, what[2]] == tuple(each.content for each in what[:2]), "overwritten while multiplied"
        elif kind == "read":
            seen[me] = what[0].content
        elif kind in ("write", "send"):
            c_buf, row, col, acc, *lasts = what
            assert [seen[me], *(x.content for x in lasts)] == [
                ("scale_a", 0, row),
                ("scale_b", 0, col),
                ("bias", 0, col),
            ]
            if kind == "write":
                assert not any(stores), "the buffer of results is still being read"
                c_buf.content = (row, acc)
            else:
                jobs.append(functools.partial(send, me, c_buf, (row, acc)))
                stores[me] += 1
                log.append((row, col, [products[me, i] for i in acc]))
        assert at[me] < len(traces[me]) or not stores[me], "ended before TMA had read what was stored"
    assert at == [len(actions) for actions in traces], f"all wait: {log}"
    return log


def order(M, N, block_m, block_n, group):
    """Where tiles start: down each column of a group of rows, then the next column; then the next group."""
    rows, cols = range(0, M, block_m), range(0, N, block_n)
    return [(row, col) for first in range(0, len(rows), group) for col in cols for row in rows[first : first + group]]


def run_partitions(steps, tiles, stages, behind, seed):
    """Every tile by one program, with scales and bias; two columns of tiles, and rows of tiles as needed."""
    half_m, block_n, block_k = 64, 256, 128
    M, N, K = (tiles + 1) // 2 * 2 * half_m, 2 * block_n if tiles > 1 else block_n, steps * block_k - 64 * (seed % 2)
    actions, flight, ids = [], [], itertools.count()

    def note(kind):
        return lambda *what, pred=True: actions.append((kind, *what)) if pred else None

    def load(desc, at, barrier, buffer):
        size = math.prod(desc.block_shape) * desc.dtype.primitive_bitwidth // 8
        actions.append(("load", buffer, (desc.name, *at), barrier, size))

    def multiply(a, b, acc, use_acc=True, is_async=False):
        flight.append((a, b, next(ids)))
        actions.append(("MMA", *flight[-1]))
        return (*(acc if use_acc else ()), flight[-1][2])

    def mmas_done(pending, deps):
        while len(flight) > pending:
            actions.append(("MMA done", *flight.pop(0)))
        return deps[0]

    def store_parts(c_desc, c_buf, free, phase, acc, row, col, scale_a, scale_b, bias, rows, with_bias, half, *more):
        assert not flight, "stored before all MMAs were done"
        if half == 1:
            actions.append(("wait", free, phase))
        actions.extend((kind, c_buf, row, col, acc, scale_b, bias) for kind in ("write", "send"))

    def desc(name, bits, *shape):
        return SimpleNamespace(name=name, dtype=SimpleNamespace(primitive_bitwidth=bits), block_shape=shape)

    gl = SimpleNamespace(
        program_id=lambda axis: 0, num_programs=lambda axis: 1, cdiv=lambda x, y: -(-x // y), maximum=max,
        where=lambda which, x, y: x if which else y, static_range=range, zeros=lambda *_: (), float32=None,
        NVMMADistributedLayout=lambda **_: None, SliceLayout=lambda *_: None,
    )  # fmt: skip
    fakes = {
        "tma": SimpleNamespace(store_wait=lambda pending: actions.append(("store wait",))), "async_load": load,
        "warpgroup_mma": multiply, "warpgroup_mma_wait": mmas_done, "_store_parts": store_parts,
        "tile_coords": lambda tile, *sizes: order(*sizes)[tile],
    }  # fmt: skip
    fakes |= {n: getattr(hopper, n).fn for n in ("next_slot", "release_previous", "_add_steps", "_consume", "_produce")}
    a_bufs, b_bufs = Piece(0, 2 * stages, (half_m, block_k)), Piece(0, stages, (block_n, block_k))
    ring = (a_bufs, b_bufs, Piece(1, stages), Piece(2, stages))
    last, c_buf = (Piece(0, 2), Piece(), Piece(), Piece(1), Piece(2)), Piece(0, half_m, (block_n,))
    operands = desc("a", 8, half_m, block_k), desc("b", 8, block_n, block_k)
    extra = desc("scale_a", 32, 1, half_m), desc("scale_b", 32, 1, block_n), desc("bias", 16, 1, block_n)
    shared = (ring, last, None, c_buf, *extra[:2], Piece(1, 2), Piece(1), M, N, K, True, True, stages, behind, GROUP_M)
    traces = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "previous_slot", common.previous_slot.fn)
        patch.setattr(Piece, "load", lambda self, layout: actions.append(("read", self)), raising=False)
        for module in (common, hopper):
            patch.setattr(module, "gl", gl)
            names = SimpleNamespace(wait=note("wait"), arrive=note("arrive"), expect=note("expect"))
            patch.setattr(module, "mbarrier", names)
        for name, fake in fakes.items():
            patch.setattr(hopper, name, fake)
        for fn, args in [
            (hopper._produce, (ring, last, *operands, *extra, M, N, K, True, stages, GROUP_M)),
            (hopper._consume, (*shared, 0)),
            (hopper._consume, (*shared, 1)),
        ]:
            actions.clear()
            fn(*args)
            assert not flight, "ended with MMAs in flight"
            traces.append(list(actions))
    assert play(traces, seed) == [
        (r, col, [(("a", r, k), ("b", col, k)) for k in range(0, K, block_k)])
        for row, col in order(M, N, 2 * half_m, block_n, GROUP_M)
        for r in (row, row + half_m)
    ]


@given(st.integers(1, 9), st.integers(1, 10), st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_the_partitions_neither_wait_for_ever_nor_overwrite(steps, tiles, seed):
    """The kernel's own partitions in random turns; tiles of one step, too, and of fewer than the pause."""
    run_partitions(steps, tiles, hopper.HOPPER_STAGES, hopper.HOPPER_BEHIND, seed)


@pytest.mark.parametrize("behind", [1, 2, 4])
def test_the_partitions_with_other_pauses(behind):
    for steps, seed in itertools.product((1, 2, 3, 4, 5, 8), range(2)):
        run_partitions(steps, 6, 4, behind, seed)


def test_a_pause_longer_than_the_ring_never_ends():
    """And it is found: the first needs a slot that the second has not released."""
    with pytest.raises(AssertionError, match="all wait"):
        run_partitions(9, 2, 4, 5, 0)


# --- the answer


def test_the_answer():
    def answer(**ms):
        ms = {lesson.HALF: 2.0, "_scaled_mm": 1.0, "triton": 1.0, "pointers": 1.0} | ms
        rows = [Row(name, False, None, 0, t, speedup=1 / t) for name, t in ms.items()]
        return lesson.answer([Table("t", "n", "_scaled_mm", rows)])

    assert answer().startswith("FP8 runs at 2.00x cuBLAS bfloat16 and keeps up with _scaled_mm (1.00x). ")
    assert answer().endswith("takes TMA, from sm_90 on.")
    assert "stays behind _scaled_mm (0.80x)" in answer(triton=1.25)
    assert "pays: persistent is 2.00x pointers" in answer(persistent=0.5)
    assert "does not pay: persistent is 0.50x pointers" in answer(persistent=2.0)


# --- what only a GPU can say


@pytest.mark.gpu
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 5208, 784), (16, 8192, 4096), (8191, 264, 512)])
def test_shapes_on_the_gpu(h, formats, shape):
    for variant in runnable(h.device):
        for out, rows in zip(OUT_DTYPES, (True, False, True), strict=True):
            check(h, (*operands(h, *shape, rows, formats), h.randn(shape[1], dtype=out)), variant, out)


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 2, 7, 132])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7, 8, 9])
def test_barriers_across_tiles(h, gpu_of, sms, steps):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them."""
    gpu_of(sms)
    for variant, rows, biased in itertools.product(runnable(h.device), (False, True), (False, True)):
        inputs = operands(h, 700, 1288, 128 * steps - 64 * (steps % 2), rows)
        bias = h.randn(1288, dtype=torch.bfloat16) if biased else None
        check(h, (*inputs, bias), variant, what=f"{variant} {steps} steps {sms} SMs {rows} {biased}")


@pytest.mark.gpu
@pytest.mark.parametrize("out", OUT_DTYPES)
def test_every_launch_gives_the_same_bits(h, out):
    """A buffer that is read too early or written too early does not do so the same way every time."""
    shapes = [(4096, 4096, 256), (1000, 8200, 1040), (16384, 512, 128), (300, 264, 8192)]
    for shape, rows, variant in itertools.product(shapes, (False, True), runnable(h.device)):
        inputs = (*operands(h, *shape, rows), h.randn(shape[1], dtype=out))
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
        library = torch._scaled_mm(*inputs, out_dtype=torch.bfloat16, use_fast_accum=True)
        for variant in runnable(h.device):
            ours, its = (x.double().sub_(want).square().mean() for x in (fp8_matmul(*inputs, variant=variant), library))
            floor = torch.finfo(torch.bfloat16).eps ** 2 * want.square().mean()
            assert ours < 4 * torch.maximum(its, floor), (variant, K)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(40)
    long, K = 2**31 // 64 + 64, 64
    a = torch.empty(long, K, dtype=torch.bfloat16, device=h.device).normal_().to(E4M3)
    w, one = h.randn(64, K, dtype=E4M3), torch.ones((), device=h.device)
    many = torch.rand(long, 1, device=h.device) + 0.5
    for variant, tall in itertools.product(runnable(h.device), (True, False)):
        c = fp8_matmul(*((a, w.t(), many, one) if tall else (w, a.t(), one, many.t())), variant=variant)
        for part in (slice(0, 300), slice(-300, None)):
            inputs = (a[part], w.t(), many[part], one) if tall else (w, a[part].t(), one, many[part].t())
            got = c[part] if tall else c[:, part].contiguous()
            h.check(lambda *_, got=got: got, reference, *inputs, what=variant, dtype=c.dtype, **budget(h, K))
        del c, got
