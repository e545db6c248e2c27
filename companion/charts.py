"""The pictures of the page: what each shows, read from a record. companion/pictures.py draws them.

A chart is numbers and a sentence that is made of them; nothing here is typed from a measurement. Where a record lacks
what a chart needs there is no picture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import cycle, islice, pairwise
from typing import NamedTuple

from harness.bench import Table

from companion.readme import tables_of, told_rows

DRAWN = "event by event"  # ends the name of a fact that is drawn, and is no table of the page


class Series(NamedTuple):
    """`points` are y by x: a number on lines, a name on bars; on a map a number by "batch x tokens"; on a timeline
    [start, end] pairs by lane. `look` is one of LOOKS, the same on every picture: 0 the baseline, 1 what this
    repository answers with, 2 and 3 libraries; on a timeline 0 is waiting."""

    name: str
    points: dict
    look: int


class Chart(NamedTuple):
    """What a picture shows: lines, horizontal bars, a roofline, a timeline, a map, or panels: bars of several measures
    of the same names, whose first is what the others are put beside. `levels` are lines across, by their names."""

    kind: str
    title: str
    x: str
    y: str
    series: list[Series]
    sees: str
    levels: dict[str, float] = {}
    log: bool = False
    form: str = "{:.2f}x"


# --- what the charts of several techniques read


def timed(part: dict | None, title: str | None = None) -> list[Table]:
    return [table for table in tables_of(part or {"tables": []}) if table.timed and title in (None, table.title)]


def looks(tables: list[Table]) -> dict[str, int]:
    """The rows of tables of one baseline, each with its look."""
    rows = {row.variant: row for table in tables for row in table.rows}
    own = [name for name, row in rows.items() if row.ours and not row.peer]
    told = next((told_rows(table)[0].variant for table in tables), None)
    own.sort(key=lambda name: name != told)
    rest = [name for name in rows if name not in own and name != tables[0].baseline]
    ours, theirs = (1, 4, 5, 6, 7, 8), (2, 3, 7, 8, 5, 6)
    if not own or tables[0].baseline in own:
        theirs = range(1, 9)
    found = dict(zip([*own, *rest], [*islice(cycle(ours), len(own)), *islice(cycle(theirs), len(rest))], strict=True))
    return {tables[0].baseline: 0} | found


def sizes(case: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", case.split()[0])]


def speedups(part: dict, title: str | None = None, heading: str = "", only: str = "", base: str = "") -> Chart | None:
    """How many times as fast as its baseline, or `base`, each row of the first table is, in all its cases, or in `only`
    some."""
    tables = [table for table in timed(part, title) if only in table.case]
    tables = [t for t in tables if (t.title, t.baseline) == (tables[0].title, tables[0].baseline) and len(t.rows) > 1]
    if not tables:
        return None
    base, cases = base or tables[0].baseline, [table.case for table in tables]
    rows = {name: look for name, look in looks(tables).items() if name != base}
    over = {name: {t.case: t.over(base, name) for t in tables if name in t} for name in rows}
    if len(cases) == 1:
        series = [Series(cases[0], {name: over[name][cases[0]] for name in rows}, 1)]
    elif len(rows) > max(3, len(cases)):
        by_case = {case: {name: over[name][case] for name in rows if case in over[name]} for case in cases}
        series = one_each(by_case)[:8]
    else:
        series = [Series(name, over[name], rows[name]) for name in rows]
    every = [value for points in over.values() for value in points.values()]
    title = heading or f"Times as fast as {base}" + (f", {cases[0]}" if len(cases) == 1 else "")
    told = told_rows(tables[0])
    sees, log = outcome(base, over, told[0].variant if len(told) == 1 else None), max(every) > 20 * min(every)
    return Chart("bars", title, f"times as fast as {base}", "", series, sees, {base: 1.0}, log)


def outcome(base: str, over: dict[str, dict[str, float]], told: str | None) -> str:
    """What to see in speeds over `base`, by row and case: where the told row wins, and what is faster than it. Without
    a told row it is the fastest of those with the most cases."""
    told = told or max(over, key=lambda name: (len(over[name]), math.prod(over[name].values())))
    gains = over[told]
    wins, range_ = sum(gain > 1 for gain in gains.values()), (min(gains.values()), max(gains.values()))
    sees = f"{told} is {' to '.join(dict.fromkeys(f'{gain:.2f}' for gain in range_))}x as fast as {base}"
    sees += f", ahead of it in {wins} of {len(gains)} cases" * (0 < wins < len(gains))
    others = [(gain / gains[case], name, case) for name in over for case, gain in over[name].items() if case in gains]
    ratio, name, case = max(others)
    where = f" ({case})" if len(gains) > 1 else ""
    if f"{ratio:.2f}" != "1.00":
        sees += f"; {name} is {'up to ' * bool(where)}{ratio:.2f}x as fast as {told}{where}"
    elif len(over) > 1:
        sees += "; no other row is more than 1 % faster" + " in any case" * bool(where)
    return f"{sees}."


def rates(part: dict, titles: tuple[str, ...], axis: str, size: Callable) -> Chart:
    """TB/s, or TFLOP/s of square products, of every variant against a size, of lesson and study, with the ceiling."""
    unit, kind = ("tflops", "TFLOP/s") if size is square else ("tbps", "TB/s")
    tables = [table for each in (part, part.get("study")) for title in titles for table in timed(each, title)]
    held = {size(table): table for table in reversed(tables) if size(table)}  # of two the lesson's
    series = []
    for name, look in looks(list(held.values())).items():
        points = {x: getattr(t[name], unit) for x, t in sorted(held.items()) if name in t and getattr(t[name], unit)}
        series += [Series(name, points, look)] * (len(points) > 1)
    base, told = tables[0].baseline, told_rows(tables[0])[0].variant
    over = [table.over(base, told) for table in held.values() if told in table]
    ceilings = part["machine"]["ceilings"]
    top = ceilings["gemm_tflops"].get("bfloat16") if size is square else ceilings["copy_tbps"]
    low, high = short(min(held)), short(max(held))
    sees = f"From {low} to {high} {told} runs at {min(over):.2f} to {max(over):.2f}x {base}'s speed"
    if top:
        best = max(next(each for each in series if each.name == told).points.values()) / top
        sees += f", and reaches {best:.0%} of the measured ceiling"
    levels = {f"measured ceiling, {top:.3g} {kind}": top} if top else {}
    return Chart("lines", f"{kind} against {axis.split(' (')[0]}", axis, kind, series, f"{sees}.", levels, True)


def columns(table: Table) -> int:
    return sizes(table.case)[-1]


def square(table: Table) -> int | None:
    """The side of a product of square matrices; None of any other."""
    found = sizes(table.case)
    return found[0] if len(found) == 3 and len(set(found)) == 1 else None


def bars(title: str, axis: str, series: list[Series], sees: str, log: bool = False, form: str = "{:,.0f}") -> Chart:
    return Chart("bars", title, axis, "", series, sees, {}, log, form)


def one_each(points: dict[str, dict], first: int = 1) -> list[Series]:
    """A series for each name, with looks from `first` on."""
    return [Series(name, each, look) for look, (name, each) in enumerate(points.items(), first)]


def ends(points: dict) -> tuple:
    """The names of the least and of the greatest."""
    return min(points, key=points.get), max(points, key=points.get)


def noted(part: dict, begins: str) -> tuple[str, dict]:
    """The first fact whose name begins so, with its name."""
    return next((name, rows) for name, rows in part["facts"].items() if name.startswith(begins))


def pairs(numbers: list[float]) -> list[list[float]]:
    """In pairs, of start and end."""
    return [list(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]


def overlap(spans: Iterable, others: Iterable) -> float:
    """For how long one of the others runs beside one of the spans."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in spans for c, d in others)


