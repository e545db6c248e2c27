"""Turns of a Gluon kernel's warpgroups at the tensor cores, by named barriers of the hardware (a ping-pong schedule).

Warpgroups that wait for their MMAs before they do softmax fall into step if left alone: all wait for the tensor cores,
then for the exponential units. In turns, each waits at a barrier of its own before it starts its MMAs, and the one
before arrives there when it has started its own. Nothing may rely on a turn for the order of memory: the compiler does
not know that these are barriers. The last consumer begins by passing the first turn on, and the first takes one more at
the end: nobody is left at a barrier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The hardware has 16, of which Triton takes a few, from 0 up. 256 threads meet at each of these: two warpgroups.
BARRIER = gl.constexpr(8)


@gluon.jit
def _at_barrier(TEXT: gl.constexpr):
    """Run TEXT once in each thread of a warpgroup."""
    each = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(TEXT, "=r,r", [each], gl.int32, False, 1)


@gluon.jit
def take_turn(CONSUMER: gl.constexpr):
    """Wait until the MMAs of the consumer before have started."""
    TEXT: gl.constexpr = f"bar.sync {BARRIER + CONSUMER}, 256; mov.b32 $0, $1;"
    _at_barrier(TEXT)


@gluon.jit
def pass_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Let the next consumer start its MMAs; the first comes after the last."""
    TEXT: gl.constexpr = f"bar.arrive {BARRIER + (CONSUMER + 1) % CONSUMERS}, 256; mov.b32 $0, $1;"
    _at_barrier(TEXT)
