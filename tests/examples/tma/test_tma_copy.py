"""tma_copy: every bit at every edge and none beside it, tiles and buffers, what each variant compiles to, bad input."""

import math
import sys

from harness.check import CheckError
from harness.codegen import compile_for, dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.tma import tma_copy_triton as triton_copies
from examples.tma.tma_copy import tma_copy
from examples.tma.tma_copy_triton import PLANS, VARIANTS, lag, loads_in_flight, runnable
from studies.tma import tma_copy as study
from studies.tma.tma_copy import bits, up_to_16_bytes, written_beside
from tests.examples.tma.helpers import launches
from tests.examples.tma.model import no_shrinking, use_model
from tests.examples.triton.helpers import code, harness, meta, refused

X = meta(8192, 8192, dtype=torch.float16)


def edges_hold(h, x, variant, plan=None, margin=16):
    """It checks the inside and all beyond 16 bytes; what a store does with the rest of them is all or nothing."""
    beside = written_beside(x, variant, margin, plan)
    assert beside in ((0,) if h.interpreted or variant == "pointers" else (0, up_to_16_bytes(x)))


def test_what_a_copy_writes_beside_its_output_is_seen(h, monkeypatch):
    """A store beyond 16 bytes, to another row, or by pointers to the very next element; a missing tile."""
    x = h.randn(40, 77, dtype=torch.float16)  # 3 elements short of 16 bytes

    def wider(by, below=0):
        def store(x, y, variant, plan):
            y.as_strided((x.shape[0] + below, x.shape[1] + by), y.stride()).fill_(1.0)
            y.copy_(x)

        monkeypatch.setattr(study, "launch_copy", store)

    wider(3)
    assert written_beside(x, "tile") == up_to_16_bytes(x) == 40 * 3
    for variant, more in [("pointers", (3, 0)), ("tile", (4, 0)), ("ring", (0, 1))]:
        wider(*more)
        with pytest.raises(CheckError, match=f"tma_copy {variant} wrote outside"):
            written_beside(x, variant)
    monkeypatch.setattr(study, "launch_copy", lambda x, y, variant, plan: y[8:].copy_(x[8:]))
    with pytest.raises(CheckError, match=f"tma_copy tile: {8 * 77} elements are not those of x"):
        written_beside(x, "tile")


