"""tensor_cores: every precision at every edge of its tile, int8 exactly, bad input, the instructions."""

import pytest
import torch

from examples.common.device import interpreted
from examples.triton.tensor_cores import MAX_K_INT8, dot, matrices, product, reference, rms_error
from examples.triton.tensor_cores_precisions import PRECISIONS, TENSOR_CORES, budget, convert
from tests.examples.triton.helpers import INF, NAN, code, meta, refused

NAMES = [name for name in PRECISIONS if not (interpreted() and name == "bfloat16")]


def operands(h, name, *shape):
    return convert(name, *matrices(h, name, *shape))


def run(h, name, a, b):
    precision = PRECISIONS[name].input_precision
    h.check(lambda a, b: dot(a, b, precision), reference, a, b, what=name, **budget(name, a.shape[1]))


@pytest.mark.parametrize("name", NAMES)
def test_edges_layouts_and_extremes(h, name):
    """One element, primes, one tile plus one in each dimension in turn, long and thin, nothing to sum; strides."""
    for shape in [(1, 1, 1), (37, 53, 61), (129, 64, 64), (64, 257, 32), (16, 16, 129), (300, 2, 40), (5, 7, 0)]:
        run(h, name, *operands(h, name, *shape))
    a, b = operands(h, name, 96, 160, 160)
    run(h, name, a[:, ::2], b[:80, ::3])  # every second, every third column
    run(h, name, a, b.t().contiguous().t())  # K-major
    if name == "int8" or name.startswith("tf32x"):
        return
    a, b = operands(h, name, 70, 90, 65)
    largest = torch.finfo(a.dtype).max
    # The first of float16: a third is beyond its range; the accumulator, float32, holds it.
    for factor in ((largest / 65**0.5) ** 0.5 if name == "float16" else 1.0, largest**0.5 / 16, 1e-3):
        run(h, name, a * factor, b * factor)
    a[3, 5], a[7, 0], a[9, 64], a[11] = INF, NAN, -INF, 0.0
    run(h, name, a, b)


def test_int8_is_exact_up_to_its_last_term(h):
    smallest = torch.full((3, 1000), -128, dtype=torch.int8, device=h.device)
    run(h, "int8", smallest, smallest.t())


@pytest.mark.gpu
def test_real_sizes_the_error_by_precision_and_more_elements_than_an_int32_counts(h, gpu_gib):
    for name in PRECISIONS:
        for shape in [(512, 768, 1024), (1000, 520, 777), (16, 4096, 4096), (4096, 16, 512)]:
            run(h, name, *operands(h, name, *shape))
    a, b = h.randn(512, 1024), h.randn(1024, 512)
    error = {name: rms_error(product(a, b, name), reference(a, b)) for name in ("ieee", "tf32", "tf32x3")}
    assert max(error["ieee"], error["tf32x3"]) < error["tf32"] / 50
    assert rms_error(dot(a, b).double(), reference(a, b)) == pytest.approx(error["tf32"], rel=0.01)
    gpu_gib(12)
    a = torch.randint(-128, 128, (2**31 // 64 + 64, 64), dtype=torch.int8, device=h.device)
    b = operands(h, "int8", 1, 8, 64)[1]
    c = dot(a, b)
    for part in (slice(0, 100), slice(-100, None)):
        h.check(lambda *_, part=part: c[part], reference, a[part].contiguous(), b, what="tall", dtype=torch.int32)
    a = torch.full((130, MAX_K_INT8), -128, dtype=torch.int8, device=h.device)  # the largest sum that an int32 holds
    run(h, "int8", a, a[:20].t())


def test_bad_input(h):
    a, b = h.randn(4, 8), h.randn(8, 5)
    long = torch.zeros(1, MAX_K_INT8 + 1, dtype=torch.int8, device=h.device)
    refused(dot, ValueError, "input_precision 'tf19' is not one of", a, b, "tf19")
    refused(dot, ValueError, r"for float32, not torch\.float16; leave it", a.half(), b.half(), "tf32")
    refused(dot, ValueError, rf"K is {MAX_K_INT8 + 1}, .* may overflow; split K", long, long.t())


@pytest.mark.parametrize("name", ["tf32x3", "int8", "default"])
def test_the_instruction_of_each_precision(name):
    """On Hopper, where the tiles were chosen, nothing spills; float32 that is left to Triton is tf32."""
    precision = PRECISIONS["tf32" if name == "default" else name]
    options = {} if name == "default" else {"input_precision": precision.input_precision}
    a = meta(4096, 4096, dtype=precision.dtype)
    kernel = code(90, TENSOR_CORES[90], dot, a, a.t() if precision.k_major else a, **options)
    assert all(each in kernel.found for each in precision.code)
    assert ("cvt tf32" in kernel.found) == (name == "tf32x3")
