"""fp8_matmul: every variant at every edge, formats, scales, bias, layouts, extremes, bad input, the code.

The partitions of the warp-specialized kernel are also run as Python, in random turns: no GPU is needed for that.
"""

import functools
import itertools
import math
import random
import re
from types import SimpleNamespace

from harness.codegen import CodegenError, compile_for, dump

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.common import gluon as common
from examples.common import operands as checks
from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3, E5M2, OUT_DTYPES
from examples.fp8 import fp8_matmul as lesson
from examples.fp8 import fp8_matmul_persistent as persistent
from examples.fp8 import fp8_matmul_warp_specialized as hopper
from examples.fp8.fp8_matmul import POINTER_TILES, VARIANTS, budget, fp8_matmul, operands, reference, runnable
from examples.fp8.fp8_matmul_persistent import GROUP_M, TMA_TILES, fitting_tile
from studies.fp8.fp8_matmul import CODE, require_only_fp8

FORMATS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]


@pytest.fixture(params=VARIANTS)
def variant(request, h):
    if request.param not in runnable(h.device):
        pytest.skip(f"{request.param} needs another GPU")
    return request.param


@pytest.fixture
def gpu_of(monkeypatch):
    """Let the wrapper believe in another GPU: so many SMs, so much shared memory (the interpreter has no limit)."""

    def pretend(sms, shared_bytes=SHARED_LIMIT[90]):
        for module in (persistent, hopper):
            monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, shared_bytes))

    return pretend


def check(h, inputs, variant=None, out=torch.bfloat16, what=None):
    fn = functools.partial(fp8_matmul, out_dtype=out, variant=variant)
    M, K = inputs[0].shape
    what = what or f"{variant} {M}x{inputs[1].shape[1]}x{K} {out}"
    h.check(fn, reference, *inputs, what=what, dtype=out, **budget(h, K))


# One row, one column, one tile and one more in each dimension, half a tile of columns and 8 more, nothing to add up.
SHAPES = [(1, 16, 16), (37, 8, 112), (129, 264, 144), (5, 136, 16), (5, 16, 0), (0, 8, 16), (5, 0, 16)]
RAGGED = [(1, 1, 1), (37, 53, 101), (129, 257, 129), (3, 5, 0)]  # primes, one more than a tile: only by pointers


@pytest.mark.parametrize(("case", "shape"), list(enumerate(SHAPES + RAGGED)), ids=str)
def test_shapes_formats_and_dtypes(h, case, shape):
    """By every kernel that takes the shape, and by the one that is chosen; with and without bias."""
    M, N, K = shape
    for i, variant in enumerate((None, "pointers") if shape in RAGGED else (None, *runnable(h.device)), case):
        rows, out = i % 2 == 1, OUT_DTYPES[i % 3]
        if min(shape) > 0:
            inputs = operands(h, M, N, K, rows, FORMATS[i % 4])
        else:  # no amax of nothing
            scales = (h.randn(M, 1).exp_(), h.randn(1, N).exp_()) if rows else (h.randn(1).exp_(), h.randn(1).exp_())
            inputs = (h.randn(M, K, dtype=E4M3), h.randn(N, K, dtype=E4M3).t(), *scales)
        if not (h.interpreted and out is torch.bfloat16):  # the interpreter takes no bfloat16
            inputs = (*inputs, h.randn(N, dtype=out))
        check(h, inputs, variant, out)


def test_products_of_zero_leave_the_bias(h, variant):
    """Bit for bit, where K is 0 too; and nothing without a bias, though the product of the least scales underflows."""
    bias, one, least = h.randn(264), torch.ones((), device=h.device), torch.full((), 2.0**-109, device=h.device)
    for K in (0, 16):
        a, b = torch.zeros(3, K, device=h.device).to(E4M3), torch.zeros(264, K, device=h.device).to(E5M2).t()
        assert torch.equal(fp8_matmul(a, b, one, one, bias, torch.float32, variant), bias.expand(3, -1))
        assert not fp8_matmul(a, b, least.expand(3, 1), least.expand(1, 264), variant=variant).any()


