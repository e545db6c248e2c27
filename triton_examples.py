"""Triton kernels: one technique per file, checked against float64 and timed against the best call torch offers.

The topic starts where every kernel starts: programs, blocks and masks (vector_add). The first gain comes from
moving fewer bytes (fused_add_relu_mul), the next from keeping a row where it is needed (softmax). Then the
tensor cores: tiles, their order, and a search over tile sizes (matmul).

    python triton_examples.py                  all of them, sized for this machine
    python triton_examples.py softmax matmul   only these
    python triton_examples.py --list           what there is
"""

from harness.cli import main

TECHNIQUES = [
    "examples/triton/vector_add.py",
    "examples/triton/fused_add_relu_mul.py",
    "examples/triton/softmax.py",
    "examples/triton/matmul.py",
]

if __name__ == "__main__":
    main(__file__)
