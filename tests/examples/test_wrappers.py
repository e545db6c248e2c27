"""Every public wrapper: what it cannot compute is refused by name, before a kernel reads a byte of it."""

import ast
import re

from harness.catalog import ROOT

import pytest
import torch

from tests.examples.wrappers import WRAPPERS, Wrapper

REFUSALS = (TypeError, ValueError, RuntimeError)
ELSEWHERE = {  # Gluon kernels are not interpreted, checks are no wrappers, and a recipe's layer calls several of them
    "gluon_matmul", "gluon_matmul_one_buffer", "gluon_matmul_ring", "blackwell_matmul", "blackwell_mx_matmul",
    "check_operands", "check_layer", "check_copy", "multiply",
}  # fmt: skip


def test_every_function_that_says_what_it_raises_is_here():
    public = {
        node.name
        for topic in ("triton", "fp8", "tma")
        for path in (ROOT / "examples" / topic).glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if re.search(r"\bRaises\b|errors as", ast.get_docstring(node) or "")
    }
    assert public - ELSEWHERE - {wrapper.fn.__name__ for wrapper in WRAPPERS} == set()


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
        result = wrapper.fn(*arguments[:i], other, *arguments[i + 1 :])
        return False, result() if callable(result) else result  # prepare_matmul's
    except REFUSALS as error:
        named = re.match(rf"{wrapper.says}\w*: ", str(error))
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
