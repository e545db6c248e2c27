"""fp8_matmul: every variant at every edge, formats, scales, bias, layouts, NaN, bad input, the code."""

import functools
import itertools
import re

from harness.codegen import dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common import gluon as common
from examples.common import operands as checks
from examples.common.fp8 import E4M3, E5M2, OUT_DTYPES
from examples.fp8 import fp8_matmul as lesson
from examples.fp8 import fp8_matmul_persistent as persistent
from examples.fp8 import fp8_matmul_warp_specialized as hopper
from examples.fp8.fp8_matmul import VARIANTS, fp8_matmul, operands, runnable
from studies.fp8.fp8_matmul import CODE
from tests.examples.fp8.helpers import FORMATS, NAN, check_gemm, code, meta, not_finite, refused
from tests.examples.tma.helpers import pretend
from tests.examples.tma.model import often, use_model
from tests.examples.triton.helpers import harness

check = functools.partial(check_gemm, fp8_matmul, lesson)


@pytest.fixture(params=VARIANTS)
def variant(request, h):
    if request.param not in runnable(h.device):
        pytest.skip(f"{request.param} needs another GPU")
    return request.param


# One row, one column, one tile and one more in each dimension, half a tile of columns and 8 more, nothing to add up.
SHAPES = [(1, 16, 16), (37, 8, 112), (129, 264, 144), (5, 136, 16), (5, 16, 0), (0, 8, 16), (5, 0, 16)]
RAGGED = [(1, 1, 1), (37, 53, 101), (129, 257, 129), (3, 5, 0)]  # primes, one more than a tile: only by pointers


@pytest.mark.parametrize(("case", "shape"), list(enumerate(SHAPES + RAGGED)), ids=str)
def test_shapes_formats_and_dtypes(h, case, shape):
    """By every kernel that takes the shape, and by the one that is chosen; with and without bias."""
    M, N, K = shape
    for i, variant in enumerate((None, "pointers") if shape in RAGGED else (None, *runnable(h.device)), case):
        rows, out = i % 2 == 1, OUT_DTYPES[i % 3]
        if min(shape) > 0:
            inputs = operands(h, M, N, K, rows, FORMATS[i % 4])
        else:  # no amax of nothing
            scales = (h.randn(M, 1).exp_(), h.randn(1, N).exp_()) if rows else (h.randn(1).exp_(), h.randn(1).exp_())
            inputs = (h.randn(M, K, dtype=E4M3), h.randn(N, K, dtype=E4M3).t(), *scales)
        if not (h.interpreted and out is torch.bfloat16):  # the interpreter takes no bfloat16
            inputs = (*inputs, h.randn(N, dtype=out))
        check(h, inputs, variant, out)


def test_scales_of_every_shape(h, variant):
    """None, one or many for each side, contiguous or not: a stride nobody expects, a column of a wider matrix."""
    M, N, K = 130, 264, 32
    a, b, scale_a, scale_b = operands(h, M, N, K, rows=True)
    every_a = [scale_a[:1, 0], scale_a[0, 0], scale_a, h.randn(M, 3).exp_()[:, 1:2], h.randn(M + 1, 1).exp_()[1:]]
    every_b = [scale_b[0, :1], scale_b[0, 0], scale_b, h.randn(2, N).exp_()[:1], h.randn(N, 2).exp_().t()[1:]]
    for i, one in enumerate(every_a):
        check(h, (a, b, one, every_b[(i + 2) % 5]), variant, what=f"{variant} scales {i}")
    bias = h.randn(N + 1, dtype=torch.float32)[1:]  # starts where no TMA could: it is copied
    check(h, (a, b, scale_a, scale_b, bias), variant, torch.float32, what=f"{variant}, bias from 4 bytes on")


def test_every_tile_is_taken_once(h, variant, monkeypatch):
    """By one program, by programs with more and fewer tiles, by more SMs than tiles; a group that is not full."""
    for module in (lesson, persistent, hopper):
        monkeypatch.setattr(module, "GROUP_M", 2)
    for sms in (1, 3, 1000):
        pretend(monkeypatch, (persistent, hopper), sms)
        check(h, operands(h, 300, 520, 16, rows=True), variant)


def test_layouts_and_extremes(h, variant):
    """NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile."""
    one = torch.ones((), device=h.device)
    a, w = h.randn(140, 320, dtype=E4M3), h.randn(300, 480, dtype=E4M3)
    pairs = [
        (a, w[:104, :320].t()),  # columns apart: what lies between them must not be summed
        (a[::3, :144], w[16::2, 32:176].t()[:, :136]),  # every third row, every second column
        (a[:1, :144].as_strided((1, 144), (5, 1)), w[:40, :144].t()),  # one row, with a stride nobody steps by
        (a[:, :1], w[:8, :1].t()) if variant == "pointers" else (a[:, :16], w[:8, :16].t()),  # K of one
    ]
    if variant == "pointers":  # what TMA refuses
        pairs += [(a[:, 1:38], w[:264, 3:40].t()), (a[:1].expand(7, 320), w[:9, :320].t())]
    for left, right in pairs:
        check(h, (left, right, one, one), variant, what=f"{variant} strides {left.stride()}, {right.stride()}")
    scales = h.randn(130, 1).exp_(), h.randn(1, 264).exp_()
    for what, a, b in not_finite(h, 130, 264, 144):
        check(h, (a, b, *scales), variant, what=what)


