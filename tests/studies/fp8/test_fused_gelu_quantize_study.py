"""The study of fused_gelu_quantize: a scale that is too small costs accuracy, and amax tells by how much."""

from harness.bench import Row, Table

import pytest

from studies.fp8.fused_gelu_quantize import TWO_KERNELS, explain, saturation, study


def test_saturation(h):
    seen = saturation(h, h.randn(64, 1024, dtype=h.half))
    errors = [each["error"] for each in seen.values()]
    assert errors == sorted(errors)
    assert errors[-1] > 5 * errors[0]  # a scale for a tenth of amax
    assert [each["amax / range"] for each in seen.values()] == pytest.approx([1, 2, 10], rel=0.01)


def test_bytes_saved_next_to_time_saved(h):
    rows = [Row(name, name == "triton", 1.0, 0.1, ms, ms, ms, 1.0, 1.0, 0.9, 3.0 / ms) for name, ms in
            ((TWO_KERNELS, 3.0), ("triton", 1.5))]  # fmt: skip
    explain(h, h.randn(1024, 1024).half(), [Table("gelu", "1024x1024 group, tanh", TWO_KERNELS, rows)])
    assert h.record.facts["two kernels (7 MiB) and one (3 MiB)"]["1024x1024 group, tanh"]["measured"] == 2.0
    assert h.record.conclusions == ["bytes allow 2.33x over two kernels"]


def test_study(h, monkeypatch):
    monkeypatch.setattr(h, "codegen", lambda *args, **kwargs: [])
    h.lesson = []
    study(h)
    assert len(h.record.checks) == 15
    assert all(check["passed"] for check in h.record.checks)
