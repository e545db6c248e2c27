"""dropout: the mask against the published Philox, one mask in both directions, bad input, the code."""

from harness import Work
from harness.check import CheckError
from harness.codegen import compile_for

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from examples.triton import dropout as lesson
from examples.triton.dropout import BLOCK, DTYPES, NUM_WARPS, PER_CALL, dropout, keep_mask, masked, reference, step

by_call = pytest.mark.parametrize("per_call", PER_CALL)


def seed_of(value: int, device) -> torch.Tensor:
    return torch.tensor([value], device=device)


def check(h, x, p=0.3, seed=42, *, start=0, per_call=4, **budget):
    seed = seed_of(seed, h.device)
    h.check(
        lambda x: dropout(x, p, seed, start=start, per_call=per_call),
        lambda x: reference(x, p, seed, start, per_call),
        x, what=f"{tuple(x.shape)} p={p} per_call={per_call}", terms=0, **budget,
    )  # fmt: skip


def test_the_reference_is_philox_as_published():
    for counter, key, want in (  # the known answers that come with Random123, the authors' own library
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        words = [torch.tensor([int(word, 16)]) for word in counter.split()]
        low, high = (int(word, 16) for word in key.split())
        assert [number.item() for number in lesson.philox(words, low | high << 32)] == [
            int(w, 16) for w in want.split()
        ]


@by_call
def test_shapes(h, per_call):
    for shape in ((0,), (), (1,), (7,), (997,), (BLOCK,), (BLOCK + 1,), (3, 781), (2, 3, 5, 7)):
        for dtype in (torch.float32, torch.float16):
            check(h, h.randn(*(shape or (1,)), dtype=dtype).view(shape), per_call=per_call)


@given(
    n=st.integers(0, 5000), p=st.floats(0.01, 0.99), seed=st.integers(-(2**63), 2**63 - 1),
    start=st.integers(0, 2**40).map(lambda i: 8 * i), per_call=st.sampled_from(PER_CALL),
)  # fmt: skip
def test_any_shape_seed_and_place(n, p, seed, start, per_call):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    check(h, h.randn(n), p, seed, start=start, per_call=per_call)


@by_call
def test_the_mask_does_not_depend_on_the_block(h, per_call, monkeypatch):
    for block in (8, 64, 512, 4096):
        monkeypatch.setattr(lesson, "BLOCK", block)
        check(h, h.randn(1019), per_call=per_call)


@by_call
def test_counters_of_more_than_32_bits(h, per_call):
    """Where the lower word overflows, and far beyond: nothing wraps around to an earlier mask."""
    edge = 2**32 * per_call
    for start in (2**31 - 8, 2**32 - 8, edge - 8 * 100, edge, 2**62 - 2**13, 2**62):
        check(h, h.randn(2000), 0.5, 3, start=start, per_call=per_call)


@by_call
def test_backward_has_the_mask_of_forward(h, per_call):
    seed = seed_of(5, h.device)
    x, g = h.randn(41, 53, dtype=h.half), h.randn(41, 53, dtype=h.half)
    both = step(lambda x: dropout(x, 0.3, seed, start=64, per_call=per_call))
    wants = [reference(t, 0.3, seed, 64, per_call) for t in (x, g)]
    h.check(both, lambda *_: wants, x, g, what="forward and backward", terms=0)


def test_gradients_of_any_layout_and_of_the_gradient(h):
    seed = seed_of(9, h.device)
    x = h.randn(32, 48).requires_grad_()
    factor = masked(torch.ones_like(x), keep_mask(x.numel(), 0.5, seed), 0.5).float()
    dropout(x, 0.5, seed).sum().backward()  # its gradient is one number, expanded
    assert torch.equal(x.grad, factor)
    x.grad = None
    dropout(x, 0.5, seed).t().contiguous().backward(torch.ones(48, 32, device=h.device))
    assert torch.equal(x.grad, factor)
    (first,) = torch.autograd.grad((dropout(x, 0.5, seed) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 2 * factor * factor)


def test_a_seed_overwritten_before_backward_is_noticed(h):
    seed = seed_of(9, h.device)
    y = dropout(h.randn(10).requires_grad_(), 0.5, seed)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_without_a_seed_torch_s_generator_decides(h):
    x = h.randn(1000)
    torch.manual_seed(11)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(11)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


@by_call
def test_p_at_its_ends(h, per_call):
    x, seed = h.randn(999), seed_of(4, h.device)
    assert dropout(x, 0.0, seed, per_call=per_call) is x  # as torch.nn.functional.dropout
    assert not dropout(x, 1, seed, per_call=per_call).any()
    assert lesson.dropped_of(1 - 1e-12, per_call) == lesson.dropped_of(1, per_call)  # rounded, not cut off
    for p in (1e-12, 1 - 1e-12, 2**-32, 0.5):
        check(h, x, p, 4, per_call=per_call, constant_ok=True)


@by_call
def test_an_element_at_the_threshold_stays(h, per_call):
    zero = torch.zeros(1, dtype=torch.int64)
    number, values = lesson.philox([zero] * 4, 3)[0].item(), 2**16 if per_call == 8 else 2**32
    check(h, h.randn(64), (number % values ^ values // 2) / values, 3, per_call=per_call)


@by_call
def test_nan_infinities_and_extremes_are_as_in_torch(h, per_call):
    """Dropping multiplies by 0, as torch does: NaN and infinities become NaN, a negative number -0."""
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3e38, -1e-40, 2.0, -3.0], device=h.device)
    x = special.repeat(200)
    check(h, x, 0.5, per_call=per_call)
    check(h, x.half(), 0.5, per_call=per_call)
    check(h, h.randn(1000, scale=1e-30), per_call=per_call)
    check(h, h.randn(1000, dtype=torch.float16, scale=3e4), per_call=per_call)  # scaled beyond the range: infinities

    def outcomes(y):
        return [{str(v) for v in column.tolist()} for column in y.view(-1, 8)[:, [0, 1, 2, 6, 7]].unbind(1)]

    assert outcomes(dropout(x, 0.5, seed_of(1, h.device), per_call=per_call)) == outcomes(F.dropout(x, 0.5))
    ended = dropout(x, 1.0, seed_of(1, h.device), per_call=per_call)
    torch.testing.assert_close(ended, F.dropout(x, 1.0), equal_nan=True, rtol=0, atol=0)


def test_the_reference_of_a_library_finds_a_wrong_scale_and_a_backward_with_another_mask(h):
    x, g = h.randn(64, 64), h.randn(64, 64)

    class OtherMask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return F.dropout(x, 0.3)

        backward = forward

    def run(fn, *inputs):
        options = {"baseline": "torch", "work": Work(bytes=1), "terms": 0}
        h.compare({"torch": fn}, lambda *t: t, *inputs, references={"torch": lesson.own_mask(fn, 0.3)}, **options)

    run(step(lambda x: F.dropout(x, 0.3)), x, g)
    with pytest.raises(CheckError, match="torch"):
        run(lambda x: F.dropout(x, 0.3) * 1.01, x)
    with pytest.raises(CheckError, match="torch output 1"):
        run(step(OtherMask.apply), x, g)


def test_bad_input(h):
    x, seed = h.randn(4, 8), seed_of(1, h.device)
    for args, options, error, message in (
        (([1.0], 0.5, seed), {}, TypeError, r"expected a torch\.Tensor, got list"),
        ((x.int(), 0.5, seed), {}, TypeError, r"dtype torch\.int32"),
        ((x.double(), 0.5, seed), {}, TypeError, r"torch\.float64"),
        ((x.t(), 0.5, seed), {}, ValueError, r"strides \(1, 8\)"),
        ((x, -0.1, seed), {}, ValueError, r"p is -0\.1"),
        ((x, 1.5, seed), {}, ValueError, r"p is 1\.5"),
        ((x, float("nan"), seed), {}, ValueError, "p is nan"),
        ((x, torch.tensor(0.5), seed), {}, TypeError, "p is a Tensor"),
        ((x, True, seed), {}, TypeError, "p is a bool"),
        ((x, 0.5, 7), {}, TypeError, "seed is 7"),
        ((x, 0.5, seed.int()), {}, TypeError, r"seed has dtype torch\.int32"),
        ((x, 0.5, seed.repeat(2)), {}, ValueError, r"seed has shape \(2,\)"),
        ((x, 0.5, seed.to("meta")), {}, ValueError, "one device"),
        ((x, 0.5, seed), {"start": 4}, ValueError, "start is 4"),
        ((x, 0.5, seed), {"start": -8}, ValueError, "start is -8"),
        ((x, 0.5, seed), {"start": 2**62 + 8}, ValueError, "start is 4611686018427387912"),
        ((x, 0.5, seed), {"start": 8.0}, TypeError, "start is a float"),
        ((x, 0.5, seed), {"start": True}, TypeError, "start is a bool"),
        ((x, 0.5, seed), {"per_call": 2}, ValueError, "per_call 2"),
        ((x.to("meta"), 0.5, seed.to("meta")), {}, RuntimeError, "on meta"),
    ):
        with pytest.raises(error, match=f"dropout: .*{message}"):
            dropout(*args, **options)


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_generated_code(sm):
    """Wide accesses, no detour through shared memory, and one Philox for as many elements as it says."""
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    for dtype, per_call in [(torch.bfloat16, 4), *[(torch.float32, 1), (torch.float16, 8)] * (sm == 90)]:
        args = torch.empty(1 << 20, dtype=dtype, device="meta"), 0.1, seed
        (kernel,) = compile_for(dropout, args, {"per_call": per_call}, sms=(sm,))
        assert kernel.error is None
        assert (kernel.spills, kernel.shared) == (0, 0)
        assert kernel.found["ld.global.v4"] == kernel.found["st.global.v4"] == dtype.itemsize  # 16 elements a thread
        # Ten rounds of two, less what a counter's zero words save in the first rounds.
        assert 16 <= kernel.found["mul.hi"] / (BLOCK / (32 * NUM_WARPS)) * per_call <= 20


@pytest.mark.gpu
@by_call
def test_every_dtype_on_the_gpu(h, per_call):
    for dtype in DTYPES:
        check(h, h.randn(1_000_003, dtype=dtype), per_call=per_call)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(30)
    n, seed = 2**32 + 24, seed_of(6, h.device)
    y = dropout(torch.ones(n, dtype=torch.bfloat16, device=h.device), 0.5, seed)
    for start in (0, 2**31 - 800, 2**32 - 800):
        part, ones = y[start : start + 824], torch.ones(824, dtype=torch.bfloat16, device=h.device)
        want = reference(ones, 0.5, seed, start)
        h.check(lambda x, part=part: part, lambda x, want=want: want, ones, what=f"from {start}", terms=0)


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
