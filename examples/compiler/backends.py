"""Backends of torch.compile: which of them run here, what each of them loses, and what replaces those that are gone.

A backend is a function: it takes the graph that Dynamo captured, with example inputs, and returns a callable.
(torch._dynamo.optimize(backend)(model) is the old spelling of torch.compile(model, backend=backend).) The graph's nodes
are the torch functions that the model calls, and its example inputs are real tensors. The ATen operations and fake
inputs that the chapter shows appear only if AOTAutograd runs before the backend. The first table shows both.

Nothing checks what a backend returns. So each backend in the chapter's table is actually tried, by name, on a small
network: does it compile, is the result as exact as float32, do gradients flow, does a result survive the next call? One
that fails by name gets an install command, a replacement (tried the same way), or a note that it is discontinued.

Question   Which torch.compile backends work, and what does the result lose in each?
Needs      torch
Wins when  the machine that serves has no compiler, or uses another runtime. For a GPU, and for training, take inductor.
Variants   backends_runtimes.py (ONNX Runtime, TVM, OpenVINO), backends_attempt.py (how one is tried)
Source     chapter sections "TorchInductor" and "Code Flow Graph"; onnxrt left torch with pull request 158262 (2.9),
           Relay left TVM in 0.20, IPEX ended with 2.8 (its repository's issue 867).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

from harness import Harness, run

import torch

from examples.compiler.backends_attempt import Outcome, attempt, describe, handed_over
from examples.compiler.backends_runtimes import onnxruntime_backend, openvino_f32, tvm_relax


def looking(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """A backend in two lines: it prints the operations of the graph, and runs the graph as it is."""
    print([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
    return graph.forward


class Entry(NamedTuple):
    """A row of the chapter's table. `needs`: modules; `better`: arguments of torch.compile that replace the name."""

    needs: tuple[str, ...] = ()
    install: str | None = None
    upstream: str = ""
    better: dict | None = None


_TENSORRT = "torch-tensorrt=={}.{}.0".format(*torch.__version__.split(".")[:2])  # pins this very torch
BACKENDS = {
    **dict.fromkeys(("eager", "aot_eager", "inductor", "cudagraphs"), Entry()),
    "openxla": Entry(
        ("torch_xla",), "python -m venv .venv-xla && .venv-xla/bin/pip install torch==2.9.0 torch_xla==2.9.0",
        "torch_xla ended with 2.9.0, for torch 2.9: it needs an environment of its own",
    ),
    "openvino": Entry(("openvino",), "pip install openvino", better={"backend": openvino_f32, "dynamic": False}),
    "tvm": Entry(
        ("tvm",), "pip install apache-tvm", "before torch 2.14 it imports Relay, which TVM removed in 0.20",
        better={"backend": tvm_relax, "dynamic": False},
    ),
    "onnxrt": Entry(
        ("onnxruntime", "onnxscript"), "pip install onnx onnxscript onnxruntime", "removed upstream since torch 2.9",
        better={"backend": onnxruntime_backend, "dynamic": False},
    ),
    "tensorrt": Entry(
        ("torch_tensorrt",), f"pip install {_TENSORRT}", "registered by `import torch_tensorrt`; NVIDIA GPUs only"
    ),
    "ipex": Entry(
        ("intel_extension_for_pytorch",), None,
        "ended upstream with 2.8.0, for torch 2.8; what it did for Intel's CPUs is in inductor: use that",
    ),
}  # fmt: skip


def missing(name: str) -> str | None:
    """What this row of the table lacks here, and what to do about it. None if the modules it needs are installed."""
    entry = BACKENDS[name]
    if all(find_spec(module) for module in entry.needs):
        return None
    return "; ".join(filter(None, (entry.upstream, entry.install and f"install: {entry.install}")))


def backend(name: str) -> dict:
    """Arguments for torch.compile(model, **backend(name)): that backend of the table, or its replacement.

    Raises ValueError for a name that is not in the table, and for a backend that is not installed here.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: there is no {name!r}; one of {', '.join(BACKENDS)}")
    if why := missing(name):
        raise ValueError(f"backend: {name!r} is not available here: {why}")
    return BACKENDS[name].better or {"backend": name}


def try_each(h: Harness) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Every backend of the table by its name, and as backend() returns it; those with a replacement on the CPU."""
    by_name, best = {}, {}
    for name, entry in BACKENDS.items():
        where = "cpu" if entry.better else h.device.type
        with h.progress(f"trying {name}"):
            by_name[name] = attempt({"backend": name}, where)
            if missing(name) is None:
                best[name] = attempt(backend(name), where) if entry.better else by_name[name]
    return by_name, best


def demo(h: Harness) -> None:
    h.table("what a backend is handed", handed_over(h.device.type))
    by_name, best = try_each(h)
    working = [name for name, outcome in best.items() if not outcome.error]
    rows, texts = {}, {}
    for name, outcome in by_name.items():
        instead = (BACKENDS[name].better or {}).get("backend")
        rows[name] = {
            "by its name": "fails" if outcome.error else "runs",
            "instead": instead.__name__ if instead else "",
            "loses": "not here" if name not in working else ", ".join(best[name].losses) or "nothing",
        }
        texts[name] = "; ".join(filter(None, (describe(name, outcome), missing(name))))
        if instead and name in best:
            texts[name] += f"; {BACKENDS[name].upstream}" if BACKENDS[name].upstream and outcome.error else ""
            texts[name] += f"; {instead.__name__} {describe(name, best[name])}"
    h.table("backends of the chapter's table", rows)
    h.fact("each backend of the chapter's table", texts)

    def answer() -> str:
        called = {name: " as ".join(filter(None, (name, rows[name]["instead"]))) for name in working}
        whole = [called[name] for name in working if not best[name].losses]
        partly = [f"{called[name]} loses: {', '.join(best[name].losses)}" for name in working if best[name].losses]
        gone = [name for name in BACKENDS if name not in working]
        lists = {"nothing is lost in": whole, "not usable here:": gone}
        whole, gone = (f"{what} {', '.join(names)}" if names else "" for what, names in lists.items())
        text = "; ".join(filter(None, [whole, *partly, gone]))
        return f"{text[0].upper()}{text[1:]}."

    h.answer(answer, timed=False)


if __name__ == "__main__":
    run(demo)
