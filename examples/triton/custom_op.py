"""Custom operators: what torch.compile does with a Triton kernel that it sees, and with one that it only calls.

A wrapper in Python and its kernel become an operator of torch, with a rule for shapes and a gradient, which
torch.compile puts into its graph. `torch.library.custom_op` makes it opaque: one node, and whatever the wrapper does in
torch (here .contiguous(), a habit of many wrappers) stays inside. `torch.library.triton_op` with `wrap_triton` makes it
traced: the compiler sees the wrapper, fuses its torch code with what surrounds it, and launches the kernel itself.
Either way, it fuses nothing into the body of the kernel.

Here silu(gate) * up stands between a bias and a weight; gate and up are halves of one matrix. torch's own operations
become one kernel of 3 passes over the result: two halves come in, one result goes out. Traced, bias and copies take 4
passes, the kernel 3 and the weight 2. Opaque, the copies are kernels of their own: 4 more passes, which take the time
of 10 on an H200. A kernel that takes strides would need no copies.

Question   What does the compiler fuse around a Triton kernel, and what does a call of the operator cost?
Needs      triton
Wins when  the kernel does what Inductor cannot generate. Elementwise products it can; there an operator is in its way.
Variants   custom_op_layer.py (no kernel: the layer that the operators stand in)
Study      studies/triton/custom_op.py
Source     chapter sections "PyTorch Integration" and "4. Register Custom Operations"
"""

# No `from __future__ import annotations` here: torch reads an operator's schema from its annotations.

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from compile_inspect import kernels_run
from examples.common.device import interpreted, require_triton_device
from examples.common.training import forward_backward, in_float64
from examples.triton.custom_op_layer import layer, layer_budget, layer_inputs, layer_reference, silu_mul_torch

# The operators' namespace in torch's registry. Defining a name again frees the first operator, and torch crashes when
# that one is called: a copy of this file loaded under another name, such as when run as a script, gets its own.
NAMESPACE = "companion" if __name__ == "examples.triton.custom_op" else f"companion_{__name__.replace('.', '_')}"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 1024  # with the 4 warps that are the default: 16 bytes a thread and tensor in 16 bits, twice that in 32


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


