"""caching: what the caches answer, in this process and in others; one that answers otherwise fails the run."""

from harness.settings import settings_kept

import pytest

from compile_inspect import watch
from examples.common.shown import NotShown
from examples.compiler import caching, caching_key
from examples.compiler.caching import HIDDEN, WIDTH, network, reference
from examples.compiler.caching_key import CACHES, changes, found
from tests.quiet import ran

HIT, MISS, SILENT = (dict.fromkeys(CACHES, answer) for answer in ("hit", "miss", "not asked"))


def test_what_changes_the_key(h, monkeypatch):
    inputs = h.randn(16, WIDTH), h.randn(WIDTH, HIDDEN), h.randn(HIDDEN)
    with settings_kept("caching", 0):
        answers = changes(*inputs)
    assert answers.pop("nothing") == answers.pop("values of the weights") == HIT
    assert answers.pop("names, a comment") == {"AOTAutograd": "miss", "FX graph": "hit"}
    assert len(answers) == 7
    assert all(each == MISS for each in answers.values()), answers
    monkeypatch.setattr(caching_key, "found", lambda seen: MISS)
    with pytest.raises(NotShown, match="changing nothing: "), settings_kept("caching", 0):
        changes(*inputs)


def test_what_was_not_asked_is_neither_hit_nor_miss():
    with watch() as seen:
        pass
    assert found(seen) == SILENT
    seen.counters = {"inductor": {"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}}
    assert found(seen) == {"AOTAutograd": "not asked", "FX graph": "hit and miss"}


def test_the_network_is_right(h):
    tensors = [h.randn(3, WIDTH), h.randn(WIDTH, HIDDEN, scale=0.1), h.randn(HIDDEN, WIDTH, scale=0.1)]
    h.check(network, reference, *tensors, terms=2 * HIDDEN, poison=False)


@pytest.mark.slow
def test_the_demo(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    record = ran(caching.demo).record
    assert [check["passed"] for check in record.checks] == [True] * 3
    assert [row["FX graph"] for row in record.facts["processes"].values()] == ["miss", "hit", "hit"]
    assert "Compiled anew for: a constant, a shape, a dtype, requires_grad, a setting of Inductor" in record.answer
    assert not list(tmp_path.glob("caching-*"))
