"""Guards: what each cache entry checks, its symbolic shapes, what another batch size recompiles, what guards cost."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest

import torch
from torch.utils._pytree import tree_leaves, tree_map

from compile_inspect.dynamo_capture import listed
from compile_inspect.frame_evaluation import converted, entries_of
from compile_inspect.fresh import own_code
from compile_inspect.inspecting import reason_of
from compile_inspect.logs import logs
from compile_inspect.report import Phase, Skip
from compile_inspect.subject import Subject
from compile_inspect.timing import time_calls
from compile_inspect.watching import Compiled, watch

QUESTION = "What does a call check before it runs compiled code, what does that cost, and what makes it compile again?"
DEAR, ROUNDS, CALLS, LINES = 0.05, 7, 20, 400  # share of a call that is a finding; turns, calls of each; lines shown
TENSOR = re.compile(r"check_tensor\((.+), (\w+), DispatchKeySet\((\w+)\b.*?\), torch\.(\w+), device=(\w+), "
                    r"requires_grad=(\w+), size=(\[.*?\]), stride=(\[.*?\])\)")  # fmt: skip
FIXES = {"mark_dynamic": "torch._dynamo.mark_dynamic(x, 0) on the inputs before the first call",
         "dynamic=True": "torch.compile(model, dynamic=True)"}  # fmt: skip


def plain(text: str) -> str:
    """A source as it is written in Python: L['self']._modules['up']._parameters['bias'] is self.up.bias."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", text.split("  #")[0].strip())
    text = re.sub(r"__import_(\w+)", lambda name: name[1].replace("_dot_", "."), text)
    return re.sub(r"\b[LG]\['([\w.]+)'\]", r"\1", text)


def in_words(kind: str, text: str) -> str:
    if found := TENSOR.search(text):
        name, made, key, dtype, index, grad, *sizes = found.groups()
        device = key.lower() + (f":{index}" if index != "None" else "")
        size, stride = (each.replace("None", "any") for each in sizes)
        return f"{plain(name)} is a {dtype} {made} on {device}, size {size}, stride {stride}, requires_grad {grad}"
    if found := re.match(r"___check_type_id\((.+), \d+\), type=<class '(.+?)'>", text):
        return f"type({plain(found[1])}) is {found[2]}"
    if found := re.match(r"___check_obj_id\((.+), \d+\)", text):
        return f"{plain(found[1])} is the object that it was"
    if kind == "GLOBAL_STATE":
        return "grad mode, autocast, deterministic algorithms and default dtype are as they were"
    return plain(text)


def parse(entry) -> list[tuple[str, str]]:
    """(kind, text) of each guard in an entry's tree."""
    return re.findall(r"\+- ([A-Z][A-Z_]+)(?:: (.*))?$", str(entry.guard_manager), re.MULTILINE)


def of_shapes(entry) -> list[str]:
    """Guards on sizes and strides as expressions."""
    return [plain(text) for _, text in parse(entry) if re.search(r"\.(size|stride|storage_offset)\(\)", plain(text))]


def look(subject: Subject, phase: Phase) -> None:
    look_at_entries(subject, phase)
    look_at_example(phase)
    batch, facts = batch_of(subject, phase), phase.facts
    counts = look_at_symbols(subject, phase, batch)
    said = look_at_recompilation(subject, phase, batch, counts) if batch else "another batch size was not tried"
    guards, entries = sum(each["guards"] for each in facts["entries"]), len(facts["entries"])
    cost = "" if facts["share"] is None else f" take {facts['guard_us']:.0f} us, {facts['share']:.1%} of a call"
    phase.answer = f"{guards} guards in {entries} cache entr{'y' if entries == 1 else 'ies'}{cost}; {said}"


def look_at_entries(subject: Subject, phase: Phase) -> None:
    """The guard tree of each cache entry, and what it takes in each call."""
    fn, args, kwargs = subject.fresh()
    call = subject.caller(torch.compile(fn, backend="eager"), args, kwargs)
    with converted() as frames, logs():
        call()
    entries = [(code.co_name, entry) for code in dict.fromkeys(old for old, _ in frames) for entry in entries_of(code)]
    if not entries:
        raise Skip("Dynamo compiles no frame of this model, so nothing is guarded")
    guards, phase.facts["entries"] = [], []
    for name, entry in entries:
        guards += (held := parse(entry))
        kinds = dict(Counter(kind for kind, _ in held).most_common())
        phase.facts["entries"].append({"frame": name, "guards": len(held), "kinds": kinds})
        lines = str(entry.guard_manager).strip().splitlines()
        more = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
        phase.code(f"guard tree of {name}", "\n".join(lines[:LINES] + more), "text")
    first = {}
    for kind, text in guards:  # one of the model's own, if there is one
        if kind not in first or "L['" not in first[kind]:
            first[kind] = text
    rows = [[kind, n, in_words(kind, first[kind])] for kind, n in Counter(kind for kind, _ in guards).most_common()]
    listed(phase, "guards by kind", ["kind", "guards", "the first of them, in words"], rows)
    again = []
    for _ in range(3):
        with watch() as seen, logs():
            call()
        again += [(seen.frames[0].seconds, *seen.recompiles)] if seen.recompiles else []
    phase.facts["same_inputs"] = len(again)
    if len(again) == 3:  # one more compilation is how a number becomes dynamic
        seconds, reason = again[-1][:2]
        phase.finding(
            f"each call with the same inputs compiles again: {plain(reason.splitlines()[0])}",
            "keep what changes between calls, as a counter or a list, in a tensor or outside the compiled function; "
            "torch.compile gives up at torch._dynamo.config.recompile_limit", ms=seconds * 1e3,
        )  # fmt: skip
    look_at_time(subject, phase, time_calls(call, subject).ms)


