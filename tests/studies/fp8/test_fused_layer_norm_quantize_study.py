"""The study of fused_layer_norm_quantize: its checks, and bytes saved next to time saved."""

from harness.bench import Row, Table

from studies.fp8.fused_layer_norm_quantize import TWO_KERNELS, explain, study


def test_bytes_saved_next_to_time_saved(h):
    rows = [Row(name, name == "triton", 1.0, 0.1, ms, ms, ms, 1.0, 1.0, 0.9, 3.0 / ms) for name, ms in
            ((TWO_KERNELS, 3.0), ("triton", 1.5))]  # fmt: skip
    explain(h, [Table("norm", "1024x1024 per row", TWO_KERNELS, rows)])
    assert h.record.facts["two kernels and one"]["1024x1024 per row"] == {
        "torch.compile, two kernels: MiB / ms": [7, 3.0], "triton: MiB / ms": [3, 1.5], "measured": 2.0,
    }  # fmt: skip


def test_study(h, monkeypatch):
    monkeypatch.setattr(h, "codegen", lambda *args, **kwargs: [])
    study(h)
    assert len(h.record.checks) == 12
    assert all(check["passed"] for check in h.record.checks)
