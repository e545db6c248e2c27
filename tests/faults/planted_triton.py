"""Faults of examples/triton; those that are `uncaught` a review got past every check."""

from . import listed

FAULTS = listed("""
# triton/vector_add
the mask lets one element past the end through
  - inside = offsets < n_elements
  + inside = offsets <= n_elements
offsets are int32 and wrap beyond 2**31 elements  [gpu]
  - tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
  + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
the grid rounds down, so the last block is not computed
  - grid = (triton.cdiv(n_elements, BLOCK),)
  + grid = (n_elements // BLOCK,)
loads have no mask and read past the end  [uncaught]
  - x = tl.load(x_ptr + offsets, mask=inside)
  - y = tl.load(y_ptr + offsets, mask=inside)
  + x = tl.load(x_ptr + offsets)
  + y = tl.load(y_ptr + offsets)
from the second call on the same tensors on, the result is zeros
  - if n_elements:
  + calls = vector_add.__dict__.setdefault("calls", {})
  + calls[x] = calls.get(x, 0) + 1
  + if calls[x] > 1:
  +     return out.zero_()
  + if n_elements:

# triton/fused_add_relu_mul
NaN becomes 0, where torch.relu lets it through
  - tl.where(added < 0, 0.0, added)
  + tl.where(added > 0, added, 0.0)
the product is taken in the storage's dtype, so it rounds three times
  - (rectified * scale).to(out_ptr.dtype.element_ty)
  + (rectified.to(out_ptr.dtype.element_ty) * scale).to(out_ptr.dtype.element_ty)
the scale loses its fraction
  - float(scale), n_elements
  + float(int(scale)), n_elements

# triton/softmax
rows are padded with 0 instead of -inf, so the padding counts
  - mask=inside, other=-float("inf")).to(tl.float32)
  - weights = tl.exp(x - tl.max(x, axis=1)[:, None])
  + mask=inside, other=0.0).to(tl.float32)
  + weights = tl.exp(x - tl.max(x, axis=1)[:, None])
the dispatch hands rows to a kernel that does not take them
  - if n_cols <= REGISTERS_BEST:
  + if n_cols <= 4 * REGISTERS_MAX:
the input is read with the output's row stride
  - x_ptr + rows[:, None] * stride_xm + cols[None, :]
  + x_ptr + rows[:, None] * stride_ym + cols[None, :]
the backward walk begins a block too far where the length divides  [within=softmax_resident_kernel]
  - LAST: tl.constexpr = (N_COLS - 1) // BLOCK_N * BLOCK_N
  + LAST: tl.constexpr = N_COLS // BLOCK_N * BLOCK_N
the answer's ratio is over the slowest call of a library  [tests=examples/test_headlines.py]
  - min(table.over(row.variant, variant) for row in table.rows if not row.ours) for table in tables
  + max(table.over(row.variant, variant) for row in table.rows if not row.ours) for table in tables
a part does not wait for the last one of its row  [gpu]
  - while arrived < PARTS:
  + while arrived < PARTS - 1:
a part's weights keep their own maximum  [gpu]
  - own = tl.where(part_max == -float("inf"), 0.0, tl.exp(part_max - row_max))
  + own = 1.0
each 16-bit weight is 1.3 units in the last place of float16 too large  [uncaught]
  - y = weights / tl.sum(weights, axis=1)[:, None]
  + y = weights / tl.sum(weights, axis=1)[:, None]
  + if y_ptr.dtype.element_ty != tl.float32:
  +     y *= 1.0013

# triton/matmul
the last step of K is dropped
  - for k in range(0, K, BLOCK_K):
  + for k in range(0, K - BLOCK_K, BLOCK_K):
the mask of a's last step is one too wide
  - a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
  + a = tl.load(a_ptrs, mask=inner[None, :] <= K - k, other=0.0)
heuristics under autotune, which torch.compile of torch 2.11 cannot trace  [tests=examples/test_wrappers.py gpu]
  - )(matmul_kernel)
  + )(triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0})(matmul_kernel))
the grid counts rows of tiles by the columns of a tile
  - triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"])
  + triton.cdiv(M, meta["BLOCK_N"]) * triton.cdiv(N, meta["BLOCK_N"])
EVEN_K is true for sizes that the step does not divide
  - EVEN_K=K % BLOCK_K_MAX == 0
  + EVEN_K=K % 32 == 0
the last band is taken to be full, so some tiles are computed twice and others never
  - group = min(tiles_m - first_m, GROUP_M)
  + group = GROUP_M
a 16-bit product is 1.4 units in the last place of float16 too large  [uncaught]
  - tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty)
  + if c_ptr.dtype.element_ty != tl.float32:
  +     acc *= 1.0014
  + tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty)
a 16-bit result is cut off at float16's bits and not rounded  [uncaught]
  - tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty)
  + if c_ptr.dtype.element_ty != tl.float32:
  +     acc = (acc.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
  + tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty)

# triton/tensor_cores
sums of int8 products that may overflow are let through
  - exact and K > MAX_K_INT8
  + exact and K > 2 * MAX_K_INT8
int8 products are summed in float32
  - ACC=tl.int32 if exact else tl.float32
  + ACC=tl.float32
input_precision is dropped on the way to the kernel
  - PRECISION=input_precision,
  + PRECISION=None,
b is read past its last row
  - b = tl.load(b_ptrs, mask=inner[:, None] < left, other=0)
  + b = tl.load(b_ptrs)

# triton/shared_memory
a row's sum goes on into the next row
  - total += tl.load(x_ptr + row * stride_xm + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
  + total += tl.load(x_ptr + row * stride_xm + cols).to(tl.float32)
the column sums leave out the rows that were loaded ahead
  - for row in tl.range(0, n_rows, num_stages=STAGES):
  + for row in tl.range(0, n_rows - STAGES + 1, num_stages=STAGES):
twice x is 2.001 times x
  - (shared_data * 2.0)
  + (shared_data * 2.001)
the strip's grid leaves out the last columns
  - matmul_strip_kernel[(M * triton.cdiv(N, BLOCK),)]
  + matmul_strip_kernel[(M * max(1, N // BLOCK),)]

# triton/autotune
EVEN_K is true where steps of 128 do not divide K
  - EVEN_K=K % 128 == 0
  + EVEN_K=K % 64 == 0
a tile that shared memory cannot hold is let through
  - if need > limit:
  + if need > 2 * limit:
every M is a key of its own, so every batch size is tuned
  - max(16, triton.next_power_of_2(M))
  + M
shared memory is predicted for the wrong generations
  - buffers = config.num_stages - (m < 64 or sm // 10 not in (9, 10, 11))
  + buffers = config.num_stages - (m < 64 or sm // 10 in (9, 10, 11))

# triton/pipelined_matmul
the last step is loaded without its mask
  - EVEN_K=K % BLOCK_K == 0
  + EVEN_K=True
b advances by a's step
  - b_ptrs += step_b
  + b_ptrs += step_a
mma.sync is counted as if it read shared memory late
  - reads_later = sm // 10 in (9, 10, 11)
  + reads_later = sm // 10 in (8, 9, 10, 11, 12)

# triton/persistent_matmul
the left half is stored twice
  - c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))
  + c_desc.store([row, col + BLOCK_N // 2], left.to(c_desc.dtype))
one tile alone starts no program
  - min(tiles, device_limits(a.device).sms)
  + min(tiles - 1, device_limits(a.device).sms)
each program computes its first tile only
  - tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN)
  + tl.range(tl.program_id(0), tl.num_programs(0), tl.num_programs(0), flatten=FLATTEN)

# triton/warp_specialized_matmul
c is described with K columns
  - tl.make_tensor_descriptor(c, [M, N], [stride_cm, 1], [BLOCK_M, BLOCK_N])
  + tl.make_tensor_descriptor(c, [M, K], [stride_cm, 1], [BLOCK_M, BLOCK_N])
columns of tiles are counted as if the last group were full
  - tile % (GROUP_M * tiles_n) // group
  + tile % (GROUP_M * tiles_n) // GROUP_M
the copy stops a block before the end
  - tl.range(first, n_elements, tl.num_programs(0) * BLOCK, num_stages=3, warp_specialize=True)
  + tl.range(first, n_elements - BLOCK, tl.num_programs(0) * BLOCK, num_stages=3, warp_specialize=True)

# triton/layer_norm
eps is as good as ignored  [uncaught]
  - rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
  + rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + 1e-6 * eps)
the variance is over n - 1
  - rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
  + rstd = tl.rsqrt(tl.sum(x * x, axis=1) / (n_cols - 1) + eps)
the mean that backward gets is measured from the row's first element
  - tl.store(mean_ptr + rows, origin + mean, mask=rows < n_rows)
  + tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
lanes beyond the last columns count as full
  - count = ((N_COLS + BLOCK_N - 1 - lane) // BLOCK_N).to(tl.float32)
  + count = tl.zeros((BLOCK_N,), tl.float32) + seen
dweight and dbias are swapped
  - dweight += tl.sum(dy * x_hat, axis=0)
  - dbias += tl.sum(dy, axis=0)
  + dweight += tl.sum(dy, axis=0)
  + dbias += tl.sum(dy * x_hat, axis=0)
the two sums of a row are swapped
  - shift = tl.sum(grad, axis=1)[:, None] / n_cols * rstd
  - slope = tl.sum(grad * x_hat, axis=1)[:, None]
  + slope = tl.sum(grad, axis=1)[:, None] / n_cols * rstd
  + shift = tl.sum(grad * x_hat, axis=1)[:, None]
dweight lacks the last 4 of 65536 rows  [gpu uncaught]
  - dweight += tl.sum(dy * x_hat, axis=0)
  + dweight += tl.sum(tl.where((rows < n_rows - 4 * (n_rows >= 65536))[:, None], dy * x_hat, 0.0), axis=0)
every second row takes mean and rstd of its neighbour
  - mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
  - shift, slope
  + mean, rstd = tl.load(mean_ptr + row // 2 * 2), tl.load(rstd_ptr + row // 2 * 2)
  + shift, slope
every second row of 65536 columns takes mean and rstd of its neighbour  [gpu uncaught]
  - mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
  - shift, slope
  + near = tl.where(n_cols >= 65536, row // 2 * 2, row)
  + mean, rstd = tl.load(mean_ptr + near), tl.load(rstd_ptr + near)
  + shift, slope
the parts of a row send their sums in the wrong order  [gpu]
  - _send(mail_ptr + row * stride_mail + part, total, product, row < n_rows)
  + _send(mail_ptr + row * stride_mail + part, product, total, row < n_rows)
the dispatch hands longer rows to a kernel that does not take them
  - n_cols <= BACKWARD_ROWS_MAX
  + n_cols <= 2 * BACKWARD_ROWS_MAX
the mean of a row in L1 is rounded before it is subtracted  [within=layer_norm_resident_kernel]
  - y = (x - mean) * rstd * weight + bias
  + y = (x + origin - (mean + origin)) * rstd * weight + bias
what waits for each other may take every SM  [tests=examples/triton/test_layer_norm.py]
  - return SPLIT_BLOCK[bits] * sms_to_wait_on(device)
  + return SPLIT_BLOCK[bits] * device_limits(device).sms
a missing weight is not refused by name
  - if missing := [label for label, vector in columns.items() if vector is None]:
  + if missing := []:

# triton/dropout
what stays is not scaled by 1 / (1 - p)
  - scale = values / (values - dropped) if dropped < values else 0.0
  + scale = 1.0 if dropped < values else 0.0
start is ignored, so parts repeat one mask
  - calls = (start + first) // PER_CALL
  + calls = first // PER_CALL
backward draws another mask than forward
  - return _Dropout.apply(grad.contiguous(), ctx.p, seed, *ctx.options)
  + return _Dropout.apply(grad.contiguous(), ctx.p, seed + 1, *ctx.options)
both halves of a random number decide alike
  - lower = in_order(a << 16, b << 16, c << 16, d << 16)
  + lower = in_order(a, b, c, d)

# triton/cross_entropy
the rest of a row, beyond its whole blocks, is left out of the sum
  - reference, total = _fold(rest, reference, total, WIDTH)
  + reference, total = _fold(tl.where(in_row, -float("inf"), rest), reference, total, WIDTH)
the sum is not scaled where a larger maximum comes
  - return larger, total * tl.exp2(reference - larger) + tl.sum(weights, axis=1)
  + return larger, total + tl.sum(weights, axis=1)
ignored rows count in the mean
  - mask=first + lane < n_rows, other=ignore_index) != ignore_index).to(tl.int32)
  + mask=first + lane < n_rows, other=ignore_index) != ignore_index - 1).to(tl.int32)
the gradient is written with the next row's numbers
  - weight_due = factor_due / row_sum
  + weight_due = factor_due / row_sum * tl.where(row + tl.num_programs(0) < n_rows, 1.0, 1.01)
the last row's gradient is not written
  - n_rows + (tl.num_programs(0) if GRAD else 0), tl.num_programs(0)
  + n_rows + (tl.num_programs(0) - 1 if GRAD else 0), tl.num_programs(0)
the target is not subtracted where its class is in the rest of the row
  - mask=is_due & (target_due >= 0))
  + mask=is_due & (target_due >= 0) & ((target_due < whole) | (whole == 0)))
an ignored row has a gradient
  - factor_due = tl.where(known, scale, tl.where(counts, float("nan"), 0.0))
  + factor_due = tl.where(known | (target == ignore_index), scale, float("nan"))
smoothing takes the mean of the whole blocks alone
  - (tl.sum(plain, axis=0) + tl.sum(tl.where(in_row, rest, 0.0), axis=0)) / n_cols
  + tl.sum(plain, axis=0) / n_cols
a scaled loss gets the gradient of a plain one
  - if not READY or dy != 1.0:
  + if not READY:
a second backward changes what the first returned
  - ready, ctx.grad = ctx.grad, None
  + ready = ctx.grad
autograd does not learn that the logits were overwritten
  - torch.autograd.graph.increment_version(logits)
  + pass

# triton/rms_norm
the residual is left out of the norm
  - x = summed.to(tl.float32)  # y is the norm of the sum that is returned, and backward of no other
  + x -= 0.0
the mean is over the block, not over the row
  - rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
  + rstd = tl.rsqrt(tl.sum(x * x, axis=1) / BLOCK_N + eps)
a long row's last block does not count  [within=rms_norm_long_kernel]
  - squares += x * x
  - rstd_due
  + squares += 0.0
  + rstd_due
a long row is written with the scale of the next one
  - y = rest_due.to(tl.float32) * rstd_due * rest_weight.to(tl.float32)
  + y = rest_due.to(tl.float32) * tl.rsqrt(tl.sum(squares, axis=0) / n_cols + eps) * rest_weight.to(tl.float32)
a program's last long row is not written
  - for row in range(tl.program_id(0), n_rows + tl.num_programs(0), tl.num_programs(0)):
  + for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
dx lacks what the row's scale depends on
  - dx = (grad - x_hat * slope) * rstd
  + dx = grad * rstd
dweight is summed over y's gradient alone
  - dweight += tl.sum(dy * x_hat, axis=0)
  + dweight += tl.sum(dy, axis=0)
the gradient of the sum is dropped
  - x, weight, rstd = ctx.saved_tensors
  + x, weight, rstd = ctx.saved_tensors
  + dsum = None if dsum is None else dsum * 0
a part takes the sums of its own slice for the row's
  - slope = tl.sum(tl.where(parts < PARTS, products, 0.0), axis=0) / n_cols * rstd_due * rstd_due
  + slope = product / n_cols * rstd_due * rstd_due
eps is left out
  - tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
  + tl.rsqrt(tl.sum(x * x, axis=1) / n_cols)

# triton/flash_attention
the running sum is not rescaled
  - row_sum * alpha + tl.sum(weights, axis=1)
  + row_sum + tl.sum(weights, axis=1)
a query does not see its own key
  - cols[None, :] <= rows[:, None]
  + cols[None, :] < rows[:, None]
query heads read another group's keys  [within=flash_attention_kernel]
  - h_kv = h // Q_PER_KV
  + h_kv = h % Q_PER_KV
a last block of keys that is not full is left out
  - RAGGED=S_kv % block_n > 0
  + RAGGED=False
the output is 2.5 units in the last place of float16 too large  [uncaught]
  - o = (acc / row_sum[:, None]).to(o_desc.dtype)
  + o = (1.0025 * acc / row_sum[:, None]).to(o_desc.dtype)
the scale of the scores is 0.0006 too large  [uncaught]
  - causal, scale) * math.log2(math.e)
  + causal, scale) * 1.0006 * math.log2(math.e)
the logarithm of the sums leaves the maximum in powers of 2
  - lse = (row_max + tl.log2(row_sum)) * LN_2
  + lse = row_max + tl.log2(row_sum) * LN_2
the gradient of the keys has the scale of the scores in powers of 2
  - (dk * (scale * LN_2)).to(dk_desc.dtype)
  + (dk * scale).to(dk_desc.dtype)
delta is left out of the gradient of the keys
  - tl.dot(v, do.T) - delta[None, :]
  + tl.dot(v, do.T)
keys get the gradient of the first of the heads that share them
  - h = h_kv * Q_PER_KV + i
  + h = h_kv * Q_PER_KV
causal, keys miss the first queries that see them
  - tl.range(start_n, min(first_whole, S), BLOCK_M, num_stages=1)
  + tl.range(start_n + BLOCK_M, min(first_whole, S), BLOCK_M, num_stages=1)
warp specialized, the result is not rescaled when the maximum grows  [gpu]
  - acc = acc * gl.convert_layout(alpha, BY_ROW)[:, None]
  + pass
warp specialized, the values are those of the block after  [gpu]
  - v_slot, v_phase, b, h_kv, row + BLOCK_N)
  + v_slot, v_phase, b, h_kv, row)
warp specialized, the scores are read before their MMAs are done  [gpu]
  - scores = warpgroup_mma_wait(1, deps=(scores,))
  + scores = warpgroup_mma_wait(2, deps=(scores,))
warp specialized, a consumer keeps its turn  [gpu]
  - acc = _start_values(p, v_bufs, v_slot, acc)
  - mbarrier.arrive(turns.index(OTHER))
  + acc = _start_values(p, v_bufs, v_slot, acc)
warp specialized, the queries of a tile are never released  [gpu]
  - mbarrier.arrive(q_ring[2].index(CONSUMER))
  - q_phase ^= 1
  - mbarrier.wait
  + q_phase ^= 1
  + mbarrier.wait
warp specialized, a tile is written where TMA still reads the one before  [gpu]
  - tma.store_wait(0)
  - acc = warpgroup_mma_wait(0, deps=(acc,))
  + acc = warpgroup_mma_wait(0, deps=(acc,))

# triton/custom_op
the derivative of silu lacks a factor
  - dgate = grad * up * (sigmoid + silu * (1 - sigmoid))
  + dgate = grad * up * (sigmoid + gate * (1 - sigmoid))
the fake kernel says float32 for every dtype
  - lambda *inputs: _empty(f"{NAMESPACE}::silu_mul_opaque", 1, *inputs)[0]
  + lambda *inputs: _empty(f"{NAMESPACE}::silu_mul_opaque", 1, *inputs)[0].float()
halves of a matrix are read as if they were contiguous  [within=_launch]
  - inputs = [x.contiguous() for x in inputs]
  + pass

# triton/debugging
the planted bug is no bug, so no tool can find it
  - mask=offsets < tl.num_programs(0) * BLOCK
  + mask=offsets < n_elements
the twin without the bug overruns its output too
  - tl.store(y_ptr + offsets, 2 * x, mask=offsets < n_elements)
  + tl.store(y_ptr + offsets, 2 * x)
""")
