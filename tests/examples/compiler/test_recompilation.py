"""recompilation: what recompiles and what the fixes leave, all outputs right."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.compiler import recompilation
from examples.compiler.recompilation import CALLS, Remembers, RemembersInPlace, repeats, repeats_masked
from tests.quiet import ran

LIMIT = 8  # torch's default
# Entries and eager calls as found, and a word of the guard that fails first.
EXPECTED = {
    "float argument": (2, 0, "k == 0.1"),
    "int that a loop runs to": (LIMIT, CALLS - LIMIT, "k == 1"),
    "int attribute of a module": (LIMIT, CALLS - LIMIT, "self.calls == 0"),
    "growing list": (LIMIT, CALLS - LIMIT, "self.seen"),
    "learning rate": (LIMIT, CALLS - LIMIT, "['lr'] == 0.1"),
}


def test_the_demo_and_its_facts(capfd, monkeypatch):
    monkeypatch.setattr(recompilation, "cost", lambda *_: None)  # four compilations, which every run of it checks
    record = ran(recompilation.demo, finish=False).record
    said = capfd.readouterr()
    assert "hit config.recompile_limit" not in said.out + said.err  # torch's own warning is not shown
    (rows,) = record.facts.values()
    assert list(rows) == list(EXPECTED)
    for name, (entries, eager, guard) in EXPECTED.items():
        assert (rows[name]["entries"], rows[name]["eager"]) == (entries, eager), name
        assert guard in rows[name]["guard that fails first"]
        assert rows[name]["mended"].endswith(": 1")
    assert len(record.checks) == 2 * len(EXPECTED)


@given(rows=st.integers(1, 6), width=st.integers(1, 9), k=st.integers(0, CALLS))
def test_the_fixes_compute_the_same(rows, width, k):
    x = torch.randn(rows, width, dtype=torch.float64)
    torch.testing.assert_close(repeats_masked(x, torch.tensor(k)), repeats(x, k))
    grows, fixed = Remembers(), RemembersInPlace(x)
    for i in range(k):
        torch.testing.assert_close(fixed(x * i), grows(x * i))
