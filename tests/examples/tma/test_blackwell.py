"""blackwell: numerics interpreted, the kernels by hand on a model of an SM, refusals, bad input, the answer."""

import functools
import random
import re
import threading
from types import FunctionType, SimpleNamespace

from harness import hardware
from harness.bench import Row, Table
from harness.catalog import Needs
from harness.codegen import Kernel, dump
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3, E5M2
from examples.fp8.microscaling import Operands, mx_matmul
from examples.tma import blackwell, blackwell_compiled, blackwell_plan, blackwell_scaled
from examples.tma.blackwell import answer, blackwell_matmul, reference
from examples.tma.blackwell_compiled import LARGE
from examples.tma.blackwell_plan import (
    COLUMNS,
    GROUP_M,
    VARIANTS,
    allocated_columns,
    budget,
    by_hand_plan,
    runnable,
    scale_columns,
)
from examples.tma.blackwell_scaled import FORMATS, blackwell_mx_matmul

LAUNCH = (blackwell, blackwell_compiled, blackwell_scaled)

# --- a model of an SM: the kernels by hand, as they stand, where everything asynchronous takes its time
#
# Each partition runs in a thread of its own, one at a time; who is next, or which operation in flight is done, is
# drawn.
# Operations are as disorderly as PTX allows: a load by TMA ends whenever it likes; a product waits for the copies that
# were issued before it and for earlier products to its accumulator, nothing else; a commit for all before it.


class RaceError(AssertionError):
    """Something is read or written while it may not be."""


class DeadlockError(AssertionError):
    """Every partition waits and nothing is in flight."""


class Memory:
    """Some of shared or tensor memory; views share `state`: how many operations in flight write it and read it, and of
    a sum the columns that have not been loaded yet."""

    def __init__(self, tensor, state=None):
        self.tensor = tensor
        self.state = state or SimpleNamespace(writes=0, reads=0, fenced=True, due=0)

    shape = property(lambda self: list(self.tensor.shape))
    dtype = property(lambda self: self.tensor.dtype)

    def permute(self, order):
        return Memory(self.tensor.permute(order), self.state)

    def reshape(self, shape):
        return Memory(self.tensor.reshape(shape), self.state)

    def store(self, value):
        if self.state.reads or self.state.writes:
            raise RaceError("a buffer is written while TMA reads it")
        self.state.fenced = False
        self.tensor.copy_(value)

    def slice(self, start, length):
        return Memory(self.tensor[:, start : start + length], self.state)

    def load(self, layout):
        if self.state.writes:
            raise RaceError("a sum is loaded while products to it are in flight")
        self.state.due -= self.tensor.shape[1]
        return self.tensor.clone()


class Array:
    """A ring of them. Columns become scales by being interpreted as such."""

    def __init__(self, shape, dtype):
        self.tensor = torch.zeros(shape, dtype=dtype)
        self.slots = [Memory(each) for each in self.tensor]

    shape = property(lambda self: list(self.tensor.shape))
    dtype = property(lambda self: self.tensor.dtype)

    def index(self, i):
        return self.slots[i]


class Columns(Array):
    """In tensor memory."""

    one_place = False  # what the kernel must not do: every step's scales in the same place

    def index(self, i):
        return self.slots[0 if self.one_place else i]


def _reinterpret(self, dtype, shape, layout):
    rows, groups = shape
    assert self.tensor.numel() == rows * groups, "columns of 128 lanes hold 4 bytes for each of 32 rows, 4 times"
    if not hasattr(self.state, "scales"):
        self.state.scales = torch.zeros(shape, dtype=torch.uint8).view(dtype)
    return Memory(self.state.scales, self.state)


Memory._reinterpret = _reinterpret


class Barrier:
    def __init__(self, name):
        self.name, self.count, self.parity = name, None, 0

    def init(self, count):
        self.count = self.pending = count
        self.bytes = 0

    def signal(self, arrivals=0, expected=0):
        self.pending -= arrivals
        self.bytes += expected
        assert self.pending >= 0, f"{self.name}: more arrivals than the phase has"
        if not self.pending and not self.bytes:
            self.pending, self.parity = self.count, self.parity ^ 1


