"""Generated faults: masks, comparisons and constants of kernels and of the functions that launch them.

    python -m tests.faults.mutants           writes mutants.json anew, from the tree as it is: a sample, always the same

A mutant is kept as a Fault, with its function and the statement it changes, so it can be planted where that one is
later. Many are harmless (a constant that only decides the speed); what counts is that those once caught stay caught.
"""

from __future__ import annotations

import ast
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from . import ROOT, Fault, places

KEPT = Path(__file__).parent / "mutants.json"
TOPICS = ("triton", "fp8", "tma")
EACH = 3  # of a technique: one of each operator where there are all of them
SPEED_ONLY = {
    "num_warps",
    "num_stages",
    "maxnreg",
    "loop_unroll_factor",
    "pack",
    "axis",
    "instr_shape",
    "warps_per_cta",
}
SWAPPED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!="}


def _is_jit(node: ast.expr) -> str:
    """ "triton" or "gluon" for what names a jit of theirs, else ""."""
    node = node.func if isinstance(node, ast.Call) else node
    named = isinstance(node, ast.Attribute) and node.attr == "jit" and isinstance(node.value, ast.Name)
    return node.value.id if named else ""


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """(function, "triton", "gluon" or "" for one that launches) of those that are mutated."""
    passed = {  # _triton_tile_of = triton.jit(_tile_of)
        node.args[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _is_jit(node.func) and node.args and isinstance(node.args[0], ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        languages = [language for decorator in node.decorator_list if (language := _is_jit(decorator))]
        launches = any(isinstance(x, ast.Call) and isinstance(x.func, ast.Subscript) for x in ast.walk(node))
        if languages or node.name in passed:
            yield node, (languages or ["triton"])[0]
        elif launches:
            yield node, ""


def statements(function: ast.FunctionDef) -> Iterator[tuple[ast.stmt, list[ast.expr]]]:
    """Each statement, and what of it may change: of a compound one what stands before its colon."""
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.While)):
            yield node, [node.test]
        elif isinstance(node, ast.For):
            yield node, [node.iter]
        elif isinstance(value := getattr(node, "value", None), ast.expr) and isinstance(node, ast.stmt):
            yield node, [] if isinstance(value, ast.Constant) and isinstance(node, ast.Expr) else [value]  # a docstring


def _boolean(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitAnd) and _boolean(node.left) and _boolean(node.right)
    return isinstance(node, (ast.Compare, ast.Subscript)) or (isinstance(node, ast.Name) and "in" in node.id)


def changes(source: str, expression: ast.expr, branch: bool) -> Iterator[tuple[str, ast.expr, str]]:
    """(operator, node, text in its place) of every change to an expression."""

    def text(node: ast.AST) -> str:
        return ast.get_source_segment(source, node)

    if branch and isinstance(expression, ast.Name):
        yield "comparison", expression, f"not {expression.id}"
    skipped = set()
    for node in ast.walk(expression):
        if isinstance(node, (ast.JoinedStr, ast.Slice, ast.Tuple, ast.List)) or id(node) in skipped:
            skipped |= {id(child) for child in ast.walk(node)} if not isinstance(node, (ast.Tuple, ast.List)) else {
                id(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.Constant)
            }  # fmt: skip
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Call):
            skipped |= {id(x) for k in node.keywords if k.arg in SPEED_ONLY for x in ast.walk(k)}
            for k in node.keywords:
                if k.arg == "other" and text(node).count("other=") == 1:
                    yield "mask", node, text(node).replace(f", other={text(k.value)}", "")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
            other = f"{text(node.left)} {SWAPPED[type(node.ops[0])]} {text(node.comparators[0])}"
            yield "comparison" if branch else "mask", node, other
        elif isinstance(node, ast.BinOp) and _boolean(node):
            yield "mask", node, text(node.left)
            yield "mask", node, text(node.right)
        elif isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1:
            yield "constant", node, str(node.value + 1)
        elif isinstance(node, ast.Constant) and type(node.value) is float and node.value == 0:
            yield "constant", node, "1.0"


def mutants(technique: str, source: str) -> Iterator[tuple[str, Fault]]:
    """(operator, fault) of every mutant of a technique's file."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    encoded = source.encode()  # what columns of syntax trees count

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    for function, language in functions(ast.parse(source)):
        for statement, expressions in statements(function):
            branch = isinstance(statement, (ast.If, ast.While))
            begin = at(statement.lineno, statement.col_offset)
            for expression in expressions:
                end = at(expression.end_lineno, expression.end_col_offset)
                if not branch and not isinstance(statement, ast.For):
                    end = at(statement.end_lineno, statement.end_col_offset)
                snippet = encoded[begin:end].decode()
                for operator, node, text in changes(source, expression, branch):
                    first, last = at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)
                    changed = (encoded[begin:first] + text.encode() + encoded[last:end]).decode()
                    was = " ".join(encoded[first:last].decode().split())
                    found = places(source, snippet, function.name)
                    here = [i for i, (start, _) in enumerate(found) if start[0] == statement.lineno]
                    if len(here) == 1 and changed != snippet:
                        wrong = f"{function.name} line {statement.lineno}: {was} -> {' '.join(text.split())}"
                        yield operator, Fault(
                            technique, snippet, changed, wrong, count=len(found), within=function.name, nth=here[0],
                            gpu=language == "gluon",
                        )  # fmt: skip


def sample(root: Path = ROOT) -> list[Fault]:
    """A few of each technique, chosen by a hash of what they are: the same in every run."""
    chosen = []
    for topic in TOPICS:
        paths = sorted((root / "examples" / topic).glob("*.py"))
        lessons = [p for p in paths if not any(p.stem.startswith(f"{other.stem}_") for other in paths)]
        for lesson in lessons:
            by_operator = defaultdict(list)
            for path in (lesson, *sorted(lesson.parent.glob(f"{lesson.stem}_*.py"))):  # with its variants
                for operator, fault in mutants(f"{topic}/{lesson.stem}", path.read_text(encoding="utf-8")):
                    by_operator[operator].append(fault)
            for faults in by_operator.values():  # what a CPU can run comes first, and what launches last
                faults.sort(key=lambda f: (f.gpu, "kernel" not in f.within, zlib.crc32(f.id.encode())))
            queues = [by_operator[name] for name in ("mask", "comparison", "constant") if by_operator[name]]
            mine: list[Fault] = []
            while len(mine) < EACH and any(queues):
                for faults in queues:
                    if faults and len(mine) < EACH:
                        mine.append(faults.pop(0))
            chosen += enumerate(mine)
    return [fault for _, fault in sorted(chosen, key=lambda each: each[0])]  # a run that is cut short has some of all


def sampled() -> list[Fault]:
    return [Fault(**each) for each in json.loads(KEPT.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    found = sample()
    rows = [{k: v for k, v in f._asdict().items() if v != Fault._field_defaults.get(k)} for f in found]
    KEPT.write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    print(len(found), "mutants")
