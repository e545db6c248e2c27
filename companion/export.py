"""`python -m companion export NAME`: a technique's kernels as one file that needs torch and triton only.

The file has the kernels, launchers, checked wrappers and `reference` of a lesson and its variants, what they use from
examples/common (guards included), and the lesson's first check, which runs with `python NAME.py`. What only its demo
uses stays behind. Statements are copied as they are written, with the comments above them.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.catalog import ROOT, Technique

HEAD = '''"""{title}

Exported from {file} of torch-compiler-companion, commit {commit}.
{copyright}, MIT licence: keep this line in copies. Files that comments name are there.
Needs torch and triton; written for {versions}.
`python {name}.py` checks it: on a GPU, or without one in Triton's interpreter.
"""
'''
INTERPRET = """if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, which reads it once
"""
CHECK = '''

class _Check:
    """Inputs, and a comparison with the float64 reference, within the budget that each check names."""

    SANITIZED = False

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.interpreted = self.device.type == "cpu"
        major, minor = (0, 0) if self.interpreted else torch.cuda.get_device_capability()
        self.machine = SimpleNamespace(sm=10 * major + minor, mode="interpreted" if self.interpreted else "gpu")
        self.half = torch.float16 if self.interpreted else torch.bfloat16
        torch.manual_seed(0)

    def randn(self, *shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(*shape, device=self.device) * scale).to(dtype)

    def randint(self, high, *shape):
        return torch.randint(high, shape, device=self.device)

    def meta(self, *shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    def codegen(self, *args, **kwargs) -> list:
        return []  # what it compiles to was looked at where it comes from

    def check(self, fn, reference, *inputs, what="", terms=1, roundings=0, acc=torch.float32, operand_eps=0.0, **_):
        gots, wants = fn(*inputs), reference(*inputs)
        for got, want in zip(gots, wants, strict=True) if isinstance(wants, (tuple, list)) else [(gots, wants)]:
            assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
            if not want.numel():
                continue
            exact = not got.dtype.is_floating_point
            eps = 0.0 if exact else torch.finfo(got.dtype).eps
            acc_eps = acc if isinstance(acc, float) else torch.finfo(acc).eps
            rms = want.double().nan_to_num(0, 0, 0).square().mean(-1, keepdim=True).sqrt()
            budget = (2 * eps + roundings * acc_eps) * want.abs() + (16 * acc_eps * terms**0.5 + 8 * operand_eps) * rms
            value, rounded = got.double(), want.to(got.dtype).double()
            right = (value == rounded) | (value.isnan() & rounded.isnan()) | ((value - want).abs() <= budget + 1e-37)
            if not exact:  # a GPU's cast to FP8 saturates, torch's does not
                right |= (want.abs() > torch.finfo(got.dtype).max) & (value.abs() == torch.finfo(got.dtype).max)
            assert right.all(), f"{what}: {int((~right).sum())} of {want.numel()} elements are wrong"
        print("right", what or getattr(fn, "__name__", ""), *(tuple(x.shape) for x in inputs if hasattr(x, "shape")))


def check_on_this_machine(h) -> None:
'''


class NothingToExport(ValueError):
    """The technique has no kernel, or what it has cannot stand in one file."""


@dataclass
class Module:
    """A file: its statements by the names they define, and where each imported name comes from."""

    path: Path
    lines: list[str]
    tree: ast.Module
    defined: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> (statement, module of this repository)
    whole: dict[str, Path] = field(default_factory=dict)  # a module of this repository, by the name it has here

    @classmethod
    def read(cls, path: Path) -> Module:
        text = path.read_text(encoding="utf-8")
        module = cls(path, text.splitlines(), ast.parse(text))
        for node in module.tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    name = alias.asname or alias.name.split(".")[0]
                    inside = getattr(node, "module", "")
                    file = ROOT.joinpath(*f"{inside}.{alias.name}".split(".")).with_suffix(".py")
                    if inside.startswith("examples") and file.is_file():  # the harness's stay, and are refused
                        module.whole[name] = file
                    else:
                        module.imports[name] = _import_of(node, alias)
            for name in _names_of(node):
                module.defined[name] = node
        return module

    def source(self, node: ast.stmt) -> str:
        """The statement as written, with its decorators and the comments above it."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while first and self.lines[first - 1].startswith("#"):
            first -= 1
        return self.alone("\n".join(self.lines[first : node.end_lineno]))

    def alone(self, text: str) -> str:
        """In one file what is another module's here has no prefix."""
        return re.sub(rf"\b(?:{'|'.join(self.whole)})\.", "", text) if self.whole else text

    def used_of_others(self, node: ast.AST) -> list[tuple[Path, str]]:
        return [
            (self.whole[each.value.id], each.attr) for each in ast.walk(node)
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in self.whole
        ]  # fmt: skip


