"""The loop-level IR: every tensor is a function from its index to a value; only some tensors are stored.

A node has a shape, a dtype and `value(walker, index)`, which says how one element is computed: a Pointwise asks its
arguments at the same index, a View asks its source at another index, a Reduction is left to the kernel that it is a
root of. Nothing is computed here: a *walker* decides what an operation means. One walker records which memory a kernel
would touch (fusion.py), another writes Triton code (codegen.py).

An index is affine in the loop variables of the kernel: `4*d0 + d1 + 7`. Permutes, slices, expands and flips keep it
affine. A reshape does too, provided that loops are split where the reshape splits an axis: divide() raises Split, the
kernel splits that loop and starts again. A reshape that cuts an axis unevenly (6x4 to 4x6 of a transposed tensor)
raises Uneven, and its source is stored instead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import sympy
import torch

Size = int | sympy.Expr  # static, or an expression of the symbols that Dynamo gave to dynamic sizes
_serial = itertools.count()


# ---------------------------------------------------------------------------------------------- sizes
def size_of(value) -> Size:
    """A torch.SymInt as the expression behind it; an int as itself."""
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    return int(value) if isinstance(value, (int, sympy.Integer)) else value


@functools.lru_cache(maxsize=100_000)
def exact_quotient(a: Size, b: Size) -> Size | None:
    """a / b where b surely divides a, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if b == 1 or a == 0:
        return a
    quotient = sympy.cancel(sympy.sympify(a) / b)
    numerator, denominator = sympy.fraction(quotient)
    return size_of(numerator) if denominator == 1 and quotient.is_integer else None


@functools.lru_cache(maxsize=100_000)
def at_least(a: Size, b: Size) -> bool:
    """Whether a >= b for all values of the symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a >= b
    return bool(sympy.expand(sympy.sympify(a) - b).is_nonnegative)


def product(sizes) -> Size:
    result: Size = 1
    for size in sizes:
        result = result * size
    return size_of(result)


def row_major(shape) -> list[Size]:
    """The strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride = size_of(stride * size)
    return strides[::-1]


# ---------------------------------------------------------------------------------------------- indices
@dataclass(frozen=True)
class Dim:
    """A loop variable; or, `gathered`, a position that the kernel computes or loads, which cannot be split."""

    name: str
    size: Size
    reduced: bool = False
    gathered: bool = False


class Split(Exception):
    """The loop `dim` must become two: an outer one, and an inner one of `inner` steps."""

    def __init__(self, dim: Dim, inner: Size) -> None:
        self.dim, self.inner = dim, inner


class Uneven(Exception):
    """No split of the loops makes this index affine; `view` is the reshape that would need it."""

    view: View | None = None


@dataclass(frozen=True)
class Affine:
    """The sum of coefficient * loop variable, plus an offset."""

    terms: tuple[tuple[Dim, Size], ...] = ()
    offset: Size = 0

    @staticmethod
    def of(terms: dict[Dim, Size], offset: Size = 0) -> Affine:
        kept = ((dim, size_of(c)) for dim, c in terms.items() if c != 0)
        return Affine(tuple(sorted(kept, key=lambda term: term[0].name)), size_of(offset))

    def __add__(self, other: Affine | Size) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.terms, size_of(self.offset + other))
        if not self.terms or not other.terms:
            return Affine(self.terms or other.terms, size_of(self.offset + other.offset))
        terms = dict(self.terms)
        for dim, c in other.terms:
            terms[dim] = terms.get(dim, 0) + c
        return Affine.of(terms, self.offset + other.offset)

    def __mul__(self, factor: Size) -> Affine:
        if factor == 1:
            return self
        return Affine.of({dim: c * factor for dim, c in self.terms}, self.offset * factor)

    def coefficient(self, dim: Dim) -> Size:
        return next((c for d, c in self.terms if d is dim or d == dim), 0)


ZERO = Affine()


