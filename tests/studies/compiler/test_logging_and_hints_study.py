"""studies/compiler/logging_and_hints: each switch shows what was planted, and one that does not fails the run."""

import json
from pathlib import Path

import pytest

from examples.common.shown import NotShown
from examples.compiler import logging_and_hints as lesson
from studies.compiler import logging_and_hints as lah
from studies.compiler.logging_and_hints import trace_events

FILE = Path(lesson.__file__).name


def test_what_processes_print():
    line = "V1120 17:56:38.8 1928 torch/_dynamo/x.py:1] [0/0] [__{}] text\n"
    both = line.format("recompiles") + 2 * line.format("graph_breaks")
    assert lah.environment(both)[1].startswith("2 lines of graph_breaks, 1 lines of recompiles")
    with pytest.raises(NotShown, match="TORCH_LOGS printed"):
        lah.environment(line.format("recompiles"))


def trace(*entries):
    lines = ["V1120 17:56:36.050000 1928 torch/x.py:1] " + json.dumps(e | {"frame_id": 0, "rank": 0}) for e in entries]
    return "\n\tpayload [1] {not json\n".join(lines) + "\n"


PLANTED = (
    {"inductor_output_code": {}}, {"artifact": {"name": "dynamo_graph_break_reason"}},
    {"artifact": {"name": "recompile_reasons"}}, {"compilation_metrics": {}},
)  # fmt: skip


def test_a_trace_is_counted(h, tmp_path):
    assert trace_events(trace(*PLANTED, PLANTED[0])) == {
        "inductor_output_code": 2, "dynamo_graph_break_reason": 1, "recompile_reasons": 1, "compilation_metrics": 1,
    }  # fmt: skip
    with pytest.raises(NotShown, match="wrote no log"):
        lah.traced(h, tmp_path)
    (tmp_path / "a.log").write_text(trace(PLANTED[0]))  # of another process: the longer one is meant
    (tmp_path / "b.log").write_text(trace(*PLANTED))
    assert lah.traced(h, tmp_path)[1].startswith("1 graphs in 4 events")
    (tmp_path / "b.log").write_text(trace(*PLANTED[:3]) * 2)
    with pytest.raises(NotShown, match="TORCH_TRACE has"):
        lah.traced(h, tmp_path)
