"""`python -m companion readme`: the tables of README.md and docs/, from the docstrings and the records.

A record made with other code than today's (harness.sources) is marked "older code"; `--stale` lists those. `--check`
says whether the pages are up to date, the mark aside: a change of the code makes no page wrong.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from harness.bench import Row, Table
from harness.catalog import ROOT, Technique, Topic, topics
from harness.console import noise, of_calls
from harness.record import REFERENCES, as_run, gpus, load, reference_files
from harness.sources import sources_hash

from companion.compare import by_name, join

OLDER = " *(older code)*"
BEYOND = "goes beyond the chapter"
OUTLINE = "docs/chapter.txt"  # the headings of the chapter's texts, as they stand there
_QUOTED, _NAME = '"[^"]+"(?:(?:,| and|, and) "[^"]+")*', re.compile('"([^"]+)"')
_NUMBER, _FASTER_HOST = re.compile(r"\d[\d.,]*(?:e-?\d+)?"), re.compile(r" \(host twice as fast: [^()]*\)")
FASTER = 1.02  # from which on another of our variants than the one that a user gets is named


def tables_of(part: dict) -> list[Table]:
    """The recorded tables of a lesson, or of its study. Messages between ranks have no part of a ceiling: theirs is the
    links', and the one that was measured the memory's."""
    tables = [Table(**table | {"rows": [Row(**row) for row in table["rows"]]}) for table in part["tables"]]
    if part["tables"] and part.get("machine", {}).get("ranks", 1) > 1:
        for row in (row for table in tables for row in table.rows if not row.tflops):
            row.of_ceiling = None
    return tables


def told_rows(table: Table) -> list[Row]:
    """The rows of a timed table that are told: what a user gets without options, which is the table's default or the
    first row that is this repository's and no peer; without one, every row beside the baseline, or that alone."""
    others = [row for row in table.rows if row.variant != table.baseline]
    own = [row for row in others if row.ours and not row.peer]
    return [row for row in own if row.variant == table.default] or own[:1] or others or table.rows


def beside(table: Table, row: Row) -> list[Row]:
    """What a told row is put beside: the baseline, every library's row if it is ours, and the fastest peer."""
    base, peers = table[table.baseline], sorted((each for each in table.rows if each.peer), key=lambda each: each.ms)
    kept = [each for each in table.rows if not each.ours] + peers[:1] if row.ours else []
    return [each for each in [base, *(each for each in kept if each is not base)] if each is not row]


def markdown_table(heads: str, rows: Collection[Iterable[str]]) -> str:
    """A Markdown table, empty without rows; a head that ends with a colon is of numbers, which stand at the right."""
    names = heads.split(" | ")
    rule = ["---:" if name.endswith(":") else "---" for name in names]
    lines = [[name.rstrip(":") for name in names], rule, *rows] if rows else []
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def command(topic: Topic, technique: Technique) -> str:
    return f"{'.venv-xla/bin/python' if technique.needs.xla else 'python'} {topic.file} {technique.name}"


# --- README -----------------------------------------------------------------------------------------------------


def techniques_table(found: list[Topic], records: dict[str, dict], root: Path = ROOT) -> str:
    """README's map: a table for each topic, a row per technique, from the docstrings and what `records` say of it."""
    parts = []
    for topic in found:
        record = records.get(topic.name)
        recorded = by_name(record) if record else {}
        where = f", recorded on {machine_name(record['machine'])}" if record else ""
        rows = []
        for t in topic.techniques:
            if t.error:
                raise ValueError(t.error)
            answer = "not recorded yet"
            if example := recorded.get(t.name):
                answer = answer_cell(example) + OLDER * ("lesson" in stale_parts(t, example, root))
            rows.append((f"[{t.name}]({t.file})", t.question, answer, f"`{command(topic, t)}`"))
        table = markdown_table("technique | the question it answers | answer | run", rows)
        parts.append(f"### `{topic.file}`{where}\n\n{table}")
    return "\n\n".join(parts)


