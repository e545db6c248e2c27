"""Every setting of torch is found as it was left."""

import errno
import os
import random
import warnings

from harness.catalog import load_module
from harness.process import Child
from harness.settings import FLOAT32_PLACES, SETTINGS, SettingsChanged, _torch, settings, settings_kept

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor_config

from compile_inspect import guards


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def technique(*steps, seed=0):
    """A technique that does these things: the error that comes out of settings_kept, None when none does."""
    try:
        with settings_kept("a test", seed):
            for step in steps:
                step()
    except Exception as error:
        return error
    return None


def fails():
    raise LookupError("of its own")


def put(place, name, value):
    return lambda: setattr(place, name, value)


CHANGES = {
    "float32 precision": lambda: torch.set_float32_matmul_precision("high"),
    "cuBLAS bf16 reduced precision": put(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "cuBLAS fp16 reduced precision": put(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "attention backends": lambda: torch.backends.cuda.enable_math_sdp(False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fill uninitialized memory": put(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "cudnn.deterministic": put(torch.backends.cudnn, "deterministic", True),
    "cudnn.benchmark": put(torch.backends.cudnn, "benchmark", True),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "working folder": lambda: os.chdir("/"),
    "environment": lambda: os.environ.update(TORCH_OF_A_TEST="1"),
    "cache folders": lambda: os.environ.update(TORCHINDUCTOR_CACHE_DIR="/of/a/test"),
    "stance": lambda: torch.compiler.set_stance("eager_on_recompile"),
    "compiler configuration": put(inductor_config, "max_autotune", True),
    "logs": lambda: torch._logging.set_logs(recompiles=True),
}


def state():
    return {name: repr(value) for name, value in settings().items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_named_and_put_back_and_one_changed_before_stays_changed(name):
    assert list(CHANGES) == list(SETTINGS)
    before, seen = state(), []

    def twice():
        CHANGES[name]()
        seen.append(state())
        seen.append(technique(lambda: None))
        seen.append(technique(*CHANGES.values(), put(torch.backends, "fp32_precision", "tf32")))
        seen.append(state())

    assert isinstance(technique(CHANGES[name], fails), LookupError), "the technique's own error wins"
    assert state() == before
    error = technique(twice)
    assert isinstance(error, SettingsChanged)
    assert state() == before
    changed, nothing, everything, after = seen
    assert nothing is None
    assert isinstance(everything, SettingsChanged)
    assert after == changed != before
    told = str(error).removesuffix("; use a context manager")
    if name == "deterministic algorithms":  # it writes a configuration of Inductor's as well
        told = told.partition("; compiler configuration (torch._inductor.config.deterministic ")[0]
    assert told.startswith(f"a test left global settings changed: {name} ")
    assert ("was " in told, ", is " in told) == (True, True)
    assert ";" not in told  # no other is blamed


def test_all_at_once():
    before = state()
    error = technique(*CHANGES.values())
    assert all(f"{name} " in str(error) for name in SETTINGS)
    assert state() == before


def test_what_means_the_same_is_no_change(monkeypatch):
    monkeypatch.delenv("OF_A_TEST_BUT_NOT_OF_TORCH", raising=False)
    before = state()
    for steps in (
        # leaves "ieee" where "none" was, which means the same
        [lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest")],
        [lambda: torch.compile(lambda x: x.sin())(torch.ones(3))],  # Inductor notes where its cache is
        [lambda: inductor_config.pre_grad_fusion_options],  # a dict is copied by being looked at
        [lambda: setattr(inductor_config, "max_autotune", inductor_config.max_autotune)],
        [lambda: os.environ.update(OF_A_TEST_BUT_NOT_OF_TORCH="1")],
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            assert technique(*steps) is None
        assert state() == before


@pytest.mark.parametrize("value", ["tf32", "ieee"])
def test_every_place_of_float32_precision(value):
    """Some of them make torch.get_float32_matmul_precision() raise, which must not hide the rest."""
    before = state()
    for place in FLOAT32_PLACES:
        already = _torch(place).fp32_precision
        try:
            error = technique(put(_torch(place), "fp32_precision", value))
        except RuntimeError:  # a place that does not take it
            continue
        assert value == "ieee" or already == value or f"{place} was '{already}', is 'tf32'" in str(error)
        assert state() == before


def test_a_changed_configuration_is_told_by_its_name_and_a_default_is_a_default_again():
    code = inductor_config.save_config_portable()
    error = technique(put(inductor_config.triton, "cudagraphs", True))
    assert "compiler configuration (torch._inductor.config.triton.cudagraphs was 'unset', is True)" in str(error)
    assert inductor_config.triton.cudagraphs is False
    assert inductor_config.save_config_portable() == code  # no cached copy of it either
    with inductor_config.patch(max_autotune=True):
        assert "max_autotune was True, is 'unset'" in str(technique(put(inductor_config, "max_autotune", False)))
        assert inductor_config.max_autotune is True
    error = technique(lambda: inductor_config.pre_grad_fusion_options.update({"of a test": {}}))  # in place
    assert "pre_grad_fusion_options was 'unset', is {'of a test': {}}" in str(error)
    assert "of a test" not in inductor_config.pre_grad_fusion_options


def draw():
    return torch.rand(2).tolist(), random.random(), np.random.rand()


def seed_all():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def test_random_numbers_start_from_the_seed_and_come_back():
    seed_all()
    first, expected = draw(), draw()
    seed_all()
    assert draw() == first
    drawn = []
    technique(lambda: drawn.append(draw()), draw, seed=7)
    technique(lambda: drawn.append(draw()), fails, seed=7)
    technique(lambda: drawn.append(draw()), seed=2**62 + 8)  # more than numpy takes
    seven, again, eight = drawn
    assert seven == again != eight
    assert draw() == expected


@pytest.mark.gpu
def test_random_numbers_of_the_gpu_too():
    def on_gpu():
        return torch.rand(2, device="cuda").tolist()

    torch.cuda.manual_seed(1)
    on_gpu()
    expected = on_gpu()
    torch.cuda.manual_seed(1)
    on_gpu()
    drawn = []
    for _ in range(2):
        technique(lambda: drawn.append(on_gpu()), seed=7)
    assert drawn[0] == drawn[1]
    assert on_gpu() == expected


def test_what_cannot_be_read_or_put_back_hides_nothing(monkeypatch, tmp_path):
    """The technique's error wins, and the settings that can be put back are."""

    def refuse(value):
        raise PermissionError(errno.EACCES, "no entry")

    monkeypatch.setitem(SETTINGS, "working folder", (os.getcwd, refuse))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    os.rmdir(tmp_path / "folder")  # os.getcwd() raises from now on
    wider = CHANGES["default dtype"]
    assert isinstance(technique(wider, fails), LookupError)
    assert torch.get_default_dtype() is torch.float32
    os.chdir(tmp_path)
    error = technique(lambda: os.chdir("/"), wider)
    assert "working folder cannot be put back: PermissionError: [Errno 13] no entry" in str(error)
    assert torch.get_default_dtype() is torch.float32


def test_what_was_compiled_is_forgotten_and_looking_warns_of_nothing():
    def add(x):
        return x + 1

    seen = []
    technique(lambda: torch.compile(add, backend="eager")(torch.ones(3)), lambda: seen.append(guards(add)))
    assert seen[0]
    assert not guards(add)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert technique(lambda: None) is None


FIRST_USE = """
import sys, torch
from harness.settings import settings_kept
from harness.process import report

def first_use():
    with settings_kept("a test", 0):
        loaded = "torch._dynamo" in sys.modules
        torch.compile(lambda x: x + 1)(torch.ones(3))
    report(loaded=loaded)
"""


@pytest.mark.parametrize("folder", [None, "relative"])
def test_the_first_use_of_the_compiler_changes_no_setting(folder, tmp_path, monkeypatch):
    """And looking at the settings does not load it, which takes seconds."""
    file = tmp_path / "first_use_of_a_test.py"
    file.write_text(FIRST_USE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if folder and torch.__version__ < "2.12":
        pytest.skip("this torch compiles nothing in a relative folder")
    with Child(load_module(file).first_use, env={"TORCHINDUCTOR_CACHE_DIR": folder} if folder else {}) as child:
        assert child.result() == {"loaded": False}
