"""Study of tma_copy: what a copy writes is counted, a check can fail, and what is said follows from the times."""

from types import SimpleNamespace

from harness.check import CheckError
from harness.codegen import dump

import pytest
import torch

from examples.tma.tma_copy import VARIANTS, rows_apart, runnable, tma_copy
from examples.tma.tma_copy_triton import PLANS
from studies.tma import tma_copy as study
from studies.tma import tma_copy_edges as edges
from studies.tma.tma_copy import THROUGH_REGISTERS, explain, resources, show_depth, show_tiles
from studies.tma.tma_copy_edges import padded, show_edges, up_to_16_bytes, with_padding, written

META = torch.empty(8192, 8192, dtype=torch.float16, device="meta")


def test_a_check_that_can_fail(h, monkeypatch):
    """A store beyond 16 bytes, to another row, or by pointers to the very next element; a missing tile."""
    x = h.randn(40, 77, dtype=torch.float16)  # 3 elements short of 16 bytes

    def wider(by, below=0):
        def store(x, y, variant, plan):
            y.as_strided((x.shape[0] + below, x.shape[1] + by), y.stride()).fill_(1.0)
            y.copy_(x)

        monkeypatch.setattr(edges, "launch_copy", store)

    wider(0)
    assert written(x, "tile") == (40 * 77, 0, 0)
    wider(3)
    assert written(x, "tile") == (40 * 77, 40 * 3, 0)
    assert up_to_16_bytes(x) == 40 * 3
    with pytest.raises(CheckError, match=r"tma_copy pointers wrote outside .*up_to_16_bytes=120, elsewhere=0"):
        written(x, "pointers")
    wider(4)
    with pytest.raises(CheckError, match=r"tma_copy tile wrote outside .*up_to_16_bytes=120, elsewhere=40"):
        written(x, "tile")
    wider(0, below=1)
    with pytest.raises(CheckError, match="elsewhere=77"):
        written(x, "ring")
    with pytest.raises(CheckError, match="elsewhere=77"):
        show_edges(h, x)

    monkeypatch.setattr(edges, "launch_copy", lambda x, y, variant, plan: y[8:].copy_(x[8:]))
    with pytest.raises(CheckError, match=f"tma_copy tile: {8 * 77} elements are not those of x"):
        written(x, "tile")


def test_what_is_told_of_the_edges(h, monkeypatch):
    x = h.randn(5, 13, dtype=torch.float16)
    show_edges(h, x)
    table = h.record.facts["elements written by a copy of 5x13"]
    assert set(table) == set(runnable())
    assert table["pointers"] == {"inside": 65, "up_to_16_bytes": 0, "elsewhere": 0}
    assert table["tile"]["up_to_16_bytes"] in ((0,) if h.interpreted else (0, 15))


def test_padding_belongs_to_the_copy(h):
    x = padded(h, 5, 13, torch.float16)
    assert (x.shape, x.stride(), with_padding(x).shape) == ((5, 13), (16, 1), (5, 16))
    assert with_padding(x)[:, 13:].isnan().all()
    assert not x.isnan().any()
    assert rows_apart(x).stride() == (16, 1)


@pytest.mark.parametrize("variant", ["tile", "pipelined", "ring"])
def test_which_tiles_go_through_registers(variant):
    ptx = dump(tma_copy, (META, variant), sm=90)["ptx"]
    assert bool(THROUGH_REGISTERS.findall(ptx)) == (variant == "pipelined")


def table_of(ms, x, case="a case"):
    rows = [
        SimpleNamespace(variant=name, ms=t, tbps=2 * x.nbytes / t / 1e9, of_ceiling=t / 2) for name, t in ms.items()
    ]
    return SimpleNamespace(rows=rows, case=case)


@pytest.fixture
def told(monkeypatch):
    """A harness of an imagined GPU of 100 SMs that holds eight programs of each variant, and what it was told."""
    said, tables = [], {}
    h = SimpleNamespace(
        device="cuda", machine=SimpleNamespace(sms=100, sm=90), say=said.append, table=tables.__setitem__
    )  # fmt: skip
    have = SimpleNamespace(max_threads_per_multi_processor=2048, shared_memory_per_multiprocessor=8 * 17 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: have)
    monkeypatch.setattr(study, "resources", lambda variant, sm, **options: (32, 16 * 1024))
    monkeypatch.setattr(study, "runnable", lambda: VARIANTS)
    return h, said, tables


def test_where_the_time_goes_follows_from_the_times(told):
    h, said, tables = told
    x = torch.empty(6400, 12800, dtype=torch.float16, device="meta")  # 200 x 50 tiles: 100 for each SM
    ms = {"torch copy": 0.1} | {variant: 0.1 * (i + 1) for i, variant in enumerate(VARIANTS)}
    explain(h, x, table_of(ms, x))
    (table,) = tables.values()
    assert table["tile"]["programs on an SM"] == 8
    assert table["tile"]["KiB of loads in flight"] == 8 * 16
    assert table["tile"]["ns of a program for a tile"] == round(0.2e6 * 8 / 100)
    assert table["ring"]["KiB of loads in flight"] == PLANS["ring"].programs * 5 * 16
    assert "TMA at 0.500x the speed of pointers" in said[0]
    assert "cost +8000 ns on 16000; made once" in said[0]
    assert said[2] == "best by TMA: tile, 0.100 of the copy ceiling; pointers 0.050, torch 0.050"


def test_what_the_depths_say_follows_from_the_times(told, monkeypatch):
    h, said, tables = told
    x = torch.empty(1000, 1000, dtype=torch.float16, device="meta")
    # 16, 32 and 64 KiB in flight at 1, 2 and 2.02 TB/s.
    ms = {"torch copy": 1.0, "ring 1 x 1": 4e-3, "ring 1 x 2": 2e-3, "ring 5 x 1": 4e-3 / 2.02}
    monkeypatch.setattr(study, "compare", lambda *args, **options: table_of(ms, x))
    show_depth(h, x, [(1, 1), (1, 2), (5, 1)])
    (table,) = tables.values()
    assert [row["KiB of loads in flight"] for row in table.values()] == [16, 32, 64]
    assert [row["ns a load takes"] for row in table.values()] == [3277, 3277, 6489]
    assert said == [
        "16 KiB in flight give 1.00 TB/s, 32 KiB are within 3 % of the most, 2.02; with the shortest latency "
        "here, 3277 ns, Little's law asks for 32 KiB"
    ]


def test_what_the_tiles_say_follows_from_the_times(told, monkeypatch):
    h, said, tables = told
    x = torch.empty(1000, 1000, dtype=torch.float16, device="meta")

    def compare(h, x, variants, title):
        return table_of({name: 1e-3 * (1 + i) for i, name in enumerate(variants)}, x)

    monkeypatch.setattr(study, "compare", compare)
    show_tiles(h, x, [(128, 128), (64, 256)])
    (table,) = tables.values()
    assert list(table) == ["pointers", "tile", "ring"]
    assert said[0] == "pointers: best with 128 x 128 B, worst with 64 x 256 B: 2.00x"


def test_resources_are_those_compiled():
    registers, shared = resources("ring", 90, stages=2, programs=1)
    assert 0 < registers < 64
    assert 2 * 16384 <= shared <= 2 * 16384 + 64
