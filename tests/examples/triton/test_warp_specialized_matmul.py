"""warp_specialized_matmul: every loop right whatever the compiler makes of it, what it makes of it, bad input."""

import contextvars
import functools

from harness.codegen import compile_for
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
from tests.examples.triton.helpers import extremes, harness, matrices, refused, tma_layouts

by_loop = pytest.mark.parametrize("loop", LOOPS)


def check(h, a, b, loop="k", warp_specialize=True, block_m=64, num_warps=4, descriptors="kernel"):
    form = {"loop": loop, "warp_specialize": warp_specialize, "block_m": block_m, "num_warps": num_warps}
    form["descriptors"] = descriptors
    small = torch.zeros(16, 16, dtype=a.dtype, device=a.device)
    if not runs(small, small, **form):
        pytest.skip(f"this GPU's compiler does not take {form}")
    what = f"{form} {tuple(a.shape)} {a.stride()} {tuple(b.shape)} {b.stride()}"
    h.check(functools.partial(matmul_specialized, **form), reference, a, b, terms=a.shape[1], what=what)


@by_loop
def test_shapes_layouts_and_extremes(h, loop):
    """One row, primes, one tile and one more in each dimension, nothing to sum, nothing; a last group of tiles that is
    not full."""
    for shape in [(1, 8, 8), (37, 56, 104), (64, 128, 64), (65, 8, 8), (1, 136, 72), (5, 16, 0), (0, 16, 8), (5, 0, 8),
                  ((GROUP_M + 1) * 64 + 1, 136, 8)]:  # fmt: skip
        check(h, *matrices(h, *shape), loop)
    for a, b in (*tma_layouts(h), *extremes(h, 66, 136, 72)):
        check(h, a, b, loop)


@pytest.mark.parametrize(
    ("loop", "asked", "block_m", "num_warps", "descriptors"),
    [("k", True, 64, 8, "host"), ("k", False, 128, 4, "host"), ("tiles", True, 128, 8, "kernel"),
     ("tiles", False, 64, 4, "host"), ("flattened tiles", True, 128, 4, "host"),
     ("flattened tiles", False, None, None, "kernel")],
)  # fmt: skip
def test_forms(h, loop, asked, block_m, num_warps, descriptors):
    check(h, *matrices(h, 140, 264, 72), loop, asked, block_m, num_warps, descriptors)


@given(M=st.integers(0, 200), N=st.integers(0, 40), K=st.integers(0, 20), loop=st.sampled_from(LOOPS))
def test_any_shape(M, N, K, loop):
    h = harness()
    check(h, *matrices(h, M, 8 * N, 8 * K, torch.float16), loop, loop != "tiles")


@pytest.mark.parametrize(("loop", "sms"), [("tiles", 1), ("tiles", 1000), ("flattened tiles", 3)])
def test_every_tile_is_taken_once(h, monkeypatch, loop, sms):
    if not h.interpreted:
        pytest.skip("the number of SMs is real here")
    monkeypatch.setattr(warp_specialized_matmul, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[90]))
    check(h, *matrices(h, 130, 264, 8), loop)


def test_the_setting_of_the_allocator_stays_the_callers(h):
    """The kernel's descriptors need workspace; what the caller has set for that is neither used nor replaced."""
    from triton.runtime import _allocation

    def refuse(size, alignment, stream):
        raise AssertionError("the caller's allocator was asked")

    def call():
        triton.set_allocator(refuse)
        matmul_specialized(*matrices(h, 8, 8, 8))
        assert _allocation._allocator.get() is refuse

    contextvars.copy_context().run(call)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@by_loop
def test_shapes_on_the_gpu(h, dtype, loop):
    for shape in [(4096, 4096, 4096), (1000, 5208, 776), (16, 8192, 4096), (8191, 264, 512)]:
        check(h, *matrices(h, *shape, dtype), loop)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", BLOCKS)
