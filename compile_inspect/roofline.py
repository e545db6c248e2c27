"""A roofline for one call: what it computes and moves, over what this device reaches in a matmul and in a copy.

It is a lower bound of time. Eager moves bytes operation by operation; compiled code reads inputs and parameters once
and writes its results once; and each does its arithmetic at the speed of a large matmul.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from compile_inspect.subject import Subject, parameters, tensors_of
from compile_inspect.timing import once

ROWS = {"embedding", "index", "index_select", "gather"}  # of their first tensor they read as much as they return
# torch 2.11 has no formula for it.
LIKE = {"_scaled_dot_product_flash_attention_for_cpu": torch.ops.aten._scaled_dot_product_flash_attention}


class Counting(TorchDispatchMode):
    """(FLOPs, bytes) of each operation that is run within, and the bytes read of each of the model's tensors."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self.operations, self.read = [], {storage_of(tensor): 0 for tensor in held}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, outputs = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in ((args, kwargs), out))
        known = {storage_of(tensor) for tensor in inputs}
        if outputs and not func._schema.is_mutable and all(storage_of(tensor) in known for tensor in outputs):
            return out  # a view
        name, sizes, written = func._schema.name.split("::")[1], [*map(bytes_of, inputs)], sum(map(bytes_of, outputs))
        if name in ROWS:
            sizes[0] = min(sizes[0], written)
        for tensor, size in zip(inputs, sizes, strict=True):
            if (key := storage_of(tensor)) in self.read:
                self.read[key] = max(self.read[key], size)
        formula = flop_registry.get(LIKE.get(name, func._overloadpacket))
        self.operations.append((formula(*args, **kwargs, out_val=out) if formula else 0, sum(sizes) + written))
        return out


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def bytes_of(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())  # expanded: what is there


def count(subject: Subject, model: Callable, args: tuple, kwargs: dict) -> dict:
    """What one eager call does, and the bytes that no compiler can spare: inputs, parameters, results, gradients."""
    with Counting(parameters(model)) as counted:
        out = subject.caller(model, args, kwargs)()
    ends = tensors_of((args, kwargs, out))
    ends += [tensor for tensor in parameters(model) if tensor.grad is not None]
    return {"operations": counted.operations, "flops": sum(flops for flops, _ in counted.operations),
            "compiled_bytes": sum(counted.read.values()) + sum(map(bytes_of, ends))}  # fmt: skip


def ceilings(subject: Subject, moved: int) -> dict:
    """Bytes and FLOPs a second of this device, at the model's own size and dtype, and microseconds of a launch."""
    device, gpu = subject.device, subject.on_gpu

    def seconds(call: Callable[[], object], calls: int) -> float:
        return min(once(lambda: [call() for _ in range(calls)], subject)[0] for _ in range(4)) / calls / 1e3

    low, high = (2**26, 2**28) if gpu else (2**16, 2**26)  # a small model stays in a CPU's caches
    source = torch.zeros(min(max(moved // 2, low), high) // 4, device=device)
    target, one = torch.empty_like(source), torch.zeros(1, device=device)
    tensors = [*parameters(subject.model), *tensors_of((subject.args, subject.kwargs))]
    floats = [tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.element_size() > 1]
    dtype, n = max(floats, key=floats.count, default=torch.float32), 8192 if gpu else 768
    matrix = torch.randn(n, n, device=device).to(dtype)
    with torch.no_grad():
        return {"bytes_per_s": 8 * source.numel() / seconds(lambda: target.copy_(source), 5), "dtype": str(dtype)[6:],
                "flops_per_s": 2 * n**3 / seconds(lambda: matrix @ matrix, 2),
                "launch_us": seconds(lambda: one + 1, 100) * 1e6}  # fmt: skip


def roofline(work: dict, launches: int, top: dict, gpu: bool) -> dict:
    """Lower bounds in ms. A GPU computes while the host launches; on a CPU the one comes after the other."""

    def ms(flops: float, moved: float) -> float:
        return max(flops / top["flops_per_s"], moved / top["bytes_per_s"]) * 1e3

    together = max if gpu else lambda *parts: sum(parts)
    # Of C++ kernels several may be in one function, so they can be more than eager's operations.
    launched = min(launches, len(work["operations"])) * top["launch_us"] / 1e3
    eager = together(sum(ms(*each) for each in work["operations"]), len(work["operations"]) * top["launch_us"] / 1e3)
    bounds = {"arithmetic": ms(work["flops"], 0), "memory": ms(0, work["compiled_bytes"]), "launches": launched}
    compiled = together(max(bounds["arithmetic"], bounds["memory"]), launched)
    return {"flops": work["flops"], "eager_bytes": sum(moved for _, moved in work["operations"]),
            "compiled_bytes": work["compiled_bytes"], "operations": len(work["operations"]),
            "roofline_eager_ms": eager, "roofline_compiled_ms": compiled, "roofline_speedup": eager / compiled,
            "bound": max(bounds, key=bounds.get)}  # fmt: skip
