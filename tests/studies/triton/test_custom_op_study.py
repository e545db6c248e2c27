"""The study of custom operators: what the compiler is given of each, and that opcheck finds a wrong fake."""

import json

import pytest
import torch

from examples.common.device import interpreted
from examples.triton.custom_op import layer, layer_inputs, silu_mul, silu_mul_opaque, silu_mul_traced
from studies.triton.custom_op import graph_of, graphs_for

ONE_NODE = ["aten.add.Tensor", "companion.silu_mul_opaque.default", "aten.mul.Tensor"]


@pytest.mark.parametrize("op", [silu_mul_opaque, pytest.param(silu_mul_traced, marks=pytest.mark.gpu)])
def test_one_graph_serves_every_batch(h, op):
    cases = [layer_inputs(h, rows, 64) for rows in (16, 48, 7, 1000)]
    assert graphs_for(h, "operator", layer(op), "aot_eager" if interpreted() else "inductor", cases) == 1


def test_an_opaque_operator_is_one_node(h):
    assert graph_of(layer(silu_mul_opaque), *layer_inputs(h, 6, 80)) == ONE_NODE


OFFLINE = """
import json, torch, triton
from harness.codegen import OfflineDriver
triton.runtime.driver.set_active(OfflineDriver())
from torch._library.triton import get_triton_kernels_for_op
from studies.triton.custom_op import graph_of, layer, silu_mul_opaque, silu_mul_traced
x, bias, route = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((6, 160), (160,), (6, 1)))
graphs = [graph_of(layer(op), x, bias, route) for op in (silu_mul_opaque, silu_mul_traced)]
names = ("companion::silu_mul_traced", "companion::silu_mul_traced_backward")
print(json.dumps([*graphs, [kernel.fn.__name__ for name in names for kernel in get_triton_kernels_for_op(name)]]))
"""


def test_of_a_traced_operator_the_compiler_sees_the_wrapper(cli):
    """In a process of its own, where kernels are compiled and none is launched: tracing needs no GPU."""
    done = cli(("-c", OFFLINE), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    opaque, traced, cached = json.loads(done.stdout.splitlines()[-1])
    assert opaque == ONE_NODE
    assert traced.count("aten.clone.default") == 2
    assert traced.count("triton_kernel_wrapper_functional") == 1
    assert not any("silu_mul" in name for name in traced)
    assert cached == ["silu_mul_kernel", "silu_mul_backward_kernel"], "what torch keys its cache with"


def test_opcheck_finds_a_wrong_rule_for_shapes_and_for_strides(h):
    def wrong(name, fake):
        op = torch.library.custom_op(
            f"companion_test::{name}", lambda x: silu_mul(x, x), mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        op.register_fake(fake)
        return op

    with pytest.raises(Exception, match=r"[Ss]hape|[Ss]ize"):
        torch.library.opcheck(wrong("shape", lambda x: x.new_empty(x.shape[::-1])), (h.randn(5, 7),))
    if torch.__version__ >= "2.13":  # before, opcheck does not compare strides
        like = wrong("strides", lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device))
        with pytest.raises(Exception, match=r"[Ss]tride"):
            torch.library.opcheck(like, (h.randn(5, 7).t(),))  # but ours is contiguous
