"""custom_ops: what the demo finds of each way, the operators against float64, bad input."""

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings, settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.compiler import custom_ops
from examples.compiler.custom_ops import compiled_graphs, decisions, demo, one_graph, own, ways
from examples.compiler.custom_ops_isotonic import (
    DTYPES,
    gradient,
    gradient_reference,
    isotonic,
    isotonic_into,
    isotonic_with_blocks,
    pool,
    pooled,
    reference,
)  # fmt: skip

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
WAYS = ("untouched", "allow_in_graph", "nonstrict_trace", "disable", "custom_op")


def harness(**options) -> Harness:
    return Harness("custom_ops", Needs.parse("torch"), console=Console(quiet=True), **options)


@pytest.fixture
def h() -> Harness:
    return harness()


@pytest.fixture(autouse=True)
def state_as_found():
    before, factor = settings(), custom_ops.FACTOR[0]
    yield
    torch.compiler.reset()
    assert settings() == before
    assert custom_ops.FACTOR[0] == factor


@pytest.fixture(scope="module")
def record():
    h = harness(timing=False)
    with settings_kept("custom_ops", 0):
        demo(h)
    return h.record


# --- what the demo finds


def test_five_ways(record):
    found = record.facts["the same function, five ways"]
    assert tuple(found) == WAYS
    assert {name: found[name]["graph"] for name in WAYS} == {
        "untouched": "add | sin | mul | mul",
        "allow_in_graph": "add sin mul mul",
        "nonstrict_trace": "add sin mul mul",
        "disable": "add | mul",
        "custom_op": "add wave mul",
    }
    for name, answers in found.items():
        assert answers["gradient"] == "right"
        seen_through = name in ("allow_in_graph", "nonstrict_trace")
        assert answers["runs at a call"] == (0 if seen_through else 1)
        assert answers["sees a setting changed later"] == ("no" if seen_through else "yes")
        assert (answers["one graph"] == "yes") == (name in ("allow_in_graph", "nonstrict_trace", "custom_op"))
        assert (answers["breaks"] > 0) == (name in ("untouched", "disable"))
        assert (answers["one graph if it reads data"] == "yes") == (name == "custom_op")
        assert (answers["one graph with an object"] == "yes") == (name in ("untouched", "nonstrict_trace"))


def test_the_decisions_follow(record):
    assert decisions(record.facts["the same function, five ways"]) == {
        "the compiler sees its operations": "allow_in_graph, nonstrict_trace",
        "its Python runs at every call": "untouched, disable, custom_op",
        "... and the graph stays whole": "custom_op",
        "it reads data, and the graph stays whole": "custom_op",
        "it takes an object, and the graph stays whole": "untouched, nonstrict_trace",
    }


def test_every_way_is_right(record):
    (table,) = record.tables
    assert [row["variant"] for row in table["rows"]] == ["torch eager", *(f"torch {name}" for name in WAYS)]


def test_profiling_calls_and_records_nothing():
    h = harness(profile=True)
    demo(h)
    assert not h.record.facts
    assert not h.record.checks


# --- the operators


def layer(fit):
    return lambda x: fit(x * 2) + 1


def layer_reference(x):
    return reference(x.double() * 2) + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (0,), (3, 0), (0, 4), (2, 1), (3, 4, 17), (2, 300)])
def test_shapes_and_dtypes(h, shape, dtype):
    x = h.randn(*shape).to(dtype)
    h.check(isotonic, reference, x, what=f"{shape} {dtype}", roundings=8)
    out = torch.full_like(x, float("nan"))
    isotonic_into(x, out)
    assert torch.equal(out, isotonic(x))


@given(
    rows=st.lists(
        st.lists(st.floats(-100, 100, width=16), min_size=6, max_size=6), min_size=1, max_size=4
    )
)  # fmt: skip
def test_any_row_becomes_the_nearest_that_does_not_fall(rows):
    x = torch.tensor(rows, dtype=torch.float64)
    fit, blocks = isotonic_with_blocks(x)
    assert (fit.diff() >= 0).all()
    torch.testing.assert_close(fit, reference(x))
    torch.testing.assert_close(fit.sum(-1), x.sum(-1))
    torch.testing.assert_close(isotonic(fit), fit)
    assert set(blocks.diff().flatten().tolist()) <= {0, 1}


