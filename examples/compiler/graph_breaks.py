"""Graph breaks: find the line of your own code that splits the graph, what it costs, and write it so that it does not.

Technique  Where Dynamo meets Python that it cannot trace, it ends the graph, lets Python run that line and starts
           another graph after it. That is the mild case: inside a try or a loop it cannot resume, and leaves the rest
           of the function, or all of it, to eager. One layer is written in six ways, each broken by a common cause;
           each break is found with torch's own log (find_breaks: the line, the reason, what is lost), fixed, held to
           one graph with fullgraph=True, and timed: the same layer, the same numbers, one graph or several.
Question   Which line of the model breaks the graph, what does that cost, and how is it written without?
Needs      torch
Shapes     x [rows, width], scale [width], temperature [] -> [rows, width]. find_breaks takes any function and inputs.
Dtypes     float32 on a CPU, bfloat16 on a GPU.
Errors     find_breaks raises TypeError for what cannot be called, and ValueError for a function that is compiled
           already and for a generator function, which torch.compile never compiles. What fn raises is passed on.
Wins when  many short kernels surround the break: it costs their fusion, one more round of guards and launches, and a
           wait for the GPU where a tensor's value is read. Between long kernels only the lost fusion is left of that.
Source     chapter section "Graph Breaks and Debugging".
Run        python examples/compiler/graph_breaks.py
"""

from __future__ import annotations

import inspect
import io
import json
import linecache
import re
import sysconfig
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import Harness, Work, run
from harness.compiler import generated_code, logs, wake_compiler, watch

import torch
import torch.nn.functional as F

SETTINGS = '{"floor": 0.05}'
FLOOR = json.loads(SETTINGS)["floor"]

# --- finding breaks

SPLIT, REST, ALL = "only fusion", "the rest of the function", "the whole function"
# How torch's log begins a break that it cannot resume from; any other leaves two graphs.
SEVERITY = {"Failed to handle graph break gracefully": ALL, "Encountered graph break that we cannot resume": REST}
NOT_THE_USERS = tuple(str(Path(path).resolve()) for path in {Path(torch.__file__).parent, sysconfig.get_path("stdlib")})


@dataclass(frozen=True)
class Break:
    """A graph break: the innermost line of the user's own code, torch's reason, and what is left to eager there."""

    file: str
    line: int
    reason: str
    lost: str

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}: {self.source}"


@dataclass(frozen=True)
class Found:
    graphs: int
    operations: int  # in those graphs, together
    breaks: list[Break]


def _parse(record: str) -> tuple[tuple[str, int], Break]:
    """Where torch says that it broke, which may be deep in a library that Dynamo followed, and the break."""
    head = re.search(r"in user code at (.+):(\d+)", record)
    at = (head[1], int(head[2]))
    reason = re.search(r"Graph Break Reason: (.*)", record)[1]
    lost = next((lost for words, lost in SEVERITY.items() if reason.startswith(words)), SPLIT)
    if lost != SPLIT or reason.startswith("Encountered graph break when"):  # the reason itself is the next paragraph
        reason = record.split(reason, 1)[1].strip().splitlines()[0]
    _, _, stack = record.partition("User code traceback:")
    frames = [
        (file, int(line))
        for file, line in re.findall(r'File "(.+)", line (\d+)', stack.rpartition("in find_breaks")[2])
        if not str(Path(file).resolve()).startswith(NOT_THE_USERS)
    ]
    return at, Break(*(frames[-1] if frames else at), reason, lost)


def find_breaks(fn: Callable, *inputs) -> Found:
    """Compile fn from nothing for a backend that generates no code, call it once, and tell what Dynamo made of it.

    torch._dynamo.explain lists no break that it cannot resume from; torch's log (TORCH_LOGS=graph_breaks) does.
    """
    if not callable(fn):
        raise TypeError(f"find_breaks: got {type(fn).__name__}, which cannot be called; pass a function or a module")
    if hasattr(fn, "_torchdynamo_orig_callable") or hasattr(fn, "_orig_mod"):
        raise ValueError("find_breaks: fn is compiled already; pass the function or module that it was made of")
    if inspect.isgeneratorfunction(fn):
        raise ValueError(
            f"find_breaks: {fn.__name__} is a generator function, which torch.compile runs eagerly as a whole; "
            "compile a function that calls it"
        )
    torch.compiler.reset()
    with watch() as seen, logs(graph_breaks=True) as records, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of calls that Dynamo does not know: the log has them too
        torch.compile(fn, backend="eager")(*inputs)
    torch.compiler.reset()
    breaks: dict[tuple[str, int], Break] = {}
    for artifact, text in records:
        if artifact == "graph_breaks":
            at, found = _parse(text)
            # One that cannot be resumed from may be told twice, the second time with what is lost, without the stack.
            breaks[at] = replace(breaks[at], lost=found.lost) if at in breaks else found
    return Found(seen.graphs, seen.counters.get("stats", {}).get("calls_captured", 0), list(breaks.values()))


