"""weight_only_matmul: packing and its inverse, the instructions that dequantize, every edge, bad input, the code."""

import operator
import re
from functools import partial

from harness.codegen import compile_for

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.common import stream_k
from examples.common.device import SHARED_LIMIT, Limits
from examples.triton import weight_only_matmul as lesson
from examples.triton import weight_only_matmul_gemv as gemv
from examples.triton.weight_only_matmul import reference, weight_only_matmul, weight_only_matmul_stream_k
from examples.triton.weight_only_matmul_gemv import weight_only_matmul_gemv
from examples.triton.weight_only_matmul_packing import (
    FORMATS,
    GROUP,
    WORDS,
    PackedWeight,
    assembly,
    dequantized,
    quantize_weight,
)
from tests.examples.triton.helpers import INF, NAN, harness, meta, refused

by_format = pytest.mark.parametrize("format", FORMATS)


def check(h, x, packed, **budget) -> None:
    """weight_only_matmul, and of one row both kernels."""
    what = f"{packed.format} {tuple(x.shape)} {x.stride()} {packed.words.shape[0]}"
    for fn in (weight_only_matmul_gemv, weight_only_matmul_stream_k) if x.shape[0] == 1 else (weight_only_matmul,):
        h.check(
            partial(fn, packed=packed),
            partial(reference, packed=packed),
            x,
            terms=packed.K,
            what=f"{fn.__name__} {what}",
            **budget,
        )


@by_format
def test_edges_layouts_and_extremes(h, format):
    for M, N, K in [(1, 1, 1), (17, 64, 256), (65, 72, 300), (5, 65, 1700), (0, 5, 3), (5, 0, 3), (3, 7, 0)]:
        check(h, h.randn(M, K, dtype=h.half), quantize_weight(h.randn(N, K, dtype=h.half), format))
    packed = quantize_weight(h.randn(70, 264, dtype=h.half), format)
    wide = h.randn(20, 600, dtype=h.half)
    # Rows apart, a start and a stride that TMA cannot take, columns apart, one row for all.
    for x in (wide[:, :264], wide[:, 1:265], wide[:, ::2][:, :264], wide[:1, :264].expand(6, 264)):
        check(h, x, packed)
    for x in (wide[:, :264] * 1000, wide[:, :264] * 2.0**-10):
        check(h, x, packed)
        check(h, x[:1], packed)
    for x in (wide[3:4, :264], wide[:1, 1:265], wide[:1, ::2][:, :264], wide[:1, :1].expand(1, 264)):
        check(h, x, packed)


@by_format
def test_nan_and_infinity_go_where_the_weights_put_them(h, format):
    w, x = h.randn(70, 600, dtype=h.half), h.randn(5, 600, dtype=h.half)
    w[3, 5], w[66, 599], w[7, 300] = NAN, INF, -INF
    x[1, 7], x[2, 599] = NAN, INF
    packed = quantize_weight(w, format)
    assert dequantized(packed)[[3, 66, 7], [5, 599, 300]].isnan().all()
    check(h, x, packed)
    for row in range(3):
        check(h, x[row : row + 1], packed)


@by_format
def test_any_size(format):
    @given(M=st.integers(0, 40), N=st.integers(0, 140), K=st.integers(0, 700))
    def test(M, N, K):
        h = harness()
        check(h, h.randn(M, K, dtype=h.half), quantize_weight(h.randn(N, K, dtype=h.half), format))

    test()


@by_format
def test_one_row_of_any_size(format):
    """Steps that are no multiple of what the kernel takes at a time, and programs that end past the last output."""

    @given(N=st.integers(0, 70), K=st.integers(0, 5000))
    def test(N, K):
        h = harness()
        check(h, h.randn(1, K, dtype=h.half), quantize_weight(h.randn(N, K, dtype=h.half), format))

    test()


@by_format
def test_one_row_takes_the_kernel_without_a_merge_where_it_fills_the_gpu(h, monkeypatch, format):
    called = []
    for name in ("weight_only_matmul_gemv", "weight_only_matmul_stream_k"):
        monkeypatch.setattr(lesson, name, lambda *_, name=name: called.append(name.removeprefix("weight_only_matmul_")))
    busy = gemv.OUTPUTS * gemv.PER_SM * gemv.device_limits(h.device).sms
    for M, N in ((1, busy), (1, busy - 1), (2, busy)):
        packed = quantize_weight(h.randn(N, 8, dtype=h.half), format)
        weight_only_matmul(h.randn(M, 8, dtype=h.half), packed)
    assert called == ["gemv", "stream_k", "stream_k"]


