"""TMA copy: how many bytes must be on their way, and what each detour of a tile costs, through registers or none.

Technique  A copy computes nothing, so what is left is to keep memory busy: by Little's law, bytes on their way = rate x
           latency, some tens of KiB in each SM at all times. The forms are ways to have them, each a matrix in tiles:
           pointers      one program per tile; each thread loads 16 bytes at a time into registers and stores them;
           host          one program per tile, by TMA: load, wait, store. The compiler sees that the tile that was
                         loaded is the tile to store, so it never enters registers. The host made both descriptors;
           device        the same, but each program makes its descriptors itself (tl.make_tensor_descriptor), in
                         memory that an allocator must provide;
           walk          few programs, each walks over many tiles and waits for every one before it asks for the next;
           ahead         the same loop with num_stages: loads of tiles to come are on their way. The pipelined loop
                         moves each tile through registers into one more buffer, from which it is stored;
           ahead device  the same with descriptors made by each program, once, before its loop;
           ring          the loop in Gluon: TMA loads into a ring of buffers and TMA stores out of the same ones. One
                         warp issues all of it, and no value enters a register. So nobody minds banks: its buffers
                         lie unswizzled, and a row of a box may be longer than the 128 bytes of the widest swizzle.
           Edges take no code, while pointers need a mask, which keeps them from wide accesses where rows are no
           multiple of 16 bytes long. Loads end at the element: what lies outside arrives as zeros. Stores end at the
           row, but in it at the next multiple of 16 bytes: what the tile holds there is written, zeros in a copy. In
           memory of its own that is padding; an `out` whose rows end elsewhere is refused. The demo measures both
           ends; the interpreter, and Triton's code for GPUs without TMA, stop at the element.
Question   Is TMA slower than ordinary loads for a plain copy, why, and what makes it as fast as torch's?
Needs      triton, sm_90
Shapes     x [M, N], contiguous rows; for TMA, start and row stride multiples of 16 bytes -> y [M, N], rows apart by a
           multiple of 16 bytes. Any sizes (0 too) below 2**31 - 256.
Dtypes     float32, float16, bfloat16: the bits are moved as they are.
Errors     TypeError for another dtype; ValueError for rank, strides, sizes, a layout TMA cannot load, a form that does
           not exist, an out of another kind, in x's own memory or, for TMA, whose rows are no multiple of 16 bytes
           long; a tile, stages or programs that cannot be;
           RuntimeError for a device without Triton, an architecture without TMA, Gluon in the interpreter, an input
           that requires grad.
Wins when  the copy is part of something else. A copy alone is torch's: x.clone(). On ragged rows all are slower, but
           host, walk and ring lose less of their rate than pointers do.
Source     chapter section "TMA", whose claim is a faster copy; Little's law for memory as in vendor tuning guides;
           where a store ends: seen on an H200, and triton issue 11583.
Run        python examples/tma/tma_copy.py
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from harness import (
    Harness,
    Work,
    device_limits,
    gluon_descriptor,
    hardware,
    interpreted,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)
from harness.check import CheckError
from harness.codegen import compile_for, dump

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = 2**31 - 256  # coordinates are int32, and a tile may reach past the end


class Plan(NamedTuple):
    """Rows of a tile and bytes of each; warps; buffers of a program that walks, and how many such programs an SM gets.

    programs 0: one for each tile.
    """

    rows: int
    row_bytes: int
    warps: int
    stages: int
    programs: int


# The same tile in every form: 16 KiB in rows of 512 bytes, long stretches of memory, and of 16-bit values the most that
# a box may have in a row (256), which the ring asks for at once. One warp where each tile's program makes its
# descriptors: one makes them, and more would only wait.
PLANS = {
    "pointers": Plan(32, 512, 4, 1, 0),
    "host": Plan(32, 512, 4, 1, 0),
    "device": Plan(32, 512, 1, 1, 0),
    "walk": Plan(32, 512, 4, 1, 3),
    "ahead": Plan(32, 512, 4, 4, 3),
    "ahead device": Plan(32, 512, 4, 4, 3),
    "ring": Plan(32, 512, 1, 6, 2),
}
FORMS = tuple(PLANS)
TMA_FORMS = FORMS[1:]
THROUGH_REGISTERS = re.compile(r"\b(?:ld|st)\.shared\.v\d")  # of a tile; barriers are single words


@triton.jit
def _corner(tile, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    tiles_n = tl.cdiv(N, BLOCK_N)
    return tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N


@triton.jit
def copy_pointers_kernel(x_ptr, y_ptr, M, N, stride_x, stride_y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col = _corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    rows, cols = row + tl.arange(0, BLOCK_M)[:, None], col + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < M) & (cols < N)
    rows = rows.to(tl.int64)
    tl.store(y_ptr + rows * stride_y + cols, tl.load(x_ptr + rows * stride_x + cols, mask=inside), mask=inside)


@triton.jit
def copy_tile_kernel(
    x, y, M, N, stride_x, stride_y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEVICE: tl.constexpr
):  # fmt: skip
    """x and y are descriptors, or pointers where the device makes them."""
    x_desc, y_desc = x, y
    if DEVICE:
        x_desc = tl.make_tensor_descriptor(x, [M, N], [stride_x, 1], [BLOCK_M, BLOCK_N])
        y_desc = tl.make_tensor_descriptor(y, [M, N], [stride_y, 1], [BLOCK_M, BLOCK_N])
    row, col = _corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    y_desc.store([row, col], x_desc.load([row, col]))


@triton.jit
def copy_walk_kernel(
    x, y, M, N, stride_x, stride_y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEVICE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """x and y are descriptors, or pointers where the device makes them."""
    x_desc, y_desc = x, y
    if DEVICE:
        x_desc = tl.make_tensor_descriptor(x, [M, N], [stride_x, 1], [BLOCK_M, BLOCK_N])
        y_desc = tl.make_tensor_descriptor(y, [M, N], [stride_y, 1], [BLOCK_M, BLOCK_N])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row, col = _corner(tile, N, BLOCK_M, BLOCK_N)
        y_desc.store([row, col], x_desc.load([row, col]))


@gluon.jit
def _load_tile(x_desc, ring, full, slot, tile, tiles, tiles_n):
    """Start the load of a tile into a slot of the ring; past the last tile there is nothing to load or to wait for."""
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = x_desc.block_shape[1]
    wanted = tile < tiles
    ready = full.index(slot)
    mbarrier.expect(ready, x_desc.block_type.nbytes, pred=wanted)
    corner = [tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N]
    tma.async_copy_global_to_shared(x_desc, corner, ready, ring.index(slot), pred=wanted)


@gluon.jit
def copy_ring_kernel(x_desc, y_desc, M, N, STAGES: gl.constexpr, LAG: gl.constexpr):
    """A buffer is loaded again LAG turns after its store was issued: by then that store has read it."""
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = x_desc.block_shape[1]
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_N], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()  # TMA must see the barriers

    tiles_n = gl.cdiv(N, BLOCK_N)
    tiles = gl.cdiv(M, BLOCK_M) * tiles_n
    step = gl.num_programs(0)
    AHEAD: gl.constexpr = STAGES - LAG
    for i in gl.static_range(AHEAD):
        _load_tile(x_desc, ring, full, i, gl.program_id(0) + i * step, tiles, tiles_n)
    for turn in range(0, gl.cdiv(tiles - gl.program_id(0), step)):
        slot = turn % STAGES
        tile = gl.program_id(0) + turn * step
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        tma.async_copy_shared_to_global(y_desc, [tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N], ring.index(slot))
        tma.store_wait(LAG)  # all stores but the last LAG have read their buffers
        _load_tile(x_desc, ring, full, (turn + AHEAD) % STAGES, tile + AHEAD * step, tiles, tiles_n)
    tma.store_wait(0)  # shared memory must outlive the reads of the last stores


def lag(stages: int) -> int:
    """Turns that a store gets to read its buffer; the other buffers have loads on their way."""
    return 1 if stages > 2 else 0


def loads_under_way(form: str, plan: Plan) -> int:
    """Tiles that a program has asked for and not yet received, at most."""
    return plan.stages - lag(plan.stages) if form == "ring" else max(1, plan.stages - 1)


def has_tma(device: torch.device) -> bool:
    """True also in the interpreter, which plays TMA."""
    if hardware.OFFLINE_SM:
        return hardware.OFFLINE_SM >= 90
    return interpreted() or torch.cuda.get_device_capability(device) >= (9, 0)


def make_plan(form: str, rows: int | None, row_bytes: int | None, stages: int | None, programs: int | None) -> Plan:
    """The plan of a form with what is given instead; ValueError for what cannot be."""
    default = PLANS[form]
    given = {"rows": rows, "row_bytes": row_bytes, "stages": stages, "programs": programs}
    plan = default._replace(**{name: value for name, value in given.items() if value is not None})
    for name, least, most in (("rows", 8, 256), ("row_bytes", 32, 8192), ("stages", 1, 64), ("programs", 1, 32)):
        value = given[name]
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise ValueError(f"tma_copy: {name} is {value!r}; pass an int from {least} to {most}")
        if value is not None and name in ("rows", "row_bytes") and value & (value - 1):
            raise ValueError(f"tma_copy: {name} is {value}; pass a power of two")
    if form in ("pointers", "host", "device", "walk") and plan.stages != 1:
        raise ValueError(f"tma_copy: stages is {stages}, but form {form!r} has no loads ahead; use 'ahead' or 'ring'")
    if not default.programs and plan.programs:
        raise ValueError(f"tma_copy: programs is {programs}, but form {form!r} has one for each tile")
    return plan


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """Memory for a copy of x, its rows apart by a multiple of 16 bytes as a descriptor wants, in every form alike."""
    step = 16 // x.element_size()
    rows = torch.empty((x.shape[0], triton.cdiv(x.shape[1], step) * step), dtype=x.dtype, device=x.device)
    return rows[:, : x.shape[1]]


def _require_out(x: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype != x.dtype or out.shape != x.shape:
        raise ValueError(
            f"tma_copy: out is {out.dtype} {tuple(out.shape)}; x is {x.dtype} {tuple(x.shape)}, and out must be too"
        )
    if (out.shape[1] > 1 and out.stride(1) != 1) or (out.shape[0] > 1 and out.stride(0) < out.shape[1]):
        raise ValueError(f"tma_copy: out has strides {out.stride()}; its columns must be adjacent, its rows apart")
    if out.numel() and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        raise ValueError("tma_copy: out lies in the storage of x, and tiles are copied in no order; pass other memory")


def tma_copy(
    x: torch.Tensor,
    form: str | None = None,
    out: torch.Tensor | None = None,
    rows: int | None = None,
    row_bytes: int | None = None,
    stages: int | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """A copy of x by one of FORMS ("ring", or "ahead" where Gluon cannot run), into `out` if it is given.

    The rest replaces what PLANS has for that form.
    """
    require_triton_device("tma_copy", x, *([] if out is None else [out]))
    if x.dtype not in DTYPES:
        raise TypeError(f"tma_copy: dtype {x.dtype} is not one of {DTYPES}; view the bits as one of their size")
    if x.ndim != 2:
        raise ValueError(f"tma_copy: need a matrix [M, N], got shape {tuple(x.shape)}; call x.reshape first")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"tma_copy: strides {x.stride()}; the columns must be adjacent, call x.contiguous() first")
    if max(x.shape) >= LARGEST:
        raise ValueError(f"tma_copy: shape {tuple(x.shape)}; each size must be below {LARGEST}, split the matrix")
    if form is None:
        form = "ahead" if interpreted() else "ring"
    if not isinstance(form, str) or form not in FORMS:
        raise ValueError(f"tma_copy: form {form!r} is not one of {FORMS}, nor None for the default")
    plan = make_plan(form, rows, row_bytes, stages, programs)
    if out is not None:
        _require_out(x, out)
    if form != "pointers":
        require_tma_layout("tma_copy", x=x, **({} if out is None else {"out": out}))
        if out is not None and (length := out.shape[1] * out.element_size()) % 16:
            raise ValueError(
                f"tma_copy: rows of out are {length} bytes long, and a TMA store goes on to the next multiple of 16: "
                "it would write beside out; leave out, pass one in whole 16 bytes, or form='pointers'"
            )
    if form == "ring" and interpreted():
        raise RuntimeError("tma_copy: form 'ring' is Gluon, which has no interpreter; take 'ahead' here, or a GPU")
    if form == "ring" and not has_tma(x.device):
        sm = hardware.OFFLINE_SM or "{}{}".format(*torch.cuda.get_device_capability(x.device))
        raise RuntimeError(f"tma_copy: form 'ring' issues TMA itself, which comes with sm_90, and this is sm_{sm}")

    shared, limit = shared_bytes(plan), device_limits(x.device).shared_bytes
    if form != "pointers" and shared > limit:
        raise ValueError(
            f"tma_copy: {plan.stages} tiles of {plan.rows} rows x {plan.row_bytes} bytes take {shared} bytes of shared "
            f"memory, and a program may have {limit} here; pass fewer stages or smaller tiles"
        )
    y = rows_apart(x) if out is None else out
    if x.numel():
        _launch(x, y, form, plan)
    return y


def shared_bytes(plan: Plan) -> int:
    """Of a program: buffers and barriers."""
    return plan.stages * plan.rows * plan.row_bytes + 16 * plan.stages


def _ring_descriptor(x: torch.Tensor, block: list[int]):
    """Unswizzled: a swizzle spreads rows over the banks for threads that read columns, and here no thread reads.

    Without it a box is as wide as the tile, up to 256 elements; with it a tile would be asked for 128 bytes at a time.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * x.element_size(), rank=2)
    return dataclasses.replace(gluon_descriptor(x, block), layout=layout)


