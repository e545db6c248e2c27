"""What Inductor generates: fused kernels and their lines, what kept loops apart, the library calls between them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from compile_inspect import logs
from compile_inspect.graphs import Lowered, Step, lower
from compile_inspect.main import main
from compile_inspect.models import pointwise
from compile_inspect.report import Phase, Skip, counted
from compile_inspect.subject import Subject

QUESTION = "Which operations become one kernel, which do not, and which are left to a library?"
CODES, LEAST = 40, 0.01  # listings; share of an eager call from which on an operator is a finding
LIBRARY = re.compile(
    r"^extern_kernels\.|attention|conv|mkldnn|onednn|cudnn|quantized|_scaled_mm|lstm|gru|_fft|linalg|cholesky"
    r"|rand|normal|bernoulli|DeviceCopy|copy_|view_as"
)  # cuBLAS, cuDNN, oneDNN, MKL and their like; random numbers; copies between devices
NO_LOOPS = (
    "Inductor has no loops for it here: ATen's own kernel runs, and nothing is fused across it; move it out of a chain "
    "of elementwise operations, or write it with operations that Inductor generates code for"
)


def look(subject: Subject, phase: Phase) -> None:
    with logs(fusion=True, perf_hints=True, ir_pre_fusion=True, ir_post_fusion=True) as records:
        graphs = lower(lambda backend: subject.compiled(backend=backend)())
    texts = defaultdict(list)
    for artifact, text in records:
        texts[artifact].append(text)
    for graph in filter(lambda each: each.error, graphs):
        phase.note(f"Inductor cannot lower one graph: {graph.error}")
    graphs = [graph for graph in graphs if not graph.error]
    if not graphs:
        raise Skip("no graph with operations was lowered by Inductor; see graph_breaks")
    before, after = ([step for graph in graphs for step in getattr(graph, each)] for each in ("before", "after"))
    extern, code = [step for step in after if step.extern], "".join(graph.code for graph in graphs)
    widths = [int(n) for n in re.findall(r"\+=static_cast<int64_t>\((\d+)L\)", code)] if "at::vec" in code else []
    phase.facts |= (facts := {
        "kernels": kernels_of(graphs), "operations": sum(graph.operations for graph in graphs),
        "kernels_before": len(loops(before)), "kernels_after": len(loops(after)), "bytes_before": moved(before),
        "bytes_after": moved(after), "extern": dict(Counter(step.extern for step in extern)),
        "language": "triton" if "async_compile.triton" in code else "cpp", "vector_width": max(widths, default=None),
        "not_fused": not_fused(texts["fusion"]),
    })  # fmt: skip
    phase.table("from operators to kernels; MB are what the loops read and write", (
        {"graph": f"{i} {'backward' if graph.backward else 'forward'}", "operators": graph.operations,
         "loops": len(loops(graph.before)), "after fusion": len(loops(graph.after)),
         "kernel calls": len(graph.kernels()), "extern calls": len(graph.after) - len(loops(graph.after)),
         "MB unfused": moved(graph.before) / 1e6, "MB fused": moved(graph.after) / 1e6}
        for i, graph in enumerate(graphs)
    ))  # fmt: skip
    phase.note(
        "A pointwise operator is inlined into the loop that uses it as the graph is lowered; fusion then joins loops. "
        "A C++ kernel is a function with all the loops between two extern calls; a Triton kernel is one fused loop."
    )
    phase.table("generated kernels", facts["kernels"])
    rows = []
    for name, calls in facts["extern"].items():
        kind = "library" if LIBRARY.search(name) else "ATen's own kernel" if "aten" in name else "custom operator"
        rows.append([name, calls, kind, distinct((step for step in extern if step.extern == name), "lines")])
    phase.table("not generated: extern calls", rows, "function|calls|what it is|lines")
    phase.table("why not fused, from torch's fusion log", facts["not_fused"].items(), "torch's reason|pairs")
    # The first fused loops, or the first ones.
    for step in sorted((step for step in after if step.indexing), key=lambda step: step.parts < 2)[:1]:
        sizes, indices = step.indexing
        rows = [[f"{name} = {index}", access, in_words(index, sizes)] for name, index, access in indices]
        over = ", ".join(f"{var} < {size}" for var, size in sizes.items())
        phase.table(f"SymPy indexing of the first loops in {step.name}: {over}", rows, "index|access|meaning")
    phase.code("loop IR before fusion", "\n".join(texts["ir_pre_fusion"]))
    phase.code("loop IR after fusion", "\n".join(texts["ir_post_fusion"]))
    for i, graph in enumerate(graphs[:CODES]):
        phase.code(f"generated code of graph {i}", graph.code)
    fallbacks(subject, phase, {s.extern: s for s in extern if "aten" in s.extern and not LIBRARY.search(s.extern)})
    for hint in dict.fromkeys(texts["perf_hints"]):
        if not hint.startswith(("Skip comprehensive padding", "Using FallbackKernel")):
            phase.finding("a performance hint of torch's", " ".join(hint.split())[:300])
    examples(subject, phase)
    wide = f", {max(widths)} numbers wide" if widths else ""
    phase.answer = (
        f"{facts['operations']} operators become {facts['kernels_before']} loops, fused to {facts['kernels_after']} in "
        f"{sum(k['calls'] for k in facts['kernels'])} calls of {len(facts['kernels'])} {facts['language']} kernels"
        f"{wide}: {moved(after) / 1e6:.3g} MB moved, {moved(before) / 1e6:.3g} unfused; {len(extern)} extern calls"
    )


def loops(steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if not step.extern]


def moved(steps: Iterable[Step]) -> int:
    return sum(step.bytes for step in loops(steps))


def distinct(steps: Iterable[Step], what: str) -> list[str]:
    return list(dict.fromkeys(each for step in steps for each in getattr(step, what)))


def kernels_of(graphs: list[Lowered]) -> list[dict]:
    """Each generated kernel once; each graph numbers its own from 0, so two may share a name."""
    found = {}
    for i, graph in enumerate(graphs):
        for name, steps in graph.kernels():
            found.setdefault((i, name), []).append(steps)
    return [
        {"name": name, "graph": i, "calls": len(calls), "loops": sum(step.parts for steps in calls for step in steps)}
        | {key: distinct((step for steps in calls for step in steps), key) for key in ("operations", "lines")}
        for (i, name), calls in found.items()
    ]


def not_fused(texts: list[str]) -> dict[str, int]:
    """The reasons in torch's fusion log, each with the pairs of loops and extern calls that it kept apart."""
    graph, pairs = 0, set()
    for text in texts:
        graph += "attempting fusion (1/" in text
        if held := re.match(r"cannot fuse (\S+) with (\S+): (.+)", text):
            pairs.add((graph, held[1], held[2], re.split(r"[(:\[{]| \d", held[3])[0].strip()))
    return dict(Counter(reason for *_, reason in sorted(pairs)).most_common())


