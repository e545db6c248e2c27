"""Faults of examples/compiler and examples/xla. The second need torch_xla to run."""

from . import listed

FAULTS = listed("""
# compiler/custom_ops
the fake kernel says another dtype than the real one
  - x.new_empty(x.shape, dtype=torch.int64)
  + x.new_empty(x.shape, dtype=torch.int32)
the gradient of a block is its sum and not its mean
  - return (sums / counts).gather(-1, blocks).to(grad.dtype)
  + return sums.gather(-1, blocks).to(grad.dtype)

# compiler/graph_breaks  [tests=test_compile_inspect.py]
only the first break is counted
  - if artifact == "graph_breaks":
  + if artifact == "graph_breaks" and not breaks:
a break that is told twice loses its line
  - breaks[at] = replace(breaks[at], lost=found.lost) if at in breaks else found
  + breaks[at] = found

# compiler/recompilation
the answer quotes an entry per float
  - f"one entry. Over eager: a float mended to a tensor {table.by_host(EAGER, TENSOR)}, past the limit "
  + f"one entry. Over eager: a float mended to a tensor {table.by_host(EAGER, PER_FLOAT)}, past the limit "
a number is drawn once for all calls
  - lambda f, k=k: seeded(f, k)
  + lambda f, k=k: seeded(f, 1)
calls that ran compiled are reported as eager
  - eager.append(not reached)
  + eager.append(reached)
the module that remembers forgets
  - return torch.stack(self.seen).mean(0)
  + return torch.stack(self.seen[:2]).mean(0)

# compiler/dynamic_shapes
the rows of the padding come back
  - self.compiled(pad_rows(x, rows))[: len(x)]
  + self.compiled(pad_rows(x, rows))
a power of two is padded to the next
  - return min(1 << (rows - 1).bit_length(), largest)
  + return min(1 << rows.bit_length(), largest)
the default is left though nothing is faster by more than noise
  - return "automatic" if speeds.get("automatic", 0.0) > 0.97 * speeds[first] else first
  + return "automatic" if speeds.get("automatic", 0.0) > 1.03 * speeds[first] else first

# compiler/logging_and_hints
the switch that is shown to come too late does nothing in any case
  - {"graph_breaks": True}
  + {"recompiles": True}
a component that reports nothing is shown
  - require(text is not None, f"{name}: no record of {len(own)} reports {stage!r}")
  + text = text or ""

# compiler/numerics
the share that differs is the share that agrees
  - return (a != b).double().mean().item()
  + return (a == b).double().mean().item()

# compiler/training_step
gradients add up over the steps
  - self.optimizer.zero_grad(set_to_none=True)
  + pass
the moments survive a reset
  - value.zero_()
  + pass
the float64 reference is the float32 model
  - model = copy.deepcopy(self).double()
  + model = copy.deepcopy(self)

# compiler/when_it_helps
causal attention is counted as if it were whole
  - 2 * batch * heads * tokens * (tokens + 1) * width
  + 4 * batch * heads * tokens * (tokens + 1) * width

the ratio of a launch-bound call is told without the host's share
  - "by host": table.by_host(EAGER, name)
  + "by host": f"{table.over(EAGER, name):.2f}x"

# compiler/regional_compilation
the answer has the time to compile for the last depth alone
  - seconds[name][layers] = seen.seconds
  + seconds[name] = {layers: seen.seconds}

# compiler/stances
every batch is padded to the largest bucket
  - rows = min(size for size in buckets if size >= len(x))
  + rows = max(size for size in buckets if size >= len(x))
a call that ran eagerly is told as one of the graph
  - did = "compiles" if seen.graphs else "eager" if len(ran_in_eager) > eager else "graph"
  + did = "compiles" if seen.graphs else "graph"

# compiler/caching
a hit is told as a miss
  - said[name] = " and ".join(answer for answer, count in counts.items() if count) or "not asked"
  + said[name] = " and ".join(answer for answer, count in counts.items() if not count) or "not asked"

# compiler/modes
what has settled is judged by the first calls too
  - settled = statistics.median(times[len(times) // 2 :])
  + settled = statistics.median(times)

what never settles is told as settled
  - if last < CALLS
  + if last <= CALLS

# compiler/backends
the graph that Dynamo hands over is told as AOTAutograd's
  - backend=aot_autograd(fw_compiler=noting("after AOTAutograd", make_boxed_func))
  + backend=noting("after AOTAutograd")

# compiler/cuda_graphs
a late read that happens to be right is told as wrong  [tests=studies/compiler/test_cuda_graphs_study.py]
  - require("right" not in kept.values(), f"read after the next call: {kept}")
  + pass
a graph is replayed on the inputs of its capture  [within=refill]
  - to.copy_(given)
  + pass

# xla/static_shapes
every batch is padded to the largest size
  - size = min(size for size in sizes if size >= len(x))
  + size = max(size for size in sizes if size >= len(x))
the padding counts in the mean
  - real, count = mask[:, None], mask.sum()
  + real, count = mask[:, None], len(x)
the rows of the padding come back
  - return out.cpu()[: len(x)]
  + return out.cpu()

# xla/compare
half the time is no less  [tests=examples/xla/test_xla_compare.py]
  - s <= 1.05 * min(
  + s <= 2 * min(

# xla/graph_boundaries
where takes the other side than the branch
  - > LIMIT, x * 0.5, x)
  + > LIMIT, x, x * 0.5)

# xla/spmd
a dimension that its devices do not divide is padded in silence
  - if axis and size % axes[axis]:
  + if False:

# xla/scan_layers
layers that differ are scanned as one
  - if not _same(told, wanted):
  + if False:
""")
