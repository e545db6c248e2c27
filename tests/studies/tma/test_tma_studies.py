"""What the TMA studies compute: counts of code, bytes in flight, descriptors made by programs."""

import functools
from types import SimpleNamespace

from harness.bench import Row, Table
from harness.codegen import CodegenError, Kernel, dump

import pytest
import torch

from examples.tma.tma_persistent_matmul import reference
from studies.tma import blackwell, tma_copy, what_is_tma
from studies.tma import tma_persistent_matmul as persistent
from studies.tma.tma_persistent_matmul import PLACES, matmul_device_descriptors


def test_blackwell_counts(h, monkeypatch):
    kernel = Kernel("k", 100, {"tcgen05.mma": 4, "tcgen05.ld": 1}, 168, 0, 2048, 4096, 12, tensor_memory=512)
    cells = blackwell.cells(kernel)
    assert [cells[name] for name in ("registers", "shared KiB", "tensor memory")] == [168, 2.0, 512]
    assert blackwell.cells(Kernel("k", 90, error="E: k: no; use l")) == {"code": "not supported: no"}
    few = lambda sm: Kernel("k", sm, {}, 1, 0, 1, 1, 8, tensor_memory=256)  # noqa: E731
    monkeypatch.setattr(h, "codegen", lambda *args, find, **options: [few(sm) for sm in find])
    with pytest.raises(CodegenError, match="by hand: 512 columns counted, 256 taken"):
        blackwell.show_code(h)


def test_tma_copy_says_how_many_bytes_in_flight_saturate_memory(monkeypatch):
    """16, 80 and 160 KiB in flight at 1, 2 and 2.02 TB/s."""
    said, tables = [], {}
    machine = SimpleNamespace(sms=100, sm=90)
    h = SimpleNamespace(device=torch.device("cpu"), machine=machine, say=said.append, table=tables.__setitem__)
    rows = [Row(f"ring {n}", True, None, 0, 1.0, tbps=t) for n, t in (("1 x 1", 1.0), ("6 x 1", 2.0), ("6 x 2", 2.02))]
    monkeypatch.setattr(tma_copy, "compare", lambda *args, **options: Table("t", "a case", "torch copy", rows))
    monkeypatch.setattr(tma_copy, "DEPTHS", [(1, 1), (6, 1), (6, 2)])
    tma_copy.show_depth(h, None)
    (table,) = tables.values()
    assert [row["KiB of loads in flight"] for row in table.values()] == [16, 80, 160]
    assert table["ring 1 x 1"]["ns a load takes"] == round(100 * 16 * 1024 / 500)
    assert "80 KiB in flight are within 3 % of the most, 2.02" in said[0]


def test_descriptors_of_the_device(h):
    a, w = h.randn(257, 72, dtype=h.half), h.randn(264, 72, dtype=h.half)
    one_row = h.randn(1, 200, dtype=h.half)[:, :72].as_strided((1, 72), (5, 1))
    for where in PLACES.values():
        for x, b in ((a, w.t()), (a, w.t().contiguous()), (one_row, w.t()[:, :40])):
            fn = functools.partial(matmul_device_descriptors, where=where)
            h.check(fn, reference, x, b, terms=x.shape[1], what=where)


@pytest.mark.parametrize("columns", [False, True])
def test_a_descriptor_for_each_tile_is_made_in_the_loop(columns):
    """One that is alike for all tiles would be moved out of it, and cost what one made once does."""
    a, b = torch.empty(8192, 512, device="meta", dtype=torch.float16), torch.empty(512, 8192, device="meta")
    b = b.half().t().contiguous().t() if columns else b.half()
    for where, in_the_loop in (("program", 0), ("tile", 3)):
        lines = dump(matmul_device_descriptors, (a, b, where), sm=90)["ttir"].splitlines()
        loop = next(i for i, line in enumerate(lines) if "scf.for" in line)
        made = [i for i, line in enumerate(lines) if "tt.make_tensor_descriptor" in line]
        assert (len(made), sum(i > loop for i in made)) == (3, in_the_loop), where


def test_what_a_descriptor_for_each_tile_costs_is_told_for_each_tile(monkeypatch):
    """2048 tiles on 132 SMs are 15.5 for each: of 29 us more, 2 for each after the first."""
    said, us = [], {"cuBLAS": 100, "host, each call": 100, "program, once": 103, "program, each tile": 132}
    rows = [Row(name, True, None, 0, t / 1000, speedup=100 / t) for name, t in {**us, "host, prepared": 100}.items()]
    table = Table("descriptors", "a case", "cuBLAS", rows)
    monkeypatch.setattr(persistent, "compare", lambda *args, **options: table)
    monkeypatch.setattr(persistent, "plan", lambda *_: SimpleNamespace(block_m=128, block_n=256, programs=132))
    persistent.compare_places(SimpleNamespace(device=None, say=said.append), persistent.MANY_TILES, end_to_end=False)
    assert "15.5 tiles a program" in said[0]
    assert "+3.0 us a call" in said[0]
    assert "+29.0 us over once, +2.00 us for each further tile (0.78x" in said[0]


def test_what_both_hints_save_is_told():
    us = {"no hint": 12.0, "evict_first": 11.0, "evict_last": 12.5, "at once": 10.0}
    told = what_is_tma.hints(us)
    assert "11.0 us after evict_first (50% of what there is to save)" in told
    assert "12.5 us after evict_last (nothing saved)" in told
