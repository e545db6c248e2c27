"""gluon_matmul: the protocol of its barriers in every order of events, its layouts as the compiler has them, its code.

The numbers themselves, which no interpreter can make, wait for a GPU of sm_90.
"""

import ast
import functools
import itertools
import re
from types import SimpleNamespace
from typing import NamedTuple

from harness import require_triton_device
from harness.codegen import compile_for, dump
from harness.hardware import SHARED_LIMIT, Limits

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
    holder,
    operations,
    reference,
    shared_byte,
)


@pytest.fixture
def hopper(h):
    """The harness where the kernels run: tests that take it need a GPU of sm_90."""
    if not module.runnable(h):
        pytest.skip("needs sm_90, and Gluon is not interpreted")
    return h


def check(h, a, b, step, what=None):
    what = what or f"{step} {tuple(a.shape)} {tuple(b.shape)}"
    h.check(functools.partial(gluon_matmul, step=step), reference, a, b, terms=a.shape[1], what=what)


# --- the protocol: every order in which producer, consumers and loads can take their turns


class Protocol(NamedTuple):
    """What the kernel of the roles is launched with, and what its barriers are made with: wrong ones must be found."""

    tiles: int
    steps: int
    stages: int
    in_flight: bool = False
    behind: int = 0
    arrivals: int = 2  # that empty a buffer
    producer: int = 1  # the parity it waits for first
    consumer: int = 0
    both_release: bool = True  # or the second consumer forgets to
    late: bool = True  # or a buffer is released while its products are in flight
    last: bool = True  # or the last of a tile is not


