"""tma_epilogues: every layer and variant at every edge, quantized bits, layouts, extremes, bad input, the code."""

import functools

from harness import Harness
from harness.bench import Row, Table
from harness.catalog import Needs
from harness.codegen import compile_for, dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.activations import ACTIVATIONS
from examples.common.device import SHARED_LIMIT, Limits
from examples.common.fp8 import E4M3, quantize_reference
from examples.tma import (
    tma_epilogues,
    tma_epilogues_fp8,
    tma_epilogues_hopper,
    tma_epilogues_shared,
    tma_epilogues_swiglu,
)
from examples.tma.tma_epilogues import answer, budget, layer, linear, reference
from examples.tma.tma_epilogues_fp8 import linear_fp8
from examples.tma.tma_epilogues_shared import GROUP_M, TILES, VARIANTS, fitting_tile, runnable
from examples.tma.tma_epilogues_swiglu import swiglu
from studies.tma.tma_epilogues import FP8_BUDGET, read_back, reference_swiglu

LAUNCH = (tma_epilogues, tma_epilogues_fp8, tma_epilogues_hopper, tma_epilogues_shared, tma_epilogues_swiglu)


def runs(h, variant):
    if variant not in runnable(h.device):
        pytest.skip(f"{variant} needs another GPU")


def check_linear(h, x, w, bias, activation, variant, what=None, **more):
    fn = functools.partial(linear, activation=activation, variant=variant)
    what = what or f"{activation} {variant} {tuple(x.shape)} {tuple(w.shape)}"
    kwargs = budget(h, x.shape[1]) | more
    h.check(fn, functools.partial(reference, activation=activation), x, w, bias, what=what, **kwargs)


def check_swiglu(h, x, w, up, variant, **more):
    fn = functools.partial(swiglu, variant=variant)
    h.check(fn, reference_swiglu, x, w, up, what=f"swiglu {variant}", **budget(h, x.shape[1]) | more)


def check_fp8(h, x, w, bias, activation, scale, variant):
    h.check(
        lambda x, w, bias: read_back(*linear_fp8(x, w, bias, activation, scale, variant)),
        functools.partial(reference, activation=activation), x, w, bias, what=f"fp8 {activation} {variant}",
        **FP8_BUDGET, operand_eps=torch.finfo(x.dtype).eps / 2,
    )  # fmt: skip


def check_all(h, M, N, K, variant):
    x, w, up, bias = layer(h, M, N, K, weights=2)
    check_linear(h, x, w, bias, "gelu", variant)
    check_swiglu(h, x, w, up, variant)
    check_swiglu(h, x, w, up, None)
    check_fp8(h, x, w, bias, "none", None, variant)
    check_fp8(h, x, w, None, "silu", torch.full((1,), 8.0 / 448, device=h.device), variant)


@pytest.fixture
def gpu_of(monkeypatch):
    """Let the wrapper believe in another GPU: so many SMs, so much shared memory (the interpreter has no limit)."""

    def pretend(sms, sm=90):
        for module in LAUNCH:
            monkeypatch.setattr(module, "device_limits", lambda device: Limits(sms, SHARED_LIMIT[sm]))

    return pretend


