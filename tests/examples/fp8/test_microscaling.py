"""microscaling: every code, the specification's rules bit for bit, scale tiles, products, bad input, the code."""

import functools
import itertools
from fractions import Fraction

from harness.codegen import compile_for

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import Limits
from examples.common.microscaling import (
    FORMATS,
    NV_SPAN,
    dequantize,
    nearest,
    scales_shape,
    swizzle_scales,
    unswizzle_scales,
    values_of,
)
from examples.fp8 import microscaling
from examples.fp8.microscaling import KINDS, budget, demo, losses, mx_matmul, native
from examples.fp8.microscaling_quantize import Operands, expected_bytes, mx_quantize, quantized_bytes, scaled_mm

RECIPES = [("mxfp8", "floor"), ("mxfp8", "up"), ("mxfp4", "floor"), ("mxfp4", "up"), ("nvfp4", "floor")]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def bits(x):
    return x.contiguous().view(torch.uint8)


def check_bits(h, x, fmt, rule="floor", tensor_scale=None, what="bits"):
    h.check(
        quantized_bytes,
        expected_bytes,
        x,
        fmt,
        rule,
        tensor_scale,
        what=f"{what} {fmt} {rule} {tuple(x.shape)}",
        dtype=torch.uint8,
    )


def check_product(h, M, N, K, fmt, dtype=torch.float32, **options):
    x = Operands.random(h, M, N, K, fmt)
    fn = functools.partial(mx_matmul, fmt=fmt, out_dtype=dtype, **x.wholes, **options)
    h.check(fn, x.reference, *x.packed, what=f"{fmt} {M}x{N}x{K}", dtype=dtype, **budget(K))


# --- the formats


def test_values_by_definition_are_those_of_the_formats():
    device = torch.device("cpu")
    assert values_of(2, 1, device).tolist() == E2M1[:8]
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(values_of(4, 3, device), e4m3)


@pytest.mark.parametrize("values", [(2, 1), (4, 3)])
def test_nearest_against_fractions(values):
    table = [Fraction(v) for v in values_of(*values, torch.device("cpu")).tolist()]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    tiny = Fraction(1, 2**40)
    points = [m + d for m in middles for d in (-tiny, 0, tiny)] + table + [table[-1] * 2, table[-1] + tiny]
    want = [min(range(len(table)), key=lambda i, x=x: (abs(table[i] - x), i % 2)) for x in points]
    got = nearest(torch.tensor([float(x) for x in points], dtype=torch.float64), torch.tensor(table, dtype=float))
    assert got.tolist() == want


