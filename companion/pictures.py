"""Charts drawn as SVG for a page: text stays text, colours are the page's variables, and ids cannot collide.

A series differs from the others by its marker, line or hatch as well as by its colour. What another GPU recorded is
drawn into the same axes: hollow and dashed on lines, diamonds on bars and panels, lanes of its own on a timeline, a
second number on a map.
"""

from __future__ import annotations

import io
import math
import re
from html import escape
from textwrap import fill

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from companion.charts import Chart, short, sizes

# Stand-ins that matplotlib writes into the SVG, and the page's variables that take their places.
COLOURS = {f"#0000{n:02x}": f"var(--c{n})" for n in range(1, 9)} | {"#0000f0": "var(--c0)"}
INK, FAINT, PAPER = "#0100a0", "#0100a1", "#0100a2"
COLOURS |= {INK: "var(--ink)", FAINT: "var(--faint)", PAPER: "var(--paper)"}
LOOKS = (  # colour, marker, line, hatch
    ("#0000f0", "s", "--", "--"), ("#000001", "o", "-", ""), ("#000002", "^", "-.", "////"),
    ("#000003", "v", ":", "\\\\\\\\"), ("#000004", "D", "-", "xxxx"), ("#000005", "P", "--", "----"),
    ("#000006", "X", "-.", "++++"), ("#000007", "<", ":", "||||"), ("#000008", ">", "-", "oooo"),
)  # fmt: skip
WIDTH = 5.0  # inches of 72 units: a phone shows all of it, near its size
STYLE = {
    "svg.fonttype": "none", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "text.color": INK,
    "axes.titlesize": 10, "axes.titlelocation": "left", "hatch.linewidth": 0.6, "legend.frameon": False,
    "legend.fontsize": 9.5, "axes.grid": True, "grid.color": FAINT, "grid.alpha": 0.35, "grid.linewidth": 0.6,
    "axes.axisbelow": True, "lines.linewidth": 1.8, "lines.markersize": 5.5, "legend.handlelength": 2.6,
}  # fmt: skip


def draw(chart: Chart, mine: Chart | None = None, whose: str = "yours") -> str:
    """The chart as an <svg> element; `mine` is the same of another record, drawn beside it and called `whose`."""
    with mpl.rc_context(STYLE | {"svg.hashsalt": f"{chart.title}{chart.sees}"}):
        figure = Figure(figsize=(WIDTH, 2.7))
        # Inches are left beside the axes; a layout engine takes twice as long.
        left, right, handles = KINDS[chart.kind](figure, chart, mine)
        if mine and chart.kind not in ("timeline", "map"):  # whose lanes and cells say so
            handles.append(_key("diamond" if chart.kind in ("bars", "panels") else "hollow", whose))
        across = max(n for n in (1, 2, 3, 4) if n == 1 or _letters(handles, n) < 60)
        rows = -(-len(handles) // across) if len(handles) > 1 or chart.kind in ("map", "panels") else 0
        high = figure.get_figheight() + 0.19 * rows
        figure.set_figheight(high)
        figure.subplots_adjust(left / WIDTH, 0.48 / high, 1 - right / WIDTH, 1 - (0.12 + 0.19 * rows) / high)
        if rows:
            figure.legend(handles=handles, loc="upper left", ncols=across, borderaxespad=0, borderpad=0.1)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True)
    return _inline(out.getvalue(), chart)


def _letters(handles: list, across: int) -> float:
    """How many letters wide a legend of so many columns is."""
    labels = [len(each.get_label()) for each in handles]
    return sum(max(column) + 8.5 for column in np.array_split(labels, across) if len(column))


