"""layer_norm: two forward and three backward kernels against float64, autograd, and the exchange between programs."""

import itertools
import time
from functools import partial

from harness.check import judge, poisoned_outputs
from harness.codegen import compile_for
from harness.hardware import interpreted

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from examples.common import device, mailbox
from examples.common.rows import DTYPES
from examples.common.training import forward_backward, in_float64
from examples.triton import layer_norm as lesson
from examples.triton import layer_norm_backward as backwards
from examples.triton import layer_norm_backward_split as split
from examples.triton import layer_norm_long, softmax_long
from examples.triton.layer_norm import (
    ROWS_MAX,
    layer_norm,
    layer_norm_rows,
    reference,
    reference_step,
    torch_layer_norm,
)
from examples.triton.layer_norm_backward import BACKWARD_ROWS_MAX, reference_backward
from examples.triton.layer_norm_long import layer_norm_split
from examples.triton.layer_norm_resident import layer_norm_resident
from tests.examples.triton.helpers import INF, NAN, code, meta, refused

FORWARDS = [layer_norm_rows, layer_norm_resident]
BACKWARDS = [backwards.layer_norm_backward_rows, backwards.layer_norm_backward_loop]
SPLIT = split.layer_norm_backward_split
by_forward = pytest.mark.parametrize("forward", [*FORWARDS, pytest.param(layer_norm_split, marks=pytest.mark.gpu)])
by_backward = pytest.mark.parametrize("backward", [*BACKWARDS, pytest.param(SPLIT, marks=pytest.mark.gpu)])
# One element, a prime, around one tile of several kernels, more rows than a program or a group takes, no rows.
SHAPES = [(1, 1), (3, 781), (5, 256), (9, 257), (6, 4097), (40, 33), (0, 300)]
CASES = [(shape, (torch.float32, torch.float16)[i % 2]) for i, shape in enumerate(SHAPES)]
COLUMNS = {2: 8192, 4: 4096}  # that a program owns of a row which programs share, by the bytes of a value
EPS = torch.finfo(torch.float32).eps


def width(forward, cols):
    """As many columns as the kernel takes."""
    return min(cols, ROWS_MAX) if forward is layer_norm_rows else cols


def inputs(h, rows, cols, dtype=torch.float32, wide=None):
    """x, weight, bias, dy; weight and bias in `wide` if given."""
    x, dy = h.randn(rows, cols, dtype=dtype, scale=2.0), h.randn(rows, cols, dtype=dtype)
    weight, bias = (h.randn(cols, dtype=wide or dtype) for _ in range(2))
    return x + 1, weight, bias, dy


def statistics(x, eps=1e-5, dtype=torch.float32):
    """mean and rstd from float64, rounded once."""
    x = x.double()
    mean = x.mean(1, keepdim=True)
    return mean[:, 0].to(dtype), ((x - mean).square().mean(1) + eps).rsqrt().to(dtype)


def check_forward(forward, x, weight, bias, eps=1e-5, **budget):
    """y against float64, and mean and rstd, which are float32 whatever x is."""
    what = f"{forward.__name__} {tuple(x.shape)}"
    with poisoned_outputs(what):
        y, mean, rstd = forward(x, weight, bias, eps)
    judge(y, reference(x, weight, bias, eps), what=what, dtype=x.dtype, terms=x.shape[1], **budget)
    for got, want in zip((mean, rstd), statistics(x, eps, torch.float64), strict=True):
        judge(got, want, what=what, dtype=torch.float32, terms=x.shape[1], **budget | {"constant_ok": True})


def check_backward(backward, dy, x, weight):
    """dx sums over columns, the gradients of weight and bias over rows: each with its own budget."""
    args = (dy, x, weight, *statistics(x))
    what = f"{backward.__name__} {tuple(x.shape)}"
    with poisoned_outputs(what):
        got = backward(*args)
    for name, part, want in zip(("dx", "dweight", "dbias"), got, reference_backward(*args), strict=True):
        dtype, terms = (x.dtype, x.shape[1]) if name == "dx" else (weight.dtype, x.shape[0])
        judge(part, want, what=f"{what} {name}", dtype=dtype, terms=terms)


