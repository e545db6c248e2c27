"""Fusion: which nodes become memory, and which of those are computed together in one kernel.

A *root* is a node that might be stored: a reduction, an output, what a library call reads, and a pointwise node that is
read more than once. All other nodes are computed where they are read. Each root starts as a kernel of its own; then
the pair of kernels that shares most bytes is merged, again and again, as a producer with its consumer or as siblings
that read the same memory. Two kernels merge when their loops agree:

    full   a root that has an element for each step of all loops
    row    a root that has an element for each row: the loops that are not reduced

and when whatever one reads of the other is the element that it is computing at that point. Finally, what is still
stored for another kernel is computed again there, where that moves fewer bytes.
"""

from __future__ import annotations

import graphlib
import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import sympy
import torch

from triton_compiler.ir import (  # isort: skip
    Affine, Dim, Extern, Node, Pieces, Pointwise, Reduction, Scatter, Size, Split, Uneven, View, linear,
    product, same, same_strides, strides_behind, unflatten,
)  # fmt: skip

MOST_MEMORY, MOST_ROOTS, MOST_OPS = 28, 48, 96  # arguments, roots of a kernel; operations between two roots
WALKERS, WALKED_ROW = 264, 8192  # programs that walk over long rows, and the longest row that they hold in registers
MOST_NEIGHBOURS = 48  # readers of one tensor that are tried with its producer
TOO_LARGE = "the kernel would be too large"


class CannotFuse(Exception):
    """These roots cannot be one kernel; the message is the boundary's reason."""

    def __init__(self, reason: str, overwrites: Pointwise | None = None, view: View | None = None) -> None:
        super().__init__(reason)
        self.overwrites = overwrites  # a mutation of what the kernel still reads elsewhere
        self.view = view  # a reshape that no loops agree with: its source must be stored


# ---------------------------------------------------------------------------------------------- walking expressions
class Walker:
    """Computes nodes at indices, each once; subclasses say what an operation is.

    `places` are the indices of the kernel's own roots: a read of one there is a register, anywhere else not possible.
    """

    def __init__(self, places: dict[Node, tuple]) -> None:
        self.places, self.memo, self.condition = places, {}, None

    def read(self, node: Node, index):
        key = (node.serial, index, self.condition)
        found = self.lookup(key)
        if found is None:
            found = self.read_anew(node, index)
            self.keep(key, found)
        return found

    def lookup(self, key):
        return self.memo.get(key)

    def keep(self, key, value) -> None:
        self.memo[key] = value

    def loads(self, node: Node) -> bool:
        """Whether reading this node is a load from memory."""
        return node.stored and node not in self.places and not isinstance(node, View)

    def read_anew(self, node: Node, index):
        if node in self.places:
            if index != self.places[node]:
                raise CannotFuse("it reads other elements of the producer than the one being computed")
            return self.register(node) if isinstance(node, Reduction) else node.value(self, index)
        return self.load_at(node, node.address(index)) if node.stored else node.value(self, index)


@dataclass
class Access:
    """Memory that a kernel reads or writes; `offset` in elements."""

    node: Node
    offset: Affine
    write: bool = False


class Recorder(Walker):
    """Records what would be touched; the value of a node is its level: how many reductions come before it."""

    def __init__(self, places) -> None:
        super().__init__(places)
        self.accesses: list[Access] = []
        self.indices: list[Affine] = []
        self.levels: dict[Node, int] = {}
        self.positions: dict[Dim, int] = {}  # computed ones, and the level of each
        self.operations = 0

    def constant(self, number, dtype):
        return 0

    def index(self, index, dtype):
        """A place is known no earlier than the computed positions in it."""
        self.indices.append(index)
        return max((self.positions.get(dim, 0) for dim, _ in index.terms), default=0)

    def op(self, op, args, compute, dtype):
        self.operations += 1
        return max(args, default=0)

    def load_at(self, node, offset, write=False):
        self.accesses.append(Access(node, offset, write))
        return max((self.positions.get(dim, 0) for dim, _ in offset.terms), default=0)

    def position(self, value, size, wraps, checked):
        dim = Dim(f"g{len(self.positions)}", size, gathered=True)
        self.positions[dim] = value
        return Affine(((dim, 1),))

    def choose(self, choices, rest, dtype):
        level, outer = 0, self.condition
        for where, low, high, read in choices:
            self.condition = (outer, where, low, high)
            level = max(level, self.index(where, None), read())
        self.condition = outer
        return max(level, rest() if rest else 0)

    def register(self, node):
        return self.levels[node]


