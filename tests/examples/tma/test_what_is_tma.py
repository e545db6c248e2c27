"""what_is_tma: every form computes the same bits; which of them is TMA is in the generated code, and is required."""

import functools

from harness.codegen import CodegenError, compile_for, dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.tma import what_is_tma
from examples.tma.what_is_tma import (
    BLOCK_BYTES,
    BLOCK_M,
    DTYPES,
    EVICTIONS,
    FORMS,
    LARGEST,
    demo,
    machine_code,
    reference,
    references,
    scale_descriptors,
    scale_descriptors_ahead,
    scale_each,
    scale_pointers,
    scale_pointers_ahead,
    show_code,
    telling_lines,
)

BUDGET = {"terms": 0, "roundings": 1}
SHAPES = [(0, 5), (5, 0), (1, 1), (1, 700), (131, 1), (BLOCK_M + 1, 129), (2 * BLOCK_M, 256), (67, 389)]
GPU_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def quiet():
    from harness.catalog import Needs
    from harness.session import Harness

    from rich.console import Console

    return Harness("test", Needs.parse("triton"), console=Console(quiet=True))


def rows_apart(h, M, N, dtype=torch.float32):
    """[M, N] in rows whose stride is a multiple of 16 bytes and more than N: what a descriptor can describe."""
    step = 16 // dtype.itemsize
    return h.randn(M, (N // step + 2) * step, dtype=dtype)[:, :N]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_every_form(h, shape, dtype):
    h.check(scale_each, references, rows_apart(h, *shape, dtype), -1.7, what="every form", **BUDGET)


@given(M=st.integers(0, 150), N=st.integers(0, 300), factor=st.integers(-400, 400).map(lambda k: k / 8))
def test_any_shape_and_factor(M, N, factor):
    h = quiet()
    x = rows_apart(h, M, N, h.half)
    h.check(scale_each, references, x, factor, what=f"{M}x{N}", constant_ok=factor == 0, **BUDGET)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_hint_changes_no_value(h, eviction):
    x = rows_apart(h, 70, 301)
    assert torch.equal(scale_pointers(x, 3.25, eviction), scale_pointers(x, 3.25))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages(h, stages):
    x = rows_apart(h, 400, 140, h.half)  # more tiles than a few programs of the interpreter's four SMs take at once
    for fn in (scale_pointers_ahead, scale_descriptors_ahead):
        h.check(functools.partial(fn, num_stages=stages), reference, x, 2.5, what=fn.__name__, **BUDGET)


def test_nan_and_infinities(h):
    x = rows_apart(h, 66, 130)
    x[0, 0], x[65, 129], x[3, 7], x[4, 8] = float("nan"), float("inf"), -float("inf"), -0.0
    want = x * -2.0
    for y in scale_each(x, -2):
        assert torch.equal(y.isnan(), want.isnan())
        assert torch.equal(y.nan_to_num(7), want.nan_to_num(7))


def test_pointers_take_what_a_descriptor_cannot(h):
    x = h.randn(40, 77)[:, 1:]  # a start and a row stride of 4 and 308 bytes
    for fn in (scale_pointers, scale_pointers_ahead):
        h.check(fn, reference, x, 1.5, **BUDGET)
    for fn in (scale_descriptors, scale_descriptors_ahead):
        with pytest.raises(ValueError, match=f"{fn.__name__}: x has .* starts 4 bytes past a multiple of 16"):
            fn(x, 1.5)


def _bad(device):
    x = torch.randn(4, 8, device=device)
    return {
        "a list": (scale_pointers, ([1.0], 2.0), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": (scale_descriptors, (x.int(), 2.0), TypeError, r"torch\.int32 is not one of"),
        "float64": (scale_pointers_ahead, (x.double(), 2.0), TypeError, r"torch\.float64 is not one of"),
        "a tensor as factor": (scale_descriptors, (x, x[0, 0]), TypeError, "factor is a Tensor; pass a Python number"),
        "a bool as factor": (scale_pointers, (x, True), TypeError, "factor is a bool"),
        "a vector": (scale_descriptors_ahead, (x[0], 2.0), ValueError, r"got shape \(8,\); call x\.reshape"),
        "columns apart": (scale_pointers, (x.t(), 2.0), ValueError, r"strides \(1, 8\); .*x\.contiguous\(\) first"),
        "columns apart, TMA": (scale_descriptors, (x.t(), 2.0), ValueError, r"strides \(1, 8\)"),
        "a stride of 0": (scale_descriptors, (x[:1].expand(4, 8), 2.0), ValueError, "x has .*16-byte multiples"),
        "a start between": (scale_descriptors, (x[:, 1:], 2.0), ValueError, "starts 4 bytes past"),
        "a hint there is not": (scale_pointers, (x, 2.0, "tma"), ValueError, "eviction is 'tma'; take one of"),
        "no hint": (scale_pointers, (x, 2.0, None), ValueError, "eviction is None"),
        "no stage": (scale_pointers_ahead, (x, 2.0, 0), ValueError, "num_stages is 0; pass an int from 1 to 4"),
        "a true stage": (scale_descriptors_ahead, (x, 2.0, True), ValueError, "num_stages is True"),
        "half a stage": (scale_descriptors_ahead, (x, 2.0, 1.5), ValueError, r"num_stages is 1\.5"),
        "too many rows": (scale_descriptors, (x[:1].expand(LARGEST, 8), 2.0), ValueError, f"below {LARGEST}, split"),
        "requires grad": (scale_descriptors, (x.clone().requires_grad_(), 2.0), RuntimeError, "no backward"),
        "a device without kernels": (scale_pointers, (x.to("meta"), 2.0), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    wrapper, args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"{wrapper.__name__}: .*{message}"):
        wrapper(*args)


def compiled(wrapper, *args, sm):
    (kernel,) = compile_for(wrapper, args, sms=(sm,))
    assert kernel.error is None
    assert kernel.spills == 0
    assert kernel.fits
    return kernel


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", DTYPES)
def test_which_form_is_tma(sm, dtype):
    x = torch.empty(4096, 4096, dtype=dtype, device="meta")
    tile = BLOCK_M * BLOCK_BYTES
    for eviction in EVICTIONS:
        kernel = compiled(scale_pointers, x, 2.5, eviction, sm=sm)
        assert kernel.found == {"ld.global.v4": 8, "st.global.v4": 8}
        assert kernel.shared == 0
    kernel = compiled(scale_pointers_ahead, x, 2.5, sm=sm)
    assert kernel.found["cp.async"]
    assert "cp.async.bulk.tensor" not in kernel.found
    assert kernel.shared == 3 * tile
    kernel = compiled(scale_descriptors, x, 2.5, sm=sm)
    if sm < 90:
        assert not {"cp.async.bulk.tensor", "mbarrier"} & set(kernel.found)
        assert kernel.shared == 0
    else:
        assert kernel.found["cp.async.bulk.tensor"] == 2
        assert tile < kernel.shared <= tile + 64
        assert compiled(scale_descriptors_ahead, x, 2.5, sm=sm).found["cp.async.bulk.tensor"] > 2


def test_the_barrier_waits_for_the_bytes_of_the_tile():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    (line,) = (line for line in telling_lines(dump(scale_descriptors, (x, 2.0), sm=90)["ptx"]) if "expect_tx" in line)
    assert line.endswith(f", {BLOCK_M * BLOCK_BYTES}")


def test_telling_lines_and_machine_code():
    ptx = "\t@%p1 ld.global.v4.b32 { %r1 }, [ %rd1 ];\n\t@!%p2 ld.global.v4.b32 { %r2 }, [%rd2];\n\tadd.s32 %r1, 1;\n"
    assert telling_lines(ptx + "\tcp.async.commit_group; // note") == {
        "@%p1 ld.global.v4.b32 { %r1 }, [ %rd1 ]": 2, "cp.async.commit_group": 1,
    }  # fmt: skip
    sass = (
        "Function:k\n--:-:1:-:8\tLDC R1, c[0x0];\n--:-:-:-:1\t@!P1 LDG.E.128 R4, desc[UR4];\nLBB0:\n--:-:-:-:0\tNOP;\n"
    )
    assert machine_code(sass + "--:-:-:-:5\t@P0 EXIT;\n") == {"LDC": 1, "LDG.E.128": 1, "EXIT": 1}


def test_a_form_that_is_not_what_it_says_fails_the_demo(h, monkeypatch):
    hint = FORMS["evict_last"][0]
    for claim in [("cp.async.bulk.tensor", "UTMALDG"), ("ld.global", "UTMALDG"), ("cp.async.bulk.tensor", "LDG")]:
        monkeypatch.setattr(what_is_tma, "FORMS", {"evict_last": (hint, *claim)})
        with pytest.raises(CodegenError, match="evict_last on sm_90: expected"):
            show_code(h)


def test_the_demo_and_what_it_finds(h):
    demo(h)
    rows = h.record.facts["machine code of each form: a thread's instructions, a loop's counted once"]
    assert [name for name, row in rows.items() if any("UTMALDG" in load for load in row["loads"])] == [
        "descriptor, sm_90", "descriptor, ahead, sm_90",
    ]  # fmt: skip
    (table,) = h.record.comparisons  # whose best row may only be TMA's
    assert [row["variant"] for row in table["rows"] if row["ours"] and not row["comparator"]] == [
        "triton descriptor", "triton descriptor, ahead",
    ]  # fmt: skip
    pointers, one = rows["pointers, sm_90"], rows["descriptor, sm_90"]
    assert one["integer"] < pointers["integer"]
    assert one["registers"] < pointers["registers"]
    assert pointers["shared bytes"] == 0 < one["shared bytes"]
    assert all(row["instructions"] > row["integer"] > 0 for row in rows.values())
    assert any("cp.async.bulk.tensor" in line for line in h.record.facts["PTX of descriptor, sm_90"])
    assert not any("cp.async" in line or "mbarrier" in line for line in h.record.facts["PTX of evict_last, sm_90"])
    assert [kernel["sm"] for kernel in h.record.codegen] == [80, 89, 90, 100, 120]
    assert all(check["passed"] for check in h.record.checks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_matrices_and_the_same_bits_each_time(h, dtype):
    x = rows_apart(h, 5000, 8191, dtype)
    want = torch.mul(x, 1.5)
    for _ in range(3):
        for y in scale_each(x, 1.5):
            assert torch.equal(y, want)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(20)
    x = torch.empty(2**31 // 8192 + 65, 8192, dtype=torch.bfloat16, device=h.device).normal_()
    want = torch.mul(x, 2.0)
    for fn, _, _ in FORMS.values():
        assert torch.equal(fn(x, 2.0), want)
