"""gluon_matmul: the protocol of its barriers in every order of events, and its code; its numbers need a GPU."""

import functools
import itertools
import re
from types import SimpleNamespace
from typing import NamedTuple

from harness.codegen import compile_for, dump

import pytest
import torch
import triton

from examples.common import gluon as common
from examples.common.device import SHARED_LIMIT, Limits
from examples.tma import gluon_matmul as module
from examples.tma.gluon_matmul import (
    BEHIND,
    BUFFERS,
    CONSUMER_REGISTERS,
    DTYPES,
    GROUP_M,
    PARTS,
    PRODUCER_REGISTERS,
    STAGES,
    STEPS,
    TILE,
    gluon_matmul,
    reference,
)
from examples.tma.gluon_matmul_ring import gluon_matmul_one_buffer, gluon_matmul_ring

TOGETHER = {"one buffer": gluon_matmul_one_buffer, "ring": gluon_matmul_ring}  # all warps load and multiply
KERNELS = TOGETHER | {step: functools.partial(gluon_matmul, step=step) for step in STEPS}

# --- the protocol: every order in which producer, consumers and loads can take their turns


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
        if pred:
            done.append(("wait", barrier.name, barrier.number, phase))

    def arrive(barrier, pred=True):
        if pred:
            done.append(("arrive", barrier.name, barrier.number))

    def expect(barrier, nbytes):
        assert nbytes == 2 * (m * k + k * n), "full completes when both have arrived, and not before"

    def load(desc, at, full, buf):
        assert at == ([7, steps_of[0] * k] if buf.name == "a" else [steps_of[0] * k, 9])
        if buf.name == "a":
            done.append(("load", buf.number))
        else:
            steps_of.append(steps_of.pop(0))

    language = SimpleNamespace(
        where=lambda which, yes, no: yes if which else no, cdiv=triton.cdiv, program_id=lambda axis: 0,
        num_programs=lambda axis: 1, num_warps=lambda: 4, zeros=lambda *args: None,
        NVMMADistributedLayout=lambda *args: None, float32=None,
    )  # fmt: skip
    barrier = SimpleNamespace(wait=wait, arrive=arrive, expect=expect)
    for where, names in ((module, ("_next", "_add_step", "release_previous")), (common, ("previous_slot",))):
        monkeypatch.setattr(where, "gl", language)
        monkeypatch.setattr(where, "mbarrier", barrier)
        for name in names:
            monkeypatch.setattr(where, name, getattr(where, name).fn)
    stands_in = {
        "tma": SimpleNamespace(store_wait=lambda left: None), "tile_coords": lambda *args: (7, 9),
        "async_load": load, "warpgroup_mma": multiply, "warpgroup_mma_wait": wait_for_mmas,
        "store_parts": lambda *args: None,
    }  # fmt: skip
    for name, value in stands_in.items():
        monkeypatch.setattr(module, name, value)

    def partitions(tiles, steps, stages, in_flight=False, behind=0):
        ring = (Piece("a", 0, (stages, m, k)), Piece("b", 0, (stages, k, n)), Piece("full"), Piece("empty"))
        sizes = (tiles * m, n, steps * k - 8, False, stages)
        done.clear()
        steps_of[:] = range(steps)
        module._produce.fn(ring, SimpleNamespace(block_shape=[m, k]), SimpleNamespace(block_shape=[k, n]), *sizes, 8)
        loads = itertools.count()
        found = [[(*action, next(loads)) if action[0] == "load" else action for action in done]]
        c_desc = SimpleNamespace(block_shape=[m // 2, n // PARTS])
        for half in (0, 1):
            done.clear()
            started.clear()
            module._consume.fn(ring, c_desc, None, Piece("lead"), *sizes, BUFFERS, in_flight, behind, 8, half)
            found.append(list(done))
        return found

    return partitions


def faults(partitions, stages, arrivals=2):
    """All that can go wrong in some order of events: every one is tried, up to what goes wrong in it.

    A barrier is (phase, arrivals still missing, loads in flight); a wait for a parity passes while the phase has the
    other one. A buffer holds the step that was loaded into it, or None while a load writes it.
    """
    barriers = {("full", i): 1 for i in range(stages)} | {("empty", i): arrivals for i in range(stages)}
    barriers[("lead", 0)] = 1
    counts, number = list(barriers.values()), {name: i for i, name in enumerate(barriers)}

    def settle(bars, i, phase, missing, loads):
        if missing == 0 and loads == 0:
            phase, missing = phase ^ 1, counts[i]
        return (*bars[:i], (phase, missing, loads), *bars[i + 1 :])

    start = ((0, 0, 0), tuple((0, count, 0) for count in counts), (-1,) * stages, frozenset())
    seen, todo, found = {start}, [start], set()
    while todo:
        at, bars, held, flying = todo.pop()
        after = []
        for slot, use in flying:  # a load ends
            i = number["full", slot]
            phase, missing, loads = bars[i]
            landed = (*held[:slot], use, *held[slot + 1 :])
            after.append((at, settle(bars, i, phase, missing, loads - 1), landed, flying - {(slot, use)}))
        for which, actions in enumerate(partitions):
            if at[which] == len(actions):
                continue
            kind, *what = actions[at[which]]
            moved = (*at[:which], at[which] + 1, *at[which + 1 :])
            if kind == "wait":
                if bars[number[what[0], what[1]]][0] != what[2]:
                    after.append((moved, bars, held, flying))
            elif kind == "load":
                slot, use = what
                i = number["full", slot]
                phase, missing, loads = bars[i]
                if missing == 0 or any(other == slot for other, _ in flying):
                    found.add("two loads into one buffer")
                    continue
                torn = (*held[:slot], None, *held[slot + 1 :])
                after.append((moved, settle(bars, i, phase, missing - 1, loads + 1), torn, flying | {(slot, use)}))
            elif kind == "read":
                slot, use = what
                if held[slot] != use:
                    found.add("read at the wrong time")
                    continue
                after.append((moved, bars, held, flying))
            else:
                i = number[tuple(what)]
                phase, missing, loads = bars[i]
                if missing == 0:
                    found.add("an arrival too many")
                    continue
                after.append((moved, settle(bars, i, phase, missing - 1, loads), held, flying))
        blocked = [actions[place][0] for place, actions in zip(at, partitions, strict=True) if place < len(actions)]
        if not flying and blocked and all(kind == "wait" for kind in blocked) and not after:
            found.add("locked")
        for state in after:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return found


def rule(steps, stages, behind):
    """The wrapper's: how many steps the second consumer holds back."""
    return behind if steps >= stages > behind else 0


@pytest.mark.parametrize("stages", [1, 2, 3, STAGES])
def test_no_order_of_events_breaks_the_protocol(trace, stages):
    """Tiles shorter than the ring, as long and longer; rings that go round within a tile and across tiles."""
    modes = [(False, 0), (True, 0), (False, BEHIND), (True, 1), (True, BEHIND)]
    for in_flight, behind in modes if stages > 1 else [(False, 0), (False, BEHIND)]:
        for tiles, steps in itertools.product((1, 3, 4), (1, 2, 3, 4, 5)):
            held = rule(steps, stages, behind)
            assert not faults(trace(tiles, steps, stages, in_flight, held), stages), (tiles, steps, in_flight, behind)
    if stages == 1:
        assert "locked" in faults(trace(1, 2, 1, True), 1), "a slot is emptied a step late"


def flip(barrier):
    """A partition that waits for the other parity of a barrier."""
    return lambda which, actions: [
        (*action[:3], 1 - action[3]) if action[:2] == ("wait", barrier) else action for action in actions
    ]


def forgets(which, actions):
    """The second consumer never says that a slot is empty."""
    return [action for action in actions if which < 2 or action[:2] != ("arrive", "empty")]


def too_early(which, actions):
    """A slot is released when its MMAs have started."""
    kept = [action for action in actions if action[:2] != ("arrive", "empty")]
    after = {i + 1 for i, action in enumerate(kept) if action[:2] == ("wait", "full")}
    pairs = ([action, ("arrive", "empty", action[1])] if i in after else [action] for i, action in enumerate(kept))
    return list(itertools.chain.from_iterable(pairs))


def not_the_last(which, actions):
    """The slot of a consumer's last step is not released."""
    places = [i for i, action in enumerate(actions) if action[:2] == ("arrive", "empty")]
    return [action for i, action in enumerate(actions) if i not in places[2::3]]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_broken_protocol_is_found(trace, in_flight):
    """The search sees a count, a parity, an arrival or a hold that is wrong."""
    wrong, right = "read at the wrong time", trace(3, 3, 2, in_flight)
    assert wrong in faults(right, 2, arrivals=1), "one consumer empties a slot for both"
    assert "locked" in faults(right, 2, arrivals=3)
    for fault, what in [
        (flip("empty"), "locked"),
        (flip("full"), wrong),
        (forgets, "locked"),
        (not_the_last, "locked"),
    ]:
        assert what in faults([fault(which, actions) for which, actions in enumerate(right)], 2), fault
    if in_flight:
        assert wrong in faults([too_early(which, actions) for which, actions in enumerate(right)], 2)
    assert "locked" in faults(trace(3, 4, 1, False, 2), 1), "the second holds the slot that the first waits for"
    assert "locked" in faults(trace(3, 4, 2, True, 2), 2), "and has one in flight"
    assert "locked" in faults(trace(3, 2, 5, in_flight, 1), 5), "the first is done two tiles before the second looks"


@pytest.mark.parametrize("in_flight", [False, True])
def test_what_a_hold_needs(trace, in_flight):
    """What the search finds necessary, as docs/memory_ordering.md derives it, and the wrapper's rule within it."""
    for steps, stages, behind in itertools.product(range(1, 6), range(2, 6), range(1, 5)):
        waits = steps > behind  # otherwise nobody looks at what the first reports
        fits = stages > behind or (stages == behind and not in_flight)
        seen = steps >= stages - behind + (not in_flight)
        good = not faults(trace(4, steps, stages, in_flight, behind), stages)
        assert good == (not waits or (fits and seen)), (steps, stages, behind)
        assert good or not rule(steps, stages, behind)


# --- code


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@functools.cache
def code(step="staggered", columns=False, dtype=torch.bfloat16, K=4096):
    """What 4096 x 4096 x K becomes on Hopper, and its texts."""
    a, b = meta(4096, K, dtype=dtype), meta(4096, K, dtype=dtype).t()
    args = (a, b if columns else meta(K, 4096, dtype=dtype))
    wrapper, args = (TOGETHER[step], args) if step in TOGETHER else (gluon_matmul, (*args, step))
    (kernel,) = compile_for(wrapper, args, sms=(90,))
    assert kernel.error is None
    return kernel, dump(wrapper, args, sm=90)


EVENTS = {
    "wgmma done": r"wgmma\.wait_group", "meet": r"bar\.sync", "expect": r"mbarrier\.arrive\.expect_tx",
    "arrive": r"mbarrier\.arrive\.shared", "load": r"cp\.async\.bulk\.tensor\S+global\.mbarrier", "wait": r"try_wait",
    "write": r"stmatrix|st\.shared", "fence": r"fence\.proxy\.async", "store": r"cp\.async\.bulk\.tensor\S+bulk_group",
    "read": r"cp\.async\.bulk\.wait_group\.read", "inval": r"mbarrier\.inval", "label": r"(?m:^\$L__BB\d+_\d+:)",
}  # fmt: skip


def events(ptx, labels=False):
    """What matters to buffers, in the order of the PTX, the same one after another once."""
    found = re.finditer("|".join(f"(?P<{name.replace(' ', '_')}>{p})" for name, p in EVENTS.items()), ptx)
    names = [match.lastgroup.replace("_", " ") for match in found]
    return [name for name, _ in itertools.groupby(name for name in names if labels or name != "label")]


@pytest.mark.parametrize(
    ("step", "columns", "dtype"),
    [("one buffer", False, DTYPES[1]), ("ring", True, DTYPES[1]), ("partitions", False, DTYPES[1]),
     ("in flight", True, DTYPES[0]), ("staggered", False, DTYPES[1]), ("staggered", True, DTYPES[0])],
)  # fmt: skip
def test_generated_code(step, columns, dtype):
    kernel, text = code(step, columns, dtype)
    assert (kernel.spills, kernel.fits) == (0, True)
    together = step in TOGETHER
    assert kernel.warps == (8 if together else 12)  # the producer's one is given a warpgroup
    assert kernel.registers * 32 * kernel.warps <= 65536
    assert bool(kernel.found.get("setmaxnreg")) != together
    # A step of K is BLOCK_K / 16 instructions; each of two consumers has its first step before its loop.
    assert kernel.found["wgmma"] == TILE[2] // 16 * (1 if together else 4)
    assert "serialized" not in text["log"], "the assembler waits after each MMA"
    assert not re.search(r"C75\d\d", text["log"])
    form = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    mmas = [line for line in text["ptx"].splitlines() if "wgmma.mma_async" in line]
    assert all(f"m64n256k16.f32.{form}.{form}" in line for line in mmas)
    assert not re.search(r"(ld|st)\.global", text["ptx"])
    assert set(re.findall(r"expect_tx\S+ _, \S+ (\d+);", text["ptx"])) == {str(2 * (TILE[0] + TILE[1]) * TILE[2])}
    if not together:
        boxes = 2 if columns else 1 + TILE[1] // 64  # as wide as the swizzle, and the producer is one warp
        assert len(re.findall(EVENTS["load"], text["ptx"])) == boxes


def test_shared_memory_is_what_the_source_says():
    m, n, k = TILE
    step, bars = 2 * (m + n) * k, {"ring": STAGES, "partitions": 2 * STAGES}
    shared = {name: code(name)[0].shared for name in (*TOGETHER, "partitions", "staggered")}
    assert step + 8 <= 2 * m * n <= shared["one buffer"] < 2 * m * n + step  # the result lies where operands were
    assert 0 <= shared["ring"] - STAGES * step - 8 * bars["ring"] < 256
    stored = 2 * m * n // PARTS * BUFFERS  # parts of each half, through buffers of each half
    assert 0 <= shared["partitions"] - STAGES * step - stored - 8 * bars["partitions"] < 256
    assert 0 <= SHARED_LIMIT[90] - shared["staggered"] < 4096, "nearly all of it"


@pytest.mark.parametrize("step", TOGETHER)
def test_all_warps_meet_before_a_buffer_is_loaded_again(step):
    """No barrier of shared memory says that a buffer is empty there: the order of these instructions does."""
    order = events(code(step)[1]["ptx"], labels=True)
    wait, end = order.index("wait"), len(order) - order[::-1].index("wgmma done")
    loop = order[wait : end - 1]  # of the ring; the other waits in its middle, and its top is the label before that
    if step == "one buffer":
        top = wait - order[wait::-1].index("label")
        assert order[top:wait].count("load") == order[top:wait].count("expect") + 1 == 2
        loop = order[wait:end] + order[top:wait]
    assert "meet" in loop[loop.index("wgmma done") : loop.index("load")], "another may still read what is loaded over"
    assert "meet" in loop[: loop.index("expect")], "another may still wait for the phase before"
    assert "meet" in order[end : order.index("write")], "another may still read what is written over"
    write = order.index("write")
    assert order[write : write + 5] == ["write", "fence", "meet", "store", "read"]


@pytest.mark.parametrize("step", ["partitions", "in flight", "staggered"])
def test_a_partition_meets_before_one_thread_speaks_for_all(step):
    """One thread arrives for its warpgroup, one thread stores what all have written."""
    text = code(step)[1]["ptx"]
    order = events(text)
    before = sorted(order[i - 2 : i] for i, name in enumerate(order) if name == "arrive")
    lead = [["arrive", "meet"]] * (step == "staggered")  # right after the last MMAs of a half
    assert before == [*lead, *[["wgmma done", "meet"]] * 4]
    after = sorted(order[i + 1 : i + 3] for i, name in enumerate(order) if name == "wait")
    held = [["meet", "wait"]] * (step == "staggered")
    assert after == [["expect", "load"], *held, *[["wgmma done", "meet"]] * 4]
    # In flight one group of MMAs is left to run after each step, and none at the end of a tile.
    left = sorted(re.findall(r"wgmma\.wait_group\S* +(\d+)", text))
    assert left == (["0"] * 4 if step == "partitions" else ["0"] * 2 + ["1"] * 4)
    stores = [i for i, name in enumerate(order) if name == "store"]
    assert len(stores) == 2 * PARTS
    assert all(order[i - 5 : i] == ["read", "meet", "write", "fence", "meet"] for i in stores)


def test_barriers_are_made_with_the_counts_of_the_protocol():
    text = code()[1]
    counts = sorted(int(count) for count in re.findall(r"ttng\.init_barrier %\S+ ?, (\d+)", text["ttgir"]))
    assert counts == [1] * (STAGES + 1) + [2] * STAGES
    assert f"requestedRegisters = array<i32: {CONSUMER_REGISTERS}, {PRODUCER_REGISTERS}>" in text["ttgir"]
    assert 128 * (2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS) == 168 * 384, "what the launch takes"


def test_the_wrapper_staggers_by_the_rule():
    """With a wait more, in the loop of the second consumer; the last step may be in part."""
    assert STAGES > BEHIND > 0
    for K, waits in [(64 * STAGES - 64, 5), (64 * STAGES - 56, 6)]:
        assert len(re.findall(r"ttng\.wait_barrier\b", code(K=K)[1]["ttgir"])) == waits, K


# --- the wrappers


@pytest.mark.parametrize("sm", [80, 100])
def test_it_is_not_compiled_for_others(sm):
    """The compiler would end this process instead of saying no."""
    for wrapper in (gluon_matmul, *TOGETHER.values()):
        (kernel,) = compile_for(wrapper, (meta(64, 64), meta(64, 64)), sms=(sm,))
        assert f"{wrapper.__name__}: needs sm_90, for its wgmma (this is sm_{sm})" in kernel.error


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


def test_the_answer():
    def table(ring, gluon):
        ms = {"cuBLAS": 1.0, "triton": 1.0, "one buffer": 2.0, "ring": ring, "gluon": gluon}
        over = lambda other, name: ms[other] / ms[name]  # noqa: E731
        return type("Table", (dict,), {"timed": True, "baseline": "cuBLAS", "over": staticmethod(over)})(ms)

    assert "is 2.00x one buffer" in module.answer([table(1.0, 1.0)])
    assert "1.00x the best that Triton's compiler makes, which is 1.00x cuBLAS: it buys" in module.answer([table(1, 1)])
    assert module.answer([table(1, 0.5)]).endswith(": it pays.")
    assert module.answer([table(1, 2.0)]).endswith(": it does not pay.")


# --- what only a GPU can say


@pytest.fixture
def hopper(h):
    if h.interpreted or h.machine.sm != 90:
        pytest.skip("needs sm_90, and Gluon is not interpreted")
    return h


def check(h, a, b, step, what=None):
    what = what or f"{step} {tuple(a.shape)} {tuple(b.shape)}"
    h.check(KERNELS[step], reference, a, b, terms=a.shape[1], what=what)


# One row, one tile and one more in each dimension, half a tile of columns and 8 more, nothing to add up, nothing; more
# rows of tiles than a group has, and a last group that is not full.
SHAPES = [(1, 8, 8), (37, 56, 104), (128, 256, 64), (129, 264, 72), (65, 8, 64), (5, 136, 8), (1, 264, 1000),
          (5, 16, 0), (0, 16, 8), (5, 0, 8), ((GROUP_M + 1) * TILE[0] + 1, 264, 8), (1000, 5208, 776)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("step", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(hopper, step, dtype):
    for M, N, K in SHAPES:
        a, w = hopper.randn(M, K, dtype=dtype), hopper.randn(N, K, dtype=dtype)
        for b in (w.t(), w.t().contiguous()):
            check(hopper, a, b, step)


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 7, 132])
@pytest.mark.parametrize("steps", range(1, 10))
def test_barriers_across_tiles(hopper, monkeypatch, sms, steps):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them."""
    monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[90]))
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
@pytest.mark.parametrize("step", KERNELS)
def test_layouts_and_extremes(hopper, step):
    a, b = hopper.randn(140, 160, dtype=hopper.half), hopper.randn(200, 320, dtype=hopper.half)
    for left, right in (
        (a, b[:160, :104]),  # rows apart: what lies between them must not count
        (a[:, 8:80], b[:72]),  # a start 16 bytes later
        (a[::3, :72], b[:144:2, 16:]),  # every third, every second row
        (a[:1, :72].as_strided((1, 72), (5, 1)), b[:72, :40]),  # one row, with a stride nobody steps by
        (a, b[:136, :160].t()),  # columns apart
    ):
        check(hopper, left, right, step, what=f"{step} strides {left.stride()}, {right.stride()}")
    # NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile.
    a, b = hopper.randn(130, 72, dtype=torch.bfloat16), hopper.randn(72, 264, dtype=torch.bfloat16)
    a[3, 5], a[129, 71], b[2, 9], b[71, 263], b[7, 130] = (float(x) for x in ("nan", "inf", "-inf", "inf", "nan"))
    check(hopper, a, b, step, "NaN and infinities")


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
