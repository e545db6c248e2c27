"""tma_matmul: every step at every edge, the same sums in each, what each compiles to, what is said of it, bad input."""

from types import SimpleNamespace

from harness.catalog import Needs
from harness.codegen import compile_for, dump
from harness.hardware import SHARED_LIMIT, Limits
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.tma import tma_matmul as module
from examples.tma.tma_matmul import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_NS,
    DTYPES,
    STEPS,
    TILES,
    each_step,
    fitting,
    gains,
    judge_claim,
    loop_of,
    programs_per_sm,
    reference,
    references,
    shared_bytes,
    tma_matmul,
)

# One row, one tile plus one in each direction in turn, several tiles, more steps than stages, nothing to sum, nothing.
SHAPES = [(1, 8, 8), (129, 64, 64), (64, 264, 64), (64, 64, 72), (257, 520, 8), (16, 16, 456), (5, 16, 0), (0, 8, 8)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(h, shape):
    M, N, K = shape
    h.check(each_step, references, h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half), terms=K)


@given(
    M=st.integers(0, 150), N=st.integers(0, 40), K=st.integers(0, 20), step=st.sampled_from(STEPS),
    block_n=st.sampled_from(BLOCK_NS),
)  # fmt: skip
def test_any_shape(M, N, K, step, block_n):
    h = Harness("test", Needs.parse("triton"))
    a, b = h.randn(M, 8 * K, dtype=h.half), h.randn(8 * K, 8 * N, dtype=h.half)
    h.check(
        lambda a, b: tma_matmul(a, b, step, block_n), reference, a, b, terms=8 * K, what=f"{step} {M}x{8 * N}x{8 * K}"
    )


@pytest.mark.parametrize("block_n", BLOCK_NS)
def test_every_step_sums_in_the_same_order(h, block_n):
    """Steps change how data travel and nothing of the arithmetic, so not one bit differs."""
    a, b = h.randn(150, 200, dtype=h.half), h.randn(200, 296, dtype=h.half)
    first, *others = each_step(a, b, block_n)
    for other in others:
        assert torch.equal(first, other)


def test_padded_rows_and_a_row_of_any_stride(h):
    a, b = h.randn(70, 152, dtype=h.half)[:, :136], h.randn(136, 80, dtype=h.half)[:, 8:72]
    h.check(each_step, references, a, b, terms=136)
    row = torch.as_strided(h.randn(1, 16, dtype=h.half), (1, 16), (3, 1))  # a stride that is never used
    h.check(each_step, references, row, h.randn(16, 8, dtype=h.half), terms=16)


def test_nan_and_infinity_stay_in_their_row_and_column(h):
    a, b = torch.ones(130, 72, dtype=h.half, device=h.device), torch.ones(72, 264, dtype=h.half, device=h.device)
    a[129, 71], b[70, 263] = float("nan"), float("inf")
    for c in each_step(a, b):
        assert c[129].isnan().all()
        assert c[:129, 263].isinf().all()
        assert (c[:129, :263] == 72).all()


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_large_and_repeated(h, step):
    a, b = h.randn(2053, 4096, dtype=h.half), h.randn(4096, 3080, dtype=h.half)
    h.check(lambda a, b: tma_matmul(a, b, step), reference, a, b, terms=4096, what=step)
    first = tma_matmul(a, b, step)
    for _ in range(20):
        assert torch.equal(tma_matmul(a, b, step), first)


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_more_than_2_31_elements(h, step):
    """Rows of c and of a beyond int32: the last rows tell."""
    M, N, K = 2**16 + 8, 2**15, 16
    if h.fit(M, bytes_each=4 * N) < M:
        pytest.skip("needs 12 GiB of GPU memory")
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    c = tma_matmul(a, b, step)[-64:]
    h.check(lambda a, b: c, reference, a[-64:], b, terms=K, what=step, poison=False)


MMA = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


def meta(M, N, K, dtype=torch.bfloat16):
    return torch.empty(M, K, dtype=dtype, device="meta"), torch.empty(K, N, dtype=dtype, device="meta")


@pytest.mark.parametrize("sm", MMA)
def test_each_step_is_what_it_says(sm):
    pointers, loads, store, parts = compile_for(each_step, meta(4096, 4096, 4096), sms=(sm,))
    tma = "cp.async.bulk.tensor"
    for kernel in (pointers, loads, store, parts):
        assert kernel.error is None
        assert (kernel.spills, kernel.fits) == (0, True)
        assert kernel.found.get(MMA[sm])
    assert pointers.found.get("cp.async")
    assert not pointers.found.get(tma)
    assert pointers.found.get("st.global.v4")
    assert loads.found.get(tma)
    assert not loads.found.get("cp.async")
    assert loads.found.get("st.global.v4")
    assert store.found[tma] > loads.found[tma]
    assert not store.found.get("st.global.v4")
    assert parts.found[tma] > store.found[tma]


@pytest.mark.parametrize(
    ("dtype", "tile", "shape"),
    [(DTYPES[0], TILES[0], (4096, 4096, 4096)), *((DTYPES[1], tile, (4072, 4104, 4072)) for tile in TILES)],
)
def test_steps_differ_in_nothing_else(dtype, tile, shape):
    """The same shared memory but for barriers, the same programs on an SM, wide copies also where K has a tail."""
    kernels = compile_for(each_step, (*meta(*shape, dtype), *tile), sms=(90,))
    assert [kernel.error for kernel in kernels] == [None] * len(STEPS)
    held = {programs_per_sm(kernel.registers, kernel.shared, kernel.shared_limit) for kernel in kernels}
    assert held == {1 if tile == TILES[0] else 2}
    block_n, stages = tile
    for kernel in kernels:
        assert kernel.spills == 0
        assert 0 <= kernel.shared - 2 * stages * (BLOCK_M + block_n) * BLOCK_K < 256
        assert kernel.shared <= shared_bytes(block_n, stages)
    # Each thread copies 16 bytes at a time; so many of these fill the tile, in the loop and before it.
    assert kernels[0].found["cp.async"] == stages * (BLOCK_M + block_n) * BLOCK_K * 2 // 16 // 256


