"""stances, further: two shapes before compiling, and how far a stance reaches."""

from __future__ import annotations

import threading

from harness import Harness

import torch

from examples.compiler.stances_outcomes import STANCES, new_function, outcomes_of


def study(h: Harness) -> None:
    if h.profile:
        return
    delayed = {stance: outcomes_of(stance, (4, 5, 6)) for stance in ("default", *STANCES[-2:])}
    h.fact("calls with 4, 5 and 6 rows", {stance: ", ".join(row) for stance, row in delayed.items()})
    h.fact("a call while another thread is within force_eager", within_another_threads_stance())


def within_another_threads_stance() -> str:
    """A stance applies to the whole process: while one thread has set it, it holds in all threads."""
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with torch.compiler.set_stance("force_eager"):
            inside.set()
            done.wait(30)

    fn, ran_in_eager = new_function()
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(30)
    try:
        torch.compile(fn, backend="eager")(torch.ones(4))
    finally:
        done.set()
        thread.join()
    return "runs in eager" if ran_in_eager else "compiles"
