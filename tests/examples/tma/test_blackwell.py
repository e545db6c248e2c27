"""blackwell: numerics interpreted, the kernels by hand on a model of an SM, refusals, what their code describes."""

import functools
import re

from harness.codegen import dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3, E5M2
from examples.common.microscaling import FORMATS, dequantize, swizzle_scales
from examples.fp8.microscaling import budget as mx_budget
from examples.fp8.microscaling import mx_matmul
from examples.tma import blackwell, blackwell_compiled, blackwell_plan, blackwell_scaled
from examples.tma.blackwell import blackwell_matmul, reference
from examples.tma.blackwell_compiled import LARGE, SMALL
from examples.tma.blackwell_plan import COLUMNS, VARIANTS, budget, by_hand_plan, runnable, scale_columns
from examples.tma.blackwell_scaled import blackwell_mx_matmul
from tests.examples.tma.helpers import check_tall_and_wide, launches, odd_operands
from tests.examples.tma.model import no_shrinking, use_model
from tests.examples.triton.helpers import harness, refused

HALF, FP4 = torch.float16, torch.float4_e2m1fn_x2


def check(h, M, N, K, variant, dtype=HALF, out=HALF):
    a, b = h.randn(M, K, dtype=dtype), h.randn(N, K, dtype=dtype)
    fn = functools.partial(blackwell_matmul, variant=variant, out_dtype=out)
    h.check(fn, reference, a, b, what=f"{variant} {M}x{N}x{K} {dtype} {out}", dtype=out, **budget(dtype, K))


