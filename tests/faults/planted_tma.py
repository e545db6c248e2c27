"""Faults of examples/tma. Most kernels of Gluon run on a GPU only, and so are their faults caught."""

from . import listed

FAULTS = listed("""
# tma/what_is_tma
the product is taken in the storage's dtype
  - y_desc.store([row, col], (x.to(tl.float32) * factor).to(x.dtype))
  + y_desc.store([row, col], (x * factor).to(x.dtype))
rows and columns of tiles are swapped
  - return tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
  + return tile % tiles_n * BLOCK_M, tile // tiles_n * BLOCK_N
the rows of the output are 8 bytes apart, and TMA needs 16
  - step = 16 // x.element_size()
  + step = 8 // x.element_size()

# tma/tma_copy
an output over its input is let through
  - if out.numel() and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
  + if False:
an output is let through whose rows a TMA store would overrun
  - if (length := out.shape[1] * out.element_size()) % 16:
  + if (length := out.shape[1]) > 2**31:
README shows one tile a program, which the call without options does not run  [tests=examples/test_headlines.py]
  - case=case, **{"default": taken()} | options
  + case=case, **{"default": None} | options
the ring waits for the wrong phase from its second round on  [gpu]
  - mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
  + mbarrier.wait(full.index(slot), 0)
a buffer is loaded again while its store may still read it  [gpu]
  - tma.store_wait(LAG)
  + tma.store_wait(LAG + 1)
the programs that walk leave out the last tiles of columns
  - tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
  + tiles = tl.cdiv(M, BLOCK_M) * max(1, N // BLOCK_N)
the pointer form's offsets are int32  [gpu]
  - rows = rows.to(tl.int64)
  + pass

# tma/descriptors
a block narrower than 16 bytes is let through
  - if block[-1] * itemsize < 16:
  + if block[-1] * itemsize < 8:
a descriptor made by a program takes the rows as lying without a gap
  - x_desc = tl.make_tensor_descriptor(x_ptr, [M, N], [stride_xm, 1], [BLOCK_M, BLOCK_N])
  + x_desc = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
the copy by pointers goes on past the last column  [within=copy_pointers_kernel]
  - inside = (rows < M) & (cols < N)
  + inside = (rows < M) & (cols >= 0)

# tma/tma_matmul
each step of K overwrites the sum
  - acc = tl.dot(a.load([row, k]), b.load([k, col]), acc)
  + acc = tl.dot(a.load([row, k]), b.load([k, col]))
b's pointers advance by columns instead of rows
  - b_ptrs += BLOCK_K * stride_b
  + b_ptrs += BLOCK_K
the right part of a tile is stored below the left
  - store_parts(desc, right, row, col + width, PARTS // 2)
  + store_parts(desc, right, row + width, col, PARTS // 2)
rows that are no multiple of 16 bytes are let through
  - K % step or N % step
  + K % (step // 2) or N % (step // 2)

# tma/tma_persistent_matmul
the last part of the last tile is never stored
  - for part in tl.static_range(PARTS):
  -     _store_part(c_desc, done, done_row, done_col, part, PARTS)
  + for part in tl.static_range(PARTS - 1):
  +     _store_part(c_desc, done, done_row, done_col, part, PARTS)
the last part of every tile but the last is never stored
  - elif step < PARTS:
  + elif step < PARTS - 1:
the box of a transposed b has its sizes swapped
  - [p.block_n, p.block_k] if columns else [p.block_k, p.block_n]
  + [p.block_k, p.block_n]
an output over an operand is let through
  - if _overlap(out, x):
  + if False:
a schedule of a tile per program gets too few programs
  - programs = tiles_of(tile) if chosen in ("tile", "pair") else min(tiles_of(tile), sms)
  + programs = min(tiles_of(tile), sms)
what was prepared is launched whichever device is current
  - if c.is_cuda and c.device.index != torch.cuda.current_device():
  + if False:

# tma/tma_epilogues
the epilogue begins before the accumulators are there
  - mbarrier.wait(filled.index(half), tile_phase)
  + pass
a consumer leaves its accumulator where the epilogue still reads the one before
  - mbarrier.wait(taken.index(HALF), tile_phase ^ 1)
  + pass
Inductor's own fusion is left out of the answer's ratio  [tests=examples/test_headlines.py]
  - min(table.over(library, variant) for library in (two, FUSED))
  + min(table.over(library, variant) for library in (two,))
the bias is left out  [within=_finish_and_store]
  - acc += bias[None, :].to(tl.float32)
  + pass
the halves of the bias are its even and odd numbers
  - bias_left, bias_right = bias.reshape(2, half).permute(1, 0).split()
  + bias_left, bias_right = bias.reshape(half, 2).split()
exact GELU's argument lacks its factor
  - return half + half * tl.erf(0.7071067812 * x)
  + return half + half * tl.erf(x)
silu takes powers of 2 for those of e
  - root = tl.rsqrt(1.0 + tl.exp2(-1.4426950409 * x))
  + root = tl.rsqrt(1.0 + tl.exp2(-x))
the scales of a group are stored with the wrong stride
  - tl.store(scale_ptr + (col // GROUP).to(tl.int64) * M + at
  + tl.store(scale_ptr + (col // GROUP).to(tl.int64) * N + at
a consumer waits for the wrong phase before it hands its sums over  [gpu]
  - mbarrier.wait(taken.index(HALF), tile_phase ^ 1)
  + mbarrier.wait(taken.index(HALF), tile_phase)
swiglu multiplies the gate by itself
  - up = tl.dot(x, up_desc.load([col, k]).T, up)
  + up = tl.dot(x, w_desc.load([col, k]).T, up)

# tma/gluon_matmul
the producer waits for buffers that were never full  [within=_produce gpu]
  - phase = 1
  + phase = 0
the barrier completes when a is there, without b  [gpu]
  - mbarrier.expect(full, (A + B) * a_desc.dtype.primitive_bitwidth // 8, pred=pred)
  + mbarrier.expect(full, A * a_desc.dtype.primitive_bitwidth // 8, pred=pred)
TMA may store what threads have not written yet  [within=store_tile gpu]
  - fence_async_shared()
  + pass
the second consumer's pause is no multiple of a step, so it never comes  [gpu]
  - pause = gl.cdiv(K, BLOCK_K) * BLOCK_K - BEHIND * BLOCK_K
  + pause = K - BEHIND * BLOCK_K
b is loaded for both CTAs of a cluster when those of one have emptied the slot  [gpu]
  - mbarrier.wait(pair.index(slot), phase)
  + pass
a CTA of a cluster may end while the other still arrives at its barriers  [gpu]
  - cluster.barrier()
  + pass

# tma/blackwell
a step of K counts bytes as elements
  - block_k = BLOCK_BYTES // a.element_size()
  - tiles =
  + block_k = BLOCK_BYTES
  + tiles =
the columns of the scales are not taken off tensor memory
  - left = COLUMNS - scale_columns(block_m, block_n, scale_groups, stages)
  + left = COLUMNS
every part of a tile is its first  [gpu]
  - c = load_columns(acc, part * WIDTH, WIDTH)
  + c = load_columns(acc, 0, WIDTH)
an accumulator that was read is never empty  [gpu]
  - mbarrier.arrive(acc_empty.index(slot))
  + mbarrier.arrive(acc_full.index(slot))
rows that are no multiple of 16 bytes are let through
  - if K % (each := 16 // a.element_size()):
  + if K % (each := 8 // a.element_size()):
""")
