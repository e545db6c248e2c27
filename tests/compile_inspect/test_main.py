"""The command line: phases in a worker of their own, which may fail, hang or be killed; the page and the record."""

import json
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser

import pytest
import torch

from compile_inspect import main as command
from compile_inspect.report import PHASES, Finding, Phase, Report, closing, page, phase_lines
from tests.compile_inspect import models_of_users as users

FILE = users.__file__


def run(*arguments: str) -> int:
    return command.main(list(arguments))


def test_the_broken_function_of_a_lesson_is_found_by_its_path(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which the tests' own process has
    model = ("--model", "examples/compiler/graph_breaks.py:branches", "--input", "4x4", "--input", "4", "--input", "1")
    assert run(*model, "--phases", "graph_breaks") == 0
    assert "if temperature > 0:" in capsys.readouterr().out


def test_one_phase_is_a_command_of_its_own(tmp_path):
    out = tmp_path / "out.html"
    arguments = ["--model", f"{FILE}:step", "--inputs", f"{FILE}:make_inputs", "--html", str(out)]
    one = [sys.executable, "-m", "compile_inspect.graph_breaks"]
    done = subprocess.run([*one, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "y = y / x.abs().max().item()" in done.stdout
    assert "Change first: graph break" in done.stdout
    assert '<h2 id="graph_breaks">' in out.read_text()


def test_a_phase_that_hangs_ends_with_what_it_saw_and_the_next_one_runs(capsys):
    model = ("--model", f"{FILE}:takes_minutes_later", "--input", "4", "--timeout", "8")
    assert run(*model, "--phases", "graph_breaks", "dynamo_capture") == 1
    said = capsys.readouterr().out
    assert said.count("TIMED OUT: it took longer than 8 s") == 2


def test_a_worker_that_is_killed_is_told(capsys):
    assert run("--model", f"{FILE}:is_killed_later", "--input", "4", "--phases", "dynamo_capture") == 1
    assert "FAILED: the process was killed by signal 9; most likely out of memory" in capsys.readouterr().out


def test_a_worker_that_ends_without_a_word_is_told_once_a_phase(capsys):
    model = ("--model", f"{FILE}:leaves_quietly_later", "--input", "4")
    assert run(*model, "--phases", "dynamo_capture", "guards") == 1
    assert capsys.readouterr().out.count("FAILED: the process ended with status 0") == 2


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("raises", "RuntimeError: the tokenizer is missing (at models_of_users.py:"),
        ("needs_another_device", "invalid device ordinal" if torch.cuda.is_available() else "NVIDIA"),
        ("takes_too_much_memory", "try smaller inputs"),
        ("gone", "it has step"),
    ],
)
def test_a_model_that_fails_in_eager_is_one_sentence(model, says, capsys):
    assert run("--model", f"{FILE}:{model}", "--input", "4", "--phases", "graph_breaks") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert says in said.err
    assert len(said.err.splitlines()) == 1


def test_what_the_model_prints_does_not_mix_with_the_report_which_is_recorded(tmp_path, capfd):
    record = tmp_path / "mine.json"
    model = ("--model", f"{FILE}:Counts", "--input", "4", "--json", str(record))
    assert run(*model, "--phases", "dynamo_capture") == 0
    said = capfd.readouterr()
    assert "a line of the model's own" not in (said.out + said.err).splitlines()
    held = json.loads(record.read_text())
    assert (held["schema"], held["topic"]) == (2, "compile_inspect")
    (example,) = held["examples"]
    assert (example["name"], example["status"]) == ("dynamo_capture", "passed")
    assert example["facts"]["model"] == f"{FILE}:Counts"
    assert example["answer"]


@pytest.mark.parametrize(
    "arguments", [("--timeout", "0"), ("--html", "nowhere/x.html"), ("--json", "nowhere/x.json")], ids=lambda a: a[0]
)
def test_wrong_options_are_refused_before_anything_runs(arguments, capsys):
    assert run(*arguments) == 2
    assert "error: " in capsys.readouterr().err


def filled() -> Report:
    phase = Phase("graph_breaks", "Which lines?", "passed", answer="one <line>", facts={"share": 0.38, "breaks": [
        {"at": "model.py:41", "source": "t.item()"}, {"at": "model.py:50", "source": "print(x)"}]})  # fmt: skip
    phase.table("numbers & words", [["model.py:41", 1.5], ["model.py:50", 1234.5]], "line|ms")
    phase.code("code", "if a < b:\n    pass")
    phase.bars("speed-up", "x", {"1": 2.0, "8": 1.0})
    phase.note("a note")
    phase.finding("compile one block", "block.compile()", seconds=12.0)
    phase.finding("graph break at model.py:41", "use a tensor", ms=0.4, share=0.2, where="model.py:41")
    phase.finding("unpriced", "think")
    bench = Phase("benchmark", "How fast?", "passed", facts={"speedup": 1.5, "eager_ms": 3.0, "compiled_ms": 2.0,
                                                              "break_even_calls": 1200})  # fmt: skip
    return Report("a model", {"device": "CPU"}, [bench, phase])


def test_the_verdict_is_three_lines_and_the_dearest_comes_first():
    report = filled()
    assert [each.cost for each in report.findings] == ["0.4 ms a call, 20%", "12 s once", "not measured"]
    assert report.verdict() == [
        "compiled 2 ms a call, eager 3 ms: 1.50x; paid after 1,200 calls.",
        "2 graph breaks cost 38% of the call; first: model.py:41 t.item()",
        "Change first: graph break at model.py:41 (0.4 ms a call, 20%): use a tensor",
    ]
    report.phases[1].findings.append(Finding("inductor gives another result", "report it", urgent=True))
    assert report.findings[0].urgent


def test_an_upper_bound_counts_less_and_a_share_is_of_the_compiled_call():
    report = filled()
    report.phases[1].finding("sort is not compiled", "move it", ms=1.0, at_most=True)
    assert [each.cost for each in report.findings[:2]] == ["0.4 ms a call, 20%", "up to 1 ms a call, 50%"]


def test_a_phase_survives_the_way_from_the_worker():
    phase = filled().phases[1]
    assert Phase.from_dict(json.loads(json.dumps(asdict(phase)))) == phase


def test_the_terminal_is_not_overrun(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    phase = filled().phases[1]
    phase.table("wide", [{"a": "x" * 200, "b": "y" * 100}])
    lines = [*phase_lines(phase, verbose=True), *closing(filled()).splitlines()]
    assert max(map(len, lines)) <= 80


class Tags(HTMLParser):
    """The open tags, the ids, the links, and what is loaded from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.loads, self.text = [], [], [], [], ""

    def handle_starttag(self, tag, attributes):
        held = dict(attributes)
        self.ids += [held["id"]] if "id" in held else []
        self.links += [held["href"]] if tag == "a" else []
        self.loads += [tag] if "src" in held or tag in ("link", "script", "img") else []
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_stands_alone_and_escapes():
    report = filled()
    read = Tags()
    read.feed(page(report))
    assert (read.open, read.loads) == ([], [])
    assert {link.removeprefix("#") for link in read.links} <= set(read.ids)
    assert len(set(read.ids)) == len(read.ids)
    for said in ("one <line>", "numbers & words", "if a < b:", "1,234", *report.verdict()):
        assert said in read.text
    assert Report("nothing").verdict()
    assert "Nothing to change was found." in page(Report("nothing"))
    assert "not every phase" in Report("hangs", phases=[Phase("guards", status="timed out")]).verdict()[-1]


def test_every_phase_has_a_module_with_a_question():
    for name in PHASES:
        module = __import__(f"compile_inspect.{name}", fromlist=["QUESTION"])
        assert module.QUESTION.endswith("?"), name
        assert callable(module.look)
