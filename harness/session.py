"""What a technique's demo(h), and its study(h), is handed: inputs, checks, tables, code, the answer; all recorded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType

from harness import bench, ranks
from harness import console as show
from harness.bench import Table, Timing, Work, describe, is_ours, range_name
from harness.catalog import ROOT, Needs, load_module
from harness.check import check as check_once
from harness.codegen import CodegenError, Kernel, compile_for
from harness.hardware import ceilings, machine
from harness.record import ExampleRecord, recorded_answer

import torch
from rich.console import Console

EACH_KERNEL = Timing()
LONGEST_ANSWER = 240  # characters: one or two sentences


class Harness:
    """One technique's run. `device` is where its inputs live, `full` says whether sizes are those worth timing.

    `ranks` is the number of processes, `rank` which of them this is: all have the same inputs, slice their part of them
    and check their own results. On a CPU they are not timed. `interpreted` says that Triton kernels are; `half` is the
    16-bit dtype to demonstrate with, bfloat16, or float16 where kernels are interpreted. In a study `lesson` has the
    lesson's tables.
    """

    SANITIZED = False  # under a sanitizer, a hundred times slower: the smallest sizes, our kernels, and no code shown

    def __init__(
        self, name: str, needs: Needs | None = None, *, topic: str = "", full: bool = False, timing: bool = True,
        profile: bool = False, verbose: bool = False, seed: int = 0, lesson: Iterable[Table] | None = None,
        console: Console | None = None,
    ) -> None:  # fmt: skip
        self.name, self.topic, self.needs = name, topic, needs or Needs()
        self.full, self.profile, self.verbose = full, profile, verbose
        self.lesson, self.is_study = list(lesson or ()), lesson is not None
        self.machine = machine()
        # XLA's programs run on the device of PJRT, and are put next to this process's CPU.
        self.device = torch.device("cpu" if self.needs.xla else self.machine.device)
        # Only Triton kernels are interpreted: a technique of torch alone runs for real, and is timed, on any CPU.
        self.interpreted = self.machine.mode == "interpreted" and self.needs.triton
        # Ranks on a CPU share its cores.
        self.timing = timing and (self.needs.ranks == 1 or self.machine.mode == "gpu")
        self.half = torch.float16 if self.interpreted else torch.bfloat16
        self.console = console or show.make_console()
        self.record = ExampleRecord(name)
        self.tables: list[Table] = []
        self.peers: list[ModuleType] = []
        # From the name, so that running one technique alone gives it the data it has in the whole topic.
        self.seed = (seed + zlib.crc32(name.encode())) % 2**63
        self._generator = torch.Generator(self.device).manual_seed(self.seed)
        self._answer: tuple[Callable[[], str], bool] | None = None
        self._evidence: dict[int, dict[str, None]] = {}  # by architecture, the required instructions found
        self._lines: list[Callable[[], None]] = []  # what finish() prints, in the order in which it came
        self._cases: dict[tuple[str, str], list[Table]] = {}

    @property
    def ranks(self) -> int:
        return ranks.count()

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank() if self.ranks > 1 else 0

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
        return torch.randn(*shape, generator=self._generator, device=self.device).mul_(scale).to(dtype)

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """randn() whose rows (the last dimension) have a mean and a standard deviation each, so that the statistics of
        one fit no neighbour: the mean from -2 to 2, the deviation from 1/4 to 2, and 0 and 1e-3 in every 16th row."""
        x = self.randn(*shape)
        size = (*shape[:-1], 1)
        mean, log2 = (torch.rand(size, generator=self._generator, device=self.device) for _ in range(2))
        deviation = torch.exp2(3 * log2 - 2)
        deviation.view(-1)[7::16], mean.view(-1)[7::16] = 1e-3, 0.5
        return x.mul_(deviation).add_(4 * mean - 2).to(dtype)

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

    def peer(self, name: str) -> ModuleType:
        """The module of another technique, "triton/flash_attention", whose kernel this one's table is put beside. It is
        among the sources of the record; name its rows in compare(peers=...)."""
        path = (ROOT / "examples" / name).with_suffix(".py")
        if not path.is_file():
            raise ValueError(f"peer: there is no technique {name!r}; write 'triton/softmax'")
        module = load_module(path)
        if module not in self.peers:
            self.peers.append(module)
        return module

    # --- evidence

    def say(self, text: str) -> None:
        """A conclusion that the run draws from its numbers: printed, and recorded."""
        self.record.conclusions.append(text)
        self._print(show.paragraph, text)

    def fact(self, name: str, value) -> None:
        """Record a result that is not a time: graphs, recompiles, bytes, seconds to compile. Printed with -v. Raises
        TypeError for what JSON cannot hold (NaN, keys that are no strings): convert it first."""
        self._keep(name, value)
        if self.verbose or self.is_study:
            self._print(show.show_fact, name, value)

    def table(self, name: str, rows: dict[str, dict]) -> None:
        """A fact, printed as a table: a row for each key, a column for each key within. Lists read a / b."""
        self._keep(name, rows)
        if rows:
            self._print(show.show_rows, name, rows)

    def _keep(self, name: str, value) -> None:
        try:
            if json.loads(json.dumps(value, allow_nan=False)) != (list(value) if isinstance(value, tuple) else value):
                raise ValueError("it would come back changed")
        except (TypeError, ValueError) as error:
            raise TypeError(f"fact {name!r}: {value!r} cannot be recorded as JSON: {error}") from None
        self.record.facts[name] = value

    def _print(self, show_it: Callable, *what) -> None:
        """Now with -v, else at the end."""
        self._lines.append(partial(show_it, self.console, *what))
        if self.verbose:
            self._lines.pop()()

    def check(self, fn: Callable, reference: Callable, *inputs, what: str | None = None, **budget) -> None:
        """harness.check of fn against the float64 reference; not under --profile, which is to see the timed calls only.
        Raises CheckError (wrong) or VacuousCheck (the check proves nothing)."""
        if self.profile:
            return
        what = what or f"{getattr(fn, '__name__', type(fn).__name__)} {describe(inputs)}"
        entry = {"what": what, "error": None, "passed": False}
        self.record.checks.append(entry)
        if bench.is_compiled(fn):
            # It allocates for itself, and would trace the poisoning; it may store a value twice.
            budget = {"poison": False, "stores": 2} | budget
        with self.progress(what):
            entry["error"] = check_once(fn, reference, *inputs, what=what, **budget)
        entry["passed"] = True
        if self.verbose:
            show.say(self.console, f"  right  {what}: {entry['error']:.0%} of what rounding allows")

    def compare(
        self, variants: dict[str, Callable], reference: Callable, *inputs, baseline: str, work: Work,
        title: str | None = None, case: str | None = None, references: dict[str, Callable] | None = None,
        timing: Timing = EACH_KERNEL, peers: Iterable[str] = (), max_error_ratio: float | None = None,
        wrong: dict[str, Callable] | None = None, library: dict | None = None, budgets: dict[str, dict] | None = None,
        default: str | None = None, **budget,
    ) -> Table:  # fmt: skip
        """Check every variant against one float64 reference, then time them all; see harness.bench.

        `references` holds, by its name, that of a variant that draws random numbers: it is called with torch's random
        state as the variant found it. `max_error_ratio` holds every variant to that many times the baseline's error.
        `peers` are other techniques' kernels, none of which is the table's best row. `budget` is every variant's error
        budget, see harness.check; `library` adds to it for a library's rows, `budgets` for single variants. `wrong`
        holds functions of the inputs for the float64 result of a fault each ("without the last K step"): none may pass.
        `default` names the row of the wrapper without options, where it is not the first of our own.
        In the interpreter the baseline and our own variants are checked, under a sanitizer our own; both time nothing,
        nor does --check-only; with --profile each is warmed, then called once. A table without times is false.
        """
        if baseline not in variants:
            raise ValueError(f"compare: baseline {baseline!r} is not one of the variants {list(variants)}")
        if default not in (None, *variants):
            raise ValueError(f"compare: default {default!r} is not one of the variants {list(variants)}")
        if unknown := set(references or ()) - set(variants):
            raise ValueError(f"compare: references for {sorted(unknown)}, but the variants are {list(variants)}")
        own = [name for name in variants if is_ours(name)]
        if unknown := set(peers) - set(own):
            raise ValueError(f"compare: peers {sorted(unknown)} are not among this repository's variants, {own}")
        table = Table(title or self.name, case or describe(inputs), baseline, default=default)
        self.tables.append(table)
        if self.interpreted or self.SANITIZED:
            kept = [*own, baseline] if self.interpreted or max_error_ratio else own
            variants = {name: fn for name, fn in variants.items() if name in kept}
        if self.profile:  # what another table has had under the same name is not called again: ranges would add up
            variants = {
                name: variants[name] for name in variants if range_name(table, name) not in self.record.profiled
            }
            bench.profile_variants(table, variants, inputs, self.machine, self.progress)
            self.record.profiled |= {range_name(table, name): work.record() for name in variants}
            if variants:
                self.say(f"profiled  {table.title}  {table.case}: {', '.join(variants)}")
            return table
        bench.check_variants(
            table, variants, reference, inputs, self._first_call, references,
            max_error_ratio=max_error_ratio, timing=timing, peers=peers, wrong=wrong, library=library, budgets=budgets,
            **budget,
        )  # fmt: skip
        if self.timing and not self.interpreted:
            with self.progress(f"timing {table.title} {table.case}"):
                bench.time_variants(table, variants, inputs, work, ceilings(), timing.end_to_end)
            if not max_error_ratio:
                own = {name: fn for name, fn in variants.items() if name not in (references or {})}
                bench.check_again(table, own, reference, inputs, budget=budget, library=library, budgets=budgets)
        self.record.tables.append(table.record())
        cases = self._cases.setdefault((table.title, table.baseline), [])  # which are printed as one table
        cases.append(table)
        if self.verbose:
            show.show_comparison(self.console, table)
        elif len(cases) == 1:
            self._print(show.show_cases, cases)
        return table

    def codegen(self, wrapper: Callable, *args, find: dict[int, tuple[str, ...]], **kwargs) -> list[Kernel]:
        """Compile what wrapper(*args) launches for each architecture in `find` (90 for sm_90), and require the
        instructions named there, of harness.codegen.INSTRUCTIONS. Raises CodegenError when one is missing."""
        if not self.shows_code:
            return []
        with self.progress(f"compiling {wrapper.__name__} for {', '.join(f'sm_{sm}' for sm in find)}"):
            kernels = compile_for(wrapper, args, kwargs, sms=tuple(find))
        call = 1 + max((entry["call"] for entry in self.record.codegen), default=0)
        self.record.codegen += [vars(kernel) | {"call": call} for kernel in kernels]
        for sm, wanted in find.items():
            compiled = [kernel for kernel in kernels if kernel.sm == sm]
            for name in wanted:
                if not any(kernel.found.get(name) for kernel in compiled):
                    reason = next((k.error for k in compiled if k.error), "it is not in the PTX")
                    show.show_codegen(self.console, kernels)
                    raise CodegenError(f"{wrapper.__name__} on sm_{sm}: no {name}: {reason}")
                self._evidence.setdefault(sm, {})[name] = None  # a dict is a set that keeps its order
        if self.verbose:
            show.show_codegen(self.console, kernels)
        return kernels

    # --- the answer

    def answer(self, sentence: Callable[[], str], timed: bool = True) -> None:
        """The docstring's question, answered from this run's values: one or two sentences, at most 240 characters
        (which tests/test_house.py holds: no run with times is lost to a long one).

        `sentence` is called at the end, and only where something was timed; with timed=False, for an answer made of
        counts, wherever the technique runs. Raises TypeError for anything but a function.
        """
        if not callable(sentence):
            raise TypeError(f"answer: got {type(sentence).__name__}; pass a function that makes the sentence")
        self._answer = (sentence, timed)

    @property
    def timed(self) -> bool:
        """Whether this run has timed anything so far."""
        return any(table.timed for table in self.tables)

    def finish(self, passed: bool = True) -> None:
        """Settle the answer and print what was kept back: checks, code, tables, conclusions, the answer."""
        given, self._answer = self._answer, None  # it holds the models of a lesson: a study needs their memory
        sentence, needs_times = given if given and passed and not self.profile else (None, True)
        uneven = next(((table, table.uneven) for table in self.tables if table.uneven), None) if needs_times else None
        if sentence and (self.timed or not needs_times) and not uneven:
            answer = sentence()
            if not isinstance(answer, str) or not answer:
                raise ValueError(f"answer: {answer!r}; a text of at most {LONGEST_ANSWER} characters is wanted")
            self.record.answer = answer
        if not self.verbose:
            show.show_evidence(self.console, self.record, self._evidence)
        for line in self._lines:
            line()
        self._lines.clear()
        if sentence:
            known = None if self.is_study or self.record.answer else recorded_answer(self.topic, self.name)
            why = "Not timed here"
            if uneven:
                table, row = uneven
                why = f"Times too uneven to answer ({table.title}, {row.variant}: {row.p20:.3g} to {row.p80:.3g} ms)"
            show.show_answer(self.console, self.record.answer or (f"{why}; {known}" if known else f"{why}."))

    def progress(self, what: str):
        return show.progress(self.console, what)

    @contextmanager
    def _first_call(self, what: str):
        """A call that compiles: with -v, or if it fails, what the compilers print is shown."""
        with self.progress(what), nullcontext() if self.verbose else show.errors_held_back():
            yield
