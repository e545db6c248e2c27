"""warp_specialized_matmul: every loop right whatever the compiler makes of it, what it makes of it, bad input."""

import contextvars
import functools
import re
from types import SimpleNamespace

from harness.codegen import CodegenError, Kernel, compile_for, dump
from harness.hardware import SHARED_LIMIT, Limits, interpreted, machine

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.triton import warp_specialized_matmul
from examples.triton.warp_specialized_matmul import (
    BLOCKS,
    COPY_BLOCK,
    DESCRIPTORS,
    DTYPES,
    FORMS,
    GROUP_M,
    LOOPS,
    TIMED,
    _telling,
    compiles,
    copy_specialized,
    demo,
    matmul_specialized,
    programs_per_sm,
    reference,
    run_or_check,
    share_of_products,
    show_code,
    verdict,
)


@functools.cache
def _compiles(wrapper, *args):
    """By the lesson, a GPU's compiler does not take every form; and a tile of 128 rows does not fit every GPU."""
    if interpreted():
        return True
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    operands = (x,) if wrapper is copy_specialized else (x, x)
    (kernel,) = compile_for(wrapper, (*operands, *args), sms=(machine().sm,))
    return not kernel.error and kernel.fits


def test_what_the_demo_leaves_out():
    """Asked for the machine it runs on: the interpreter takes everything, Hopper's compiler all but one of these."""
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    here, hopper = (SimpleNamespace(interpreted=i, machine=SimpleNamespace(sm=90)) for i in (True, False))
    assert all(compiles(hopper, matmul_specialized, x, x, loop, True, 64) for loop in LOOPS)
    for loop, rows, descriptors in TIMED.values():
        assert compiles(hopper, matmul_specialized, x, x, loop, True, rows, None, descriptors)
    refused = (matmul_specialized, x, x, "k", True, 128, 4, "host")
    assert compiles(here, *refused)
    assert not compiles(hopper, *refused)
    small = SimpleNamespace(interpreted=False, machine=SimpleNamespace(sm=120))
    assert not compiles(small, matmul_specialized, x, x, "k", True, 128), "it compiles, and does not fit"


def check(h, a, b, loop="k", specialize=True, block_m=64, num_warps=4, descriptors="kernel", what=None):
    form = (loop, specialize, block_m, num_warps, descriptors)
    if not _compiles(matmul_specialized, *form):
        pytest.skip(f"this GPU's compiler does not take {form}")
    what = what or f"{form} {tuple(a.shape)} {tuple(b.shape)}"
    h.check(lambda a, b: matmul_specialized(a, b, *form), reference, a, b, terms=a.shape[1], what=what)


# One row, primes, one tile and one more in each dimension, nothing to sum, nothing.
SHAPES = [(1, 8, 8), (37, 56, 104), (64, 128, 64), (65, 8, 8), (1, 136, 8), (1, 8, 72), (130, 264, 8), (5, 16, 0),
          (0, 16, 8), (5, 0, 8)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loop", LOOPS)
def test_shapes(h, shape, loop):
    M, N, K = shape
    check(h, h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half), loop)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("specialize", [False, True])
@pytest.mark.parametrize(("block_m", "num_warps"), [(64, 4), (64, 8), (128, 4), (128, 8), (None, None)])
@pytest.mark.parametrize("descriptors", DESCRIPTORS)
def test_every_form(h, loop, specialize, block_m, num_warps, descriptors):
    a, b = h.randn(140, 72, dtype=h.half), h.randn(72, 264, dtype=h.half)
    check(h, a, b, loop, specialize, block_m, num_warps, descriptors)


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


@pytest.mark.parametrize("descriptors", DESCRIPTORS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("specialize", [False, True])
def test_hopper_takes_every_form_by_default(loop, specialize, descriptors):
    """Also where it drops the request: then with the warps that one role needs, without spills."""
    kernel = _compiled(loop, specialize, None, None, descriptors, sm=90)
    assert (kernel.error, kernel.fits, kernel.spills) == (None, True, 0)


@pytest.mark.parametrize(("sm", "rows"), [(80, 64), (90, 128), (100, 128), (120, 64)])
def test_the_default_tile_is_the_larger_one_that_fits(sm, rows):
    kernel, want = _compiled("k", sm=sm), _compiled("k", True, rows, 4, sm=sm)
    assert (kernel.fits, kernel.shared, kernel.warps) == (True, want.shared, want.warps)


@pytest.mark.parametrize("loop", LOOPS)
def test_bands_of_tiles(h, loop):
    """More rows of tiles than a band has, a last band that is not full, two columns of tiles."""
    check(h, h.randn((GROUP_M + 1) * 64 + 1, 8, dtype=h.half), h.randn(8, 136, dtype=h.half), loop)


@pytest.mark.parametrize("loop", LOOPS[1:])
@pytest.mark.parametrize("sms", [1, 3, 1000])
def test_every_tile_is_taken_once(h, monkeypatch, loop, sms):
    if not h.interpreted:
        pytest.skip("the number of SMs is real here")
    monkeypatch.setattr(warp_specialized_matmul, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[90]))
    check(h, h.randn(130, 8, dtype=h.half), h.randn(8, 264, dtype=h.half), loop)


