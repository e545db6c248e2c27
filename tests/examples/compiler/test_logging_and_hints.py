"""logging_and_hints: each switch shows what was planted, and one that does not fails the run."""

import re
from pathlib import Path

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.compiler import logging_and_hints as lah
from examples.compiler.logging_and_hints import ARTIFACTS, SCALES, NothingShown, line_of, recorded

FILE = Path(lah.__file__).name


def make_harness(**options):
    return Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False, **options)


@pytest.fixture
def h():
    return make_harness()


@pytest.fixture(scope="module")
def in_process():
    """(records, skips, harness) of the artifacts, collected for real, once."""
    h = make_harness()
    with settings_kept("logging_and_hints", 0):
        records, skips = lah.artifacts_in_process(h)
    return records, skips, h


@given(n=st.integers(1, 40), scale=st.floats(-3, 3), seed=st.integers(0, 99))
def test_step_is_right(n, scale, seed):
    h = make_harness(seed=seed)
    x, w, count = h.randn(n, n), h.randn(n, n, scale=n**-0.5), torch.zeros(3, device=h.device)
    got = lah.step(x, w, count, scale)
    want = lah.step(x.double(), w.double(), count.double(), scale)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-5)
    assert count.tolist() == [1, 1, 1]


def test_the_artifacts_show_what_is_planted(in_process):
    records, skips, h = in_process
    assert h.record.checks[0]["passed"]
    rows = {switch: answer for _, switch, answer in lah.artifacts_of(records, skips, h.device.type == "cuda")}
    assert rows["TORCH_LOGS=graph_breaks"].startswith(f"line {line_of('print(')}: ")
    assert rows["TORCH_LOGS=recompiles"].startswith(f"scale == {SCALES[0]} no longer held")
    assert "_cdist_forward" in rows["TORCH_LOGS=perf_hints"]
    assert re.search(r"fusing op\d", rows["TORCH_LOGS=fusion"])
    assert "gelu" in rows["TORCH_LOGS=output_code"]
    assert sum(artifact == "recompiles" for artifact, _ in records) == 1


@pytest.mark.parametrize(
    ("artifact", "complaint"),
    [
        ("graph_breaks", "graph_breaks does not name line"),
        ("recompiles", "recompiles: "),
        ("guards", "none of 0 cache entries checks scale"),
        ("output_code", "output_code has the kernels"),
        ("perf_hints", "perf_hints: "),
        ("fusion", "nothing of 0 records fuses"),
    ],
)
def test_an_artifact_that_says_nothing_fails(in_process, artifact, complaint):
    records, skips, h = in_process
    with pytest.raises(NothingShown, match=complaint):
        lah.artifacts_of([record for record in records if record[0] != artifact], skips, h.device.type == "cuda")


def test_the_break_of_another_line_is_not_it(in_process):
    records, skips, h = in_process
    place = f"{FILE}:{line_of('print(')}"
    with pytest.raises(NothingShown, match="graph_breaks does not name line"):
        lah.artifacts_of(
            [(name, text.replace(place, f"{FILE}:1")) for name, text in records], skips, h.device.type == "cuda"
        )


def test_cuda_graphs_that_were_not_skipped_fail(in_process):
    records, _, _ = in_process
    with pytest.raises(NothingShown, match="not skipped on a CPU"):
        lah.artifacts_of(records, 0, gpu=False)


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


# Names of artifacts.


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (("fusions",), r"recorded: torch has no log artifact 'fusions'; did you mean 'fusion'\?"),
        (("recompiles", "guard"), r"recorded: torch has no log artifact 'guard'; did you mean 'guards'\?"),
        (("zzz",), "TORCH_LOGS=help lists them"),
    ],
)
def test_what_is_no_artifact(names, hint):
    with settings_kept("test", 0), pytest.raises(ValueError, match=hint), recorded(*names):
        pass


def test_every_artifact_of_this_file_exists():
    with settings_kept("test", 0), recorded(*ARTIFACTS) as records:
        assert records == []


def test_an_error_of_the_body_is_not_an_artifacts():
    with pytest.raises(ValueError, match=r"^mine$"), recorded("fusion"):
        raise ValueError("mine")


def test_profiling_does_nothing(h):
    h.profile = True
    lah.demo(h)
    assert not h.record.facts


def test_the_demo_answers_with_what_is_planted(monkeypatch, in_process):
    monkeypatch.setattr(lah, "artifacts_in_process", lambda _: in_process[:2])
    h = make_harness()
    lah.demo(h)
    h.finish()
    assert f"graph_breaks: line {line_of('print(')}; recompiles: scale == {SCALES[0]} no longer held" in h.record.answer
