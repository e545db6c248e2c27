"""Custom operators, allow_in_graph, disable, nonstrict_trace: code that Dynamo cannot trace, and what each way costs.

Technique  Isotonic regression (the nondecreasing fit nearest to a row) pools neighbours on a stack whose height depends
           on the data: no graph can hold that. torch.library.custom_op makes it one node, given a rule for shapes
           (register_fake) and for gradients (register_autograd). The other ways are tried on the same functions beside
           it: what is in the graph, where it breaks, whether gradients flow, whether Python still runs at a call. Then
           the operator is told lies, one at a time: which of them does opcheck find, and which does a compiled call?
Question   Which way around code that cannot be traced is right when, and what does a wrong fake kernel do?
Needs      torch
Shapes     isotonic: x [..., n], any strides and sizes, 0 too -> the fit of each row, contiguous, same shape.
Dtypes     isotonic: float16, bfloat16, float32, float64; sums are Python's float64, rounded once. On a GPU the values
           are copied to the host and back, which waits for all that was launched before.
Errors     isotonic, isotonic_into: TypeError for another dtype or two dtypes; ValueError for a tensor without
           dimensions, two shapes or two devices; RuntimeError, by isotonic_into, for a tensor that requires grad.
           NaN stays in its place and is a block of its own. The gradient holds the blocks fixed.
Wins when  the work outside of torch is long, or must happen at each call. What torch could do, the compiler should see.
Source     chapter section "Custom operators"; the min-max formula of isotonic regression is the reference.
Run        python examples/compiler/custom_ops.py
"""

# No `from __future__ import annotations` here: torch reads an operator's schema from its annotations.

import array
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from harness import Harness, Work, run
from harness.compiler import logs, watch

import torch

# Defining an operator's name again frees the first one: a copy of this file under another name gets its own namespace.
NAMESPACE = "companion_ops"
if __name__ != "examples.compiler.custom_ops":
    NAMESPACE += f"_{__name__.replace('.', '_')}"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# --- an operator


def _check(name: str, *tensors: torch.Tensor) -> None:
    """What can be said of tensors without data; so compiling reports it as running does."""
    first = tensors[0]
    if first.dtype not in DTYPES or any(t.dtype != first.dtype for t in tensors):
        raise TypeError(f"{name}: dtypes {[t.dtype for t in tensors]}; all must be the same one of {DTYPES}")
    if not first.ndim or any(t.shape != first.shape for t in tensors):
        raise ValueError(f"{name}: shapes {[tuple(t.shape) for t in tensors]}; all must be the same [..., n]")
    if any(t.device != first.device for t in tensors):
        raise ValueError(f"{name}: devices {[str(t.device) for t in tensors]}; move them to one")


def pool(row: list[float]) -> tuple[list[float], list[int]]:
    """The fit of one row and the block of each element: neighbours whose means fall are pooled (O(n))."""
    sums, counts = [], []
    for value in row:
        sums.append(value)
        counts.append(1)
        while len(sums) > 1 and sums[-2] * counts[-1] >= sums[-1] * counts[-2]:
            sums[-2:], counts[-2:] = [sums[-2] + sums[-1]], [counts[-2] + counts[-1]]
    blocks = [block for block, count in enumerate(counts) for _ in range(count)]
    return [sums[block] / counts[block] for block in blocks], blocks


