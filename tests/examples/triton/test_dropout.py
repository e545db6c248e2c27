"""dropout: the mask against the published Philox, one mask in both directions, bad input, the code."""

import pytest
import torch
import torch.nn.functional as F

from examples.common.training import forward_backward
from examples.triton import dropout as lesson
from examples.triton.dropout import BLOCK, PER_CALL, dropout
from examples.triton.dropout_reference import dropped_of, keep_mask, masked, philox, reference, same_mask
from studies.triton.dropout import saved_bytes
from tests.examples.triton.helpers import INF, NAN, code, meta, refused

by_call = pytest.mark.parametrize("per_call", PER_CALL)


def seed_of(value: int, device) -> torch.Tensor:
    return torch.tensor([value], device=device)


def check(h, x, p=0.3, seed=42, *, start=0, per_call=4, **budget):
    seed = seed_of(seed, h.device)
    h.check(
        lambda x: dropout(x, p, seed, start=start, per_call=per_call),
        lambda x: reference(x, p, seed, start, per_call),
        x, what=f"{tuple(x.shape)} p={p} per_call={per_call}", terms=0, roundings=1, **budget,
    )  # fmt: skip


def test_the_reference_is_philox_as_published():
    for counter, key, want in (  # the known answers that come with Random123, the authors' own library
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        words = [torch.tensor([int(word, 16)]) for word in counter.split()]
        low, high = (int(word, 16) for word in key.split())
        got = philox(words, low | high << 32)
        assert [number.item() for number in got] == [int(word, 16) for word in want.split()]


@by_call
def test_shapes_and_places(h, per_call, monkeypatch):
    for i, shape in enumerate(((0,), (), (1,), (997,), (BLOCK,), (BLOCK + 1,), (2, 3, 5, 7))):
        check(h, h.randn(*(shape or (1,)), dtype=(torch.float32, torch.float16)[i % 2]).view(shape), per_call=per_call)
    # Where the lower word of a counter overflows, and far beyond: nothing wraps around to an earlier mask.
    edge = 2**32 * per_call
    for start in (2**31 - 8, 2**32 - 8, edge - 8 * 100, edge, 2**62):
        check(h, h.randn(2000), 0.5, 3, start=start, per_call=per_call)
    monkeypatch.setattr(lesson, "BLOCK", 64)  # the mask does not depend on it
    check(h, h.randn(1019), per_call=per_call)


def test_gradients_have_the_mask_of_forward(h):
    """Of any layout, and the gradient of the gradient; of all, autograd keeps the seed."""
    seed, x, g = seed_of(9, h.device), *(h.randn(32, 48) for _ in range(2))
    for per_call in PER_CALL:
        both = forward_backward(lambda x, per_call=per_call: dropout(x, 0.3, seed, per_call=per_call))
        h.check(both, same_mask(0.3, seed, per_call), x, g, what="forward and backward", terms=0, roundings=1)
    x.requires_grad_()
    factor = masked(torch.ones_like(x), keep_mask(x.numel(), 0.5, seed), 0.5).float()
    for loss in (dropout(x, 0.5, seed).sum(), dropout(x, 0.5, seed).t().contiguous().sum()):  # expanded; transposed
        assert torch.equal(torch.autograd.grad(loss, x)[0], factor)
    (first,) = torch.autograd.grad((dropout(x, 0.5, seed) ** 2).sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], 2 * factor * factor)
    assert saved_bytes(lambda x: dropout(x, 0.5, seed), x) == 8
    torch.manual_seed(11)  # without a seed torch's generator decides
    first, second = dropout(x), dropout(x)
    torch.manual_seed(11)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)
    y = dropout(x, 0.5, seed)
    seed.add_(1)  # overwritten before backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@by_call
