"""blackwell: numerics interpreted, the kernels by hand on a model of an SM, refusals, what their code describes."""

import functools
import random
import re
import threading
from types import FunctionType, SimpleNamespace

from harness import hardware
from harness.catalog import Needs
from harness.codegen import dump
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3, E5M2
from examples.common.microscaling import FORMATS
from examples.fp8.microscaling import Operands, mx_matmul
from examples.fp8.microscaling import budget as mx_budget
from examples.tma import blackwell, blackwell_compiled, blackwell_plan, blackwell_scaled
from examples.tma.blackwell import blackwell_matmul, reference
from examples.tma.blackwell_compiled import LARGE, SMALL
from examples.tma.blackwell_plan import COLUMNS, VARIANTS, budget, by_hand_plan, runnable, scale_columns
from examples.tma.blackwell_scaled import blackwell_mx_matmul

HALF, FP4 = torch.float16, torch.float4_e2m1fn_x2

# --- a model of an SM: the kernels by hand, as they stand, where everything asynchronous takes its time
#
# Each partition runs in a thread of its own, one at a time; which is next, or which operation in flight is done, is
# drawn. Operations are as disorderly as PTX allows: a load by TMA ends whenever it likes; an MMA waits for the copies
# that were issued before it and for earlier MMAs to its accumulator, nothing else; a commit for all before it.


class RaceError(AssertionError):
    """Something is read or written while it may not be."""


class DeadlockError(AssertionError):
    """Every partition waits and nothing is in flight."""


def require(fine, what):
    if not fine:
        raise RaceError(what)


class Memory:
    """Some of shared or tensor memory; views share `state`: how many operations in flight write it and read it, and of
    an accumulator the columns that have not been loaded yet."""

    def __init__(self, tensor, state=None):
        self.tensor = tensor
        self.state = state or SimpleNamespace(writes=0, reads=0, fenced=True, due=0)

    shape = property(lambda self: list(self.tensor.shape))
    dtype = property(lambda self: self.tensor.dtype)

    def permute(self, order):
        return Memory(self.tensor.permute(order), self.state)

    def reshape(self, shape):
        return Memory(self.tensor.reshape(shape), self.state)

    def slice(self, start, length):
        return Memory(self.tensor[:, start : start + length], self.state)

    def store(self, value):
        require(not self.state.reads and not self.state.writes, "a buffer is written while TMA reads it")
        self.state.fenced = False
        self.tensor.copy_(value)

    def load(self, layout):
        require(not self.state.writes, "an accumulator is loaded while MMAs to it are in flight")
        self.state.due -= self.tensor.shape[1]
        return self.tensor.clone()

    def _reinterpret(self, dtype, shape, layout):
        assert self.tensor.numel() == shape[0] * shape[1], (
            "columns of 128 lanes hold 4 bytes of each of 32 rows, 4 times"
        )
        if not hasattr(self.state, "scales"):
            self.state.scales = torch.zeros(shape, dtype=torch.uint8).view(dtype)
        return Memory(self.state.scales, self.state)


class Array:
    """A ring of them."""

    def __init__(self, shape, dtype):
        self.tensor = torch.zeros(shape, dtype=dtype)
        self.slots = [Memory(each) for each in self.tensor]

    shape, dtype = Memory.shape, Memory.dtype

    def index(self, i):
        return self.slots[i]


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


class Flight(SimpleNamespace):
    """Something in flight, of a kind: it may land when it is ready, and lands when it is drawn."""

    __hash__, __eq__ = object.__hash__, object.__eq__


