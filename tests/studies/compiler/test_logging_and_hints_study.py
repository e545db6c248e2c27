"""studies/compiler/logging_and_hints: each switch shows what was planted, and one that does not fails the run."""

import json
from pathlib import Path

from harness.catalog import Needs
from harness.process import Child
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from examples.compiler import logging_and_hints as lesson
from examples.compiler.logging_and_hints import NothingShown, kernels_of, line_of
from studies.compiler import logging_and_hints as lah
from studies.compiler.logging_and_hints import STAGES, trace_events

FILE = Path(lesson.__file__).name


@pytest.fixture
def h():
    return Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False, lesson=[])


@pytest.fixture
def on_a_cpu(h):
    h.device = torch.device("cpu")
    return h


@pytest.fixture
def on_a_gpu(h):
    h.device = torch.device("cuda")
    return h


def test_a_misspelt_variable_ends_the_process():
    with Child(lah.child_step, env={"TORCH_LOGS": "fusions"}, timeout=240) as child:
        _, _, answer = lah.misspelt(child.output())
    assert "Invalid log settings: fusions" in answer
    with pytest.raises(NothingShown, match="TORCH_LOGS=fusions was taken"):
        lah.misspelt('result: {"graphs": 3}')


def test_the_variable_in_a_process():
    line = "V1120 17:56:38.8 1928 torch/_dynamo/x.py:1] [0/0] [__{}] text\n"
    both = line.format("recompiles") + 2 * line.format("graph_breaks")
    assert lah.environment(both)[2].startswith("2 lines of graph_breaks, 1 lines of recompiles")
    with pytest.raises(NothingShown, match="TORCH_LOGS printed"):
        lah.environment(line.format("recompiles"))


# What the switches of a process leave.


def kept(folder):
    """Three graphs as TORCH_COMPILE_DEBUG=1 keeps them."""
    for i in range(3):
        graph = folder / "torch_compile_debug" / "run_x" / "torchinductor" / f"model__{i}_inference_{i}.{i}"
        graph.mkdir(parents=True)
        for name in STAGES:
            (graph / name).write_text("")
        (graph / "fx_graph_readable.py").write_text(f"# File: {FILE}:{line_of('softmax')} in step")
        (graph / "ir_pre_fusion.txt").write_text("op0: SchedulerNode(ComputedBuffer)\nop1: SchedulerNode(x)\n")
        (graph / "ir_post_fusion.txt").write_text("op0_op1: FusedSchedulerNode(SchedulerNode,SchedulerNode)\n")
        mappings = {"postToCppCode": {"div": ["cpp_fused_div_0:1"], "mm": ["extern_kernels.mm:2"]}}
        (graph / "inductor_provenance_tracking_node_mappings.json").write_text(json.dumps(mappings))
    return graph.parent / "model__1_inference_1.1"


def test_the_debug_folder(h, tmp_path):
    middle = kept(tmp_path)
    (_, _, answer), graphs = lah.debug_folder(h, tmp_path)
    assert answer == f"{len(STAGES)} files for each of 3 graphs; 2 of 2 nodes became cpp_fused_div_0"
    assert graphs[-2] == middle
    assert set(h.record.facts["TORCH_COMPILE_DEBUG=1"]) == set(STAGES)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("output_code.py", None, "wrote "),
        ("fx_graph_readable.py", "nothing", "names no line"),
        ("ir_post_fusion.txt", "op0: SchedulerNode(x)", "nothing is fused"),
        ("inductor_provenance_tracking_node_mappings.json", '{"postToCppCode": {}}', "names no fused kernel"),
    ],
)
def test_a_debug_folder_that_shows_less_fails(h, tmp_path, name, text, complaint):
    file = kept(tmp_path) / name
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(NothingShown, match=complaint):
        lah.debug_folder(h, tmp_path)


def test_an_empty_debug_folder_fails(h, tmp_path):
    with pytest.raises(NothingShown, match="kept 0 graphs of 3"):
        lah.debug_folder(h, tmp_path)


TRITON = "triton_poi_fused_gelu_0 = async_compile.triton('x', '''\ndef {}(in_ptr0):\n''')\n"


def test_names_of_kernels(on_a_cpu):
    code = "cpp_fused_gelu_0 = async_compile.cpp_pybinding([])\n"
    assert "the same 1 names" in lah.kernel_names(on_a_cpu, code, code)[2]
    with pytest.raises(NothingShown, match="on a CPU"):
        lah.kernel_names(on_a_cpu, code, code.replace("gelu", "erf"))
    with pytest.raises(NothingShown, match="kernels in the generated code"):
        lah.kernel_names(on_a_cpu, code, "")


