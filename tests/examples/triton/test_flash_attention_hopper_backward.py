"""The gradients of flash_attention, warp specialized: on a model of an SM, in any order of events; the code."""

import functools
import re

from harness.codegen import compile_for, dump

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.common import gluon as common
from examples.common.device import SHARED_LIMIT, Limits
from examples.common.training import forward_backward
from examples.triton import flash_attention_hopper as forward
from examples.triton import flash_attention_hopper_backward as module
from examples.triton.flash_attention import DTYPES, TILES, flash_attention
from tests.examples.tma.model import no_shrinking, use_model
from tests.examples.triton.helpers import NAN, harness, meta
from tests.examples.triton.test_flash_attention import qkv
from tests.examples.triton.test_flash_attention_backward import check

specialized = functools.partial(flash_attention, variant="warp specialized")
KERNEL = "flash_attention_hopper_backward_kernel"


def on_model(monkeypatch, seed=0, sms=1, long=module.LONG, group_bytes=module.GROUP_BYTES):
    monkeypatch.setattr(common, "gluon_architecture", lambda device: 90)
    for each in (forward, module):
        monkeypatch.setattr(each, "LONG", long)
        monkeypatch.setattr(each, "GROUP_BYTES", group_bytes)
    return use_model(monkeypatch, {"flash_attention_hopper_kernel": forward, KERNEL: module}, seed, sms)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("D", "long"), [(64, 1000), (64, 1), (128, 1000)])
@settings(no_shrinking, max_examples=5)
@given(
    B=st.integers(1, 2), H_kv=st.integers(1, 2), group=st.integers(1, 2), S=st.integers(16, 400),
    S_kv=st.integers(16, 400), sms=st.integers(1, 3), seed=st.integers(0, 10**6),
    group_bytes=st.sampled_from([1, 2**18, 2**30]),
)  # fmt: skip
def test_any_order_of_events_is_right(B, H_kv, group, S, S_kv, D, causal, sms, seed, long, group_bytes):
    """With two consumers, and with three where the head dim is 64; heads alone and in groups."""
    h = harness()
    with pytest.MonkeyPatch.context() as patch:
        on_model(patch, seed, sms, long, group_bytes)
        check(h, *qkv(h, B, H_kv * group, S, D, H_kv=H_kv, S_kv=S if causal else S_kv), causal, fn=specialized)


@pytest.mark.parametrize("D", TILES)
def test_edges(h, monkeypatch, D):
    """One query, one key, a block of either and one more; a scale; the gradients are those of the other kernels."""
    on_model(monkeypatch, sms=2)
    for S, S_kv in ((1, 1), (1, 200), (200, 1), (64, 128), (65, 129)):
        check(h, *qkv(h, 1, 2, S, D, S_kv=S_kv), fn=specialized)
    for S in (1, 64, 128, 129):
        check(h, *qkv(h, 1, 2, S, D), True, 0.02, fn=specialized)


def test_three_consumers(h, monkeypatch):
    """The diagonal crosses three blocks of a tile; a last tile of one row; one program, heads that share keys."""
    on_model(monkeypatch, long=1)
    for S, S_kv, causal in ((193, 193, True), (70, 193, False)):
        check(h, *qkv(h, 1, 2, S, 64, H_kv=1, S_kv=S_kv), causal, fn=specialized)


@pytest.mark.parametrize(("D", "S_kv"), [(64, 70), (128, 192)])
def test_keys_beyond_the_end_weigh_nothing(h, monkeypatch, D, S_kv):
    """They arrive as zeros, so their scores are 0, here far above all others: without a mask they weigh more than
    float16 can hold, and infinity times 0 is NaN."""
    on_model(monkeypatch)
    q, k, v = qkv(h, 1, 1, 20, D, S_kv=S_kv)
    q[..., 0], k[..., 0] = -30, 30
    got = forward_backward(specialized)(q, k, v, h.randn(*q.shape, dtype=q.dtype))
    assert all(torch.isfinite(x).all() for x in got)


def test_nan_stays_with_who_sees_it(h, monkeypatch):
    on_model(monkeypatch, long=1)
    check_nan(h)


def check_nan(h):
    """A key that a query does not see leaves its gradient alone, though their score, or its gradient, is NaN; a query
    leaves alone the values of keys that it does not see. (Within a block of keys the forward has 0 * NaN.)"""
    q, k, v = qkv(h, 1, 1, 384, 64)
    do = h.randn(*q.shape, dtype=q.dtype)
    call = forward_backward(functools.partial(specialized, causal=True))
    clean = call(q, k, v, do)
    for x, row, gradient, rows in (
        (k, 200, 1, slice(0, 128)),
        (v, 150, 1, slice(0, 128)),
        (q, 100, 3, slice(101, 384)),
    ):
        kept = x[0, 0, row].clone()
        x[0, 0, row] = NAN
        bad = call(q, k, v, do)
        x[0, 0, row] = kept
        assert torch.equal(bad[gradient][:, :, rows], clean[gradient][:, :, rows])
        assert torch.isnan(bad[1][0, 0, row]).all()


