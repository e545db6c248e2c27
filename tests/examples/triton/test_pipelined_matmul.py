"""pipelined_matmul: every count of stages at every edge, shared memory as predicted, copies in the code, bad input."""

from types import SimpleNamespace

from harness.codegen import compile_for
from harness.hardware import SHARED_LIMIT, Limits, device_limits

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.triton import pipelined_matmul
from examples.triton.pipelined_matmul import (
    BLOCK_NS,
    DTYPES,
    STAGES,
    _sm,
    matmul_each_stages,
    matmul_pipelined,
    programs_per_sm,
    reference,
    shared_bytes,
    show_gains,
    stages_that_fit,
)

# One element, a prime, one tile plus one in each dimension in turn, more steps than stages, nothing to sum, nothing.
SHAPES = [(1, 1, 1), (37, 53, 61), (129, 64, 64), (64, 257, 64), (64, 64, 65), (16, 16, 460), (5, 7, 0), (0, 5, 3)]


def fitting(h, block_n=128):
    return stages_that_fit(block_n, _sm(), device_limits(h.device).shared_bytes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_n", BLOCK_NS)
def test_shapes(h, shape, block_n):
    """Counts in turn where a GPU pipelines; the interpreter knows no stages, so one stands for all."""
    M, N, K = shape
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    for stages in fitting(h, block_n)[: 1 if h.interpreted else None : 2]:
        what = f"{M}x{N}x{K} by {block_n}, {stages} stages"
        h.check(lambda a, b, s=stages: matmul_pipelined(a, b, s, block_n), reference, a, b, terms=K, what=what)


@given(M=st.integers(0, 200), N=st.integers(0, 200), K=st.integers(0, 400), stages=st.sampled_from(STAGES[:4]))
def test_any_shape(M, N, K, stages):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    a, b = h.randn(M, K, dtype=torch.float16), h.randn(K, N, dtype=torch.float16)
    what = f"{M}x{N}x{K}, {stages} stages"
    h.check(lambda a, b: matmul_pipelined(a, b, stages), reference, a, b, terms=K, what=what)


def test_each_count_writes_all_of_its_output(h):
    a, b = h.randn(140, 130, dtype=h.half), h.randn(130, 150, dtype=h.half)
    counts = fitting(h)
    h.check(matmul_each_stages, lambda a, b: (reference(a, b),) * len(counts), a, b, terms=130)


def test_strides(h):
    a, b = h.randn(96, 160, dtype=h.half), h.randn(200, 320, dtype=h.half)
    for left, right in (
        (a.t(), b[:96, :100]),  # transposed; padded rows
        (a[:, ::2], b[:80, ::3]),  # every second, every third column: nothing that cp.async could copy
        (a[:1].expand(70, 160), b[:160]),  # a stride of 0
        (a[:, 1:], b[:159, 1:50]),  # starts that are not aligned
        (h.randn(50, 50, dtype=h.half).t(), h.randn(70, 50, dtype=h.half).t()),
    ):
        h.check(matmul_pipelined, reference, left, right, terms=left.shape[1])


def test_extremes(h):
    """Large and tiny values keep their scale; NaN and infinity reach what torch says they reach, and nothing else."""
    a, b = h.randn(40, 70, dtype=h.half), h.randn(70, 50, dtype=h.half)
    h.check(matmul_pipelined, reference, a * 64, b * 4, terms=70, what="large")
    h.check(matmul_pipelined, reference, a * 2.0**-6, b * 2.0**-4, terms=70, what="tiny")
    a[3, 5], a[7, 11], b[2, 9] = float("nan"), float("inf"), float("-inf")
    h.check(matmul_pipelined, reference, a, b, terms=70, what="NaN and infinities")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 768, 1024), (1000, 520, 777), (16, 4096, 4096), (1, 1, 50_000)])
