"""custom_op: both operators against float64, what torch finds of them, what is compiled around them, bad input."""

from harness.codegen import compile_for

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_inspect import kernels_run
from examples.common.device import interpreted
from examples.triton import custom_op as lesson
from examples.triton.custom_op import (
    BLOCK,
    BUDGET,
    DTYPES,
    GRADIENT_BUDGET,
    gradients,
    gradients_reference,
    layer,
    layer_budget,
    layer_inputs,
    layer_reference,
    reference,
    silu_mul,
    silu_mul_backward,
    silu_mul_opaque,
    silu_mul_traced,
)

INF, NAN = float("inf"), float("nan")
OPERATORS = [silu_mul_opaque, silu_mul_traced]
EVERY = [silu_mul, *OPERATORS]
# What traces a triton_op needs a compiled kernel in it, and the interpreter has none.
COMPILABLE = [silu_mul_opaque, pytest.param(silu_mul_traced, marks=pytest.mark.gpu)]
SHAPES = [(), (0,), (0, 5), (1,), (997,), (BLOCK,), (BLOCK + 1,), (3, 781), (2, 3, 5, 7)]


def name_of(op) -> str:
    return getattr(op, "__name__", None) or op._qualname


every = pytest.mark.parametrize("op", EVERY, ids=name_of)
operators = pytest.mark.parametrize("op", OPERATORS, ids=name_of)
compilable = pytest.mark.parametrize("op", COMPILABLE, ids=name_of)


def randn(h, *shape, **options):
    return h.randn(*(shape or (1,)), **options).view(shape)


@pytest.fixture(autouse=True)
def state_as_found():
    """No test leaves compiled graphs or settings behind."""
    before = torch._dynamo.config.get_config_copy()
    yield
    assert torch._dynamo.config.get_config_copy() == before
    torch.compiler.reset()


@every
def test_shapes_and_strides(h, op):
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float16):
            gate, up = randn(h, *shape, dtype=dtype, scale=4.0), randn(h, *shape, dtype=dtype)
            h.check(op, reference, gate, up, what=name_of(op), **BUDGET)
    packed, transposed = h.randn(70, 2 * 33, scale=4.0), h.randn(33, 70, scale=4.0).t()
    gate, up = packed.chunk(2, dim=-1)
    for inputs in ((gate, up), (transposed, up), (gate, transposed), (gate[:1].expand(70, 33), up), (gate[1:], up[1:])):
        h.check(op, reference, *inputs, what=name_of(op), **BUDGET)
        assert op(*inputs).is_contiguous()


@given(rows=st.integers(0, 40), cols=st.integers(0, 300), scale=st.sampled_from([0.5, 4.0, 20.0]))
def test_any_shape(rows, cols, scale):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    tensors = [h.randn(rows, cols, scale=scale) for _ in range(2)] + [h.randn(rows, cols)]
    for op in OPERATORS:
        h.check(op, reference, *tensors[:2], what=name_of(op), **BUDGET)
        h.check(gradients(op), gradients_reference, *tensors, what=name_of(op), **GRADIENT_BUDGET)


@every
def test_nan_infinities_and_extremes(h, op):
    values = [NAN, INF, -INF, -0.0, 1e38, -1e38, 1e-38, -1e-38, 100.0, -80.0, -1.278, 2.0, -3.0]
    gate = torch.tensor(values, device=h.device).repeat(len(values))
    up = torch.tensor(values, device=h.device).repeat_interleave(len(values))
    h.check(op, reference, gate, up, what=name_of(op), **BUDGET)
    for scale in (1e-30, 1e4):  # at -1e4 silu underflows, in torch's float32 too
        h.check(op, reference, h.randn(500, scale=scale), h.randn(500), what=name_of(op), **BUDGET)
    h.check(op, reference, h.randn(500, dtype=torch.float16, scale=3e4), h.randn(500).half(), what="fp16", **BUDGET)


