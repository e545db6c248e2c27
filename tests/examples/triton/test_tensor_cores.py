"""tensor_cores: every precision at every edge of its tile, int8 exactly, what rounding predicts, the instructions."""

from harness.check import CheckError
from harness.codegen import compile_for
from harness.hardware import interpreted

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.triton.tensor_cores import (
    DTYPES,
    INPUT_PRECISIONS,
    MAX_K_INT8,
    PRECISIONS,
    TENSOR_CORES,
    TF32_EPS,
    budget,
    dot,
    evidence,
    mantissa,
    operands,
    predicted,
    product,
    reference,
    relative_error,
    torch_tf32,
)

NAMES = [pytest.param(name, marks=pytest.mark.gpu if name == "bfloat16" else ()) for name in PRECISIONS]


def run(h, name, a, b, **more):
    precision = PRECISIONS[name].input_precision
    h.check(lambda a, b: dot(a, b, precision), reference, a, b, what=name, **(budget(name, a.shape[1]) | more))


# One element, primes, one tile plus one in each dimension in turn, long and thin, nothing to sum.
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (37, 53, 61), (129, 64, 64), (64, 257, 32), (16, 16, 129), (1, 300, 40), (300, 2, 40), (5, 7, 0)],
)
@pytest.mark.parametrize("name", NAMES)
def test_shapes(h, name, shape):
    run(h, name, *operands(h, name, *shape))


@given(
    M=st.integers(0, 200), N=st.integers(2, 300), K=st.integers(0, 150),
    name=st.sampled_from([name for name in PRECISIONS if not (interpreted() and name == "bfloat16")]),
)  # fmt: skip
def test_any_shape(M, N, K, name):
    from harness.catalog import Needs
    from harness.session import Harness

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
    if (
        name == "float16"
    ):  # a third of the results is beyond its range; float32, which sums the others, has no such room
        factor = (info.max / 65**0.5) ** 0.5
        run(h, name, a * factor, b * factor)
    special = a.clone()
    special[3, 5], special[7, 0], special[9, 64], special[11] = float("inf"), float("nan"), float("-inf"), 0.0
    run(h, name, special, b)
    run(h, name, a * 1e-3, b * 1e-3)


@pytest.mark.parametrize(("name", "expected"), [("float16", 2**-10), ("bfloat16", 2**-7), ("tf32", 2**-10)])
def test_what_rounding_predicts_follows_from_the_bits(h, name, expected):
    """Rounding to the nearest leaves a uniform error of 0.2 units of the last bit in each operand and in the result.

    Mantissas m of normal numbers are about log-uniform, E[m^2] = 3 / (2 ln 2), and eps / sqrt(12 E[m^2]) = 0.196 eps.
    """
    a, b = h.randn(256, 512), h.randn(512, 256)
    rms, _ = relative_error(predicted(a, b, name), reference(a, b))
    roundings = 2 if name == "tf32" else 3  # a float32 result is not rounded any further
    assert rms == pytest.approx(0.196 * expected * roundings**0.5, rel=0.1)
    if name == "tf32":  # cutting leaves twice the error, and it is one-sided
        cut, _ = relative_error(predicted(a, b, name, cut=True), reference(a, b))
        assert 2.3 * rms < cut < 2.9 * rms


def test_mantissas():
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 2**-11 + 2**-20, 1 + 2**-12, -1 - 2**-11, -1 - 2**-12, 0.0, 3.0])
    up = 1 + 2**-10
    assert mantissa(x, 10).tolist() == [up, up, up, 1.0, -up, -1.0, 0.0, 3.0]
    assert mantissa(x, 10, cut=True).tolist() == [up, 1.0, 1.0, 1.0, -1.0, -1.0, 0.0, 3.0]


