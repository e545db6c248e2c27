"""What is part of the key of torch's caches: one thing is changed, and each cache says whether it knows the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from compile_inspect import Compiled, fresh_compiler, watch
from examples.common.determinism import deterministic
from examples.common.shown import require

CACHES = {"AOTAutograd": ("aot_autograd", "autograd_cache"), "FX graph": ("inductor", "fxgraph_cache")}


def found(seen: Compiled) -> dict[str, str]:
    """What each cache answered within watch(): "hit", "miss", "hit and miss" (several graphs), or "not asked"."""
    said = {}
    for name, (group, prefix) in CACHES.items():
        counts = {answer: seen.counters.get(group, {}).get(f"{prefix}_{answer}", 0) for answer in ("hit", "miss")}
        said[name] = " and ".join(answer for answer, count in counts.items() if count) or "not asked"
    return said


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A graph for which no code is generated: one library call. It is cached like any other, but compiles at once."""
    return torch.addmm(bias, x, w, alpha=2.0)


def renamed(rows: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    # product() with a comment and other names
    doubled = torch.addmm(offset, rows, weight, alpha=2.0)
    return doubled


def tripled(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, w, alpha=3.0)


def changes(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> dict[str, dict[str, str]]:
    """What the caches answer when one thing differs from what they hold; in this process, after a reset each time."""
    said = {}
    with fresh_compiler(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TF32 is off, that a call is not deterministic
        cases: dict[str, tuple[Callable, tuple, AbstractContextManager]] = {
            "what fills them": (product, (x, w, bias), nullcontext()),
            "nothing": (product, (x, w, bias), nullcontext()),
            "values of the weights": (product, (x, 2 * w, bias), nullcontext()),
            "names, a comment": (renamed, (x, w, bias), nullcontext()),
            "a constant": (tripled, (x, w, bias), nullcontext()),
            "a shape": (product, (x[:8], w, bias), nullcontext()),
            "a dtype": (product, tuple(t.double() for t in (x, w, bias)), nullcontext()),
            "requires_grad": (product, (x, w.clone().requires_grad_(), bias), nullcontext()),
            "a setting of Inductor": (product, (x, w, bias), torch._inductor.config.patch(max_fusion_size=32)),
            "deterministic algorithms": (product, (x, w, bias), deterministic(warn_only=True)),  # cuBLAS would refuse
        }
        for name, (fn, inputs, setting) in cases.items():
            torch.compiler.reset()
            with setting, watch() as seen:
                torch.compile(fn, dynamic=False)(*inputs)
            said[name] = found(seen)
    for name in ("nothing", "values of the weights"):
        require(set(said[name].values()) == {"hit"}, f"changing {name}: {said[name]}")
    return said
