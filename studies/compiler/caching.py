"""caching, shown: what TORCH_COMPILE_CACHE_DIR keeps, and the variable that switches the caches off.

Each variable is set in a process of its own; the run fails if one does not do what is claimed.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness
from harness.process import Child, report

import torch

from compile_inspect import watch
from examples.common.shown import require
from examples.compiler.caching import TIMEOUT_S
from examples.compiler.caching_key import CACHES, found, product

NOT_A_VARIABLE = "TORCH_COMPILE_CACHE_DIR"  # what the chapter says keeps compiled code
OFF = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"


def child_product() -> None:
    """A small function alone: enough to ask whether anything was kept."""
    x, w = torch.ones(2, 16, 16, device="cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad(), watch() as seen:
        torch.compile(product, dynamic=False)(x, w, w[0])
    report(found=found(seen))


def study(h: Harness) -> None:
    if h.profile:
        return
    with TemporaryDirectory(prefix="caching-", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder, children = Path(name), {}
        for made in ("kept", NOT_A_VARIABLE, OFF):
            (folder / made).mkdir()
        for variable, value in {NOT_A_VARIABLE: str(folder / "kept"), OFF: "1"}.items():
            env = {"TORCHINDUCTOR_CACHE_DIR": None, "TMPDIR": str(folder / variable), variable: value}
            children[variable] = stack.enter_context(Child(child_product, env=env, timeout=TIMEOUT_S))
        conclude(h, folder, {variable: child.result()["found"] for variable, child in children.items()})


def conclude(h: Harness, folder: Path, answers: dict[str, dict[str, str]]) -> None:
    """What each variable keeps, or switches off."""
    kept, default = (
        sum(path.is_file() for path in (folder / name).rglob("*")) for name in ("kept", NOT_A_VARIABLE)
    )  # fmt: skip
    asked, silent = answers[NOT_A_VARIABLE], dict.fromkeys(CACHES, "not asked")
    require(kept == 0 and set(asked.values()) == {"miss"}, f"{NOT_A_VARIABLE} kept {kept} files: {asked}")
    require(default > 0, "without TORCHINDUCTOR_CACHE_DIR nothing was kept in the temporary folder either")
    require(answers[OFF] == silent, f"{OFF}=1: {answers[OFF]}")
    h.fact(
        "variables",
        {
            NOT_A_VARIABLE: f"{kept} files: torch {torch.__version__} knows no such variable",
            "no TORCHINDUCTOR_CACHE_DIR": f"{default} files in the temporary folder, which a container loses",
            f"{OFF}=1": "no cache is asked",
        },
    )
