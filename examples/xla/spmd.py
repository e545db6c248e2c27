"""SPMD: one program over several devices; say how tensors are cut, and read in the HLO what has to be communicated.

Technique  With torch_xla.runtime.use_spmd() one process sees one device; mark_sharding says over which axes of a mesh
           each dimension of a tensor is cut, XLA derives it for everything computed from there, and puts the
           collectives between the devices where a device needs what another one holds. Here the mesh is of virtual CPU
           devices in a process of its own: nothing gets faster, but the program is that of as many chips. Cuts of a
           matrix product, and the four layouts of a training step: data parallel, tensor parallel, both, and sharded
           weights (FSDP). The collectives of the optimized HLO and their bytes stand next to what theory asks for.
Question   Which way of cutting a tensor costs which communication, and what does each device hold?
Needs      torch_xla>=2.9
Shapes     Products a [m, k] @ b [k, n]; training x [rows, width] -> y [rows, width], by blocks of two Linear layers.
           A dimension should divide by its devices: torch_xla pads it in silence otherwise, on the last ones.
Dtypes     float32.
Errors     make_mesh: RuntimeError unless SPMD is on; ValueError for axes that do not match, or another number of
           devices. shard, local_shape: ValueError for a spec of another rank, an unknown axis, an axis used twice, or
           (unless pad=True) a dimension that does not divide; shard: TypeError for a tensor that is not on XLA.
           torch_xla's own, shown too: assertions, which python -O drops.
Wins when  a model, its optimizer's state or its batch do not fit one chip, and the chips' links carry what is listed
           here. On one machine's CPU there is nothing to win: the devices are threads that share its cores.
Source     chapter section "XLA"; GSPMD (arXiv 2105.04663) and the SPMD guide of PyTorch/XLA.
Run        python examples/xla/spmd.py
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import Harness, run, xla
from harness.process import Child, report

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import nn
from torch_xla import runtime

DEVICES = 4
STEPS = 3  # the first has no momentum yet, and is a program of its own; the third compiles nothing
LAYERS = 2
LR, MOMENTUM = 1.0, 0.9

Spec = tuple[str | None, ...]


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> xs.Mesh:
    """All devices of this process as a grid with named axes; limits and errors are in the module docstring."""
    if not runtime.is_spmd():
        raise RuntimeError("make_mesh: SPMD is off; call torch_xla.runtime.use_spmd() before anything is on the device")
    devices = runtime.global_runtime_device_count()
    if len(shape) != len(names) or len(set(names)) != len(names):
        raise ValueError(f"make_mesh: shape {shape} and axes {names}; give each axis one name of its own")
    if math.prod(shape) != devices:
        raise ValueError(
            f"make_mesh: shape {shape} is {math.prod(shape)} devices, and there are {devices}; a mesh holds them all "
            "(CPU_NUM_DEVICES sets their number, before torch_xla is imported)"
        )
    return xs.Mesh(list(range(devices)), shape, names)


def local_shape(shape: tuple[int, ...], spec: Spec, axes: dict[str, int], pad: bool = False) -> tuple[int, ...]:
    """What one device holds of a tensor cut by `spec`; errors are in the module docstring."""
    if len(spec) != len(shape):
        raise ValueError(f"shard: spec {spec} for a tensor {tuple(shape)}; name an axis, or None, for each dimension")
    used = [axis for axis in spec if axis is not None]
    if unknown := sorted(set(used) - set(axes)):
        raise ValueError(f"shard: spec {spec} names {unknown}, and the axes of the mesh are {list(axes)}")
    if len(set(used)) != len(used):
        raise ValueError(f"shard: spec {spec} uses an axis twice; each can cut one dimension")
    held = tuple(math.ceil(size / axes[axis]) if axis else size for size, axis in zip(shape, spec, strict=True))
    for size, each, axis in zip(shape, held, spec, strict=True):
        if axis and each * axes[axis] != size and not pad:
            raise ValueError(
                f"shard: {size} does not divide by the {axes[axis]} devices of {axis!r}; pad=True has each hold "
                f"{each}, and {each * axes[axis] - size} in all are padding"
            )
    return held


def shard(t: torch.Tensor, mesh: xs.Mesh, spec: Spec, pad: bool = False) -> torch.Tensor:
    """mark_sharding(t, mesh, spec), once it is known to fit; errors are in the module docstring."""
    if t.device.type != "xla":
        raise TypeError(f"shard: the tensor is on {t.device}; move it to torch_xla.device() first")
    local_shape(tuple(t.shape), spec, mesh.shape(), pad)
    xs.mark_sharding(t, mesh, spec)
    return t


# --- reading the program


@dataclass(frozen=True)
class Collective:
    """One collective of a program: the devices of a group, and the bytes of the result that one of them gets."""

    op: str
    devices: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that a device must send at least, which a ring does; an all-reduce goes around twice."""
        others = self.devices - 1
        if self.op == "reduce-scatter":
            return self.bytes * others
        return self.bytes if self.op == "collective-permute" else self.bytes * others / self.devices * self.rounds

    @property
    def rounds(self) -> int:
        return 2 if self.op == "all-reduce" else 1


