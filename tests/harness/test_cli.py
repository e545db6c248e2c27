"""The command line: in this process wherever it can be, in one of its own where that is the point."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections import namedtuple

from harness import cli as command
from harness import interpreted, record
from harness.catalog import ROOT, Needs, topics
from harness.hardware import machine

import pytest

TOPICS = {topic.name: [technique.name for technique in topic.techniques] for topic in topics()}
NO_TRITON = machine().lacks(Needs.parse("triton"))  # or a numpy too new for an old interpreter

LESSON = '''"""The technique {name}.

Question   does {name} run?
Needs      {needs}
{study}"""
from harness import Skip, Timing, Work, run
import os, sys, tempfile, time, torch

KEPT = []


def demo(h):
{body}


if __name__ == "__main__":
    run(demo)
'''
TOPIC = '"""A topic made for a test."""\nTECHNIQUES = {files!r}\n\nif __name__ == "__main__":\n    {main}\n'
GOOD = "h.check(lambda x: x * 2, lambda x: x.double() * 2, h.randn(3, 5), what='doubling')"
TABLE = """
x = h.randn(64, 64)
table = h.compare({'torch': lambda x: x * 2, 'ours': lambda x: x + x}, lambda x: x.double() * 2, x,
                  baseline='torch', work=Work(bytes=2 * x.nbytes), title='doubling')
h.answer(lambda: f"{table.over('torch') > 0}: measured")
"""
NEEDY = dict.fromkeys(("first", "second", "third"), "raise AssertionError('must not run')")
NOT_THERE = "needs no_such_package>=2 (not installed: pip install no_such_package)"
MAKE_XLA = "needs torch_xla>=2.9 (not installed: `make xla` sets it up in .venv-xla and runs the topic there)"


Done = namedtuple("Done", "returncode stdout stderr")


def indented(body):
    return "\n".join(f"    {line}" for line in body.strip().splitlines())


@pytest.fixture
def topic(tmp_path, monkeypatch):
    """Write a topic of small lessons: topic(good="demo body", studies={"good": "study body"}). Its root is tmp_path."""
    for place in ("catalog", "cli"):
        monkeypatch.setattr(f"harness.{place}.ROOT", tmp_path)
    monkeypatch.setattr(record.recorded, "__defaults__", (tmp_path,))
    monkeypatch.setattr("harness.bench.cpu_ms", lambda fn: (fn(), [1.0, 1.5, 1.2])[1])
    (tmp_path / "studies").mkdir()

    def write(needs="torch", studies=(), imports="", **bodies):
        for name, body in bodies.items():
            study = f"Study      studies/{name}.py\n" if name in studies else ""
            text = LESSON.format(name=name, needs=needs, study=study, body=indented(body))
            (tmp_path / f"{name}.py").write_text(text.replace("import os,", f"{imports}import os,"))
            if study:
                text = f"import {name}, torch\n\ndef study(h):\n{indented(studies[name])}\n"
                (tmp_path / "studies" / f"{name}.py").write_text(text)
            for known in (name, f"studies.{name}"):
                sys.modules.pop(known, None)
        script = tmp_path / "made_topic.py"
        main = "from harness.cli import main; main(__file__)"
        script.write_text(TOPIC.format(files=[f"{name}.py" for name in bodies], main=main))
        return script

    yield write
    # A test may have given __main__ a file of the topic, which monkeypatch takes back after this.
    for name in {*sys.modules} - {"__main__"}:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def main(capsys, monkeypatch):
    """`python SCRIPT ARGUMENTS` without starting a Python."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(script, *argv):
        with pytest.raises(SystemExit) as stop:
            command.main(str(script), [*map(str, argv)])
        return Done(stop.value.code, *capsys.readouterr())

    return run


def examples_of(path):
    return {example["name"]: example for example in record.load(path)["examples"]}


def statuses(path):
    return {name: example["status"] for name, example in examples_of(path).items()}


# --- what becomes of each technique

