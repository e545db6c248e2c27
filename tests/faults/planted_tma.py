"""Faults of examples/tma. Most kernels of Gluon run on a GPU only, and so are their faults caught."""

from . import Fault

FAULTS = [
    # what_is_tma
    Fault(
        "tma/what_is_tma",
        "y_desc.store([row, col], (x.to(tl.float32) * factor).to(x.dtype))",
        "y_desc.store([row, col], (x * factor).to(x.dtype))",
        "the product is taken in the storage's dtype",
    ),
    Fault(
        "tma/what_is_tma",
        "return tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N",
        "return tile % tiles_n * BLOCK_M, tile // tiles_n * BLOCK_N",
        "rows and columns of tiles are swapped",
    ),
    Fault(
        "tma/what_is_tma",
        "step = 16 // x.element_size()",
        "step = 8 // x.element_size()",
        "the rows of the output are 8 bytes apart, and TMA needs 16",
    ),
    # tma_copy
    Fault(
        "tma/tma_copy",
        "if out.numel() and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():",
        "if False:",
        "an output over its input is let through",
    ),
    Fault(
        "tma/tma_copy",
        "if (length := out.shape[1] * out.element_size()) % 16:",
        "if (length := out.shape[1]) > 2**31:",
        "an output is let through whose rows a TMA store would overrun",
    ),
    Fault(
        "tma/tma_copy",
        "mbarrier.wait(full.index(slot), (turn // STAGES) & 1)",
        "mbarrier.wait(full.index(slot), 0)",
        "the ring waits for the wrong phase from its second round on",
        gpu=True,
    ),
    Fault(
        "tma/tma_copy",
        "tma.store_wait(LAG)",
        "tma.store_wait(LAG + 1)",
        "a buffer is loaded again while its store may still read it",
        gpu=True,
    ),
    Fault(
        "tma/tma_copy",
        "tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)",
        "tiles = tl.cdiv(M, BLOCK_M) * max(1, N // BLOCK_N)",
        "the programs that walk leave out the last tiles of columns",
    ),
    Fault(
        "tma/tma_copy",
        "rows = rows.to(tl.int64)\n",
        "pass\n",
        "the pointer form's offsets are int32",
        gpu=True,
    ),
    # descriptors
    Fault(
        "tma/descriptors",
        "if corner[-1] * itemsize % 16:",
        "if corner[-1] * itemsize % 8:",
        "a box may begin at a multiple of 8 bytes",
    ),
    Fault(
        "tma/descriptors",
        "tile = tile // tiles[RANK - i]",
        "tile = tile // tiles[RANK - 1 - i]",
        "tiles are counted by the wrong dimension",
    ),
    Fault(
        "tma/descriptors",
        "if block[-1] * itemsize < 16:",
        "if block[-1] * itemsize < 8:",
        "a block narrower than 16 bytes is let through",
    ),
    Fault(
        "tma/descriptors",
        "BLOCK, padding_option=PADDING)",
        "BLOCK)",
        "descriptors made by programs pad with zeros whatever is asked",
    ),
    Fault(
        "tma/descriptors",
        "if store and shape[-1] * itemsize % 16:",
        "if store and False:",
        "a store past the end of a row is let through",
    ),
    # tma_matmul
    Fault(
        "tma/tma_matmul",
        "acc = tl.dot(a.load([row, k]), b.load([k, col]), acc)",
        "acc = tl.dot(a.load([row, k]), b.load([k, col]))",
        "each step of K overwrites the sum",
    ),
    Fault(
        "tma/tma_matmul",
        "b_ptrs += BLOCK_K * stride_b",
        "b_ptrs += BLOCK_K",
        "b's pointers advance by columns instead of rows",
    ),
    Fault(
        "tma/tma_matmul",
        "store_parts(desc, right, row, col + width, PARTS // 2)",
        "store_parts(desc, right, row + width, col, PARTS // 2)",
        "the right part of a tile is stored below the left",
    ),
    Fault(
        "tma/tma_matmul",
        "K % step or N % step",
        "K % (step // 2) or N % (step // 2)",
        "rows that are no multiple of 16 bytes are let through",
    ),
    # tma_persistent_matmul
    Fault(
        "tma/tma_persistent_matmul",
        """\
        for part in tl.static_range(PARTS):
            _store_part(c_desc, done, done_row, done_col, part, PARTS)""",
        """\
        for part in tl.static_range(PARTS - 1):
            _store_part(c_desc, done, done_row, done_col, part, PARTS)""",
        "the last part of the last tile is never stored",
    ),
    Fault(
        "tma/tma_persistent_matmul",
        "elif step < PARTS:",
        "elif step < PARTS - 1:",
        "the last part of every tile but the last is never stored",
    ),
    Fault(
        "tma/tma_persistent_matmul",
        "[p.block_n, p.block_k] if columns else [p.block_k, p.block_n]",
        "[p.block_k, p.block_n]",
        "the box of a transposed b has its sizes swapped",
    ),
    Fault(
        "tma/tma_persistent_matmul",
        "if _overlap(out, x):",
        "if False:",
        "an output over an operand is let through",
    ),
    Fault(
        "tma/tma_persistent_matmul",
        'programs = tiles_of(tile) if chosen in ("tile", "pair") else min(tiles_of(tile), sms)',
        "programs = min(tiles_of(tile), sms)",
        "a schedule of a tile per program gets too few programs",
    ),
    # tma_epilogues
    Fault(
        "tma/tma_epilogues",
        "acc += bias[None, :].to(tl.float32)",
        "pass",
        "the bias is left out",
        within="_finish_and_store",
    ),
    Fault(
        "tma/tma_epilogues",
        "bias_left, bias_right = bias.reshape(2, half).permute(1, 0).split()",
        "bias_left, bias_right = bias.reshape(half, 2).split()",
        "the halves of the bias are its even and odd numbers",
    ),
    Fault(
        "tma/tma_epilogues",
        "return half + half * tl.erf(0.7071067812 * x)",
        "return half + half * tl.erf(x)",
        "exact GELU's argument lacks its factor",
    ),
    Fault(
        "tma/tma_epilogues",
        "root = tl.rsqrt(1.0 + tl.exp2(-1.4426950409 * x))",
        "root = tl.rsqrt(1.0 + tl.exp2(-x))",
        "silu takes powers of 2 for those of e",
    ),
    Fault(
        "tma/tma_epilogues",
        "tl.store(scale_ptr + (col // GROUP).to(tl.int64) * M + at",
        "tl.store(scale_ptr + (col // GROUP).to(tl.int64) * N + at",
        "the scales of a group are stored with the wrong stride",
    ),
    Fault(
        "tma/tma_epilogues",
        "mbarrier.wait(taken.index(HALF), tile_phase ^ 1)",
        "mbarrier.wait(taken.index(HALF), tile_phase)",
        "a consumer waits for the wrong phase before it hands its sums over",
        gpu=True,
    ),
    Fault(
        "tma/tma_epilogues",
        "up = tl.dot(x, up_desc.load([col, k]).T, up)",
        "up = tl.dot(x, w_desc.load([col, k]).T, up)",
        "swiglu multiplies the gate by itself",
    ),
    # gluon_matmul
    Fault(
        "tma/gluon_matmul",
        "phase = 1",
        "phase = 0",
        "the producer waits for buffers that were never full",
        within="_produce",
        gpu=True,
    ),
    Fault(
        "tma/gluon_matmul",
        "mbarrier.expect(full, (A + B) * a_desc.dtype.primitive_bitwidth // 8, pred=pred)",
        "mbarrier.expect(full, A * a_desc.dtype.primitive_bitwidth // 8, pred=pred)",
        "the barrier completes when a is there, without b",
        gpu=True,
    ),
    Fault(
        "tma/gluon_matmul",
        "fence_async_shared()",
        "pass",
        "TMA may store what threads have not written yet",
        within="store_tile",
        gpu=True,
    ),
    Fault(
        "tma/gluon_matmul",
        "pause = gl.cdiv(K, BLOCK_K) * BLOCK_K - BEHIND * BLOCK_K",
        "pause = K - BEHIND * BLOCK_K",
        "the second consumer's pause is no multiple of a step, so it never comes",
        gpu=True,
    ),
    # blackwell
    Fault(
        "tma/blackwell",
        "block_k = BLOCK_BYTES // a.element_size()\ntiles =",
        "block_k = BLOCK_BYTES\ntiles =",
        "a step of K counts bytes as elements",
    ),
    Fault(
        "tma/blackwell",
        "left = COLUMNS - scale_columns(block_m, block_n, scale_groups, stages)",
        "left = COLUMNS",
        "the columns of the scales are not taken off tensor memory",
    ),
    Fault(
        "tma/blackwell",
        "c = acc.slice(part * WIDTH, WIDTH).load(REGISTERS)",
        "c = acc.slice(0, WIDTH).load(REGISTERS)",
        "every part of a tile is its first",
        gpu=True,
    ),
    Fault(
        "tma/blackwell",
        "mbarrier.arrive(acc_empty.index(slot))",
        "mbarrier.arrive(acc_full.index(slot))",
        "an accumulator that was read is never empty",
        gpu=True,
    ),
    Fault(
        "tma/blackwell",
        "if K % (each := 16 // a.element_size()):",
        "if K % (each := 8 // a.element_size()):",
        "rows that are no multiple of 16 bytes are let through",
    ),
]
