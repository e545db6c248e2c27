"""gluon_matmul: its kernels on a model of an SM, in any order of events, and their code; on a GPU, shapes and bits.

gluon_matmul_cluster is compiled and modeled with Triton 3.9 only.
"""

import functools
import re

from harness.codegen import dump

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.common import gluon as common
from examples.common.device import SHARED_LIMIT, Limits
from examples.tma import gluon_matmul as module
from examples.tma import gluon_matmul_cluster as clusters
from examples.tma import gluon_matmul_ring as ring
from examples.tma.gluon_matmul import BEHIND, BUFFERS, DTYPES, PARTS, STAGES, STEPS, TILE, gluon_matmul, reference
from examples.tma.gluon_matmul_cluster import gluon_matmul_cluster, lacks_clusters
from examples.tma.gluon_matmul_ring import gluon_matmul_one_buffer, gluon_matmul_ring
from tests.examples.tma.helpers import check_tall_and_wide, odd_operands
from tests.examples.tma.model import no_shrinking, use_model
from tests.examples.triton.helpers import code, harness, meta, refused

TOGETHER = {"one buffer": gluon_matmul_one_buffer, "ring": gluon_matmul_ring}  # all warps load and multiply
KERNELS = TOGETHER | {step: functools.partial(gluon_matmul, step=step) for step in STEPS}


CLUSTER = {"cluster": gluon_matmul_cluster}
needs_clusters = pytest.mark.skipif(bool(lacks_clusters()), reason=lacks_clusters())


def check(h, a, b, step, what=None):
    what = what or f"{step} {tuple(a.shape)} {tuple(b.shape)} {a.stride()} {b.stride()}"
    h.check((KERNELS | CLUSTER)[step], reference, a, b, terms=a.shape[1], what=what)


def on_model(monkeypatch, seed=0, sms=1):
    names = {"gluon_matmul_kernel": module, "gluon_matmul_one_buffer_kernel": ring, "gluon_matmul_ring_kernel": ring,
             "gluon_matmul_cluster_kernel": clusters}  # fmt: skip
    monkeypatch.setattr(common, "gluon_architecture", lambda device: 90)
    return use_model(monkeypatch, names, seed, sms)


