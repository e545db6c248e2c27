"""Fusion: which nodes become memory, and which of those one kernel computes together.

A *root* is a node that might be stored: a reduction, an output, what a library call reads, and a pointwise node that is
read more than once. All other nodes are computed where they are read. Each root starts as a kernel of its own; then
the pair of kernels that share most bytes is merged, again and again, as a producer with its consumer or as siblings
that read the same memory. Two kernels merge when their loops agree:

    full   a root that has an element for each step of all loops
    row    a root that has an element for each row: the loops that are not reduced

and when whatever one reads of the other is the element that it is just computing. At last, what is still stored for
another kernel is computed again there, where that moves fewer bytes.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import sympy
import torch

from triton_compiler.ir import (  # isort: skip
    ZERO, Affine, Dim, Extern, Node, Pieces, Pointwise, Reduction, Scatter, Size, Split, Uneven, View, exact_quotient,
    is_row_major, product, row_major, unflatten,
)  # fmt: skip

MOST_MEMORY, MOST_ROOTS, MOST_OPS = 28, 48, 96  # arguments, roots of a kernel; operations between two roots
WALKERS, WALKED_ROW = 264, 8192  # programs that walk over long rows, and the longest row that they hold in registers
MOST_NEIGHBOURS = 48  # pairs that are tried for each kernel in a round


class CannotFuse(Exception):
    """These roots cannot be one kernel; the message is the boundary's reason."""

    overwrites: Pointwise | None = None  # a mutation of what the kernel still reads elsewhere
    view: View | None = None  # a reshape that no loops agree with: its source must be stored


def same(a: Size, b: Size) -> bool:
    return a == b or exact_quotient(a, b) == 1


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
        return self.load(node, index) if node.stored else node.value(self, index)


@dataclass
class Access:
    """Memory that a kernel reads or writes; `offset` in elements. Gathered: places come from other memory."""

    node: Node
    offset: Affine
    write: bool = False
    gathered: bool = False


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

    def level_of(self, place: Affine) -> int:
        """A place is known no earlier than the computed positions in it."""
        return max((self.positions.get(dim, 0) for dim, _ in place.terms), default=0)

    def index(self, index, dtype):
        self.indices.append(index)
        return self.level_of(index)

    def op(self, op, args, compute, dtype):
        self.operations += 1
        return max(args, default=0)

    def load(self, node, index):
        return self.load_at(node, address(node, index))

    def load_at(self, node, offset):
        self.accesses.append(Access(node, offset, gathered=any(dim.gathered for dim, _ in offset.terms)))
        return self.level_of(offset)

    def position(self, value, size, wraps, checked):
        dim = Dim(f"g{len(self.positions)}", size, gathered=True)
        self.positions[dim] = value
        return Affine(((dim, 1),))

    def choose(self, choices, rest, dtype):
        level, outer = 0, self.condition
        for where, low, high, read in choices:
            self.indices.append(where)
            self.condition = (outer, where, low, high)
            level = max(level, self.level_of(where), read())
        self.condition = outer
        return max(level, rest() if rest else 0)

    def register(self, node):
        return self.levels[node]


def strides_of(node: Node) -> tuple[Size, ...]:
    return tuple(row_major(node.shape)) if node.strides is None else node.strides


def address(node: Node, index) -> Affine:
    place = ZERO
    for each, stride, size in zip(index, strides_of(node), node.shape, strict=True):
        place = place + each * stride if size != 1 or each.offset else place
    return place


# ---------------------------------------------------------------------------------------------- the loops of a kernel
@dataclass
class Layout:
    """The loops of a kernel, the index of each root in them, and the memory that is touched."""

    dims: list[Dim]
    places: dict[Node, tuple | None]  # index of each root; none of a scatter, whose elements others add to as well
    sources: dict[Node, tuple]  # the index of what a reduction reduces, and of what a scatter adds
    full: set[Node]
    recorder: Recorder
    walk: list[Dim]  # rows that one program walks over, to sum columns meanwhile
    online: dict[Node, Node]  # a sum of exp(x - maximum of x): the maximum, which is found in the same pass

    @property
    def rows(self) -> list[Dim]:
        return [dim for dim in self.dims if not dim.reduced and dim not in self.walk]

    def evaluated(self, root: Node) -> tuple[Node, tuple]:
        """What is computed for a root, and the index."""
        return (root.values, self.sources[root]) if isinstance(root, Scatter) else (root, self.places[root])

    @property
    def columns(self) -> list[Dim]:
        return [dim for dim in self.dims if dim.reduced]


