"""torch.compile watched: what was compiled, and what was logged."""

import io
import logging
import os
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from harness.process import Child, report

import pytest
import torch
from torch import nn

from compile_inspect import (
    SPLIT,
    count_entries,
    find_breaks,
    fresh_cache,
    fresh_compiler,
    generated_code,
    guards,
    logs,
    watch,
)  # fmt: skip

LIMIT = 8  # torch's recompile_limit


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def eager(fn, **options):
    return torch.compile(fn, backend="eager", **options)


def scaled(x, scale):
    return x * scale


def with_a_break(x):
    torch._dynamo.graph_break()
    return x + 1


# --- watch


def test_graphs_breaks_and_what_they_came_from():
    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        x = x.cos()
        torch._dynamo.graph_break()
        return x.tan()

    def in_a_loop(x):  # which leaves all of it to Python: no graph, and no break either
        for _ in range(2):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    with watch() as seen:
        eager(broken)(torch.ones(3))
    assert (seen.graphs, len(seen.breaks), seen.recompiles) == (3, 1, [])  # a reason that comes twice is one
    assert "graph_break" in seen.breaks[0]
    assert "\n" not in seen.breaks[0]
    assert [frame.graph_ops for frame in seen.frames] == [1, 1, 1]
    assert seen.frames[0].name == "broken"
    assert all(frame.guards > 0 and frame.seconds > 0 and frame.failure is None for frame in seen.frames)
    assert seen.seconds >= sum(frame.seconds for frame in seen.frames) / 2
    with watch() as seen:
        eager(in_a_loop)(torch.ones(3))
    assert (seen.graphs, seen.breaks) == (0, [])
    assert "graph_break" in seen.frames[0].failure


def test_recompiles_say_which_guard_failed_and_guards_are_the_newest_first():
    assert guards(scaled) == []
    compiled = eager(scaled, dynamic=False)
    with watch() as first:
        compiled(torch.ones(3), 2)
    with watch() as seen:
        compiled(torch.ones(3), 2)  # nothing to compile
        compiled(torch.ones(4), 2)
        compiled(torch.ones(4), 3)
    assert (first.graphs, first.recompiles, seen.graphs) == (1, [], 2)
    size, scale = seen.recompiles
    assert "size" in size
    assert "scale" in scale
    newest, _, oldest = guards(scaled)
    assert any("size=[4]" in line for line in newest)
    assert any("size=[3]" in line for line in oldest)
    assert any("scale" in line and "== 3" in line for line in newest)
    assert guards(compiled)[0] == newest
    with watch() as nothing:
        compiled(torch.ones(3), 2)
    assert (nothing.graphs, nothing.breaks, nothing.frames, nothing.counters, nothing.kernels) == (0, [], [], {}, 0)

    class Doubles(nn.Module):
        def forward(self, x):
            return x * 2

    module = Doubles()
    eager(module)(torch.ones(2))
    assert any("size=[2]" in line for line in guards(module.forward)[0])


def test_a_compiler_reset_within_and_a_watch_within_a_watch():
    def compiled(add):
        return eager(lambda x: x + add)(torch.ones(3))

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

    before = utils._compilation_metrics.maxlen
    utils.set_compilation_metrics_limit(4)
    try:
        with watch() as seen:
            for i in range(7):
                eager(lambda x, i=i: x + i)(torch.ones(2))
                torch.compiler.reset()
        assert len(seen.frames) == seen.graphs == 7
        assert utils._compilation_metrics.maxlen == 4
    finally:
        utils.set_compilation_metrics_limit(before)


def test_a_compilation_that_fails_is_a_frame_with_its_failure():
    def backend(graph, inputs):
        raise LookupError("no such kernel")

    with pytest.raises(Exception, match="no such kernel"), watch() as seen:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert "no such kernel" in seen.frames[0].failure
    assert seen.seconds > 0


# --- breaks


def test_a_break_in_a_library_is_reported_at_the_users_line():
    def logs_it(x):
        y = x + 1
        logging.getLogger("somewhere").info("here")
        return y + 1

    found = find_breaks(logs_it, torch.zeros(3))
    assert {each.source for each in found.breaks} == {'logging.getLogger("somewhere").info("here")'}


def test_two_breaks_and_a_module():
    class Noisy(nn.Module):
        def forward(self, x):
            print("one")
            x = x + 1
            print("two")
            return x * 2

    with redirect_stdout(io.StringIO()):
        found = find_breaks(Noisy(), torch.zeros(3))
    assert [each.source for each in found.breaks] == ['print("one")', 'print("two")']
    assert [each.lost for each in found.breaks] == [SPLIT, SPLIT]
    assert found.operations == 2
    assert str(found.breaks[0]).startswith("test_compile_inspect.py:")


