"""llama_block: its quantizers to the bit, its operators as torch wants them, every way to run the block to float64."""

import itertools
from dataclasses import replace

import pytest
import torch

from examples.common.fp8 import E4M3, E5M2, FLOOR, fp8_max, quantize_reference
from examples.common.quantize import READ_BACK, read_back
from examples.common.transformer import Config, Transformer
from examples.fp8 import llama_block as lesson
from examples.fp8 import llama_block_ops as ops
from examples.fp8.llama_block import EAGER, FP8, FP8_ERROR, OURS, FP8Linear, FP8Prefill, FP8Training, by_rows
from examples.fp8.llama_block_model import Kernels, Prefill, Training, off_by, reference
from examples.fp8.llama_block_quantize import (
    ROW_MAX,
    quantize_transposed,
    swiglu_quantize,
    swiglu_reference,
    transposed_reference,
)
from tests.examples.fp8.helpers import INF, NAN, code, meta, refused, same_codes
from tests.test_house import made_up

SMALL = Config(width=128, layers=1, heads=2, kv_heads=1, hidden=192, vocab=1)


@pytest.fixture(autouse=True)
def provided(h):
    ops.provide(h.peer)


def case(h, batch=2, tokens=16, config=SMALL):
    """A block, the angles of its positions, x and dy."""
    model = Transformer.random(replace(config, max_tokens=tokens), h.device, h.half).requires_grad_(True)
    x, dy = (h.randn(batch, tokens, config.width, dtype=h.half) for _ in range(2))
    return model.blocks[0], (model.cos, model.sin), x, dy


def compiled(h, module):
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager" if h.interpreted else "inductor")


# --- quantizers


@pytest.mark.parametrize("shape", [(1, 1), (1, 200), (200, 1), (127, 129), (129, 127), (128, 256)])
def test_transposed_to_the_bit(h, shape):
    for x_dtype, dtype in itertools.product((torch.float32, torch.float16), (E4M3, E5M2)):
        x = h.randn(*shape, dtype=x_dtype, scale=3.0)
        scale = x.abs().amax().float() / fp8_max(dtype)
        q = quantize_transposed(x, scale, dtype)
        assert q.is_contiguous()
        want = (x.float() * (1 / scale)).clamp(-fp8_max(dtype), fp8_max(dtype)).to(dtype).t().contiguous()
        assert same_codes(h, q, want)
        h.check(quantize_transposed, transposed_reference, x, scale, dtype=E4M3, terms=0, constant_ok=True)


def test_transposed_of_padded_rows_saturates_and_keeps_nan_and_nothing(h):
    x = h.randn(70, 300, dtype=h.half)[:, 16:256]
    one = torch.ones(1, device=h.device)
    assert torch.equal(quantize_transposed(x, one).float(), quantize_transposed(x.contiguous(), one).float())
    x = torch.tensor([[1e4, -1e4], [NAN, 0.0]], device=h.device)
    q = quantize_transposed(x, one).float()
    assert q[:, 0].tolist() == [448.0, -448.0]
    assert q[0, 1].isnan()
    assert q[1, 1] == 0
    assert quantize_transposed(x[:0], one).shape == (2, 0)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 31), (5, 128), (2, 781), (2, 2049), (1, ROW_MAX)])
def test_swiglu_reads_back(h, rows, cols):
    for dtype, scale in ((torch.float32, 1e-2), (torch.float16, 4.0)):
        packed = h.randn(rows, 2 * cols + 8, dtype=dtype, scale=scale)[:, : 2 * cols]
        fn = lambda x: read_back(*swiglu_quantize(x), "row")  # noqa: E731
        h.check(fn, swiglu_reference, packed, constant_ok=cols == 1, **READ_BACK)
    _, scales = swiglu_quantize(packed)
    want = swiglu_reference(packed).abs().amax(1, keepdim=True).clamp(min=FLOOR) / 448
    assert scales.shape == (rows, 1)
    assert ((scales.double() - want).abs() <= 1e-5 * want).all()


