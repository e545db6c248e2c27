"""`python -m companion report RECORD...`: the chapter as one page that needs no network, from records and lessons.

What the page says is gathered as plain values (`content`), which companion/page/ turns into HTML, and
companion/pictures.py into pictures. A digest of the values and of the templates stands in the page: `--check` compares
that, so that another version of matplotlib makes no page old, and neither does the mark "older code".
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from itertools import takewhile
from pathlib import Path

from harness.bench import Table
from harness.catalog import ROOT, Technique, Topic, topics
from harness.console import noise, of_calls
from harness.record import ExampleRecord, as_run, load, recorded_answer, reference_files

from companion.charts import DRAWN, Chart, charts_of, roofline
from companion.claims import Judged, judge, tally
from companion.compare import by_name
from companion.ledger import CLAIMS
from companion.readme import command, is_stale, machine_name, tables_of, told_rows

PAGE = ROOT / "docs" / "index.html"
TEMPLATES = Path(__file__).parent / "page"
LESSON_LEAST, LESSON_LINES = 12, 70  # of a lesson without a kernel


def gather(paths: list[Path]) -> dict[str, dict]:
    """Records by their topics, from files and from folders of them.

    Raises ValueError, in one sentence, where there is none, where a file is no record, and for a topic's second record.
    """
    found: dict[str, dict] = {}
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: holds no record; name what --json wrote, or a folder of that")
        for file in files:
            try:
                record = as_run(load(file))
            except OSError as error:
                raise ValueError(f"{file}: {error.strerror}; name what --json wrote, or a folder of that") from None
            if record["topic"] in found:
                raise ValueError(f"{file}: a second record of {record['topic']}; put it beside the first with --beside")
            whole = [ExampleRecord(example["name"]).as_dict() | example for example in record["examples"]]
            found[record["topic"]] = record | {"examples": whole, "path": str(file)}
    return found


# --- what the page says


def content(records: dict[str, dict], beside: dict[str, dict], root: Path = ROOT) -> dict:
    """Everything that the page says, as plain values, but for what is older code (`older`).

    Raises ValueError where no record is of a topic of this repository, and for one that cannot be read.
    """
    known = {topic.name: topic for topic in sorted(topics(root), key=lambda t: any(e.needs.xla for e in t.techniques))}
    if not records.keys() & known.keys():  # a folder may hold other records, too
        path = next(iter(records.values()))["path"]
        raise ValueError(f"{path}: its topic {next(iter(records))!r} is none of this repository's: {', '.join(known)}")
    records, beside = ({n: each for n, each in held.items() if n in known} for held in (records, beside))
    readme, guide = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/learning-path.md"))
    path = learning_path(guide)
    told = [_topic(known[name], records[name], beside.get(name), path) for name in known if name in records]
    shown = {each["name"] for topic in told for each in topic["techniques"]}
    files = {technique.name: technique.file for topic in known.values() for technique in topic.techniques}
    judged = judge(CLAIMS, list(known.values()), root)

    def plain(each: Judged) -> dict:
        return each.claim._replace(measured=None)._asdict() | each._replace(claim=None, older=False)._asdict()

    return {
        "topics": told,
        "shown": sorted(shown),
        "files": files,
        "symptoms": pointers(section(readme, "When something is wrong"), files),
        "choices": pointers(section(readme, "Which one should I use?") + section(guide), files),
        "claims": {group: [plain(each) for each in members] for group, members in judged.items()},
        "tally": tally(judged),
        "older": _older(known, records) | {each.claim.id for group in judged.values() for each in group if each.older},
    }


def _older(known: dict[str, Topic], records: dict[str, dict]) -> set[str]:
    """The techniques whose records were made with other code than today's."""
    made = {each["name"]: each for record in records.values() for each in record["examples"]}
    passed = [(t, made[t.name]) for topic in known.values() for t in topic.techniques if t.name in made]
    return {technique.name for technique, each in passed if each["status"] == "passed" and is_stale(technique, each)}


