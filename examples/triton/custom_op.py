"""Custom operators: what torch.compile can do with a Triton kernel that it sees, and with one that it only calls.

Technique  A wrapper of Python and a kernel becomes an operator of torch: one that torch.compile puts into its graph,
           with a rule for shapes and a gradient. torch.library.custom_op makes an opaque one: the graph has one node,
           and whatever the wrapper does in torch (here .contiguous(), a habit of many wrappers) stays inside it.
           torch.library.triton_op with wrap_triton makes a transparent one: the compiler traces the wrapper, fuses its
           torch code with what surrounds it, and launches the kernel itself. Into the kernel's body it fuses nothing,
           either way: a copy that no kernel needs is best not made, here by a kernel that takes strides.
Question   What does the compiler fuse around a Triton kernel, and what does a call of the operator cost?
Needs      triton
Shapes     gate, up of one shape, any strides -> silu(gate) * up, contiguous, same shape and dtype. Any number of
           elements. The gradient is a kernel too, and an operator of its own.
Dtypes     float32, float16, bfloat16; the arithmetic is float32, rounded once. silu underflows below -87, as in torch.
Errors     TypeError for another dtype or two dtypes; ValueError for two shapes; RuntimeError for a device without
           Triton and, of the plain functions, for an input that requires grad. Messages begin with the name of the
           operator. Double backward is refused by torch; forward-mode derivatives are not defined, and torch.func.jvp
           takes that for a tangent of 0.
Wins when  the kernel does what Inductor cannot generate. A product of elements it can generate, fused with all that
           surrounds it: the torch.compile row is the one to beat, and shows what an operator stands in the way of.
Source     chapter section "PyTorch Integration".
Run        python examples/triton/custom_op.py
"""

# No `from __future__ import annotations` here: torch reads an operator's schema from its annotations.

from collections.abc import Callable

from harness import Harness, Work, require_triton_device, run
from harness.compiler import kernels_run, wrap_triton

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.library import triton_op

# Of the operator, in torch's registry. Defining a name again frees the first operator, and torch crashes when that is
# called: a copy of this file that is loaded under another name, as a script for one, gets a namespace of its own.
NAMESPACE = "companion" if __name__ == "examples.triton.custom_op" else f"companion_{__name__.replace('.', '_')}"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 1024  # with the 4 warps that are the default: 16 bytes a thread and tensor in 16 bits, twice that in 32
LEAST_PASSES = 3  # over the layer's result: two halves come in, one result goes out


