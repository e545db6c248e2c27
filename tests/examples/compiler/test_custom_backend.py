"""A custom backend: what each stage sees, and the one kernel against eager."""

import pytest
import torch
import torch.nn.functional as F

from examples.compiler import custom_backend
from examples.compiler.custom_backend import KERNELS, SEEN, STAGES, epilogue, stage
from tests.quiet import ran


def test_demo():
    h = ran(custom_backend.demo)
    rows = h.record.facts["what each backend sees and writes"]
    assert [rows[name]["operations"] for name in ("three lines", "AOTAutograd", "decompositions")] == [3, 3, 7]
    assert rows["one kernel"]["kernels written"] == rows["a compiler"]["kernels written"] == 1
    assert len(h.record.checks) == len(STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_right_in_training_too(name, h):
    x, residual = h.randn(5, 7), h.randn(5, 7)
    x.requires_grad_()
    (want,) = torch.autograd.grad(epilogue(x, residual).square().sum(), x)
    (got,) = torch.autograd.grad(stage(name)(x, residual).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if name == "AOTAutograd":
        assert len(SEEN) == 2, "a forward graph and a backward graph"


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sum(0) + x, lambda x: F.relu(x.t()), lambda x: x.half() + 1, lambda x: x[:, :2] * 2,
        lambda x: x.max(1).values + 1, lambda x: F.layer_norm(x, (4,)),  # operations with several results
    ],
)  # fmt: skip
def test_what_one_kernel_cannot_express_runs_as_it_is(fn, h):
    x = h.randn(4, 4)
    torch.testing.assert_close(stage("one kernel", fn)(x), fn(x))
    assert not KERNELS


def test_a_second_size_is_symbolic_and_runs_as_it_is(h):
    fn = stage("one kernel")
    for shape in ((5, 7), (6, 8)):
        x, residual = h.randn(*shape), h.randn(*shape)
        torch.testing.assert_close(fn(x, residual), epilogue(x, residual), rtol=1e-5, atol=1e-6)
    assert len(KERNELS) == 1


def test_relu_keeps_a_nan(h):
    x = h.randn(4, 4)
    x[0, :2] = torch.tensor([float("nan"), -float("inf")])
    torch.testing.assert_close(stage("one kernel", F.relu)(x), F.relu(x), equal_nan=True)
    assert len(KERNELS) == 1
