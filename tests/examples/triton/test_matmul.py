"""matmul: every configuration on poisoned outputs, every edge of a tile, strides, precisions, bad input, the code."""

from harness.check import CheckError
from harness.codegen import compile_for
from harness.hardware import SHARED_LIMIT, Limits

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.triton.matmul import (
    CONFIGS,
    DTYPES,
    PRECISIONS,
    TILES,
    fitting_configs,
    matmul,
    matmul_kernel,
    reference,
)

# One element, a prime, one tile plus one in each dimension in turn, long and thin, nothing to sum.
SHAPES = [(1, 1, 1), (37, 53, 61), (129, 64, 64), (64, 257, 64), (64, 64, 65), (1, 300, 40), (300, 1, 40), (5, 7, 0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_shapes(h, shape, dtype):
    M, N, K = shape
    h.check(matmul, reference, h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype), terms=K)


@given(M=st.integers(0, 200), N=st.integers(0, 200), K=st.integers(0, 150), group_m=st.integers(1, 9))
def test_any_shape(M, N, K, group_m):
    from harness.catalog import Needs
    from harness.session import Harness

    h = Harness("test", Needs.parse("triton"))
    a, b = h.randn(M, K, dtype=torch.float16), h.randn(K, N, dtype=torch.float16)
    h.check(lambda a, b: matmul(a, b, group_m=group_m), reference, a, b, terms=K, what=f"{M}x{N}x{K}")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "x".join(map(str, c.kwargs.values())) + f"-{c.num_stages}")
@pytest.mark.parametrize("shape", [(260, 130, 70), (128, 520, 64)])
def test_every_configuration(h, config, shape):
    """Each one alone, on poisoned memory: a grid for another tile size would leave part of C unwritten."""
    dtype = torch.float16 if config.kwargs["BLOCK_K"] == 64 else torch.float32
    M, N, K = shape

    def one_config(a, b):
        c = torch.empty((M, N), dtype=a.dtype, device=a.device)
        grid = (triton.cdiv(M, config.kwargs["BLOCK_M"]) * triton.cdiv(N, config.kwargs["BLOCK_N"]),)
        precision = "tf32x3" if dtype is torch.float32 else "ieee"
        matmul_kernel.fn[grid](
            a,
            b,
            c,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            *c.stride(),
            GROUP_M=3,
            PRECISION=precision,
            **config.all_kwargs(),
        )
        return c

    h.check(one_config, reference, h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype), terms=K)


def test_a_grid_of_another_tile_size_is_caught(h):
    """The bug that the check exists for: the grid computed for large tiles, the kernel run with small ones."""
    config = CONFIGS[TILES.index((64, 64, 64, 4, 4))]

    def wrong_grid(a, b):
        c = torch.empty((256, 256), dtype=a.dtype, device=a.device)
        matmul_kernel.fn[(triton.cdiv(256, 128) * triton.cdiv(256, 128),)](
            a,
            b,
            c,
            256,
            256,
            64,
            *a.stride(),
            *b.stride(),
            *c.stride(),
            GROUP_M=8,
            PRECISION="ieee",
            **config.all_kwargs(),
        )
        return c

    with pytest.raises(CheckError, match="are NaN where the reference is not"):
        h.check(wrong_grid, reference, h.randn(256, 64, dtype=h.half), h.randn(64, 256, dtype=h.half), terms=64)


def test_strides(h):
    a, b = h.randn(96, 160, dtype=h.half), h.randn(200, 320, dtype=h.half)
    for left, right in (
        (a.t(), b[:96, :100]),  # transposed; padded rows
        (a[:, ::2], b[:80, ::3]),  # every second, every third column
        (a[:1].expand(70, 160), b[:160]),  # a stride of 0
        (a[:, 1:], b[:159, 1:50]),  # starts that are not aligned
        (h.randn(50, 50, dtype=h.half).t(), h.randn(70, 50, dtype=h.half).t()),
    ):
        h.check(matmul, reference, left, right, terms=left.shape[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(512, 768, 1024), (1000, 520, 777), (16, 4096, 4096), (4096, 16, 512), (1, 1, 50_000)]
)
def test_shapes_on_the_gpu(h, dtype, shape):
    M, N, K = shape
    h.check(matmul, reference, h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype), terms=K)


