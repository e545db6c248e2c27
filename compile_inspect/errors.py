"""Whether compiled results are as good as eager's: errors against a float64 run, beside those of eager itself."""

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.utils._pytree import tree_map

from compile_inspect.subject import Subject, modules_of, parameters, tensors_of

ALLOWED, ROUNDINGS = 4.0, 4.0  # of eager's own error; and of epsilon, at the output's scale, where eager has none


class Results(list):
    """Tensors: the first `outputs` are what a call returned, the others gradients; and the `seconds` that it took.

    Further calls take `ms`; or `failure` says why there is nothing. `parts` of the seconds, and `graphs`: see basics.
    """

    outputs, graphs, failure = 0, 0, ""
    seconds = ms = parts = None


def results(
    subject: Subject, wrap: Callable = lambda fn: fn, double: bool = False, calls: list | None = None
) -> Results:
    """The tensors that one call returns, and in training the gradients that it leaves, of wrap(model).

    With `double` model and arguments are float64 copies. The call, to be made again, is added to `calls`.
    """
    fn, args, kwargs = subject.fresh()
    if double:
        for module in modules_of(fn):
            module.double()
        args, kwargs = tree_map(as_double, (args, kwargs))
    torch.manual_seed(0)  # dropout draws the same numbers, where the compiler is told to leave them to torch
    call = subject.caller(wrap(fn), args, kwargs)
    ms, _, returned = subject.once(call)
    out = Results(map(dense, tensors_of(returned)))
    out.outputs, out.seconds = len(out), ms / 1e3
    if calls is not None:
        calls.append(call)
    if subject.train:
        out += [leaf.grad for leaf in [*parameters(fn), *tensors_of((args, kwargs))] if leaf.grad is not None]
    out[:] = [tensor.detach() for tensor in out]
    return out


def references(subject: Subject) -> tuple[Results, Results | None, bool]:
    """(what eager returns, what it returns in float64 if it runs in it, whether it returns the same again)."""
    exact = None
    with torch.compiler.set_stance("force_eager"):  # also what the model compiles inside
        eager, again = results(subject), results(subject)
        with suppress(Exception):  # for memory too
            exact = None if subject.shared else results(subject, double=True)  # the user's own model stays as it is
    return eager, exact, error_ratio(again, eager, None) <= 1


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """What can be compared: a complex tensor in pairs, a sparse one whole."""
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_double(leaf):
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def error_ratio(got: list, eager: list, exact: list | None) -> float:
    """The largest error of `got` over what is allowed: above 1 it is wrong, inf where it cannot be compared.

    Allowed is 4 times the rms error of `eager` against `exact`, at most half of the tensor's scale, or 4 roundings.
    Where there is no exact run, the square root of epsilon from eager is. Tensors of integers must be equal.
    """
    if len(got) != len(eager) or (exact is not None and len(exact) != len(eager)):
        return math.inf
    # A gradient that is zero but for rounding, as that of a bias before a norm, is as exact as its neighbours allow.
    first = getattr(eager, "outputs", len(eager))
    scale = max((_rms(each.double()) for each in eager[first:] if each.is_floating_point()), default=0.0)
    floors = [0.0] * first + [scale * ROUNDINGS * torch.finfo(torch.float32).eps] * (len(eager) - first)
    return max(map(_ratio, got, eager, exact or [None] * len(eager), floors), default=0.0)


def _ratio(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None, floor: float) -> float:
    if got.shape != eager.shape or got.dtype != eager.dtype:
        return math.inf
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, eager) else math.inf
    if not torch.equal(got.isfinite(), eager.isfinite()):
        return math.inf
    eps = torch.finfo(got.dtype).eps
    rounding, exact = (math.sqrt(eps), eager) if exact is None else (ROUNDINGS * eps, exact)
    finite = eager.isfinite() & exact.isfinite()
    got, eager, exact = (tensor[finite].double() for tensor in (got, eager, exact))
    if not exact.numel() or torch.equal(got, eager):
        return 0.0
    scale = _rms(exact)  # zeros never pass, be eager as far from float64 as it may
    allowed = max(min(ALLOWED * _rms(eager - exact), 0.5 * scale), rounding * scale, floor)
    return _rms(got - exact) / allowed if allowed else math.inf


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())
