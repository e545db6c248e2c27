"""Functions that torch.compile takes whole, as one operator of its graph: a backward that launches kernels is one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def one_node(schema: str, *, like: tuple[int, ...]) -> Callable:
    """A decorator for a function of tensors whose results have the shapes and dtypes of its arguments at `like`.

    For what torch.compile cannot trace: a Gluon kernel or, in the backward of a torch.autograd.Function, a question
    such as `tensor.layout`. Results are contiguous and new. Outside torch.compile fn itself is called. `schema` is
    fn's, as torch.library.custom_op takes it, with no name; the operator is companion::<fn's name>, and call.operator.
    """

    def decorate(fn: Callable) -> Callable:
        operator = torch.library.custom_op(f"companion::{fn.__name__}", fn, mutates_args=(), schema=schema)
        operator.register_fake(lambda *args: tuple(args[i].new_empty(args[i].shape) for i in like))

        @functools.wraps(fn)
        def call(*args, **kwargs):
            return (operator if torch.compiler.is_compiling() else fn)(*args, **kwargs)

        call.operator = operator
        return call

    return decorate
