"""warp_specialized_matmul: every loop right whatever the compiler makes of it, what it makes of it, bad input."""

import contextvars
import functools
import itertools

from harness.codegen import Kernel, compile_for
from harness.hardware import machine
from harness.session import Harness

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.triton import warp_specialized_matmul
from examples.triton.warp_specialized_matmul import (
    ASKED,
    BLOCKS,
    DESCRIPTORS,
    DTYPES,
    GROUP_M,
    LOOPS,
    TIMED,
    NotSupported,
    demo,
    matmul_specialized,
    outcome,
    reference,
    runs,
)
from examples.triton.warp_specialized_matmul import check as check_unless_sanitized


def check(h, a, b, loop="k", warp_specialize=True, block_m=64, num_warps=4, descriptors="kernel"):
    form = {"loop": loop, "warp_specialize": warp_specialize, "block_m": block_m, "num_warps": num_warps}
    form["descriptors"] = descriptors
    small = torch.zeros(16, 16, dtype=a.dtype, device=a.device)
    if not runs(small, small, **form):
        pytest.skip(f"this GPU's compiler does not take {form}")
    what = f"{form} {tuple(a.shape)} {a.stride()} {tuple(b.shape)} {b.stride()}"
    h.check(functools.partial(matmul_specialized, **form), reference, a, b, terms=a.shape[1], what=what)


def operands(h, M, N, K, dtype=None):
    return h.randn(M, K, dtype=dtype or h.half), h.randn(K, N, dtype=dtype or h.half)


# One row, primes, one tile and one more in each dimension, nothing to sum, nothing.
SHAPES = [(1, 8, 8), (37, 56, 104), (64, 128, 64), (65, 8, 8), (1, 136, 8), (1, 8, 72), (130, 264, 8), (5, 16, 0),
          (0, 16, 8), (5, 0, 8)]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_shapes(h, loop):
    for shape in SHAPES:
        check(h, *operands(h, *shape), loop)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("descriptors", DESCRIPTORS)
@pytest.mark.parametrize(("block_m", "num_warps"), [(64, 4), (64, 8), (128, 4), (128, 8), (None, None)])
def test_every_form(h, loop, block_m, num_warps, descriptors):
    a, b = operands(h, 140, 264, 72)
    for asked in (False, True):
        check(h, a, b, loop, asked, block_m, num_warps, descriptors)


def test_the_setting_of_the_allocator_stays_the_callers(h):
    """The kernel's descriptors need workspace; what the caller has set for that is neither used nor replaced."""
    from triton.runtime import _allocation

    def refuse(size, alignment, stream):
        raise AssertionError("the caller's allocator was asked")

    def call():
        triton.set_allocator(refuse)
        matmul_specialized(h.randn(8, 8, dtype=h.half), h.randn(8, 8, dtype=h.half))
        assert _allocation._allocator.get() is refuse

    contextvars.copy_context().run(call)


@pytest.mark.parametrize("loop", LOOPS)
def test_groups_of_tiles(h, loop):
    """More rows of tiles than a group has, a last group that is not full, two columns of tiles."""
    check(h, *operands(h, (GROUP_M + 1) * 64 + 1, 136, 8), loop)


@pytest.mark.parametrize("loop", LOOPS[1:])
@pytest.mark.parametrize("sms", [1, 3, 1000])
def test_every_tile_is_taken_once(h, monkeypatch, loop, sms):
    if not h.interpreted:
        pytest.skip("the number of SMs is real here")
    monkeypatch.setattr(warp_specialized_matmul, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[90]))
    check(h, *operands(h, 130, 264, 8), loop)


@given(M=st.integers(0, 200), N=st.integers(0, 40), K=st.integers(0, 20), loop=st.sampled_from(LOOPS))
def test_any_shape(M, N, K, loop):
    h = Harness("test")
    check(h, *operands(h, M, 8 * N, 8 * K, torch.float16), loop, loop != "tiles")


