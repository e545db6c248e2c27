"""Whether rows are read 16 bytes at a time: kernels that share long rows choose their slices and programs by it."""

from __future__ import annotations

import torch


def vector_width(*matrices: torch.Tensor | None) -> int:
    """Values of each of the matrices [n_rows, n_cols] that a load gives to a thread at once.

    16 bytes of them where Triton sees that all rows begin at a multiple of 16 bytes, else 1. A kernel that wants others
    in a thread is right, too, but Triton moves them through shared memory.
    """
    matrices = [matrix for matrix in matrices if matrix is not None]
    # Under torch.compile no tensor has an address. Triton specialises integers by whether 16 divides them.
    aligned = torch.compiler.is_compiling() or all(matrix.data_ptr() % 16 == 0 for matrix in matrices)
    return 16 // matrices[0].element_size() if aligned and all(m.stride(0) % 16 == 0 for m in matrices) else 1


def in_vectors(*matrices: torch.Tensor | None) -> bool:
    """Whether the rows of all are read 16 bytes at a time: a mask that ends elsewhere splits the loads, too."""
    return vector_width(*matrices) > 1 and matrices[0].shape[1] % 16 == 0
