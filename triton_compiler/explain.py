"""explain(): what a backend sees and what this one makes of it, stage by stage, as text.

print(explain(fn, *inputs))                    # str() is the whole report
explain(fn, *inputs).kernels                   # numbers: kernels, calls, bytes, fallbacks
explain(fn, *inputs, backward=True)            # the graph of the gradients, too
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triton_compiler.capture import CompiledGraph, recording, triton_backend
from triton_compiler.fusion import Fusion, Kernel, made_by, reads_of
from triton_compiler.ir import Extern, Node, product
from triton_compiler.schedule import accesses_of, weigh


class CountBytes(TorchDispatchMode):
    """Counts what each operation of eager reads and writes; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns):
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum(each.numel() * each.itemsize for each in leaves if isinstance(each, torch.Tensor))
            self.operations += 1
        return result


def bytes_of(step: Kernel | Extern, fusion: Fusion) -> int:
    """What a step moves: each piece of memory once for reading and once for writing."""
    if isinstance(step, Extern):
        return sum(map(fusion.bytes_of, [*step.reads, *(each for each in made_by(step) if isinstance(each, Node))]))
    largest: Counter = Counter()
    for access in accesses_of(step):
        moved, key = weigh(access, fusion.hint), (access.node, access.write)
        if access.offset.gathered:  # an element for each step of the loops
            moved = fusion.hint(product(dim.size for dim in step.layout.dims)) * access.node.dtype.itemsize
        largest[key] = max(largest[key], min(moved, fusion.bytes_of(access.node)))
    return largest.total()


@dataclass
class Explanation:
    """Numbers, and the text that str() gives."""

    graphs: list[CompiledGraph]
    dynamo: list[torch.fx.GraphModule]
    eager_bytes: int
    eager_operations: int
    kernels: int = 0
    calls: int = 0
    bytes: int = 0
    fallbacks: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for graph in self.graphs:
            self.kernels += len(graph.sources)
            self.calls += sum(isinstance(step, Extern) for step in graph.fusion.steps)
            self.bytes += sum(bytes_of(step, graph.fusion) for step in graph.fusion.steps)
            self.fallbacks.update(graph.lowered.fallbacks)

    @property
    def source(self) -> str:
        """The Triton source of all kernels."""
        return "\n".join(source.text for graph in self.graphs for source in graph.sources.values())

    def __str__(self) -> str:
        lines, reasons = [], {}
        for gm in self.dynamo:
            lines += ["", "1. Dynamo's graph: torch functions and modules, real inputs", *opcodes(gm)]
        for graph in self.graphs:
            lines += ["", f"2. {graph.kind}: ATen after AOTAutograd and decompositions", *opcodes(graph.graph)]
            lines += ["", f"3. {graph.kind}: fusion groups", *groups(graph)]
            lines += ["", f"4. {graph.kind}: generated source"]
            for kernel, source in graph.sources.items():
                plan = source.plan
                blocks = ", ".join(f"{space.upper()}BLOCK {size}" for space, size in plan.blocks.items())
                lines.append(f"# {kernel.name}: {plan.kind}, {blocks}, {plan.warps} warps, {plan.grid}")
                lines.append(source.text[source.text.index("@triton") :])
            lines += [f"5. {graph.kind}: the function that allocates and launches", graph.wrapper.source]
            reasons |= graph.lowered.reasons
        share = f"{self.bytes / self.eager_bytes:.0%} of eager's" if self.eager_bytes else "eager was not counted"
        counts = f"{self.kernels} kernels and {self.calls} calls of torch's for {self.eager_operations} operations"
        lines += ["", f"{counts}; {self.bytes:,} bytes moved, {share} {self.eager_bytes:,}"]
        lines += [f"left to eager: {name} x {count} ({reasons[name]})" for name, count in self.fallbacks.items()]
        return "\n".join(lines)

    def dot(self) -> str:
        """The fused graph for graphviz: a box for each kernel, a grey one for each call of torch's."""
        lines, makers = ["digraph fused {", "  node [shape=box, fontname=monospace]"], {}
        for graph in self.graphs:
            for step in graph.fusion.steps:
                name, is_kernel = f"s{len(lines)}", isinstance(step, Kernel)
                label = graph.sources[step].name if is_kernel else step.name
                lines.append(f'  {name} [label="{label}"{"" if is_kernel else ", style=filled"}]')
                made_from = {makers[each] for each in reads_of(step) if each in makers}
                lines += [f"  {each} -> {name}" for each in sorted(made_from)]
                makers |= dict.fromkeys(made_by(step), name)
        return "\n".join([*lines, "}"])


def opcodes(gm: torch.fx.GraphModule) -> list[str]:
    """The opcode table of a graph: opcode, name, target, shape."""
    lines = [f"   {'opcode':14} {'name':22} {'target':44} result"]
    for node in gm.graph.nodes:
        value, shown = node.meta.get("val", node.meta.get("example_value")), ""
        if isinstance(value, torch.Tensor):
            shown = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        named = isinstance(node.target, (str, torch._ops.OpOverload))
        target = str(node.target) if named else getattr(node.target, "__name__", str(node.target))
        lines.append(f"   {node.op:14} {node.name:22} {target:44} {shown}")
    return lines


def groups(graph: CompiledGraph) -> list[str]:
    """A line for each step, and the reason of each boundary."""
    lines = []
    for step in graph.fusion.steps:
        if isinstance(step, Extern):
            what = "library" if step.library else f"eager ({step.reason}),"
        else:
            what = ", ".join(f"{root.name}{'' if root in step.stored else ' (in registers)'}" for root in step.roots)
        lines.append(f"   {step.name}: {what}; {bytes_of(step, graph.fusion):,} bytes")
    return lines + [f"   boundary {each.producer} | {each.consumer}: {each.reason}" for each in graph.fusion.boundaries]


def explain(fn: Callable, *inputs, backward: bool = False, **kwargs) -> Explanation:
    """Compiles fn anew for these inputs and says what became of it."""
    torch._dynamo.reset()

    def run(call) -> None:
        result = tree_leaves(call(*inputs, **kwargs))
        if backward:
            sum(each.float().sum() for each in result if torch.is_tensor(each) and each.requires_grad).backward()

    with recording() as captured:
        run(torch.compile(fn, backend=triton_backend))
    with CountBytes() as counted:
        run(fn)
    return Explanation(captured.graphs, captured.dynamo, counted.bytes, counted.operations)
