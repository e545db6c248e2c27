"""stances, further: another backend by force, a stance misspelt, two shapes before compiling, and threads."""

from __future__ import annotations

import threading

from harness import Harness

import torch

from examples.compiler.stances_outcomes import STANCES, Counting, new_function, outcomes_of


def study(h: Harness) -> None:
    if h.profile:
        return
    show_delayed(h)
    forced_backend(h)
    wrong_name(h)
    reach(h)


def show_delayed(h: Harness) -> None:
    """Two new shapes from the start: what those stances gain that put compiling off."""
    delayed = {stance: outcomes_of(stance, (4, 5, 6)) for stance in ("default", *STANCES[-2:])}
    h.fact("calls with 4, 5 and 6 rows", {stance: ", ".join(row) for stance, row in delayed.items()})


def forced_backend(h: Harness) -> None:
    """force_backend, with "default" only: the same program with another compiler, to find out whose fault it is."""
    own, forced = Counting(), Counting()
    compiled = torch.compile(new_function()[0], backend=own)
    x = torch.arange(4.0)
    with torch.compiler.set_stance("default", force_backend=forced):
        compiled(x)
        within = {"own": own.graphs, "forced": forced.graphs}
    compiled(x)
    h.fact("graphs under force_backend", {"within": within, "after": {"own": own.graphs, "forced": forced.graphs}})


def wrong_name(h: Harness) -> None:
    """torch takes any name, and raises when a compiled function is called: perhaps much later, and elsewhere."""
    compiled = torch.compile(new_function()[0], backend="eager")
    seen = {}
    with torch.compiler.set_stance("fail_on_recompiles"):
        seen["set_stance"] = "accepts 'fail_on_recompiles'"
        try:
            compiled(torch.ones(4))
            seen["first call"] = "no error"
        except RuntimeError as error:
            seen["first call"] = f"RuntimeError: {str(error).splitlines()[0]}"
    h.fact("a stance misspelt", seen)


def reach(h: Harness) -> None:
    """A stance is one for the process: set within one thread, it holds in all of them, for as long as that is."""
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with torch.compiler.set_stance("force_eager"):
            inside.set()
            done.wait(30)

    backend, (fn, ran_in_eager) = Counting(), new_function()
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(30)
    try:
        torch.compile(fn, backend=backend)(torch.ones(4))
    finally:
        done.set()
        thread.join()
    h.fact("a call while another thread is within force_eager", "runs in eager" if ran_in_eager else "compiles")
