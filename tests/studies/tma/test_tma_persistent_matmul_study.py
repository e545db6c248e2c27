"""The studies of tma_persistent_matmul: descriptors made on the device, and words that follow from the times."""

import contextvars
from types import SimpleNamespace

from harness.bench import Row, Table
from harness.codegen import compile_for, dump

import pytest
import torch
import triton

from examples.common.device import SHARED_LIMIT, Limits
from examples.tma import tma_persistent_matmul_schedules as schedules
from examples.tma.tma_persistent_matmul import matmul_tma_persistent, reference
from studies.tma import tma_persistent_matmul as study
from studies.tma import tma_persistent_matmul_descriptors as descriptors
from studies.tma.tma_persistent_matmul_descriptors import ON_DEVICE, matmul_device_descriptors

every_place = pytest.mark.parametrize("where", ON_DEVICE)


def check(h, a, b, where):
    h.check(lambda a, b: matmul_device_descriptors(a, b, where), reference, a, b, terms=a.shape[1], what=where)


@every_place
def test_descriptors_of_the_device(h, where):
    a, w = h.randn(257, 72, dtype=h.half), h.randn(264, 72, dtype=h.half)
    for b in (w.t(), w.t().contiguous()):
        check(h, a, b, where)
    one_row = h.randn(1, 200, dtype=h.half)[:, :72].as_strided((1, 72), (5, 1))
    check(h, one_row, h.randn(72, 48, dtype=h.half)[:, :40], where)
    check(h, a[:, :0], w.t()[:0], where)
    with pytest.raises(ValueError, match=r"where 'host' is not one of \('program', 'tile'\)"):
        matmul_device_descriptors(a, w.t(), "host")


@every_place
def test_the_allocator_is_left_as_found(h, where):
    from triton.runtime._allocation import _allocator

    mine = lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=h.device)  # noqa: E731
    a, b = h.randn(130, 72, dtype=h.half), h.randn(72, 264, dtype=h.half)

    def outer():
        triton.set_allocator(mine)
        check(h, a, b, where)
        return _allocator.get()

    before = _allocator.get()
    assert contextvars.copy_context().run(outer) is mine
    check(h, a, b, where)
    assert _allocator.get() is before


@every_place
def test_who_writes_descriptors(where):
    x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(matmul_device_descriptors, (x, x, where), sms=(90,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    assert "tensormap.replace" in dump(matmul_device_descriptors, (x, x, where), sm=90)["ptx"]
    assert "tensormap.replace" not in dump(matmul_tma_persistent, (x, x), {"schedule": "split"}, sm=90)["ptx"]


@pytest.mark.gpu
def test_the_places_agree(h):
    a, b = h.randn(4000, 1000, dtype=torch.bfloat16), h.randn(1000, 5000, dtype=torch.bfloat16)
    first = matmul_tma_persistent(a, b, schedule="split")
    assert all(torch.equal(first, matmul_device_descriptors(a, b, where)) for where in ON_DEVICE for _ in range(10))


class Times:
    """A harness whose tables have made-up times: each variant takes 0.1 ms less than the one before."""

    def __init__(self):
        self.device, self.half, self.machine = torch.device("cpu"), torch.bfloat16, SimpleNamespace(sms=132)
        self.said, self.tables = [], {}
        self.say, self.table = self.said.append, self.tables.__setitem__

    def pick(self, interpreted, quick, full):
        return full

    def randn(self, *shape, dtype):
        return torch.empty(*shape, device="meta")

    meta = staticmethod(lambda *shape: torch.empty(*shape, device="meta"))

    def codegen(self, *args, **options):
        return []

    def compare(self, variants, *args, baseline, case, title, **options):
        ms = {name: 1.0 - 0.1 * i for i, name in enumerate(variants)}
        rows = [
            Row(name, name != baseline, None, 0, t, speedup=1 / t, enqueue_us=10.0 + i)
            for i, (name, t) in enumerate(ms.items())
        ]
        return Table(title, case, baseline, rows)


def test_what_is_said_follows_from_the_times(monkeypatch):
    """512 tiles on 132 SMs are 3.88 waves, paid as 4."""
    monkeypatch.setattr(schedules, "device_limits", lambda device: Limits(132, SHARED_LIMIT[90]))
    h = Times()
    study.compare_schedules(h, 4096, 4096, 4096)
    assert h.said == [
        "4096x4096x4096: the rule took late, 4 stages, groups of 8; 512 tiles of 128x256, 132 at a time, are 3.88 "
        "waves, paid as 4",
        "us of a wave: triton 225.00, tile 200.00, pair 175.00, whole 150.00, split 125.00, late 100.00",
    ]
    descriptors.compare_places(h, 4096, end_to_end=False)
    assert h.said[2] == (
        "4096x4096x4096, on the GPU, against descriptors of the host: made by each program -100.00 us, "
        "made for each tile -200.00 us over 4 tiles one after another"
    )
    descriptors.compare_places(h, 2048, end_to_end=True)
    (table,) = h.tables.values()
    assert table["host, each call"] == {"host": 11.0, "call": 900.0}
    assert table["host, prepared"] == {"host": 14.0, "call": 600.0}
    study.study(h)
    assert h.tables["over torch, schedules"]["triton"] == {"geometric mean": round(1 / 0.9, 4), "least": 1.1111}
    assert h.tables["over torch, b.t()"]["triton"]["least"] == 1.1111
    assert any("1024x1024x1024: the rule took tile, 6 stages" in line for line in h.said)
    assert any("fastest groups of 32; the rule takes 8" in line for line in h.said)
