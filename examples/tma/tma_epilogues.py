"""GEMM epilogue fusion: bias and activation in the store of a TMA matmul, before the result goes to memory.

A linear layer is a GEMM and an elementwise epilogue. With two kernels the result travels to memory and back: 8192 x
14336 x 4 bytes take 0.11 ms of an H200's memory, beside 1.2 ms of GEMM. In the GEMM's store the accumulator is still on
the chip. Two variants, on the same operands:
  persistent        this file: one program per SM, all by TMA. All warps do the epilogue on the float32 accumulator,
                    while the tensor cores idle: it is exposed, so activations use tanh.approx.
  warp specialized  in Gluon, the default on Hopper: an epilogue partition finishes and stores a tile while two
                    consumers multiply the next one. It gets the accumulator rounded to 16 bits, as with two kernels.

Question   What does an epilogue cost in the store of a GEMM, against a kernel of its own, and which do not fit there?
Needs      triton, sm_90
Wins when  the pre-activation is not needed again (training needs it). What is saved is 4 bytes an element, whatever K
           is: the shorter K, the larger its share. Below K of a few hundred Hopper's consumers wait for the epilogue.
Variants   tma_epilogues_hopper.py, tma_epilogues_swiglu.py, tma_epilogues_fp8.py (a quantizer in the store),
           tma_epilogues_shared.py (checks of all layers, tiles of the persistent kernels)
Study      studies/tma/tma_epilogues.py
Source     goes beyond the chapter; the persistent loop is that of Triton tutorial 09
"""

from __future__ import annotations

import functools

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.activations import ACTIVATIONS, activate, activation_reference
from examples.common.compiled import MODES
from examples.common.operands import check_choice
from examples.common.tiles import tile_coords
from examples.common.untraced import untraced
from examples.tma import tma_epilogues_shared as shared
from examples.tma.tma_epilogues_hopper import launch_warp_specialized
from examples.tma.tma_epilogues_shared import halves, launch_persistent, load_bias, runnable


