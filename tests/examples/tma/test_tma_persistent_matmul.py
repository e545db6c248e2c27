"""tma_persistent_matmul: schedules at every edge, both layouts, the rule, descriptors, what is prepared, the code."""

import contextvars
import math
import re
from types import SimpleNamespace

from harness.codegen import compile_for, dump
from harness.hardware import SHARED_LIMIT, Limits

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.tma import tma_persistent_matmul as technique
from examples.tma.tma_persistent_matmul import (
    BANDS,
    DESCRIPTORS,
    DTYPES,
    FEW_TILES,
    LAYERS,
    ONE_WAVE,
    PAIR,
    PAIR_K,
    PARTS,
    PER_SM,
    SCHEDULES,
    SQUARES,
    TILES,
    matmul_tma_persistent,
    plan,
    prepare_matmul,
    record,
    reference,
    runnable,
    shared_bytes,
)

LATE_K = PARTS["late"] * TILES[0][2] + 8  # the least K that schedule late takes


def check(h, a, b, schedule=None, what=None, **options):
    what = what or f"{schedule} {tuple(a.shape)} {tuple(b.shape)} {options}"
    fn = lambda a, b: matmul_tma_persistent(a, b, schedule=schedule, **options)  # noqa: E731
    h.check(fn, reference, a, b, terms=a.shape[1], what=what)


def operands(h, M, N, K, columns=False, dtype=None):
    a = h.randn(M, K, dtype=dtype or h.half)
    return a, h.randn(N, K, dtype=a.dtype).t() if columns else h.randn(K, N, dtype=a.dtype)


@pytest.fixture
def gpu_of(monkeypatch):
    """Let the wrapper believe in another GPU: so many SMs, so much shared memory (the interpreter has no limit)."""

    def pretend(sms, sm=90):
        monkeypatch.setattr(technique, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[sm]))
        monkeypatch.setattr(technique, "on_hopper", lambda: sm == 90)

    return pretend


