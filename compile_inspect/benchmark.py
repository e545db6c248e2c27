"""Eager against compiled by batch size: speed-up, calls until compiling has paid, and a roofline's bound.

The roofline is a lower bound of time: what a call computes and moves, over what this device reaches in a matmul and in
a copy. Eager moves bytes operation by operation; compiled code reads inputs and parameters once and writes its results
once; and both do their arithmetic at the speed of a large matmul.

Where float32 matmuls leave a GPU's TF32 unused, the model is compiled again with it, and both versions are timed.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import quantiles

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from compile_inspect import fresh_cache, warm_up, watch
from compile_inspect.main import main
from compile_inspect.report import Phase, Skip, reason_of
from compile_inspect.subject import Subject, in_eager, parameters, tensors_of

QUESTION = "At which batch sizes is compiled faster, after how many calls has it paid, and what could it reach?"
SIZES, MOST, SECONDS = 8, 4, 10.0  # batch sizes, the largest over the given one, seconds after which none is begun
AGAIN = 30.0  # seconds of a first call above which the model is not compiled again
LOSS, GAIN = 0.95, 1.05  # a speed-up of which the middle half lies below the one, above the other, is not noise
TF32 = 'torch.set_float32_matmul_precision("high")'
COLUMNS = {
    "batch": "batch", "eager_ms": "eager, ms", "compiled_ms": "compiled", "speedup": "x eager",
    "break_even_calls": "paid after", "roofline_eager_ms": "bound: eager",
    "roofline_compiled_ms": "compiled", "roofline_speedup": "x eager", "bound": "by",
}  # fmt: skip
ROWS = {"embedding", "index", "index_select", "gather"}  # of their first tensor they read as much as they return
FUSED = {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}  # matmuls in them have no formula
# torch 2.11 has no formula for it.
LIKE = {"_scaled_dot_product_flash_attention_for_cpu": torch.ops.aten._scaled_dot_product_flash_attention}


def look(subject: Subject, phase: Phase) -> None:
    warm_up(subject.device)
    given, facts, rows, left_out, top, matmuls = subject.batch, phase.facts, [], [], None, 0
    model = subject.fresh()[0]
    compiled = torch.compile(model)
    # Unlike mark_dynamic it does not fail where the model needs one size.
    inputs = partial(subject.resized, mark=torch._dynamo.maybe_mark_dynamic)
    try:
        with fresh_cache(), watch() as seen:
            first_s = subject.once(subject.caller(compiled, *inputs(given)))[0] / 1e3
    except Exception as error:
        raise Skip(f"the compiled model fails: {reason_of(error)}; see the phase triage") from error
    launches, graphs = seen.kernels + seen.counters.get("inductor", {}).get("extern_calls", 0), seen.graphs
    if not graphs:
        raise Skip("Dynamo captures no graph: torch.compile leaves the whole model to eager")
    started = time.perf_counter()
    for size in sizes_around(given):
        # A dynamic graph is for sizes from 2 on: size 1 compiles again, or after it the next size.
        compiles = first_s if size == 1 or given == len(rows) == 1 else 0.0
        if given and size < subject.least_batch:
            left_out.append(f"{size} (another input may index {subject.least_batch} rows)")
            continue
        if rows and time.perf_counter() - started + compiles > SECONDS:
            left_out.append(f"{size} (no time left)")
            continue
        try:
            ours, theirs = (subject.caller(each, *inputs(size)) for each in (compiled, model))
            with watch() as seen:  # in eager is also what the model compiles inside
                eager, timed = subject.in_turns({theirs: in_eager, ours: nullcontext})
        except Exception as error:
            if size == given:
                raise
            left_out.append(f"{size} ({reason_of(error)})")
            continue
        low, times, high = quantiles([a / b for a, b in zip(eager.all, timed.all, strict=True)], n=4)
        gain = eager.ms - timed.ms
        paid = max(0, math.ceil((first_s * 1e3 - eager.ms) / gain)) if gain > 0 else None
        rows.append({"batch": size, "eager_ms": eager.ms, "compiled_ms": timed.ms, "speedup": times, "from": low,
                     "to": high, "break_even_calls": paid, "recompiled": seen.graphs})  # fmt: skip
        # Kept, should the phase run out of time at another size; the given one is the first.
        facts |= rows[0] | {"first_call_s": first_s, "sizes": rows}
        phase.changed(phase)
        with phase.noted("No roofline"):  # tensors without storage, an operator that a dispatch mode cannot see
            with in_eager():
                work = count(subject, model, *inputs(size))
            matmuls = max(matmuls, work["float32_matmuls"])
            top = top or ceilings(subject, work["compiled_bytes"])
            rows[-1] |= roofline(work, launches, top, subject.on_gpu)
    here = rows[0]
    rows.sort(key=lambda row: row["batch"] or 0)
    facts |= {"launches": launches, "graphs": graphs, "ceilings": top, "left_out": left_out}
    phase.table("a call, the calls until it has paid, and the roofline's bound in ms", rows, COLUMNS)
    if len(rows) > 1:
        phase.bars("speed-up by batch size", "x", {f"batch {row['batch']}": row["speedup"] for row in rows})
    if left_out:
        phase.note(f"Batch sizes left out: {'; '.join(left_out)}.")
    if top:
        phase.note(
            f"Measured here: {top['bytes_per_s'] / 1e9:.3g} GB/s (a copy), {top['flops_per_s'] / 1e12:.3g} TFLOP/s "
            f"({top['dtype']} matmul), {top['launch_us']:.3g} us an operation; a cache may beat these ceilings."
        )
    if here["to"] < LOSS:
        better = next((row for row in rows if row["from"] > GAIN and row["batch"] > given), None)
        fix = f"call it with batches of {better['batch']}: {better['speedup']:.2f}x" if better else "leave it in eager"
        fix += ", or mend what the other phases find"
        if here["recompiled"] > 2:
            fix = "calls with the same inputs compile again: see the phase guards"
        cost = {"ms": here["compiled_ms"] - here["eager_ms"], "share": 1 - here["speedup"]}
        phase.finding("the compiled model is slower than eager", fix, **cost)
    after = "never pays" if here["break_even_calls"] is None else f"has paid after {here['break_even_calls']:,} calls"
    if "roofline_compiled_ms" in here and (here["flops"] or launches):
        after += f"; by the roofline it takes at least {here['roofline_compiled_ms']:.3g} ms"
    phase.answer = (
        f"{f'batch {given}: ' if given else ''}{here['compiled_ms']:.3g} ms for eager's {here['eager_ms']:.3g}, "
        f"{here['speedup']:.2f}x, which {after}; faster at {sum(row['from'] > GAIN for row in rows)} of {len(rows)} "
        "batch sizes"
    )
    if matmuls and tf32_unused(subject):  # last: a large model may not have the time for it
        with phase.noted(f"Tried: {TF32}: it fails"):
            try_tf32(subject, phase, lambda: subject.caller(compiled, *inputs(given)), first_s)


def tf32_unused(subject: Subject) -> bool:
    """Whether the device computes in TF32 and float32 matmuls, by torch's default, do not."""
    if not subject.on_gpu or torch.cuda.get_device_capability(subject.device) < (8, 0):
        return False
    with suppress(RuntimeError):  # the user set torch.backends' fp32_precision instead
        return torch.get_float32_matmul_precision() == "highest"
    return False