def test_extremes_of_p_and_of_x(h, per_call):
    """Dropping multiplies by 0, as torch does: NaN and infinities become NaN, a negative number -0."""
    x, seed = h.randn(999), seed_of(4, h.device)
    assert dropout(x, 0.0, seed, per_call=per_call) is x  # as torch.nn.functional.dropout
    assert abs((dropout(x, 0.9, seed, per_call=per_call) != 0).double().mean() - 0.1) < 0.05
    assert dropped_of(1 - 1e-12, per_call) == dropped_of(1, per_call)  # rounded, not cut off
    for p in (1e-12, 1 - 1e-12, 2**-32):
        check(h, x, p, 4, per_call=per_call, constant_ok=True)
    zero = torch.zeros(1, dtype=torch.int64)  # an element at the threshold stays
    number, values = philox([zero] * 4, 3)[0].item(), 2**16 if per_call == 8 else 2**32
    check(h, h.randn(64), (number % values ^ values // 2) / values, 3, per_call=per_call)

    x = torch.tensor([NAN, INF, -INF, -0.0, 3e38, -1e-40, 2.0, -3.0], device=h.device).repeat(200)
    # The last: scaled beyond the range, infinities.
    for extreme in (x, x.half(), h.randn(1000, scale=1e-30), h.randn(1000, dtype=torch.float16, scale=3e4)):
        check(h, extreme, 0.5, per_call=per_call)
    ended = dropout(x, 1.0, seed, per_call=per_call)
    torch.testing.assert_close(ended, F.dropout(x, 1.0), equal_nan=True, rtol=0, atol=0)


def test_bad_input(h):
    x, seed = h.randn(4, 8), seed_of(1, h.device)
    refused(dropout, ValueError, r"strides .*\(1, 8\)", x.t(), 0.5, seed)
    for p in (-0.1, 1.5, NAN, True):
        refused(dropout, ValueError, "p is ", x, p, seed)
    for bad in (7, seed.int(), seed.repeat(2)):
        refused(dropout, TypeError, "seed is ", x, 0.5, bad)
    for start in (4, -8, 2**62 + 8, 8.0):
        refused(dropout, ValueError, "start is", x, 0.5, seed, start=start)
    refused(dropout, ValueError, "per_call 2", x, 0.5, seed, per_call=2)


def test_generated_code():
    """Wide accesses, no detour through shared memory, and one Philox for as many elements as it says."""
    kernel = code(80, "", dropout, meta(1 << 20), 0.1, meta(1, dtype=torch.int64), per_call=8)
    assert (kernel.shared, kernel.found["ld.global.v4"], kernel.found["st.global.v4"]) == (0, 2, 2)  # 16 elements
    # Ten rounds of two, less what a counter's zero words save in the first rounds.
    assert 16 <= kernel.found["mul.hi"] / (BLOCK / (32 * lesson.NUM_WARPS)) * 8 <= 20


@pytest.mark.gpu
def test_every_dtype_and_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(30)
    for per_call, dtype in zip(PER_CALL, lesson.DTYPES, strict=True):
        check(h, h.randn(1_000_003, dtype=dtype), per_call=per_call)
    y = dropout(torch.ones(2**32 + 24, dtype=torch.bfloat16, device=h.device), 0.5, seed_of(6, h.device))
    for start in (0, 2**31 - 800, 2**32 - 800):
        ones = torch.ones(824, dtype=torch.bfloat16, device=h.device)
        assert torch.equal(y[start : start + 824].double(), reference(ones, 0.5, seed_of(6, h.device), start))


@pytest.mark.gpu
def test_a_cuda_graph_draws_a_new_mask_when_its_seed_changes(h):
    x, seed = torch.ones(1 << 16, device=h.device), seed_of(1, h.device)
    dropout(x, 0.5, seed)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dropout(x, 0.5, seed)
        seed.add_(1)
    for i in range(3):
        graph.replay()
        assert torch.equal(y != 0, keep_mask(x.numel(), 0.5, seed_of(1 + i, h.device)))