def _list(names) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def short(n: float) -> str:
    """1024 is 1K and 1048576 is 1M; what is no such number stands as it is."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if n >= unit and len(text := f"{n / unit:g}") <= 4:
            return f"{text}{name}"
    return f"{n:,}"


# --- compiler


def when_it_helps(part: dict) -> Chart:
    told = part["facts"]["predicted from the twin, the work and the rates; measured"]
    bound = {case.rpartition(", ")[0]: cells["bound"] for case, cells in told.items()}
    chart = speedups(part, "when_it_helps", "Speed-up over eager by batch x tokens")
    named = {case: f"{case}, {kind}" for case, kind in bound.items()}
    series = [s._replace(points={named[case]: y for case, y in s.points.items()}) for s in chart.series]
    best = {
        kind: max(y for s in chart.series for c, y in s.points.items() if bound[c] == kind) for kind in bound.values()
    }
    sees = "; ".join(f"where a call is {kind}, compiling gives up to {most:.2f}x" for kind, most in best.items())
    return chart._replace(series=series, sees=sees[0].upper() + sees[1:] + ".")


def speed_up_map(part: dict) -> Chart:
    cells = part["study"]["facts"]["eager against compiled by batch x tokens"]
    looks, gains = {"launch-bound": 0, "compute-bound": 1, "bandwidth-bound": 2}, {}
    for case, cell in cells.items():
        gains.setdefault(cell["bound"], {})[case.split()[0]] = cell["x eager"]
    said = []
    for bound, each in gains.items():
        few, many = (f(math.prod(sizes(case)) for case in each) for f in (min, max))
        least, most = ends(each)
        tokens = short(few) + f" to {short(many)}" * (few < many)
        speeds = f"{each[least]:.2f}x ({least})" + f" to {each[most]:.2f}x ({most})" * (len(each) > 1)
        said.append(f"{bound} ({tokens} tokens a call): compiled {speeds} eager")
    series = [Series(bound, each, looks[bound]) for bound, each in gains.items()]
    sees = "; ".join(said)
    sees = f"{sees[0].upper()}{sees[1:]}. A thick border is launch-bound: eager's host takes longer than its GPU."
    return Chart("map", "Default mode over eager, by batch and tokens", "tokens", "batch", series, sees)


def launch_gaps(part: dict) -> Chart:
    _, rows = noted(part["study"], "consecutive kernels of a call")
    lanes, said = {}, []
    for name, each in part["study"]["facts"][f"start and duration of kernels in us, {DRAWN}"].items():
        row = rows[name]
        several = row["kernels"] > 1
        lane = f"{name}: gaps {row['gaps %']:.0f}% of the time" if several else f"{name}: one kernel a call"
        lanes[lane] = [[start, round(start + took, 2)] for start, took in pairs(each)]
        if several:
            said.append(f"{name} runs {row['running us']:.0f} us and waits {row['gaps us']:.0f} us")
    (one, first), (other, second) = list(rows.items())[:2]
    closed = 1 - second["gaps us"] / first["gaps us"]
    change = f"has {closed:.0%} less" if closed > 0 else f"has {-closed:.0%} more"
    seen, alone = first["us a call, profiled"], first["us a call"]
    longer = ": gaps are shorter than drawn" if seen > 1.02 * alone else ""
    sees = (
        f"Of {first['kernels']} kernels in a row {_list(said)}: {other} {change} time in gaps than {one}. Under "
        f"torch.profiler a call of {one} takes {seen:,.0f} us, without it {alone:,.0f}{longer}."
    )
    series = [Series("a kernel runs", lanes, 1)]
    return Chart("timeline", "Gaps between kernels", "us from the first of these kernels", "", series, sees)


def break_even(part: dict) -> Chart:
    paid: dict[str, dict[str, int]] = {}
    for case, cells in part["facts"]["first calls"].items():
        if found := re.fullmatch(r"in (\d+) calls", cells.get("paid", "")):
            size, _, mode = case.rpartition(", ")
            paid.setdefault(mode, {})[size] = int(found[1])
    every = {(mode, size): calls for mode, sized in paid.items() for size, calls in sized.items()}
    (first, at), (last, there) = ends(every)
    sees = (
        f"{first} has paid for its compiling first, after {every[first, at]:,} calls at {at}; "
        f"{last} last, after {every[last, there]:,} at {there}."
    )
    return bars("Calls until compiling has paid", "calls, against eager", one_each(paid), sees)


def graphs_by_policy(part: dict) -> Chart:
    fact, told = next((name, rows) for name, rows in part["facts"].items() if " sizes, x " in name)
    points = {}
    for policy, cells in told.items():
        waste = cells["rows per useful row"]
        points[policy + f" ({waste:.2f} rows a useful row)" * (waste > 1)] = cells["graphs"]
    (_, most), least = ends(points), min(points.values())
    one = _list([policy for policy, count in points.items() if count == least])
    sees = f"{one}: {least} compilation for {fact.split(',')[0]}; {most}: {points[most]}."
    return bars(f"Compilations by policy, {fact}", "graphs compiled", [Series(fact, points, 1)], sees)


def cache_entries(part: dict) -> Chart:
    told = part["facts"]["12 calls each: cache entries, and calls left to eager"]
    written = {cause: cells["entries"] for cause, cells in told.items()}
    mended = {cause: int(cells["mended"].rpartition(": ")[2]) for cause, cells in told.items()}
    full = [cause for cause, cells in told.items() if cells["eager"]]
    sees = f"Compiled again until the limit, then left to eager: {_list(full)}. " if full else ""
    sees += f"Mended, the most entries of any is {max(mended.values())}."
    series = [Series("as written", written, 2), Series("mended", mended, 1)]
    return bars("Cache entries after 12 calls, by cause", "cache entries", series, sees)


def compile_by_depth(part: dict) -> Chart:
    by_depth: dict[str, dict[str, float]] = {}
    for case, cells in part["facts"]["compiling, from an empty cache"].items():
        depth, _, how = case.partition(", ")
        by_depth.setdefault(depth, {})[how] = cells["cold s"]
    few, *_, many = sorted(by_depth, key=sizes)
    grows = {how: by_depth[many][how] / seconds for how, seconds in by_depth[few].items() if how in by_depth[many]}
    grows = [f"{times:.1f}x ({how})" for how, times in grows.items()]
    sees = f"From {few} to {many} the time to compile grows {_list(grows)}."
    title = "Time to compile by depth, from an empty cache"
    return bars(title, "seconds", one_each(by_depth), sees, form="{:.1f} s")


# --- Triton


def stages(part: dict) -> Chart:
    points, told = {}, []
    for table in timed(part, "pipelined_matmul"):
        own = [row.variant for row in table.rows if row.variant[0].isdigit()]
        points[table.case] = {int(name.split()[0]): table.over(name, "cuBLAS") for name in own}
    for case, times in points.items():
        best, _ = ends(times)
        enough = min(stages for stages, time in times.items() if time <= 1.02 * times[best])
        told.append(f"{case} {best} stages ({times[1] / times[best]:.2f}x as fast as one)")
        told[-1] += f", with {enough} within 2 %" * (enough != best)
    sees, y = f"The least time is with: {'; '.join(told)}.", "time, cuBLAS = 1"
    return Chart("lines", "Time against num_stages", "num_stages", y, one_each(points), sees, {"cuBLAS": 1.0})


def waves(part: dict) -> Chart:
    sms = part["machine"]["sms"]

    def busy(n: int, block: int) -> float:
        tiles = math.ceil(n / 128) * math.ceil(n / block)
        return 100 * tiles / sms / math.ceil(tiles / sms)

    sides = range(1024, 8192 + 1, 512)
    series = [Series(f"tiles of 128x{b}", {n: busy(n, b) for n in sides}, look) for b, look in ((256, 1), (128, 2))]
    tiles = (4096 // 128) * (4096 // 256)
    sees = (
        f"Computed, not measured: {tiles} tiles of 128x256 at 4096 are {tiles / sms:.2f} waves of {sms} SMs, so "
        f"{100 - busy(4096, 256):.0f}% of the time is idle in the last; at 8192 it is {100 - busy(8192, 256):.0f}%."
    )
    title = "Waves and tail of a persistent product, computed from tiles and SMs"
    return Chart("lines", title, "rows = columns of the product", "% of SMs' time busy", series, sees)


# --- FP8


def representable(part: dict) -> Chart:
    """Numbers of each format in a power of two: exact, by the formats' exponent and mantissa bits."""
    told, held = part["facts"]["the formats"], {}
    for name, cells in told.items():
        mantissa = round(-math.log2(cells["apart at 1"]))
        lowest, least = (int(cells[key].removeprefix("2^")) for key in ("smallest normal", "smallest"))
        points = {power: 2 ** (power - least) for power in range(least, lowest)}  # subnormal: equally far apart
        top = math.floor(math.log2(cells["largest"]))
        points |= dict.fromkeys(range(lowest, top), 2**mantissa)
        points[top] = round((cells["largest"] / 2**top - 1) * 2**mantissa) + 1
        if 2 * sum(points.values()) + 1 != cells["numbers"]:
            raise ValueError(f"{name} does not have {cells['numbers']} numbers")
        held[name] = points
    sees = "; ".join(
        f"{name} has {max(points.values())} numbers in a power of two and reaches from 2^{min(points)} to "
        f"{told[name]['largest']:,.0f}" for name, points in held.items()
    )  # fmt: skip
    title = "Numbers representable in each power of two"
    return Chart("lines", title, "power of two", "numbers", one_each(held), f"{sees}.")


