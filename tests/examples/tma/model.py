"""A model of an SM: Gluon kernels run as they stand, and all that is asynchronous is as disorderly as PTX allows.

The Python of each partition runs once and leaves a list of operations, as no branch depends on data. These are played
in turns: which partition does its next one, or which operation in flight is done, is drawn. A load by TMA ends whenever
it likes; MMAs of a warpgroup end in order; tcgen05.mma waits for the copies that were issued before it and for earlier
MMAs to its accumulator, nothing else, and a commit for all before it. What reads or writes a buffer while it may not,
or lets every partition wait with nothing in flight, is an error.

The two CTAs of a cluster are played together. Each records the kernel with its own rank, on memory and barriers of its
own; what both allocate at the same place are twins. A barrier of two_ctas is one for both and lies in CTA 0.
"""

import collections
import functools
import operator
import random
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

from harness import hardware

import pytest
import torch
import triton
from hypothesis import Phase, settings
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3
from examples.common.microscaling import FORMATS, dequantize
from examples.fp8.fp8_attention_operands import pack_values
from tests.examples.tma.helpers import Launcher

no_shrinking = settings(phases=[Phase.generate])  # it takes minutes, and what is drawn from a seed has nothing smaller
often = settings(no_shrinking, max_examples=40)


class Dtype(NamedTuple):
    torch: torch.dtype
    primitive_bitwidth = property(lambda self: 8 * self.torch.itemsize)


class Value:
    """Registers: `get` is called when the partition gets there. An accumulator of wgmma has its memory."""

    def __init__(self, sm, get, shape, memory=None):
        self.sm, self.get, self.shape, self.memory = sm, get, shape, memory

    type = property(lambda self: SimpleNamespace(layout=None))

    def to(self, dtype, bitcast=False):
        return Value(self.sm, lambda: getattr(self.get(), "view" if bitcast else "to")(dtype.torch), self.shape)

    def then(self, fn, *others):
        """fn of this and other values, computed where the partition is now."""

        def run():
            done.append(fn(self.get(), *(x.get() if isinstance(x, Value) else x for x in others)))

        done, like = [], [torch.zeros(x.shape) if isinstance(x, Value) else x for x in (self, *others)]
        self.sm.does(run)
        return Value(self.sm, lambda: done[0], fn(*like).shape)

    def __getitem__(self, at):
        return self.then(operator.itemgetter(at))

    __add__ = __radd__ = functools.partialmethod(then, operator.add)
    __sub__ = functools.partialmethod(then, operator.sub)
    __mul__ = __rmul__ = functools.partialmethod(then, operator.mul)
    __truediv__ = functools.partialmethod(then, operator.truediv)
    __rtruediv__ = functools.partialmethod(then, lambda x, y: y / x)

    def halves(self):
        rows, width = self.shape[0], self.shape[1] // 2
        return [Value(self.sm, lambda i=i: self.get().narrow(1, i * width, width), (rows, width)) for i in (0, 1)]


class Pointer(NamedTuple):
    """Elements of memory, counted from a tensor's first on."""

    tensor: torch.Tensor
    at: object = 0

    def __add__(self, offset):
        return Pointer(self.tensor, self.at + offset)

    def item(self):
        return self.tensor.as_strided((), (), self.tensor.storage_offset() + self.at).item()

    def gather(self, mask, other):
        return torch.where(mask, self.tensor[torch.where(mask, self.at, 0)], other)


