"""Dynamic shapes: seven ways to serve batches of 1 to 64, and how many graphs each of them compiles.

Technique  torch.compile guards the sizes of its inputs. A size that it takes as a constant is a graph of its own; a
           symbol in its place serves many sizes. Which it is can be left to torch (automatic: constant first, a symbol
           once the size has changed), asked for (dynamic=True, mark_dynamic, mark_unbacked), or avoided by padding, to
           one size or to the next power of two. Beyond config.recompile_limit graphs of one function torch gives up,
           and runs what is not compiled yet in eager, after one warning. A CUDA graph replays fixed addresses and
           sizes: under mode="reduce-overhead" even one graph with symbols is recorded once for each size.
Question   How often does a model compile when every batch has another size, and what does each policy cost per call?
Needs      torch
Shapes     x [rows, width], rows 1 to 64 -> the same shape. The model is one MLP: Linear, GELU, Linear.
Dtypes     float32 on a CPU, bfloat16 on a GPU.
Errors     bucket() and pad_rows() raise ValueError for rows below 1 or above the largest size, with the fix. torch's:
           ConstraintViolationError for a marked size that the code makes a constant, UserError for a branch on an
           unbacked size, FailOnRecompileLimitHit where that setting, or fullgraph=True, forbids falling back.
Wins when  sizes differ and compiling costs more than what constants gain: nearly always. Constants win for one size,
           padding for a few; a symbol that must also hold 1 (mark_unbacked) is compiled knowing the least.
Source     chapter section "Dynamic Shapes".
Run        python examples/compiler/dynamic_shapes.py
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from harness import Harness, Work, run
from harness.compiler import cuda_graphs, empty_cache, guards, logs, watch

import torch
import torch.nn.functional as F
from torch import nn

LARGEST = 64
SIZES = range(1, LARGEST + 1)


def bucket(rows: int, largest: int = LARGEST) -> int:
    """The next power of two that holds so many rows, `largest` at most."""
    if not 1 <= rows <= largest:
        raise ValueError(f"bucket: {rows} rows; need 1 to {largest}: split the batch, or raise `largest`")
    return min(1 << (rows - 1).bit_length(), largest)


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x with rows of zeros appended up to `rows`; x itself when it has as many."""
    if x.ndim < 1 or not 1 <= len(x) <= rows:
        raise ValueError(f"pad_rows: shape {tuple(x.shape)} into {rows} rows; split the batch, or use a larger bucket")
    return x if len(x) == rows else F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows - len(x)))


@dataclass(frozen=True)
class Policy:
    """How one model serves many sizes: options of torch.compile, a mark on the inputs that compile it, padding."""

    options: dict = field(default_factory=dict)
    mark: str | None = None
    rows: Callable[[int], int] = lambda rows: rows


POLICIES = {
    "static": Policy({"dynamic": False}),
    "automatic": Policy(),
    "dynamic=True": Policy({"dynamic": True}),
    "mark_dynamic": Policy(mark="mark_dynamic"),
    "mark_unbacked": Policy(mark="mark_unbacked"),
    "padded to 64": Policy({"dynamic": False}, rows=lambda rows: LARGEST),
    "powers of two": Policy({"dynamic": False}, rows=bucket),
}


