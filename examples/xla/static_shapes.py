"""Static shapes: XLA compiles for sizes: batches of 1 to 64 are 64 programs, or one, or seven, as they are padded.

Technique  A program of XLA holds for the sizes it was compiled for: each new batch size is another compilation, kept as
           long as the process. Rows of padding buy them back: all batches padded to the largest (one program, most rows
           wasted), or to the next power of two (seven, fewer wasted). Pad before the transfer and cut after it: done on
           the device, both are operations of the graph, and bring one program for each size back. Row by row, padding
           cannot be seen; whatever looks across rows (a mean over the batch, batch norm) needs the mask of the real
           rows as one more input. XLA's own way, a size with a bound, works on a CPU for some operations only.
Question   How often does a model compile for batches of 1 to 64, how much does padding waste, and when does it pay?
Needs      torch_xla>=2.9
Shapes     x [rows, ...], rows 1 to 64 -> [size, ...] and the mask [size]; the model maps rows of `width` to the same.
Dtypes     float32; pad_batch takes any.
Errors     pad_batch() raises TypeError for what is no tensor and for sizes that are none, or no integers; ValueError
           for a batch that is empty, larger than all sizes, or on the XLA device already. break_even() raises
           ValueError for runs of different length. torch_xla's, with sizes that have a bound or none: listed by each
           run, with what works.
Wins when  the sizes are many. Buckets pay for their few compilations after a number of calls that each run measures;
           one padded size is best for a life shorter than that, no padding for a few sizes that stay.
Source     chapter section "XLA": static shapes.
Run        python examples/xla/static_shapes.py
"""

from __future__ import annotations

import copy
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from harness import Harness, Work, run, xla
from harness.compiler import logs
from harness.process import Child, report

import torch
import torch_xla
from torch import nn

LARGEST = 64
POWERS = (1, 2, 4, 8, 16, 32, 64)
EXPERIMENTS = {"XLA_EXPERIMENTAL": "nonzero", "EXPERIMENTAL_XLA_UNBOUNDED_DYNAMISM": "1"}


def pad_batch(x: torch.Tensor, sizes: Sequence[int] = POWERS) -> tuple[torch.Tensor, torch.Tensor]:
    """x with rows of zeros up to the smallest of `sizes` that holds it, and the mask of its real rows; on the host."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"pad_batch: got {type(x).__name__}, need a tensor [rows, ...]; use torch.as_tensor")
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise TypeError(f"pad_batch: sizes {sizes!r}; need one or more integers, as {POWERS}")
    if x.device.type == "xla":
        raise ValueError(f"pad_batch: x is on {x.device}, where padding compiles for each size; pad, then move it")
    if x.ndim < 1 or not 1 <= len(x) <= max(sizes):
        raise ValueError(
            f"pad_batch: shape {tuple(x.shape)} into sizes {tuple(sizes)}; need 1 to {max(sizes)} rows: split the "
            "batch, or add a larger size"
        )
    size = min(size for size in sizes if size >= len(x))
    padded = x if size == len(x) else torch.cat((x, x.new_zeros(size - len(x), *x.shape[1:])))
    return padded, torch.arange(size) < len(x)


def normalize(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Batch norm over the real rows. Their number is a sum on the device: as a Python number it may be a constant."""
    real, count = mask[:, None], mask.sum()
    # where, not a product: whatever the padding has become, NaN too, it must not count.
    mean = torch.where(real, x, 0).sum(0) / count
    variance = torch.where(real, x - mean, 0).square().sum(0) / count
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def break_even(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    """The number of calls after which `ours` has taken less time in all than `theirs`, and stays so; None: never."""
    if len(ours) != len(theirs):
        raise ValueError(f"break_even: {len(ours)} and {len(theirs)} calls; time both over the same calls")
    behind = [a >= b for a, b in zip(accumulate(ours), accumulate(theirs), strict=True)]
    calls = max((i + 1 for i, late in enumerate(behind) if late), default=0) + 1
    return calls if calls <= len(ours) else None


POLICIES = {"no padding": None, f"padded to {LARGEST}": (LARGEST,), "powers of two": POWERS}


class Served:
    """A model on the XLA device, called with batches on the host.

    XLA keeps a program for the process, whoever compiled it, and two policies meet at a size. So that each is seen to
    compile its own, its programs have one more output: a few zeros, their number the policy's.
    """

    def __init__(self, model: nn.Module, policy: str) -> None:
        self.sizes, self.number = POLICIES[policy], 1 + list(POLICIES).index(policy)
        self.model = copy.deepcopy(model).to(xla.device())
        xla.settle()

    def rows(self, rows: int) -> int:
        return rows if self.sizes is None else min(size for size in self.sizes if size >= rows)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        padded = x if self.sizes is None else pad_batch(x, self.sizes)[0]
        out = self.model(padded.to(xla.device()))
        own = torch.zeros(self.number, device=xla.device())
        torch_xla.sync()
        del own
        return out.cpu()[: len(x)]

    def mix(self, *batches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self(x) for x in batches)


def mlp(width: int) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).requires_grad_(False)


