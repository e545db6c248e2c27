"""Backends for torch.compile of three runtimes: ONNX Runtime, TVM and OpenVINO, where the name alone does not do.

Each raises RuntimeError, from within the compiled call, for a symbolic size and for a tensor on a GPU. Those for
inference also raise it where a gradient is wanted, which they would silently lose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def _inputs_it_can_take(name: str, inputs, gradients: bool) -> None:
    """Raise for inputs that the runtime behind `name` would accept but not handle correctly."""
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    if len(tensors) != len(inputs) or any(isinstance(n, torch.SymInt) for t in tensors for n in t.shape):
        raise RuntimeError(f"{name}: a size is a symbol, but it compiles for one size; pass dynamic=False")
    if away := {t.device.type for t in tensors} - {"cpu"}:
        raise RuntimeError(f"{name}: a tensor is on {away.pop()}, but it runs on the CPU; move the model there")
    if not gradients and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(f"{name}: an input or a weight requires grad, and its gradient would be lost; use no_grad()")


def onnxruntime_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """torch.onnx.export and an InferenceSession: the graph of the gradient goes the same way, so training works."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compile_one(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        import onnxruntime

        _inputs_it_can_take("onnxruntime_backend", inputs, gradients=True)
        program = torch.onnx.export(graph.eval(), tuple(inputs), dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(
            program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        names = [each.name for each in session.get_inputs()]
        wanted = graph.graph.output_node().args[0]  # None for what needs no gradient, which ONNX leaves out

        def call(*args):
            arrays = (arg.detach().contiguous().numpy() for arg in args)
            results = map(torch.from_numpy, session.run(None, dict(zip(names, arrays, strict=True))))
            return tuple(None if each is None else next(results) for each in wanted)

        return make_boxed_func(call)

    return aot_autograd(fw_compiler=compile_one)(graph, inputs)


def tvm_relax(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """TVM's own backend, for inference: what backend="tvm" calls from torch 2.14 on."""
    from tvm.relax.frontend.torch import relax_dynamo

    _inputs_it_can_take("tvm_relax", inputs, gradients=False)
    return relax_dynamo()(graph, inputs)


def openvino_f32(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """OpenVINO in float32, with its results copied: it returns buffers that its next call overwrites."""
    from openvino.frontend.pytorch.torchdynamo.backend import openvino

    _inputs_it_can_take("openvino_f32", inputs, gradients=False)
    call = openvino(graph, inputs, options={"device": "CPU", "config": {"INFERENCE_PRECISION_HINT": "f32"}})
    return lambda *args: tuple(out.clone() for out in call(*args))
