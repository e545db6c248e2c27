"""dropout: the mask against the published Philox, one mask in both directions, its statistics, bad input, the code."""

from harness import Work
from harness.check import CheckError
from harness.codegen import compile_for

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from examples.triton.dropout import (
    BLOCK,
    DTYPES,
    NUM_WARPS,
    PER_CALL,
    correlation,
    deviation,
    dropout,
    keep_mask,
    masked,
    own_mask,
    philox,
    reference,
    saved_bytes,
    step,
)

SHAPES = [(0,), (), (1,), (7,), (997,), (BLOCK,), (BLOCK + 1,), (3, 781), (2, 3, 5, 7)]


def seed_of(value: int, device) -> torch.Tensor:
    return torch.tensor([value], device=device)


def check(h, x, p=0.3, seed=42, *, block=BLOCK, start=0, per_call=4, **budget):
    seed = seed_of(seed, h.device)
    h.check(
        lambda x: dropout(x, p, seed, start=start, per_call=per_call, block=block),
        lambda x: reference(x, p, seed, start, per_call),
        x, what=f"{tuple(x.shape)} p={p} per_call={per_call}", terms=0, **budget,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("counter", "key", "numbers"),
    [  # the known answers that come with Random123, the authors' own library
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_reference_is_philox_as_published(counter, key, numbers):
    words = [int(word, 16) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    got = philox([torch.tensor([word]) for word in words], low | high << 32)
    assert [number.item() for number in got] == [int(word, 16) for word in numbers.split()]


@pytest.mark.parametrize("per_call", PER_CALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(h, shape, per_call):
    for dtype in (torch.float32, torch.float16):
        check(h, h.randn(*(shape or (1,)), dtype=dtype).view(shape), per_call=per_call)


@given(
    n=st.integers(0, 5000),
    p=st.floats(0.01, 0.99),
    seed=st.integers(-(2**63), 2**63 - 1),
    start=st.integers(0, 2**40).map(lambda i: 8 * i),
    per_call=st.sampled_from(PER_CALL),
)
def test_any_shape_seed_and_place(n, p, seed, start, per_call):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    check(h, h.randn(n), p, seed, start=start, per_call=per_call)


@pytest.mark.parametrize("per_call", PER_CALL)
def test_the_mask_does_not_depend_on_the_block(h, per_call):
    x = h.randn(1019)
    for block in (8, 64, 512, 4096):
        check(h, x, block=block, per_call=per_call)


@pytest.mark.parametrize("per_call", PER_CALL)
def test_a_part_has_its_part_of_the_mask(h, per_call):
    x, seed = h.randn(4096), seed_of(7, h.device)
    whole = dropout(x, 0.4, seed, per_call=per_call)
    for start, end in ((0, 8), (8, 1000), (1000, 4096), (4088, 4096)):
        part = dropout(x[start:end].clone(), 0.4, seed, start=start, per_call=per_call)
        assert torch.equal(part, whole[start:end])


@pytest.mark.parametrize("per_call", PER_CALL)
def test_counters_of_more_than_32_bits(h, per_call):
    """Where the lower word overflows, and far beyond: nothing wraps around to an earlier mask."""
    seed = seed_of(3, h.device)
    edge = 2**32 * per_call
    for start in (2**31 - 8, 2**32 - 8, edge - 8 * 100, edge, 2**62 - 2**13):
        check(h, h.randn(2000), 0.5, 3, start=start, per_call=per_call)
    ones = torch.ones(20_000, device=h.device)
    masks = [dropout(ones, 0.5, seed, start=start, per_call=per_call) for start in {0, 2**32, edge, 2 * edge}]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(correlation(a, b)) < 5


def test_every_bit_of_the_seed_counts(h):
    ones = torch.ones(20_000, device=h.device)
    base = dropout(ones, 0.5, seed_of(1, h.device))
    for bit in (0, 1, 31, 32, 62, 63):
        flipped = 1 ^ (1 << bit if bit < 63 else -(2**63))
        assert abs(correlation(base, dropout(ones, 0.5, seed_of(flipped, h.device)))) < 5


@pytest.mark.parametrize("per_call", PER_CALL)
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_keep_rate_of_the_whole_and_of_every_part(h, p, per_call):
    ones = torch.ones(1 << 16, device=h.device)
    for seed in (0, 1, 2**40, -5):
        # Few chunks where few are kept or few are dropped: a rare event is not normal in a small one.
        deviation(dropout(ones, p, seed_of(seed, h.device), per_call=per_call), p, chunks=64 if 0.05 < p < 0.95 else 4)


@pytest.mark.parametrize("per_call", PER_CALL)
def test_masks_are_uncorrelated_across_seeds_and_within_themselves(h, per_call):
    ones = torch.ones(1 << 15, device=h.device)
    masks = [dropout(ones, 0.5, seed_of(seed, h.device), per_call=per_call) for seed in range(4)]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(correlation(a, b)) < 5
    for lag in (1, 2, 3, 4, 7, 8, 16, 1024, BLOCK):  # neighbours, numbers of a call, threads, programs
        assert abs(correlation(masks[0][lag:], masks[0][:-lag])) < 5


def test_the_statistics_find_what_they_look_for(h):
    mask = keep_mask(1 << 15, 0.5, seed_of(1, h.device)).float()
    with pytest.raises(AssertionError, match=r"standard deviations away from 0\.5"):
        deviation(mask * keep_mask(1 << 15, 0.05, seed_of(2, h.device)), 0.5)
    clumped = mask.clone()
    clumped[:512], clumped[512:1024] = 1, 0  # right on the whole, wrong in two chunks
    with pytest.raises(AssertionError, match="standard deviations away"):
        deviation(clumped, 0.5)
    assert correlation(mask, mask) == pytest.approx(2**7.5, rel=1e-6)


@pytest.mark.parametrize("per_call", PER_CALL)
def test_backward_has_the_mask_of_forward(h, per_call):
    seed = seed_of(5, h.device)
    x, g = h.randn(41, 53, dtype=h.half), h.randn(41, 53, dtype=h.half)
    both = step(lambda x: dropout(x, 0.3, seed, per_call=per_call))
    y, dx = both(x, g)
    assert torch.equal(y != 0, dx != 0)
    assert 0.2 < (dx == 0).float().mean() < 0.4
    wants = [reference(t, 0.3, seed, per_call=per_call) for t in (x, g)]
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


def test_backward_keeps_eight_bytes(h):
    x, seed = h.randn(10_000), seed_of(1, h.device)
    assert saved_bytes(lambda x: dropout(x, 0.1, seed), x) == 8
    assert saved_bytes(lambda x: F.dropout(x, 0.1), x) >= x.numel()


def test_without_a_seed_torch_s_generator_decides(h):
    x = h.randn(1000)
    torch.manual_seed(11)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(11)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("per_call", PER_CALL)
def test_p_at_its_ends(h, per_call):
    x, seed = h.randn(999), seed_of(4, h.device)
    assert dropout(x, 0.0, seed, per_call=per_call) is x  # as torch.nn.functional.dropout
    assert F.dropout(x, 0.0) is x
    assert not dropout(x, 1, seed, per_call=per_call).any()
    for p in (1e-12, 1 - 1e-12, 2**-32, 0.5):
        check(h, x, p, 4, per_call=per_call, constant_ok=True)


@pytest.mark.parametrize("per_call", PER_CALL)
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


def test_the_reference_of_a_library_is_its_own_mask(h):
    """And it finds a wrong scale, and a backward with another mask."""
    x, g = h.randn(64, 64), h.randn(64, 64)

    class OtherMask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return F.dropout(x, 0.3)

        @staticmethod
        def backward(ctx, grad):
            return F.dropout(grad, 0.3)

    def run(fn, *inputs):
        variants, options = {"torch": fn}, {"baseline": "torch", "work": Work(bytes=1), "terms": 0}
        h.compare(variants, lambda *t: t, *inputs, references={"torch": own_mask(fn, 0.3)}, **options)

    with pytest.raises(CheckError, match="torch"):
        run(lambda x: F.dropout(x, 0.3) * 1.01, x)
    with pytest.raises(CheckError, match="torch output 1"):
        run(step(OtherMask.apply), x, g)


def _bad(device):
    x, seed = torch.randn(4, 8, device=device), torch.tensor([1], device=device)
    return {
        "no tensor": (([1.0], 0.5, seed), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((x.int(), 0.5, seed), {}, TypeError, r"dtype torch\.int32 is not one of.*x\.float\(\)"),
        "float64": ((x.double(), 0.5, seed), {}, TypeError, r"torch\.float64"),
        "a layout with gaps": ((x.t(), 0.5, seed), {}, ValueError, r"strides \(1, 8\); call x\.contiguous\(\)"),
        "p below 0": ((x, -0.1, seed), {}, ValueError, r"p is -0\.1; a probability"),
        "p above 1": ((x, 1.5, seed), {}, ValueError, r"p is 1\.5; a probability"),
        "p is NaN": ((x, float("nan"), seed), {}, ValueError, "p is nan; a probability"),
        "p is a tensor": ((x, torch.tensor(0.5), seed), {}, TypeError, "p is a Tensor; pass a Python number"),
        "p is a flag": ((x, True, seed), {}, TypeError, "p is a bool"),
        "a number as seed": ((x, 0.5, 7), {}, TypeError, r"seed is 7; pass torch\.tensor\(\[7\]"),
        "a short seed": ((x, 0.5, seed.int()), {}, TypeError, r"seed has dtype torch\.int32; pass torch\.tensor"),
        "two seeds": ((x, 0.5, seed.repeat(2)), {}, ValueError, r"seed has shape \(2,\); pass one element"),
        "a seed elsewhere": ((x, 0.5, seed.to("meta")), {}, ValueError, "move them to one device"),
        "a start in between": ((x, 0.5, seed), {"start": 4}, ValueError, "start is 4; pass a multiple of 8"),
        "a start below 0": ((x, 0.5, seed), {"start": -8}, ValueError, "start is -8"),
        "a start too far": ((x, 0.5, seed), {"start": 2**63}, ValueError, "start is 9223372036854775808"),
        "a start of floats": ((x, 0.5, seed), {"start": 8.0}, TypeError, "start is a float; pass an int"),
        "per_call of 2": ((x, 0.5, seed), {"per_call": 2}, ValueError, "per_call is 2; one call of Philox serves"),
        "a block of 100": ((x, 0.5, seed), {"block": 100}, ValueError, "block is 100; pass a power of two"),
        "a device without kernels": ((x.to("meta"), 0.5, seed.to("meta")), {}, RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, options, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"dropout: .*{message}"):
        dropout(*args, **options)


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_generated_code(sm):
    """Wide accesses, no detour through shared memory, and one Philox for as many elements as it says."""
    x, seed = (
        torch.empty(1 << 20, dtype=torch.bfloat16, device="meta"),
        torch.empty(1, dtype=torch.int64, device="meta"),
    )
    multiplies = {}
    for per_call in PER_CALL:
        (kernel,) = compile_for(dropout, (x, 0.1, seed), {"per_call": per_call}, sms=(sm,))
        assert kernel.error is None
        assert (kernel.spills, kernel.shared) == (0, 0)
        assert kernel.found["ld.global.v4"] == kernel.found["st.global.v4"] == 2  # 16 elements a thread
        multiplies[per_call] = kernel.found["mul.hi"] / (BLOCK / (32 * NUM_WARPS))
    # Ten rounds of two, less what a counter's zero words save in the first rounds.
    assert 16 <= multiplies[1] <= 20
    assert 16 / 4 <= multiplies[4] <= 20 / 4
    assert 16 / 8 <= multiplies[8] <= 20 / 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_generated_code_of_every_dtype_is_wide(dtype):
    x, seed = torch.empty(1 << 20, dtype=dtype, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
    (kernel,) = compile_for(dropout, (x, 0.1, seed), sms=(90,))
    assert kernel.found["ld.global.v4"] == kernel.found["st.global.v4"] == 2 * dtype.itemsize // 2
    assert (kernel.spills, kernel.shared) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_call", PER_CALL)
def test_every_dtype_on_the_gpu(h, dtype, per_call):
    check(h, h.randn(1_000_003, dtype=dtype), per_call=per_call)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(30)
    n, seed = 2**32 + 24, seed_of(6, h.device)
    x = torch.ones(n, dtype=torch.bfloat16, device=h.device)
    y = dropout(x, 0.5, seed)
    for start in (0, 2**31 - 800, 2**32 - 800):
        part = slice(start, start + 824)
        h.check(
            lambda x, part=part: y[part], lambda x, start=start: reference(x, 0.5, seed, start), x[part].clone(),
            what=f"from {start}", terms=0,
        )  # fmt: skip
    assert abs(torch.count_nonzero(y).item() / n - 0.5) < 5 * 0.5 / n**0.5


@pytest.mark.gpu
def test_a_cuda_graph_draws_a_new_mask_when_its_seed_changes(h):
    x, seed = torch.ones(1 << 16, device=h.device), seed_of(1, h.device)
    dropout(x, 0.5, seed)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dropout(x, 0.5, seed)
        seed.add_(1)
    masks = []
    for i in range(3):
        graph.replay()
        masks.append(y != 0)
        assert torch.equal(masks[-1], keep_mask(x.numel(), 0.5, seed_of(1 + i, h.device)))
    assert abs(correlation(masks[0], masks[1])) < 5


@pytest.mark.gpu
def test_one_call_for_four_is_faster_than_one_for_one_and_than_a_stored_mask(h):
    n = 1 << 27
    x, g, seed = h.randn(n, dtype=torch.bfloat16), h.randn(n, dtype=torch.bfloat16), seed_of(1, h.device)

    def torch_step(x, g):
        return step(lambda t: F.dropout(t, 0.1))(x, g)

    variants = {"torch": torch_step} | {
        f"triton {k}": step(lambda t, k=k: dropout(t, 0.1, seed, per_call=k)) for k in PER_CALL
    }
    references = {"torch": own_mask(torch_step, 0.1)} | {
        f"triton {k}": lambda *xs, k=k: tuple(reference(t, 0.1, seed, per_call=k) for t in xs) for k in PER_CALL
    }
    table = h.compare(
        variants, references["triton 4"], x, g, references=references, baseline="torch", work=Work(bytes=4 * x.nbytes),
        terms=0,
    )  # fmt: skip
    ms = {row.variant: row.ms for row in table.rows}
    assert ms["triton 4"] < 0.8 * ms["triton 1"]
    assert ms["triton 4"] < ms["torch"]
