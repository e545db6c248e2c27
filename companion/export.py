"""`python -m companion export NAME`: a technique's kernels as one file that needs torch and triton only.

The file has the wrappers of a lesson and its variants, `reference`, what they use (kernels, launchers, guards), and the
lesson's first check, which runs with `python NAME.py`; what none of them reaches stays behind. Statements are copied as
they are written, with the comments above them, but for mentions of files that stay behind.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.catalog import ROOT, Technique
from harness.record import git_state

from companion.show import technique_named

HEAD = '''# SPDX-License-Identifier: MIT
"""{title}

Exported from {file} of torch-compiler-companion, commit {commit}.
{copyright}, MIT licence: keep this line in copies.
Needs torch and triton; written for {versions}.
{usage}
"""

from __future__ import annotations

'''
INTERPRET = """if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, which reads it once
"""
CHECK = '''class _Check:
    """Inputs, and a comparison with the float64 reference, within the budget that each check names."""

    SANITIZED = False

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.interpreted = self.device.type == "cpu"
        self.machine = SimpleNamespace(sm=0 if self.interpreted else int("%d%d" % torch.cuda.get_device_capability()))
        self.half = torch.float16 if self.interpreted else torch.bfloat16
        self.checked = False
        torch.manual_seed(0)

    def randn(self, *shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(*shape, device=self.device) * scale).to(dtype)

    def rows(self, *shape, dtype=torch.float32):
        mean, log2 = torch.rand(2, *shape[:-1], 1, device=self.device)
        return (self.randn(*shape) * torch.exp2(3 * log2 - 2) + 4 * mean - 2).to(dtype)

    def randint(self, high, *shape):
        return torch.randint(high, shape, device=self.device)

    def fit(self, n, bytes_each):
        return n

    def check(
        self, fn, reference, *inputs, what="", terms=1, roundings=0, acc=torch.float32, operand_eps=0.0, stores=1, **_
    ):
        gots, wants = fn(*inputs), reference(*inputs)
        for got, want in zip(gots, wants, strict=True) if isinstance(wants, (tuple, list)) else [(gots, wants)]:
            if got.shape != want.shape:
                raise AssertionError(f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}")
            if not want.numel():
                continue
            exact = not got.dtype.is_floating_point
            eps = 0.0 if exact else torch.finfo(got.dtype).eps
            acc_eps = acc if isinstance(acc, float) else torch.finfo(acc).eps
            rms = want.double().nan_to_num(0, 0, 0).square().mean(-1, keepdim=True).sqrt()
            relative, per_row = 0.51 * stores * eps + roundings * acc_eps, 16 * acc_eps * terms**0.5 + 8 * operand_eps
            tiny = 0.0 if exact else torch.finfo(got.dtype).smallest_normal * eps
            budget = relative * want.abs() + per_row * rms + tiny
            value, rounded = got.double(), want.to(got.dtype).double()
            right = (value == rounded) | (value.isnan() & rounded.isnan()) | ((value - want).abs() <= budget + 1e-37)
            if not exact:  # a GPU's cast to FP8 saturates, torch's need not
                right |= (want.abs() > torch.finfo(got.dtype).max) & (value.abs() == torch.finfo(got.dtype).max)
            if not right.all():
                raise AssertionError(f"{what}: {int((~right).sum())} of {want.numel()} elements are wrong")
        self.checked = True
        print("right", what or getattr(fn, "__name__", ""), *(tuple(x.shape) for x in inputs if hasattr(x, "shape")))
'''
MAIN = """

if __name__ == "__main__":
    check_on_this_machine(h := _Check())
    if not h.checked:
        print("nothing was checked: this machine runs none of the kernels")
"""
MAIN_OF_RANKS = """

if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("it needs several ranks: torchrun --nproc-per-node 2, and this file")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    h = _Check()
    h.rank, h.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    check_on_this_machine(h)
    torch.distributed.destroy_process_group()
