"""matmul, measured: how many rows of tiles a group should have, which tiles the search chose, and where cuBLAS wins."""

from __future__ import annotations

from functools import partial

from harness import Harness, Table, Work

import torch

from examples.triton.matmul import GROUP_M, matmul, reference, tuned_kernel


def study(h: Harness) -> None:
    tiles: dict[str, str] = {}
    widths = {f"{width} rows": partial(matmul, group_m=width) for width in (GROUP_M, 1, 2, 4, 16, 64)}
    sizes = [h.fit(n, bytes_each=60 * n) for n in h.pick(interpreted=(192,), quick=(4096,), full=(4096, 8192, 16384))]
    for n in sizes:
        table = compare(h, widths, n, n, n, "groups", tiles)
        if table:
            worst = max((row for row in table.rows if row.ours), key=lambda row: row.ms).variant
            h.say(f"{n}: groups of {table.best.variant} are fastest, {table.over(worst):.2f}x as fast as {worst}")
    if h.device.type == "cuda":
        l2 = torch.cuda.get_device_properties(h.device).L2_cache_size
        rows = {f"a row of tiles reads of B at {n}": 2 * n * n >> 20 for n in sizes}
        h.fact("MiB", rows | {"L2 holds": l2 >> 20})

    shapes = h.pick(
        interpreted=[(16, 96, 80), (65, 95, 33)],
        quick=[(16, 4096, 4096), (2047, 2047, 2047)],
        full=[(1, 8192, 8192), (16, 8192, 8192), (256, 8192, 8192), (4095, 4095, 4095), (8192, 8192, 128)],
    )
    tables = {shape: compare(h, {"triton": matmul}, *shape, "few rows, odd sizes, short K", tiles) for shape in shapes}
    if all(tables.values()):
        lost = [f"{'x'.join(map(str, shape))} ({table.over('cuBLAS'):.2f}x)" for shape, table in tables.items()
                if table.over("cuBLAS") < 0.95]  # fmt: skip
        h.say(f"cuBLAS is faster by more than 5% at MxNxK of {', '.join(lost) or 'none of these'}")
    h.fact("tile that the search chose", tiles)


def compare(h: Harness, variants: dict, M: int, N: int, K: int, title: str, tiles: dict[str, str]) -> Table:
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    library = "torch" if h.interpreted else "cuBLAS"
    work = Work(bytes=a.nbytes + b.nbytes + a.element_size() * M * N, flops=2 * M * N * K, dtype=h.half)
    table = h.compare(
        {library: torch.matmul, **variants}, reference, a, b, baseline=library, work=work,
        title=title, case=f"{M}x{N}x{K}", terms=K,
    )  # fmt: skip
    config = tuned_kernel.best_config  # tuned for the first of the variants
    tile = "x".join(map(str, config.kwargs.values()))
    tiles[f"{M}x{N}x{K}"] = f"{tile}, {config.num_warps} warps, {config.num_stages} stages"
    return table
