"""What the TMA studies compute: counts of code, places in shared memory, ratios; what they say follows from times."""

import functools
from types import SimpleNamespace

from harness.bench import Row, Table
from harness.check import CheckError
from harness.codegen import CodegenError, Kernel

import pytest
import torch
import triton.experimental.gluon.language as gl
from hypothesis import given
from hypothesis import strategies as st

from examples.tma.tma_persistent_matmul import reference
from studies.tma import blackwell, gluon_matmul, tma_copy, tma_copy_edges
from studies.tma.tma_copy_edges import up_to_16_bytes, written
from studies.tma.tma_matmul import gains, judge_claim, loop_of
from studies.tma.tma_persistent_matmul_descriptors import ON_DEVICE, matmul_device_descriptors
from studies.tma.what_is_tma import machine_code


def table_of(ms, case="4096"):
    """The first is the baseline."""
    base, *_ = ms
    rows = [Row(name, name != base, None, 0, t, speedup=ms[base] / t, peer="triton" in name) for name, t in ms.items()]
    return Table("a table", case, base, rows)


def test_blackwell_counts(h, monkeypatch):
    kernel = Kernel("k", 100, {"tcgen05.mma": 4, "tcgen05.ld": 1}, 168, 0, 2048, 4096, 12, tensor_memory=512)
    cells = blackwell.cells(kernel)
    assert [cells[name] for name in ("registers", "shared KiB", "tensor memory")] == [168, 2.0, 512]
    assert blackwell.cells(Kernel("k", 90, error="E: k: no; use l")) == {"code": "not supported: no"}
    few = lambda sm: Kernel("k", sm, {}, 1, 0, 1, 1, 8, tensor_memory=256)  # noqa: E731
    monkeypatch.setattr(h, "codegen", lambda *args, find, **options: [few(sm) for sm in find])
    with pytest.raises(CodegenError, match="by hand: 512 columns counted, 256 taken"):
        blackwell.show_code(h)


@given(rows=st.sampled_from([8, 64, 128]), columns=st.sampled_from([16, 32, 64, 128, 256]))
def test_no_two_elements_share_a_byte(rows, columns):
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    taken = {gluon_matmul.shared_byte(layout, rows, r, c) for r in range(rows) for c in range(columns)}
    assert taken == set(range(0, 2 * rows * columns, 2))


def test_gluon_operations_are_counted_as_written():
    counts = gluon_matmul.operations("""
      %0 = ttng.warp_group_dot %a, %b {x}   %1 = ttng.warp_group_dot_wait %0
      ttg.warp_specialize(%1) default { } partition0(%x) num_warps(4) { } partition1(%x) num_warps(1) { }
      %2 = ttg.local_alloc : () -> x   ttng.barrier_expect %2   ttng.async_tma_copy_global_to_local %2
    """)
    nonzero = {"MMAs": 1, "MMA waits": 1, "partitions": 3, "buffers": 1, "expects": 1, "loads": 1}
    assert {name: n for name, n in counts.items() if n} == nonzero


def test_what_a_copy_writes_beside_its_output_is_seen(h, monkeypatch):
    """A store beyond 16 bytes, to another row, or by pointers to the very next element; a missing tile."""
    x = h.randn(40, 77, dtype=torch.float16)  # 3 elements short of 16 bytes

    def wider(by, below=0):
        def store(x, y, variant, plan):
            y.as_strided((x.shape[0] + below, x.shape[1] + by), y.stride()).fill_(1.0)
            y.copy_(x)

        monkeypatch.setattr(tma_copy_edges, "launch_copy", store)

    wider(3)
    assert written(x, "tile") == (40 * 77, up_to_16_bytes(x), 0) == (40 * 77, 40 * 3, 0)
    for variant, more in [("pointers", (3, 0)), ("tile", (4, 0)), ("ring", (0, 1))]:
        wider(*more)
        with pytest.raises(CheckError, match=f"tma_copy {variant} wrote outside"):
            written(x, variant)
    monkeypatch.setattr(tma_copy_edges, "launch_copy", lambda x, y, variant, plan: y[8:].copy_(x[8:]))
    with pytest.raises(CheckError, match=f"tma_copy tile: {8 * 77} elements are not those of x"):
        written(x, "tile")


