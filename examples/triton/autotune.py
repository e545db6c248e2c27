"""Autotuning: what a search over configurations buys, what it costs, and what its key must name.

A configuration is a tile, a number of warps and a number of stages. Which one is fastest depends on the sizes: a GEMM
is 2 M N K FLOPs on 2 (M K + K N + M N) bytes in bf16. With thousands of rows it is compute-bound, and a 128 x 256 tile,
85 FLOPs for each byte loaded, is right; with sixteen rows it is memory-bound, and tiles that wide are too few to keep
all SMs loading. @triton.autotune times its candidates in the first call with a new key, which pays for the search.

A key that names too little runs one size with the tile of another. One that names too much searches again and again, so
ours names M rounded up to a power of two. The search is cheap because of what it leaves out (autotune_pruned.py), and
its results are kept on disk, so that the next process neither compiles nor times.

Question   What does a search over configurations buy, when has it paid for itself, and what must its key name?
Needs      triton
Wins when  shapes differ and each runs many times. Where one fixed tile is already right, a search buys nothing. Nor can
           it find what no candidate does: none splits K, and at 512 x 512 with a long K cuBLAS is ahead.
Variants   autotune_pruned.py (which of 192 configurations are worth timing)
Study      studies/triton/autotune.py
Source     chapter section "Autotuning", whose key, n_elements, starts a search for every new length; triton.autotune,
           triton.AsyncCompileMode
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Timing, Work, run

import torch
import triton
import triton.language as tl

from examples.common.device import autotune_configs
from examples.common.operands import check_gemm, short_of_k
from examples.common.pointers import load_tiles, store_tile, tile_pointers
from examples.common.tiles import tile_coords
from examples.common.untraced import untraced
from examples.triton.autotune_pruned import LARGE, configuration, numbers, usable_config, worth_timing

DTYPES = (torch.float16, torch.bfloat16)
FIXED = configuration(128, 256, 64, 8, 3)  # what matmul.py finds best for large squares on Hopper
KEY = ("M_BUCKET", "N", "K")  # and the dtypes, which Triton adds by itself


# M_BUCKET is in the key but not used in the kernel: with M itself in the key every new batch size would be tuned, and
# with neither one size would decide for all.
@triton.jit(do_not_specialize=["M_BUCKET"])
def matmul_tuned_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, M_BUCKET, stride_am, stride_bk, stride_cm,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, col = tile_coords(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    a_ptrs, b_ptrs, step_a, step_b = tile_pointers(
        a_ptr, b_ptr, row, col, M, N, stride_am, 1, stride_bk, 1, BLOCK_M, BLOCK_N, BLOCK_K
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a, b = load_tiles(a_ptrs, b_ptrs, K - k, EVEN_K)
        acc = tl.dot(a, b, acc)
        a_ptrs += step_a
        b_ptrs += step_b
    store_tile(c_ptr, acc, row, col, M, N, stride_cm, 1)


def time_config(fn, quantiles):
    """Triton's do_bench, in a CUDA graph: on a slow host, events around one launch of a small kernel would time Python.

    A graph repeats with its inputs in L2, if they fit; where yours come from memory, pass tuner() another do_bench.
    """
    return triton.testing.do_bench_cudagraph(fn, rep=2, quantiles=quantiles)


def tuner(configs: list, key: tuple = KEY, cache_results: bool = True, do_bench=time_config):
    """The kernel with a search over `configs`.

    cache_results keeps timings in Triton's cache directory, under the kernel's source, the key, the candidates and
    the architecture. It does not name the GPU: an H100 would take an H200's answer, so copy no cache between them.
    """
    return triton.autotune(
        configs=autotune_configs(configs), key=list(key), do_bench=do_bench, cache_results=cache_results,
        prune_configs_by={"early_config_prune": partial(worth_timing, matmul_tuned_kernel)},
    )(matmul_tuned_kernel)  # fmt: skip


tuned_kernel = tuner(LARGE)


def launch(kernel, a: torch.Tensor, b: torch.Tensor, **config) -> torch.Tensor:
    """kernel(a, b): a tuner, or the plain kernel with its `config`."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if c.numel():

        def grid(meta: dict) -> tuple[int]:
            # From the configuration that runs: a grid fixed for one tile size computes part of C with another.
            return (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)

        bucket, strides = max(16, triton.next_power_of_2(M)), (a.stride(0), b.stride(0), c.stride(0))
        kernel[grid](a, b, c, M, N, K, bucket, *strides, EVEN_K=K % 128 == 0, **config)
    return c