class Served:
    """A model compiled under one policy, as code of its own.

    Graphs, the limit on their number, and which sizes have been seen belong to the Python code and not to the call of
    torch.compile: policies that share code would share all three.
    """

    def __init__(self, model: nn.Module, name: str, policy: Policy, **options) -> None:
        def forward(x):
            return model(x)

        forward.__code__ = forward.__code__.replace(co_name=name.replace(" ", "_"))
        self.code, self.policy = forward, policy
        self.compiled = torch.compile(forward, **policy.options, **options)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """A call that may compile. A mark is needed there only: without it, later calls pass the guards as well."""
        x = pad_rows(x, self.policy.rows(len(x))).detach()  # an alias, so that the caller's tensor stays unmarked
        if self.policy.mark:
            getattr(torch._dynamo.decorators, self.policy.mark)(x, 0)
        return self.compiled(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.policy.rows(len(x))
        return self.compiled(x) if rows == len(x) else self.compiled(pad_rows(x, rows))[: len(x)]

    def mix(self, *batches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self(x) for x in batches)


class Counting:
    """A backend that counts the graphs it is handed and, if asked to, their runs; another one compiles them."""

    def __init__(self, backend: str = "eager", *, runs: bool = False) -> None:
        self.compile, self.graphs, self.runs = torch._dynamo.lookup_backend(backend), 0, 0
        self.count_runs = runs

    def __call__(self, graph: torch.fx.GraphModule, inputs) -> Callable:
        self.graphs += 1
        compiled = self.compile(graph, inputs)

        def call(*args):
            self.runs += 1
            return compiled(*args)

        return call if self.count_runs else compiled


def sizes_compiled(served: Served, batches, counting: Counting) -> list[int]:
    """The sizes at which a backend was handed a graph, over calls with these batches in order, without a limit."""
    sizes = []
    with torch._dynamo.config.patch(recompile_limit=len(SIZES)):
        for x in batches:
            before = counting.graphs
            served.first(x)
            sizes += [len(x)] * (counting.graphs - before)
    return sizes


def count_orders(h: Harness, model: nn.Module, batches) -> None:
    """Graphs by the order of sizes. Dynamo decides that alone, so nothing is generated."""
    for order, sizes in {"2 to 64": batches[1:], "64 down to 1": batches[::-1]}.items():
        torch.compiler.reset()
        counts = {}
        for name in ("automatic", "dynamic=True", "mark_dynamic", "mark_unbacked"):
            counting = Counting()
            served = Served(model, name, POLICIES[name], backend=counting)
            counts[name] = len(sizes_compiled(served, sizes, counting))
        h.fact(f"graphs for batches of {order}", counts)
    torch.compiler.reset()


def compile_all(h: Harness, model: nn.Module, batches) -> tuple[dict[str, Served], dict[str, Served]]:
    """Every policy over batches of 1 to 64: (what Inductor compiled, those whose graphs are only counted)."""
    # On two cores a C++ compiler needs a minute for 64 graphs. What the others add is in mark_dynamic too: one symbol.
    only_counted = h.pick(quick=("static", "automatic", "dynamic=True", "mark_unbacked"), full=())
    with empty_cache():  # once before any is timed: the first compilation starts the backend's own machinery
        Served(model, "warm up", Policy()).compiled(batches[0])
    served, counted, sizes, table = {}, {}, {}, {}
    for name, policy in POLICIES.items():
        counting = Counting("eager" if name in only_counted else "inductor")
        one = Served(model, name, policy, backend=counting)
        # Of static sizes Inductor would time padded matrix products as well. Padding is a row of its own here.
        unpadded = torch._inductor.config.patch(shape_padding=False)
        cache = nullcontext() if name in only_counted else empty_cache()
        with h.progress(f"compiling {name}"), unpadded, cache, watch() as seen:
            sizes[name] = sizes_compiled(one, batches, counting)
        (counted if name in only_counted else served)[name] = one
        computed = sum(policy.rows(len(x)) for x in batches)
        table[name] = {
            "graphs": len(sizes[name]),
            "compiled at": listed(sizes[name]),
            "seconds": None if name in only_counted else round(sum(frame.seconds for frame in seen.frames), 2),
            "rows per useful row": round(computed / sum(map(len, batches)), 3),
        }
    if h.profile:
        return served, counted
    h.fact("batches of 1 to 64", table)
    if only_counted:
        h.say(f"only counted here, backend=eager: {', '.join(only_counted)}; --full generates and times them too")
    graphs = {name: len(found) for name, found in sizes.items()}
    h.fact("graphs for batches of 1 to 64", graphs)
    h.fact(
        "verdict dynamic-recompiles",
        f"{'false' if graphs['automatic'] < len(batches) else 'true'} by default: {graphs['automatic']} graphs for "
        f"{len(batches)} sizes; with dynamic=False {graphs['static']}, or as many as the recompile limit",
    )
    explain_one(h, served | counted)
    return served, counted


def listed(sizes: list[int]) -> str:
    return " ".join(map(str, sizes)) if len(sizes) < 8 else f"each of {min(sizes)} to {max(sizes)}"


def rows_guards(fn: Callable) -> list[str]:
    """The guards on the number of rows, of each compiled form of fn, the newest first."""
    found = []
    for form in guards(fn):
        symbolic = [line for line in form if ".size()[0]" in line]
        constant = [line.split("size=[")[1].split(",")[0].split("]")[0] for line in form if "check_tensor" in line]
        told = [line.split("  #")[0].removeprefix("LAMBDA_GUARD: ") for line in symbolic]
        found.append("; ".join(told) or f"rows == {constant[0]}")
    return found


def explain_one(h: Harness, served: dict[str, Served]) -> None:
    """Why a batch of 1 has a graph of its own, by the guards on the number of rows."""
    found = {name: rows_guards(served[name].code) for name in ("automatic", "mark_dynamic", "mark_unbacked")}
    h.fact("guards on the rows", found)
    if any("2 <=" in guard for guard in found["mark_dynamic"]):
        h.say(
            "0/1 specialization: 1 broadcasts and 0 is empty, so a symbol stands for what its guard says, "
            f"{found['mark_dynamic'][0]}, and 1 is compiled apart; mark_unbacked: {found['mark_unbacked'][0]}"
        )


def recompile_limit(h: Harness, batches) -> None:
    """What happens at the limit: eager for good, one warning, and two settings that raise instead."""

    def scale(x):
        return torch.sin(x) + 1

    torch.compiler.reset()
    counting = Counting(runs=True)
    compiled = torch.compile(scale, backend=counting, dynamic=False)
    runs = []
    with logs() as lines:
        for _ in range(2):
            for x in batches:
                compiled(x)
            runs.append(counting.runs - sum(runs))
    warnings = [text for _, text in lines if "recompile_limit" in text]
    h.fact(
        "static, at the default limit",
        {
            "limit": torch._dynamo.config.recompile_limit, "graphs": counting.graphs, "calls": len(batches),
            "in eager": len(batches) - runs[0], "in eager, second time": len(batches) - runs[1],
            "warnings": len(warnings),
        },
    )  # fmt: skip
    for line in "\n".join(warnings).splitlines()[:3]:
        h.say(f"  {line.split(' (/')[0].strip()}")
    raised = {}
    for name, options in {"fail_on_recompile_limit_hit": {}, "fullgraph=True": {"fullgraph": True}}.items():
        torch.compiler.reset()
        compiled = torch.compile(scale, backend="eager", dynamic=False, **options)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=not options), logs():
            for x in batches:
                try:
                    compiled(x)
                except torch._dynamo.exc.FailOnRecompileLimitHit as error:
                    raised[name] = {"at rows": len(x), "error": f"{type(error).__name__}: {error}".splitlines()[0]}
                    break
    h.fact("how to be told of the limit", raised)
    torch.compiler.reset()


