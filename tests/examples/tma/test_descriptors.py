"""descriptors: each rule refused by name, whose the allocator is, copies, and what a broken rule does."""

import contextvars
import threading
from contextlib import nullcontext

import pytest
import torch
import triton

from examples.common.tma import launch_with_scratch
from examples.tma.descriptors import COPIES, copy, launch_copy, with_workspace
from examples.tma.descriptors_rules import RULES, require_descriptor
from studies.tma import descriptors as study
from tests.examples.triton.helpers import code, meta, refused


def test_bad_input(h):
    """That each rule is refused, noticed() checks; here that the error names the function and what is wrong."""
    for rule, (_, broken) in RULES.items():
        x, padding, block = broken(h.device)
        with pytest.raises(TypeError if "dtype" in rule else ValueError, match=r"probe: (x|block|padding) .{9,}"):
            require_descriptor("probe", x, block, padding)
    for cols, fits in ((2**31 - 64, True), (2**31 - 63, False)):
        with nullcontext() if fits else pytest.raises(ValueError, match=r"below 2\*\*31 less a block"):
            require_descriptor("probe", torch.empty(1, cols, dtype=torch.int8, device="meta"), (64, 64))
    half = torch.zeros(4, 9, dtype=torch.half, device=h.device)
    refused(copy, ValueError, "form 'tma' is not one of", "tma", half)
    refused(copy, ValueError, r"strides \(9, 1\)", "pointers", half)


def test_pointers_stay_within_the_matrix(h):
    """Nothing beside or below the view is written."""
    x, around = h.randn(128, 128), torch.full((128, 128), -1.0, device=h.device)
    want = around.clone()
    want[:65, :70] = x[:65, :70]
    launch_copy("pointers", x[:65, :70], around[:65, :70])
    assert torch.equal(around, want)


def test_rows_with_a_gap(h):
    x = h.randn(65, 136)[:, :72]
    assert all(torch.equal(copy(form, x), x) for form in COPIES)


def allocator():
    from triton.runtime import _allocation

    return _allocation._allocator.get()


def test_the_allocator_is_left_as_found(h):
    before = allocator()
    for launch in (with_workspace, launch_with_scratch):
        seen = []
        launch(h.device, lambda seen=seen: seen.append(allocator()))
        assert seen[0](256, 128, None).nbytes == 256
        with pytest.raises(KeyError, match="midway"):
            launch(h.device, lambda: {}["midway"])
        assert allocator() is before

    def of_the_caller():
        triton.set_allocator(seen.append)
        copy("device", h.randn(8, 8))  # brings its own
        assert allocator() == seen.append

    contextvars.copy_context().run(of_the_caller)
    assert len(seen) == 1


def test_who_describes():
    for form in ("host", "device"):
        kernel = code(90, "cp.async.bulk.tensor", copy, form, meta(4096, 4096, dtype=torch.float16))
        assert kernel.kernel == f"copy_{form}_kernel"


def test_what_a_broken_rule_does(h, monkeypatch):
    """Each wrong value is counted, in a copy and around a box, and an error is the innermost one."""
    assert study.outcome("host", "load from row -3, column -8", h.device) == "right"
    if h.interpreted:  # on a GPU an illegal instruction would end the process's use of the GPU
        assert study.outcome("host", "load from column 1", "cpu").endswith("must be 16-byte aligned")
        assert study.outcome("device", "adjacent columns (sliced)", "cpu").endswith(" of 2048 wrong")
    monkeypatch.setattr(study, "copy_broken", lambda *_: (torch.arange(8), torch.arange(8).clamp(min=2)))
    assert study.outcome("host", "no stride of 0", "cpu") == "2 of 8 wrong"


@pytest.mark.gpu
def test_on_the_gpu(h, gpu_gib):
    """The same bits each time; in a new thread; more elements than an int32 counts; broken rules each in a process of
    its own, which comes to an end, and this process goes on."""
    study.study(h)
    rows = [row for table in h.record.facts.values() for row in table.items()]
    died = {case for case, row in rows if any(str(result).startswith("no result") for result in row.values())}
    assert died <= {"a dtype of TMA"}  # of bool, where an assertion of Triton's compiler ends the process
    x = h.randn(3000, 4104, dtype=torch.bfloat16)
    assert all(torch.equal(copy(form, x), x) for form in COPIES for _ in range(3))
    x, got = h.randn(64, 64), []
    thread = threading.Thread(target=lambda: got.append(copy("device", x)))
    thread.start()
    thread.join()
    assert torch.equal(got[0], x)
    gpu_gib(14)
    x = torch.empty(2**31 // 8192 + 65, 8192, dtype=torch.bfloat16, device=h.device).normal_()
    assert all(torch.equal(copy(form, x), x) for form in COPIES)
