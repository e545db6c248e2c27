"""Studies of descriptors: a broken rule is seen and counted for what it does; and what is harmless."""

import pytest
import torch

from examples.tma.descriptors import copy
from examples.tma.descriptors_rules import RULES
from examples.tma.descriptors_window import FORMS
from studies.tma import descriptors_faults as faults
from studies.tma.descriptors_faults import BOXES, Box, box_outcome, harmless, outcome, refused, show_rules


@pytest.mark.parametrize("form", FORMS)
def test_what_a_box_does(h, form, monkeypatch):
    """Nothing is wrong where no rule is broken, each wrong value is counted, and a broken rule is refused."""
    for rule, box in BOXES.items():
        assert refused(rule, h.device).startswith("ValueError: copy: ")
        if h.interpreted:  # on a GPU an illegal instruction would end the process's use of it
            odd = "AssertionError: block offset start must be 16-byte aligned"
            assert box_outcome(form, rule, "cpu") == (odd if box.starts[1] % 8 else "right")
    for name, starts, into in [("loads", (-3, -8), False), ("stores", (3, 8), True)]:
        monkeypatch.setitem(BOXES, name, Box(name, starts, into))
        assert box_outcome(form, name, h.device.type) == "right", name
    monkeypatch.setattr(faults, "unchecked_box", lambda form, x, y, *_: y.as_strided((64, 66), (128, 1)).zero_())
    assert box_outcome(form, "stores", h.device.type) == "4096 of 4096 wrong, and 128 beside them"
    monkeypatch.setattr(faults, "unchecked_box", lambda form, x, y, *_: y.zero_())
    assert box_outcome(form, "loads", h.device.type) == "3416 of 4096 wrong"


def test_what_a_launch_does_with_a_broken_rule(h, monkeypatch):
    if h.interpreted:
        assert outcome("device", "row stride of 16 bytes", "cpu") == "AssertionError: stride must be 16-byte aligned"
        assert outcome("device", "adjacent columns (sliced)", "cpu").endswith(" wrong")
    assert harmless({
        "one": {"host": "accepted", "device": "right", "device, run": "right", "our check": "ValueError"},
        "not both": {"host, run": "right", "device, run": "1 of 8 wrong"},
        "nothing ran": {"host": "right", "our check": "right"},
    }) == ["one"]  # fmt: skip
    monkeypatch.setitem(RULES, "nothing", ("nothing", lambda d: (torch.zeros(8, 8, device=d), "zero", (8, 8))))
    with pytest.raises(AssertionError, match="our check let 'nothing' pass"):
        refused("nothing", h.device)


@pytest.mark.gpu
def test_broken_rules_on_the_gpu(h):
    """Each in a process of its own; here only that it comes to an end, and that this process goes on."""
    show_rules(h)
    results = [result for words in h.record.facts["messages"].values() for result in words.values()]
    assert not any(result.startswith("no result") for result in results)
    x = h.randn(64, 64)
    assert torch.equal(copy("host", x), x)