@contextmanager
def in_tf32() -> Iterator[None]:
    """Within it float32 matmuls may use TF32.

    "highest" is not what a process begins with: each backend's own precision, which guards check, is put back too.
    """
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before, own = torch.get_float32_matmul_precision(), [backend.fp32_precision for backend in backends]
    try:
        torch.set_float32_matmul_precision("high")
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for backend, precision in zip(backends, own, strict=True):
            backend.fp32_precision = precision


def try_tf32(subject: Subject, phase: Phase, make_call: Callable[[], Callable], first_s: float) -> None:
    """Time the compiled model in turns with itself in TF32, which is a finding where it is faster.

    Each has cache entries of its own, as guards check the precision; library calls read it when they are called.
    """
    if first_s > AGAIN:
        return phase.note(f"Not tried: {TF32}: no time left, as compiling takes {first_s:.3g} s.")
    full, high = make_call(), make_call()
    with torch._dynamo.config.patch(recompile_limit=2 * torch._dynamo.config.recompile_limit):  # entries of both
        with in_tf32(), watch() as seen:
            high()
        if not seen.graphs:
            return phase.note(f"Not tried: {TF32}: Dynamo does not compile the model again.")
        before, after = subject.in_turns({full: nullcontext, high: in_tf32})
        error = None
        with phase.noted("No error of TF32"):
            error = error_in_tf32(make_call)
    low, times, to = quantiles([a / b for a, b in zip(before.all, after.all, strict=True)], n=4)
    phase.facts["tf32"] = {"full_ms": before.ms, "ms": after.ms, "speedup": times, "from": low, "to": to,
                           "error": error}  # fmt: skip
    tried = f"{after.ms:.3g} ms a call for {before.ms:.3g}"
    tried += "" if error is None else f", with a relative error of {error:.2g} (rms) against full precision"
    if low > GAIN:
        what, share = "float32 matmuls run in full precision, without TF32", 1 - 1 / times
        phase.finding(what, TF32, tried=tried, ms=before.ms * share, share=share)
    else:
        phase.note(f"Tried, without gain: {TF32}: {tried}.")


