"""Guards: what each cache entry checks, its symbolic shapes, what another batch size recompiles, what guards cost."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import zip_longest
from types import CodeType

import torch

from compile_inspect import own_code, watch
from compile_inspect.frame_evaluation import converted, entries_of
from compile_inspect.main import main
from compile_inspect.report import Phase, Skip, reason_of
from compile_inspect.subject import Subject

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


def of_shapes(codes: list[CodeType]) -> list[str]:
    """Guards on sizes and strides, in the cache entries of these codes, as expressions."""
    texts = [plain(text) for code in codes for entry in entries_of(code) for _, text in parse(entry)]
    return [text for text in texts if re.search(r"\.(size|stride|storage_offset)\(\)", text)]


def look(subject: Subject, phase: Phase) -> None:
    facts, raw, symbols = phase.facts, [], {}
    look_at_entries(subject, phase)
    # Always shown: a branch on a size, as the ShapeEnv holds it and as it is installed.
    torch.compiler.reset()
    fn, raw_of_it = own_code(lambda a: a + 1 if a.shape[0] * 2 < 16 else a - 1), []
    compile_symbolic(fn, raw_of_it, {})(torch.ones(10))
    facts["example"] = said = {"raw": raw_of_it[0], "installed": of_shapes([fn.__code__])[0]}
    phase.note(
        "An example: `a + 1 if a.shape[0] * 2 < 16 else a - 1` with 10 rows and dynamic=True. Its raw guard, "
        f"{said['raw']}, is installed as {said['installed']}: solved for the size, and checked without the symbol."
    )
    batch, facts["recompilation"], codes, dynamic = subject.batch or 0, None, [], []
    if batch:
        try:
            subject.caller(subject.fresh()[0], *subject.resized(batch + 1))()
        except Exception as error:
            phase.note(f"In eager the model does not take another batch size than {batch}: {reason_of(error)}")
            batch = 0
    with phase.noted("With dynamic=True it cannot be compiled"):
        dynamic, _, codes = three_sizes(subject, batch, lambda fn: compile_symbolic(fn, raw, symbols))
    installed, duck = of_shapes(codes), [each["of"] for each in symbols.values() if len(each["of"]) > 1]
    facts |= {"symbols": symbols, "duck": duck, "shape_guards": {"raw": raw, "installed": installed}}
    rows = [[name, *each.values()] for name, each in symbols.items()]
    phase.table("symbols, with dynamic=True", rows, "symbol|now|range|sizes (several: duck shaping)")
    rows = zip_longest(raw, installed)
    phase.table("shape guards, each column in its own order", rows, "raw, in the ShapeEnv|installed")
    then = look_at_recompilation(subject, phase, batch, dynamic) if batch else "another batch size was not tried"
    guards, entries = sum(each["guards"] for each in facts["entries"]), len(facts["entries"])
    cost = "" if facts["share"] is None else f" take {facts['guard_us']:.0f} us, {facts['share']:.1%} of a call"
    phase.answer = f"{guards} guards in {entries} cache entr{'y' if entries == 1 else 'ies'}{cost}; {then}"


def look_at_entries(subject: Subject, phase: Phase) -> None:
    """The guard tree of each cache entry, and what it takes in each call."""
    call = subject.compiled(backend="eager")
    with converted() as frames:
        call()
    entries = [(code.co_name, entry) for code in dict.fromkeys(old for old, _ in frames) for entry in entries_of(code)]
    if not entries:
        raise Skip("Dynamo compiles no frame of this model, so nothing is guarded")
    texts, phase.facts["entries"] = defaultdict(list), []
    for name, entry in entries:
        held = parse(entry)
        for kind, text in held:
            texts[kind].append(text)
        kinds = dict(Counter(kind for kind, _ in held).most_common())
        phase.facts["entries"].append({"frame": name, "guards": len(held), "kinds": kinds})
        phase.code(f"guard tree of {name}", str(entry.guard_manager))
    rows = [[kind, len(held), in_words(kind, min(held, key=lambda text: "L['" not in text))]  # one of the model's own
            for kind, held in sorted(texts.items(), key=lambda item: -len(item[1]))]  # fmt: skip
    phase.table("guards by kind", rows, "kind|guards|the first of them, in words")
    phase.facts["same_inputs"] = 0
    for _ in range(3):
        with watch() as seen:
            call()
        phase.facts["same_inputs"] += bool(seen.recompiles)
    if phase.facts["same_inputs"] == 3:  # one compilation more is how a number becomes dynamic
        phase.finding(
            f"each call with the same inputs compiles again: {plain(seen.recompiles[-1].splitlines()[0])}",
            "keep what changes between calls, as a counter or a list, in a tensor or outside the compiled function",
            ms=seen.frames[-1].seconds * 1e3,
        )
    look_at_time(subject, phase, subject.timed(call).ms)


def look_at_time(subject: Subject, phase: Phase, ms: float) -> None:
    """What guards take of a call that takes so many milliseconds, and what is left where modules are not guarded."""
    phase.facts |= {"guard_us": None, "share": None}
    # The stance refuses models that compile anew in each call, and some without tensors.
    with phase.noted("Their time cannot be measured"):
        us = guard_us(subject)
        phase.facts |= {"guard_us": us, "share": us / 1e3 / ms}
        phase.note(
            f"Guards take {us:.0f} us of a call, which with backend eager takes {ms:.3g} ms; of a faster one their "
            "share is larger. It is measured with the stance skip_guard_eval_unsafe against the default one."
        )
        filtered = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        if us / 1e3 > DEAR * ms and subject.held and (left := guard_us(subject, options=filtered)) < 0.8 * us:
            fix = ("if no module changes after the first call: torch.compile(model, options={'guard_filter_fn': "
                   "torch.compiler.skip_guard_on_all_nn_modules_unsafe})")  # fmt: skip
            cost = {"ms": us / 1e3, "share": us / 1e3 / ms, "tried": f"{left:.0f} us are left."}
            phase.finding(f"guards take {us:.0f} us of each call", fix, **cost)


def guard_us(subject: Subject, **options) -> float:
    """Microseconds of guards in a call: with them against without. Graphs only return what they first computed."""

    def returns(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        held = []
        return lambda *values: held[0] if held else held.append(graph.forward(*values)) or held[0]

    fn, args, kwargs = subject.fresh()
    compiled = torch.compile(fn, backend=returns, **options)

    def ms() -> float:
        # The least: microseconds, which another process would drown in a mean.
        return min(subject.once(lambda: compiled(*args, **kwargs))[1] for _ in range(CALLS))

    found = []
    with subject.grad():
        for _ in range(ROUNDS):
            checked = ms()
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                found.append(checked - ms())
    return max(sorted(found)[1], 0.0) * 1e3  # what other processes take makes it larger


def compile_symbolic(fn: Callable, raw: list[str], symbols: dict[str, dict]) -> Callable:
    """fn compiled with dynamic=True; when it is called, the raw guards of its ShapeEnv and its symbols are added."""

    def backend(graph: torch.fx.GraphModule, inputs: list):
        env = torch._guards.TracingContext.get().fake_mode.shape_env
        raw.extend(text for text in map(str, (guard.expr for guard in env.guards)) if "zf" not in text)  # no floats
        ranges = {str(symbol): f"{span.lower} to {span.upper}" for symbol, span in env.var_to_range.items()}
        for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=False):
            for i, size in enumerate(getattr(node.meta.get("example_value"), "shape", ())):
                if isinstance(size, torch.SymInt):
                    new = {"now": int(value.shape[i]), "range": ranges.get(str(size), "follows from others"), "of": []}
                    place = f"{node.name.removeprefix('l_').strip('_')}.size({i})"
                    symbols.setdefault(str(size), new)["of"].append(place)
        return graph.forward

    return torch.compile(fn, backend=backend, dynamic=True)


def three_sizes(subject: Subject, batch: int, wrap: Callable, mark: Callable | None = None) -> tuple[list, list, list]:
    """wrap(model) is called with batch, batch + 1 and batch + 2 rows: frames compiled, what was seen, of which code."""
    compiled, calls, codes = wrap(subject.fresh()[0]), [], {}
    for size in range(batch, batch + 3) if batch else [0]:
        with watch() as seen, converted() as frames:
            subject.caller(compiled, *subject.resized(size, mark))()
        calls.append(seen)
        codes |= dict.fromkeys(old for old, _ in frames)
    # A frame without a name is a backward graph.
    return [sum(frame.name is not None for frame in seen.frames) for seen in calls], calls, list(codes)


def look_at_recompilation(subject: Subject, phase: Phase, batch: int, dynamic: list[int]) -> str:
    """A call with one more row: the guard that fails, the compilation that it causes, and the fixes, tried."""
    count, calls, _ = three_sizes(subject, batch, lambda fn: torch.compile(fn, backend="aot_eager"))
    if not calls[1].recompiles:
        return "another batch size compiles nothing"
    counts = {"as it is": count}
    with phase.noted("With mark_dynamic it cannot be compiled"):
        mark, wrap = torch._dynamo.mark_dynamic, lambda fn: torch.compile(fn, backend="eager")
        counts["mark_dynamic"] = three_sizes(subject, batch, wrap, mark)[0]
    counts |= {"dynamic=True": dynamic} if dynamic else {}
    reason = re.sub(r"^\d+/\d+: ", "", calls[1].recompiles[0].splitlines()[0])  # without the frame's number
    seconds = sum(frame.seconds for frame in calls[1].frames)
    phase.facts["recompilation"] = {"reason": reason, "seconds": seconds, "dynamic": not count[2], "counts": counts}
    columns = "|".join(["frames compiled", *(f"batch {batch + extra}" for extra in range(3))])
    phase.table("another batch size", [[name, *each] for name, each in counts.items()], columns)
    phase.note(f"The guard that fails: {reason}. Compiling again takes {seconds:.2g} s, and Inductor comes on top.")
    best = min(counts, key=lambda name: sum(counts[name]))
    if best in FIXES:
        tried = f"frames compiled for three sizes: {sum(counts[best])} instead of {sum(count)}."
        what = f"another batch size ({batch} -> {batch + 1}) recompiles: {reason}"
        phase.finding(what, FIXES[best], seconds=seconds, tried=tried)
    return f"a batch of {batch + 1} recompiles, {'as does each size' if count[2] else 'and then serves every size'}"


if __name__ == "__main__":
    raise SystemExit(main(phase="guards"))
