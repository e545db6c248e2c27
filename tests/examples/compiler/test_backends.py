"""backends: what the run finds of each name of the table, what it would find of a bad backend, and the runtimes.

Where a runtime is not installed its tests skip; `make test-backends` installs every one of them and lets none skip.
"""

import copy
import os
import re

from harness.catalog import ROOT, Needs
from harness.process import Child, report
from harness.session import Harness
from harness.settings import settings, settings_kept

import pytest
import torch
from rich.console import Console
from torch import nn

from examples.compiler import backends, backends_runtimes
from examples.compiler.backends import BACKENDS, Entry, available, backend, demo, looking, missing
from examples.compiler.backends_attempt import FLOAT32, attempt, describe, network, off_by, quiet
from examples.compiler.backends_runtimes import onnxruntime_backend, openvino_f32, tvm_relax

OWN = ("eager", "aot_eager", "inductor", "cudagraphs")
RUNTIMES = {"openvino": openvino_f32, "tvm": tvm_relax, "onnxrt": onnxruntime_backend}
INSTALLED = [name for name in RUNTIMES if missing(name) is None]


def harness(**options) -> Harness:
    return Harness("backends", Needs.parse("torch"), console=Console(quiet=True), **options)


@pytest.fixture
def h() -> Harness:
    return harness()


@pytest.fixture(autouse=True)
def state_as_found():
    before = settings()
    yield
    torch.compiler.reset()
    assert settings() == before


def need(name: str) -> None:
    """Skip without this runtime; but where every one was asked for, that is a failure."""
    if why := missing(name):
        (pytest.fail if os.environ.get("TEST_EVERY_BACKEND") else pytest.skip)(f"{name}: {why}")


@pytest.fixture(scope="module")
def record():
    h = harness(timing=False)
    with settings_kept("backends", 0):
        demo(h)
        h.finish()
    return h.record


def test_every_name_of_the_table_has_its_line(record):
    said = record.facts["each backend of the chapter's table"]
    assert set(said) == {*OWN, "openxla", "openvino", "tvm", "onnxrt", "tensorrt", "ipex"}
    for name in OWN:
        assert re.match(r"runs(, but the next call|;|$)", said[name])  # a CUDA graph's memory is used again
    for name in set(BACKENDS) - set(OWN):
        if missing(name):
            assert re.search(r"^fails: (InvalidBackend|ImportError|ModuleNotFoundError): .*; ", said[name])
            assert "pip install" in said[name] or name == "ipex"
    assert "use that" in said["ipex"]
    assert "removed upstream since torch 2.9" in said["onnxrt"]
    assert "Relay" in said["tvm"]
    if not torch.cuda.is_available():
        assert "skipping cudagraphs" in said["cudagraphs"]


def test_those_that_run_are_compared_with_float64(record):
    compared = [row["variant"] for table in record.tables for row in table["rows"]]
    for name in (*OWN, *INSTALLED):
        assert f"torch {name}" in compared
    assert all(row["error"] <= 1 for table in record.tables for row in table["rows"])
    assert "aot_eager, inductor" in record.answer
    assert "ipex" in record.answer.partition("not here: ")[2]


def test_a_backend_of_two_lines(capsys):
    torch.compile(network(8, 16, "cpu"), backend=looking)(torch.randn(2, 8))
    assert capsys.readouterr().out == "['linear', 'gelu', 'layer_norm', 'linear']\n"


def test_profiling_times_nothing(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", {"eager": Entry(), "aot_eager": Entry()})
    h = harness(profile=True)
    demo(h)
    assert not h.record.tables


# --- names


@pytest.mark.parametrize("name", ["inducter", "tvmm", "onnx_rt", "", "no such", None, 3])
def test_an_unknown_name_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=rf"there is no {re.escape(repr(name))}; .*available: eager, aot_eager, ind"):
        backend(name)


def test_near_names_are_named():
    for name, near in (("inducter", "inductor"), ("cudagraph", "cudagraphs"), ("aot-eager", "aot_eager")):
        with pytest.raises(ValueError, match=f"did you mean {near}"):
            backend(name)


@pytest.mark.parametrize("name", [name for name in BACKENDS if missing(name)])
def test_a_name_without_its_package_is_refused_with_the_fix(name):
    with pytest.raises(ValueError, match=f"backend: '{name}' is not available here: .*(pip install|inductor).*; avail"):
        backend(name)
    assert name not in available()


