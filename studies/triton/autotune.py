"""autotune, measured: four configurations chosen by hand or 192, what a search costs, and what a later process pays.

An elementwise kernel is tuned over the chapter's four BLOCK_SIZEs, and compared with each: the larger two equal torch.

Every search starts from a cache directory that holds only the fixed configuration. The configurations that a search
times are checked one by one, on poisoned outputs: a search must choose among correct ones.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from harness import Harness, Work

import torch
import triton
import triton.language as tl

from examples.common.device import autotune_configs
from examples.common.operands import short_of_k
from examples.triton.autotune import (
    FIXED,
    launch,
    matmul_config,
    matmul_fixed,
    matmul_tuned_kernel,
    reference,
    time_config,
    tuner,
)
from examples.triton.autotune_pruned import LARGE, configuration, numbers

SMALL = [FIXED, *(configuration(*tile) for tile in ((128, 128, 64, 8, 4), (64, 64, 128, 4, 4), (16, 64, 128, 4, 5)))]
SPACES = {"small space": SMALL, "large space": LARGE}
BLOCK_SIZES = (128, 256, 512, 1024)  # the chapter's autotuned_kernel has these, with 4 warps each
SPILLING = configuration(128, 256, 64, 4, 3)  # FIXED with half the threads for an accumulator of the same size


@triton.jit
def double_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements)
    tl.store(y_ptr + offsets, x + x, mask=offsets < n_elements)


def double(kernel, x: torch.Tensor, **config) -> torch.Tensor:
    y = torch.empty_like(x)
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK_SIZE"]),)](x, y, x.numel(), **config)
    return y


def compare_blocks(h: Harness, n: int) -> None:
    """The chapter's search on the chapter's kind of kernel, beside each of its blocks without a search."""
    configs = [triton.Config({"BLOCK_SIZE": block}, num_warps=4) for block in BLOCK_SIZES]
    tuned, x = triton.autotune(autotune_configs(configs), key=["n_elements"])(double_kernel), h.randn(n)
    variants = {"torch": lambda x: x + x, "tuned": partial(double, tuned)}
    variants |= {f"fixed {block}": partial(double, double_kernel, BLOCK_SIZE=block) for block in BLOCK_SIZES}
    table = h.compare(variants, lambda x: x.double() * 2, x, baseline="torch", work=Work(bytes=2 * x.nbytes),
                      title="elementwise", case=f"{n} float32", terms=0)  # fmt: skip
    if table:
        gain = table.over(f"fixed {BLOCK_SIZES[-1]}", "tuned")
        h.say(f"elementwise, {table.case}: the search takes {tuned.best_config.kwargs['BLOCK_SIZE']}, {gain:.2f}x a "
              f"fixed block of {BLOCK_SIZES[-1]}")  # fmt: skip


def study(h: Harness) -> None:
    for n in h.pick(interpreted=[5000], quick=[10_000_000], full=[10_000_000, 1 << 28]):
        compare_blocks(h, n)
    check_each(h, SMALL, h.randn(130, 70, dtype=h.half), h.randn(70, 260, dtype=h.half))
    # 256 values of the accumulator per thread are more than it has registers, except where they are in tensor memory.
    find = {90: ("wgmma",), 100: ("tcgen05.mma",)}
    kernels = h.codegen(matmul_config, h.meta(4096, 8192), h.meta(8192, 8192), *numbers(SPILLING), find=find)
    h.fact(f"bytes spilled with {numbers(SPILLING)}", {f"sm_{kernel.sm}": kernel.spills for kernel in kernels})
    if not h.timing or h.interpreted or h.profile:  # the interpreter has no speed, a profiler is not to see a search
        return
    shapes = h.pick(
        quick=[(16, 4096, 4096), (512, 512, 4096), (2048, 4096, 4096)],
        full=[(16, 8192, 8192), (512, 512, 8192), (4096, 8192, 8192)],
    )
    with new_cache() as fixed_only:
        matmul_fixed(h.randn(16, 256, dtype=h.half), h.randn(256, 256, dtype=h.half))
        with new_cache():  # for whatever else is compiled below
            for shape in shapes:
                measure(h, fixed_only, *shape)
        M, N, K = shapes[1]
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        with new_cache(fixed_only), h.progress("tuning, and again with what the first search left on disk"):
            first, later = (tune(LARGE, a, b)[1] for _ in range(2))
    h.say(f"a search takes {first['seconds']:.2f} s and times {first['timed']}; with its results on disk, as a later "
          f"process has them, {later['seconds']:.2f} s and {later['timed']}")  # fmt: skip


def check_each(h: Harness, configs: list, a: torch.Tensor, b: torch.Tensor) -> None:
    def each(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(matmul_config(a, b, *numbers(config)) for config in configs)

    what = f"each of {len(configs)} configurations, {a.shape[0]}x{b.shape[1]}x{a.shape[1]}"
    h.check(each, lambda a, b: (reference(a, b),) * len(configs), a, b, terms=a.shape[1], what=what)


def measure(h: Harness, fixed_only: str, M: int, N: int, K: int) -> None:
    """Each space searched, what the search found, and what that is worth."""
    a, b, case = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half), f"{M}x{N}x{K}"
    kernels, costs = {}, {}
    for space, configs in SPACES.items():
        with new_cache(fixed_only), h.progress(f"tuning over the {space}, {case}"):
            kernels[space], costs[space] = tune(configs, a, b)
    check_each(h, list(kernels["large space"].configs_timings), a, b)

    variants = {"cuBLAS": torch.matmul, "fixed": matmul_fixed}
    variants |= {space: partial(launch, kernel) for space, kernel in kernels.items()}
    variants["spilling"] = lambda a, b: matmul_config(a, b, *numbers(SPILLING))
    work = Work(bytes=a.nbytes + b.nbytes + a.element_size() * M * N, flops=2 * M * N * K, dtype=h.half)
    table = h.compare(
        variants, reference, a, b, baseline="cuBLAS", work=work, case=case, title="spaces", terms=K,
        wrong=short_of_k(reference), default="large space",
    )  # fmt: skip
    for space, cost in costs.items():
        saved = (table["fixed"].ms - table[space].ms) / 1000
        h.say(
            f"{case}, {space}: {cost['seconds']:.1f} s to time {cost['timed']} of {len(SPACES[space])}; "
            f"{cost['chosen']}: {table.over('fixed', space):.2f}x as fast as the fixed configuration, "
            + (f"paid for after {cost['seconds'] / saved:,.0f} calls" if saved > 0 else "never paid for")
        )


@contextmanager
def new_cache(like: str | None = None) -> Iterator[str]:
    """Triton with a cache directory of its own, empty or a copy of another, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="triton-tuning-") as path, triton.knobs.cache.scope():
        if like:
            shutil.copytree(like, path, dirs_exist_ok=True)
        triton.knobs.cache.dir = path
        yield path


def tune(configs: list, a: torch.Tensor, b: torch.Tensor, **options) -> tuple:
    """(tuner, what its first call cost), given what Triton's cache directory holds and nothing else."""
    matmul_tuned_kernel.device_caches.clear()  # kernels that this process compiled before
    compiled, timed = [], []

    def time_and_count(fn, quantiles):
        timed.append(fn)
        return time_config(fn, quantiles)

    kernel = tuner(configs, do_bench=time_and_count, **options)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(not cache_hit)
        torch.cuda.synchronize()
        started = time.perf_counter()
        launch(kernel, a, b)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    cost = {"seconds": round(seconds, 3), "compiled": sum(compiled), "timed": len(timed)}
    return kernel, cost | {"chosen": numbers(kernel.best_config)}
