"""What can be read without running anything: topics, techniques, needs, and what a machine lacks."""

import dataclasses

from harness.catalog import CatalogError, Needs, fields, read_technique, read_topic, topics
from harness.hardware import machine

import pytest


def test_needs_are_parsed():
    needs = Needs.parse("triton>=3.5, sm_90, 8 GiB, gpu")
    assert needs.packages == (("triton", "3.5"),)
    assert (needs.sm, needs.gib, needs.gpu, needs.triton, needs.xla) == ((9, 0), 8.0, True, True, False)
    assert Needs.parse("sm_120").sm == (12, 0)
    assert Needs.parse("torch_xla").packages == (("torch_xla", None),)


def on(**changes):
    gpu = {
        "gpu": "NVIDIA H200", "capability": (9, 0), "sms": 132, "memory_gib": 140.0, "shared_bytes": 232448,
        "power_limit_w": 700.0, "max_clock_mhz": 1980, "driver": "580", "triton": "3.7.1",
    }  # fmt: skip
    return dataclasses.replace(machine(), **(gpu | changes))


NO_GPU = {"gpu": None, "capability": None, "memory_gib": None}


@pytest.mark.parametrize(
    ("text", "interpret", "changes", "reason"),
    [
        ("triton", "0", {}, None),
        ("triton, sm_100", "0", {}, "needs sm_100 (this is sm_90)"),
        ("triton, sm_89", "0", {"capability": (8, 0)}, "needs sm_89 (this is sm_80)"),
        ("200 GiB", "0", {}, "needs 200 GiB of GPU memory (this GPU has 140)"),
        ("no_such_package", "0", {}, "needs no_such_package (not installed: pip install no_such_package)"),
        ("triton>=99.1", "0", {}, "needs triton>=99.1 (this is "),
        ("triton, sm_100, 80 GiB", "1", NO_GPU, None),  # interpreted: only a GPU itself is lacking
        ("triton, gpu", "1", NO_GPU, "needs a GPU"),
        ("triton", "0", NO_GPU, "needs a GPU, or TRITON_INTERPRET=1"),
        ("", "0", NO_GPU, None),
    ],
)
def test_what_a_machine_lacks_is_said(monkeypatch, text, interpret, changes, reason):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    said = on(**changes).lacks(Needs.parse(text))
    assert said is None if reason is None else said.startswith(reason)


def test_the_interpreter_of_triton_3_6_needs_an_older_numpy(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for numpy, reason in (("2.4.6", "needs numpy<2.4"), ("2.3.5", "")):
        have = {"triton": "3.6.0", "numpy": numpy}
        monkeypatch.setattr("harness.hardware.package_version", have.__getitem__)
        assert (on(**NO_GPU, triton="3.6.0").lacks(Needs.parse("triton")) or "").startswith(reason)


def test_every_lesson_runs_as_a_script():
    lessons = [technique.path for topic in topics() for technique in topic.techniques]
    assert all(path.read_text().endswith('\nif __name__ == "__main__":\n    run(demo)\n') for path in lessons)


FIELDS = """Lesson.

Question   is it
           fast?
Needs      triton
Variants   bad_tma.py (by descriptors),
           bad_fp8.py
Study      studies/made/bad.py and studies/made/bad_more.py
Wins when  never

prose
  indented prose
"""


def test_a_docstring_names_its_question_its_variants_and_its_studies(tmp_path, monkeypatch):
    assert fields(FIELDS) | {"Variants": "", "Study": ""} == {
        "Question": "is it fast?", "Needs": "triton", "Variants": "", "Study": "", "Wins when": "never"
    }  # fmt: skip
    monkeypatch.setattr("harness.catalog.ROOT", tmp_path)
    names = ["bad.py", "bad_tma.py", "bad_fp8.py", "studies/made/bad.py", "studies/made/bad_more.py"]
    path, *files = (tmp_path / name for name in names)
    path.write_text(f'"""{FIELDS}"""\n')
    (tmp_path / "studies/made").mkdir(parents=True)
    for file in files:
        with pytest.raises(CatalogError, match=rf"names .*{file.name}.* which does not exist"):
            read_technique(path)
        file.touch()
    found = read_technique(path)
    assert (found.lesson, found.question, found.file) == ("Lesson.", "is it fast?", "bad.py")
    assert [*found.variants, *found.studies] == files


def test_a_malformed_technique_is_refused_by_name(tmp_path):
    for text, message in [
        ("x = 1\n", "starts with a docstring"),
        ('"""Lesson.\n\nNeeds      triton\n"""\n', "no 'Question' field"),
        ('"""Lesson.\n\nQuestion   why?\nNeeds      triton, 7 kg\n"""\n', "cannot read '7 kg'"),
        ("def (:\n", "invalid syntax"),
    ]:
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(CatalogError, match=rf"bad\.py.*{message}"):
            read_technique(tmp_path / "bad.py")


def test_a_topic_is_read_from_its_text(tmp_path):
    path = tmp_path / "topic.py"
    for text, message in [
        ('"""Topic."""\n', "lists its technique files in TECHNIQUES"),
        ("def (:\n", "invalid syntax"),
        ("TECHNIQUES = ['a/x.py', 'b/x.py']\n", "share a name"),
    ]:
        path.write_text(text)
        with pytest.raises(CatalogError, match=message):
            read_topic(path)
    path.write_text('"""Topic."""\nTECHNIQUES = ["gone.py", "latin.py"]\n')
    (tmp_path / "latin.py").write_bytes('"""Lesson \xe9."""\n'.encode("latin-1"))
    found = read_topic(path)
    assert found.title == "Topic."
    gone, latin = found.techniques  # what cannot be read keeps the others company
    assert gone.error.endswith("gone.py: No such file or directory")
    assert "latin.py" in latin.error
