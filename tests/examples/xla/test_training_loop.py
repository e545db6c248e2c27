"""The training loop: its programs counted, its losses held to float64, what reading costs; and bad input."""

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
from studies.xla.training_loop import LOOP
from tests.quiet import ran

XLA = "torch_xla>=2.9"
# Of no size that the demo counts.
SMALL = replace(CONFIG, width=12, hidden=20, vocab=7, max_tokens=5)


@pytest.fixture(scope="module")
def record():
    return ran(training_loop.demo, needs=XLA).record


@pytest.fixture(scope="module", autouse=True)
def device():
    return xla.device()  # before any backward pass on the CPU


def test_all_is_right_with_one_program_for_each_shape(record):
    assert len(record.checks) == 5
    assert {check["what"].partition(":")[0] for check in record.checks} >= {EAGER, LAZY, OPENXLA}
    told = record.facts[f"an epoch of {FIRST} batches and a smaller one"]
    assert told[LAZY]["compiled"] == "[1, 0, 0, 0, 0, 0, 1]"
    assert told[f"{LAZY}, drop_last"]["compiled"] == "[0, 0, 0, 0, 0, 0]"
    assert told[f"{LAZY}, AdamW makes its state"]["compiled"] == "[1, 0, 0, 0, 0, 0]"
    assert told[LAZY]["run by the last"] == 1
    openxla = told[OPENXLA]
    assert openxla["run by the last"] > 1  # forward, backward and the optimizer, one by one
    assert openxla["compiled"].endswith("0, 0, 0, 0]")


def test_what_reading_costs(record):  # after the lesson, which compiles what it reads
    studied = ran(study.study, needs=XLA, lesson=[]).record
    told = studied.facts[f"{LOOP} steps, reading"]
    counts = {what: (each["compiled"], each["run"], each["fetched"]) for what, each in told.items()}
    assert counts == {"nothing": (0, LOOP, 0), "the losses": (0, LOOP, LOOP), "their mean": (1, 2 * LOOP, LOOP)}
    rates = studied.facts[f"{LOOP} steps, each with its own learning rate"]
    assert rates == {"compiled": 0, "run": LOOP, "compiled at a rate of 1e-7": 1}


@given(rows=st.integers(1, 40), tokens=st.integers(3, 12), vocab=st.integers(2, 50))
def test_sequences_follow_their_rule(rows, tokens, vocab):
    made = sequences(rows, tokens, vocab, torch.Generator().manual_seed(rows))
    assert made.shape == (rows, tokens)
    assert torch.equal(made[:, 2:], (made[:, 1:-1] + 2 * made[:, :-2] + 3) % vocab)


def test_bad_input():
    tokens = torch.zeros(8, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"Trainer: tokens are on cpu; pass tokens\.to\('xla:0'\)"):
        lazy(SMALL)(tokens)
    with pytest.raises(ValueError, match="Trainer: tokens are on xla:0; pass"):
        eager(SMALL)(tokens.to(xla.device()))
    xla.settle()