# One row, a tile and one more in each dimension, half a tile, a store of columns and 16 more, a prime of rows.
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(1, 16, 8), (37, 80, 72), (128, 256, 64), (129, 272, 136), (5, 144, 16)])
def test_shapes(h, variant, shape):
    runs(h, variant)
    check_all(h, *shape, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_to_do(h, variant):
    runs(h, variant)
    x, w = h.randn(0, 16, dtype=h.half), h.randn(32, 16, dtype=h.half)
    assert linear(x, w, variant=variant).shape == swiglu(x, w, w, variant).shape == (0, 32)
    q, scale = linear_fp8(x, w, variant=variant)
    assert (q.shape, q.dtype, scale.shape) == ((0, 32), E4M3, (0, 1))
    assert linear(h.randn(3, 16, dtype=h.half), w[:0], variant=variant).shape == (3, 0)
    assert swiglu(x, w, w).shape == (0, 32)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations(h, variant, activation, dtype):
    runs(h, variant)
    if h.interpreted and dtype is torch.bfloat16:
        pytest.skip("the interpreter takes no bfloat16")
    x, w, bias = layer(h, 133, 264, 72)
    x, w, bias = x.to(dtype), w.to(dtype), bias.to(dtype)
    more = {"operand_eps": torch.finfo(dtype).eps / 2}
    check_linear(h, x, w, bias, activation, variant, **more)
    check_linear(h, x, w, None, activation, variant, **more)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bias_alone(h, variant):
    """Sums of 0: the bias comes back, bit for bit where nothing is done to it, and each column has its own."""
    runs(h, variant)
    x, w, bias = torch.zeros(130, 8, device=h.device).to(h.half), *layer(h, 1, 528, 8)[1:]
    assert torch.equal(linear(x, w, bias, variant=variant), bias.expand(130, -1))
    check_linear(h, x, w, bias, "gelu exact", variant)


def whole(h, *shape):
    """Small whole numbers: their sums are exact in 16 bits too, in any order."""
    return (h.randint(5, *shape) - 2).to(h.half)


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantized_bits(h, variant):
    """Where sums are exact, q and scales are those of the reference quantizer, bit for bit."""
    runs(h, variant)
    x, w, bias = whole(h, 133, 72), whole(h, 336, 72), whole(h, 336)
    y = (x.double() @ w.double().t() + bias.double()).float()
    assert y.abs().max() < 250  # bfloat16 counts to 256
    q, scale = linear_fp8(x, w, bias, variant=variant)
    want, scales = quantize_reference(y, (1, 128))
    assert scale.shape == (133, 3)
    assert scale.stride() == (1, 133)
    assert torch.equal(scale, scales)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    given = torch.full((1,), 0.3, device=h.device)
    q, same = linear_fp8(x, w, bias, scale=given, variant=variant)
    assert same is given
    want = (y * (1.0 / given)).clamp(-448, 448).to(E4M3)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("variant", VARIANTS)
def test_saturates_and_zeros(h, variant):
    runs(h, variant)
    x, w = whole(h, 130, 72), whole(h, 272, 72)
    small = torch.full((1,), 2.0**-10, device=h.device)
    q, _ = linear_fp8(x, w, scale=small, variant=variant)
    y = x.double() @ w.double().t()
    assert torch.equal(q.float(), (448.0 * y.sign()).float())
    q, scale = linear_fp8(0 * x, w, variant=variant)
    assert not q.view(torch.uint8).any()
    assert torch.equal(scale, torch.full_like(scale, 2.0**-100 / 448))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sms", [1, 3, 1000])
def test_every_tile_is_taken_once(h, variant, sms, gpu_of):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles."""
    runs(h, variant)
    gpu_of(sms)
    check_all(h, 300, 528, 16, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_groups_of_tiles(h, variant):
    """More rows of tiles than a group has, a last group that is not full, two columns of tiles."""
    runs(h, variant)
    x, w, bias = layer(h, (GROUP_M + 1) * TILES[0][0] + 1, 264, 8)
    check_linear(h, x, w, bias, "silu", variant)


@given(
    M=st.integers(1, 300), N=st.integers(1, 40), K=st.integers(1, 30), activation=st.sampled_from(ACTIVATIONS),
    form=st.sampled_from(["linear", "swiglu", "group", "given"]), biased=st.booleans(),
    variant=st.sampled_from(VARIANTS),
)  # fmt: skip
def test_any_shape(M, N, K, activation, form, biased, variant):
    h = Harness("test", Needs.parse("triton"))
    if variant not in runnable(h.device):
        return
    x, w, up, bias = layer(h, M, 16 * N, 8 * K, weights=2)
    bias = bias if biased else None
    if form == "linear":
        check_linear(h, x, w, bias, activation, variant)
    elif form == "swiglu":
        check_swiglu(h, x, w, up, variant)
    else:
        scale = None if form == "group" else torch.full((1,), 8.0 / 448, device=h.device)
        check_fp8(h, x, w, bias, activation, scale, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts(h, variant):
    """Columns apart: what lies between them must not be summed; a later start; every third row; one row."""
    runs(h, variant)
    x, w, bias = h.randn(140, 320, dtype=h.half), h.randn(300, 480, dtype=h.half), h.randn(301, dtype=h.half)
    pairs = [
        (x, w[:104, :320]),
        (x[:, 16:160], w[:264, 8:152]),
        (x[::3, :144], w[16:288:2, 32:176]),
        (x[:1, :144].as_strided((1, 144), (5, 1)), w[:40, :144]),
    ]
    for left, right in pairs:
        n = right.shape[0]
        what = f"strides {left.stride()}, {right.stride()}"
        check_linear(h, left, right, bias[1 : n + 1], "none", variant, what=what)  # a bias from an odd start
    check_swiglu(h, x[:, :144] / 8, w[:136, :144], w[136:272, 144:288] / 8, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extremes(h, variant, activation):
    """NaN and infinity reach what they reach in torch, not the rows and columns beside the tail of a tile."""
    runs(h, variant)
    x, w, bias = layer(h, 130, 272, 72)
    x[3, 5], x[129, 71], w[9, 2], w[271, 71] = (float(v) for v in ("nan", "inf", "nan", "-inf"))
    bias[17], bias[33] = float("inf"), float("-inf")
    check_linear(h, x, w, bias, activation, variant)
    large, weights, _ = layer(h, 130, 272, 72)
    check_linear(h, 64 * large, 4 * weights, None, activation, variant, what="large")
    check_linear(h, large / 64, weights, None, activation, variant, what="small", operand_eps=2.0**-10)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_infinity_spoils_its_group_alone(h, variant, value):
    runs(h, variant)
    x, w, bias = layer(h, 5, 272, 16)
    bias[130] = float(value)
    back = read_back(*linear_fp8(x, w, bias, variant=variant))
    assert back[:, 128:256].isnan().all()
    assert back[:, :128].isfinite().all()
    assert back[:, 256:].isfinite().all()


def test_less_shared_memory(h, gpu_of):
    if not h.interpreted:
        pytest.skip("shared memory is real here")
    gpu_of(4, sm=120)
    assert fitting_tile(h.device, 2)[:2] == (128, 128)
    check_all(h, 200, 272, 144, "persistent")


@pytest.mark.parametrize(
    ("sm", "out", "tile"),
    [(90, 2, (128, 256, 64, 8, 4)), (100, 1, (128, 256, 64, 8, 4)), (120, 2, (128, 128, 64, 8, 3)),
     (120, 1, (128, 128, 64, 8, 3))],
)  # fmt: skip
def test_fitting_tile(gpu_of, sm, out, tile):
    gpu_of(1, sm)
    assert fitting_tile(torch.device("cpu"), out) == tile


def test_a_gpu_without_room_for_any_tile(h, monkeypatch):
    monkeypatch.setattr(tma_epilogues_shared, "device_limits", lambda device: Limits(40, 16 * 1024))
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
    monkeypatch.setattr(tma_epilogues_shared, "architecture", lambda device: sm)
    x, w, _ = layer(h, 16, 16, 16)
    for fn, inputs in {linear: (x, w), swiglu: (x, w, w), linear_fp8: (x, w)}.items():
        with pytest.raises(RuntimeError, match=f"{fn.__name__}: {message}"):
            fn(*inputs, variant=variant)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


X, WEIGHT, BIAS = meta(8192, 4096), meta(14336, 4096), meta(14336)
CALLS = {
    "none": (linear, (X, WEIGHT)),
    "silu": (linear, (X, WEIGHT, BIAS, "silu")),
    "gelu": (linear, (X, WEIGHT, BIAS, "gelu")),
    "gelu exact": (linear, (X, WEIGHT, BIAS, "gelu exact")),
    "swiglu": (swiglu, (X, WEIGHT, WEIGHT)),
    "group": (linear_fp8, (X, WEIGHT, BIAS, "gelu")),
    "given": (linear_fp8, (X, WEIGHT, None, "none", meta(1, dtype=torch.float32))),
}
CORES = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize("call", ["silu", "swiglu", "group"])
def test_the_default(call):
    """Warp specialized on Hopper, and persistent elsewhere, for every layer alike."""
    for kernel in compile_for(*CALLS[call], sms=tuple(CORES)):
        assert (kernel.error, kernel.spills) == (None, 0)
        name = "linear_warp_specialized_kernel" if kernel.sm == 90 else f"{CALLS[call][0].__name__}_persistent_kernel"
        assert (kernel.kernel, "setmaxnreg" in kernel.found) == (name, kernel.sm == 90)


def compiled(name, variant, sm):
    fn, args = CALLS[name]
    kwargs = {"variant": variant} | ({"check_scales": False} if fn is linear_fp8 else {})
    (kernel,) = compile_for(fn, args, kwargs, sms=(sm,))
    assert kernel.error is None
    assert kernel.fits
    assert {"cp.async.bulk.tensor", "mbarrier", CORES[sm]} <= kernel.found.keys()
    assert ("cvt f8" in kernel.found) == (fn is linear_fp8)
    return kernel


# Of the others the demo compiles the code, and its test looks for spills.
@pytest.mark.parametrize(("name", "sm"), [("gelu exact", 90), ("given", 90), ("swiglu", 100), ("group", 120)])
def test_persistent_code(name, sm):
    assert compiled(name, "persistent", sm).spills == 0


def test_warp_specialized_code():
    kernel = compiled("swiglu", "warp specialized", 90)
    assert (kernel.spills, kernel.warps) == (0, 12)
    assert kernel.registers == 65536 // (32 * 12) // 8 * 8  # all there are, by eights
    assert "setmaxnreg" in kernel.found


def test_warp_specialized_is_not_compiled_for_others():
    """The compiler would end this process instead of saying no."""
    for kernel in compile_for(linear, (X, WEIGHT, None, "none", "warp specialized"), sms=(100, 120)):
        assert kernel.error.startswith("RuntimeError: linear: needs sm_90, for its wgmma (this is sm_")


def test_partitions():
    """The assembler leaves products asynchronous, threads store nothing to memory, and sums wait for all of theirs."""
    text = dump(linear, (*CALLS["silu"][1], "warp specialized"), sm=90)
    assert "serialized" not in text["log"]
    # The second consumer has one loop, the first another for the step by which it leads.
    assert text["ttgir"].count("ttng.warp_group_dot ") == text["ptx"].count("wgmma.commit_group") == 3
    assert "st.global" not in text["ptx"]
    assert "tanh.approx" not in text["ptx"]
    # Sums go to shared memory eight by eight, and one thread says so after all have written.
    lines = [line.strip() for line in text["ptx"].splitlines()]
    last = max(i for i, line in enumerate(lines) if line.startswith("stmatrix"))
    arrive = next(i for i in range(last, len(lines)) if "mbarrier.arrive" in lines[i])
    assert any(line.startswith("bar.sync") for line in lines[last:arrive])


def test_persistent_epilogue_is_compiled_once():
    """One special operation for each of a thread's 128 elements, and no shared memory on the way to the parts."""
    text = dump(linear, (*CALLS["silu"][1], "persistent"), sm=90)
    assert text["ptx"].count("tanh.approx.f32") == 128
    assert text["ptx"].count("stmatrix") == 128 // 8  # four registers of two each


@pytest.mark.parametrize(("K", "loops"), [(128, 2), (136, 3)])
def test_only_a_tile_as_long_as_the_ring_is_started_in_turn(K, loops):
    """Else the first consumer could signal twice before the second looks once, which then waits for ever."""
    inputs = (meta(4096, K), meta(4096, K), None, "none", "warp specialized")
    assert dump(linear, inputs, sm=90)["ttgir"].count("ttng.warp_group_dot ") == loops


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 5216, 776), (16, 8192, 4096), (8191, 272, 520)])
def test_shapes_on_the_gpu(h, shape):
    for variant in runnable(h.device):
        check_all(h, *shape, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 2, 7, 132])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7])
