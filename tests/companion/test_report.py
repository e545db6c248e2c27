"""The page: its numbers are the records', its links lead somewhere, and any record gives a page or one sentence."""

import copy
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

from harness.catalog import ROOT, topics
from harness.record import ExampleRecord, load

import pytest

from companion import charts, report
from companion.__main__ import main
from companion.claims import judge
from companion.ledger import CLAIMS
from companion.pictures import draw
from companion.readme import tables_of
from examples.distributed.ddp import EVENTS as KERNELS
from studies.compiler import cuda_graphs, when_it_helps
from studies.tma.gluon_matmul_timeline import EVENTS, spans

H200, CPU = ROOT / "results/h200", ROOT / "results/cpu"
H200S = ROOT / "results" / "h200-x2"
TMA = H200 / "triton_tma_blackwell.json"


class Page(HTMLParser):
    """The parts of a page that the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.ids, self.links, self.pictures, self.cells, self.tables = text, [], [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        held = dict(attrs)
        self.ids += [held["id"]] if "id" in held else []
        self.links += [held[name] for name in ("href", "src") if name in held]
        self.pictures += [held] if tag == "svg" else []
        self.cells += [held["data-v"]] if "data-v" in held else []
        self.tables += tag == "table"

    def article(self, name: str) -> str:
        return self.text[self.text.index(f'<article id="{name}"') :].partition("</article>")[0]


def made(path: Path, *argv) -> Page:
    assert main(["report", *map(str, argv), "-o", str(path)]) == 0
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Page:
    """The page of docs/index.html, made anew."""
    return made(tmp_path_factory.mktemp("page") / "index.html", H200, H200S, CPU)


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without what takes most of the time to make: pictures, and the ledger."""
    monkeypatch.setattr("companion.pictures.draw", lambda chart, mine, whose: "<svg></svg>")
    monkeypatch.setattr(report, "judge", lambda *_: {})


def examples() -> list[dict]:
    """Of the topics: the page leaves the phases of compile_inspect out."""
    paths = [path for folder in (H200, H200S, CPU) for path in sorted(folder.glob("*_examples.json"))]
    paths += sorted(H200.glob("triton_*_*.json"))
    return [each for path in paths for each in load(path)["examples"]]


def test_the_page_in_docs_is_up_to_date(capsys):
    assert main(["report", "--check"]) == 0, capsys.readouterr().err


def test_a_page_is_out_of_date_when_what_it_says_changes_but_not_by_the_mark_of_older_code(
    tmp_path, monkeypatch, undrawn
):
    path = tmp_path / "page.html"
    monkeypatch.setattr(report, "is_stale", lambda *_: False)
    page = made(path, TMA)
    assert main(["report", str(TMA), "-o", str(path), "--check"]) == 0
    monkeypatch.setattr(report, "is_stale", lambda *_: True)
    marked = made(tmp_path / "marked.html", TMA)
    assert marked.text.count(">older code<") > page.text.count(">older code<")
    assert main(["report", str(TMA), "-o", str(path), "--check"]) == 0
    record = json.loads(TMA.read_text())
    record["examples"][0]["tables"][0]["rows"][0]["ms"] += 0.01
    (tmp_path / TMA.name).write_text(json.dumps(record))
    assert main(["report", str(tmp_path / TMA.name), "-o", str(path), "--check"]) == 1
    assert main(["report", str(TMA), "-o", str(tmp_path / "none.html"), "--check"]) == 1
    monkeypatch.setattr(report, "code_of", lambda source: [])
    assert main(["report", str(TMA), "-o", str(path), "--check"]) == 1


def test_the_numbers_on_the_page_are_the_records(whole):
    for example in examples():
        article = whole.article(example["name"])
        assert example["answer"] in html.unescape(article)
        shown = {*Page(article).cells}
        for part in filter(None, (example, example.get("study"))):
            for row in (vars(row) for table in tables_of(part) for row in table.rows if row.ms):
                for key in ("ms", "tbps", "tflops", "of_ceiling", "speedup", "gpu_ms"):
                    assert not row.get(key) or f"{row[key]:.6g}" in shown, (example["name"], row["variant"], key)
    assert whole.tables > 100