def elsewhere_table(found: list[Topic], ran: dict[str, list[dict]], root: Path = ROOT) -> str:
    """What another GPU, or another Triton, answers where that is not the reference's answer: a row for each technique.

    A ratio that this repository is held to differs when it is over 5 % away, by more than what lies between two
    machines of one kind (companion.compare). An answer differs, too, whose words do, which follow from comparisons;
    those of two codes cannot be compared, and are listed below.
    """
    rows, machines, other_code = [], 0, {}
    for topic in found:
        reference, *others = ran.get(topic.name) or [None]
        for other in others:
            where = f"{other['machine']['gpu'] or 'a CPU'}, Triton {other['machine'].get('triton') or 'absent'}"
            held = [row for row in join(reference, other, []) if row.held]
            theirs, here = by_name(other), by_name(reference)
            machines += 1
            for t in (t for t in topic.techniques if t.name in theirs and t.name in here):
                own = [row for row in held if row.technique == t.name]
                apart = sum(row.far for row in own)
                one_code = theirs[t.name]["sources"] == here[t.name]["sources"]
                if apart or (one_code and answer_words(theirs[t.name]) != answer_words(here[t.name])):
                    older = "lesson" in stale_parts(t, theirs[t.name], root)
                    answer = answer_cell(theirs[t.name]) + OLDER * older
                    rows.append((t.name, where, answer, str(apart), str(len(own))))
                elif not one_code:
                    other_code.setdefault(where, []).append(t.name)
    if not machines:
        return "No other GPU is recorded yet, and no other Triton."
    table = markdown_table("technique | where | its answer there | ratios that differ: | of:", rows)
    lines = [table or "Every other machine that is recorded answers the same."]
    for where, names in other_code.items():
        lines += ["", f"By other code than above, so that only ratios are compared ({where}): {', '.join(names)}."]
    return "\n".join(lines)


def other_triton(folder: str) -> str | None:
    """The folder of results/ with the same machine's own Triton, of one that has another (h100 of h100-triton-3.9)."""
    machine, triton, _ = folder.partition("-triton-")
    return machine if triton else None


def versions_table(root: Path = ROOT) -> str:
    """Our kernels of which another Triton makes something else on the same machine, a table for each such folder: whose
    speed over their baseline is more than 5 % away, by more than what lies between two machines of one kind
    (companion.compare). A technique whose code was changed between the two records is left out; one whose code was
    changed since is marked."""
    parts, older = [], set(stale_examples(root))
    for folder in sorted((root / "results").glob("*-triton-*")):
        held, lines = 0, []
        for path in sorted(folder.glob("*.json")):
            before = root / "results" / other_triton(folder.name) / path.name
            if not before.is_file():
                continue
            one, other = as_run(load(before)), as_run(load(path))
            first, second = by_name(one), by_name(other)
            same = [name for name in second if name in first and first[name]["sources"] == second[name]["sources"]]
            rows = [row for row in join(one, other, same) if row.held] if same else []
            held += len(rows)
            for row in (row for row in rows if row.far):
                name = row.technique + OLDER * (f"{path.relative_to(root)}: {row.technique}" in older)
                times = (f"{row.ms[0]:.4g}", f"{row.ms[1]:.4g}", f"{row.kept:.2f}x")
                lines.append((name, row.case, row.variant, *times))
        if held:
            where = f"{one['machine']['gpu']}, Triton {one['machine']['triton']} and {other['machine']['triton']}"
            table = markdown_table("technique | case | variant | ms before: | ms after: | speed kept:", lines)
            parts.append(f"{where}: {len(lines)} of {held} rows are over 5 % away.\n\n{table}".rstrip())
    return "\n\n".join(parts) or "No machine is recorded with two versions of Triton yet."


def answer_words(example: dict) -> str:
    """A recorded answer without its numbers, nor what a faster host would make of them."""
    return _NUMBER.sub("", _FASTER_HOST.sub("", answer_cell(example)))


