"""studies/compiler/large_models: the chapter's claims beside the tables of the lesson."""

from harness.bench import Row, Table

from examples.compiler.large_models import BLOCKS, EAGER, WHOLE
from studies.compiler.large_models import study
from tests.quiet import ran


def test_study():
    rows = [
        Row(name, False, 5.0, 0.0, ms=t, speedup=4.0 / t, enqueue_us=1000.0)
        for name, t in {EAGER: 4.0, WHOLE: 2.0, BLOCKS: 3.2}.items()
    ]
    tables = [Table("large_models", case, EAGER, rows) for case in ("1 B, 1x1 tokens", "19 M, 1x1 tokens")]
    record = ran(study, lesson=tables).record
    (claims,) = record.facts.values()
    assert list(claims) == ["1 B, 1x1 tokens"]
    assert claims["1 B, 1x1 tokens"]["measured"] == [2.0, 1.25]
    assert "eager 4.00 ms, 25% of it launching" in record.conclusions[0]
