"""The training loop: its programs counted, its losses held to float64, its checkpoint read elsewhere; and bad input."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common import xla
from examples.xla import training_loop
from examples.xla.training_loop import EAGER, FIRST, LAZY, OPENXLA, eager, lazy
from examples.xla.training_loop_model import CONFIG, sequences
from studies.xla import training_loop as study
from studies.xla.training_loop import EARLY, LOOP, PARTS, micro_batches
from studies.xla.training_loop_checkpoint import load, resume, save
from tests.quiet import ran

XLA = "torch_xla>=2.9"
# Of no size that the demo counts.
SMALL = replace(CONFIG, width=12, hidden=20, vocab=7, max_tokens=5)


@pytest.fixture(scope="module")
def record():
    return ran(training_loop.demo, needs=XLA).record


@pytest.fixture(scope="module")
def studied(record):  # after the lesson, which compiles what it reads
    return ran(study.study, needs=XLA, lesson=[]).record


@pytest.fixture(scope="module", autouse=True)
def device():
    return xla.device()  # before any backward pass on the CPU


def data(rows: int = 8, tokens: int = 5) -> torch.Tensor:
    return sequences(rows, tokens, SMALL.vocab, torch.Generator().manual_seed(1))


def test_all_is_right(record, studied):
    assert (len(record.checks), len(studied.checks)) == (5, 3)
    assert {check["what"].partition(":")[0] for check in record.checks} >= {EAGER, LAZY, OPENXLA}


def test_one_program_for_each_shape(record):
    told = record.facts[f"an epoch of {FIRST} batches and a smaller one"]
    assert told[LAZY]["compiled"] == "[1, 0, 0, 0, 0, 0, 1]"
    assert told[f"{LAZY}, drop_last"]["compiled"] == "[0, 0, 0, 0, 0, 0]"
    assert told[f"{LAZY}, AdamW makes its state"]["compiled"] == "[1, 0, 0, 0, 0, 0]"
    assert told[LAZY]["run by the last"] == 1
    openxla = told[OPENXLA]
    assert openxla["run by the last"] > 1  # forward, backward and the optimizer, one by one
    assert openxla["compiled"].endswith("0, 0, 0, 0]")


def test_what_reading_costs(studied):
    told = studied.facts[f"{LOOP} steps, reading"]
    counts = {what: (each["run"], each["fetched"]) for what, each in told.items()}
    assert counts == {
        "nothing": (LOOP, 0), "the losses": (LOOP, LOOP), "the losses, every 4 steps": (LOOP, LOOP // 4),
        "their mean": (2 * LOOP, LOOP), EARLY: (2 * LOOP, LOOP),
    }  # fmt: skip
    assert [each["compiled"] for each in told.values()] == [0, 0, 0, 1, 1]
    assert told["their mean"]["bytes"] == 4 * LOOP
    assert told["the losses"]["bytes"] == 4 * LOOP * 30 * 16
    assert studied.facts["matrix products"]["of its forward pass"] == 4 * CONFIG.layers + 2 * CONFIG.layers + 1


def test_accumulation(studied):
    whole, each, loop = studied.facts[f"gradients of 30 rows in {PARTS} parts"].values()
    assert (whole["compiled"], whole["run"], whole["loops"]) == (1, 1, 0)
    assert (each["compiled"], each["run"], each["loops"]) == (2, PARTS + 1, 0)
    assert (loop["compiled"], loop["run"], loop["loops"]) == (2, 2, 1)
    assert whole["products in the largest"] == PARTS * each["products in the largest"]
    assert loop["products in the largest"] == each["products in the largest"]


def test_save_and_load(tmp_path):
    trainer = lazy(SMALL)
    given = data(4)
    trainer(given.to(trainer.device))
    path = tmp_path / "checkpoint.pt"
    save(trainer, path)
    state = load(path)
    moments = [t for each in state["optimizer"]["state"].values() for t in each.values()]
    assert {t.device.type for t in [*state["model"].values(), *moments]} == {"cpu"}
    resumed = eager(SMALL)
    resume(resumed, state)
    resumed(given)
    assert {float(each["step"]) for each in state["optimizer"]["state"].values()} == {1.0}  # not those that go on
    resume(resumed, state)
    torch.testing.assert_close(resumed(given), trainer(given.to(trainer.device)).cpu(), rtol=1e-4, atol=1e-5)


@given(parts=st.integers(1, 8), rows=st.integers(1, 8), tokens=st.integers(3, 12), vocab=st.integers(2, 50))
def test_sequences_follow_their_rule_and_are_cut_into_parts(parts, rows, tokens, vocab):
    made = sequences(parts * rows, tokens, vocab, torch.Generator().manual_seed(rows))
    assert made.shape == (parts * rows, tokens)
    assert torch.equal(made[:, 2:], (made[:, 1:-1] + 2 * made[:, :-2] + 3) % vocab)
    cut = micro_batches(made, parts)
    assert [len(each) for each in cut] == [rows] * parts
    assert torch.equal(torch.cat(cut), made)


def test_bad_input():
    with pytest.raises(ValueError, match="micro_batches: 8 rows in 3 parts; pass a divisor of the rows"):
        micro_batches(data(8), 3)
    with pytest.raises(ValueError, match=r"Trainer: tokens are on cpu; pass tokens\.to\('xla:0'\)"):
        lazy(SMALL)(data())
    with pytest.raises(ValueError, match="Trainer: tokens are on xla:0; pass"):
        eager(SMALL)(data().to(xla.device()))
    xla.settle()
