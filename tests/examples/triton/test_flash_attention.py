"""flash_attention: every edge of a tile, heads and layouts, infinities and NaN, other tiles, bad input, the code."""

import math
import re

from harness.check import CheckError, judge
from harness.codegen import compile_for, dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.triton.flash_attention import (
    DTYPES,
    HEADS,
    TILES,
    budget,
    flash_attention,
    flops,
    library_variants,
    reference,
)
from examples.triton.warp_specialized_matmul import programs_per_sm

INF, NAN = float("inf"), float("nan")


def qkv(h, B, H, S, D, H_kv=None, S_kv=None, dtype=None):
    q = h.randn(B, H, S, D, dtype=dtype or h.half)
    k, v = (h.randn(B, H_kv or H, S_kv or S, D, dtype=dtype or h.half) for _ in range(2))
    return q, k, v


def check(h, q, k, v, causal=False, scale=None, what="attention"):
    h.check(flash_attention, reference, q, k, v, causal, scale, what=what, **budget(q.dtype, k.shape[2]))


# One query, one key, primes, one block of keys, one tile, one more of each, several.
@pytest.mark.parametrize(
    ("S", "S_kv"), [(1, 1), (1, 200), (200, 1), (37, 61), (64, 64), (128, 65), (129, 128), (257, 300)]
)
@pytest.mark.parametrize("D", TILES)
def test_shapes(h, S, S_kv, D):
    check(h, *qkv(h, 1, 2, S, D, S_kv=S_kv))


