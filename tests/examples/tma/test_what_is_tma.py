"""what_is_tma: every kernel computes the same bits; which of them is TMA is in the generated code, and is required."""

from harness.catalog import Needs
from harness.codegen import compile_for, dump
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.tma.what_is_tma import (
    BLOCK_BYTES,
    BLOCK_M,
    DTYPES,
    EVICTIONS,
    KERNELS,
    LARGEST,
    demo,
    reference,
    scale_descriptors,
    scale_pointers,
)

BUDGET = {"terms": 0, "roundings": 1}
SHAPES = [(0, 5), (5, 0), (1, 1), (1, 700), (131, 1), (BLOCK_M + 1, 129), (2 * BLOCK_M, 256), (67, 389)]
GPU_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def rows_apart(h, M, N, dtype=torch.float32):
    """[M, N] in rows whose stride is a multiple of 16 bytes and more than N: what a descriptor can describe."""
    step = 16 // dtype.itemsize
    return h.randn(M, (N // step + 2) * step, dtype=dtype)[:, :N]


def check_each(h, x, factor, **options):
    for name, fn in KERNELS.items():
        h.check(fn, reference, x, factor, what=f"{name} {tuple(x.shape)}", **BUDGET, **options)


@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_every_kernel(h, dtype):
    for shape in SHAPES:
        check_each(h, rows_apart(h, *shape, dtype), -1.7)


@given(M=st.integers(0, 150), N=st.integers(0, 300), factor=st.integers(-400, 400).map(lambda k: k / 8))
def test_any_shape_and_factor(M, N, factor):
    h = Harness("test", Needs.parse("triton"))
    check_each(h, rows_apart(h, M, N, h.half), factor, constant_ok=factor == 0)


def test_special_values_under_every_hint(h):
    x = rows_apart(h, 66, 301)
    x[0, 0], x[65, 129], x[3, 7], x[4, 8] = float("nan"), float("inf"), -float("inf"), -0.0
    want = x * -2.0
    for y in (scale_descriptors(x, -2), *(scale_pointers(x, -2, eviction) for eviction in EVICTIONS)):
        assert torch.equal(y.isnan(), want.isnan())
        assert torch.equal(y.nan_to_num(7), want.nan_to_num(7))


def test_pointers_take_what_a_descriptor_cannot(h):
    x = h.randn(40, 77)[:, 1:]  # a start and a row stride of 4 and 308 bytes
    h.check(scale_pointers, reference, x, 1.5, **BUDGET)
    with pytest.raises(ValueError, match=r"scale_descriptors: x has .* starts 4 bytes past a multiple of 16"):
        scale_descriptors(x, 1.5)


def _bad(device):
    x = torch.randn(4, 8, device=device)
    return {
        "a list": (scale_pointers, ([1.0], 2.0), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": (scale_descriptors, (x.int(), 2.0), TypeError, r"torch\.int32 is not one of"),
        "a tensor as factor": (scale_descriptors, (x, x[0, 0]), TypeError, "factor is a Tensor; pass a Python number"),
        "a bool as factor": (scale_pointers, (x, True), TypeError, "factor is a bool"),
        "a vector": (scale_descriptors, (x[0], 2.0), ValueError, r"got shape \(8,\); call x\.reshape"),
        "columns apart": (scale_pointers, (x.t(), 2.0), ValueError, r"strides \(1, 8\); .*x\.contiguous\(\) first"),
        "a stride of 0": (scale_descriptors, (x[:1].expand(4, 8), 2.0), ValueError, "x has .*16-byte multiples"),
        "a hint there is not": (scale_pointers, (x, 2.0, "tma"), ValueError, "eviction 'tma' is not one of"),
        "no hint": (scale_pointers, (x, 2.0, None), ValueError, "eviction None"),
        "too many rows": (scale_descriptors, (x[:1].expand(LARGEST, 8), 2.0), ValueError, f"below {LARGEST}, split"),
        "requires grad": (scale_descriptors, (x.clone().requires_grad_(), 2.0), RuntimeError, "no backward"),
        "a device without kernels": (scale_pointers, (x.to("meta"), 2.0), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    wrapper, args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"{wrapper.__name__}: .*{message}"):
        wrapper(*args)


@pytest.mark.parametrize(("sm", "dtype"), [*((sm, DTYPES[1]) for sm in (80, 90, 100, 120)), *((90, d) for d in DTYPES)])
def test_which_kernel_is_tma(sm, dtype):
    x, tile = torch.empty(4096, 4096, dtype=dtype, device="meta"), BLOCK_M * BLOCK_BYTES
    calls = (scale_pointers, ()), (scale_pointers, ("evict_last",)), (scale_descriptors, ())
    kernels = [kernel for fn, options in calls for kernel in compile_for(fn, (x, 2.5, *options), sms=(sm,))]
    for kernel in kernels:
        assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    for kernel in kernels[:2]:
        assert kernel.found == {"ld.global.v4": 8, "st.global.v4": 8}
        assert kernel.shared == 0
    if sm < 90:
        assert not {"cp.async.bulk.tensor", "mbarrier"} & set(kernels[2].found)
        assert kernels[2].shared == 0
    else:
        assert kernels[2].found["cp.async.bulk.tensor"] == 2
        assert tile < kernels[2].shared <= tile + 64


def test_the_barrier_waits_for_the_bytes_of_the_tile():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    (line,) = (line for line in dump(scale_descriptors, (x, 2.0), sm=90)["ptx"].splitlines() if "expect_tx" in line)
    assert line.rstrip(";").endswith(f", {BLOCK_M * BLOCK_BYTES}")


def test_the_demo_and_what_it_finds(h):
    demo(h)
    (table,) = h.record.tables  # whose best row may only be TMA's
    assert [row["variant"] for row in table["rows"] if row["ours"] and not row["peer"]] == ["descriptor"]
    assert [kernel["sm"] for kernel in h.record.codegen] == [90, 80, 89, 90, 100, 120]
    assert all(check["passed"] for check in h.record.checks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_matrices_and_the_same_bits_each_time(h, dtype):
    x = rows_apart(h, 5000, 8191, dtype)
    want = torch.mul(x, 1.5)
    for fn in KERNELS.values():
        for _ in range(3):
            assert torch.equal(fn(x, 1.5), want)


@pytest.mark.gpu
@pytest.mark.parametrize("fn", [scale_pointers, scale_descriptors])
def test_more_elements_than_an_int32_counts(h, gpu_gib, fn):
    gpu_gib(20)
    x = torch.empty(2**31 // 8192 + 65, 8192, dtype=torch.bfloat16, device=h.device).normal_()
    assert torch.equal(fn(x, 2.0), torch.mul(x, 2.0))
