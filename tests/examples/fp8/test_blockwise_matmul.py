"""blockwise_matmul: both variants at every edge, rings and tiles, formats, layouts, extremes, bad input, the code."""

import functools
import re

from harness.codegen import compile_for, dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common import gluon as common
from examples.common import operands as checks
from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3, E5M2, OUT_DTYPES, quantize_reference
from examples.common.tma import gluon_descriptor
from examples.fp8 import blockwise_matmul as lesson
from examples.fp8 import blockwise_matmul_warp_specialized as hopper
from examples.fp8.blockwise_matmul import TILE, VARIANTS, blockwise_matmul, budget, choose, operands, reference
from examples.fp8.blockwise_matmul_warp_specialized import (
    CONFIGS,
    GROUP,
    choose_warpgroups,
    efficiency,
    rows_contiguous,
)
from studies.fp8.blockwise_matmul import CODE, error_of

FORMATS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]


def check(h, inputs, variant, out=torch.bfloat16, what=None, **more):
    fn = functools.partial(blockwise_matmul, out_dtype=out, variant=variant)
    M, K = inputs[0].shape
    what = what or f"{variant} {M}x{inputs[1].shape[1]}x{K} {out}"
    h.check(fn, reference, *inputs, what=what, dtype=out, **budget(h, K) | more)


def runs(h, variant):
    if variant not in lesson.runnable(h.device):
        pytest.skip(f"{variant} needs sm_90")


@pytest.fixture
def force(monkeypatch):
    """Warp specialized with so many warpgroups and, if given, as if the GPU had so many SMs."""

    def pretend(warpgroups, sms=None):
        monkeypatch.setattr(hopper, "choose_warpgroups", lambda M, N, K, sms: warpgroups)
        if sms:
            for module in (lesson, hopper):
                monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[90]))

    return pretend


# One row, one column, one tile, one more in each dimension; nothing to sum, no result. K of 1 to 5 groups.
ALIGNED = [(1, 8, 128), (64, 128, 256), (65, 136, 384), (129, 264, 128), (193, 128, 640), (5, 16, 0), (0, 8, 128)]
RAGGED = [(1, 1, 128), (37, 53, 256), (67, 257, 384), (3, 5, 0), (5, 0, 128)]  # primes: only by pointers
COMBINATIONS = [(v, s) for v in VARIANTS for s in ALIGNED] + [("tiles", s) for s in RAGGED]