def pooled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operator does, as a plain function: it reads its data, on the host."""
    rows = [pool(row) for row in x.reshape(-1, x.shape[-1]).tolist()] if x.numel() else []
    fit, blocks = ([row[i] for row in rows] for i in range(2))
    return (
        torch.tensor(fit, dtype=x.dtype, device=x.device).reshape(x.shape),
        torch.tensor(blocks, dtype=torch.int64, device=x.device).reshape(x.shape),
    )


@torch.library.custom_op(f"{NAMESPACE}::isotonic", mutates_args=())
def isotonic_with_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _check("isotonic", x)
    return pooled(x)


@isotonic_with_blocks.register_fake
def _(x):
    _check("isotonic", x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(x.shape, dtype=torch.int64)


def _save_blocks(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])


def _mean_of_each_block(ctx, grad: torch.Tensor, _) -> torch.Tensor:
    """Within a block every element moves the mean alike. Plain torch: the compiler sees it and fuses it."""
    (blocks,) = ctx.saved_tensors
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    sums = torch.zeros_like(wide).scatter_add(-1, blocks, wide)
    counts = torch.zeros_like(wide).scatter_add(-1, blocks, torch.ones_like(wide))
    return (sums / counts).gather(-1, blocks).to(grad.dtype)


isotonic_with_blocks.register_autograd(_mean_of_each_block, setup_context=_save_blocks)


def isotonic(x: torch.Tensor) -> torch.Tensor:
    """The nondecreasing fit of each row, with a gradient; limits and errors are in the module docstring."""
    return isotonic_with_blocks(x)[0]


@torch.library.custom_op(f"{NAMESPACE}::isotonic_into", mutates_args=("out",))
def write_isotonic(x: torch.Tensor, out: torch.Tensor) -> None:
    _check("isotonic_into", x, out)
    out.copy_(pooled(x)[0])


@write_isotonic.register_fake  # nothing comes out of it, so this only has bad input refused while compiling
def _(x, out):
    _check("isotonic_into", x, out)


def isotonic_into(x: torch.Tensor, out: torch.Tensor) -> None:
    """isotonic(x), written into `out`, without a gradient."""
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise RuntimeError("isotonic_into: a tensor requires grad, and its gradient would be lost; use isotonic(x)")
    write_isotonic(x, out)


def reference(x: torch.Tensor) -> torch.Tensor:
    """max over j <= i of min over k >= i of mean(x[j..k]), in float64: another way to the same fit, and traceable."""
    x, n = x.double(), x.shape[-1]
    if not n:
        return x
    ends = torch.nn.functional.pad(x.cumsum(-1), (1, 0))
    j = torch.arange(n, device=x.device)
    means = (ends[..., None, 1:] - ends[..., :-1, None]) / (j - j[:, None] + 1).clamp(min=1)
    least = means.masked_fill(j < j[:, None], float("inf")).flip(-1).cummin(-1).values.flip(-1)
    return least.masked_fill(j < j[:, None], -float("inf")).amax(-2)


def gradient(fit: Callable) -> Callable:
    def backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(fit(x), x, grad)[0]

    return backward


def gradient_reference(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return gradient(reference)(x.double(), grad.double())


# --- what a compiler makes of it


def compiled_graphs(fn: Callable, *inputs, fullgraph: bool = False) -> list[list[str]]:
    """fn compiled and called once: the operations of each graph that a compiler behind AOTAutograd would get."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def forward(graph, _):
        names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        graphs.append([name for name in names if not name.startswith("<built-in")])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    torch.compiler.reset()
    with logs():
        torch.compile(fn, backend=backend, fullgraph=fullgraph, dynamic=False)(*inputs)
    torch.compiler.reset()
    return graphs


def layer(fit: Callable) -> Callable:
    return lambda x: fit(x * 2) + 1


def layer_reference(x: torch.Tensor) -> torch.Tensor:
    return reference(x.double() * 2) + 1


