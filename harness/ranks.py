"""The processes of one run, the ranks of torch.distributed: how they are started and ended, and what they do alike.

A topic script whose lessons need ranks starts them itself, through torch's own engine (that of torchrun --standalone),
which ends the others when one fails. Under torchrun (RANK and WORLD_SIZE in the environment) it is a rank. Where there
is one process, all of this does nothing. Collectives are called by every rank, equally often: else one waits for ever
for another, which TIMEOUT_S ends.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import signal
import sys
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from harness.catalog import Needs

import torch

# Seconds that a rank waits in a collective for the others, and that torchrun waits for a rank that it asked to end.
TIMEOUT_S, END_S = float(os.environ.get("RANKS_TIMEOUT_S", 40)), 5
LESSON_FILE = "lesson"  # beside a rank's log: the name of the lesson that it is in
AHEAD_CYCLES = 1_000_000  # of the SMs' clock, about half a millisecond: see align()
# What a rank meets when another one has ended: that one is the cause, and is waited for.
LOST = r"Connection (?:closed by peer|reset|refused)|Broken pipe|[Rr]emote process|peer closed|DistNetworkError"


class RankFailed(RuntimeError):
    """What a rank died of: `rank 1 of 2, in ddp: ...`."""


# --- which rank this is


def started() -> bool:
    """Whether torchrun, or launch(), has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world() -> int:
    """How many ranks there are to be, before their process group is there."""
    return int(os.environ["WORLD_SIZE"]) if started() else 1


def rank() -> int:
    return int(os.environ["RANK"]) if started() else 0


def local() -> int:
    """This rank's number on its machine: the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def wanted(asked: int | None) -> int:
    """How many ranks to run with: those that torchrun started, or `asked` for, or one for each GPU, or 2 on a CPU.
    Raises ValueError for a number that cannot be had here."""
    gpus = torch.cuda.device_count()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not os.environ.get(name, "0").isdecimal():
            raise ValueError(f"{name}={os.environ[name]} is not a number; unset it, or start with torchrun")
    if (alone := {"RANK", "WORLD_SIZE"} & os.environ.keys()) and not started():
        (other,) = {"RANK", "WORLD_SIZE"} - alone
        raise ValueError(f"{alone.pop()} is in the environment and {other} is not; unset it, or start with torchrun")
    if started():
        if asked not in (None, world()):
            raise ValueError(f"--ranks {asked}, and torchrun has started {world()}; leave out --ranks")
        if gpus and local() >= gpus:
            raise ValueError(f"rank {rank()} has no GPU: this machine has {gpus}; lower torchrun's --nproc-per-node")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise ValueError(f"RANK and WORLD_SIZE are in the environment and {name} is not; start with torchrun")
        return world()
    if asked is not None and asked < 1:
        raise ValueError(f"--ranks {asked}: at least 1 is needed")
    if asked and gpus and asked > gpus:
        raise ValueError(f"--ranks {asked}: this machine has {gpus} GPU{'s' * (gpus > 1)}, and each rank needs its own")
    return asked or gpus or 2


def lacks(needs: Needs) -> str | None:
    """Why a technique with these needs cannot run with the ranks of this run; None when it can."""
    if needs.ranks == 1:
        return None
    if world() < needs.ranks:
        why = "--ranks N starts N" if not torch.cuda.device_count() else "one GPU is one rank"
        return f"needs {needs.ranks} ranks (this run has {world()}; {why})"
    if needs.rank_counts and world() not in needs.rank_counts:
        *others, last = map(str, needs.rank_counts)
        return f"needs {', '.join(others)} or {last} ranks (this run has {world()}; use --ranks {needs.ranks})"
    distributed = torch.distributed
    if not distributed.is_available():
        return "needs torch.distributed (this torch was built without it)"
    if torch.cuda.is_available() and not distributed.is_nccl_available():
        return "needs NCCL (this torch was built without it; on Linux: pip install torch)"
    if needs.peers and torch.cuda.is_available():
        # Every pair, so that each rank finds the same: one that skipped alone would let the others wait for it.
        for gpu, peer in permutations(range(int(os.environ.get("LOCAL_WORLD_SIZE", world()))), 2):
            if not torch.cuda.can_device_access_peer(gpu, peer):
                return f"needs GPUs with peer access (GPU {gpu} has none to GPU {peer}; see nvidia-smi topo -p2p r)"
    return None


# --- in a rank


def enter() -> None:
    """First thing in a rank: its GPU, and that it ends with the process that started it."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if rank():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # rank 0 says what was done