def any_operands(h, M, N, K, formats=(E4M3, E4M3)):
    """operands, also where a size is 0 and there is no amax."""
    a, b, scale_a, scale_b = operands(h, max(M, 1), max(N, 1), max(K, GROUP), formats)
    groups = K // GROUP
    return a[:M, :K], b[:K, :N], scale_a[:M, :groups], scale_b[:groups, : -(-N // GROUP)]


@pytest.mark.parametrize(("variant", "shape"), COMBINATIONS)
@pytest.mark.parametrize("warpgroups", [2, 3])
def test_shapes(h, variant, shape, warpgroups, force):
    runs(h, variant)
    if variant == "tiles" and warpgroups == 3:
        pytest.skip("has none")
    force(warpgroups)
    check(h, any_operands(h, *shape), variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_to_sum_is_zero(h, variant):
    runs(h, variant)
    got = blockwise_matmul(*any_operands(h, 3, 8, 0), variant=variant)
    assert got.shape == (3, 8)
    assert not got.any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("out", OUT_DTYPES)
def test_every_format_to_every_dtype(h, variant, formats, out, force):
    runs(h, variant)
    for warpgroups in (2, 3) if variant != "tiles" else (2,):
        force(warpgroups)
        check(h, operands(h, 133, 264, 384, formats), variant, out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_scale_is_that_of_its_own_group(h, variant):
    """Ones times ones: each element is the sum of its groups' scales, exactly, as all of them are powers of two."""
    runs(h, variant)
    M, N, groups = 70, 264, 3
    a = torch.ones(M, groups * GROUP, device=h.device).to(E4M3)
    b = torch.ones(N, groups * GROUP, device=h.device).to(E4M3).t()
    scale_a = rows_contiguous(torch.exp2(h.randint(5, M, groups).float() - 2))
    scale_b = torch.exp2(h.randint(5, 3, groups).float() - 2).t()
    want = GROUP * (scale_a @ scale_b).repeat_interleave(GROUP, 1)[:, :N]
    for out in (torch.float32, torch.float16):
        assert torch.equal(blockwise_matmul(a, b, scale_a, scale_b, out, variant).float(), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_group_sums_are_added_in_float32(h, variant):
    """2**19 and then ones, which 14 bits would lose: each group's sum is small, so nothing is lost."""
    runs(h, variant)
    groups = 6
    a = torch.ones(64, groups * GROUP, device=h.device)
    a[:, :GROUP] = 64
    b = torch.ones(128, groups * GROUP, device=h.device)
    b[:, :GROUP] = 64
    one = torch.ones((), device=h.device)
    scales = rows_contiguous(one.expand(64, groups)), one.expand(groups, 1)
    got = blockwise_matmul(a.to(E4M3), b.to(E4M3).t(), *scales, torch.float32, variant)
    assert torch.equal(got, torch.full_like(got, 64 * 64 * GROUP + (groups - 1) * GROUP))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sms", [1, 3, 1000])
@pytest.mark.parametrize("warpgroups", [2, 3])
def test_every_tile_is_taken_once(h, variant, sms, warpgroups, force):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles."""
    runs(h, variant)
    force(warpgroups, sms)
    for groups in (1, 2, 5, 7) if variant != "tiles" else (1,):  # the ring starts anywhere, its phase in either state
        check(h, operands(h, 300, 264, groups * GROUP), variant)


def test_groups_of_tiles(h, force):
    """More rows of tiles than a group has, a last group that is not full, two columns of tiles."""
    check(h, operands(h, (TILE["GROUP_M"] + 1) * TILE["BLOCK_M"] + 1, 136, GROUP), "tiles")
    for warpgroups, config in CONFIGS.items() if "warp specialized" in lesson.runnable(h.device) else ():
        force(warpgroups, sms=5)
        check(h, operands(h, (config["GROUP_M"] + 1) * 64 * warpgroups + 1, 136, GROUP), "warp specialized")


@given(
    M=st.integers(1, 300), N=st.integers(1, 400), groups=st.integers(1, 4), out=st.sampled_from(OUT_DTYPES),
    formats=st.sampled_from(FORMATS), warpgroups=st.sampled_from((2, 3)), variant=st.sampled_from(VARIANTS),
)  # fmt: skip
def test_any_shape(M, N, groups, out, formats, warpgroups, variant):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    if variant not in lesson.runnable(h.device):
        variant = "tiles"
    if variant != "tiles":
        N = -(-N // 8) * 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "choose_warpgroups", lambda M, N, K, sms: warpgroups)
        check(h, operands(h, M, N, groups * GROUP, formats), variant, out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts(h, variant):
    runs(h, variant)
    a, b, scale_a, scale_b = operands(h, 140, 300, 512)
    scales = scale_a[:, :2], scale_b[:2, :3]
    wide = rows_contiguous(torch.cat([scale_a, scale_a]))  # columns further apart than rows are many
    cases = [
        (a[:, :256], b[:256, :296], *scales),  # rows apart: what lies between them must not be summed
        (a[:, 128:384], b[256:, :104], scale_a[:, 1:3], scale_b[2:, :1]),  # starts further on
        (a[::3, :256], b[:256, 8:296:2], scales[0][::3].contiguous(), scales[1][:, :2]),  # every third row
        (a[:, :256], b[:256, :296], wide[140:, :2], scales[1]),
        (a[:1], b[:, :8], scale_a[:1], scale_b[:, :1]),
        (a[:, :128], b[:128, :296], scale_a[:, :1], scale_b[:1]),
        (a, b[:, :296], scale_a, scale_b.contiguous()),  # either way round
        (a, b[:, :296], scale_a, scale_b.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3]),
        (a, b[:, :128], scale_a, scale_b[:, :1].expand(4, 1)),
        (a, b[:, :128], scale_a, scale_b[:1, :1].expand(4, 1)),  # one scale for all of b, by a stride of 0
    ]
    if variant == "tiles":
        cases += [
            (a, b, scale_a.contiguous(), scale_b),  # K contiguous
            (a, b, scale_a[:1].expand(140, 4), scale_b),
            (a[:1].expand(7, 512), b[:, 3:40], scale_a[:7], scale_b[:, :1]),
        ]
    else:
        cases[2] = (*cases[2][:2], rows_contiguous(cases[2][2]), cases[2][3])
    for inputs in cases:
        check(h, inputs, variant, what=f"{variant} {[tuple(x.stride()) for x in inputs]}")


@pytest.mark.parametrize("M", [0, 1, 2, 4, 5, 130])
def test_rows_contiguous(h, M):
    scale = h.randn(M, 3)
    got = rows_contiguous(scale)
    assert torch.equal(got, scale)
    assert got.stride(0) == 1
    assert got.stride(1) % 4 == 0
    assert got.stride(1) >= M


def test_descriptors_of_a_gluon_kernel():
    """Layouts as the tensor cores read them, none for a row of scales; a stride that is never used is made valid."""
    layouts = {
        (64, 128, E4M3): 128, (64, 64, torch.float32): 128, (64, 32, torch.float16): 64, (1, 64, torch.float32): 0,
    }  # fmt: skip
    for (rows, columns, dtype), swizzle in layouts.items():
        made = gluon_descriptor(torch.empty(256, 256, dtype=dtype, device="meta"), [rows, columns])
        assert (made.layout.swizzle_byte_width, made.layout.element_bitwidth) == (swizzle, 8 * dtype.itemsize)
        assert (made.shape, made.strides, made.block_shape) == ([256, 256], [256, 1], [rows, columns])
    one = torch.empty(1, 64, device="meta").as_strided((1, 64), (5, 1))
    assert gluon_descriptor(one, [1, 64]).strides == [16, 1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_extremes(h, variant):
    """NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile."""
    runs(h, variant)
    scales = rows_contiguous(h.randn(130, 3).exp_()), h.randn(3, 3).exp_().t()
    a, b = h.randn(130, 384), h.randn(264, 384)
    a[3, 5], b[9, 2] = float("nan"), float("nan")  # e4m3fn has no infinity
    check(h, (a.to(E4M3), b.to(E4M3).t(), *scales), variant, what="NaN")
    a[129, 383], b[263, 383], b[130, 7] = (float(x) for x in ("inf", "-inf", "inf"))
    check(h, (a.to(E5M2), b.to(E5M2).t(), *scales), variant, what="NaN and infinities")
    largest = torch.full((5, 384), 448.0, device=h.device).to(E4M3)
    signs = torch.where(h.randn(264, 384) > 0, 448.0, -448.0).to(E4M3).t()
    check(h, (largest, signs, rows_contiguous(scales[0][:5]), scales[1]), variant, what="the largest numbers")
    finite_a, finite_b = a.nan_to_num(0, 1, 1), b.nan_to_num(0, 1, 1).to(E4M3).t()
    least = (finite_a * 2.0**-8).to(E4M3)  # mostly subnormal
    small = rows_contiguous(2.0**-30 * scales[0]), 2.0**-30 * scales[1]
    check(h, (least, finite_b, *small), variant, torch.float32, what="subnormal")
    huge = rows_contiguous(120.0 * scales[0]), 120.0 * scales[1]
    check(h, (finite_a.to(E4M3), finite_b, *huge), variant, torch.float16, what="beyond float16, in part")


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantized_zeros_stay_zeros(h, variant):
    """Their scale is the least there is, and the product of two underflows: 0 all the same."""
    runs(h, variant)
    zeros = torch.zeros(128, 256, device=h.device)
    (q, scale_a), (w, scale_b) = quantize_reference(zeros, (1, GROUP)), quantize_reference(zeros, (GROUP, GROUP))
    assert not blockwise_matmul(q, w.t(), rows_contiguous(scale_a), scale_b.t(), variant=variant).any()


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("which", [2, 3])
def test_bad_scales(h, which, value):
    inputs = [*operands(h, 20, 264, 256)]
    inputs[which] = inputs[which].clone()
    inputs[which][1, 1] = value
    message = rf"blockwise_matmul: scale_{'ab'[which - 2]} has 1 of .* not positive and finite"
    with pytest.raises(ValueError, match=message):
        blockwise_matmul(*inputs)
    blockwise_matmul(*inputs, check_scales=False)  # not looked at, so not refused


# Products at a time differ, the sums must not: each group's is made by the same instructions, in the same order.
@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 6, 9, 10, 11, 32, 113])
def test_two_and_three_warpgroups_agree_bit_for_bit(h, groups, force):
    runs(h, "warp specialized")
    inputs = operands(h, 1000, 520, groups * GROUP)
    results = []
    for warpgroups in (2, 3):
        force(warpgroups)
        results.append(blockwise_matmul(*inputs, torch.float32, "warp specialized"))
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("warpgroups", [2, 3])
@pytest.mark.parametrize("sms", [1, 2, 7, 131, 132])
def test_rings_of_every_length_of_work(h, warpgroups, sms, force):
    """Groups from fewer than the ring holds to many rounds, over tiles of one program: a wrong phase hangs or lies."""
    runs(h, "warp specialized")
    force(warpgroups, sms)
    for groups in range(1, 13):
        M, N = 64 * warpgroups * 5 + 8, 128 * 4 + 8
        inputs = operands(h, M, N, groups * GROUP)
        check(h, inputs, "warp specialized", what=f"{groups} groups")


@pytest.mark.gpu
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    "shape", [(4096, 4096, 4096), (1000, 5208, 896), (16, 8192, 4096), (8191, 264, 512), (8192, 8192, 8192)]
)
def test_shapes_on_the_gpu(h, formats, shape):
    for variant in lesson.runnable(h.device):
        for out in OUT_DTYPES:
            check(h, operands(h, *shape, formats), variant, out)


@pytest.mark.gpu
@pytest.mark.parametrize("warpgroups", [2, 3])
def test_a_hundred_runs_are_the_same(h, warpgroups, force):
    """A race between loading and multiplying would show as a result that changes."""
    runs(h, "warp specialized")
    force(warpgroups)
    inputs = operands(h, 2048, 4096, 2176)
    first = blockwise_matmul(*inputs, torch.bfloat16, "warp specialized")
    for _ in range(100):
        again = blockwise_matmul(*inputs, torch.bfloat16, "warp specialized", check_scales=False)
        assert torch.equal(first, again)


@pytest.mark.gpu
def test_the_error_does_not_grow_with_k(h):
    """That of one group is all there is: at K = 32768 within twice that at 512, whether sums cancel or not."""
    for variant in lesson.runnable(h.device):
        for mean in (0, 1):
            errors = []
            for K in (512, 32768):
                a, b = ((h.randn(1024, K) + mean).to(E4M3) for _ in range(2))
                one = torch.ones((), device=h.device)
                scales = rows_contiguous(one.expand(1024, K // GROUP)), one.expand(K // GROUP, 8)
                got = blockwise_matmul(a, b.t(), *scales, torch.float32, variant)
                errors.append(error_of(got, a.double() @ b.t().double())[0])
            assert errors[1] < max(2 * errors[0], 1e-6), (variant, mean, errors)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(60)
    long, K = 2**31 // GROUP + 128, GROUP
    a = torch.empty(long, K, dtype=torch.bfloat16, device=h.device).normal_().to(E4M3)
    w = h.randn(136, K, dtype=E4M3)
    many = torch.rand(long, 1, device=h.device) + 0.5
    blocks = torch.rand(1, -(-long // GROUP), device=h.device) + 0.5
    two = torch.rand(1, 2, device=h.device) + 0.5
    for variant in lesson.runnable(h.device):
        tall = blockwise_matmul(a, w.t(), many, two, variant=variant)
        for part in (slice(0, 300), slice(-300, None)):
            inputs = (a[part], w.t(), many[part], two)
            h.check(lambda *_, p=part, c=tall: c[p], reference, *inputs, what="tall", dtype=tall.dtype, **budget(h, K))
        del tall
        wide = blockwise_matmul(w, a.t(), many[:136], blocks, variant=variant)
        for part, scale in ((slice(0, 256), blocks[:, :2]), (slice(-256, None), blocks[:, -2:])):
            inputs = (w, a[part].t(), many[:136], scale)
            h.check(
                lambda *_, p=part, c=wide: c[:, p].contiguous(), reference, *inputs,
                what="wide", dtype=wide.dtype, **budget(h, K),
            )  # fmt: skip
        del wide


def meta(*shape, dtype=E4M3):
    return torch.empty(shape, dtype=dtype, device="meta")


def layer(M=4096, N=4096, K=4096, formats=(E4M3, E4M3)):
    scale_a, scale_b = meta(K // GROUP, -(-M // 4) * 4, dtype=torch.float32).t()[:M], meta(-(-N // GROUP), K // GROUP)
    return meta(M, K, dtype=formats[0]), meta(N, K, dtype=formats[1]).t(), scale_a, scale_b.float().t()


TENSOR_CORES = {89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
SMALL, LARGE = (4096, 4096, 4096), (8192, 8192, 8192)  # two warpgroups, three


@pytest.mark.parametrize(("variant", "sm"), [(v, sm) for v, find in CODE.items() for sm in find])
@pytest.mark.parametrize("out", OUT_DTYPES)
def test_generated_code(variant, sm, out):
    for shape in (SMALL,) if variant == "tiles" else (SMALL, LARGE):
        (kernel,) = compile_for(blockwise_matmul, (*layer(*shape), out, variant), sms=(sm,))
        assert kernel.error is None
        assert all(kernel.found.get(name) for name in CODE[variant][sm]), kernel.found
        assert kernel.found["mma f8"] == kernel.found[TENSOR_CORES[sm]], "a tensor-core instruction that is not FP8's"
        assert kernel.spills == 0
        assert kernel.fits
        if (variant, sm) == ("tiles", 90):  # two programs on an SM, of shared memory and of registers
            assert 2 * (kernel.shared + 1024) <= 228 * 1024
            assert 2 * 32 * kernel.warps * kernel.registers <= 65536


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_formats_are_multiplied_as_they_are(formats, variant):
    name = {E4M3: "e4m3", E5M2: "e5m2"}
    ptx = dump(blockwise_matmul, (*layer(formats=formats), torch.float16, variant), sm=90)["ptx"]
    instructions = re.findall(r"wgmma\.mma_async[^;{]*", ptx)
    assert instructions
    assert all(f".f32.{name[formats[0]]}.{name[formats[1]]}" in each for each in instructions), instructions[0]


@pytest.mark.parametrize("shape", [SMALL, LARGE, (1, 8, 128), (8, 1, 128)])
def test_warp_specialized_code(shape):
    """What the compiler is trusted with, for each warpgroup; sizes of 1, constants of the kernel, compile too."""
    M, N, K = shape
    out = torch.float32 if N % 8 else torch.bfloat16
    if N % 4:
        N = 4
    text = dump(blockwise_matmul, (*layer(M, N, K), out, "warp specialized"), sm=90)
    assert "serialized" not in text["log"]  # the assembler says so where products do not overlap
    assert "0 bytes spill stores" in text["log"]
    ptx, warpgroups = text["ptx"], 3 if shape == LARGE else 2
    products = ptx.count("wgmma.commit_group")
    assert ptx.count("wgmma.mma_async") == 4 * products, "128 products are 4 instructions of 32"
    assert products == warpgroups * (1 if shape == LARGE else 3)  # a pair and one that is left over
    assert len(re.findall(r"wgmma\.mma_async[^;]*, 0, 1, 1;", ptx)) == products, "each product starts from zero"
    # Before a buffer is called empty, its product is waited for, its scales have been read, and all have come so far.
    released = r"wgmma\.wait_group\S*\s+\d;(?:(?!ld\.shared|bar\.sync).)*bar\.sync(?:(?!ld\.shared|bar\.sync).)*$"
    for before in ptx.split("mbarrier.arrive.shared")[:-1]:
        assert re.search(released, before, re.DOTALL)
    assert ptx.count("mbarrier.arrive.shared") == products
    # The buffer is free before it is written, that is before the fence, which is before all meet, and then TMA reads.
    stores = r"wait_group\.read\s+0;.*?bar\.sync.*?(?:stmatrix|st\.shared).*?fence\.proxy\.async.*?bar\.sync.*?"
    stores += r"cp\.async\.bulk\.tensor\.2d\.global"
    assert len(re.findall(stores, ptx, re.DOTALL)) == warpgroups * (2 if out is torch.float32 else 1)


def test_promotion_overlaps_the_next_product():
    """Of a pair, the multiply-adds of the first stand between the waits: after the second was started."""
    ptx = dump(blockwise_matmul, (*layer(), torch.bfloat16, "warp specialized"), sm=90)["ptx"]
    waits = [m.start() for m in re.finditer(r"wgmma\.wait_group\.sync\.aligned\s+\d", ptx)]
    kinds = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d)", ptx)
    assert kinds.count("1") == 2, "one pair for each of two warpgroups"
    for i, kind in enumerate(kinds):
        if kind == "1":
            assert ptx.count("fma.rn.f32", waits[i], waits[i + 1]) >= 64  # 64 x 128 elements, 128 threads
            assert "wgmma.mma_async" not in ptx[waits[i] : waits[i + 1]]


@pytest.mark.parametrize(
    ("sm", "variant", "message"),
    [(80, None, "this GPU is sm_80; FP8 tensor cores come with sm_89"),
     (100, "warp specialized", r"needs sm_90, for its wgmma \(this is sm_100\): use variant='tiles'"),
     (None, "warp specialized", r"needs sm_90, .*Gluon kernels are not interpreted\): use variant='tiles'")],
)  # fmt: skip
def test_other_gpus(h, monkeypatch, sm, variant, message):
    monkeypatch.setattr(checks, "architecture", lambda device: sm or 90)
    monkeypatch.setattr(common, "gluon_architecture", lambda device: sm)
    with pytest.raises(RuntimeError, match=f"blockwise_matmul: {message}"):
        blockwise_matmul(*operands(h, 8, 8, 128), variant=variant)


def test_the_fastest_that_takes_the_operands_is_chosen(monkeypatch):
    a, b, scale_a, _ = layer(130, 264, 256)
    for sm, last in {90: "warp specialized", 100: "tiles", None: "tiles"}.items():
        monkeypatch.setattr(lesson, "gluon_architecture", lambda device, sm=sm: sm)
        assert choose(a, b, scale_a, torch.bfloat16) == last
        assert choose(a, b[:, :260], scale_a, torch.float32) == last
        assert choose(a, b[:, :260], scale_a, torch.bfloat16) == "tiles"  # its rows are no multiple of 16 bytes
        assert choose(a, b, scale_a.contiguous(), torch.bfloat16) == "tiles"  # K contiguous


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((2048,) * 3, 2), ((4096,) * 3, 2), ((8192,) * 3, 3), ((16384,) * 3, 3), ((4096, 14336, 4096), 2),
     ((4096, 4096, 14336), 2), ((1, 8, 128), 2), ((16, 8192, 2**23), 2)],
)  # fmt: skip
def test_how_many_warpgroups(shape, wanted):
    assert choose_warpgroups(*shape, sms=132) == wanted


@given(M=st.integers(1, 20000), N=st.integers(1, 20000), sms=st.integers(1, 200), warpgroups=st.sampled_from((2, 3)))
def test_efficiency(M, N, sms, warpgroups):
    """A share: all of it where tiles fill waves, and what a loop over the tiles finds elsewhere."""
    tiles = sum(1 for _ in range(0, M, 64 * warpgroups)) * sum(1 for _ in range(0, N, GROUP))
    waves = sum(1 for _ in range(0, tiles, sms))
    got = efficiency(M, N, warpgroups, sms)
    assert 0 < got <= 1
    assert got * waves * sms * 64 * warpgroups * GROUP == pytest.approx(M * N)
    assert efficiency(64 * warpgroups * sms, GROUP, warpgroups, sms) == 1


def _bad(device):
    a, w = torch.randn(6, 256, device=device).to(E4M3), torch.randn(144, 256, device=device).to(E4M3)
    b, scale_a, scale_b = w.t(), rows_contiguous(torch.ones(6, 2, device=device)), torch.ones(2, 2, device=device)
    good = a, b, scale_a, scale_b

    def but(**replaced):
        names = ("a", "b", "scale_a", "scale_b")
        return tuple(replaced.get(name, x) for name, x in zip(names, good, strict=True))

    return {
        "no tensor": (but(a=[1.0]), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "float16": (but(a=a.half()), {}, TypeError, r"a is torch\.float16; .*quantize it and pass its scales"),
        "int8": (but(b=w.view(torch.int8).t()), {}, TypeError, r"b is torch\.int8"),
        "AMD's variant": (
            but(b=w.view(torch.float8_e4m3fnuz).t()), {}, TypeError, "b is .*e4m3fnuz; the fnuz formats",
        ),
        "a vector": (but(b=b[:, 0]), {}, ValueError, r"shapes \(6, 256\) and \(256,\); need \[M, K\] and"),
        "a batch": (but(a=a[None], b=b[None]), {}, ValueError, "need"),
        "inner sizes": (but(b=w), {}, ValueError, r"shapes \(6, 256\) and \(144, 256\)"),
        "part of a group": (
            but(a=a[:, :200], b=b[:200]), {}, ValueError, "K is 200, but a scale covers 128 of it: pad K to a multiple",
        ),
        "a column-major": (
            but(a=a.t().contiguous().t()), {}, ValueError,
            r"a has strides \(1, 6\); FP8 tensor cores take .*a\.contiguous\(\)",
        ),
        "b row-major": (
            but(b=b.contiguous()), {}, ValueError,
            r"b has strides \(144, 1\); FP8 tensor cores take .*b\.t\(\)\.contiguous\(\)\.t\(\)",
        ),
        "scale a number": (but(scale_a=1.0), {}, TypeError, "scale_a is float; pass a float32 tensor"),
        "scale in float64": (but(scale_b=scale_b.double()), {}, TypeError, r"scale_b is torch\.float64"),
        "scale in bfloat16": (but(scale_a=scale_a.bfloat16()), {}, TypeError, r"scale_a is torch\.bfloat16"),
        "scale elsewhere": (but(scale_a=scale_a.to("meta")), {}, ValueError, "scale_a is on meta, the data on"),
        "one scale": (
            but(scale_a=scale_a[0, 0]), {}, ValueError, r"scale_a has shape \[\]; need \[6, 2\]",
        ),
        "scales per row": (but(scale_a=scale_a[:, :1]), {}, ValueError, r"scale_a has shape \[6, 1\]; need \[6, 2\]"),
        "scales of a transposed": (but(scale_a=scale_a.t()), {}, ValueError, r"scale_a has shape \[2, 6\]"),
        "scales of a for b": (but(scale_b=scale_a), {}, ValueError, r"scale_b has shape \[6, 2\]; need \[2, 2\]"),
        "the tail's block missing": (
            but(scale_b=scale_b[:, :1]), {}, ValueError, r"scale_b has shape \[2, 1\]; need \[2, 2\]",
        ),
        "a scale of zero": (but(scale_b=0 * scale_b), {}, ValueError, "scale_b has 4 of 4 values that are not"),
        "an infinite scale": (but(scale_a=scale_a / 0), {}, ValueError, "scale_a has 12 of 12 values"),
        "out in FP8": (good, {"out_dtype": E4M3}, TypeError, r"out_dtype torch\.float8_e4m3fn is not one"),
        "out in float64": (good, {"out_dtype": torch.float64}, TypeError, r"torch\.float64 is not one of"),
        "no variant": (good, {"variant": "faster"}, ValueError, r"'faster' is not one of \(None, 'tiles'"),
        "requires grad": (but(a=a.clone().requires_grad_()), {}, RuntimeError, "no backward"),
        "a scale that requires grad": (but(scale_a=scale_a.clone().requires_grad_()), {}, RuntimeError, "no backward"),
        "two devices": (but(b=b.to("meta")), {}, ValueError, "move them to one device"),
        "a device without kernels": (tuple(x.to("meta") for x in good), {}, RuntimeError, "on meta"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, kwargs, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"blockwise_matmul: .*{message}"):
        blockwise_matmul(*args, **kwargs)


def _bad_for_tma(device):
    a, w = torch.randn(6, 256, device=device).to(E4M3), torch.randn(144, 256, device=device).to(E4M3)
    b, scale_b = w.t(), torch.ones(2, 2, device=device)
    scale_a, flat = torch.ones(6, 2, device=device), torch.zeros(6 * 272 + 16, device=device).to(E4M3)
    good = rows_contiguous(scale_a)
    few = "N 140; TMA needs rows of 16-byte multiples: pad .* N to one of 8, or use variant='tiles'"
    other = "or use variant='tiles'"
    return {
        "N of 140": ((a, b[:, :140], good, scale_b), {}, few),
        "N of 142 in float32": (
            (a, b[:, :142], good, scale_b), {"out_dtype": torch.float32}, f"N 142; .* N to one of 4, {other}",
        ),
        "scale_a with K contiguous": (
            (a, b, scale_a, scale_b), {}, rf"scale_a has strides \(2, 1\) .*pass rows_contiguous\(scale_a\), {other}",
        ),
        "columns of scales 6 apart": (
            (a, b, scale_a.t().contiguous().t(), scale_b), {}, r"scale_a has strides \(1, 6\)",
        ),
        "one column of scales for all": ((a, b, good[:, :1].expand(6, 2), scale_b), {}, r"strides \(1, 0\)"),
        "one row of scales for all": ((a, b, good[:1].expand(6, 2), scale_b), {}, r"strides \(0, 8\)"),
        "scales that start anywhere": ((a[1:], b, good[1:], scale_b), {}, "starts 4 bytes past a multiple of 16"),
        "a that starts anywhere": (
            (flat[1:1537].view(6, 256), b, good, scale_b), {}, "a has .* starts 1 bytes past a multiple of 16",
        ),
        "rows of a 260 apart": (
            (flat[:1560].view(6, 260)[:, :256], b, good, scale_b), {}, r"a has .* strides \(260, 1\)",
        ),
        "one row for all": ((a[:1].expand(6, 256), b, good, scale_b), {}, r"a has .* strides \(0, 1\)"),
        "one column for all": ((a, b[:, :1].expand(256, 144), good, scale_b), {}, r"b\.t\(\) has .* strides \(0, 1\)"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _bad_for_tma("cpu"))
def test_what_tma_cannot_take(h, name, monkeypatch):
    args, kwargs, message = _bad_for_tma(h.device)[name]
    for module, its in ((checks, "architecture"), (common, "gluon_architecture")):
        monkeypatch.setattr(module, its, lambda device: 90)  # nothing is launched
    with pytest.raises(ValueError, match=f"blockwise_matmul: .*{message}"):
        blockwise_matmul(*args, variant="warp specialized", **kwargs)
