"""Studies of descriptors: a broken rule is seen and counted for what it does; whose the allocator is; host times."""

import re

from harness.codegen import compile_for

import pytest
import torch

from examples.tma.descriptors import TILE, copy
from examples.tma.descriptors_rules import OFFLINE, RULES, require_box, require_descriptor
from examples.tma.descriptors_window import FORMS
from studies.tma import descriptors_faults as faults
from studies.tma.descriptors import WORKSPACE, every_form, host_us, references, show_allocator, show_code, windows
from studies.tma.descriptors_faults import (
    BOX_BLOCK,
    BOXES,
    Box,
    box_of,
    box_outcome,
    broken_by,
    harmless,
    outcome,
    refused,
    show_rules,
    truncated,
    unchecked,
    unchecked_box,
)


def test_windows_of_every_rank_and_layout(h):
    for name, case in windows(h).items():
        h.check(every_form, references, *case, what=name, terms=0, constant_ok=True)


BOX_SAID = {
    "last coordinate of 16 bytes": r"coordinates \(0, 1\) .*multiple of 16 bytes, here of 8: begin at 0",
    "last coordinate of 16 bytes (outside)": r"coordinates \(0, 300\) .*here of 8: begin at 296",
    "last coordinate of 16 bytes (store)": r"coordinates \(0, 1\) .*multiple of 16 bytes",
    "no negative stores (rows)": r"coordinates \(-3, 0\) .*TMA stores to no negative ones",
    "no negative stores (columns)": r"coordinates \(0, -8\) .*TMA stores to no negative ones",
    "16 bytes a stored row": r"shape \(64, 63\), rows of 126 bytes; .*pad the last dimension",
}


@pytest.mark.parametrize("rule", BOXES)
def test_each_rule_of_boxes_is_refused_by_name(h, rule):
    x, y, into, starts = box_of(rule, h.device)
    with pytest.raises(ValueError, match=f"probe: .*{BOX_SAID[rule]}"):
        require_box("probe", y if into else x, starts, store=into)
    for tensor in (x, y):  # and it breaks no rule of descriptors
        require_descriptor("probe", tensor, BOX_BLOCK)
    assert refused(rule, h.device).startswith("ValueError: copy: ")
    assert broken_by(rule) == BOXES[rule].broken_by


@pytest.mark.parametrize("form", FORMS)
def test_boxes_that_keep_the_rules_are_right(h, form, monkeypatch):
    """The measure of a broken box is sound: nothing is wrong where no rule is broken, each wrong value is counted."""
    fine = {
        "loads": ((-3, -8), False),
        "stores": ((3, 8), True),
        "beyond": ((200, 64), True),
        "far": ((64, 296), False),
    }
    for name, (starts, into) in fine.items():
        monkeypatch.setitem(BOXES, name, Box(name, starts, into))
        assert box_outcome(form, name, h.device.type) == "right", name
    monkeypatch.setattr(faults, "unchecked_box", lambda form, x, y, *_: y.as_strided((64, 66), (128, 1)).zero_())
    assert box_outcome(form, "stores", h.device.type) == "4096 of 4096 wrong, and 128 beside them, to column 65"
    monkeypatch.setattr(faults, "unchecked_box", lambda form, x, y, *_: y.zero_())
    assert box_outcome(form, "far", h.device.type) == "right"
    assert box_outcome(form, "loads", h.device.type) == "3416 of 4096 wrong"


def test_what_a_broken_box_does(h):
    """What the interpreter makes of them; on a GPU it is the study's, in a process of its own each."""
    if not h.interpreted:
        pytest.skip("an illegal instruction ends the process's use of the GPU")
    for form in FORMS:
        for rule, box in BOXES.items():
            odd = "AssertionError: block offset start must be 16-byte aligned"
            assert box_outcome(form, rule, "cpu") == (odd if box.starts[1] % 8 else "right")


@pytest.mark.parametrize("rule", ["no negative stores (rows)", "16 bytes a stored row"])
def test_a_broken_box_is_tma(rule):
    x, y, into, starts = box_of(rule, "meta")
    for form in FORMS:
        (kernel,) = compile_for(unchecked_box, (form, x, y, into, *starts), sms=(90,))
        assert (kernel.error, kernel.found["cp.async.bulk.tensor"]) == (None, 2)


def test_a_rule_that_is_let_through_fails_the_study(h, monkeypatch):
    monkeypatch.setitem(RULES, "nothing", ("nothing", lambda d: (torch.zeros(8, 8, device=d), "zero", (8, 8))))
    with pytest.raises(AssertionError, match="our check let 'nothing' pass, broken by nothing"):
        refused("nothing", h.device)


