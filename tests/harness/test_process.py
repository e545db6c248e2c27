"""A function in a process of its own: what comes back, what does not get in, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from harness.catalog import ROOT, load_module
from harness.process import STEERING, Child, ChildFailed, interrupts_held, report, result_of

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

def says_twice():
    report(a=1)
    report(a=2)

def leaves_early():
    os._exit(3)

def hangs(file, others=0):
    code = "import time; time.sleep(600)"
    pids = [subprocess.Popen([sys.executable, "-c", code]).pid for _ in range(others)]
    Path(file).write_text(json.dumps([os.getpid(), *pids]))
    time.sleep(600 if others < 2 else 0)

if __name__ == "__main__":
    child = Child(echoes, 1) if sys.argv[1] == "echo" else Child(hangs, sys.argv[2])
    if sys.argv[1] == "with":
        with child:
            child.output()
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
        assert child.seconds > 0
    with pytest.raises(TypeError, match="not JSON serializable"):
        Child(functions.echoes, object())
    done = subprocess.run([sys.executable, functions.__file__, "echo"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == {"args": [1], "name": "functions_of_a_test"}, done.stderr  # a script's own
    report(text="two\nlines")
    assert capsys.readouterr().out == 'result: {"text": "two\\nlines"}\n'


def test_without_its_one_result_the_last_words_are_shown(functions):
    def inner():
        raise AssertionError("must not run")  # not at the top of its file

    for function, words in {
        functions.fails: "LookupError: no such thing", functions.says_twice: "", functions.leaves_early: "",
        inner: "no attribute 'inner'",
    }.items():  # fmt: skip
        with Child(function) as child, pytest.raises(ChildFailed, match=f"(?s)its last words.*{words}"):
            child.result()
    with pytest.raises(ChildFailed, match=r"the end$") as failure:
        result_of("x" * 5000 + "the end")
    assert len(str(failure.value)) < 2100


SWITCHES = {
    "TORCH_LOGS": "graph_breaks", "TORCH_TRACE": "/somewhere", "TORCH_COMPILE_DEBUG": "1",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHDYNAMO_DISABLE": "1", "TRITON_DEBUG": "1",
    "TRITON_INTERPRET": "1", "TRITON_DUMP_DIR": "/somewhere", "MLIR_ENABLE_DUMP": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTORCH_ALLOC_CONF": "x",
}  # fmt: skip
PLACES = {
    "TORCHINDUCTOR_CACHE_DIR": "/a", "TRITON_CACHE_DIR": "/b", "TRITON_HOME": "/c", "TRITON_PTXAS_PATH": "/d",
    "CUDA_HOME": "/e", "HOME": "/f", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


def test_switches_are_not_inherited_and_places_are(functions, monkeypatch):
    for name, value in (SWITCHES | PLACES).items():
        monkeypatch.setenv(name, value)
    with Child(functions.environment, env={"TRITON_DEBUG": "0", "CUDA_HOME": None}) as child:
        seen = child.result()
    assert {name: seen.get(name, "/e") for name in PLACES} == PLACES
    # harness decides for the child, as for any process, whether kernels are interpreted
    assert {name for name in SWITCHES if name in seen} - {"TRITON_INTERPRET"} == {"TRITON_DEBUG"}
    assert (seen["TRITON_DEBUG"], "CUDA_HOME" in seen) == ("0", False)
    assert str(ROOT) in seen["PYTHONPATH"].split(os.pathsep)
    assert not any(STEERING.match(name) for name in PLACES)


def test_a_tool_in_front_and_its_log(functions, tmp_path):
    tool, log = tmp_path / "tool", tmp_path / "tool.log"
    tool.write_text(f'#!/bin/sh\necho "the tool says: $1" > {log}\nshift\nexec "$@"\n')
    tool.chmod(0o755)
    with Child(functions.echoes, before=(str(tool), "watch"), log=log) as child:
        assert child.result()["args"] == []
        assert child.output().endswith("the tool says: watch\n")
    with Child(functions.echoes, log=tmp_path / "none.log") as child:  # never written
        assert child.result()["args"] == []
    with pytest.raises(FileNotFoundError):
        Child(functions.echoes, before=("/no/such/tool",))


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
def test_ctrl_c_while_it_is_being_started_or_within_leaves_nothing(functions, tmp_path, monkeypatch):
    """Before the `with` has begun there is no __exit__ to rely on."""
    started, popen = [], subprocess.Popen

    class Interrupted(popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self.pid)
            if len(started) == 1:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)  # the handler runs here

    def interrupted():
        with Child(functions.hangs, str(tmp_path / "pid")):
            within.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr("harness.process.subprocess.Popen", Interrupted)
    for count in (0, 1):
        within = []
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert len(within) == count
    assert soon(lambda: not any(alive(pid) for pid in started))


@has_proc
@pytest.mark.parametrize("how", ["with", "without"])
def test_ctrl_c_in_a_program_leaves_nothing(functions, tmp_path, how):
    file = tmp_path / "pids"
    program = subprocess.Popen([sys.executable, functions.__file__, how, file], stderr=subprocess.PIPE, text=True)
    (pid,) = json.loads(soon(lambda: file.exists() and file.read_text()))
    program.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in program.communicate(timeout=60)[1]
    assert soon(lambda: not alive(pid))


def test_held_interrupts_come_at_the_end_and_in_another_thread_nothing_is_held(functions):
    def interrupted():
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            done.append(True)

    def work():  # there Ctrl-C never arrives, and no handler may be set
        with Child(functions.echoes, 21) as child:
            done.append(child.result()["args"])

    done = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert done == [True, [21]]
