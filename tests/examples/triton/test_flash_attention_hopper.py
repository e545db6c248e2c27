"""flash_attention, warp specialized: its kernel on a model of an SM, in any order of events, and its code."""

import functools
import re

from harness.codegen import dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common import gluon as common
from examples.common.device import SHARED_LIMIT, Limits
from examples.triton import flash_attention_hopper as module
from examples.triton.flash_attention import DTYPES, TILES, flash_attention
from tests.examples.tma.model import SM, no_shrinking, use_model
from tests.examples.triton.helpers import INF, NAN, code, harness, loops_in_turns, meta, refused
from tests.examples.triton.test_flash_attention import check, check_lse, qkv

specialized = functools.partial(flash_attention, variant="warp specialized")


def on_model(monkeypatch, seed=0, sms=1, long=module.LONG, group_bytes=module.GROUP_BYTES):
    monkeypatch.setattr(common, "gluon_architecture", lambda device: 90)
    monkeypatch.setattr(module, "LONG", long)
    monkeypatch.setattr(module, "GROUP_BYTES", group_bytes)
    return use_model(monkeypatch, {"flash_attention_hopper_kernel": module}, seed, sms)


@no_shrinking
@given(
    B=st.integers(1, 2), H_kv=st.integers(1, 2), group=st.integers(1, 2), S=st.integers(1, 400),
    S_kv=st.integers(1, 700), D=st.sampled_from(list(TILES)), causal=st.booleans(), sms=st.integers(1, 3),
    seed=st.integers(0, 10**6), long=st.sampled_from([1, 1000]), group_bytes=st.sampled_from([1, 2**18, 2**30]),
)  # fmt: skip
def test_any_order_of_events_is_right(B, H_kv, group, S, S_kv, D, causal, sms, seed, long, group_bytes):
    """With two consumers, and with three where the head dim is 64; heads alone and in groups."""
    h = harness()
    with pytest.MonkeyPatch.context() as patch:
        on_model(patch, seed, sms, long, group_bytes)
        check(h, *qkv(h, B, H_kv * group, S, D, H_kv=H_kv, S_kv=S if causal else S_kv), causal, fn=specialized)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_only_some_of_three_consumers_see(h, monkeypatch, seed):
    """They release them, and let the next have its turn: also where a tile's last consumers have no queries."""
    on_model(monkeypatch, seed, long=1)
    for S in (100, 400, 900):
        check(h, *qkv(h, 1, 1, S, 64), True, fn=specialized)


@pytest.mark.parametrize(("S", "blocks"), [(64, 7), (65, 11), (129, 15)])
def test_consumers_without_queries_multiply_one_block(h, monkeypatch, S, blocks):
    """600 keys are five blocks: consumers with queries multiply all five, the others one."""
    multiply, calls = SM.wgmma, []
    monkeypatch.setattr(SM, "wgmma", lambda self, *args, **how: calls.append(1) or multiply(self, *args, **how))
    on_model(monkeypatch, long=1)
    check(h, *qkv(h, 1, 1, S, 64, S_kv=600), fn=specialized)
    assert len(calls) == 3 * blocks  # Q K^T, P V and the sums


@pytest.mark.parametrize("long", [1, 1000])
def test_logarithms_and_infinities(h, monkeypatch, long):
    on_model(monkeypatch, sms=2, long=long)
    check_lse(h, specialized, same=long > 1)
    check_infinities(h)


def check_infinities(h, dtype=None):
    q, k, v = qkv(h, 1, 3, 300, 64, dtype=dtype)
    q[..., 0].abs_().add_(1)
    q[0, 0, 7, 0] = -1.0  # turns -inf to +inf
    k[0, 0, :150, 0] = -INF  # the first block, and a part of one
    k[0, 1, 128:, 0] = -INF  # all but the first
    q[0, 1, 5, 3] = NAN  # one row
    k[0, 2, :, 0] = -INF  # nothing left
    for causal in (False, True):
        check(h, q, k, v, causal, fn=specialized)


