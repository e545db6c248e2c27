"""Accuracy of FP8: what each scaling recipe loses, which data break it, and what it costs.

e4m3 keeps three bits of mantissa, so rounding errors are relative to the value, uniform over one step. A product of two
such operands is off by sqrt(2) times that: 3.8 % (28.5 dB), for magnitudes from the smallest normal number to the
largest. A scale only chooses where that window of about 2**15 lies.

Recipes differ in how many values share a window, hence in what breaks them. A channel, token or group far above the
rest (here 2**16 times or more) pushes the rest below the window, to fewer bits, then zero. An earlier batch's scale
clips what has grown since. One scale per tensor or row cannot fit channels that differ; one per block along K can.

Question   Which scaling recipe keeps an FP8 layer accurate on which data, and what does it cost?
Needs      torch
Wins when  tokens differ, or nothing does: per row. Channels stand out by 2**16, as here: e5m2, whose range is worth a
           bit (up to 2**14: per row, in the study). Groups of channels differ: 1x128. delayed (the previous batch's
           scale): nowhere here. Kernels: fp8_matmul (per row), blockwise_matmul (1x128), microscaling (1x32).
Variants   accuracy_layer.py (the layer), accuracy_data.py (its inputs)
Study      studies/fp8/accuracy.py
Source     goes beyond the chapter; recipes as in torch's scaled products and OCP's MX formats
"""

from __future__ import annotations

import math

from harness import Harness, Table, Work, run

import torch
import torch.nn.functional as F

from examples.common.fp8 import E4M3, E5M2
from examples.fp8.accuracy_data import LEGEND, datasets
from examples.fp8.accuracy_layer import ALL, FP8Linear, Recipe, engine, multiply, product64, quantize, quantize_input

# The blocks of x and of w that share a scale (none: one for all); 2**n: powers of two; delayed: of the previous batch.
RECIPES = {
    "per tensor": Recipe(),
    "per tensor, delayed": Recipe(delayed=True),
    "per tensor, e5m2": Recipe(x_format=E5M2),
    "per row": Recipe((1, ALL), (1, ALL)),
    "1x128 by 128x128": Recipe((1, 128), (128, 128)),
    "1x128 by 128x128, 2**n": Recipe((1, 128), (128, 128), power=True),
    "1x32 by 1x32, 2**n": Recipe((1, 32), (1, 32), power=True),
}
ALL_RECIPES: dict[str, Recipe | None] = {"bfloat16": None} | RECIPES
TIMED = ("per tensor", "per tensor, delayed", "per tensor, e5m2", "per row", "1x128 by 128x128")
CLOSE_DB = 3.0  # of the best recipe: half a bit of a value


def decibel(ratio: torch.Tensor) -> float:
    return round(10 * math.log10(min(max(ratio.item(), 1e-30), 1e30)), 1)


def measure(
    x: torch.Tensor, w: torch.Tensor, recipe: Recipe | None, want: torch.Tensor, before: torch.Tensor | None = None
) -> dict[str, float]:
    """Signal-to-noise ratio of one product against float64's, in dB, and that of its worst token; None: bfloat16."""
    if recipe is None:
        got = F.linear(x, w)
    else:
        q, scale, _ = quantize_input(x, recipe, None if before is None or not recipe.delayed else before.abs().amax())
        got = multiply(q, scale, *quantize(w, recipe.w_block, power=recipe.power), recipe)
    error, signal = (got.double() - want).square(), want.square()
    return {"dB": decibel(signal.sum() / error.sum()), "worst token": decibel((signal.sum(1) / error.sum(1)).min())}


def accumulator(how: str, device: torch.device) -> torch.dtype | float:
    """Hopper's FP8 instruction keeps about 14 bits of a sum; a CPU and a float32 matmul keep float32."""
    return 2.0**-13 if device.type == "cuda" and how != "float32 matmul" else torch.float32