def lay_out(roots: list[Node]) -> Layout:
    """The loops in which all these roots can be computed. Raises CannotFuse."""
    reductions = [root for root in roots if isinstance(root, Reduction) and not root.walked]
    base = max(reductions or roots, key=lambda root: len(loops_of(root)[0]))
    shape, reduced = loops_of(base)
    dims = [Dim(f"d{i}", size, i in reduced) for i, size in enumerate(shape) if size != 1]
    for _ in range(64):
        try:
            return try_layout(dims, roots)
        except Split as split:
            at = dims.index(split.dim)
            outer = exact_quotient(split.dim.size, split.inner)
            name, flag = split.dim.name, split.dim.reduced
            dims[at : at + 1] = [Dim(name + "a", outer, flag), Dim(name + "b", split.inner, flag)]
        except Uneven as uneven:
            error = CannotFuse("a reshape cuts an axis unevenly")
            error.view = uneven.view
            raise error from None
    raise CannotFuse("a reshape cuts an axis unevenly")


def loops_of(root: Node) -> tuple[tuple[Size, ...], tuple[int, ...]]:
    if isinstance(root, Reduction):
        return root.source.shape, root.axes
    return root.values.shape if isinstance(root, Scatter) else root.shape, ()


def try_layout(dims: list[Dim], roots: list[Node]) -> Layout:
    everything, rows = linear(dims), linear([dim for dim in dims if not dim.reduced])
    all_size, row_size = product(dim.size for dim in dims), product(dim.size for dim in dims if not dim.reduced)
    places, sources, full, walks = {}, {}, set(), set()
    for root in roots:
        if isinstance(root, Reduction) and root.walked:
            if not same(product(root.source.shape), all_size):
                raise CannotFuse("column sums of other sizes")
            at = sources[root] = unflatten(everything, root.source.shape)
            walks.add(tuple(dim for axis in root.axes for dim, _ in at[axis].terms))
            places[root] = tuple(each for axis, each in enumerate(at) if axis not in root.axes)
        elif isinstance(root, Reduction):
            if not same(product(root.source.shape), all_size) or not same(root.elements, row_size):
                raise CannotFuse("reductions of other sizes")
            at = sources[root] = unflatten(everything, root.source.shape)
            for axis, each in enumerate(at):
                if any(dim.reduced != (axis in root.axes) for dim, _ in each.terms):
                    raise CannotFuse("reductions over other axes")
            places[root] = unflatten(rows, root.shape)
        else:
            shape, _ = loops_of(root)
            is_full = same(product(shape), all_size)
            if not is_full and not same(product(shape), row_size):
                raise CannotFuse("other sizes")
            full |= {root} if is_full else set()
            places[root] = sources[root] = unflatten(everything if is_full else rows, shape)
            if isinstance(root, Scatter):
                places[root] = None
                if root.target in roots:
                    raise CannotFuse("all of the memory that it adds to must be written first")
    walk = list(walks.pop()) if walks else []
    if walks or any(dim.reduced for dim in walk):
        raise CannotFuse("column sums of other rows")
    recorder, online = Recorder(places), {}
    for root in roots:
        if isinstance(root, Reduction):
            recorder.levels[root] = 1 + recorder.read(root.source, sources[root])
            if maximum := running_maximum(root, roots, sources, places):
                online[root] = maximum
                recorder.levels[root] = recorder.levels[maximum]
        elif isinstance(root, Scatter):
            read = [recorder.read(each, sources[root]) for each in (root.values, root.kept) if each is not None]
            place = address(root, root.at(recorder, sources[root]))
            recorder.levels[root] = max(*read, recorder.level_of(place))
            recorder.accesses.append(Access(root.target, place, write=True, gathered=True))
        else:
            recorder.levels[root] = recorder.read(root, places[root])
    overwriting = [root for root in roots if isinstance(root, Pointwise) and root.target]
    targets = {root.target: address(root.target, places[root]) for root in overwriting}
    for access in recorder.accesses:
        if access.node in targets and (access.gathered or access.offset != targets[access.node]):
            error = CannotFuse("it would overwrite elements that others still read")
            error.overwrites = next(root for root in overwriting if root.target is access.node)
            raise error
    return Layout(dims, places, sources, full, recorder, walk, online)


