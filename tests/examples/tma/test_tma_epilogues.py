"""tma_epilogues: every layer and variant at every edge, quantized bits, layouts, extremes, refusals, the code."""

import functools

from harness.codegen import compile_for, dump

import pytest
import torch

from examples.common.activations import ACTIVATIONS
from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3, quantize_reference
from examples.tma import tma_epilogues_hopper
from examples.tma import tma_epilogues_shared as shared
from examples.tma.tma_epilogues import budget, layer, linear, reference
from examples.tma.tma_epilogues_fp8 import linear_fp8
from examples.tma.tma_epilogues_shared import GROUP_M, TILES, fitting_tile, runnable
from examples.tma.tma_epilogues_swiglu import swiglu
from studies.tma.tma_epilogues import FP8_BUDGET, read_back, reference_swiglu

LAUNCH = (tma_epilogues_hopper, shared)


def check_linear(h, x, w, bias, activation, variant, what=None, **more):
    fn = functools.partial(linear, activation=activation, variant=variant)
    what = what or f"{activation} {variant} {tuple(x.shape)} {tuple(w.shape)}"
    kwargs = budget(h, x.shape[1]) | more
    h.check(fn, functools.partial(reference, activation=activation), x, w, bias, what=what, **kwargs)


def check_swiglu(h, x, w, up, variant):
    fn = functools.partial(swiglu, variant=variant)
    h.check(fn, reference_swiglu, x, w, up, what=f"swiglu {variant}", **budget(h, x.shape[1]))


def check_fp8(h, x, w, bias, activation, scale, variant):
    h.check(
        lambda x, w, bias: read_back(*linear_fp8(x, w, bias, activation, scale, variant)),
        functools.partial(reference, activation=activation), x, w, bias, what=f"fp8 {activation} {variant}",
        **FP8_BUDGET, operand_eps=torch.finfo(x.dtype).eps / 2,
    )  # fmt: skip


def check_all(h, M, N, K):
    x, w, up, bias = layer(h, M, N, K, weights=2)
    for variant in runnable(h.device):
        check_linear(h, x, w, bias, "gelu", variant)
        check_swiglu(h, x, w, up, variant)
        check_fp8(h, x, w, bias, "none", None, variant)
        check_fp8(h, x, w, None, "silu", torch.full((1,), 8.0 / 448, device=h.device), variant)


@pytest.fixture
def gpu_of(monkeypatch):
    """Let the wrapper believe in another GPU: so many SMs, so much shared memory (the interpreter has no limit)."""

    def pretend(sms, sm=90, shared_bytes=None):
        limits = Limits(sms, shared_bytes or SHARED_LIMIT[sm])
        for module in LAUNCH:
            monkeypatch.setattr(module, "device_limits", lambda device: limits)

    return pretend


# One row, a tile and one more in each dimension, half a tile, a store of columns and 16 more, a prime of rows.
@pytest.mark.parametrize("shape", [(1, 16, 8), (37, 80, 72), (128, 256, 64), (129, 272, 136), (5, 144, 16)])
def test_shapes(h, shape):
    check_all(h, *shape)


