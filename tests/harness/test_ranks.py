"""Ranks: started, counted, and ended with one message, whatever happens to one of them. Real processes, by gloo."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

from harness import cli, ranks
from harness.catalog import ROOT, Needs
from harness.faults import explain

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

LESSON = '''"""Made up.

Question   does it run?
Needs      torch, 2 ranks
"""
import os, signal, time

from harness import Harness, run
import torch
import torch.distributed as dist

try:
    import triton
    import triton.language as tl
except ImportError:
    pass
else:
    @triton.jit
    def waits_kernel(word_ptr):
        while tl.load(word_ptr) == 0:
            pass


def demo(h: Harness) -> None:
    how = os.environ["FAULT"]

    def total(x):
        y = x.chunk(h.ranks)[h.rank].sum(0)
        if h.rank == 1:
            open(os.environ["PIDS"], "a").write(f"{os.getpid()} {os.getppid()}\\n")
            if how == "raises":
                raise ValueError("this rank has no weights")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "aborts":
                os.write(2, b"terminate called: a stream that is gone\\n")
                os.abort()
            if how == "smaller":
                y = y[:5]
            if how in ("alone", "sleeps"):
                time.sleep(100)
        if how == "kernels":  # one in each rank, for a word that no rank writes
            waits_kernel[(1,)](torch.zeros(1, dtype=torch.int32))
        dist.all_reduce(y)
        return y

    h.check(total, lambda x: x.double().sum(0), h.randn(8, 16), terms=8)
    assert dist.get_world_size() == h.ranks and not h.timing
    h.answer(lambda: "it runs", timed=False)


if __name__ == "__main__":
    run(demo)
'''
TOPIC = """'A topic.'
from harness.cli import main

TECHNIQUES = ["made.py"]
if __name__ == "__main__":
    main(__file__)
