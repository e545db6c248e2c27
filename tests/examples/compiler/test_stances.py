"""Stances: what each does at each kind of call, and that the process is left under the one it had."""

from harness.settings import settings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.compiler import stances
from examples.compiler.stances import serve
from examples.compiler.stances_outcomes import outcomes_of
from tests.quiet import ran


def test_demo():
    before = settings()["stance"]
    h = ran(stances.demo)
    assert settings()["stance"] == before
    facts = h.record.facts
    calls = facts["calls of a function warmed up"]
    assert {name: row["new shape"] for name, row in calls.items()} == {
        "default": "compiles", "force_eager": "eager", "eager_on_recompile": "eager", "fail_on_recompile": "error",
        "eager_then_compile": "eager", "aot_eager_then_compile": "compiles (aot_eager)",
    }  # fmt: skip
    assert all(row["same shape"] == ("eager" if name == "force_eager" else "graph") for name, row in calls.items())
    fresh = facts["calls of a function not compiled yet"]["eager_then_compile"]
    assert fresh == {"first": "eager", "same shape": "compiles", "new shape": "compiles", "another": "graph"}
    met = facts["requests that the warm-up did not foresee"]
    assert met.pop("graphs compiled") == {"fail_on_recompile": 0, "eager_on_recompile": 0}
    assert all(row["eager_on_recompile"] == "served" for row in met.values())
    not_padded = met["not padded"]["fail_on_recompile"]
    assert not_padded.startswith("RuntimeError: graph 1: tensor ")
    assert "expected 32, actual 33; graph 0: tensor " in not_padded
    assert "stride mismatch" in met["a transposed view"]["fail_on_recompile"]
    assert "grad_mode" in met["no_grad forgotten"]["fail_on_recompile"]
    assert len(h.record.checks) == 2 * 4
    # Again: torch's own memory of who was called once, kept by file and line, must not show.
    assert outcomes_of("eager_then_compile", (4, 5, 6)) == ["eager", "compiles", "graph"]


@given(rows=st.integers(1, 32), width=st.integers(1, 5))
def test_serve_any_batch(rows, width):
    seen = []

    def model(x):
        seen.append(len(x))
        return x * 2

    x = torch.randn(rows, width)
    torch.testing.assert_close(serve(model, x), x * 2, rtol=0, atol=0)
    assert seen == [8 if rows <= 8 else 32]


def test_serve_says_what_does_not_fit():
    for buckets in ((), (8,)):
        with pytest.raises(ValueError, match=r"serve: 9 rows, but the buckets are .*; split the batch or add a larger"):
            serve(lambda x: x, torch.ones(9, 2), buckets)