def outliers(part: dict) -> Chart:
    fact, told = noted(part["study"], "SNR, dB, where one channel")
    title = fact.replace("SNR, dB,", "Signal to noise").replace(" by (", " (")
    points = {recipe: {int(size.removeprefix("2**")): y for size, y in cells.items()} for recipe, cells in told.items()}
    _, *series = drawn = one_each(points, 0)
    last = max(series[0].points)
    end = {each.name: each.points[last] for each in series}
    worst, best = ends(end)
    sees = f"Beside an outlier of 2^{last}, FP8 keeps {end[best]:.1f} dB '{best}', and {end[worst]:.1f} '{worst}'."
    return Chart("lines", title, "size of the outlier, 2^n", "dB", drawn, sees)


def over_bfloat16(part: dict) -> Chart:
    base = "cuBLAS bfloat16"
    held = {}
    for table in timed(part.get("study"), "scales per row") + timed(part, "fp8_matmul"):  # of two the lesson's
        held |= {square(table): table} if square(table) else {}
    series = [
        Series(name, {n: t.over(base, name) for n, t in sorted(held.items()) if name in t}, look)
        for name, look in (("triton", 1), ("_scaled_mm", 2), ("persistent", 4), ("warp specialized", 5))
    ]
    gains = ", ".join(f"{y:.2f}x at {n}" for n, y in series[0].points.items())
    sees = f"One GEMM, scales per row, triton over {base}: {gains}."
    axis, y = "rows = columns = depth of the product", f"times as fast as {base}"
    return Chart("lines", "FP8 over bfloat16 by size", axis, y, series, sees, {base: 1.0}, True)


