"""The study of debugging: each tool is shown what it must find, then something that lacks it, and has to fail."""

import re

from harness.process import ChildFailed

import pytest

from examples.common.device import interpreted
from examples.triton.debugging import BLOCK, N, NothingFound, scale_overrun_kernel
from studies.triton import debugging, debugging_ir, debugging_memcheck
from studies.triton.debugging import printed_values, sqrt_checked_kernel, squares
from studies.triton.debugging_memcheck import place_of, read_memcheck

fails = (NothingFound, ChildFailed)


@pytest.mark.skipif(not interpreted(), reason="needs the interpreter")
def test_the_interpreter_shows_values_steps_and_skips_asserts(h, capsys):
    debugging.child_interpreted()  # in this process, which interprets too
    output = capsys.readouterr().out
    debugging.interpreter(h, output)
    assert h.record.facts["pdb, interpreted"].endswith(f"offsets reach {BLOCK - 1}, n_elements is {N}")
    for old, new, complaint in [
        (r" -4\.", " 9.", "device_print printed"),
        (r'"nan": 1', '"nan": 0', "0 values of y are NaN"),
        (rf"\({BLOCK - 1}, {N}\)", f"({N - 1}, {N})", "pdb does not show the overrun"),
        (r"result: .*", "Killed", "last words:(?s:.*)Killed"),
    ]:
        changed = re.sub(old, new, output)
        assert changed != output
        with pytest.raises(fails, match=complaint):
            debugging.interpreter(h, changed)


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


def test_device_side_tools_that_show_less_fail(h):
    shuffled = "".join(reversed(GPU_PRINT.splitlines(keepends=True)))
    assert printed_values(shuffled) == squares().tolist()
    debugging.on_the_gpu(h, SILENT, ABORT)
    for silent, abort, complaint in [
        (SILENT.splitlines()[-1], ABORT, r"device_print printed \[\]"),
        (GPU_PRINT + ABORT.splitlines()[1], ABORT, "TRITON_DEBUG=0: .*CUDA error"),
        (SILENT, ABORT.replace("x is negative", "int32 overflow"), "TRITON_DEBUG=1 did not abort"),
        (SILENT, re.sub(r"py:\d+", "py:1", ABORT), "names line 1, not "),
    ]:
        with pytest.raises(fails, match=complaint):
            debugging.on_the_gpu(h, silent, abort)


STORE = place_of(scale_overrun_kernel, "tl.store")[1]
RAN = 'result: {"twin_right": true, "overrun_error": "CUDA error: unspecified launch failure"}\n'
WRITE = "========= Invalid __global__ write of size 16 bytes\n=========     at {}\n=========     by thread (0,0,0)\n"
NEW = WRITE.format(f"scale_overrun_kernel+0x2f0 in debugging.py:{STORE}")
OLD = WRITE.format(f"0x2f0 in /some/where/debugging.py:{STORE}:scale_overrun_kernel")
FOUND = RAN + NEW + NEW + "========= ERROR SUMMARY: 2 errors\n"
CLEAN = 'result: {"twin_right": true, "overrun_error": null}\n========= ERROR SUMMARY: 0 errors\n'


def test_a_sanitizer_that_finds_too_little_or_too_much_fails(h):
    for record in (NEW, OLD):  # both forms in which it has reported
        read_memcheck(h, RAN + record + "========= ERROR SUMMARY: 1 error\n", CLEAN)
        assert f"debugging.py:{STORE}" in h.record.facts["compute-sanitizer"]
    for alone, cached, complaint in [
        (CLEAN, CLEAN, "compute-sanitizer found nothing"),
        ("========= ERROR SUMMARY: 0 errors\n", CLEAN, "ended early"),  # a version that never starts the program
        (FOUND + NEW.replace("scale_overrun_kernel", "scale_kernel"), CLEAN, "blames another kernel"),
        (FOUND.replace(f":{STORE}", ":1"), CLEAN, f"not line {STORE}"),
        (FOUND, FOUND, "torch's allocator hid nothing"),
    ]:
        with pytest.raises(fails, match=complaint):
            read_memcheck(h, alone, cached)
    read_memcheck(h, "========= Error: Device not supported\nRuntimeError: CUDA error: unknown\n", CLEAN)
    assert h.record.facts["compute-sanitizer"] == "not shown here: it says: Error: Device not supported"


@pytest.mark.gpu
def test_the_gpu_tools_find_their_bugs(h):
    debugging.study(h)
    debugging_memcheck.study(h)
    assert "device-side assert" in h.record.facts["tl.device_assert, and then torch says"]
    if "not shown here" in h.record.facts["compute-sanitizer"]:
        pytest.skip("compute-sanitizer is not here or refuses this device")
    assert f"debugging.py:{STORE}" in h.record.facts["compute-sanitizer"]
