"""README.md and docs/ say what the code and the records say, and what they tell a reader to type works."""

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from harness.catalog import ROOT, load_module, topics
from harness.check import CheckError, VacuousCheck
from harness.cli import _parser
from harness.codegen import compile_for
from harness.hardware import machine
from harness.record import load

import pytest
import torch

from companion import readme
from companion.__main__ import _parser as _companion_parser
from compile_inspect import count_entries, logs

PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ["README.md", *readme.DOCUMENTS]}
PAGES |= {f"docs/{path.name}": path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
README = PAGES["README.md"]
PATH = PAGES["docs/learning-path.md"]
TOPICS = {topic.file: topic for topic in topics()}
REFERENCE = "results/h200/triton_examples.json"
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


def by_hand(text):
    """A page without its generated parts."""
    return re.sub(r"<!-- (.+?): python -m companion readme -->.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)


def blocks(text):
    """(language, content) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def fenced_commands(text):
    lines = [line for language, content in blocks(text) if language == "sh" for line in content.splitlines()]
    return [line.split("  #")[0].split(" # ")[0].rstrip() for line in lines if line.strip()]


def inline_commands(text):
    """What stands in `...` and is a command: with arguments, so not the mere name of a script."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`((?:python|\.venv-xla/bin/python|make|pytest|pip|profiling/\w+\.sh) [^`]+)`", text)


# --- the generated parts


def test_generated_tables_are_up_to_date():
    for path, (old, new) in readme.documents().items():
        assert new == old, f"{path.name}: run: python -m companion readme"


def test_every_page_that_is_generated_has_its_markers():
    with pytest.raises(
        ValueError, match=r"x\.md: the markers <!-- part: python -m companion readme --> and .* missing"
    ):
        readme.renewed("no markers", {"part": "body"}, "x.md")
    marked = readme.renewed(
        "a\n<!-- part: python -m companion readme -->\nold\n<!-- end of part -->\nb", {"part": "new"}, "x.md"
    )
    assert marked == "a\n<!-- part: python -m companion readme -->\nnew\n<!-- end of part -->\nb"


def test_the_table_has_the_rows_of_list(cli):
    table = README[README.index("<!-- techniques:") : README.index("<!-- end of techniques")]
    for topic in TOPICS.values():
        listed = cli(topic.file, "--list").stdout
        for technique in topic.techniques:
            assert re.search(rf"^  {technique.name} +{re.escape(technique.question)}$", listed, re.M)
            assert f"[{technique.name}]({technique.file}) | {technique.question} |" in table


def copy_of_the_repository(folder, without=()):
    folder.mkdir()
    folders = ("harness", "companion", "compile_inspect", "examples", "studies", "profiling", "results", "tests")
    for name in [*TOPICS, *PAGES, "Makefile", "pyproject.toml", *folders]:
        if name in without:
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "out"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def test_pages_are_generated_with_and_without_a_record(tmp_path):
    """Of each topic in turn: no record, a record of other techniques, a failed one, and one of other GPUs."""
    root = copy_of_the_repository(
        tmp_path / "repo", without=("harness", "companion", "compile_inspect", "tests", "profiling")
    )
    record = json.loads((ROOT / REFERENCE).read_text())
    for topic in TOPICS.values():
        for path in root.glob(f"results/*/{topic.name}.json"):
            path.unlink()
    bare = {path.name: new for path, (_, new) in readme.documents(root).items()}
    assert bare["README.md"].count("| not recorded yet | `") == sum(len(t.techniques) for t in TOPICS.values())
    assert bare["running.md"].count("| not recorded yet | |") == len(TOPICS)

    tma = next(t for t in topics(root) if t.architectures)
    names = [t.name for t in tma.techniques]
    first = next(example for example in record["examples"] if example["name"] == "persistent_matmul")
    first["answer"] = None
    failed = {**first, "name": names[1], "status": "failed", "reason": "CheckError: wrong", "tables": []}
    checked = {**first, "name": names[2], "answer": "Twice as fast."}
    record |= {"topic": tma.name, "examples": [{**first, "name": names[0]}, failed, checked]}
    (root / "results/h200" / f"{tma.name}.json").write_text(json.dumps(record))
    made = {path.name: new for path, (_, new) in readme.documents(root).items()}
    rows = {row.split("|")[1].split("]")[0][2:]: row.split("|")[3].strip() for row in made["README.md"].splitlines()
            if row.startswith("| [")}  # fmt: skip
    assert rows[names[0]] == f"recorded before it gave an answer{readme.OLDER}"
    assert rows[names[1]] == f"failed: CheckError: wrong{readme.OLDER}"
    assert rows[names[2]] == f"Twice as fast.{readme.OLDER}"
    assert rows[names[3]] == "not recorded yet"
    assert f"| {tma.file} | NVIDIA H200 (sm_90) | torch" in made["running.md"]
    assert f"| 2 of {len(names)} | sm_100, sm_120 |" in made["running.md"]
    assert f"[record](../results/h200/{tma.name}.json)" in made["results.md"]


def test_recorded_runs_are_clean_and_in_order():
    """A technique that was added since is "not recorded yet"; what is recorded is all of what there was."""
    for path in sorted((ROOT / "results").glob("*/*.json")):
        record = load(path)
        for example in record["examples"]:
            assert example["commit"], f"{path} does not say which code {example['name']} measured"
            assert not example["dirty"]
            assert example["status"] in ("passed", "skipped")
        topic = TOPICS[f"{record['topic']}.py"]
        recorded = [e["name"] for e in record["examples"]]
        assert recorded == [t.name for t in topic.techniques if t.name in recorded]


# --- what is written by hand

UNITS = (
    r"x\b|\u00d7|%|percent\b|times (?:as|faster|slower)|(?:[mun\u00b5]?s|sec(?:onds?)?|min(?:utes?)?|hours?)\b"
    r"|[KMGT]i?B(?:/s)?\b|[MGTP]FLOPS?(?:/s)?\b|(?:dB|W|MHz)\b"
)
MEASURED = re.compile(rf"\b\d+(?:\.\d+)?\s?(?:{UNITS})")


@pytest.mark.parametrize("name", PAGES)
def test_no_measurement_is_written_by_hand(name):
    found = [match[0] for match in MEASURED.finditer(by_hand(PAGES[name]))]
    assert not found, f"{name}: {found}: numbers come from results/, by python -m companion readme"


def test_measurements_are_recognized():
    measured = "1.2x|740 TFLOP/s|34 ms|4.1 TB/s|97 %|97%|5 us|2 seconds|20 times as|3 GiB|700 W|under 5 minutes"
    for text in measured.split("|"):
        assert MEASURED.search(f"it takes {text} here"), text
    for text in ("sm_90", "128x256", "torch 2.11", "16-byte", "1x32 by 1x32, 2**n", "K >= 16", "float32", "8 forms"):
        assert not MEASURED.search(f"with {text} here"), text


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[name]):
        path, _, heading = target.partition("#")
        assert "://" not in target
        there = (ROOT / name).parent / path if path else ROOT / name
        assert there.exists(), target
        titles = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.M) if heading else []
        assert not heading or heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_no_place_of_one_machine_is_named():
    for name, text in PAGES.items():
        assert not re.search(r"/(home|root|work|tmp)/|https?://", text), name
        assert max(map(len, by_hand(text).splitlines())) <= 120, name
    assert README[: README.index("## Techniques")].count("\n") <= 90, "a page and a half above its table"


