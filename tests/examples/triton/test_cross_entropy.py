"""cross_entropy: loss and gradient against float64, by every way to make the gradient, and what autograd may do."""

import gc
import itertools
import os
import re
import subprocess
import sys
from functools import partial
from unittest.mock import MagicMock, patch

from harness.catalog import ROOT
from harness.codegen import compile_for, dump

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from examples.common.classes import gradient_of
from examples.common.device import interpreted, sms_to_wait_on
from examples.common.rows import DTYPES
from examples.triton import cross_entropy as lesson
from examples.triton import cross_entropy_backward as backwards
from examples.triton import cross_entropy_long as long
from examples.triton import cross_entropy_operands as around
from examples.triton.cross_entropy import BUDGET, WHEN, cross_entropy, loss_and_gradient, reference, reference_gradient
from examples.triton.cross_entropy_operands import SUM_BLOCK, empty_gradient, prepare, row_layout, total_of
from tests.examples.triton.helpers import FUSED, INF, NAN, harness, meta, refused

by_when = pytest.mark.parametrize("when", WHEN)
SMOOTH_SPILLS = 64  # bytes a thread of the split kernel may spill with label smoothing, which sums the logits too
SMOOTHED = {"label_smoothing": 0.1}
OPTIONS = {"reduction": ("mean", "sum", "none"), "label_smoothing": (0.0, 0.1), "ignore_index": (-100, 2)}


def gradient(logits, target, factor=1.0, **options):
    """The gradient of factor * loss in logits that are no leaf, so that it may be made in place."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        loss = (cross_entropy(leaf * 1, target, **options) * factor).sum()
        return torch.autograd.grad(loss, leaf)[0]


def check(h, logits, target, when="forward", factor=1.0, **options):
    what = f"{tuple(logits.shape)} {logits.dtype} {when} {options}"
    budget = BUDGET | {"constant_ok": True}
    losses = partial(cross_entropy, **options), partial(reference, **options)
    h.check(*losses, logits, target, what=what, dtype=torch.float32, **budget | {"terms": 1})
    # With smoothing, a probability near the share of every class cancels; among few classes, the target's near 1.
    cancels = "label_smoothing" in options or logits.shape[1] < 32
    h.check(
        partial(gradient, factor=factor, gradient=when, **options),
        lambda x, t: reference_gradient(x, t, **options) * factor,
        logits, target, what=f"gradient {what} times {factor}", **budget | {"terms": int(cancels)},
    )  # fmt: skip


def operands(h, rows, classes, dtype=torch.float32, scale=2.0):
    return h.randn(rows, classes, dtype=dtype, scale=scale), h.randint(classes, rows)


@by_when
def test_shapes_and_layouts(h, when):
    """One class, a prime, around one block, more rows than programs; rows apart, a start that is not aligned."""
    for rows, classes in [(1, 1), (3, 781), (1, 8193), (13, 3)]:
        check(h, *operands(h, rows, classes), when)
    logits, target = operands(h, 5, 1000, torch.float16)
    for x, t in ((logits[:, 100:881], target % 781), (logits[::2, :781], target[::2] % 781)):
        check(h, x, t, when)
    h.check(cross_entropy, reference, logits[:1].expand(5, 1000), target, dtype=torch.float32, **BUDGET)


@by_when
def test_ignored_rows_and_no_rows(h, when):
    logits, target = operands(h, 6, 300)
    target[2:5] = -100
    logits[3, 7], logits[4] = NAN, INF  # 0 times these is NaN, in torch too
    for reduction in OPTIONS["reduction"]:
        check(h, logits, target, when, reduction=reduction)
        check(h, logits[:0], target[:0], when, reduction=reduction)
        check(h, logits[:2], torch.full_like(target[:2], -100), when, reduction=reduction)  # a mean of nothing


@by_when
def test_infinities_and_nan_are_those_of_torch(h, when):
    logits, target = operands(h, 8, 3000)
    logits[0] = -INF  # nothing in the row: NaN
    logits[1, :2000] = logits[2, 1000:] = -INF
    target[1:3] = 2500
    logits[3, 7], logits[4, 11], logits[5, -1] = INF, NAN, NAN
    logits[6, :], logits[6, 3] = -1e30, -1000.0
    logits[7, target[7]] = -INF
    for smoothing in OPTIONS["label_smoothing"]:
        check(h, logits, target, when, reduction="none", label_smoothing=smoothing)


@by_when
def test_extreme_rows(h, when):
    """The maximum is subtracted before anything is rounded in units of the logits' own size."""
    logits, target = operands(h, 2, 3000)
    for x in (logits + 1e4, logits - 1e4, logits * 1e3, logits * 1e-30, logits * 1e30, torch.full_like(logits, 1e30)):
        check(h, x, target, when)
    confident = logits.scatter(1, target[:, None], 30.0)
    loss = cross_entropy(confident, target, "none")
    assert (loss >= 0).all()
    assert (loss < 1e-6).all()


