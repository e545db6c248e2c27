"""What the tests of several TMA techniques share."""

from types import SimpleNamespace

import torch


def check_tall_and_wide(h, gemm, K=64, most=2**31):
    """The first and last rows and columns of gemm(x, w), x @ w.T of more elements than an int32 counts."""
    few, many = (torch.empty(n, K, dtype=h.half, device=h.device).normal_() for n in (64, most // 64 + 64))
    for x, w in ((many, few), (few, many)):
        y = gemm(x, w)
        for part in (slice(0, 304), slice(-304, None)):
            got, inputs = (y[part], (x[part], w)) if w is few else (y[:, part].contiguous(), (x, w[part]))
            h.check(lambda *_, got=got: got, lambda x, w: x.double() @ w.double().T, *inputs, terms=K, poison=False)
        del y, got


def launches(monkeypatch, module, name):
    """What is launched instead of the kernel of that name: a list of grid, args and options."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(SimpleNamespace(grid=grid, args=args, options=options))

    monkeypatch.setattr(module, name, Kernel())
    return launched
