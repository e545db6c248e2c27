"""fp8_attention, warp specialized: its kernel on a model of an SM, in any order of events, and its code."""

import functools
import re
from collections import defaultdict

from harness.codegen import dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common import gluon as common
from examples.common.attention import attention_budget
from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3
from examples.fp8 import fp8_attention_hopper as module
from examples.fp8.fp8_attention import TILES, fp8_attention
from examples.fp8.fp8_attention_operands import off_by, prepare, reference
from tests.examples.fp8.helpers import code, meta, refused
from tests.examples.fp8.test_fp8_attention import qkv
from tests.examples.tma.model import SM, often, use_model
from tests.examples.triton.helpers import harness, loops_in_turns

specialized = functools.partial(fp8_attention, variant="warp specialized")


def check(h, *data, dtype=None):
    fn, dtype = functools.partial(specialized, out_dtype=dtype or h.half), dtype or h.half
    h.check(fn, reference, *data, what="warp specialized", dtype=dtype, **attention_budget(E4M3, data[1].shape[2]))


def on_model(monkeypatch, seed=0, sms=1, group_bytes=module.GROUP_BYTES):
    monkeypatch.setattr(common, "gluon_architecture", lambda device: 90)
    monkeypatch.setattr(module, "GROUP_BYTES", group_bytes)
    return use_model(monkeypatch, {"fp8_attention_hopper_kernel": module}, seed, sms)


@often
@given(
    B=st.integers(1, 2), H_kv=st.integers(1, 2), group=st.integers(1, 2), S=st.integers(1, 400),
    S_kv=st.integers(1, 600), D=st.sampled_from(list(TILES)), causal=st.booleans(), per_head=st.booleans(),
    sms=st.integers(1, 3), seed=st.integers(0, 10**6), group_bytes=st.sampled_from([1, 2**18, 2**30]),
)  # fmt: skip
def test_any_order_of_events_is_right(B, H_kv, group, S, S_kv, D, causal, per_head, sms, seed, group_bytes):
    h = harness()
    with pytest.MonkeyPatch.context() as patch:
        on_model(patch, seed, sms, group_bytes)
        data = qkv(h, B, H_kv * group, S, D, H_kv=H_kv, S_kv=S if causal else S_kv, per_head=per_head)
        check(h, *data, causal)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_only_some_consumers_see(h, monkeypatch, seed):
    """They release them, and let the next have its turn: also where a tile's last consumers have no queries."""
    on_model(monkeypatch, seed)
    for S in (100, 400, 700):
        check(h, *qkv(h, 1, 1, S, 64), True)


@pytest.mark.parametrize(("S", "blocks"), [(64, 7), (65, 11), (129, 15)])
def test_consumers_without_queries_multiply_one_block(h, monkeypatch, S, blocks):
    """Of 600 keys there are five, for each of the three consumers with queries."""
    multiply, calls = SM.wgmma, []
    monkeypatch.setattr(SM, "wgmma", lambda self, *args, **how: calls.append(1) or multiply(self, *args, **how))
    on_model(monkeypatch)
    check(h, *qkv(h, 1, 1, S, 64, S_kv=600))
    assert len(calls) == 3 * blocks  # Q K^T, P V and the sums


def test_heads_meet_their_own_keys_and_scales(h, monkeypatch):
    on_model(monkeypatch)
    check_heads(h)


def check_heads(h):
    """Every head of another size, so that a wrong scale shows; several blocks of keys, rows that one key decides."""
    for causal, per_head in [(True, True), (False, True), (True, False)]:
        q, k, v = (h.randn(1, heads, 200, 64, dtype=h.half) for heads in (4, 2, 2))
        for x in (q, k, v):
            heads = x.shape[0] * x.shape[1]
            x *= torch.linspace(0.2, 2, heads, device=x.device).view(*x.shape[:2], 1, 1).to(x.dtype)
        check(h, *prepare(q, k, v, per_head), causal, 0.1 if causal else None)
    q, k, v, q_scale, k_scale, v_scale = qkv(h, 1, 1, 300, 64)
    check(h, q, k, v, q_scale * 8, k_scale * 8, v_scale, True)
    check(h, q, k, v, q_scale * 2.0**-100, k_scale * 2.0**100, v_scale, False)
    check(h, q, k, v, q_scale * 2.0**-100, k_scale * 2.0**-100, v_scale, True)  # the factor of -inf must not be 0
    data = qkv(h, 2, 3, 70, 64)
    turned = [scale.t().contiguous().t() for scale in data[3:]]
    assert torch.equal(specialized(*data), specialized(*data[:3], *turned))


def test_rounding_and_nan(h, monkeypatch):
    on_model(monkeypatch)
    check_rounding_and_nan(h)