class Memory:
    """Some of it; all views share `state`: how many operations in flight write it and read it, whether TMA sees what
    threads wrote, and the columns of an accumulator that are yet to be loaded."""

    def __init__(self, sm, get, state=None, twins=None):
        self.sm, self.get, self.slots, self.rank, self.twins = sm, get, {}, sm.rank, twins
        self.state = state or SimpleNamespace(writes=0, reads=0, fenced=True, due=0, scales=None)

    tensor = property(lambda self: self.get())
    shape = property(lambda self: list(self.tensor.shape))
    dtype = property(lambda self: Dtype(self.tensor.dtype))

    def index(self, i):
        assert i < self.shape[0], "there are fewer buffers"
        if i not in self.slots:
            self.slots[i] = Memory(self.sm, lambda: self.tensor[i], None, lambda: [x.index(i) for x in self.twins()])
            self.slots[i].rank = self.rank
        return self.slots[i]

    def permute(self, order):
        return Memory(self.sm, lambda: self.tensor.permute(order), self.state)

    def reshape(self, shape):
        return Memory(self.sm, lambda: self.tensor.reshape(shape), self.state)

    def slice(self, start, length, dim=-1):
        return Memory(self.sm, lambda: self.tensor.narrow(dim, start, length), self.state)

    def _reinterpret(self, dtype, shape, layout):
        assert self.tensor.numel() == shape[0] * shape[1], "a column has 4 bytes of each of 32 rows, 4 times"
        if self.state.scales is None:
            self.state.scales = torch.zeros(shape, dtype=torch.uint8).view(dtype.torch)
        return Memory(self.sm, lambda: self.state.scales, self.state)

    reinterpret = _reinterpret  # of Triton 3.9

    def read(self):
        assert not self.state.writes, "an accumulator is read while MMAs to it are in flight"
        return self.tensor

    def load(self, layout):
        def run():
            loaded.append(self.read().clone())
            self.state.due -= self.shape[-1]

        loaded = []
        self.sm.does(run)
        return Value(self.sm, lambda: loaded[0], self.shape)

    def store(self, value):
        def run():
            assert self.state.reads == self.state.writes == 0, "a buffer is written while TMA reads it"
            self.state.fenced = False
            written.append(self.state)
            self.tensor.copy_(value.get())

        written = self.sm.now.written
        self.sm.does(run)


class Joint:
    """The state of memory that has several: what happens to it happens to each."""

    def __init__(self, states):
        self.states = states

    def shared(name):
        def change(self, value):
            by = value - getattr(self, name)
            for each in self.states:
                setattr(each, name, getattr(each, name) + by)

        return property(lambda self: max(getattr(each, name) for each in self.states), change)

    reads, writes, due, fenced = map(shared, ("reads", "writes", "due", "fenced"))


def view_as(buf, shape):
    """The same bytes as blocks of another shape: some of a block of buf each, or some blocks of buf."""

    def state(i):
        first, end = i * buf.shape[0] // shape[0], (i + 1) * buf.shape[0] // shape[0]
        return Joint([buf.index(j).state for j in range(first, end)]) if end > first else buf.index(first).state

    assert max(shape[0], buf.shape[0]) % min(shape[0], buf.shape[0]) == 0
    view = Memory(buf.sm, lambda: buf.tensor.view(shape), "only its blocks have a state")
    for i in range(shape[0]):
        view.slots[i] = Memory(buf.sm, lambda i=i: buf.tensor.view(shape)[i], state(i))
    return view


class Barrier:
    """One, or some: index() has each. They share the number of their allocation."""

    def __init__(self, number, rank=0, twins=None, shared=False):
        self.number, self.parity, self.bytes, self.each = number, 0, 0, {}
        self.rank, self.twins, self.shared = rank, twins, shared

    def index(self, i):
        twins = lambda: [x.index(i) for x in self.twins()]  # noqa: E731
        return self.each.setdefault(i, Barrier(self.number, self.rank, twins, self.shared))

    def signal(self, arrivals=0, nbytes=0):
        self.pending -= arrivals
        self.bytes += nbytes
        assert self.pending >= 0, f"barrier {self.number}: more arrivals than the phase has"
        if not self.pending and not self.bytes:
            self.pending, self.parity = self.count, self.parity ^ 1


def described(x):
    """A descriptor as kernels see it."""
    if not hasattr(x, "block_shape"):
        return Pointer(x) if isinstance(x, torch.Tensor) else x
    size, layout = x.base.element_size(), SimpleNamespace(cga_layout=getattr(x.layout, "cga_layout", None) or [])
    return SimpleNamespace(
        base=x.base, block_shape=list(x.block_shape), dtype=Dtype(x.base.dtype), layout=layout,
        block_type=SimpleNamespace(nbytes=size * torch.Size(x.block_shape).numel()),
        nbytes_per_cta=size * torch.Size(of_a_cta(x.block_shape, layout)).numel(),
    )  # fmt: skip