def test_charts_hold_recorded_numbers_and_a_sentence_of_them():
    found = {example["name"]: (example, charts.charts_of(example["name"], example)) for example in examples()}
    for name, functions in charts.PICTURES.items():
        assert len(found[name][1]) == len(functions), f"{name}: the record no longer has what its picture needs"
    for name, (example, drawn) in found.items():
        recorded = json.dumps(example)
        assert bool(drawn) == any(len(table.rows) > 1 for table in charts.timed(example)) or drawn, name
        for chart in drawn:
            assert chart.sees.endswith("."), chart
            assert all(each.points for each in chart.series), chart
            if chart.y in ("TB/s", "TFLOP/s"):
                assert all(str(y) in recorded for each in chart.series for y in each.points.values()), chart.title
            if chart.x.startswith("times as fast as ") and name not in charts.PICTURES:  # every row, in every case
                first = charts.timed(example)[0]
                rows = sum(len(t.rows) - 1 for t in charts.timed(example, first.title) if t.baseline == first.baseline)
                assert sum(len(each.points) for each in chart.series) == rows, name
    softmax, (rates,) = found["softmax"]
    row = softmax["tables"][1]["rows"][-1]
    assert next(each for each in rates.series if each.name == "triton").points[4096] == row["tbps"]
    tma, (flight, _) = found["tma_copy"]
    cells = next(v for k, v in tma["study"]["facts"].items() if k.startswith("bytes in flight"))["ring 1 x 1"]
    assert flight.series[0].points[cells["KiB of loads in flight"]] == cells["TB/s"]
    assert f"{cells['TB/s']:.2f} TB/s" in flight.sees


def test_both_streams_of_a_step():
    """NCCL from 1 to 5 ms, hidden from 1 to 2.5: of a step of 9 ms, 2.5 ms are of NCCL alone."""
    facts = {KERNELS: {"torch DDP": {"NCCL": [1, 5], "other kernels": [0, 2.5, 6, 9]}}}
    chart = charts.streams({"facts": facts})
    assert chart.sees.endswith("may wait for the other rank: 2.5 ms (torch DDP, of 9).")
    (series,) = chart.series
    assert series.points == {"torch DDP": [[0, 2.5], [6, 9]], "NCCL, torch DDP": [[1, 5]]}
    assert draw(chart).startswith("<svg")


def test_speed_by_the_size_of_a_message():
    example = next(each for each in examples() if each["name"] == "one_shot_allreduce")
    (chart,) = charts.charts_of("one_shot_allreduce", example)
    sizes = [2**10 * kib for kib in (1, 4, 16, 64, 256, 1024, 4096, 16384)]
    assert all(list(each.points) == sizes for each in chart.series)
    assert chart.series[0].points[65536] == pytest.approx(charts.timed(example)[3].over("torch NCCL", "dispatcher"))


def test_the_sentence_of_a_picture_follows_its_values():
    example = copy.deepcopy(next(each for each in load(TMA)["examples"] if each["name"] == "what_is_tma"))
    (before,) = charts.charts_of("what_is_tma", example)
    for row in example["tables"][0]["rows"]:
        row["speedup"] = 1 / row["speedup"]
    (after,) = charts.charts_of("what_is_tma", example)
    assert before.sees != after.sees
    assert max(before.series[0].points, key=before.series[0].points.get) in before.sees


@pytest.mark.parametrize(
    ("over", "told", "sees"),
    [
        (
            {"a": {"1": 8.5, "2": 17.3}, "b": {"1": 8.0}}, "a",
            "8.50 to 17.30x as fast as torch; no other row is more than 1 % faster in any case.",
        ),
        ({"a": {"1": 0.9, "2": 1.2}, "b": {"1": 1.8}}, "a", "1 of 2 cases; b is up to 2.00x as fast as a (1)"),
        (
            {"a": {"1": 1.2}, "b": {"1": 1.5}},
            None,
            "b is 1.50x as fast as torch; no other row is more than 1 % faster.",
        ),
        ({"a": {"1": 0.5}}, "a", "a is 0.50x as fast as torch."),
    ],
)  # fmt: skip
def test_bars_tell_where_the_answer_wins_and_what_beats_it(over, told, sees):
    assert sees in charts.outcome("torch", over, told)


