"""flash_attention: every edge of a tile, heads and layouts, infinities and NaN, bad input, the code."""

import functools

from harness.check import judge

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.attention import attention_budget
from examples.triton.flash_attention import DTYPES, TILES, flash_attention, reference
from studies.triton.flash_attention import left_operands, programs_per_sm
from tests.examples.triton.helpers import INF, NAN, code, harness, meta, refused

tiles = functools.partial(flash_attention, variant="tiles")
every_dim = pytest.mark.parametrize("D", TILES)


def qkv(h, B, H, S, D, H_kv=None, S_kv=None, dtype=None):
    q = h.randn(B, H, S, D, dtype=dtype or h.half)
    k, v = (h.randn(B, H_kv or H, S_kv or S, D, dtype=dtype or h.half) for _ in range(2))
    return q, k, v


def check(h, q, k, v, causal=False, scale=None, what="", fn=flash_attention):
    what = what or f"{tuple(q.shape)} {q.stride()}, {tuple(k.shape)} {k.stride()}{', causal' * causal}, scale {scale}"
    h.check(fn, reference, q, k, v, causal, scale, what=what, **attention_budget(q.dtype, k.shape[2]))


def check_lse(h, fn=flash_attention, same=True, dtype=None):
    """The logarithms of the sums, against torch.logsumexp in float64; return_lse does not change the result, or with
    `same` False, where it has other sums, by at most one unit in the last place."""
    for S, S_kv, causal in ((130, 300, False), (300, 300, True)):
        q, k, v = qkv(h, 2, 4, S, 64, H_kv=2, S_kv=S_kv, dtype=dtype)
        o, lse = fn(q, k, v, causal, return_lse=True)
        scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 8
        if causal:
            scores.masked_fill_(torch.ones(S, S_kv, dtype=torch.bool, device=q.device).triu(1), -INF)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=2e-5)
        again = fn(q, k, v, causal)
        eps = 0 if same else torch.finfo(o.dtype).eps
        torch.testing.assert_close(o, again, rtol=eps, atol=eps / 16)


@every_dim
def test_shapes(h, D):
    """One query, one key, primes, one block of keys, one tile, one more of each, several."""
    for S, S_kv in ((1, 1), (1, 200), (200, 1), (37, 61), (128, 65), (129, 128)):
        check(h, *qkv(h, 1, 2, S, D, S_kv=S_kv))
    for S in (1, 65, 127, 128, 300):
        check(h, *qkv(h, 1, 2, S, D), True)


def test_heads_meet_their_own_keys(h):
    """Fewer heads than a group of 8, exactly one, a last group that is not full; two tiles of queries each; nothing."""
    for B, H, H_kv, causal in ((1, 3, 1, True), (2, 8, 2, False), (1, 8, 4, True), (17, 1, 1, True)):
        check(h, *qkv(h, B, H, 130, 64, H_kv=H_kv), causal)
    for B, H, S in ((0, 2, 5), (2, 0, 5), (2, 2, 0)):
        q, k = (torch.empty(B, heads, rows, 64, dtype=h.half, device=h.device) for heads, rows in ((H, S), (2, 5)))
        assert flash_attention(q, k, k).shape == q.shape


def test_the_logarithms_of_the_sums(h):
    check_lse(h)


@given(
    B=st.integers(1, 3), H_kv=st.integers(1, 3), group=st.integers(1, 3), S=st.integers(1, 200),
    S_kv=st.integers(1, 200), D=st.sampled_from(list(TILES)), causal=st.booleans(),
    scale=st.sampled_from([None, 0.02, 1]),
)  # fmt: skip
def test_any_shape(B, H_kv, group, S, S_kv, D, causal, scale):
    h = harness()
    check(h, *qkv(h, B, H_kv * group, S, D, H_kv=H_kv, S_kv=S if causal else S_kv), causal, scale)


def test_layouts(h):
    B, H, S, D = 2, 3, 70, 64
    packed = h.randn(B, S, 3, H, D, dtype=h.half)  # one projection for all three: views of it, at three starts
    wide = h.randn(3, B, H, S, D + 8, dtype=h.half)  # rows apart
    cache = h.randn(2, B, H, 4 * S, D, dtype=h.half)  # more keys in memory than are used
    odd = h.randn(1, 1, S, D, dtype=h.half).as_strided((1, 1, S, D), (7, 3, D, 1))  # strides nobody steps by
    heads = h.randn(B, 2 * H, S, D, dtype=h.half)[:, ::2]
    for causal, (q, k, v) in (
        (True, packed.transpose(1, 3).unbind(2)), (False, wide[..., :D].unbind(0)),
        (True, (heads, *cache[..., :S, :].unbind(0))), (False, (odd, odd.flip(2), odd)),
    ):  # fmt: skip
        check(h, q, k, v, causal)