def test_every_byte_of_e2m1_is_two_values_the_first_in_the_low_half():
    q = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float4_e2m1fn_x2)
    scale = torch.full((16, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = dequantize(q, scale, "mxfp4").reshape(256, 2)
    for byte in range(256):
        assert got[byte].tolist() == [E2M1[byte % 16], E2M1[byte // 16]]


def test_every_e8m0_code_is_its_power_of_two_and_the_last_nan():
    q = torch.full((256, 32), 1.0).to(torch.float8_e4m3fn)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e8m0fnu)
    got = dequantize(q, scale, "mxfp8")[:, 0]
    assert got[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert got[255].isnan()
    assert torch.equal(got[:255], scale[:255, 0].double())  # torch agrees


def _whole(fmt, device, value=1.0):
    return torch.full((1,), value, device=device) if fmt == "nvfp4" else None


def decoded_by_the_kernel(q, scale, fmt):
    """The product with an identity; with 6 of them for nvfp4, in which 1 is 6 * e4m3(1 / 6) and not exact."""
    times, whole = 6.0 if fmt == "nvfp4" else 1.0, _whole(fmt, q.device)
    b, b_scale, _ = mx_quantize(times * torch.eye(32, device=q.device), fmt, tensor_scale=whole, swizzled=True)
    return mx_matmul(q, swizzle_scales(scale), b, b_scale, fmt, torch.float32, whole, whole).double() / times


def test_the_kernel_decodes_every_value(h):
    every = torch.arange(256, dtype=torch.uint8, device=h.device)
    for fmt, form in FORMATS.items():
        codes = every[~(every.view(torch.float8_e4m3fn).float().isnan())] if form.pack == 1 else every
        q = codes[:, None].repeat(1, 32 // form.pack).view(form.element)
        scale = torch.ones(len(codes), 32 // form.group, device=h.device).to(form.scale)
        assert torch.equal(decoded_by_the_kernel(q, scale, fmt), dequantize(q, scale, fmt)), fmt


def test_the_kernel_decodes_every_scale(h):
    """mx: those whose values stay in the range of the 16-bit operands and of the result; nvfp4: all but NaN."""
    for fmt, codes in (("mxfp8", range(16, 247)), ("mxfp4", range(4, 253)), ("nvfp4", range(127))):
        form = FORMATS[fmt]
        code = torch.tensor(list(codes), dtype=torch.uint8, device=h.device)
        scale = code[:, None].repeat(1, 32 // form.group).view(form.scale)
        value = 0x76 if form.pack == 2 else 0x7E  # the largest, and 4 beside 6
        q = torch.full((len(code), 32 // form.pack), value, dtype=torch.uint8, device=h.device).view(form.element)
        assert torch.equal(decoded_by_the_kernel(q, scale, fmt), dequantize(q, scale, fmt)), fmt


# --- quantizers


def test_bytes_worked_out_by_hand(h):
    x = torch.tensor([E2M1 * 2], device=h.device)  # amax 6: floor(log2 6) - 2 is 0
    q, scale, _ = mx_quantize(x, "mxfp4")
    assert bits(scale).tolist() == [[127]]
    assert bits(q).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2]
    q, scale, whole = mx_quantize(x / 4, "nvfp4")
    assert whole.item() == pytest.approx(1.5 / NV_SPAN)
    assert scale.float().tolist() == [[448.0, 448.0]]
    assert bits(q).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2]
    q, scale, _ = mx_quantize(x * 70, "mxfp8")  # amax 420: floor(log2 420) - 8 is 0
    assert bits(scale).tolist() == [[127]]
    assert q.float().tolist() == [(x * 70)[0].to(torch.float8_e4m3fn).float().tolist()]


@pytest.mark.parametrize(
    ("fmt", "rule", "amax", "code", "largest"),
    [
        ("mxfp4", "floor", 7.9, 127, 6.0),  # saturates, as the specification has it
        ("mxfp4", "up", 7.9, 128, 8.0),
        ("mxfp4", "up", 6.0, 127, 6.0),  # no more than it takes
        ("mxfp4", "up", 6.0000005, 128, 6.0),
        ("mxfp8", "floor", 511.0, 127, 448.0),
        ("mxfp8", "up", 511.0, 128, 512.0),
        ("mxfp8", "up", 448.0, 127, 448.0),
        ("mxfp8", "floor", 448.0, 127, 448.0),
    ],
)
def test_rules(h, fmt, rule, amax, code, largest):
    x = torch.full((1, 32), amax, device=h.device)
    q, scale, _ = mx_quantize(x, fmt, rule)
    assert bits(scale).item() == code
    assert dequantize(q, scale, fmt)[0, 0].item() == largest


@pytest.mark.parametrize(("fmt", "rule"), RECIPES)
def test_every_float16_is_rounded_as_described(h, fmt, rule):
    """Each in a group whose largest value sets the scale to 1, so that what is compared is the rounding."""
    form, largest = FORMATS[fmt], FORMATS[fmt].largest
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.abs() <= largest]  # NaN is not
    per_group = form.group - 1
    groups = torch.nn.functional.pad(every, (0, -len(every) % per_group)).view(-1, per_group)
    x = torch.nn.functional.pad(groups, (1, 0), value=largest)
    rows = x.shape[0] // 16 * 16
    for part in (x[:rows].reshape(-1, 16 * form.group), x[rows:]):
        check_bits(h, part.to(h.device), fmt, rule, _whole(fmt, h.device))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("rule", ["floor", "up"])
def test_every_magnitude_gets_the_scale_of_the_specification(h, fmt, rule):
    """amax of each power of two, a little below and 1.5 and 1.76 times it, subnormal numbers among them."""
    powers = torch.tensor([2.0**k for k in range(-149, 128)], dtype=torch.float64)
    amax = torch.cat([powers, powers * (1 - 2**-24), powers * 1.5, powers * 1.76]).float()
    amax = amax[amax.isfinite()]
    x = amax[:, None] * torch.linspace(-1, 1, 32)
    check_bits(h, x.to(h.device), fmt, rule)
    scale = bits(mx_quantize(x.to(h.device), fmt, rule)[1])
    lowest, highest = (0, 246 + (rule == "up")) if fmt == "mxfp8" else (0, 252 + (rule == "up"))
    assert sorted(set(scale.flatten().tolist())) == list(range(lowest, highest + 1))


def test_every_scale_of_nvfp4(h):
    """amax of a group from below the smallest scale to beyond the largest, which a given tensor's scale allows."""
    amax = torch.cat([values_of(4, 3, torch.device("cpu")).float() * 6 * step for step in (0.97, 1.0, 1.03)])
    x = torch.cat([amax, torch.tensor([1e-5, 1e5, 3e38])])[:, None] * torch.linspace(-1, 1, 16)
    check_bits(h, x.to(h.device), "nvfp4", tensor_scale=_whole("nvfp4", h.device))
    code = bits(mx_quantize(x.to(h.device), "nvfp4", tensor_scale=_whole("nvfp4", h.device))[1])
    assert set(code.flatten().tolist()) == set(range(1, 127)), "never 0, so that no scale is, and never NaN"


# One row, one group, primes, a tile of scales and one row or group more, more columns than a program, nothing.
SHAPES = [(1, 32), (37, 96), (128, 128), (129, 160), (3, 1056), (0, 64), (5, 0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("fmt", "rule"), RECIPES)
def test_shapes(h, shape, fmt, rule):
    check_bits(h, h.randn(*shape, dtype=h.half, scale=3.0), fmt, rule)


@given(M=st.integers(0, 40), groups=st.integers(0, 12), recipe=st.sampled_from(RECIPES), k=st.integers(-30, 30))
def test_any_shape_and_magnitude(M, groups, recipe, k):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    fmt, rule = recipe
    x = h.randn(M, groups * FORMATS[fmt].group, scale=2.0**k)
    check_bits(h, x, fmt, rule)
    if not x.numel():
        return
    q, scale, whole = mx_quantize(x, fmt, rule)
    back, form = dequantize(q, scale, fmt, whole), FORMATS[fmt]
    each = dequantize(q, scale, fmt, whole).abs().unflatten(1, (-1, form.group)).amax(2)
    assert (each <= 2 * x.double().abs().unflatten(1, (-1, form.group)).amax(2)).all()
    if rule == "up":  # nothing saturates, so half the largest step is the most that is lost
        power = torch.exp2(bits(scale).double() - 127)[..., None]
        lost = (back - x.double()).abs().unflatten(1, (-1, form.group))
        assert (lost <= power * (1 if form.pack == 2 else 16)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_dtypes_and_layouts(h, fmt, dtype):
    wide = h.randn(40, 256, dtype=dtype)
    for x in (wide[:, :96], wide[::3, 32:96], wide[:1].expand(7, 256), wide[:1, :64].as_strided((1, 64), (5, 1))):
        check_bits(h, x, fmt, what=f"{dtype} strides {x.stride()}")


@pytest.mark.parametrize(("fmt", "rule"), RECIPES)
def test_nan_and_infinity_ruin_their_own_group_and_zeros_stay(h, fmt, rule):
    group = FORMATS[fmt].group
    x = h.randn(4, 8 * group)
    x[0, 3], x[1, group], x[2, -1] = (float(v) for v in ("nan", "inf", "-inf"))
    x[3, : 2 * group], x[3, 5] = 0.0, -0.0
    check_bits(h, x, fmt, rule)
    q, scale, whole = mx_quantize(x, fmt, rule)
    back = dequantize(q, scale, fmt, whole).unflatten(1, (8, group))
    ruined = torch.zeros(4, 8, dtype=torch.bool, device=h.device)
    ruined[0, 0] = ruined[1, 1] = ruined[2, 7] = True
    assert torch.equal(back.isnan().all(2), ruined)
    assert torch.equal(back.isnan().any(2), ruined)
    assert (back[3, :2] == 0).all()
    assert (back[3, 2:] != 0).any(1).all()


def test_the_scale_of_a_tensor(h):
    x = h.randn(20, 64)
    x[3, 5], x[4, 6], x[5, 7] = 50.0, float("inf"), float("nan")
    whole = mx_quantize(x, "nvfp4")[2]
    assert whole.item() == pytest.approx(50 / 2688), "of what is finite"
    for given_scale in (whole, whole * 3, whole.reshape(())):
        check_bits(h, x, "nvfp4", tensor_scale=given_scale)
    zeros = torch.zeros(4, 32, device=h.device)
    q, scale, whole = mx_quantize(zeros, "nvfp4")
    assert whole.item() > 0
    assert (dequantize(q, scale, "nvfp4", whole) == 0).all()


# --- tiles of scales


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (128, 4), (129, 5), (300, 9)])
def test_scale_tiles_are_where_the_tensor_cores_look(rows, groups):
    scale = torch.randint(1, 255, (rows, groups), dtype=torch.uint8)
    tiles = swizzle_scales(scale.view(torch.float8_e8m0fnu))
    assert tiles.shape == scales_shape(rows, groups, swizzled=True)
    flat, columns = bits(tiles).flatten(), -(-groups // 4)
    want = torch.zeros_like(flat)
    for r in range(rows):
        for g in range(groups):
            want[((r // 128) * columns + g // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + g % 4] = scale[r, g]
    assert torch.equal(flat, want)
    assert torch.equal(bits(unswizzle_scales(tiles, rows, groups)), scale)


@pytest.mark.parametrize("shape", [(1, 32), (129, 160), (3, 1056), (0, 64), (5, 0)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_quantizer_writes_tiles_itself(h, shape, fmt):
    x = h.randn(*shape, dtype=h.half)
    q, scale, whole = mx_quantize(x, fmt)
    tiled_q, tiles, tiled_whole = mx_quantize(x, fmt, swizzled=True)
    assert torch.equal(bits(q), bits(tiled_q))
    assert torch.equal(bits(swizzle_scales(scale)), bits(tiles))
    assert whole is tiled_whole is None or whole == tiled_whole


# --- products

PRODUCTS = [(1, 1, 32), (37, 53, 96), (128, 128, 128), (129, 130, 160), (5, 3, 0), (0, 4, 32), (4, 0, 32)]


@pytest.mark.parametrize("shape", PRODUCTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(h, shape, fmt):
    check_product(h, *shape, fmt)


@given(M=st.integers(1, 140), N=st.integers(1, 140), K=st.integers(1, 9), fmt=st.sampled_from(tuple(FORMATS)))
def test_any_product(M, N, K, fmt):
    from harness.catalog import Needs
    from harness.session import Harness

    check_product(Harness("test", Needs.parse("triton")), M, N, 32 * K, fmt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_out_dtypes(h, fmt, dtype):
    check_product(h, 20, 30, 128, fmt, dtype)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_band_of_tiles_that_is_not_full(h, fmt, monkeypatch):
    monkeypatch.setattr(microscaling, "GROUP_M", 2)
    check_product(h, 300, 260, 32, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_ruined_group_ruins_its_row_and_no_other(h, fmt):
    a, b = h.randn(20, 64), h.randn(24, 64)
    a[7, 3] = float("nan")
    b[5, 60] = float("inf")
    (aq, a_scale, a_whole), (bq, b_scale, b_whole) = (mx_quantize(x, fmt, swizzled=True) for x in (a, b))
    c = mx_matmul(aq, a_scale, bq, b_scale, fmt, torch.float32, a_whole, b_whole)
    want = torch.zeros(20, 24, dtype=torch.bool, device=h.device)
    want[7], want[:, 5] = True, True
    assert torch.equal(c.isnan(), want)


def test_rows_apart(h):
    """Rows of values with something between them, which must not be read."""
    for fmt, form in FORMATS.items():
        x = Operands.random(h, 9, 11, 64, fmt)
        aq, a_scale, bq, b_scale = x.packed
        wide = torch.full((9, 128), 0xFF, dtype=torch.uint8, device=h.device)
        wide[:, : aq.shape[1]] = bits(aq)
        apart = wide[:, : aq.shape[1]].view(form.element)
        got = mx_matmul(apart, a_scale, bq, b_scale, fmt, torch.float32, *x.tensor_scales)
        assert torch.equal(got, mx_matmul(*x.packed, fmt, torch.float32, *x.tensor_scales))


# --- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "rule"), RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bit_on_the_gpu(h, fmt, rule, dtype):
    for shape in [(2048, 4096), (1001, 4128)]:
        check_bits(h, h.randn(*shape, dtype=dtype, scale=7.0), fmt, rule)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_products_on_the_gpu(h, fmt):
    for shape in [(1024, 2048, 4096), (1000, 1111, 4128), (16, 4096, 8192)]:
        check_product(h, *shape, fmt, torch.bfloat16)
    if not native() and fmt != "nvfp4":
        check_product(h, 1000, 1111, 4128, fmt, torch.bfloat16, emulate=False)
    if native():
        check_product(h, 1000, 1111, 4128, fmt, torch.bfloat16, emulate=True)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_the_library_has_the_same_layouts(h, fmt):
    if not native():
        pytest.skip("torch multiplies these formats from sm_100 on")
    x = Operands.random(h, 256, 384, 512, fmt)
    h.check(scaled_mm(x, fmt, torch.bfloat16), x.reference, *x.packed, what=fmt, dtype=torch.bfloat16, **budget(512))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_more_elements_than_an_int32_counts(h, gpu_gib, fmt):
    gpu_gib(30)
    rows, cols = 2**31 // 4096 + 300, 4096
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device=h.device).normal_()
    whole = mx_quantize(x[:4], fmt)[2]
    q, scale, _ = mx_quantize(x, fmt, tensor_scale=whole, swizzled=True)
    plain = unswizzle_scales(scale, rows, cols // FORMATS[fmt].group)
    for part in (slice(0, 200), slice(-200, None)):
        want = quantized_bytes(x[part], fmt, tensor_scale=whole)
        assert torch.equal(bits(q[part]), want[0])
        assert torch.equal(bits(plain[part]), want[1])


# --- the code


def metas(fmt, rows=4096, K=4096):
    form = FORMATS[fmt]
    q = torch.empty(rows, K // form.pack, dtype=form.element, device="meta")
    scale = torch.empty(scales_shape(rows, K // form.group, swizzled=True), dtype=form.scale, device="meta")
    whole = torch.empty(1, device="meta") if fmt == "nvfp4" else None
    return (q, scale, q, scale, fmt), (whole, whole)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("sm", [90, 100, 120])
def test_generated_code(fmt, sm):
    args, wholes = metas(fmt)
    (kernel,) = compile_for(mx_matmul, (*args, torch.bfloat16, *wholes), sms=(sm,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    assert kernel.found.get("cp.async.bulk.tensor")
    if sm == 90:
        assert kernel.found.get("wgmma")
        assert not kernel.found.get("block_scale"), "an emulation is not to be taken for the instruction"
    else:
        unit = "tcgen05.mma" if sm == 100 else "mma.sync"
        kind = KINDS[fmt][sm == 120]
        assert kernel.found[unit] == kernel.found["block_scale"] == kernel.found[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sm", [90, 120])
def test_other_out_dtypes_spill_nothing(dtype, sm):
    args, wholes = metas("nvfp4")
    (kernel,) = compile_for(mx_matmul, (*args, dtype, *wholes), sms=(sm,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_dot_scaled_before_blackwell_is_no_block_scaled_instruction(fmt):
    args, wholes = metas(fmt)
    (kernel,) = compile_for(mx_matmul, (*args, torch.bfloat16, *wholes), {"emulate": False}, sms=(90,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    assert kernel.found.get("wgmma")
    assert not kernel.found.get("block_scale")


@pytest.mark.parametrize("fmt", FORMATS)
def test_quantizers_load_16_bytes_a_thread(fmt):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    kernels = compile_for(mx_quantize, (x, fmt), {"swizzled": True}, sms=(90, 120))
    assert len(kernels) == (4 if fmt == "nvfp4" else 2), "nvfp4 has a kernel for the tensor's largest value"
    for kernel in kernels:
        assert (kernel.error, kernel.spills) == (None, 0)
        assert kernel.found.get("ld.global.v4")


def test_tiles_by_shared_memory(monkeypatch):
    monkeypatch.setattr(microscaling, "native", lambda: True)
    for kib, tile in ((227, microscaling.LARGE), (99, microscaling.SMALL)):
        monkeypatch.setattr(microscaling, "device_limits", lambda device, n=kib: Limits(1, n * 1024))
        for form in FORMATS.values():
            m, n, k, warps, stages = microscaling.tile_for(torch.device("cpu"), form, emulate=False)
            assert (m, n, k // form.pack, warps, stages) == tile
            assert m % 128 == n % 128 == 0
            assert k // form.group % 4 == 0, "whole tiles of scales"


# --- the demonstration


def test_losses(h):
    found = losses(h, 32, 512)
    assert len(found) == 6
    # What follows from the formats: more bits lose less, and a smaller group keeps outliers from more values.
    for column in ("normal", "outliers x100", "outliers x10000"):
        assert found["mxfp8, scales floor"][column] < found["nvfp4"][column] < found["mxfp4, scales floor"][column]
    assert found["nvfp4"]["bits a value"] == 4.5


def test_demo(h, monkeypatch):
    wanted = []
    monkeypatch.setattr(h, "codegen", lambda *args, find: wanted.append(find))  # test_generated_code compiles
    demo(h)
    assert [(find[100][-1], find[120][-1]) for find in wanted] == list(KINDS.values())
    assert all(check["passed"] for check in h.record.checks)


# --- bad input


def _bad_quantize(device):
    x = torch.randn(4, 64, device=device)
    whole = torch.ones(1, device=device)
    return {
        "no tensor": (([1.0], "mxfp8"), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((x.int(), "mxfp8"), TypeError, r"dtype torch\.int32 is not one of"),
        "float64": ((x.double(), "mxfp4"), TypeError, r"torch\.float64"),
        "no format": ((x, "mxfp6"), ValueError, "format 'mxfp6' is not one of .*nvfp4"),
        "None for a format": ((x, None), ValueError, "format None"),
        "no rule": ((x, "mxfp4", "nearest"), ValueError, r"rule 'nearest' is not one of \('floor', 'up'\)"),
        "a rule for nvfp4": ((x, "nvfp4", "up"), ValueError, "of which nvfp4 has none but the first"),
        "a vector": ((x[0], "mxfp8"), ValueError, r"shape \(64,\); need \[M, K\]"),
        "more columns than a grid": ((x.new_empty(0, 2**27), "mxfp8"), ValueError, "K is 134217728; quantize at most"),
        "K of 48": ((x[:, :48], "mxfp8"), ValueError, r"\(4, 48\); need .* K a multiple of 32, the group of mxfp8"),
        "K of 40 for 16": ((x[:, :40], "nvfp4"), ValueError, "a multiple of 16"),
        "an odd K": ((x[:, :33], "mxfp4"), ValueError, r"\(4, 33\)"),
        "transposed": ((torch.zeros(64, 32, device=device).t(), "mxfp4"), ValueError, r"strides \(1, 32\); rows"),
        "a scale for an mx tensor": ((x, "mxfp8", "floor", whole), ValueError, "mxfp8 has no scale for the tensor"),
        "a number as scale": ((x, "nvfp4", "floor", 2.0), TypeError, "the tensor's scale is float; pass a float32"),
        "a double as scale": ((x, "nvfp4", "floor", whole.double()), TypeError, r"is torch\.float64"),
        "two scales": ((x, "nvfp4", "floor", torch.ones(2, device=device)), ValueError, r"has shape \[2\]"),
        "a zero scale": ((x, "nvfp4", "floor", whole * 0), ValueError, "is 0.0; it must be positive and finite"),
        "a negative scale": ((x, "nvfp4", "floor", -whole), ValueError, "is -1.0"),
        "a NaN scale": ((x, "nvfp4", "floor", whole * float("nan")), ValueError, "is nan"),
        "an infinite scale": ((x, "nvfp4", "floor", whole * float("inf")), ValueError, "is inf"),
        "a scale elsewhere": ((x, "nvfp4", "floor", whole.to("meta")), ValueError, "move them to one device"),
        "requires grad": ((x.clone().requires_grad_(), "mxfp8"), RuntimeError, "no backward"),
        "a device without kernels": ((x.to("meta"), "mxfp8"), RuntimeError, "on meta"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _bad_quantize("cpu"))
def test_bad_input_of_mx_quantize(h, name):
    args, error, message = _bad_quantize(h.device)[name]
    with pytest.raises(error, match=f"mx_quantize: .*{message}"):
        mx_quantize(*args)


def _bad_matmul(device):
    """Empty operands of the right kind, and what is wrong with one of them."""

    def operand(fmt, rows=8, K=64):
        form = FORMATS[fmt]
        q = torch.zeros(rows, K // form.pack, dtype=torch.uint8, device=device).view(form.element)
        shape = scales_shape(rows, K // form.group, swizzled=True)
        return q, torch.zeros(shape, dtype=torch.uint8, device=device).view(form.scale)

    q8, s8 = operand("mxfp8")
    q4, s4 = operand("mxfp4")
    qn, sn = operand("nvfp4")
    whole, half = torch.ones(1, device=device), torch.float16
    raw = torch.zeros(600, dtype=torch.uint8, device=device)
    odd = raw[1:513].view(8, 64).view(torch.float8_e4m3fn)
    return {
        "no tensor": (([1.0], s8, q8, s8, "mxfp8"), TypeError, r"expected a torch\.Tensor, got list"),
        "no format": ((q8, s8, q8, s8, "fp8"), ValueError, "format 'fp8' is not one of"),
        "an out_dtype": ((q8, s8, q8, s8, "mxfp8", torch.int8), TypeError, r"out_dtype torch\.int8 is not one of"),
        "another format": ((q8, s8, q8, s8, "mxfp4"), TypeError, r"a is torch\.float8_e4m3fn with .*; mxfp4 is"),
        "e5m2": ((q8.view(torch.float8_e5m2), s8, q8, s8, "mxfp8"), TypeError, r"a is torch\.float8_e5m2"),
        "bytes for values": ((q4.view(torch.uint8), s4, q4, s4, "mxfp4"), TypeError, r"a is torch\.uint8"),
        "bytes for scales": ((q8, s8, q8, s8.view(torch.uint8), "mxfp8"), TypeError, r"b is .* scales in torch\.uint8"),
        "mx scales": ((qn, s4, qn, sn, "nvfp4", half, whole, whole), TypeError, "in .*e8m0fnu; nvfp4"),
        "a vector": ((q8[0], s8, q8, s8, "mxfp8"), ValueError, r"a has shape \(64,\); need \[rows, K / 1\]"),
        "K of 48": (
            (*operand("nvfp4", 8, 48), qn, sn, "nvfp4", half, whole, whole), ValueError, "K of a is 48; need"),
        "K of 40": ((q8[:, :40], s8, q8, s8, "mxfp8"), ValueError, "K of a is 40"),
        "inner sizes": ((q8, s8, *operand("mxfp8", 8, 96), "mxfp8"), ValueError, "K is 64 of a and 96 of b"),
        "plain scales": ((q8, s8.flatten()[:16].view(8, 2), q8, s8, "mxfp8"), ValueError,
                         r"scales of a have shape \[8, 2\]; need \[1, 1, 32, 16\].*swizzle_scales on \[8, 2\]"),
        "scales of more rows": ((q8, s8, q8, operand("mxfp8", 129)[1], "mxfp8"), ValueError, r"\[2, 1, 32, 16\]; need"),
        "scales transposed": ((q8, s8.transpose(2, 3).contiguous().transpose(2, 3), q8, s8, "mxfp8"), ValueError,
                              "need .* contiguous"),
        "a transposed": ((torch.zeros(64, 64, device=device).to(q8.dtype).t(), s8, q8, s8, "mxfp8"), ValueError,
                         r"a has shape \(64, 64\), strides \(1, 64\)"),
        "an unaligned start": ((odd, s8, q8, s8, "mxfp8"), ValueError, "a has .* starts 1 bytes past"),
        "no scale of the tensor": ((qn, sn, qn, sn, "nvfp4"), ValueError, "needs a scale for the tensor, got NoneType"),
        "only one": ((qn, sn, qn, sn, "nvfp4", half, whole), ValueError, "nvfp4 needs a scale"),
        "a superfluous one": ((q8, s8, q8, s8, "mxfp8", half, whole), ValueError, "mxfp8 has no scale for the tensor"),
        "no emulation of nvfp4": (
            (qn, sn, qn, sn, "nvfp4", half, whole, whole, False), ValueError, "cannot decode nvfp4 .*emulate=False"),
        "a zero one": ((qn, sn, qn, sn, "nvfp4", half, whole * 0, whole), ValueError, "must be positive and finite"),
        "a NaN one": ((qn, sn, qn, sn, "nvfp4", half, whole, whole * float("nan")), ValueError, "is nan"),
        "half a one": ((qn, sn, qn, sn, "nvfp4", half, whole.half(), whole), TypeError, r"is torch\.float16"),
        "two devices": ((q8, s8, q8.to("meta"), s8, "mxfp8"), ValueError, "move them to one device"),
        "scales elsewhere": ((q8, s8.to("meta"), q8, s8, "mxfp8"), ValueError, "move them to one device"),
        "a device without kernels": ((*(x.to("meta") for x in (q8, s8, q8, s8)), "mxfp8"), RuntimeError, "on meta"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _bad_matmul("cpu"))
def test_bad_input_of_mx_matmul(h, name):
    if name == "no emulation of nvfp4" and native():
        pytest.skip("this GPU needs none")
    args, error, message = _bad_matmul(h.device)[name]
    with pytest.raises(error, match=f"mx_matmul: .*{message}"):
        mx_matmul(*args)
