"""tensor_cores: every precision at every edge of its tile, int8 exactly, bad input, the instructions."""

from harness.catalog import Needs
from harness.check import CheckError
from harness.codegen import compile_for
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import interpreted
from examples.triton.tensor_cores import (
    DTYPES,
    INPUT_PRECISIONS,
    MAX_K_INT8,
    PRECISIONS,
    TENSOR_CORES,
    TF32_EPS,
    budget,
    dot,
    operands,
    product,
    reference,
    rms_error,
)

NAMES = [pytest.param(name, marks=pytest.mark.gpu if name == "bfloat16" else ()) for name in PRECISIONS]


def run(h, name, a, b, **more):
    precision = PRECISIONS[name].input_precision
    h.check(lambda a, b: dot(a, b, precision), reference, a, b, what=name, **(budget(name, a.shape[1]) | more))


@pytest.mark.parametrize("name", NAMES)
def test_shapes(h, name):
    """One element, primes, one tile plus one in each dimension in turn, long and thin, nothing to sum."""
    for M, N, K in [(1, 1, 1), (37, 53, 61), (129, 64, 64), (64, 257, 32), (16, 16, 129), (1, 300, 40), (300, 2, 40),
                    (5, 7, 0)]:  # fmt: skip
        run(h, name, *operands(h, name, M, N, K))


@given(
    M=st.integers(0, 200), N=st.integers(2, 300), K=st.integers(0, 150),
    name=st.sampled_from([name for name in PRECISIONS if not (interpreted() and name == "bfloat16")]),
)  # fmt: skip
def test_any_shape(M, N, K, name):
    h = Harness("test", Needs.parse("triton"))
    run(h, name, *operands(h, name, M, N, K))


@pytest.mark.parametrize("name", NAMES)
def test_strides(h, name):
    a, b = operands(h, name, 200, 320, 160)
    for left, right in (
        (a[:96].t()[:60], b[:96, :100]),  # transposed; padded rows
        (a[:, ::2], b[:80, ::3]),  # every second, every third column
        (a[:1].expand(70, 160), b),  # a stride of 0
        (a[:, 1:], b[:159, 1:50]),  # starts that are not aligned
        (a, b.t().contiguous().t()),  # K-major
        (a, b.contiguous()),
        (a, b[:, :1].clone(memory_format=torch.contiguous_format)),
    ):
        run(h, name, left, right)


def test_int8_is_exact_up_to_its_last_term(h):
    a = torch.full((3, 1000), -128, dtype=torch.int8, device=h.device)
    b = operands(h, "int8", 3, 5, 1000)[1]
    run(h, "int8", a, torch.full((1000, 5), -128, dtype=torch.int8, device=h.device))
    run(h, "int8", a, b)
    other = b.clone()
    other[999, 4] ^= 1  # one in 5000 numbers, by one
    with pytest.raises(CheckError, match=r"3 of 15 elements are wrong, the first at \[0, 4\]"):
        h.check(lambda a, b: dot(a, other), reference, a, b, what="int8", dtype=torch.int32)


@pytest.mark.gpu
def test_int8_at_the_largest_sum_an_int32_holds(h):
    a = torch.full((130, MAX_K_INT8), -128, dtype=torch.int8, device=h.device)
    run(h, "int8", a, a[:20].t())


@pytest.mark.parametrize(
    "name", ["ieee", "float16", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("tf32", "bfloat16"))]
)
def test_infinities_nan_and_the_ends_of_the_range(h, name):
    a, b = operands(h, name, 70, 90, 65)
    info = torch.finfo(a.dtype)
    run(h, name, a * (info.max**0.5 / 16), b * (info.max**0.5 / 16))
    if name == "float16":  # a third of the results is beyond its range; the accumulator, float32, holds them
        factor = (info.max / 65**0.5) ** 0.5
        run(h, name, a * factor, b * factor)
    special = a.clone()
    special[3, 5], special[7, 0], special[9, 64], special[11] = float("inf"), float("nan"), float("-inf"), 0.0
    run(h, name, special, b)
    run(h, name, a * 1e-3, b * 1e-3)


@pytest.mark.gpu
def test_the_error_of_float32_by_precision(h):
    a, b = h.randn(512, 1024), h.randn(1024, 512)
    want = reference(a, b)
    error = {name: rms_error(product(a, b, name), want) for name in INPUT_PRECISIONS}
    assert max(error["ieee"], error["tf32x3"]) < error["tf32"] / 50
    assert rms_error(dot(a, b).double(), want) == pytest.approx(error["tf32"], rel=0.01)
    with pytest.raises(CheckError):  # the budget of float32 is not one that tf32 meets
        run(h, "tf32", a, b, operand_eps=0.0)
    run(h, "tf32", a, b, operand_eps=TF32_EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRECISIONS)