@pytest.mark.parametrize("S", [1, 63, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("D", TILES)
def test_causal_shapes(h, S, D):
    check(h, *qkv(h, 1, 2, S, D), True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("B", "H", "H_kv"), [(1, 3, 1), (1, 8, 2), (2, 6, 3), (17, 1, 1)])
def test_heads_meet_their_own_keys(h, causal, B, H, H_kv):
    """Fewer heads than a band, exactly one, a last band that is not full; two tiles of queries each."""
    assert HEADS == 8
    check(h, *qkv(h, B, H, 130, 64, H_kv=H_kv), causal)


@given(
    B=st.integers(1, 3), H_kv=st.integers(1, 3), group=st.integers(1, 3), S=st.integers(1, 200),
    S_kv=st.integers(1, 200), D=st.sampled_from(list(TILES)), causal=st.booleans(),
    scale=st.sampled_from([None, 0.02, 1]),
)  # fmt: skip
def test_any_shape(B, H_kv, group, S, S_kv, D, causal, scale):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    inputs = qkv(h, B, H_kv * group, S, D, H_kv=H_kv, S_kv=S if causal else S_kv)
    check(h, *inputs, causal, scale, what=f"{B}x{H_kv}*{group}x{S}x{S_kv}x{D} {causal} {scale}")


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_to_attend_from(h, causal):
    for B, H, S in ((0, 2, 5), (2, 0, 5)):
        o = flash_attention(*qkv(h, B, H, S, 64, H_kv=2), causal)
        assert (o.shape, o.dtype) == ((B, H, S, 64), h.half)
    q, k, v = qkv(h, 2, 3, 5, 64)
    assert flash_attention(q[:, :, :0], k, v).shape == (2, 3, 0, 64)


def test_layouts(h):
    B, H, S, D = 2, 3, 70, 64
    packed = h.randn(B, S, 3, H, D, dtype=h.half)  # one projection for all three: views of it, at three starts
    wide = h.randn(3, B, H, S, D + 8, dtype=h.half)  # rows apart
    cache = h.randn(2, B, H, 4 * S, D, dtype=h.half)  # more keys in memory than are used
    odd = h.randn(1, 1, S, D, dtype=h.half).as_strided((1, 1, S, D), (7, 3, D, 1))  # strides nobody steps by
    heads = h.randn(B, 2 * H, S, D, dtype=h.half)[:, ::2]
    for q, k, v in (
        packed.transpose(1, 3).unbind(2),
        wide[..., :D].unbind(0),
        (heads, *cache[..., :S, :].unbind(0)),
        (odd, odd.flip(2), odd),
    ):
        o = flash_attention(q, k, v)
        assert o.is_contiguous()
        for causal in (False, True):
            check(h, q, k, v, causal, what=f"strides {q.stride()}, {k.stride()}")


@pytest.mark.parametrize("scale", [0.01, 1, 2.5, 2**-126])
def test_scales(h, scale):
    check(h, *qkv(h, 1, 2, 90, 64), False, scale)


@pytest.mark.parametrize("tile", [(128, 128, 4, 1), (128, 32, 4, 3), (64, 64, 4, 2), (32, 16, 4, 2)])
def test_other_tiles_of_who_copies_the_kernel(h, monkeypatch, tile):
    monkeypatch.setitem(TILES, 64, (*tile, True))
    inputs = qkv(h, 1, 2, 150, 64, H_kv=1)
    for causal in (False, True):
        check(h, *inputs, causal)


def test_a_block_of_keys_that_would_cross_the_diagonal_is_refused(h, monkeypatch):
    monkeypatch.setitem(TILES, 64, (64, 128, 4, 2, False))
    inputs = qkv(h, 1, 1, 200, 64)
    check(h, *inputs)  # without a diagonal it is fine
    with pytest.raises(Exception, match="the last whole block would cross the diagonal"):
        flash_attention(*inputs, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", TILES)
def test_large_and_tiny_values(h, causal, D):
    q, k, v = qkv(h, 1, 2, 150, D)
    check(h, q * 8, k * 8, v, causal, what="peaked rows")
    check(h, q * 0.01, k, v, causal, what="flat rows")
    check(h, q * 2.0**-18, k * 2.0**13, v, causal, 4.0, what="queries near the smallest, large keys")
    check(h, q * 2.0**13, k * 2.0**-18, v, causal, 4.0, what="large queries, keys near the smallest")
    check(h, q, k, v * 2**-18, causal, what="values near the smallest")
    check(h, q, k, v.clamp(-1, 1) * 60000, causal, what="values near the largest")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", TILES)
@pytest.mark.parametrize("key", [0, 140])
def test_one_huge_score(h, causal, D, key):
    """Before it everything is scaled down to nothing, after it everything is nothing: the row is that key's value."""
    q, k, v = qkv(h, 1, 1, 150, D)
    q[0, 0, 145] = 100.0
    k[0, 0, key] = 100.0
    check(h, q, k, v, causal)
    assert torch.allclose(flash_attention(q, k, v, causal)[0, 0, 145], v[0, 0, key], rtol=2 * torch.finfo(h.half).eps)
    k[0, 0, key] = -100.0  # and one that is out of reach
    check(h, q, k, v, causal)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("D", TILES)
def test_infinities_and_nan_are_those_of_torch(h, D):
    """Scores of -inf cost a key its weight, wherever its block is; a row with nothing else, +inf or NaN is NaN."""
    q, k, v = qkv(h, 1, 3, 300, D)
    q[..., 0].abs_().add_(1)
    q[0, 0, 7, 0] = -1.0  # turns -inf to +inf
    q[0, 0, 9, 0] = 0.0  # 0 * inf
    k[0, 0, :150, 0] = -INF  # the first whole blocks, and a part of one
    k[0, 1, 128:, 0] = -INF  # all but the first
    q[0, 1, 5, 3] = NAN  # one row
    k[0, 2, :, 0] = -INF  # nothing left
    check(h, q, k, v)
    o = flash_attention(q, k, v)
    rows_of_nan = torch.isnan(o).all(-1)
    assert torch.equal(torch.isnan(o).any(-1), rows_of_nan)
    assert rows_of_nan[0].sum(-1).tolist() == [2, 1, 300]
    # Causal: a query before the first key with a finite score has nothing to attend to.
    check(h, q, k, v, True)
    assert torch.isnan(flash_attention(q, k, v, True)).all(-1)[0].sum(-1).tolist() == [150, 1, 300]


@pytest.mark.parametrize("D", TILES)
def test_infinities_and_nan_in_k_and_v(h, D):
    q, k, v = qkv(h, 1, 1, 140, D)
    k[0, 0, 100, 2] = NAN
    check(h, q, k, v, True, what="NaN in a key reaches the queries that see it")
    assert torch.isnan(flash_attention(q, k, v, True)[0, 0]).all(-1).sum() == 40
    k[0, 0, 100, 2] = 1.0
    v[0, 0, 20, 3], v[0, 0, 135, 4], v[0, 0, 3, 5], v[0, 0, 137, 5], v[0, 0, 50, 6] = INF, -INF, INF, -INF, NAN
    check(h, q, k, v, what="infinities and NaN stay in their column of the values")


def test_a_hidden_value_that_is_not_finite_reaches_its_tile_and_no_other(h):
    """0 * NaN: torch, which multiplies all weights with all values, loses every row."""
    q, k, v = qkv(h, 1, 1, 300, 64)
    clean = flash_attention(q, k, v, True)
    v[0, 0, 200, 3] = NAN
    o = flash_attention(q, k, v, True)
    start = 200 // TILES[64][0] * TILES[64][0]
    assert torch.equal(o[:, :, :start], clean[:, :, :start])
    assert torch.isnan(o[0, 0, 200:, 3]).all()
    assert torch.equal(o[..., 4:], clean[..., 4:])
    assert torch.isnan(reference(q, k, v, True)[..., 3]).all()


@pytest.mark.parametrize("causal", [False, True])
def test_weights_sum_to_one(h, causal):
    q, k, v = qkv(h, 1, 2, 200, 64)
    o = flash_attention(q * 3, k, torch.ones_like(v), causal)
    assert (o.double() - 1).abs().max() < 2 * torch.finfo(h.half).eps


def test_keys_in_any_order(h):
    q, k, v = qkv(h, 1, 2, 100, 64, S_kv=300)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).to(h.device)
    want = reference(q, k, v)
    for keys in (order, order.flip(0)):
        o = flash_attention(q, k[:, :, keys], v[:, :, keys])
        judge(o, want, what="permuted", dtype=h.half, **budget(h.half, 300))


def test_the_check_finds_a_block_that_was_left_out_and_a_wrong_head(h):
    q, k, v = qkv(h, 1, 4, 130, 64, H_kv=2, S_kv=140)
    want = reference(q, k, v)
    for got in (
        flash_attention(q, k[:, :, :139], v[:, :, :139]),
        flash_attention(q, k.flip(1), v.flip(1)),
        flash_attention(q, k, v, scale=0.126),
    ):
        with pytest.raises(CheckError, match="elements are wrong"):
            judge(got, want, what="wrong", dtype=h.half, **budget(h.half, 140))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_reference_is_torchs_in_float64(h, causal, scale):
    q, k, v = (x.double() for x in qkv(h, 2, 6, 40, 64, H_kv=2))
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    assert torch.allclose(reference(q, k, v, causal, scale), sdpa, rtol=1e-12, atol=1e-13)


def test_operations_and_library_calls(h):
    x = torch.empty(2, 3, 50, 64, device="meta")
    assert flops(x, x, False) == 2 * (2 * 50 * 50 * 64) * 2 * 3
    assert flops(x, x, True) == flops(x, x, False) // 2
    if h.device.type == "cpu":
        assert list(library_variants(h, 50, True)) == ["torch"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("B", "H", "H_kv", "S", "D"),
    [(2, 16, 16, 2048, 128), (2, 16, 16, 2048, 64), (1, 32, 8, 1000, 128), (3, 12, 1, 1537, 64), (1, 2, 2, 8191, 128)],
)
def test_shapes_on_the_gpu(h, dtype, causal, B, H, H_kv, S, D):
    check(h, *qkv(h, B, H, S, D, H_kv=H_kv, dtype=dtype), causal)
    if not causal:
        check(h, *qkv(h, B, H, 130, D, H_kv=H_kv, S_kv=S, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_more_elements_than_an_int32_counts(h, gpu_gib, causal):
    gpu_gib(40)
    B = 2**31 // (130 * 128) + 100
    q, k, v = (torch.empty(B, 1, 130, 128, dtype=torch.bfloat16, device=h.device).normal_() for _ in range(3))
    o = flash_attention(q, k, v, causal)
    assert not torch.isnan(o).any()
    for part in (slice(0, 3), slice(B // 2, B // 2 + 3), slice(-3, None)):
        want = reference(q[part], k[part], v[part], causal)
        judge(o[part], want, what=f"{part}", dtype=torch.bfloat16, **budget(torch.bfloat16, 130))


@pytest.mark.gpu
def test_not_storing_the_scores_pays(h):
    """A ratio within one run, with a margin: torch's unfused path writes and reads them."""
    from harness.hardware import gpu_ms

    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = qkv(h, 2, 16, 4096, 128, dtype=torch.bfloat16)

    def unfused():
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    assert min(gpu_ms(lambda: flash_attention(q, k, v))) < 0.7 * min(gpu_ms(unfused))


def _bad(device):
    q = torch.randn(2, 4, 10, 64, device=device).half()
    square = torch.randn(2, 1, 64, 64, device=device).half()
    flat = torch.zeros(2 * 4 * 10 * 70, dtype=torch.float16, device=device)
    return {
        "no tensor": ((q, [1.0], q), TypeError, r"expected a torch\.Tensor, got list"),
        "float32": ((q.float(),) * 3, TypeError, r"dtypes torch\.float32, torch\.float32, torch\.float32; all must be"),
        "integers": ((q.int(),) * 3, TypeError, r"torch\.int32"),
        "two dtypes": ((q, q, q.float()), TypeError, r"torch\.float16, torch\.float16, torch\.float32"),
        "causal in words": ((q, q, q, "no"), TypeError, "causal is 'no'; pass True or False"),
        "causal as a number": ((q, q, q, 1), TypeError, "causal is 1"),
        "a mask for causal": ((q, q, q, q), TypeError, "causal is tensor"),
        "three dimensions": ((q[0],) * 3, ValueError, r"shapes \(4, 10, 64\).*need q \[B, H, S, D\]"),
        "k and v differ": ((q, q, q[:, :, :5]), ValueError, "k and v must be alike"),
        "two batches": ((q, q[:1], q[:1]), ValueError, "with q's B and D"),
        "two head dims": ((q, q[..., :32], q[..., :32]), ValueError, "with q's B and D"),
        "heads that do not divide": ((q, q[:, :3], q[:, :3]), ValueError, "a number of heads dividing H"),
        "more heads of keys": ((q[:, :2], q, q), ValueError, "a number of heads dividing H"),
        "no heads of keys": ((q, q[:, :0], q[:, :0]), ValueError, "a number of heads dividing H"),
        "head dim 32": ((q[..., :32],) * 3, ValueError, r"head dim 32 is not one of \(64, 128\); pad q, k and v"),
        "no keys": ((q, q[:, :, :0], q[:, :, :0]), ValueError, "without a key"),
        "causal of two lengths": ((q[:, :, :5], q, q, True), ValueError, "causal with 5 queries and 10 keys"),
        "scale 0": ((q, q, q, False, 0), ValueError, "scale is 0; pass a number above 0"),
        "a negative scale": ((q, q, q, False, -0.1), ValueError, r"scale is -0\.1"),
        "an infinite scale": ((q, q, q, False, INF), ValueError, "scale is inf"),
        "a scale that is NaN": ((q, q, q, False, NAN), ValueError, "scale is nan"),
        "a scale float32 rounds to 0": ((q, q, q, False, 1e-50), ValueError, "scale is 1e-50; .* in float32"),
        "a scale beyond float32": ((q, q, q, False, 1e39), ValueError, r"scale is 1e\+39"),
        "true as a scale": ((q, q, q, False, True), ValueError, "scale is True"),
        "a tensor as a scale": ((q, q, q, False, torch.tensor(0.1)), ValueError, r"scale is tensor\(0\.1"),
        "head dim not contiguous": ((square.mT,) * 3, ValueError, r"q has shape \(2, 1, 64, 64\), strides .* 1, 64\)"),
        "unaligned start": ((q, q, flat[1:5121].view(2, 4, 10, 64)), ValueError, "v has shape .* starts 2 bytes past"),
        "unaligned rows": (
            (q, flat.view(2, 4, 10, 70)[..., :64], q),
            ValueError,
            r"k has .* strides \(2800, 700, 70, 1\)",
        ),
        "expanded heads": ((q, q[:, :1].expand(2, 4, 10, 64), q), ValueError, r"k has .* strides \(2560, 0, 64, 1\)"),
        "requires grad": ((q, q.clone().requires_grad_(), q), RuntimeError, "no backward"),
        "two devices": ((q, q.to("meta"), q), ValueError, "move them to one device"),
        "a device without kernels": ((q.to("meta"),) * 3, RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"flash_attention: .*{message}"):
        flash_attention(*args)


def test_scales_at_the_edge_of_float32(h):
    """The smallest normal number and half the largest power of two still fit with the factor log2(e)."""
    assert torch.finfo(torch.float32).smallest_normal == 2**-126
    assert 2**126.99 * math.log2(math.e) < torch.finfo(torch.float32).max
    q, k, v = qkv(h, 1, 1, 40, 64)
    check(h, q * 0, k, v, False, 2**126.99)


TMA = ("cp.async.bulk.tensor", "mbarrier")
EVIDENCE = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
# Bytes that a thread spills at most: (architecture, head dim, causal). On sm_120 operands are registers too.
# Where causal is all that is asked for: it holds both loops.
SPILLS = {(90, 128, False): 0, (90, 128, True): 80, (90, 64, False): 0, (90, 64, True): 0,
          (100, 128, True): 0, (100, 64, True): 0, (120, 128, True): 1200, (120, 64, True): 0}  # fmt: skip


@pytest.mark.parametrize(("sm", "D", "causal"), SPILLS)
def test_generated_code(sm, D, causal):
    x = torch.empty(4, 32, 4096, D, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(flash_attention, (x, x, x, causal), sms=(sm,))
    assert kernel.error is None
    assert kernel.fits
    assert all(kernel.found.get(name) for name in (*TMA, EVIDENCE[sm])), kernel.found
    assert kernel.spills <= SPILLS[sm, D, causal]
    assert kernel.warps == TILES[D][2]
    if sm == 90:
        assert programs_per_sm(kernel) == 2, "two programs share an SM: the lesson"


def test_generated_code_of_a_ragged_end_and_of_float16():
    q = torch.empty(4, 32, 4096, 128, dtype=torch.float16, device="meta")
    k = torch.empty(4, 8, 4001, 128, dtype=torch.float16, device="meta")
    (kernel,) = compile_for(flash_attention, (q, k, k), sms=(90,))
    assert kernel.error is None
    assert kernel.found["wgmma"]
    assert kernel.spills <= 96
    assert programs_per_sm(kernel) == 2


@pytest.mark.parametrize(("D", "products"), [(64, {"queries and weights"}), (128, {"weights"})])
def test_which_operands_come_from_registers(D, products):
    """wgmma takes its left operand from registers or from shared memory, where a descriptor says."""
    x = torch.empty(4, 32, 4096, D, dtype=torch.bfloat16, device="meta")
    ptx = dump(flash_attention, (x, x, x), sm=90)["ptx"]
    left = re.findall(r"wgmma\.mma_async\.sync\.aligned\.\S+\s*\{[^}]*\},\s*(\{|%)", ptx)
    assert len(left) == compile_for(flash_attention, (x, x, x), sms=(90,))[0].found["wgmma"]
    assert ("%" in left) == (products == {"weights"})
    assert "{" in left