@by_format
def test_one_row_of_integers_is_exact(h, format):
    """Nothing rounds, so a slice that is left out, or that meets another one's x, shows as itself."""
    w = torch.randint(-4, 5, (40, 4352), device=h.device).to(h.half)
    w[:, ::GROUP] = 7 if format == "int4" else 448  # the largest of each group, so that each scale is 1
    x = (torch.randint(0, 40, (1, 4352), device=h.device) == 0).to(h.half)
    packed = quantize_weight(w, format)
    assert torch.equal(dequantized(packed), w.double())
    want = (x.double() @ w.double().t()).to(h.half)
    for fn in (weight_only_matmul_gemv, weight_only_matmul_stream_k, weight_only_matmul):
        assert torch.equal(fn(x, packed), want), fn


@by_format
def test_packing_loses_half_a_step_at_most(h, format):
    w = h.rows(70, 600, dtype=h.half)
    w[5], w[6, :128], w[7] = 0, 0, w[7] * 1e-3
    error = (dequantized(quantize_weight(w, format)) - w.double()).abs()
    groups = torch.nn.functional.pad(w.double(), (0, -600 % GROUP)).unflatten(1, (-1, GROUP)).abs().amax(-1)
    if format == "int4":
        assert (error <= groups.repeat_interleave(GROUP, 1)[:, :600] / 7 * 0.505 + 2.0**-24).all()
    else:
        amax = w.double().abs().amax(1, keepdim=True)
        assert (error <= w.double().abs() * 2.0**-4 * 1.001 + amax / 448 * 2.0**-10 * 1.001).all()


def emulated(text: str, word: int, dtype: torch.dtype) -> torch.Tensor:
    """What the PTX of a dequantizing instruction sequence makes of a 32-bit register: two numbers."""
    registers = {"$1": word}

    def value(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    def halves(bits: int) -> torch.Tensor:
        return torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32).to(torch.uint16).view(dtype).double()

    for line in filter(None, (part.strip() for part in text.strip("{} ").split(";"))):
        if line.startswith(".reg"):
            continue
        name, to, *args = re.split(r"[ ,]+", line)
        a, *more = map(value, args)
        operation = name.split(".")[0]
        if operation in ("sub", "mul"):
            assert f".{'bf16' if dtype is torch.bfloat16 else 'f16'}x2" in name
            left, right = halves(a), halves(more[0])
            return left - right if operation == "sub" else left * right
        if operation == "lop3":
            assert more[2] == 0xEA
        kind = operator.rshift if operation == "shr" else operator.lshift
        shifted = a if operation == "mov" else kind(a, more[0]) if operation in ("shl", "shr") else a & more[0]
        registers[to] = (shifted | more[1] if operation == "lop3" else shifted) & 0xFFFFFFFF
    raise AssertionError("no result")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_instructions_that_dequantize(dtype):
    """All codes of each format in each part of either word, among others: what they stand for, exactly."""
    bf16 = dtype is torch.bfloat16
    for part in range(4):
        for nibble in range(16):
            word = (0xA5A5A5A5 & ~(0xF000F << 4 * part)) | (nibble << 4 * part) | ((15 - nibble) << 4 * part + 16)
            assert emulated(assembly(part, True, bf16), word, dtype).tolist() == [nibble - 8, 7 - nibble]
    for part in range(2):
        for byte in range(256):
            word = (0xA5A5A5A5 & ~(0xFF00FF << 8 * part)) | (byte << 8 * part) | ((byte ^ 1) << 8 * part + 16)
            want = torch.tensor([byte, byte ^ 1], dtype=torch.uint8).view(torch.float8_e4m3fn).double()
            if want.isfinite().all():  # NaN is in the scale alone
                got = emulated(assembly(part, False, bf16), word, dtype)
                assert torch.equal(got, want), (part, byte, got, want)


@pytest.mark.parametrize("sm", [sm for sm in SHARED_LIMIT if sm >= 90])
def test_a_tile_fits_every_gpu(sm, monkeypatch):
    monkeypatch.setattr(stream_k, "device_limits", lambda _: Limits(100, SHARED_LIMIT[sm]))
    for M in (1, 16, 17, 64, 1000):
        for format, parts in FORMATS.items():
            m, n, _, per_sm, stages = lesson.choose_tile(M, format, torch.device("cpu"))
            assert stages >= (1 if SHARED_LIMIT[sm] < 128 * 1024 else 3)
            assert per_sm * (stages * 128 * (n + parts * m) + 4 * n * min(m, 32)) < SHARED_LIMIT[sm]


@pytest.mark.gpu
@by_format
def test_real_sizes_dtypes_and_bits(h, format):
    for i, (M, N, K) in enumerate(
        [(1, 8192, 8192), (16, 28672, 8192), (33, 1000, 11008), (64, 8192, 8192), (300, 520, 777)]
    ):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        packed = quantize_weight(h.randn(N, K, dtype=dtype), format)
        x = h.randn(M, K, dtype=dtype)
        check(h, x, packed)
        for fn in (weight_only_matmul, weight_only_matmul_stream_k):
            first = fn(x, packed)
            assert all(torch.equal(fn(x, packed), first) for _ in range(5))


