"""gluon_matmul: the protocol of its barriers in every order of events, and its code; its numbers need a GPU."""

import functools
import itertools
import re
from types import SimpleNamespace
from typing import NamedTuple

from harness.bench import Row, Table
from harness.codegen import compile_for, dump

import pytest
import torch
import triton

from examples.common import gluon as common
from examples.common.device import SHARED_LIMIT, Limits
from examples.tma import gluon_matmul as module
from examples.tma.gluon_matmul import BEHIND, BUFFERS, DTYPES, PARTS, STAGES, STEPS, TILE, gluon_matmul, reference
from examples.tma.gluon_matmul_ring import gluon_matmul_one_buffer, gluon_matmul_ring

TOGETHER = {"one buffer": gluon_matmul_one_buffer, "ring": gluon_matmul_ring}  # all warps load and multiply
KERNELS = TOGETHER | {step: functools.partial(gluon_matmul, step=step) for step in STEPS}

# --- the protocol: every order in which producer, consumers and loads can take their turns


WRONG = "read at the wrong time"


class Piece(NamedTuple):
    """Barriers or buffers, as the source sees them: one of them, and the shape of all."""

    name: str
    number: int = 0
    shape: tuple = ()

    def index(self, number):
        return self._replace(number=number)

    def slice(self, *args, **kwargs):
        return self

    def permute(self, order):
        return self


@pytest.fixture
def trace(monkeypatch):
    """What producer and consumers do, from the source: run as Python, with barriers that note what is done to them."""
    done, started, flying, steps_of = [], [], [], []
    m, n, k = TILE

    def multiply(a, b, acc, use_acc, is_async):
        flying.append((a.number, len(started)))
        started.append(a)
        done.append(("read", *flying[-1]))

    def wait_for_mmas(left, deps):
        while len(flying) > left:
            done.append(("read", *flying.pop(0)))

    def wait(barrier, phase, pred=True):
        done.extend([("wait", barrier.name, barrier.number, phase)] * bool(pred))

    def arrive(barrier, pred=True):
        done.extend([("arrive", barrier.name, barrier.number)] * bool(pred))

    def expect(barrier, nbytes):
        assert nbytes == 2 * (m * k + k * n), "full completes when both have arrived, and not before"

    def load(desc, at, full, buf):
        assert at == ([7, steps_of[0] * k] if buf.name == "a" else [steps_of[0] * k, 9])
        if buf.name == "a":
            done.append(("load", buf.number, next(loads)))
        else:
            steps_of.append(steps_of.pop(0))

    language = SimpleNamespace(
        where=lambda which, yes, no: yes if which else no, cdiv=triton.cdiv, program_id=lambda axis: 0,
        num_programs=lambda axis: 1, num_warps=lambda: 4, zeros=lambda *args: None,
        NVMMADistributedLayout=lambda *args: None, float32=None,
    )  # fmt: skip
    stands_in = {
        "gl": language, "mbarrier": SimpleNamespace(wait=wait, arrive=arrive, expect=expect),
        "tma": SimpleNamespace(store_wait=lambda left: None), "tile_coords": lambda *args: (7, 9), "async_load": load,
        "warpgroup_mma": multiply, "warpgroup_mma_wait": wait_for_mmas, "store_parts": lambda *args: None,
    }  # fmt: skip
    for where, names in ((module, ("next_slot", "_add_step", "release_previous")), (common, ("previous_slot",))):
        for name in names:
            monkeypatch.setattr(where, name, getattr(where, name).fn)
        for name, value in stands_in.items():
            monkeypatch.setattr(where, name, value, raising=False)

    def partitions(tiles, steps, stages, in_flight=False, behind=0):
        nonlocal loads
        ring = (Piece("a", 0, (stages, m, k)), Piece("b", 0, (stages, k, n)), Piece("full"), Piece("empty"))
        sizes = (tiles * m, n, steps * k - 8, False, stages)
        steps_of[:], loads = range(steps), itertools.count()
        done.clear()
        module._produce.fn(ring, SimpleNamespace(block_shape=[m, k]), SimpleNamespace(block_shape=[k, n]), *sizes, 8)
        found = [list(done)]
        for half in (0, 1):
            done.clear()
            started.clear()
            c_desc = SimpleNamespace(block_shape=[m // 2, n // PARTS])
            module._consume.fn(ring, c_desc, None, Piece("lead"), *sizes, BUFFERS, in_flight, behind, 8, half)
            found.append(list(done))
        return found

    loads = itertools.count()
    return partitions


def faults(partitions, stages, arrivals=2):
    """All that can go wrong in some order of events: every one is tried, up to what goes wrong in it.

    A barrier is (phase, arrivals still missing, loads in flight); a wait for a parity passes while the phase has the
    other one. A buffer holds the step that was loaded into it, or None while a load writes it.
    """
    barriers = {("full", i): 1 for i in range(stages)} | {("empty", i): arrivals for i in range(stages)}
    barriers[("lead", 0)] = 1
    counts, number = list(barriers.values()), {name: i for i, name in enumerate(barriers)}

    def signal(bars, i, arrived, loads):
        phase, missing, flying = bars[i]
        state = (phase, missing - arrived, flying + loads)
        return (*bars[:i], (phase ^ 1, counts[i], 0) if state[1:] == (0, 0) else state, *bars[i + 1 :])

    start = ((0, 0, 0), tuple((0, count, 0) for count in counts), (-1,) * stages, frozenset())
    seen, todo, found = {start}, [start], set()
    while todo:
        at, bars, held, flying = todo.pop()
        after = []
        for slot, use in flying:  # a load ends
            landed = (*held[:slot], use, *held[slot + 1 :])
            after.append((at, signal(bars, number["full", slot], 0, -1), landed, flying - {(slot, use)}))
        ahead = [(i, actions[at[i]]) for i, actions in enumerate(partitions) if at[i] < len(actions)]
        for which, (kind, *what) in ahead:
            moved = (*at[:which], at[which] + 1, *at[which + 1 :])
            if kind == "wait":
                if bars[number[what[0], what[1]]][0] != what[2]:
                    after.append((moved, bars, held, flying))
            elif kind == "load":
                slot, use = what
                i = number["full", slot]
                if bars[i][1] == 0 or any(other == slot for other, _ in flying):
                    found.add("two loads into one buffer")
                else:
                    torn = (*held[:slot], None, *held[slot + 1 :])
                    after.append((moved, signal(bars, i, 1, 1), torn, flying | {(slot, use)}))
            elif kind == "read":
                if held[what[0]] != what[1]:
                    found.add(WRONG)
                else:
                    after.append((moved, bars, held, flying))
            elif bars[number[tuple(what)]][1] == 0:
                found.add("an arrival too many")
            else:
                after.append((moved, signal(bars, number[tuple(what)], 1, 0), held, flying))
        if not flying and ahead and all(action[0] == "wait" for _, action in ahead) and not after:
            found.add("locked")
        todo += set(after) - seen
        seen.update(after)
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, STAGES])
def test_no_order_of_events_breaks_the_protocol(trace, stages):
    """Tiles shorter than the ring, as long and longer; rings that go round within a tile and across tiles."""
    steps_of_the_wrapper = [(False, 0), (True, 0), (True, BEHIND)]
    modes = {1: [(False, 0), (False, BEHIND)], STAGES: steps_of_the_wrapper}
    for in_flight, behind in modes.get(stages, [*steps_of_the_wrapper, (False, BEHIND), (True, 1)]):
        for tiles, steps in itertools.product((1, 3), (1, 2, 3, 5)):
            held = behind if steps >= stages > behind else 0  # the wrapper's rule
            assert not faults(trace(tiles, steps, stages, in_flight, held), stages), (tiles, steps, in_flight, behind)


