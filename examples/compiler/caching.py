"""Caching: what a second process need not compile again, and what makes it compile anew.

Compiled code is kept on disk in two layers, both in TORCHINDUCTOR_CACHE_DIR: AOTAutogradCache holds a whole compiled
function, FxGraphCache the code of one graph. (Triton keeps its own in TRITON_CACHE_DIR.) The key is the graph with its
shapes, dtypes and constants, the compiler's settings and versions, not the source text.
torch.compiler.save_cache_artifacts() packs what a process compiled into bytes, for a machine without such a folder.

Each row is a process of its own: cold, on the warm folder, with the bytes and an empty folder. On a CPU the quick run
sets TORCHINDUCTOR_VEC_ISA_OK=1, which spares each empty folder the search for the vector instructions that g++ and the
CPU share: seconds that have nothing to do with this graph. --full leaves it in.

Question   How long does a process wait that another one has compiled for, and what keeps it from finding that?
Needs      torch
Wins when  processes start often: deployment, CI, many ranks. Importing the compiler and tracing the function no cache
           shortens, so a warm start is never 0 s.
Variants   caching_key.py (what the caches answer when one thing is changed)
Study      studies/compiler/caching.py (which variable keeps what, and the faults of folders and compilers)
Source     chapter sections on compilation time and on caching; the study tries their TORCH_COMPILE_CACHE_DIR.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness, run
from harness.process import Child, report

import torch

from compile_inspect import watch
from examples.common.shown import require
from examples.compiler.caching_key import CACHES, changes, found

WIDTH, HIDDEN = 64, 256
TIMEOUT_S = 240  # for a process; a second compiler on a busy machine can take a minute


def network(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """What is compiled: residual layers, which share the few kernels that the compiler makes for them."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + torch.nn.functional.gelu(x @ up) @ down
    return x


def reference(*tensors: torch.Tensor) -> torch.Tensor:
    return network(*(t.double() for t in tensors))


def child_compile(inputs: str, out: str | None = None, save: str | None = None, load: str | None = None) -> None:
    """Compile the network and run it once; say how long that took and what the caches answered."""
    started = time.perf_counter()
    import torch._dynamo
    import torch._inductor.compile_fx  # what a first torch.compile imports, timed by itself

    result = {"imports s": round(time.perf_counter() - started, 2)}
    x, *weights = torch.load(inputs, map_location="cuda" if torch.cuda.is_available() else "cpu")
    if load:
        started = time.perf_counter()
        torch.compiler.load_cache_artifacts(Path(load).read_bytes())
        result["load s"] = round(time.perf_counter() - started, 2)
    with torch.no_grad(), watch() as seen:
        y = torch.compile(network, dynamic=False)(x, *weights).cpu()
    result |= {"first call s": round(seen.seconds, 2), "found": found(seen)}
    if out:
        torch.save(y, out)
    if save:
        data, info = torch.compiler.save_cache_artifacts()
        Path(save).write_bytes(data)
        result["saved"] = {kind: len(keys) for kind, keys in info.artifacts.items()}
    report(**result)


def switches(h: Harness, folder: Path, name: str) -> dict[str, str]:
    """The environment of a process whose caches are called `name`."""
    quick = h.device.type == "cpu" and not h.full
    return ({"TORCHINDUCTOR_VEC_ISA_OK": "1"} if quick else {}) | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / name),
        "TRITON_CACHE_DIR": str(folder / f"{name}-triton"),
    }


def timed(h: Harness, folder: Path, tensors: list[torch.Tensor]) -> dict[str, dict]:
    """The processes whose times are reported, one after the other; each output is held to float64."""
    rows = {}
    torch.save(tensors, folder / "inputs")
    for name, cache, save, load in (
        ("cold", "cache", "artifacts", None),
        ("warm folder", "cache", None, None),
        ("mega-cache", "other-machine", None, "artifacts"),
    ):
        arguments = ("inputs", "out", save, load)
        arguments = [str(folder / file) if file else None for file in arguments]
        environment = switches(h, folder, cache)
        with h.progress(name), Child(child_compile, *arguments, env=environment, timeout=TIMEOUT_S) as child:
            rows[name] = child.result()
        rows[name]["process s"] = round(child.seconds, 2)
        y = torch.load(folder / "out").to(h.device)
        terms = len(tensors) * HIDDEN
        h.check(lambda *_, y=y: y, reference, *tensors, what=f"{name}: its output", terms=terms, poison=False)
        wanted = dict.fromkeys(CACHES, "miss" if name == "cold" else "hit")
        require(rows[name]["found"] == wanted, f"{name}: {rows[name]['found']}")
    return rows


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
        rows = timed(h, Path(folder), inputs_of(h))
    times = ("imports s", "load s", "first call s", "process s")
    h.table("processes", {n: {t: row.get(t, 0.0) for t in times} | row["found"] for n, row in rows.items()})
    with h.progress("what changes the key"):
        changed = changes(h.randn(16, WIDTH), h.randn(WIDTH, HIDDEN), h.randn(HIDDEN))
    h.table("what was changed, and what the caches answered", changed)
    cold, warm, mega = (row["first call s"] for row in rows.values())
    anew = [name for name, caches in changed.items() if caches["FX graph"] == "miss"][1:]
    h.answer(
        lambda: (
            f"The first call takes {warm} s on a warm folder, {mega} s with the bytes, {cold} s cold, each after "
            f"{rows['warm folder']['imports s']} s of imports. Compiled anew for: {', '.join(anew)}."
        ),
        timed=False,
    )


if __name__ == "__main__":
    run(demo)
