"""What there is to run, read from the source text alone: no torch, no triton; only load_module() executes anything.

A topic script lists its technique files in TECHNIQUES, and the one or two that show the topic best in TOUR. A technique
file's docstring says the rest: its first line is the lesson; the fields `Question` and `Needs` feed --list, doctor and
the README; `Variants` and `Study` name the files that belong to it.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class CatalogError(Exception):
    """A topic script or a technique file that does not follow the rules of this module."""


@dataclass(frozen=True)
class Needs:
    """What a technique needs, as its docstring says: `Needs  triton>=3.5, sm_90, 8 GiB`.

    A package must always be importable. `sm` and `gib` are asked of a GPU only: without one, Triton kernels are
    interpreted. `gpu` says that nothing can be shown without one. `2 ranks` are at least so many processes of
    torch.distributed, `2 or 4 or 8 ranks` exactly so many (`rank_counts`); with `peers` each GPU reaches the others'
    memory.
    """

    packages: tuple[tuple[str, str | None], ...] = ()
    sm: tuple[int, int] | None = None
    gib: float | None = None
    gpu: bool = False
    ranks: int = 1
    peers: bool = False
    text: str = "torch only"
    rank_counts: tuple[int, ...] = ()

    @property
    def triton(self) -> bool:
        return "triton" in dict(self.packages)

    @property
    def xla(self) -> bool:
        return "torch_xla" in dict(self.packages)

    @classmethod
    def parse(cls, text: str, where: str = "Needs") -> Needs:
        said: dict = {"packages": (), "text": text or "torch only"}
        for item in filter(None, (part.strip() for part in text.split(","))):
            if item in ("gpu", "GPU", "peers"):
                said[item.lower()] = True
            elif match := re.fullmatch(r"(\d+(?: or \d+)*) ranks", item):
                counts = tuple(map(int, match[1].split(" or ")))
                said |= {"ranks": min(counts), "rank_counts": counts if len(counts) > 1 else ()}
            elif match := re.fullmatch(r"sm_(\d+)(\d)", item):
                said["sm"] = (int(match[1]), int(match[2]))
            elif match := re.fullmatch(r"(\d+(?:\.\d+)?) GiB", item):
                said["gib"] = float(match[1])
            elif match := re.fullmatch(r"([A-Za-z][\w-]*)(?:>=(\d+(?:\.\d+)*))?", item):
                said["packages"] += (match.groups(),)
            else:
                raise CatalogError(
                    f"{where}: cannot read {item!r}; "
                    "use package, package>=1.2, sm_90, 8 GiB, gpu, 2 ranks, 2 or 4 ranks, peers, with commas between"
                )
        return cls(**said)


@dataclass(frozen=True)
class _File:
    name: str
    path: Path

    @property
    def file(self) -> str:
        return str(self.path.relative_to(ROOT)) if self.path.is_relative_to(ROOT) else str(self.path)


@dataclass(frozen=True)
class Technique(_File):
    """One lesson: its name is the file's stem. `variants` and `studies` are the files that its docstring names.

    `error` says why it cannot be read, if it cannot.
    """

    lesson: str = ""
    question: str = ""
    needs: Needs = Needs()
    variants: tuple[Path, ...] = ()
    studies: tuple[Path, ...] = ()
    wins_when: str = ""
    source: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Topic(_File):
    """One topic script and its techniques in the order in which it tells them; `tour` are names of techniques."""

    title: str
    techniques: tuple[Technique, ...] = ()
    tour: tuple[str, ...] = ()


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise CatalogError(f"{path}:{error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise CatalogError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def fields(docstring: str) -> dict[str, str]:
    """The `Name  text` fields of a technique's docstring; text continues on lines indented further."""
    found = re.findall(r"^([A-Z][a-z]+(?: [a-z]+)?)  +(\S.*(?:\n  +\S.*)*)$", docstring, re.MULTILINE)
    return {name: re.sub(r"\n +", " ", text) for name, text in found}


def read_technique(path: Path) -> Technique:
    """Parse one technique file. Raises CatalogError when its docstring lacks the lesson or a field."""
    docstring = ast.get_docstring(_parse(path))
    if not docstring:
        raise CatalogError(f"{path}: a technique file starts with a docstring whose first line is its lesson")
    found = fields(docstring)
    for name in ("Question", "Needs"):
        if name not in found:
            raise CatalogError(f"{path}: its docstring has no '{name}' field")
    lesson = docstring.splitlines()[0].strip()
    variants = tuple(path.parent / name for name in re.findall(r"\b\w+\.py\b", found.get("Variants", "")))
    studies = tuple(ROOT / name for name in re.findall(r"\bstudies/[\w/]+\.py\b", found.get("Study", "")))
    if missing := [str(each) for each in (*variants, *studies) if not each.is_file()]:
        raise CatalogError(f"{path}: its docstring names {', '.join(missing)}, which does not exist")
    needs, rest = Needs.parse(found["Needs"], str(path)), (found.get(name, "") for name in ("Wins when", "Source"))
    return Technique(path.stem, path, lesson, found["Question"], needs, variants, studies, *rest)


def read_topic(path: Path) -> Topic:
    """Parse one topic script and the technique files it lists. Raises CatalogError for the script itself; a technique
    file that cannot be read is listed with its error, and fails when its turn comes."""
    path = Path(path).resolve()
    tree = _parse(path)
    files = _literal(tree, "TECHNIQUES")
    if files is None:
        raise CatalogError(f"{path}: a topic script lists its technique files in TECHNIQUES")
    techniques = []
    for file in (path.parent / name for name in files):
        try:
            techniques.append(read_technique(file))
        except CatalogError as error:
            techniques.append(Technique(file.stem, file, error=str(error)))
    names = [technique.name for technique in techniques]
    if len(set(names)) != len(names):
        raise CatalogError(f"{path}: two of its techniques share a name: {sorted(names)}")
    tour = _literal(tree, "TOUR") or ()
    if not isinstance(tour, (tuple, list)) or set(tour) - set(names):
        raise CatalogError(f"{path}: TOUR is {tour!r}; name techniques of this topic: {', '.join(names)}")
    title = (ast.get_docstring(tree) or path.stem).splitlines()[0].strip()
    return Topic(path.stem, path, title, tuple(techniques), tuple(tour))


def _literal(tree: ast.Module, name: str):
    """What a module assigns to `name` at its top level, written out there; None when it does not."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == [name]:
            return ast.literal_eval(node.value)
    return None


def topics(root: Path = ROOT) -> list[Topic]:
    """Every topic script in the repository's root."""
    scripts = sorted(path for path in root.glob("*.py") if "\nTECHNIQUES = " in path.read_text(encoding="utf-8"))
    return [read_topic(path) for path in scripts]


def load_module(path: Path):
    """Import a technique file by its path, once, under the dotted name it has below the repository's root.

    `examples/triton/softmax.py` becomes `examples.triton.softmax`, which is also what a test imports.
    """
    path = path.resolve()
    inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)
    name = ".".join(inside.with_suffix("").parts)
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path:
        return known
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
