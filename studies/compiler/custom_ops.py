"""custom_ops, looked at: what comes of an operator whose rules are wrong.

Each operator here has one wrong rule: does opcheck find it, and does a compiled call?
"""

# No `from __future__ import annotations` here: torch reads an operator's schema from its annotations.

import warnings
from collections.abc import Callable

from harness import Harness

import torch

from compile_inspect import logs

NAMESPACE = "companion_study"


def operator(name: str, body: Callable, fake: Callable | None):
    """An operator of one tensor that claims to change none, with this rule for shapes."""

    def called(x: torch.Tensor) -> torch.Tensor:
        return body(x)

    made = torch.library.custom_op(f"{NAMESPACE}::{name}", called, mutates_args=())
    if fake:
        made.register_fake(fake)
    return made


LIES = {
    "none": operator("honest", torch.sin, torch.empty_like),
    "a row too many": operator("shape", torch.sin, lambda x: x.new_empty(x.shape[0] + 1, x.shape[1])),
    "float32, but it is float64": operator("dtype", lambda x: x.sin().double(), torch.empty_like),
    "contiguous, but it is transposed": operator("strides", lambda x: x.sin().t().contiguous().t(), torch.empty_like),
    "no rule at all": operator("missing", torch.sin, None),
    "new memory, but it is the input's": operator("alias", lambda x: x.view(x.shape), torch.empty_like),
    "the input is left alone, but it is doubled": operator("mutates", lambda x: x.mul_(2).sin(), torch.empty_like),
}


def user(op: Callable) -> Callable:
    """Code that believes the operator: its size, its memory, and that `y` is what it was."""

    def uses(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = op(y)
        return z.sum(0) / z.shape[0] + y.mean(0)

    return uses


def consequence(op: Callable, x: torch.Tensor, backend: str | None) -> str:
    """What a user's code gets, compiled or (backend None) not: an error's kind, or its distance from eager's result."""
    torch.compiler.reset()
    called = torch.compile(user(op), backend=backend, fullgraph=True) if backend else user(op)
    try:
        with logs():
            got = called(x)
    except Exception as error:
        return f"{type(getattr(error, 'inner_exception', error)).__name__}"
    finally:
        torch.compiler.reset()
    if backend is None:
        return "runs"
    off = (got.double() - user(op)(x).double()).abs().max().item()
    return "as eager" if off < 1e-5 else f"WRONG, by {off:.0e}"


def found_by_opcheck(op: Callable, x: torch.Tensor) -> str:
    verdicts = torch.library.opcheck(op, (x,), raise_exception=False)
    failed = [f"{test} ({type(why).__name__})" for test, why in verdicts.items() if not isinstance(why, str)]
    return ", ".join(failed) or "passes"


def study(h: Harness) -> None:
    if h.profile:
        return
    x, found = h.randn(4, 6), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lie, op in LIES.items():
            with h.progress(f"lying: {lie}"):
                found[lie] = {
                    backend or "eager": consequence(op, x, backend) for backend in (None, "aot_eager", "inductor")
                }
                found[lie]["opcheck"] = found_by_opcheck(op, x.clone())
    h.fact("what the rule says, and what comes of it", found)
