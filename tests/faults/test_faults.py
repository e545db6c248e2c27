"""The planted faults themselves: each applies to the tree as it is, and no family of kernels is without."""

from collections import Counter

import pytest

from . import ROOT, Fault, all_planted, planted
from .mutants import applies, sample, sampled

FAULTS = all_planted()


@pytest.mark.parametrize("module", sorted({fault.technique.split("/")[0] for fault in FAULTS}))
def test_every_snippet_is_where_its_fault_is_planted(module):
    """As often as it says, and what comes out is Python."""
    for fault in FAULTS:
        if fault.technique.startswith(f"{module}/"):
            path, text = planted(fault)
            assert text != path.read_text(encoding="utf-8"), fault.id
            compile(text, str(path), "exec")


def test_identifiers_are_unique():
    counts = Counter(fault.id for fault in [*FAULTS, *sampled()])
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_mutant_is_of_code_that_is_there():
    """Where one is not: python -m tests.faults.mutants. It keeps the others, and fills their places."""
    kept = sampled()
    assert [fault.id for fault in kept if not applies(fault)] == []
    gone = kept[0]._replace(snippet="is_no_longer_there()")
    renewed = sample([gone, *kept[1:]])
    assert gone not in renewed
    assert {*kept[1:]} <= {*renewed}
    assert len(renewed) == len(kept)


def test_every_family_of_kernels_has_two():
    """A lesson with a kernel; its further kernels, in files named after it, are of its family."""
    stems = {path for topic in ("triton", "fp8", "tma") for path in (ROOT / "examples" / topic).glob("*.py")}
    lessons = {p for p in stems if not any(p.stem.startswith(f"{other.stem}_") for other in stems if other != p)}
    counts = Counter(fault.technique for fault in FAULTS)
    for path in sorted(lessons):
        if "jit" in path.read_text(encoding="utf-8"):
            assert counts[f"{path.parent.name}/{path.stem}"] >= 2, path


SOURCE = """\
def kernel(x_ptr, n, band):
    # a comment
    x = load(
        x_ptr + n,
        mask=n < band,
        other=0.0,
    )
    if band:
        x += 1
    return x


def other(x_ptr, n):
    return load(x_ptr + n)
"""


def plant(tmp_path, snippet, replacement, **options):
    folder = tmp_path / "examples" / "triton"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "thing.py").write_text(SOURCE)
    return planted(Fault("triton/thing", snippet, replacement, "wrong", **options), tmp_path)[1]


@pytest.mark.parametrize(
    ("snippet", "replacement", "expected"),
    [
        ("load(x_ptr + n, mask=n < band, other=0.0)", "load(x_ptr)", "    x = load(x_ptr)\n"),  # however it is broken
        ("load(x_ptr + n,  # another\n mask=", "store(x_ptr, mask=", "    x = store(x_ptr, mask=n < band,\n"),
        ("x += 1\nreturn x", "x -= 1\nreturn x", "        x -= 1\n        return x\n"),
    ],
)
def test_a_snippet_is_compared_token_by_token(tmp_path, snippet, replacement, expected):
    assert expected in plant(tmp_path, snippet, replacement)


def test_a_snippet_must_be_there_as_often_as_its_fault_says(tmp_path):
    with pytest.raises(AssertionError, match="2 times in"):
        plant(tmp_path, "x_ptr + n", "x_ptr")
    with pytest.raises(AssertionError, match="in no file of triton/thing"):
        plant(tmp_path, "y_ptr", "x_ptr")
    assert plant(tmp_path, "x_ptr + n", "x_ptr", count=2).count("x_ptr + n") == 0
    assert "return load(x_ptr)" in plant(tmp_path, "x_ptr + n", "x_ptr", within="other")
    assert "return load(x_ptr)" in plant(tmp_path, "x_ptr + n", "x_ptr", count=2, nth=1)
