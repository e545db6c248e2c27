"""docs/index.html in headless Chromium: it works by mouse and keyboard, in light, dark and print, and by axe's rules.

`make test-page` installs what this needs and sets REQUIRE_BROWSER, with which nothing is skipped.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from harness.catalog import ROOT

import pytest

from companion.__main__ import main
from tests.compile_inspect.test_main import filled

CHROMIUM = Path("/usr/bin/chromium")
AXE = ROOT / "build/page/node_modules/axe-core/axe.min.js"
PAGE = (ROOT / "docs/index.html").as_uri()
OFF = ("gpu", "background-networking", "component-update", "sync")
FLAGS = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in OFF)]
SCHEMES, WIDTHS = ("light", "dark"), (360, 1400)
MISSING = [
    *(["playwright (make test-page)"] * (find_spec("playwright") is None)),
    *([str(CHROMIUM)] * (not CHROMIUM.exists())),
    *(["axe-core (make test-page)"] * (not AXE.is_file())),
]
LACKING = bool(MISSING) and not os.environ.get("REQUIRE_BROWSER")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(LACKING, reason=f"needs {', '.join(MISSING)}")]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def visit(browser):
    """Opens the page; afterwards nothing may have gone to the console or to the network."""
    said, asked, contexts, urls = [], [], [], set()

    def opened(width=1400, scheme="light", url=PAGE):
        urls.add(url)
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    assert {url for url in asked if not url.startswith("data:")} <= urls


def test_it_opens_in_under_a_second(visit):
    page = visit()
    times = []
    for _ in range(5):
        page.reload()
        times.append(page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"))
    assert min(times) < 1000, times


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", ["chapter", "compile_inspect"])
def test_axe_finds_nothing_of_level_a_or_aa(visit, width, scheme, which, tmp_path):
    url = PAGE
    if which == "compile_inspect":
        filled().html(tmp_path / "inspected.html")
        url = (tmp_path / "inspected.html").as_uri()
    page = visit(width, scheme, url)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("document.querySelectorAll('details:not(.study)').forEach(each => each.open = true)")
    # Articles beyond the screen have estimated heights until they are shown, and targets would seem to overlap.
    page.add_style_tag(content="* { content-visibility: visible !important }")
    page.wait_for_timeout(300)  # until what scrolls has been found
    page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
    found = page.evaluate("tags => axe.run({runOnly: tags, resultTypes: ['violations']})", tags)
    told = [(each["id"], each["nodes"][0]["html"][:200], len(each["nodes"])) for each in found["violations"]]
    assert told == []


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_but_boxes_scrolls_sideways(visit, width):
    page = visit(width)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("figure svg").first.bounding_box()["width"] > 300


# Texts that are cut, or closer to another one than two pixels; and in rooflines lines to a name that cross one.
TEXTS = """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].map(each => [each.textContent, each.getBoundingClientRect()]);
  const box = svg.getBoundingClientRect(), where = svg.getAttribute('aria-label').slice(0, 60), found = [];
  const shared = (a, b) => [Math.min(a.right, b.right) - Math.max(a.left, b.left),
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];
  const lines = svg.matches('[role=group]') ? [...svg.querySelectorAll('path[style*="faint"]')] : [];
  const leaders = lines.map(each => each.getBoundingClientRect()).filter(at => at.width > 2 && at.height > 2);
  texts.forEach(([text, at], i) => {
    if (at.left < box.left - 3 || at.right > box.right + 3 || at.top < box.top - 3 || at.bottom > box.bottom + 3)
      found.push([where, text]);
    for (const [other, its] of texts.slice(0, i)) {
      const [wide, high] = shared(at, its);
      if (wide > -2 && high > 2) found.push([where, text, other]);
    }
    for (const line of leaders) if (shared(at, line).every(size => size > 2)) found.push([where, text, 'a line']);
  });
  return found;
})"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", ["chapter", "beside"])
def test_no_text_of_a_picture_is_cut_or_covers_another(visit, width, which, tmp_path):
    url = PAGE
    if which == "beside":
        fp8, other = (str(ROOT / "results" / name / "triton_fp8_advanced.json") for name in ("h200", "h100"))
        assert main(["report", fp8, "--beside", other, "-o", str(tmp_path / "page.html")]) == 0
        url = (tmp_path / "page.html").as_uri()
    assert visit(width, url=url).evaluate(TEXTS) == []


