"""The study of debugging: each tool is shown what it must find, then something that lacks it, and has to fail."""

import contextlib
import re
from types import SimpleNamespace

from harness.process import Child, ChildFailed

import pytest
import torch

from examples.triton.debugging import BLOCK, N, NothingFound, scale_overrun_kernel
from studies.triton import debugging, debugging_ir, debugging_memcheck
from studies.triton.debugging import neighbour_overwritten, printed_values, sqrt_checked, sqrt_checked_kernel, squares
from studies.triton.debugging_memcheck import memcheck_refusal, memcheck_report, place_of, read_memcheck


def test_the_square_root_is_right(h, capfd):
    for shape in [(0,), (1,), (31,), (33,), (2, 37)]:
        h.check(sqrt_checked, lambda x: x.double().sqrt(), h.randn(*shape).abs(), terms=0)
    h.check(sqrt_checked, lambda x: x.double().sqrt(), squares().to(h.device), terms=0)


def test_the_neighbour_is_overwritten_and_nobody_says_so(h, monkeypatch):
    assert neighbour_overwritten(h.device) == BLOCK - N
    monkeypatch.setattr(debugging, "neighbour_overwritten", lambda device: 0)
    with pytest.raises(NothingFound, match="changed 0 values of its neighbour"):
        debugging.no_tool(h)


# The interpreter.


@pytest.fixture(scope="module")
def interpreted_output():
    with Child(debugging.child_interpreted, env={"TRITON_INTERPRET": "1", "TRITON_DEBUG": "1"}) as child:
        return child.output()


def test_the_interpreter_shows_values_steps_and_skips_asserts(h, interpreted_output):
    debugging.interpreter(h, interpreted_output)
    assert h.record.facts["pdb, interpreted"].endswith(f"offsets reach {BLOCK - 1}, n_elements is {N}")
    assert h.record.facts["a write out of bounds, interpreted"].startswith("61 values")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (r" -4\.", " 9.", "device_print printed"),
        (r'"nan": 1', '"nan": 0', "0 values of y are NaN"),
        (r"array\(\[", "[", "pdb did not stop"),
        (rf"\({BLOCK - 1}, {N}\)", f"({N - 1}, {N})", "pdb does not show the overrun"),
        (r'"overwritten": 61', '"overwritten": 0', "0 values were overwritten"),
        (r"result: .*", "Killed", "last words:(?s:.*)Killed"),
    ],
)
def test_an_interpreter_that_shows_less_fails(h, interpreted_output, old, new, complaint):
    changed = re.sub(old, new, interpreted_output)
    assert changed != interpreted_output
    with pytest.raises((NothingFound, ChildFailed), match=complaint):
        debugging.interpreter(h, changed)


# What is compiled.


def edited(module, name, change):
    """A stand-in for a function of a module: its own answer, changed."""
    original = getattr(module, name)
    return lambda *args, **kwargs: change(original(*args, **kwargs))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("dump", lambda texts: texts | {"log": ""}, r"static_print printed \[\]"),
        ("compile_for", lambda kernels: [SimpleNamespace(error=None)], "static_assert: None"),
        ("dump", lambda texts: texts | {"llir": ""}, r"debug=True compiled the asserts \[\]"),
        ("dump", lambda texts: texts | {"llir": '@assertMessage_0 = c"x is negative\\00"'}, "debug=False compiled"),
    ],
)
def test_compile_time_tools_that_show_nothing_fail(h, monkeypatch, name, change, complaint):
    monkeypatch.delenv("TRITON_DEBUG", raising=False)
    monkeypatch.setattr(debugging, name, edited(debugging, name, change))
    with pytest.raises(NothingFound, match=complaint):
        debugging.compile_time(h)


@pytest.mark.parametrize("sm", [80, 120])
def test_the_device_assert_is_compiled_in_a_debug_build_and_names_its_line(sm):
    x = torch.empty(debugging.CHECKED, device="meta")
    llir = debugging.dump(sqrt_checked, (x,), {"debug": True}, sm=sm)["llir"]
    lines = [int(line) for line in re.findall(r"@__assertfail\(.*?, i32 (\d+),", llir)]
    assert place_of(sqrt_checked_kernel, "tl.device_assert")[1] in lines


@pytest.mark.parametrize(
    ("stage", "old", "new", "complaint"),
    [
        ("sass", r"LDG\S*", "NOP", "sass has no LDG"),
        ("ttgir", "sizePerThread", "size", "ttgir has no"),
        ("ptx", r"ld\.global\.v4\.b32", "ld.global.b32", "not 16 bytes at a time"),
        ("ttir", r"tt\.divisibility = 16", "", "does not say that n_elements divides by 16"),
        ("sass", r"LDG\.E\b", "LDG.E.128", "elements still load|not 16 bytes"),
    ],
)
def test_stages_without_their_evidence_fail(h, monkeypatch, stage, old, new, complaint):
    change = edited(debugging_ir, "dump", lambda texts: texts | {stage: re.sub(old, new, texts[stage])})
    monkeypatch.setattr(debugging_ir, "dump", change)
    with pytest.raises(NothingFound, match=complaint):
        debugging_ir.stages(h)


