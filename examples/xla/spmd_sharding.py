"""A mesh of all devices, and a tensor sharded over its axes; what torch_xla accepts silently is an error here."""

from __future__ import annotations

import math

import torch
import torch_xla.distributed.spmd as xs
from torch_xla import runtime

Spec = tuple[str | None, ...]


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> xs.Mesh:
    """All devices of this process as a grid with named axes.

    Raises RuntimeError unless SPMD is on; ValueError for axes that do not match, or another number of devices.
    """
    if not runtime.is_spmd():
        raise RuntimeError("make_mesh: SPMD is off; call torch_xla.runtime.use_spmd() before anything is on the device")
    devices = runtime.global_runtime_device_count()
    if len(shape) != len(names) or len(set(names)) != len(names):
        raise ValueError(f"make_mesh: shape {shape} and axes {names}; give each axis one name of its own")
    if math.prod(shape) != devices:
        raise ValueError(
            f"make_mesh: shape {shape} is {math.prod(shape)} devices, and there are {devices}; a mesh holds them all "
            "(CPU_NUM_DEVICES sets their number, before torch_xla is imported)"
        )
    return xs.Mesh(list(range(devices)), shape, names)


def require_cut(shape: tuple[int, ...], spec: Spec, axes: dict[str, int]) -> None:
    """ValueError for a spec of another rank, an unknown axis, an axis used twice, or a dimension that does not divide.

    torch_xla would silently pad such a dimension, on the last devices.
    """
    if len(spec) != len(shape):
        raise ValueError(f"shard: spec {spec} for a tensor {shape}; name an axis, or None, for each dimension")
    used = [axis for axis in spec if axis is not None]
    if unknown := sorted(set(used) - set(axes)):
        raise ValueError(f"shard: spec {spec} names {unknown}, and the axes of the mesh are {list(axes)}")
    if len(set(used)) != len(used):
        raise ValueError(f"shard: spec {spec} uses an axis twice; each can cut one dimension")
    for size, axis in zip(shape, spec, strict=True):
        if axis and size % axes[axis]:
            raise ValueError(f"shard: {size} does not divide by the {axes[axis]} devices of {axis!r}; pad the tensor")


def shard(t: torch.Tensor, mesh: xs.Mesh, spec: Spec) -> torch.Tensor:
    """mark_sharding(t, mesh, spec) where it fits; else require_cut's errors, and TypeError for a tensor not on XLA."""
    if t.device.type != "xla":
        raise TypeError(f"shard: the tensor is on {t.device}; move it to torch_xla.device() first")
    require_cut(tuple(t.shape), spec, mesh.shape())
    xs.mark_sharding(t, mesh, spec)
    return t
