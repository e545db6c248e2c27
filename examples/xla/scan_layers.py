"""Scan over layers: XLA compiles a loop with one layer in it, so that compile time does not grow with depth.

Technique  A Python loop over N equal layers is recorded N times, and XLA compiles N copies. scan makes it one While
           loop over stacked weights: the layer is compiled once, and once more for backward. torch_xla's scan_layers
           stacks the weights within every step, so its graph still grows with each weight, and it traces the layer
           anew at each call; Stacked, below, stacks once and keeps the trace. It also refuses what scan_layers takes
           without a word and computes wrongly: the first layer's code and settings stand for all of them, a generator
           loses its first layer, and a layer that works in place hands on its changed input, not its output.
Question   How does the time to compile N equal layers grow with N, unrolled and scanned, and what does a step cost?
Needs      torch_xla>=2.9
Shapes     x [rows, width] on the XLA device -> the same shape; each layer maps its input to the same shape and dtype.
Dtypes     float32; Stacked takes any floating dtype, the same in all layers.
Errors     Stacked and require_equal raise TypeError for what is no sequence of modules (a generator too); ValueError,
           with the layer and the fix, for none, for layers that differ in class, parameters, dtype, device or
           settings, for hooks, for active dropout, for a layer that changes its input or buffers, or the shape, and
           for an input that is not with the weights on the XLA device. write_back raises the same, and ValueError for
           other layers.
           What torch_xla raises, and what it does not, the run shows.
Wins when  layers are many and compiling is the larger part: short runs, many shapes, development. A step has its own
           price, mostly the host's for tracing and recording: each run says after how many steps unrolling pays.
Source     chapter section "XLA": scan.
Run        python examples/xla/scan_layers.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from harness import Harness, Work, run, xla

import torch
import torch.nn.functional as F
from torch import nn
from torch_xla.experimental.scan import scan
from torch_xla.experimental.scan_layers import scan_layers

ROWS = 12
# What torch keeps in a module's __dict__ for itself; hooks among it are looked at apart.
OWN = set(vars(nn.Module())) | {"training"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Layer(nn.Module):
    """A residual MLP layer: what is scanned here. `scale` is Python state, which no tensor shows."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


def require_equal(layers: Sequence[nn.Module], x: torch.Tensor | None = None) -> None:
    """Raise unless one of these layers can stand for all, and for their order in a loop that carries x."""
    if not isinstance(layers, (Sequence, nn.ModuleList, nn.Sequential)) or isinstance(layers, str):
        raise TypeError(f"require_equal: got {type(layers).__name__}; pass a list of modules, which can be read twice")
    if not layers:
        raise ValueError("require_equal: no layers; need at least one")
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"require_equal: layer {i} is a {type(layer).__name__}, not a module")
    first = _described(layers[0])
    for i, layer in enumerate(layers):
        described = _described(layer)
        for what, told in described.items():
            if not _same(told, first.get(what)):
                raise ValueError(
                    f"require_equal: layer {i} has {what} {told}, layer 0 has {first.get(what)}; scan computes all "
                    "layers with the first one's code: make them equal, or run this one outside the scan"
                )
        if missing := first.keys() - described.keys():
            raise ValueError(
                f"require_equal: layer {i} lacks layer 0's {', '.join(sorted(missing))}; scan equal layers"
            )
        for name, module in layer.named_modules():
            if any(getattr(module, hooks, None) for hooks in HOOKS):
                raise ValueError(
                    f"require_equal: layer {i} has hooks on {name or 'itself'}; scan drops them: remove them"
                )
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p:
                raise ValueError(
                    f"require_equal: layer {i} has active dropout, for which torch_xla 2.9 builds a loop that XLA "
                    "refuses; set p=0, call eval(), or drop out before the scan"
                )
    if x is not None:
        _require_carried(layers[0], x)


def _described(layer: nn.Module) -> dict[str, object]:
    """All that must be the same: classes, settings, and what the tensors look like."""
    told = {}
    for name, module in layer.named_modules():
        told[f"module {name or 'self'}"] = type(module)
        settings = {key: value for key, value in vars(module).items() if key not in OWN}
        told |= {f"setting {name}.{key}".replace(" .", " "): value for key, value in settings.items()}
        told[f"training of {name or 'self'}"] = module.training
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        trained = "trained" if tensor.requires_grad else "not trained"
        told[f"tensor {name}"] = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, {trained}"
    return told


