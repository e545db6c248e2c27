"""persistent_matmul: every step at every edge, few and many tiles, layouts, bad input, shared memory, the code."""

from types import SimpleNamespace

from harness.codegen import compile_for
from harness.hardware import SHARED_LIMIT, Limits

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.triton import persistent_matmul
from examples.triton.persistent_matmul import (
    DTYPES,
    GROUP_M,
    TILES,
    VARIANTS,
    explain,
    fitting_tile,
    matmul_persistent,
    reference,
    shared_bytes,
)


def check(h, a, b, variant="split", what=None):
    what = what or f"{variant} {tuple(a.shape)} {tuple(b.shape)}"
    h.check(lambda a, b: matmul_persistent(a, b, variant), reference, a, b, terms=a.shape[1], what=what)


@pytest.fixture
def gpu_of(monkeypatch):
    """Let the wrapper believe in another GPU: so many SMs, so much shared memory (the interpreter has no limit)."""

    def pretend(sms, sm=90):
        monkeypatch.setattr(persistent_matmul, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[sm]))

    return pretend


# One row, primes, one tile and one more in each dimension, half a tile of columns and 8 more, nothing to sum, nothing.
SHAPES = [(1, 8, 8), (37, 56, 104), (128, 256, 64), (129, 8, 64), (1, 264, 64), (1, 8, 72), (5, 128, 8), (5, 136, 8),
          (5, 16, 0), (0, 16, 8), (5, 0, 8)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes(h, shape, variant):
    M, N, K = shape
    check(h, h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half), variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sms", [1, 3, 1000])
def test_every_tile_is_taken_once(h, variant, sms, gpu_of):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles."""
    if not h.interpreted:
        pytest.skip("the number of SMs is real here")
    gpu_of(sms)
    check(h, h.randn(300, 8, dtype=h.half), h.randn(8, 520, dtype=h.half), variant)


def test_bands_of_tiles(h):
    """More rows of tiles than a band has, a last band that is not full, two columns of tiles."""
    M = (GROUP_M + 1) * TILES[0][0] + 1
    check(h, h.randn(M, 8, dtype=h.half), h.randn(8, 264, dtype=h.half))


@given(M=st.integers(0, 300), N=st.integers(0, 70), K=st.integers(0, 30), variant=st.sampled_from(VARIANTS))
def test_any_shape(M, N, K, variant):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    check(h, h.randn(M, 8 * K, dtype=torch.float16), h.randn(8 * K, 8 * N, dtype=torch.float16), variant)


@pytest.mark.parametrize("variant", VARIANTS[1::2])
def test_layouts(h, variant):
    a, b = h.randn(140, 160, dtype=h.half), h.randn(200, 320, dtype=h.half)
    for left, right in (
        (a, b[:160, :104]),  # rows apart: what lies between them must not be summed
        (a[:, 8:80], b[:72]),  # a start 16 bytes later
        (a[::3, :72], b[:144:2, 16:]),  # every third, every second row
        (a[:1, :72].as_strided((1, 72), (5, 1)), b[:72, :40]),  # one row, with a stride nobody steps by
    ):
        check(h, left, right, variant, what=f"strides {left.stride()}, {right.stride()}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_extremes(h, variant):
    """NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile."""
    a, b = h.randn(130, 72, dtype=h.half), h.randn(72, 264, dtype=h.half)
    check(h, a * 2.0**-12, b * 2.0**-6, variant, "tiny")
    a[3, 5], a[129, 71], b[2, 9], b[71, 263], b[7, 130] = (float(x) for x in ("nan", "inf", "-inf", "inf", "nan"))
    check(h, a, b, variant, "NaN and infinities")
    a, b = h.randn(20, 64, dtype=torch.float16), h.randn(64, 40, dtype=torch.float16)
    check(h, a * 100, b * 100, variant, "beyond the range of float16, in part")


def test_a_gpu_with_less_shared_memory_takes_the_second_tile(h, gpu_of):
    if not h.interpreted:
        pytest.skip("shared memory is real here")
    gpu_of(4, sm=120)
    for variant in VARIANTS:
        check(h, h.randn(200, 72, dtype=h.half), h.randn(72, 264, dtype=h.half), variant)


def test_a_gpu_without_room_for_any_tile(h, monkeypatch):
    monkeypatch.setattr(persistent_matmul, "device_limits", lambda device: Limits(40, 64 * 1024))
    a = h.randn(8, 8, dtype=h.half)
    with pytest.raises(RuntimeError, match="matmul_persistent: no tile fits the 65536 bytes of shared memory of"):
        matmul_persistent(a, a)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 5208, 776), (16, 8192, 4096), (8191, 264, 512)])
def test_shapes_on_the_gpu(h, dtype, shape):
    M, N, K = shape
    a, b = h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype)
    for variant in VARIANTS:
        check(h, a, b, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["tile", "split"])
def test_more_elements_than_an_int32_counts(h, gpu_gib, variant):
    gpu_gib(40)
    long = 2**31 // 64 + 64
    a = torch.empty(long, 64, dtype=torch.bfloat16, device=h.device).normal_()
    b = h.randn(64, 64, dtype=torch.bfloat16)
    c = matmul_persistent(a, b, variant)
    for part in (slice(0, 300), slice(-300, None)):
        h.check(lambda *_, p=part: c[p], reference, a[part].contiguous(), b, terms=64, what="tall")
    del c
    wide = a.view(64, long)
    c = matmul_persistent(b, wide, variant)
    for part in (slice(0, 300), slice(-300, None)):
        h.check(
            lambda *_, p=part: c[:, p].contiguous(), reference, b, wide[:, part].contiguous(), terms=64, what="wide"
        )


@pytest.mark.gpu
def test_the_steps_agree(h):
    """The same tile and the same order of sums: only when things happen differs, so not a bit of the result may."""
    a, b = h.randn(2000, 1000, dtype=torch.bfloat16), h.randn(1000, 3000, dtype=torch.bfloat16)
    first, *others = (matmul_persistent(a, b, variant) for variant in VARIANTS)
    for other in others:
        assert torch.equal(first, other)


ARCHITECTURES = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_generated_code(sm, variant):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(matmul_persistent, (x, x, variant), sms=(sm,))
    assert kernel.error is None
    assert kernel.kernel == ("matmul_tile_kernel" if variant == "tile" else "matmul_persistent_kernel")
    assert all(kernel.found.get(name) for name in ("cp.async.bulk.tensor", "mbarrier", ARCHITECTURES[sm])), kernel.found
    assert kernel.spills == 0
    # What the wrapper reckons with is enough, and on Hopper a persistent kernel uses all of it but a few barriers.
    block_m, block_n, block_k, num_warps, stages = tile_for(sm, variant)
    reckoned = shared_bytes(block_m, block_n, block_k, 2, stages, block_n // 2 if variant == "split" else block_n)
    assert kernel.shared <= reckoned <= kernel.shared_limit == SHARED_LIMIT[sm]
    if sm == 90 and variant != "tile":
        assert reckoned - kernel.shared < 256
    assert kernel.warps == num_warps


def tile_for(sm, variant):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persistent_matmul, "device_limits", lambda device: Limits(1, SHARED_LIMIT[sm]))
        return fitting_tile(torch.device("cpu"), 2, variant == "split")


@pytest.mark.parametrize("variant", ["persistent", "split"])
def test_float16_compiles_to_the_same(variant):
    for dtype in DTYPES:
        x = torch.empty(4096, 4096, dtype=dtype, device="meta")
        (kernel,) = compile_for(matmul_persistent, (x, x, variant), sms=(90,))
        assert (kernel.error, kernel.spills) == (None, 0)
        assert kernel.fits


@pytest.mark.parametrize(
    ("sm", "whole", "split"),
    [
        (80, (128, 256, 64, 8, 2), (128, 256, 64, 8, 2)),
        (90, (128, 256, 64, 8, 3), (128, 256, 64, 8, 4)),  # the lesson: half the tile pays for a fourth stage
        (100, (128, 256, 64, 8, 3), (128, 256, 64, 8, 4)),
        (120, (128, 128, 64, 8, 2), (128, 128, 64, 8, 2)),
    ],
)
def test_which_tile_fits(sm, whole, split):
    assert (tile_for(sm, "persistent"), tile_for(sm, "split")) == (whole, split)


def test_what_the_lesson_says_follows_from_the_times(monkeypatch):
    """16 by 32 tiles on 132 SMs are 3.88 waves, paid as 4; each of them 100 us shorter is 25 us a wave."""
    said = []
    h = SimpleNamespace(
        device=torch.device("cpu"), half=torch.bfloat16, machine=SimpleNamespace(sms=132), say=said.append
    )
    monkeypatch.setattr(persistent_matmul, "device_limits", lambda device: Limits(132, SHARED_LIMIT[90]))
    ms = dict(zip(VARIANTS, (1.0, 0.9, 0.8, 0.85), strict=True))
    rows = [SimpleNamespace(variant=f"triton {name}", ms=time) for name, time in ms.items()]
    rows.insert(0, SimpleNamespace(variant="cuBLAS", ms=0.7))
    explain(h, SimpleNamespace(rows=rows), 4096, 4096)
    assert said == [
        "512 tiles on 132 SMs are 3.88 waves, paid as 4; won per wave of 250.0 us by each step: "
        "persistent +25.00 us, flattened +25.00 us, split -12.50 us"
    ]
    explain(h, SimpleNamespace(rows=rows[:3]), 4096, 4096)
    assert len(said) == 1, "without every step there is nothing to compare"


def _bad(device):
    a = torch.randn(4, 16, device=device).half()
    b = torch.randn(16, 8, device=device).half()
    flat = torch.zeros(200, dtype=torch.float16, device=device)
    return {
        "no tensor": (([1.0], b), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((a.int(), b.int()), TypeError, r"dtypes torch\.int32 and torch\.int32; both must be"),
        "float32": ((a.float(), b.float()), TypeError, r"torch\.float32"),
        "two dtypes": ((a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        "a vector": ((a, b[:, 0]), ValueError, r"shapes \(4, 16\) and \(16,\); need \[M, K\] and \[K, N\]"),
        "a batch": ((a.reshape(1, 4, 16), b.reshape(1, 16, 8)), ValueError, "need"),
        "inner sizes": ((a, b.t()), ValueError, r"shapes \(4, 16\) and \(8, 16\)"),
        "no variant": ((a, b, "faster"), ValueError, r"variant 'faster' is not one of \('tile', "),
        "None for a variant": ((a, b, None), ValueError, "variant None is not one of"),
        "K of 12": ((a[:, :12], b[:12]), ValueError, "K is 12 and N 8; TMA needs .*pad both to multiples of 8"),
        "N of 4": ((a, b[:, :4]), ValueError, "K is 16 and N 4"),
        "a transposed": (
            (torch.zeros(16, 8, dtype=a.dtype, device=device).t(), b),
            ValueError,
            r"a has shape \(8, 16\)",
        ),
        "b transposed": ((a, torch.zeros(8, 16, dtype=a.dtype, device=device).t()), ValueError, r"b has .*\(1, 16\)"),
        "unaligned start": ((flat[1:65].view(4, 16), b), ValueError, "a has .* starts 2 bytes past"),
        "unaligned rows": (
            (a, flat[:192].view(16, 12)[:, :8]),
            ValueError,
            r"b has shape \(16, 8\), strides \(12, 1\)",
        ),
        "one row for all": ((a[:1].expand(4, 16), b), ValueError, r"a has .* strides \(0, 1\)"),
        "requires grad": ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta")), ValueError, "move them to one device"),
        "a device without kernels": ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"matmul_persistent: .*{message}"):
        matmul_persistent(*args)
