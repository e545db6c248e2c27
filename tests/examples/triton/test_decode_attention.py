"""decode_attention: splits, queries, heads and pages, lengths on the GPU, infinities and NaN, bad input, the code."""

from harness.codegen import compile_for, dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.attention import attention_budget
from examples.triton.decode_attention import (
    DTYPES,
    PART_MAX,
    PART_MIN,
    TILES,
    count_splits,
    decode_attention,
    reference,
)
from examples.triton.decode_attention_operands import any_order, in_pages, inputs
from tests.examples.triton.helpers import INF, NAN, harness, meta, refused

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter, of 0 / 0 and log(0)
every_dim = pytest.mark.parametrize("D", TILES)


def check(h, *operands, scale=None, splits=None, what=""):
    """Against float64: each query that sees a key, in a row of its own, and zeros for the others."""
    q, k, v, lengths, table = (*operands, None, None)[:5]
    want = reference(q, k, v, lengths, table, scale)
    keys = k.shape[2] * (1 if table is None else table.shape[1])
    n = torch.full(q.shape[:1], keys, device=q.device) if lengths is None else lengths.clamp(0, keys)
    seen = (n[:, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device) >= 0)[:, None].expand(q.shape[:3])

    def rows(fn):
        return lambda *args: fn(*args)[seen]

    what = what or f"{tuple(q.shape)}, {tuple(k.shape)} {k.stride()}, {lengths}, {splits} parts, scale {scale}"
    fn = lambda *args: decode_attention(*args, scale=scale, splits=splits)  # noqa: E731
    h.check(rows(fn), lambda *_: want[seen], q, k, v, lengths, table, what=what, **attention_budget(q.dtype, keys))
    o = fn(q, k, v, lengths, table)
    assert not o[~seen].any()
    return o


@every_dim
@pytest.mark.parametrize("splits", [1, 2, None])
def test_keys_and_parts(h, D, splits):
    """One key, a block, one more, parts of which the last is short or without a key."""
    for S in (1, 64, 65, 129, 320):
        check(h, *inputs(h, 1, 2, 1, 1, S, D), splits=splits)


def test_queries_and_heads(h):
    """Rows of a tile: one, 16, one more, 32, 48, more than a tile; queries with fewer keys than they are."""
    for H, H_kv, S_q, S, splits in (
        (16, 1, 1, 70, 1), (6, 2, 2, 70, 2), (17, 1, 1, 70, 1), (2, 1, 16, 70, 1),
        (3, 1, 16, 70, 1), (5, 1, 16, 70, 1), (3, 3, 8, 5, 1), (17, 1, 2, 70, 1),
    ):  # fmt: skip
        check(h, *inputs(h, 1, H, H_kv, S_q, S, 64), splits=splits)


def test_nothing(h):
    for B, H in ((0, 2), (2, 0)):
        q, k = (torch.empty(B, heads, 1, 64, dtype=h.half, device=h.device) for heads in (H, 2))
        assert decode_attention(q, k, k).shape == q.shape


def test_pages(h):
    """Several to a block of keys, dividing it or not; one block or more to a page; the last page is filled in part."""
    for page in (1, 16, 24, 64, 128):
        check(h, *inputs(h, 2, 2, 1, 1, 150, 128, page))


def test_lengths(h):
    """None, one, a block, one more, all; beyond what is cached, and negative: those are the cache's ends."""
    q, k, v = inputs(h, 7, 2, 1, 2, 200, 64)
    lengths = torch.tensor([0, 1, 64, 129, 200, 1000, -3], dtype=torch.int32, device=h.device)
    for b, n in enumerate(lengths.clamp(0, 200).tolist()):
        k[b, :, n:] = v[b, :, n:] = NAN  # memory that no key was written to
    for splits in (1, 3):
        check(h, q, k, v, lengths, splits=splits)