def launch(q, k, v, o, lse, do, scale, causal):
    """The gradients go where their tensors are."""
    module.launch_hopper_backward(q, k, v, o, lse, do, q, k, v, scale, causal)


@pytest.mark.parametrize(("D", "S"), [(64, 4096), (64, 1024), (128, 4096)])
@pytest.mark.parametrize("causal", [False, True])
def test_generated_code(D, S, causal):
    x, lse, consumers = meta(4, 32, S, D), meta(4, 32, S, dtype=torch.float32), 3 if (D, S) == (64, 4096) else 2
    call = x, x, x, x, lse, x, 0.1, causal
    of_q, of_kv = (each for each in compile_for(launch, call, sms=(90,)) if each.kernel == KERNEL)
    for kernel, most, (block, stages), results in (
        (of_q, 0, module.DQ_BLOCKS[D], 1),
        (of_kv, 0 if (D, consumers) == (64, 2) else 512, module.DKDV_BLOCKS[D], 2),
    ):
        assert not kernel.error
        assert kernel.warps == 4 * (consumers + 1)
        assert kernel.spills <= most
        slots_of_queries = consumers if kernel is of_q else stages
        operands = 2 * D * ((2 + results) * consumers * module.ROWS + 2 * stages * block)
        assert 0 <= kernel.shared - operands - 2 * 4 * 64 * slots_of_queries < 512  # with the lse and delta of 64 rows
    text = dump(launch, call, kernel=KERNEL, sm=90)  # of the later launch, for dK and dV
    assert not re.search(r"serialized|C75\d\d", text["log"]), "the assembler waits after each MMA"


def test_the_gradients_are_those_of_the_variant(h, monkeypatch):
    """Without one the interpreter runs the Triton kernels; "warp specialized", on the model, launches these."""
    launched = []
    monkeypatch.setattr(
        "examples.triton.flash_attention_backward.launch_hopper_backward", lambda *args: launched.append(args)
    )
    q, k, v = qkv(h, 1, 1, 32, 64)
    if h.interpreted:
        forward_backward(flash_attention)(q, k, v, q)
        assert not launched
    on_model(monkeypatch)
    forward_backward(specialized)(q, k, v, q)
    assert len(launched) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_gpu(hopper, monkeypatch, dtype):
    """Heads, grouped or not, parts of tiles and blocks, one key; more tiles than SMs, fewer, and one SM; this is what
    is called without a variant."""
    h = hopper
    for B, H, H_kv, S, D in ((2, 16, 16, 2048, 128), (1, 32, 8, 1000, 128), (3, 12, 1, 1537, 64), (1, 4, 2, 4200, 64)):
        for causal in (False, True):
            check(h, *qkv(h, B, H, S, D, H_kv=H_kv, dtype=dtype), causal)
        check(h, *qkv(h, B, H, 130, D, H_kv=H_kv, S_kv=S, dtype=dtype), fn=specialized)
    for S in (1, 65, 192):  # each is another kernel: of a constant, of any number, of a multiple of 16
        for D in TILES:
            check(h, *qkv(h, 1, 2, S, D, dtype=dtype), True, fn=specialized)
            check(h, *qkv(h, 1, 2, 37, D, S_kv=S, dtype=dtype), fn=specialized)
    check_nan(h)
    for sms in (1, 7):
        monkeypatch.setattr(module, "device_limits", lambda device, sms=sms: Limits(sms, SHARED_LIMIT[90]))
        check(h, *qkv(h, 2, 4, 1000, 128, H_kv=2, dtype=dtype), True, fn=specialized)
        check(h, *qkv(h, 1, 2, 4200, 64, dtype=dtype), True, fn=specialized)


@pytest.mark.gpu
def test_every_run_gives_the_same_bits(hopper):
    h = hopper
    q, k, v = qkv(h, 2, 16, 2000, 128, H_kv=4)
    do = h.randn(*q.shape, dtype=q.dtype)
    runs = [forward_backward(functools.partial(specialized, causal=True))(q, k, v, do) for _ in range(5)]
    assert all(torch.equal(*pair) for run in runs[1:] for pair in zip(run, runs[0], strict=True))