# ---------------------------------------------------------------------------------------------- the loops of a kernel
@dataclass
class Layout:
    """The loops of a kernel, the index of each root in them, and the memory that is touched."""

    dims: list[Dim]
    recorder: Recorder
    places: dict[Node, tuple | None] = field(default_factory=dict)  # index of each root; a scatter's has no one place
    sources: dict[Node, tuple] = field(default_factory=dict)  # the index of what it reduces, adds, or itself is
    full: set[Node] = field(default_factory=set)
    walk: list[Dim] = field(default_factory=list)  # rows that one program walks over, to sum columns meanwhile
    online: dict[Node, Node] = field(default_factory=dict)  # a sum of exp(x - maximum of x): the maximum, found with it

    @property
    def rows(self) -> list[Dim]:
        return [dim for dim in self.dims if not dim.reduced and dim not in self.walk]

    @property
    def columns(self) -> list[Dim]:
        return [dim for dim in self.dims if dim.reduced]

    def evaluated(self, root: Node) -> tuple[Node, tuple]:
        """What is computed for a root, and the index."""
        return (root.values, self.sources[root]) if isinstance(root, Scatter) else (root, self.places[root])


def loops_of(root: Node) -> tuple[tuple[Size, ...], tuple[int, ...]]:
    """(the sizes of a root's loops, which of them are reduced)."""
    if isinstance(root, Reduction):
        return root.args[0].shape, root.axes
    return root.values.shape if isinstance(root, Scatter) else root.shape, ()


def is_walked(root: Node) -> bool:
    return getattr(root, "walked", False)


def lay_out(roots: list[Node]) -> Layout:
    """The loops in which all these roots can be computed. Raises CannotFuse."""
    reductions = [root for root in roots if isinstance(root, Reduction) and not root.walked]
    shape, reduced = loops_of(max(reductions or roots, key=lambda root: len(loops_of(root)[0])))
    dims = [Dim(f"d{i}", size, i in reduced) for i, size in enumerate(shape) if size != 1]
    for _ in range(64):
        try:
            return try_layout(dims, roots)
        except Split as split:
            dims[(at := dims.index(split.dim)) : at + 1] = split.parts
        except Uneven as uneven:
            raise CannotFuse("a reshape cuts an axis unevenly", view=uneven.view) from None
    raise CannotFuse("a reshape cuts an axis unevenly")


def try_layout(dims: list[Dim], roots: list[Node]) -> Layout:
    row_dims = [dim for dim in dims if not dim.reduced]
    everything, rows = linear(dims), linear(row_dims)
    all_size, row_size = product(dim.size for dim in dims), product(dim.size for dim in row_dims)
    layout, walks = Layout(dims, Recorder({})), set()
    places, sources, recorder = layout.places, layout.sources, layout.recorder
    recorder.places = places
    for root in roots:
        shape, axes = loops_of(root)
        is_full = same(product(shape), all_size)
        if isinstance(root, Reduction):
            if not is_full or not (root.walked or same(root.elements, row_size)):
                raise CannotFuse("column sums of other sizes" if root.walked else "reductions of other sizes")
            at = sources[root] = unflatten(everything, shape)
            if root.walked:
                walks.add(tuple(dim for axis in axes for dim, _ in at[axis].terms))
                places[root] = tuple(each for axis, each in enumerate(at) if axis not in axes)
                continue
            if any(dim.reduced != (axis in axes) for axis, each in enumerate(at) for dim, _ in each.terms):
                raise CannotFuse("reductions over other axes")
            places[root] = unflatten(rows, root.shape)
            continue
        if not is_full and not same(product(shape), row_size):
            raise CannotFuse("other sizes")
        layout.full |= {root} if is_full else set()
        places[root] = sources[root] = unflatten(everything if is_full else rows, shape)
        if isinstance(root, Scatter):
            places[root] = None
            if root.target in roots:
                raise CannotFuse("all of the memory that it adds to must be written first")
    layout.walk += walks.pop() if walks else ()
    if walks or any(dim.reduced for dim in layout.walk):
        raise CannotFuse("column sums of other rows")
    for root in roots:
        if isinstance(root, Reduction):
            recorder.levels[root] = 1 + recorder.read(*root.args, sources[root])
            if (maximum := running_maximum(root, layout)) and maximum not in layout.online.values():
                layout.online[root] = maximum
                recorder.levels[root] = recorder.levels[maximum]
        elif isinstance(root, Scatter):
            read = recorder.read(root.values, sources[root])
            place = root.address(root.at(recorder, sources[root]))
            recorder.levels[root] = max(read, recorder.load_at(root.target, place, True))
        else:
            recorder.levels[root] = recorder.read(root, places[root])
    overwriting = {root.target: root for root in roots if isinstance(root, Pointwise) and root.target}
    for access in recorder.accesses:
        root = overwriting.get(access.node)
        if root and (access.offset.gathered or access.offset != root.target.address(places[root])):
            raise CannotFuse("it would overwrite elements that others still read", overwrites=root)
    return layout


