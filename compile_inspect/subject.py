"""The model under inspection: loaded from a module or a file, with its inputs, and copied for each phase."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

INPUT = re.compile(r"(?P<shape>(?:\d+(?:x\d+)*)?)(?::(?P<dtype>\w+))?$")
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


class Subject:
    """A model, or a function, with the arguments to call it with.

    `model` is a function or an nn.Module; `args` and `kwargs` are kept as they are, and each fresh() has copies. A
    module is put into eval mode, and calls run without gradients, unless `train`: then a call is a training step,
    forward and the backward of a weighted sum of its outputs.
    """

    def __init__(
        self, model: Callable, args: Iterable = (), kwargs: dict | None = None, name: str = "", train: bool = False
    ) -> None:
        if not callable(model):
            raise SubjectError(f"inspect: {type(model).__name__} cannot be called; pass a function or a module")
        if hasattr(model, "_torchdynamo_orig_callable") or hasattr(model, "_orig_mod"):
            raise SubjectError("inspect: the model is compiled already; pass the function or module it was made of")
        if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
            raise SubjectError("inspect: torch.compile takes no TorchScript; pass the function or module that it is of")
        lazy = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(kind(getattr(model, "forward", model)) for kind in lazy):
            raise SubjectError("inspect: a call of a generator or coroutine runs nothing; pass a function that runs it")
        self.args, self.kwargs, self.train = tuple(args), dict(kwargs or {}), train
        self.model = _initialized(model, self.args, self.kwargs)
        self.name = name or getattr(model, "__qualname__", type(model).__name__)
        self.held = parameters(self.model)  # of the model that fresh() returned last
        tensors = [*tensors_of((self.args, self.kwargs)), *self.held]
        if any(tensor.is_meta for tensor in tensors):
            raise SubjectError("inspect: tensors on the device meta have no values; move the model with to_empty()")
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        self.shared = ""  # why phases share one model, where it is not copied

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def fresh(self) -> tuple[Callable, tuple, dict]:
        """(model, args, kwargs): copies, and nothing that torch.compile has compiled before."""
        torch.compiler.reset()
        model = self._copied(self.model)
        for module in modules_of(model):
            module.train(self.train)
        self.held = parameters(model)
        args, kwargs = tree_map(_clone, (self.args, self.kwargs))
        return model, args, kwargs

    def _copied(self, model: Callable) -> Callable:
        held = sum(each.untyped_storage().nbytes() for each in parameters(model))
        if held * DEEP > memory_of(self.device):
            self.shared = f"has {held / 2**30:.1f} GiB and is not copied: the phases share it, with its state"
            return model
        try:
            return copy.deepcopy(model)
        except Exception as error:  # locks, streams, open files
            self.shared = f"cannot be copied ({type(error).__name__}): the phases share it, with its state"
            return model

    def compiled(self, **options) -> Callable[[], object]:
        """One call of the model, compiled from nothing with torch.compile's options."""
        model, args, kwargs = self.fresh()
        return self.caller(torch.compile(model, **options), args, kwargs)

    def caller(self, fn: Callable, args: tuple, kwargs: dict) -> Callable[[], object]:
        """One call of fn, as a user makes it: without gradients, or with `train` forward and backward."""

        def forward():
            with torch.no_grad():
                return fn(*args, **kwargs)

        leaves = [*self.held, *tensors_of((args, kwargs))]

        def step():
            for leaf in leaves:  # as zero_grad() does: a CUDA graph writes over the gradients that it left before
                leaf.grad = None
            out = fn(*args, **kwargs)
            floats = [t for t in tensors_of(out) if t.requires_grad]
            if not floats:
                raise SubjectError(f"{self.name}: no output has a gradient; leave out --train")
            torch.autograd.backward(floats, [_weights(t.shape, t.dtype, t.device) for t in floats])
            return out

        return step if self.train else forward

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