# --- one layer, written in many ways: tanh(silu(x) * scale / temperature) * scale + x


def prints(x, scale, temperature):
    y = F.silu(x) * scale
    print("temperature", temperature)
    return torch.tanh(y / temperature) * scale + x


def prints_when_eager(x, scale, temperature):
    y = F.silu(x) * scale
    if not torch.compiler.is_compiling():
        print("temperature", temperature)
    return torch.tanh(y / temperature) * scale + x


def reads_an_item(x, scale, temperature):
    y = F.silu(x) * scale
    y = y / temperature.item()
    return torch.tanh(y) * scale + x


def stays_a_tensor(x, scale, temperature):
    return torch.tanh(F.silu(x) * scale / temperature) * scale + x


def branches(x, scale, temperature):
    y = F.silu(x) * scale
    if temperature > 0:
        y = y / temperature
    return torch.tanh(y) * scale + x


def selects(x, scale, temperature):
    y = F.silu(x) * scale
    y = torch.where(temperature > 0, y / temperature, y)
    return torch.tanh(y) * scale + x


def branches_in_the_graph(x, scale, temperature):
    y = F.silu(x) * scale
    # Both branches return a tensor of their own: an output that is an input is refused.
    y = torch.cond(temperature > 0, lambda y, t: y / t, lambda y, t: y.clone(), (y, temperature))
    return torch.tanh(y) * scale + x


def parses_settings(x, scale, temperature):
    y = F.silu(x) * scale
    floor = json.loads(SETTINGS)["floor"]
    return torch.tanh(y / temperature.clamp(min=floor)) * scale + x


def is_given_settings(x, scale, temperature):
    y = F.silu(x) * scale
    return torch.tanh(y / temperature.clamp(min=FLOOR)) * scale + x


def catches(x, scale, temperature):
    y = F.silu(x) * scale
    try:
        gain = 1 / temperature.item()
    except ZeroDivisionError:
        gain = 1.0
    return torch.tanh(y * gain) * scale + x


def guards_the_zero(x, scale, temperature):
    y = F.silu(x) * scale
    gain = torch.where(temperature == 0, 1.0, 1 / temperature)
    return torch.tanh(y * gain) * scale + x


def iterates(x, scale, temperature, divisors):
    y = F.silu(x) * scale
    for divisor in divisors:
        y = y / divisor
    return torch.tanh(y) * scale + x


def catches_nothing_that_breaks(x, scale, temperature):
    try:
        if x.ndim != 3:
            raise ValueError("not a batch")
        y = x
    except ValueError:
        y = F.silu(x) * scale
    return torch.tanh(y / temperature) * scale + x


def generates_inside(x, scale, temperature):
    y = F.silu(x) * scale
    for divisor in (each for each in (temperature,)):
        y = y / divisor
    return torch.tanh(y) * scale + x


def reads_items_in_a_generator(x, scale, temperature):
    y = F.silu(x) * scale
    divisor = max(each.item() for each in temperature.expand(2))
    return torch.tanh(y / divisor) * scale + x


def streams(x, scale, temperature):
    yield torch.tanh(F.silu(x) * scale / temperature) * scale + x


def reference(x, scale, temperature):
    return stays_a_tensor(x.double(), scale.double(), temperature.double())


