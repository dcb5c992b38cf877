"""Text of streamed tokens: never half a character, and nothing of a stop string or after it."""

from collections.abc import Callable, Sequence
from typing import Any

HALF_A_CHARACTER = "\ufffd"
"""The decoded form of an incomplete character."""


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there was one."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


def sure_part(text: str, stops: Sequence[str]) -> str:
    """Return the text without the end that the next token may change: half a character, or the start of a stop."""
    text = text.rstrip(HALF_A_CHARACTER)
    for length in range(max(map(len, stops), default=0), 0, -1):
        if any(len(stop) > length and text.endswith(stop[:length]) for stop in stops):
            return text[:-length]
    return text


class TextStream:
    """A streamer for transformers' generate, for one sequence."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str], write: Callable[[str], None]) -> None:
        self._decode, self._stops, self._write = decode, stops, write
        self._ids: list[int] = []
        self._shown = 0
        self._has_prompt = False

    def put(self, value: Any) -> None:
        """Receive first the prompt, then token by token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._ids += value.reshape(-1).tolist()
        self._show(is_over=False)

    def end(self) -> None:
        self._show(is_over=True)

    @property
    def text(self) -> str:
        """The text so far."""
        return cut_at_stop(self._decode(self._ids), self._stops)[0]

    def _show(self, is_over: bool) -> None:
        text, is_stopped = cut_at_stop(self._decode(self._ids), self._stops)
        ready = text if is_over or is_stopped else sure_part(text, self._stops)
        if len(ready) > self._shown:
            self._write(ready[self._shown :])
            self._shown = len(ready)
