"""A compile that fails or gives a wrong result: the stage, the first wrong operation, the smallest wrong graph.

Whether results are as good as eager's is judged by their errors against a float64 run, next to eager's own.
"""

import contextlib
import copy
import io
import logging
import math
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

from compile_inspect.graphs import at, layer_of, name_of, own_line
from compile_inspect.main import main
from compile_inspect.report import Phase, Skip, reason_of
from compile_inspect.subject import Subject, in_eager, modules_of, parameters, tensors_of

QUESTION = "Is the compiled result right, and if not, which stage and which operation is the first that is wrong?"
STAGES = {"eager": "Dynamo's capture", "aot_eager": "AOTAutograd", "inductor": "Inductor's code"}
INSTEAD = {"eager": "leave the model in eager", "aot_eager": 'backend="eager"', "inductor": 'backend="aot_eager"'}
TLPARSE = shutil.which("tlparse") or shutil.which("tlparse", path=str(Path(sys.executable).parent))
ALLOWED, ROUNDINGS = 4.0, 4.0  # of eager's own error; and of epsilon, at the output's scale, where eager has none
MINIFYING = 15.0  # seconds after which the minifier keeps what it has


def look(subject: Subject, phase: Phase) -> None:
    rows = []
    with torch._inductor.config.patch(fallback_random=True), traced(phase):
        eager, exact, steady = references(subject)
        if not steady:
            raise Skip("the model returns something else at each call, in eager too: there is nothing to compare with")
        for stage, does in STAGES.items():
            rows.append([stage, does, *outcome(lambda: results(subject, compiled_by(stage)), eager, exact)])  # noqa: B023
    columns = "backend|adds|error / allowed|outcome"
    phase.table("the same call, one stage of the compiler more at a time", rows, columns)
    wrong, _, _, happens = next((row for row in rows if row[2] > 1), (None,) * 4)
    phase.facts |= {"errors": {row[0]: row[2] for row in rows}, "float64": exact is not None, "stage": wrong}
    if not wrong:
        phase.answer = "it returns no tensor, so there is nothing to compare; no backend fails"
        if eager:
            worst = f"the largest error is {max(row[2] for row in rows):.2g} of what is allowed"
            phase.answer = f"backends {', '.join(STAGES)} agree with plain eager: {worst}"
        return
    phase.answer = f"{STAGES[wrong]} ({wrong}): {happens}"
    fix = f"until it is mended: {INSTEAD[wrong]}, or torch.compiler.disable around that line"
    found = first_wrong(subject, wrong) if wrong != "eager" else None
    if found is None:
        phase.finding(f'backend="{wrong}" {happens}', fix, urgent=True)
        return
    graph, inputs, node = found
    own, layer = own_line(node), layer_of(node)
    line = at(*own) if own else ""
    where = f"{name_of(node)} ({', '.join(filter(None, [f'layer {layer}' if layer else '', line])) or 'no line'})"
    phase.facts["first_wrong"] = {"operation": name_of(node), "at": line, "layer": layer}
    small = minify(graph, inputs, wrong)
    phase.facts["minified"] = sum(each.op.startswith("call") for each in small.graph.nodes)
    phase.code(f"the smallest graph that torch's minifier finds to be wrong in {wrong}", small.code, fold=False)
    phase.answer += f"; first after {where}"
    fix = f"report the minified graph to PyTorch; {fix}"
    phase.finding(f"{wrong} {happens} after {where}", fix, where=line, urgent=True)


def compiled_by(stage: str) -> Callable[[Callable], Callable]:
    return lambda fn: torch.compile(fn, backend=stage, dynamic=False)


def outcome(run: Callable[[], list], eager: list, exact: list | None) -> tuple[float, str]:
    """(error over what is allowed, that in words); inf where it raises."""
    try:
        ratio = error_ratio(run(), eager, exact)
    except Exception as error:
        return math.inf, f"fails: {reason_of(error)}"
    return ratio, "gives another result" if ratio > 1 else "right"


def first_wrong(subject: Subject, stage: str) -> tuple[torch.fx.GraphModule, list, torch.fx.Node] | None:
    """The shortest prefix of the first graph that is wrong in this stage, its inputs, and the node it ends with."""
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        def run(*values):
            calls.append((graph, [copied(value) for value in values]))
            return graph.forward(*values)

        return run

    results(subject, lambda fn: torch.compile(fn, backend=backend, dynamic=False))
    for graph, inputs in calls:
        if is_wrong(graph, inputs, stage):
            operations = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
            prefixes = [partial(prefix, graph, operations[: i + 1]) for i in range(len(operations))]
            first = bisect_left(prefixes[:-1], True, key=lambda cut, x=inputs: is_wrong(cut(), x, stage))
            return prefixes[first](), inputs, operations[first]
    return None


