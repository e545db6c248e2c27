"""A custom backend for torch.compile: from three lines to a compiler that writes Triton.

A backend is a function: a graph and its example inputs in, a callable out. Five stages, each of which adds one idea:

  three lines      record the graph that Dynamo captured, and return it as it is
  AOTAutograd      the graph again as ATen operations, without mutation, forward and backward apart
  decompositions   the same in a few kinds of simpler operations: all that a compiler must know
  one kernel       a pointwise graph written as one Triton kernel, in thirty lines
  a compiler       triton_compiler, in this repository: reductions, views, fusion, memory, fallbacks; read it with
                   docs/triton_compiler.md

Question   What does a backend see of a function, and what does it take to make one kernel of it?
Needs      triton
Wins when  the hardware, the library or the operation is your own: Inductor does not know it, but torch.compile's
           capture, autograd and guards come for free. For speed on a GPU, measure against Inductor first.
Source     chapter section "Code Flow Graph", whose backend gets fake tensors: Dynamo hands over the real ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import Harness, run

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from triton_compiler import explain, triton_backend
from triton_compiler.decompose import decompositions
from triton_compiler.device import INTERPRETED

BLOCK = 1024


def epilogue(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The function that all stages compile: seven simple operations, and in eager three kernels."""
    return F.gelu(x + residual) * residual


def reference(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return epilogue(x.double(), residual.double())


# --------------------------------------------------------------------------------------------- 1. three lines
def print_graph(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable:
    """The whole protocol. torch.compile(f, backend=print_graph) records the opcodes of f's graph in SEEN."""
    SEEN.append(opcodes(gm))  # or gm.graph.print_tabular()
    return gm.forward


SEEN: list[list[tuple[str, str]]] = []  # the opcode tables of the graphs that backends were handed


def opcodes(gm: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """(opcode, target) of each node: placeholder, get_attr, call_function, call_method, call_module, output."""
    return [(node.op, getattr(node.target, "__name__", str(node.target))) for node in gm.graph.nodes]


# --------------------------------------------------------------------------------------------- 2. and 3. AOTAutograd
def aot_backend(compile_graph: Callable, table: dict | None = None) -> Callable:
    """A backend that hands ATen graphs to compile_graph(gm, inputs): the forward's, and the backward's if there is one.

    AOTAutograd traces Dynamo's graph through autograd and functionalization, with fake tensors for inputs; each
    operation in `table` is replaced by its decomposition into simpler ones.
    """
    return aot_autograd(
        fw_compiler=compile_graph, decompositions=table, partition_fn=min_cut_rematerialization_partition
    )


def record_aten(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable:
    SEEN.append(opcodes(gm))
    return make_boxed_func(gm.forward)


# --------------------------------------------------------------------------------------------- 4. one kernel
TRITON = {
    "add.Tensor": "{0} + {1}", "sub.Tensor": "{0} - {1}", "mul.Tensor": "{0} * {1}", "div.Tensor": "{0} / {1}",
    "exp.default": "tl.exp({0})", "erf.default": "libdevice.erf({0})", "tanh.default": "libdevice.tanh({0})",
    "relu.default": "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)", "sigmoid.default": "tl.sigmoid({0})",
    "neg.default": "-{0}",
}  # fmt: skip


def kernel_text(gm: torch.fx.GraphModule) -> str | None:
    """The graph as one kernel: a load for each input, a line for each operation. None if it takes more."""
    nodes, lines, names = list(gm.graph.nodes), [], {}
    values = [node.meta.get("val") for node in nodes if node.op != "output"]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None  # a symbolic size, or an operation with several results
    if len({(value.shape, value.stride(), value.dtype) for value in values}) != 1 or values[0].dtype != torch.float32:
        return None  # broadcasting, views, reductions and casts are what the rest of a compiler is about
    inputs = [node for node in nodes if node.op == "placeholder"]
    for node in nodes:
        shown = [names.get(arg, arg) for arg in node.args]
        if node.op == "placeholder":
            lines.append(f"{node.name} = tl.load({node.name}_ptr + i, mask, other=0)")
        elif node.op == "call_function":
            if (template := TRITON.get(node.target.__name__)) is None or node.kwargs:
                return None
            lines.append(f"{node.name} = {template.format(*shown)}")
        else:
            result, *saved = node.args[0]
            if saved:  # a training step's forward keeps values for its backward
                return None
            lines.append(f"tl.store(out_ptr + i, {result.name}, mask)")
        names[node] = node.name
    pointers = ", ".join(f"{node.name}_ptr" for node in inputs)
    head = [f"i = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})", "mask = i < n"]
    body = "\n".join(f"    {line}" for line in [*head, *lines])
    return f"{IMPORTS}\n\n@triton.jit\ndef kernel({pointers}, out_ptr, n):\n{body}\n"


IMPORTS = "import triton\nimport triton.language as tl\n\nfrom triton_compiler.device import libdevice\n"


def load_kernel(text: str):
    """Triton reads a kernel's source from a file, so the text is written to one."""
    name = f"custom_backend_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def one_kernel(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable:
    """The graph as one Triton kernel where kernel_text() can write one, otherwise run as it is."""
    if (text := kernel_text(gm)) is None:
        return make_boxed_func(gm.forward)
    kernel = load_kernel(text)
    KERNELS.append(text)

    def launch(*inputs: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty_like(inputs[0])
        kernel[(-(-out.numel() // BLOCK),)](*inputs, out, out.numel())
        return (out,)

    return make_boxed_func(launch)


KERNELS: list[str] = []  # the text of the kernels that one_kernel() wrote

STAGES = {
    "three lines": print_graph,
    "AOTAutograd": aot_backend(record_aten),
    "decompositions": aot_backend(record_aten, decompositions()),
    "one kernel": aot_backend(one_kernel, decompositions()),
    "a compiler": triton_backend,
}


def stage(name: str, fn: Callable = epilogue) -> Callable:
    """fn, compiled after a reset by the backend of that stage. Empties SEEN and KERNELS. `name` is a key of STAGES."""
    torch._dynamo.reset()
    SEEN.clear()
    KERNELS.clear()
    return torch.compile(fn, backend=STAGES[name], fullgraph=True)


def demo(h: Harness) -> None:
    if h.profile:
        h.say("a backend is about what is compiled; there is nothing in it for a profiler")
        return
    x, residual = h.randn(33, 70), h.randn(33, 70)
    rows = {}
    for name in STAGES:
        h.check(stage(name), reference, x, residual, what=name, roundings=8, poison=False)
        calls = [target for graph in SEEN for op, target in graph if op.startswith("call")]
        rows[name] = {
            "operations": len(calls) or None,
            "kernels written": len(KERNELS) or None,
            "seen": " ".join(calls),
        }
    told = explain(epilogue, x, residual)
    rows["a compiler"]["kernels written"] = told.kernels
    h.table("what each backend sees and writes", rows)
    torch_s, aten, simple = (rows[name]["operations"] for name in ("three lines", "AOTAutograd", "decompositions"))
    h.fact("kernels run", "interpreted" if INTERPRETED else "on the GPU")

    def answer() -> str:
        return (
            f"{torch_s} torch functions, {aten} ATen operations after AOTAutograd, {simple} after decompositions; "
            f"{told.kernels} kernel{'s' * (told.kernels != 1)} for them, {told.bytes / told.eager_bytes:.0%} of "
            "eager's bytes. The rest of a compiler is reductions, views, fusion and memory."
        )

    h.answer(answer, timed=False)


if __name__ == "__main__":
    run(demo)
