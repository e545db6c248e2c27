"""A function in a process of its own: what comes back, what does not get in, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from harness.catalog import ROOT
from harness.process import STEERING, Child, ChildFailed, interrupts_held, report, result_of

import pytest

has_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the processes of Linux")


def alive(pid):
    """Whether the process runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid, seconds=10.0):
    """A process that was killed takes a moment to end, longer on a busy machine."""
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


# A file whose functions the processes run. It imports nothing that is slow.
FILE = """
import json, os, subprocess, sys, time
from pathlib import Path
from harness.process import report

def adds(a, b):
    print("adding")
    print("aside", file=sys.stderr)
    report(sum=a + b)

def echoes(*args):
    report(args=args)

def environment():
    report(**os.environ)

def fails():
    print("about to fail")
    raise LookupError("no such thing")

def says_twice():
    report(a=1)
    report(a=2)

def leaves_early():
    os._exit(3)

def hangs(file):
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)

def starts_another(file, then_ends):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(str(other.pid))
    if then_ends:
        report(ended=True)
    else:
        time.sleep(600)

def garbles():
    sys.stdout.buffer.write(b"\\xff\\xfe\\n")
    report(fine=True)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    from harness.catalog import load_module

    path = tmp_path_factory.mktemp("children") / "functions_of_a_test.py"
    path.write_text(FILE)
    return load_module(path)


def test_what_was_reported_and_what_was_printed(functions):
    with Child(functions.adds, 2, 3) as child:
        assert child.result() == {"sum": 5}
        assert "adding" in child.output()  # once it has ended, as often as it is asked
        assert "aside" in child.output()
        assert child.seconds > 0


def test_arguments_and_results_are_json(functions):
    with Child(functions.echoes, [1, None], {"a": 'quo"te\n'}, (True,)) as child:
        assert child.result() == {"args": [[1, None], {"a": 'quo"te\n'}, [True]]}
    with pytest.raises(TypeError, match="not JSON serializable"):
        Child(functions.echoes, object())


def test_report_is_one_line(capsys):
    report(text="two\nlines")
    assert capsys.readouterr().out == 'result: {"text": "two\\nlines"}\n'


@pytest.mark.parametrize("name", ["fails", "leaves_early", "says_twice"])
def test_without_its_one_result_the_last_words_are_shown(functions, name):
    with Child(getattr(functions, name)) as child, pytest.raises(ChildFailed, match="its last words") as failure:
        child.result()
    if name == "fails":
        assert "about to fail" in str(failure.value)
        assert "LookupError: no such thing" in str(failure.value)


def test_a_function_that_is_not_at_the_top_of_its_file_fails(functions):
    def inner():
        raise AssertionError("must not run")

    with Child(inner) as child, pytest.raises(ChildFailed, match="no attribute 'inner'"):
        child.result()


def test_bytes_that_are_no_text_come_through(functions):
    with Child(functions.garbles) as child:
        assert child.result() == {"fine": True}


def test_last_words_are_the_last():
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
    with Child(functions.environment, env={"TRITON_DEBUG": "0"}) as child:
        seen = child.result()
    assert {name: seen[name] for name in PLACES} == PLACES
    # harness decides for the child, as for any process, whether kernels are interpreted
    assert {name for name in SWITCHES if name in seen} - {"TRITON_INTERPRET"} == {"TRITON_DEBUG"}
    assert seen["TRITON_DEBUG"] == "0"
    assert str(ROOT) in seen["PYTHONPATH"].split(os.pathsep)
    assert not any(STEERING.match(name) for name in PLACES)


def test_a_tool_in_front_and_its_log(functions, tmp_path):
    tool, log = tmp_path / "tool", tmp_path / "tool.log"
    tool.write_text(f'#!/bin/sh\necho "the tool says: $1" > {log}\nshift\nexec "$@"\n')
    tool.chmod(0o755)
    with Child(functions.adds, 1, 1, before=(str(tool), "watch"), log=log) as child:
        assert child.result() == {"sum": 2}
        assert child.output().endswith("the tool says: watch\n")


def test_a_log_that_was_never_written_is_none(functions, tmp_path):
    with Child(functions.adds, 1, 1, log=tmp_path / "none.log") as child:
        assert child.result() == {"sum": 2}


def test_a_tool_that_is_not_there(functions):
    with pytest.raises(FileNotFoundError):
        Child(functions.adds, 1, 1, before=("/no/such/tool",))


@has_proc
def test_a_process_that_hangs_is_given_up(functions, tmp_path):
    with (
        pytest.raises(TimeoutError, match=r"hangs has not ended after 0\.2 s"),
        Child(functions.hangs, str(tmp_path / "pid"), timeout=0.2) as child,
    ):
        child.output()
    assert gone(child.process.pid)


@has_proc
def test_leaving_the_block_kills_what_was_started(functions, tmp_path):
    def interrupted():
        with Child(functions.hangs, str(tmp_path / "pid")) as child:
            pids.append(child.process.pid)
            raise KeyboardInterrupt

    pids = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gone(pids[0])


def wait_for(file, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if file.exists() and file.read_text():
            return int(file.read_text())
        time.sleep(0.05)
    raise AssertionError(f"{file} was not written")


@has_proc
@pytest.mark.parametrize("then_ends", [False, True])
def test_what_the_process_started_is_killed_too_even_when_it_has_ended_itself(functions, tmp_path, then_ends):
    with Child(functions.starts_another, str(tmp_path / "pid"), then_ends, timeout=0.5) as child:
        other = wait_for(tmp_path / "pid")
        if then_ends:
            child.process.wait(timeout=60)
            with pytest.raises(TimeoutError):  # the other one holds the pipe
                child.output()
        assert alive(other)
    assert gone(other)


@has_proc
def test_ctrl_c_while_it_is_being_started_leaves_nothing(functions, tmp_path, monkeypatch):
    """Before the `with` has begun there is no __exit__ to rely on."""
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # the handler runs here

    monkeypatch.setattr("harness.process.subprocess.Popen", Interrupted)
    try:
        with Child(functions.hangs, str(tmp_path / "pid")):
            pytest.fail("was not interrupted")
    except KeyboardInterrupt:
        pass
    assert gone(started[0])


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from harness.catalog import load_module
from harness.process import Child
functions = load_module(Path({file!r}))
{body}
"""


