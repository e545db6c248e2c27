"""microscaling: every code, the specification's rules bit for bit, scale tiles, products, bad input, the code."""

import functools

import pytest
import torch

from examples.common import microscaling as common
from examples.common.microscaling import FORMATS, NV_SPAN, dequantize, scales_shape, swizzle_scales
from examples.fp8 import microscaling
from examples.fp8.microscaling import KINDS, budget, mx_matmul, native
from examples.fp8.microscaling_quantize import Operands, expected_bytes, mx_quantize, quantized_bytes, scaled_mm
from tests.examples.fp8.helpers import INF, NAN, bits, code, meta, refused

RECIPES = [("mxfp8", "floor"), ("mxfp8", "up"), ("mxfp4", "floor"), ("mxfp4", "up"), ("nvfp4", "floor")]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
CPU = torch.device("cpu")


def check_bits(h, x, fmt, rule="floor", tensor_scale=None, what="bits"):
    what = f"{what} {fmt} {rule} {tuple(x.shape)}"
    h.check(quantized_bytes, expected_bytes, x, fmt, rule, tensor_scale, what=what, dtype=torch.uint8)


def check_product(h, M, N, K, fmt, dtype=torch.float32, **options):
    x = Operands.random(h, M, N, K, fmt)
    fn = functools.partial(mx_matmul, fmt=fmt, out_dtype=dtype, **x.wholes, **options)
    h.check(fn, x.reference, *x.packed, what=f"{fmt} {M}x{N}x{K}", dtype=dtype, **budget(K))


