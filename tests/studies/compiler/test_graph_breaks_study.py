"""studies/compiler/graph_breaks: what torch's own tools say of each cause."""

import re

from examples.compiler.graph_breaks import operands
from studies.compiler.graph_breaks import show_tools


def test_what_the_tools_say(h):
    show_tools(h, *operands(h, 8, 64))
    for cause, row in h.record.facts["what torch's own tools say"].items():
        # explain does not count what Dynamo cannot resume from, and fullgraph=True captures scalars
        unresumed = cause in (".item() inside try", "generator argument")
        assert row["torch._dynamo.explain"].startswith("0 breaks" if unresumed else "1 breaks")
        compiles = cause in (".item()", ".item() inside try")
        wanted = "compiles" if compiles else rf"Unsupported: {re.escape(row['reason'])}.*, line \d+"
        assert re.fullmatch(wanted, row["fullgraph=True"])
