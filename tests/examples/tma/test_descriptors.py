"""descriptors: windows of every rank, layout and dtype; each rule refused by name; whose the allocator is."""

import contextvars
import functools
import math
import re
import threading

from harness.codegen import dump

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.tma import descriptors_rules
from examples.tma.descriptors import COPIES, copy, reference, with_workspace
from examples.tma.descriptors_rules import (
    MAX_BLOCK,
    NAN_DTYPES,
    OFFLINE,
    RULES,
    noticed,
    require_box,
    require_descriptor,
)
from examples.tma.descriptors_window import FORMS, default_block, window, window_reference
from tests.examples.tma.model import no_shrinking
from tests.examples.triton.helpers import harness, meta, refused

EXACT = {"terms": 0, "constant_ok": True}


def check(h, x, starts, sizes, block=None, **options):
    for form in FORMS:
        for padding in ("zero", "nan"):
            fn, want = (functools.partial(each, padding=padding) for each in (window, window_reference))
            what = f"{form}, {padding}, {tuple(x.shape)} {starts} {sizes} {block}"
            h.check(functools.partial(fn, form=form), want, x, starts, sizes, block, what=what, **EXACT)


@no_shrinking
@given(data=st.data(), rank=st.integers(1, 5))
def test_any_window(data, rank):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=rank - 1, max_size=rank - 1)))
    h = harness()
    cols = data.draw(st.integers(1, 40))
    x = h.randn(*shape, (cols + 7) // 8 * 8, dtype=h.half)[..., :cols]
    starts = (*(data.draw(st.integers(-6, 6)) for _ in shape), 8 * data.draw(st.integers(-3, 3)))
    sizes = (*(data.draw(st.integers(0, 5)) for _ in shape), data.draw(st.integers(0, 40)))
    block = (*(data.draw(st.sampled_from([1, 2, 4])) for _ in shape), data.draw(st.sampled_from([8, 16, 32])))
    check(h, x, starts, sizes, data.draw(st.sampled_from([block, None])))


def test_every_dtype(h):
    for dtype in descriptors_rules.DTYPES:
        if dtype is not torch.bfloat16:  # not interpreted
            step, padding = 16 // dtype.itemsize, "nan" if dtype in NAN_DTYPES else "zero"
            x = h.randn(5, 3 * step, dtype=torch.float32, scale=20).to(dtype)
            fn, want = (functools.partial(each, padding=padding) for each in (window, window_reference))
            for form in FORMS:
                h.check(functools.partial(fn, form=form), want, x, (-2, step), (9, 4 * step), what=str(dtype), **EXACT)


def test_rows_that_overlap_and_views_in_any_order(h):
    x = h.randn(4000, dtype=h.half)
    check(h, x.as_strided((20, 40), (16, 1)), (0, 0), (20, 40))  # rows of 40 that start 16 apart
    check(h, x.as_strided((1, 5, 1, 30), (7, 32, 5, 1)), (0, 0, 0, 0), (1, 5, 1, 30))  # strides nobody steps by
    check(h, x[:960].view(2, 3, 4, 5, 8).permute(3, 0, 2, 1, 4), (1, 0, -1, 0, 0), (4, 2, 5, 3, 8))


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


# What is wrong with the example of each rule, in the words of require_descriptor: it breaks no other.
WORDS = {
    "start at 16 bytes": "starts 2 bytes past a multiple of 16", "row stride of 16 bytes": r"strides \(63, 1\)",
    "adjacent columns": r"\(1, 64\); .*describe x\.transpose", "adjacent columns (sliced)": r"strides \(64, 2\)",
    "no stride of 0": r"strides \(0, 1\)", "strides below 2**40 bytes": r"a stride is below 2\*\*40 bytes",
    "sizes below 2**31": "coordinates are int32", "sizes from 1": r"shape \(0, 64\) is empty",
    "1 to 5 dimensions": "6 dimensions", "a block size each": r"block \(32,\)", "powers of two": "power of two",
    "16 bytes a block row": "at least 16 bytes, so at least 8", "2**20 in a block": "more than 1048576",
    "block fits shared memory": r"takes 524352 bytes of the \d+ of shared", "a dtype of TMA": "TMA copies torch.int8",
    "a dtype of TMA (complex)": r"dtype torch\.complex64", "zero or nan": "padding is 'edge'",
    "NaN for floats": "'nan' for x of torch.int32", "NaN for floats (float8)": "'nan' for x of torch.float8_e4m3fn",
}  # fmt: skip


def test_each_rule_is_refused_by_name(h):
    assert WORDS.keys() == RULES.keys()
    for rule, words in WORDS.items():
        x, padding, block = RULES[rule][1](h.device)
        with pytest.raises(TypeError if "dtype" in rule else ValueError, match=f"probe: .*{words}"):
            require_descriptor("probe", x, block, padding)
        if rule not in OFFLINE and "dtype" not in rule:
            sizes = tuple(max(n, 1) for n in x.shape)
            refused(window, ValueError, words, x, (0,) * x.ndim, sizes, block, padding)


def test_what_a_box_may():
    """Whole 16 bytes in the last coordinate; to store, none negative and whole 16 bytes of a row."""
    for corner, cols, store, message in [
        ((-3, -8), 63, False, None), ((1, 300), 64, False, "here of 8: begin at 296"), ((0, 4), 64, False, "here of 8"),
        ((3, 8), 64, True, None), ((0, 1), 64, True, "multiple of 16 bytes"), ((-3, 0), 64, True, "to no negative"),
        ((0, -8), 64, True, "to no negative ones"), ((0, 0), 63, True, "rows of 126 bytes; .*pad the last dimension"),
        ((8,), 64, False, "one for each"), ((2**31, 0), 64, False, "are int32"), ((0, -(2**31) - 8), 64, False, "int3"),
    ]:  # fmt: skip
        x = torch.empty(64, cols, dtype=torch.half)
        if message is None:
            require_box("probe", x, corner, store=store)
        else:
            with pytest.raises(ValueError, match=f"probe: .*{message}"):
                require_box("probe", x, corner, store=store)


def test_bad_windows_and_copies(h):
    x, half = h.randn(4, 8), torch.zeros(4, 9, dtype=torch.half, device=h.device)
    for args, options, error, message in [
        (((0.0, 0), (4, 8)), {}, TypeError, r"coordinates \(0\.0, 0\) .*pass a tuple of ints"),
        (((0, 0), (4.0, 8)), {}, TypeError, r"sizes is \(4\.0, 8\); pass a tuple"),
        (((0,), (4, 8)), {}, ValueError, r"coordinates \(0,\) for x of shape \(4, 8\); one for each"),
        (((0, 0), (-1, 8)), {}, ValueError, r"sizes \(-1, 8\) .*from 0 on"),
        (((0, 0), (2**31 - MAX_BLOCK, 8)), {}, ValueError, "coordinates are int32"),
        (((0, 0), (4, 8)), {"form": "tma"}, ValueError, "form 'tma' is not one of"),
        (((1, 3), (4, 8)), {}, ValueError, r"coordinates \(1, 3\) for x .* here of 4"),
    ]:
        refused(window, error, message, x, *args, **options)
    refused(copy, ValueError, "form 'tma' is not one of", "tma", half)
    refused(copy, ValueError, r"strides \(9, 1\)", "pointers", half)


def allocator():
    from triton.runtime import _allocation

    return _allocation._allocator.get()


def test_the_allocator_is_left_as_found(h):
    before, seen = allocator(), []
    with_workspace(h.device, lambda: seen.append(allocator()))
    assert seen[0](256, 128, None).nbytes == 256
    with pytest.raises(KeyError, match="midway"):
        with_workspace(h.device, lambda: {}["midway"])
    assert allocator() is before

    def of_the_caller():
        triton.set_allocator(seen.append)
        window(h.randn(8, 8), (0, 0), (8, 8), form="device")  # brings its own
        copy("device", h.randn(8, 8))
        assert allocator() == seen.append

    contextvars.copy_context().run(of_the_caller)
    assert len(seen) == 1


def test_copies(h):
    for M, N in [(1, 1), (3, 72), (65, 136), (200, 130)]:
        x = h.randn(M, (N + 7) // 8 * 8, dtype=h.half)[:, :N]
        for form in COPIES:
            h.check(functools.partial(copy, form), reference, x, what=f"{form} {M}x{N}", **EXACT)


def test_who_describes():
    for form in ("host", "device"):
        ptx = dump(copy, (form, meta(4096, 4096, dtype=torch.float16)), sm=90)["ptx"]
        assert ("tensormap.replace" in ptx) == (form == "device")
        assert len(re.findall(r"\.param \.align 64 \.b8 \w+\[128\]", ptx)) == (2 if form == "host" else 0)


def test_what_triton_notices_when_a_descriptor_is_made(h):
    found = noticed(h.device)
    assert {"start at 16 bytes", "row stride of 16 bytes", "adjacent columns", "1 to 5 dimensions"} <= set(found)
    assert not {"no stride of 0", "16 bytes a block row", "block fits shared memory", *OFFLINE} & set(found)


@pytest.mark.gpu
def test_on_the_gpu(h, gpu_gib):
    """The same bits each time; starts of 16 bytes, negative and beyond the end, in every dimension; in a new thread;
    more elements than an int32 counts."""
    x = h.randn(3000, 4104, dtype=torch.bfloat16)
    for _ in range(3):
        for form in COPIES:
            assert torch.equal(copy(form, x), x)
        for form in FORMS:
            assert torch.equal(window(x, (-5, 8), (3010, 4096), (32, 64), "zero", form)[5:3005], x[:, 8:])
    x = h.randn(70, 136, dtype=torch.float16)[:, :131]
    for start in ((-3, -8), (-200, 16), (1, -256), (69, 128), (5, 136), (200, 296)):
        check(h, x, start, (80, 150), (16, 32))
    x, got = h.randn(64, 64), []
    thread = threading.Thread(target=lambda: got.append(copy("device", x)))
    thread.start()
    thread.join()
    assert torch.equal(got[0], x)
    gpu_gib(14)
    x = torch.empty(2**31 // 8192 + 65, 8192, dtype=torch.bfloat16, device=h.device).normal_()
    assert all(torch.equal(copy(form, x), x) for form in COPIES)
