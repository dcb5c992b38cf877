"""Helpers for tests of the board's page: its server, its charts, and mouse actions on them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from z2all_ds.track.board.connections import LimitedConnection
from z2all_ds.track.board.serve import BACKLOG, bind
from z2all_ds.track.board.serve import address as address_of
from z2all_ds.track.board.server import make_app
from z2all_ds.track.board.watch import Watch

if TYPE_CHECKING:
    from playwright.sync_api import Page

GRAPHS = "[...document.querySelectorAll('.card .plot')]"
TRACE = """([chart, run, series, part]) => {
  const card = [...document.querySelectorAll('.card')].find(card => card.dataset.key === chart);
  const trace = card?.querySelector('.plot').data?.find(
    ({ meta }) => meta.run === run && meta.series === series && meta.part === part);
  return trace ? { x: [...trace.x], y: [...trace.y], name: trace.name, type: trace.type } : null;
}"""


@contextmanager
def served(place: Path, token: str = "geheim") -> Iterator[str]:
    """Run the board's server in this process, where a test can delay its reading, and yield its address."""
    watch = Watch([str(place)])
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        listening.listen()
        app = make_app(watch, token, port)
        config = uvicorn.Config(app, http=LimitedConnection, backlog=BACKLOG, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        watch.start()
        thread.start()
        try:
            yield address_of("127.0.0.1", port, token)
        finally:
            server.should_exit = server.force_exit = True
            watch.stop()
            thread.join()


def drag(page: "Page", chart: str, from_share: float, to_share: float) -> None:
    box = page.locator(f".card[data-key={chart}] .nsewdrag").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + from_share * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + to_share * box["width"], middle, steps=8)
    page.mouse.up()


def hovered(page: "Page", chart: str, left: float, top: float) -> str:
    """Return the text of the chart's hover label. Redrawing removes the label, so the mouse moves until it is shown."""
    for nudge in range(100):
        page.mouse.move(left + nudge % 2, top)
        page.wait_for_timeout(100)
        label = page.evaluate(f"() => document.querySelector('.card[data-key={chart}] .hoverlayer')?.textContent")
        if label:
            return str(label)
    raise AssertionError(f"no hover label on {chart}")