@pytest.mark.gpu
def test_precisions(h):
    """ieee is float32, tf32 rounds the operands to 10 bits, tf32x3 gets most of float32 back."""
    a, b = h.randn(512, 1024), h.randn(1024, 512)
    want = reference(a, b)
    error = {p: (matmul(a, b, input_precision=p).double() - want).abs().mean().item() for p in PRECISIONS}
    assert error["ieee"] < error["tf32"] / 50
    assert error["tf32x3"] < error["tf32"] / 50

    def check(precision, **budget):
        h.check(lambda a, b: matmul(a, b, precision), reference, a, b, what=precision, terms=1024, **budget)

    check("ieee")
    check("tf32x3")
    check("tf32", operand_eps=2**-11)
    with pytest.raises(CheckError):
        check("tf32")


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(40)
    wide = 2**31 // 64 + 64
    a = torch.empty(wide, 64, dtype=torch.bfloat16, device=h.device).normal_()
    b = h.randn(64, 64, dtype=torch.bfloat16)
    c = matmul(a, b)
    for part in (slice(0, 100), slice(-100, None)):
        h.check(lambda *_, part=part: c[part], reference, a[part].contiguous(), b, terms=64, what="tall")
    del c
    c = matmul(b, a.t())
    for part in (slice(0, 100), slice(-100, None)):
        last = a.t()[:, part].contiguous()
        h.check(lambda *_, part=part: c[:, part].contiguous(), reference, b, last, terms=64, what="wide")


@pytest.mark.parametrize("sm", sorted(SHARED_LIMIT))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_pruning_leaves_what_fits_and_never_nothing(monkeypatch, sm, dtype, precision):
    monkeypatch.setattr("examples.triton.matmul.device_limits", lambda device: Limits(100, SHARED_LIMIT[sm]))
    for M, N in ((1, 1), (16, 4096), (4096, 4096), (70, 1)):
        a = torch.empty(M, 8, dtype=dtype, device="meta")
        left = fitting_configs(CONFIGS, {"a_ptr": a, "M": M, "N": N}, PRECISION=precision)
        assert left
        for config in left:
            m, n, k = (config.kwargs[f"BLOCK_{axis}"] for axis in "MNK")
            assert (m + n) * k * a.element_size() * (config.num_stages - 1) <= SHARED_LIMIT[sm]
            assert k * a.element_size() == 128


def _bad(device):
    a, b = torch.randn(4, 8, device=device), torch.randn(8, 5, device=device)
    return {
        "no tensor": (([1.0], b), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((a.int(), b.int()), TypeError, r"torch\.int32"),
        "float64": ((a.double(), b.double()), TypeError, r"torch\.float64"),
        "two dtypes": ((a, b.half()), TypeError, r"torch\.float32 and torch\.float16"),
        "a vector": ((a, b[:, 0]), ValueError, r"shapes \(4, 8\) and \(8,\); need \[M, K\] and \[K, N\]"),
        "a batch": ((a.reshape(1, 4, 8), b.reshape(1, 8, 5)), ValueError, "need"),
        "inner sizes": ((a, b.t()), ValueError, r"shapes \(4, 8\) and \(5, 8\)"),
        "a precision": ((a, b, "tf19"), ValueError, "input_precision 'tf19' is not one of"),
        "a group of none": ((a, b, "ieee", 0), ValueError, "group_m is 0"),
        "a group of a half": ((a, b, "ieee", 1.5), ValueError, r"group_m is 1\.5"),
        "a group in words": ((a, b, "ieee", "8"), ValueError, "group_m is '8'"),
        "no precision": ((a, b, None), ValueError, "input_precision None is not one of"),
        "requires grad": ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        "two devices": ((a, b.to("meta")), ValueError, "move them to one device"),
        "a device without kernels": ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"matmul: .*{message}"):
        matmul(*args)


EVIDENCE = {80: ("cp.async", "mma.sync"), 89: ("cp.async", "mma.sync"), 90: ("cp.async", "wgmma"),
            100: ("cp.async", "tcgen05.mma", "kind::f16"), 120: ("cp.async", "mma.sync")}  # fmt: skip


@pytest.mark.parametrize("sm", EVIDENCE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_tensor_core_instruction_of_each_architecture(sm, dtype):
    a = torch.empty(4096, 4096, dtype=dtype, device="meta")
    (kernel,) = compile_for(matmul, (a, a), sms=(sm,))
    assert kernel.error is None
    assert kernel.fits
    assert all(kernel.found.get(name) for name in EVIDENCE[sm]), kernel.found
    assert kernel.spills == 0


@pytest.mark.parametrize("config", range(5))
def test_no_configuration_spills_on_hopper(config):
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(matmul, (a, a), sms=(90,), config=config)
    assert kernel.spills == 0
    assert kernel.found["wgmma"]


@pytest.mark.parametrize(
    ("precision", "instruction"), [("ieee", "fma.f32"), ("tf32", "mma tf32"), ("tf32x3", "mma tf32")]
)
def test_float32_runs_what_its_precision_says(precision, instruction):
    a = torch.empty(512, 512, device="meta")
    (kernel,) = compile_for(matmul, (a, a), {"input_precision": precision}, sms=(90,))
    assert kernel.error is None
    assert kernel.found[instruction]
    assert ("wgmma" in kernel.found) == (precision != "ieee")
