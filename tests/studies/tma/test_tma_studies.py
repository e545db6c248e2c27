"""What the TMA studies compute: counts of code, bytes in flight, descriptors made by programs."""

import functools
from types import SimpleNamespace

from harness.bench import Row, Table
from harness.codegen import CodegenError, Kernel

import pytest
import torch

from examples.tma.tma_persistent_matmul import reference
from studies.tma import blackwell, tma_copy
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
