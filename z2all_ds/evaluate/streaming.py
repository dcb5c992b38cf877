"""Text of tokens as they come: never half a character, and nothing of a stop string or behind it."""

from collections.abc import Callable, Sequence
from typing import Any

HALF_A_CHARACTER = "\ufffd"
"""What the bytes of an unfinished character decode to."""


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there was one."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


def sure_part(text: str, stops: Sequence[str]) -> str:
    """Without the end that the next token may change: half a character, or the beginning of a stop string."""
    text = text.rstrip(HALF_A_CHARACTER)
    for length in range(max(map(len, stops), default=0), 0, -1):
        if any(len(stop) > length and text.endswith(stop[:length]) for stop in stops):
            return text[:-length]
    return text


class TextStream:
    """A streamer of transformers' generate, for one sequence."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str], write: Callable[[str], None]) -> None:
        self._decode, self._stops, self._write = decode, stops, write
        self._ids: list[int] = []
        self._shown = 0
        self._has_prompt = False

    def put(self, value: Any) -> None:
        """First the prompt, then token by token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._ids += value.reshape(-1).tolist()
        self._show(is_over=False)

    def end(self) -> None:
        self._show(is_over=True)

    @property
    def text(self) -> str:
        """All that came so far."""
        return cut_at_stop(self._decode(self._ids), self._stops)[0]

    def _show(self, is_over: bool) -> None:
        text, is_stopped = cut_at_stop(self._decode(self._ids), self._stops)
        ready = text if is_over or is_stopped else sure_part(text, self._stops)
        if len(ready) > self._shown:
            self._write(ready[self._shown :])
            self._shown = len(ready)