def check_rounding_and_nan(h):
    """Evenly spread in a binade, rounding the weights would cost 0.026; and nothing is lost on average, or where all
    values are the same: the sums are those of the rounded weights."""
    data = qkv(h, 1, 2, 300, 64, H_kv=1)
    for causal in (False, True):
        o, want = specialized(*data, causal, out_dtype=h.half), reference(*data, causal)
        assert 0.01 < off_by(o, want) < 0.04
        assert ((o.double() * want).sum() / want.square().sum()).item() == pytest.approx(1, abs=0.01)
        same = data[0], data[1], torch.full_like(data[2].float(), 8).to(E4M3), *data[3:]
        o, want = specialized(*same, causal, out_dtype=h.half), reference(*same, causal)
        assert ((o.double() - want).abs() <= (torch.finfo(h.half).eps / 2 + 2**-9) * want).all()
    clean = specialized(*data, True, out_dtype=h.half)[0, 0]
    # NaN in a query, in keys that later queries see, and in a value: its weight is 0 for earlier queries of its block
    # of keys, where 0 * NaN is NaN too.
    hits = (0, (7, 3), slice(7, 8)), (1, (127, 3), slice(127, None)), (1, (200, 3), slice(200, None))
    for which, place, hit in (*hits, (2, (5, 200), (slice(module.BLOCK_N, None), 5))):
        x = data[which].clone()
        x.view(torch.uint8)[(0, 0, *place)] = 0x7F
        o = specialized(*data[:which], x, *data[which + 1 :], True, out_dtype=h.half)[0, 0]
        assert o[hit].isnan().all()
        o[hit] = clean[hit]
        assert torch.equal(o, clean)


def operands_of_values(ptx: str) -> list[list[set]]:
    """The left operands of P V and of the sums, register by register: which scores of Q K^T its bytes come from, by
    their numbers."""
    scores, made, operands = {}, defaultdict(list), []
    for text in ptx.splitlines():
        if "wgmma.mma_async" in text:
            result, left = re.match(r"[^{]*\{([^}]*)\}, (\{[^}]*\}|%rd)", text).groups()
            if left == "%rd":
                scores |= {register: number for number, register in enumerate(re.findall(r"%r\d+", result))}
            else:
                operands.append(re.findall(r"%r\d+", left))
        elif "satfinite" in text:
            made["pair"].append(re.findall(r"%r\d+", text)[::-1])
        elif registers := re.findall(r"%r\d+", text):
            parts = [*made["pair"].pop(-2), *made["pair"].pop()] if "{low, high}" in text else registers[1:]
            made[registers[0]].append(parts)

    @functools.cache
    def scores_in(register):  # of a weight; the factor and the maximum, which come from elsewhere, count for nothing
        if register in scores:
            return {scores[register]}
        for parts in made[register]:
            direct = {scores[each] for each in parts if each in scores}
            if direct or len(parts) < 4:
                return direct or set().union(*map(scores_in, parts))
        return set()

    def bytes_of(register):  # whichever way the loop was entered
        if all(len(parts) == 4 for parts in made[register]):
            return {tuple(min(scores_in(each), default=None) for each in parts) for parts in made[register]}
        return set().union(*(bytes_of(each) for parts in made[register] for each in parts))

    return [[bytes_of(register) for register in left] for left in operands]


def arguments(D, *more):
    q, scale = meta(4, 32, 4096, D), meta(4, 32, dtype=torch.float32)
    return q, q, q.transpose(2, 3).contiguous(), scale, scale, scale, *more


@pytest.mark.parametrize("D", list(TILES))
def test_weights_stay_in_their_registers(D):
    """A thread holds scores of the keys 8 n + 2 t and the next, of two rows, for each n; a register of the operand has
    four of the 16 keys of a row in pack_values()'s order."""
    operands = operands_of_values(dump(fp8_attention, arguments(D), sm=90)["ptx"])
    steps = module.BLOCK_N // 32
    assert len(operands) == module.CONSUMERS * 2 * 2 * steps  # in the loop and after it, P V and the sums
    for number, left in enumerate(operands):
        for i, register in enumerate(left):
            group, row = 2 * (number % steps) + i // 2, i % 2
            first = 8 * group + 2 * row
            assert register == {(first, first + 1, first + 4, first + 5)}