def divide(index: Affine, by: Size) -> tuple[Affine, Affine]:
    """(index // by, index % by), both affine. Raises Split where a loop must be split for that, or Uneven."""
    quotient, rest = {}, {}
    for dim, c in index.terms:
        q = exact_quotient(c, by)
        (rest if q is None else quotient)[dim] = c if q is None else q
    offset = exact_quotient(index.offset, by)
    if offset is not None:
        remainder = 0
    elif isinstance(index.offset, int) and isinstance(by, int):
        offset, remainder = divmod(index.offset, by)
    else:
        offset, remainder = 0, index.offset
    positive = all(at_least(c, 0) for c in rest.values())
    largest = remainder + sum(c * (dim.size - 1) for dim, c in rest.items())
    if positive and at_least(remainder, 0) and at_least(by, largest + 1):
        return Affine.of(quotient, offset), Affine.of(rest, remainder)
    for dim, c in rest.items() if positive else ():
        inner = exact_quotient(by, c)
        if not dim.gathered and inner is not None and inner != 1 and exact_quotient(dim.size, inner) not in (None, 1):
            raise Split(dim, inner)
    raise Uneven


def unflatten(linear: Affine, shape) -> tuple[Affine, ...]:
    """The index into `shape` of the element that is number `linear` in row-major order."""
    index = []
    axes = [i for i, size in enumerate(shape) if size != 1]
    found = {}
    for position, axis in enumerate(reversed(axes)):
        if position == len(axes) - 1:
            found[axis] = linear
        else:
            linear, found[axis] = divide(linear, shape[axis])
    index = [found.get(i, ZERO) for i in range(len(shape))]
    return tuple(index)


def flatten(index, shape) -> Affine:
    """The number in row-major order of the element at `index`."""
    total = ZERO
    for each, stride, size in zip(index, row_major(shape), shape, strict=True):
        if size != 1:
            total = total + each * stride
    return total