def parts_table(what: str, part: str, records: list[dict], root: Path) -> str:
    """The phases of compile_inspect, or the parts of triton_compiler's benchmark, with what each asks and answered, on
    the reference's machine, the first of `records`; and what they answered on the others."""
    if not records:
        return "No run is recorded yet."
    told = []
    for record in records:
        rows = []
        for each in record["examples"]:
            answer = answer_cell(each) + OLDER * part_is_stale(record["topic"], each, root)
            rows.append((f"`{each['name']}`", *([] if told else [each["question"]]), answer))
        heads = f"{part} | what it answered there" if told else f"{part} | what it asks | what it answered"
        text = markdown_table(heads, rows)
        older = f" ({OLDER.strip()}: before the code was changed)" * (OLDER in text)
        head = "Recorded" if told else f"{what}, recorded"
        told.append(f"{head} on {machine_name(record['machine'])}{older}:\n\n{text}")
    return "\n\n".join(told)


def part_is_stale(topic: str, example: dict, root: Path) -> bool:
    """is_stale() of what is no topic: compile_inspect, a file for each phase, and triton_compiler's benchmark."""
    name = "benchmark" if topic == "triton_compiler" else example["name"]
    file = root / topic / f"{name}.py"
    return not file.is_file() or example["sources"] != sources_hash(file, root=root)


def machine_name(machine: dict) -> str:
    """A GPU by its name, several with their number, a CPU with its cores."""
    several = gpus(machine)
    if several != machine["gpu"]:
        return several
    return f"an {machine['gpu']}" if machine["gpu"] else f"a CPU ({machine['cores']} cores, {machine['cpu']})"


def stale_parts(technique: Technique, example: dict, root: Path = ROOT) -> list[str]:
    """Which parts of a record, "lesson" and "study", were made with other code than there is today."""
    parts = {"lesson": ((technique.path,), example), "study": (technique.studies, example.get("study"))}
    found = []
    for name, (files, part) in parts.items():
        if not part:
            continue
        peers = [root / peer for peer in part["peers"]]
        there = files and all(peer.is_file() for peer in peers)  # one may have moved since
        if not there or part["sources"] != sources_hash(files[0], [*files[1:], *peers], root):
            found.append(name)
    return found


def is_stale(technique: Technique, example: dict, root: Path = ROOT) -> bool:
    """Whether a recorded lesson, or its study, was made with other code than there is today."""
    return bool(stale_parts(technique, example, root))


def answer_cell(example: dict) -> str:
    """A technique's recorded answer, or why there is none."""
    if example["status"] != "passed":
        return f"{example['status']}: {example['reason']}"
    return example["answer"].replace("|", "\\|") if example["answer"] else "recorded before it gave an answer"


def chapter_sections(technique: Technique, known: Collection[str]) -> list[tuple[str, str]]:
    """(section of the chapter, what is found otherwise here) of each that a `Source` names, as in `chapter section "A",
    whose claim is wrong; chapter sections "B" and "C"`; none where the technique goes beyond the chapter.

    Raises ValueError for a section that is not `known`, and for a Source that says neither.
    """
    named = re.findall(f"sections? ({_QUOTED})", technique.source)
    if unknown := {name for names in named for name in _NAME.findall(names)} - {*known}:
        raise ValueError(f"{technique.file}: its Source names {sorted(unknown)}, which {OUTLINE} does not have")
    parts = [re.match(f"chapter sections? ({_QUOTED})(?:, (wh.+))?", part) for part in technique.source.split("; ")]
    found = [(name, (part[2] or "").rstrip(".")) for part in parts if part for name in _NAME.findall(part[1])]
    if not found and BEYOND not in technique.source:
        raise ValueError(f"{technique.file}: its Source names no section of the chapter, nor says that it {BEYOND}")
    return found


def chapter_table(found: list[Topic], outline: str) -> str:
    """For each text of the chapter its sections with the techniques that name them as their Source, and those without.

    `outline` has the headings of each text, its title first, and an empty line between texts. Raises ValueError.
    """
    texts = [[line.lstrip("#").strip() for line in text.splitlines()] for text in outline.strip().split("\n\n")]
    known = {heading for text in texts for heading in text}
    named = {t: chapter_sections(t, known) for topic in found for t in topic.techniques}
    lines = []
    for title, *headings in texts:
        told = {h: [(t, clause) for t, each in named.items() for name, clause in each if name == h] for h in headings}
        rows = [(h, f"[{t.name}](../{t.file})", clause) for h in headings for t, clause in told[h]]
        table = markdown_table("section | technique | what is found otherwise", rows)
        lines += [f"### {title}\n", *[f"{table}\n"] * bool(table)]
        lines += [f"Sections that no technique has as its source: {'; '.join(h for h in headings if not told[h])}.\n"]
    beyond = ", ".join(f"[{t.name}](../{t.file})" for t, sections in named.items() if not sections)
    return "\n".join([*lines, f"### Techniques that go beyond the chapter\n\n{beyond}"])