def test_barriers_across_tiles(h, gpu_of, sms, steps):
    """The ring is shorter, as long and longer than a tile; a program has one tile, a few and all of them."""
    gpu_of(sms)
    for variant in runnable(h.device):
        check_all(h, 700, 1296, 64 * steps - 32 * (steps % 2), variant)


@pytest.mark.gpu
def test_every_launch_gives_the_same_bits(h):
    """A buffer that is read too early or written too early does not do so the same way every time."""
    for shape in [(4096, 4096, 256), (1000, 8208, 1040), (16384, 512, 128), (300, 272, 8192)]:
        x, w, up, bias = layer(h, *shape, weights=2)
        for variant in runnable(h.device):
            calls = [
                lambda x=x, w=w, b=bias, v=variant: linear(x, w, b, "silu", v),
                lambda x=x, w=w, u=up, v=variant: swiglu(x, w, u, v),
                lambda x=x, w=w, b=bias, v=variant: linear_fp8(x, w, b, "gelu", variant=v)[0].view(torch.uint8),
            ]
            for fn in calls:
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


def test_the_answer_follows_from_the_times():
    def table(linear, persistent=None):
        ms = {
            "cuBLAS, then torch.compile": 1.1,
            "cuBLAS, no epilogue": 1.0,
            "linear, no epilogue": 1.0,
            "linear": linear,
        }
        ms |= {"persistent": persistent} if persistent else {}
        rows = [Row(name, "linear" in name, None, 0, t, speedup=1.1 / t) for name, t in ms.items()]
        return Table("bias + SiLU", "a case", next(iter(ms)), rows)

    text = answer(table(1.02, 1.05), 56)
    assert "take 10% of the GEMM's time as a kernel of their own, 2% in its store: in all 1.08x, faster; " in text
    assert "exposed, 1.05x. " in text
    assert text.endswith("56 tiles have parts of it.")
    assert ": in all 1.00x, no faster. What" in answer(table(1.1), 2)
    assert ": in all 0.50x, slower. What" in answer(table(2.2), 2)