def _inline(svg: str, chart: Chart) -> str:
    """An SVG file as a part of a page."""
    body = svg[svg.index("<svg") :].replace("xlink:href", "href")
    for needless in (
        r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->", r'<path d="[^"]*" style="fill: none"/>',
        r"</?g\b[^>]*>", r' target="_blank"', r" font-family: [^;\"]*;?", r' transform="rotate\(-0 [^"]*"',
    ):  # fmt: skip
        body = re.sub(needless, "", body, flags=re.S)
    for paint in ("fill", "stroke"):
        body = re.sub(rf'\b{paint}="(#[0-9a-f]{{6}})"', rf'style="{paint}: \1"', body)
    for stand_in, variable in COLOURS.items():
        body = body.replace(stand_in, variable)
    body = re.sub(r"<[^>]*>", lambda tag: _rounded(tag[0]), body)  # not the texts, which hold numbers, too
    body = re.sub(r"\s+", " ", body).replace("> <", "><").replace("<defs></defs>", "").replace(' z "', 'z"')
    body = body.replace('<a href="mark:', '<a aria-hidden="true" tabindex="-1" href="')
    box = re.search(r'viewBox="[^"]*"', body)[0]
    role = "group" if chart.kind == "roof" else "img"  # what holds links must not hide them
    label = escape(f"{chart.title}. {chart.sees}", quote=True)
    return f'<svg {box} role="{role}" aria-label="{label}">{body[body.index(">") + 1 :]}'.strip()


def _rounded(tag: str) -> str:
    """A tag whose coordinates have at most two decimals."""
    return re.sub(r"\d+\.\d{3,}(?![\dx])", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag)


def _key(kind: str, name: str) -> Line2D:
    marker, line = {"hollow": ("o", (0, (3, 2))), "diamond": ("D", "none")}[kind]
    return Line2D([], [], color=INK, marker=marker, linestyle=line, markerfacecolor=PAPER, label=name)


def _levels(chart: Chart, line) -> list[Line2D]:
    """Lines across, each with its name."""
    styles = ((0, (6, 2)), (0, (1, 1.5)), (0, (4, 1, 1, 1)), (0, (2, 2)))
    return [
        line(value, color=INK, linewidth=1, linestyle=styles[i % 4], label=name)
        for i, (name, value) in enumerate(chart.levels.items())
    ]


def _lines(figure: Figure, chart: Chart, mine: Chart | None) -> tuple[float, float, list]:
    axes, handles = figure.subplots(), []
    places = {each.name: each.look for each in chart.series}
    shown = [(series, {}) for series in chart.series]
    hollow = {"markerfacecolor": PAPER, "linestyle": (0, (3, 2)), "linewidth": 1.2}
    shown += [(series, hollow) for series in (mine.series if mine else ()) if series.name in places]
    for series, how in shown:
        colour, marker, line, _ = LOOKS[places[series.name] % len(LOOKS)]
        points = zip(*sorted(series.points.items()), strict=True)
        handles += axes.plot(*points, color=colour, marker=marker, label=series.name, **{"linestyle": line} | how)
    handles = handles[: len(places)] + _levels(chart, axes.axhline)
    xs = sorted({x for series, _ in shown for x in series.points})
    ys = [y for series, _ in shown for y in series.points.values()]
    if chart.log:
        axes.set_xscale("log")
    if len(xs) <= 12:
        ticks, scale = [], math.log if chart.log else float
        inch = (WIDTH - 1.2) / (scale(xs[-1]) - scale(xs[0]) or 1)
        for x in xs:  # whose texts have room
            if not ticks or inch * (scale(x) - scale(ticks[-1])) > 0.085 * len(short(int(x))) + 0.06:
                ticks.append(x)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(int(x)) if chart.log else f"{x:g}"))
    if max(ys) > 50 * min(ys) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    else:
        ends = [f((*ys, *chart.levels.values())) for f in (min, max)]
        axes.set_ylim(0 if 2 * ends[0] < ends[1] else 2 * ends[0] - ends[1], 1.06 * ends[1] - 0.06 * ends[0])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set(xlabel=chart.x, ylabel=chart.y)
    return max(0.75, 0.33 + 0.085 * len(f"{axes.get_ylim()[1]:,.0f}")), 0.25, handles


