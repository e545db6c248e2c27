"""The gradients of flash_attention: edges of tiles, heads and layouts, what autograd hands over, the code."""

import functools

from harness.check import judge
from harness.codegen import compile_for

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.training import forward_backward
from examples.triton.flash_attention import DTYPES, TILES, flash_attention
from examples.triton.flash_attention_backward import launch_backward, reference_backward
from studies.triton.flash_attention import blocks_of_rows, gradient_budget
from tests.examples.triton.helpers import NAN, harness, meta
from tests.examples.triton.test_flash_attention import qkv

tiles = functools.partial(flash_attention, variant="tiles")


def check(h, q, k, v, causal=False, scale=None, what="", do=None, fn=flash_attention):
    """Against float64, in units of the size of 16 rows."""
    do = h.randn(*q.shape, dtype=q.dtype) if do is None else do
    what = what or f"{tuple(q.shape)} {q.stride()}, {tuple(k.shape)} {k.stride()}{', causal' * causal}, scale {scale}"
    got = forward_backward(functools.partial(fn, causal=causal, scale=scale))(q, k, v, do)
    wants = reference_backward(q, k, v, do, causal, scale)
    eps = torch.finfo(q.dtype).eps
    for name, x, want in zip(("o", "dq", "dk", "dv"), got, wants, strict=True):
        if name in ("dq", "dk") and (k.shape[2] == 1 or (causal and q.shape[2] == 1)):  # one key has all the weight
            assert x.abs().max() <= 32 * eps * do.norm() * v.abs().max() * max(q.abs().max(), k.abs().max())
        else:
            budget = gradient_budget(q.dtype, max(q.shape[2], k.shape[2]))
            judge(blocks_of_rows(x), blocks_of_rows(want), what=f"{name} of {what}", dtype=q.dtype, **budget)


@pytest.mark.parametrize("D", TILES)
def test_shapes(h, D):
    """One query, one key, primes, a block of either and one more, several."""
    for S, S_kv in ((1, 1), (1, 2), (1, 200), (200, 1), (37, 61), (128, 65), (129, 128)):
        check(h, *qkv(h, 1, 2, S, D, S_kv=S_kv))
    for S in (1, 65, 127, 128, 300):
        check(h, *qkv(h, 1, 2, S, D), True)


@given(
    B=st.integers(1, 2), H_kv=st.integers(1, 2), group=st.integers(1, 3), S=st.integers(16, 200),
    S_kv=st.integers(16, 200), D=st.sampled_from(list(TILES)), causal=st.booleans(),
    scale=st.sampled_from([None, 0.02]),
)  # fmt: skip
def test_any_shape(B, H_kv, group, S, S_kv, D, causal, scale):
    h = harness()
    check(h, *qkv(h, B, H_kv * group, S, D, H_kv=H_kv, S_kv=S if causal else S_kv), causal, scale)


def test_layouts_and_what_autograd_hands_over(h):
    B, H, S, D = 2, 3, 70, 64
    packed = h.randn(B, S, 3, H, D, dtype=h.half)
    check(h, *packed.transpose(1, 3).unbind(2), True)
    q, k, v = qkv(h, B, H, S, D)
    check(h, q, k, v, do=h.randn(B, S, H, D, dtype=h.half).transpose(1, 2), what="a gradient with other strides")
    wide = v.clone().requires_grad_()
    (dv,) = torch.autograd.grad(flash_attention(q, k, wide).sum(), wide)  # one number, expanded
    want = reference_backward(q, k, v, torch.ones_like(q))[3]
    budget = gradient_budget(h.half, S)
    judge(dv.flatten(-2), want.flatten(-2), what="dv alone", dtype=h.half, constant_ok=True, **budget)


def test_nothing_and_no_second_derivative(h):
    for B, H, S in ((0, 2, 5), (2, 2, 0)):
        q, k = (torch.empty(B, H, rows, 64, dtype=h.half, device=h.device).requires_grad_() for rows in (S, 5))
        dq, dk = torch.autograd.grad(flash_attention(q, k, k).sum(), (q, k))
        assert dq.shape == q.shape
        assert not dk.any()
    q = qkv(h, 1, 1, 5, 64)[0].requires_grad_()
    o, lse = flash_attention(q, q, q, return_lse=True)
    assert not lse.requires_grad
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attention: its gradient has no derivative"):
        dq.sum().backward()


def test_nan_stays_with_its_keys(h):
    """A key that a query does not see leaves its gradient alone, though its scores are NaN."""
    q, k, v = qkv(h, 1, 1, 300, 64)
    do = h.randn(*q.shape, dtype=q.dtype)
    clean = forward_backward(functools.partial(flash_attention, causal=True))(q, k, v, do)
    k[0, 0, 200] = NAN
    bad = forward_backward(functools.partial(flash_attention, causal=True))(q, k, v, do)
    assert torch.equal(bad[1][:, :, :128], clean[1][:, :, :128])
    assert torch.isnan(bad[1][0, 0, 200:]).all()


@pytest.mark.parametrize("D", TILES)
def test_generated_code(D):
    """Both kernels multiply by wgmma; a few bytes of the causal dK and dV are spilled at D = 128."""
    x, lse = meta(4, 32, 4096, D), meta(4, 32, 4096, dtype=torch.float32)
    for causal in (False, True):
        for kernel in compile_for(launch_backward, (x, x, x, x, lse, x, 0.1, causal, False), sms=(90, 100, 120)):
            assert not kernel.error
            assert kernel.sm != 90 or "wgmma" in kernel.found
            assert kernel.spills <= (96 if D == 128 else 0) or kernel.sm != 90


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_gpu(h, dtype):
    for B, H, H_kv, S, D in ((2, 16, 16, 2048, 128), (1, 32, 8, 1000, 128), (3, 12, 1, 1537, 64)):
        for causal in (False, True):
            check(h, *qkv(h, B, H, S, D, H_kv=H_kv, dtype=dtype), causal, fn=tiles)
        check(h, *qkv(h, B, H, 130, D, H_kv=H_kv, S_kv=S, dtype=dtype), fn=tiles)


@pytest.mark.gpu
def test_every_run_gives_the_same_bits(h):
    q, k, v = qkv(h, 2, 16, 2000, 128, H_kv=4)
    do = h.randn(*q.shape, dtype=q.dtype)
    runs = [forward_backward(functools.partial(tiles, causal=True))(q, k, v, do) for _ in range(5)]
    assert all(torch.equal(*pair) for run in runs[1:] for pair in zip(run, runs[0], strict=True))
