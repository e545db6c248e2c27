"""CLAIMS.md: up to date with the records, each verdict from its numbers, and an error for what no record holds."""

import json
import re
from dataclasses import asdict

from harness.bench import Row, Table
from harness.catalog import ROOT, topics
from harness.record import SCHEMA, ExampleRecord

import pytest

from companion import claims
from companion.claims import Claim, Evidence, Reader, ledger_page, number, times, told, verdict
from companion.ledger import CLAIMS
from companion.readme import OLDER, OUTLINE

ALL = [claim for group in CLAIMS.values() for claim in group]
FOUND = topics()


def part(**more) -> dict:
    """A record of a table, in which the compiled row is 3 times as fast, 2 on a host twice as fast; and more."""
    rows = [Row("eager", False, None, 0.0, ms=3.0, speedup=1.0, gpu_ms=1.0, enqueue_us=3000.0)]
    rows.append(Row("compiled", False, None, 0.0, ms=1.0, speedup=3.0, gpu_ms=0.9, enqueue_us=1000.0))
    return ExampleRecord("made", tables=[asdict(Table("made", "8x8", "eager", rows))], **more).as_dict()


def test_the_page_is_up_to_date(capsys):
    assert claims.claims(check=True) == 0, capsys.readouterr().err


def test_each_claim_is_told_once_and_says_why_or_what_is_missing():
    assert len({claim.id for claim in ALL}) == len(ALL) > 50
    for claim in ALL:
        assert bool(claim.measured) != bool(claim.needs), claim.id
        assert claim.because or claim.needs, claim.id
        numbers = re.findall(r"\d+(?:\.\d+)?(?:x\b| ?%| ?ms\b)", claim.because)
        assert not [each for each in numbers if each != "2.33x"], f"{claim.id}: a measured number is read, not typed"


def test_the_verdict_follows_from_the_values():
    claim, good, bad = Claim("a", "s", "says", measured=dict), told("x", True), told("y", False)
    assert verdict(claim, {"one": good, "two": good}) == "holds"
    assert verdict(claim, {"one": good, "two": bad, "three": good}) == "holds only for: one; three"
    assert verdict(claim, {"one": bad}) == "does not hold"
    assert verdict(claim._replace(measured=None, needs="a B200"), {}) == "not measured: needs a B200"
    assert times(1.996, 2.0) == ("2.00x", True)
    assert not times(1.99, 2.0).holds
    assert not times(4.1, 3, 4).holds
    assert number(13.08, " s", 5, 10) == ("13.08 s", False)


def test_a_ratio_of_the_host_must_hold_on_a_faster_one_too():
    ratio = Evidence("made", part()).ratio("made", "eager", "compiled", "8x8")
    assert ratio == 3.0
    assert 1.0 < ratio.faster < 3.0
    assert times(ratio, ratio.faster - 0.01) == (f"3.00x (host twice as fast: {ratio.faster:.2f}x)", True)
    assert not times(ratio, ratio.faster + 0.01).holds


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            lambda e: e.ratios("other", "eager", "compiled"),
            "made: no table 'other' has 'compiled' and 'eager', case any",
        ),
        (lambda e: e.ratio("made", "eager", "none", "8x8"), "made: no table 'made' has 'none'"),
        (lambda e: e.ratio("made", "eager", "compiled", "9x9"), "case '9x9'"),
        (lambda e: e.fact("graphs", "static", "seconds"), "made: no fact graphs / static / seconds"),
        (lambda e: e.fact("graphs", "static", "graphs", "more"), "made: no fact"),
        (lambda e: e.code("kernel", 80, "wgmma"), "made: no code of kernel for sm_80"),
    ],
)
def test_what_is_not_recorded_is_named(read, message):
    code = [{"kernel": "kernel", "sm": 90, "found": {"wgmma": 4}}]
    evidence = Evidence("made", part(facts={"graphs": {"static": {"graphs": 10}}}, codegen=code))
    assert evidence.fact("graphs", "static", "graphs") == 10
    assert (evidence.code("kernel", 90, "wgmma"), evidence.code("kernel", 90, "setmaxnreg")) == (4, 0)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(evidence)