class SM:
    """One program. `ignore` and `flip` break the protocol: waits on barriers of that name end at once, or wait for the
    other phase."""

    def __init__(self, seed, ignore="", flip=""):
        self.random, self.ignore, self.flip = random.Random(seed), ignore, flip
        self.flights, self.issued, self.partitions, self.failure = [], [], [], None
        self.turn, self.fenced = threading.Semaphore(0), True
        self.weights = [self.random.choice((0.02, 1.0, 1.0)) for _ in range(6)]  # who is slow in this run

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

        for i, (fn, args) in enumerate(functions):
            partition = Flight(kind=i, go=threading.Semaphore(0), ready=lambda: True, done=False, stores=[])
            partition.thread = threading.Thread(target=body, args=(partition, fn, args), daemon=True)
            partition.thread.partition = partition
            partition.thread.start()
            self.partitions.append(partition)
        while not self.failure and (running := [each for each in self.partitions if not each.done]):
            able = [each for each in (*running, *self.flights) if each.ready()]
            if not able:
                self.failure = DeadlockError("every partition waits and nothing is in flight")
                break
            (chosen,) = self.random.choices(able, [self.weights[each.kind] for each in able])
            if chosen in running:
                chosen.go.release()
                self.turn.acquire()
            else:
                self.land(chosen)
        for partition in self.partitions:
            while not partition.done:
                partition.go.release()
                self.turn.acquire()
        while self.flights and not self.failure:
            self.land(self.random.choice([flight for flight in self.flights if flight.ready()]))
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
        self.flights.append(Flight(kind=kind, run=run, ready=ready))
        return self.flights[-1]

    # what the kernel calls

    def wait(self, barrier, phase):
        if barrier.name != self.ignore:
            phase ^= barrier.name == self.flip
            self.pause(lambda: barrier.parity != phase)

    def load(self, desc, coord, barrier, to):
        assert list(to.tensor.shape) == list(desc.block_shape)
        require(not to.state.reads and not to.state.writes, "TMA fills a buffer that is being read or filled")
        to.state.writes += 1
        self.pause()

        def run():
            to.tensor.zero_()
            inside = [slice(max(0, min(n - at, box))) for n, at, box in zip(desc.shape, coord, to.shape, strict=True)]
            outside = [slice(at, at + box) for at, box in zip(coord, to.shape, strict=True)]
            to.tensor[tuple(inside)] = desc.base[tuple(outside)]
            to.state.writes -= 1
            barrier.signal(expected=-to.tensor.nbytes)

        self.fly(3, run)

    def store(self, desc, coord, source):
        require(source.state.fenced, "TMA reads what was written without a fence between")
        source.state.reads += 1

        def run():
            rows, cols = (max(0, min(n - at, box)) for n, at, box in zip(desc.shape, coord, source.shape, strict=True))
            target = desc.base[coord[0] : coord[0] + rows, coord[1] : coord[1] + cols]
            target.copy_(source.tensor[:rows, :cols])
            source.state.reads -= 1

        threading.current_thread().partition.stores.append(self.fly(4, run))
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

    def multiply(self, operands, acc, product, use_acc, mbarriers):
        require(not any(each.state.writes for each in operands[:2]), "an MMA reads an operand that TMA still writes")
        for each in operands:
            each.state.reads += 1
        if not use_acc:
            require(not acc.state.due, "MMAs begin in an accumulator that has not been loaded")
            acc.state.due = acc.tensor.shape[1]
        acc.state.writes += 1

        def run():
            values = product()
            acc.tensor.copy_(acc.tensor + values if use_acc else values)
            acc.state.writes -= 1
            for each in operands:
                each.state.reads -= 1

        self.issue(("MMA", id(acc.state)), run, lambda what: what in ("copy", ("MMA", id(acc.state))))
        for barrier in mbarriers:
            self.commit(barrier)
        self.pause()

    def mma(self, a, b, acc, *, use_acc, mbarriers=()):
        self.multiply((a, b), acc, lambda: a.tensor.float() @ b.tensor.float(), use_acc, mbarriers)

    def mma_scaled(self, a, b, acc, a_scale, b_scale, a_format, b_format, *, use_acc, mbarriers=()):
        def product():
            return values_of(a.tensor, a_scale.tensor) @ values_of(b.tensor.T, b_scale.tensor).T

        self.multiply((a, b, a_scale, b_scale), acc, product, use_acc, mbarriers)

    def copy(self, source, target):
        require(
            not source.state.writes and not target.state.reads,
            "scales are copied before they are there, or over those of an MMA in flight",
        )
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
            return SimpleNamespace(index=[Barrier(name) for _ in range(shape[0])].__getitem__)
        self.stored.append(Array(shape, dtype))
        return self.stored[-1]

    def allocate_columns(self, dtype, shape, layout):
        assert shape[1] == 128
        self.columns += shape[0] * shape[2]
        return Array(shape, torch.float32)

    def arrive(self, barrier, expected=0):
        barrier.signal(arrivals=1, expected=expected)
        self.pause()

    def init(self, barrier, count):
        barrier.init(count)
        self.fenced = False

    def specialize(self, partitions, warps, registers):
        assert self.fenced, "barriers are used before their initialization is fenced"
        assert self.columns <= COLUMNS
        assert sum(each.tensor.nbytes for each in self.stored) <= SHARED_LIMIT[100]
        self.start(partitions)

    def run(self, module, code, program, programs, args, kwargs):
        self.barriers, self.stored, self.columns = 0, [], 0

        def nothing(*args, **kwargs):
            return None

        gl = SimpleNamespace(
            static_range=range, cdiv=lambda a, b: -(-a // b), where=lambda c, a, b: a if c else b,
            program_id=lambda axis: program, num_programs=lambda axis: programs, num_warps=lambda: kwargs["num_warps"],
            allocate_shared_memory=self.allocate, warp_specialize=self.specialize, static_assert=nothing,
            int64=torch.int64, float32=torch.float32, load=lambda x: x.item(),
        )  # fmt: skip
        scope = vars(module) | {
            "gl": gl, "tl": gl, "fence_async_shared": self.fence, "allocate_tensor_memory": self.allocate_columns,
            "mbarrier": SimpleNamespace(
                init=self.init, wait=self.wait, expect=self.arrive, arrive=self.arrive,
                MBarrierLayout=lambda: "barrier",
            ),
            "tma": SimpleNamespace(store_wait=self.store_wait), "async_load": self.load, "async_store": self.store,
            "tcgen05_mma": self.mma, "tcgen05_mma_scaled": self.mma_scaled, "tcgen05_copy": self.copy,
            "tcgen05_commit": self.commit, "TensorMemoryLayout": nothing, "TensorMemoryScalesLayout": nothing,
            "get_tmem_reg_layout": nothing,
        }  # fmt: skip
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                scope[name] = FunctionType(value.fn.__code__, scope, name)  # its Python, among the model's names
        kernel = FunctionType(code, scope)
        kernel(*map(described, args), **{k: v for k, v in kwargs.items() if k != "num_warps"})


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

    def __init__(self, module, name, ran, seed, broken):
        self.module, self.code, self.ran, self.seed, self.broken = module, CODE[name], ran, seed, broken

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            for program in range(grid[0]):
                self.ran.append(SM(self.seed + 1000 * program, **self.broken))
                self.ran[-1].run(self.module, self.code, program, grid[0], args, kwargs)

        return launch


def use_model(monkeypatch, seed=0, sms=2, **broken):
    """Run what is written by hand on the model. The list of the SMs that will have run."""
    if hardware.machine().mode != "interpreted":
        pytest.skip("the model is for machines without a GPU")
    ran = []
    monkeypatch.setattr(blackwell_plan, "gluon_architecture", lambda device: 100)
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[100]))
        monkeypatch.setattr(module, name, Model(module, name, ran, seed, broken))
    return ran


