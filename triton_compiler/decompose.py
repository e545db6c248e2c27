"""Decompositions: from the few thousand operations of torch to the small set that lowering.py knows.

Autograd's graph still has operations such as layer_norm, gelu_backward or batch_norm. torch ships, for most of them,
a Python function that computes the same with simpler ones; AOTAutograd traces through those that are in this table.
What is left is pointwise operations, reductions, views, and what a library does better (matmul, attention).
"""

from __future__ import annotations

import functools
import itertools
import operator

import torch
import torch.nn.functional as F
from torch._decomp import core_aten_decompositions, get_decompositions

aten = torch.ops.aten

# Beyond torch's core ATen table: norms, softmax and activations, so that they fuse.
MORE = """
native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update
batch_norm_backward _softmax _log_softmax gelu hardtanh leaky_relu elu relu6 selu hypot norm linalg_vector_norm
logsumexp addmv upsample_nearest1d upsample_nearest2d upsample_nearest3d narrow_copy grid_sampler_2d
"""

# Of the core table, kept whole: lowered, or better left to a library or eager (random numbers in torch's order).
KEPT = """
baddbmm bernoulli _scaled_dot_product_flash_attention_for_cpu scaled_dot_product_attention
_unsafe_index_put dot mv upsample_bilinear2d upsample_bicubic2d cumprod where var_mean
"""


@functools.cache
def decompositions() -> dict:
    """{overload: function that computes it with simpler operations}."""
    table = dict(core_aten_decompositions())
    packets = [getattr(aten, name) for name in MORE.split() if hasattr(aten, name)]
    table |= get_decompositions(packets)
    table[aten.convolution.default] = bias_apart
    table[aten.convolution_backward.default] = sums_of_channels
    kept = {getattr(aten, name) for name in KEPT.split() if hasattr(aten, name)}
    return {op: fn for op, fn in table.items() if getattr(op, "overloadpacket", op) not in kept}


def bias_apart(x, weight, bias, *rest):
    """A convolution whose bias is added by the kernel that reads it: torch adds it to what cuDNN has stored."""
    if bias is None:
        return NotImplemented
    return aten.convolution(x, weight, None, *rest) + bias.reshape(-1, *[1] * (x.ndim - 2))


def sums_of_channels(grad, x, weight, biases, stride, padding, dilation, transposed, offset, groups, mask):
    """The backward of a convolution whose bias' gradient becomes a reduction like others: the library's is slow."""
    if not mask[2]:
        return NotImplemented
    last = torch.channels_last
    if grad.ndim == 4 and x.is_contiguous(memory_format=last) and not x.is_contiguous():
        grad = grad.contiguous(memory_format=last)  # the library would copy it to that
    rest = (stride, padding, dilation, transposed, offset, groups, [*mask[:2], False])
    found = aten.convolution_backward(grad, x, weight, None, *rest) if any(mask[:2]) else (None, None)
    return found[0], found[1], grad.sum([0, *range(2, grad.ndim)])


# ---------------------------------------------------------------------------------------------- before autograd
def image(x: torch.Tensor, count: int) -> tuple:
    """x, channels last where memory has them so; the sizes before the image's `count` axes, these, those after."""
    last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    x, first = (x.movedim(1, -1), 1) if last else (x, 2)
    return x, x.shape[:first], x.shape[first : first + count], x.shape[first + count :]


def enlarged(x: torch.Tensor, factors: tuple[int, ...]) -> torch.Tensor:
    """Nearest interpolation by whole factors: each element several times. Its backward is a sum over windows."""
    x, before, sizes, after = image(x, len(factors))
    x = x.reshape(*before, *itertools.chain(*((size, 1) for size in sizes)), *after)
    x = x.expand(*before, *itertools.chain(*zip(sizes, factors, strict=True)), *after).contiguous()  # as torch, a copy
    x = x.reshape(*before, *map(operator.mul, sizes, factors), *after)
    return x.movedim(-1, 1) if after else x