@dataclass(frozen=True)
class Form:
    """A way to write the layer: a function, what its caller hands in besides, and a setting to compile it under."""

    fn: Callable
    extra: Callable = lambda temperature: ()
    config: dict = field(default_factory=dict)

    def settings(self):
        return torch._dynamo.config.patch(**self.config) if self.config else nullcontext()

    def found(self, x, scale, temperature) -> Found:
        with self.settings(), redirect_stdout(io.StringIO()):
            return find_breaks(self.fn, x, scale, temperature, *self.extra(temperature))

    def compiled(self, **options) -> Callable:
        """f(x, scale, temperature), compiled at its first call; what it prints is not shown.

        Of code of its own: graphs belong to the code, and one compiled under other settings would be found there.
        """
        own = types.FunctionType(self.fn.__code__.replace(), self.fn.__globals__)
        fn = torch.compile(own, dynamic=False, **options)

        def call(x, scale, temperature):
            with redirect_stdout(io.StringIO()):
                return fn(x, scale, temperature, *self.extra(temperature))

        return call


@dataclass(frozen=True)
class Cause:
    broken: Form
    fixes: dict[str, Form]


CAUSES = {
    "print": Cause(
        Form(prints),
        {
            "torch.compiler.is_compiling": Form(prints_when_eager),
            "reorderable_logging_functions": Form(prints, config={"reorderable_logging_functions": {print}}),
        },
    ),
    ".item()": Cause(
        Form(reads_an_item),
        {
            "keep the tensor": Form(stays_a_tensor),
            "capture_scalar_outputs": Form(reads_an_item, config={"capture_scalar_outputs": True}),
        },
    ),
    "if on a tensor": Cause(
        Form(branches), {"torch.where": Form(selects), "torch.cond": Form(branches_in_the_graph)}
    ),
    "unsupported call": Cause(Form(parses_settings), {"move the call out": Form(is_given_settings)}),
    "try/except": Cause(Form(catches), {"torch.where": Form(guards_the_zero)}),
    "generator": Cause(
        Form(iterates, extra=lambda t: ((each for each in (t,)),)), {"hand in a list": Form(iterates, lambda t: ([t],))}
    ),
}  # fmt: skip


