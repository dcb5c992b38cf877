"""Opening the board's page: with a token and without, and while a long file is still being read."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
import uvicorn

from tests.helpers.board_page import GRAPHS, TRACE
from tests.helpers.board_runs import write_run
from tests.helpers.browser import browser, until
from z2all_ds.track.board import pace
from z2all_ds.track.board.curves import SAMPLE_FROM_BYTES, one_at_a_time
from z2all_ds.track.board.serve import bind
from z2all_ds.track.board.server import make_app
from z2all_ds.track.board.watch import Watch


@contextmanager
def served(place: Path, token: str | None = None) -> Iterator[str]:
    """The board's own server in this process, where a test can hold up its reading."""
    watch = Watch([str(place)])
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(make_app(watch, token, port), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        watch.start()
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = server.force_exit = True
            watch.stop()
            thread.join()


def test_a_token_opens_the_board_and_reading_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "long", 5500)
    assert (tmp_path / "long" / "metrics.jsonl").stat().st_size > SAMPLE_FROM_BYTES
    with ExitStack() as stack:
        chromium = stack.enter_context(browser())
        held_up = stack.enter_context(ExitStack())
        held_up.enter_context(one_at_a_time)
        address = stack.enter_context(served(tmp_path / "long", "geheim"))
        page = stack.enter_context(closing(chromium.new_page()))
        refused = page.goto(address)
        assert refused is not None and refused.status == 403
        assert page.inner_text("body").startswith("token missing or wrong")
        assert page.evaluate("async () => (await fetch('/api/runs')).status") == 403
        page.goto(f"{address}/?every=0.1&token=geheim")
        assert page.url == f"{address}/?every=0.1"
        assert page.evaluate("() => document.cookie") == ""  # scripts cannot read it
        until(page, "() => !(document.querySelector('.reading')?.hidden ?? true)")
        assert page.inner_text(".reading") == "reading 0 %, curves are a sample until then"
        sample = until(page, TRACE, ["loss", "0", "loss", "raw"])
        assert sample["x"][0] < 20 and sample["x"][-1] > 5480
        held_up.close()
        until(page, "() => document.querySelector('.reading').hidden")
        until(page, f"() => ({TRACE})(['loss', '0', 'loss', 'raw']).x.at(-1) > 5490")


def test_curves_are_seen_before_the_library_is_there(tmp_path: Path) -> None:
    """And while it cannot be had; every chart is Plotly's as soon as it can."""
    write_run(tmp_path / "run", 300)
    sketched = "[...document.querySelectorAll('.plot .sketch')]"
    with browser() as chromium, served(tmp_path / "run") as address, closing(chromium.new_page()) as page:
        page.route("**/plotly.js", lambda route: route.abort())
        page.goto(address)
        until(page, f"() => {GRAPHS}.length > 8 && {sketched}.length === {GRAPHS}.length")
        (loss,) = page.locator(".card[data-key=loss] .sketch").all()
        paths = loss.evaluate("sketch => [...sketch.querySelectorAll('path')].map(path => path.getAttribute('d'))")
        assert max(path.count("L") for path in paths) == 299
        assert not any("NaN" in path for path in paths)
        low, first, last = loss.evaluate(
            "sketch => [...sketch.querySelectorAll('text')].slice(1).map(text => text.textContent)"
        )
        assert 2 < float(low) < 2.6 and (first, float(last)) == ("0", pytest.approx(300, abs=20))
        until(page, "() => document.querySelector('#banner').textContent.includes('charts could not be loaded')")
        page.unroute("**/plotly.js")
        until(page, f"() => {GRAPHS}.every(graph => graph.data) && !{sketched}.length")
        assert len(until(page, TRACE, ["loss", "0", "loss", "raw"])["x"]) == 300


def test_a_page_that_opens_holds_up_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "GIVE_WAY_SECONDS", 3600.0)
    write_run(tmp_path / "long", 5500)

    def read_share(address: str) -> float:
        with urlopen(f"{address}/api/runs") as answer:
            (run,) = json.load(answer)["runs"]
        return float(run["read_share"])

    with ExitStack() as held_up:
        held_up.enter_context(one_at_a_time)
        with served(tmp_path / "long") as address:
            with urlopen(address) as page:
                assert b"z2all board" in page.read()
            held_up.close()  # the first step was about to begin; the others wait
            end = time.monotonic() + 20
            while not read_share(address) and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.5)
            assert 0 < read_share(address) < 0.5
