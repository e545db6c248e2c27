"""caching: what the caches answer; one that answers otherwise fails the run."""

from harness.settings import settings_kept

import pytest

from compile_inspect import watch
from examples.common.shown import NotShown
from examples.compiler import caching_key
from examples.compiler.caching_key import CACHES, changes, found

HIT, MISS, SILENT = (dict.fromkeys(CACHES, answer) for answer in ("hit", "miss", "not asked"))


def test_what_changes_the_key(h, monkeypatch):
    inputs = h.randn(16, 24), h.randn(24, 40), h.randn(40)
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