def section(text: str, heading: str = "") -> str:
    """What stands below a heading of the second level; without one, what stands above the first."""
    return (text.partition(f"\n## {heading}\n")[2] if heading else text).partition("\n## ")[0]


def pointers(part: str, files: dict[str, str]) -> list[tuple[str, list[str], str]]:
    """The rows of tables: a symptom or choice, the techniques it leads to, and the cell that names them."""
    tables = re.split(r"^\|.+\n\| ---.+$", part, flags=re.M)[1:]  # each below its head
    rows = [row for table in tables for row in re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.M)]
    return [(what, [name for name in re.findall(r"\w+", cell) if name in files], cell) for what, cell in rows]


def learning_path(text: str) -> dict[str, dict]:
    """What docs/learning-path.md says of each topic: title, what to know before, groups of techniques, exercise."""
    found = {}
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        heading, _, body = section.partition("\n")
        if named := re.match(r"(?:\d+\. )?(.+): `(\w+)\.py`", heading):
            before = re.search(r"^Before: (.+?)\n\n", body, re.S | re.M)
            groups = [(what, re.findall(r"\w+", names)) for what, names in re.findall(r"^- (.+): (`.+`)$", body, re.M)]
            exercise = body.partition("Exercise: ")[2]
            exercise = exercise[:1].upper() + exercise[1:]
            before = before[1] if before else ""
            found[named[2]] = {"title": named[1], "before": before, "groups": groups, "exercise": exercise}
    return found


def _topic(topic: Topic, record: dict, mine: dict | None, path: dict) -> dict:
    examples, others = by_name(record), by_name(mine) if mine else {}
    whose = f"yours: {mine['gpu'] or 'a CPU'}" if mine else ""
    told = []
    for technique in topic.techniques:
        try:
            pair = examples.get(technique.name), others.get(technique.name)
            told.append(_technique(topic, technique, *pair, whose))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            where = f"{record['path']}{' or ' + mine['path'] if mine else ''}: {technique.name} cannot be read"
            raise ValueError(f"{where} ({type(error).__name__}: {error}); record it again with --json") from None
    roof, beside = roofline([*examples.values()]), roofline([*others.values()])
    machine = {"gpu": None, "cores": "?", "cpu": "unknown"} | record.get("machine", {})
    return {
        "name": topic.name, "file": topic.file, **heading(topic.title), "before": "", "groups": [], "exercise": "",
        "where": machine_name(machine),
        "timed": any(table.timed for example in examples.values() for table in tables_of(example)),
        "whose": whose,
        "charts": [picture(roof, [beside] if beside else [], whose)] if roof else [],
        "techniques": told,
        "gone": sorted(examples.keys() - {each["name"] for each in told}),
    } | path.get(topic.name, {})  # fmt: skip


def picture(chart: Chart, others: list[Chart], whose: str) -> dict:
    """A chart, and beside it the one of the same axes of another record, `whose`; of two of them that of its title."""
    alike = [each for each in others if (each.kind, each.x, each.y) == (chart.kind, chart.x, chart.y)]
    mine = min(alike, key=lambda each: each.title != chart.title, default=None)
    return {"chart": chart, "mine": mine, "whose": whose}


def _technique(topic: Topic, technique: Technique, example: dict | None, mine: dict | None, whose: str) -> dict:
    others = charts_of(technique.name, mine) if mine else []
    charts = [picture(chart, others, whose) for chart in charts_of(technique.name, example)] if example else []
    study = (example or {}).get("study")
    part = _part(example or ExampleRecord(technique.name).as_dict(), mine)
    return part | {
        "name": technique.name,
        **heading(technique.lesson or technique.name),
        "file": technique.file,
        "question": technique.question or technique.error,
        "wins": technique.wins_when,
        "run": command(topic, technique),
        "further": [str(path.relative_to(ROOT)) for path in (*technique.variants, *technique.studies)],
        "status": example["status"] if example else "absent",
        "says": answer_of(topic, technique, example),
        "own": bool(example and example["answer"] and example["status"] == "passed"),
        "code": [] if technique.error else code_of(technique.path.read_text(encoding="utf-8")),
        "charts": charts,
        "made": made(example) if example else "",
        "on_cpu": bool(example and example["answer"] and example["machine"] and not example["machine"].get("gpu")),
        "evidence": evidence(example["codegen"]) if example else [],
        "study": _part(study, (mine or {}).get("study")) | {"answer": study["answer"]} if study else None,
    }


