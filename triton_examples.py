"""Triton kernels: one technique per file, checked against float64 and timed against the best call torch offers.

The topic starts where every kernel starts: programs, blocks and masks (vector_add). The first gain comes from
moving fewer bytes (fused_add_relu_mul), the next from keeping a row where it is needed (softmax). Then the
tensor cores: tiles and their order (matmul), what each precision costs (tensor_cores), where shared memory comes
from (shared_memory), which tile is best (autotune), and the three ways to keep the tensor cores busy: loads ahead
(pipelined_matmul), tiles that overlap (persistent_matmul), warp specialization (warp_specialized_matmul); and, for the
few rows of a decoding step, weights read at the speed of memory (skinny_matmul), in 4 or 8 bits (weight_only_matmul);
for a layer of experts, all of them in one launch (grouped_matmul).
With these, the kernels of a model: layer_norm, rms_norm (with the residual) and dropout with their backward passes,
flash_attention, and decode_attention for one token at a time, and the loss of a language model (cross_entropy); how
torch.compile sees a kernel (custom_op), and how to find out what is wrong with one (debugging).

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
    "examples/triton/tensor_cores.py",
    "examples/triton/shared_memory.py",
    "examples/triton/autotune.py",
    "examples/triton/pipelined_matmul.py",
    "examples/triton/persistent_matmul.py",
    "examples/triton/warp_specialized_matmul.py",
    "examples/triton/skinny_matmul.py",
    "examples/triton/weight_only_matmul.py",
    "examples/triton/grouped_matmul.py",
    "examples/triton/layer_norm.py",
    "examples/triton/rms_norm.py",
    "examples/triton/dropout.py",
    "examples/triton/flash_attention.py",
    "examples/triton/decode_attention.py",
    "examples/triton/cross_entropy.py",
    "examples/triton/custom_op.py",
    "examples/triton/debugging.py",
]
TOUR = ("softmax", "matmul")

if __name__ == "__main__":
    main(__file__)