@functools.lru_cache(maxsize=8)
def _weights(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a backward begins with: no constant, as the sum of what a softmax or a norm returns has no gradient."""
    numbers = torch.arange(shape.numel(), dtype=torch.float64)
    return torch.cos(numbers).reshape(shape).to(device, dtype)


def _initialized(model: Callable, args: tuple, kwargs: dict) -> Callable:
    """The model; one that makes parameters at its first call, as nn.LazyLinear does: a copy that was called."""
    if any(map(torch.nn.parameter.is_lazy, parameters(model))):
        model = copy.deepcopy(model)
        with torch.no_grad():
            model(*args, **kwargs)
    return model


def _clone(leaf):
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(leaf) if isinstance(leaf, dict | list | set) else leaf


def modules_of(model: object) -> list[nn.Module]:
    """The module that a model is, or those that a bound method, a functools.partial or a callable object holds."""
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, functools.partial):
        return modules_of(model.func)
    if inspect.ismethod(model):
        return [model.__self__] if isinstance(model.__self__, nn.Module) else modules_of(model.__self__)
    held = [] if inspect.isroutine(model) else getattr(model, "__dict__", {}).values()
    return [each for each in held if isinstance(each, nn.Module)]


def parameters(model: object) -> list[torch.Tensor]:
    """Parameters and buffers of its modules; of a function, of those that it refers to: they are not copied with it."""
    modules = modules_of(model)
    if inspect.isfunction(model):
        with suppress(ValueError):  # a closure that is not filled yet
            names = inspect.getclosurevars(model)
            held = [*names.nonlocals.values(), *names.globals.values()]
            modules = [each for each in held if isinstance(each, nn.Module)]
    tensors = (tensor for module in modules for tensor in [*module.parameters(), *module.buffers()])
    return [*dict.fromkeys(tensors)]


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


def batch_of(subject: Subject) -> int | None:
    """Dimension 0 of the first tensor input that has one."""
    leaves = tree_leaves((subject.args, subject.kwargs))
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)


def resized(subject: Subject, size: int | None, mark: Callable | None = None) -> tuple[tuple, dict]:
    """Copies of (args, kwargs) with `size` rows in the tensors that have the batch as dimension 0: mark(tensor, 0)."""
    given = batch_of(subject)

    def change(leaf):
        if not given or not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != given:
            return _clone(leaf)
        rows = leaf.detach().index_select(0, torch.arange(size, device=leaf.device) % given)
        rows.requires_grad_(leaf.requires_grad)
        if mark:
            mark(rows, 0)
        return rows

    return tree_map(change, (subject.args, subject.kwargs))


# --- from the command line


def load(spec: str) -> object:
    """What `package.module:name`, `file.py:name` or, with one candidate in it, `file.py` names.

    Raises SubjectError where it cannot be imported or is not there, with the names that are.
    """
    where, _, name = (spec, "", "") if spec.endswith(".py") or ":" not in spec else spec.rpartition(":")
    module = _imported(where)
    callables = [
        key for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]  # fmt: skip
    has = ", ".join(callables) or "nothing callable"
    if not name:
        if len(callables) != 1:
            raise SubjectError(f"{spec}: name one of {has}, as {where}:NAME")
        name = callables[0]
    if not hasattr(module, name):
        raise SubjectError(f"{spec}: {where} has no {name}; it has {has}")
    return getattr(module, name)


def _imported(where: str) -> ModuleType:
    path = Path(where)
    if path.suffix == ".py" and not path.is_file():
        raise SubjectError(f"{where}: there is no such file")
    with refused(f"{where}: importing it raises"):
        if not path.is_file():
            return importlib.import_module(where)
        sys.path.insert(0, str(path.resolve().parent))  # it imports its neighbours, as when it is run
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(path.stem, path))
        sys.modules[path.stem] = module
        module.__spec__.loader.exec_module(module)
        return module


def called_without_arguments(value: Callable) -> bool:
    """Whether it can be called without any: a factory, or a class."""
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):
        return False
    return True


def make_model(spec: str) -> Callable:
    """The model that `spec` names: a module, a function, or what a class or a factory (no arguments) returns."""
    value = load(spec)
    if not callable(value):
        raise SubjectError(f"{spec}: is {type(value).__name__}; name a function, an nn.Module or a factory")
    if isinstance(value, nn.Module) or not called_without_arguments(value):
        if isinstance(value, type):
            raise SubjectError(f"{spec}: the class needs arguments; name a function without any that makes it")
        return value
    with refused(f"{spec}: calling it raises"):
        made = value()
    return made if callable(made) else value


def make_inputs(specs: list[str], source: str | None, model: Callable, device: torch.device) -> tuple[tuple, dict]:
    """(args, kwargs) from `--input` shapes, or from what the function that `--inputs` names returns.

    Integer tensors are random below 100, and below the rows of the smallest embedding. Raises SubjectError.
    """
    if source:
        made = load(source)
        with refused(f"{source}: calling it raises"):
            made = made() if callable(made) else made
        args = () if isinstance(made, dict) else tuple(made) if isinstance(made, tuple | list) else (made,)
        return moved((args, made if isinstance(made, dict) else {}), device)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    rows = min([100, *(m.num_embeddings for m in modules if isinstance(m, nn.Embedding))])
    return tuple(_input(spec, rows, device) for spec in specs), {}


def moved(nested, device: torch.device):
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, nested)


def _input(spec: str, high: int, device: torch.device) -> object:
    with refused(f"--input {spec}:"):
        if spec.startswith("python:"):
            return ast.literal_eval(spec.removeprefix("python:"))
        match = INPUT.match(spec)
        dtype = getattr(torch, match["dtype"] or "float32", None) if match else None
        if not isinstance(dtype, torch.dtype):
            raise SubjectError(f"--input {spec}: write a shape and a dtype, as 8x128:int64, or python:0.5 for a number")
        shape = [int(n) for n in match["shape"].split("x") if n]
        if dtype == torch.bool:
            return torch.rand(shape, device=device) < 0.5
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, device=device).to(dtype)
        return torch.randint(0, high, shape, dtype=dtype, device=device)


def make_subject(spec: str, inputs: list[str], source: str | None, device: str | None, train: bool) -> Subject:
    """The model and inputs of a command line, on `device` (default: the GPU if there is one). Raises SubjectError."""
    from compile_inspect.models import BUNDLED

    if device and device.startswith("cuda") and not torch.cuda.is_available():
        raise SubjectError(f"--device {device}: torch {torch.__version__} finds no GPU; leave it out to use the CPU")
    with refused(f"--device {device}:"):
        on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(0)
    model, args = BUNDLED[spec]() if spec in BUNDLED else (make_model(spec), ())
    with refused(f"{spec}: cannot be moved to {on}:"):
        model = model.to(on) if isinstance(model, nn.Module) else model
        args, kwargs = make_inputs(inputs, source, model, on) if inputs or source else (moved(args, on), {})
    subject = Subject(model, args, kwargs, spec, train)
    subject.device = on
    return subject