@by_loop
def test_partitions_meet_many_times_over(h, loop, rows):
    """Producer and consumers wait for each other: many launches, few and many steps, tiles fewer and more than SMs."""
    for shape in ((8, 8, 8), (64, 128, 8192), (2048, 2048, 64), (3000, 3000, 1000)):
        a, b = matrices(h, *shape)
        check(h, a, b, loop, True, rows, None)
        want = matmul_specialized(a, b, loop, True, rows)
        assert all(torch.equal(matmul_specialized(a, b, loop, True, rows), want) for _ in range(20))


def test_only_failures_of_the_compiler_are_not_supported(h, monkeypatch):
    a, _ = matrices(h, 8, 8, 8)

    def failing(error):
        def launch(device, launch):
            raise error

        monkeypatch.setattr(warp_specialized_matmul, "launch_with_scratch", launch)
        return not runs(a, a)

    assert failing(RuntimeError("PassManager::run failed"))
    assert failing(triton.OutOfResources(131340, 101376, "shared memory"))
    refused(matmul_specialized, NotSupported, "does not fit .*101376.*; use another", a, a)
    for error in (RuntimeError("CUDA error: no device"), ValueError("PassManager")):
        with pytest.raises(type(error), match=f"^{error}$"):
            failing(error)


def test_under_a_sanitizer_a_specialized_kernel_runs_and_is_not_held_to_its_reference(h, monkeypatch):
    asked, compared, checked = [], [], []
    wrapped = matmul_specialized
    monkeypatch.setattr(Harness, "SANITIZED", True)
    monkeypatch.setattr(warp_specialized_matmul, "matmul_specialized",
                        lambda *args, **form: asked.append(form) or wrapped(*args, **form))  # fmt: skip
    monkeypatch.setattr(h, "compare", lambda variants, *_, **__: compared.extend(variants))
    monkeypatch.setattr(h, "check", lambda fn, *_, **__: checked.append(fn))
    monkeypatch.setattr(h, "codegen", lambda *_, **__: [])
    demo(h)
    sizes_and_trials = 2 * 3 * len(ASKED) + len(TIMED)
    assert sum(form.get("warp_specialize", True) for form in asked) == sizes_and_trials
    assert compared == ["torch" if h.device.type == "cpu" else "cuBLAS", *TIMED]
    assert not checked
    monkeypatch.setattr(Harness, "SANITIZED", False)
    a, _ = matrices(h, 8, 8, 8)
    check_unless_sanitized(h, a, a, {}, "now it is")
    assert len(checked) == 1


# The study asks for the forms of the lesson; here are the defaults, and what only these forms show.
@pytest.mark.parametrize(
    ("sm", "form", "became", "instruction"),
    [
        (90, ("k",), "specialized, 12 warps", "wgmma"),
        (90, ("flattened tiles",), "ignored, 8 warps", "wgmma"),
        (100, ("k", True, 64, 4, "host"), "specialized", "tcgen05.mma"),
        (120, ("k",), "specialized", "mma.sync"),
    ],
)
def test_what_becomes_of_the_request(sm, form, became, instruction):
    """The default takes the larger tile that fits, also in the 99 KiB of sm_120, and nothing spills."""
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(matmul_specialized, (x, x, *form), sms=(sm,))
    assert (kernel.error, kernel.fits) == (None, True)
    assert outcome(kernel).startswith(became)
    assert kernel.found[instruction]
    assert kernel.spills == 0 or sm == 120
    assert ("setmaxnreg" in kernel.found) == became.startswith("specialized")


def test_bad_input(h):
    a, b = matrices(h, 4, 8, 16, torch.float16)
    flat = torch.zeros(200, dtype=torch.float16, device=h.device)
    for message, *args in [
        *((f"{name} .* is not one of", a, b, *form) for name, form in (
            ("loop", ("m",)), ("warp_specialize", ("k", None)), ("block_m", ("k", True, 64.0)),
            ("num_warps", ("k", True, 64, 2)), ("descriptors", ("k", True, 64, 4, "device")))),
        ("K is 12 and N 8", a[:, :12], b[:12]),
        ("a has .* starts 2 bytes past", flat[1:65].view(4, 16), b),
        (r"b has shape \(16, 8\), strides \(12, 1\)", a, flat[:192].view(16, 12)[:, :8]),
    ]:  # fmt: skip
        refused(matmul_specialized, ValueError, message, *args)