def test_scales_of_every_shape(h, variant):
    """None, one or many for each side, contiguous or not: a stride nobody expects, a column of a wider matrix."""
    M, N, K = 130, 264, 32
    a, b, scale_a, scale_b = operands(h, M, N, K, rows=True)
    every_a = [scale_a[:1, 0], scale_a[0, 0], scale_a, h.randn(M, 3).exp_()[:, 1:2], h.randn(M + 1, 1).exp_()[1:]]
    every_b = [scale_b[0, :1], scale_b[0, 0], scale_b, h.randn(2, N).exp_()[:1], h.randn(N, 2).exp_().t()[1:]]
    for i, one in enumerate(every_a):
        check(h, (a, b, one, every_b[(i + 2) % 5]), variant, what=f"{variant} scales {i}")
    bias = h.randn(N + 1, dtype=torch.float32)[1:]  # starts where no TMA could: it is copied
    check(h, (a, b, scale_a, scale_b, bias), variant, torch.float32, what=f"{variant}, bias from 4 bytes on")


def test_every_tile_is_taken_once(h, variant, gpu_of, monkeypatch):
    """By one program, by programs with more and fewer tiles, by more SMs than tiles; a group that is not full."""
    for module in (lesson, persistent, hopper):
        monkeypatch.setattr(module, "GROUP_M", 2)
    for sms in (1, 3, 1000):
        gpu_of(sms)
        check(h, operands(h, 300, 520, 16, rows=True), variant)


def test_layouts(h, variant):
    one = torch.ones((), device=h.device)
    a, w = h.randn(140, 320, dtype=E4M3), h.randn(300, 480, dtype=E4M3)
    pairs = [
        (a, w[:104, :320].t()),  # columns apart: what lies between them must not be summed
        (a[::3, :144], w[16::2, 32:176].t()[:, :136]),  # every third row, every second column
        (a[:1, :144].as_strided((1, 144), (5, 1)), w[:40, :144].t()),  # one row, with a stride nobody steps by
        (a[:, :1], w[:8, :1].t()) if variant == "pointers" else (a[:, :16], w[:8, :16].t()),  # K of one
    ]
    if variant == "pointers":  # what TMA refuses
        pairs += [(a[:, 1:38], w[:264, 3:40].t()), (a[:1].expand(7, 320), w[:9, :320].t())]
    for left, right in pairs:
        check(h, (left, right, one, one), variant, what=f"{variant} strides {left.stride()}, {right.stride()}")


def test_extremes(h, variant):
    """NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile."""
    per_row, one = (h.randn(130, 1).exp_(), h.randn(1, 264).exp_()), (h.randn(1).exp_(), h.randn(1).exp_())
    a, b = h.randn(130, 144), h.randn(264, 144)
    a[3, 5], b[9, 2] = float("nan"), float("nan")  # e4m3fn has no infinity
    a[70, 0], b[200, 0] = float("nan"), float("nan")  # what a mask that is too wide reads after the end of a row
    check(h, (a.to(E4M3), b.to(E4M3).t(), *per_row), variant, what="NaN")
    a[129, 143], b[263, 143], b[130, 7] = (float(x) for x in ("inf", "-inf", "inf"))
    check(h, (a.to(E5M2), b.to(E5M2).t(), *one), variant, what="NaN and infinities")
    a, b = (x.nan_to_num(0, 1, 1) for x in (a, b))
    least, small = (a * 2.0**-8).to(E4M3), (2.0**-30 * scale for scale in one)  # mostly subnormal
    check(h, (least, b.to(E5M2).t(), *small), variant, torch.float32, what="subnormal")
    huge = (40.0 * scale for scale in per_row)
    check(h, (a.to(E4M3), b.to(E4M3).t(), *huge), variant, torch.float16, what="beyond float16, in part")