def heading(line: str) -> dict[str, str]:
    """The first line of a docstring as a title and what it says of that: `Softmax: read once.` is Softmax, Read once.

    Code that begins the second keeps its small letter.
    """
    title, _, about = line.partition(": ")
    if about.split(" ")[0].rstrip(",").isalpha():
        about = about[0].upper() + about[1:]
    return {"title": title.rstrip("."), "about": about}


def answer_of(topic: Topic, technique: Technique, example: dict | None) -> str:
    """The answer, or what the run says instead of it, and then the recorded answer, as such."""
    if example and example["answer"] and example["status"] == "passed":
        return example["answer"]
    known = recorded_answer(topic.name, technique.name)
    known = f" {known[0].upper()}{known[1:]}" if known else ""
    if example is None:
        return f"Not in this record.{known}"
    if example["status"] == "running":
        return f"The run had not ended with this technique.{known}"
    if example["status"] != "passed":
        reason = (example["reason"] or "no reason recorded").splitlines()[0].rstrip(".")
        return f"{example['status'].capitalize()}: {reason}.{known}"
    return f"Not timed here: what follows was checked, and says nothing of speed.{known}"


def made(example: dict) -> str:
    """What a run was made with, in a line."""
    machine = {"gpu": None, "host": {}} | example["machine"]
    if not example["machine"]:
        return ""
    names = {"torch": "torch", "triton": "Triton", "torch_xla": "torch_xla"}
    versions = [f"{name} {machine[key]}" for key, name in names.items() if machine.get(key)]
    where = machine["gpu"] or f"{machine['host'].get('cpu')}, {machine['host'].get('cores')} cores"
    commit = (example["commit"] or "unknown")[:12] + ", with local changes" * bool(example["dirty"])
    return f"{where}, {example['when'][:10]}, {example['sizes']} sizes, {', '.join(versions)}, commit {commit}"


def code_of(source: str) -> list[dict]:
    """What a lesson is about: its kernels; without one, up to LESSON_LINES of the functions and classes before its
    reference and its demo. Those that are given the harness are about measuring, and only shown if little else is."""
    tree, lines = ast.parse(source), source.splitlines()
    defined = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    shown, room = [node for node in defined if any("jit" in ast.unparse(d) for d in node.decorator_list)], sys.maxsize
    if not shown:
        told = list(takewhile(lambda node: node.name not in ("reference", "answer", "demo"), defined)) or defined[:1]
        own = [node for node in told if "Harness" not in ast.unparse(getattr(node, "args", node))]
        shown, room = own if sum(map(_length, own)) > LESSON_LEAST else told, LESSON_LINES
    found = []
    for node in shown:
        if (room := room - _length(node)) < 0:
            break
        first = node.end_lineno - _length(node)
        found.append({"name": node.name, "source": "\n".join(lines[first : node.end_lineno])})
    return found


def _length(node: ast.FunctionDef | ast.ClassDef) -> int:
    """Lines of a definition with its decorators."""
    return node.end_lineno - min([node.lineno, *(each.lineno for each in node.decorator_list)]) + 1


def evidence(codegen: list[dict]) -> list[tuple[str, str]]:
    """(architectures, instructions found in their code), those with the same instructions together."""
    by_sm: dict[int, dict[str, None]] = {}
    for kernel in codegen:
        found = by_sm.setdefault(kernel["sm"], {})
        found |= dict.fromkeys(name for name, count in kernel["found"].items() if count)
    by_code: dict[str, list[str]] = {}
    for sm, names in sorted(by_sm.items()):
        by_code.setdefault(", ".join(names) or "not supported", []).append(f"sm_{sm}")
    return [(", ".join(sms), names) for names, sms in by_code.items()]