# One row, primes, one tile and one more in each dimension, parts of a tile and 8 more columns, nothing to sum, nothing.
SHAPES = [(1, 8, 8), (37, 56, 104), (128, 256, 64), (129, 8, 64), (1, 264, 64), (1, 8, 72), (5, 64, 8), (5, 136, 8),
          (5, 16, 0), (0, 16, 8), (5, 0, 8)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", [False, True], ids=["b", "b.t()"])
def test_shapes(h, shape, columns):
    a, b = operands(h, *shape, columns)
    for schedule in (None, "split"):
        check(h, a, b, schedule)


@pytest.mark.parametrize("shape", [(1, 8), (129, 264), (128, 512)])
@pytest.mark.parametrize("K", [LATE_K, 328])
def test_shapes_of_late(h, shape, K):
    """From the first step that comes after the last part: one step more than parts."""
    for columns in (False, True):
        check(h, *operands(h, *shape, K, columns), "late")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sms", [1, 4, 1000])
def test_every_tile_is_taken_once(h, schedule, sms, gpu_of):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles."""
    if not h.interpreted:
        pytest.skip("the number of SMs is real here")
    gpu_of(sms)
    check(h, *operands(h, 300, 520, LATE_K), schedule)


@pytest.mark.parametrize("band", [1, 2, 5, 100])
@pytest.mark.parametrize("schedule", [None, "split"])
def test_bands_of_tiles(h, band, schedule):
    """Bands of one row, a last band that is not full, one band that holds all."""
    check(h, *operands(h, 2 * TILES[0][0] + 1, 2 * TILES[0][1] + 8, 8), schedule, band=band)


# At the interpreter's four SMs one wave of each tile of ONE_WAVE, and of the larger ones, with tails; twice pair, whose
# K decides whether the larger ones are taken where they are one wave too. Then two waves.
ON_FOUR_SMS = [
    ((129, 72, 72), ONE_WAVE[0]), ((1, 256, 520), ONE_WAVE[0]), ((129, 200, 72), ONE_WAVE[1]),
    ((257, 256, 328), ("pair", PAIR)), ((129, 392, 520), ("pair", PAIR)), ((257, 272, 1032), ("late", TILES[0])),
    ((129, 392, 1032), ("split", TILES[0])), ((257, 136, 1032), ("split", TILES[0])),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "expected"), ON_FOUR_SMS, ids=lambda x: "x".join(map(str, x)))
@pytest.mark.parametrize("columns", [False, True], ids=["b", "b.t()"])
def test_each_tile_of_the_rule(h, shape, expected, columns):
    if h.interpreted:
        p = plan(*shape, h.device)
        assert (p.schedule, p[1:5]) == (expected[0], expected[1][:4])
    check(h, *operands(h, *shape, columns))


@given(
    M=st.integers(0, 200), N=st.integers(0, 40), K=st.integers(0, 40), columns=st.booleans(),
    schedule=st.sampled_from([None, *SCHEDULES]), band=st.sampled_from([None, 1, 3]),
)  # fmt: skip
def test_any_shape(M, N, K, columns, schedule, band):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    a, b = operands(h, M, 8 * N, 8 * K, columns, torch.float16)
    if schedule == "late" and 0 < 8 * K < LATE_K and M and N:
        with pytest.raises(ValueError, match="schedule 'late' needs K above 256"):
            matmul_tma_persistent(a, b, schedule=schedule)
    else:
        check(h, a, b, schedule, band=band)


@pytest.mark.parametrize("schedule", [None, "split"])
def test_layouts(h, schedule):
    a, b, w = (h.randn(*shape, dtype=h.half) for shape in ((140, 160), (200, 320), (110, 320)))
    for left, right in (
        (a, b[:160, :104]),  # rows apart: what lies between them must not be summed
        (a[:, 8:80], b[:72]),  # a start 16 bytes later
        (a[::3, :72], b[:144:2, 16:]),  # every third, every second row
        (a[:1, :72].as_strided((1, 72), (5, 1)), b[:72, :40]),  # one row, with a stride nobody steps by
        (a, w[:104, :160].t()),  # the same for b's columns
        (a[:, 8:80], w[:96:2, 16:88].t()),
        (a[:, :72], w[:8, :72].t()[:, :8]),
    ):
        check(h, left, right, schedule, what=f"strides {left.stride()}, {right.stride()}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_extremes(h, schedule):
    """NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile."""
    a, b = operands(h, 130, 264, LATE_K)
    check(h, a * 2.0**-12, b * 2.0**-6, schedule, "tiny")
    a[3, 5], a[129, 71], b[2, 9], b[71, 263], b[7, 130] = (float(x) for x in ("nan", "inf", "-inf", "inf", "nan"))
    check(h, a, b, schedule, "NaN and infinities")
    a, b = operands(h, 20, 40, LATE_K, dtype=torch.float16)
    check(h, a * 100, b * 100, schedule, "beyond the range of float16, in part")


@pytest.mark.parametrize("schedule", ["whole", "split"])
@pytest.mark.parametrize("where", DESCRIPTORS)
def test_descriptors(h, schedule, where):
    for columns in (False, True):
        check(h, *operands(h, 257, 264, 72, columns), schedule, descriptors=where)
    a = h.randn(1, 200, dtype=h.half)[:, :72].as_strided((1, 72), (5, 1))
    check(h, a, h.randn(72, 48, dtype=h.half)[:, :40], schedule, descriptors=where)


@pytest.mark.parametrize("where", DESCRIPTORS[1:])
def test_the_allocator_is_left_as_found(h, where):
    from triton.runtime._allocation import _allocator

    mine = lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=h.device)  # noqa: E731

    def outer():
        triton.set_allocator(mine)
        check(h, *operands(h, 130, 264, 72), "split", descriptors=where)
        return _allocator.get()

    before = _allocator.get()
    assert contextvars.copy_context().run(outer) is mine
    check(h, *operands(h, 130, 264, 72), "split", descriptors=where)
    assert _allocator.get() is before


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.parametrize("columns", [False, True], ids=["b", "b.t()"])
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
    assert torch.equal(call(), matmul_tma_persistent(a, b, schedule=schedule))


def test_prepared_for_nothing(h):
    a, b = operands(h, 5, 16, 0)
    out = torch.full((5, 16), math.nan, dtype=a.dtype, device=a.device)
    assert prepare_matmul(a, b, out)() is out
    assert (out == 0).all()
    assert prepare_matmul(*operands(h, 0, 16, 8))().shape == (0, 16)


def test_out(h):
    a, b = operands(h, 130, 264, 72)
    out = a.new_full((130, 264), math.nan)
    assert matmul_tma_persistent(a, b, out) is out
    assert torch.equal(out, matmul_tma_persistent(a, b))


def test_a_gpu_with_less_shared_memory_takes_the_second_tile(h, gpu_of):
    if not h.interpreted:
        pytest.skip("shared memory is real here")
    gpu_of(4, sm=120)
    assert plan(200, 264, 72, h.device)[1:4] == TILES[1][:3]
    assert runnable(h) == ("tile", "whole", "split"), "no room for two programs, and no late"
    for schedule in (None, *runnable(h)):
        check(h, *operands(h, 200, 264, 72), schedule)
    with pytest.raises(RuntimeError, match="no tile fits the 101376 bytes of shared memory"):
        plan(200, 264, 72, h.device, "pair")


def test_a_gpu_without_room_for_any_tile(h, monkeypatch):
    monkeypatch.setattr(technique, "device_limits", lambda device: Limits(40, 64 * 1024))
    a = h.randn(200, 200, dtype=h.half)
    with pytest.raises(RuntimeError, match="matmul_tma_persistent: no tile fits the 65536 bytes of shared memory of"):
        matmul_tma_persistent(a, a, schedule="split")


# What was fastest of the rule's choices in a sweep on an H200; at 128x4096x4096 128x64 was not timed, and 128x128, one
# on an SM, was ahead of the larger ones.
SWEPT = {
    (1024, 1024, 1024): ("tile", 128, 64, 6), (128, 4096, 4096): ("tile", 128, 64, 6),
    (2048, 2048, 512): ("pair", 128, 128, 3), (2560, 1664, 4096): ("pair", 128, 128, 3),
    (2048, 2048, 2048): ("split", 128, 256, 4), (2048, 2048, 8192): ("split", 128, 256, 4),
    (2048, 2048, 32768): ("split", 128, 256, 4), (1536, 2816, 4096): ("split", 128, 256, 4),
    (1024, 4096, 4096): ("split", 128, 256, 4), (2048, 4096, 2048): ("late", 128, 256, 4),
    (3072, 3072, 3072): ("late", 128, 256, 4), (4096, 4096, 4096): ("late", 128, 256, 4),
}  # fmt: skip


def test_the_rule(gpu_of):
    cpu = torch.device("cpu")
    gpu_of(132)
    for shape, expected in SWEPT.items():
        p = plan(*shape, cpu)
        assert (p.schedule, p.block_m, p.block_n, p.stages) == expected, shape
        tiles = triton.cdiv(shape[0], p.block_m) * triton.cdiv(shape[1], p.block_n)
        assert p.programs == (tiles if expected[0] in ("tile", "pair") else min(132, tiles))
        assert (p.block_k, p.warps) == (64, 8 if p.block_n == 256 else 4)
    for M, N, K in SQUARES + LAYERS:
        p = plan(M, N, K, cpu)
        assert (p.schedule, p.stages) == ("split" if M == N == 2048 else "late", 4)
        assert p.programs == min(132, triton.cdiv(M, 128) * triton.cdiv(N, 256))
        assert p[1:5] == TILES[0][:4]
        assert p.band == BANDS[p.schedule] == 8
        assert plan(M, N, K, cpu, band=5).band == 5
    assert {plan(*shape, cpu).schedule for shape in FEW_TILES} == {"tile", "pair"}
    assert plan(1, 8, 8, cpu).block_n == 64
    assert plan(4096, 4096, LATE_K - 8, cpu).schedule == "split", "no more steps than parts"
    assert plan(4096, 4096, LATE_K, cpu).schedule == "late"
    # The lesson: what a part of a tile leaves pays for a fourth stage.
    stages = {schedule: plan(4096, 4096, 4096, cpu, schedule).stages for schedule in SCHEDULES}
    assert stages == {"tile": 4, "pair": 3, "whole": 3, "split": 4, "late": 4}
    assert runnable(SimpleNamespace(device=cpu)) == SCHEDULES
    assert plan(4096, 4096, 4096, cpu, "whole", 3)[::6] == ("whole", 3)
    for sm in (80, 100, 120):
        gpu_of(132, sm)
        assert plan(8192, 8192, 8192, cpu).schedule == "split", "late is for accumulators in registers"
        assert plan(2048, 2048, 2048, cpu).schedule == "split"


def test_one_wave_to_the_last_tile(gpu_of):
    """A full wave of each tile, then a column or a row more."""
    cpu = torch.device("cpu")
    gpu_of(132)
    for rows, cols, K, expected in [
        (128 * 132, 64, 4096, ("tile", 64)), (128 * 132, 72, 4096, ("tile", 128)),
        (128 * 132, 128, 4096, ("tile", 128)), (128 * 132 + 1, 64, 4096, ("pair", 128)),
        (128 * 132 + 1, 128, PAIR_K, ("pair", 128)), (128 * 132, 256, PAIR_K, ("pair", 128)),
        (128 * 132, 256, PAIR_K + 8, ("split", 256)), (128 * 132 + 1, 256, PAIR_K, ("late", 256)),
        (128 * 264, 128, PAIR_K + 8, ("pair", 128)), (128 * 264 + 1, 128, PAIR_K + 8, ("late", 256)),
    ]:  # fmt: skip
        p = plan(rows, cols, K, cpu)
        assert (p.schedule, p.block_n) == expected, (rows, cols, K)
        assert plan(rows, cols, K, cpu, "tile").block_n == 256, "a schedule that is asked for has the larger tiles"


def test_what_does_not_fit_is_passed_over(monkeypatch):
    monkeypatch.setattr(technique, "device_limits", lambda device: Limits(132, 128 * 1024))
    cpu = torch.device("cpu")
    for shape in SWEPT:
        assert plan(*shape, cpu)[1:5] == TILES[1][:4]
    monkeypatch.setattr(technique, "device_limits", lambda device: Limits(132, 160 * 1024))
    assert plan(1024, 1024, 1024, cpu)[1:6] == ONE_WAVE[0][1]
    assert plan(1024, 2048, 1024, cpu).schedule == "pair", "128x128 with five stages is 160 KiB and barriers"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(4096, 4096, 4096), (1000, 5208, 776), (16, 8192, 4096), (8191, 264, 512), (1000, 2040, 776)]
)
def test_shapes_on_the_gpu(h, dtype, shape):
    for columns in (False, True):
        a, b = operands(h, *shape, columns, dtype)
        for schedule in (None, *SCHEDULES):
            check(h, a, b, schedule)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["tile", "split", "late"])
def test_more_elements_than_an_int32_counts(h, gpu_gib, schedule):
    gpu_gib(60)
    K = LATE_K if schedule == "late" else 64
    long = 2**31 // 64 + 64
    tall = torch.empty(long, K, dtype=torch.bfloat16, device=h.device).normal_()
    few = h.randn(64, K, dtype=torch.bfloat16)
    ends = slice(0, 300), slice(-300, None)
    c = matmul_tma_persistent(tall, few.t(), schedule=schedule)
    for part in ends:
        h.check(lambda *_, p=part: c[p], reference, tall[part].contiguous(), few.t(), terms=K, what="tall")
    del c
    c = matmul_tma_persistent(few, tall.t(), schedule=schedule)
    for part in ends:
        h.check(
            lambda *_, p=part: c[:, p].contiguous(), reference, few, tall[part].t().contiguous(), terms=K, what="wide"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [False, True], ids=["b", "b.t()"])
def test_the_schedules_agree_and_repeat(h, columns):
    """The same tile and the same order of sums: only when things happen differs, so not a bit of the result may."""
    a, b = operands(h, 4000, 5000, 1000, columns, torch.bfloat16)
    first = matmul_tma_persistent(a, b, schedule="tile")
    calls = [lambda s=s: matmul_tma_persistent(a, b, schedule=s) for s in (None, *SCHEDULES)]
    calls += [lambda w=w: matmul_tma_persistent(a, b, schedule="split", descriptors=w) for w in DESCRIPTORS]
    calls += [lambda n=n: matmul_tma_persistent(a, b, band=n) for n in (1, 3, 16, 64)]
    calls += [prepare_matmul(a, b, schedule=s) for s in (None, *SCHEDULES)]
    for call in calls:
        for _ in range(10):
            assert torch.equal(first, call())


@pytest.mark.gpu
def test_prepared_runs_on_the_stream_of_its_caller_and_in_a_graph(h):
    a, b = operands(h, 1024, 2048, 512, dtype=torch.bfloat16)
    call = prepare_matmul(a, b)
    want = matmul_tma_persistent(a, b)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = call().clone()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    a.mul_(2)
    graph.replay()
    assert torch.equal(out, matmul_tma_persistent(a, b))


FIND = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


def check_code(p, kernel, sm):
    """What a plan became: it fits, spills nothing, and uses TMA and the tensor cores."""
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    assert all(kernel.found.get(name) for name in ("cp.async.bulk.tensor", "mbarrier", FIND[sm])), kernel.found
    assert (p.schedule in ("tile", "pair")) == (kernel.kernel == "matmul_tile_kernel")
    if sm == 90:  # all programs that are to share an SM find registers, by eights, and shared memory there
        together = PER_SM[p.schedule]
        assert together * 32 * kernel.warps * triton.cdiv(kernel.registers, 8) * 8 <= 65536
        assert together * (kernel.shared + 1024) <= SHARED_LIMIT[sm] + 1024
    # What the wrapper reckons with is enough, and on Hopper what a program holds, but a few barriers.
    reckoned = shared_bytes(p.block_m, p.block_n, p.block_k, 2, p.stages, p.schedule)
    assert kernel.shared <= reckoned <= kernel.shared_limit == SHARED_LIMIT[sm]
    assert sm != 90 or reckoned - kernel.shared < 256
    assert kernel.warps == p.warps


@pytest.mark.parametrize("sm", FIND)
@pytest.mark.parametrize("schedule", [None, "tile", "pair", "whole", "split"])
def test_generated_code(sm, schedule, gpu_of):
    if (schedule, sm) == ("pair", 120):
        pytest.skip("an SM has no room for two")
    x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    gpu_of(132, sm)
    p = plan(8192, 8192, 8192, torch.device("cpu"), schedule)
    for b in (x, x.t()) if schedule is None else (x,):
        (kernel,) = compile_for(matmul_tma_persistent, (x, b), {"schedule": schedule}, sms=(sm,))
        check_code(p, kernel, sm)


@pytest.mark.parametrize("sm", FIND)
@pytest.mark.parametrize(("shape", "block_n"), [((1024, 1024, 1024), 64), ((1024, 2048, 1024), 128),
                                                ((2048, 2048, 512), 128), ((2048, 2048, 2048), 256)])  # fmt: skip
def test_generated_code_of_one_wave(sm, shape, block_n, gpu_of):
    """The compiler knows each shape's plan, for an H200's 132 SMs: each tile, both layouts of b."""
    M, N, K = shape
    gpu_of(132, sm)
    p = plan(M, N, K, torch.device("cpu"))
    assert p.block_n == (128 if sm == 120 else block_n), "no room on sm_120"
    a, b, w = (torch.empty(*sizes, dtype=torch.bfloat16, device="meta") for sizes in ((M, K), (K, N), (N, K)))
    for right in (b, w.t()):
        (kernel,) = compile_for(matmul_tma_persistent, (a, right), sms=(sm,))
        check_code(p, kernel, sm)


@pytest.mark.parametrize("dtype", DTYPES)
def test_late_waits_for_the_tensor_cores_only_at_the_end_of_a_tile(dtype):
    """In the loop one step is always running (wait for all but one); two more waits end a tile and the kernel."""
    x = torch.empty(8192, 8192, dtype=dtype, device="meta")
    for b in (x, x.t()):
        ptx = dump(matmul_tma_persistent, (x, b), sm=90)["ptx"]
        waits = sorted(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+);", ptx))
        assert waits == ["0", "0", "1"]


@pytest.mark.parametrize("where", DESCRIPTORS[1:])
def test_descriptors_on_the_device(where):
    x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    arguments = {"schedule": "split", "descriptors": where}
    (kernel,) = compile_for(matmul_tma_persistent, (x, x), arguments, sms=(90,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    ptx = dump(matmul_tma_persistent, (x, x), arguments, sm=90)["ptx"]
    host = dump(matmul_tma_persistent, (x, x), {"schedule": "split"}, sm=90)["ptx"]
    assert "tensormap.replace" in ptx
    assert "tensormap.replace" not in host


def test_what_is_recorded():
    facts = {}
    h = SimpleNamespace(fact=facts.__setitem__)
    record(h, ", b.t()", [{"triton by rule": 1.0, "triton late": 1.21}, {"triton by rule": 1.21, "triton late": 1.0}])
    mean = facts["geometric mean over cuBLAS, b.t()"]
    assert mean == {"triton by rule": 1.1, "triton late": 1.1}
    assert facts["least over cuBLAS, b.t()"] == {"triton by rule": 1.0, "triton late": 1.0}
    for nothing in ([], [{}], [{"triton by rule": 1.0}, {}]):
        facts.clear()
        record(h, "", nothing)
        assert not facts, "a mean over some of the cases would be taken for that over all"


def test_what_is_said_follows_from_the_times(monkeypatch):
    """512 tiles on 132 SMs are 3.88 waves, paid as 4; the times are made up, in ms."""
    said, facts, tables = [], {}, {}
    h = SimpleNamespace(
        device=torch.device("cpu"), half=torch.bfloat16, machine=SimpleNamespace(sms=132), say=said.append,
        fact=facts.__setitem__, table=tables.__setitem__, timing=True, profile=False,
        pick=lambda interpreted, quick, full: full, randn=lambda *shape, dtype: torch.empty(*shape, device="meta"),
        meta=lambda *shape: torch.empty(*shape, device="meta"), check=lambda *args, **options: None,
        codegen=lambda *args, **options: [],
    )  # fmt: skip
    monkeypatch.setattr(technique, "device_limits", lambda device: Limits(132, SHARED_LIMIT[90]))

    def compare(variants, *args, baseline, **options):
        rows = [
            SimpleNamespace(variant=name, ms=1.0 - 0.1 * n, speedup=1 / (1.0 - 0.1 * n), enqueue_us=10.0 + n)
            for n, name in enumerate(variants)
        ]
        assert baseline == rows[0].variant == "torch"
        return SimpleNamespace(rows=rows)

    h.compare = compare
    found = technique.compare_schedules(h, 4096, 4096, 4096)
    assert said[0] == (
        f"the rule took late, 4 stages, in bands of {BANDS['late']}: "
        "512 tiles of 128x256 at 132 places are 3.88 waves, paid as 4"
    )
    assert said[1] == (
        "us of a wave: by rule 225.00, tile 200.00, pair 175.00, whole 150.00, split 125.00, late 100.00"
    )
    assert found.keys() == {"triton by rule", *(f"triton {name}" for name in SCHEDULES)}
    technique.compare_descriptors(h, 4096, 4096, 4096, whole_calls=False)
    assert said[2] == (
        "on the GPU, against descriptors of the host: made by each program -100.00 us, "
        "made for each tile -200.00 us over 4 tiles one after another"
    )
    technique.compare_descriptors(h, 2048, 2048, 2048, whole_calls=True)
    (table,) = tables.values()
    assert table["host, each call"] == {"host": 11.0, "call": 900.0}
    assert table["host, prepared"] == {"host": 14.0, "call": 600.0}
    technique.demo(h)
    assert facts["geometric mean over cuBLAS"]["triton by rule"] == round(1 / 0.9, 4)
    assert facts["least over cuBLAS, b.t()"] == {"triton by rule": round(1 / 0.9, 4)}
    assert any(line.startswith("the rule took tile, 6 stages, in bands of 8: 128 tiles of 128x64 at") for line in said)
    assert any(line.startswith("fastest: triton band 32; the rule takes ") for line in said)


def _bad(device):
    a = torch.randn(4, 16, device=device).half()
    b = torch.randn(16, 8, device=device).half()
    flat = torch.zeros(400, dtype=torch.float16, device=device)
    return {
        "no tensor": (([1.0], b), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((a.int(), b.int()), TypeError, r"dtypes torch\.int32 and torch\.int32; both must be"),
        "float32": ((a.float(), b.float()), TypeError, r"torch\.float32"),
        "two dtypes": ((a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        "a vector": ((a, b[:, 0]), ValueError, r"shapes \(4, 16\) and \(16,\); need \[M, K\] and \[K, N\]"),
        "a batch": ((a.reshape(1, 4, 16), b.reshape(1, 16, 8)), ValueError, "need"),
        "inner sizes": ((a, b.t()), ValueError, r"shapes \(4, 16\) and \(8, 16\)"),
        "no schedule": ((a, b, None, "faster"), ValueError, r"schedule 'faster' is not one of \('tile', "),
        "a number for a schedule": ((a, b, None, 2), ValueError, "schedule 2 is not one of"),
        "late and too short": ((a, b, None, "late"), ValueError, "'late' needs K above 256, got 16, .* take 'split'"),
        "a band of none": ((a, b, None, None, 0), ValueError, "band is 0; take 1 to 4096"),
        "half a band": ((a, b, None, None, 1.5), ValueError, "band is 1.5"),
        "K of 12": ((a[:, :12], b[:12]), ValueError, "K is 12 and N 8; TMA needs .*pad both to multiples of 8"),
        "N of 4": ((a, b[:, :4]), ValueError, "K is 16 and N 4"),
        "a transposed": ((flat[:128].view(16, 8).t(), b), ValueError, r"a has shape \(8, 16\)"),
        "b's every second column": ((a, flat[:256].view(16, 16)[:, ::2]), ValueError, r"b has .* strides \(16, 2\)"),
        "b.t() with odd rows": (
            (a, flat[:144].view(8, 18)[:, :16].t()),
            ValueError,
            r"b\.t\(\) has shape \(8, 16\), strides \(18, 1\)",
        ),
        "unaligned start": ((flat[1:65].view(4, 16), b), ValueError, "a has .* starts 2 bytes past"),
        "unaligned rows": ((a, flat[:192].view(16, 12)[:, :8]), ValueError, r"b has .* strides \(12, 1\)"),
        "one row for all": ((a[:1].expand(4, 16), b), ValueError, r"a has .* strides \(0, 1\)"),
        "out of another shape": ((a, b, flat[:64].view(8, 8)), ValueError, r"out is .* \(8, 8\).*need .*\(4, 8\)"),
        "out of another dtype": ((a, b, torch.zeros(4, 8, device=device)), ValueError, r"out is torch\.float32"),
        "out transposed": ((a, b, flat[:32].view(8, 4).t()), ValueError, r"strides \(1, 4\)"),
        "out unaligned": ((a, b, flat[1:33].view(4, 8)), ValueError, "out has .* starts 2 bytes past"),
        "out over a": ((flat[:64].view(4, 16), b, flat[56:88].view(4, 8)), ValueError, "out lies over a, .*its own"),
        "out over b": ((a, flat[:128].view(16, 8), flat[96:128].view(4, 8)), ValueError, "out lies over b"),
        "out is no tensor": ((a, b, 3), TypeError, r"expected a torch\.Tensor, got int"),
        "requires grad": ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta")), ValueError, "move them to one device"),
        "a device without kernels": ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    for fn in (matmul_tma_persistent, prepare_matmul):
        with pytest.raises(error, match=f"{fn.__name__}: .*{message}"):
            fn(*args)


def test_bad_places_for_descriptors(h):
    a, b = operands(h, 8, 16, 8)
    with pytest.raises(ValueError, match=r"descriptors 'device' is not one of \('host', 'program', 'tile'\)"):
        matmul_tma_persistent(a, b, schedule="split", descriptors="device")
    for schedule in (None, "tile", "late"):
        with pytest.raises(ValueError, match=f"descriptors='program' needs schedule .* not {schedule!r}"):
            matmul_tma_persistent(a, b, schedule=schedule, descriptors="program")