def test_what_a_launch_does_with_a_broken_rule(h):
    if not h.interpreted:
        pytest.skip("a launch that may end the process's use of the GPU is the study's, in a process of its own")
    assert outcome("device", "row stride of 16 bytes", "cpu") == "AssertionError: stride must be 16-byte aligned"
    assert outcome("host", "start at 16 bytes", "cpu") == "AssertionError: base must be 16-byte aligned"
    assert outcome("host", "no stride of 0", "cpu") == "right"
    assert harmless({
        "one": {"host": "accepted", "device": "right", "device, run": "right", "our check": "ValueError"},
        "both": {"host, run": "right", "device, run": "right"},
        "not both": {"host, run": "right", "device, run": "1 of 8 wrong"},
        "nothing ran": {"host": "right", "our check": "right"},
    }) == ["one", "both"]  # fmt: skip
    silent = outcome("device", "adjacent columns (sliced)", "cpu")
    assert re.fullmatch(r"\d+ of 2048 wrong: it read strides \(64, 1\)", silent)


def test_truncated_steps():
    x = torch.arange(640).half()[3:].as_strided((4, 8), (63, 2), 3)
    assert truncated(x).stride() == (56, 1)
    assert truncated(x).storage_offset() == 0
    whole = torch.zeros(4, 8, dtype=torch.half)
    assert truncated(whole).stride() == whole.stride()


def test_the_allocator_of_a_launch(h):
    show_allocator(h)
    facts = h.record.facts
    assert "no allocator was set" in facts["a launch that finds no allocator"]
    found = facts["allocator found"]
    assert found["within with_workspace"] == "Workspace"
    workspace = facts["workspace of a launch"]
    assert workspace["predicted bytes"] == workspace["programs"] * 2 * WORKSPACE
    if not h.interpreted:
        assert workspace["asked"].startswith(f"{workspace['predicted bytes']} bytes, ")


def test_copies_without_checks(h):
    x = h.randn(130, 72, dtype=h.half)
    for form in FORMS:
        assert torch.equal(unchecked(form, x, "zero", *TILE), x)


def test_host_times_are_of_each_call(h):
    calls = []
    us = host_us({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, h.device, repeats=3)
    assert set(us) == {"a", "b"}
    assert calls.count("a") == calls.count("b") == 27


@pytest.mark.parametrize(("sm", "rank"), [(90, 1), (90, 2), (90, 3), (90, 4), (90, 5), (100, 3), (120, 5)])
def test_windows_of_every_rank_are_tma(sm, rank):
    x = torch.empty(*([4] * (rank - 1)), 64, dtype=torch.bfloat16, device="meta")
    for form in FORMS:
        for padding in ("zero", "nan"):
            (kernel,) = compile_for(unchecked, (form, x, padding, *([2] * (rank - 1)), 16), sms=(sm,))
            assert kernel.error is None
            assert kernel.spills == 0
            assert kernel.found["cp.async.bulk.tensor"] == 2


def test_what_the_studies_find(h):
    if h.device.type == "cuda":
        h.timing = False  # so that no rule is broken by a launch
    show_rules(h)
    show_code(h)
    rows = next(rows for name, rows in h.record.facts.items() if name.startswith("rules broken"))
    assert set(rows) == {*RULES, *BOXES}
    assert rows["row stride of 16 bytes"]["host descriptor"] == "AssertionError"
    assert rows["row stride of 16 bytes"]["device descriptor"] == "accepted"  # triton issue 10927
    assert rows["16 bytes a block row"]["host descriptor"] == "accepted"
    assert rows["16 bytes a block row"]["device descriptor"] == "ValueError"
    assert all(row["our check"] in ("ValueError", "TypeError") for row in rows.values())
    for rule in BOXES:  # nobody else notices before the launch
        assert {rows[rule][f"{form} descriptor"] for form in FORMS} == {"accepted"}
    table = h.record.facts["PTX of a copy on sm_90"]
    assert table["device"]["tensormap"] > table["host"]["tensormap"] == table["pointers"]["tensormap"] == 0
    assert table["host"]["bytes of arguments"] > 2 * WORKSPACE


@pytest.mark.gpu
def test_broken_rules_on_the_gpu(h):
    """Each in a process of its own; what comes of them is printed by the study, here only that it comes to an end."""
    show_rules(h)
    messages = h.record.facts["messages"]
    for rule, words in messages.items():
        for form in ("host", "device"):
            if words[form] == "accepted" and rule not in OFFLINE:
                assert not words[f"{form}, run"].startswith("no result"), (rule, form)
                # Loads and stores of boxes that break a rule are never right; a store may end at the element one day.
                assert rule not in BOXES or words[f"{form}, run"] != "right" or BOXES[rule].columns == 63, (rule, form)
    x = h.randn(64, 64)  # this process's use of the GPU goes on
    assert torch.equal(copy("host", x), x)
