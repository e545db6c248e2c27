"""Scheduling: the order of a kernel's loops, which of them run as one, and how large a tile each program computes.

Loops are ordered so that the innermost walks memory with stride 1 in most of the bytes that move, and neighbours are
collapsed into one where every access allows it: what is contiguous everywhere becomes a single flat loop. Then

    flat   no reduction: a program computes XBLOCK consecutive elements
    tile   no reduction, and two loops each have stride 1 in much of the memory (a transpose): YBLOCK x XBLOCK
    rows   reductions: a program computes XBLOCK rows; a row is in registers where it fits (persistent), else walked in
           steps of RBLOCK, once for each reduction that needs the result of another

Sizes come from a few rules, without autotuning: enough programs to fill the GPU, 16 bytes or more for each thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """How a kernel is run. `spaces`: for x, y and r the loops that are numbered there, outermost first."""

    kind: str
    spaces: dict[str, list[Loop]]
    blocks: dict[str, int]
    warps: int
    persistent: bool
    numel: dict[str, Size] = field(default_factory=dict)
    extents: list[Size] = field(default_factory=list)  # elements spanned, to choose between 32- and 64-bit indices

    @property
    def grid(self) -> tuple[Size, Size]:
        """(programs along axis 0, along axis 1), as expressions."""
        spaces = ("y", "x") if self.kind == "tile" else ("x",)
        counts = [ceil_div(self.numel[space], self.blocks[space]) for space in spaces]
        return counts[0], counts[1] if self.kind == "tile" else 1


def ceil_div(size: Size, by: int) -> Size:
    return -(-size // by) if isinstance(size, int) else FloorDiv(size + by - 1, by)


def next_power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def schedule(kernel: Kernel, hint) -> Plan:
    layout = kernel.layout
    accesses = accesses_of(kernel)
    affines = [access.offset for access in accesses] + layout.recorder.indices
    weights = {id(access): weigh(access, hint) for access in accesses}
    ranked = sorted(accesses, key=lambda access: (-weights[id(access)], not access.write))
    rows = collapse(order(layout.rows, ranked), affines, "x")
    columns = collapse(order(layout.columns, ranked), affines, "r")
    smallest = min((access.node.dtype.itemsize for access in accesses), default=4)
    extents = [
        each.offset.offset + sum((abs(c) if isinstance(c, int) else c) * (dim.size - 1) for dim, c in each.offset.terms)
        for each in accesses
    ]
    extents += [product(dim.size for dim in layout.dims)]
    if layout.walk:
        rblock = next_power(product(dim.size for dim in layout.columns))
        walk = collapse(order(layout.walk, ranked), affines, "w")
        spaces, blocks = {"x": rows, "w": walk, "r": columns}, {"x": 1, "r": rblock}
        plan = Plan("rows", spaces, blocks, max(1, min(16, rblock // 512)), True)
    elif columns:
        plan = rows_plan(rows, columns, ranked, weights, hint, len(accesses))
    else:
        plan = flat_plan(rows, ranked, weights, hint, smallest)
    plan.numel = {space: product(loop.size for loop in loops) for space, loops in plan.spaces.items()}
    plan.extents = extents
    return plan


def accesses_of(kernel: Kernel) -> list[Access]:
    """All reads, and a write for each stored root; those of a scatter are recorded with the reads."""
    layout = kernel.layout
    places = {root: layout.places[root] for root in kernel.stored}
    writes = [Access(root, root.address(at), True) for root, at in places.items() if at is not None]
    return layout.recorder.accesses + writes


def weigh(access: Access, hint) -> int:
    """Bytes that are touched, at most those of the tensor."""
    touched = product(dim.size for dim, _ in access.offset.terms)
    return hint(touched) * access.node.dtype.itemsize


def order(dims: list[Dim], ranked: list[Access]) -> list[Dim]:
    """Outermost first: by descending stride in the access with most bytes that tells two loops apart."""
    result: list[Dim] = []
    for dim in dims:
        at = len(result)
        while at and precedes(dim, result[at - 1], ranked):
            at -= 1
        result.insert(at, dim)
    return result


def precedes(a: Dim, b: Dim, ranked: list[Access]) -> bool:
    for access in ranked:
        stride_a, stride_b = access.offset.coefficient(a), access.offset.coefficient(b)
        static = isinstance(stride_a, int) and isinstance(stride_b, int) and stride_a and stride_b
        if static and abs(stride_a) != abs(stride_b):
            return abs(stride_a) > abs(stride_b)
        if stride_a != stride_b and stride_a != 0 and stride_b != 0:  # symbolic: the one that is a multiple is outer
            return exact_quotient(stride_a, stride_b) is not None
    return False


def collapse(dims: list[Dim], affines: list[Affine], name: str) -> list[Loop]:
    loops: list[Loop] = []
    for dim in dims:
        if loops:
            last = loops[-1]
            if all(each.coefficient(last.inner) == each.coefficient(dim) * dim.size for each in affines):
                loops[-1] = Loop(last.name, size_of(last.size * dim.size), dim, [*last.dims, dim])
                continue
        loops.append(Loop(f"{name}{len(loops)}", dim.size, dim, [dim]))
    return loops


def contiguous_bytes(loop: Loop, ranked, weights) -> int:
    return sum(weights[id(a)] for a in ranked if a.offset.coefficient(loop.inner) == 1)


# ---------------------------------------------------------------------------------------------- tiles
def flat_plan(loops: list[Loop], ranked, weights, hint, smallest: int) -> Plan:
    total = hint(product(loop.size for loop in loops))
    if len(loops) > 1 and not INTERPRETED:
        last = loops[-1]
        across = {
            loop.name: sum(weights[id(a)] for a in ranked
                           if a.offset.coefficient(loop.inner) == 1 and a.offset.coefficient(last.inner) not in (0, 1))
            for loop in loops[:-1] if hint(loop.size) >= 16
        }  # fmt: skip
        best = max(across, key=across.get, default=None)
        if best and hint(last.size) >= 16 and across[best] * 8 >= sum(weights.values()):
            other = next(loop for loop in loops if loop.name == best)
            rest = [loop for loop in loops[:-1] if loop is not other] + [other]
            y = [Loop(f"y{i}", loop.size, loop.inner, loop.dims) for i, loop in enumerate(rest)]
            x = [Loop("x0", last.size, last.inner, last.dims)]
            side = 64 if total >= 1 << 22 and min(hint(last.size), hint(other.size)) >= 64 else 32
            if hint(last.size) // side < 60000:
                return Plan("tile", {"x": x, "y": y}, {"x": side, "y": side}, 8 if side == 64 else 4, True)
    if INTERPRETED:
        return Plan("flat", {"x": loops}, {"x": min(next_power(total), INTERPRETED_TILE)}, 4, True)
    block = max(128, min(1024, next_power(total // WIDE_GPU)))
    return Plan("flat", {"x": loops}, {"x": block}, max(1, min(4, block // 128)), True)


def rows_plan(rows: list[Loop], columns: list[Loop], ranked, weights, hint, accesses: int) -> Plan:
    few, many = product(loop.size for loop in rows), product(loop.size for loop in columns)
    along = sum(contiguous_bytes(loop, ranked, weights) for loop in columns[-1:])
    across = sum(contiguous_bytes(loop, ranked, weights) for loop in rows[-1:])
    inner, n, r = along >= across, hint(few), hint(many)
    spaces = {"x": rows, "r": columns}
    static = isinstance(many, int)
    if INTERPRETED:
        persistent = static and many <= PERSISTENT
        rblock = next_power(r) if persistent else min(next_power(r), 4096)
        xblock = min(next_power(n), max(1, INTERPRETED_TILE // rblock))
        return Plan("rows", spaces, {"x": xblock, "r": rblock}, 4, persistent)
    if inner:
        persistent = static and many <= PERSISTENT
        rblock = next_power(r) if persistent else 8192 if n <= 2 * WIDE_GPU else 4096 if accesses <= 6 else 2048
        xblock = 1
        while xblock * rblock < 1024 and n > xblock * 2 * WIDE_GPU:
            xblock *= 2
        warps = max(1, min(16, xblock * rblock // 512))
        return Plan("rows", spaces, {"x": xblock, "r": rblock}, warps, persistent)
    persistent = static and many <= PERSISTENT_COLUMNS
    rblock = next_power(r) if persistent else 32
    xblock = min(64, next_power(n))
    while xblock > 16 and n // xblock < WIDE_GPU:
        xblock //= 2
    while xblock * rblock < 1024 and not persistent:
        rblock *= 2
    while xblock * rblock < 2048 and n >= 4 * xblock * WIDE_GPU:  # a few numbers for each of many results
        xblock *= 2
    return Plan("rows", spaces, {"x": xblock, "r": rblock}, 4 if xblock * rblock <= 2048 else 8, persistent)
