"""logging_and_hints: each switch shows what was planted, and one that does not fails the run."""

import re
from pathlib import Path

from harness.settings import settings_kept

import pytest
import torch

from examples.compiler import logging_and_hints as lah
from examples.compiler.logging_and_hints import ARTIFACTS, SCALES, NothingShown, line_of, recorded
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
    rows = {switch: answer for _, switch, answer in lah.artifacts_of(*in_process)}
    assert rows["TORCH_LOGS=graph_breaks"].startswith(f"line {line_of('print(')}: ")
    assert rows["TORCH_LOGS=recompiles"].startswith(f"scale == {SCALES[0]} no longer held")
    assert "_cdist_forward" in rows["TORCH_LOGS=perf_hints"]
    assert re.search(r"fusing op\d", rows["TORCH_LOGS=fusion"])
    assert "gelu" in rows["TORCH_LOGS=output_code"]
    assert sum(artifact == "recompiles" for artifact, _ in records) == 1
    monkeypatch.setattr(lah, "artifacts_in_process", lambda _: in_process[:2])
    lah.demo(h)
    h.finish()
    assert f"graph_breaks: line {line_of('print(')}; recompiles: scale == {SCALES[0]} no longer held" in h.record.answer


@pytest.mark.parametrize(
    ("artifact", "complaint"),
    [
        ("graph_breaks", "graph_breaks does not name line"),
        ("recompiles", "recompiles: "),
        ("guards", "none of 0 cache entries checks scale"),
        ("output_code", "output_code has the kernels"),
        ("perf_hints", "perf_hints: "),
        ("fusion", "nothing of 0 records fuses"),
        ("cudagraphs", "not skipped on a CPU"),
        ("another line", "graph_breaks does not name line"),
    ],
)
def test_an_artifact_that_says_nothing_fails(in_process, artifact, complaint):
    records, skips, gpu = in_process
    if artifact == "cudagraphs":
        skips, gpu = 0, False
    elif artifact == "another line":
        records = [(name, text.replace(f"{FILE}:{line_of('print(')}", f"{FILE}:1")) for name, text in records]
    with pytest.raises(NothingShown, match=complaint):
        lah.artifacts_of([record for record in records if record[0] != artifact], skips, gpu)


SKIPPED = (
    f'skipping cudagraphs due to mutated inputs (1 instances). Found from : \n   File "/x/{FILE}", line 7, in step\n'
)


def test_cuda_graphs_on_a_gpu(in_process):
    records = [record for record in in_process[0] if record[0] != "cudagraphs"]
    rows = lah.artifacts_of([*records, ("cudagraphs", SKIPPED)], 1, gpu=True)
    (answer,) = (answer for _, switch, answer in rows if switch == "TORCH_LOGS=cudagraphs")
    assert answer == "skipping cudagraphs due to mutated inputs (1 instances): line 7"
    with pytest.raises(NothingShown, match="cudagraphs: "):
        lah.artifacts_of(records, 1, gpu=True)


def test_artifacts_that_exist_and_those_that_do_not():
    with recorded(*ARTIFACTS) as records:
        assert records == []
    for names, hint in (
        (("fusions",), r"'fusions'; did you mean 'fusion'\?"),
        (("recompiles", "guard"), r"'guard'; did you mean 'guards'\?"),
        (("zzz",), "TORCH_LOGS=help lists them"),
    ):
        with pytest.raises(ValueError, match=f"recorded: torch has no log artifact .*{hint}"), recorded(*names):
            pass
    with pytest.raises(ValueError, match=r"^mine$"), recorded("fusion"):
        raise ValueError("mine")


def test_the_step_is_the_same_in_float64(h):
    x, w, count = h.randn(5, 5), h.randn(5, 5, scale=5**-0.5), torch.zeros(3, device=h.device)
    got, want = lah.step(x, w, count, SCALES[-1]), lah.reference(x, w, count)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-5)
    assert count.tolist() == [1, 1, 1]