# --- TMA


def in_flight(part: dict) -> Chart:
    fact, told = noted(part["study"], "bytes in flight")
    points: dict[int, float] = {}
    for cells in told.values():
        kib = cells["KiB of loads in flight"]
        points[kib] = max(cells["TB/s"], points.get(kib, 0.0))
    copies = {t.baseline: t[t.baseline].tbps for t in timed(part["study"], "bytes in flight")}
    levels = {f"{name}, {rate:.2f} TB/s": rate for name, rate in copies.items()}
    first, most = min(points), max(points.values())
    enough = next(kib for kib, rate in sorted(points.items()) if rate > 0.98 * most)
    sees = (
        f"{first} KiB in flight an SM give {points[first]:.2f} TB/s; from {enough} KiB on, within 2% of the most, "
        f"{most:.2f} TB/s, more bytes in flight add little."
    )
    title = f"Bandwidth of TMA against bytes in flight, {fact.rpartition(', ')[2]}"
    series = [Series("TMA ring", points, 1)]
    return Chart("lines", title, "KiB of loads in flight in an SM", "TB/s", series, sees, levels)


def gemm_steps(part: dict) -> Chart:
    tables = timed(part, "tma_matmul") + timed(part.get("study"), "tma_matmul")
    labels = {
        ("pointers", "loads"): "loads by TMA, over pointers", ("loads", "store"): "and stores by TMA, over loads",
        ("store", "parts"): "in parts, over one store",
    }  # fmt: skip
    gained = {label: {t.case: t.over(*steps) for t in tables} for steps, label in labels.items()}
    loads, *further = gained.values()
    (least, best), after = ends(loads), [y for points in further for y in points.values()]
    sees = (
        f"Loads by TMA make the product up to {loads[best]:.2f}x as fast as pointer loads ({best}), "
        f"{loads[least]:.2f}x at least; the further steps give {min(after):.2f} to {max(after):.2f}x."
    )
    axis, levels = "times as fast as the step before", {"the step before": 1.0}
    return Chart("bars", "What each step of the product adds", axis, "", one_each(gained), sees, levels)


