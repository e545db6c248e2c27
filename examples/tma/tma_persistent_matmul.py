"""Persistent TMA matmul: descriptors made once, each tile stored under the next one's products, tiles taken in bands.

Technique  One program per SM, operands and result by TMA, one pipeline through all of its tiles: persistent_matmul.py
           has those steps. What is left to get right, each alone:
           descriptors  the 128 bytes that tell TMA where a matrix lies. Host: made for each call, or once for tensors
                        that stay (prepare_matmul, which keeps the compiled kernel too). Device: by each program before
                        its loop, or, the mistake, in the loop over tiles.
           schedules    when a tile is stored. tile: one program per tile, whose store takes the shared memory that its
                        operands had. pair: the same with tiles of half the size, two programs on an SM: one can
                        multiply while the other starts or stores. whole, split: between two tiles of a persistent
                        program; loads run on, the tensor cores wait. The store needs shared memory of its own: half a
                        tile at a time takes half, which pays for a fourth stage. late: a finished tile is rounded to
                        16 bits, which halves its registers, and the next one starts; in each of its first four steps a
                        quarter of the old tile is stored, while the tensor cores multiply.
           bands        tiles are taken in bands of GROUP_M rows: what the programs load together should fit L2.
           layouts      b row-major, or the transpose of a row-major [N, K]: what nn.Linear has.
           The rule, plan(): the smallest tiles of which one wave covers c, so that the most SMs work: tile with 128x64
           and six stages, or with 128x128 and five; then pair, but 128x256 where that is one wave too and K is long.
           What needs more waves takes 128x256, and late on Hopper if a tile has more steps than parts to store, else
           split. All of this was found on an H200. Blackwell does not need late: its accumulators lie in tensor memory
           (blackwell.py).
Question   What does a persistent kernel still lose around its tiles, and who pays for the descriptors?
Needs      triton, sm_90
Shapes     a [M, K] with contiguous rows, b [K, N] with contiguous rows or columns, K and N multiples of 8, any M (0
           too) -> c [M, N], contiguous.
Dtypes     float16, bfloat16, both the same; sums are float32.
Errors     TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, a layout TMA cannot
           load (one dimension contiguous, other strides and the start multiples of 16 bytes), a schedule, band or place
           of descriptors that does not exist, late elsewhere or with too short a K, an out of another kind or over the
           memory of a or b; RuntimeError for a device without Triton or with too little shared memory for any tile, or
           an input that requires grad.
Wins when  there are several tiles per SM, and K is long enough to hide the store of the tile before. Calls shorter
           than their launch gain most from being prepared.
Source     chapter section "TMA"; tile order as in Triton tutorial 03, the flattened loop as in tutorial 09.
Run        python examples/tma/tma_persistent_matmul.py
"""

from __future__ import annotations

import contextvars
import functools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from harness import (
    Harness,
    Work,
    device_limits,
    interpreted,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16)
# BLOCK_M, BLOCK_N, BLOCK_K, warps, and the fewest stages with which it is taken. The first that fits shared memory is,
# with as many stages as do, up to MOST_STAGES (or the fewest, where those are more).
TILES = [(128, 256, 64, 8, 3), (128, 128, 64, 8, 2)]
MOST_STAGES = 4
PAIR = (128, 128, 64, 4, 2)
# What the rule takes where one wave covers c, the smallest first. A program alone on its SM has only its own stages to
# hide the latency of loads, so it gets more. An SM multiplies as much with a pair as with one of the first TILES: the
# pair starts sooner, the one loads less. In a sweep on an H200 the pair was ahead with K of 512, level with 2048 and
# behind with 8192. Nobody has measured this on another GPU.
ONE_WAVE = [("tile", (128, 64, 64, 4, 6)), ("tile", (128, 128, 64, 4, 5)), ("pair", PAIR)]
PAIR_K = 1024
RESERVED = 1024  # bytes of an SM's shared memory that CUDA takes for each program on it
PARTS = {"tile": 1, "pair": 1, "whole": 1, "split": 2, "late": 4}  # of a tile's columns, stored one after another
SCHEDULES = tuple(PARTS)
PER_SM = {name: 2 if name == "pair" else 1 for name in SCHEDULES}  # programs that share an SM
DESCRIPTORS = ("host", "program", "tile")  # made by the host, by each program once, by each program for each tile
# GROUP_M, the rows of tiles in a band, of each schedule: the best of a sweep over SQUARES and LAYERS on an H200.
BANDS = {"tile": 8, "pair": 8, "whole": 16, "split": 8, "late": 8}