def coverage_table(found: list[Topic], records: dict[str, list[dict]]) -> str:
    """What ran where: a row for each record of a topic; what was compiled for other GPUs was not run on them."""
    rows = []
    for topic in found:
        if topic.name not in records:
            rows.append((topic.file, "not recorded yet", "", str(len(topic.techniques)), ""))
        for record in records.get(topic.name, []):
            m = record["machine"]
            own = "sm_{}{}".format(*m["capability"]) if m["gpu"] else None
            where = f"{gpus(m)} ({own})" if own else f"{m['cpu']}, {m['cores']} cores"
            versions = [f"torch {m['torch']}"]
            versions += [f"torch_xla {m['torch_xla']}"] if m.get("torch_xla") else []
            versions += [f"Triton {m['triton']}"] if m.get("triton") and not m.get("torch_xla") else []
            passed = [example for example in record["examples"] if example["status"] == "passed"]
            kernels = [kernel for example in passed for kernel in example["codegen"]]
            code = {kernel["sm"] for kernel in kernels if not kernel["error"] and not kernel.get("too_much")}
            compiled = ", ".join(f"sm_{sm}" for sm in sorted(code) if f"sm_{sm}" != own)
            count = f"{len(passed)} of {len(topic.techniques)}"
            rows.append((topic.file, where, ", ".join(versions), count, compiled))
    return markdown_table("topic | ran on | with | techniques | compiled, not run", rows)


def results_tables(paths: list[Path], study: bool = False) -> str:
    """All cases of recorded topics, or of their studies, a table a topic, for a file in docs/.

    Whole calls on a GPU, whose ratios are the host's too, have a table of their own, with every row.
    """
    parts = []
    for path in paths:
        record = as_run(load(path))
        m = record["machine"]
        if "ceilings" not in m:  # of compile_inspect, which has no table of times
            continue
        power = f", {m['power_limit_w']:.0f} W limit" if m.get("power_limit_w") else ""
        ceilings = newest_ceilings(record)
        limits = [f"copy {ceilings['copy_tbps']:.2f} TB/s"] if ceilings["copy_tbps"] else []
        limits += [f"cuBLAS {dtype} {rate:.0f} TFLOP/s" for dtype, rate in ceilings["gemm_tflops"].items()]
        measured = f"; measured ceilings: {', '.join(limits)}" if limits else ""
        versions = f"Triton {m['triton']}" if m["gpu"] else f"{m['cores']} cores"
        versions = f"torch_xla {m['torch_xla']}, {versions}" if m.get("torch_xla") else versions
        commit = (record["commit"] or "unknown")[:12]
        parts.append(
            f"**{record['topic']}** on {gpus(m) or m['cpu']}{power}, torch {m['torch']}, {versions}{measured} "
            f"([record](../results/{path.parent.name}/{path.name}), commit `{commit}`)\n"
        )
        held = [(each["name"], each.get("study") if study else each) for each in record["examples"]]
        tables = [(name, table) for name, part in held if part for table in tables_of(part) if table.timed]
        kernels = [(name, table) for name, table in tables if not of_calls(table)]
        of_kernels = _study_lines(kernels) if study else _kernel_lines(kernels, ceilings)
        of_host = _call_lines([(name, table) for name, table in tables if of_calls(table)])
        parts += [f"{table}\n" for table in (of_kernels, of_host) if table]
        if study:  # of one that ended early there are the tables before
            parts += [f"{name}, {part['status']}: {part['reason']}\n" for name, part in held if part and _failed(part)]
    return "\n".join(parts).rstrip()


def _failed(part: dict) -> bool:
    return part["status"] == "failed"


