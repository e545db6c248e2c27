"""Study of llama_block: where the time of the block goes, what each product gains, what each choice is worth.

1. The time of each part, by torch.profiler, and its lower bound: FLOPs and bytes at the measured ceilings. Parts are
   products, attention, and what lies between them, quantizers included. What lies between can beat its bound where a
   product's kernel does part of it: our SwiGLU.
2. Each of the twelve products (four Linears; forward, dx, dw) in bfloat16 and in FP8, and what its operands cost to
   quantize, by kernels of their own.
3. Every choice of the lesson: torch.compile's modes (prefill), which of our kernels it is given, whose FP8 GEMM it
   calls, quantizers fused or not, the gradients of weights in FP8 or in bfloat16.
4. Other sizes: 1x2048 tokens, where fewer of the GPU's SMs have work, and 4x8192, where attention weighs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

from harness import Harness

import torch
from torch.profiler import ProfilerActivity, profile

from compile_inspect import own_code
from examples.common.compiled import MODES
from examples.common.fp8 import E4M3
from examples.common.transformer import TINY, WIDE, Block, Config, Transformer
from examples.fp8 import llama_block as lesson
from examples.fp8 import llama_block_ops as ops
from examples.fp8.llama_block_model import Kernels, Prefill, Training, off_by, reference

LINEARS = ("qkv", "attention_out", "gate_up", "down")
# Words in the names of kernels; the first part that has one counts.
PARTS = {
    "attention": ("attention", "flash", "fmha", "sdpa"),
    "products": ("gemm", "cutlass", "nvjet", "linear_", "swiglu_warp", "swiglu_persistent", "fp8_matmul"),
}
BETWEEN = "between"
Case = tuple[Block, tuple, torch.Tensor, torch.Tensor]


def make(h: Harness, config: Config, batch: int, tokens: int) -> Case:
    """A block, the angles of its positions, x and dy."""
    config = replace(config, layers=1, vocab=1, max_tokens=tokens)
    model = Transformer.random(config, h.device, h.half, h.seed).requires_grad_(True)
    x, dy = (h.randn(batch, tokens, config.width, dtype=h.half) for _ in range(2))
    return model.blocks[0], (model.cos, model.sin), x, dy


def call(h: Harness, module: torch.nn.Module, phase: str, case: Case, **mode) -> Callable[[], object]:
    """A call of the block compiled; interpreted, as it is: the lesson compiles it there, too."""
    block, angles, x, dy = case
    run = module if h.interpreted else h.compiled(module, fullgraph=True, **mode)
    if phase == "prefill":
        step = Prefill(run, angles)
        return lambda: step(x)
    step = Training(run, angles, block.parameters())
    return lambda: step(x, dy)


def steps(block: Block, phase: str) -> dict[str, torch.nn.Module]:
    fp8 = lesson.FP8Prefill if phase == "prefill" else lesson.FP8Training
    use = lesson.USE[phase]
    return {lesson.COMPILED: block, lesson.OURS: Kernels(block, use["ours"]), lesson.FP8: fp8(block, use["FP8"])}


def least(c: Config, batch: int, tokens: int, phase: str) -> dict[str, tuple[int, int]]:
    """(bytes, FLOPs) of each part in 16 bits: every weight and activation once, as torch.compile could fuse at best.

    Causal attention counts half of its square; its backward five products where forward has two.
    """
    rows, train = batch * tokens, phase == "training"
    shapes = {"qkv": (c.width, c.width + 2 * c.kv_width), "attention_out": (c.width, c.width),
              "gate_up": (c.width, 2 * c.hidden), "down": (c.hidden, c.width)}  # fmt: skip
    moved = sum(rows * k + k * n + rows * n for k, n in shapes.values())
    flops = sum(2 * rows * k * n for k, n in shapes.values())
    heads = rows * (2 * c.width + 2 * c.kv_width)  # q, k, v and the result
    # A norm, one with a residual, the last residual; the rotation; SwiGLU. Backward: what is read and written again.
    between = rows * ((2 + 4 + 3) * c.width + 2 * (c.width + c.kv_width) + 3 * c.hidden)
    again = rows * ((4 + 4) * c.width + 2 * (c.width + c.kv_width) + 6 * c.hidden)
    return {
        "products": (2 * moved * (3 if train else 1), flops * (3 if train else 1)),
        "attention": (2 * heads * (3 if train else 1), 2 * batch * tokens**2 * c.width * (7 if train else 2) // 2),
        BETWEEN: (2 * (between + again * train), 0),
    }


def part_of(kernel: str) -> str:
    """The part that a kernel belongs to. Inductor names its own by the operations around them, products too."""
    name = kernel.lower()
    if name.startswith("triton_"):
        return "products" if name.startswith("triton_tem") else BETWEEN  # tem: a template of a product
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), BETWEEN)


def times_of_parts(fn: Callable, calls: int = 5) -> dict[str, float]:
    """ms of a call by part, from the kernels that torch.profiler sees."""
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    found = dict.fromkeys((*PARTS, BETWEEN), 0.0)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            found[part_of(event.name)] += event.time_range.elapsed_us() / 1000 / calls
    return found


def show_parts(h: Harness, case: Case, phase: str) -> None:
    from harness.bench import Work
    from harness.hardware import ceilings

    batch, tokens, _ = case[2].shape
    work, title = least(case[0].config, batch, tokens, phase), f"{phase}, {batch}x{tokens} tokens"
    if h.device.type != "cuda":
        counts = {part: {"MB": round(b / 1e6, 2), "GFLOP": round(f / 1e9, 2)} for part, (b, f) in work.items()}
        h.table(f"{title}: the least of each part", counts)
        return
    rows: dict[str, dict] = {}
    for name, module in steps(case[0], phase).items():
        found = times_of_parts(call(h, module, phase, case))
        for part, ms in found.items():
            dtype = E4M3 if name == lesson.FP8 and part == "products" else h.half
            floor = Work(*work[part], dtype=dtype).floor_ms(ceilings())
            rows.setdefault(name, {})[f"{part} ms, of the least"] = [round(ms, 3), f"{floor / ms:.0%}" if ms else "-"]
    h.table(f"{title}: time by part", rows)


def show_products(h: Harness, case: Case) -> None:
    """us of each product, and of the quantizers of what it reads."""
    from harness.hardware import gpu_ms

    def us(fn: Callable, *inputs) -> int:
        return round(gpu_ms(lambda: fn(*inputs)) * 1000)

    block, _, x, _ = case
    tokens, rows = x.shape[0] * x.shape[1], {}
    fused = torch.compile(own_code(lesson.by_rows), dynamic=False)
    for name in LINEARS:
        w = getattr(block, name).weight.detach()
        n, k = w.shape
        a, dy = h.randn(tokens, k, dtype=h.half), h.randn(tokens, n, dtype=h.half)
        operands = {"x": a, "w": w, "dy": dy}
        q = {key: ops.rows_quantized(each) for key, each in operands.items()}
        one = {key: scale.amax() for key, (_, scale) in q.items()}
        turned = {key: ops.transposed(each, one[key]) for key, each in operands.items()}
        products = {
            "forward": (lambda: a @ w.t(), (q["x"][0], q["w"][0], q["x"][1], q["w"][1])),  # noqa: B023
            "dx": (lambda: dy @ w, (q["dy"][0], turned["w"], q["dy"][1], one["w"])),  # noqa: B023
            "dw": (lambda: dy.t() @ a, (turned["dy"], turned["x"], one["dy"], one["x"])),  # noqa: B023
        }
        for which, (in_half, fp8) in products.items():
            row = rows[f"{name} {which}"] = {"bfloat16": us(in_half)}
            for product in ("_scaled_mm", "fp8_matmul"):
                with patch.object(lesson, "PRODUCT", product):
                    row[product] = us(lesson.product, *fp8, h.half)
        for key, each in operands.items():
            rows[f"{name} {key}"] = {
                "by rows": us(ops.rows_quantized, each), "by rows, Inductor": us(fused, each),
                "transposed": us(ops.transposed, each, one[key]),
            }  # fmt: skip
    h.table(f"us of a product, {tokens} tokens", {name: row for name, row in rows.items() if "bfloat16" in row})
    h.table(f"us of a quantizer, {tokens} tokens", {name: row for name, row in rows.items() if "by rows" in row})


def choices(block: Block, phase: str) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Names and modules of every choice of the lesson, the compiled block first, and the FP8 GEMM that each calls."""
    product = lesson.PRODUCT
    prefill = phase == "prefill"
    # For a training step max-autotune takes minutes to compile, for the same products.
    for name in MODES if prefill else (lesson.COMPILED,):
        yield name, block, product
    fp8, use = (lesson.FP8Prefill if prefill else lesson.FP8Training), lesson.USE[phase]
    names = [name for name in Kernels.USES if prefill or name != "swiglu"]
    for chosen in ((), *((name,) for name in names), use["ours"], tuple(names)):
        yield f"ours: {', '.join(chosen) or 'none'}", Kernels(block, chosen), product
    for chosen in ((), *((name,) for name in fp8.USES), use["FP8"], fp8.USES):
        yield f"FP8: {', '.join(chosen) or 'none'}", fp8(block, chosen), product
    yield "FP8, not fused", fp8(block, tuple(set(use["FP8"]) & {"attention"}), fuse=False), product
    yield "FP8, by fp8_matmul", fp8(block, use["FP8"]), "fp8_matmul"
    if not prefill:
        yield "FP8, dw in 16 bits", fp8(block, use["FP8"], fp8_dw=False), product


