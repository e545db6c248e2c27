"""studies/compiler/recompilation: more causes and fixes, the guards of a scalar, the limit, and what makes it loud."""

from studies.compiler.recompilation import ADAMW, study
from tests.quiet import ran

LIMIT = 8  # torch's default
EXPECTED = {
    "int argument: as found": (2, 0, "k == 2"),
    f"{ADAMW}: as found": (4, 0, "['lr'] == 0.1"),
    "dtype: as found": (3, 0, "dtype mismatch. expected Float, actual Half"),
    "grad mode: as found": (3, 0, "grad_mode"),
    f"{ADAMW}: foreach=False": (2, 0, "['lr'] == 0.1"),  # the second one dynamic
    "int attribute of a module: allow_unspec_int_on_nn_module": (2, 0, "self.calls == 0"),
}


def test_study():
    record = ran(study, lesson=[]).record
    facts = record.facts
    rows = facts["cache entries, and calls left to eager"]
    for name, row in rows.items():
        entries, eager, guard = EXPECTED.get(name, (1, 0, "none"))
        assert (row["entries"], row["eager"]) == (entries, eager), name
        assert guard in row["guard that fails first"]
    assert set(EXPECTED) < set(rows)
    assert len(record.checks) == len(rows)
    assert facts["cache entries for a float learning rate, by backend"] == {"eager": 2, "aot_eager": LIMIT}
    assert facts["recompile_limit, floats under dynamic=False"] == {
        "limit": LIMIT, "values": LIMIT + 4, "entries": LIMIT, "eager calls": 4,
        "an earlier value after it": "compiled", "logged": f"torch._dynamo hit config.recompile_limit ({LIMIT})",
    }  # fmt: skip