def scaled(h, rows, K, fmt):
    """Values, their scales, the tensor's scale, and what they stand for."""
    form = FORMATS[fmt]
    q = h.randn(rows, K, dtype=E4M3) if form.pack == 1 else h.randint(256, rows, K // 2).to(torch.uint8).view(FP4)
    scale = h.randint(4, rows, K // form.group) + (0x30 if form.scale is E4M3 else 124)  # from 0.5 or 1/8 on
    scale, whole = scale.to(torch.uint8).view(form.scale), h.randn(1).abs() if fmt == "nvfp4" else None
    return q, swizzle_scales(scale), whole, dequantize(q, scale, fmt, whole)


def check_scaled(h, M, N, K, fmt, out=HALF, **more):
    (a, a_scale, a_whole, x), (b, b_scale, b_whole, y) = (scaled(h, rows, K, fmt) for rows in (M, N))
    fn = functools.partial(blackwell_mx_matmul, fmt=fmt, out_dtype=out, a_tensor_scale=a_whole, b_tensor_scale=b_whole)
    what = f"scaled {fmt} {M}x{N}x{K} {out}"
    h.check(fn, lambda *_: x @ y.T, a, a_scale, b, b_scale, what=what, dtype=out, **more or {"terms": K})


def scale_groups(fmt):
    """Of a row in a step of K."""
    return 128 * FORMATS[fmt].pack // FORMATS[fmt].group


def on_model(monkeypatch, seed, sms):
    kernels = {"matmul_by_hand_kernel": blackwell, "matmul_scaled_kernel": blackwell_scaled}
    monkeypatch.setattr(blackwell_plan, "gluon_architecture", lambda device: 100)
    return use_model(monkeypatch, kernels, seed, sms)


@no_shrinking
@given(
    M=st.integers(1, 300), N=st.integers(1, 65), K=st.integers(0, 12), sms=st.integers(1, 5),
    seed=st.integers(0, 10**6), dtype=st.sampled_from([HALF, E5M2]),
)  # fmt: skip
def test_any_order_of_events_is_right(M, N, K, sms, seed, dtype):
    """Also that tensor memory is what the plan counts."""
    h = harness()
    for fmt in (None, *FORMATS):
        with pytest.MonkeyPatch.context() as patch:
            ran = on_model(patch, seed, sms)
            check_scaled(h, M, 8 * N, 32 * K, fmt) if fmt else check(h, M, 8 * N, 32 * K, "by hand", dtype)
        groups = scale_groups(fmt) if fmt else 0
        block_m, block_n, _, _, stages, accs = by_hand_plan(SHARED_LIMIT[100], groups)
        assert {sm.columns for sm in ran} <= {accs * block_n + scale_columns(block_m, block_n, groups, stages)}


def test_dtypes_layouts_extremes_and_nothing_to_do(h):
    for variant in runnable(h.device):
        for shape, dtype, out in [
            ((37, 16, 112), E5M2, torch.bfloat16), ((129, 264, 144), HALF, torch.bfloat16), ((0, 8, 16), HALF, HALF),
            ((5, 0, 16), E5M2, HALF),
        ]:  # fmt: skip
            check(h, *shape, variant, dtype, out)
        for x, y in odd_operands(h):
            fn = functools.partial(blackwell_matmul, variant=variant)
            h.check(fn, reference, x, y, what=f"{variant} {x.stride()}", terms=x.shape[1])
    for dtype, out in [(HALF, HALF), (E4M3, torch.bfloat16)]:
        assert blackwell_matmul(h.randn(5, 32, dtype=dtype), h.randn(8, 32, dtype=dtype)).dtype is out


@pytest.mark.parametrize(("sms", "sm", "variant"), [(1, 100, 0), (3, 120, 1), (1000, 100, 1)])
def test_every_tile_is_taken_once(h, monkeypatch, variant, sms, sm):
    """Also more rows of tiles than a group has, and the small tile of 99 KiB."""
    shared_bytes = SHARED_LIMIT[sm] if h.interpreted else blackwell.device_limits(h.device).shared_bytes
    monkeypatch.setattr(blackwell_compiled, "device_limits", lambda device: Limits(sms, shared_bytes))
    check(h, 300, 520, 32, VARIANTS[variant])
    check(h, (blackwell_plan.GROUP_M + 1) * LARGE[0] + 1, 264, 16, VARIANTS[variant])


def test_columns_and_steps_of_k(monkeypatch):
    """Two accumulators of 128 x 256 in float32 are all of tensor memory; scales leave room for one. A step of K is 128
    bytes of a row."""
    assert [blackwell_plan.allocated_columns(n) for n in (1, 33, 2 * 256)] == [32, 64, COLUMNS]
    assert by_hand_plan(SHARED_LIMIT[100]) == (128, 256, 64, 2, 4, 2)
    for groups in map(scale_groups, FORMATS):
        block_m, block_n, _, _, stages, accs = by_hand_plan(SHARED_LIMIT[100], groups)
        assert (accs, stages >= 3) == (1, True)
        first = accs * block_n
        for rows in (block_n, block_m):  # Triton 3.6 adds to an address by OR: a place begins at a multiple of its size
            assert first % scale_columns(rows, 0, groups, 1) == 0
            first += scale_columns(rows, 0, groups, stages)
        assert first <= COLUMNS
    launched = launches(monkeypatch, blackwell_compiled, "matmul_persistent_kernel")
    for sm, tile, dtype in [(90, LARGE, HALF), (120, SMALL, E4M3)]:
        monkeypatch.setattr(blackwell_compiled, "device_limits", lambda device, sm=sm: Limits(132, SHARED_LIMIT[sm]))
        a, b, c = (torch.empty(512, 512, dtype=each) for each in (dtype, dtype, HALF))
        blackwell_compiled.launch_by_the_compiler(a, b, c, True)
        options, (a_desc, b_desc, c_desc, *_) = launched[-1].options, launched[-1].args
        step = 128 // dtype.itemsize
        assert options["BLOCK_K"] == step
        assert [list(each.block_shape) for each in (a_desc, b_desc)] == [[tile[0], step], [tile[1], step]]
        ring = options["num_stages"] * (tile[0] + tile[1]) * 128
        assert ring + 2 * c_desc.block_shape[0] * c_desc.block_shape[1] <= SHARED_LIMIT[sm]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF, E4M3, E5M2])
def test_on_the_gpu(h, monkeypatch, dtype):
    """Real sizes; a ring that is shorter, as long and longer than a tile. (That every launch gives the same bits is in
    tests/test_blackwell_optimizations.py.)"""
    for variant in runnable(h.device):
        for shape in [(4096, 4096, 4096), (1000, 5208, 784), (16, 8192, 4096), (8191, 264, 512)]:
            check(h, *shape, variant, dtype, torch.bfloat16)
    for fmt in FORMATS if blackwell_plan.has_tensor_memory(h.machine.sm) else ():
        for shape in [(1, 8, 32), (129, 264, 288), (1024, 2048, 4096), (1000, 1112, 4128)]:
            check_scaled(h, *shape, fmt, torch.bfloat16, **mx_budget(shape[2]))
    limits = blackwell.device_limits(h.device)
    for sms in (1, 2, 7, 132):
        for module in (blackwell, blackwell_compiled, blackwell_scaled):
            monkeypatch.setattr(module, "device_limits", lambda device, sms=sms: limits._replace(sms=sms))
        for steps in (1, 2, 3, 4, 5, 8, 9):
            for variant in runnable(h.device):
                check(h, 700, 1288, 64 * steps - 32 * (steps % 2), variant, dtype, torch.bfloat16)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(30)
    for variant in runnable(h.device):
        check_tall_and_wide(h, functools.partial(blackwell_matmul, variant=variant))