def test_the_formats_are_what_they_are_by_definition():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    for off, want in ((0, [0, 2, 2, 4, 4, 6, 6]), (1e-12, range(1, 8)), (-1e-12, range(7))):  # ties to even codes
        assert common.nearest(middles + off, common.values_of(common.FP4, CPU)).tolist() == list(want)
    # Every byte of e2m1 is two values, the first in the low half; every code of e8m0 a power of two, the last NaN.
    q = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16).view(torch.float4_e2m1fn_x2)
    got = dequantize(q, torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e8m0fnu), "mxfp4")[:, :2]
    want = [[E2M1[code % 16] * 2.0 ** (code - 127), E2M1[code // 16] * 2.0 ** (code - 127)] for code in range(255)]
    assert got[:255].tolist() == want
    assert got[255].isnan().all()
    # Scale tiles are where the tensor cores look.
    rows, groups = 300, 9
    scale = torch.randint(1, 255, (rows, groups), dtype=torch.uint8)
    tiles = swizzle_scales(scale.view(torch.float8_e8m0fnu))
    assert tiles.shape == scales_shape(rows, groups, swizzled=True)
    flat, columns = bits(tiles).flatten(), -(-groups // 4)
    want, r, g = torch.zeros_like(flat), torch.arange(rows)[:, None], torch.arange(groups)
    want[((r // 128) * columns + g // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + g % 4] = scale
    assert torch.equal(flat, want)


def _whole(fmt, device):
    return torch.ones(1, device=device) if fmt == "nvfp4" else None


def decoded_by_the_kernel(q, scale, fmt):
    """The product with an identity; with 6 of them for nvfp4, in which 1 is 6 * e4m3(1 / 6) and not exact."""
    times, whole = 6.0 if fmt == "nvfp4" else 1.0, _whole(fmt, q.device)
    b, b_scale, _ = mx_quantize(times * torch.eye(32, device=q.device), fmt, tensor_scale=whole, swizzled=True)
    return mx_matmul(q, swizzle_scales(scale), b, b_scale, fmt, torch.float32, whole, whole).double() / times


@pytest.mark.parametrize(("fmt", "first", "end"), [("mxfp8", 16, 247), ("mxfp4", 4, 253), ("nvfp4", 0, 127)])
def test_the_kernel_decodes_every_value_and_scale(h, fmt, first, end):
    """Scales of mx whose values stay in the range of the 16-bit operands and of the result; of nvfp4 all but NaN."""
    form, every = FORMATS[fmt], torch.arange(256, dtype=torch.uint8, device=h.device)
    codes = every[~(every.view(torch.float8_e4m3fn).float().isnan())] if form.pack == 1 else every
    q = codes[:, None].repeat(1, 32 // form.pack).view(form.element)
    scale = torch.ones(len(codes), 32 // form.group, device=h.device).to(form.scale)
    assert torch.equal(decoded_by_the_kernel(q, scale, fmt), dequantize(q, scale, fmt))
    scale = every[first:end, None].repeat(1, 32 // form.group).view(form.scale)
    value = 0x76 if form.pack == 2 else 0x7E  # the largest, and 4 beside 6
    q = torch.full((end - first, 32 // form.pack), value, dtype=torch.uint8, device=h.device).view(form.element)
    assert torch.equal(decoded_by_the_kernel(q, scale, fmt), dequantize(q, scale, fmt))


def test_bytes_worked_out_by_hand(h):
    x, codes = torch.tensor([E2M1 * 2], device=h.device), [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2]
    q, scale, _ = mx_quantize(x, "mxfp4")  # amax 6: floor(log2 6) - 2 is 0
    assert (bits(scale).tolist(), bits(q).tolist()) == ([[127]], codes)
    q, scale, whole = mx_quantize(x / 4, "nvfp4")
    assert whole.item() == pytest.approx(1.5 / NV_SPAN)
    assert (scale.float().tolist(), bits(q).tolist()) == ([[448.0, 448.0]], codes)
    for fmt, rule, amax, scale_code, largest in [
        ("mxfp4", "floor", 7.9, 127, 6.0),  # saturates, as the specification has it
        ("mxfp4", "up", 6.0, 127, 6.0),  # no more than it takes
        ("mxfp4", "up", 6.0000005, 128, 6.0),
        ("mxfp8", "floor", 511.0, 127, 448.0),
        ("mxfp8", "up", 511.0, 128, 512.0),
    ]:
        q, scale, _ = mx_quantize(torch.full((1, 32), amax, device=h.device), fmt, rule)
        assert (bits(scale).item(), dequantize(q, scale, fmt)[0, 0].item()) == (scale_code, largest)


@pytest.mark.parametrize(("fmt", "rule"), RECIPES)
def test_every_magnitude_gets_its_scale(h, fmt, rule):
    """amax of each power of two, a little below and 1.5 and 1.76 times it, subnormal numbers among them; for nvfp4 from
    below the smallest scale to beyond the largest, which a given tensor's scale allows."""
    powers = torch.tensor([2.0**k for k in range(-149, 128)], dtype=torch.float64)
    amax = torch.cat([powers, powers * (1 - 2**-24), powers * 1.5, powers * 1.76]).float()
    if fmt == "nvfp4":
        amax = torch.cat([common.values_of(torch.float8_e4m3fn, CPU).float() * 6 * step for step in (0.97, 1.0, 1.03)])
        amax = torch.cat([amax, torch.tensor([1e-5, 1e5, 3e38])])
    x = (amax[amax.isfinite()][:, None] * torch.linspace(-1, 1, FORMATS[fmt].group)).to(h.device)
    check_bits(h, x, fmt, rule, _whole(fmt, h.device))
    found = bits(mx_quantize(x, fmt, rule, _whole(fmt, h.device))[1])
    wanted = {"mxfp8": range(247 + (rule == "up")), "mxfp4": range(253 + (rule == "up")), "nvfp4": range(1, 127)}
    assert found.unique().tolist() == list(wanted[fmt]), "nvfp4: never 0, so that no scale is, and never NaN"


# One row, one group, primes, a tile of scales and one row or group more, more columns than a program, nothing.
SHAPES = [(1, 32), (37, 96), (129, 160), (3, 1056), (0, 64), (5, 0)]


@pytest.mark.parametrize(("case", "shape"), list(enumerate(SHAPES)), ids=str)
def test_shapes_plain_and_in_tiles(h, case, shape):
    for i, (fmt, rule) in enumerate((RECIPES[case % 5], RECIPES[(case + 2) % 5])):
        x = h.randn(shape[0], shape[1] + 8 * i, dtype=h.half, scale=3.0)[:, : shape[1]]  # rows apart in memory
        check_bits(h, x, fmt, rule)
        (q, scale, _), (tiled_q, tiles, _) = (mx_quantize(x, fmt, rule, swizzled=each) for each in (False, True))
        assert torch.equal(bits(q), bits(tiled_q))
        assert torch.equal(bits(swizzle_scales(scale)), bits(tiles))
    check_bits(h, h.randn(*shape, dtype=h.half, scale=2.0**-10), "nvfp4", what="far below 1")


@pytest.mark.parametrize(("fmt", "rule"), [RECIPES[0], RECIPES[3], RECIPES[4]])
def test_nan_and_infinity_ruin_their_own_group_and_zeros_stay(h, fmt, rule):
    group = FORMATS[fmt].group
    x = h.randn(4, 8 * group)
    x[0, 3], x[1, group], x[2, -1] = NAN, INF, -INF
    x[3, : 2 * group], x[3, 5] = 0.0, -0.0
    check_bits(h, x, fmt, rule)
    q, scale, whole = mx_quantize(x, fmt, rule)
    back = dequantize(q, scale, fmt, whole).unflatten(1, (8, group))
    for every in (back.isnan().all(2), back.isnan().any(2)):
        assert every.nonzero().tolist() == [[0, 0], [1, 1], [2, 7]]
    assert (back[3, :2] == 0).all()


def test_the_scale_of_a_tensor(h):
    x = h.randn(20, 64)
    x[3, 5], x[4, 6], x[5, 7] = 50.0, INF, NAN
    whole = mx_quantize(x, "nvfp4")[2]
    assert whole.item() == pytest.approx(50 / 2688), "of what is finite"
    for given_scale in (whole * 3, whole.reshape(())):
        check_bits(h, x, "nvfp4", tensor_scale=given_scale)
    q, scale, whole = mx_quantize(torch.zeros(4, 32, device=h.device), "nvfp4")
    assert whole.item() > 0
    assert not dequantize(q, scale, "nvfp4", whole).any()


PRODUCTS = [(1, 1, 32), (37, 53, 96), (128, 128, 128), (129, 260, 160), (5, 3, 0), (0, 4, 32)]


@pytest.mark.parametrize(("case", "shape"), list(enumerate(PRODUCTS)), ids=str)
def test_products(h, case, shape, monkeypatch):
    monkeypatch.setattr(microscaling, "GROUP_M", 1 + case % 3)  # 2 for one group of tiles that is full and one not
    dtype = (torch.float32, torch.float16, torch.bfloat16)[case % 3]
    for fmt in FORMATS if case == 3 else (tuple(FORMATS)[case % 3], "nvfp4"):
        check_product(h, *shape, fmt, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "rule"), RECIPES)
def test_shapes_on_the_gpu(h, fmt, rule):
    for dtype, shape in [(torch.bfloat16, (2048, 4096)), (torch.float32, (1001, 4128))]:
        check_bits(h, h.randn(*shape, dtype=dtype, scale=7.0), fmt, rule)
    for shape in [(1024, 2048, 4096), (1000, 1111, 4128), (16, 4096, 8192)]:
        for emulate in (True, False) if native() or fmt != "nvfp4" else (True,):
            check_product(h, *shape, fmt, torch.bfloat16, emulate=emulate)
    if native() and fmt != "mxfp4":  # the library has the same layouts
        x = Operands.random(h, 256, 384, 512, fmt)
        h.check(scaled_mm(x, fmt, torch.bfloat16), x.reference, *x.packed, dtype=torch.bfloat16, **budget(512))


@pytest.mark.parametrize(("fmt", "sm"), [("mxfp8", 100), ("nvfp4", 90)])
def test_generated_code(fmt, sm):
    form = FORMATS[fmt]
    q, shape = meta(4096, 4096 // form.pack, dtype=form.element), scales_shape(4096, 4096 // form.group, swizzled=True)
    scale = meta(*shape, dtype=form.scale)
    found = code(sm, (), mx_matmul, q, scale, q, scale, fmt, torch.float32, *[_whole(fmt, "meta")] * 2).found
    if sm == 90:
        assert not found.get("block_scale"), "an emulation is not to be taken for the instruction"
    else:
        assert found["tcgen05.mma"] == found["block_scale"] == found[KINDS[fmt][0]]


def test_bad_input(h):
    x, one = h.randn(4, 64), torch.ones(1, device=h.device)
    (q8, s8, _), (longer, its, _) = (mx_quantize(h.randn(8, K), "mxfp8", swizzled=True) for K in (64, 96))
    qn, sn, whole = mx_quantize(h.randn(8, 64), "nvfp4", swizzled=True)
    cases = [
        (mx_quantize, (x, "mxfp6"), "format 'mxfp6' is not one of .*nvfp4"),
        (mx_quantize, (x, "nvfp4", "up"), "rule 'up' is not one of .* of which nvfp4 has none but the first"),
        (mx_quantize, (x.new_empty(0, 2**27), "mxfp8"), "K is 134217728; quantize at most"),
        (mx_quantize, (x[:, :48], "mxfp8"), r"\(4, 48\); need .* K a multiple of 32, the group of mxfp8"),
        (mx_quantize, (x, "nvfp4", "floor", one * NAN), "is nan; it must be positive and finite"),
        (mx_matmul, (q8, s8, longer, its, "mxfp8"), "K is 64 of a and 96 of b"),
        (mx_matmul, (q8, s8.flatten()[:16].view(8, 2), q8, s8, "mxfp8"), r"swizzle_scales on \[8, 2\]"),
        (mx_matmul, (qn, sn, qn, sn, "nvfp4", torch.float16, whole), "needs a scale for the tensor, got NoneType"),
    ]
    if not native():
        args = qn, sn, qn, sn, "nvfp4", torch.float16, whole, whole, False
        cases.append((mx_matmul, args, r"cannot decode nvfp4 .*emulate=False"))
    refused([(fn, args, ValueError, message) for fn, args, message in cases])
