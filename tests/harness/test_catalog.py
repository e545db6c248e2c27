"""What can be read without running anything: topics, techniques, needs, and doctor's verdicts."""

import dataclasses

from harness.catalog import ROOT, CatalogError, Needs, fields, read_technique, read_topic, topics
from harness.hardware import machine

import pytest


def test_needs_are_parsed():
    needs = Needs.parse("triton>=3.5, sm_90, 8 GiB, gpu")
    assert needs.packages == (("triton", "3.5"),)
    assert (needs.sm, needs.gib, needs.gpu, needs.triton) == ((9, 0), 8.0, True, True)
    assert Needs.parse("sm_120").sm == (12, 0)
    assert Needs.parse("torch_xla").packages == (("torch_xla", None),)
    with pytest.raises(CatalogError, match="cannot read '8 gigs'"):
        Needs.parse("triton, 8 gigs")


def test_fields_of_a_docstring_continue_on_indented_lines():
    text = "Lesson.\n\nTechnique  one\n           two\nNeeds      triton\n\nprose\n  indented prose\nWins when  never\n"
    assert fields(text) == {"Technique": "one two", "Needs": "triton", "Wins when": "never"}


def on(**changes):
    gpu = {
        "gpu": "NVIDIA H200", "capability": (9, 0), "sms": 132, "memory_gib": 140.0, "shared_bytes": 232448,
        "power_limit_w": 700.0, "max_clock_mhz": 1980, "driver": "580",
    }  # fmt: skip
    return dataclasses.replace(machine(), **(gpu | changes))


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        ("triton", {}, None),
        ("triton, sm_90", {}, None),
        ("triton, sm_100", {}, "needs sm_100 (this is sm_90)"),
        ("triton, sm_89", {"capability": (8, 0)}, "needs sm_89 (this is sm_80)"),
        ("200 GiB", {}, "needs 200 GiB of GPU memory (this GPU has 140)"),
        ("no_such_package", {}, "needs no_such_package (not installed: pip install no_such_package)"),
        ("triton>=99.1", {}, "needs triton>=99.1 (this is "),
    ],
)
def test_what_a_gpu_lacks_is_said(monkeypatch, text, changes, reason):
    if "triton" in text:
        pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    said = on(**changes).lacks(Needs.parse(text))
    assert said is None if reason is None else said.startswith(reason)


def test_without_a_gpu_kernels_are_interpreted_and_only_gpu_is_lacking(monkeypatch):
    pytest.importorskip("triton")
    none = on(gpu=None, capability=None, memory_gib=None, triton="3.7.1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert none.mode == "interpreted"
    assert none.lacks(Needs.parse("triton, sm_100, 80 GiB")) is None
    assert none.lacks(Needs.parse("triton, gpu")) == "needs a GPU"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert none.mode == "cpu"
    assert none.lacks(Needs.parse("triton")).startswith("needs a GPU, or TRITON_INTERPRET=1")
    assert none.lacks(Needs.parse("")) is None


def test_the_interpreter_of_triton_3_6_needs_an_older_numpy(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    old = on(gpu=None, capability=None, triton="3.6.0")
    monkeypatch.setattr("harness.hardware.package_version", lambda name: {"triton": "3.6.0", "numpy": "2.4.6"}[name])
    assert old.lacks(Needs.parse("triton")).startswith("needs numpy<2.4")
    monkeypatch.setattr("harness.hardware.package_version", lambda name: {"triton": "3.6.0", "numpy": "2.3.5"}[name])
    assert old.lacks(Needs.parse("triton")) is None


def test_every_topic_of_the_repository_reads():
    found = topics()
    assert "triton_examples" in [topic.name for topic in found]
    for topic in found:
        assert topic.techniques
        for technique in topic.techniques:
            assert technique.error is None
            assert technique.question.endswith("?")
            assert len(technique.lesson) <= 120
            named = fields(technique_docstring(technique.path))
            for field in ("Technique", "Shapes", "Dtypes", "Errors", "Wins when", "Source", "Run"):
                assert field in named, f"{technique.file} has no {field}"
            assert named["Run"] == f"python {technique.file}"


def technique_docstring(path):
    import ast

    return ast.get_docstring(ast.parse(path.read_text()))


def test_every_technique_file_belongs_to_a_topic():
    listed = {technique.path for topic in topics() for technique in topic.techniques}
    there = set((ROOT / "examples").glob("*/*.py"))
    assert there == listed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "starts with a docstring"),
        ('"""Lesson.\n\nNeeds      triton\n"""\n', "no 'Question' field"),
        ('"""Lesson.\n\nQuestion   why?\nNeeds      7 kg\n"""\n', "cannot read '7 kg'"),
        ("def (:\n", "invalid syntax"),
    ],
)
def test_a_malformed_technique_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(CatalogError, match=rf"bad\.py.*{message}"):
        read_technique(path)


def test_a_malformed_topic_is_refused(tmp_path):
    topic = tmp_path / "topic.py"
    topic.write_text('"""Topic."""\n')
    with pytest.raises(CatalogError, match="lists its technique files in TECHNIQUES"):
        read_topic(topic)
    topic.write_text("def (:\n")
    with pytest.raises(CatalogError, match="invalid syntax"):
        read_topic(topic)


def test_the_architectures_of_a_topic_are_read_from_its_text(tmp_path):
    topic = tmp_path / "topic.py"
    topic.write_text("TECHNIQUES = []\n")
    assert read_topic(topic).architectures == ()
    topic.write_text("ARCHITECTURES = (80, 120)\nTECHNIQUES = []\n")
    assert read_topic(topic).architectures == (80, 120)
    for bad in ("90", "('sm_90',)"):
        topic.write_text(f"TECHNIQUES = []\nARCHITECTURES = {bad}\n")
        with pytest.raises(CatalogError, match=r"ARCHITECTURES is .*; write \(80, 90\) for sm_80 and sm_90"):
            read_topic(topic)


def test_a_technique_that_cannot_be_read_keeps_the_others_company(tmp_path):
    topic = tmp_path / "topic.py"
    topic.write_text('"""Topic."""\nTECHNIQUES = ["gone.py", "latin.py"]\n')
    (tmp_path / "latin.py").write_bytes('"""Lesson \xe9."""\n'.encode("latin-1"))
    gone, latin = read_topic(topic).techniques
    assert gone.error.endswith("gone.py: no such file")
    assert "latin.py" in latin.error
