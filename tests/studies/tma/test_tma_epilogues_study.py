"""Study of tma_epilogues: what it checks and compares on any machine; its ratios and costs follow from the times."""

import json
from types import SimpleNamespace

from harness.bench import Row, Table

import pytest

from examples.tma.tma_epilogues_shared import VARIANTS
from studies.tma import tma_epilogues as study

LAYERS = ["bias + SiLU", "bias + GELU", "FP8, scale given", "FP8, per group", "SwiGLU"]


def test_study(h):
    if not h.interpreted:
        pytest.skip("its sizes are run by the topic")
    study.study(h)
    assert all(check["passed"] for check in h.record.checks)
    assert [table["title"] for table in h.record.tables] == ["no epilogue", *LAYERS]
    assert h.record.facts["a row of 272 columns"]["tiles across"] == 2
    assert all((kernel["spills"], kernel["error"]) == (0, None) for kernel in h.record.codegen)


def test_ratios_follow_from_the_times(h, monkeypatch):
    """Ratios come from the tables; what an epilogue takes beyond its own GEMM from rounds that have both."""

    def timed(variants, want, *inputs, title, baseline, **more):
        ms = {name: 2.0 - 0.25 * i for i, name in enumerate(variants)}
        rows = [
            Row(name, not name.startswith("cuBLAS"), None, 0, t, speedup=ms[baseline] / t) for name, t in ms.items()
        ]
        return Table(title, "a case", baseline, rows)

    monkeypatch.setattr(h, "compare", timed)
    monkeypatch.setattr(h, "interpreted", False)
    monkeypatch.setattr(h, "compiled", lambda fn: fn)
    monkeypatch.setattr(study, "runnable", lambda device: VARIANTS)

    def rounds(calls, enqueue):
        """Each round slower than the one before, each call slower than the one before; then one odd round."""
        assert enqueue == dict.fromkeys(calls, 0.01)
        return {name: [[t + 0.1 * i] for t in (1.0, 2.0, 3.0)] + [[9.0]] for i, name in enumerate(calls)}

    monkeypatch.setattr(study, "time_rounds", rounds)
    monkeypatch.setattr(study, "enqueue_ms", lambda call: 0.01)
    study.compare_layers(h, 64, 128, 16)
    case = study.case_of(h, 64, 128, 16)
    ratios = h.record.facts[f"over cuBLAS, then torch.compile, {case}"]
    assert list(ratios) == LAYERS
    assert ratios["bias + SiLU"] == {"persistent": 1.1429, "warp specialized": 1.3333}
    assert ratios["bias + GELU"] == {"persistent": 1.3333, "warp specialized": 1.6}  # a library row between
    costs = h.record.facts[f"us of the epilogue beyond the GEMM of the same kernel, {case}"]
    # Of six calls the GEMMs are the last three: 0.3 ms behind, in the median of rounds.
    assert costs["bias + GELU"] == {"kernel of its own": -300.0, "persistent": -300.0, "warp specialized": -300.0}
    assert "SwiGLU" not in costs  # whose GEMM is twice as large
    assert json.dumps(h.record.facts)
    assert h.record.conclusions[-1].startswith("5 of 5 epilogues are faster in the GEMM's store")


def test_a_row_within_one_tile(h, monkeypatch):
    monkeypatch.setattr(study, "fitting_tile", lambda device, itemsize: (128, 256, 64, 8, 4))
    heard = []
    said = SimpleNamespace(device=h.device, fact=lambda *args: None, say=heard.append)
    study.explain_rows(said, 1000, 256)
    study.explain_rows(said, 1000, 512)
    assert "only here would a tile also know" in heard[0]
    assert heard[1].startswith("2 groups lie within a tile, a row in 2: its amax is known when")
