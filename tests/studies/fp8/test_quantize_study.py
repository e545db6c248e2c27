"""The study of quantize: what one infinity takes with it, and what is held to the bit where casts round twice."""

from dataclasses import replace

from studies.fp8.quantize import check_bits, lost_to_one_infinity


def test_one_infinity_takes_what_shares_its_scale(h):
    assert lost_to_one_infinity(h) == {"tensor": 256 * 512, "row": 512, "group": 128, "block": 128 * 128}


def test_the_checks_of_an_architecture_that_rounds_twice(h):
    h.machine = replace(h.machine, capability=(8, 9))
    check_bits(h, h.randn(17, 300), "group")
    scales, q = h.record.checks
    assert scales["what"].endswith("bit for bit: scales")
    assert q["what"].endswith(": q")