def begin(lesson: str = "") -> None:
    """Make the process group, once; leave the lesson's name for launch(), should this rank be killed in it."""
    if errors := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(errors).with_name(LESSON_FILE).write_text(lesson, encoding="utf-8")
    if torch.distributed.is_initialized():
        return
    backend, options = "gloo", {}
    if torch.cuda.is_available():
        backend, options = "cpu:gloo,cuda:nccl", {"device_id": torch.device("cuda", local())}
    for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_PROPAGATE_ERROR"):  # which delay the end of the process
        os.environ.setdefault(name, "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # here, so that no technique changes it
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S), **options)
    if torch.cuda.is_available():  # while NCCL connects, which it does in the first call, nothing ends the wait
        threading.Thread(target=_guard, daemon=True).start()
        align()
        torch.cuda.synchronize()
    else:
        from harness.hardware import interpreted  # which imports this module

        if interpreted():
            _watch_kernels()


def _guard() -> None:
    """NCCL's own watchdog may not bring the process down: where the main thread has stood at one place for longer than
    TIMEOUT_S, in a collective or with a GPU that does not finish, this rank ends."""
    stood, since = None, time.monotonic()
    while True:
        time.sleep(1)
        place = _main_thread()
        waits = place and (place[0].endswith("distributed_c10d.py") or not torch.cuda.current_stream().query())
        if place != stood or not waits:
            stood, since = place, time.monotonic()
        elif time.monotonic() - since > TIMEOUT_S + END_S:
            give_up(
                f"{Path(place[0]).name}:{place[1]}: waited in vain for another rank, which did not join a collective, "
                "or with another shape"
            )


def _watch_kernels() -> None:
    """On a CPU a kernel that waits for another rank is a loop in Python. Where all ranks stand in one, none is in a
    collective that would give up: a launch that does not end within TIMEOUT_S ends this rank."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    @functools.wraps(launch)
    def timed(executor: GridExecutor, *args, **kwargs) -> None:
        reason = f"{executor.fn.__name__}: waited in vain for another rank, which did not launch the same kernel"
        overdue = threading.Timer(TIMEOUT_S + END_S, give_up, [reason])
        overdue.daemon = True
        overdue.start()
        try:
            launch(executor, *args, **kwargs)
        finally:
            overdue.cancel()

    GridExecutor.__call__ = timed


def _main_thread() -> tuple[str, int, int, int] | None:
    """Where it stands: file, line, and what tells one call from the next. No frame is kept beyond this: with it would
    live whatever its callers hold, and DDPOptimizer, say, relies on an object that ends with a call."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    return frame and (frame.f_code.co_filename, frame.f_lineno, id(frame), frame.f_lasti)