@triton.jit
def _tile_of(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Rows and columns at which a tile starts, in bands of GROUP_M rows of tiles."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    band = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % (GROUP_M * tiles_n) % band
    tile_n = tile % (GROUP_M * tiles_n) // band
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def _multiply(a_desc, b_desc, row, col, k, acc, B_COLUMNS: tl.constexpr):
    """acc and one step of K. With B_COLUMNS memory holds b's transpose: the tensor cores read either from shared."""
    if B_COLUMNS:
        return tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T, acc)
    else:
        return tl.dot(a_desc.load([row, k]), b_desc.load([k, col]), acc)


@triton.jit
def _store_part(c_desc, x, row, col, part, PARTS: tl.constexpr):
    """Store one of PARTS parts of x's columns; which one may be known only when it runs."""
    if PARTS > 1:
        rows: tl.constexpr = x.shape[0]
        width: tl.constexpr = x.shape[1] // 2
        left, right = x.reshape(rows, 2, width).permute(0, 2, 1).split()
        if part < PARTS // 2:
            _store_part(c_desc, left, row, col, part, PARTS // 2)
        else:
            _store_part(c_desc, right, row, col + width, part - PARTS // 2, PARTS // 2)
    else:
        c_desc.store([row, col], x.to(c_desc.dtype))


@triton.jit
def matmul_tile_kernel(
    a_desc, b_desc, c_desc, M, N, K, B_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, col = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        acc = _multiply(a_desc, b_desc, row, col, k, acc, B_COLUMNS)
    c_desc.store([row, col], acc.to(c_desc.dtype))


@triton.jit
def matmul_flattened_kernel(
    a, b, c, M, N, K, stride_a, stride_b, stride_c, DESCRIPTORS: tl.constexpr, B_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """a, b and c are descriptors, or pointers where the device makes them."""
    rows_b, cols_b = (N, K) if B_COLUMNS else (K, N)
    BLOCK_B0: tl.constexpr = BLOCK_N if B_COLUMNS else BLOCK_K
    BLOCK_B1: tl.constexpr = BLOCK_K if B_COLUMNS else BLOCK_N
    if DESCRIPTORS == "program":
        a = tl.make_tensor_descriptor(a, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
        b = tl.make_tensor_descriptor(b, [rows_b, cols_b], [stride_b, 1], [BLOCK_B0, BLOCK_B1])
        c = tl.make_tensor_descriptor(c, [M, N], [stride_c, 1], [BLOCK_M, BLOCK_N // PARTS])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, col = _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        a_desc, b_desc, c_desc = a, b, c
        if DESCRIPTORS == "tile":
            a_desc = tl.make_tensor_descriptor(a, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
            b_desc = tl.make_tensor_descriptor(b, [rows_b, cols_b], [stride_b, 1], [BLOCK_B0, BLOCK_B1])
            c_desc = tl.make_tensor_descriptor(c, [M, N], [stride_c, 1], [BLOCK_M, BLOCK_N // PARTS])
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            acc = _multiply(a_desc, b_desc, row, col, k, acc, B_COLUMNS)
        for part in tl.static_range(PARTS):
            _store_part(c_desc, acc, row, col, part, PARTS)


@triton.jit
def matmul_late_kernel(
    a_desc, b_desc, c_desc, M, N, K, B_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)  # more than PARTS, or the last part would never be stored
    own = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    tile = tl.program_id(0) - tl.num_programs(0)
    step = -1
    row, col = 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Before the first tile has been summed, "the tile before" lies below the matrix, where TMA stores nothing. (Above
    # would not do: on an H200 a store to a negative row ends as an illegal instruction.)
    done = tl.zeros((BLOCK_M, BLOCK_N), dtype=c_desc.dtype)
    done_row, done_col = M, 0
    # The two loops written as one: flatten=True would put what is done last beside the stores, and hold it twice.
    for _ in tl.range(0, own * steps, num_stages=STAGES):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += tl.num_programs(0)
            row, col = _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = _multiply(a_desc, b_desc, row, col, step * BLOCK_K, acc, B_COLUMNS)
        if step == steps - 1:
            done = acc.to(c_desc.dtype)  # the only thing for which the tensor cores wait
            done_row, done_col = row, col
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        elif step < PARTS:
            _store_part(c_desc, done, done_row, done_col, step, PARTS)
    for part in tl.static_range(PARTS):
        _store_part(c_desc, done, done_row, done_col, part, PARTS)


class Plan(NamedTuple):
    schedule: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    band: int
    programs: int


def shared_bytes(block_m: int, block_n: int, block_k: int, itemsize: int, stages: int, schedule: str) -> int:
    """Bytes a program holds: `stages` steps of a and b, the part of c that is stored at a time, a few barriers."""
    operands, stored = stages * (block_m + block_n) * block_k, block_m * block_n // PARTS[schedule]
    return itemsize * (max(operands, stored) if schedule in ("tile", "pair") else operands + stored) + 256


def on_hopper() -> bool:
    """Whether the tensor cores run beside their warps and yet sum in registers."""
    return interpreted() or triton.runtime.driver.active.get_current_target().arch == 90


def plan(M: int, N: int, K: int, device: torch.device, schedule: str | None = None, band: int | None = None) -> Plan:
    """The rule of the module docstring for 16-bit operands, with the first tile and then the most stages that fit."""
    sms, limit = device_limits(device)

    def tiles_of(tile: tuple[int, ...]) -> int:
        return triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])

    candidates = [("pair", PAIR)] if schedule == "pair" else []
    if schedule is None:
        candidates += [(name, tile) for name, tile in ONE_WAVE if tiles_of(tile) <= PER_SM[name] * sms]
        if K > PAIR_K and tiles_of(TILES[0]) <= sms:
            candidates = [(name, tile) for name, tile in candidates if name != "pair"]
    for tile in TILES if schedule != "pair" else ():
        late = tiles_of(tile) > sms and triton.cdiv(K, tile[2]) > PARTS["late"] and on_hopper()
        candidates.append((schedule or ("late" if late else "split"), tile))
    for chosen, tile in candidates:
        *sizes, warps, fewest = tile
        for stages in range(max(MOST_STAGES, fewest), fewest - 1, -1):
            if PER_SM[chosen] * (shared_bytes(*sizes, 2, stages, chosen) + RESERVED) <= limit + RESERVED:
                programs = tiles_of(tile) if chosen in ("tile", "pair") else min(tiles_of(tile), sms)
                return Plan(chosen, *sizes, warps, stages, band or BANDS[chosen], programs)
    raise RuntimeError(f"matmul_tma_persistent: no tile fits the {limit} bytes of shared memory of {device}")


class _Call(NamedTuple):
    """One launch, after all checks; kernel is None where there is nothing to sum or nothing to write."""

    kernel: Callable | None
    programs: int
    arguments: tuple
    options: dict
    c: torch.Tensor

    def __call__(self) -> torch.Tensor:
        if self.kernel is None:
            return self.c.zero_()
        self.kernel[(self.programs,)](*self.arguments, **self.options)
        return self.c


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the memory of two tensors, from the first to the last element of each, has bytes in common."""

    def ends(t: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    if x.device.type == "meta" or not (x.numel() and y.numel()):
        return False
    (x_first, x_end), (y_first, y_end) = ends(x), ends(y)
    return x_first < y_end and y_first < x_end


def _call(name, a, b, out, schedule, band, descriptors="host") -> _Call:
    require_triton_device(name, a, b, *([] if out is None else [out]))
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise TypeError(f"{name}: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    if schedule is not None and (not isinstance(schedule, str) or schedule not in SCHEDULES):
        raise ValueError(f"{name}: schedule {schedule!r} is not one of {SCHEDULES}, nor None for the rule")
    if band is not None and (type(band) is not int or not 1 <= band <= 4096):  # times tiles_n in int32
        raise ValueError(f"{name}: band is {band!r}; take 1 to 4096 rows of tiles, or None for the rule")
    if not isinstance(descriptors, str) or descriptors not in DESCRIPTORS:
        raise ValueError(f"{name}: descriptors {descriptors!r} is not one of {DESCRIPTORS}")
    if descriptors != "host" and schedule not in ("whole", "split"):
        raise ValueError(f"{name}: descriptors={descriptors!r} needs schedule 'whole' or 'split', not {schedule!r}")
    (M, K), N = a.shape, b.shape[1]
    if K % 8 or N % 8:
        raise ValueError(f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples: pad both to multiples of 8")
    columns = b.stride(1) != 1 and b.stride(0) == 1
    stored = b.t() if columns else b  # as it lies in memory
    require_tma_layout(name, a=a, **{"b.t()" if columns else "b": stored})
    if out is None:
        c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    elif out.dtype != a.dtype or out.shape != (M, N) or not out.is_contiguous():
        raise ValueError(
            f"{name}: out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; need {a.dtype} {(M, N)}, "
            f"contiguous: a.new_empty({M}, {N})"
        )
    else:
        require_tma_layout(name, out=out)
        for label, x in (("a", a), ("b", b)):
            if _overlap(out, x):
                raise ValueError(f"{name}: out lies over {label}, which is still read then: pass memory of its own")
        c = out
    if not (M and N and K):
        return _Call(None, 0, (), {}, c)

    p = plan(M, N, K, a.device, schedule, band)
    least = PARTS["late"] * p.block_k
    if p.schedule == "late" and (least >= K or not on_hopper()):
        raise ValueError(f"{name}: schedule 'late' needs K above {least}, got {K}, and an sm_90; take 'split'")
    options = {
        "B_COLUMNS": columns, "BLOCK_M": p.block_m, "BLOCK_N": p.block_n, "BLOCK_K": p.block_k, "GROUP_M": p.band,
        "STAGES": p.stages, "num_warps": p.warps,
    }  # fmt: skip
    described = (
        tma_descriptor(a, [p.block_m, p.block_k]),
        tma_descriptor(stored, [p.block_n, p.block_k] if columns else [p.block_k, p.block_n]),
        tma_descriptor(c, [p.block_m, p.block_n // PARTS[p.schedule]]),
    )
    if p.schedule in ("tile", "pair"):
        return _Call(matmul_tile_kernel, p.programs, (*described, M, N, K), options, c)
    options["PARTS"] = PARTS[p.schedule]
    if p.schedule == "late":
        return _Call(matmul_late_kernel, p.programs, (*described, M, N, K), options, c)
    options["DESCRIPTORS"] = descriptors
    strides = [each.strides[0] for each in described]  # a multiple of 16 bytes also where there is but one row
    operands = described if descriptors == "host" else (a, stored, c)
    return _Call(matmul_flattened_kernel, p.programs, (*operands, M, N, K, *strides), options, c)


def matmul_tma_persistent(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    schedule: str | None = None,
    band: int | None = None,
    descriptors: str = "host",
) -> torch.Tensor:
    """a @ b by the rule of plan(), or by one of SCHEDULES and a band; limits are in the module docstring.

    `descriptors` other than "host" are made by the kernel, for schedules whole and split.
    """
    call = _call("matmul_tma_persistent", a, b, out, schedule, band, descriptors)
    if descriptors == "host":
        return call()

    # A kernel that writes descriptors needs memory for them, from an allocator that is set for everybody: a copy of
    # the context keeps it to this call.
    def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=a.device)

    def with_scratch() -> torch.Tensor:
        triton.set_allocator(scratch)
        return call()

    return contextvars.copy_context().run(with_scratch)


def prepare_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    schedule: str | None = None,
    band: int | None = None,
) -> Callable[[], torch.Tensor]:
    """What computes a @ b into `out` each time it is called, from what a and b then hold; it keeps all three alive.

    Checks, descriptors, the choice of a plan and of the compiled kernel happen here, once. A cache by data_ptr would
    have to keep every output it has seen, or describe memory that has since gone to another tensor.
    """
    call = _call("prepare_matmul", a, b, out, schedule, band)
    if call.kernel is None or interpreted():
        return call
    compiled = call.kernel.warmup(*call.arguments, grid=(call.programs,), **call.options)
    names = call.kernel.arg_names
    given = dict(zip(names, call.arguments, strict=False)) | call.options
    arguments = [given[name] for name in names]  # a compiled kernel takes them all, in the order of its signature
    launch = compiled[(call.programs, 1, 1)]

    def again() -> torch.Tensor:
        launch(*arguments)
        return call.c

    return again


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


SQUARES = [(n, n, n) for n in (2048, 4096, 8192, 16384)]
FEW_TILES = [(1024, 1024, 1024), (2560, 1664, 4096)]  # on 132 SMs: a quarter of a wave of the first TILES, and 1.06
LAYERS = [(4096, 14336, 4096), (4096, 4096, 14336), (2048, 28672, 8192), (8192, 28672, 8192)]
SMALL = [(257, 264, 264)]  # more tiles than the interpreter has SMs, tails everywhere, more steps than parts


def sizes(h: Harness, quick: list, full: list) -> list[tuple[int, int, int]]:
    """What to time; where nothing is timed, the case that finds errors soonest."""
    return h.pick(interpreted=SMALL, quick=quick, full=full) if h.timing or h.profile else SMALL


def runnable(h: Harness) -> tuple[str, ...]:
    """The schedules that this GPU has: late is Hopper's, and pair needs room for two programs on an SM."""

    def runs(schedule: str) -> bool:
        try:
            plan(1, 8, 8, h.device, schedule)
        except RuntimeError:
            return False
        return schedule != "late" or on_hopper()

    return tuple(filter(runs, SCHEDULES))


def compare(h: Harness, M: int, N: int, K: int, ours: dict[str, Callable], case="", columns=False, **options):
    """The table of cuBLAS and of `ours`, each a function of a and b; None where nothing was timed."""
    a = h.randn(M, K, dtype=h.half)
    b = h.randn(N, K, dtype=h.half).t() if columns else h.randn(K, N, dtype=h.half)
    library = "cuBLAS" if a.is_cuda else "torch"
    work = Work(bytes=2 * (M * K + K * N + M * N), flops=2 * M * N * K, dtype=h.half)
    case = " ".join(filter(None, (f"{M}x{N}x{K}", str(h.half).removeprefix("torch."), case)))
    variants = {library: torch.matmul} | {f"triton {name}": fn for name, fn in ours.items()}
    table = h.compare(variants, reference, a, b, baseline=library, work=work, case=case, terms=K, **options)
    return table if table and table.rows[-1].ms else None


def prepared(schedule: str) -> Callable:
    """A function of a and b that prepares at its first call, for the buffers of a model, which stay."""
    call = None

    def matmul_prepared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal call
        call = call or prepare_matmul(a, b, a.new_full((a.shape[0], b.shape[1]), math.nan), schedule)
        return call()

    return matmul_prepared


def compare_descriptors(h: Harness, M: int, N: int, K: int, whole_calls: bool) -> None:
    """One kernel, its descriptors made in four places: what the GPU takes, or what a caller in a loop waits for."""
    places = {"host, each call": "host", "program, once": "program", "program, each tile": "tile"}
    ours = {
        name: functools.partial(matmul_tma_persistent, schedule="split", descriptors=where)
        for name, where in places.items()
    }
    ours["host, prepared"] = prepared("split")
    case = "whole calls" if whole_calls else "descriptors"
    if table := compare(h, M, N, K, ours, case, whole_calls=whole_calls):
        rows = {row.variant.removeprefix("triton "): row for row in table.rows}
        if whole_calls:
            host = {
                name: {"host": round(row.enqueue_us, 1), "call": round(1000 * row.ms, 1)} for name, row in rows.items()
            }
            h.table(f"microseconds of the host, and of a call in a loop, {M}x{N}x{K}", host)
            return
        p = plan(M, N, K, h.device, "split")
        waves = triton.cdiv(triton.cdiv(M, p.block_m) * triton.cdiv(N, p.block_n), p.programs)
        once, each = (1000 * (rows[name].ms - rows["host, each call"].ms) for name in list(places)[1:])
        h.say(
            f"on the GPU, against descriptors of the host: made by each program {once:+.2f} us, "
            f"made for each tile {each:+.2f} us over {waves} tiles one after another"
        )


def say_what_was_taken(h: Harness, M: int, N: int, K: int) -> None:
    p = plan(M, N, K, h.device)
    tiles, places = triton.cdiv(M, p.block_m) * triton.cdiv(N, p.block_n), PER_SM[p.schedule] * h.machine.sms
    h.say(
        f"the rule took {p.schedule}, {p.stages} stages, in bands of {p.band}: "
        f"{tiles} tiles of {p.block_m}x{p.block_n} at {places} places are "
        f"{tiles / places:.2f} waves, paid as {triton.cdiv(tiles, places)}"
    )


def compare_few_tiles(h: Harness, M: int, N: int, K: int) -> None:
    """Where the first of TILES would leave most SMs idle, for all of the time or in its second wave."""
    ours = {"by rule": matmul_tma_persistent, "split": functools.partial(matmul_tma_persistent, schedule="split")}
    if compare(h, M, N, K, ours, "few tiles"):
        say_what_was_taken(h, M, N, K)


def compare_schedules(h: Harness, M: int, N: int, K: int) -> dict[str, float]:
    """How many times as fast as cuBLAS the rule is, and each schedule."""
    ours = {name: functools.partial(matmul_tma_persistent, schedule=name) for name in runnable(h)}
    if not (table := compare(h, M, N, K, {"by rule": matmul_tma_persistent} | ours)):
        return {}
    us, lengths = {row.variant.removeprefix("triton "): 1000 * row.ms for row in table.rows}, {}
    for name in ("by rule", *ours):
        p = plan(M, N, K, h.device, None if name == "by rule" else name)
        tiles, places = triton.cdiv(M, p.block_m) * triton.cdiv(N, p.block_n), PER_SM[p.schedule] * h.machine.sms
        lengths[name] = us[name] / triton.cdiv(tiles, places)
    say_what_was_taken(h, M, N, K)
    h.say("us of a wave: " + ", ".join(f"{name} {length:.2f}" for name, length in lengths.items()))
    return {row.variant: row.speedup for row in table.rows[1:]}


def record(h: Harness, what: str, found: list[dict[str, float]]) -> None:
    """Geometric mean and least of each variant over all cases."""
    if found and all(found):
        columns = {name: [case[name] for case in found] for name in found[0]}
        mean = {name: round(statistics.geometric_mean(x), 4) for name, x in columns.items()}
        h.fact(f"geometric mean over cuBLAS{what}", mean)
        h.fact(f"least over cuBLAS{what}", {name: round(min(x), 4) for name, x in columns.items()})


def show_code(h: Harness, n: int = 8192) -> None:
    x, tma = h.meta(n, n), ("cp.async.bulk.tensor", "mbarrier")
    # Without TMA descriptor loads become ordinary ones: it compiles for sm_80 and sm_89, and shows what is not there.
    find = {80: (), 89: (), 90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")}
    h.codegen(matmul_tma_persistent, x, x, find=find)
    held = {}
    for schedule in SCHEDULES:
        for kernel in h.codegen(matmul_tma_persistent, x, x.t(), schedule=schedule, find={90: find[90]}):
            held[schedule] = f"{kernel.registers} registers, {kernel.shared / 1024:.0f} KiB"
    for where in DESCRIPTORS[1:]:
        h.codegen(matmul_tma_persistent, x, x, schedule="split", descriptors=where, find={90: find[90]})
    if held:
        h.say("on sm_90, a thread and a program: " + "; ".join(f"{name} {what}" for name, what in held.items()))


def demo(h: Harness) -> None:
    # One row; tails in each dimension and more tiles than SMs (the interpreter plays a GPU of four); nothing to sum.
    for M, N, K in [(1, 8, 8), *SMALL, (5, 16, 0)]:
        a, w = h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half)
        for layout, b in (("b", w.t().contiguous()), ("b.t()", w.t())):
            for schedule in (None, *runnable(h)) if K > 256 else (None,):
                fn = functools.partial(matmul_tma_persistent, schedule=schedule)
                what = f"matmul_tma_persistent {schedule or 'by rule'} {M}x{N}x{K} {layout}"
                h.check(fn, reference, a, b, terms=K, what=what)

    show_code(h)

    for M, N, K in sizes(h, quick=SQUARES[:1], full=SQUARES[:2]):
        compare_descriptors(h, M, N, K, whole_calls=False)
    for M, N, K in sizes(h, quick=SQUARES[:1], full=SQUARES[:1]):
        compare_descriptors(h, M, N, K, whole_calls=True)

    record(h, "", [compare_schedules(h, *case) for case in sizes(h, quick=SQUARES[:2], full=SQUARES + LAYERS)])

    for case in sizes(h, quick=[], full=FEW_TILES):
        compare_few_tiles(h, *case)

    for M, N, K in sizes(h, quick=SQUARES[1:2], full=[SQUARES[3], LAYERS[0]]):
        bands = {f"band {rows}": functools.partial(matmul_tma_persistent, band=rows) for rows in (1, 4, 8, 16, 32)}
        if table := compare(h, M, N, K, bands, "bands"):
            best = max(table.rows[1:], key=lambda row: row.speedup)
            h.say(f"fastest: {best.variant}; the rule takes {plan(M, N, K, h.device).band}")

    transposed = []
    for case in sizes(h, quick=SQUARES[1:2], full=[*SQUARES[1:3], *LAYERS[:2]]):
        if table := compare(h, *case, {"by rule": matmul_tma_persistent}, "b.t()", columns=True):
            transposed.append({row.variant: row.speedup for row in table.rows[1:]})
    record(h, ", b.t()", transposed)


if __name__ == "__main__":
    run(demo)
