"""What a recorded number was measured with: a hash over the syntax trees of the code that had a part in it.

For a lesson that is its file and what that imports from this repository (its variants, examples/common), the peers it
is put beside, and what of the harness checks and times. Comments, docstrings, layout and what an error says have no
part. `ast.dump` differs between versions of Python, so the trees are walked here, and empty fields are skipped: a field
that a newer Python adds is empty in older code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.catalog import ROOT

MEASURING = ("harness/bench.py", "harness/check.py", "harness/hardware.py")
PACKAGES = ("examples", "studies", "compile_inspect", "triton_compiler")


def sources_hash(path: Path, peers: Iterable[Path] = (), root: Path = ROOT) -> str:
    """16 hex digits over the lesson or study at `path`, everything it imports from this repository, and its peers."""
    files = {file for each in (path, *peers) for file in closure(each, root)}
    files |= {root / name for name in MEASURING if (root / name).exists()}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(_read(file.read_bytes())[0])
    return digest.hexdigest()[:16]


def closure(path: Path, root: Path = ROOT) -> Iterator[Path]:
    """`path`, then each file of this repository that it imports, directly or not; the harness is left out."""
    seen, todo = set(), [path.resolve()]
    while todo:
        file = todo.pop()
        if file in seen or not file.is_relative_to(root):
            continue
        seen.add(file)
        yield file
        todo += [found for module in imported(file) if (found := _file_of(module, root))]


def imported(path: Path) -> tuple[str, ...]:
    """The dotted names that a file imports, wherever in it; of `from a import b` both a and a.b, a module or not."""
    return _read(path.read_bytes())[1]


@functools.cache
def _read(source: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The words of a file and what it imports: what fifty lessons import is parsed once."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return "".join(f"{word}\0" for word in _words(tree, [])).encode(), tuple(found)


def _file_of(module: str, root: Path) -> Path | None:
    if module.split(".")[0] not in PACKAGES:
        return None
    path = root.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def _words(node: ast.AST, into: list[str]) -> list[str]:
    """The tree in words, added to `into`: the type of each node, and its fields that hold something."""
    into.append(type(node).__name__)
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return _words(node.exc.func, into)  # of an error its type: nothing is timed that ends in one
    for name, value in ast.iter_fields(node):
        if value is None or value == []:
            continue
        into.append(name)
        for each in value if isinstance(value, list) else [value]:
            alone = each.value if isinstance(each, ast.Expr) else None
            if isinstance(alone, ast.Constant) and isinstance(alone.value, str):
                continue  # a docstring, or any other text that stands for itself
            if isinstance(each, ast.AST):
                _words(each, into)
            else:
                into.append(repr(each))
    into.append(")")
    return into