def test_the_learning_path_keeps_the_topics_order():
    sections = re.split(r"^## ", PATH, flags=re.M)[1:]
    told = [re.search(r"`(\w+\.py)`", section)[1] for section in sections]
    assert told[-1] == "torch_xla_examples.py"
    assert sorted(told) == sorted(TOPICS)
    for section in sections:
        topic = TOPICS[re.search(r"`(\w+\.py)`", section)[1]]
        named = re.findall(r"`(\w+)`", "".join(re.findall(r"^- .*$", section, re.M)))
        assert named == [t.name for t in topic.techniques if t.name in named]
        assert len(named) >= len(topic.techniques) - 3, "techniques are missing in the learning path"


# --- commands

RUN = "here, in this process"  # python only; in a folder of its own
CLONE = "in a copy of the repository, one after the other"


@dataclass(frozen=True)
class Step:
    """What make does when it is told so: seen in its recipe, and run by .ci/run where `ci` is True."""

    target: str
    recipe: str
    ci: bool = False


@dataclass(frozen=True)
class Covered:
    """Run for real by a test of another file; here its arguments are looked at."""

    test: str


@dataclass(frozen=True)
class Briefly:
    """Run here for one technique, by these arguments more; after copies of a record were put where they are read."""

    more: str = ""
    records: tuple[str, ...] = field(default=())