def newest_ceilings(record: dict) -> dict:
    """The measured ceilings, the newest of each: a run measures only those that its own tables need."""
    copy, gemm = None, {}
    for example in sorted(record["examples"], key=lambda each: each.get("when", "")):
        held = example["machine"].get("ceilings") or {}
        copy, gemm = held.get("copy_tbps") or copy, gemm | held.get("gemm_tflops", {})
    return {"copy_tbps": copy, "gemm_tflops": dict(sorted(gemm.items()))}


def _kernel_lines(tables: list[tuple[str, Table]], ceilings: dict) -> str:
    rows = []
    for name, table in tables:
        for row in told_rows(table):
            ceiling = f"{row.of_ceiling:.1%}" if row.of_ceiling else ""
            versus = "; ".join(f"{_ratio(table, row, each)} {each.variant}" for each in beside(table, row))
            best = table.best if row.ours else row
            faster = f"{best.variant}: {row.ms / best.ms:.2f}x" if best.ms * FASTER < row.ms else ""
            cells = (row.variant, f"{row.ms:.4g}", _nearer_rate(row, ceilings), ceiling, versus, faster)
            rows.append((label(name, table.title), table.case, *cells))
    heads = "technique | case | variant | ms: | rate: | % of ceiling: | times as fast as | faster here"
    return markdown_table(heads, rows)


def _study_lines(tables: list[tuple[str, Table]]) -> str:
    rows = []
    for name, table in tables:
        base = table[table.baseline]
        ratios = "; ".join(f"{_ratio(table, row, base)} {row.variant}" for row in table.rows if row is not base)
        rows.append((label(name, table.title), table.case, base.variant, f"{base.ms:.4g}", ratios))
    return markdown_table("study of | case | baseline | ms: | times as fast", rows)


def _call_lines(tables: list[tuple[str, Table]]) -> str:
    rows = []
    for name, table in tables:
        base = table[table.baseline]
        for row in [base, *(each for each in table.rows if each is not base)]:
            times = (f"{row.ms:.4g}", f"{row.gpu_ms:.4g}", f"{row.enqueue_us:.0f}")
            ratios = ["" if row is base else _ratio(table, row, base, host=host) for host in (1, 2)]
            rows.append((label(name, table.title), table.case, row.variant, *times, *ratios))
    heads = "whole calls | case | variant | ms: | GPU ms: | host us: | times as fast as the first | host twice as fast"
    return markdown_table(heads, rows)


def _ratio(table: Table, row: Row, other: Row, host: float = 1) -> str:
    """How many times as fast as the other a row is: bold where it loses, and with ? where its times are uneven."""
    over = table.over(other.variant, row.variant, host)
    text = f"{over:.2f}x" + "?" * bool(noise(table, row))
    return f"**{text}**" if round(over, 2) < 1 else text


def _nearer_rate(row: Row, ceilings: dict) -> str:
    """The rate of a row that is nearer to its ceiling: of matrices of one column that is the memory's; or none."""
    moving, computing = row.tbps or 0.0, row.tflops or 0.0
    fastest = max(ceilings["gemm_tflops"].values(), default=0.0)
    memory = moving / ceilings["copy_tbps"] if ceilings["copy_tbps"] else 1.0
    if computing and (not fastest or computing / fastest >= memory):
        return f"{computing:.0f} TFLOP/s" if computing >= 1 else f"{1000 * computing:.0f} GFLOP/s"
    return f"{moving:.2f} TB/s" if moving >= 0.01 else f"{1000 * moving:.1f} GB/s" if moving else ""


def label(technique: str, title: str) -> str:
    """How a table is called among those of other techniques: by its title, which may or may not name its own."""
    return title if title.startswith(technique) else f"{technique}: {title}"


DOCUMENTS = {  # each generated part, in the document that has its markers
    "README.md": ("techniques", "elsewhere"),
    "docs/chapter.md": ("chapter",),
    "docs/running.md": ("coverage", "versions"),
    "docs/compile_inspect.md": ("phases",),
    "docs/triton_compiler.md": ("benchmark",),
    "docs/results.md": ("results", "results on a CPU"),
    "docs/results-studies.md": ("studies", "studies on a CPU"),
}
_START, _END = "<!-- {}: python -m companion readme -->", "<!-- end of {} -->"


