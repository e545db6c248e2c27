"""What a technique is handed: the answer, what is recorded, what is printed and when."""

import io
from contextlib import nullcontext

from harness import Harness, Timing, Work
from harness.catalog import Needs
from harness.check import CheckError
from harness.codegen import CodegenError
from harness.session import LONGEST_ANSWER

import pytest
import torch
from rich.console import Console


def reference(x):
    return x.double() * 2


VARIANTS = {"torch": lambda x: x * 2, "ours": lambda x: x + x}


@pytest.fixture
def made(monkeypatch):
    """made(option=...) -> (harness of a technique that needs torch alone, what it has printed so far)."""
    monkeypatch.setattr("harness.bench.cpu_ms", lambda fn: [1.0 if fn() is None else 2.0] * 3)
    monkeypatch.setattr("harness.session.recorded_answer", lambda topic, name: f"recorded for {topic} {name}: 7x")

    def make(width=80, **options):
        h = Harness("made", topic="a_topic", console=Console(file=(said := io.StringIO()), width=width), **options)
        return h, lambda: " ".join(said.getvalue().split())

    return make


def compare(h, **options):
    return h.compare(VARIANTS, reference, torch.randn(8, 8), baseline="torch", work=Work(bytes=512), **options)


# --- the answer


@pytest.mark.parametrize(
    ("options", "timed", "called"),
    [
        ({}, True, True), ({"timing": False}, True, False), ({"profile": True}, True, False),
        ({"timing": False}, False, True), ({"profile": True}, False, False),  # made of counts
        ({"timing": False, "lesson": []}, True, False),  # a study
    ],
)  # fmt: skip
def test_an_answer_is_made_where_it_can_be(made, options, timed, called):
    """At the end, and only of what was timed; else the recorded one is shown, as such; of a failure, none."""
    failed, said = made(**options)
    failed.answer(lambda: pytest.fail("was called"), timed=timed)
    failed.finish(passed=False)
    assert (failed.record.answer, "7x" in said()) == (None, False)
    h, said = made(**options)
    calls = []
    h.answer(lambda: calls.append("called") or f"{calls[0]} {h.timed}", timed=timed)
    compare(h)
    assert not calls
    h.finish()
    assert failed._answer is h._answer is None  # what they hold takes the memory that a study needs
    assert h.record.answer == (f"called {h.timed}" if called else None)
    assert ("called" in said(), calls) == (called, ["called"] if called else [])
    assert ("recorded for a_topic made: 7x" in said()) == (not called and not h.is_study and not h.profile)


def test_an_answer_that_is_none(made):
    for wrong in ("a text", None):
        with pytest.raises(TypeError, match="pass a function"):
            made()[0].answer(wrong)
    for wrong in ("", 1.5):
        h, _ = made()
        h.answer(lambda wrong=wrong: wrong, timed=False)
        with pytest.raises(ValueError, match=f"at most {LONGEST_ANSWER} characters"):
            h.finish()
        assert h.record.answer is None


# --- what is kept back, and what is recorded


@pytest.mark.parametrize("verbose", [False, True])
def test_what_is_printed_is_kept_back_until_the_end_unless_asked(made, verbose):
    h, said = made(verbose=verbose)
    h.check(VARIANTS["ours"], reference, torch.randn(3, 5), what="doubling")
    compare(h, title="t", case="one"), compare(h, title="t", case="two"), compare(h, title="u")
    h.say("And so it is.")
    h.fact("a count", {"of": {"x": 3}})
    h.table("name", rows := {"a": {"x": 1}, "b": {"x": [2.5, None]}})
    table = "t one" if verbose else "times as fast as torch"
    whole = ("doubling: ", "And so it is.", "x: 3", "2.5 / None", table)
    assert [text in said() for text in whole] == [verbose] * 5
    h.finish()
    assert [text in said() for text in whole] == [verbose, True, verbose, True, True]
    assert ("checks passed" in said()) != verbose
    if not verbose:  # the cases of one title are one table, where the first of them came
        assert said().index("two") < said().index("u 8x8 float32") < said().index("And so it is.")
    assert h.record.conclusions == ["And so it is."]
    assert h.record.facts == {"a count": {"of": {"x": 3}}, "name": rows}
    assert [(t["title"], t["case"]) for t in h.record.tables] == [("t", "one"), ("t", "two"), ("u", "8x8 float32")]


def test_what_json_cannot_hold_is_refused(made):
    h, _ = made()
    for wrong in (float("nan"), {1: 2}, torch.ones(1), {"a": {"x": float("inf")}}):
        with pytest.raises(TypeError, match="cannot be recorded"):
            h.fact("bad", wrong)
    with pytest.raises(TypeError, match="cannot be recorded"):
        h.table("bad", {"a": {"x": float("nan")}})
    h.fact("a pair", (1, 2))
    assert h.record.facts == {"a pair": (1, 2)}