def look_at_time(subject: Subject, phase: Phase, ms: float) -> None:
    """What guards take of a call that takes so many milliseconds, and what is left where modules are not guarded."""
    try:
        us = guard_us(subject)
    except RuntimeError as error:  # the stance refuses models that compile anew in each call, and some without tensors
        phase.facts |= {"guard_us": None, "share": None}
        return phase.note(f"Their time cannot be measured: {reason_of(error)}")
    phase.facts |= {"guard_us": us, "share": (share := us / 1e3 / ms)}
    phase.note(
        f"Guards take {us:.0f} us of a call, which with backend eager takes {ms:.3g} ms: measured with the stance "
        f"skip_guard_eval_unsafe against the default one, the second-lowest of {ROUNDS} turns, as what else runs here "
        "adds to it. Of a faster call their share is larger."
    )
    filtered = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    if share > DEAR and subject.held and (left := guard_us(subject, options=filtered)) < 0.8 * us:
        phase.finding(
            f"guards take {us:.0f} us of each call", "if no module changes after the first call: torch.compile(model, "
            "options={'guard_filter_fn': torch.compiler.skip_guard_on_all_nn_modules_unsafe})",
            ms=us / 1e3, share=share, tried=f"{left:.0f} us are left.",
        )  # fmt: skip


def guard_us(subject: Subject, **options) -> float:
    """Microseconds of guards in a call: with them against without. Graphs only return what they first computed."""

    def returns(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        held = []

        def run(*values):
            if not held:
                held.append(graph.forward(*values))
            return held[0]

        return run

    fn, args, kwargs = subject.fresh()
    compiled = torch.compile(fn, backend=returns, **options)

    def seconds() -> float:
        took = []
        for _ in range(CALLS):
            started = time.perf_counter()
            compiled(*args, **kwargs)
            took.append(time.perf_counter() - started)
        return min(took)  # microseconds, which another process would drown in a mean

    found = []
    with subject.grad(), logs():
        for _ in range(ROUNDS):
            checked = seconds()
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                found.append(checked - seconds())
    return max(sorted(found)[1], 0.0) * 1e6  # what other processes take makes it larger


def compile_symbolic(fn: Callable) -> tuple[Callable, list[str], dict[str, dict]]:
    """(fn compiled with dynamic=True, raw guards of its ShapeEnv, its symbols); both fill up when it is called."""
    raw, symbols = [], {}

    def backend(graph: torch.fx.GraphModule, inputs: list):
        env = torch._guards.TracingContext.get().fake_mode.shape_env
        raw.extend(str(guard.expr) for guard in env.guards)
        ranges = {str(symbol): f"{span.lower} to {span.upper}" for symbol, span in env.var_to_range.items()}
        for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=False):
            for i, size in enumerate(getattr(node.meta.get("example_value"), "shape", ())):
                if isinstance(size, torch.SymInt):
                    new = {"now": int(value.shape[i]), "range": ranges.get(str(size), "follows from others"), "of": []}
                    place = f"{node.name.removeprefix('l_').strip('_')}.size({i})"
                    symbols.setdefault(str(size), new)["of"].append(place)
        return graph.forward

    return torch.compile(fn, backend=backend, dynamic=True), raw, symbols


def shrinks(a):
    return a + 1 if a.shape[0] * 2 < 16 else a - 1


def look_at_example(phase: Phase) -> None:
    """Always shown: a branch on a size, as the ShapeEnv holds it and as it is installed."""
    torch.compiler.reset()
    fn = own_code(shrinks)
    compiled, raw, _ = compile_symbolic(fn)
    compiled(torch.ones(10))
    phase.facts["example"] = said = {"raw": raw[0], "installed": of_shapes(entries_of(fn.__code__)[0])[0]}
    phase.note(
        "An example: `a + 1 if a.shape[0] * 2 < 16 else a - 1` with 10 rows and dynamic=True. Its raw guard, "
        f"{said['raw']}, is installed as {said['installed']}: solved for the size, and checked without the symbol."
    )