@given(M=st.integers(0, 200), N=st.integers(0, 40), K=st.integers(0, 20), loop=st.sampled_from(LOOPS))
def test_any_shape(M, N, K, loop):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    loop = loop if _compiles(matmul_specialized, loop) else "k"
    check(h, h.randn(M, 8 * K, dtype=torch.float16), h.randn(8 * K, 8 * N, dtype=torch.float16), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_layouts(h, loop):
    a, b = h.randn(140, 160, dtype=h.half), h.randn(200, 320, dtype=h.half)
    for left, right in (
        (a, b[:160, :104]),  # rows apart: what lies between them must not be summed
        (a[:, 8:80], b[:72]),  # a start 16 bytes later
        (a[::3, :72], b[:144:2, 16:]),  # every third, every second row
        (a[:1, :72].as_strided((1, 72), (5, 1)), b[:72, :40]),  # one row, with a stride nobody steps by
    ):
        check(h, left, right, loop, what=f"{loop} strides {left.stride()}, {right.stride()}")


@pytest.mark.parametrize("loop", LOOPS)
def test_extremes(h, loop):
    """NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile."""
    a, b = h.randn(66, 72, dtype=h.half), h.randn(72, 136, dtype=h.half)
    check(h, a * 2.0**-12, b * 2.0**-6, loop, what="tiny")
    a[3, 5], a[65, 71], b[2, 9], b[71, 135], b[7, 130] = (float(x) for x in ("nan", "inf", "-inf", "inf", "nan"))
    check(h, a, b, loop, what="NaN and infinities")
    a, b = h.randn(20, 64, dtype=torch.float16), h.randn(64, 40, dtype=torch.float16)
    check(h, a * 100, b * 100, loop, what="beyond the range of float16, in part")


# Nothing, one element, a prime, around a block, more blocks than programs (16 in the interpreter), no vector at all.
@pytest.mark.parametrize(
    "shape", [(0,), (1,), (997,), (COPY_BLOCK,), (COPY_BLOCK + 1,), (40 * COPY_BLOCK + 3,), (3, 5, 7), ()]
)
def test_copy(h, shape):
    if not _compiles(copy_specialized):
        pytest.skip("this GPU's compiler does not take the loop")
    x = h.randn(*(shape or (1,)), dtype=h.half).reshape(shape)
    h.check(copy_specialized, torch.Tensor.double, x, terms=0, constant_ok=x.numel() < 2)


def test_copy_keeps_every_bit(h):
    if not _compiles(copy_specialized):
        pytest.skip("this GPU's compiler does not take the loop")
    bits = torch.arange(-(2**15), 2**15, device=h.device).to(torch.int16)  # NaN, infinities, -0.0, subnormals, the rest
    assert torch.equal(copy_specialized(bits.view(torch.float16)).view(torch.int16), bits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 5208, 776), (16, 8192, 4096), (8191, 264, 512)])
@pytest.mark.parametrize("loop", LOOPS)
def test_shapes_on_the_gpu(h, dtype, shape, loop):
    M, N, K = shape
    check(h, h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype), loop)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", BLOCKS)
@pytest.mark.parametrize("loop", LOOPS)
def test_roles_meet_many_times_over(h, loop, rows):
    """Producer and consumers wait for each other: many launches, few and many steps, tiles fewer and more than SMs."""
    if not _compiles(matmul_specialized, loop, True, rows):
        pytest.skip("this GPU's compiler does not take the loop")
    for M, N, K in ((8, 8, 8), (64, 128, 8192), (2048, 2048, 64), (3000, 3000, 1000)):
        a, b = h.randn(M, K, dtype=torch.bfloat16), h.randn(K, N, dtype=torch.bfloat16)
        want = matmul_specialized(a, b, loop, True, rows)
        h.check(lambda *_, want=want: want, reference, a, b, terms=K, what=f"{loop}, {rows} rows, {M}x{N}x{K}")
        for _ in range(20):
            assert torch.equal(matmul_specialized(a, b, loop, True, rows), want)


