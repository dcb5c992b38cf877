"""Time until a browser shows a board's curves: the machine's own Chromium, headless, driven by playwright."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from z2all_ds.base.errors import MachineError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Chromium refuses its sandbox as root, and in a container /dev/shm may be too small.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--force-device-scale-factor=1"]
PATIENCE_SECONDS = 60.0
# A mark is set in the frame after the change, when the change is visible.
MARKS = """
const wanted = { curves: '.plot path', charts: '.plot .scatterlayer path' };
new MutationObserver((_, observer) => {
  for (const [name, selector] of Object.entries(wanted)) {
    if (!document.querySelector(selector)) continue;
    delete wanted[name];
    requestAnimationFrame(() => setTimeout(() => performance.mark(name)));
  }
  if (!Object.keys(wanted).length) observer.disconnect();
}).observe(document, { subtree: true, childList: true });
"""
SECONDS = "() => ['curves', 'charts'].map(name => (performance.getEntriesByName(name)[0]?.startTime ?? 0) / 1000)"


def why_no_browser() -> str:
    """Return the reason why no browser can be started, "" if one can."""
    if find_spec("playwright") is None:
        return "playwright is not installed"
    return "" if _executable() else f"no browser on PATH (looked for {', '.join(NAMES)})"


def _executable() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def browser() -> "Iterator[Browser]":
    """Yield a new browser; call `why_no_browser` first."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=_executable(), args=ARGUMENTS)
        try:
            yield started
        finally:
            started.close()


def measure_page(context: "BrowserContext", address: str) -> dict[str, float]:
    """Open the page in a new tab. Return the seconds to a first picture of the curves, and to charts with zoom."""
    page = context.new_page()
    page.add_init_script(MARKS)
    page.goto(address, wait_until="commit")
    end = time.monotonic() + PATIENCE_SECONDS
    while not all(seconds := page.evaluate(SECONDS)):
        if time.monotonic() > end:
            raise MachineError(address, f"shows no curves in {PATIENCE_SECONDS:.0f} s", "Open it in your own browser.")
        time.sleep(0.05)
    page.close()
    return {"seconds_to_curves": round(seconds[0], 2), "seconds_to_charts": round(seconds[1], 2)}