"""


@pytest.fixture
def start(tmp_path):
    """Start the topic with what is to happen in rank 1; a process whose output is (stdout, stderr)."""
    (tmp_path / "made.py").write_text(LESSON)
    (tmp_path / "topic.py").write_text(TOPIC)
    started = []

    def begin(fault, *args, before=(), **env):
        env = {"FAULT": fault, "PIDS": str(tmp_path / "pids"), "RANKS_TIMEOUT_S": "6", **env}
        env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [*(before or (sys.executable,)), str(tmp_path / "topic.py"), *args]
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        started.append(
            subprocess.Popen(command, env=kept | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def gone(pids: Path) -> bool:
    """Whether no process is left of those that wrote their number, waiting a second for their end."""
    for pid in map(int, pids.read_text().split()):
        for _ in range(20):
            with suppress(ProcessLookupError, FileNotFoundError):
                if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
                    time.sleep(0.1)
                    continue
            break
        else:
            return False
    return True


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("raises", "rank 1 of 2, in made: ValueError: this rank has no weights", marks=pytest.mark.slow),
        ("killed", "FAILED: rank 1 of 2, in made, was ended by SIGKILL: out of memory?"),
        pytest.param("aborts", "ended by SIGABRT\n  terminate called: a stream that is gone", marks=pytest.mark.slow),
        pytest.param("smaller", "collective was not joined by every rank with the same", marks=pytest.mark.slow),
        ("alone", "in made: a rank waited in vain for another one"),
        ("kernels", "in waits_kernel: waited in vain for another rank, which did not launch the same kernel"),
    ],
)
def test_one_message_names_the_rank_and_nothing_is_left(start, tmp_path, fault, message):
    if fault == "kernels":
        pytest.importorskip("triton")
    process = start(fault, "--json", str(tmp_path / "r.json"))
    out, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert errors.startswith("FAILED: rank ")
    assert message in errors
    assert (out + errors).count("FAILED") == 1
    assert "Traceback" not in out + errors
    assert gone(tmp_path / "pids")
    record = json.loads((tmp_path / "r.json").read_text())
    (example,) = record["examples"]
    assert (record["running"], example["status"]) == (None, "failed")
    assert example["reason"] in errors


def test_an_interrupted_run_says_so_and_leaves_nothing(start, tmp_path):
    process = start("sleeps")
    while not (tmp_path / "pids").exists():
        time.sleep(0.1)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "interrupted\n"
    assert gone(tmp_path / "pids")


@pytest.mark.slow
def test_under_torchrun_it_is_a_rank_and_rank_0_alone_speaks(start, tmp_path):
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start("none", "--json", str(tmp_path / "r.json"), before=run)
    out, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert out.count("Answer: it runs") == 1
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["examples"][0]["machine"]["ranks"] == 2


# --- without processes


def test_what_a_rank_says_as_it_gives_up_is_there_whole_or_not_at_all(monkeypatch, tmp_path):
    """torch ends the other ranks and reads what they wrote so far: half of it would be a JSONDecodeError."""
    handler, file = ErrorHandler(), tmp_path / "error.json"
    during = []
    write = handler.record_exception
    monkeypatch.setattr(handler, "record_exception", lambda error: (write(error), during.append(file.exists())))
    monkeypatch.setattr("torch.distributed.elastic.multiprocessing.errors.get_error_handler", lambda: handler)
    monkeypatch.setattr(ranks.os, "_exit", sys.exit)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit):
        ranks.give_up("made: no weights")
    assert during == [False]
    assert json.loads(file.read_text())["message"]["message"] == "RankFailed: rank 0 of 1, in made: no weights"
    assert list(tmp_path.iterdir()) == [file]


def test_who_watches_the_main_thread_keeps_nothing_of_it():
    """DDPOptimizer, for one, relies on an object that ends with the call that made it."""
    seen = []

    def call():
        held = threading.Event()
        watch = threading.Thread(target=lambda: seen.append(ranks._main_thread()))
        watch.start()
        watch.join()
        return weakref.ref(held)

    assert call()() is None
    assert seen[0][0].endswith("threading.py")


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("gpus", "asked", "env", "message"),
    [
        (0, 0, {}, "--ranks 0: at least 1 is needed"),
        (2, 4, {}, "--ranks 4: this machine has 2 GPUs, and each rank needs its own"),
        (0, None, {"WORLD_SIZE": "2"}, "WORLD_SIZE is in the environment and RANK is not; unset it"),
        (0, 4, {"WORLD_SIZE": "2", "RANK": "0"}, "--ranks 4, and torchrun has started 2; leave out --ranks"),
        (1, None, {"WORLD_SIZE": "2", "RANK": "1"}, "rank 1 has no GPU: this machine has 1"),
        (0, None, {"WORLD_SIZE": "2", "RANK": "x"}, "RANK=x is not a number; unset it, or start with torchrun"),
        (0, None, {"WORLD_SIZE": "2", "RANK": "1"}, ".*and MASTER_ADDR is not; start with torchrun"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be_had_are_one_sentence(monkeypatch, gpus, asked, env, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{message}"):
        ranks.wanted(asked)


def test_how_many_ranks_there_are(monkeypatch):
    for gpus, asked, number in ((0, None, 2), (0, 3, 3), (1, None, 1), (4, None, 4), (4, 2, 2)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert ranks.wanted(asked) == number


def test_one_rank_is_not_enough(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli._status(cli.read_topic(ROOT / "torch_distributed_examples.py"), ["--ranks", "1"]) == 0
    assert capsys.readouterr().out == "SKIPPED: needs 2 ranks (this run has 1; --ranks N starts N)\n"


def test_what_a_machine_lacks_for_ranks(monkeypatch):
    two, peers = Needs.parse("torch, 2 ranks"), Needs.parse("triton, 2 ranks, peers")
    assert (two.ranks, two.peers, peers.peers) == (2, False, True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert ranks.lacks(two) == "needs 2 ranks (this run has 1; one GPU is one rank)"
    assert ranks.lacks(Needs()) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks.lacks(two) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert ranks.lacks(two) is None
    assert ranks.lacks(peers).startswith("needs GPUs with peer access (GPU 0 has none to GPU 1;")
    # Of four GPUs the run has two; and rank 0 finds what only others lack.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, peer: {gpu, peer} != {2, 3})
    assert ranks.lacks(peers) is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks.lacks(peers).startswith("needs GPUs with peer access (GPU 2 has none to GPU 3;")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert ranks.lacks(two).startswith("needs NCCL (")
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert ranks.lacks(two).startswith("needs torch.distributed (")


def test_a_number_of_ranks_that_does_not_divide_is_skipped(monkeypatch):
    some = Needs.parse("torch, 2 or 4 or 8 ranks, peers")
    assert (some.ranks, some.rank_counts, Needs.parse("2 ranks").rank_counts) == (2, (2, 4, 8), ())
    monkeypatch.setenv("RANK", "0")
    for number, reason in ((3, "needs 2, 4 or 8 ranks (this run has 3; use --ranks 2)"), (4, None)):
        monkeypatch.setenv("WORLD_SIZE", str(number))
        assert ranks.lacks(some) == reason


def test_a_port_in_use_is_one_sentence():
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError) as raised:
        torch.distributed.TCPStore("localhost", store.port, is_master=True, wait_for_workers=False)
    assert explain(raised.value).startswith(f"port {store.port} is in use by another process; choose another")


def test_a_topic_without_ranks_has_no_such_option():
    for topic in cli.read_topic(ROOT / "torch_distributed_examples.py"), cli.read_topic(ROOT / "triton_examples.py"):
        parsed = vars(cli._parser(topic).parse_args([]))
        assert ("ranks" in parsed) == (topic.name == "torch_distributed_examples")