@pytest.mark.gpu
def test_copy_near_and_beyond_what_an_int32_counts(h, gpu_gib):
    """Just below 2**31 elements the next start of a 32-bit loop would already be negative."""
    gpu_gib(20)
    if not _compiles(copy_specialized):
        pytest.skip("this GPU's compiler does not take the loop")
    x = torch.empty(2**31 + 5000, dtype=torch.bfloat16, device=h.device).normal_()
    for n in (2**31 - 1, 2**31 - COPY_BLOCK, x.numel()):
        assert torch.equal(copy_specialized(x[:n]), x[:n])


@pytest.mark.gpu
def test_a_form_that_does_not_compile_says_what_to_use_instead(h):
    a = h.randn(128, 128, dtype=torch.bfloat16)
    failing = [(loop, True, m, w, d) for loop in LOOPS for m in (64, 128) for w in (4, 8) for d in DESCRIPTORS]
    failing = [form for form in failing if not _compiles(matmul_specialized, *form)]
    if machine().sm == 90:
        assert ("k", True, 128, 4, "host") in failing
    for form in failing:
        with pytest.raises(RuntimeError, match=r"matmul_specialized: .*loop .* this GPU .*; use another"):
            matmul_specialized(a, a, *form)


def test_failures_are_told_by_name_and_others_passed_on():
    with (
        pytest.raises(
            RuntimeError, match=rf"op: Triton {triton.__version__} fails to specialize a loop .*; use a clone"
        ),
        _telling("op", "a loop", "a clone"),
    ):
        raise RuntimeError("PassManager::run failed")
    with pytest.raises(RuntimeError, match=r"op: a loop does not fit this GPU .*101376.*; use a clone"), \
            _telling("op", "a loop", "a clone"):  # fmt: skip
        raise triton.OutOfResources(131340, 101376, "shared memory")
    for error in (RuntimeError("CUDA error: no device"), ValueError("PassManager")):
        with pytest.raises(type(error), match=f"^{error}$"), _telling("op", "a loop", "a clone"):
            raise error


def _compiled(*form, sm):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(matmul_specialized, (x, x, *form), sms=(sm,))
    return kernel


BEFORE_3_7 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("descriptors", DESCRIPTORS)
@pytest.mark.parametrize("loop", LOOPS)
def test_what_hopper_does_with_the_request(loop, block_m, num_warps, descriptors):
    kernel = _compiled(loop, True, block_m, num_warps, descriptors, sm=90)
    if loop == "flattened tiles" or num_warps == 8:
        want = f"dropped: no setmaxnreg, {num_warps} warps"
    elif block_m == 128 and descriptors == "host":
        want = "does not compile: RuntimeError: PassManager::run failed"
    else:
        want = "specialized: setmaxnreg, 12 warps for 4 asked"
    assert verdict(kernel, num_warps) == want
    if kernel.error is None:
        assert kernel.found["wgmma"]
        assert kernel.found["cp.async.bulk.tensor"]
        assert kernel.fits
        assert bool(kernel.spills) == (block_m == 128 and num_warps == 4 and loop == "flattened tiles")


@pytest.mark.parametrize("loop", ["k", "tiles"])
@pytest.mark.parametrize(("block_m", "descriptors"), [(64, "host"), (64, "kernel"), (128, "kernel")])
def test_what_hopper_leaves_in_the_ring(loop, block_m, descriptors):
    """The lesson of the sanitizer: barriers that are initialized where tiles are loaded to, in the columns it names."""
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    ptx = dump(matmul_specialized, (x, x, loop, True, block_m, 4, descriptors), sm=90)["ptx"]
    (base,) = {r for r in re.findall(r"mov\.b32 \s*(%r\d+), global_smem;", ptx) if f"init.shared::cta.b64 [{r}]" in ptx}
    offset = {base: 0} | {
        r: int(by) for r, by in re.findall(rf"add\.s32 \s*(%r\d+), {base}, (\d+);", ptx)
    }  # fmt: skip
    barriers = [offset[r] for r in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)]
    block_n, stages = BLOCKS[block_m]
    assert "mbarrier.inval" not in ptx
    ring = stages * (block_m + block_n) * 64 * 2
    assert {at for at in barriers if at < ring} == {8 * stage for stage in range(stages)}
    assert sum(at < ring for at in barriers) > stages, "initialized twice: what synccheck says"


