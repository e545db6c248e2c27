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
Study      studies/compiler/caching.py (which variable keeps what, and the faults of folders and compilers)
Source     chapter sections on compilation time and on caching; the study tries their TORCH_COMPILE_CACHE_DIR.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness, run
from harness.process import Child, report

import torch

from compile_inspect import Compiled, fresh_compiler, watch
from examples.common.determinism import deterministic

WIDTH, HIDDEN = 64, 256
TIMEOUT_S = 240  # for a process; a second compiler on a busy machine can take a minute
NOT_A_VARIABLE = "TORCH_COMPILE_CACHE_DIR"  # what the chapter says keeps compiled code
CACHES = {"AOTAutograd": ("aot_autograd", "autograd_cache"), "FX graph": ("inductor", "fxgraph_cache")}


def network(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """What is compiled: residual layers, which share the few kernels that the compiler makes for them."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + torch.nn.functional.gelu(x @ up) @ down
    return x


def reference(*tensors: torch.Tensor) -> torch.Tensor:
    return network(*(t.double() for t in tensors))


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A graph for which nothing is generated: one call of the library. It is cached like any other, in no time."""
    return torch.addmm(bias, x, w, alpha=2.0)


def found(seen: Compiled) -> dict[str, str]:
    """What each cache answered within: "hit", "miss", or "not asked"."""
    said = {}
    for name, (group, prefix) in CACHES.items():
        counts = {answer: seen.counters.get(group, {}).get(f"{prefix}_{answer}", 0) for answer in ("hit", "miss")}
        said[name] = " and ".join(answer for answer, count in counts.items() if count) or "not asked"
    return said


class NotShown(AssertionError):
    """A process did not do what its switch is said to do."""


class CannotCompile(RuntimeError):
    """torch.compile does not work on this machine; the message says what to do."""


def require(shown: bool, otherwise: str) -> None:
    if not shown:
        raise NotShown(otherwise)


# --- a process


def child_compile(inputs: str, out: str | None, save: str | None = None, load: str | None = None) -> None:
    """Compile both functions and run them once; say what the caches answered, and what was built."""
    started = time.perf_counter()
    import torch._dynamo
    import torch._inductor.compile_fx  # what a first torch.compile imports, timed by itself

    result = {"imports s": round(time.perf_counter() - started, 2)}
    x, *weights = torch.load(inputs, map_location="cuda" if torch.cuda.is_available() else "cpu")
    saved = Path(load).read_bytes() if load else b""
    if load:
        started = time.perf_counter()
        torch.compiler.load_cache_artifacts(saved)
        result["load s"] = round(time.perf_counter() - started, 2)
    before = machine_code()
    try:
        with torch.no_grad(), watch() as seen:
            y = torch.compile(network, dynamic=False)(x, *weights).cpu()
        with torch.no_grad(), watch() as second:
            torch.compile(product, dynamic=False)(x, weights[0], weights[0][0])
    except Exception as error:
        report(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        return
    result |= {"first call s": round(seen.seconds, 2), "network": found(seen), "product": found(second)}
    # What came out of the saved bytes was written to the folder, too, and not built.
    result["built"] = sum(path.read_bytes() not in saved for path in machine_code() - before)
    if out:
        torch.save(y, out)
    if save:
        data, info = torch.compiler.save_cache_artifacts()
        Path(save).write_bytes(data)
        result["saved"] = {kind: len(keys) for kind, keys in info.artifacts.items()}
    report(**result)


def machine_code() -> set[Path]:
    """Shared libraries of CPU kernels, and Triton's cubins (one for each configuration tried), in the caches."""
    folders = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    kinds = ("*.main.so", "*.cubin")
    return {path for folder in folders if folder for kind in kinds for path in Path(folder).rglob(kind)}


def usable(name: str, row: dict) -> dict:
    """What a process reported. Raises CannotCompile, with what to install, for one that could not compile."""
    if error := row.get("error"):
        fix = "; install a C++ compiler (apt-get install g++), or set CXX to one that exists" * ("ompiler" in error)
        raise CannotCompile(f"{name}: {error}{fix}")
    return row


def switches(folder: Path, name: str, quick: bool) -> dict[str, str]:
    """The environment of a process whose caches are called `name`."""
    return ({"TORCHINDUCTOR_VEC_ISA_OK": "1"} if quick else {}) | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / name),
        "TRITON_CACHE_DIR": str(folder / f"{name}-triton"),
        NOT_A_VARIABLE: str(folder / "kept"),
    }