def copied(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def prefix(graph: torch.fx.GraphModule, operations: list[torch.fx.Node]) -> torch.fx.GraphModule:
    """The graph up to the last of these operations, whose value it returns."""
    cut, held = torch.fx.Graph(), {}
    for node in [*(n for n in graph.graph.nodes if n.op == "placeholder"), *operations]:
        held[node] = cut.node_copy(node, held.__getitem__)
    cut.output((held[operations[-1]],))
    return torch.fx.GraphModule(graph, cut)


def is_wrong(graph: torch.fx.GraphModule, inputs: list, stage: str) -> bool:
    """Whether the graph, compiled by this stage alone, fails or returns something else than run as it is."""
    with torch.no_grad():
        eager = tensors_of(graph(*map(copied, inputs)))
        try:
            exact = tensors_of(copy.deepcopy(graph).double()(*in_double(inputs)))
        except Exception:
            exact = None
        torch.compiler.reset()
        return outcome(lambda: tensors_of(compiled_by(stage)(graph)(*map(copied, inputs))), eager, exact)[0] > 1


def minify(graph: torch.fx.GraphModule, inputs: list, stage: str) -> torch.fx.GraphModule:
    """The graph as small as torch's minifier makes it while it stays wrong, or as small as it got in 15 s."""
    from functorch.compile import minifier

    smallest, until = graph, time.monotonic() + MINIFYING

    def fails(candidate: torch.fx.GraphModule, candidate_inputs: list) -> bool:
        nonlocal smallest
        if time.monotonic() > until or not is_wrong(candidate, candidate_inputs, stage):
            return False
        smallest = candidate
        return True

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
        minifier(graph, inputs, fails, dump_state=lambda *_, **__: None, skip_offload=True)
    return smallest


@contextlib.contextmanager
def traced(phase: Phase) -> Iterator[None]:
    """The page that tlparse, where it is installed, makes of torch's structured trace of what is compiled within."""
    if TLPARSE is None:
        yield
        return
    from torch._logging import _internal

    folder, log = Path(tempfile.mkdtemp(prefix="compile-inspect-trace-")), _internal.trace_log
    handler, level = _internal.LazyTraceHandler(str(folder)), log.level
    handler.setFormatter(_internal.TorchLogsFormatter(trace=True))
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()
    for trace in sorted(folder.glob("*.log"))[-1:]:
        command = [TLPARSE, trace, "-o", folder / "page", "--no-browser", "--overwrite"]
        if subprocess.run(command, capture_output=True).returncode == 0:
            phase.facts["tlparse"] = str(folder / "page" / "index.html")
            phase.note(f"tlparse's page of these compilations: {phase.facts['tlparse']}")


# --- results and their errors


class Results(list):
    """Tensors: the first `outputs` are what a call returned, the others gradients; and the `seconds` that it took.

    Of a further `call`: `ms`, beside `eager_ms`, and the `speedup`; or `failure` says why there is nothing. `parts` of
    the seconds, and `graphs`: see basics.
    """

    outputs, graphs, failure = 0, 0, ""
    seconds = call = ms = eager_ms = speedup = parts = None


def results(
    subject: Subject, wrap: Callable = lambda fn: fn, double: bool = False, calls: list | None = None
) -> Results:
    """The tensors that one call returns, and in training the gradients that it leaves, of wrap(model).

    With `double` model and arguments are float64 copies. The call, to be made again, is added to `calls`.
    """
    fn, args, kwargs = subject.fresh()
    if double:
        for module in modules_of(fn):
            module.double()
        args, kwargs = in_double((args, kwargs))
    torch.manual_seed(0)  # dropout draws the same numbers, where the compiler is told to leave them to torch
    call = subject.caller(wrap(fn), args, kwargs)
    ms, _, returned = subject.once(call)
    # What can be compared: a complex tensor in pairs, a sparse one whole.
    whole = (each if each.layout == torch.strided else each.to_dense() for each in tensors_of(returned))
    out = Results(torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in whole)
    out.outputs, out.seconds = len(out), ms / 1e3
    if calls is not None:
        calls.append(call)
    if subject.train:
        out += [leaf.grad for leaf in [*parameters(fn), *tensors_of((args, kwargs))] if leaf.grad is not None]
    out[:] = [tensor.detach() for tensor in out]
    return out


def references(subject: Subject) -> tuple[Results, Results | None, bool]:
    """(what eager returns, what it returns in float64 if it runs in it, whether it returns the same again)."""
    exact = None
    with in_eager():
        eager, again = results(subject), results(subject)
        with contextlib.suppress(Exception):  # for memory too
            exact = None if subject.shared else results(subject, double=True)  # the user's own model stays as it is
    return eager, exact, error_ratio(again, eager, None) <= 1


def in_double(values):
    return tree_map_only(torch.Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, values)


def error_ratio(got: list, eager: list, exact: list | None) -> float:
    """The largest error of `got` over what is allowed: above 1 it is wrong, inf where it cannot be compared.

    Allowed is 4 times the rms error of `eager` against `exact`, at most half of the tensor's scale, or 4 roundings.
    Where there is no exact run, the square root of epsilon from eager is. Tensors of integers must be equal.
    """
    if len(got) != len(eager) or (exact is not None and len(exact) != len(eager)):
        return math.inf
    # A gradient that is zero but for rounding, as that of a bias before a norm, is as exact as its neighbours allow.
    first = getattr(eager, "outputs", len(eager))
    scale = max((_rms(each.double()) for each in eager[first:] if each.is_floating_point()), default=0.0)
    floors = [0.0] * first + [scale * ROUNDINGS * torch.finfo(torch.float32).eps] * (len(eager) - first)
    return max(map(_ratio, got, eager, exact or [None] * len(eager), floors), default=0.0)


def _ratio(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None, floor: float) -> float:
    if got.shape != eager.shape or got.dtype != eager.dtype:
        return math.inf
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, eager) else math.inf
    if not torch.equal(got.isfinite(), eager.isfinite()):
        return math.inf
    eps = torch.finfo(got.dtype).eps
    rounding, exact = (math.sqrt(eps), eager) if exact is None else (ROUNDINGS * eps, exact)
    finite = eager.isfinite() & exact.isfinite()
    got, eager, exact = (tensor[finite].double() for tensor in (got, eager, exact))
    if not exact.numel() or torch.equal(got, eager):
        return 0.0
    scale = _rms(exact)  # zeros never pass, be eager as far from float64 as it may
    allowed = max(min(ALLOWED * _rms(eager - exact), 0.5 * scale), rounding * scale, floor)
    return _rms(got - exact) / allowed if allowed else math.inf


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


if __name__ == "__main__":
    raise SystemExit(main(phase="triage"))
