"""Parts of the board's page in a real browser: order of drawing, smoothing, zoom while a run grows, texts."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.board_page import GRAPHS, TRACE, served
from tests.helpers.board_runs import append, metric, write_run
from tests.helpers.browser import browser, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

LOSS_X = f"({TRACE})(['loss', '0', 'loss', 'smooth'])?.x"
ALL_STEPS = f"last => {{ const x = {LOSS_X}; return x?.[0] === 1 && x.at(-1) === last }}"
RANGE = f"{GRAPHS}[0].layout.xaxis.range"


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the metrics file of the only run on the page."""
    return write_run(tmp_path_factory.mktemp("board") / "grows", 100) / "metrics.jsonl"


@pytest.fixture(scope="module")
def page(metrics: Path) -> "Iterator[Page]":
    with browser() as chromium, served(metrics.parent) as address, closing(chromium.new_page()) as page:
        page.goto(f"{address}&every=0.1")
        until(page, ALL_STEPS, 100)
        yield page


def test_smoothing_hardly_depends_on_the_number_of_points(page: "Page") -> None:
    """1,200 points, and the same points merged by four, give similar curves; the first value is unchanged."""
    values = [3 + math.sin(number / 90) for number in range(1200)]
    merged = [sum(values[start : start + 4]) / 4 for start in range(0, 1200, 4)]
    smooth = """async ([values, weight]) =>
      (await import('/page/smooth.js')).smooth(values, values.map(() => weight), 30)"""
    fine, coarse = page.evaluate(smooth, [values, 1]), page.evaluate(smooth, [merged, 4])
    assert fine[0] == pytest.approx(values[0])
    assert fine[3::4] == pytest.approx(coarse, abs=0.03)
    assert max(abs(one - other) for one, other in zip(fine, values, strict=True)) > 0.2
    assert page.evaluate(smooth, [[1.0, None, 1.0], 1]) == pytest.approx([1.0, None, 1.0])


def test_new_data_does_not_keep_the_last_charts_waiting(page: "Page") -> None:
    """New data arrives after each of the first 12 drawings; the last time is a user action, which starts at the top."""
    drawings = """async () => {
      const { Charts } = await import('/page/charts.js');
      const holder = document.body.appendChild(document.createElement('div'));
      const charts = new Charts(holder, {});
      const order = [];
      const draw = isWish => charts.draw([0, 1, 2, 3, 4, 5, 6, 7].map(id => ({
        id: String(id), title: '', unit: '', words: '', legend: [], yRange: [0, 20],
        traces: [{ x: [0, 1], y: [order.length, order.length], meta: {} }],
      })), { range: [0, 1], title: '' }, isWish);
      const react = Plotly.react;
      Plotly.react = (plot, ...rest) => {
        if (!holder.contains(plot)) return react(plot, ...rest);
        order.push(Number(plot.parentNode.dataset.key));
        const done = react(plot, ...rest);
        if (order.length <= 12) draw(order.length === 12);
        return done;
      };
      await draw(true);
      Plotly.react = react;
      const figures = [...holder.querySelectorAll('.plot')].map(({ data }) => data[0].y[0]);
      holder.remove();
      return [order, figures];
    }"""
    order, figures = page.evaluate(drawings)
    assert order == [*range(8), *range(4), *range(8)]
    assert figures == [12] * 8


def test_panning_a_zoomed_view_reaches_records_written_later(page: "Page", metrics: Path) -> None:
    def written(step: int) -> None:
        until(page, f"() => document.querySelector('.steps').textContent.startsWith('{step} /')")

    page.keyboard.press("+")
    low, high = until(page, f"() => {RANGE}[1] < 90 && {RANGE}")
    append(metrics, [metric(step) for step in range(101, 301)])
    written(300)
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    moved = until(page, f"() => {RANGE}[1] > 295 && {RANGE}")
    assert moved[1] - moved[0] == pytest.approx(high - low, rel=0.01)
    page.keyboard.press("0")
    until(page, ALL_STEPS, 300)
    page.keyboard.press("+")
    page.keyboard.press("+")
    until(page, f"() => {RANGE}[1] < 200")
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    metrics.write_text("".join(lines[:150]), encoding="utf-8")  # as after a rollback
    written(150)
    page.keyboard.press("ArrowLeft")
    low, high = until(page, f"() => {RANGE}[0] < 105 && {RANGE}")
    assert (low, high) == pytest.approx((76, 152), abs=3)
    page.keyboard.press("0")


def test_texts_about_reading_and_samples(page: "Page") -> None:
    shown = """async changes => {
      const { showRuns } = await import('/page/runs.js');
      const { runs: [run] } = await (await fetch('/api/runs')).json();
      delete run.is_sample;
      showRuns([{ ...run, number: 0, ...changes }], new Set(), () => {});
      const [reading] = document.querySelectorAll('.reading');
      return [reading.hidden, reading.querySelector('progress').hidden, reading.textContent];
    }"""
    assert page.evaluate(shown, {"read_share": 1.0})[0]
    assert page.evaluate(shown, {"read_share": 1.0, "is_sample": False})[0]
    for is_sample in (True, False):
        words = [False, False, "reading 25 %, curves are a sample until then"]
        assert page.evaluate(shown, {"read_share": 0.256, "is_sample": is_sample}) == words
    words = [False, True, "curves are a sample: zoom in for every step"]
    assert page.evaluate(shown, {"read_share": 1.0, "is_sample": True}) == words


def test_unknown_values_of_a_domain_are_shown_as_dashes(page: "Page") -> None:
    shown = """async domain => {
      const { mixtureOf } = await import('/page/mixture.js');
      const block = mixtureOf({ name: 'run' }, { position: null, stages: [], domains: [domain] }, false);
      return [...block.querySelectorAll('tbody tr > *')].map(cell => cell.textContent);
    }"""
    domain = {"name": "code", "asked": 0.5, "realised": None, "recent": None, "tokens": None}
    assert page.evaluate(shown, domain) == ["code", "50.0 %", "–", "–", "–"]
