"""Backends of torch.compile: which of them run here, what each of them loses, and what replaces those that are gone.

Technique  A backend is a function: it gets the graph that Dynamo captured and example inputs, and returns something to
           call, and nobody checks what that returns. So each backend of the chapter's table is really tried, by its
           name, on a small network: does it compile, is the result float32's, do gradients flow, and does a result
           survive the next call? One that fails by its name has a line to install, or a replacement of a few lines,
           which is tried the same way; those that run are compared on a larger network.
Question   Which torch.compile backends work, and what does the result lose in each?
Needs      torch
Shapes     x [batch, width] through Linear, GELU, LayerNorm, Linear. onnxrt compiles one graph for each batch size.
Dtypes     float32. OpenVINO computes in bfloat16 where the CPU has it, unless it is told float32.
Errors     ValueError, by backend(name), for a name that is unknown (the near ones are named) or whose package is not
           installed (the line that installs it); RuntimeError, by openvino_f32 and tvm_relax, for a gradient, which
           they would lose in silence, and, by all three functions here, for a symbolic size or a tensor on a GPU.
           From within a compiled call torch wraps them, as BackendCompilerFailed, also a RuntimeError.
Wins when  the machine that serves has no compiler or another runtime. For a GPU, and for training, it is inductor.
Source     chapter section "Backends"; onnxrt left torch with pull request 158262 (2.9), Relay left TVM in 0.20, IPEX
           ended with 2.8 (its repository's issue 867). What torch says today, the run prints.
Run        python examples/compiler/backends.py
"""

from __future__ import annotations

import copy
import difflib
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

from harness import Harness, Work, run
from harness.compiler import logs, watch

import torch
from torch import nn

FLOAT32 = 2.0**-18  # relative error, rms: what float32 stays below here, and what bfloat16 or TF32 do not


# --- what stands in for a name that does not work, or not well


def _inputs_it_can_take(name: str, inputs, gradients: bool) -> None:
    """Raise for inputs that the runtime behind `name` would take and then do something else with."""
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    if len(tensors) != len(inputs) or any(isinstance(n, torch.SymInt) for t in tensors for n in t.shape):
        raise RuntimeError(f"{name}: a size is a symbol, but it compiles for one size; pass dynamic=False")
    if away := {t.device.type for t in tensors} - {"cpu"}:
        raise RuntimeError(f"{name}: a tensor is on {away.pop()}, but it runs on the CPU; move the model there")
    if not gradients and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(f"{name}: an input or a weight requires grad, and its gradient would be lost; use no_grad()")


def onnxruntime_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """torch.onnx.export and an InferenceSession: the graph of the gradient goes the same way, so training works."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compile_one(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        import onnxruntime

        _inputs_it_can_take("onnxruntime_backend", inputs, gradients=True)
        program = torch.onnx.export(graph.eval(), tuple(inputs), dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(
            program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        names = [each.name for each in session.get_inputs()]
        wanted = graph.graph.output_node().args[0]  # None for what needs no gradient, which ONNX leaves out

        def call(*args):
            arrays = (arg.detach().contiguous().numpy() for arg in args)
            results = map(torch.from_numpy, session.run(None, dict(zip(names, arrays, strict=True))))
            return tuple(None if each is None else next(results) for each in wanted)

        return make_boxed_func(call)

    return aot_autograd(fw_compiler=compile_one)(graph, inputs)


def tvm_relax(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """TVM's own backend, for inference: what backend="tvm" calls from torch 2.14 on."""
    from tvm.relax.frontend.torch import relax_dynamo

    _inputs_it_can_take("tvm_relax", inputs, gradients=False)
    return relax_dynamo()(graph, inputs)