def _import_of(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> tuple[str, str]:
    as_name = f" as {alias.asname}" if alias.asname else ""
    if isinstance(node, ast.Import):
        return f"import {alias.name}{as_name}", ""
    inside = node.module if node.module.split(".")[0] in ("examples", "harness") else ""
    return f"from {node.module} import {alias.name}{as_name}", inside


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def _used(node: ast.AST, annotations: bool = False) -> set[str]:
    """The names in it; but for those of annotations, which may be the harness's, unless they are asked for."""
    notes = [getattr(each, kind, None) for each in ast.walk(node) for kind in ("annotation", "returns")]
    skipped = {id(inner) for note in notes if note and not annotations for inner in ast.walk(note)}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and id(each) not in skipped}


class _Export:
    """What goes along, module by module: a module before those that import from it."""

    def __init__(self) -> None:
        self.modules: dict[Path, Module] = {}
        self.taken: dict[Path, dict[str, ast.stmt]] = {}
        self.imports: set[str] = set()
        self.aliases: dict[str, str] = {}  # what a file calls otherwise than where it is defined

    def module(self, path: Path) -> Module:
        if path not in self.modules:
            self.modules[path] = Module.read(path)
        return self.modules[path]

    def take(self, path: Path, name: str) -> None:
        """The statement that defines `name` in a file, and all that it uses."""
        module = self.module(path)
        if name in self.taken.get(path, {}):
            return
        if name in module.defined:
            node = module.defined[name]
            self.taken.setdefault(path, {}).update(dict.fromkeys(_names_of(node), node))
            for used in sorted(_used(node)):
                self.take(path, used)
            for other, used in module.used_of_others(node):
                self.take(other, used)
            for name in _used(node, annotations=True) - _used(
                node
            ):  # of annotations, which torch.library does evaluate
                if name in module.imports and not module.imports[name][1]:
                    self.take(path, name)
        elif name in module.imports:
            statement, inside = module.imports[name]
            if inside.startswith("harness"):
                raise NothingToExport(f"{path.stem} needs {name} of the harness, so it cannot leave; read {path.name}")
            if not inside:
                self.imports.add(statement)
                return
            original = statement.split(" import ")[1].split(" as ")[0]
            if original != name:
                self.aliases[name] = original
            self.take(ROOT.joinpath(*inside.split(".")).with_suffix(".py"), original)

    def statements(self) -> Iterator[str]:
        owner: dict[str, Path] = {}
        for path in self._in_order():
            for name in self.taken[path]:
                if owner.setdefault(name, path) != path:
                    raise NothingToExport(f"{name} is defined in {owner[name].name} and in {path.name}")
            module, mine = self.modules[path], {id(node) for node in self.taken[path].values()}
            yield f"# --- {path.relative_to(ROOT)}"
            yield from (module.source(node) for node in module.tree.body if id(node) in mine)
        yield from (f"{name} = {original}" for name, original in self.aliases.items())

    def _in_order(self) -> list[Path]:
        done: list[Path] = []

        def visit(path: Path) -> None:
            for _, inside in self.modules[path].imports.values():
                other = ROOT.joinpath(*inside.split(".")).with_suffix(".py") if inside else None
                if other in self.taken and other not in done and other != path:
                    visit(other)
            if path not in done:
                done.append(path)

        for path in list(self.taken):
            visit(path)
        return done


