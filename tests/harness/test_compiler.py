"""torch.compile watched: what was compiled, what was logged, and that every setting is found as it was left."""

import errno
import logging
import os
import random
import tempfile
import warnings
from pathlib import Path

from harness.catalog import load_module
from harness.compiler import (
    SETTINGS,
    SettingsChanged,
    empty_cache,
    empty_compiler,
    generated_code,
    guards,
    logs,
    settings,
    settings_kept,
    watch,
)
from harness.process import Child

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor_config


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# --- watch


def test_graphs_breaks_and_what_they_came_from():
    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    with watch() as seen:
        torch.compile(broken, backend="eager")(torch.ones(3))
    assert seen.graphs == 2
    assert len(seen.breaks) == 1
    assert "graph_break" in seen.breaks[0]
    assert "\n" not in seen.breaks[0]
    assert [frame.graph_ops for frame in seen.frames] == [1, 1]
    assert seen.frames[0].name == "broken"
    assert all(frame.guards > 0 and frame.seconds > 0 and frame.failure is None for frame in seen.frames)
    assert seen.recompiles == []
    assert seen.seconds >= sum(frame.seconds for frame in seen.frames) / 2


def test_a_reason_that_comes_twice_is_one():
    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        x = x.cos()
        torch._dynamo.graph_break()
        return x.tan()

    with watch() as seen:
        torch.compile(broken, backend="eager")(torch.ones(3))
    assert seen.graphs == 3
    assert len(seen.breaks) == 1


def test_a_function_that_is_skipped_says_so_in_its_frame():
    """A break within a loop leaves all of it to Python: no graph, and no break either."""

    def broken(x):
        for _ in range(2):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    with watch() as seen:
        torch.compile(broken, backend="eager")(torch.ones(3))
    assert (seen.graphs, seen.breaks) == (0, [])
    assert "graph_break" in seen.frames[0].failure


def test_recompiles_say_which_guard_failed():
    def scaled(x, scale):
        return x * scale

    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    with watch() as first:
        compiled(torch.ones(3), 2)
    with watch() as seen:
        compiled(torch.ones(3), 2)  # nothing to compile
        compiled(torch.ones(4), 2)
        compiled(torch.ones(4), 3)
    assert (first.graphs, first.recompiles) == (1, [])
    assert seen.graphs == 2
    size, scale = seen.recompiles
    assert "size" in size
    assert "scale" in scale


def test_what_was_before_does_not_count_and_nothing_is_nothing():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    with watch() as seen:
        torch.ones(3) + 1
    assert (seen.graphs, seen.breaks, seen.frames, seen.counters, seen.kernels) == (0, [], [], {}, 0)


def test_a_compiler_reset_within_and_a_watch_within_a_watch():
    def compiled(add):
        return torch.compile(lambda x: x + add, backend="eager")(torch.ones(3))

    with watch() as outer:
        compiled(1)
        with watch() as inner:
            torch.compiler.reset()
            compiled(2)
        torch.compiler.reset()
        compiled(3)
    assert (outer.graphs, len(outer.frames)) == (3, 3)
    assert (inner.graphs, len(inner.frames)) == (1, 1)


def test_more_compilations_than_torch_remembers():
    from torch._dynamo import utils

    limit = utils._compilation_metrics.maxlen
    with watch() as seen:
        for i in range(limit + 5):
            torch.compile(lambda x, i=i: x + i, backend="eager")(torch.ones(2))
            torch.compiler.reset()
    assert len(seen.frames) == seen.graphs == limit + 5
    assert utils._compilation_metrics.maxlen == limit


def test_a_compilation_that_fails_is_a_frame_with_its_failure():
    def backend(graph, inputs):
        raise LookupError("no such kernel")

    with pytest.raises(Exception, match="no such kernel"), watch() as seen:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert "no such kernel" in seen.frames[0].failure
    assert seen.seconds > 0


def test_kernels_that_inductor_generated():
    with empty_compiler(), watch() as seen:
        torch.compile(lambda x: (x.sin() + 1).sum())(torch.randn(100))
    assert seen.kernels == 1
    assert seen.counters["inductor"]["fxgraph_cache_miss"] == 1


# --- guards, code, logs


