"""Dynamic shapes: seven ways to serve batches of 1 to 64, and how many graphs each of them compiles.

torch.compile guards the sizes of its inputs. A size compiled as a constant needs a graph of its own; compiled as a
symbol, one graph serves many sizes. torch.compile(f) begins with a constant and takes a symbol once the size changes
(automatic). dynamic=True, mark_dynamic(x, 0) and mark_unbacked(x, 0) ask for a symbol at once. Padding avoids the
question. A symbol stands for 2 and more, as 1 broadcasts and 0 is empty: 1 gets a graph of its own, except under
mark_unbacked. Past recompile_limit (8) a size without a graph runs in eager, after one warning; here it is lifted.

The model is the gated MLP of a transformer block: the compiler fuses what lies between its matrix products.

Question   How often does a model compile when every batch has another size, and what does each policy cost per call?
Needs      torch
Wins when  (a symbol) sizes differ: leave the default. Constants are for one size: every call searches the guards of all
           graphs, so many of them lose to eager. Padding computes rows that nobody asked for; it is for CUDA graphs,
           which need few sizes. A model of short kernels loses to eager under every policy: the study has one.
Study      studies/compiler/dynamic_shapes.py (a small model, one CUDA graph for each size)
Source     chapter section "Dynamic Shapes".
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
SIZES = range(1, LARGEST + 1)


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
    """The next power of two that holds so many rows, `largest` at most."""
    if not 1 <= rows <= largest:
        raise ValueError(f"bucket: {rows} rows; need 1 to {largest}: split the batch, or raise `largest`")
    return min(1 << (rows - 1).bit_length(), largest)


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x with rows of zeros appended up to `rows`; x itself when it has as many."""
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
    """The sizes at which a graph is compiled, over calls with these batches in order, without a limit; and seconds."""
    sizes, seconds = [], 0.0
    with torch._dynamo.config.patch(recompile_limit=len(SIZES)):
        for x in batches:
            with watch() as seen:
                served.first(x)
            sizes += [len(x)] * seen.graphs
            seconds += sum(frame.seconds for frame in seen.frames)
    return sizes, seconds


def reference_of(model: nn.Module) -> Callable:
    exact = copy.deepcopy(model).double()
    return lambda *batches: tuple(exact(x.double()) for x in batches)


def compile_all(h: Harness, model: nn.Module, batches: list[torch.Tensor], counted: tuple[str, ...]) -> tuple:
    """Every policy, called with all batches: what it serves with, and its row, by name; `counted` ones run in eager."""
    warm_up(h.device)
    served, rows = {}, {}
    for name, (_, _, padded) in POLICIES.items():
        served[name] = Served(model, name, backend="eager" if name in counted else "inductor")
        # Without this Inductor also tries padded matrix products for constant sizes; here padding is a row of its own.
        unpadded = torch._inductor.config.patch(shape_padding=False)
        with h.progress(f"compiling {name}"), unpadded, fresh_cache():
            sizes, seconds = sizes_compiled(served[name], batches)
        computed = sum(padded(len(x)) if padded else len(x) for x in batches)
        rows[name] = {
            "graphs": len(sizes),
            "compiled at": " ".join(map(str, sizes)) if len(sizes) < 8 else f"each of {min(sizes)} to {max(sizes)}",
            "seconds": "not generated" if name in counted else round(seconds, 2),
            "rows per useful row": round(computed / sum(map(len, batches)), 3),
        }
    return served, rows


def time_mix(h: Harness, model: nn.Module, served: dict[str, Served], batches: list, title: str = "mix of batches"):
    """A call for every batch, one after the other: what each policy costs once compiled."""
    variants = {"torch eager": lambda *xs: tuple(model(x) for x in xs)}
    variants |= {f"torch.compile {name}": one.mix for name, one in served.items()}
    # A CPU's library sums in an order that depends on the rows: padded to 64, more than twice eager's error was seen.
    return h.compare(
        variants, reference_of(model), *batches, baseline="torch eager", work=Work(), title=title,
        case=f"{len(batches[0])} to {len(batches[-1])} x {'x'.join(map(str, batches[0].shape[1:]))}",
        max_error_ratio=4.0, timing=Timing(end_to_end=True),
    )  # fmt: skip


def answer(rows: dict[str, dict], table) -> str:
    speed = {
        name: table.over("torch eager", f"torch.compile {name}") for name in rows if f"torch.compile {name}" in table
    }
    each = ", ".join(f"{name} {ratio:.2f}x ({rows[name]['graphs']})" for name, ratio in speed.items())
    fastest = max(speed, key=speed.get)
    default_is_fastest = speed.get("automatic", 0.0) > 0.97 * speed[fastest]
    take = "Leave the default, automatic" if default_is_fastest else f"Take {fastest}"
    behind = "" if speed[fastest] > 1 else ", behind eager"
    return f"Over eager, batches of 1 to {LARGEST} (graphs): {each}. {take}{behind}."


def demo(h: Harness) -> None:
    gpu = h.device.type == "cuda"
    tokens, width = h.pick(quick=(4, 128), full=(128, 1024) if gpu else (8, 256))
    model = GatedMLP(width, 11 * width // 4).to(h.device, torch.bfloat16 if gpu else torch.float32)
    model.requires_grad_(False)
    batches = [h.randn(rows, tokens, width, dtype=model.down.weight.dtype) for rows in SIZES]
    # On two cores a C++ compiler needs a minute for 64 graphs: generated are one policy with a symbol, one that pads.
    counted = h.pick(quick=("static", "automatic", "dynamic=True", "mark_unbacked", "powers of two"), full=())
    served, rows = compile_all(h, model, batches, counted)
    h.table(f"batches of 1 to {LARGEST}", rows)
    for name in counted if not h.profile else ():
        h.check(
            served[name].mix, reference_of(model), *batches, what=f"{name}, 1 to {LARGEST}", poison=False,
            terms=1024, operand_eps=torch.finfo(batches[0].dtype).eps / 2,  # sums over the rounded hidden layer
        )  # fmt: skip
    table = time_mix(h, model, {name: one for name, one in served.items() if name not in counted}, batches)
    h.answer(lambda: answer(rows, table))


if __name__ == "__main__":
    run(demo)