def check_products(h: Harness) -> None:
    """Check the computation, apart from the rounding of its operands, against float64 on the very same values."""
    m, k, n = h.pick(quick=(64, 512, 256), full=(1024, 4096, 2048))
    x, w = h.randn(m, k, dtype=torch.bfloat16), h.randn(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    for name, recipe in RECIPES.items():
        q, scale, _ = quantize_input(x, recipe)
        how = engine(recipe, m, n, k, h.device)
        h.check(
            lambda *args, recipe=recipe: multiply(*args, recipe), lambda *args, recipe=recipe: product64(*args, recipe),
            q, scale, *quantize(w, recipe.w_block, power=recipe.power), what=f"{name}, by {how}", dtype=torch.bfloat16,
            terms=k, poison=False, acc=accumulator(how, h.device),
        )  # fmt: skip


def layers(w: torch.Tensor, m: int) -> dict[str, FP8Linear]:
    """A layer for each recipe of TIMED, named by what multiplies m rows here; for FP8 GEMMs quantizers are compiled."""
    found = {}
    for name in TIMED:
        how = engine(RECIPES[name], m, *w.shape, w.device)
        in_float32 = how == "float32 matmul"
        quantizer = quantize_input if in_float32 else torch.compile(quantize_input, dynamic=False)
        found[f"{how} {name}"] = FP8Linear(w, RECIPES[name], quantizer)
    return found


def price(h: Harness) -> Table:
    """The whole layer, quantizing its input included, against the bfloat16 layer."""
    on_gpu = h.device.type == "cuda"
    m, k, n = h.pick(quick=(1024, 2048, 4096), full=(8192, 4096, 14336)) if on_gpu else (64, 512, 512)
    x, w = h.randn(m, k, dtype=torch.bfloat16), h.randn(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    torch.compiler.reset()
    ours = layers(w, m)
    return h.compare(
        {"torch bfloat16": lambda x: F.linear(x, w)} | ours, lambda x: x.double() @ w.double().t(), x,
        baseline="torch bfloat16", title="linear layer", case=f"{m}x{n}x{k} bfloat16", terms=k, dtype=torch.bfloat16,
        work=Work(flops=2 * m * n * k, dtype=E4M3) if on_gpu else Work(),  # no rate to put beside a CPU's
        references={name: layer.exact for name, layer in ours.items()},
        acc=2.0**-13 if on_gpu else torch.float32, budgets={"torch bfloat16": {"acc": torch.float32}},
        wrong={"without its last K step": lambda x: x[:, :-128].double() @ w[:, :-128].double().t()},
    )  # fmt: skip


def answer(found: dict[str, dict], table: Table) -> str:
    """For each kind of data the fastest recipe whose worst token is within CLOSE_DB of the best one's."""
    speed = {name: row.speedup for name in TIMED for row in table.rows if row.variant.endswith(f" {name}")}
    data_of, worst_tokens = {}, []
    for data in found["per row"]:
        worst = {name: found[name][data]["worst token"] for name in TIMED}
        close = [name for name in TIMED if worst[name] >= max(worst.values()) - CLOSE_DB]
        fastest = max(close, key=speed.get)
        data_of.setdefault(fastest, []).append(data)
        worst_tokens.append(worst[fastest])
    choices = "; ".join(f"{name} ({speed[name]:.2f}x) for {', '.join(data)}" for name, data in data_of.items())
    choices = choices.replace("per tensor, ", "").replace(" by 128x128", "")
    how = "float32 matmul" if any(row.variant.startswith("float32") for row in table.rows) else "speed"
    return (
        f"Take {choices}: fastest within {CLOSE_DB:g} dB of best (worst token {min(worst_tokens):.1f} dB; "
        f"{how} over bf16)."
    )


def demo(h: Harness) -> None:
    found: dict[str, dict[str, dict]] = {name: {} for name in ALL_RECIPES}
    if not h.profile:
        check_products(h)
        m, k, n = h.pick(quick=(128, 1024, 256), full=(4096, 4096, 4096))
        for data, x, w, before in datasets(h.randn, m, k, n):
            want = x.double() @ w.double().t()
            for name, recipe in ALL_RECIPES.items():
                found[name][data] = measure(x, w, recipe, want, before)
        rows = {name: {data: [*one.values()] for data, one in each.items()} for name, each in found.items()}
        h.table(f"signal-to-noise ratio in dB, of the layer / of its worst token ({m}x{n}x{k})", rows)
        h.say(LEGEND)
    table = price(h)
    h.answer(lambda: answer(found, table))


if __name__ == "__main__":
    run(demo)
