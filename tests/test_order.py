"""The techniques of the torch.compile topic, in two orders in one process each: neither finds the other's traces.

A technique that leaves a setting changed fails by itself (harness.settings.settings_kept). What settings_kept does not
know, such as what the compiler remembers of a function, would show here: as another count, or another setting.
"""

import re

from harness.catalog import ROOT, load_module, topics
from harness.process import Child, report

import pytest

TOPIC = "torch_compiler_examples"
# Quick ones, which count graphs, breaks and recompiles: what an earlier technique could change.
CHOSEN = ("graph_breaks", "recompilation", "stances", "dynamic_shapes", "custom_ops")
TECHNIQUES = {t.name: t for topic in topics(ROOT) if topic.name == TOPIC for t in topic.techniques}


def counts(value):
    """What of a fact is a count: not seconds, ratios or texts."""
    if isinstance(value, dict):
        return {name: counts(each) for name, each in value.items()}
    if isinstance(value, list):
        return [counts(each) for each in value]
    return value if isinstance(value, int) else None


def child_in_order(names):
    """Runs in a process of its own: these techniques, one after the other, and the settings around each."""
    from harness.session import Harness
    from harness.settings import settings, settings_kept

    from rich.console import Console

    found, around = {}, [repr(settings())]
    for name in names:
        technique = TECHNIQUES[name]
        h = Harness(name, technique.needs, timing=False, console=Console(quiet=True))
        with settings_kept(name, h.seed):
            load_module(technique.path).demo(h)
        found[name] = {"facts": h.record.facts, "checks": [check["what"] for check in h.record.checks]}
        around.append(repr(settings()))
    report(found=found, around=around)


def in_order(names):
    with Child(child_in_order, list(names), timeout=500) as child:
        return child.result()


@pytest.mark.slow
def test_the_order_of_techniques_changes_nothing():
    names = [name for name in CHOSEN if name in TECHNIQUES and not TECHNIQUES[name].error]
    assert len(names) >= 3, f"{TOPIC} has of {CHOSEN} only {names}"
    forward, backward = in_order(names), in_order(reversed(names))
    assert len(set(forward["around"])) == 1
    assert set(backward["around"]) == set(forward["around"])
    for name in names:
        one, other = forward["found"][name], backward["found"][name]
        assert list(one["facts"]) == list(other["facts"])
        assert counts(one["facts"]) == counts(other["facts"]), name
        assert one["checks"] == other["checks"]
        assert re.search(r"\d", str(counts(one["facts"]))), f"{name} counts nothing"
