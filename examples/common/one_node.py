"""Wrappers that torch.compile takes whole, each as one operator of its graph, although it could not trace them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def one_node(schema: str, *, like: tuple[int, ...], check: Callable) -> Callable:
    """A decorator for a wrapper without a backward; its results have the shapes and dtypes of its arguments at `like`.

    For what torch.compile cannot trace: a Gluon kernel or, in the backward of a torch.autograd.Function, a question
    such as `tensor.layout`. `schema` is the wrapper's, as torch.library.custom_op takes it, with no name; its results
    are contiguous and share memory with nothing. `check` raises for arguments that do not fit: it is called while
    compiling, with tensors without data. Only torch.compile and torch.export see the operator, `wrapper.operator`.
    Raises RuntimeError where an input requires grad and autograd is on.
    """

    def decorate(fn: Callable) -> Callable:
        # Defining a name again frees the first operator: a file that is loaded under two names gets one for each.
        operator = torch.library.custom_op(
            f"companion_{fn.__module__.replace('.', '_')}::{fn.__name__}", fn, mutates_args=(), schema=schema
        )

        @operator.register_fake
        def _(*args):
            check(*args)
            return tuple(args[i].new_empty(args[i].shape) for i in like)

        @functools.wraps(fn)
        def call(*args, **kwargs):
            if not torch.compiler.is_compiling():
                return fn(*args, **kwargs)
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                raise RuntimeError(
                    f"{fn.__name__}: an input requires grad and this kernel has no backward; "
                    "pass x.detach() or call it under torch.no_grad()"
                )
            return operator(*args, **kwargs)

        call.operator = operator
        return call

    return decorate