def test_pages_that_are_not_read(h):
    """A table's entries beyond a sequence's end are anything; pages of others, and the rest of its last one, too."""
    q, k, v, lengths, table = inputs(h, 2, 2, 1, 1, 150, 64, 16)
    used = [table[b, : -(-n // 16)] for b, n in enumerate(lengths.tolist())]
    for b, n in enumerate(lengths.tolist()):
        table[b, -(-n // 16) :] = 2**31 - 1
        if n % 16:
            k[used[b][-1].long(), :, n % 16 :] = NAN
    unused = torch.ones(len(k), dtype=torch.bool, device=h.device)
    unused[torch.cat(used).long()] = False
    k[unused] = v[unused] = NAN
    check(h, q, k, v, lengths, table)


def test_layouts(h):
    q, k, v = inputs(h, 2, 4, 2, 2, 90, 64)
    packed = h.randn(2, 2, 8, 64, dtype=h.half).transpose(1, 2)[:, ::2]  # of a projection; every other head
    wide = h.randn(2, 3, 2, 120, 80, dtype=h.half)  # keys apart, and more in memory than are used
    for operands in ((packed, k, v), (q, k.contiguous(), v), (q, wide[:, 0, :, :90, :64], wide[:, 2, :, 30:, 8:72])):
        check(h, *operands)
    check(h, q[:1].expand(2, 4, 2, 64), k[:1].expand(2, 2, 90, 64), v)
    tables = torch.zeros(2, 9, dtype=torch.int32, device=h.device)
    tables[:, :6] = any_order(h, 2, 6)
    pages = [in_pages(x[:, :, :48].transpose(1, 2).contiguous().transpose(1, 2), 8) for x in (k, v)]
    check(h, q, pages[0].contiguous(), pages[1], None, tables[:, :6])  # two layouts of pages


@pytest.mark.parametrize("splits", [1, 3])
def test_the_logarithms_of_the_sums(h, splits):
    q, k, v = inputs(h, 3, 2, 1, 2, 200, 64)
    lengths = torch.tensor([200, 70, 1], dtype=torch.int32, device=h.device)
    o, lse = decode_attention(q, k, v, lengths, return_lse=True, splits=splits)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 8
    last = lengths[:, None] - 2 + torch.arange(2, device=h.device)
    hidden = torch.arange(200, device=h.device) > last[:, None, :, None]
    torch.testing.assert_close(lse.double(), scores.masked_fill(hidden, -INF).logsumexp(-1), rtol=0, atol=2e-5)
    assert torch.equal(o, decode_attention(q, k, v, lengths, splits=splits))


def test_more_parts_than_the_merge_reads_at_once(h):
    """And so many that each of its programs has some of the dimensions."""
    check(h, *inputs(h, 1, 1, 1, 1, 70 * 64, 64), splits=70)


def test_a_sequence_has_the_same_bits_in_any_batch_of_as_many_parts(h):
    q, k, v = inputs(h, 3, 2, 1, 1, 300, 64)
    both = decode_attention(q, k, v, splits=2)
    assert torch.equal(both[1:2], decode_attention(q[1:2], k[1:2], v[1:2], splits=2))


def test_large_and_tiny_values(h):
    q, k, v = inputs(h, 1, 2, 1, 1, 300, 64)
    for scale, *operands in (
        (None, q * 8, k * 8, v), (4.0, q * 2.0**-18, k * 2.0**13, v), (None, q, k, v * 2**-18),
        (None, q * 0.01, k, v.clamp(-1, 1) * 60000), (2**-126, q, k, v), (2**126.99, q * 0, k, v),
    ):  # fmt: skip
        check(h, *operands, scale=scale)


@pytest.mark.parametrize("splits", [1, 3])
def test_infinities_and_nan_are_those_of_torch(h, splits):
    """Scores of -inf cost a key its weight, also where a whole part has no other; a row of nothing else, +inf or NaN is
    NaN. In v they stay in their column."""
    q, k, v = inputs(h, 1, 6, 3, 1, 190, 64)
    q[..., 0].abs_().add_(1)
    q[0, 1, 0, 0] = -1.0  # turns -inf to +inf
    q[0, 3, 0, 3] = NAN
    k[0, 0, :70, 0] = -INF  # the first part, and some of the second
    k[0, 1, 100:, 0] = -INF
    k[0, 2, :, 0] = -INF  # nothing left
    check(h, q, k, v, splits=splits)
    q, k, v = inputs(h, 1, 2, 1, 1, 190, 64)
    for key, column, value in ((20, 3, INF), (135, 4, -INF), (3, 5, INF), (137, 5, -INF), (50, 6, NAN)):
        v[0, 0, key, column] = value
    check(h, q, k, v, splits=splits)


def test_offsets_beyond_int32(h):
    """Pages, and sequences, 2**30 elements apart: memory between them is reserved and never touched."""
    memory = torch.empty(2**31 + 4096, dtype=h.half, device=h.device)
    k, v = (memory[start:].as_strided((3, 1, 16, 64), (2**30, 1024, 64, 1)) for start in (0, 2048))
    for x in (k, v):
        x.copy_(h.randn(3, 1, 16, 64))
    q, table = h.randn(3, 2, 1, 64, dtype=h.half), torch.tensor([[2, 0, 1]], dtype=torch.int32, device=h.device)
    check(h, q[:1], k, v, None, table)
    check(h, q, k, v)


@given(
    B=st.integers(1, 2), H_kv=st.integers(1, 2), group=st.integers(1, 2), S_q=st.sampled_from([1, 1, 2, 3]),
    S=st.integers(1, 150), D=st.sampled_from(list(TILES)), page=st.sampled_from([0, 1, 16, 24, 64, 128]),
    splits=st.sampled_from([None, 1, 3]), scale=st.sampled_from([None, 0.02, 1]),
)  # fmt: skip
def test_any_shape(B, H_kv, group, S_q, S, D, page, splits, scale):
    h = harness()
    check(h, *inputs(h, B, H_kv * group, H_kv, S_q, S, D, page), scale=scale, splits=splits)


def test_how_many_parts():
    """What fills whole waves, of not less than PART_MIN keys each; where lengths differ, not more than PART_MAX."""
    device = torch.device("cpu")  # 4 SMs, of two programs each
    assert [count_splits(device, programs, 16 * PART_MIN) for programs in (1, 2, 5, 8, 160)] == [8, 4, 3, 1, 1]
    assert [count_splits(device, 1, keys) for keys in (1, PART_MIN, PART_MIN + 1)] == [1, 1, 2]
    assert count_splits(device, 17, 8192) == 4  # 9 waves of a quarter; unsplit, one program would run alone in a second
    for keys in (1, 2 * PART_MAX + 1):
        assert count_splits(device, 160, keys) == 1
        assert count_splits(device, 160, keys, ragged=True) == (3 if keys > PART_MAX else 1)


def test_bad_input(h):
    q, k, v, lengths, table = inputs(h, 2, 4, 2, 1, 40, 64, 16)
    cache = h.randn(2, 2, 40, 64, dtype=h.half)
    for error, message, *args in (
        (ValueError, "need q .* k and v both", q, cache, cache[:, :, :5]),
        (ValueError, "a number of heads dividing H", q[:, :3], cache, cache),
        (ValueError, "head dim 32 is not one of", *(x[..., :32] for x in (q, cache, cache))),
        (ValueError, "17 queries; decode 1 to 16", q.expand(2, 4, 17, 64), cache, cache),
        (ValueError, "0 queries", q[:, :, :0], cache, cache),
        (ValueError, "0 keys", q, cache[:, :, :0], cache[:, :, :0]),
        (ValueError, "is the block_table missing|block_table is missing", q, k, v),
        (TypeError, "lengths is torch.int64", q, cache, cache, lengths.long()),
        (TypeError, "block_table is torch.int64", q, k, v, lengths, table.long()),
        (ValueError, "lengths has shape", q, cache, cache, lengths[:1]),
        (ValueError, "block_table has shape", q, k, v, lengths, table[0]),
        (ValueError, "block_table has shape", q, k, v, lengths, table.t().contiguous().t()),
        *((ValueError, "scale is", q, cache, cache, None, None, s) for s in (0, -0.1, NAN, 1e-50, 1e39, True)),
        *((ValueError, "splits is", q, cache, cache, None, None, None, False, s) for s in (0, 1.0, True, 2000)),
    ):  # fmt: skip
        refused(decode_attention, error, message, *args)


@pytest.mark.parametrize(
    ("H", "S_q", "D", "page", "programs"),  # on an SM
    [(32, 1, 128, 0, 4), (32, 1, 128, 16, 4), (32, 1, 64, 128, 4), (64, 8, 128, 16, 2)],
)
def test_code(H, S_q, D, page, programs):
    """Loads of 16 bytes by cp.async, and nothing is spilled; an SM holds the programs that count_splits counts on."""
    cache = meta(16384, page, 8, D).transpose(1, 2) if page else meta(16, 16384, 8, D).transpose(1, 2)
    lengths, table = meta(16, dtype=torch.int32), meta(16, 1024, dtype=torch.int32) if page else None
    for each in compile_for(decode_attention, (meta(16, H, S_q, D), cache, cache, lengths, table), sms=(90, 100)):
        spilled = 4 if (each.sm, S_q) == (100, 8) else 0  # one register, by Triton 3.6; no such GPU was at hand
        assert (each.error, each.too_much) == (None, None)
        assert each.spills <= spilled, each
        if each.kernel == "decode_attention_kernel":
            assert each.found["cp.async"] >= 24
            by_registers = 65536 // (32 * each.warps * -(-each.registers // 8) * 8)
            assert min(228 * 1024 // (each.shared + 1024), by_registers) >= programs


def test_it_compiles_for_sizes_of_1():
    """Triton makes a constant of each, and of strides of 1."""
    query, length = meta(1, 1, 1, 64), meta(1, dtype=torch.int32)
    for S, lengths, table, splits in (
        (1, None, None, None), (1, length, None, 2), (1, None, meta(1, 1, dtype=torch.int32), 2),
    ):  # fmt: skip
        cache = meta(1 if table is None else 9, S, 1, 64).transpose(1, 2)
        args, options = (query, cache, cache, lengths, table), {"return_lse": True, "splits": splits}
        kernels = compile_for(decode_attention, args, options, sms=(90,))
        assert all((each.error, each.spills) == (None, 0) for each in kernels), (S, splits, kernels)


def test_the_merge_is_launched_early():
    """From sm_90 on; the lesson compiles for sm_80, which has no such instruction."""
    args = meta(1, 32, 1, 128), meta(1, 8, 16384, 128), meta(1, 8, 16384, 128)
    for kernel, instruction in (("", "launch_dependents"), ("_merge", "wait")):
        ptx = dump(decode_attention, args, sm=90, kernel=f"decode_attention{kernel}_kernel")["ptx"]
        assert f"griddepcontrol.{instruction}" in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_on_the_gpu(h, dtype):
    h.half = dtype
    for B, H, H_kv, S_q, S, D in ((1, 32, 8, 1, 16384, 128), (64, 32, 8, 1, 1000, 128), (3, 12, 1, 4, 4097, 64),
                                  (2, 64, 8, 16, 3000, 128), (1, 8, 8, 1, 131072, 128)):  # fmt: skip
        for page in (0, 16, 128):
            first = check(h, *(operands := inputs(h, B, H, H_kv, S_q, S, D, page)))
            for _ in range(5):
                assert torch.equal(decode_attention(*operands), first)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    """Of pages, and of a contiguous cache whose keys are far apart."""
    gpu_gib(40)
    pages = 2**31 // (16 * 8 * 128) + 100
    pool = torch.empty(pages, 16, 8, 128, dtype=torch.bfloat16, device=h.device).normal_().transpose(1, 2)
    q, table = h.randn(2, 32, 1, 128).bfloat16(), torch.tensor([[0, pages - 1], [pages - 2, 1]]).int().to(h.device)
    check(h, q, pool, pool, None, table)
    far = pool.transpose(1, 2).flatten(0, 1)[: pages * 16 // 40 * 40].view(40, -1, 8, 128)[:, :2].permute(1, 2, 0, 3)
    check(h, q, far, far)