def the_operator(h: Harness) -> None:
    x, grad = h.randn(5, 37), h.randn(5, 37)
    for shape in ((0, 5), (3, 0), (1,), (2, 3, 19), (4, 256)):
        h.check(isotonic, reference, h.randn(*shape), what=f"isotonic {'x'.join(map(str, shape))}", roundings=2)
    strided = h.randn(37, 5).t()
    h.check(isotonic, reference, strided, what="isotonic transposed", roundings=2)
    h.check(gradient(isotonic), gradient_reference, x, grad, what="its gradient", terms=37)
    if h.profile:
        return
    h.fact("opcheck", torch.library.opcheck(isotonic_with_blocks, (x.clone().requires_grad_(),)))
    h.fact("opcheck of the one that writes into `out`", torch.library.opcheck(write_isotonic, (x, torch.empty_like(x))))

    untouched = layer(lambda x: pooled(x)[0])
    with watch() as first, logs():
        torch.compiler.reset()
        compiled = torch.compile(untouched, backend="eager")
        compiled(h.randn(2, 8))
    with watch() as more, logs():
        for _ in range(3):
            compiled(h.randn(2, 8))
    found = {"graphs": first.graphs, "breaks": first.breaks, "compilations for 3 more inputs": len(more.frames)}
    h.fact("the plain function, compiled", found)
    if more.recompiles:
        h.say(f"what it reads becomes a guard: {more.recompiles[0].splitlines()[0].split('#')[0].strip()}")
    h.fact("the operator, compiled", compiled_graphs(layer(isotonic), x, fullgraph=True))

    def write(x):
        out = torch.zeros_like(x)
        isotonic_into(x * 2, out)
        return out + 1

    h.fact("the one that writes into `out`, compiled", compiled_graphs(write, x, fullgraph=True))
    h.check(h.compiled(layer(isotonic), fullgraph=True), layer_reference, x, what="compiled", roundings=8)
    compiled = h.compiled(write, fullgraph=True, backend="aot_eager")
    h.check(compiled, layer_reference, x, what="compiled, into `out`", roundings=8)
    compiled = gradient(h.compiled(isotonic, backend="aot_eager", fullgraph=True))
    h.check(compiled, gradient_reference, x, grad, what="its gradient, compiled", poison=False, terms=37)
    torch.compiler.reset()
    compiled = torch.compile(layer(isotonic), fullgraph=True, backend="aot_eager")
    with watch() as seen:
        for rows in (4, 9, 6):
            case = h.randn(rows, 37)
            torch._dynamo.mark_dynamic(case, 0)
            h.check(compiled, layer_reference, case, what=f"compiled for any rows: {rows}", roundings=8)
    h.fact("graphs for 3 batch sizes", seen.graphs)


# --- other ways around


# A factor, and a byte for each time it was asked for. In arrays, whose code is C: there Dynamo stops.
FACTOR, ASKED = array.array("d", [2.0]), array.array("b")


def wave(x: torch.Tensor) -> torch.Tensor:
    """The same two operations at every call, but by way of Python that Dynamo cannot trace."""
    ASKED.append(1)
    return x.sin() * FACTOR[0]


@torch.library.custom_op(f"{NAMESPACE}::wave", mutates_args=())
def wave_operator(x: torch.Tensor) -> torch.Tensor:
    return wave(x)


@wave_operator.register_fake
def _(x):
    return torch.empty_like(x)