def _empty(name: str, outputs: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The results, not yet computed; also for tensors without data, so compiling refuses what running refuses."""
    dtypes, shapes = [x.dtype for x in inputs], [tuple(x.shape) for x in inputs]
    if dtypes[0] not in DTYPES or any(dtype != dtypes[0] for dtype in dtypes):
        raise TypeError(f"{name}: dtypes {dtypes}; all must be the same one of {DTYPES}")
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{name}: shapes {shapes} differ; expand or slice first")
    return tuple(torch.empty(shapes[0], dtype=dtypes[0], device=inputs[0].device) for _ in range(outputs))


def _launch(name: str, kernel, outputs: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The wrapper, the same for every way to call it: only what `kernel` is differs."""
    require_triton_device(name, *inputs)
    results = _empty(name, outputs, *inputs)
    inputs = [x.contiguous() for x in inputs]
    if n_elements := inputs[0].numel():
        kernel[(triton.cdiv(n_elements, BLOCK),)](*inputs, *results, n_elements, BLOCK=BLOCK)
    return results


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up by a plain function: no gradient, and nothing that torch knows of.

    gate, up: one shape, any strides, float32, float16 or bfloat16; the result is contiguous, the arithmetic float32,
    rounded once (silu underflows below -87, as in torch). The operators take the same and have a gradient, but neither
    a second one, which torch refuses, nor a forward-mode one, for which torch.func.jvp returns a tangent of 0.
    Raises TypeError for another dtype or two dtypes; ValueError for two shapes or two devices; RuntimeError for a
    device without Triton and, in the plain functions, for an input that requires grad.
    """
    return _launch("silu_mul", silu_mul_kernel, 1, gate, up)[0]


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, given that of silu(gate) * up; limits and errors as silu_mul's."""
    return _launch("silu_mul_backward", silu_mul_backward_kernel, 2, grad, gate, up)


# Opaque: the compiler sees a node and, from register_fake, the shape and dtype of what comes out of it.


@torch.library.custom_op(f"{NAMESPACE}::silu_mul_opaque", mutates_args=())
def silu_mul_opaque(gate: Tensor, up: Tensor) -> Tensor:
    return _launch(f"{NAMESPACE}::silu_mul_opaque", silu_mul_kernel, 1, gate, up)[0]


@torch.library.custom_op(f"{NAMESPACE}::silu_mul_opaque_backward", mutates_args=())
def silu_mul_opaque_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(f"{NAMESPACE}::silu_mul_opaque_backward", silu_mul_backward_kernel, 2, grad, gate, up)


silu_mul_opaque.register_fake(lambda *inputs: _empty(f"{NAMESPACE}::silu_mul_opaque", 1, *inputs)[0])
silu_mul_opaque_backward.register_fake(lambda *inputs: _empty(f"{NAMESPACE}::silu_mul_opaque_backward", 2, *inputs))


# Traced: these bodies hold nothing but torch and wrapped kernels, and need no fake. torch searches them for calls named
# wrap_triton: the kernels it finds are part of the key under which compiled code is cached.


def wrap_triton(kernel):
    """torch.library.wrap_triton(kernel); an interpreted kernel, which torch 2.11 refuses, as it is."""
    return kernel if interpreted() else torch.library.wrap_triton(kernel)


@triton_op(f"{NAMESPACE}::silu_mul_traced", mutates_args=())
def silu_mul_traced(gate: Tensor, up: Tensor) -> Tensor:
    return _launch(f"{NAMESPACE}::silu_mul_traced", wrap_triton(silu_mul_kernel), 1, gate, up)[0]


@triton_op(f"{NAMESPACE}::silu_mul_traced_backward", mutates_args=())
def silu_mul_traced_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(f"{NAMESPACE}::silu_mul_traced_backward", wrap_triton(silu_mul_backward_kernel), 2, grad, gate, up)


for _op, _backward in ((silu_mul_opaque, silu_mul_opaque_backward), (silu_mul_traced, silu_mul_traced_backward)):
    _op.register_autograd(
        lambda ctx, grad, backward=_backward: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


reference, reference_step = in_float64(silu_mul_torch), in_float64(forward_backward(silu_mul_torch))

# exp turns one rounding of an argument of 88, beyond which float32 is 0 or infinite, into 64 of the result. The
# derivative crosses 0, so there an element has the budget of its row.
BUDGET = {"terms": 0, "roundings": 64}
STEP_BUDGET = {"terms": 1, "roundings": 64}


def layer_variants(h: Harness) -> dict:
    """The layer in torch and around each operator, compiled; in torch and around the plain function, eager."""
    how = {"backend": "aot_eager"} if h.interpreted else {}
    ops = {"torch.compile": silu_mul_torch, "custom_op": silu_mul_opaque, "triton_op": silu_mul_traced}
    if h.interpreted:  # to trace a triton_op is to compile its kernel
        del ops["triton_op"]
    compiled = {name: h.compiled(layer(op), fullgraph=True, **how) for name, op in ops.items()}
    return compiled | {"torch eager": layer(silu_mul_torch), "function eager": layer(silu_mul)}


def answer(table, calls, counts: dict[str, int]) -> str:
    """What is fused, how many kernels that makes where they were seen, and the layer's speed over torch's own."""

    def told(name: str) -> str:
        found = [f"{counts[name]} kernel{'s' * (counts[name] > 1)}"] if name in counts else []
        if name in table and name != table.baseline:
            found.append(f"{table.over(table.baseline, name):.2f}x the speed")
        return f" ({', '.join(found)})" if found else ""

    host = ", ".join(f"{row.variant} {row.enqueue_us:.0f}" for row in calls.rows)
    return (
        f"Bias and weight fuse with torch's operations{told('torch.compile')}, around a triton_op's "
        f"kernel{told('triton_op')}, not with a custom_op{told('custom_op')}. Host us, eager: {host}."
    )


def demo(h: Harness) -> None:
    operators = {"custom_op": silu_mul_opaque, "triton_op": silu_mul_traced}
    for name, op in {"function": silu_mul, **operators}.items():
        for shape in ((0, 5), (1, 1), (3, 781), (2, BLOCK // 2 + 1)):
            gate, up = h.randn(*shape, dtype=h.half, scale=4.0), h.randn(*shape, dtype=h.half)
            h.check(op, reference, gate, up, what=f"{name} {'x'.join(map(str, shape))}", **BUDGET)
    for name, op in operators.items():
        inputs = [h.randn(33, 65).t() for _ in range(3)]  # not contiguous, the gradient neither
        h.check(forward_backward(op), reference_step, *inputs, what=f"{name}: its gradients", **STEP_BUDGET)
    find = dict.fromkeys((80, 90, 100, 120), ("ld.global.v4", "st.global.v4"))
    h.codegen(silu_mul, h.meta(1 << 20), h.meta(1 << 20), find=find)
    rows, cols = h.pick(interpreted=(16, 300), quick=(2048, 14336), full=(8192, 14336))
    inputs, variants = layer_inputs(h, h.fit(rows, bytes_each=80 * cols), cols), layer_variants(h)
    table = h.compare(
        variants, layer_reference, *inputs, baseline="torch.compile", title="bias, silu_mul, weight",
        work=Work(bytes=3 * inputs[0].nbytes // 2), **layer_budget(h.half),
    )  # fmt: skip
    calls = h.compare(
        {"torch": silu_mul_torch, "function": silu_mul, **operators}, reference,
        *(h.randn(16, dtype=h.half) for _ in range(2)), baseline="torch", title="one eager call", work=Work(),
        roundings=2, acc=h.half, terms=0,
    )  # fmt: skip
    ran = {name: kernels_run(fn, *inputs)[0] for name, fn in variants.items()} if table and inputs[0].is_cuda else {}
    counts = {name: len(kernels) for name, kernels in ran.items() if kernels}
    h.answer(lambda: answer(table, calls, counts))


if __name__ == "__main__":
    run(demo)