def programs(p):
    """The three roles as lists of actions, in the order of the source."""

    def parity(use, first):
        return (use // p.stages + first) % 2

    steps = range(p.tiles * p.steps)
    produce = [
        action
        for use in steps
        for action in (("wait", "empty", use % p.stages, parity(use, p.producer)), ("load", use % p.stages, use))
    ]
    consumers = []
    for half in (0, 1):
        actions = []

        def release(use, half=half, actions=actions):
            """Products read their buffer from their start until here."""
            actions.append(("read", use % p.stages, use))
            if half == 0 or p.both_release:
                actions.append(("arrive", "empty", use % p.stages))

        for use in steps:
            tile, step = divmod(use, p.steps)
            if p.behind and half == 1 and step and step == p.steps - p.behind:  # the first step does not look
                actions.append(("wait", "summed", 0, tile % 2))
            actions += [("wait", "full", use % p.stages, parity(use, p.consumer)), ("read", use % p.stages, use)]
            if not p.in_flight:
                release(use)
            elif not p.late:
                actions += [("arrive", "empty", use % p.stages), ("read", use % p.stages, use)]
            else:
                if step:
                    release(use - 1)
                if step == p.steps - 1 and p.last:
                    release(use)
            if p.behind and half == 0 and step == p.steps - 1:
                actions.append(("arrive", "summed", 0))
        consumers.append(actions)
    return [produce, *consumers]


class Piece(NamedTuple):
    """Barriers or buffers, as the source sees them: one of them, and the shape of all."""

    name: str
    number: int = 0
    shape: tuple = ()

    def index(self, number):
        return self._replace(number=number)

    def slice(self, *args, **kwargs):
        return self


def traced(monkeypatch, p):
    """The same lists, from the source itself: run as Python, with barriers that note what is done to them."""
    m, n, k = TILE
    done, started, flying = [], [], []

    def multiply(acc, a, *args):
        flying.append((a.number, len(started)))
        started.append(a)
        done.append(("read", *flying[-1]))

    def products_done(left, deps):
        while len(flying) > left:
            done.append(("read", *flying.pop(0)))

    def wait(barrier, phase, pred=True):
        if pred:
            done.append(("wait", barrier.name, barrier.number, phase))

    language = SimpleNamespace(
        where=lambda which, yes, no: yes if which else no, cdiv=triton.cdiv, program_id=lambda axis: 0,
        num_programs=lambda axis: 1, num_warps=lambda: 4, zeros=lambda *args: None,
        NVMMADistributedLayout=lambda *args: None, float32=None,
    )  # fmt: skip
    barriers = SimpleNamespace(wait=wait, arrive=lambda b: done.append(("arrive", b.name, b.number)))
    with monkeypatch.context() as patch:
        for name in ("_next", "_release_before", "_add_step"):
            patch.setattr(module, name, getattr(module, name).fn)
        patch.setattr(module, "gl", language)
        patch.setattr(module, "mbarrier", barriers)
        patch.setattr(module, "tma", SimpleNamespace(store_wait=lambda left: None))
        patch.setattr(module, "warpgroup_mma_wait", products_done)
        patch.setattr(module, "_tile_of", lambda *args: (0, 0))
        patch.setattr(module, "_load", lambda a_desc, b_desc, a_buf, *_: done.append(("load", a_buf.number)))
        patch.setattr(module, "_multiply", multiply)
        patch.setattr(module, "_store_parts", lambda *args: None)
        ring = (Piece("a", 0, (p.stages, m, k)), Piece("b", 0, (p.stages, k, n)), Piece("full"), Piece("empty"))
        sizes = (p.tiles * m, n, p.steps * k - 8, False, p.stages)
        desc = SimpleNamespace(block_shape=[m, k])
        module._produce.fn(ring, desc, SimpleNamespace(block_shape=[k, n]), *sizes, GROUP_M)
        loads = itertools.count()
        roles = [[(*action, next(loads)) if action[0] == "load" else action for action in done]]
        for half in (0, 1):
            done.clear()
            started.clear()
            module._consume.fn(
                ring, SimpleNamespace(block_shape=[m // 2, n // PARTS]), None, Piece("summed"), *sizes, BUFFERS,
                p.in_flight, p.behind, GROUP_M, half,
            )  # fmt: skip
            roles.append(list(done))
    return roles


def test_the_search_searches_what_the_source_does(monkeypatch):
    for tiles, steps, stages, in_flight, behind in itertools.product(
        (1, 3), (1, 2, 3, 4, 7), (2, 3, STAGES), (False, True), (0, 1, BEHIND)
    ):
        p = Protocol(tiles, steps, stages, in_flight, behind)
        assert traced(monkeypatch, p) == programs(p), p


def faults(p):
    """All that can go wrong in some order of events: every one is tried, up to what goes wrong in it.

    A barrier is (phase, arrivals still missing, loads still under way); a wait for a parity passes while the phase has
    the other one. A buffer holds the step that was loaded into it, or None while a load writes it.
    """
    roles = programs(p)
    barriers = {("full", i): 1 for i in range(p.stages)} | {("empty", i): p.arrivals for i in range(p.stages)}
    barriers[("summed", 0)] = 1
    names, counts = list(barriers), list(barriers.values())
    number = {name: i for i, name in enumerate(names)}

    def settle(bars, i, phase, missing, loads):
        if missing == 0 and loads == 0:
            phase, missing = phase ^ 1, counts[i]
        return (*bars[:i], (phase, missing, loads), *bars[i + 1 :])

    start = ((0, 0, 0), tuple((0, count, 0) for count in counts), (-1,) * p.stages, frozenset())
    seen, todo, found = {start}, [start], set()
    while todo:
        at, bars, held, flying = todo.pop()
        after = []
        for slot, use in flying:  # a load ends
            i = number["full", slot]
            phase, missing, loads = bars[i]
            landed = (*held[:slot], use, *held[slot + 1 :])
            after.append((at, settle(bars, i, phase, missing, loads - 1), landed, flying - {(slot, use)}))
        for role, program in enumerate(roles):
            if at[role] == len(program):
                continue
            kind, *what = program[at[role]]
            moved = (*at[:role], at[role] + 1, *at[role + 1 :])
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
        blocked = [program[place][0] for place, program in zip(at, roles, strict=True) if place < len(program)]
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
@pytest.mark.parametrize(("in_flight", "behind"), [(False, 0), (True, 0), (False, BEHIND), (True, 1), (True, BEHIND)])
def test_no_order_of_events_breaks_the_protocol(stages, in_flight, behind):
    """Tiles shorter than the ring, as long and longer; rings that go round within a tile and across tiles."""
    if in_flight and stages == 1:
        assert "locked" in faults(Protocol(1, 2, stages, in_flight)), "a buffer is emptied a step late"
        return
    for tiles, steps in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 5)):
        held = rule(steps, stages, behind)
        assert not faults(Protocol(tiles, steps, stages, in_flight, held)), (tiles, steps)


@given(
    tiles=st.integers(1, 5), steps=st.integers(1, 6), stages=st.integers(2, 5), in_flight=st.booleans(),
    behind=st.integers(0, 4),
)  # fmt: skip
def test_any_protocol(tiles, steps, stages, in_flight, behind):
    assert not faults(Protocol(tiles, steps, stages, in_flight, rule(steps, stages, behind)))


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"arrivals": 1}, {"read at the wrong time"}),  # one consumer empties a buffer for both
        ({"arrivals": 3}, {"locked"}),
        ({"producer": 0}, {"locked"}),  # it waits until what was never filled is empty
        ({"consumer": 1}, {"read at the wrong time"}),  # they take what was never filled
        ({"both_release": False}, {"locked"}),
        ({"late": False, "in_flight": True}, {"read at the wrong time"}),  # products still read what is loaded over
        ({"last": False, "in_flight": True}, {"locked"}),
        ({"behind": 2, "steps": 4, "stages": 1}, {"locked"}),  # the second holds what the first waits for
        ({"behind": 2, "steps": 4, "stages": 2, "in_flight": True}, {"locked"}),  # and has one in flight
        ({"behind": 1, "steps": 2, "stages": 5}, {"locked"}),  # the first reports two tiles before the second looks
    ],
)
def test_a_broken_protocol_is_found(in_flight, change, what):
    """The search would see a count, a parity, an arrival or a hold that is wrong."""
    assert what <= faults(Protocol(**({"tiles": 3, "steps": 3, "stages": 2, "in_flight": in_flight} | change)))