def behind_views(node: Node, index) -> tuple[Node, tuple]:
    while isinstance(node, View):
        node, index = node.source, node.back(index)
    return node, index


def running_maximum(root: Reduction, roots, sources, places) -> Reduction | None:
    """The maximum m where root is the sum of exp(x - m) over the same x: softmax, which one pass over x can do."""
    if root.kind != "sum" or root.walked:
        return None
    try:
        total, index = behind_views(root.source, sources[root])
        if getattr(total, "op", "") != "exp":
            return None
        apart, index = behind_views(total.args[0], index)
        if getattr(apart, "op", "") != "sub" or apart.compute is torch.float64:
            return None
        maximum, at = behind_views(apart.args[1], index)
        if maximum not in roots or getattr(maximum, "kind", "") != "max" or at != places.get(maximum):
            return None
        same_x = behind_views(apart.args[0], index) == behind_views(maximum.source, sources[maximum])
        return maximum if same_x else None
    except (Split, Uneven):  # a reshape lies between
        return None


def linear(dims: list[Dim]) -> Affine:
    strides = row_major([dim.size for dim in dims])
    return Affine.of(dict(zip(dims, strides, strict=True)))


# ---------------------------------------------------------------------------------------------- kernels
@dataclass(eq=False)
class Kernel:
    """Roots that are computed together; `stored` are those that need memory."""

    roots: list[Node]
    layout: Layout | None = None
    stored: list[Node] = field(default_factory=list)
    name: str = ""

    @property
    def serial(self) -> int:
        return max(root.serial for root in self.roots)

    @property
    def reads(self) -> set[Node]:
        own = set(self.roots)
        return {each for root in self.roots for each in leaves(root) if each not in own}

    @property
    def numel(self) -> tuple[Size, Size]:
        roots = [root for root in self.roots if not getattr(root, "walked", False)] or self.roots
        shape, reduced = max((loops_of(root) for root in roots), key=lambda loops: (len(loops[1]) > 0, len(loops[0])))
        return product(shape), product(size for i, size in enumerate(shape) if i not in reduced)


def leaves(node: Node) -> set[Node]:
    """The memory that computing `node` reads."""
    found, todo, seen = set(), list(node.sources), set()
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        if each.stored and not isinstance(each, View):
            found.add(each)
        else:
            todo.extend(each.sources)
    return found