def test_bad_input(h):
    w, x = h.randn(8, 16, dtype=h.half), h.randn(4, 16, dtype=h.half)
    packed = quantize_weight(w, "int4")
    refused(quantize_weight, ValueError, "format 'int3' is not one of", w, "int3")
    refused(quantize_weight, TypeError, "is not one of", w.float(), "fp8")
    refused(quantize_weight, ValueError, r"need \[N, K\]", w[0], "fp8")
    refused(weight_only_matmul, TypeError, "pass what quantize_weight returns", x, w)
    refused(weight_only_matmul, ValueError, r"need \[M, 16\]", x[:, :8], packed)
    other = PackedWeight(packed.words, packed.scales.float(), packed.K, "int4")  # the interpreter has no bfloat16
    refused(weight_only_matmul, TypeError, "pass x as the weights were", x, other)
    refused(weight_only_matmul_gemv, ValueError, "x has 4 rows; it takes one", x, packed)


def packed_meta(N: int, K: int, format: str) -> PackedWeight:
    """What quantize_weight makes of [N, K] in bfloat16, without data."""
    columns = K + -K % (FORMATS[format] * WORDS.value)
    words = meta(N, columns // FORMATS[format], dtype=torch.int16)
    int4 = format == "int4"
    scales = meta(columns // (2 * GROUP), N, 2, dtype=torch.bfloat16) if int4 else meta(N, dtype=torch.float32)
    return PackedWeight(words, scales, K, format)


@by_format
def test_it_compiles_for_sizes_of_1(format):
    """Triton makes a constant of each; where it can tell that no tile is shared, as K is one step, 3.6 crashes. Of one
    row it spills two registers there."""
    for fn, M, N, K in [
        (weight_only_matmul, 1, 1, 1),
        (weight_only_matmul, 5, 9000, 100),
        (weight_only_matmul, 1, 1, 1700),
        (weight_only_matmul_gemv, 1, 1, 1),
        (weight_only_matmul_gemv, 1, 1, 1700),
        (weight_only_matmul_gemv, 1, 9000, 100),
    ]:
        kernels = compile_for(fn, (meta(M, K), packed_meta(N, K, format)), sms=(90,))
        one_step = (fn, N, format) == (weight_only_matmul_gemv, 9000, "int4")
        spilled = 8 if one_step and triton.__version__.startswith("3.6.") else 0
        assert all(each.error is None and each.spills <= spilled for each in kernels), (M, N, K, kernels)


@by_format
@pytest.mark.parametrize(("sm", "mma"), [(90, "wgmma"), (100, "tcgen05.mma")])
def test_generated_code(format, sm, mma):
    """Without a spill; on sm_90 four programs fit an SM at one row, and the weights never go back to shared memory.

    Of up to 8 rows Triton 3.6 makes mma.sync, which has MMAs of 8 columns; 3.9 has such wgmma, too.
    """
    N = 8192
    for M in (1, 16, 64) if sm == 90 else (1, 16):
        kernels = compile_for(weight_only_matmul_stream_k, (meta(M, N), packed_meta(N, N, format)), sms=(sm,))
        kernel = next(k for k in kernels if "merge" not in k.kernel)
        assert (kernel.error, kernel.too_much, kernel.spills) == (None, None, 0)
        assert all(kernel.found.get(name) for name in ("cp.async.bulk.tensor", "mbarrier"))
        assert kernel.found.get(mma) or (M <= 8 and kernel.found.get("mma.sync"))
        assert M > 1 or 4 * (kernel.shared + 1024) <= SHARED_LIMIT[sm]


@by_format
@pytest.mark.parametrize(("N", "stages"), [(4224, 3), (8192, 2), (28672, 3)])
def test_generated_code_of_one_row(format, N, stages):
    """One kernel of mma.sync, whatever the version. Of three stages an SM's programs have 96 KiB in flight; of two,
    where all programs of the launch run at once, 60 KiB."""
    (kernel,) = compile_for(weight_only_matmul, (meta(1, 8192), packed_meta(N, 8192, format)), sms=(90,))
    assert (kernel.error, kernel.too_much, kernel.spills) == (None, None, 0)
    assert kernel.found.get("cp.async")
    assert kernel.found.get("mma.sync")
    assert not kernel.found.get("wgmma")
    per_sm = min(SHARED_LIMIT[90] // (kernel.shared + 1024), 65536 // (-(-kernel.registers // 8) * 8 * 32 * gemv.WARPS))
    assert per_sm >= gemv.RESIDENT
    assert (kernel.shared > 16 * 1024) == (stages == 3)
    running = per_sm if stages == 3 else N / gemv.OUTPUTS / 132
    assert min(per_sm, running) * (stages - 1) * gemv.OUTPUTS * 1024 >= (96 if stages == 3 else 60) * 1024
