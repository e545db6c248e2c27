"""recompilation: what recompiles and what the fixes leave, all outputs right."""

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.compiler import recompilation
from examples.compiler.recompilation import CALLS, Remembers, RemembersInPlace, cases, repeats, repeats_masked

LIMIT = 8  # torch's default
# Entries and eager calls as found, and a word of the guard that fails first.
EXPECTED = {
    "float argument": (2, 0, "k == 0.1"),
    "int that a loop runs to": (LIMIT, CALLS - LIMIT, "k == 1"),
    "int attribute of a module": (LIMIT, CALLS - LIMIT, "self.calls == 0"),
    "growing list": (LIMIT, CALLS - LIMIT, "self.seen"),
    "learning rate": (LIMIT, CALLS - LIMIT, "['lr'] == 0.1"),
}


@pytest.fixture(autouse=True)
def state_as_found():
    with settings_kept("a test", 0):
        yield


def test_every_case_is_expected():
    assert list(EXPECTED) == list(cases(torch.ones(2, 3)))


def test_the_demo_and_its_facts(capfd):
    h = Harness("recompilation", Needs.parse("torch"), console=Console(quiet=True), timing=False)
    with settings_kept("recompilation", 0):
        recompilation.demo(h)
    said = capfd.readouterr()
    assert "hit config.recompile_limit" not in said.out + said.err  # torch's own warning is not shown
    (rows,) = h.record.facts.values()
    for name, (entries, eager, guard) in EXPECTED.items():
        assert (rows[name]["entries"], rows[name]["eager"]) == (entries, eager), name
        assert guard in rows[name]["guard that fails first"]
        assert rows[name]["mended"].endswith(": 1")
    assert len(h.record.checks) == 2 * len(EXPECTED)
    (table,) = h.record.tables
    assert len(table["rows"]) == 5


def test_nothing_but_the_calls_under_a_profiler():
    h = Harness("recompilation", Needs.parse("torch"), console=Console(quiet=True), profile=True)
    recompilation.demo(h)
    assert not any(h.record.facts.values())
    assert not h.record.checks


@given(rows=st.integers(1, 6), width=st.integers(1, 9), k=st.integers(0, CALLS))
def test_the_fixes_compute_the_same(rows, width, k):
    x = torch.randn(rows, width, dtype=torch.float64)
    torch.testing.assert_close(repeats_masked(x, torch.tensor(k)), repeats(x, k))
    grows, fixed = Remembers(), RemembersInPlace(x)
    for i in range(k):
        torch.testing.assert_close(fixed(x * i), grows(x * i))