def test_nothing_to_do(h):
    x, w = h.randn(0, 16, dtype=h.half), h.randn(32, 16, dtype=h.half)
    assert linear(x, w).shape == swiglu(x, w, w).shape == (0, 32)
    q, scale = linear_fp8(x, w)
    assert (q.shape, q.dtype, scale.shape) == ((0, 32), E4M3, (0, 1))
    assert linear(h.randn(3, 16, dtype=h.half), w[:0]).shape == (3, 0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_extremes(h, activation):
    """NaN and infinity reach what they reach in torch, not the rows and columns beside the tail of a tile."""
    for dtype in {torch.float16, h.half}:  # the interpreter takes no bfloat16
        x, w, bias = (each.to(dtype) for each in layer(h, 133, 272, 72))
        more = {"operand_eps": torch.finfo(dtype).eps / 2}
        odd_x, odd_w, odd_bias = x.clone(), w.clone(), bias.clone()
        odd_x[3, 5], odd_x[129, 71], odd_w[9, 2], odd_w[271, 71] = (float(v) for v in ("nan", "inf", "nan", "-inf"))
        odd_bias[17], odd_bias[33] = float("inf"), float("-inf")
        for variant in runnable(h.device):
            check_linear(h, x, w, None, activation, variant, **more)
            check_linear(h, 64 * x, 4 * w, None, activation, variant, what="large", **more)
            check_linear(h, x / 64, w, None, activation, variant, what="small", operand_eps=2.0**-10)
            check_linear(h, odd_x, odd_w, odd_bias, activation, variant, **more)


def whole(h, *shape):
    """Small whole numbers: their sums are exact in 16 bits too, in any order."""
    return (h.randint(5, *shape) - 2).to(h.half)


@pytest.mark.parametrize("variant", [None, "persistent"])
def test_quantized_bits(h, variant):
    """Where sums are exact, q and scales are those of the reference quantizer, bit for bit, and so is a bias alone."""
    x, w, bias = whole(h, 133, 72), whole(h, 336, 72), whole(h, 336)
    y = (x.double() @ w.double().t() + bias.double()).float()
    assert y.abs().max() < 250  # bfloat16 counts to 256
    q, scale = linear_fp8(x, w, bias, variant=variant)
    want, scales = quantize_reference(y, (1, 128))
    assert (scale.shape, scale.stride()) == ((133, 3), (1, 133))
    assert torch.equal(scale, scales)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    given_scale = torch.full((1,), 0.3, device=h.device)
    q, same = linear_fp8(x, w, bias, scale=given_scale, variant=variant)
    assert same is given_scale
    want = (y * (1.0 / given_scale)).clamp(-448, 448).to(E4M3)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    q, _ = linear_fp8(x, w, scale=torch.full((1,), 2.0**-10, device=h.device), variant=variant)
    assert torch.equal(q.double(), 448 * (x.double() @ w.double().t()).sign()), "it saturates"
    q, scale = linear_fp8(0 * x, w, variant=variant)
    assert not q.view(torch.uint8).any()
    assert torch.equal(scale, torch.full_like(scale, 2.0**-100 / 448))
    assert torch.equal(linear(0 * x, w, bias, variant=variant), bias.expand(133, -1))
    for value in ("nan", "inf"):  # spoils its group alone
        bias[130] = float(value)
        back = read_back(*linear_fp8(x, w, bias, variant=variant))
        assert back[:, 128:256].isnan().all()
        assert back[:, :128].isfinite().all()
        assert back[:, 256:].isfinite().all()


@pytest.mark.parametrize("sms", [1, 3, 1000])
def test_every_tile_is_taken_once(h, sms, gpu_of):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles."""
    gpu_of(sms)
    check_all(h, 300, 528, 16)
    check_all(h, (GROUP_M + 1) * TILES[0][0] + 1, 272, 8)  # a last group of one row of tiles


@pytest.mark.parametrize("variant", [None, "persistent"])
def test_layouts(h, variant):
    """Columns apart: what lies between them must not be summed; a later start; every third row; one row."""
    x, w, bias = h.randn(140, 320, dtype=h.half), h.randn(300, 480, dtype=h.half), h.randn(301, dtype=h.half)
    for left, right in [
        (x, w[:104, :320]),
        (x[:, 16:160], w[:264, 8:152]),
        (x[::3, :144], w[16:288:2, 32:176]),
        (x[:1, :144].as_strided((1, 144), (5, 1)), w[:40, :144]),
    ]:
        n, what = right.shape[0], f"strides {left.stride()}, {right.stride()}"
        check_linear(h, left, right, bias[1 : n + 1], "none", variant, what=what)  # a bias from an odd start
    check_swiglu(h, x[:, :144] / 8, w[:136, :144], w[136:272, 144:288] / 8, variant)


def test_which_tile_fits(h, gpu_of):
    for sm, out, tile in [
        (90, 2, (128, 256, 64, 8, 4)),
        (100, 1, (128, 256, 64, 8, 4)),
        (120, 2, (128, 128, 64, 8, 3)),
    ]:
        gpu_of(4, sm)
        assert fitting_tile(torch.device("cpu"), out) == tile
    if h.interpreted:  # in the memory of the last
        check_all(h, 200, 272, 144)
    gpu_of(40, shared_bytes=16 * 1024)
    x, w, _ = layer(h, 16, 16, 16)
    with pytest.raises(RuntimeError, match="tma_epilogues: no tile fits the 16384 bytes of shared memory of"):
        linear(x, w)


@pytest.mark.parametrize(
    ("sm", "variant", "message"),
    [(80, "persistent", r"TMA comes with sm_90 \(this is sm_80\)"),
     (89, "warp specialized", r"TMA comes with sm_90 \(this is sm_89\)"),
     (90, "warp specialized", r"needs sm_90, for its wgmma \(Gluon kernels are not interpreted\): use .*'persistent'")],
)  # fmt: skip
def test_other_gpus(h, monkeypatch, sm, variant, message):
    if not h.interpreted:
        pytest.skip("the architecture is real here")
    monkeypatch.setattr(shared, "architecture", lambda device: sm)
    x, w, _ = layer(h, 16, 16, 16)
    for fn, inputs in {linear: (x, w), swiglu: (x, w, w), linear_fp8: (x, w)}.items():
        with pytest.raises(RuntimeError, match=f"{fn.__name__}: {message}"):
            fn(*inputs, variant=variant)


@pytest.mark.parametrize(
    ("fn", "bad", "error", "message"),
    [(linear, {"activation": "relu"}, ValueError, r"activation 'relu' is not one of \('none', "),
     (linear, {"variant": "fast"}, ValueError, "variant 'fast' is not one of .None, 'persis"),
     (linear, {"x": (4, 12), "w": (16, 12)}, ValueError, "K is 12 and N 16; TMA .*8 and N to one of 8"),
     (linear_fp8, {"w": (8, 32)}, ValueError, "N 8; .* and N to one of 16"),
     (linear_fp8, {"scale": 1.0}, TypeError, "scale is float; pass a float32 tensor"),
     (linear_fp8, {"scale": torch.ones(2)}, ValueError, r"scale has shape \[2\]; need \[1\]"),
     (linear_fp8, {"scale": torch.zeros(1)}, ValueError, "scale has 1 of 1 values that are not"),
     (swiglu, {"w_up": (8, 32)}, ValueError, r"w_gate \(16, 32\) and w_up \(8, 32\) must be alike")],
)  # fmt: skip
def test_bad_input(h, fn, bad, error, message):
    names = ("x", "w_gate", "w_up") if fn is swiglu else ("x", "w")
    shapes = dict(zip(names, ((4, 32), (16, 32), (16, 32)), strict=False)) | bad
    made = {name: h.randn(*x, dtype=h.half) if isinstance(x, tuple) else x for name, x in shapes.items()}
    made = {name: x.to(h.device) if isinstance(x, torch.Tensor) else x for name, x in made.items()}
    with pytest.raises(error, match=f"{fn.__name__}: .*{message}"):
        fn(**made)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


X, WEIGHT, BIAS = meta(8192, 4096), meta(14336, 4096), meta(14336)
CALLS = {
    "silu": (linear, (X, WEIGHT, BIAS, "silu")),
    "swiglu": (swiglu, (X, WEIGHT, WEIGHT)),
    "group": (linear_fp8, (X, WEIGHT, BIAS, "gelu")),
    "given": (linear_fp8, (X, WEIGHT, None, "none", meta(1, dtype=torch.float32))),
}
CORES = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize(
    ("name", "variant", "sm"),
    [("swiglu", None, 90), ("silu", None, 100), ("swiglu", "persistent", 100), ("given", "persistent", 90),
     ("group", None, 120)],
)  # fmt: skip
def test_code(name, variant, sm):
    """Warp specialized on Hopper where nothing is asked for, and persistent elsewhere."""
    fn, args = CALLS[name]
    kwargs = {"variant": variant} | ({"check_scales": False} if fn is linear_fp8 else {})
    (kernel,) = compile_for(fn, args, kwargs, sms=(sm,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)
    assert {"cp.async.bulk.tensor", "mbarrier", CORES[sm]} <= kernel.found.keys()
    assert ("cvt f8" in kernel.found) == (fn is linear_fp8)
    specialized = variant is None and sm == 90
    assert (kernel.kernel == "linear_warp_specialized_kernel") == ("setmaxnreg" in kernel.found) == specialized
    if specialized:
        assert (kernel.warps, kernel.registers) == (12, 65536 // (32 * 12) // 8 * 8)  # all there are, by eights


@pytest.mark.parametrize(("K", "loops"), [(128, 2), (136, 3)])
def test_only_a_tile_as_long_as_the_ring_is_started_in_turn(K, loops):
    """Else the first consumer could signal twice before the second looks once, which then waits for ever."""
    text = dump(linear, (meta(4096, K), meta(4096, K), None, "none", "warp specialized"), sm=90)
    # The second consumer has one loop, the first another for the step by which it leads.
    assert text["ttgir"].count("ttng.warp_group_dot ") == loops
    assert "serialized" not in text["log"], "the assembler waits after each MMA"


@pytest.mark.gpu
def test_shapes_and_barriers_on_the_gpu(h, gpu_of):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them."""
    for shape in [(4096, 4096, 4096), (1000, 5216, 776), (16, 8192, 4096), (8191, 272, 520)]:
        check_all(h, *shape)
    for sms in (1, 2, 7, 132):
        gpu_of(sms)
        for steps in range(1, 8):
            check_all(h, 700, 1296, 64 * steps - 32 * (steps % 2))


@pytest.mark.gpu
def test_every_launch_gives_the_same_bits(h):
    """A buffer that is read too early or written too early does not do so the same way every time."""
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


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(40)
    M, N, K = 2**31 // 4096 + 128, 4096, 64
    x, w, bias = layer(h, M, N, K)
    for variant in runnable(h.device):
        y = linear(x, w, bias, "silu", variant)
        q, scale = linear_fp8(x, w, variant=variant)
        for rows in (slice(0, 300), slice(-300, None)):
            want = functools.partial(reference, activation="silu")
            h.check(lambda *_, p=rows, y=y: y[p], want, x[rows], w, bias, what="tall", **budget(h, K))
            back = read_back(q[rows], scale[rows])
            more = FP8_BUDGET | {"operand_eps": torch.finfo(h.half).eps / 2}
            h.check(lambda *_, b=back: b, reference, x[rows], w, what="tall, FP8", **more)
        del y, q, scale
