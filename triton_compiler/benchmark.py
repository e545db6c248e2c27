"""This compiler against Inductor's default: graphs of pointwise operations and reductions, models, cold compile times.

    python -m triton_compiler.benchmark [graphs|models|compile] [--only NAME ...] [--json FILE] [--quick]

Both are checked against a float64 run first. On a GPU the tables are timed with the harness' timer and recorded as the
topic triton_compiler (schema 2); without one everything is small, checked and not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

from triton_compiler.capture import recording, triton_backend
from triton_compiler.device import INTERPRETED
from triton_compiler.explain import Explanation
from triton_compiler.models import of_libraries, small_or_large

OURS, INDUCTOR, EAGER = "triton_compiler", "Inductor", "torch eager"
QUESTIONS = {
    "graphs": "Is a small compiler as fast as Inductor on pointwise graphs and reductions?",
    "models": "Is it as fast on whole models, forward and training step?",
    "compile": "How long does the first call take with empty caches?",
}
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
COLD, COLD_FACT = ("GPT", "Llama", "ResNet", "MLP"), "first training step, empty caches, s"


# ---------------------------------------------------------------------------------------------- graphs
def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def adam(p, g, m, v):
    m = torch.lerp(m, g, 0.1)
    v = v * 0.999 + g * g * 0.001
    return p * 0.9999 - 1e-3 * (m / 0.1) / ((v / 0.001).sqrt() + 1e-8), m, v


def quantize_rows(x):
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def layer_norm_backward(g, x, mean, rstd, weight, bias):
    return torch.ops.aten.native_layer_norm_backward(g, x, [x.shape[-1]], mean, rstd, weight, bias, [True, True, True])


def graphs(large: bool) -> dict[str, tuple[Callable, tuple]]:
    """{name: (function, inputs)}; half precision where models have it."""
    rows, width, heads = (8192, 4096, 32) if large else (48, 64, 2)

    def half(*shape):
        return torch.randn(*shape, device=DEVICE, dtype=HALF)

    def full(*shape):
        return torch.randn(*shape, device=DEVICE)

    x, y, w, b = half(rows, width), half(rows, width), half(width), half(width)
    image = half(64 if large else 4, 64 if large else 8, 56 if large else 6, 56 if large else 6)
    channels = image.shape[1]
    per_channel, affine = (full(channels), full(channels)), (half(channels), half(channels))
    square = [each[:width, : min(rows, width)].contiguous() for each in (x, y)]
    tokens, size, vocabulary = (2048, 128, 50304) if large else (16, 16, 300)
    scores = half(8 if large else 2, heads // 2, rows // 8, rows // 8)
    mask = torch.ones(rows // 8, rows // 8, dtype=torch.bool, device=DEVICE).triu(1)
    ids = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    mean, rstd = full(rows, 1), full(rows, 1).abs()
    if INTERPRETED:  # the CPU keeps them in the input's dtype
        mean, rstd = mean.half(), rstd.half()
    big = [full(rows * width // 2) for _ in range(4)]
    big[3] = big[3].abs()
    logits, table = half(rows // 4, vocabulary), half(vocabulary, width // 4)
    angle = [half(tokens, 1, size) for _ in range(2)]
    return {
        "bias + GELU": (lambda x, b: F.gelu(x + b), (x, b)),
        "RMSNorm + residual": (lambda x, y, w: (lambda h: (h, F.rms_norm(h, (width,), w)))(x + y), (x, y, w)),
        "LayerNorm": (lambda x, w, b: F.layer_norm(x, (width,), w, b), (x, w, b)),
        "LayerNorm backward": (layer_norm_backward, (y, x, mean, rstd, w, b)),
        "RoPE": (rope, (half(rows // tokens if large else 2, tokens, heads, size), *angle)),
        "SwiGLU": (lambda x: F.silu(x[:, : width // 2]) * x[:, width // 2 :], (x,)),
        "masked softmax": (lambda s, m: torch.softmax(s.masked_fill(m, float("-inf")), -1), (scores, mask)),
        "softmax backward": (lambda g, p: (g * p - p * (g * p).sum(-1, keepdim=True)), (scores, scores.softmax(-1))),
        "cross entropy": (lambda x, t: F.cross_entropy(x.float(), t), (logits, ids[: rows // 4])),
        "Adam step": (adam, tuple(big)),
        "batch norm + ReLU": (lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True)), (image, *per_channel)),
        "group norm + SiLU": (lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)), (image, *affine)),
        "column sum": (lambda x: x.sum(0), (x,)),
        "MSE loss": (lambda x, y: ((x.float() - y.float()) ** 2).mean(), (x, y)),
        "transpose + add": (lambda x, y: x.t() + y, (square[0].t().contiguous(), square[1])),
        "embedding + LayerNorm": (lambda t, i, w: F.layer_norm(t[i], (width // 4,), w), (table, ids, w[: width // 4])),
        "cat + ReLU": (lambda x, y: F.relu(torch.cat([x, y], 1)), (x, y)),
        "argmax": (lambda x: x.argmax(-1), (x,)),
        "quantize rows": (quantize_rows, (x,)),
        "L2 normalize": (lambda x: F.normalize(x.float(), dim=-1).to(x.dtype), (x,)),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- checks
def wide(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def tensors(value) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [each for each in value if isinstance(each, torch.Tensor)]


def error(got, want) -> float:
    """The largest rms error of an output, relative to its rms; integers must agree but for a few roundings."""
    worst = 0.0
    for mine, true in zip(tensors(got), tensors(want), strict=True):
        mine, true = torch.nan_to_num(mine.double()), torch.nan_to_num(true.double())
        worst = max(worst, float((mine - true).pow(2).mean().sqrt() / (true.pow(2).mean().sqrt() + 1e-30)))
    return worst


def judged(results: dict[str, object], want) -> dict[str, float]:
    """Errors of all; raises where ours is more than twice that of eager or Inductor, whichever is larger."""
    errors = {name: error(got, want) for name, got in results.items()}
    allowed = 2 * max(errors[name] for name in errors if name != OURS) + 1e-6
    if not errors[OURS] <= allowed:
        raise AssertionError(f"triton_compiler is wrong: error {errors[OURS]:.3g}, allowed {allowed:.3g}")
    return errors


# ---------------------------------------------------------------------------------------------- what is compared
@contextlib.contextmanager
def inductor_bytes():
    """Counts, in a list of one number, the bytes that graphs compiled by Inductor within move, by its own estimate."""
    from torch._inductor.graph import GraphLowering

    codegen, total = GraphLowering.codegen, [0]

    def counting(self):
        code = codegen(self)
        with contextlib.suppress(Exception):  # an estimate: where it fails the benchmark goes on
            total[0] += int(self.count_bytes()[0])
        return code

    with patch.object(GraphLowering, "codegen", counting):
        yield total


def launched(call: Callable) -> int:
    """The kernels that one call runs on the GPU."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(each.count for each in seen.key_averages() if each.device_type == torch.autograd.DeviceType.CUDA
               and "memcpy" not in each.key.lower() and "memset" not in each.key.lower())  # fmt: skip