@by_forward
def test_forward_shapes_and_layouts(h, forward):
    for (rows, cols), dtype in CASES:
        check_forward(forward, *inputs(h, rows, width(forward, cols), dtype=dtype)[:3])
    x, weight, bias, _ = inputs(h, 9, 1000)
    for rows in (x[:, 100:881], x[::2, :781], x[:1, :781].expand(6, 781)):  # the last: one row in memory, six in view
        check_forward(forward, rows, weight[:781], bias[:781])


@by_backward
def test_backward_shapes_layouts_and_nan(h, backward):
    unit = 16 if backward is SPLIT else 1  # what columns and strides must be multiples of
    for (rows, cols), dtype in CASES[1:]:  # of one column the gradient is 0
        x, weight, _, dy = inputs(h, rows, -(-cols // unit) * unit, dtype=dtype)
        check_backward(backward, dy, x, weight)
    x, weight, _, dy = inputs(h, 9, 4992 + unit)
    some = 784 if backward is SPLIT else 781
    for dy_rows, x_rows in (
        (dy[:, 3 * unit : 3 * unit + some], x[:, 7 * unit : 7 * unit + some]),
        (dy[:1, :some].expand(9, some), x[:, :some]),
    ):
        check_backward(backward, dy_rows, x_rows, weight[:some])
    dy[2, 5] = dy[3, -1] = x[6, 7] = NAN
    check_backward(backward, dy, x, weight)


@by_backward
def test_backward_of_a_large_mean(h, backward):
    """Of two products one is rounded in x * rstd - mean * rstd, and x_hat off by 5e-4; dx has such terms too."""
    half = h.randn(3, 2048) + 1e4
    x = torch.cat((half, 2e4 - half), 1)  # exactly: so the mean is 10000, and float32 has it
    weight, dy = h.randn(4096), h.randn(3, 4096)
    dy += (x - 1e4) * weight.sign()  # so that the mean of g * x_hat is not small
    check_backward(backward, dy, x, weight)


# Of layer_norm_resident too, whose steps change with the length of a row; weights like x, and weights in float32.
@pytest.mark.parametrize("cols", [300, ROWS_MAX + 1, 4097, BACKWARD_ROWS_MAX, BACKWARD_ROWS_MAX + 1, 64 * 1024 + 1])
def test_where_one_kernel_ends_and_the_next_begins(h, cols):
    x, weight, bias, dy = inputs(h, 1, cols, dtype=h.half, wide=torch.float32 if cols % 2 else None)
    check_forward(lesson.layer_norm_forward, x, weight, bias)
    if cols < 64 * 1024 or not h.interpreted:
        check_backward(lesson.layer_norm_backward, dy, x, weight)


@by_forward
def test_extreme_rows(h, forward):
    extreme_rows(h, forward, width(forward, 3000))


def extreme_rows(h, forward, cols, short=300):
    x, weight, bias, _ = inputs(h, 6, cols)
    # A variance made as E[x^2] - E[x]^2 would be noise: at a mean of 3000, float32 keeps 1 of the 9000001 apart. And y
    # made with the mean that is returned, rounded to float32, would be off by half a unit in the last place of 10000.
    for offset in (300.0, -3000.0, 1e4):
        check_forward(forward, x[:2] + offset, weight, bias)
    for factor, eps in ((1e15, 1e-5), (1e-15, 1e-30), (1, 0.0), (1e-3, 10.0)):
        check_forward(forward, x[:2] * factor, weight, bias, eps=eps)
    # Of a power of two, 300 columns leave some empty, which lie at 0: here 1e20 from the row, with an infinite square.
    few = x[:2, :short]
    check_forward(forward, (1 + 1e-3 * few) * 1e20, weight[:short], bias[:short], operand_eps=1e3 * EPS)
    x[0, 0], x[1, 7], x[2, -1], x[3, 11], x[4, -1], x[5] = INF, INF, -INF, NAN, NAN, INF
    h.check(lambda *args: forward(*args)[0], reference, x, weight, bias, terms=x.shape[1], what="rows with inf and NaN")
    x = torch.tensor([0.0, 1.0, -0.1, 1000.1], device=h.device)[:, None]
    # Without variance a row is the bias. In 16 bits nothing is subtracted first, so the mean must be exact: a GPU's
    # division by a number that is no power of two is not.
    for dtype, some in ((torch.float32, min(781, cols)), (torch.float16, min(512, cols))):
        rows = x.expand(4, some).contiguous()
        check_forward(forward, *(t[..., :some].to(dtype) for t in (rows, weight, bias)), constant_ok=True)


def test_autograd(h):
    """Any number of dimensions, also some that cannot be merged; gradients of one number expanded, or transposed; and
    no second derivative, of a linear loss neither, whose dy requires no grad: there 0 would go unnoticed."""
    weight, bias = h.randn(300), h.randn(300)
    for x in (h.randn(300), h.randn(2, 3, 5, 300), h.randn(2, 0, 300), h.randn(6, 4, 300).transpose(0, 1)):
        h.check(forward_backward(layer_norm), reference_step, x, weight, bias, h.randn(*x.shape), terms=300)
    for dy in (h.randn(1).expand(6, 300), h.randn(300, 6).t()):
        inputs = h.randn(6, 300), weight, bias, dy
        h.check(forward_backward(layer_norm), reference_step, *inputs, terms=300, constant_ok=True)
    x = h.randn(4, 300).requires_grad_()
    for loss in (torch.sum, lambda y: y.square().sum()):
        (dx,) = torch.autograd.grad(loss(layer_norm(x, weight.requires_grad_(), bias)), x, create_graph=True)
        with pytest.raises(RuntimeError, match="layer_norm: its gradient has no derivative"):
            dx.square().sum().backward()


@triton.jit
def peek_at_once(ptr):
    """What is in the mailbox now, in place of peek, which is assembly."""
    return tl.load(ptr)


@triton.jit
def receive_at_once(ptr, word):
    """What was in the mailbox, in place of receive, which waits."""
    first = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    return first, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


def twice_in_turn(monkeypatch, module, block):
    """A call for kernels of `module` whose programs own `block` columns: run(fn, *args) is what fn(*args) returns.

    Programs run one after the other. What they send does not depend on what they receive, so after a first run the
    mailbox is full, and a second one computes with it.
    """
    mail = torch.empty(300, dtype=torch.int64)
    stand_ins = {
        "interpreted": lambda: False, "peek": peek_at_once, "receive": receive_at_once, "new_mailbox": lambda *_: mail,
    }  # fmt: skip
    # Nothing waits, so any number of parts will do.
    stand_ins |= {"split_shape": lambda *_: (block, 1, 1), "split_limit": lambda *_: 2000}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(module, name, stand_in)

    def run(fn, *args):
        mail.fill_(-1)
        fn(*args)
        mail[0] = -1  # the tickets start again
        return fn(*args)

    return run


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # what the first of two runs finds in empty mailboxes
@pytest.mark.skipif(not interpreted(), reason="compiled kernels cannot be given another way to receive")
def test_the_split_forward_interpreted(h, monkeypatch):
    """Slices that are full and that are not, whose vectors are and are not, more rows than groups, rows apart, and rows
    hard to be exact for. A thread has one vector, 2 or 4, or single values."""
    for block in (64, 512):
        run = twice_in_turn(monkeypatch, layer_norm_long, block)

        def in_turn(*args, run=run):
            return run(layer_norm_split, *args)

        in_turn.__name__ = "layer_norm_split"
        for i, shape in enumerate([(2, 64), (5, 320), (7, 100), (9, 65), (1, 300), (2, 1024), (17, 560), (2, 1040)]):
            for dtype in (torch.float32, torch.float16)[i % 2 :]:
                check_forward(in_turn, *inputs(h, *shape, dtype=dtype)[:3])
    x, weight, bias, _ = inputs(h, 5, 300, dtype=torch.float16, wide=torch.float32)
    check_forward(in_turn, x[:, 100:250], weight[:150], bias[:150])
    check_forward(in_turn, x + 300, weight, bias)
    extreme_rows(h, in_turn, 300, short=100)
    extreme_rows(h, in_turn, 300, short=112)  # in vectors, of which some threads have none


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_rows_finish_many_times_over_with_the_same_bits(h, dtype):
    """Programs of a group wait for each other: few and many rows, odd numbers of parts, two streams at once."""
    longest = split.split_limit(*(h.randn(2, 64, dtype=dtype) for _ in range(2)))
    streams = [torch.cuda.Stream() for _ in range(2)]
    for rows, cols in ((1, longest), (1000, 40000), (5000, 3 * 8192 + 16), (3, longest), (2, 48)):
        x, weight, _, dy = inputs(h, rows, cols, dtype=dtype)
        check_backward(SPLIT, dy, x, weight)
        args, got = (dy, x, weight, *statistics(x)), []
        torch.cuda.synchronize()
        for stream in streams * 5:  # a row takes an eighth of the SMs at most
            with torch.cuda.stream(stream):
                got.append(SPLIT(*args))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for each in got for a, b in zip(each, got[0], strict=True))
    x, weight, _, dy = inputs(h, 200, 12032, dtype=dtype)  # rows apart
    check_backward(SPLIT, dy[:, 16:12016], x[:, 16:12016], weight[:12000])
    for cols in (longest + 16, 12001):
        x, weight, _, dy = inputs(h, 1, cols, dtype=dtype)
        check_backward(lesson.layer_norm_backward, dy, x, weight)  # goes on with the loop


@pytest.mark.parametrize("sms", [1, 15, 16, 132, 148])
def test_what_waits_for_each_other_fits_an_eighth_of_the_sms(monkeypatch, sms):
    monkeypatch.setattr(device, "device_limits", lambda _: device.Limits(sms, 0))
    eighth = max(1, sms // 8)
    assert mailbox.split_max_cols(None, 4096) == 4096 * eighth
    assert mailbox.split_max_cols(None, 8192, 2) == 8192 * 2 * eighth
    for dtype, wide in itertools.product(DTYPES, DTYPES):
        columns = mailbox.slice_cols(meta(1, 1, dtype=dtype), meta(1, dtype=wide))
        assert columns == COLUMNS[max(dtype.itemsize, wide.itemsize)]


@triton.jit
def hold_sms_kernel(x_ptr, nanoseconds, BLOCK: tl.constexpr):
    """Keeps an SM's registers, 64 for each of 1024 threads, for so long."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()
        x += (now % 2).to(tl.float32)
    tl.store(x_ptr + at, x)


def hold_sms(x, programs, seconds=2):
    hold_sms_kernel[(programs,)](x, int(seconds * 1e9), BLOCK=1 << 16, num_warps=32)


def test_what_holds_sms_holds_all_registers():
    assert code(90, (), hold_sms, meta(1 << 16, dtype=torch.float32), 1, spills=1 << 10).registers == 64


@pytest.mark.gpu
def test_they_end_beside_a_kernel_that_keeps_seven_eighths_of_the_sms(h):
    x, weight, _, dy = inputs(h, 2, split.split_limit(h.randn(2, 64), h.randn(2, 64)))
    rows = h.randn(2, softmax_long.split_limit(h.randn(2, 64)))
    calls = [partial(SPLIT, dy, x, weight, *statistics(x)), partial(softmax_long.softmax_split, rows)]
    x, weight, bias, _ = inputs(h, 2, layer_norm_long.split_limit(h.randn(2, 64), h.randn(64)))
    calls.append(partial(layer_norm_split, x, weight, bias))
    sms, registers = device.device_limits(h.device).sms, torch.zeros(1 << 16, device=h.device)
    for call in calls:
        call()
        hold_sms(registers, 1, seconds=0)
        torch.cuda.synchronize()
        holding, waiting = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(holding):
            hold_sms(registers, sms - sms // 8)
        time.sleep(0.1)
        with torch.cuda.stream(waiting):
            call()
        waiting.synchronize()
        ended_first = not holding.query()  # else it waited until the SMs were free
        torch.cuda.synchronize()
        assert ended_first, call.func.__name__


@pytest.mark.gpu
def test_benchmark_widths_and_more_elements_than_an_int32_counts(h, gpu_gib):
    for cols in (64, 1024, 4096, 8192, 12000, 16384, 20000, 65536, 131072, 200_000):
        for dtype, wide in ((torch.float32, None), (torch.float16, None), *((torch.bfloat16, w) for w in DTYPES[::2])):
            x, weight, bias, dy = inputs(h, 300, cols, dtype=dtype, wide=wide)
            check_forward(lesson.layer_norm_forward, x, weight, bias)
            check_backward(lesson.layer_norm_backward, dy, x, weight)
    gpu_gib(40)
    half = torch.bfloat16
    for cols in (1000, 12000, 50000):
        x, dy = (torch.empty(2**31 // cols + 5, cols, dtype=half, device=h.device).normal_() for _ in range(2))
        weight, bias = (h.randn(cols, dtype=half) for _ in range(2))
        y, mean, rstd = lesson.layer_norm_forward(x, weight, bias)
        dx, _, dbias = lesson.layer_norm_backward(dy, x, weight, mean, rstd)
        for part in (slice(0, 3), slice(-3, None)):
            want = reference_backward(dy[part], x[part], weight, mean[part], rstd[part])[0]
            judge(dx[part], want, what="dx", dtype=half, terms=cols)
            judge(y[part], reference(x[part], weight, bias), what="y", dtype=half, terms=cols)
        judge(dbias, dy.sum(0, dtype=torch.float64), what="dbias", dtype=half, terms=len(x))
        del x, dy, y, dx


def test_bad_input(h):
    x, weight, bias, dy = inputs(h, 4, 8)
    for forward in (*FORWARDS, lesson.layer_norm_forward):
        refused(forward, TypeError, "weight is None", x, None, bias)
        refused(forward, TypeError, r"bias is torch\.float32", x.half(), weight.half(), bias)
        for error, eps in ((TypeError, True), (ValueError, -1e-5), (ValueError, NAN)):
            refused(forward, error, "eps is .*; pass a", x, weight, bias, eps)
    for backward in (*BACKWARDS, SPLIT, lesson.layer_norm_backward):
        refused(backward, ValueError, "dy is .*float16, but x is .*float32", dy.half(), x, weight, *statistics(x))
    refused(layer_norm, ValueError, "has no columns", x[:, :0], weight, bias)
    x, weight, bias, dy = inputs(h, 1, BACKWARD_ROWS_MAX + 1)
    refused(layer_norm_rows, ValueError, f"a row may have {ROWS_MAX} here; call layer_norm_forward", x, weight, bias)
    too_long = f"a row may have {BACKWARD_ROWS_MAX} here; call layer_norm_backward"
    refused(BACKWARDS[0], ValueError, too_long, dy, x, weight, *statistics(x))
    if h.interpreted:
        refused(SPLIT, RuntimeError, "Gluon kernels are not interpreted; call", dy, x, weight, *statistics(x))
    for cols, answer in ((65505, "must be multiples of 16 "), (2**18, "a row may have 196608 here; call")):
        x, stats = meta(2, cols), meta(2, dtype=torch.float32)
        (kernel,) = compile_for(SPLIT, (x, x, meta(cols), stats, stats), sms=(90,))
        assert kernel.error.startswith("ValueError: layer_norm_backward_split: ")
        assert answer in kernel.error


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_forward_finishes_many_times_over_with_the_same_bits(h, dtype):
    longest, anywhere = (
        layer_norm_long.split_limit(h.randn(2, cols, dtype=dtype), h.randn(cols, dtype=dtype)) for cols in (64, 50)
    )
    for rows, cols in ((1, longest), (1000, 40000), (5000, 3 * 8192 + 1), (3, longest), (2, anywhere - 1), (2, 50)):
        args = inputs(h, rows, cols, dtype=dtype)[:3]
        check_forward(layer_norm_split, *args)
        got = [layer_norm_split(*args) for _ in range(10)]
        assert all(torch.equal(a, b) for each in got for a, b in zip(each, got[0], strict=True))
    few = inputs(h, 2, 1072, dtype=dtype)[:3]  # where some threads have no columns
    if dtype is not torch.float16:
        check_forward(
            layer_norm_split, (1 + 1e-3 * few[0].double()).mul(1e20).to(dtype), *few[1:], operand_eps=1e3 * EPS
        )
    # Without variance a row is the bias: in 16 bits of a power of two columns, of which the mean is exact.
    constant = h.randn(64, 1, dtype=dtype, scale=1e3).expand(64, 32768).contiguous()
    check_forward(layer_norm_split, constant, *inputs(h, 1, 32768, dtype=dtype)[1:3], constant_ok=True)
    for cols in (longest + 16, anywhere + 1):  # goes on with L1
        check_forward(lesson.layer_norm_forward, *inputs(h, 1, cols, dtype=dtype)[:3])


@pytest.mark.parametrize(("dtype", "wide"), [(dtype, dtype) for dtype in DTYPES] + [DTYPES[::-2]])
def test_generated_code_of_the_split_forward(dtype, wide):
    """Twelve programs fit an SM; float32 weights, or all of it in float32, too; slices are full, or not."""
    for cols in (65536, 65504):
        x, weight = meta(1024, cols, dtype=dtype), meta(cols, dtype=wide)
        for kernel in compile_for(layer_norm_split, (x, weight, weight), sms=(80, 90, 100, 120)):
            assert (kernel.error, kernel.kernel) == (None, "norm_split_kernel")
            assert kernel.spills <= (0 if kernel.sm in (90, 100) and cols == 65536 else 48)  # some addresses
            fit(kernel, layer_norm_long.split_shape(x, weight)[2])
            assert all(kernel.found.get(name) for name in ("cp.async", "atom", "st.global.v4")), kernel.found


def fit(kernel, programs: int) -> None:
    """So many programs of the kernel are on an SM at once, whose registers are allocated in units of 8 a thread."""
    assert (kernel.shared + 1024) * programs <= kernel.shared_limit + 1024
    assert -(-kernel.registers // 8) * 8 * kernel.warps * 32 * programs <= 65536


@pytest.mark.parametrize(("dtype", "wide"), [(dtype, dtype) for dtype in DTYPES] + [DTYPES[::-2]])
def test_generated_code_of_the_split_backward(dtype, wide):
    """All that it launches compiles and fits; so many programs of it fit an SM; slices are full, or not; one row."""
    for rows, cols in ((4096, 32768), (4096, 32752), (1, 20000)):
        x, weight, stats = meta(rows, cols, dtype=dtype), meta(cols, dtype=wide), meta(rows, dtype=torch.float32)
        kernels = compile_for(SPLIT, (x, x, weight, stats, stats), sms=(80, 90, 100, 120))
        assert not any(kernel.error or kernel.too_much for kernel in kernels)
        main = [kernel for kernel in kernels if kernel.kernel == f"{SPLIT.__name__}_kernel"]
        assert [kernel.sm for kernel in main] == [80, 90, 100, 120]
        for kernel, programs in zip(main, (4, 6, 6, 3), strict=True):
            assert kernel.spills <= 8
            fit(kernel, programs)
            assert all(kernel.found.get(name) for name in ("cp.async", "atom", "st.global.v4")), kernel.found


def test_backward_as_an_operator(h):
    """What torch.compile calls: its schema, and shapes and dtypes without data; errors while compiling."""
    x, weight, _, dy = inputs(h, 3, 32, dtype=torch.float16, wide=torch.float32)
    args = (dy, x, weight, *statistics(x))
    torch.library.opcheck(backwards.layer_norm_backward.operator, args)
    refused_by_compiled(backwards.layer_norm_backward, "dy is .*float16, but x is .*float32", dy, x.float(), *args[2:])
    refused_by_compiled(
        backwards.layer_norm_backward, "an input requires grad", dy, x.clone().requires_grad_(), *args[2:]
    )


def test_backward_is_captured_as_that_operator(h):
    nodes = []

    def capture(graph, _):
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return lambda *_: (torch.empty(0),) * 3

    x, weight, _, dy = inputs(h, 4, 10240, dtype=torch.float16)
    torch.compiler.reset()  # torch skips a function for good once a compiled call of it has raised
    torch.compile(backwards.layer_norm_backward, fullgraph=True, backend=capture)(dy, x, weight, *statistics(x))
    assert nodes[0] == "companion_examples_triton_layer_norm_backward.layer_norm_backward.default"
    assert all("getitem" in node for node in nodes[1:])


def refused_by_compiled(fn, match, *args):
    torch.compiler.reset()
    with pytest.raises(Exception, match=f"{fn.__name__}: {match}"):  # torch wraps it, in a type of its own
        torch.compile(fn, backend="aot_eager")(*args)


@pytest.mark.parametrize("summed", [False, True])  # the gradient of a sum is one number, with strides of 0
def test_a_compiled_step_has_no_graph_break(h, summed):
    """The forward is torch's here: no interpreted kernel can be traced."""

    def forward(rows, weight, bias, eps):
        y, mean, rstd = torch.ops.aten.native_layer_norm(rows, rows.shape[-1:], weight, bias, eps)
        return y, mean[:, 0], rstd[:, 0]

    def ours(*args):
        return backwards.LayerNorm.apply(*args, 1e-5, forward)

    x, weight, bias, dy = inputs(h, 6, 300)
    x, dy = x.view(2, 3, 300), dy.view(2, 3, 300)
    if summed:
        one_graph(
            lambda *args: ours(*args).sum(), lambda *args: torch_layer_norm(*args).sum(), x, weight, bias, dy.sum()
        )
    else:
        one_graph(ours, torch_layer_norm, x, weight, bias, dy)


def one_graph(fn, of_torch, x, *rest, backend="aot_eager"):
    """Forward and backward, without a graph break, against of_torch in float64."""
    torch.compiler.reset()
    got = forward_backward(torch.compile(fn, fullgraph=True, backend=backend))(x, *rest)
    for part, want in zip(got, in_float64(forward_backward(of_torch))(x, *rest), strict=True):
        terms = x.numel() // x.shape[-1] if part.shape == x.shape[-1:] else x.numel() if part.ndim == 0 else x.shape[-1]
        judge(part, want, what="one graph", dtype=x.dtype, terms=terms)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [4096, 12000, 16384, 200_000])
def test_the_lesson_compiles_without_a_graph_break(h, cols):
    one_graph(layer_norm, torch_layer_norm, *inputs(h, 40, cols, dtype=h.half), backend="inductor")