wave_operator.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos() * FACTOR[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@dataclass
class Pair:
    """An argument that is no tensor. nonstrict_trace asks for this registration, and so does its error message."""

    left: torch.Tensor
    right: torch.Tensor


torch.utils._pytree.register_dataclass(Pair)


def product(pair: Pair) -> torch.Tensor:
    return pair.left * pair.right


def product_operator(pair: Pair) -> torch.Tensor:
    schema = torch.library.infer_schema(product, mutates_args=())  # what custom_op does first; raises for a Pair
    raise AssertionError(f"an operator of schema {schema} is possible now: define it")


def own(fn: Callable) -> Callable:
    """A copy of fn, code and all: the decorators mark it for good, and Dynamo tells functions apart by their code."""
    return types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def ways() -> dict[str, tuple[Callable, Callable, Callable]]:
    """By name: wave, isotonic (without its operator) and product, each taken that way."""
    functions = (wave, lambda x: pooled(x)[0], product)
    decorators = {
        "untouched": lambda fn: fn,
        "allow_in_graph": torch.compiler.allow_in_graph,
        "nonstrict_trace": torch._dynamo.nonstrict_trace,
        "disable": torch.compiler.disable,
    }
    taken = {name: tuple(decorate(own(fn)) for fn in functions) for name, decorate in decorators.items()}
    return taken | {"custom_op": (wave_operator, isotonic, product_operator)}


def around(fn: Callable) -> Callable:
    return own(lambda x: fn(x + 1) * 3)


def around_reference(x: torch.Tensor) -> torch.Tensor:
    return (x.double() + 1).sin() * FACTOR[0] * 3


def one_graph(fn: Callable, x: torch.Tensor) -> str:
    """Whether fn compiles without a break: "yes", or how it ends."""
    try:
        return "yes" if len(compiled_graphs(fn, x, fullgraph=True)) == 1 else "no"
    except Exception as error:
        return type(getattr(error, "inner_exception", error)).__name__


def probe(h: Harness, wave_so, fit_so, product_so) -> dict:
    """What one way does with a function of torch calls, with one that reads its data, and with an object."""
    x = h.randn(8)
    with logs(), watch() as seen:
        torch.compiler.reset()
        compiled = torch.compile(around(wave_so), backend="aot_eager")
        tracked = x.clone().requires_grad_()
        out = compiled(tracked)
        (grad,) = torch.autograd.grad(out.sum(), tracked)
        before = compiled(x)  # compiled again where a gradient is not wanted: so only the next call is counted
        asked = len(ASKED)
        compiled(x)
        runs = len(ASKED) - asked
        was = FACTOR[0]
        FACTOR[0] = 1.5 * was
        try:
            followed = torch.allclose(compiled(x), 1.5 * before)
        finally:
            FACTOR[0] = was
    want = torch.autograd.grad(around_reference(leaf := x.double().requires_grad_()).sum(), leaf)[0]
    graphs = compiled_graphs(around(wave_so), x)
    return {
        "breaks": len(seen.breaks),
        "graph": " | ".join(" ".join(name.split(".")[1] for name in graph) for graph in graphs),
        "gradient": "right" if torch.allclose(grad.double(), want, atol=1e-5) else "wrong",
        "runs at a call": runs,
        "sees a setting changed later": "yes" if followed else "no",
        "one graph": one_graph(around(wave_so), x),
        "one graph if it reads data": one_graph(layer(fit_so), x),
        "one graph with an object": one_graph(lambda x: product_so(Pair(x, x + 1)) * 3, x),
    }


def other_ways(h: Harness) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name: probe(h, *taken) for name, taken in ways().items()}
    h.fact("the same function, five ways", found)

    def those(wanted: Callable[[dict], bool]) -> list[str]:
        return [name for name, answers in found.items() if wanted(answers)]

    whole = those(lambda a: a["one graph"] == "yes")
    stale = those(lambda a: a["sees a setting changed later"] == "no")
    decide = {
        "the compiler must see its operations": those(lambda a: "sin" in a["graph"] and a["one graph"] == "yes"),
        "its Python must run at every call": those(lambda a: a["runs at a call"] == 1),
        "... and the graph must stay whole": [name for name in whole if found[name]["runs at a call"] == 1],
        "it reads the data, and the graph must stay whole": those(lambda a: a["one graph if it reads data"] == "yes"),
        "it takes an object, and the graph must stay whole": those(lambda a: a["one graph with an object"] == "yes"),
    }
    h.fact("when to use which", {when: ", ".join(names) or "none of these" for when, names in decide.items()})
    h.fact("silently wrong once a setting that Python reads has changed", stale)


def cost(h: Harness) -> None:
    variants = {"torch eager": around(wave)}
    for name, (wave_so, _, _) in ways().items():
        variants[f"torch.compile {name}"] = torch.compile(around(wave_so), dynamic=False)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        table = h.compare(
            variants, around_reference, h.randn(16), baseline="torch eager", work=Work(), title="one call",
            whole_calls=True, terms=0, roundings=16,
        )  # fmt: skip
    if table and table.rows[0].ms:
        rows = {row.variant.split()[-1]: 1000 * row.ms for row in table.rows}
        seen = rows["nonstrict_trace"]  # in one graph, all of it Inductor's
        h.say("a call, beside one graph that Inductor has whole: " + ", ".join(
            f"{name} {us - seen:+.0f} us" for name, us in rows.items() if name != "nonstrict_trace"
        ))  # fmt: skip


