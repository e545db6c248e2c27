"""XLA's device is made while tests are collected: after a backward pass on the CPU, XLA's own backward would fail."""

from importlib.util import find_spec

if find_spec("torch_xla"):
    from examples.common import xla

    xla.device()
