"""Every public wrapper: what it cannot compute is refused by name, before a kernel reads a byte of it; and wherever a
caller may be (in torch.compile, a CUDA graph, on a stream, in inference mode, on another device) it is right."""

import ast
import re

from harness.catalog import ROOT
from harness.hardware import interpreted

import pytest
import torch

from examples.tma.tma_persistent_matmul import prepare_matmul
from tests.examples.wrappers import OTHERS, WRAPPERS, Wrapper

REFUSALS = (TypeError, ValueError, RuntimeError)
# Checks; what launches for others; a recipe's layer, which calls several wrappers; what prepares weights, in torch.
NO_WRAPPERS = {"quantize_weight", "check_operands", "check_layer", "check_copy", "elementwise", "losses", "multiply",
               "prepare", "total_of"}  # fmt: skip
ATOMIC = ("total",)  # sums in any order
# torch.compile searches for a tile anew, and adds up losses or gradients of rows in an order of its own.
COMPILED_ANEW = ("matmul", "cross_entropy", "rms_norm_backward_loop", "rms_norm_backward_split")


def launches(node: ast.FunctionDef) -> bool:
    """Whether it calls kernel[grid](...), or an operator's wrapper around that."""
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(isinstance(fn, ast.Subscript) or getattr(fn, "id", "") in ("_launch", "_matmul") for fn in calls)


def test_every_function_that_launches_a_kernel_or_says_what_it_raises_is_here():
    public = {
        node.name
        for topic in ("triton", "fp8", "tma")
        for path in (ROOT / "examples" / topic).glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(("_", "launch"))
        if launches(node) or re.search(r"\bRaises\b|errors as", ast.get_docstring(node) or "")
    }
    assert public - NO_WRAPPERS - set(map(str, WRAPPERS + OTHERS)) == set()


def changed(wrapper: Wrapper, arguments: tuple):
    """(what, index of the argument, what takes its place) of each bad operand."""
    tensors = [i for i, each in enumerate(arguments) if isinstance(each, torch.Tensor)]
    words = wrapper.dims.split()
    assert [arguments[i].ndim for i in tensors] == [len(word) for word in words], "dims has other ranks"
    letters = "".join(words)
    for i, word in zip(tensors, words, strict=True):
        x = arguments[i]
        yield "list", i, x.tolist() if x.dtype.itemsize > 1 else [1.0]
        yield "None" if len(words) == 1 or i == 0 else "optional", i, None
        yield "sparse", i, x.float().to_sparse() if x.dtype.itemsize == 1 else x.to_sparse()
        yield "rank", i, x[None]
        yield "int32", i, torch.zeros(x.shape, dtype=torch.int32, device=x.device)
        yield "float64", i, x.double()
        if x.dtype.is_floating_point:
            yield "grad", i, x.detach().clone().requires_grad_()
        if x.dtype in (torch.float32, torch.float16):
            yield "lazily negated", i, torch._neg_view(x)
        if len(tensors) > 1:
            yield "meta", i, x.to("meta")
        for dim, letter in enumerate(word):
            if letter.islower() or (letter.isupper() and letters.count(letter) > 1):
                yield f"shorter in dimension {dim}", i, x.narrow(dim, 0, x.shape[dim] - 1)


def outcome(wrapper: Wrapper, arguments: tuple, i: int, other):
    """With `other` for argument i: (refused, what is wrong with how, or None), or (False, the result)."""
    try:
        return False, wrapper(*arguments[:i], other, *arguments[i + 1 :])
    except REFUSALS as error:
        named = re.match(rf"(\w+::)?{wrapper.says}\w*: ", str(error))
        return True, None if named else f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=str)
def test_a_bad_operand_is_refused_by_name(h, wrapper):
    arguments = wrapper.arguments(h)
    wrong = []
    for what, i, bad in changed(wrapper, arguments):
        if what not in wrapper.takes:
            refused, complaint = outcome(wrapper, arguments, i, bad)
            if complaint if refused else what != "optional":
                wrong.append(f"argument {i}, {what}: {complaint if refused else 'taken'}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=str)
def test_a_device_that_cannot_run_it_is_refused(h, wrapper):
    elsewhere = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in wrapper.arguments(h)]
    with pytest.raises(RuntimeError, match=rf"^{wrapper.says}\w*: .* on meta"):
        wrapper.fn(*elsewhere)


def same(got, want) -> bool:
    if want is None:
        return got is None
    if isinstance(want, (tuple, list)):
        return all(same(*pair) for pair in zip(got, want, strict=True))
    as_bytes = [x.contiguous().view(torch.uint8) for x in (got, want)] if want.dtype.itemsize == 1 else [got, want]
    return torch.equal(*as_bytes)


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=str)
def test_elements_apart_in_memory_are_refused_or_read_right(h, wrapper):
    """Each operand as every other element of a wider one, or as one row for all."""
    arguments = wrapper.arguments(h)
    wrong = []
    for i, x in enumerate(arguments):
        if not isinstance(x, torch.Tensor) or x.ndim == 0 or x.numel() < 2:
            continue
        codes = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
        apart = torch.stack([codes, codes], -1).flatten(-2)[..., ::2].view(x.dtype)
        for what, other in (("apart", apart), ("one for all", x[:1].expand(x.shape))):
            refused, got = outcome(wrapper, arguments, i, other)
            if not refused and not same(got, outcome(wrapper, arguments, i, other.contiguous())[1]):
                wrong.append(f"argument {i}, {what}: another result")
            elif refused and got:
                wrong.append(f"argument {i}, {what}: {got}")
    assert not wrong, "\n".join(wrong)