def test_no_break():
    found = find_breaks(nn.Linear(3, 3), torch.zeros(2, 3))
    assert (found.graphs, found.operations, found.breaks) == (1, 1, [])


def test_bad_input_of_find_breaks():
    def generates(x):
        yield x + 1

    with pytest.raises(TypeError, match="find_breaks: got int, which cannot be called"):
        find_breaks(3)
    for compiled in (torch.compile(lambda x: x), torch.compile(nn.Linear(3, 3))):
        with pytest.raises(ValueError, match="find_breaks: fn is compiled already; pass the function or module"):
            find_breaks(compiled, torch.zeros(3))
    with pytest.raises(ValueError, match="find_breaks: generates is a generator function"):
        find_breaks(generates, torch.zeros(3))


def test_what_the_function_raises_is_passed_on():
    def refuses(x):
        raise ValueError(f"rank {x.ndim}")

    with pytest.raises(Exception, match="rank 1"):
        find_breaks(refuses, torch.zeros(3))


# --- cache entries


def test_cache_entries_are_counted():
    x = torch.randn(4, 3)
    found = count_entries(scaled, [lambda f, k=k: f(x, k) for k in (2, 2, 3, 4)])
    assert (found.compiled, found.eager, found.warnings) == (2, [False] * 4, [])
    assert found.reasons == ["0/0: scale == 2"]
    for k, got in zip((2, 2, 3, 4), found.outputs, strict=True):
        torch.testing.assert_close(got, scaled(x, k))
    found = count_entries(scaled, [lambda f, k=k: f(x, k) for k in range(2, 20)], dynamic=False)
    assert (found.compiled, found.eager_calls) == (LIMIT, 18 - LIMIT)
    assert found.warnings == [f"torch._dynamo hit config.recompile_limit ({LIMIT})"]
    again = count_entries(scaled, [lambda f: f(x, 2)])  # nothing is left of what was compiled before
    assert (again.compiled, again.reasons) == (1, [])


def test_a_list_of_functions_shares_what_their_code_shares():
    x = torch.randn(3)

    class Layer(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.index = index

        def forward(self, x):
            return scaled(x, self.index)

    layers = [Layer(k) for k in range(3)]
    assert count_entries(layers, [lambda each, i=i: each[i](x) for i in range(3)]).compiled == 3
    linears = [nn.Linear(3, 3) for _ in range(3)]  # one entry serves them all
    assert count_entries(linears, [lambda each, i=i: each[i](x) for i in range(3)]).compiled == 1


def test_a_function_without_a_graph_is_eager():
    found = count_entries(lambda x: 3, [lambda f: f(torch.randn(2))] * 2)
    assert (found.compiled, found.eager) == (0, [True, True])


def test_bad_input_of_count_entries():
    x = torch.randn(3)
    with pytest.raises(TypeError, match="count_entries: got int, which cannot be called; pass a function"):
        count_entries(3, [lambda f: f(x)])
    with pytest.raises(TypeError, match="count_entries: got str"):
        count_entries([scaled, "scaled"], [lambda f: f[0](x, 1)])
    for compiled in (torch.compile(scaled), torch.compile(nn.Linear(2, 2))):
        with pytest.raises(ValueError, match="count_entries: fn is compiled already; pass the function or module"):
            count_entries(compiled, [lambda f: f(x, 1)])
    with pytest.raises(ValueError, match="count_entries: no calls; pass functions that call"):
        count_entries(scaled, [])


def test_what_a_call_raises_is_passed_on_and_leaves_no_trace():
    x = torch.randn(3)

    def fails(f):
        f(x, 2)
        raise OverflowError("in a call")

    with pytest.raises(OverflowError, match="in a call"):
        count_entries(scaled, [fails])
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        pytest.raises(torch._dynamo.exc.RecompileError, match="scale == 2"),
    ):
        count_entries(scaled, [lambda f, k=k: f(x, k) for k in (2, 3)])
    assert count_entries(scaled, [lambda f: f(x, 2)]).compiled == 1


# --- logs


