"""caching, shown: which variable keeps what, what the bytes hold, and the faults of folders and compilers.

Each row is a process of its own with its own environment; a switch that does not do what it is said to fails the run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness
from harness.process import Child, report

import torch

from compile_inspect import watch
from examples.compiler.caching import (
    CACHES,
    NOT_A_VARIABLE,
    TIMEOUT_S,
    child_compile,
    found,
    inputs_of,
    product,
    require,
    switches,
    timed,
    usable,
)  # fmt: skip


def study(h: Harness) -> None:
    if h.profile:
        return
    with TemporaryDirectory(prefix="caching-", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder, tensors = Path(name), inputs_of(h)
        torch.save(tensors, folder / "inputs")
        rows = timed(h, folder, tensors)
        others = start_others(h, folder, stack)
        results = {}
        for name, child in others.items():
            with h.progress(name):
                results[name] = child.result()
        the_bytes(h, folder, rows)
        variables(h, folder, rows, results)
        faults(h, folder, results["no folder"], results["no compiler"])


def usable_folder(folder: str | os.PathLike) -> Path:
    """The folder, made if it is not there, once a file could be written in it.

    Raises TypeError for what is no path, and an OSError, of the kind that the system gave, where it cannot write.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"usable_folder: got {folder!r}; pass the path of a folder, as in TORCHINDUCTOR_CACHE_DIR")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise type(error)(
            f"usable_folder: cannot write in {folder} ({error.strerror}); before the first torch.compile, set "
            "TORCHINDUCTOR_CACHE_DIR to a folder that this user may write"
        ) from None
    return Path(folder)


def advice(error: BaseException) -> str | None:
    """What to do about an error that torch.compile raised, if it is one of those this file shows."""
    text = f"{type(error).__name__}: {error}"
    named = [os.environ[name] for name in ("CC", "CXX") if os.environ.get(name)]
    if any(words in text for words in ("C++ compiler", "C compiler", "Compiler:", *named)):
        which = "CC (for Triton's launcher)" if "C++" not in text and torch.cuda.is_available() else "CXX"
        return f"install a C++ compiler (apt-get install g++), or set {which} to one that exists"
    if isinstance(error, OSError) or any(kind in text for kind in ("PermissionError", "NotADirectory", "Read-only")):
        return "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written, and start the process again"
    if "already registered" in text:
        return "an import of the compiler failed before, in this process: start it again"
    return None


def described(error: BaseException) -> dict:
    return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}", "advice": advice(error)}


# --- processes