def copy_of(fn: Callable) -> Callable:
    """A function with code of its own, which Dynamo has not met."""
    if not isinstance(fn, types.FunctionType):
        return fn
    return types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


class Report:
    """Tables and facts of one example of the record; prints each row as it comes, and hands it to `keep`."""

    def __init__(self, name: str, on_gpu: bool, keep: Callable[[Report, str, str | None], None]) -> None:
        self.name, self.on_gpu, self.tables, self.facts, self.started = name, on_gpu, [], {}, time.perf_counter()
        self.failed: dict[str, str] = {}
        self.keep = keep

    def row(
        self, title: str, case: str, variants: dict[str, Callable], inputs, errors, firsts, end_to_end, extra
    ) -> None:
        from harness.bench import Row, Table, Work, time_variants
        from harness.hardware import ceilings

        table = Table(title, case, INDUCTOR, default=OURS)
        table.rows = [Row(name, name == OURS, firsts.get(name), errors[name]) for name in variants]
        said = f"error {errors[OURS]:.2g}, eager {errors[EAGER]:.2g}"
        if self.on_gpu:
            time_variants(table, variants, inputs, Work(bytes=extra.get("bytes") or 0), ceilings(), end_to_end)
            over = "".join(f"{table.over(other, OURS):5.2f}x {other}  " for other in (INDUCTOR, EAGER))
            said = f"{table[OURS].ms:9.4f} ms  {over}first {firsts[OURS]:.1f} s, its {firsts[INDUCTOR]:.1f} s"
            said += f"; its kernels {extra['inductor_kernels']}"
        print(f"{title:8} {case:24} {said}; kernels {extra['kernels']}", flush=True)
        self.tables.append(table)
        self.facts.setdefault(title, {})[case] = extra
        self.keep(self, "failed", "it was stopped before its end")

    @contextlib.contextmanager
    def guard(self, case: str):
        """One case that fails does not keep the others from being measured."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed[case] = f"{type(error).__name__}: {error}"[:300]

    def answer(self) -> str | None:
        if self.name == "compile" and self.facts:
            times = self.facts[COLD_FACT].items()
            mean, worst, value = summary({name: each[OURS] / each["inductor"] for name, each in times}, max)
            return f"{mean:.2f} of Inductor's time (geometric mean of {len(times)} models); worst {value:.2f} ({worst})"
        ratios = {table.case: table.over(INDUCTOR, OURS) for table in self.tables if table.timed}
        if not ratios:
            return None
        mean, worst, value = summary(ratios, min)
        return f"{mean:.2f}x Inductor (geometric mean of {len(ratios)}); worst {value:.2f}x ({worst})"


def summary(ratios: dict[str, float], pick: Callable) -> tuple[float, str, float]:
    """The geometric mean, the worst case and its ratio."""
    worst = pick(ratios, key=ratios.get)
    return math.exp(sum(map(math.log, ratios.values())) / len(ratios)), worst, ratios[worst]


def timed_first(fn: Callable, *args):
    start = time.perf_counter()
    result = fn(*args)
    if not INTERPRETED:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def compare(
    report: Report, title: str, case: str, calls: dict[str, Callable], want, inputs: tuple, whole: bool
) -> dict:
    """First calls, errors, counts and times of one case; `whole`: of calls as their caller sees them."""
    from torch._inductor import metrics

    results, firsts = {}, {}
    metrics.reset()
    with recording() as seen, inductor_bytes() as moved:
        for name, call in calls.items():
            results[name], firsts[name] = timed_first(call, *inputs)
    errors = judged(results, want)
    del results
    told = Explanation(seen.graphs, [], 0, 0)
    extra = {"kernels": told.kernels, "calls": told.calls, "bytes": told.bytes, "fallbacks": dict(told.fallbacks)}
    if INDUCTOR in calls:
        extra |= {"inductor_kernels": metrics.generated_kernel_count, "inductor_bytes": moved[0] or None}
        extra["launched"] = launched(lambda: calls[OURS](*inputs))
        extra["inductor_launched"] = launched(lambda: calls[INDUCTOR](*inputs))
    report.row(title, case, calls, inputs, errors, firsts, whole, extra)
    return errors


def compiled_by(fn: Callable, other: Callable) -> dict[str, Callable]:
    """Eager, our compiler and, where there is a GPU, Inductor, which gets `other`: code that Dynamo has not met."""
    torch._dynamo.reset()
    ours = {EAGER: fn, OURS: torch.compile(fn, backend=triton_backend)}
    return ours if INTERPRETED else ours | {INDUCTOR: torch.compile(other)}


def run_graphs(report: Report, only, large: bool) -> None:
    torch.manual_seed(0)
    for name, (fn, inputs) in graphs(large).items():
        if not only or name in only:
            with report.guard(name):
                compare(report, "graph", name, compiled_by(fn, copy_of(fn)), fn(*map(wide, inputs)), inputs, False)


def training_step(model: torch.nn.Module) -> Callable:
    """Forward and backward; returns the output and the gradients, which are given back for the next call."""
    parameters = [each for each in model.parameters() if each.requires_grad]

    def step(compiled, *inputs):
        out = compiled(*inputs)
        grads = torch.autograd.grad(out.float().square().mean(), parameters, allow_unused=True)
        return [out.detach(), *(each for each in grads if each is not None)]

    return step


def run_models(report: Report, only, large: bool) -> None:
    found = small_or_large(large)
    if not only or set(only) - set(found):  # importing the libraries takes a while
        found |= of_libraries(large)
    for name, make in found.items():
        if not only or name in only:
            with report.guard(name):
                compare_model(report, name, make)


def prepared(make: Callable) -> tuple[torch.nn.Module, tuple]:
    """A model and its inputs, made where they run, in the dtype that is timed."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model, inputs = make()
    dtype = torch.float32 if INTERPRETED else HALF
    return model.to(DEVICE, dtype), tuple(x.to(DEVICE, dtype if x.is_floating_point() else None) for x in inputs)


