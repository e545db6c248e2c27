"""tma_persistent_matmul: every schedule, both layouts of b, the rule, what is prepared, the code."""

import functools
import math
import re
from types import SimpleNamespace

from harness.codegen import dump

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT
from examples.tma import tma_persistent_matmul as lesson
from examples.tma import tma_persistent_matmul_schedules as schedules
from examples.tma.tma_persistent_matmul import matmul_tma_persistent, prepare_matmul, reference
from examples.tma.tma_persistent_matmul_schedules import ONE_WAVE, PAIR_K, SCHEDULES, TILES, plan, runnable
from tests.examples.tma.helpers import check_tall_and_wide, odd_operands, pretend
from tests.examples.triton.helpers import code, harness, meta, refused

LATE_K = schedules.PARTS["late"] * TILES[0][2] + 8  # the least K that schedule late takes
CPU = torch.device("cpu")


def check(h, a, b, schedule=None, what=None):
    what = what or f"{schedule} {tuple(a.shape)} {tuple(b.shape)}"
    fn = functools.partial(matmul_tma_persistent, schedule=schedule)
    h.check(fn, reference, a, b, terms=a.shape[1], what=what)


def operands(h, M, N, K, columns=False, dtype=None):
    a = h.randn(M, K, dtype=dtype or h.half)
    return a, h.randn(N, K, dtype=a.dtype).t() if columns else h.randn(K, N, dtype=a.dtype)