def partitions(part: dict) -> Chart:
    held: dict[str, dict[str, list]] = {}
    for name, each in part["study"]["facts"][f"cycles from the first event, {DRAWN}"].items():
        lane, _, what = name.partition(": ")
        held.setdefault(what, {})[lane] = pairs(each)
    busy: dict[str, dict[str, float]] = {"MMA": {}, "waits": {}}  # of the time from a lane's first event to its last
    for what, shares in busy.items():
        for lane, each in held[what].items():
            own = [at for lanes in held.values() for pair in lanes.get(lane, ()) for at in pair]
            shares[lane] = sum(b - a for a, b in each) / (max(own) - min(own))
    hidden = whole = 0
    for lane, stores in held["epilogue"].items():
        others = [span for other, each in held["MMA"].items() if other != lane for span in each]
        known = [span for span in stores if span[0] < max(others)[1]]  # what runs beside the last is not recorded
        hidden, whole = hidden + overlap(known, others), whole + sum(b - a for a, b in known)
    hidden /= whole
    sees = (
        "MMAs take " + _list([f"{share:.0%} ({lane})" for lane, share in busy["MMA"].items()]) + " of the time; "
        f"the producer waits for {busy['waits']['producer']:.0%} of its own. During {hidden:.0%} of the epilogues' "
        f"time the other consumer multiplies: they are mostly {'hidden' if hidden > 0.5 else 'exposed'}."
    )
    (table,) = timed(part["study"], "timeline")
    cost = table["clocks read"].ms / table["no clock read"].ms - 1
    sees += f" Reading the clocks changes the kernel's time by {cost:+.1%}."
    looks = {"waits": 0, "starts loads": 1, "MMA": 2, "epilogue": 3}
    series = [Series(what, held[what], look) for what, look in looks.items()]
    title = f"What each partition does in a program's first two tiles, {table.case}"
    return Chart("timeline", title, "cycles of the SM", "", series, sees)