@operators
def test_gradients(h, op):
    for shape in SHAPES:
        tensors = [randn(h, *shape, dtype=h.half, scale=s) for s in (4.0, 1.0, 1.0)]
        h.check(gradients(op), gradients_reference, *tensors, what=f"{shape}", **GRADIENT_BUDGET)
    strided = [h.randn(33, 65, scale=2.0).t() for _ in range(3)]
    h.check(gradients(op), gradients_reference, *strided, what="transposed", **GRADIENT_BUDGET)
    gate, up = h.randn(40, scale=4.0).requires_grad_(), h.randn(40)  # of one input only, from an expanded gradient
    (got,) = torch.autograd.grad(op(gate, up).sum(), gate)
    want = gradients_reference(gate, up, torch.ones_like(up))[0]
    h.check(lambda _: got, lambda _: want, gate.detach(), what="of the gate alone", **GRADIENT_BUDGET)
    gate = torch.tensor([NAN, INF, -INF, -0.0, 1e38, -1e38, 100.0, -100.0, -1.278, 2.0] * 4, device=h.device)
    extremes = gate, up, torch.ones_like(up)
    h.check(gradients(op), gradients_reference, *extremes, constant_ok=True, what="extremes", **GRADIENT_BUDGET)


@operators
def test_a_second_derivative_is_refused(h, op):
    gate, up = h.randn(5).requires_grad_(), h.randn(5).requires_grad_()
    (first,) = torch.autograd.grad(op(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first.sum().backward()


@compilable
def test_opcheck(h, op):
    for shape in ((), (0, 3), (5, 7)):
        gate, up = (randn(h, *shape).requires_grad_() for _ in range(2))
        inputs = [(gate, up), (gate.detach(), up)] + ([(gate.t(), up.t())] if gate.ndim == 2 else [])
        for args in inputs:
            assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}


@compilable
def test_compiled(h, op):
    """One graph without breaks, right forward and backward, by a backend that traces the gradient too."""
    inputs = layer_inputs(h, 6, 80)
    for backend in ("aot_eager",) if interpreted() else ("aot_eager", "inductor"):
        fn = h.compiled(layer(op), backend=backend, fullgraph=True)
        h.check(fn, layer_reference, *inputs, what=backend, poison=False, **layer_budget(h.half))
        fn = gradients(h.compiled(op, backend=backend, fullgraph=True))
        tensors = [h.randn(33, 65, scale=2.0).t() for _ in range(3)]
        h.check(fn, gradients_reference, *tensors, what=backend, poison=False, **GRADIENT_BUDGET)
    assert torch._dynamo.explain(layer(op))(*inputs).graph_break_count == 0


def test_inductor_on_any_machine(h):
    """Where kernels are interpreted, Inductor's own code for what surrounds the operator is C++."""
    fn = h.compiled(layer(silu_mul_opaque), fullgraph=True)
    h.check(fn, layer_reference, *layer_inputs(h, 6, 80), what="inductor", poison=False, **layer_budget(h.half))


TWICE = """
import importlib.util, torch, harness
from harness.hardware import machine
modules = []
for name in ("first", "second"):
    spec = importlib.util.spec_from_file_location(name, "examples/triton/custom_op.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    modules.append(module)
gate, up = (torch.randn(5, 7, device=machine().device).requires_grad_() for _ in range(2))
for module in modules:
    for op in (module.silu_mul_opaque, module.silu_mul_traced):
        out = op(gate, up)
        torch.testing.assert_close(out, module.silu_mul_torch(gate, up))
        got, want = (torch.autograd.grad(y.sum(), (gate, up)) for y in (out, module.silu_mul_torch(gate, up)))
        torch.testing.assert_close(got, want)
        out = torch.compile(module.silu_mul_opaque, backend="aot_eager", fullgraph=True)(gate, up)
        torch.testing.assert_close(out, module.silu_mul_torch(gate, up))
print("both work")
"""


def test_a_file_that_is_loaded_twice_has_operators_of_its_own(cli):
    """As a script and as a module, say: of two operators of one name torch keeps the later, and the earlier crashes."""
    done = cli(("-c", TWICE))
    assert done.stdout.splitlines()[-1:] == ["both work"], (done.returncode, done.stderr)


@every
def test_bad_input(h, op):
    x = h.randn(4, 8)
    for args, error, message in (
        ((x.int(), x.int()), TypeError, r"dtypes \[torch\.int32, torch\.int32\]"),
        ((x.double(), x.double()), TypeError, r"torch\.float64"),
        ((x, x.half()), TypeError, r"dtypes \[torch\.float32, torch\.float16\]"),
        ((x, x[:3]), ValueError, r"shapes \[\(4, 8\), \(3, 8\)\] differ"),
        ((x, x[:1]), ValueError, r"shapes \[\(4, 8\), \(1, 8\)\] differ"),
        ((x, x[:, :7]), ValueError, r"shapes \[\(4, 8\), \(4, 7\)\] differ"),
    ):
        with pytest.raises(error, match=f"{name_of(op)}: .*{message}"):
            op(*args)
    if op is silu_mul:
        with pytest.raises(RuntimeError, match="silu_mul: an input requires grad"):
            op(x.clone().requires_grad_(), x)
    else:
        with pytest.raises(RuntimeError, match=rf"{name_of(op)}\(\) Expected a value of type 'Tensor'"):
            op([1.0], x)


@pytest.mark.parametrize(
    "op", [lesson.silu_mul_opaque_backward, lesson.silu_mul_traced_backward, silu_mul_backward], ids=name_of
)
def test_bad_gradient(h, op):
    x = h.randn(4, 8)
    with pytest.raises(TypeError, match=f"{name_of(op)}: dtypes .*torch.float16, torch.float32, torch.float32"):
        op(x.half(), x, x)
    with pytest.raises(ValueError, match=rf"{name_of(op)}: shapes \[\(8,\), \(4, 8\), \(4, 8\)\] differ"):
        op(x[0], x, x)


@compilable
def test_bad_input_is_said_while_compiling_too(h, op):
    wrong = rf"{name_of(op)}: shapes \[\(4, 8\), \(3, 8\)\] differ"
    gate, up = h.randn(4, 8), h.randn(3, 8)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=wrong):
        op(torch.empty_like(gate), torch.empty_like(up))
    with pytest.raises(Exception, match=wrong):
        h.compiled(lambda gate, up: op(gate, up) + 1, backend="aot_eager", fullgraph=True)(gate, up)


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_generated_code(sm):
    for dtype in DTYPES if sm == 90 else (torch.bfloat16,):
        x, words = torch.empty(1 << 20, dtype=dtype, device="meta"), dtype.itemsize // 2  # 128 bits a thread and tensor
        for wrapper, reads, writes in ((silu_mul, 2, 1), (silu_mul_backward, 3, 2)):
            (kernel,) = compile_for(wrapper, (x,) * reads, sms=(sm,))
            assert kernel.error is None
            assert (kernel.spills, kernel.shared) == (0, 0)
            assert kernel.found["ld.global.v4"]
            if sm != 100:  # there one access may be of 256 bits
                assert (kernel.found["ld.global.v4"], kernel.found["st.global.v4"]) == (reads * words, writes * words)


