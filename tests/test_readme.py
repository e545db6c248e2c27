"""README says what the code and the records say."""

import re

from harness.catalog import ROOT, topics
from harness.report import load_record, readme_text, techniques_table

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_tables_are_up_to_date():
    assert readme_text(README) == README, "run: python -m harness readme"


def test_the_table_has_the_rows_of_list(cli):
    table = techniques_table(topics())
    for topic in topics():
        listed = cli(topic.file, "--list").stdout
        for technique in topic.techniques:
            assert re.search(rf"^  {technique.name} +{re.escape(technique.lesson)}$", listed, re.M)
            assert f"[{technique.name}]({technique.file})" in table
            assert technique.question in table


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_every_make_target_and_script_named_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for script in re.findall(r"python ([\w/]+\.py)", README):
        assert (ROOT / script).exists(), script


def test_recorded_runs_are_clean_and_complete():
    for path in sorted((ROOT / "results").glob("*/*.json")):
        record = load_record(path)
        assert record["commit"], f"{path} does not say which code it measured"
        assert not record["dirty"]
        assert {example["status"] for example in record["examples"]} <= {"passed", "skipped"}
        topic = next(t for t in topics() if t.name == record["topic"])
        assert [e["name"] for e in record["examples"]] == [t.name for t in topic.techniques]