@has_proc
@pytest.mark.parametrize(
    "body",
    [
        "with Child(functions.hangs, sys.argv[1]) as child:\n    child.output()",
        "child = Child(functions.hangs, sys.argv[1])\nchild.output()",  # without its with
    ],
)
def test_ctrl_c_in_a_program_leaves_nothing(functions, tmp_path, body):
    code = PARENT.format(root=str(ROOT), file=functions.__file__, body=body)
    program = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pid")], stderr=subprocess.PIPE, text=True)
    pid = wait_for(tmp_path / "pid")
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert gone(pid)


def test_held_interrupts_come_at_the_end():
    def interrupted():
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            done.append(True)

    done = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_nothing_is_held(functions):
    """There Ctrl-C never arrives, and no handler may be set."""
    import threading

    results = []

    def work():
        with Child(functions.adds, 20, 1) as child:
            results.append(child.result())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert results == [{"sum": 21}]


def test_a_script_of_its_own_works_as_a_file(tmp_path):
    """The function may stand in the very script that starts the process, as in a technique file run alone."""
    script = tmp_path / "own.py"
    script.write_text(
        textwrap.dedent(f"""
            import json, sys
            sys.path.insert(0, {str(ROOT)!r})
            from harness.process import Child, report

            def child():
                report(name=__name__)

            if __name__ == "__main__":
                with Child(child) as process:
                    print(json.dumps(process.result()))
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == {"name": "own"}, done.stderr