def test_a_target_that_is_no_class_gives_nan(h):
    """In its row alone, and nothing is read outside; torch's kernel stops the process."""
    logits, target = operands(h, 5, 100)
    # Each way with itself: another kernel may round otherwise.
    clean = {when: gradient(logits, target, reduction="sum", gradient=when)[[0, 1, 2, 4]] for when in WHEN}
    for bad in (100, -1, -99, 2**40):
        target[3] = bad
        for when in WHEN:
            what = f"class {bad}, {when}"
            loss = cross_entropy(logits, target, "none")
            grad = gradient(logits, target, reduction="sum", gradient=when)
            assert loss.isnan().tolist() == [False, False, False, True, False], what
            assert grad[3].isnan().all(), what
            assert torch.equal(grad[[0, 1, 2, 4]], clean[when]), what


@pytest.mark.parametrize("when", WHEN[:2])
def test_a_scaled_loss_is_rounded_once(h, when):
    """The gradient of a mean over many rows is below float16's range; scaled before it is rounded, it is not lost."""
    logits, target = operands(h, 20, 5000, torch.float16)
    assert (gradient(logits, target, gradient=when) == 0).any()
    check(h, logits, target, when, factor=65536.0)
    got = gradient(logits, target, 65536.0, gradient=when)
    assert not (got == 0).any()


@by_when
def test_a_gradient_for_each_row(h, when):
    logits, target = operands(h, 12, 300)
    dy = h.randn(12)
    dy[::3] = 1.0  # those rows are not made again
    want = torch.autograd.grad(F.cross_entropy(x := logits.double().requires_grad_(), target, reduction="none"), x, dy)
    leaf = logits.requires_grad_()
    for grad in (dy, torch.stack([dy, dy], 1)[:, 0]):
        got = torch.autograd.grad(cross_entropy(leaf * 1, target, "none", gradient=when), leaf, grad)[0]
        h.check(lambda *_, got=got: got, lambda *_: want[0], logits.detach(), **BUDGET)


def test_a_gradient_that_is_ready_is_left_alone_where_dy_is_1(h):
    """Of one number for all rows, and of one for each."""
    logits, target = operands(h, 40, 300)  # more rows than programs: in the interpreter these are 8
    loss, stats, made = lesson._forward(logits, target, "forward", "sum", -100, 0.0)
    each = torch.ones(40, device=h.device)
    each[1::3], each[0] = -0.5, NAN
    for dy in (loss.new_ones(()), loss.new_tensor(2.0), loss.new_tensor(NAN), each[1], each, each[2::3][:1].expand(40)):
        ready = torch.full_like(made, 7.0)
        got = backwards.launch_backward(dy, logits, target, stats, ready, 0.0, False)
        want = torch.where(dy.expand(40)[:, None] == 1, 7.0, dy.expand(40)[:, None] * made)
        assert got is ready
        assert torch.allclose(got, want, equal_nan=True, atol=1e-6)


