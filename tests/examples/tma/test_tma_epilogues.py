"""tma_epilogues: every layer and variant at every edge, quantized bits, layouts, extremes, refusals, the code."""

import functools

from harness.codegen import dump

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from examples.common import gluon as common
from examples.common.activations import ACTIVATIONS
from examples.common.fp8 import E4M3, quantize_reference
from examples.common.quantize import read_back as read_groups
from examples.tma import tma_epilogues_hopper
from examples.tma import tma_epilogues_shared as shared
from examples.tma.tma_epilogues import budget, layer, linear, reference
from examples.tma.tma_epilogues_fp8 import linear_fp8
from examples.tma.tma_epilogues_shared import GROUP_M, TILES, choose, fitting_tile, runnable
from examples.tma.tma_epilogues_swiglu import swiglu
from studies.tma.tma_epilogues import reference_swiglu
from tests.examples.tma.helpers import launches, odd_operands, pretend
from tests.examples.tma.model import no_shrinking, use_model
from tests.examples.triton.helpers import INF, NAN, code, harness, meta, refused

LAUNCH = (tma_epilogues_hopper, shared)
# One rounding to e4m3, relative or, below its smallest normal, by the size of the row.
FP8_BUDGET = {"dtype": torch.float32, "roundings": 1, "acc": 2.0**-4 * 1.001, "terms": 0}


def read_back(q, scale):
    return q.float() * scale if scale.numel() == 1 else read_groups(q, scale, "group")


def check_linear(h, x, w, bias, activation, variant, what=None, **more):
    fn = functools.partial(linear, activation=activation, variant=variant)
    what = what or f"{activation} {variant} {tuple(x.shape)} {tuple(w.shape)}"
    kwargs = budget(h, x.shape[1]) | more
    h.check(fn, functools.partial(reference, activation=activation), x, w, bias, what=what, **kwargs)


def check_swiglu(h, x, w, up, variant):
    """Warp specialized, as on sm_90 by default, gate and up are rounded to 16 bits, and then their product."""
    fn = functools.partial(swiglu, variant=variant)
    stores = 3 if (variant or choose(h.device)) == "warp specialized" else 1
    h.check(fn, reference_swiglu, x, w, up, what=f"swiglu {variant}", **budget(h, x.shape[1]) | {"stores": stores})


def check_all(h, M, N, K):
    def fp8(*args):
        return read_back(*linear_fp8(*args))

    (x, w, up, bias), given = layer(h, M, N, K, weights=2), torch.full((1,), 8.0 / 448, device=h.device)
    for variant in runnable(h.device):
        check_linear(h, x, w, bias, "gelu", variant)
        check_swiglu(h, x, w, up, variant)
        for b, activation, scale in [(bias, "none", None), (None, "silu", given)]:
            args, what = (x, w, b, activation, scale, variant), f"fp8 {activation} {variant}"
            h.check(fp8, lambda *args: reference(*args[:4]), *args, what=what, **budget(h, K) | FP8_BUDGET)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_extremes(h, activation):
    """NaN and infinity reach what they reach in torch, not the rows and columns beside the tail of a tile."""
    for dtype in {torch.float16, h.half}:  # the interpreter takes no bfloat16
        x, w, bias = (each.to(dtype) for each in layer(h, 133, 272, 72))
        more = {"operand_eps": torch.finfo(dtype).eps / 2}
        odd_x, odd_w, odd_bias = x.clone(), w.clone(), bias.clone()
        odd_x[3, 5], odd_x[129, 71], odd_w[9, 2], odd_w[271, 71] = NAN, INF, NAN, -INF
        odd_bias[17], odd_bias[33] = INF, -INF
        for variant in runnable(h.device):
            check_linear(h, x, w, None, activation, variant, **more)
            check_linear(h, 64 * x, 4 * w, None, activation, variant, what="large", **more)
            check_linear(h, x / 64, w, None, activation, variant, what="small", operand_eps=max(2**-10, *more.values()))
            check_linear(h, odd_x, odd_w, odd_bias, activation, variant, **more)


@pytest.mark.parametrize("variant", [None, "persistent"])
def test_quantized_bits(h, variant):
    """Where sums are exact, q and scales are those of the reference quantizer, bit for bit, and so is a bias alone."""
    # Small whole numbers: their sums are exact in 16 bits too, in any order.
    x, w, bias = ((h.randint(5, *shape) - 2).to(h.half) for shape in ((133, 72), (336, 72), (336,)))
    y = (x.double() @ w.double().t() + bias.double()).float()
    assert y.abs().max() < 250  # bfloat16 counts to 256
    q, scale = linear_fp8(x, w, bias, variant=variant)
    want, scales = quantize_reference(y, (1, 128))
    assert (scale.shape, scale.stride()) == ((133, 3), (1, 133))
    assert torch.equal(scale, scales)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    for value in (0.3, 2.0**-10):  # the second saturates
        given = torch.full((1,), value, device=h.device)
        q, same = linear_fp8(x, w, bias, scale=given, variant=variant)
        assert same is given
        want = (y * (1.0 / given)).clamp(-448, 448).to(E4M3)
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    q, scale = linear_fp8(0 * x, w, variant=variant)
    assert not q.view(torch.uint8).any()
    assert (scale == 2.0**-100 / 448).all()
    assert torch.equal(linear(0 * x, w, bias, variant=variant), bias.expand(133, -1))
    for value in (NAN, INF):  # spoils its group alone
        bias[130] = value
        back = read_back(*linear_fp8(x, w, bias, variant=variant))
        assert back[:, 128:256].isnan().all()
        assert torch.cat([back[:, :128], back[:, 256:]], 1).isfinite().all()


