"""`python -m companion readme`: the tables of README.md and docs/, from the docstrings and the records.

A record made with other code than today's (harness.sources) is marked "older code"; `--stale` lists those. `--check`
says whether the pages are up to date, the mark aside: a change of the code makes no page wrong.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from harness.catalog import ROOT, Technique, Topic, topics
from harness.record import as_run, load
from harness.sources import sources_hash

OLDER = " *(older code)*"
BEYOND = "goes beyond the chapter"


def best_row(table: dict) -> dict | None:
    """The fastest row of a recorded table that is the technique's own; in a table of library calls, of those that are
    put next to the baseline.

    None when no such row was timed, or when the table counts no work: its times are those of launches.
    """
    ours = any(row["ours"] for row in table["rows"])
    if ours:
        rows = [row for row in table["rows"] if row["ours"] and not row["peer"]]
    else:
        rows = [row for row in table["rows"] if row["variant"] != table["baseline"]]
    return _fastest(rows)


def _fastest(rows: list[dict]) -> dict | None:
    rows = [row for row in rows if row["ms"] is not None and (row["tbps"] or row["tflops"])]
    return min(rows, key=lambda row: row["ms"], default=None)


def _beside(table: dict, best: dict) -> list[dict]:
    """The rows a best row is put next to: the library's, or in a table of library calls the baseline."""
    if best["ours"]:
        return [row for row in table["rows"] if not row["ours"]]
    return [row for row in table["rows"] if row["variant"] == table["baseline"]]


# --- README -----------------------------------------------------------------------------------------------------


def techniques_table(found: list[Topic], records: dict[str, dict], root: Path = ROOT) -> str:
    """README's map: a table for each topic, a row per technique, from the docstrings and what `records` say of it."""
    lines = []
    for topic in found:
        record = records.get(topic.name)
        recorded = {example["name"]: example for example in record["examples"]} if record else {}
        where = f", recorded on {machine_name(record['machine'])}" if record else ""
        lines += [f"\n### `{topic.file}`{where}\n"] if lines else [f"### `{topic.file}`{where}\n"]
        lines += ["| technique | the question it answers | answer | run |", "| --- | --- | --- | --- |"]
        for t in topic.techniques:
            if t.error:
                raise ValueError(t.error)
            python = ".venv-xla/bin/python" if t.needs.xla else "python"
            measured = "not recorded yet"
            if t.name in recorded:
                measured = answer_cell(recorded[t.name]) + (OLDER if is_stale(t, recorded[t.name], root) else "")
            run = f"`{python} {topic.file} {t.name}`"
            lines.append(f"| [{t.name}]({t.file}) | {t.question} | {measured} | {run} |")
    return "\n".join(lines)


def machine_name(machine: dict) -> str:
    """A GPU by its name, a CPU with its cores."""
    return f"an {machine['gpu']}" if machine["gpu"] else f"a CPU ({machine['cores']} cores, {machine['cpu']})"


def is_stale(technique: Technique, example: dict, root: Path = ROOT) -> bool:
    """Whether a recorded lesson, or its study, was made with other code than there is today."""
    parts = [((technique.path,), example)] + ([(technique.studies, example["study"])] if example.get("study") else [])
    return any(
        not files or part["sources"] != sources_hash(files[0], [*files[1:], *(root / p for p in part["peers"])], root)
        for files, part in parts
    )


def answer_cell(example: dict) -> str:
    """A technique's recorded answer, or why there is none."""
    if example["status"] != "passed":
        return f"{example['status']}: {example['reason']}"
    return example["answer"].replace("|", "\\|") if example["answer"] else "recorded before it gave an answer"


def chapter_table(found: list[Topic]) -> str:
    """The chapter's sections and the techniques that each has here, from the `Source` fields."""
    sections: dict[str, list[str]] = {}
    for t in (t for topic in found for t in topic.techniques):
        match = re.search(r'chapter sections? ((?:"[^"]+"|[^".;(])*)', t.source)
        for name in re.findall(r'"([^"]+)"', match[1]) if match else [BEYOND]:
            sections.setdefault(name, []).append(f"[{t.name}](../{t.file})")
    rows = sorted(sections.items(), key=lambda item: item[0] == BEYOND)
    return "\n".join(["| section | techniques |", "| --- | --- |", *(f"| {n} | {', '.join(t)} |" for n, t in rows)])


def coverage_table(found: list[Topic], records: dict[str, dict]) -> str:
    """What ran where: one row per topic, from its record; what was compiled for other GPUs was not run on them."""
    lines = ["| topic | ran on | with | techniques | compiled, not run |", "| --- | --- | --- | --- | --- |"]
    for topic in found:
        record = records.get(topic.name)
        if record is None:
            lines.append(f"| {topic.file} | not recorded yet | | {len(topic.techniques)} | |")
            continue
        m = record["machine"]
        own = "sm_{}{}".format(*m["capability"]) if m["gpu"] else None
        where = f"{m['gpu']} ({own})" if own else f"{m['cpu']}, {m['cores']} cores"
        versions = [f"torch {m['torch']}"]
        versions += [f"torch_xla {m['torch_xla']}"] if m.get("torch_xla") else [f"Triton {m['triton']}"]
        passed = [example for example in record["examples"] if example["status"] == "passed"]
        code = {k["sm"] for example in passed for k in example["codegen"] if not k["error"] and not k.get("too_much")}
        compiled = ", ".join(f"sm_{sm}" for sm in sorted(code) if f"sm_{sm}" != own)
        count = f"{len(passed)} of {len(topic.techniques)}"
        lines.append(f"| {topic.file} | {where} | {', '.join(versions)} | {count} | {compiled} |")
    return "\n".join(lines)