def guard_search(h: Harness) -> None:
    """What many graphs cost a call: their guards are tried one after the other, the graph used last first."""

    def scale(x):
        return torch.sin(x) + 1

    compiled = torch.compile(scale, backend="eager", dynamic=False)
    batches = [torch.ones(rows, 1) for rows in SIZES]  # on the CPU: what is timed is the host's search
    with torch._dynamo.config.patch(recompile_limit=len(SIZES)):
        for x in batches:
            compiled(x)
    times = {}
    for what, calls in {"in turn": batches, "one size again and again": [batches[0]] * len(batches)}.items():
        passes = []
        for _ in range(20):
            started = time.perf_counter()
            for x in calls:
                compiled(x)
            passes.append((time.perf_counter() - started) / len(calls))
        times[what] = round(1e6 * statistics.median(passes), 1)
    h.fact(f"us a call on the host, {len(batches)} static graphs", times)
    torch.compiler.reset()


def refused_marks(h: Harness) -> None:
    """Code that needs to know the size: a mark makes that an error, a guard, or is dropped without a word."""

    def four_rows(x):
        return x.view(4, 2) + 1

    def other_above_4(x):
        return x * 2 if len(x) > 4 else x

    outcomes = {}
    for fn in (four_rows, other_above_4):
        for mark in ("mark_dynamic", "maybe_mark_dynamic", "mark_unbacked"):
            torch.compiler.reset()
            x = torch.ones(8)
            getattr(torch._dynamo.decorators, mark)(x, 0)
            try:
                with logs():  # torch logs thirty lines beside the error
                    torch.compile(fn, backend="eager", fullgraph=True)(x)
                outcomes[f"{mark}, {fn.__name__}"] = f"compiled for {rows_guards(fn)[0]}"
            except RuntimeError as error:
                told = [line for line in str(error).splitlines() if "specialized it" in line or "guard on" in line]
                outcomes[f"{mark}, {fn.__name__}"] = f"{type(error).__name__}: {(told or [str(error)])[0].strip(' -')}"
    h.fact("a mark on code that needs the size", outcomes)
    torch.compiler.reset()