def child_product(inputs: str) -> None:
    """The small function alone: enough to ask whether anything was kept."""
    x, w, *_ = torch.load(inputs, map_location="cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad(), watch() as seen:
        torch.compile(product, dynamic=False)(x, w, w[0])
    report(product=found(seen))


def child_folder(good: str) -> None:
    """torch.compile with a cache folder that cannot be, and then again, in the same process, with a good one."""
    x, calls = torch.ones(4, 4), []
    for _ in range(2):
        try:
            torch.compile(product)(x, x, x)
            calls.append({"error": None, "advice": None})
        except Exception as error:
            calls.append(described(error))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = good
    report(calls=calls)


def child_repaired(good: str) -> None:
    """A cache folder that cannot be and no compiler: both mended in this process, each before it was needed again."""
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    try:
        usable_folder(folder)
        refusal = None
    except OSError as error:
        refusal = str(error)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(usable_folder(good))
    x = torch.linspace(0, 1, 64, device="cuda" if torch.cuda.is_available() else "cpu")

    def waves(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x.cos()

    try:
        torch.compile(waves)(x)
        missing = None
    except Exception as error:
        missing = described(error)
    os.environ["CC"] = shutil.which("gcc") or shutil.which("clang") or "cc"
    torch.compiler.reset()
    compiler = shutil.which("g++") or shutil.which("clang++") or "g++"
    # g++ precompiles headers for each set of its options, in more time than this one kernel would save by them.
    mended = {"cpp.cxx": (None, compiler), "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(mended), watch() as seen:
        y = torch.compile(waves)(x)
    off = (y.double() - waves(x.double())).abs().max().item()
    report(refusal=refusal, missing=missing, off=off, answers=found(seen))


def start_others(h: Harness, folder: Path, stack: ExitStack) -> dict[str, Child]:
    """The processes whose answers count and not their times, all at once."""
    quick = h.device.type == "cpu" and not h.full
    inputs, cache = str(folder / "inputs"), switches(folder, "cache", quick)
    (folder / "file").touch()
    (folder / "tmp").mkdir()
    # Below a file there can be no folder, not even for root, whom no permission stops.
    impossible = switches(folder, "file/cache", quick) | {"TRITON_CACHE_DIR": str(folder / "empty-triton")}
    nobody = str(folder / "no-such-compiler")
    lacking = {"CXX": nobody, "CC": nobody, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # a worker would keep the bad CC
    default = cache | {"TORCHINDUCTOR_CACHE_DIR": None}
    children = {
        NOT_A_VARIABLE: (child_product, (inputs,), default | {"TMPDIR": str(folder / "tmp")}),
        "caches off": (child_compile, (inputs, None), cache | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}),
        "no folder": (child_folder, (str(folder / "later"),), impossible),
        "no compiler": (
            child_repaired, (str(folder / "repaired"),),
            impossible | {**lacking, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"},
        ),
    }  # fmt: skip
    if h.full:
        children["AOTAutogradCache off"] = child_compile, (inputs, None), cache | {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    return {
        name: stack.enter_context(Child(fn, *args, env=env, timeout=TIMEOUT_S))
        for name, (fn, args, env) in children.items()
    }


# --- what follows


def the_bytes(h: Harness, folder: Path, rows: dict) -> None:
    """What save_cache_artifacts() packs: graphs, and on a GPU machine code."""
    gpu = h.device.type == "cuda"
    cold, _, mega = rows.values()
    built = "cubins built" if gpu else "C++ libraries built"
    data = (folder / "artifacts").read_bytes()
    images = data.count(b"\x7fELF")  # what shared libraries and a GPU's cubins both begin with
    h.fact(built, {name: row["built"] for name, row in rows.items()})
    h.fact("mega-cache", {"bytes": len(data), **cold["saved"], "images of machine code": images})
    h.say(
        f"mega-cache: {len(data):,} bytes hold the graphs and {images} images of machine code; in an empty folder both "
        f"caches hit, {mega['built']} of {cold['built']} {built} again"
    )
    require(gpu or images == 0, f"on a CPU the bytes hold {images} images of machine code")
    require(gpu or mega["built"] == cold["built"], f"g++ built {mega['built']} libraries for {cold['built']}")


def files_in(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def variables(h: Harness, folder: Path, rows: dict, results: dict) -> None:
    """What each variable keeps, or switches off."""
    gpu, miss = h.device.type == "cuda", dict.fromkeys(CACHES, "miss")
    built = "cubins built" if gpu else "C++ libraries built"
    cold, warm, _ = rows.values()
    asked = results[NOT_A_VARIABLE]["product"]
    kept, default = files_in(folder / "kept"), files_in(folder / "tmp")
    require(kept == 0 and asked == miss, f"{NOT_A_VARIABLE} kept {kept} files, and the second process: {asked}")
    require(default > 0, "without TORCHINDUCTOR_CACHE_DIR nothing was kept in the temporary folder either")
    off = usable("caches off", results["caches off"])
    require(set(off["network"].values()) == {"not asked"}, f"TORCHINDUCTOR_FORCE_DISABLE_CACHES=1: {off['network']}")
    require(off["built"] == cold["built"], f"TORCHINDUCTOR_FORCE_DISABLE_CACHES=1: {off['built']} built")
    uncached = results["no compiler"]["answers"]
    wrote = {each: files_in(folder / each) for each in ("cache", "cache-triton")}
    outcome = {
        "TORCHINDUCTOR_CACHE_DIR": f"{wrote['cache']} files; the next process: {warm['product']['FX graph']}",
        "TRITON_CACHE_DIR": f"{wrote['cache-triton']} files" + ("" if gpu else ": no Triton kernels on a CPU"),
        NOT_A_VARIABLE: f"{kept} files, though every process had it; one that had nothing else: {asked['FX graph']}",
        "no TORCHINDUCTOR_CACHE_DIR": f"{default} files in the system's temporary folder, which a container loses",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1": f"nothing asked on the warm folder, {off['built']} {built}",
        "TORCHINDUCTOR_FX_GRAPH_CACHE=0": "; ".join(f"{name}: {answer}" for name, answer in uncached.items()),
    }
    require(set(uncached.values()) == {"not asked"}, f"TORCHINDUCTOR_FX_GRAPH_CACHE=0: {uncached}")
    if row := results.get("AOTAutogradCache off"):
        answers = usable("AOTAutogradCache off", row)["network"]
        wanted = {"AOTAutograd": "not asked", "FX graph": "hit"}
        require(answers == wanted, f"TORCHINDUCTOR_AUTOGRAD_CACHE=0: {answers}")
        outcome["TORCHINDUCTOR_AUTOGRAD_CACHE=0"] = "; ".join(f"{name}: {answer}" for name, answer in answers.items())
    h.fact("variables", outcome)
    h.say(
        f"so {NOT_A_VARIABLE} keeps nothing (torch {torch.__version__} knows no such variable): "
        "TORCHINDUCTOR_CACHE_DIR does"
    )


def faults(h: Harness, folder: Path, impossible: dict, repaired: dict) -> None:
    def plain(text: str) -> str:
        return text.replace(str(folder), "...")

    first, again = impossible["calls"]
    require(first["error"] is not None, "a cache folder below a file was taken")
    h.fact("a cache folder that cannot be", {"first call": plain(first["error"]), "fix": first["advice"]})
    if again["error"]:
        h.say(f"the same process with a good folder, too late: {plain(again['error'])}; {again['advice']}")
    require(bool(repaired["refusal"]), "usable_folder took a folder below a file")
    h.fact("asked before the first call", plain(repaired["refusal"]))
    missing = repaired["missing"]
    require(missing is not None or h.device.type == "cuda", "C++ kernels were compiled without a compiler")
    if missing:
        require(bool(missing["advice"]), f"no advice for: {missing['error']}")
        h.fact("no compiler", {"first call": plain(missing["error"]), "fix": missing["advice"]})
    else:
        h.fact("no compiler", "compiled all the same: nothing here had to be built by the host's compiler")
    require(repaired["off"] < 1e-5, f"after both were mended the result is off by {repaired['off']}")
    h.say(f"the process that had both faults mended them and went on: its result is off by {repaired['off']:.1e}")