def reference_of(model: nn.Module) -> Callable:
    exact = copy.deepcopy(model).double()
    return lambda *batches: tuple(exact(x.double()) for x in batches)


def stream_of(requests: int, seed: int) -> list[int]:
    """Batch sizes as they come: mostly small, with a long tail, 64 at most."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(requests, generator=generator).exp().mul(8).round()
    return [int(size) for size in sizes.clamp(1, LARGEST)]


def wasted(useful: int, computed: int) -> float:
    return round(100 * (computed - useful) / computed, 1)


def count_policies(h: Harness, model: nn.Module, served: dict[str, Served], requests: int) -> None:
    """A stream of random sizes from cold, then the sizes it left out; every result is held to float64."""
    width = model[0].in_features
    stream = stream_of(requests, h.seed)
    batches = {size: h.randn(size, width) for size in range(1, LARGEST + 1)}
    sweep, streamed, seconds = {}, {}, {}
    served["no padding"](h.randn(LARGEST + 1, width))  # what the first compilation of a process starts
    for name, one in served.items():
        with h.progress(f"{name}: a stream of batches"), xla.watch() as ran:
            spent = []
            for size in stream:
                started = time.perf_counter()
                one(batches[size])
                spent.append(time.perf_counter() - started)
        with h.progress(f"{name}: all sizes"), xla.watch() as rest:
            for x in batches.values():
                one(x)
        h.check(
            one.mix, reference_of(model), *batches.values(), what=f"{name}, 1 to {LARGEST} rows",
            terms=4 * width, poison=False,
        )  # fmt: skip
        sweep[name] = {
            "compiles": ran.compiles + rest.compiles,
            "compile s": round(ran.compile_s + rest.compile_s, 2),
            "rows computed": sum(map(one.rows, batches)),
            "wasted %": wasted(sum(batches), sum(map(one.rows, batches))),
        }
        streamed[name] = {
            "compiles": ran.compiles,
            "compile s": round(ran.compile_s, 2),
            "wasted %": wasted(sum(stream), sum(map(one.rows, stream))),
        }
        if h.timing:
            streamed[name]["mean ms, compiling included"] = round(1000 * statistics.mean(spent), 3)
            seconds[name] = spent
    h.fact(f"batches of 1 to {LARGEST}", sweep)
    h.fact(f"a stream of {requests} batches, {len(set(stream))} sizes", streamed)
    if h.timing:
        say_break_even(h, seconds, any(row["compiles"] for row in streamed.values()))


def say_break_even(h: Harness, seconds: dict[str, list[float]], cold: bool) -> None:
    """When each has been faster in all than padding to the largest, by this stream's own times."""
    if not cold:
        h.say("this process had compiled all of it before: there is nothing to pay back")
        return
    fixed, *others = (f"padded to {LARGEST}", "powers of two", "no padding")
    found = {}
    for name in others:
        found[name] = break_even(seconds[name], seconds[fixed])
        if found[name]:
            h.say(f"{name}: ahead of {fixed} from call {found[name]} of the stream on, compilations included")
            continue
        # The later half compiles least: what a call costs when the programs are there.
        late = {each: statistics.median(seconds[each][len(seconds[each]) // 2 :]) for each in (name, fixed)}
        behind, gain = sum(seconds[name]) - sum(seconds[fixed]), late[fixed] - late[name]
        h.say(
            f"{name}: {behind:.2f} s behind {fixed} after all {len(seconds[name])} calls; "
            + (f"at the median gain of {1e6 * gain:.0f} us a call it needs {math.ceil(behind / gain)} more, and "
               "longer if sizes come that are not compiled yet" if gain > 0 else
               f"and its calls take {-1e6 * gain:.0f} us longer: it never gets there")
        )  # fmt: skip
    h.fact(f"calls until ahead of {fixed}", found)


def cut_on_the_device(h: Harness, width: int) -> None:
    """The same eight batches, padded and cut in four ways; and picked by a mask."""
    model = nn.Linear(width, width).requires_grad_(False).to(xla.device())
    batches = [h.randn(rows, width) for rows in range(1, 9)]

    def hosted(x):
        return model(pad_batch(x, (8,))[0].to(xla.device())).cpu()[: len(x)]

    def cut(x):
        return model(pad_batch(x, (8,))[0].to(xla.device()))[: len(x)].cpu()

    def padded(x):
        x = x.to(xla.device())
        return model(torch.cat((x, x.new_zeros(8 - len(x), width)))).cpu()[: len(x)]

    def picked(x):
        padded, mask = (t.to(xla.device()) for t in pad_batch(x, (8,)))
        return model(padded[mask]).cpu()

    counted = {}
    ways = {"pad and cut on the host": hosted, "cut on the device": cut, "pad there": padded, "pick by a mask": picked}
    for name, way in ways.items():
        with xla.watch() as ran:
            got = [way(x) for x in batches]
        exact = copy.deepcopy(model).cpu().double()
        h.check(
            lambda *_, got=got: tuple(got), lambda *xs, exact=exact: tuple(exact(x.double()) for x in xs), *batches,
            what=f"{name}, 1 to 8 rows", terms=width, poison=False,
        )  # fmt: skip
        counted[name] = {"compiles": ran.compiles, "on the host": ", ".join(ran.fallbacks) or "none"}
    h.fact("eight batches of 1 to 8 rows, padded to 8", counted)


def leaks(h: Harness, width: int) -> None:
    """Padding that shows: statistics over the batch; and padding that cannot: NaN in its place changes no bit."""
    model = nn.Linear(width, width).requires_grad_(False)
    on_xla, exact = copy.deepcopy(model).to(xla.device()), copy.deepcopy(model).double()
    batches = [h.randn(rows, width) for rows in (2, 3, 5, 17, 63)]

    def reference(*xs):
        return tuple(normalize(exact(x.double()), torch.ones(len(x), dtype=torch.bool)) for x in xs)

    def normed(x, masked: bool, fill: float = 0.0):
        padded, mask = pad_batch(x, (LARGEST,))
        padded = torch.where(mask[:, None], padded, fill).to(xla.device())
        mask = mask if masked else torch.ones_like(mask)
        return normalize(on_xla(padded), mask.to(xla.device())).cpu()[: len(x)]

    with xla.watch() as ran:
        h.check(
            lambda *xs: tuple(normed(x, masked=True) for x in xs), reference, *batches,
            what="batch norm, padded and masked", terms=width * LARGEST, poison=False,
        )  # fmt: skip
    wants = reference(*batches)
    errors = {}
    for masked in (False, True):
        off = [(normed(x, masked).double() - want).norm() / want.norm() for x, want in zip(batches, wants, strict=True)]
        errors["with the mask" if masked else "without"] = {
            str(len(x)): float(f"{each:.2g}") for x, each in zip(batches, off, strict=True)
        }
    h.fact("batch norm padded to 64: relative error by rows", errors)
    h.fact("compiles of the masked one", ran.compiles)

    changed = {}
    for name, way in {
        "linear": lambda x, fill: on_xla(torch.where((m := pad_batch(x, (LARGEST,)))[1][:, None], m[0], fill).to(
            xla.device())).cpu()[: len(x)],
        "batch norm, masked": lambda x, fill: normed(x, True, fill),
        "batch norm, not masked": lambda x, fill: normed(x, False, fill),
    }.items():  # fmt: skip
        pairs = [(way(x, 0.0), way(x, math.nan)) for x in batches]
        changed[name] = sum(int((zeros != nans).sum()) for zeros, nans in pairs)
    elements = sum(x.numel() for x in batches)
    h.fact(f"of {elements} real results, changed by NaN in place of zeros as padding", changed)

    counts = {}
    kinds = {
        "a Python number": lambda mask: int(mask.sum()),
        "a scalar that is moved": lambda mask: mask.sum().to(xla.device()),
        "the sum of the moved mask": lambda mask: mask.to(xla.device()).sum(),
    }
    for number, (kind, count) in enumerate(kinds.items()):  # each of its own width, so that no program is shared
        with xla.watch() as ran:
            for rows in range(1, 9):
                padded, mask = pad_batch(h.randn(rows, width + number), (LARGEST,))
                (padded.to(xla.device()).sum(0) / count(mask)).cpu()
        counts[kind] = ran.compiles
    h.fact("compiles of sum / count for 1 to 8 rows, count being", counts)


def dynamo(h: Harness, width: int) -> None:
    """torch.compile for XLA: Dynamo's graph may have a symbol for the rows, but each size is compiled by XLA."""
    counted = {}
    for number, (name, options) in enumerate(
        {"default": {}, "dynamic=True": {"dynamic": True}, "mark_dynamic": {}}.items()
    ):
        # A width of its own for each, so that none finds the programs of another.
        model = nn.Sequential(nn.Linear(width + number, 5), nn.GELU()).requires_grad_(False)
        on_xla, graphs = copy.deepcopy(model).to(xla.device()), []

        def counting(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("openxla")(graph, inputs)

        torch.compiler.reset()
        compiled = torch.compile(on_xla, backend=counting, **options)
        batches = [h.randn(rows, width + number) for rows in range(2, 10)]
        with torch._dynamo.config.patch(recompile_limit=len(batches)), logs(), xla.watch() as ran:
            got = []
            for x in batches:
                x = x.to(xla.device())
                if name == "mark_dynamic":
                    torch._dynamo.mark_dynamic(x, 0)
                got.append(compiled(x).cpu())
        h.check(
            lambda *_, got=got: tuple(got), reference_of(model), *batches,
            what=f"openxla, {name}, 2 to 9 rows", terms=width, roundings=4, poison=False,
        )  # fmt: skip
        counted[name] = {"Dynamo's graphs": len(graphs), "XLA's compiles": ran.compiles}
    torch.compiler.reset()
    h.fact("torch.compile(backend=openxla), eight batches of 2 to 9 rows", counted)


# --- sizes with a bound, and without: in a process of their own, since switches of the environment turn them on


def attempts(width: int) -> dict[str, Callable]:
    """What is tried on rows whose number XLA knows as "at most 64"."""
    linear, norm = nn.Linear(width, width), nn.BatchNorm1d(width, track_running_stats=False)
    return {
        "linear": linear,
        "mean over the batch": lambda x: x.mean(0),
        "batch norm (training)": norm,
        "softmax over the batch": lambda x: x.softmax(0),
        "rms_norm": lambda x: nn.functional.rms_norm(x, (x.shape[1],)),
        "layer_norm": lambda x: nn.functional.layer_norm(x, (x.shape[1],)),
        "x + gelu(x)": lambda x: x + nn.functional.gelu(x),
        "x @ x.T": lambda x: x @ x.T,
        "x.view(-1, 2, width / 2)": lambda x: x.view(-1, 2, x.shape[1] // 2),
    }


def real_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rows [<=64, width]: with XLA_EXPERIMENTAL=nonzero their number is not asked for, and stays a bound."""
    return x.index_select(0, torch.nonzero(mask).squeeze(1))


def bounded(width: int, rows: Sequence[int], dump: str) -> None:
    """Run in a process with EXPERIMENTS set: an MLP on sizes with a bound, single operations, sizes without."""
    torch.set_grad_enabled(False)
    model = mlp(width).to(xla.device())
    torch.manual_seed(0)
    x = torch.randn(LARGEST, width)
    padded = x.to(xla.device())
    masks = {n: (torch.arange(LARGEST) < n).to(xla.device()) for n in rows}
    xla.settle()
    calls, got, shapes = [], {}, []
    for n, mask in masks.items():
        with xla.watch() as ran:
            out = model(real_rows(padded, mask))
            shapes.append(str(list(out.shape)))
            got[n] = out.cpu()
        calls.append({"compiles": ran.compiles, "executions": ran.executions})
    products = [
        found
        for file in sorted(Path(dump).glob("*after_optimizations.txt"))
        for found in re.findall(r"= (\w+\[[^\]]*\])\S* (?:dot\(|custom-call\([^\n]*matmul)", file.read_text())
    ]

    def timed(fn: Callable) -> float:
        seconds = []
        for _ in range(15):
            started = time.perf_counter()
            fn().cpu()
            seconds.append(time.perf_counter() - started)
        return round(1000 * statistics.median(seconds), 3)

    first = masks[rows[0]]
    ms = {"bounded": timed(lambda: model(real_rows(padded, first))), "padded": timed(lambda: model(padded))}
    several = {n: mask for n, mask in masks.items() if n > 1}  # batch norm refuses a single row, bound or not
    outcomes = {name: outcome(fn, x, several) for name, fn in attempts(width).items()}
    outcomes["export with a dynamic batch"], text = exported(width)
    report(
        calls=calls, shape=shapes[0], products=products, ms=ms, outcomes=outcomes, signature=text,
        got=[out.tolist() for out in got.values()], x=x.tolist(), marked=marked(x),
    )  # fmt: skip


def outcome(fn: Callable, x: torch.Tensor, masks: dict[int, torch.Tensor]) -> str:
    """What becomes of fn on rows with a bound: right, wrong, or the first line of the error."""
    on_xla = copy.deepcopy(fn).to(xla.device()) if isinstance(fn, nn.Module) else fn
    exact = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
    try:
        compiles = executions = 0
        for n, mask in masks.items():
            padded = x.to(xla.device())
            with xla.watch() as ran:
                got = on_xla(real_rows(padded, mask)).cpu()
            want = exact(x[:n].double())
            if got.shape != want.shape or not torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5):
                return f"wrong for {n} rows"
            compiles, executions = compiles + ran.compiles, executions + ran.executions
        return f"right for {', '.join(map(str, masks))} rows: {compiles} compiles, {executions} executions"
    except (RuntimeError, ValueError) as error:
        xla.forget_pending()
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def exported(width: int) -> tuple[str, str]:
    """torch.export with a dynamic batch to StableHLO, and a run of it: (outcome, the signature of its main)."""
    from torch_xla.stablehlo import exported_program_to_stablehlo

    program = torch.export.export(
        nn.Linear(width, width), (torch.randn(5, width),), dynamic_shapes=({0: torch.export.Dim("rows", max=LARGEST)},)
    )
    module = exported_program_to_stablehlo(program)
    signature = next(line.strip() for line in module.get_stablehlo_text().splitlines() if "@main" in line)
    try:
        module(torch.randn(6, width).to(xla.device()))
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if "error:" in line] or str(error).splitlines()
        return f"exported; run: {type(error).__name__}: {lines[0].split('): ')[-1][:200]}", signature
    return "exported and run", signature


def marked(x: torch.Tensor) -> str:
    """torch_xla's own mark for a dynamic dimension: what the exporter uses, tried on a lazy tensor."""
    on_xla = x.to(xla.device())
    xla.settle()
    xla.mark_dynamic(on_xla, 0)
    try:
        (on_xla * 2).cpu()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return "right"


def bounds(h: Harness, width: int, rows: tuple[int, ...]) -> None:
    with tempfile.TemporaryDirectory() as dump, h.progress("sizes with a bound, in another process"):
        flags = {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"}
        with Child(bounded, width, rows, dump, env={**EXPERIMENTS, **flags}) as child:
            told = child.result()
    x, got = torch.tensor(told["x"]), [torch.tensor(each) for each in told["got"]]
    h.check(
        lambda *_: tuple(got), reference_of(mlp(width)), *(x[:n] for n in rows),
        what=f"at most {LARGEST} rows: {', '.join(map(str, rows))}", terms=4 * width, poison=False,
    )  # fmt: skip
    first, *later = told["calls"]
    h.fact(
        f"an MLP on at most {LARGEST} rows",
        {
            "shape": told["shape"],
            "compiles, first size": first["compiles"],
            "compiles, other sizes": sum(call["compiles"] for call in later),
            "executions a call": first["executions"],
            "products in the optimized HLO": ", ".join(told["products"]),
        },
    )
    computed = set(re.findall(r"\[([^,\]]+),", " ".join(told["products"])))
    if computed == {str(LARGEST)}:
        h.say(f"the bound is what is computed: {LARGEST} rows whatever the size, as with padding; the mask is XLA's")
    if h.timing:
        h.say(
            f"a call with {rows[0]} rows: {told['ms']['bounded']} ms with a bound, {told['ms']['padded']} ms padded: "
            f"{first['executions'] - 1} of its {first['executions']} programs only ask for the size"
        )
    h.fact(f"at most {LARGEST} rows, by operation", told["outcomes"])
    h.fact("no bound", {"exported main": told["signature"], "mark on a lazy tensor": told["marked"]})


# --- programs kept on disk


def persistent(path: str, width: int) -> None:
    """Run in a process of its own: compile a small model with a persistent cache in `path`."""
    torch.set_grad_enabled(False)
    torch_xla.runtime.initialize_cache(path)
    model = mlp(width).to(xla.device())
    x = torch.ones(5, width).to(xla.device())
    with xla.watch() as ran:
        out = model(x).cpu()
    files = [file.stat().st_size for file in Path(path).iterdir()]
    report(compiles=ran.compiles, files=len(files), bytes=sum(files), total=out.sum().item(), cache=xla.persistent())


def persistent_cache(h: Harness, width: int) -> None:
    """initialize_cache, in a process that finds it empty and in one that finds it filled."""
    told = {}
    with tempfile.TemporaryDirectory() as path, h.progress("a persistent cache, in two processes"):
        for name in ("cold", "warm"):
            with Child(persistent, path, width) as child:
                told[name] = child.result()
                lines = [line.split("] ")[-1] for line in child.output().splitlines() if "deserialize" in line]
            cache = ", ".join(f"{event} {count}" for event, count in told[name]["cache"].items())
            told[name] = {"compiles": told[name]["compiles"], "files": told[name]["files"], "counted": cache}
            if lines:
                told[name]["logged"] = lines[0]
    h.fact("torch_xla.runtime.initialize_cache", told)
    if told["warm"]["compiles"]:
        h.say("what was written could not be used: on this device a cache on disk saves no compilation")


def demo(h: Harness) -> None:
    # For narrower products of 8 to 31 rows XLA:CPU writes loops of its own, and compiled some of them ten times as
    # long as a program of 32 rows; from about this width on it takes a library's.
    width = h.pick(quick=520, full=776)
    model = mlp(width)
    served = {name: Served(model, name) for name in POLICIES}
    if not h.profile:
        count_policies(h, model, served, requests=h.pick(quick=500, full=1500))
        cut_on_the_device(h, width=46)
        leaks(h, width=58)
        dynamo(h, width=82)
        bounds(h, width=56, rows=(3, 1, 33, LARGEST))
        if h.full:  # two more processes
            persistent_cache(h, width=94)
    sizes = stream_of(32, h.seed + 1)
    batches = [h.randn(size, width) for size in sizes]
    variants = {"torch eager": lambda *xs: tuple(model(x) for x in xs)}
    variants |= {f"torch_xla {name}": one.mix for name, one in served.items()}
    h.compare(
        variants, reference_of(model), *batches, baseline="torch eager", title="32 batches, from host to host",
        work=Work(flops=16 * width * width * sum(sizes), dtype=torch.float32),
        case=f"{sum(sizes)}x{width} float32", terms=4 * width,
        first_calls={f"torch_xla {name}": None for name in served},  # compiled for the stream, all but new sizes
    )  # fmt: skip
    xla.settle()


if __name__ == "__main__":
    run(demo)