def time_mix(h: Harness, model: nn.Module, served: dict[str, Served], batches, title: str) -> None:
    """A call for every batch, one after the other: what each policy costs once compiled."""
    variants = {"torch eager": lambda *xs: tuple(model(x) for x in xs)}
    variants |= {f"torch.compile {name}": one.mix for name, one in served.items()}
    # A CPU's library sums in an order that depends on the rows: padded to 64, more than twice eager's error was seen.
    with watch() as seen:
        table = h.compare(
            variants, reference_of(model), *batches, baseline="torch eager", work=Work(), whole_calls=True, title=title,
            case=f"{len(batches[0])} to {len(batches[-1])} x {batches[0].shape[1]}", beside=4.0,
        )  # fmt: skip
    if not h.profile:
        h.fact(f"{title}: graphs compiled while it was timed", seen.graphs)
    if table and table.rows[0].ms:
        us = {row.variant.removeprefix("torch.compile "): 1000 * row.ms / len(batches) for row in table.rows}
        h.say("us a call: " + ", ".join(f"{name} {us[name]:.1f}" for name in sorted(us, key=us.get)))


def budget(dtype: torch.dtype) -> dict:
    """Of sums of some hundred terms in float32, of a hidden layer that was rounded to `dtype`."""
    return {"terms": 1024, "operand_eps": torch.finfo(dtype).eps / 2}


def reference_of(model: nn.Module) -> Callable:
    exact = copy.deepcopy(model).double()
    return lambda *batches: tuple(exact(x.double()) for x in batches)


CUDA_GRAPHS = {"mode": "reduce-overhead"}
SKIPPING = {"options": {"triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": True}}
RECORDED = {
    "marked, no CUDA graphs": ("mark_dynamic", {}),
    "marked, reduce-overhead": ("mark_dynamic", CUDA_GRAPHS),
    "marked, cudagraph_skip_dynamic_graphs": ("mark_dynamic", SKIPPING),
    "powers of two, reduce-overhead": ("powers of two", CUDA_GRAPHS),
}


