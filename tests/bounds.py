"""Triton's interpreter with a bounds check: a kernel may touch only the memory of tensors that were passed to it.

A load past the end of a vector, whose values a mask of the store discards, passes every check of results; on a GPU only
compute-sanitizer sees it. Provenance is not followed: reading x through y's pointer is not noticed, reading between is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import torch


class OutOfBounds(AssertionError):
    """A lane that no mask switches off has an address in no tensor that the kernel was given."""


class Checked:
    """The interpreter's loads, stores and atomics, for the launch that runs now."""

    def __init__(self, plain) -> None:
        self.plain, self.kernel, self.bounds = plain, "", np.zeros((0, 2), np.uint64)

    def __getattr__(self, name: str):
        return getattr(self.plain, name)

    def launch(self, kernel: str, arguments) -> None:
        """Takes the memory of `arguments` (tensors, descriptors, tuples of them) as what may be touched."""
        self.kernel, found = kernel, set()

        def add(value) -> None:
            if isinstance(value, (tuple, list)):
                for each in value:
                    add(each)
            elif hasattr(value, "block_shape"):
                add(value.base)
            elif isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

        add(list(arguments))
        self.bounds = np.array(sorted(found), np.uint64).reshape(-1, 2)

    def check(self, what: str, pointers, mask, size: int) -> None:
        at = pointers if mask is None else pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
        if not at.size:
            return
        least, most = at.min(), at.max() + np.uint64(size)
        starts, ends = self.bounds[:, 0], self.bounds[:, 1]
        if np.any((starts <= least) & (most <= ends)):  # all in one tensor, as nearly always
            return
        last = np.searchsorted(starts, at, side="right") - 1  # of each lane, the tensor that begins before it
        outside = (last < 0) | (at + np.uint64(size) > ends[np.maximum(last, 0)] if len(ends) else True)
        if outside.any():
            first = int(at[outside][0])
            near = min((abs(first - int(edge)) for edge in self.bounds.flat), default=None)
            raise OutOfBounds(
                f"{self.kernel}: a {what} of {outside.sum()} of {at.size} unmasked lanes is outside every tensor that "
                f"the kernel was given, the first of them {near} bytes from the nearest; mask it"
            )

    def load(self, pointers, mask, other, dtype):
        self.check("load", pointers, mask, np.dtype(dtype).itemsize)
        return self.plain.load(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        self.check("store", pointers, mask, value.itemsize)
        return self.plain.store(pointers, value, mask)

    def atomic_rmw(self, op, pointers, value, mask, order):
        self.check("atomic", pointers, mask, value.itemsize)
        return self.plain.atomic_rmw(op, pointers, value, mask, order)

    def atomic_cas(self, pointers, expected, value, order):
        self.check("atomic", pointers, None, value.itemsize)
        return self.plain.atomic_cas(pointers, expected, value, order)


@contextlib.contextmanager
def checked_bounds() -> Iterator[None]:
    """Within, every interpreted kernel of this process is checked."""
    from triton.runtime import interpreter

    checked, arguments_of = Checked(interpreter._interpreter), interpreter.GridExecutor._init_args_hst

    def on_the_host(self, arguments, options):
        hosts = arguments_of(self, arguments, options)
        checked.launch(self.fn.__name__, [*hosts[0], *hosts[1].values()])
        return hosts

    with (
        patch.object(interpreter, "_interpreter", checked),
        patch.object(interpreter.GridExecutor, "_init_args_hst", on_the_host),
    ):
        yield