def _same(one: object, other: object) -> bool:
    try:
        return one is other or bool(one == other)
    except (RuntimeError, ValueError):  # tensors within
        return repr(one) == repr(other)


def _require_carried(layer: nn.Module, x: torch.Tensor) -> None:
    """One layer is recorded, not run: its output must look as its input does, and nothing may change in place."""
    state = {name: tensor.detach().clone() for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    given = x.detach().clone()
    before = {name: tensor._version for name, tensor in state.items()}, given._version
    with torch.no_grad():
        out = torch.func.functional_call(layer, state, (given,))
    if not isinstance(out, torch.Tensor) or out.shape != x.shape or out.dtype != x.dtype:
        told = f"{tuple(out.shape)} {out.dtype}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(
            f"require_equal: a layer makes {told} of {tuple(x.shape)} {x.dtype}; in a loop its output is the next "
            "input: scan only layers that keep shape and dtype"
        )
    changed = [name for name, tensor in state.items() if tensor._version != before[0][name]]
    changed += ["its input"] * (given._version != before[1])
    if changed:
        raise ValueError(
            f"require_equal: a layer changes {', '.join(changed)} in place, and scan would carry that on instead of "
            "the output; write it without (x + 1 for x.add_(1), eval() or track_running_stats=False for batch norm)"
        )


