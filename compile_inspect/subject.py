"""The model under inspection: loaded from a module or a file, with its inputs, copied for each phase, and timed."""

import ast
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

INPUT = re.compile(r"(?P<shape>(?:\d+(?:x\d+)*)?)(?::(?P<dtype>\w+))?$")
ROUNDS, BUDGET = 15, 1.0  # calls whose median is told, and the seconds that they may take together
in_eager = functools.partial(torch.compiler.set_stance, "force_eager")  # also what the model compiles inside
DEEP = 4  # a model that takes more than this share of the memory, 1/4, is not copied


class SubjectError(ValueError):
    """A model or its inputs cannot be had; the message says what was asked for and what to write."""


@contextmanager
def refused(what: str) -> Iterator[None]:
    """An error within becomes a SubjectError of one sentence, whatever the user's code does, sys.exit() too."""
    try:
        yield
    except SubjectError:
        raise
    except BaseException as error:
        said = str(error).strip().partition("\n")[0]
        raise SubjectError(f"{what} {type(error).__name__}: {said}") from error


def turns(most: int, seconds: float, settle: int = 0) -> Iterator[int]:
    """Turns of a measurement: `settle` that do not count, then `most`, or at least three within `seconds`."""
    for turn in range(settle + most):
        if turn == settle:
            started = time.perf_counter()
        elif turn >= settle + 3 and time.perf_counter() - started > seconds:
            break
        yield turn


class Timed(NamedTuple):
    """Medians: `ms` until the result is there, `host_ms` until the call returns; and `all` the milliseconds."""

    ms: float
    host_ms: float
    all: list[float]


