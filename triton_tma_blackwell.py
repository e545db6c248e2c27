"""TMA and Blackwell: tiles moved by the Tensor Memory Accelerator, warp specialization, what each architecture has.

The topic starts with what TMA is and is not (what_is_tma), how fast it copies (tma_copy), and the two ways to describe
a matrix to it (descriptors). Then a GEMM takes it step by step: loads, store, epilogue in parts (tma_matmul), one
program per SM (tma_persistent_matmul), more work in the store (tma_epilogues). Gluon writes by hand what the compiler
did so far (gluon_matmul), and Blackwell replaces the accumulators in registers by tensor memory (blackwell).

    python triton_tma_blackwell.py                        all of them, sized for this machine
    python triton_tma_blackwell.py tma_copy tma_matmul    only these
    python triton_tma_blackwell.py --list                 what there is
"""

from harness.cli import main

TECHNIQUES = [
    "examples/tma/what_is_tma.py",
    "examples/tma/tma_copy.py",
    "examples/tma/descriptors.py",
    "examples/tma/tma_matmul.py",
    "examples/tma/tma_persistent_matmul.py",
    "examples/tma/tma_epilogues.py",
    "examples/tma/gluon_matmul.py",
    "examples/tma/blackwell.py",
]
TOUR = ("tma_matmul",)

if __name__ == "__main__":
    main(__file__)