def test_logs_are_collected_with_the_artifact_they_are_of(capfd):
    with logs(graph_breaks=True, recompiles=True) as lines:
        compiled = eager(lambda x: x.sin(), dynamic=False)
        compiled(torch.ones(3))
        compiled(torch.ones(4))
        eager(with_a_break)(torch.ones(3))
    assert {artifact for artifact, _ in lines} == {"graph_breaks", "recompiles"}
    assert any("size mismatch" in text for artifact, text in lines if artifact == "recompiles")
    kept = list(lines)
    torch.compiler.reset()
    eager(with_a_break)(torch.ones(3))
    assert lines == kept  # off again
    torch.compiler.reset()
    compiled = eager(scaled, dynamic=False)
    with logs(recompiles=False) as lines, torch._dynamo.config.patch(recompile_limit=1):
        compiled(torch.ones(3), 2)
        compiled(torch.ones(4), 2)
    assert any("recompile_limit" in text for _, text in lines), "warnings of torch are collected too"
    assert capfd.readouterr().err == ""


def handlers_and_levels():
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    return {
        name: (logging.getLogger(name).level, [type(handler) for handler in logging.getLogger(name).handlers])
        for name in names
    }


def test_logs_leave_the_loggers_as_they_were():
    with logs(recompiles=True):  # what is imported for it registers loggers of its own
        eager(lambda x: x + 1)(torch.ones(3))
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
        eager(with_a_break)(torch.ones(3))

    with logs(graph_breaks=True) as outer:
        for wrong in ({"no_such_thing": True}, {"recompiles": 3}):
            with pytest.raises((TypeError, ValueError)), logs(**wrong):
                pytest.fail(f"{wrong} was taken")
        with logs(recompiles=True) as inner:
            breaks()
        assert (outer, inner) == ([], [])
        breaks()
    assert [artifact for artifact, _ in outer] == ["graph_breaks"]


def child_logs():
    """In a process with TORCH_LOGS of its own: what is collected, and what is then switched on."""
    from torch._logging import _internal

    def breaks():
        torch.compiler.reset()
        eager(with_a_break)(torch.ones(3))

    breaks()
    print("collecting", flush=True)
    with logs(recompiles=True) as recompiles:
        breaks()
        compiled = eager(lambda x: x.sin(), dynamic=False)
        compiled(torch.ones(3))
        compiled(torch.ones(4))
    print("collecting", flush=True)
    breaks()
    report(
        artifacts=sorted(_internal.log_state.artifact_names), collected=[artifact for artifact, _ in recompiles],
        variable=os.environ.get("TORCH_LOGS"),
    )  # fmt: skip


def test_a_readers_own_torch_logs_stay_on():
    with Child(child_logs, env={"TORCH_LOGS": "graph_breaks"}) as child:
        assert child.result() == {
            "artifacts": ["graph_breaks"], "collected": ["recompiles"], "variable": "graph_breaks",
        }  # fmt: skip
        before, between, after = child.output().split("collecting\n")
    assert ("Graph break" in before, between, "Graph break" in after) == (True, "", True)


# --- caches


def test_an_empty_cache_is_a_folder_of_its_own_and_goes(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with fresh_cache():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert list(folder.iterdir()) == []
        assert folder.parent == tmp_path
        assert Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(folder)
        with watch() as seen:
            compiled = torch.compile(lambda x: (x.sin() + 1).sum())
            compiled(torch.ones(10))
        assert (seen.counters["inductor"]["fxgraph_cache_miss"], seen.kernels) == (1, 1)
        assert list(folder.iterdir())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert "TRITON_CACHE_DIR" not in os.environ
    assert compiled(torch.zeros(10)) == 10  # it still works
    for stop in (LookupError, KeyboardInterrupt):
        made = []

        def stopped(stop=stop, made=made):
            with fresh_compiler():
                made += tmp_path.glob("fresh-cache-*")
                raise stop

        with pytest.raises(stop):
            stopped()
        assert len(made) == 1
    assert not list(tmp_path.glob("fresh-cache-*"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_generated_code_is_what_inductor_wrote():
    def fused(x):
        return (x.sin() + 1).relu()

    (code,), (again,) = (generated_code(fused, torch.randn(100)) for _ in range(2))  # the second from the cache
    assert "sin" in code
    assert "def call(" in code
    assert again == code


def test_an_empty_compiler_has_compiled_nothing():
    compiled = eager(scaled)
    compiled(torch.ones(3), 2)
    assert len(guards(scaled)) == 1
    with fresh_compiler():
        assert guards(scaled) == []
        compiled(torch.ones(3), 2)
        assert len(guards(scaled)) == 1
    assert guards(scaled) == []