class Subject:
    """A model, or a function, with the arguments to call it with.

    `model` is a function or an nn.Module; `args` and `kwargs` are kept as they are, and each fresh() has copies. A
    module is put into eval mode, and calls run without gradients, unless `train`: then a call is a training step,
    forward and the backward of a weighted sum of its outputs. Raises SubjectError for what torch.compile cannot take.
    """

    def __init__(
        self, model: Callable, args: Iterable = (), kwargs: dict | None = None, name: str = "", train: bool = False
    ) -> None:
        self.model, self.args, self.kwargs, self.train = model, tuple(args), dict(kwargs or {}), train
        self.name = name or getattr(model, "__qualname__", type(model).__name__)
        self.held = parameters(model)  # of the model that fresh() returned last
        tensors = [*tensors_of((self.args, self.kwargs)), *self.held]
        lazy = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        reasons = {
            f"{type(model).__name__} cannot be called; pass a function or a module": not callable(model),
            "the model is compiled already; pass the function or module it was made of":
                hasattr(model, "_torchdynamo_orig_callable") or hasattr(model, "_orig_mod"),
            "torch.compile takes no TorchScript; pass the function or module that it is of":
                isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction),
            "a call of a generator or coroutine runs nothing; pass a function that runs it":
                any(kind(getattr(model, "forward", model)) for kind in lazy),
            "the first call makes some of its parameters; call the model once before it is inspected":
                any(map(nn.parameter.is_lazy, tensors)),
            "tensors on the device meta have no values; move the model with to_empty()":
                any(tensor.is_meta for tensor in tensors),
        }  # fmt: skip
        for reason in (reason for reason, against in reasons.items() if against):
            raise SubjectError(f"inspect: {reason}")
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        self.shared = ""  # why phases share one model, where it is not copied

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def batch(self) -> int | None:
        """Dimension 0 of the first tensor input that has one."""
        leaves = tree_leaves((self.args, self.kwargs))
        return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)

    @property
    def least_batch(self) -> int:
        """The fewest rows it may be called with: a tensor of integers that does not grow with the batch may index it,
        as the edges of a graph do, and on a GPU an index out of bounds ends the process."""
        least = 1
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.numel() and leaf.dim():
                largest = 0 if leaf.dtype == torch.bool or leaf.is_complex() else int(leaf.max())
                least = max(least, largest + 1 if leaf.shape[0] != self.batch and largest < self.batch else 1)
        return least

    def fresh(self) -> tuple[Callable, tuple, dict]:
        """(model, args, kwargs): copies, and nothing that torch.compile has compiled before."""
        torch.compiler.reset()
        model, held = self.model, sum(each.untyped_storage().nbytes() for each in parameters(self.model))
        if held * DEEP > memory_of(self.device):
            self.shared = f"has {held / 2**30:.1f} GiB and is not copied: the phases share it, with its state"
        else:
            try:
                model = copy.deepcopy(model)
            except Exception as error:  # locks, streams, open files
                self.shared = f"cannot be copied ({type(error).__name__}): the phases share it, with its state"
        for module in modules_of(model):
            module.train(self.train)
        self.held = parameters(model)
        return model, *self.resized()

    def resized(self, size: int | None = None, mark: Callable | None = None) -> tuple[tuple, dict]:
        """Copies of (args, kwargs); with `size` rows in tensors that have the batch as dimension 0: mark(tensor, 0)."""
        given = self.batch

        def change(leaf):
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf) if isinstance(leaf, dict | list | set) else leaf
            if not size or not given or not leaf.dim() or leaf.shape[0] != given:
                return leaf.detach().clone().requires_grad_(leaf.requires_grad)
            rows = leaf.detach().index_select(0, torch.arange(size, device=leaf.device) % given)
            rows.requires_grad_(leaf.requires_grad)
            if mark:
                mark(rows, 0)
            return rows

        return tree_map(change, (self.args, self.kwargs))

    def compiled(self, **options) -> Callable[[], object]:
        """One call of the model, compiled from nothing with torch.compile's options."""
        model, args, kwargs = self.fresh()
        return self.caller(torch.compile(model, **options), args, kwargs)

    def call_once(self) -> None:
        """Call the model in eager: an error here is the model's own."""
        self.once(self.caller(*self.fresh()))

    def caller(self, fn: Callable, args: tuple, kwargs: dict) -> Callable[[], object]:
        """One call of fn, as a user makes it: without gradients, or with `train` forward and backward."""
        leaves = [*self.held, *tensors_of((args, kwargs))] if self.train else []

        def call():
            for leaf in leaves:  # as zero_grad() does: a CUDA graph writes over the gradients that it left before
                leaf.grad = None
            with self.grad():
                out = fn(*args, **kwargs)
            if self.train:
                floats = [t for t in tensors_of(out) if t.requires_grad]
                if not floats:
                    raise SubjectError(f"{self.name}: no output has a gradient; leave out --train")
                torch.autograd.backward(floats, [_weights(t.shape, t.dtype, t.device) for t in floats])
            return out

        return call

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """What is not copied, as a module that holds a lock, gets its modes and gradients back at the end."""
        modes = [(module, module.training) for held in modules_of(self.model) for module in held.modules()]
        gradients = [(tensor, tensor.grad) for tensor in parameters(self.model) if tensor.is_leaf]
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for tensor, gradient in gradients:
                tensor.grad = gradient

    def grad(self):
        """The context that a call runs in."""
        return nullcontext() if self.train else torch.no_grad()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[[], object]) -> tuple[float, float, object]:
        """(milliseconds of a call, those until it returns, its result)."""
        self.synchronize()
        started = time.perf_counter()
        out = call()  # held, so that freeing it is not timed
        returned = time.perf_counter()
        self.synchronize()
        return (time.perf_counter() - started) * 1e3, (returned - started) * 1e3, out

    def timed(self, call: Callable[[], object]) -> Timed:
        """Up to three calls to settle, then the median of up to 15; fewer where they take seconds."""
        return self.in_turns({call: nullcontext})[0]

    def in_turns(self, calls: dict[Callable, Callable]) -> list[Timed]:
        """Each call in its context, call by call in turns: what the host does meanwhile meets all of them."""
        found = {call: [] for call in calls}
        for call, around in calls.items():
            with around():
                until = time.perf_counter() + BUDGET
                for _ in range(3):
                    call()
                    if time.perf_counter() > until:  # a first call that compiles settles it, too
                        break
        for _ in turns(ROUNDS, BUDGET * len(calls)):
            for call, around in calls.items():
                with around():
                    found[call].append(self.once(call)[:2])
        columns = (list(zip(*each, strict=True)) for each in found.values())
        return [Timed(median(ms), median(host_ms), list(ms)) for ms, host_ms in columns]

    def profiled(self, call: Callable[[], object]) -> profile:
        """torch's profile of a call, on the CPU and, where the model is there, on the GPU."""
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_gpu
        with profile(activities=kinds, acc_events=True) as seen:
            call()
            self.synchronize()
        return seen


