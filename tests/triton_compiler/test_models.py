"""Whole models, forward and training step: outputs and gradients within the budget of a float64 run, no break added."""

import copy

import pytest
import torch

from tests.triton_compiler.foreign import of_libraries
from tests.triton_compiler.helpers import DEVICE, wide
from triton_compiler import recording, triton_compiler
from triton_compiler.models import models

OWN, FOREIGN = models(False), of_libraries()
FALLBACKS = {
    "aten.max_pool2d_with_indices.default", "aten.max_pool2d_with_indices_backward.default", "aten.topk.default",
    "aten.index_put.default", "aten.cumsum.default",
}  # fmt: skip


@pytest.fixture(autouse=True)
def whole_float32():
    """Else cuDNN may take TF32 for one memory format and not for the other: eager's error would be no measure."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def step(model, inputs):
    out = model(*inputs)
    out.float().square().mean().backward()
    return [out.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def train_and_check(make, dtype):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = make()
    model = model.to(DEVICE, dtype)
    inputs = tuple(each.to(DEVICE, dtype if each.is_floating_point() else None) for each in inputs)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    with recording() as seen:
        mine = step(triton_compiler(model, fullgraph=True), inputs)
    theirs, true = step(eager, inputs), step(exact, [wide(each) for each in inputs])
    names = ["output", *(name for name, each in model.named_parameters() if each.grad is not None)]
    scale = max(float(each.abs().max()) for each in true[1:])
    for name, a, b, c in zip(names, mine, theirs, true, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)), name
        own, eagers = (float((each.double() - c).square().mean().sqrt()) for each in (a, b))  # rms
        least = float(c.abs().max()) if name == "output" else scale
        assert own <= 4 * eagers + 4 * torch.finfo(dtype).eps * least, f"{name}: error {own:.3g}, eager's {eagers:.3g}"
    assert [graph.kind for graph in seen.graphs] == ["forward", "backward"]
    left = {name for graph in seen.graphs for name in graph.lowered.fallbacks}
    assert left <= FALLBACKS, {name: why for graph in seen.graphs for name, why in graph.lowered.reasons.items()}


@pytest.mark.parametrize("name", OWN)
def test_a_model_trains(name):
    train_and_check(OWN[name], torch.float32)


@pytest.mark.parametrize("name", ["ResNet", "U-Net"])
def test_convolutions_with_channels_last(name, monkeypatch):
    from triton_compiler import capture

    monkeypatch.setattr(capture, "CHANNELS_LAST", True)
    train_and_check(OWN[name], torch.float32)


@pytest.mark.parametrize("name", ["MLP", "GPT", "Llama", "LSTM"])
def test_a_model_trains_in_half_precision(name):
    train_and_check(OWN[name], torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", FOREIGN or [pytest.param("none", marks=pytest.mark.skip(reason="no transformers, timm, torchvision"))]
)
def test_a_model_that_nobody_here_wrote(name):
    train_and_check(FOREIGN[name], torch.float32)


def test_inference_and_a_second_call():
    model, inputs = OWN["MLP"]()
    fast = triton_compiler(model.eval().to(DEVICE))
    inputs = [each.to(DEVICE) for each in inputs]
    with torch.no_grad():
        for scale in (1, 2):
            torch.testing.assert_close(fast(inputs[0] * scale), model(inputs[0] * scale))


def test_an_optimizer_step_is_compiled():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, device=DEVICE)
    other = copy.deepcopy(model)
    for each, compiled in ((model, True), (other, False)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, foreach=True)
        run = torch.compile(optimizer.step, backend="triton_compiler") if compiled else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            each(torch.ones(4, 8, device=DEVICE)).square().sum().backward()
            run()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
