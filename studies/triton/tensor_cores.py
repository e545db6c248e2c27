"""tensor_cores, explained: what rounding alone predicts of each error, and which instruction each precision becomes.

The prediction rounds operands and result to their formats; its products and sums are exact. Where the measured error is
no larger, the additions add none; for tf32 the comparison also tells whether the unit rounds or cuts the bits.
"""

from __future__ import annotations

import math

from harness import Harness
from harness.codegen import CodegenError

import torch
import triton

from examples.triton.tensor_cores import dot, matrices, product, reference, rms_error
from examples.triton.tensor_cores_precisions import INT8_STEP, PRECISIONS, TENSOR_CORES, convert


def study(h: Harness) -> None:
    if h.shows_code:
        show_code(h)
    names = ["ieee", "float16", "int8"] if h.interpreted else list(PRECISIONS)
    M, N, K = h.pick(interpreted=(128, 128, 256), quick=(512, 512, 1024), full=(1024, 1024, 4096))
    for name in names:
        a, b = matrices(h, name, M, N, K)
        want = reference(a, b)
        cases = {"rounded": predicted(a, b, name)} | (
            {"cut": predicted(a, b, name, cut=True)} if name == "tf32" else {}
        )
        error, explained = rms_error(product(a, b, name), want), {k: rms_error(x, want) for k, x in cases.items()}
        h.say(explanation(name, K, error, **explained))


def mantissa(x: torch.Tensor, bits: int, cut: bool = False) -> torch.Tensor:
    """float32 numbers with `bits` of their 23 bits of mantissa: rounded to the nearest, or cut off."""
    drop = 23 - bits
    as_int = x.view(torch.int32) + (0 if cut else 1 << (drop - 1))
    return (as_int & -(1 << drop)).view(torch.float32)


def predicted(a: torch.Tensor, b: torch.Tensor, name: str, cut: bool = False) -> torch.Tensor:
    """What rounding alone makes of it: operands in their precision, exact products and sums, the output rounded."""
    if name == "int8":
        return reference(*convert(name, a, b)) * INT8_STEP**2
    if name == "tf32x3":  # each operand in two parts of tf32, and the product of the small parts left out
        high = [mantissa(x, 10) for x in (a, b)]
        low = [mantissa(x - part, 10) for x, part in zip((a, b), high, strict=True)]
        (ah, bh), (al, bl) = ([part.double() for part in parts] for parts in (high, low))
        exact = (ah + al) @ (bh + bl) - al @ bl
    elif name == "tf32":
        exact = reference(mantissa(a, 10, cut), mantissa(b, 10, cut))
    else:
        exact = reference(*convert(name, a, b))
    return exact.to(PRECISIONS[name].dtype).double()


def explanation(name: str, K: int, error: float, rounded: float, cut: float | None = None) -> str:
    if cut:
        nearer = "truncated" if abs(math.log(error / cut)) < abs(math.log(error / rounded)) else "rounded"
        reason = (
            f"operands rounded to 10 bits explain {rounded:.1e}, truncated to 10 bits {cut:.1e}: here they are {nearer}"
        )
    elif error < 1.1 * rounded:
        reason = f"rounding explains {rounded:.1e}, so {K} additions add next to nothing"
    else:
        reason = f"rounding of operands and result explains {rounded:.1e}, the {K} additions the rest"
    return f"{name}: rms error {error:.1e}; {reason}"


def show_code(h: Harness) -> None:
    """The unit that multiplies and the format it is handed, by architecture; ieee must use no tensor core."""
    used: dict[str, dict[str, str]] = {}
    for name, precision in PRECISIONS.items():
        x = h.meta(4096, 4096, dtype=precision.dtype)
        args = (x, x.t() if precision.k_major else x, precision.input_precision)
        find = {sm: (unit, *precision.code) for sm, unit in TENSOR_CORES.items()}
        if name == "ieee":
            find = dict.fromkeys(TENSOR_CORES, precision.code)
        elif name == "int8":  # on sm_100 Triton 3.6 and 3.7 fall back to mma.sync; a later one may not
            find[100] = precision.code
        for kernel in h.codegen(dot, *args, find=find):
            units = [unit for unit in TENSOR_CORES.values() if unit in kernel.found]
            if name == "ieee" and units:
                raise CodegenError(f"dot ieee on sm_{kernel.sm}: {units} in what should be float32 products")
            units += [each for each in kernel.found if each.startswith(("mma ", "kind::", "cvt", "fma"))]
            used.setdefault(name, {})[f"sm_{kernel.sm}"] = ", ".join(units)
    h.table("instructions of each precision", used)
    if "tcgen05.mma" not in used["int8"]["sm_100"]:
        h.say(f"int8 on sm_100 is {used['int8']['sm_100']} with Triton {triton.__version__}, not its own tcgen05.mma")
    x = h.meta(4096, 4096, dtype=torch.float32)
    (default,) = h.codegen(dot, x, x.t(), find={90: ("wgmma", "mma tf32")})
    h.say(f"unless told otherwise tl.dot takes float32 as tf32: mma tf32 x{default.found['mma tf32']} on sm_90")
