"""fp8_attention, warp specialized: its kernel on a model of an SM, its polynomial, and its code."""

import functools
import math
import re
from collections import defaultdict

from harness.codegen import dump

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from examples.common import gluon as common
from examples.common.attention import attention_budget
from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3
from examples.fp8 import fp8_attention_hopper as module
from examples.fp8.fp8_attention import SPECIALIZED, TILES, fp8_attention, off_by, prepare, reference
from examples.fp8.fp8_attention_weights import polynomial
from tests.examples.fp8.helpers import INF, NAN, code, meta, refused
from tests.examples.fp8.test_fp8_attention import qkv
from tests.examples.tma.model import no_shrinking, use_model
from tests.examples.triton.helpers import harness

specialized = functools.partial(fp8_attention, variant="warp specialized")


def check(h, *data, dtype=None):
    fn, dtype = functools.partial(specialized, out_dtype=dtype or h.half), dtype or h.half
    h.check(fn, reference, *data, what="warp specialized", dtype=dtype, **attention_budget(E4M3, data[1].shape[2]))


def on_model(monkeypatch, seed=0, sms=1, emulated=8, consumers=3, group_bytes=module.GROUP_BYTES):
    monkeypatch.setattr(common, "gluon_architecture", lambda device: 90)
    monkeypatch.setattr(module, "GROUP_BYTES", group_bytes)
    monkeypatch.setattr(module, "EMULATED", dict.fromkeys(TILES, emulated))
    monkeypatch.setattr(module, "CONSUMERS", dict.fromkeys(TILES, consumers))
    return use_model(monkeypatch, {"fp8_attention_hopper_kernel": module}, seed, sms)


@no_shrinking
@given(
    B=st.integers(1, 2), H_kv=st.integers(1, 2), group=st.integers(1, 2), S=st.integers(1, 250),
    S_kv=st.integers(1, 400), D=st.sampled_from(list(TILES)), causal=st.booleans(), per_head=st.booleans(),
    sms=st.integers(1, 3), seed=st.integers(0, 10**6), emulated=st.sampled_from([0, 1, 4, 8]),
    consumers=st.integers(2, 3), group_bytes=st.sampled_from([1, 2**18, 2**30]),
)  # fmt: skip
def test_any_order_of_events_is_right(
    B, H_kv, group, S, S_kv, D, causal, per_head, sms, seed, emulated, consumers, group_bytes
):
    h = harness()
    with pytest.MonkeyPatch.context() as patch:
        on_model(patch, seed, sms, emulated, consumers, group_bytes)
        data = qkv(h, B, H_kv * group, S, D, H_kv=H_kv, S_kv=S if causal else S_kv, per_head=per_head)
        check(h, *data, causal)


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
    data = qkv(h, 2, 3, 70, 64)
    turned = [scale.t().contiguous().t() for scale in data[3:]]
    assert torch.equal(specialized(*data), specialized(*data[:3], *turned))


def test_rounding_and_nan(h, monkeypatch):
    on_model(monkeypatch)
    check_rounding_and_nan(h)


def check_rounding_and_nan(h):
    """Evenly spread in a binade, rounding the weights would cost 0.026; and nothing is lost on average."""
    data = qkv(h, 1, 2, 300, 64, H_kv=1)
    for causal in (False, True):
        o, want = specialized(*data, causal, out_dtype=h.half), reference(*data, causal)
        assert 0.01 < off_by(o, want) < 0.04
        assert ((o.double() * want).sum() / want.square().sum()).item() == pytest.approx(1, abs=0.01)
    clean = specialized(*data, True, out_dtype=h.half)
    for which, row in ((0, 7), (1, 127), (1, 200)):  # a query; a key of an emulated column; one of the last block
        x = data[which].clone()
        x.view(torch.uint8)[0, 0, row, 3] = 0x7F  # NaN
        o, hit = specialized(*data[:which], x, *data[which + 1 :], True, out_dtype=h.half), slice(row, None)
        hit = slice(row, row + 1) if which == 0 else slice(row, None)
        assert o[0, 0, hit].isnan().all()
        assert torch.equal(o[0, 0, : hit.start], clean[0, 0, : hit.start])


@triton.jit
def polynomial_kernel(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, polynomial(tl.load(x_ptr + at)))


def test_polynomial(h):
    """As far off as it may be on [-1/2, 1/2], and there alone is it another for another integer; never out of range."""
    x = torch.cat((torch.linspace(-125.5, 8, 2**16 - 8), torch.tensor([8, 0, -126, -127, -200, -3.4e38, -INF, NAN])))
    x = x.to(h.device)
    y = torch.empty_like(x)
    polynomial_kernel[(1,)](x, y, len(x))
    worst = (y[:-7].double() / x[:-7].double().exp2() - 1).abs().max().item()
    assert 0.0015 < worst < 0.0018
    assert y[-6:-1].tolist() == [pytest.approx(2.0**-126, rel=0.0018)] * 5
    assert math.isnan(y[-1])


