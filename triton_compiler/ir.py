"""The loop-level IR: every tensor is a function from its index to a value; only some tensors are stored.

A node has a shape, a dtype, arguments, and `value(walker, index)`, which says how one element is computed: a Pointwise
asks its arguments at the same index, a View asks its source at another index, a Reduction is left to the kernel that it
is a root of. Nothing is computed here: a *walker* decides what an operation means. One walker records which memory a
kernel would touch (fusion.py), another writes Triton code (codegen.py).

An index is affine in the loop variables of the kernel: `4*d0 + d1 + 7`. Permutes, slices, expands and flips keep it
affine. A reshape does too, provided that loops are split where the reshape splits an axis: divide() raises Split, the
kernel splits that loop and starts again. A reshape that cuts an axis unevenly (6x4 to 4x6 of a transposed tensor)
raises Uneven, and its source is stored instead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

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


def same(a: Size, b: Size) -> bool:
    return a == b or exact_quotient(a, b) == 1


def product(sizes) -> Size:
    return size_of(functools.reduce(lambda a, b: a * b, sizes, 1))


def row_major(shape) -> list[Size]:
    """The strides of a contiguous tensor."""
    strides = itertools.accumulate(reversed(shape), lambda a, b: size_of(a * b), initial=1)
    return list(strides)[-2::-1]


def same_strides(shape, a, b) -> bool:
    """Whether the two place each element alike: the stride of an axis of size 1 means nothing."""
    return all(size == 1 or s == t for size, s, t in zip(shape, a, b, strict=True))


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

    @property
    def parts(self) -> tuple[Dim, Dim]:
        outer = replace(self.dim, name=self.dim.name + "a", size=exact_quotient(self.dim.size, self.inner))
        return outer, replace(self.dim, name=self.dim.name + "b", size=self.inner)


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

    @property
    def gathered(self) -> bool:
        return any(dim.gathered for dim, _ in self.terms)


ZERO = Affine()


def divide(index: Affine, by: Size) -> tuple[Affine, Affine]:
    """(index // by, index % by), both affine. Raises Split where a loop must be split for that, or Uneven."""
    quotient, rest = {}, {}
    for dim, c in index.terms:
        q = exact_quotient(c, by)
        (rest if q is None else quotient)[dim] = c if q is None else q
    offset, remainder = exact_quotient(index.offset, by), 0
    if offset is None:
        static = isinstance(index.offset, int) and isinstance(by, int)
        offset, remainder = divmod(index.offset, by) if static else (0, index.offset)
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
    index, axes = [ZERO] * len(shape), [axis for axis, size in enumerate(shape) if size != 1]
    for axis in reversed(axes[1:]):
        linear, index[axis] = divide(linear, shape[axis])
    if axes:
        index[axes[0]] = linear
    return tuple(index)


def flatten(index, shape) -> Affine:
    """The number in row-major order of the element at `index`."""
    steps = zip(index, row_major(shape), shape, strict=True)
    return sum((each * stride for each, stride, size in steps if size != 1), ZERO)


def linear(dims: list[Dim]) -> Affine:
    """The number of a step of these nested loops."""
    return Affine.of(dict(zip(dims, row_major([dim.size for dim in dims]), strict=True)))


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
    args: tuple[Node, ...] = ()  # what it reads, stored or not
    target: Node | None = None  # the memory that is overwritten, or added to
    serial: int = field(default_factory=lambda: next(_serial))

    def value(self, walker, index):
        raise NotImplementedError

    @property
    def elements(self) -> Size:
        return product(self.shape)

    @property
    def memory_strides(self) -> tuple[Size, ...]:
        return tuple(row_major(self.shape)) if self.strides is None else self.strides

    @property
    def is_row_major(self) -> bool:
        return self.strides is None or same_strides(self.shape, self.strides, row_major(self.shape))

    @property
    def base(self) -> Node:
        """What it is a view of."""
        node = self
        while isinstance(node, View):
            node = node.args[0]
        return node

    def address(self, index) -> Affine:
        """Where in its memory the element at `index` is."""
        steps = zip(index, self.memory_strides, self.shape, strict=True)
        return sum((each * stride for each, stride, size in steps if size != 1 or each.offset), ZERO)


@dataclass(eq=False)
class Input(Node):
    """An argument of the graph, or what a call of torch's returned: memory that kernels read."""

    stored: bool = True
    producer: Extern | None = None


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
    """`op` of the arguments at the same index, converted to `compute` first."""

    op: str = "identity"
    compute: torch.dtype | None = None

    def value(self, walker, index):
        return walker.op(self.op, [walker.read(arg, index) for arg in self.args], self.compute, self.dtype)


@dataclass(eq=False)
class View(Node):
    """The source at another index: permute, slice, expand, reshape, ... `back` maps an index of this to the source's.

    A reshape, and as_strided, also have `linear`, the position in a row-major source: where that is stored, nothing is
    divided.
    """

    back: Callable | None = None
    linear: Callable | None = None
    is_reshape: bool = False

    def value(self, walker, index):
        (source,) = self.args
        if self.linear and walker.loads(source) and source.is_row_major:
            return walker.load_at(source, self.linear(index))
        try:
            at = self.back(index)
        except Uneven as uneven:
            uneven.view = uneven.view or self
            raise
        return walker.read(source, at)


@dataclass(eq=False)
class Placed(Node):
    """With computed positions. `places` has one entry for each axis: a function that maps the index, or (node,
    function), where that node's value at the mapped index is the position. `wraps`: a negative one counts from the end;
    `checked`: any other that is out of range stops the program."""

    places: tuple = ()
    wraps: bool = False
    checked: bool = True

    def at(self, walker, index) -> tuple[Affine, ...]:
        """The index into the memory whose positions are computed."""
        at = []
        for size, place in zip(self.args[0].shape, self.places, strict=True):
            if isinstance(place, tuple):
                value = walker.read(place[0], place[1](index))
                at.append(walker.position(value, size, self.wraps, self.checked))
            else:
                at.append(place(index))
        return tuple(at)


@dataclass(eq=False)
class Gather(Placed):
    """Elements of a table, its first argument, at computed places."""

    def value(self, walker, index):
        return walker.read(self.args[0], self.at(walker, index))


@dataclass(eq=False)
class Scatter(Placed):
    """The target's memory after all `values` were added to it, by atomic additions, at computed places.

    Its loops are those of the values.
    """

    values: Node | None = None
    stored: bool = True


@dataclass(eq=False)
class Pieces(Node):
    """cat, pad and slice_scatter: along `axis`, positions [low, high) come from an argument, `low` earlier in it; where
    no piece applies the argument after those of `ranges` is read, at the index itself."""

    axis: int = 0
    ranges: tuple[tuple[Size, Size], ...] = ()

    def value(self, walker, index):
        position, choices = index[self.axis], []
        for piece, (low, high) in zip(self.args, self.ranges, strict=False):
            at = (*index[: self.axis], position + -low, *index[self.axis + 1 :])
            choices.append((position, low, high, functools.partial(walker.read, piece, at)))
        rest = self.args[len(self.ranges) :]
        return walker.choose(choices, functools.partial(walker.read, *rest, index) if rest else None, self.dtype)


@dataclass(eq=False)
class Reduction(Node):
    """`kind` (sum, max, min, prod) over `axes` of the argument; its shape is what is left of the argument's."""

    kind: str = "sum"
    axes: tuple[int, ...] = ()
    whole: tuple[Node, int] | None = None  # of the parts of a column sum: what is summed, and how many axes of it
    walked: bool = False  # summed by programs that walk over rows, beside reductions of these rows


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


def strided_view(node: Node, computed: bool = False) -> tuple[Node, tuple[Size, ...], Size]:
    """(stored tensor, strides, offset) of a view of it; `computed`: or of what is computed from it, element by element.
    Raises Uneven where no strides describe it."""
    axes = [[Dim(f"v{i}", size)] for i, size in enumerate(node.shape)]
    for _ in range(64):
        try:
            index = tuple(ZERO if axis[0].size == 1 else linear(axis) for axis in axes)
            base, place = place_in_memory(node, index, computed)
            break
        except Split as split:  # a reshape makes one axis of two: they may lie as one
            axis = next(axis for axis in axes if split.dim in axis)
            axis[(at := axis.index(split.dim)) : at + 1] = split.parts
    else:
        raise Uneven
    for outer, inner in itertools.chain(*map(itertools.pairwise, axes)):
        if place.coefficient(outer) != size_of(place.coefficient(inner) * inner.size):
            raise Uneven
    strides = tuple(place.coefficient(axis[-1]) for axis in axes)
    if not computed and not all(at_least(stride, 0) for stride in strides):
        raise Uneven  # a flip: torch has no such strides
    return base, strides, place.offset


def place_in_memory(node: Node, at: tuple[Affine, ...], computed: bool = False) -> tuple[Node, Affine]:
    """The stored tensor behind views, and where in its memory the element at this index is."""
    while source := behind(node, computed):
        if isinstance(node, View):
            if node.linear and source.is_row_major and not behind(source, computed):
                return source, node.linear(at)
            at = node.back(at)
        node = source
    return node, node.address(at)


def behind(node: Node, computed: bool) -> Node | None:
    """What a view shows; `computed`: what a value that is not stored is computed from."""
    if isinstance(node, View):
        return node.args[0]
    return largest_argument(node) if computed and isinstance(node, Pointwise) and not node.stored else None


def largest_argument(node: Pointwise | Reduction) -> Node | None:
    """The one with most elements behind its views, where sizes are static."""
    args = [each for each in node.args if not isinstance(each.base, (Constant, Iota))]
    static = all(isinstance(each.base.elements, int) for each in args)
    return max(args, key=lambda each: each.base.elements, default=None) if static else None


def strides_behind(node: Pointwise | Reduction) -> tuple[Size, ...]:
    """Those of memory without gaps whose axes lie as in the largest tensor that a value is computed from; its own
    where that has no place for each element."""
    source, own, gone = largest_argument(node), node.memory_strides, getattr(node, "axes", ())
    try:
        strides = strided_view(source, computed=True)[1] if source else own
    except Uneven:
        return own
    strides = [stride for axis, stride in enumerate(strides) if axis not in gone or not source]
    if not all(isinstance(n, int) and (n or size == 1) for n, size in zip(strides, node.shape, strict=True)):
        return own
    order = sorted(range(len(strides)), key=lambda axis: -abs(strides[axis]))
    made = dict(zip(order, row_major([node.shape[axis] for axis in order]), strict=True))
    return tuple(made[axis] for axis in range(len(strides)))
