"""Matrix multiplication: tiles on the tensor cores, an order that L2 likes, and a search over tile sizes.

Technique  One program computes one BLOCK_M x BLOCK_N tile of C. Per step of K it loads BLOCK_M + BLOCK_N values
           for 2 * BLOCK_M * BLOCK_N operations each, so larger tiles need less bandwidth, until registers or shared
           memory run out. Programs run roughly in order, so which tiles follow each other decides what is
           still in L2: GROUP_M rows of tiles at a time make a compact patch of C whose inputs are shared. Which tile is
           best depends on the GPU and the sizes; autotune times a few, after dropping those that cannot win.
Question   How close to cuBLAS does a page of Triton get, and what does the order of tiles matter?
Needs      triton
Shapes     a [M, K], b [K, N], any strides, any sizes (0 too) -> c [M, N], contiguous, dtype of a.
Dtypes     float16, bfloat16, float32, both the same; sums are float32. float32 inputs follow input_precision: "ieee"
           (the default here: float32 products on the CUDA cores), "tf32" or "tf32x3" (tensor cores). Triton's own
           default is tf32, which is why it is never left unsaid.
Errors     TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, an unknown
           input_precision or a group_m below 1; RuntimeError for a device without Triton or an input that requires
           grad.
Wins when  cuBLAS has no kernel for the shape or something is to be fused; on plain large squares it is about equal.
Source     chapter section "Tensor cores"; the grouped order as in Triton tutorial 03.
Run        python examples/triton/matmul.py
"""

from __future__ import annotations

from harness import Harness, Work, autotune_configs, device_limits, require_triton_device, run

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PRECISIONS = ("ieee", "tf32", "tf32x3")
GROUP_M = 8

# (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages). BLOCK_K is 128 bytes of a row, the widest swizzle of shared
# memory: 64 values of two bytes, 32 of four. The first is the best known on Hopper for large sizes; with float32
# products on the CUDA cores ("ieee") it would spill, so four-byte values stop at 128 x 128.
TILES = [
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 3),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (128, 128, 32, 8, 3),
    (64, 128, 32, 4, 3),
    (64, 64, 32, 4, 3),
]
CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in TILES
]


def fitting_configs(configs: list[triton.Config], named_args: dict, **kwargs) -> list[triton.Config]:
    """The configurations worth compiling for these arguments: they may fit shared memory and do not dwarf the problem.

    wgmma and tcgen05 keep num_stages buffers, mma.sync one fewer. The smaller count decides here; what then turns
    out not to fit, autotune itself leaves out.
    """
    a, M, N = named_args["a_ptr"], named_args["M"], named_args["N"]
    shared = device_limits(a.device).shared_bytes
    itemsize = a.element_size()

    def fits(config: triton.Config) -> bool:
        m, n, k = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        return (
            k * itemsize == 128
            and (m + n) * k * itemsize * (config.num_stages - 1) <= shared
            and m <= max(64, triton.next_power_of_2(M))
            and n <= max(64, triton.next_power_of_2(N))
        )

    return [config for config in configs if fits(config)]


@triton.autotune(
    configs=autotune_configs(CONFIGS),
    key=["M", "N", "K", "stride_ak", "stride_bk", "PRECISION"],
    prune_configs_by={"early_config_prune": fitting_configs},
    # In a CUDA graph: around one launch of a small kernel, events on a slow host time its Python and rank at random.
    do_bench=lambda fn, quantiles: triton.testing.do_bench_cudagraph(fn, rep=2, quantiles=quantiles),
)
@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0})
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    GROUP_M: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # Walk C in bands of GROUP_M rows of tiles, down each column of the band before the next one.
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    band = min(tiles_m - first_m, GROUP_M)  # the last band may be narrower
    pid_m = first_m + pid % (GROUP_M * tiles_n) % band
    pid_n = pid % (GROUP_M * tiles_n) // band

    # Rows and columns past the edge wrap around: they load something valid, and the store drops what it makes.
    rows = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    cols = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    inner = tl.arange(0, BLOCK_K)
    # int64 once, before the loop: a matrix may have more than 2**31 elements.
    a_ptrs = a_ptr + rows[:, None].to(tl.int64) * stride_am + inner[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + inner[:, None].to(tl.int64) * stride_bk + cols[None, :].to(tl.int64) * stride_bn
    step_a, step_b = BLOCK_K * tl.cast(stride_ak, tl.int64), BLOCK_K * tl.cast(stride_bk, tl.int64)

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:  # a mask costs a predicate per load; most sizes need none
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += step_a
        b_ptrs += step_b

    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :].to(tl.int64) * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def matmul(a: torch.Tensor, b: torch.Tensor, input_precision: str = "ieee", group_m: int = GROUP_M) -> torch.Tensor:
    """a @ b for two matrices; limits and errors are in the module docstring."""
    require_triton_device("matmul", a, b)
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise TypeError(f"matmul: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"matmul: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    if input_precision not in PRECISIONS:
        raise ValueError(f"matmul: input_precision {input_precision!r} is not one of {PRECISIONS}")
    if not isinstance(group_m, int) or not 1 <= group_m <= 1024:
        raise ValueError(f"matmul: group_m is {group_m!r}; it counts rows of tiles, an int from 1 to 1024")
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:

        def grid(meta: dict) -> tuple[int]:
            # From the configuration that runs: a grid fixed for one tile size computes part of C with another.
            return (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)

        matmul_kernel[grid](
            a, b, c, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
            GROUP_M=group_m, PRECISION=input_precision,
        )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def demo(h: Harness) -> None:
    # One element, primes, one tile plus one in each dimension, nothing to sum over.
    for M, N, K in [(1, 1, 1), (37, 53, 61), (129, 257, 65), (5, 7, 0)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        h.check(matmul, reference, a, b, terms=K, what=f"matmul {M}x{N}x{K}")
    transposed, strided = h.randn(96, 80, dtype=h.half).t(), h.randn(96, 200, dtype=h.half)[:, ::2]
    h.check(matmul, reference, transposed, strided, terms=96, what="matmul of a transposed and a strided matrix")

    find = {80: ("cp.async", "mma.sync"), 90: ("cp.async", "wgmma"), 100: ("cp.async", "tcgen05.mma")}
    h.codegen(matmul, h.meta(4096, 4096), h.meta(4096, 4096), find=find | {120: ("cp.async", "mma.sync")})

    for n in h.pick(interpreted=(192,), quick=(2048,), full=(2048, 4096, 8192, 16384)):
        n = h.fit(n, bytes_each=60 * n)
        a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
        variants = {
            "cuBLAS" if a.is_cuda else "torch": torch.matmul,
            "triton grouped": matmul,  # first: the tile is tuned for it, and the other order runs that tile
            "triton row by row": lambda a, b: matmul(a, b, group_m=1),
        }
        work = Work(bytes=3 * a.nbytes, flops=2 * n**3, dtype=h.half)
        case = f"{n}x{n}x{n} {str(h.half).removeprefix('torch.')}"
        table = h.compare(variants, reference, a, b, baseline=next(iter(variants)), work=work, case=case, terms=n)
        if table and table.rows[-1].ms:
            _, grouped, ungrouped = table.rows
            l2 = torch.cuda.get_device_properties(a.device).L2_cache_size
            h.say(
                f"bands of {GROUP_M} tiles against row by row: {ungrouped.ms / grouped.ms:.2f}x; "
                f"a row of tiles reads all of B, {b.nbytes / 2**20:.0f} MiB, and L2 holds {l2 / 2**20:.0f}"
            )
            h.say(f"tile: {matmul_kernel.best_config}")


if __name__ == "__main__":
    run(demo)