def base_of(node: Node) -> Node:
    while isinstance(node, View):
        node = node.source
    return node


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
        self.needed = {base_of(each) for each in lowered.outputs if isinstance(each, Node)}
        for call in lowered.externs:
            self.needed |= {base_of(each) for each in call.reads}
        self.needed |= set(lowered.mutations)
        self.choose_roots()
        self.settle_reshapes()
        self.steps: list[Kernel | Extern] = [*lowered.externs, *(Kernel([root]) for root in self.roots)]
        self.merge_all()
        self.walk_rows()
        self.recompute()
        self.order()

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
        order, seen, users = [], set(), {}
        stack = [(node, False) for node in sorted(self.needed, key=lambda node: -node.serial)]
        while stack:  # depth first, without recursion: graphs are deep
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack.extend((each, False) for each in node.sources)
        for node in order:
            for each in node.sources:
                users.setdefault(each, []).append(node)
        uses: dict[Node, int] = {}
        for node in reversed(order):
            count = 0
            for user in users.get(node, ()):
                count += 1 if isinstance(user, (Pointwise, Reduction, Scatter)) else max(uses[user], 1)
            uses[node] = min(count, 4)
        weight = {}
        for node in order:
            if isinstance(node, Reduction) or (isinstance(node, Pointwise) and node in self.needed):
                node.stored = True
            if isinstance(node, Scatter):
                self.needed.add(node.target)
            weight[node] = int(isinstance(node, (Pointwise, Pieces)))
            weight[node] += sum(0 if each.stored else weight[each] for each in node.sources)
            if isinstance(node, Pointwise) and not node.stored:
                many = uses[node] > 1 and not self.is_cheap(node, weight[node])
                node.stored = many or weight[node] > MOST_OPS
        self.roots = [node for node in order if node.stored and isinstance(node, (Pointwise, Reduction, Scatter))]

    def settle_reshapes(self) -> None:
        """Stores the source of each reshape that no loops of a kernel agree with: then its elements have an address."""
        todo = list(self.roots)
        while todo:
            root = todo.pop()
            try:
                lay_out([root])
            except CannotFuse as error:
                if error.overwrites is not None:
                    source = self.lowered.copy(root.args[0])
                    root.args = (source,)
                    self.roots.append(source)
                    todo += [source, root]
                    continue
                if error.view is None:
                    raise
                source = error.view.source
                if not (isinstance(source, (Pointwise, Reduction)) and is_row_major(source)):
                    source = error.view.source = self.lowered.copy(source)
                source.stored = True
                if source not in self.roots:
                    self.roots.append(source)
                    todo.append(source)
                todo.append(root)

    def is_cheap(self, node: Node, weight: int) -> bool:
        """Computed again where it is read: of no memory, or a few operations on one tensor that is no larger."""
        read = leaves(node)
        if not read:
            return weight <= 16
        return weight <= 3 and len(read) == 1 and self.bytes_of(next(iter(read))) <= self.bytes_of(node)

    # ------------------------------------------------------------------------------------------ merging
    def merge_all(self) -> None:
        self.prepare()
        for _ in range(8):
            if not self.merge_round():
                return

    def prepare(self) -> None:
        """Bits: each step is one; `before` has those that a step waits for, directly or not."""
        steps = self.steps
        self.bit = {step: 1 << i for i, step in enumerate(steps)}
        self.memory_read = {step: self.reads_of(step) for step in steps}
        maker = self.makers()
        direct: dict = {step: {maker[each] for each in self.memory_read[step] if each in maker} for step in steps}
        readers: dict[Node, list] = {}
        for step in steps:
            for each in self.memory_read[step]:
                readers.setdefault(each, []).append(step)
        for step in steps:
            for root in step.roots if isinstance(step, Kernel) else ():
                if getattr(root, "target", None) is not None:
                    direct[step] |= {each for each in readers.get(root.target, ()) if each is not step}
        random = [step for step in steps if isinstance(step, Extern) and step.random]
        for first, second in itertools.pairwise(random):
            direct[second].add(first)
        self.direct, self.before = direct, {}
        for step in topological(steps, direct):
            bits = 0
            for each in direct[step]:
                bits |= self.bit[each] | self.before[each]
            self.before[step] = bits

    def makers(self) -> dict[Node, Kernel | Extern]:
        found = {}
        for step in self.steps:
            for each in step.roots if isinstance(step, Kernel) else [result for _, result in step.outputs]:
                found[each] = step
        return found

    @staticmethod
    def reads_of(step) -> set[Node]:
        return step.reads if isinstance(step, Kernel) else {base_of(each) for each in step.reads}

    def merge_round(self) -> bool:
        """Tries all pairs that share memory, those first that share most; whether any were merged."""
        maker, kernels = self.makers(), [step for step in self.steps if isinstance(step, Kernel)]
        place = {kernel: i for i, kernel in enumerate(sorted(kernels, key=lambda kernel: kernel.serial))}
        shared: dict[tuple, int] = {}
        touching: dict[Node, list[Kernel]] = {}
        for kernel in place:
            for each in self.memory_read[kernel]:
                touching.setdefault(each, []).append(kernel)
        for node, readers in touching.items():
            size = self.bytes_of(node)
            group = [maker[node]] if isinstance(maker.get(node), Kernel) else []
            group += readers[:MOST_NEIGHBOURS]
            for i, a in enumerate(group):
                for b in group[i + 1 : i + 9] if i else group[1:]:
                    if a is not b:
                        pair = (a, b) if place[a] < place[b] else (b, a)
                        shared[pair] = shared.get(pair, 0) + size
        readers_of: dict[Kernel, list[Kernel]] = {}
        for kernel in place:  # what reads the results of one kernel may start together, though it shares nothing
            for each in {maker[node] for node in self.memory_read[kernel] if isinstance(maker.get(node), Kernel)}:
                for other in readers_of.setdefault(each, [])[-4:]:
                    pair = (other, kernel) if place[other] < place[kernel] else (kernel, other)
                    shared[pair] = shared.get(pair, 0) + 1
                readers_of[each].append(kernel)
        fills = [kernel for kernel in place if not self.memory_read[kernel]]
        shared |= dict.fromkeys(itertools.pairwise(fills), 1)
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
        agree = same(all_a, all_b) or flat
        if not agree and not any(getattr(root, "walked", False) for root in b.roots):
            raise CannotFuse("other sizes")
        if len(a.roots) + len(b.roots) > MOST_ROOTS:
            raise CannotFuse("the kernel would be too large")
        for step in self.steps:
            if step is a or step is b:
                continue
            after_a, after_b = self.before[step] & self.bit[a], self.before[step] & self.bit[b]
            if (after_a and self.before[b] & self.bit[step]) or (after_b and self.before[a] & self.bit[step]):
                name = step.name if isinstance(step, Extern) else step.roots[0].name
                raise CannotFuse(f"{name} must run between them")
        roots = sorted({*a.roots, *b.roots}, key=lambda root: root.serial)
        both = Kernel(roots)
        reads = both.reads
        if len(reads) + len(roots) > MOST_MEMORY and len(reads) + self.stored_of(both) > MOST_MEMORY:
            raise CannotFuse("the kernel would be too large")
        both.layout = lay_out(roots)
        if both.layout.recorder.operations > 600:
            raise CannotFuse("the kernel would be too large")
        self.bit[both] = self.bit[a] | self.bit[b]
        self.before[both] = (self.before[a] | self.before[b]) & ~self.bit[both]
        self.memory_read[both] = reads
        for step in self.steps:
            if self.before[step] & self.bit[both]:
                self.before[step] |= self.before[both] | self.bit[both]
        self.steps[self.steps.index(a)] = both
        self.steps.remove(b)
        return both

    def walk_rows(self) -> None:
        """Column sums beside reductions of rows, as in the backward of a norm: a program walks over some rows, holds
        each in registers, and adds to the sums of its part of the rows. Memory is read once for both."""
        kernels = [step for step in self.steps if isinstance(step, Kernel)]
        for columns in kernels:
            if not all(isinstance(root, Reduction) and root.whole for root in columns.roots):
                continue
            for rows in [step for step in self.steps if isinstance(step, Kernel)]:
                (total, count), (theirs, _) = rows.numel, columns.numel
                if total == count or total != theirs or not isinstance(total, int) or total // count > WALKED_ROW:
                    continue
                if any(total // count != root.elements // root.shape[0] for root in columns.roots):
                    continue
                shared = (rows.reads | set(rows.roots)) & columns.reads
                short = 2048 // (total // count)  # short rows: more programs, so that enough is in flight
                most = WALKERS * max(1, min(4, short))
                parts = max((n for n in range(1, most + 1) if count % n == 0 and count // n >= 4), default=0)
                if parts * 4 < WALKERS or not any(self.hint(each.elements) == total for each in shared):
                    continue
                if self.try_walk(rows, columns, parts):
                    break

    def try_walk(self, rows: Kernel, columns: Kernel, parts: int) -> bool:
        before = [(root, root.shape, root.axes, root.source) for root in columns.roots]
        for root in columns.roots:
            self.lowered.cut_again(root, parts)
            root.walked = True
        readers = [step for step in self.steps if isinstance(step, Kernel) and set(columns.roots) & step.reads]
        try:
            layouts = {reader: lay_out(reader.roots) for reader in readers}
            self.merge(rows, columns)
        except CannotFuse:
            for root, *held in before:
                root.shape, root.axes, root.source = held
                root.walked = False
            return False
        for reader, layout in layouts.items():
            reader.layout = layout
        return True

    def stored_of(self, kernel: Kernel) -> int:
        """How many of a kernel's roots others read."""
        own = set(kernel.roots)
        others = [step for step in self.steps if not (isinstance(step, Kernel) and set(step.roots) <= own)]
        return len(own & set().union(self.needed, *(self.memory_read[step] for step in others)))

    # ------------------------------------------------------------------------------------------ store or compute again
    def recompute(self) -> None:
        """What other kernels read is computed there again where that moves fewer bytes: last roots first."""
        for root in sorted(self.roots, key=lambda root: -root.serial):
            if not isinstance(root, Pointwise) or root in self.needed:
                continue
            kernels = [step for step in self.steps if isinstance(step, Kernel)]
            readers = [kernel for kernel in kernels if root in kernel.reads]
            maker = next(kernel for kernel in kernels if root in kernel.roots)
            size, read = self.bytes_of(root), leaves(root)
            extra = sum(self.bytes_of(each) for kernel in readers for each in read - kernel.reads)
            overwritten = {getattr(each, "target", None) for kernel in kernels for each in kernel.roots}
            beside = extra >= size and read & set(maker.roots)
            if not readers or len(readers) > 4 or extra > size * (1 + len(readers)) or overwritten & read or beside:
                continue
            root.stored = False
            try:
                layouts = {kernel: lay_out(kernel.roots) for kernel in readers}
                rest = [each for each in maker.roots if each is not root]
                after = lay_out(rest) if rest else None
            except CannotFuse:
                root.stored = True
                continue
            for kernel, layout in layouts.items():
                kernel.layout = layout
            maker.roots, maker.layout = rest, after
            if not rest:
                self.steps.remove(maker)

    def order(self) -> None:
        """The steps in an order that runs, and what of each kernel is stored."""
        self.prepare()
        self.steps = topological(self.steps, self.direct)
        read_by: dict[Node, list] = {}
        for step in self.steps:
            for each in self.memory_read[step]:
                read_by.setdefault(each, []).append(step)
        for kernel in self.steps:
            if isinstance(kernel, Kernel):
                kernel.layout = kernel.layout or lay_out(kernel.roots)
                kernel.stored = [root for root in kernel.roots if root in self.needed or root in read_by]
                for root in kernel.stored:
                    for reader in read_by.get(root, ()):
                        self.explain_boundary(kernel, reader, root)

    def explain_boundary(self, kernel: Kernel, reader, root: Node) -> None:
        if isinstance(reader, Extern):
            reason = "a library call reads memory" if reader.library else "eager reads memory"
            self.boundaries.append(Boundary(root.name, reader.name, reason))
            return
        try:
            lay_out(sorted({*kernel.roots, *reader.roots}, key=lambda each: each.serial))
            reason = self.failed.get((kernel, reader)) or "something must run between them, or it would be too large"
        except CannotFuse as error:
            reason = str(error)
        self.boundaries.append(Boundary(root.name, reader.roots[-1].name, reason))


def topological(steps, direct) -> list:
    """Steps in an order that respects `direct`, the earliest in the program first."""
    waiting = {step: len(direct[step]) for step in steps}
    after: dict = {}
    for step in steps:
        for each in direct[step]:
            after.setdefault(each, []).append(step)
    ready = [(step.serial, i, step) for i, step in enumerate(steps) if not waiting[step]]
    heapq.heapify(ready)
    order, count = [], len(steps)
    while ready:
        step = heapq.heappop(ready)[2]
        order.append(step)
        for each in after.get(step, ()):
            waiting[each] -= 1
            if not waiting[each]:
                count += 1
                heapq.heappush(ready, (each.serial, count, each))
    if len(order) != len(steps):
        raise AssertionError("triton_compiler: fusion made a cycle")
    return order
