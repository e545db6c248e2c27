"""Lessons and studies run in a test: nothing printed, nothing timed, torch's settings as before."""

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings, settings_kept

import pytest
import torch
from rich.console import Console


def quiet(needs: str = "torch", **options) -> Harness:
    return Harness("test", Needs.parse(needs), console=Console(quiet=True), **{"timing": False, **options})


def ran(*parts, finish: bool = True, **options) -> Harness:
    """The harness that these demos, or studies (with lesson=[]), recorded in, one after the other."""
    h = quiet(**options)
    with settings_kept("test", 0):
        for part in parts:
            part(h)
    if finish:
        h.finish()
    return h


@pytest.fixture
def h() -> Harness:
    return quiet()


@pytest.fixture(autouse=True)
def compiler_as_found():
    """Nothing is compiled before a test; and it leaves torch's settings as it found them."""
    torch.compiler.reset()
    before = settings()
    yield
    torch.compiler.reset()
    assert settings() == before
