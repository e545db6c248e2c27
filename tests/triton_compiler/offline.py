"""Run as a script, in a process that does not interpret: compiles generated kernels for sm_80 to sm_120."""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

from triton_compiler import runtime
from triton_compiler.capture import plan_graph
from triton_compiler.decompose import decompositions


def plan(fn, *specs):
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in specs]
        gm = make_fx(lambda *xs: torch.utils._pytree.tree_leaves(fn(*xs)), decomposition_table=decompositions())(
            *inputs
        )
    return list(plan_graph(gm).sources.values())


HALF, FULL, LONG = torch.bfloat16, torch.float32, torch.int64
CASES = [
    (lambda x, b: F.gelu(x + b), ((8192, 4096), HALF), ((4096,), HALF)),
    (lambda x, w: F.rms_norm(x, (4096,), w), ((8192, 4096), HALF), ((4096,), HALF)),
    (lambda x, y: x.t() + y, ((4096, 4096), HALF), ((4096, 4096), HALF)),
    (lambda x: (x.sum(), x.sum(0), x.softmax(-1)), ((4096, 50304), HALF)),
    (lambda x, t: F.cross_entropy(x.float(), t), ((512, 50304), HALF), ((512,), LONG)),
    (lambda x: (x.argmax(1), x.var(1), x.cos().erf().lgamma().tanh()), ((512, 1000), FULL)),
    (lambda x, y: (x // y, x % y, torch.div(x, y, rounding_mode="trunc"), x.pow(y)), ((512,), FULL), ((512,), FULL)),
    (lambda g, x, m, r, w: torch.ops.aten.native_layer_norm_backward(g, x, [4096], m, r, w, w, [True] * 3),
     ((8192, 4096), HALF), ((8192, 4096), HALF), ((8192, 1), FULL), ((8192, 1), FULL), ((4096,), HALF)),
    (lambda g, i: torch.ops.aten.embedding_dense_backward(g * 2, i, 8192, 0, False),
     ((8, 512, 1024), HALF), ((8, 512), LONG)),
    (lambda x, v, i: (x.index_add(1, i, v), torch.ops.aten.index_put(x, [None, i, i], v[:, :, 0], True)),
     ((512, 9, 9), FULL), ((512, 40, 9), FULL), ((40,), LONG)),
    (lambda x: x.reshape(8, 112, 2, 112, 2, 64).sum((2, 4)), ((8, 224, 224, 64), HALF)),
]  # fmt: skip


def main() -> None:
    kinds = set()
    for fn, *specs in CASES:
        for source in plan(fn, *specs):
            kinds |= {source.plan.kind, "" if source.plan.persistent else "walked"}
            for sm in (80, 90, 120) if source.plan.kind == "rows" else (80, 89, 90, 100, 120):
                runtime.compile_kernel(source, GPUTarget("cuda", sm, 32))
    print(*kinds)


if __name__ == "__main__":
    main()
