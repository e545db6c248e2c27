"""Which configurations of a matmul a search should time: of 192, the dozen that fit, load least and do not spill.

A search costs compiling and timing. Before compiling it is known what cannot fit shared memory and how much the busiest
SM loads; after it, the driver reports what a kernel spills. Candidates compile side by side, since the compiler does
not hold Python's lock; triton.autotune alone compiles them one after the other.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from examples.common.device import architecture, device_limits

CANDIDATES, PER_TILE = 12, 4  # at most: compiled per key, and of these, with one BLOCK_M x BLOCK_N
SPILLS = 8  # 4-byte values that a thread may spill: a few outside the loop cost nothing


def configuration(m: int, n: int, k: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)


LARGE = [
    configuration(*tile)
    for tile in itertools.product((128, 64, 256, 16), (128, 256, 64, 32), (64, 128), (8, 4), (4, 3, 5))
]


def numbers(config: triton.Config) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages."""
    return (*config.kwargs.values(), config.num_warps, config.num_stages)


def shared_bytes(config: triton.Config, itemsize: int, sm: int) -> int:
    """Shared memory of the pipeline: wgmma and tcgen05, from 64 rows, keep num_stages buffers, mma.sync one fewer."""
    m, n, k = config.kwargs.values()
    buffers = config.num_stages - (m < 64 or sm // 10 not in (9, 10, 11))
    return (m + n) * k * itemsize * buffers + 1024  # and a little for barriers


def usable_config(name: str, given: tuple, a: torch.Tensor) -> triton.Config:
    """The configuration of LARGE with these numbers; ValueError for one that is unknown or too large for a's device."""
    config = next((each for each in LARGE if numbers(each) == given), None)
    if config is None:  # others may be right too, but only these are tested
        raise ValueError(
            f"{name}: no configuration {given} (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages); choose one of "
            "autotune_pruned.LARGE and pass its numbers(config)"
        )
    need, limit = shared_bytes(config, a.element_size(), architecture(a.device)), device_limits(a.device).shared_bytes
    if need > limit:
        raise ValueError(
            f"{name}: {given} needs {need} bytes of shared memory, and a program may have {limit}; "
            "take fewer stages or a smaller tile"
        )
    return config


def loaded_per_sm(config: triton.Config, M: int, N: int, sms: int) -> int:
    """Rows and columns that the busiest SM loads per step of K: small tiles load more, few tiles load on few SMs."""
    m, n, _ = config.kwargs.values()
    return triton.cdiv(triton.cdiv(M, m) * triton.cdiv(N, n), sms) * (m + n)


def candidates(configs: list, M: int, N: int, itemsize: int, sm: int, sms: int, shared: int) -> list[triton.Config]:
    """Those that fit: tiles that load least first, and of each tile the few with the most bytes in flight.

    Nothing is compiled for this. Triton's perf_model and top_k only rank: they would keep every variant of one tile.
    """
    fitting = [config for config in configs if shared_bytes(config, itemsize, sm) <= shared]
    fitting.sort(key=lambda config: (loaded_per_sm(config, M, N, sms), -shared_bytes(config, itemsize, sm)))
    kept = []
    for config in fitting:
        if sum(numbers(config)[:2] == numbers(other)[:2] for other in kept) < PER_TILE:
            kept.append(config)
    return kept[:CANDIDATES]


def worth_timing(
    kernel: triton.JITFunction, configs: list, named_args: dict, *, grid, warmup: bool = False, **kwargs
) -> list[triton.Config]:
    """Triton's early_config_prune: candidates(), less those that spill or cannot run."""
    a: torch.Tensor = named_args["a_ptr"]
    sms, shared = device_limits(a.device)
    kept = candidates(configs, named_args["M"], named_args["N"], a.element_size(), architecture(a.device), sms, shared)
    if not kept or not a.is_cuda:  # compiled offline: no GPU to load it on and ask
        return kept
    compiled = partial(kernel.warmup, *named_args.values(), grid=grid, **kwargs)
    with ThreadPoolExecutor(len(kept)) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for config in kept:
            compiled(**config.all_kwargs())

    def spills(config: triton.Config) -> float:
        try:
            loaded = compiled(**config.all_kwargs())  # found in memory
            loaded[(1,)]  # makes a launcher: that loads the kernel on the GPU, whose driver says what it spills
            return loaded.n_spills
        except (OutOfResources, PTXASError):
            return float("inf")

    spilled = {config: spills(config) for config in kept}
    return [config for config in kept if spilled[config] <= SPILLS] or [min(kept, key=spilled.get)]
