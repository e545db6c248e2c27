"""Dynamic shapes: seven ways to serve batches of 1 to 64 rows, how many graphs each compiles, and what a call costs.

torch.compile guards the sizes of its inputs. A size compiled as a constant needs a graph of its own; compiled as a
symbol, one graph serves many sizes. torch.compile(f) begins with a constant and takes a symbol once the size changes
(automatic): two graphs; not one for every shape, as the chapter's "Pitfall 2: Dynamic Shapes" says, nor one for all, as
"How torch.compile Works Internally" does. dynamic=True, and mark_dynamic(x, 0) and mark_unbacked(x, 0) of
torch._dynamo.decorators, start with a symbol. Size 1 gets a graph of its own, because it broadcasts (automatic's third,
unless it comes first, as here), except under mark_unbacked, whose kernels are slower. Under static (dynamic=False) each
size is compiled. Two policies pad with rows of zeros, so that a few constants serve all: "padded to 64" pads every
batch to 64 rows, "powers of two" to the next power of two. Past recompile_limit (8) a size without a graph runs in
eager, after one warning; here the limit is lifted.

The model is the gated MLP of a transformer block, once with many tokens a row (long kernels: the GPU is the limit) and
once with one (short kernels: the host is).

Question   How often does a model compile when every batch has another size, and what does each policy cost per call?
Needs      torch
Wins when  kernels are long enough to hide guards. If each call still compiles, what changes is a Python value and not a
           size: see recompilation. A graph for each size (static) gains nothing over mark_dynamic; with 10 graphs a
           call may check the guards of all of them. Padding computes rows that nobody asked for, but needs few CUDA
           graphs. On the recorded host, CUDA graphs do not beat eager with short kernels either (study).
Study      studies/compiler/dynamic_shapes.py (one CUDA graph for each size)
Source     chapter sections "Dynamic Shapes", "2. Handle Dynamic Shapes", "Pitfall 2: Dynamic Shapes" and "How
           torch.compile Works Internally".
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from harness import Harness, Timing, Work, run

import torch
import torch.nn.functional as F
from torch import nn

from compile_inspect import fresh_cache, own_code, warm_up, watch

LARGEST = 64
LONG, SHORT = "long kernels", "short"
MANY = "10 sizes"  # more than recompile_limit
MIXES = {"1 size": (48,), "4 sizes": (12, 24, 40, 56), MANY: (1, 8, 12, 16, 24, 32, 40, 48, 56, 64)}
EAGER, AUTOMATIC = "torch eager", "torch.compile automatic"
ONE = ("static", "mark_dynamic", "padded to 64")  # for one size: there automatic compiles what static does
LONG_ALONE = ("static", "dynamic=True", "mark_unbacked", "powers of two")  # with short kernels eager is ahead of all


class GatedMLP(nn.Module):
    """x [rows, tokens, width] -> x + down(silu(gate) * up), of x normalized."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.gate_up = nn.RMSNorm(width), nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def bucket(rows: int, largest: int = LARGEST) -> int:
    """The smallest power of two >= rows, but at most `largest`. Raises ValueError unless rows is 1 to `largest`."""
    if not 1 <= rows <= largest:
        raise ValueError(f"bucket: {rows} rows; need 1 to {largest}: split the batch, or raise `largest`")
    return min(1 << (rows - 1).bit_length(), largest)


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x, zero rows appended up to `rows`, or x itself. Raises ValueError for a scalar, 0 rows or more than `rows`."""
    if x.ndim < 1 or not 1 <= len(x) <= rows:
        raise ValueError(f"pad_rows: shape {tuple(x.shape)} into {rows} rows; split the batch, or use a larger bucket")
    return x if len(x) == rows else F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows - len(x)))


POLICIES = {  # options of torch.compile; the mark on the inputs that compile it; the rows that so many are padded to
    "static": ({"dynamic": False}, None, None),
    "automatic": ({}, None, None),
    "dynamic=True": ({"dynamic": True}, None, None),
    "mark_dynamic": ({}, "mark_dynamic", None),
    "mark_unbacked": ({}, "mark_unbacked", None),
    "padded to 64": ({"dynamic": False}, None, lambda rows: LARGEST),
    "powers of two": ({"dynamic": False}, None, bucket),
}


class Served:
    """A model compiled under one policy, as code of its own: policies that share code would share what they learn."""

    def __init__(self, model: nn.Module, name: str, **options) -> None:
        given, self.mark, self.rows = POLICIES[name]
        self.code = own_code(lambda x: model(x))
        self.compiled = torch.compile(self.code, **given, **options)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """A call that may compile. A mark is needed there only: without it, later calls pass the guards as well."""
        x = (pad_rows(x, self.rows(len(x))) if self.rows else x).detach()  # the caller's tensor stays unmarked
        if self.mark:
            getattr(torch._dynamo.decorators, self.mark)(x, 0)
        return self.compiled(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows(len(x)) if self.rows else len(x)
        return self.compiled(x) if rows == len(x) else self.compiled(pad_rows(x, rows))[: len(x)]

    def mix(self, *batches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self(x) for x in batches)


def sizes_compiled(served: Served, batches) -> tuple[list[int], float]:
    """The sizes at which a graph is compiled, over calls with these batches in order and no limit; and seconds."""
    sizes, seconds = [], 0.0
    with torch._dynamo.config.patch(recompile_limit=LARGEST):
        for x in batches:
            with watch() as seen:
                served.first(x)
            sizes += [len(x)] * seen.graphs
            seconds += sum(frame.seconds for frame in seen.frames)
    return sizes, seconds


def reference_of(model: nn.Module) -> Callable:
    exact = copy.deepcopy(model).double()
    return lambda *batches: tuple(exact(x.double()) for x in batches)


def compile_all(h: Harness, model: nn.Module, batches: list[torch.Tensor], counted, names=tuple(POLICIES)) -> tuple:
    """(Served, table row) of each policy, by name, after all batches; `counted` ones are captured but run in eager."""
    warm_up(h.device)
    served, rows = {}, {}
    for name in names:
        padded = POLICIES[name][2]
        served[name] = Served(model, name, backend="eager" if name in counted else "inductor")
        # Without this Inductor also tries padded matrix products for constant sizes; here padding is a row of its own.
        unpadded = torch._inductor.config.patch(shape_padding=False)
        with h.progress(f"compiling {name}"), unpadded, fresh_cache():
            sizes, seconds = sizes_compiled(served[name], batches)
        computed = sum(padded(len(x)) if padded else len(x) for x in batches)
        rows[name] = {
            "graphs": len(sizes), "compiled at": " ".join(map(str, sizes)),
            "seconds": "not generated" if name in counted else round(seconds, 2),
            "rows per useful row": round(computed / sum(map(len, batches)), 3),
        }  # fmt: skip
    return served, rows


def time_mix(h: Harness, model: nn.Module, served: dict[str, Served], batches: list, title: str, case: str):
    """A call for every batch, one after the other: what each policy costs once compiled."""
    variants = {EAGER: lambda *xs: tuple(model(x) for x in xs)}
    variants |= {f"torch.compile {name}": one.mix for name, one in served.items()}
    # A CPU's library sums in an order that depends on the rows: padded to 64, more than twice eager's error was seen.
    return h.compare(
        variants, reference_of(model), *batches, baseline=EAGER, work=Work(), title=title, case=case,
        max_error_ratio=4.0, timing=Timing(end_to_end=True),
    )  # fmt: skip


def fastest(table) -> str:
    """The policy to take: the default, unless another one is faster by more than noise."""
    speeds = {row.variant.removeprefix("torch.compile "): row.speedup for row in table.rows if row.variant != EAGER}
    first = max(speeds, key=speeds.get)
    return "automatic" if speeds.get("automatic", 0.0) > 0.97 * speeds[first] else first


def answer(graphs: int, tables: dict[str, dict]) -> str:
    best = {mix: fastest(table) for mix, table in reversed(tables[LONG].items())}
    if best.get("1 size") == "static":
        best["1 size"] = "automatic"  # which compiles the first size as that constant
    mixes = {name: " and ".join(mix for mix in best if best[mix] == name) for name in best.values()}
    take = f"Long kernels: {', '.join(f'{name} for {several}' for name, several in mixes.items())}. The default:"
    if {*best.values()} == {"automatic"}:
        take = "Leave the default (automatic):"
    default = [f"{kernels.split()[0]} {each[MANY].by_host(EAGER, AUTOMATIC)}" for kernels, each in tables.items()]
    speeds = {row.variant.removeprefix("torch.compile "): row.speedup for row in tables[LONG][MANY].rows}
    padded = max(speeds[name] for name, (_, _, rows) in POLICIES.items() if rows and name in speeds)
    default[0] += f", padded at most {padded:.2f}x"
    # Within the spread of uneven times nothing is a gain.
    gains = [row.p80 < table[EAGER].p20 for table in tables.get(SHORT, {}).values() for row in table.rows[1:]]
    gained, n = sum(gains), len(gains)
    behind = "" if gained == n else f" (faster than eager in {gained} of {n} rows)" if gained else ": use eager"
    return f"{take} {graphs} graphs for {MANY}. Over eager: {'; '.join(default)}{behind}."


def one_model(h: Harness, kernels: str, tokens: int, width: int, counted: tuple[str, ...]) -> tuple[dict, dict]:
    """(the row of each policy, a table for each mix) of a model whose rows are `tokens` x `width`."""
    model = GatedMLP(width, 11 * width // 4).to(h.device, torch.bfloat16 if h.device.type == "cuda" else torch.float32)
    model.requires_grad_(False)
    batches = {rows: h.randn(rows, tokens, width, dtype=model.down.weight.dtype) for rows in MIXES[MANY]}
    names = [name for name in POLICIES if kernels == LONG or name not in LONG_ALONE]
    served, rows = compile_all(h, model, [*batches.values()], counted, names)
    h.table(f"{MANY}, x {tokens}x{width}", rows)
    for name in counted if not h.profile else ():
        h.check(
            served[name].mix, reference_of(model), *batches.values(), what=f"{name}, {MANY}", poison=False,
            terms=1024, operand_eps=torch.finfo(model.down.weight.dtype).eps / 2,  # sums over the rounded hidden layer
        )  # fmt: skip
    tables = {}
    for mix in h.pick(quick=(MANY,), full=MIXES if kernels == LONG else [*MIXES][1:]):
        ways = {name: served[name] for name in names if name not in counted and (name in ONE or mix != "1 size")}
        case = f"{kernels.split()[0]} {tokens}x{width}, {mix}"
        tables[mix] = time_mix(h, model, ways, [batches[n] for n in MIXES[mix]], "dynamic_shapes", case)
    return rows, tables


def demo(h: Harness) -> None:
    # A C++ compiler on two cores needs seconds a graph: code is generated only for a symbolic and a padded policy.
    counted = h.pick(quick=("static", "dynamic=True", "mark_dynamic", "mark_unbacked", "powers of two"), full=())
    gpu = h.device.type == "cuda"
    full = {LONG: (1024, 512), SHORT: (1, 256)} if gpu else {LONG: (8, 256), SHORT: (1, 64)}
    sizes = h.pick(quick={LONG: (4, 128)}, full=full)
    found = {kernels: one_model(h, kernels, *size, counted) for kernels, size in sizes.items()}
    graphs, shapes = found[LONG][0]["automatic"]["graphs"], len(MIXES[MANY])
    h.say(
        f"{shapes} sizes, {graphs} graphs by default: that every new shape is compiled is "
        f"{'false' if graphs < shapes else 'true'}, that the first compilation serves all of them is "
        f"{'false' if graphs > 1 else 'true'}"
    )
    h.answer(lambda: answer(graphs, {kernels: tables for kernels, (_, tables) in found.items()}))


if __name__ == "__main__":
    run(demo)