def documents(root: Path = ROOT) -> dict[Path, tuple[str, str]]:
    """README.md and docs/: what each is, and what it is with its generated parts renewed.

    Raises ValueError when a marker is missing.
    """
    found = sorted(topics(root), key=lambda topic: any(t.needs.xla for t in topic.techniques))  # as README tells them
    machines = sorted({path.parent.name for path in (root / "results").glob("*/*.json")} - {*REFERENCES})
    ran, other_machines = {}, {}  # of each topic, the references first
    for path in (path for machine in (*REFERENCES, *machines) for path in (root / "results" / machine).glob("*.json")):
        ran.setdefault((record := as_run(load(path)))["topic"], []).append(record)
        if not other_triton(path.parent.name):
            other_machines.setdefault(record["topic"], []).append(record)
    records = {topic: of_topic[0] for topic, of_topic in ran.items()}
    on_cpu, on_gpus = ([p for p in reference_files(root) if (p.parent.name == "cpu") == cpu] for cpu in (True, False))
    parts = {
        "techniques": techniques_table(found, records, root),
        "elsewhere": elsewhere_table(found, other_machines, root),
        "chapter": chapter_table(found, (root / OUTLINE).read_text(encoding="utf-8")),
        "coverage": coverage_table(found, ran),
        "versions": versions_table(root),
        "phases": parts_table("The bundled `decoder`", "phase", ran.get("compile_inspect", []), root),
        "benchmark": parts_table("The benchmark", "part", ran.get("triton_compiler", []), root),
        "results": results_tables(on_gpus),
        "results on a CPU": results_tables(on_cpu),
        "studies": results_tables(on_gpus, study=True),
        "studies on a CPU": results_tables(on_cpu, study=True),
    }
    texts = {}
    for name, names in DOCUMENTS.items():
        path = root / name
        old = path.read_text(encoding="utf-8")
        texts[path] = (old, renewed(old, {part: parts[part] for part in names}, name))
    return texts


def renewed(text: str, parts: dict[str, str], where: str) -> str:
    """`text` with each part between its markers replaced. Raises ValueError when a marker is missing."""
    for name, body in parts.items():
        start, end = _START.format(name), _END.format(name)
        if start not in text or end not in text:
            raise ValueError(f"{where}: the markers {start} and {end} are missing")
        head, rest = text.split(start, 1)
        text = f"{head}{start}\n{body}\n{end}{rest.split(end, 1)[1]}"
    return text


def readme(check: bool, stale: bool, root: Path = ROOT) -> int:
    """Renew the generated tables, or only say (`check`) whether they are up to date; 1 when they are not."""
    if stale:
        for name in stale_examples(root):
            print(name)
        return 0
    return renew(documents(root), root, check, "the docstrings and results/; run: python -m companion readme")


def renew(texts: dict[Path, tuple[str, str]], root: Path, check: bool, sources: str) -> int:
    """Write files that are (old, new), or only say (`check`) which differ from their `sources`; then 1 where one does.
    The mark of older code is no difference: a change of the code makes no page wrong."""
    status = 0
    for path, (old, new) in texts.items():
        name = path.relative_to(root)
        if not check:
            path.write_text(new, encoding="utf-8")
            print(f"{name}: {'renewed' if old != new else 'unchanged'}")
        elif old.replace(OLDER, "") != new.replace(OLDER, ""):
            print(f"{name} differs from {sources}", file=sys.stderr)
            status = 1
    return status


def stale_examples(root: Path = ROOT) -> list[str]:
    """Each recorded technique whose record is of other code than today's, as `results/h200/x.json: softmax`, with
    `, study` behind it where that is so of the study alone."""
    known = {(topic.name, technique.name): technique for topic in topics(root) for technique in topic.techniques}
    found = []
    for path in sorted((root / "results").glob("*/*.json")):
        record = load(path)
        for example in record["examples"]:
            if technique := known.get((record["topic"], example["name"])):
                parts = stale_parts(technique, example, root)
            else:
                parts = ["lesson"] * part_is_stale(record["topic"], example, root)
            if parts:
                found.append(f"{path.relative_to(root)}: {example['name']}{', study' * ('lesson' not in parts)}")
    return found
