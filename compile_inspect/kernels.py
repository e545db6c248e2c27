"""What Inductor generates for a model, without compiling it: loops before and after fusion, kernels, extern calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from compile_inspect.nodes import copied, line_of, operation_of
from compile_inspect.report import reason_of

VIEWS = {
    "_unsafe_view", "alias", "as_strided", "detach", "expand", "getitem", "permute", "reshape", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A step of Inductor's schedule: loops, or the call of `extern`, a library function or an ATen operator.

    `parts` are the loops, before fusion, that are in it; `primitives` the loop IR's operations, once for each use;
    `indexing` of its first loops: ({variable: size}, [(name, index expression, what it accesses)]).
    """

    name: str
    extern: str
    operations: list[str]  # ATen operators, without views
    lines: list[str]  # file:line of the model
    bytes: int  # read and written
    parts: int
    primitives: list[str]
    indexing: tuple = ()


@dataclass
class Lowered:
    """A graph, forward or backward, as Inductor lowers it; or `error`, why it does not."""

    before: list[Step] = field(default_factory=list)
    after: list[Step] = field(default_factory=list)
    operations: int = 0  # ATen operators after decompositions, without views
    backward: bool = False
    code: str = ""
    error: str = ""

    def kernels(self) -> list[tuple[str, list[Step]]]:
        """(name of the generated kernel, the loops in it) for each call: in C++ all loops between two extern calls."""
        called = self.code.partition("def call(")[2]
        names = re.findall(r"^\s+(?:\w+\.)?((?:cpp|triton)_\w+?)(?:\.run)?\(", called, re.M)
        groups, joined = [], False
        for step in self.after:
            if not step.extern:
                groups[-1].append(step) if joined and names and names[0].startswith("cpp") else groups.append([step])
            joined = not step.extern
        if len(names) != len(groups):
            names = ["+".join(step.name for step in group) for group in groups]
        return list(zip(names, groups, strict=True))


def lower(call: Callable[[Callable], object], loops_only: bool = False) -> list[Lowered]:
    """Each graph that call(backend) hands to the backend, lowered by Inductor; what runs then is the graph itself.

    No C++ or Triton compiler runs, and no cache is read. With `loops_only` it ends before fusion.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    found: list[Lowered] = []

    def before(nodes: list) -> list:
        found.append(Lowered(_steps(nodes)))
        if loops_only:
            raise StopIteration
        return nodes

    def after(nodes: list) -> list:
        found[-1].after = _steps(nodes)
        return nodes

    def generate(graph: GraphLowering):
        code = graph.codegen_with_cpp_wrapper() if graph.cpp_wrapper else graph.codegen()
        called = [operation_of(node) for node in graph.graph.nodes if node.op == "call_function"]
        if found and not found[-1].code:
            found[-1].code, found[-1].backward = "".join(part.value for part in code if part), bool(graph.is_backward)
            order = {node.get_name(): i for i, node in enumerate(graph.scheduler.nodes)}  # changed after fusion
            found[-1].after.sort(key=lambda step: order.get(step.name, len(order)))
            found[-1].operations = sum(name not in VIEWS for name in called)
        return type("Module", (), {"call": staticmethod(lambda *_: None)})()

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        kept, done = copied(graph), len(found)  # compile_fx rewrites the graph that it gets
        try:
            compile_fx(graph, inputs)
        except Exception as error:
            if not loops_only:
                found[done:] = [Lowered(error=reason_of(error))]
        return kept.forward

    # A C++ compiler is asked for each vector unit of this CPU, unless it is said that those found will do.
    settings = {"cpp.vec_isa_ok": True, "fx_graph_cache": False,
                "_pre_fusion_custom_pass": before, "_post_fusion_custom_pass": after}  # fmt: skip
    eager = functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True)
    try:
        with config.patch(settings), eager, patch.object(GraphLowering, "compile_to_module", generate):
            call(backend)
    finally:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()  # what is compiled after this asks
    return found


def _steps(nodes: list) -> list[Step]:
    from torch._inductor import ir

    nodes = [node for node in nodes if type(node).__name__ != "NopKernelSchedulerNode"]
    return [_step(node) for node in nodes if not (node.is_extern() and isinstance(node.node, ir.MultiOutput))]


def _step(node) -> Step:
    leaves = [leaf for leaf in node.get_nodes() if leaf.node is not None]
    origins = list(dict.fromkeys(o for leaf in leaves for o in leaf.node.get_origins() if o.op != "placeholder"))
    order = {each: i for i, each in enumerate(origins[0].graph.nodes)} if origins else {}
    origins.sort(key=lambda origin: order.get(origin, -1))
    operations = list(dict.fromkeys(name for name in map(operation_of, origins) if name not in VIEWS | {"clone"}))
    extern = ""
    if node.is_extern():  # its origins have those of its inputs, too
        extern = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
        origins, operations = origins[-1:], [extern.removesuffix(".default").rsplit(".", 1)[-1]]
    try:
        size = bytes_of(node, leaves)
    except Exception:  # sizes that only the call knows
        size = 0
    bodies, indexing = [leaf._body for leaf in leaves if getattr(leaf, "_body", None) is not None], ()
    if bodies:
        entries = [(kind.name.lower(), entry) for kind, held in bodies[0].memory_usage.items() for entry in held]
        used = {entry.index_name: (kind, entry.buffer_name) for kind, entry in entries}
        rows = [(name, index, used.get(name, ())) for name, index in bodies[0].indexing_exprs.items()]
        indexing = (dict(bodies[0].var_ranges), rows)
    primitives = [name for body in bodies for name in body.op_counts.elements()]
    lines = list(dict.fromkeys(filter(None, map(line_of, origins))))
    return Step(node.get_name(), extern, operations, lines, size, max(len(bodies), 1), primitives, indexing)


def bytes_of(node, leaves: list) -> int:
    """What it reads and writes: torch counts a fused loop's buffers whole, also a table that its parts gather from."""
    both, parts = {"include_reads": True, "include_writes": True}, Counter()
    for leaf in leaves:
        parts.update(leaf.get_read_write_buffer_accesses(**both))
    return int(sum(min(size, parts[name]) for name, size in node.get_read_write_buffer_accesses(**both).items()))