SUITE, PROFILING = "tests/test_blackwell_optimizations.py", "tests/test_profiling.py"
MY_TEST = "tests/examples/triton/test_my_add.py"
COMMANDS = {
    "make run": Step("run", "--tour --quick"),
    "make test": Step("test", "-m pytest", ci=True),
    "pip install -r requirements.txt": Step("setup", " -r requirements.txt"),
    "python triton_examples.py": Step("run-all", "$topic --quick"),
    ".venv-xla/bin/python torch_xla_examples.py lazy_tensors --check-only": Step("xla", ".venv-xla/bin/python"),
    "python torch_compiler_examples.py recompilation --check-only": Covered(
        "tests/examples/compiler/test_recompilation.py::test_the_demo_and_its_facts"
    ),
    "python triton_fp8_advanced.py accuracy --study --check-only": Covered("tests/studies/fp8/test_accuracy_study.py"),
    "python triton_tma_blackwell.py what_is_tma --check-only": Covered(
        "tests/examples/tma/test_what_is_tma.py::test_the_demo_and_what_it_finds"
    ),
    "python -m companion doctor": RUN,
    "python triton_examples.py softmax": Briefly("--quick --check-only"),
    "python triton_examples.py softmax --study": Step("studies", "--study --quick --check-only", ci=True),
    "python -m companion show softmax": RUN,
    "python -m companion export softmax": RUN,
    "python -m companion readme --check": RUN,
    "python examples/triton/vector_add.py": RUN,
    "python triton_examples.py vector_add fused_add_relu_mul": RUN,
    "python triton_examples.py --list": RUN,
    "python triton_examples.py vector_add --quick": RUN,
    "python triton_examples.py vector_add --check-only": RUN,
    "python triton_examples.py vector_add --profile": RUN,
    "python triton_examples.py vector_add --json mine.json --seed 1": RUN,
    "python triton_examples.py --json mine.json": Briefly("vector_add"),
    f"python triton_examples.py --json {REFERENCE}": Briefly("vector_add"),
    f"python -m companion compare {REFERENCE} mine.json": Briefly(records=(REFERENCE, "mine.json")),
    f"python -m companion compare {REFERENCE} mine.json --all": Briefly(records=(REFERENCE, "mine.json")),
    "python -m companion compare before.json after.json --fail-under 0.9": Briefly(
        records=("before.json", "after.json")
    ),
    "profiling/torch_profile.sh triton_examples.py softmax": Covered(
        f"{PROFILING}::test_torch_profiler_writes_a_trace_for_each_call"
    ),
    "profiling/profile_pytorch.sh triton_examples.py softmax": Covered(f"{PROFILING}::test_help_is_the_usage"),
    "profiling/ncu.sh triton_examples.py softmax": Covered(
        f"{PROFILING}::test_ncu_sees_the_named_calls_alone_and_leaves_the_clocks"
    ),
    "profiling/nsys.sh triton_examples.py softmax": Covered(
        f"{PROFILING}::test_nsys_has_a_report_for_each_call_and_one_table"
    ),
    "profiling/proton.sh triton_examples.py softmax": Covered(
        f"{PROFILING}::test_proton_and_torch_see_the_kernels_of_a_gpu"
    ),
    "profiling/sanitize.sh triton_tma_blackwell.py": Covered(
        f"{PROFILING}::test_sanitize_runs_all_tools_over_the_kernels_of_the_technique"
    ),
    "profiling/sanitize.sh --tool memcheck,racecheck triton_examples.py softmax": Covered(
        f"{PROFILING}::test_sanitize_runs_all_tools_over_the_kernels_of_the_technique"
    ),
    f"pytest {SUITE} -v": Covered(SUITE),
    f"pytest {SUITE} -k test_fp8": Covered(f"{SUITE}::test_fp8_over_fp16"),
    f'pytest {SUITE} -m "not slow"': Covered(SUITE),
    "sed 's/vector_add/my_add/g' examples/triton/vector_add.py > examples/triton/my_add.py": CLONE,
    f"sed 's/vector_add/my_add/g' tests/examples/triton/test_vector_add.py > {MY_TEST}": CLONE,
    "sed 's/vector_add/my_add/g' studies/triton/vector_add.py > studies/triton/my_add.py": CLONE,
    "python examples/triton/my_add.py": CLONE,
    f"python -m pytest {MY_TEST}": CLONE,
    "python -m companion readme": CLONE,
    f"python -m ruff check --fix examples/triton/my_add.py {MY_TEST}": CLONE,
    f"python -m ruff format examples/triton/my_add.py {MY_TEST}": CLONE,
}