def test_which_kernel_is_chosen(h, monkeypatch):
    """The last that the GPU has; pointers for what TMA cannot load or store. What the GPU lacks is refused."""
    a, b, inputs = meta(40, 64), meta(48, 64).t(), operands(h, 16, 16, 16, False)
    for sm, last, variant, message in [
        (80, None, None, "this GPU is sm_80"),
        (89, "pointers", "persistent", "TMA comes with sm_90 .*use variant='pointers'"),
        (90, "warp specialized", None, None),
        (100, "persistent", "warp specialized", "needs sm_90.*use variant='persistent'"),
    ]:
        for module, its in itertools.product((lesson, checks, common), ("architecture", "gluon_architecture")):
            monkeypatch.setattr(module, its, lambda device, sm=sm: sm, raising=False)
        if last:
            assert lesson.choose(a, b, torch.bfloat16) == lesson.choose(a, b[:, :44], torch.float32) == last
            for left, right in [(a[:, :40], b[:40]), (a, b[:, :44]), (a[:, 1:33], b[:32]), (a[:1].expand(40, 64), b)]:
                assert lesson.choose(left, right, torch.bfloat16) == "pointers"
        if message:
            refused([(fp8_matmul, (*inputs, None, torch.bfloat16, variant), RuntimeError, message)])


def test_bad_input(h):
    a, b, scale_a, scale_b = operands(h, 4, 16, 32, False)
    wide, nan = {"out_dtype": torch.float32}, torch.full((), NAN, device=h.device)
    cases = [
        ({"b": b.contiguous()}, r"b has strides \(16, 1\); .*contiguous\(\)\.t"),
        ({"scale_a": torch.ones(1, 16, device=h.device)}, r"scale_a has shape \[1, 16\]; .* or \[4, 1\]"),
        ({"scale_b": nan}, "scale_b has 1 of .* not positive and finite"),
        ({"a": a[:, :24], "b": b[:24]}, "K is 24 .*TMA .*multiple of 16"),
        ({"b": b[:, :2]} | wide, "K is 32 and N 2; .*N to one of 4, or use variant='pointers'"),
        ({"a": torch.zeros_like(a).view(-1)[1:65].view(2, 32)}, "a has .* starts 1 bytes past a multiple"),
    ]
    good = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "variant": "persistent"}
    refused([(fp8_matmul, wrong, ValueError, message) for wrong, message in cases], **good)
    refused([(fp8_matmul, {"bias": h.randn(16)}, TypeError, r"bias is torch\.float32; .*bfloat16")], **good)
    assert fp8_matmul(a, b, scale_a, nan, check_scales=False).isnan().all()  # not looked at, so not refused


@pytest.mark.parametrize(("variant", "sm"), [("pointers", 89), ("persistent", 90), ("warp specialized", 90)])
def test_generated_code(variant, sm):
    """Scales and bias fit the registers, and nothing but FP8 multiplies."""
    scales = (meta(*shape, dtype=torch.float32) for shape in ((4096, 1), (1, 4096), (4096,)))
    args = (meta(4096, 4096), meta(4096, 4096, dtype=E5M2).t(), *scales, torch.float32, variant)
    found = code(sm, CODE[variant][sm], fp8_matmul, *args).found
    assert found["mma f8"] == found["mma.sync" if sm == 89 else "wgmma"]
    if variant == "warp specialized":
        text = dump(fp8_matmul, args, sm=90)
        assert not re.search("serialized|C75", text["log"])  # ptxas could wait for each before the next is started
        # Each step waits with one in flight; all are waited for where a tile ends, and by the second before its pause.
        waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d);", text["ptx"])
        assert sorted(waits) == ["0"] * 3 + ["1"] * 5
        assert "ld.global" not in text["ptx"], "all of it comes by TMA"


def on_model(monkeypatch, seed, sms):
    monkeypatch.setattr(common, "gluon_architecture", lambda device: 90)
    use_model(monkeypatch, {"fp8_matmul_warp_specialized_kernel": hopper}, seed, sms)


@often
@given(
    M=st.integers(1, 400), N=st.integers(1, 40), K=st.integers(1, 8 * (hopper.HOPPER_STAGES + 2)), rows=st.booleans(),
    bias=st.booleans(), formats=st.sampled_from(FORMATS), out=st.sampled_from([torch.float16, torch.float32]),
    sms=st.integers(1, 3), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_order_of_events_is_right(M, N, K, rows, bias, formats, out, sms, seed):
    """Rings that are shorter, as long and longer than a tile; a step of K in part."""
    h = harness()
    inputs = operands(h, M, 8 * N, 16 * K, rows, formats)
    with pytest.MonkeyPatch.context() as patch:
        on_model(patch, seed, sms)
        check(h, (*inputs, h.randn(8 * N, dtype=out)) if bias else inputs, "warp specialized", out)


@pytest.mark.gpu
def test_shapes_on_the_gpu(h, variant):
    """Real sizes; a ring that is shorter, as long and longer than a tile. Bits of many launches: in the GPU suite."""
    shapes = [(4096, 4096, 4096), (1000, 5208, 784), (8191, 264, 512), (16, 264, 16384)]
    shapes += [(700, 1288, 128 * steps - 64 * (steps % 2)) for steps in range(1, 10)]
    for i, (shape, out) in enumerate(itertools.product(shapes, OUT_DTYPES)):
        check(h, (*operands(h, *shape, i % 2 == 0, FORMATS[i % 4]), h.randn(shape[1], dtype=out)), variant, out)