class Stacked(nn.Module):
    """N equal layers as one module: weights stacked along a new first dimension, once, and a scan over them.

    Its parameters are the stacked ones, which an optimizer gets; write_back() puts them into layers again.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        require_equal(layers)
        self.template = [copy.deepcopy(layers[0])]  # in a list: its tensors are not this module's
        states = [dict((*layer.named_parameters(), *layer.named_buffers())) for layer in layers]
        trained = {name for name, tensor in layers[0].named_parameters() if tensor.requires_grad}
        self.names = list(states[0])
        self.stacked = nn.ParameterList(
            nn.Parameter(torch.stack([state[name].detach() for state in states]), requires_grad=name in trained)
            for name in self.names
        )
        self.bodies: dict[tuple, Callable] = {}
        self.carried: set[tuple] = set()
        self.training = layers[0].training

    def train(self, mode: bool = True) -> Stacked:
        super().train(mode)
        self.template[0].train(mode)
        self.bodies.clear()
        self.carried.clear()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "xla" or any(tensor.device != x.device for tensor in self.stacked):
            on = {str(tensor.device) for tensor in self.stacked}
            raise ValueError(
                f"Stacked: x is on {x.device}, the weights on {', '.join(on)}; move both to the XLA device"
            )
        if (looks := (x.shape, x.dtype)) not in self.carried:
            require_equal([copy.deepcopy(self.template[0]).to(x.device)], x)
            self.carried.add(looks)
        # A kept trace is found by its function, shapes and dtypes; which gradients it gives is not looked at.
        key = torch.is_grad_enabled(), x.requires_grad, *(tensor.requires_grad for tensor in self.stacked)
        body = self.bodies.setdefault(key, self._body())
        return scan(body, x, dict(zip(self.names, self.stacked, strict=True)), is_fn_pure=True)[0]

    def _body(self) -> Callable:
        template = self.template[0]

        def body(x: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
            return torch.func.functional_call(template, state, (x,)), None

        return body

    @torch.no_grad()
    def write_back(self, layers: Sequence[nn.Module]) -> None:
        """Copy the stacked weights into `layers`, as for a checkpoint of the unrolled model."""
        require_equal(layers)
        for i, layer in enumerate(layers):
            state = dict((*layer.named_parameters(), *layer.named_buffers()))
            looks = {name: tuple(tensor.shape) for name, tensor in state.items()}
            mine = {name: tuple(s.shape[1:]) for name, s in zip(self.names, self.stacked, strict=True)}
            if looks != mine or len(layers) != len(self.stacked[0]):
                raise ValueError(
                    f"Stacked.write_back: {len(layers)} layers with {looks}; need {len(self.stacked[0])} with {mine}"
                )
            for name, stacked in zip(self.names, self.stacked, strict=True):
                state[name].copy_(stacked[i])


def unrolled(layers: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


# --- how large, how long to compile, and right


UNROLLED, SCANNED, STACKED = "torch_xla unrolled", "torch_xla scan_layers", "scan, stacked once"
PURE = "torch_xla scan_layers, pure"


class Model:
    """N layers on the XLA device in three forms, the same on the CPU, and what each returns."""

    def __init__(self, depth: int, width: int) -> None:
        torch.manual_seed(depth)
        self.depth = depth
        self.host = nn.ModuleList(Layer(width) for _ in range(depth))
        self.layers = copy.deepcopy(self.host).to(xla.device())
        self.stacked = Stacked(self.layers)
        xla.settle()

    def forms(self) -> dict[str, tuple[Callable, list[nn.Parameter]]]:
        own = list(self.layers.parameters())
        return {
            UNROLLED: (lambda x: unrolled(self.layers, x), own),
            SCANNED: (lambda x: scan_layers(self.layers, x), own),
            STACKED: (self.stacked, list(self.stacked.parameters())),
        }

    def step(self, form: str, x: torch.Tensor, backward: bool) -> tuple[torch.Tensor, ...]:
        """The output; with `backward` the loss and the gradient of each kind of weight, of all layers together."""
        fn, parameters = self.forms()[form]
        return self.results(fn, parameters, x, backward, stacked=form == STACKED)

    def results(self, fn, parameters, x, backward: bool, stacked: bool = False) -> tuple[torch.Tensor, ...]:
        if not backward:
            with torch.no_grad():
                return (fn(x),)
        loss = fn(x).square().sum()
        # By default a thread of autograd's own runs the backward pass of an XLA device, and may still hold tensors of
        # it at the next sync. They are results of that program too, then, and it is another one, compiled anew.
        with torch.autograd.set_multithreading_enabled(False):
            grads = torch.autograd.grad(loss, parameters)
        kinds = len(grads) if stacked else len(grads) // self.depth
        return loss, *(grads if stacked else (torch.stack(grads[kind::kinds]) for kind in range(kinds)))

    def reference(self, x: torch.Tensor, backward: bool) -> tuple[torch.Tensor, ...]:
        exact = copy.deepcopy(self.host).double()
        return self.results(lambda x: unrolled(exact, x), list(exact.parameters()), x.double(), backward)


def sweep(h: Harness, width: int, backward: bool, depths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Every depth in three forms: operations and lines of HLO, compiles and their seconds; results against float64."""
    forms = (UNROLLED, SCANNED, STACKED)
    table = {what: {form: {} for form in forms} for what in ("operations", "lines", "compile s")}
    loops, compiles = ({form: [] for form in forms} for _ in range(2))
    what = "forward and backward" if backward else "forward"
    for depth in depths:
        model, x = Model(depth, width), h.randn(ROWS, width)
        moved, got = x.to(xla.device()), {}
        for form in forms:
            with h.progress(f"{what}, {depth} layers, {form}"), xla.watch() as ran:
                got[form] = model.step(form, moved, backward)
                text = xla.hlo(*got[form])
                xla.settle()
            found = xla.operations(text)
            loops[form].append(found["while"])
            compiles[form].append(ran.compiles)
            sizes = {"operations": found.total(), "lines": len(text.splitlines())}
            for name, value in {**sizes, "compile s": round(ran.compile_s, 3)}.items():
                table[name][form][str(depth)] = value
        h.check(
            lambda _, got=got: tuple(tensor for outs in got.values() for tensor in outs),
            lambda x, model=model: model.reference(x, backward) * len(forms), x,
            what=f"{what}, {depth} layers, {len(forms)} forms", terms=3 * width * depth, roundings=depth, poison=False,
        )  # fmt: skip
    for name, rows in table.items():
        h.fact(f"{what}: {name} by layers", rows)
    h.fact(f"{what}: While loops, each depth", loops)
    h.fact(f"{what}: compiles, each depth", compiles)
    few, many = depths[0], depths[-1]
    ops, seconds = table["operations"], table["compile s"]
    each = {form: (ops[form][str(many)] - ops[form][str(few)]) / (many - few) for form in forms}
    h.say(f"{what}: operations for one more layer: " + ", ".join(f"{form} {n:g}" for form, n in each.items()))
    if all(seconds[form][str(few)] for form in forms):
        grown = {form: seconds[form][str(many)] / seconds[form][str(few)] for form in forms}
        h.say(
            f"{what}: {many} layers took so many times as long to compile as {few}: "
            + ", ".join(f"{form} {times:.1f}" for form, times in grown.items())
        )
    return seconds


