"""Planted faults: what the tests and the demos must catch, as data that survives a restructuring.

A fault is a technique, a snippet of its source, what replaces it, and one sentence that says what is then wrong. The
snippet is compared token by token, without comments, line breaks and trailing commas, in the first file of files_of()
that has it: so a kernel may move to another file and keep its faults.

    python -m tests.faults --only softmax --json out.json     plants each in a copy of the tree and runs demo and tests
"""

from __future__ import annotations

import ast
import functools
import io
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


class NotFound(AssertionError):
    """A snippet that is in no file of its technique, or there more or less often than its fault says."""


class Fault(NamedTuple):
    """`technique` is "triton/softmax", or "harness/check" for a module of the harness.

    `count` is how often the snippet is in its file, and all of them are replaced. `within` names the function or class
    that is looked through instead of the whole file, `nth` the one of its matches that is meant (a mutant has both).
    `tests` are the files that run instead of the technique's own. `gpu`: only a GPU runs what is wrong; a test that
    models the kernel, or reads its code, may still find it. `uncaught`: a review got it past the check of a demo.
    """

    technique: str
    snippet: str
    replacement: str
    wrong: str
    count: int = 1
    within: str = ""
    nth: int | None = None
    tests: tuple[str, ...] = ()
    gpu: bool = False
    uncaught: bool = False

    @property
    def id(self) -> str:
        return f"{self.technique}: {self.wrong}"


def _titled(line: str) -> tuple[str, dict]:
    """What stands before the brackets, and the options in them."""
    title, _, options = line.partition("  [")
    pairs = (option.partition("=") for option in options.rstrip("]").split())
    found = {name: value or True for name, _, value in pairs}
    if "tests" in found:
        found["tests"] = tuple(f"tests/{file}" for file in found["tests"].split(","))
    return title, found


def listed(text: str) -> list[Fault]:
    """The faults that a text lists: under each technique what is then wrong, and the source as a diff.

        # triton/softmax
        the backward walk begins a block too far where the length divides  [within=softmax_resident_kernel]
          - LAST: tl.constexpr = (N_COLS - 1) // BLOCK_N * BLOCK_N
          + LAST: tl.constexpr = N_COLS // BLOCK_N * BLOCK_N

    In brackets: gpu, uncaught, within=NAME, tests=FILE,FILE (under tests/). A technique's hold for all of its faults.
    """
    faults: list[Fault] = []
    for line in filter(None, text.splitlines()):
        if line.startswith("# "):
            technique, shared = _titled(line[2:])
        elif line.startswith(("  - ", "  + ")):
            side = "snippet" if line[2] == "-" else "replacement"
            faults[-1] = faults[-1]._replace(**{side: getattr(faults[-1], side) + line[4:] + "\n"})
        else:
            wrong, options = _titled(line)
            faults.append(Fault(technique, "", "", wrong, **shared | options))
    return faults


def files_of(technique: str, root: Path = ROOT) -> Iterator[Path]:
    """Where the source of a technique may be, the likeliest first."""
    topic, name = technique.split("/")
    if topic != "harness":
        own, shared = root / "examples" / topic, root / "examples" / "common"
        yield from sorted(own.glob(f"{name}.py"))
        yield from sorted(own.glob(f"{name}_*.py"))
        yield from sorted((root / "studies" / topic).glob(f"{name}*.py"))
        yield from sorted(shared.glob("*.py"))
        yield from sorted(path for path in own.glob("*.py") if not path.stem.startswith(name))
    first = root / "harness" / f"{name}.py"
    yield from sorted((root / "harness").glob("*.py"), key=lambda path: (path != first, path))
    for folder in ("companion", "compile_inspect", "triton_compiler", "profiling"):
        yield from sorted((root / folder).glob("*.py"))


@functools.lru_cache(maxsize=200)
def tokens_of(source: str) -> list[tokenize.TokenInfo]:
    """The tokens that count; a snippet may end within brackets."""
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in SKIPPED and token.string.strip():
                if token.string in ")]}" and found and found[-1].string == ",":
                    found.pop()  # where a line is broken, the formatter adds one
                found.append(token)
    except tokenize.TokenError:
        pass
    return found


def _replace(source: str, start: tuple, end: tuple, text: str) -> str:
    """`text` for what is from start to end, its further lines indented as the first one is."""
    lines = source.splitlines(keepends=True)
    (first, column), (last, stop) = start, end
    margin = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
    body = textwrap.indent(textwrap.dedent(text).strip(), margin).strip()
    lines[first - 1 : last] = [lines[first - 1][:column] + body + lines[last - 1][stop:]]
    return "".join(lines)


@functools.lru_cache(maxsize=2000)
def _spans(source: str, name: str) -> list[tuple[int, int]]:
    """First and last lines of each function or class of that name."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        (min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and node.name == name
    ]


def places(source: str, snippet: str, within: str = "") -> list[tuple[tuple, tuple]]:
    """(start, end), as (line, column), of each place that reads as the snippet does, in what is called `within`."""
    wanted = [token.string for token in tokens_of(textwrap.dedent(snippet).strip())]
    tokens = tokens_of(source)
    strings, size = [token.string for token in tokens], len(wanted)
    starts = [i for i in range(len(strings) - size + 1) if strings[i] == wanted[0] and strings[i : i + size] == wanted]
    found = [(tokens[i].start, tokens[i + size - 1].end) for i in starts]
    if within and found:
        spans = _spans(source, within)
        found = [place for place in found if any(first <= place[0][0] <= last for first, last in spans)]
    return found


def planted(fault: Fault, root: Path = ROOT) -> tuple[Path, str]:
    """The file that the fault is in, and its text with the fault. Raises NotFound."""
    for path in files_of(fault.technique, root):
        source = path.read_text(encoding="utf-8")
        if not (found := places(source, fault.snippet, fault.within)):
            continue
        if len(found) != fault.count:
            raise NotFound(f"{fault.id}: {len(found)} times in {path.relative_to(root)}, not {fault.count}")
        for start, end in reversed(found if fault.nth is None else [found[fault.nth]]):
            source = _replace(source, start, end, fault.replacement)
        return path, source
    raise NotFound(f"{fault.id}: its snippet is in no file of {fault.technique}")


def all_planted() -> list[Fault]:
    from . import (
        planted_compiler,
        planted_distributed,
        planted_fp8,
        planted_harness,
        planted_tma,
        planted_triton,
    )

    modules = (planted_triton, planted_fp8, planted_tma, planted_compiler, planted_distributed, planted_harness)
    return [fault for module in modules for fault in module.FAULTS]
