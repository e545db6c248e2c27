"""fp8_attention: edges of a tile, heads, scales, layouts, the order of keys, NaN, bad input, the code."""

import functools
import re

from harness.check import judge
from harness.codegen import dump

import pytest
import torch

from examples.common.attention import attention_budget
from examples.common.fp8 import E4M3
from examples.fp8.fp8_attention import TILES, VARIANTS, fp8_attention
from examples.fp8.fp8_attention_operands import dequantize, off_by, pack_values, prepare, reference, unpack_values
from tests.examples.fp8.helpers import NAN, code, meta, refused


def qkv(h, B, H, S, D, H_kv=None, S_kv=None, **options):
    q = h.randn(B, H, S, D, dtype=h.half)
    k, v = (h.randn(B, H_kv or H, S_kv or S, D, dtype=h.half) for _ in range(2))
    return prepare(q, k, v, **options)


def check(h, *data, what="fp8 attention", dtype=None):
    for variant in VARIANTS[: 1 + (h.machine.sm == 90 and not h.interpreted)]:
        fn = functools.partial(fp8_attention, out_dtype=dtype or h.half, variant=variant)
        h.check(fn, reference, *data, what=what, dtype=dtype or h.half, **attention_budget(E4M3, data[1].shape[2]))


# One query, one key, around 16 keys, around a block, several blocks with and without a rest.
SHAPES = [(1, 1, 64), (1, 200, 64), (200, 1, 128), (37, 15, 64), (64, 17, 128), (128, 128, 64), (129, 127, 128)]
SHAPES = [(*each, False) for each in (*SHAPES, (130, 384, 64), (257, 300, 128))]
SHAPES += [(S, S, 128 if S % 2 else 64, True) for S in (1, 16, 127, 128, 300)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(h, shape):
    S, S_kv, D, causal = shape
    check(h, *qkv(h, 1, 2, S, D, S_kv=S_kv), causal, dtype=torch.bfloat16 if S % 2 else torch.float16)


def test_heads_meet_their_own_keys_and_scales(h):
    """Two tiles of queries each; every head of another size, so that a wrong scale shows."""
    for B, H, H_kv, causal, per_head in [(1, 3, 1, True, True), (2, 6, 3, False, True), (11, 1, 1, True, False),
                                         (2, 4, 2, False, False)]:  # fmt: skip
        q, k, v = (h.randn(B, heads, 130, 64, dtype=h.half) for heads in (H, H_kv, H_kv))
        for x in (q, k, v):
            heads = x.shape[0] * x.shape[1]
            x *= torch.linspace(0.2, 2, heads, device=x.device).view(*x.shape[:2], 1, 1).to(x.dtype)
        check(h, *prepare(q, k, v, per_head), causal, 0.02 if H == 3 else None, what=f"{B} {H} {H_kv} {per_head}")
    q, k, v, q_scale, k_scale, v_scale = qkv(h, 1, 1, 70, 64)
    check(h, q, k, v, q_scale * 8, k_scale * 8, v_scale, True, what="peaked rows")
    check(h, q, k, v, q_scale * 2.0**-100, k_scale * 2.0**100, v_scale, True, what="scales that cancel")
    check(h, q, k, v, q_scale, k_scale, v_scale * 2**14, False, what="values near the largest of float16")


def test_what_rounding_the_weights_costs(h):
    """Evenly spread in a binade it would be 0.026; and nothing is lost on average."""
    for D, causal, S_kv in [(64, False, 200), (128, True, 300)]:
        data = qkv(h, 1, 4, 300, D, H_kv=2, S_kv=S_kv)
        o, want = fp8_attention(*data, causal, out_dtype=h.half), reference(*data, causal)
        assert 0.01 < off_by(o, want) < 0.04
        assert ((o.double() * want).sum() / want.square().sum()).item() == pytest.approx(1, abs=0.01)


def test_layouts(h):
    q, k, v, *scales = qkv(h, 2, 3, 70, 64)
    wanted = fp8_attention(q, k, v, *scales, out_dtype=h.half)
    assert wanted.is_contiguous()
    assert fp8_attention(q[:, :, :0], k, v, *scales).shape == (2, 3, 0, 64)  # nothing to attend from

    def strided(x):  # rows 16 bytes apart, and heads beside rows in memory
        wide = torch.zeros(x.shape[0], x.shape[2], x.shape[1], x.shape[3] + 16, dtype=torch.uint8, device=x.device)
        wide[..., : x.shape[3]] = x.view(torch.uint8).transpose(1, 2)
        return wide.view(E4M3)[..., : x.shape[3]].transpose(1, 2)

    turned = [s.t().contiguous().t() for s in scales]
    for layout in ((strided(q), k, v, *scales), (q, strided(k), strided(v), *scales), (q, k, v, *turned)):
        assert torch.equal(fp8_attention(*layout, out_dtype=h.half), wanted)


def test_packing_and_preparing(h):
    for S_kv in (1, 15, 16, 17, 100):
        v = h.randn(2, 3, S_kv, 64)
        packed = pack_values(v)
        assert packed.shape == (2, 3, 64, -(-S_kv // 16) * 16)
        assert packed.is_contiguous()
        assert torch.equal(unpack_values(packed, S_kv), v)
    keys = torch.arange(32, device=h.device).float().view(1, 1, 32, 1)
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert pack_values(keys).flatten().tolist() == order + [16 + n for n in order]
    q, k, v = h.randn(2, 4, 37, 64, dtype=h.half), *(h.randn(2, 2, 50, 64, dtype=h.half) for _ in range(2))
    for per_head in (True, False):
        data = prepare(q, k, v, per_head)
        for x, got in zip((q, k, v), dequantize(*data), strict=True):
            amax = x.double().abs().amax((2, 3) if per_head else None, keepdim=True)
            # half a step of 3 bits, or of the smallest numbers
            assert ((got - x.double()).abs() <= x.double().abs() * 2**-4 + amax / 448 * 2**-10 + 1e-9).all()
    data = prepare(q, k, v, power_of_two=True)
    assert (torch.frexp(data[3]).mantissa == 0.5).all()
    assert (data[0].float().abs().amax((2, 3)) > 200).all()
    assert all(torch.equal(got.to(h.half).double(), got) for got in dequantize(*data)), "exact in 16 bits"


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy, in the interpreter
def test_nan_goes_where_it_must(h):
    data = qkv(h, 1, 1, 300, 64)
    fn = functools.partial(fp8_attention, causal=True, out_dtype=h.half, variant="tiles")
    clean = fn(*data)

    def poisoned(which, *place):
        x = data[which].clone()
        x.view(torch.uint8)[place] = 0x7F  # NaN
        return fn(*data[:which], x, *data[which + 1 :])

    for which, row in ((0, 7), (1, 200)):  # a query, and a key that later queries see
        o, hit = poisoned(which, 0, 0, row, 3), slice(row, row + 1) if which == 0 else slice(row, None)
        assert torch.isnan(o[0, 0, hit]).all()
        o[0, 0, hit] = clean[0, 0, hit]
        assert torch.equal(o, clean)
    # A hidden value has weight 0, and 0 * NaN is NaN: it reaches the rows of its block of keys, and none before.
    o, start = poisoned(2, 0, 0, 5, 200), 200 // TILES[64][1] * TILES[64][1]
    assert torch.equal(o[0, 0, :start], clean[0, 0, :start])
    assert torch.isnan(o[0, 0, start:, 5]).all()
    assert torch.equal(o[..., 6:], clean[..., 6:])


def test_bad_input(h):
    q, k, v, one, *_ = qkv(h, 2, 4, 10, 64, per_head=False)
    heads = torch.ones(2, 4, device=h.device)
    cases = [
        ({"k": k[:, :3], "v": v[:, :3]}, ValueError, "a number of heads dividing H"),
        ({"v": q}, ValueError, r"v must be \(2, 4, 64, 16\), as pack_values\(\) makes it"),
        ({"k": k[:, :2], "v": v[:, :2], "k_scale": heads}, ValueError, r"k_scale has shape .* need \[\] or \[2, 2\]"),
        ({"v_scale": -heads}, ValueError, "v_scale has 8 of 8 values that are not positive"),
        *(({name: wrong}, TypeError, "") for name, wrong in (("out_dtype", E4M3), ("causal", 1))),
    ]
    good = {"q": q, "k": k, "v": v, "q_scale": one, "k_scale": one, "v_scale": one}
    refused([(fp8_attention, *case) for case in cases], **good)

    heads[0, 1] = NAN  # not looked at, it shows in the result
    o = fp8_attention(**good | {"q_scale": heads}, check_scales=False)
    assert o.isnan().all((2, 3)).tolist() == [[False, True, False, False], [False] * 4]
    assert o.isnan().sum() == o[0, 1].numel()


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(h, gpu_gib):
    gpu_gib(12)
    q, k, v, *scales = qkv(h, 1, 2, 16384, 128, H_kv=1)
    queries = q[:, :1].view(torch.uint8).expand(1, 1025, 16384, 128).contiguous()
    queries[:, -1] = q[:, 1].view(torch.uint8)
    assert queries.numel() > 2**31
    one = scales[0].amax().clone()
    o = fp8_attention(queries.view(E4M3), k, v, one, *scales[1:], True)
    for head, source in ((0, 0), (1023, 0), (1024, 1)):
        want = reference(q[:, source : source + 1], k, v, one, *scales[1:], True)
        judge(o[:, head : head + 1], want, what=f"head {head}", dtype=torch.bfloat16, **attention_budget(E4M3, 16384))


def test_what_hopper_is_given():
    """No weight moves between threads, no wgmma waits for another, two programs share an SM, and a product runs beside
    the next weights."""
    q, scale = meta(4, 32, 4096, 128), meta(4, 32, dtype=torch.float32)
    args = (q, q, q.transpose(2, 3).contiguous(), scale, scale, scale, True)
    kernel = code(90, (), fp8_attention, *args, variant="tiles")
    assert kernel.warps == TILES[128][2]
    assert 2 * (kernel.shared + 1024) <= 228 * 1024
    assert 2 * 32 * kernel.warps * kernel.registers <= 65536
    assert kernel.found["mma f8"] == kernel.found["wgmma"], "both products in FP8"
    texts = dump(fp8_attention, args, {"variant": "tiles"}, sm=90)
    ptx = texts["ptx"]
    assert "erializ" not in texts["log"], "ptxas would wait for every wgmma by itself"
    # Maximum and sum of two rows a thread over the four threads that share them, in the opening and in the loop.
    assert len(re.findall(r"shfl\.sync\.bfly", ptx)) == 2 * 2 * 2 * 2
    left = re.findall(r"wgmma\.mma_async\.sync\.aligned\.\S+\s*\{[^}]*\},\s*(\{|%)", ptx)
    assert set(left) == {"{"}, "the left operands come from registers"
    loop = texts["ttgir"].split("scf.for")[1].split("scf.yield")[0]
    products = [line for line in loop.splitlines() if "ttng.warp_group_dot " in line]
    assert len(products) == 2
    assert all("isAsync = true" in line for line in products)
    # In the machine code, most of the next weights are computed while a product runs: 66 exponentials a thread.
    running = [part.split("WARPGROUP.DEPBAR")[0] for part in texts["sass"].split("WARPGROUP.ARRIVE")[1:]]
    assert max(part.count("MUFU.EX2") for part in running) > 33