def steps(h: Harness, width: int, depth: int, backward: bool, seconds: dict[str, dict[str, float]]) -> None:
    """What a step costs in each form, recording included, and from how many steps on unrolling pays."""
    model, x = Model(depth, width), h.randn(ROWS, width)
    moved = x.to(xla.device())
    what = "forward and backward" if backward else "forward"

    def pure(x: torch.Tensor) -> torch.Tensor:
        return scan_layers(model.layers, x, is_layer_pure=True)

    def timed(fn: Callable, parameters: list) -> Callable:
        def call(_) -> torch.Tensor:
            # Gradients as they come: to stack them is no part of a step. Held until they have been computed.
            held = model.results(fn, parameters, moved, backward, stacked=True)
            xla.settle()
            return held[0]

        return call

    own, host = list(model.layers.parameters()), list(model.host.parameters())
    if backward:
        h.check(
            xla.waited(lambda _: model.results(pure, own, moved, backward)), lambda x: model.reference(x, backward), x,
            what=f"{what}, {depth} layers, {PURE}", terms=3 * width * depth, roundings=depth, poison=False,
        )  # fmt: skip
    variants = {
        "torch eager": lambda x: model.results(lambda x: unrolled(model.host, x), host, x, backward, stacked=True)[0]
    }
    variants |= {name: timed(*way) for name, way in (model.forms() | {PURE: (pure, own)}).items()}
    flops = (3 if backward else 1) * 2 * depth * ROWS * 6 * width * width
    table = h.compare(
        variants, lambda x: model.reference(x, backward)[0], x, baseline="torch eager", beside=2.0,
        title=f"{what} of {depth} layers", case=f"{depth} x {ROWS}x{width} float32",
        work=Work(flops=flops, dtype=torch.float32),
        first_calls={} if backward else dict.fromkeys((UNROLLED, SCANNED, STACKED)),  # compiled before
    )  # fmt: skip
    if not table or not table.rows[0].ms:
        return
    if not all(seconds[form][str(depth)] for form in (UNROLLED, SCANNED, STACKED)):
        h.say(f"{what}: compiled earlier in this process, so there is nothing to pay back")
        return
    rows = {row.variant: row for row in table.rows}
    for form in (SCANNED, STACKED):
        saved, extra = seconds[UNROLLED][str(depth)] - seconds[form][str(depth)], rows[form].ms - rows[UNROLLED].ms
        costs = f"a step {extra:+.2f} ms next to unrolled"
        verdict = "it saves nothing here" if saved <= 0 else "there is no step at which unrolling pays"
        if saved > 0 and rows[form].p20 <= rows[UNROLLED].p80 and rows[UNROLLED].p20 <= rows[form].p80:
            verdict = "less than the times of a step spread, so this run does not say whether unrolling ever pays"
        elif saved > 0 and extra > 0:
            verdict = f"unrolling pays after {1000 * saved / extra:.0f} steps"
        h.say(f"{form}: {saved:.2f} s less to compile, {costs}: {verdict}")


# --- what scan does with layers that are not equal, not pure, or not handed over as a list


class Bounded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.linear(x))


class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.add_(1))


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum().item() > 0 else -x)


class Capturing(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.outside = [torch.ones(width, device=xla.device())]

    def forward(self, x):
        return super().forward(x * self.outside[0].to(x.device, x.dtype))


def hooked(width: int) -> list[nn.Module]:
    layers = [Layer(width), Layer(width)]
    layers[1].register_forward_hook(lambda module, args, out: out * 2)
    return layers


def unequal(width: int) -> dict[str, Callable[[], list[nn.Module]]]:
    """What a user might hand over; each makes new layers on the CPU."""
    return {
        "equal layers": lambda: [Layer(width) for _ in range(3)],
        "another shape": lambda: [nn.Linear(width, width), nn.Linear(width, width + 1)],
        "other parameters": lambda: [Layer(width), nn.Linear(width, width)],
        "another dtype": lambda: [Layer(width), Layer(width).to(torch.bfloat16)],
        "another setting": lambda: [Layer(width), Layer(width, scale=3.0)],
        "another activation": lambda: [nn.Sequential(nn.Linear(width, width), f()) for f in (nn.ReLU, nn.Tanh)],
        "a hook on the second": lambda: hooked(width),
        "a wider output": lambda: [nn.Linear(width, width + 1) for _ in range(2)],
        "batch norm, training": lambda: [Bounded(width) for _ in range(2)],
        "input changed in place": lambda: [InPlace(width, width) for _ in range(2)],
        "a branch on a value": lambda: [Branching(width, width) for _ in range(2)],
        "a tensor from outside": lambda: [Capturing(width) for _ in range(2)],
        "dropout, training": lambda: [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5)) for _ in range(2)],
    }