def without(what, last=1):
    """Of each partition but the producer, and of each so many of them the last."""

    def change(which, actions):
        places = [i for i, action in enumerate(actions) if action[:2] == what]
        return [action for i, action in enumerate(actions) if which == 0 or i not in places[last - 1 :: last]]

    return change


def flip(barrier):
    """A partition that waits for the other parity of a barrier."""
    return lambda which, actions: [
        (*action[:3], 1 - action[3]) if action[:2] == ("wait", barrier) else action for action in actions
    ]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_broken_protocol_is_found(trace, in_flight):
    """The search sees a count, a parity, an arrival or a hold that is wrong."""
    right = trace(3, 3, 2, in_flight)
    assert WRONG in faults(right, 2, arrivals=1), "one consumer empties a slot for both"
    assert "locked" in faults(right, 2, arrivals=3)
    for change, what in [
        (flip("empty"), "locked"),
        (flip("full"), WRONG),
        (without(("arrive", "empty")), "locked"),
        (without(("arrive", "empty"), last=3), "locked"),
    ]:
        assert what in faults([change(which, actions) for which, actions in enumerate(right)], 2), what
    assert "locked" in faults(trace(1, 2, 1, True), 1), "a slot is emptied a step late"
    assert "locked" in faults(trace(3, 4, 1, False, 2), 1), "the second holds the slot that the first waits for"
    assert "locked" in faults(trace(3, 4, 2, True, 2), 2), "and has one in flight"
    assert "locked" in faults(trace(3, 2, 5, in_flight, 1), 5), "the first is done two tiles before the second looks"