def test_rows_that_need_nothing_and_rows_that_are_one_block():
    assert pool([1.0, 2.0, 3.0]) == ([1.0, 2.0, 3.0], [0, 1, 2])
    assert pool([3.0, 2.0, 1.0]) == ([2.0, 2.0, 2.0], [0, 0, 0])
    assert pool([1.0, 1.0]) == ([1.0, 1.0], [0, 0])
    assert pool([]) == ([], [])
    nan = isotonic(torch.tensor([2.0, float("nan"), 1.0, 0.0]))
    assert nan[1].isnan()
    assert nan[[0, 2, 3]].tolist() == [2.0, 0.5, 0.5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(h, dtype):
    for shape in ((1,), (3, 0), (3, 4, 17), (2, 300)):
        x, grad = h.randn(*shape).to(dtype), h.randn(*shape).to(dtype)
        h.check(gradient(isotonic), gradient_reference, x, grad, what=f"{shape} {dtype}", terms=shape[-1], roundings=4)


def test_the_gradient_follows_blocks_not_equal_values(h):
    """Two blocks whose means round to one number stay two: bfloat16 makes many of those."""
    x = torch.tensor([1.0, 1.0 + 2**-12], dtype=torch.float64)
    grad = torch.tensor([3.0, 5.0], dtype=torch.float64)
    assert gradient(isotonic)(x, grad).tolist() == [3.0, 5.0]
    values = torch.linspace(1, 1.001, 50, device=h.device).bfloat16()
    fit, blocks = isotonic_with_blocks(values)
    assert len(fit.unique()) == blocks.max() + 1  # here equal inputs are one block


def test_gradcheck_and_opcheck():
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(isotonic, (x,))
    assert torch.autograd.gradgradcheck(isotonic, (x,))
    for case in (x, x.detach().t(), torch.randn(2, 0), torch.randn(5).bfloat16()):
        assert set(torch.library.opcheck(isotonic_with_blocks, (case,)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(h, backend):
    x, grad = h.randn(5, 37), h.randn(5, 37)
    fn = h.compiled(layer(isotonic), backend=backend, fullgraph=True)
    h.check(fn, layer_reference, x.t().contiguous().t(), what=backend, roundings=8)
    fn = gradient(h.compiled(isotonic, backend=backend, fullgraph=True))
    h.check(fn, gradient_reference, x, grad, what=backend, poison=False, terms=37)


# --- bad input


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (
            torch.ones(3, dtype=torch.int64),
            TypeError,
            r"isotonic: dtypes \[torch\.int64\]; all must be the same one of",
        ),
        (torch.ones(3, dtype=torch.complex64), TypeError, r"isotonic: dtypes \[torch\.complex64\]"),
        (torch.tensor(1.0), ValueError, r"isotonic: shapes \[\(\)\]; all must be the same \[\.\.\., n\]"),
    ],
)
def test_bad_input(h, x, error, message):
    with pytest.raises(error, match=message):
        isotonic(x)
    with pytest.raises(Exception, match=message):  # torch wraps what a rule for shapes raises
        h.compiled(layer(isotonic), backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.ones(3).double(), TypeError, r"isotonic_into: dtypes \[torch\.float32, torch\.float64\]"),
        (torch.ones(1, 3), ValueError, r"isotonic_into: shapes \[\(3,\), \(1, 3\)\]; all must be the same"),
        (torch.ones(3, device="meta"), ValueError, r"isotonic_into: devices \['cpu', 'meta'\]; move them to one"),
    ],
)
def test_bad_output(out, error, message):
    with pytest.raises(error, match=message):
        isotonic_into(torch.ones(3), out)


def test_a_gradient_that_would_be_lost_is_refused():
    x, out = torch.ones(3), torch.zeros(3)
    for case in ((x.clone().requires_grad_(), out), (x, out.clone().requires_grad_())):
        with pytest.raises(RuntimeError, match="isotonic_into: a tensor requires grad, and its gradient would be lost"):
            isotonic_into(*case)
        with torch.no_grad():
            isotonic_into(*case)


# --- the probes


def test_a_copy_shares_nothing_that_a_decorator_marks():
    def fn(x):
        return x + 1

    copy = own(fn)
    assert copy.__code__ is not fn.__code__
    assert copy(torch.ones(1)).item() == 2
    marked = {id(each) for triple in ways().values() for each in triple}
    assert id(pooled) not in marked


def test_one_graph_says_how_it_ends(h):
    x = h.randn(4)
    assert one_graph(lambda x: x.sin() + 1, x) == "yes"
    assert one_graph(lambda x: x if x.sum() > 0 else -x, x) == "Unsupported"
    assert compiled_graphs(lambda x: x.sin() + 1, x) == [["aten.sin.default", "aten.add.Tensor"]]


TWICE = """
import importlib.util, torch
import harness
modules = []
for name in ("first", "second"):
    spec = importlib.util.spec_from_file_location(name, "examples/compiler/custom_ops.py")
    module = importlib.util.module_from_spec(spec)
    import sys
    sys.modules[name] = module
    spec.loader.exec_module(module)
    modules.append(module)
x = torch.randn(3, 9, requires_grad=True)
for module in modules:
    torch.autograd.grad(module.wave_operator(x).sum(), x)
    compiled = torch.compile(module.wave_operator, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module.wave(x))
print("both work")
"""


def test_a_file_that_is_loaded_twice_has_operators_of_its_own(cli):
    done = cli(("-c", TWICE))
    assert done.stdout.splitlines()[-1:] == ["both work"], (done.returncode, done.stderr)


@pytest.mark.gpu
def test_on_a_gpu_the_values_go_to_the_host_and_back(h):
    x = h.randn(64, 256)
    assert x.is_cuda
    out = isotonic(x)
    assert out.is_cuda
    torch.testing.assert_close(out.cpu(), isotonic(x.cpu()))
    h.check(gradient(isotonic), gradient_reference, x, h.randn(64, 256), what="gradient", terms=256)