def _bad(device):
    x = torch.randn(4, 32, device=device, dtype=torch.float16)
    w, bias = torch.randn(16, 32, device=device, dtype=torch.float16), torch.ones(16, device=device).half()
    one, flat = torch.ones(1, device=device), torch.zeros(600, device=device, dtype=torch.float16)
    return {
        "no tensor": (linear, ([1.0], w), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "float32": (linear, (x.float(), w.float()), {}, TypeError, r"x is torch\.float32; cast x and its weights"),
        "two dtypes": (linear, (x, w.float()), {}, TypeError, r"x is torch\.float16 and w torch\.float32"),
        "gate and up": (swiglu, (x, w, w.float()), {}, TypeError, r"and w_up torch\.float32"),
        "a vector": (linear, (x[0], w), {}, ValueError, r"x has shape \(32,\); need \[M, K\]: pass x\.reshape\(-1"),
        "a batch": (linear, (x[None], w), {}, ValueError, r"x has shape \(1, 4, 32\); need"),
        "a vector for w": (linear, (x, w[0]), {}, ValueError, r"x has shape \(4, 32\) and w \(32,\); need"),
        "w transposed": (linear, (x, w.t()), {}, ValueError, r"and w \(32, 16\); need .*weights \[N, K\]"),
        "up of another size": (
            swiglu, (x, w, w[:8]), {}, ValueError, r"w_gate \(16, 32\) and w_up \(8, 32\) must be alike",
        ),
        "no activation": (linear, (x, w, None, "relu"), {}, ValueError, r"activation 'relu' is not one of \('none', "),
        "a list for one": (linear, (x, w, None, ["silu"]), {}, ValueError, "activation .* is not one of"),
        "swiglu as one": (linear, (x, w, None, "swiglu"), {}, ValueError, "activation 'swiglu' is not one of"),
        "no variant": (linear, (x, w), {"variant": "fast"}, ValueError, "variant 'fast' is not one of .None, 'persis"),
        "no variant of swiglu": (swiglu, (x, w, w, ""), {}, ValueError, "variant '' is not one of"),
        "K of 12": (linear, (x[:, :12], w[:, :12]), {}, ValueError, "K is 12 and N 16; TMA .*8 and N to one of 8"),
        "K of 0": (linear, (x[:, :0], w[:, :0]), {}, ValueError, "K is 0"),
        "N of 4": (linear, (x, w[:4]), {}, ValueError, "K is 32 and N 4"),
        "N of 8 in FP8": (linear_fp8, (x, w[:8]), {}, ValueError, "N 8; .* and N to one of 16"),
        "bias of another dtype": (linear, (x, w, bias.float()), {}, TypeError, r"bias is torch\.float32, x .*float16"),
        "bias of another shape": (linear, (x, w, bias[:8]), {}, ValueError, r"bias has shape \(8,\).*need \[16\]"),
        "bias as a row": (linear_fp8, (x, w, bias[None]), {}, ValueError, r"bias has shape \(1, 16\)"),
        "bias with gaps": (linear, (x, w, bias.repeat(2)[::2]), {}, ValueError, r"strides \(2,\); need .*contiguous"),
        "bias elsewhere": (linear, (x, w, bias.to("meta")), {}, ValueError, "move them to one device"),
        "scale a number": (linear_fp8, (x, w), {"scale": 1.0}, TypeError, "scale is float; pass a float32 tensor"),
        "scale in float64": (linear_fp8, (x, w), {"scale": one.double()}, TypeError, r"scale is torch\.float64"),
        "two scales": (linear_fp8, (x, w), {"scale": one.repeat(2)}, ValueError, r"scale has shape \[2\]; need \[1\]"),
        "scale elsewhere": (linear_fp8, (x, w), {"scale": one.to("meta")}, ValueError, "scale is on meta"),
        "a scale of 0": (linear_fp8, (x, w), {"scale": 0 * one}, ValueError, "scale has 1 of 1 values that are not"),
        "an infinite scale": (linear_fp8, (x, w), {"scale": one / 0}, ValueError, "scale has 1 of 1 values"),
        "columns of x": (
            linear, (x.t().contiguous().t(), w), {}, ValueError, r"x has .* strides \(1, 4\) .*x\.contiguous\(\)",
        ),
        "unaligned start": (linear, (flat[1:129].view(4, 32), w), {}, ValueError, "x has .* starts 2 bytes past"),
        "unaligned rows": (linear, (x, flat[:576].view(16, 36)[:, :32]), {}, ValueError, r"w has .* strides \(36, 1\)"),
        "one row for all": (linear, (x[:1].expand(4, 32), w), {}, ValueError, r"x has .* strides \(0, 1\)"),
        "requires grad": (linear, (x.clone().requires_grad_(), w), {}, RuntimeError, "no backward"),
        "bias requires grad": (linear, (x, w, bias.clone().requires_grad_()), {}, RuntimeError, "no backward"),
        "two devices": (linear, (x, w.to("meta")), {}, ValueError, "move them to one device"),
        "a device without kernels": (linear, (x.to("meta"), w.to("meta")), {}, RuntimeError, "on meta"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    fn, args, kwargs, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"{fn.__name__}: .*{message}"):
        fn(*args, **kwargs)