def openvino_f32(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """OpenVINO in float32, with results of their own: it hands out the buffers that its next call writes."""
    from openvino.frontend.pytorch.torchdynamo.backend import openvino

    _inputs_it_can_take("openvino_f32", inputs, gradients=False)
    call = openvino(graph, inputs, options={"device": "CPU", "config": {"INFERENCE_PRECISION_HINT": "f32"}})
    return lambda *args: tuple(out.clone() for out in call(*args))


@dataclass(frozen=True)
class Entry:
    """A row of the chapter's table. `needs`: modules; `better`: arguments of torch.compile that replace the name."""

    needs: tuple[str, ...] = ()
    install: str | None = None
    upstream: str = ""
    better: dict = field(default_factory=dict)


_TENSORRT = "torch-tensorrt=={}.{}.0".format(*torch.__version__.split(".")[:2])  # pins this very torch
BACKENDS = {
    "eager": Entry(),
    "aot_eager": Entry(),
    "inductor": Entry(),
    "cudagraphs": Entry(),
    "openxla": Entry(
        ("torch_xla",),
        "python -m venv .venv-xla && .venv-xla/bin/pip install torch==2.9.0 torch_xla==2.9.0",
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
    """Why this row of the table cannot run here: what is not installed, and what to do about it. None if it can."""
    entry = BACKENDS[name]
    if all(find_spec(module) for module in entry.needs):
        return None
    return "; ".join(filter(None, (entry.upstream, entry.install and f"install: {entry.install}")))


def available() -> list[str]:
    """Names for which backend() has an answer on this machine."""
    named = [name for name in BACKENDS if missing(name) is None]
    return named + [name for name in torch.compiler.list_backends() if name not in BACKENDS]


def backend(name: str) -> dict:
    """Arguments for torch.compile(model, **backend(name)): the form of that backend which works."""
    if name in BACKENDS and (why := missing(name)):
        raise ValueError(f"backend: {name!r} is not available here: {why}; available: {', '.join(available())}")
    if name not in BACKENDS and name not in torch.compiler.list_backends(exclude_tags=()):
        near = difflib.get_close_matches(str(name), BACKENDS | dict.fromkeys(available()), n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"backend: there is no {name!r}; {hint}available: {', '.join(available())}")
    return dict((BACKENDS[name].better if name in BACKENDS else {}) or {"backend": name})


# --- trying them


@contextmanager
def quiet() -> Iterator[list[tuple[str, str]]]:
    """Warnings and log lines of torch and of the runtimes, collected; and Dynamo's settings as they were.

    OpenVINO turns one of them off for the whole process when it is loaded.
    """
    with warnings.catch_warnings(), logs() as lines:
        warnings.simplefilter("ignore")
        with torch._dynamo.config.patch(recompile_limit=64):
            kept = hasattr(torch._dynamo.config, "inline_inbuilt_nn_modules")
            with torch._dynamo.config.patch({"inline_inbuilt_nn_modules": True} if kept else {"recompile_limit": 64}):
                yield lines


def network(h: Harness, width: int, hidden: int, device: str) -> nn.Sequential:
    layers = (nn.Linear(width, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, width))
    return nn.Sequential(*layers).to(device)


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error, rms over all elements."""
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


@dataclass
class Outcome:
    """What one backend did with a small network. `error` is None when it ran; `gradient` None when it has none."""

    seconds: float
    error: str | None = None
    result: float = 0.0
    gradient: float | None = None
    refused: bool = False  # gradients, aloud
    next_call: str | None = None  # what it does to this one's result
    by_inductor: int = 0
    said: str | None = None

    @property
    def losses(self) -> list[str]:
        found = []
        if self.result > FLOAT32:
            found.append(f"result off by {self.result:.0e}, more than float32")
        if self.refused:
            found.append("refuses gradients")
        elif self.gradient is None:
            found.append("loses the gradient in silence")
        elif self.gradient > FLOAT32:
            found.append(f"gradient off by {self.gradient:.0e}")
        if self.next_call:
            found.append(self.next_call)
        return found


def attempt(h: Harness, arguments: dict, device: str) -> Outcome:
    """Compile a small network with these arguments of torch.compile, and see what becomes of it."""
    torch.compiler.reset()
    model = network(h, 32, 64, device)
    x, other = (h.randn(4, 32).to(device) for _ in range(2))
    exact = copy.deepcopy(model).double()
    want = exact(x.double())
    want_gradient = torch.autograd.grad(want.sin().sum(), exact[0].weight)[0]
    outcome, started = Outcome(0.0), time.perf_counter()
    with quiet() as said, watch() as seen:
        try:
            compiled = torch.compile(model, **arguments)
            try:
                out = compiled(x)
            except Exception as error:
                if "gradient would be lost" not in str(error):
                    raise
                outcome.refused = True
                with torch.no_grad():
                    out = compiled(x)
            outcome.seconds = time.perf_counter() - started
            mine = out.detach().clone()
            outcome.result = off_by(mine, want)
            if out.requires_grad:
                got = torch.autograd.grad(out.sin().sum(), model[0].weight)[0]
                outcome.gradient = off_by(got, want_gradient)
            with torch.set_grad_enabled(not outcome.refused):
                compiled(other)
            outcome.next_call = _after_the_next_call(out, mine)
        except Exception as error:
            inner = getattr(error, "inner_exception", error)
            outcome.error = f"{type(inner).__name__}: {(str(inner).strip().splitlines() or ['no message'])[0]}"
            if "CxxCompiler" in outcome.error:
                outcome.error += "; install g++, or name another in the environment variable CXX"
    torch.compiler.reset()
    outcome.by_inductor = sum(n for key, n in seen.counters.get("inductor", {}).items() if key.startswith("fxgraph"))
    outcome.said = next((text.splitlines()[0] for _, text in said if "cudagraph" in text), None)
    return outcome


def _after_the_next_call(out: torch.Tensor, mine: torch.Tensor) -> str | None:
    try:
        return None if torch.equal(out.detach(), mine) else "the next call overwrites the result in silence"
    except RuntimeError:  # a CUDA graph's memory, which torch guards
        return "the next call takes the result back, and reading it raises"


def describe(name: str, outcome: Outcome) -> str:
    if outcome.error:
        return f"fails: {outcome.error}".rstrip(".")
    text = "runs" + (f", but {', '.join(outcome.losses)}" if outcome.losses else "")
    if outcome.by_inductor and name != "inductor":
        text += "; compiled by Inductor, on which it fell back"
    return text + (f"; says: {outcome.said}" if outcome.said else "")


def tried(h: Harness, device: str) -> tuple[dict[str, Outcome], dict[str, str]]:
    """Every backend of the table by its name, then what replaces it: outcomes of what backend() answers, and texts."""
    outcomes, texts = {}, {}
    for name, entry in BACKENDS.items():
        where = "cpu" if entry.better else device
        with h.progress(f"trying {name}"):
            by_name = attempt(h, {"backend": name}, where)
            texts[name] = describe(name, by_name)
            if why := missing(name):
                texts[name] += f"; {why}"
                continue
            outcomes[name] = by_name
            if entry.better:
                outcomes[name] = attempt(h, backend(name), where)
                upstream = f"; {entry.upstream}" if entry.upstream and by_name.error else ""
                texts[name] += f"{upstream}; {entry.better['backend'].__name__} {describe(name, outcomes[name])}"
    return outcomes, texts


def compare(h: Harness, names: list[str], device: str) -> None:
    """The backends that ran, on a network worth compiling, for inference."""
    batch, width, hidden = h.pick(quick=(64, 256, 1024), full=(64, 1024, 4096))
    model = network(h, width, hidden, device).requires_grad_(False)
    exact = copy.deepcopy(model).double()
    x = h.randn(batch, width).to(device)
    with quiet():
        torch.compiler.reset()
        variants = {"torch eager": model}
        variants |= {f"torch.compile {name}": torch.compile(model, **backend(name)) for name in names}
        table = h.compare(
            variants, lambda x: exact(x.double()), x, baseline="torch eager", work=Work(), title=f"on {device}",
            whole_calls=True, beside=4.0, cold=True,
        )  # fmt: skip
    for row in table.rows[1:] if table and table.rows[0].ms else ():
        faster = row.p80 < table.rows[0].p20  # by more than either varies
        calls = row.first_call_s * 1000 / (table.rows[0].ms - row.ms) if faster else None
        saved = f"saved again after {calls:,.0f} calls" if calls else "never saved again: it is not clearly faster"
        h.say(f"{row.variant}: first call {row.first_call_s:.2f} s, {saved}")


def demo(h: Harness) -> None:
    outcomes, texts = tried(h, h.device.type)
    working = [name for name, outcome in outcomes.items() if not outcome.error]
    if not h.profile:
        listed = torch.compiler.list_backends()
        h.fact("torch.compiler.list_backends()", listed)
        h.fact("listed, but does not run by that name", [n for n in listed if texts.get(n, "").startswith("fails")])
        h.fact("each backend of the chapter's table", texts)
        h.fact("seconds to the first result, imports included", {n: round(outcomes[n].seconds, 2) for n in working})
        ask_for_an_unknown_one(h)
        three_lines(h)
    compare(h, [n for n in working if not BACKENDS[n].better or h.device.type == "cpu"], h.device.type)
    elsewhere = [n for n in working if BACKENDS[n].better]
    if h.device.type != "cpu" and elsewhere:
        compare(h, elsewhere, "cpu")


def ask_for_an_unknown_one(h: Harness) -> None:
    for name in ("inducter", "ipex"):
        answers = {}
        for who, ask in (("torch", lambda n: torch.compile(nn.ReLU(), backend=n)), ("backend()", backend)):
            try:
                ask(name)
            except Exception as error:
                answers[who] = f"{type(error).__name__}: {error}"
        h.fact(f"asked for {name!r}", answers)


def three_lines(h: Harness) -> None:
    """A backend of one's own: it looks at the graph, and has it run as it is."""
    nodes = []

    def looking(graph, inputs):
        nodes.extend(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    model = network(h, 32, 64, h.device.type)
    exact = copy.deepcopy(model).double()
    torch.compiler.reset()
    h.check(
        torch.compile(model, backend=looking), lambda x: exact(x.double()), h.randn(4, 32),
        what="a backend of three lines", terms=64, roundings=8,
    )  # fmt: skip
    h.fact("a backend of three lines saw", nodes)


if __name__ == "__main__":
    run(demo)