def check_input(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    check_gemm(name, a, b, DTYPES)
    if any(x.stride(1) != 1 and x.shape[1] > 1 for x in (a, b)):
        raise ValueError(f"{name}: strides {a.stride()} and {b.stride()}, but rows must be contiguous; "
                         "call .contiguous() first")  # fmt: skip


@untraced  # the search compiles in threads
def matmul_tuned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b for a [M, K] and b [K, N] with contiguous rows, any sizes (0 too): c [M, N], contiguous, in the dtype of a.

    Both are float16 or bfloat16; the accumulator is float32. The first call per key searches LARGE for the fastest
    configuration. Raises TypeError for another dtype or two dtypes; ValueError for rank, inner sizes, two devices or
    rows that are not contiguous; RuntimeError for a device without Triton or an input that requires grad.
    """
    check_input("matmul_tuned", a, b)
    return launch(tuned_kernel, a, b)


def matmul_config(
    a: torch.Tensor, b: torch.Tensor, block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int
) -> torch.Tensor:
    """matmul_tuned in one configuration of LARGE, without a search. ValueError for one that is unknown or too large."""
    check_input("matmul_config", a, b)
    config = usable_config("matmul_config", (block_m, block_n, block_k, num_warps, num_stages), a)
    # Not config.all_kwargs(), whose num_ctas torch.compile does not take.
    return launch(matmul_tuned_kernel, a, b, num_warps=config.num_warps, num_stages=config.num_stages, **config.kwargs)


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def matmul_fixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return matmul_config(a, b, *numbers(FIXED))


def demo(h: Harness) -> None:
    small = partial(matmul_config, block_m=64, block_n=32, block_k=64, num_warps=4, num_stages=3)
    for M, N, K in [(1, 1, 1), (37, 53, 61), (65, 33, 129), (5, 7, 0)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        h.check(small, reference, a, b, terms=K, what=f"matmul_config {M}x{N}x{K}")

    shapes = h.pick(
        interpreted=[(16, 96, 128), (130, 70, 96)],
        quick=[(16, 4096, 4096), (512, 512, 4096), (2048, 4096, 4096)],
        full=[(16, 8192, 8192), (512, 512, 8192), (4096, 8192, 8192)],
    )
    library, tables = "torch" if h.interpreted else "cuBLAS", {}
    for M, N, K in shapes:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        variants = {library: torch.matmul, "triton fixed": matmul_fixed, "triton tuned": matmul_tuned}
        getattr(matmul_tuned_kernel, "device_caches", {}).clear()  # kernels in memory: each search compiles its own
        if shapes[-1] == (M, N, K):
            without_m = tuner(LARGE, key=("N", "K"), cache_results=False)
            launch(without_m, a[:16], b)  # the first M decides for all
            variants["triton tuned at 16 rows"] = partial(launch, without_m)
        work = Work(bytes=a.nbytes + b.nbytes + a.element_size() * M * N, flops=2 * M * N * K, dtype=h.half)
        case, cold = f"{M}x{N}x{K} {str(h.half).removeprefix('torch.')}", Timing(cold=True)  # first calls compile
        tables[M] = h.compare(
            variants, reference, a, b, baseline=library, work=work, case=case, timing=cold, terms=K,
            wrong=short_of_k(reference), default="triton tuned",
        )  # fmt: skip
    h.answer(lambda: answer(tables))


def answer(tables: dict) -> str:
    found = []
    for M, table in tables.items():
        gain, fixed, tuned = table.over("triton fixed", "triton tuned"), table["triton fixed"], table["triton tuned"]
        calls = tuned.first_call_s * 1000 / (fixed.ms - tuned.ms) if gain > 1.02 else None
        found.append(f"{gain:.2f}x at {M}{' rows' * (not found)} ({f'{calls:,.0f}' if calls else 'never'})")
    loss = table.over("triton tuned at 16 rows", "triton tuned")
    key = f"takes {loss:.2f}x the time" if loss > 1.02 else "loses nothing"
    longest = max(each["triton tuned"].first_call_s for each in tables.values())
    return (
        f"Speed over a fixed tile (calls until a search, up to {longest:.1f} s on this host, has paid): "
        f"{', '.join(found)}. Tuned at 16 rows, a key without M {key} at {M}."
    )


if __name__ == "__main__":
    run(demo)