def test_a_name_that_runs_is_what_torch_compile_takes():
    for name in OWN:
        assert backend(name) == {"backend": name}
    assert backend("eager_noexcept") == {"backend": "eager_noexcept"}  # for debugging: torch does not list it
    for name in INSTALLED:
        assert backend(name)["backend"] is RUNTIMES[name]
    backend("eager")["backend"] = "changed"
    assert backend("eager") == {"backend": "eager"}


def test_install_lines_name_what_the_requirements_pin():
    pinned = re.findall(r"^([\w-]+)==[\w.]+", (ROOT / "requirements-backends.txt").read_text(), re.M)
    for name in RUNTIMES:
        words = BACKENDS[name].install.split()
        assert words[:2] == ["pip", "install"]
        assert set(words[2:]) <= set(pinned)


def test_torch_tensorrt_is_the_one_for_this_torch():
    assert f"torch-tensorrt=={'.'.join(torch.__version__.split('.')[:2])}.0" in BACKENDS["tensorrt"].install


# --- what attempt() finds of a backend that is bad


def detached(graph, inputs):
    return lambda *args: tuple(out.detach() for out in graph(*args))


def rounded(graph, inputs):
    return lambda *args: tuple(out.bfloat16().float() for out in graph(*args))


def doubled_gradient(graph, inputs):
    def call(*args):
        return tuple(out + (out - out.detach()) for out in graph(*args))

    return call


def reused(graph, inputs):
    buffers = []

    def call(*args):
        results = [out.detach() for out in graph(*args)]
        if not buffers:
            buffers.extend(results)
        else:
            for buffer, result in zip(buffers, results, strict=True):
                buffer.copy_(result)
        return tuple(buffers)

    return call


def broken(graph, inputs):
    raise NotImplementedError("no such operator\nand a long explanation")


def silent(graph, inputs):
    raise KeyError


@pytest.mark.parametrize(
    ("bad", "finding"),
    [
        (detached, "runs, but loses the gradient in silence"),
        (rounded, r"runs, but result off by \de-03, more than float32"),
        (doubled_gradient, r"runs, but gradient off by 1e\+00"),
        (reused, "runs, but loses the gradient in silence, the next call overwrites the result in silence"),
        (broken, "fails: NotImplementedError: no such operator$"),
        (silent, "fails: KeyError: no message$"),
    ],
)
def test_a_bad_backend_is_found_out(h, bad, finding):
    assert re.match(finding, describe("bad", attempt({"backend": bad}, "cpu")))


def test_a_good_backend_is_not():
    outcome = attempt({"backend": lambda graph, inputs: graph}, "cpu")
    assert describe("own", outcome) == "runs"
    assert 0 < outcome.result < FLOAT32
    assert 0 < outcome.gradient < FLOAT32


def test_one_that_falls_back_on_inductor_is_found_out(h):
    """As OpenVINO's backend does, in silence, whenever it fails."""
    from torch._inductor.compile_fx import compile_fx

    outcome = attempt({"backend": lambda graph, inputs: compile_fx(graph, inputs)}, "cpu")
    assert "compiled by Inductor, on which it fell back" in describe("own", outcome)
    assert describe("inductor", outcome) == "runs"


def child_without_a_compiler():
    report(said=describe("inductor", attempt({"backend": "inductor"}, "cpu")))


def test_without_a_cpp_compiler_inductor_is_the_one_that_fails(tmp_path):
    """The run goes on, as attempt() does not raise."""
    env = {"CXX": "/no/such/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    with Child(child_without_a_compiler, env=env) as child:
        said = child.result()["said"]
    assert said.startswith("fails: InvalidCxxCompiler: ")
    assert said.endswith("install g++, or name another in the environment variable CXX")


# --- inputs that the replacements do not take


@pytest.mark.parametrize("function", RUNTIMES.values(), ids=RUNTIMES)
def test_inputs_that_would_go_wrong_are_refused(function):
    name = function.__name__
    for inputs, message in (
        ([torch.ones(2), 3], "a size is a symbol, but it compiles for one size; pass dynamic=False"),
        ([torch.ones(2, device="meta")], "a tensor is on meta, but it runs on the CPU; move the model there"),
    ):
        with pytest.raises(RuntimeError, match=f"{name}: {message}"):
            backends_runtimes._inputs_it_can_take(name, inputs, gradients=True)
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match=f"{name}: an input or a weight requires grad"):
        backends_runtimes._inputs_it_can_take(name, [weight], gradients=False)
    with torch.no_grad():
        backends_runtimes._inputs_it_can_take(name, [weight], gradients=False)
    backends_runtimes._inputs_it_can_take(name, [weight], gradients=True)


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_symbolic_size_is_refused_by_name(h, name):
    need(name)
    model = network(16, 32, "cpu").requires_grad_(False)
    message = f"{RUNTIMES[name].__name__}: a size is a symbol"
    with quiet(), pytest.raises(RuntimeError, match=message):
        torch.compile(model, backend=RUNTIMES[name], dynamic=True)(torch.randn(4, 16))