def test_which_kernel_is_chosen(h, monkeypatch):
    """The last that the GPU has; pointers for what TMA cannot load or store. What the GPU lacks is refused."""

    def gpu(sm):
        for module, its in [(lesson, "architecture"), (checks, "architecture")]:
            monkeypatch.setattr(module, its, lambda device: sm)
        for module in (lesson, common):
            monkeypatch.setattr(module, "gluon_architecture", lambda device: sm)

    a, b, inputs = meta(40, 64), meta(48, 64).t(), operands(h, 16, 16, 16, False)
    for sm, last in [(89, "pointers"), (90, "warp specialized"), (100, "persistent"), (120, "persistent")]:
        gpu(sm)
        assert lesson.choose(a, b, torch.bfloat16) == lesson.choose(a, b[:, :44], torch.float32) == last
        for left, right in [(a[:, :40], b[:40]), (a, b[:, :44]), (a[:, 1:33], b[:32]), (a[:1].expand(40, 64), b)]:
            assert lesson.choose(left, right, torch.bfloat16) == "pointers"
    for sm, variant, message in [
        (80, None, "this GPU is sm_80"), (89, "persistent", "TMA comes with sm_90 .*use variant='pointers'"),
        (100, "warp specialized", "needs sm_90.*use variant='persistent'"),
    ]:  # fmt: skip
        gpu(sm)
        with pytest.raises(RuntimeError, match=f"fp8_matmul: {message}"):
            fp8_matmul(*inputs, variant=variant)


def test_bad_input(h):
    a, b, scale_a, scale_b = operands(h, 4, 16, 32, False)
    wide, nan = {"out_dtype": torch.float32}, torch.full((), math.nan, device=h.device)
    bad = [
        ({"a": a.t().contiguous().t()}, r"a has strides .*\.contiguous"),
        ({"b": b.contiguous()}, r"b has strides \(16, 1\); .*contiguous\(\)\.t"),
        ({"scale_a": torch.ones(1, 16, device=h.device)}, r"scale_a has shape \[1, 16\]; .* or \[4, 1\]"),
        ({"scale_b": nan}, "scale_b has 1 of .* not positive and finite"),
        ({"bias": h.randn(32)[::2]} | wide, r"bias .* strides \(2,\); need"),
        ({"a": a[:, :24], "b": b[:24]}, "K is 24 .*TMA .*multiple of 16"),
        ({"b": b[:, :2]} | wide, "K is 32 and N 2; .*N to one of 4, or use variant='pointers'"),
        ({"a": torch.zeros_like(a).view(-1)[1:65].view(2, 32)}, "a has .* starts 1 bytes past a multiple"),
    ]
    good = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "variant": "persistent"}
    for wrong, message in bad:
        with pytest.raises(ValueError, match=f"fp8_matmul: {message}"):
            fp8_matmul(**good | wrong)
    with pytest.raises(TypeError, match=r"fp8_matmul: bias is torch\.float32; it must be .*bfloat16"):
        fp8_matmul(a, b, scale_a, scale_b, h.randn(16))
    assert fp8_matmul(a, b, scale_a, nan, check_scales=False).isnan().all()  # not looked at, so not refused


# --- code


def meta(*shape, dtype=E4M3):
    return torch.empty(shape, dtype=dtype, device="meta")


def layer(n=4096):
    scales = meta(n, 1, dtype=torch.float32), meta(1, n, dtype=torch.float32)
    return meta(n, n), meta(n, n, dtype=E5M2).t(), *scales


