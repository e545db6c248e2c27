"""Dynamic shapes: graphs of each policy, right results in any order of sizes, the limit."""

from harness.bench import Row, Table

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compile_inspect import watch
from examples.compiler import dynamic_shapes
from examples.compiler.dynamic_shapes import (
    LARGEST,
    LONG,
    MANY,
    POLICIES,
    SHORT,
    GatedMLP,
    answer,
    bucket,
    compile_all,
    pad_rows,
    reference_of,
)


def test_each_policy(h, monkeypatch):
    """Traced only; one does not serve what another compiled, nor does it count against its limit."""
    monkeypatch.setattr(dynamic_shapes, "warm_up", lambda device: None)
    model, batches = GatedMLP(16, 32).to(h.device).requires_grad_(False), [h.randn(n, 3, 16) for n in range(1, 12)]
    served, rows = compile_all(h, model, batches, tuple(POLICIES))
    assert {name: row["graphs"] for name, row in rows.items()} == {
        "static": 11, "automatic": 2, "dynamic=True": 2, "mark_dynamic": 2, "mark_unbacked": 1, "padded to 64": 1,
        "powers of two": 5,
    }  # fmt: skip
    assert rows["mark_dynamic"]["compiled at"] == "1 2"
    assert rows["powers of two"]["compiled at"] == "1 2 3 5 9"
    assert rows["powers of two"]["rows per useful row"] == round((1 + 2 + 2 * 4 + 4 * 8 + 3 * 16) / 66, 3)
    some = [batches[n - 1] for n in (3, 11, 1, 2, 9, 3)]
    for name, one in served.items():
        with watch() as seen:
            h.check(one.mix, reference_of(model), *some, what=name, terms=64, roundings=8, poison=False)
        assert seen.graphs == 0  # unmarked inputs pass the guards too
    assert not any(hasattr(x, "_dynamo_dynamic_indices") for x in batches)


def timed(case: str, **speedups: float) -> Table:
    ms = {"torch eager": 4.0} | {f"torch.compile {name}": 4.0 / speedup for name, speedup in speedups.items()}
    rows = [Row(n, False, None, 0.0, ms=t, p20=0.9 * t, p80=1.1 * t, speedup=4.0 / t, gpu_ms=t) for n, t in ms.items()]
    return Table("dynamic_shapes", case, "torch eager", rows)


def test_the_answer_says_when_a_policy_pays():
    """The default unless another policy is faster by more than noise; and how often short kernels gain."""
    tables = {
        LONG: {
            "1 size": timed("", static=1.5, mark_dynamic=1.2), "4 sizes": timed("", static=1.33, automatic=1.3),
            MANY: timed("", **{"static": 0.9, "automatic": 1.3, "padded to 64": 0.8, "powers of two": 0.9}),
        },
        SHORT: {MANY: timed("", static=0.5, automatic=0.6)},
    }  # fmt: skip
    assert answer(2, tables) == (
        "Leave the default (automatic): 2 graphs for 10 sizes. Over eager: long 1.30x, padded at most 0.90x; short "
        "0.60x: use eager."
    )
    tables[SHORT][MANY] = timed("", static=1.1, automatic=1.3)  # the first is within the spread of its times
    assert answer(2, tables).endswith("; short 1.30x (faster than eager in 1 of 2 rows).")
    tables[LONG][MANY] = timed("", **{"static": 1.5, "automatic": 1.3, "padded to 64": 1.4, "powers of two": 0.9})
    assert answer(2, tables).startswith(
        "Long kernels: static for 10 sizes, automatic for 4 sizes and 1 size. The default: 2 graphs for 10 sizes. "
        "Over eager: long 1.30x, padded at most 1.40x; short 1.30x"
    )
    tables[LONG][MANY] = timed("", **{"static": 0.9, "automatic": 1.3, "padded to 64": 0.8, "powers of two": 0.9})
    tables[LONG]["1 size"] = timed("", static=1.2, mark_dynamic=1.5)
    tables[SHORT][MANY] = timed("", static=1.3, automatic=1.4)
    told = answer(2, tables)
    assert told.startswith("Long kernels: automatic for 10 sizes and 4 sizes, mark_dynamic for 1 size. The default: ")
    assert told.endswith("; short 1.40x.")


@given(rows=st.integers(1, 300), more=st.integers(0, 20), inner=st.lists(st.integers(0, 3), max_size=3))
def test_bucket_and_pad_rows(rows, more, inner):
    size = bucket(rows, 512)
    assert size & (size - 1) == 0
    assert rows <= size < 2 * rows
    assert bucket(min(rows, 48), 48) <= 48
    x = torch.randn(rows, *inner)
    padded = pad_rows(x, rows + more)
    assert padded.shape == (rows + more, *inner)
    assert torch.equal(padded[:rows], x)
    assert not padded[rows:].count_nonzero()


def test_no_bucket_and_no_padding():
    for rows in (-1, 0, LARGEST + 1):
        with pytest.raises(ValueError, match=rf"bucket: {rows} rows; need 1 to 64: split the batch"):
            bucket(rows)
    for shape in ((), (0, 3), (9, 3)):
        with pytest.raises(ValueError, match=r"pad_rows: shape \(.*\) into 8 rows; split the batch, or use a larger"):
            pad_rows(torch.ones(shape), 8)
