"""backends, looked at: what torch lists, and when a first call has paid for itself."""

from __future__ import annotations

from harness import Harness

import torch

from examples.compiler.backends import BACKENDS, backend, missing
from examples.compiler.backends_attempt import attempt


def study(h: Harness) -> None:
    if h.profile:
        return
    listed = torch.compiler.list_backends()
    h.fact("torch.compiler.list_backends()", listed)
    outcomes = {name: attempt({"backend": name}, h.device.type) for name in listed}
    h.fact("listed, but does not run by that name", [name for name, outcome in outcomes.items() if outcome.error])
    seconds = {n: round(attempt(backend(n), "cpu").seconds, 2) for n in BACKENDS if missing(n) is None}
    h.fact("seconds to the first result on the CPU", seconds)
    for table in h.lesson:
        for row in table.rows[1:] if table.timed else ():
            faster = row.p80 < table.rows[0].p20  # by more than either varies
            calls = row.first_call_s * 1000 / (table.rows[0].ms - row.ms) if faster else None
            saved = f"saved again after {calls:,.0f} calls" if calls else "never saved again: it is not clearly faster"
            h.say(f"{table.title}, {row.variant}: first call {row.first_call_s:.2f} s, {saved}")
