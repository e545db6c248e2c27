"""flash_attention: every edge of a tile, heads and layouts, infinities and NaN, other tiles, bad input, the code."""

import math

from harness.check import CheckError, judge
from harness.codegen import compile_for

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from examples.common.attention import attention_budget, sdpa
from examples.triton.flash_attention import DTYPES, HEADS, TILES, flash_attention, reference

INF, NAN = float("inf"), float("nan")
both_masks = pytest.mark.parametrize("causal", [False, True])
every_dim = pytest.mark.parametrize("D", TILES)


def qkv(h, B, H, S, D, H_kv=None, S_kv=None, dtype=None):
    q = h.randn(B, H, S, D, dtype=dtype or h.half)
    k, v = (h.randn(B, H_kv or H, S_kv or S, D, dtype=dtype or h.half) for _ in range(2))
    return q, k, v


def check(h, q, k, v, causal=False, scale=None, what="attention"):
    h.check(flash_attention, reference, q, k, v, causal, scale, what=what, **attention_budget(q.dtype, k.shape[2]))


@every_dim
def test_shapes(h, D):
    """One query, one key, primes, one block of keys, one tile, one more of each, several."""
    for S, S_kv in ((1, 1), (1, 200), (200, 1), (37, 61), (64, 96), (128, 65), (129, 128), (257, 300)):
        check(h, *qkv(h, 1, 2, S, D, S_kv=S_kv), what=f"{S} queries, {S_kv} keys")
    for S in (1, 63, 64, 65, 127, 128, 129, 300):
        check(h, *qkv(h, 1, 2, S, D), True, what=f"{S} causal")


def test_heads_meet_their_own_keys(h):
    """Fewer heads than a group, exactly one, a last group that is not full; two tiles of queries each."""
    assert HEADS == 8
    for B, H, H_kv, causal in ((1, 3, 1, True), (1, 8, 2, False), (1, 8, 2, True), (2, 6, 3, True), (17, 1, 1, True)):
        check(h, *qkv(h, B, H, 130, 64, H_kv=H_kv), causal, what=f"{B}x{H}, {H_kv}")


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


def test_nothing_to_attend_from(h):
    for B, H, S in ((0, 2, 5), (2, 0, 5), (2, 2, 0)):
        q, k = (torch.empty(B, heads, rows, 64, dtype=h.half, device=h.device) for heads, rows in ((H, S), (2, 5)))
        o = flash_attention(q, k, k)
        assert (o.shape, o.dtype) == ((B, H, S, 64), h.half)


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
        assert flash_attention(q, k, v).is_contiguous()
        for causal in (False, True):
            check(h, q, k, v, causal, what=f"strides {q.stride()}, {k.stride()}")


def test_other_tiles_of_who_copies_the_kernel(h, monkeypatch):
    inputs = qkv(h, 1, 2, 150, 64, H_kv=1)
    for tile in ((128, 128, 4, 1, False), (128, 32, 4, 3, True), (32, 16, 4, 2, False), (64, 128, 4, 2, False)):
        monkeypatch.setitem(TILES, 64, tile)
        check(h, *inputs, False, what=f"{tile}")
        if tile[0] >= tile[1]:
            check(h, *inputs, True, what=f"{tile} causal")
    with pytest.raises(Exception, match="the last whole block would cross the diagonal"):
        flash_attention(*inputs, causal=True)


@both_masks
@every_dim
def test_large_and_tiny_values(h, causal, D):
    q, k, v = qkv(h, 1, 2, 150, D)
    for what, scale, *inputs in (
        ("peaked rows", None, q * 8, k * 8, v),
        ("flat rows", None, q * 0.01, k, v),
        ("queries near the smallest, large keys", 4.0, q * 2.0**-18, k * 2.0**13, v),
        ("large queries, keys near the smallest", 4.0, q * 2.0**13, k * 2.0**-18, v),
        ("values near the smallest", None, q, k, v * 2**-18),
        ("values near the largest", None, q, k, v.clamp(-1, 1) * 60000),
    ):
        check(h, *inputs, causal, scale, what=what)


