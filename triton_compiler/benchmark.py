"""This compiler against Inductor's default: graphs of pointwise operations and reductions, models, cold compile times.

    python -m triton_compiler.benchmark [graphs|models|compile] [--only NAME ...] [--json FILE] [--quick]

All are checked against a float64 run first. On a GPU the tables are timed with the harness's timer and recorded as the
topic triton_compiler (schema 2); without one everything is small, checked and not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from harness.bench import Row, Table, Work, time_variants
from harness.check import tensors_of
from harness.hardware import ceilings, machine
from harness.record import ExampleRecord, Record, git_state
from harness.sources import sources_hash

import torch
import torch.nn.functional as F

from triton_compiler.capture import recording, triton_backend
from triton_compiler.device import INTERPRETED
from triton_compiler.explain import Explanation
from triton_compiler.models import models

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


# ---------------------------------------------------------------------------------------------- one comparison
def wide(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def error(got, want) -> float:
    """The largest rms error of an output, relative to its rms; integers must agree but for a few roundings."""
    worst = 0.0
    for mine, true in zip(tensors_of(got), tensors_of(want), strict=True):
        mine, true = torch.nan_to_num(mine.double()), torch.nan_to_num(true.double())
        worst = max(worst, float((mine - true).pow(2).mean().sqrt() / (true.pow(2).mean().sqrt() + 1e-30)))
    return worst


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


def launched(call: Callable, inputs: tuple) -> int:
    """The kernels that one call runs on the GPU."""
    call(*inputs)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call(*inputs)
        torch.cuda.synchronize()
    return sum(each.count for each in seen.key_averages() if each.device_type == torch.autograd.DeviceType.CUDA
               and "memcpy" not in each.key.lower() and "memset" not in each.key.lower())  # fmt: skip


def timed_first(fn: Callable, *args):
    start = time.perf_counter()
    result = fn(*args)
    if not INTERPRETED:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


class Report:
    """Tables and facts of one example of the record, which `keep` saves after each case."""

    def __init__(self, name: str, keep: Callable[[Report, str, str | None], None]) -> None:
        self.name, self.keep, self.started = name, keep, time.perf_counter()
        self.tables: list[Table] = []
        self.facts: dict = {}
        self.failed: dict[str, str] = {}

    @contextlib.contextmanager
    def guard(self, case: str):
        """One case that fails does not keep the others from being measured."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed[case] = f"{type(error).__name__}: {error}"[:300]
        self.keep(self, "failed", "it was stopped before its end")

    def compare(self, title: str, case: str, calls: dict[str, Callable], want, inputs: tuple, whole: bool) -> None:
        """First calls, errors, counts and times of one case; `whole`: of calls as their caller sees them.

        Raises AssertionError where our error is more than twice that of eager or Inductor, whichever is larger.
        """
        from torch._inductor import metrics

        results, firsts = {}, {}
        metrics.reset()
        with recording() as seen, inductor_bytes() as moved:
            for name, call in calls.items():
                results[name], firsts[name] = timed_first(call, *inputs)
        errors = {name: error(got, want) for name, got in results.items()}
        allowed = 2 * max(errors[name] for name in errors if name != OURS) + 1e-6
        if not errors[OURS] <= allowed:
            raise AssertionError(f"triton_compiler is wrong: error {errors[OURS]:.3g}, allowed {allowed:.3g}")
        del results
        told = Explanation(seen.graphs, [], 0, 0)
        facts = {"kernels": told.kernels, "calls": told.calls, "bytes": told.bytes, "fallbacks": dict(told.fallbacks)}
        table = Table(title, case, INDUCTOR, default=OURS)
        table.rows = [Row(name, name == OURS, firsts.get(name), errors[name]) for name in calls]
        said = f"error {errors[OURS]:.2g}, eager {errors[EAGER]:.2g}"
        if INDUCTOR in calls:
            facts |= {"inductor_kernels": metrics.generated_kernel_count, "inductor_bytes": moved[0] or None}
            facts |= {"launched": launched(calls[OURS], inputs), "inductor_launched": launched(calls[INDUCTOR], inputs)}
            time_variants(table, calls, inputs, Work(bytes=told.bytes), ceilings(), whole)
            over = "".join(f"{table.over(other, OURS):5.2f}x {other}  " for other in (INDUCTOR, EAGER))
            said = f"{table[OURS].ms:9.4f} ms  {over}first {firsts[OURS]:.1f} s, its {firsts[INDUCTOR]:.1f} s"
            said += f"; its kernels {facts['inductor_kernels']}"
        print(f"{title:8} {case:24} {said}; kernels {told.kernels}", flush=True)
        self.tables.append(table)
        self.facts.setdefault(title, {})[case] = facts

    def answer(self) -> str | None:
        if self.name == "compile" and self.facts:
            ratios = {name: each[OURS] / each["inductor"] for name, each in self.facts[COLD_FACT].items()}
            worst, text = max(ratios, key=ratios.get), "{:.2f} of Inductor's time (geometric mean of {} models)"
        else:
            ratios = {table.case: table.over(INDUCTOR, OURS) for table in self.tables if table.timed}
            worst, text = min(ratios, key=ratios.get, default=None), "{:.2f}x Inductor (geometric mean of {})"
        if not ratios:
            return None
        told = text.format(statistics.geometric_mean(ratios.values()), len(ratios))
        return f"{told}; worst {ratios[worst]:.2f}{'' if self.name == 'compile' else 'x'} ({worst})"