def test_a_check_is_recorded_as_it_goes(made, monkeypatch):
    h, _ = made()
    h.check(VARIANTS["ours"], reference, torch.randn(3, 5))
    with pytest.raises(CheckError, match="tripling"):
        h.check(lambda x: x * 3, reference, torch.randn(3, 5), what="tripling")
    right, wrong = h.record.checks
    assert (right["passed"], right["error"] <= 1, "3x5 float32" in right["what"]) == (True, True, True)
    assert wrong == {"what": "tripling", "error": None, "passed": False}
    h, _ = made(profile=True)
    h.check(None, None)
    assert h.record.checks == []
    budgets = []
    monkeypatch.setattr("harness.session.check_once", lambda *args, **budget: budgets.append(budget) or 0.0)
    for fn in (VARIANTS["ours"], torch.compile(VARIANTS["ours"], backend="eager")):
        made()[0].check(fn, reference, torch.ones(2), what="x", terms=3)
    plain = {"what": "x", "terms": 3}
    assert budgets == [plain, plain | {"poison": False, "stores": 2}]  # poisoning would be traced


def test_a_call_that_two_tables_have_is_profiled_once(made, monkeypatch):
    """Its range would be seen twice under one name, and what was counted in it added up."""
    ranges = []
    monkeypatch.setattr("harness.bench.capture", lambda name, _: ranges.append(name) or nullcontext())
    h, _ = made(profile=True)
    for case in ("x", "x", "y"):
        compare(h, title="t", case=case)
    assert ranges == ["t x: torch", "t x: ours", "t y: torch", "t y: ours"] == list(h.record.profiled)


def test_rows_have_statistics_of_their_own(made):
    x = made()[0].rows(4, 8, 512, dtype=torch.float64).view(-1, 512)
    means, deviations = x.mean(1), x.std(1)
    assert means.std() > 0.5
    assert (deviations[7::16] < 2e-3).all()
    assert deviations.max() / deviations[deviations > 2e-3].min() > 3


def test_uneven_times_give_no_answer(made):
    """As of a CPU on which something else runs: the answer recorded before stands, or none."""
    for slow, answered in ((1.9, True), (2.1, False)):
        h, said = made()
        table = compare(h, title="t")
        table["ours"].p20, table["ours"].p80 = 1.0, slow
        h.answer(lambda: "It is twice as fast.")
        h.finish()
        assert (h.record.answer is not None) == answered
        assert ("Times too uneven to answer (t, ours: 1 to 2.1 ms)" in " ".join(said().split())) != answered


def test_the_default_row_is_one_of_the_table(made):
    h, _ = made()
    with pytest.raises(ValueError, match="default 'theirs' is not one of the variants"):
        compare(h, default="theirs")
    assert compare(h, default="ours").default == "ours"


def test_sizes_and_inputs(made, h):
    small, large = made()[0], made(full=True)[0]
    assert (small.pick(1, 2, 3), large.pick(1, 2)) == (1, 2)
    assert h.pick(1, 2, 3) == (3 if h.interpreted else h.pick(1, 2))
    assert small.fit(1 << 20, 1 << 20) == 1 << 20 or small.machine.mode == "gpu"
    one, again, other = (made(seed=seed)[0].randn(4) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert small.randn(1000, dtype=torch.float16, scale=3.0).std().item() == pytest.approx(3.0, rel=0.1)
    assert small.randint(3, 100).unique().tolist() == [0, 1, 2]
    assert (small.meta(2, 3).device.type, small.meta(2, 3).dtype) == ("meta", torch.bfloat16)
    assert Harness("x", Needs.parse("triton")).half is (torch.float16 if h.interpreted else torch.bfloat16)


def test_a_peer_is_another_techniques_module(made):
    pytest.importorskip("triton")
    h, _ = made()
    softmax = h.peer("triton/softmax")
    assert h.peer("triton/softmax") is softmax
    assert (h.peers, softmax.__name__) == ([softmax], "examples.triton.softmax")
    with pytest.raises(ValueError, match="no technique 'triton/none'; write 'triton/softmax'"):
        h.peer("triton/none")
    table = h.compare(
        VARIANTS | {"other": VARIANTS["ours"]}, reference, torch.randn(8, 8), baseline="torch", work=Work(),
        peers=("other",), timing=Timing(end_to_end=True),
    )  # fmt: skip
    assert [row.peer for row in table.rows] == [False, False, True]


# --- generated code


def copying(x):
    """Compiled in a process of its own, which imports this file: so without a kernel; see test_codegen.py."""


def test_the_record_tells_one_call_for_code_from_the_next(made, monkeypatch):
    from harness.codegen import Kernel

    def compiled(wrapper, args, kwargs, sms):
        return [Kernel("copy_kernel", sm, {"cp.async": 2}, registers=8, spills=0, shared=0) for sm in sms]

    monkeypatch.setattr("harness.session.compile_for", compiled)
    h, said = made(width=200)
    h.codegen(copying, h.meta(64), find={90: ("cp.async",), 80: ("cp.async",)})
    h.codegen(copying, h.meta(64), find={90: ("cp.async",), 100: ()})
    calls = [(entry["call"], entry["sm"]) for entry in h.record.codegen]
    assert calls == [(1, 90), (1, 80), (2, 90), (2, 100)]
    with pytest.raises(CodegenError, match="copying on sm_90: no wgmma: it is not in the PTX"):
        h.codegen(copying, h.meta(64), find={90: ("wgmma",)})
    assert "copy_kernel" in said(), "what was found instead is shown at once"
    h.finish()
    assert "code: sm_80, sm_90 cp.async" in said()
    h.profile = True
    assert (h.shows_code, h.codegen(copying, find={90: ("wgmma",)})) == (False, [])
