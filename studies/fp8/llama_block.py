"""Study of llama_block."""
from __future__ import annotations
from harness import Harness
def study(h: Harness) -> None:
    pass
