"""Decompositions: from the few thousand operations of torch to the small set that lowering.py knows.

Autograd's graph still has operations such as layer_norm, gelu_backward or batch_norm. torch ships, for most of them,
a Python function that computes the same with simpler ones; AOTAutograd traces through those that are in this table.
What is left is pointwise operations, reductions, views, and what a library does better (matmul, attention).
"""

from __future__ import annotations

import functools

import torch
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
_unsafe_index_put _unsafe_masked_index_put_accumulate dot mv upsample_bilinear2d upsample_bicubic2d cumprod sum prod
all any var mean var_mean std std_mean where floor_divide
"""


@functools.cache
def decompositions() -> dict:
    """{overload: function that computes it with simpler operations}."""
    table = dict(core_aten_decompositions())
    packets = [getattr(aten, name) for name in MORE.split() if hasattr(aten, name)]
    table |= get_decompositions(packets)
    kept = {getattr(aten, name) for name in KEPT.split() if hasattr(aten, name)}
    return {op: fn for op, fn in table.items() if getattr(op, "overloadpacket", op) not in kept}
