"""What an answer is made of: the call without options, beside the fastest call that a library has in its table."""

import functools

from harness.bench import check_again
from harness.catalog import load_module, topics
from harness.hardware import machine
from harness.settings import settings_kept

import pytest

from tests.test_house import MadeUp, made_up

LESSONS = {f"{each.path.parent.name}/{each.name}": each for topic in topics() for each in topic.techniques}
LESS_WORK = ("no epilogue",)  # rows that are beside a table's work, and no call that a user could make instead
# The row of the wrapper called without options, which README shows.
DEFAULTS = {
    "triton/autotune": "triton tuned", "triton/dropout": "triton", "triton/flash_attention": "triton",
    "triton/decode_attention": "triton", "triton/layer_norm": "triton", "triton/persistent_matmul": "split",
    "triton/softmax": "triton", "triton/warp_specialized_matmul": "persistent, WS", "fp8/quantize": "triton",
    "fp8/fused_gelu_quantize": "triton", "triton/skinny_matmul": "triton", "triton/weight_only_matmul": "triton int4",
    "triton/cross_entropy": "triton", "triton/rms_norm": "triton", "triton/grouped_matmul": "triton",
    "fp8/fused_layer_norm_quantize": "triton", "fp8/fp8_matmul": "triton", "fp8/blockwise_matmul": "triton",
    "fp8/fp8_attention": "triton", "fp8/llama_block": "FP8", "tma/what_is_tma": "descriptor",
    "tma/tma_copy": "pipelined", "tma/tma_matmul": "parts", "tma/tma_persistent_matmul": "triton",
    "tma/tma_epilogues": "linear", "tma/blackwell": "specialized",
}  # fmt: skip


class Kept(MadeUp):
    """Made-up times that a test sets, and the rows that the lesson names."""

    def compare(self, variants, *args, peers=(), default=None, **kwargs):
        table = super().compare(variants, *args, peers=peers, **kwargs)
        table.default = default
        return table

    def answer_of(self, **ms: float) -> str:
        """The answer where every row takes 1 ms, those that end with a given name what it says."""
        for table in self.tables:
            names, peers = [row.variant for row in table.rows], [row.variant for row in table.rows if row.peer]
            table.rows[:] = made_up(names, table.baseline, peers, [ms.get(name, 1.0) for name in names])
        return self._answer[0]()


def run(kind: type[MadeUp], name: str) -> MadeUp:
    h, module = kind(LESSONS[name]), load_module(LESSONS[name].path)
    with settings_kept(name, 0):
        module.demo(h)
    return h


lesson = functools.partial(run, Kept)


class Again(MadeUp):
    """Our kernels run once, on inputs that have moved on by an element, as after timing on a GPU."""

    def compare(
        self, variants, reference, *inputs, baseline, work, title=None, case=None, references=None, library=None,
        budgets=None, **budget,
    ):  # fmt: skip
        table = super().compare(variants, reference, *inputs, baseline=baseline, work=work, title=title, case=case)
        for option in ("peers", "timing", "wrong", "default"):
            budget.pop(option, None)
        if "max_error_ratio" not in budget:
            own = {name: fn for name, fn in variants.items() if name not in (references or {})}
            check_again(table, own, reference, inputs, budget=budget, library=library, budgets=budgets)
        return table


KERNELS = [
    name for name, each in LESSONS.items()
    if name.startswith(("fp8/", "tma/")) and each.needs.triton and not machine().lacks(each.needs)
]  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_our_rows_hold_on_other_inputs_in_the_same_memory(name):
    """A reference, or a variant, that keeps what it was made from would fail after timing, on a GPU alone."""
    run(Again, name)


@pytest.mark.parametrize("name", DEFAULTS)
def test_readme_shows_the_call_without_options(name):
    for table in lesson(name).tables:
        own = [row.variant for row in table.rows if row.ours and not row.peer]
        assert (table.default or own[0]) == DEFAULTS[name], table.title


@pytest.mark.parametrize(
    "name",
    ["triton/cross_entropy", "triton/decode_attention", "triton/dropout", "triton/grouped_matmul", "triton/layer_norm",
     "triton/rms_norm", "triton/skinny_matmul", "triton/softmax", "fp8/fp8_attention", "fp8/fused_gelu_quantize",
     "fp8/fused_layer_norm_quantize", "fp8/quantize", "tma/tma_epilogues"],
)  # fmt: skip
def test_the_ratio_is_over_the_fastest_call_of_a_library(name):
    """Each in turn takes half the time of all others; whichever it is, the answer is the less for it."""
    h = lesson(name)
    libraries = {row.variant for table in h.tables for row in table.rows if not row.ours}
    usual = h.answer_of()
    for library in libraries:
        if not library.endswith(LESS_WORK):
            assert h.answer_of(**{library: 0.5}) != usual, library


def test_blockwise_matmul_is_judged_by_the_call_without_options():
    h = lesson("fp8/blockwise_matmul")
    assert h.answer_of(pointers=0.5, **{"warp specialized": 0.5}) == h.answer_of() != h.answer_of(triton=0.5)


def test_accuracy_names_the_fastest_recipe_that_is_close_for_each_kind_of_data():
    h = lesson("fp8/accuracy")
    one, other = "float32 matmul per tensor", "float32 matmul per row"
    assert "Take per row (4.00x) for plain" in h.answer_of(**{one: 0.5, other: 0.25})
    assert "Take per tensor (2.00x) for plain" in h.answer_of(**{one: 0.5, other: 2.0})