@pytest.mark.parametrize("in_flight", [False, True])
def test_what_a_hold_needs(in_flight):
    """What the search finds necessary, as the docstring derives it, and the wrapper's rule within it."""
    for steps, stages, behind in itertools.product(range(1, 6), range(2, 6), range(1, 5)):
        waits = steps > behind  # otherwise nobody looks at what the first reports
        fits = stages > behind or (stages == behind and not in_flight)
        seen = steps >= stages - behind + (not in_flight)
        good = not faults(Protocol(4, steps, stages, in_flight, behind))
        assert good == (not waits or (fits and seen)), (steps, stages, behind)
        assert good or not rule(steps, stages, behind)


def test_the_wrapper_staggers_by_that_rule():
    """With a wait more, in the loop of the second consumer; the last step may be in part."""
    assert STAGES > BEHIND > 0
    for K, waits in [(64, 5), (64 * STAGES - 64, 5), (64 * STAGES - 56, 6), (64 * STAGES, 6)]:
        ttgir = dump(gluon_matmul, (meta(4096, K), meta(K, 4096)), sm=90)["ttgir"]
        assert operations(ttgir)["waits"] == waits, K


# --- layouts, as the compiler has them


@gluon.jit
def _print_layout_kernel(x_ptr, LAYOUT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    gl.static_print(gl.to_linear_layout(LAYOUT, [ROWS, COLUMNS]))


def print_layout(x, rows, columns, warps, shared):
    """Compiles a kernel that says where the compiler puts the elements of a tile."""
    require_triton_device("print_layout", x)
    layout = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])
    if shared:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    _print_layout_kernel[(1,)](x, layout, rows, columns, num_warps=warps)


def bases(text, name):
    return ast.literal_eval(re.search(rf"{name}_bases=(\[\]|\[\[.*?\]\])", text).group(1))


def place(number, base):
    """A linear layout: the bits of a number choose the bases, and their exclusive or is the place."""
    row = column = 0
    for bit, (r, c) in enumerate(base):
        if number >> bit & 1:
            row, column = row ^ r, column ^ c
    return row, column


@pytest.mark.parametrize(("rows", "warps"), [(64, 4), (128, 8)])
def test_who_holds_a_sum_is_as_the_compiler_says(rows, warps):
    text = dump(print_layout, (meta(16), rows, TILE[1], warps, False), sm=90)["log"]
    registers, lanes, warp = (bases(text, name) for name in ("reg", "lane", "warp"))
    held = {}
    for w, lane, register in itertools.product(range(warps), range(32), range(2 ** len(registers))):
        parts = (place(w, warp), place(lane, lanes), place(register, registers))
        held[sum(r for r, _ in parts), sum(c for _, c in parts)] = (w, lane, register)
    assert len(held) == rows * TILE[1]
    assert all(holder(*at) == who for at, who in held.items())