def check(h, M, N, K, variant, dtype=HALF, out=HALF):
    a, b = h.randn(M, K, dtype=dtype), h.randn(N, K, dtype=dtype)
    fn = functools.partial(blackwell_matmul, variant=variant, out_dtype=out)
    h.check(fn, reference, a, b, what=f"{variant} {M}x{N}x{K} {dtype} {out}", dtype=out, **budget(dtype, K))


def check_scaled(h, M, N, K, fmt, out=HALF, **more):
    x = Operands.random(h, M, N, K, fmt)
    wholes = dict(zip(("a_tensor_scale", "b_tensor_scale"), x.tensor_scales, strict=True))
    fn = functools.partial(blackwell_mx_matmul, fmt=fmt, out_dtype=out, **wholes)
    h.check(fn, x.reference, *x.packed, what=f"scaled {fmt} {M}x{N}x{K} {out}", dtype=out, **more or {"terms": K})


def check_either(h, M, N, K, kind, variant="by hand"):
    check_scaled(h, M, N, K, kind) if isinstance(kind, str) else check(h, M, N, K, variant, kind)


def scale_groups(fmt):
    """Of a row in a step of K."""
    return 128 * FORMATS[fmt].pack // FORMATS[fmt].group


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((1, 8, 16), HALF), ((129, 264, 144), E4M3), ((128, 256, 64), E5M2), ((300, 520, 320), HALF), ((5, 16, 0), E4M3),
     ((0, 8, 16), HALF), ((129, 264, 288), "mxfp8"), ((1, 8, 32), "mxfp4"), ((128, 256, 64), "nvfp4"),
     ((5, 16, 0), "nvfp4")],
)  # fmt: skip
def test_by_hand_on_the_model(h, monkeypatch, shape, kind):
    """Also that tensor memory is what the plan counts."""
    ran = use_model(monkeypatch)
    check_either(h, *shape, kind)
    groups = scale_groups(kind) if isinstance(kind, str) else 0
    block_m, block_n, _, _, stages, accs = by_hand_plan(SHARED_LIMIT[100], groups)
    assert all(sm.columns == accs * block_n + scale_columns(block_m, block_n, groups, stages) for sm in ran)