def compare_model(report: Report, name: str, make: Callable) -> None:
    model, inputs = prepared(make)
    exact = copy.deepcopy(model).double()
    step = training_step(model)
    want = training_step(exact)(exact, *map(wide, inputs))

    def steps(modules):
        return {kind: functools.partial(flat, step, module) for kind, module in modules.items()}

    modules = compiled_by(model, model)
    compare(report, "training", name, steps(modules), torch.cat([each.flatten() for each in want]), inputs, True)
    with torch.no_grad():
        exact_output = exact(*map(wide, inputs))
    del exact, want
    forward = {kind: torch.no_grad()(module.__call__) for kind, module in modules.items()}
    compare(report, "forward", name, forward, exact_output, inputs, True)


def flat(step: Callable, module: Callable, *inputs) -> torch.Tensor:
    """Output and gradients as one vector: the errors of tiny gradients are judged beside the large ones."""
    return torch.cat([each.double().flatten() for each in step(module, *inputs)])


# ---------------------------------------------------------------------------------------------- cold compile times
def cold(name: str, backend: str, large: bool) -> float:
    """The seconds of a first training step, in this process, whose caches the caller has emptied."""
    model, inputs = prepared((small_or_large(large) | ({} if name in COLD else of_libraries(large)))[name])
    step = training_step(model)
    step(model, *inputs)  # libraries and autograd are warm
    warm = torch.compile(lambda x: x + 1, backend="aot_eager", dynamic=False)
    warm(torch.ones(2, device=DEVICE))  # and so is Dynamo
    compiled = torch.compile(model, backend=triton_backend if backend == OURS else backend)
    return timed_first(step, compiled, *inputs)[1]


