"""Every setting of torch is found as it was left."""

import errno
import os
import random
import warnings

from harness.settings import SETTINGS, UNTOLD, SettingsChanged, settings, settings_kept

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor_config
from torch import backends

from compile_inspect import guards_of


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
    "float32 matmul precision": lambda: torch.set_float32_matmul_precision("high"),
    "allow_bf16": put(backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "allow_fp16": put(backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "math attention": lambda: backends.cuda.enable_math_sdp(False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fill_uninitialized_memory": put(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "cudnn.deterministic": put(backends.cudnn, "deterministic", True),
    "cudnn.benchmark": put(backends.cudnn, "benchmark", True),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "working folder": lambda: os.chdir("/"),
    "environment: TORCH_OF_A_TEST": lambda: os.environ.update(TORCH_OF_A_TEST="1"),
    "stance: stance": lambda: torch.compiler.set_stance("eager_on_recompile"),
    "torch._inductor.config: max_autotune": put(inductor_config, "max_autotune", True),
    "logs: torch._dynamo.guards": lambda: torch._logging.set_logs(modules={"torch._dynamo.guards": 10}),
}


def state():
    return {name: repr(value) for name, value in settings().items()}


def test_a_setting_is_named_and_put_back_and_one_changed_before_stays_changed():
    before = state()
    for name, change in CHANGES.items():
        seen = []

        def twice(change=change, seen=seen):
            change()
            seen.append(state())
            seen.append(technique(lambda: None))
            seen.append(technique(*CHANGES.values(), put(backends, "fp32_precision", "tf32")))
            seen.append(state())

        assert isinstance(technique(change, fails), LookupError), "the technique's own error wins"
        assert state() == before, name
        error = technique(twice)
        assert isinstance(error, SettingsChanged), name
        assert state() == before, name
        changed, nothing, everything, after = seen
        assert nothing is None
        assert isinstance(everything, SettingsChanged)
        assert after == changed != before, name
        assert f"{name} was " in str(error).replace("_reduced_precision_reduction", ""), name
    everything = str(technique(*CHANGES.values()))
    assert all(name.split(":")[0] in everything for name in CHANGES)
    assert state() == before


def test_what_means_the_same_is_no_change(monkeypatch):
    before = state()
    for steps in (
        # leaves "ieee" where "none" was, which means the same
        [lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest")],
        [lambda: inductor_config.pre_grad_fusion_options],  # a dict is copied by being looked at
        [put(inductor_config, "max_autotune", inductor_config.max_autotune)],
        [lambda: monkeypatch.setenv("OF_A_TEST_BUT_NOT_OF_TORCH", "1")],
        [lambda: monkeypatch.setenv("TRITON_CACHE_DIR", "/of/a/test")],  # as Inductor sets it; put back
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert technique(*steps) is None
        assert state() == before
    assert os.environ.get("TRITON_CACHE_DIR") != "/of/a/test"


def test_a_default_of_the_configuration_is_a_default_again():
    code = inductor_config.save_config_portable()
    error = technique(put(inductor_config.triton, "cudagraphs", True))
    assert "torch._inductor.config: triton.cudagraphs was 'unset', is True" in str(error)
    assert inductor_config.triton.cudagraphs is False
    assert inductor_config.save_config_portable() == code  # no cached copy of it either
    with inductor_config.patch(max_autotune=True):
        assert "max_autotune was True, is 'unset'" in str(technique(put(inductor_config, "max_autotune", False)))
        assert inductor_config.max_autotune is True
    error = technique(lambda: inductor_config.pre_grad_fusion_options.update({"of a test": {}}))  # in place
    assert "pre_grad_fusion_options was 'unset', is {'of a test': {}}" in str(error)
    assert "of a test" not in inductor_config.pre_grad_fusion_options


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_numbers_start_from_the_seed_and_come_back(device):
    def draw():
        return torch.rand(2, device=device).tolist(), random.random(), np.random.rand()

    def seed_all():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed_all()
    first, expected = draw(), draw()
    seed_all()
    assert draw() == first
    drawn = []
    technique(lambda: drawn.append(draw()), draw, seed=7)
    technique(lambda: drawn.append(draw()), fails, seed=7)
    technique(lambda: drawn.append(draw()), seed=2**62 + 8)  # more than numpy takes
    seven, again, eight = drawn
    assert seven == again
    assert all(one != other for one, other in zip(seven, eight, strict=True))
    assert draw() == expected


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
    error = technique(CHANGES["working folder"], wider)
    assert "working folder cannot be put back: PermissionError: [Errno 13] no entry" in str(error)
    assert torch.get_default_dtype() is torch.float32


def test_what_was_compiled_is_forgotten():
    def add(x):
        return x + 1

    seen = []
    technique(lambda: torch.compile(add, backend="eager")(torch.ones(3)), lambda: seen.append(guards_of(add)))
    assert seen[0]
    assert not guards_of(add)
    assert not set(UNTOLD) & set(settings())


FIRST_USE = """
import sys, torch
from harness.settings import settings_kept
with settings_kept("a test", 0):
    assert "torch._dynamo" not in sys.modules
    torch.compile(lambda x: x + 1)(torch.ones(3))
"""


def test_the_first_use_of_the_compiler_changes_no_setting(cli, monkeypatch):
    """And looking at the settings does not load it, which takes seconds."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    done = cli(("-c", FIRST_USE))
    assert done.returncode == 0, done.stderr
