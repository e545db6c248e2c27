"""The training loop: its programs counted, its losses held to float64, its checkpoint read elsewhere; and bad input."""

import math
from dataclasses import replace

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from examples.common import xla
from examples.xla import training_loop
from examples.xla.training_loop import EAGER, FIRST, LAZY, OPENXLA, Trainer, eager, lazy, watched
from examples.xla.training_loop_model import CONFIG, LanguageModel, batches, sequences
from studies.xla import training_loop as study
from studies.xla import training_loop_checkpoint as checkpoint
from studies.xla.training_loop import EARLY, LOOP, PARTS, micro_batches
from studies.xla.training_loop_checkpoint import load, resume, save

# Of no size that the demo counts.
SMALL = replace(CONFIG, width=12, hidden=20, vocab=7, max_tokens=5)


def quiet(**options) -> Harness:
    options = {"timing": False, **options}
    return Harness("training_loop", Needs.parse("torch_xla>=2.9"), console=Console(quiet=True), **options)


def ran(fn, **options):
    h = quiet(**options)
    with settings_kept("training_loop", seed=0):
        fn(h)
    assert all(check["passed"] for check in h.record.checks)
    return h.record


@pytest.fixture(scope="module")
def record():
    return ran(training_loop.demo)


@pytest.fixture(scope="module")
def studied(record):  # after the lesson, which compiles what it reads
    return ran(study.study, lesson=[])


@pytest.fixture(scope="module")
def continued():
    return ran(checkpoint.study, lesson=[])


@pytest.fixture(scope="module", autouse=True)
def device():
    return xla.device()  # before any backward pass on the CPU


def data(rows: int = 8, tokens: int = 5) -> torch.Tensor:
    return sequences(rows, tokens, SMALL.vocab, torch.Generator().manual_seed(1))


def test_all_is_right(record, studied, continued):
    what = [check["what"] for check in record.checks]
    assert len(what) == 5
    for way in (EAGER, LAZY, OPENXLA):
        assert any(each.startswith(f"{way}: losses") for each in what)
    assert len(studied.checks) == 3
    what = [check["what"] for check in continued.checks]
    assert what[0] == "logits without torch_xla"
    assert what[1:] == [f"losses, {way}" for way in ("not interrupted", "loaded here", "loaded without torch_xla")]


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


def test_without_a_sync(studied):
    told = studied.facts["without a sync"]
    first, second, third = map(int, told["nodes recorded after steps 1, 2, 3"].strip("[]").split(","))
    assert second - first == third - second > 0.8 * first
    assert told["run"] == 0


def test_accumulation(studied):
    whole, each, loop = studied.facts[f"gradients of 30 rows in {PARTS} parts"].values()
    assert (whole["compiled"], whole["run"], whole["loops"]) == (1, 1, 0)
    assert (each["compiled"], each["run"], each["loops"]) == (2, PARTS + 1, 0)
    assert (loop["compiled"], loop["run"], loop["loops"]) == (2, 2, 1)
    assert whole["products in the largest"] == PARTS * each["products in the largest"]
    assert loop["products in the largest"] == each["products in the largest"]


def test_it_learns(continued):
    told = continued.facts["learning"]
    assert told["loss, last tenth"] < 0.5 < told["by guessing"] == round(math.log(CONFIG.vocab), 3)
    assert told["right on unseen sequences"] > 0.8
    steps = continued.facts["160 steps, each with its own learning rate"]
    assert (steps["compiled"], steps["run"], steps["fetched"]) == (0, 160, 0)
    assert 2 * 160 < steps["sent"] <= 4 * 160  # a batch and the numbers that follow from the learning rate
    assert steps["compiled at a rate of 1e-7"] == 1


def test_checkpoint(studied, continued):
    told = continued.facts["the process that loads"]
    assert told["torch_xla imported"] is False
    assert told["torch.load of XLA tensors"].startswith(
        "NotImplementedError: Could not run 'aten::empty.memory_format'"
    )
    assert told["with map_location"] == "works"
    assert "INTERNAL ASSERT FAILED" in told["XLA's backward, after one on the CPU"]
    assert continued.facts["compiled to go on here"] == 0
    seeds = studied.facts["random numbers"]
    assert seeds["the state of a checkpoint twice"] == "the same"
    assert seeds["torch_xla.manual_seed twice"] == "the same"
    assert seeds["torch.manual_seed"].startswith("others")
    assert seeds["on the CPU"] == "others"


