"""Lowering: each ATen operation of the graph becomes nodes of the loop-level IR, or a call of torch's (Extern).

POINTWISE says of each operation what it computes and how torch promotes types; VIEWS are index transformations, which
move nothing; reductions are sums, maxima, minima and products, of which mean, var, argmax, any and all are made. An
operation, dtype or device that is not here is called as it is, and explain() counts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import sympy
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes
from torch.utils._pytree import tree_flatten, tree_map

from triton_compiler.codegen import known
from triton_compiler.device import INTERPRETED
from triton_compiler.fallback import LIBRARY, Unsupported, check_tensor, is_random

from triton_compiler.ir import (  # isort: skip
    ZERO, Affine, Constant, Dim, Extern, Gather, Input, Iota, Node, Pieces, Pointwise, Reduction, Scatter, Size, Split,
    Uneven, View, flatten, is_row_major, product, row_major, size_of, unflatten,
)  # fmt: skip

aten = torch.ops.aten
DEFAULT, FLOAT, BOOL = KIND.DEFAULT, KIND.INT_TO_FLOAT, KIND.ALWAYS_BOOL

# Operations whose names are ATen's, by how torch promotes the types of their arguments.
FLOAT_OPS = """
exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc
erfinv lgamma sigmoid reciprocal atan2
"""
DEFAULT_OPS = """
neg abs sign floor ceil round trunc relu mul maximum minimum fmod remainder bitwise_and bitwise_or
bitwise_xor fmax fmin copysign square hypot
"""
BOOL_OPS = """
eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf
"""
# Operation of ATen -> (operation of codegen.OPS, how torch promotes the types of its arguments).
POINTWISE = {
    **{name: (name, FLOAT) for name in FLOAT_OPS.split()},
    **{name: (name, DEFAULT) for name in DEFAULT_OPS.split()},
    **{name: (name, BOOL) for name in BOOL_OPS.split()},
    "bitwise_left_shift": ("shift_left", DEFAULT), "bitwise_right_shift": ("shift_right", DEFAULT),
    "__lshift__": ("shift_left", DEFAULT), "__rshift__": ("shift_right", DEFAULT),
    "clone": ("identity", DEFAULT), "lift_fresh_copy": ("identity", DEFAULT), "contiguous": ("identity", DEFAULT),
}  # fmt: skip

ZEROS = """
zeros zeros_like empty empty_like empty_strided new_zeros new_empty new_empty_strided empty_permuted
"""
RESHAPES = "view _unsafe_view reshape _reshape_copy view_copy squeeze unsqueeze"
ALIASES = "alias detach lift_fresh lift"

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool,
)  # fmt: skip
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
        if isinstance(value, torch.Tensor):
            self.values[fx] = self.new_input(value, fx.name)
        else:
            self.values[fx] = size_of(value) if isinstance(value, torch.SymInt) else value
        self.inputs.append(self.values[fx])

    def run_get_attr(self, fx) -> None:
        value = self.gm
        for part in fx.target.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            call = Extern(lambda held=value: held, (), {}, fx.name, library=True)
            self.externs.append(call)
            value = self.new_input(value, fx.name, call)
            call.outputs.append(((), value))
        self.values[fx] = value

    def run_output(self, fx) -> None:
        for each in fx.args[0]:
            value = self.values[each] if isinstance(each, torch.fx.Node) else each
            self.outputs.append(self.output(value, each.meta["val"]) if isinstance(value, Node) else value)

    def output(self, node: Node, meta: torch.Tensor) -> Node:
        """As memory, with the strides that torch says: whoever reads an output was traced with these."""
        strides = tuple(map(size_of, meta.stride())) if meta.layout is torch.strided else None
        node = self.realize(node)
        if (isinstance(node, Input) and node.producer is not None) or strides is None:
            return node
        have = strided_view(node)[1] if isinstance(node, View) else node.strides or tuple(row_major(node.shape))
        if all(size == 1 or a == b for size, a, b in zip(node.shape, have, strides, strict=True)) or not node.elements:
            return node
        return self.copy(node, strides)

    def run_call_function(self, fx) -> None:
        value = fx.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and "unbacked_bindings" not in fx.meta:
            self.values[fx] = size_of(value) if isinstance(value, torch.SymInt) else value.node.expr
            return
        name = getattr(fx.target, "__name__", str(fx.target)).split(".")[0]
        if name == "getitem":
            self.values[fx] = self.values[fx.args[0]][fx.args[1]]
            return
        args, kwargs = tree_map(
            self.argument, (list(fx.args), dict(fx.kwargs)), is_leaf=lambda x: isinstance(x, torch.fx.Node)
        )
        try:
            if not (isinstance(fx.target, torch._ops.OpOverload) and fx.target.namespace in ("aten", "prims")):
                raise Unsupported("not an operation of ATen")
            if fx.target is aten.copy_.default and self.mutate(fx, args):
                return
            self.check(fx, value)
            self.values[fx] = self.lower(fx, name, args, kwargs, value)
        except (Unsupported, TypeError, ValueError, IndexError, AttributeError, AssertionError) as error:
            reason = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            self.values[fx] = self.extern(fx, args, kwargs, value, reason)

    def argument(self, value):
        if isinstance(value, torch.fx.Node):
            return self.values[value]
        return size_of(value) if isinstance(value, torch.SymInt) else value

    def check(self, fx, value) -> None:
        """Raises Unsupported where a tensor of this operation is nothing that a kernel of ours reads or writes."""
        device = None
        for each in tree_flatten(value)[0]:
            check_tensor(each, DTYPES)
            device = each.device
        if device != self.only_device:
            raise Unsupported(f"device {device}")
        for arg in fx.all_input_nodes:
            for each in tree_flatten(arg.meta.get("val"))[0]:
                if isinstance(each, torch.Tensor):
                    check_tensor(each, DTYPES)
                    if each.device != device and not (each.device.type == "cpu" and each.ndim == 0):
                        raise Unsupported("tensors of two devices")

    def extern(self, fx, args, kwargs, value, reason: str):
        """A call of torch's, with its arguments as memory."""
        name = str(fx.target)
        library = name.split("::")[-1].split(".")[0 if "::" in name else 1] in LIBRARY if "." in name else False
        if not library:
            self.fallbacks[name] = self.fallbacks.get(name, 0) + 1
            self.reasons[name] = reason
        args, kwargs = tree_map(lambda x: self.realize(x) if isinstance(x, Node) else x, (args, kwargs))
        call = Extern(
            fx.target, tuple(args), kwargs, fx.name, library=library, reason=reason, random=is_random(fx.target)
        )
        call.reads = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Node)]
        self.externs.append(call)

        def output(path, each):
            if isinstance(each, torch.Tensor):
                result = self.new_input(each, fx.name + "".join(f"_{i}" for i in path), call)
            elif isinstance(each, (torch.SymInt, torch.SymFloat)):
                result = size_of(each) if isinstance(each, torch.SymInt) else each.node.expr
            else:
                return each
            call.outputs.append((path, result))
            return result

        outputs = (
            tuple(output((i,), each) for i, each in enumerate(value)) if isinstance(value, (tuple, list)) else None
        )
        return output((), value) if outputs is None else outputs

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
        base = node
        while isinstance(base, View):
            base = base.source
        if isinstance(node, View) and (base.stored or isinstance(base, (Pointwise, Reduction))):
            try:
                strided_view(node)
                self.realize(base)
                return node
            except Uneven:
                source = node.source
            if isinstance(source, View) and product(source.shape) == node.elements:
                stored = self.realize(source)  # a view of the source's copy, which others may read, too
                with contextlib.suppress(Uneven):
                    made = dataclasses.replace(node, source=stored)
                    strided_view(made)
                    return made
        return self.copy(node, node.strides)  # a constant, a gather, a cat, or a view that no strides describe

    def copy(self, node: Node, strides=None) -> Node:
        """The same tensor in memory of its own."""
        if (node, strides) not in self.copies:
            shape, dtype, name = node.shape, node.dtype, node.name + "_copy"
            copy = Pointwise(shape, dtype, node.device, name, strides, True, args=(node,), compute=dtype)
            self.copies[node, strides] = copy
        return self.copies[node, strides]

    def mutate(self, fx, args) -> bool:
        """copy_ onto an input of the graph: what functionalization leaves of an in-place operation."""
        target, source = args[0], args[1]
        if not (isinstance(target, Input) and target.producer is None and isinstance(source, Node)):
            return False
        try:
            self.check(fx, fx.meta["val"])
        except Unsupported:
            return False
        source = self.expand(source, target.shape)
        node = Pointwise(target.shape, target.dtype, target.device, fx.name, target.strides, True, args=(source,),
                         compute=target.dtype, target=target)  # fmt: skip
        self.mutations.append(node)
        self.values[fx] = node
        return True

    # ------------------------------------------------------------------------------------------ operations
    def lower(self, fx, name: str, args, kwargs, value) -> Node | tuple:
        self.fx, self.meta = fx, value
        if name in POINTWISE and not kwargs.get("decimals") and len(args) + len(kwargs) > 0:
            op, kind = POINTWISE[name]
            tensors = [each for each in args if isinstance(each, (Node, int, float, bool, sympy.Expr))]
            result = self.pointwise(op, tensors, kind)
        elif name in TABLE:
            result = TABLE[name](self, *args, **kwargs)
        elif hasattr(self, f"op_{name}"):
            result = getattr(self, f"op_{name}")(*args, **kwargs)
        else:
            raise Unsupported("no lowering")
        several = isinstance(result, (tuple, list))
        for node, meta in zip(result if several else (result,), value if several else (value,), strict=True):
            if tuple(node.shape) != sizes(meta) or node.dtype != meta.dtype:
                raise Unsupported(
                    f"lowered to {node.shape} {node.dtype}, and torch says {tuple(meta.shape)} {meta.dtype}"
                )
            if not node.stored:
                node.strides, node.name = tuple(map(size_of, meta.stride())), node.name or fx.name
        return result

    @staticmethod
    def promoted(args, kind=DEFAULT) -> tuple[torch.dtype, torch.dtype]:
        """(dtype to compute in, dtype of the result): torch's promotion looks at dtypes and ranks alone."""
        stand_ins = [torch.empty((1,) * len(each.shape), dtype=each.dtype, device="meta") if isinstance(each, Node)
                     else 0 if isinstance(each, sympy.Expr) else each for each in args]  # fmt: skip
        return elementwise_dtypes(*stand_ins, type_promotion_kind=kind)

    def pointwise(self, op: str, args, kind=DEFAULT) -> Node:
        """A Pointwise of these nodes and numbers, with torch's promotion of types."""
        compute, result = self.promoted(args, kind)
        return self.build(op, args, result, compute, self.shape)

    def build(self, op: str, args, dtype, compute=None, shape=None) -> Node:
        """A Pointwise without promotion: arguments are broadcast, numbers become constants."""
        nodes = [each for each in args if isinstance(each, Node)]
        shape = shape if shape is not None else broadcast([each.shape for each in nodes])
        device = self.device()
        compute = compute or dtype
        if not known(op, compute):
            raise Unsupported(f"{op} of {compute}")
        ready = []
        for each in args:
            if not isinstance(each, Node):
                each = Constant(shape, compute, device, number=each)
            elif each.device != device:
                each = self.move(each, device)
            ready.append(self.expand(each, shape))
        return Pointwise(shape, dtype, device, self.fx.name, op=op, args=tuple(ready), compute=compute)

    def device(self) -> torch.device:
        return next(each.device for each in tree_flatten(self.meta)[0] if isinstance(each, torch.Tensor))

    def move(self, node: Node, device) -> Input:
        """A number that is a tensor of the CPU, to the GPU."""
        node = self.realize(node)
        name = f"{node.name}_moved"
        call = Extern(aten._to_copy.default, (node,), {"device": device}, name, library=True, reads=[node])
        result = Input(node.shape, node.dtype, device, call.name, node.shape, producer=call)
        call.outputs.append(((), result))
        self.externs.append(call)
        return result

    def expand(self, node: Node, shape) -> Node:
        shape = tuple(shape)
        if node.shape == shape:
            return node
        if isinstance(node, Constant):
            return Constant(shape, node.dtype, node.device, number=node.number)
        extra = len(shape) - len(node.shape)
        fixed = [size == 1 for size in node.shape]

        def back(index):
            return tuple(ZERO if one else i for one, i in zip(fixed, index[extra:], strict=True))

        return self.view(node, shape, back)

    def view(self, node: Node, shape, back: Callable) -> View:
        return View(tuple(shape), node.dtype, node.device, source=node, back=back)

    def cast(self, node: Node, dtype, always=False) -> Node:
        return node if node.dtype is dtype and not always else self.build("identity", [node], dtype)

    # ------------------------------------------------------------------------------------------ pointwise with a twist
    def scaled(self, op, a, b, alpha=1):
        """a + alpha * b, or a - alpha * b."""
        if alpha == 1:
            return self.pointwise(op, [a, b])
        compute, result = self.promoted([a, b])
        scaled = self.build("mul", [b, alpha], compute, compute, None if isinstance(b, Node) else ())
        return self.build(op, [a, scaled], result, compute, self.shape)

    def op_div(self, a, b, rounding_mode=None):
        kind = "float" if self.meta.dtype.is_floating_point else "int"
        return (
            self.pointwise(f"div_{rounding_mode}_{kind}", [a, b])
            if rounding_mode
            else self.pointwise("div", [a, b], FLOAT)
        )

    def op_pow(self, a, b):
        integral = not self.meta.dtype.is_floating_point
        if isinstance(b, (int, float)) and not isinstance(b, bool):
            simple = {1: "identity", 2: "square", 3: "cube"}
            if not integral:
                simple |= {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal", -2: "reciprocal_square"}
            if b in simple:
                compute, result = self.promoted([a, b], KIND.BOOL_TO_LONG)
                return self.build(simple[b], [a], result, compute)
        if integral:
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
            if bound is not None:
                x = self.build(op, [x, bound], compute, compute, self.shape)
        return self.build("identity", [x], result, compute, self.shape)

    def op__to_copy(self, x, dtype=None, device=None, **kwargs):
        if x.device != self.meta.device:
            raise Unsupported("a copy to another device")
        return self.cast(x, self.meta.dtype, True)

    # ------------------------------------------------------------------------------------------ constants
    def filled(self, number):
        return Constant(self.shape, self.meta.dtype, self.meta.device, number=number)

    def op_arange(self, *args, **kwargs):
        start, _, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
        if not all(isinstance(each, (int, sympy.Expr)) for each in (start, step)):
            raise Unsupported("a range of floats")
        return self.cast(Iota(self.shape, torch.int64, self.meta.device, start=start, step=step), self.meta.dtype)

    # ------------------------------------------------------------------------------------------ views
    def reshape(self, x: Node, shape) -> Node:
        shape, old = tuple(shape), x.shape
        if shape == old:
            return x
        if isinstance(x, Constant):
            return Constant(shape, x.dtype, x.device, number=x.number)
        view = self.view(x, shape, lambda index: unflatten(flatten(index, shape), old))
        view.linear = lambda index: flatten(index, shape)
        return view

    def op_as_strided(self, x, shape, strides, offset=None):
        fake = self.fx.args[0].meta["val"]
        static = all(isinstance(n, int) for n in (*shape, *strides))
        if not fake.is_contiguous() or offset or fake.storage_offset() or not static:
            raise Unsupported("other memory than a contiguous tensor's")
        shape = self.shape

        def linear(index):
            return sum((each * stride for each, stride in zip(index, strides, strict=True)), ZERO)

        view = self.view(x, shape, lambda index: unflatten(linear(index), x.shape))
        view.linear = linear
        return view

    def op_permute(self, x, order):
        order = [each % len(x.shape) for each in order] if x.shape else []
        inverse = [order.index(axis) for axis in range(len(order))]
        return self.view(x, [x.shape[i] for i in order], lambda index: tuple(index[i] for i in inverse))

    def op_repeat(self, x, times):
        old = (1,) * (len(times) - len(x.shape)) + x.shape
        apart = [size for pair in zip(times, old, strict=True) for size in pair]
        lone = self.reshape(x, [size for one in old for size in (1, one)])
        return self.reshape(self.expand(lone, apart), self.shape)

    def op_slice(self, x, dim=0, start=None, end=None, step=1):
        dim, start = dim % len(x.shape), 0 if start is None else start
        size = x.shape[dim]
        if isinstance(start, int) and start < 0:
            start = start + size
        if not (isinstance(start, int) and isinstance(size, int)) and start != 0:
            raise Unsupported("a slice from a dynamic place")
        start = min(max(start, 0), size) if isinstance(start, int) and isinstance(size, int) else start
        return self.sliced(x, dim, start, step, self.shape)

    def sliced(self, x, dim, start, step, shape) -> View:
        def back(index):
            return (*index[:dim], index[dim] * step + start, *index[dim + 1 :])

        return self.view(x, shape, back)

    def op_select(self, x, dim, at):
        dim = dim % len(x.shape)
        if not isinstance(at, int):
            raise Unsupported("a dynamic place")
        at = at + x.shape[dim] if at < 0 else at
        return self.view(x, x.shape[:dim] + x.shape[dim + 1 :], lambda index: (*index[:dim], ZERO + at, *index[dim:]))

    def op_split_with_sizes(self, x, lengths, dim=0):
        dim, start, parts = dim % len(x.shape), 0, []
        for meta, size in zip(self.meta, lengths, strict=True):
            parts.append(self.sliced(x, dim, start, 1, sizes(meta)))
            start = size_of(start + size)
        return tuple(parts)

    def op_flip(self, x, dims):
        dims = [dim % len(x.shape) for dim in dims]

        def back(index):
            return tuple(i * -1 + (size - 1) if axis in dims and size != 1 else i
                         for axis, (i, size) in enumerate(zip(index, x.shape, strict=True)))  # fmt: skip

        return self.view(x, x.shape, back)

    def op_diagonal(self, x, offset=0, dim1=0, dim2=1):
        a, b = dim1 % len(x.shape), dim2 % len(x.shape)

        def back(index):
            rest = list(index[:-1])
            index = [index[-1] + max(-offset, 0) if i == a else index[-1] + max(offset, 0) if i == b else rest.pop(0)
                     for i in range(len(x.shape))]  # fmt: skip
            return tuple(index)

        return self.view(x, self.shape, back)

    def op_unfold(self, x, dim, size, step):
        dim = dim % len(x.shape)

        def back(index):
            return (*index[:dim], index[dim] * step + index[-1], *index[dim + 1 : -1])

        return self.view(x, self.shape, back)

    # ------------------------------------------------------------------------------------------ pieces
    def op_cat(self, tensors, dim=0):
        rank = len(self.meta.shape)
        tensors = [each for each in tensors if each.elements != 0 and len(each.shape) == rank]
        dim, at, pieces = dim % rank, 0, []
        for each in tensors:
            pieces.append((self.cast(each, self.meta.dtype), at, size_of(at + each.shape[dim])))
            at = pieces[-1][2]
        return self.pieces(dim, pieces, None)

    def pieces(self, axis, pieces, rest) -> Pieces:
        return Pieces(self.shape, self.meta.dtype, self.device(), axis=axis, pieces=tuple(pieces), rest=rest)

    def op_constant_pad_nd(self, x, pad, number=0):
        if not all(isinstance(each, int) and each >= 0 for each in pad):
            raise Unsupported("negative padding")
        rank, shape = len(x.shape), list(x.shape)
        for i in range(len(pad) // 2):
            axis, (before, after) = rank - 1 - i, pad[2 * i : 2 * i + 2]
            if before or after:
                size = shape[axis]
                shape[axis] = size_of(size + before + after)
                rest = Constant(tuple(shape), x.dtype, x.device, number=number)
                piece = (x, before, size_of(before + size))
                x = Pieces(tuple(shape), x.dtype, x.device, axis=axis, pieces=(piece,), rest=rest)
        return x if shape != list(self.fx.args[0].meta["val"].shape) else self.build("identity", [x], x.dtype)

    def op_slice_scatter(self, x, source, dim=0, start=None, end=None, step=1):
        dim, start = dim % len(x.shape), 0 if start is None else start
        size = x.shape[dim]
        if step != 1 or not all(isinstance(each, int) for each in (start, size, source.shape[dim])):
            raise Unsupported("a strided or dynamic slice_scatter")
        start = min(max(start + size if start < 0 else start, 0), size)
        return self.pieces(dim, [(self.cast(source, x.dtype), start, start + source.shape[dim])], x)

    # ------------------------------------------------------------------------------------------ gathers
    def gather(self, table, places, wraps=False) -> Gather:
        return Gather(self.shape, table.dtype, table.device, table=table, places=tuple(places), wraps=wraps)

    def op_index(self, x, indices):
        return self.gather(x, self.indexed(x, indices)[0], True)

    op__unsafe_index = op_index

    def indexed(self, x, indices) -> tuple[list, tuple[Size, ...]]:
        """The places of x[indices], and its shape."""
        if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices):
            raise Unsupported("a mask as an index")
        indices = list(indices) + [None] * (len(x.shape) - len(indices))
        given = [axis for axis, each in enumerate(indices) if each is not None]
        shape = broadcast([indices[axis].shape for axis in given])
        together = given == list(range(given[0], given[0] + len(given)))
        first = given[0] if together else 0
        places, kept = [], 0
        for _axis, each in enumerate(indices):
            if each is not None:
                wide = self.expand(each, shape)
                places.append((wide, lambda index: index[first : first + len(shape)]))
            else:
                at = kept if kept < first else kept + len(shape)
                places.append(lambda index, at=at: index[at])
                kept += 1
        free = [size for size, each in zip(x.shape, indices, strict=True) if each is None]
        return places, (*free[:first], *shape, *free[first:])

    def op_gather(self, x, dim, index, sparse_grad=False, select=False):
        """Places along one axis, for each element or, `select`, for each slice."""
        return self.gather(x, self.along(x, dim, index, select))

    @staticmethod
    def along(x, dim, index, select=False) -> list:
        if not x.shape or not index.shape:
            raise Unsupported("a gather of one number")
        dim = dim % len(x.shape)
        place = (index, lambda i: (i[dim],) if select else i)
        return [place if axis == dim else (lambda i, axis=axis: i[axis]) for axis in range(len(x.shape))]

    # ------------------------------------------------------------------------------------------ scatters
    def added(self, x, values, places, wraps=False, checked=True, kept=None) -> Node:
        """x after `values` were added at computed places; halves are summed in float32."""
        if torch.are_deterministic_algorithms_enabled():
            raise Unsupported("atomic additions come in any order")
        dtype = torch.promote_types(x.dtype, torch.float32) if x.dtype.is_floating_point else x.dtype
        if dtype.itemsize < 4:
            raise Unsupported(f"atomic additions of {dtype}")
        memory = {"device": x.device, "name": self.fx.name, "strides": tuple(map(size_of, self.meta.stride()))}
        start = Pointwise(x.shape, dtype, stored=True, args=(x,), compute=dtype, **memory)
        values, places = self.cast(values, dtype), tuple(places)
        how = {"wraps": wraps, "checked": checked, "kept": kept}
        total = Scatter(x.shape, dtype, target=start, values=values, places=places, **how, **memory)
        return self.cast(total, x.dtype)

    def op_index_put(self, x, indices, values, accumulate=False, checked=True):
        if not accumulate:
            raise Unsupported("without accumulation")
        places, shape = self.indexed(x, indices)
        return self.added(x, self.expand(values, shape), places, True, checked)

    def op__unsafe_index_put(self, x, indices, values, accumulate=False):
        return self.op_index_put(x, indices, values, accumulate, False)

    def op_scatter_add(self, x, dim, index, values):
        return self.added(x, self.view(values, index.shape, lambda i: i), self.along(x, dim, index))

    def op_embedding_dense_backward(self, grad, index, rows, padding, by_frequency):
        if by_frequency:
            raise Unsupported("gradients scaled by frequency")
        tests = [self.build(op, [index, n], torch.bool, index.dtype) for op, n in
                 (("ge", 0), ("lt", rows), *([("ne", padding)] if padding >= 0 else []))]  # fmt: skip
        kept = functools.reduce(lambda a, b: self.build("logical_and", [a, b], torch.bool), tests)
        kept = self.view(kept, grad.shape, lambda i: i[:-1])
        places = [(index, lambda i: i[:-1]), lambda i: i[-1]]
        return self.added(self.filled(0), grad, places, checked=False, kept=kept)

    # ------------------------------------------------------------------------------------------ reductions
    def reduce(self, kind: str, x: Node, dims=None, keepdim=False) -> Node:
        """`kind` over the axes `dims` (all, where there are none); the dtype is the node's."""
        rank = len(x.shape)
        dims = [dims] if isinstance(dims, int) else dims
        axes = sorted({dim % rank for dim in dims} if dims and rank else range(rank))
        left = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape)) if keepdim else left
        flat = self.reshape(x, [size for size in x.shape if size != 1])
        real = [axis - sum(size == 1 for size in x.shape[:axis]) for axis in axes if x.shape[axis] != 1]
        if len(real) > 1 and real == list(range(len(real))) and contiguous_axis(flat) not in real:
            flat = self.reshape(flat, (product(flat.shape[: len(real)]), *flat.shape[len(real) :]))  # a column sum
            real = [0]
        if not real:
            return self.reshape(self.build("identity", [x], x.dtype), shape)
        return self.reshape(self.split_reduction(kind, flat, real), shape)

    def reduction(self, kind, x, axes) -> Reduction:
        left = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
        return Reduction(left, x.dtype, x.device, self.fx.name, kind=kind, source=x, axes=tuple(axes))

    def split_reduction(self, kind, x, axes) -> Reduction:
        """In one step, or in two where one would leave most of the GPU idle: few results of many numbers each.

        The first step reduces each of several equal parts, in programs of their own; the second reduces the parts.
        """
        if (split := self.split_of(x, axes)) is None:
            return self.reduction(kind, x, axes)
        cut, first, parts = split
        partial = self.stored(self.reduction(kind, self.reshape(x, cut), first))
        if axes == list(range(len(axes))) and parts == [0]:
            partial.whole = (x, len(axes))
        return self.reduction(kind, partial, parts)

    def cut_again(self, partial: Reduction, parts: int) -> None:
        """Makes the first step of a column sum one of `parts` parts of consecutive rows."""
        x, leading = partial.whole
        rows, columns = product(x.shape[:leading]), x.shape[leading:]
        partial.shape, partial.axes = (parts, *columns), (1,)
        partial.source = self.reshape(x, (parts, rows // parts, *columns))

    @staticmethod
    def stored(node: Node) -> Node:
        node.stored = True
        return node

    @staticmethod
    def split_of(x, axes) -> tuple[list, list, list] | None:
        """(shape with axes cut in parts, axes that the first step reduces, axes of the parts in what it leaves)."""
        many = product(x.shape[axis] for axis in axes)
        few = product(size for axis, size in enumerate(x.shape) if axis not in axes)
        if not (isinstance(many, int) and isinstance(few, int)) or (INTERPRETED and SPLIT_PROGRAMS > 16):
            return None
        inner = contiguous_axis(x) in axes  # rows: neighbours in memory are reduced
        programs = few if inner else -(-few // 64)
        enough = SPLIT_PROGRAMS if inner and many >= 1 << 15 else SPLIT_PROGRAMS // 2  # long rows leave SMs waiting
        if many <= (REGISTER_ROW if inner else 256) or programs >= enough:
            return None
        wanted = max(1, min(SPLIT_PROGRAMS // programs, many // (4096 if inner else 64)))
        cut, first, parts, made, numbers, breaks = [], [], [], 1, {}, reshape_breaks(x)
        for axis in sorted(axes, key=lambda axis: -memory_strides(x)[axis]):  # outermost in memory first
            if made < wanted:
                size, inside = x.shape[axis], product(x.shape[axis + 1 :])
                even = [n for n in divisors(size) if all((size // n * inside) % b == 0 or b % (size // n * inside) == 0
                                                         for b in breaks)]  # fmt: skip
                numbers[axis] = max((n for n in even if made * n <= 2 * wanted), default=1)
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

    def op_mean(self, x, dims=None, keepdim=False, dtype=None):
        total = self.reduce("sum", self.cast(x, self.meta.dtype), dims, keepdim)
        return self.build("div", [total, self.count(x, dims)], self.meta.dtype, self.meta.dtype)

    @staticmethod
    def count(x, dims):
        dims = [dims] if isinstance(dims, int) else dims
        return product(x.shape[dim] for dim in (dims or range(len(x.shape))))

    def extremum(self, kind, x, dim=None, keepdim=False):
        if isinstance(dim, Node):  # max of two tensors
            return self.pointwise(kind + "imum", [x, dim])
        if dim is None:
            return self.reduce(kind, x, None, keepdim)
        return self.reduce(kind, x, [dim], keepdim), self.place(kind, x, dim, keepdim)

    def place(self, kind, x, dim=None, keepdim=False):
        """The first position of the extremum, or of NaN: a second reduction, over the positions where it stands."""
        shape = tuple(1 for _ in x.shape) if keepdim and dim is None else None
        if dim is None:
            x, dim = self.reshape(x, (x.elements,)), 0
        if not x.shape:
            return self.filled(0)
        dim = dim % len(x.shape)
        found = self.reduce(kind, x, [dim], True)
        here = self.build("eq_or_nan", [x, found], torch.bool, x.dtype)
        size = x.shape[dim]
        narrow = torch.int32 if isinstance(size, int) and size < 2**31 else torch.int64
        places = Iota((size,), narrow, x.device)
        places = self.reshape(places, tuple(size if axis == dim else 1 for axis in range(len(x.shape))))
        first = self.build("where", [here, places, size_of(size - 1)], narrow)
        result = self.cast(self.reduce("min", first, [dim], keepdim and shape is None), torch.int64)
        return self.reshape(result, shape) if shape is not None else result

    def truth(self, kind, x, dims=None, keepdim=False):
        found = self.reduce(kind, self.cast(self.cast(x, torch.bool), torch.int32), dims, keepdim)
        return self.build("identity", [found], self.meta.dtype)

    def op_var(self, x, dims=None, correction=None, keepdim=False, unbiased=None):
        if not isinstance(dims, (list, tuple, type(None))):
            raise Unsupported("var of one argument")
        return self.variance(x, dims, correction, keepdim)[0]

    def variance(self, x, dims, correction, keepdim):
        """In two reductions, the mean first: the sum of squares alone would cancel."""
        if not x.shape:
            raise Unsupported("the variance of one number")
        dtype, count = x.dtype, self.count(x, dims)
        correction = 1 if correction is None else correction
        wide = torch.promote_types(dtype, torch.float32)
        rank, x = len(x.shape), self.cast(x, wide)
        axes = sorted({dim % rank for dim in dims} if dims else range(rank))
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
        if all(size != 1 for size in x.shape) and (split := self.split_of(x, axes)):
            mean, squares = (self.reshape(each, shape) for each in self.variance_of_parts(x, wide, count, *split))
        else:
            mean = self.build("div", [self.reduce("sum", x, dims, True), count], wide)
            squares = self.reduce("sum", self.build("square", [self.build("sub", [x, mean], wide)], wide), dims, True)
        if isinstance(count, int) and count <= correction:
            var = self.build("div_by_zero", [squares], dtype, wide)
        else:
            var = self.build("div", [squares, count - correction], dtype, wide)
        mean = self.build("identity", [mean], dtype)
        shape = shape if keepdim else tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
        return self.reshape(var, shape), self.reshape(mean, shape)

    def variance_of_parts(self, x, wide, count, cut, first, parts):
        """(mean, sum of squares) of parts around their own means, then of these around the mean of all: memory is read
        once, for the second pass over a part finds it in a cache."""
        x = self.reshape(x, cut)
        each = product(cut[axis] for axis in first)
        inside = [1 if axis in first else size for axis, size in enumerate(cut)]
        sums = self.stored(self.reduction("sum", x, first))
        means = self.build("div", [sums, each], wide)
        apart = self.build("square", [self.build("sub", [x, self.reshape(means, inside)], wide)], wide)
        squares = self.stored(self.reduction("sum", apart, first))
        mean = self.build("div", [self.reduction("sum", sums, parts), count], wide)
        whole = [1 if axis in parts else size for axis, size in enumerate(sums.shape)]
        moved = self.build("square", [self.build("sub", [means, self.reshape(mean, whole)], wide)], wide)
        moved = self.build("add", [squares, self.build("mul", [moved, each], wide)], wide)
        return mean, self.reduction("sum", moved, parts)


# What takes a line: operation of ATen -> function of the Lowering and the operation's arguments.
TABLE: dict[str, Callable] = {
    "add": lambda low, a, b, alpha=1: low.scaled("add", a, b, alpha),
    "sub": lambda low, a, b, alpha=1: low.scaled("sub", a, b, alpha),
    "floor_divide": lambda low, a, b: low.op_div(a, b, "floor"),
    "convert_element_type": lambda low, x, dtype: low.cast(x, dtype, True),
    "bitwise_not": lambda low, x: low.pointwise("logical_not" if x.dtype is torch.bool else "bitwise_not", [x]),
    "copy": lambda low, x, source, *_: low.build("identity", [source], x.dtype, shape=x.shape),
    "full": lambda low, shape, number, **_: low.filled(number),
    "full_like": lambda low, x, number, **_: low.filled(number),
    "scalar_tensor": lambda low, number, **_: low.filled(number),
    **{name: lambda low, *_, **__: low.filled(0) for name in ZEROS.split()},
    **{name: lambda low, *_, **__: low.filled(1) for name in ("ones", "ones_like", "new_ones")},
    **{name: lambda low, x, *_: low.reshape(x, low.shape) for name in RESHAPES.split()},
    **{name: lambda low, x, *_: low.view(x, x.shape, lambda index: index) for name in ALIASES.split()},
    "expand": lambda low, x, shape, implicit=False: low.expand(x, low.shape),
    "embedding": lambda low, table, i, *_, **__: low.gather(
        table, [(i, lambda index: index[:-1]), lambda index: index[-1]]
    ),
    "index_select": lambda low, x, dim, index: low.op_gather(x, dim, index, select=True),
    "sum": lambda low, x, *dims, dtype=None, **keep: low.reduce("sum", low.cast(x, low.meta.dtype), *dims, **keep),
    "prod": lambda low, x, *dims, dtype=None, **keep: low.reduce("prod", low.cast(x, low.meta.dtype), *dims, **keep),
    "amax": lambda low, x, dims=(), keepdim=False: low.reduce("max", x, list(dims), keepdim),
    "amin": lambda low, x, dims=(), keepdim=False: low.reduce("min", x, list(dims), keepdim),
    "max": lambda low, x, *dims: low.extremum("max", x, *dims),
    "min": lambda low, x, *dims: low.extremum("min", x, *dims),
    "argmax": lambda low, x, *dims: low.place("max", x, *dims),
    "argmin": lambda low, x, *dims: low.place("min", x, *dims),
    "any": lambda low, x, *dims: low.truth("max", x, *dims),
    "all": lambda low, x, *dims: low.truth("min", x, *dims),
    "std": lambda low, x, *dims, **rest: low.build("sqrt", [low.op_var(x, *dims, **rest)], low.meta.dtype),
    "var_mean": lambda low, x, dims=None, correction=None, keepdim=False: low.variance(x, dims, correction, keepdim),
}


def sizes(value: torch.Tensor) -> tuple[Size, ...]:
    return tuple(map(size_of, value.shape))


def device_of(gm: torch.fx.GraphModule) -> torch.device | None:
    """The device whose operations are compiled: that of the first tensor on a GPU; the CPU's, in the interpreter."""
    if INTERPRETED:
        return torch.device("cpu")
    values = (each for node in gm.graph.nodes for each in tree_flatten(node.meta.get("val"))[0])
    return next((each.device for each in values if isinstance(each, torch.Tensor) and each.device.type == "cuda"), None)


def broadcast(shapes) -> tuple[Size, ...]:
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape):
            if size != 1:
                result[i + rank - len(shape)] = size
    return tuple(result)


def memory_strides(x: Node) -> list[int]:
    """The strides with which memory is read, as far as they are known: else those of a contiguous tensor."""
    while x.strides is None and isinstance(x, Pointwise) and x.args[0].shape == x.shape:
        x = x.args[0]
    known = x.strides or row_major(x.shape)
    return [stride if isinstance(stride, int) else 1 << 40 for stride in known]


def reshape_breaks(x: Node) -> set[int]:
    """The numbers of consecutive elements at which reshapes behind x cut it: parts that disagree need a copy of it."""
    found, todo = {x}, [x]
    for node in todo:
        more = node.sources if isinstance(node, Pointwise) or (isinstance(node, View) and node.linear) else ()
        todo += [each for each in more if each not in found and each.elements == x.elements and len(todo) < 64]
        found |= set(more)
    return {each for node in todo for each in row_major(node.shape) if isinstance(each, int)}


def contiguous_axis(x: Node) -> int:
    strides = memory_strides(x)
    axes = [axis for axis, size in enumerate(x.shape) if size != 1 and strides[axis]]
    return min(axes, key=strides.__getitem__, default=len(x.shape) - 1)


def divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0] if isinstance(n, int) else [1]
    return small + [n // i for i in small]


def strided_view(node: Node) -> tuple[Node, tuple[Size, ...], Size]:
    """(stored tensor, strides, offset) of a view of it. Raises Uneven where no strides describe it."""
    index = tuple(Dim(f"v{i}", size) for i, size in enumerate(node.shape))
    at = tuple(ZERO if dim.size == 1 else Affine(((dim, 1),)) for dim in index)
    base = node
    while isinstance(base, View):
        if base.linear and is_row_major(base.source) and not isinstance(base.source, View):
            place, base = base.linear(at), base.source
            return base, tuple(place.coefficient(dim) for dim in index), place.offset
        try:
            at, base = base.back(at), base.source
        except Split:
            raise Uneven from None
    strides = base.strides or tuple(row_major(base.shape))
    place = ZERO
    for each, stride in zip(at, strides, strict=True):
        place = place + each * stride
    return base, tuple(place.coefficient(dim) for dim in index), place.offset