def test_bad_input_and_other_gpus(h, monkeypatch):
    a, b, odd = (h.randn(n, dtype=HALF)[n % 2 :].view(-1, 32) for n in (128, 512, 129))
    q, scale = h.randn(8, 64, dtype=E4M3), torch.zeros(1, 1, 32, 16).to(h.device).to(FORMATS["mxfp8"].scale)
    mx = (q, scale, q, scale, "mxfp8")
    for fn, args, message in [
        (blackwell_matmul, (a, b.to(E4M3)), r"dtypes torch\.float16 and torch\.float8_e4m3fn"),
        (blackwell_matmul, (a, b, "faster"), r"variant 'faster' is not one of \('pipelined', "),
        (blackwell_matmul, (a, b, "pipelined", torch.float32), r"out_dtype torch\.float32 is not one of"),
        (blackwell_matmul, (a, b[:12]), "N is 12; TMA .*pad b to a multiple of 8 rows"),
        (blackwell_matmul, (a[:, :12], b[:, :12]), "K is 12; TMA .*pad it to a multiple of 8"),
        (blackwell_matmul, (a[:, :8].to(E4M3), b[:, :8].to(E4M3)), "K is 8; .*a multiple of 16"),
        (blackwell_matmul, (odd, b), "a has .* starts 2 bytes past a multiple of 16"),
        (blackwell_mx_matmul, (*mx[:4], "mxfp6"), "format 'mxfp6' is not one"),
        (blackwell_mx_matmul, (q.view(torch.uint8).view(FP4), *mx[1:]), r"a is torch\.float4_e2m1fn_x2"),
        (blackwell_mx_matmul, (q, scale.view(torch.uint8).view(E4M3), *mx[2:]), r"with scales in torch\.float8_e4m3fn"),
        (blackwell_mx_matmul, (q[:, :48], *mx[1:]), "K of a is 48; need a multiple of 32"),
        (blackwell_mx_matmul, (q, scale[0, 0], *mx[2:]), "scales of a have .*swizzle_scales"),
        (blackwell_mx_matmul, (q, scale, q[:, :32], scale, "mxfp8"), r"shapes \(8, 64\) and \(8, 32\)"),
        (blackwell_mx_matmul, (*mx, HALF, torch.ones(1, device=h.device)), "mxfp8 has no scale for the tensor"),
    ]:
        refused(fn, (TypeError, ValueError), message, *args)
    x, mx = h.randn(8, 16, dtype=HALF), scaled(h, 8, 32, "mxfp8")[:2]
    for sm, variant, message in [
        (80, "pipelined", r"TMA comes with sm_90 \(this is sm_80\); use examples/triton/matmul.py"),
        (120, "by hand", r"tcgen05 and tensor memory come .* \(this is sm_120\); use variant='specialized'"),
        (None, "by hand", r"tcgen05 .* \(and Gluon kernels are not interpreted\); use"),
    ]:
        monkeypatch.setattr(blackwell_plan, "gluon_architecture", lambda device, sm=sm: sm)
        refused(blackwell_matmul, RuntimeError, message, x, x, variant)
        refused(blackwell_mx_matmul, RuntimeError, "tcgen05 .* use mx_matmul of", *mx, *mx, "mxfp8")


def instruction_descriptors(ptx):
    """The numbers that tell tcgen05.mma its formats, shape and scales."""
    found = set()
    for line in re.findall(r"tcgen05\.mma\.[^;]*;", ptx):
        register = re.findall(r"%r\d+", line.split("]", 1)[1])[0]
        found |= set(re.findall(rf"mov\.b32 \t?{register}, (-?\d+);", ptx))
    return found


def test_mmas_are_described_as_the_compiler_describes_them(h):
    """And scales begin in the columns that are counted: those of b behind the accumulator, then those of a."""
    form, whole = FORMATS["nvfp4"], h.meta(1, dtype=torch.float32)
    q, scale = h.meta(4096, 2048, dtype=form.element), h.meta(32, 64, 32, 16).to(form.scale)
    args = (q, scale, q, scale, "nvfp4", torch.bfloat16, whole, whole)
    ours, theirs = (dump(fn, args, sm=100)["ptx"] for fn in (blackwell_mx_matmul, mx_matmul))
    assert instruction_descriptors(ours) == instruction_descriptors(theirs) != set()
    base = re.search(r"ld\.shared\.b32 \t(%r\d+), \[global_smem\]", ours).group(1)
    at = {int(n) for n in re.findall(rf"add\.s32 \t%r\d+, {base}, (\d+);", ours)}
    _, block_n, _, _, stages, accs = by_hand_plan(SHARED_LIMIT[100], scale_groups("nvfp4"))
    first = accs * block_n
    assert {first, first + scale_columns(block_n, 0, scale_groups("nvfp4"), stages)} <= at