@pytest.mark.parametrize("D", list(TILES))
@pytest.mark.parametrize("causal", [False, True])
def test_generated_code(D, causal):
    args, steps = arguments(D, causal), (D // 32, module.BLOCK_N // 32)
    kernel = code(90, "cp.async.bulk.tensor setmaxnreg wgmma", fp8_attention, *args)  # spills nothing
    assert "setmaxnreg" not in code(90, "wgmma", fp8_attention, *args, variant="tiles").found
    text = dump(fp8_attention, args, sm=90)
    assert not re.search(r"serialized|C75\d\d", text["log"]), "the assembler waits after each MMA"
    assert kernel.warps == 4 * (module.CONSUMERS + 1)
    # Q K^T before the loop and in it, P V and the sums in it and after it.
    assert kernel.found["wgmma"] == kernel.found["mma f8"] == module.CONSUMERS * 2 * (steps[0] + 2 * steps[1])
    # P V and the sums are done when Q K^T starts, whose scores are done when the exponentials start: 64, and two of
    # alpha. 64 weights are packed by 32 instructions, and no other moves a byte. Additions: two elements of the sums
    # for each of two rows, the maximum less 8, the exponents of alpha; no weights.
    wanted = ["take"] + [str(D)] * steps[1] + ["8"] * steps[1] + ["wait"] + [str(module.BLOCK_N)] * steps[0]
    wanted += ["pass", "wait", *["exp"] * (module.BLOCK_N // 2 + 2)]
    for loop, order in loops_in_turns(text, module.CONSUMERS):
        assert order == wanted
        assert loop.count("F2FP.SATFINITE.E4M3") == module.BLOCK_N // 4
        assert loop.count("FADD") == 2 * 2 + 2 + 2
        assert "PRMT" not in loop
    # K and V in their slots, Q, O and the ones.
    rows = 2 * module.STAGES * module.BLOCK_N + 3 * module.CONSUMERS * module.ROWS
    assert 0 <= kernel.shared - rows * D - 8 * module.BLOCK_N < 1024


def test_registers_of_an_sm():
    """The launch takes what the partitions have together, at most all."""
    consumer, producer = module.REGISTERS
    launched = (65536 // (128 * (module.CONSUMERS + 1)) // 8 * 8) * (module.CONSUMERS + 1)
    assert module.CONSUMERS * consumer + producer <= launched


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 1, 300, 1), (1, 2, 1, 7)])
def test_sizes_of_one_compile(sizes):
    """Triton makes a constant of a size of 1."""
    B, H, S, S_kv = sizes
    one, v = meta(dtype=torch.float32), meta(B, 1, 64, 16)
    for causal in {False, S_kv == S}:
        args = meta(B, H, S, 64), meta(B, 1, S_kv, 64), v, one, one, one, causal
        code(90, "wgmma setmaxnreg", fp8_attention, *args)
        # Nothing that is known to be equal is packed: of that CUDA 12.9 makes garbage (pack_weights).
        ptx = dump(fp8_attention, args, sm=90)["ptx"]
        pairs = re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+\S+, (%\w+), (%\w+);", ptx)
        assert pairs
        assert not [pair for pair in pairs if len(set(pair)) == 1]


def test_what_is_refused(h, monkeypatch):
    monkeypatch.setattr(common, "gluon_architecture", lambda device: None)
    data = qkv(h, 1, 1, 8, 64)
    good = dict(zip(("q", "k", "v", "q_scale", "k_scale", "v_scale"), data, strict=True))
    cases = [
        ({"variant": "warp specialized"}, RuntimeError, "needs sm_90, .*use the variant 'tiles'"),
        ({"variant": "hopper"}, ValueError, "variant 'hopper' is not one of"),
    ]
    refused([(fp8_attention, *case) for case in cases], **good)


@pytest.mark.gpu
def test_on_the_gpu(hopper, monkeypatch):
    """Heads, grouped or not, parts of tiles and blocks, one key; more tiles than SMs, fewer, and one SM; this is what
    is called without a variant."""
    h = hopper
    for D in TILES:
        data = qkv(h, 1, 2, 300, D)
        assert torch.equal(fp8_attention(*data), specialized(*data))
    for B, H, H_kv, S, D in ((2, 16, 16, 2048, 128), (1, 32, 8, 1000, 128), (3, 12, 1, 1537, 64), (1, 2, 2, 8191, 64)):
        for causal in (False, True):
            check(h, *qkv(h, B, H, S, D, H_kv=H_kv), causal, dtype=torch.float16 if causal else torch.bfloat16)
        check(h, *qkv(h, B, H, 130, D, H_kv=H_kv, S_kv=S))
    for S in (1, 65, 127, 128, 129, 300):
        for D in TILES:
            check(h, *qkv(h, 1, 2, S, D), True)
            check(h, *qkv(h, 1, 2, 37, D, S_kv=S))
    check_heads(h)
    check_rounding_and_nan(h)
    for sms in (1, 7):
        monkeypatch.setattr(module, "device_limits", lambda device, sms=sms: Limits(sms, SHARED_LIMIT[90]))
        for D in TILES:  # several tiles a program
            check(h, *qkv(h, 2, 4, 700, D, H_kv=2), True)
            check(h, *qkv(h, 2, 4, 300, D, S_kv=900))
