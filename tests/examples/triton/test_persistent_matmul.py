"""persistent_matmul: every step at every edge, few and many tiles, layouts, bad input, shared memory, the code."""

import functools

from harness.codegen import compile_for

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.triton import persistent_matmul
from examples.triton.persistent_matmul import (
    DTYPES,
    GROUP_M,
    TILES,
    VARIANTS,
    fitting_tile,
    matmul_persistent,
    reference,
    shared_bytes,
)


def check(h, a, b, *variants):
    for variant in variants or VARIANTS:
        what = f"{variant} {tuple(a.shape)} {a.stride()} {tuple(b.shape)} {b.stride()}"
        fn = functools.partial(matmul_persistent, variant=variant)
        h.check(fn, reference, a, b, terms=a.shape[1], what=what)


@pytest.fixture
def gpu_of(h, monkeypatch):
    """Let the wrapper believe in another GPU: so many SMs, so much shared memory (the interpreter has no limit)."""
    if not h.interpreted:
        pytest.skip("SMs and shared memory are real here")

    def pretend(sms, sm=90):
        monkeypatch.setattr(persistent_matmul, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[sm]))

    return pretend


# One row, primes, one tile and one more in each dimension, half a tile of columns and 8 more, nothing to sum, nothing.
SHAPES = [(1, 8, 8), (37, 56, 104), (128, 256, 64), (129, 8, 64), (1, 264, 64), (1, 8, 72), (5, 128, 8), (5, 136, 8),
          (5, 16, 0), (0, 16, 8), (5, 0, 8)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(h, shape):
    M, N, K = shape
    check(h, h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half))


