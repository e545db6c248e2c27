"""Tests that share a GPU, and one that waits for it."""

import threading

from tests.conftest import hold


def test_who_is_alone_waits_for_all_others_and_they_for_it(tmp_path):
    path, events = tmp_path / "lock", []
    path.touch()

    def take(name: str, alone: bool) -> None:
        with open(path) as lock:
            hold(lock, alone=False)
            hold(lock, alone)
            events.append(name)

    with open(path) as one, open(path) as two:
        hold(one, alone=False)
        hold(two, alone=False)
        waiting = [threading.Thread(target=take, args=("alone", True)) for _ in range(2)]
        for each in waiting:
            each.start()
        take("beside them", alone=False)
        one.close()
        waiting[0].join(0.1)
        assert events == ["beside them"], "one of the two is still held"
    for each in waiting:
        each.join()
    assert events == ["beside them", "alone", "alone"], "two that wait to be alone go on one after the other"
