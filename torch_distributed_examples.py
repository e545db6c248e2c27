"""torch.distributed: what the compiler and Triton kernels do on more than one GPU.

The engines are those that a reader who outgrows one GPU uses: torchrun, NCCL, DDP, FSDP2, DTensor. The script starts
its own ranks, one for each GPU, or two by gloo on a CPU; under torchrun it is one of them. Where DDP breaks the
compiled graph, and whether its communication is hidden (ddp); what is compiled before weights are sharded, or after
(fsdp2); each layer on all ranks (tensor_parallel); weights that travel in FP8 (fp8_all_gather); a checkpoint that any
number of ranks loads (checkpoint_resume); what ranks compile at once, and who waits for one that compiles alone
(compile_time); a GEMM that starts while its rows are on their way (fused_collectives); small messages by a kernel of
one launch (one_shot_allreduce).

    python torch_distributed_examples.py                        all of them, sized for this machine
    python torch_distributed_examples.py ddp --ranks 2          only this, in two ranks
    python torch_distributed_examples.py --list                 what there is
    torchrun --nproc-per-node 2 torch_distributed_examples.py   the same ranks, started by torchrun
"""

from harness.cli import main

TECHNIQUES = [
    "examples/distributed/ddp.py",
    "examples/distributed/fsdp2.py",
    "examples/distributed/tensor_parallel.py",
    "examples/distributed/fp8_all_gather.py",
    "examples/distributed/checkpoint_resume.py",
    "examples/distributed/compile_time.py",
    "examples/distributed/fused_collectives.py",
    "examples/distributed/one_shot_allreduce.py",
]
TOUR = ("ddp",)

if __name__ == "__main__":
    main(__file__)
