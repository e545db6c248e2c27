"""triton_compiler: a torch.compile backend that is short enough to read in an evening.

    from triton_compiler import triton_compiler
    fast = triton_compiler(model)                        # or torch.compile(model, backend="triton_compiler")

    from triton_compiler import explain
    print(explain(model, x))                             # graphs, fusion groups and their boundaries, generated source

Stage by stage: capture.py (Dynamo's graph, AOTAutograd) -> decompose.py -> lowering.py to the loop-level IR of ir.py,
with the operations of ops.py -> fusion.py -> schedule.py -> codegen.py (Triton source) -> runtime.py.
docs/triton_compiler.md walks through them with one example. Without a GPU the generated kernels run in Triton's
interpreter, at small sizes.
"""

from __future__ import annotations

import os
import sys

import torch

if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
    if "triton" in sys.modules:
        raise ImportError(
            "triton_compiler: triton was imported first and this machine has no GPU, so its interpreter can no longer "
            "be switched on; import triton_compiler first, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"

from triton_compiler.capture import compile_graph, recording, triton_backend, triton_compiler
from triton_compiler.explain import explain

torch._dynamo.register_backend(triton_backend, name="triton_compiler")

__all__ = ["compile_graph", "explain", "recording", "triton_backend", "triton_compiler"]
