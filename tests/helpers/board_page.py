"""The board's page as tests look at it: its charts, and a mouse on them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

GRAPHS = "[...document.querySelectorAll('.card .plot')]"
TRACE = """([chart, run, series, part]) => {
  const card = [...document.querySelectorAll('.card')].find(card => card.dataset.key === chart);
  const trace = card?.querySelector('.plot').data?.find(
    ({ meta }) => meta.run === run && meta.series === series && meta.part === part);
  return trace ? { x: [...trace.x], y: [...trace.y], name: trace.name, type: trace.type } : null;
}"""


def drag(page: "Page", chart: str, from_share: float, to_share: float) -> None:
    box = page.locator(f".card[data-key={chart}] .nsewdrag").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + from_share * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + to_share * box["width"], middle, steps=8)
    page.mouse.up()


def hovered(page: "Page", chart: str, left: float, top: float) -> str:
    """The words of the chart's hover label there. Drawing anew takes it away, so the mouse moves a little again."""
    for nudge in range(100):
        page.mouse.move(left + nudge % 2, top)
        page.wait_for_timeout(100)
        label = page.evaluate(f"() => document.querySelector('.card[data-key={chart}] .hoverlayer')?.textContent")
        if label:
            return str(label)
    raise AssertionError(f"no hover label on {chart}")