def test_a_roofline_draws_every_technique_that_it_counts_and_names_the_others():
    for path in sorted(each for each in H200.glob("t*.json") if (ROOT / each.with_suffix(".py").name).is_file()):
        parts = load(path)["examples"]
        chart = charts.roofline(parts)
        drawn = {name for series in chart.series for name in series.points}
        assert chart.sees.startswith(f"Of {len(drawn)} techniques")
        named = set(re.findall(r"\w+", chart.sees.partition("Not drawn")[2]))
        assert {part["name"] for part in parts} - drawn <= named
        assert not named & drawn


def test_what_ranks_send_is_not_put_against_the_ceiling_of_memory():
    parts = load(ROOT / "results/h200-x2/torch_distributed_examples.json")["examples"]
    assert charts.roofline(parts) is None
    rows = [row for part in parts for table in tables_of(part) for row in table.rows]
    assert {bool(row.of_ceiling) for row in rows if row.tflops} == {True}
    assert not any(row.of_ceiling for row in rows if not row.tflops)


def test_the_learning_path_has_every_technique_of_each_topic_once():
    path = report.learning_path((ROOT / "docs/learning-path.md").read_text(encoding="utf-8"))
    for topic in topics():
        told = [name for _, names in path[topic.name]["groups"] for name in names]
        assert sorted(told) == sorted(technique.name for technique in topic.techniques), topic.name


def test_whole_models_are_drawn_where_they_are_recorded():
    path = ROOT / "results/h100/triton_fp8_advanced.json"
    example = next(each for each in load(path)["examples"] if each["name"] == "fp8_matmul")
    chart = charts.charts_of("fp8_matmul", example)[-1]
    table = next(each for each in charts.timed(example["study"], "whole models") if each.case == "4x2048 tokens")
    row = next(each for each in chart.series if each.name == "FP8 per row")
    assert row.points[table.case] == table.over("torch.compile bfloat16", "FP8 per row")
    told, gain = chart.series[1].name, chart.series[1].points[table.case]
    assert f"{told} is" in chart.sees
    assert "as fast as torch.compile bfloat16" in chart.sees
    assert f"FP8 per row is up to {row.points[table.case] / gain:.2f}x as fast as {told} (4x2048 tokens)" in chart.sees
    example["study"]["tables"] = []
    assert [each.title for each in charts.charts_of("fp8_matmul", example)] == ["FP8 over bfloat16 by size"]


def test_totals_begin_at_the_first_call_and_say_where_one_overtakes_another():
    example = copy.deepcopy(next(each for each in examples() if each["name"] == "compare"))
    found = charts.charts_of("compare", example)
    assert [len(chart.series) for chart in found] == [len(table["rows"]) for table in example["tables"]]
    for chart, table in zip(found, example["tables"], strict=True):
        for series, row in zip(chart.series, table["rows"], strict=True):
            assert series.points[1] == row["first_call_s"]
    assert ">0.001<" in draw(found[0])  # the axis says what it is, not a rounded 0
    for row, first, ms in zip(example["tables"][0]["rows"], (0.5, 2.5, 9, 9, 9, 9), (2, 1, 9, 9, 9, 9), strict=True):
        row |= {"first_call_s": first, "ms": ms}
    eager, inductor = (row["variant"] for row in example["tables"][0]["rows"][:2])
    sees = charts.totals(example).sees
    assert f"{eager} for 1 to 1,000 calls and {inductor} for 10,000 to 1,000,000 calls." in sees
    assert sees.endswith(f"{inductor} overtakes {eager} at about 2,000 calls.")


@pytest.mark.parametrize("machine", ["h200-x2", "h100-x2"])
def test_time_memory_overlap_and_first_call_of_each_way_to_shard(machine):
    path = ROOT / "results" / machine / "torch_distributed_examples.json"
    example = next(each for each in load(path)["examples"] if each["name"] == "fsdp2")
    (chart,) = charts.charts_of("fsdp2", example)
    ms, memory, hidden, first = (series.points for series in chart.series)
    told, (table,) = example["facts"]["what is compiled and sent"], example["tables"]
    rows = {row["variant"]: row for row in table["rows"]}
    assert list(ms) == list(told)
    for name, cells in told.items():
        assert memory[name] == cells[chart.series[1].name]
        assert (ms[name], first[name]) == (round(rows[name]["ms"], 1), round(rows[name]["first_call_s"], 1))
        assert hidden[name] == round(100 * cells["hidden"])
    least = min(memory, key=memory.get)
    assert f"Least memory: '{least}', {memory[least]:g} GiB" in chart.sees
    slower = copy.deepcopy(example)
    for row in slower["tables"][0]["rows"]:
        row["ms"] *= 2 if row["variant"].startswith("torch.compile") else 1
    assert "Fastest, within 1 %: 'torch FSDP2'," in charts.sharded(slower).sees
    beside = draw(chart, charts.sharded(slower), "yours: another GPU")
    assert beside.count(">yours ") == sum(len(series.points) for series in chart.series)
    del example["facts"]["what is compiled and sent"]
    assert [each.kind for each in charts.charts_of("fsdp2", example)] == ["bars"]