@pytest.mark.parametrize("step", KERNELS)
@no_shrinking
@given(
    M=st.integers(1, 400), N=st.integers(1, 40), K=st.integers(1, 8 * (STAGES + 2)), columns=st.booleans(),
    sms=st.integers(1, 3), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_order_of_events_is_right(step, M, N, K, columns, sms, seed):
    h = harness()
    a, b = h.randn(M, 8 * K, dtype=h.half), h.randn(8 * K, 8 * N, dtype=h.half)
    with pytest.MonkeyPatch.context() as patch:
        on_model(patch, seed, sms)
        check(h, a, b.t().contiguous().t() if columns else b, step)


@needs_clusters
@no_shrinking
@given(
    M=st.integers(1, 600), N=st.integers(1, 66), K=st.integers(1, 8 * (STAGES + 2)), programs=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_order_of_events_in_two_ctas_is_right(M, N, K, programs, seed):
    h = harness()
    a, w = h.randn(M, 8 * K, dtype=h.half), h.randn(8 * N, 8 * K, dtype=h.half)
    with pytest.MonkeyPatch.context() as patch:
        on_model(patch, seed, 2 * programs)
        check(h, a, w.t(), "cluster")


@pytest.mark.parametrize(("K", "staggered"), [(64 * STAGES - 64, False), (64 * STAGES - 56, True)])
def test_the_second_consumer_waits_once_a_tile_where_a_tile_fills_the_ring(h, monkeypatch, K, staggered):
    """The last step may be in part. With a shorter tile the first could be two tiles ahead of the barrier."""
    a, b = h.randn(300, K, dtype=h.half), h.randn(K, 264, dtype=h.half)
    assert STAGES > BEHIND > 0
    ran = on_model(monkeypatch)
    check(h, a, b, "in flight")
    assert not any(sm.waits[2] for sm in ran)
    ran.clear()
    check(h, a, b, "staggered")
    assert {sm.waits[2] for sm in ran} == {6 * staggered}
    if not lacks_clusters():  # a tile has twice the rows, and each CTA a second consumer
        ran.clear()
        monkeypatch.setattr(clusters, "device_limits", lambda device: Limits(2, SHARED_LIMIT[90]))
        check(h, a, b.t().contiguous().t(), "cluster")
        assert {sm.waits[3] for sm in ran} == {8 * staggered}


def test_generated_code():
    x, (m, n, k) = meta(4096, 4096), TILE
    for fn in (*TOGETHER.values(), gluon_matmul):
        kernel, text = code(90, "cp.async.bulk.tensor", fn, x, x.t()), dump(fn, (x, x.t()), sm=90)
        assert not re.search(r"serialized|C75\d\d", text["log"]), "the assembler waits after each MMA"
        # A step of K is BLOCK_K / 16 instructions; each of two consumers has its first step before its loop.
        assert kernel.found["wgmma"] == k // 16 * (4 if fn is gluon_matmul else 1)
        assert (kernel.warps, "setmaxnreg" in kernel.found) == ((12, True) if fn is gluon_matmul else (8, False))
    # What the source allocates: a ring, barriers, and parts of each half through buffers of each half.
    assert 0 <= kernel.shared - STAGES * (2 * (m + n) * k + 8) - 2 * m * n // PARTS * BUFFERS < 256
    # One group of MMAs is left to run after each step, and none at the end of a tile.
    assert sorted(re.findall(r"wgmma\.wait_group\S* +(\d+)", text["ptx"])) == ["0"] * 2 + ["1"] * 4
    assert 128 * (2 * module.CONSUMER_REGISTERS + module.PRODUCER_REGISTERS) == 168 * 384, "what the launch takes"


@needs_clusters
def test_generated_code_of_a_cluster():
    x, (m, n, k) = meta(4096, 4096), TILE
    kernel = code(90, "cp.async.bulk.tensor mbarrier wgmma setmaxnreg", gluon_matmul_cluster, x, x.t())
    text = dump(gluon_matmul_cluster, (x, x.t()), sm=90)
    ptx = text["ptx"]
    assert not re.search(r"serialized|C75\d\d", text["log"]), "the assembler waits after each MMA"
    assert ".reqnctapercluster 2" in ptx
    assert len(re.findall(r"\.multicast::cluster", ptx)) == 1, "b alone"
    assert re.findall(r"arrive\.expect_tx\S* _, \[%r\d+\], (\d+);", ptx) == [str(2 * (m + n) * k)]
    # Both consumers, in their loops and after them, tell the CTA itself and CTA 0; the first tells the second once.
    arrivals = [len(re.findall(rf"mbarrier\.arrive\.shared::{each}\.", ptx)) for each in ("cta", "cluster")]
    assert arrivals == [5, 4]
    # All warps of both CTAs meet when the barriers are initialized, which the source leaves to the compiler, and at the
    # end, where 3.9 adds a second time.
    initialized = ptx.index("fence.mbarrier_init.release.cluster")
    assert initialized < ptx.index("barrier.cluster.arrive.relaxed", initialized) < ptx.index("mbarrier.arrive")
    assert ptx.rindex("barrier.cluster.wait") > ptx.rindex("mbarrier.arrive")
    assert sorted(re.findall(r"wgmma\.wait_group\S* +(\d+)", ptx)) == ["0"] * 2 + ["1"] * 2
    assert 0 <= kernel.shared - STAGES * (2 * (m + n) * k + 8) - 2 * m * n // PARTS * BUFFERS < 256


def test_what_is_refused(h, monkeypatch):
    """What needs sm_90 is refused elsewhere also where there is nothing to compute."""
    a, b = h.randn(4, 16, dtype=h.half), h.randn(16, 8, dtype=h.half)
    refused(gluon_matmul, ValueError, "step 'faster' is not one of", a, b, "faster")
    refused(gluon_matmul_cluster, ValueError, r"b has strides \(8, 1\); .*weight.t\(\)", a, b)
    columns = b.t().contiguous().t()
    monkeypatch.setattr(common, "gluon_architecture", lambda device: None)
    for fn in (gluon_matmul, gluon_matmul_cluster, *TOGETHER.values()):
        refused(fn, RuntimeError, "needs sm_90, .*Gluon kernels are not interpreted", a[:0], columns)
        refused(fn, ValueError, "K is 12", a[:, :12], b[:12])
    monkeypatch.setattr(common, "gluon_architecture", lambda device: 90)
    monkeypatch.setattr(clusters, "cluster", None)
    refused(gluon_matmul_cluster, RuntimeError, "needs Triton 3.9 or newer: .*: use gluon_matmul", a, columns)


@needs_clusters
def test_a_cluster_with_nothing_to_add_up_or_to_write(h, monkeypatch):
    on_model(monkeypatch, sms=2)
    for M, N, K in ((5, 16, 0), (0, 16, 8), (5, 0, 8)):
        check(h, h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half).t(), "cluster")


# One row, one tile and one more in each dimension, nothing to add up, nothing; more rows of tiles than a group has, and
# a last group that is not full.
SHAPES = [(1, 8, 8), (129, 264, 72), (5, 136, 8), (5, 16, 0), (0, 16, 8), (5, 0, 8),
          ((module.GROUP_M + 1) * TILE[0] + 1, 264, 8), (1000, 5208, 776)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_gpu(hopper, monkeypatch, dtype):
    """Shapes, layouts, NaN and infinity; a ring that is shorter, as long and longer than a tile. (That every launch
    gives the same bits is in tests/test_blackwell_optimizations.py.)"""
    pairs = [(hopper.randn(M, K, dtype=dtype), hopper.randn(N, K, dtype=dtype)) for M, N, K in SHAPES]
    shared = {} if lacks_clusters() else CLUSTER
    for step in KERNELS | shared:
        for x, w in [*odd_operands(hopper, dtype), *pairs]:
            check(hopper, x, w.t(), step)
            if step not in shared:
                check(hopper, x, w.t().contiguous(), step)
    for sms in (1, 7, 132):
        for each, n in ((module, sms), (clusters, max(sms, 2))):
            monkeypatch.setattr(each, "device_limits", lambda device, n=n: Limits(n, SHARED_LIMIT[90]))
        for steps in range(1, 10):
            K = 64 * steps - 32 * (steps % 2)
            x, w = hopper.randn(700, K, dtype=dtype), hopper.randn(K, 1288, dtype=dtype)
            for step in STEPS:
                check(hopper, x, w, step, what=f"{step}, {steps} steps, {sms} SMs")
            for step in shared:
                check(hopper, x, w.t().contiguous().t(), step, what=f"{step}, {steps} steps, {sms} SMs")


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(hopper, gpu_gib):
    gpu_gib(40)
    for fn in (gluon_matmul_ring, gluon_matmul, *(() if lacks_clusters() else (gluon_matmul_cluster,))):
        check_tall_and_wide(hopper, lambda x, w, fn=fn: fn(x, w.t()))
