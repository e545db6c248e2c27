"""Caching: what a second process need not compile again, which variable keeps it, and what makes it compile anew.

Technique  Compiled code is kept on disk in two layers, both in TORCHINDUCTOR_CACHE_DIR: AOTAutogradCache holds a whole
           compiled function, FxGraphCache the code of one graph. (Triton keeps its own in TRITON_CACHE_DIR.) The key is
           the graph with its shapes, dtypes and constants, the compiler's settings and versions, not the source text.
           torch.compiler.save_cache_artifacts() packs what a process compiled into bytes, for a machine without such a
           folder. Each row is a process of its own, with its own environment: cold, on the warm folder, with the bytes
           and an empty folder; then with caches off, with a folder that cannot be used, without a compiler.
           On a CPU the quick run sets TORCHINDUCTOR_VEC_ISA_OK=1, which spares every empty folder the search for the
           vector instructions that g++ and this CPU share: seconds that have nothing to do with this graph. --full
           leaves it in. Headers that g++ precompiles once for the machine are in the cold row if nothing was compiled
           here before.
Question   How long does a process wait that another one has compiled for, and what keeps it from finding that?
Needs      torch
Shapes     x [rows, width], weights [width, hidden] and [hidden, width], one pair a layer -> [rows, width].
Dtypes     float32. The dtype is part of the key.
Errors     TypeError from usable_folder() for what is no path; an OSError, of the kind that the system gave, for a
           folder in which it cannot write. advice() returns None for an error that it does not know. CannotCompile
           from demo() on a machine without a C++ compiler, with what to install.
Wins when  processes start often: deployment, CI, many ranks. Importing the compiler and tracing the function no cache
           shortens, so a warm start is never 0 s.
Source     chapter sections on compilation time and on caching, whose TORCH_COMPILE_CACHE_DIR is put to the test.
Run        python examples/compiler/caching.py
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness, run
from harness.compiler import Compiled, empty_compiler, watch
from harness.process import Child, report

import torch

WIDTH, HIDDEN = 64, 256
TIMEOUT_S = 240  # for a process; a second compiler on a busy machine can take a minute
NOT_A_VARIABLE = "TORCH_COMPILE_CACHE_DIR"  # what the chapter says keeps compiled code
CACHES = {"AOTAutograd": ("aot_autograd", "autograd_cache"), "FX graph": ("inductor", "fxgraph_cache")}


class NotShown(AssertionError):
    """A process did not do what its switch is said to do."""


class CannotCompile(RuntimeError):
    """torch.compile does not work on this machine; the message says what to do."""


def require(shown: bool, otherwise: str) -> None:
    if not shown:
        raise NotShown(otherwise)


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


# --- what can go wrong


def usable_folder(folder: str | os.PathLike) -> Path:
    """The folder, made if it is not there, once a file could be written in it; errors are in the module docstring."""
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
    if any(said in text for said in ("C++ compiler", "C compiler", "Compiler:", *named)):
        which = "CC (for Triton's launcher)" if "C++" not in text and torch.cuda.is_available() else "CXX"
        return f"install a C++ compiler (apt-get install g++), or set {which} to one that exists"
    if isinstance(error, OSError) or any(kind in text for kind in ("PermissionError", "NotADirectory", "Read-only")):
        return "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written, and start the process again"
    if "already registered" in text:
        return "an import of the compiler failed before, in this process: start it again"
    return None


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def said_by(error: BaseException) -> dict:
    return {"error": first_line(error), "advice": advice(error)}


# --- processes: each runs one of these functions, with the switches of its row


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
        info = torch.compiler.load_cache_artifacts(saved)
        result |= {"load s": round(time.perf_counter() - started, 2), "loaded": counts_of(info)}
    before = machine_code()
    try:
        with torch.no_grad(), watch() as seen:
            y = torch.compile(network, dynamic=False)(x, *weights).cpu()
        with torch.no_grad(), watch() as second:
            torch.compile(product, dynamic=False)(x, weights[0], weights[0][0])
    except Exception as error:
        report(**said_by(error))
        return
    result |= {"first call s": round(seen.seconds, 2), "network": found(seen), "product": found(second)}
    # What came out of the saved bytes was written to the folder, too, and not built.
    result["built"] = sum(path.read_bytes() not in saved for path in machine_code() - before)
    if out:
        torch.save(y, out)
    if save:
        data, info = torch.compiler.save_cache_artifacts()
        Path(save).write_bytes(data)
        result["saved"] = counts_of(info)
    report(**result)


def child_product(inputs: str) -> None:
    """The small function alone: enough to ask whether anything was kept."""
    x, w, *_ = torch.load(inputs, map_location="cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad(), watch() as seen:
        torch.compile(product, dynamic=False)(x, w, w[0])
    report(product=found(seen))


def counts_of(info) -> dict[str, int]:
    return {kind: len(keys) for kind, keys in info.artifacts.items()}


def machine_code() -> set[Path]:
    """Shared libraries of CPU kernels and cubins of Triton's (one for each form tried) in this process's caches."""
    folders = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    kinds = ("*.main.so", "*.cubin")
    return {path for folder in folders if folder for kind in kinds for path in Path(folder).rglob(kind)}


def child_folder(good: str) -> None:
    """torch.compile with a cache folder that cannot be, and then again, in the same process, with a good one."""
    x, said = torch.ones(4, 4), []
    for _ in range(2):
        try:
            torch.compile(product)(x, x, x)
            said.append({"error": None, "advice": None})
        except Exception as error:
            said.append(said_by(error))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = good
    report(said=said)


def child_repaired(good: str) -> None:
    """A cache folder that cannot be and no compiler: both mended in this process, each before it was needed again."""
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    try:
        usable_folder(folder)
        told = None
    except OSError as error:
        told = str(error)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(usable_folder(good))
    x = torch.linspace(0, 1, 64, device="cuda" if torch.cuda.is_available() else "cpu")

    def waves(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x.cos()

    try:
        torch.compile(waves)(x)
        missing = None
    except Exception as error:
        missing = said_by(error)
    os.environ["CC"] = shutil.which("gcc") or shutil.which("clang") or "cc"
    torch.compiler.reset()
    compiler = shutil.which("g++") or shutil.which("clang++") or "g++"
    # g++ precompiles headers for each set of its options, in more time than this one kernel would save by them.
    mended = {"cpp.cxx": (None, compiler), "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(mended), watch() as seen:
        y = torch.compile(waves)(x)
    off = (y.double() - waves(x.double())).abs().max().item()
    report(told=told, missing=missing, off=off, answers=found(seen))


# --- what changes the key


def renamed(rows: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    # product() with a comment and other names
    doubled = torch.addmm(offset, rows, weight, alpha=2.0)
    return doubled


def tripled(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, w, alpha=3.0)


@contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS would ask for CUBLAS_WORKSPACE_CONFIG
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def changes(h: Harness) -> dict[str, dict[str, str]]:
    """What the caches answer when one thing differs from what is in them; in this process, its graphs forgotten."""
    x, w, bias = h.randn(16, WIDTH), h.randn(WIDTH, HIDDEN), h.randn(HIDDEN)
    said = {}
    with empty_compiler(), warnings.catch_warnings():
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
            "deterministic algorithms": (product, (x, w, bias), deterministic()),
            "enable_autograd_cache=False": (product, (x, w, bias), autograd.patch(enable_autograd_cache=False)),
            "fx_graph_cache=False": (product, (x, w, bias), inductor.patch(fx_graph_cache=False)),
        }
        for name, (fn, inputs, setting) in cases.items():
            torch.compiler.reset()
            with setting, watch() as seen:
                torch.compile(fn, dynamic=False)(*inputs)
            said[name] = found(seen)
    return said


def files_in(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def demo(h: Harness) -> None:
    if h.profile:
        h.say("nothing to profile: what is shown happens before the first kernel runs")
        return
    gpu = h.device.type == "cuda"
    layers = h.pick(quick=4, full=16) if gpu else h.pick(quick=1, full=4)
    tensors = [h.randn(64, WIDTH)]
    for _ in range(layers):
        tensors += [h.randn(WIDTH, HIDDEN, scale=WIDTH**-0.5), h.randn(HIDDEN, WIDTH, scale=HIDDEN**-0.5)]
    with TemporaryDirectory(prefix="caching-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        torch.save(tensors, folder / "inputs")
        rows = timed(h, folder, tensors)
        with ExitStack() as stack:
            others = start_others(h, folder, stack)
            with h.progress("what changes the key"):
                changed = changes(h)
            said = {}
            for name, child in others.items():
                with h.progress(name):
                    said[name] = child.result()
        lessons(h, folder, rows, said, changed)


def switches(h: Harness, folder: Path, name: str) -> dict[str, str]:
    """The environment of a process whose caches are called `name`."""
    quick = h.device.type == "cpu" and not h.full
    return ({"TORCHINDUCTOR_VEC_ISA_OK": "1"} if quick else {}) | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / name),
        "TRITON_CACHE_DIR": str(folder / f"{name}-triton"),
        NOT_A_VARIABLE: str(folder / "kept"),
    }


def timed(h: Harness, folder: Path, tensors: list[torch.Tensor]) -> dict[str, dict]:
    """The processes whose times are reported, one after the other; each output is held to float64."""
    (folder / "kept").mkdir()
    rows = {}
    for name, cache, save, load in (
        ("cold", "cache", "artifacts", None),
        ("warm folder", "cache", None, None),
        ("mega-cache", "other-machine", None, "artifacts"),
    ):
        save, load = (str(folder / file) if file else None for file in (save, load))
        arguments = str(folder / "inputs"), str(folder / "out"), save, load
        with (
            h.progress(name),
            Child(child_compile, *arguments, env=switches(h, folder, cache), timeout=TIMEOUT_S) as child,
        ):
            row = rows[name] = usable(name, child.result())
        row["process s"] = round(child.seconds, 2)
        row["files"] = {each: files_in(folder / each) for each in ("cache", "cache-triton")}
        y = torch.load(folder / "out").to(h.device)
        terms = len(tensors) * HIDDEN
        h.check(lambda *_, y=y: y, reference, *tensors, what=f"{name}: its output", terms=terms, poison=False)
    return rows


def start_others(h: Harness, folder: Path, stack: ExitStack) -> dict[str, Child]:
    """The processes whose answers count and not their times, all at once."""
    inputs, cache = str(folder / "inputs"), switches(h, folder, "cache")
    (folder / "file").touch()
    (folder / "tmp").mkdir()
    # Below a file there can be no folder, not even for root, whom no permission stops.
    impossible = switches(h, folder, "file/cache") | {"TRITON_CACHE_DIR": str(folder / "empty-triton")}
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


def usable(name: str, row: dict) -> dict:
    if row.get("error"):
        raise CannotCompile(f"{name}: {row['error']}; {row['advice'] or 'it is none of the faults shown here'}")
    return row


def lessons(h: Harness, folder: Path, rows: dict, said: dict, changed: dict) -> None:
    """Require that each switch did what it is said to do, record it, and say what follows."""
    gpu = h.device.type == "cuda"
    built = "cubins built" if gpu else "C++ libraries built"
    cold, warm, mega = rows.values()
    hit, miss = dict.fromkeys(CACHES, "hit"), dict.fromkeys(CACHES, "miss")
    for name, row, wanted in (("cold", cold, miss), ("warm folder", warm, hit), ("mega-cache", mega, hit)):
        require(row["network"] == row["product"] == wanted, f"{name}: {row['network']}, {row['product']}")
    times = ("imports s", "load s", "first call s", "process s")
    h.fact(
        "processes",
        {
            name: {t: row[t] for t in times if t in row} | row["network"] | {built: row["built"]}
            for name, row in rows.items()
        },
    )
    if "TORCHINDUCTOR_VEC_ISA_OK" in switches(h, folder, "cache"):
        h.say("with TORCHINDUCTOR_VEC_ISA_OK=1; without it an empty folder also costs a search for vector instructions")
    h.say(
        f"a warm folder: the first call takes {warm['first call s']} s instead of {cold['first call s']}, its process "
        f"{warm['process s']} s instead of {cold['process s']}; not 0: importing the compiler takes "
        f"{warm['imports s']} s whatever is cached, and the function is traced before its key is known"
    )
    data = (folder / "artifacts").read_bytes()
    images = data.count(b"\x7fELF")  # what shared libraries and a GPU's cubins both begin with
    h.fact("mega-cache", {"bytes": len(data), **cold["saved"], "images of machine code": images})
    h.say(
        f"mega-cache: {len(data):,} bytes hold the graphs and {images} images of machine code. In an empty folder both "
        f"caches hit, {mega['built']} of {cold['built']} {built} again; the first call takes "
        f"{mega['first call s']} s (cold {cold['first call s']}, warm folder {warm['first call s']})"
    )
    require(gpu or images == 0, f"on a CPU the bytes hold {images} images of machine code")
    require(gpu or mega["built"] == cold["built"], f"g++ built {mega['built']} libraries for {cold['built']}")

    asked = said[NOT_A_VARIABLE]["product"]
    kept, default = files_in(folder / "kept"), files_in(folder / "tmp")
    require(kept == 0 and asked == miss, f"{NOT_A_VARIABLE} kept {kept} files, and the second process: {asked}")
    require(default > 0, "without TORCHINDUCTOR_CACHE_DIR nothing was kept in the temporary folder either")
    off = usable("caches off", said["caches off"])
    require(set(off["network"].values()) == {"not asked"}, f"TORCHINDUCTOR_FORCE_DISABLE_CACHES=1: {off['network']}")
    require(off["built"] == cold["built"], f"TORCHINDUCTOR_FORCE_DISABLE_CACHES=1: {off['built']} built")
    uncached = said["no compiler"]["answers"]
    wrote = cold["files"]
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": f"{wrote['cache']} files; the next process: {warm['product']['FX graph']}",
        "TRITON_CACHE_DIR": f"{wrote['cache-triton']} files" + ("" if gpu else ": no Triton kernels on a CPU"),
        NOT_A_VARIABLE: f"{kept} files, though every process had it; one that had nothing else: {asked['FX graph']}",
        "no TORCHINDUCTOR_CACHE_DIR": f"{default} files in the system's temporary folder, which a container loses",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1": f"nothing asked on the warm folder, {off['built']} {built}",
        "TORCHINDUCTOR_FX_GRAPH_CACHE=0": "; ".join(f"{name}: {answer}" for name, answer in uncached.items()),
    }
    require(set(uncached.values()) == {"not asked"}, f"TORCHINDUCTOR_FX_GRAPH_CACHE=0: {uncached}")
    if row := said.get("AOTAutogradCache off"):
        answers = usable("AOTAutogradCache off", row)["network"]
        wanted = {"AOTAutograd": "not asked", "FX graph": "hit"}
        require(answers == wanted, f"TORCHINDUCTOR_AUTOGRAD_CACHE=0: {answers}")
        variables["TORCHINDUCTOR_AUTOGRAD_CACHE=0"] = "; ".join(f"{name}: {answer}" for name, answer in answers.items())
    h.fact("variables", variables)
    h.say(
        f"so {NOT_A_VARIABLE} keeps nothing (torch {torch.__version__} knows no such variable): "
        "TORCHINDUCTOR_CACHE_DIR does"
    )

    for name in ("nothing", "values of the weights"):
        require(changed[name] == hit, f"changing {name}: {changed[name]}")
    for name in ("what fills them", "a constant", "a shape", "a dtype", "a setting of Inductor"):
        require(changed[name] == miss, f"changing {name}: {changed[name]}")
    h.fact("what was changed, and what the caches answered", changed)
    faults(h, folder, said["no folder"], said["no compiler"])


def faults(h: Harness, folder: Path, impossible: dict, repaired: dict) -> None:
    def plain(text: str) -> str:
        return text.replace(str(folder), "...")

    first, again = impossible["said"]
    require(first["error"] is not None, "a cache folder below a file was taken")
    h.fact("a cache folder that cannot be", {"first call": plain(first["error"]), "fix": first["advice"]})
    if again["error"]:
        h.say(f"the same process with a good folder, too late: {plain(again['error'])}; {again['advice']}")
    require(bool(repaired["told"]), "usable_folder took a folder below a file")
    h.fact("asked before the first call", plain(repaired["told"]))
    missing = repaired["missing"]
    require(missing is not None or h.device.type == "cuda", "C++ kernels were compiled without a compiler")
    if missing:
        require(bool(missing["advice"]), f"no advice for: {missing['error']}")
        h.fact("no compiler", {"first call": plain(missing["error"]), "fix": missing["advice"]})
    else:
        h.fact("no compiler", "compiled all the same: nothing here had to be built by the host's compiler")
    require(repaired["off"] < 1e-5, f"after both were mended the result is off by {repaired['off']}")
    h.say(f"the process that had both faults mended them and went on: its result is off by {repaired['off']:.1e}")


if __name__ == "__main__":
    run(demo)
