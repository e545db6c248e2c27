"""The report as one self-contained page: the verdict, the findings with their fixes, then the phases."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from compile_inspect.report import Block, Finding, Phase, Report, is_number, number

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b636b; --line: #d5dae0; --back: #fff; --box: #f5f7f9;
  --mark: #0b5cad; --bad: #a4262c }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #a9b2bb; --line: #3a4149; --back: #14171a;
  --box: #1d2226; --mark: #7cb7f5; --bad: #ff9ea2 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main, header { max-width: 62rem; margin: 0 auto; padding: 0 1rem; overflow-wrap: anywhere }
header { padding-top: 2rem } h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem } p { margin: .4rem 0; max-width: 75ch } a { color: var(--mark) }
.soft { color: var(--soft) } .bad { color: var(--bad); font-weight: 600 }
.verdict { border-left: 4px solid var(--mark); background: var(--box); padding: .6rem 1rem; margin: 1rem 0 }
.answer { font-weight: 600 } code, pre { font: 13px/1.45 ui-monospace, monospace }
pre, .scroll { overflow: auto; max-height: 32rem; background: var(--box); border: 1px solid var(--line) }
pre { padding: .75rem; margin: .4rem 0 } table { border-collapse: collapse; font-size: .9rem; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
.n { text-align: right } td.n { font-variant-numeric: tabular-nums; white-space: nowrap } caption { text-align: left;
  padding: .3rem .6rem; color: var(--soft) } ol li { margin: .8rem 0 } summary { cursor: pointer; color: var(--mark) }
.bar { display: grid; grid-template-columns: minmax(4rem, 12rem) 1fr 6rem; gap: .5rem; align-items: center }
.bar i { display: block; height: 1rem; background: var(--mark); min-width: 2px } nav ul { padding: 0; list-style: none;
  display: flex; flex-wrap: wrap; gap: .25rem 1rem } :focus-visible { outline: 3px solid var(--mark) }
@media print { pre, .scroll { max-height: none; overflow: visible; white-space: pre-wrap } }
"""


def write_page(report: Report, path: str | Path) -> None:
    """Write the report to `path` as HTML without anything to load. Raises OSError."""
    Path(path).write_text(page(report), encoding="utf-8")


def page(report: Report) -> str:
    title = f"What torch.compile does with {report.model}"
    about = ", ".join(f"{name} {value}" for name, value in report.machine.items() if name != "gpu")
    about += f"; the model {report.shared}" if report.shared else ""
    nav = "".join(
        f'<li><a href="#{p.name}">{p.name}</a>{f" ({escape(p.status)})" * (p.status != "passed")}</li>'
        for p in report.phases
    )
    verdict = "".join(f"<p>{escape(line)}</p>" for line in report.verdict())
    found = "".join(_finding(each) for each in report.findings) or "<li>Nothing to change was found.</li>"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<header><h1>{escape(title)}</h1><p class="soft">{escape(about)}</p></header>
<main><section aria-label="Verdict" class="verdict">{verdict}</section>
<h2 id="findings">What to change, the dearest first</h2><ol>{found}</ol>
<nav aria-label="Phases"><h2>What was looked at</h2><ul>{nav}</ul></nav>
{"".join(_phase(each) for each in report.phases)}</main></body></html>
"""


def _finding(finding: Finding) -> str:
    where = f" <code>{escape(finding.where)}</code>" if finding.where and finding.where not in finding.what else ""
    tried = f"<br>Tried: {escape(finding.tried)}" if finding.tried else ""
    what = re.sub("`(.+)`", r"<code>\1</code>", escape(finding.what))
    said = f"<strong>{what}</strong>{where}: {escape(finding.cost)}"
    return f"<li>{said}<br>Fix: {escape(finding.fix)}{tried}</li>"


def _phase(phase: Phase) -> str:
    parts = [f'<section aria-labelledby="{phase.name}"><h2 id="{phase.name}">{phase.name}</h2>']
    parts.append(f'<p class="soft">{escape(phase.question)} <span>({phase.seconds:g} s)</span></p>')
    if phase.answer:
        parts.append(f'<p class="answer">{escape(phase.answer)}</p>')
    if phase.status != "passed":
        parts.append(f'<p class="bad">{escape(phase.status)}: {escape(phase.reason)}</p>')
    shown = {"table": _table, "code": _code, "bars": _bars, "note": lambda block: f"<p>{escape(block.text)}</p>"}
    return "\n".join([*parts, *(shown[block.kind](block) for block in phase.blocks), "</section>"])


def _table(table: Block) -> str:
    numeric = [[is_number(cell) for cell in row] for row in table.rows]
    right = [any(column) for column in zip(*numeric, strict=True)]

    def row(tag: str, cells: list[str], numbers: list[bool]) -> str:
        held = (f"<{tag}{' class=n' * n}>{escape(cell)}" for cell, n in zip(cells, numbers, strict=True))
        return "<tr>" + "".join(f"{each}</{tag[:2]}>" for each in held) + "</tr>"

    head = row('th scope="col"', table.columns, right)
    body = "".join(row("td", cells, numbers) for cells, numbers in zip(table.cells(), numeric, strict=True))
    inner = f"<table><caption>{escape(table.title)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">{inner}</div>'


def _code(code: Block) -> str:
    title = escape(code.title)
    text = f'<pre tabindex="0" role="region" aria-label="{title}"><code>{escape(code.text)}</code></pre>'
    return f"<details><summary>{title}</summary>{text}</details>" if code.fold else f"<h3>{title}</h3>{text}"


def _bars(bars: Block) -> str:
    most = max(value for _, value in bars.rows) or 1
    rows = "".join(
        f'<div class="bar"><span>{escape(name)}</span><i style="width:{100 * value / most:.1f}%"></i>'
        f"<span>{number(value)} {escape(bars.columns[0])}</span></div>"
        for name, value in bars.rows
    )
    return f"<h3>{escape(bars.title)}</h3>{rows}"
