"""matmul, measured: how many rows of tiles a group should have, and at which shapes cuBLAS wins.

The search runs for each width of a group; among tiles that are about as fast it picks now one, now another. Row by row,
132 programs of 128 x 128 are one row of tiles of a 16384-wide C, so each 128 rows of A read all of B again: 69 GB in
all, 14 ms of an H200's 4.8 TB/s, beside 13 ms of MMAs. Tiles of 128 x 256 read half of that, which the MMAs hide.
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Table, Work

import torch

from examples.triton.matmul import GROUP_M, matmul, reference, tuned_kernel


def study(h: Harness) -> None:
    widths = {f"{width} row{'s' * (width > 1)}": partial(matmul, group_m=width) for width in (GROUP_M, 1, 2, 4, 16, 64)}
    for n in h.pick(interpreted=(192,), quick=(4096,), full=(4096, 8192, 16384)):
        n = h.fit(n, bytes_each=60 * n)
        if table := compare(h, widths, n, n, n, "groups"):
            ours = sorted((row for row in table.rows if row.ours), key=lambda row: row.speedup)
            worst, best = ours[0].variant, ours[-1].variant
            h.say(f"{n}: groups of {best} are fastest, {table.over(worst, best):.2f}x as fast as of {worst}")

    shapes = h.pick(
        interpreted=[(16, 96, 80), (65, 95, 33)],
        quick=[(16, 4096, 4096), (2047, 2047, 2047)],
        full=[(1, 8192, 8192), (16, 8192, 8192), (256, 8192, 8192), (4095, 4095, 4095), (8192, 8192, 128)],
    )
    lost = []
    for shape in shapes:
        table = compare(h, {"triton": matmul}, *shape, "few rows, odd sizes, short K")
        if table and table.over("cuBLAS") < 0.95:
            config = tuned_kernel.best_config
            tile = "x".join(map(str, config.kwargs.values()))
            how = f"a tile of {tile}, {config.num_warps} warps, {config.num_stages} stages"
            lost.append(f"{table.case} ({table.over('cuBLAS'):.2f}x with {how})")
    if lost:
        h.say(f"cuBLAS is faster by more than 5% at MxNxK of {', '.join(lost)}")


def compare(h: Harness, variants: dict, M: int, N: int, K: int, title: str) -> Table:
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    variants = {"torch" if h.interpreted else "cuBLAS": torch.matmul, **variants}
    work = Work(bytes=a.nbytes + b.nbytes + a.element_size() * M * N, flops=2 * M * N * K, dtype=h.half)
    return h.compare(variants, reference, a, b, baseline=next(iter(variants)), work=work, title=title,
                     case=f"{M}x{N}x{K}", terms=K)  # fmt: skip