def test_swiglu_of_zeros_and_what_is_not_finite_stays_in_its_row(h):
    packed = h.randn(4, 64)
    packed[0] = 0
    packed[1, 3] = NAN
    packed[2, 3], packed[2, 35] = INF, 1.0
    y = read_back(*swiglu_quantize(packed), "row")
    assert (y[0] == 0).all()
    assert y[1].isnan().all()
    assert not y[2].isfinite().all()
    assert y[3].isfinite().all()
    assert swiglu_quantize(packed[:0])[0].shape == (0, 32)


def test_bad_input(h):
    x, one = h.randn(4, 32), torch.ones(1, device=h.device)
    refused(
        [
            (swiglu_quantize, (x[:, :31],), ValueError, "two halves"),
            (swiglu_quantize, (h.randn(1, 2 * ROW_MAX + 2),), ValueError, "16385 columns"),
            (swiglu_quantize, (x, torch.float16), TypeError, "float8_e4m3fn"),
            (quantize_transposed, (x, one, torch.float16), TypeError, "float8_e4m3fn"),
            (quantize_transposed, (x, -one), ValueError, "positive"),
            (quantize_transposed, (x, h.randn(4)), ValueError, "shape"),
            (Kernels, (case(h)[0], ("swish",)), ValueError, "swish"),
            (FP8Training, (case(h)[0], ("swiglu",)), ValueError, "swiglu"),
        ]
    )


def test_code_of_whole_tiles_reads_and_writes_wide():
    x, scale = meta(16384, 4096, dtype=torch.bfloat16), meta(1, dtype=torch.float32)
    code(90, "ld.global.v4 st.global.v4", quantize_transposed, x, scale, check_scales=False)
    code(90, "ld.global.v4 st.global.v4", swiglu_quantize, meta(16384, 28672, dtype=torch.bfloat16))


# --- operators


def operands(h) -> dict:
    """An operator -> arguments, those with a gradient first."""
    x, residual, w = h.randn(32, 64), h.randn(32, 64), h.randn(64)
    q, k, v = (h.randn(1, heads, 16, 64, dtype=h.half) for heads in (2, 1, 1))
    weight = h.randn(48, 64, dtype=h.half)
    codes, scale = by_rows(weight)
    return {
        ops.rms_norm: (x, residual, w, 1e-5), ops.attention: (q, k, v), ops.linear: (weight, weight),
        ops.swiglu_linear: (weight, weight), ops.fp8_product: (codes, codes, scale, scale, h.half),
        ops.transposed: (weight, scale.amax()), ops.rows_quantized: (weight,),
        ops.norm_quantized: (x, w, 1e-5), ops.swiglu_quantized: (weight,),
    }  # fmt: skip


def test_every_operator_is_registered_as_torch_wants_it(h):
    for op, arguments in operands(h).items():
        torch.library.opcheck(op, arguments, test_utils="test_faketensor")


def test_an_operator_without_its_wrapper_says_what_to_call(h, monkeypatch):
    monkeypatch.setattr(ops, "WRAPPERS", {})
    with pytest.raises(RuntimeError, match="call provide"):
        ops.rms_norm(*operands(h)[ops.rms_norm])


# --- the block


def calls(phase):
    """What each way to run the block is, by a name for its test."""
    names = [name for name in Kernels.USES if phase == "prefill" or name != "swiglu"]
    for use in [(), *((name,) for name in names), names]:
        yield f"ours {', '.join(use)}", lambda block, use=use: Kernels(block, use)
    kind = FP8Prefill if phase == "prefill" else FP8Training
    for use in [(), *((name,) for name in kind.USES), kind.USES]:
        yield f"FP8 {', '.join(use)}", lambda block, use=use: kind(block, use)
    yield "FP8 not fused", lambda block: kind(block, fuse=False)
    if phase == "training":
        yield "FP8 dw in 16 bits", lambda block: FP8Training(block, fp8_dw=False)


PREFILL, TRAINING = (dict(calls(phase)) for phase in ("prefill", "training"))


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_to_float64(h, name):
    block, angles, x, _ = case(h)
    want = reference(block, angles, x)
    limit = FP8_ERROR["prefill"] if name.startswith("FP8") else 2 * off_by(Prefill(block, angles)(x), want)
    assert off_by(Prefill(compiled(h, PREFILL[name](block)), angles)(x), want) <= limit


