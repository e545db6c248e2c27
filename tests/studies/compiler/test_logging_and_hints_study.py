"""studies/compiler/logging_and_hints: each switch shows what was planted, and one that does not fails the run."""

import json
from pathlib import Path

import pytest
import torch

from examples.compiler import logging_and_hints as lesson
from examples.compiler.logging_and_hints import NothingShown, line_of
from studies.compiler import logging_and_hints as lah
from studies.compiler.logging_and_hints import STAGES, trace_events
from tests.quiet import ran

FILE = Path(lesson.__file__).name


def test_what_processes_print():
    line = "V1120 17:56:38.8 1928 torch/_dynamo/x.py:1] [0/0] [__{}] text\n"
    both = line.format("recompiles") + 2 * line.format("graph_breaks")
    assert lah.environment(both)[2].startswith("2 lines of graph_breaks, 1 lines of recompiles")
    with pytest.raises(NothingShown, match="TORCH_LOGS printed"):
        lah.environment(line.format("recompiles"))
    assert "Invalid log settings: fusions" in lah.misspelt("ValueError: Invalid log settings: fusions, see help")[2]
    with pytest.raises(NothingShown, match="TORCH_LOGS=fusions was taken"):
        lah.misspelt('result: {"graphs": 3}')


@pytest.fixture
def kept(tmp_path):
    """The second of three graphs as TORCH_COMPILE_DEBUG=1 keeps them below the folder."""
    for i in range(3):
        graph = tmp_path / "torch_compile_debug" / "run_x" / "torchinductor" / f"model__{i}_inference_{i}.{i}"
        graph.mkdir(parents=True)
        for name in STAGES:
            (graph / name).write_text("")
        (graph / "fx_graph_readable.py").write_text(f"# File: {FILE}:{line_of('softmax')} in step")
        (graph / "ir_pre_fusion.txt").write_text("op0: SchedulerNode(ComputedBuffer)\nop1: SchedulerNode(x)\n")
        (graph / "ir_post_fusion.txt").write_text("op0_op1: FusedSchedulerNode(SchedulerNode,SchedulerNode)\n")
        mappings = {"postToCppCode": {"div": ["cpp_fused_div_0:1"], "mm": ["extern_kernels.mm:2"]}}
        (graph / "inductor_provenance_tracking_node_mappings.json").write_text(json.dumps(mappings))
    return graph.parent / "model__1_inference_1.1"


def test_the_debug_folder(h, tmp_path, kept):
    (_, _, answer), graphs = lah.debug_folder(h, tmp_path)
    assert answer == f"{len(STAGES)} files for each of 3 graphs; 2 of 2 nodes became cpp_fused_div_0"
    assert graphs[-2] == kept
    assert set(h.record.facts["TORCH_COMPILE_DEBUG=1"]) == set(STAGES)
    with pytest.raises(NothingShown, match="kept 0 graphs of 3"):
        lah.debug_folder(h, tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("output_code.py", None, "wrote "),
        ("fx_graph_readable.py", "nothing", "names no line"),
        ("ir_post_fusion.txt", "op0: SchedulerNode(x)", "nothing is fused"),
        ("inductor_provenance_tracking_node_mappings.json", '{"postToCppCode": {}}', "names no fused kernel"),
    ],
)
def test_a_debug_folder_that_shows_less_fails(h, tmp_path, kept, name, text, complaint):
    (kept / name).unlink() if text is None else (kept / name).write_text(text)
    with pytest.raises(NothingShown, match=complaint):
        lah.debug_folder(h, tmp_path)


CPP = "cpp_fused_gelu_0 = async_compile.cpp_pybinding([])\n"
TRITON = "triton_poi_fused_gelu_0 = async_compile.triton('x', '''\ndef {}(in_ptr0):\n''')\n"
OWN, COMMON = TRITON.format("triton_poi_fused_gelu_0"), TRITON.format("triton_")
TIMES = "None  POI cabc  0.004ms    \t0.001 GB \t  217.50GB/s   10 regs    0 spills        0 shared mem\n"


@pytest.mark.parametrize(
    ("device", "read", "texts", "wanted"),
    [
        ("cpu", lah.kernel_names, (CPP, CPP), "the same 1 names"),
        ("cpu", lah.kernel_names, (CPP, CPP.replace("gelu", "erf")), NothingShown("on a CPU")),
        ("cpu", lah.kernel_names, (CPP, ""), NothingShown("kernels in the generated code")),
        ("cuda", lah.kernel_names, (OWN, COMMON), "all are triton_"),
        ("cuda", lah.kernel_names, (OWN, OWN), NothingShown("UNIQUE_KERNEL_NAMES=0 left")),
        ("cuda", lah.kernel_names, (COMMON, COMMON), NothingShown("UNIQUE_KERNEL_NAMES=0 left")),
        ("cpu", lah.benchmarked, ("noise\n0.000012\n",), "12 us a call"),
        ("cpu", lah.benchmarked, ("noise\n",), NothingShown("timed nothing")),
        ("cuda", lah.benchmarked, (2 * TIMES,), "2 kernels: 0.004 ms at 217.50 GB/s"),
        ("cuda", lah.benchmarked, ("No kernel with benchmark functionality found.",), NothingShown("timed no kernel")),
    ],
)
def test_generated_code(h, device, read, texts, wanted):
    h.device = torch.device(device)
    if isinstance(wanted, NothingShown):
        with pytest.raises(NothingShown, match=str(wanted)):
            read(h, *texts)
    else:
        assert wanted in read(h, *texts)[2]


def trace(*entries):
    lines = ["V1120 17:56:36.050000 1928 torch/x.py:1] " + json.dumps(e | {"frame_id": 0, "rank": 0}) for e in entries]
    return "\n\tpayload [1] {not json\n".join(lines) + "\n"


PLANTED = (
    {"inductor_output_code": {}}, {"artifact": {"name": "dynamo_graph_break_reason"}},
    {"artifact": {"name": "recompile_reasons"}}, {"compilation_metrics": {}},
)  # fmt: skip


def test_a_trace_is_counted_and_without_tlparse_says_how_to_get_it(h, tmp_path, monkeypatch):
    assert trace_events(trace(*PLANTED, PLANTED[0])) == {
        "inductor_output_code": 2, "dynamo_graph_break_reason": 1, "recompile_reasons": 1, "compilation_metrics": 1,
    }  # fmt: skip
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
def test_the_study():
    facts = ran(lah.study, lesson=[], timing=True).record.facts
    assert len(facts["answers"]) >= 6
    assert facts["TORCH_TRACE"]["inductor_output_code"] == 3
    if torch.cuda.is_available():
        assert "GB/s" in str(facts["answers"])
        assert facts["kernel names"]["UNIQUE_KERNEL_NAMES=0"] == ["triton_"]
    else:
        assert "runs its graph" in str(facts["answers"])
