"""Numerics: settings put back, errors against float64, results that repeat and that do not."""

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.compiler.numerics import (
    CALLS,
    NAMES,
    PRECISIONS,
    deterministic,
    distinct,
    matmul_precision,
    off_by,
    precision_kept,
    readings,
    share_differing,
    show_determinism,
    show_precision,
    show_random,
    show_rounding,
    ways_to_set,
    within,
)


@pytest.fixture
def h():
    torch.compiler.reset()
    yield Harness("numerics", Needs.parse("torch"), console=Console(quiet=True), timing=False)
    torch.compiler.reset()


def test_demo(h):
    from examples.compiler.numerics import demo

    with settings_kept("numerics", 0):
        demo(h)
    facts = h.record.facts
    product = facts["float32 product"]
    assert [each["compilations"] for each in product.values()] == [1, 1, 0]
    assert product["high"]["guards that failed"] == ["GLOBAL_STATE changed: allow_tf32"]
    assert all(each["compiled differs"] == 0 for each in product.values())
    assert product["highest"]["compiled error"] < 1e-6
    errors = facts["rms error from float64"]
    assert set(errors) == {f"{dtype} {name}" for dtype in ("float32", "bfloat16") for name in NAMES}
    for name in ("layer norm", "gelu", "multiply-add"):  # a rounding to bfloat16 that is left out is an error less
        entry = errors[f"bfloat16 {name}"]
        assert entry["compiled error"] < entry["eager error"]
        assert entry["compiled differs"] > 0
    assert all(each["compiled error"] < 1e-5 for name, each in errors.items() if name.startswith("float32"))
    again = facts[f"different results of index_add in {CALLS} calls"]
    assert again["torch eager, deterministic"] == again["torch.compile, deterministic"] == 1
    dropout = facts["dropout from one seed"]
    assert dropout["fallback_random False"]["same as eager"] < 0.8
    assert dropout["fallback_random True"]["same as eager"] == 1
    assert all(each["same again"] for each in dropout.values())
    if h.device.type == "cpu":
        assert errors["float32 multiply-add"]["compiled differs"] == 0
        if torch.__version__ >= "2.13":
            assert errors["bfloat16 transformer"]["emulated differs"] < 0.01


def test_what_each_setting_reads_as():
    with settings_kept("ways_to_set", 0):
        said = ways_to_set()
    old, new = "torch.get_float32_matmul_precision()", "cuda.matmul.fp32_precision"
    assert said["as found"] == readings()
    for precision in PRECISIONS:
        assert said[f'set_float32_matmul_precision("{precision}")'][old] == precision
    assert said['set_float32_matmul_precision("high")'][new] == "tf32"
    assert said['set_float32_matmul_precision("medium")']["mkldnn.matmul.fp32_precision"] == "bf16"
    assert said["allow_tf32 = True"] | {"mkldnn.matmul.fp32_precision": ""} == {
        old: "high", "cuda.matmul.allow_tf32": "True", new: "tf32", "mkldnn.matmul.fp32_precision": "",
    }  # fmt: skip
    assert said['fp32_precision = "tf32"'][old] == "RuntimeError"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_is_put_back(precision):
    before = readings()
    with matmul_precision(precision):
        assert torch.get_float32_matmul_precision() == precision
    assert readings() == before
    with matmul_precision("high"):
        outer = readings()
        with pytest.raises(KeyError), matmul_precision(precision):
            raise KeyError
        assert readings() == outer
    with precision_kept():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert readings() == before


def test_determinism_is_put_back():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(ZeroDivisionError):
        within(deterministic, lambda: 1 / 0)()
    assert not torch.are_deterministic_algorithms_enabled()


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_distinct_counts_values(values):
    queue = iter(values)
    assert distinct(lambda: torch.tensor([float(next(queue))]), calls=len(values)) == len(set(values))


def test_distinct_keeps_no_reference():
    """A result whose memory the next call overwrites, as a CUDA graph's, still counts."""
    memory = torch.zeros(3)
    assert distinct(lambda: memory.add_(1), calls=5) == 5


def test_measures():
    want = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert off_by(want.float(), want) == 0
    assert off_by(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert share_differing(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])) == 0.5


def test_bad_input():
    before = readings()
    with pytest.raises(ValueError, match=r"matmul_precision: 'higher' is not one of \('highest', 'high', 'medium'\)"):
        matmul_precision("higher").__enter__()
    with pytest.raises(ValueError, match="distinct: 1 calls; it takes two"):
        distinct(lambda: torch.ones(1), calls=1)
    assert readings() == before


@pytest.mark.gpu
def test_tf32_on_the_gpu(h):
    if h.machine.capability < (8, 0):
        pytest.skip("no TF32 before sm_80")
    show_precision(h)
    product = h.record.facts["float32 product"]
    for name in ("high", "medium"):
        assert product[name]["compiled error"] > 20 * product["highest"]["compiled error"]


@pytest.mark.gpu
def test_emulation_on_the_gpu(h):
    """Nearer to eager than what is not emulated, and at least one operation to the bit."""
    show_rounding(h)
    errors = {n: e for n, e in h.record.facts["rms error from float64"].items() if n.startswith("bfloat16")}
    assert errors["bfloat16 multiply-add"]["emulated differs"] < errors["bfloat16 multiply-add"]["compiled differs"]


@pytest.mark.gpu
def test_contraction_on_the_gpu(h):
    show_rounding(h)
    entry = h.record.facts["rms error from float64"]["float32 multiply-add"]
    assert entry["compiled error"] < entry["eager error"]
    assert entry["emulated differs"] == 0


@pytest.mark.gpu
def test_atomics_on_the_gpu(h):
    show_determinism(h)
    again = h.record.facts[f"different results of index_add in {CALLS} calls"]
    assert again["torch eager"] > 1
    assert again["torch eager, deterministic"] == again["torch.compile, deterministic"] == 1


@pytest.mark.gpu
def test_random_numbers_on_the_gpu(h):
    show_random(h)
    assert h.record.facts["dropout from one seed"]["fallback_random True"]["same as eager"] == 1
