"""custom_op: both operators against float64, what torch finds of them, what a compiler sees, bad input, the code."""

import json

from harness.codegen import compile_for
from harness.compiler import kernels_run
from harness.hardware import interpreted

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.triton.custom_op import (
    BLOCK,
    BUDGET,
    DTYPES,
    GRADIENT_BUDGET,
    gradients,
    gradients_reference,
    graph_of,
    graphs_for,
    layer,
    layer_budget,
    layer_inputs,
    layer_reference,
    reference,
    silu_mul,
    silu_mul_backward,
    silu_mul_opaque,
    silu_mul_opaque_backward,
    silu_mul_torch,
    silu_mul_traced,
    silu_mul_traced_backward,
)

OPERATORS = [silu_mul_opaque, silu_mul_traced]
EVERY = [silu_mul, *OPERATORS]
# What traces a triton_op needs a compiled kernel in it, and the interpreter has none.
COMPILABLE = [silu_mul_opaque, pytest.param(silu_mul_traced, marks=pytest.mark.gpu)]
SHAPES = [(), (0,), (0, 5), (1,), (997,), (BLOCK,), (BLOCK + 1,), (3, 781), (2, 3, 5, 7)]


def name_of(op) -> str:
    return getattr(op, "__name__", None) or op._qualname


def randn(h, *shape, **options):
    return h.randn(*(shape or (1,)), **options).view(shape)


@pytest.fixture(autouse=True)
def state_as_found():
    """No test, and no function of the example, leaves compiled graphs or settings behind."""
    before = torch._dynamo.config.get_config_copy()
    yield
    assert torch._dynamo.config.get_config_copy() == before
    torch.compiler.reset()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", EVERY, ids=name_of)
def test_shapes(h, op, shape):
    for dtype in (torch.float32, torch.float16):
        gate, up = randn(h, *shape, dtype=dtype, scale=4.0), randn(h, *shape, dtype=dtype)
        h.check(op, reference, gate, up, what=name_of(op), **BUDGET)


@given(rows=st.integers(0, 40), cols=st.integers(0, 300), scale=st.sampled_from([0.5, 4.0, 20.0]))
def test_any_shape(rows, cols, scale):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    tensors = [h.randn(rows, cols, scale=scale) for _ in range(2)] + [h.randn(rows, cols)]
    for op in OPERATORS:
        h.check(op, reference, *tensors[:2], what=name_of(op), **BUDGET)
        h.check(gradients(op), gradients_reference, *tensors, what=name_of(op), **GRADIENT_BUDGET)


@pytest.mark.parametrize("op", EVERY, ids=name_of)
def test_any_strides(h, op):
    packed, transposed = h.randn(70, 2 * 33, scale=4.0), h.randn(33, 70, scale=4.0).t()
    gate, up = packed.chunk(2, dim=-1)
    for inputs in (
        (gate, up),
        (transposed, up),
        (gate, transposed),
        (gate[:1].expand(70, 33), up),
        (gate[1:], up[:-1]),
    ):
        h.check(op, reference, *inputs, what=name_of(op), **BUDGET)
        assert op(*inputs).is_contiguous()


@pytest.mark.parametrize("op", EVERY, ids=name_of)
def test_nan_infinities_and_extremes(h, op):
    inf, nan = float("inf"), float("nan")
    values = [nan, inf, -inf, -0.0, 1e38, -1e38, 1e-38, -1e-38, 100.0, -80.0, -1.278, 2.0, -3.0]
    gate = torch.tensor(values, device=h.device).repeat(len(values))
    up = torch.tensor(values, device=h.device).repeat_interleave(len(values))
    h.check(op, reference, gate, up, what=name_of(op), **BUDGET)
    for scale in (1e-30, 1e4):  # at -1e4 silu underflows, in torch's float32 too
        h.check(op, reference, h.randn(500, scale=scale), h.randn(500), what=name_of(op), **BUDGET)
    h.check(op, reference, h.randn(500, dtype=torch.float16, scale=3e4), h.randn(500).half(), what="fp16", **BUDGET)


@pytest.mark.parametrize("op", OPERATORS, ids=name_of)
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


