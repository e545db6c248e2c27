"""logging_and_hints: each switch shows what was planted, and one that does not fails the run."""

import re
from pathlib import Path

from harness.settings import settings_kept

import pytest

from examples.common.shown import NotShown
from examples.compiler import logging_and_hints as lah
from examples.compiler.logging_and_hints import SCALES, line_of
from examples.compiler.logging_and_hints_environ import breaks_logged
from tests.quiet import quiet

FILE = Path(lah.__file__).name


@pytest.fixture(scope="module")
def in_process():
    """(records, skips, gpu) of the artifacts, collected for real, once."""
    h = quiet()
    with settings_kept("logging_and_hints", 0):
        records, skips = lah.artifacts_in_process(h)
    assert h.record.checks[0]["passed"]
    return records, skips, h.device.type == "cuda"


def test_the_artifacts_show_what_is_planted(in_process, h, monkeypatch):
    records = in_process[0]
    shown = lah.shown_by(*in_process)
    assert shown["graph_breaks"].startswith(f"line {line_of('print(')}: ")
    assert shown["recompiles"].startswith(f"line {line_of('* scale')}, scale == {SCALES[0]} no longer held")
    assert "_cdist_forward" in shown["perf_hints"]
    assert re.search(r"fusing op\d", shown["fusion"])
    assert "gelu" in shown["output_code"]
    assert sum(artifact == "recompiles" for artifact, _ in records) == 1
    monkeypatch.setattr(lah, "artifacts_in_process", lambda _: in_process[:2])
    lah.demo(h)
    h.finish()
    for each in ("graph_breaks", "recompiles"):
        assert f"{each}: line {line_of({'graph_breaks': 'print(', 'recompiles': '* scale'}[each])}" in h.record.answer
    assert f", scale == {SCALES[0]} no longer held; fusion: fused " in h.record.answer


def test_an_artifact_that_says_nothing_fails(in_process):
    records, skips, gpu = in_process
    for artifact, complaint in {
        "graph_breaks": "graph_breaks does not name line",
        "recompiles": "recompiles: ",
        "output_code": "output_code has the kernels",
        "perf_hints": "perf_hints: ",
        "fusion": "nothing of 0 records fuses",
    }.items():
        with pytest.raises(NotShown, match=complaint):
            lah.shown_by([record for record in records if record[0] != artifact], skips, gpu)
    for name in lah.COMPONENTS:
        with pytest.raises(NotShown, match=f"{name}: no record of 0 reports"):
            lah.shown_by([record for record in records if f"torch._{name}." not in record[0]], skips, gpu)
    with pytest.raises(NotShown, match="not skipped on a CPU"):
        lah.shown_by(records, 0, gpu=False)


def test_the_environment_is_read_once_before_the_program_sets_it(h):
    x, count = h.randn(lah.N, lah.N), h.randn(8)
    late, asked = breaks_logged(lah.step, x, x, count, 2).values()
    assert (late, asked) == (0, 1)
    with pytest.raises(NotShown, match="breaks logged: "):
        breaks_logged(lambda x: x + 1, x)  # which has no break to log


def test_cuda_graphs_on_a_gpu(in_process):
    skipped = "skipping cudagraphs due to mutated inputs (1 instances)"
    text = f'{skipped}. Found from : \n   File "/x/{FILE}", line 7, in step\n'
    records = [record for record in in_process[0] if record[0] != "cudagraphs"]
    assert lah.shown_by([*records, ("cudagraphs", text)], 1, gpu=True)["cudagraphs"] == f"{skipped}: line 7"
    with pytest.raises(NotShown, match="cudagraphs: "):
        lah.shown_by(records, 1, gpu=True)
