"""Wrappers that torch.compile takes whole: a file that is loaded twice has operators of its own.

What they compute, refuse and promise is in the tests of those who use it, layer_norm and rms_norm.
"""

import importlib.util

import pytest
import torch

from examples.triton import rms_norm_backward


@pytest.mark.parametrize("compiled", [False, True])
def test_of_a_file_that_is_loaded_twice_both_operators_work(h, compiled):
    """Of two operators of one name torch keeps the later, and the earlier crashes."""
    modules = []
    for name in ("loaded_first", "loaded_second"):
        spec = importlib.util.spec_from_file_location(name, rms_norm_backward.__file__)
        modules.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    x, dy, weight = h.randn(5, 96), h.randn(5, 96), h.randn(96)
    args = (dy, x, weight, (x.square().mean(1) + 1e-6).rsqrt())
    want = rms_norm_backward.reference_backward(*args)
    names = set()
    for module in (*modules, modules[0]):
        torch.compiler.reset()
        fn = module.rms_norm_backward
        got = (torch.compile(fn, fullgraph=True, backend="aot_eager") if compiled else fn.operator)(*args)
        torch.testing.assert_close(got, tuple(part.float() for part in want), rtol=1e-4, atol=1e-4)
        names.add(str(fn.operator._opoverload))
    assert len(names) == 2
