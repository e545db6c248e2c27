"""debugging: the kernels are right, and every tool fails the technique when it does not find what was planted."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from harness.check import CheckError, check
from harness.codegen import compile_for, dump
from harness.hardware import interpreted
from harness.report import load_record

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.triton import debugging
from examples.triton.debugging import (
    BLOCK,
    CHECKED,
    DTYPES,
    Child,
    N,
    NothingFound,
    line_of,
    memcheck_refusal,
    memcheck_report,
    neighbour_overwritten,
    passes_of,
    printed_values,
    reference,
    result_of,
    scale,
    scale_overrun,
    scale_overrun_kernel,
    sqrt_checked,
    sqrt_checked_kernel,
    sqrt_reference,
    squares,
)

ROOT = Path(__file__).resolve().parents[3]
FLOATS = [torch.float32, torch.float16] + ([] if interpreted() else [torch.bfloat16])
# Nothing, one element, a prime, around one and two blocks, two dimensions.
SHAPES = [(0,), (1,), (997,), (BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (2 * BLOCK + 1,), (0, 5), (7, 311)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_twin_is_right(h, shape, dtype):
    h.check(scale, reference, h.randn(*shape, dtype=dtype), terms=0)


@pytest.mark.parametrize("shape", [(0,), (1,), (31,), (33,), (2, 37)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_square_root_is_right(h, shape, dtype, capfd):
    h.check(sqrt_checked, sqrt_reference, h.randn(*shape, dtype=dtype).abs(), terms=0)


def test_large_tiny_infinite_and_nan(h, capfd):
    inf, nan = float("inf"), float("nan")
    odd = torch.tensor([3e38, -3e38, 1e-30, inf, -inf, nan, 0.0, -1.0, 2.0, 3.0], device=h.device)
    h.check(scale, reference, odd, terms=0)
    h.check(sqrt_checked, sqrt_reference, odd, terms=0)


@given(n=st.integers(0, 3 * BLOCK), seed=st.integers(0, 99))
def test_any_size(n, seed):
    device = "cpu" if interpreted() else "cuda"
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device)
    check(scale, reference, x, what="scale", terms=0)


@given(beyond=st.integers(1, 61), blocks=st.integers(1, 3), dtype=st.sampled_from(FLOATS))
def test_a_guarded_buffer_finds_every_overrun(beyond, blocks, dtype):
    """One value is enough, and the message counts the bytes."""
    x = torch.ones(blocks * BLOCK - beyond, dtype=dtype, device="cpu" if interpreted() else "cuda")
    expected = f"{beyond * x.element_size()} bytes outside its output"
    with pytest.raises(CheckError, match=expected):
        check(scale_overrun, lambda x: 2 * x.double(), x, what="scale_overrun", terms=0, constant_ok=True)


def test_without_an_overrun_the_bug_does_not_show(h):
    """Why tests use sizes that no block divides."""
    h.check(scale_overrun, reference, h.randn(2 * BLOCK), terms=0)


def test_the_neighbour_is_overwritten_and_nobody_says_so(h):
    assert neighbour_overwritten(h.device) == BLOCK - N


WRAPPERS = [scale, scale_overrun, sqrt_checked]


@pytest.mark.parametrize("fn", WRAPPERS)
def test_bad_tensors(h, fn):
    x = h.randn(8, 8)
    for bad, error, message in [
        (x.int(), TypeError, "dtype torch.int32 is not one of"),
        (x.double(), TypeError, "dtype torch.float64"),
        (x.t(), ValueError, r"strides \(1, 8\); call .contiguous\(\)"),
        (x[:, :4], ValueError, "strides"),
        (x.to("meta"), RuntimeError, "on meta"),
        (x.clone().requires_grad_(), RuntimeError, "grad"),
    ]:
        with pytest.raises(error, match=f"{fn.__name__}: .*{message}"):
            fn(bad)
    assert torch.bfloat16 in DTYPES


@pytest.mark.parametrize("block", [0, -32, 48, 32.0, None, True, 2**21])
def test_bad_blocks(h, block):
    with pytest.raises(TypeError, match=r"sqrt_checked: debug is 1 and plain False; pass True or False"):
        sqrt_checked(h.randn(8), debug=1)
    with pytest.raises(ValueError, match=r"sqrt_checked: block is .*; pass a power of two up to 16384"):
        sqrt_checked(h.randn(8), block=block)


def test_more_elements_than_int32_offsets_reach():
    (kernel,) = compile_for(sqrt_checked, (torch.empty(2**31, device="meta"),), sms=(90,))
    assert kernel.error == (
        "ValueError: sqrt_checked: 2147483648 elements; its int32 offsets end below 2**31: split the tensor"
    )


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize("plain", [False, True])
def test_both_kinds_of_assert_are_compiled_in_a_debug_build_and_name_their_line(sm, plain):
    x = torch.empty(CHECKED, device="meta")
    llir = dump(sqrt_checked, (x,), {"debug": True, "plain": plain}, sm=sm)["llir"]
    lines = [int(line) for line in re.findall(r"@__assertfail\(.*?, i32 (\d+),", llir)]
    assert line_of(sqrt_checked_kernel, "assert tl.min" if plain else "tl.device_assert") in lines
    assert "x is negative" in llir
    assert "assert" not in dump(sqrt_checked, (x,), {"plain": plain}, sm=sm)["llir"]


def test_the_bug_is_one_mask():
    """The twins differ in their name and in the mask of the store, and in nothing else."""
    twins = []
    for kernel in (debugging.scale_kernel, scale_overrun_kernel):
        path, first = Path(debugging.__file__), line_of(kernel, "def ")
        twins.append(path.read_text().splitlines()[first : first + 3])
    assert [a == b for a, b in zip(*twins, strict=True)] == [True, True, False]
    kept = [line.split(", mask=")[0] for line in (twins[0][2], twins[1][2])]
    assert kept[0] == kept[1]


# The tools, each shown what it must find, then something that lacks it.


@pytest.fixture(scope="module")
def interpreted_output():
    with Child(debugging.child_interpreted, env={"TRITON_INTERPRET": "1", "TRITON_DEBUG": "1"}) as child:
        return child.output()


def needs_interpreter(output):
    if "cannot" in result_of(output):
        pytest.skip(result_of(output)["cannot"])


def test_the_interpreter_shows_values_steps_and_asserts(h, interpreted_output):
    needs_interpreter(interpreted_output)
    rows = debugging.interpreter(h, interpreted_output)
    assert ("what happens inside?", "pdb, interpreted", f"offsets reach {BLOCK - 1}, n_elements is {N}") in rows
    assert h.record.facts["interpreted write out of bounds"].startswith("61 values")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (r" -4\.", " 9.", "device_print printed"),
        (r'"nan": 1', '"nan": 0', "0 values of y are NaN"),
        (r'"plain": "[^"]*"', '"plain": null', "interpreted assert: None"),
        (r"array\(\[", "[", "pdb did not stop"),
        (rf"\({BLOCK - 1}, {N}\)", f"({N - 1}, {N})", "pdb does not show the overrun"),
        (r'"overwritten": 61', '"overwritten": 0', "0 values were overwritten"),
        (r"result: .*", "Killed", "last words:(?s:.*)Killed"),
    ],
)
def test_an_interpreter_that_shows_less_fails(h, interpreted_output, old, new, complaint):
    needs_interpreter(interpreted_output)
    changed = re.sub(old, new, interpreted_output)
    assert changed != interpreted_output
    with pytest.raises(NothingFound, match=complaint):
        debugging.interpreter(h, changed)


def test_an_interpreter_that_cannot_run_here_is_said(h):
    rows = debugging.interpreter(h, 'result: {"cannot": "needs numpy<2.4"}\n')
    assert rows == [("what happens inside?", "interpreter", "not shown here: needs numpy<2.4")]


def test_a_buffer_or_an_eye_that_sees_nothing_fails(h, monkeypatch):
    monkeypatch.setattr(debugging, "scale_overrun", scale)
    with pytest.raises(NothingFound, match="scale_overrun passed"):
        debugging.guarded_buffer(h)
    monkeypatch.setattr(debugging, "scale_overrun_kernel", debugging.scale_kernel)
    with pytest.raises(NothingFound, match="changed 0 values of its neighbour"):
        debugging.nothing_at_all(h)


def test_a_wrong_value_is_not_taken_for_the_overrun(h, monkeypatch):
    monkeypatch.setattr(debugging, "scale_overrun", lambda x: 3 * x)
    with pytest.raises(NothingFound, match="another complaint"):
        debugging.guarded_buffer(h)


def edited(name, change):
    """A stand-in for a function of debugging: its own answer, changed."""
    original = getattr(debugging, name)
    return lambda *args, **kwargs: change(original(*args, **kwargs))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("dump", lambda texts: texts | {"log": ""}, r"static_print said \[\]"),
        ("compile_for", lambda kernels: [SimpleNamespace(error=None)], "static_assert: None"),
        ("dump", lambda texts: texts | {"llir": ""}, r"debug=True compiled the asserts \[\]"),
        ("dump", lambda texts: texts | {"llir": '@assertMessage_0 = c"x is negative\\00"'}, "debug=False compiled"),
    ],
)
def test_compile_time_tools_that_say_nothing_fail(h, monkeypatch, name, change, complaint):
    monkeypatch.delenv("TRITON_DEBUG", raising=False)
    monkeypatch.setattr(debugging, name, edited(name, change))
    with pytest.raises(NothingFound, match=complaint):
        debugging.compile_time(h)


def test_compile_time_tools(h):
    rows = debugging.compile_time(h)
    assert [tool for _, tool, _ in rows] == ["tl.static_print", "tl.static_assert", "LLIR"]
    assert "x is negative" in h.record.facts["asserts compiled with debug=True"]


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
    change = edited("dump", lambda texts: texts | {stage: re.sub(old, new, texts[stage])})
    monkeypatch.setattr(debugging, "dump", change)
    with pytest.raises(NothingFound, match=complaint):
        debugging.stages(h)


def test_stages_are_kept_where_asked(h, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_DUMP_DIR", str(tmp_path / "new" / "folder"))
    debugging.stages(h)
    wrote = sorted(str(path.relative_to(tmp_path / "new" / "folder")) for path in tmp_path.rglob("*.*"))
    stages = ("llir", "ptx", "sass", "ttgir", "ttir")
    assert wrote == [f"sm_{sm}/scale_kernel.{stage}" for sm in (100, 90) for stage in stages]
    assert "LDG.E.128" in (tmp_path / "new/folder/sm_90/scale_kernel.sass").read_text()


def test_passes_are_found_by_what_they_change():
    header = "// -----// IR Dump Before {} (x) ('builtin.module' operation) //----- //\n"
    text = "".join(
        header.format(name) + body
        for name, body in [("First", "a\n"), ("Coalesce", "a\n"), ("After", "b\n"), ("Last", "b\n")]
    )
    assert passes_of(text, "b") == (4, "Coalesce")
    for pattern in ("a", "c"):  # there from the start, never there
        with pytest.raises(NothingFound, match="no pass of 4 introduces"):
            passes_of(text, pattern)


GPU_PRINT = "".join(f"pid (0, 0, 0) idx ({i:2}) x: {v:f}\n" for i, v in enumerate(squares().tolist()))
SILENT = GPU_PRINT + 'result: {"error": null, "nan": 1}\n'
ABORT = (
    f"/somewhere/debugging.py:{line_of(sqrt_checked_kernel, 'tl.device_assert')}: unknown: block: [0,0,0], "
    "thread: [3,0,0] Assertion `x is negative` failed.\n"
    'result: {"error": "CUDA error: device-side assert triggered", "nan": null}\n'
)


def test_what_is_printed_is_read_in_the_order_of_its_index():
    shuffled = "".join(reversed(GPU_PRINT.splitlines(keepends=True)))
    assert printed_values(shuffled) == squares().tolist()
    assert printed_values("nothing") == []
    assert printed_values("(0, 0, 0)  x:  [ 0. -4.\n 9.5]") == [0.0, -4.0, 9.5]


def test_device_side_findings(h):
    rows = debugging.on_the_gpu(h, SILENT, ABORT)
    assert len(rows) == 2
    assert h.record.facts["tl.device_print"] == "pid (0, 0, 0) idx ( 3) x: -4.000000"
    assert h.record.facts["tl.device_assert, TRITON_DEBUG=1"].startswith("debugging.py:")  # no folder of ours


@pytest.mark.parametrize(
    ("silent", "abort", "complaint"),
    [
        (SILENT.replace("idx ( 3)", "idx (99)"), ABORT, "device_print printed"),
        (SILENT.split("pid", 1)[0] + SILENT.splitlines()[-1], ABORT, r"device_print printed \[\]"),
        (SILENT.replace('"nan": 1', '"nan": 0'), ABORT, "0 values of y are NaN"),
        (GPU_PRINT + ABORT.splitlines()[1], ABORT, "TRITON_DEBUG=0: CUDA error"),
        (SILENT, SILENT, "TRITON_DEBUG=1 did not abort"),
        (SILENT, ABORT.replace("x is negative", "int32 overflow"), "TRITON_DEBUG=1 did not abort"),
        (SILENT, re.sub(r"py:\d+", "py:1", ABORT), "names line 1, not "),
        (SILENT, "terminate called", "last words:\nterminate called"),
    ],
)
def test_device_side_tools_that_show_less_fail(h, silent, abort, complaint):
    with pytest.raises(NothingFound, match=complaint):
        debugging.on_the_gpu(h, silent, abort)


STORE = line_of(scale_overrun_kernel, "tl.store")
RAN = 'result: {"twin_right": true, "overrun_error": "CUDA error: unspecified launch failure"}\n'


def invalid_write(place):
    return (
        "========= Invalid __global__ write of size 16 bytes\n"
        f"=========     at {place}\n"
        "=========     by thread (0,0,0) in block (1,0,0)\n"
        "=========     Access to 0x7f0000001010 is out of bounds\n"
        "=========     and is 1 bytes after the nearest allocation at 0x7f0000000000 of size 4,100 bytes\n"
        "========= \n"
    )


NEW = invalid_write(f"scale_overrun_kernel+0x2f0 in debugging.py:{STORE}")
OLD = invalid_write(f"0x2f0 in /some/where/debugging.py:{STORE}:scale_overrun_kernel")
FOUND = RAN + NEW + NEW + "========= ERROR SUMMARY: 2 errors\n"
CLEAN = 'result: {"twin_right": true, "overrun_error": null}\n========= ERROR SUMMARY: 0 errors\n'


@pytest.mark.parametrize("record", [NEW, OLD])
def test_both_forms_of_compute_sanitizer_are_read(h, record):
    row = debugging.memcheck(h, RAN + record + "========= ERROR SUMMARY: 1 error\n", lambda: CLEAN)
    assert row[2] == f"line {STORE}, 1 writes; with torch's allocator on: 0"
    assert "/some" not in h.record.facts["compute-sanitizer"]


@pytest.mark.parametrize(
    ("alone", "cached", "complaint"),
    [
        (CLEAN, CLEAN, "compute-sanitizer found nothing"),
        (
            "========= ERROR SUMMARY: 0 errors\n",
            CLEAN,
            "ended early",
        ),  # a version that never starts the program
        (FOUND.replace("true", "false"), CLEAN, "the twin is wrong"),
        (FOUND + NEW.replace("scale_overrun_kernel", "scale_kernel"), CLEAN, "blames another kernel"),
        (FOUND.replace(f":{STORE}", ":1"), CLEAN, f"not line {STORE}"),
        (FOUND.replace(f" in debugging.py:{STORE}", ""), CLEAN, f"not line {STORE}"),
        (FOUND, FOUND, "torch's allocator hid nothing"),
        (FOUND, CLEAN.replace("ERROR SUMMARY", ""), "torch's allocator hid nothing"),
    ],
)
def test_a_sanitizer_that_finds_too_little_or_too_much_fails(h, alone, cached, complaint):
    with pytest.raises(NothingFound, match=complaint):
        debugging.memcheck(h, alone, lambda: cached)


def test_a_sanitizer_that_refuses_the_device_is_said(h):
    refused = "========= COMPUTE-SANITIZER\n========= Error: Device not supported\nRuntimeError: CUDA error: unknown\n"
    assert memcheck_refusal(refused) == "Error: Device not supported"
    assert memcheck_refusal(FOUND) is None
    row = debugging.memcheck(h, refused, lambda: pytest.fail("asked again"))
    assert row[2] == "not shown here: it says: Error: Device not supported"
    assert memcheck_report(refused) == (None, [])


# The whole technique, and the end of its processes.


def test_the_technique_runs_alone(cli, tmp_path):
    done = cli("examples/triton/debugging.py", "--json", tmp_path / "record.json", TRITON_DUMP_DIR="")
    assert done.returncode == 0, done.stdout + done.stderr
    (example,) = load_record(tmp_path / "record.json")["examples"]
    assert example["status"] == "passed"
    assert all(check["passed"] for check in example["checks"])
    assert example["facts"]["guarded buffer"].startswith("scale_overrun: 244 bytes outside its output were written")
    assert example["facts"]["MLIR_ENABLE_DUMP"]["sizePerThread = [4] comes from"] == "TritonGPUCoalesce"
    assert str(ROOT) not in str(example["facts"])
    assert len(re.findall(r"^  (?:is|does|which|what|why|are) .*\?  ", done.stdout, re.MULTILINE)) >= 12


@pytest.mark.gpu
def test_the_gpu_tools_found_their_bugs(cli, tmp_path):
    done = cli("examples/triton/debugging.py", "--json", tmp_path / "record.json")
    facts = load_record(tmp_path / "record.json")["examples"][0]["facts"]
    assert "device-side assert" in facts["tl.device_assert, and then torch says"]
    if debugging.find_sanitizer() is None or "it says:" in done.stdout:
        pytest.skip("compute-sanitizer is not here or refuses this device")
    assert f"debugging.py:{STORE}" in facts["compute-sanitizer"]
    assert facts["compute-sanitizer, torch's allocator on"].startswith("0 errors")


def test_without_a_sanitizer_the_reader_learns_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert debugging.find_sanitizer() is None
    assert "part of the CUDA toolkit" in Path(debugging.__file__).read_text()


def test_the_sanitizer_of_a_toolkit_that_is_not_on_the_path(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert debugging.find_sanitizer() == str(tool)


class Canned:
    """Stands in for the processes that need a GPU; the others are real."""

    def __new__(cls, function, *, before=(), log=None, env=None):
        if function in (debugging.child_interpreted, debugging.child_compiled):
            return Child(function, before=before, log=log, env=env)
        if function is debugging.child_sanitized:
            assert before[0] == "compute-sanitizer"
            assert before[before.index("--log-file") + 1] == str(log)
            said = FOUND if "PYTORCH_NO_CUDA_MEMORY_CACHING" in env else CLEAN
        else:
            said = {"0": SILENT, "1": ABORT}[env["TRITON_DEBUG"]]
        canned = object.__new__(cls)
        canned.output = lambda: said
        return canned

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


def test_the_order_of_a_run_on_a_gpu(h, monkeypatch):
    """The demo as it goes on a GPU with a sanitizer, the device's own processes replaced by what they would print."""
    from rich.console import Console

    monkeypatch.setattr(debugging, "Child", Canned)
    monkeypatch.setattr(debugging, "find_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(h, "machine", SimpleNamespace(mode="gpu"))
    monkeypatch.setattr(h, "console", Console(file=(said := io.StringIO()), width=200))
    debugging.demo(h)
    assert "not shown here: it" not in said.getvalue()  # the interpreter may be missing its numpy
    assert f"line {STORE}, 2 writes; with torch's allocator on: 0" in said.getvalue()


def test_profiling_does_nothing(h):
    h.profile = True
    debugging.demo(h)
    assert not h.record.facts


def alive(pid):
    """Whether the process runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the processes of Linux")
def test_ctrl_c_ends_every_process(tmp_path):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (tmp_path / "said").open("w") as said:
        demo = subprocess.Popen(
            [sys.executable, "examples/triton/debugging.py"], cwd=ROOT, stdout=said, stderr=said,
            env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        )  # fmt: skip
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
        deadline = time.monotonic() + 60
        pids = []
        while time.monotonic() < deadline and len(pids) < 2:
            time.sleep(0.05)
            pids = children.read_text().split()
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=60) == 130, (tmp_path / "said").read_text()
    assert len(pids) >= 2
    deadline = time.monotonic() + 10  # a process that was killed takes a moment to end, longer on a busy machine
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    left = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in pids if alive(pid)}
    assert not left
    assert not list(tmp_path.glob("triton-debugging-*"))
