"""Faults of examples/triton; those that are `uncaught` a review got past every check."""

from . import Fault

FAULTS = [
    # vector_add
    Fault(
        "triton/vector_add",
        "inside = offsets < n_elements",
        "inside = offsets <= n_elements",
        "the mask lets one element past the end through",
    ),
    Fault(
        "triton/vector_add",
        "tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "offsets are int32 and wrap beyond 2**31 elements",
        gpu=True,
    ),
    Fault(
        "triton/vector_add",
        "grid = (triton.cdiv(n_elements, BLOCK),)",
        "grid = (n_elements // BLOCK,)",
        "the grid rounds down, so the last block is not computed",
    ),
    Fault(
        "triton/vector_add",
        "x = tl.load(x_ptr + offsets, mask=inside)\ny = tl.load(y_ptr + offsets, mask=inside)",
        "x = tl.load(x_ptr + offsets)\ny = tl.load(y_ptr + offsets)",
        "loads have no mask and read past the end",
        uncaught=True,
    ),
    Fault(
        "triton/vector_add",
        "if n_elements:",
        """\
        calls = vector_add.__dict__.setdefault("calls", {})
        calls[x] = calls.get(x, 0) + 1
        if calls[x] > 1:
            return out.zero_()
        if n_elements:""",
        "from the second call on the same tensors on, the result is zeros",
        uncaught=True,
    ),
    # fused_add_relu_mul
    Fault(
        "triton/fused_add_relu_mul",
        "tl.where(added < 0, 0.0, added)",
        "tl.where(added > 0, added, 0.0)",
        "NaN becomes 0, where torch.relu lets it through",
    ),
    Fault(
        "triton/fused_add_relu_mul",
        "(rectified * scale).to(out_ptr.dtype.element_ty)",
        "(rectified.to(out_ptr.dtype.element_ty) * scale).to(out_ptr.dtype.element_ty)",
        "the product is taken in the storage's dtype, so it rounds three times",
    ),
    Fault(
        "triton/fused_add_relu_mul",
        "float(scale), n_elements",
        "float(int(scale)), n_elements",
        "the scale loses its fraction",
    ),
    # softmax
    Fault(
        "triton/softmax",
        'mask=inside, other=-float("inf")).to(tl.float32)\nweights = tl.exp(x - tl.max(x, axis=1)[:, None])',
        "mask=inside, other=0.0).to(tl.float32)\nweights = tl.exp(x - tl.max(x, axis=1)[:, None])",
        "rows are padded with 0 instead of -inf, so the padding counts",
    ),
    Fault(
        "triton/softmax",
        "if n_cols <= RESIDENT_MIN:",
        "if n_cols <= 4 * ROWS_MAX:",
        "the dispatch hands rows to a kernel that does not take them",
    ),
    Fault(
        "triton/softmax",
        "x_ptr + rows[:, None] * stride_xm + cols[None, :]",
        "x_ptr + rows[:, None] * stride_ym + cols[None, :]",
        "the input is read with the output's row stride",
    ),
    Fault(
        "triton/softmax",
        "LAST: tl.constexpr = (N_COLS - 1) // BLOCK_N * BLOCK_N",
        "LAST: tl.constexpr = N_COLS // BLOCK_N * BLOCK_N",
        "the backward walk begins a block too far where the length divides",
        within="softmax_resident_kernel",
    ),
    Fault(
        "triton/softmax",
        "while arrived < PARTS:",
        "while arrived < PARTS - 1:",
        "a part does not wait for the last one of its row",
        gpu=True,
    ),
    Fault(
        "triton/softmax",
        'own = tl.where(part_max == -float("inf"), 0.0, tl.exp(part_max - row_max))',
        "own = 1.0",
        "a part's weights keep their own maximum",
        gpu=True,
    ),
    Fault(
        "triton/softmax",
        "y = weights / tl.sum(weights, axis=1)[:, None]",
        """\
        y = weights / tl.sum(weights, axis=1)[:, None]
        if y_ptr.dtype.element_ty != tl.float32:
            y *= 1.0013""",
        "each 16-bit weight is 1.3 units in the last place of float16 too large",
        uncaught=True,
    ),
    # matmul
    Fault(
        "triton/matmul",
        "for k in range(0, K, BLOCK_K):",
        "for k in range(0, K - BLOCK_K, BLOCK_K):",
        "the last step of K is dropped",
    ),
    Fault(
        "triton/matmul",
        "a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)",
        "a = tl.load(a_ptrs, mask=inner[None, :] <= K - k, other=0.0)",
        "the mask of a's last step is one too wide",
    ),
    Fault(
        "triton/matmul",
        'triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"])',
        'triton.cdiv(M, meta["BLOCK_N"]) * triton.cdiv(N, meta["BLOCK_N"])',
        "the grid counts rows of tiles by the columns of a tile",
    ),
    Fault(
        "triton/matmul",
        'args["K"] % args["BLOCK_K"] == 0',
        'args["K"] % 32 == 0',
        "EVEN_K is true for sizes that the step does not divide",
    ),
    Fault(
        "triton/matmul",
        "band = min(tiles_m - first_m, GROUP_M)",
        "band = GROUP_M",
        "the last band is taken to be full, so some tiles are computed twice and others never",
    ),
    Fault(
        "triton/matmul",
        "tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty)",
        """\
        if c_ptr.dtype.element_ty != tl.float32:
            acc *= 1.0014
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty)""",
        "a 16-bit product is 1.4 units in the last place of float16 too large",
        uncaught=True,
    ),
    Fault(
        "triton/matmul",
        "tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty)",
        """\
        if c_ptr.dtype.element_ty != tl.float32:
            acc = (acc.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty)""",
        "a 16-bit result is cut off at float16's bits and not rounded",
        uncaught=True,
    ),
    # tensor_cores
    Fault(
        "triton/tensor_cores",
        "exact and K > MAX_K_INT8",
        "exact and K > 2 * MAX_K_INT8",
        "sums of int8 products that may overflow are let through",
    ),
    Fault(
        "triton/tensor_cores",
        "ACC=tl.int32 if exact else tl.float32",
        "ACC=tl.float32",
        "int8 products are summed in float32",
    ),
    Fault(
        "triton/tensor_cores",
        "PRECISION=input_precision,",
        "PRECISION=None,",
        "input_precision is dropped on the way to the kernel",
    ),
    Fault(
        "triton/tensor_cores",
        "b = tl.load(b_ptrs, mask=inner[:, None] < left, other=0)",
        "b = tl.load(b_ptrs)",
        "b is read past its last row",
    ),
    # shared_memory
    Fault(
        "triton/shared_memory",
        "total += tl.load(x_ptr + row * stride_xm + cols, mask=cols < n_cols, other=0.0).to(tl.float32)",
        "total += tl.load(x_ptr + row * stride_xm + cols).to(tl.float32)",
        "a row's sum goes on into the next row",
    ),
    Fault(
        "triton/shared_memory",
        "for row in tl.range(0, n_rows, num_stages=STAGES):",
        "for row in tl.range(0, n_rows - STAGES + 1, num_stages=STAGES):",
        "the column sums leave out the rows that were loaded ahead",
    ),
    Fault(
        "triton/shared_memory",
        "(shared_data * 2.0)",
        "(shared_data * 2.001)",
        "twice x is 2.001 times x",
    ),
    Fault(
        "triton/shared_memory",
        "matmul_strip_kernel[(M * triton.cdiv(N, BLOCK),)]",
        "matmul_strip_kernel[(M * max(1, N // BLOCK),)]",
        "the strip's grid leaves out the last columns",
    ),
    # autotune
    Fault(
        "triton/autotune",
        "EVEN_K=K % 128 == 0",
        "EVEN_K=K % 64 == 0",
        "EVEN_K is true where steps of 128 do not divide K",
    ),
    Fault(
        "triton/autotune",
        "if need > limit:",
        "if need > 2 * limit:",
        "a tile that shared memory cannot hold is let through",
    ),
    Fault(
        "triton/autotune",
        "max(16, triton.next_power_of_2(M))",
        "M",
        "every M is a key of its own, so every batch size is tuned",
    ),
    Fault(
        "triton/autotune",
        "buffers = config.num_stages - (m < 64 or sm // 10 not in (9, 10, 11))",
        "buffers = config.num_stages - (m < 64 or sm // 10 in (9, 10, 11))",
        "shared memory is predicted for the wrong generations",
    ),
    # pipelined_matmul
    Fault(
        "triton/pipelined_matmul",
        "EVEN_K=K % BLOCK_K == 0",
        "EVEN_K=True",
        "the last step is loaded without its mask",
    ),
    Fault(
        "triton/pipelined_matmul",
        "b_ptrs += step_b",
        "b_ptrs += step_a",
        "b advances by a's step",
    ),
    Fault(
        "triton/pipelined_matmul",
        "reads_later = sm // 10 in (9, 10, 11)",
        "reads_later = sm // 10 in (8, 9, 10, 11, 12)",
        "mma.sync is counted as if it read shared memory late",
    ),
    # persistent_matmul
    Fault(
        "triton/persistent_matmul",
        "c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))",
        "c_desc.store([row, col + BLOCK_N // 2], left.to(c_desc.dtype))",
        "the left half is stored twice",
    ),
    Fault(
        "triton/persistent_matmul",
        "min(tiles, device_limits(a.device).sms)",
        "min(tiles - 1, device_limits(a.device).sms)",
        "one tile alone starts no program",
    ),
    Fault(
        "triton/persistent_matmul",
        "tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN)",
        "tl.range(tl.program_id(0), tl.num_programs(0), tl.num_programs(0), flatten=FLATTEN)",
        "each program computes its first tile only",
    ),
    # warp_specialized_matmul
    Fault(
        "triton/warp_specialized_matmul",
        "tl.make_tensor_descriptor(c, [M, N], [stride_cm, 1], [BLOCK_M, BLOCK_N])",
        "tl.make_tensor_descriptor(c, [M, K], [stride_cm, 1], [BLOCK_M, BLOCK_N])",
        "c is described with K columns",
    ),
    Fault(
        "triton/warp_specialized_matmul",
        "tile % (GROUP_M * tiles_n) // group",
        "tile % (GROUP_M * tiles_n) // GROUP_M",
        "columns of tiles are counted as if the last group were full",
    ),
    Fault(
        "triton/warp_specialized_matmul",
        "tl.range(first, n_elements, tl.num_programs(0) * BLOCK, num_stages=3, warp_specialize=True)",
        "tl.range(first, n_elements - BLOCK, tl.num_programs(0) * BLOCK, num_stages=3, warp_specialize=True)",
        "the copy stops a block before the end",
    ),
    # layer_norm
    Fault(
        "triton/layer_norm",
        "rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)",
        "rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + 1e-6 * eps)",
        "eps is as good as ignored",
        uncaught=True,
    ),
    Fault(
        "triton/layer_norm",
        "rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)",
        "rstd = tl.rsqrt(tl.sum(x * x, axis=1) / (n_cols - 1) + eps)",
        "the variance is over n - 1",
    ),
    Fault(
        "triton/layer_norm",
        "tl.store(mean_ptr + rows, origin + mean, mask=rows < n_rows)",
        "tl.store(mean_ptr + rows, mean, mask=rows < n_rows)",
        "the mean that backward gets is measured from the row's first element",
    ),
    Fault(
        "triton/layer_norm",
        "count = ((N_COLS + BLOCK_N - 1 - lane) // BLOCK_N).to(tl.float32)",
        "count = tl.zeros((BLOCK_N,), tl.float32) + seen",
        "lanes beyond the last columns count as full",
    ),
    Fault(
        "triton/layer_norm",
        "dweight += tl.sum(dy * x_hat, axis=0)\ndbias += tl.sum(dy, axis=0)",
        "dweight += tl.sum(dy, axis=0)\ndbias += tl.sum(dy * x_hat, axis=0)",
        "dweight and dbias are swapped",
    ),
    Fault(
        "triton/layer_norm",
        "shift = tl.sum(grad, axis=1)[:, None] / n_cols * rstd\nslope = tl.sum(grad * x_hat, axis=1)[:, None]",
        "slope = tl.sum(grad, axis=1)[:, None] / n_cols * rstd\nshift = tl.sum(grad * x_hat, axis=1)[:, None]",
        "the two sums of a row are swapped",
    ),
    Fault(
        "triton/layer_norm",
        "dweight += tl.sum(dy * x_hat, axis=0)",
        "dweight += tl.sum(tl.where((rows < n_rows - 4 * (n_rows >= 65536))[:, None], dy * x_hat, 0.0), axis=0)",
        "dweight lacks the last 4 of 65536 rows",
        gpu=True,
        uncaught=True,
    ),
    Fault(
        "triton/layer_norm",
        "mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)\nshift, slope",
        "mean, rstd = tl.load(mean_ptr + row // 2 * 2), tl.load(rstd_ptr + row // 2 * 2)\nshift, slope",
        "every second row takes mean and rstd of its neighbour",
    ),
    Fault(
        "triton/layer_norm",
        "mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)\nshift, slope",
        """\
        near = tl.where(n_cols >= 65536, row // 2 * 2, row)
        mean, rstd = tl.load(mean_ptr + near), tl.load(rstd_ptr + near)
        shift, slope""",
        "every second row of 65536 columns takes mean and rstd of its neighbour",
        gpu=True,
        uncaught=True,
    ),
    Fault(
        "triton/layer_norm",
        "_send(mail_ptr + row * stride_mail + part, total, product, row < n_rows)",
        "_send(mail_ptr + row * stride_mail + part, product, total, row < n_rows)",
        "the parts of a row send their sums in the wrong order",
        gpu=True,
    ),
    Fault(
        "triton/layer_norm",
        "n_cols <= BACKWARD_ROWS_MAX",
        "n_cols <= 2 * BACKWARD_ROWS_MAX",
        "the dispatch hands longer rows to a kernel that does not take them",
    ),
    Fault(
        "triton/layer_norm",
        "if missing := [label for label, vector in columns.items() if vector is None]:",
        "if missing := []:",
        "a missing weight is not refused by name",
    ),
    # dropout
    Fault(
        "triton/dropout",
        "scale = values / (values - dropped) if dropped < values else 0.0",
        "scale = 1.0 if dropped < values else 0.0",
        "what stays is not scaled by 1 / (1 - p)",
    ),
    Fault(
        "triton/dropout",
        "calls = (start + first) // PER_CALL",
        "calls = first // PER_CALL",
        "start is ignored, so parts repeat one mask",
    ),
    Fault(
        "triton/dropout",
        "return _Dropout.apply(grad.contiguous(), ctx.p, seed, *ctx.options)",
        "return _Dropout.apply(grad.contiguous(), ctx.p, seed + 1, *ctx.options)",
        "backward draws another mask than forward",
    ),
    Fault(
        "triton/dropout",
        "lower = in_order(a << 16, b << 16, c << 16, d << 16)",
        "lower = in_order(a, b, c, d)",
        "both halves of a random number decide alike",
    ),
    # flash_attention
    Fault(
        "triton/flash_attention",
        "row_sum * alpha + tl.sum(weights, axis=1)",
        "row_sum + tl.sum(weights, axis=1)",
        "the running sum is not rescaled",
    ),
    Fault(
        "triton/flash_attention",
        "cols[None, :] <= rows[:, None]",
        "cols[None, :] < rows[:, None]",
        "a query does not see its own key",
    ),
    Fault(
        "triton/flash_attention",
        "h_kv = h // Q_PER_KV",
        "h_kv = h % Q_PER_KV",
        "query heads read another group's keys",
        within="flash_attention_kernel",
    ),
    Fault(
        "triton/flash_attention",
        "RAGGED=S_kv % block_n > 0",
        "RAGGED=False",
        "a last block of keys that is not full is left out",
    ),
    Fault(
        "triton/flash_attention",
        "o = (acc / row_sum[:, None]).to(o_desc.dtype)",
        "o = (1.0025 * acc / row_sum[:, None]).to(o_desc.dtype)",
        "the output is 2.5 units in the last place of float16 too large",
        uncaught=True,
    ),
    Fault(
        "triton/flash_attention",
        "scale * math.log2(math.e), H, H // H_kv",
        "1.0006 * scale * math.log2(math.e), H, H // H_kv",
        "the scale of the scores is 0.0006 too large",
        uncaught=True,
    ),
    # custom_op
    Fault(
        "triton/custom_op",
        "dgate = grad * up * (sigmoid + silu * (1 - sigmoid))",
        "dgate = grad * up * (sigmoid + gate * (1 - sigmoid))",
        "the derivative of silu lacks a factor",
    ),
    Fault(
        "triton/custom_op",
        'lambda *inputs: _empty(f"{NAMESPACE}::silu_mul_opaque", 1, *inputs)[0]',
        'lambda *inputs: _empty(f"{NAMESPACE}::silu_mul_opaque", 1, *inputs)[0].float()',
        "the fake kernel says float32 for every dtype",
    ),
    Fault(
        "triton/custom_op",
        "inputs = [x.contiguous() for x in inputs]",
        "pass",
        "halves of a matrix are read as if they were contiguous",
        within="_launch",
    ),
    # debugging
    Fault(
        "triton/debugging",
        "mask=offsets < tl.num_programs(0) * BLOCK",
        "mask=offsets < n_elements",
        "the planted bug is no bug, so no tool can find it",
    ),
    Fault(
        "triton/debugging",
        "tl.store(y_ptr + offsets, 2 * x, mask=offsets < n_elements)",
        "tl.store(y_ptr + offsets, 2 * x)",
        "the twin without the bug overruns its output too",
    ),
]