# --- lies


def operator(name: str, body: Callable, fake: Callable | None):
    """An operator of one tensor that claims to change none, with this rule for shapes."""

    def called(x: torch.Tensor) -> torch.Tensor:
        return body(x)

    made = torch.library.custom_op(f"{NAMESPACE}::{name}", called, mutates_args=())
    if fake:
        made.register_fake(fake)
    return made


LIES = {
    "none": operator("honest", torch.sin, torch.empty_like),
    "a row too many": operator("shape", torch.sin, lambda x: x.new_empty(x.shape[0] + 1, x.shape[1])),
    "float32, but it is float64": operator("dtype", lambda x: x.sin().double(), torch.empty_like),
    "contiguous, but it is transposed": operator("strides", lambda x: x.sin().t().contiguous().t(), torch.empty_like),
    "no rule at all": operator("missing", torch.sin, None),
    "new memory, but it is the input's": operator("alias", lambda x: x.view(x.shape), torch.empty_like),
    "the input is left alone, but it is doubled": operator("mutates", lambda x: x.mul_(2).sin(), torch.empty_like),
}


def user(op: Callable) -> Callable:
    """Code that believes the operator: its size, its memory, and that `y` is what it was."""

    def uses(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = op(y)
        return z.sum(0) / z.shape[0] + y.mean(0)

    return uses


def consequence(op: Callable, x: torch.Tensor, backend: str | None) -> str:
    """What a user's code gets, compiled or (backend None) not: an error's kind, or how far it is from eager's."""
    torch.compiler.reset()
    called = torch.compile(user(op), backend=backend, fullgraph=True) if backend else user(op)
    try:
        with logs():
            got = called(x)
    except Exception as error:
        return f"{type(getattr(error, 'inner_exception', error)).__name__}"
    finally:
        torch.compiler.reset()
    if backend is None:
        return "runs"
    off = (got.double() - user(op)(x).double()).abs().max().item()
    return "as eager" if off < 1e-5 else f"WRONG, by {off:.0e}"


def found_by_opcheck(op: Callable, x: torch.Tensor) -> str:
    verdicts = torch.library.opcheck(op, (x,), raise_exception=False)
    failed = [f"{test} ({type(why).__name__})" for test, why in verdicts.items() if not isinstance(why, str)]
    return ", ".join(failed) or "passes"


def lies(h: Harness) -> None:
    x, found = h.randn(4, 6), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lie, op in LIES.items():
            with h.progress(f"lying: {lie}"):
                found[lie] = {"eager": consequence(op, x, None)} | {
                    backend: consequence(op, x, backend) for backend in ("aot_eager", "inductor")
                }
                found[lie]["opcheck"] = found_by_opcheck(op, x.clone())
    h.fact("what the rule says, and what comes of it", found)
    silent = {
        backend: [lie for lie, answers in found.items() if answers[backend].startswith("WRONG")]
        for backend in ("aot_eager", "inductor")
    }
    for backend, wrong in silent.items():
        which = "; ".join(wrong) or "none"
        h.say(f"{backend}: {len(wrong)} of {len(LIES) - 1} lies give a wrong result in silence: {which}")
    told = [lie for lie in found if found[lie]["opcheck"] != "passes" and lie != "none"]
    missed = [lie for lie in LIES if lie not in told and lie != "none"]
    h.say(f"opcheck finds {len(told)} of them" + (f", but not: {'; '.join(missed)}" if missed else ""))


def demo(h: Harness) -> None:
    the_operator(h)
    if not h.profile:
        other_ways(h)
        lies(h)
    cost(h)


if __name__ == "__main__":
    run(demo)