# --- torch.distributed


def streams(part: dict) -> Chart:
    """One step on rank 0, two lanes for each way: when kernels of NCCL ran, and when others did."""
    held = part["facts"][f"start and end in ms of kernels of rank 0, {DRAWN}"]
    lanes, said = {}, []
    for name, each in held.items():
        others, own = pairs(each["other kernels"]), pairs(each["NCCL"])
        lanes |= {name: others, f"NCCL, {name}": own}
        alone = sum(b - a for a, b in own) - overlap(own, others)
        said.append(f"{alone:.3g} ms ({name}, of {max(b for _, b in own + others):.3g})")
    sees = f"Where NCCL has nothing above it, the step waits for it, and it may wait for the other rank: {_list(said)}."
    series = [Series("a kernel runs", lanes, 1)]
    return Chart("timeline", "Both streams of a step, rank 0", "ms from the first kernel", "", series, sees)


def sharded(part: dict) -> Chart:
    """What each way to compile and shard changes: a step's time, its memory, what NCCL hides behind, the first call."""
    (table,) = timed(part, "forward and backward")
    rows = part["facts"]["what is compiled and sent"]
    eager = next(iter(rows))
    memory = next(name for name in rows[eager] if "GiB" in name)
    ms = {name: round(table[name].ms, 1) for name in rows}
    gib = {name: cells[memory] for name, cells in rows.items()}
    hidden = {name: round(100 * cells["hidden"]) for name, cells in rows.items()}
    first = {name: round(table[name].first_call_s, 1) for name in rows}
    quick = [name for name in rows if ms[name] <= 1.01 * min(ms.values())]
    gains = dict.fromkeys(f"{end(table.over(eager, name) for name in quick):.2f}" for end in (min, max))
    least, hides, calls = min(gib, key=gib.get), sorted(hidden.values()), sorted(first.values())
    sees = (
        f"Fastest, within 1 %: {_list([repr(name) for name in quick])}, {' to '.join(gains)}x as fast as "
        f"'{eager}'. Least memory: '{least}', {gib[least]:g} GiB instead of {gib[eager]:g}, at "
        f"{table.over(eager, least):.2f}x the speed. {hides[0]} to {hides[-1]}% of NCCL's time is hidden behind other "
        f"kernels; first calls take {calls[0]:g} to {calls[-1]:g} s."
    )
    measures = {"ms a step": ms, memory: gib, "% of NCCL hidden": hidden, "seconds, first call": first}
    series = [Series(name, points, 1) for name, points in measures.items()]
    title = f"Time, memory, overlap and first call, {table.case}"
    return Chart("panels", title, "", "", series, sees, form="{:g}")