"""
FILES = r"(?:harness|docs|tests|studies|results|examples)/\w[\w/]*(?:\.\w+)?"


Name = tuple[Path, str]  # of a file, and what it calls so


class NothingToExport(ValueError):
    """The technique has no kernel, or what it has cannot stand in one file."""


class Module:
    """A file: its statements by the names they define, and where each imported name comes from."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.path, self.lines, self.tree = path, text.splitlines(), ast.parse(text)
        self.written, self.new_names = [*self.lines], {}  # as the tree has them; (line, column) -> old and new name
        self.defined: dict[str, ast.stmt] = {}
        self.effects: list[ast.stmt] = []  # calls, loops and conditions, such as what registers a fake
        self.imports: dict[str, tuple[str, str]] = {}  # name -> (statement, module of this repository)
        self.whole: dict[str, Path] = {}  # a module of this repository, by the name it has here
        for node in self.tree.body:
            calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    self._bind(node, alias)
            elif calls or isinstance(node, (ast.For, ast.If)):
                self.effects.append(node)
            self.defined |= dict.fromkeys(_names_of(node), node)

    def _bind(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> None:
        name, origin = alias.asname or alias.name.split(".")[0], getattr(node, "module", "")
        if origin.startswith("examples") and (file := _file(f"{origin}.{alias.name}")).is_file():
            self.whole[name] = file  # the harness's stay, and are refused
        else:
            statement = ast.unparse(ast.ImportFrom(origin, [alias], 0) if origin else ast.Import([alias]))
            self.imports[name] = statement, origin if origin.split(".")[0] in ("examples", "harness") else ""

    def source(self, node: ast.stmt, names: Collection[str]) -> str:
        """The statement as written, with its decorators and the comments above it; of A, B = a, b only `names`."""
        first = last = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while first and self.lines[first - 1].startswith("#"):
            first -= 1
        kept = [name for name in _names_of(node) if name in names]
        values = [_value_of(node, name) for name in kept]
        if node in values or kept == _names_of(node):
            return self.alone("\n".join(self.lines[first : node.end_lineno]))
        short = f"{', '.join(kept)} = {', '.join(map(ast.unparse, values))}"
        comment = self.lines[node.end_lineno - 1][node.end_col_offset :]
        return self.alone("\n".join([*self.lines[first:last], short + comment]))

    def alone(self, text: str) -> str:
        """In one file what is another module's here has no prefix, and no other file is referred to."""
        text = re.sub(rf"\b(?:{'|'.join(self.whole)})\.", "", text) if self.whole else text
        broken = re.compile(r"\n *")  # the line stays as long as it was
        text = re.sub(rf" \([^()]*{FILES}[^()]*\)(\.?)( ?)", lambda m: m[1] + (broken.findall(m[0]) or [m[2]])[0], text)
        text = re.sub(rf'\s+(?:[A-Z][^."]*?)?{FILES}[^."]*\.(?!\w)', "", text)  # a sentence
        return re.sub(r"\bexamples/\w+/(\w+)\.py", r"\1 of torch-compiler-companion", text)

    def rename(self, old: str, new: str) -> None:
        names = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id == old)
        found = [(node.lineno, node.col_offset) for node in names]
        found += [(each.lineno, 4) for each in self.tree.body if isinstance(each, ast.FunctionDef) and each.name == old]
        self.new_names |= dict.fromkeys(found, (old, new))
        for number in {number for number, _ in found}:  # with what was renamed before in the same line
            line = self.written[number - 1]
            for at, (before, after) in sorted(((at, each) for (n, at), each in self.new_names.items() if n == number)):
                at += len(line) - len(self.written[number - 1])
                line = line[:at] + after + line[at + len(before) :]
            self.lines[number - 1] = line

    def used_of_others(self, node: ast.AST) -> list[Name]:
        found = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
        return [(self.whole[name], each.attr) for each in found if (name := ast.unparse(each.value)) in self.whole]


