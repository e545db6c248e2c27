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

# Beyond torch's core ATen table: norms, softmax and activations, so that they fuse, and their backwards.
MORE = """
native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm
_fused_rms_norm_backward native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
_native_batch_norm_legit_no_training native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
_batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update batch_norm_backward _softmax
_softmax_backward_data _log_softmax _log_softmax_backward_data gelu gelu_backward silu silu_backward mish
mish_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward hardtanh hardtanh_backward leaky_relu
leaky_relu_backward elu elu_backward softplus softplus_backward log_sigmoid_forward log_sigmoid_backward threshold
threshold_backward relu6 tanh_backward sigmoid_backward celu selu softshrink softshrink_backward hardshrink
hardshrink_backward glu glu_backward _prelu_kernel _prelu_kernel_backward mse_loss mse_loss_backward l1_loss
smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward nll_loss_forward nll_loss_backward
nll_loss2d_forward nll_loss2d_backward binary_cross_entropy binary_cross_entropy_backward
binary_cross_entropy_with_logits soft_margin_loss addcmul addcdiv lerp addcmul_ addcdiv_ lerp_ xlogy logaddexp
logaddexp2 logit logit_backward sinc nan_to_num deg2rad rad2deg frac heaviside hypot norm linalg_vector_norm
logsumexp cumprod dot addr addmv mv vdot upsample_nearest1d upsample_nearest2d upsample_nearest3d pixel_shuffle
pixel_unshuffle select_backward slice_backward unfold_backward triu tril eye linspace rot90 roll stack
split_with_sizes_copy unsafe_split unsafe_chunk rsub floor_divide masked_fill masked_fill_ fill zero ones_like
zeros_like new_zeros new_ones new_full new_empty full_like trace diag_embed t_copy isneginf isposinf clamp_min
clamp_max native_dropout_backward narrow_copy _foreach_add _foreach_mul _foreach_addcmul _foreach_addcdiv
_foreach_lerp _foreach_sqrt _foreach_div _foreach_neg reflection_pad1d reflection_pad2d replication_pad2d
grid_sampler_2d affine_grid_generator im2col
"""

# Kept whole: a library or eager does these better, or in torch's order of random numbers.
KEPT = """
addmm mm bmm baddbmm convolution convolution_backward native_dropout bernoulli rand randn rand_like randn_like
randint _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention scaled_dot_product_attention
embedding_dense_backward index_put index_put_ max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d
_adaptive_avg_pool2d embedding _unsafe_index_put _unsafe_masked_index_put_accumulate uniform normal exponential
cauchy geometric log_normal randperm dot mv upsample_bilinear2d upsample_bicubic2d cumprod sum prod amax amin all
any argmax argmin var mean var_mean std std_mean clamp where floor_divide
"""


@functools.cache
def decompositions() -> dict:
    """{overload: function that computes it with simpler operations}."""
    table = dict(core_aten_decompositions())
    packets = [getattr(aten, name) for name in MORE.split() if hasattr(aten, name)]
    table |= get_decompositions(packets)
    kept = {getattr(aten, name) for name in KEPT.split() if hasattr(aten, name)}
    return {op: fn for op, fn in table.items() if getattr(op, "overloadpacket", op) not in kept}
