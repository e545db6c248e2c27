"""Lowering: each ATen operation of the graph becomes nodes of the loop-level IR, or a call of torch's (Extern).

Pointwise operations are those of ops.py; views are index transformations, which move nothing; reductions are sums,
maxima, minima and products, from which mean, var, argmax and any are built. What has an operation, dtype or device that
is not handled here is left to torch as a call, and explain() counts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable

import sympy
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from triton_compiler.device import INTERPRETED
from triton_compiler.fallback import LIBRARY, Unsupported, check, is_random
from triton_compiler.ops import PROMOTION, template

from triton_compiler.ir import (  # isort: skip
    ZERO, Constant, Extern, Gather, Input, Iota, Node, Pieces, Pointwise, Reduction, Scatter, Size, Uneven, View,
    flatten, product, row_major, same_strides, size_of, strided_view, strides_behind, unflatten,
)  # fmt: skip

aten = torch.ops.aten
REGISTER_ROW = 16384  # elements of a row that a program holds in registers (schedule.py)
SPLIT_PROGRAMS = 512  # a reduction to few results is split until it has so many programs


class Lowering:
    """One graph: `values` has, for each fx node, its Node, a tuple of them, or a host number."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.gm, self.values, self.only_device = gm, {}, device_of(gm)
        self.inputs: list[Input | Size] = []
        self.externs: list[Extern] = []
        self.mutations: list[Pointwise] = []
        self.outputs: list = []
        self.fallbacks: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.copies: dict[tuple, Node] = {}
        for node in gm.graph.nodes:
            getattr(self, f"run_{node.op}")(node)

    @property
    def shape(self) -> tuple[Size, ...]:
        """The sizes that torch says the operation being lowered has."""
        return sizes(self.meta)

    # ------------------------------------------------------------------------------------------ the graph
    def run_placeholder(self, fx) -> None:
        value = fx.meta.get("val")
        self.values[fx] = self.new_input(value, fx.name) if isinstance(value, torch.Tensor) else size_of(value)
        self.inputs.append(self.values[fx])

    def run_get_attr(self, fx) -> None:
        value = operator.attrgetter(fx.target)(self.gm)
        if isinstance(value, torch.Tensor):
            call = Extern(lambda held=value: held, (), {}, fx.name, library=True)
            self.externs.append(call)
            value = self.result(call, (), value)
        self.values[fx] = value

    def run_output(self, fx) -> None:
        for each in fx.args[0]:
            value = self.values[each] if isinstance(each, torch.fx.Node) else each
            self.outputs.append(self.output(value, each.meta["val"]) if isinstance(value, Node) else value)

    def output(self, node: Node, meta: torch.Tensor) -> Node:
        """As memory, with the strides that torch says: whoever reads an output was traced with these."""
        node = self.realize(node)
        if getattr(node, "producer", None) is not None or meta.layout is not torch.strided or not node.elements:
            return node
        strides = tuple(map(size_of, meta.stride()))
        have = strided_view(node)[1] if isinstance(node, View) else node.memory_strides
        return node if same_strides(node.shape, have, strides) else self.copy(node, strides)

    def run_call_function(self, fx) -> None:
        value, name = fx.meta.get("val"), getattr(fx.target, "__name__", str(fx.target)).split(".")[0]
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and "unbacked_bindings" not in fx.meta:
            self.values[fx] = size_of(value.node.expr)
            return
        if name == "getitem":
            self.values[fx] = self.values[fx.args[0]][fx.args[1]]
            return
        args, kwargs = map_arg((fx.args, fx.kwargs), self.values.__getitem__)
        try:
            if not (isinstance(fx.target, torch._ops.OpOverload) and fx.target.namespace in ("aten", "prims")):
                raise Unsupported("not an operation of ATen")
            check(fx, value, self.only_device)
            self.fx, self.meta = fx, value
            self.values[fx] = self.mutated(*args[:2]) if name == "copy_" else self.lower(name, args, kwargs)
        except (Unsupported, TypeError, ValueError, IndexError, AttributeError, AssertionError) as error:
            reason = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            self.values[fx] = self.extern(fx, name in LIBRARY, reason)

    def lower(self, name: str, args, kwargs) -> Node | tuple:
        if name in PROMOTION and not kwargs.get("decimals") and args:
            tensors = [each for each in args if isinstance(each, (Node, int, float, bool, sympy.Expr))]
            result = self.pointwise(name, tensors, PROMOTION[name])
        elif name in TABLE:
            result = TABLE[name](self, *args, **kwargs)
        elif hasattr(self, f"op_{name}"):
            result = getattr(self, f"op_{name}")(*args, **kwargs)
        else:
            raise Unsupported("no lowering")
        for node, meta in zip(*map(tree_leaves, (result, self.meta)), strict=True):
            if tuple(node.shape) != sizes(meta) or node.dtype != meta.dtype:
                told = f"{tuple(meta.shape)} {meta.dtype}"
                raise Unsupported(f"lowered to {node.shape} {node.dtype}, and torch says {told}")
            if not node.stored:
                told = tuple(map(size_of, meta.stride()))
                node.strides = strides_behind(node) if isinstance(node, Reduction) else told
                node.name = node.name or self.fx.name
        return result

    def as_traced(self, fx):
        """What a call of torch's takes for a node of the graph: of a reduction, memory as torch would have it."""
        value = self.values[fx]
        return self.output(value, fx.meta["val"]) if isinstance(getattr(value, "base", None), Reduction) else value

    def extern(self, fx, library: bool, reason: str):
        """A call of torch's, with its arguments as memory."""
        if not library:
            self.fallbacks[str(fx.target)] = self.fallbacks.get(str(fx.target), 0) + 1
            self.reasons[str(fx.target)] = reason
        args, kwargs = map_arg((fx.args, fx.kwargs), self.as_traced)
        args, kwargs = tree_map(lambda x: self.realize(x) if isinstance(x, Node) else x, (args, kwargs))
        call = Extern(fx.target, tuple(args), kwargs, fx.name, [], library, reason=reason, random=is_random(fx.target))
        call.reads = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Node)]
        self.externs.append(call)
        value = fx.meta.get("val")
        if isinstance(value, (tuple, list)):
            return tuple(self.result(call, (i,), each) for i, each in enumerate(value))
        return self.result(call, (), value)

    def result(self, call: Extern, path: tuple[int, ...], value):
        """What a call returns at this place: memory, or a number that is known when it was called."""
        if isinstance(value, torch.Tensor):
            result = self.new_input(value, call.name + "".join(f"_{i}" for i in path), call)
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            result = size_of(value.node.expr)
        else:
            return value
        call.outputs.append((path, result))
        return result

    # ------------------------------------------------------------------------------------------ memory
    def new_input(self, value: torch.Tensor, name: str, producer: Extern | None = None) -> Input:
        strides = tuple(map(size_of, value.stride())) if value.layout is torch.strided else None
        return Input(sizes(value), value.dtype, value.device, name, strides, producer=producer)

    def realize(self, node: Node) -> Node:
        """The same tensor as memory: stored, or a strided view of what is stored."""
        if isinstance(node, (Pointwise, Reduction)):
            node.stored = True
        if node.stored:
            return node
        if isinstance(node, View) and (node.base.stored or isinstance(node.base, (Pointwise, Reduction))):
            with contextlib.suppress(Uneven):
                strided_view(node)
                self.realize(node.base)
                return node
            (source,) = node.args
            if isinstance(source, View) and source.elements == node.elements:
                made = dataclasses.replace(node, args=(self.realize(source),))  # a view of a copy that others may read
                with contextlib.suppress(Uneven):
                    strided_view(made)
                    return made
        return self.copy(node, node.strides)  # a constant, a gather, a cat, or a view that no strides describe

    def copy(self, node: Node, strides=None) -> Node:
        """The same tensor in memory of its own."""
        if (node, strides) not in self.copies:
            name = node.name + "_copy"
            copy = Pointwise(node.shape, node.dtype, node.device, name, strides, True, (node,), compute=node.dtype)
            self.copies[node, strides] = copy
        return self.copies[node, strides]

    def mutated(self, target, source) -> Pointwise:
        """copy_ onto an input of the graph: what functionalization leaves of an in-place operation."""
        if not (isinstance(target, Input) and target.producer is None and isinstance(source, Node)):
            raise Unsupported("a copy onto what is no input")
        node = Pointwise(target.shape, target.dtype, target.device, self.fx.name, target.strides, True,
                         (self.expand(source, target.shape),), target, compute=target.dtype)  # fmt: skip
        self.mutations.append(node)
        return node

    # ------------------------------------------------------------------------------------------ pointwise
    @staticmethod
    def promoted(args, kind=KIND.DEFAULT) -> tuple[torch.dtype, torch.dtype]:
        """(dtype to compute in, dtype of the result): torch's promotion looks at dtypes and ranks alone."""
        stand_ins = [torch.empty((1,) * len(each.shape), dtype=each.dtype, device="meta") if isinstance(each, Node)
                     else 0 if isinstance(each, sympy.Expr) else each for each in args]  # fmt: skip
        return elementwise_dtypes(*stand_ins, type_promotion_kind=kind)

    def pointwise(self, op: str, args, kind=KIND.DEFAULT) -> Node:
        """A Pointwise of these nodes and numbers, with torch's promotion of types."""
        compute, result = self.promoted(args, kind)
        return self.build(op, args, result, compute, self.shape)

    def build(self, op: str, args, dtype, compute=None, shape=None) -> Node:
        """A Pointwise without promotion: arguments are broadcast, numbers become constants."""
        shape = broadcast([each.shape for each in args if isinstance(each, Node)]) if shape is None else shape
        compute = compute or dtype
        if template(op, compute) is None:
            raise Unsupported(f"{op} of {compute}")
        ready = tuple(self.expand(self.moved(each), shape) if isinstance(each, Node)
                      else Constant(shape, compute, self.device, number=each) for each in args)  # fmt: skip
        return Pointwise(shape, dtype, self.device, self.fx.name, args=ready, op=op, compute=compute)

    @property
    def device(self) -> torch.device:
        return tree_leaves(self.meta)[0].device

    def moved(self, node: Node) -> Node:
        """A number that is a tensor of the CPU, on the GPU."""
        if node.device == self.device:
            return node
        call = Extern(aten._to_copy.default, (self.realize(node),), {"device": self.device}, f"{node.name}_moved",
                      library=True, reads=[self.realize(node)])  # fmt: skip
        self.externs.append(call)
        result = Input((), node.dtype, self.device, call.name, (), producer=call)
        call.outputs.append(((), result))
        return result

    def cast(self, node: Node, dtype, always=False) -> Node:
        return node if node.dtype is dtype and not always else self.build("identity", [node], dtype)

    def scaled(self, op, a, b, alpha=1):
        """a + alpha * b, or a - alpha * b."""
        if alpha == 1:
            return self.pointwise(op, [a, b])
        compute, result = self.promoted([a, b])
        scaled = self.build("mul", [b, alpha], compute, compute, None if isinstance(b, Node) else ())
        return self.build(op, [a, scaled], result, compute, self.shape)

    def op_div(self, a, b, rounding_mode=None):
        if rounding_mode is None:
            return self.pointwise("div", [a, b], KIND.INT_TO_FLOAT)
        kind = "float" if self.meta.dtype.is_floating_point else "int"
        return self.pointwise(f"div_{rounding_mode}_{kind}", [a, b])

    def op_pow(self, a, b):
        simple = {1: "identity", 2: "square", 3: "cube"}
        if self.meta.dtype.is_floating_point:
            simple |= {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal", -2: "reciprocal_square"}
        if type(b) in (int, float) and b in simple:
            return self.pointwise(simple[b], [a], KIND.BOOL_TO_LONG)
        if not self.meta.dtype.is_floating_point:
            raise Unsupported("a power of integers")
        return self.pointwise("pow", [a, b], KIND.BOOL_TO_LONG)

    def op_where(self, condition, a, b):
        if condition.dtype is not torch.bool:
            raise Unsupported("a condition that is not bool")
        compute, result = self.promoted([a, b], KIND.NO_OPMATH)
        return self.build("where", [condition, a, b], result, compute, self.shape)

    def op_clamp(self, x, low=None, high=None, min=None, max=None):
        low, high = min if low is None else low, max if high is None else high
        compute, result = self.promoted([each for each in (x, low, high) if each is not None])
        for op, bound in (("maximum", low), ("minimum", high)):
            x = x if bound is None else self.build(op, [x, bound], compute, compute, self.shape)
        return self.build("identity", [x], result, compute, self.shape)

    def op__to_copy(self, x, **kwargs):
        if x.device != self.meta.device:
            raise Unsupported("a copy to another device")
        return self.cast(x, self.meta.dtype, True)

    def filled(self, number) -> Constant:
        return Constant(self.shape, self.meta.dtype, self.meta.device, number=number)

    def op_arange(self, *args, **kwargs):
        start, _, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
        if not all(isinstance(each, (int, sympy.Expr)) for each in (start, step)):
            raise Unsupported("a range of floats")
        return self.cast(Iota(self.shape, torch.int64, self.meta.device, start=start, step=step), self.meta.dtype)

    # ------------------------------------------------------------------------------------------ views
    def view(self, x: Node, back: Callable, shape=None, linear: Callable | None = None) -> View:
        shape = self.shape if shape is None else tuple(shape)
        return View(shape, x.dtype, x.device, args=(x,), back=back, linear=linear)

    def along(self, x: Node, dim: int, at: Callable, shape=None) -> View:
        """A view whose index is another along one axis."""
        dim = dim % len(x.shape)
        return self.view(x, lambda index: (*index[:dim], at(index[dim]), *index[dim + 1 :]), shape)

    def expand(self, x: Node, shape) -> Node:
        shape = tuple(shape)
        if isinstance(x, Constant) or x.shape == shape:
            return x if x.shape == shape else dataclasses.replace(x, shape=shape)
        extra, fixed = len(shape) - len(x.shape), [size == 1 for size in x.shape]
        return self.view(
            x, lambda index: tuple(ZERO if one else i for one, i in zip(fixed, index[extra:], strict=True)), shape
        )

    def reshape(self, x: Node, shape) -> Node:
        while isinstance(x, View) and x.is_reshape:  # of a reshape: one of what it reshapes
            (x,) = x.args
        shape, old = tuple(shape), x.shape
        if isinstance(x, Constant) or shape == old:
            return x if shape == old else dataclasses.replace(x, shape=shape)
        kept = [axis for axis, size in enumerate(shape) if size != 1]
        only_ones = [shape[axis] for axis in kept] == [size for size in old if size != 1]  # come or go

        def back(index):
            if not only_ones:
                return unflatten(flatten(index, shape), old)
            rest = iter(kept)
            return tuple(ZERO if size == 1 else index[next(rest)] for size in old)

        made = self.view(x, back, shape, lambda index: flatten(index, shape))
        made.is_reshape = True
        return made

    def op_as_strided(self, x, shape, strides, offset=None):
        fake = self.fx.args[0].meta["val"]
        static = all(isinstance(n, int) for n in (*shape, *strides))
        if not fake.is_contiguous() or offset or fake.storage_offset() or not static:
            raise Unsupported("other memory than a contiguous tensor's")

        def linear(index):
            return sum(map(operator.mul, index, strides), ZERO)

        return self.view(x, lambda index: unflatten(linear(index), x.shape), linear=linear)

    def op_permute(self, x, order):
        order = [each % len(x.shape) for each in order]
        inverse = [order.index(axis) for axis in range(len(order))]
        return self.view(x, lambda index: tuple(index[i] for i in inverse))

    def op_repeat(self, x, times):
        old = (1,) * (len(times) - len(x.shape)) + x.shape
        lone = self.reshape(x, [size for one in old for size in (1, one)])
        apart = [size for pair in zip(times, old, strict=True) for size in pair]
        return self.reshape(self.expand(lone, apart), self.shape)

    def op_slice(self, x, dim=0, start=None, end=None, step=1):
        start, size = start or 0, x.shape[dim]
        if isinstance(start, int) and isinstance(size, int):
            start = min(max(start + size if start < 0 else start, 0), size)
        elif start != 0:
            raise Unsupported("a slice from a dynamic place")
        return self.along(x, dim, lambda i: i * step + start)

    def op_split_with_sizes(self, x, lengths, dim=0):
        starts = itertools.accumulate(lengths, initial=0)
        return tuple(self.along(x, dim, lambda i, start=start: i + start, sizes(meta))
                     for meta, start in zip(self.meta, starts, strict=False))  # fmt: skip

    def op_select(self, x, dim, at):
        dim, size = dim % len(x.shape), x.shape[dim]
        if not isinstance(at, int):
            raise Unsupported("a dynamic place")
        return self.view(x, lambda index: (*index[:dim], ZERO + (at + size if at < 0 else at), *index[dim:]))

    def op_flip(self, x, dims):
        for dim in dims:
            size = x.shape[dim]
            x = x if size == 1 else self.along(x, dim, lambda i, size=size: i * -1 + (size - 1))
        return x

    def op_diagonal(self, x, offset=0, dim1=0, dim2=1):
        starts = {dim1 % len(x.shape): max(-offset, 0), dim2 % len(x.shape): max(offset, 0)}

        def back(index):
            rest = iter(index[:-1])
            return tuple(index[-1] + starts[i] if i in starts else next(rest) for i in range(len(x.shape)))

        return self.view(x, back)

    def op_unfold(self, x, dim, size, step):
        dim = dim % len(x.shape)
        return self.view(x, lambda index: (*index[:dim], index[dim] * step + index[-1], *index[dim + 1 : -1]))

    # ------------------------------------------------------------------------------------------ pieces
    def pieces(self, axis, nodes, ranges, shape=None) -> Pieces:
        shape = self.shape if shape is None else tuple(shape)
        nodes = tuple(self.cast(each, self.meta.dtype) for each in nodes)
        return Pieces(shape, self.meta.dtype, self.device, args=nodes, axis=axis, ranges=tuple(ranges))

    def op_cat(self, tensors, dim=0):
        rank, at, ranges = len(self.shape), 0, []
        tensors = [each for each in tensors if each.elements != 0 and len(each.shape) == rank]
        for each in tensors:
            ranges.append((at, size_of(at + each.shape[dim])))
            at = ranges[-1][1]
        return self.pieces(dim % rank, tensors, ranges)

    def op_constant_pad_nd(self, x, pad, number=0):
        if not all(isinstance(each, int) and each >= 0 for each in pad):
            raise Unsupported("negative padding")
        given = x
        for i in range(len(pad) // 2):
            axis, (before, after), shape = len(x.shape) - 1 - i, pad[2 * i : 2 * i + 2], list(x.shape)
            if before or after:
                end = size_of(before + shape[axis])
                shape[axis] = size_of(end + after)
                rest = Constant(tuple(shape), x.dtype, x.device, number=number)
                x = self.pieces(axis, [x, rest], [(before, end)], shape)
        return x if x is not given else self.cast(x, x.dtype, True)

    def op_slice_scatter(self, x, source, dim=0, start=None, end=None, step=1):
        dim, start, size, length = dim % len(x.shape), start or 0, x.shape[dim], source.shape[dim]
        if step != 1 or not all(isinstance(each, int) for each in (start, size, length)):
            raise Unsupported("a strided or dynamic slice_scatter")
        start = min(max(start + size if start < 0 else start, 0), size)
        return self.pieces(dim, [source, x], [(start, start + length)])

    def op_as_strided_scatter(self, x, source, shape, strides, offset=None):
        """Where the view is all of a contiguous tensor, in its order."""
        fake = self.fx.args[0].meta["val"]
        every = product(shape) == product(x.shape) and same_strides(shape, strides, row_major(shape))
        if not every or offset or fake.storage_offset() or not fake.is_contiguous():
            raise Unsupported("a part of a tensor")
        return self.reshape(source, x.shape)

    # ------------------------------------------------------------------------------------------ computed places
    def gather(self, table, places, wraps=False) -> Gather:
        args = (table, *nodes_of(places))
        return Gather(self.shape, table.dtype, table.device, args=args, places=tuple(places), wraps=wraps)

    def indexed(self, x, indices) -> tuple[list, tuple[Size, ...]]:
        """The places of x[indices], and its shape."""
        if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices):
            raise Unsupported("a mask as an index")
        indices = list(indices) + [None] * (len(x.shape) - len(indices))
        given = [axis for axis, each in enumerate(indices) if each is not None]
        shape = broadcast([indices[axis].shape for axis in given])
        first = given[0] if given == list(range(given[0], given[0] + len(given))) else 0
        free = map(operator.itemgetter, [*range(first), *range(first + len(shape), len(x.shape) + len(shape))])
        places = [next(free) if each is None else (self.expand(each, shape), lambda i: i[first : first + len(shape)])
                  for each in indices]  # fmt: skip
        kept = [size for size, each in zip(x.shape, indices, strict=True) if each is None]
        return places, (*kept[:first], *shape, *kept[first:])

    @staticmethod
    def places_along(x, dim, index, select=False) -> list:
        """Places along one axis, for each element or, `select`, for each slice."""
        if not x.shape or not index.shape:
            raise Unsupported("a gather of one number")
        dim = dim % len(x.shape)
        place = (index, lambda i: (i[dim],) if select else i)
        return [place if axis == dim else operator.itemgetter(axis) for axis in range(len(x.shape))]

    def added(self, x, values, places, wraps=False, checked=True) -> Node:
        """x after `values` were added at computed places; halves are summed in float32."""
        if torch.are_deterministic_algorithms_enabled():
            raise Unsupported("atomic additions come in any order")
        dtype = torch.promote_types(x.dtype, torch.float32) if x.dtype.is_floating_point else x.dtype
        if dtype.itemsize < 4:
            raise Unsupported(f"atomic additions of {dtype}")
        memory = {"device": x.device, "name": self.fx.name, "strides": tuple(map(size_of, self.meta.stride()))}
        start = Pointwise(x.shape, dtype, stored=True, args=(x,), compute=dtype, **memory)
        values = self.cast(values, dtype)
        args, how = (start, values, *nodes_of(places)), {"wraps": wraps, "checked": checked}
        total = Scatter(x.shape, dtype, args=args, target=start, values=values, places=tuple(places), **how, **memory)
        return self.cast(total, x.dtype)

    def op_index_put(self, x, indices, values, accumulate=False, checked=True):
        if not accumulate:
            raise Unsupported("without accumulation")
        places, shape = self.indexed(x, indices)
        return self.added(x, self.expand(values, shape), places, True, checked)

    # ------------------------------------------------------------------------------------------ reductions
    def reduce(self, kind: str, x: Node, dims=None, keepdim=False) -> Node:
        """`kind` over the axes `dims` (all, where there are none); the dtype is the node's."""
        axes = axes_of(x, dims)
        shape = reduced(x.shape, axes, keepdim)
        flat = self.reshape(x, [size for size in x.shape if size != 1])
        real = [axis - x.shape[:axis].count(1) for axis in axes if x.shape[axis] != 1]
        if len(real) > 1 and real == list(range(len(real))) and contiguous_axis(flat) not in real:
            flat = self.reshape(flat, (product(flat.shape[: len(real)]), *flat.shape[len(real) :]))  # a column sum
            real = [0]
        if not real:
            return self.reshape(self.build("identity", [x], x.dtype), shape)
        return self.reshape(self.split_reduction(kind, flat, real), shape)

    def reduction(self, kind, x, axes, stored=False) -> Reduction:
        shape = reduced(x.shape, axes)
        return Reduction(shape, x.dtype, x.device, self.fx.name, None, stored, (x,), kind=kind, axes=tuple(axes))

    def split_reduction(self, kind, x, axes) -> Reduction:
        """In one step, or in two where one would leave most of the GPU idle: few results of many numbers each.

        The first step reduces each of several equal parts, in programs of their own; the second reduces the parts.
        """
        if (split := split_of(x, axes)) is None:
            return self.reduction(kind, x, axes)
        cut, first, parts = split
        partial = self.reduction(kind, self.reshape(x, cut), first, stored=True)
        if axes == list(range(len(axes))) and parts == [0]:
            partial.whole = (x, len(axes))
        return self.reduction(kind, partial, parts)

    def cut_again(self, partial: Reduction, parts: int) -> None:
        """Makes the first step of a column sum one of `parts` parts of consecutive rows."""
        x, leading = partial.whole
        rows, columns = product(x.shape[:leading]), x.shape[leading:]
        partial.shape, partial.axes = (parts, *columns), (1,)
        partial.args = (self.reshape(x, (parts, rows // parts, *columns)),)

    def op_mean(self, x, dims=None, keepdim=False, dtype=None):
        total = self.reduce("sum", self.cast(x, self.meta.dtype), dims, keepdim)
        return self.build("div", [total, count(x, dims)], self.meta.dtype, self.meta.dtype)

    def extremum(self, kind, x, dim=None, keepdim=False):
        if isinstance(dim, Node):  # max of two tensors
            return self.pointwise(kind + "imum", [x, dim])
        if dim is None:
            return self.reduce(kind, x, None, keepdim)
        return self.reduce(kind, x, [dim], keepdim), self.place(kind, x, dim, keepdim)

    def place(self, kind, x, dim=None, keepdim=False):
        """The first position of the extremum, or of NaN: a second reduction, over the positions where it stands."""
        if not x.shape:
            return self.filled(0)
        shape = reduced(x.shape, axes_of(x, dim), keepdim)
        x, dim = (self.reshape(x, (x.elements,)), 0) if dim is None else (x, dim % len(x.shape))
        here = self.build("eq_or_nan", [x, self.reduce(kind, x, [dim], True)], torch.bool, x.dtype)
        size = x.shape[dim]
        narrow = torch.int32 if isinstance(size, int) and size < 2**31 else torch.int64
        places = self.reshape(Iota((size,), narrow, x.device), [1] * dim + [size] + [1] * (len(x.shape) - dim - 1))
        first = self.build("where", [here, places, size_of(size - 1)], narrow)
        return self.reshape(self.cast(self.reduce("min", first, [dim]), torch.int64), shape)

    def op_any(self, x, dims=None, keepdim=False):
        found = self.reduce("max", self.cast(self.cast(x, torch.bool), torch.int32), dims, keepdim)
        return self.build("identity", [found], self.meta.dtype)

    def variance(self, x, dims=None, correction=None, keepdim=False):
        """(variance, mean) in two reductions, the mean first: the sum of squares alone would cancel."""
        if not x.shape:
            raise Unsupported("the variance of one number")
        dtype, n, axes = x.dtype, count(x, dims), axes_of(x, dims)
        correction, wide = 1 if correction is None else correction, torch.promote_types(dtype, torch.float32)
        x, kept = self.cast(x, wide), reduced(x.shape, axes, True)
        if 1 not in x.shape and (split := split_of(x, axes)):
            mean, squares = (self.reshape(each, kept) for each in self.variance_of_parts(x, n, *split))
        else:
            mean = self.build("div", [self.reduce("sum", x, dims, True), n], wide)
            squares = self.reduce("sum", self.squares(x, mean), dims, True)
        if isinstance(n, int) and n <= correction:
            var = self.build("div_by_zero", [squares], dtype, wide)
        else:
            var = self.build("div", [squares, n - correction], dtype, wide)
        mean, shape = self.build("identity", [mean], dtype), reduced(x.shape, axes, keepdim)
        return self.reshape(var, shape), self.reshape(mean, shape)

    def squares(self, x, mean) -> Node:
        return self.build("square", [self.build("sub", [x, mean], x.dtype)], x.dtype)

    def variance_of_parts(self, x, n, cut, first, parts):
        """(mean, sum of squares) of parts around their own means, then of these around the mean of all: memory is read
        once, for the second pass over a part finds it in a cache."""
        x, wide = self.reshape(x, cut), x.dtype
        each = product(cut[axis] for axis in first)
        sums = self.reduction("sum", x, first, stored=True)
        means = self.build("div", [sums, each], wide)
        apart = self.squares(x, self.reshape(means, reduced(x.shape, first, True)))
        inside = self.reduction("sum", apart, first, stored=True)
        mean = self.build("div", [self.reduction("sum", sums, parts), n], wide)
        moved = self.squares(means, self.reshape(mean, reduced(sums.shape, parts, True)))
        moved = self.build("add", [inside, self.build("mul", [moved, each], wide)], wide)
        return mean, self.reduction("sum", moved, parts)


# What takes a line: operation of ATen -> function of the Lowering and the operation's arguments.
TABLE: dict[str, Callable] = {
    "add": lambda low, a, b, alpha=1: low.scaled("add", a, b, alpha),
    "sub": lambda low, a, b, alpha=1: low.scaled("sub", a, b, alpha),
    **dict.fromkeys(("clone", "lift_fresh_copy"), lambda low, x, **_: low.build("identity", [x], x.dtype)),
    "convert_element_type": lambda low, x, dtype: low.cast(x, dtype, True),
    "bitwise_not": lambda low, x: low.pointwise("logical_not" if x.dtype is torch.bool else "bitwise_not", [x]),
    "copy": lambda low, x, source, *_: low.build("identity", [source], x.dtype, shape=x.shape),
    **dict.fromkeys(("full", "full_like"), lambda low, _, number, **__: low.filled(number)),
    "scalar_tensor": lambda low, number, **_: low.filled(number),
    **dict.fromkeys(("empty", "empty_strided", "new_empty_strided", "empty_permuted", "zeros", "new_zeros"),
                    lambda low, *_, **__: low.filled(0)),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_copy", "view_copy", "squeeze", "unsqueeze"),
                    lambda low, x, *_: low.reshape(x, low.shape)),
    **dict.fromkeys(("alias", "detach", "lift_fresh", "lift"), lambda low, x: low.view(x, lambda index: index)),
    "expand": lambda low, x, shape, implicit=False: low.expand(x, low.shape),
    "embedding": lambda low, table, i, *_: low.gather(table, [(i, lambda index: index[:-1]), operator.itemgetter(-1)]),
    "index_select": lambda low, x, dim, index: low.gather(x, low.places_along(x, dim, index, True)),
    "gather": lambda low, x, dim, index, **_: low.gather(x, low.places_along(x, dim, index)),
    **dict.fromkeys(("index", "_unsafe_index"), lambda low, x, i: low.gather(x, low.indexed(x, i)[0], True)),
    "scatter_add": lambda low, x, dim, index, values: low.added(
        x, low.view(values, lambda i: i, index.shape), low.places_along(x, dim, index)),
    "_unsafe_index_put": lambda low, *args: low.op_index_put(*args, checked=False),
    "sum": lambda low, x, *dims, dtype=None: low.reduce("sum", low.cast(x, low.meta.dtype), *dims),
    "prod": lambda low, x, *dims, dtype=None: low.reduce("prod", low.cast(x, low.meta.dtype), *dims),
    "amax": lambda low, x, *dims: low.reduce("max", x, *dims),
    "amin": lambda low, x, *dims: low.reduce("min", x, *dims),
    "max": lambda low, x, *dims: low.extremum("max", x, *dims),
    "min": lambda low, x, *dims: low.extremum("min", x, *dims),
    "argmax": lambda low, x, *dims: low.place("max", x, *dims),
    "argmin": lambda low, x, *dims: low.place("min", x, *dims),
    "var": lambda low, x, *dims, **rest: low.variance(x, *dims, **rest)[0],
    "var_mean": lambda low, x, *dims, **rest: low.variance(x, *dims, **rest),
}  # fmt: skip


def sizes(value: torch.Tensor) -> tuple[Size, ...]:
    return tuple(map(size_of, value.shape))


def device_of(gm: torch.fx.GraphModule) -> torch.device | None:
    """The device whose operations are compiled: that of the first tensor on a GPU; the CPU's, in the interpreter."""
    if INTERPRETED:
        return torch.device("cpu")
    values = tree_leaves([node.meta.get("val") for node in gm.graph.nodes])
    return next((each.device for each in values if isinstance(each, torch.Tensor) and each.device.type == "cuda"), None)


def broadcast(shapes) -> tuple[Size, ...]:
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            result[i] = result[i] if size == 1 else size
    return tuple(result)


def nodes_of(places) -> list[Node]:
    """The nodes whose values are positions."""
    return [place[0] for place in places if isinstance(place, tuple)]


def axes_of(x: Node, dims) -> list[int]:
    """The axes that are reduced: all, where none are named."""
    dims, rank = [dims] if isinstance(dims, int) else dims, len(x.shape)
    return sorted({dim % rank for dim in dims} if dims and rank else range(rank))


def count(x: Node, dims) -> Size:
    return product(x.shape[axis] for axis in axes_of(x, dims))


def reduced(shape, axes, keepdim=False) -> tuple[Size, ...]:
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape) if keepdim or axis not in axes)


# ---------------------------------------------------------------------------------------------- large reductions
def split_of(x: Node, axes) -> tuple[list, list, list] | None:
    """(shape with axes cut in parts, axes that the first step reduces, axes of the parts in what it leaves)."""
    many, few = product(x.shape[axis] for axis in axes), product(reduced(x.shape, axes))
    if not (isinstance(many, int) and isinstance(few, int)) or (INTERPRETED and SPLIT_PROGRAMS > 16):
        return None
    inner = contiguous_axis(x) in axes  # rows: neighbours in memory are reduced
    programs = few if inner else -(-few // 64)
    enough = SPLIT_PROGRAMS if inner and many >= 1 << 15 else SPLIT_PROGRAMS // 2  # long rows leave SMs waiting
    if many <= (REGISTER_ROW if inner else 256) or programs >= enough:
        return None
    wanted = max(1, min(SPLIT_PROGRAMS // programs, many // (4096 if inner else 64)))
    cut, first, parts, made, numbers, breaks = [], [], [], 1, {}, reshape_breaks(x)
    for axis in sorted(axes, key=lambda axis: -known_strides(x)[axis]):  # outermost in memory first
        if made < wanted:
            size, inside = x.shape[axis], product(x.shape[axis + 1 :])
            lengths = {n: size // n * inside for n in range(1, 2 * wanted // made + 1) if size % n == 0}
            numbers[axis] = max((n for n, run in lengths.items() if all(run % b == 0 or b % run == 0 for b in breaks)),
                                default=1)  # fmt: skip
            made *= numbers[axis]
    for axis, size in enumerate(x.shape):
        number = numbers.get(axis, 1)
        if number > 1:
            parts.append(len(cut) - len(first))
            cut.append(number)
        if axis not in axes or number < size:
            first += [len(cut)] if axis in axes else []
            cut.append(size // number)
    return (cut, first, parts) if made >= 4 and first else None


def known_strides(x: Node) -> list[int]:
    """The strides with which memory is read, as far as they are known: else those of a contiguous tensor."""
    try:
        strides = strided_view(x, computed=True)[1]
    except Uneven:
        strides = x.memory_strides
    return [abs(stride) if isinstance(stride, int) else 1 << 40 for stride in strides]


def contiguous_axis(x: Node) -> int:
    strides = known_strides(x)
    axes = [axis for axis, size in enumerate(x.shape) if size != 1 and strides[axis]]
    return min(axes, key=strides.__getitem__, default=len(x.shape) - 1)


def reshape_breaks(x: Node) -> set[int]:
    """The numbers of consecutive elements at which reshapes behind x cut it: parts that disagree need a copy of it."""
    found, todo = {x}, [x]
    for node in todo:
        more = node.args if isinstance(node, Pointwise) or getattr(node, "linear", None) else ()
        todo += [each for each in more if each not in found and each.elements == x.elements and len(todo) < 64]
        found |= set(more)
    return {each for node in todo for each in row_major(node.shape) if isinstance(each, int)}
