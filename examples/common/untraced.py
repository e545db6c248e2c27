"""Functions that torch.compile must not look into: host descriptors, Gluon kernels and the interpreter stay eager."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def untraced(fn: Callable) -> Callable:
    """fn, which torch.compile leaves out of its graphs as a whole: a graph break, and an error under fullgraph=True.

    For a wrapper that makes descriptors on the host, launches a Gluon kernel, sets Triton's allocator, or searches in
    its first call: torch 2.11 can trace none of these. Outside torch.compile this costs 0.2 us a call.
    """
    # Lazily, where torch.compiler.disable would import the compiler with the lesson, which takes a second.
    whole = torch._disable_dynamo(fn)
    message = f"{fn.__qualname__} is not traced (examples/common/untraced.py); compile without fullgraph=True"

    @functools.wraps(fn)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=message)
            return whole(*args, **kwargs)
        return fn(*args, **kwargs)

    call.untraced = True
    return call