@pytest.mark.parametrize("name", TRAINING)
def test_training_to_float64(h, name):
    block, angles, x, dy = case(h)
    want = reference(block, angles, x, dy)
    limit = FP8_ERROR["training"]
    if not name.startswith("FP8"):
        limit = 2 * off_by(Training(block, angles, block.parameters())(x, dy), want)
    step = Training(compiled(h, TRAINING[name](block)), angles, block.parameters())
    assert off_by(step(x, dy), want) <= limit
    assert off_by(step(x, dy), want) <= limit  # nothing of the call before is left


def test_the_reference_is_the_block_in_float64(h):
    block, angles, x, dy = case(h)
    want = reference(block, angles, x, dy)
    assert torch.equal(want[0], reference(block, angles, x)[0])
    exact = block.double()
    step = Training(exact, tuple(each.double() for each in angles), exact.parameters())
    for got, expected in zip(step(x.double(), dy.double()), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_the_gradient_of_a_linear_is_that_of_what_it_multiplied(h):
    """Apart from the roundings to FP8: with operands that FP8 holds, y, dx and dw are right to 16 bits."""
    x, w, dy = (h.randint(5, *shape).sub(2).to(h.half) for shape in ((32, 48), (64, 48), (32, 64)))
    for each in (x, w, dy):
        each[:, 0] = 2.0  # the largest of each row: every scale is the same, a power of two over 448
        each *= 448 / 512
    for fp8_dw in (True, False):
        leaves = [each.detach().clone().requires_grad_() for each in (x, w)]
        y = FP8Linear.apply(*leaves, by_rows, fp8_dw)
        gots = (y.detach(), *torch.autograd.grad(y, leaves, dy))
        wants = x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double()
        for got, want in zip(gots, wants, strict=True):
            assert off_by(got, (want,)) < torch.finfo(h.half).eps / 2  # of a rounding to 16 bits: 0.2 eps


def test_a_scale_that_is_four_times_too_large_is_no_result_that_passes(h, monkeypatch):
    block, angles, x, dy = case(h)
    want = reference(block, angles, x, dy)
    product = lesson.product

    def wrong(a, w, scale_a, scale_w, dtype):
        return product(a, w, 4 * scale_a, scale_w, dtype)

    monkeypatch.setattr(lesson, "product", wrong)
    step = Training(FP8Training(block), angles, block.parameters())
    assert off_by(step(x, dy), want) > FP8_ERROR["training"]
    assert off_by(Prefill(FP8Prefill(block), angles)(x), want[:1]) > FP8_ERROR["prefill"]


def test_rows_that_are_too_far_off_end_the_lesson(h, monkeypatch):
    block, angles, x, _ = case(h)
    monkeypatch.setitem(lesson.FP8_ERROR, "prefill", 1e-4)
    with pytest.raises(AssertionError, match="prefill, FP8: relative error"):
        lesson.compare(h, "prefill", block, angles, x)


def test_the_answer_has_each_step_of_both_phases():
    from harness.bench import Table

    names = [EAGER, lesson.COMPILED, OURS, FP8]
    tables = [
        Table("prefill", "8x2048 tokens", EAGER, made_up(names, EAGER, [], [12.0, 6.0, 4.0, 3.0])),
        Table("training", "8x2048 tokens", EAGER, made_up(names, EAGER, [], [12.0, 6.0, 4.0, 2.0])),
    ]
    rows = [{name: {"error": 0.01 * (1 + i)} for i, name in enumerate(names)} for _ in tables]
    text = lesson.answer(tables, rows)
    assert "torch.compile 2.00x and 2.00x" in text
    assert "(2.00x and 3.00x torch.compile)" in text
    assert "Error of y 2.0%, FP8 4.0%; of gradients 2.0%, FP8 4.0%." in text


def test_by_rows_is_the_reference(h):
    x = h.rows(16, 64, dtype=h.half)
    q, scale = by_rows(x)
    want, want_scale = quantize_reference(x, (1, 64))
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    # On a GPU torch divides by a number as it multiplies by its reciprocal, and rounds twice.
    torch.testing.assert_close(scale, want_scale, rtol=0 if h.interpreted else 2**-23, atol=0)
