"""Autotuning: what a search over configurations buys, what it costs, and how to pay once.

Technique  One kernel, one matrix product, three spaces: a fixed configuration, four chosen by hand, and every
           combination of tile, warps and stages. Which is best depends on the sizes: a tile that suits thousands of
           rows leaves most SMs idle for sixteen. The first call with a new key times the candidates, so what makes
           the search cheap is what is left out of it: what cannot fit shared memory (known before compiling), what
           makes an SM load more than others do (counted), what spills (known after compiling). Candidates
           compile side by side, and results are kept on disk, so that the next process neither compiles nor times.
Question   What does a search over configurations buy, when has it paid for itself, and what must its key name?
Needs      triton
Shapes     a [M, K], b [K, N], rows contiguous, any sizes (0 too) -> c [M, N], contiguous, dtype of a.
Dtypes     float16, bfloat16, both the same; sums are float32.
Errors     TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, rows that are not
           contiguous, or a configuration that is unknown or does not fit; RuntimeError for a device without Triton
           or an input that requires grad.
Wins when  shapes differ and each runs many times. Where one fixed tile is already right, a search buys nothing.
Source     chapter section "Autotuning"; triton.autotune, triton.AsyncCompileMode.
Run        python examples/triton/autotune.py
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from harness import Harness, Work, autotune_configs, device_limits, interpreted, require_triton_device, run
from harness.hardware import SHARED_LIMIT

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources, PTXASError

DTYPES = (torch.float16, torch.bfloat16)
CANDIDATES, PER_TILE = 12, 4  # compiled per key, and of these with the same BLOCK_M x BLOCK_N, at most
SPILLS = 8  # values of four bytes that a thread may keep in memory: a few outside the loop cost nothing


def _config(m: int, n: int, k: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)


FIXED = _config(128, 256, 64, 8, 3)  # what matmul.py finds best for large squares on Hopper
SMALL = [FIXED, _config(128, 128, 64, 8, 4), _config(64, 64, 128, 4, 4), _config(16, 64, 128, 4, 5)]
LARGE = [
    _config(*tile) for tile in itertools.product((128, 64, 256, 16), (128, 256, 64, 32), (64, 128), (8, 4), (4, 3, 5))
]

SPACES = {"fixed": [FIXED], "small space": SMALL, "large space": LARGE}
SPILLING = _config(128, 256, 64, 4, 3)  # FIXED with half the threads for as many sums


def numbers(config: triton.Config) -> tuple[int, int, int, int, int]:
    """A configuration as matmul_config takes it."""
    return (*config.kwargs.values(), config.num_warps, config.num_stages)


def label(config: triton.Config) -> str:
    return "{}x{}x{}, {} warps, {} stages".format(*numbers(config))


def _sm() -> int:
    return 90 if interpreted() else triton.runtime.driver.active.get_current_target().arch


def shared_bytes(config: triton.Config, itemsize: int, sm: int) -> int:
    """Shared memory of the pipeline: wgmma and tcgen05, from 64 rows, keep num_stages buffers, mma.sync one fewer."""
    m, n, k = config.kwargs.values()
    buffers = config.num_stages - (m < 64 or sm // 10 not in (9, 10, 11))
    return (m + n) * k * itemsize * buffers + 1024  # and a little for barriers


def loaded_per_sm(config: triton.Config, M: int, N: int, sms: int) -> int:
    """Rows and columns that the busiest SM loads per step of K: small tiles load more, few tiles load on few SMs."""
    m, n, _ = config.kwargs.values()
    return triton.cdiv(triton.cdiv(M, m) * triton.cdiv(N, n), sms) * (m + n)


def candidates(configs: list, M: int, N: int, itemsize: int, sm: int, sms: int, shared: int) -> list[triton.Config]:
    """Those that fit: tiles that load least first, and of each the few that have most on its way at a time.

    Nothing is compiled for this. A rank alone, as by Triton's perf_model and top_k, would keep one tile in all its
    variants, and this one only counts.
    """
    fitting = [config for config in configs if shared_bytes(config, itemsize, sm) <= shared]
    fitting.sort(key=lambda config: (loaded_per_sm(config, M, N, sms), -shared_bytes(config, itemsize, sm)))
    kept = []
    for config in fitting:
        if sum(numbers(config)[:2] == numbers(other)[:2] for other in kept) < PER_TILE:
            kept.append(config)
    return kept[:CANDIDATES]


def worth_timing(
    configs: list, named_args: dict, *, grid, warmup: bool = False, parallel: bool = True, **kwargs
) -> list[triton.Config]:
    """Triton's early_config_prune: candidates(), less those that spill or cannot run."""
    a = named_args["a_ptr"]
    sms, shared = device_limits(a.device)
    kept = candidates(configs, named_args["M"], named_args["N"], a.element_size(), _sm(), sms, shared)
    if not kept or not a.is_cuda:  # compiled offline: no GPU to load it on and ask
        return kept
    compiled = partial(matmul_tuned_kernel.fn.warmup, *named_args.values(), grid=grid, **kwargs)
    if parallel:  # the compiler does not hold Python's lock; triton.autotune alone compiles one after the other
        with ThreadPoolExecutor(len(kept)) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for config in kept:
                compiled(**config.all_kwargs())

    def spills(config: triton.Config) -> float:
        try:
            kernel = compiled(**config.all_kwargs())  # found in memory, if it was compiled above
            kernel[(1,)]  # makes a launcher: that loads the kernel on the GPU, whose driver says what it spills
            return kernel.n_spills
        except (OutOfResources, PTXASError):
            return float("inf")

    spilled = {config: spills(config) for config in kept}
    return [config for config in kept if spilled[config] <= SPILLS] or [min(kept, key=spilled.get)]


