"""The report as one self-contained page: the verdict, the findings with their fixes, then the phases."""

from compile_inspect.report import Report

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b636b; --line: #d5dae0; --back: #fff; --box: #f5f7f9;
  --mark: #0b5cad; --bad: #a4262c }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #a9b2bb; --line: #3a4149; --back: #14171a;
  --box: #1d2226; --mark: #7cb7f5; --bad: #ff9ea2 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem } p { margin: .4rem 0; max-width: 75ch }
a, summary { color: var(--mark) } .soft, caption { color: var(--soft) } .bad { color: var(--bad) }
.verdict { border-left: 4px solid var(--mark); background: var(--box); padding: .6rem 1rem; margin: 1rem 0 }
.answer, .bad { font-weight: 600 } pre { font: 13px/1.45 ui-monospace, monospace; padding: .75rem }
pre, .scroll { overflow: auto; max-height: 32rem; background: var(--box); border: 1px solid var(--line) }
table { border-collapse: collapse; font-size: .9rem; width: 100% }
caption, th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line) }
th.n, td.n { text-align: right; white-space: nowrap }
ol li { margin: .8rem 0 } nav li { display: inline; margin-right: 1rem } nav ul { padding: 0 }
:focus-visible { outline: 3px solid var(--mark) }
@media print { pre, .scroll { max-height: none; overflow: visible; white-space: pre-wrap } }
"""

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>{{ style }}</style></head><body>
<header><h1>{{ title }}</h1><p class="soft">{{ about }}</p></header>
<main><section aria-label="Verdict" class="verdict">
{% for line in report.verdict() %}<p>{{ line }}</p>{% endfor %}</section>
<h2 id="findings">What to change, the dearest first</h2><ol>
{% for each in report.findings %}<li><strong>{{ each.heading }}</strong><br>Fix: {{ each.fix }}
{% if each.tried %}<br>Tried: {{ each.tried }}{% endif %}</li>
{% else %}<li>Nothing to change was found.</li>{% endfor %}</ol>
<nav aria-label="Phases"><h2>What was looked at</h2><ul>{% for phase in report.phases %}
<li><a href="#{{ phase.name }}">{{ phase.name }}</a> {{ phase.status if phase.status != "passed" }}</li>
{% endfor %}</ul></nav>
{% for phase in report.phases %}
<section aria-labelledby="{{ phase.name }}"><h2 id="{{ phase.name }}">{{ phase.name }}</h2>
<p class="soft">{{ phase.question }} ({{ phase.seconds }} s)</p><p class="answer">{{ phase.answer }}</p>
{% if phase.status != "passed" %}<p class="bad">{{ phase.status }}: {{ phase.reason }}</p>{% endif %}
{% for block in phase.blocks %}
{% if block.kind == "note" %}<p>{{ block.text }}</p>
{% elif block.kind == "code" %}<details{{ "" if block.fold else " open" }}><summary>{{ block.title }}</summary>
<pre tabindex="0" role="region" aria-label="{{ block.title }}"><code>{{ block.text }}</code></pre></details>
{% else %}{% set right = block.numeric() %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ block.title }}">
<table><caption>{{ block.title }}</caption><thead><tr>{% for name in block.columns %}
<th scope="col"{{ " class=n" if right[loop.index0] }}>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in block.cells() %}
<tr>{% for cell in row %}<td{{ " class=n" if right[loop.index0] }}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% endfor %}</section>{% endfor %}</main></body></html>
"""


def page(report: Report) -> str:
    """The report as HTML that loads nothing."""
    from jinja2 import Environment  # which torch requires

    about = ", ".join(f"{name} {value}" for name, value in report.machine.items() if name != "gpu")
    about += f"; the model {report.shared}" if report.shared else ""
    title, template = f"What torch.compile does with {report.model}", Environment(autoescape=True).from_string(TEMPLATE)
    return template.render(report=report, title=title, about=about, style=STYLE)