def test_names_of_kernels_on_a_gpu(on_a_gpu):
    own, common = TRITON.format("triton_poi_fused_gelu_0"), TRITON.format("triton_")
    assert "all are triton_" in lah.kernel_names(on_a_gpu, own, common)[2]
    for named, unnamed in ((own, own), (common, common)):
        with pytest.raises(NothingShown, match="UNIQUE_KERNEL_NAMES=0 left"):
            lah.kernel_names(on_a_gpu, named, unnamed)
    assert kernels_of(own) == ["triton_poi_fused_gelu_0"]


def test_a_generated_file_times_itself(on_a_cpu):
    assert "12 us a call" in lah.benchmarked(on_a_cpu, "noise\n0.000012\n")[2]
    with pytest.raises(NothingShown, match="timed nothing"):
        lah.benchmarked(on_a_cpu, "noise\n")


def test_a_generated_file_times_its_kernels_on_a_gpu(on_a_gpu):
    line = "None  POI cabc  0.004ms    \t0.001 GB \t  217.50GB/s   10 regs    0 spills        0 shared mem\n"
    assert "2 kernels: 0.004 ms at 217.50 GB/s" in lah.benchmarked(on_a_gpu, 2 * line)[2]
    with pytest.raises(NothingShown, match="timed no kernel"):
        lah.benchmarked(on_a_gpu, "No kernel with benchmark functionality found.")


def trace(*entries):
    lines = ["V1120 17:56:36.050000 1928 torch/x.py:1] " + json.dumps(e | {"frame_id": 0, "rank": 0}) for e in entries]
    return "\n\tpayload [1] {not json\n".join(lines) + "\n"


PLANTED = (
    {"inductor_output_code": {}}, {"artifact": {"name": "dynamo_graph_break_reason"}},
    {"artifact": {"name": "recompile_reasons"}}, {"compilation_metrics": {}},
)  # fmt: skip


def test_a_trace_is_counted():
    events = trace_events(trace(*PLANTED, PLANTED[0]))
    assert events == {
        "inductor_output_code": 2, "dynamo_graph_break_reason": 1, "recompile_reasons": 1, "compilation_metrics": 1,
    }  # fmt: skip


def test_a_trace_without_tlparse_says_how_to_get_it(h, tmp_path, monkeypatch):
    monkeypatch.setattr(lah, "find_tlparse", lambda: None)
    with pytest.raises(NothingShown, match="wrote no log"):
        lah.traced(h, tmp_path, tmp_path / "pages")
    (tmp_path / "a.log").write_text(trace(PLANTED[0]))  # of another process: the longer one is meant
    (tmp_path / "b.log").write_text(trace(*PLANTED))
    assert "pip install tlparse" in lah.traced(h, tmp_path, tmp_path / "pages")[2]
    (tmp_path / "b.log").write_text(trace(*PLANTED[:3]) * 2)
    with pytest.raises(NothingShown, match="TORCH_TRACE has"):
        lah.traced(h, tmp_path, tmp_path / "pages")


@pytest.mark.parametrize("works", [True, False])
def test_tlparse_is_run_where_it_is(h, tmp_path, monkeypatch, works):
    tool = tmp_path / "tlparse"
    make = 'mkdir -p "$3" && touch "$3/index.html" "$3/graph_0.txt" "$3/graph_1.txt"' if works else "echo no"
    tool.write_text(f"#!/bin/sh\n{make}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert lah.find_tlparse() == str(tool)
    (tmp_path / "a.log").write_text(trace(*PLANTED))
    if works:
        assert "tlparse made 3 pages" in lah.traced(h, tmp_path, tmp_path / "pages")[2]
        assert h.record.facts["tlparse"] == {"graph.txt": 2, "index.html": 1}
    else:
        with pytest.raises(NothingShown, match="tlparse wrote no index"):
            lah.traced(h, tmp_path, tmp_path / "pages")


@pytest.mark.slow
def test_the_technique():
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True), lesson=[])
    with settings_kept("logging_and_hints", 0):
        lah.study(h)
    answers = h.record.facts["answers"]
    assert len(answers) >= 6
    assert h.record.facts["TORCH_TRACE"]["inductor_output_code"] == 3
    assert "runs its graph" in str(answers) or torch.cuda.is_available()


@pytest.mark.gpu
def test_what_only_a_gpu_shows(h):
    h.timing = True
    with settings_kept("logging_and_hints", 0):
        lah.study(h)
    answers = " ".join(h.record.facts["answers"].values())
    assert "GB/s" in answers
    assert h.record.facts["kernel names"]["UNIQUE_KERNEL_NAMES=0"] == ["triton_"]
