"""descriptors: windows of every rank, layout and dtype; each rule broken and refused; whose the allocator is."""

import contextvars
import functools
import math
import re

from harness.codegen import compile_for, dump

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.tma import descriptors
from examples.tma.descriptors import (
    BOX_BLOCK,
    BOXES,
    COPIES,
    DTYPES,
    FORMS,
    MAX_BLOCK,
    NAN_DTYPES,
    OFFLINE,
    RULES,
    TILE,
    WORKSPACE,
    Box,
    Workspace,
    box_of,
    box_outcome,
    broken_by,
    copy,
    default_block,
    demo,
    every_form,
    harmless,
    host_us,
    outcome,
    reference,
    references,
    refused,
    require_box,
    require_descriptor,
    show_allocator,
    show_rules,
    tensor_of,
    truncated,
    unchecked,
    unchecked_box,
    window,
    windows,
    with_workspace,
)

EXACT = {"terms": 0, "constant_ok": True}


def quiet():
    from harness.catalog import Needs
    from harness.session import Harness

    from rich.console import Console

    return Harness("test", Needs.parse("triton"), console=Console(quiet=True))


def check(h, x, starts, sizes, block=None):
    h.check(every_form, references, x, starts, sizes, block, what=f"{tuple(x.shape)} {starts} {sizes} {block}", **EXACT)


