"""The backend as torch.compile meets it: names, shapes that change, mutation, random numbers, bad input, and GPUs."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.triton_compiler.helpers import DEVICE, check, compiled
from triton_compiler import capture, explain, recording, triton_backend, triton_compiler
from triton_compiler.benchmark import main as benchmark
from triton_compiler.ir import Affine, Dim, Split, Uneven, divide, unflatten

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _from_nothing():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_it_is_registered_by_name():
    assert "triton_compiler" in torch._dynamo.list_backends()
    x = torch.randn(5, device=DEVICE)
    torch.testing.assert_close(torch.compile(lambda x: x * 2 + 1, backend="triton_compiler")(x), x * 2 + 1)
    torch.testing.assert_close(torch._dynamo.optimize(triton_backend)(lambda x: x * 3)(x), x * 3)
    assert isinstance(triton_compiler(torch.nn.Linear(2, 2)), torch.nn.Module)


def test_one_kernel_for_a_dynamic_batch():
    def f(x, w):
        return F.gelu(x @ w).softmax(-1) * x.shape[0]

    w = torch.randn(8, 16, device=DEVICE)
    fast = torch.compile(f, backend="triton_compiler")
    with recording() as seen:
        for batch in (3, 5, 64, 257):
            x = torch.randn(batch, 8, device=DEVICE)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(fast(x, w), f(x, w), rtol=1e-4, atol=1e-5)
    assert len(seen.graphs) == 1
    (source,) = seen.graphs[0].sources.values()
    assert source.symbols


def test_a_dynamic_batch_is_trained():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU()).to(DEVICE)
    fast = torch.compile(model, backend="triton_compiler")
    with recording() as seen:
        for batch in (3, 6, 10):
            x = torch.randn(batch, 8, device=DEVICE)
            torch._dynamo.mark_dynamic(x, 0)
            grads = [torch.autograd.grad(each(x).square().sum(), list(model.parameters())) for each in (fast, model)]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert [graph.kind for graph in seen.graphs] == ["forward", "backward"]


def test_convolutions_of_images_of_any_height_are_trained():
    """Sizes after a pooling are a maximum in the backward's strides."""
    conv, pool = torch.nn.Conv2d, torch.nn.MaxPool2d(2)
    model = torch.nn.Sequential(conv(3, 4, 3, padding=1), torch.nn.GELU(), pool, conv(4, 4, 3, padding=1)).to(DEVICE)
    fast = torch.compile(model, backend="triton_compiler")
    for height in (16, 20, 12):
        x = torch.randn(2, 3, height, 8, device=DEVICE)
        torch._dynamo.mark_dynamic(x, 2)
        grads = [torch.autograd.grad(each(x).square().sum(), list(model.parameters())) for each in (fast, model)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.std((2, 3)),  # divided by a number of elements less one
        lambda x: F.pad(x.sin(), (0, 0, 0, -x.shape[2] % 8)).sum(3),
        lambda x: x.new_ones(2, 3, -(-x.shape[2] // 2), 4) * x[:, :, : -(-x.shape[2] // 2)].cos(),  # // rounds down
        lambda x: x[:, :, : int(x.shape[2] * 0.5)].cos() / x.shape[2] ** 0.5,
        lambda x: x.sin() / (x.shape[2] * 0.1 + 1),
    ],
    ids=["true division", "modulo", "division of a negative size", "rounding", "tenths"],
)
def test_arithmetic_of_dynamic_sizes(fn):
    fast = torch.compile(fn, backend="triton_compiler", dynamic=True)
    for height in (9, 10, 13):
        x = torch.randn(2, 3, height, 4, device=DEVICE, requires_grad=True)
        torch.testing.assert_close(fast(x), fn(x))
        torch.testing.assert_close(*(torch.autograd.grad(each(x).square().sum(), x) for each in (fast, fn)))


def test_what_scatters_all_of_a_tensor_is_a_view(monkeypatch):
    """Pooling to one value, with channels last: torch strides its result anew, and scatters the gradient back."""
    monkeypatch.setattr(capture, "CHANNELS_LAST", True)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).to(DEVICE)
    x = torch.randn(2, 3, 8, 8, device=DEVICE)
    with recording() as seen:
        mine = torch.autograd.grad(triton_compiler(model)(x).square().sum(), list(model.parameters()))
    assert "as_strided_scatter" in seen.graphs[1].graph.code
    assert not any(graph.lowered.fallbacks for graph in seen.graphs)
    torch.testing.assert_close(mine, torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
    x, y = torch.randn(4, 4, device=DEVICE), torch.randn(2, 8, device=DEVICE)
    for shape, strides, offset in (((2, 8), (8, 1), 0), ((2, 8), (1, 2), 0), ((2, 4), (8, 2), 1)):
        call = functools.partial(torch.as_strided_scatter, size=shape, stride=strides, storage_offset=offset)
        fast = torch.compile(lambda x, y, call=call: call(x.sin(), y.cos()) * 2, backend="triton_compiler")
        with recording() as seen:
            torch.testing.assert_close(fast(x, y[:, : shape[1]]), call(x.sin(), y[:, : shape[1]].cos()) * 2)
        assert bool(seen.graphs[0].lowered.fallbacks) == (strides != (8, 1))


@pytest.mark.parametrize("correction", [0.5, -1e10])
def test_a_number_that_kernels_do_not_take_leaves_its_graph_to_eager(monkeypatch, correction):
    monkeypatch.setattr(capture, "STRICT", False)
    x = torch.randn(3, 9, device=DEVICE)
    with pytest.warns(UserWarning, match=r"runs in eager: ValueError: s\d+ .* is no whole number"):
        got = torch.compile(lambda x: x.var(1, correction=correction), backend="triton_compiler", dynamic=True)(x)
    torch.testing.assert_close(got, x.var(1, correction=correction), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: x.sum(2).t().as_strided((6, 4), (1, 6)), (4, 6, 5)),
        (lambda x: torch.view_as_real(torch.view_as_complex(x.amax(2).reshape(4, 3, 2)) * 2), (4, 6, 5)),
        (lambda x: F.scaled_dot_product_attention(*[x.unflatten(1, (4, 3)).amax(2)[:, None]] * 3), (2, 12, 8)),
        (lambda x: x.flip(0) @ x.t(), (3, 4)),
        (lambda x: x.flip(1).cumsum(1).flip(1), (3, 4)),
    ],
    ids=["view of a sum", "view as complex", "attention", "flipped matrix", "flipped scan"],
)  # fmt: skip
def test_a_library_reads_what_torch_would_give_it(fn, shape):
    """Of a reduction, seen through a view, and of a flip, which has no strides: in the order of a permuted input."""
    x = torch.randn(*shape, device=DEVICE)
    order = sorted(range(x.ndim), key=lambda axis: (axis - 1) % x.ndim)
    x = x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.ndim)])
    check(fn, x, fallbacks=tuple(compiled(fn, x)[0].lowered.fallbacks))