@pytest.mark.parametrize("shape", [(128, 64), (64, 256), (64, 32), (64, 16)])
def test_where_tma_puts_an_element_is_as_the_compiler_says(shape):
    """Operands and parts of the result, and the narrower swizzles of narrower tiles."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("Triton 3.6 aborts when it is asked for the linear layout of shared memory")
    text = dump(print_layout, (meta(16), *shape, 4, True), sm=90)["log"]
    offsets, layout = bases(text, "offset"), gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)
    assert layout.swizzle_byte_width == min(128, 2 * shape[1])
    for offset in range(shape[0] * shape[1]):
        assert shared_byte(layout, shape[0], *place(offset, offsets)) == 2 * offset


@given(rows=st.sampled_from([8, 64, 128]), columns=st.sampled_from([16, 32, 64, 128, 256]))
def test_no_two_elements_share_a_byte(rows, columns):
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    taken = {shared_byte(layout, rows, r, c) for r in range(rows) for c in range(columns)}
    assert taken == set(range(0, 2 * rows * columns, 2))


# --- code


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@functools.cache
def code(step="staggered", columns=False, dtype=torch.bfloat16):
    """What 4096 x 4096 x 4096 becomes on Hopper, and its texts."""
    a, b = meta(4096, 4096, dtype=dtype), meta(4096, 4096, dtype=dtype)
    args = (a, b.t() if columns else b, step)
    (kernel,) = compile_for(gluon_matmul, args, sms=(90,))
    assert kernel.error is None
    return kernel, dump(gluon_matmul, args, sm=90)


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


FORMS = [*((step, False, torch.bfloat16) for step in STEPS), ("ring", True, torch.bfloat16),
         *(("in flight", True, dtype) for dtype in DTYPES), *(("staggered", True, dtype) for dtype in DTYPES),
         ("staggered", False, torch.float16)]  # fmt: skip


@pytest.mark.parametrize(("step", "columns", "dtype"), FORMS)
def test_generated_code(step, columns, dtype):
    kernel, text = code(step, columns, dtype)
    assert (kernel.spills, kernel.fits) == (0, True)
    alone = step in STEPS[:2]
    assert kernel.warps == (8 if alone else 12)  # the producer's one is given a warpgroup
    assert kernel.registers * 32 * kernel.warps <= 65536
    assert bool(kernel.found.get("setmaxnreg")) != alone
    # A step of K is BLOCK_K / 16 instructions; each of two consumers has its first step before its loop.
    assert kernel.found["wgmma"] == TILE[2] // 16 * (1 if alone else 4)
    assert "serialized" not in text["log"], "the assembler waits after each product"
    assert not re.search(r"C75\d\d", text["log"])
    form = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    products = [line for line in text["ptx"].splitlines() if "wgmma.mma_async" in line]
    assert all(f"m64n256k16.f32.{form}.{form}" in line for line in products)
    assert "ld.global" not in text["ptx"]
    assert "st.global" not in text["ptx"]
    if not alone:
        boxes = 2 if columns else 1 + TILE[1] // 64  # as wide as the swizzle, and the producer is one warp
        assert len(re.findall(EVENTS["load"], text["ptx"])) == boxes


def test_shared_memory_is_what_the_source_says():
    m, n, k = TILE
    step, bars = 2 * (m + n) * k, {"ring": STAGES, "roles": 2 * STAGES}
    shared = {name: code(name)[0].shared for name in STEPS}
    assert step + 8 <= 2 * m * n <= shared["one buffer"] < 2 * m * n + step  # the result lies where operands were
    assert 0 <= shared["ring"] - STAGES * step - 8 * bars["ring"] < 256
    stored = 2 * m * n // PARTS * BUFFERS  # parts of each half, through buffers of each half
    assert 0 <= shared["roles"] - STAGES * step - stored - 8 * bars["roles"] < 256
    assert shared["persistent"] == shared["roles"]
    assert 0 <= SHARED_LIMIT[90] - shared["staggered"] < 4096, "nearly all of it"


def test_one_role_meets_before_a_buffer_is_loaded_again():
    """No barrier of shared memory says that a buffer is empty there: the order of these instructions does."""
    for step in STEPS[:2]:
        order = events(code(step)[1]["ptx"], labels=True)
        wait, end = order.index("wait"), len(order) - order[::-1].index("wgmma done")
        loop = order[wait : end - 1]  # of the ring; the other waits in its middle, and its top is the label before that
        if step == "one buffer":
            top = wait - order[wait::-1].index("label")
            assert order[top:wait].count("load") == order[top:wait].count("expect") + 1 == 2
            loop = order[wait:end] + order[top:wait]
        assert "meet" in loop[loop.index("wgmma done") : loop.index("load")], (
            "another may still read what is loaded over"
        )
        assert "meet" in loop[: loop.index("expect")], "another may still wait for the phase before"
        assert "meet" in order[end : order.index("write")], "another may still read what is written over"
        write = order.index("write")
        assert order[write : write + 5] == ["write", "fence", "meet", "store", "read"]


@pytest.mark.parametrize("step", ["roles", "in flight", "staggered"])
def test_roles_meet_before_one_speaks_for_all(step):
    """One thread arrives for its warpgroup, one thread stores what all have written."""
    text = code(step)[1]["ptx"]
    order = events(text)
    before = sorted(order[i - 2 : i] for i, name in enumerate(order) if name == "arrive")
    summed = [["arrive", "meet"]] * (step == "staggered")  # right after the last products of a half
    assert before == [*summed, *[["wgmma done", "meet"]] * 4]
    after = sorted(order[i + 1 : i + 3] for i, name in enumerate(order) if name == "wait")
    held = [["meet", "wait"]] * (step == "staggered")
    assert after == [["expect", "load"], *held, *[["wgmma done", "meet"]] * 4]
    # In flight one group of products is left to run after each step, and none at the end of a tile.
    left = sorted(re.findall(r"wgmma\.wait_group\S* +(\d+)", text))
    assert left == (["0"] * 4 if step == "roles" else ["0"] * 2 + ["1"] * 4)
    stores = [i for i, name in enumerate(order) if name == "store"]
    assert len(stores) == 2 * PARTS
    assert all(order[i - 5 : i] == ["read", "meet", "write", "fence", "meet"] for i in stores)


def test_barriers_are_made_with_the_counts_of_the_protocol():
    text = code()[1]
    counts = sorted(int(count) for count in re.findall(r"ttng\.init_barrier %\S+ ?, (\d+)", text["ttgir"]))
    assert counts == [1] * (STAGES + 1) + [2] * STAGES
    registers = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+);", text["ptx"])}
    assert {CONSUMER_REGISTERS, PRODUCER_REGISTERS} <= registers
    assert f"requestedRegisters = array<i32: {CONSUMER_REGISTERS}, {PRODUCER_REGISTERS}>" in text["ttgir"]
    assert 128 * (2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS) == 168 * 384, "what the launch takes"


@pytest.mark.parametrize("sm", [80, 89, 100, 120])
def test_it_is_not_compiled_for_others(sm):
    """The compiler would end this process instead of saying no."""
    for step in STEPS:
        (kernel,) = compile_for(gluon_matmul, (meta(64, 64), meta(64, 64), step), sms=(sm,))
        assert kernel.error == (
            f"RuntimeError: gluon_matmul: needs sm_90, for its wgmma (this is sm_{sm}): use matmul_persistent"
        )


def test_operations_are_counted_as_written():
    text = """
      %0 = ttng.warp_group_dot %a, %b {x}   %1 = ttng.warp_group_dot_wait %0
      ttg.warp_specialize(%1) default { } partition0(%x) num_warps(4) { } partition1(%x) num_warps(1) { }
      %2 = ttg.local_alloc : () -> x   ttng.barrier_expect %2   ttng.async_tma_copy_global_to_local %2
    """
    counts = operations(text)
    assert {name: n for name, n in counts.items() if n} == {
        "products": 1, "product waits": 1, "roles": 3, "buffers": 1, "expects": 1, "loads": 1
    }  # fmt: skip
    assert operations("")["roles"] == 1


# --- what can be refused without a GPU


def _bad(device):
    a = torch.randn(4, 16, device=device).half()
    b = torch.randn(16, 8, device=device).half()
    flat = torch.zeros(200, dtype=torch.float16, device=device)
    return {
        "no tensor": (([1.0], b), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((a.int(), b.int()), TypeError, r"dtypes torch\.int32 and torch\.int32; both must be"),
        "float32": ((a.float(), b.float()), TypeError, r"torch\.float32"),
        "two dtypes": ((a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        "a vector": ((a, b[:, 0]), ValueError, r"shapes \(4, 16\) and \(16,\); need \[M, K\] and \[K, N\]"),
        "a batch": ((a.reshape(1, 4, 16), b.reshape(1, 16, 8)), ValueError, "need"),
        "inner sizes": ((a, b.t()), ValueError, r"shapes \(4, 16\) and \(8, 16\)"),
        "no step": ((a, b, "faster"), ValueError, r"step 'faster' is not one of \('one buffer', "),
        "None for a step": ((a, b, None), ValueError, "step None is not one of"),
        "K of 12": ((a[:, :12], b[:12]), ValueError, "K is 12 and N 8; TMA needs .*pad both to multiples of 8"),
        "N of 4": ((a, b[:, :4]), ValueError, "K is 16 and N 4"),
        "a transposed": ((flat[:128].view(16, 8).t(), b), ValueError, r"a has shape \(8, 16\), strides \(1, 8\)"),
        "b with neither": ((a, flat[:128].view(16, 8).repeat(2, 2)[::2, ::2]), ValueError, r"b has .* \(32, 2\)"),
        "unaligned start": ((flat[1:65].view(4, 16), b), ValueError, "a has .* starts 2 bytes past"),
        "unaligned columns": ((a, flat[:160].view(8, 20)[:, :16].t()), ValueError, r"b\.t\(\) has .* \(20, 1\)"),
        "one row for all": ((a[:1].expand(4, 16), b), ValueError, r"a has .* strides \(0, 1\)"),
        "requires grad": ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta")), ValueError, "move them to one device"),
        "a device without kernels": ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"gluon_matmul: .*{message}"):
        gluon_matmul(*args)


@pytest.mark.parametrize("have", [None, (8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("M", [0, 4])
def test_other_machines(h, monkeypatch, have, M):
    """Also where there is nothing to compute: the answer must not depend on a size."""
    monkeypatch.setattr(module, "capability", lambda device: have)
    here = f"this is sm_{have[0]}{have[1]}" if have else "Gluon kernels are not interpreted"
    with pytest.raises(RuntimeError, match=rf"gluon_matmul: needs sm_90, for its wgmma \({here}\): use matmul_persis"):
        gluon_matmul(h.randn(M, 16, dtype=h.half), h.randn(16, 8, dtype=h.half))


def test_where_it_runs():
    for sm, interpreted, runs in [(90, False, True), (90, True, False), (100, False, False), (None, True, False)]:
        h = SimpleNamespace(interpreted=interpreted, machine=SimpleNamespace(sm=sm))
        assert module.runnable(h) is runs


# --- what the demo says


def test_demo_without_hopper(h):
    if module.runnable(h):
        pytest.skip("its full sizes are run by the topic")
    module.demo(h)
    assert not h.record.comparisons
    compiled = [(kernel["call"], kernel["sm"], bool(kernel["error"])) for kernel in h.record.codegen]
    default = [(1, sm, sm != 90) for sm in (80, 89, 90, 100, 120)]
    assert compiled == default + [(call, 90, False) for call in (2, 3, 4, 5)]
    written = h.record.facts["what TTGIR says explicitly"]
    assert set(written) == {*module.WRITTEN, "roles"}
    assert all(any(row.values()) for row in written.values()), "an operation that nobody has is a name misspelt"
    assert written["barriers"]["gluon roles"] == 2 * STAGES + 1
    assert written["loads"]["gluon ring"] == 2 * STAGES
    assert [written["roles"][f"gluon {step}"] for step in STEPS[:3]] == [1, 1, 3]
    assert [written["product waits"][f"gluon {step}"] for step in ("roles", "in flight", "staggered")] == [4, 6, 6]
    assert [written["waits"][f"gluon {step}"] for step in ("roles", "in flight", "staggered")] == [5, 5, 6]
    (swizzle,) = (fact for name, fact in h.record.facts.items() if name.startswith("pieces of 16 bytes"))
    assert swizzle["row 0"] == "0 1 2 3 4 5 6 7"
    assert swizzle["row 5"] == "5 4 7 6 1 0 3 2"


def test_what_layouts_mean_is_said_of_the_layouts(h, monkeypatch):
    said = []
    monkeypatch.setattr(h, "say", said.append)
    module.explain_layouts(h)
    text = "\n".join(said)
    assert "they lie in 8 of the 8 groups of banks" in text
    assert "begin at columns 0, 64, 128, 192: a box each" in text
    assert "holds 128 sums: rows 1, 9, columns 2, 3, 10, 11, 18, 19, ..." in text
    # Without a swizzle the first pieces of all rows lie in the same banks.
    monkeypatch.setattr(module, "shared_byte", lambda layout, rows, row, col: row * 128 + 2 * col)
    said.clear()
    module.explain_layouts(h)
    assert "they lie in 1 of the 8 groups" in "\n".join(said)


def _table(**ms):
    rows = [SimpleNamespace(variant=name.replace("_", " "), ms=t, speedup=0.8 / t) for name, t in ms.items()]
    return SimpleNamespace(rows=rows)


TIMES = {"cuBLAS": 0.8, "triton_tile": 1.0, "triton_split": 0.8, "gluon_one_buffer": 2.0, "gluon_ring": 1.0,
         "gluon_roles": 0.9, "gluon_persistent": 0.7, "gluon_in_flight": 0.7, "gluon_staggered": 0.75}  # fmt: skip


def test_what_the_lesson_says_follows_from_the_times():
    """32 by 16 tiles on 132 SMs are 4 waves: a step that takes 1 ms less wins 250 us in each."""
    said = []
    h = SimpleNamespace(machine=SimpleNamespace(sms=132), say=said.append)
    by_hand = module.explain(h, _table(**TIMES), 4096, 4096)
    assert said == [
        "512 tiles on 132 SMs, 4 waves; of 500.0 us a wave each step won: ring +250.00 us, roles +25.00 us, "
        "persistent +50.00 us, in flight +0.00 us, staggered -12.50 us",
        "by hand (persistent) 1.143x of what the compiler makes (triton split)",
    ]
    assert by_hand == {
        "one buffer": 0.4, "ring": 0.8, "roles": 0.8889, "persistent": 1.1429, "in flight": 1.1429, "staggered": 1.0667
    }  # fmt: skip


def test_facts_hold_each_step_to_cublas(h, monkeypatch):
    tables = iter([_table(**TIMES), _table(**(TIMES | {"gluon_staggered": 0.8}))])
    facts, sizes = {}, []
    for name, value in {"runnable": lambda h: True, "show_code": lambda h: None}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(h, "check", lambda *args, **kwargs: None)
    monkeypatch.setattr(h, "randn", lambda *shape, **kwargs: meta(*shape))
    monkeypatch.setattr(h, "pick", lambda quick, full: full)
    monkeypatch.setattr(h, "machine", SimpleNamespace(sms=132))
    monkeypatch.setattr(h, "fact", lambda name, value: facts.update({name: value}))

    def compare(*args, case, comparators, **kwargs):
        sizes.append(case)
        assert list(comparators) == ["triton tile", "triton split"], "what the compiler makes is not Gluon's"
        return next(tables)

    monkeypatch.setattr(h, "compare", compare)
    module.demo(h)
    assert [size.split()[0] for size in sizes] == ["4096x4096x4096", "8192x8192x8192"]
    assert facts["least over cuBLAS"]["gluon staggered"] == 1.0
    assert facts["geometric mean over cuBLAS"]["gluon staggered"] == pytest.approx((0.8 / 0.75) ** 0.5, abs=1e-4)
    assert facts["geometric mean over cuBLAS"]["triton split"] == 1.0
    assert list(facts["by hand over the best of the compiler"]) == ["4096x4096x4096", "8192x8192x8192"]


# --- what only a GPU can say

# One row, one tile and one more in each dimension, half a tile of columns and 8 more, nothing to sum, nothing.
SHAPES = [(1, 8, 8), (37, 56, 104), (128, 256, 64), (129, 264, 72), (65, 8, 64), (5, 136, 8), (1, 264, 1000),
          (5, 16, 0), (0, 16, 8), (5, 0, 8)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(hopper, shape, step, dtype):
    M, N, K = shape
    a, b = hopper.randn(M, K, dtype=dtype), hopper.randn(K, N, dtype=dtype)
    check(hopper, a, b, step)
    check(hopper, a, b.t().contiguous().t(), step, what=f"{step} {shape}, columns of b")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 5208, 776), (16, 8192, 4096), (8191, 264, 512)])
@pytest.mark.parametrize("step", STEPS)
def test_shapes_worth_timing(hopper, shape, step):
    M, N, K = shape
    check(hopper, hopper.randn(M, K, dtype=torch.bfloat16), hopper.randn(K, N, dtype=torch.bfloat16), step)


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 2, 7, 132])
@pytest.mark.parametrize("steps", range(1, 10))
def test_barriers_across_tiles(hopper, monkeypatch, sms, steps):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them."""
    monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[90]))
    K = 64 * steps - 32 * (steps % 2)
    a, b = hopper.randn(700, K, dtype=torch.bfloat16), hopper.randn(K, 1288, dtype=torch.bfloat16)
    for step in STEPS:
        check(hopper, a, b, step, what=f"{step}, {steps} steps, {sms} SMs")