def time_config(fn, quantiles):
    """Triton's do_bench. In a CUDA graph: events around one launch of a small kernel time Python on a slow host.

    A graph repeats with inputs in L2, where they fit. For inputs that come from memory in use, tune on such.
    """
    time_config.calls += 1
    return triton.testing.do_bench_cudagraph(fn, rep=2, quantiles=quantiles)


time_config.calls = 0
KEY = ("M_BUCKET", "N", "K")  # and the dtypes, which Triton adds by itself


def tuner(configs: list, key: tuple = KEY, cache_results: bool = True, parallel: bool = True):
    """A decorator: the kernel with a search over `configs`.

    cache_results keeps timings in Triton's cache directory, under the kernel's source, the key, the candidates and
    the architecture. It does not name the GPU: an H100 would take an H200's answer, so copy no cache between them.
    """
    return triton.autotune(
        configs=autotune_configs(configs), key=list(key), do_bench=time_config, cache_results=cache_results,
        prune_configs_by={"early_config_prune": partial(worth_timing, parallel=parallel)},
    )  # fmt: skip


# M_BUCKET is in the key and nowhere in the code: with M itself every new batch size would be tuned, and without
# either one size would decide for all.
@tuner(LARGE)
@triton.jit(do_not_specialize=["M_BUCKET"])
def matmul_tuned_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, M_BUCKET, stride_am, stride_bk, stride_cm,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Bands of 8 rows of tiles, so that neighbours in time share inputs in L2: see matmul.py.
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (8 * tiles_n) * 8
    band = min(tiles_m - first_m, 8)
    pid_m = first_m + pid % (8 * tiles_n) % band
    pid_n = pid % (8 * tiles_n) // band

    # Rows and columns past the edge wrap around: they load something valid, and the store drops what it makes.
    rows = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    cols = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None].to(tl.int64) * stride_am + inner[None, :]
    b_ptrs = b_ptr + inner[:, None].to(tl.int64) * stride_bk + cols[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * tl.cast(stride_bk, tl.int64)

    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def _check_input(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    require_triton_device(name, a, b)
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise TypeError(f"{name}: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    if any(x.stride(1) != 1 and x.shape[1] > 1 for x in (a, b)):
        raise ValueError(f"{name}: strides {a.stride()} and {b.stride()}, but rows must be contiguous; "
                         "call .contiguous() first")  # fmt: skip


def _launch(kernel, a: torch.Tensor, b: torch.Tensor, **config) -> torch.Tensor:
    """kernel(a, b): a tuner, or the plain kernel with its `config`."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:

        def grid(meta: dict) -> tuple[int]:
            # From the configuration that runs: a grid fixed for one tile size computes part of C with another.
            return (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)

        kernel[grid](
            a, b, c, M, N, K, max(16, triton.next_power_of_2(M)), a.stride(0), b.stride(0), c.stride(0),
            EVEN_K=K % 128 == 0, **config,
        )  # fmt: skip
    return c


def matmul_tuned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in the best configuration of LARGE for these sizes; the first call per key searches for it."""
    _check_input("matmul_tuned", a, b)
    return _launch(matmul_tuned_kernel, a, b)


def matmul_config(
    a: torch.Tensor, b: torch.Tensor, block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int
) -> torch.Tensor:
    """a @ b in one configuration, of those in LARGE and SMALL; nothing is searched."""
    _check_input("matmul_config", a, b)
    if any(type(number) is not int for number in (block_m, block_n, block_k, num_warps, num_stages)):
        given = (block_m, block_n, block_k, num_warps, num_stages)
        raise TypeError(f"matmul_config: a configuration is five ints, got {given!r}")
    config = _config(block_m, block_n, block_k, num_warps, num_stages)
    if config not in LARGE:  # others may be right too, but only these are tested
        known = "BLOCK_M 16, 64, 128, 256; BLOCK_N 32, 64, 128, 256; BLOCK_K 64, 128; 4 or 8 warps; 3, 4 or 5 stages"
        raise ValueError(f"matmul_config: no configuration ({config}); choose from {known}")
    need, limit = shared_bytes(config, a.element_size(), _sm()), device_limits(a.device).shared_bytes
    if need > limit:
        raise ValueError(
            f"matmul_config: {label(config)} need {need} bytes of shared memory, and a program may have {limit}; "
            "take fewer stages or a smaller tile"
        )
    return _launch(matmul_tuned_kernel.fn, a, b, **config.all_kwargs())


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


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
    matmul_tuned_kernel.fn.device_caches.clear()  # kernels that this process compiled before
    kernel, compiled = tuner(configs, **options)(matmul_tuned_kernel.fn), []
    time_config.calls = 0
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(not cache_hit)
        torch.cuda.synchronize()
        started = time.perf_counter()
        _launch(kernel, a, b)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    cost = {"seconds": round(seconds, 3), "compiled": sum(compiled), "timed": time_config.calls}
    return kernel, cost | {"chosen": label(kernel.best_config)}


def second_process(M: int, N: int, K: int) -> None:
    """What a later process pays, in Triton's cache directory as it is; printed as JSON for the process that asked."""
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for shape in ((M, K), (K, N)))
    _launch(matmul_tuned_kernel.fn, a[:, :64], b[:64], **FIXED.all_kwargs())  # CUDA starts here, outside the times
    costs = {"results kept": tune(LARGE, a, b)[1], "kernels alone": tune(LARGE, a, b, cache_results=False)[1]}
    print(json.dumps(costs))


def ask_second_process(cache: str, M: int, N: int, K: int) -> dict:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    code = f"from examples.triton.autotune import second_process; second_process({M}, {N}, {K})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env=os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"autotune: the second process ended with {done.returncode}: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def check_each(h: Harness, configs: list, a: torch.Tensor, b: torch.Tensor) -> None:
    """Every configuration alone, on memory of poison: a search must choose among right ones."""

    def each(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(matmul_config(a, b, *numbers(config)) for config in configs)

    what = f"each of {len(configs)} configurations, {a.shape[0]}x{b.shape[1]}x{a.shape[1]}"
    h.check(each, lambda a, b: (reference(a, b),) * len(configs), a, b, terms=a.shape[1], what=what)


def show_key(h: Harness, N: int, K: int) -> None:
    """Which calls tune: one per new key, and M=13 is no new key after M=16."""
    kernel, steps, b = tuner(SMALL, cache_results=False)(matmul_tuned_kernel.fn), [], h.randn(K, N, dtype=h.half)
    for M in (16, 16, 13, 512):
        time_config.calls = 0
        _launch(kernel, h.randn(M, K, dtype=h.half), b)
        steps.append({"M": M, "timed": time_config.calls, "keys": len(kernel.cache)})
    h.fact("calls in turn, what each timed, and the keys known then", steps)


def show_cost(h: Harness, fixed_only: str, M: int, N: int, K: int) -> None:
    """The same search compiling one by one, compiling side by side, and in a process that comes later."""
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    with new_cache(fixed_only), h.progress("tuning, one compilation after the other"):
        costs = {"one by one": tune(LARGE, a, b, parallel=False)[1]}
    with new_cache(fixed_only), h.progress("tuning, compilations side by side"):
        costs["side by side"] = tune(LARGE, a, b)[1]
    # Both of them processes of their own: this one may have looked up the assembler before torch.compile exchanged it
    # in the environment, and then finds other results than a process that starts now.
    with new_cache(fixed_only) as filled, h.progress("tuning in a process of its own, and in the next"):
        ask_second_process(filled, M, N, K)
        later = ask_second_process(filled, M, N, K)
    costs |= {f"second process, {name}": cost for name, cost in later.items()}
    h.fact(f"one search, {M}x{N}x{K}", costs)
    ratio = costs["one by one"]["seconds"] / costs["side by side"]["seconds"]
    h.say(
        f"compiling one by one, the search takes {ratio:.1f}x as long; in a second process, "
        + ", ".join(f"with {name}, {cost['seconds']:.2f} s and {cost['timed']} timed" for name, cost in later.items())
    )


def show_pruning(h: Harness) -> None:
    """What fits is known before compiling; what spills only after, and it depends on the architecture."""
    fits = {f"sm_{sm}": sum(shared_bytes(c, 2, sm) <= SHARED_LIMIT[sm] for c in LARGE) for sm in (80, 90, 100, 120)}
    h.fact(f"of {len(LARGE)} configurations fit shared memory", fits)
    # 256 sums per thread are more than it has registers, except where sums live in tensor memory.
    find = {90: ("wgmma",), 100: ("tcgen05.mma",)}
    kernels = h.codegen(matmul_config, h.meta(4096, 8192), h.meta(8192, 8192), *numbers(SPILLING), find=find)
    if kernels:
        h.fact(f"bytes spilled with {label(SPILLING)}", {f"sm_{kernel.sm}": kernel.spills for kernel in kernels})


def compare_spaces(h: Harness, a: torch.Tensor, b: torch.Tensor, kernels: dict) -> dict[str, float]:
    """Check and time each kernel of `kernels`, tuned before or by its first call here; ms by its name, if timed."""
    (M, K), N = a.shape, b.shape[1]
    variants = {"cuBLAS" if a.is_cuda else "torch": torch.matmul}
    variants |= {f"triton {name}": partial(_launch, kernel) for name, kernel in kernels.items()}
    work = Work(bytes=a.nbytes + b.nbytes + a.element_size() * M * N, flops=2 * M * N * K, dtype=h.half)
    case = f"{M}x{N}x{K} {str(h.half).removeprefix('torch.')}"
    table = h.compare(variants, reference, a, b, baseline=next(iter(variants)), work=work, case=case, terms=K)
    return {row.variant.removeprefix("triton "): row.ms for row in table.rows} if table else {}


def measure_searches(h: Harness, shapes: list[tuple[int, int, int]]) -> None:
    """Each space searched from a cache that knows only the fixed configuration, and what the result is worth."""
    with new_cache() as fixed_only:
        M, N, K = shapes[0]
        _launch(tuner([FIXED])(matmul_tuned_kernel.fn), h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half))
        with new_cache():  # for whatever else is compiled below
            for shape in shapes:
                measure_shape(h, fixed_only, *shape, extras=shape == shapes[-1])
            show_key(h, *shapes[0][1:])
            show_cost(h, fixed_only, *shapes[1])


def measure_shape(h: Harness, fixed_only: str, M: int, N: int, K: int, extras: bool) -> None:
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    kernels, costs = {"fixed": tuner([FIXED])(matmul_tuned_kernel.fn)}, {}
    for space in ("small space", "large space"):
        with new_cache(fixed_only), h.progress(f"tuning over the {space}, {M}x{N}x{K}"):
            kernels[space], costs[space] = tune(SPACES[space], a, b)
    h.fact(f"searches, {M}x{N}x{K}", costs)
    check_each(h, list(kernels["large space"].configs_timings), a, b)
    if extras:
        keyless = tuner(SMALL, key=("N", "K"), cache_results=False)(matmul_tuned_kernel.fn)
        _launch(keyless, a[:16], b)  # the first M decides for all
        kernels |= {"small space, key without M": keyless, "spilling": tuner([SPILLING])(matmul_tuned_kernel.fn)}
    ms = compare_spaces(h, a, b, kernels)
    for space, cost in costs.items():
        saved = (ms["fixed"] - ms[space]) / 1000
        h.say(
            f"{space}: {cost['seconds']:.1f} s to time {cost['timed']} of {len(SPACES[space])}; {cost['chosen']}: "
            f"{ms['fixed'] / ms[space]:.2f}x as fast as the fixed configuration, "
            + (f"paid for after {cost['seconds'] / saved:,.0f} calls" if saved > 0 else "never paid for")
        )
    if extras:
        wrong = ms["small space, key without M"] / ms["small space"]
        h.say(f"with a key without M, the configuration chosen for M=16 takes {wrong:.2f}x the time at M={M}")
        h.say(f"{label(SPILLING)}: {ms['spilling'] / ms['fixed']:.2f}x the time of twice the warps")


def demo(h: Harness) -> None:
    tile = numbers(_config(64, 32, 64, 4, 3))
    for M, N, K in [(1, 1, 1), (37, 53, 61), (65, 33, 129), (5, 7, 0)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        h.check(lambda a, b: matmul_config(a, b, *tile), reference, a, b, terms=K, what=f"matmul_config {M}x{N}x{K}")
    check_each(h, SMALL, h.randn(130, 70, dtype=h.half), h.randn(70, 260, dtype=h.half))
    show_pruning(h)

    shapes = h.pick(
        interpreted=[(16, 96, 128), (130, 70, 96)],
        quick=[(16, 4096, 4096), (512, 512, 4096), (2048, 4096, 4096)],
        full=[(16, 8192, 8192), (512, 512, 8192), (4096, 8192, 8192)],
    )
    if h.interpreted:
        h.say("the interpreter has no speed to search for: each space keeps its first configuration")
    if h.timing and not h.interpreted and not h.profile:
        measure_searches(h, shapes)
        return
    for M, N, K in shapes:  # a profiler is to see what was chosen, not the search
        kernels = {space: tuner(configs)(matmul_tuned_kernel.fn) for space, configs in SPACES.items()}
        compare_spaces(h, h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half), kernels)


if __name__ == "__main__":
    run(demo)
