"""recompilation: what recompiles and what the fixes leave, all outputs right, the limit, bad input."""

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from examples.compiler import recompilation
from examples.compiler.recompilation import (
    CALLS,
    CountsCalls,
    Remembers,
    RemembersInPlace,
    cases,
    count_forms,
    plain,
    repeats,
    repeats_masked,
    scales,
)

LIMIT = 8  # torch's default
NAMES = list(cases(torch.ones(2, 3)))
# Forms and eager calls as found, and a word of the guard that fails first.
EXPECTED = {
    "int argument": (2, 0, "k == 2"),
    "float argument": (2, 0, "k == 0.2"),
    "int that a loop runs to": (LIMIT, CALLS - LIMIT, "k == 1"),
    "int attribute of a module": (LIMIT, CALLS - LIMIT, "self.calls == 0"),
    "int attribute, a layer each": (LIMIT, CALLS - LIMIT, "self.index == 1"),
    "growing list": (LIMIT, CALLS - LIMIT, "self.seen"),
    "learning rate, SGD": (LIMIT, CALLS - LIMIT, "['lr'] == 0.1"),
    "learning rate, AdamW foreach": (4, 0, "['lr'] == 0.1"),
    "dtype": (3, 0, "dtype mismatch. expected Float, actual Half"),
    "grad mode": (3, 0, "grad_mode"),
}
TWO_FORMS = {"allow_unspec_int_on_nn_module", "foreach=False"}  # the second one dynamic; every other fix leaves one


@pytest.fixture
def h() -> Harness:
    return Harness("recompilation", Needs.parse("torch"), console=Console(quiet=True), timing=False)


@pytest.fixture(autouse=True)
def state_as_found():
    with settings_kept("a test", 0):
        yield


def test_every_case_is_expected():
    assert list(EXPECTED) == NAMES


def test_the_demo_and_its_facts(h, capfd):
    with settings_kept("recompilation", 0):
        recompilation.demo(h)
    said = capfd.readouterr()
    assert (
        "hit config.recompile_limit" not in said.out + said.err
    )  # torch's own warning is shown as a fact, or not at all
    facts = h.record.facts
    for name, (forms, eager, reason) in EXPECTED.items():
        row = facts[name]
        assert (row["forms"], row["eager calls"]) == (forms, eager), name
        assert reason in row["guards that failed"]
        for fix, left in row["forms after"].items():
            assert left == (2 if fix in TWO_FORMS else 1), (name, fix)
            assert row["eager calls after"][fix] == 0
    guards = facts["guards on a scalar argument"]
    assert "L['k'] == 2" in guards["int, first form"]
    assert "<class 'int'>" in guards["int, second form"]
    assert "== 3" not in guards["int, second form"]
    assert "L['k'] == 0.2" in guards["float, first form"]
    assert facts["forms for a float learning rate, by backend"] == {"eager": 2, "aot_eager": LIMIT}
    limit = facts["recompile_limit, floats under dynamic=False"]
    assert limit == {
        "limit": LIMIT, "values": LIMIT + 4, "forms": LIMIT, "eager calls": 4,
        "an earlier value after it": "compiled", "logged": f"torch._dynamo hit config.recompile_limit ({LIMIT})",
    }  # fmt: skip
    loud = facts["made loud by"]
    assert loud["fail_on_recompile_limit_hit, limit 2"].startswith("call 3: FailOnRecompileLimitHit")
    assert loud["fullgraph=True, limit 2"].startswith("call 3: FailOnRecompileLimitHit")
    assert loud["error_on_recompile"].startswith("call 2: RecompileError")
    ways = sum(1 + len(row["forms after"]) for row in (facts[name] for name in EXPECTED))
    assert len(h.record.checks) == ways
    (table,) = h.record.comparisons
    assert len(table["rows"]) == 5


def test_nothing_but_the_calls_under_a_profiler():
    h = Harness("recompilation", Needs.parse("torch"), console=Console(quiet=True), profile=True)
    recompilation.demo(h)
    assert not h.record.facts
    assert not h.record.checks


@given(rows=st.integers(1, 6), width=st.integers(1, 9), k=st.integers(0, CALLS))
def test_the_fixes_compute_the_same(rows, width, k):
    x = torch.randn(rows, width, dtype=torch.float64)
    torch.testing.assert_close(repeats_masked(x, torch.tensor(k)), repeats(x, k))
    grows, fixed = Remembers(), RemembersInPlace(x)
    for i in range(k):
        torch.testing.assert_close(fixed(x * i), grows(x * i))


def test_what_is_counted(h):
    x = h.randn(4, 3)
    found = count_forms(scales, [lambda f, k=k: f(x, k) for k in (2, 2, 3, 4)])
    assert (found.graphs, found.eager, found.warned) == (2, [False] * 4, [])
    assert found.reasons == ["0/0: k == 2"]
    for k, got in zip((2, 2, 3, 4), found.outputs, strict=True):
        torch.testing.assert_close(got, scales(x, k))
    found = count_forms(scales, [lambda f, k=k: f(x, k) for k in range(2, 20)], dynamic=False)
    assert (found.graphs, found.eager_calls) == (LIMIT, 18 - LIMIT)
    assert found.warned == [f"torch._dynamo hit config.recompile_limit ({LIMIT})"]
    again = count_forms(scales, [lambda f: f(x, 2)])  # nothing is left of what was compiled before
    assert (again.graphs, again.reasons) == (1, [])


def test_a_list_of_functions_shares_what_their_code_shares(h):
    x = h.randn(3)
    layers = [recompilation.Layer(k, int) for k in range(3)]
    assert count_forms(layers, [lambda each, i=i: each[i](x) for i in range(3)]).graphs == 3
    linears = [nn.Linear(3, 3, device=h.device) for _ in range(3)]  # one form serves them all
    assert count_forms(linears, [lambda each, i=i: each[i](x) for i in range(3)]).graphs == 1


def test_a_function_without_a_graph_is_eager(h):
    found = count_forms(lambda x: 3, [lambda f: f(h.randn(2))] * 2)
    assert (found.graphs, found.eager) == (0, [True, True])


def test_plain():
    assert plain("0/0: k == 2     # def f(x, k): in f\nUser stack trace:\n  File x") == "0/0: k == 2"


def test_bad_input(h):
    x = h.randn(3)
    with pytest.raises(TypeError, match="count_forms: got int, which cannot be called; pass a function"):
        count_forms(3, [lambda f: f(x)])
    with pytest.raises(TypeError, match="count_forms: got str"):
        count_forms([scales, "scales"], [lambda f: f[0](x, 1)])
    for compiled in (torch.compile(scales), torch.compile(CountsCalls())):
        with pytest.raises(ValueError, match="count_forms: fn is compiled already; pass the function or module"):
            count_forms(compiled, [lambda f: f(x, 1)])
    with pytest.raises(ValueError, match="count_forms: no calls; pass functions that call"):
        count_forms(scales, [])


def test_what_a_call_raises_is_passed_on_and_leaves_no_trace(h):
    x = h.randn(3)

    def fails(f):
        f(x, 2)
        raise OverflowError("in a call")

    with pytest.raises(OverflowError, match="in a call"):
        count_forms(scales, [fails])
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        pytest.raises(torch._dynamo.exc.RecompileError, match="k == 2"),
    ):
        count_forms(scales, [lambda f, k=k: f(x, k) for k in (2, 3)])
    assert count_forms(scales, [lambda f: f(x, 2)]).graphs == 1
