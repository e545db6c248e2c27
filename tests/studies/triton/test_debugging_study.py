"""The study of debugging: what its GPU tools print is read right, and a tool that shows less fails it."""

import re

from harness.process import ChildFailed

import pytest

from examples.triton.debugging import NothingFound, scale_overrun_kernel
from studies.triton import debugging, debugging_ir
from studies.triton.debugging import sqrt_checked, sqrt_checked_kernel, squares
from studies.triton.debugging_memcheck import place_of, read_memcheck

fails = (NothingFound, ChildFailed)


@pytest.mark.parametrize("header", ["{} (x)", "{}: x{{y=1}}"])  # of Triton 3.6 to 3.8, and of 3.9
def test_passes_are_found_by_what_they_change(header):
    header = f"// -----// IR Dump Before {header} ('builtin.module' operation) //----- //\n"
    steps = [("First", "a\n"), ("Coalesce", "a\n"), ("After", "b\n"), ("Last", "b\n")]
    text = "".join(header.format(name) + body for name, body in steps)
    assert debugging_ir.passes_of(text, "b") == (4, "Coalesce")
    with pytest.raises(NothingFound, match="no pass of 4 introduces"):
        debugging_ir.passes_of(text, "a\n")


def test_the_checked_square_root_is_right(h):
    h.check(sqrt_checked, lambda x: x.double().sqrt(), h.randn(32).abs(), terms=0, roundings=int(not h.interpreted))


def test_what_the_device_prints(h):
    lines = [f"pid (0, 0, 0) idx ({i:2}) x: {v:f}\n" for i, v in enumerate(squares().tolist())]
    assert debugging.printed_values("".join(reversed(lines))) == squares().tolist()
    silent = "".join(lines) + 'result: {"error": null, "nan": 1}\n'
    abort = (
        f"/somewhere/debugging.py:{place_of(sqrt_checked_kernel, 'tl.device_assert')[1]}: unknown: block: [0,0,0], "
        "thread: [3,0,0] Assertion `x is negative` failed.\n"
        'result: {"error": "CUDA error: device-side assert triggered", "nan": null}\n'
    )
    debugging.on_the_gpu(h, silent, abort)
    for printed, stopped, complaint in [
        (silent.splitlines()[-1], abort, r"device_print printed \[\]"),
        (silent, abort.replace("x is negative", "int32 overflow"), "TRITON_DEBUG=1 did not abort"),
        (silent, re.sub(r"py:\d+", "py:1", abort), "names line 1, not "),
    ]:
        with pytest.raises(fails, match=complaint):
            debugging.on_the_gpu(h, printed, stopped)


STORE = place_of(scale_overrun_kernel, "tl.store")[1]
RAN = 'result: {"twin_right": true, "overrun_error": "CUDA error: unspecified launch failure"}\n'
WRITE = "========= Invalid __global__ write of size 16 bytes\n=========     at {}\n=========     by thread (0,0,0)\n"
NEW = WRITE.format(f"scale_overrun_kernel+0x2f0 in debugging.py:{STORE}")
OLD = WRITE.format(f"0x2f0 in /some/where/debugging.py:{STORE}:scale_overrun_kernel")
CLEAN = 'result: {"twin_right": true, "overrun_error": null}\n========= ERROR SUMMARY: 0 errors\n'


def test_what_a_sanitizer_reports(h):
    for record in (NEW, OLD):  # both forms in which it has reported
        read_memcheck(h, RAN + record + "========= ERROR SUMMARY: 1 error\n", CLEAN)
        assert f"debugging.py:{STORE}" in h.record.facts["compute-sanitizer"]
    found = RAN + NEW + "========= ERROR SUMMARY: 1 error\n"
    for alone, complaint in [
        (CLEAN, "compute-sanitizer found nothing"),
        (found + NEW.replace("scale_overrun_kernel", "scale_kernel"), "blames another kernel"),
        (found.replace(f":{STORE}", ":1"), f"not line {STORE}"),
    ]:
        with pytest.raises(fails, match=complaint):
            read_memcheck(h, alone, CLEAN)
    read_memcheck(h, "========= Error: Device not supported\nRuntimeError: CUDA error: unknown\n", CLEAN)
    assert h.record.facts["compute-sanitizer"] == "not shown here: it says: Error: Device not supported"
