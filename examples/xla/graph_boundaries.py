"""Graph boundaries: whoever looks at a value ends the graph there, runs it, and waits; found, counted and fixed.

Technique  A recorded step is one program until Python needs a number out of it: to print it, to branch on it, to size a
           tensor, or for an operation that XLA does not have. What is pending for that number is compiled and run in
           the middle of the step, the host waits, and the sync at the end runs much of it once more. Each such boundary
           is put next to a step that gives the same result without one: torch.where for `if`, a mask for a selection,
           values kept on the device and read every N steps, a step closure for what must be printed. Two guards find
           the boundaries in other code: torch_xla.compile(full_graph=True) raises where a value is looked at, and
           max_different_graphs where a step is recorded in one way too many. PT_XLA_DEBUG_LEVEL=2 in the environment
           prints the line behind every compile and every run of a program, without a change to the code.
Question   Which innocent lines cut a recorded step in two, what does each cost, and what replaces it?
Needs      torch_xla>=2.9
Shapes     x [rows, width], w [width, width]; a step is tanh(x @ w) and the line in question.
Dtypes     float32.
Errors     loop() and until(): ValueError for tensors that are not on the XLA device, for less than one step and for
           every < 1. By torch_xla: RuntimeError from both guards, and for a CPU tensor in most operations; in
           arithmetic it is accepted in silence and copied at every step, which is counted here.
Wins when  the step is short, or the device far from the host: then waiting is most of it. A value read after the sync
           costs a copy and the wait, not a second run.
Source     chapter section "XLA and torch_xla"; torch_xla's own counters and messages.
Run        python examples/xla/graph_boundaries.py
"""

from __future__ import annotations

import io
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import Harness, Work, run, xla
from harness.compare import Row

import torch
import torch.nn.functional as F
import torch_xla
from torch_xla.core import xla_model

ROWS, WIDTH = 59, 331  # of no other technique: a program compiled there would be found here
STEPS = 6
LIMIT = 0.9  # of the values, above which the step halves them
TOLERANCE, MOST = 1e-3, 64  # of until()


@dataclass(frozen=True)
class Step:
    """call(x, w) -> (x, value) is one step before its sync; `after` is what happens to the value behind it."""

    call: Callable
    after: Callable = lambda value: value