class Replayed(Served):
    """Under CUDA graphs an output lives until the next call, so that each is copied out."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x).clone()


def device_mib() -> tuple[float, float]:
    """(memory in use on the GPU, that of torch's allocator), in MiB, once unused blocks are given back."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20, torch.cuda.memory_reserved() / 2**20


def recorded(model: nn.Module, name: str, batches) -> tuple[Served, dict]:
    """A policy called until everything that it records is recorded, and what that took.

    A size that is new to a graph runs as a warm-up the first time and is recorded the second time.
    """
    policy, options = RECORDED[name]
    served = (Replayed if options else Served)(model, f"recorded {name}", POLICIES[policy], **options)
    before, seconds = cuda_graphs(), []
    shown = torch._inductor.config.patch(shape_padding=False)  # as in compile_all
    with shown, logs(cudagraphs=True) as lines, watch() as seen:
        for _ in range(3):
            served.first(batches[0])
        of_one, used = cuda_graphs() - before, device_mib()
        for _ in range(3):
            started = time.perf_counter()
            for x in batches:
                served.first(x)
            torch.cuda.synchronize()
            seconds.append(round(time.perf_counter() - started, 4))
        of_all = cuda_graphs() - before
    grown = [round(now - then, 1) for now, then in zip(device_mib(), used, strict=True)]
    told = [text for _, text in lines if "distinct" in text]
    return served, {
        "graphs compiled": seen.graphs, "CUDA graphs of one size": of_one, "CUDA graphs": of_all,
        "MiB more than for one size": grown[0], "of it in torch's allocator": grown[1],
        "warnings": [text.split(". Please")[0] for text in told], "seconds of 3 passes": seconds,
    }  # fmt: skip


def cuda_graphs_over_sizes(h: Harness, model: nn.Module, batches) -> None:
    """One compiled graph, and a CUDA graph for each size that it meets: their number, memory, time, alternatives."""
    if h.device.type != "cuda":
        h.say("CUDA graphs with dynamic shapes: skipped, needs a GPU")
        return
    torch.compiler.reset()
    served, table = {}, {}
    for name in RECORDED:
        with h.progress(f"recording {name}"):
            served[name], table[name] = recorded(model, name, batches)
    if not h.profile:
        what = f"CUDA graphs for batches of {len(batches[0])} to {len(batches[-1])}"
        keys = list(table[name])[: None if h.timing else -1]
        h.fact(what, {name: {key: row[key] for key in keys} for name, row in table.items()})
        recording_verdict(h, table, len(batches))
    time_mix(h, model, served, batches, "mix under CUDA graphs")


def recording_verdict(h: Harness, table: dict[str, dict], sizes: int) -> None:
    """On the claim that dynamic shapes disable CUDA graphs."""
    marked, skipping, padded = (table[name] for name in list(RECORDED)[1:])
    number, more = "CUDA graphs", "MiB more than for one size"
    h.fact(
        "verdict dynamic-cudagraphs",
        f"{'false' if marked[number] else 'true'}: {sizes} sizes gave {marked['graphs compiled']} compiled graph and "
        f"{marked[number]} CUDA graphs, {marked[more]} MiB; padded to powers of two {padded[number]}, "
        f"{padded[more]} MiB; with cudagraph_skip_dynamic_graphs {skipping[number]}",
    )
    _, recording, replaying = marked["seconds of 3 passes"]
    if h.timing and marked[number] > 1:
        each = (recording - replaying) / (marked[number] - marked["CUDA graphs of one size"])
        h.say(f"recording took {1000 * each:.1f} ms a size, at the second call of each; then a pass took {replaying} s")


def demo(h: Harness) -> None:
    gpu = h.device.type == "cuda"
    width, dtype = h.pick(quick=128, full=256), torch.bfloat16 if gpu else torch.float32
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    model = model.to(h.device, dtype).requires_grad_(False)
    batches = [h.randn(rows, width, dtype=dtype) for rows in SIZES]

    if not h.profile:
        count_orders(h, model, batches)
        recompile_limit(h, batches)
        refused_marks(h)
        if h.timing:
            guard_search(h)
    served, counted = compile_all(h, model, batches)
    for name, one in counted.items():
        h.check(one.mix, reference_of(model), *batches, what=f"{name}, 1 to 64", poison=False, **budget(dtype))
    time_mix(h, model, served, batches, "mix of batches")
    cuda_graphs_over_sizes(h, model, batches[1:])


if __name__ == "__main__":
    run(demo)
