"""The study of custom operators: what the compiler is given of each."""

import json

import pytest

from examples.common.device import interpreted
from examples.triton.custom_op import layer, layer_inputs, silu_mul_opaque, silu_mul_traced
from studies.triton.custom_op import graph_of, graphs_for

ONE_NODE = ["aten.add.Tensor", "companion.silu_mul_opaque.default", "aten.mul.Tensor"]


@pytest.mark.parametrize("op", [silu_mul_opaque, pytest.param(silu_mul_traced, marks=pytest.mark.gpu)])
def test_one_graph_serves_every_batch(h, op):
    cases = [layer_inputs(h, rows, 64) for rows in (16, 7, 1000)]
    assert (graph_of(layer(op), *cases[0]) == ONE_NODE) == (op is silu_mul_opaque)
    assert graphs_for(h, "operator", layer(op), "aot_eager" if interpreted() else "inductor", cases) == 1


OFFLINE = """
import json, torch, triton
from harness.codegen import OfflineDriver
triton.runtime.driver.set_active(OfflineDriver())
from torch._library.triton import get_triton_kernels_for_op
from studies.triton.custom_op import graph_of, layer, silu_mul_opaque, silu_mul_traced
inputs = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((6, 160), (160,), (6, 1)))
names = ("companion::silu_mul_traced", "companion::silu_mul_traced_backward")
kernels = [kernel.fn.__name__ for name in names for kernel in get_triton_kernels_for_op(name)]
print(json.dumps([graph_of(layer(silu_mul_traced), *inputs), kernels]))
"""


@pytest.mark.slow
def test_of_a_traced_operator_the_compiler_sees_the_wrapper(cli):
    """In a process of its own, where kernels are compiled and none is launched: tracing needs no GPU."""
    done = cli(("-c", OFFLINE), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    traced, cached = json.loads(done.stdout.splitlines()[-1])
    assert traced.count("aten.clone.default") == 2
    assert traced.count("triton_kernel_wrapper_functional") == 1
    assert not any("silu_mul" in name for name in traced)
    assert cached == ["silu_mul_kernel", "silu_mul_backward_kernel"], "what torch keys its cache with"
