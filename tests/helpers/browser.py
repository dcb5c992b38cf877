"""A real browser for tests: the machine's own Chromium, driven by playwright."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from z2all_ds.bench import board_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@contextmanager
def browser() -> "Iterator[Browser]":
    """Yield a started browser, or skip the test with the reason why there is none."""
    if reason := board_page.why_no_browser():
        pytest.skip(reason)
    with board_page.browser() as started:
        yield started


def until(page: "Page", expression: str, argument: Any = None, seconds: float = 20) -> Any:
    """Wait until an expression is true, and return its value.

    playwright's own waiting uses eval, which the page's policy forbids.
    """
    end = time.monotonic() + seconds
    while not (value := page.evaluate(expression, argument)):
        assert time.monotonic() < end, f"not so within {seconds} s: {expression} of {argument}"
        time.sleep(0.05)
    return value


class Watch:
    """A record of everything a page must never do: log errors, throw, open dialogs, or contact another server."""

    def __init__(self, page: "Page", address: str) -> None:
        origin = address.partition("/?")[0]
        self.errors: list[str] = []
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self._see(request.url, origin))

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def _see(self, address: str, origin: str) -> None:
        if not address.startswith((f"{origin}/", "data:")):
            self.errors.append(f"asked {address}")