def test_every_command_is_run_or_is_a_step():
    fenced = {command for text in PAGES.values() for command in fenced_commands(text)}
    assert fenced == set(COMMANDS)


def test_every_block_says_what_it_is():
    languages = {language for text in PAGES.values() for language, _ in blocks(text)}
    assert languages <= {"sh", "text", "diff"}


@pytest.mark.parametrize("name", PAGES)
def test_commands_within_the_text_can_be_parsed(name):
    for command in [*inline_commands(PAGES[name]), *fenced_commands(PAGES[name])]:
        words = shlex.split(command)
        if words[0].startswith("profiling/"):
            assert os.access(ROOT / words[0], os.X_OK), command
            script, *names = [w for w in words[1:] if not w.startswith("--") and "check" not in w]
            assert {*names} <= {t.name for t in TOPICS[script].techniques}, command
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), command
        elif words[1:3] == ["-m", "companion"]:
            _companion_parser().parse_args(words[3:])
        elif words[0].endswith("python") and words[1] in TOPICS:
            topic = TOPICS[words[1]]
            assert {*_parser(topic).parse_args(words[2:]).techniques} <= {t.name for t in topic.techniques}, command
            assert (words[0] == "python") != any(t.needs.xla for t in topic.techniques), command
        else:
            assert command in COMMANDS, f"{name}: `{command}` is neither run by a test nor a step of one"


