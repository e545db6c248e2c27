"""torch.compile watched: what was compiled, and what was logged."""

import copy
import io
import logging
import os
import tempfile
from collections import deque
from contextlib import redirect_stdout, suppress
from pathlib import Path

from harness.process import Child, report

import pytest
import torch
from torch import nn

from compile_inspect import SPLIT, count_entries, find_breaks, fresh_cache, fresh_compiler, guards_of, logs, watch

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


def generates(x):
    yield x + 1


def breaks_once(x):
    torch._dynamo.graph_break()
    return x + 1


def copies(x):
    return copy.deepcopy(x) + 1


def compile_with_a_break():
    torch.compiler.reset()
    eager(breaks_once)(torch.ones(3))


# --- watch


def test_graphs_breaks_and_failures():
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
    assert [(frame.graph_ops, frame.failure) for frame in seen.frames] == [(1, None)] * 3
    assert all(frame.guards > 0 and frame.seconds > 0 for frame in seen.frames)
    with watch() as seen:
        eager(in_a_loop)(torch.ones(3))
    assert (seen.graphs, seen.breaks) == (0, [])
    assert "graph_break" in seen.frames[0].failure
    with pytest.raises(Exception, match="KeyError"), watch() as seen:
        torch.compile(lambda x: x + 1, backend=lambda graph, inputs: {}["no such kernel"])(torch.ones(3))
    assert "no such kernel" in seen.frames[0].failure


def test_recompiles_say_which_guard_failed_and_guards_are_the_newest_first():
    compiled = eager(scaled, dynamic=False)
    compiled(torch.ones(3), 2)
    with watch() as seen:
        compiled(torch.ones(4), 2)
        compiled(torch.ones(4), 3)
    size, scale = seen.recompiles
    assert seen.graphs == 2
    assert "size" in size
    assert "scale" in scale
    newest, _, oldest = guards_of(compiled)
    assert any("size=[3]" in line for line in oldest)
    assert any("scale" in line and "== 3" in line for line in newest)
    assert guards_of(scaled)[0] == newest
    with watch() as nothing:
        compiled(torch.ones(3), 2)
    assert (nothing.graphs, nothing.breaks, nothing.frames, nothing.counters, nothing.kernels) == (0, [], [], {}, 0)
    with fresh_compiler():
        assert guards_of(scaled) == []
        compiled(torch.ones(3), 2)
        assert len(guards_of(scaled)) == 1
    assert guards_of(scaled) == []


def test_a_watch_within_a_watch_and_more_compilations_than_torch_remembers(monkeypatch):
    def compiled(add):
        torch.compiler.reset()
        eager(lambda x: x + add)(torch.ones(3))

    monkeypatch.setattr(torch._dynamo.utils, "_compilation_metrics", deque(maxlen=2))
    with watch() as outer:
        compiled(0)
        with watch() as inner:
            for i in range(3):
                compiled(i)
    assert (inner.graphs, len(inner.frames), outer.graphs, len(outer.frames)) == (3, 3, 4, 4)
    assert torch._dynamo.utils._compilation_metrics.maxlen == 2


# --- breaks and cache entries


class Noisy(nn.Module):
    def forward(self, x):
        print("one")
        x = x + 1
        logging.getLogger("somewhere").info("here")
        return x * 2


def test_every_break_of_a_module_at_the_users_line():
    with redirect_stdout(io.StringIO()):
        found = find_breaks(Noisy(), torch.zeros(3))
        again = find_breaks(Noisy(), torch.zeros(3))  # not suppressed as known
    lines = {'print("one")': SPLIT, 'logging.getLogger("somewhere").info("here")': SPLIT}
    assert {each.source: each.lost for each in found.breaks} == lines
    assert found.operations == 2
    assert str(found.breaks[0]).startswith("test_compile_inspect.py:")
    assert again == found
    found = find_breaks(nn.Linear(3, 3), torch.zeros(2, 3))
    assert (found.graphs, found.operations, found.breaks) == (1, 1, [])


def test_a_break_within_a_library_that_is_logged_twice_keeps_the_users_line():
    (found,) = find_breaks(lambda x: (copies(x), copies(x[:2])), torch.ones(3)).breaks
    assert found.source == "return copy.deepcopy(x) + 1"