@pytest.mark.parametrize(("K", "behind"), [(64 * STAGES - 64, 0), (64 * STAGES - 56, BEHIND)])
def test_the_wrapper_staggers_by_that_rule(h, monkeypatch, K, behind):
    """The last step may be in part."""
    launched = []
    kernel = type("K", (), {"__getitem__": lambda self, grid: lambda *args, **options: launched.append(options)})
    monkeypatch.setattr(module, "gluon_matmul_kernel", kernel())
    monkeypatch.setattr(module, "require_wgmma", lambda *args: None)
    a, b = h.randn(300, K, dtype=h.half), h.randn(K, 264, dtype=h.half)
    for step in STEPS:
        gluon_matmul(a, b, step)
    assert STAGES > BEHIND > 0
    assert [options["BEHIND"] for options in launched] == [0, 0, 0, behind]
    assert [options["IN_FLIGHT"] for options in launched] == [False, False, True, True]


# --- code


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("step", "columns", "dtype"),
    [("one buffer", False, DTYPES[1]), ("ring", True, DTYPES[1]), ("staggered", False, DTYPES[1]),
     ("staggered", True, DTYPES[0])],
)  # fmt: skip
def test_generated_code(step, columns, dtype):
    x = meta(4096, 4096, dtype=dtype)
    wrapper, args = TOGETHER.get(step, gluon_matmul), (x, x.t() if columns else x, *[step] * (step in STEPS))
    (kernel,), text = compile_for(wrapper, args, sms=(90,)), dump(wrapper, args, sm=90)
    m, n, k = TILE
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    together = step in TOGETHER
    assert kernel.warps == (8 if together else 12)  # the producer's one is given a warpgroup
    assert kernel.registers * 32 * kernel.warps <= 65536
    assert bool(kernel.found.get("setmaxnreg")) != together
    # A step of K is BLOCK_K / 16 instructions; each of two consumers has its first step before its loop.
    assert kernel.found["wgmma"] == k // 16 * (1 if together else 4)
    assert "serialized" not in text["log"], "the assembler waits after each MMA"
    assert not re.search(r"C75\d\d", text["log"])
    form = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    mmas = [line for line in text["ptx"].splitlines() if "wgmma.mma_async" in line]
    assert all(f"m64n256k16.f32.{form}.{form}" in line for line in mmas)
    assert not re.search(r"(ld|st)\.global", text["ptx"])
    assert set(re.findall(r"expect_tx\S+ _, \S+ (\d+);", text["ptx"])) == {str(2 * (m + n) * k)}
    # What the source allocates: a ring, barriers, and parts of each half through buffers of each half.
    if step == "one buffer":  # the result lies where operands were
        assert 2 * (m + n) * k + 8 <= 2 * m * n <= kernel.shared < 2 * m * n + 2 * (m + n) * k
    elif step == "ring":
        assert 0 <= kernel.shared - STAGES * (2 * (m + n) * k + 8) < 256
    else:
        stored = 2 * m * n // PARTS * BUFFERS
        assert 0 <= kernel.shared - STAGES * (2 * (m + n) * k + 16) - stored < 256
        boxes = 2 if columns else 1 + n // 64  # as wide as the swizzle, and the producer is one warp
        assert len(re.findall(r"cp\.async\.bulk\.tensor\S+global\.mbarrier", text["ptx"])) == boxes
        # One group of MMAs is left to run after each step, and none at the end of a tile.
        assert sorted(re.findall(r"wgmma\.wait_group\S* +(\d+)", text["ptx"])) == ["0"] * 2 + ["1"] * 4
        counts = sorted(int(count) for count in re.findall(r"ttng\.init_barrier %\S+ ?, (\d+)", text["ttgir"]))
        assert counts == [1] * (STAGES + 1) + [2] * STAGES
        registers = module.CONSUMER_REGISTERS, module.PRODUCER_REGISTERS
        assert "requestedRegisters = array<i32: {}, {}>".format(*registers) in text["ttgir"]
        assert 128 * (2 * registers[0] + registers[1]) == 168 * 384, "what the launch takes"


# --- the wrappers


def test_what_is_refused(h, monkeypatch):
    """What needs sm_90 is refused elsewhere also where there is nothing to compute."""
    b = h.randn(16, 8, dtype=h.half)
    for step in ("faster", None):
        with pytest.raises(ValueError, match=f"gluon_matmul: step {step!r} is not one of"):
            gluon_matmul(h.randn(4, 16, dtype=h.half), b, step)
    monkeypatch.setattr(common, "gluon_architecture", lambda device: None)
    for fn in (gluon_matmul, *TOGETHER.values()):
        for M in (0, 4):
            with pytest.raises(RuntimeError, match=f"{fn.__name__}: needs sm_90, .*Gluon kernels are not interpreted"):
                fn(h.randn(M, 16, dtype=h.half), b)
        with pytest.raises(ValueError, match=f"{fn.__name__}: K is 12"):
            fn(h.randn(4, 16, dtype=h.half)[:, :12], b[:12])


