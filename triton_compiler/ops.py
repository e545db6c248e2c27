"""Pointwise operations: how torch promotes the types of their arguments, and what each is in Triton."""

from __future__ import annotations

import math

import sympy
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

HALVES = (torch.float16, torch.bfloat16)
TRITON = {torch.bool: "tl.int1", **{getattr(torch, name): f"tl.{name}" for name in (
    "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")}}  # fmt: skip

# Operations of ATen: those whose result is a float, those whose result is what they are computed in, and bool.
LIBDEVICE = "expm1 log1p log10 tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma"
FLOAT = {
    **{name: f"libdevice.{name}({{0}})" for name in LIBDEVICE.split()}, "atan2": "libdevice.atan2({0}, {1})",
    **{name: f"tl.{name}({{0}})" for name in ("exp", "exp2", "log", "log2", "rsqrt", "sin", "cos")},
    "sqrt": "tl.sqrt_rn({0})", "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))", "reciprocal": "1.0 / {0}",
}  # fmt: skip
DEFAULT = {
    "neg": "-{0}", "abs": "tl.abs({0})", "square": "{0} * {0}", "mul": "{0} * {1}", "relu": "dev.maximum({0}, 0)",
    "sign": "tl.where({0} > 0, 1, 0) - tl.where({0} < 0, 1, 0)", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
    "round": "libdevice.rint({0})", "trunc": "libdevice.trunc({0})", "fmod": "libdevice.fmod({0}, {1})",
    "maximum": "dev.maximum({0}, {1})", "minimum": "dev.minimum({0}, {1})", "remainder": "dev.float_mod({0}, {1})",
    "fmax": "tl.where(({0} > {1}) | ({1} != {1}), {0}, {1})", "fmin": "tl.where(({0} < {1}) | ({1} != {1}), {0}, {1})",
    "copysign": "libdevice.copysign({0}, {1})", "hypot": "libdevice.hypot({0}, {1})",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), "{0} << {1}"),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), "{0} >> {1}"),
}  # fmt: skip
COMPARISONS = {
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}", "logical_and": "({0} != 0) & ({1} != 0)", "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_xor": "({0} != 0) ^ ({1} != 0)", "logical_not": "{0} == 0", "isnan": "{0} != {0}",
    "isinf": "tl.abs({0}) == float('inf')",
}  # fmt: skip
PROMOTION = {
    **dict.fromkeys(FLOAT, KIND.INT_TO_FLOAT), **dict.fromkeys(DEFAULT, KIND.DEFAULT),
    **dict.fromkeys(COMPARISONS, KIND.ALWAYS_BOOL),
}  # fmt: skip
COMPARISONS["eq_or_nan"] = "({0} == {1}) | ({0} != {0})"  # from here on what only lowering.py asks for
OPS = {
    **FLOAT, **DEFAULT, **COMPARISONS, "identity": "{0}", "add": "{0} + {1}", "sub": "{0} - {1}", "div": "{0} / {1}",
    "cube": "{0} * {0} * {0}", "reciprocal_square": "1.0 / ({0} * {0})", "div_by_zero": "{0} / ({0} * 0)",
    "pow": "libdevice.pow({0}, {1})", "bitwise_not": "~{0}", "where": "tl.where({0}, {1}, {2})",
    "div_floor_float": "dev.float_floor_div({0}, {1})", "div_trunc_float": "libdevice.trunc({0} / {1})",
    "div_floor_int": "dev.floor_div({0}, {1})", "div_trunc_int": "{0} // {1}",
}  # fmt: skip
INTEGERS = {
    "remainder": "dev.floor_mod({0}, {1})", "fmod": "{0} % {1}", "isnan": "{0} != {0}", "isinf": "{0} != {0}",
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), "{0}"),
}  # fmt: skip
AS_NUMBERS = "identity bitwise_and bitwise_or bitwise_xor where eq ne gt lt ge le logical_not"
BOOLS = {
    **{name: OPS[name] for name in AS_NUMBERS.split()}, "abs": "{0}", "eq_or_nan": "{0} == {1}",
    **dict.fromkeys(("add", "maximum", "logical_or"), "{0} | {1}"), "logical_xor": "{0} ^ {1}",
    **dict.fromkeys(("mul", "minimum", "logical_and"), "{0} & {1}"),
}  # fmt: skip
COMBINE = {"sum": "{0} + {1}", "prod": "{0} * {1}", "max": "dev.maximum({0}, {1})", "min": "dev.minimum({0}, {1})"}


def template(op: str, compute: torch.dtype) -> str | None:
    """What an operation is in Triton when it is computed in this dtype; None where it is not known."""
    if compute is torch.bool:
        return BOOLS.get(op)
    if compute is torch.float64 and op == "sqrt":
        return "libdevice.sqrt({0})"
    return (None if compute.is_floating_point else INTEGERS.get(op)) or OPS.get(op)


def register(dtype: torch.dtype) -> torch.dtype:
    """What a value of this dtype is computed in."""
    return torch.float32 if dtype in HALVES else dtype


def literal(number, dtype: torch.dtype) -> str:
    if isinstance(number, sympy.Expr):
        return str(number)
    if dtype.is_floating_point:
        number = float(number)
        return repr(number) if math.isfinite(number) else f'float("{number}")'
    return str(int(number)) if dtype is not torch.bool else str(int(bool(number)))


def identity(kind: str, dtype: torch.dtype) -> str:
    """What changes nothing in such a reduction."""
    if kind in ("sum", "prod"):
        return literal(0 if kind == "sum" else 1, dtype)
    if dtype.is_floating_point:
        return 'float("-inf")' if kind == "max" else 'float("inf")'
    limits = torch.iinfo(dtype)
    return str(limits.min if kind == "max" else limits.max)
