"""What the layers of tma_epilogues share: checks, the tile that fits, the kernel a GPU gets, pieces of kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import architecture, device_limits, require_triton_device
from examples.common.fp8 import FLOOR
from examples.common.gluon import gluon_architecture, require_wgmma
from examples.common.operands import check_choice
from examples.common.tiles import split_columns
from examples.common.tma import require_tma_layout, tma_descriptor

DTYPES = (torch.float16, torch.bfloat16)
VARIANTS = ("persistent", "warp specialized")
# BLOCK_M, BLOCK_N, BLOCK_K, warps: the first that fits shared memory is taken, with as many stages of K as it holds.
# GROUP_M is the rows of tiles in a group.
TILES = [(128, 256, 64, 8), (128, 128, 64, 8)]
BUFFERS = (4, 3, 2)
GROUP_M = 8
STORE_COLUMNS = {2: 64, 1: 128}  # of a tile stored at a time, by bytes an element; for FP8 a whole group
GROUP = tl.constexpr(128)  # columns that share a scale
AMAX_FLOOR = tl.constexpr(FLOOR)
FAST = True  # tanh.approx in the persistent kernels, whose epilogue is exposed


@triton.jit
def scale_and_inverse(amax_bits, MOST: tl.constexpr):
    """amax / MOST and MOST / amax, each rounded once, of amax as an integer: there NaN is the largest."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    amax = tl.maximum(amax, AMAX_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return tl.div_rn(amax, MOST), tl.div_rn(MOST, amax)


@triton.jit
def load_bias(bias_ptr, col, N, BLOCK_N: tl.constexpr):
    """The bias of a tile's columns; 0 without one."""
    if bias_ptr is None:
        return 0.0
    else:
        cols = col + tl.arange(0, BLOCK_N)
        return tl.load(bias_ptr + cols, mask=cols < N, other=0.0)


@triton.jit
def halves(acc, bias, BIAS: tl.constexpr):
    """The left and the right half of a tile's columns, and of its bias."""
    half: tl.constexpr = acc.shape[1] // 2
    left, right = split_columns(acc)
    bias_left, bias_right = bias, bias
    if BIAS:
        bias_left, bias_right = bias.reshape(2, half).permute(1, 0).split()
    return left, right, bias_left, bias_right


def choose(device: torch.device) -> str:
    """The fastest variant that runs on a GPU: warp specialized on sm_90, whose wgmma it is made of."""
    return "warp specialized" if gluon_architecture(device) == 90 else "persistent"


def runnable(device: torch.device) -> tuple[str, ...]:
    return VARIANTS if choose(device) == "warp specialized" else VARIANTS[:1]


def fitting_tile(device: torch.device, out_itemsize: int) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps and stages: the largest tile, then most stages, that shared memory holds."""
    limit = device_limits(device).shared_bytes
    # GPUs with little shared memory multiply by mma.sync, from registers: one stage more than there are buffers.
    in_registers = 1 if limit < 128 * 1024 else 0
    for m, n, k, warps in TILES:
        stored = out_itemsize * m * STORE_COLUMNS[out_itemsize]
        for buffers in BUFFERS:
            if 2 * buffers * (m + n) * k + stored + 2048 <= limit:  # and barriers, bias on its way to registers
                return m, n, k, warps, buffers + in_registers
    raise RuntimeError(
        f"tma_epilogues: no tile fits the {limit} bytes of shared memory of {device}; use torch.nn.functional.linear"
    )


def check_layer(name: str, x, bias, variant: str | None, out_itemsize: int, **weights: torch.Tensor) -> str:
    """The variant to run: the one that is given, or of choose(). Raises what the wrappers say they raise."""
    require_triton_device(name, x, *weights.values(), *([] if bias is None else [bias]))
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: x is {x.dtype}; cast x and its weights to one of {DTYPES}")
    if x.ndim != 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; need [M, K]: pass x.reshape(-1, x.shape[-1])")
    for label, w in weights.items():
        if w.dtype is not x.dtype:
            raise TypeError(f"{name}: x is {x.dtype} and {label} {w.dtype}; both must be the same one of {DTYPES}")
        if w.ndim != 2 or w.shape[1] != x.shape[1]:
            raise ValueError(
                f"{name}: x has shape {tuple(x.shape)} and {label} {tuple(w.shape)}; need x [M, K] and, as "
                "torch.nn.Linear has it, weights [N, K]"
            )
    if len({w.shape[0] for w in weights.values()}) > 1:
        raise ValueError(f"{name}: {' and '.join(f'{k} {tuple(w.shape)}' for k, w in weights.items())} must be alike")
    K, N = x.shape[1], next(iter(weights.values())).shape[0]
    check_choice(name, (None, *VARIANTS), variant=variant)
    if K == 0 or K % 8 or N * out_itemsize % 16:
        raise ValueError(
            f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples, and K above 0: pad K to a multiple of 8 "
            f"and N to one of {16 // out_itemsize}"
        )
    if bias is not None and bias.dtype is not x.dtype:
        raise TypeError(f"{name}: bias is {bias.dtype}, x {x.dtype}; both must be the same")
    if bias is not None and (tuple(bias.shape) != (N,) or (N > 1 and bias.stride(0) != 1)):
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, strides {bias.stride()}; need [{N}], contiguous")
    require_tma_layout(name, x=x, **weights)
    if (sm := architecture(x.device)) < 90:
        raise RuntimeError(f"{name}: TMA comes with sm_90 (this is sm_{sm}); use torch.nn.functional.linear")
    if variant == "warp specialized":
        require_wgmma(name, x.device, "variant='persistent'")
    return variant or choose(x.device)


def launch_persistent(kernel, x, weights: tuple, y, *more, **options) -> None:
    """One of the persistent kernels on a layer, all of it checked; its weights share a tile's columns."""
    (M, K), N = x.shape, y.shape[1]
    block_m, block_n, block_k, num_warps, stages = fitting_tile(x.device, y.element_size())
    block_n //= len(weights)
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    kernel[(min(tiles, device_limits(x.device).sms),)](
        tma_descriptor(x, [block_m, block_k]), *(tma_descriptor(w, [block_n, block_k]) for w in weights),
        tma_descriptor(y, [block_m, STORE_COLUMNS[y.element_size()]]), *more, M, N, K, FAST=FAST, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=GROUP_M, num_warps=num_warps, num_stages=stages, **options,
    )  # fmt: skip
