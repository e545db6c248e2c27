"""What a technique's demo(h) is handed: inputs, checks, tables, code, facts and skips, all of them recorded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable

from harness import report
from harness.catalog import Needs
from harness.check import check as check_once
from harness.codegen import CodegenError, Kernel, compile_for
from harness.compare import (
    Comparison,
    Work,
    check_variants,
    describe,
    is_compiled,
    is_ours,
    profile_variants,
    range_name,
    time_variants,
)
from harness.hardware import Machine, Skip, ceilings, machine

import torch
from rich.console import Console


class Harness:
    """One technique's run. `device` is where its inputs live, `full` says whether sizes are those worth timing.

    `interpreted` says that its Triton kernels run in the interpreter; `half` is the 16-bit dtype to demonstrate with:
    bfloat16, or float16 where kernels are interpreted.
    """

    SANITIZED = False  # under a sanitizer, a hundred times slower: the smallest sizes, our kernels, and no code shown

    def __init__(
        self,
        name: str,
        needs: Needs | None = None,
        *,
        full: bool = False,
        timing: bool = True,
        profile: bool = False,
        seed: int = 0,
        console: Console | None = None,
    ) -> None:
        self.name, self.needs = name, needs or Needs()
        self.full, self.timing, self.profile = full, timing, profile
        self.machine: Machine = machine()
        # XLA's programs run on the device of PJRT, and are put next to this process's CPU.
        self.device = torch.device("cpu" if self.needs.xla else self.machine.device)
        # Only Triton kernels are interpreted: a technique of torch alone runs for real, and is timed, on any CPU.
        self.interpreted = self.machine.mode == "interpreted" and self.needs.triton
        self.half = torch.float16 if self.interpreted else torch.bfloat16
        self.console = console or report.make_console()
        self.record = report.ExampleRecord(name)
        # From the name, so that running one technique alone gives it the data it has in the whole topic.
        self.seed = (seed + zlib.crc32(name.encode())) % 2**63
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    @property
    def shows_code(self) -> bool:
        """Whether this run is also about generated code; else codegen() compiles nothing and returns no kernels."""
        return not (self.SANITIZED or self.profile)

    # --- sizes and inputs

    def pick(self, quick, full, interpreted=None):
        """The sizes of this run: large, small, or what the interpreter, or a sanitizer, can do in a second or two."""
        if (self.interpreted or self.SANITIZED) and interpreted is not None:
            return interpreted
        return full if self.full else quick

    def fit(self, n: int, bytes_each: int) -> int:
        """`n`, halved until n * bytes_each fits three quarters of the GPU memory that is free now."""
        if self.machine.mode == "gpu":
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            while n > 1 and n * bytes_each > 0.75 * free:
                n //= 2
        return n

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers of standard deviation `scale` in `dtype` on this run's device, from its seed."""
        values = torch.randn(*shape, generator=self._generator, device=self.device)
        return values.mul_(scale).to(dtype)

    def randint(self, high: int, *shape: int) -> torch.Tensor:
        """int64 numbers from 0 to high - 1 on this run's device, from its seed."""
        return torch.randint(high, shape, generator=self._generator, device=self.device)

    def meta(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor without data, for codegen(): a shape and a dtype (bfloat16 unless given)."""
        return torch.empty(*shape, dtype=dtype or torch.bfloat16, device="meta")

    def compiled(self, fn: Callable, **options) -> Callable:
        """torch.compile(fn) for one shape, from an empty compiler: no graphs, no recompile limit of earlier cases."""
        torch.compiler.reset()
        return torch.compile(fn, dynamic=False, **options)

    # --- evidence

    def say(self, text: str) -> None:
        report.say(self.console, f"  {text}")

    def fact(self, name: str, value) -> None:
        """Record and print a result that is not a time: graphs, recompiles, bytes, seconds to compile.

        Raises TypeError for what JSON cannot hold (NaN, keys that are no strings): convert it first.
        """
        self._keep(name, value)
        if isinstance(value, dict):  # one line for each, and one more level fits on it
            self.say(f"{name}:")
            for key, each in value.items():
                shown = ", ".join(f"{k}: {v}" for k, v in each.items()) if isinstance(each, dict) else each
                self.say(f"  {key}: {shown}")
        else:
            self.say(f"{name}: {value}")

    def _keep(self, name: str, value) -> None:
        try:
            if json.loads(json.dumps(value, allow_nan=False)) != (list(value) if isinstance(value, tuple) else value):
                raise ValueError("it would come back changed")
        except (TypeError, ValueError) as error:
            raise TypeError(f"fact {name!r}: {value!r} cannot be recorded as JSON: {error}") from None
        self.record.facts[name] = value

    def table(self, name: str, rows: dict[str, dict]) -> None:
        """fact(name, rows), printed as a table: a row for each key, a column for each key within. Lists read a / b."""
        self._keep(name, rows)
        report.show_rows(self.console, name, rows)

    def check(self, fn: Callable, reference: Callable, *inputs, what: str | None = None, **budget) -> None:
        """Run fn on poisoned memory and hold it to the float64 reference; harness.check says how.

        Raises CheckError (wrong) or VacuousCheck (the check proves nothing). Not done under --profile, where
        only the calls that a profiler is to see run.
        """
        if self.profile:
            return
        what = what or f"{getattr(fn, '__name__', type(fn).__name__)} {describe(inputs)}"
        entry = {"what": what, "error": None, "passed": False}
        self.record.checks.append(entry)
        if is_compiled(fn):
            budget.setdefault("poison", False)  # it allocates for itself, and would trace the poisoning
        with self.progress(what):
            entry["error"] = check_once(fn, reference, *inputs, what=what, **budget)
        entry["passed"] = True
        self.say(f"right  {what}: largest error / budget {entry['error']:.2f}")

    def compare(
        self,
        variants: dict[str, Callable],
        reference: Callable,
        *inputs,
        baseline: str,
        work: Work,
        title: str | None = None,
        case: str | None = None,
        references: dict[str, Callable] | None = None,
        whole_calls: bool = False,
        beside: float | None = None,
        cold: bool = False,
        first_calls: dict[str, float | None] | None = None,
        comparators: Iterable[str] = (),
        **budget,
    ) -> Comparison | None:
        """Check every variant against one float64 reference, then time them all; see harness.compare.

        A variant that draws its own random numbers has a reference of its own in `references`, under its name. That
        reference is called with torch's random state as the variant found it: what it draws is what the variant drew.
        `whole_calls` times calls as a caller in a loop sees them, the host's launching included. `beside` holds every
        variant to that many times the baseline's own error. `cold` empties the compiler's caches for first calls, and
        `first_calls` (seconds) replaces those that the technique has timed itself; None: compiled before this table.
        `comparators` are the kernels of this repository that the technique is put next to: README's best row of the
        table is none of them.
        In the interpreter only the baseline and our own variants are checked and nothing is timed; under a sanitizer
        our own, on a GPU; with --check-only nothing is timed; with --profile each is warmed and then called once for
        the profiler.
        """
        if baseline not in variants:
            raise ValueError(f"compare: baseline {baseline!r} is not one of the variants {list(variants)}")
        if unknown := set(references or ()) - set(variants):
            raise ValueError(f"compare: references for {sorted(unknown)}, but the variants are {list(variants)}")
        comparators = set(comparators)
        if unknown := {name for name in comparators if name not in variants or not is_ours(name)}:
            own = [name for name in variants if is_ours(name)]
            raise ValueError(f"compare: comparators {sorted(unknown)} are not among this repository's variants, {own}")
        table = Comparison(title or self.name, case or describe(inputs), baseline)
        if self.interpreted or self.SANITIZED:
            kept = {baseline} if self.interpreted or beside else set()
            variants = {name: fn for name, fn in variants.items() if is_ours(name) or name in kept}
        if self.profile:
            profile_variants(table, variants, inputs, self.machine, self.progress)
            self.record.profiled |= {range_name(table, name): work.record() for name in variants}
            self.say(f"profiled  {table.title}  {table.case}: {', '.join(variants)}")
            return None
        check_variants(
            table, variants, reference, inputs, self.progress, references,
            beside=beside, cold=cold, first_calls=first_calls, comparators=comparators, **budget,
        )  # fmt: skip
        if self.timing and not self.interpreted:
            with self.progress(f"timing {table.title} {table.case}"):
                time_variants(table, variants, inputs, work, ceilings(), whole_calls)
        self.record.comparisons.append(table.record())
        report.show_comparison(self.console, table)
        return table

    def codegen(
        self, wrapper: Callable, *args, find: dict[int, tuple[str, ...]], config: int = 0, **kwargs
    ) -> list[Kernel]:
        """Compile what wrapper(*args) launches for each architecture in `find`, and require its instructions there.

        `find` maps an architecture (90 for sm_90) to names from harness.codegen.INSTRUCTIONS. Needs no GPU. Raises
        CodegenError when one is missing.
        """
        if not self.shows_code:
            return []
        with self.progress(f"compiling {wrapper.__name__} for {', '.join(f'sm_{sm}' for sm in find)}"):
            kernels = compile_for(wrapper, args, kwargs, sms=tuple(find), config=config)
        call = 1 + max((entry.get("call", 0) for entry in self.record.codegen), default=0)
        self.record.codegen += [kernel.record() | {"call": call} for kernel in kernels]
        for sm, wanted in find.items():
            compiled = [kernel for kernel in kernels if kernel.sm == sm]
            for name in wanted:
                if not any(kernel.found.get(name) for kernel in compiled):
                    reason = next((k.error for k in compiled if k.error), "it is not in the PTX")
                    report.show_codegen(self.console, kernels)
                    raise CodegenError(f"{wrapper.__name__} on sm_{sm}: no {name}: {reason}")
        report.show_codegen(self.console, kernels)
        return kernels

    def progress(self, what: str):
        return report.progress(self.console, what)

    # --- skips

    def skip_unless(self, sm: tuple[int, int] | None = None, gib: float | None = None, gpu: bool = False) -> None:
        """End this technique as skipped, with one line, unless the machine has what is asked.

        Without arguments: what its docstring's `Needs` says. `sm` and `gib` are asked of a GPU only.
        """
        needs = Needs(sm=sm, gib=gib, gpu=gpu) if sm or gib or gpu else self.needs
        if reason := self.machine.lacks(needs):
            raise Skip(reason)