def by_message(part: dict) -> Chart:
    """How many times as fast as the library, by the size of the message."""
    tables = timed(part)
    base = tables[0].baseline
    rows = [row.variant for row in tables[0].rows if row.variant != base]
    series = one_each({name: {_bytes(t.case): t.over(base, name) for t in tables} for name in rows})
    ratios = {table.case: table.over(base, rows[0]) for table in tables}
    least, most = ends(ratios)
    sees = f"{rows[0]} is {ratios[least]:.2f}x ({least}) to {ratios[most]:.2f}x ({most}) as fast as {base}."
    x, y = "bytes of the message (1K = 1024)", f"times as fast as {base}"
    return Chart("lines", f"Speed over {base} by size", x, y, series, sees, {base: 1.0}, True)


def _bytes(case: str) -> int:
    number, unit = case.split()
    return int(number) * {"KiB": 2**10, "MiB": 2**20}[unit]


# --- XLA


def compile_by_layers(part: dict) -> Chart:
    told = part["facts"]["forward: compile s by layers"]
    points = {name: {int(n): y for n, y in cells.items()} for name, cells in told.items()}
    many = max(next(iter(points.values())))
    sees = f"{many} layers compile in " + _list([f"{each[many]:.2f} s ({name})" for name, each in points.items()]) + "."
    return Chart("lines", "Time to compile against layers, forward", "layers", "seconds", one_each(points), sees)


def programs_by_padding(part: dict) -> Chart:
    _, told = noted(part, "batches of ")
    points = {f"{name} ({cells['wasted %']:.0f}% of rows wasted)": cells["compiles"] for name, cells in told.items()}
    sees = "Programs compiled: " + _list([f"{count} with {policy}" for policy, count in points.items()]) + "."
    return bars("Programs by padding policy, batches of 1 to 64", "programs", [Series("programs", points, 1)], sees)


def totals(part: dict, at: int = 0) -> Chart:
    """Seconds that calls take in all, compiling included, by their number, in the lesson's case number `at`.

    From each row's first call and time a call: the recorded totals are rounded to tenths of a second, and eager's first
    call is shorter.
    """
    table = timed(part, "forward")[at]
    calls = [10**n for n in range(7)]
    series = [
        Series(row.variant, {n: row.first_call_s + (n - 1) * row.ms / 1000 for n in calls}, look)
        for row, look in zip(table.rows, looks([table]).values(), strict=True)
    ]
    least = [min(series, key=lambda each: each.points[n]).name for n in calls]
    changes = [i for i, name in enumerate(least) if i == 0 or name != least[i - 1]]
    spans = []
    for first, after in pairwise([*changes, len(calls)]):
        few, many = calls[first], calls[after - 1]
        to = f" to {many:,}" * (few < many)
        spans.append(f"{least[first]} for {few:,}{to} call{'s' * (many > 1)}")
    sees = f"Least seconds in all: {_list(spans)}."
    for one, other in pairwise(dict.fromkeys(least)):
        slow, fast = table[one], table[other]
        even = 1 + (fast.first_call_s - slow.first_call_s) / (slow.ms - fast.ms) * 1000
        sees += f" {other} overtakes {one} at about {float(f'{even:.2g}'):,.0f} calls."
    title = f"Seconds in all by the number of calls, {table.case}"
    return Chart("lines", title, "calls", "seconds, compiling included", series, sees, {}, True)


# --- a topic