# ---------------------------------------------------------------------------------------------- the parts
def compiled_by(fn: Callable) -> dict[str, Callable]:
    """Eager, our compiler and, where there is a GPU, Inductor, which gets code that Dynamo has not met."""
    torch._dynamo.reset()
    ours = {EAGER: fn, OURS: torch.compile(fn, backend=triton_backend)}
    if isinstance(fn, types.FunctionType):
        fn = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    return ours if INTERPRETED else ours | {INDUCTOR: torch.compile(fn)}


def run_graphs(report: Report, only, large: bool) -> None:
    torch.manual_seed(0)
    for name, (fn, inputs) in graphs(large).items():
        if not only or name in only:
            with report.guard(name):
                report.compare("graph", name, compiled_by(fn), fn(*map(wide, inputs)), inputs, False)


def training_step(compiled: Callable, model: torch.nn.Module) -> Callable:
    """Forward and backward: the output and the gradients as one vector, so that the errors of tiny gradients are judged
    beside the large ones."""
    parameters = [each for each in model.parameters() if each.requires_grad]

    def step(*inputs):
        out = compiled(*inputs)
        grads = torch.autograd.grad(out.float().square().mean(), parameters, allow_unused=True)
        return torch.cat([each.double().flatten() for each in (out.detach(), *grads) if each is not None])

    return step


def prepared(make: Callable) -> tuple[torch.nn.Module, tuple]:
    """A model and its inputs, made where they run, in the dtype that is timed."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model, inputs = make()
    dtype = torch.float32 if INTERPRETED else HALF
    return model.to(DEVICE, dtype), tuple(x.to(DEVICE, dtype if x.is_floating_point() else None) for x in inputs)


def run_models(report: Report, only, large: bool) -> None:
    for name, make in models(large).items():
        if not only or name in only:
            with report.guard(name):
                model, inputs = prepared(make)
                exact, exact_inputs, calls = copy.deepcopy(model).double(), tuple(map(wide, inputs)), compiled_by(model)
                steps = {kind: training_step(call, model) for kind, call in calls.items()}
                report.compare("training", name, steps, training_step(exact, exact)(*exact_inputs), inputs, True)
                with torch.no_grad():
                    want = exact(*exact_inputs)
                del exact
                forward = {kind: torch.no_grad()(call.__call__) for kind, call in calls.items()}
                report.compare("forward", name, forward, want, inputs, True)


def run_compile(report: Report, only, large: bool) -> None:
    times = report.facts[COLD_FACT] = {}
    for name in only or COLD:
        with report.guard(name):
            times[name] = {backend: cold_alone(name, backend, large) for backend in (OURS, "inductor")}
            ours, its = times[name].values()
            print(f"compile  {name:24} {ours:6.1f} s, Inductor {its:6.1f} s: {ours / its:.2f}", flush=True)


def cold(name: str, backend: str, large: bool) -> float:
    """The seconds of a first training step, in this process, whose caches the caller has emptied."""
    model, inputs = prepared(models(large)[name])
    training_step(model, model)(*inputs)  # libraries and autograd are warm
    warm = torch.compile(lambda x: x + 1, backend="aot_eager", dynamic=False)
    warm(torch.ones(2, device=DEVICE))  # and so is Dynamo
    compiled = torch.compile(model, backend=triton_backend if backend == OURS else backend)
    return timed_first(training_step(compiled, model), *inputs)[1]


def cold_alone(name: str, backend: str, large: bool) -> float:
    """The same in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_COMPILER_CACHE_DIR")
        command = [sys.executable, "-m", "triton_compiler.benchmark", "--cold", name, backend]
        done = subprocess.run(
            command if large else [*command, "--quick"], capture_output=True, text=True, check=False,
            env=os.environ | {key: f"{folder}/{key}" for key in caches},
        )  # fmt: skip
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
    record, failed = Record(options.json, "triton_compiler", machine().gpu), False
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

    for name in options.parts or (RUN if not INTERPRETED else ["graphs", "models"]):
        report, reason = Report(name, keep), None
        try:
            RUN[name](report, options.only, large)
            reason = "; ".join(f"{case}: {why}" for case, why in report.failed.items())[:500] or None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:500]
        failed |= reason is not None
        print(f"{name}: {(None if INTERPRETED else report.answer()) or reason or 'checked; not timed without a GPU'}")
        keep(report, "failed" if reason else "passed", reason)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
