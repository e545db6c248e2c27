"""Generated faults: masks, comparisons and constants of kernels and of the functions that launch them.

    python -m tests.faults.mutants           renews mutants.json: those of deleted code go, others take their places

A mutant is kept as a Fault, with its function and the statement it changes, so it can be planted where that one is
later. Many are harmless (a constant that only decides the speed); what counts is that those once caught stay caught.
So a sample keeps what it has, and what it adds is always the same for the same tree.
"""

from __future__ import annotations

import ast
import copy
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from . import ROOT, Fault, NotFound, places, planted

KEPT = Path(__file__).parent / "mutants.json"
TOPICS = ("triton", "fp8", "tma")
EACH = 3  # of a technique: one of each operator where there are all of them
SPEED_ONLY = {
    "num_warps", "num_stages", "maxnreg", "loop_unroll_factor", "pack", "axis", "instr_shape", "warps_per_cta",
}  # fmt: skip
SWAPPED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}


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


def parts(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, ast.expr, bool]]:
    """(what is replaced, the expression in it that may change, whether it is a condition) of each statement."""
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.While)):
            yield node.test, node.test, True
        elif isinstance(node, ast.For):
            yield node.iter, node.iter, False
        elif isinstance(node, ast.stmt) and isinstance(value := getattr(node, "value", None), ast.expr):
            yield node, value, False


def _boolean(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitAnd) and _boolean(node.left) and _boolean(node.right)
    return isinstance(node, (ast.Compare, ast.Subscript)) or (isinstance(node, ast.Name) and "in" in node.id)


def changes(node: ast.AST, branch: bool) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """(operator, node, what takes its place) of every change to an expression."""
    if isinstance(node, (ast.JoinedStr, ast.Slice)):
        return
    if isinstance(node, ast.Call):
        for k in node.keywords:
            if k.arg == "other":
                yield "mask", node, ast.Call(node.func, node.args, [x for x in node.keywords if x is not k])
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
        other = ast.Compare(node.left, [SWAPPED[type(node.ops[0])]()], node.comparators)
        yield "comparison" if branch else "mask", node, other
    elif isinstance(node, ast.BinOp) and _boolean(node):
        yield "mask", node, node.left
        yield "mask", node, node.right
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1:
        yield "constant", node, ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is float and node.value == 0:
        yield "constant", node, ast.Constant(1.0)
    for child in ast.iter_child_nodes(node):
        shape = isinstance(node, (ast.Tuple, ast.List)) and isinstance(child, ast.Constant)
        if not shape and not (isinstance(child, ast.keyword) and child.arg in SPEED_ONLY):
            yield from changes(child, branch)


def mutants(technique: str, source: str) -> Iterator[tuple[str, Fault]]:
    """(operator, fault) of every mutant of a technique's file."""
    for function, language in functions(ast.parse(source)):
        for part, expression, branch in parts(function):
            found = list(changes(expression, branch))
            if branch and isinstance(expression, ast.Name):
                found.append(("comparison", expression, ast.UnaryOp(ast.Not(), expression)))
            snippet = ast.get_source_segment(source, part)
            there = places(source, snippet, function.name) if found else []
            here = [i for i, (start, _) in enumerate(there) if start[0] == part.lineno]
            for operator, node, other in found if len(here) == 1 else []:
                changed = ast.unparse(copy.deepcopy(part, {id(node): other}))  # the copy has `other` for `node`
                wrong = f"{function.name} line {part.lineno}: {ast.unparse(node)} -> {ast.unparse(other)}"
                yield operator, Fault(
                    technique, snippet, changed, wrong, count=len(there), within=function.name, nth=here[0],
                    gpu=language == "gluon",
                )  # fmt: skip


def applies(fault: Fault, root: Path = ROOT) -> bool:
    """Whether the source still has what the fault replaces."""
    try:
        return bool(planted(fault, root))
    except NotFound:
        return False


def _change(fault: Fault) -> str:
    """What a mutant changes, wherever its function has moved to."""
    return re.sub(r" line \d+", "", fault.wrong).replace('"', "'")


def sample(kept: list[Fault], root: Path = ROOT) -> list[Fault]:
    """EACH of every technique: those of `kept` that still apply, then others by a hash of what they are."""
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
            mine = [f for f in kept if f.technique == f"{topic}/{lesson.stem}" and applies(f, root)]
            known = set(map(_change, mine))
            while len(mine) < EACH and any(queues):
                for faults in queues:
                    if faults and len(mine) < EACH:
                        one = faults.pop(0)
                        mine += [one] if _change(one) not in known else []
            chosen += enumerate(mine)
    return [fault for _, fault in sorted(chosen, key=lambda each: each[0])]  # a run that is cut short has some of all


def sampled() -> list[Fault]:
    return [Fault(**each) for each in json.loads(KEPT.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    found = sample(sampled())
    rows = [{k: v for k, v in f._asdict().items() if v != Fault._field_defaults.get(k)} for f in found]
    KEPT.write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    print(len(found), "mutants")