class SM:
    """One program. `ignore` and `flip` break the protocol: waits on barriers of that name end at once, or wait for the
    other phase."""

    def __init__(self, seed, ignore="", flip=""):
        self.random, self.ignore, self.flip = random.Random(seed), ignore, flip
        self.flights, self.issued, self.partitions, self.failure = [], [], [], None
        self.turn = threading.Semaphore(0)
        self.fenced = True
        self.weights = [self.random.choice((0.02, 1.0, 1.0)) for _ in range(6)]  # who is slow in this run

    # partitions

    def pause(self, ready=lambda: True):
        partition = threading.current_thread().partition
        partition.ready = ready
        self.turn.release()
        partition.go.acquire()
        if self.failure:
            raise SystemExit

    def start(self, functions):
        def body(partition, fn, args):
            partition.go.acquire()
            try:
                if not self.failure:
                    fn(*args)
            except SystemExit:
                pass
            except BaseException as error:
                self.failure = self.failure or error
            partition.done = True
            self.turn.release()

        for fn, args in functions:
            partition = SimpleNamespace(go=threading.Semaphore(0), ready=lambda: True, done=False, stores=[])
            partition.thread = threading.Thread(target=body, args=(partition, fn, args), daemon=True)
            partition.thread.partition = partition
            partition.thread.start()
            self.partitions.append(partition)
        while not self.failure and not all(partition.done for partition in self.partitions):
            able = [
                (self.weights[i], partition)
                for i, partition in enumerate(self.partitions)
                if not partition.done and partition.ready()
            ]
            able += [(self.weights[flight.kind], flight) for flight in self.flights if flight.ready()]
            if not able:
                self.failure = DeadlockError("every partition waits and nothing is in flight")
                break
            (chosen,) = self.random.choices([each for _, each in able], [weight for weight, _ in able])
            if isinstance(chosen, Flight):
                self.land(chosen)
            else:
                chosen.go.release()
                self.turn.acquire()
        for partition in self.partitions:
            while partition.thread.is_alive() and not partition.done:
                partition.go.release()
                self.turn.acquire()
        while self.flights and not self.failure:
            able = [flight for flight in self.flights if flight.ready()]
            self.land(self.random.choice(able))
        if self.failure:
            raise self.failure

    def land(self, flight):
        self.flights.remove(flight)
        if flight in self.issued:
            self.issued.remove(flight)
        try:
            flight.run()
        except AssertionError as error:
            self.failure = error

    def fly(self, kind, run, ready=lambda: True):
        flight = Flight(kind, run, ready)
        self.flights.append(flight)
        return flight

    # what the kernel calls

    def wait(self, barrier, phase):
        if barrier.name == self.ignore:
            return
        phase ^= barrier.name == self.flip
        self.pause(lambda: barrier.parity != phase)

    def load(self, desc, coord, barrier, to):
        assert list(to.tensor.shape) == list(desc.block_shape)
        if to.state.reads or to.state.writes:
            raise RaceError("TMA fills a buffer that is being read or filled")
        to.state.writes += 1
        self.pause()

        def run():
            to.tensor.zero_()
            inside = [slice(max(0, min(n - at, box))) for n, at, box in zip(desc.shape, coord, to.shape, strict=True)]
            outside = [slice(at, at + box) for at, box in zip(coord, to.shape, strict=True)]
            to.tensor[tuple(inside)] = desc.base[tuple(outside)]
            to.state.writes -= 1
            barrier.signal(expected=-to.tensor.numel() * to.tensor.element_size())

        self.fly(3, run)

    def store(self, desc, coord, source):
        if not source.state.fenced:
            raise RaceError("TMA reads what was written without a fence between")
        partition = threading.current_thread().partition
        source.state.reads += 1

        def run():
            rows, cols = (max(0, min(n - at, box)) for n, at, box in zip(desc.shape, coord, source.shape, strict=True))
            target = desc.base[coord[0] : coord[0] + rows, coord[1] : coord[1] + cols]
            target.copy_(source.tensor[:rows, :cols])
            source.state.reads -= 1

        partition.stores.append(self.fly(4, run))
        self.pause()

    def store_wait(self, pendings):
        stores = threading.current_thread().partition.stores
        before = stores[: max(0, len(stores) - pendings)]  # all but the latest, whichever of them have landed
        self.pause(lambda: not any(each in self.flights for each in before))

    def fence(self):
        for memory in self.stored:
            for slot in memory.slots:
                slot.state.fenced = True
        self.fenced = True

    def issue(self, what, run, after):
        earlier = [flight for flight in self.issued if after(flight.what)]
        flight = self.fly(5, run, lambda: not any(each in self.issued for each in earlier))
        flight.what = what
        self.issued.append(flight)

    def multiply(self, a, b, acc, product, use_acc, mbarriers, scales=()):
        for each in (a, b):
            if each.state.writes:
                raise RaceError("a product reads an operand that TMA still writes")
            each.state.reads += 1
        for each in scales:
            each.state.reads += 1
        if not use_acc:
            if acc.state.due:
                raise RaceError("products begin in an accumulator that has not been loaded")
            acc.state.due = acc.tensor.shape[1]
        acc.state.writes += 1

        def run():
            values = product()
            acc.tensor.copy_(acc.tensor + values if use_acc else values)
            acc.state.writes -= 1
            for each in (a, b, *scales):
                each.state.reads -= 1

        self.issue(("product", id(acc.state)), run, lambda what: what in ("copy", ("product", id(acc.state))))
        for barrier in mbarriers:
            self.commit(barrier)
        self.pause()

    def mma(self, a, b, acc, *, use_acc, mbarriers=()):
        self.multiply(a, b, acc, lambda: a.tensor.float() @ b.tensor.float(), use_acc, mbarriers)

    def mma_scaled(self, a, b, acc, a_scale, b_scale, a_format, b_format, *, use_acc, mbarriers=()):
        def product():
            return values_of(a.tensor, a_scale.tensor) @ values_of(b.tensor.T, b_scale.tensor).T

        self.multiply(a, b, acc, product, use_acc, mbarriers, (a_scale, b_scale))

    def copy(self, source, target):
        if source.state.writes or target.state.reads:
            raise RaceError("scales are copied before they are there, or over those of a product in flight")
        source.state.reads += 1

        def run():
            target.tensor.copy_(source.tensor)
            source.state.reads -= 1

        self.issue("copy", run, lambda what: False)

    def commit(self, barrier):
        self.issue("commit", lambda: barrier.signal(arrivals=1), lambda what: what != "commit")
        self.pause()

    def allocate(self, dtype, shape, layout):
        if layout == "barrier":
            name = ("full", "empty", "acc_full", "acc_empty")[self.barriers]
            self.barriers += 1
            bars = [Barrier(name) for _ in range(shape[0])]
            return SimpleNamespace(index=bars.__getitem__)
        self.stored.append(Array(shape, dtype))
        self.shared += self.stored[-1].tensor.nbytes
        return self.stored[-1]

    def allocate_columns(self, dtype, shape, layout):
        slots, lanes, columns = shape
        assert lanes == 128
        self.columns += slots * columns
        return Columns(shape, torch.float32)

    def expect(self, barrier, count):
        barrier.signal(arrivals=1, expected=count)
        self.pause()

    def arrive(self, barrier):
        barrier.signal(arrivals=1)
        self.pause()

    def init(self, barrier, count):
        barrier.init(count)
        self.fenced = False

    def specialize(self, partitions, warps, registers):
        assert self.fenced, "barriers are used before their initialization is fenced"
        assert self.columns <= COLUMNS
        self.start(partitions)

    def run(self, module, code, program, programs, args, kwargs):
        self.barriers, self.stored, self.columns, self.shared = 0, [], 0, 0

        def nothing(*args, **kwargs):
            return None

        gl = SimpleNamespace(
            static_range=range, cdiv=lambda a, b: -(-a // b), where=lambda c, a, b: a if c else b,
            program_id=lambda axis: program, num_programs=lambda axis: programs, num_warps=lambda: kwargs["num_warps"],
            allocate_shared_memory=self.allocate, warp_specialize=self.specialize, static_assert=nothing,
            int64=torch.int64, float32=torch.float32, load=lambda x: x.item(),
        )  # fmt: skip
        scope = dict(
            vars(module), gl=gl, fence_async_shared=self.fence, allocate_tensor_memory=self.allocate_columns,
            mbarrier=SimpleNamespace(
                init=self.init, wait=self.wait, expect=self.expect, arrive=self.arrive,
                MBarrierLayout=lambda: "barrier",
            ),
            tma=SimpleNamespace(store_wait=self.store_wait), async_load=self.load, async_store=self.store,
            tl=SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
            tcgen05_mma=self.mma, tcgen05_mma_scaled=self.mma_scaled, tcgen05_copy=self.copy,
            tcgen05_commit=self.commit, TensorMemoryLayout=nothing, TensorMemoryScalesLayout=nothing,
            get_tmem_reg_layout=nothing,
        )  # fmt: skip
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):  # of the device: its Python, among the model's names
                scope[name] = FunctionType(value.fn.__code__, scope, name)
        kernel = FunctionType(code, scope)
        kernel(*map(described, args), **{k: v for k, v in kwargs.items() if k != "num_warps"})


