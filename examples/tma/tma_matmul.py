"""TMA matmul, one change at a time: pointer loads, TMA loads, a TMA store, the store in parts; what each is worth.

Technique  The same program for the same tile: TILE of c, BLOCK_K deep, the same stages and warps, one program for each
           tile in the same order. Each step changes one thing and keeps the others:
           pointers  tl.load: all threads copy to shared memory, 16 bytes at a time (cp.async), and advance a pointer
                     for each of those copies; what lies past an edge is masked or loaded twice;
           loads     descriptor.load: one thread asks TMA for each box of 128 bytes a row; an mbarrier counts bytes;
           store     descriptor.store: the tile of c goes to shared memory, and TMA writes it out from there. It takes
                     the memory that a and b had, which the loop has left;
           parts     the same in PARTS parts, one after the other, through less shared memory: of use to a persistent
                     kernel, whose store has memory of its own. Here it has that of a and b.
           A claim such as "TMA is 20 to 30 % faster" often compares another tile or number of stages, too.
Question   How much faster is a matmul by TMA, with nothing else changed?
Needs      triton, sm_90
Shapes     a [M, K], b [K, N], both with contiguous rows, K and N multiples of 8, any M (0 too) -> c [M, N], contiguous.
Dtypes     float16, bfloat16, both the same; sums are float32.
Errors     TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, a layout TMA cannot
           load (last dimension contiguous, other strides and the start multiples of 16 bytes), a step or block_n that
           does not exist, stages that do not fit; RuntimeError for a device without Triton or an input that requires
           grad.
Wins when  threads have more to do than to copy, or registers are short: the gain comes from what they need not do. It
           grows where pointers need masks, and in the steps that build on it (tma_persistent_matmul.py).
Source     chapter section "TMA", which claims 20 to 30 %; the tile order as in Triton tutorial 03.
Run        python examples/tma/tma_matmul.py
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
from collections import Counter

from harness import (
    Harness,
    Work,
    device_limits,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)
from harness.codegen import dump

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16)
BLOCK_M, BLOCK_NS, BLOCK_K, WARPS = 128, (256, 128), 64, 8
STAGES = (4, 3)  # most first: the most that shared memory holds
GROUP_M = 8
PARTS = 2
STEPS = ("pointers", "loads", "store", "parts")
CLAIM = (1.20, 1.30)  # the chapter's, for loads by TMA


@triton.jit
def _tile_of(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Rows and columns at which a tile starts, in bands of GROUP_M rows of tiles, so that L2 serves most loads."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    band = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % (GROUP_M * tiles_n) % band
    tile_n = tile % (GROUP_M * tiles_n) // band
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def _store_by_tma(c_desc, x, row, col, PARTS: tl.constexpr):
    if PARTS > 1:
        rows: tl.constexpr = x.shape[0]
        width: tl.constexpr = x.shape[1] // 2
        left, right = x.reshape(rows, 2, width).permute(0, 2, 1).split()
        _store_by_tma(c_desc, left, row, col, PARTS // 2)
        _store_by_tma(c_desc, right, row, col + width, PARTS // 2)
    else:
        c_desc.store([row, col], x.to(c_desc.dtype))


@triton.jit
def matmul_steps_kernel(
    a, b, c, M, N8, K8, stride_a8, stride_b8, stride_c8, TMA_LOADS: tl.constexpr, TMA_STORE: tl.constexpr,
    PARTS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """a and b are descriptors where TMA loads them, c where TMA stores it, and pointers elsewhere."""
    # N, K and the strides come in eights: so the compiler knows that 16 bytes at a time are aligned, and within one
    # mask. By itself it sees that only in multiples of 16 elements, and pointers would pay for it.
    N, K = N8 * 8, K8 * 8
    stride_a, stride_b = tl.cast(stride_a8, tl.int64) * 8, tl.cast(stride_b8, tl.int64) * 8
    stride_c = tl.cast(stride_c8, tl.int64) * 8
    row, col = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if TMA_LOADS:
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            acc = tl.dot(a.load([row, k]), b.load([k, col]), acc)
    else:
        # Rows and columns past the edge wrap around: they load something valid, and the store drops what it makes.
        rows = (row + tl.arange(0, BLOCK_M)) % M
        cols = (col + tl.arange(0, BLOCK_N)) % N
        inner = tl.arange(0, BLOCK_K)
        a_ptrs = a + rows[:, None] * stride_a + inner[None, :]
        b_ptrs = b + inner[:, None] * stride_b + cols[None, :]
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if EVEN_K:
                acc = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), acc)
            else:
                x = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
                y = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
                acc = tl.dot(x, y, acc)
            a_ptrs += BLOCK_K
            b_ptrs += BLOCK_K * stride_b
    if TMA_STORE:
        _store_by_tma(c, acc, row, col, PARTS)
    else:
        rows, cols = row + tl.arange(0, BLOCK_M)[:, None], col + tl.arange(0, BLOCK_N)[None, :]
        tl.store(c + rows * stride_c + cols, acc.to(c.dtype.element_ty), mask=(rows < M) & (cols < N))


def shared_bytes(block_n: int, stages: int) -> int:
    """Bytes a program may hold for values of two bytes: the tiles of a and b, a few barriers; c takes their place."""
    return 2 * max(stages * (BLOCK_M + block_n) * BLOCK_K, BLOCK_M * block_n) + 256


def fitting(device: torch.device, block_n: int | None = None, stages: int | None = None) -> tuple[int, int]:
    """The columns of a tile and the stages: those that are given, else the largest tile, then most stages, that fit."""
    limit = device_limits(device).shared_bytes
    for columns, count in itertools.product([block_n] if block_n else BLOCK_NS, [stages] if stages else STAGES):
        if shared_bytes(columns, count) <= limit:
            return columns, count
    raise ValueError(
        f"tma_matmul: block_n {block_n or BLOCK_NS} with stages {stages or STAGES} does not fit the {limit} bytes of "
        "shared memory that a program may have here; take less of either"
    )


def tma_matmul(
    a: torch.Tensor, b: torch.Tensor, step: str = "parts", block_n: int | None = None, stages: int | None = None
) -> torch.Tensor:
    """a @ b by one of STEPS, each one change from the one before; limits and errors are in the module docstring."""
    name = "tma_matmul"
    require_triton_device(name, a, b)
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise TypeError(f"{name}: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    if not isinstance(step, str) or step not in STEPS:
        raise ValueError(f"{name}: step {step!r} is not one of {STEPS}")
    if block_n is not None and (type(block_n) is not int or block_n not in BLOCK_NS):
        raise ValueError(f"{name}: block_n is {block_n!r}; take one of {BLOCK_NS}, or None for the largest that fits")
    if stages is not None and (type(stages) is not int or not 1 <= stages <= 8):
        raise ValueError(f"{name}: stages is {stages!r}; pass an int from 1 to 8, or None for the most that fit")
    (M, K), N = a.shape, b.shape[1]
    if K % 8 or N % 8:
        raise ValueError(f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples: pad both to multiples of 8")
    require_tma_layout(name, a=a, b=b)  # of pointers, too, which could load more: every step gets the same
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)  # nothing to sum, or nothing to write
    columns, stages = fitting(a.device, block_n, stages)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    loads, store, parts = step != "pointers", step in ("store", "parts"), PARTS if step == "parts" else 1
    described = (
        tma_descriptor(a, [BLOCK_M, BLOCK_K]), tma_descriptor(b, [BLOCK_K, columns]),
        tma_descriptor(c, [BLOCK_M, columns // parts]),
    )  # fmt: skip
    strides = [each.strides[0] // 8 for each in described]  # a multiple of 16 bytes also where there is but one row
    a_desc, b_desc, c_desc = described
    matmul_steps_kernel[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, columns),)](
        a_desc if loads else a, b_desc if loads else b, c_desc if store else c, M, N // 8, K // 8, *strides,
        TMA_LOADS=loads, TMA_STORE=store, PARTS=parts, EVEN_K=K % BLOCK_K == 0,
        BLOCK_M=BLOCK_M, BLOCK_N=columns, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, STAGES=stages, num_warps=WARPS,
    )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def each_step(
    a: torch.Tensor, b: torch.Tensor, block_n: int | None = None, stages: int | None = None
) -> tuple[torch.Tensor, ...]:
    """a @ b once by every step."""
    return tuple(tma_matmul(a, b, step, block_n, stages) for step in STEPS)


def references(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (reference(a, b),) * len(STEPS)


OPCODE = re.compile(r"^\S+\t(?:@!?\w+ )?([A-Z]\S*)")
LABEL = re.compile(r"^(\w+):$")
BRANCH = re.compile(r"\tBRA (?:\S+ )*?(\w+);?|@!?\w+ BRA (?:\S+ )*?(\w+);?")


def loop_of(sass: str, within: str = "HGMMA") -> Counter[str]:
    """How often each instruction is in the innermost loop that has `within`, by its name without modifiers."""
    lines = [line.strip() for line in sass.splitlines()]
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    loops = []
    for i, line in enumerate(lines):
        if (found := BRANCH.search(line)) and labels.get(found[1] or found[2], i) < i:
            body = lines[labels[found[1] or found[2]] : i + 1]
            names = Counter(op[1].rstrip(";").split(".")[0] for each in body if (op := OPCODE.match(each)))
            if names[within]:
                loops.append(names)
    return min(loops, key=Counter.total, default=Counter())


def programs_per_sm(registers: int, shared: int, shared_limit: int) -> int:
    """How many programs an SM holds: by shared memory, of which each loses 1 KiB, or by registers, given in eights."""
    return min((shared_limit + 1024) // (shared + 1024), 65536 // (triton.cdiv(registers, 8) * 8 * 32 * WARPS))


def show_code(h: Harness) -> None:
    """What each step is made of on sm_90: who copies, with how many instructions, and what it leaves of an SM."""
    x, tma = h.meta(4096, 4096), ("cp.async.bulk.tensor", "mbarrier")
    find = {80: (), 89: (), 90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")}
    h.codegen(tma_matmul, x, x, find=find)
    for block_n, stages in TILES:
        kernels = h.codegen(each_step, x, x, block_n, stages, find={90: ("cp.async", *tma, "wgmma", "st.global.v4")})
        rows = {}
        for step, kernel in zip(STEPS, kernels, strict=False):
            loop = loop_of(dump(tma_matmul, (x, x, step, block_n, stages), sm=90)["sass"])
            # A TMA copy stands once in the code. A warp for each box issues it, by one thread; a box of a swizzled tile
            # is 128 bytes wide: one for a, several for b.
            boxes = 2 * (BLOCK_K + block_n) // 128 if loop["UTMALDG"] else 0
            rows[step] = {
                "instructions of the loop": loop.total(),
                "copies that a program issues in it": 32 * WARPS * loop["LDGSTS"] + boxes,
                "barriers in it": loop["BAR"] + loop["SYNCS"],
                "registers": kernel.registers,
                "spilled bytes": kernel.spills,
                "shared bytes": kernel.shared,
                "programs on an SM": programs_per_sm(kernel.registers, kernel.shared, kernel.shared_limit),
            }
        if not rows:
            continue
        h.table(f"each step on sm_90, tile {BLOCK_M}x{block_n}x{BLOCK_K}, {stages} stages", rows)
        first, loads, store, parts = rows.values()
        changes = ", ".join(
            f"{name} {first[name]} -> {loads[name]}"
            for name in ("copies that a program issues in it", "instructions of the loop", "registers")
        )
        held = [row["programs on an SM"] for row in rows.values()]
        same = f"{held[0]} on an SM in each step" if len(set(held)) == 1 else f"on an SM by step: {held}"
        h.say(f"from pointers to TMA loads: {changes}; programs {same}")
        saved = store["shared bytes"] - parts["shared bytes"]
        why = "which pays for a stage" if saved else "as both fit the memory that the operands have left"
        h.say(f"the store in {PARTS} parts takes {saved} bytes of shared memory less than in one, {why}")


def gains(table) -> dict[str, float]:
    """Each step's speed as a multiple of the step before, both ratios of the same rounds."""
    speed = {row.variant.removeprefix("triton "): row.speedup for row in table.rows}
    return {after: round(speed[after] / speed[before], 4) for before, after in itertools.pairwise(STEPS)}