def operands_of_values(ptx: str) -> list[list[set]]:
    """The left operands of P V, register by register: which scores of Q K^T its bytes come from, by their numbers."""
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


@pytest.mark.parametrize("D", list(TILES))
def test_weights_stay_in_their_registers(D):
    """A thread holds scores of the keys 8 n + 2 t and the next, of two rows, for each n; a register of the operand has
    four of the 16 keys of a row in pack_values()'s order."""
    q, scale = meta(4, 32, 4096, D), meta(4, 32, dtype=torch.float32)
    args = (q, q, q.transpose(2, 3).contiguous(), scale, scale, scale)
    operands = operands_of_values(dump(fp8_attention, args, {"variant": "warp specialized"}, sm=90)["ptx"])
    assert len(operands) == module.CONSUMERS[D] * 2 * module.BLOCK_N // 32
    for number, left in enumerate(operands):
        for i, register in enumerate(left):
            group, row = 2 * (number % (module.BLOCK_N // 32)) + i // 2, i % 2
            first = 8 * group + 2 * row
            assert register == {(first, first + 1, first + 4, first + 5)}


@pytest.mark.parametrize("D", list(TILES))
@pytest.mark.parametrize("causal", [False, True])
def test_generated_code(D, causal):
    q, scale = meta(4, 32, 4096, D), meta(4, 32, dtype=torch.float32)
    args, consumers = (q, q, q.transpose(2, 3).contiguous(), scale, scale, scale, causal), module.CONSUMERS[D]
    # Triton 3.9 spills addresses, causal and with three consumers, once a tile; nothing in the loop, see below.
    options = {"variant": "warp specialized", "spills": 256 if causal and consumers == 3 else 0}
    kernel = code(90, "cp.async.bulk.tensor setmaxnreg wgmma", fp8_attention, *args, **options)
    text = dump(fp8_attention, args, {"variant": "warp specialized"}, sm=90)
    assert not re.search(r"serialized|C75\d\d", text["log"]), "the assembler waits after each MMA"
    assert kernel.warps == 4 * (consumers + 1)
    assert kernel.found["wgmma"] == kernel.found["mma f8"] == consumers * (2 * D // 32 + 2 * module.BLOCK_N // 32)
    # Between the wait for the scores and that for P V are all exponentials: a share by the polynomial, the rest by
    # the exponential unit, with two of alpha. Between that and the end of the pass 64 weights are packed by 32
    # instructions, and in the whole pass no other moves a byte.
    loops = re.findall(r"DEPBAR\.LE gsb0, 0x1((?:(?!DEPBAR).)*)DEPBAR\.LE gsb0, 0x0(.*?)BRA", text["sass"], re.DOTALL)
    assert len(loops) in {2, consumers}, "the disassembly of Triton 3.6 ends within the third consumer"
    emulated = module.BLOCK_N // 2 // module.EMULATED[D] if module.EMULATED[D] else 0
    for under, after in loops:
        assert under.count("MUFU.EX2") == module.BLOCK_N // 2 + 2 - emulated
        assert under.count("FMNMX.NAN") == emulated
        assert after.count("F2FP.SATFINITE.E4M3") == module.BLOCK_N // 4
        assert not re.search("STL|LDL|PRMT|MUFU", after)
        assert not re.search("STL|LDL|PRMT", under)
    # K and V in their rings, Q and O.
    size = 2 * module.STAGES[D] * module.BLOCK_N * D + consumers * module.ROWS * D * 3
    assert 0 <= kernel.shared - size < 1024


def test_registers_of_an_sm():
    """The launch takes what the partitions have together, at most all."""
    for consumers, (consumer, producer) in module.REGISTERS.items():
        launched = (65536 // (128 * (consumers + 1)) // 8 * 8) * (consumers + 1)
        assert consumers * consumer + producer <= launched


def test_what_is_refused(h, monkeypatch):
    monkeypatch.setattr(common, "gluon_architecture", lambda device: None)
    data = qkv(h, 1, 1, 8, 64)
    good = dict(zip(("q", "k", "v", "q_scale", "k_scale", "v_scale"), data, strict=True))
    cases = [
        ({"variant": "warp specialized"}, RuntimeError, "needs sm_90, .*use the variant 'tiles'"),
        ({"variant": "hopper"}, ValueError, "variant 'hopper' is not one of"),
    ]
    refused([(fp8_attention, *case) for case in cases], **good)


@pytest.fixture
def hopper(h):
    if h.interpreted or h.machine.sm != 90:
        pytest.skip("needs sm_90, and Gluon is not interpreted")
    return h


@pytest.mark.gpu
def test_on_the_gpu(hopper, monkeypatch):
    """Heads, grouped or not, parts of tiles and blocks, one key; more tiles than SMs, fewer, and one SM; this is what
    is called without a variant."""
    h = hopper
    for D in SPECIALIZED:
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