def test_a_tile_that_is_not_split_is_multiplied_twice():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    for rows, times in ((64, 2), (128, 1)):
        for loop in ("k", "tiles"):
            ptx = dump(matmul_specialized, (x, x, loop, True, rows, None, "kernel"), sm=90)["ptx"]
            assert share_of_products(ptx, rows) == times
            assert ptx.count("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group") == 2, "both store"


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("block_m", "num_warps"), [(64, 4), (128, 8)])
@pytest.mark.parametrize("descriptors", DESCRIPTORS)
def test_what_blackwell_does_with_the_request(loop, block_m, num_warps, descriptors):
    kernel = _compiled(loop, True, block_m, num_warps, descriptors, sm=100)
    if loop == "tiles" and BEFORE_3_7:
        assert kernel.error
        return
    assert verdict(kernel, num_warps).startswith("specialized: setmaxnreg")
    assert kernel.warps > num_warps
    assert kernel.found["tcgen05.mma"]
    assert (kernel.fits, kernel.spills) == (True, 0)


@pytest.mark.parametrize("sm", [90, 100, 120])
def test_without_the_request_there_is_one_role(sm):
    for loop in LOOPS:
        for rows in (64,) if sm == 120 else BLOCKS:
            kernel = _compiled(loop, False, rows, sm=sm)
            warps = 4 if rows == 64 else 8
            assert verdict(kernel, warps) == f"dropped: no setmaxnreg, {warps} warps"
            assert (kernel.error, kernel.fits, kernel.spills) == (None, True, 0)


def test_a_tile_that_does_not_fit_small_shared_memory():
    """Why matmul_specialized tells about it: 128 rows are too many for the 99 KiB of sm_120, 64 are not."""
    assert not _compiled("k", True, 128, 8, sm=120).fits
    small = _compiled("k", True, 64, 4, sm=120)
    assert small.fits
    assert verdict(small, 4).startswith("specialized")


@pytest.mark.parametrize("sm", [90, 100, 120])
def test_an_elementwise_loop_is_never_specialized(sm):
    x = torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(copy_specialized, (x,), sms=(sm,))
    assert not verdict(kernel, 4).startswith("specialized")
    if sm == 90 or BEFORE_3_7:
        assert verdict(kernel, 4) == "dropped: no setmaxnreg, 4 warps"
    else:
        assert kernel.error


def test_the_forms_of_the_lesson_are_compiled_and_recorded(h):
    """Each rule of the docstring has its form, and what is timed is what Hopper specializes."""
    facts = {}
    h.fact = facts.__setitem__
    show_code(h)
    verdicts, shares = facts.values()
    assert len(verdicts) == len(FORMS) + 2
    assert len(h.record.codegen) == len(FORMS) + 2
    assert {said.split(":")[0] for said in verdicts.values()} == set(FORMS.values())
    assert shares == {f"sm_90, {label}": 2 if rows == 64 else 1 for label, (_, rows, _) in TIMED.items()}


@pytest.mark.parametrize("changed", [("specialized", "dropped"), ("does not compile", "dropped")])
def test_a_lesson_out_of_date_is_an_error(h, monkeypatch, changed):
    expected, instead = changed
    form = next(form for form, said in FORMS.items() if said == expected and form[1] == "k")
    monkeypatch.setitem(FORMS, form, instead)
    with pytest.raises(CodegenError, match=r"matmul_specialized on sm_90, loop over k, .*; the lesson is out of date"):
        show_code(h)


def test_a_tile_that_is_split_after_all_is_an_error(h, monkeypatch):
    monkeypatch.setattr(warp_specialized_matmul, "FORMS", {})
    monkeypatch.setattr(warp_specialized_matmul, "share_of_products", lambda ptx, rows: 1.0)
    with pytest.raises(CodegenError, match=r"times that a tile is multiplied .* out of date"):
        show_code(h)


def test_under_a_sanitizer_specialized_kernels_run_and_are_not_compared(h, monkeypatch):
    """It writes to the barriers left behind: a wrong result would be the tool's. One role is held to its reference."""
    from harness.session import Harness

    x, checked = h.randn(8, 8, dtype=h.half), []
    monkeypatch.setattr(h, "check", lambda fn, *args, **kwargs: checked.append(fn(*args[1:])))
    ran = []
    for watched in (False, True):
        monkeypatch.setattr(Harness, "SANITIZED", watched)
        run_or_check(h, lambda a, b: ran.append(a @ b), x, x, "what")
        assert (len(ran), len(checked)) == (1 + watched, 1)