# ---------------------------------------------------------------------------------------------- nodes
@dataclass(eq=False)
class Node:
    """A tensor. `stored`: in memory of its own, with these strides; what is not stored is computed where it is read."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    name: str = ""
    strides: tuple[Size, ...] | None = None
    stored: bool = False
    serial: int = field(default_factory=lambda: next(_serial))

    @property
    def sources(self) -> tuple[Node, ...]:
        """What it reads, stored or not."""
        return ()

    def value(self, walker, index):
        raise NotImplementedError

    @property
    def elements(self) -> Size:
        return product(self.shape)

    @property
    def bytes(self) -> Size:
        return self.elements * self.dtype.itemsize


@dataclass(eq=False)
class Input(Node):
    """An argument of the graph, or what a library call returned: memory that kernels read."""

    producer: Extern | None = None
    stored: bool = True


@dataclass(eq=False)
class Constant(Node):
    """One number everywhere; `number` may be an expression of symbols."""

    number: object = 0

    def value(self, walker, index):
        return walker.constant(self.number, self.dtype)


@dataclass(eq=False)
class Iota(Node):
    """start, start + step, ..."""

    start: Size = 0
    step: Size = 1

    def value(self, walker, index):
        return walker.index(index[0] * self.step + self.start, self.dtype)


@dataclass(eq=False)
class Pointwise(Node):
    """`op` of the arguments at the same index, converted to `compute` first. `target`: an Input to overwrite."""

    op: str = "identity"
    args: tuple[Node, ...] = ()
    compute: torch.dtype | None = None
    target: Input | None = None

    @property
    def sources(self):
        return self.args

    def value(self, walker, index):
        return walker.op(self.op, [walker.read(arg, index) for arg in self.args], self.compute, self.dtype)


@dataclass(eq=False)
class View(Node):
    """The source at another index: permute, slice, expand, reshape, ... `back` maps an index of this to the source's.

    A reshape also has `linear`, the position in a row-major source: where that is stored, nothing is divided.
    """

    source: Node | None = None
    back: Callable | None = None
    linear: Callable | None = None

    @property
    def sources(self):
        return (self.source,)

    def value(self, walker, index):
        if self.linear and walker.loads(self.source) and is_row_major(self.source):
            return walker.load_at(self.source, self.linear(index))
        try:
            at = self.back(index)
        except Uneven as uneven:
            uneven.view = uneven.view or self
            raise
        return walker.read(self.source, at)


def is_row_major(node: Node) -> bool:
    return node.strides is None or all(
        size == 1 or a == b for size, a, b in zip(node.shape, node.strides, row_major(node.shape), strict=True)
    )


@dataclass(eq=False)
class Gather(Node):
    """Elements of a table at computed places. `places` has one entry for each axis of the table: a function that maps
    the index, or (node, function), where that node's value at the mapped index is the position; `wraps`: a negative
    one counts from the end."""

    table: Node | None = None
    places: tuple = ()
    wraps: bool = False

    @property
    def sources(self):
        return (self.table, *(place[0] for place in self.places if isinstance(place, tuple)))

    def value(self, walker, index):
        return walker.read(self.table, computed(walker, self.table.shape, self.places, index, self.wraps))


def computed(walker, shape, places, index, wraps: bool, checked: bool = True) -> tuple[Affine, ...]:
    """The index into a tensor of this shape whose positions are computed, as Gather and Scatter have them."""
    at = []
    for size, place in zip(shape, places, strict=True):
        if isinstance(place, tuple):
            node, back = place
            at.append(walker.position(walker.read(node, back(index)), size, wraps, checked))
        else:
            at.append(place(index))
    return tuple(at)


@dataclass(eq=False)
class Scatter(Node):
    """The target's memory after all `values` were added to it, by atomic additions, at computed places (as Gather's).

    Its loops are those of the values. `kept`: a condition beside the values, without which nothing is added.
    """

    target: Pointwise | None = None
    values: Node | None = None
    places: tuple = ()
    wraps: bool = False
    checked: bool = True
    kept: Node | None = None
    stored: bool = True

    @property
    def sources(self):
        nodes = (place[0] for place in self.places if isinstance(place, tuple))
        return (self.target, self.values, *nodes, *([self.kept] if self.kept is not None else []))

    def at(self, walker, index) -> tuple[Affine, ...]:
        """Where in the target the value at `index` goes."""
        return computed(walker, self.shape, self.places, index, self.wraps, self.checked)


@dataclass(eq=False)
class Pieces(Node):
    """cat, pad and slice_scatter: along `axis`, positions [low, high) come from a piece, `shift` earlier in it.

    `rest` is read where no piece applies: a node, read at the index itself. Pieces are (node, low, high).
    """

    axis: int = 0
    pieces: tuple = ()
    rest: Node | None = None

    @property
    def sources(self):
        return (*(piece for piece, _, _ in self.pieces), *([self.rest] if self.rest is not None else []))

    def value(self, walker, index):
        choices = []
        for piece, low, high in self.pieces:
            at = (*index[: self.axis], index[self.axis] + -low, *index[self.axis + 1 :])
            choices.append((index[self.axis], low, high, functools.partial(walker.read, piece, at)))
        rest = None if self.rest is None else functools.partial(walker.read, self.rest, index)
        return walker.choose(choices, rest, self.dtype)


@dataclass(eq=False)
class Reduction(Node):
    """`kind` (sum, max, min, prod) over `axes` of the source; its shape is what is left of the source's."""

    kind: str = "sum"
    source: Node | None = None
    axes: tuple[int, ...] = ()
    whole: tuple[Node, int] | None = None  # of the parts of a column sum: what is summed, and how many axes of it
    walked: bool = False  # summed by programs that walk over rows, beside reductions of these rows

    @property
    def sources(self):
        return (self.source,)


@dataclass(eq=False)
class Extern:
    """A call of torch's: a library's matmul, or what is left to eager. `args` hold nodes where tensors go."""

    target: Callable
    args: tuple
    kwargs: dict
    name: str
    outputs: list = field(default_factory=list)  # [(path into what it returns, Input or symbol)]
    library: bool = False  # as good as it gets, rather than not supported
    reads: list[Node] = field(default_factory=list)
    reason: str = ""
    random: bool = False
    serial: int = field(default_factory=lambda: next(_serial))