def run_compile(report: Report, only, large: bool) -> None:
    times: dict[str, dict[str, float]] = {}
    for name in only or COLD:
        with report.guard(name):
            times[name] = {backend: cold_alone(name, backend, large) for backend in (OURS, "inductor")}
            ours, its = times[name].values()
            print(f"compile  {name:24} {ours:6.1f} s, Inductor {its:6.1f} s: {ours / its:.2f}", flush=True)
            report.facts[COLD_FACT] = times
            report.keep(report, "failed", "it was stopped before its end")


def cold_alone(name: str, backend: str, large: bool) -> float:
    """The same in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_COMPILER_CACHE_DIR")
        env = os.environ | {key: f"{folder}/{key}" for key in caches}
        command = [sys.executable, "-m", "triton_compiler.benchmark", "--cold", name, backend]
        command += [] if large else ["--quick"]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} with {backend}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


RUN = {"graphs": run_graphs, "models": run_models, "compile": run_compile}


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m triton_compiler.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="graphs, models, compile; all unless given")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these graphs or models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it as a record (schema 2)")
    parser.add_argument("--quick", action="store_true", help="small sizes, on a GPU too")
    parser.add_argument("--cold", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = command_line().parse_args(argv)
    large = not INTERPRETED and not options.quick
    if options.cold:
        print(json.dumps(cold(*options.cold, large)))
        return 0
    if unknown := set(options.parts) - set(RUN):
        command_line().error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(RUN)}")
    from harness.hardware import machine
    from harness.record import ExampleRecord, Record, git_state
    from harness.sources import sources_hash

    record = Record(options.json, "triton_compiler", machine().gpu)
    commit, dirty = git_state()

    def keep(report: Report, status: str, reason: str | None) -> None:
        record.put(ExampleRecord(
            report.name, status, reason, time.perf_counter() - report.started, commit=commit, dirty=dirty,
            machine=machine().record(), command=shlex.join(["python", "-m", "triton_compiler.benchmark", *argv]),
            sizes="full" if large else "quick", sources=sources_hash(Path(__file__)), question=QUESTIONS[report.name],
            answer=None if INTERPRETED or status == "failed" else report.answer(), facts=report.facts,
            tables=[table.record() for table in report.tables],
        ), list(RUN))  # fmt: skip
        record.save()

    failed = False
    for name in options.parts or (RUN if not INTERPRETED else ["graphs", "models"]):
        report, status, reason = Report(name, not INTERPRETED, keep), "passed", None
        try:
            RUN[name](report, options.only, large)
            if report.failed:
                raise RuntimeError("; ".join(f"{case}: {why}" for case, why in report.failed.items()))
        except Exception as error:
            status, reason, failed = "failed", f"{type(error).__name__}: {error}"[:500], True
        answer = None if INTERPRETED else report.answer()
        print(f"{name}: {answer or reason or 'checked; not timed without a GPU'}")
        keep(report, status, reason)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