def results_tables(folder: Path) -> str:
    """All cases of the recorded topics of one machine, a table for each topic, for a file in docs/."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        record = as_run(load(path))
        m = record["machine"]
        power = f", {m['power_limit_w']:.0f} W limit" if m.get("power_limit_w") else ""
        limits = [f"copy {m['ceilings']['copy_tbps']:.2f} TB/s"] if m["ceilings"]["copy_tbps"] else []
        limits += [f"cuBLAS {dtype} {rate:.0f} TFLOP/s" for dtype, rate in m["ceilings"]["gemm_tflops"].items()]
        measured = f"; measured ceilings: {', '.join(limits)}" if limits else ""
        beside = f"Triton {m['triton']}" if m["gpu"] else f"torch_xla {m['torch_xla']}, {m['cores']} cores"
        commit = (record["commit"] or "unknown")[:12]
        parts.append(
            f"**{record['topic']}** on {m['gpu'] or m['cpu']}{power}, torch {m['torch']}, {beside}{measured} "
            f"([record](../results/{folder.name}/{path.name}), commit `{commit}`)\n"
        )
        lines = [
            "| technique | case | variant | ms | rate | % of ceiling | speed-up |",
            "| --- | --- | --- | ---: | ---: | ---: | --- |",
        ]
        for example in record["examples"]:
            for table in example["tables"]:
                if best := best_row(table):
                    rate = _nearer_rate(best, m["ceilings"])
                    ceiling = f"{best['of_ceiling']:.1%}" if best["of_ceiling"] else ""
                    # Of this repository's other kernels the fastest is enough: there may be many.
                    other = _fastest([row for row in table["rows"] if row["peer"]])
                    beside = [*_beside(table, best), *([other] if other else [])]
                    others = [(row, best["speedup"] / row["speedup"]) for row in beside]
                    versus = ", ".join(f"{ratio:.2f}x {row['variant']}" for row, ratio in others)
                    name, case, variant = label(example["name"], table["title"]), table["case"], best["variant"]
                    lines.append(f"| {name} | {case} | {variant} | {best['ms']:.3f} | {rate} | {ceiling} | {versus} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts).rstrip()


def _nearer_rate(row: dict, ceilings: dict) -> str:
    """The rate of a row that is nearer to its ceiling: of matrices of one column that is the memory's."""
    moving, computing = row["tbps"] or 0.0, row["tflops"] or 0.0
    fastest = max(ceilings["gemm_tflops"].values(), default=0.0)
    memory = moving / ceilings["copy_tbps"] if ceilings["copy_tbps"] else 1.0
    if computing and (not fastest or computing / fastest >= memory):
        return f"{computing:.0f} TFLOP/s" if computing >= 1 else f"{1000 * computing:.0f} GFLOP/s"
    return f"{moving:.2f} TB/s" if moving else f"{computing:.0f} TFLOP/s"


def label(technique: str, title: str) -> str:
    """How a table is called among those of other techniques: by its title, which may or may not name its own."""
    return title if title.startswith(technique) else f"{technique}: {title}"


DOCUMENTS = {  # each generated part, in the document that has its markers
    "README.md": ("techniques",),
    "docs/chapter.md": ("chapter",),
    "docs/running.md": ("coverage",),
    "docs/results.md": ("results", "results on a CPU"),
}
_START, _END = "<!-- {}: python -m companion readme -->", "<!-- end of {} -->"


def documents(root: Path = ROOT) -> dict[Path, tuple[str, str]]:
    """README.md and docs/: what each is, and what it is with its generated parts renewed.

    Raises ValueError when a marker is missing.
    """
    found = sorted(topics(root), key=lambda topic: any(t.needs.xla for t in topic.techniques))  # as README tells them
    machines = ("cpu", "h200")  # the GPU's record of a topic counts where there are both
    paths = (path for machine in machines for path in sorted((root / "results" / machine).glob("*.json")))
    records = {record["topic"]: record for record in (as_run(load(path)) for path in paths)}
    parts = {
        "techniques": techniques_table(found, records, root),
        "chapter": chapter_table(found),
        "coverage": coverage_table(found, records),
        "results": results_tables(root / "results" / "h200"),
        "results on a CPU": results_tables(root / "results" / "cpu"),
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


def readme(check: bool, stale: bool) -> int:
    """Renew the generated tables, or only say (`check`) whether they are up to date; 1 when they are not."""
    if stale:
        for name in stale_examples():
            print(name)
        return 0
    texts = documents()
    differing = [path for path, (old, new) in texts.items() if old.replace(OLDER, "") != new.replace(OLDER, "")]
    for path, (old, new) in texts.items():
        name = path.relative_to(ROOT)
        if check and path in differing:
            print(f"{name} differs from the docstrings and results/; run: python -m companion readme", file=sys.stderr)
        elif not check:
            if old != new:
                path.write_text(new, encoding="utf-8")
            print(f"{name}: {'renewed' if old != new else 'unchanged'}")
    return int(check and bool(differing))


def stale_examples(root: Path = ROOT) -> list[str]:
    """Each recorded technique whose record is of other code than today's, as `results/h200/x.json: softmax`."""
    known = {(topic.name, technique.name): technique for topic in topics(root) for technique in topic.techniques}
    found = []
    for path in sorted((root / "results").glob("*/*.json")):
        record = load(path)
        for example in record["examples"]:
            technique = known.get((record["topic"], example["name"]))
            if technique is None or is_stale(technique, example, root):
                found.append(f"{path.relative_to(root)}: {example['name']}")
    return found
