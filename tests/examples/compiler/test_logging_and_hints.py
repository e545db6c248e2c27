"""logging_and_hints: each switch shows what was planted, and one that does not fails the run."""

import json
import re
from pathlib import Path

from harness.catalog import Needs
from harness.process import Child
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.compiler import logging_and_hints as lah
from examples.compiler.logging_and_hints import ARTIFACTS, SCALES, STAGES, NothingShown, line_of, recorded, trace_events

FILE = Path(lah.__file__).name


def make_harness(**options):
    return Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False, **options)


@pytest.fixture
def h():
    return make_harness()


@pytest.fixture
def on_a_cpu(h):
    h.device = torch.device("cpu")
    return h


@pytest.fixture
def on_a_gpu(h):
    h.device = torch.device("cuda")
    return h


@pytest.fixture(scope="module")
def in_process():
    """(records, skips, harness) of the artifacts, collected for real, once."""
    h = make_harness()
    with settings_kept("logging_and_hints", 0):
        records, skips = lah.artifacts_in_process(h)
    return records, skips, h


@given(n=st.integers(1, 40), scale=st.floats(-3, 3), seed=st.integers(0, 99))
def test_step_is_right(n, scale, seed):
    h = make_harness(seed=seed)
    x, w, count = h.randn(n, n), h.randn(n, n, scale=n**-0.5), torch.zeros(3, device=h.device)
    got = lah.step(x, w, count, scale)
    want = lah.step(x.double(), w.double(), count.double(), scale)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-5)
    assert count.tolist() == [1, 1, 1]


def test_the_artifacts_show_what_is_planted(in_process):
    records, skips, h = in_process
    assert h.record.checks[0]["passed"]
    rows = {switch: answer for _, switch, answer in lah.artifacts_of(h, records, skips)}
    assert rows["TORCH_LOGS=graph_breaks"].startswith(f"line {line_of('print(')}: ")
    assert rows["TORCH_LOGS=recompiles"].startswith(f"scale == {SCALES[0]} no longer held")
    assert "_cdist_forward" in rows["TORCH_LOGS=perf_hints"]
    assert re.search(r"fusing op\d", rows["TORCH_LOGS=fusion"])
    assert "gelu" in rows["TORCH_LOGS=output_code"]
    assert h.record.facts["records of each artifact"]["recompiles"] == 1


@pytest.mark.parametrize(
    ("artifact", "complaint"),
    [
        ("graph_breaks", "graph_breaks does not name line"),
        ("recompiles", "recompiles: "),
        ("guards", "none of 0 forms checks scale"),
        ("output_code", "output_code has the kernels"),
        ("perf_hints", "perf_hints: "),
        ("fusion", "nothing of 0 records fuses"),
    ],
)
def test_an_artifact_that_says_nothing_fails(in_process, artifact, complaint):
    records, skips, h = in_process
    with pytest.raises(NothingShown, match=complaint):
        lah.artifacts_of(h, [record for record in records if record[0] != artifact], skips)


def test_the_break_of_another_line_is_not_it(in_process):
    records, skips, h = in_process
    place = f"{FILE}:{line_of('print(')}"
    with pytest.raises(NothingShown, match="graph_breaks does not name line"):
        lah.artifacts_of(h, [(name, text.replace(place, f"{FILE}:1")) for name, text in records], skips)


def test_cuda_graphs_that_were_not_skipped_fail(in_process, on_a_cpu):
    records, _, _ = in_process
    with pytest.raises(NothingShown, match="not skipped on a CPU"):
        lah.artifacts_of(on_a_cpu, records, 0)


SKIPPED = (
    f'skipping cudagraphs due to mutated inputs (1 instances). Found from : \n   File "/x/{FILE}", line 7, in step\n'
)


def test_cuda_graphs_on_a_gpu(in_process, on_a_gpu):
    records = [record for record in in_process[0] if record[0] != "cudagraphs"]
    rows = lah.artifacts_of(on_a_gpu, [*records, ("cudagraphs", SKIPPED)], 1)
    (answer,) = (answer for _, switch, answer in rows if switch == "TORCH_LOGS=cudagraphs")
    assert answer == "skipping cudagraphs due to mutated inputs (1 instances): line 7"
    with pytest.raises(NothingShown, match="cudagraphs: "):
        lah.artifacts_of(on_a_gpu, records, 1)


# Names of artifacts.


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (("fusions",), r"recorded: torch has no log artifact 'fusions'; did you mean 'fusion'\?"),
        (("recompiles", "guard"), r"recorded: torch has no log artifact 'guard'; did you mean 'guards'\?"),
        (("zzz",), "TORCH_LOGS=help lists them"),
    ],
)
def test_what_is_no_artifact(names, hint):
    with settings_kept("test", 0), pytest.raises(ValueError, match=hint), recorded(*names):
        pass


def test_every_artifact_of_this_file_exists():
    with settings_kept("test", 0), recorded(*ARTIFACTS) as records:
        assert records == []


def test_an_error_of_the_body_is_not_an_artifacts():
    with pytest.raises(ValueError, match=r"^mine$"), recorded("fusion"):
        raise ValueError("mine")


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
    assert lah.kernels_of(own) == ["triton_poi_fused_gelu_0"]


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


# The whole technique.


def test_profiling_does_nothing(h):
    h.profile = True
    lah.demo(h)
    assert not h.record.facts


@pytest.mark.slow
def test_the_technique():
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True))
    with settings_kept("logging_and_hints", 0):
        lah.demo(h)
    answers = h.record.facts["answers"]
    assert len(answers) >= 14
    assert h.record.facts["TORCH_TRACE"]["inductor_output_code"] == 3
    assert "runs its graph" in str(answers) or torch.cuda.is_available()


@pytest.mark.gpu
def test_what_only_a_gpu_shows(h):
    h.timing = True
    with settings_kept("logging_and_hints", 0):
        lah.demo(h)
    answers = " ".join(h.record.facts["answers"].values())
    assert "mutated inputs" in answers
    assert "GB/s" in answers
    assert h.record.facts["kernel names"]["UNIQUE_KERNEL_NAMES=0"] == ["triton_"]