@pytest.mark.parametrize(("D", "S"), [(64, 1024), (128, 4096)])
@pytest.mark.parametrize("causal", [False, True])
def test_code_of_two_consumers(D, S, causal):
    kernel, text = generated(D, S, causal)
    # Q K^T and P V, before the loop, in it and after it.
    assert kernel.found["wgmma"] == 2 * (2 * D // 16 + 2 * module.BLOCK_N // 16)
    # The exponentials of a block run while its P V does: between the wait for the scores and that for P V. (That the
    # waits are there in PTX says nothing: the assembler moves them.)
    loops = re.findall(r"DEPBAR\.LE gsb0, 0x1(?:(?!DEPBAR).)*", text["sass"], re.DOTALL)
    assert len(loops) == 2
    assert {each.count("MUFU.EX2") for each in loops} == {module.BLOCK_N // 2 + 2}
    assert not re.search("STL|LDL", "".join(loops))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("causal", "S"), [(False, 4096), (True, 4096), (False, 4100)])
def test_code_of_three_consumers(causal, S, return_lse):
    D, steps = 64, module.BLOCK_N // 16
    # Triton 3.9 spills registers where there is a mask, but none in the loop (docs/running.md).
    masked = causal or S % module.BLOCK_N > 0
    kernel, text = generated(D, S, causal, None, return_lse, spills=8 * masked * (not return_lse))
    sums = not return_lse
    assert kernel.found["wgmma"] == 3 * 2 * (D // 16 + steps + sums * steps)
    # P V and the sums are done when Q K^T starts, whose scores are done when the exponentials start: 64, and two of
    # alpha. Additions are two of alpha's exponents, and those of the exact sums of two rows.
    wanted = ["take"] + [str(D)] * steps + ["8"] * sums * steps + ["wait"] + [str(module.BLOCK_N)] * (D // 16)
    wanted += ["pass", "wait", *["exp"] * (module.BLOCK_N // 2 + 2)]
    for loop, order in loops_in_turns(text, 3):
        assert order == wanted
        assert loop.count("FADD") == 2 + (module.BLOCK_N // 2 + 2) * return_lse


def generated(D, S, *call, spills=0):
    x = meta(4, 32, S, D)
    call = x, x, x, *call
    kernel = code(90, "cp.async.bulk.tensor setmaxnreg wgmma", flash_attention, *call, spills=spills)
    text = dump(flash_attention, call, sm=90)
    assert not re.search(r"serialized|C75\d\d", text["log"]), "the assembler waits after each MMA"
    consumers = 3 if D == 64 and S >= module.LONG else 2
    assert kernel.warps == 4 * (consumers + 1)
    rows = 2 * (4 if D == 64 else 2) * module.BLOCK_N + 2 * consumers * module.ROWS  # K and V in their rings, Q and O
    ones = 2 * 8 * module.BLOCK_N * (consumers == 3)
    assert 0 <= kernel.shared - 2 * D * rows - ones < 512
    return kernel, text


def test_registers_of_an_sm():
    """The launch takes what the partitions have together, at most all."""
    for consumers, (consumer, producer) in module.REGISTERS.items():
        launched = (65536 // (128 * (consumers + 1)) // 8 * 8) * (consumers + 1)
        assert consumers * consumer + producer <= launched


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 1, 300, 1), (1, 2, 1, 7), (1, 1, 2048, 1)])
def test_sizes_of_one_compile(sizes):
    """Triton makes a constant of a size of 1."""
    B, H, S, S_kv = sizes
    q, k = meta(B, H, S, 64), meta(B, 1, S_kv, 64)
    for return_lse in (False, True):
        code(90, "wgmma", flash_attention, q, k, k, False, None, return_lse)


def test_what_is_refused(h, monkeypatch):
    q, k, v = qkv(h, 1, 1, 8, 64)
    monkeypatch.setattr(common, "gluon_architecture", lambda device: None)
    call = False, None, False, "warp specialized"
    refused(flash_attention, RuntimeError, "needs sm_90, .*use the variant 'tiles'", q, k, v, *call)
    refused(flash_attention, RuntimeError, "needs sm_90, ", q[:, :0], k[:, :1], v[:, :1], *call)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_gpu(hopper, monkeypatch, dtype):
    """Heads, grouped or not, parts of tiles and blocks, one key; more tiles than SMs, fewer, and one SM; this is what
    is called without a variant."""
    h = hopper
    q, k, v = qkv(h, 1, 2, 300, 64)
    assert torch.equal(flash_attention(q, k, v), specialized(q, k, v))
    large = (
        (2, 16, 16, 2048, 128),
        (1, 32, 8, 1000, 128),
        (3, 12, 1, 1537, 64),
        (1, 2, 2, 8191, 64),
        (2, 4, 2, 2100, 64),
    )
    for B, H, H_kv, S, D in large:
        for causal in (False, True):
            check(h, *qkv(h, B, H, S, D, H_kv=H_kv, dtype=dtype), causal, fn=specialized)
        check(h, *qkv(h, B, H, 130, D, H_kv=H_kv, S_kv=S, dtype=dtype), fn=specialized)
    for S in (1, 65, 127, 128, 129, 300):
        for D in TILES:
            check(h, *qkv(h, 1, 2, S, D, dtype=dtype), True, fn=specialized)
            check(h, *qkv(h, 1, 2, 37, D, S_kv=S, dtype=dtype), fn=specialized)
    check_lse(h, specialized, dtype=dtype)
    check_infinities(h, dtype)
    check(h, *qkv(h, 1, 4, 2113, 64, H_kv=2, S_kv=900, dtype=dtype), fn=specialized)  # two consumers without queries
    with monkeypatch.context() as patch:
        patch.setattr(module, "LONG", 1)
        check_lse(h, specialized, same=False, dtype=dtype)
        check_infinities(h, dtype)
    for sms in (1, 7):
        monkeypatch.setattr(module, "device_limits", lambda device, sms=sms: Limits(sms, SHARED_LIMIT[90]))
        check(h, *qkv(h, 2, 4, 700, 128, dtype=dtype), True, fn=specialized)
        for causal in (False, True):  # three consumers, several tiles a program
            check(h, *qkv(h, 1, 4, 2100, 64, H_kv=2, dtype=dtype), causal, fn=specialized)
        check(h, *qkv(h, 2, 4, 300, 64, S_kv=900, dtype=dtype), fn=specialized)