def test_a_dynamic_batch_of_an_embedding():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 6, padding_idx=3), torch.nn.Linear(6, 4)).to(DEVICE)
    fast = torch.compile(model, backend="triton_compiler")
    with recording() as seen:
        for batch in (3, 6, 300):
            x = torch.randint(0, 10, (batch, 2), device=DEVICE)
            torch._dynamo.mark_dynamic(x, 0)
            grads = [torch.autograd.grad(each(x).square().sum(), list(model.parameters())) for each in (fast, model)]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert [graph.lowered.fallbacks for graph in seen.graphs] == [{}, {}]
    assert any("tl.atomic_add" in source.text and source.symbols for source in seen.graphs[1].sources.values())


WINDOWS = {  # a call, and whether its backward is a sum over windows
    "scale": (lambda x: F.interpolate(x, scale_factor=2.0), True),
    "size": (lambda x: F.interpolate(x, size=(24, 16), mode="nearest-exact"), True),
    "a module": (torch.nn.Upsample(scale_factor=(1, 4)), True),
    "one axis": (lambda x: F.interpolate(x[:, 0], scale_factor=2), True),
    "by three": (lambda x: F.interpolate(x, scale_factor=3), False),
    "not whole": (lambda x: F.interpolate(x, scale_factor=2.2), False),
    "smaller": (lambda x: F.interpolate(x, scale_factor=0.5), False),
    "pooling": (lambda x: F.avg_pool2d(x, 2), True),
    "a pooling module": (torch.nn.AvgPool2d((3, 2), stride=(3, 2)), True),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_interpolation_and_pooling(name, last):
    call, windows = WINDOWS[name]
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 8, device=DEVICE)
    x = x.to(memory_format=torch.channels_last) if last else x
    results = []
    with recording() as seen:
        for fn in (triton_compiler(lambda x: call(x.sin()) * 2), lambda x: call(x.sin()) * 2):
            leaf = x.clone().requires_grad_()
            out = fn(leaf)
            results.append((out, torch.autograd.grad((out * out.cos()).sum(), leaf)[0]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    for mine, theirs in list(zip(*results, strict=True))[: 1 + windows]:  # torch's own trace has other strides
        assert mine.stride() == theirs.stride()
    assert [graph.lowered.fallbacks for graph in seen.graphs] == [{}, {}]
    atomic = ["tl.atomic_add" in source.text for graph in seen.graphs for source in graph.sources.values()]
    assert any(atomic) != windows


def test_an_interpolation_is_no_view_of_its_input():
    for shape, factor in (((1, 2, 1, 1), 4), ((1, 2, 4, 4), 1), ((1, 2, 4, 4), 2)):
        x = torch.randn(shape, device=DEVICE)
        mine, theirs = x.clone(), x.clone()
        call = lambda x: (F.interpolate(x, scale_factor=factor).add_(1), x * 2)  # noqa: B023, E731
        torch.testing.assert_close(triton_compiler(call)(mine), call(theirs))
        torch.testing.assert_close(mine, x)


def test_poolings_that_are_no_windows():
    x = torch.randn(1, 2, 6, 8, device=DEVICE)
    for call in (
        lambda x: F.avg_pool2d(x, 4), lambda x: F.avg_pool2d(x, 2, 1), lambda x: F.avg_pool2d(x, 2, padding=1),
        lambda x: F.avg_pool2d(x, 2, divisor_override=3), lambda x: F.avg_pool2d(x[0], 2),
    ):  # fmt: skip
        torch.testing.assert_close(triton_compiler(call)(x), call(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_view_of_a_convolutions_result(in_place, monkeypatch):
    """With channels last no strides describe it."""
    monkeypatch.setattr(capture, "CHANNELS_LAST", True)
    model = torch.nn.Conv2d(3, 4, 3).to(DEVICE)

    def f(x):
        y = model(x)
        flat = y.view(y.shape[0], -1)
        return (flat.mul_(2) if in_place else flat).sum(1), y

    x = torch.randn(2, 3, 8, 8, device=DEVICE)
    torch.testing.assert_close(triton_compiler(f)(x), f(x), rtol=1e-4, atol=1e-4)

    def through_a_function(x):
        y = model(x)
        torch.nn.functional.relu6(y.view(y.shape[0], -1), True)
        return y, y.view(dtype=torch.int32)

    if in_place:
        for got, want in zip(triton_compiler(through_a_function)(x), through_a_function(x), strict=True):
            torch.testing.assert_close(got.view(torch.float32), want.view(torch.float32), rtol=1e-4, atol=1e-4)


def test_what_channels_last_leaves_as_it_was(monkeypatch):
    """One image without a batch, which has no such layout, and the strides of what comes out."""
    from triton_compiler import capture

    monkeypatch.setattr(capture, "CHANNELS_LAST", True)
    model, norm = torch.nn.Conv2d(3, 4, 3).to(DEVICE), torch.nn.GroupNorm(2, 4).to(DEVICE)
    x = torch.randn(2, 3, 8, 8, device=DEVICE)
    torch.testing.assert_close(triton_compiler(model)(x[0]), model(x[0]), rtol=1e-4, atol=1e-4)
    for fn in (lambda x: norm(model(x)).flatten(2), lambda x: norm(model(x))):
        got, want = triton_compiler(fn)(x), fn(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert got.stride() == want.stride()


@pytest.mark.parametrize("change", [
    lambda x: x.add_(1).sum(),
    lambda x: x[1:].mul_(2),
    lambda x: x.copy_(x.flip(0) + x),
    lambda x: (x.t().add_(x.sum()), x * 2)[1],
    lambda x: (x.relu_(), x.mul_(x.mean(1, keepdim=True)))[1],
])  # fmt: skip
def test_inputs_are_changed_in_place(change):
    x = torch.randn(4, 4, device=DEVICE)
    mine, theirs = x.clone(), x.clone()
    got, want = torch.compile(change, backend="triton_compiler")(mine), change(theirs)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("persistent", [8, 16384])
def test_an_input_is_overwritten_after_its_last_read(persistent, monkeypatch):
    from triton_compiler import schedule

    monkeypatch.setattr(schedule, "PERSISTENT", persistent)

    def f(x, mean):
        y = x.softmax(1)
        mean.mul_(0.9).add_(x.mean(1))
        x.mul_(2)
        return y, y - mean[:, None]

    x, mean = torch.randn(5, 70, device=DEVICE), torch.randn(5, device=DEVICE)
    mine, theirs = (x.clone(), mean.clone()), (x.clone(), mean.clone())
    torch.testing.assert_close(torch.compile(f, backend="triton_compiler")(*mine), f(*theirs))
    torch.testing.assert_close(mine, theirs)


def test_running_statistics_of_a_batch_norm():
    mine, theirs = (torch.nn.BatchNorm2d(3).to(DEVICE) for _ in range(2))
    x = torch.randn(4, 3, 5, 5, device=DEVICE)
    fast = torch.compile(mine, backend="triton_compiler")
    for _ in range(3):
        torch.testing.assert_close(fast(x), theirs(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict())


def test_random_numbers_are_torchs():
    """Dropout and rand are called as they are, in their order: the seed decides as it does in eager."""

    def f(x):
        return F.dropout(x, 0.5) + torch.rand_like(x) * torch.randn(x.shape, device=x.device)

    x = torch.randn(20, 20, device=DEVICE)
    torch.manual_seed(3)
    want = f(x)
    torch.manual_seed(3)
    torch.testing.assert_close(torch.compile(f, backend="triton_compiler")(x), want)


def test_what_it_cannot_take_is_left_to_eager():
    def f(x):
        y = torch.view_as_complex(x.reshape(-1, 2)) * 1j
        return torch.view_as_real(y).cumsum(0) * 2, x.sort().values + 1

    x = torch.randn(6, device=DEVICE)
    said = explain(f, x)
    assert said.fallbacks["aten.cumsum.default"] == 1
    assert "aten.sort.default" in str(said)
    torch.testing.assert_close(triton_compiler(f)(x), f(x))
    sparse = triton_compiler(lambda x: (x.relu().to_sparse() * 2).to_dense() + 1)
    torch.testing.assert_close(sparse(x), x.relu() * 2 + 1)


def test_an_error_of_the_compiler_leaves_the_graph_to_eager(monkeypatch):
    monkeypatch.setattr(capture, "STRICT", False)
    monkeypatch.setattr(capture, "plan_graph", lambda gm, kind: 1 / 0)
    x = torch.randn(4, device=DEVICE, requires_grad=True)
    with pytest.warns(UserWarning, match="runs in eager: ZeroDivisionError"):
        triton_compiler(lambda x: x.sin() * 2)(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_a_wrong_example_input_is_an_error():
    graph, _ = compiled(lambda x: x * 2, torch.randn(4, 6, device=DEVICE))
    for wrong in (torch.randn(4, 5, device=DEVICE), torch.randn(6, 4, device=DEVICE).t()):
        with pytest.raises(AssertionError, match="expected size"):
            graph.call([wrong])


def test_views_of_inputs_are_returned_as_views():
    x = torch.randn(4, 6, device=DEVICE)
    view, same = torch.compile(lambda x: (x[1:].t(), x * 1), backend="triton_compiler")(x)
    assert view.data_ptr() == x[1:].data_ptr()
    assert same.data_ptr() != x.data_ptr()


def test_explain_shows_each_stage():
    said = explain(
        lambda x, w: F.gelu(F.layer_norm(x @ w, (8,))),
        torch.randn(4, 8, device=DEVICE),
        torch.randn(8, 8, device=DEVICE),
    )
    text = str(said)
    for part in (
        "Dynamo's graph",
        "gelu",
        "ATen after AOTAutograd",
        "aten.mm",
        "fusion groups",
        "@triton.jit",
        "def call(args)",
    ):
        assert part in text
    assert said.kernels == 1
    assert said.bytes < said.eager_bytes
    assert said.dot().startswith("digraph")


def test_generated_kernels_compile_for_all_architectures():
    """In a process whose Triton compiles: large sizes, so that all kinds of kernels are there."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("offline.py"))], capture_output=True, text=True, cwd=ROOT,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"flat", "tile", "rows", "walked"} <= set(done.stdout.split())


def test_the_benchmark_writes_a_record(tmp_path):
    from harness.record import load

    path = tmp_path / "record.json"
    assert benchmark(["graphs", "models", "--only", "SwiGLU", "MLP", "--quick", "--json", str(path)]) == 0
    record = load(path)
    assert [(each["name"], each["status"]) for each in record["examples"]] == [
        ("graphs", "passed"),
        ("models", "passed"),
    ]
    assert record["examples"][0]["tables"][0]["baseline"] == "Inductor"


@given(sizes=st.lists(st.integers(2, 6), min_size=1, max_size=4), cut=st.integers(0, 3))
def test_a_reshape_splits_loops_until_its_index_is_affine(sizes, cut):
    """The index of each element, evaluated, is that of numpy's."""
    total = torch.Size(sizes).numel()
    shape = (total // sizes[0], sizes[0]) if cut else (sizes[-1], total // sizes[-1])
    dims = [Dim("d0", total)]
    while True:
        strides, stride = {}, 1
        for dim in reversed(dims):
            strides[dim], stride = stride, stride * dim.size
        try:
            index = unflatten(Affine.of(strides), shape)
            break
        except Split as split:
            at = dims.index(split.dim)
            dims[at : at + 1] = [
                Dim(split.dim.name + "a", split.dim.size // split.inner),
                Dim(split.dim.name + "b", split.inner),
            ]
    for number in range(total):
        rest, values = number, {}
        for dim in reversed(dims):
            rest, values[dim] = divmod(rest, dim.size)
        found = [each.offset + sum(c * values[dim] for dim, c in each.terms) for each in index]
        assert found == [number // shape[1], number % shape[1]]


def test_an_index_that_no_split_makes_affine():
    with pytest.raises(Uneven):
        divide(Affine(((Dim("d", 6), 4),)), 6)
