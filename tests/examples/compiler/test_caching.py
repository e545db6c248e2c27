"""caching: what the caches answer, in this process and in others; one that answers otherwise fails the run."""

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from compile_inspect import watch
from examples.compiler import caching
from examples.compiler.caching import CACHES, HIDDEN, WIDTH, CannotCompile, NotShown, changes, network, reference

HIT, MISS, SILENT = (dict.fromkeys(CACHES, answer) for answer in ("hit", "miss", "not asked"))


@pytest.fixture
def h():
    return Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False)


@given(rows=st.integers(1, 40), layers=st.integers(0, 3), seed=st.integers(0, 99))
def test_the_network_is_right(rows, layers, seed):
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False, seed=seed)
    weights = [h.randn(*shape, scale=0.1) for shape in [(WIDTH, HIDDEN), (HIDDEN, WIDTH)] * layers]
    h.check(network, reference, h.randn(rows, WIDTH), *weights, terms=HIDDEN * (layers + 1), poison=False)


def test_what_changes_the_key(h):
    with settings_kept("caching", 0):
        answers = changes(h.randn(16, WIDTH), h.randn(WIDTH, HIDDEN), h.randn(HIDDEN))
    assert answers.pop("nothing") == answers.pop("values of the weights") == HIT
    assert answers.pop("fx_graph_cache=False") == SILENT
    assert answers.pop("enable_autograd_cache=False") == {"AOTAutograd": "not asked", "FX graph": "hit"}
    assert answers.pop("names, a comment") == {"AOTAutograd": "miss", "FX graph": "hit"}
    assert len(answers) == 7
    assert all(each == MISS for each in answers.values()), answers


def test_what_was_not_asked_is_neither_hit_nor_miss():
    with watch() as seen:
        pass
    assert caching.found(seen) == SILENT
    seen.counters = {"inductor": {"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}}
    assert caching.found(seen) == {"AOTAutograd": "not asked", "FX graph": "hit and miss"}


def test_a_machine_without_a_compiler_is_told_so(h, tmp_path, monkeypatch):
    if h.device.type == "cuda":
        pytest.skip("what a GPU runs needs no C++ compiler once Triton's driver is built")
    tensors = [h.randn(4, WIDTH), h.randn(WIDTH, HIDDEN), h.randn(HIDDEN, WIDTH)]
    torch.save(tensors, tmp_path / "inputs")
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(
        CannotCompile, match=r"cold: .*InvalidCxxCompiler.*; install a C\+\+ compiler \(apt-get install"
    ):
        caching.timed(h, tmp_path, tensors)


def test_profiling_does_nothing(h):
    h.profile = True
    caching.demo(h)
    assert not h.record.facts


@pytest.mark.slow
def test_the_demo(h, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with settings_kept("caching", 0):
        caching.demo(h)
        h.finish()
    assert len(h.record.checks) == 3
    assert all(check["passed"] for check in h.record.checks)
    rows = h.record.facts["processes"]
    assert [row["FX graph"] for row in rows.values()] == ["miss", "hit", "hit"]
    assert "Compiled anew for: a constant, a shape, a dtype, requires_grad, a setting of Inductor" in h.record.answer
    assert not list(tmp_path.glob("caching-*"))


@pytest.mark.parametrize("name", ["warm folder", "a shape"])
def test_a_cache_that_answers_otherwise_fails(h, monkeypatch, name):
    row = {"imports s": 1.5, "first call s": 0.5, "process s": 4.0}
    rows = {
        n: row | {"network": a, "product": a} for n, a in (("cold", MISS), ("warm folder", HIT), ("mega-cache", HIT))
    }
    changed = {case: dict.fromkeys(CACHES, answer) for case, answer in caching.EXPECTED.items()}
    (rows if name in rows else changed)[name] = {"network": MISS, "product": MISS} if name in rows else HIT
    monkeypatch.setattr(caching, "timed", lambda *_: rows)
    monkeypatch.setattr(caching, "changes", lambda *_: changed)
    with pytest.raises(NotShown, match=name):
        caching.demo(h)