# --- tables


def _part(part: dict, mine: dict | None) -> dict:
    """What a lesson and a study have alike."""
    errors = [check["error"] for check in part["checks"]] + [row["error"] for t in part["tables"] for row in t["rows"]]
    errors = [error for error in errors if error is not None]
    checks = f"{len(errors)} check{'s' * (len(errors) != 1)} passed" if errors else ""
    checks += f"; the largest error is {max(errors):.0%} of what rounding allows" if errors else ""
    timed = [table for table in tables_of(part) if table.timed]
    others = [table for table in tables_of(mine) if table.timed] if mine else []
    groups: dict[tuple[str, str], list[Table]] = {}
    for table in timed:
        groups.setdefault((table.title, table.baseline), []).append(table)
    return {
        "checks": checks,
        "tables": [grid(group, others) for group in groups.values()],
        "facts": [fact_grid(name, value) for name, value in part["facts"].items() if not name.endswith(DRAWN)],
        "conclusions": [f"failed: {part['reason']}"] * (part["status"] == "failed") + part["conclusions"],
    }


def cell(value: object, form: str = "{}") -> dict:
    """A cell; of a recorded number also that, by which it is sorted. None is empty."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    held = {"value": f"{value:.6g}"} if number else {}
    return held | {"text": "" if value is None else form.format(value)}


def grid(tables: list[Table], others: list[Table]) -> dict:
    """Tables of one title and baseline as one, a row for each variant of each case; ratios come first, as a phone shows
    few columns, and those that hold nothing are left out. `others` are of another record: their ratio stands beside."""
    calls, base = of_calls(tables[0]), tables[0].baseline
    same = {(table.title, table.case, table.baseline): table for table in others}
    lines = []
    for table in tables:
        told, other = told_rows(table)[0].variant, same.get((table.title, table.case, base))
        for row in table.rows:
            yours = other[row.variant].speedup if other and row.variant in other else None
            cells = {
                "case": cell(table.case),
                "variant": cell(row.variant),
                f"x {base}": cell(row.speedup, "{:.2f}" + "?" * bool(noise(table, row))),
                "host twice as fast": cell(table.over(base, row.variant, 2) if calls else None, "{:.2f}"),
                f"yours, x {base}": cell(yours, "{:.2f}"),
                "ms": cell(row.ms, "{:.4g}"),
                "spread": cell((row.p80 - row.p20) / row.ms, "{:.0%}"),
                "GPU ms": cell(row.gpu_ms, "{:.4g}"),
                "host us": cell(row.enqueue_us if calls else None, "{:.0f}"),
                "TB/s": cell(row.tbps, "{:.3g}"),
                "TFLOP/s": cell(row.tflops, "{:.0f}" if (row.tflops or 0) >= 100 else "{:.3g}"),
                "% of ceiling": cell(row.of_ceiling, "{:.0%}"),
            }
            ours = "told" if row.variant == told and row.ours else "peer" if row.peer else ""
            lines.append(("base" if row.variant == base else ours, cells))
    heads = [head for head in lines[0][1] if any(cells[head]["text"] for _, cells in lines)]
    heads = heads[len(tables) == 1 :]  # of one case, that stands in the title
    return {
        "title": tables[0].title + ", whole calls" * calls + (f", {tables[0].case}" if len(tables) == 1 else ""),
        "heads": heads,
        "rows": [(kind, [cells[head] for head in heads]) for kind, cells in lines],
        "notes": notes_of(tables),
        "uneven": any(cells[f"x {base}"]["text"].endswith("?") for _, cells in lines),
    }


def notes_of(tables: list[Table]) -> list[str]:
    """What was noted of the tables, once each; what not all of them have with its case."""
    cases: dict[str, list[str]] = {}
    for table in tables:
        for note in table.notes:
            cases.setdefault(note, []).append(table.case)
    return [note if len(of) == len(tables) else f"{', '.join(of)}: {note}" for note, of in cases.items()]


def fact_grid(name: str, value: object) -> dict:
    """A recorded fact as a table: of named rows with named cells, of names with a value each, or of one value."""
    rows = value if isinstance(value, dict) else {"": value}
    nested = bool(rows) and all(isinstance(each, dict) for each in rows.values())
    heads = list(dict.fromkeys(head for each in rows.values() for head in each)) if nested else ["value"]
    told = []
    for key, each in rows.items():
        values = [each.get(head) for head in heads] if nested else [each]
        texts = [" / ".join(map(str, one)) if isinstance(one, list) else one for one in values]
        told.append(("", [cell(str(key)), *map(cell, texts)]))
    return {"title": name, "heads": ["", *heads], "rows": told, "notes": [], "uneven": False, "table": nested}


# --- the page


def digest(said: dict) -> str:
    """16 hex digits over what the page says and how it is drawn, the marks of older code aside."""
    text = json.dumps({name: value for name, value in said.items() if name != "older"}, sort_keys=True, default=str)
    files = [*sorted(TEMPLATES.glob("page.*")), Path(__file__).with_name("pictures.py")]
    parts = [text.encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def render(said: dict, base: str) -> str:
    """The page. `base` is the way from its folder to the repository's root, for links to files."""
    import jinja2
    from markdown_it import MarkdownIt
    from markupsafe import Markup, escape
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    from companion.pictures import draw

    markdown, lexer, formatter = MarkdownIt(), PythonLexer(), HtmlFormatter(nowrap=True)

    def code(source: str) -> Markup:
        """Only what page.css colours is marked: names and punctuation are most of the tokens."""
        html = highlight(source, lexer, formatter).rstrip()
        return Markup(re.sub(r'<span class="(?:n|p|o|w|nb|nn|fm|bp|kt|vm)">([^<]*)</span>', r"\1", html))

    shown = {each["name"] for topic in said["topics"] for each in topic["techniques"]}

    def linked(text: str) -> Markup:
        """Names of techniques as links; one that is a word too, as softmax is, only where it says `see softmax`."""

        def link(found: re.Match) -> str:
            name = found[0]
            return f'<a href="#{name}">{name}</a>' if name in shown and ("_" in name or found[1]) else name

        return Markup(re.sub(r"(?<=see )(\w+)|\b\w+\b(?!\.py)", link, str(escape(text))))

    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    page.filters |= {
        "code": code,
        "inline": lambda text: Markup(markdown.renderInline(text)),
        "markdown": lambda text: Markup(markdown.render(text)),
        "draw": lambda each: Markup(draw(each["chart"], each["mine"], each["whose"])),
        "file": lambda name: f"{base}/{name}",
        "linked": linked,
        "short": lambda topic: topic["title"].split(" ")[0].rstrip(","),
    }
    assets = {name: Markup((TEMPLATES / f"page.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}
    return page.get_template("page.html").render(**said, **assets, digest=digest(said))


def report(records: list[Path], output: Path | None, beside: list[Path], check: bool) -> int:
    """Make the page of records, by default of those that README shows; or say (`check`) whether docs/index.html is up
    to date with them, 1 when it is not. Raises ValueError where a record cannot be read, or the page not written."""
    said = content(gather(records or reference_files()), gather(beside))
    if check:
        path = output or PAGE
        page = path.read_text(encoding="utf-8") if path.is_file() else ""
        differs = f'<meta name="digest" content="{digest(said)}">' not in page
        if differs:
            why = "differs from lessons, records or the page's templates"
            print(f"{path.name} {why}; run: make report", file=sys.stderr)
        return int(differs)
    output = output or Path("report.html")
    text = render(said, Path(os.path.relpath(ROOT, output.resolve().parent)).as_posix())
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{output}: {error.strerror}; name another file with -o") from None
    told, topics_ = sum(len(topic["techniques"]) for topic in said["topics"]), len(said["topics"])
    print(f"{output}: the page of {topics_} topic{'s' * (topics_ > 1)}, {told} techniques; open it in a browser")
    return 0
