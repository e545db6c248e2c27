"""What grouped_matmul takes: its checks, experts of a layer and how tokens fall to them, faults, torch's own calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from examples.common.device import architecture, require_triton_device
from examples.common.fp8 import E4M3, quantize_reference, require_scales
from examples.common.tma import require_tma_layout

DTYPES = (torch.float16, torch.bfloat16)
MOST_GROUPS = 4096  # of which every program holds the sizes in registers


def check_operands(
    name: str, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None, check_scales: bool,
) -> tuple[int, int, int, int]:  # fmt: skip
    """T, E, N and K of a [T, K] times b [E, K, N], K contiguous in both, T rows shared out by offs [E].

    Raises what require_triton_device, require_tma_layout and require_scales do; TypeError for dtypes; ValueError for
    shapes, a layout without K contiguous, and scales without FP8 or the other way round; RuntimeError for FP8 on a GPU
    before sm_89.
    """
    require_triton_device(name, a, b, offs)
    fp8 = a.dtype is E4M3
    if a.dtype not in (*DTYPES, E4M3) or b.dtype is not a.dtype or offs.dtype is not torch.int32:
        raise TypeError(
            f"{name}: dtypes {a.dtype}, {b.dtype} and offs {offs.dtype}; need the same one of {(*DTYPES, E4M3)}, and "
            "offs in torch.int32"
        )
    if a.ndim != 2 or b.ndim != 3 or offs.ndim != 1 or a.shape[1] != b.shape[1] or len(offs) != len(b):
        raise ValueError(
            f"{name}: shapes {tuple(a.shape)}, {tuple(b.shape)} and offs {tuple(offs.shape)}; need a [T, K], "
            "b [E, K, N] and offs [E]"
        )
    (T, K), (E, _, N) = a.shape, b.shape
    if E > MOST_GROUPS:
        raise ValueError(f"{name}: {E} groups; at most {MOST_GROUPS}: split them into several calls")
    if not offs.is_contiguous():
        raise ValueError(f"{name}: offs has strides {offs.stride()}; call offs.contiguous()")
    if K * a.element_size() % 16:
        raise ValueError(f"{name}: K is {K}; TMA needs rows of 16-byte multiples: pad K")
    require_tma_layout(name, **{"a": a, "b.transpose(1, 2)": b.transpose(1, 2)})
    if fp8 != (scale_a is not None) or fp8 != (scale_b is not None):
        raise ValueError(
            f"{name}: a is {a.dtype}, scale_a {type(scale_a).__name__}, scale_b {type(scale_b).__name__}; FP8 operands "
            "have scale_a [T] and scale_b [E, N], others have none"
        )
    if fp8:
        require_scales(name, a, check_scales, scale_a=(scale_a, ((T,),)), scale_b=(scale_b, ((E, N),)))
        require_triton_device(name, a, scale_a, scale_b)
        if not (scale_a.is_contiguous() and scale_b.is_contiguous()):
            raise ValueError(f"{name}: scales have strides {scale_a.stride()}, {scale_b.stride()}: call .contiguous()")
        if (sm := architecture(a.device)) < 89:
            raise RuntimeError(f"{name}: this GPU is sm_{sm}; FP8 tensor cores come with sm_89")
    return T, E, N, K


def experts(h, T: int, E: int, N: int, K: int, fp8: bool = False) -> tuple[torch.Tensor, ...]:
    """a [T, K] and b [E, K, N], transposed views of weights [E, N, K]; for FP8 scale_a [T] and scale_b [E, N], too.

    Fewer experts where memory does not suffice for E.
    """
    E = h.fit(E, bytes_each=24 * N * K)  # quantizing takes so much
    a, w = h.rows(T, K, dtype=h.half), h.randn(E * N, K, dtype=h.half)
    if not fp8:
        return a, w.view(E, N, K).transpose(1, 2)
    (a, scale_a), (w, scale_b) = (quantize_reference(x, (1, K)) for x in (a, w))
    return a, w.view(E, N, K).transpose(1, 2), scale_a.view(T), scale_b.view(E, N)


def routed(h, T: int, E: int, how: str = "skewed") -> torch.Tensor:
    """Where the rows of each of E experts end, int32: T rows, "even", one expert with a quarter of them ("hot"), or
    "skewed": as 1 / rank (Zipf), the ranks in no order, every 16th expert without rows."""
    rank = torch.arange(E, dtype=torch.float64) * 37 % E if E % 37 else torch.arange(E, dtype=torch.float64)
    shares = {"even": torch.ones(E), "skewed": torch.where(rank % 16 == 15, 0.0, 1 / (1 + rank))}
    shares["hot"] = torch.where(rank == E // 2, max(1, E - 1) / 3, 1.0)
    share = shares[how].double()
    return (T * share.cumsum(0) / share.sum()).round().int().to(h.device)


def described(h, fp8: bool, T: int = 8192, E: int = 64, N: int = 2048, K: int = 7168) -> tuple[torch.Tensor, ...]:
    """The operands of grouped_matmul without data, for h.codegen()."""
    a, w = (h.meta(*size, dtype=E4M3 if fp8 else torch.bfloat16) for size in ((T, K), (E, N, K)))
    scales = (h.meta(*size, dtype=torch.float32) for size in ((T,), (E, N)) if fp8)
    return a, w.transpose(1, 2), h.meta(E, dtype=torch.int32), *scales


def spans(ends: list[int]) -> list[tuple[int, int, int]]:
    """(expert, its first row, the one after its last) of those that have rows."""
    return [(e, begin, end) for e, (begin, end) in enumerate(itertools.pairwise([0, *ends])) if begin < end]


def reference(a, b, offs, scale_a=None, scale_b=None) -> torch.Tensor:
    y = torch.zeros(a.shape[0], b.shape[2], dtype=torch.float64, device=a.device)
    for e, begin, end in spans(offs.tolist()):
        y[begin:end] = (a[begin:end].double() @ b[e].double()) * (1 if scale_b is None else scale_b[e].double())
    return y if scale_a is None else y * scale_a[:, None].double()


def least_bytes(a, b, offs) -> int:
    """Of a, of the weights of experts that have rows, and of a result in 16 bits."""
    return a.nbytes + len(spans(offs.tolist())) * b[0].nbytes + 2 * a.shape[0] * b.shape[2]


def faults(offs: torch.Tensor) -> dict[str, Callable]:
    """What a check of grouped_matmul must notice: results of a loop or a group that is one too short."""
    later = (offs + 1).clamp(max=int(offs[-1]))
    return {
        "without its last 32 of K": lambda a, b, offs, *scales: reference(a[:, :-32], b[:, :-32], offs, *scales),
        "with each group's first row in the one before": lambda a, b, offs, *scales: reference(a, b, later, *scales),
    }


def budget(h, K: int, fp8: bool) -> dict:
    """FP8 MMAs of Hopper cut 32 products and the sum so far to about 14 bits, as examples/fp8/fp8_matmul.py has it."""
    if h.interpreted or not fp8:
        return {"terms": K, "dtype": torch.bfloat16 if fp8 else h.half}
    return {"terms": min(K, 4096), "acc": 2.0**-12, "dtype": torch.bfloat16}


def one_by_one(ends: list[int], *, fp8: bool, interpreted: bool = False) -> Callable:
    """A loop over the experts whose sizes the host knows, each a GEMM of torch's into its rows of the result."""

    def call(a, b, offs, scale_a=None, scale_b=None) -> torch.Tensor:
        y = torch.empty(a.shape[0], b.shape[2], dtype=torch.bfloat16 if fp8 else a.dtype, device=a.device)
        for e, begin, end in spans(ends):
            rows = slice(begin, end)
            if not fp8:
                torch.mm(a[rows], b[e], out=y[rows])
            elif interpreted:
                y[rows] = ((a[rows].float() * scale_a[rows, None]) @ (b[e].float() * scale_b[e])).bfloat16()
            else:
                scales, how = (scale_a[rows, None], scale_b[e][None]), {"use_fast_accum": True, "out": y[rows]}
                torch._scaled_mm(a[rows], b[e], *scales, out_dtype=y.dtype, **how)
        return y

    return call


def _grouped(a, b, offs) -> torch.Tensor:
    return torch._grouped_mm(a, b, offs=offs)


def _scaled_grouped(a, b, offs, scale_a, scale_b) -> torch.Tensor:
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True)


def libraries(h, a, b, offs, scale_a=None, scale_b=None) -> dict[str, Callable]:
    """torch's loop over experts, and its grouped call where this GPU has it (in the interpreter it is not run).

    cuBLAS multiplies FP8 matrices of a multiple of 16 rows only: with other groups there is no loop.
    """
    fp8, ends = scale_a is not None, offs.tolist()
    calls = {}
    if not fp8 or h.interpreted or all((end - begin) % 16 == 0 for _, begin, end in spans(ends)):
        calls["torch loop"] = one_by_one(ends, fp8=fp8, interpreted=h.interpreted)
    name, grouped = ("torch._scaled_grouped_mm", _scaled_grouped) if fp8 else ("torch._grouped_mm", _grouped)
    if architecture(h.device) // 10 in (9, 10):
        calls[name] = grouped
    return calls