@pytest.mark.gpu
@every
def test_every_dtype_on_the_gpu(h, op):
    for dtype in DTYPES:
        tensors = [h.randn(1111, 977, dtype=dtype, scale=2.0) for _ in range(3)]
        h.check(op, reference, *tensors[:2], what=name_of(op), **BUDGET)
        if op is not silu_mul:
            h.check(gradients(op), gradients_reference, *tensors, what=name_of(op), **GRADIENT_BUDGET)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(20)
    gate = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=h.device).normal_()
    out = silu_mul_opaque(gate, gate)
    for part in (slice(0, 3000), slice(2**31 - 1000, 2**31 + 1000), slice(-3000, None)):
        x = gate[part].clone()
        h.check(lambda *_, part=part: out[part], reference, x, x, what="part", **BUDGET)


@pytest.mark.gpu
def test_kernels_around_each_operator(h):
    """The copies inside an opaque operator stay kernels of their own; those of a traced one do not."""
    inputs = layer_inputs(h, 512, 1024)

    def kernels(op):
        fn = h.compiled(layer(op), fullgraph=True)
        fn(*inputs)
        return kernels_run(fn, *inputs)[0]

    opaque, traced, plain = (kernels(op) for op in (silu_mul_opaque, silu_mul_traced, lesson.silu_mul_torch))
    if not plain:
        pytest.skip("torch.profiler sees no kernels here")
    assert len(plain) == 1
    assert len(plain) < len(traced) < len(opaque)
    assert sum("silu_mul_kernel" in kernel for kernel in traced) == 1
    eager = layer(silu_mul)
    eager(*inputs)
    assert len(kernels_run(eager, *inputs)[0]) == 5
