"""recompilation: what recompiles and what the fixes leave, all outputs right."""

from harness.bench import Row, Table

import torch
from hypothesis import given
from hypothesis import strategies as st

from compile_inspect import find_breaks
from examples.compiler import recompilation
from examples.compiler.recompilation import (
    CALLS,
    Remembers,
    RemembersInPlace,
    repeats,
    repeats_masked,
    scales_at_random,
)
from tests.quiet import ran

LIMIT = 8  # torch's default
# Entries and eager calls as found, and a word of the guard that fails first.
EXPECTED = {
    "float argument": (2, 0, "k == 0.1"),
    "random.random()": (2, 0, "== 0.13436424411240122"),  # what seed 1 draws, if it breaks the graph
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
    drawn_within = {} if find_breaks(scales_at_random, torch.ones(2)).breaks else {"random.random()": (1, 0, "none")}
    for name, (entries, eager, guard) in (EXPECTED | drawn_within).items():
        assert (rows[name]["entries"], rows[name]["eager"]) == (entries, eager), name
        assert guard in rows[name]["guard that fails first"]
        assert rows[name]["mended"].endswith(": 1")
    assert len(record.checks) == 2 * len(EXPECTED)


def test_the_answer_never_recommends_an_entry_per_float():
    times = {recompilation.EAGER: 4.0, recompilation.PER_FLOAT: 0.5, recompilation.TENSOR: 1.0, recompilation.PAST: 4.0}
    rows = [Row(name, False, None, 0.0, ms=ms, speedup=4.0 / ms, gpu_ms=ms) for name, ms in times.items()]
    told = recompilation.answer(
        {"a": {"eager": 4, "mended": "tensor: 1"}, "b": {"eager": 0, "mended": "tensor: 2"}},
        Table("one function", "", recompilation.EAGER, rows),
    )
    assert told == (
        f"1 of 2 causes fill the cache ({LIMIT} entries), then run in eager; mended, 1 keep one entry. "
        "Over eager: a float mended to a tensor 4.00x, past the limit 1.00x."
    )


@given(rows=st.integers(1, 6), width=st.integers(1, 9), k=st.integers(0, CALLS))
def test_the_fixes_compute_the_same(rows, width, k):
    x = torch.randn(rows, width, dtype=torch.float64)
    torch.testing.assert_close(repeats_masked(x, torch.tensor(k)), repeats(x, k))
    grows, fixed = Remembers(), RemembersInPlace(x)
    for i in range(k):
        torch.testing.assert_close(fixed(x * i), grows(x * i))