@pytest.mark.parametrize("machine", ["h200", "h100"])
def test_fp8_over_bfloat16_is_of_the_scales_that_its_lesson_times(machine):
    path = ROOT / "results" / machine / "triton_fp8_advanced.json"
    example = next(each for each in load(path)["examples"] if each["name"] == "fp8_matmul")
    chart = charts.over_bfloat16(example)
    for table in charts.timed(example, "fp8_matmul"):
        size = charts.square(table)
        gain = chart.series[0].points[size]
        assert gain == table.over("cuBLAS bfloat16", "triton")
        assert f"{gain:.2f}x at {size}" in chart.sees
        assert f"{gain:.2f}x at {size}" in example["answer"]


def test_of_two_charts_with_the_same_axes_the_one_of_the_same_title_is_beside():
    one, two = (charts.Chart("bars", title, "x", "", [], "") for title in ("before", "after"))
    assert report.picture(two, [one, two], "yours")["mine"] is two
    assert report.picture(two, [one], "yours")["mine"] is one
    assert report.picture(two, [one._replace(kind="lines")], "yours")["mine"] is None


def gaps_of(gap: dict[str, float]) -> dict:
    """The facts of cuda_graphs' study: kernels of 2 us, with gaps of so many us between them."""
    rows = {
        name: {
            "kernels": 3, "running us": 6.0, "gaps us": 2 * us, "gaps %": round(100 * us / (us + 3), 1),
            "us a call": 100.0, "us a call, profiled": 150.0,
        }
        for name, us in gap.items()
    }  # fmt: skip
    events = {name: [at for i in range(3) for at in (i * (2 + us), 2.0)] for name, us in gap.items()}
    one = {"torch.compile": rows["torch eager"] | {"kernels": 1, "gaps us": 0.0, "gaps %": 0.0}}
    return {
        "consecutive kernels of a call under torch.profiler, 20": rows | one,
        cuda_graphs.EVENTS: events | {"torch.compile": [0.0, 2.0]},
    }


def map_of(launch: float, compute: float) -> dict:
    cells = {"1x1": ("launch-bound", launch), "8x1": ("launch-bound", launch), "8x64": ("compute-bound", compute)}
    rows = {f"{case} tokens": {"bound": bound, "x eager": gain} for case, (bound, gain) in cells.items()}
    return {when_it_helps.MAP: rows}


def partitions_of(behind: int) -> dict:
    """The facts of gluon_matmul's study: two tiles of a step, the second consumer so many cycles behind the first."""
    consumer = [[[20, 25, 0], [120, 160, 0]], [[160, 165, 0], [260, 300, 0]]]
    behind_it = [[[at + behind for at in step] for step in tile] for tile in consumer]
    events = spans([[[[0, 10, 20], [0, 0, 0]], [[20, 100, 110], [0, 0, 0]]], consumer, behind_it])
    return {EVENTS: events}


def clocks_timed(with_clocks: float) -> dict:
    table = copy.deepcopy(next(each for each in load(TMA)["examples"] if each["name"] == "gluon_matmul")["tables"][0])
    rows = [table["rows"][0] | {"variant": "no clock read", "ms": 1.0}]
    rows += [table["rows"][0] | {"variant": "clocks read", "ms": with_clocks}]
    return table | {"title": "timeline", "baseline": "no clock read", "rows": rows}


def with_study(name: str, facts: dict, tables: list) -> dict:
    example = copy.deepcopy(next(each for each in examples() if each["name"] == name))
    example["study"] |= {"facts": facts, "tables": tables}
    return example