def test_large_and_tiny_values(h):
    for D, causal in ((64, True), (128, False)):
        q, k, v = qkv(h, 1, 2, 150, D)
        for scale, *inputs in (
            (None, q * 8, k * 8, v),  # peaked rows
            (4.0, q * 2.0**-18, k * 2.0**13, v), (4.0, q * 2.0**13, k * 2.0**-18, v),  # one near the smallest
            (None, q, k, v * 2**-18), (None, q * 0.01, k, v.clamp(-1, 1) * 60000),  # values near the ends of the range
            (2**-126, q, k, v), (2**126.99, q * 0, k, v),  # the smallest normal and the largest scale
        ):  # fmt: skip
            check(h, *inputs, causal, scale)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy, in the interpreter
def test_infinities_and_nan_are_those_of_torch(h):
    """Scores of -inf cost a key its weight, wherever its block is; a row with nothing else, +inf or NaN is NaN. Causal:
    a query before the first key with a finite score has nothing to attend to."""
    for D, causal in ((64, True), (128, False)):
        q, k, v = qkv(h, 1, 3, 300, D)
        q[..., 0].abs_().add_(1)
        q[0, 0, 7, 0] = -1.0  # turns -inf to +inf
        q[0, 0, 9, 0] = 0.0  # 0 * inf
        k[0, 0, :150, 0] = -INF  # the first whole blocks, and a part of one
        k[0, 1, 128:, 0] = -INF  # all but the first
        q[0, 1, 5, 3] = NAN  # one row
        k[0, 2, :, 0] = -INF  # nothing left
        check(h, q, k, v, causal)


@every_dim
def test_infinities_and_nan_in_v(h, D):
    q, k, v = qkv(h, 1, 1, 300, D)
    clean, bad = flash_attention(q, k, v, True), v.clone()
    for row, column, value in ((20, 3, INF), (135, 4, -INF), (3, 5, INF), (137, 5, -INF), (50, 6, NAN)):
        bad[0, 0, row, column] = value
    check(h, q, k, bad, what="they stay in their column")
    # Causal: 0 * NaN. torch, which multiplies all weights with all values, loses every row; here it is a tile.
    v[0, 0, 200, 3] = NAN
    o, start = flash_attention(q, k, v, True), 200 // TILES[D][0] * TILES[D][0]
    assert torch.equal(o[:, :, :start], clean[:, :, :start])
    assert torch.isnan(o[0, 0, 200:, 3]).all()
    assert torch.equal(o[..., 4:], clean[..., 4:])


def test_bad_input(h):
    q = h.randn(2, 4, 10, 64, dtype=torch.float16)
    for error, message, *args in (
        (TypeError, "causal is 1", q, q, q, 1),
        (ValueError, "variant 'fast' is not one of", q, q, q, False, None, False, "fast"),
        (ValueError, "k and v must have the same shape", q, q, q[:, :, :5]),
        (ValueError, "a number of heads dividing H", q, q[:, :3], q[:, :3]),
        (ValueError, r"head dim 32 is not one of", *(q[..., :32],) * 3),
        (ValueError, "without a key", q, q[:, :, :0], q[:, :, :0]),
        (ValueError, "causal with 5 queries and 10 keys", q[:, :, :5], q, q, True),
        *((ValueError, "scale is", q, q, q, False, s) for s in (0, -0.1, NAN, 1e-50, 1e39, True)),
    ):
        refused(flash_attention, error, message, *args)


@every_dim
def test_two_programs_share_an_sm(D):
    """They do by registers and shared memory; queries and weights come from registers, or the weights alone."""
    x = meta(4, 32, 4096, D)
    kernel = code(90, "cp.async.bulk.tensor mbarrier wgmma", flash_attention, x, x, x, False, None, False, "tiles")
    assert programs_per_sm(kernel) == 2
    assert bool(left_operands(x, x, x)["left in memory"]) == (D == 128)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_on_the_gpu(h, dtype):
    for B, H, H_kv, S, D in ((2, 16, 16, 2048, 128), (1, 32, 8, 1000, 128), (3, 12, 1, 1537, 64), (1, 2, 2, 8191, 128)):
        for causal in (False, True):
            check(h, *qkv(h, B, H, S, D, H_kv=H_kv, dtype=dtype), causal, fn=tiles)
        check(h, *qkv(h, B, H, 130, D, H_kv=H_kv, S_kv=S, dtype=dtype), fn=tiles)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(40)
    B = 2**31 // (130 * 128) + 100
    q, k, v = (torch.empty(B, 1, 130, 128, dtype=torch.bfloat16, device=h.device).normal_() for _ in range(3))
    o = flash_attention(q, k, v, True)
    for part in (slice(0, 3), slice(B // 2, B // 2 + 3), slice(-3, None)):
        want = reference(q[part], k[part], v[part], True)
        judge(o[part], want, what=f"{part}", dtype=torch.bfloat16, **attention_budget(torch.bfloat16, 130))
