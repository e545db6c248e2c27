"""Symmetric memory: a buffer in each rank that every other rank reads and writes, and how kernels signal through it.

On GPUs torch.distributed._symmetric_memory maps the peers' memory, over NVLink. On a CPU it is a shared file that each
process maps, where Triton's interpreter finds it: its atomics are the processor's own. Signals are words of such a
buffer, and not of torch's signal pads, which have a fixed size and serve torch's own operators too.

docs/memory_ordering.md, "Ranks that wait for each other", says what `signal` and `wait_for` promise.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from examples.common.rows import ASSEMBLY


class Symmetric(NamedTuple):
    """This rank's buffer, everyone's as tensors (peers[rank] is own), and their addresses.

    Kernels take the addresses. Where one takes `own` as a tensor, as the base of a TMA descriptor, the interpreter
    would copy it onto itself when the kernel ends, and undo what a peer has written meanwhile; _map_file prevents that.
    """

    own: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]
    rank: int

    @property
    def world(self) -> int:
        return len(self.addresses)


def symmetric(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group=None) -> Symmetric:
    """A buffer of zeros of this shape and dtype, on `device`, in every rank of `group` (by default all). A collective.

    Raises, in every rank alike, ValueError for one rank only and for ranks that ask for different buffers;
    RuntimeError without a process group, for ranks on several machines, for GPUs without peer access, or for a torch
    that maps a rank's own buffer elsewhere.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(f"{name}: there is no process group; start it by torchrun and call init_process_group first")
    group = group or distributed.group.WORLD
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    check_ranks(name, world)
    asked = gathered((tuple(shape), str(dtype), device.type), group)
    other = next((r for r in range(world) if asked[r] != asked[0]), None)
    if other is not None:
        raise ValueError(
            f"{name}: rank 0 calls with {describe(asked[0])}, rank {other} with {describe(asked[other])}; "
            "every rank must pass the same shape and dtype"
        )
    hosts = gathered(socket.gethostname(), group)
    if len(set(hosts)) > 1:
        raise RuntimeError(f"{name}: the ranks are on {', '.join(sorted(set(hosts)))}; they must share one machine")
    nbytes = max(16, math.prod(shape) * dtype.itemsize)
    peers = _map_gpus(name, nbytes, device, group) if device.type == "cuda" else _map_file(nbytes, group)
    tensors = tuple(peer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape) for peer in peers)
    return Symmetric(tensors[rank], tensors, tuple(peer.data_ptr() for peer in peers), rank)


def check_ranks(name: str, world: int) -> None:
    """Raises ValueError for one rank only."""
    if world < 2:
        raise ValueError(f"{name}: one rank only, and it needs two or more: torchrun --nproc-per-node 2")


def describe(asked: tuple) -> str:
    return f"{'x'.join(map(str, asked[0]))} {asked[1].removeprefix('torch.')} on {asked[2]}"


def gathered(value, group) -> list:
    """`value` of every rank of the group."""
    values = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group)
    return values


def _map_gpus(name: str, nbytes: int, device: torch.device, group) -> list[torch.Tensor]:
    import torch.distributed._symmetric_memory as symmetric_memory

    indices = gathered(device.index, group)
    apart = [i for i in indices if i != device.index and not torch.cuda.can_device_access_peer(device.index, i)]
    apart = sorted({(i, j) for i, others in zip(indices, gathered(apart, group), strict=True) for j in others})
    if apart:
        raise RuntimeError(f"{name}: GPU {apart[0][0]} cannot access the memory of GPU {apart[0][1]}; use NCCL there")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # no kernel here uses it
    own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device).zero_()
    handle = symmetric_memory.rendezvous(own, group.group_name)
    peers = [handle.get_remote_tensor(r, (nbytes,), torch.uint8) for r in range(len(indices))]
    if peers[handle.rank].data_ptr() != own.data_ptr():
        raise RuntimeError(
            f"{name}: torch {torch.__version__} maps a rank's own symmetric memory at a second address, not supported "
            "by examples/common/symmetric.py; use NCCL, or the torch of requirements.txt"
        )
    own.handle = handle  # the mapping lives as long as the buffer
    peers[handle.rank] = own
    torch.cuda.synchronize(device)
    gathered(None, group)  # nobody writes into a buffer before it has its zeros
    return peers


def _map_file(nbytes: int, group) -> list[torch.Tensor]:
    from triton.runtime import interpreter

    # It copies operands onto themselves when a kernel ends, which would undo what a peer writes meanwhile.
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    handle, path = tempfile.mkstemp(prefix="symmetric-", dir=folder)
    os.ftruncate(handle, nbytes)
    os.close(handle)
    try:
        paths = gathered(path, group)
        peers = [torch.from_file(each, shared=True, size=nbytes, dtype=torch.uint8) for each in paths]
        gathered(None, group)  # all have mapped it
    finally:
        os.unlink(path)
    return peers


@triton.jit
def pointer(address, dtype: tl.constexpr):
    """A pointer into symmetric memory; buffers start at multiples of 16 bytes, so that accesses are 16 bytes wide."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def signal(ptrs, value, mask=None):
    """Write `value` to the int32 words at `ptrs`, after everything that this program has written before."""
    tl.debug_barrier()  # the stores of all threads come before the release of one
    tl.atomic_xchg(ptrs, value.to(tl.int32), mask=mask, sem="release", scope="sys")


@triton.jit
def signal_peers(addresses, offset, value, RANK: tl.constexpr, WORLD: tl.constexpr, WORLD_POW2: tl.constexpr):
    """signal() to the word `offset` of each peer's buffer, all at once: a thread for each."""
    ranks = tl.arange(0, WORLD_POW2)
    starts = tl.zeros((WORLD_POW2,), tl.int64)
    for rank in tl.static_range(WORLD):
        starts = tl.where(ranks == rank, addresses[rank], starts)
    signal(starts.to(tl.pointer_type(tl.int32)) + offset, value, mask=(ranks < WORLD) & (ranks != RANK))


@triton.jit
def wait_for(ptr, value):
    """Wait until the int32 word at `ptr` has reached `value`: what its writer wrote before is then visible.

    Words count calls and may wrap around. Every thread waits for itself. Assembly, as a loop of Triton's own would poll
    by an atomic.
    """
    if ASSEMBLY:
        tl.inline_asm_elementwise(
            """{
            .reg .pred behind;
            .reg .s32 ahead;
            again:
            ld.acquire.sys.global.b32 ahead, [$1];
            sub.s32 ahead, ahead, $2;
            setp.lt.s32 behind, ahead, 0;
            @behind bra again;
            mov.b32 $0, 0;
            }""",
            "=r,l,r", [ptr.to(tl.int64), value.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        while tl.atomic_add(ptr, 0, sem="acquire", scope="sys") - value.to(tl.int32) < 0:
            pass