def advance(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def size(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


def require_xla(name: str, *tensors: torch.Tensor) -> None:
    for i, x in enumerate(tensors):
        if x.device.type != "xla":
            raise ValueError(f"{name}: tensor {i} is on {x.device}; move it once, before: .to(torch_xla.device())")


def loop(step: Step, x: torch.Tensor, w: torch.Tensor, steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    """`steps` steps, a sync after each: the last x, on the device, and the values of all, read at the end."""
    require_xla("loop", x, w)
    if steps < 1:
        raise ValueError(f"loop: {steps} steps; there is no value to return, pass 1 or more")
    values = []
    for _ in range(steps):
        x, value = step.call(x, w)
        torch_xla.sync()
        values.append(step.after(value))
    if isinstance(values[0], torch.Tensor):
        return x, torch.stack(values).cpu()
    return x, torch.tensor(values)


def loop64(call: Callable, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The step as it was first written, on the CPU, where looking at values costs nothing, in float64."""
    x, w, values = x.double(), w.double(), []
    for _ in range(STEPS):
        x, value = call(x, w)
        values.append(value)
    return x, torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])


# --- steps with a boundary, and the same without


def read_early(x, w):
    x = advance(x, w)
    return x, size(x).item()


def keep(x, w):
    x = advance(x, w)
    return x, size(x)


def print_now(x, w):
    x = advance(x, w)
    print(x[0, :4], file=io.StringIO())
    return x, size(x)


def print_after(x, w):
    x = advance(x, w)
    xla_model.add_step_closure(lambda some: print(some, file=io.StringIO()), (x[0, :4],))
    return x, size(x)


def branch(x, w):
    x = advance(x, w)  # below max() and not amax(): without dim, that of torch_xla 2.9 reduces nothing
    if x.abs().max() > LIMIT:
        x = x * 0.5
    return x, size(x)


def where(x, w):
    x = advance(x, w)
    x = torch.where(x.abs().max() > LIMIT, x * 0.5, x)
    return x, size(x)


def select(x, w):
    x = advance(x, w)
    return x, x[x > 0].sum() / x.numel()


def mask(x, w):
    x = advance(x, w)
    return x, torch.where(x > 0, x, 0.0).sum() / x.numel()


def over_the_host(x, w):
    x = advance(x, w)
    peak = x.cpu().abs().max().to(x.device)
    return x / peak, size(x)


def on_the_device(x, w):
    x = advance(x, w)
    return x / x.abs().max(), size(x)


def median(x, w):
    x = advance(x, w)
    return x - x.median(), size(x)


def sorted_median(x, w):
    x = advance(x, w)
    middle = (x.numel() + 1) // 2
    return x - x.flatten().kthvalue(middle).values, size(x)


def adding(bias: torch.Tensor) -> Callable:
    def add(x, w):
        x = advance(x, w) + bias
        return x, size(x)

    return add


def cases(bias: torch.Tensor) -> dict[str, dict[str, Step]]:
    """Of each boundary the step that has it, first, and those that do without."""
    return {
        "a loss is read": {
            ".item() before the sync": Step(read_early),
            ".item() after the sync": Step(keep, after=torch.Tensor.item),
            "read once, at the end": Step(keep),
        },
        "values are printed": {"print": Step(print_now), "step closure": Step(print_after)},
        "a branch on a value": {"if": Step(branch), "torch.where": Step(where)},
        "a selection by a condition": {"boolean index": Step(select), "torch.where": Step(mask)},
        "a detour over the host": {".cpu()": Step(over_the_host), "on the device": Step(on_the_device)},
        "an operation that XLA has not": {"median": Step(median), "kthvalue": Step(sorted_median)},
        "a tensor left on the CPU": {
            "on the CPU": Step(adding(bias)), "moved before": Step(adding(bias.to(xla.device()))),
        },
    }  # fmt: skip


def told(ran: xla.Ran) -> dict:
    found = {
        "compiles": ran.compiles, "compile s": round(ran.compile_s, 3), "executions": ran.executions,
        "to device": ran.to_device, "from device": ran.from_device,
    }  # fmt: skip
    fallbacks = [name for name in ran.fallbacks if name != "aten::_local_scalar_dense"]
    return found | ({"on the host": ", ".join(fallbacks)} if fallbacks else {})


def boundaries(h: Harness) -> None:
    """Each case counted from its first call, then timed; all results are held to the plain step in float64."""
    # A width for each case, so that none finds the programs of another; the gain keeps the values from dying out.
    for i, what in enumerate(cases(torch.zeros(1))):
        width = WIDTH + 2 * i
        x, w, bias = h.randn(ROWS, width), h.randn(width, width, scale=1.5 * width**-0.5), h.randn(width, scale=0.1)
        x_there, w_there = x.to(xla.device()), w.to(xla.device())
        steps = cases(bias)[what]
        plain = next(iter(steps.values())).call
        found = {}
        if not h.profile:
            for fewer, (name, step) in enumerate(steps.items(), 1):
                fresh = x[fewer:].to(xla.device())  # a size that no other step has compiled
                with xla.watch() as ran:
                    loop(step, fresh, w_there)
                    xla.settle()
                found[name] = told(ran)
            h.fact(f"{what}: {STEPS} steps", found)
        variants = {
            f"torch_xla {name}": xla.waited(lambda *_, step=step, x=x_there, w=w_there: loop(step, x, w))
            for name, step in steps.items()
        }
        table = h.compare(
            variants, lambda x, w, plain=plain: loop64(plain, x, w), x, w, baseline=next(iter(variants)),
            work=Work(flops=2 * STEPS * ROWS * width * width, dtype=torch.float32), title=what,
            terms=STEPS * width, roundings=16, first_calls=dict.fromkeys(variants),  # compiled before, or shared
        )  # fmt: skip
        if table and h.timing:
            explain(h, what, found, {row.variant.removeprefix("torch_xla "): row for row in table.rows})


def explain(h: Harness, what: str, found: dict[str, dict], rows: dict[str, Row]) -> None:
    first, *others = found
    for name in others:
        a, b = found[first], found[name]
        less = [
            f"{a[each]} {each} for {b[each]}" for each in ("compiles", "executions", "to device", "from device")
            if a[each] != b[each]
        ]  # fmt: skip
        us = [1000 * rows[each].ms / STEPS for each in (first, name)]
        h.say(
            f"{what}, {first} against {name}: {', '.join(less) or 'the same counts'}; once compiled, a step takes "
            f"{us[0]:.0f} us against {us[1]:.0f} ({rows[name].speedup:.2f}x)"
            + ("" if rows[name].speedup > 1.05 else ": on this device the step without the boundary is not faster")
        )


# --- a loop that ends when a value says so


def until(
    x: torch.Tensor, w: torch.Tensor, every: int, tolerance: float = TOLERANCE, most: int = MOST
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """x <- tanh(x @ w) until it moves by less than `tolerance`, asked for every `every` steps; at most `most` steps.

    Returns x, the steps that it needed (a tensor on the device), and how often a value was read. The steps that come
    too many change nothing: x is held by torch.where.
    """
    require_xla("until", x, w)
    if every < 1 or most < 1:
        raise ValueError(f"until: every={every}, most={most}; both must be at least 1")
    steps = torch.zeros(1, dtype=torch.int64, device=x.device)
    done = torch.zeros(1, dtype=torch.bool, device=x.device)
    reads = 0
    for i in range(1, most + 1):
        new = advance(x, w)
        moved = (new - x).abs().max()
        x, steps = torch.where(done, x, new), steps + torch.where(done, 0, 1)
        done = done | (moved < tolerance)
        torch_xla.sync()
        if i % every == 0 and i < most:
            reads += 1
            if done.item():
                break
    return x, steps, reads


def until64(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = x.double(), w.double()
    for _ in range(MOST):
        old, x = x, advance(x, w)
        if (x - old).abs().max() < TOLERANCE:
            break
    return x


def ended_by_a_value(h: Harness) -> None:
    width = WIDTH + 20
    x, w = h.randn(ROWS, width), h.randn(width, width, scale=0.5 * width**-0.5)
    x_there, w_there = x.to(xla.device()), w.to(xla.device())
    found, ends = {}, (1, 4, 16)
    for every in ends if not h.profile else ():
        with xla.watch() as ran:
            _, steps, reads = until(x_there, w_there, every)
        found[f"asked every {every}"] = {
            "steps needed": int(steps), "steps run": ran.syncs, "values read": reads, "compiles": ran.compiles
        }  # fmt: skip
    if found:
        h.fact("a loop until it converges", found)
    variants = {
        f"torch_xla asked every {every}": xla.waited(lambda *_, every=every: until(x_there, w_there, every)[0])
        for every in ends
    }
    h.compare(
        variants, until64, x, w, baseline=next(iter(variants)), title="until it converges", work=Work(),
        terms=MOST * width, roundings=16, first_calls=dict.fromkeys(variants),  # they share programs
    )  # fmt: skip


# --- which lines look at a value


def lines(y: torch.Tensor, index: torch.Tensor) -> dict[str, Callable]:
    return {
        "y.shape, len(y), y.dtype": lambda: (y.shape, len(y), y.dtype),
        "y.clone(), y.detach()": lambda: (y.clone(), y.detach()),
        "y.isnan().any()": lambda: y.isnan().any(),
        "for row in y[:3]": lambda: list(y[:3]),
        "sum(y[0, :3])": lambda: sum(y[0, :3]),
        "y[index]": lambda: y[index],
        "y.masked_fill(y > 0, 0)": lambda: y.masked_fill(y > 0, 0.0),
        "y.topk(3), y.sort(), y.argmax(-1)": lambda: (y.topk(3), y.sort(), y.argmax(-1)),
        "F.one_hot(index, 5)": lambda: F.one_hot(index, 5),
        "F.one_hot(index)": lambda: F.one_hot(index),
        "y[0, 0].item()": lambda: y[0, 0].item(),
        "float(y[0, 0])": lambda: float(y[0, 0]),
        "f'{y[0, 0]:.2f}'": lambda: f"{y[0, 0]:.2f}",
        "print(y)": lambda: str(y),
        "y.tolist()": lambda: y.tolist(),
        "if y.isnan().any()": lambda: bool(y.isnan().any()),
        "max(y[0, :3])": lambda: max(y[0, :3]),
        "3.0 in y": lambda: 3.0 in y,
        "torch.allclose(y, y + 1)": lambda: torch.allclose(y, y + 1),
        "torch.equal(y, y + 1)": lambda: torch.equal(y, y + 1),
        "y[: index[0]]": lambda: y[: index[0]],
        "torch.full((3,), y[0, 0])": lambda: torch.full((3,), y[0, 0], device=y.device),
        "torch.tensor([y[0, 0], y[0, 1]])": lambda: torch.tensor([y[0, 0], y[0, 1]]),
        "torch.stack([y[0, 0], y[0, 1]])": lambda: torch.stack([y[0, 0], y[0, 1]]),
        "y[y > 0]": lambda: y[y > 0],
        "y.nonzero()": lambda: y.nonzero(),
        "torch.where(y > 0)": lambda: torch.where(y > 0),
        "y[y > 0] = 0": lambda: y.clone().__setitem__(y > 0, 0.0),
        "torch.unique(index)": lambda: torch.unique(index),
        "y.median()": lambda: y.median(),
        "torch.bincount(index, minlength=5)": lambda: torch.bincount(index, minlength=5),
        "torch.searchsorted(y, y)": lambda: torch.searchsorted(y, y),
        "torch.fft.rfft(y)": lambda: torch.fft.rfft(y),
    }


def census(h: Harness) -> None:
    """Line by line: what a step that has just been recorded does when it meets them."""
    x, index = h.randn(ROWS, WIDTH - 2).to(xla.device()), h.randint(4, ROWS).to(xla.device())
    groups: dict[str, list[str]] = {}
    for name in lines(x, index):
        y, at = x * 2 + 1, index + 1
        xla.settle()  # what the lines before left
        del y, at
        with xla.watch() as ran:
            y, at = x * 2 + 1, index + 1
            lines(y, at)[name]()
        host = [each.removeprefix("aten::") for each in ran.fallbacks if each != "aten::_local_scalar_dense"]
        what = f"{ran.executions} run, {ran.from_device} read" if ran.executions or ran.from_device else "only recorded"
        groups.setdefault(what + (f", on the host: {', '.join(host)}" if host else ""), []).append(name)
        xla.settle()
    h.fact("lines of Python on a tensor that is pending", {what: "; ".join(names) for what, names in groups.items()})


# --- the guards


def guards(h: Harness) -> None:
    """What torch_xla.compile says about each step: full_graph at the first call, one graph only over all of them."""
    x, w = h.randn(ROWS, WIDTH + 30), h.randn(WIDTH + 30, WIDTH + 30, scale=1.5 * WIDTH**-0.5)
    bias, x, w = h.randn(WIDTH + 30, scale=0.1), x.to(xla.device()), w.to(xla.device())
    found, said = {}, {}
    for what, steps in cases(bias).items():
        for name, step in steps.items():
            full = guarded(torch_xla.compile(step.call, full_graph=True), x, w, 1)
            few = guarded(torch_xla.compile(step.call, max_different_graphs=1), x, w, STEPS)
            found[f"{what}: {name}"] = {"full_graph": full[0], "max_different_graphs=1": few[0]}
            said |= {"full_graph": full[1] or said.get("full_graph"), "other": few[1] or said.get("other")}
    h.fact("torch_xla.compile", found)
    for text in filter(None, said.values()):
        h.say(f"torch_xla says: {text}")


def guarded(compiled: Callable, x: torch.Tensor, w: torch.Tensor, steps: int) -> tuple[str, str | None]:
    """What `steps` calls come to: "passes", or where they raise; and what torch_xla says then."""
    for i in range(1, steps + 1):
        with xla.printed() as text:
            try:
                x, _ = compiled(x, w)
                continue
            except RuntimeError as error:
                message = str(error)
        here = [line for _, file, line in xla.frames(text[0]) if Path(file).name == Path(__file__).name]
        at = f"at `{linecache.getline(__file__, here[0]).strip()}`" if here else f"in step {i}"
        return f"raises {at}", " ".join(message.split())
    return "passes", None


# --- a tensor left on the CPU


def left_behind(h: Harness) -> None:
    """Arithmetic takes it, and copies it at every step; what else there is refuses, each operation in its words."""
    x, other = torch.ones(ROWS, ROWS).to(xla.device()), torch.ones(ROWS, ROWS)
    at = torch.zeros(ROWS, dtype=torch.int64)
    attempts = {
        "x + other": lambda: x + other,
        "x[index]": lambda: x[at],
        "x @ other": lambda: x @ other,
        "F.linear(x, other)": lambda: F.linear(x, other),
        "torch.where(x > 0, x, other)": lambda: torch.where(x > 0, x, other),
        "torch.cat([x, other])": lambda: torch.cat([x, other]),
        "F.embedding(index, x)": lambda: F.embedding(at, x),
        "other + x (in place)": lambda: other.clone().add_(x),
    }
    found = {}
    for what, attempt in attempts.items():
        with xla.watch() as ran:
            try:
                attempt()
                xla.settle()
                error = None
            except RuntimeError as raised:
                error = next(iter(str(raised).splitlines()))
        if error:
            found[what] = f"RuntimeError: {error}"
            xla.forget_pending()
        else:
            found[what] = f"accepted: {ran.to_device} to device, {ran.from_device} from device"
    h.fact("x is on the XLA device, index and other are on the CPU", found)


def child_looks() -> None:
    """What PT_XLA_DEBUG_LEVEL=2 is to find: one look at a value."""
    x = torch.ones(3, 5).to(xla.device())
    read_early(x, torch.ones(5, 5).to(xla.device()))


def demo(h: Harness) -> None:
    boundaries(h)
    ended_by_a_value(h)
    if not h.profile:
        census(h)
        guards(h)
        left_behind(h)
    xla.settle()


if __name__ == "__main__":
    run(demo)
