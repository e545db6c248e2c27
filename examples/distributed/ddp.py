"""A stand-in.

Question   does it run?
Needs      torch, 2 ranks
"""

import os
import signal
import time

from harness import Harness, Work, run

import torch.distributed as dist


def demo(h: Harness) -> None:
    how = os.environ.get("FAULT", "")
    x = h.randn(8, 16)

    def total(x):
        rows = x.shape[0] // h.ranks
        y = x[h.rank * rows : (h.rank + 1) * rows].sum(0)
        if how == "raise" and h.rank == 1:
            raise ValueError("rank one does not like it")
        if how == "kill" and h.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "shape" and h.rank == 1:
            y = y[:5]
        if how == "hang" and h.rank == 1:
            time.sleep(1000)
        if how == "sleep":
            time.sleep(20)
        dist.all_reduce(y)
        return y

    h.check(total, lambda x: x.double().sum(0), x, terms=8)
    h.compare({"torch": total}, lambda x: x.double().sum(0), x, baseline="torch", work=Work(bytes=4), terms=8)
    h.answer(lambda: "yes")


if __name__ == "__main__":
    run(demo)
