"""Tests of several processes that share a GPU: their order, and who gets its memory."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import in_turns, locked


def test_what_compiles_most_comes_first_and_what_waits_for_memory_is_spread():
    def item(name: str, gpu: bool = False, large: bool = False):
        class Item(SimpleNamespace):
            __hash__ = object.__hash__  # as pytest's

        marker = (lambda name: name == "gpu") if gpu else (lambda name: None)
        return Item(nodeid=name, get_closest_marker=marker, fixturenames=["gpu_gib"] if large else [])

    items = [item(f"plain {i:02}") for i in range(40)] + [item(f"large {i}", large=True) for i in range(4)]
    items += [item(f"compiles {i}", gpu=True) for i in range(4)]
    order = [each.nodeid for each in in_turns(items)]
    assert sorted(order) == sorted(each.nodeid for each in items)
    assert [each for each in order if each.startswith("compiles")] == order[1:3] + order[4:6]
    assert [i for i, each in enumerate(order) if each.startswith("large")] == [0, 3, 6, 27]


def test_the_memory_is_for_one_at_a_time(tmp_path):
    pytest.importorskip("fcntl", reason="Windows, which has no Triton")
    path, inside = tmp_path / "lock", []
    path.touch()

    def use() -> None:
        with locked(path):
            inside.append("in")
            threading.Event().wait(0.01)
            inside.append("out")

    users = [threading.Thread(target=use) for _ in range(4)]
    for each in users:
        each.start()
    for each in users:
        each.join()
    assert inside == ["in", "out"] * 4


def test_a_test_that_asks_twice_does_not_wait_for_itself(monkeypatch, gpu_gib):
    lock, taken = threading.Lock(), []

    @contextlib.contextmanager
    def once(path):
        assert lock.acquire(blocking=False), "it waits for itself"
        taken.append(path)
        yield
        lock.release()

    for name, value in (("SHARED", True), ("locked", once)):
        monkeypatch.setitem(gpu_gib.__globals__, name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    gpu_gib(1)
    gpu_gib(2)
    assert len(taken) == 1
