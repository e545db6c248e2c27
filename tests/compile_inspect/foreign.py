"""Eight models of other libraries with random weights, each inspected, then timed with the fix of its first finding.

    python -m tests.compile_inspect.foreign [--json FILE] [NAME ...]

Needs transformers, torchvision, timm and torch_geometric. Each model runs in a process of its own, so that one that
ends its process leaves the others.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from subprocess import TimeoutExpired, run

import torch
from torch import nn

from compile_inspect import fresh_cache, inspect
from compile_inspect.benchmark import TF32
from compile_inspect.report import Report

# The phases that time calls first: what the limit of a model leaves no time for is told.
ORDER = ("benchmark", "cuda_graphs", "graph_breaks", "basics", "inductor_codegen", "guards", "triage", "aot_autograd",
         "dynamo_capture", "frame_evaluation")  # fmt: skip
BF16 = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Transformer(nn.Module):
    """A model of transformers that returns one tensor, and keeps no cache."""

    def __init__(self, model: nn.Module, **options) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, tokens):
        return self.model(tokens, **self.options)[0]


def tokens(batch: int, length: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 1000, (batch, length)),)


def images(batch: int, side: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3, side, side, dtype=dtype),)


def bert():
    from transformers import BertConfig, BertModel

    return Transformer(BertModel(BertConfig(num_hidden_layers=6))), tokens(8, 128)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6)  # as in DistilGPT2
    return Transformer(GPT2LMHeadModel(config), use_cache=False).to(BF16), tokens(4, 256)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    config = LlamaConfig(vocab_size=32000, num_key_value_heads=4, **sizes)
    return Transformer(LlamaForCausalLM(config), use_cache=False).to(BF16), tokens(4, 512)


def resnet():
    from torchvision.models import resnet50

    return resnet50(), images(32, 224)


def mobilenet():
    from torchvision.models import mobilenet_v3_large

    return mobilenet_v3_large(), images(32, 224)


def vit():
    from timm import create_model

    return create_model("vit_small_patch16_224"), images(32, 224)


def convnext():
    from timm import create_model

    return create_model("convnext_tiny").to(BF16), images(16, 224, BF16)


def gcn():
    from torch_geometric.nn import GCN

    nodes = 20_000
    return GCN(64, 128, num_layers=3), (torch.randn(nodes, 64), torch.randint(0, nodes, (2, 10 * nodes)))


MODELS = (resnet, gcn, bert, mobilenet, vit, gpt2, llama, convnext)


def with_fix(fix: str) -> tuple[dict, dict, str, Callable[[nn.Module], nn.Module]] | None:
    """Settings of Dynamo, options of torch.compile, TF32 or not, and what is compiled; None: nothing to be tried."""

    def blocks(model: nn.Module) -> nn.Module:
        from compile_inspect.basics import blocks_of

        for block in blocks_of(model)[1]:
            block.compile()
        return model

    settings = {key: True for key in ("capture_scalar_outputs", "capture_dynamic_output_shape_ops") if key in fix}
    mode = {"mode": "reduce-overhead"} if "reduce-overhead" in fix else {}
    if not (settings or mode or TF32 in fix or "block.compile()" in fix):
        return None
    return settings, mode, "high" if TF32 in fix else "highest", blocks if "block.compile()" in fix else None


def time_fix(make: Callable, fix: str) -> dict:
    """Milliseconds of a call in eager, compiled, and compiled with the fix, and seconds of first calls.

    One after the other, each after a reset: Dynamo's settings are no guard, so that what was compiled without the fix
    would serve the model with it.
    """
    tried = with_fix(fix)
    times, first = {}, {}
    ways = {"eager": None, "compiled": ({}, {}, "highest", None)} | ({"with the fix": tried} if tried else {})
    for name, way in ways.items():
        torch.manual_seed(0)
        model, inputs = make()
        model, inputs = model.to(DEVICE).eval(), [each.to(DEVICE) for each in inputs]
        settings, options, precision, blocks = way or ({}, {}, "highest", None)
        torch._dynamo.reset()
        torch.set_float32_matmul_precision(precision)
        with fresh_cache(), torch.no_grad(), torch._dynamo.config.patch(settings):
            fn = model if way is None else blocks(model) if blocks else torch.compile(model, **options)
            first[name] = milliseconds(fn, inputs, 1) / 1e3
            milliseconds(fn, inputs, 5)
            times[name] = median(milliseconds(fn, inputs, 5) for _ in range(15))
    torch.set_float32_matmul_precision("highest")
    return {"ms": times, "first_call_s": first}


def milliseconds(fn: Callable, inputs: list[torch.Tensor], calls: int) -> float:
    """Of a call, the mean of so many."""
    began = time.perf_counter()
    for _ in range(calls):
        fn(*inputs)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls * 1e3


def one(name: str, seconds: float) -> None:
    """A line of JSON after each phase; no phase begins in the second half, which is for timing the fix."""
    make, began = globals()[name], time.perf_counter()
    torch.manual_seed(0)
    model, inputs = make()
    model, inputs = model.to(DEVICE).eval(), [each.to(DEVICE) for each in inputs]
    report = Report(name)
    result = {"model": name, "times": None}
    for phase in ORDER:
        if time.perf_counter() - began > seconds / 2:
            break
        report.phases += inspect(model, *inputs, phases=(phase,)).phases
        result["phases"] = {p.name: (p.status, round(p.seconds, 1), p.reason or p.answer) for p in report.phases}
        result["findings"] = [(each.heading, each.fix, each.tried) for each in report.findings]
        print(json.dumps(result), flush=True)
    result["times"] = time_fix(make, report.findings[0].fix if report.findings else "")
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[each.__name__ for each in MODELS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="of a model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one(options.one, options.seconds)
    found = []
    for name in options.names:
        limit = str(options.seconds)
        command = [sys.executable, "-m", "tests.compile_inspect.foreign", "--one", name, "--seconds", limit]
        try:
            done = run(command, capture_output=True, text=True, timeout=options.seconds)
            out, error = done.stdout, done.stderr
        except TimeoutExpired as late:
            out, error = (late.stdout or b"").decode(), f"took longer than {options.seconds:g} s"
        said = [line for line in out.splitlines() if line.startswith('{"model"')]
        if not said:
            print(f"{name}: {error.strip().splitlines()[-1] if error.strip() else 'nothing was printed'}")
            continue
        found.append(json.loads(said[-1]))
        show(found[-1], error)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


def show(result: dict, error: str) -> None:
    phases = result["phases"]
    print(f"\n{result['model']}, inspected in {sum(seconds for _, seconds, _ in phases.values()):.0f} s")
    for name in ORDER:
        status, _, text = phases.get(name, ("left out", 0, "no time"))
        if status != "passed":
            print(f"  {name} {status}: {text}")
    for heading, fix, tried in result["findings"][:3]:
        print(f"  {heading}\n    {fix}{f' ({tried})' if tried else ''}")
    with contextlib.suppress(TypeError):
        times, first = result["times"]["ms"], result["times"]["first_call_s"]
        print("  " + ", ".join(f"{name} {ms:.3g} ms (first call {first[name]:.1f} s)" for name, ms in times.items()))
        return
    print(f"  not timed: {error.strip().splitlines()[-1] if error.strip() else ''}")


if __name__ == "__main__":
    main()