@functools.lru_cache(maxsize=8)
def _weights(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a backward begins with: no constant, as the sum of what a softmax or a norm returns has no gradient."""
    return torch.arange(shape.numel(), dtype=torch.float64).cos().reshape(shape).to(device, dtype)


def modules_of(model: object) -> list[nn.Module]:
    """The module that a model is, or those that a bound method, a functools.partial or a callable object holds."""
    while isinstance(model, functools.partial) or inspect.ismethod(model):
        model = getattr(model, "func", None) or model.__self__
    held = [model] if isinstance(model, nn.Module) else getattr(model, "__dict__", {}).values()
    return [each for each in held if isinstance(each, nn.Module)]


def parameters(model: object) -> list[torch.Tensor]:
    """Parameters and buffers of its modules; of a function, of those that it refers to: they are not copied with it."""
    modules = modules_of(model)
    if inspect.isfunction(model):
        with suppress(ValueError):  # a closure that is not filled yet
            names = inspect.getclosurevars(model)
            modules = [each for each in (names.globals | names.nonlocals).values() if isinstance(each, nn.Module)]
    return [*dict.fromkeys(tensor for each in modules for tensor in [*each.parameters(), *each.buffers()])]


def tensors_of(out: object) -> list[torch.Tensor]:
    """The tensors in what a model returns: nested in tuples, lists, dicts, dataclasses and plain objects."""
    found = []
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | ModuleType | nn.Module):
            found += [value for value in vars(leaf).values() if isinstance(value, torch.Tensor)]
    return found


def memory_of(device: torch.device) -> int:
    """Bytes of the device's memory; where nobody knows, on Windows, 8 GiB."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 * 2**30


# --- from the command line


def load(spec: str) -> object:
    """What `package.module:name`, `file.py:name` or, with one candidate in it, `file.py` names.

    Raises SubjectError where it cannot be imported or is not there, with the names that are.
    """
    where, _, name = (spec, "", "") if spec.endswith(".py") or ":" not in spec else spec.rpartition(":")
    path = Path(where)
    if path.suffix == ".py" and not path.is_file():
        raise SubjectError(f"{where}: there is no such file")
    with refused(f"{where}: importing it raises"):
        if path.suffix == ".py":
            sys.path.insert(0, str(path.resolve().parent))  # it imports its neighbours, as when it is run
            module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(path.stem, path))
            sys.modules[path.stem] = module
            module.__spec__.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
           and getattr(value, "__module__", None) == module.__name__]  # fmt: skip
    name = name or "".join(own[:1] * (len(own) == 1))
    if not name or not hasattr(module, name):
        raise SubjectError(f"{spec}: name one of its own, as {where}:NAME; it has {', '.join(own)}")
    return getattr(module, name)


def make_model(spec: str) -> Callable:
    """The model that `spec` names: a module, a function, or what a class or a factory (no arguments) returns."""
    value = load(spec)
    if not callable(value):
        raise SubjectError(f"{spec}: is {type(value).__name__}; name a function, an nn.Module or a factory")
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):  # it needs arguments
        if isinstance(value, type):
            raise SubjectError(f"{spec}: the class needs arguments; name a function that makes it") from None
        return value
    with refused(f"{spec}: calling it raises"):
        made = value if isinstance(value, nn.Module) else value()
    return made if callable(made) else value


def make_inputs(specs: list[str], source: str | None, model: Callable, device: torch.device) -> tuple[tuple, dict]:
    """(args, kwargs) from `--input` shapes, or from what the function that `--inputs` names returns.

    Integer tensors are random below 100, and below the rows of the smallest embedding. Raises SubjectError.
    """
    if source:
        made = load(source)
        with refused(f"{source}: calling it raises"):
            made = moved(made() if callable(made) else made, device)
        if isinstance(made, dict):
            return (), made
        return tuple(made) if isinstance(made, tuple | list) else (made,), {}
    modules = model.modules() if isinstance(model, nn.Module) else ()
    rows, args = min([100, *(m.num_embeddings for m in modules if isinstance(m, nn.Embedding))]), []
    for spec in specs:
        with refused(f"--input {spec}:"):
            if spec.startswith("python:"):
                args.append(ast.literal_eval(spec.removeprefix("python:")))
                continue
            match = INPUT.match(spec)
            dtype = getattr(torch, match["dtype"] or "float32", None) if match else None
            if not isinstance(dtype, torch.dtype):
                raise SubjectError(f"--input {spec}: write a shape and a dtype, as 8x128:int64, or python:0.5")
            shape = [int(n) for n in match["shape"].split("x") if n]
            if dtype.is_floating_point or dtype.is_complex:
                args.append(torch.randn(shape, device=device).to(dtype))
            else:
                args.append(torch.randint(2 if dtype == torch.bool else rows, shape, device=device).to(dtype))
    return tuple(args), {}


def moved(nested, device: torch.device):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), nested)


def make_subject(spec: str, inputs: list[str], source: str | None, device: str | None, train: bool) -> Subject:
    """The model and inputs of a command line, on `device` (default: the GPU if there is one). Raises SubjectError."""
    from compile_inspect.models import BUNDLED

    found = torch.cuda.is_available()
    if device and device.startswith("cuda") and not found:
        raise SubjectError(f"--device {device}: torch {torch.__version__} finds no GPU; leave it out to use the CPU")
    with refused(f"--device {device}:"):
        on = torch.device(device or ("cuda" if found else "cpu"))
    torch.manual_seed(0)
    model, args = BUNDLED[spec]() if spec in BUNDLED else (make_model(spec), ())
    with refused(f"{spec}: cannot be moved to {on}:"):
        model = model.to(on) if isinstance(model, nn.Module) else model
        args, kwargs = make_inputs(inputs, source, model, on) if inputs or source else (moved(args, on), {})
    subject = Subject(model, args, kwargs, spec, train)
    subject.device = on
    return subject
