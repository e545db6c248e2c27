"""The techniques of the torch.compile topic, in two orders in one process each: neither finds the other's traces.

A technique that leaves a setting changed fails by itself (harness.settings.settings_kept). What settings_kept does not
know, such as what the compiler remembers of a function, would show here as another count.
"""

import re

from harness.catalog import ROOT, load_module
from harness.process import Child, report
from harness.settings import settings

import pytest

# Quick ones, which count graphs, breaks and recompiles: what an earlier technique could change.
CHOSEN = ["graph_breaks", "recompilation", "stances", "dynamic_shapes", "custom_ops"]


def counts(value):
    """What of a fact is a count: not seconds, ratios or texts."""
    if isinstance(value, dict):
        return {name: counts(each) for name, each in value.items()}
    if isinstance(value, list):
        return [counts(each) for each in value]
    return value if isinstance(value, int) else None


def child_in_order(names):
    """Runs in a process of its own: these techniques, one after the other, and the settings after each."""
    from tests.quiet import ran

    found, after = {}, [repr(settings())]
    for name in names:
        recorded = ran(load_module(ROOT / f"examples/compiler/{name}.py").demo, finish=False).record
        found[name] = {"facts": counts(recorded.facts), "checks": [check["what"] for check in recorded.checks]}
        after.append(repr(settings()))
    report(found=found, after=sorted(set(after)))


@pytest.mark.slow
def test_the_order_of_techniques_changes_nothing():
    results = []
    for names in (CHOSEN, CHOSEN[::-1]):
        with Child(child_in_order, names, timeout=500) as child:
            results.append(child.result())
    assert results[0] == results[1]
    assert len(results[0]["after"]) == 1
    assert all(re.search(r"\d", str(each["facts"])) for each in results[0]["found"].values()), "one counts nothing"
