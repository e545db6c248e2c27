"""caching, shown: which variable keeps what, what the bytes hold, and the faults of folders and compilers.

Each row is a process of its own with its own environment; a switch that does not do what it is said to fails the run.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness
from harness.process import Child, report

import torch

from compile_inspect import watch
from examples.common.shown import require
from examples.compiler.caching import TIMEOUT_S, child_compile, inputs_of, switches, timed
from examples.compiler.caching_key import CACHES, found, product

NOT_A_VARIABLE = "TORCH_COMPILE_CACHE_DIR"  # what the chapter says keeps compiled code


def study(h: Harness) -> None:
    if h.profile:
        return
    with TemporaryDirectory(prefix="caching-", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder = Path(name)
        rows, results = timed(h, folder, inputs_of(h)), {}
        built = {name: machine_code(folder, cache) for name, cache in (("cold", "cache"), ("mega", "other-machine"))}
        for name, child in start_others(h, folder, stack).items():
            with h.progress(name):
                results[name] = child.result()
        built["caches off"] = machine_code(folder, "cache") - built["cold"]
        the_bytes(h, folder, rows, built)
        variables(h, folder, results, built)
        faults(h, folder, results)


def machine_code(folder: Path, cache: str) -> set[Path]:
    """Shared libraries of CPU kernels, and Triton's cubins (one for each configuration tried), in these caches."""
    kinds = ("*.main.so", "*.cubin")
    return {path for each in (cache, f"{cache}-triton") for kind in kinds for path in (folder / each).rglob(kind)}


# --- processes


def child_product(inputs: str) -> None:
    """A small function alone: enough to ask whether anything was kept."""
    x, w, *_ = torch.load(inputs, map_location="cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad(), watch() as seen:
        torch.compile(product, dynamic=False)(x, w, w[0])
    report(found=found(seen))


def child_waves(good: str) -> None:
    """A kernel of its own, compiled twice; before the second time the cache folder is a good one."""
    x, calls = torch.linspace(0, 1, 64, device="cuda" if torch.cuda.is_available() else "cpu"), []
    for _ in range(2):
        try:
            torch.compile(lambda x: x.sin() + x.cos())(x)
            calls.append(None)
        except Exception as error:
            calls.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = good
    report(calls=calls)


def start_others(h: Harness, folder: Path, stack: ExitStack) -> dict[str, Child]:
    """The processes whose answers count and not their times, all at once."""
    inputs, good, cache = str(folder / "inputs"), str(folder / "later"), switches(h, folder, "cache")
    for made in ("tmp", "kept"):
        (folder / made).mkdir()
    (folder / "file").touch()  # below a file there can be no folder, not even for root, whom no permission stops
    nobody = str(folder / "no-such-compiler")
    lacking = {"CXX": nobody, "CC": nobody, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # a worker would keep the bad CC
    only = {"TORCHINDUCTOR_CACHE_DIR": None, NOT_A_VARIABLE: str(folder / "kept"), "TMPDIR": str(folder / "tmp")}
    children = {
        NOT_A_VARIABLE: (child_product, inputs, cache | only),
        "caches off": (child_compile, inputs, cache | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}),
        "FX graph cache off": (child_product, inputs, cache | {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}),
        "no folder": (child_waves, good, switches(h, folder, "file/cache") | {"TRITON_CACHE_DIR": f"{folder}/unused"}),
        "no compiler": (child_waves, good, switches(h, folder, "empty") | lacking),
    }
    return {
        name: stack.enter_context(Child(fn, argument, env=env, timeout=TIMEOUT_S))
        for name, (fn, argument, env) in children.items()
    }


# --- what follows


def the_bytes(h: Harness, folder: Path, rows: dict, built: dict) -> None:
    """What save_cache_artifacts() packs: graphs, and on a GPU machine code."""
    gpu, data = h.device.type == "cuda", (folder / "artifacts").read_bytes()
    images = data.count(b"\x7fELF")  # what shared libraries and a GPU's cubins both begin with
    # What came out of the bytes was written to the folder, too, and not built.
    again = sum(path.read_bytes() not in data for path in built["mega"])
    kind = "cubins built" if gpu else "C++ libraries built"
    h.fact(kind, {"cold": len(built["cold"]), "mega-cache": again, "caches off": len(built["caches off"])})
    h.fact("mega-cache", {"bytes": len(data), **rows["cold"]["saved"], "images of machine code": images})
    require(gpu or images == 0, f"on a CPU the bytes hold {images} images of machine code")
    require(gpu or again == len(built["cold"]), f"g++ built {again} libraries for {len(built['cold'])}")


def files_in(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def variables(h: Harness, folder: Path, results: dict, built: dict) -> None:
    """What each variable keeps, or switches off."""
    silent = dict.fromkeys(CACHES, "not asked")
    asked = results[NOT_A_VARIABLE]["found"]
    kept, default = files_in(folder / "kept"), files_in(folder / "tmp")
    require(kept == 0 and set(asked.values()) == {"miss"}, f"{NOT_A_VARIABLE} kept {kept} files: {asked}")
    require(default > 0, "without TORCHINDUCTOR_CACHE_DIR nothing was kept in the temporary folder either")
    for name, switch in (("caches off", "FORCE_DISABLE_CACHES=1"), ("FX graph cache off", "FX_GRAPH_CACHE=0")):
        require(results[name]["found"] == silent, f"TORCHINDUCTOR_{switch}: {results[name]['found']}")
    require(len(built["caches off"]) == len(built["cold"]), f"FORCE_DISABLE_CACHES=1: {built['caches off']} built")
    h.fact(
        "variables",
        {
            "TORCHINDUCTOR_CACHE_DIR": f"{files_in(folder / 'cache')} files; the next process finds them",
            "TRITON_CACHE_DIR": f"{files_in(folder / 'cache-triton')} files, none on a CPU",
            NOT_A_VARIABLE: f"{kept} files: torch {torch.__version__} knows no such variable",
            "no TORCHINDUCTOR_CACHE_DIR": f"{default} files in the temporary folder, which a container loses",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1": "nothing asked on the warm folder, everything built",
            "TORCHINDUCTOR_FX_GRAPH_CACHE=0": "neither cache asked",
        },
    )


def faults(h: Harness, folder: Path, results: dict) -> None:
    """What torch says of a cache folder that cannot be, and without a compiler; and after the folder is mended."""
    said = {name: [call and call.replace(str(folder), "...") for call in results[name]["calls"]]
            for name in ("no folder", "no compiler")}  # fmt: skip
    require(said["no folder"][0] is not None, "a cache folder below a file was taken")
    require(said["no compiler"][0] is not None or h.device.type == "cuda", "C++ was compiled without a compiler")
    h.fact("a cache folder that cannot be", said["no folder"][0])
    h.fact("the same process, with a good folder, too late", said["no folder"][1] or "compiles")
    h.fact("no compiler", said["no compiler"][0] or "compiled all the same: nothing needed the host's compiler")