class Flight:
    """Something in flight: it may land when it is ready, and lands when it is drawn."""

    def __init__(self, kind, run, ready):
        self.kind, self.run, self.ready, self.what = kind, run, ready, None


def described(x):
    if not hasattr(x, "block_shape"):
        return x
    nbytes = x.base.element_size() * torch.Size(x.block_shape).numel()
    return SimpleNamespace(
        base=x.base, shape=x.shape, block_shape=list(x.block_shape), dtype=x.base.dtype, layout="swizzled",
        block_type=SimpleNamespace(nbytes=nbytes),
    )  # fmt: skip


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def values_of(q, scale):
    """[rows, K] of bytes and [rows, groups] of scales, in float32, which holds them."""
    values = q.float()
    if q.dtype is torch.uint8:
        values = E2M1[torch.stack([q & 15, q >> 4], dim=2).flatten(1).long()]
    scales = scale.float() if scale.dtype is E4M3 else torch.exp2(scale.float() - 127)
    return (values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


KERNELS = {"matmul_by_hand_kernel": blackwell, "matmul_scaled_kernel": blackwell_scaled}
CODE = {name: getattr(module, name).fn.__code__ for name, module in KERNELS.items()}


class Model:
    """Stands for a kernel: launches it on the model, program after program."""

    def __init__(self, module, name, sms, seed=0, **broken):
        self.module, self.code, self.seed, self.broken, self.sms = module, CODE[name], seed, broken, sms

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            for program in range(grid[0]):
                self.sms.append(SM(self.seed + 1000 * program, **self.broken))
                self.sms[-1].run(self.module, self.code, program, grid[0], args, kwargs)

        return launch


@pytest.fixture
def model(monkeypatch):
    """Run what is written by hand on the model: model(seed, sms=2)."""
    if hardware.machine().mode != "interpreted":
        pytest.skip("the model is for machines without a GPU")

    def use(seed=0, sms=2, **broken):
        return use_model(monkeypatch, seed, sms, **broken)

    return use


def use_model(monkeypatch, seed, sms, **broken):
    """The list of the SMs that will have run."""
    ran = []
    monkeypatch.setattr(blackwell_plan, "gluon_architecture", lambda device: 100)
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[100]))
        monkeypatch.setattr(module, name, Model(module, name, ran, seed, **broken))
    return ran


