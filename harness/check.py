"""Is the output right? A float64 reference, an error budget that means something, and poisoned outputs.

The budget of one element is

    (0.51 * stores * eps(output) + roundings * eps(acc)) * |want|
    + (16 * eps(acc) * sqrt(terms) + 8 * operand_eps) * rms(row)
    + the smallest subnormal of the output + the smallest normal float32, below which a GPU may flush to zero

The first line is what an element's own size bears: the one rounding of the result to its own dtype (`stores` of them,
where a value is stored more than once on its way), and `roundings` of the arithmetic before (an exponential amplifies
the rounding of its argument). The second follows the size of the row and not of the element, because a sum may cancel:
`terms` products summed in the accumulator (0: nothing is summed), and operands that a unit rounds first (TF32 keeps
10 bits: 2**-11).

Noise must not hide a wrong factor: the gain, <got, want> / <want, want> with every row counted alike, is 1 within
`gain` and what the roundings of so many elements leave of it. A budget that zeros, the mean of the reference or a
result that is wrong on purpose (`wrong`) would pass proves nothing, so check() refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch.overrides import TorchFunctionMode

CHUNK = 2**24  # elements judged at a time: float64 temporaries stay below 1 GiB
SHORT_ROW = 32  # columns
GUARD = 256  # bytes of canary on either side of an output; keeps the 16-byte alignment that wide loads need
ADVICE = "tighten the budget (terms, roundings), or use inputs whose answer varies more"
POISON = 0xFF  # every byte: NaN in each float format, -1 in each integer


class CheckError(AssertionError):
    """A wrong output: dtype, shape, an unwritten or out-of-budget element, a write outside the output."""


class VacuousCheck(AssertionError):
    """A check that a trivial output would pass; the inputs or the budget must change."""


class _PoisonedEmpty(TorchFunctionMode):
    """torch.empty and its kin return memory full of poison, with canaries around it, as zeros and full have."""

    EMPTY = (
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.Tensor.new_empty,
        torch.Tensor.new_empty_strided,
    )
    FILLED = (
        *(torch.zeros, torch.zeros_like, torch.Tensor.new_zeros, torch.ones, torch.ones_like, torch.Tensor.new_ones),
        *(torch.full, torch.full_like, torch.Tensor.new_full),
    )

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[tuple[torch.Tensor, int]] = []  # each with the size of the output in it

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func not in self.EMPTY + self.FILLED or made.device.type == "meta" or made.layout is not torch.strided:
            return made
        size = made.untyped_storage().nbytes()
        padded = (size + 15) // 16 * 16
        buffer = torch.full((padded + 2 * GUARD,), POISON, dtype=torch.uint8, device=made.device)
        self.buffers.append((buffer, size))
        inside = buffer[GUARD : GUARD + padded].view(made.dtype)
        guarded = inside.as_strided(made.shape, made.stride(), inside.storage_offset())
        return guarded if func in self.EMPTY else guarded.copy_(made)

    def broken_canaries(self) -> int:
        """Bytes outside the outputs that somebody wrote."""
        edges = [edge for buffer, size in self.buffers for edge in (buffer[:GUARD], buffer[GUARD + size :])]
        return sum(int((edge != POISON).sum()) for edge in edges)


@contextmanager
def poisoned_outputs(what: str) -> Iterator[None]:
    """Within it, memory that torch.empty and its kin return is poisoned, and that of torch.zeros too guarded.

    Raises CheckError on the way out when something was written outside that memory.
    """
    with _PoisonedEmpty() as mode:
        yield
    if broken := mode.broken_canaries():
        raise CheckError(f"{what}: {broken} bytes outside its output were written (within {GUARD} bytes of it)")


def _eps(acc: torch.dtype | float) -> float:
    return torch.finfo(acc).eps if isinstance(acc, torch.dtype) else float(acc)


def _row_rms(want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Root mean square of each row (the last dimension; one row for a vector), of what is finite in `dtype`.

    A row of a few values says little about the size of what was summed: it takes that of all rows if it is larger.
    """
    rows = want.reshape(-1, want.shape[-1]) if want.ndim > 1 else want.reshape(1, -1)
    step = max(1, CHUNK // max(1, rows.shape[1]))
    parts = []
    for part in rows.split(step):
        finite = torch.isfinite(part.to(dtype).double())  # float8 has no isfinite
        squares = torch.where(finite, part, 0.0).square_()
        parts.append(torch.stack([squares.sum(1), finite.sum(1).double()]))
    sums, counts = torch.cat(parts, dim=1)
    rms = (sums / counts.clamp(min=1)).sqrt()
    if rows.shape[1] < SHORT_ROW:
        rms.clamp_(min=(sums.sum() / counts.sum().clamp(min=1)).sqrt().item())
    return rms


def judge(
    got: torch.Tensor,
    want: torch.Tensor,
    *,
    what: str,
    dtype: torch.dtype,
    terms: int = 1,
    roundings: int = 0,
    acc: torch.dtype | float = torch.float32,
    operand_eps: float = 0.0,
    stores: int = 1,
    gain: float = 1e-3,
    constant_ok: bool = False,
) -> float:
    """Largest error of `got` as a fraction of its budget (at most 1); `want` is the float64 reference.

    NaN must meet NaN, an infinity the same infinity; a reference beyond the range of `dtype` counts as infinite, and
    one within its budget of that range may be either. Beyond the range of a float8, what torch's cast gives (NaN for
    e4m3fn, an infinity for e5m2) and the format's largest number, as GPUs saturate to it, are both right. Raises
    CheckError, with the place and the numbers, for a wrong dtype, shape, value or gain, and VacuousCheck when most
    elements of zeros or of the mean would pass too (`constant_ok` says that they should: an input whose answer is
    nearly a constant).
    """
    if want.dtype is not torch.float64:
        raise TypeError(f"{what}: the reference must be float64, got {want.dtype}; compute it from x.double()")
    if got.dtype is not dtype:
        raise CheckError(f"{what}: dtype is {got.dtype}, expected {dtype}")
    if got.shape != want.shape:
        raise CheckError(f"{what}: shape is {tuple(got.shape)}, expected {tuple(want.shape)}")
    if got.device != want.device:
        raise CheckError(f"{what}: output is on {got.device}, expected {want.device}")
    if not want.numel():
        return 0.0

    if not dtype.is_floating_point:
        wrong = got != want.to(dtype)
        if bad := int(wrong.sum()):
            place = torch.nonzero(wrong)[0].tolist()
            raise CheckError(f"{what}: {bad} of {want.numel()} elements are wrong, the first at {place}")
        return 0.0

    info = torch.finfo(dtype)
    columns = want.shape[-1] if want.ndim > 1 else want.numel()
    rms = _row_rms(want, dtype)
    mean = (want.mean(dim=-1) if columns > 1 else want.mean()).reshape(-1)
    relative = 0.51 * stores * info.eps + roundings * _eps(acc)
    per_row = 16 * _eps(acc) * math.sqrt(terms) + 8 * operand_eps
    tiny = info.smallest_normal * info.eps + torch.finfo(torch.float32).smallest_normal

    shape = want.shape
    got, want = got.reshape(-1), want.reshape(-1)
    worst, worst_at, bad, unwritten = 0.0, 0, 0, 0
    counted, zero_passes, mean_candidates, mean_passes, mean_exact = 0, 0, 0, 0, 0
    agreement, squares, fourths = 0.0, 0.0, 0.0  # of elements in units of their row's size
    for start in range(0, want.numel(), CHUNK):
        w, g = want[start : start + CHUNK], got[start : start + CHUNK].double()
        row = torch.arange(start, start + w.numel(), device=w.device) // columns
        rounded = w.to(dtype).double()  # beyond the range of dtype this is an infinity, as the output must be
        finite = torch.isfinite(rounded)
        budget = relative * w.abs() + per_row * rms[row] + tiny
        excused = ~finite & ((g == rounded) | (g.isnan() & rounded.isnan()))
        # Near the end of the range, rounding decides between the largest number and infinity: either will do.
        at_the_end = w.isfinite() & ((w.abs() - info.max).abs() <= budget + info.eps * info.max)
        excused |= at_the_end & (g * w.sign() >= info.max - budget)
        if dtype.itemsize == 1:
            excused |= (w.abs() > info.max) & (g == w.sign() * info.max)
        ratio = torch.where(finite, (g - w).abs() / budget, math.inf)
        ratio = torch.where(excused, 0.0, ratio).nan_to_num_(nan=math.inf, posinf=math.inf)
        bad += int((ratio > 1).sum())
        unwritten += int((g.isnan() & ~w.isnan()).sum())
        if (largest := ratio.max().item()) > worst:
            worst, worst_at = largest, start + int(ratio.argmax())
        unit = torch.where(finite & ~excused & (rms[row] > 0), w / rms[row], 0.0)
        agreement += (torch.where(unit != 0, g / rms[row], 0.0) * unit).sum().item()
        squares, fourths = squares + unit.square().sum().item(), fourths + unit.square().square().sum().item()
        if not constant_ok:
            nonzero = finite & (rounded != 0)
            counted += int(nonzero.sum())
            zero_passes += int((nonzero & (w.abs() <= budget)).sum())
            centre = mean[row] if mean.numel() > 1 else mean
            off = (w - centre).abs()
            mean_candidates += int((finite & off.isfinite()).sum())
            mean_passes += int((finite & (off <= budget)).sum())
            mean_exact += int((finite & (off == 0)).sum())
    if 2 * zero_passes > counted:
        raise VacuousCheck(f"{what}: zeros would pass in {zero_passes} of {counted} elements; {ADVICE}")
    if 2 * mean_passes > mean_candidates and mean_exact < mean_passes:
        raise VacuousCheck(f"{what}: the mean would pass in {mean_passes} of {mean_candidates} elements; {ADVICE}")
    if bad:
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst_at), shape))
        budget = relative * want[worst_at].abs() + per_row * rms[worst_at // columns] + tiny
        raise CheckError(
            f"{what}: {bad} of {want.numel()} elements are wrong, the worst at {list(place)}: "
            f"got {got[worst_at].item():.6g}, want {want[worst_at].item():.6g}, budget {budget.item():.2g}"
            + (f"; {unwritten} are NaN where the reference is not, as memory nobody wrote is" if unwritten else "")
        )
    if squares:  # roundings cancel over as many elements as carry the sum; four standard deviations of the rest
        allowed = gain + 4 * (relative + per_row) * math.sqrt(fourths) / squares
        if not abs(agreement / squares - 1) <= allowed:
            raise CheckError(
                f"{what}: every element is within its budget, but their gain is {agreement / squares:.6g} where 1 is "
                f"wanted, {allowed:.2g} allowed: a factor is wrong"
            )
    return worst


def tensors_of(result: torch.Tensor | tuple | list) -> tuple[torch.Tensor, ...]:
    """The tensors that a call returned. XLA's come to the CPU, where their reference is."""
    results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return tuple(x.cpu() if isinstance(x, torch.Tensor) and x.device.type == "xla" else x for x in results)


def check(
    fn: Callable,
    reference: Callable,
    *inputs,
    what: str,
    dtype: torch.dtype | None = None,
    poison: bool = True,
    wrong: dict | None = None,
    **budget,
) -> float:
    """Run fn(*inputs) on poisoned memory and judge every tensor it returns; the largest error / budget.

    reference(*inputs) returns the float64 result, on the very inputs that fn gets. `dtype` is the dtype expected
    of the outputs, that of the first input unless given. `budget` goes to judge(). Inputs must survive the call.
    `wrong` holds float64 results of a fault each, or what makes them of the inputs, by what the fault is ("without the
    last K step"): none may pass.
    Raises CheckError or VacuousCheck.
    """
    expected = dtype or inputs[0].dtype
    wants = tensors_of(reference(*inputs))
    for fault, made in (wrong or {}).items():
        faulty = [each.to(expected) for each in tensors_of(made(*inputs) if callable(made) else made)]
        with suppress(CheckError):
            judge_all(faulty, wants, what=what, dtype=expected, **budget)
            raise VacuousCheck(f"{what}: a result {fault} would pass; {ADVICE}")
    if not poison:
        return judge_all(fn(*inputs), wants, what=what, dtype=expected, **budget)
    before = [x.clone() if isinstance(x, torch.Tensor) else None for x in inputs]
    with poisoned_outputs(what):
        result = fn(*inputs)
    for i, (x, copy) in enumerate(zip(inputs, before, strict=True)):
        if copy is not None and not torch.equal(_bits(x), _bits(copy)):
            raise CheckError(f"{what}: the call changed its input {i}")
    return judge_all(result, wants, what=what, dtype=expected, **budget)


def rms_errors(result, wants: tuple[torch.Tensor, ...], *, what: str, dtype: torch.dtype) -> list[float]:
    """Root mean square of the error of each output; at least what one rounding to its dtype leaves.

    Raises CheckError for a wrong dtype or shape, an infinity or NaN, or an error so large that the output says nothing;
    VacuousCheck for a reference that is zero everywhere.
    """
    results = tensors_of(result)
    if len(results) != len(wants):
        raise CheckError(f"{what}: returned {len(results)} tensors, expected {len(wants)}")
    errors = []
    for i, (got, want) in enumerate(zip(results, wants, strict=True)):
        where = what if len(wants) == 1 else f"{what} output {i}"
        if got.dtype is not dtype or got.shape != want.shape:
            raise CheckError(f"{where}: {got.dtype} {tuple(got.shape)}, expected {dtype} {tuple(want.shape)}")
        error = (got.double() - want).square().mean().sqrt().item()
        size = want.square().mean().sqrt().item()
        if size == 0:
            raise VacuousCheck(f"{where}: the reference is zero everywhere; use other inputs")
        if not error <= size / 4:
            raise CheckError(f"{where}: off by {error:.3g} (rms) where the reference is {size:.3g}")
        errors.append(max(error, torch.finfo(dtype).eps * size))
    return errors


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes, so that equal NaNs compare equal."""
    # A dimension of one element counts as contiguous whatever its stride, and view() wants a last stride of 1.
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


def judge_all(result, wants: tuple[torch.Tensor, ...], *, what: str, **budget) -> float:
    """judge() for each output of a call; the largest of their errors."""
    results = tensors_of(result)
    if len(results) != len(wants):
        raise CheckError(f"{what}: returned {len(results)} tensors, expected {len(wants)}")
    names = [what] if len(wants) == 1 else [f"{what} output {i}" for i in range(len(wants))]
    return max(judge(g, w, what=n, **budget) for g, w, n in zip(results, wants, names, strict=True))