def outcome(fn: Callable, layers: list[nn.Module], x: torch.Tensor) -> str:
    """What fn(layers, x) does on the XLA device, next to the same layers in float64: right, wrong, or an error."""
    moved = [copy.deepcopy(layer).to(xla.device()) for layer in layers]
    on_xla = x.to(xla.device())
    xla.settle()
    try:
        with torch.no_grad():
            got = fn(moved, on_xla).cpu().double()
    except Exception as error:  # also torch's own, which share no class
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:170]}"
        xla.forget_pending()
        return told
    with torch.no_grad():
        want = unrolled([copy.deepcopy(layer).double() for layer in layers], x.double())
    off = ((got - want).norm() / want.norm()).item()
    return "right" if off < 1e-5 else f"WRONG, no error: off by {off:.0%}" if off >= 0.01 else f"off by {off:.1e}"


def refusals(h: Harness, width: int) -> None:
    """Each kind of layers through scan_layers, and through Stacked."""
    torch.manual_seed(width)
    x = h.randn(4, width)
    told = {}
    for name, make in unequal(width).items():
        layers = make()
        told[name] = {
            "scan_layers": outcome(scan_layers, layers, x),
            "Stacked": outcome(lambda layers, x: Stacked(layers)(x), layers, x),
        }
    layers = unequal(width)["equal layers"]()
    told["a generator"] = {
        "scan_layers": outcome(lambda layers, x: scan_layers((layer for layer in layers), x), layers, x),
        "Stacked": outcome(lambda layers, x: Stacked(layer for layer in layers)(x), layers, x),
    }
    h.fact("layers handed to", told)
    silent = [name for name, row in told.items() if row["scan_layers"].startswith("WRONG")]
    h.say(f"wrong without an error by scan_layers: {', '.join(silent) or 'none'}")


def kept_traces(h: Harness, width: int) -> None:
    """is_layer_pure=True keeps the trace: it does not see another setting, nor that gradients are wanted now."""
    x = h.randn(4, width).to(xla.device())
    told = {}
    layers = [Layer(width).to(xla.device()) for _ in range(2)]
    before = scan_layers(layers, x, is_layer_pure=True).detach().cpu()
    for layer in layers:
        layer.scale = 5.0
    after = scan_layers(layers, x, is_layer_pure=True).detach().cpu()
    want = unrolled(layers, x).detach().cpu()
    told["scale 1, then 5"] = "the old result" if torch.equal(before, after) else f"off by {(after - want).norm():.1g}"
    for name, fn in {
        "scan_layers, pure": lambda layers, x: scan_layers(layers, x, is_layer_pure=True),
        "Stacked": Stacked.__call__,
    }.items():
        layers = [Layer(width).to(xla.device()) for _ in range(2)]
        one = Stacked(layers) if name == "Stacked" else layers
        with torch.no_grad():
            fn(one, x).cpu()
        fn(one, x).sum().backward()
        grads = [p.grad is not None for module in (layers if one is layers else [one]) for p in module.parameters()]
        told[f"{name}: no_grad, then backward"] = f"{sum(grads)} of {len(grads)} gradients"
    h.fact("a trace that is kept", told)
    xla.settle()


def demo(h: Harness) -> None:
    width = h.pick(quick=74, full=134)
    all_depths = h.pick(quick=(2, 4, 8, 16, 32), full=(2, 4, 8, 16, 32, 64))
    trained = h.pick(quick=(2, 32), full=all_depths)
    seconds = [{}, {}]
    if not h.profile:
        seconds = [sweep(h, width, False, all_depths), sweep(h, width, True, trained)]
        refusals(h, width=14)
        kept_traces(h, width=18)
    for backward in (False, True):
        steps(h, width, trained[-1], backward, seconds[backward])


if __name__ == "__main__":
    run(demo)