def harness():
    return Harness("test", Needs.parse("triton"))


def check(h, M, N, K, variant, dtype=torch.float16, out=torch.float16):
    a, b = h.randn(M, K, dtype=dtype), h.randn(N, K, dtype=dtype)
    fn = functools.partial(blackwell_matmul, variant=variant, out_dtype=out)
    h.check(fn, reference, a, b, what=f"{variant} {M}x{N}x{K} {dtype} {out}", dtype=out, **budget(dtype, K))


def check_scaled(h, M, N, K, fmt, out=torch.float16):
    x = Operands.random(h, M, N, K, fmt)
    wholes = dict(zip(("a_tensor_scale", "b_tensor_scale"), x.tensor_scales, strict=True))
    fn = functools.partial(blackwell_mx_matmul, fmt=fmt, out_dtype=out, **wholes)
    h.check(fn, x.reference, *x.packed, what=f"scaled {fmt} {M}x{N}x{K} {out}", dtype=out, terms=K)


@pytest.mark.parametrize(
    "shape", [(1, 8, 16), (129, 264, 144), (128, 256, 64), (300, 520, 328), (5, 16, 0), (0, 8, 16)]
)
@pytest.mark.parametrize("dtype", [torch.float16, E4M3, E5M2])
def test_by_hand_on_the_model(h, model, shape, dtype):
    M, N, K = shape
    model()
    check(h, M, N, K // 16 * 16, "by hand", dtype)


@pytest.mark.parametrize("shape", [(1, 8, 32), (129, 264, 288), (5, 16, 0)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_scaled_on_the_model(h, model, shape, fmt):
    model(sms=1)
    check_scaled(h, *shape, fmt)


@given(
    M=st.integers(1, 260), N=st.integers(1, 70), K=st.integers(1, 24), sms=st.integers(1, 5),
    seed=st.integers(0, 10**6), kind=st.sampled_from([torch.float16, E4M3, *FORMATS]),
)  # fmt: skip
def test_any_order_of_events_is_right(M, N, K, sms, seed, kind):
    if hardware.machine().mode != "interpreted":
        return
    with pytest.MonkeyPatch.context() as patch:
        use_model(patch, seed, sms)
        if isinstance(kind, str):
            check_scaled(harness(), M, 8 * N, 32 * (K // 2 + 1), kind)
        else:
            check(harness(), M, 8 * N, 16 * K, "by hand", kind)


def caught(run, seeds=12):
    """How many of so many runs fail, as they should."""
    failures = 0
    for seed in range(seeds):
        try:
            run(seed)
        except (RaceError, DeadlockError, AssertionError):
            failures += 1
    return failures


@pytest.mark.parametrize("how", ["ignore", "flip"])
@pytest.mark.parametrize("barrier", ["full", "empty", "acc_full", "acc_empty"])
def test_the_model_sees_a_barrier_that_nobody_heeds(h, model, barrier, how):
    """Ten tiles of one step, so that each ring goes round. Each barrier is needed, and its phase."""

    def run(seed):
        model(seed, sms=1, **{how: barrier})
        check(h, 130, 1280, 64, "by hand")

    assert caught(run) >= 6


def test_the_model_sees_scales_that_share_a_place(h, model, monkeypatch):
    x = Operands.random(h, 8, 8, 1024, "mxfp8")

    def run(seed):
        model(seed, sms=1)
        fn = functools.partial(blackwell_mx_matmul, fmt="mxfp8", out_dtype=torch.float16)
        h.check(fn, x.reference, *x.packed, what="scales", dtype=torch.float16, terms=1024)

    assert caught(run) == 0
    monkeypatch.setattr(Columns, "one_place", True)
    assert caught(run) >= 4


def test_the_model_sees_a_missing_fence(h, model, monkeypatch):
    def run(seed):
        model(seed, sms=1)
        check(h, 128, 256, 64, "by hand")

    real = SM.fence

    def only_the_first(self):
        if not self.partitions:  # that after the barriers' initialization
            real(self)

    monkeypatch.setattr(SM, "fence", only_the_first)
    with pytest.raises(RaceError, match="without a fence"):
        run(0)
    monkeypatch.setattr(SM, "fence", lambda self: None)
    with pytest.raises(AssertionError, match="before their initialization"):
        run(0)


def test_the_model_takes_what_the_plan_says(h, model):
    ran = model()
    check(h, 128, 256, 64, "by hand")
    assert ran[0].columns == COLUMNS
    assert ran[0].shared <= SHARED_LIMIT[100]
    for fmt, form in FORMATS.items():
        ran = model()
        check_scaled(h, 128, 256, 64, fmt)
        groups = 128 * form.pack // form.group
        block_m, block_n, _, _, stages, accs = by_hand_plan(SHARED_LIMIT[100], groups)
        assert ran[0].columns == accs * block_n + scale_columns(block_m, block_n, groups, stages)


# --- tensor memory, counted


def test_columns():
    """Two accumulators of 128 x 256 in float32 are all of tensor memory; scales leave room for one."""
    assert 2 * 256 == allocated_columns(2 * 256) == COLUMNS
    assert [allocated_columns(n) for n in (1, 32, 33, 256, 257, 304)] == [32, 32, 64, 256, 512, 512]
    assert by_hand_plan(SHARED_LIMIT[100]) == (128, 256, 64, 2, 4, 2)
    # 128 rows by 4 groups of one byte are 512 bytes: 4 columns of 32 lanes of 4, repeated for each quarter of lanes.
    assert scale_columns(128, 0, 4, 1) == 4
    for form in FORMATS.values():
        groups = 128 * form.pack // form.group
        block_m, block_n, _, _, stages, accs = by_hand_plan(SHARED_LIMIT[100], groups)
        assert accs == 1
        assert stages >= 3
        assert accs * block_n + scale_columns(block_m, block_n, groups, stages) <= COLUMNS
        # Triton 3.6 adds to an address by OR, so a place begins at a multiple of its size.
        first = accs * block_n
        for rows in (block_n, block_m):
            assert first % scale_columns(rows, 0, groups, 1) == 0
            first += scale_columns(rows, 0, groups, stages)


def test_a_ring_that_fits_nowhere():
    with pytest.raises(RuntimeError, match="no ring of 128 x 256 fits 101376 bytes"):
        by_hand_plan(SHARED_LIMIT[120])


# --- what runs everywhere

RUNS = VARIANTS[:2]  # by hand has the model here, and the tests below on a GPU with tensor memory
SHAPES = [(1, 8, 16), (37, 16, 112), (128, 256, 64), (129, 264, 144), (5, 16, 0), (0, 8, 16), (5, 0, 16)]


def runs(h, variant):
    if variant not in runnable(h.device):
        pytest.skip(f"{variant} needs another GPU")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, E4M3, E5M2])
def test_shapes(h, variant, shape, dtype):
    runs(h, variant)
    check(h, *shape, variant, dtype)


@given(
    M=st.integers(1, 200), N=st.integers(1, 40), K=st.integers(1, 12), dtype=st.sampled_from([torch.float16, E4M3]),
    variant=st.sampled_from(VARIANTS),
)  # fmt: skip
def test_any_shape(M, N, K, dtype, variant):
    h = harness()
    if variant in runnable(h.device):
        check(h, M, 8 * N, 16 * K, variant, dtype)


@pytest.mark.parametrize("variant", RUNS)
@pytest.mark.parametrize(("sms", "sm"), [(1, 100), (3, 100), (1000, 100), (3, 120)])
def test_every_tile_is_taken_once(h, monkeypatch, variant, sms, sm):
    """Also more rows of tiles than a group has, and the small tile of 99 KiB."""
    shared_bytes = SHARED_LIMIT[sm] if h.interpreted else blackwell.device_limits(h.device).shared_bytes
    monkeypatch.setattr(blackwell_compiled, "device_limits", lambda device: Limits(sms, shared_bytes))
    check(h, 300, 520, 32, variant)
    check(h, (GROUP_M + 1) * LARGE[0] + 1, 264, 16, variant)


def test_out_dtypes(h):
    a, b = h.randn(5, 32, dtype=E4M3), h.randn(8, 32, dtype=E4M3)
    assert blackwell_matmul(a, b).dtype is torch.bfloat16
    for variant in runnable(h.device):
        for out in (torch.float16, torch.bfloat16):
            check(h, 70, 264, 48, variant, E4M3, out)
            check(h, 70, 264, 48, variant, torch.float16, out)
    assert blackwell_matmul(a.half(), b.half()).dtype is torch.float16


def test_layouts(h):
    wide_a, wide_b = h.randn(140, 320, dtype=torch.float16), h.randn(300, 480, dtype=torch.float16)
    for a, b in [
        (wide_a[:, 16:160], wide_b[:264, :144]),
        (wide_a[::3, :144], wide_b[16::2, 32:176][:136]),
        (wide_a[:1, :144].as_strided((1, 144), (5, 1)), wide_b[:40, :144]),
    ]:
        for variant in runnable(h.device):
            fn = functools.partial(blackwell_matmul, variant=variant)
            h.check(fn, reference, a, b, what=f"{variant} {a.stride()}", terms=a.shape[1])


def test_extremes(h):
    a, b = h.randn(130, 144, dtype=torch.float16), h.randn(264, 144, dtype=torch.float16)
    a[3, 5], b[9, 2], a[129, 143], b[130, 7] = (float(x) for x in ("nan", "nan", "inf", "-inf"))
    for variant in runnable(h.device):
        h.check(functools.partial(blackwell_matmul, variant=variant), reference, a, b, what=variant, terms=144)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3, E5M2])
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 5208, 784), (16, 8192, 4096), (8191, 264, 512)])
def test_shapes_on_the_gpu(h, shape, dtype):
    for variant in runnable(h.device):
        check(h, *shape, variant, dtype, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_scaled_on_the_gpu(h, fmt):
    if not blackwell_plan.has_tensor_memory(h.machine.sm):
        pytest.skip("needs a GPU with tensor memory")
    from examples.fp8.microscaling import budget as mx_budget

    for shape in [(1, 8, 32), (129, 264, 288), (1024, 2048, 4096), (1000, 1112, 4128)]:
        x = Operands.random(h, *shape, fmt)
        wholes = dict(zip(("a_tensor_scale", "b_tensor_scale"), x.tensor_scales, strict=True))
        fn = functools.partial(blackwell_mx_matmul, fmt=fmt, **wholes)
        what = f"scaled {fmt} {shape}"
        h.check(fn, x.reference, *x.packed, what=what, dtype=torch.bfloat16, **mx_budget(shape[2]))


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 2, 7, 132])
def test_barriers_across_tiles(h, monkeypatch, sms):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them."""
    limits = blackwell.device_limits(h.device)
    for module in LAUNCH:
        monkeypatch.setattr(module, "device_limits", lambda device: limits._replace(sms=sms))
    for steps in (1, 2, 3, 4, 5, 8, 9):
        for variant in runnable(h.device):
            check(h, 700, 1288, 64 * steps - 32 * (steps % 2), variant, torch.bfloat16, torch.bfloat16)


@pytest.mark.gpu
def test_every_launch_gives_the_same_bits(h):
    """A buffer that is read too early or written too early does not do so the same way every time."""
    for M, N, K in [(4096, 4096, 256), (1000, 8200, 1040), (16384, 512, 128)]:
        for dtype in (torch.bfloat16, E4M3):
            a, b = h.randn(M, K, dtype=dtype), h.randn(N, K, dtype=dtype)
            for variant in runnable(h.device):
                first = blackwell_matmul(a, b, variant)
                assert all(torch.equal(blackwell_matmul(a, b, variant), first) for _ in range(50)), (variant, M, dtype)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(30)
    long = 2**31 // 64 + 64
    a = torch.empty(long, 64, dtype=torch.bfloat16, device=h.device).normal_()
    b = h.randn(64, 64, dtype=torch.bfloat16)
    for variant in runnable(h.device):
        tall, wide = blackwell_matmul(a, b, variant), blackwell_matmul(b, a, variant)
        for part in (slice(0, 300), slice(-304, None)):
            for c, left, right in ((tall[part], a[part], b), (wide[:, part].contiguous(), b, a[part])):
                h.check(lambda *_, c=c: c, reference, left, right, what=variant, terms=64)


# --- refusals


@pytest.mark.parametrize(
    ("sm", "variant", "message"),
    [(80, "pipelined", r"TMA comes with sm_90 \(this is sm_80\); use examples/triton/matmul.py"),
     (89, "specialized", r"TMA comes with sm_90 \(this is sm_89\)"),
     (89, "by hand", r"TMA comes with sm_90 \(this is sm_89\)"),
     (90, "by hand", r"tcgen05 and tensor memory come .* \(this is sm_90\); use variant='specialized'"),
     (120, "by hand", r"tcgen05 and tensor memory come .* \(this is sm_120\); use"),
     (None, "by hand", r"tcgen05 .* \(and Gluon kernels are not interpreted\); use")],
)  # fmt: skip
def test_other_gpus(h, monkeypatch, sm, variant, message):
    monkeypatch.setattr(blackwell_plan, "gluon_architecture", lambda device: sm)
    x = h.randn(8, 16, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=f"blackwell_matmul: {message}"):
        blackwell_matmul(x, x, variant)
    if variant == "by hand" and sm != 89:
        operands = Operands.random(h, 8, 8, 32, "mxfp8").packed
        with pytest.raises(RuntimeError, match=r"blackwell_mx_matmul: tcgen05 .* use mx_matmul of examples/fp8"):
            blackwell_mx_matmul(*operands, "mxfp8")


# --- the code


def scaled_meta(h, fmt, n=4096):
    form = FORMATS[fmt]
    q = h.meta(n, n // form.pack, dtype=form.element)
    scale = h.meta(n // 128, n // form.group // 4, 32, 16).to(form.scale)
    whole = h.meta(1, dtype=torch.float32) if fmt == "nvfp4" else None
    return q, scale, q, scale, fmt, torch.bfloat16, whole, whole


def instruction_descriptors(ptx):
    """The numbers that tell tcgen05.mma its formats, shape and scales."""
    found = set()
    for line in re.findall(r"tcgen05\.mma\.[^;]*;", ptx):
        register = re.findall(r"%r\d+", line.split("]", 1)[1])[0]
        found |= set(re.findall(rf"mov\.b32 \t?{register}, (-?\d+);", ptx))
    return found


def test_products_are_described_as_the_compiler_describes_them(h):
    x = h.meta(4096, 4096)
    ours, theirs = (dump(blackwell_matmul, (x, x, variant), sm=100)["ptx"] for variant in ("by hand", "pipelined"))
    assert instruction_descriptors(ours) == instruction_descriptors(theirs) != set()


@pytest.mark.parametrize("fmt", FORMATS)
def test_scaled_products_are_described_as_the_compiler_describes_them(h, fmt):
    """And scales begin in the columns that are counted: those of b behind the accumulator, then those of a."""
    ours, theirs = (dump(fn, scaled_meta(h, fmt), sm=100)["ptx"] for fn in (blackwell_mx_matmul, mx_matmul))
    assert instruction_descriptors(ours) == instruction_descriptors(theirs) != set()
    base = re.search(r"ld\.shared\.b32 \t(%r\d+), \[global_smem\]", ours).group(1)
    at = {int(n) for n in re.findall(rf"add\.s32 \t%r\d+, {base}, (\d+);", ours)}
    groups = 128 * FORMATS[fmt].pack // FORMATS[fmt].group
    _, block_n, _, _, stages, accs = by_hand_plan(SHARED_LIMIT[100], groups)
    first = accs * block_n
    assert {first, first + scale_columns(block_n, 0, groups, stages)} <= at


# --- the answer


def made(core, partitions, tensor_memory=None):
    found = {core: 4} | ({"setmaxnreg": 2} if partitions else {})
    return Kernel("k", 100, found, 168, 0, 2048, 4096, 12 if partitions else 8, tensor_memory=tensor_memory)


def test_the_answer_follows_from_the_code():
    code = {("specialized", 90): made("wgmma", False), ("specialized", 120): made("mma.sync", True)}
    code |= dict.fromkeys([("specialized", 100), ("by hand", 100)], made("tcgen05.mma", True, 512))
    table = Table("blackwell", "4096", "cuBLAS")
    assert answer(code, table, False) == (
        "tl.dot with warp_specialize becomes on sm_90 wgmma, no partitions; sm_100 tcgen05.mma in 512 columns of "
        "tensor memory, 12 warps in partitions (by hand 12; compiled, not run); sm_120 mma.sync, "
        "12 warps in partitions."
    )
    table.rows = [Row("cuBLAS", False, None, 0, 1.0, speedup=1.0), Row("specialized", True, None, 0, 0.5, speedup=2.0)]
    assert answer(code, table, True).endswith("12 warps in partitions. Here 2.00x cuBLAS.")
    assert "run here" in answer(code, table, True)
    assert len(answer(code, table, False)) <= 240


# --- bad input


def _bad(device):
    a, b = torch.ones(4, 32, dtype=torch.float16, device=device), torch.ones(16, 32, dtype=torch.float16, device=device)
    flat = torch.zeros(600, dtype=torch.float16, device=device)
    return {
        "no tensor": (([1.0], b), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "float32": ((a.float(), b.float()), {}, TypeError, r"dtypes torch\.float32 and torch\.float32; both must"),
        "two dtypes": ((a, b.to(E4M3)), {}, TypeError, r"dtypes torch\.float16 and torch\.float8_e4m3fn"),
        "a vector": ((a, b[0]), {}, ValueError, r"shapes \(4, 32\) and \(32,\); need \[M, K\] and \[N, K\]"),
        "inner sizes": ((a, b[:, :16]), {}, ValueError, r"shapes \(4, 32\) and \(16, 16\)"),
        "no variant": ((a, b, "faster"), {}, ValueError, r"variant 'faster' is not one of \('pipelined', "),
        "out in float32": ((a, b), {"out_dtype": torch.float32}, TypeError, r"out_dtype torch\.float32 is not one of"),
        "N of 12": ((a, b[:12]), {}, ValueError, "N is 12; TMA .*pad b to a multiple of 8 rows"),
        "K of 12": ((a[:, :12], b[:, :12]), {}, ValueError, "K is 12; TMA .*pad it to a multiple of 8"),
        "K of 8 in FP8": ((a[:, :8].to(E4M3), b[:, :8].to(E4M3)), {}, ValueError, "K is 8; .*a multiple of 16"),
        "unaligned": ((flat[1:129].view(4, 32), b), {}, ValueError, "a has .* starts 2 bytes past a multiple of 16"),
        "columns": ((torch.ones(32, 4, dtype=torch.float16, device=device).t(), b), {}, ValueError, "a has .*strides"),
        "requires grad": ((a.clone().requires_grad_(), b), {}, RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta")), {}, ValueError, "move them to one device"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, kwargs, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"blackwell_matmul: .*{message}"):
        blackwell_matmul(*args, **kwargs)


def _bad_scaled(device):
    def zeros(*shape, dtype):
        return torch.zeros(*shape, dtype=torch.uint8, device=device).view(dtype)

    q, fp4, whole = zeros(8, 64, dtype=E4M3), zeros(8, 32, dtype=FORMATS["nvfp4"].element), torch.ones(1, device=device)
    scale, nv_scale = (zeros(1, 1, 32, 16, dtype=FORMATS[fmt].scale) for fmt in ("mxfp8", "nvfp4"))
    mx, nv, half = (q, scale, q, scale, "mxfp8"), (fp4, nv_scale, fp4, nv_scale, "nvfp4"), torch.float16
    return {
        "no format": ((*mx[:4], "mxfp6"), ValueError, "format 'mxfp6' is not one"),
        "another format's values": ((fp4, *mx[1:]), TypeError, r"a is torch\.float4_e2m1fn_x2"),
        "another format's scales": ((q, nv_scale, *mx[2:]), TypeError, r"with scales in torch\.float8_e4m3fn"),
        "a vector": ((q[0], *mx[1:]), ValueError, r"a has shape \(64,\); need \[rows, K / 1\]"),
        "K of 48": ((q[:, :48], *mx[1:]), ValueError, "K a multiple of 32"),
        "plain scales": ((q, scale[0, 0], *mx[2:]), ValueError, "scales of a have .*swizzle them"),
        "K that differs": ((q, scale, q[:, :32], scale, "mxfp8"), ValueError, r"shapes \(8, 64\) and \(8, 32\)"),
        "N of 4": ((q, scale, q[:4], scale, "mxfp8"), ValueError, "N is 4"),
        "out in float32": ((*mx, torch.float32), TypeError, "out_dtype"),
        "a tensor's scale too many": ((*mx, half, whole), ValueError, "mxfp8 has no scale for the tensor a"),
        "a tensor's scale too few": ((*nv, half, whole), ValueError, "needs a scale for the tensor b"),
        "a tensor's scale in float64": ((*nv, half, whole.double(), whole), TypeError, r"tensor a is torch\.float64"),
        "two of them": ((*nv, half, whole, whole.expand(2)), TypeError, r"\[2\]; need one float32"),
    }


@pytest.mark.parametrize("name", _bad_scaled("cpu"))
def test_bad_scaled_input(h, name):
    args, error, message = _bad_scaled(h.device)[name]
    with pytest.raises(error, match=f"blackwell_mx_matmul: .*{message}"):
        blackwell_mx_matmul(*args)
