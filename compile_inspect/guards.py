"""Guards: what each cache entry checks, its symbolic shapes, what another batch size recompiles, what guards cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from types import CodeType

import torch

from compile_inspect.frame_evaluation import converted, entries_of
from compile_inspect.fresh import own_code
from compile_inspect.logs import logs
from compile_inspect.main import main
from compile_inspect.report import Phase, Skip
from compile_inspect.subject import Subject, batch_of, resized
from compile_inspect.timing import once, time_calls
from compile_inspect.watching import Compiled, watch

QUESTION = "What does a call check before it runs compiled code, what does that cost, and what makes it compile again?"
DEAR, ROUNDS, CALLS = 0.05, 7, 20  # share of a call that is a finding; turns, and calls of each
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
    batch, facts = batch_of(subject) or 0, phase.facts
    facts["recompilation"] = None
    batch = batch if batch and takes_another(subject, phase, batch) else 0
    counts = look_at_symbols(subject, phase, batch)
    said = look_at_recompilation(subject, phase, batch, counts) if batch else "another batch size was not tried"
    guards, entries = sum(each["guards"] for each in facts["entries"]), len(facts["entries"])
    cost = "" if facts["share"] is None else f" take {facts['guard_us']:.0f} us, {facts['share']:.1%} of a call"
    phase.answer = f"{guards} guards in {entries} cache entr{'y' if entries == 1 else 'ies'}{cost}; {said}"


def look_at_entries(subject: Subject, phase: Phase) -> None:
    """The guard tree of each cache entry, and what it takes in each call."""
    call = subject.compiled(backend="eager")
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
        phase.code(f"guard tree of {name}", str(entry.guard_manager))
    rows = []
    for kind, n in Counter(kind for kind, _ in guards).most_common():  # one of the model's own, if there is one
        first = min((text for each, text in guards if each == kind), key=lambda text: "L['" not in text)
        rows.append([kind, n, in_words(kind, first)])
    phase.table("guards by kind", ["kind", "guards", "the first of them, in words"], rows)
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
    phase.facts |= {"guard_us": None, "share": None}
    # The stance refuses models that compile anew in each call, and some without tensors.
    with phase.noted("Their time cannot be measured"):
        phase.facts["guard_us"] = guard_us(subject)
    if (us := phase.facts["guard_us"]) is None:
        return
    phase.facts["share"] = share = us / 1e3 / ms
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

    def ms() -> float:
        # The least: microseconds, which another process would drown in a mean.
        return min(once(lambda: compiled(*args, **kwargs), subject)[1] for _ in range(CALLS))

    found = []
    with subject.grad(), logs():
        for _ in range(ROUNDS):
            checked = ms()
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                found.append(checked - ms())
    return max(sorted(found)[1], 0.0) * 1e3  # what other processes take makes it larger


def compile_symbolic(fn: Callable, raw: list[str], symbols: dict[str, dict]) -> Callable:
    """fn compiled with dynamic=True; when it is called, the raw guards of its ShapeEnv and its symbols are added."""

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

    return torch.compile(fn, backend=backend, dynamic=True)


def shrinks(a):
    return a + 1 if a.shape[0] * 2 < 16 else a - 1


def look_at_example(phase: Phase) -> None:
    """Always shown: a branch on a size, as the ShapeEnv holds it and as it is installed."""
    torch.compiler.reset()
    fn, raw = own_code(shrinks), []
    compile_symbolic(fn, raw, {})(torch.ones(10))
    phase.facts["example"] = said = {"raw": raw[0], "installed": of_shapes(entries_of(fn.__code__)[0])[0]}
    phase.note(
        "An example: `a + 1 if a.shape[0] * 2 < 16 else a - 1` with 10 rows and dynamic=True. Its raw guard, "
        f"{said['raw']}, is installed as {said['installed']}: solved for the size, and checked without the symbol."
    )


def look_at_symbols(subject: Subject, phase: Phase, batch: int) -> list[int]:
    """Symbolic shapes of the model, compiled with dynamic=True; the frames compiled for each of three batch sizes."""
    raw, symbols, counts, codes = [], {}, [], []
    with phase.noted("With dynamic=True it cannot be compiled"):
        calls, codes = three_sizes(subject, batch, lambda fn: compile_symbolic(fn, raw, symbols))
        counts = [frames_of(seen) for seen in calls]
    installed = [text for code in codes for entry in entries_of(code) for text in of_shapes(entry)]
    duck = [each["of"] for each in symbols.values() if len(each["of"]) > 1]
    phase.facts |= {"symbols": symbols, "duck": duck, "shape_guards": {"raw": raw, "installed": installed}}
    rows = [[name, each["now"], each["range"], ", ".join(each["of"])] for name, each in symbols.items()]
    phase.table("symbols, with dynamic=True", ["symbol", "now", "range", "sizes (several: duck shaping)"], rows)
    rows = [list(pair) for pair in zip_longest(raw, installed)]
    phase.table("shape guards, each column in its own order", ["raw, in the ShapeEnv", "installed"], rows)
    return counts


def three_sizes(
    subject: Subject, batch: int, wrap: Callable, mark: Callable | None = None
) -> tuple[list[Compiled], list[CodeType]]:
    """What wrap(model) compiles when it is called with batch, batch + 1 and batch + 2 rows, and of which code."""
    compiled, calls, codes = wrap(subject.fresh()[0]), [], {}
    for size in range(batch, batch + 3) if batch else [0]:
        with watch() as seen, converted() as frames, logs():
            subject.caller(compiled, *resized(subject, size, mark))()
        calls.append(seen)
        codes |= dict.fromkeys(old for old, _ in frames)
    return calls, list(codes)


def frames_of(seen: Compiled) -> int:
    return sum(frame.name is not None for frame in seen.frames)  # one without a name is a backward graph


def takes_another(subject: Subject, phase: Phase, batch: int) -> bool:
    """Whether eager takes one more row, too."""
    with phase.noted(f"In eager the model does not take another batch size than {batch}"):
        subject.caller(subject.fresh()[0], *resized(subject, batch + 1))()
        return True
    return False


def look_at_recompilation(subject: Subject, phase: Phase, batch: int, dynamic: list[int]) -> str:
    """A call with one more row: the guard that fails, the compilation that it causes, and the fixes, tried."""
    (first, second, third), _ = three_sizes(subject, batch, lambda fn: torch.compile(fn, backend="aot_eager"))
    if not second.recompiles:
        return "another batch size compiles nothing"
    counts, dynamic_now = {"as it is": [frames_of(seen) for seen in (first, second, third)]}, not frames_of(third)
    with phase.noted("With mark_dynamic it cannot be compiled"):
        marked, _ = three_sizes(
            subject, batch, lambda fn: torch.compile(fn, backend="eager"), torch._dynamo.mark_dynamic
        )
        counts["mark_dynamic"] = [frames_of(seen) for seen in marked]
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
    raise SystemExit(main(phase="guards"))