def collectives(text: str) -> Iterator[Collective]:
    """Those of a program's optimized HLO. Pairs of -start and -done, as XLA has them on GPUs and TPUs, are not read."""
    ops = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for shapes, op, rest in re.findall(rf"^.*? = (\(.*?\)|\S+) ({ops})\((.*)$", text, re.MULTILINE):
        sizes = re.findall(r"([a-z]+)(\d*)\[([\d,]*)\]", shapes)
        size = sum(int(bits or 8) // 8 * math.prod(map(int, filter(None, dims.split(",")))) for _, bits, dims in sizes)
        if op == "collective-permute":
            devices = len(re.search(r"source_target_pairs=\{(\{.*?\})\}", rest)[1].split("},"))
        elif listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
            devices = len(listed[1].split(","))
        else:  # [groups, devices]<=[all]
            devices = int(re.search(r"replica_groups=\[\d+,(\d+)\]", rest)[1])
        yield Collective(op, devices, size)


class Programs:
    """The optimized HLO that XLA dumps into a folder: XLA_FLAGS=--xla_dump_to=folder --xla_dump_hlo_as_text."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, set()

    def new(self) -> list[str]:
        """Of each lazy graph compiled since the last call; what .cpu() compiles to gather a tensor is left out."""
        found = set(self.folder.glob("*SyncTensorsGraph*after_optimizations.txt")) - self.seen
        self.seen |= found
        return [path.read_text() for path in sorted(found)]


# --- what is run


@dataclass(frozen=True)
class Product:
    """A product's cuts, and the collectives that it needs by theory: (op, devices, elements of its result)."""

    a: Spec
    b: Spec
    theory: Callable[[int, int, int], list[tuple[str, int, int]]]
    c: Spec | None = None  # None: as XLA derives it
    mesh: tuple[int, ...] = (DEVICES,)
    axes: tuple[str, ...] = ("x",)


PRODUCTS = {
    "rows of a": Product(("x", None), (None, None), lambda m, k, n: []),
    "columns of b": Product((None, None), (None, "x"), lambda m, k, n: []),
    "rows of a, columns of b, two axes": Product(
        ("x", None), (None, "y"), lambda m, k, n: [], mesh=(2, DEVICES // 2), axes=("x", "y")
    ),
    "rows of a, columns of b, one axis": Product(
        ("x", None), (None, "x"), lambda m, k, n: [("all-gather", DEVICES, m * k)]
    ),
    "the summed dimension": Product((None, "x"), ("x", None), lambda m, k, n: [("all-reduce", DEVICES, m * n)]),
    "the summed dimension, rows of the result": Product(
        (None, "x"), ("x", None), lambda m, k, n: [("reduce-scatter", DEVICES, m * n // DEVICES)], c=("x", None)
    ),
}


class Mlp(nn.Module):
    """Residual blocks: x + down(silu(up(x))). At relu's kink one rounding would decide over a whole gradient."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.silu(up(x)))
        return x


@dataclass(frozen=True)
class Layout:
    """How a training step is cut: the batch's rows, and the weights of both layers, each [out, in]."""

    rows: str | None
    up: Spec
    down: Spec
    theory: Callable[[int, int, int], list[tuple[str, int, int]]]
    pinned: bool = False  # every layer's output is marked as cut by rows
    mesh: tuple[int, ...] = (DEVICES,)
    axes: tuple[str, ...] = ("x",)


WEIGHTS = 2 * LAYERS


def sharded_weights(rows: int, width: int, hidden: int) -> list[tuple[str, int, int]]:
    """FSDP: each weight is gathered forward and again backward, where the first layer's input needs no gradient."""
    gathers = [("all-gather", DEVICES, width * hidden)] * (2 * WEIGHTS - 1)
    return gathers + [("reduce-scatter", DEVICES, width * hidden // DEVICES)] * WEIGHTS + [("all-reduce", DEVICES, 1)]


LAYOUTS = {
    # Every gradient, and the loss.
    "data parallel": Layout(
        "x", (None, None), (None, None),
        lambda rows, width, hidden: [("all-reduce", DEVICES, width * hidden)] * WEIGHTS + [("all-reduce", DEVICES, 1)],
    ),
    # An activation for each block forward, and backward for all but the first, whose input needs no gradient.
    "tensor parallel": Layout(
        None, ("x", None), (None, "x"),
        lambda rows, width, hidden: [("all-reduce", DEVICES, rows * width)] * (2 * LAYERS - 1),
    ),
    "data and tensor parallel": Layout(
        "data", ("model", None), (None, "model"),
        lambda rows, width, hidden: [("all-reduce", 2, rows // 2 * width)] * (2 * LAYERS - 1)
        + [("all-reduce", 2, width * hidden // 2)] * WEIGHTS + [("all-reduce", 2, 1)],
        mesh=(2, DEVICES // 2), axes=("data", "model"),
    ),
    "sharded weights": Layout("x", ("x", None), ("x", None), sharded_weights, pinned=True),
    "sharded weights, outputs not marked": Layout("x", ("x", None), ("x", None), sharded_weights),
}  # fmt: skip


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def train(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, after: Callable = lambda: None
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """STEPS steps, the loss of each: `after` is called at the end of each."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.detach())
    return optimizer, losses


# --- in the process with the devices


def shards(t: torch.Tensor) -> list[list[int]]:
    """The shape of what each device holds of it."""
    xla.settle()
    return [list(each.data.shape) for each in xs.XLAShardedTensor(t.detach()).local_shards]


def bytes_held(*tensors: torch.Tensor) -> int:
    """On the first device."""
    return sum(math.prod(shards(t)[0]) * t.element_size() for t in tensors)


def cut_sums(text: str) -> int:
    """All-reduced results that are cut afterwards. Fusions may repeat a cut, so the results are counted."""
    bodies = re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    cutting = {name for name, body in bodies if " dynamic-slice(" in body}
    found = set()
    for operands, rest in re.findall(r" (?:fusion|dynamic-slice)\(([^)]*)\)(.*)", text.rpartition("ENTRY")[2]):
        called = re.search(r"calls=%?([\w.-]+)", rest)
        if called is None or called[1] in cutting:
            found |= set(re.findall(r"%(all-reduce[\w.-]*)", operands))
    return len(found)


def described(text: str) -> dict:
    return {
        "collectives": [[c.op, c.devices, c.bytes] for c in collectives(text)],
        "cut sums": cut_sums(text),
        "lines": [line.strip().split(", channel_id")[0] for line in text.splitlines() if next(collectives(line), None)],
    }


def run_product(case: Product, a: torch.Tensor, b: torch.Tensor, programs: Programs) -> tuple[torch.Tensor, dict]:
    mesh, device = make_mesh(case.mesh, case.axes), xla.device()
    a, b = shard(a.to(device), mesh, case.a), shard(b.to(device), mesh, case.b)
    c = a @ b
    if case.c:
        shard(c, mesh, case.c)
    xla.settle()
    (text,) = programs.new()
    return c.cpu(), {**described(text), "a": shards(a), "b": shards(b), "c": shards(c)}


def run_layout(case: Layout, model: Mlp, x: torch.Tensor, y: torch.Tensor, programs: Programs) -> tuple[list, dict]:
    mesh, device = make_mesh(case.mesh, case.axes), xla.device()
    x, y = (shard(t.to(device), mesh, (case.rows, None)) for t in (x, y))
    model.to(device)
    for layers, spec in ((model.up, case.up), (model.down, case.down)):
        for layer in layers:
            shard(layer.weight, mesh, spec)
            if case.pinned:
                layer.register_forward_hook(lambda *args: shard(args[-1], mesh, (case.rows, None)))
    xla.settle()
    programs.new()
    texts = []

    def after() -> None:
        torch_xla.sync()
        texts.append(programs.new())

    optimizer, losses = train(model, x, y, after)
    parameters = list(model.parameters())
    momentum = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    told = {
        **described([text for each in texts for text in each][-1]),
        "compiles": [len(each) for each in texts],
        "held": bytes_held(*parameters, *momentum),
    }
    return [torch.stack(losses).cpu(), *(p.detach().cpu() for p in parameters)], told


def error_of(fn: Callable) -> str:
    """What fn() raises, in its first line."""
    try:
        fn()
    except Exception as error:
        # XLA ends some messages with a link that changes from process to process, so that nobody compares them.
        return f"{type(error).__name__}: {re.sub(r':? goo.gle/.*', '', str(error).splitlines()[0])}"
    return "no error"


def refusals(device: torch.device) -> dict[str, dict[str, str]]:
    """What torch_xla says of what cannot be, and what this file says."""
    mesh = make_mesh((DEVICES,), ("x",))
    t, cut, ten = (torch.ones(rows, 4).to(device) for rows in (8, 8, 10))
    shard(cut, mesh, ("x", None))
    both = {
        "a mesh of 8": (lambda: xs.Mesh(list(range(8)), (8,), ("x",)), lambda: make_mesh((8,), ("x",))),
        "a mesh of 2": (lambda: xs.Mesh([0, 1], (2,), ("x",)), lambda: make_mesh((2,), ("x",))),
    }
    specs = {
        "a spec of rank 1": ("x",), "an unknown axis": ("z", None), "an axis twice": ("x", "x"),
        "10 rows over 4": ("x", None),
    }  # fmt: skip
    for what, spec in specs.items():
        given = ten if what.startswith("10") else t
        both[what] = (
            lambda given=given, spec=spec: xs.mark_sharding(given, mesh, spec),
            lambda given=given, spec=spec: shard(given.clone(), mesh, spec),
        )
    on_cpu, rows = torch.ones(8, 4), ("x", None)
    both["a tensor on the CPU"] = (lambda: xs.mark_sharding(on_cpu, mesh, rows), lambda: shard(on_cpu, mesh, rows))
    told = {what: {"torch_xla": error_of(theirs), "here": error_of(ours)} for what, (theirs, ours) in both.items()}
    told["cut again, otherwise"] = {"torch_xla": error_of(lambda: xs.mark_sharding(cut, mesh, (None, "x")))}
    return told


def child_spmd(folder: str) -> None:
    """All cases; their tensors go back in a file."""
    runtime.use_spmd()
    given = torch.load(Path(folder, "given.pt"), weights_only=True)
    programs, out, told = Programs(Path(folder, "hlo")), {}, {"devices": runtime.global_runtime_device_count()}
    a, b, x, y = (given[name] for name in "abxy")
    for name, case in PRODUCTS.items():
        out[name], told[name] = run_product(case, a, b, programs)
    for name, case in LAYOUTS.items():
        model = Mlp(*given["model"]["up.0.weight"].t().shape)
        model.load_state_dict(given["model"])
        out[name], told[name] = run_layout(case, model, x, y, programs)
    mesh, device = make_mesh((DEVICES,), ("x",)), xla.device()
    for rows in given["ragged"]:
        t = shard(a[:rows].to(device), mesh, ("x", None), pad=True)
        out[f"{rows} rows"] = (t @ b.to(device)).cpu()
        kept = [each.indices[0] for each in xs.XLAShardedTensor(t).local_shards]
        told[f"{rows} rows"] = {"held": [shape[0] for shape in shards(t)], "rows": [s.stop - s.start for s in kept]}
    told["refusals"] = refusals(device)
    torch.save(out, Path(folder, "out.pt"))
    report(**told)


# --- and what is said of it


def judged(h: Harness, names: dict, sizes: tuple[int, int, int], told: dict) -> dict[str, list[Collective]]:
    """Put what each case communicates next to theory; the cases where they differ."""
    differ, facts = {}, {}
    for name, case in names.items():
        found = [Collective(*each) for each in told[name]["collectives"]]
        theory = [Collective(op, devices, 4 * elements) for op, devices, elements in case.theory(*sizes)]
        counts = Counter(c.op for c in found)
        facts[name] = {
            **{f"{op}s": counts[op] for op in sorted(counts)}, "bytes": sum(c.bytes for c in found),
            "sent by a device": round(sum(c.sent for c in found)),
            "sent by theory": round(sum(c.sent for c in theory)),
        }  # fmt: skip
        if Counter(found) != Counter(theory):
            differ[name] = theory
    h.fact("communication of " + ("a product" if names is PRODUCTS else "a training step"), facts)
    return differ


def products(h: Harness, a: torch.Tensor, b: torch.Tensor, told: dict, out: dict) -> None:
    (m, k), n = a.shape, b.shape[1]
    for name, case in PRODUCTS.items():
        axes = dict(zip(case.axes, case.mesh, strict=True))
        for what, t, spec in (("a", a, case.a), ("b", b, case.b)):
            if told[name][what] != [list(local_shape(tuple(t.shape), spec, axes))] * DEVICES:
                raise AssertionError(f"{name}: the devices hold {told[name][what]} of {what}, cut by {spec}")
        h.check(
            lambda *_, name=name: out[name], lambda a, b: a.double() @ b.double(), a, b,
            what=f"{m}x{k}x{n}, {name}", terms=k, poison=False,
        )  # fmt: skip
    h.fact("a device holds", {name: {w: "x".join(map(str, told[name][w][0])) for w in "abc"} for name in PRODUCTS})
    differ = judged(h, PRODUCTS, (m, k, n), told)
    for name in PRODUCTS:
        for line in told[name]["lines"]:
            h.say(f"{name}: {line}")
    for name, theory in differ.items():
        found = told[name]
        h.say(
            f"{name}: theory says {', '.join(c.op for c in theory) or 'nothing'}; XLA for this CPU does "
            f"{', '.join(c[0] for c in found['collectives'])}"
            + (" and each device cuts its part out of the whole sum" if found["cut sums"] else "")
        )


def training(h: Harness, model: Mlp, x: torch.Tensor, y: torch.Tensor, told: dict, out: dict) -> None:
    width, hidden = model.up[0].weight.t().shape
    start = [p.detach() for p in model.parameters()]

    def learned(losses, after):
        # Not the weights: they are so much larger than what three steps change that no step at all might pass.
        return (losses, *(p - before for p, before in zip(after, start, strict=True)))

    def float64(x, y):
        exact = Mlp(width, hidden).double()
        exact.load_state_dict(model.state_dict())
        losses = train(exact, x.double(), y.double())[1]
        return learned(torch.stack(losses), [p.detach() for p in exact.parameters()])

    for name in LAYOUTS:
        what = f"{name}: losses and what {STEPS} steps change"
        got = learned(out[name][0], out[name][1:])
        h.check(lambda *_, got=got: got, float64, x, y, what=what, terms=len(x) + hidden, poison=False)
    differ = judged(h, LAYOUTS, (len(x), width, hidden), told)
    whole = 2 * 4 * sum(p.numel() for p in model.parameters())
    h.fact("compiles by step", {name: str(told[name]["compiles"]) for name in LAYOUTS})
    h.fact("bytes of weights and momentum on a device", {name: told[name]["held"] for name in LAYOUTS})
    facts = h.record.facts["communication of a training step"]
    for name in LAYOUTS:
        h.say(
            f"{name}: a device holds {told[name]['held'] / whole:.0%} of weights and momentum and sends "
            f"{facts[name]['sent by a device'] / 1000:.0f} kB a step, of {whole / 2000:.0f} kB of weights"
        )
    for name, theory in differ.items():
        wanted, cut = Counter(c.op for c in theory), told[name]["cut sums"]
        h.say(
            f"{name}: theory sends {facts[name]['sent by theory'] / 1000:.0f} kB "
            f"({', '.join(f'{count} {op}' for op, count in wanted.items())}); the program differs: "
            + ", ".join(f"{count} {op}" for op, count in Counter(c[0] for c in told[name]["collectives"]).items())
            + (f", {cut} sums that are made whole on every device and then cut" if cut else "")
        )


def demo(h: Harness) -> None:
    if h.profile:
        h.say("the devices are threads of another process; there is nothing here for a profiler")
        return
    m, k, n = h.pick((72, 88, 104), (1152, 576, 1728))
    rows, width, hidden = h.pick((72, 56, 104), (1024, 384, 1056))
    a, b = h.randn(m, k), h.randn(k, n)
    x, y = h.randn(rows, width), h.randn(rows, width)
    model = Mlp(width, hidden)
    ragged = (10, 5)
    with tempfile.TemporaryDirectory() as folder:
        given = {"a": a, "b": b, "x": x, "y": y, "model": model.state_dict(), "ragged": ragged}
        torch.save(given, Path(folder, "given.pt"))
        flags = f"--xla_dump_to={folder}/hlo --xla_dump_hlo_as_text"
        env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES), "XLA_FLAGS": flags}
        with h.progress(f"a mesh of {DEVICES} devices"), Child(child_spmd, folder, env=env) as child:
            told = child.result()
        out = torch.load(Path(folder, "out.pt"), weights_only=True)
    h.fact("devices", told["devices"])
    products(h, a, b, told, out)
    training(h, model, x, y, told, out)
    for count in ragged:
        name = f"{count} rows"
        h.check(
            lambda *_, name=name: out[name], lambda a, b: a.double() @ b.double(), a[:count], b,
            what=f"{name} over {DEVICES} devices", terms=k, poison=False,
        )  # fmt: skip
        held, real = told[name]["held"], told[name]["rows"]
        h.fact(f"{name} over {DEVICES} devices", {"held": str(held), "of which real": str(real)})
        h.say(f"{name}: {sum(held) - sum(real)} of the {sum(held)} rows that the devices hold are padding")
    h.fact("refused", told["refusals"])
    off = torch.ones(8, 4, device=xla.device())
    h.fact(
        "refused in this process, where SPMD is off",
        {
            "torch_xla": error_of(lambda: xs.mark_sharding(off, xs.Mesh([0], (1,), ("x",)), ("x", None))),
            "here": error_of(lambda: make_mesh((1,), ("x",))),
        },
    )
    xla.settle()


if __name__ == "__main__":
    run(demo)