@triton.jit
def _finish_and_store(y_desc, acc, bias, row, col, ACT: tl.constexpr, BIAS: tl.constexpr, FAST: tl.constexpr):
    """The epilogue of a tile, as many columns at a time as y_desc stores: fewer registers and less shared memory."""
    columns: tl.constexpr = acc.shape[1]
    if columns > y_desc.block_shape[1]:
        left, right, bias_left, bias_right = halves(acc, bias, BIAS)
        _finish_and_store(y_desc, left, bias_left, row, col, ACT, BIAS, FAST)
        _finish_and_store(y_desc, right, bias_right, row, col + columns // 2, ACT, BIAS, FAST)
    else:
        if BIAS:
            acc += bias[None, :].to(tl.float32)
        y_desc.store([row, col], activate(acc, ACT, FAST).to(y_desc.dtype))


@triton.jit
def linear_persistent_kernel(
    x_desc, w_desc, y_desc, bias_ptr, M, N, K, ACT: tl.constexpr, FAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    BIAS: tl.constexpr = bias_ptr is not None
    tl.assume(K > 0)  # else the compiler adds a second epilogue, for tiles whose loop over K is empty
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            acc = tl.dot(x_desc.load([row, k]), w_desc.load([col, k]).T, acc)
        bias = load_bias(bias_ptr, col, N, BLOCK_N)
        _finish_and_store(y_desc, acc, bias, row, col, ACT, BIAS, FAST)


@untraced
def linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none",
    variant: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """activation(x @ w.t() + bias) -> contiguous y [M, N]; variant "persistent", "warp specialized" or None (by GPU).

    x [M, K], w [N, K] as torch.nn.Linear has it, bias [N] or None, all float16 or bfloat16. Rows contiguous; K and N
    multiples of 8, any M (0 too). activation: "none", "silu", "gelu" (by tanh) or "gelu exact", in float32. The
    persistent kernel uses tanh.approx for silu and gelu (off by up to 2**-12 |x|); the warp-specialized one does not,
    and its epilogue gets the accumulator rounded to 16 bits.

    Raises TypeError for another dtype or different ones; ValueError for rank, sizes that differ, K of 0, a layout that
    TMA cannot load, an unknown activation or variant, or a bias of another shape or device; RuntimeError for a device
    without Triton, an architecture without TMA, too little shared memory, an input that requires grad or, warp
    specialized, any architecture but sm_90, and the interpreter.
    """
    variant = shared.check_layer("linear", x, bias, variant, 2, w=w)
    check_choice("linear", ACTIVATIONS, activation=activation)
    y = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    if variant == "warp specialized" and y.numel():
        launch_warp_specialized(x, w, w, y, bias, None, activation, "none")
    elif y.numel():
        launch_persistent(linear_persistent_kernel, x, (w,), y, bias, ACT=activation)
    return y


def reference(x, w, bias=None, activation: str = "none") -> torch.Tensor:
    y = x.double() @ w.double().t()
    return activation_reference(y if bias is None else y + bias.double(), activation)


FUSED = "torch.compile max-autotune"


def torch_bias_activation(y: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    """The epilogue as a kernel of its own, for the compiler to fuse into one."""
    return activation_reference(y.float() + bias, activation).to(y.dtype)


def layer(h: Harness, M: int, N: int, K: int, weights: int = 1) -> tuple[torch.Tensor, ...]:
    """x, so many weights one after the other in memory, bias: accumulators of about unit size."""
    w = h.randn(weights * N, K, dtype=h.half, scale=max(K, 1) ** -0.5)
    return h.randn(M, K, dtype=h.half), *w.split(N), h.randn(N, dtype=h.half)


def budget(h: Harness, K: int) -> dict:
    """Sums of K products, which may be rounded to 16 bits before the epilogue, as by two kernels: operand_eps. That
    rounding shows in full where the bias cancels a large accumulator: the budget covers one 6 times the usual size."""
    return {"terms": K, "operand_eps": torch.finfo(h.half).eps / 2}


def budgets(h: Harness, *once: str) -> dict[str, dict]:
    """Of rows that do not round the accumulator first: those `once`, without an epilogue, and the persistent kernel's,
    whose activation is an approximation."""
    approximate = {"operand_eps": min(2.0**-10, torch.finfo(h.half).eps / 2)}
    return {name: {"operand_eps": 0.0} for name in once} | {"persistent": approximate}


def torch_linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    return torch_bias_activation(torch.matmul(x, w.t()), bias, activation)


def answer(table, across: int) -> str:
    two = table.baseline

    def over(variant: str) -> float:
        return min(table.over(library, variant) for library in (two, FUSED))

    total = over("linear")
    own, ours = table.over(two, table.rows[1].variant) - 1, table.over("linear", "linear, no epilogue") - 1
    exposed = f" ({over('persistent'):.2f}x if MMAs wait for the epilogue)" if "persistent" in table else ""
    return (
        f"At {table.case} bias and SiLU add {own:.0%} to the GEMM's time as their own kernel, {ours:.0%} in its store: "
        f"{total:.2f}x torch's fastest in all{exposed}. A scale per row does not fit: it needs all {across} tiles of a "
        "row."
    )


def compare(h: Harness, M: int, N: int, K: int):
    """One layer: cuBLAS and a compiled epilogue, each without, Inductor's own fusion, and ours."""
    library = "torch" if h.interpreted else "cuBLAS"
    epilogue = torch_bias_activation if h.interpreted else h.compiled(torch_bias_activation)
    two, alone = f"{library}, then {'torch' if h.interpreted else 'torch.compile'}", f"{library}, no epilogue"
    variants = {two: lambda x, w, bias: epilogue(torch.matmul(x, w.t()), bias, "silu")}
    variants |= {alone: lambda x, w, bias: torch.matmul(x, w.t()), "linear, no epilogue": lambda x, w, b: linear(x, w)}
    # The epilogue in the store of one of Inductor's Triton templates, where the search finds that faster.
    variants[FUSED] = functools.partial(h.compiled(torch_linear, **MODES[FUSED]), activation="silu")
    ours = {"linear": None} | ({"persistent": "persistent"} if len(runnable(h.device)) > 1 else {})
    variants |= {name: functools.partial(linear, activation="silu", variant=v) for name, v in ours.items()}
    return h.compare(
        variants, functools.partial(reference, activation="silu"), *layer(h, M, N, K), baseline=two,
        work=Work(bytes=2 * (M * K + N * K + M * N + N), flops=2 * M * N * K, dtype=h.half), title="bias + SiLU",
        references=dict.fromkeys((alone, "linear, no epilogue"), lambda x, w, bias: reference(x, w)),
        peers=["linear, no epilogue"], case=f"{M}x{N}x{K}", **budget(h, K),
        budgets=budgets(h, alone, "linear, no epilogue"),
        wrong={"without its last K step": lambda x, w, bias: reference(x[:, :-64], w[:, :-64], bias, "silu")},
    )  # fmt: skip


def demo(h: Harness) -> None:
    # One row; tails in each dimension and more tiles than SMs (the interpreter plays a GPU of four).
    for M, N, K in [(1, 16, 8), (129, 528, 72)]:
        x, w, bias = layer(h, M, N, K)
        for variant in runnable(h.device):
            for activation in ACTIVATIONS if M > 1 else ("silu",):
                fn = functools.partial(linear, activation=activation, variant=variant)
                want, what = functools.partial(reference, activation=activation), f"{activation}, {variant} {M}x{N}x{K}"
                h.check(fn, want, x, w, bias, what=what, **budget(h, K))

    cores = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
    find = {80: (), 89: ()} | {sm: ("cp.async.bulk.tensor", "mbarrier", core) for sm, core in cores.items()}
    h.codegen(linear, h.meta(8192, 4096), h.meta(14336, 4096), h.meta(14336), "silu", find=find)

    sizes = h.pick(interpreted=(260, 272, 392), quick=(4096, 4096, 4096), full=(8192, 14336, 4096))
    M, N, K = sizes if h.timing else (260, 272, 392)
    table = compare(h, M, N, K)
    h.answer(lambda: answer(table, triton.cdiv(N, shared.fitting_tile(h.device, 2)[1])))


if __name__ == "__main__":
    run(demo)