def _bars(figure: Figure, chart: Chart, mine: Chart | None) -> tuple[float, float, list]:
    axes, handles = figure.subplots(), []
    names = list(dict.fromkeys(name for series in chart.series for name in series.points))
    theirs = [(each.name, name, y) for each in mine.series for name, y in each.points.items()] if mine else []
    found = {frozenset((one, two)): y for one, two, y in theirs}  # of a single case, cases and rows change places
    alone = {two: y for _, two, y in theirs} if mine and len(chart.series) == len(mine.series) == 1 else {}
    high = 0.84 / len(chart.series)
    start, texts = 1.0 if chart.log and chart.levels else 0.0, []  # of ratios on a logarithmic axis

    def told(x: float) -> str:
        return chart.form.format(x) if x >= 0.1 or not chart.log else f"{x:.2g}x"

    for i, series in enumerate(chart.series):
        colour, _, _, hatch = LOOKS[series.look % len(LOOKS)]
        at = [names.index(name) + (i - (len(chart.series) - 1) / 2) * high for name in series.points]
        lengths = [y - start for y in series.points.values()]
        how = {"color": colour, "hatch": hatch, "edgecolor": PAPER, "linewidth": 0, "label": series.name}
        handles.append(axes.barh(at, lengths, 0.9 * high, start, **how))
        for y, (name, x) in zip(at, series.points.items(), strict=True):
            other = found.get(frozenset((series.name, name)), alone.get(name))
            text, end = told(x), max(x, start)
            if other is not None:
                axes.plot(other, y, "D", color=INK, markerfacecolor=PAPER, markersize=4.5)
                text, end = f"{text}, yours {told(other)}", max(end, other)
            texts.append((text, end, y))
    axes.set_yticks(range(len(names)), [fill(name, 22) for name in names])
    axes.set_ylim(len(names) - 0.48, -0.52)  # a bar that the last name lacks has its place, too
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.7 if mine else 0.2)
    if chart.log:
        axes.use_sticky_edges = False  # bars begin within the axes
        axes.set_xscale("log")
        ends = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[1] < 50 * ends[0] else (1,)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    lines = [fill(name, 22).split("\n") for name in names]
    group = max(0.19 * len(chart.series) + 0.1, 0.17 * max(map(len, lines)) + 0.06)
    figure.set_figheight(0.65 + group * len(names))
    left, right = 0.25 + 0.077 * max(len(line) for each in lines for line in each), 0.6 if mine else 0.15
    axes.set_xlabel(chart.x, loc="right" if 0.077 * len(chart.x) > WIDTH - left - right else "center")
    _levels(chart, axes.axvline)  # the axis says what they are
    scale, ends = (math.log if chart.log else float), axes.get_xlim()
    points = 72 * (WIDTH - left - right) / (scale(ends[1]) - scale(ends[0]))
    for text, end, y in texts:
        beside = 5.0
        for level in chart.levels.values():  # a text that a line would cross stands behind it
            ahead = points * (scale(level) - scale(end))
            beside = ahead + 4 if 0 <= ahead < 7 + 5.2 * len(text) else beside
        axes.annotate(text, (end, y), (beside, 0), textcoords="offset points", va="center", fontsize=9)
    return left, right, handles if len(handles) > 1 or mine else []


def _panels(figure: Figure, chart: Chart, mine: Chart | None) -> tuple[float, float, list]:
    """A panel of bars for each series, all of the same names; the first name's are the baseline's."""
    names = list(dict.fromkeys(name for series in chart.series for name in series.points))
    theirs = {series.name: series.points for series in mine.series} if mine else {}
    labels = [fill(name, 18) for name in names]
    panels = figure.subplots(1, len(chart.series), sharey=True, gridspec_kw={"wspace": 0.16})
    for axes, series in zip(panels, chart.series, strict=True):
        other = theirs.get(series.name, {})
        for name, x in series.points.items():
            y = names.index(name)
            colour, _, _, hatch = LOOKS[series.look if y else 0]
            axes.barh(y, x, 0.4 if mine else 0.62, color=colour, hatch=hatch, edgecolor=PAPER, linewidth=0)
            how = {"textcoords": "offset points", "va": "center", "fontsize": 9}
            axes.annotate(chart.form.format(x), (max(x, other.get(name, x)), y), (5, 0), **how)
            if name in other:
                axes.plot(other[name], y, "D", color=INK, markerfacecolor=PAPER, markersize=4.5)
                axes.annotate(f"yours {chart.form.format(other[name])}", (0, y + 0.4), (2, 0), **how)
        axes.set_xlim(0, 2.05 * max(*series.points.values(), *other.values()))
        axes.set_xlabel(fill(series.name, 13), loc="left", fontsize=9)
        axes.tick_params(length=0, labelbottom=False)
        axes.grid(False)
    panels[0].set_yticks(range(len(names)), labels)
    panels[0].set_ylim(len(names) - 0.3 if mine else len(names) - 0.48, -0.52)
    lines = [label.split("\n") for label in labels]
    figure.set_figheight(0.65 + (0.5 if mine else max(0.3, 0.17 * max(map(len, lines)) + 0.06)) * len(names))
    return 0.25 + 0.077 * max(len(line) for each in lines for line in each), 0.1, []


