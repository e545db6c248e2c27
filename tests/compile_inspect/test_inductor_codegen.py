"""The phase inductor_codegen: kernels, fusions, extern calls and fallbacks of models whose code is known."""

import pytest
import sympy
import torch
from torch import nn

from compile_inspect.graphs import copied, lower
from compile_inspect.inductor_codegen import in_words
from compile_inspect.inspecting import run_phase
from compile_inspect.models import BUNDLED
from compile_inspect.subject import Subject


def look(model, *inputs, train=False):
    phase = run_phase("inductor_codegen", Subject(model, inputs, train=train))
    assert phase.status == "passed", phase.reason
    return phase


def table(phase, title):
    return next(block for block in phase.blocks if block.kind == "table" and block.title.startswith(title))


def transposed(x, y):
    return torch.softmax(x.t() + y, dim=-1) * 2.0


def running(x):
    return torch.sort(torch.sin(x) * 2.0).values + 1.0


@pytest.fixture(scope="module")
def broken():
    model, inputs = BUNDLED["decoder"]()
    return look(model, *inputs)


def test_three_operations_are_one_kernel_and_a_product_stays_extern():
    model, inputs = BUNDLED["pointwise"]()
    facts = look(model, *inputs).facts
    (kernel,) = facts["kernels"]
    assert kernel["operations"] == ["sin", "mul", "add"]
    assert [line.split(":")[0] for line in kernel["lines"]] == ["models.py"]
    assert (facts["kernels_before"], facts["kernels_after"], facts["extern"]) == (1, 1, {})
    assert facts["bytes_after"] == 3 * 4 * 1024 * 1024  # two operands, one result
    assert facts["language"] == "cpp"
    assert facts["claims"] == {
        "sin_mul_add": 1, "linear_relu": {"extern": {"extern_kernels.addmm": 1}, "generated": 1}
    }  # fmt: skip


def test_graphs_of_a_broken_model(broken):
    facts = broken.facts
    assert {kernel["graph"] for kernel in facts["kernels"]} == {0, 1}
    assert facts["extern"]["extern_kernels.addmm"] == 8
    assert sum("attention" in name for name in facts["extern"]) == 1
    assert not broken.findings, "library calls are nothing to change"
    gate = next(kernel for kernel in facts["kernels"] if "silu" in kernel["operations"])
    assert (gate["calls"], gate["loops"]) == (2, 2), "both blocks call the same kernel"
    softmax = [kernel for kernel in facts["kernels"] if "_softmax" in kernel["operations"]]
    assert [kernel["graph"] for kernel in softmax] == [1]
    assert softmax[0]["loops"] > 1
    assert facts["kernels_before"] > facts["kernels_after"]
    assert facts["bytes_before"] > facts["bytes_after"] > 0
    assert facts["vector_width"] in (None, 4, 8, 16, 32)
    assert sum(facts["not_fused"].values()) > 0


def test_indexing_says_which_variable_is_contiguous():
    phase = look(transposed, torch.randn(48, 32), torch.randn(48))
    meanings = [row[2] for row in table(phase, "SymPy indexing").rows]
    assert any("a step of p1 is 32 elements" in said and "p0 is contiguous" in said for said in meanings)
    assert max(kernel["loops"] for kernel in phase.facts["kernels"]) >= 2


def test_an_index_in_words():
    p0, p1, indirect0 = sympy.symbols("p0 p1 indirect0", integer=True)
    sizes = {p0: 8, p1: 16}
    assert in_words(16 * p0 + p1, sizes) == "a step of p0 is 16 elements; p1 is contiguous"
    assert in_words(p1, sizes).startswith("the same for each p0")
    assert "division" in in_words(sympy.floor(p0 / 2) + p1, sizes)
    assert in_words(16 * indirect0 + p1, sizes).endswith("indirect0 is an index that was loaded")


def test_an_operator_without_loops_is_a_finding_with_its_line_and_time():
    phase = look(running, torch.randn(64, 512))
    (finding,) = phase.findings
    line = running.__code__.co_firstlineno + 1
    assert "sort" in finding.what
    assert finding.where == f"test_inductor_codegen.py:{line}"
    assert finding.ms > 0
    assert len(phase.facts["kernels"]) == 2, "sort keeps apart what is before and after it"


def test_training_has_a_backward_graph():
    linear = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    phase = look(linear, torch.randn(8, 16), train=True)
    assert [row[0] for row in table(phase, "from operators").rows] == ["0 forward", "1 backward"]
    assert any("tanh_backward" in kernel["operations"] for kernel in phase.facts["kernels"])


def test_nothing_to_lower_is_skipped():
    phase = run_phase("inductor_codegen", Subject(lambda x: x.tolist(), (torch.ones(3),)))
    assert phase.status == "skipped"


def test_lowering_leaves_the_model_and_the_settings_as_they_were():
    from torch._inductor import config

    def twice(x):
        return x * 2.0 + 1.0

    before = config.get_config_copy()
    x, results = torch.randn(8), []
    (lowered,) = lower(lambda backend: results.append(torch.compile(twice, backend=backend)(x)))
    assert torch.equal(results[0], twice(x))
    assert config.get_config_copy() == before
    assert [step.operations for step in lowered.after] == [["mul", "add"]]
    (lowered,) = lower(lambda backend: backend(copied(torch.fx.symbolic_trace(twice)), [x]))
    assert sorted(lowered.before[0].primitives) == ["add", "constant", "constant", "load", "mul", "output", "store"]
    torch.compiler.reset()
