"""A function in a process of its own: what comes back, what does not get in, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness.catalog import ROOT, load_module
from harness.process import Child, ChildFailed, report, result_of

import pytest

has_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the processes of Linux")


def alive(pid):
    """Whether the process runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def soon(condition, seconds=60):
    """What becomes true within a moment, longer on a busy machine."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


# A file whose functions the processes run, and a program. It imports nothing that is slow.
FILE = """
import json, os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from harness.process import Child, report

def echoes(*args):
    print("to one", flush=True)
    print("to the other", file=sys.stderr)
    sys.stdout.buffer.write(b"\\xff\\xfe\\n")
    report(args=args, name=__name__)

def environment():
    report(**os.environ)

def fails():
    raise LookupError("no such thing")

def leaves_early():
    os._exit(3)

def hangs(file, others=0):
    code = "import time; time.sleep(600)"
    pids = [subprocess.Popen([sys.executable, "-c", code]).pid for _ in range(others)]
    Path(file).write_text(json.dumps([os.getpid(), *pids]))
    time.sleep(600 if others < 2 else 0)

if __name__ == "__main__":
    child = Child(echoes, 1) if sys.argv[1] == "echo" else Child(hangs, sys.argv[1])
    print(json.dumps(child.result()))
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("children") / "functions_of_a_test.py"
    path.write_text(FILE.replace("{root!r}", repr(str(ROOT))))
    return load_module(path)


def test_what_was_reported_and_what_was_printed(functions, capsys):
    with Child(functions.echoes, [1, None], {"a": 'quo"te\n'}, (True,)) as child:
        assert child.result() == {"args": [[1, None], {"a": 'quo"te\n'}, [True]], "name": "functions_of_a_test"}
        assert "to one" in child.output()  # once it has ended, as often as it is asked
        assert "to the other" in child.output()
    done = subprocess.run([sys.executable, functions.__file__, "echo"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == {"args": [1], "name": "functions_of_a_test"}, done.stderr  # a script's own
    report(text="two\nlines")
    assert capsys.readouterr().out == 'result: {"text": "two\\nlines"}\n'


def test_without_its_one_result_the_last_words_are_shown(functions):
    for function, words in {functions.fails: "LookupError: no such thing", functions.leaves_early: ""}.items():
        with Child(function) as child, pytest.raises(ChildFailed, match=f"(?s)its last words.*{words}"):
            child.result()
    with pytest.raises(ChildFailed, match=r"words:\nx{1993}the end$"):
        result_of("x" * 5000 + "the end")


SWITCHES = ("TORCH_LOGS", "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCHDYNAMO_DISABLE", "TRITON_DEBUG",
            "TRITON_DUMP_DIR", "MLIR_ENABLE_DUMP", "PYTORCH_ALLOC_CONF")  # fmt: skip
PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_PTXAS_PATH", "CUDA_HOME", "HOME",
          "CUDA_VISIBLE_DEVICES")  # fmt: skip


def test_switches_are_not_inherited_and_places_are(functions, monkeypatch):
    for name in SWITCHES + PLACES:
        monkeypatch.setenv(name, "/a")
    with Child(functions.environment, env={"TRITON_DEBUG": "0", "CUDA_HOME": None}) as child:
        seen = child.result()
    assert {name: seen.get(name) for name in PLACES} == dict.fromkeys(PLACES, "/a") | {"CUDA_HOME": None}
    assert {name: seen[name] for name in SWITCHES if name in seen} == {"TRITON_DEBUG": "0"}
    assert str(ROOT) in seen["PYTHONPATH"].split(os.pathsep)


def test_a_tool_in_front_and_its_log(functions, tmp_path):
    tool, log = tmp_path / "tool", tmp_path / "tool.log"
    tool.write_text(f'#!/bin/sh\necho "the tool says: $1" > {log}\nshift\nexec "$@"\n')
    tool.chmod(0o755)
    with Child(functions.echoes, before=(str(tool), "watch"), log=log) as child:
        assert child.result()["args"] == []
        assert child.output().endswith("the tool says: watch\n")


@has_proc
@pytest.mark.parametrize("others", [1, 2])
def test_what_the_process_started_is_killed_too_even_when_it_has_ended_itself(functions, tmp_path, others):
    file = tmp_path / "pids"
    with Child(functions.hangs, str(file), others, timeout=0.5) as child:
        pids = json.loads(soon(lambda: file.exists() and file.read_text()))
        if others == 2:
            child.process.wait(timeout=60)
        with pytest.raises(TimeoutError, match=r"hangs has not ended after 0\.5 s"):
            child.output()  # the others hold the pipe
        assert all(alive(pid) for pid in pids[1:])
    assert soon(lambda: not any(alive(pid) for pid in pids))


@has_proc
def test_ctrl_c_in_a_program_leaves_nothing(functions, tmp_path):
    file = tmp_path / "pids"
    program = subprocess.Popen([sys.executable, functions.__file__, file], stderr=subprocess.PIPE, text=True)
    (pid,) = json.loads(soon(lambda: file.exists() and file.read_text()))
    program.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in program.communicate(timeout=60)[1]
    assert soon(lambda: not alive(pid))