@pytest.mark.gpu
def test_bands_of_tiles(hopper):
    """More rows of tiles than a band has, a last band that is not full, two columns of tiles."""
    a, b = hopper.randn((GROUP_M + 1) * TILE[0] + 1, 8, dtype=torch.float16), hopper.randn(8, 264, dtype=torch.float16)
    for step in STEPS:
        check(hopper, a, b, step)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [False, True])
def test_every_launch_and_every_step_gives_the_same_bits(hopper, columns):
    """The order of sums is that of K in each: a buffer read or written at the wrong time would show in time."""
    for M, N, K in [(4096, 4096, 256), (1000, 8200, 1040), (16384, 512, 64), (304, 264, 8192)]:
        a, b = hopper.randn(M, K, dtype=torch.bfloat16), hopper.randn(K, N, dtype=torch.bfloat16)
        b = b.t().contiguous().t() if columns else b
        first = gluon_matmul(a, b, STEPS[0])
        for step in STEPS:
            assert all(torch.equal(gluon_matmul(a, b, step), first) for _ in range(50)), (step, M, N, K)


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_layouts(hopper, step):
    a, b = hopper.randn(140, 160, dtype=hopper.half), hopper.randn(200, 320, dtype=hopper.half)
    for left, right in (
        (a, b[:160, :104]),  # rows apart: what lies between them must not be summed
        (a[:, 8:80], b[:72]),  # a start 16 bytes later
        (a[::3, :72], b[:144:2, 16:]),  # every third, every second row
        (a[:1, :72].as_strided((1, 72), (5, 1)), b[:72, :40]),  # one row, with a stride nobody steps by
        (a, b[:136, :160].t()),  # columns apart
        (a[:, :72], b[8:72:2, 16:88].t()),
    ):
        check(hopper, left, right, step, what=f"{step} strides {left.stride()}, {right.stride()}")


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_extremes(hopper, step):
    """NaN and infinity reach what torch says they reach: not the rows and columns beside the tail of a tile."""
    a, b = hopper.randn(130, 72, dtype=torch.bfloat16), hopper.randn(72, 264, dtype=torch.bfloat16)
    check(hopper, a * 2.0**-12, b * 2.0**-6, step, "tiny")
    a[3, 5], a[129, 71], b[2, 9], b[71, 263], b[7, 130] = (float(x) for x in ("nan", "inf", "-inf", "inf", "nan"))
    check(hopper, a, b, step, "NaN and infinities")
    a, b = hopper.randn(20, 64, dtype=torch.float16), hopper.randn(64, 40, dtype=torch.float16)
    check(hopper, a * 100, b * 100, step, "beyond the range of float16, in part")


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["ring", "staggered"])
def test_more_elements_than_an_int32_counts(hopper, gpu_gib, step):
    gpu_gib(40)
    long = 2**31 // 64 + 64
    a = torch.empty(long, 64, dtype=torch.bfloat16, device=hopper.device).normal_()
    b = hopper.randn(64, 64, dtype=torch.bfloat16)
    c = gluon_matmul(a, b, step)
    for part in (slice(0, 300), slice(-300, None)):
        hopper.check(lambda *_, p=part, c=c: c[p], reference, a[part].contiguous(), b, terms=64, what="tall")
    del c
    for wide in (a.view(64, long), a.t()):
        c = gluon_matmul(b, wide, step)
        for part in (slice(0, 300), slice(-300, None)):
            hopper.check(
                lambda *_, p=part, c=c: c[:, p].contiguous(), reference, b, wide[:, part].contiguous(),
                terms=64, what="wide",
            )  # fmt: skip
        del c
