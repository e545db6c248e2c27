"""The study of formats: casts on each architecture and over stretches of float32, spacing and errors, pictures."""

import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

from harness.check import CheckError
from harness.codegen import CodegenError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.fp8 import E4M3, E5M2, FORMATS
from examples.fp8.formats import LAYOUTS, cast, clamp_cast, numbers, torch_cast
from studies.fp8 import formats as study_of
from studies.fp8 import formats_picture as pictures
from studies.fp8.formats import code_for, codes_of, differing, encode, hard_cases, in_fnuz, rule_of, study
from studies.fp8.formats_picture import draw, number_line, picture, spacing, worst_errors

every_format = pytest.mark.parametrize("dtype", FORMATS)
CPU = torch.device("cpu")


@every_format
def test_numbers_round_to_themselves(dtype):
    codes = torch.arange(len(numbers(dtype)))
    for saturate in (True, False):
        assert torch.equal(encode(numbers(dtype), dtype, saturate), codes)
        assert torch.equal(encode(-numbers(dtype), dtype, saturate), codes + 128)


def test_ties_go_to_even_codes_and_beyond_the_range_to_what_is_asked():
    x = torch.tensor([1.0625, 1.1875, 2**-10, 3 * 2**-10, 464.0, 464.1, 1e30, math.inf, -math.inf, math.nan])
    assert encode(x, E4M3, saturate=False).tolist() == [0x38, 0x3A, 0, 2, 0x7E, -1, -1, -1, -1, -1]
    assert encode(x, E4M3, saturate=True).tolist() == [0x38, 0x3A, 0, 2, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, -1]
    x = torch.tensor([61439.0, 61440.0, 1e30, math.inf, -math.inf, math.nan])
    assert encode(x, E5M2, saturate=False).tolist() == [0x7B, 0x7C, 0x7C, 0x7C, 0xFC, -1]
    assert encode(x, E5M2, saturate=True).tolist() == [0x7B, 0x7B, 0x7B, 0x7B, 0xFB, -1]


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40), dtype=st.sampled_from(FORMATS))
def test_casts_agree_with_the_definition_on_any_float32(values, dtype):
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(codes_of(clamp_cast(x, dtype)), encode(x, dtype, saturate=True))


@every_format
def test_hard_cases_hold_every_number_tie_and_neighbour(dtype):
    x = hard_cases(dtype)
    assert len(x) > 2 * 2**16
    assert x.isnan().any()
    assert x.isinf().any()
    present = set(x[~x.isnan()].tolist())
    ladder = numbers(dtype)
    ties = ((ladder[1:] + ladder[:-1]) / 2).float()
    for points in (ladder, ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(1e9))):
        assert present >= set(points.tolist())
        assert present >= set((-points).tolist())


@every_format
def test_rules_of_the_casts_here(h, dtype):
    x = hard_cases(dtype).to(h.device)
    beyond = {E4M3: ("NaN", "largest"), E5M2: ("infinity",)}[dtype]  # torch 2.11 gives NaN on the CPU, 2.13 saturates
    assert rule_of("torch", torch_cast, x, dtype) in beyond
    assert rule_of("clamp", clamp_cast, x, dtype) == "largest"
    if h.machine.sm != 89:
        assert rule_of("triton", cast, x, dtype) == "largest"