def _launch(x: torch.Tensor, y: torch.Tensor, form: str, plan: Plan) -> None:
    """The copy, without a check. By TMA it writes y's rows up to the next multiple of 16 bytes."""
    (M, N), warps = x.shape, plan.warps
    block = plan.rows, plan.row_bytes // x.element_size()
    grid = triton.cdiv(M, block[0]) * triton.cdiv(N, block[1])
    sms, limit = device_limits(x.device)
    if plan.programs:
        # Programs beyond what an SM holds would wait for others to end, with their share of the tiles.
        grid = min(grid, sms * max(1, min(plan.programs, (limit + 1024) // (shared_bytes(plan) + 1024))))
    if form == "pointers":
        copy_pointers_kernel[(grid,)](x, y, M, N, x.stride(0), y.stride(0), *block, num_warps=warps)
        return
    if form == "ring":
        x_desc, y_desc = (_ring_descriptor(each, list(block)) for each in (x, y))
        copy_ring_kernel[(grid,)](x_desc, y_desc, M, N, STAGES=plan.stages, LAG=lag(plan.stages), num_warps=warps)
        return

    described = tuple(tma_descriptor(each, list(block)) for each in (x, y))
    strides = [each.strides[0] for each in described]  # a multiple of 16 bytes also where there is but one row
    on_device = form in ("device", "ahead device")
    arguments = (*((x, y) if on_device else described), M, N, *strides, *block)

    def launch() -> None:
        if plan.programs:
            copy_walk_kernel[(grid,)](*arguments, DEVICE=on_device, STAGES=plan.stages, num_warps=warps)
        else:
            copy_tile_kernel[(grid,)](*arguments, DEVICE=on_device, num_warps=warps)

    if not on_device:
        launch()
        return

    # A kernel that writes descriptors needs memory for them, from an allocator that is set for everybody: a copy of
    # the context keeps it to this call.
    def with_allocator() -> None:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=x.device))
        launch()

    contextvars.copy_context().run(with_allocator)


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.double()


def torch_copy(x: torch.Tensor) -> torch.Tensor:
    return rows_apart(x).copy_(x)


def runnable() -> tuple[str, ...]:
    return tuple(form for form in FORMS if form != "ring" or not interpreted())


def padded(h: Harness, M: int, N: int, dtype: torch.dtype) -> torch.Tensor:
    """An M x N matrix whose rows are a multiple of 16 bytes apart, and its padding poison."""
    x = rows_apart(torch.empty(M, N, dtype=dtype, device=h.device))
    with_padding(x).fill_(float("nan"))
    return x.copy_(h.randn(M, N, dtype=dtype))


def with_padding(x: torch.Tensor) -> torch.Tensor:
    """All of the memory that rows_apart() has behind x."""
    step = 16 // x.element_size()
    return x.as_strided((x.shape[0], triton.cdiv(x.shape[1], step) * step), x.stride())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def up_to_16_bytes(x: torch.Tensor) -> int:
    """Elements between the rows of x and the next multiples of 16 bytes: what a TMA store may write outside."""
    return x.shape[0] * (-x.shape[1] % (16 // x.element_size()))


class Written(NamedTuple):
    """Elements that a copy wrote: of x, beside it up to the next multiple of 16 bytes of each row, anywhere else."""

    inside: int
    up_to_16_bytes: int
    elsewhere: int


def written(x: torch.Tensor, form: str, margin: int = 16, **options) -> Written:
    """What a copy into the middle of a larger, poisoned matrix writes, an output that tma_copy itself would refuse.

    x is read from the middle of another, of which nothing else may arrive. CheckError for a wrong element inside, for
    one written elsewhere, and for any outside that pointers wrote.
    """
    M, N = x.shape
    end = N + up_to_16_bytes(x[:1])
    whole = M + 2 * margin, end + 2 * margin
    around, canvas = torch.full(whole, 7.0, dtype=x.dtype, device=x.device), x.new_full(whole, float("nan"))
    middle = slice(margin, margin + M), slice(margin, margin + N)
    around[middle] = x
    before = bits(canvas).clone()
    if x.numel():
        plan = make_plan(form, **(dict.fromkeys(("rows", "row_bytes", "stages", "programs")) | options))
        _launch(around[middle], canvas[middle], form, plan)
    after, wanted = bits(canvas), bits(around)
    if not torch.equal(after[middle], wanted[middle]):
        raise CheckError(f"tma_copy {form}: {int((after[middle] != wanted[middle]).sum())} elements are not those of x")
    changed = after != before
    changed[middle] = False
    beside = int(changed[middle[0], margin + N : margin + end].sum())
    found = Written(x.numel(), beside, int(changed.sum()) - beside)
    if found.elsewhere or (form == "pointers" and beside):
        raise CheckError(f"tma_copy {form} wrote outside its output: {found}")
    return found


def copy_each(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A copy of x by every form that can run here."""
    return tuple(tma_copy(x, form) for form in runnable())


def references(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (reference(x),) * len(runnable())


def show_edges(h: Harness, x: torch.Tensor) -> None:
    """Where each form's stores end, within a larger matrix."""
    found = {form: written(x, form) for form in runnable()}
    size = "x".join(map(str, x.shape))
    h.table(f"elements written by a copy of {size}", {form: counts._asdict() for form, counts in found.items()})
    wide = [form for form, counts in found.items() if counts.up_to_16_bytes]
    h.say(
        f"outside a copy of {size}, {up_to_16_bytes(x)} elements lie between a row's end and the next multiple of 16 "
        f"bytes; forms that write there: {', '.join(wide) or 'none'}"
        + (" (the interpreter's stores end at the element, those of TMA need not)" if h.interpreted else "")
    )


def show_code(h: Harness) -> None:
    """Every form on sm_90: what a thread holds, and whether tiles go through it."""
    x, find = h.meta(16384, 16384, dtype=torch.float16), ("cp.async.bulk.tensor", "mbarrier")
    h.codegen(tma_copy, x, "ring", find={80: (), 89: (), 90: find, 100: find, 120: find})
    kernels = h.codegen(copy_each, x, find={90: (*find, "ld.global.v4")})
    if not kernels:
        return
    table = {}
    for form, kernel in zip(FORMS, kernels, strict=True):
        table[form] = {
            "registers": kernel.registers,
            "shared bytes": kernel.shared,
            "TMA instructions": kernel.found.get("cp.async.bulk.tensor", 0),
            "shared loads and stores": len(THROUGH_REGISTERS.findall(dump(tma_copy, (x, form), sm=90)["ptx"])),
        }
    h.table("each form on sm_90; a loop's instructions counted once", table)
    through = [form for form in TMA_FORMS if table[form]["shared loads and stores"]]
    h.say(
        f"TMA forms whose tiles pass through registers on their way: {', '.join(through) or 'none'}; "
        f"not: {', '.join(form for form in TMA_FORMS if form not in through)}"
    )


@functools.cache
def resources(form: str, sm: int, **options) -> tuple[int, int]:
    """Registers of a thread and bytes of shared memory of a program, as compiled for an architecture."""
    x = torch.empty(16384, 16384, dtype=torch.float16, device="meta")
    (kernel,) = compile_for(tma_copy, (x, form), options, sms=(sm,))
    return kernel.registers, kernel.shared


def on_an_sm(h: Harness, form: str, **options) -> tuple[int, int]:
    """How many programs of a form an SM of this GPU holds at a time, and the bytes of loads they have under way."""
    plan = make_plan(form, **(dict.fromkeys(("rows", "row_bytes", "stages", "programs")) | options))
    registers, shared = resources(form, h.machine.sm, **options)
    have = torch.cuda.get_device_properties(h.device)
    programs = min(
        32,
        have.max_threads_per_multi_processor // (32 * plan.warps),
        65536 // (triton.cdiv(registers, 8) * 8 * 32 * plan.warps),
        have.shared_memory_per_multiprocessor // (shared + 1024),
        plan.programs or 32,
    )
    return programs, programs * loads_under_way(form, plan) * plan.rows * plan.row_bytes


def explain(h: Harness, x: torch.Tensor, table) -> None:
    """How long a tile is in its program, and what that comes from."""
    rows = {row.variant.removeprefix("triton "): row for row in table.rows}
    life = {}
    for form in FORMS:
        plan, ms = PLANS[form], rows[form].ms
        tiles = triton.cdiv(x.shape[0], plan.rows) * triton.cdiv(x.shape[1] * x.element_size(), plan.row_bytes)
        held, loads = on_an_sm(h, form)
        life[form] = {
            "programs on an SM": held,
            "KiB of loads under way": loads >> 10,
            "TB/s": round(rows[form].tbps, 3),
            "ns of a program for a tile": round(1e6 * ms * held * h.machine.sms / tiles),
        }
    h.table(f"where the time of a tile goes, {table.case}", life)
    ns = {form: row["ns of a program for a tile"] for form, row in life.items()}
    best = max(TMA_FORMS, key=lambda form: rows[form].tbps)
    h.say(
        f"one program per tile: TMA at {rows['pointers'].ms / rows['host'].ms:.3f}x the speed of pointers; descriptors "
        f"made by each program cost {ns['device'] - ns['host']:+d} ns on {ns['host']}; made once for many tiles, "
        f"{rows['ahead'].ms / rows['ahead device'].ms:.3f}x the speed of the host's"
    )
    h.say(
        f"a walk with one load at a time waits {ns['walk']} ns for each tile: {rows['walk'].tbps:.2f} TB/s; loads "
        f"ahead {rows['ahead'].tbps:.2f}, without the way through registers {rows['ring'].tbps:.2f}"
    )
    h.say(
        f"best by TMA: {best}, {rows[best].of_ceiling:.3f} of the copy ceiling; pointers "
        f"{rows['pointers'].of_ceiling:.3f}, torch {rows['torch copy'].of_ceiling:.3f}"
    )


def show_tiles(h: Harness, x: torch.Tensor, shapes: list[tuple[int, int]]) -> None:
    """The same bytes in tiles of other shapes: what matters is how many adjacent bytes a row of them has."""
    names = {f"triton {form} {rows} x {width} B": (form, rows, width)
             for form in ("pointers", "host", "ring") if form in runnable() for rows, width in shapes}  # fmt: skip
    variants = {"torch copy": torch_copy} | {
        name: functools.partial(tma_copy, form=form, rows=rows, row_bytes=width)
        for name, (form, rows, width) in names.items()
    }
    table = compare(h, x, variants, " tile shapes")
    if table:
        rates = {row.variant: row.tbps for row in table.rows}
        grid: dict[str, dict] = {}
        for name, (form, rows, width) in names.items():
            grid.setdefault(form, {})[f"{rows} x {width} B"] = round(rates[name], 3)
        h.table(f"TB/s by rows x bytes of a tile, {table.case}", grid)
        for form, each in grid.items():
            h.say(f"{form}: best with {max(each, key=each.get)}, worst with {min(each, key=each.get)}: "
                  f"{max(each.values()) / min(each.values()):.2f}x")  # fmt: skip


def show_depth(h: Harness, x: torch.Tensor, depths: list[tuple[int, int]]) -> None:
    """The ring with more and more bytes under way: until memory is busy, the rate is those bytes over the latency."""
    if "ring" not in runnable():
        return
    names = {f"triton ring {stages} x {programs}": (stages, programs) for stages, programs in depths}
    variants = {"torch copy": torch_copy} | {
        name: functools.partial(tma_copy, form="ring", stages=stages, programs=programs)
        for name, (stages, programs) in names.items()
    }
    table = compare(h, x, variants, " bytes under way")
    if not table:
        return
    rates = {row.variant: row.tbps for row in table.rows}
    rows = {}
    for name, (stages, programs) in names.items():
        _, loads = on_an_sm(h, "ring", stages=stages, programs=programs)
        # The loads are half of the bytes that a copy moves.
        rows[f"{stages} buffers x {programs} programs"] = {
            "KiB of loads under way": loads >> 10,
            "TB/s": round(rates[name], 3),
            "ns a load takes": round(loads * h.machine.sms / (rates[name] / 2) / 1e3),
        }
    h.table(f"bytes under way in an SM and what they give, {table.case}", rows)
    most = max(row["TB/s"] for row in rows.values())
    ordered = sorted(rows.values(), key=lambda row: row["KiB of loads under way"])
    enough = next(row for row in ordered if row["TB/s"] > 0.97 * most)
    shortest = min(row["ns a load takes"] for row in ordered)
    h.say(
        f"{ordered[0]['KiB of loads under way']} KiB under way give {ordered[0]['TB/s']:.2f} TB/s, "
        f"{enough['KiB of loads under way']} KiB are within 3 % of the most, {most:.2f}; with the shortest wait here, "
        f"{shortest} ns, Little's law asks for {most / 2 * 1e3 * shortest / h.machine.sms / 1024:.0f} KiB"
    )


def compare(h: Harness, x: torch.Tensor, variants: dict[str, Callable], case: str = ""):
    """The table, or None where nothing was timed."""
    case = f"{x.shape[0]}x{x.shape[1]} {str(x.dtype).removeprefix('torch.')}{case}"
    work = Work(bytes=2 * x.nbytes)
    pointers = [name for name in variants if name.startswith("triton pointers")]
    table = h.compare(
        variants, reference, x, baseline="torch copy", work=work, case=case, terms=0, comparators=pointers
    )  # fmt: skip
    return table if table and table.rows[-1].ms else None


def demo(h: Harness) -> None:
    dtype = torch.float16
    for M, N in [(0, 8), (1, 1), (3, 781), (65, 129), (129, 640)]:
        h.check(copy_each, references, padded(h, M, N, dtype), terms=0)
    if not h.profile:
        show_edges(h, h.randn(101, 203, dtype=dtype))

    show_code(h)

    small = h.interpreted or not (h.timing or h.profile)  # nothing to time
    cases = h.pick(quick=[(4096, 4096)], full=[(16384, 16384), (4096, 4096), (16381, 16371)])
    shares = {}
    for M, N in [(133, 261)] if small else cases:
        M = h.fit(M, bytes_each=30 * N)
        x = padded(h, M, N, dtype)
        variants = {"torch copy": torch_copy} | {
            f"triton {form}": functools.partial(tma_copy, form=form) for form in runnable()
        }
        if x.shape != with_padding(x).shape:  # whoever owns the padding may copy it, too: one stretch of memory
            variants["torch copy, padding too"] = lambda x: with_padding(x).clone()[:, : x.shape[1]]
        if table := compare(h, x, variants):
            explain(h, x, table)
            shares[table.case] = {row.variant: round(row.of_ceiling, 4) for row in table.rows}
    if shares:
        h.table("of the copy ceiling", shares)
        best = {case: max(each[f"triton {form}"] for form in TMA_FORMS) for case, each in shares.items()}
        h.fact("best TMA form of the copy ceiling", best)

    n = 128 if small else h.pick(quick=4096, full=16384)
    x = padded(h, h.fit(n, bytes_each=30 * n), n, dtype)
    show_tiles(h, x, [(128, 128), (64, 256), (32, 512), (16, 1024), (8, 2048), (32, 256), (128, 256)])
    show_depth(h, x, [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 2), (6, 2), (3, 4), (12, 1)])


if __name__ == "__main__":
    run(demo)
