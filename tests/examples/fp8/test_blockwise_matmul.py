"""blockwise_matmul: both variants at every edge, rings and tiles, formats, layouts, NaN, bad input, the code."""

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
from examples.common.fp8 import E4M3, OUT_DTYPES
from examples.common.fp8_gemm import m_major
from examples.common.quantize import GROUP
from examples.fp8 import blockwise_matmul as lesson
from examples.fp8 import blockwise_matmul_warp_specialized as hopper
from examples.fp8.blockwise_matmul import TILE, VARIANTS, blockwise_matmul, choose, operands
from examples.fp8.blockwise_matmul_warp_specialized import CONFIGS, choose_warpgroups
from studies.fp8.blockwise_matmul import CODE
from tests.examples.fp8.helpers import FORMATS, check_gemm, code, meta, not_finite, refused
from tests.examples.tma.helpers import pretend
from tests.examples.tma.model import no_shrinking, use_model
from tests.examples.triton.helpers import harness

SPECIALIZED = VARIANTS[1]
check = functools.partial(check_gemm, blockwise_matmul, lesson)


@pytest.fixture(params=["pointers", 2, 3], ids=lambda param: param if param == "pointers" else f"{param} warpgroups")
def variant(request, h, monkeypatch):
    """pointers, and warp specialized with two and three warpgroups."""
    if request.param == "pointers":
        return "pointers"
    if SPECIALIZED not in lesson.runnable(h.device):
        pytest.skip("warp specialized needs sm_90")
    monkeypatch.setattr(hopper, "choose_warpgroups", lambda M, N, K, sms: request.param)
    return SPECIALIZED


# One row, one column, one tile, one more in each dimension; nothing to sum, no result. K of 1 to 5 groups.
SHAPES = [(1, 8, 128), (64, 128, 256), (65, 136, 384), (129, 264, 128), (193, 128, 640), (5, 16, 0), (0, 8, 128)]
RAGGED = [(1, 1, 128), (37, 53, 256), (67, 257, 384), (3, 5, 0), (5, 0, 128)]  # primes: only by pointers


