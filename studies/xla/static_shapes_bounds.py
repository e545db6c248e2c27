"""static_shapes, measured: sizes with a bound, which switches of the environment turn on, hence the process."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import Harness
from harness.process import Child, report

import torch
from torch import nn

from examples.common import xla
from examples.xla.static_shapes import LARGEST, mlp, reference_of

EXPERIMENTS = {"XLA_EXPERIMENTAL": "nonzero", "EXPERIMENTAL_XLA_UNBOUNDED_DYNAMISM": "1"}


def study(h: Harness) -> None:
    if h.profile:
        return
    bounds(h, width=56, rows=(3, 1, 33, LARGEST))


# --- in a process of its own


def attempts(width: int) -> dict[str, Callable]:
    """What is tried on rows whose number XLA knows as "at most 64"."""
    linear, norm = nn.Linear(width, width), nn.BatchNorm1d(width, track_running_stats=False)
    return {
        "linear": linear,
        "mean over the batch": lambda x: x.mean(0),
        "batch norm (training)": norm,
        "softmax over the batch": lambda x: x.softmax(0),
        "rms_norm": lambda x: nn.functional.rms_norm(x, (x.shape[1],)),
        "layer_norm": lambda x: nn.functional.layer_norm(x, (x.shape[1],)),
        "x + gelu(x)": lambda x: x + nn.functional.gelu(x),
        "x @ x.T": lambda x: x @ x.T,
        "x.view(-1, 2, width / 2)": lambda x: x.view(-1, 2, x.shape[1] // 2),
    }


def real_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rows [<=64, width]: with XLA_EXPERIMENTAL=nonzero their number is not asked for, and stays a bound."""
    return x.index_select(0, torch.nonzero(mask).squeeze(1))


def bounded(width: int, rows: Sequence[int], dump: str) -> None:
    """Run in a process with EXPERIMENTS set: an MLP on sizes with a bound, single operations, sizes without."""
    torch.set_grad_enabled(False)
    model = mlp(width).to(xla.device())
    torch.manual_seed(0)
    x = torch.randn(LARGEST, width)
    padded = x.to(xla.device())
    masks = {n: (torch.arange(LARGEST) < n).to(xla.device()) for n in rows}
    xla.settle()
    calls, got, shapes = [], {}, []
    for n, mask in masks.items():
        with xla.watch() as ran:
            out = model(real_rows(padded, mask))
            shapes.append(str(list(out.shape)))
            got[n] = out.cpu()
        calls.append({"compiles": ran.compiles, "executions": ran.executions})
    products = [
        found
        for file in sorted(Path(dump).glob("*after_optimizations.txt"))
        for found in re.findall(r"= (\w+\[[^\]]*\])\S* (?:dot\(|custom-call\([^\n]*matmul)", file.read_text())
    ]

    several = {n: mask for n, mask in masks.items() if n > 1}  # batch norm refuses a single row, bound or not
    outcomes = {name: outcome(fn, x, several) for name, fn in attempts(width).items()}
    report(
        calls=calls, shape=shapes[0], products=products, outcomes=outcomes,
        got=[out.tolist() for out in got.values()], x=x.tolist(),
    )  # fmt: skip


def outcome(fn: Callable, x: torch.Tensor, masks: dict[int, torch.Tensor]) -> str:
    """What becomes of fn on rows with a bound: right, wrong, or the first line of the error."""
    on_xla = copy.deepcopy(fn).to(xla.device()) if isinstance(fn, nn.Module) else fn
    exact = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
    try:
        compiles = executions = 0
        for n, mask in masks.items():
            padded = x.to(xla.device())
            with xla.watch() as ran:
                got = on_xla(real_rows(padded, mask)).cpu()
            want = exact(x[:n].double())
            if got.shape != want.shape or not torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5):
                return f"wrong for {n} rows"
            compiles, executions = compiles + ran.compiles, executions + ran.executions
        return f"right for {', '.join(map(str, masks))} rows: {compiles} compiles, {executions} executions"
    except (RuntimeError, ValueError) as error:
        xla.forget_pending()
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


# --- what that process found


def bounds(h: Harness, width: int, rows: tuple[int, ...]) -> None:
    with tempfile.TemporaryDirectory() as dump, h.progress("sizes with a bound, in another process"):
        flags = {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"}
        with Child(bounded, width, rows, dump, env={**EXPERIMENTS, **flags}) as child:
            told = child.result()
    x, got = torch.tensor(told["x"]), [torch.tensor(each) for each in told["got"]]
    h.check(
        lambda *_: tuple(got), reference_of(mlp(width)), *(x[:n] for n in rows),
        what=f"at most {LARGEST} rows: {', '.join(map(str, rows))}", terms=4 * width, poison=False,
    )  # fmt: skip
    first, *later = told["calls"]
    h.fact(
        f"an MLP on at most {LARGEST} rows",
        {
            "shape": told["shape"],
            "compiles, first size": first["compiles"],
            "compiles, other sizes": sum(call["compiles"] for call in later),
            "executions a call": first["executions"],
            "products in the optimized HLO": ", ".join(told["products"]),
        },
    )
    computed = set(re.findall(r"\[([^,\]]+),", " ".join(told["products"])))
    if computed == {str(LARGEST)}:
        h.say(f"the bound is what is computed: {LARGEST} rows whatever the size, as with padding; the mask is XLA's")
    rows_of = {name: {"rows whose number has a bound": said} for name, said in told["outcomes"].items()}
    h.table(f"at most {LARGEST} rows, by operation", rows_of)