def end() -> None:
    """At the end of a run without an error; no rank leaves while another one still needs it."""
    if count() > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def give_up(reason: str) -> NoReturn:
    """Leave the reason for the process that started the ranks, and end at once: cleaning up could wait for a rank that
    never comes."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    error = RankFailed(f"rank {rank()} of {world()}, in {reason}")
    kept = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if kept:  # written beside it and renamed: where ranks give up at once, one is ended and read while it writes
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{kept}.partial"
    get_error_handler().record_exception(error)
    with suppress(OSError):  # no room for it: then only the other ranks say something
        if kept:
            os.replace(f"{kept}.partial", kept)
    print(error, file=sys.stderr)
    if re.search(LOST, reason):
        time.sleep(2)  # the rank that was lost is found first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


# --- in the process that starts them


def launch(ranks: int, command: list[str], verbose: bool = False) -> tuple[int, str]:
    """Run `python command` in so many ranks: the exit status, and where one failed the one message about it.
    Rank 0 prints to this process's output; what ranks write to standard error is kept for when one of them fails."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the engine's own, in a process that does nothing else
    if not torch.cuda.device_count():
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(END_S))
    sys.stdout.flush()
    with TemporaryDirectory(prefix="ranks-") as folder:
        kept = dict.fromkeys(range(ranks), Std.ALL) | {0: Std.NONE if verbose else Std.ERR}
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=0, run_id=str(uuid.uuid4()),
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            logs_specs=DefaultLogsSpecs(folder, redirects=kept),
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)("-u", *command)
        except ChildFailedError as failed:
            return _first(failed.failures, ranks, Path(folder), verbose)
        except SignalException:
            return 130, "interrupted"
        finally:
            logging.disable(logging.NOTSET)
    return 0, ""


def _first(failures: dict, ranks: int, folder: Path, verbose: bool) -> tuple[int, str]:
    """Of the ranks that failed the one that the others failed after, and what it died of; its traceback with -v."""
    said = {}
    for number, failure in failures.items():
        text = failure.message["message"] if isinstance(failure.message, dict) else ""
        said[number] = text.removeprefix("RankFailed: ")
    # A rank that was killed; one that raised; one that lost another; those that were ended for it.
    ended = {number: failures[number].exitcode == -signal.SIGTERM and not said[number] for number in said}
    order = sorted(said, key=lambda n: (ended[n], bool(re.search(LOST, said[n])), failures[n].timestamp, n))
    number = order[0]
    exitcode = failures[number].exitcode
    if said[number]:
        return 1, said[number] + f"\n{failures[number].message['extraInfo']['py_callstack']}" * verbose
    words = "".join(path.read_text(errors="replace") for path in folder.glob(f"**/{number}/stderr.log"))
    if exitcode == 2:
        return 2, words.strip().removeprefix("error: ")
    how = f"was ended by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with status {exitcode}"
    if exitcode == -signal.SIGKILL:
        how += ": out of memory? (see dmesg, or run fewer --ranks)"
    found = re.search("watchdog|preamble", words.lower())  # NCCL's, and gloo's where another rank sends more
    if found:
        within = f" within {TIMEOUT_S:g} s" if found[0] == "watchdog" else ""
        how += f": a collective was not joined by every rank with the same shape{within}"
    spoke = exitcode > 0 or (exitcode == -signal.SIGABRT and not found)  # C++ says what it could not go on after
    last = [line for line in words.splitlines() if line.strip()][-3:] if spoke else []
    lesson = next((f", in {path.read_text()}," for path in folder.glob(f"**/{number}/{LESSON_FILE}")), "")
    return 1, "\n  ".join([f"rank {number} of {ranks}{lesson} {how}", *last])


# --- what ranks do alike


def count() -> int:
    """How many ranks this run has; 1 without a process group."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def gathered(value) -> list:
    """`value` of every rank, by rank."""
    values = [value] * count()
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def align() -> None:
    """On a GPU: what is launched after this begins on all ranks at about the same time. The GPU first sleeps while the
    host launches the collective and what comes next: else a slow host lets the others' GPUs wait in what is timed."""
    if count() > 1:
        torch.cuda._sleep(AHEAD_CYCLES)
        torch.distributed.all_reduce(_one_element())


@functools.cache
def _one_element() -> torch.Tensor:
    return torch.zeros(1, device="cuda")


def slowest(samples: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Times of calls, by name and round: of every one the longest of all ranks, as the others wait for it."""
    ranks = gathered(samples)
    return {
        name: [list(map(max, zip(*times, strict=True))) for times in zip(*(each[name] for each in ranks), strict=True)]
        for name in samples
    }