def test_a_second_loop_compiles_nothing():
    given = data(4)
    first, again = (watched(lazy(SMALL), [given, given])[0] for _ in range(2))
    _, seen = watched(lazy(SMALL), [given, given])
    assert [ran.compiles for ran in seen] == [0, 0]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_save_and_load(tmp_path):
    trainer = lazy(SMALL)
    given = data(4)
    trainer(given.to(trainer.device))
    path = tmp_path / "checkpoint.pt"
    save(trainer, path)
    state = load(path)
    assert set(state) == {"model", "optimizer", "xla_rng"}
    moments = [t for each in state["optimizer"]["state"].values() for t in each.values()]
    assert {t.device.type for t in [*state["model"].values(), *moments]} == {"cpu"}
    assert {float(each["step"]) for each in state["optimizer"]["state"].values()} == {1.0}
    resumed = eager(SMALL)
    resume(resumed, state)
    resumed(given)
    assert {float(each["step"]) for each in state["optimizer"]["state"].values()} == {1.0}  # not those that go on
    resume(resumed, state)
    torch.testing.assert_close(resumed(given), trainer(given.to(trainer.device)).cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("content", "missing"),
    [({"model": {}}, "no optimizer"), ([1], "no model and no optimizer"), ({}, "no model and no optimizer")],
)  # fmt: skip
def test_load_says_what_is_missing(tmp_path, content, missing):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=rf"load: .*other\.pt holds {missing}.*; pass a file of save"):
        load(tmp_path / "other.pt")


@given(rows=st.integers(1, 9), tokens=st.integers(3, 12), vocab=st.integers(2, 50))
def test_sequences_follow_their_rule(rows, tokens, vocab):
    made = sequences(rows, tokens, vocab, torch.Generator().manual_seed(rows))
    assert made.shape == (rows, tokens)
    assert torch.equal(made[:, 2:], (made[:, 1:-1] + 2 * made[:, :-2] + 3) % vocab)


@given(size=st.integers(1, 60), rows=st.integers(1, 60), drop_last=st.booleans())
def test_batches(size, rows, drop_last):
    whole = torch.arange(size)
    if rows > size:
        with pytest.raises(ValueError, match=rf"batches: {rows} rows of {size}; pass 1 to {size}"):
            batches(whole, rows)
        return
    made = list(batches(whole, rows, drop_last))
    assert torch.equal(torch.cat(made), whole[: size // rows * rows] if drop_last else whole)
    assert {len(each) for each in made[:-1]} <= {rows}


@given(parts=st.integers(1, 8), rows=st.integers(1, 8))
def test_micro_batches(parts, rows):
    tokens = torch.arange(parts * rows).view(-1, 1)
    made = micro_batches(tokens, parts)
    assert [len(each) for each in made] == [rows] * parts
    assert torch.equal(torch.cat(made), tokens)


@pytest.mark.parametrize("parts", [0, 3, -2, 16])
def test_uneven_micro_batches(parts):
    with pytest.raises(ValueError, match=rf"micro_batches: 8 rows in {parts} parts; pass a divisor of the rows"):
        micro_batches(data(8), parts)


def test_bad_tokens():
    model = LanguageModel(SMALL)
    with pytest.raises(TypeError, match=r"LanguageModel: tokens are torch\.int32; pass tokens\.long\(\)"):
        model(data().int())
    for shape in ((4,), (4, 2), (4, SMALL.max_tokens + 2)):
        with pytest.raises(ValueError, match=r"LanguageModel: tokens are .*; pass \[batch, 3\.\.6\]"):
            model(torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match="sequences: 2 tokens a row"):
        sequences(1, 2, 7, torch.Generator())


def test_bad_trainers():
    with pytest.raises(ValueError, match="Trainer: the model has no parameters"):
        Trainer(nn.ReLU())
    with pytest.raises(ValueError, match=r"Trainer: tokens are on cpu, the model on xla:0; pass tokens\.to"):
        lazy(SMALL)(data())
    with pytest.raises(ValueError, match="Trainer: tokens are on xla:0, the model on cpu"):
        eager(SMALL)(data().to(xla.device()))
    xla.settle()
