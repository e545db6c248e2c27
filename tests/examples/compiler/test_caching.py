"""caching: what the caches answer, in this process and in others; one that answers otherwise fails the run."""

from harness.settings import settings_kept

import pytest
import torch

from compile_inspect import watch
from examples.compiler import caching
from examples.compiler.caching import CACHES, HIDDEN, WIDTH, CannotCompile, NotShown, changes, network, reference
from tests.quiet import ran

HIT, MISS, SILENT = (dict.fromkeys(CACHES, answer) for answer in ("hit", "miss", "not asked"))


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


def test_the_network_is_right_and_a_machine_without_a_compiler_is_told_so(h, tmp_path):
    tensors = [h.randn(3, WIDTH), h.randn(WIDTH, HIDDEN, scale=0.1), h.randn(HIDDEN, WIDTH, scale=0.1)]
    h.check(network, reference, *tensors, terms=2 * HIDDEN, poison=False)
    with pytest.raises(CannotCompile, match=r"cold: .*C\+\+ compiler.*; install a C\+\+ compiler \(apt-get install"):
        caching.usable("cold", {"error": "InvalidCxxCompiler: No working C++ compiler found"})


@pytest.mark.slow
def test_the_demo(h, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    record = ran(caching.demo).record
    assert [check["passed"] for check in record.checks] == [True] * 3
    assert [row["FX graph"] for row in record.facts["processes"].values()] == ["miss", "hit", "hit"]
    assert "Compiled anew for: a constant, a shape, a dtype, requires_grad, a setting of Inductor" in record.answer
    assert not list(tmp_path.glob("caching-*"))
    if not torch.cuda.is_available():  # what a GPU runs needs no C++ compiler once Triton's driver is built
        torch.save([torch.randn(4, WIDTH), torch.randn(WIDTH, HIDDEN), torch.randn(HIDDEN, WIDTH)], tmp_path / "inputs")
        monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
        with pytest.raises(CannotCompile, match=r"cold: .*InvalidCxxCompiler.*; install"):
            caching.timed(h, tmp_path, [])


@pytest.mark.parametrize("name", ["warm folder", "a shape"])
def test_a_cache_that_answers_otherwise_fails(h, monkeypatch, name):
    answers = {"cold": MISS, "warm folder": HIT, "mega-cache": HIT}
    times = {"imports s": 1.5, "first call s": 0.5, "process s": 4.0}
    rows = {process: times | {"network": each, "product": each} for process, each in answers.items()}
    changed = {case: dict.fromkeys(CACHES, answer) for case, answer in caching.EXPECTED.items()}
    (rows if name in rows else changed)[name] = {"network": MISS, "product": MISS} if name in rows else HIT
    monkeypatch.setattr(caching, "timed", lambda *_: rows)
    monkeypatch.setattr(caching, "changes", lambda *_: changed)
    with pytest.raises(NotShown, match=name):
        caching.demo(h)