def test_shapes_on_the_gpu(h, dtype, shape):
    M, N, K = shape
    a, b = h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype)
    for block_n in BLOCK_NS:
        for stages in fitting(h, block_n)[1::2]:
            what = f"{M}x{N}x{K} by {block_n}, {stages} stages"
            h.check(lambda a, b, s=stages, n=block_n: matmul_pipelined(a, b, s, n), reference, a, b, terms=K, what=what)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(40)
    a = torch.empty(2**31 // 64 + 64, 64, dtype=torch.bfloat16, device=h.device).normal_()
    b = h.randn(64, 64, dtype=torch.bfloat16)
    for left, right in ((a, b), (b, a.t())):
        c = matmul_pipelined(left, right)
        part = slice(-100, None)
        want = reference(left[part], right) if left is a else reference(left, right[:, part])
        got = (c[part] if left is a else c[:, part]).contiguous()
        h.check(lambda *_, got=got: got, lambda *_, want=want: want, b, terms=64, what="the last of 2**31")
        del c


@pytest.mark.gpu
def test_a_pipeline_is_faster_than_none(h):
    """A ratio within one run, with a margin: without copies ahead every step waits for memory."""
    from harness.hardware import gpu_ms

    a, b = h.randn(4096, 4096, dtype=torch.bfloat16), h.randn(4096, 4096, dtype=torch.bfloat16)
    ms = {s: min(gpu_ms(lambda s=s: matmul_pipelined(a, b, s))) for s in (1, 3)}
    assert ms[3] < 0.9 * ms[1]


@pytest.mark.gpu
def test_every_count_that_fits_runs_and_no_other(h):
    """The limit is predicted, not met: one more stage would be Triton's OutOfResources."""
    a = h.randn(256, 256, dtype=torch.bfloat16)
    for block_n in BLOCK_NS:
        for stages in STAGES:
            if stages in fitting(h, block_n):
                matmul_pipelined(a, a, stages, block_n)
            else:
                with pytest.raises(ValueError, match="bytes of shared memory"):
                    matmul_pipelined(a, a, stages, block_n)


ARCHITECTURES = {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_memory_and_copies_by_stages(sm, dtype):
    """One buffer per stage where the tensor cores read shared memory late, one fewer elsewhere, as predicted."""
    x = torch.empty(8192, 8192, dtype=dtype, device="meta")
    kernels = compile_for(matmul_each_stages, (x, x), sms=(sm,))
    counts = stages_that_fit(128, sm, SHARED_LIMIT[sm])
    assert [kernel.error for kernel in kernels] == [None] * len(counts)
    for stages, kernel in zip(counts, kernels, strict=True):
        assert kernel.shared == shared_bytes(stages, 128, sm)
        assert kernel.fits
        assert kernel.spills == 0
        assert kernel.found[ARCHITECTURES[sm]]
        # 32 KiB by 256 threads of 16 bytes: 8 copies a stage, and on sm_100 the loop's first step is apart.
        copies = 0 if stages == 1 else 8 * (stages + (sm == 100))
        assert kernel.found.get("cp.async", 0) == copies
        assert ("ld.global.v4" in kernel.found) == (stages == 1)


@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("stages", [1, 4])
def test_shared_memory_of_the_wide_tile(sm, stages):
    x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(matmul_pipelined, (x, x, stages, 256), sms=(sm,))
    assert kernel.shared == shared_bytes(stages, 256, sm)
    assert kernel.fits


@pytest.mark.parametrize(
    ("sm", "most"),
    [(80, (5, 4)), (89, (4, 3)), (90, (5, 4)), (100, (5, 4)), (120, (4, 3))],
)
def test_how_many_stages_fit(sm, most):
    assert tuple(max(stages_that_fit(n, sm, SHARED_LIMIT[sm])) for n in BLOCK_NS) == most
    assert stages_that_fit(128, sm, 1000) == ()


def test_stages_cost_the_second_program_its_place():
    """On sm_90, with the registers that the compiler uses: shared memory of 228 KiB, 65536 registers."""
    limit = SHARED_LIMIT[90]
    room = [programs_per_sm(shared_bytes(s, 128, 90), 112, limit) for s in STAGES]
    assert room == [2, 2, 2, 1, 1]
    assert programs_per_sm(shared_bytes(2, 128, 90), 64, limit) == 3  # then shared memory is what counts
    assert programs_per_sm(1024, 129, limit) == 1  # 129 registers are handed out as 136


@pytest.mark.parametrize(
    ("ms", "enough", "predicted"),
    [
        # 32 tiles an SM, 128 steps each: ms * 1e6 / 4096 ns a step. 1 stage: 700 ns, two programs: 1000 ns to wait.
        ({1: 2.8672, 2: 1.8, 3: 1.6384, 4: 1.7, 5: 1.7}, 3, "a load of 1000 ns is covered by 3 stages"),
        ({1: 1.6384, 2: 1.6384, 3: 1.6384, 4: 1.6384, 5: 1.6384}, 1, "a load of 400 ns is covered by 2 stages"),
    ],
)
def test_what_the_lesson_says_follows_from_the_times(monkeypatch, ms, enough, predicted):
    said, facts = [], {}
    h = SimpleNamespace(device=torch.device("cpu"), say=said.append, fact=facts.__setitem__)
    monkeypatch.setattr(pipelined_matmul, "device_limits", lambda device: Limits(132, SHARED_LIMIT[90]))
    show_gains(h, 8192, ms, dict(zip(STAGES, (2, 2, 2, 1, 1), strict=True)))
    assert f"2 stages are {ms[1] / ms[2]:.2f}x as fast as 1" in said[0]
    assert f"5 stages are {ms[4] / ms[5]:.2f}x as fast as 4" in said[0]
    assert said[1].startswith(f"more than {enough} gain less than 2 %; {predicted} in SM steps of 400 ns")
    assert said[1].endswith("leaves 1 of 2 programs on an SM")
    (fact,) = facts.values()
    assert fact["ns per step of an SM"][0] == round(ms[1] * 1e6 / 4096)


def test_a_pipeline_that_does_not_fit(h, monkeypatch):
    a = h.randn(4, 4, dtype=h.half)
    monkeypatch.setattr(pipelined_matmul, "device_limits", lambda device: Limits(132, SHARED_LIMIT[90]))
    monkeypatch.setattr(pipelined_matmul, "_sm", lambda: 90)
    message = r"matmul_pipelined: 5 stages of 128x256x64 tiles need 245760 bytes .* have 232448 here; .*\(1, 2, 3, 4\)"
    with pytest.raises(ValueError, match=message):
        matmul_pipelined(a, a, 5, block_n=256)


def _bad(device):
    a = torch.randn(4, 8, dtype=torch.float16, device=device)
    b = torch.randn(8, 5, dtype=torch.float16, device=device)
    return {
        "no tensor": (([1.0], b), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((a.int(), b.int()), TypeError, r"torch\.int32"),
        "float32": ((a.float(), b.float()), TypeError, r"torch\.float32"),
        "two dtypes": ((a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        "a vector": ((a, b[:, 0]), ValueError, r"shapes \(4, 8\) and \(8,\); need \[M, K\] and \[K, N\]"),
        "a batch": ((a.reshape(1, 4, 8), b.reshape(1, 8, 5)), ValueError, "need"),
        "inner sizes": ((a, b.t()), ValueError, r"shapes \(4, 8\) and \(5, 8\)"),
        "no stages": ((a, b, 0), ValueError, r"num_stages is 0; take one of \(1, 2, 3, 4, 5\)"),
        "six stages": ((a, b, 6), ValueError, "num_stages is 6"),
        "half a stage": ((a, b, 2.5), ValueError, r"num_stages is 2\.5"),
        "a whole number that is no int": ((a, b, 2.0), ValueError, r"num_stages is 2\.0"),
        "a block in floats": ((a, b, 3, 128.0), ValueError, r"block_n is 128\.0; take one of"),
        "true": ((a, b, True), ValueError, "num_stages is True"),
        "stages in words": ((a, b, "3"), ValueError, "num_stages is '3'"),
        "another tile": ((a, b, 3, 64), ValueError, r"block_n is 64; take one of \(128, 256\)"),
        "requires grad": ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta")), ValueError, "move them to one device"),
        "a device without kernels": ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"matmul_pipelined: .*{message}"):
        matmul_pipelined(*args)