@pytest.mark.parametrize(
    ("name", "one", "other", "said"),
    [
        (
            "cuda_graphs", gaps_of({"torch eager": 12.0, "CUDA graph replayed": 3.0}),
            gaps_of({"torch eager": 3.0, "CUDA graph replayed": 12.0}), ("75% less", "300% more"),
        ),
        ("when_it_helps", map_of(1.8, 1.1), map_of(1.1, 1.8), ("compiled 1.80x (1x1)", "compiled 1.10x (1x1)")),
        ("gluon_matmul", partitions_of(60), partitions_of(0), ("mostly hidden", "mostly exposed")),
    ],
)  # fmt: skip
def test_timelines_and_maps_are_drawn_and_told_by_their_values(name, one, other, said):
    kind = "map" if name == "when_it_helps" else "timeline"
    drawn = []
    for facts, cost in ((one, 1.01), (other, 0.98)):
        found = charts.charts_of(name, with_study(name, facts, [clocks_timed(cost)]))
        assert len(found) == len(charts.PICTURES[name])
        (chart,) = (each for each in found if each.kind == kind)
        drawn.append(chart)
    for chart, text in zip(drawn, said, strict=True):
        assert text in chart.sees
        assert chart.sees.endswith(".")
    alone, beside = draw(drawn[0]), draw(*drawn, "yours: another GPU")
    assert beside.count("yours") > alone.count("yours") == 0
    assert not re.findall(r"#0[01]00[0-9a-f]{2}\b", alone + beside)
    assert all(each.name in alone for each in drawn[0].series) or len(drawn[0].series) == 1
    lacks = charts.charts_of(name, with_study(name, {}, []))
    json.dumps(drawn)  # the page's digest is made of it
    assert lacks == [each for each in found if each.kind != kind]  # the page stays as it is


def test_events_that_are_drawn_are_no_tables():
    facts = partitions_of(60) | {"told": 1}
    told = report._part(with_study("gluon_matmul", facts, [])["study"], None)["facts"]
    assert [each["title"] for each in told] == ["told"]


@pytest.mark.parametrize("name", ["tma_copy", "fp8_matmul", "recompilation", "formats"])
def test_without_what_a_picture_needs_there_is_none(name):
    example = next(each for each in examples() if each["name"] == name)
    assert charts.charts_of(name, example | {"facts": {}, "tables": [], "study": None}) == []


def test_every_link_and_anchor_leads_somewhere(whole):
    assert len(whole.ids) == len({*whole.ids} | {*()}), "an id twice"
    shown = {path.stem for folder in (H200, CPU) for path in folder.glob("*.json")}  # topics that have a record
    names = {technique.name for topic in topics() if topic.path.stem in shown for technique in topic.techniques}
    assert len(shown) > 4
    assert names <= {*whole.ids}
    assert {f"claim-{each.claim.id}" for group in judge(CLAIMS, topics()).values() for each in group} <= {*whole.ids}
    for link in whole.links:
        if link.startswith("#"):
            assert link[1:] in whole.ids, link
        elif not link.startswith("data:"):
            assert "://" not in link, link
    index = Page((ROOT / "docs/index.html").read_text(encoding="utf-8"))
    files = [link for link in index.links if not link.startswith(("#", "data:"))]
    assert len(files) > 100
    assert not [link for link in files if not (ROOT / "docs" / link).is_file()]


def test_headings_are_words_with_the_name_of_the_file_beside(whole):
    for topic in topics():
        for technique in topic.techniques:
            shown = report.heading(technique.lesson)
            article = html.unescape(whole.article(technique.name))
            heading = f'<a href="#{technique.name}">{shown["title"]}</a> <code class="name">{technique.name}</code>'
            assert heading in article
            assert f'<p class="about">{shown["about"]}</p>' in article
    assert report.heading("Softmax: read once: a copy.") == {"title": "Softmax", "about": "Read once: a copy."}
    assert report.heading("FSDP2: fully_shard keeps.") == {"title": "FSDP2", "about": "fully_shard keeps."}
    assert report.heading("A sentence.") == {"title": "A sentence", "about": ""}