@given(
    M=st.integers(1, 260), N=st.integers(1, 40), K=st.integers(1, 12), sms=st.integers(1, 5),
    seed=st.integers(0, 10**6), kind=st.sampled_from([HALF, E4M3, *FORMATS]),
)  # fmt: skip
def test_any_order_of_events_is_right(M, N, K, sms, seed, kind):
    with pytest.MonkeyPatch.context() as patch:
        use_model(patch, seed, sms)
        check_either(Harness("test", Needs.parse("triton")), M, 8 * N, 32 * K, kind)


def failures(run, seeds=12):
    found = []
    for seed in range(seeds):
        try:
            run(seed)
        except AssertionError as error:
            found.append(error)
    return found


@pytest.mark.parametrize(
    "broken", [{"ignore": "full"}, {"ignore": "acc_full"}, {"ignore": "empty"}, {"ignore": "acc_empty"},
               {"flip": "full"}, {"flip": "acc_empty"}], ids=str,
)  # fmt: skip
def test_the_model_sees_a_barrier_that_nobody_heeds(h, monkeypatch, broken):
    """Ten tiles of one step, so that each ring goes round. Each barrier is needed, and its phase."""

    def run(seed):
        use_model(monkeypatch, seed, sms=1, **broken)
        check(h, 130, 1280, 64, "by hand")

    assert len(failures(run)) >= 6


def test_the_model_sees_scales_that_share_a_place_and_a_missing_fence(h, monkeypatch):
    x = Operands.random(h, 8, 8, 1024, "mxfp8")

    def run(seed):
        use_model(monkeypatch, seed, sms=1)
        fn = functools.partial(blackwell_mx_matmul, fmt="mxfp8", out_dtype=HALF)
        h.check(fn, x.reference, *x.packed, what="scales", dtype=HALF, terms=1024)

    assert not failures(run, 4)
    with monkeypatch.context() as patch:
        allocate = SM.allocate_columns

        def one_place(self, dtype, shape, layout):
            array = allocate(self, dtype, shape, layout)
            array.slots = array.slots[:1] * shape[0]
            return array

        patch.setattr(SM, "allocate_columns", one_place)
        assert len(failures(run)) >= 4
    real = SM.fence
    monkeypatch.setattr(SM, "fence", lambda self: None if self.partitions else real(self))
    with pytest.raises(RaceError, match="without a fence"):
        run(0)
    monkeypatch.setattr(SM, "fence", lambda self: None)
    with pytest.raises(AssertionError, match="before their initialization"):
        run(0)


def test_columns():
    """Two accumulators of 128 x 256 in float32 are all of tensor memory; scales leave room for one."""
    assert 2 * 256 == blackwell_plan.allocated_columns(2 * 256) == COLUMNS
    assert [blackwell_plan.allocated_columns(n) for n in (1, 32, 33, 256, 257, 304)] == [32, 32, 64, 256, 512, 512]
    assert by_hand_plan(SHARED_LIMIT[100]) == (128, 256, 64, 2, 4, 2)
    # 128 rows by 4 groups of one byte are 512 bytes: 4 columns of 32 lanes of 4, repeated for each quarter of lanes.
    assert scale_columns(128, 0, 4, 1) == 4
    for groups in map(scale_groups, FORMATS):
        block_m, block_n, _, _, stages, accs = by_hand_plan(SHARED_LIMIT[100], groups)
        assert (accs, stages >= 3) == (1, True)
        first = accs * block_n
        for rows in (block_n, block_m):  # Triton 3.6 adds to an address by OR: a place begins at a multiple of its size
            assert first % scale_columns(rows, 0, groups, 1) == 0
            first += scale_columns(rows, 0, groups, stages)
        assert first <= COLUMNS
    with pytest.raises(RuntimeError, match="no ring of 128 x 256 fits 101376 bytes"):
        by_hand_plan(SHARED_LIMIT[120])