def truncated(x, dtype):
    """Rounds towards zero, as clearing the bits that do not fit does."""
    kept = 2 ** (23 - LAYOUTS[dtype].mantissa_bits)
    return clamp_cast((x.view(torch.int32) // kept * kept).view(torch.float32), dtype)


def without_ties_to_even(x, dtype):
    return clamp_cast(torch.nextafter(x, torch.full_like(x, math.inf) * x.sign()), dtype)


def half_saturating(x, dtype):
    most = torch.finfo(dtype).max
    q = torch.where((x > 0) & x.isfinite(), x.clamp(max=most), x).to(dtype)
    if dtype == E4M3:  # where torch's own cast saturates
        q = torch.where(x < -2 * most, torch.full_like(x, math.nan), q.float()).to(dtype)
    return q


def by_way_of_float16(x, dtype):
    return clamp_cast(x.half().float(), dtype)


@every_format
@pytest.mark.parametrize("wrong", [truncated, without_ties_to_even, by_way_of_float16])
def test_a_cast_that_rounds_wrongly_is_found(wrong, dtype):
    with pytest.raises(CheckError, match=r"a cast to torch\.float8_\w+: \d+ of \d+ numbers are rounded wrongly"):
        rule_of("a cast", wrong, hard_cases(dtype), dtype)


@every_format
def test_a_cast_that_saturates_on_one_side_is_found(dtype):
    x = hard_cases(dtype)
    with pytest.raises(CheckError, match="some numbers beyond the range become the largest number and some do not"):
        rule_of("a cast", half_saturating, x[~x.isinf()], dtype)


@every_format
def test_a_cast_by_way_of_float16_is_right_when_that_is_said(dtype):
    assert rule_of("a cast", by_way_of_float16, hard_cases(dtype), dtype, via=torch.float16) == "largest"


@every_format
def test_stretches_of_float32(h, dtype):
    around = [torch.tensor(v).view(torch.int32).item() for v in (1.0, torch.finfo(dtype).max, 2.0**-9, math.inf, -1.0)]
    for first in around:
        assert differing(first - 500, 1000, dtype, h.device) == 0
    assert differing(-(2**31), 10, dtype, h.device) == 0
    # Near the tie above 1, float16 rounds to it what is more, and then the tie to even.
    tie = torch.tensor(1 + torch.finfo(dtype).eps / 2).view(torch.int32).item()
    assert differing(tie + 1, 100, dtype, h.device, torch.float16) == (0 if h.machine.sm == 89 else 100)


@pytest.mark.gpu
@every_format
def test_all_of_float32(h, dtype):
    via = torch.float16 if h.machine.sm == 89 else torch.float32
    step = 2**24
    assert not sum(differing(first, step, dtype, h.device, via) for first in range(-(2**31), 2**31, step))


def test_the_other_formats_of_the_same_size():
    assert in_fnuz(E4M3) == {"largest": 240.0, "codes of 256 for the same number": 1, "reads a 1 as": 0.5}
    assert in_fnuz(E5M2)["codes of 256 for the same number"] == 1


@every_format
def test_code_for_each_architecture(dtype):
    found = code_for(dtype)
    assert [found[f"sm_{sm}"] for sm in (90, 100, 120)] == ["cvt f8"] * 3
    assert found["sm_89"] == "cvt f8 by f16"
    assert "cvt" not in found["sm_80"]
    if dtype == E4M3:
        assert "refused" in found["sm_80"]


def test_code_without_a_saturating_conversion_is_an_error(monkeypatch):
    kernel = SimpleNamespace(sm=90, found={}, error=None)
    monkeypatch.setattr(study_of, "compile_for", lambda *_, **__: [kernel])
    with pytest.raises(CodegenError, match="on sm_90: no saturating conversion"):
        code_for(E4M3)


def test_number_line():
    assert number_line(E4M3, 16.0, 16) == "|" * 17
    assert number_line(E5M2, 16.0, 16) == "|" * 9 + " | | | |"
    assert number_line(E5M2, 16.0, 16).count("|") == 13


def test_spacing():
    assert [spacing(E4M3, n) for n in (-10, -9, -6, -5, 0, 8, 9)] == [None, 2**-9, 2**-9, 2**-8, 2**-3, 32.0, None]
    assert [spacing(E5M2, n) for n in (-17, -16, 0, 15, 16)] == [None, 2**-16, 0.25, 2.0**13, None]


def test_worst_errors(h):
    below, least, normal, last, beyond = (worst_errors(E4M3, range(n, n + 1), h.device)[0] for n in (-12, -9, 0, 8, 9))
    assert below == 1.0  # nothing is left of them
    assert least == pytest.approx(1 / 3, abs=1e-3)  # 1.5 * 2^-9 becomes 2 * 2^-9
    assert normal == pytest.approx(1 / 17, abs=1e-3)  # half a step of 1/8 above 1
    assert last == pytest.approx(1 / 8, abs=1e-3)  # 512 becomes 448
    assert beyond == pytest.approx(1 - 448 / 1024, abs=1e-3)


def test_picture_on_the_console(h, monkeypatch, tmp_path):
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    picture(h, tmp_path / "picture.png")
    assert h.record.facts["largest relative error where numbers are normal"] == {"e4m3fn": 0.0587, "e5m2": 0.111}
    assert any(number_line(E4M3, 16, 64) in line for line in h.record.conclusions)
    rows = h.record.facts["from 2^n up to 2^(n+1): spacing, and largest relative error of a saturating cast"]
    assert rows["2^0"] == {
        "e4m3fn spacing": "2^-3", "e4m3fn error": "5.87%", "e5m2 spacing": "2^-2", "e5m2 error": "11.10%",
    }  # fmt: skip
    assert not (tmp_path / "picture.png").exists()
    assert "with matplotlib installed" in h.record.conclusions[-1]


def test_picture_goes_where_it_is_said_to_go(h, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(pictures, "find_spec", lambda _: object())
    monkeypatch.setattr(pictures, "draw", lambda path, *_: drawn.append(path))
    picture(h, tmp_path / "picture.png")
    assert drawn == [tmp_path / "picture.png"]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_png_is_drawn(tmp_path):
    draw(tmp_path / "new" / "picture.png", range(-2, 2), {dtype: [0.1, 0.2, 0.1, 0.3] for dtype in FORMATS})
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_drawn(monkeypatch, tmp_path):
    """Without matplotlib as well: the points are those of the formats, and the figure is saved."""
    calls = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.append((name, args, kwargs))

    class Figure(Recorder):
        def __init__(self, **_):
            pass

        def subplots(self, *_):
            return Recorder(), Recorder()

    module = ModuleType("matplotlib.figure")
    module.Figure = Figure
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    draw(tmp_path / "picture.png", range(-2, 2), {dtype: [0.1, 0.2, 0.1, 0.3] for dtype in FORMATS})
    plots = [args for name, args, _ in calls if name == "plot"]
    assert [len(args[0]) for args in plots] == [126, 123]
    assert plots[0][0][-1] == 448.0
    assert plots[0][1][-1] == 32.0
    assert [args[1] for name, args, _ in calls if name == "stairs"] == [[0.25, 0.5, 1.0, 2.0, 4.0]] * 2
    assert calls[-1][0] == "savefig"


def test_study(h, monkeypatch):
    monkeypatch.setattr(study_of, "code_for", lambda dtype: {"sm_90": "cvt f8"})
    study(h)
    facts = h.record.facts
    for name in ("e4m3fn", "e5m2"):
        rules = next(rows for key, rows in facts.items() if f"numbers cast to {name} are right" in key)
        assert rules["triton"] == rules["torch after clamp"] == {"a number": "largest", "an infinity": "largest"}
    casts = next(rows for key, rows in facts.items() if key.startswith("e4m3fn: the largest"))
    assert casts["464"]["triton"] == "448"
    assert casts["nan"] == dict.fromkeys(casts["nan"], "nan")
    for name in ("e4m3fn", "e5m2"):
        twice = next(value for key, value in facts.items() if key.endswith(f"on the way to {name}, end elsewhere"))
        assert twice > 100


def test_an_architecture_that_goes_by_way_of_float16(h, monkeypatch):
    monkeypatch.setattr(study_of, "cast", by_way_of_float16)
    h.machine = replace(h.machine, capability=(8, 9))
    study_of.check_rules(h, E4M3)


def test_a_cast_of_tritons_that_does_not_saturate_is_found(h, monkeypatch):
    monkeypatch.setattr(study_of, "cast", torch_cast)
    with pytest.raises(CheckError, match=r"triton's cast to torch\.float8_e5m2 does not saturate"):
        study_of.check_rules(h, E5M2)