def test_each_picture_has_a_name_and_a_sentence(whole):
    captions = re.findall(r"<figcaption><b>(.+?)</b> (.+?)</figcaption>", whole.text, re.S)
    assert len(whole.pictures) == len(captions) > 50
    for picture in whole.pictures:
        assert picture["role"] == ("group" if picture["aria-label"].startswith("Roofline") else "img")
        assert len(picture["aria-label"]) > 40
    assert "font-family" not in "".join(re.findall(r"<text[^>]*>", whole.text))
    assert not re.findall(r"#0[01]00[0-9a-f]{2}\b", whole.text), "a stand-in for a colour was left"
    roofs = [svg for svg in re.findall(r"<svg.*?</svg>", whole.text, re.S) if 'role="group"' in svg[:200]]
    assert len(roofs) == 4  # of the topics on one GPU
    assert {"matmul", "softmax"} <= {*re.findall(r'<a href="#(\w+)"', roofs[1])}


def test_the_page_is_one_file_without_network_and_small(whole):
    assert len(whole.text.encode()) < 2_000_000
    assert not re.search(r"<link[^>]+stylesheet|<script[^>]+src|@import|url\((?!#)", whole.text)
    for what in ("it compiles again and again", "is FP8 worth it", "Exercise", "What the chapter claims"):
        assert what in whole.text
    assert whole.text.index("Something is wrong") < whole.text.index("in reading order")
    kernel = whole.article("vector_add")
    assert "def </span>" not in kernel
    assert "vector_add_kernel" in kernel
    assert "sm_80" in whole.article("softmax")


def test_another_gpu_is_drawn_and_told_beside(tmp_path):
    page = made(tmp_path / "page.html", TMA, "--beside", ROOT / "results/h100" / TMA.name)
    mine = next(each for each in load(ROOT / "results/h100" / TMA.name)["examples"] if each["name"] == "tma_matmul")
    article = page.article("tma_matmul")
    assert "yours, x cuBLAS" in article
    assert f"{mine['tables'][0]['rows'][1]['speedup']:.6g}" in Page(article).cells
    assert "Yours: NVIDIA H100" in article
    assert article.count(", yours ") > 3
    assert article.count("yours: NVIDIA H100") == article.count("<svg")


# --- records of every kind


def record(tmp_path, **changed) -> Path:
    """A record of the TMA topic, changed: `example` is what its first technique becomes."""
    held = json.loads(TMA.read_text())
    held["examples"] = held["examples"][:2]
    held["examples"][0] |= changed.pop("example", {})
    path = tmp_path / "record.json"
    path.write_text(json.dumps(held | changed))
    return path


def untimed(table: dict) -> dict:
    times = dict.fromkeys(("ms", "p20", "p80", "tbps", "tflops", "of_ceiling", "speedup", "enqueue_us", "gpu_ms"))
    return table | {"rows": [row | times for row in table["rows"]]}


def test_a_run_on_a_cpu_says_what_it_does_not_know(tmp_path, undrawn):
    held = json.loads(TMA.read_text())
    for each in held["examples"]:
        cpu = {
            "gpu": None,
            "sms": None,
            "ceilings": {"copy_tbps": None, "gemm_tflops": {}},
            "host": {"cpu": "x", "cores": 2},
        }
        each["machine"] |= cpu
        each |= {
            "answer": None,
            "tables": [untimed(table) for table in each["tables"]],
            "study": None,
            "sizes": "interpreted",
        }
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(held | {"gpu": None}))
    page = made(tmp_path / "page.html", path)
    article = page.article("tma_copy")
    assert "Nothing was timed in this run" in page.text
    assert "Not timed here" in article
    assert "Recorded on an NVIDIA H200" in article  # as such
    assert "checks passed" in article
    assert "copy_ring_kernel" in article
    assert "cp.async.bulk" in article
    assert "<svg" not in article


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"example": {"machine": {"gpu": "A GPU of tomorrow", "torch": "9"}}}, "A GPU of tomorrow"),
        ({"running": "tma_copy"}, "The run had not ended with this technique"),
        ({"example": {"status": "failed", "reason": "Error: no\nmore", "answer": None}}, "Failed: Error: no."),
        ({"example": {"status": "skipped", "reason": "needs sm_100"}}, "Skipped: needs sm_100."),
        ({"examples": []}, "Not in this record."),
        ({"examples": [{"name": "what_is_tma"}, {"name": "of_old"}]}, "no longer in the repository: of_old"),
    ],
)  # fmt: skip
def test_a_record_that_is_not_whole_gives_a_page(tmp_path, undrawn, changed, said):
    page = made(tmp_path / "page.html", record(tmp_path, **changed))
    assert said in page.text
    assert page.text.count("<article") == 8


