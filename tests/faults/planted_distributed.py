"""Faults of examples/distributed; their demos run in two ranks by gloo."""

from . import listed

FAULTS = listed("""
# distributed/tensor_parallel
the parts of a fused weight are in the order of one process
  - for rank in range(ranks) for piece in pieces
  + for piece in pieces for rank in range(ranks)
the heads that a rank has are taken for all
  - kv_heads=c.kv_heads // ranks)
  + kv_heads=c.kv_heads)
sequence parallel gives each rank the first tokens
  - return x.chunk(self.ranks, dim=1)[self.rank]
  + return x.chunk(self.ranks, dim=1)[0]
an all-reduce is counted as half of what a ring sends  [tests=examples/common/test_collectives.py]
  - "all_reduce": lambda n: 2 * (n - 1)
  + "all_reduce": lambda n: n - 1

# distributed/fp8_all_gather
a scale a row is the scale of the rank
  - dim=1 if each == "row" else (0, 1), keepdim=True)
  + dim=(0, 1), keepdim=True).expand(len(w) if each == "row" else 1, 1)
every rank reads back with its own scales
  - q, scales = (gather(part) for part in quantize(w, each))
  + q, scales = gather(quantize(w, each)[0]), quantize(w, each)[1].repeat(dist.get_world_size(), 1)
the largest magnitude does not fit the format
  - / fp8_max(E4M3)
  + / 512

# distributed/checkpoint_resume
the optimizer's state is not loaded
  - dcp.load(state, checkpoint_id=folder)
  + optimizer = state.pop("optimizer")
  + dcp.load(state, checkpoint_id=folder)
  + state["optimizer"] = optimizer
the step is not loaded, and the data begin again
  - self.step = state["step"]
  + pass
a training that began from other bits is let through
  - if not torch.equal(loaded, saved):
  + if False:

# distributed/one_shot_allreduce
the two halves of the buffer do not take turns
  - half = (call % 2) * n
  + half = 0 * n
each rank adds up its own message, so often as there are ranks
  - total += tl.load(pointer(data[rank], dtype)
  + total += tl.load(pointer(data[RANK], dtype)
even and odd calls have one box
  - box = (call % 2) * WORLD * words
  + box = (call * 0) * WORLD * words
any call's words are taken for this one's
  - while tl.max(((words >> 32).to(tl.int32) != call.to(tl.int32)).to(tl.int32)
  + while tl.max(((words >> 32) == 0).to(tl.int32)
a mailbox of this rank is read for every peer's
  - bits = _receive(own + rank * words + at,
  + bits = _receive(own + (RANK + 1) % WORLD * words + at,
an output that lies in the workspace is accepted
  - if any(overlap(out, each) for each in held):
  + if False:

# distributed/fused_collectives
the rows of another rank are multiplied at the place of the first
  - first = (call % 2 * WORLD + source) * rows
  + first = call % 2 * WORLD * rows
what a rank has of another is stored as its own
  - store_part(y_ptr + source.to(tl.int64) * rows * N,
  + store_part(y_ptr + RANK * rows * N,
rows that lie apart are copied by kernels, beside programs that wait for them
  - x = x.contiguous()
  + pass
""")
