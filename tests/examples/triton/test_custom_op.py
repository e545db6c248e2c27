"""custom_op: both operators against float64, what torch finds of them, what is compiled around them, bad input."""

import importlib.util

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from examples.common.device import interpreted
from examples.common.training import forward_backward
from examples.triton import custom_op as lesson
from examples.triton.custom_op import BLOCK, silu_mul, silu_mul_backward, silu_mul_opaque, silu_mul_traced
from examples.triton.custom_op_layer import layer, layer_budget, layer_inputs, layer_reference
from studies.triton.custom_op import graph_of
from tests.examples.triton.helpers import INF, NAN, refused

OPERATORS = {"opaque": silu_mul_opaque, "traced": silu_mul_traced}
SHAPES = [(), (0, 5), (1,), (997,), (BLOCK,), (BLOCK + 1,), (3, 781), (2, 3, 5, 7)]


def check(h, op, gate, up):
    h.check(op, lesson.reference, gate, up, what=f"{tuple(gate.shape)} {gate.stride()}", **lesson.BUDGET)


def check_gradients(h, op, gate, up, grad, **budget):
    what, budget = f"gradients of {tuple(gate.shape)}", lesson.STEP_BUDGET | budget
    h.check(forward_backward(op), lesson.reference_step, gate, up, grad, what=what, **budget)


@pytest.fixture(autouse=True)
def no_compiled_graphs_are_left():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("op", [silu_mul, *OPERATORS.values()], ids=["function", *OPERATORS])
def test_shapes_strides_and_extremes(h, op):
    for i, shape in enumerate(SHAPES):
        dtype = (torch.float32, torch.float16)[i % 2]
        check(h, op, *(h.randn(*(shape or (1,)), dtype=dtype, scale=s).view(shape) for s in (4.0, 1.0)))
    gate, up = h.randn(70, 2 * 33, scale=4.0).chunk(2, dim=-1)
    transposed = h.randn(33, 70, scale=4.0).t()
    for inputs in ((gate, up), (transposed, up), (gate[:1].expand(70, 33), up)):
        check(h, op, *inputs)
        assert op(*inputs).is_contiguous()
    values = torch.tensor([NAN, INF, -INF, -0.0, 1e38, -1e38, 1e-38, 100.0, -80.0, -1.278, 2.0, -3.0], device=h.device)
    check(h, op, values.repeat(12), values.repeat_interleave(12))
    for scale in (1e-30, 1e4):  # at -1e4 silu underflows, in torch's float32 too
        check(h, op, h.randn(500, scale=scale), h.randn(500))
    check(h, op, h.randn(500, dtype=torch.float16, scale=3e4), h.randn(500).half())


@pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
def test_gradients(h, op):
    for shape in SHAPES:
        check_gradients(h, op, *(h.randn(*(shape or (1,)), dtype=h.half, scale=s).view(shape) for s in (4.0, 1.0, 1.0)))
    inputs = [h.randn(33, 65, scale=2.0).t() for _ in range(3)]
    check_gradients(h, op, *inputs)
    gradients = lesson.reference_step(*inputs)[1:]
    h.check(silu_mul_backward, lambda *_: gradients, inputs[2], *inputs[:2], **lesson.STEP_BUDGET)
    gate, up = h.randn(40, scale=4.0).requires_grad_(), h.randn(40)  # of one input only, from an expanded gradient
    (got,) = torch.autograd.grad(op(gate, up).sum(), gate, create_graph=True)
    assert torch.equal(got, forward_backward(op)(gate, up, torch.ones_like(up))[1])
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):  # a second derivative
        got.sum().backward()
    gate = torch.tensor([NAN, INF, -INF, -0.0, 1e38, -1e38, 100.0, -100.0, -1.278, 2.0] * 4, device=h.device)
    check_gradients(h, op, gate, up, torch.ones_like(up), constant_ok=True)


# What traces a triton_op needs a compiled kernel in it, and the interpreter has none.
@pytest.mark.parametrize("op", [silu_mul_opaque, pytest.param(silu_mul_traced, marks=pytest.mark.gpu)], ids=OPERATORS)
def test_compiled(h, op):
    """opcheck; one graph without breaks for every batch, right forward and backward; wrong input refused as well."""
    gate, up = (h.randn(5, 7).requires_grad_() for _ in range(2))
    for inputs in ((gate.t().detach(), up.t()), (gate.detach().half(), up.detach().half())):
        assert set(torch.library.opcheck(op, inputs).values()) == {"SUCCESS"}
    cases = [layer_inputs(h, rows, 64) for rows in (16, 7, 1000)]
    one_node = ["aten.add.Tensor", "companion.silu_mul_opaque.default", "aten.mul.Tensor"]
    assert (graph_of(layer(op), *cases[0]) == one_node) == (op is silu_mul_opaque)
    for backend in ("aot_eager",) if interpreted() else ("aot_eager", "inductor"):
        torch.compiler.reset()
        counter = CompileCounterWithBackend(backend)
        fn = torch.compile(layer(op), backend=counter, fullgraph=True)
        for packed, bias, route in cases:
            torch._dynamo.mark_dynamic(packed, 0)
            torch._dynamo.mark_dynamic(route, 0)
            h.check(fn, layer_reference, packed, bias, route, what=backend, poison=False, **layer_budget(h.half))
        assert counter.frame_count == 1
        fn = h.compiled(op, backend=backend, fullgraph=True)
        check_gradients(h, fn, *(h.randn(33, 65, scale=2.0).t() for _ in range(3)), poison=False)
    gate, up = h.randn(4, 8), h.randn(3, 8)
    with pytest.raises(Exception, match=r"silu_mul_\w+: shapes .* differ"):  # said while compiling too
        h.compiled(lambda gate, up: op(gate, up) + 1, backend="aot_eager", fullgraph=True)(gate, up)


def test_a_file_that_is_loaded_twice_has_operators_of_its_own(h):
    """As a script and as a module, say: of two operators of one name torch keeps the later, and the earlier crashes."""
    modules = []
    for name in ("loaded_first", "loaded_second"):
        spec = importlib.util.spec_from_file_location(name, lesson.__file__)
        modules.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    for module in modules:
        for op in (module.silu_mul_opaque, module.silu_mul_traced):
            check_gradients(h, op, *(h.randn(5, 7) for _ in range(3)))


def test_bad_input(h):
    x = h.randn(4, 8)
    for op in OPERATORS.values():  # test_wrappers has the functions
        refused(op, ValueError, r"shapes \[\(4, 8\), \(1, 8\)\] differ", x, x[:1])
    for op in (lesson.silu_mul_opaque_backward, lesson.silu_mul_traced_backward):
        refused(op, TypeError, "dtypes .*torch.float16, torch.float32, torch.float32", x.half(), x, x)


@pytest.mark.gpu
def test_every_dtype_and_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(20)
    for dtype in lesson.DTYPES:
        tensors = [h.randn(1111, 977, dtype=dtype, scale=2.0) for _ in range(3)]
        for op in OPERATORS.values():
            check(h, op, *tensors[:2])
            check_gradients(h, op, *tensors)
    gate = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=h.device).normal_()
    out = silu_mul_opaque(gate, gate)
    for part in (slice(0, 3000), slice(2**31 - 1000, 2**31 + 1000), slice(-3000, None)):
        h.check(lambda *_, part=part: out[part], lesson.reference, *[gate[part].clone()] * 2, **lesson.BUDGET)
