"""README.md and docs/ say what the code and the records say, and what they tell a reader to type works."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

from harness.catalog import ROOT, Technique, load_module, topics
from harness.check import CheckError
from harness.cli import _parser
from harness.codegen import compile_for
from harness.record import load
from harness.session import LONGEST_ANSWER

import pytest
import torch

from companion import readme
from companion.__main__ import _parser as _companion_parser
from compile_inspect import count_entries
from compile_inspect.main import parser as inspected
from compile_inspect.report import PHASES
from triton_compiler.benchmark import QUESTIONS
from triton_compiler.benchmark import command_line as benchmark_command

PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ["README.md", *readme.DOCUMENTS]}
PAGES |= {f"docs/{path.name}": path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
README = PAGES["README.md"]
PATH = PAGES["docs/learning-path.md"]
TOPICS = {topic.file: topic for topic in topics()}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


def by_hand(text):
    """A page without its generated parts."""
    return re.sub(r"<!-- (.+?): python -m companion readme -->.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)


def blocks(text):
    """(language, content) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def fenced_commands(text):
    lines = [line for language, content in blocks(text) if language == "sh" for line in content.splitlines()]
    return [line.split(" # ")[0].rstrip() for line in lines if line.strip()]


def inline_commands(text):
    """What stands in `...` and is a command: with arguments, so not the mere name of a script."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`((?:python|\.venv-xla/bin/python|make|pytest|pip|profiling/\w+\.sh) [^`]+)`", text)


# --- the generated parts


def test_generated_tables_are_up_to_date():
    for path, (old, new) in readme.documents().items():
        assert new == old, f"{path.name}: run: python -m companion readme"


def test_what_is_generated_stands_between_its_markers():
    start, end = "<!-- part: python -m companion readme -->", "<!-- end of part -->"
    assert readme.renewed(f"a\n{start}\nold\n{end}\nb", {"part": "new"}, "x.md") == f"a\n{start}\nnew\n{end}\nb"
    with pytest.raises(ValueError, match=r"x\.md: the markers .* missing"):
        readme.renewed(start, {"part": "body"}, "x.md")


def copied(folder, *names):
    """Those files and folders of the repository, the scripts and the pages, in another place."""
    for name in [*TOPICS, *PAGES, readme.OUTLINE, "Makefile", "pyproject.toml", *names]:
        (folder / name).parent.mkdir(exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "out"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def test_pages_are_generated_without_a_record(tmp_path):
    bare = {path.name: new for path, (_, new) in readme.documents(copied(tmp_path, "examples", "studies")).items()}
    assert bare["README.md"].count("| not recorded yet | `") == sum(len(t.techniques) for t in TOPICS.values())
    assert bare["running.md"].count("| not recorded yet |  |") == len(TOPICS)


def test_every_source_is_a_heading_of_the_chapter_or_goes_beyond_it():
    """The headings word for word; what a Source says of a section stands beside it."""
    outline = (ROOT / readme.OUTLINE).read_text(encoding="utf-8")
    assert "| Persistent Kernels |" in readme.chapter_table([*TOPICS.values()], outline)

    def named(source):
        technique = Technique("made_up", ROOT / "made_up.py", source=source)
        return readme.chapter_sections(technique, ["Tensor Cores", "4. `a.py` - TMA, and more"])

    tma = ("4. `a.py` - TMA, and more", "whose hint is none")
    assert named('chapter sections "Tensor Cores" and "4. `a.py` - TMA, and more", whose hint is none; a paper') == [
        ("Tensor Cores", "whose hint is none"), tma
    ]  # fmt: skip
    assert named('a paper\'s "Title"; chapter section "Tensor Cores".') == [("Tensor Cores", "")]
    assert named('goes beyond the chapter, whose section "Tensor Cores" has no TMA') == []
    for wrong in ('chapter section "TMA"', 'goes beyond the chapter, whose section "TMA" is short', "a paper", ""):
        with pytest.raises(ValueError, match=r"made_up\.py: its Source names"):
            named(wrong)


def test_the_chapter_is_named_and_linked():
    """README links the page that says what it is where it first names it; the page names each of its texts."""
    assert re.match(r"[^\]]*?\[[^\]]*chapter[^\]]*\]\(docs/chapter\.md\)", README.partition("\n")[2])
    page = " ".join(by_hand(PAGES["docs/chapter.md"]).split())
    texts = (ROOT / readme.OUTLINE).read_text(encoding="utf-8").split("\n\n")
    titles = [re.match("# (?:Chapter 14: )?(.+)", text)[1] for text in texts]
    assert len(titles) == 5
    assert all(f'"{title}"' in page for title in titles)


def test_recorded_runs_are_clean_and_in_order():
    """A technique that was added since is "not recorded yet"; what is recorded is all of what there was."""
    for path in sorted((ROOT / "results").glob("*/*.json")):
        record = load(path)
        for example in record["examples"]:
            assert example["commit"], f"{path} does not say which code {example['name']} measured"
            assert not example["dirty"]
            assert example["status"] in ("passed", "skipped")
            assert len(example["answer"] or "") <= LONGEST_ANSWER, example["name"]
        topic = TOPICS.get(f"{record['topic']}.py")  # or the phases of compile_inspect, the parts of triton_compiler
        recorded = [e["name"] for e in record["examples"]]
        names = [t.name for t in topic.techniques] if topic else [*PHASES, *QUESTIONS]
        assert recorded == [name for name in names if name in recorded]


# --- what is written by hand

MEASURED = re.compile(
    r"\b\d+(?:\.\d+)?\s?(?:x\b|\u00d7|%|percent\b|times (?:as|faster|slower)|[KMGT]i?B(?:/s)?\b|[MGTP]FLOPS?(?:/s)?\b"
    r"|(?:[mun\u00b5]?s|sec(?:onds?)?|min(?:utes?)?|hours?|dB|W|MHz)\b)"
)


@pytest.mark.parametrize("name", PAGES)
def test_no_measurement_is_written_by_hand(name):
    found = [match[0] for match in MEASURED.finditer(by_hand(PAGES[name]))]
    assert not found, f"{name}: {found}: numbers come from results/, by python -m companion readme"


def test_measurements_are_recognized():
    yes = "1.2x|740 TFLOP/s|34 ms|97 %|97%|2 seconds|20 times as|3 GiB|700 W"
    assert all(MEASURED.search(f"it takes {text} here") for text in yes.split("|"))
    assert not MEASURED.search("with sm_90, 128x256, torch 2.11, 16-byte rows, 1x32 by 1x32, 2**n, float32, 8 forms")


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


def test_every_command_can_be_parsed():
    """Its script, target, techniques, options and files are there; the page about adding one is run below."""
    for command in (each for text in PAGES.values() for each in [*inline_commands(text), *fenced_commands(text)]):
        words = shlex.split(command)
        if words[0] in ("ncu", "nsys", "uv", "docker") and "python" in words:
            words = words[words.index("python") :]
        if "my_add" in command:
            continue
        if words[0].startswith("profiling/"):
            assert os.access(ROOT / words[0], os.X_OK), command
            options = {"--tool", "memcheck,racecheck"}
            script, *names = [w for w in words[1:] if not w.startswith("--") and w not in options]
            assert {*names} <= {t.name for t in TOPICS[script].techniques}, command
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), command
        elif "pytest" in words[:3]:
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), command
        elif words[1:3] == ["-m", "companion"]:
            _companion_parser().parse_args(words[3:])
        elif words[1] == "-m" and words[2].startswith("compile_inspect."):
            phase = words[2].removeprefix("compile_inspect.")
            inspected(None if phase == "main" else phase).parse_args(words[3:])
            assert phase in ("main", *PHASES)
        elif words[1:3] == ["-m", "triton_compiler.benchmark"]:
            benchmark_command().parse_args(words[3:])
        elif words == ["uv", "sync"]:
            continue
        elif words[1] in TOPICS:
            topic = TOPICS[words[1]]
            assert {*_parser(topic).parse_args(words[2:]).techniques} <= {t.name for t in topic.techniques}, command
            assert (words[0] == "python") != any(t.needs.xla for t in topic.techniques), command
        else:
            assert (ROOT / words[-1]).exists(), command  # python FILE, pip install -r FILE


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_runs_every_topic():
    for target in ("run", "run-all", "run-full"):
        done = subprocess.run(["make", "-n", target, "VENV=.no"], cwd=ROOT, capture_output=True, text=True)
        assert {*re.findall(r"\w+\.py", done.stdout)} >= {*TOPICS}, done.stderr
    assert all(0 < len(topic.tour) <= 2 for topic in TOPICS.values())


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
    if (ROOT / "examples/triton/my_add.py").exists():
        pytest.skip("somebody has followed the page here")
    clone = copied(tmp_path, "harness", "companion", "compile_inspect", "examples", "studies", "tests")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(clone)}
    said = {}
    for language, content in blocks(PAGES["docs/adding-a-technique.md"]):
        if language == "diff":
            apply(clone, content)
        for command in fenced_commands(f"```{language}\n{content}```"):
            if not re.search("ruff|results/|^make", command):
                line = re.sub("^python ", f"{sys.executable} ", command)
                done = subprocess.run(line, shell=True, cwd=clone, env=env, capture_output=True, text=True)
                assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
                said[command] = done.stdout
    assert "my_add" in said["python triton_examples.py --list"]
    assert re.search(r"^my_add +passed", said["python examples/triton/my_add.py"], re.M)
    row = next(line for line in (clone / "README.md").read_text().splitlines() if line.startswith("| [my_add]"))
    assert "| not recorded yet | `python triton_examples.py my_add` |" in row


# --- exercises: the change can be made as the page says, and what is said to be seen is seen


@pytest.fixture
def edited(tmp_path):
    """The module of a file of examples/ with the change that the page asks for: both have it word by word."""

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


def test_exercise_of_torch_compile(edited):
    changed = edited("examples/compiler/recompilation.py", "CALLS = 12", "CALLS = 6")
    case = changed.cases(torch.randn(4, 8))["int that a loop runs to"]
    found = count_entries(case.broken, case.calls)
    assert f"see {found.compiled} and {found.eager_calls}" in PATH


@needs_triton
def test_exercise_of_triton(edited, h):
    changed = edited("examples/triton/vector_add.py", "offsets < n_elements", "offsets <= n_elements")
    for n in (0, 1, 997, 1024, 1025):
        fails = pytest.raises(CheckError, match="4 bytes outside its output were written")
        with nullcontext() if n in (0, 1024) else fails:
            # What is read behind their ends is a number too: NaN there would leave the guard's NaN as it was.
            h.check(changed.vector_add, changed.reference, h.randn(n + 1)[:n], h.randn(n + 1)[:n], terms=0)


@needs_triton
def test_exercise_of_fp8(edited, h):
    from studies.fp8.accuracy import show_outliers

    changed = edited("examples/fp8/accuracy.py", *(f"Recipe((1, {n}), (1, {n}), power=True)" for n in (32, 8)))
    show_outliers(h, {"32": changed.Recipe((1, 32), (1, 32), power=True), "8": changed.RECIPES["1x32 by 1x32, 2**n"]})
    (table,) = (fact for key, fact in h.record.facts.items() if key.startswith("SNR, dB, where one channel"))
    assert 4.9 < table["8"]["2**20"] - table["32"]["2**20"] < 6.1, table


@needs_triton
def test_exercise_of_tma(edited):
    from examples.tma import what_is_tma

    line = "BLOCK_M, BLOCK_BYTES, WARPS = 64, {}, 4"
    changed = edited("examples/tma/what_is_tma.py", line.format(256), line.format(512))
    x = torch.empty(8192, 8192, dtype=torch.float16, device="meta")

    def compiled(module, name):
        return compile_for(getattr(module, name), (x, 2.5), sms=(90,))[0]

    before, after = (compiled(module, "scale_descriptors") for module in (what_is_tma, changed))
    assert after.found["cp.async.bulk.tensor"] == before.found["cp.async.bulk.tensor"]
    assert after.shared // 1024 == 2 * (before.shared // 1024)
    loads, more = (compiled(module, "scale_pointers").found["ld.global.v4"] for module in (what_is_tma, changed))
    assert more == 2 * loads


# --- the messages of docs/troubleshooting.md

SOURCES = (  # package, files
    ("torch", "_dynamo/**/*.py"), ("torch", "_inductor/c*.py"), ("torch", "_inductor/exc.py"), ("harness", "*.py"),
    ("triton", "compiler/*.py"), ("triton", "language/*.py"), ("triton", "runtime/*.py"), ("triton", "tools/*.py"),
    ("triton", "backends/nvidia/driver.*"), ("examples", "common/*.py"), ("profiling", "*.py"),
)  # fmt: skip
ELSEWHERE = {
    "only 0-dimensional arrays can be converted to Python scalars",  # Triton 3.6 with NumPy 2.4
    "ERR_NVGPUCTRPERM",  # of ncu
    "PassManager::run failed",  # of Triton's library
}


def literals(package, pattern):
    """The texts of a package's files with adjacent string literals put together."""
    for folder in find_spec(package).submodule_search_locations:
        for path in Path(folder).glob(pattern):
            text = re.sub(r"([\"'])\s*f?\1", "", path.read_text(encoding="utf-8", errors="ignore"))
            yield " ".join(text.split()).replace("\\'", "'")


@needs_triton
def test_each_message_of_the_page_stands_in_what_raises_it():
    """Of a message the longest part without a number or a name that differs from call to call."""
    quoted = [content.strip() for language, content in blocks(PAGES["docs/troubleshooting.md"]) if language == "text"]
    assert len(quoted) > 30
    corpus = "\n".join(text for package, pattern in SOURCES for text in literals(package, pattern))
    missing = []
    for message in set(quoted) - ELSEWHERE:
        parts = re.split(
            r"\.{3}|\[\]|\b\d+\b|<.*?>|\bBLOCK\b|acc\b|int32|fp8e4nv|Break|config\.|due to|^\w+: ", message
        )
        longest = max((part.strip(" .,:()?") for part in parts), key=len)
        if len(longest) <= 10 or longest not in corpus:
            missing.append((message, longest))
    assert not missing