def _timeline(figure: Figure, chart: Chart, mine: Chart | None) -> tuple[float, float, list]:
    """A lane for each name, a bar for each [start, end]; waiting is thinner."""
    axes = figure.subplots()
    shown = [(each, "") for each in chart.series] + [(each, ", yours") for each in (mine.series if mine else ())]
    lanes = list(dict.fromkeys(name + whose for series, whose in shown for name in series.points))
    handles = []
    for series, whose in shown:
        colour, _, _, hatch = LOOKS[series.look % len(LOOKS)]
        high = 0.7 if series.look else 0.3
        how = {"facecolor": colour, "hatch": hatch, "edgecolor": PAPER, "linewidth": 0.5}
        if len(chart.series) == 1:
            how |= {"edgecolor": colour, "linewidth": 0.4}  # or the shortest could not be seen
        handles += [] if whose else [Patch(**how, label=series.name)]
        for name, spans in series.points.items():
            starts, ends = zip(*spans, strict=True)
            lengths = [end - start for start, end in spans]
            axes.barh([lanes.index(name + whose)] * len(ends), lengths, high, starts, **how)
    names = [fill(lane, 20) for lane in lanes]
    axes.set_yticks(range(len(lanes)), names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    axes.set(xlabel=chart.x)
    lines = [name.split("\n") for name in names]
    figure.set_figheight(0.65 + max(0.42, 0.17 * max(map(len, lines)) + 0.08) * len(lanes))
    latest = max(end for series, _ in shown for spans in series.points.values() for _, end in spans)
    right = 0.15 + 0.077 * len(f"{latest:,.0f}") / 2  # half of the last number, should it stand at the end
    return 0.25 + 0.077 * max(len(line) for each in lines for line in each), right, handles


def _map(figure: Figure, chart: Chart, mine: Chart | None) -> tuple[float, float, list]:
    """A cell for each "rows x columns" with its number, darker where that is larger, and its series' border."""
    axes, handles = figure.subplots(), []
    values = [value for series in chart.series for value in series.points.values()]
    theirs = {case: value for series in (mine.series if mine else ()) for case, value in series.points.items()}
    rows, columns = (sorted({sizes(case)[i] for series in chart.series for case in series.points}) for i in (0, 1))
    low, wide = min(values), max(values) - min(values) or 1
    for series in chart.series:
        border = ((INK, 2.4, "-"), (FAINT, 0.8, "-"), (INK, 1.2, "--"))[series.look % 3]
        border = dict(zip(("edgecolor", "linewidth", "linestyle"), border, strict=True))
        handles.append(Patch(**border, fill=False, label=series.name))
        for case, value in series.points.items():
            y, x = (each.index(n) for each, n in zip((rows, columns), sizes(case), strict=True))
            shade = to_rgba(LOOKS[1][0], 0.06 + 0.42 * (value - low) / wide)
            axes.add_patch(Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, facecolor=shade, **border))
            text = chart.form.format(value)
            text += f"\nyours {chart.form.format(theirs[case])}" if case in theirs else ""
            axes.text(x, y, text, ha="center", va="center", fontsize=9)
    axes.set_xticks(range(len(columns)), [f"{n:,}" for n in columns])
    axes.set_yticks(range(len(rows)), [f"{n:,}" for n in rows])
    axes.set(xlabel=chart.x, ylabel=chart.y, xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
    axes.invert_yaxis()
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.set_figheight(0.65 + (0.5 if theirs else 0.38) * len(rows))
    return 0.75, 0.15, handles


def _roof(figure: Figure, chart: Chart, mine: Chart | None) -> tuple[float, float, list]:
    """Products at their FLOPs a byte below the roofs; below that, what only moves bytes. Names lead to techniques."""
    (multiply, move), roofs = (series.points for series in chart.series), dict(chart.levels)
    other = [series.points for series in mine.series] if mine else [{}, {}]
    copy, handles, dot = roofs.pop("copy"), [], {"marker": "o", "color": LOOKS[1][0], "linestyle": "none"}
    high = [0.5 + max(2.6, 0.19 * len(multiply))] * bool(multiply) + [0.2 + 0.2 * len(move)] * bool(move)
    figure.set_figheight(sum(high) + 0.9)
    left, right = (0.3 + 0.077 * max(map(len, names), default=0) for names in (move, multiply))
    sides = [(0.8, right)] * bool(multiply) + [(left, 0.25)] * bool(move)  # inches, of each panel
    grids = [figure.add_gridspec(len(high), 1, hspace=0.4, height_ratios=high) for _ in high]
    for grid, (before, after) in zip(grids, sides, strict=True):
        grid.update(left=before / WIDTH, right=1 - after / WIDTH)
    panels = [figure.add_subplot(grid[i]) for i, grid in enumerate(grids)]
    if multiply:
        axes, xs, bottom = panels.pop(0), [x for x, _ in multiply.values()], min(y for _, y in multiply.values()) / 2
        roofs = {name: rate for name, rate in roofs.items() if rate > bottom}
        edges = [rate / copy for rate in roofs.values()]
        first, last = min([*xs, *edges]) / 2, 2 * max([*xs, *edges])
        for (name, rate), line in zip(roofs.items(), ("-", "--", ":", "-.", (0, (5, 1))), strict=False):
            label, roof = f"{name} {rate:.0f} TFLOP/s", [min(rate, first * copy), rate, rate]
            handles += axes.plot([first, rate / copy, last], roof, color=INK, lw=1.1, linestyle=line, label=label)
        for name, (x, y) in multiply.items():
            axes.plot(x, y, url=f"mark:#{name}", **dot)
        for x, y in other[0].values():
            axes.plot(x, y, markerfacecolor=PAPER, **dot)
        axes.set(xscale="log", yscale="log", xlabel=chart.x, ylabel=chart.y)
        axes.set_ylim(bottom=bottom)
        _name_at_the_right(axes, multiply)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
            axis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(LogLocator(numticks=4))
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if roofs and max(roofs.values()) < 100 * bottom else (1,))
        )
    if move:
        axes, names = panels.pop(0), sorted(move, key=move.get)
        axes.hlines(range(len(names)), 0, [move[name] for name in names], color=FAINT, linewidth=1)
        for i, name in enumerate(names):
            axes.plot(move[name], i, url=f"mark:#{name}", **dot)
            if name in other[1]:
                axes.plot(other[1][name], i, markerfacecolor=PAPER, **dot)
        label = f"copy {copy:.2f} TB/s"
        handles.append(axes.axvline(copy, color=INK, linewidth=1, linestyle=(0, (1, 1.5)), label=label))
        axes.set_yticks(range(len(names)), names)
        for name, label in zip(names, axes.get_yticklabels(), strict=True):
            label.set_url(f"#{name}")
        axes.set(xlabel="TB/s", xlim=(0, 1.08 * max(copy, *move.values(), *other[1].values())))
        axes.margins(y=0.6 / len(names))
    return *sides[0], handles


KINDS = {"lines": _lines, "bars": _bars, "roof": _roof, "timeline": _timeline, "map": _map, "panels": _panels}


def _name_at_the_right(axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Names in a column, in the order of their points' heights, none above another, each with a line to its point."""
    (low, top), apart = axes.get_ylim(), 0.98 / max(len(points), 13)
    names = sorted(points, key=lambda name: points[name][1])
    heights, at, limit = [], -1.0, 1.0
    for name in names:
        heights.append(at := max(at + apart, math.log(points[name][1] / low) / math.log(top / low)))
    for i in reversed(range(len(names))):
        heights[i] = limit = min(limit, heights[i])
        limit -= apart
    for name, height in zip(names, heights, strict=True):
        axes.annotate(
            name, points[name], (1.03, height), textcoords="axes fraction", va="center", url=f"#{name}",
            arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.7, "shrinkB": 4, "relpos": (0, 0.5)},
        )  # fmt: skip
