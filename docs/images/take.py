"""Takes the guides' pictures of a board that is running: python docs/images/take.py ADDRESS_WITH_TOKEN OUT_DIR"""

import sys
from pathlib import Path

from z2all_ds.bench.board_page import browser

DRAWN_MILLISECONDS = 6000


def take(url: str, out: Path) -> None:
    """The page's head in light colours; in dark ones the details of a spike, where there is one."""
    with browser() as chromium:
        for name, colours in (("board", "light"), ("board_spike", "dark")):
            page = chromium.new_page(viewport={"width": 1280, "height": 900}, color_scheme=colours)
            page.goto(url)
            page.wait_for_timeout(DRAWN_MILLISECONDS)
            if name == "board_spike":
                page.get_by_text("spike of", exact=False).first.click()
                page.wait_for_timeout(DRAWN_MILLISECONDS // 4)
            page.screenshot(path=out / f"{name}.png")


if __name__ == "__main__":
    take(sys.argv[1], Path(sys.argv[2]))