def behind_views(node: Node, index) -> tuple[Node, tuple]:
    while isinstance(node, View):
        (node,), index = node.args, node.back(index)
    return node, index


def running_maximum(root: Reduction, layout: Layout) -> Reduction | None:
    """The maximum m where root is the sum of exp(x - m) over the same x: softmax, which one pass over x can do."""
    if root.kind != "sum" or root.walked:
        return None
    try:
        total, index = behind_views(*root.args, layout.sources[root])
        if getattr(total, "op", "") != "exp":
            return None
        apart, index = behind_views(*total.args, index)
        if getattr(apart, "op", "") != "sub" or apart.compute is torch.float64:
            return None
        maximum, at = behind_views(apart.args[1], index)
        if getattr(maximum, "kind", "") != "max" or at != layout.places.get(maximum):
            return None
        same_x = behind_views(apart.args[0], index) == behind_views(*maximum.args, layout.sources[maximum])
        return maximum if same_x else None
    except (Split, Uneven):  # a reshape lies between
        return None


# ---------------------------------------------------------------------------------------------- kernels
@dataclass(eq=False)
class Kernel:
    """Roots that are computed together; `stored` are those that need memory."""

    roots: list[Node]
    layout: Layout | None = None
    stored: list[Node] = field(default_factory=list)
    name: str = ""
    library = random = False

    @property
    def serial(self) -> int:
        return max(root.serial for root in self.roots)

    @property
    def reads(self) -> set[Node]:
        return set().union(*map(leaves, self.roots)) - set(self.roots)

    @property
    def numel(self) -> tuple[Size, Size]:
        """(steps of all loops, rows)."""
        roots = [root for root in self.roots if not is_walked(root)] or self.roots
        shape, reduced = max(map(loops_of, roots), key=lambda loops: (len(loops[1]) > 0, len(loops[0])))
        return product(shape), product(size for i, size in enumerate(shape) if i not in reduced)


def leaves(node: Node) -> set[Node]:
    """The memory that computing `node` reads."""
    found, todo, seen = set(), list(node.args), set()
    while todo:
        each = todo.pop()
        if each.stored and not isinstance(each, View):
            found.add(each)
        elif each not in seen:
            seen.add(each)
            todo.extend(each.args)
    return found


def reads_of(step: Kernel | Extern) -> set[Node]:
    return step.reads if isinstance(step, Kernel) else {each.base for each in step.reads}


def made_by(step: Kernel | Extern) -> list:
    return step.roots if isinstance(step, Kernel) else [result for _, result in step.outputs]


def by_serial(roots) -> list[Node]:
    return sorted(set(roots), key=lambda root: root.serial)


@dataclass
class Boundary:
    """Why a kernel ends where another one reads what it wrote."""

    producer: str
    consumer: str
    reason: str