def test_every_tile_is_taken_once(h, monkeypatch):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles."""
    for sms in (1, 3, 1000):
        pretend(monkeypatch, LAUNCH, sms)
        check_all(h, 150, 272, 72)
    x, w, bias = layer(h, (GROUP_M + 1) * TILES[0][0] + 1, 272, 8)  # a last group of one row of tiles
    for variant in runnable(h.device):
        check_linear(h, x, w, bias, "none", variant)


@pytest.mark.parametrize("variant", [None, "persistent"])
def test_layouts(h, variant):
    bias = h.randn(301, dtype=h.half)
    for x, w in odd_operands(h):
        n, what = w.shape[0], f"strides {x.stride()}, {w.stride()}"
        check_linear(h, x, w, bias[1 : n + 1], "none", variant, what=what)  # a bias from an odd start
    x, w = next(odd_operands(h))
    check_swiglu(h, x / 8, w[:128], w[128:256] / 8, variant)
    x, w = h.randn(0, 16, dtype=h.half), h.randn(32, 16, dtype=h.half)  # nothing to do
    assert linear(x, w).shape == swiglu(x, w, w).shape == linear_fp8(x, w)[0].shape == (0, 32)
    assert (linear_fp8(x, w)[1].shape, linear(w[:3], w[:0]).shape) == ((0, 1), (3, 0))


def test_other_gpus(h, monkeypatch):
    large, small = (128, 256, 64, 8, 4), (128, 128, 64, 8, 3)
    for sm, out, tile in [(90, 2, large), (100, 1, large), (120, 2, small)]:
        pretend(monkeypatch, LAUNCH, 4, sm)
        assert fitting_tile(torch.device("cpu"), out) == tile
    if h.interpreted:  # in the memory of the last
        check_all(h, 130, 144, 72)
    pretend(monkeypatch, LAUNCH, 40, shared_bytes=16 * 1024)
    x, w, _ = layer(h, 16, 16, 16)
    with pytest.raises(RuntimeError, match="tma_epilogues: no tile fits the 16384 bytes of shared memory of"):
        linear(x, w, variant="persistent")
    for sm, variant, message in [
        (80, "persistent", r"TMA comes with sm_90 \(this is sm_80\)"),
        (90, "warp specialized", r"needs sm_90, for its wgmma \(Gluon .* not interpreted\): use .*'persistent'"),
    ]:
        pretend(monkeypatch, LAUNCH, 4, sm)
        for fn, inputs in {linear: (x, w), swiglu: (x, w, w), linear_fp8: (x, w)}.items() if h.interpreted else ():
            refused(fn, RuntimeError, message, *inputs, variant=variant)


def test_bad_input(h):
    x, w, narrow = (h.randn(*shape, dtype=h.half) for shape in ((4, 32), (16, 32), (8, 32)))
    refused(linear, ValueError, r"activation 'relu' is not one of \('none', ", x, w, activation="relu")
    refused(linear, ValueError, "variant 'fast' is not one of .None, 'persis", x, w, variant="fast")
    refused(linear, ValueError, "K is 12 and N 16; TMA .*8 and N to one of 8", x[:, :12], w[:, :12])
    refused(linear_fp8, ValueError, "N 8; .* and N to one of 16", x, narrow)
    refused(swiglu, ValueError, r"w_gate \(16, 32\) and w_up \(8, 32\) must be alike", x, w, narrow)
    for scale, error, message in [
        (1.0, TypeError, "scale is float; pass a float32 tensor"),
        (torch.ones(2, device=h.device), ValueError, r"scale has shape \[2\]; need \[1\]"),
        (torch.zeros(1, device=h.device), ValueError, "scale has 1 of 1 values that are not"),
    ]:
        refused(linear_fp8, error, message, x, w, scale=scale)


def test_code():
    """Warp specialized on Hopper where nothing is asked for, and persistent elsewhere."""
    x, weight, bias = meta(8192, 4096), meta(14336, 4096), meta(14336)
    for fn, args, variant, sm, core in [
        (swiglu, (x, weight, weight), None, 90, "wgmma"), (linear, (x, weight, bias, "silu"), None, 100, "tcgen05.mma"),
        (linear_fp8, (x, weight, bias, "gelu"), "persistent", 90, "wgmma"),
    ]:  # fmt: skip
        kernel = code(sm, f"cp.async.bulk.tensor mbarrier {core}", fn, *args, variant=variant)
        assert ("cvt f8" in kernel.found) == (fn is linear_fp8)
        specialized = fn is swiglu
        assert (kernel.kernel == "linear_warp_specialized_kernel") == ("setmaxnreg" in kernel.found) == specialized
        if specialized:
            assert "serialized" not in dump(fn, args, sm=sm)["log"], "the assembler waits after each MMA"
            assert (kernel.warps, kernel.registers) == (12, 65536 // (32 * 12) // 8 * 8)  # all there are, by eights


def test_only_a_tile_as_long_as_the_ring_is_started_in_turn(h, monkeypatch):
    """Else the first consumer could signal twice before the second looks once, which then waits for ever."""
    launched = launches(monkeypatch, tma_epilogues_hopper, "linear_warp_specialized_kernel")
    for K in (128, 136):
        x, w, _ = layer(h, 16, 32, K)
        tma_epilogues_hopper.launch_warp_specialized(x, w, w, torch.empty_like(x), None, None, "none", "none")
    assert [each.options["STAGGER"] for each in launched] == [False, True]


@no_shrinking
@drawn(
    M=st.integers(1, 400), N=st.integers(1, 20), K=st.integers(1, 8 * (tma_epilogues_hopper.HOPPER_STAGES + 2)),
    fn=st.sampled_from([linear, swiglu, linear_fp8]), sms=st.integers(1, 3), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_order_of_events_is_right(M, N, K, fn, sms, seed):
    """Warp specialized, on a model of an SM; linear_fp8 with a given scale, whose stores are those of other scales."""
    check_on_model(fn, M, 16 * N, 8 * K, sms, seed)


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_the_first_consumer_leads_by_a_step_and_no_more(first):
    """A tile that is as long as the ring, where a signal that comes too early can lock: in many orders."""
    for seed in range(first, first + 10):
        check_on_model(linear, 300, 16, 64 * tma_epilogues_hopper.HOPPER_STAGES, 1, seed)


def check_on_model(fn, M, N, K, sms, seed):
    h, variant = harness(), "warp specialized"
    x, w, up, bias = layer(h, M, N, K, weights=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "gluon_architecture", lambda device: 90)
        use_model(patch, {"linear_warp_specialized_kernel": tma_epilogues_hopper}, seed, sms)
        if fn is linear:
            check_linear(h, x, w, bias, "silu", variant)
        elif fn is swiglu:
            check_swiglu(h, x, w, up, variant)
        else:
            args = x, w, None, "none", torch.full((1,), 8.0 / 448), variant
            h.check(lambda *args: read_back(*linear_fp8(*args)), lambda *args: reference(*args[:4]), *args,
                    what="fp8", **budget(h, K) | FP8_BUDGET)  # fmt: skip


@pytest.mark.gpu
def test_on_the_gpu(h, monkeypatch):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them. Every launch
    gives the same bits: a buffer that is read or written too early does not do so the same way every time."""
    for shape in [(4096, 4096, 4096), (1000, 5216, 776), (16, 8192, 4096), (8191, 272, 520)]:
        check_all(h, *shape)
    for shape in [(4096, 4096, 256), (1000, 8208, 1040), (16384, 512, 128), (300, 272, 8192)]:
        x, w, up, bias = layer(h, *shape, weights=2)
        for variant in runnable(h.device):
            for fn in (
                lambda x=x, w=w, b=bias, v=variant: linear(x, w, b, "silu", v),
                lambda x=x, w=w, u=up, v=variant: swiglu(x, w, u, v),
                lambda x=x, w=w, b=bias, v=variant: linear_fp8(x, w, b, "gelu", variant=v)[0].view(torch.uint8),
            ):
                first = fn()
                assert all(torch.equal(fn(), first) for _ in range(30)), (variant, shape)
    for sms in (1, 2, 7, 132):
        pretend(monkeypatch, LAUNCH, sms)
        for steps in range(1, 8):
            check_all(h, 700, 1296, 64 * steps - 32 * (steps % 2))


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(40)
    x, w, bias = layer(h, 2**31 // 4096 + 128, 4096, K := 64)
    for variant in runnable(h.device):
        y = linear(x, w, bias, "silu", variant)
        q, scale = linear_fp8(x, w, variant=variant)
        for rows in (slice(0, 300), slice(-300, None)):
            want = functools.partial(reference, activation="silu")
            h.check(lambda *_, p=rows, y=y: y[p], want, x[rows], w, bias, what="tall", **budget(h, K))
            back = read_back(q[rows], scale[rows])
            h.check(lambda *_, b=back: b, reference, x[rows], w, what="tall, FP8", **budget(h, K) | FP8_BUDGET)
        del y, q, scale
