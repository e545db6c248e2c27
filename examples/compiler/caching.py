"""Caching: what a second process need not compile again, and what makes it compile anew.

Compiled code is kept on disk in two layers, both in TORCHINDUCTOR_CACHE_DIR: AOTAutogradCache holds how a graph is
called, FxGraphCache its code. (Triton's cache is there too, unless TRITON_CACHE_DIR names another folder.) The key is
the graph with its shapes, dtypes, constants and (in AOTAutogradCache) names, plus the compiler's settings and versions,
but not the source. torch.compiler.save_cache_artifacts() packs what a process compiled into bytes, for other machines.

Each row is a process of its own: cold, with the warm folder, or with the bytes and an empty folder (mega-cache). All
start together; each first call, and the imports of one, are timed while the others wait. On a CPU the quick run sets
TORCHINDUCTOR_VEC_ISA_OK=1, which skips g++'s search for vector instructions in each empty folder. --full does not.

Question   How long does a process wait that another one has compiled for, and what keeps it from finding that?
Needs      torch
Wins when  processes start often: deployment, CI, many ranks. Imports and tracing remain, despite the chapter's "+0s".
Variants   caching_key.py (what the caches answer when one thing is changed)
Study      studies/compiler/caching.py (the chapter's TORCH_COMPILE_CACHE_DIR, which is no variable of torch's)
Source     chapter sections "Compilation Overhead" and "Pitfall 4: Not Caching Compiled Code".
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness, run
from harness.process import Child, report

import torch

from compile_inspect import watch
from examples.common.shown import require
from examples.compiler.caching_key import CACHES, changes, found

WIDTH, HIDDEN = 64, 256
IMPORTS_TIMED = "warm folder"
TIMEOUT_S = 240  # for a process; a second compiler on a busy machine can take a minute


def network(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """What is compiled: residual layers, which share the few kernels that the compiler makes for them."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + torch.nn.functional.gelu(x @ up) @ down
    return x


def reference(*tensors: torch.Tensor) -> torch.Tensor:
    return network(*(t.double() for t in tensors))


def import_compiler() -> dict[str, float]:
    """The imports of a first torch.compile, alone: no cache changes them, so timing them in one process is enough."""
    started = time.perf_counter()
    import_module("torch._inductor.compile_fx")
    return {"imports s": round(time.perf_counter() - started, 2)}


def child_compile(inputs: str, out: str, save: str | None, load: str | None) -> None:
    """Wait for this process' turn, compile the network, run it once; report the time and the caches' answers."""
    x, *weights = torch.load(inputs, map_location="cuda" if torch.cuda.is_available() else "cpu")
    timed_imports = Path(out).name == IMPORTS_TIMED
    if not timed_imports:
        import_compiler()
    Path(f"{out}.ready").touch()
    deadline = time.monotonic() + TIMEOUT_S
    while not Path(f"{out}.turn").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    result = import_compiler() if timed_imports else {}
    if load:
        started = time.perf_counter()
        torch.compiler.load_cache_artifacts(Path(load).read_bytes())
        result["load s"] = round(time.perf_counter() - started, 2)
    with torch.no_grad(), watch() as seen:
        y = torch.compile(network, dynamic=False)(x, *weights).cpu()
    torch.save(y, out)
    if save:
        Path(save).write_bytes(torch.compiler.save_cache_artifacts()[0])
    report(**result, **{"first call s": round(seen.seconds, 2), "found": found(seen)})


def switches(h: Harness, folder: Path, name: str) -> dict[str, str]:
    """The environment of a process whose caches are called `name`."""
    quick = h.device.type == "cpu" and not h.full
    return ({"TORCHINDUCTOR_VEC_ISA_OK": "1"} if quick else {}) | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / name),
        "TRITON_CACHE_DIR": str(folder / f"{name}-triton"),
    }


def timed(h: Harness, folder: Path, tensors: list[torch.Tensor]) -> tuple[dict[str, dict], dict[str, dict]]:
    """(the processes, what changes the key): each is timed by itself; the key is asked for while they start."""
    rows, children = {}, {}
    torch.save(tensors, folder / "inputs")
    with ExitStack() as stack:
        for name, cache, save, load in (
            ("cold", "cache", "artifacts", None),
            ("warm folder", "cache", None, None),
            ("mega-cache", "other-machine", None, "artifacts"),
        ):
            arguments = [str(folder / file) if file else None for file in ("inputs", name, save, load)]
            child = Child(child_compile, *arguments, env=switches(h, folder, cache), timeout=TIMEOUT_S)
            children[name] = stack.enter_context(child)
        with h.progress("what changes the key"):
            changed = changes(h.randn(16, WIDTH), h.randn(WIDTH, HIDDEN), h.randn(HIDDEN))
        for name, child in children.items():
            while not (folder / f"{name}.ready").exists() and child.process.poll() is None:
                time.sleep(0.02)
        for name, child in children.items():
            (folder / f"{name}.turn").touch()
            with h.progress(name):
                rows[name] = child.result()
            y, terms = torch.load(folder / name).to(h.device), len(tensors) * HIDDEN
            h.check(lambda *_, y=y: y, reference, *tensors, what=f"{name}: its output", terms=terms, poison=False)
            wanted = dict.fromkeys(CACHES, "miss" if name == "cold" else "hit")
            require(rows[name]["found"] == wanted, f"{name}: {rows[name]['found']}")
    return rows, changed


def inputs_of(h: Harness) -> list[torch.Tensor]:
    gpu = h.device.type == "cuda"
    tensors = [h.randn(64, WIDTH)]
    for _ in range(h.pick(quick=4, full=16) if gpu else h.pick(quick=1, full=4)):
        tensors += [h.randn(WIDTH, HIDDEN, scale=WIDTH**-0.5), h.randn(HIDDEN, WIDTH, scale=HIDDEN**-0.5)]
    return tensors


def demo(h: Harness) -> None:
    if h.profile:
        h.say("nothing to profile: what is shown happens before the first kernel runs")
        return
    with TemporaryDirectory(prefix="caching-", ignore_cleanup_errors=True) as folder:
        rows, changed = timed(h, Path(folder), inputs_of(h))
    times = ("imports s", "load s", "first call s")
    h.table("processes", {n: {t: row.get(t, "") for t in times} | row["found"] for n, row in rows.items()})
    h.table("what was changed, and what the caches answered", changed)
    cold, warm, mega = (row["first call s"] for row in rows.values())
    anew = [name for name, caches in changed.items() if caches["FX graph"] == "miss"][1:]
    h.answer(
        lambda: (
            f"The first call takes {warm} s with a warm cache folder, {mega} s from saved artifacts, {cold} s cold, "
            f"after {rows[IMPORTS_TIMED]['imports s']} s of imports. Compiled anew for: {', '.join(anew)}."
        ),
        timed=False,
    )


if __name__ == "__main__":
    run(demo)
