"""Study of gluon_matmul: its layouts are the compiler's, its counts what is written, its words follow the times."""

import ast
import itertools
import re
from types import SimpleNamespace

from harness.bench import Row, Table
from harness.codegen import dump

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from examples.common.device import require_triton_device
from examples.tma.gluon_matmul_ring import STAGES, TILE
from studies.tma import gluon_matmul as study
from studies.tma.gluon_matmul import KERNELS, WRITTEN, explain, holder, operations, shared_byte


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


X = torch.empty(16, dtype=torch.bfloat16, device="meta")


def test_who_holds_an_element_is_as_the_compiler_says():
    rows, warps = 64, 4
    text = dump(print_layout, (X, rows, TILE[1], warps, False), sm=90)["log"]
    registers, lanes, warp = (bases(text, name) for name in ("reg", "lane", "warp"))
    held = {}
    for w, lane, register in itertools.product(range(warps), range(32), range(2 ** len(registers))):
        parts = (place(w, warp), place(lane, lanes), place(register, registers))
        held[sum(r for r, _ in parts), sum(c for _, c in parts)] = (w, lane, register)
    assert len(held) == rows * TILE[1]
    assert all(holder(*at) == who for at, who in held.items())


@pytest.mark.parametrize("shape", [(128, 64), (64, 256), (64, 16)])
def test_where_tma_puts_an_element_is_as_the_compiler_says(shape):
    """Operands, and the narrower swizzle of a narrower tile."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("Triton 3.6 aborts when it is asked for the linear layout of shared memory")
    text = dump(print_layout, (X, *shape, 4, True), sm=90)["log"]
    offsets, layout = bases(text, "offset"), gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)
    assert layout.swizzle_byte_width == min(128, 2 * shape[1])
    for offset in range(shape[0] * shape[1]):
        assert shared_byte(layout, shape[0], *place(offset, offsets)) == 2 * offset


@given(rows=st.sampled_from([8, 64, 128]), columns=st.sampled_from([16, 32, 64, 128, 256]))
def test_no_two_elements_share_a_byte(rows, columns):
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    taken = {shared_byte(layout, rows, r, c) for r in range(rows) for c in range(columns)}
    assert taken == set(range(0, 2 * rows * columns, 2))


def test_operations_are_counted_as_written():
    counts = operations("""
      %0 = ttng.warp_group_dot %a, %b {x}   %1 = ttng.warp_group_dot_wait %0
      ttg.warp_specialize(%1) default { } partition0(%x) num_warps(4) { } partition1(%x) num_warps(1) { }
      %2 = ttg.local_alloc : () -> x   ttng.barrier_expect %2   ttng.async_tma_copy_global_to_local %2
    """)
    nonzero = {"MMAs": 1, "MMA waits": 1, "partitions": 3, "buffers": 1, "expects": 1, "loads": 1}
    assert {name: n for name, n in counts.items() if n} == nonzero
    assert operations("")["partitions"] == 1


def test_study_without_hopper(h):
    if h.machine.sm == 90 and not h.interpreted:
        pytest.skip("its sizes are run by the topic")
    study.study(h)
    written = h.record.facts["what TTGIR says explicitly"]
    assert set(written) == {*WRITTEN, "partitions"}
    assert all(any(row.values()) for row in written.values()), "an operation that nobody has is a name misspelt"
    assert written["barriers"]["partitions"] == 2 * STAGES + 1
    assert written["loads"]["ring"] == 2 * STAGES
    assert [written["partitions"][name] for name in ("one buffer", "ring", "partitions")] == [1, 1, 3]
    assert [written["MMA waits"][step] for step in ("partitions", "in flight", "staggered")] == [4, 6, 6]
    (swizzle,) = (fact for name, fact in h.record.facts.items() if name.startswith("chunks of 16 bytes"))
    assert (swizzle["row 0"], swizzle["row 5"]) == ("0 1 2 3 4 5 6 7", "5 4 7 6 1 0 3 2")
    text = "\n".join(h.record.conclusions)
    assert "they lie in 8 of the 8 groups of banks" in text
    assert "holds 128 elements of the accumulator: rows 1, 9, columns 2, 3, 10, 11, 18, 19, ..." in text


def test_what_is_said_follows_from_the_times():
    """32 by 16 tiles on 132 SMs are 4 waves: a step that takes 1 ms less wins 250 us in each."""
    said, ms = [], dict(zip(KERNELS, (2.0, 1.0, 0.9, 0.7, 0.7, 0.75), strict=True))
    times = {"cuBLAS": 0.8, "triton tile": 1.0, "triton split": 0.8} | ms
    rows = [Row(name, True, None, 0, t, speedup=0.8 / t, peer=name.startswith("tri")) for name, t in times.items()]
    h = SimpleNamespace(machine=SimpleNamespace(sms=132), say=said.append)
    by_hand = explain(h, Table("gluon_matmul", "4096", "cuBLAS", rows), 4096)
    assert said == [
        "512 tiles on 132 SMs, 4 waves; of 500.0 us a wave each step won: ring +250.00 us, partitions +25.00 us, "
        "persistent +50.00 us, in flight +0.00 us, staggered -12.50 us"
    ]
    assert list(by_hand.values()) == [0.4, 0.8, 0.8889, 1.1429, 1.1429, 1.0667]