@pytest.mark.parametrize("loop", LOOPS)
def test_layouts_and_extremes(h, loop):
    a, b = operands(h, 140, 320, 200)
    for left, right in (
        (a[:, :160], b[:160, :104]),  # rows apart: what lies between them must not be summed
        (a[:, 8:80], b[:72]),  # a start 16 bytes later
        (a[::3, :72], b[:144:2, 16:]),  # every third, every second row
        (a[:1, :72].as_strided((1, 72), (5, 1)), b[:72, :40]),  # one row, with a stride nobody steps by
    ):
        check(h, left, right, loop)
    a, b = operands(h, 66, 136, 72)
    check(h, a * 2.0**-12, b * 2.0**-6, loop)
    # NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile.
    a[3, 5], a[65, 71], b[2, 9], b[71, 135], b[7, 130] = (float(x) for x in ("nan", "inf", "-inf", "inf", "nan"))
    check(h, a, b, loop)
    a, b = operands(h, 20, 40, 64, torch.float16)
    check(h, a * 100, b * 100, loop)  # beyond the range of float16, in part


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loop", LOOPS)
def test_shapes_on_the_gpu(h, dtype, loop):
    for shape in [(4096, 4096, 4096), (1000, 5208, 776), (16, 8192, 4096), (8191, 264, 512)]:
        check(h, *operands(h, *shape, dtype), loop)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", BLOCKS)
@pytest.mark.parametrize("loop", LOOPS)
def test_partitions_meet_many_times_over(h, loop, rows):
    """Producer and consumers wait for each other: many launches, few and many steps, tiles fewer and more than SMs."""
    for shape in ((8, 8, 8), (64, 128, 8192), (2048, 2048, 64), (3000, 3000, 1000)):
        a, b = operands(h, *shape)
        check(h, a, b, loop, True, rows, None)
        want = matmul_specialized(a, b, loop, True, rows)
        assert all(torch.equal(matmul_specialized(a, b, loop, True, rows), want) for _ in range(20))


@pytest.mark.gpu
def test_a_form_that_does_not_compile_says_what_to_use_instead(h):
    if machine().sm != 90:
        pytest.skip("a rule of Hopper's compiler")
    a = h.randn(128, 128, dtype=torch.bfloat16)
    with pytest.raises(NotSupported, match=r"matmul_specialized: loop 'k' .* this GPU .*; use another"):
        matmul_specialized(a, a, "k", True, 128, 4, "host")


def test_failures_are_told_and_others_passed_on(h, monkeypatch):
    a = h.randn(8, 8, dtype=h.half)

    def failing(error):
        def launch(device, launch):
            raise error

        monkeypatch.setattr(warp_specialized_matmul, "launch_with_scratch", launch)
        return not runs(a, a)

    assert failing(RuntimeError("PassManager::run failed"))
    assert failing(triton.OutOfResources(131340, 101376, "shared memory"))
    with pytest.raises(NotSupported, match=r"matmul_specialized: .*does not fit .*101376.*; use another"):
        matmul_specialized(a, a)
    for error in (RuntimeError("CUDA error: no device"), ValueError("PassManager")):
        with pytest.raises(type(error), match=f"^{error}$"):
            failing(error)


def test_what_the_demo_asks_of_the_gpu(h, monkeypatch):
    """Under a sanitizer a specialized kernel runs, and is neither held to its reference nor compared."""
    asked, compared, checked = [], [], []
    wrapped = matmul_specialized
    monkeypatch.setattr(Harness, "SANITIZED", True)
    monkeypatch.setattr(warp_specialized_matmul, "matmul_specialized",
                        lambda *args, **form: asked.append(form) or wrapped(*args, **form))  # fmt: skip
    monkeypatch.setattr(h, "compare", lambda variants, *_, **__: compared.extend(variants))
    monkeypatch.setattr(h, "check", lambda fn, *_, **__: checked.append(fn))
    demo(h)
    sizes_and_trials = 2 * 3 * len(ASKED) + len(TIMED)
    assert sum(form.get("warp_specialize", True) for form in asked) == sizes_and_trials
    assert compared == ["torch" if h.device.type == "cpu" else "cuBLAS", *TIMED]
    assert not checked
    monkeypatch.setattr(Harness, "SANITIZED", False)
    a = h.randn(8, 8, dtype=h.half)
    check_unless_sanitized(h, a, a, {}, "now it is")
    assert len(checked) == 1


def compiled(*form, sm):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(matmul_specialized, (x, x, *form), sms=(sm,))
    return kernel


BEFORE_3_7 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("block_m", "num_warps"), [(64, 4), (64, 8), (128, 4), (128, 8)])
def test_what_hopper_does_with_the_request(loop, block_m, num_warps):
    for descriptors in DESCRIPTORS:
        kernel = compiled(loop, True, block_m, num_warps, descriptors, sm=90)
        if loop == "flattened tiles" or num_warps == 8:
            assert outcome(kernel) == f"ignored, {num_warps} warps"
        elif block_m == 128 and descriptors == "host":
            assert outcome(kernel) == "not supported"
            assert kernel.error == "RuntimeError: PassManager::run failed"
            continue
        else:
            assert outcome(kernel) == "specialized, 12 warps"
        assert kernel.fits
        assert kernel.found["wgmma"]
        assert kernel.found["cp.async.bulk.tensor"]
        assert bool(kernel.spills) == (block_m == 128 and num_warps == 4 and loop == "flattened tiles")


