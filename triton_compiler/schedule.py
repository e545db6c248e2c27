"""Scheduling: the order of a kernel's loops, which of them run as one, and how large a tile each program computes.

Loops are ordered so that the innermost walks memory with stride 1 for most of the bytes that move, and neighbours are
collapsed into one where every access allows it: what is contiguous everywhere becomes a single flat loop. Then

    flat   no reduction: a program computes XBLOCK consecutive elements
    tile   no reduction, and two loops each have stride 1 in much of the memory (a transpose): YBLOCK x XBLOCK
    rows   reductions: a program computes XBLOCK rows; a row is in registers where it fits (persistent), else walked in
           steps of RBLOCK, once for each reduction that needs the result of another

Sizes come from a few rules, without autotuning: enough programs to fill the GPU, 16 bytes or more for each thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch.utils._sympy.functions import FloorDiv

from triton_compiler.device import INTERPRETED
from triton_compiler.fusion import Access, Kernel
from triton_compiler.ir import Affine, Dim, Size, exact_quotient, product, size_of

PERSISTENT = 16384  # elements of a row that a program holds in registers
PERSISTENT_COLUMNS = 64  # of a column, when neighbours in memory belong to other rows
WIDE_GPU = 264  # programs that fill a GPU twice (132 SMs)
INTERPRETED_TILE = 1 << 16  # in the interpreter a program costs the same whatever its tile


@dataclass
class Loop:
    """Loops of the layout that run as one: `inner` is the innermost of them, whose stride is this loop's."""

    name: str
    size: Size
    inner: Dim
    dims: list[Dim]


@dataclass
class Plan:
    """How a kernel is run. `spaces`: for x, y, r and w the loops that are numbered there, outermost first."""

    kind: str
    spaces: dict[str, list[Loop]]
    blocks: dict[str, int]
    warps: int
    persistent: bool = True
    extents: list[Size] = field(default_factory=list)  # elements spanned, to choose between 32- and 64-bit indices

    @property
    def numel(self) -> dict[str, Size]:
        return {space: size_of_all(loops) for space, loops in self.spaces.items()}

    @property
    def grid(self) -> tuple[Size, Size]:
        """(programs along axis 0, along axis 1), as expressions."""
        x, *y = [ceil_div(self.numel[each], self.blocks[each]) for each in ("yx" if self.kind == "tile" else "x")]
        return x, y[0] if y else 1


def size_of_all(loops: list[Loop]) -> Size:
    return product(loop.size for loop in loops)


