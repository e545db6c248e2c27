"""Nodes of FX graphs: what they call and the line of the model that made them; AOTAutograd with nothing behind it."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from compile_inspect.breaks import NOT_THE_USERS


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


def layer_of(node: torch.fx.Node) -> str:
    """The path of the innermost module that made this node."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return re.sub(r"^L\[.*?\]\.?", "", stack[-1]) if stack else ""


def line_of(node: torch.fx.Node) -> str:
    """file:line of the model's own line that made this node, or the module of torch's that did."""
    own, layer = own_line(node), layer_of(node)
    return at(*own) if own else f"module {layer}" if layer else ""


def name_of(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def target_of(node: torch.fx.Node) -> str:
    """What a node calls, by its full name."""
    if isinstance(node.target, str) or type(node.target).__module__ == "torch._ops":
        return f"Tensor.{node.target}" if node.op == "call_method" else str(node.target)
    return f"{(getattr(node.target, '__module__', None) or 'torch').lstrip('_')}.{name_of(node)}"


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
