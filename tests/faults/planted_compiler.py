"""Faults of examples/compiler and examples/xla. The second need torch_xla to run."""

from . import Fault

FAULTS = [
    Fault(
        "compiler/custom_ops",
        "x.new_empty(x.shape, dtype=torch.int64)",
        "x.new_empty(x.shape, dtype=torch.int32)",
        "the fake kernel says another dtype than the real one",
    ),
    Fault(
        "compiler/custom_ops",
        "return (sums / counts).gather(-1, blocks).to(grad.dtype)",
        "return sums.gather(-1, blocks).to(grad.dtype)",
        "the gradient of a block is its sum and not its mean",
    ),
    Fault(
        "compiler/custom_ops",
        'mutates_args=("out",)',
        "mutates_args=()",
        "an operator that writes to its argument does not say so",
    ),
    Fault(
        "compiler/graph_breaks",
        'if artifact == "graph_breaks":',
        'if artifact == "graph_breaks" and not breaks:',
        "only the first break is counted",
        tests=("tests/test_compile_inspect.py",),
    ),
    Fault(
        "compiler/graph_breaks",
        "breaks[at] = replace(breaks[at], lost=found.lost) if at in breaks else found",
        "breaks[at] = found",
        "a break that is told twice loses its line",
        tests=("tests/test_compile_inspect.py",),
    ),
    Fault(
        "compiler/recompilation",
        "eager.append(not reached)",
        "eager.append(reached)",
        "calls that ran compiled are reported as eager",
    ),
    Fault(
        "compiler/recompilation",
        "return torch.stack(self.seen).mean(0)",
        "return torch.stack(self.seen[:2]).mean(0)",
        "the module that remembers forgets",
    ),
    Fault(
        "compiler/dynamic_shapes",
        "self.compiled(pad_rows(x, rows))[: len(x)]",
        "self.compiled(pad_rows(x, rows))",
        "the rows of the padding come back",
    ),
    Fault(
        "compiler/dynamic_shapes",
        "return min(1 << (rows - 1).bit_length(), largest)",
        "return min(1 << rows.bit_length(), largest)",
        "a power of two is padded to the next",
    ),
    Fault(
        "compiler/numerics",
        "return (a != b).double().mean().item()",
        "return (a == b).double().mean().item()",
        "the share that differs is the share that agrees",
    ),
    Fault(
        "compiler/numerics",
        "backend.fp32_precision = value",
        "pass",
        "the newer settings of precision stay as the older one wrote them",
    ),
    Fault(
        "compiler/training_step",
        "self.optimizer.zero_grad(set_to_none=True)",
        "pass",
        "gradients add up over the steps",
    ),
    Fault("compiler/training_step", "value.zero_()", "pass", "the moments survive a reset"),
    Fault(
        "compiler/training_step",
        "model = copy.deepcopy(self).double()",
        "model = copy.deepcopy(self)",
        "the float64 reference is the float32 model",
    ),
    Fault(
        "compiler/when_it_helps",
        "2 * batch * heads * tokens * (tokens + 1) * width",
        "4 * batch * heads * tokens * (tokens + 1) * width",
        "causal attention is counted as if it were whole",
    ),
    Fault(
        "compiler/stances",
        "rows = min(size for size in buckets if size >= len(x))",
        "rows = max(size for size in buckets if size >= len(x))",
        "every batch is padded to the largest bucket",
    ),
    Fault(
        "compiler/stances",
        'did = "compiles" if seen.graphs else "eager" if len(ran_in_eager) > eager else "graph"',
        'did = "compiles" if seen.graphs else "graph"',
        "a call that ran eagerly is told as one of the graph",
    ),
    Fault(
        "compiler/caching",
        'said[name] = " and ".join(answer for answer, count in counts.items() if count) or "not asked"',
        'said[name] = " and ".join(answer for answer, count in counts.items() if not count) or "not asked"',
        "a hit is told as a miss",
    ),
    Fault(
        "compiler/modes",
        "settled = statistics.median(times[len(times) // 2 :])",
        "settled = statistics.median(times)",
        "what has settled is judged by the first calls too",
    ),
    Fault(
        "compiler/cuda_graphs",
        "to.copy_(given)",
        "pass",
        "a graph is replayed on the inputs of its capture",
        within="refill",
    ),
    # XLA
    Fault(
        "xla/static_shapes",
        "size = min(size for size in sizes if size >= len(x))",
        "size = max(size for size in sizes if size >= len(x))",
        "every batch is padded to the largest size",
    ),
    Fault(
        "xla/static_shapes",
        "real, count = mask[:, None], mask.sum()",
        "real, count = mask[:, None], len(x)",
        "the padding counts in the mean",
    ),
    Fault("xla/static_shapes", "return out.cpu()[: len(x)]", "return out.cpu()", "the rows of the padding come back"),
    Fault(
        "xla/compare",
        "if saved < 0:\nreturn None\nif extra <= 0:",
        "if extra <= 0:",
        "a slower call breaks even at once",
        tests=("tests/examples/xla/test_xla_compare.py",),
    ),
    Fault(
        "xla/graph_boundaries",
        "if (x - old).abs().max() < TOLERANCE:\nbreak\nreturn x",
        "return x",
        "the reference never stops early",
        within="until64",
    ),
    Fault(
        "xla/spmd",
        "math.ceil(size / axes[axis])",
        "size // axes[axis]",
        "the last rows of a dimension that does not divide are lost",
    ),
    Fault(
        "xla/scan_layers", "if not _same(told, first.get(what)):", "if False:", "layers that differ are scanned as one"
    ),
]