def test_stages_and_switches_and_what_is_kept(h, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_DUMP_DIR", str(tmp_path / "new" / "folder"))
    debugging_ir.study(h)
    wrote = sorted(str(path.relative_to(tmp_path / "new" / "folder")) for path in tmp_path.rglob("*.*"))
    stages = ("llir", "ptx", "sass", "ttgir", "ttir")
    assert wrote == [f"sm_{sm}/scale_kernel.{stage}" for sm in (100, 90) for stage in stages]
    assert "LDG.E.128" in (tmp_path / "new/folder/sm_90/scale_kernel.sass").read_text()
    assert h.record.facts["MLIR_ENABLE_DUMP"]["sizePerThread = [4] comes from"] == "TritonGPUCoalesce"


@pytest.mark.parametrize("header", ["{} (x)", "{}: x{{y=1}}"])  # of Triton 3.6 to 3.8, and of 3.9
def test_passes_are_found_by_what_they_change(header):
    header = f"// -----// IR Dump Before {header} ('builtin.module' operation) //----- //\n"
    steps = [("First", "a\n"), ("Coalesce", "a\n"), ("After", "b\n"), ("Last", "b\n")]
    text = "".join(header.format(name) + body for name, body in steps)
    assert debugging_ir.passes_of(text, "b") == (4, "Coalesce")
    for pattern in ("a\n", "c"):  # there from the start, never there
        with pytest.raises(NothingFound, match="no pass of 4 introduces"):
            debugging_ir.passes_of(text, pattern)


# On a GPU, from what its processes print.

GPU_PRINT = "".join(f"pid (0, 0, 0) idx ({i:2}) x: {v:f}\n" for i, v in enumerate(squares().tolist()))
SILENT = GPU_PRINT + 'result: {"error": null, "nan": 1}\n'
ABORT = (
    f"/somewhere/debugging.py:{place_of(sqrt_checked_kernel, 'tl.device_assert')[1]}: unknown: block: [0,0,0], "
    "thread: [3,0,0] Assertion `x is negative` failed.\n"
    'result: {"error": "CUDA error: device-side assert triggered", "nan": null}\n'
)


def test_what_is_printed_is_read_in_the_order_of_its_index():
    shuffled = "".join(reversed(GPU_PRINT.splitlines(keepends=True)))
    assert printed_values(shuffled) == squares().tolist()
    assert printed_values("nothing") == []
    assert printed_values("(0, 0, 0)  x:  [ 0. -4.\n 9.5]") == [0.0, -4.0, 9.5]


def test_device_side_findings(h):
    debugging.on_the_gpu(h, SILENT, ABORT)
    assert h.record.facts["tl.device_print"] == "pid (0, 0, 0) idx ( 3) x: -4.000000"
    assert h.record.facts["tl.device_assert, TRITON_DEBUG=1"].startswith("debugging.py:")  # no folder of ours


@pytest.mark.parametrize(
    ("silent", "abort", "complaint"),
    [
        (SILENT.replace("idx ( 3)", "idx (99)"), ABORT, "device_print printed"),
        (SILENT.splitlines()[-1], ABORT, r"device_print printed \[\]"),
        (SILENT.replace('"nan": 1', '"nan": 0'), ABORT, "0 values of y are NaN"),
        (GPU_PRINT + ABORT.splitlines()[1], ABORT, "TRITON_DEBUG=0: CUDA error"),
        (SILENT, SILENT, "TRITON_DEBUG=1 did not abort"),
        (SILENT, ABORT.replace("x is negative", "int32 overflow"), "TRITON_DEBUG=1 did not abort"),
        (SILENT, re.sub(r"py:\d+", "py:1", ABORT), "names line 1, not "),
        (SILENT, "terminate called", "last words:\nterminate called"),
    ],
)
def test_device_side_tools_that_show_less_fail(h, silent, abort, complaint):
    with pytest.raises((NothingFound, ChildFailed), match=complaint):
        debugging.on_the_gpu(h, silent, abort)


STORE = place_of(scale_overrun_kernel, "tl.store")[1]
RAN = 'result: {"twin_right": true, "overrun_error": "CUDA error: unspecified launch failure"}\n'


def invalid_write(place):
    return (
        "========= Invalid __global__ write of size 16 bytes\n"
        f"=========     at {place}\n"
        "=========     by thread (0,0,0) in block (1,0,0)\n"
        "=========     Access to 0x7f0000001010 is out of bounds\n========= \n"
    )


NEW = invalid_write(f"scale_overrun_kernel+0x2f0 in debugging.py:{STORE}")
OLD = invalid_write(f"0x2f0 in /some/where/debugging.py:{STORE}:scale_overrun_kernel")
FOUND = RAN + NEW + NEW + "========= ERROR SUMMARY: 2 errors\n"
CLEAN = 'result: {"twin_right": true, "overrun_error": null}\n========= ERROR SUMMARY: 0 errors\n'


@pytest.mark.parametrize("record", [NEW, OLD])
def test_both_forms_of_compute_sanitizer_are_read(h, record):
    read_memcheck(h, RAN + record + "========= ERROR SUMMARY: 1 error\n", CLEAN)
    assert h.record.facts["compute-sanitizer"].startswith("1 invalid writes, 0 of the twin; the first at ")
    assert f"debugging.py:{STORE}" in h.record.facts["compute-sanitizer"]
    assert "/some" not in h.record.facts["compute-sanitizer"]


@pytest.mark.parametrize(
    ("alone", "cached", "complaint"),
    [
        (CLEAN, CLEAN, "compute-sanitizer found nothing"),
        ("========= ERROR SUMMARY: 0 errors\n", CLEAN, "ended early"),  # a version that never starts the program
        (FOUND.replace("true", "false"), CLEAN, "the twin is wrong"),
        (FOUND + NEW.replace("scale_overrun_kernel", "scale_kernel"), CLEAN, "blames another kernel"),
        (FOUND.replace(f":{STORE}", ":1"), CLEAN, f"not line {STORE}"),
        (FOUND.replace(f" in debugging.py:{STORE}", ""), CLEAN, f"not line {STORE}"),
        (FOUND, FOUND, "torch's allocator hid nothing"),
        (FOUND, CLEAN.replace("ERROR SUMMARY", ""), "torch's allocator hid nothing"),
    ],
)
def test_a_sanitizer_that_finds_too_little_or_too_much_fails(h, alone, cached, complaint):
    with pytest.raises((NothingFound, ChildFailed), match=complaint):
        read_memcheck(h, alone, cached)


def test_a_sanitizer_that_refuses_the_device_is_said(h):
    refused = "========= COMPUTE-SANITIZER\n========= Error: Device not supported\nRuntimeError: CUDA error: unknown\n"
    assert memcheck_refusal(refused) == "Error: Device not supported"
    assert memcheck_refusal(FOUND) is None
    assert memcheck_report(refused) == (None, [])
    read_memcheck(h, refused, CLEAN)
    assert h.record.facts == {"compute-sanitizer": "not shown here: it says: Error: Device not supported"}


def test_the_sanitizer_is_found_on_the_path_or_in_a_toolkit(monkeypatch, tmp_path):
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")
    assert debugging_memcheck.find_sanitizer() is None
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert debugging_memcheck.find_sanitizer() == str(tool)


def canned(function, *, before=(), log=None, env=None):
    """Stands in for a process that needs a GPU: what it would print."""
    if function is debugging.child_interpreted:
        return Child(function, env=env)
    if function is debugging.child_checked:
        text = {"0": SILENT, "1": ABORT}[env["TRITON_DEBUG"]]
    else:
        assert (before[0], before[before.index("--log-file") + 1]) == ("compute-sanitizer", str(log))
        text = FOUND if "PYTORCH_NO_CUDA_MEMORY_CACHING" in env else CLEAN
    return contextlib.nullcontext(SimpleNamespace(output=lambda: text))


def test_the_order_of_a_run_on_a_gpu(h, monkeypatch):
    """The studies as they run on a GPU with a sanitizer, the device's own processes replaced by what they print."""
    for module in (debugging, debugging_memcheck):
        monkeypatch.setattr(module, "Child", canned)
    monkeypatch.setattr(debugging_memcheck, "find_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(h, "machine", SimpleNamespace(mode="gpu"))
    debugging.study(h)
    debugging_memcheck.study(h)
    assert not [value for value in h.record.facts.values() if "not shown here" in value]
    assert h.record.facts["compute-sanitizer, torch's allocator on"].startswith("0 errors")
    assert "x is negative" in h.record.facts["asserts in the LLIR"]["debug=True"]


@pytest.mark.gpu
def test_the_gpu_tools_find_their_bugs(h):
    debugging.study(h)
    debugging_memcheck.study(h)
    assert "device-side assert" in h.record.facts["tl.device_assert, and then torch says"]
    if "not shown here" in h.record.facts["compute-sanitizer"]:
        pytest.skip("compute-sanitizer is not here or refuses this device")
    assert f"debugging.py:{STORE}" in h.record.facts["compute-sanitizer"]


def test_profiling_plants_nothing(h):
    h.profile = True
    for module in (debugging, debugging_ir, debugging_memcheck):
        module.study(h)
    assert not h.record.facts