def in_words(index, sizes: dict) -> str:
    """What a SymPy index says of each loop variable: a stride, a broadcast; and of the indices that were loaded."""
    index, said = index.expand(), []
    for var in sizes:
        stride = index.coeff(var)
        if not index.has(var):
            said.append(f"the same for each {var}")
        elif (index - stride * var).has(var):
            said.append(f"{var} through a division or a remainder")
        else:
            said.append(f"{var} is contiguous" if stride == 1 else f"a step of {var} is {stride} elements")
    loaded = sorted(str(each) for each in index.free_symbols if str(each).startswith("indirect"))
    return "; ".join([*said, *(f"{each} is an index that was loaded" for each in loaded)])


def fallbacks(subject: Subject, phase: Phase, steps: dict[str, Step]) -> None:
    """A finding for each ATen operator without loops that takes 1 % of a call of the model in eager, or who knows."""
    if not steps:
        return
    call = subject.caller(*subject.fresh())
    call()
    least = LEAST * subject.once(call)[0]
    averages = subject.profiled(call).key_averages()
    times = {e.key: (e.device_time_total if subject.on_gpu else e.cpu_time_total) / 1e3 for e in averages}
    for name, step in steps.items():
        operator = re.sub(r"^(torch\.ops\.)?aten\.|\.\w+$", "", name)
        ms = times.get(f"aten::{operator}")
        if ms is None or ms > least:
            where = ", ".join(step.lines)
            phase.finding(f"{operator} is not compiled", NO_LOOPS, where=where, ms=ms, at_most=True)


def examples(subject: Subject, phase: Phase) -> None:
    """The chapter's two: sin, mul and add; and a product with bias and ReLU."""
    linear = nn.Sequential(nn.Linear(256, 256), nn.ReLU()).to(subject.device)
    phase.facts["claims"] = {}
    for name, (model, inputs) in {"sin_mul_add": pointwise(), "linear_relu": (linear, (torch.randn(64, 256),))}.items():
        inputs = [each.to(subject.device) for each in inputs]
        torch.compiler.reset()
        with torch.no_grad():
            graph = lower(lambda backend, m=model, x=inputs: torch.compile(m, backend=backend)(*x))[0]
        generated, extern = len(graph.kernels()), dict(Counter(step.extern for step in graph.after if step.extern))
        phase.facts["claims"][name] = generated if name == "sin_mul_add" else {"extern": extern, "generated": generated}
        fused = ", ".join(distinct(loops(graph.after), "operations"))
        kernels = counted(generated, "generated kernel")
        phase.note(f"{name}: {kernels}, with {fused}; extern calls: {', '.join(extern) or 'none'}.")


if __name__ == "__main__":
    raise SystemExit(main(phase="inductor_codegen"))