def judge_claim(ratios: list[float]) -> str:
    """What was measured for the loads, beside the claim."""
    least, most = CLAIM
    within = sum(least <= ratio <= most for ratio in ratios)
    below, above = sum(ratio < least for ratio in ratios), sum(ratio > most for ratio in ratios)
    return (
        f"loads by TMA: {min(ratios):.3f}x to {max(ratios):.3f}x the speed of pointers; of {len(ratios)} cases, "
        f"{within} are within the {least:.2f}x to {most:.2f}x that the chapter claims, {below} below, {above} above"
    )


SQUARES = [(4096, 4096, 4096), (8192, 8192, 8192)]
LAYER = (4096, 14336, 4096)
RAGGED = (4072, 4104, 4072)  # tails in each dimension: pointers load by masks
SMALL = (260, 264, 72)
# block_n and stages: what fills an SM of sm_90 with one program, and what leaves it room for two.
TILES = [(256, 4), (128, 3)]


def demo(h: Harness) -> None:
    # One row, tails in each dimension, nothing to sum.
    for M, N, K in [(1, 8, 8), (129, 264, 72), (5, 16, 0)]:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        h.check(each_step, references, a, b, terms=K, what=f"each step {M}x{N}x{K}")

    show_code(h)

    small = h.interpreted or not (h.timing or h.profile)  # nothing to time
    wide, two = (None, None), TILES[1]  # the first is by rule: on sm_90 it is TILES[0]
    cases = h.pick(
        quick=[(SQUARES[0], wide)],
        full=[*((case, wide) for case in (*SQUARES, LAYER, RAGGED)), *((case, two) for case in SQUARES)],
    )
    found: dict[str, dict[str, float]] = {}
    over: dict[str, list[float]] = {}
    for (M, N, K), tile in [(SMALL, two)] if small else cases:
        a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
        columns, stages = fitting(h.device, *tile)
        variants = {"cuBLAS" if a.is_cuda else "torch": torch.matmul}
        variants |= {
            f"triton {step}": functools.partial(tma_matmul, step=step, block_n=columns, stages=stages) for step in STEPS
        }
        work = Work(bytes=2 * (M * K + K * N + M * N), flops=2 * M * N * K, dtype=h.half)
        case = f"{M}x{N}x{K} {str(h.half).removeprefix('torch.')}, tile {BLOCK_M}x{columns}x{BLOCK_K}, {stages} stages"
        table = h.compare(
            variants, reference, a, b, baseline=next(iter(variants)), work=work, case=case, terms=K,
            comparators=["triton pointers"],
        )  # fmt: skip
        if table and table.rows[-1].ms:
            found[case] = gains(table)
            if tile == wide and (M, N, K) != RAGGED:
                for row in table.rows[1:]:
                    over.setdefault(row.variant, []).append(row.speedup)
    if not found:
        return
    h.table("speed of each step over the one before", found)
    means = {name: round(statistics.geometric_mean(each), 4) for name, each in over.items()}
    h.fact("geometric mean over cuBLAS", means)
    even = {case: each for case, each in found.items() if not case.startswith("x".join(map(str, RAGGED)))}
    each = {step: round(statistics.geometric_mean(row[step] for row in even.values()), 4) for step in STEPS[1:]}
    h.fact("geometric mean of each step over the one before, whole tiles", each)
    h.say(judge_claim([row["loads"] for row in even.values()]))
    for case in found.keys() - even.keys():
        h.say(f"where pointers must mask, {case}: {found[case]['loads']:.3f}x")
    h.say(
        f"then the store {each['store']:.3f}x, its parts {each['parts']:.3f}x: what a persistent kernel is to build on"
    )


if __name__ == "__main__":
    run(demo)