@pytest.mark.parametrize("name", ["float16", "int8", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def test_the_error_is_what_rounding_predicts(h, name):
    a, b = h.randn(128, 512), h.randn(512, 128)
    measured, _ = relative_error(product(a, b, name), reference(a, b))
    rounding, _ = relative_error(predicted(a, b, name), reference(a, b))
    assert measured == pytest.approx(rounding, rel=0.02)


@pytest.mark.gpu
def test_the_error_of_float32_by_precision(h):
    a, b = h.randn(512, 1024), h.randn(1024, 512)
    want = reference(a, b)
    error = {name: relative_error(product(a, b, name), want)[0] for name in INPUT_PRECISIONS}
    assert error["ieee"] < error["tf32"] / 50
    assert error["tf32x3"] < error["tf32"] / 50
    explained = [relative_error(predicted(a, b, "tf32", cut), want)[0] for cut in (False, True)]
    assert any(error["tf32"] == pytest.approx(x, rel=0.1) for x in explained)
    default = relative_error(dot(a, b).double(), want)[0]
    assert default == pytest.approx(error["tf32"], rel=0.01)
    with pytest.raises(CheckError):  # the budget of float32 is not one that tf32 meets
        run(h, "tf32", a, b, operand_eps=0.0)
    run(h, "tf32", a, b, operand_eps=TF32_EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("shape", [(512, 768, 1024), (1000, 520, 777), (16, 4096, 4096), (4096, 16, 512)])
def test_shapes_on_the_gpu(h, name, shape):
    run(h, name, *operands(h, name, *shape))


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(12)
    tall = 2**31 // 64 + 64
    a = torch.randint(-128, 128, (tall, 64), dtype=torch.int8, device=h.device)
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


def test_the_library_is_back_in_float32_afterwards():
    before = torch.get_float32_matmul_precision()
    with torch_tf32():
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(KeyError), torch_tf32():
        raise KeyError
    assert torch.get_float32_matmul_precision() == before


def _bad(device):
    a, b = torch.randn(4, 8, device=device), torch.randn(8, 5, device=device)
    long = torch.zeros(1, MAX_K_INT8 + 1, dtype=torch.int8, device=device)
    return {
        "no tensor": (([1.0], b), TypeError, r"expected a torch\.Tensor, got list"),
        "int32": ((a.int(), b.int()), TypeError, r"torch\.int32"),
        "uint8": ((a.byte(), b.byte()), TypeError, r"torch\.uint8"),
        "float64": ((a.double(), b.double()), TypeError, r"torch\.float64"),
        "two dtypes": ((a, b.half()), TypeError, r"torch\.float32 and torch\.float16"),
        "a vector": ((a, b[:, 0]), ValueError, r"shapes \(4, 8\) and \(8,\); need \[M, K\] and \[K, N\]"),
        "a batch": ((a.reshape(1, 4, 8), b.reshape(1, 8, 5)), ValueError, "need"),
        "inner sizes": ((a, b.t()), ValueError, r"shapes \(4, 8\) and \(5, 8\)"),
        "a precision": ((a, b, "tf19"), ValueError, r"input_precision 'tf19' is not one of .*, nor None"),
        "a precision for float16": (
            (a.half(), b.half(), "tf32"),
            ValueError,
            "for float32, not torch.float16; leave it",
        ),
        "a precision for int8": ((a.char(), b.char(), "ieee"), ValueError, r"for float32, not torch\.int8"),
        "an int8 sum too long": ((long, long.t()), ValueError, rf"K is {MAX_K_INT8 + 1}, .* may overflow; split K"),
        "requires grad": ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta")), ValueError, "move them to one device"),
        "a device without kernels": ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"dot: .*{message}"):
        dot(*args)


def test_bfloat16_is_refused_where_it_would_be_wrong(h):
    if not interpreted():
        pytest.skip("kernels are compiled here")
    a = torch.zeros(4, 4, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="dot: Triton's interpreter computes bfloat16 wrongly"):
        dot(a, a)


def compiled(name, sm):
    precision = PRECISIONS[name]
    a = torch.empty(4096, 4096, dtype=precision.dtype, device="meta")
    b = a.t() if precision.k_major else a
    (kernel,) = compile_for(dot, (a, b, precision.input_precision), sms=(sm,))
    assert kernel.error is None
    assert kernel.fits
    return kernel


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("name", PRECISIONS)
def test_the_instruction_of_each_precision(name, sm):
    kernel = compiled(name, sm)
    # 89 and 120 have the instructions of 80.
    wanted = evidence(name)[{89: 80, 120: 80}.get(sm, sm)]
    assert all(kernel.found.get(instruction) for instruction in wanted), kernel.found
    on_tensor_cores = [instruction for instruction in TENSOR_CORES if instruction in kernel.found]
    assert len(on_tensor_cores) == (name != "ieee")
    assert ("mma tf32" in kernel.found) == name.startswith("tf32")
    assert ("cvt tf32" in kernel.found) == (name == "tf32x3")
    assert ("mma s8" in kernel.found) == (name == "int8")
    # On Hopper, where the tiles were chosen, nothing spills; elsewhere a few words around the last store.
    assert kernel.spills <= (0 if sm == 90 or name == "ieee" else 128)


def test_float32_left_to_triton_is_tf32():
    a = torch.empty(4096, 4096, device="meta")
    for sm in (80, 90):
        (default,) = compile_for(dot, (a, a.t()), sms=(sm,))
        (tf32,) = compile_for(dot, (a, a.t(), "tf32"), sms=(sm,))
        assert default.found == tf32.found


def test_every_dtype_has_a_precision():
    assert {precision.dtype for precision in PRECISIONS.values()} == set(DTYPES)