# --- the runtimes


@pytest.mark.parametrize("name", RUNTIMES)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_a_runtime_is_right_for_each_size(h, name, rows):
    need(name)
    model = network(16, 32, "cpu").requires_grad_(False)
    exact = copy.deepcopy(model).double()
    with quiet():
        compiled = torch.compile(model, **backend(name))
        for _ in range(2):
            x = h.randn(rows, 16)
            h.check(compiled, lambda x: exact(x.double()), x, what=f"{name} {rows}", terms=32, roundings=8)


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_sees_strides_and_changed_weights_and_keeps_results(h, name):
    need(name)
    model = network(16, 32, "cpu").requires_grad_(False)
    with quiet():
        compiled = torch.compile(model, **backend(name))
        for x in (h.randn(16, 5).t(), h.randn(5, 16), h.randn(5, 32)[:, ::2]):
            first = compiled(x)
            mine = first.clone()
            assert off_by(first, copy.deepcopy(model).double()(x.double())) < FLOAT32
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            assert off_by(compiled(x), copy.deepcopy(model).double()(x.double())) < FLOAT32
            assert torch.equal(first, mine)


@pytest.mark.parametrize("name", ["openvino", "tvm"])
def test_a_runtime_for_inference_refuses_a_gradient(h, name):
    need(name)
    model = network(16, 32, "cpu")
    with quiet(), pytest.raises(RuntimeError, match=f"{RUNTIMES[name].__name__}: an input or a weight requires grad"):
        torch.compile(model, **backend(name))(torch.randn(4, 16))


def test_onnxruntime_trains(h):
    """The gradient is a second graph, and every step sees the weights that the last one left."""
    need("onnxrt")
    model = network(16, 32, "cpu")
    exact = copy.deepcopy(model).double()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, exact)]
    with quiet():
        compiled = torch.compile(model, **backend("onnxrt"))
        for _ in range(3):
            x = h.randn(8, 16)
            for each, inputs in ((compiled, x), (exact, x.double())):
                each(inputs).square().mean().backward()
            for got, want in zip(model.parameters(), exact.parameters(), strict=True):
                assert off_by(got.grad, want.grad) < FLOAT32
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_what_openvino_loses_by_its_own_name(record):
    """Why openvino_f32 is there. Rounding to bfloat16 is only found on a CPU that has it."""
    need("openvino")
    if torch.__version__ < "2.13":
        pytest.skip("requirements-backends.txt pins torch 2.13; with an older one OpenVINO falls back on Inductor")
    said = record.facts["each backend of the chapter's table"]["openvino"]
    assert "loses the gradient in silence, the next call overwrites the result in silence; " in said
    assert said.endswith("openvino_f32 runs, but refuses gradients")


def test_what_the_table_says_with_every_runtime(record):
    for name in RUNTIMES:
        need(name)
    said = record.facts["each backend of the chapter's table"]
    assert re.fullmatch(
        r"fails: InvalidBackend: .*; removed upstream since .*; onnxruntime_backend runs", said["onnxrt"]
    )
    assert said["tvm"].endswith("tvm_relax runs, but refuses gradients")
    assert said["tvm"].startswith("fails: ImportError") == (torch.__version__ < "2.14")


@pytest.mark.gpu
def test_on_a_gpu_cudagraphs_are_not_skipped(h):
    outcome = attempt({"backend": "cudagraphs"}, "cuda")
    assert outcome.error is None
    assert outcome.message is None
    assert outcome.gradient < FLOAT32