def test_on_a_phone_chapters_and_pictures_fit_and_a_shadow_tells_that_a_box_scrolls(visit):
    page = visit(360)
    assert page.locator("nav a").evaluate_all("all => Math.max(...all.map(a => a.getBoundingClientRect().right))") < 360
    page.wait_for_selector("#matmul .wide[tabindex]")
    assert page.locator("figure .wide[tabindex]").count() == 0
    styles = (
        "all => all.map(box => [box.scrollWidth > box.clientWidth, getComputedStyle(box).backgroundImage !== 'none'])"
    )
    told = page.locator(".wide").evaluate_all(styles)
    assert [True, True] in told
    assert all(scrolls == shown for scrolls, shown in told)


def test_names_of_variants_are_not_broken_within_a_word_on_a_phone(visit):
    page = visit(360)
    page.locator("#softmax").scroll_into_view_if_needed()
    cell = page.locator("#softmax table.times td").get_by_text("torch.compile", exact=True).first
    height = cell.evaluate("each => parseFloat(getComputedStyle(each).lineHeight)")
    assert cell.bounding_box()["height"] < 2 * height


def test_beside_a_wide_picture_stands_its_caption(visit):
    for width, beside in ((1400, True), (360, False)):
        figure = visit(width).locator("#softmax figure").first
        picture, caption = (figure.locator(each).bounding_box() for each in ("svg", "figcaption"))
        assert (caption["x"] >= picture["x"] + picture["width"]) == beside


def test_tables_sort_by_number_and_by_name(visit):
    page = visit()
    table = page.locator("#matmul table.sort").first
    head = table.locator("th", has_text="TFLOP/s")
    column = head.evaluate("each => each.cellIndex")

    def values():
        return table.locator("tbody tr").evaluate_all("(rows, i) => rows.map(row => +row.cells[i].dataset.v)", column)

    before = values()
    head.get_by_role("button").click()
    assert values() == sorted(before)
    assert head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").press("Enter")  # by the keyboard, too
    assert values() == sorted(before, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    table.locator("th", has_text="variant").get_by_role("button").click()
    names = table.locator("tbody td:nth-child(2)").all_inner_texts()
    assert names == sorted(names, key=str.lower)
    assert table.locator("[aria-sort]").count() == 1


@pytest.mark.parametrize(
    ("words", "leads_to"),
    [
        ("is TMA faster than ordinary loads, and when?", "tma_matmul"), ("softmax", "softmax"),
        ("should I pad my batches or use dynamic shapes?", "dynamic_shapes"), ("again and again", "recompilation"),
        ("which compile mode for a single-token decode?", "modes"), ("is FP8 worth it for a 4096 GEMM", "fp8_matmul"),
        ("why does my function compile again and again?", "recompilation"),
    ],
)  # fmt: skip
def test_search_finds_by_name_question_and_symptom(visit, words, leads_to):
    page = visit()
    page.keyboard.press("/")
    page.keyboard.type(words)
    assert page.locator("#found a[href]").evaluate_all(f"all => all.some(a => a.hash === '#{leads_to}')")
    page.locator(f"#found a[href='#{leads_to}']").click()
    page.wait_for_url(f"**#{leads_to}")
    assert page.locator("#found").is_hidden()
    assert (
        page.locator(f"#{leads_to} h3").first.bounding_box()["y"] > page.locator("header").bounding_box()["height"] - 1
    )


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("different sizes", {"dynamic_shapes"}), ("one token 1B", {"modes", "large_models"}),
        ("recompiles again and again", {"recompilation"}), ("compiles again", {"recompilation"}),
        ("is TMA faster than ordinary loads", {"tma_matmul", "tma_copy"}), ("pad or dynamic", {"dynamic_shapes"}),
        ("mode for one token", {"modes"}), ("FP8 at 4096", {"fp8_matmul"}), ("num_stages", {"pipelined_matmul"}),
        ("varying sequence lengths", {"dynamic_shapes"}), ("softm", {"softmax"}), ("layernorm", {"layer_norm"}),
        ("fused_layer_norm_quantize", {"fused_layer_norm_quantize"}), ("should I use max-autotune?", {"modes"}),
        ("LayerNorm that writes FP8", {"fused_layer_norm_quantize"}), ("my model recompiles, why?", {"recompilation"}),
        ("is FP8 accurate enough for training?", {"accuracy", "llama_block"}),
        ("which attention kernel should I use?", {"flash_attention", "decode_attention"}),
        ("sotfmax", {"softmax"}), ("recompilaton", {"recompilation"}), ("int4 weights", {"weight_only_matmul"}),
    ],
)  # fmt: skip
def test_search_tells_first_what_answers(visit, words, first):
    page = visit()
    page.locator("#q").fill(words)
    assert page.locator("#found a").first.get_attribute("href").removeprefix("#") in first


