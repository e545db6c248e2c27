"""The command line as a user meets it: every test here starts a process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

from harness.catalog import ROOT, Needs, read_topic
from harness.hardware import machine
from harness.report import load_record

import pytest

TOPICS = [
    "torch_compiler_examples",
    "torch_xla_examples",
    "triton_examples",
    "triton_fp8_advanced",
    "triton_tma_blackwell",
]
NAMES = {topic: [t.name for t in read_topic(ROOT / f"{topic}.py").techniques] for topic in TOPICS}

NO_TRITON = machine().lacks(Needs.parse("triton"))  # or a numpy too new for an old interpreter
needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason=NO_TRITON or "")
needs_xla = pytest.mark.skipif(machine().torch_xla is None, reason="torch_xla is not installed: make test-xla")
without_xla = pytest.mark.skipif(machine().torch_xla is not None, reason="torch_xla is installed")

DOCSTRING = '"""{lesson}\n\nQuestion   does it run?\nNeeds      {needs}\n"""\n'
TOPIC = """'A topic made for a test.'
from harness.cli import main

TECHNIQUES = {files!r}

if __name__ == "__main__":
    main(__file__)
"""


@pytest.fixture
def topic(tmp_path):
    """Write a topic of small techniques that need nothing but torch: topic(good="demo body", bad="...")."""

    def write(needs="", **bodies):
        for name, body in bodies.items():
            lines = "\n".join(f"    {line}" for line in body.splitlines())
            text = DOCSTRING.format(lesson=f"The technique {name}.", needs=needs or "torch")
            (tmp_path / f"{name}.py").write_text(
                f"{text}from harness import Work, run\nimport sys, time, torch\n\ndef demo(h):\n{lines}\n\n"
                'if __name__ == "__main__":\n    run(demo)\n'
            )
        script = tmp_path / "made_topic.py"
        script.write_text(TOPIC.format(files=[f"{name}.py" for name in bodies]))
        return script

    return write


GOOD = "h.check(lambda x: x * 2, lambda x: x.double() * 2, h.randn(3, 5), what='doubling')\nh.fact('answer', 42)"
TABLE = (
    "x = h.randn(64, 64)\n"
    "h.compare({'torch': lambda x: x * 2, 'ours': lambda x: x + x}, lambda x: x.double() * 2, x, "
    "baseline='torch', work=Work(bytes=2 * x.nbytes))"
)


def slow(name):
    """Whether a quick run of this topic takes minutes here."""
    return name == "torch_compiler_examples" or (name == "torch_xla_examples" and machine().torch_xla)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * bool(slow(name))) for name in TOPICS])
def test_a_topic_runs_as_a_user_runs_it(cli, name, tmp_path):
    record_path = tmp_path / "record.json"
    needs = {technique.name: technique.needs for technique in read_topic(ROOT / f"{name}.py").techniques}
    done = cli(f"{name}.py", "--quick", "--json", record_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    record = load_record(record_path)
    assert [example["name"] for example in record["examples"]] == NAMES[name]
    if all(machine().lacks(each) for each in needs.values()):  # neither a GPU nor Triton, or no torch_xla
        assert {example["status"] for example in record["examples"]} == {"skipped"}
        return
    assert {example["status"] for example in record["examples"]} == {"passed"}
    assert record["topic"] == name
    assert record["command"] == f"python {name}.py --quick --json {record_path}"
    assert record["machine"]["torch"]
    for example in record["examples"]:
        # Gluon kernels are not interpreted: without a GPU their code is all there is to hold to something.
        compiled_only = machine().mode == "interpreted" and example["codegen"]
        assert example["checks"] or example["comparisons"] or compiled_only, f"{example['name']} checks nothing"
        assert example["comparisons"] or example["facts"], f"{example['name']} shows nothing"
        assert all(check["passed"] and check["error"] <= 1 for check in example["checks"])
        needs_triton = needs[example["name"]].triton
        for table in example["comparisons"]:
            # Other techniques compare library calls, and now and then one of this repository's own with them.
            assert any(row["ours"] for row in table["rows"]) or not needs_triton
            assert all(row["error"] <= 1 for row in table["rows"])
            if machine().mode == "interpreted" and needs_triton:
                assert all(row["ms"] is None for row in table["rows"])
            else:
                assert all(row["ms"] > 0 for row in table["rows"])
    if machine().mode == "interpreted" and all(each.triton for each in needs.values()):
        assert "nothing is timed" in done.stdout
        assert "TB/s" not in done.stdout


@pytest.mark.parametrize("name", TOPICS)
def test_list_is_fast_and_imports_no_torch(cli, name):
    def seconds():
        started = time.perf_counter()
        done = cli(f"{name}.py", "--list")
        elapsed = time.perf_counter() - started
        assert done.returncode == 0
        assert all(technique in done.stdout for technique in NAMES[name])
        return elapsed

    assert min(seconds() for _ in range(5)) < 0.3
    done = cli(("-X", "importtime", f"{name}.py"), "--list")
    assert "harness.catalog" in done.stderr
    assert " torch" not in done.stderr
    assert " triton" not in done.stderr


def test_an_unknown_technique_lists_the_near_ones(cli):
    done = cli("triton_examples.py", "sofmax")
    assert done.returncode == 2
    assert "no technique 'sofmax'; did you mean softmax" in done.stderr
    done = cli("triton_examples.py", "zzz")
    assert done.returncode == 2
    assert "there are: vector_add" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--no-such-option"], "unrecognized arguments"),
        (["--quick", "--full"], "not allowed with"),
        (["--check-only", "--profile"], "not allowed with"),
        (["--seed", "many"], "'many' is not an integer"),
        (["--seed", str(2**62)], "is beyond 2**62"),
        (["--json", "x" * 300], "File name too long"),
        (["--json", "triton_examples.py"], "exists and is not a record"),
        (["--list", "sofmax"], "did you mean softmax"),
        (["--json", "no/such/folder/x.json"], "does not exist; make it first"),
        (["--json", "."], "is a folder; name a file"),
    ],
)
def test_wrong_usage_ends_with_2_before_anything_runs(cli, args, message):
    done = cli("triton_examples.py", *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "PASSED" not in done.stdout


def test_a_failing_technique_does_not_stop_the_others(cli, topic, tmp_path):
    script = topic(
        first=GOOD,
        wrong="h.check(lambda x: x * 3, lambda x: x.double() * 2, h.randn(3, 5), what='tripling')",
        leaves="sys.exit(0)",
        memory="raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB')",
        skips="h.skip_unless(gpu=True)\nfrom harness import Skip\nraise Skip('has nothing to do')",
        last=GOOD,
    )
    path = tmp_path / "r.json"
    done = cli(script, "--json", path)
    assert done.returncode == 1
    examples = {e["name"]: e for e in load_record(path)["examples"]}
    failed = {name for name, e in examples.items() if e["status"] == "failed"}
    assert list(examples) == ["first", "wrong", "leaves", "memory", "skips", "last"]
    assert failed == {"wrong", "leaves", "memory"}
    assert examples["skips"]["status"] == "skipped"
    assert examples["first"]["facts"] == {"answer": 42}
    assert "tripling: 15 of 15 elements are wrong" in examples["wrong"]["reason"]
    assert examples["wrong"]["checks"] == [{"what": "tripling", "error": None, "passed": False}]
    assert "try --quick" in examples["memory"]["reason"]
    assert "SKIPPED: " in done.stdout
    assert "FAILED  wrong" in done.stdout
    assert "PASSED  last" in done.stdout


def test_only_what_is_named_runs_in_the_topics_order(cli, topic, tmp_path):
    script = topic(a=GOOD, b=GOOD, c=GOOD)
    path = tmp_path / "r.json"
    assert cli(script, "c", "a", "--json", path).returncode == 0
    assert [e["name"] for e in load_record(path)["examples"]] == ["a", "c"]


def test_a_missing_package_skips_with_the_way_to_get_it(cli, topic):
    done = cli(topic(needs="no_such_package>=2", absent="raise AssertionError('must not run')"))
    assert done.returncode == 0
    assert "SKIPPED: needs no_such_package>=2 (not installed: pip install no_such_package)" in done.stdout


NEEDY = dict.fromkeys(("first", "second", "third"), "raise AssertionError('must not run')")
NOT_THERE = "needs no_such_package>=2 (not installed: pip install no_such_package)"
MAKE_XLA = "needs torch_xla>=2.9 (not installed: `make xla` sets it up in .venv-xla and runs the topic there)"


@pytest.mark.parametrize("asked", [(), ("third", "first"), ("second",)])
@pytest.mark.parametrize("option", ["--quick", "--full", "--check-only", "--profile"])
def test_a_topic_that_cannot_start_says_so_in_one_line(cli, topic, tmp_path, asked, option):
    path = tmp_path / "r.json"
    done = cli(topic(needs="no_such_package>=2", **NEEDY), *asked, option, "--json", path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"SKIPPED: {NOT_THERE}\n", "")
    record = load_record(path)
    assert [e["name"] for e in record["examples"]] == [name for name in NEEDY if not asked or name in asked]
    assert {(e["status"], e["reason"]) for e in record["examples"]} == {("skipped", NOT_THERE)}
    assert record["topic"] == "made_topic"
    assert record["machine"]["torch"] == machine().torch
    assert record["command"].endswith(f"{option} --json {path}")


def test_a_topic_that_cannot_start_still_lists_and_refuses_wrong_usage(cli, topic, tmp_path):
    script = topic(needs="no_such_package>=2", **NEEDY)
    done = cli(script, "--list")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in NEEDY)
    assert "SKIPPED" not in done.stdout
    assert cli(script, "frist").returncode == 2
    assert cli(script, "--json", tmp_path / "no" / "r.json").returncode == 2
    assert cli(script).stdout == f"SKIPPED: {NOT_THERE}\n"  # and no record


@pytest.mark.parametrize("other", ["good", "broken", "other reason"])
def test_where_one_technique_can_start_each_speaks_for_itself(cli, topic, tmp_path, other):
    topic(needs="no_such_package>=2", first=NEEDY["first"])
    script = topic(needs="no_other_package" if other == "other reason" else "", second=GOOD)
    script.write_text(TOPIC.format(files=["first.py", "second.py"]))
    if other == "broken":
        (tmp_path / "second.py").write_text("def f(:\n")
    done = cli(script, "--json", tmp_path / "r.json")
    statuses = {e["name"]: e["status"] for e in load_record(tmp_path / "r.json")["examples"]}
    second = {"good": "passed", "broken": "failed", "other reason": "skipped"}[other]
    assert statuses == {"first": "skipped", "second": second}
    assert done.returncode == (other == "broken")
    assert f"SKIPPED: {NOT_THERE}" in done.stdout
    assert re.search(rf"^{second.upper()} +second", done.stdout, re.MULTILINE)  # the summary


@without_xla
@pytest.mark.parametrize("asked", [(), ("spmd", "lazy_tensors")])
def test_the_xla_topic_without_torch_xla_says_how_to_have_it(cli, tmp_path, asked):
    path = tmp_path / "r.json"
    done = cli("torch_xla_examples.py", *asked, "--json", path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"SKIPPED: {MAKE_XLA}\n", "")
    examples = load_record(path)["examples"]
    assert {e["name"] for e in examples} == set(asked or NAMES["torch_xla_examples"])
    assert {(e["status"], e["reason"]) for e in examples} == {("skipped", MAKE_XLA)}


@without_xla
def test_one_technique_of_the_xla_topic_says_it_too(cli, topic, tmp_path):
    topic(needs="torch_xla>=2.9", one="pass")
    path = tmp_path / "one.py"
    path.write_text(path.read_text().replace("import sys", "from harness import xla\nimport sys"))  # as theirs do
    done = cli(path, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"SKIPPED: {MAKE_XLA}\n", "")
    done = cli(ROOT / "examples" / "xla" / "lazy_tensors.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"SKIPPED: {MAKE_XLA}\n", "")


def test_ctrl_c_keeps_what_was_done(topic, tmp_path):
    script = topic(done=GOOD, slow="print('sleeping', flush=True)\ntime.sleep(60)", never=GOOD)
    path = tmp_path / "r.json"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, script, "--json", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    for line in process.stdout:
        if "sleeping" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert "interrupted; this is what was done" in out
    examples = load_record(path)["examples"]
    assert [(e["name"], e["status"]) for e in examples] == [("done", "passed"), ("slow", "failed")]
    assert examples[1]["reason"] == "interrupted"
    assert "Traceback" not in err


def test_a_killed_run_leaves_a_readable_record(topic, tmp_path):
    script = topic(done=GOOD, slow="print('sleeping', flush=True)\ntime.sleep(60)")
    path = tmp_path / "r.json"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, script, "--json", path], stdout=subprocess.PIPE, text=True, env=env)
    for line in process.stdout:
        if "sleeping" in line:
            break
    process.kill()
    process.communicate(timeout=30)
    statuses = {e["name"]: e["status"] for e in load_record(path)["examples"]}
    assert statuses == {"done": "passed", "slow": "running"}  # where it was when it was killed


def test_a_reader_who_closes_the_pipe_gets_the_whole_record(topic, tmp_path):
    path = tmp_path / "r.json"
    command = f"{sys.executable} {topic(a=GOOD, b=GOOD)} --json {path} | head -1"
    subprocess.run(command, shell=True, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert [e["status"] for e in load_record(path)["examples"]] == ["passed", "passed"]


def test_a_link_as_record_is_followed(cli, topic, tmp_path):
    script = topic(a=GOOD)
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    assert cli(script, "--json", link).returncode == 0
    assert link.is_symlink()
    assert load_record(target)["examples"][0]["status"] == "passed"


def test_an_earlier_record_may_be_replaced(cli, topic, tmp_path):
    path, script = tmp_path / "r.json", topic(a=GOOD)
    for _ in range(2):
        assert cli(script, "--json", path).returncode == 0


def test_a_technique_that_changes_folder_does_not_move_the_record(cli, topic, tmp_path):
    """And it fails for it: the next one starts where the run was started."""
    script = topic(moves=GOOD + "\nimport os\nos.chdir('/')", after=GOOD + "\nimport os\nh.fact('cwd', os.getcwd())")
    done = cli(script, "--json", "r.json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    moves, after = load_record(tmp_path / "r.json")["examples"]
    assert moves["status"] == "failed"
    expected = f"moves left global settings changed: working folder was {str(tmp_path)!r}, is '/'"
    assert expected in moves["reason"]
    assert expected in done.stdout
    assert after["status"] == "passed"
    assert after["facts"]["cwd"] == str(tmp_path)


def test_a_technique_that_loses_its_folder_fails_alone(cli, topic, tmp_path):
    body = "import os, tempfile\nwith tempfile.TemporaryDirectory() as folder:\n    os.chdir(folder)"
    done = cli(topic(loses=f"{GOOD}\n{body}", after=GOOD), "--json", "r.json", cwd=tmp_path)
    loses, after = load_record(tmp_path / "r.json")["examples"]
    assert "working folder was" in loses["reason"]
    assert "FileNotFoundError" in loses["reason"]
    assert after["status"] == "passed", done.stdout


COMPILES = "h.check({}(lambda x: (x.sin() + 1).relu()), lambda x: (x.double().sin() + 1).relu(), torch.randn(100))"
FAULTS = {
    "backend": COMPILES.format("torch.compile(backend='inductr')"),
    "mode": COMPILES.format("torch.compile(mode='fast')"),
    "one_graph": (
        "def answers(x):\n    if x.sum() > 0:\n        return x\n    return -x\n"
        "torch.compile(answers, fullgraph=True, backend='eager')(torch.ones(3))"
    ),
    "memory": "torch.compile(lambda x: x + torch.ones(2**50).sum(), backend='eager')(torch.ones(3))",
    "last": GOOD,
}
EXPLAINED = {
    "backend": "no backend 'inductr'; did you mean inductor? there are: eager, aot_eager, ",
    "mode": "no mode 'fast'; there are: default, ",
    "one_graph": "one graph (fullgraph=True): one_graph.py:11 in answers: if x.sum() > 0: Data-dependent branching; "
    "python torch_compiler_examples.py graph_breaks shows each cause and its fix",
    "memory": "out of memory: can't allocate memory: you tried to allocate 4503599627370496 bytes",
}


def test_faults_of_the_compiler_are_explained_and_the_run_goes_on(cli, topic, tmp_path):
    path, cache = tmp_path / "r.json", tmp_path / "cache"
    script = topic(compiler=COMPILES.format("torch.compile"), other=COMPILES.format("torch.compile"), **FAULTS)
    done = cli(script, "--json", path, CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert done.returncode == 1, done.stderr
    examples = {example["name"]: example for example in load_record(path)["examples"]}
    no_compiler = (
        "torch.compile needs a C++ compiler, and /no/such/compiler does not work; install one (apt install g++), "
        "or set CXX to one"
    )
    for name, reason in (EXPLAINED | {"compiler": no_compiler, "other": no_compiler}).items():
        assert reason in examples[name]["reason"]
        assert "\n" not in examples[name]["reason"]
        message, place = f"FAILED: {examples[name]['reason']}\n", f"\n  {name}.py:"  # the message first
        assert done.stdout.index(message) < done.stdout.index(place)
    assert examples["last"]["status"] == "passed"
    assert "Traceback" not in done.stdout + done.stderr


XLA_FAULTS = {
    "stayed": "a = torch.randn(41, 83).to(xla.device())\na @ torch.ones(83, 3)",
    "memory": "xla.waited(lambda: torch.empty(2**45, device=xla.device()) + 1)()",
    "again": "xla.waited(lambda: torch.empty(2**45, device=xla.device()) + 1)()",
    "unread": "a = torch.randn(2**20, 1).to(xla.device())\nproduct = a @ a.t()\nxla.settle()\nproduct[5, 5].item()",
    "pending": "KEPT.append(torch.empty(2**45, device=xla.device()) + 1)\nh.fact('kept', 1)",
    "first": "a = torch.randn(41, 83).to(xla.device())\nwith xla.watch() as ran:\n    b = (a @ a.t()).cos()\n"
    "    xla.settle()\nh.fact('ran', [ran.compiles, ran.executions])\n"
    "h.check(xla.waited(lambda t: (t.to(xla.device()) @ t.to(xla.device()).t()).cos()), "
    "lambda t: (t.double() @ t.double().t()).cos(), torch.randn(4, 7), terms=7, poison=False)",
}


@pytest.fixture
def xla_topic(topic, tmp_path):
    """As topic(), of techniques that need torch_xla."""

    def write(**bodies):
        script = topic(needs="torch_xla>=2.9", **bodies)
        for name in bodies:
            path = tmp_path / f"{name}.py"
            path.write_text(path.read_text().replace("import sys,", "from harness import xla\nKEPT = []\nimport sys,"))
        return script

    return write


@needs_xla
def test_faults_of_xla_are_explained_and_leave_nothing_behind(cli, xla_topic, tmp_path):
    path = tmp_path / "r.json"
    done = cli(xla_topic(**XLA_FAULTS), "--json", path)
    assert done.returncode == 1, done.stderr
    examples = {example["name"]: example for example in load_record(path)["examples"]}
    for name in ("memory", "again", "pending"):
        assert (
            "out of memory on XLA's device: Out of memory allocating 140737488355328 bytes" in examples[name]["reason"]
        )
    assert "Out of memory allocating 4398046511104 bytes" in examples["unread"]["reason"]
    assert "stayed.py:13 in demo: a @ torch.ones(83, 3): Expected XLA tensor. Got:" in examples["stayed"]["reason"]
    assert "\n  stayed.py:13 in demo: a @ torch.ones(83, 3)\n" in done.stdout
    assert examples["first"]["status"] == "passed", done.stdout
    assert examples["first"]["facts"] == {"ran": [1, 1]}  # nothing of the others
    assert "Traceback" not in done.stdout + done.stderr


@needs_xla
@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("FOO", "PJRT_DEVICE=FOO: there is no such device here; unset PJRT_DEVICE, or set it to CPU"),
        ("", "PJRT_DEVICE is empty; unset PJRT_DEVICE, or set it to CPU"),
        ("CUDA", "PJRT_DEVICE=CUDA: torch_xla has no CUDA plugin any more, "),
        ("TPU", "PJRT_DEVICE=TPU: there is no libtpu here; "),
    ],
)
def test_a_device_that_xla_does_not_have_fails_each_technique_alike(cli, xla_topic, tmp_path, device, reason):
    if device == "TPU" and find_spec("libtpu"):
        pytest.skip("libtpu is installed")
    path = tmp_path / "r.json"
    done = cli(xla_topic(**XLA_FAULTS), "--json", path, PJRT_DEVICE=device)
    assert done.returncode == 1, done.stderr
    examples = load_record(path)["examples"]
    assert [example["name"] for example in examples] == list(XLA_FAULTS)
    assert {example["status"] for example in examples} == {"failed"}
    assert len({example["reason"] for example in examples}) == 1
    assert examples[0]["reason"].startswith(reason)
    assert all(example["seconds"] < 1 for example in examples[1:])
    assert "Traceback" not in done.stdout + done.stderr
    done = cli(tmp_path / "first.py", PJRT_DEVICE=device)
    assert done.returncode == 1
    assert f"FAILED: {reason}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_torch_xla_of_another_torch_is_explained(cli, xla_topic, tmp_path):
    """As pip leaves it: it installs torch_xla 2.9.0 beside any torch."""
    package = tmp_path / "installed" / "torch_xla"
    package.mkdir(parents=True)
    library = "/x/_XLAC.cpython-311-x86_64-linux-gnu.so"
    symbol = "_ZN5torch8autograd10deleteNodeEPNS0_4NodeE"
    (package / "__init__.py").write_text(f"raise ImportError({f'{library}: undefined symbol: {symbol}'!r})\n")
    metadata = tmp_path / "installed" / "torch_xla-2.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0\n")
    search = os.pathsep.join([str(ROOT), str(tmp_path / "installed")])
    reason = (
        f"torch_xla 2.9.0 cannot be loaded with torch {machine().torch}: it was built for another torch; `make xla` "
        "installs a pair that fits into .venv-xla and runs the topic there"
    )
    path = tmp_path / "r.json"
    script = xla_topic(one="xla.device()", two="xla.device()")
    for what, names in ((script, ["one", "two"]), (tmp_path / "one.py", ["one"])):
        done = cli(what, "--json", path, PYTHONPATH=search)
        assert done.returncode == 1, done.stderr
        examples = load_record(path)["examples"]
        found = [(example["name"], example["status"], example["reason"]) for example in examples]
        assert found == [(name, "failed", reason) for name in names]
        assert done.stdout.count(f"\nFAILED: {reason}\n") == len(names)
        assert "Traceback" not in done.stdout + done.stderr
    assert cli(tmp_path / "one.py", "--list", PYTHONPATH=search).returncode == 0


@pytest.mark.parametrize("below", [True, False])
def test_a_cache_that_cannot_be_written_is_explained(cli, topic, tmp_path, below):
    if below:
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "cache"
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        folder = tmp_path / "read-only"
        folder.mkdir(mode=0o555)
    path = tmp_path / "r.json"
    script = topic(one=COMPILES.format("torch.compile"), another=COMPILES.format("torch.compile"), last=GOOD)
    done = cli(script, "--json", path, TORCHINDUCTOR_CACHE_DIR=str(folder))
    assert done.returncode == 1, done.stderr
    one, another, last = load_record(path)["examples"]
    assert f"the compiler cannot write its cache: {'Not a directory: ' if below else ''}" in one["reason"]
    assert str(folder) in one["reason"]
    assert "set TORCHINDUCTOR_CACHE_DIR to a folder where you may write" in one["reason"]
    assert another["reason"] == one["reason"]  # though a half imported compiler fails in its own way
    assert last["status"] == "passed"
    assert "Traceback" not in done.stdout


def test_what_is_not_known_keeps_its_traceback(cli, topic, tmp_path):
    done = cli(topic(odd="open('/no/such/file')"), "--json", tmp_path / "r.json")
    assert "Traceback" in done.stdout
    assert "FileNotFoundError: [Errno 2]" in load_record(tmp_path / "r.json")["examples"][0]["reason"]


def test_a_technique_file_with_a_syntax_error_fails_alone(cli, topic, tmp_path):
    script = topic(broken="pass", fine=GOOD)
    (tmp_path / "broken.py").write_text("def f(:\n")
    done = cli(script)
    assert done.returncode == 1
    assert "FAILED  broken" in done.stdout
    assert "invalid syntax" in done.stdout
    assert "PASSED  fine" in done.stdout
    assert "invalid syntax" in cli(script, "--list").stdout
    alone = cli(script, "broken")  # the only one asked for: one reason for all, and no reason to skip
    assert alone.returncode == 1
    assert "FAILED  broken" in alone.stdout


@pytest.mark.parametrize("body", ["pass", "yield h.check(None, None)"])
def test_a_demo_that_shows_nothing_fails(cli, topic, body):
    done = cli(topic(idle=body))
    assert done.returncode == 1
    assert "checked, compared and recorded nothing" in done.stdout


def test_a_fact_that_json_cannot_hold_fails_its_technique_only(cli, topic, tmp_path):
    path = tmp_path / "r.json"
    done = cli(topic(odd="h.fact('ratio', float('nan'))", keys="h.fact('k', {(1, 2): 3})", fine=GOOD), "--json", path)
    assert done.returncode == 1
    assert [e["status"] for e in load_record(path)["examples"]] == ["failed", "failed", "passed"]


def test_a_technique_that_needs_a_gpu_skips_before_it_starts(cli, topic):
    if machine().gpu:
        pytest.skip("only where there is no GPU")
    assert "SKIPPED: needs a GPU" in cli(topic(needs="gpu", a="raise AssertionError")).stdout


def test_no_number_is_cut_short_in_a_narrow_terminal(cli, topic):
    done = cli(topic(table=TABLE), COLUMNS="50", FORCE_COLOR="1", TERM="xterm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "p20 - p80" in done.stdout
    assert "\u2026" not in done.stdout


@pytest.mark.parametrize("value", ["yes", "Y", "on", "TRUE"])
def test_the_interpreter_is_on_when_triton_says_so(cli, value):
    if machine().triton is None:
        pytest.skip("triton is not installed")
    code = "from harness import interpreted; import triton; print(interpreted(), triton.knobs.runtime.interpret)"
    assert cli(("-c", code), TRITON_INTERPRET=value).stdout.split() == ["True", "True"]


def test_a_readers_own_program_may_be_anything(tmp_path, cli):
    program = tmp_path / "latin.py"
    program.write_bytes("# coding: latin-1\n# \xe9\nfrom harness import run\nprint('fine')\n".encode("latin-1"))
    assert cli(program).stdout == "fine\n"


def test_a_topic_of_architectures_ends_with_their_table(cli, topic):
    entry = (
        "{'kernel': 'k', 'sm': 90, 'found': {'wgmma': 4}, 'registers': 168, 'spills': 0, 'shared': 1024, "
        "'shared_limit': 232448}"
    )
    script = topic(good=f"{GOOD}\nh.record.codegen += [] if h.profile else [{entry}]")
    table = "what each technique becomes on each architecture"
    assert table not in cli(script).stdout
    script.write_text(script.read_text().replace("\nif __name__", "ARCHITECTURES = (80, 90)\n\nif __name__"))
    said = cli(script).stdout
    assert said.count(table) == 1
    assert said.index("PASSED") < said.index(table)
    assert re.search(r"sm_80 +not compiled for it\n +sm_90 +wgmma x4 +168 +0 +1\.0$", said, re.M)
    assert table not in cli(script, "--profile").stdout


def test_check_only_and_profile_time_nothing(cli, topic, tmp_path):
    script = topic(table=TABLE)
    for option, tables in (("--check-only", 1), ("--profile", 0)):
        path = tmp_path / "r.json"
        done = cli(script, option, "--json", path)
        assert done.returncode == 0, done.stdout + done.stderr
        (example,) = load_record(path)["examples"]
        assert len(example["comparisons"]) == tables
        assert all(row["ms"] is None for table in example["comparisons"] for row in table["rows"])
    assert "profiled" in done.stdout


def test_cpu_work_is_timed(cli, topic, tmp_path):
    path = tmp_path / "r.json"
    done = cli(topic(table=TABLE), "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = load_record(path)["examples"][0]["comparisons"]
    assert all(row["ms"] > 0 and row["p20"] <= row["ms"] <= row["p80"] for row in table["rows"])
    assert "x torch" in done.stdout


def test_the_seed_changes_the_data_and_the_name_fixes_it(cli, topic, tmp_path):
    script = topic(a="h.fact('x', h.randn(1).item())", b="h.fact('x', h.randn(1).item())")

    def values(*args):
        path = tmp_path / "r.json"
        cli(script, *args, "--json", path)
        return {e["name"]: e["facts"]["x"] for e in load_record(path)["examples"]}

    all_of_them = values()
    assert all_of_them["a"] != all_of_them["b"]
    assert values("b") == {"b": all_of_them["b"]}
    assert values("--seed", "1")["a"] != all_of_them["a"]


FILES = [
    t.path for topic in ("triton_examples", "torch_xla_examples") for t in read_topic(ROOT / f"{topic}.py").techniques
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_technique_file_runs_alone_from_any_folder(cli, path, tmp_path):
    name = path.stem
    done = cli(path, "--list", cwd=tmp_path)
    assert done.returncode == 0
    assert f"  {name}" in done.stdout


def test_a_technique_file_without_its_package_skips(cli, tmp_path):
    """As on a machine without Triton: the reason, and no traceback from the import below it."""
    path = tmp_path / "needy.py"
    path.write_text(
        DOCSTRING.format(lesson="Needy.", needs="no_such_package") + "from harness import run\nimport no_such_package\n"
    )
    done = cli(path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "SKIPPED: needs no_such_package (not installed: pip install no_such_package)\n" in done.stdout
    assert "needs no_such_package" in cli(path, "--list").stdout
    assert cli(path, "--bogus").returncode == 2


@needs_triton
def test_one_technique_file_really_runs_from_another_folder(cli, tmp_path):
    done = cli(ROOT / "examples" / "triton" / "vector_add.py", "--quick", "--json", "own.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert load_record(tmp_path / "own.json")["examples"][0]["status"] == "passed"


@needs_triton
def test_triton_imported_first_is_explained(cli):
    if machine().gpu:
        pytest.skip("only where there is no GPU")
    done = cli(("-c", "import triton; from harness import Harness"))
    assert "import harness first" in done.stderr


def test_doctor_names_every_technique(cli):
    done = cli(("-m", "harness"), "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = "skipped" if NO_TRITON else {"interpreted": "interpreted", "gpu": "runs"}[machine().mode]
    for topic in TOPICS:
        for technique in read_topic(ROOT / f"{topic}.py").techniques:
            line = next(line for line in done.stdout.splitlines() if f" {technique.name} " in line)
            elsewhere = "runs" if machine().torch_xla or not technique.needs.xla else "skipped: needs torch_xla>=2.9"
            assert (kernels if technique.needs.triton else elsewhere) in line
    assert f"torch {machine().torch}" in done.stdout


@needs_triton
def test_doctor_says_why_a_technique_is_skipped(cli):
    if machine().gpu:
        pytest.skip("only where there is no GPU")
    done = cli(("-m", "harness"), "doctor", TRITON_INTERPRET="0")
    assert done.returncode == 0
    assert "skipped: needs a GPU, or TRITON_INTERPRET=1" in done.stdout


def test_the_module_needs_a_command_it_knows(cli):
    assert cli(("-m", "harness"), "frobnicate").returncode == 2


def test_a_record_that_is_none_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_record(path)
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ValueError, match="not a record of schema 1"):
        load_record(path)