@both_masks
@pytest.mark.parametrize(("D", "key"), [(64, 0), (64, 140), (128, 140)])
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
@every_dim
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
    # Causal: a query before the first key with a finite score has nothing to attend to.
    for causal, rows in ((False, [2, 1, 300]), (True, [150, 1, 300])):
        check(h, q, k, v, causal)
        nan = torch.isnan(flash_attention(q, k, v, causal))
        assert torch.equal(nan.any(-1), nan.all(-1))
        assert nan.all(-1)[0].sum(-1).tolist() == rows


@every_dim
def test_infinities_and_nan_in_k_and_v(h, D):
    q, k, v = qkv(h, 1, 1, 300, D)
    clean = flash_attention(q, k, v, True)
    k[0, 0, 260, 2] = NAN
    check(h, q, k, v, True, what="NaN in a key reaches the queries that see it")
    assert torch.isnan(flash_attention(q, k, v, True)[0, 0]).all(-1).sum() == 40
    k[0, 0, 260, 2] = 1.0
    bad = v.clone()
    for row, column, value in ((20, 3, INF), (135, 4, -INF), (3, 5, INF), (137, 5, -INF), (50, 6, NAN)):
        bad[0, 0, row, column] = value
    check(h, q, k, bad, what="infinities and NaN stay in their column of the values")
    # Causal: 0 * NaN. torch, which multiplies all weights with all values, loses every row; here it is a tile.
    v[0, 0, 200, 3] = NAN
    o, start = flash_attention(q, k, v, True), 200 // TILES[D][0] * TILES[D][0]
    assert torch.equal(o[:, :, :start], clean[:, :, :start])
    assert torch.isnan(o[0, 0, 200:, 3]).all()
    assert torch.equal(o[:, :, :260, 4:], clean[:, :, :260, 4:])
    assert torch.isnan(reference(q, k, v, True)[..., 3]).all()


def test_weights_sum_to_one_and_keys_have_any_order(h):
    q, k, v = qkv(h, 1, 2, 200, 64)
    for causal in (False, True):
        o = flash_attention(q * 3, k, torch.ones_like(v), causal)
        assert (o.double() - 1).abs().max() < 2 * torch.finfo(h.half).eps
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0)).to(h.device)
    o = flash_attention(q, k[:, :, order], v[:, :, order])
    judge(o, reference(q, k, v), what="permuted", dtype=h.half, **attention_budget(h.half, 200))


def test_the_budget_finds_a_key_that_was_left_out_a_wrong_head_and_a_wrong_scale(h):
    q, k, v = qkv(h, 1, 4, 130, 64, H_kv=2, S_kv=140)
    for inputs in ((q, k[:, :, :139], v[:, :, :139]), (q, k.flip(1), v.flip(1)), (q, k, v, False, 0.126)):
        with pytest.raises(CheckError, match="elements are wrong"):
            h.check(lambda *_, i=inputs: flash_attention(*i), reference, q, k, v, **attention_budget(h.half, 140))


def test_bad_input(h):
    q = h.randn(2, 4, 10, 64, dtype=torch.float16)
    square, flat = h.randn(2, 1, 64, 64, dtype=torch.float16), h.randn(2 * 4 * 10 * 70, dtype=torch.float16)
    for args, error, message in (
        ((q, [1.0], q), TypeError, r"expected a torch\.Tensor, got list"),
        ((q.float(),) * 3, TypeError, r"dtypes torch\.float32, torch\.float32, torch\.float32"),
        ((q, q, q.float()), TypeError, r"torch\.float16, torch\.float16, torch\.float32"),
        ((q, q.float(), q), TypeError, r"torch\.float16, torch\.float32, torch\.float16"),
        ((q, q, q, "no"), TypeError, "causal is 'no'"),
        ((q, q, q, 1), TypeError, "causal is 1"),
        ((q[0],) * 3, ValueError, r"shapes \(4, 10, 64\)"),
        ((q, q, q[:, :, :5]), ValueError, "k and v must be alike"),
        ((q, q[:1], q[:1]), ValueError, "k needs q's B and D"),
        ((q, q[..., :32], q[..., :32]), ValueError, "k needs q's B and D"),
        ((q, q[:, :3], q[:, :3]), ValueError, "a number of heads dividing H"),
        ((q[:, :2], q, q), ValueError, "a number of heads dividing H"),
        ((q, q[:, :0], q[:, :0]), ValueError, "a number of heads dividing H"),
        ((q[..., :32],) * 3, ValueError, r"head dim 32 is not one of \(64, 128\)"),
        ((q, q[:, :, :0], q[:, :, :0]), ValueError, "without a key"),
        ((q[:, :, :5], q, q, True), ValueError, "causal with 5 queries and 10 keys"),
        *(((q, q, q, False, s), ValueError, "scale is") for s in (0, -0.1, INF, NAN, 1e-50, 1e39, True, q[0, 0, 0, 0])),
        ((square.mT,) * 3, ValueError, r"q has shape \(2, 1, 64, 64\), strides .* 1, 64\)"),
        ((q, q, flat[1:5121].view(2, 4, 10, 64)), ValueError, "v has shape .* starts 2 bytes past"),
        ((q, flat.view(2, 4, 10, 70)[..., :64], q), ValueError, r"k has .* strides \(2800, 700, 70, 1\)"),
        ((q, q.clone().requires_grad_(), q), RuntimeError, "no backward"),
        ((q, q.to("meta"), q), ValueError, "move them to one device"),
        ((q.to("meta"),) * 3, RuntimeError, "on meta"),
    ):
        with pytest.raises(error, match=f"flash_attention: .*{message}"):
            flash_attention(*args)


