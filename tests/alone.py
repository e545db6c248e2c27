"""A process group of this process alone, for what a lesson that needs ranks does without another one."""

from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def alone():
    """One rank, by gloo; nothing where there is a group already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