@pytest.mark.parametrize(("case", "shape"), list(enumerate(SHAPES + RAGGED)), ids=str)
def test_shapes_formats_and_dtypes(h, variant, case, shape):
    if variant == SPECIALIZED and shape in RAGGED:
        pytest.skip("its rows are no multiples of 16 bytes")
    M, N, K = shape
    a, b, scale_a, scale_b = operands(h, max(M, 1), max(N, 1), max(K, GROUP), FORMATS[case % 4])  # amax of something
    groups = K // GROUP
    inputs = a[:M, :K], b[:K, :N], scale_a[:M, :groups], scale_b[:groups, : -(-N // GROUP)]
    check(h, inputs, variant, OUT_DTYPES[case % 3])


def test_group_sums_are_added_in_float32(h, variant):
    """2**19 and then ones, which 14 bits would lose: each group's sum is small, so nothing is lost."""
    groups, one = 6, torch.ones((), device=h.device)
    a, b = (torch.ones(n, groups * GROUP, device=h.device) for n in (64, 128))
    a[:, :GROUP], b[:, :GROUP] = 64, 64
    scales = m_major(one.expand(64, groups)), one.expand(groups, 1)
    got = blockwise_matmul(a.to(E4M3), b.to(E4M3).t(), *scales, torch.float32, variant)
    assert torch.equal(got, torch.full_like(got, 64 * 64 * GROUP + (groups - 1) * GROUP))


def test_every_tile_is_taken_once(h, variant, monkeypatch):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles; a group of rows
    of tiles that is not full. The ring starts anywhere, its phase in either state."""
    for config in (TILE, *CONFIGS.values()):
        monkeypatch.setitem(config, "GROUP_M", 2)
    for sms, groups in itertools.product((1, 3, 1000), (1, 2, 5, 7)) if variant == SPECIALIZED else [(1, 1)]:
        pretend(monkeypatch, (lesson, hopper), sms)
        check(h, operands(h, 300, 264, groups * GROUP), variant)


def test_layouts_and_extremes(h, variant):
    """NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile."""
    a, b, scale_a, scale_b = operands(h, 140, 300, 512)
    scales = scale_a[:, :2], scale_b[:2, :3]
    wide = m_major(torch.cat([scale_a, scale_a]))  # columns further apart than rows are many
    cases = [
        (a[::3, :256], b[:256, 8:296:2], m_major(scales[0][::3]), scales[1][:, :2]),  # every third row, apart in memory
        (a[:, :256], b[:256, :296], wide[140:, :2], scales[1]),
        (a, b[:, :296], scale_a, scale_b.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3]),
        (a, b[:, :128], scale_a, scale_b[:1, :1].expand(4, 1)),  # one scale for all of b, by a stride of 0
    ]
    if variant == "pointers":  # K contiguous; one row of a for all
        cases += [(a, b, *[scale.contiguous() for scale in (scale_a, scale_b)])]
        cases += [(a[:1].expand(7, 512), b[:, 3:40], scale_a[:1].expand(7, 4), scale_b[:, :1])]
    for inputs in cases:
        check(h, inputs, variant, what=f"{variant} {[tuple(x.stride()) for x in inputs]}")
    scales = m_major(h.randn(130, 3).exp_()), h.randn(3, 3).exp_().t()
    for what, a, b in not_finite(h, 130, 264, 384):
        check(h, (a, b, *scales), variant, what=what)


@no_shrinking
@given(
    M=st.integers(1, 500), N=st.integers(1, 20), groups=st.integers(1, 7), warpgroups=st.sampled_from(list(CONFIGS)),
    formats=st.sampled_from(FORMATS), out=st.sampled_from([torch.float16, torch.float32]), sms=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_order_of_events_is_right(M, N, groups, warpgroups, formats, out, sms, seed):
    """On a model of an SM; rings that are shorter, as long and longer than a tile."""
    check_on_model((M, 8 * N, groups * GROUP, formats), out, warpgroups, sms, seed)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_a_slot_is_kept_while_either_of_two_warpgroups_multiplies_it(first):
    """An order in which an early release shows is one of ten: one tile, in many orders."""
    for seed in range(first, first + 10):
        check_on_model((128, 8, 12 * GROUP), torch.float16, 2, 1, seed)


def check_on_model(layer, out, warpgroups, sms, seed):
    h = harness()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "gluon_architecture", lambda device: 90)
        patch.setattr(hopper, "choose_warpgroups", lambda M, N, K, sms: warpgroups)
        use_model(patch, {"blockwise_matmul_warp_specialized_kernel": hopper}, seed, sms)
        check(h, operands(h, *layer), SPECIALIZED, out)


@pytest.mark.gpu
def test_shapes_on_the_gpu(h, variant):
    """Real sizes; groups from fewer than the ring holds to many rounds. Bits of many launches: in the GPU suite."""
    shapes = [(4096, 4096, 4096), (1000, 5208, 896), (16, 8192, 4096), (8191, 264, 512)]
    shapes += [(968, 520, groups * GROUP) for groups in (*range(1, 13), 32, 113)]
    for i, (shape, out) in enumerate(itertools.product(shapes, OUT_DTYPES)):
        check(h, operands(h, *shape, FORMATS[i % 4]), variant, out)


def layer(M=4096, N=4096, K=4096, formats=(E4M3, E4M3)):
    scale_a, scale_b = meta(K // GROUP, -(-M // 4) * 4, dtype=torch.float32).t()[:M], meta(-(-N // GROUP), K // GROUP)
    return meta(M, K, dtype=formats[0]), meta(N, K, dtype=formats[1]).t(), scale_a, scale_b.float().t()


def test_code_of_pointers():
    args = (*layer(formats=FORMATS[1]), torch.float32, "pointers")
    kernel = code(90, CODE["pointers"][90], blockwise_matmul, *args)
    assert kernel.found["mma f8"] == kernel.found["wgmma"], "a tensor-core instruction that is not FP8's"
    # Two programs on an SM, of shared memory and of registers.
    assert 2 * (kernel.shared + 1024) <= 228 * 1024
    assert 2 * 32 * kernel.warps * kernel.registers <= 65536


@pytest.mark.parametrize(("n", "out", "warpgroups"), [(4096, torch.bfloat16, 2), (8192, torch.float32, 3)], ids=str)
def test_warp_specialized_code(n, out, warpgroups):
    """What the compiler is trusted with, for each warpgroup."""
    args = (*layer(n, n, n, formats=FORMATS[1]), out, SPECIALIZED)
    code(90, CODE[SPECIALIZED][90], blockwise_matmul, *args)
    text = dump(blockwise_matmul, args, sm=90)
    assert "serialized" not in text["log"]  # the assembler says so where products do not overlap
    ptx = text["ptx"]
    products = ptx.count("wgmma.commit_group")
    assert ptx.count("wgmma.mma_async") == ptx.count(".f32.e4m3.e5m2") == 4 * products, "4 instructions of 32, in FP8"
    assert products == warpgroups * (1 if warpgroups == 3 else 3)  # a pair and one that is left over
    assert len(re.findall(r"wgmma\.mma_async[^;]*, 0, 1, 1;", ptx)) == products, "each product starts from zero"
    # Before a buffer is called empty, its product is waited for, its scales have been read, and all have come so far.
    released = r"wgmma\.wait_group\S*\s+\d;(?:(?!ld\.shared|bar\.sync).)*bar\.sync(?:(?!ld\.shared|bar\.sync).)*$"
    for before in ptx.split("mbarrier.arrive.shared")[:-1]:
        assert re.search(released, before, re.DOTALL)
    assert ptx.count("mbarrier.arrive.shared") == products


def test_which_kernel_is_chosen(h, monkeypatch):
    """The fastest that the GPU has and that takes the operands, with how many warpgroups. What the GPU lacks is
    refused."""
    (a, b, scale_a, _), inputs = layer(130, 264, 256), operands(h, 8, 8, 128)
    for sm, last in {90: SPECIALIZED, 100: "pointers", None: "pointers"}.items():
        for module in (lesson, common):
            monkeypatch.setattr(module, "gluon_architecture", lambda device, sm=sm: sm)
        assert choose(a, b, scale_a, torch.bfloat16) == last
        assert choose(a, b[:, :260], scale_a, torch.float32) == last
        assert choose(a, b[:, :260], scale_a, torch.bfloat16) == "pointers"  # its rows are no multiple of 16 bytes
        assert choose(a, b, scale_a.contiguous(), torch.bfloat16) == "pointers"  # K contiguous
    elsewhere = "needs sm_90, .*variant='pointers'"
    for sm, variant, message in [(80, None, "this GPU is sm_80"), (100, SPECIALIZED, elsewhere)]:
        monkeypatch.setattr(checks, "architecture", lambda device, sm=sm: sm)
        refused([(blockwise_matmul, (*inputs, torch.bfloat16, variant), RuntimeError, message)])
    assert [choose_warpgroups(n, n, n, sms=132) for n in (2048, 4096, 8192, 16384)] == [2, 2, 3, 3]
    for shape in ((4096, 14336, 4096), (4096, 4096, 14336), (1, 8, 128), (16, 8192, 2**23)):
        assert choose_warpgroups(*shape, sms=132) == 2


def test_bad_input(h, monkeypatch):
    a, b, scale_a, scale_b = operands(h, 6, 144, 256)
    nan = torch.full_like(scale_a, float("nan"))
    assert blockwise_matmul(a, b, nan, scale_b, check_scales=False).isnan().all()  # not looked at, so not refused
    for module, its in ((checks, "architecture"), (common, "gluon_architecture")):
        monkeypatch.setattr(module, its, lambda device: 90)  # nothing is launched
    cases = [
        ({"a": a[:, :200], "b": b[:200]}, "K is 200, but a scale covers 128 of it: pad K"),
        ({"b": b.contiguous()}, r"b has strides \(144, 1\); .*b\.t\(\)\.contiguous\(\)"),
        ({"scale_a": nan}, "scale_a has 12 of 12 values that are not positive and finite"),
        ({"b": b[:, :140]}, "N 140; TMA needs .* N to one of 8"),
        ({"scale_a": scale_a.contiguous()}, r"scale_a has strides \(2, 1\) .*pass m_major\(scale_a\)"),
        ({"scale_a": scale_a[:, :1].expand(6, 2)}, r"scale_a has strides \(1, 0\)"),
        ({"a": a[1:], "scale_a": scale_a[1:]}, "scale_a has .* starts 4 bytes past a multiple of 16"),
    ]
    good = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "variant": SPECIALIZED}
    refused([(blockwise_matmul, wrong, ValueError, message) for wrong, message in cases], **good)
