"""static_shapes, measured: sizes with a bound and without one, and programs kept on disk.

Switches of the environment turn these on, hence the processes.
"""

from __future__ import annotations

import copy
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import Harness
from harness.process import Child, report

import torch
import torch_xla
from torch import nn

from examples.common import xla
from examples.xla.static_shapes import LARGEST, mlp, reference_of

EXPERIMENTS = {"XLA_EXPERIMENTAL": "nonzero", "EXPERIMENTAL_XLA_UNBOUNDED_DYNAMISM": "1"}


def study(h: Harness) -> None:
    if h.profile:
        return
    bounds(h, width=56, rows=(3, 1, 33, LARGEST))
    if h.full:  # two more processes
        persistent_cache(h, width=94)
    xla.settle()


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

    def timed(fn: Callable) -> float:
        seconds = []
        for _ in range(15):
            started = time.perf_counter()
            fn().cpu()
            seconds.append(time.perf_counter() - started)
        return round(1000 * statistics.median(seconds), 3)

    first = masks[rows[0]]
    ms = {"bounded": timed(lambda: model(real_rows(padded, first))), "padded": timed(lambda: model(padded))}
    several = {n: mask for n, mask in masks.items() if n > 1}  # batch norm refuses a single row, bound or not
    outcomes = {name: outcome(fn, x, several) for name, fn in attempts(width).items()}
    outcomes["export with a dynamic batch"], text = exported(width)
    report(
        calls=calls, shape=shapes[0], products=products, ms=ms, outcomes=outcomes, signature=text,
        got=[out.tolist() for out in got.values()], x=x.tolist(), marked=marked(x),
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


def exported(width: int) -> tuple[str, str]:
    """torch.export with a dynamic batch to StableHLO, and a run of it: (outcome, the signature of its main)."""
    from torch_xla.stablehlo import exported_program_to_stablehlo

    program = torch.export.export(
        nn.Linear(width, width), (torch.randn(5, width),), dynamic_shapes=({0: torch.export.Dim("rows", max=LARGEST)},)
    )
    module = exported_program_to_stablehlo(program)
    signature = next(line.strip() for line in module.get_stablehlo_text().splitlines() if "@main" in line)
    try:
        module(torch.randn(6, width).to(xla.device()))
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if "error:" in line] or str(error).splitlines()
        return f"exported; run: {type(error).__name__}: {lines[0].split('): ')[-1][:200]}", signature
    return "exported and run", signature


def marked(x: torch.Tensor) -> str:
    """torch_xla's own mark for a dynamic dimension: what the exporter uses, tried on a lazy tensor."""
    on_xla = x.to(xla.device())
    xla.settle()
    xla.mark_dynamic(on_xla, 0)
    try:
        (on_xla * 2).cpu()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return "right"


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
    if h.timing:
        h.say(
            f"a call with {rows[0]} rows: {told['ms']['bounded']} ms with a bound, {told['ms']['padded']} ms padded: "
            f"{first['executions'] - 1} of its {first['executions']} programs only ask for the size"
        )
    rows_of = {name: {"rows whose number has a bound": said} for name, said in told["outcomes"].items()}
    h.table(f"at most {LARGEST} rows, by operation", rows_of)
    h.fact("no bound", {"exported main": told["signature"], "mark on a lazy tensor": told["marked"]})


# --- programs kept on disk


def persistent(path: str, width: int) -> None:
    """Run in a process of its own: compile a small model with a persistent cache in `path`."""
    torch.set_grad_enabled(False)
    torch_xla.runtime.initialize_cache(path)
    model = mlp(width).to(xla.device())
    x = torch.ones(5, width).to(xla.device())
    with xla.watch() as ran:
        out = model(x).cpu()
    files = [file.stat().st_size for file in Path(path).iterdir()]
    report(compiles=ran.compiles, files=len(files), bytes=sum(files), total=out.sum().item(), cache=xla.persistent())


def persistent_cache(h: Harness, width: int) -> None:
    """initialize_cache, in a process that finds it empty and in one that finds it filled."""
    told = {}
    with tempfile.TemporaryDirectory() as path, h.progress("a persistent cache, in two processes"):
        for name in ("cold", "warm"):
            with Child(persistent, path, width) as child:
                told[name] = child.result()
                lines = [line.split("] ")[-1] for line in child.output().splitlines() if "deserialize" in line]
            cache = ", ".join(f"{event} {count}" for event, count in told[name]["cache"].items())
            told[name] = {"compiles": told[name]["compiles"], "files": told[name]["files"], "counted": cache}
            if lines:
                told[name]["logged"] = lines[0]
    h.fact("torch_xla.runtime.initialize_cache", told)
    if told["warm"]["compiles"]:
        h.say("what was written could not be used: on this device a cache on disk saves no compilation")