def test_shapes_on_the_gpu(h, name):
    for shape in [(512, 768, 1024), (1000, 520, 777), (16, 4096, 4096), (4096, 16, 512)]:
        run(h, name, *operands(h, name, *shape))


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(12)
    a = torch.randint(-128, 128, (2**31 // 64 + 64, 64), dtype=torch.int8, device=h.device)
    b = operands(h, "int8", 1, 8, 64)[1]
    c = dot(a, b)
    for part in (slice(0, 100), slice(-100, None)):
        h.check(lambda *_, part=part: c[part], reference, a[part].contiguous(), b, what="tall", dtype=torch.int32)


@pytest.mark.gpu
@pytest.mark.slow
def test_lower_precision_is_faster(h):
    from harness.hardware import gpu_ms

    ms = {}
    for name in PRECISIONS:
        a, b = operands(h, name, 4096, 4096, 4096)
        precision = PRECISIONS[name].input_precision
        ms[name] = sorted(gpu_ms(lambda a=a, b=b, precision=precision: dot(a, b, precision)))[0]
    assert ms["tf32"] < ms["tf32x3"] / 1.5
    assert ms["bfloat16"] < ms["tf32"] / 1.3
    assert ms["tf32"] < ms["ieee"] / 2


def test_bad_input(h):
    a, b = h.randn(4, 8), h.randn(8, 5)
    long = torch.zeros(1, MAX_K_INT8 + 1, dtype=torch.int8, device=h.device)
    half = torch.zeros(4, 4, dtype=torch.bfloat16, device=h.device)
    for args, error, message in [
        (([1.0], b), TypeError, r"expected a torch\.Tensor, got list"),
        ((a.int(), b.int()), TypeError, r"torch\.int32"),
        ((a.byte(), b.byte()), TypeError, r"torch\.uint8"),
        ((a.double(), b.double()), TypeError, r"torch\.float64"),
        ((a, b.half()), TypeError, r"torch\.float32 and torch\.float16"),
        ((a, b[:, 0]), ValueError, r"shapes \(4, 8\) and \(8,\); need \[M, K\] and \[K, N\]"),
        ((a, b.t()), ValueError, r"shapes \(4, 8\) and \(5, 8\)"),
        ((a, b, "tf19"), ValueError, "input_precision 'tf19' is not one of"),
        ((a.half(), b.half(), "tf32"), ValueError, r"for float32, not torch\.float16; leave it"),
        ((a.char(), b.char(), "ieee"), ValueError, r"for float32, not torch\.int8"),
        ((long, long.t()), ValueError, rf"K is {MAX_K_INT8 + 1}, .* may overflow; split K"),
        ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        ((a, b.to("meta")), ValueError, "move them to one device"),
        *([((half, half), TypeError, "interpreter computes bfloat16 wrongly")] * interpreted()),
    ]:
        with pytest.raises(error, match=f"dot: .*{message}"):
            dot(*args)


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize("name", PRECISIONS)
def test_the_instruction_of_each_precision(name, sm):
    precision = PRECISIONS[name]
    a = torch.empty(4096, 4096, dtype=precision.dtype, device="meta")
    (kernel,) = compile_for(dot, (a, a.t() if precision.k_major else a, precision.input_precision), sms=(sm,))
    assert kernel.error is None
    assert kernel.fits
    used = [unit for unit in TENSOR_CORES.values() if unit in kernel.found]
    if name == "ieee":
        assert not used
        assert kernel.found["fma.f32"]
    elif (name, sm) == ("int8", 100):  # mma.sync in Triton 3.6 and 3.7; a later one may do better
        assert len(used) == 1
    else:
        assert used == [TENSOR_CORES[80 if sm == 120 else sm]]
    assert ("mma tf32" in kernel.found) == name.startswith("tf32")
    assert ("cvt tf32" in kernel.found) == (name == "tf32x3")
    assert ("mma s8" in kernel.found) == (name == "int8")
    # On Hopper, where the tiles were chosen, nothing spills; elsewhere a few words around the last store.
    assert kernel.spills <= (0 if sm == 90 or name == "ieee" else 128)


def test_float32_left_to_triton_is_tf32():
    a = torch.empty(4096, 4096, device="meta")
    default, tf32 = (compile_for(dot, (a, a.t(), *given), sms=(90,))[0] for given in ((), ("tf32",)))
    assert default.found == tf32.found


def test_every_dtype_has_a_precision():
    assert {precision.dtype for precision in PRECISIONS.values()} == set(DTYPES)