@pytest.mark.parametrize("op", OPERATORS, ids=name_of)
def test_extreme_gradients(h, op):
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([nan, inf, -inf, -0.0, 1e38, -1e38, 100.0, -100.0, -1.278, 2.0] * 4, device=h.device)
    up = torch.randn(40, device=h.device)
    h.check(
        gradients(op), gradients_reference, gate, up, torch.ones_like(up), constant_ok=True, what="", **GRADIENT_BUDGET
    )


@pytest.mark.parametrize("op", OPERATORS, ids=name_of)
def test_a_second_derivative_is_refused(h, op):
    gate, up = h.randn(5).requires_grad_(), h.randn(5).requires_grad_()
    (first,) = torch.autograd.grad(op(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first.sum().backward()


@pytest.mark.parametrize("op", COMPILABLE, ids=name_of)
def test_opcheck(h, op):
    for shape in ((), (0, 3), (5, 7)):
        gate, up = (randn(h, *shape).requires_grad_() for _ in range(2))
        inputs = [(gate, up), (gate.detach(), up)] + ([(gate.t(), up.t())] if gate.ndim == 2 else [])
        for args in inputs:
            assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}


def test_opcheck_finds_a_wrong_rule_for_shapes(h):
    @torch.library.custom_op("companion_test::wrong", mutates_args=())
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return silu_mul(x, x)

    @wrong.register_fake
    def _(x):
        return x.new_empty(x.shape[::-1])

    with pytest.raises(Exception, match=r"[Ss]hape|[Ss]ize"):
        torch.library.opcheck(wrong, (h.randn(5, 7),))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="opcheck of this torch does not compare strides")
def test_opcheck_finds_a_wrong_rule_for_strides(h):
    @torch.library.custom_op("companion_test::wrong_strides", mutates_args=())
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return silu_mul(x, x)

    @wrong.register_fake
    def _(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)  # but ours is contiguous

    with pytest.raises(Exception, match=r"[Ss]tride"):
        torch.library.opcheck(wrong, (h.randn(5, 7).t(),))


@pytest.mark.parametrize("op", COMPILABLE, ids=name_of)
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


@pytest.mark.parametrize("op", COMPILABLE, ids=name_of)
def test_one_graph_serves_every_batch(h, op):
    cases = [layer_inputs(h, rows, 64) for rows in (16, 48, 7, 1000)]
    assert graphs_for(h, name_of(op), layer(op), "aot_eager" if interpreted() else "inductor", cases) == 1


def test_an_opaque_operator_is_one_node(h):
    assert graph_of(layer(silu_mul_opaque), *layer_inputs(h, 6, 80)) == [
        "aten.add.Tensor", "companion.silu_mul_opaque.default", "aten.mul.Tensor",
    ]  # fmt: skip


OFFLINE = """
import json, torch, triton
from harness import hardware
from harness.codegen import _OfflineDriver
hardware.OFFLINE_SM = 90
triton.runtime.driver.set_active(_OfflineDriver())
from examples.triton.custom_op import *
x, bias, route = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((6, 160), (160,), (6, 1)))
print(json.dumps([graph_of(layer(op), x, bias, route) for op in (silu_mul_opaque, silu_mul_traced)]))
"""


