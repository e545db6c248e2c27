"""tma_copy: every bit at every edge and none beside it, tiles and buffers, what each variant compiles to, bad input."""

import functools
import math

from harness.bench import Row, Table
from harness.catalog import Needs
from harness.codegen import compile_for, dump
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.tma import tma_copy_triton as triton_copies
from examples.tma.tma_copy import VARIANTS, answer, lag, loads_in_flight, reference, runnable, tma_copy
from examples.tma.tma_copy_triton import PLANS, make_plan
from studies.tma.tma_copy import copy_each
from studies.tma.tma_copy_edges import bits, padded, up_to_16_bytes, written

TMA_VARIANTS = VARIANTS[1:]

# Nothing, one element, a prime, one tile plus one in each direction, more tiles than programs, one long row or column.
SHAPES = [(0, 8), (8, 0), (1, 1), (37, 53), (65, 128), (64, 129), (641, 261), (1, 3000), (1500, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(h, shape):
    x = padded(h, *shape, torch.float16)
    h.check(copy_each, lambda x: (reference(x),) * len(runnable()), x, terms=0)


def edges_hold(h, x, variant, **options):
    """written() holds the inside and all beyond 16 bytes; what a store does with the rest of them is all or nothing."""
    found = written(x, variant, **options)
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
    options = {"rows": rows, "row_bytes": row_bytes}
    if variant in ("pipelined", "pipelined device", "ring"):
        options |= {"stages": buffers}
    if PLANS[variant].programs:
        options |= {"programs": programs}
    edges_hold(h, h.randn(131, 97, dtype=torch.float16), variant, **options)


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


def test_out_is_written_and_returned(h):
    x = h.randn(70, 136, dtype=torch.float16)[:, :120]
    for variant in runnable():
        out = torch.full((70, 128), math.nan, dtype=x.dtype, device=x.device)[:, :120]
        assert tma_copy(x, variant, out=out) is out
        assert torch.equal(out, x), variant


def test_rows_of_any_stride(h):
    """Pointers take rows that TMA cannot; a single row or column may have any stride."""
    x = h.randn(20, 33, dtype=torch.float16)[:, 1:24]
    assert torch.equal(tma_copy(x, "pointers"), x)
    with pytest.raises(ValueError, match="tma_copy: x has shape"):
        tma_copy(x, "tile")
    row, column = h.randn(1, 13, dtype=torch.float16), h.randn(40, 8, dtype=torch.float16)[:, :1]
    for variant in runnable():
        assert torch.equal(tma_copy(row, variant), row)
        assert torch.equal(tma_copy(column, variant), column)


def test_the_allocator_is_left_as_found(h):
    from triton.runtime._allocation import _allocator

    before = _allocator.get()
    tma_copy(h.randn(8, 8, dtype=torch.float16), "tile device")
    tma_copy(h.randn(8, 8, dtype=torch.float16), "pipelined device")
    assert _allocator.get() is before


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
def test_repeated_calls_are_equal(h, variant):
    """Also where buffers are used again thousands of times: a load that overtakes a store would show."""
    x = h.randint(2**15, 4096, 4096).to(torch.int16).view(torch.float16)
    for _ in range(20):
        assert torch.equal(bits(tma_copy(x, variant)), bits(x))


@pytest.mark.gpu
@pytest.mark.parametrize("stages", range(1, 13))
def test_every_depth_of_the_ring(h, stages):
    x = h.randint(2**15, 2003, 3001).to(torch.int16).view(torch.float16)
    edges_hold(h, x, "ring", stages=stages, programs=1)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", TMA_VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_where_a_store_ends(h, variant, dtype):
    """All of each last 16 bytes of a row or none of what is left of it, in each variant and width."""
    for N in range(197, 212):
        edges_hold(h, h.randn(67, N, dtype=dtype), variant)


META = torch.empty(8192, 8192, dtype=torch.float16, device="meta")


@pytest.mark.parametrize("sm", [90, 100, 120])
def test_every_variant_compiles_to_tma(sm):
    kernels = compile_for(copy_each, (META,), sms=(sm,))
    assert [kernel.error for kernel in kernels] == [None] * len(VARIANTS)
    for variant, kernel in zip(VARIANTS, kernels, strict=True):
        assert bool(kernel.found.get("cp.async.bulk.tensor")) == (variant in TMA_VARIANTS), variant
        assert bool(kernel.found.get("ld.global.v4")) == (variant == "pointers"), variant
        assert (kernel.spills, kernel.fits) == (0, True), variant
        assert kernel.warps == PLANS[variant].warps


@pytest.mark.parametrize("sm", [80, 89])
def test_without_tma(sm):
    """Triton turns descriptors back into pointers; Gluon says what it is told, so the wrapper refuses."""
    (ring,) = compile_for(tma_copy, (META,), sms=(sm,))
    assert f"'ring' needs sm_90, for its TMA (this is sm_{sm})" in ring.error
    (tile,) = compile_for(tma_copy, (META, "tile"), sms=(sm,))
    assert tile.error is None
    assert not tile.found.get("cp.async.bulk.tensor")


def test_a_row_of_the_ring_is_one_box():
    """Without a swizzle a tile's row of 256 values is one request; swizzled it would be four of 128 bytes."""
    ptx = dump(tma_copy, (META, "ring"), sm=90)["ptx"]
    plan = PLANS["ring"]
    # STAGES - LAG loads before the loop, one in it, and one store.
    assert ptx.count("cp.async.bulk.tensor") == loads_in_flight("ring", plan) + 2
    assert plan.row_bytes // META.element_size() == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "row_bytes"), [(8, 32), (256, 64), (8, 4096)])
def test_tiles_of_the_ring(dtype, rows, row_bytes):
    x = torch.empty(4096, 4096, dtype=dtype, device="meta")
    (kernel,) = compile_for(tma_copy, (x, "ring"), {"rows": rows, "row_bytes": row_bytes}, sms=(90,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    assert 0 <= kernel.shared - 6 * rows * row_bytes <= 16 * 6  # what the wrapper reckons with: buffers and barriers


def test_plans():
    assert [lag(stages) for stages in (1, 2, 3, 6, 12)] == [0, 0, 1, 1, 1]
    assert make_plan("ring", None, None, 3, 4) == PLANS["ring"]._replace(stages=3, programs=4)
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
        tma_copy(x, "pipelined", stages=6, programs=2)
    assert grids == [(10,), (20,)]


def _bad(device):
    x = torch.randn(16, 32, device=device).half()
    flat = torch.zeros(1000, dtype=torch.float16, device=device)
    shared = torch.zeros(32, 32, dtype=torch.float16, device=device)
    return {
        "no tensor": (([1.0],), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((x.int(),), {}, TypeError, r"dtype torch\.int32 is not one of"),
        "a vector": ((x[0],), {}, ValueError, r"need a matrix \[M, N\], got shape \(32,\)"),
        "transposed": ((x.t(),), {}, ValueError, r"strides \(1, 32\); the columns must be adjacent"),
        "no variant": ((x, "fast"), {}, ValueError, r"variant 'fast' is not one of \(None, 'pointers', "),
        "a variant in numbers": ((x, 3), {}, ValueError, "variant 3 is not one of"),
        "unaligned start": ((flat[1:513].view(16, 32), "tile"), {}, ValueError, "x has .* starts 2 bytes past"),
        "unaligned rows": ((flat[:480].view(16, 30), "tile"), {}, ValueError, r"x has .* strides \(30, 1\)"),
        "one row for all": ((x[:1].expand(4, 32), "tile"), {}, ValueError, r"x has .* strides \(0, 1\)"),
        "unaligned out": (
            (x, "tile"), {"out": flat[1:513].view(16, 32)}, ValueError, "out has .* starts 2 bytes past"
        ),
        "out of another shape": ((x,), {"out": flat[:256].view(8, 32)}, ValueError, r"out is .*\(8, 32\); x is"),
        "out of another dtype": ((x,), {"out": x.float()}, ValueError, r"out is torch\.float32"),
        "out transposed": (
            (x[:, :16],), {"out": torch.zeros(16, 16, device=device).half().t()}, ValueError, "out has strides"
        ),
        "out of one row": ((x,), {"out": flat[:32].expand(16, 32)}, ValueError, r"out has strides \(0, 1\)"),
        "out in x": ((shared[:16],), {"out": shared[16:]}, ValueError, "out lies in the storage of x"),
        "out is no tensor": ((x,), {"out": 3}, TypeError, "got int"),
        "rows of 48": ((x, "tile"), {"rows": 48}, ValueError, "rows is 48; pass a power of two"),
        "rows of 512": ((x, "tile"), {"rows": 512}, ValueError, "rows is 512; pass an int from 8 to 256"),
        "row bytes in floats": ((x, "tile"), {"row_bytes": 64.0}, ValueError, r"row_bytes is 64\.0; pass an int"),
        "no stages": ((x, "pipelined"), {"stages": 0}, ValueError, "stages is 0; pass an int from 1 to 64"),
        "true stages": ((x, "pipelined"), {"stages": True}, ValueError, "stages is True"),
        "stages that wait": ((x, "persistent"), {"stages": 3}, ValueError, "'persistent' has no loads ahead"),
        "programs for tiles": ((x, "tile"), {"programs": 3}, ValueError, "'tile' has one for each tile"),
        "too much shared memory": (
            (x, "pipelined"), {"stages": 20}, ValueError, "20 tiles of 32 rows x 512 bytes take 328000 bytes"
        ),
        "requires grad": ((x.clone().requires_grad_(),), {}, RuntimeError, "no backward"),
        "two devices": ((x,), {"out": x.to("meta")}, ValueError, "move them to one device"),
        "a device without kernels": ((x.to("meta"),), {}, RuntimeError, "on meta"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, options, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"tma_copy: .*{message}"):
        tma_copy(*args, **options)


def test_a_matrix_beyond_the_coordinates(h):
    x = torch.zeros(1, dtype=torch.float16, device=h.device).expand(1, 2**31 - 256)
    with pytest.raises(ValueError, match=r"tma_copy: strides \(.*the columns must be adjacent"):
        tma_copy(x)
    x = torch.zeros(1, 8, dtype=torch.float16, device=h.device).expand(2**31 - 256, 8)
    with pytest.raises(ValueError, match="each size must be below 2147483392, split the matrix"):
        tma_copy(x)


def test_gluon_is_not_interpreted(h):
    if not h.interpreted:
        pytest.skip("only where kernels are interpreted")
    with pytest.raises(RuntimeError, match=r"'ring' needs sm_90, .*not interpreted.*: use variant='pipelined'"):
        tma_copy(h.randn(8, 8, dtype=torch.float16), "ring")


def test_the_reference_is_exact(h):
    x = h.randn(4, 8, dtype=torch.float16)
    assert torch.equal(reference(x).half(), x)
    h.check(functools.partial(tma_copy, variant="pointers"), reference, x, terms=0)


def test_the_answer_follows_from_the_times():
    def table(**ms):
        rows = [Row(name, name != "torch copy", None, 0, t, speedup=1 / t) for name, t in ms.items()]
        return Table("tma_copy", "a case", "torch copy", rows)

    times = {"torch copy": 1.0, "pointers": 1.0, "tile": 1.01, "persistent": 2.0, "ring": 1.0}
    text = answer([table(**times)], "ring", SHARED_LIMIT[90])
    assert "TMA is as fast as ordinary loads: 0.99x" in text
    assert text.endswith("with 48 KiB an SM it reaches 0.50x torch's copy, with 160 KiB (ring) 1.00x: as fast.")
    text = answer([table(**times | {"tile": 1.1, "ring": 1.1})], "ring", SHARED_LIMIT[120])
    assert "TMA is slower than ordinary loads: 0.91x" in text
    assert text.endswith("with 80 KiB (ring) 0.91x: still slower.")
