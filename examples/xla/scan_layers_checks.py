"""Which layers can be scanned: require_equal refuses what scan_layers takes without a word and computes wrongly.

The first layer's code and settings stand for all of them in a scan, and what a layer changes in place is carried on
instead of its output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

# What torch itself keeps in a module's __dict__; the hooks among it are checked separately.
OWN = set(vars(nn.Module())) | {"training"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def require_equal(layers: Sequence[nn.Module], x: torch.Tensor | None = None) -> None:
    """Raise unless one of these layers can stand for all of them, in a loop that carries x from one to the next.

    TypeError for anything but a sequence of modules (a generator too); ValueError, with the layer and the fix, for no
    layers, layers that differ in class, parameters, dtype, device or settings, hooks, active dropout, and, where x is
    given, a layer that changes its input or buffers, or the shape.
    """
    if not isinstance(layers, (Sequence, nn.ModuleList, nn.Sequential)) or isinstance(layers, str):
        raise TypeError(f"require_equal: got {type(layers).__name__}; pass a list of modules, which can be read twice")
    if not layers:
        raise ValueError("require_equal: no layers; need at least one")
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"require_equal: layer {i} is a {type(layer).__name__}, not a module")
    first = _described(layers[0])
    for i, layer in enumerate(layers):
        described = _described(layer)
        for what in described | first:
            told, wanted = described.get(what, "(none)"), first.get(what, "(none)")
            if not _same(told, wanted):
                raise ValueError(
                    f"require_equal: layer {i} has {what} {told}, layer 0 has {wanted}; scan computes all layers "
                    "with the first one's code: make them equal, or run this one outside the scan"
                )
        for name, module in layer.named_modules():
            if any(getattr(module, hooks, None) for hooks in HOOKS):
                raise ValueError(
                    f"require_equal: layer {i} has hooks on {name or 'itself'}; scan drops them: remove them"
                )
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p:
                raise ValueError(
                    f"require_equal: layer {i} has active dropout, for which torch_xla 2.9 builds a loop that XLA "
                    "refuses; set p=0, call eval(), or apply dropout before the scan"
                )
    if x is not None:
        _require_carried(layers[0], x)


def _described(layer: nn.Module) -> dict[str, object]:
    """All that must be the same: classes, settings, and what the tensors look like."""
    told = {}
    for name, module in layer.named_modules():
        told[f"module {name or 'self'}"] = type(module)
        settings = {key: value for key, value in vars(module).items() if key not in OWN}
        told |= {f"setting {name}.{key}".replace(" .", " "): value for key, value in settings.items()}
        told[f"training of {name or 'self'}"] = module.training
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        trained = "trained" if tensor.requires_grad else "not trained"
        told[f"tensor {name}"] = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, {trained}"
    return told


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    try:
        return one is other or bool(one == other)
    except (RuntimeError, ValueError):  # tensors within a setting, such as a list: by what they look like
        return repr(one) == repr(other)


def _require_carried(layer: nn.Module, x: torch.Tensor) -> None:
    """One layer is recorded, not run: its output must look as its input does, and nothing may change in place."""
    state = {name: tensor.detach().clone() for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    given = x.detach().clone()
    watched = state | {"its input": given}
    before = {name: tensor._version for name, tensor in watched.items()}
    with torch.no_grad():
        out = torch.func.functional_call(layer, state, (given,))
    if not isinstance(out, torch.Tensor) or out.shape != x.shape or out.dtype != x.dtype:
        told = f"{tuple(out.shape)} {out.dtype}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(
            f"require_equal: a layer makes {told} of {tuple(x.shape)} {x.dtype}; in a loop its output is the next "
            "input: scan only layers that keep shape and dtype"
        )
    if changed := [name for name, tensor in watched.items() if tensor._version != before[name]]:
        raise ValueError(
            f"require_equal: a layer changes {', '.join(changed)} in place, and scan would carry that on instead of "
            "the output; write it without (x + 1 for x.add_(1), eval() or track_running_stats=False for batch norm)"
        )
