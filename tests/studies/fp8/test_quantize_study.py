"""The study of quantize: what one infinity takes with it, and the price of a recipe from the lesson's tables."""

from dataclasses import replace

from harness.bench import Row, Table

from examples.fp8.quantize import RECIPES
from studies.fp8.quantize import check_bits, lost_to_one_infinity, show_price, study


def test_one_infinity_takes_what_shares_its_scale(h):
    assert lost_to_one_infinity(h) == {"tensor": 256 * 512, "row": 512, "group": 128, "block": 128 * 128}


def test_study(h, monkeypatch):
    monkeypatch.setattr(h, "codegen", lambda *args, **kwargs: [])
    study(h)
    assert len(h.record.checks) == 7 * len(RECIPES)
    assert all(check["passed"] for check in h.record.checks)


def test_the_checks_of_an_architecture_that_rounds_twice(h):
    h.machine = replace(h.machine, capability=(8, 9))
    check_bits(h, h.randn(17, 300), "group")
    scales, q = h.record.checks
    assert scales["what"].endswith("bit for bit: scales")
    assert q["what"].endswith(": q")


def test_the_price_of_a_second_pass(h):
    def row(name, ms):
        return Row(name, name == "triton", 1.0, 0.1, ms, ms, ms, 1.0, 1.0, 0.9, 4.0 / ms)

    h.lesson = [
        Table(
            "quantize",
            f"64x64 per {recipe}",
            "torch",
            [row("torch", 4.0), row("torch.compile", 2.0), row("triton", ms)],
        )
        for recipe, ms in zip(RECIPES, (1.5, 1.0, 1.0, 1.0), strict=True)
    ]
    show_price(h)
    rows = h.record.facts["triton, 64x64"]
    assert rows["tensor"] == {"of the copy ceiling": 0.9, "over torch.compile": 1.333, "ms": 1.5}
    assert "takes 1.50x the time of one per row" in h.record.conclusions[0]
