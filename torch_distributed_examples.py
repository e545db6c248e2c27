"""torch.distributed: what the compiler and Triton kernels do on more than one GPU.

python torch_distributed_examples.py ddp
"""

from harness.cli import main

TECHNIQUES = [
    "examples/distributed/ddp.py",
    "examples/distributed/fused_collectives.py",
    "examples/distributed/one_shot_allreduce.py",
]
TOUR = ("ddp",)

if __name__ == "__main__":
    main(__file__)