def roofline(parts: list[dict]) -> Chart | None:
    """Each technique's case nearest to its ceiling: FLOPs a byte and TFLOP/s, or TB/s where it only moves bytes.

    Ceilings are one GPU's: of ranks, whose bytes go over links, there is none.
    """
    multiply, move, share, levels, left = {}, {}, {}, {}, {}
    for part in (each for each in parts if each["machine"].get("ranks", 1) == 1):
        ceilings = part["machine"].get("ceilings") or {"copy_tbps": None, "gemm_tflops": {}}
        found = {"copy": ceilings["copy_tbps"]} | ceilings["gemm_tflops"]
        levels |= {name: max(rate, levels.get(name, 0)) for name, rate in found.items() if rate}
        rows = [min(told_rows(table), key=lambda row: row.ms) for table in timed(part) if len(table.rows) > 1]
        row = max(rows, key=lambda row: row.of_ceiling or 0, default=None)
        if not (row and row.of_ceiling and row.tbps):
            counts = "no bytes are counted" if row and row.tflops else "neither bytes nor FLOPs are counted"
            why = counts if row else "nothing is timed"
            left.setdefault(why, []).append(part["name"])
            continue
        if row.tflops:
            multiply[part["name"]] = (row.tflops / row.tbps, row.tflops)
        else:
            move[part["name"]] = row.tbps
        share[part["name"]] = row.of_ceiling
    if "copy" not in levels or not multiply.keys() | move.keys():
        return None
    far, near = ends(share)
    sees = f"Of {len(share)} techniques, each at its best case, {near} comes nearest to its measured ceiling, "
    sees += f"{share[near]:.0%}" + f"; {far} stays furthest below, {share[far]:.0%}" * (near != far) + "."
    sees += "".join(f" Not drawn, as {why}: {_list(names)}." for why, names in left.items())
    series = [Series("multiply", multiply, 1), Series("move", move, 1)]
    return Chart("roof", "Roofline, with the measured ceilings", "FLOPs a byte", "TFLOP/s", series, sees, levels, True)


ELEMENTS, COLUMNS = "elements (1K = 1024)", "columns of a row (1K = 1024)"
SIDES = "rows = columns = depth (1K = 1024)"
WHOLE_MODELS = "whole models", "FP8 in whole models", "", "torch.compile bfloat16"  # the faster of two in 16 bits
PICTURES: dict[str, tuple[Callable[[dict], Chart | None], ...]] = {
    "modes": (speedups, break_even),
    "when_it_helps": (when_it_helps, speed_up_map),
    "cuda_graphs": (launch_gaps, speedups),
    "dynamic_shapes": (graphs_by_policy, partial(speedups, only="10 sizes")),
    "recompilation": (cache_entries, speedups),
    "regional_compilation": (compile_by_depth,),
    "vector_add": (partial(rates, titles=("vector_add", "sizes"), axis=ELEMENTS, size=columns),),
    "fused_add_relu_mul": (partial(rates, titles=("fused_add_relu_mul", "sizes"), axis=ELEMENTS, size=columns),),
    "softmax": (partial(rates, titles=("softmax", "row lengths"), axis=COLUMNS, size=columns),),
    "layer_norm": (partial(rates, titles=("forward",), axis=COLUMNS, size=columns),),
    "matmul": (partial(rates, titles=("matmul",), axis=SIDES, size=square),),
    "pipelined_matmul": (stages,),
    "persistent_matmul": (partial(rates, titles=("persistent_matmul",), axis=SIDES, size=square), waves),
    "formats": (representable,),
    "accuracy": (outliers,),
    "fp8_matmul": (over_bfloat16, lambda part: speedups(part["study"], *WHOLE_MODELS)),
    "tma_copy": (in_flight, speedups),
    "tma_matmul": (gemm_steps,),
    "gluon_matmul": (partitions, speedups),
    "ddp": (streams, speedups),
    "fsdp2": (sharded,),
    "fused_collectives": tuple(
        partial(speedups, title=f"GEMM {when} the collective", heading=f"GEMM {when} the collective")
        for when in ("after", "before")
    ),
    "one_shot_allreduce": (by_message,),
    "scan_layers": (compile_by_layers,),
    "static_shapes": (programs_by_padding, speedups),
    "compare": (totals, partial(totals, at=1)),
}


def charts_of(name: str, part: dict) -> list[Chart]:
    """The pictures of a technique that its record holds the numbers of; of a technique without one of its own, and
    where the record lacks what that needs, how many times as fast as its baseline each row is."""
    for functions in (PICTURES.get(name, ()), (speedups,)):
        found = []
        for read in functions:
            with suppress(LookupError, TypeError, ValueError, StopIteration, ZeroDivisionError):  # the record lacks it
                found.append(read(part))
        found = [chart._replace(series=[each for each in chart.series if each.points]) for chart in found if chart]
        if drawn := [chart for chart in found if chart.series]:
            return drawn
    return []
