"""tma_copy: every bit at every edge and none beside it, tiles and buffers, what each form compiles to, bad input."""

import functools
import math
from types import SimpleNamespace

from harness.catalog import Needs
from harness.check import CheckError
from harness.codegen import compile_for, dump
from harness.hardware import SHARED_LIMIT, Limits
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.tma import tma_copy as module
from examples.tma.tma_copy import (
    FORMS,
    PLANS,
    THROUGH_REGISTERS,
    TMA_FORMS,
    bits,
    copy_each,
    explain,
    lag,
    loads_under_way,
    make_plan,
    padded,
    reference,
    references,
    resources,
    rows_apart,
    runnable,
    show_depth,
    show_edges,
    show_tiles,
    tma_copy,
    up_to_16_bytes,
    with_padding,
    written,
)

# Nothing, one element, a prime, one tile plus one in each direction, more tiles than programs, one long row or column.
SHAPES = [(0, 8), (8, 0), (1, 1), (37, 53), (65, 128), (64, 129), (641, 261), (1, 3000), (1500, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(h, shape):
    h.check(copy_each, references, padded(h, *shape, torch.float16), terms=0)


def edges_hold(h, x, form, **options):
    """written() holds the inside and all beyond 16 bytes; what a store does with the rest of them is all or nothing."""
    found = written(x, form, **options)
    assert found.inside == x.numel()
    assert found.elsewhere == 0
    assert found.up_to_16_bytes in ((0,) if h.interpreted or form == "pointers" else (0, up_to_16_bytes(x)))


@given(M=st.integers(0, 200), N=st.integers(0, 300), form=st.sampled_from(runnable()), wide=st.booleans())
def test_any_shape_and_nothing_around_it(M, N, form, wide):
    h = Harness("test", Needs.parse("triton"))
    x = h.randn(M, N, dtype=torch.float32 if wide else torch.float16)
    edges_hold(h, x, form, margin=8)


@given(
    rows=st.sampled_from((8, 32, 128)),
    row_bytes=st.sampled_from((32, 128, 256)),
    form=st.sampled_from([form for form in runnable() if form in TMA_FORMS]),
    buffers=st.integers(1, 6),
    programs=st.integers(1, 3),
)
def test_any_tile_and_pipeline(rows, row_bytes, form, buffers, programs):
    h = Harness("test", Needs.parse("triton"))
    options = {"rows": rows, "row_bytes": row_bytes}
    if form in ("ahead", "ahead device", "ring"):
        options |= {"stages": buffers}
    if PLANS[form].programs:
        options |= {"programs": programs}
    edges_hold(h, h.randn(131, 97, dtype=torch.float16), form, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_arrive_as_they_are(h, dtype):
    """NaNs with their payload, both zeros, infinities, subnormals: a copy is not arithmetic."""
    whole, n = (torch.int16, 2**16) if dtype is torch.float16 else (torch.int32, 2**12)
    pattern = torch.arange(n, device=h.device) * (1 if n == 2**16 else 2**20 + 12345)
    x = pattern.to(whole).view(dtype).view(64, -1)
    assert x.isnan().any()
    for form in runnable():
        assert torch.equal(bits(tma_copy(x, form)), bits(x)), form


def test_a_check_that_can_fail(h, monkeypatch):
    """A store beyond 16 bytes, to another row, or by pointers to the very next element; a missing tile."""
    x = h.randn(40, 77, dtype=torch.float16)  # 3 elements short of 16 bytes

    def wider(by, below=0):
        def store(x, y, form, plan):
            y.as_strided((x.shape[0] + below, x.shape[1] + by), y.stride()).fill_(1.0)
            y.copy_(x)

        monkeypatch.setattr(module, "_launch", store)

    wider(0)
    assert written(x, "host") == (40 * 77, 0, 0)
    wider(3)
    assert written(x, "host") == (40 * 77, 40 * 3, 0)
    assert up_to_16_bytes(x) == 40 * 3
    with pytest.raises(CheckError, match=r"tma_copy pointers wrote outside .*up_to_16_bytes=120, elsewhere=0"):
        written(x, "pointers")
    wider(4)
    with pytest.raises(CheckError, match=r"tma_copy host wrote outside .*up_to_16_bytes=120, elsewhere=40"):
        written(x, "host")
    wider(0, below=1)
    with pytest.raises(CheckError, match="elsewhere=77"):
        written(x, "ring")
    with pytest.raises(CheckError, match="elsewhere=77"):
        show_edges(h, x)

    monkeypatch.setattr(module, "_launch", lambda x, y, form, plan: y[8:].copy_(x[8:]))
    with pytest.raises(CheckError, match=f"tma_copy host: {8 * 77} elements are not those of x"):
        written(x, "host")


def test_what_is_told_of_the_edges(h, monkeypatch):
    x = h.randn(5, 13, dtype=torch.float16)
    show_edges(h, x)
    table = h.record.facts["elements written by a copy of 5x13"]
    assert set(table) == set(runnable())
    assert table["pointers"] == {"inside": 65, "up_to_16_bytes": 0, "elsewhere": 0}
    assert table["host"]["up_to_16_bytes"] in ((0,) if h.interpreted else (0, 15))


@pytest.mark.parametrize("form", TMA_FORMS)
def test_an_out_that_tma_would_leave(h, form):
    """Refused everywhere, though the interpreter stops at the element; pointers take it."""
    x, memory = padded(h, 4, 13, torch.float16), torch.zeros(4, 24, dtype=torch.float16, device=h.device)
    with pytest.raises(ValueError, match=r"tma_copy: rows of out are 26 bytes long, .*form='pointers'"):
        tma_copy(x, form, out=memory[:, :13])
    assert not memory.any()
    tma_copy(x, "pointers", out=memory[:, :13])
    assert torch.equal(memory[:, :13], x)
    assert not memory[:, 13:].any()


def test_out_is_written_and_returned(h):
    x = h.randn(70, 136, dtype=torch.float16)[:, :120]
    for form in runnable():
        out = torch.full((70, 128), math.nan, dtype=x.dtype, device=x.device)[:, :120]
        assert tma_copy(x, form, out=out) is out
        assert torch.equal(out, x), form


def test_rows_of_any_stride(h):
    """Pointers take rows that TMA cannot; a single row or column may have any stride."""
    x = h.randn(20, 33, dtype=torch.float16)[:, 1:24]
    assert torch.equal(tma_copy(x, "pointers"), x)
    with pytest.raises(ValueError, match="tma_copy: x has shape"):
        tma_copy(x, "host")
    row, column = h.randn(1, 13, dtype=torch.float16), h.randn(40, 8, dtype=torch.float16)[:, :1]
    for form in runnable():
        assert torch.equal(tma_copy(row, form), row)
        assert torch.equal(tma_copy(column, form), column)


def test_the_allocator_is_left_as_found(h):
    from triton.runtime._allocation import _allocator

    before = _allocator.get()
    tma_copy(h.randn(8, 8, dtype=torch.float16), "device")
    tma_copy(h.randn(8, 8, dtype=torch.float16), "ahead device")
    assert _allocator.get() is before


def test_padding_belongs_to_the_copy(h):
    x = padded(h, 5, 13, torch.float16)
    assert (x.shape, x.stride(), with_padding(x).shape) == ((5, 13), (16, 1), (5, 16))
    assert with_padding(x)[:, 13:].isnan().all()
    assert not x.isnan().any()
    assert rows_apart(x).stride() == (16, 1)


@pytest.mark.gpu
def test_more_than_2_31_elements(h):
    n = h.fit(2**16, bytes_each=2**15 * 8)
    if n < 2**16:
        pytest.skip("needs 16 GiB of GPU memory")
    x = torch.randint(-(2**15), 2**15, (2**16 + 1, 2**15), dtype=torch.int16, device=h.device).view(torch.float16)
    for form in FORMS:
        assert torch.equal(tma_copy(x, form).view(torch.int16), x.view(torch.int16)), form


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_repeated_calls_are_equal(h, form):
    """Also where buffers are used again thousands of times: a load that overtakes a store would show."""
    x = h.randint(2**15, 4096, 4096).to(torch.int16).view(torch.float16)
    for _ in range(20):
        assert torch.equal(bits(tma_copy(x, form)), bits(x))


@pytest.mark.gpu
@pytest.mark.parametrize("stages", range(1, 13))
def test_every_depth_of_the_ring(h, stages):
    x = h.randint(2**15, 2003, 3001).to(torch.int16).view(torch.float16)
    edges_hold(h, x, "ring", stages=stages, programs=1)


@pytest.mark.gpu
@pytest.mark.parametrize("form", TMA_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_where_a_store_ends(h, form, dtype):
    """All of each last 16 bytes of a row or none of what is left of it, in each form and width."""
    for N in range(197, 212):
        edges_hold(h, h.randn(67, N, dtype=dtype), form)


META = torch.empty(8192, 8192, dtype=torch.float16, device="meta")


@pytest.mark.parametrize("sm", [90, 100, 120])
def test_every_tma_form_compiles_to_tma(sm):
    kernels = compile_for(copy_each, (META,), sms=(sm,))
    assert [kernel.error for kernel in kernels] == [None] * len(FORMS)
    for form, kernel in zip(FORMS, kernels, strict=True):
        assert bool(kernel.found.get("cp.async.bulk.tensor")) == (form in TMA_FORMS), form
        assert bool(kernel.found.get("ld.global.v4")) == (form == "pointers"), form
        assert (kernel.spills, kernel.fits) == (0, True), form
        assert kernel.warps == PLANS[form].warps


@pytest.mark.parametrize("sm", [80, 89])
def test_without_tma(sm):
    """Triton turns descriptors back into pointers; Gluon says what it is told, so the wrapper refuses."""
    (ring,) = compile_for(tma_copy, (META,), sms=(sm,))
    assert (
        ring.error
        == f"RuntimeError: tma_copy: form 'ring' issues TMA itself, which comes with sm_90, and this is sm_{sm}"
    )
    (host,) = compile_for(tma_copy, (META, "host"), sms=(sm,))
    assert host.error is None
    assert not host.found.get("cp.async.bulk.tensor")


def test_a_row_of_the_ring_is_one_box():
    """Without a swizzle a tile's row of 256 values is one request; swizzled it would be four of 128 bytes."""
    ptx = dump(tma_copy, (META, "ring"), sm=90)["ptx"]
    plan = PLANS["ring"]
    # STAGES - LAG loads before the loop, one in it, and one store.
    assert ptx.count("cp.async.bulk.tensor") == loads_under_way("ring", plan) + 2
    assert plan.row_bytes // META.element_size() == 256


@pytest.mark.parametrize("form", ["host", "ahead", "ring"])
def test_who_takes_the_way_through_registers(form):
    ptx = dump(tma_copy, (META, form), sm=90)["ptx"]
    assert bool(THROUGH_REGISTERS.findall(ptx)) == (form == "ahead")


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
    assert loads_under_way("ring", PLANS["ring"]._replace(stages=6)) == 5
    assert loads_under_way("ahead", PLANS["ahead"]._replace(stages=4)) == 3
    assert loads_under_way("host", PLANS["host"]) == loads_under_way("walk", PLANS["walk"]) == 1


def test_programs_that_an_sm_cannot_hold_are_not_launched(h, monkeypatch):
    """99 KiB hold one ring of 96: a second program would wait for the first to end."""
    grids = []
    x = torch.zeros(2048, 2048, dtype=torch.float16, device=h.device)
    for limit in (SHARED_LIMIT[120], SHARED_LIMIT[90]):
        monkeypatch.setattr(module, "device_limits", lambda device, limit=limit: Limits(10, limit))
        kernel = type("K", (), {"__getitem__": lambda self, grid: lambda *a, **k: grids.append(grid)})()
        monkeypatch.setattr(module, "copy_walk_kernel", kernel)
        tma_copy(x, "ahead", stages=6, programs=2)
    assert grids == [(10,), (20,)]


def table_of(ms, x, case="a case"):
    rows = [
        SimpleNamespace(variant=name, ms=t, tbps=2 * x.nbytes / t / 1e9, of_ceiling=t / 2) for name, t in ms.items()
    ]
    return SimpleNamespace(rows=rows, case=case)


@pytest.fixture
def told(monkeypatch):
    """A harness of an imagined GPU of 100 SMs that holds eight programs of each form, and what it was told."""
    said, tables = [], {}
    h = SimpleNamespace(
        device="cuda", machine=SimpleNamespace(sms=100, sm=90), say=said.append, table=tables.__setitem__
    )  # fmt: skip
    have = SimpleNamespace(max_threads_per_multi_processor=2048, shared_memory_per_multiprocessor=8 * 17 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: have)
    monkeypatch.setattr(module, "resources", lambda form, sm, **options: (32, 16 * 1024))
    monkeypatch.setattr(module, "runnable", lambda: FORMS)
    return h, said, tables


def test_where_the_time_goes_follows_from_the_times(told):
    h, said, tables = told
    x = torch.empty(6400, 12800, dtype=torch.float16, device="meta")  # 200 x 50 tiles: 100 for each SM
    ms = {"torch copy": 0.1} | {f"triton {form}": 0.1 * (i + 1) for i, form in enumerate(FORMS)}
    explain(h, x, table_of(ms, x))
    (table,) = tables.values()
    assert table["host"]["programs on an SM"] == 8
    assert table["host"]["KiB of loads under way"] == 8 * 16
    assert table["host"]["ns of a program for a tile"] == round(0.2e6 * 8 / 100)
    assert table["ring"]["KiB of loads under way"] == PLANS["ring"].programs * 5 * 16
    assert "TMA at 0.500x the speed of pointers" in said[0]
    assert "cost +8000 ns on 16000; made once" in said[0]
    assert said[2] == "best by TMA: host, 0.100 of the copy ceiling; pointers 0.050, torch 0.050"


def test_what_the_depths_say_follows_from_the_times(told, monkeypatch):
    h, said, tables = told
    x = torch.empty(1000, 1000, dtype=torch.float16, device="meta")
    # 16, 32 and 64 KiB under way at 1, 2 and 2.02 TB/s.
    ms = {"torch copy": 1.0, "triton ring 1 x 1": 4e-3, "triton ring 1 x 2": 2e-3, "triton ring 5 x 1": 4e-3 / 2.02}
    monkeypatch.setattr(module, "compare", lambda *args: table_of(ms, x))
    show_depth(h, x, [(1, 1), (1, 2), (5, 1)])
    (table,) = tables.values()
    assert [row["KiB of loads under way"] for row in table.values()] == [16, 32, 64]
    assert [row["ns a load takes"] for row in table.values()] == [3277, 3277, 6489]
    assert said == [
        "16 KiB under way give 1.00 TB/s, 32 KiB are within 3 % of the most, 2.02; with the shortest wait here, "
        "3277 ns, Little's law asks for 32 KiB"
    ]


def test_what_the_tiles_say_follows_from_the_times(told, monkeypatch):
    h, said, tables = told
    x = torch.empty(1000, 1000, dtype=torch.float16, device="meta")

    def compare(h, x, variants, case):
        return table_of({name: 1e-3 * (1 + i) for i, name in enumerate(variants)}, x)

    monkeypatch.setattr(module, "compare", compare)
    show_tiles(h, x, [(128, 128), (64, 256)])
    (table,) = tables.values()
    assert list(table) == ["pointers", "host", "ring"]
    assert said[0] == "pointers: best with 128 x 128 B, worst with 64 x 256 B: 1.50x"


def test_resources_are_those_compiled():
    registers, shared = resources("ring", 90, stages=2, programs=1)
    assert 0 < registers < 64
    assert 2 * 16384 <= shared <= 2 * 16384 + 64


def _bad(device):
    x = torch.randn(16, 32, device=device).half()
    flat = torch.zeros(1000, dtype=torch.float16, device=device)
    shared = torch.zeros(32, 32, dtype=torch.float16, device=device)
    return {
        "no tensor": (([1.0],), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((x.int(),), {}, TypeError, r"dtype torch\.int32 is not one of"),
        "a vector": ((x[0],), {}, ValueError, r"need a matrix \[M, N\], got shape \(32,\)"),
        "transposed": ((x.t(),), {}, ValueError, r"strides \(1, 32\); the columns must be adjacent"),
        "no form": ((x, "fast"), {}, ValueError, r"form 'fast' is not one of \('pointers', "),
        "a form in numbers": ((x, 3), {}, ValueError, "form 3 is not one of"),
        "unaligned start": ((flat[1:513].view(16, 32), "host"), {}, ValueError, "x has .* starts 2 bytes past"),
        "unaligned rows": ((flat[:480].view(16, 30), "host"), {}, ValueError, r"x has .* strides \(30, 1\)"),
        "one row for all": ((x[:1].expand(4, 32), "host"), {}, ValueError, r"x has .* strides \(0, 1\)"),
        "unaligned out": (
            (x, "host"), {"out": flat[1:513].view(16, 32)}, ValueError, "out has .* starts 2 bytes past"
        ),
        "out of another shape": ((x,), {"out": flat[:256].view(8, 32)}, ValueError, r"out is .*\(8, 32\); x is"),
        "out of another dtype": ((x,), {"out": x.float()}, ValueError, r"out is torch\.float32"),
        "out transposed": (
            (x[:, :16],), {"out": torch.zeros(16, 16, device=device).half().t()}, ValueError, "out has strides"
        ),
        "out of one row": ((x,), {"out": flat[:32].expand(16, 32)}, ValueError, r"out has strides \(0, 1\)"),
        "out in x": ((shared[:16],), {"out": shared[16:]}, ValueError, "out lies in the storage of x"),
        "out is no tensor": ((x,), {"out": 3}, TypeError, "got int"),
        "rows of 48": ((x, "host"), {"rows": 48}, ValueError, "rows is 48; pass a power of two"),
        "rows of 512": ((x, "host"), {"rows": 512}, ValueError, "rows is 512; pass an int from 8 to 256"),
        "row bytes in floats": ((x, "host"), {"row_bytes": 64.0}, ValueError, r"row_bytes is 64\.0; pass an int"),
        "no stages": ((x, "ahead"), {"stages": 0}, ValueError, "stages is 0; pass an int from 1 to 64"),
        "true stages": ((x, "ahead"), {"stages": True}, ValueError, "stages is True"),
        "stages that wait": ((x, "walk"), {"stages": 3}, ValueError, "form 'walk' has no loads ahead"),
        "programs for tiles": ((x, "host"), {"programs": 3}, ValueError, "form 'host' has one for each tile"),
        "too much shared memory": (
            (x, "ahead"), {"stages": 20}, ValueError, "20 tiles of 32 rows x 512 bytes take 328000 bytes"
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
    with pytest.raises(RuntimeError, match="form 'ring' is Gluon, which has no interpreter; take 'ahead' here"):
        tma_copy(h.randn(8, 8, dtype=torch.float16), "ring")


def test_the_reference_is_exact(h):
    x = h.randn(4, 8, dtype=torch.float16)
    assert torch.equal(reference(x).half(), x)
    h.check(functools.partial(tma_copy, form="pointers"), reference, x, terms=0)