def of_a_cta(shape, layout):
    """What a CTA has of a block, or of each of some: half of the rows where the layout says so."""
    splits = getattr(layout, "cga_layout", [])
    assert [*map(list, splits)] in ([], [[0, 0]], [[1, 0]])
    *outer, rows, cols = shape
    return [*outer, rows // 2 if splits and splits[0][0] else rows, cols]


def inside(desc, at, box):
    """What there is of a box, as slices of the tensor and of the box: it may begin before the tensor and end after."""
    spans = [(i, max(i, 0), min(i + n, size)) for i, n, size in zip(at, box, desc.base.shape, strict=True)]
    spans = [(i, start, max(start, end)) for i, start, end in spans]
    return tuple(slice(a, b) for _, a, b in spans), tuple(slice(a - i, b - i) for i, a, b in spans)


def at_least(a, b):
    return torch.maximum(a, torch.as_tensor(b, dtype=a.dtype))


def fused_multiply_add(text, constraints, args, dtype, is_pure, pack):
    assert text.startswith("fma.rn.f32 $0, $1, $2, $3")
    return args[0] * args[1] + args[2]


def in_order_of_values(weights):
    """In e4m3, each 16 keys in the order of pack_values(): by its own code, of a matrix whose rows are keys."""
    return pack_values(weights.clamp(-448, 448).to(E4M3).T[None, None])[0, 0]


def all_landed(flights):
    return all(each.landed for each in flights)


def nothing(*args, **kwargs):
    return None


class SM:
    """One program: a CTA, or the two of a cluster on two SMs."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.speeds = collections.defaultdict(lambda: self.random.choice((0.02, 1.0, 20.0)))
        self.flights, self.partitions, self.waits = [], [], collections.Counter()
        self.barriers, self.columns, self.fenced = 0, 0, True
        self.rank, self.ctas, self.playing, self.met, self.turns = 0, [[]], [], False, set()

    def record(self, name, fn, args, kwargs):
        """What a partition will do."""
        self.now = SimpleNamespace(
            kind=name, rank=self.rank, todo=collections.deque(), stores=[], issued=[], written=[]
        )
        fn(*args, **kwargs)
        return self.now

    def play(self, partitions):
        self.playing = partitions
        while True:
            able = [each for each in partitions if each.todo and each.todo[0][0]()]
            able += [each for each in self.flights if all_landed(each.after)]
            if not able:
                break
            (chosen,) = self.random.choices(able, [self.speeds[each.kind] for each in able])
            if chosen in partitions:
                chosen.todo.popleft()[1]()
                assert chosen.todo or all_landed(chosen.stores), "shared memory must outlive its last reader"
            else:
                self.flights.remove(chosen)
                chosen.land()
                chosen.landed = True
        assert not any(each.todo for each in partitions), "locked: all that is left waits"
        assert not self.turns, "an arrival at a named barrier is left for whoever comes next"

    def reach(self, target, rank):
        """A CTA of this rank is to change `target`, of whichever CTA."""
        there = self.met or rank == target.rank or any(each.todo for each in self.playing if each.rank == target.rank)
        assert there, f"CTA {target.rank} has ended, and CTA {rank} still reaches into it"

    def does(self, run, ready=lambda: True):
        self.now.todo.append((ready, run))

    def fly(self, kind, start, land, after=()):
        def run():
            flight.after = [each for each in after if not each.landed]
            start()
            self.flights.append(flight)

        flight = SimpleNamespace(kind=kind, land=land, landed=False)
        self.does(run)
        return flight

    # what kernels call

    def init(self, barrier, count):
        barrier.count = barrier.pending = count * (2 if barrier.shared else 1)
        self.fenced = False

    def wait(self, barrier, phase, pred=True):
        if pred and barrier.rank == self.rank:  # one that lies in CTA 0 is waited for by CTA 0 alone
            self.waits[barrier.number] += 1
            self.does(nothing, lambda: barrier.parity != phase)

    def arrive(self, barrier, nbytes=0, pred=True):
        def run():
            self.reach(barrier, rank)
            barrier.signal(1, nbytes)

        rank = self.rank
        if pred:
            self.does(run)

    def take_turn(self, consumer):
        """A named barrier, for one who waits and one who does not."""
        self.does(lambda: self.turns.remove(consumer), lambda: consumer in self.turns)

    def pass_turn(self, consumer, consumers):
        def run():
            assert after not in self.turns, "two arrivals at a named barrier are a phase, though nobody waited"
            self.turns.add(after)

        after = (consumer + 1) % consumers
        self.does(run)

    def fence(self):
        def run():
            while written:
                written.pop().fenced = True

        written = self.now.written
        self.fenced |= self.now.kind == "whole"  # before the partitions begin; one of theirs may come too late
        self.does(run)

    def load(self, desc, at, barrier, to, pred=True, multicast=False):
        if multicast:
            assert len(self.ctas) == 2
            assert to.shape == desc.block_shape, "a multicast is of a block that both CTAs have whole"
            for target, ready in zip(to.twins(), barrier.twins(), strict=True) if self.rank == 0 else ():
                self.load_one(desc, at, ready, target, pred)
        else:
            self.load_one(desc, self.rows_of(desc, at), barrier, to, pred)

    def rows_of(self, desc, at):
        """Where this CTA's part of a block begins."""
        rows, splits = of_a_cta(desc.block_shape, desc.layout)[-2], desc.layout.cga_layout
        return [at[0] + self.rank * rows, *at[1:]] if splits and splits[0][0] else at

    def load_one(self, desc, at, barrier, to, pred):
        def start():
            self.reach(to, rank)
            assert to.state.reads == to.state.writes == 0, "TMA fills a buffer that is being read or filled"
            to.state.writes += 1

        def land():
            self.reach(to, rank)
            assert self.met or any(each.todo for each in self.playing), "a load lands after the program's end"
            there, here = inside(desc, at, to.shape)
            to.tensor.zero_()
            to.tensor[here] = desc.base[there]
            to.state.writes -= 1
            barrier.signal(nbytes=-to.tensor.nbytes)

        assert self.fenced, "barriers are used before their initialization is fenced"
        assert to.shape == of_a_cta(desc.block_shape, desc.layout)
        rank = self.rank
        if pred:
            self.fly(f"load into {to.rank}" if to.rank else "load", start, land)

    def store(self, desc, at, source):
        def start():
            assert source.state.fenced, "TMA reads what was written without a fence between"
            assert not source.state.writes, "TMA reads a buffer that is being filled"
            source.state.reads += 1

        def land():
            there, here = inside(desc, at, source.shape)
            desc.base[there] = source.tensor[here]
            source.state.reads -= 1

        at = self.rows_of(desc, at)
        self.now.stores.append(self.fly("store", start, land))

    def wait_for_all_but(self, pendings, flights):
        before = flights[: max(0, len(flights) - pendings)]  # in the order of issue, whichever of them have landed
        self.does(nothing, lambda: all_landed(before))

    def issue(self, what, start, land, after):
        flight = self.fly("MMA", start, land, [each for each in self.now.issued if after(each.what)])
        flight.what = what
        self.now.issued.append(flight)

    def multiply(self, operands, acc, product, use_acc, after):
        def start():
            assert not any(each.state.writes for each in operands), "an MMA reads an operand that is still written"
            assert all(each.state.fenced for each in operands), "an MMA reads what was written without a fence between"
            for each in operands:
                each.state.reads += 1
            acc.state.writes += 1

        def land():
            acc.tensor.copy_(acc.tensor + product() if use_acc else product())
            acc.state.writes -= 1
            for each in operands:
                each.state.reads -= 1

        self.issue(id(acc.state), start, land, after)

    def wgmma(self, a, b, acc, use_acc=True, is_async=False):
        """`a` in shared memory or in registers; an accumulator that was computed starts from its value."""

        def product():
            return (a.get() if isinstance(a, Value) else a.tensor).float() @ b.tensor.float()

        if acc.memory is None:
            start, acc = acc, self.zeros(acc.shape, Dtype(torch.float32), None)
            self.does(lambda: acc.memory.tensor.copy_(start.get()))
        self.multiply([x for x in (a, b) if isinstance(x, Memory)], acc.memory, product, use_acc, lambda what: True)
        return acc

    def wgmma_wait(self, pendings, deps):
        self.wait_for_all_but(pendings, self.now.issued)
        return deps[0] if len(deps) == 1 else deps

    def tcgen05(self, operands, acc, product, use_acc, mbarriers):
        def begin():
            assert not acc.state.due, "MMAs begin in an accumulator that has not been loaded"
            acc.state.due = acc.shape[1]

        if not use_acc:
            self.does(begin)
        self.multiply(operands, acc, product, use_acc, lambda what: what in ("copy", id(acc.state)))
        for barrier in mbarriers:
            self.commit(barrier)

    def mma(self, a, b, acc, *, use_acc, mbarriers=()):
        self.tcgen05((a, b), acc, lambda: a.tensor.float() @ b.tensor.float(), use_acc, mbarriers)

    def mma_scaled(self, a, b, acc, a_scale, b_scale, a_format, b_format, *, use_acc, mbarriers=()):
        def product():
            scales = (scale.tensor.contiguous().view(FORMATS[fmt].scale) for scale in (a_scale, b_scale))
            x, y = (dequantize(q, scale, fmt) for q, scale in zip((a.tensor, b.tensor.T), scales, strict=True))
            return x.float() @ y.float().T

        powers = a_scale.dtype.torch is not E4M3
        (fmt,) = (fmt for fmt, form in FORMATS.items() if form.dot == a_format and powers == (form.scale is not E4M3))
        self.tcgen05((a, b, a_scale, b_scale), acc, product, use_acc, mbarriers)

    def copy(self, source, target):
        def start():
            assert not source.state.writes, "scales are copied before they are there"
            assert not target.state.reads, "scales are copied over those of an MMA in flight"
            source.state.reads += 1

        def land():
            target.tensor.copy_(source.tensor)
            source.state.reads -= 1

        self.issue("copy", start, land, lambda what: False)

    def commit(self, barrier):
        self.issue("commit", nothing, lambda: barrier.signal(1), lambda what: what != "commit")

    def allocate(self, dtype, shape, layout):
        return self.allocate_barriers() if layout == "barrier" else self.twin(self.fresh(dtype, shape, layout))

    def allocate_barriers(self, batch=None, two_ctas=False):
        assert not two_ctas or len(self.ctas) == 2
        self.barriers += 1
        if two_ctas and self.rank:
            return self.twin(self.ctas[0][len(self.ctas[1])])
        return self.twin(Barrier(self.barriers - 1, self.rank, shared=two_ctas))

    def fresh(self, dtype, shape, layout):
        tensor = torch.zeros(of_a_cta(shape, layout) if hasattr(layout, "cga_layout") else shape, dtype=dtype.torch)
        return Memory(self, lambda: tensor)

    def twin(self, made):
        """The n-th that a CTA allocates is the twin of the other's n-th."""
        at = len(self.ctas[self.rank])
        made.twins = lambda: [each[at] for each in self.ctas]
        self.ctas[self.rank].append(made)
        return made

    def allocate_columns(self, dtype, shape, layout):
        self.columns += shape[0] * shape[2]
        return self.allocate(dtype, shape, layout)

    def meet(self):
        """A barrier of the cluster after the partitions: no CTA ends before the other's have."""
        self.met = bool(self.partitions)

    def zeros(self, shape, dtype, layout):
        memory = self.fresh(dtype, shape, layout)
        return Value(self, memory.read, tuple(memory.shape), memory)

    def full(self, shape, value, dtype, layout):
        return Value(self, lambda: torch.full(shape, value, dtype=dtype.torch), tuple(shape))

    def load_elements(self, pointer, mask=None, other=None):
        """What does not change while the kernel runs: when it is read makes no difference."""
        if mask is None:
            return pointer.item()
        return Value(self, lambda: pointer.gather(mask, other), tuple(mask.shape))

    def store_elements(self, pointer, value, mask):
        def run():
            pointer.tensor.view(-1)[pointer.at[mask]] = value.get()[mask]

        self.does(run)

    def run(self, kernel, program, programs, args, kwargs):
        gl = SimpleNamespace(
            static_range=range, cdiv=triton.cdiv, static_assert=nothing, store=self.store_elements,
            where=lambda c, a, b: a.then(lambda a: torch.where(c, a, b)) if torch.is_tensor(c) else a if c else b,
            arange=lambda start, end, layout: torch.arange(start, end), convert_layout=lambda x, layout: x,
            max=lambda x, axis: x.then(lambda x: x.amax(axis)), sum=lambda x, axis: x.then(lambda x: x.sum(axis)),
            exp2=lambda x: x.then(torch.exp2), log2=lambda x: x.then(torch.log2), SliceLayout=nothing,
            rsqrt=lambda x: x.then(torch.rsqrt), div_rn=operator.truediv, BlockedLayout=nothing,
            NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
            maximum=lambda a, b: a.then(at_least, b) if isinstance(a, Value) else max(a, b), DotOperandLayout=nothing,
            program_id=lambda axis: program, num_programs=lambda axis: programs, num_warps=lambda: kwargs["num_warps"],
            allocate_shared_memory=self.allocate, zeros=self.zeros, load=self.load_elements, int64=None,
            float32=Dtype(torch.float32), zeros_like=lambda x: 0.0, inline_asm_elementwise=fused_multiply_add,
            int8=Dtype(torch.int8), full=self.full,
            NVMMADistributedLayout=lambda *args, cga_layout=(), **more: SimpleNamespace(cga_layout=cga_layout),
            warp_specialize=lambda partitions, warps, registers: self.partitions.extend(partitions),
        )  # fmt: skip
        barrier = SimpleNamespace(
            init=self.init, wait=self.wait, expect=self.arrive, arrive=self.arrive, invalidate=nothing,
            MBarrierLayout=lambda: "barrier", allocate_mbarrier=self.allocate_barriers,
        )  # fmt: skip
        language = {
            "gl": gl, "tl": gl, "mbarrier": barrier, "fence_async_shared": self.fence, "async_load": self.load,
            "tma": SimpleNamespace(store_wait=lambda n: self.wait_for_all_but(n, self.now.stores)),
            "async_store": self.store, "cluster": SimpleNamespace(barrier=self.meet),
            "warpgroup_mma": self.wgmma, "warpgroup_mma_wait": self.wgmma_wait,
            "allocate_tensor_memory": self.allocate_columns, "tcgen05_mma": self.mma, "tcgen05_copy": self.copy,
            "tcgen05_mma_scaled": self.mma_scaled, "tcgen05_commit": self.commit, "TensorMemoryLayout": nothing,
            "TensorMemoryScalesLayout": nothing, "split_columns": Value.halves,
            "pack_weights": lambda weights: weights.then(in_order_of_values), "unpack_weights": lambda p, layout: p,
            "take_turn": self.take_turn, "pass_turn": self.pass_turn,
            "view_as": view_as, "load_columns": lambda acc, start, width: acc.slice(start, width).load(None),
        }  # fmt: skip
        scopes = {}

        def as_python(fn):
            """fn's Python, among the model's names."""
            names = fn.fn.__globals__
            if id(names) not in scopes:
                scope = scopes[id(names)] = names | language
                for name, value in names.items():
                    if isinstance(value, triton.language.constexpr):
                        scope[name] = value.value
                    if isinstance(value, JITFunction | InterpretedFunction) and name not in language:
                        scope[name] = as_python(value)
            return FunctionType(fn.fn.__code__, scopes[id(names)], fn.fn.__name__, fn.fn.__defaults__)

        options = {name: value for name, value in kwargs.items() if name not in ("num_warps", "num_ctas")}
        self.ctas = [[] for _ in range(kwargs.get("num_ctas", 1))]
        wholes, partitions = [], []
        for rank in range(len(self.ctas)):
            self.rank, self.partitions, self.barriers, self.columns, self.met = rank, [], 0, 0, False
            wholes.append(self.record("whole", as_python(kernel), list(map(described, args)), options))
            partitions += [(rank, *each) for each in self.partitions]
        recorded = []
        for i, (rank, fn, arguments) in enumerate(partitions):
            self.rank = rank
            recorded.append(self.record(i, fn, arguments, {}))
        self.play(wholes)  # all there is, or what comes before the partitions
        self.play(recorded)


def use_model(monkeypatch, kernels, seed=0, sms=None):
    """Run `kernels`, {name: module}, on the model, with so many SMs. The list of the SMs that will have run."""
    if hardware.machine().mode != "interpreted":
        pytest.skip("the model is for machines without a GPU")

    def launch(kernel, grid, args, options):
        for program in range(grid[0]):
            ran.append(SM(seed + 1000 * program))
            ran[-1].run(kernel, program, grid[0], args, options)

    ran = []
    for name, module in kernels.items():
        if sms:
            monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[90]), raising=False)
        monkeypatch.setattr(module, name, Launcher(functools.partial(launch, getattr(module, name))))
    return ran
