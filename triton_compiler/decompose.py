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
baddbmm bernoulli _scaled_dot_product_flash_attention_for_cpu scaled_dot_product_attention embedding_dense_backward
_unsafe_index_put dot mv upsample_bilinear2d upsample_bicubic2d cumprod where var_mean
"""


@functools.cache
def decompositions() -> dict:
    """{overload: function that computes it with simpler operations}."""
    table = dict(core_aten_decompositions())
    packets = [getattr(aten, name) for name in MORE.split() if hasattr(aten, name)]
    table |= get_decompositions(packets)
    table[aten.convolution_backward.default] = sums_of_channels
    kept = {getattr(aten, name) for name in KEPT.split() if hasattr(aten, name)}
    return {op: fn for op, fn in table.items() if getattr(op, "overloadpacket", op) not in kept}


def sums_of_channels(grad, x, weight, biases, stride, padding, dilation, transposed, offset, groups, mask):
    """The backward of a convolution whose bias' gradient becomes a reduction like others: the library's is slow."""
    if not mask[2]:
        return NotImplemented
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


def interpolation(old, new, input, size=None, scale_factor=None, mode="nearest", *_, **__) -> list[int] | None:
    """The factors of a nearest interpolation by powers of two: by others torch's positions are rounded."""
    factors, given = [b // a for a, b in zip(old, new, strict=True)], each_of(scale_factor, len(old))
    exact = all(b == a * n and n & (n - 1) == 0 for a, b, n in zip(old, new, factors, strict=True))
    nearest = mode in ("nearest", "nearest-exact") and all(g in (None, n) for g, n in zip(given, factors, strict=True))
    return factors if nearest and exact and max(factors, default=1) > 1 else None


def pooling(old, new, input, kernel_size, stride=None, padding=0, ceil=False, pad=True, divisor_override=None):
    """The windows of an average pooling, where they tile the image."""
    kernel = each_of(kernel_size, 2)
    tiles = each_of(stride or kernel, 2) == kernel and not any(each_of(padding, 2)) and divisor_override is None
    return kernel if tiles and all(size % n == 0 for size, n in zip(old, kernel, strict=True)) else None


CALLS = {F.interpolate: (interpolation, enlarged), F.avg_pool2d: (pooling, averaged)}


def windows(gm: torch.fx.GraphModule) -> None:
    """Changes calls on Dynamo's graph to views and sums, of which autograd makes sums and views: torch would trace the
    backward of an interpolation as additions at computed places, and leave a pooling to a library."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in CALLS:
            continue
        factors_of, change = CALLS[node.target]
        x = node.args[0] if node.args else node.kwargs.get("input")
        values = [each.meta.get("example_value") for each in (x, node) if isinstance(each, torch.fx.Node)]
        if len(values) < 2 or not all(map(torch.is_tensor, values)):
            continue
        old, new = (each.shape for each in values)
        if (len(old) < 4 and change is averaged) or not all(isinstance(size, int) for size in (*old[2:], *new[2:])):
            continue
        try:
            factors = factors_of(old[2:], new[2:], *node.args, **node.kwargs)
        except (TypeError, ValueError, ZeroDivisionError):  # arguments of a kind that torch takes, and this does not
            continue
        if factors:
            node.target, node.args, node.kwargs = change, (x, tuple(factors)), {}
    gm.recompile()
