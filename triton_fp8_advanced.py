"""FP8: from what the formats hold to GEMMs and attention on the FP8 tensor cores, checked and timed.

The topic starts with the numbers themselves: range, spacing, saturation (formats), and how data gets there with a scale
that fits (quantize). Then the products: one scale per tensor or per row (fp8_matmul), one per group with partial sums
promoted to float32 (blockwise_matmul), and what each recipe does to a layer and costs (accuracy). A kernel that writes
FP8 itself saves a pass over memory (fused_layer_norm_quantize, fused_gelu_quantize). Attention does both of its
products in FP8 (fp8_attention), and Blackwell's block-scaled formats go down to four bits (microscaling). At the end
FP8 stands in a whole decoder block, in prefill and in training (llama_block).

    python triton_fp8_advanced.py                        all of them, sized for this machine
    python triton_fp8_advanced.py quantize fp8_matmul    only these
    python triton_fp8_advanced.py --list                 what there is
"""

from harness.cli import main

TECHNIQUES = [
    "examples/fp8/formats.py",
    "examples/fp8/quantize.py",
    "examples/fp8/fp8_matmul.py",
    "examples/fp8/blockwise_matmul.py",
    "examples/fp8/accuracy.py",
    "examples/fp8/fused_layer_norm_quantize.py",
    "examples/fp8/fused_gelu_quantize.py",
    "examples/fp8/fp8_attention.py",
    "examples/fp8/microscaling.py",
    "examples/fp8/llama_block.py",
]
TOUR = ("fp8_matmul",)

if __name__ == "__main__":
    main(__file__)