def fullgraph_says(form: Form, *inputs) -> str:
    """What fullgraph=True does with it: the error with the line that it names, or nothing."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            form.compiled(backend="eager", fullgraph=True)(*inputs)
        except torch._dynamo.exc.Unsupported as error:
            named = re.findall(r'File "(.+)", line (\d+)', str(error))
            mine = [int(line) for file, line in named if Path(file).name == Path(__file__).name]
            where = f", line {mine[-1]}" if mine else ""
            return f"{type(error).__name__}: {str(error).splitlines()[0]}{where}"
    return "compiles"


def explore(h: Harness, *inputs) -> dict[str, dict]:
    """Each cause: what breaks, and every fix in one graph with the right result."""
    table = {}
    for name, cause in CAUSES.items():
        found = cause.broken.found(*inputs)
        after = {}
        for fix, form in cause.fixes.items():
            after[fix] = form.found(*inputs)
            torch.compiler.reset()
            with form.settings():
                h.check(
                    form.compiled(backend="aot_eager", fullgraph=True), reference, *inputs,
                    what=f"{name}: {fix}, in one graph", poison=False, **budget(inputs[0].dtype),
                )  # fmt: skip
        first = next(iter(after.values()))
        table[name] = {
            "graphs": found.graphs,
            "breaks": len(found.breaks),
            "operations in graphs": f"{found.operations} of {first.operations}",
            "lost": found.breaks[-1].lost if found.breaks else "nothing",
            "line": str(found.breaks[-1]) if found.breaks else "none",
            "reason": found.breaks[-1].reason if found.breaks else "none",
            "graphs after": {fix: each.graphs for fix, each in after.items()},
            "breaks after": {fix: len(each.breaks) for fix, each in after.items()},
            "fullgraph=True": fullgraph_says(cause.broken, *inputs),
            "torch._dynamo.explain": explained(cause.broken, *inputs),
        }
        h.fact(name, table[name])
    return table


def explained(form: Form, *inputs) -> str:
    torch.compiler.reset()
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(), logs():
        warnings.simplefilter("ignore")
        told = torch._dynamo.explain(form.fn)(*inputs, *form.extra(inputs[-1]))
    torch.compiler.reset()
    return f"{told.graph_break_count} breaks, {len(told.break_reasons)} reasons"


def budget(dtype: torch.dtype) -> dict:
    return {"terms": 0, "roundings": 8, "acc": dtype}


def what_is_traced(h: Harness, *inputs) -> None:
    """What is often said to break and does not, and what breaks although nothing says so."""
    for name, fn in {
        "try/except around a raise": catches_nothing_that_breaks,
        "a generator made inside": generates_inside,
        ".item() in a generator made inside": reads_items_in_a_generator,
    }.items():
        found = find_breaks(fn, *inputs)
        lost = found.breaks[-1].lost if found.breaks else "nothing"
        h.fact(name, {"graphs": found.graphs, "breaks": len(found.breaks), "lost": lost})

    torch.compiler.reset()
    with watch() as seen, logs(graph_breaks=True) as records:
        list(torch.compile(streams, backend="eager")(*inputs))
    h.fact("a generator function, compiled itself", {"graphs": seen.graphs, "messages": len(records)})

    printed = {}
    for name, form in {"broken": CAUSES["print"].broken, **CAUSES["print"].fixes}.items():
        torch.compiler.reset()
        fn, out = torch.compile(form.fn, backend="eager"), io.StringIO()
        with form.settings(), redirect_stdout(out):
            fn(*inputs), fn(*inputs)
        printed[name] = len(out.getvalue().splitlines())
    h.fact("lines printed by two compiled calls", printed)


def captured_try(h: Harness, x: torch.Tensor, scale: torch.Tensor) -> None:
    """fullgraph=True, which captures .item(), takes the layer with try/except; then comes the value it was for."""
    torch.compiler.reset()
    fn = torch.compile(catches, backend="aot_eager", fullgraph=True)
    zero = x.new_zeros(())
    fn(x, scale, x.new_tensor(2.0))
    want = catches(x, scale, zero)
    try:
        off = (fn(x, scale, zero).double() - want.double()).abs().max().item()
        outcome = f"off by {off:.3g} from eager" if off > 0.1 else "as eager"
    except ZeroDivisionError:
        outcome = "raises the ZeroDivisionError that its own except catches in eager"
    h.fact("try/except captured by fullgraph=True, at temperature 0", outcome)


def names_of_the_api(h: Harness, x: torch.Tensor) -> None:
    """The chapter's names against the supported ones."""

    def asks(x, who):
        return x + 1 if who() else x

    def is_compiling(who: Callable | None) -> str:
        if who is None:
            return "does not exist"
        torch.compiler.reset()
        zero = torch.zeros((), device=x.device)
        return f"eager {bool(asks(zero, who))}, compiled {bool(torch.compile(asks, backend='eager')(zero, who))}"

    def as_a_context(disable: Callable) -> str:
        try:
            with disable():
                return "works"
        except (RuntimeError, TypeError, AttributeError) as error:
            return f"{type(error).__name__}: {str(error)[:90]}"

    @torch.compiler.disable
    def left_alone(x):
        return x * 2

    def calls_it(x):
        return left_alone(x + 1) + 1

    found = find_breaks(calls_it, x)
    torch.compiler.reset()
    h.fact(
        "claim is-compiling-api",
        {
            "torch.compiler.is_compiling()": is_compiling(torch.compiler.is_compiling),
            "torch._dynamo.is_compiling(), private": is_compiling(getattr(torch._dynamo, "is_compiling", None)),
            "with torch._dynamo.disable()": as_a_context(torch._dynamo.disable),
            "with torch.compiler.disable()": as_a_context(torch.compiler.disable),
            "@torch.compiler.disable": f"{found.graphs} graphs, {len(found.breaks)} break",
        },
    )
    torch.compiler.reset()


def kernels(form: Form, *inputs) -> int:
    """How many kernels Inductor writes for it."""
    torch.compiler.reset()
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(), logs():
        warnings.simplefilter("ignore")
        code = generated_code(form.fn, *inputs, *form.extra(inputs[-1]))
    return sum(text.count("= async_compile.") for text in code)


