"""What the lessons' own error budgets must not let through: results that are nearly right, each wrong by one fault."""

from types import SimpleNamespace

from harness.check import CheckError, VacuousCheck, judge, judge_all
from harness.session import Harness

import pytest
import torch
from rich.console import Console

from examples.common.attention import attention_budget, attention_reference
from examples.common.fp8 import E4M3
from examples.fp8 import blockwise_matmul, fp8_matmul
from examples.triton import layer_norm, softmax

ON_GPU = SimpleNamespace(interpreted=False)  # budgets of the instructions that a GPU has
BF16 = torch.bfloat16


@pytest.fixture
def h() -> Harness:
    return Harness("budgets", console=Console(quiet=True))


def truncated(x: torch.Tensor) -> torch.Tensor:
    return x.float().view(torch.int32).bitwise_and(-65536).view(torch.float32).bfloat16()


def passes(got: torch.Tensor, want: torch.Tensor, **budget) -> bool:
    try:
        judge(got, want, what="probe", dtype=got.dtype, **budget)
    except (CheckError, VacuousCheck):
        return False
    return True


def test_a_gemm(h):
    a, b = h.randn(256, 1024, dtype=BF16), h.randn(1024, 256, dtype=BF16)
    want = a.double() @ b.double()
    for right in (want.bfloat16(), a @ b):
        assert passes(right, want, terms=1024)
    for wrong in ((want * 1.0115).bfloat16(), truncated(want), (a[:, :-16].double() @ b[:-16].double()).bfloat16()):
        assert not passes(wrong, want, terms=1024)


def test_softmax(h):
    x = h.rows(64, 512, dtype=BF16)
    want = softmax.reference(x)
    assert passes(want.bfloat16(), want, **softmax.BUDGET)
    neighbour = torch.exp(x.double() - x.double().logsumexp(1).roll(1)[:, None])
    for wrong in (want * 1.011, want * (1 + 3e-3), neighbour, torch.softmax(x[:, :-1].double(), 1)):
        wrong = torch.nn.functional.pad(wrong, (0, want.shape[1] - wrong.shape[1]))
        assert not passes(wrong.bfloat16(), want, **softmax.BUDGET)


def attention_in_two_roundings(q, k, v, scale, weights: torch.dtype) -> torch.Tensor:
    """As the kernels have it: weights rounded to a 16-bit or 8-bit format before the second product."""
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    exps = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = (exps * 2**8).to(weights).double() / 2**8 if weights.itemsize == 1 else exps.to(weights).double()
    return rounded @ v.double() / exps.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("weights", "budget"), [(BF16, attention_budget(BF16, 512)), (E4M3, attention_budget(E4M3, 512))]
)
def test_attention(h, weights, budget):
    q, k, v = (h.randn(1, 2, 512, 64, dtype=BF16) for _ in range(3))
    want = attention_reference(q, k, v, False)
    right = attention_in_two_roundings(q, k, v, 64**-0.5, weights)
    assert passes(right.bfloat16(), want, **budget)
    factor = 1.02 if weights is BF16 else 1.10
    short = attention_reference(q, k[:, :, :-16], v[:, :, :-16], False)
    scaled = attention_in_two_roundings(q, k, v, 64**-0.5 * (1.005 if weights is BF16 else 1.05), weights)
    for wrong in (right * factor, scaled, short):
        assert not passes(wrong.bfloat16(), want, **budget)


@pytest.mark.parametrize(
    ("lesson", "make"),
    [(fp8_matmul, lambda h, K: fp8_matmul.operands(h, 64, 128, K, rows=True)),
     (blockwise_matmul, lambda h, K: blockwise_matmul.operands(h, 64, 128, K))],
)  # fmt: skip
def test_an_fp8_gemm_with_the_longest_k(h, lesson, make):
    K = 16384
    inputs, budget = make(h, K), lesson.budget(ON_GPU, K)
    want = lesson.reference(*inputs)
    assert passes(want.bfloat16(), want, **budget)
    a, b, scale_a, scale_b = inputs
    part = 32 if lesson is fp8_matmul else 128
    short = a.clone()
    short[:, -part:] = 0
    for wrong in (want * 1.10, want * 1.04, lesson.reference(short, b, scale_a, scale_b)):
        assert not passes(wrong.bfloat16(), want, **budget)


def test_layer_norm(h):
    x, weight, bias, dy = layer_norm.inputs(h, 512, 256)
    wants = layer_norm.reference_step(x, weight, bias, dy)
    budget = {"what": "probe", "dtype": x.dtype, "terms": 512}
    as_stored = lambda results: [each.to(x.dtype) for each in results]  # noqa: E731
    judge_all(as_stored(wants), wants, **budget)
    y, dx, dweight, dbias = wants
    short = layer_norm.reference_step(x[:-4], weight, bias, dy[:-4])
    no_eps = layer_norm.in_float64(layer_norm.forward_backward(
        lambda x, w, b: layer_norm.torch_layer_norm(x, w, b, eps=0.0)))(x, weight, bias, dy)  # fmt: skip
    for wrong in (
        (y, dx, short[2], dbias),
        (y, dx, dweight, short[3]),
        (y, dx.roll(1, 0), dweight, dbias),
        (no_eps[0], dx, dweight, dbias),
        (y, no_eps[1], dweight, dbias),
    ):
        with pytest.raises(CheckError):
            judge_all(as_stored(wrong), wants, **budget)


def test_dx_with_the_statistics_of_the_row_above(h):
    x, weight, bias, dy = (each.double() for each in layer_norm.inputs(h, 64, 1024))
    mean, rstd = x.mean(1, keepdim=True), (x.var(1, unbiased=False, keepdim=True) + 1e-5).rsqrt()

    def dx(mean, rstd):
        x_hat, g = (x - mean) * rstd, dy * weight
        return (g - g.mean(1, keepdim=True) - x_hat * (g * x_hat).mean(1, keepdim=True)) * rstd

    want = layer_norm.reference_step(x, weight, bias, dy)[1]
    assert passes(dx(mean, rstd).to(BF16), want, terms=1024)
    for wrong in (dx(mean.roll(1, 0), rstd), dx(mean, rstd.roll(1, 0))):
        assert not passes(wrong.to(BF16), want, terms=1024)
