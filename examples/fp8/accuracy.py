"""Accuracy: what each scaling recipe loses, where it breaks, and what it costs.

Technique  e4m3 keeps three bits of mantissa, so a value is off by a share of itself, evenly spread over one step, and a
           product of two such operands by sqrt(2) times that: some 3.5 % (29 dB), at every size that lies between the
           smallest normal number and the largest. A scale only chooses where that window of about 2**15 lies. Recipes
           differ in how many values must share a window, hence in what breaks them: a channel, a token or a group far
           above the rest pushes the rest below it, to fewer bits and then to zero; a scale from an earlier batch cuts
           off what has grown since. A scale has to leave the sum over k, so per tensor and per row nothing can help a
           channel; a block along k can. The error is predicted from the spacing of the format at each value, beside
           what is measured, and held to the accuracy of a transformer's logits, and to time.
Question   How accurate is an FP8 layer under each scaling recipe, which data break it, and what does it cost?
Needs      torch
Shapes     x [..., K], weight [N, K] -> [..., N]; scales as harness/fp8.py has them, one for each block of a recipe.
Dtypes     bfloat16 in and out; e4m3 weights; e4m3 or e5m2 activations; float32 scales, powers of two in some recipes
           (rounded up, so that nothing saturates; MX stores them in 8 bits).
Errors     quantize: TypeError for what is not floating point and another float8; ValueError for what is no matrix or is
           empty, and for an amax that is not a tensor of one number or comes with blocks. multiply: TypeError for
           operands that are not float8 and scales not in float32; ValueError for sizes that are 0 or differ, and scales
           of a wrong shape or device or not positive and finite (check_scales=False does not read their values).
           FP8Linear: ValueError for inputs of another width. with_outliers: ValueError for a factor that is no power of
           two, and for channels that the model lacks.
Wins when  per tensor: ranges stay within the window, as plain data and mild outliers do; per row: tokens differ;
           blocks: groups of channels differ; e5m2: range matters more than its missing bit; a stale scale: one pass
           less over the activations is worth its error on data that grows.
Source     the uniform model of rounding errors (Widrow); recipes as in torch's scaled products and OCP's MX formats.
Run        python examples/fp8/accuracy.py
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from harness import Harness, Work, dequantize_reference, fp8_max, quantize_reference, require_fp8, require_scales, run
from harness.fp8 import E4M3, E5M2, FLOOR
from harness.transformer import ONE_BILLION, Config, Transformer

import torch
import torch.nn.functional as F
from torch import nn

ALL = None  # a block's side that is as long as the matrix
EXTREME = 2.0**16  # how far outliers stick out where they are to break something
OUTLIERS = tuple(2.0**e for e in (0, 4, 8, 10, 12, 14, 16, 20))
BROKEN_DB = 3.0  # below what the recipe reaches on plain data
SMALL = Config(width=512, layers=2, heads=8, kv_heads=4, hidden=1024, vocab=1024)


@dataclass(frozen=True)
class Recipe:
    """Blocks of activations and of weights that share a scale, each (rows, columns); ALL for the whole side."""

    x_block: tuple[int | None, int | None] = (ALL, ALL)
    w_block: tuple[int | None, int | None] = (ALL, ALL)
    x_format: torch.dtype = E4M3
    stale: bool = False  # the activations' scale is that of the call before
    power: bool = False  # scales are powers of two


RECIPES = {
    "per tensor": Recipe(),
    "per tensor, stale": Recipe(stale=True),
    "per tensor, e5m2": Recipe(x_format=E5M2),
    "per row": Recipe((1, ALL), (1, ALL)),
    "1x128 by 128x128": Recipe((1, 128), (128, 128)),
    "1x128 by 128x128, 2**n": Recipe((1, 128), (128, 128), power=True),
    "1x32 by 1x32, 2**n": Recipe((1, 32), (1, 32), power=True),
}
ALL_RECIPES: dict[str, Recipe | None] = {"bfloat16": None} | RECIPES
TIMED = ("per tensor", "per tensor, stale", "per tensor, e5m2", "per row", "1x128 by 128x128")


# --- the layer


def sized(block: tuple[int | None, int | None], x: torch.Tensor) -> tuple[int, int]:
    return block[0] or x.shape[0], block[1] or x.shape[1]


def spread(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Each value's own scale; one for all is left to be broadcast."""
    if scale.numel() == 1:
        return scale
    return scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def quantize(
    x: torch.Tensor, block: tuple, dtype: torch.dtype = E4M3, power: bool = False, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x -> q in `dtype` and its scales, as quantize_reference; `amax` replaces x's own: what is above it saturates."""
    if dtype not in (E4M3, E5M2):
        raise TypeError(f"quantize: dtype is {dtype}; pass {E4M3} or {E5M2}")
    if not x.is_floating_point():
        raise TypeError(f"quantize: x is {x.dtype}; pass floating-point values")
    if x.ndim != 2 or not x.numel():
        raise ValueError(f"quantize: x has shape {list(x.shape)}; need a matrix with values, to have a largest one")
    block = sized(block, x)
    if amax is not None and (not isinstance(amax, torch.Tensor) or amax.numel() != 1 or block != tuple(x.shape)):
        got = list(amax.shape) if isinstance(amax, torch.Tensor) else amax
        raise ValueError(f"quantize: amax {got} for blocks of {block}; it is a tensor of one number for all of x")
    most = fp8_max(dtype)
    if amax is not None:
        amax = amax.float().clamp(min=FLOOR).reshape(1, 1)
        top = amax.new_full((), most)
        scale, factor = amax / top, top / amax
    else:
        q, scale = quantize_reference(x, block, dtype)
        if not power:
            return q, scale
        # Any bit of the mantissa carries into the exponent: the next power of two, if it is none already.
        above = (scale.view(torch.int32) + 0x7FFFFF & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isfinite(), above, scale)
        factor = spread(1 / scale, block, x.shape)
    return (x.float() * factor).clamp(-most, most).to(dtype), scale


def quantize_input(x: torch.Tensor, recipe: Recipe, amax: torch.Tensor | None = None):
    """q and scales of a layer's input, and what a stale scale is made of next time."""
    q, scale = quantize(x, recipe.x_block, recipe.x_format, recipe.power, amax)
    if recipe.x_block == (1, 128):  # cuBLASLt reads the scales of one group of all rows together
        scale = scale.t().contiguous().t()
    return q, scale, x.abs().amax() if recipe.stale else None


def engine(recipe: Recipe, m: int, n: int, k: int, device: torch.device) -> str:
    """What multiplies here: "_scaled_mm", "torch scaled_mm" (torch.nn.functional's, for blocks) or "torch emulated"."""
    whole, rows = recipe.x_block == (ALL, ALL), recipe.x_block == (1, ALL)
    # Not a CPU's _scaled_mm: where oneDNN has only its reference, it takes minutes for what takes milliseconds here.
    if device.type != "cuda" or torch.version.cuda is None or m % 16 or n % 16 or k % 16:
        return "torch emulated"
    sm = torch.cuda.get_device_capability(device)
    if (whole and sm >= (8, 9)) or (rows and sm >= (9, 0)):
        return "_scaled_mm"
    cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    hopper = sm[0] == 9 and cuda >= (12, 9) and k % 512 == n % 128 == 0
    return "torch scaled_mm" if hopper and recipe.x_block == (1, 128) else "torch emulated"


def multiply(
    q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, recipe: Recipe,
    check_scales: bool = True,
) -> torch.Tensor:  # fmt: skip
    """(q * scale) @ (weight * weight_scale).T in bfloat16; the sum is in the accumulator of what multiplies."""
    require_fp8("multiply", q=q, weight=weight)
    if q.ndim != 2 or weight.ndim != 2 or q.shape[1] != weight.shape[1] or not q.numel() or not weight.numel():
        raise ValueError(f"multiply: q {list(q.shape)}, weight {list(weight.shape)}; need [M, K] and [N, K], not empty")
    blocks = sized(recipe.x_block, q), sized(recipe.w_block, weight)
    shapes = [
        tuple(-(-size // side) for size, side in zip(t.shape, block, strict=True))
        for t, block in zip((q, weight), blocks, strict=True)
    ]
    require_scales("multiply", q, check_scales, scale=(scale, shapes[:1]), weight_scale=(weight_scale, shapes[1:]))
    how = engine(recipe, q.shape[0], *weight.shape, q.device)
    if how == "torch emulated":
        x, w = (
            t.float() * spread(s, block, t.shape)
            for t, s, block in zip((q, weight), (scale, weight_scale), blocks, strict=True)
        )
        return (x @ w.t()).bfloat16()
    if how == "torch scaled_mm":
        kind = F.ScalingType
        scale = scale if scale.stride(0) == 1 else scale.t().contiguous().t()
        return F.scaled_mm(
            q, weight.t(), scale, kind.BlockWise1x128, weight_scale.t(), kind.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )  # fmt: skip
    if recipe.x_block == (ALL, ALL):
        scale, weight_scale = scale.reshape(()), weight_scale.reshape(())
    else:
        scale, weight_scale = scale.contiguous(), weight_scale.t().contiguous()
    return torch._scaled_mm(q, weight.t(), scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


class FP8Linear(nn.Module):
    """A linear layer without bias, for inference: its weight is quantized once, its input at every call.

    `quantizer` stands in for quantize_input, as a compiled one.
    """

    def __init__(self, weight: torch.Tensor, recipe: Recipe, quantizer: Callable = quantize_input) -> None:
        super().__init__()
        self.recipe, self.quantizer, self.amax = recipe, quantizer, None
        q, scale = quantize(weight.detach(), recipe.w_block, power=recipe.power)
        self.register_buffer("weight", q)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, k = self.weight.shape
        if x.shape[-1] != k:
            raise ValueError(f"FP8Linear: x has shape {list(x.shape)}, the weight {[n, k]}; the last sizes must agree")
        if not x.numel():
            return x.new_empty(*x.shape[:-1], n)
        q, scale, self.amax = self.quantizer(x.reshape(-1, k), self.recipe, self.amax)
        return multiply(q, scale, self.weight, self.scale, self.recipe, check_scales=False).view(*x.shape[:-1], n)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """The float64 product of what forward(x) would multiply now; x is a matrix."""
        q, scale, _ = self.quantizer(x, self.recipe, self.amax)
        return product64(q, scale, self.weight, self.scale, self.recipe)


def product64(q, scale, weight, weight_scale, recipe: Recipe) -> torch.Tensor:
    x = dequantize_reference(q, scale, sized(recipe.x_block, q))
    return x @ dequantize_reference(weight, weight_scale, sized(recipe.w_block, weight)).t()


# --- the theory


def closed_form_db(*mantissa_bits: int) -> float:
    """SNR of a product whose operands keep so many bits: each error even over one step, mantissas even in logarithm.

    The step is 2**-bits of the power of two below a value, whose square is on average 3 / (2 ln 2) times that power's.
    """
    noise = sum(4.0**-bits / 12 / (1.5 / math.log(2)) for bits in mantissa_bits)
    return -10 * math.log10(noise)


def expected_noise(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The squared error that rounding x to `dtype` should leave: step**2 / 12, or all that is lost at either end."""
    info, v = torch.finfo(dtype), (x.double() / scale).abs()
    step = torch.exp2(v.clamp(min=info.smallest_normal).log2().floor()) * info.eps
    noise = step.square() / 12
    noise = torch.where(v <= info.smallest_normal * info.eps / 2, v.square(), noise)  # rounds to zero
    # A block's largest value is the format's largest number, but for the rounding of its scale: it loses nothing.
    noise = torch.where(v > info.max * (1 - 2**-20), (v - info.max).square(), noise)
    return noise * scale.double().square()


def study(
    x: torch.Tensor, w: torch.Tensor, recipe: Recipe | None, want: torch.Tensor, before: torch.Tensor | None = None
) -> dict[str, float]:
    """One recipe (None: bfloat16 as it is) on one pair of operands: its product beside float64's and beside theory.

    `before` are the activations that a stale scale comes from.
    """
    noise = expected_noise(want, want.new_ones(()), torch.bfloat16).sum()  # of the result's own rounding
    lost = {}
    if recipe is None:
        got = F.linear(x, w)
    else:
        q, scale, _ = quantize_input(x, recipe, None if before is None or not recipe.stale else before.abs().amax())
        qw, w_scale = quantize(w, recipe.w_block, power=recipe.power)
        got = multiply(q, scale, qw, w_scale, recipe)
        scale = spread(scale, sized(recipe.x_block, x), x.shape)
        w_scale = spread(w_scale, sized(recipe.w_block, w), w.shape)
        # Errors at different k have independent signs, so their squares add: over all tokens and outputs, by k.
        x_noise, w_noise = (
            expected_noise(t, s, dtype).sum(0) for t, s, dtype in ((x, scale, recipe.x_format), (w, w_scale, E4M3))
        )
        x_power, w_power = (t.double().square().sum(0) for t in (x, w))
        noise += (x_noise * w_power + x_power * w_noise + x_noise * w_noise).sum()
        beyond = (x.double() / scale).abs() > fp8_max(recipe.x_format) * (1 + 2**-20)
        zeros, w_zeros = (q.float() == 0) & (x != 0), (qw.float() == 0) & (w != 0)
        lost = {"flushed": percent(zeros), "saturated": percent(beyond), "weights flushed": percent(w_zeros)}
    error, signal = (got.double() - want).square(), want.square()
    return {
        "dB": decibel(signal.sum() / error.sum()), "predicted": decibel(signal.sum() / noise),
        "worst token": decibel((signal.sum(1) / error.sum(1)).min()),
    } | lost  # fmt: skip


def decibel(ratio: torch.Tensor) -> float:
    return round(10 * math.log10(min(max(ratio.item(), 1e-30), 1e30)), 1)


def percent(which: torch.Tensor) -> float:
    return round(100 * which.double().mean().item(), 2)


# --- the data


def spaced(size: int, every: int) -> slice:
    return slice(every // 3, size, every)


def datasets(h: Harness, m: int, k: int, n: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Names, activations, weights, and the activations of the batch before."""

    def plain() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        half = torch.bfloat16
        return h.randn(m, k, dtype=half), h.randn(n, k, dtype=half, scale=k**-0.5), h.randn(m, k, dtype=half)

    yield "plain", *plain()
    yield "outlier channels", *with_channels(*plain(), spaced(k, 512), EXTREME)
    x, w, before = plain()
    x[spaced(m, 64)] *= EXTREME
    before[spaced(m, 64)] *= EXTREME
    yield "outlier tokens", x, w, before
    x, w, before = plain()
    for each in (x, before):  # Student's t of two degrees of freedom: its variance is infinite
        each /= ((h.randn(m, k).square() + h.randn(m, k).square()) / 2).sqrt().to(each.dtype)
    yield "heavy tails", x, w, before
    small = (torch.arange(k, device=h.device) // 128 % 2).bool()
    yield "small groups", *with_channels(*plain(), small, 2.0**-18)
    x, w, before = plain()
    yield "grown 4x", x, w, before / 4


def with_channels(x: torch.Tensor, w: torch.Tensor, before: torch.Tensor, which, factor: float):
    """The same product with `which` channels of the activations `factor` times as large, and their weights smaller."""
    for each in (x, before):
        each[:, which] *= factor
    w[:, which] /= factor
    return x, w, before


def show_data(h: Harness) -> None:
    m, k, n = h.pick(quick=(128, 1024, 256), full=(4096, 4096, 4096))
    found: dict[str, dict[str, dict]] = {name: {} for name in ALL_RECIPES}
    for data, x, w, before in datasets(h, m, k, n):
        want = x.double() @ w.double().t()
        for name, recipe in ALL_RECIPES.items():
            found[name][data] = study(x, w, recipe, want, before)

    def table(title: str, *columns: str) -> None:
        cells = {
            name: {data: [one[column] for column in columns] for data, one in each.items()}
            for name, each in found.items() if columns[0] in each["plain"]
        }  # fmt: skip
        h.table(f"{title} ({m}x{n}x{k})", cells)

    formats = {"e4m3 by e4m3": (3, 3), "e5m2 by e4m3": (2, 3)}
    h.fact("SNR in theory, dB", {name: round(closed_form_db(*bits), 1) for name, bits in formats.items()})
    table("SNR of the layer, dB: measured / predicted from the spacing at each value", "dB", "predicted")
    table("SNR of its worst token, dB", "worst token")
    table("% flushed to zero: activations / weights", "flushed", "weights flushed")
    cut = {name: {d: one["saturated"] for d, one in found[name].items() if one["saturated"]} for name in RECIPES}
    h.fact("% of activations saturated", {name: each for name, each in cut.items() if each})
    off = {(name, d): abs(one["dB"] - one["predicted"]) for name, each in found.items() for d, one in each.items()}
    worst = max(off, key=off.get)
    plain = found["per tensor"]["plain"]["dB"]
    h.say(f"the prediction is at most {off[worst]:.1f} dB from the measurement ({worst[0]} on {worst[1]})")
    h.say(f"{plain} dB, per tensor on plain data, is a relative error of {10 ** (-plain / 20):.1%}")
    for name in RECIPES:
        base = found[name]["plain"]
        lost = {
            data: min(one["dB"], one["worst token"]) for data, one in found[name].items()
            if any(one[which] < base[which] - BROKEN_DB for which in ("dB", "worst token"))
        }  # fmt: skip
        said = ", ".join(f"{data} (down to {db} dB)" for data, db in lost.items())
        h.say(f"{name}: breaks on {said or 'none of these'}")


def show_outliers(h: Harness) -> None:
    """One channel in 512 further and further above the rest, in a layer that computes the same."""
    m, k, n = h.pick(quick=(128, 1024, 256), full=(2048, 4096, 2048))
    x, w = h.randn(m, k, dtype=torch.bfloat16), h.randn(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    want = x.double() @ w.double().t()  # factors are powers of two, so this is the product at every factor
    found: dict[str, dict[str, float]] = {}
    for name, recipe in ALL_RECIPES.items():
        if recipe is not None and recipe.stale:
            continue  # of the same batch: as per tensor
        for factor in OUTLIERS:
            xs, ws, _ = with_channels(x.clone(), w.clone(), x[:0], spaced(k, 512), factor)
            found.setdefault(name, {})[power_of_two(factor)] = study(xs, ws, recipe, want)["dB"]
    h.table(f"SNR, dB, where one channel in 512 is larger by ({m}x{n}x{k})", found)
    for name, each in found.items():
        first, last = each[power_of_two(OUTLIERS[0])], power_of_two(OUTLIERS[-1])
        broken = [factor for factor, db in each.items() if db < first - BROKEN_DB]
        held = f"holds up to {last}" if not broken else f"breaks at {broken[0]}"
        h.say(f"{name}: {held}; {each[last]} dB are left at {last}")


def power_of_two(factor: float) -> str:
    return f"2**{int(math.log2(factor))}"


def show_exactness(h: Harness) -> None:
    """The computation apart from the rounding of its operands: against float64 of the very values it multiplies."""
    m, k, n = h.pick(quick=(64, 512, 256), full=(1024, 4096, 2048))
    x, w = h.randn(m, k, dtype=torch.bfloat16), h.randn(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    by = {}
    for name, recipe in RECIPES.items():
        q, scale, _ = quantize_input(x, recipe)
        qw, w_scale = quantize(w, recipe.w_block, power=recipe.power)
        by[name] = engine(recipe, m, n, k, h.device)
        h.check(
            lambda *args, recipe=recipe: multiply(*args, recipe),
            lambda *args, recipe=recipe: product64(*args, recipe),
            q, scale, qw, w_scale, what=f"{name}, by {by[name]}", dtype=torch.bfloat16, terms=k, poison=False,
            acc=accumulator(by[name], h.device),
        )  # fmt: skip
    h.fact("computed by", by)


def accumulator(how: str, device: torch.device) -> torch.dtype | float:
    """Hopper's FP8 instruction keeps about 14 bits of a sum; on a CPU, and where products are emulated, float32."""
    return 2.0**-13 if device.type == "cuda" and how != "torch emulated" else torch.float32


# --- a model


def in_fp8(model: Transformer, recipe: Recipe) -> Transformer:
    """A copy whose linear layers compute by `recipe`. The embedding, which is also the output head, stays as it is."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, FP8Linear(child.weight, recipe))
    return model


def with_outliers(model: Transformer, channels: list[int], factor: float) -> Transformer:
    """A copy that computes the same with `channels` of what each norm hands on `factor` times as large."""
    if factor <= 0 or math.frexp(factor)[0] != 0.5:
        raise ValueError(f"with_outliers: factor {factor} is no power of two, so weights would be rounded again")
    if not all(0 <= c < model.config.width for c in channels):
        raise ValueError(f"with_outliers: channels {channels}; the model has 0 to {model.config.width - 1}")
    model = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.blocks:
            for norm, consumer in ((block.attention_norm, block.qkv), (block.mlp_norm, block.gate_up)):
                norm.weight[channels] *= factor
                consumer.weight[:, channels] /= factor
    return model


def compare_logits(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """got [rows, vocab] beside the float64 logits: relative error, divergence of the softmax, same best token."""
    off = ((got.double() - want).square().mean() / want.square().mean()).sqrt().item()
    ours, theirs = got.double().log_softmax(-1), want.log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
    same = (got.argmax(-1) == want.argmax(-1)).double().mean().item()
    return {"relative error": digits(off), "KL, nats": digits(divergence), "same top 1": digits(same)}


def digits(value: float) -> float:
    return float(f"{value:.3g}")


def show_logits(h: Harness) -> None:
    config, rows, tokens = SMALL, 64, 4
    if h.full and h.device.type == "cuda":  # hours on a CPU
        config, rows, tokens = replace(ONE_BILLION, layers=8, vocab=32768), 512, 32
    rows = h.fit(rows, 4 * tokens * 2 * config.hidden * 8)  # the widest activations in float64, a few times
    model = Transformer.random(config, h.device, torch.bfloat16, h.seed)
    before, ids = h.randint(config.vocab, rows, tokens), h.randint(config.vocab, rows, tokens)
    channels = list(range(config.width))[spaced(config.width, 512)]
    with torch.no_grad():
        want, found, plain = model.float64(ids), {}, None
        for factor in (1.0, 2.0**10, EXTREME):
            outliers = with_outliers(model, channels, factor)
            logits = outliers(ids)
            plain = logits if plain is None else plain
            level = found[power_of_two(factor)] = {"bfloat16": compare_logits(logits, want)}
            for name, recipe in RECIPES.items():
                fp8 = in_fp8(outliers, recipe)
                if recipe.stale:
                    fp8(before)
                level[name] = compare_logits(fp8(ids), want)
            which = f"{len(channels)} of {config.width} channels {power_of_two(factor)} times the rest"
            h.table(f"logits of {config.layers} layers, {which}, beside float64", level)
            if factor > 1:
                h.say(f"bfloat16 has the same bits as without outliers: {torch.equal(logits, plain)}")
    h.say(f"{rows} rows of {tokens} tokens; weights as they are initialised, so the softmax is flat and top 1 is close")
    for name in ALL_RECIPES:
        off = [f"{level[name]['relative error']:.1%} at {factor}" for factor, level in found.items()]
        h.say(f"{name}: logits are off by {', '.join(off)}")


# --- the price


def show_price(h: Harness) -> None:
    """The whole layer, quantizing its input included, against the bfloat16 layer."""
    on_gpu = h.device.type == "cuda"
    m, k, n = h.pick(quick=(1024, 2048, 4096), full=(8192, 4096, 14336)) if on_gpu else (64, 512, 512)
    x, w = h.randn(m, k, dtype=torch.bfloat16), h.randn(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    torch.compiler.reset()
    variants: dict[str, Callable] = {"torch bfloat16": lambda x: F.linear(x, w)}
    layers = {}
    for name in TIMED:
        how = engine(RECIPES[name], m, n, k, h.device)
        compiled = on_gpu and how != "torch emulated"
        quantizer = torch.compile(quantize_input, dynamic=False) if compiled else quantize_input
        layers[f"{how} {name}"] = FP8Linear(w, RECIPES[name], quantizer)
    work = Work(flops=2 * m * n * k, dtype=E4M3) if on_gpu else Work()  # no rate to put beside a CPU's
    table = h.compare(
        variants | layers, lambda x: x.double() @ w.double().t(), x, baseline="torch bfloat16", title="linear layer",
        case=f"{m}x{n}x{k} bfloat16", work=work, references={name: layer.exact for name, layer in layers.items()},
        terms=k, acc=2.0**-13 if on_gpu else torch.float32, dtype=torch.bfloat16,
    )  # fmt: skip
    if table is None or not h.timing:
        return
    want = x.double() @ w.double().t()
    rows = {row.variant: row for row in table.rows}
    batch_before = h.randn(m, k, dtype=torch.bfloat16)  # what a stale scale is made of
    for layer in layers.values():
        layer(batch_before)
    facts = {
        name: {
            "ms": digits(rows[name].ms), "x bfloat16": round(rows[name].speedup, 2),
            "SNR, dB": decibel(want.square().sum() / (fn(x).double() - want).square().sum()),
        }
        for name, fn in (variants | layers).items()
    }  # fmt: skip
    h.table(f"price and accuracy of the layer, its input quantized in every call, plain data ({m}x{n}x{k})", facts)
    best = max(layers, key=lambda name: facts[name]["x bfloat16"])
    h.say(
        f"fastest in FP8: {best}, {facts[best]['x bfloat16']}x bfloat16 at {facts[best]['SNR, dB']} dB against "
        f"{facts['torch bfloat16']['SNR, dB']} dB" + ("" if on_gpu else "; on a CPU that says nothing about FP8")
    )


def demo(h: Harness) -> None:
    if not h.profile:
        show_exactness(h)
        show_data(h)
        show_outliers(h)
        show_logits(h)
    show_price(h)


if __name__ == "__main__":
    run(demo)
