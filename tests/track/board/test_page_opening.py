"""Opening the board's page: with and without a token, without the chart library, and while a long file is read."""

import json
import re
import time
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.helpers.board_page import GRAPHS, TRACE, served
from tests.helpers.board_runs import write_run
from tests.helpers.browser import browser, until
from z2all_ds.bench.board import logged_in
from z2all_ds.track.board import run as board_run
from z2all_ds.track.board.curves import SAMPLE_FROM_BYTES, one_at_a_time


def test_a_token_opens_the_board_and_the_progress_of_reading_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "long", 5500)
    assert (tmp_path / "long" / "metrics.jsonl").stat().st_size > SAMPLE_FROM_BYTES
    with ExitStack() as stack:
        chromium = stack.enter_context(browser())
        held_up = stack.enter_context(ExitStack())
        held_up.enter_context(one_at_a_time)
        given = stack.enter_context(served(tmp_path / "long"))
        address = given.partition("/?")[0]
        page = stack.enter_context(closing(chromium.new_page()))
        refused = page.goto(address)
        assert refused is not None and refused.status == 403
        assert page.inner_text("body").startswith("token missing or wrong")
        assert page.evaluate("async () => (await fetch('/api/runs')).status") == 403
        page.goto(f"{given}&every=0.1")
        assert page.url == f"{address}/?every=0.1"
        assert page.evaluate("() => document.cookie") == ""  # scripts cannot read the cookie
        until(page, "() => !(document.querySelector('.reading')?.hidden ?? true)")
        assert page.inner_text(".reading") == "reading 0 %, curves are a sample until then"
        sample = until(page, TRACE, ["loss", "0", "loss", "raw"])
        assert sample["x"][0] < 20 and sample["x"][-1] > 5480
        held_up.close()
        until(page, "() => document.querySelector('.reading').hidden")
        until(page, f"() => ({TRACE})(['loss', '0', 'loss', 'raw']).x.at(-1) > 5490")


def test_curves_are_sketched_until_the_chart_library_is_loaded(tmp_path: Path) -> None:
    """The sketches stay while the library cannot be loaded; then Plotly draws every chart. A single record is a dot."""
    write_run(tmp_path / "run", 300)
    write_run(tmp_path / "short", 1)
    sketched = "[...document.querySelectorAll('.plot .sketch')]"
    with browser() as chromium, served(tmp_path) as address, closing(chromium.new_page()) as page:
        page.route("**/plotly.js", lambda route: route.abort())
        page.goto(address)
        both = "['0', '1'].every(run => document.querySelector(`.card[data-key='time_split ${run}'] .sketch`))"
        until(page, f"() => {both} && {sketched}.length === {GRAPHS}.length")
        (loss,) = page.locator(".card[data-key=loss] .sketch").all()
        paths = loss.evaluate("sketch => [...sketch.querySelectorAll('path')].map(path => path.getAttribute('d'))")
        assert max(path.count("L") for path in paths) == 299
        assert not any("NaN" in path for path in paths)
        assert sum(re.fullmatch(r"M[0-9.]+ [0-9.]+h0", path) is not None for path in paths) == 1
        assert page.locator(".card[data-key='time_split 1'] path[d$=h0]").count() == 8
        low, first, last = loss.evaluate(
            "sketch => [...sketch.querySelectorAll('text')].slice(1).map(text => text.textContent)"
        )
        assert 2 < float(low) < 2.6 and (first, float(last)) == ("0", pytest.approx(300, abs=20))
        until(page, "() => document.querySelector('#banner').textContent.includes('charts could not be loaded')")
        page.route("**/plotly.js", lambda route: route.fulfill(content_type="text/javascript", body="// cut short"))
        loaded = "async () => (await import('/page/library.js')).load().then(() => 'loaded', error => error.message)"
        assert "charts could not be loaded" in page.evaluate(loaded)
        page.unroute("**/plotly.js")
        until(page, f"() => {GRAPHS}.every(graph => graph.data) && !{sketched}.length")
        assert len(until(page, TRACE, ["loss", "0", "loss", "raw"])["x"]) == 300
        assert page.locator(".card[data-key=lr] .scatterlayer .point").count() == 1
        assert page.locator(".card[data-key='time_split 1'] .scatterlayer .point").count() == 8


def test_opening_a_page_delays_the_reading_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_run, "YIELD_SECONDS", 3600.0)
    write_run(tmp_path / "long", 5500)

    def read_share(address: str) -> float:
        with opener.open(urljoin(address, "/api/runs")) as answer:
            (run,) = json.load(answer)["runs"]
        return float(run["read_share"])

    with ExitStack() as held_up:
        held_up.enter_context(one_at_a_time)
        with served(tmp_path / "long") as address:
            opener = logged_in(address)
            with opener.open(address) as page:
                assert b"z2all board" in page.read()
            held_up.close()  # the first step of reading was about to begin; the others wait
            end = time.monotonic() + 20
            while not read_share(address) and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.5)
            assert 0 < read_share(address) < 0.5
