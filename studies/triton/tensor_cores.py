"""tensor_cores, explained: what rounding alone predicts of each error, and which instruction each precision becomes.

The prediction rounds operands and result to their formats; its products and sums are exact. Where the measured error is
no larger, the additions cost nothing; for tf32 the same comparison tells whether the unit rounds the bits or cuts them.
"""

from __future__ import annotations

import math

from harness import Harness
from harness.codegen import CodegenError

import torch
import triton

from examples.triton.tensor_cores import INT8_STEP, PRECISIONS, TENSOR_CORES, convert, dot, product, reference

BITS = {"ieee": 23, "tf32x3": 21, "tf32": 10, "bfloat16": 7, "float16": 10}  # of the mantissa of an operand


def study(h: Harness) -> None:
    show_code(h)
    names = ["ieee", "float16", "int8"] if h.interpreted else list(PRECISIONS)
    show_errors(h, names, *h.pick(interpreted=(128, 128, 256), quick=(512, 512, 1024), full=(1024, 1024, 4096)))
    times = {name: table["triton"].ms for name, table in zip(names, h.lesson, strict=True) if table}
    if times:
        ladder = ", ".join(f"{name} {times['ieee'] / ms:.1f}x" for name, ms in times.items())
        h.say(f"the same kernel by precision, as speed over ieee: {ladder}")


def mantissa(x: torch.Tensor, bits: int, cut: bool = False) -> torch.Tensor:
    """float32 numbers with `bits` of their 23 bits of mantissa: rounded to the nearest, or cut off."""
    drop = 23 - bits
    as_int = x.view(torch.int32) + (0 if cut else 1 << (drop - 1))
    return (as_int & -(1 << drop)).view(torch.float32)


def predicted(a: torch.Tensor, b: torch.Tensor, name: str, cut: bool = False) -> torch.Tensor:
    """What rounding alone makes of it: operands in their precision, exact products and sums, the output rounded."""
    if name == "int8":
        return reference(convert(a, name), convert(b, name)) * INT8_STEP**2
    if name == "tf32x3":  # each operand in two parts of tf32, and the product of the small parts left out
        high = [mantissa(x, 10) for x in (a, b)]
        low = [mantissa(x - part, 10) for x, part in zip((a, b), high, strict=True)]
        (ah, bh), (al, bl) = ([part.double() for part in parts] for parts in (high, low))
        exact = (ah + al) @ (bh + bl) - al @ bl
    elif name == "tf32":
        exact = reference(mantissa(a, 10, cut), mantissa(b, 10, cut))
    else:
        exact = reference(convert(a, name), convert(b, name))
    return exact.to(PRECISIONS[name].dtype).double()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(rms, largest) error relative to the rms of the result."""
    size, error = want.square().mean().sqrt(), (got - want).abs()
    return (error.square().mean().sqrt() / size).item(), (error.max() / size).item()


def show_errors(h: Harness, names: list[str], M: int, N: int, K: int) -> None:
    """The same float32 inputs in every precision, against float64, beside what rounding alone would do."""
    a, b = h.randn(M, K), h.randn(N, K).t()
    want, rows = reference(a, b), {}
    for name in names:
        laid_out = b if PRECISIONS[name].k_major else b.contiguous()
        rms, largest = relative_error(product(a, laid_out, name), want)
        errors = {"rms": rms, "largest": largest, "rms of rounding": relative_error(predicted(a, b, name), want)[0]}
        if name == "tf32":
            errors["rms of cutting"] = relative_error(predicted(a, b, name, cut=True), want)[0]
        rows[name] = {key: float(f"{error:.3g}") for key, error in errors.items()}
        h.say(explanation(name, K, **{key.replace(" ", "_"): error for key, error in errors.items()}))
    h.table(f"error relative to the rms of the result, {M}x{N}x{K}", rows)


def explanation(name: str, K: int, rms: float, rms_of_rounding: float, rms_of_cutting: float = 0.0, **_) -> str:
    if rms_of_cutting:
        is_cut = abs(math.log(rms / rms_of_cutting)) < abs(math.log(rms / rms_of_rounding))
        reason = f"operands rounded to 10 bits explain {rms_of_rounding:.1e}, cut to 10 bits {rms_of_cutting:.1e}: "
        reason += f"here they are {'cut' if is_cut else 'rounded'}"
    elif rms < 1.1 * rms_of_rounding:
        kept = f"{BITS[name]} bits" if name in BITS else "a step of int8"
        reason = f"rounding to {kept} explains {rms_of_rounding:.1e}, so {K} additions add next to nothing"
    else:
        reason = f"rounding of operands and result explains {rms_of_rounding:.1e}, the {K} additions the rest"
    return f"{name}: rms error {rms:.1e}; {reason}"


def show_code(h: Harness, n: int = 4096) -> None:
    """The unit that multiplies and the format it is handed, by architecture; ieee must use no tensor core."""
    used: dict[str, dict[str, str]] = {}
    for name, precision in PRECISIONS.items():
        a = h.meta(n, n, dtype=precision.dtype)
        args = (a, a.t() if precision.k_major else a, precision.input_precision)
        for kernel in h.codegen(dot, *args, find=evidence(name)):
            found = [x for x in kernel.found if x in TENSOR_CORES.values()]
            if name == "ieee" and found:
                raise CodegenError(f"dot ieee on sm_{kernel.sm}: {found} in what should be float32 products")
            found += [x for x in kernel.found if x.startswith(("mma ", "kind::", "cvt", "fma"))]
            used.setdefault(name, {})[f"sm_{kernel.sm}"] = ", ".join(found)
    if not used:  # this run shows no code
        return
    h.table("instructions of each precision", used)
    if "tcgen05.mma" not in used["int8"]["sm_100"]:
        h.say(f"int8 on sm_100 is {used['int8']['sm_100']} with Triton {triton.__version__}, not its own tcgen05.mma")
    a = h.meta(n, n, dtype=torch.float32)
    (default,) = h.codegen(dot, a, a.t(), find={90: ("wgmma", "mma tf32")})
    h.say(f"unless told otherwise tl.dot takes float32 as tf32: mma tf32 x{default.found['mma tf32']} on sm_90")


def evidence(name: str) -> dict[int, tuple[str, ...]]:
    """What the PTX of a precision must hold on each architecture."""
    code = PRECISIONS[name].code
    if name == "ieee":
        return dict.fromkeys(TENSOR_CORES, code)
    if name == "int8":  # on sm_100 Triton 3.6 and 3.7 fall back to mma.sync; a later one may not, so that is not asked
        return {80: ("mma.sync", *code), 90: ("wgmma", *code), 100: code}
    return {sm: (instruction, *code) for sm, instruction in TENSOR_CORES.items()}
