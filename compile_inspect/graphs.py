"""FX graphs: what their nodes call and the line that made them, AOTAutograd alone, and Inductor without compiling.

lower() has what Inductor generates for a model: loops before and after fusion, kernels, extern calls.
"""

import copy
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

import torch

from compile_inspect.breaks import NOT_THE_USERS
from compile_inspect.report import reason_of

VIEWS = {
    "_unsafe_view", "alias", "as_strided", "detach", "expand", "getitem", "permute", "reshape", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file is neither torch's nor Python's."""
    return not file.startswith("<") and not str(Path(file).resolve()).startswith(NOT_THE_USERS)


def at(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"


def own_line(node: torch.fx.Node) -> tuple[str, int] | None:
    """(file, line) of the innermost line of the user's own code that made this node."""
    stack = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    return next(((file, int(line)) for file, line in reversed(stack) if is_own(file)), None)


def line_of(node: torch.fx.Node) -> str:
    """file:line of the model's own line that made this node, or the path of torch's innermost module that did."""
    own, layer = own_line(node), layer_of(node)
    return at(*own) if own else f"module {layer}" if layer else ""


def layer_of(node: torch.fx.Node) -> str:
    """The path of the innermost module that made this node."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return re.sub(r"^L\[.*?\]\.?", "", stack[-1]) if stack else ""


def name_of(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def target_of(node: torch.fx.Node) -> str:
    """What a node calls, by its full name."""
    return f"Tensor.{node.target}" if node.op == "call_method" else node._pretty_print_target(node.target)


def operation_of(node: torch.fx.Node) -> str:
    """The ATen operator that this node came from, before decompositions, as `mul`."""
    target = node.meta.get("original_aten") or node.target
    return re.sub(r"^(aten|prims)\.|^<built-in function |>$", "", str(getattr(target, "overloadpacket", target)))


def operations(graph: torch.fx.GraphModule | None) -> list[str]:
    """What is called, without the getitems that unpack tuples."""
    nodes = graph.graph.nodes if graph is not None else ()
    return [str(n.target) for n in nodes if n.op.startswith("call") and "getitem" not in str(n.target)]


def copied(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # copy.deepcopy of a graph walks a tree with an old name
        return torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))


def aot_backend(forward: Callable[[torch.fx.GraphModule], object], **options) -> Callable:
    """AOTAutograd, which shows `forward` each forward graph, with nothing behind it: operations are called one by one.

    `options` are those of torch's aot_autograd: partition_fn, decompositions.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: torch.fx.GraphModule, _) -> Callable:
        forward(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=lambda graph, _: make_boxed_func(graph.forward), **options)


# --- Inductor


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
        joins = names and names[0].startswith("cpp")
        runs = groupby(enumerate(self.after), lambda each: (bool(each[1].extern), None if joins else each[0]))
        groups = [[step for _, step in run] for (extern, _), run in runs if not extern]
        if len(names) != len(groups):
            names = ["+".join(step.name for step in group) for group in groups]
        return list(zip(names, groups, strict=True))


def lower(call: Callable[[Callable], object]) -> list[Lowered]:
    """Each graph that call(backend) hands to the backend, lowered by Inductor; what runs then is the graph itself.

    No C++ or Triton compiler runs, and no cache is read.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config, cpu_vec_isa, ir
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    found: list[Lowered] = []

    def steps(nodes: list) -> list[Step]:
        unpacks = [node.is_extern() and isinstance(node.node, ir.MultiOutput) for node in nodes]
        nothing = [type(node).__name__ == "NopKernelSchedulerNode" for node in nodes]
        return [_step(node) for node, *left_out in zip(nodes, unpacks, nothing, strict=True) if not any(left_out)]

    def before(nodes: list) -> list:
        found.append(Lowered(steps(nodes)))
        return nodes

    def after(nodes: list) -> list:
        found[-1].after = steps(nodes)
        return nodes

    def generate(graph: GraphLowering):
        code = graph.codegen_with_cpp_wrapper() if graph.cpp_wrapper else graph.codegen()
        if found and not found[-1].code:
            this, called = found[-1], [operation_of(n) for n in graph.graph.nodes if n.op == "call_function"]
            this.code, this.backward = "".join(part.value for part in code if part), bool(graph.is_backward)
            this.operations = sum(name not in VIEWS for name in called)
            order = {node.get_name(): i for i, node in enumerate(graph.scheduler.nodes)}  # changed after fusion
            this.after.sort(key=lambda step: order.get(step.name, len(order)))
        return type("Module", (), {"call": staticmethod(lambda *_: None)})()

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        kept, done = copied(graph), len(found)  # compile_fx rewrites the graph that it gets
        try:
            compile_fx(graph, inputs)
        except Exception as error:
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


def _step(node) -> Step:
    leaves = [leaf for leaf in node.get_nodes() if leaf.node is not None]
    origins = list(dict.fromkeys(o for leaf in leaves for o in leaf.node.get_origins() if o.op != "placeholder"))
    order = {each: i for i, each in enumerate(origins[0].graph.nodes)} if origins else {}
    origins.sort(key=lambda origin: order.get(origin, -1))
    operations = list(dict.fromkeys(name for name in map(operation_of, origins) if name not in VIEWS | {"clone"}))
    extern, size, indexing = "", 0, ()
    if node.is_extern():  # its origins have those of its inputs, too
        extern = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
        origins, operations = origins[-1:], [extern.removesuffix(".default").rsplit(".", 1)[-1]]
    with suppress(Exception):  # sizes that only the call knows
        # Torch counts a fused loop's buffers whole, also a table that its parts gather from.
        both, parts = {"include_reads": True, "include_writes": True}, Counter()
        for leaf in leaves:
            parts.update(leaf.get_read_write_buffer_accesses(**both))
        size = int(sum(min(n, parts[name]) for name, n in node.get_read_write_buffer_accesses(**both).items()))
    bodies = [leaf._body for leaf in leaves if getattr(leaf, "_body", None) is not None]
    if bodies:
        entries = [(kind.name.lower(), entry) for kind, held in bodies[0].memory_usage.items() for entry in held]
        used = {entry.index_name: f"{kind} {entry.buffer_name or ''}".strip() for kind, entry in entries}
        rows = [(name, index, used.get(name, "")) for name, index in bodies[0].indexing_exprs.items()]
        indexing = (dict(bodies[0].var_ranges), rows)
    primitives = [name for body in bodies for name in body.op_counts.elements()]
    lines = list(dict.fromkeys(filter(None, map(line_of, origins))))
    return Step(node.get_name(), extern, operations, lines, size, max(len(bodies), 1), primitives, indexing)
