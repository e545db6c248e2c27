"""tma_copy: every bit at every edge and none beside it, tiles and buffers, what each variant compiles to, bad input."""

import math

from harness.catalog import Needs
from harness.codegen import compile_for, dump
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.tma import tma_copy_triton as triton_copies
from examples.tma.tma_copy import reference, tma_copy
from examples.tma.tma_copy_triton import PLANS, VARIANTS, lag, loads_in_flight, runnable
from studies.tma.tma_copy import copy_each, copy_planned
from studies.tma.tma_copy_edges import bits, padded, up_to_16_bytes, written

TMA_VARIANTS = VARIANTS[1:]

# Nothing, one element, a prime, one tile plus one in each direction, more tiles than programs, one long row or column.
SHAPES = [(0, 8), (8, 0), (1, 1), (37, 53), (65, 128), (64, 129), (641, 261), (1, 3000), (1500, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(h, shape):
    x = padded(h, *shape, torch.float16)
    h.check(copy_each, lambda x: (reference(x),) * len(runnable()), x, terms=0)


def edges_hold(h, x, variant, plan=None, margin=16):
    """written() holds the inside and all beyond 16 bytes; what a store does with the rest of them is all or nothing."""
    found = written(x, variant, margin, plan)
    assert found.inside == x.numel()
    assert found.elsewhere == 0
    assert found.up_to_16_bytes in ((0,) if h.interpreted or variant == "pointers" else (0, up_to_16_bytes(x)))


@given(M=st.integers(0, 200), N=st.integers(0, 300), variant=st.sampled_from(runnable()), wide=st.booleans())
def test_any_shape_and_nothing_around_it(M, N, variant, wide):
    h = Harness("test", Needs.parse("triton"))
    x = h.randn(M, N, dtype=torch.float32 if wide else torch.float16)
    edges_hold(h, x, variant, margin=8)


@given(
    rows=st.sampled_from((8, 32, 128)),
    row_bytes=st.sampled_from((32, 128, 256)),
    variant=st.sampled_from([variant for variant in runnable() if variant in TMA_VARIANTS]),
    buffers=st.integers(1, 6),
    programs=st.integers(1, 3),
)
def test_any_tile_and_pipeline(rows, row_bytes, variant, buffers, programs):
    h = Harness("test", Needs.parse("triton"))
    plan = PLANS[variant]._replace(rows=rows, row_bytes=row_bytes)
    if PLANS[variant].stages > 1:
        plan = plan._replace(stages=buffers)
    if plan.programs:
        plan = plan._replace(programs=programs)
    edges_hold(h, h.randn(131, 97, dtype=torch.float16), variant, plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_arrive_as_they_are(h, dtype):
    """NaNs with their payload, both zeros, infinities, subnormals: a copy is not arithmetic."""
    whole, n = (torch.int16, 2**16) if dtype is torch.float16 else (torch.int32, 2**12)
    pattern = torch.arange(n, device=h.device) * (1 if n == 2**16 else 2**20 + 12345)
    x = pattern.to(whole).view(dtype).view(64, -1)
    assert x.isnan().any()
    for variant in runnable():
        assert torch.equal(bits(tma_copy(x, variant)), bits(x)), variant


@pytest.mark.parametrize("variant", TMA_VARIANTS)
def test_an_out_that_tma_would_leave(h, variant):
    """Refused everywhere, though the interpreter stops at the element; pointers take it."""
    x, memory = padded(h, 4, 13, torch.float16), torch.zeros(4, 24, dtype=torch.float16, device=h.device)
    with pytest.raises(ValueError, match=r"tma_copy: rows of out are 26 bytes long, .*variant='pointers'"):
        tma_copy(x, variant, out=memory[:, :13])
    assert not memory.any()
    tma_copy(x, "pointers", out=memory[:, :13])
    assert torch.equal(memory[:, :13], x)
    assert not memory[:, 13:].any()


def test_strides(h):
    """An output has its own; pointers take rows that TMA cannot; a single row or column may have any stride."""
    x, odd = h.randn(70, 136, dtype=torch.float16)[:, :120], h.randn(20, 33, dtype=torch.float16)[:, 1:24]
    row, column = h.randn(1, 13, dtype=torch.float16), h.randn(40, 8, dtype=torch.float16)[:, :1]
    assert torch.equal(tma_copy(odd, "pointers"), odd)
    for variant in runnable():
        out = torch.full((70, 128), math.nan, dtype=x.dtype, device=x.device)[:, :120]
        assert tma_copy(x, variant, out=out) is out
        assert torch.equal(out, x), variant
        assert all(torch.equal(tma_copy(each, variant), each) for each in (row, column))


@pytest.mark.gpu
def test_more_than_2_31_elements(h):
    n = h.fit(2**16, bytes_each=2**15 * 8)
    if n < 2**16:
        pytest.skip("needs 16 GiB of GPU memory")
    x = torch.randint(-(2**15), 2**15, (2**16 + 1, 2**15), dtype=torch.int16, device=h.device).view(torch.float16)
    for variant in VARIANTS:
        assert torch.equal(tma_copy(x, variant).view(torch.int16), x.view(torch.int16)), variant


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_on_the_gpu(h, variant):
    """Repeated, also where buffers are used again thousands of times: a load that overtakes a store would show. A store
    writes all of each last 16 bytes of a row or none of what is left of it, in each width; every depth of the ring."""
    x = h.randint(2**15, 4096, 4096).to(torch.int16).view(torch.float16)
    assert all(torch.equal(bits(tma_copy(x, variant)), bits(x)) for _ in range(20))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for N in range(197, 212):
            edges_hold(h, h.randn(67, N, dtype=dtype), variant)
    for stages in range(1, 13 if variant == "ring" else 1):
        edges_hold(h, x[:2003, :3001], "ring", PLANS["ring"]._replace(stages=stages, programs=1))


META = torch.empty(8192, 8192, dtype=torch.float16, device="meta")


@pytest.mark.parametrize(("variant", "sm"), list(zip(VARIANTS, (90, 120, 90, 100, 90), strict=True)))
def test_what_it_compiles_to(variant, sm):
    (kernel,) = compile_for(tma_copy, (META, variant), sms=(sm,))
    assert (kernel.error, kernel.spills, kernel.fits, kernel.warps) == (None, 0, True, PLANS[variant].warps)
    assert bool(kernel.found.get("cp.async.bulk.tensor")) == (variant != "pointers") != ("ld.global.v4" in kernel.found)


def test_the_ring():
    """Without a swizzle a tile's row of 256 values is one box; swizzled it would be four of 128 bytes."""
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    ptx, plan = dump(tma_copy, (x, "ring"), sm=90)["ptx"], PLANS["ring"]
    # STAGES - LAG loads before the loop, one in it, and one store.
    assert ptx.count("cp.async.bulk.tensor") == loads_in_flight("ring", plan) + 2
    assert plan.row_bytes // x.element_size() == 256
    for rows, row_bytes in [(8, 32), (8, 4096)]:
        small = plan._replace(rows=rows, row_bytes=row_bytes)
        (kernel,) = compile_for(copy_planned, (x, "ring", *small), sms=(90,))
        assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
        assert 0 <= kernel.shared - 6 * rows * row_bytes <= 16 * 6  # what the wrapper reckons with
    (kernel,) = compile_for(tma_copy, (META, "ring"), sms=(80,))
    assert "'ring' needs sm_90, for its TMA (this is sm_80)" in kernel.error


def test_plans():
    assert [lag(stages) for stages in (1, 2, 3, 6, 12)] == [0, 0, 1, 1, 1]
    assert loads_in_flight("ring", PLANS["ring"]._replace(stages=6)) == 5
    assert loads_in_flight("pipelined", PLANS["pipelined"]._replace(stages=4)) == 3
    assert loads_in_flight("tile", PLANS["tile"]) == loads_in_flight("persistent", PLANS["persistent"]) == 1


def test_programs_that_an_sm_cannot_hold_are_not_launched(h, monkeypatch):
    """99 KiB hold one ring of 96: a second program would wait for the first to end."""
    grids = []
    x = torch.zeros(2048, 2048, dtype=torch.float16, device=h.device)
    for limit in (SHARED_LIMIT[120], SHARED_LIMIT[90]):
        monkeypatch.setattr(triton_copies, "device_limits", lambda device, limit=limit: Limits(10, limit))
        kernel = type("K", (), {"__getitem__": lambda self, grid: lambda *a, **k: grids.append(grid)})()
        monkeypatch.setattr(triton_copies, "copy_persistent_kernel", kernel)
        tma_copy(x, "pipelined", plan=PLANS["pipelined"]._replace(stages=6, programs=2))
    assert grids == [(10,), (20,)]


def _bad(device):
    x, flat, shared = (torch.zeros(n, dtype=torch.float16, device=device) for n in (512, 1000, 1024))
    x, shared = x.view(16, 32), shared.view(32, 32)
    return [
        ((x, "fast"), r"variant 'fast' is not one of \('pointers', "),
        ((flat[1:513].view(16, 32), "tile"), "x has .* starts 2 bytes past"),
        ((x, "tile", flat[1:513].view(16, 32)), "out has .* starts 2 bytes past"),
        ((x, "tile", flat[:256].view(8, 32)), r"out is \(8, 32\) .*; x is"),
        ((x, "tile", flat[:32].expand(16, 32)), r"out is .* strides \(0, 1\)"),
        ((shared[:16], "tile", shared[16:]), "out lies in the storage of x"),
        ((x[:1, :8].expand(2**31 - 256, 8), "tile"), "each size must be below 2147483392, split the matrix"),
        ((x, "pipelined", None, PLANS["pipelined"]._replace(stages=20)), "20 tiles of 32 rows x 512 bytes take 328000"),
    ]


@pytest.mark.parametrize("case", range(8))
def test_bad_input(h, case):
    args, message = _bad(h.device)[case]
    with pytest.raises(ValueError, match=f"tma_copy: .*{message}"):
        tma_copy(*args)