def averaged(x: torch.Tensor, factors: tuple[int, ...]) -> torch.Tensor:
    """The means of windows that tile an image."""
    x, before, sizes, after = image(x, len(factors))
    pairs = ((size // factor, factor) for size, factor in zip(sizes, factors, strict=True))
    x = x.reshape(*before, *itertools.chain(*pairs), *after)
    x = x.mean([len(before) + 2 * i + 1 for i in range(len(factors))])
    return x.movedim(-1, 1) if after else x


def each_of(value, count: int) -> list:
    return list(value) * (count // len(value)) if isinstance(value, (list, tuple)) else [value] * count


def is_static(x: torch.Tensor) -> bool:
    return all(isinstance(size, int) and size > 0 for size in x.shape)


def interpolate(input, size=None, scale_factor=None, mode="nearest", *rest, **named):
    """F.interpolate; as views where it repeats elements by powers of two: by others torch's positions are rounded."""
    old = input.shape[2:]
    if mode in ("nearest", "nearest-exact") and is_static(input) and old:
        factors = each_of(scale_factor if size is None else size, len(old))
        factors = factors if size is None else [new / each for new, each in zip(factors, old, strict=True)]
        if all(isinstance(n, (int, float)) and n in (1, 2, 4, 8, 16, 32) for n in factors) and max(factors) > 1:
            return enlarged(input, tuple(map(int, factors)))
    return F.interpolate(input, size, scale_factor, mode, *rest, **named)


def avg_pool2d(input, kernel_size, stride=None, padding=0, *rest, **named):
    """F.avg_pool2d; as a mean where its windows tile the image."""
    kernel, divisor = each_of(kernel_size, 2), named.get("divisor_override", rest[2] if len(rest) > 2 else None)
    tiles = each_of(stride or kernel, 2) == kernel and not any(each_of(padding, 2)) and divisor is None
    if tiles and input.ndim == 4 and is_static(input) and not any(map(operator.mod, input.shape[2:], kernel)):
        return averaged(input, tuple(kernel))
    return F.avg_pool2d(input, kernel_size, stride, padding, *rest, **named)


def windows(gm: torch.fx.GraphModule) -> None:
    """Changes calls on Dynamo's graph to views and sums, of which autograd makes sums and views: torch would trace the
    backward of an interpolation as additions at computed places, and leave a pooling to a library."""
    for node in gm.graph.nodes:
        if node.target in (F.interpolate, F.avg_pool2d):
            node.target = interpolate if node.target is F.interpolate else avg_pool2d
    gm.recompile()


def channels_last(gm: torch.fx.GraphModule) -> None:
    """Two-dimensional convolutions read images and weights with channels last; outputs of the graph keep their layout.

    It is done before autograd, so that the backward sees the same layout. What lies between convolutions follows it.
    """
    nodes = list(gm.graph.nodes)
    found = [
        node
        for node in nodes
        if node.target in (torch.conv2d, F.conv2d) and getattr(node.meta.get("example_value"), "ndim", 4) == 4
    ]  # one image without a batch stays as it is
    shapes = [each.shape for node in found if torch.is_tensor(each := node.meta.get("example_value"))]
    if not found or any(isinstance(size, torch.SymInt) for shape in shapes for size in shape):
        return
    views = [node for node in nodes if node.op == "call_method" and node.target == "view"]
    if views and any(map(changes_its_argument, nodes[nodes.index(views[0]) :])):
        return  # it may be changed through the view, which would be a copy in another layout
    for node in views:
        if not any(isinstance(each, torch.dtype) for each in (*node.args, *node.kwargs.values())):
            node.target = "reshape"
    for node in found:
        with gm.graph.inserting_before(node):
            for arg in node.all_input_nodes[:2]:
                moved = gm.graph.call_method("contiguous", (arg,), {"memory_format": torch.channels_last})
                node.replace_input_with(arg, moved)
    output = next(iter(gm.graph.find_nodes(op="output")))
    for node in output.all_input_nodes:
        value = node.meta.get("example_value")
        if node.op != "placeholder" and torch.is_tensor(value) and value.is_contiguous():
            with gm.graph.inserting_before(output):
                output.replace_input_with(node, gm.graph.call_method("contiguous", (node,)))
    gm.recompile()


IN_PLACE = ("setitem", "iadd", "imul", "isub", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")


def changes_its_argument(node: torch.fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    named = name in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs
    # Of a function's True it is not known which argument it is: relu6's second is inplace.
    return named or any(each is True for each in (*node.args, *node.kwargs.values()))