def test_bad_input():
    for bad, error, message in (
        (3, TypeError, "got int, which cannot be called"),
        (torch.compile(nn.Linear(3, 3)), ValueError, "fn is compiled already; pass the function or module"),
    ):
        with pytest.raises(error, match=f"find_breaks: {message}"):
            find_breaks(bad, torch.zeros(3))
        with pytest.raises(error, match=f"count_entries: {message}"):
            count_entries([scaled, bad], [lambda each: each[1](torch.zeros(3))])
    with pytest.raises(ValueError, match="find_breaks: generates is a generator function"):
        find_breaks(generates, torch.zeros(3))
    with pytest.raises(ValueError, match="count_entries: no calls"):
        count_entries(scaled, [])


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
    assert count_entries(scaled, [lambda f: f(x, 2)]).compiled == 1, "nothing is left of what was compiled before"
    found = count_entries(lambda x: 3, [lambda f: f(x)] * 2)  # no graph
    assert (found.compiled, found.eager) == (0, [True, True])


def test_a_list_of_functions_shares_what_their_code_shares():
    calls = [lambda each, i=i: each[i](torch.ones(3)) for i in range(3)]
    modules, own = [nn.Linear(3, 3) for _ in calls], [lambda x, k=k: scaled(x, k) for k in range(3)]
    assert [count_entries(each, calls, dynamic=False).compiled for each in (modules, own)] == [1, 3]


# --- logs


def test_logs_are_collected_and_the_loggers_left_as_they_were(capfd):
    with logs(graph_breaks=True, recompiles=True) as lines:
        compiled = eager(lambda x: x.sin(), dynamic=False)
        compiled(torch.ones(3))
        compiled(torch.ones(4))
        eager(breaks_once)(torch.ones(3))
    assert {artifact for artifact, _ in lines} == {"graph_breaks", "recompiles"}
    assert any("size mismatch" in text for artifact, text in lines if artifact == "recompiles")
    kept = list(lines)
    compile_with_a_break()
    assert lines == kept  # off again
    compiled = eager(scaled, dynamic=False)
    with logs(recompiles=False) as lines, torch._dynamo.config.patch(recompile_limit=1):
        compiled(torch.ones(3), 2)
        compiled(torch.ones(4), 2)
    assert any("recompile_limit" in text for _, text in lines), "warnings of torch are collected too"
    assert capfd.readouterr().err == ""
    logger, own = logging.getLogger("torch._dynamo"), logging.StreamHandler()
    logger.addHandler(own)
    try:
        with logs(dynamo=logging.DEBUG):
            assert own not in logger.handlers
        assert own in logger.handlers
    finally:
        logger.removeHandler(own)


def test_logs_within_logs_and_an_unknown_artifact():
    with logs(graph_breaks=True) as outer:
        for wrong in ({"no_such_thing": True}, {"recompiles": 3}):
            with pytest.raises((TypeError, ValueError)), logs(**wrong):
                pytest.fail(f"{wrong} was taken")
        with logs(recompiles=True) as inner:
            compile_with_a_break()
        assert (outer, inner) == ([], [])
        compile_with_a_break()
    assert [artifact for artifact, _ in outer] == ["graph_breaks"]


def child_logs():
    """In a process with TORCH_LOGS of its own: what is collected, and what is then switched on."""
    compile_with_a_break()
    print("collecting", flush=True)
    with logs(recompiles=True) as recompiles:
        compile_with_a_break()
        eager(breaks_once, dynamic=False)(torch.ones(4))
    print("collecting", flush=True)
    compile_with_a_break()
    report(collected={artifact for artifact, _ in recompiles} == {"recompiles"}, variable=os.environ["TORCH_LOGS"])


def test_a_readers_own_torch_logs_stay_on():
    with Child(child_logs, env={"TORCH_LOGS": "graph_breaks"}) as child:
        assert child.result() == {"collected": True, "variable": "graph_breaks"}
        before, between, after = child.output().split("collecting\n")
    assert ("Graph break" in before, between, "Graph break" in after) == (True, "", True)


# --- caches


def test_an_empty_cache_is_a_folder_of_its_own_and_goes(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    with fresh_cache():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert folder.parent == tmp_path
        assert Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(folder)
        with watch() as seen:
            compiled = torch.compile(lambda x: (x.sin() + 1).sum())
            compiled(torch.ones(10))
        assert (seen.counters["inductor"]["fxgraph_cache_miss"], seen.kernels) == (1, 1)
        assert list(folder.iterdir())
    assert compiled(torch.zeros(10)) == 10  # it still works
    assert not folder.exists()
    with suppress(KeyboardInterrupt), fresh_compiler():
        (folder,) = tmp_path.iterdir()
        raise KeyboardInterrupt
    assert not folder.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