@pytest.mark.parametrize("variant", VARIANTS)
@no_shrinking
@given(
    M=st.integers(0, 140), N=st.integers(0, 200), wide=st.booleans(), rows=st.sampled_from((8, 32, 128)),
    row_bytes=st.sampled_from((64, 128, 256)), buffers=st.integers(1, 6), programs=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_shape_tile_and_pipeline_and_nothing_around(variant, M, N, wide, rows, row_bytes, buffers, programs, seed):
    """Without a GPU the ring runs on the model."""
    h, plan = harness(), PLANS[variant]
    if variant != "pointers":
        plan = plan._replace(rows=rows, row_bytes=row_bytes, programs=min(plan.programs, programs))
        plan = plan._replace(stages=buffers) if plan.stages > 1 else plan
    x = h.randn(M, N, dtype=torch.float32 if wide else torch.float16)
    with pytest.MonkeyPatch.context() as patch:
        if h.interpreted:
            use_model(patch, {"copy_ring_kernel": sys.modules[tma_copy.__module__]}, seed)
        edges_hold(h, x, variant, plan, margin=8)


def test_bits_arrive_as_they_are(h):
    """NaNs with their payload, both zeros, infinities, subnormals: a copy is not arithmetic."""
    for dtype, whole, n, step in [(torch.float16, torch.int16, 2**16, 1), (torch.float32, torch.int32, 2**12, 1060921)]:
        x = (torch.arange(n, device=h.device) * step).to(whole).view(dtype).view(64, -1)
        assert x.isnan().any()
        for variant in runnable():
            assert torch.equal(bits(tma_copy(x, variant)), bits(x)), variant


def test_outputs_and_strides(h):
    """Pointers take rows that TMA cannot; a single row or column may have any stride. An out whose rows end within 16
    bytes is refused everywhere by TMA, though the interpreter stops at the element."""
    x, odd = h.randn(70, 136, dtype=torch.float16)[:, :120], h.randn(20, 33, dtype=torch.float16)[:, 1:24]
    row, column = h.randn(1, 13, dtype=torch.float16), h.randn(40, 8, dtype=torch.float16)[:, :1]
    out = torch.zeros(20, 24, dtype=torch.float16, device=h.device)
    assert torch.equal(tma_copy(odd, "pointers", out[:, :23]), odd)
    assert not out[:, 23:].any()
    for variant in runnable():
        if variant != "pointers":
            refused(tma_copy, ValueError, "out are 26 bytes long, .*variant='pointers'", row, variant, out[:1, :13])
        out = torch.full((70, 128), math.nan, dtype=x.dtype, device=x.device)[:, :120]
        assert tma_copy(x, variant, out=out) is out
        assert torch.equal(out, x), variant
        assert all(torch.equal(tma_copy(each, variant), each) for each in (row, column))


@pytest.mark.gpu
def test_on_the_gpu(h, gpu_gib):
    """Repeated, also where buffers are used again thousands of times: a load that overtakes a store would show. A store
    writes all of each last 16 bytes of a row or none of what is left of it, in each width; every depth of the ring;
    more elements than an int32 counts."""
    x = h.randint(2**15, 4096, 4096).to(torch.int16).view(torch.float16)
    for variant in VARIANTS:
        assert all(torch.equal(bits(tma_copy(x, variant)), bits(x)) for _ in range(20))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for N in range(197, 212):
                edges_hold(h, h.randn(67, N, dtype=dtype), variant)
    for stages in range(1, 13):
        edges_hold(h, x[:2003, :3001], "ring", PLANS["ring"]._replace(stages=stages, programs=1))
    gpu_gib(16)
    x = torch.randint(-(2**15), 2**15, (2**16 + 1, 2**15), dtype=torch.int16, device=h.device).view(torch.float16)
    for variant in VARIANTS:
        assert torch.equal(tma_copy(x, variant).view(torch.int16), x.view(torch.int16)), variant


def test_what_it_compiles_to_and_plans(h, monkeypatch):
    """Without a swizzle a ring's row of 256 values is one box; swizzled it would be four of 128 bytes."""
    # STAGES - LAG loads before the loop, one in it, and one store.
    ptx, plan = dump(tma_copy, (X, "ring"), sm=90)["ptx"], PLANS["ring"]
    assert ptx.count("cp.async.bulk.tensor") == loads_in_flight("ring", plan) + 2
    planned = {"plan": plan._replace(rows=8, row_bytes=4096)}
    kernel = code(90, "cp.async.bulk.tensor", tma_copy, X, "ring", **planned)
    assert 0 <= kernel.shared - 6 * 8 * 4096 <= 16 * 6  # what the wrapper reckons with
    (kernel,) = compile_for(tma_copy, (X, "ring"), sms=(80,))
    assert "'ring' needs sm_90, for its TMA (this is sm_80)" in kernel.error
    # 99 KiB hold one ring of 96: a second program would wait for the first to end, and is not launched.
    assert [lag(stages) for stages in (1, 2, 3, 6, 12)] == [0, 0, 1, 1, 1]
    assert loads_in_flight("ring", PLANS["ring"]._replace(stages=6)) == 5
    assert loads_in_flight("pipelined", PLANS["pipelined"]._replace(stages=4)) == 3
    assert loads_in_flight("tile", PLANS["tile"]) == loads_in_flight("persistent", PLANS["persistent"]) == 1
    launched = launches(monkeypatch, triton_copies, "copy_persistent_kernel")
    for limit in (SHARED_LIMIT[120], SHARED_LIMIT[90]):
        monkeypatch.setattr(triton_copies, "device_limits", lambda device, limit=limit: Limits(10, limit))
        x = torch.zeros(2048, 2048, dtype=torch.float16, device=h.device)
        tma_copy(x, "pipelined", plan=PLANS["pipelined"]._replace(stages=6, programs=2))
    assert [each.grid for each in launched] == [(10,), (20,)]


def test_bad_input(h):
    x, flat, both = (torch.zeros(n, dtype=torch.float16, device=h.device) for n in (512, 1000, 1024))
    x, both = x.view(16, 32), both.view(32, 32)
    for args, message in [
        ((x, "fast"), r"variant 'fast' is not one of \('pointers', "),
        ((flat[1:513].view(16, 32), "tile"), "x has .* starts 2 bytes past"),
        ((x, "tile", flat[1:513].view(16, 32)), "out has .* starts 2 bytes past"),
        ((x, "tile", flat[:256].view(8, 32)), r"out is \(8, 32\) .*; x is"),
        ((x, "tile", flat[:32].expand(16, 32)), r"out is .* strides \(0, 1\)"),
        ((both[:16], "tile", both[16:]), "out lies in the storage of x"),
        ((x[:1, :8].expand(2**31 - 256, 8), "tile"), "each size must be below 2147483392, split the matrix"),
        ((x, "pipelined", None, PLANS["pipelined"]._replace(stages=20)), "20 tiles of 32 rows x 512 bytes take 328000"),
    ]:
        refused(tma_copy, ValueError, message, *args)