def test_every_tile_is_taken_once(h, monkeypatch):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles. The least K of
    late is one step more than there are parts."""
    if not h.interpreted:
        pytest.skip("SMs are real here")
    for schedule, sms in [("tile", 1), ("pair", 4), ("whole", 1000), ("split", 4), ("late", 1), ("late", 4)]:
        pretend(monkeypatch, [schedules], sms)
        check(h, *operands(h, 300, 520, LATE_K, columns=sms == 4), schedule)


@given(
    M=st.integers(0, 200), N=st.integers(0, 40), K=st.integers(0, 40), columns=st.booleans(),
    schedule=st.sampled_from([None, *SCHEDULES]),
)  # fmt: skip
def test_any_shape(M, N, K, columns, schedule):
    h = harness()
    a, b = operands(h, M, 8 * N, 8 * K, columns, torch.float16)
    if schedule == "late" and 0 < 8 * K < LATE_K and M and N:
        with pytest.raises(ValueError, match="schedule 'late' needs K above 256"):
            matmul_tma_persistent(a, b, schedule=schedule)
    else:
        check(h, a, b, schedule)


def test_layouts_and_extremes(h):
    b = h.randn(200, 320, dtype=h.half)
    check(h, h.randn(140, 160, dtype=h.half)[:, 8:80], b[:72, :104])  # rows of b apart, too
    for x, w in odd_operands(h):
        for right in (w.t(), w.t().contiguous()):
            check(h, x, right, what=f"strides {x.stride()}, {right.stride()}")
            if x.shape[1] >= LATE_K:
                check(h, x, right, "late", "NaN and infinities")


@pytest.mark.parametrize(("schedule", "columns"), [("tile", False), ("split", True), ("late", False)])
def test_prepared(h, schedule, columns):
    """It computes from what a and b hold when it is called, into the memory it was given."""
    a, b = operands(h, 130, 264, LATE_K, columns)
    out = torch.full((130, 264), math.nan, dtype=a.dtype, device=a.device)
    call = prepare_matmul(a, b, out, schedule)
    assert out.isnan().all(), "preparing computes nothing"
    for _ in range(2):
        h.check(lambda *_: call(), reference, a, b, terms=LATE_K, what=f"prepared {schedule}", poison=False)
        assert call().data_ptr() == out.data_ptr()
        a.mul_(0.5)
        b[:, 3] = 2.0
    expected = call().clone()
    assert torch.equal(matmul_tma_persistent(a, b, out.fill_(math.nan), schedule), expected)
    assert torch.equal(out, expected)
    assert torch.equal(prepare_matmul(a[:, :0], b[:0], out)(), torch.zeros_like(out))
    assert prepare_matmul(a[:0], b)().shape == (0, 264)


def test_prepared_for_another_device(monkeypatch):
    """Where there are not two GPUs, or none: what is prepared only says that it is on the second."""
    out = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), zero_=lambda: None)
    monkeypatch.setattr(lesson, "launch_of", lambda *_: (out, None))
    call = prepare_matmul(None, None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert call() is out
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError, match=r"are on cuda:1, .* is cuda:0; call it within torch\.cuda\.device\(1\)"):
        call()


# What was fastest of the rule's choices in a sweep on an H200; then a full wave of each tile, and a column or row more.
WAVE = 128 * 132
RULE = {
    (1024, 1024, 1024): ("tile", 64, 6), (128, 4096, 4096): ("tile", 64, 6), (2048, 2048, 512): ("pair", 128, 3),
    (2560, 1664, 4096): ("pair", 128, 3), (2048, 2048, 2048): ("split", 256, 4), (1024, 4096, 4096): ("split", 256, 4),
    (2048, 4096, 2048): ("late", 256, 4), (8192, 28672, 8192): ("late", 256, 4), (1, 8, 8): ("tile", 64, 6),
    (WAVE, 64, 4096): ("tile", 64, 6), (WAVE, 72, 4096): ("tile", 128, 5), (WAVE + 1, 64, 4096): ("pair", 128, 3),
    (WAVE, 256, PAIR_K): ("pair", 128, 3), (WAVE, 256, PAIR_K + 8): ("split", 256, 4),
    (WAVE + 1, 256, PAIR_K): ("late", 256, 4), (2 * WAVE, 128, PAIR_K + 8): ("pair", 128, 3),
    (2 * WAVE + 1, 128, PAIR_K + 8): ("late", 256, 4), (4096, 4096, LATE_K): ("late", 256, 4),
    (4096, 4096, LATE_K - 8): ("split", 256, 4),
}  # fmt: skip


def test_the_rule(h, monkeypatch):
    """What a part of a tile leaves of shared memory pays for a fourth stage, and what does not fit is passed over."""
    pretend(monkeypatch, [schedules], 132)
    for shape, expected in RULE.items():
        p = plan(*shape, CPU)
        assert (p.schedule, p.block_n, p.stages) == expected, shape
        tiles = triton.cdiv(shape[0], p.block_m) * triton.cdiv(shape[1], p.block_n)
        assert p.programs == (tiles if expected[0] in ("tile", "pair") else min(132, tiles))
    stages = {schedule: plan(4096, 4096, 4096, CPU, schedule).stages for schedule in SCHEDULES}
    assert stages == {"tile": 4, "pair": 3, "whole": 3, "split": 4, "late": 4}
    assert runnable(CPU) == SCHEDULES
    for shared_bytes, tile in [(128 * 1024, TILES[1][:4]), (160 * 1024, ONE_WAVE[0][1][:4])]:
        pretend(monkeypatch, [schedules], 132, shared_bytes=shared_bytes)
        assert plan(1024, 1024, 1024, CPU)[1:5] == tile
    pretend(monkeypatch, [schedules], 4, sm=120)
    assert plan(8192, 8192, 8192, CPU).schedule == "split", "late is for accumulators in registers"
    assert runnable(CPU) == ("tile", "whole", "split"), "no room for two programs, and no late"
    if h.interpreted:
        check(h, *operands(h, 200, 264, 72))
    pretend(monkeypatch, [schedules], 40, shared_bytes=64 * 1024)
    few = operands(h, 200, 200, 200)
    refused(matmul_tma_persistent, RuntimeError, "no tile fits the 65536 bytes of shared memory", *few)


def test_bad_input(h, monkeypatch):
    """What this wrapper alone refuses, and one case of each check that matmuls share (tests/examples/common)."""
    memory = h.randn(400, dtype=h.half)
    a, b = memory[:64].view(4, 16), memory[64:192].view(16, 8)
    for fn in (matmul_tma_persistent, prepare_matmul):
        for args, message in (
            ((a, b, None, "faster"), r"schedule 'faster' is not one of \(None, 'tile', "),
            ((a, b, None, "late"), "'late' needs K above 256, got 16, .* take 'split'"),
            ((a, b, a[:, :8]), "out is .* strides"),
            ((a, b, memory[184:216].view(4, 8)), "out lies over b, .*its own"),
            ((a[:, :12], b[:12]), "K is 12"),
        ):
            refused(fn, ValueError, message, *args)
    pretend(monkeypatch, [schedules], 132, sm=100)
    late = operands(h, 8, 8, LATE_K)
    refused(matmul_tma_persistent, ValueError, r"'late' needs .* an sm_90; take 'split'", *late, schedule="late")


def test_generated_code(monkeypatch):
    """It fits, spills nothing, and is what was planned, for an H200's 132 SMs."""
    x = meta(8192, 8192)
    # Late: in the loop one step is always running (wait for all but one); two more waits end a tile and the kernel.
    ptx = dump(matmul_tma_persistent, (x, x), sm=90)["ptx"]
    assert sorted(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+);", ptx)) == ["0", "0", "1"]
    for sm, schedule, core in [(90, "pair", "wgmma"), (120, "whole", "mma.sync")]:
        pretend(monkeypatch, [schedules], 132, sm)
        p = plan(8192, 8192, 8192, CPU, schedule)
        kernel = code(sm, f"cp.async.bulk.tensor mbarrier {core}", matmul_tma_persistent, x, x.t(), schedule=schedule)
        assert kernel.warps == p.warps
        assert (schedule == "pair") == (kernel.kernel == "matmul_tile_kernel")
        # What the wrapper reckons with is enough, and on Hopper what a program holds, but a few barriers.
        reckoned = schedules.shared_bytes(p.block_m, p.block_n, p.block_k, 2, p.stages, p.schedule)
        assert kernel.shared <= reckoned <= kernel.shared_limit == SHARED_LIMIT[sm]
        if sm == 90:  # all programs that are to share an SM find registers, by eights, and shared memory there
            assert reckoned - kernel.shared < 256
            together = schedules.PER_SM[p.schedule]
            assert together * 32 * kernel.warps * triton.cdiv(kernel.registers, 8) * 8 <= 65536
            assert together * (kernel.shared + 1024) <= SHARED_LIMIT[sm] + 1024


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(60)
    for schedule in {"tile", "split", "late"} & set(runnable(h.device)):
        fn = functools.partial(matmul_tma_persistent, schedule=schedule)
        check_tall_and_wide(h, lambda x, w, fn=fn: fn(x, w.t()), LATE_K if schedule == "late" else 64)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [False, True])
def test_on_the_gpu(h, columns):
    """Real sizes; the same tile and the same order of additions: only when things happen differs between schedules and
    from launch to launch, so not a bit of the result may; on the stream of its caller, and in a graph."""
    every = (None, *runnable(h.device))
    for dtype in schedules.DTYPES:
        for shape in [(4096, 4096, 4096), (1000, 5208, 776), (16, 8192, 4096), (8191, 264, 512), (1000, 2040, 776)]:
            for schedule in every:
                check(h, *operands(h, *shape, columns, dtype), schedule)
    a, b = operands(h, 4000, 5000, 1000, columns, torch.bfloat16)
    first = matmul_tma_persistent(a, b, schedule="tile")
    calls = [lambda s=s: matmul_tma_persistent(a, b, schedule=s) for s in every]
    calls += [prepare_matmul(a, b, schedule=s) for s in every]
    assert all(torch.equal(first, call()) for call in calls for _ in range(10))
    call, side = prepare_matmul(a, b), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = call().clone()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, first)
    if torch.cuda.device_count() > 1:
        with torch.cuda.device(1), pytest.raises(RuntimeError, match="call it within"):
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    a.mul_(2)
    graph.replay()
    assert torch.equal(out, matmul_tma_persistent(a, b))
