"""Checkpoints of an FSDP2 model: each rank writes its parts, and any number of ranks reads them.

torch.distributed.checkpoint saves where in the whole tensor each part belongs. A rank that loads asks for what its own
parts cover, from however many files, so the number of ranks may change. The checkpoint must also hold the optimizer's
state, the step number and whatever the data depend on.

On the same number of ranks, training goes on bit for bit. On another it starts from the same bits, but sums the next
gradient in another order, which rounds differently. One rank that runs the batch in two parts adds up what two ranks
do, in their order. Compiled or not, the checkpoint is the same: other numbers of ranks load it without compiling.

All of it runs on CPUs, on machines with GPUs too: float32, gloo, blocks compiled by aot_eager, one thread a rank.
Whether GPUs go on bit for bit depends on their kernels and on NCCL as well, and is not shown here.

torch.compile(module) wraps the module in another, whose parameter names begin with `_orig_mod.`. module.compile()
changes only how the module runs, and get_model_state_dict leaves such prefixes out.

Question   Does training go on bit for bit from a checkpoint, on as many ranks, on one, on four; under which names?
Needs      torch, 2 ranks
Wins when  a run may be interrupted, or moved to another number of GPUs.
Source     goes beyond the chapter; torch.distributed.checkpoint's documentation
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from harness import Harness, run

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from examples.common.transformer import Config
from examples.compiler.training_step_model import LanguageModel

OFF = "largest difference, of the largest number"
STEPS = 2  # before the checkpoint, and after it
CONFIG = Config(width=64, layers=2, heads=4, kv_heads=2, hidden=128, vocab=256)


def new_model() -> LanguageModel:
    return LanguageModel(CONFIG, torch.device("cpu"), mixed=False)


class Training:
    """The same model, optimizer and data on the ranks of the process group, on their CPUs; at step 0.

    `rows` counts a batch's rows on all ranks, which must share them evenly: gradients are averaged over ranks.
    """

    def __init__(self, rows: int, compiled: bool = True) -> None:
        self.model, self.rows, self.step = new_model(), rows, 0
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.body.blocks:
            if compiled:
                block.compile(backend="aot_eager", dynamic=False)  # in place: its parameters keep their names
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self, parts: int = 1) -> None:
        """Run STEPS steps, with this rank's rows of the batch in so many parts, whose gradients are added up."""
        for _ in range(STEPS):
            self.step += 1
            generator = torch.Generator().manual_seed(self.step)  # the data depend only on the step, and need no state
            tokens = torch.randint(CONFIG.vocab, (self.rows, 33), generator=generator)
            for part in tokens.chunk(dist.get_world_size())[dist.get_rank()].chunk(parts):
                (self.model(part).mean() / parts).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def save(self, folder: str) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self.state()  # tensors to load into, as they are sharded here
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]

    def whole(self) -> torch.Tensor:
        """Parameters and Adam's moments, of all ranks, in one vector."""
        moments = [each[name] for each in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return torch.cat([each.detach().full_tensor().flatten() for each in (*self.model.parameters(), *moments)])


def resume(folder: str, rows: int, parts: int = 1, compiled: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of a new model on the ranks of the process group: (as loaded, STEPS steps later)."""
    training = Training(rows, compiled)
    training.load(folder)
    loaded = training.whole()
    training.train(parts)
    return loaded, training.whole()


def resume_in_rank(rank: int, world: int, folder: str, rows: int, parts: list[int]) -> None:
    """In its own process: resume() in a group of `world`, uncompiled, for each number of parts; saved to a file."""
    torch.set_num_threads(1)
    store, within = f"file://{folder}/store-{world}", timedelta(seconds=30)
    dist.init_process_group("gloo", store, rank=rank, world_size=world, timeout=within)
    found = [resume(folder, rows, each, compiled=False) for each in parts]
    if rank == 0:
        torch.save(found, f"{folder}/resumed-{world}")
    dist.destroy_process_group()


def resume_on_others(
    folder: str, rows: int, parts: dict[int, list[int]]
) -> dict[int, list[tuple[torch.Tensor, torch.Tensor]]]:
    """resume() on other numbers of ranks, in processes that rank 0 starts, without a GPU.

    `parts` has for each number of ranks the numbers of parts to try; the result has resume()'s for each of these.
    """
    done = Path(folder, "done")
    if dist.get_rank() == 0:
        mp.get_context("forkserver").set_forkserver_preload([__name__])  # imports once for all processes
        with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"):
            for world in parts:
                arguments = world, folder, rows, parts[world]
                mp.start_processes(resume_in_rank, arguments, world, start_method="forkserver")
        done.touch()
    while not done.exists():  # a collective would time out
        time.sleep(0.1)
    return {world: torch.load(f"{folder}/resumed-{world}") for world in parts}


@contextmanager
def one_thread() -> Iterator[None]:
    """With another number of threads a matrix product may sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compared(found: tuple, saved: torch.Tensor, end: torch.Tensor, same_ranks: bool = False) -> dict[str, str]:
    """A resumed training against one that was not stopped; the difference is relative to the state's largest number.

    Raises AssertionError if it began from other bits, or if the same ranks did not go on bit for bit.
    """
    loaded, after = found
    if not torch.equal(loaded, saved):
        raise AssertionError(f"{int((loaded != saved).sum())} of {saved.numel()} numbers are not those that were saved")
    if same_ranks and not torch.equal(after, end):
        raise AssertionError(f"{int((after != end).sum())} of {end.numel()} numbers differ, on the same ranks")
    off = (after - end).abs().max().item() / end.abs().max().item()
    return {"bits that differ": "none" if torch.equal(after, end) else "some", OFF: f"{off:.1g}"}


def names() -> dict[str, dict[str, str]]:
    """A parameter's name in the state dict, by how the model was compiled, and whether a plain model can load it."""
    blocks, whole = new_model(), new_model()
    blocks.body.blocks = torch.nn.ModuleList(map(torch.compile, blocks.body.blocks))
    whole.compile()
    states = {
        "torch.compile(model)": torch.compile(new_model()).state_dict(),
        "torch.compile(block)": blocks.state_dict(),
        "model.compile()": whole.state_dict(),
        "get_model_state_dict(...)": get_model_state_dict(torch.compile(blocks)),
    }
    plain = new_model().state_dict().keys()
    first = {how: next(name for name in state if "qkv" in name) for how, state in states.items()}
    return {how: {"name": first[how], "plain": "yes" if states[how].keys() == plain else "no"} for how in states}


def answer(ranks: int, rows: dict[str, dict], found: dict[str, dict]) -> str:
    same = [how for how, row in rows.items() if row["bits that differ"] == "none"]
    others = ", ".join(f"{how} {row[OFF]}" for how, row in rows.items() if how not in same)
    plain = " and ".join(how for how, row in found.items() if row["plain"] == "yes")
    return (
        f"On CPUs, by gloo, from {ranks} ranks' checkpoint bit by bit: {'; '.join(same)}."
        f"{f' Other orders are off by, of the largest number: {others}.' if others else ''} "
        f"{plain} keep a plain model's names."
    )


def demo(h: Harness) -> None:
    batch = math.lcm(24, h.ranks)  # rows that these ranks share evenly, and so do one and four
    with TemporaryDirectory() as mine, one_thread():
        shared = [mine]
        dist.broadcast_object_list(shared)
        (folder,) = shared
        with h.progress("train and save"):
            training = Training(batch)
            training.train()
            training.save(folder)
            saved = training.whole()
            training.train()
            end = training.whole()
        rows = {f"{h.ranks} ranks": compared(resume(folder, batch), saved, end, same_ranks=True)}
        with h.progress("load on one rank and on four"):
            (one, in_parts), (four,) = resume_on_others(folder, batch, {1: [1, h.ranks], 4: [1]}).values()
        dist.barrier()  # rank 0's folder is deleted once all have read
    rows["1 rank"] = compared(one, saved, end)
    rows[f"1 rank, in {h.ranks} parts"] = compared(in_parts, saved, end)
    rows["4 ranks"] = compared(four, saved, end)
    h.table(f"{STEPS} steps after a checkpoint of {h.ranks} ranks", rows)
    found = names()
    h.table("names in a checkpoint", found)
    h.answer(lambda: answer(h.ranks, rows, found), timed=False)


if __name__ == "__main__":
    run(demo)