# Where a caller may be. Each context gets two sets of arguments of the same sizes, what the wrapper returns for them
# when it is called plainly, and yields what it returns there beside what it should.


def in_inference_mode(wrapper, one, two, want_one, want_two):
    with torch.inference_mode():
        yield wrapper(*one), want_one


def compiled(wrapper, one, two, want_one, want_two):
    """Twice, then with fewer rows, for which torch.compile makes sizes symbolic. One graph, where it can be one."""
    torch.compiler.reset()
    fn = wrapper.fn if wrapper.fn is not prepare_matmul else lambda *args: prepare_matmul(*args)()
    if not interpreted():
        options = {"fullgraph": fn is wrapper.fn and not hasattr(fn, "untraced")}
    elif "traced" in str(wrapper):
        pytest.skip("to trace a triton_op is to compile its kernel")
    else:
        options = {"backend": "eager"}  # launches stay the interpreter's
    fn = torch.compile(fn, **options)
    yield fn(*one), want_one
    yield fn(*two), want_two
    if not interpreted() and (fewer := with_fewer_rows(wrapper, two)):
        yield fn(*fewer[0]), fewer[1]


def in_a_cuda_graph(wrapper, one, two, want_one, want_two):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = wrapper(*one)
    graph.replay()
    yield got, want_one
    overwrite(one, two)
    graph.replay()
    yield got, want_two


def on_a_side_stream(wrapper, one, two, want_one, want_two):
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # what did not wait for this would read the first values
        overwrite(one, two)
        got = wrapper(*one)
        torch.cuda.current_stream().synchronize()
    yield got, want_two


def on_another_device(wrapper, one, two, want_one, want_two):
    """Refused by name where it is not the current device, or right; right where it is."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    there = [moved(x, "cuda:1") if isinstance(x, torch.Tensor) else x for x in one]
    try:
        got = wrapper(*there)
    except RuntimeError as error:
        refusal = str(error)
        assert re.match(rf"(\w+::)?{wrapper.says}\w*: .*cuda:1", refusal), refusal
    else:
        yield here(got), want_one
    with torch.cuda.device(1):
        yield here(wrapper(*there)), want_one


def moved(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def here(result):
    if isinstance(result, (tuple, list)):
        return [here(each) for each in result]
    return None if result is None else result.to("cuda:0")


def overwrite(these, those) -> None:
    for x, y in zip(these, those, strict=True):
        if isinstance(x, torch.Tensor):
            x.copy_(y)


def with_fewer_rows(wrapper, arguments):
    """(arguments one shorter in a dimension, what they give plainly) for a dimension where that is allowed, or None."""
    words, tensors = wrapper.dims.split(), [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)]
    for letter in filter(str.isupper, dict.fromkeys(words[0])):
        shorter = list(arguments)
        for i, word in zip(tensors, words, strict=True):
            for dim in (dim for dim, each in enumerate(word) if each == letter):
                shorter[i] = shorter[i].narrow(dim, 0, max(0, shorter[i].shape[dim] - 1))
        try:
            return shorter, wrapper(*shorter)
        except REFUSALS:
            continue
    return None


def close(got, want) -> bool:
    if isinstance(want, tuple):  # a gradient of rows, which is no sum over them, and one of the weight
        return same(got[:-1], want[:-1]) and close(got[-1], want[-1])
    return torch.allclose(got.float(), want.float(), rtol=max(torch.finfo(want.dtype).eps, 1e-5), atol=1e-3)


CONTEXTS = [in_inference_mode, compiled]
ON_GPUS = [in_a_cuda_graph, on_a_side_stream, on_another_device]


@pytest.mark.parametrize("context", [*CONTEXTS, *(pytest.param(each, marks=pytest.mark.gpu) for each in ON_GPUS)])
@pytest.mark.parametrize("wrapper", WRAPPERS + OTHERS, ids=str)
def test_it_is_right_wherever_it_is_called(h, wrapper, context):
    one, two = wrapper.arguments(h), wrapper.arguments(h)
    try:
        wants = wrapper(*one), wrapper(*two)
    except RuntimeError as error:
        pytest.skip(str(error))
    in_any_order = str(wrapper) in ATOMIC + (COMPILED_ANEW if context is compiled else ())
    for i, (got, want) in enumerate(context(wrapper, one, two, *wants)):
        assert (close if in_any_order and not interpreted() else same)(got, want), f"call {i} gives another result"


DIFFERENTIABLE = (
    "layer_norm", "rms_norm", "cross_entropy", "dropout", "flash_attention", "silu_mul_opaque", "silu_mul_traced"
)  # fmt: skip


@pytest.mark.parametrize("wrapper", [each for each in WRAPPERS + OTHERS if str(each) in DIFFERENTIABLE], ids=str)
def test_its_gradients_are_right_when_it_is_compiled(h, wrapper):
    if interpreted() and "traced" in str(wrapper):
        pytest.skip("to trace a triton_op is to compile its kernel")

    def step(fn):
        arguments = [x.detach().requires_grad_() if has_gradient(x) else x for x in operands]
        y = fn(*arguments)
        dy = torch.linspace(-1, 1, y.numel()).to(y).view(y.shape)
        return y, *torch.autograd.grad(y, [x for x in arguments if has_gradient(x)], dy)

    def has_gradient(x) -> bool:
        return isinstance(x, torch.Tensor) and x.is_floating_point()

    operands = wrapper.arguments(h)
    torch.compiler.reset()
    fn = torch.compile(wrapper.fn, backend="aot_eager" if interpreted() else "inductor")  # a break, where it wants one
    want = step(wrapper.fn)
    assert all(close(*pair) for _ in range(2) for pair in zip(step(fn), want, strict=True))