BAD = {
    "wrong": "h.check(lambda x: x * 3, lambda x: x.double() * 2, h.randn(3, 5), what='tripling')",
    "leaves": f"{GOOD}\nsys.exit(0)",
    "memory": "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB')",
    "odd": "open('/no/such/file')",
    "idle": "pass",
    "unfinished": "yield h.check(None, None)",
    "nan": "h.fact('ratio', float('nan'))",
    "mute": f"{GOOD}\nh.answer(lambda: '', timed=False)",
    "moves": f"{GOOD}\nos.chdir('/')",
    "loses": f"{GOOD}\nwith tempfile.TemporaryDirectory() as folder:\n    os.chdir(folder)",
    "broken": "(",
}
REASONS = {
    "wrong": "tripling: 15 of 15 elements are wrong", "leaves": "SystemExit: 0", "memory": "try --quick",
    "odd": "FileNotFoundError: [Errno 2]", "idle": "checked, compared and recorded nothing",
    "unfinished": "checked, compared and recorded nothing", "nan": "cannot be recorded", "loses": "FileNotFoundError",
    "mute": "at most 240 characters", "moves": "working folder was {!r}, is '/'", "broken": "was never closed",
}  # fmt: skip


def test_a_technique_that_fails_stops_no_other(main, topic, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    skips = "raise Skip('has nothing to do')"
    script = topic(first=f"{GOOD}\nh.fact('answer', 42)", **BAD, skips=skips, last=GOOD)
    done = main(script, "--json", "r.json")
    assert (done.returncode, done.stderr) == (1, "")
    examples = examples_of(tmp_path / "r.json")
    assert list(examples) == ["first", *BAD, "skips", "last"]
    for name, example in examples.items():
        assert example["status"] == ("failed" if name in BAD else "skipped" if name == "skips" else "passed"), example
        assert REASONS.get(name, "").format(str(tmp_path)) in (example["reason"] or "")
        assert re.search(rf"^ *{name} +{example['status']}", done.stdout, re.M), "the closing table has each of them"
    assert examples["first"]["facts"] == {"answer": 42}
    assert examples["wrong"]["checks"] == [{"what": "tripling", "error": None, "passed": False}]
    for said in ("SKIPPED: has nothing to do", "FAILED: out of GPU memory", "Traceback"):  # of what is not known
        assert said in done.stdout
    alone = main(script, "broken", "--check-only")  # the only one asked for: no reason to skip
    assert (alone.returncode, "was never closed" in alone.stdout) == (1, True)
    assert "was never closed" in main(script, "--list").stdout


def test_a_topic_that_cannot_start_says_so_in_one_line(main, topic, tmp_path):
    script, path = topic(needs="no_such_package>=2", **NEEDY), tmp_path / "r.json"
    for asked, option in (((), "--quick"), (("third", "first"), "--profile")):
        path.unlink(missing_ok=True)
        assert main(script, *asked, option, "--json", path) == Done(0, f"SKIPPED: {NOT_THERE}\n", "")
        examples = examples_of(path)
        assert list(examples) == [name for name in NEEDY if not asked or name in asked]
        assert {(e["status"], e["reason"]) for e in examples.values()} == {("skipped", NOT_THERE)}
        assert all(e["machine"]["torch"] == machine().torch for e in examples.values())
        assert all(e["command"].endswith(f"{option} --json {path}") for e in examples.values())
    topic(second=GOOD)  # where one technique can start, each speaks for itself
    script.write_text(TOPIC.format(files=["first.py", "second.py"], main="pass"))
    path.unlink()
    done = main(script, "--json", path)
    assert statuses(path) == {"first": "skipped", "second": "passed"}
    assert (done.returncode, f"SKIPPED: {NOT_THERE}" in done.stdout) == (0, True)
    if not machine().gpu:
        assert main(topic(needs="gpu", a=NEEDY["first"])).stdout == "SKIPPED: needs a GPU\n"


def test_importing_harness_ends_only_a_lesson_that_lacks_its_package(tmp_path, monkeypatch, capsys):
    path = tmp_path / "program.py"
    path.write_bytes("# coding: latin-1\n# \xe9\n".encode("latin-1"))  # somebody's own, which may be anything
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
    command.skip_without_packages()
    path.write_text(LESSON.format(name="needy", needs="no_such_package>=2", study="", body="    pass"))
    for argv, code, said in (([], 0, f"SKIPPED: {NOT_THERE}\n"), (["--list"], 0, "no_such"), (["--bogus"], 2, "")):
        monkeypatch.setattr(sys, "argv", [str(path), *argv])
        with pytest.raises(SystemExit) as stop:
            command.skip_without_packages()
        assert (stop.value.code, said in capsys.readouterr().out) == (code, True)


# --- usage, and what can be asked for


def test_wrong_usage_ends_with_2_before_anything_runs(main, topic, tmp_path):
    names = ("mine", "gpu", "old", "part", "list", "bytes")
    script, paths = topic(softmax=GOOD, matmul=GOOD), {name: tmp_path / name for name in names}
    paths["mine"].touch()  # an empty file, as mktemp leaves it, is as good as none
    assert main(script, "softmax", "--json", paths["mine"]).returncode == 0
    paths["bytes"].write_bytes(b"\xff")
    mine = json.loads(paths["mine"].read_text())
    for name, text in {"mine": mine | {"topic": "other"}, "gpu": mine | {"gpu": "another"}, "part": {"schema": 2},
                       "old": mine | {"schema": 1}, "list": []}.items():  # fmt: skip
        paths[name].write_text(json.dumps(text))
    for args, message in [
        (["sofmax"], "no technique 'sofmax'; did you mean softmax"),
        (["--list", "zzz"], "there are: softmax, matmul"),
        (["--check-only", "--profile"], "not allowed with"),
        (["--json", paths["bytes"]], "not JSON"),
        (["--json", paths["list"]], "not a record of schema 2"),
        (["--json", paths["old"]], "not a record of schema 2"),
        (["--json", paths["part"]], "its topic, gpu, running, examples cannot be read"),
        (["--json", paths["mine"]], "holds other on"),
        (["--json", paths["gpu"]], "choose another file"),
        (["--json", "no/such/folder/x.json"], "No such file or directory"),
        (["--json", "."], "Is a directory"),
    ]:
        done = main(script, *args)
        assert (done.returncode, done.stdout, message in done.stderr) == (2, "", True), done
    assert json.loads(paths["gpu"].read_text())["gpu"] == "another", "what is refused is left alone"


def test_check_only_and_profile_time_nothing_and_a_cpu_is_timed(main, topic, tmp_path):
    script, path = topic(one=TABLE), tmp_path / "r.json"
    for option, tables, timed in (("--check-only", 1, False), ("--profile", 0, False), ("--quick", 1, True)):
        done = main(script, option, "--json", path)
        assert done.returncode == 0, done.stdout
        example = examples_of(path)["one"]
        rows = [row for table in example["tables"] for row in table["rows"]]
        assert (len(example["tables"]), {row["ms"] is not None for row in rows} - {timed}) == (tables, set())
        assert example["answer"] == ("True: measured" if timed else None)
        assert (len(example["profiled"]), "profiled" in done.stdout) == (2 * (tables == 0), tables == 0)
        assert ("True: measured" in done.stdout) == ("x torch" in done.stdout) == timed


def test_the_seed_changes_the_data_and_the_name_fixes_it(main, topic, tmp_path):
    script, path = topic(**dict.fromkeys("ab", "h.fact('x', h.randn(1).item())")), tmp_path / "r.json"

    def values(*args):
        main(script, *args, "--json", path)
        return {name: example["facts"]["x"] for name, example in examples_of(path).items()}

    one = values()
    assert one["a"] != one["b"]
    assert values("b") == one
    other = values("--seed", "1", "a")
    assert (other["a"] != one["a"], other["b"], examples_of(path)["a"]["seed"]) == (True, one["b"], 1)


# --- what is printed


@pytest.mark.skipif(machine().mode == "gpu", reason="looks at the tables of a run without a GPU")
def test_it_is_short_unless_asked_and_whole_in_80_columns(main, topic):
    names = "**{f'ours with option {i}': lambda x: x + x for i in range(6)}"
    wide = TABLE.replace("'ours': lambda x: x + x", f"'ours': lambda x: x + x, {names}")
    script = topic(
        wide=f"{wide.replace('64, 64', '32, 64')}{wide}h.say('What follows from it. ' * 8)",
        skipped="raise Skip('that is a reason which goes on and on, ' * 5)",
        code=GOOD,
        studies={"wide": f"{GOOD}\nassert [t.title for t in h.lesson] == ['doubling'] * 2\nh.fact('a bar', 0.5)"},
    )
    quiet, verbose, study = (main(script, *options).stdout for options in ((), ("-v",), ("--study",)))
    for text in (quiet, verbose, study):
        for needed in ("does wide run?", "SKIPPED: that is a reason", "What follows from it."):
            assert needed in text
        assert text.count("True: measured") == 2, "at its technique, and in the closing table"
        assert "\u2026" not in text, "nothing is cut short"
        assert ("x torch" in text, "a bar: 0.5" in text) == (text is verbose, text is study)
        assert text is verbose or max(len(ln) for ln in text.splitlines() if not ln.startswith("SKIPPED")) <= 80


# --- the record


def test_a_run_replaces_what_it_ran_and_keeps_the_rest(main, topic, tmp_path):
    path, link = tmp_path / "r.json", tmp_path / "link.json"
    link.symlink_to(path)  # is followed
    script = topic(**dict.fromkeys("abc", "h.fact('n', 1)"), studies={"a": "h.fact('of the study', 1)"})
    assert main(script, "c", "a", "--study", "--json", link).returncode == 0
    first = examples_of(path)
    assert (link.is_symlink(), list(first)) == (True, ["a", "c"]), "in the topic's order"
    script = topic(**dict.fromkeys("abc", "h.fact('n', 2)"), studies={"a": "raise KeyError"})
    assert main(script, "a", "b", "--json", path).returncode == 0
    second = examples_of(path)
    assert {name: example["facts"]["n"] for name, example in second.items()} == {"a": 2, "b": 2, "c": 1}
    assert second["c"] == first["c"]
    assert second["a"]["study"] == first["a"]["study"], "a study stays where none was run"
    assert (second["a"]["study"]["facts"], "study" in second["b"]) == ({"of the study": 1}, False)
    held, a = record.load(path), second["a"]
    assert (held["topic"], held["gpu"], held["running"]) == ("made_topic", machine().gpu, None)
    assert (a["machine"]["torch"], set(a["machine"]["host"])) == (machine().torch, {"cpu", "cores"})
    assert set(a["machine"]["ceilings"]) == {"copy_tbps", "gemm_tflops", "launch_us"}
    assert (a["command"], a["question"]) == (f"python made_topic.py a b --json {path}", "does a run?")
    assert re.fullmatch("[0-9a-f]{16}", a["sources"])
    assert main(script, "a", "--study", "--json", path).returncode == 1, "a study that fails fails the run"
    last = examples_of(path)["a"]
    assert (last["status"], last["study"]["status"]) == ("passed", "failed")


def test_a_study_follows_its_lesson_and_only_one_that_passed(main, topic, tmp_path):
    study = "h.fact('over', [t.over('torch') > 0 for t in h.lesson])\nassert h.is_study"
    study += f"\nassert 'doubling' in open({str(tmp_path / 'r.json')!r}).read(), 'it may be killed'\nh.answer(1)"
    script = topic(good=TABLE, wrong=BAD["wrong"], bare=GOOD, studies={"good": study, "wrong": study})
    assert main(script, "--study", "--json", tmp_path / "r.json").returncode == 1
    examples = examples_of(tmp_path / "r.json")
    assert [name for name in examples if "study" in examples[name]] == ["good"]
    assert examples["good"]["study"]["facts"] == {"over": [True]}
    assert "pass a function" in examples["good"]["study"]["reason"]


def test_one_lesson_run_as_a_script_shares_its_kernels_with_its_study(main, topic, tmp_path, monkeypatch):
    """It is imported again under its dotted name, so what its study imports is what it ran."""
    body = "KEPT.append('demo')\nh.fact('where', [__name__, id(KEPT)])"
    study = "h.fact('where', [one.__name__, id(one.KEPT)])\nassert one.KEPT == ['demo']"
    script, path = topic(zero=GOOD, one=body, two=GOOD, studies={"one": study}), tmp_path / "r.json"
    script.write_text(script.read_text().replace("'", '"'))  # as ruff leaves a topic script
    assert main(script, "zero", "two", "--json", path).returncode == 0
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "one.py"), "--study", "--json", str(path)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(tmp_path / "one.py"), run_name="__main__")
    examples = examples_of(path)
    assert (stop.value.code, record.load(path)["topic"], list(examples)) == (0, "made_topic", ["zero", "one", "two"])
    assert examples["one"]["facts"] == examples["one"]["study"]["facts"]
    assert examples["one"]["facts"]["where"][0] == "one"


