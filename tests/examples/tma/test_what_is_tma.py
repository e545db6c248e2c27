"""what_is_tma: every kernel computes the same bits; which of them is TMA is in the generated code, and is required."""

from harness.codegen import dump

import pytest
import torch

from examples.tma.what_is_tma import BLOCK_BYTES, BLOCK_M, DTYPES, EVICTIONS, KERNELS, reference
from examples.tma.what_is_tma import scale_descriptors as descriptors
from examples.tma.what_is_tma import scale_pointers as pointers
from tests.examples.triton.helpers import code, meta, refused


def rows_apart(h, M, N, dtype=torch.float32):
    """[M, N] in rows whose stride is a multiple of 16 bytes and more than N: what a descriptor can describe."""
    step = 16 // dtype.itemsize
    return h.randn(M, (N // step + 2) * step, dtype=dtype)[:, :N]


def test_special_values_under_every_hint(h):
    x = rows_apart(h, 66, 301)
    x[0, 0], x[65, 129], x[3, 7], x[4, 8] = float("nan"), float("inf"), -float("inf"), -0.0
    want = x * -2.0
    for y in (descriptors(x, -2), *(pointers(x, -2, eviction) for eviction in EVICTIONS)):
        assert torch.equal(y.isnan(), want.isnan())
        assert torch.equal(y.nan_to_num(7), want.nan_to_num(7))


def test_a_factor_that_float16_cannot_hold(h):
    x = rows_apart(h, 66, 301, torch.float16).div_(100)
    for name, fn in KERNELS.items():
        h.check(fn, reference, x, 1e5, what=name, terms=0, roundings=1)


def test_bad_input(h):
    """Pointers take what a descriptor cannot: a start and a row stride of 4 and 308 bytes."""
    odd, x = h.randn(40, 77)[:, 1:], h.randn(4, 8)
    h.check(pointers, reference, odd, 1.5, terms=0, roundings=1)
    refused(descriptors, ValueError, "x has .* starts 4 bytes past a multiple of 16", odd, 1.5)
    refused(pointers, ValueError, "eviction 'tma' is not one of", x, 2.0, "tma")
    for fn in (pointers, descriptors):
        refused(fn, TypeError, "factor is a Tensor; pass a Python number", x, torch.ones(()))
        refused(fn, TypeError, "factor is a bool", x, True)
        refused(fn, ValueError, r"strides \(1, 8\); .*x\.contiguous\(\) first", x.t(), 2.0)
        refused(fn, ValueError, "below 2147483392, split", x[:1].expand(2**31 - 256, 8), 2.0)


@pytest.mark.parametrize(("sm", "dtype"), [(80, DTYPES[1]), (90, DTYPES[0])])
def test_which_kernel_is_tma(sm, dtype):
    x, tile = meta(4096, 4096, dtype=dtype), BLOCK_M * BLOCK_BYTES
    plain, tma = code(sm, "", pointers, x, 2.5, "evict_last"), code(sm, "", descriptors, x, 2.5)
    assert (plain.found, plain.shared) == ({"ld.global.v4": 8, "st.global.v4": 8}, 0)
    if sm < 90:
        assert not {"cp.async.bulk.tensor", "mbarrier"} & set(tma.found)
        assert tma.shared == 0
    else:
        assert tma.found["cp.async.bulk.tensor"] == 2
        assert tile < tma.shared <= tile + 64
        ptx = dump(descriptors, (x, 2.5), sm=sm)["ptx"]
        (line,) = (line for line in ptx.splitlines() if "expect_tx" in line)
        assert line.rstrip(";").endswith(f", {tile}"), "the barrier waits for the bytes of the tile"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_matrices_and_the_same_bits_each_time(h, gpu_gib, dtype):
    x = rows_apart(h, 5000, 8191, dtype)
    want = torch.mul(x, 1.5)
    assert all(torch.equal(fn(x, 1.5), want) for fn in KERNELS.values() for _ in range(3))
    gpu_gib(40)  # and more elements than an int32 counts
    x = torch.empty(2**31 // 8192 + 65, 8192, dtype=dtype, device=h.device).normal_()
    assert all(torch.equal(fn(x, 2.0), torch.mul(x, 2.0)) for fn in (pointers, descriptors))