def recipe(target):
    """What make would run, with nothing set up."""
    done = subprocess.run(
        ["make", "-n", target, "VENV=.no", "XLA_VENV=.venv-xla", "WORKERS=0"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_make
@pytest.mark.parametrize("command", [c for c, how in COMMANDS.items() if isinstance(how, Step)])
def test_steps(command):
    how = COMMANDS[command]
    assert how.recipe in recipe(how.target)
    if how.ci:
        assert re.search(rf"^make {how.target}\b", (ROOT / ".ci/run").read_text(), re.M)


@needs_make
def test_make_runs_every_topic():
    for target in ("run", "run-all", "run-full"):
        assert {*re.findall(r"\w+\.py", recipe(target))} >= {*TOPICS}
    assert all(0 < len(topic.tour) <= 2 for topic in TOPICS.values())


@pytest.mark.parametrize("command", [c for c, how in COMMANDS.items() if isinstance(how, Covered)])
def test_what_another_test_runs(command):
    file, _, name = COMMANDS[command].test.partition("::")
    text = (ROOT / file).read_text()
    assert f"def {name or 'test_'}" in text
    if "-k" in command:
        assert f"def {command.split()[-1]}_" in text
    if "-m" in command:
        assert "@pytest.mark.slow" in text


def in_process(words):
    """`python ...` without starting a Python: its exit status."""
    before = sys.argv, sys.path[:]
    try:
        if words[1] == "-m":
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [str(ROOT / words[1]), *words[2:]]
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0
    finally:
        sys.argv, sys.path[:] = before
    return 0


@needs_triton
@pytest.mark.parametrize("command", [c for c, how in COMMANDS.items() if how == RUN or isinstance(how, Briefly)])
def test_commands_that_run_here(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    how = COMMANDS[command]
    (tmp_path / REFERENCE).parent.mkdir(parents=True)
    for name in getattr(how, "records", ()):
        shutil.copy(ROOT / REFERENCE, tmp_path / name)
    assert in_process(shlex.split(f"{command} {getattr(how, 'more', '')}")) == 0, capsys.readouterr()
    if "--json" in command:
        written = command.split("--json ")[1].split()[0]
        assert [e["status"] for e in json.loads((tmp_path / written).read_text())["examples"]] == ["passed"]


def apply(folder, diff):
    """A diff that only adds: each line after the one above it, wherever that has moved to since."""
    lines = diff.splitlines()
    path = folder / next(line.removeprefix("+++ b/") for line in lines if line.startswith("+++ "))
    text = path.read_text()
    for above, added in itertools.pairwise(lines):
        assert not added.startswith("-") or added.startswith("---")
        if added.startswith("+") and not added.startswith("+++"):
            assert text.count(f"{above[1:]}\n") == 1, above
            text = text.replace(f"{above[1:]}\n", f"{above[1:]}\n{added[1:]}\n")
    path.write_text(text)


@needs_triton
def test_the_page_about_adding_a_technique(tmp_path):
    """Each command and each diff of it, in its order, in a copy of the repository; then the table has its row."""
    page = PAGES["docs/adding-a-technique.md"]
    if (ROOT / "examples/triton/my_add.py").exists():
        pytest.skip("somebody has followed the page here")
    clone = copy_of_the_repository(tmp_path / "repo")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("python", "python3"):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        (tools / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env = kept | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(clone)}

    def run(*words):
        done = subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    said = {}
    for language, content in blocks(page):
        if language == "diff":
            apply(clone, content)
        for command in fenced_commands(f"```{language}\n{content}```"):
            if COMMANDS[command] in (RUN, CLONE) and ("ruff" not in command or find_spec("ruff")):
                said[command] = run("bash", "-c", command)
    assert "my_add" in said["python triton_examples.py --list"]
    assert re.search(r"^my_add +passed", said["python examples/triton/my_add.py"], re.M)
    row = next(line for line in (clone / "README.md").read_text().splitlines() if line.startswith("| [my_add]"))
    assert "| not recorded yet | `python triton_examples.py my_add` |" in row


# --- exercises: the change can be made as written, and what is said to be seen is seen


@pytest.fixture
def edited(tmp_path):
    """The module of a file of examples/ with the change that the page asks for; the change is to be found in both."""

    def load(file, old, new):
        told = " ".join(PATH.split())
        assert f"`{file}`" in told
        assert re.search(rf"change `{re.escape(old)}` to `{re.escape(new)}`", told), (file, old, new)
        text = (ROOT / file).read_text()
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
        changed = tmp_path / f"edited_{Path(file).name}"
        changed.write_text(text.replace(old, new))
        return load_module(changed)

    yield load
    for name in [name for name in sys.modules if name.startswith("edited_")]:
        del sys.modules[name]


def sees(text):
    assert text in " ".join(PATH.split()), f"docs/learning-path.md does not say {text!r}"
    return text


def test_exercise_of_torch_compile(edited):
    changed = edited("examples/compiler/recompilation.py", "CALLS = 12", "CALLS = 6")
    case = changed.cases(torch.randn(4, 8))["int that a loop runs to"]
    found = count_entries(*case.broken())
    assert sees("You should see 6 and 0") == f"You should see {found.compiled} and {found.eager_calls}"
    assert torch._dynamo.config.recompile_limit == 8
    sees("cache entries, which is 8")


@needs_triton
def test_exercise_of_triton(edited, h):
    changed = edited("examples/triton/vector_add.py", "offsets < n_elements", "offsets <= n_elements")
    fails = []
    for n in (0, 1, 997, 1024, 1025):
        try:
            # What is read behind their ends is a number too: NaN there would leave the guard's NaN as it was.
            inputs = h.randn(n + 1)[:n], h.randn(n + 1)[:n]
            h.check(changed.vector_add, changed.reference, *inputs, terms=0)
        except CheckError as error:
            fails.append(str(error))
    assert [re.search(r"vector_add (\d+)", said)[1] for said in fails] == ["1", "997", "1025"]
    assert sees("vector_add 1 float32: 4 bytes outside its output were written") in fails[0]
    sees("The run checks 0, 1, 997, 1024 and 1025 elements")
    assert "for n in (0, 1, 997, BLOCK, BLOCK + 1):" in Path(changed.__file__).read_text()


@needs_triton
def test_exercise_of_fp8(edited, h):
    from studies.fp8.accuracy import show_outliers

    name = "1x32 by 1x32, 2**n"
    old, new = (f"Recipe((1, {n}), (1, {n}), power=True)" for n in (32, 8))
    changed = edited("examples/fp8/accuracy.py", old, new)
    before = {name: changed.Recipe((1, 32), (1, 32), power=True)}
    lost = []
    for recipes in (before, {name: changed.RECIPES[name]}):
        show_outliers(h, recipes)
        (table,) = (fact for key, fact in h.record.facts.items() if key.startswith("SNR, dB, where one channel"))
        last, plain = table[name]["2**20"], table[name]["2**0"]
        assert last < plain - changed.BROKEN_DB
        lost.append(last)
        h.record.facts.clear()
    assert 4.9 < lost[1] - lost[0] < 6.1, lost
    sees("between 5 and 6 more in `1x32 by 1x32, 2**n: breaks at 2**20`")


@needs_triton
def test_exercise_of_tma(edited):
    from examples.tma import what_is_tma

    changed = edited("examples/tma/what_is_tma.py", "WARPS = 64, 256, 4", "WARPS = 64, 512, 4")
    x = torch.empty(8192, 8192, dtype=torch.float16, device="meta")
    found = {}
    for module in (what_is_tma, changed):
        for name in ("scale_descriptors", "scale_pointers"):
            (found[module is changed, name],) = compile_for(getattr(module, name), (x, 2.5), sms=(90,))
    before, after = found[False, "scale_descriptors"], found[True, "scale_descriptors"]
    assert after.found["cp.async.bulk.tensor"] == before.found["cp.async.bulk.tensor"]
    assert after.shared // 1024 == 2 * (before.shared // 1024)
    loads = [found[which, "scale_pointers"].found["ld.global.v4"] for which in (False, True)]
    assert loads[1] == 2 * loads[0]
    sees(
        "the same count, twice the shared memory, and twice as many `LDG`: one instruction stands in the code for a "
        "tile of either size"
    )


def test_exercise_of_xla():
    """The counts are held by test_without_sync_each_step_holds_all_before_it, where there is torch_xla."""
    text = (ROOT / "examples/xla/lazy_tensors.py").read_text()
    assert text.count("STEPS = 8") == 1
    sees("change `STEPS = 8` to `STEPS = 16`")
    assert sees("You should see 16, and 1 + 2 + ... + 16 = 136").endswith(str(sum(range(1, 17))))
    tests = (ROOT / "tests/examples/xla/test_lazy_tensors.py").read_text()
    assert "def test_without_sync_each_step_holds_all_before_it" in tests


# --- the messages of docs/troubleshooting.md

OFFLINE = """
import json, sys
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import _allocation
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

said = []

def catch(fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")

def compiled(fn, sm=90, **signature):
    constants = {k: v for k, v in signature.items() if isinstance(v, int)}
    types = {k: "constexpr" if k in constants else v for k, v in signature.items()}
    catch(triton.compile, ASTSource(fn=fn, signature=types, constexprs=constants), target=GPUTarget("cuda", sm, 32))

BLOCK = 64

@triton.jit
def sizes(x_ptr, n, B: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, B), 1.0)

@triton.jit
def ranges(x_ptr, n):
    tl.store(x_ptr + tl.arange(0, n), 1.0)

@triton.jit
def reads_global(x_ptr):
    tl.store(x_ptr + BLOCK, 1.0)

@triton.jit
def dots(x_ptr, y_ptr, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, x))

@triton.jit
def sums(x_ptr, n, B: tl.constexpr):
    acc = 0
    for i in range(n):
        acc = acc + tl.load(x_ptr + i * B + tl.arange(0, B))
    tl.store(x_ptr + tl.arange(0, B), acc)

@triton.jit
def breaks(x_ptr, n):
    for i in range(n):
        if i > 3:
            break
        tl.store(x_ptr + i, 1.0)

@triton.jit
def adds_up(x_ptr, B: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, B), tl.sum(tl.load(x_ptr + tl.arange(0, B))))

compiled(sizes, x_ptr="*fp32", n="i32", B=100)
compiled(ranges, x_ptr="*fp32", n="i32")
compiled(reads_global, x_ptr="*fp32")
compiled(dots, x_ptr="*fp16", y_ptr="*fp32", B=8)
compiled(dots, sm=80, x_ptr="*fp8e4nv", y_ptr="*fp32", B=32)
compiled(sums, x_ptr="*fp32", n="i32", B=128)
compiled(breaks, x_ptr="*fp32", n="i32")
catch(_allocation.NullAllocator(), 1, 1, None)
said.append(str(OutOfResources(300000, 232448, "shared memory")))
halves = torch.ones(64, 520, dtype=torch.float16)
catch(TensorDescriptor.from_tensor, halves[:, :511].contiguous(), [64, 64])
catch(TensorDescriptor.from_tensor, halves[:, 1:513], [64, 64])
if not torch.cuda.is_available():
    catch(sizes[(1,)], torch.ones(64), 64, B=64)
    catch(__import__, "harness.hardware")
    triton.knobs.runtime.interpret = True
    late = triton.jit(adds_up.fn)
    catch(late[(1,)], torch.ones(64), B=64)
print(json.dumps(said))
"""


def offline_messages(tmp_path):
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=kept | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def source(package, pattern):
    """The string literals of a file of a package, put together as the compiler does."""
    folder = Path(find_spec(package).submodule_search_locations[0])
    files = sorted(folder.glob(pattern))
    assert files, (package, pattern)
    return [re.sub(r'"\s*f?"', "", file.read_text()) for file in files]


def message_of(fn, *args, **kwargs):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fn(*args, **kwargs)
    return f"{caught.type.__name__}: {caught.value}"


def branches(x):
    y = x.sin()
    if y.sum() > 0:
        y = y + 1
    return y


def prints(x):
    print("x")
    return x + 1


def repeats(x, k):
    for _ in range(k):
        x = x.sin()
    return x


def compiler_messages():
    from torch._inductor.exc import InvalidCxxCompiler

    said = []
    for fn in (branches, prints):
        torch.compiler.reset()
        said.append(message_of(torch.compile(fn, backend="eager", fullgraph=True), torch.ones(4)))
    with logs() as records:
        compiled = torch.compile(repeats, backend="eager")
        for k in range(1, 12):
            compiled(torch.ones(3), k)
    torch.compiler.reset()
    said += [text for _, text in records]
    said.append(f"InvalidCxxCompiler: {InvalidCxxCompiler()}")
    return said


def harness_messages(h):
    from harness.faults import explain

    from examples.common.device import require_triton_device
    from examples.common.tma import require_tma_layout

    said = []
    if machine().mode != "gpu":
        said.append(message_of(require_triton_device, "f", torch.ones(3, dtype=torch.bfloat16)))
    said.append(message_of(require_tma_layout, "f", x=torch.ones(64, 511, dtype=torch.float16)))

    def written_beyond(x):
        out = torch.empty_like(x)
        torch.as_strided(out, (x.numel() + 1,), (1,)).fill_(1)
        return out

    x = h.randn(64)
    said.append(message_of(h.check, lambda x: x + 1, lambda x: x.double(), x))
    said.append(message_of(h.check, written_beyond, lambda x: torch.ones_like(x).double(), x, constant_ok=True))
    with pytest.raises(VacuousCheck) as caught:
        h.check(torch.clone, lambda x: x.double(), x * 1e-39)
    said.append(str(caught.value))
    said.append(explain(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")))
    said.append(explain(ImportError("/x/_XLAC.so: undefined symbol: _ZN5")))
    said.append(explain(RuntimeError("No PjRtPlugin registered for: CUDA. Make sure")))
    said.append(explain(RuntimeError("Expected XLA tensor. Got: CPUFloatType")))
    return said


@needs_triton
def test_each_message_of_the_page_is_one_that_is_raised(tmp_path, h):
    quoted = [content.strip() for language, content in blocks(PAGES["docs/troubleshooting.md"]) if language == "text"]
    said = offline_messages(tmp_path) + compiler_messages() + harness_messages(h)
    said += source("torch", "_inductor/cudagraph_trees.py")
    said += source("triton", "backends/nvidia/driver.*") + source("profiling", "read.py")
    said += [path.read_text() for path in (ROOT / "results/h200").glob("*.json")]  # what an H200 said
    elsewhere = {"only 0-dimensional arrays can be converted to Python scalars"}  # Triton 3.6 with NumPy 2.4
    if machine().mode == "gpu":
        elsewhere |= {
            "0 active drivers ([]). There should only be one.",
            "Cannot call @triton.jit'd outside of the scope of a kernel",
            "harness: triton was imported before harness, so its interpreter can no longer be switched on",
            "Triton's interpreter computes bfloat16 wrongly",
        }
    said = [" ".join(text.split()) for text in said]
    for message in quoted:
        parts = map(re.escape, " ".join(message.split()).split(" ... "))
        pattern = re.compile(".*".join(parts))
        assert message in elsewhere or any(pattern.search(text) for text in said), message
    assert len(quoted) > 30