@given(data=st.data(), rank=st.integers(1, 5))
def test_any_window(data, rank):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=rank - 1, max_size=rank - 1)))
    h = quiet()
    cols = data.draw(st.integers(1, 40))
    x = h.randn(*shape, (cols + 7) // 8 * 8, dtype=h.half)[..., :cols]
    starts = (*(data.draw(st.integers(-6, 6)) for _ in shape), 8 * data.draw(st.integers(-3, 3)))
    sizes = (*(data.draw(st.integers(0, 5)) for _ in shape), data.draw(st.integers(0, 40)))
    block = (*(data.draw(st.sampled_from([1, 2, 4])) for _ in shape), data.draw(st.sampled_from([8, 16, 32])))
    check(h, x, starts, sizes, data.draw(st.sampled_from([block, None])))


@pytest.mark.parametrize("name", windows(quiet()))
def test_the_windows_of_the_demo(h, name):
    check(h, *windows(h)[name])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_every_dtype(h, dtype, form):
    step = 16 // dtype.itemsize
    x = h.randn(5, 3 * step, dtype=torch.float32, scale=20).to(dtype)
    padding = "nan" if dtype in NAN_DTYPES else "zero"
    fn = functools.partial(window, form=form, padding=padding)
    want = functools.partial(reference, padding=padding)
    h.check(fn, want, x, (-2, step), (9, 4 * step), what=f"{dtype}", **EXACT)


def test_rows_that_overlap_and_views_in_any_order(h):
    x = h.randn(4000, dtype=h.half)
    check(h, x.as_strided((20, 40), (16, 1)), (0, 0), (20, 40))  # rows of 40 that start 16 apart
    check(h, x.as_strided((1, 5, 1, 30), (7, 32, 5, 1)), (0, 0, 0, 0), (1, 5, 1, 30))  # strides nobody steps by
    check(h, x[:960].view(2, 3, 4, 5, 8).permute(3, 0, 2, 1, 4), (1, 0, -1, 0, 0), (4, 2, 5, 3, 8))


def test_special_values_and_the_fill(h):
    x = torch.tensor([[math.nan, math.inf, -math.inf, -0.0], [1.0, 2.0, 3.0, 65504.0]], device=h.device)
    for form in FORMS:
        y = window(x, (-1, -4), (4, 12), form=form)
        assert torch.equal(y[1:3, 4:8].nan_to_num(5.0), x.nan_to_num(5.0))
        y[1:3, 4:8] = 0
        assert not y.any()
        y = window(x, (-1, -4), (4, 12), padding="nan", form=form)
        y[1:3, 4:8] = math.nan
        assert y.isnan().all()


@given(
    shape=st.lists(st.one_of(st.integers(0, 9), st.sampled_from([63, 256, 1000, 10**6])), min_size=1, max_size=5),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)
def test_the_default_block_keeps_the_rules(shape, itemsize):
    block = default_block(tuple(shape), itemsize)
    assert all(n & (n - 1) == 0 and 1 <= n <= 256 for n in block)
    assert block[-1] * itemsize >= 16
    assert math.prod(block) * itemsize <= 8192
    dtype = {1: torch.int8, 2: torch.half, 4: torch.float32, 8: torch.float64}[itemsize]
    require_descriptor("probe", torch.zeros(*(1 for _ in shape[1:]), 16, dtype=dtype), block)


# What is wrong, in the words of require_descriptor.
SAID = {
    "start at 16 bytes": "starts 2 bytes past a multiple of 16",
    "row stride of 16 bytes": r"strides \(63, 1\)",
    "adjacent columns": r"strides \(1, 64\); the last dimension must be contiguous: describe x\.transpose\(0, -1\)",
    "adjacent columns (sliced)": r"strides \(64, 2\) .*contiguous last dimension",
    "no stride of 0": r"strides \(0, 1\)",
    "strides below 2**40 bytes": r"strides \(1099511627776, 1\); a stride is below 2\*\*40 bytes",
    "sizes below 2**31": r"shape \(2147483648, 16\); coordinates are int32",
    "sizes from 1": r"shape \(0, 64\) is empty; .*return before",
    "1 to 5 dimensions": "6 dimensions .*1 to 5: reshape",
    "a block size each": r"block \(32,\) for x of shape \(64, 64\); give a size for each",
    "powers of two": r"block \(16, 24\) .*power of two",
    "16 bytes a block row": r"block \(16, 4\) .*at least 16 bytes, so at least 8",
    "2**20 in a block": r"block \(2048, 1024\) .*more than 1048576 elements",
    "block fits shared memory": r"block \(1024, 256\) .*takes 524352 bytes of the \d+ of shared memory",
    "a dtype of TMA": r"dtype torch\.bool; TMA copies torch\.int8",
    "a dtype of TMA (complex)": r"dtype torch\.complex64",
    "zero or nan": "padding is 'edge'",
    "NaN for floats": r"padding 'nan' for x of torch\.int32",
    "NaN for floats (float8)": r"padding 'nan' for x of torch\.float8_e4m3fn",
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_refused_by_name(h, rule):
    x, padding, block = tensor_of(rule, h.device)
    error = TypeError if "dtype" in rule else ValueError
    with pytest.raises(error, match=f"probe: .*{SAID[rule]}"):
        require_descriptor("probe", x, block, padding)
    if rule not in OFFLINE and x.dtype not in (torch.bool, torch.complex64):
        sizes = tuple(max(n, 1) for n in x.shape)
        with pytest.raises(error, match=f"window: .*{SAID[rule]}"):
            window(x, (0,) * x.ndim, sizes, block, padding)
    assert refused(rule, h.device).startswith(f"{error.__name__}: copy: ")


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_breaks_nothing_else(h, rule, monkeypatch):
    """Without the line of the rule, the tensor would pass: what is shown to be refused is the rule's own doing."""
    x, padding, block = tensor_of(rule, "meta")
    mended = {
        "start at 16 bytes": lambda: (x[:, 7:], padding, block),
        "row stride of 16 bytes": lambda: (x.new_empty(64, 64), padding, block),
        "adjacent columns": lambda: (x.t(), padding, block),
        "adjacent columns (sliced)": lambda: (x.new_empty(64, 64), padding, block),
        "no stride of 0": lambda: (x.new_empty(64, 64), padding, block),
        "strides below 2**40 bytes": lambda: (x.as_strided((2, 64), (2**39 - 8, 1)), padding, block),
        "sizes below 2**31": lambda: (x[1:], padding, block),
        "sizes from 1": lambda: (x.new_empty(1, 64), padding, block),
        "1 to 5 dimensions": lambda: (x[0], padding, block[1:]),
        "a block size each": lambda: (x, padding, (32, 32)),
        "powers of two": lambda: (x, padding, (16, 32)),
        "16 bytes a block row": lambda: (x, padding, (16, 8)),
        "2**20 in a block": lambda: (x, padding, (64, 64)),
        "block fits shared memory": lambda: (x, padding, (256, 256)),
        "a dtype of TMA": lambda: (x.to(torch.int8), padding, block),
        "a dtype of TMA (complex)": lambda: (x.to(torch.float32), padding, block),
        "zero or nan": lambda: (x, "nan", block),
        "NaN for floats": lambda: (x.to(torch.float32), padding, block),
        "NaN for floats (float8)": lambda: (x.to(torch.half), padding, block),
    }
    monkeypatch.setattr(descriptors, "device_limits", lambda device: type("Limits", (), {"shared_bytes": 227 * 1024}))
    x, padding, block = mended[rule]()
    require_descriptor("probe", x, block, padding)


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


@given(
    corner=st.lists(st.integers(-300, 300), min_size=1, max_size=5),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    store=st.booleans(),
    cols=st.integers(1, 40),
)
def test_what_a_box_may(corner, itemsize, store, cols):
    """Exactly: whole 16 bytes in the last coordinate; to store, none negative and whole 16 bytes of a row."""
    dtype = {1: torch.int8, 2: torch.half, 4: torch.float32, 8: torch.float64}[itemsize]
    x = torch.empty(*(2 for _ in corner[1:]), cols, dtype=dtype)
    fine = corner[-1] * itemsize % 16 == 0
    if store:
        fine = fine and min(corner) >= 0 and cols * itemsize % 16 == 0
    try:
        require_box("probe", x, tuple(corner), store=store)
    except ValueError:
        assert not fine
    else:
        assert fine


@pytest.mark.parametrize(
    ("corner", "error", "message"),
    [(3, TypeError, "coordinates 3 for weights"), ((0, 8.0), TypeError, "pass a tuple of ints"),
     ((8,), ValueError, r"\(8,\) for weights of shape \(4, 8\); one for each"),
     ((2**31, 0), ValueError, "coordinates are int32"), ((0, -(2**31) - 8), ValueError, "coordinates are int32")],
)  # fmt: skip
def test_bad_boxes(corner, error, message):
    with pytest.raises(error, match=f"probe: .*{message}"):
        require_box("probe", torch.zeros(4, 8), corner, label="weights")


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
    monkeypatch.setattr(descriptors, "unchecked_box", lambda form, x, y, *_: y.as_strided((64, 66), (128, 1)).zero_())
    assert box_outcome(form, "stores", h.device.type) == "4096 of 4096 wrong, and 128 beside them, to column 65"
    monkeypatch.setattr(descriptors, "unchecked_box", lambda form, x, y, *_: y.zero_())
    assert box_outcome(form, "far", h.device.type) == "right"
    assert box_outcome(form, "loads", h.device.type) == "3416 of 4096 wrong"


def test_what_a_broken_box_does(h):
    """What the interpreter makes of them; on a GPU it is the demo's, in a process of its own each."""
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


def test_a_rule_that_is_let_through_fails_the_demo(h, monkeypatch):
    monkeypatch.setitem(RULES, "nothing", ("nothing", lambda d: (torch.zeros(8, 8, device=d), "zero", (8, 8))))
    with pytest.raises(AssertionError, match="our check let 'nothing' pass, broken by nothing"):
        refused("nothing", h.device)


def _bad(device):
    x = torch.randn(4, 8, device=device)
    return {
        "a list": (([1.0], (0, 0), (4, 8)), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "float starts": ((x, (0.0, 0), (4, 8)), {}, TypeError, r"starts is \(0\.0, 0\); pass a tuple of ints"),
        "a number as sizes": ((x, (0, 0), 4), {}, TypeError, "sizes is 4; pass a tuple of ints"),
        "a true size": ((x, (0, 0), (True, 8)), {}, TypeError, "sizes is"),
        "one start": ((x, (0,), (4, 8)), {}, ValueError, r"1 starts for x of shape \(4, 8\)"),
        "three sizes": ((x, (0, 0), (4, 8, 1)), {}, ValueError, "3 sizes"),
        "a negative size": ((x, (0, 0), (-1, 8)), {}, ValueError, "cannot be negative"),
        "a start far away": ((x, (2**31, 0), (4, 8)), {}, ValueError, "coordinates are int32"),
        "an end far away": ((x, (0, 0), (2**31 - MAX_BLOCK, 8)), {}, ValueError, "coordinates are int32"),
        "a form there is not": ((x, (0, 0), (4, 8)), {"form": "tma"}, ValueError, "form is 'tma'; take one of"),
        "no dimension": ((x[0, 0], (), ()), {}, ValueError, "0 dimensions"),
        "a block of floats": ((x, (0, 0), (4, 8)), {"block": (4.0, 8)}, ValueError, "power of two"),
        "a block of 0": ((x, (0, 0), (4, 8)), {"block": (0, 8)}, ValueError, "power of two"),
        "a number as block": ((x, (0, 0), (4, 8)), {"block": 8}, ValueError, "block 8 for x"),
        "requires grad": ((x.clone().requires_grad_(), (0, 0), (4, 8)), {}, RuntimeError, "no backward"),
        "a device without kernels": ((x.to("meta"), (0, 0), (4, 8)), {}, RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, kwargs, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"window: .*{message}"):
        window(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_odd_starts_are_refused(h, form, dtype):
    """Before anything is launched, on every device: on a GPU they end in an illegal instruction."""
    step = 16 // dtype.itemsize
    x = torch.zeros(4, 2 * step, dtype=dtype, device=h.device)
    for start in {-step - 1, -1, 1, step // 2, 3 * step + 1} - {0}:
        with pytest.raises(ValueError, match=rf"window: coordinates \(1, {start}\) for x .* here of {step}"):
            window(x, (1, start), (4, 8), form=form)
    assert window(x, (1, -step), (4, 8), form=form).shape == (4, 8)


def test_what_a_launch_does_with_a_broken_rule(h):
    if not h.interpreted:
        pytest.skip("a launch that may end the process's use of the GPU is the demo's, in a process of its own")
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


def allocator():
    from triton.runtime import _allocation

    return _allocation._allocator.get()


def test_the_allocator_is_left_as_found(h):
    before, mine = allocator(), Workspace(h.device)
    seen = []
    with_workspace(mine, lambda: seen.append(allocator()))
    assert seen == [mine]
    assert allocator() is before

    def stumble():
        raise KeyError("midway")

    with pytest.raises(KeyError, match="midway"):
        with_workspace(mine, stumble)
    assert allocator() is before

    def of_the_caller():
        other = Workspace(h.device)
        triton.set_allocator(other)
        window(h.randn(8, 8), (0, 0), (8, 8), form="device")
        assert allocator() is other
        assert not other.asked  # the window brought its own

    contextvars.copy_context().run(of_the_caller)


def test_the_workspace_remembers():
    mine = Workspace(torch.device("cpu"))
    assert mine(256, 128, None).numel() == 256
    assert mine.asked == [(256, 128)]


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


@pytest.mark.parametrize("shape", [(1, 1), (3, 72), (64, 64), (65, 136), (700, 130)])
@pytest.mark.parametrize("form", COPIES)
def test_copies(h, shape, form):
    x = h.randn(shape[0], (shape[1] + 7) // 8 * 8, dtype=h.half)[:, : shape[1]]
    h.check(functools.partial(copy, form), lambda x: x.double(), x, what=form, **EXACT)


def test_copies_without_checks(h):
    x = h.randn(130, 72, dtype=h.half)
    for form in FORMS:
        assert torch.equal(unchecked(form, x, "zero", *TILE), x)


@pytest.mark.parametrize(
    ("form", "shape", "message"),
    [("tma", (4, 8), "form is 'tma'; take one of"), (None, (4, 8), "form is None"), ("host", (8,), "need a matrix"),
     ("pointers", (4, 9), r"strides \(9, 1\)"), ("device", (0, 8), "is empty")],
)  # fmt: skip
def test_bad_copies(h, form, shape, message):
    with pytest.raises(ValueError, match=f"copy: .*{message}"):
        copy(form, torch.zeros(shape, dtype=torch.half, device=h.device))


def test_host_times_are_of_each_call(h):
    calls = []
    us = host_us({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, h.device, repeats=3)
    assert set(us) == {"a", "b"}
    assert calls.count("a") == calls.count("b") == 27


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_code(sm):
    x = torch.empty(4096, 4096, dtype=torch.float16, device="meta")
    for form in COPIES:
        (kernel,) = compile_for(copy, (form, x), sms=(sm,))
        assert kernel.error is None
        assert kernel.spills == 0
        if sm < 90 or form == "pointers":
            assert not {"cp.async.bulk.tensor", "mbarrier"} & set(kernel.found)
            assert ("ld.global.v4" in kernel.found) == (form != "host")
        else:
            assert kernel.found["cp.async.bulk.tensor"] == 2
            assert kernel.found["mbarrier"]


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("sm", [90, 100, 120])
def test_windows_of_every_rank_are_tma(sm, rank):
    x = torch.empty(*([4] * (rank - 1)), 64, dtype=torch.bfloat16, device="meta")
    for form in FORMS:
        for padding in ("zero", "nan"):
            (kernel,) = compile_for(unchecked, (form, x, padding, *([2] * (rank - 1)), 16), sms=(sm,))
            assert kernel.error is None
            assert kernel.spills == 0
            assert kernel.found["cp.async.bulk.tensor"] == 2


def test_only_the_device_form_writes_descriptors():
    x = torch.empty(4096, 4096, dtype=torch.float16, device="meta")
    for form in COPIES:
        ptx = dump(copy, (form, x), sm=90)["ptx"]
        assert ("tensormap.replace" in ptx) == form.startswith("device")
        assert len(re.findall(r"\.param \.align 64 \.b8 \w+\[128\]", ptx)) == (2 if form == "host" else 0)


def test_the_demo_and_what_it_finds(h):
    h.timing = False
    demo(h)
    rows = next(rows for name, rows in h.record.facts.items() if name.startswith("rules broken"))
    assert set(RULES) <= set(rows)
    assert rows["row stride of 16 bytes"]["host descriptor"] == "AssertionError"
    assert rows["row stride of 16 bytes"]["device descriptor"] == "accepted"  # triton issue 10927
    assert rows["16 bytes a block row"]["host descriptor"] == "accepted"
    assert rows["16 bytes a block row"]["device descriptor"] == "ValueError"
    assert all(row["our check"] in ("ValueError", "TypeError") for row in rows.values())
    assert set(BOXES) <= set(rows)
    for rule in BOXES:  # nobody else notices before the launch
        assert {rows[rule][f"{form} descriptor"] for form in FORMS} == {"accepted"}
    table = h.record.facts["PTX of a copy on sm_90"]
    assert table["device"]["tensormap"] > table["host"]["tensormap"] == table["pointers"]["tensormap"] == 0
    assert table["host"]["bytes of arguments"] > 2 * WORKSPACE
    assert [kernel["sm"] for kernel in h.record.codegen] == [80, 89, 90, 100, 120]


@pytest.mark.gpu
def test_broken_rules_on_the_gpu(h):
    """Each in a process of its own; what comes of them is printed by the demo, here only that it comes to an end."""
    show_rules(h)
    said = h.record.facts["what was said"]
    for rule, words in said.items():
        for form in ("host", "device"):
            if words[form] == "accepted" and rule not in OFFLINE:
                assert not words[f"{form}, run"].startswith("no result"), (rule, form)
                # Loads and stores of boxes that break a rule are never right; a store may end at the element one day.
                assert rule not in BOXES or words[f"{form}, run"] != "right" or BOXES[rule].columns == 63, (rule, form)
    x = h.randn(64, 64)  # this process's use of the GPU goes on
    assert torch.equal(copy("host", x), x)


@pytest.mark.gpu
def test_bfloat16_and_the_same_bits_each_time(h):
    x = h.randn(3000, 4104, dtype=torch.bfloat16)
    for _ in range(3):
        for form in COPIES:
            assert torch.equal(copy(form, x), x)
        for form in FORMS:
            assert torch.equal(window(x, (-5, 8), (3010, 4096), (32, 64), "zero", form)[5:3005], x[:, 8:])


@pytest.mark.gpu
def test_starts_of_16_bytes_on_the_gpu(h):
    """Negative and beyond the end, in every dimension, with rows that end anywhere."""
    x = h.randn(70, 136, dtype=torch.float16)[:, :131]
    for row, col in ((-3, -8), (-200, 16), (1, -256), (69, 128), (5, 136), (200, 296)):
        check(h, x, (row, col), (80, 150), (16, 32))


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(14)
    x = torch.empty(2**31 // 8192 + 65, 8192, dtype=torch.bfloat16, device=h.device).normal_()
    for form in COPIES:
        assert torch.equal(copy(form, x), x)


@pytest.mark.gpu
def test_a_device_descriptor_in_a_new_thread(h):
    import threading

    x, got = h.randn(64, 64), []
    thread = threading.Thread(target=lambda: got.append(copy("device", x)))
    thread.start()
    thread.join()
    assert torch.equal(got[0], x)