def show_choices(h: Harness, case: Case, phase: str) -> None:
    """ms and error of every choice. Raises AssertionError for one further off than the lesson allows."""
    from harness.hardware import gpu_ms

    block, angles, x, dy = case
    want = reference(block, angles, x, *([dy] if phase == "training" else []))
    rows, errors = {}, {}
    for name, module, product in choices(block, phase):
        if name in rows:
            continue
        with patch.object(lesson, "PRODUCT", product), h.progress(name):
            fn = call(h, module, phase, case, **MODES.get(name, {}))
            errors[name] = off_by(fn(), want)
            rows[name] = {"ms": round(gpu_ms(fn), 3)} if h.device.type == "cuda" else {}
        rows[name]["error"] = f"{errors[name]:.3%}"
        limit = lesson.FP8_ERROR[phase] if name.startswith("FP8") else 2 * errors[lesson.COMPILED]
        if not errors[name] <= limit:
            raise AssertionError(f"{phase}, {name}: relative error {errors[name]:.3%}, where {limit:.3%} is allowed")
    h.table(f"{phase}, {x.shape[0]}x{x.shape[1]} tokens: every choice", rows)


def show_sizes(h: Harness, config: Config, sizes: list[tuple[int, int]]) -> None:
    from harness.hardware import gpu_ms

    rows: dict[str, dict] = {}
    for batch, tokens in sizes:
        case = make(h, config, batch, tokens)
        for phase in ("prefill", "training"):
            found = {name: gpu_ms(call(h, module, phase, case)) for name, module in steps(case[0], phase).items()}
            rows[f"{phase}, {batch}x{tokens}"] = {
                name: [round(ms, 3), f"{found[lesson.COMPILED] / ms:.2f}x"] for name, ms in found.items()
            }
    h.table("ms, over torch.compile, by size", rows)


def study(h: Harness) -> None:
    if h.profile:
        return
    ops.provide(h.peer)
    config, batch, tokens = h.pick(interpreted=(TINY, 1, 32), quick=(WIDE, 1, 2048), full=(WIDE, 8, 2048))
    case = make(h, config, h.fit(batch, bytes_each=4 * 2**30), tokens)
    for phase in ("prefill", "training"):
        show_parts(h, case, phase)
        show_choices(h, case, phase)
    if h.device.type == "cuda":
        show_products(h, case)
        show_sizes(h, config, h.pick(quick=[(1, 2048)], full=[(1, 2048), (4, 8192)]))