TENSOR_CORES = {89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize(
    ("variant", "sm", "out"), [("pointers", 89, torch.bfloat16), ("persistent", 90, torch.float32)]
)
def test_generated_code(gpu_of, variant, sm, out):
    """Scales and bias fit the registers, and the tile that is chosen fits shared memory: no further step of K would."""
    (kernel,) = compile_for(fp8_matmul, (*layer(), meta(4096, dtype=out), out, variant), sms=(sm,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    assert all(kernel.found.get(name) for name in CODE[variant][sm]), kernel.found
    assert kernel.found["mma f8"] == kernel.found[TENSOR_CORES[sm]], "a tensor-core instruction that is not FP8's"
    gpu_of(1, SHARED_LIMIT[sm])
    tiles = POINTER_TILES if variant == "pointers" else TMA_TILES
    m, n, k, _, *parts, stages = fitting_tile(torch.device("cpu"), tiles, out.itemsize)
    in_use = stages - (TENSOR_CORES[sm] == "mma.sync")
    reckoned = in_use * (m + n) * k + (out.itemsize * m * n // parts[0] if parts else 0) + 2048
    assert kernel.shared <= reckoned <= kernel.shared_limit == SHARED_LIMIT[sm] < reckoned + (m + n) * k


def test_the_partitions_code():
    """With scales and bias there is room, the MMAs of a step are issued together, and neither format is converted."""
    args = (*layer(), meta(4096, dtype=torch.float32), torch.float32)  # it is what is chosen
    (kernel,) = compile_for(fp8_matmul, args, sms=(90,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    assert all(kernel.found.get(name) for name in CODE["warp specialized"][90]), kernel.found
    text = dump(fp8_matmul, args, sm=90)
    assert not re.search("serialized|C75", text["log"])  # ptxas could wait for each before the next is started
    # The first step, which nothing was added to before, and one loop; the second consumer has another after its pause.
    assert text["ttgir"].count("ttng.warp_group_dot ") == 5
    assert "requestedRegisters = array<i32: 240, 24>" in text["ttgir"]
    # One commit for each of them: four MMAs of K = 32 before it.
    assert text["ptx"].count("wgmma.commit_group") == 5
    assert kernel.found["wgmma"] == kernel.found["mma f8"] == 4 * 5 == text["ptx"].count(".f32.e4m3.e5m2")
    # Each waits with one in flight; all are waited for where a tile ends, and by the second before its pause.
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d);", text["ptx"])
    assert sorted(waits) == ["0"] * 3 + ["1"] * 5
    # By TMA: three boxes of operands, scales in three, the bias in one; nothing is loaded otherwise.
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", text["ptx"])) == 7
    assert "ld.global" not in text["ptx"]


# --- the protocol of the partitions


class Piece:
    """A barrier or a buffer, or several of them."""

    def __init__(self, arrivals=0, several=0, shape=()):
        self.arrivals, self.shape = arrivals, (several, *shape)
        self.phase, self.arrived, self.bytes, self.content = 0, set(), 0, None
        self.parts = [Piece(arrivals) for _ in range(several)]

    def index(self, i):
        assert 0 <= i < len(self.parts)  # not from the end
        return self.parts[i]

    def permute(self, order):
        return self

    reshape = permute

    def settle(self):
        """A phase completes with all arrivals, and all bytes that were announced."""
        if len(self.arrived) == self.arrivals and self.bytes == 0:
            self.arrived, self.phase = set(), self.phase + 1


def play(traces, seed):
    """The partitions' actions in random turns. TMA's copies are done whenever chance likes; an MMA has read its
    operands only when it was waited for. What was stored: rows, columns, and the operands of each MMA."""
    chance, copies = random.Random(seed), len(traces)
    at, stores, jobs, seen, products, log = [0] * copies, [0] * copies, [], {}, {}, []
    speed = [chance.choice([1, 1, 30]) for _ in range(copies + 1)]

    def land(buffer, content, barrier, size):
        buffer.content = content
        barrier.bytes -= size
        barrier.settle()

    def send(me, c_buf, content):
        assert c_buf.content == content, "overwritten while it was stored"
        stores[me] -= 1

    def ready(me):
        if at[me] == len(traces[me]):
            return False
        kind, *what = traces[me][at[me]]
        return what[0].phase % 2 != what[1] if kind == "wait" else kind != "store wait" or not stores[me]

    while able := [me for me in range(copies) if ready(me)] + [copies] * bool(jobs):
        (me,) = chance.choices(able, [speed[each] for each in able])
        if me == copies:
            jobs.pop(chance.randrange(len(jobs)))()
            continue
        kind, *what = traces[me][at[me]]
        at[me] += 1
        if kind in ("arrive", "expect"):
            barrier, *size = what
            assert me not in barrier.arrived, "arrived twice in a phase"
            barrier.arrived.add(me)
            barrier.bytes += sum(size)
            barrier.settle()
        elif kind == "load":
            jobs.append(functools.partial(land, *what))
        elif kind == "MMA":
            products[me, what[2]] = tuple(each.content for each in what[:2])
        elif kind == "MMA done":
            assert products[me, what[2]] == tuple(each.content for each in what[:2]), "overwritten while multiplied"
        elif kind == "read":
            seen[me] = what[0].content
        elif kind == "write":
            c_buf, row, col, acc, *lasts = what
            found = [seen[me], *(x.content for x in lasts)]
            assert found == [("scale_a", 0, row), ("scale_b", 0, col), ("bias", 0, col)]
            assert not any(stores), "the buffer of results is still being read"
            c_buf.content = (row, acc)
            jobs.append(functools.partial(send, me, c_buf, (row, acc)))
            stores[me] += 1
            log.append((row, col, [products[me, i] for i in acc]))
        assert at[me] < len(traces[me]) or not stores[me], "ended before TMA had read what was stored"
    assert at == [len(actions) for actions in traces], f"all wait: {log}"
    return log


def order(M, N, block_m, block_n, group):
    """Where tiles start: down each column of a group of rows, then the next column; then the next group."""
    rows, cols = range(0, M, block_m), range(0, N, block_n)
    return [(row, col) for first in range(0, len(rows), group) for col in cols for row in rows[first : first + group]]


def run_partitions(steps, tiles, stages, behind, seed):
    """Every tile by one program, with scales and bias; two columns of tiles, and rows of tiles as needed."""
    half_m, block_n, block_k = 64, 256, 128
    M, N, K = (tiles + 1) // 2 * 2 * half_m, 2 * block_n if tiles > 1 else block_n, steps * block_k - 64 * (seed % 2)
    actions, flight, ids = [], [], itertools.count()

    def note(kind):
        return lambda *what, pred=True: actions.append((kind, *what)) if pred else None

    def load(desc, at, barrier, buffer):
        size = math.prod(desc.block_shape) * desc.dtype.primitive_bitwidth // 8
        actions.append(("load", buffer, (desc.name, *at), barrier, size))

    def multiply(a, b, acc, use_acc=True, is_async=False):
        flight.append((a, b, next(ids)))
        actions.append(("MMA", *flight[-1]))
        return (*(acc if use_acc else ()), flight[-1][2])

    def mmas_done(pending, deps):
        while len(flight) > pending:
            actions.append(("MMA done", *flight.pop(0)))
        return deps[0]

    def store_parts(c_desc, c_buf, free, phase, acc, row, col, scale_a, scale_b, bias, rows, with_bias, half, *more):
        assert not flight, "stored before all MMAs were done"
        if half == 1:
            actions.append(("wait", free, phase))
        actions.append(("write", c_buf, row, col, acc, scale_b, bias))

    def desc(name, bits, *shape):
        return SimpleNamespace(name=name, dtype=SimpleNamespace(primitive_bitwidth=bits), block_shape=shape)

    gl = SimpleNamespace(
        program_id=lambda axis: 0, num_programs=lambda axis: 1, cdiv=lambda x, y: -(-x // y), maximum=max,
        where=lambda which, x, y: x if which else y,
        static_range=range, zeros=lambda *_: (), float32=None,
        NVMMADistributedLayout=lambda **_: None, SliceLayout=lambda *_: None,
    )  # fmt: skip
    fakes = {
        "tma": SimpleNamespace(store_wait=lambda pending: actions.append(("store wait",))), "async_load": load,
        "warpgroup_mma": multiply, "warpgroup_mma_wait": mmas_done, "_store_parts": store_parts,
        "tile_coords": lambda tile, *sizes: order(*sizes)[tile],
    }  # fmt: skip
    fakes |= {n: getattr(hopper, n).fn for n in ("next_slot", "release_previous", "_add_steps", "_consume", "_produce")}
    a_bufs, b_bufs = Piece(0, 2 * stages, (half_m, block_k)), Piece(0, stages, (block_n, block_k))
    ring = (a_bufs, b_bufs, Piece(1, stages), Piece(2, stages))
    last, c_buf = (Piece(0, 2), Piece(), Piece(), Piece(1), Piece(2)), Piece(0, half_m, (block_n,))
    operands = desc("a", 8, half_m, block_k), desc("b", 8, block_n, block_k)
    extra = desc("scale_a", 32, 1, half_m), desc("scale_b", 32, 1, block_n), desc("bias", 16, 1, block_n)
    shared = (ring, last, None, c_buf, *extra[:2], Piece(1, 2), Piece(1), M, N, K, True, True, stages, behind, GROUP_M)
    traces = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "previous_slot", common.previous_slot.fn)
        patch.setattr(Piece, "load", lambda self, layout: actions.append(("read", self)), raising=False)
        for module in (common, hopper):
            patch.setattr(module, "gl", gl)
            names = SimpleNamespace(wait=note("wait"), arrive=note("arrive"), expect=note("expect"))
            patch.setattr(module, "mbarrier", names)
        for name, fake in fakes.items():
            patch.setattr(hopper, name, fake)
        for fn, args in [
            (hopper._produce, (ring, last, *operands, *extra, M, N, K, True, stages, GROUP_M)),
            (hopper._consume, (*shared, 0)),
            (hopper._consume, (*shared, 1)),
        ]:
            actions.clear()
            fn(*args)
            assert not flight, "ended with MMAs in flight"
            traces.append(list(actions))
    assert play(traces, seed) == [
        (r, col, [(("a", r, k), ("b", col, k)) for k in range(0, K, block_k)])
        for row, col in order(M, N, 2 * half_m, block_n, GROUP_M)
        for r in (row, row + half_m)
    ]


def test_anything_but_fp8_that_multiplies_is_found():
    with pytest.raises(CodegenError, match=r"tiles on sm_90: \{'wgmma': 8\}, FP8 only in 4"):
        require_only_fp8("tiles", [SimpleNamespace(sm=90, found={"wgmma": 8, "mma f8": 4})])
    require_only_fp8("tiles", [SimpleNamespace(sm=90, found={"wgmma": 4, "mma f8": 4})])


@given(
    steps=st.integers(1, 9), tiles=st.integers(1, 10), seed=st.integers(0, 2**32),
    behind=st.sampled_from((hopper.HOPPER_BEHIND, 1, 2, 4)),
)  # fmt: skip
@settings(max_examples=60)
def test_the_partitions_neither_wait_for_ever_nor_overwrite(steps, tiles, seed, behind):
    """The kernel's own partitions in random turns; tiles of one step, too, and of fewer than the pause."""
    run_partitions(steps, tiles, hopper.HOPPER_STAGES, behind, seed)


def test_a_pause_longer_than_the_ring_never_ends():
    """And it is found: the first needs a slot that the second has not released."""
    with pytest.raises(AssertionError, match="all wait"):
        run_partitions(9, 2, 4, 5, 0)


# --- what only a GPU can say


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 5208, 784), (8191, 264, 512), (16, 264, 16384)])
def test_shapes_on_the_gpu(h, shape):
    for i, (variant, out) in enumerate(itertools.product(runnable(h.device), OUT_DTYPES)):
        check(h, (*operands(h, *shape, i % 2 == 0, FORMATS[i % 4]), h.randn(shape[1], dtype=out)), variant, out)


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 2, 7, 132])
def test_every_launch_gives_the_same_bits(h, gpu_of, sms):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them. A buffer that
    is read too early or written too early does not do so the same way every time."""
    gpu_of(sms)
    for steps, variant, out in itertools.product((1, 2, 3, 4, 5, 7, 8, 9, 64), runnable(h.device), OUT_DTYPES):
        inputs = operands(h, 700, 1288, 128 * steps - 64 * (steps % 2), rows=sms % 2 == 0)
        inputs = (*inputs, h.randn(1288, dtype=out) if steps % 3 else None)
        check(h, inputs, variant, out, what=f"{variant} {steps} steps {sms} SMs")
        fn = functools.partial(fp8_matmul, *inputs, out, variant, check_scales=False)
        first = fn()
        assert all(torch.equal(fn(), first) for _ in range(50)), (variant, steps)