def test_what_cannot_be_read_is_one_sentence(tmp_path, capsys, undrawn):
    (tmp_path / "broken.json").write_text('{"schema": 2,')
    (tmp_path / "old.json").write_text('{"schema": 1, "examples": []}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "made.json").write_text(TMA.read_text())
    for argv, message in (
        (["broken.json"], "broken.json: not JSON"),
        (["old.json"], "old.json: not a record of schema 2"),
        (["empty"], "empty: holds no record"),
        (["none.json"], "none.json: No such file or directory"),
        ([TMA, "made.json"], "a second record of triton_tma_blackwell; put it beside the first"),
        (
            [TMA, "-o", tmp_path / "nowhere" / "page.html"],
            "page.html: No such file or directory; name another file with -o",
        ),
        ([TMA, "-o", tmp_path], "Is a directory"),
        ([TMA, "--beside", "broken.json"], "broken.json: not JSON"),
    ):
        paths = [tmp_path / each if isinstance(each, str) and each[0] != "-" else each for each in argv]
        assert main(["report", *map(str, paths)]) == 2, argv
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    for changed, message in (
        ({"topic": "of_nothing"}, "its topic 'of_nothing' is none of this repository's"),
        ({"example": {"tables": [{"title": "x"}]}}, "what_is_tma cannot be read"),
        ({"example": {"facts": [1]}}, "what_is_tma cannot be read"),
    ):
        assert main(["report", str(record(tmp_path, **changed)), "-o", str(tmp_path / "x.html")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_what_a_lesson_shows():
    kernel = "@triton.jit(x=1)\ndef kernel(a):\n    # why\n    return a\n"
    source = f"import torch\n\n\ndef helper(h):\n    pass\n\n\n{kernel}\n\ndef demo(h):\n    pass\n"
    (shown,) = report.code_of(source)
    assert shown["source"] == kernel.rstrip()
    plain = "def f(x): pass\ndef g(h: Harness): pass\ndef reference(x): pass\ndef later(): pass\ndef demo(h): f(h)\n"
    assert [each["name"] for each in report.code_of(plain)] == ["f", "g"]
    long = plain.replace("def f(x): pass", "def f(x):" + "\n    x += 1" * 15)
    assert [each["name"] for each in report.code_of(long)] == ["f"]
    for topic in topics():
        for technique in topic.techniques:
            code = report.code_of(technique.path.read_text())
            assert code, technique.file
            assert sum(each["source"].count("\n") for each in code) < 130, technique.file


def test_evidence_is_told_by_architecture():
    codegen = [{"sm": sm, "found": {"wgmma": 4, "st": 0} if sm == 90 else {"mma.sync": 2}} for sm in (80, 90, 120)]
    assert report.evidence(codegen) == [("sm_80, sm_120", "mma.sync"), ("sm_90", "wgmma")]
    assert report.evidence([{"sm": 80, "found": {}}]) == [("sm_80", "not supported")]


def test_an_example_of_names_alone_is_filled_in(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"schema": 2, "topic": "t", "gpu": None, "running": None, "examples": [{"name": "a"}]}))
    (example,) = report.gather([path])["t"]["examples"]
    assert example.keys() >= ExampleRecord("a").as_dict().keys()


def test_techniques_that_wins_when_names_are_links():
    page = report.render(report.content(report.gather(report.reference_files()), {}), ".")
    wins = dict(re.findall(r'<article id="(\w+)".*?<b>Wins when</b> (.*?)</p>', page, re.S))
    assert 'see <a href="#recompilation">recompilation</a>' in wins["dynamic_shapes"]
    assert '<a href="#tma_persistent_matmul">tma_persistent_matmul</a>' in wins["tma_matmul"]
    assert "recompilation</a>" not in wins["recompilation"]


def test_a_technique_that_was_recorded_on_a_cpu_says_so():
    page = report.render(report.content(report.gather(report.reference_files()), {}), ".")
    on_cpu = dict(re.findall(r'<h3 id="(\w+)-h">(.*?)</h3>', page))
    assert "on a CPU" in on_cpu["compare"]
    assert "on a CPU" not in on_cpu["softmax"]