def test_who_issues_the_copies():
    x = meta(4096, 4096, 4096)
    loops = [loop_of(dump(tma_matmul, (*x, step, *TILES[0]), sm=90)["sass"]) for step in STEPS]
    assert [loop["UTMALDG"] for loop in loops] == [0, 2, 2, 2]
    assert [loop["LDGSTS"] for loop in loops] == [12, 0, 0, 0]
    assert all(loop["HGMMA"] == BLOCK_K // 16 for loop in loops)


def test_the_loop_is_found_by_its_branch():
    sass = "\n".join(
        ("--:-:-:-:1\tHGMMA.64x8 R1;", "OUTER:", "--:-:-:-:1\tMOV R1, R2;", "INNER:", "--:-:-:-:1\t@P0 IADD3.X R1;",
         "--:-:-:-:1\tHGMMA.64x8 R1;", "--:-:-:-:5\t@!P0 BRA INNER;", "--:-:-:-:5\t@P1 BRA OUTER;",
         "LAST:", "--:-:-:-:1\tNOP;", "--:-:-:-:5\tBRA LAST;")
    )  # fmt: skip
    assert loop_of(sass) == {"IADD3": 1, "HGMMA": 1, "BRA": 1}
    assert loop_of(sass, "MOV") == {"MOV": 1, "IADD3": 1, "HGMMA": 1, "BRA": 2}
    assert loop_of(sass, "UTMALDG") == {}


@pytest.mark.parametrize(
    ("sm", "rule"), [(80, (256, 3)), (89, (128, 3)), (90, (256, 4)), (100, (256, 4)), (120, (128, 3))]
)
def test_which_tile_fits(sm, rule, monkeypatch):
    monkeypatch.setattr(module, "device_limits", lambda device: Limits(1, SHARED_LIMIT[sm]))
    assert fitting(torch.device("cpu")) == rule
    assert fitting(torch.device("cpu"), 128, 2) == (128, 2)
    with pytest.raises(ValueError, match=r"tma_matmul: block_n 256 with stages 8 does not fit the \d+ bytes"):
        fitting(torch.device("cpu"), 256, 8)


def test_programs_on_an_sm():
    limit = SHARED_LIMIT[90]
    assert programs_per_sm(90, 98328, limit) == 2
    assert programs_per_sm(90, 131104, limit) == 1
    assert programs_per_sm(129, 1024, limit) == 1  # 129 registers are handed out as 136


def test_gains_are_ratios_of_one_step_to_the_one_before():
    speed = {"cuBLAS": 1.0, "triton pointers": 0.8, "triton loads": 1.0, "triton store": 0.9, "triton parts": 0.9}
    rows = [SimpleNamespace(variant=name, speedup=ratio) for name, ratio in speed.items()]
    assert gains(SimpleNamespace(rows=rows)) == {"loads": 1.25, "store": 0.9, "parts": 1.0}


def test_the_claim_is_judged_by_the_ratios():
    assert judge_claim([0.98, 1.04, 1.25, 1.5]) == (
        "loads by TMA: 0.980x to 1.500x the speed of pointers; of 4 cases, 1 are within the 1.20x to 1.30x that the "
        "chapter claims, 2 below, 1 above"
    )


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
        "no step": ((a, b, "faster"), ValueError, r"step 'faster' is not one of \('pointers', "),
        "None for a step": ((a, b, None), ValueError, "step None is not one of"),
        "another tile": ((a, b, "parts", 64), ValueError, r"block_n is 64; take one of \(256, 128\)"),
        "a tile in floats": ((a, b, "parts", 128.0), ValueError, r"block_n is 128\.0"),
        "no stages": ((a, b, "parts", 128, 0), ValueError, "stages is 0; pass an int from 1 to 8"),
        "true stages": ((a, b, "parts", 128, True), ValueError, "stages is True"),
        "stages that do not fit": ((a, b, "parts", 256, 5), ValueError, "block_n 256 with stages 5 does not fit"),
        "K of 12": ((a[:, :12], b[:12]), ValueError, "K is 12 and N 8; TMA needs .*pad both to multiples of 8"),
        "N of 4": ((a, b[:, :4]), ValueError, "K is 16 and N 4"),
        "a transposed": (
            (torch.zeros(16, 8, dtype=a.dtype, device=device).t(), b),
            ValueError,
            r"a has shape \(8, 16\)",
        ),
        "unaligned start": ((flat[1:65].view(4, 16), b), ValueError, "a has .* starts 2 bytes past"),
        "unaligned start of pointers": ((flat[1:65].view(4, 16), b, "pointers"), ValueError, "a has .* starts 2"),
        "unaligned rows": ((a, flat[:192].view(16, 12)[:, :8]), ValueError, r"b has shape \(16, 8\), .*\(12, 1\)"),
        "one row for all": ((a[:1].expand(4, 16), b), ValueError, r"a has .* strides \(0, 1\)"),
        "requires grad": ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta")), ValueError, "move them to one device"),
        "a device without kernels": ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"tma_matmul: .*{message}"):
        tma_matmul(*args)