def _file(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def _value_of(node: ast.stmt, name: str) -> ast.AST:
    """What an assignment such as A, B = a, b gives to one name; of any other statement, all of it."""
    target, value = getattr(node, "targets", [None])[0], getattr(node, "value", None)
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return next((each for to, each in zip(target.elts, value.elts, strict=True) if ast.unparse(to) == name), node)
    return node


def _used(node: ast.AST, annotations: bool = False) -> set[str]:
    """The names in it; but for those of annotations, which may be the harness's, unless they are asked for."""
    notes = [getattr(each, kind, None) for each in ast.walk(node) for kind in ("annotation", "returns")]
    skipped = {id(inner) for note in notes if note and not annotations for inner in ast.walk(note)}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and id(each) not in skipped}


@dataclass
class _Export:
    """What goes along, module by module: a module before those that import from it."""

    modules: dict[Path, Module] = field(default_factory=dict)
    taken: dict[Path, dict[str, ast.stmt]] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)  # statements by the names they bind
    renamed: dict[Name, str] = field(default_factory=dict)  # imports of a name that means something else elsewhere
    aliases: dict[str, str] = field(default_factory=dict)  # what a file calls otherwise than where it is defined

    def module(self, path: Path) -> Module:
        if path not in self.modules:
            self.modules[path] = Module(path)
        return self.modules[path]

    def take(self, path: Path, name: str) -> None:
        """The statement that defines `name` in a file, and all that it uses."""
        module = self.module(path)
        if name in self.taken.get(path, {}):
            return
        if name in module.defined:
            node = module.defined[name]
            self.taken.setdefault(path, {})[name] = node
            self._take_used(module, _value_of(node, name))
        elif name in module.imports:
            statement, inside = module.imports[name]
            if inside.startswith("harness"):
                raise NothingToExport(f"{path.stem} needs {name} of the harness, so it cannot leave; read {path.name}")
            if not inside:
                self._import(path, name, statement)
                return
            original = statement.split(" import ")[1].split(" as ")[0]
            if original != name:
                self.aliases[name] = original
            self.take(_file(inside), original)

    def _take_used(self, module: Module, node: ast.AST) -> None:
        for used in sorted(_used(node)):
            self.take(module.path, used)
        for other, used in module.used_of_others(node):
            self.take(other, used)
        for name in sorted(_used(node, annotations=True) - _used(node)):  # torch.library evaluates annotations
            if not module.imports.get(name, ("", ""))[1].startswith("harness"):
                self.take(module.path, name)

    def take_effects(self) -> None:
        """What is done to what was taken, until nothing is left to take."""
        for path, taken in list(self.taken.items()):
            for node in self.modules[path].effects:
                where = {ast.For: "iter", ast.If: "test"}.get(type(node))
                done_to = _used(getattr(node, where) if where else node.value.func)
                if done_to & taken.keys() and node not in taken.values():
                    taken[f"{path.stem}, line {node.lineno}"] = node
                    self._take_used(self.modules[path], node)
                    return self.take_effects()

    def names(self) -> set[Name]:
        return {(path, name) for path, taken in self.taken.items() for name in taken}

    def _import(self, path: Path, name: str, statement: str) -> None:
        """What another file imports under the same name gets the name of its package too: hopper_tma."""
        key = statement.removeprefix("import ") if statement.startswith("import ") else name
        if self.imports.setdefault(key, statement) == statement:
            return
        new = f"{statement.split()[1].split('.')[-1]}_{name}"
        statement = f"{statement.split(' as ')[0]} as {new}"
        if self.imports.setdefault(new, statement) != statement:
            raise NothingToExport(f"{name} is imported from two modules: {statement}; {self.imports[new]}")
        self.renamed[path, name] = new

    def statements(self) -> Iterator[str]:
        owner: dict[str, Path] = {}
        for (path, name), new in self.renamed.items():
            self.modules[path].rename(name, new)
        for path in self._in_order():
            for name in self.taken[path]:
                if owner.setdefault(name, path) != path or name in self.imports:
                    self._set_apart(path, name, self.imports.get(name, owner[name].name))
            module, mine = self.modules[path], self.taken[path]
            about = [] if "demo" in module.defined else [module.source(module.tree.body[0], ())]  # why it is as it is
            yield "\n".join([f"# --- {path.relative_to(ROOT)}", *about])
            yield from (module.source(node, mine) for node in module.tree.body if node in mine.values())
        yield from (f"{name} = {original}" for name, original in self.aliases.items())

    def _set_apart(self, path: Path, name: str, other: str) -> None:
        """What two files call the same gets the name of its file too: microscaling_FORMATS."""
        new = f"{path.stem}_{name}"
        of_module = any((path, name) in module.used_of_others(module.tree) for module in self.modules.values())
        if isinstance(self.taken[path][name], ast.ClassDef) or of_module or (path, new) in self.names():
            raise NothingToExport(f"{name} of {path.name} cannot stand beside that of {other}")
        inside = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for user, module in self.modules.items():
            if user == path or module.imports.get(name, ("", ""))[1] == inside:
                module.rename(name, new)

    def _in_order(self) -> list[Path]:
        done: dict[Path, None] = {}

        def visit(path: Path) -> None:
            module = self.modules[path]
            for other in (*module.whole.values(), *(_file(inside) for _, inside in module.imports.values() if inside)):
                if other in self.taken and other not in done and other != path:
                    visit(other)
            done[path] = None

        for path in self.taken:
            visit(path)
        return list(done)


