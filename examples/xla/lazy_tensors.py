"""Lazy tensors: operations are recorded, and one sync compiles and runs all of them as a single program.

Technique  An operation on an XLA tensor adds a node to a graph and returns; shapes and dtypes are known at once, values
           are not. torch_xla.sync() hands XLA everything that is pending and still referenced. The program is looked up
           by the graph: operations in their order, shapes, dtypes, constants, and which results are still held. What
           is found is run at once, what is new is compiled first. Here each stage is counted, the graph is shown in
           its three forms and after XLA's optimization, and the two ways to lose are measured: numbers that become
           part of the graph, and a sync that was forgotten, after which each step records all the steps before it.
Question   When does PyTorch/XLA compile, when does it run, and what does recording cost?
Needs      torch_xla>=2.9
Shapes     x [rows, inner], w [inner, width], b [width] -> mean of gelu(x @ w + b), [rows]; chains x [rows, width].
Dtypes     float32.
Errors     programs(): ValueError for no values or for a tensor that is not on the XLA device. xla.ir(), hlo() and
           stablehlo() too: ValueError for a tensor on the CPU. That torch_xla mixes devices only at times is shown in
           graph_boundaries.
Wins when  a step is long against what recording it costs on the host, and each step records the same graph.
Source     chapter section "XLA and torch_xla"; torch_xla's own counters and texts.
Run        python examples/xla/lazy_tensors.py
"""

from __future__ import annotations

import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from harness import Harness, Work, run, xla
from harness.process import Child, report

import torch
import torch.nn.functional as F
import torch_xla
from torch_xla.experimental.eager import eager_mode_context

ROWS, INNER, WIDTH = 53, 379, 443  # sizes of no other technique: a program compiled there would be found here
LAYERS, OPS = 24, 4  # of chain(): matmul, tanh, scale, add
PIECES, PIECE = 100, 10_000
STEPS = 8
EAGER, LAZY, ONE_BY_ONE = "torch eager", "torch_xla lazy", "torch_xla eager mode"


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w + b).mean(-1)