def test_what_is_found_has_its_title_and_the_name_of_its_file(visit):
    page = visit()
    page.locator("#q").fill("writes fp8")
    found = page.locator("#found a[href='#fused_layer_norm_quantize']")
    assert found.inner_text().startswith(page.locator("#fused_layer_norm_quantize h3 > a:not(.tag)").text_content())
    assert found.locator("code").inner_text() == "fused_layer_norm_quantize"
    page.locator("#q").fill("triton kernel compile")
    assert page.locator("#found a").count() > 5
    assert "older code" not in page.locator("#found").inner_text(), "the mark of a section is no part of its title"


def test_search_finds_all_of_decoding_and_tells_the_verdict_of_a_claim(visit):
    page = visit()
    page.locator("#q").fill("decoding")
    found = page.locator("#found a").evaluate_all("all => all.map(a => a.hash)")
    assert {"#decode_attention", "#weight_only_matmul", "#modes", "#large_models"} <= {*found}
    page.locator("#q").fill("dynmaic shapes")
    assert page.get_by_role("status").inner_text().endswith("with dynamic")
    claim = page.locator("#found a[href='#claim-dynamic-recompiles']")
    assert claim.locator("b").inner_text() == page.locator("#claim-dynamic-recompiles td b").inner_text()
    assert claim.inner_text().startswith("claim: ")


def test_what_is_not_found_is_said_and_escape_closes(visit):
    page = visit(360)
    page.locator("#q").fill("xylophone quartz")
    assert page.get_by_role("status").inner_text() == "0 found"
    page.keyboard.press("Escape")
    assert page.locator("#found").is_hidden()
    page.locator("#q").fill("tma copy")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**#tma_copy")  # which the browser tells a moment later


def test_the_keyboard_reaches_everything_and_shows_where_it_is(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["y"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for _ in range(3):
        page.keyboard.press("Tab")
    shown = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert (page.evaluate("document.activeElement.tagName"), shown) == ("A", "solid")
    roof = page.locator("#triton_examples figure svg a").last
    roof.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**#*")
    boxes = page.locator(".wide").evaluate_all(
        "all => all.filter(b => b.scrollWidth > b.clientWidth && b.tabIndex < 0)"
    )
    assert boxes == []


def test_print_hides_nothing_that_matters(visit):
    page = visit()
    assert page.locator("details.code:not([open])").count() > 0
    page.emulate_media(media="print")
    page.wait_for_function("!document.querySelector('details.code:not([open])')")
    assert page.locator("header").is_hidden()
    assert page.locator("#matmul pre").first.is_visible()
    assert page.locator("#claims table").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_on_paper_tables_are_whole_and_studies_as_the_reader_left_them(visit):
    page = visit(703)  # A4 between margins of 12 mm
    page.emulate_media(media="print")
    page.wait_for_function("!document.querySelector('details.code:not([open])')")
    assert not page.locator("#matmul .study table").first.is_visible()
    widest = "all => Math.max(...all.filter(t => !t.closest('.study')).map(t => t.getBoundingClientRect().right))"
    assert page.locator("article table").evaluate_all(widest) <= page.locator("main").bounding_box()["width"] - 15


def test_colours_of_series_follow_the_scheme(visit):
    script = "getComputedStyle(document.querySelector('#matmul figure path[style*=c1]')).stroke"
    light, dark = (visit(scheme=scheme).evaluate(script) for scheme in SCHEMES)
    assert light != dark