def timed(h: Harness, folder: Path, tensors: list[torch.Tensor]) -> dict[str, dict]:
    """The processes whose times are reported, one after the other; each output is held to float64."""
    (folder / "kept").mkdir()
    quick, rows = h.device.type == "cpu" and not h.full, {}
    for name, cache, save, load in (
        ("cold", "cache", "artifacts", None),
        ("warm folder", "cache", None, None),
        ("mega-cache", "other-machine", None, "artifacts"),
    ):
        save, load = (str(folder / file) if file else None for file in (save, load))
        arguments = str(folder / "inputs"), str(folder / "out"), save, load
        with (
            h.progress(name),
            Child(child_compile, *arguments, env=switches(folder, cache, quick), timeout=TIMEOUT_S) as child,
        ):
            row = rows[name] = usable(name, child.result())
        row["process s"] = round(child.seconds, 2)
        y = torch.load(folder / "out").to(h.device)
        terms = len(tensors) * HIDDEN
        h.check(lambda *_, y=y: y, reference, *tensors, what=f"{name}: its output", terms=terms, poison=False)
    return rows


EXPECTED = {"nothing": "hit", "values of the weights": "hit"}
EXPECTED |= dict.fromkeys(("what fills them", "a constant", "a shape", "a dtype", "a setting of Inductor"), "miss")


def renamed(rows: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    # product() with a comment and other names
    doubled = torch.addmm(offset, rows, weight, alpha=2.0)
    return doubled


def tripled(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, w, alpha=3.0)


def changes(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> dict[str, dict[str, str]]:
    """What the caches answer when one thing differs from what is in them; in this process, its graphs forgotten."""
    said = {}
    with fresh_compiler(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TF32 is off, that a call is not deterministic
        inductor, autograd = torch._inductor.config, torch._functorch.config
        cases: dict[str, tuple[Callable, tuple, AbstractContextManager]] = {
            "what fills them": (product, (x, w, bias), nullcontext()),
            "nothing": (product, (x, w, bias), nullcontext()),
            "values of the weights": (product, (x, 2 * w, bias), nullcontext()),
            "names, a comment": (renamed, (x, w, bias), nullcontext()),
            "a constant": (tripled, (x, w, bias), nullcontext()),
            "a shape": (product, (x[:8], w, bias), nullcontext()),
            "a dtype": (product, tuple(t.double() for t in (x, w, bias)), nullcontext()),
            "requires_grad": (product, (x, w.clone().requires_grad_(), bias), nullcontext()),
            "a setting of Inductor": (product, (x, w, bias), inductor.patch(max_fusion_size=32)),
            "deterministic algorithms": (product, (x, w, bias), deterministic(warn_only=True)),  # cuBLAS would refuse
            "enable_autograd_cache=False": (product, (x, w, bias), autograd.patch(enable_autograd_cache=False)),
            "fx_graph_cache=False": (product, (x, w, bias), inductor.patch(fx_graph_cache=False)),
        }
        for name, (fn, inputs, setting) in cases.items():
            torch.compiler.reset()
            with setting, watch() as seen:
                torch.compile(fn, dynamic=False)(*inputs)
            said[name] = found(seen)
    return said


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
    tensors, rows = inputs_of(h), {}
    with TemporaryDirectory(prefix="caching-", ignore_cleanup_errors=True) as folder:
        torch.save(tensors, Path(folder) / "inputs")
        rows = timed(h, Path(folder), tensors)
    hit, miss = dict.fromkeys(CACHES, "hit"), dict.fromkeys(CACHES, "miss")
    for (name, row), wanted in zip(rows.items(), (miss, hit, hit), strict=True):
        require(row["network"] == row["product"] == wanted, f"{name}: {row['network']}, {row['product']}")
    times = ("imports s", "load s", "first call s", "process s")
    h.table("processes", {n: {t: row.get(t, 0.0) for t in times} | row["network"] for n, row in rows.items()})
    with h.progress("what changes the key"):
        changed = changes(h.randn(16, WIDTH), h.randn(WIDTH, HIDDEN), h.randn(HIDDEN))
    for name, wanted in EXPECTED.items():
        require(changed[name] == dict.fromkeys(CACHES, wanted), f"changing {name}: {changed[name]}")
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
