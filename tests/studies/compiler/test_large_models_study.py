"""studies/compiler/large_models: the chapter's claims beside the tables of the lesson."""

from harness.bench import Row, Table

from examples.compiler.large_models import BLOCKS, EAGER, WHOLE
from studies.compiler.large_models import study
from tests.quiet import ran


def test_study():
    times = {EAGER: 4.0, WHOLE: 2.0, BLOCKS: 3.2}
    rows = [Row(n, False, 5.0, 0.0, ms=t, speedup=4.0 / t, enqueue_us=1000.0) for n, t in times.items()]
    tables = [Table("large_models", case, EAGER, rows) for case in ("1 B, 1x1 tokens", "19 M, 1x1 tokens")]
    (claims,) = ran(study, lesson=tables).record.facts.values()
    assert list(claims) == ["1 B, 1x1 tokens"]
    assert claims["1 B, 1x1 tokens"]["measured"] == [2.0, 1.25]
    assert claims["1 B, 1x1 tokens"]["eager launches, %"] == 25