def _check_of(module: Module) -> tuple[list[ast.stmt], set[str]]:
    """The first statement of demo(h) that checks something, after the assignments that it needs, and what it uses.

    Of a loop what comes after its last check stays: tables, which are the harness's.
    """
    body = module.defined["demo"].body
    first = next((i for i, node in enumerate(body) if re.search(r"\bcheck\w*\(", ast.unparse(node))), None)
    if first is None:
        raise NothingToExport(f"{module.path.stem}: demo(h) has no h.check(...) that could leave with the kernels")
    if isinstance(loop := body[first], ast.For):
        last = max(i for i, node in enumerate(loop.body) if re.search(r"\bcheck\w*\(", ast.unparse(node)))
        loop.body = loop.body[: last + 1]
        loop.end_lineno = loop.body[-1].end_lineno
    wanted, kept = _used(body[first]), [body[first]]
    for node in reversed(body[:first]):
        if set(_names_of(node)) & wanted:
            wanted |= _used(node)
            kept.insert(0, node)
    return kept, wanted


def _jitted(node: ast.stmt) -> bool:
    return any("jit" in ast.unparse(each) for each in getattr(node, "decorator_list", []))


def _wrappers(whole: _Export, files: list[Path]) -> dict[Name, set[Name]]:
    """The public functions and classes that reach a kernel, and what each uses."""
    found = {}
    for path in files:
        for name, node in whole.module(path).defined.items():
            of_the_demo = "h" in (each.arg for each in ast.walk(node) if isinstance(each, ast.arg))
            of_the_demo |= not {"Table", "geomean", "near", "Work"}.isdisjoint(_used(node, annotations=True))
            callable_ = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and name[0] != "_"
            if callable_ and not of_the_demo and not _jitted(node):
                one = _Export(whole.modules)
                one.take(path, name)
                if any(_jitted(each) for taken in one.taken.values() for each in taken.values()):
                    found[path, name] = one.names() - {(path, name)}
    return found


def _says(name: str, wrappers: dict[Name, set[Name]], checked: set[Name]) -> str:
    """Which functions the check reaches and which not: of either, those that no other calls, and the lesson's own."""
    said = []
    for wanted in (True, False):
        some = {key: uses for key, uses in wrappers.items() if (key in checked) is wanted and key[1].islower()}
        called = set().union(*some.values())
        said.append(", ".join(key[1] for key in some if key not in called or key[1] == name))
    return f"checks {said[0]}" + f"; not checked here: {said[1]}" * bool(said[1])


