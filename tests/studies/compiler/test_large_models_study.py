"""studies/compiler/large_models: the chapter's claims beside the tables of the lesson."""

from harness.bench import Row, Table
from harness.catalog import Needs
from harness.session import Harness

from rich.console import Console

from examples.compiler.large_models import BLOCKS, EAGER, WHOLE
from studies.compiler.large_models import study


def test_study():
    def table(case, **ms):
        rows = [Row(name, False, 5.0, 0.0, ms=t, speedup=4.0 / t, enqueue_us=1000.0) for name, t in ms.items()]
        return Table("large_models", case, EAGER, rows)

    one = table("1 B, 1x1 tokens", **{EAGER: 4.0, WHOLE: 2.0, BLOCKS: 3.2})
    other = table("19 M, 1x1 tokens", **{EAGER: 4.0, WHOLE: 2.0, BLOCKS: 3.2})
    h = Harness("large_models", Needs.parse("torch"), console=Console(quiet=True), timing=False, lesson=[one, other])
    study(h)
    (claims,) = h.record.facts.values()
    assert list(claims) == ["1 B, 1x1 tokens"]
    assert claims["1 B, 1x1 tokens"]["measured"] == [2.0, 1.25]
    assert "eager 4.00 ms, 25% of it launching" in h.record.conclusions[0]