# --- what runs everywhere; by hand has the model here, and these tests on a GPU with tensor memory


@pytest.mark.parametrize(
    ("shape", "dtype", "out"),
    [((1, 8, 16), HALF, HALF), ((37, 16, 112), E4M3, torch.bfloat16), ((128, 256, 64), E5M2, HALF),
     ((129, 264, 144), HALF, torch.bfloat16), ((5, 16, 0), E4M3, HALF), ((0, 8, 16), HALF, HALF),
     ((5, 0, 16), E5M2, HALF)],
)  # fmt: skip
def test_shapes(h, shape, dtype, out):
    for variant in runnable(h.device):
        check(h, *shape, variant, dtype, out)
    a, b = h.randn(5, 32, dtype=dtype), h.randn(8, 32, dtype=dtype)
    assert blackwell_matmul(a, b).dtype is (dtype if dtype is HALF else torch.bfloat16)


@pytest.mark.parametrize(("sms", "sm", "variant"), [(1, 100, 0), (3, 120, 1), (1000, 100, 1)])
def test_every_tile_is_taken_once(h, monkeypatch, variant, sms, sm):
    """Also more rows of tiles than a group has, and the small tile of 99 KiB."""
    shared_bytes = SHARED_LIMIT[sm] if h.interpreted else blackwell.device_limits(h.device).shared_bytes
    monkeypatch.setattr(blackwell_compiled, "device_limits", lambda device: Limits(sms, shared_bytes))
    check(h, 300, 520, 32, VARIANTS[variant])
    check(h, (blackwell_plan.GROUP_M + 1) * LARGE[0] + 1, 264, 16, VARIANTS[variant])


@pytest.mark.parametrize(("sm", "tile"), [(90, LARGE), (120, SMALL)])
@pytest.mark.parametrize("dtype", [HALF, E4M3])
def test_a_step_of_k_is_128_bytes_of_a_row(monkeypatch, sm, tile, dtype):
    launched = []
    kernel = type(
        "K", (), {"__getitem__": lambda self, grid: lambda *args, **options: launched.append((args, options))}
    )
    monkeypatch.setattr(blackwell_compiled, "matmul_persistent_kernel", kernel())
    monkeypatch.setattr(blackwell_compiled, "device_limits", lambda device: Limits(132, SHARED_LIMIT[sm]))
    a, b, c = (torch.empty(512, 512, dtype=each) for each in (dtype, dtype, HALF))
    blackwell_compiled.launch_by_the_compiler(a, b, c, True)
    (((a_desc, b_desc, c_desc, *_), options),) = launched
    step = 128 // dtype.itemsize
    assert options["BLOCK_K"] == step
    assert [list(each.block_shape) for each in (a_desc, b_desc)] == [[tile[0], step], [tile[1], step]]
    ring = options["num_stages"] * (tile[0] + tile[1]) * 128
    assert ring + 2 * c_desc.block_shape[0] * c_desc.block_shape[1] <= SHARED_LIMIT[sm]


def test_layouts_and_extremes(h):
    """Rows and columns apart, a later start, a stride nobody steps by; NaN and infinities."""
    wide_a, wide_b = h.randn(140, 320, dtype=HALF), h.randn(300, 480, dtype=HALF)
    odd_a, odd_b = h.randn(130, 144, dtype=HALF), h.randn(264, 144, dtype=HALF)
    odd_a[3, 5], odd_b[9, 2], odd_a[129, 143], odd_b[130, 7] = (float(x) for x in ("nan", "nan", "inf", "-inf"))
    for a, b in [
        (wide_a[:, 16:160], wide_b[:264, :144]),
        (wide_a[::3, :144], wide_b[16::2, 32:176][:136]),
        (wide_a[:1, :144].as_strided((1, 144), (5, 1)), wide_b[:40, :144]),
        (odd_a, odd_b),
    ]:
        for variant in runnable(h.device):
            fn = functools.partial(blackwell_matmul, variant=variant)
            h.check(fn, reference, a, b, what=f"{variant} {a.stride()}", terms=a.shape[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF, E4M3, E5M2])