def error_in_tf32(make_call: Callable[[], Callable]) -> float | None:
    """The relative error of what a call in TF32 returns, or None where calls in full precision differ about as much."""

    def results(around: Callable) -> list[torch.Tensor]:
        call = make_call()
        torch.manual_seed(0)  # dropout draws the same numbers
        with around():
            return [tensor.detach().clone() for tensor in tensors_of(call())]

    full, high, again = results(nullcontext), results(in_tf32), results(nullcontext)  # last: state may drift
    noise, error = relative_error(again, full), relative_error(high, full)
    return None if error is None or noise is None or 2 * noise > error else error


def relative_error(got: list[torch.Tensor], full: list[torch.Tensor]) -> float | None:
    """The largest of the tensors' errors, as rms over the rms of `full`; None without floats, or of other shapes."""
    if [tensor.shape for tensor in got] != [tensor.shape for tensor in full]:
        return None
    errors = []
    for ours, theirs in zip(got, full, strict=True):
        if theirs.is_floating_point() and theirs.layout == torch.strided:
            finite = theirs.isfinite()  # a mask of -inf is no error
            ours, theirs = ours[finite].double(), theirs[finite].double()
            errors.append(float((ours - theirs).norm() / theirs.norm().clamp(min=torch.finfo(torch.float64).tiny)))
    return max(errors, default=None)


def sizes_around(given: int | None) -> list[int | None]:
    """The given size, then powers of two, the nearest first."""
    if not given:
        return [given]
    powers = {2**i for i in range(30) if 2**i <= MOST * given} - {given}
    return [given, *sorted(powers, key=lambda size: (abs(math.log2(size / given)), -size))[: SIZES - 1]]