def test_scales_to_the_edges_of_float32(h):
    """The smallest normal number and half the largest power of two still fit with the factor log2(e)."""
    assert 2**126.99 * math.log2(math.e) < torch.finfo(torch.float32).max
    q, k, v = qkv(h, 1, 2, 90, 64)
    for scale in (0.01, 1, 2.5, 2**-126):
        check(h, q, k, v, False, scale)
    check(h, q * 0, k, v, False, 2**126.99)


# Bytes that a thread spills at most. On sm_120 operands are registers too. Causal code holds both loops.
SPILLS = [(90, 128, False, 0), (90, 128, True, 80), (90, 64, True, 0), (100, 128, True, 0), (120, 128, True, 1200)]


@pytest.mark.parametrize(("sm", "D", "causal", "spills"), SPILLS)
def test_generated_code(sm, D, causal, spills):
    x = torch.empty(4, 32, 4096, D, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(flash_attention, (x, x, x, causal), sms=(sm,))
    assert kernel.error is None
    assert kernel.fits
    mma = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}[sm]
    assert all(kernel.found.get(name) for name in ("cp.async.bulk.tensor", "mbarrier", mma)), kernel.found
    assert kernel.spills <= spills
    assert kernel.warps == TILES[D][2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_on_the_gpu(h, dtype):
    for B, H, H_kv, S, D in ((2, 16, 16, 2048, 128), (1, 32, 8, 1000, 128), (3, 12, 1, 1537, 64), (1, 2, 2, 8191, 128)):
        for causal in (False, True):
            check(h, *qkv(h, B, H, S, D, H_kv=H_kv, dtype=dtype), causal, what=f"{B}x{H}x{S}x{D} {causal}")
        check(h, *qkv(h, B, H, 130, D, H_kv=H_kv, S_kv=S, dtype=dtype), what=f"{B}x{H}x130x{S}x{D}")


@pytest.mark.gpu
@both_masks
def test_more_elements_than_an_int32_counts(h, gpu_gib, causal):
    gpu_gib(40)
    B = 2**31 // (130 * 128) + 100
    q, k, v = (torch.empty(B, 1, 130, 128, dtype=torch.bfloat16, device=h.device).normal_() for _ in range(3))
    o = flash_attention(q, k, v, causal)
    assert not torch.isnan(o).any()
    for part in (slice(0, 3), slice(B // 2, B // 2 + 3), slice(-3, None)):
        want = reference(q[part], k[part], v[part], causal)
        judge(o[part], want, what=f"{part}", dtype=torch.bfloat16, **attention_budget(torch.bfloat16, 130))


@pytest.mark.gpu
def test_not_storing_the_scores_pays(h):
    """A ratio within one run, with a margin: torch's unfused path writes and reads them."""
    from harness.hardware import gpu_ms

    q, k, v = qkv(h, 2, 16, 4096, 128, dtype=torch.bfloat16)
    unfused = sdpa(SDPBackend.MATH, False)
    assert min(gpu_ms(lambda: flash_attention(q, k, v))) < 0.7 * min(gpu_ms(lambda: unfused(q, k, v)))
