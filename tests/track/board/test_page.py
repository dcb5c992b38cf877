"""The board's page in a real browser, served by a real board process that reads real files."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.board_page import GRAPHS, TRACE, drag, hovered
from tests.helpers.board_runs import DOMAINS, START_UNIX, append, event, metric, write_run
from tests.helpers.browser import Watch, browser, until
from tests.helpers.command import COMMAND, environment
from tests.helpers.processes import ended

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = "<img src=x onerror=alert(1)>"
HOSTILE_DOMAINS = ("<b>bold</b>%{x}", '<a href="javascript:alert(1)">a,b</a>')
FIRST, SECOND, ODD, LIVE = "0", "1", "2", "3"
STEPS = {FIRST: 2000, SECOND: 300, ODD: 120, LIVE: 150}
CHARTS = (
    "loss",
    "domain_loss",
    "validation_loss",
    "validation_perplexity",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "mfu",
)
PROBE_CHARTS = ("probes_probability", "probes_perplexity", "probes_margin", "probes")
AGAIN_UNIX = START_UNIX + 400
HIDE = {FIRST: "first", SECOND: "second", ODD: HOSTILE, LIVE: "live"}

RANGES = f"() => {GRAPHS}.map(graph => graph.layout.xaxis.range)"
NUM_POINTS_IN_RANGE = """() => {
  const graph = document.querySelector('.card[data-key=loss] .plot');
  const [from, to] = graph.layout.xaxis.range;
  const trace = graph.data.find(({ meta }) => meta.run === '0' && meta.part === 'raw');
  return [...trace.x].filter(x => x >= from && x <= to).length;
}"""
RUNS_DRAWN = """() => [...new Set([...document.querySelectorAll('.card .plot')].flatMap(graph =>
  (graph.data || []).map(({ meta }) => meta.run).filter(Boolean)))].sort().join()"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    write_run(folder / "first", STEPS[FIRST], of_steps=4000)
    write_run(folder / "second", STEPS[SECOND], seed=7, lr=1e-4)
    write_run(folder / HOSTILE, STEPS[ODD], domains=HOSTILE_DOMAINS)
    write_run(folder / "live", STEPS[LIVE], seed=9)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Yield the address of a board that shows the four runs."""
    words = folder / "words"
    with words.open("w") as out:
        command = [*COMMAND, "board", *(str(folder / name) for name in HIDE.values()), "--port", "0"]
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=environment())
    with ended(process):
        end = time.monotonic() + 60
        while "http://" not in words.read_text():
            assert process.poll() is None and time.monotonic() < end, words.read_text()
            time.sleep(0.05)
        yield next(word for word in words.read_text().split() if word.startswith("http://"))


@pytest.fixture(scope="module")
def opened(address: str) -> "Iterator[tuple[Page, Watch]]":
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1400, "height": 1000}, color_scheme="light")
        watch = Watch(page, address)
        page.goto(f"{address}&every=0.2#hide=first")
        yield page, watch


@pytest.fixture
def page(opened: "tuple[Page, Watch]") -> "Iterator[Page]":
    """Yield the page in its default size; after each test, check that it has no errors and no injected elements."""
    page, watch = opened
    page.set_viewport_size({"width": 1400, "height": 1000})
    page.keyboard.press("Escape")
    yield page
    assert watch.errors == []
    assert page.evaluate("() => !document.querySelector('main img, aside img, main a')")


def show(page: "Page", *runs: str, **words: str) -> None:
    """Show only these runs, through the hash of the URL, and wait until their curves are drawn."""
    hidden = [name for run, name in HIDE.items() if run not in runs]
    words_of_hash = """([hidden, words]) => {
      const hash = new URLSearchParams(words);
      hidden.forEach(name => hash.append('hide', name));
      location.hash = hash.toString();
    }"""
    page.evaluate(words_of_hash, [hidden, words])
    until(page, f"wanted => ({RUNS_DRAWN})() === wanted", ",".join(sorted(runs)))
    until(page, f"() => {GRAPHS}.every(graph => graph.layout)")


def loss_of(page: "Page", run: str, part: str = "smooth") -> dict[str, Any]:
    return until(page, TRACE, ["loss", run, "loss", part])


def test_every_chart_shows_the_records(page: "Page") -> None:
    show(page, SECOND, smooth="1")
    until(page, f"() => {GRAPHS}.every(graph => graph.data?.length)")
    keys = page.evaluate("() => [...document.querySelectorAll('.card')].map(card => card.dataset.key)")
    assert keys == [*CHARTS, f"time_split {SECOND}", "memory", *PROBE_CHARTS]
    raw = loss_of(page, SECOND, "raw")
    records = [metric(step, seed=7) for step in range(1, STEPS[SECOND] + 1)]
    assert raw["x"] == [record["step"] for record in records]
    assert raw["y"] == pytest.approx([record["loss"] for record in records], rel=1e-6)
    domain = until(page, TRACE, ["domain_loss", SECOND, f"loss_of_{DOMAINS[0]}", "raw"])
    assert domain["name"] == DOMAINS[0]
    assert domain["y"][-1] == pytest.approx(records[-1][f"loss_of_{DOMAINS[0]}"], rel=1e-6)
    validation = until(page, TRACE, ["validation_loss", SECOND, "validation_loss", "raw"])
    assert validation["x"] == [50, 100, 150, 200, 250, 300]
    alternative = page.get_attribute(".card[data-key=loss] .plot", "aria-label")
    assert alternative == f"Loss over step, last values: loss {records[-1]['loss']:.3f}"


def test_many_records_are_merged_into_points_with_a_band(page: "Page") -> None:
    show(page, FIRST)
    raw = loss_of(page, FIRST, "raw")
    assert 400 <= len(raw["x"]) <= 800
    assert max(loss_of(page, FIRST, "band")["y"]) > max(raw["y"])


def test_runs_are_switched_on_and_off(page: "Page") -> None:
    show(page, FIRST, SECOND)
    page.keyboard.press("2")
    until(page, f"() => ({RUNS_DRAWN})() === '0'")
    assert "hide=second" in page.evaluate("location.hash")
    assert not page.is_checked(f"input[data-run='{SECOND}']")
    page.check(f"input[data-run='{SECOND}']")
    until(page, f"() => ({RUNS_DRAWN})() === '0,1'")
    card = page.locator("#runs > li").first.inner_text()
    assert "2,000 / 4,000 steps, 50.0 %" in card
    assert "MFU" in card
    colours = page.evaluate(
        "() => document.querySelector('.card[data-key=loss] .plot').data"
        ".filter(({ meta }) => meta.part === 'smooth').map(({ line }) => line.color)"
    )
    assert len(set(colours)) == 2


def test_zooming_by_mouse_zooms_all_charts_and_shows_more_detail(page: "Page") -> None:
    show(page, FIRST)
    until(page, f"() => {GRAPHS}.every(graph => graph.data?.length)")
    everything = page.evaluate(RANGES)
    assert all(found == everything[0] for found in everything)
    drag(page, "loss", 0.5, 0.6)
    until(page, f"() => new Set(({RANGES})().map(String)).size === 1 && ({RANGES})()[0][1] < 1300")
    low, high = page.evaluate(RANGES)[0]
    assert (low, high) == pytest.approx((1000, 1200), abs=30)
    until(page, f"() => ({NUM_POINTS_IN_RANGE})() > 190")  # all 200 steps; before the zoom, one point merged three
    assert "&zoom=" in page.evaluate("location.hash")
    box = page.locator(".card[data-key=loss] .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.dblclick(box["x"] + 50, box["y"] + 50)
    until(page, f"wanted => String(({RANGES})()[0]) === wanted", ",".join(map(repr, everything[0])))
    assert "zoom=" not in page.evaluate("location.hash")


@pytest.mark.extended
def test_keys_zoom_pan_and_choose_axes(page: "Page") -> None:
    show(page, SECOND)
    loss_of(page, SECOND)
    page.keyboard.press("+")
    low, high = until(page, f"() => ({RANGES})()[0][1] < 250 && ({RANGES})()[0]")
    page.keyboard.press("ArrowRight")
    moved = until(page, f"low => ({RANGES})()[0][0] > low && ({RANGES})()[0]", low)
    assert moved[1] - moved[0] == pytest.approx(high - low, rel=0.01)
    page.keyboard.press("0")
    until(page, f"() => ({RANGES})()[0][1] > 300")
    page.keyboard.press("l")
    until(page, f"() => {GRAPHS}[0].layout.yaxis.type === 'log'")
    linear = page.evaluate("() => document.querySelector('.card[data-key=lr] .plot').layout.yaxis.type")
    assert linear == "linear"
    page.keyboard.press("x")
    until(page, f"last => [...{GRAPHS}[0].data.find(({{meta}}) => meta.run).x].at(-1) === last", 65536 * STEPS[SECOND])
    page.keyboard.press("x")
    until(page, f"() => Math.abs([...{GRAPHS}[0].data.find(({{meta}}) => meta.run).x].at(-1) - 300) < 1")
    assert "seconds" in page.evaluate(f"() => {GRAPHS}[0].layout.xaxis.title.text")
    assert page.evaluate("location.hash") == "#x=time&log=1" + "".join(
        page.evaluate("name => '&' + new URLSearchParams({ hide: name })", name)
        for name in (HIDE[FIRST], HIDE[ODD], HIDE[LIVE])
    )
    page.keyboard.press("?")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    until(page, "() => !document.getElementById('help').open")


def test_new_records_appear_and_a_truncated_run_is_followed(page: "Page", folder: Path) -> None:
    show(page, LIVE, smooth="1")
    metrics = folder / "live" / "metrics.jsonl"
    assert loss_of(page, LIVE, "raw")["x"][-1] == 150
    box = page.locator(".card[data-key=lr] .plot")
    box.scroll_into_view_if_needed()
    scrolled = page.evaluate("scrollY")
    append(metrics, [metric(step, seed=9) for step in range(151, 181)])
    last = "([wanted, height]) => { const found = (" + TRACE + ")(['loss', '3', 'loss', 'raw']);"
    last += " return found.x.at(-1) === wanted && Math.abs(found.y.at(-1) - height) < 1e-6 }"
    until(page, last, [180, metric(180, seed=9)["loss"]])
    assert page.evaluate("scrollY") == scrolled
    kept = metrics.read_text(encoding="utf-8").splitlines(keepends=True)[:100]
    again = [{**metric(step, seed=11), "time_unix": AGAIN_UNIX + step} for step in range(101, 131)]
    metrics.write_text("".join(kept), encoding="utf-8")
    append(metrics, again)
    append(folder / "live" / "events.jsonl", [{**event("started", 100, world_size=4), "time_unix": AGAIN_UNIX}])
    until(page, last, [130, again[-1]["loss"]])
    until(page, "() => document.querySelector('#events .kind').textContent === 'restart'")
    show(page, LIVE, smooth="1", x="time")
    for chart, series in (("loss", "loss"), ("domain_loss", f"loss_of_{DOMAINS[0]}"), ("memory", "memory_bytes")):
        times = f"wanted => {{ const found = ({TRACE})(wanted); return found?.x.at(-1) > 400 && found }}"
        found = until(page, times, [chart, LIVE, series, "raw"])
        assert found["x"] == sorted(found["x"])
        assert [y for x, y in zip(found["x"], found["y"], strict=True) if 100 < x < 501] == [None, None]
        assert None not in found["y"][:100] + found["y"][102:]


@pytest.mark.extended
def test_a_paused_page_sends_no_requests_until_it_is_live_again(page: "Page", folder: Path) -> None:
    show(page, LIVE)
    page.keyboard.press("p")
    until(page, "() => document.getElementById('live').textContent === 'Paused'")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(600)
    assert [address for address in asked if address.endswith("/api/runs")][1:] == []  # one may have been in flight
    page.click("#live")
    until(page, "() => document.getElementById('live').textContent === 'Live'")
    before, end = len(asked), time.monotonic() + 20
    while sum(address.endswith("/api/runs") for address in asked[before:]) < 2:
        assert time.monotonic() < end
        page.wait_for_timeout(50)


def test_an_event_shows_its_details(page: "Page") -> None:
    show(page, SECOND)
    mark = """() => {
      const graph = document.querySelector('.card[data-key=loss] .plot');
      const marks = graph.data.find(({ meta }) => meta.kind === 'spike');
      if (!marks) return null;
      const { left, top } = graph.getBoundingClientRect();
      const { xaxis, yaxis } = graph._fullLayout;
      return [left + xaxis._offset + xaxis.d2p(marks.x[0]), top + yaxis._offset + yaxis.d2p(marks.y[0])];
    }"""
    page.evaluate("scrollTo(0, 0)")
    assert "step 150: spike" in hovered(page, "loss", *until(page, mark))
    page.mouse.click(*page.evaluate(mark))
    until(page, "() => !document.getElementById('details').hidden")
    words = page.inner_text("#details")
    assert "spike at step 150" in words
    for word in ("shard_00001.jsonl.gz", DOMAINS[0], "rollback", "4800, 4832"):
        assert word in words
    page.keyboard.press("Escape")
    assert not page.is_visible("#details")
    page.focus("#events li:first-child button")
    page.keyboard.press("Enter")
    assert page.is_visible("#details")
    page.click("#details-close")
    assert page.evaluate("document.activeElement.closest('#events') !== null")
    page.click("#kinds button:has-text('spike')")
    until(page, f"() => !{GRAPHS}[0].data.some(({{ meta }}) => meta.kind === 'spike')")
    assert "spike" not in page.inner_text("#events")
    page.click("#kinds button:has-text('spike')")


def test_health_data_and_configuration_are_shown(page: "Page") -> None:
    show(page, SECOND, FIRST)
    until(page, "() => document.querySelectorAll('#health .block').length === 2")
    health = page.inner_text("#health .block:nth-child(2)")
    assert "1 of 4 ranks slow or waiting, last seen at step 300" in health
    assert "last seen at step 300" in health
    slow = page.locator("#health .block:nth-child(2) tr", has_text="slow").all_inner_texts()
    assert any(row.split()[:2] == ["2", "node-b"] for row in slow)
    until(page, "() => document.querySelectorAll('#data .block').length === 2")
    data = page.inner_text("#data .block:nth-child(2)")
    assert "Next global sample: 9,600" in data
    assert "33.3 %" in data and "31.7 %" in data and "退火" in data  # requested 1/3, actual 20 of 63
    until(page, "() => document.querySelectorAll('#config tbody tr').length === 2")
    assert page.inner_text("#config tbody").split() == [
        "optimizer.lr",
        "0.0003",
        "0.0001",
        "train.steps",
        "4000",
        "1000",
    ]
    page.check("#config-all")
    assert "model.preset" in page.inner_text("#config")
    page.fill("#config-filter", "LR")
    assert page.locator("#config tbody tr").count() == 1
    page.keyboard.press("l")  # typed into the filter, not the shortcut for the log axis
    assert page.input_value("#config-filter") == "LRl"
    page.fill("#config-filter", "")
    page.uncheck("#config-all")
    assert not page.is_checked("#log-axis")


@pytest.mark.extended
def test_probes_are_shown_by_kind(page: "Page", folder: Path) -> None:
    show(page, SECOND)
    names = {"probes_probability": "首都", "probes_perplexity": "news", "probes_margin": "语序", "probes": "old"}
    for chart, name in names.items():
        trace = until(page, TRACE, [chart, SECOND, f"probe_{name}", "raw"])
        assert trace["x"] == [50, 100, 150, 200, 250, 300]
        assert trace["y"] == pytest.approx([metric(step, seed=7)[f"probe_{name}"] for step in trace["x"]])
    kinds = "() => [...document.querySelectorAll('.card')].filter(card => card.querySelector('.plot').layout)"
    logs = page.evaluate(
        f"{kinds}.filter(card => card.querySelector('.plot').layout.yaxis.type === 'log').map(card => card.dataset.key)"
    )
    assert logs == ["validation_perplexity", "probes_probability", "probes_perplexity"]
    until(page, "() => document.querySelectorAll('#probes tbody tr').length === 4")
    assert page.inner_text("#probes p") == "2 of 3 as expected at step 300, 1 not judged"
    rows = [row.split("\t") for row in page.locator("#probes tbody tr").all_inner_texts()]
    assert rows == [
        ["news", "sentence", "123.3", "≤ 60", "fail", "300"],
        ["首都", "completion", "0.6000", "≥ 0.1", "pass", "300"],
        ["语序", "compare", "0.2500", "≥ 0 from step 250", "pass", "300"],
        ["old", "–", "7", "–", "–", "300"],
    ]


@pytest.mark.extended
def test_an_evaluation_that_is_added_later_gets_curves(page: "Page", folder: Path) -> None:
    """Probes of checkpoints that are evaluated after the run get curves; each can be switched off by its name."""
    show(page, FIRST)
    names = ["later", "zero"]
    definitions = [{"name": name, "kind": "completion", "at_least": 0.5} for name in names]
    rows = [{"step": step, "values": {"later": step / 4000, "zero": 0.0}, "passed": {}} for step in (500, 1000, 2000)]
    file = folder / "first" / "evaluations" / "probes_later.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"file": "later", "probes": definitions, "rows": rows}), encoding="utf-8")
    later = until(page, TRACE, ["probes_probability", FIRST, "probe_later", "raw"])
    assert (later["x"], later["y"]) == ([500, 1000, 2000], [0.125, 0.25, 0.5])
    zero = until(page, TRACE, ["probes_probability", FIRST, "probe_zero", "raw"])
    assert zero["y"] == [1e-12] * 3
    legend = page.locator(".card[data-key=probes_probability] .legend button")
    assert legend.all_inner_texts() == ["首都", "later", "zero"]
    drawn = """() => document.querySelector('.card[data-key=probes_probability] .plot').data
      .map(({ name }) => name).join()"""
    chart = page.locator(".card[data-key=probes_probability] .nsewdrag")
    chart.scroll_into_view_if_needed()
    legend.nth(0).click()
    until(page, f"() => ({drawn})() === 'later,zero'")
    legend.nth(1).dblclick()
    until(page, f"() => ({drawn})() === 'later'")
    box = chart.bounding_box()
    assert box is not None
    words = hovered(page, "probes_probability", box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    assert "later" in words and "step 1,000: 0.25" in words
    legend.nth(1).dblclick()
    until(page, f"() => ({drawn})() === '首都,later,zero'")
    page.mouse.move(0, 0)


def test_names_from_files_are_shown_as_text_only(page: "Page") -> None:
    show(page, ODD)
    for name in HOSTILE_DOMAINS:
        trace = until(page, TRACE, ["domain_loss", ODD, f"loss_of_{name}", "smooth"])
        assert trace["y"][-1] is not None
    legend = page.locator(".card[data-key=domain_loss] .legend li").all_inner_texts()
    assert set(legend) == set(HOSTILE_DOMAINS)
    assert page.locator("#runs .name", has_text=HOSTILE).count() == 1
    chart = page.locator(".card[data-key=domain_loss] .nsewdrag")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    hover = hovered(page, "domain_loss", box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert HOSTILE_DOMAINS[0] in hover and HOSTILE_DOMAINS[1] in hover
    page.mouse.move(0, 0)


@pytest.mark.extended
def test_narrow_screens_have_one_column_and_no_sideways_scrolling(page: "Page") -> None:
    show(page, SECOND, ODD)
    page.set_viewport_size({"width": 360, "height": 800})
    until(page, f"() => {GRAPHS}.every(graph => graph.querySelector('svg')?.clientWidth < 340)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    outside = """() => [...document.querySelectorAll('button, header input, #runs input, .card, .panel')]
      .filter(part => part.offsetParent && part.getBoundingClientRect().right > 360)
      .map(part => part.outerHTML.slice(0, 80))"""
    assert page.evaluate(outside) == []
    page.click("#zoom-in")
    until(page, "() => location.hash.includes('zoom=')")
    page.click("#zoom-reset")
    page.click("#events li:first-child button")
    box = page.locator("#details").bounding_box()
    assert box is not None and box["x"] >= 0 and box["width"] <= 360


@pytest.mark.extended
def test_all_controls_are_reachable_with_the_tab_key(page: "Page") -> None:
    show(page, SECOND)
    until(page, "() => document.querySelector('#config tbody tr')")
    page.focus(".skip")
    reached = []
    for _ in range(90):
        page.keyboard.press("Tab")
        where = """() => { const part = document.activeElement;
          const name = part.id || part.dataset.event && 'event' || part.dataset.run && 'run' || part.classList[0];
          return [name, part.matches(':focus-visible')] }"""
        name, is_seen = page.evaluate(where)
        assert is_seen, name
        reached.append(name)
        if name == "config-filter":
            break
    for name in ("smoothing", "log-axis", "zoom-in", "live", "help-button", "run", "plot", "event", "config-filter"):
        assert name in reached, reached


@pytest.mark.extended
def test_a_link_shows_the_same_view(page: "Page", address: str) -> None:
    words = "x=tokens&log=1&smooth=40&hide=first&hide=live&zoom=2000000,9000000"
    page.goto("about:blank")
    page.goto(f"{address}&every=0.2#{words}")
    until(page, f"() => ({RUNS_DRAWN})() === '1,2' && {GRAPHS}.every(graph => graph.layout)")
    assert page.evaluate(RANGES)[0] == [2_000_000, 9_000_000]
    assert page.evaluate("document.querySelector('input[name=x]:checked').value") == "tokens"
    assert page.text_content("#smoothing-words") == "40 steps"
    assert page.evaluate(f"() => {GRAPHS}[0].layout.yaxis.type") == "log"


def test_a_board_that_does_not_answer_is_reported(opened: "tuple[Page, Watch]", page: "Page") -> None:
    page.context.set_offline(True)
    until(page, "() => !document.getElementById('banner').hidden")
    assert page.inner_text("#banner").startswith("The board does not answer, retrying.")
    page.context.set_offline(False)
    until(page, "() => document.getElementById('banner').hidden")
    opened[1].errors[:] = [words for words in opened[1].errors if "ERR_INTERNET_DISCONNECTED" not in words]


def test_the_content_security_policy_blocks_injected_scripts(opened: "tuple[Page, Watch]", page: "Page") -> None:
    inject = """() => { const script = document.createElement('script');
      script.textContent = 'window.hurt = 1'; document.body.append(script); script.remove(); return window.hurt }"""
    assert page.evaluate(inject) is None
    (refusal,) = opened[1].errors
    assert "Content Security Policy" in refusal
    opened[1].errors.clear()