def test_guards_of_each_form_the_newest_first():
    def scaled(x, scale):
        return x * scale

    assert guards(scaled) == []
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    compiled(torch.ones(3), 2)
    compiled(torch.ones(4), 2)
    newest, oldest = guards(scaled)
    assert any("size=[4]" in line for line in newest)
    assert any("size=[3]" in line for line in oldest)
    assert any("scale" in line and "== 2" in line for line in newest)
    assert guards(compiled) == [newest, oldest]

    class Doubles(torch.nn.Module):
        def forward(self, x):
            return x * 2

    module = Doubles()
    torch.compile(module, backend="eager")(torch.ones(2))
    assert any("size=[2]" in line for line in guards(module.forward)[0])


def test_generated_code_is_what_inductor_wrote():
    def fused(x):
        return (x.sin() + 1).relu()

    (code,) = generated_code(fused, torch.randn(100))
    assert "sin" in code
    assert "def call(" in code
    (again,) = generated_code(fused, torch.randn(100))  # from the cache
    assert again == code


def compile_with_a_break(x):
    torch._dynamo.graph_break()
    return x + 1


def test_logs_are_collected_with_the_artifact_they_are_of(capfd):
    with logs(graph_breaks=True, recompiles=True) as lines:
        compiled = torch.compile(lambda x: x.sin(), backend="eager", dynamic=False)
        compiled(torch.ones(3))
        compiled(torch.ones(4))
        torch.compile(compile_with_a_break, backend="eager")(torch.ones(3))
    of = {artifact for artifact, _ in lines}
    assert of == {"graph_breaks", "recompiles"}
    assert any("size mismatch" in text for artifact, text in lines if artifact == "recompiles")
    assert capfd.readouterr().err == ""
    kept = list(lines)
    torch.compiler.reset()
    torch.compile(compile_with_a_break, backend="eager")(torch.ones(3))
    assert lines == kept  # off again


def handlers_and_levels():
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    return {
        name: (logging.getLogger(name).level, [type(handler) for handler in logging.getLogger(name).handlers])
        for name in names
    }


def test_logs_leave_the_loggers_as_they_were():
    with logs(recompiles=True):  # what is imported for it registers loggers of its own
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    own = logging.StreamHandler()
    logging.getLogger("torch._dynamo").addHandler(own)
    try:
        before = handlers_and_levels()
        with logs(graph_breaks=True, inductor=logging.DEBUG):
            assert handlers_and_levels() != before
        assert handlers_and_levels() == before
        assert own in logging.getLogger("torch._dynamo").handlers
    finally:
        logging.getLogger("torch._dynamo").removeHandler(own)


def test_logs_within_logs_and_an_unknown_artifact():
    def breaks():
        torch.compiler.reset()
        torch.compile(compile_with_a_break, backend="eager")(torch.ones(3))

    with logs(graph_breaks=True) as outer:
        for wrong in ({"no_such_thing": True}, {"recompiles": 3}):
            with pytest.raises((TypeError, ValueError)), logs(**wrong):
                pytest.fail(f"{wrong} was taken")
        with logs(recompiles=True) as inner:
            breaks()
        assert (outer, inner) == ([], [])
        breaks()
    assert [artifact for artifact, _ in outer] == ["graph_breaks"]


def test_warnings_of_torch_are_collected_too(capfd):
    def scaled(x, scale):
        return x * scale

    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    with logs(recompiles=False) as lines, torch._dynamo.config.patch(recompile_limit=1):
        compiled(torch.ones(3), 2)
        compiled(torch.ones(4), 2)
    assert any("recompile_limit" in text for _, text in lines)
    assert capfd.readouterr().err == ""


def child_logs():
    """In a process with TORCH_LOGS of its own: what is collected, and what is then switched on."""
    from harness.process import report

    from torch._logging import _internal

    def breaks():
        torch.compiler.reset()
        torch.compile(compile_with_a_break, backend="eager")(torch.ones(3))

    breaks()
    print("collecting", flush=True)
    with logs(recompiles=True) as recompiles:
        breaks()
        compiled = torch.compile(lambda x: x.sin(), backend="eager", dynamic=False)
        compiled(torch.ones(3))
        compiled(torch.ones(4))
    print("collected", flush=True)
    breaks()
    report(
        artifacts=sorted(_internal.log_state.artifact_names), collected=[artifact for artifact, _ in recompiles],
        variable=os.environ.get("TORCH_LOGS"),
    )  # fmt: skip


