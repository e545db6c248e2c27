"""The study of microscaling: its baseline has the same bits, and what it says of emulation follows from the times."""

from harness.bench import Row, Table

import pytest
import torch

from examples.common.microscaling import FORMATS
from examples.fp8.microscaling_quantize import mx_quantize, quantized_bytes
from studies.fp8 import microscaling as study_of
from studies.fp8.microscaling import explain, quantize_torch, study


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_baseline_has_the_same_bits(h, fmt):
    x = h.randn(20, 128, dtype=h.half, scale=5.0)
    x[2, 3], x[7, 40] = float("nan"), float("-inf")
    whole = mx_quantize(x, fmt)[2]
    got = tuple(bits(t) for t in quantize_torch(x, fmt, whole))
    assert all(torch.equal(a, b) for a, b in zip(got, quantized_bytes(x, fmt, tensor_scale=whole), strict=True))


def table(case, **speeds):
    rows = [Row(name, "triton" in name, 1.0, 0.1, 1 / x, 1 / x, 1 / x, 1.0, 1.0, 0.5, x) for name, x in speeds.items()]
    return Table(
        "microscaling", case, "cuBLAS", [Row("cuBLAS", False, 1.0, 0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0), *rows]
    )


@pytest.mark.parametrize("real", [False, True])
def test_what_is_said_follows_from_the_times(h, monkeypatch, real):
    monkeypatch.setattr(study_of, "native", lambda: real)
    tables = [
        table("mxfp4 4096", **{"triton emulation": 0.4, "triton emulation by tl.dot_scaled": 0.3}),
        table("nvfp4 4096", **{"triton emulation": 1.1}),
    ]
    explain(h, tables)
    (cells,) = h.record.facts.values()
    assert cells["nvfp4 4096"] == {"bytes of operands": 0.281, "triton emulation": 1.1}
    said = [
        "mxfp4 4096: 0.27 of the bytes; emulated, 0.40x of the speed: in time that does not pay",
        "nvfp4 4096: 0.28 of the bytes; emulated, 1.10x of the speed: in time that pays here",
    ]
    assert h.record.conclusions == ([] if real else said)


def test_study(h):
    study(h)
    assert len(h.record.checks) == 15
    assert all(check["passed"] for check in h.record.checks)
    assert len(h.record.tables) == 3