def test_shapes_on_the_gpu(h, dtype):
    for shape in [(4096, 4096, 4096), (1000, 5208, 784), (16, 8192, 4096), (8191, 264, 512)]:
        for variant in runnable(h.device):
            check(h, *shape, variant, dtype, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_scaled_on_the_gpu(h, fmt):
    if not blackwell_plan.has_tensor_memory(h.machine.sm):
        pytest.skip("needs a GPU with tensor memory")
    for shape in [(1, 8, 32), (129, 264, 288), (1024, 2048, 4096), (1000, 1112, 4128)]:
        check_scaled(h, *shape, fmt, torch.bfloat16, **mx_budget(shape[2]))


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 2, 7, 132])
def test_barriers_across_tiles(h, monkeypatch, sms):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them. Every launch
    gives the same bits: a buffer that is read or written too early does not do so the same way every time."""
    limits = blackwell.device_limits(h.device)
    for module in (blackwell, blackwell_compiled, blackwell_scaled):
        monkeypatch.setattr(module, "device_limits", lambda device: limits._replace(sms=sms))
    for steps in (1, 2, 3, 4, 5, 8, 9):
        for variant in runnable(h.device):
            check(h, 700, 1288, 64 * steps - 32 * (steps % 2), variant, torch.bfloat16, torch.bfloat16)
    for M, N, K in [(4096, 4096, 256), (1000, 8200, 1040), (16384, 512, 128)]:
        for dtype in (torch.bfloat16, E4M3):
            a, b = h.randn(M, K, dtype=dtype), h.randn(N, K, dtype=dtype)
            for variant in runnable(h.device):
                first = blackwell_matmul(a, b, variant)
                assert all(torch.equal(blackwell_matmul(a, b, variant), first) for _ in range(50)), (variant, M, dtype)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(30)
    a = torch.empty(2**31 // 64 + 64, 64, dtype=torch.bfloat16, device=h.device).normal_()
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
     (89, "by hand", r"TMA comes with sm_90 \(this is sm_89\)"),
     (90, "by hand", r"tcgen05 and tensor memory come .* \(this is sm_90\); use variant='specialized'"),
     (120, "by hand", r"tcgen05 and tensor memory come .* \(this is sm_120\); use"),
     (None, "by hand", r"tcgen05 .* \(and Gluon kernels are not interpreted\); use")],
)  # fmt: skip
def test_other_gpus(h, monkeypatch, sm, variant, message):
    monkeypatch.setattr(blackwell_plan, "gluon_architecture", lambda device: sm)
    x = h.randn(8, 16, dtype=HALF)
    with pytest.raises(RuntimeError, match=f"blackwell_matmul: {message}"):
        blackwell_matmul(x, x, variant)
    with pytest.raises(RuntimeError, match=r"blackwell_mx_matmul: tcgen05 .* use mx_matmul of examples/fp8"):
        blackwell_mx_matmul(*Operands.random(h, 8, 8, 32, "mxfp8").packed, "mxfp8")


def _bad(device):
    def zeros(*shape, dtype=HALF):
        return torch.zeros(*shape, dtype=torch.uint8, device=device).to(HALF).to(dtype)

    a, b, odd = zeros(4, 32), zeros(16, 32), zeros(600)[1:129].view(4, 32)
    q, fp4, whole = (
        zeros(8, 64, dtype=E4M3),
        zeros(8, 64).view(torch.uint8)[:, :32].view(FP4),
        torch.ones(1, device=device),
    )
    scale, nv_scale = (torch.zeros(1, 1, 32, 16).to(device).to(FORMATS[fmt].scale) for fmt in ("mxfp8", "nvfp4"))
    mx, nv = (q, scale, q, scale, "mxfp8"), (fp4, nv_scale, fp4, nv_scale, "nvfp4")
    plain = [
        ((a, b.to(E4M3)), TypeError, r"dtypes torch\.float16 and torch\.float8_e4m3fn"),
        ((a, b, "faster"), ValueError, r"variant 'faster' is not one of \('pipelined', "),
        ((a, b, "pipelined", torch.float32), TypeError, r"out_dtype torch\.float32 is not one of"),
        ((a, b[:12]), ValueError, "N is 12; TMA .*pad b to a multiple of 8 rows"),
        ((a[:, :12], b[:, :12]), ValueError, "K is 12; TMA .*pad it to a multiple of 8"),
        ((a[:, :8].to(E4M3), b[:, :8].to(E4M3)), ValueError, "K is 8; .*a multiple of 16"),
        ((odd, b), ValueError, "a has .* starts 2 bytes past a multiple of 16"),
    ]
    scaled = [
        ((*mx[:4], "mxfp6"), ValueError, "format 'mxfp6' is not one"),
        ((fp4, *mx[1:]), TypeError, r"a is torch\.float4_e2m1fn_x2"),
        ((q, nv_scale, *mx[2:]), TypeError, r"with scales in torch\.float8_e4m3fn"),
        ((q[:, :48], *mx[1:]), ValueError, "K of a is 48; need a multiple of 32"),
        ((q, scale[0, 0], *mx[2:]), ValueError, "scales of a have .*swizzle_scales"),
        ((q, scale, q[:, :32], scale, "mxfp8"), ValueError, r"shapes \(8, 64\) and \(8, 32\)"),
        ((*mx, HALF, whole), ValueError, "mxfp8 has no scale for the tensor"),
        ((*nv, HALF, whole), ValueError, "needs a scale for the tensor"),
    ]
    return [(blackwell_matmul, *case) for case in plain] + [(blackwell_mx_matmul, *case) for case in scaled]


@pytest.mark.parametrize("case", range(15))
def test_bad_input(h, case):
    fn, args, error, message = _bad(h.device)[case]
    with pytest.raises(error, match=f"{fn.__name__}: .*{message}"):
        fn(*args)


# --- the code, and what is said of it


def instruction_descriptors(ptx):
    """The numbers that tell tcgen05.mma its formats, shape and scales."""
    found = set()
    for line in re.findall(r"tcgen05\.mma\.[^;]*;", ptx):
        register = re.findall(r"%r\d+", line.split("]", 1)[1])[0]
        found |= set(re.findall(rf"mov\.b32 \t?{register}, (-?\d+);", ptx))
    return found


@pytest.mark.parametrize("fmt", [None, "mxfp8", pytest.param("mxfp4", marks=pytest.mark.slow), "nvfp4"])
def test_mmas_are_described_as_the_compiler_describes_them(h, fmt):
    """And scales begin in the columns that are counted: those of b behind the accumulator, then those of a."""
    if fmt is None:
        calls = [(blackwell_matmul, (*[h.meta(4096, 4096)] * 2, variant)) for variant in ("by hand", "pipelined")]
    else:
        form = FORMATS[fmt]
        q = h.meta(4096, 4096 // form.pack, dtype=form.element)
        scale = h.meta(32, 1024 // form.group, 32, 16).to(form.scale)
        wholes = [h.meta(1, dtype=torch.float32) if fmt == "nvfp4" else None] * 2
        calls = [(fn, (q, scale, q, scale, fmt, torch.bfloat16, *wholes)) for fn in (blackwell_mx_matmul, mx_matmul)]
    ours, theirs = (dump(*call, sm=100)["ptx"] for call in calls)
    assert instruction_descriptors(ours) == instruction_descriptors(theirs) != set()
    if fmt:
        base = re.search(r"ld\.shared\.b32 \t(%r\d+), \[global_smem\]", ours).group(1)
        at = {int(n) for n in re.findall(rf"add\.s32 \t%r\d+, {base}, (\d+);", ours)}
        _, block_n, _, _, stages, accs = by_hand_plan(SHARED_LIMIT[100], scale_groups(fmt))
        first = accs * block_n
        assert {first, first + scale_columns(block_n, 0, scale_groups(fmt), stages)} <= at