def cost(h: Harness, *inputs, fixes: bool) -> None:
    """The same layer, one call as its caller waits for it: eager, in one graph, and broken by each cause."""
    one_graph = "torch.compile, one graph"
    forms = {one_graph: Form(stays_a_tensor)} | {f"torch.compile, {n}": cause.broken for n, cause in CAUSES.items()}
    options = {}
    if fixes:
        forms["torch.compile, if as torch.where"] = Form(selects)
        forms["torch.compile, if as torch.cond"] = Form(branches_in_the_graph)
        forms["torch.compile, .item() captured"] = Form(reads_an_item)
        options["torch.compile, .item() captured"] = {"fullgraph": True}
    wake_compiler(inputs[0].device)
    torch.compiler.reset()
    printing = "torch eager, print"  # formatting a tensor takes its time, compiled or not

    def prints_unseen(*args):
        with redirect_stdout(io.StringIO()):
            return prints(*args)

    variants = {"torch eager": stays_a_tensor, printing: prints_unseen}
    variants |= {name: form.compiled(**options.get(name, {})) for name, form in forms.items()}
    with warnings.catch_warnings(), logs():
        warnings.simplefilter("ignore")
        table = h.compare(
            variants, reference, *inputs, baseline="torch eager", work=Work(bytes=2 * inputs[0].nbytes),
            title="one layer", whole_calls=True, cold=h.full, **budget(inputs[0].dtype),
        )  # fmt: skip
    if table is None:
        return
    written = {n: kernels(form, *inputs) for n, form in forms.items() if n not in options}
    case = "x".join(map(str, inputs[0].shape))
    h.fact(
        f"kernels that Inductor writes, {case}",
        {n.removeprefix("torch.compile, "): count for n, count in written.items()},
    )
    speedup = {row.variant: row.speedup for row in table.rows}  # over eager, round by round
    if speedup[one_graph] is None:
        return
    ratio = {n.removeprefix("torch.compile, "): speedup[one_graph] / speedup[n] for n in forms if n != one_graph}
    h.say(f"{case}, time of a call over that of one graph: " + ", ".join(f"{n} {r:.2f}x" for n, r in ratio.items()))
    itself = speedup[one_graph] / speedup[printing]
    h.say(f"print: formatting a tensor is in its {ratio['print']:.2f}x; eager with it takes {itself:.2f}x one graph")
    dearest = max((n for n in ratio if n in CAUSES and n != "print"), key=ratio.get)
    against_eager = speedup[f"torch.compile, {dearest}"]
    h.say(
        f"the dearest break but print is {dearest}: {ratio[dearest]:.2f} times one graph, and "
        + (f"still {against_eager:.2f}x eager" if against_eager > 1 else f"slower than eager ({against_eager:.2f}x)")
    )
    if free := [n for n in CAUSES if ratio[n] < 1.02]:
        h.say(f"no cost to be seen at this size: {', '.join(free)}")


def demo(h: Harness) -> None:
    on_gpu = h.machine.mode == "gpu"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    sizes = h.pick(quick=((32, 1024),), full=((32, 1024), (8192, 8192) if on_gpu else (1024, 4096)))
    layers = []
    for rows, width in sizes:
        # scale and temperature positive: then both terms of the sum have one sign, and nothing cancels.
        scale = (h.randn(width).abs() + 0.5).to(dtype)
        layers.append((h.randn(rows, width, dtype=dtype), scale, torch.tensor(1.7, dtype=dtype, device=h.device)))
    if not h.profile:
        table = explore(h, *layers[0])
        what_is_traced(h, *layers[0])
        captured_try(h, *layers[0][:2])
        names_of_the_api(h, layers[0][2])
    for inputs in layers:  # compiling torch.cond takes a CPU as long as all the rest
        cost(h, *inputs, fixes=on_gpu and inputs is layers[0])
    if h.profile:
        return

    h.say("")
    wide = max(map(len, CAUSES))
    h.say(f"{'cause':{wide}}  graphs  breaks  in graphs  left to eager             fixed by: graphs after")
    for name, row in table.items():
        fixes = ", ".join(f"{fix}: {graphs}" for fix, graphs in row["graphs after"].items())
        counts = f"{row['graphs']:6}  {row['breaks']:6}  {row['operations in graphs']:>9}"
        h.say(f"{name:{wide}}  {counts}  {row['lost']:24}  {fixes}")
        h.say(f"{'':{wide}}  {row['line']}")
        h.say(f"{'':{wide}}  {row['reason']}")
    more = [name for name, row in table.items() if row["lost"] in (REST, ALL)]
    loud = [name for name, row in table.items() if ", line " in row["fullgraph=True"]]
    h.say(f"{len(more)} of {len(table)} lose more than the fusion: {', '.join(more) or 'none'}")
    h.say(
        f"fullgraph=True is an error that names the line for {len(loud)} of {len(table)}: {', '.join(loud) or 'none'}"
    )


if __name__ == "__main__":
    run(demo)