@pytest.mark.parametrize("sms", [1, 3, 1000])
def test_every_tile_is_taken_once(h, sms, gpu_of):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles."""
    gpu_of(sms)
    check(h, h.randn(300, 8, dtype=h.half), h.randn(8, 520, dtype=h.half))


def test_groups_of_tiles(h):
    """More rows of tiles than a group has, a last group that is not full, two columns of tiles."""
    M = (GROUP_M + 1) * TILES[0][0] + 1
    check(h, h.randn(M, 8, dtype=h.half), h.randn(8, 264, dtype=h.half), "split")


@given(M=st.integers(0, 300), N=st.integers(0, 70), K=st.integers(0, 30), variant=st.sampled_from(VARIANTS))
def test_any_shape(M, N, K, variant):
    from harness.session import Harness

    h = Harness("test")
    check(h, h.randn(M, 8 * K, dtype=torch.float16), h.randn(8 * K, 8 * N, dtype=torch.float16), variant)


def test_layouts(h):
    a, b = h.randn(140, 160, dtype=h.half), h.randn(200, 320, dtype=h.half)
    for left, right in (
        (a, b[:160, :104]),  # rows apart: what lies between them must not be summed
        (a[:, 8:80], b[:72]),  # a start 16 bytes later
        (a[::3, :72], b[:144:2, 16:]),  # every third, every second row
        (a[:1, :72].as_strided((1, 72), (5, 1)), b[:72, :40]),  # one row, with a stride nobody steps by
    ):
        check(h, left, right, *VARIANTS[1::2])


def test_extremes(h):
    """NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile."""
    a, b = h.randn(130, 72, dtype=h.half), h.randn(72, 264, dtype=h.half)
    check(h, a * 2.0**-12, b * 2.0**-6, *VARIANTS[::3])
    a[3, 5], a[129, 71], b[2, 9], b[71, 263], b[7, 130] = (float(x) for x in ("nan", "inf", "-inf", "inf", "nan"))
    check(h, a, b)
    a, b = h.randn(20, 64, dtype=torch.float16), h.randn(64, 40, dtype=torch.float16)
    check(h, a * 100, b * 100, "split")  # beyond the range of float16, in part


def test_gpus_with_less_shared_memory(h, gpu_of, monkeypatch):
    gpu_of(4, sm=120)
    a, b = h.randn(200, 72, dtype=h.half), h.randn(72, 264, dtype=h.half)
    check(h, a, b)
    monkeypatch.setattr(persistent_matmul, "device_limits", lambda device: Limits(40, 64 * 1024))
    with pytest.raises(RuntimeError, match="matmul_persistent: no tile fits the 65536 bytes of shared memory of"):
        matmul_persistent(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_on_the_gpu(h, dtype):
    for M, N, K in [(4096, 4096, 4096), (1000, 5208, 776), (16, 8192, 4096), (8191, 264, 512)]:
        check(h, h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["tile", "split"])
def test_more_elements_than_an_int32_counts(h, gpu_gib, variant):
    gpu_gib(40)
    long = 2**31 // 64 + 64
    a = torch.empty(long, 64, dtype=torch.bfloat16, device=h.device).normal_()
    b = h.randn(64, 64, dtype=torch.bfloat16)
    for tall in (True, False):
        left, right = (a, b) if tall else (b, a.view(64, long))
        c = matmul_persistent(left, right, variant)
        for part in (slice(0, 300), slice(-300, None)):
            got = (c[part] if tall else c[:, part]).contiguous()
            want = reference(left[part], right) if tall else reference(left, right[:, part])
            h.check(lambda *_, got=got: got, lambda *_, want=want: want, b, terms=64, what=f"tall: {tall}, {part}")
        del c


@pytest.mark.gpu
def test_the_steps_agree(h):
    """The same tile and the same order of sums: only when things happen differs, so not a bit of the result may."""
    a, b = h.randn(2000, 1000, dtype=torch.bfloat16), h.randn(1000, 3000, dtype=torch.bfloat16)
    first, *others = (matmul_persistent(a, b, variant) for variant in VARIANTS)
    assert all(torch.equal(first, other) for other in others)


TENSOR_CORES = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


def tile_for(sm, variant):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persistent_matmul, "device_limits", lambda device: Limits(1, SHARED_LIMIT[sm]))
        return fitting_tile(torch.device("cpu"), 2, variant == "split")


@pytest.mark.parametrize("sm", TENSOR_CORES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_generated_code(sm, variant):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(matmul_persistent, (x, x, variant), sms=(sm,))
    assert kernel.error is None
    assert kernel.kernel == ("matmul_tile_kernel" if variant == "tile" else "matmul_persistent_kernel")
    assert all(kernel.found.get(name) for name in ("cp.async.bulk.tensor", "mbarrier", TENSOR_CORES[sm])), kernel.found
    assert kernel.spills == 0
    # What the wrapper reckons with is enough, and on Hopper a persistent kernel uses all of it but a few barriers.
    block_m, block_n, block_k, num_warps, stages = tile_for(sm, variant)
    reckoned = shared_bytes(block_m, block_n, block_k, 2, stages, block_n // 2 if variant == "split" else block_n)
    assert kernel.shared <= reckoned <= kernel.shared_limit == SHARED_LIMIT[sm]
    if sm == 90 and variant != "tile":
        assert reckoned - kernel.shared < 256
    assert kernel.warps == num_warps


def test_which_tile_fits():
    """The lesson: on sm_90 and sm_100 half the tile pays for a fourth stage."""
    large, small = (128, 256, 64, 8), (128, 128, 64, 8)
    for sm, whole, split in [(80, (*large, 2), (*large, 2)), (90, (*large, 3), (*large, 4)),
                             (100, (*large, 3), (*large, 4)), (120, (*small, 2), (*small, 2))]:  # fmt: skip
        assert (tile_for(sm, "persistent"), tile_for(sm, "split")) == (whole, split)


def test_bad_input(h):
    a, b = h.randn(4, 16, dtype=torch.float16), h.randn(16, 8, dtype=torch.float16)
    flat = torch.zeros(200, dtype=torch.float16, device=h.device)
    for args, error, message in [
        (([1.0], b), TypeError, "got list"),
        ((a.float(), b.float()), TypeError, r"torch\.float32"),
        ((a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        ((a, b[:, 0]), ValueError, r"need \[M, K\] and \[K, N\]"),
        ((a, b.t()), ValueError, r"shapes \(4, 16\) and \(8, 16\)"),
        ((a, b, "faster"), ValueError, "variant 'faster' is not one of"),
        ((a, b, None), ValueError, "variant None is not one of"),
        ((a[:, :12], b[:12]), ValueError, "K is 12 and N 8"),
        ((a, b[:, :4]), ValueError, "K is 16 and N 4"),
        ((b.t(), b), ValueError, "a has shape"),
        ((flat[1:65].view(4, 16), b), ValueError, "a has .* starts 2 bytes past"),
        ((a, flat[:192].view(16, 12)[:, :8]), ValueError, r"b has shape \(16, 8\), strides \(12, 1\)"),
        ((a[:1].expand(4, 16), b), ValueError, r"a has .* strides \(0, 1\)"),
        ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        ((a, b.to("meta")), ValueError, "move them to one device"),
        ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    ]:
        with pytest.raises(error, match=f"matmul_persistent: .*{message}"):
            matmul_persistent(*args)
