"""matmul: every configuration on poisoned outputs, every edge of a tile, strides, precisions, bad input, the code."""

from harness.catalog import Needs
from harness.check import CheckError
from harness.codegen import compile_for
from harness.session import Harness

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.triton.matmul import (
    CONFIGS,
    DTYPES,
    PRECISIONS,
    fitting_configs,
    matmul,
    matmul_kernel,
    reference,
    tuned_kernel,
)

# One element, a prime, one tile plus one in each dimension in turn, long and thin, nothing to sum.
SHAPES = [(1, 1, 1), (37, 53, 61), (129, 64, 64), (64, 257, 64), (64, 64, 65), (1, 300, 40), (300, 1, 40), (5, 7, 0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_shapes(h, dtype):
    for M, N, K in SHAPES:
        a, b = h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype)
        h.check(matmul, reference, a, b, terms=K, what=f"{M}x{N}x{K}")


@given(M=st.integers(0, 200), N=st.integers(0, 200), K=st.integers(0, 150), group_m=st.integers(1, 9))
def test_any_shape(M, N, K, group_m):
    h = Harness("test", Needs.parse("triton"))
    a, b = h.randn(M, K, dtype=torch.float16), h.randn(K, N, dtype=torch.float16)
    h.check(lambda a, b: matmul(a, b, group_m=group_m), reference, a, b, terms=K, what=f"{M}x{N}x{K}")


def one_config(config, a, b):
    m, n, k = config.kwargs.values()
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    precision = "tf32x3" if a.dtype is torch.float32 else "ieee"
    matmul_kernel[(triton.cdiv(M, m) * triton.cdiv(N, n),)](
        a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(),
        GROUP_M=3, PRECISION=precision, EVEN_K=K % k == 0, **config.all_kwargs(),
    )  # fmt: skip
    return c


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "x".join(map(str, c.kwargs.values())) + f"-{c.num_stages}")
def test_every_configuration(h, config):
    """Each one alone, on poisoned memory: a grid for another tile size would leave part of C unwritten."""
    dtype = torch.float16 if config.kwargs["BLOCK_K"] == 64 else torch.float32
    for M, N, K in [(260, 130, 70), (128, 520, 64)]:
        a, b = h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype)
        h.check(lambda a, b: one_config(config, a, b), reference, a, b, terms=K, what=f"{M}x{N}x{K}")


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
def test_shapes_on_the_gpu(h, dtype):
    for M, N, K in [(512, 768, 1024), (1000, 520, 777), (16, 4096, 4096), (4096, 16, 512), (1, 1, 50_000)]:
        a, b = h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype)
        h.check(matmul, reference, a, b, terms=K, what=f"{M}x{N}x{K}")


@pytest.mark.gpu
def test_precisions(h):
    """ieee is float32, tf32 rounds the operands to 10 bits, tf32x3 gets most of float32 back."""
    a, b = h.randn(512, 1024), h.randn(1024, 512)
    want = reference(a, b)
    error = {p: (matmul(a, b, input_precision=p).double() - want).abs().mean().item() for p in PRECISIONS}
    assert max(error["ieee"], error["tf32x3"]) < error["tf32"] / 50

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
    a = torch.empty(2**31 // 64 + 64, 64, dtype=torch.bfloat16, device=h.device).normal_()
    b = h.randn(64, 64, dtype=torch.bfloat16)
    for left, right, part in [(a, b, lambda x, ends: x[ends]), (b, a.t(), lambda x, ends: x[:, ends].contiguous())]:
        c = matmul(left, right)
        for ends in (slice(0, 100), slice(-100, None)):
            given = [part(x, ends) if x is not b else x for x in (left, right)]
            h.check(lambda *_, ends=ends, c=c, part=part: part(c, ends), reference, *given, terms=64, what="long")
        del c


def test_pruning_leaves_what_fits_and_never_nothing(monkeypatch):
    for sm, limit in SHARED_LIMIT.items():
        monkeypatch.setattr("examples.triton.matmul.device_limits", lambda _, limit=limit: Limits(100, limit))
        for dtype in DTYPES:
            for M, N in ((1, 1), (16, 4096), (4096, 4096), (70, 1)):
                a = torch.empty(M, 8, dtype=dtype, device="meta")
                left = fitting_configs(CONFIGS, {"a_ptr": a, "M": M, "N": N}, PRECISION="ieee")
                assert left, (sm, dtype, M, N)
                for config in left:
                    m, n, k = config.kwargs.values()
                    assert (m + n) * k * a.element_size() * (config.num_stages - 1) <= limit
                    assert k * a.element_size() == 128
                    assert max(m, 64) <= max(64, 2 * M)
                    assert max(n, 64) <= max(64, 2 * N)
    assert len(fitting_configs(CONFIGS, {"a_ptr": torch.empty(9, 9, dtype=torch.float16), "M": 4096, "N": 4096})) == 5


def test_the_search_knows_what_decides():
    """A tile that suits one size, layout or precision is another's worst: all of them are in the key."""
    assert set(tuned_kernel.keys) == {"M", "N", "K", "stride_ak", "stride_bk", "PRECISION"}


def test_bad_input(h):
    a, b = h.randn(4, 8), h.randn(8, 5)
    for args, error, message in [
        (([1.0], b), TypeError, r"expected a torch\.Tensor, got list"),
        ((a.int(), b.int()), TypeError, r"torch\.int32"),
        ((a.double(), b.double()), TypeError, r"torch\.float64"),
        ((a, b.half()), TypeError, r"torch\.float32 and torch\.float16"),
        ((a, b[:, 0]), ValueError, r"shapes \(4, 8\) and \(8,\); need \[M, K\] and \[K, N\]"),
        ((a.reshape(1, 4, 8), b.reshape(1, 8, 5)), ValueError, "need"),
        ((a, b.t()), ValueError, r"shapes \(4, 8\) and \(5, 8\)"),
        ((a, b, "tf19"), ValueError, "input_precision 'tf19' is not one of"),
        ((a, b, None), ValueError, "input_precision None is not one of"),
        *(((a, b, "ieee", group_m), ValueError, "group_m is") for group_m in (0, 1025, 1.5, "8")),
        ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        ((a, b.to("meta")), ValueError, "move them to one device"),
        ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    ]:
        with pytest.raises(error, match=f"matmul: .*{message}"):
            matmul(*args)


EVIDENCE = {80: ("cp.async", "mma.sync"), 89: ("cp.async", "mma.sync"), 90: ("cp.async", "wgmma"),
            100: ("cp.async", "tcgen05.mma", "kind::f16"), 120: ("cp.async", "mma.sync")}  # fmt: skip


@pytest.mark.parametrize("sm", EVIDENCE)
def test_the_tensor_core_instruction_of_each_architecture(sm):
    a = torch.empty(4096, 4096, dtype=torch.float16 if sm == 89 else torch.bfloat16, device="meta")
    (kernel,) = compile_for(matmul, (a, a), sms=(sm,))
    assert kernel.error is None
    assert kernel.fits
    assert all(kernel.found.get(name) for name in EVIDENCE[sm]), kernel.found
    assert kernel.spills == 0


@pytest.mark.parametrize("config", range(1, 5))
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