@pytest.mark.parametrize("loop", LOOPS)
def test_what_hopper_takes_by_default(loop):
    """Also where it drops the request: then with the warps that a tile needs without partitions, without spills."""
    for asked, descriptors in itertools.product((False, True), DESCRIPTORS):
        kernel = compiled(loop, asked, None, None, descriptors, sm=90)
        assert (kernel.error, kernel.fits, kernel.spills) == (None, True, 0)
        if not asked:
            assert outcome(kernel) == "ignored, 8 warps"


@pytest.mark.parametrize(("sm", "rows"), [(80, 64), (90, 128), (100, 128), (120, 64)])
def test_the_default_tile_is_the_larger_one_that_fits(sm, rows):
    kernel, want = compiled("k", sm=sm), compiled("k", True, rows, 4, sm=sm)
    assert (kernel.fits, kernel.shared, kernel.warps) == (True, want.shared, want.warps)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("block_m", "num_warps"), [(64, 4), (128, 8)])
def test_what_blackwell_does_with_the_request(loop, block_m, num_warps):
    for descriptors in DESCRIPTORS:
        kernel = compiled(loop, True, block_m, num_warps, descriptors, sm=100)
        if loop == "tiles" and BEFORE_3_7:
            assert kernel.error
            continue
        assert outcome(kernel).startswith("specialized")
        assert kernel.warps > num_warps
        assert kernel.found["tcgen05.mma"]
        assert (kernel.fits, kernel.spills) == (True, 0)
    plain = compiled(loop, False, block_m, sm=100)
    assert (outcome(plain), plain.fits, plain.spills) == (f"ignored, {num_warps} warps", True, 0)


def test_the_small_shared_memory_of_sm_120():
    """128 rows are too many for its 99 KiB, 64 are not."""
    assert not compiled("k", True, 128, 8, sm=120).fits
    small = compiled("k", True, 64, 4, sm=120)
    assert small.fits
    assert outcome(small).startswith("specialized")
    for loop in LOOPS:
        assert outcome(compiled(loop, False, 64, sm=120)) == "ignored, 4 warps"


def test_outcomes():
    assert outcome(Kernel("m", 90, error="no")) == "not supported"
    assert outcome(Kernel("m", 90, found={"setmaxnreg": 2}, warps=12)) == "specialized, 12 warps"
    assert outcome(Kernel("m", 90, found={"wgmma": 2}, warps=4)) == "ignored, 4 warps"


def test_bad_input(h):
    a, b = operands(h, 4, 8, 16, torch.float16)
    flat = torch.zeros(200, dtype=torch.float16, device=h.device)
    for args, error, message in [
        (([1.0], b), TypeError, "got list"),
        ((a.float(), b.float()), TypeError, r"torch\.float32"),
        ((a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        ((a, b[:, 0]), ValueError, r"need \[M, K\] and \[K, N\]"),
        ((a, b.t()), ValueError, r"shapes \(4, 16\) and \(8, 16\)"),
        *(((a, b, loop), ValueError, "loop .* is not one of") for loop in ("m", None)),
        ((a, b, "k", None), ValueError, "warp_specialize None is not one of"),
        *(((a, b, "k", True, rows), ValueError, "block_m .* is not one of") for rows in (32, 64.0)),
        ((a, b, "k", True, 64, 2), ValueError, "num_warps 2 is not one of"),
        ((a, b, "k", True, 64, 4, "device"), ValueError, "descriptors 'device' is not one of"),
        ((a[:, :12], b[:12]), ValueError, "K is 12 and N 8"),
        ((a, b[:, :4]), ValueError, "K is 16 and N 4"),
        ((b.t(), b), ValueError, "a has shape"),
        ((flat[1:65].view(4, 16), b), ValueError, "a has .* starts 2 bytes past"),
        ((a, flat[:192].view(16, 12)[:, :8]), ValueError, r"b has shape \(16, 8\), strides \(12, 1\)"),
        ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        ((a, b.to("meta")), ValueError, "move them to one device"),
        ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    ]:
        with pytest.raises(error, match=f"matmul_specialized: .*{message}"):
            matmul_specialized(*args)