def test_tma_copy_says_how_many_bytes_in_flight_saturate_memory(monkeypatch):
    said, tables, x = [], {}, torch.empty(1000, 1000, dtype=torch.float16, device="meta")
    machine = SimpleNamespace(sms=100, sm=90)
    h = SimpleNamespace(device="cuda", machine=machine, say=said.append, table=tables.__setitem__)
    # 16, 32 and 64 KiB in flight at 1, 2 and 2.02 TB/s.
    ms = {"torch copy": 1.0, "ring 1 x 1": 4e-3, "ring 1 x 2": 2e-3, "ring 5 x 1": 4e-3 / 2.02}
    rows = [Row(v, True, None, 0, t, tbps=2 * x.nbytes / t / 1e9) for v, t in ms.items()]
    monkeypatch.setattr(tma_copy, "compare", lambda *args, **options: Table("t", "a case", "torch copy", rows))
    monkeypatch.setattr(tma_copy, "resources", lambda variant, plan, sm: (32, 16 * 1024))
    monkeypatch.setattr(tma_copy, "runnable", lambda: ("ring",))
    have = SimpleNamespace(max_threads_per_multi_processor=2048, shared_memory_per_multiprocessor=8 * 17 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: have)
    tma_copy.show_depth(h, x, [(1, 1), (1, 2), (5, 1)])
    (table,) = tables.values()
    assert [row["KiB of loads in flight"] for row in table.values()] == [16, 32, 64]
    assert [row["ns a load takes"] for row in table.values()] == [3277, 3277, 6489]
    assert "32 KiB are within 3 % of the most" in said[0]


def test_tma_matmul_counts_and_ratios():
    sass = "\n".join(
        ("--:-:-:-:1\tHGMMA.64x8 R1;", "OUTER:", "--:-:-:-:1\tMOV R1, R2;", "INNER:", "--:-:-:-:1\t@P0 IADD3.X R1;",
         "--:-:-:-:1\tHGMMA.64x8 R1;", "--:-:-:-:5\t@!P0 BRA INNER;", "--:-:-:-:5\t@P1 BRA OUTER;",
         "LAST:", "--:-:-:-:1\tNOP;", "--:-:-:-:5\tBRA LAST;")
    )  # fmt: skip
    assert loop_of(sass) == {"IADD3": 1, "HGMMA": 1, "BRA": 1}
    table = table_of({"cuBLAS": 1.0, "pointers": 1 / 0.8, "loads": 1.0, "store": 1 / 0.9, "parts": 1 / 0.9})
    assert gains(table) == {"loads": 1.25, "store": 0.9, "parts": 1.0}
    assert "1 are within" in judge_claim([0.98, 1.04, 1.25, 1.5])


def test_descriptors_of_the_device(h):
    a, w = h.randn(257, 72, dtype=h.half), h.randn(264, 72, dtype=h.half)
    one_row = h.randn(1, 200, dtype=h.half)[:, :72].as_strided((1, 72), (5, 1))
    for where in ON_DEVICE:
        for x, b in ((a, w.t()), (a, w.t().contiguous()), (one_row, w.t()[:, :40]), (a[:, :0], w.t()[:0])):
            fn = functools.partial(matmul_device_descriptors, where=where)
            h.check(fn, reference, x, b, terms=x.shape[1], what=where)


def test_what_is_tma_reads_code():
    sass = (
        "Function:k\n--:-:1:-:8\tLDC R1, c[0x0];\n--:-:-:-:1\t@!P1 LDG.E.128 R4, desc[UR4];\nLBB0:\n--:-:-:-:0\tNOP;\n"
    )
    assert machine_code(sass + "--:-:-:-:5\t@P0 EXIT;\n") == {"LDC": 1, "LDG.E.128": 1, "EXIT": 1}