def look_at_symbols(subject: Subject, phase: Phase, batch: int) -> list[int]:
    """Symbolic shapes of the model, compiled with dynamic=True; the frames compiled for each of three batch sizes."""
    fn, args, kwargs = subject.fresh()
    compiled, raw, symbols = compile_symbolic(fn)
    counts, codes = [], {}
    try:
        for extra in range(3 if batch else 1):
            with watch() as seen, converted() as frames, logs():
                subject.caller(compiled, *grown((args, kwargs), batch, extra))()
            counts.append(frames_of(seen))
            codes |= dict.fromkeys(old for old, _ in frames)
    except Exception as error:
        phase.note(f"With dynamic=True it cannot be compiled: {reason_of(error)}")
        counts.clear()
    installed = [text for code in codes for entry in entries_of(code) for text in of_shapes(entry)]
    duck = [each["of"] for each in symbols.values() if len(each["of"]) > 1]
    phase.facts |= {"symbols": symbols, "duck": duck, "shape_guards": {"raw": raw, "installed": installed}}
    rows = [[name, each["now"], each["range"], ", ".join(each["of"])] for name, each in symbols.items()]
    listed(phase, "symbols, with dynamic=True", ["symbol", "now", "range", "sizes (several: duck shaping)"], rows)
    rows = [list(pair) for pair in zip_longest(raw, installed)]
    listed(phase, "shape guards, each column in its own order", ["raw, in the ShapeEnv", "installed"], rows)
    return counts


def three_sizes(subject: Subject, batch: int, mark: bool = False, **options) -> list[Compiled]:
    """What the model compiles when it is called with batch, batch + 1 and batch + 2 rows."""
    fn, args, kwargs = subject.fresh()
    compiled, calls = torch.compile(fn, **options), []
    for extra in range(3):
        given = grown((args, kwargs), batch, extra)
        for leaf in tree_leaves(given) if mark else []:
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == batch + extra:
                torch._dynamo.mark_dynamic(leaf, 0)
        with watch() as seen, logs():
            subject.caller(compiled, *given)()
        calls.append(seen)
    return calls


def frames_of(seen: Compiled) -> int:
    return sum(frame.name is not None for frame in seen.frames)  # one without a name is a backward graph


def grown(tree, batch: int, extra: int):
    """Arguments with `extra` more rows in each tensor that has `batch` of them."""

    def more(leaf):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != batch:
            return leaf
        return torch.cat([leaf.detach()] + [leaf.detach()[:1]] * extra).requires_grad_(leaf.requires_grad)

    return tree_map(more, tree)


def batch_of(subject: Subject, phase: Phase) -> int:
    """Dimension 0 of the first tensor, if eager takes one more row too; otherwise 0."""
    phase.facts["recompilation"] = None
    fn, args, kwargs = subject.fresh()
    batch = next((x.shape[0] for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()), 0)
    try:
        if batch:
            subject.caller(fn, *grown((args, kwargs), batch, 1))()
    except Exception as error:
        phase.note(f"In eager the model does not take another batch size than {batch}: {reason_of(error)}")
        return 0
    return batch


def look_at_recompilation(subject: Subject, phase: Phase, batch: int, dynamic: list[int]) -> str:
    """A call with one more row: the guard that fails, the compilation that it causes, and the fixes, tried."""
    first, second, third = three_sizes(subject, batch, backend="aot_eager")
    if not second.recompiles:
        return "another batch size compiles nothing"
    counts, dynamic_now = {"as it is": [frames_of(seen) for seen in (first, second, third)]}, not frames_of(third)
    try:
        counts["mark_dynamic"] = [frames_of(seen) for seen in three_sizes(subject, batch, mark=True, backend="eager")]
    except Exception as error:
        phase.note(f"With mark_dynamic it cannot be compiled: {reason_of(error)}")
    counts |= {"dynamic=True": dynamic} if dynamic else {}
    reason, seconds = second.recompiles[0].splitlines()[0], sum(frame.seconds for frame in second.frames)
    phase.facts["recompilation"] = {"reason": reason, "seconds": seconds, "dynamic": dynamic_now, "counts": counts}
    columns = ["frames compiled", *(f"batch {batch + extra}" for extra in range(3))]
    phase.table("another batch size", columns, [[name, *each] for name, each in counts.items()])
    phase.note(
        f"Another batch size fails a guard: {reason}. Dynamo and AOTAutograd compile again, {seconds:.2g} s (backend "
        f"aot_eager); Inductor comes on top. The new entry is {'dynamic' if dynamic_now else 'static again'}."
    )
    best = min(counts, key=lambda name: sum(counts[name]))
    if best in FIXES:
        phase.finding(
            f"another batch size ({batch} -> {batch + 1}) recompiles: {reason}", FIXES[best], seconds=seconds,
            tried=f"frames compiled for three sizes: {sum(counts[best])} instead of {sum(counts['as it is'])}.",
        )  # fmt: skip
    return f"a batch of {batch + 1} recompiles, {'and then serves every size' if dynamic_now else 'as does each size'}"


if __name__ == "__main__":
    from compile_inspect.main import main

    sys.exit(main(phase="guards"))
