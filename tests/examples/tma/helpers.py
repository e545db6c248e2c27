"""What the tests of several TMA techniques share."""

from types import SimpleNamespace

import torch

from examples.common.device import SHARED_LIMIT, Limits


def check_tall_and_wide(h, gemm, K=64, most=2**31):
    """The first and last rows and columns of gemm(x, w), x @ w.T of more elements than an int32 counts."""
    few, many = (torch.empty(n, K, dtype=h.half, device=h.device).normal_() for n in (64, most // 64 + 64))
    for x, w in ((many, few), (few, many)):
        y = gemm(x, w)
        for part in (slice(0, 304), slice(-304, None)):
            got, inputs = (y[part], (x[part], w)) if w is few else (y[:, part].contiguous(), (x, w[part]))
            h.check(lambda *_, got=got: got, lambda x, w: x.double() @ w.double().T, *inputs, terms=K, poison=False)
        del y, got


def odd_operands(h, dtype=None):
    """x and w of x @ w.T: rows apart, a later start, every third row, a row with a stride nobody steps by. What NaN and
    infinity reach is what torch says they reach: not the rows and columns beside the tail of a tile."""
    x, w = h.randn(140, 328, dtype=dtype or h.half), h.randn(300, 480, dtype=dtype or h.half)
    yield x[:, 16:160], w[:264, 8:152]
    yield x[::3, :144], w[16:288:2, 32:176]
    yield x[:1, :144].as_strided((1, 144), (5, 1)), w[:40, :144]
    x, w = x[:130].clone(), w[:264, :328].contiguous()
    x[3, 5], w[9, 2], x[129, 327], w[130, 7] = (float(v) for v in ("nan", "nan", "inf", "-inf"))
    yield x, w


def pretend(monkeypatch, modules, sms, sm=90, shared_bytes=None):
    """Let wrappers believe in another GPU: so many SMs, so much shared memory (the interpreter has no limit)."""
    limits = Limits(sms, shared_bytes or SHARED_LIMIT[sm])
    for module in modules:
        monkeypatch.setattr(module, "device_limits", lambda device: limits)
        monkeypatch.setattr(module, "architecture", lambda device: sm, raising=False)


class Launcher:
    """Stands for a kernel: launch(grid, args, options) is called instead."""

    def __init__(self, launch):
        self.launch = launch

    def __getitem__(self, grid):
        return lambda *args, **options: self.launch(grid, args, options)


def launches(monkeypatch, module, name):
    """What is launched instead of the kernel of that name: a list of grid, args and options."""
    launched = []
    kernel = Launcher(
        lambda grid, args, options: launched.append(SimpleNamespace(grid=grid, args=args, options=options))
    )
    monkeypatch.setattr(module, name, kernel)
    return launched