def test_a_claim_that_reads_nothing_recorded_is_named(tmp_path):
    def page(**changed):
        claim = Claim("made-up", "Mode Comparison", "says", "why", lambda read: {"": told(read("softmax"), True)})
        return ledger_page({"group": [claim._replace(**changed)]}, FOUND)

    assert "`python triton_examples.py softmax`" in page()
    for changed, message in (
        ({"section": "Nowhere"}, "docs/chapter.txt has no section 'Nowhere'"),
        ({"measured": lambda read: read("softmaks")}, "there is no technique 'softmaks'"),
        ({"measured": lambda read: {"": times(read("softmax").ratio("softmax", "torch", "x", "1x1"))}}, "no table"),
    ):
        with pytest.raises(ValueError, match=f"claim made-up: .*{message}"):
            page(**changed)
    with pytest.raises(ValueError, match="softmax: its lesson is not recorded"):
        Reader(FOUND, tmp_path)("softmax")


def test_another_verdict_of_another_machine_is_told(tmp_path):
    """Of claims whose evidence that machine has recorded; those with the same verdict, or less evidence, are not."""
    (tmp_path / OUTLINE).parent.mkdir()
    (tmp_path / OUTLINE).write_text((ROOT / OUTLINE).read_text())
    for folder, gpu, fast in (("h200", "H200", True), ("h100", "H100", False)):
        example = ExampleRecord("softmax", facts={"fast": fast, "same": 1} | ({"more": 1} if fast else {})).as_dict()
        example |= {"machine": {"gpu": gpu, "ranks": 1, "host": {}}, "when": "2026"}
        (tmp_path / "results" / folder).mkdir(parents=True)
        text = json.dumps({"schema": SCHEMA, "topic": "", "gpu": gpu, "running": None, "examples": [example]})
        (tmp_path / "results" / folder / "triton_examples.json").write_text(text)

    def claim(fact):
        return Claim(fact, "Mode Comparison", f"says {fact}", "", lambda read: {
            "": told(fact, bool(read("softmax").fact(fact)))})  # fmt: skip

    *_, table = ledger_page({"group": [claim(f) for f in ("fast", "same", "more")]}, FOUND, tmp_path).partition(
        "## Other"
    )
    rows = [line for line in table.splitlines() if line.startswith("| [")]
    assert rows == [f"| [says fast](#fast) | an H100 | fast{OLDER} | **does not hold** |"]
    with pytest.raises(ValueError, match="softmax: its lesson is not recorded"):
        Reader(FOUND, tmp_path, folder="none")("softmax")


def test_a_stale_page_fails_and_the_mark_of_older_code_is_no_difference(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(claims, "ledger_page", lambda *_: f"page 1.0x{claims.OLDER}\n")
    assert claims.claims(check=True, root=tmp_path) == 1
    assert "CLAIMS.md differs" in capsys.readouterr().err
    assert claims.claims(check=False, root=tmp_path) == 0
    (tmp_path / "CLAIMS.md").write_text("page 1.0x\n")
    assert claims.claims(check=True, root=tmp_path) == 0
    assert claims.claims(check=False, root=tmp_path) == 0
    assert "renewed" in capsys.readouterr().out


def test_an_old_record_is_marked_and_a_study_is_run_with_its_lesson(monkeypatch):
    """A claim of a study is not marked where the lesson alone is of older code."""
    claim = Claim(
        "a", "Mode Comparison", "says", "why", lambda read: {"": told(bool(read("softmax", study=True)), True)}
    )
    for parts in (["lesson"], ["study"]):
        monkeypatch.setattr(claims, "stale_parts", lambda *_, parts=parts: parts)
        page = ledger_page({"group": [claim]}, FOUND, ROOT)
        assert (claims.OLDER in page) == (parts == ["study"])
    assert "`python triton_examples.py softmax --study`" in page
