"""The study of whole models in FP8: right on any machine, a wrong scale is found, and the ledger reads its record."""

from dataclasses import asdict, replace

from harness.bench import Row, Table
from harness.check import CheckError, VacuousCheck

import pytest
import torch

from companion.claims import Evidence
from companion.ledger import fp8_models
from examples.common.transformer import WIDE, Transformer
from studies.fp8 import fp8_matmul_models as models
from tests.quiet import quiet, ran

OURS = list(models.PRODUCTS)


@pytest.fixture
def bf16(h):
    return Transformer.random(models.TINY, h.device, torch.bfloat16)


def table(case, **ms):
    """Made-up times of the rows of FP8 beside 3 ms of bfloat16 compiled and 4 ms of eager."""
    times = {models.EAGER: 4.0, models.COMPILED: 3.0} | dict(zip(OURS, ms.values(), strict=True))
    rows = [Row(name, name in OURS, 1.0, 0.1, ms=t, speedup=4.0 / t, gpu_ms=t) for name, t in times.items()]
    return Table("whole models", case, models.EAGER, rows)


def test_study():
    record = ran(models.study, needs="triton, sm_89", lesson=[]).record
    weights = record.facts["MB of weights"]
    assert 0.49 < weights[models.TENSOR]["blocks"] / weights["bfloat16"]["blocks"] < 0.6
    for errors in record.facts["relative RMS error of the logits"].values():
        assert set(OURS) < set(errors)
        assert 4 * errors[models.EAGER] < min(errors[name] for name in OURS)
    assert [{row["variant"] for row in each["rows"]} >= {models.EAGER, *OURS} for each in record.tables] == [True, True]


def test_a_dropped_scale_and_one_that_is_twice_too_large_fail(bf16):
    h = quiet("triton, sm_89")
    tokens = h.randint(bf16.config.vocab, 2, 16)
    for name in (models.TENSOR, models.ROW):
        fp8 = models.in_fp8(bf16, *models.PRODUCTS[name])
        models.one_size(h, bf16, {name: fp8}, tokens)
        assert models.wrong_scale(bf16, fp8, tokens) > models.LIMIT
        good = fp8.blocks[1].down.scale.clone()
        for fault in (torch.ones_like(good), 2 * good):
            fp8.blocks[1].down.scale.copy_(fault)
            with pytest.raises(CheckError, match=f"{name}: off by"):
                models.one_size(h, bf16, {name: fp8}, tokens)
        fp8.blocks[1].down.scale.copy_(good)


def test_a_budget_that_a_wrong_scale_would_pass_is_refused(bf16, monkeypatch, h):
    monkeypatch.setattr(models, "LIMIT", 1000.0)
    fp8 = models.in_fp8(bf16, *models.PRODUCTS[models.ROW])
    before = fp8.blocks[0].down.scale.clone()
    with pytest.raises(VacuousCheck, match="a wrong scale would pass"):
        models.wrong_scale(bf16, fp8, h.randint(bf16.config.vocab, 2, 16))
    assert torch.equal(fp8.blocks[0].down.scale, before)


def test_a_product_that_is_not_supported_is_named(bf16):
    def refuses(*_):
        raise RuntimeError("no such scales\nmore")

    h = quiet()
    assert not models.takes(h, models.ROW, models.in_fp8(bf16, "row", refuses), h.randint(512, 1, 3))
    assert h.record.conclusions == ["no FP8 per row for 3 tokens here: no such scales"]


def test_the_shares_of_the_docstring():
    assert round(models.in_linears(WIDE, 4, 2048), 2) == 0.96
    blocks, every = WIDE.layers * WIDE.block_parameters, WIDE.parameters
    assert (round(2 * every / 1e9, 1), round(2 * blocks / 1e9, 1)) == (2.0, 1.7)
    assert round(2 * every / (2 * every - blocks), 1) == 1.8
    assert models.in_linears(replace(WIDE, layers=2), 1, 1) < models.in_linears(WIDE, 1, 1)


def test_conclusion_and_claim_follow_the_times():
    fast, slow = table("4x2048 tokens", a=2.0, b=1.5, c=3.0), table("1x1 tokens", a=3.0, b=4.0, c=6.0)
    assert models.conclude([fast, slow]).endswith("FP8 helps at 4x2048 tokens and not at 1x1 tokens.")
    assert models.conclude([slow]).endswith("FP8 helps at none of these sizes.")
    assert "4x2048 tokens: FP8 per tensor 1.50x, FP8 per row 2.00x, FP8 per row, fp8_matmul 1.00x" in models.conclude(
        [fast]
    )
    part = {"tables": [asdict(each) for each in (fast, slow)]}
    found = fp8_models(lambda name, study: Evidence(name, part))
    assert {case: (value.text, value.holds) for case, value in found.items()} == {
        "FP8 per tensor, 4x2048 tokens": ("1.50x", True), "FP8 per tensor, 1x1 tokens": ("1.00x", False),
        "FP8 per row, 4x2048 tokens": ("2.00x", True), "FP8 per row, 1x1 tokens": ("0.75x", False),
    }  # fmt: skip