@triton.jit
def silu_mul_kernel(gate_ptr, up_ptr, out_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_elements
    gate = tl.load(gate_ptr + offsets, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_backward_kernel(grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_elements
    grad = tl.load(grad_ptr + offsets, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = grad * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(dgate_ptr + offsets, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + offsets, (grad * silu).to(dup_ptr.dtype.element_ty), mask=inside)


def _check_shapes(name: str, *tensors: torch.Tensor) -> None:
    """What can be said of tensors without data; so compiling reports it as running does."""
    gate, dtypes, shapes = tensors[-2], [t.dtype for t in tensors], [tuple(t.shape) for t in tensors]
    if gate.dtype not in DTYPES or any(dtype != gate.dtype for dtype in dtypes):
        raise TypeError(f"{name}: dtypes {dtypes}; all must be the same one of {DTYPES}")
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{name}: shapes {shapes} differ; expand or slice first")


def _forward(name: str, kernel, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The wrapper, the same for every way to call it: only what `kernel` is differs."""
    require_triton_device(name, gate, up)
    _check_shapes(name, gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    n_elements = gate.numel()
    if n_elements:
        grid = (triton.cdiv(n_elements, BLOCK),)
        kernel[grid](gate, up, out, n_elements, BLOCK=BLOCK)
    return out


def _backward(name: str, kernel, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor):
    require_triton_device(name, grad, gate, up)
    _check_shapes(name, grad, gate, up)
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    n_elements = gate.numel()
    if n_elements:
        grid = (triton.cdiv(n_elements, BLOCK),)
        kernel[grid](grad, gate, up, dgate, dup, n_elements, BLOCK=BLOCK)
    return dgate, dup


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up by a plain function: no gradient, and nothing that torch knows of."""
    return _forward("silu_mul", silu_mul_kernel, gate, up)


# Opaque: the compiler sees a node and, from register_fake, the shape and dtype of what comes out of it.


@torch.library.custom_op(f"{NAMESPACE}::silu_mul_opaque", mutates_args=())
def silu_mul_opaque(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _forward(f"{NAMESPACE}::silu_mul_opaque", silu_mul_kernel, gate, up)


@torch.library.custom_op(f"{NAMESPACE}::silu_mul_opaque_backward", mutates_args=())
def silu_mul_opaque_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(f"{NAMESPACE}::silu_mul_opaque_backward", silu_mul_backward_kernel, grad, gate, up)


@silu_mul_opaque.register_fake
def _(gate, up):
    _check_shapes(f"{NAMESPACE}::silu_mul_opaque", gate, up)
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@silu_mul_opaque_backward.register_fake
def _(grad, gate, up):
    _check_shapes(f"{NAMESPACE}::silu_mul_opaque_backward", grad, gate, up)
    return tuple(torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))


# Transparent: torch traces these bodies, so they hold nothing but torch and wrapped kernels, and need no fake.


@triton_op(f"{NAMESPACE}::silu_mul_traced", mutates_args=())
def silu_mul_traced(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _forward(f"{NAMESPACE}::silu_mul_traced", wrap_triton(silu_mul_kernel), gate, up)


@triton_op(f"{NAMESPACE}::silu_mul_traced_backward", mutates_args=())
def silu_mul_traced_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(f"{NAMESPACE}::silu_mul_traced_backward", wrap_triton(silu_mul_backward_kernel), grad, gate, up)


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


silu_mul_opaque.register_autograd(
    lambda ctx, grad: silu_mul_opaque_backward(grad, *ctx.saved_tensors), setup_context=_save_inputs
)
silu_mul_traced.register_autograd(
    lambda ctx, grad: silu_mul_traced_backward(grad, *ctx.saved_tensors), setup_context=_save_inputs
)


def silu_mul_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup) by a plain function."""
    return _backward("silu_mul_backward", silu_mul_backward_kernel, grad, gate, up)


def silu_mul_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def layer(op):
    """The operator as a gated MLP of experts has it: a bias before, halves of one matrix in, a routing weight after."""

    def between(packed: torch.Tensor, bias: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        gate, up = (packed + bias).chunk(2, dim=-1)  # halves: not contiguous
        return op(gate, up) * route

    return between


def gradients(op):
    """(gate, up, grad) -> the gradients of op."""

    def backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        return torch.autograd.grad(op(gate, up), (gate, up), grad)

    return backward


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu_mul_torch(gate.double(), up.double())


def gradients_reference(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return gradients(silu_mul_torch)(*(t.double() for t in tensors))


def layer_reference(*tensors: torch.Tensor) -> torch.Tensor:
    return layer(silu_mul_torch)(*(t.double() for t in tensors))


# exp turns the rounding of an argument of 88, beyond which float32 is 0 or infinite, into 64 of the result. The
# derivative crosses 0, so there an element has the budget of its row.
BUDGET = {"terms": 0, "roundings": 64}
GRADIENT_BUDGET = {"terms": 1, "roundings": 64}


def layer_budget(dtype: torch.dtype) -> dict:
    """Where a bias, an operator and a weight each round to `dtype`: silu turns one rounding of -6 into seven."""
    return {"terms": 0, "roundings": 8, "acc": dtype}


def layer_inputs(h: Harness, rows: int, cols: int) -> tuple[torch.Tensor, ...]:
    packed, bias = h.randn(rows, 2 * cols, dtype=h.half), h.randn(2 * cols, dtype=h.half)
    return packed, bias, h.randn(rows, 1).sigmoid().to(h.half)


def graph_of(fn, *inputs) -> list[str]:
    """The operations of the graph that a compiler's backend is given for fn, less views and arithmetic on sizes.

    Nothing is launched: the backend made here hands out empty results.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    names = []

    def backend(graph: torch.fx.GraphModule, _) -> Callable:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        (results,) = graph.graph.output_node().args
        fakes = [node.meta["val"] for node in results]
        return make_boxed_func(
            lambda *_: [torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=f.device) for f in fakes]
        )

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(fn, backend=aot_autograd(fw_compiler=backend), fullgraph=True, dynamic=False)(*inputs)
    torch.compiler.reset()
    return [name for name in names if not name.startswith(("<built-in", "aten.split", "aten.slice"))]


def graphs_for(h: Harness, name: str, fn, backend: str, cases: list) -> int:
    """How many graphs are compiled for these cases, whose first and last tensors have any number of rows."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(fn, backend=counter, fullgraph=True)
    for case in cases:
        for tensor in (case[0], case[-1]):
            torch._dynamo.mark_dynamic(tensor, 0)
        what = f"{name} compiled for any rows: {len(case[0])}"
        h.check(compiled, layer_reference, *case, what=what, poison=False, **layer_budget(case[0].dtype))
    torch.compiler.reset()
    return counter.frame_count


def compiler_facts(h: Harness, operators: dict) -> None:
    """What torch says of each operator: opcheck, its graph, and how many graphs three batch sizes need."""
    if h.profile:
        return
    gate, up = (h.randn(5, 7).requires_grad_() for _ in range(2))
    backend = "aot_eager" if h.interpreted else "inductor"
    small = layer_inputs(h, 16, 64)
    for name, op in operators.items():
        for inputs in ((gate, up), (gate.t(), up.t())):
            checks = torch.library.opcheck(op, inputs)  # raises at the first that fails
        h.fact(f"{name}: opcheck", checks)
        explained = torch._dynamo.explain(layer(op))(*small)
        h.fact(f"{name}: graphs and breaks", [explained.graph_count, explained.graph_break_count])
        h.fact(f"{name}: graph for the compiler", graph_of(layer(op), *small))
        cases = [layer_inputs(h, rows, 64) for rows in (16, 48, 7)]
        h.fact(f"{name}: graphs for 3 batch sizes", graphs_for(h, name, layer(op), backend, cases))


def demo(h: Harness) -> None:
    operators = {"custom_op": silu_mul_opaque, "triton_op": silu_mul_traced}
    for name, op in {"plain function": silu_mul, **operators}.items():
        for shape in ((0, 5), (1, 1), (3, 781), (2, BLOCK // 2 + 1)):
            gate, up = h.randn(*shape, dtype=h.half, scale=4.0), h.randn(*shape, dtype=h.half)
            h.check(op, reference, gate, up, what=f"{name} {'x'.join(map(str, shape))}", **BUDGET)
    for name, op in operators.items():
        inputs = [h.randn(33, 65).t() for _ in range(3)]  # not contiguous, the gradient neither
        h.check(gradients(op), gradients_reference, *inputs, what=f"{name}: its gradients", **GRADIENT_BUDGET)

    half = h.meta(1 << 20)
    h.codegen(silu_mul, half, half, find=dict.fromkeys((80, 90, 100, 120), ("ld.global.v4", "st.global.v4")))
    h.codegen(silu_mul_backward, half, half, half, find=dict.fromkeys((90,), ("ld.global.v4", "st.global.v4")))

    if h.interpreted:
        h.say("torch.compile of a triton_op traces a compiled kernel, which the interpreter has none of: needs a GPU")
        del operators["triton_op"]
    compiler_facts(h, operators)

    rows, cols = h.pick(interpreted=(16, 300), quick=(2048, 14336), full=(8192, 14336))
    inputs = layer_inputs(h, h.fit(rows, bytes_each=80 * cols), cols)
    how = {"backend": "aot_eager"} if h.interpreted else {}
    torch_layer = layer(silu_mul_torch)
    variants = {"torch": torch_layer, "torch.compile": h.compiled(torch_layer), "triton eager": layer(silu_mul)}
    for name, op in operators.items():
        variants[f"triton {name} compiled"] = h.compiled(layer(op), fullgraph=True, **how)
    table = h.compare(
        variants, layer_reference, *inputs, baseline="torch", work=Work(bytes=LEAST_PASSES * inputs[0].nbytes // 2),
        title="bias, silu_mul, weight", **layer_budget(h.half),
    )  # fmt: skip
    if table and table.rows[-1].ms and inputs[0].is_cuda:
        explain(h, table, {name: kernels_run(fn, *inputs)[0] for name, fn in variants.items()})

    tiny = h.randn(16, dtype=h.half), h.randn(16, dtype=h.half)
    calls = {"torch": silu_mul_torch, "triton function": silu_mul}
    calls |= {f"triton {name}": op for name, op in operators.items()}
    table = h.compare(
        calls, reference, *tiny, baseline="torch", work=Work(), title="one eager call", roundings=2, acc=h.half, terms=0
    )
    if table and table.rows[-1].enqueue_us:
        h.fact("host us a call", {row.variant: round(row.enqueue_us, 1) for row in table.rows})


def explain(h: Harness, table, kernels: dict[str, list[str]]) -> None:
    """What was fused, by the kernels that ran; and what that was worth."""
    if not all(kernels.values()):
        h.say("torch.profiler shows no kernels here, so they are not counted")
        return
    h.fact("kernels", {variant: [name[:60] for name in names] for variant, names in kernels.items()})
    for row in table.rows:
        h.say(
            f"{row.variant}: {len(kernels[row.variant])} kernels in the time that a copy needs for "
            f"{LEAST_PASSES / row.of_ceiling:.1f} passes over the result; {LEAST_PASSES} must be"
        )


if __name__ == "__main__":
    run(demo)
