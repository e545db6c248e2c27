"""What the tests of several TMA techniques share."""

from types import SimpleNamespace


def launches(monkeypatch, module, name):
    """What is launched instead of the kernel of that name: a list of grid, args and options."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(SimpleNamespace(grid=grid, args=args, options=options))

    monkeypatch.setattr(module, name, Kernel())
    return launched