def _check_of(module: Module) -> tuple[list[ast.stmt], set[str]]:
    """The first statement of demo(h) that checks something, after the assignments that it needs, and what it uses."""
    body = module.defined["demo"].body
    first = next((i for i, node in enumerate(body) if re.search(r"\bcheck\w*\(", ast.unparse(node))), None)
    if first is None:
        raise NothingToExport(f"{module.path.stem}: demo(h) has no h.check(...) that could leave with the kernels")
    wanted, kept = _used(body[first]), [body[first]]
    for node in reversed(body[:first]):
        if set(_names_of(node)) & wanted:
            wanted |= _used(node)
            kept.insert(0, node)
    return kept, wanted


def export(technique: Technique, commit: str | None) -> str:
    """The text of the file. Raises NothingToExport with the reason in one sentence."""
    lesson = Module.read(technique.path)
    files = [technique.path, *technique.variants]
    whole = _Export()
    statements = (node for path in files for node in whole.module(path).tree.body)
    if not any("jit" in ast.unparse(each) for node in statements for each in getattr(node, "decorator_list", [])):
        raise NothingToExport(f"{technique.name} has no kernel of its own: read {technique.file}")
    for path in files:
        for name, node in whole.module(path).defined.items():
            if name not in ("demo", "answer") and not _for_the_demo(node):
                whole.take(path, name)
    statements, used = _check_of(lesson)
    for name in sorted(used):
        whole.take(technique.path, name)
    for other, name in (each for node in statements for each in lesson.used_of_others(node)):
        whole.take(other, name)
    parts = list(whole.statements())
    plain = sorted(
        whole.imports | {"import os", "import torch", "from types import SimpleNamespace"},
        key=lambda line: (line.startswith("from"), line),
    )
    late = [line for line in plain if "triton" in line]
    early = [line for line in plain if line not in late]
    name, commit = technique.name, (commit or "unknown")[:12]
    lines = (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines()
    copyright = next(line for line in lines if line.startswith("Copyright"))
    written_for = re.findall(r'"((?:torch|triton)[<>=.,\d]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    head = HEAD.format(
        title=technique.lesson, file=technique.file, commit=commit, name=name, copyright=copyright,
        versions=" and ".join(written_for),
    )  # fmt: skip
    top = "\n".join(["from __future__ import annotations", "", *early])
    indented = lesson.alone("\n".join("\n".join(lesson.lines[n.lineno - 1 : n.end_lineno]) for n in statements))
    check = f'{CHECK}{indented}\n\n\nif __name__ == "__main__":\n    check_on_this_machine(_Check())\n'
    late_imports = "\n".join(f"{line}  # noqa: E402" for line in late)
    text = f"{head}\n{top}\n\n{INTERPRET}\n{late_imports}\n\n\n" + _spaced(parts) + "\n" + check
    return re.sub(r"\bh: Harness\b", "h", text)  # a check's inputs are made by a function that is handed one


def _spaced(parts: list[str]) -> str:
    """Two blank lines around a function or a class, none between other statements that follow each other."""
    text = parts[0]
    for before, part in itertools.pairwise(parts):
        plain = not any(
            each.lstrip("# ").startswith(("def ", "class ", "@")) or "\ndef " in each for each in (before, part)
        )
        text += ("\n" if plain and not part.startswith("# ---") else "\n\n\n") + part
    return text


def _for_the_demo(node: ast.stmt) -> bool:
    """Whether a function takes the harness: then it is about the lesson and not about the kernel."""
    if not isinstance(node, ast.FunctionDef):
        return False
    args = [*node.args.posonlyargs, *node.args.args]
    of_the_harness = {"Table", "geomean", "near", "Work"} & _used(node, annotations=True)
    return any(arg.arg == "h" for arg in args) or bool(of_the_harness)