def _import_block(statements: Iterable[str]) -> str:
    """The standard library's, then the rest; of each, `import x` before `from x import y`."""
    groups: dict[bool, list[str]] = {True: [], False: []}
    for line in sorted(statements, key=lambda line: (line.startswith("from"), line)):
        groups[line.split()[1].split(".")[0] in sys.stdlib_module_names].append(line)
    return "\n".join("\n".join(group) + "\n" for group in groups.values() if group)


def export(name: str, output: Path | None, force: bool) -> int:
    """Write a technique's file to `output`: a file, a folder, or - for stdout; None is the current folder.

    Raises ValueError for a file that exists (without `force`) or cannot be written, and as exported() does.
    """
    _, technique = technique_named(name, "export")
    path = output or Path()
    piped = str(path) == "-"
    if path.is_dir() or not (piped or path.suffix or path.exists()):
        path /= f"{name}.py"
    if path.exists() and not force and not piped:
        raise ValueError(f"{path} exists; name another file with -o, or replace it with --force")
    commit, dirty = git_state()
    commit = (commit or "unknown")[:12] + ", with local changes" * bool(dirty)
    text, says = exported(technique, commit, f"{name}.py" if piped else path.name)
    if piped:
        print(text, end="")
        return 0
    try:
        if output and not output.suffix:
            path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name another file with -o") from None
    print(f"{path}: needs torch and triton only; {says}")
    return 0


def exported(technique: Technique, commit: str, file: str) -> tuple[str, str]:
    """The text; and how to run it as `file`, and what that checks. Raises NothingToExport with the reason."""
    whole, files = _Export(), [technique.path, *technique.variants]
    lesson = whole.module(technique.path)
    if not any(_jitted(node) for path in files for node in whole.module(path).tree.body):
        raise NothingToExport(f"{technique.name} has no kernel of its own: read {technique.file}")
    statements, used = _check_of(lesson)
    for name in sorted(used):
        whole.take(technique.path, name)
    for other, name in (each for node in statements for each in lesson.used_of_others(node)):
        whole.take(other, name)
    wrappers = _wrappers(whole, files)
    says = _says(technique.name, wrappers, whole.names())
    for path, name in [*wrappers, (technique.path, "reference")]:
        whole.take(path, name)
    whole.take_effects()
    parts = list(whole.statements())
    indented = lesson.alone("\n".join("\n".join(lesson.lines[n.lineno - 1 : n.end_lineno]) for n in statements))
    start, main = ("torchrun --nproc-per-node 2", MAIN_OF_RANKS) if technique.needs.ranks > 1 else ("python", MAIN)
    check = f"{CHECK}\n\ndef check_on_this_machine(h) -> None:\n{indented}\n{main}"
    says = f"`{start} {file}` {says}"
    imports = {*whole.imports.values(), "import os", "import torch", "from types import SimpleNamespace"}
    late = {line for line in imports if line.split()[1].split(".")[0] == "triton"}
    lines = (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines()
    copyright = next(line for line in lines if line.startswith("Copyright"))
    written_for = re.findall(r'"((?:torch|triton)[<>=.,\d]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    usage = f"{says}. On a GPU, or without one in Triton's interpreter."
    head = HEAD.format(
        title=technique.lesson, file=technique.file, commit=commit, copyright=copyright,
        versions=" and ".join(written_for), usage=textwrap.fill(usage, 120),
    )  # fmt: skip
    top = f"{head}{_import_block(imports - late)}\n{INTERPRET}\n{_import_block(late)}"
    text = f"{top}\n{_spaced(parts)}\n\n\n{check}"
    return re.sub(r"\bh: Harness\b", "h", text), says  # a check's inputs are made by a function that is handed one


def _spaced(parts: list[str]) -> str:
    """Two blank lines around a function or a class, none between other statements that follow each other."""
    text = parts[0]
    for pair in itertools.pairwise(parts):
        apart = any(re.search(r"^(?:def |class |@)", part, re.M) for part in pair) or pair[1].startswith("# ---")
        text += ("\n\n\n" if apart else "\n") + pair[1]
    return text