def png(facts: dict, path: Path) -> None:
    """Draw the times by batch size. Raises RuntimeError where matplotlib is missing or nothing was measured by size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("--png needs matplotlib: pip install matplotlib") from None
    rows = [row for row in facts.get("sizes", []) if row["batch"]]
    if not rows:
        raise RuntimeError("--png: nothing was measured by batch size")
    axes = (figure := Figure((7, 4.5), layout="constrained")).subplots()
    styles = {"eager_ms": "o-", "compiled_ms": "s-", "roofline_eager_ms": "--", "roofline_compiled_ms": ":"}
    for key, style in styles.items():
        values = [row.get(key, math.nan) for row in rows]
        axes.plot([row["batch"] for row in rows], values, style, label=key.removesuffix("_ms").replace("_", ", "))
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="ms a call", title="eager against compiled")
    axes.set_xticks([row["batch"] for row in rows], [str(row["batch"]) for row in rows], minor=False)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


class Counting(TorchDispatchMode):
    """(FLOPs, bytes) of each operation that is run within, the bytes read of each of the model's tensors, and how many
    operations are float32 matmuls: not convolutions, for which cuDNN has a setting of its own.
    """

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self.operations, self.read = [], {storage_of(tensor): 0 for tensor in held}
        self.float32_matmuls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, outputs = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in ((args, kwargs), out))
        known = {storage_of(tensor) for tensor in inputs}
        if outputs and not func._schema.is_mutable and all(storage_of(tensor) in known for tensor in outputs):
            return out  # a view
        name, sizes, written = func._schema.name.split("::")[1], [*map(bytes_of, inputs)], sum(map(bytes_of, outputs))
        if name in ROWS:
            sizes[0] = min(sizes[0], written)
        for tensor, size in zip(inputs, sizes, strict=True):
            if (key := storage_of(tensor)) in self.read:
                self.read[key] = max(self.read[key], size)
        formula = flop_registry.get(LIKE.get(name, func._overloadpacket))
        if (name in FUSED or (formula and "conv" not in name)) and inputs[0].dtype == torch.float32:
            self.float32_matmuls += 1
        self.operations.append((formula(*args, **kwargs, out_val=out) if formula else 0, sum(sizes) + written))
        return out


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def bytes_of(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())  # expanded: what is there


def count(subject: Subject, model: Callable, args: tuple, kwargs: dict) -> dict:
    """What one eager call does, and the bytes that no compiler can spare: inputs, parameters, results, gradients."""
    with Counting(parameters(model)) as counted:
        out = subject.caller(model, args, kwargs)()
    ends = tensors_of((args, kwargs, out))
    ends += [tensor for tensor in parameters(model) if tensor.grad is not None]
    return {"operations": counted.operations, "flops": sum(flops for flops, _ in counted.operations),
            "float32_matmuls": counted.float32_matmuls,
            "compiled_bytes": sum(counted.read.values()) + sum(map(bytes_of, ends))}  # fmt: skip


def ceilings(subject: Subject, moved: int) -> dict:
    """Bytes and FLOPs a second of this device, at the model's own size and dtype, and microseconds of a launch."""
    device, gpu = subject.device, subject.on_gpu

    def seconds(call: Callable[[], object], calls: int) -> float:
        return min(subject.once(lambda: [call() for _ in range(calls)])[0] for _ in range(4)) / calls / 1e3

    low, high = (2**26, 2**28) if gpu else (2**16, 2**26)  # a small model stays in a CPU's caches
    source = torch.zeros(min(max(moved // 2, low), high) // 4, device=device)
    target, one = torch.empty_like(source), torch.zeros(1, device=device)
    tensors = [*parameters(subject.model), *tensors_of((subject.args, subject.kwargs))]
    floats = [tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.element_size() > 1]
    dtype, n = max(floats, key=floats.count, default=torch.float32), 8192 if gpu else 768
    matrix = torch.randn(n, n, device=device).to(dtype)
    with torch.no_grad():
        return {"bytes_per_s": 8 * source.numel() / seconds(lambda: target.copy_(source), 5), "dtype": str(dtype)[6:],
                "flops_per_s": 2 * n**3 / seconds(lambda: matrix @ matrix, 2),
                "launch_us": seconds(lambda: one + 1, 100) * 1e6}  # fmt: skip


def roofline(work: dict, launches: int, top: dict, gpu: bool) -> dict:
    """Lower bounds in ms. A GPU computes while the host launches; on a CPU the one comes after the other."""

    def ms(flops: float, moved: float) -> float:
        return max(flops / top["flops_per_s"], moved / top["bytes_per_s"]) * 1e3

    together = max if gpu else lambda *parts: sum(parts)
    # Of C++ kernels several may be in one function, so they can be more than eager's operations.
    launched = min(launches, len(work["operations"])) * top["launch_us"] / 1e3
    eager = together(sum(ms(*each) for each in work["operations"]), len(work["operations"]) * top["launch_us"] / 1e3)
    bounds = {"arithmetic": ms(work["flops"], 0), "memory": ms(0, work["compiled_bytes"]), "launches": launched}
    compiled = together(max(bounds["arithmetic"], bounds["memory"]), launched)
    return {"flops": work["flops"], "eager_bytes": sum(moved for _, moved in work["operations"]),
            "compiled_bytes": work["compiled_bytes"], "operations": len(work["operations"]),
            "roofline_eager_ms": eager, "roofline_compiled_ms": compiled, "roofline_speedup": eager / compiled,
            "bound": max(bounds, key=bounds.get)}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main(phase="benchmark"))