# --- processes of their own


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_keep_what_was_done(topic, tmp_path, sent):
    sleep, path = "import time\nprint('sleeping', flush=True)\ntime.sleep(60)", tmp_path / "r"
    script = topic(done=GOOD, slow=f"{TABLE}{sleep}", never=GOOD)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    line = [sys.executable, script, "--json", path]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    for text in process.stdout:
        if "sleeping" in text:
            break
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    if sent is signal.SIGINT:
        assert (process.returncode, "interrupted" in out, "x torch" in out) == (130, True, True), out + err
        assert statuses(path) == {"done": "passed", "slow": "failed"}
        slow = examples_of(path)["slow"]
        assert (slow["reason"], slow["answer"], slow["tables"][0]["rows"][1]["ms"] > 0) == ("interrupted", None, True)
    else:
        assert (statuses(path), record.load(path)["running"]) == ({"done": "passed"}, "slow")


def test_a_reader_who_closes_the_pipe_gets_the_whole_record(topic, tmp_path):
    path = tmp_path / "r.json"
    line = f"{sys.executable} {topic(a=GOOD, b=GOOD)} --json {path} | head -1"
    subprocess.run(line, shell=True, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert statuses(path) == {"a": "passed", "b": "passed"}


def test_list_is_fast_and_imports_no_torch(cli):
    listing = "import sys\nfrom harness.cli import main\n"
    for name in TOPICS:
        listing += f"try:\n    main({str(ROOT / f'{name}.py')!r}, ['--list'])\nexcept SystemExit as stop:\n"
        listing += "    assert not stop.code\n"
    done = cli(("-c", f"{listing}print('LOADED', *sorted({{'torch', 'triton', 'rich'}} & set(sys.modules)))"))
    assert done.stdout.endswith("LOADED\n"), done.stdout[-200:] + done.stderr
    for names in TOPICS.values():
        assert all(re.search(rf"^  {name} +\S", done.stdout, re.M) for name in names)
    longest, before = max(TOPICS, key=lambda name: len(TOPICS[name])), os.times()
    assert cli(f"{longest}.py", "--list").returncode == 0
    after = os.times()  # of the processor: this machine may have other things to do
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.3


@pytest.mark.skipif(NO_TRITON is not None, reason=NO_TRITON or "")
def test_a_lesson_really_runs_from_another_folder_and_interpreted_as_triton_says(cli, topic, tmp_path, monkeypatch):
    import triton

    body = "h.check(vector_add, lambda x, y: x.double() + y.double(), h.randn(999), h.randn(999))"
    topic(needs="triton", one=f"from examples.triton.vector_add import vector_add\n{body}")
    done = cli(tmp_path / "one.py", "--json", "own.json", cwd=tmp_path / "studies")
    assert done.returncode == 0, done.stdout + done.stderr
    example = examples_of(tmp_path / "studies" / "own.json")["one"]
    assert (example["status"], record.load(tmp_path / "studies" / "own.json")["topic"]) == ("passed", "one")
    if not machine().gpu:
        assert example["sizes"] == "interpreted"
        assert "import harness first" in cli(("-c", "import triton; from harness import Harness")).stderr
    for value, on in {"1": 1, "Y": 1, "on": 1, "TRUE": 1, "0": 0, "no": 0, "": 0}.items():
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert interpreted() == triton.knobs.runtime.interpret == bool(on), value


COMPILES = "h.check({}(lambda x: (x.sin() + 1).relu()), lambda x: (x.double().sin() + 1).relu(), torch.randn(100))"
COMPILED = COMPILES.format("torch.compile")
ONE_GRAPH = "def answers(x):\n    if x.sum() > 0:\n        return x\n    return -x\n"
ONE_GRAPH += "torch.compile(answers, fullgraph=True, backend='eager')(torch.ones(3))"
NO_CXX = "import torch._inductor.config as config\nwith config.patch({'cpp.cxx': (None, '/no/such/compiler')}):\n    "
FAULTS = {  # what the technique does, and what is said of it
    "backend": (COMPILES.format("torch.compile(backend='inductr')"), "torch.compile: Invalid backend: 'inductr'"),
    "one_graph": (ONE_GRAPH, "one graph (fullgraph=True): one_graph.py:14 in answers: if x.sum() > 0: "),
    "compiler": (NO_CXX + COMPILED, "needs a C++ compiler, and /no/such/compiler does not work; install one"),
}


def test_faults_of_the_compiler_are_explained_and_the_run_goes_on(main, topic, tmp_path):
    path = tmp_path / "r.json"
    done = main(topic(**{name: body for name, (body, _) in FAULTS.items()}, last=GOOD), "--json", path)
    examples = examples_of(path)
    assert (done.returncode, examples["last"]["status"]) == (1, "passed"), done.stderr
    lines = " ".join(done.stdout.split())
    for name, (_, said) in FAULTS.items():
        reason = examples[name]["reason"]
        assert (said in reason, "\n" in reason) == (True, False), reason
        assert lines.index(f"FAILED: {reason} ") < lines.index(f" {name}.py:")  # the message first
    assert "Traceback" not in done.stdout + done.stderr


def test_a_cache_that_cannot_be_written_is_explained(cli, topic, tmp_path):
    path, folder = tmp_path / "r.json", tmp_path / "file" / "cache"
    (tmp_path / "file").write_text("")
    done = cli(topic(one=COMPILED, another=COMPILED, last=GOOD), "--json", path, TORCHINDUCTOR_CACHE_DIR=str(folder))
    one, another, last = examples_of(path).values()
    assert (done.returncode, last["status"], "Traceback" in done.stdout) == (1, "passed", False)
    assert f"the compiler cannot write its cache: Not a directory: {folder}" in one["reason"]
    # A compiler that is half imported may fail in its own way.
    assert another["reason"] == one["reason"] or "the first technique that failed says" in another["reason"]


# --- PyTorch/XLA

TOO_MUCH = "torch.empty(2**45, device=xla.device()) + 1"
XLA_FAULTS = {
    "stayed": "a = torch.randn(41, 83).to(xla.device())\na @ torch.ones(83, 3)",
    "memory": f"xla.waited(lambda: {TOO_MUCH})()",
    "unread": "a = torch.randn(2**20, 1).to(xla.device())\nproduct = a @ a.t()\nxla.settle()\nproduct[5, 5].item()",
    "pending": f"KEPT.append({TOO_MUCH})\nh.fact('kept', 1)",
    "first": "a = torch.randn(41, 83).to(xla.device())\nwith xla.watch() as ran:\n    b = (a @ a.t()).cos()\n"
    "    xla.settle()\nh.fact('ran', [ran.compiles, ran.executions])\n"
    "h.check(xla.waited(lambda t: (t.to(xla.device()) @ t.to(xla.device()).t()).cos()), "
    "lambda t: (t.double() @ t.double().t()).cos(), torch.randn(4, 7), terms=7, poison=False)",
}
XLA = {"needs": "torch_xla>=2.9", "imports": "from examples.common import xla\n"}


@pytest.mark.skipif(machine().torch_xla is None, reason="torch_xla is not installed: make test-xla")
def test_faults_of_xla_are_explained_and_leave_nothing_behind(cli, topic, tmp_path):
    path = tmp_path / "r.json"
    done = cli(topic(**XLA, **XLA_FAULTS), "--json", path)
    assert done.returncode == 1, done.stderr
    examples = examples_of(path)
    for name in ("memory", "pending"):
        assert "out of memory on XLA's device: Out of memory allocating 1407374883553" in examples[name]["reason"]
    assert "Out of memory allocating 4398046511104 bytes" in examples["unread"]["reason"]
    assert re.search(r"stayed.py:\d+ in demo: a @ torch.ones\(83, 3\): Expected XLA", examples["stayed"]["reason"])
    first = examples["first"]
    assert (first["status"], first["facts"]) == ("passed", {"ran": [1, 1]})  # and nothing of the others
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.skipif(machine().torch_xla is not None, reason="torch_xla is installed")
def test_without_torch_xla_or_with_that_of_another_torch_it_is_said_how_to_have_it(main, topic, tmp_path, monkeypatch):
    assert main(topic(**XLA, one="xla.device()")) == Done(0, f"SKIPPED: {MAKE_XLA}\n", "")
    package = tmp_path / "installed" / "torch_xla"  # as pip leaves it: it installs torch_xla 2.9.0 beside any torch
    metadata = tmp_path / "installed" / "torch_xla-2.9.0.dist-info" / "METADATA"
    package.mkdir(parents=True)
    metadata.parent.mkdir()
    (package / "__init__.py").write_text("raise ImportError('/x/_XLAC.so: undefined symbol: _ZN5torch8autograd10')\n")
    metadata.write_text("Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    reason = f"torch_xla cannot be loaded with torch {machine().torch}: it was built for another torch"
    done = main(topic(**XLA, one="xla.device()", two="xla.device()"))
    assert (done.returncode, done.stdout.count(f"\nFAILED: {reason}")) == (1, 2), done.stdout
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "one.py"), raising=False)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "one.py")])
    with pytest.raises(SystemExit, match="1"):
        command.skip_without_packages()


@pytest.mark.skipif(machine().triton is None, reason="triton is not installed")
def test_nothing_is_printed_after_the_answer():
    """These three imports leave objects of Triton 3.9 alive, which its bindings list unless they are kept from it."""
    names = "harness.hardware, examples.tma.blackwell, tests.examples.tma.test_gluon_matmul"
    done = subprocess.run(
        [sys.executable, "-c", f"import harness, {names}"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")