def layer64(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return layer(x.double(), w.double(), b.double())


def counts(ran: xla.Ran) -> dict[str, int]:
    """What happened within a watch(), without what did not."""
    return {
        name.replace("_", " "): value for name, value in vars(ran).items() if isinstance(value, int) and value
    } or {"nothing": 0}  # fmt: skip


# --- one graph, from recording to result


def one_graph(h: Harness) -> None:
    inputs = h.randn(ROWS, INNER), h.randn(INNER, WIDTH, scale=INNER**-0.5), h.randn(WIDTH)
    stages = {}
    with xla.watch() as stages["three tensors to the device"]:
        x, w, b = (t.to(xla.device()) for t in inputs)
    with xla.watch() as stages["recording"]:
        y = layer(x, w, b)
        forms = {"IR": xla.ir(y), "HLO": xla.hlo(y), "StableHLO": xla.stablehlo(y)}
        del y  # nobody holds it: it will never be computed
    with xla.watch() as stages["recording and sync"]:
        y = layer(x, w, b)
        torch_xla.sync()
    with xla.watch() as stages["reading the result"]:
        y.cpu()
    with xla.watch() as stages["the same again"]:
        y = layer(x, w, b)
        torch_xla.sync()
    with xla.watch() as stages["recording and reading, no sync"]:
        layer(x, w, b).cpu()
    h.fact("what XLA did", {stage: counts(ran) for stage, ran in stages.items()})
    compiled = stages["recording and sync"]
    h.fact("compile seconds", round(compiled.compile_s, 4))
    h.check(lambda *_: layer(x, w, b), layer64, *inputs, terms=INNER + WIDTH, poison=False, what="mean of gelu, lazy")

    show(h, "IR, as recorded", forms["IR"], "= ")
    show(h, "HLO, of the product and of gelu's erf", forms["HLO"], r" dot\(| erf\(")
    show(h, "StableHLO, of the same", forms["StableHLO"], r"dot_general|erf")
    operations = {name: xla.operations(text) for name, text in forms.items()}
    operations["optimized HLO"] = optimized(h)
    h.fact("operations", {form: dict(found.most_common()) for form, found in operations.items()})
    left = {
        name: n for name, n in operations["optimized HLO"].items() if name not in ("parameter", "constant", "tuple")
    }
    h.say(
        f"{sum(n for name, n in operations['IR'].items() if name.startswith('aten'))} torch operations are "
        f"{sum(operations['HLO'].values())} of HLO; what XLA leaves of them to run: "
        + ", ".join(f"{n} {name}" for name, n in left.items())
    )


def show(h: Harness, title: str, text: str, pattern: str) -> None:
    h.say(f"{title}:")
    for line in text.splitlines():
        if re.search(pattern, line):
            line = re.sub(r", xla_shape=[^ ]*[^ ,]|(?<=\])\{[\d,]+\}|, precision = \[[^]]*\]", "", line.strip())
            h.say(f"  {line if len(line) <= 110 else line[:107] + '...'}")


def optimized(h: Harness):
    """The operations that are run: of the entry computation, in what XLA dumps when it has optimized the program."""
    with tempfile.TemporaryDirectory() as folder, h.progress("compiling in a process of its own, for the dump"):
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        with Child(child_layer, ROWS, INNER, WIDTH, env={"XLA_FLAGS": flags}) as child:
            child.result()
        texts = [path.read_text() for path in Path(folder).glob("*after_optimizations.txt")]
    return xla.operations(next(text for text in texts if " dot(" in text).rpartition("ENTRY")[2])


def child_layer(rows: int, inner: int, width: int) -> None:
    x, w, b = (torch.ones(size).to(xla.device()) for size in ((rows, inner), (inner, width), (width,)))
    y = layer(x, w, b)
    xla.settle()
    report(mean=y.mean().item())


# --- what is the same graph


def same_graph(h: Harness) -> None:
    """A program is found again by what was recorded, not by the code that recorded it nor by the values in it."""
    inputs = h.randn(ROWS, INNER), h.randn(INNER, WIDTH + 2, scale=INNER**-0.5), h.randn(WIDTH + 2)
    x, w, b = (t.to(xla.device()) for t in inputs)
    other = h.randn(ROWS, INNER).to(xla.device())

    def rewritten(x, w, b):
        hidden = torch.add(torch.matmul(x, w), b)
        return torch.mean(torch.nn.GELU()(hidden), dim=1)

    def held(x, w, b):
        hidden = x @ w + b
        return F.gelu(hidden).mean(-1), hidden

    def dropped(x, w, b):
        (x * 3).exp()
        return layer(x, w, b)

    cases = {
        "the first time": (layer, (x, w, b)),
        "the same again": (layer, (x, w, b)),
        "other values": (layer, (other, w, b)),
        "other code, the same operations": (rewritten, (x, w, b)),
        "a result more that nobody holds": (dropped, (x, w, b)),
        "an intermediate result held": (held, (x, w, b)),
        "b + x @ w for x @ w + b": (lambda x, w, b: F.gelu(b + x @ w).mean(-1), (x, w, b)),
        "one row less": (layer, (x[1:].clone(), w, b)),
        "bfloat16": (layer, tuple(t.bfloat16() for t in (x, w, b))),
    }
    found = {}
    for what, (fn, given) in cases.items():
        with xla.watch() as ran:
            result = fn(*given)
            xla.settle()
        found[what] = "compiled" if ran.compiles else "found again" if ran.reused else "not run"
        del result
    h.fact("recorded", found)


# --- numbers in the graph


def programs(fn: Callable, x: torch.Tensor, values: Iterable) -> tuple[xla.Ran, list[torch.Tensor]]:
    """fn(x, value) for each value, each in a step of its own: what XLA did for all, and the results."""
    values = list(values)
    if not values:
        raise ValueError("programs: no values; pass those that the step meets")
    if x.device.type != "xla":
        raise ValueError(f"programs: x is on {x.device}; pass x.to(torch_xla.device())")
    results = []
    with xla.watch() as ran:
        for value in values:
            results.append(fn(x, value))
            torch_xla.sync()
    return ran, results


def one(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.tensor([value], device=x.device)


def baked_in(h: Harness) -> None:
    """A Python number that changes at every step: part of the graph, or an input of it?

    0 and 1 are put into the graph, because much can be simplified with them: those of a tensor without dimensions too,
    wherever it was made. A list of one number is data.
    """
    floats, special, whole = (0.37, 0.71, 1.37, 1.91), (0.0, 1.0, 1.37, 1.91), (2, 3, 4, 5)
    cases = {
        "x * s": (lambda x, s: x * s, floats),
        "x * s, 0 and 1 among them": (lambda x, s: x * s, special),
        "x * torch.tensor(s, device=xla), the same": (lambda x, s: x * torch.tensor(s, device=x.device), special),
        "x * torch.tensor(s).to(xla), the same": (lambda x, s: x * torch.tensor(s).to(x.device), special),
        "x * torch.tensor([s], device=xla), the same": (lambda x, s: x * one(x, s), special),
        "x ** n": (lambda x, n: x**n, whole),
        "x ** torch.tensor([n], device=xla)": (lambda x, n: x ** one(x, float(n)), whole),
        "x[:, n]": (lambda x, n: x[:, n].square(), whole),
        "x[:, torch.tensor(n, device=xla)]": (lambda x, n: x[:, torch.tensor(n, device=x.device)].exp(), whole),
        "x.index_select(1, [n] there)": (lambda x, n: x.index_select(1, one(x, n)), whole),
        "x[:, :n].sum(1)": (lambda x, n: x[:, :n].sum(1), whole),
        "torch.where(column < [n] there, x, 0).sum(1)": (
            lambda x, n: torch.where(torch.arange(x.shape[1], device=x.device) < one(x, n), x, 0.0).sum(1), whole,
        ),
    }  # fmt: skip
    found = {}
    for i, (what, (fn, values)) in enumerate(cases.items()):
        x = h.randn(ROWS, 67 + i)  # a width each, so that no case finds the programs of another
        ran, results = programs(fn, x.to(xla.device()), values)
        h.check(
            lambda _, results=results: tuple(results),
            lambda x, fn=fn, values=values: tuple(fn(x.double(), value) for value in values),
            x, terms=8, roundings=16, poison=False, what=f"{what} for {values}", constant_ok=0.0 in values,
        )  # fmt: skip
        found[what] = {"compiles": ran.compiles, "found again": ran.reused}
        if ran.from_device:
            found[what]["read by the host"] = ran.from_device
    h.fact(f"programs for {len(whole)} values", found)
    x = h.randn(ROWS, 67).to(xla.device())
    for s in (0.37, 1.0):
        with xla.watch():
            text = xla.hlo(x * s)
            h.say(f"x * {s} in HLO: {', '.join(f'{name} {n}' for name, n in xla.operations(text).items())}")


# --- copies


def transfers(h: Harness) -> None:
    x = h.randn(ROWS, WIDTH + 4)
    ran = {}
    with xla.watch() as ran["a tensor to the device"]:
        on_device = x.to(xla.device())
    number = float(x[0, 0])
    for what in ("a Python number", "the same number again"):
        with xla.watch() as ran[what]:
            y = on_device * number
            torch_xla.sync()
    with xla.watch() as ran["a result that is ready, read"]:
        y.cpu()
    with xla.watch() as ran["a result that is pending, read"]:
        (on_device * number).cpu()
    h.fact("copies", {what: counts(each) for what, each in ran.items()})
    if not h.timing:
        return
    many, one = [h.randn(PIECE) for _ in range(PIECES)], h.randn(PIECES * PIECE)
    numbers = [torch.tensor(float(i)).to(xla.device()) for i in range(PIECES)]
    many_there, one_there = [t.to(xla.device()) for t in many], one.to(xla.device())
    ms = {
        f"{one.nbytes / 1e6:g} MB there": (
            lambda: [t.to(xla.device()) for t in many], lambda: one.to(xla.device()),
        ),
        f"{one.nbytes / 1e6:g} MB back": (lambda: [t.cpu() for t in many_there], one_there.cpu),
        f"{PIECES} numbers read": (lambda: [t.item() for t in numbers], lambda: torch.stack(numbers).cpu()),
    }  # fmt: skip
    shown = {}
    for what, (apart, together) in ms.items():
        a, b = (1000 * median_seconds(xla.waited(fn)) for fn in (apart, together))
        shown[what] = {f"ms in {PIECES} copies": round(a, 2), "ms in one": round(b, 2)}
        h.say(f"{what}: {PIECES} copies take {a / b:.1f} times as long as one")
    h.fact("ms of copies", shown)


def median_seconds(fn: Callable, times: int = 9) -> float:
    def once() -> float:
        started = time.perf_counter()
        fn()
        return time.perf_counter() - started

    fn()
    return statistics.median(once() for _ in range(times))


# --- the host's share


def chain(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for w in weights:
        x = x + torch.tanh(x @ w) * 0.5
    return x


def chain64(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return chain(x.double(), [w.double() for w in weights])


def host_cost(h: Harness) -> None:
    """The same operations on little data and on much: what recording costs against what running takes."""
    shares = {}
    for size, (rows, width) in {"tiny": (7, 61), "large": (h.pick(256, 1024), h.pick(397, 1021))}.items():
        x, weights = h.randn(rows, width), [h.randn(width, width, scale=width**-0.5) for _ in range(LAYERS)]
        on_device, there = x.to(xla.device()), [w.to(xla.device()) for w in weights]

        def lazily(_, on_device=on_device, there=there):
            return chain(on_device, there)

        def one_by_one(_, on_device=on_device, there=there):
            with eager_mode_context(True):
                y = chain(on_device, there)
                xla.wait()
            return y

        variants = {
            EAGER: lambda x, weights=weights: chain(x, weights),
            LAZY: xla.waited(lazily),
            ONE_BY_ONE: one_by_one,
        }
        table = h.compare(
            variants, lambda x, weights=weights: chain64(x, weights), x, baseline=EAGER, beside=2.0,
            work=Work(flops=2 * LAYERS * rows * width * width, dtype=torch.float32),
            title=f"{LAYERS * OPS} {size} operations",
        )  # fmt: skip
        if table and h.timing:
            recording, launch, rest = split(lambda lazily=lazily: lazily(None))
            ms = {row.variant: row.ms for row in table.rows}
            shares[size] = {
                "us to record one": round(1e6 * recording / LAYERS / OPS, 2),
                "us to record all": round(1e6 * recording, 1),
                "us in sync": round(1e6 * launch, 1),
                "us waited": round(1e6 * rest, 1),
            }
            ops = LAYERS * OPS
            h.say(
                f"{size}: an operation costs {1000 * ms[EAGER] / ops:.1f} us in eager; recorded it costs "
                f"{1e6 * recording / ops:.1f} us, and all of lazy mode {1000 * ms[LAZY] / ops:.1f} us: recording is "
                f"{recording / (recording + launch + rest):.0%} of the step. One program each (eager mode): "
                f"{1000 * ms[ONE_BY_ONE] / ops:.1f} us. sync returns after {1000 * launch:.2f} ms, and what it started "
                f"takes {1000 * rest:.2f} ms more"
            )
    if shares:
        h.fact(f"host time of {LAYERS * OPS} operations", shares)


def split(record: Callable) -> tuple[float, float, float]:
    """Seconds of a step: in recording, in sync (looking the program up, starting it), and waiting for it."""
    times = []
    for _ in range(20):
        xla.settle()
        marks = [time.perf_counter()]
        held = record()
        marks.append(time.perf_counter())
        torch_xla.sync()
        marks.append(time.perf_counter())
        xla.wait()
        marks.append(time.perf_counter())
        times.append([b - a for a, b in itertools.pairwise(marks)])
        del held
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


# --- a sync too few


def train_like(x: torch.Tensor, w: torch.Tensor, steps: int, synced: bool) -> tuple[torch.Tensor, list[dict]]:
    """A loop that reads its loss at every step. Reading computes the loss, and keeps nothing else."""
    told = []
    for _ in range(steps):
        x = torch.tanh(x @ w)
        loss = x.square().mean()
        found = xla.operations(xla.hlo(loss))
        if synced:
            torch_xla.sync()
        loss.item()
        told.append({"operations": sum(found.values()), "products": found["dot"]})
    return x, told


def forgotten_sync(h: Harness) -> None:
    width = INNER + 18
    x, w = h.randn(ROWS, width), h.randn(width, width, scale=width**-0.5)
    grown, ran = {}, {}
    for what, synced in {"with sync": True, "forgotten": False}.items():
        there = x.to(xla.device()), w.to(xla.device())
        with xla.watch() as ran[what]:
            y, grown[what] = train_like(*there, STEPS, synced)

        def reference(x, w):
            x, w = x.double(), w.double()
            for _ in range(STEPS):
                x = torch.tanh(x @ w)
            return x

        h.check(lambda *_, y=y: y, reference, x, w, terms=STEPS * width, poison=False, what=f"{STEPS} steps, {what}")
        del y
    h.fact("operations in the graph of each step", {
        what: ", ".join(str(step["operations"]) for step in steps) for what, steps in grown.items()
    })  # fmt: skip
    facts = {
        what: {
            "compiles": ran[what].compiles, "compile s": round(ran[what].compile_s, 3),
            "executions": ran[what].executions, "matrix products run": sum(step["products"] for step in grown[what]),
        } for what in ran
    }  # fmt: skip
    h.fact(f"{STEPS} steps that read their loss", facts)
    forgot, kept = facts["forgotten"], facts["with sync"]
    h.say(
        f"without the sync every step is a new program that begins at the first step: {forgot['compiles']} compiles "
        f"for {kept['compiles']}, {forgot['matrix products run']} matrix products for {kept['matrix products run']}"
        + ("" if forgot["compiles"] else "; here they were compiled earlier in this process")
    )


def demo(h: Harness) -> None:
    if not h.profile:
        one_graph(h)
        same_graph(h)
        baked_in(h)
        transfers(h)
    host_cost(h)
    if not h.profile:
        forgotten_sync(h)
    xla.settle()


if __name__ == "__main__":
    run(demo)
