"""Study of blackwell: what the code of every kernel must hold, counted columns, its table, means over the cases."""

from harness import hardware
from harness.bench import Row, Table
from harness.catalog import Needs
from harness.codegen import CodegenError, Kernel
from harness.session import Harness

import pytest

from examples.common.fp8 import E4M3
from examples.tma.blackwell_plan import COLUMNS, FIND
from examples.tma.blackwell_scaled import FORMATS
from studies.tma import blackwell as study


@pytest.fixture(scope="module")
def code():
    """What the study compiles, once for all of these tests, and its record."""
    from rich.console import Console

    h = Harness("test", Needs.parse("triton"), console=Console(quiet=True))
    return study.show_code(h), h.record


def test_code(code):
    kernels, record = code
    half = "float16" if hardware.machine().mode == "interpreted" else "bfloat16"
    compiled = 0
    for variant, find in FIND.items():
        for dtype in (half, "e4m3"):
            for sm, wanted in find.items():
                kernel = kernels.get(f"{variant} {dtype}, sm_{sm}")
                if kernel is None and dtype == "e4m3":
                    continue
                if not wanted:
                    assert kernel.error.startswith("RuntimeError: blackwell_matmul: "), kernel
                    shown = record.facts["what becomes of each kernel"][f"{variant} {dtype}, sm_{sm}"]["code"]
                    what = (
                        "TMA comes with sm_90" if sm < 90 else "tcgen05 and tensor memory come with sm_100 and sm_103"
                    )
                    assert shown == f"not supported: {what} (this is sm_{sm})"
                    continue
                compiled += 1
                assert not kernel.error, kernel
                assert all(kernel.found.get(name) for name in wanted), kernel
                assert kernel.spills == 0, kernel
                assert kernel.fits, kernel
                assert bool(kernel.found.get("mma f8")) == (dtype == "e4m3"), kernel
                assert kernel.tensor_memory == (COLUMNS if sm in (100, 103) else None), kernel
                assert not {"wgmma", "mma.sync", "tcgen05.mma"} - set(wanted) & set(kernel.found), kernel
                partitions = variant == "by hand" or (variant == "specialized" and sm != 90)
                assert bool(kernel.found.get("setmaxnreg")) == partitions, kernel
    assert compiled == 14


def test_scaled_code(code):
    kernels, record = code
    for fmt, form in FORMATS.items():
        assert all(
            "RuntimeError: blackwell_mx_matmul: tcgen05" in kernels[f"scaled {fmt}, sm_{sm}"].error for sm in (90, 120)
        )
        for sm in (100, 103):
            kernel = kernels[f"scaled {fmt}, sm_{sm}"]
            for name in ("block_scale", "tcgen05.cp", form.kind, "tcgen05.ld", "cp.async.bulk.tensor", "setmaxnreg"):
                assert kernel.found.get(name), kernel
            assert kernel.found["block_scale"] == kernel.found["tcgen05.mma"] == kernel.found[form.kind]
            assert kernel.spills == 0
            assert kernel.fits
            assert kernel.tensor_memory == COLUMNS
        assert kernels[f"tl.dot_scaled {fmt}, sm_120"].found["block_scale"]
    assert record.facts["columns of tensor memory"]["by hand"] == {"used": 512, "taken": 512, "of": 512}
    assert {kernel["sm"] for kernel in record.codegen} == {80, 89, 90, 100, 103, 120}


def test_cells():
    kernel = Kernel("k", 100, {"tcgen05.mma": 4, "tcgen05.ld": 1}, 168, 0, 2048, 4096, 12, tensor_memory=512)
    assert study.cells(kernel) == {
        "code": "4 tcgen05.mma, 1 tcgen05.ld", "warps": 12, "registers": 168, "spill bytes": 0, "shared KiB": 2.0,
        "tensor memory": 512,
    }  # fmt: skip
    assert study.cells(Kernel("k", 90, error="E: no")) == {"code": "not supported: E: no"}
    assert study.cells(Kernel("k", 90, error="E: k: no; use l")) == {"code": "not supported: no"}


def test_a_count_that_is_out_of_date(h, monkeypatch):
    def codegen(wrapper, *args, find, **kwargs):
        return [Kernel("k", sm, {}, 1, 0, 1, 1, 8, tensor_memory=256) for sm in find]

    monkeypatch.setattr(h, "codegen", codegen)
    with pytest.raises(CodegenError, match="by hand: 512 columns counted, 256 taken: count them"):
        study.show_code(h)


def test_study(h, code, monkeypatch):
    if not h.interpreted:
        pytest.skip("its full sizes are run by the topic")
    monkeypatch.setattr(study, "show_code", lambda h: code[0])
    study.study(h)
    assert h.record.facts["tensor memory"] == "none here: compiled, not run"
    assert "specialized float16, sm_90: none: dropped" in h.record.conclusions
    assert "by hand float16, sm_100: partitions, 12 warps for 8" in h.record.conclusions
    variants = {row["variant"] for table in h.record.tables for row in table["rows"]}
    assert variants == {"torch", "pipelined", "specialized"}


def test_the_facts_are_means_over_the_cases(h, monkeypatch):
    ms = {(16, h.half): 2.0, (32, h.half): 0.5, (16, E4M3): 1 / 3, (32, E4M3): 1 / 12}

    def compare(h, n, dtype):
        library = "cuBLAS" if dtype.itemsize == 2 else "_scaled_mm"
        rows = [Row(name, name == "pipelined", None, 0, t, speedup=1 / t)
                for name, t in ((library, 1.0), ("pipelined", ms[n, dtype]))]  # fmt: skip
        return Table("t", f"{n}x{n}x{n} {str(dtype).removeprefix('torch.')}", library, rows)

    monkeypatch.setattr(study, "show_code", lambda h: {})
    monkeypatch.setattr(h, "pick", lambda **sizes: (16, 32))
    monkeypatch.setattr(study, "compare", compare)
    study.study(h)
    half = str(h.half).removeprefix("torch.")
    assert h.record.facts[f"geometric mean over cuBLAS, {half}"] == {"pipelined": 1.0}
    assert h.record.facts["geometric mean over _scaled_mm, float8_e4m3fn"] == {"pipelined": 6.0}
