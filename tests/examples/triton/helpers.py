"""What the tests of several Triton techniques share: bad input, code, and matrices that a wrong kernel gets wrong."""

import re

from harness.catalog import Needs
from harness.codegen import Kernel, compile_for
from harness.session import Harness

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import interpreted
from examples.triton.matmul import reference

INF, NAN = float("inf"), float("nan")
BEFORE_39 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
# Before Triton 3.9 the interpreter's tl.fma rounds the product too.
FUSED = not interpreted() or not BEFORE_39


def harness() -> Harness:
    """For tests of hypothesis, which want no fixture of a function."""
    return Harness("test", Needs.parse("triton"))


def refused(fn, error, message, *args, **options) -> None:
    """fn(*args) raises that error, with a message that begins with its name."""
    name = getattr(fn, "__name__", None) or fn._qualname  # of an operator of torch
    with pytest.raises(error, match=f"^{name}: .*{message}"):
        fn(*args, **options)


def meta(*shape, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def code(sm: int, found, wrapper, *args, spills: int = 0, config: int = 0, **options) -> Kernel:
    """The one kernel of wrapper(*args), which compiles for sm, fits, has these instructions (a tuple, or words) and
    spills no more."""
    (kernel,) = compile_for(wrapper, args, options, sms=(sm,), config=config)
    assert (kernel.error, kernel.too_much) == (None, None)
    assert all(kernel.found.get(name) for name in (found.split() if isinstance(found, str) else found)), kernel.found
    assert kernel.spills <= spills
    return kernel


def matrices(h, M, N, K, dtype=None):
    return h.randn(M, K, dtype=dtype or h.half), h.randn(K, N, dtype=dtype or h.half)


def check_product(h, fn, a, b, *args, **options) -> None:
    """fn(a, b, *args, **options) against float64."""
    what = f"{tuple(a.shape)} {a.stride()} {tuple(b.shape)} {b.stride()} {args} {options}"
    h.check(lambda a, b: fn(a, b, *args, **options), reference, a, b, terms=a.shape[1], what=what)


def layouts(h, tma: bool = False):
    """Pairs of matrices with strides that pointers can follow, or TMA."""
    a, b = h.randn(96, 160, dtype=h.half), h.randn(200, 320, dtype=h.half)
    if tma:
        return (
            (a, b[:160, :104]),  # rows apart: what lies between them must not be summed
            (a[:, 8:80], b[:72]),  # a start 16 bytes later
            (a[::3, :72], b[:144:2, 16:]),  # every third, every second row
            (a[:1, :72].as_strided((1, 72), (5, 1)), b[:72, :40]),  # one row, with a stride nobody steps by
        )
    return (
        (a.t(), b[:96, :100]),  # transposed; padded rows
        (a[:, ::2], b[:80, ::3]),  # every second, every third column: nothing that cp.async could copy
        (a[:1].expand(70, 160), b[:160]),  # a stride of 0
        (a[:, 1:], b[:159, 1:50]),  # starts that are not aligned
        (h.randn(50, 50, dtype=h.half).t(), h.randn(70, 50, dtype=h.half).t()),
    )


def products(h, *more, tma: bool = False):
    """Pairs of matrices: one element, primes, one tile plus one in each dimension, nothing to sum, nothing, `more`
    (M, N, K); layouts; large, tiny, in part beyond float16, and NaN and infinities beside the tail of a tile."""
    unit = 8 if tma else 1
    for M, N, K in [(1, 1, 1), (37, 53, 61), (129, 64, 64), (64, 257, 64), (64, 64, 65), (300, 1, 40), (5, 7, 0),
                    (0, 5, 3), *more]:  # fmt: skip
        yield matrices(h, M, -(-N // unit) * unit, -(-K // unit) * unit)
    yield from layouts(h, tma)
    a, b = matrices(h, 66, 136, 72)
    yield a * 64, b * 4
    yield a * 2.0**-12, b * 2.0**-6
    yield a[:20] * 2000, b[:, :40] * 2000
    a[3, 5], a[65, 71], b[2, 9], b[71, 135], b[7, 130] = NAN, INF, -INF, INF, NAN
    yield a, b


def any_product(fn, M=200, N=200, K=150, tma: bool = False, **draws):
    """A test: fn(a, b, **drawn) against float64 for matrices of any size up to this one."""
    unit = 8 if tma else 1

    @given(M=st.integers(0, M), N=st.integers(0, N // unit), K=st.integers(0, K // unit), **draws)
    def test(M, N, K, **drawn):
        h = harness()
        check_product(h, fn, *matrices(h, M, N * unit, K * unit, torch.float16), **drawn)

    return test


def check_beyond_int32(h, gpu_gib, matmul, *, transposed: bool) -> None:
    """A tall and a wide product of 2**31 elements and more, at both ends; `transposed`: b is, where it is wide."""
    gpu_gib(40)
    length = 2**31 // 64 + 64
    a, b = torch.empty(length, 64, dtype=torch.bfloat16, device=h.device).normal_(), h.randn(64, 64).bfloat16()
    for left, right in ((a, b), (b, a.t() if transposed else a.view(64, length))):
        c = matmul(left, right)
        for part in (slice(0, 300), slice(-300, None)):
            x, y, got = (left[part], right, c[part]) if left is a else (left, right[:, part], c[:, part])
            h.check(lambda *_, got=got: got.contiguous(), reference, x, y, terms=64, what=f"{tuple(c.shape)} {part}")
        del c


def loops_in_turns(text: dict, consumers: int) -> list[tuple[str, list[str]]]:
    """The loops of consumers that take turns, in SASS, and the order of what is in them: turns, the N of MMAs, waits,
    exponentials. Fails where turns share a barrier with anything else, a loop spills, or a turn goes to another
    consumer than the next."""
    turns = re.findall(r"bar(?:rier)?\.(?:sync|arrive)\S*\s+(\d+)(, 256)?", text["ptx"])
    assert {int(number) for number, both in turns if both} == {8 + i for i in range(consumers)}
    assert all(int(number) < 8 for number, both in turns if not both)
    assert int(re.search(r"used (\d+) barriers", text["log"])[1]) == 8 + consumers
    parts = re.split(r"\bBRA\b", text["sass"])[:-1]
    loops = [part for part in parts if "BAR.ARV" in part and "MUFU.EX2" in part]
    assert len(loops) == consumers or (len(loops) == 2 and BEFORE_39), "3.6's disassembly ends in the third"
    orders, takes = [], set()
    for loop in loops:
        (taken,), (passed,) = (re.findall(rf"BAR\.{how}\S* 0x(\w+), 0x100", loop) for how in ("SYNC", "ARV"))
        assert int(passed, 16) == 8 + (int(taken, 16) - 8 + 1) % consumers
        takes.add(taken)
        assert not re.search("STL|LDL", loop)
        names = {"SYNC": "take", "ARV": "pass", "DEPBAR.LE gsb0, 0x0": "wait", "MUFU": "exp"}
        turn = r"BAR\.(SYNC|ARV)\S* 0x\w+, 0x100"
        order = re.findall(rf"[HQ]GMMA\.64x(\d+)|{turn}|(DEPBAR\.LE gsb0, 0x0|MUFU)", loop)
        orders.append([names.get(each, each) for each in map("".join, order)])
    assert len(takes) == len(loops)
    return list(zip(loops, orders, strict=True))