def ceil_div(size: Size, by: int) -> Size:
    return -(-size // by) if isinstance(size, int) else FloorDiv(size + by - 1, by)


def next_power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def accesses_of(kernel: Kernel) -> list[Access]:
    """All reads, and a write for each stored root; those of a scatter are recorded with the reads."""
    places = {root: kernel.layout.places[root] for root in kernel.stored}
    writes = [Access(root, root.address(at), True) for root, at in places.items() if at is not None]
    return kernel.layout.recorder.accesses + writes


def weigh(access: Access, hint) -> int:
    """Bytes that are touched, at most those of the tensor."""
    return hint(product(dim.size for dim, _ in access.offset.terms)) * access.node.dtype.itemsize


def schedule(kernel: Kernel, hint: Callable[[Size], int]) -> Plan:
    """The plan of a kernel whose roots are laid out; `hint` makes a number of a dynamic size."""
    layout, accesses = kernel.layout, accesses_of(kernel)
    affines = [access.offset for access in accesses] + layout.recorder.indices
    ranked = [(weigh(access, hint), access) for access in accesses]
    ranked.sort(key=lambda each: (-each[0], not each[1].write))
    named = {"x": layout.rows, "r": layout.columns, "w": layout.walk}
    rows, columns, walk = (collapse(order(dims, ranked), affines, name) for name, dims in named.items())
    if walk:
        rblock = next_power(size_of_all(columns))
        spaces = {"x": rows, "w": walk, "r": columns}
        plan = Plan("rows", spaces, {"x": 1, "r": rblock}, max(1, min(16, rblock // 512)))
    else:
        plan = rows_plan(rows, columns, ranked, hint) if columns else flat_plan(rows, ranked, hint)
    plan.extents = [*(span(access.offset) for access in accesses), product(dim.size for dim in layout.dims)]
    return plan


def span(index: Affine) -> Size:
    """The largest value of an index."""
    return index.offset + sum((abs(c) if isinstance(c, int) else c) * (dim.size - 1) for dim, c in index.terms)


# ---------------------------------------------------------------------------------------------- loops
Ranked = list[tuple[int, Access]]  # accesses and the bytes of each, those with most bytes first


def order(dims: list[Dim], ranked: Ranked) -> list[Dim]:
    """Outermost first: by descending stride in the access with most bytes that tells two loops apart."""
    result: list[Dim] = []
    for dim in dims:
        at = len(result)
        while at and precedes(dim, result[at - 1], ranked):
            at -= 1
        result.insert(at, dim)
    return result


def precedes(a: Dim, b: Dim, ranked: Ranked) -> bool:
    for _, access in ranked:
        stride_a, stride_b = access.offset.coefficient(a), access.offset.coefficient(b)
        if stride_a == 0 or stride_b == 0 or stride_a == stride_b:
            continue
        if not (isinstance(stride_a, int) and isinstance(stride_b, int)):  # the one that is a multiple is outer
            return exact_quotient(stride_a, stride_b) is not None
        if abs(stride_a) != abs(stride_b):
            return abs(stride_a) > abs(stride_b)
    return False


def collapse(dims: list[Dim], affines: list[Affine], name: str) -> list[Loop]:
    loops: list[Loop] = []
    for dim in dims:
        last = loops[-1] if loops else None
        if last and all(each.coefficient(last.inner) == each.coefficient(dim) * dim.size for each in affines):
            loops[-1] = Loop(last.name, size_of(last.size * dim.size), dim, [*last.dims, dim])
        else:
            loops.append(Loop(f"{name}{len(loops)}", dim.size, dim, [dim]))
    return loops


def contiguous_bytes(loop: Loop, ranked: Ranked) -> int:
    return sum(moved for moved, access in ranked if access.offset.coefficient(loop.inner) == 1)


# ---------------------------------------------------------------------------------------------- tiles
def flat_plan(loops: list[Loop], ranked: Ranked, hint) -> Plan:
    total = hint(size_of_all(loops))
    if INTERPRETED:
        return Plan("flat", {"x": loops}, {"x": min(next_power(total), INTERPRETED_TILE)}, 4)
    *outer, last = loops or [None]
    if outer and hint(last.size) >= 16:
        across = [each for each in ranked if each[1].offset.coefficient(last.inner) not in (0, 1)]
        long = [loop for loop in outer if hint(loop.size) >= 16]
        best = max(long, key=lambda loop: contiguous_bytes(loop, across), default=None)
        if best and contiguous_bytes(best, across) * 8 >= sum(moved for moved, _ in ranked):
            rest = [loop for loop in outer if loop is not best] + [best]
            y = [replace(loop, name=f"y{i}") for i, loop in enumerate(rest)]
            side = 64 if total >= 1 << 22 and min(hint(last.size), hint(best.size)) >= 64 else 32
            if hint(last.size) // side < 60000:
                spaces = {"x": [replace(last, name="x0")], "y": y}
                return Plan("tile", spaces, {"x": side, "y": side}, 8 if side == 64 else 4)
    block = max(128, min(1024, next_power(total // WIDE_GPU)))
    return Plan("flat", {"x": loops}, {"x": block}, max(1, min(4, block // 128)))


def rows_plan(rows: list[Loop], columns: list[Loop], ranked: Ranked, hint) -> Plan:
    many = size_of_all(columns)
    n, r = hint(size_of_all(rows)), hint(many)
    along, across = (sum(contiguous_bytes(loop, ranked) for loop in loops[-1:]) for loops in (columns, rows))
    inner = INTERPRETED or along >= across
    persistent = isinstance(many, int) and many <= (PERSISTENT if inner else PERSISTENT_COLUMNS)
    rblock, xblock = next_power(r), 1
    if INTERPRETED:
        rblock = rblock if persistent else min(rblock, 4096)
        xblock, warps = min(next_power(n), max(1, INTERPRETED_TILE // rblock)), 4
    elif inner:
        if not persistent:
            rblock = 8192 if n <= 2 * WIDE_GPU else 4096 if len(ranked) <= 6 else 2048
        while xblock * rblock < 1024 and n > xblock * 2 * WIDE_GPU:
            xblock *= 2
        warps = max(1, min(16, xblock * rblock // 512))
    else:
        xblock = min(64, next_power(n))
        while xblock > 16 and n // xblock < WIDE_GPU:
            xblock //= 2
        rblock = rblock if persistent else max(32, 1024 // xblock)
        while xblock * rblock < 2048 and n >= 4 * xblock * WIDE_GPU:  # a few numbers for each of many results
            xblock *= 2
        warps = 4 if xblock * rblock <= 2048 else 8
    return Plan("rows", {"x": rows, "r": columns}, {"x": xblock, "r": rblock}, warps, persistent)