class Fusion:
    """The steps of a graph in order: kernels, and calls of torch's."""

    def __init__(self, lowered, hints: dict[sympy.Symbol, int]) -> None:
        self.lowered, self.hints = lowered, hints
        self.boundaries: list[Boundary] = []
        self.failed: dict[tuple[Kernel, Kernel], str] = {}
        read = [each for call in lowered.externs for each in call.reads]
        self.needed = {each.base for each in [*lowered.outputs, *read] if isinstance(each, Node)}
        self.needed |= set(lowered.mutations)
        self.choose_roots()
        self.settle_reshapes()
        self.follow_memory()
        self.steps: list[Kernel | Extern] = [*lowered.externs, *(Kernel([root]) for root in self.roots)]
        self.wait()
        while self.merge_round():
            pass
        self.walk_rows()
        self.recompute()
        self.order()

    @property
    def kernels(self) -> list[Kernel]:
        return [step for step in self.steps if isinstance(step, Kernel)]

    def hint(self, size: Size) -> int:
        """A size as a number, to compare by."""
        if isinstance(size, int):
            return size
        found = size.subs(self.hints)
        return int(found) if found.is_number else 4096

    def bytes_of(self, node: Node) -> int:
        return self.hint(node.elements) * node.dtype.itemsize

    # ------------------------------------------------------------------------------------------ roots
    def choose_roots(self) -> None:
        order, seen, users, uses, weight = [], set(), defaultdict(list), {}, {}
        stack = [(node, False) for node in sorted(self.needed, key=lambda node: -node.serial)]
        while stack:  # depth first, without recursion: graphs are deep
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack += [(node, True), *((each, False) for each in node.args)]
        for node in order:
            for each in node.args:
                users[each].append(node)
        for node in reversed(order):
            computed = (Pointwise, Reduction, Scatter)
            uses[node] = min(4, sum(1 if isinstance(user, computed) else max(uses[user], 1) for user in users[node]))
        for node in order:
            if isinstance(node, Scatter):
                self.needed.add(node.target)
            weight[node] = int(isinstance(node, (Pointwise, Pieces)))
            weight[node] += sum(0 if each.stored else weight[each] for each in node.args)
            if isinstance(node, Pointwise) and not node.stored:
                many = uses[node] > 1 and not self.is_cheap(node, weight[node])
                node.stored = many or weight[node] > MOST_OPS or node in self.needed
            node.stored |= isinstance(node, Reduction)
        self.roots = [node for node in order if node.stored and isinstance(node, (Pointwise, Reduction, Scatter))]

    def is_cheap(self, node: Node, weight: int) -> bool:
        """Computed again where it is read: of no memory, or a few operations on one tensor that is no larger."""
        read = leaves(node)
        if not read:
            return weight <= 16
        return weight <= 3 and len(read) == 1 and self.bytes_of(*read) <= self.bytes_of(node)

    def settle_reshapes(self) -> None:
        """Stores the source of each reshape that no loops of a kernel agree with: then its elements have an address."""
        todo = list(self.roots)
        while todo:
            root = todo.pop()
            try:
                lay_out([root])
                continue
            except CannotFuse as error:
                reader = root if error.overwrites is not None else error.view
                if reader is None:
                    raise
            (source,) = reader.args
            if reader is root or not (isinstance(source, (Pointwise, Reduction)) and source.is_row_major):
                source = self.lowered.copy(source)
                reader.args = (source,)
            source.stored = True
            new = [source] if source not in self.roots else []
            self.roots += new
            todo += [root, *new] if reader is not root else [*new, root]

    def follow_memory(self) -> None:
        """What kernels alone read lies in memory as the largest tensor that it is computed from, unless a reshape of it
        needs it to be as it was traced: tensors that one kernel reads and writes have their neighbours in common."""
        readers = defaultdict(list)
        for root in self.roots:
            for each in leaves(root):
                readers[each].append(root)
        for root in self.roots:
            if not isinstance(root, Pointwise) or root in self.needed or root.target is not None:
                continue
            traced, root.strides = root.memory_strides, strides_behind(root)
            try:
                for each in () if same_strides(root.shape, root.strides, traced) else readers[root]:
                    lay_out([each])
            except CannotFuse:
                root.strides = traced

    # ------------------------------------------------------------------------------------------ merging
    def wait(self) -> None:
        """`direct`: the steps that each step waits for; `before`: those and what they wait for, a bit for each step."""
        steps = self.steps
        self.bit = {step: 1 << i for i, step in enumerate(steps)}
        self.memory_read = {step: reads_of(step) for step in steps}
        maker, readers = self.makers(), self.readers()
        self.direct = {step: {maker[each] for each in self.memory_read[step] if each in maker} for step in steps}
        for kernel in self.kernels:
            for root in kernel.roots:
                if root.target is not None:
                    self.direct[kernel] |= {each for each in readers[root.target] if each is not kernel}
        for first, second in itertools.pairwise(step for step in steps if step.random):
            self.direct[second].add(first)
        self.before = {}
        for step in topological(steps, self.direct):
            self.before[step] = 0
            for each in self.direct[step]:
                self.before[step] |= self.bit[each] | self.before[each]

    def makers(self) -> dict[Node, Kernel | Extern]:
        return {each: step for step in self.steps for each in made_by(step)}

    def readers(self) -> defaultdict[Node, list[Kernel | Extern]]:
        found = defaultdict(list)
        for step in self.steps:
            for each in self.memory_read[step]:
                found[each].append(step)
        return found

    def merge_round(self) -> bool:
        """Tries all pairs that share memory, those first that share most; whether any were merged."""
        ordered = sorted(self.kernels, key=lambda kernel: kernel.serial)
        maker, place = self.makers(), {kernel: i for i, kernel in enumerate(ordered)}
        shared: dict[tuple, int] = defaultdict(int)

        def share(a: Kernel, b: Kernel, size: int) -> None:
            shared[(a, b) if place[a] < place[b] else (b, a)] += size if a is not b else 0

        touching, readers_of = defaultdict(list), defaultdict(list)
        for kernel in place:
            for each in self.memory_read[kernel]:
                touching[each].append(kernel)
            for each in {maker[node] for node in self.memory_read[kernel] if maker.get(node) in place}:
                for other in readers_of[each][-4:]:  # they may start together, though they read different results
                    share(other, kernel, 1)
                readers_of[each].append(kernel)
        for node, readers in touching.items():
            size, readers = self.bytes_of(node), readers[:MOST_NEIGHBOURS]
            for i, a in enumerate(readers):
                if maker.get(node) in place:
                    share(maker[node], a, size)
                for b in readers[i + 1 : i + 9 if maker.get(node) in place or i else None]:
                    share(a, b, size)
        for a, b in itertools.pairwise(kernel for kernel in place if not self.memory_read[kernel]):
            share(a, b, 1)
        merged: dict[Kernel, Kernel] = {}
        for (a, b), size in sorted(shared.items(), key=lambda item: (-item[1], place[item[0][0]], place[item[0][1]])):
            while a in merged:
                a = merged[a]
            while b in merged:
                b = merged[b]
            if a is b or size == 0 or (a, b) in self.failed:
                continue
            try:
                merged[a] = merged[b] = self.merge(a, b)
            except CannotFuse as reason:
                self.failed[a, b] = str(reason)
        return bool(merged)

    def merge(self, a: Kernel, b: Kernel) -> Kernel:
        """One kernel of the two. Raises CannotFuse."""
        (all_a, rows_a), (all_b, rows_b) = a.numel, b.numel
        flat = (all_a == rows_a and same(all_a, rows_b)) or (all_b == rows_b and same(all_b, rows_a))
        if not same(all_a, all_b) and not flat and not any(map(is_walked, b.roots)):
            raise CannotFuse("other sizes")
        for step in self.steps:
            after_a, after_b = self.before[step] & self.bit[a], self.before[step] & self.bit[b]
            between = (after_a and self.before[b] & self.bit[step]) or (after_b and self.before[a] & self.bit[step])
            if between and step is not a and step is not b:
                raise CannotFuse(f"{step.name or step.roots[0].name} must run between them")
        both = Kernel(by_serial(a.roots + b.roots))
        reads = both.reads
        most = MOST_MEMORY - len(reads)
        if len(both.roots) > MOST_ROOTS or (len(both.roots) > most and self.stored_of(both) > most):
            raise CannotFuse(TOO_LARGE)
        both.layout = lay_out(both.roots)
        if both.layout.recorder.operations > 600:
            raise CannotFuse(TOO_LARGE)
        self.bit[both] = self.bit[a] | self.bit[b]
        self.before[both] = (self.before[a] | self.before[b]) & ~self.bit[both]
        self.memory_read[both] = reads
        for step in self.steps:
            if self.before[step] & self.bit[both]:
                self.before[step] |= self.before[both] | self.bit[both]
        self.steps[self.steps.index(a)] = both
        self.steps.remove(b)
        return both

    def stored_of(self, kernel: Kernel) -> int:
        """How many of a kernel's roots others read."""
        own = set(kernel.roots)
        others = [step for step in self.steps if not (isinstance(step, Kernel) and set(step.roots) <= own)]
        return len(own & self.needed.union(*(self.memory_read[step] for step in others)))

    def walk_rows(self) -> None:
        """Column sums beside reductions of rows, as in the backward of a norm: a program walks over some rows, holds
        each in registers, and adds to the sums of its part of the rows. Memory is read once for both."""
        for columns in self.kernels:
            if not all(isinstance(root, Reduction) and root.whole for root in columns.roots):
                continue
            for rows in self.kernels:
                (total, n), (theirs, _) = rows.numel, columns.numel
                length = total // n if isinstance(total, int) and total == theirs else 0
                if not 1 < length <= WALKED_ROW:
                    continue
                shared = (rows.reads | set(rows.roots)) & columns.reads
                agree = all(length == root.elements // root.shape[0] for root in columns.roots)
                if not agree or not any(self.hint(each.elements) == total for each in shared):
                    continue
                most = WALKERS * max(1, min(4, 2048 // length))  # short rows: more programs
                parts = max((i for i in range(1, most + 1) if n % i == 0 and n // i >= 4), default=0)
                if parts * 4 >= WALKERS and self.try_walk(rows, columns, parts):
                    break

    def try_walk(self, rows: Kernel, columns: Kernel, parts: int) -> bool:
        before = [(root, root.shape, root.axes, root.args) for root in columns.roots]
        for root in columns.roots:
            self.lowered.cut_again(root, parts)
            root.walked = True
        try:
            layouts = {each: lay_out(each.roots) for each in self.kernels if set(columns.roots) & each.reads}
            self.merge(rows, columns)
        except CannotFuse:
            for root, *held in before:
                root.shape, root.axes, root.args = held
                root.walked = False
            return False
        for reader, layout in layouts.items():
            reader.layout = layout
        return True

    # ------------------------------------------------------------------------------------------ store or compute again
    def recompute(self) -> None:
        """What other kernels read is computed there again where that moves fewer bytes: last roots first."""
        for root in reversed(by_serial(self.roots)):
            if not isinstance(root, Pointwise) or root in self.needed:
                continue
            readers = [kernel for kernel in self.kernels if root in kernel.reads]
            maker = next(kernel for kernel in self.kernels if root in kernel.roots)
            size, read = self.bytes_of(root), leaves(root)
            extra = sum(self.bytes_of(each) for kernel in readers for each in read - kernel.reads)
            overwritten = {each.target for kernel in self.kernels for each in kernel.roots}
            beside = extra >= size and read & set(maker.roots)
            if not readers or len(readers) > 4 or extra > size * (1 + len(readers)) or overwritten & read or beside:
                continue
            root.stored = False
            rest = [each for each in maker.roots if each is not root]
            try:
                layouts = {kernel: lay_out(kernel.roots) for kernel in readers}
                maker.layout = lay_out(rest) if rest else None
            except CannotFuse:
                root.stored = True
                continue
            for kernel, layout in layouts.items():
                kernel.layout = layout
            maker.roots = rest
            if not rest:
                self.steps.remove(maker)

    def order(self) -> None:
        """The steps in an order that runs, and what of each kernel is stored."""
        self.wait()
        self.steps = topological(self.steps, self.direct)
        read_by = self.readers()
        for kernel in self.kernels:
            kernel.layout = kernel.layout or lay_out(kernel.roots)
            kernel.stored = [root for root in kernel.roots if root in self.needed or read_by[root]]
            for root in kernel.stored:
                for reader in read_by[root]:
                    name = reader.name or reader.roots[-1].name
                    self.boundaries.append(Boundary(root.name, name, self.why(kernel, reader)))

    def why(self, kernel: Kernel, reader: Kernel | Extern) -> str:
        """The reason of a boundary."""
        if isinstance(reader, Extern):
            return "a library call reads memory" if reader.library else "eager reads memory"
        try:
            lay_out(by_serial(kernel.roots + reader.roots))
            return self.failed.get((kernel, reader)) or "something must run between them, or it would be too large"
        except CannotFuse as error:
            return str(error)


def topological(steps, direct) -> list:
    """Steps in an order that respects `direct`, the earliest in the program first."""
    sorter, ready, order = graphlib.TopologicalSorter({step: direct[step] for step in steps}), [], []
    sorter.prepare()
    while sorter.is_active():
        for step in sorter.get_ready():
            heapq.heappush(ready, (step.serial, step))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order
