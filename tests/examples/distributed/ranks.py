"""A function on every rank of a process group of its own: ranks that are processes, as gloo and the kernels need."""

import os
import socket
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

from harness.catalog import Needs
from harness.hardware import machine

import pytest
import torch

PRELOAD = ["harness", "examples.distributed.one_shot_allreduce"]
ON_A_CPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


def needs_the_interpreter() -> None:
    """Skip where ranks cannot interpret kernels, be it that this process, on a GPU, does not."""
    with patch.dict(os.environ, ON_A_CPU):
        if missing := machine().lacks(Needs.parse("triton")):
            pytest.skip(missing)


def on_ranks(fn, world: int = 2, timeout_s: float = 25) -> list[str]:
    """fn(rank) on `world` ranks; what each returned, as text. Raises AssertionError where one fails or takes longer."""
    context = torch.multiprocessing.get_context("forkserver")  # which imports once for all
    context.set_forkserver_preload(PRELOAD)
    results = context.SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(fn, rank, world, port, results)) for rank in range(world)]
    with patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parents[3]), OMP_NUM_THREADS="1", **ON_A_CPU):
        for each in ranks:
            each.start()
    found: dict[int, str] = {}
    try:
        for each in ranks:
            each.join(timeout_s)
        while not results.empty():
            rank, text = results.get()
            found[rank] = text
        codes = [each.exitcode for each in ranks]
        assert codes == [0] * world, f"the ranks ended with {codes} (None: not within {timeout_s} s): {found}"
    finally:
        for each in ranks:
            each.kill()
    return [found[rank] for rank in range(world)]


def _rank(fn, rank: int, world: int, port: int, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=15)
    )
    try:
        results.put((rank, str(fn(rank))))
        torch.distributed.barrier()
    except BaseException as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
        raise
    torch.distributed.destroy_process_group()
