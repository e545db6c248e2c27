"""torch.compile watched: what was compiled, and what was logged."""

import logging
import os
import tempfile
from pathlib import Path

from harness.compiler import empty_cache, empty_compiler, generated_code, guards, logs, watch
from harness.process import Child

import pytest
import torch


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