def test_the_demo_under_a_sanitizer(h, monkeypatch):
    """Every kernel runs; what is compared has one role."""
    from harness.session import Harness

    asked, compared = [], []
    wrapped = matmul_specialized
    monkeypatch.setattr(Harness, "SANITIZED", True)
    monkeypatch.setattr(
        warp_specialized_matmul,
        "matmul_specialized",
        lambda *args, **form: asked.append(form) or wrapped(*args, **form),
    )
    monkeypatch.setattr(h, "compare", lambda variants, *_, **__: compared.extend(variants))
    monkeypatch.setattr(warp_specialized_matmul, "compiles", lambda *_: True)
    demo(h)
    assert sum(form.get("warp_specialize", True) for form in asked) == 3 * 4 + len(TIMED)
    assert [name for name in compared if name.endswith("one role")] == [f"triton {label}, one role" for label in TIMED]
    assert not any(name.endswith("specialized") for name in compared)


def test_verdicts():
    assert verdict(Kernel("m", 90, error="no"), 4) == "does not compile: no"
    assert verdict(Kernel("m", 90, found={"setmaxnreg": 2}, warps=12), 4).startswith(
        "specialized: setmaxnreg, 12 warps"
    )
    assert verdict(Kernel("m", 90, found={"wgmma": 2}, warps=4), 4) == "dropped: no setmaxnreg, 4 warps"


@pytest.mark.parametrize(
    ("registers", "shared_kib", "warps", "programs"),
    [
        (32, 0, 4, 16),  # warps: 64 are all an SM has
        (32, 0, 8, 8),
        (128, 0, 4, 4),  # registers: 128 * 128 * 4 are all of them
        (129, 0, 4, 3),  # handed out as 136
        (255, 0, 4, 2),
        (168, 0, 12, 1),  # the specialized kernel: 64512 registers
        (64, 227, 4, 1),  # shared memory: 1 KiB more for the system
        (64, 113, 4, 2),
        (64, 114, 4, 1),
        (16, 56, 4, 4),
    ],
)
def test_programs_on_a_hopper_sm(registers, shared_kib, warps, programs):
    """Against NVIDIA's occupancy calculator for compute capability 9.0."""
    kernel = Kernel("m", 90, registers=registers, shared=shared_kib * 1024, warps=warps)
    assert programs_per_sm(kernel) == programs


def test_what_specialization_costs_on_hopper():
    """The lesson's reason: twelve warps of 168 registers fill an SM, where two programs of one role share it."""
    assert programs_per_sm(_compiled("k", True, 64, None, "host", sm=90)) == 1
    assert programs_per_sm(_compiled("k", False, 64, None, "host", sm=90)) == 2
    assert programs_per_sm(_compiled("k", True, 128, sm=90)) == programs_per_sm(_compiled("k", False, 128, sm=90)) == 1


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
        "no loop": ((a, b, "m"), ValueError, r"loop 'm' is not one of \('k', 'tiles', 'flattened tiles'\)"),
        "None for a loop": ((a, b, None), ValueError, "loop None is not one of"),
        "half specialized": ((a, b, "k", None), TypeError, "warp_specialize is None; pass True or False"),
        "rows in floats": ((a, b, "k", True, 64.0), ValueError, r"block_m 64\.0 and num_warps 4; need"),
        "half a descriptor": ((a, b, "k", True, 64, 4, "device"), ValueError, r"descriptors 'device' is not one of"),
        "32 rows": ((a, b, "k", True, 32), ValueError, "block_m 32 and num_warps 4; need 64 or 128, and 4 or 8"),
        "2 warps": ((a, b, "k", True, 64, 2), ValueError, "block_m 64 and num_warps 2"),
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
        "requires grad": ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta")), ValueError, "move them to one device"),
        "a device without kernels": ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"matmul_specialized: .*{message}"):
        matmul_specialized(*args)


def _bad_copy(device):
    x = torch.randn(4, 16, device=device).half()
    return {
        "no tensor": ([1.0], TypeError, r"expected a torch\.Tensor, got list"),
        "float32": (x.float(), TypeError, r"dtype torch\.float32 is not one of"),
        "transposed": (x.t(), ValueError, r"strides \(1, 16\); call x\.contiguous\(\) first"),
        "columns apart": (x[:, ::2], ValueError, r"strides \(16, 2\)"),
        "requires grad": (x.clone().requires_grad_(), RuntimeError, "no backward"),
        "a device without kernels": (x.to("meta"), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad_copy("cpu"))
def test_bad_input_of_the_copy(h, name):
    x, error, message = _bad_copy(h.device)[name]
    with pytest.raises(error, match=f"copy_specialized: .*{message}"):
        copy_specialized(x)