def test_of_a_transparent_operator_the_compiler_sees_the_wrapper(cli):
    """In a process of its own, where kernels are compiled and none is launched: tracing needs no GPU."""
    done = cli(("-c", OFFLINE), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    opaque, traced = json.loads(done.stdout.splitlines()[-1])
    assert opaque == ["aten.add.Tensor", "companion.silu_mul_opaque.default", "aten.mul.Tensor"]
    assert traced.count("aten.clone.default") == 2
    assert traced.count("triton_kernel_wrapper_functional") == 1
    assert not any("silu_mul" in name for name in traced)


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


def _bad(device):
    x = torch.randn(4, 8, device=device)
    return {
        "integers": ((x.int(), x.int()), TypeError, r"dtypes \[torch\.int32, torch\.int32\]; all must be the same one"),
        "float64": ((x.double(), x.double()), TypeError, r"torch\.float64"),
        "two dtypes": ((x, x.half()), TypeError, r"dtypes \[torch\.float32, torch\.float16\]; all must be the same"),
        "two shapes": ((x, x[:3]), ValueError, r"shapes \[\(4, 8\), \(3, 8\)\] differ; expand or slice first"),
        "shapes that would broadcast": ((x, x[:1]), ValueError, r"shapes \[\(4, 8\), \(1, 8\)\] differ"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
@pytest.mark.parametrize("op", EVERY, ids=name_of)
def test_bad_input(h, op, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"{name_of(op)}: .*{message}"):
        op(*args)


@pytest.mark.parametrize("op", [silu_mul_opaque_backward, silu_mul_traced_backward, silu_mul_backward], ids=name_of)
def test_bad_gradient(h, op):
    x = h.randn(4, 8)
    with pytest.raises(TypeError, match=f"{name_of(op)}: dtypes .*torch.float16, torch.float32, torch.float32"):
        op(x.half(), x, x)
    with pytest.raises(ValueError, match=rf"{name_of(op)}: shapes \[\(8,\), \(4, 8\), \(4, 8\)\] differ"):
        op(x[0], x, x)


@pytest.mark.parametrize("op", OPERATORS, ids=name_of)
def test_other_bad_input(h, op):
    x = h.randn(4, 8)
    with pytest.raises(RuntimeError, match=rf"{name_of(op)}\(\) Expected a value of type 'Tensor' for argument 'gate'"):
        op([1.0], x)
    with pytest.raises(RuntimeError, match="silu_mul: an input requires grad"):
        silu_mul(x.clone().requires_grad_(), x)


@pytest.mark.parametrize("op", COMPILABLE, ids=name_of)
def test_bad_input_is_said_while_compiling_too(h, op):
    fn = h.compiled(lambda gate, up: op(gate, up) + 1, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=rf"{name_of(op)}: shapes \[\(4, 8\), \(3, 8\)\] differ"):
        fn(h.randn(4, 8), h.randn(3, 8))


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", DTYPES)
def test_generated_code(sm, dtype):
    x = torch.empty(1 << 20, dtype=dtype, device="meta")
    words = dtype.itemsize // 2  # 128-bit accesses a thread and tensor
    for wrapper, reads, writes in ((silu_mul, 2, 1), (silu_mul_backward, 3, 2)):
        (kernel,) = compile_for(wrapper, (x,) * reads, sms=(sm,))
        assert kernel.error is None
        assert (kernel.spills, kernel.shared) == (0, 0)
        if sm != 100:  # there one access may be of 256 bits
            assert kernel.found["ld.global.v4"] == reads * words
            assert kernel.found["st.global.v4"] == writes * words
        assert kernel.found["ld.global.v4"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", EVERY, ids=name_of)
def test_every_dtype_on_the_gpu(h, op, dtype):
    tensors = [h.randn(1111, 977, dtype=dtype, scale=2.0) for _ in range(3)]
    h.check(op, reference, *tensors[:2], what=name_of(op), **BUDGET)
    if op is not silu_mul:
        h.check(gradients(op), gradients_reference, *tensors, what=name_of(op), **GRADIENT_BUDGET)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(20)
    n = 2**31 + 4096
    gate = torch.empty(n, dtype=torch.bfloat16, device=h.device).normal_()
    out = silu_mul_opaque(gate, gate)
    for part in (slice(0, 3000), slice(2**31 - 1000, 2**31 + 1000), slice(-3000, None)):
        h.check(
            lambda *_, part=part: out[part], reference, gate[part].clone(), gate[part].clone(), what="part", **BUDGET
        )


@pytest.mark.gpu
def test_kernels_around_each_operator(h):
    """The copies inside an opaque operator stay kernels of their own; those of a transparent one do not."""
    inputs = layer_inputs(h, 512, 1024)

    def kernels(op):
        fn = h.compiled(layer(op), fullgraph=True)
        fn(*inputs)
        return kernels_run(fn, *inputs)[0]

    opaque, traced, plain = (kernels(op) for op in (silu_mul_opaque, silu_mul_traced, silu_mul_torch))
    if not plain:
        pytest.skip("torch.profiler sees no kernels here")
    assert len(plain) == 1
    assert len(plain) < len(traced) < len(opaque)
    assert sum("silu_mul_kernel" in kernel for kernel in traced) == 1
    eager = layer(silu_mul)
    eager(*inputs)
    assert len(kernels_run(eager, *inputs)[0]) == 5