@pytest.mark.parametrize(
    ("classes", "first", "gap"),
    [(1003, 0, 0), (1003, 1, 0), (1003, 0, 3), (1003, 8, 8), (1003, 3, 5), (992, 0, 16), (1, 1, 0), (7, 0, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_gradient_where_torch_compile_puts_it(h, classes, first, gap, dtype, smoothing):
    """Its rows begin within 16 bytes where those of the logits do, elsewhere, or some here and some there."""
    memory, target = h.randn(first + 12 * (classes + gap), dtype=dtype, scale=2.0), h.randint(classes, 12)
    logits = memory[first:].as_strided((12, classes), (classes + gap, 1))
    target[5] = -100
    _, stats, _ = lesson._forward(logits, target, "backward", "mean", -100, smoothing)

    def traced(logits, target):
        with patch.object(torch.compiler, "is_compiling", lambda: True):
            return backwards.launch_backward(stats.new_ones(()), logits, target, stats, None, smoothing, False)

    wanted = partial(reference_gradient, label_smoothing=smoothing)
    terms = int(classes < 32 or smoothing > 0)  # what cancels, see check
    h.check(traced, wanted, logits, target, **BUDGET | {"terms": terms, "constant_ok": True})


WRITES = """
import torch
import triton
from harness.codegen import OfflineDriver
from torch._higher_order_ops import triton_kernel_wrap as wrap
from examples.triton.cross_entropy_backward import cross_entropy_backward_kernel as kernel

triton.runtime.driver.set_active(OfflineDriver())
for classes, width, edges in ((1003, 8, True), (1008, 1, False)):
    logits, grad = torch.zeros(8, classes, dtype=torch.float16), torch.zeros(8, classes, dtype=torch.float16)
    given = torch.ones(()), logits, torch.zeros(8, dtype=torch.int64), torch.zeros(3, 8), grad
    given += 0, classes, 1, classes, 8, classes, 0.0, False, False, False, False, 1024, width, edges, edges
    arguments = dict(zip(kernel.arg_names, given, strict=True))
    if hasattr(wrap, "identify_mutated_tensors"):
        print(*wrap.identify_mutated_tensors(kernel, arguments, {}))
    else:  # torch 2.15
        print(*(each.name for each in wrap.identify_accessed_tensors(kernel, arguments, {}).read_writes.writes))
"""


@pytest.mark.offline
def test_torch_compile_sees_that_only_the_gradient_is_written():
    """A tensor that the address of a store depends on counts as written: torch.compile would copy the logits, and
    torch 2.11 refuse them where they are a leaf."""
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", WRITES], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == (["grad_ptr"] * 2, 0), done.stderr


def test_the_losses_are_summed(h):
    """By one program, in one order: one, fewer than a block, around one, several blocks; NaN and infinities; none."""
    for rows in (1, 7, SUM_BLOCK - 1, SUM_BLOCK + 1, 3 * SUM_BLOCK, around.SUM_MOST + 1):
        losses = h.randn(rows).abs()
        total = total_of(losses, "sum")
        assert (total.shape, total.dtype) == ((), torch.float32)
        assert torch.allclose(total.double(), losses.double().sum(), rtol=1e-6)
        assert torch.equal(total, total_of(losses, "sum"))
        for bad in ((NAN,), (INF,), (-INF,), (-INF, INF)):
            losses[-len(bad) :] = losses.new_tensor(bad[-rows:])
            got, want = (x.nan_to_num(7.0, 8.0, 9.0) for x in (total_of(losses, "mean"), losses.sum()))
            assert torch.equal(got, want)
    for reduction in ("mean", "sum"):
        want = F.cross_entropy(h.randn(0, 3), h.randint(3, 0), reduction=reduction)
        assert torch.equal(total_of(losses[:0], reduction).nan_to_num(7.0), want.nan_to_num(7.0))


def test_backward_twice(h):
    """The second backward leaves what the first returned alone; in place there is no second."""
    logits, target = operands(h, 7, 300)
    leaf = logits.requires_grad_()
    for when in WHEN[:2]:
        loss = cross_entropy(leaf, target, gradient=when)
        (one,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        before = one.clone()
        (three,) = torch.autograd.grad(loss, leaf, torch.tensor(3.0, device=h.device), retain_graph=True)
        (again,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(one, before)
        assert torch.equal(again, one)
        assert torch.allclose(three, 3 * one)
    loss = cross_entropy(leaf * 1, target, gradient="in place")
    torch.autograd.grad(loss, leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"cross_entropy: in place, its backward runs once"):
        loss.backward()
    for when in WHEN:
        for squared in (False, True):
            loss = cross_entropy(leaf * 1, target, gradient=when)
            (grad,) = torch.autograd.grad(loss.square() if squared else loss, leaf, create_graph=True)
            with pytest.raises(RuntimeError, match="cross_entropy: its gradient has no derivative"):
                grad.square().sum().backward()


def test_in_place(h):
    """The gradient takes the logits' memory, and an operation that saved the logits notices."""
    x, target = operands(h, 7, 300)
    x.requires_grad_()
    logits = x * 2
    loss = cross_entropy(logits, target, gradient="in place")
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert grad.data_ptr() == logits.data_ptr()
    logits = torch.tanh(x)  # its backward wants its result
    loss = cross_entropy(logits, target, gradient="in place")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for leaf in (x, x[:, :200], x.view(7, 300)):
        refused(cross_entropy, RuntimeError, "in place, logits are a leaf", leaf, target % 200, gradient="in place")
    rows = (x * 2)[:1].expand(7, 300)
    refused(cross_entropy, ValueError, "in place, rows overlap", rows, target, gradient="in place")
    with torch.no_grad():  # nothing is written where no gradient is wanted
        before = x.clone()
        cross_entropy(x, target, gradient="in place")
        assert torch.equal(x, before)


@given(
    rows=st.integers(0, 9), classes=st.integers(2, 200), when=st.sampled_from(WHEN), dtype=st.sampled_from(DTYPES[:2]),
    factor=st.sampled_from((1.0, -2.5)),
    options=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}),
)  # fmt: skip
def test_any_shape(rows, classes, when, dtype, factor, options):
    """In steps of 32 or 64 columns: one or several, the last whole or not, and rows that begin anywhere."""
    h, few = harness(), (128, 1)
    with patch.multiple(lesson, RESIDENT=few, STREAMED=few), patch.object(backwards, "BLOCK_BYTES", 128):
        check(h, *operands(h, rows, classes, dtype), when, factor if when != "in place" else 1.0, **options)


def test_where_the_vectors_of_rows_are(h):
    """Rows that begin and end anywhere; those of the gradient begin where the logits' do, within 16 bytes."""
    x = h.randn(8, 1000, dtype=torch.float16)
    assert row_layout(x) == row_layout(x[:, :784]) == (8, False)
    padded = (
        x[:, :781],
        x[:, 1:769],
        x[:, 3:781],
        x.view(-1)[3 : 3 + 8 * 781].view(8, 781),
        x[:1].expand(8, 1000)[:, 1:],
    )
    for rows in (*padded, x.view(-1)[: 8 * 781].view(8, 781), x.view(-1)[: 8 * 997].view(8, 997)[:, :991]):
        assert row_layout(rows) == (8, True)
        grad = empty_gradient(rows)
        assert grad.shape == rows.shape
        for i in range(8):
            assert (grad[i].data_ptr() - rows[i].data_ptr()) % 16 == 0
        assert grad.stride(0) < rows.shape[1] + 8
        for when in WHEN[: 3 if rows.stride(0) else 2]:
            check(h, rows, h.randint(700, 8), when, factor=1.0 if when == "in place" else 3.0)
    assert empty_gradient(x).is_contiguous()
    assert empty_gradient(x[:, :784]).is_contiguous()


def test_in_place_nothing_is_written_beside_the_rows(h):
    leaf = h.randn(8, 1000, dtype=torch.float16).requires_grad_()
    for first in (0, 1, 8):
        memory = leaf * 2
        logits = memory[:, first : first + 781]
        loss = cross_entropy(logits, h.randint(781, 8), gradient="in place") * 3
        torch.autograd.grad(loss, leaf)
        beside = torch.ones(1000, dtype=torch.bool, device=h.device)
        beside[first : first + 781] = False
        assert torch.equal(memory[:, beside], (leaf * 2)[:, beside])


@triton.jit
def peek_at_once(ptr):
    return tl.load(ptr)


@triton.jit
def receive_at_once(ptr, word):
    """What was in the mailbox, in place of receive, which waits."""
    first = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    return first, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # what the first of two runs finds in empty mailboxes
@pytest.mark.skipif(not interpreted(), reason="compiled kernels cannot be given another way to receive")
def test_the_split_kernel_interpreted(h, monkeypatch):
    """Programs run one after the other. What they send does not depend on what they receive, so after a first run the
    mailbox is full, and a second one computes with it."""
    mail = torch.empty(1000, dtype=torch.int64)

    def start_again(target, ignore_index, reduction, _):
        mail[0] = -1  # the tickets
        return prepare(target, ignore_index, reduction)

    stand_ins = {
        "interpreted": lambda: False, "peek": peek_at_once, "receive": receive_at_once, "_mailbox": lambda *_: mail,
        "prepare": start_again, "SHAPES": {2: (512, 1, 1), 4: (256, 1, 1)},
        "split_max_cols": lambda *_: 10000,  # nothing waits, so any number of parts will do
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(long, name, stand_in)
    monkeypatch.setattr(lesson, "L1_BEST_KIB", 0)
    launch = lesson.launch_split

    def twice(logits, target, loss, stats, grad, *options):
        if mail[1] == -1:
            launch(logits, target, loss, stats, torch.empty_like(grad), *options)
            assert (mail[1 : 1 + len(logits)] != -1).all()
        launch(logits, target, loss, stats, grad, *options)

    monkeypatch.setattr(lesson, "launch_split", twice)
    for i, (rows, classes) in enumerate([(2, 256), (7, 781), (9, 1000), (1, 5), (20, 300), (3, 2051)]):
        logits, target = operands(h, rows, classes, DTYPES[i % 2])
        target[1:2], target[4:5] = -100, classes - 1
        masked = i in (1, 5)  # most classes of a row, as a grammar masks them: whole threads have nothing but -inf
        if masked:
            logits[2, : classes - 90], target[2] = -INF, classes - 3
        for when in WHEN[::2]:
            for smoothing in (0.0,) if masked else OPTIONS["label_smoothing"]:  # smoothed, a masked class is infinite
                leaf = logits.clone().requires_grad_()
                options = {"label_smoothing": smoothing, "reduction": ("mean", "sum")[i % 2]}
                mail.fill_(-1)
                loss = cross_entropy(leaf * 1, target, gradient=when, **options)
                got = torch.autograd.grad(loss, leaf)[0]
                assert mail[0] != -1  # tickets were drawn
                budget = BUDGET | {"constant_ok": True}
                h.check(lambda *_, loss=loss: loss.detach(), partial(reference, **options), logits, target,
                        dtype=torch.float32, **budget | {"terms": 1})  # fmt: skip
                h.check(lambda *_, got=got: got, partial(reference_gradient, **options), logits, target,
                        **budget | {"terms": int(smoothing > 0 or classes < 32)})  # fmt: skip
    if FUSED:  # far from 0 the exponents are rounded, by which sums and gradients are corrected
        far, labels = (h.randn(9, 1000) + h.randn(9, 1) * 2e4).half(), h.randint(1000, 9)
        far[6:], far[range(6, 9), labels[6:]] = -30.0, torch.tensor([20.0, 30.1, 40.3]).half()  # a loss of 0
        far[5], far[5, 3] = -500.0, -100.0  # relative to -500 the exponential of -100 is infinite
        leaf = far.clone().requires_grad_()
        mail.fill_(-1)
        losses = cross_entropy(leaf, labels, "none", gradient="forward")
        got = torch.autograd.grad(losses.sum(), leaf)[0]
        assert (losses >= 0).all()
        budget = BUDGET | {"constant_ok": True, "terms": 1}
        none, total = partial(reference, reduction="none"), partial(reference_gradient, reduction="sum")
        h.check(lambda *_: losses.detach()[:6], none, far[:6], labels[:6], dtype=torch.float32, **budget)
        h.check(lambda *_: got[:6], total, far[:6], labels[:6], **budget)
    target[0], target[1], target[2] = 5000, 256, 2050
    logits[1, 1000] = INF
    mail.fill_(-1)
    leaf = logits.requires_grad_()
    got = torch.autograd.grad(cross_entropy(leaf, target, "sum", gradient="forward"), leaf)[0]
    assert got.isnan().any(1).tolist() == [True, True, False]


def longest_of(dtype, device) -> int:
    """Classes of a row whose programs an eighth of the SMs can run."""
    block_n, _, per_sm = long.SHAPES[dtype.itemsize]
    return block_n * per_sm * sms_to_wait_on(device)


def test_what_waits_for_each_other_fits_an_eighth_of_the_sms(monkeypatch):
    monkeypatch.setattr(long, "interpreted", lambda: False)
    for dtype in DTYPES:
        for more in (0, 1):
            logits = meta(2, longest_of(dtype, meta().device) + more, dtype=dtype)
            assert long.can_split(logits) == (not more)


def test_bad_input(h):
    logits, target = operands(h, 4, 8)
    for error, message, *args in (
        (TypeError, "target is torch.int32; pass classes as int64", logits, target.int()),
        (ValueError, r"target has shape \(3,\)", logits, target[:3]),
        (ValueError, r"target has shape \(4, 8\)", logits, target[:, None].expand(4, 8)),
        (ValueError, "has no columns", logits[:, :0], target),
        (ValueError, "reduction 'max' is not one of", logits, target, "max"),
        (TypeError, "ignore_index is 1.0", logits, target, "mean", 1.0),
        *((ValueError, "label_smoothing is", logits, target, "mean", -100, s) for s in (-0.1, 1.5, NAN, True, "0.1")),
        (ValueError, "gradient 'now' is not one of", logits, target, "mean", -100, 0.0, "now"),
    ):
        refused(cross_entropy, error, message, *args)


@pytest.mark.parametrize("sm", [90, 100])
def test_generated_code(sm):
    """Wide loads and stores, of rows that begin anywhere too, and an SM holds the programs it should. Slices of long
    rows are on their way to shared memory ahead of their use."""
    short = [(32000, torch.bfloat16), (16000, torch.float32)]
    for classes, dtype in [*itertools.product((128256, 128257, 50257), DTYPES), *short]:
        args = meta(4096, classes, dtype=dtype), meta(4096, dtype=torch.int64)
        kernels = {kernel.kernel: kernel for kernel in compile_for(loss_and_gradient, args, {}, sms=(sm,))}
        assert all((kernel.too_much, kernel.error) == (None, None) for kernel in kernels.values())
        split = classes * dtype.itemsize > 1024 * lesson.L1_BEST_KIB
        forward = kernels.pop("cross_entropy_split_kernel" if split else "cross_entropy_kernel")
        assert set(kernels) == {f"cross_entropy_{name}_kernel" for name in ("prepare", "sum", "backward")}
        narrow = split and dtype.itemsize == 2  # 64 exponentials a thread; float32 has 32
        assert not any(kernel.spills for kernel in (forward, *kernels.values()))
        assert forward.found.get("st.global.v4")
        assert forward.found.get("cp.async" if split else "ld.global.v4")
        per_sm = long.SHAPES[dtype.itemsize][2] if split else 2
        allocated = -(-forward.registers // 8) * 8 * 32  # of a warp
        assert allocated * -(-forward.warps * per_sm // 4) <= 16384  # of a quarter of the SM
        assert (forward.shared + 1024) * per_sm <= 228 * 1024
        if split:
            smooth = {kernel.kernel: kernel for kernel in compile_for(loss_and_gradient, args, SMOOTHED, sms=(sm,))}
            assert smooth["cross_entropy_split_kernel"].spills <= (SMOOTH_SPILLS if narrow else 4)
        (loss, *_) = sorted(compile_for(cross_entropy, args, {}, sms=(sm,)), key=lambda kernel: kernel.kernel)
        assert (loss.kernel, loss.spills, loss.error) == ("cross_entropy_kernel", 0, None)
        assert loss.found.get("ld.global.v4")
        assert loss.registers <= 40  # three quarters of the threads that an SM may have, or more


PADDED = (128256, 131072), (128256, 128264), (50257, 50304), (50257, 50264), (50264, 50272)


@pytest.mark.parametrize(("classes", "stride"), [*PADDED, (50257, 50257), (50257, 50261)])
def test_vocabularies_of_any_size_have_wide_loads(classes, stride):
    """In every kernel, wherever rows begin: Triton by itself knows only strides that are multiples of 16 numbers."""
    logits, target = meta(4096, stride)[:, :classes], meta(4096, dtype=torch.int64)
    for when in WHEN[:2]:
        kernels = compile_for(loss_and_gradient, (logits, target), {"gradient": when}, sms=(90, 100))
        for each in kernels:
            if each.kernel not in ("cross_entropy_prepare_kernel", "cross_entropy_sum_kernel"):
                assert (each.error, each.spills) == (None, 0)
                assert each.found.get("ld.global.v4") or each.found.get("cp.async"), each
                writes = each.kernel == "cross_entropy_backward_kernel" or when == "forward"
                assert bool(each.found.get("st.global.v4")) == writes, each


WAIT, START = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
ACCESS = r"\b(?:ld|st|atom|cp)\.\S*global"


def ptx_of(sm: int, kernel: str, classes: int, **options) -> str:
    args = meta(4096, classes), meta(4096, dtype=torch.int64)
    return dump(loss_and_gradient, args, options, sm=sm, kernel=f"cross_entropy_{kernel}kernel")["ptx"]


@pytest.mark.parametrize("sm", [90, 100])
def test_kernels_start_early_and_wait_before_they_use_what_another_wrote(sm):
    for classes, main in ((32000, ""), (128256, "split_")):
        for kernel, waits, starts in (("prepare_", 0, 1), (main, 1, 1), ("sum_", 1, 0)):
            ptx = ptx_of(sm, kernel, classes)
            assert (ptx.count(WAIT), ptx.count(START)) == (waits, starts)
            before, _, after = ptx.partition(WAIT if waits else START)
            if kernel:
                assert not re.search(ACCESS, before)
            else:  # the row is read before, its factor after, and nothing is written before
                (scale,) = re.findall(r"(%rd\d+), \[cross_entropy_kernel_param_2\]", before)
                assert "ld.global.L1::evict_last" in before
                assert "st.global" not in before
                assert f"[ {scale} + 0 ]" not in before
                assert f"[ {scale} + 0 ]" in after
            assert re.search(ACCESS, after)
    for options, waits, starts in (({"reduction": "sum"}, 1, 1), ({"reduction": "none"}, 1, 0)):
        ptx = ptx_of(sm, "split_", 128256, gradient="forward", **options)
        assert (ptx.count(WAIT), ptx.count(START)) == (waits, starts)
        ptx = ptx_of(sm, "", 32000, gradient="forward", **options)  # what ran before it is not this lesson's
        assert (ptx.count(WAIT), ptx.count(START)) == (0, starts)


def test_before_sm_90_no_kernel_starts_early():
    for classes, kernels in ((32000, ("prepare_", "", "sum_")), (128256, ("split_",))):
        assert not any("griddepcontrol" in ptx_of(80, kernel, classes) for kernel in kernels)


def test_the_main_kernel_is_launched_early_after_prepare_alone(monkeypatch):
    monkeypatch.setattr(around, "early", lambda _: True)
    monkeypatch.setattr(around, "cross_entropy_prepare_kernel", launches := MagicMock())
    for mail, reduction in itertools.product((None, torch.empty(3)), OPTIONS["reduction"]):
        launches.reset_mock()
        scale, options = prepare(torch.zeros(4, dtype=torch.int64), -100, reduction, mail)
        ran = launches.__getitem__.called
        assert ran == (mail is not None or reduction == "mean")
        assert (scale is not None) == (reduction == "mean")
        assert options == {"EARLY": ran, "SUMMED": reduction != "none"} | ({"launch_pdl": True} if ran else {})
    for more in (0, 1):  # torch's sum follows, which is not launched early
        _, options = prepare(torch.zeros(around.SUM_MOST + more, dtype=torch.int64), -100, "mean")
        assert options["SUMMED"] == (not more)


@pytest.mark.gpu
def test_large_vocabularies_and_more_elements_than_an_int32_counts(h, gpu_gib):
    for classes in (1000, 32000, 50257, 128256, 200064):
        for dtype in DTYPES:
            # A power of two: the gradient at a target is nearly -1 / n_rows, the same number in every row, and bfloat16
            # has it exactly. It rounds 1 / 300 down by 0.2 %, a factor that no kernel could avoid.
            logits, target = operands(h, 512, classes, dtype)
            for when in WHEN:
                check(h, logits, target, when)
            one, two = (loss_and_gradient(logits, target) for _ in range(2))
            assert torch.equal(one, two)
    gpu_gib(30)
    logits = torch.empty(2**31 // 128256 + 300, 128256, dtype=torch.bfloat16, device=h.device).normal_()
    target = h.randint(128256, len(logits))
    grad = loss_and_gradient(logits, target, reduction="sum")
    loss = cross_entropy(logits, target, "none")
    for part in (slice(0, 3), slice(-3, None)):
        x, t = logits[part], target[part]
        h.check(lambda *_, got=grad[part]: got, partial(reference_gradient, reduction="sum"), x, t, **BUDGET)
        h.check(lambda *_, got=loss[part]: got, partial(reference, reduction="none"), x, t,
                dtype=torch.float32, **BUDGET)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("first", [3, 0])
@pytest.mark.parametrize("classes", [1003, 1008])
def test_compiled_with_its_backward(h, classes, first):
    """Rows one after the other, from an aligned address and another, and rows padded to 1008 classes."""
    torch.compiler.reset()
    compiled = gradient_of(torch.compile(cross_entropy, fullgraph=True))
    memory = h.randn(first + 64 * 1008, dtype=h.half, scale=2.0)[first:]
    for stride in (1008, classes):
        logits, target = memory.as_strided((64, classes), (stride, 1)), h.randint(classes, 64)
        h.check(compiled, reference_gradient, logits, target, poison=False, **BUDGET)


@pytest.mark.gpu
def test_in_place_needs_no_memory_beside_the_logits(h):
    x, target = operands(h, 1024, 32000, torch.bfloat16)
    x.requires_grad_()
    for when, times in (("in place", 1), ("forward", 2)):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logits = x * 2
        grad = torch.autograd.grad(cross_entropy(logits, target, gradient=when), logits)
        assert times * x.nbytes <= torch.cuda.max_memory_allocated() - before < times * x.nbytes + (2 << 20)
        del logits, grad


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_rows_finish_many_times_over_with_the_same_bits(h, gpu_gib, dtype):
    """Programs of a group wait for each other: few and many rows, odd numbers of parts, two streams at once."""
    gpu_gib(24)
    longest = longest_of(dtype, h.device)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for rows, classes in ((1, longest), (1024, 50257), (4096, 5 * 16384 + 1), (2, longest - 3)):
        logits, target = operands(h, rows, classes, dtype)
        for options in ({}, {"label_smoothing": 0.125}):  # 0.875 / 2^n is exact: others round alike in every row
            check(h, logits, target, **options)
            got = []
            torch.cuda.synchronize()
            for stream in streams * 5:
                with torch.cuda.stream(stream):
                    got.append(loss_and_gradient(logits, target, **options))
            torch.cuda.synchronize()
            assert all(torch.equal(each, got[0]) for each in got)
    check(h, *operands(h, 2, longest + 1, dtype))  # read from L2 or memory again
