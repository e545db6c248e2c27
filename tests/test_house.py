"""The house: a lesson is short and answers its question; how we know is a study; imports go one way."""

import ast
import statistics
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from harness import Harness, Table
from harness.bench import Row
from harness.catalog import ROOT, Needs, load_module, topics
from harness.hardware import machine
from harness.session import LONGEST_ANSWER
from harness.settings import settings_kept
from harness.sources import imported

import pytest
from rich.console import Console

from tests.alone import alone

MEDIAN = 150  # lines of a lesson
LONGER = {}  # at most five lessons of up to 320 lines: name -> why
LESSONS = [technique for topic in topics() for technique in topic.techniques]
TOPICS = sorted({lesson.path.parent.name for lesson in LESSONS})
VARIANTS = [path for lesson in LESSONS for path in lesson.variants]
STUDIES = [path for lesson in LESSONS for path in lesson.studies]
by_name = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: f"{lesson.path.parent.name}-{lesson.name}")
SLOW = ("caching", "checkpoint_resume", "logging_and_hints")  # what they are made of are processes


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def of_demo_alone(tree: ast.Module) -> set[str]:
    """demo and its helpers: the functions that are handed the harness."""
    return {name for name, f in functions(tree).items() if any(arg.arg == "h" for arg in f.args.args)}


@by_name
def test_a_lesson_is_read_in_five_minutes(lesson):
    assert lesson.error is None
    text = lesson.path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert lines(lesson.path) <= (320 if lesson.name in LONGER else 250)
    assert len(ast.get_docstring(tree).splitlines()) <= 25
    kernels = [f.lineno for f in functions(tree).values() if any("jit" in ast.unparse(d) for d in f.decorator_list)]
    assert min(kernels, default=0) < 60, "the first kernel begins before line 60"
    length = {name: node.end_lineno - node.lineno + 1 for name, node in functions(tree).items()}
    assert length["demo"] <= 30
    assert sum(length[name] for name in of_demo_alone(tree)) <= 60, of_demo_alone(tree)
    assert lesson.question.endswith("?")


@by_name
def test_a_lesson_imports_one_way(lesson):
    others = {f"examples.{each.path.parent.name}.{each.name}" for each in LESSONS if each is not lesson}
    names = set(imported(lesson.path))
    assert not {name for name in names if name in others or name.split(".")[0] in ("studies", "companion", "tests")}
    tree = ast.parse(lesson.path.read_bytes())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("harness")]
    assert sum(len(node.names) for node in nodes) <= 4
    assert not any(name.startswith("harness") for path in lesson.variants for name in imported(path))
    assert not any(name in others | {f"examples.{lesson.path.parent.name}.{lesson.name}"}
                   for path in lesson.variants for name in imported(path))  # fmt: skip


def test_every_file_belongs_to_one_lesson():
    named = sorted([*(lesson.path for lesson in LESSONS), *VARIANTS])
    assert named == sorted(path for topic in TOPICS for path in (ROOT / "examples" / topic).glob("*.py"))
    assert sorted(STUDIES) == sorted(path for topic in TOPICS for path in (ROOT / "studies" / topic).glob("*.py"))
    assert {path.name for path in VARIANTS if lines(path) > 300} == set()
    assert {path.name for path in STUDIES if lines(path) > 250} == set()
    assert statistics.median(lines(lesson.path) for lesson in LESSONS) <= MEDIAN
    assert len(LONGER) <= 5


def test_what_kernels_share_leaves_without_the_harness():
    for path in (ROOT / "examples/common").glob("*.py"):
        first = {name.split(".")[0] for name in imported(path)}
        assert not first & {"harness", "studies", "companion", "tests"}, path
    for path in (ROOT / "harness").glob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"compile_inspect", "triton_compiler", "companion"}


def made_up(names: list[str], baseline: str, peers: list[str], ms: list[float], waits: bool = False) -> list[Row]:
    """Rows of these times; with `waits`, each call waits for the host in its own part of its time."""
    times = dict(zip(names, ms, strict=True))
    return [
        Row(name, not name.startswith(("torch", "cuBLAS", "cuDNN", "_scaled", "Flex")), 45.6, 0.25, t, t, t, 1.0,
            100.0, 0.5 / t, times[baseline] / t, 20.0, peer=name in peers,
            gpu_ms=t * (0.5 + 0.07 * i) if waits else None)
        for i, (name, t) in enumerate(times.items())
    ]  # fmt: skip


class MadeUp(Harness):
    """A harness that runs no kernel: the times of a table are made up, the first variant's the shortest.

    They are small, and compiling takes long, so that an answer has long numbers, as on a slow host.
    """

    def __init__(self, technique):
        super().__init__(technique.name, technique.needs, console=Console(quiet=True))

    def check(self, *args, **kwargs):
        pass

    def codegen(self, *args, **kwargs):
        return []

    def compiled(self, fn, **options):
        return fn

    def compare(self, variants, reference, *inputs, baseline, work, title=None, case=None, peers=(), **kwargs):
        ms = [0.02 + 0.01 * i for i in range(len(variants))]
        waits = "timing" in kwargs and kwargs["timing"].end_to_end
        rows = made_up(list(variants), baseline, list(peers), ms, waits)
        self.tables.append(Table(title or self.name, case or str(len(self.tables)), baseline, rows))
        return self.tables[-1]

    def reverse(self) -> None:
        """The other order in each table: the first variant's time the longest."""
        for table in self.tables:
            names, peers = [row.variant for row in table.rows], [row.variant for row in table.rows if row.peer]
            ms, waits = [row.ms for row in reversed(table.rows)], any(row.gpu_ms for row in table.rows)
            table.rows[:] = made_up(names, table.baseline, peers, ms, waits)


def answers_of(lesson) -> tuple[str, str, bool]:
    """Its answer for times in one order and in the other, and whether it is made of times."""
    if lesson.needs.xla:
        from examples.common import xla  # it tells torch_xla which device this is

        xla.device()
    h, module = MadeUp(lesson), load_module(lesson.path)
    one_rank = patch("examples.common.symmetric.check_ranks")  # no kernel runs: it will do
    with alone() if lesson.needs.ranks > 1 else nullcontext(), settings_kept(lesson.name, 0), one_rank:
        module.demo(h)
    assert h._answer, "demo(h) reaches h.answer"
    sentence, timed = h._answer
    h.finish()
    h.reverse()
    return h.record.answer, sentence(), timed


@pytest.mark.parametrize(
    "lesson",
    [
        pytest.param(t, id=f"{t.path.parent.name}-{t.name}", marks=[pytest.mark.slow] * (t.name in SLOW))
        for t in LESSONS
        if not machine().lacks(Needs(packages=t.needs.packages))
    ],
)
def test_the_answer_follows_the_times(lesson):
    """Made-up times in one order and in the other: another answer. One that is made of counts is there without."""
    one, other, timed = answers_of(lesson)
    assert 0 < len(one) <= LONGEST_ANSWER
    assert 0 < len(other) <= LONGEST_ANSWER
    assert not timed or other != one, one
