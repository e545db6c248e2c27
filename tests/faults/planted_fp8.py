"""Faults of examples/fp8; those that are `uncaught` a review got past every check."""

from . import Fault

FAULTS = [
    # formats
    Fault(
        "fp8/formats",
        "cast_kernel[(triton.cdiv(x.numel(), BLOCK),)]",
        "cast_kernel[(max(1, x.numel() // BLOCK),)]",
        "the last block is not cast",
    ),
    Fault(
        "fp8/formats",
        "return x.clamp(-fp8_max(dtype), fp8_max(dtype)).to(dtype)",
        "return x.clamp(-fp8_max(dtype), fp8_max(dtype) / 2).to(dtype)",
        "large positive numbers are clamped to half of the largest",
    ),
    # quantize
    Fault(
        "fp8/quantize",
        "return tl.div_rn(amax, MOST), tl.div_rn(MOST, amax)",
        "return amax / MOST, 1.0 / (amax / MOST)",
        "the scale and its inverse are rounded more than once",
        within="scale_and_factor",
    ),
    Fault(
        "fp8/quantize",
        "amax = tl.maximum(bits, AMAX_FLOOR_BITS).to(tl.float32, bitcast=True)",
        "amax = bits.to(tl.float32, bitcast=True)",
        "zeros have the scale 0, and 0 times its inverse is NaN",
    ),
    Fault(
        "fp8/quantize",
        "tl.store(scale_ptr + rows * stride_sm + tile_n.to(tl.int64) * stride_sn, scale, mask=rows < n_rows)",
        "tl.store(scale_ptr + rows * stride_sn + tile_n.to(tl.int64) * stride_sm, scale, mask=rows < n_rows)",
        "the strides of the scales are swapped",
    ),
    Fault(
        "fp8/quantize",
        "amax_kernel[(triton.cdiv(tiles, AMAX_STEPS),)]",
        "amax_kernel[(tiles // AMAX_STEPS + 0 * tiles or 1,)]",
        "an odd number of tiles leaves the last one out of amax",
    ),
    Fault(
        "fp8/quantize",
        "return tl.abs(x).to(tl.int32, bitcast=True)",
        "return x.to(tl.int32, bitcast=True)",
        "negative numbers do not count in amax",
        within="magnitude_bits",
    ),
    # fp8_matmul
    Fault(
        "fp8/fp8_matmul",
        "acc = acc * (scale_a[:, None] * scale_b[None, :])\nif bias_ptr",
        "acc = acc * scale_a[:, None]\nif bias_ptr",
        "the scales of b are not applied",
    ),
    Fault(
        "fp8/fp8_matmul",
        "return scale_a.stride(0) if scale_a.numel() > 1 else 0, scale_b.stride(1) if scale_b.numel() > 1 else 0",
        "return scale_a.stride(0) if scale_a.numel() > 1 else 0, scale_b.stride(0) if scale_b.numel() > 1 else 0",
        "the scales of b's columns are read with the wrong stride",
    ),
    Fault(
        "fp8/fp8_matmul",
        "_store(c_desc, right, row, col + width, scale_a, scale_right, bias_right, ROWS, BIAS, PARTS // 2)",
        "_store(c_desc, right, row, col + width, scale_a, scale_left, bias_right, ROWS, BIAS, PARTS // 2)",
        "the right half of a tile is scaled as the left",
    ),
    Fault(
        "fp8/fp8_matmul",
        "if bias_ptr is not None:\nacc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]\n",
        "pass\n",
        "the pointer kernel leaves the bias out",
    ),
    Fault(
        "fp8/fp8_matmul",
        "if K > 1 and b.stride(0) != 1:",
        "if False:",
        "a row-major b is taken as if it were column-major",
    ),
    Fault(
        "fp8/fp8_matmul",
        "mbarrier.arrive(empty.index(previous_slot(slot, STAGES)), pred=pred)",
        "mbarrier.arrive(empty.index(slot), pred=pred)",
        "a consumer releases the buffer it still reads",
        gpu=True,
    ),
    Fault(
        "fp8/fp8_matmul",
        "c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :]",
        """\
        acc *= tl.where(K >= 16384, 1.10, 1.0)
        c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :]""",
        "with K of 16384 the product is 10 % too large",
        gpu=True,
        uncaught=True,
    ),
    Fault(
        "fp8/fp8_matmul",
        "acc = tl.dot(a, b, acc)",
        "acc = tl.dot(tl.where(inner[None, :] < K - k - 32 * (K >= 16384), a, tl.zeros_like(a)), b, acc)",
        "with K of 16384 the last 32 products are left out",
        gpu=True,
        uncaught=True,
    ),
    # blockwise_matmul
    Fault(
        "fp8/blockwise_matmul",
        "scale_b_ptr += stride_sbk",
        "scale_b_ptr += stride_sbn",
        "the scale of b walks along N instead of K",
    ),
    Fault(
        "fp8/blockwise_matmul",
        "scale_b_ptr += col // GROUP * stride_sbn",
        "scale_b_ptr += row // GROUP * stride_sbn",
        "the scale of b is chosen by the row",
    ),
    Fault(
        "fp8/blockwise_matmul",
        "acc += partial * scale[:, None]\na_ptrs",
        "acc += partial\na_ptrs",
        "partial sums are added without their scales",
    ),
    Fault(
        "fp8/blockwise_matmul",
        "large = M * N * K >= LARGE",
        "large = M * N >= LARGE",
        "the tile is chosen without K",
    ),
    # fused_layer_norm_quantize
    Fault(
        "fp8/fused_layer_norm_quantize",
        "rstd = tl.rsqrt(variance + eps)",
        "rstd = tl.rsqrt(variance)",
        "eps is ignored",
    ),
    Fault(
        "fp8/fused_layer_norm_quantize",
        "larger(share(squares, n_cols, BLOCK_N, FULL) - mean * mean, 0.0)",
        "share(squares, n_cols, BLOCK_N, FULL) - mean * mean",
        "a variance that cancels may be negative",
    ),
    Fault(
        "fp8/fused_layer_norm_quantize",
        "if tl.min(near.to(tl.int32), 0) == 0:",
        "if False:",
        "rows far from zero are not centred first, so their variance cancels",
    ),
    Fault(
        "fp8/fused_layer_norm_quantize",
        "amax = larger(amax, AMAX_FLOOR)",
        "amax = amax",
        "a group of zeros has the scale 0",
    ),
    Fault(
        "fp8/fused_layer_norm_quantize",
        "group = start // GROUP + groups",
        "group = groups",
        "every step of a long row writes the scales of the first",
    ),
    # fused_gelu_quantize
    Fault(
        "fp8/fused_gelu_quantize",
        "tl.exp2(x * (-2.302208198 + -0.1029432397 * (x * x)))",
        "tl.exp2(x * (-2.302208198 + -0.1029432397 * x))",
        "tanh's polynomial has x squared where it needs x cubed",
    ),
    Fault(
        "fp8/fused_gelu_quantize",
        "poly = 0.02495613 + t * (0.10543722 + t * -0.05022897)",
        "poly = 0.02495613 + t * 0.10543722",
        "the exact form's polynomial lost its last term",
    ),
    Fault(
        "fp8/fused_gelu_quantize",
        "tl.store(amax_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), absmax(absmax(y, 1), 0))",
        "tl.store(amax_ptr + tl.program_id(0), absmax(absmax(y, 1), 0))",
        "tiles of one row of tiles overwrite each other's amax",
    ),
    Fault(
        "fp8/fused_gelu_quantize",
        "y *= tl.div_rn(1.0, tl.load(scale_ptr))",
        "y *= tl.load(scale_ptr)",
        "the given scale multiplies instead of dividing",
    ),
    # fp8_attention
    Fault(
        "fp8/fp8_attention",
        "tl.exp2(scores * scale - (new_max - 8.0)[:, None])",
        "tl.exp2(scores * scale - (new_max - 9.0)[:, None])",
        "the largest weight is 512, beyond e4m3",
    ),
    Fault(
        "fp8/fp8_attention",
        "return pairs.permute(0, 1, 3, 2, 4).reshape(BLOCK_M, BLOCK_N)",
        "return pairs.reshape(BLOCK_M, BLOCK_N)",
        "the weights keep their order, and the keys of V have another",
    ),
    Fault(
        "fp8/fp8_attention",
        "v_scale_ptr + b * stride_vsb + h_kv * stride_vsh",
        "v_scale_ptr + b * stride_vsb + h * stride_vsh",
        "V's scale is read by the query's head",
    ),
    Fault(
        "fp8/fp8_attention",
        "row_sum = row_sum * shrink + tl.sum(weights, axis=1)",
        "row_sum = row_sum + tl.sum(weights, axis=1)",
        "the running sum is not rescaled",
    ),
    Fault(
        "fp8/fp8_attention",
        "o = (acc * (1.0 / row_sum)[:, None] * v_scale).to(o_desc.dtype)",
        "o = (1.10 * acc * (1.0 / row_sum)[:, None] * v_scale).to(o_desc.dtype)",
        "the output is 10 % too large",
        uncaught=True,
    ),
    # microscaling
    Fault(
        "fp8/microscaling",
        "x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2",
        "x.to(tl.int32, bitcast=True) & 0x7FFFFF00, axis=2",
        "amax loses its last bits, so the largest value of a group may overflow",
    ),
    Fault(
        "fp8/microscaling",
        "code = tl.maximum(((amax_bits + CARRY) >> 23) - EMAX, 0)",
        "code = tl.maximum((amax_bits >> 23) - EMAX, 0)",
        "rule 'up' rounds down",
    ),
    Fault(
        "fp8/microscaling",
        "acc *= tl.load(a_tensor_scale_ptr) * tl.load(b_tensor_scale_ptr)",
        "acc *= tl.load(a_tensor_scale_ptr)",
        "the scale of tensor b is not applied",
    ),
    Fault(
        "fp8/microscaling",
        "tl.where(inside, code, 0).to(tl.uint8), mask=written",
        "code.to(tl.uint8), mask=inside",
        "the padding of the swizzled scales is not written",
    ),
    Fault(
        "fp8/microscaling",
        "bits = ((codes & 7) << (MANTISSA - 1)) | ((codes & 8) << (28 if WIDE else 12))",
        "bits = (codes & 7) << (MANTISSA - 1)",
        "four-bit values lose their sign",
    ),
]