def test_the_answer_on_hopper():
    for gluon, verdict in [(1.0, "it buys little."), (0.5, "it pays."), (2.0, "it does not pay.")]:
        ms = {"cuBLAS": 1.0, "triton": 1.0, "one buffer": 2.0, "ring": 1.0, "gluon": gluon}
        rows = [Row(name, name not in ("cuBLAS", "triton"), None, 0, t, speedup=1 / t) for name, t in ms.items()]
        assert module.answer([Table("gluon_matmul", "4096", "cuBLAS", rows)]).endswith(f"1.00x cuBLAS: {verdict}")


# --- what only a GPU can say


@pytest.fixture
def hopper(h):
    if h.interpreted or h.machine.sm != 90:
        pytest.skip("needs sm_90, and Gluon is not interpreted")
    return h


def check(h, a, b, step, what=None):
    what = what or f"{step} {tuple(a.shape)} {tuple(b.shape)} {a.stride()} {b.stride()}"
    h.check(KERNELS[step], reference, a, b, terms=a.shape[1], what=what)


# One row, one tile and one more in each dimension, half a tile of columns and 8 more, nothing to add up, nothing; more
# rows of tiles than a group has, and a last group that is not full.
SHAPES = [(1, 8, 8), (37, 56, 104), (128, 256, 64), (129, 264, 72), (65, 8, 64), (5, 136, 8), (1, 264, 1000),
          (5, 16, 0), (0, 16, 8), (5, 0, 8), ((module.GROUP_M + 1) * TILE[0] + 1, 264, 8),
          (1000, 5208, 776)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("step", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_layouts_and_extremes(hopper, step, dtype):
    for M, N, K in SHAPES:
        a, w = hopper.randn(M, K, dtype=dtype), hopper.randn(N, K, dtype=dtype)
        for b in (w.t(), w.t().contiguous()):
            check(hopper, a, b, step)
    a, b = hopper.randn(140, 160, dtype=dtype), hopper.randn(200, 320, dtype=dtype)
    for left, right in (
        (a, b[:160, :104]),  # rows apart: what lies between them must not count
        (a[:, 8:80], b[:72]),  # a start 16 bytes later
        (a[::3, :72], b[:144:2, 16:]),  # every third, every second row
        (a[:1, :72].as_strided((1, 72), (5, 1)), b[:72, :40]),  # one row, with a stride nobody steps by
        (a, b[:136, :160].t()),  # columns apart
    ):
        check(hopper, left, right, step)
    # NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile.
    a, b = hopper.randn(130, 72, dtype=dtype), hopper.randn(72, 264, dtype=dtype)
    a[3, 5], a[129, 71], b[2, 9], b[71, 263], b[7, 130] = (float(x) for x in ("nan", "inf", "-inf", "inf", "nan"))
    check(hopper, a, b, step, "NaN and infinities")


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 7, 132])
def test_barriers_across_tiles(hopper, monkeypatch, sms):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them."""
    monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[90]))
    for steps in range(1, 10):
        K = 64 * steps - 32 * (steps % 2)
        a, b = hopper.randn(700, K, dtype=torch.bfloat16), hopper.randn(K, 1288, dtype=torch.bfloat16)
        for step in STEPS:
            check(hopper, a, b, step, what=f"{step}, {steps} steps, {sms} SMs")


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [False, True])
def test_every_launch_and_every_step_gives_the_same_bits(hopper, columns):
    """The order of additions is that of K in each: a buffer read or written at the wrong time would show in time."""
    for M, N, K in [(4096, 4096, 256), (1000, 8200, 1040), (16384, 512, 64), (304, 264, 8192)]:
        a, b = hopper.randn(M, K, dtype=torch.bfloat16), hopper.randn(K, N, dtype=torch.bfloat16)
        b = b.t().contiguous().t() if columns else b
        first = gluon_matmul_one_buffer(a, b)
        for step, fn in KERNELS.items():
            assert all(torch.equal(fn(a, b), first) for _ in range(50)), (step, M, N, K)


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["ring", "staggered"])
def test_more_elements_than_an_int32_counts(hopper, gpu_gib, step):
    gpu_gib(40)
    long, fn = 2**31 // 64 + 64, KERNELS[step]
    a = torch.empty(long, 64, dtype=torch.bfloat16, device=hopper.device).normal_()
    b = hopper.randn(64, 64, dtype=torch.bfloat16)
    for left, right, rows in ((a, b, True), (b, a.view(64, long), False), (b, a.t(), False)):
        c = fn(left, right)
        for part in (slice(0, 300), slice(-300, None)):
            got = c[part] if rows else c[:, part].contiguous()
            inputs = (left[part].contiguous(), right) if rows else (left, right[:, part].contiguous())
            hopper.check(lambda *_, got=got: got, reference, *inputs, terms=64, what="tall" if rows else "wide")
        del c, got