def test_a_readers_own_torch_logs_stay_on():
    with Child(child_logs, env={"TORCH_LOGS": "graph_breaks"}) as child:
        result = child.result()
        before, between, after = child.output().replace("collected", "collecting").split("collecting\n")
    assert result == {"artifacts": ["graph_breaks"], "collected": ["recompiles"], "variable": "graph_breaks"}
    assert "Graph break" in before
    assert "Graph break" in after
    assert between == ""


# --- caches


def test_an_empty_cache_is_a_folder_of_its_own_and_goes(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with empty_cache():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert folder.is_dir()
        assert list(folder.iterdir()) == []
        assert folder.parent == tmp_path
        assert Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(folder)
        with watch() as seen:
            compiled = torch.compile(lambda x: x.sin() + 1)
            compiled(torch.ones(10))
        assert seen.counters["inductor"]["fxgraph_cache_miss"] == 1
        assert list(folder.iterdir())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert "TRITON_CACHE_DIR" not in os.environ
    assert not list(tmp_path.glob("empty-cache-*"))
    assert torch.equal(compiled(torch.zeros(10)), torch.ones(10))  # it still works


@pytest.mark.parametrize("stop", [LookupError, KeyboardInterrupt])
def test_an_empty_cache_goes_when_what_is_within_fails(monkeypatch, tmp_path, stop):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    seen = []

    def stopped():
        with empty_compiler():
            seen.extend(tmp_path.iterdir())
            raise stop

    with pytest.raises(stop):
        stopped()
    assert len(seen) == 1
    assert not list(tmp_path.iterdir())
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_an_empty_compiler_has_compiled_nothing():
    def add(x):
        return x + 1

    compiled = torch.compile(add, backend="eager")
    compiled(torch.ones(3))
    assert len(guards(add)) == 1
    with empty_compiler():
        assert guards(add) == []
        compiled(torch.ones(3))
        assert len(guards(add)) == 1
    assert guards(add) == []


# --- settings


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


CHANGES = {
    "float32 precision": lambda: torch.set_float32_matmul_precision("high"),
    "cuBLAS bf16 reduced precision": lambda: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "cuBLAS fp16 reduced precision": lambda: setattr(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "attention backends": lambda: torch.backends.cuda.enable_math_sdp(False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fill uninitialized memory": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "working folder": lambda: os.chdir("/"),
    "environment": lambda: os.environ.update(TORCH_OF_A_TEST="1"),
    "cache folders": lambda: os.environ.update(TORCHINDUCTOR_CACHE_DIR="/of/a/test"),
    "stance": lambda: torch.compiler.set_stance("eager_on_recompile"),
    "compiler configuration": lambda: setattr(inductor_config, "max_autotune", True),
    "logs": lambda: torch._logging.set_logs(recompiles=True),
}


def state():
    return {name: repr(value) for name, value in settings().items()}


def test_every_setting_is_tested():
    assert list(CHANGES) == list(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_left_changed_is_named_and_put_back(name):
    before = state()
    error = technique(CHANGES[name])
    assert isinstance(error, SettingsChanged)
    told = str(error).removesuffix("; use a context manager")
    if name == "deterministic algorithms":  # it writes a configuration of Inductor's as well
        told = told.partition("; compiler configuration (torch._inductor.config.deterministic ")[0]
    assert told.startswith(f"a test left global settings changed: {name} ")
    assert "was " in told
    assert ", is " in told
    assert ";" not in told  # no other is blamed
    assert state() == before


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_put_back_when_the_technique_fails_and_its_error_wins(name):
    before = state()
    error = technique(CHANGES[name], fails)
    assert isinstance(error, LookupError)
    assert state() == before


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_was_changed_before_stays_changed(name):
    seen = []

    def twice():
        CHANGES[name]()
        seen.append(state())
        seen.append(technique(lambda: None))
        seen.append(technique(*CHANGES.values(), lambda: setattr(torch.backends, "fp32_precision", "tf32")))
        seen.append(state())

    before = state()
    assert isinstance(technique(twice), SettingsChanged)
    changed, nothing, everything, after = seen
    assert nothing is None
    assert isinstance(everything, SettingsChanged)
    assert after == changed != before
    assert state() == before


def test_all_at_once():
    before = state()
    error = technique(*CHANGES.values())
    assert all(f"{name} " in str(error) for name in SETTINGS)
    assert state() == before


@pytest.mark.parametrize(
    "steps",
    [
        # leaves "ieee" where "none" was, which means the same
        [lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest")],
        [lambda: torch.compile(lambda x: x.sin())(torch.ones(3))],  # Inductor notes where its cache is
        [lambda: inductor_config.pre_grad_fusion_options],  # a dict is copied by being looked at
        [lambda: setattr(inductor_config, "max_autotune", inductor_config.max_autotune)],
        [lambda: os.environ.update(OF_A_TEST_BUT_NOT_OF_TORCH="1")],
    ],
)
def test_what_means_the_same_is_no_change(steps, monkeypatch):
    monkeypatch.delenv("OF_A_TEST_BUT_NOT_OF_TORCH", raising=False)
    before = state()
    assert technique(*steps) is None
    assert state() == before


@pytest.mark.parametrize(
    "place", ["backends", "backends.cudnn", "backends.cuda.matmul", "backends.cudnn.conv", "backends.mkldnn.matmul"]
)
@pytest.mark.parametrize("value", ["tf32", "ieee"])
def test_every_place_of_float32_precision(place, value):
    """Some of them make torch.get_float32_matmul_precision() raise, which must not hide the rest."""
    module = torch
    for part in place.split("."):
        module = getattr(module, part)
    before = state()
    already = module.fp32_precision
    error = technique(lambda: setattr(module, "fp32_precision", value), lambda: setattr(torch.utils, "x", 1))
    del torch.utils.x
    if value == "tf32" and already != value:
        assert f"{place} was '{already}', is 'tf32'" in str(error)
    assert state() == before


def test_a_changed_configuration_is_told_by_its_name_and_a_default_is_a_default_again():
    code = inductor_config.save_config_portable()
    error = technique(lambda: setattr(inductor_config.triton, "cudagraphs", True))
    assert "compiler configuration (torch._inductor.config.triton.cudagraphs was 'unset', is True)" in str(error)
    assert inductor_config.triton.cudagraphs is False
    assert inductor_config.save_config_portable() == code  # no cached copy of it either
    with inductor_config.patch(max_autotune=True):
        error = technique(lambda: setattr(inductor_config, "max_autotune", False))
        assert "max_autotune was True, is 'unset'" in str(error)
        assert inductor_config.max_autotune is True


def test_a_dict_changed_in_place_is_a_change():
    error = technique(lambda: inductor_config.pre_grad_fusion_options.update({"of a test": {}}))
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


def test_what_was_compiled_is_forgotten():
    def add(x):
        return x + 1

    seen = []
    technique(lambda: torch.compile(add, backend="eager")(torch.ones(3)), lambda: seen.append(guards(add)))
    assert seen[0]
    assert not guards(add)


FIRST_USE = """
import sys, torch
from harness.compiler import settings_kept
from harness.process import report

def first_use():
    with settings_kept("a test", 0):
        loaded = "torch._dynamo" in sys.modules
        torch.compile(lambda x: x + 1)(torch.ones(3))
    report(loaded=loaded)
"""


@pytest.mark.parametrize("folder", [None, "default", "relative"])
def test_the_first_use_of_the_compiler_changes_no_setting(folder, tmp_path, monkeypatch):
    """And looking at the settings does not load it, which takes seconds."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    file = tmp_path / "first_use_of_a_test.py"
    file.write_text(FIRST_USE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = default_cache_dir() if folder == "default" else folder
    if folder == "relative" and torch.__version__ < "2.12":
        pytest.skip("this torch compiles nothing in a relative folder")
    with Child(load_module(file).first_use, env={"TORCHINDUCTOR_CACHE_DIR": folder} if folder else {}) as child:
        assert child.result() == {"loaded": False}


def test_looking_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert technique(lambda: None) is None
