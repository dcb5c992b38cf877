"""Reader of one JSON array of any size in bounded memory. It continues after a broken element.

It reads the buffer in one of two ways:

- Fast: guess a comma between two elements near the end of the buffer (`}, {` and the first key of the first element),
  enclose everything before it in brackets, and parse this batch with orjson. If that is valid JSON, the guess was
  right, because these bytes have no other interpretation. 300 to 500 MB/s.
- Slow, where the fast way fails: find the end of one element with the decoder of the standard library, and parse the
  element like a JSON line. The decoder gets the bytes as Latin-1, in which every byte is one character and the JSON
  structure is the same as in UTF-8. So invalid UTF-8 affects only its own element.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import orjson

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.json_rows import parse_row
from z2all_ds.corpus.forms.slices import ReadLimits, Row, printable
from z2all_ds.corpus.forms.streams import Stream
from z2all_ds.corpus.schema import may_be_huge_number

FILL_BYTES = 2**20
_BLANKS = b" \t\r\n"
_ANY_BORDER = re.compile(rb"\}\s{0,200},\s{0,200}(?=\{)")
_FIRST_KEY = re.compile(rb'\{\s*("(?:[^"\\]|\\.){0,200}")\s*:')
_BORDER_BYTES = 2048
"""More than the expressions above can match."""
_GUESS_IN_LAST_BYTES = 64 * 2**10
_DOUBT_BYTES = 64
"""An error this near to the end of the buffer may come from the cut, not from the file."""
_FIND_END = json.JSONDecoder(strict=False, parse_int=float).raw_decode  # int() refuses more than 4,300 digits


class _Buffer:
    """A part of the stream; `data[at:]` is unread."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.data, self.at, self.ended = b"", 0, False
        self._lines_dropped = 0

    def grow(self, size: int | None = None) -> bool:
        """Drop the bytes already read and append up to `size` bytes; return False at the end of the file."""
        if self.ended:
            return False
        self._lines_dropped += _line_ends(self.data, self.at)
        size = size or FILL_BYTES
        more = self._stream.read(size)
        self.data, self.at, self.ended = self.data[self.at :] + more, 0, len(more) < size
        return bool(more)

    def line_finder(self) -> Callable[[], int]:
        """Return a function that counts the line number of the next byte, as counting costs more than reading."""
        dropped, data, at = self._lines_dropped, self.data, self.at
        return lambda: dropped + _line_ends(data, at) + 1

    def left(self) -> int:
        return len(self.data) - self.at

    def skip_blanks(self) -> bytes:
        """Move to the next byte that is not whitespace and return it; b"" at the end of the file."""
        while True:
            while rest := self.data[self.at : self.at + 256]:
                blanks = len(rest) - len(rest.lstrip(_BLANKS))
                self.at += blanks
                if blanks < len(rest):
                    return self.data[self.at : self.at + 1]
            if not self.grow():
                return b""


def _line_ends(data: bytes, stop: int) -> int:
    """Return the number of line ends in the first `stop` bytes. numpy counts 10 GB/s, bytes.count only 0.5."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, stop) == ord("\n"))) if stop else 0


class JsonArrayReader:
    """Reads `[{...}, {...}]`: yields rows, and a fault for each element that is not a valid object."""

    def __init__(self, stream: Stream, name: str, limits: ReadLimits) -> None:
        self._stream, self._buffer, self._name, self._limits = stream, _Buffer(stream), name, limits
        self._element = 0
        self._line: Callable[[], int] | None = None
        self._border = _ANY_BORDER
        self._slow_bytes = 0  # to read the slow way after the fast way failed
        self._fast_failures = 0
        self._over = False
        self._usual_keys: set[str] = set()  # of the first good row, as Latin-1
        self._text, self._text_of = "", b""  # the buffer as Latin-1

    def where(self) -> str:
        element = f", element {self._element}" if self._element else ""
        line = f" (line {self._line()})" if self._line else ""
        return f"{self._name}{element}{line}"

    def __iter__(self) -> Iterator[Row | Fault]:
        buffer = self._buffer
        buffer.grow()
        if buffer.data.startswith(BOM_UTF8):
            yield self._fault("bom", "before the text")
            buffer.at = len(BOM_UTF8)
        first = buffer.skip_blanks()
        if first == b"[":
            buffer.at += 1
            yield from self._elements()
        elif first or not self._stream.fault:
            yield self._not_an_array(first)
        if self._stream.fault:
            yield self._fault(self._stream.fault.kind, self._stream.fault.detail)

    def _fault(self, kind: str, detail: str) -> Fault:
        self._line = self._buffer.line_finder()
        return Fault(kind, detail)

    def _elements(self) -> Iterator[Row | Fault]:
        """Yield the elements after the opening `[`."""
        buffer = self._buffer
        next_byte = buffer.skip_blanks()
        if key := _FIRST_KEY.match(buffer.data, buffer.at):
            self._border = re.compile(_ANY_BORDER.pattern[:-1] + rb"\s{0,200}" + re.escape(key[1]) + rb"\s{0,200}:)")
        while next_byte and next_byte != b"]":  # each iteration begins where an element should
            self._line = None
            items: Sequence[Row | Fault | None] = self._batch() or [self._one()]
            if not self._usual_keys and type(items[0]) is dict:
                self._usual_keys = {key.encode().decode("latin-1") for key in items[0]}
            for item in items:
                self._element += 1
                if item is not None:
                    yield item
            if self._over:
                return
            next_byte = buffer.skip_blanks()
            if next_byte == b",":
                buffer.at += 1
                next_byte = buffer.skip_blanks()
                if next_byte == b"]":
                    yield self._fault("json", "comma before the end of the array")
            elif next_byte and next_byte != b"]":
                yield self._fault("json", "missing comma after this element")
            if next_byte == b"]":
                buffer.at += 1
                if not buffer.skip_blanks():
                    return
                yield self._fault("json", "data after the end of the array")
                # It may be a stray bracket, or the end of a list inside a broken element.
                if not self._resume(buffer.at):
                    return
                buffer.at += 1  # the comma
                next_byte = buffer.skip_blanks()
        if next_byte == b"]":
            buffer.at += 1
            if buffer.skip_blanks():
                yield self._fault("json", "data after the end of the array")
        elif not self._stream.fault:
            yield self._fault("truncated", "the array is not closed")

    def _batch(self) -> list[Row]:
        """Parse all elements before the last border in the buffer (the fast way). Return [] where that fails."""
        buffer = self._buffer
        if self._slow_bytes > 0:
            return []
        if buffer.left() < FILL_BYTES // 2:
            buffer.grow()
        border = self._last_border()
        if border is None:
            return []
        comma = buffer.data.index(b",", border.start())
        batch = b"".join((b"[", memoryview(buffer.data)[buffer.at : comma], b"]"))
        try:
            # rfind is twice as fast as `in`: the backslash is rare and is the last byte compared
            rows: list[Row] = orjson.loads(batch) if batch.rfind(b"\\u0000") < 0 else []
        except ValueError:
            rows = []
        too_long = len(batch) > self._limits.max_record_bytes
        if not rows or too_long or not _all_plain(rows):
            # One bad batch means one bad row; several in succession mean that guessing fails in this file.
            self._fast_failures += 1
            self._slow_bytes = len(batch) << min(6, self._fast_failures - 1)
            return []
        self._fast_failures = 0
        buffer.at = comma
        return rows

    def _last_border(self) -> "re.Match[bytes] | None":
        buffer = self._buffer
        for border in (self._border, _ANY_BORDER):
            for start in (max(buffer.at, len(buffer.data) - _GUESS_IN_LAST_BYTES), buffer.at):
                last = None
                for last in border.finditer(buffer.data, start):  # noqa: B007
                    pass
                if last:
                    return last
        return None

    def _one(self) -> Row | Fault | None:
        """Parse one element (the slow way). Return None at the end of a stream that ends with a fault."""
        buffer = self._buffer
        while True:
            self._line = buffer.line_finder()
            try:
                _, end = _FIND_END(self._latin1(), buffer.at)
            except json.JSONDecodeError as error:
                failed_at, why = error.pos, error.msg
            except RecursionError:
                failed_at, why = buffer.at, "nested too deeply"
            else:
                if end < len(buffer.data) or buffer.ended or self._text[end - 1] in '}]"':
                    return self._take(end)
                failed_at, why = end, "a number is cut"
            if why.startswith("Unterminated") or failed_at >= len(buffer.data) - _DOUBT_BYTES:
                rest = buffer.data.rstrip() if buffer.ended else b""
                # an error before the closing bracket is a broken last element
                if buffer.ended and not (rest.endswith(b"]") and failed_at < len(rest) - 1):
                    self._over = True
                    return None if self._stream.fault else Fault("truncated", "the file ends inside this element")
                if not buffer.ended:
                    if buffer.left() > self._limits.max_record_bytes:
                        return self._give_up("too_long", f"more than {buffer.left():,} bytes", len(buffer.data))
                    buffer.grow(max(FILL_BYTES, buffer.left()))
                    continue
            return self._give_up("json", f"{why} at byte {failed_at - buffer.at + 1} of the element", buffer.at + 1)

    def _take(self, end: int) -> Row | Fault:
        buffer = self._buffer
        element = buffer.data[buffer.at : end]
        self._slow_bytes -= end - buffer.at
        buffer.at = end
        if len(element) > self._limits.max_record_bytes:
            return Fault("too_long", f"{len(element):,} bytes; the limit is {self._limits.max_record_bytes:,}")
        return parse_row(element)

    def _give_up(self, kind: str, detail: str, search_from: int) -> Fault:
        if not self._resume(search_from) and self._stream.fault:
            self._over = True
        return Fault(kind, detail)

    def _resume(self, search_from: int) -> bool:
        """Move to the comma before the next element that can be recognized, else to the end of the file."""
        buffer = self._buffer
        buffer.at = max(buffer.at, search_from - _BORDER_BYTES) if search_from == len(buffer.data) else search_from
        while True:
            for border in (self._border, _ANY_BORDER):
                found = next((b for b in border.finditer(buffer.data, buffer.at) if self._may_begin(b.end())), None)
                if found:
                    self._slow_bytes -= found.end() - buffer.at
                    buffer.at = buffer.data.index(b",", found.start())
                    return True
            if buffer.ended:
                break
            buffer.at = max(buffer.at, len(buffer.data) - _BORDER_BYTES)
            buffer.grow()
        rest = buffer.data.rstrip()
        buffer.at = len(rest) - 1 if rest.endswith(b"]") else len(buffer.data)
        return False

    def _may_begin(self, offset: int) -> bool:
        """Return whether an element may begin here: an object inside a broken element has fewer of the usual keys."""
        try:
            value, _ = _FIND_END(self._latin1(), offset)
        except (ValueError, RecursionError):
            return True  # broken too, or cut by the end of the buffer
        return 2 * len(self._usual_keys & value.keys()) >= len(self._usual_keys)

    def _latin1(self) -> str:
        if self._text_of is not self._buffer.data:
            self._text, self._text_of = self._buffer.data.decode("latin-1"), self._buffer.data
        return self._text

    def _not_an_array(self, first: bytes) -> Fault:
        if not first:
            return self._fault("empty_file", "no content")
        if first != b"{":
            return self._fault("json", f"begins with {first.decode('latin-1')!a}, an array begins with '['")
        head = self._buffer.data[self._buffer.at : self._buffer.at + 64 * 2**10]
        if type(parse_row(head.partition(b"\n")[0])) is dict:
            return self._fault("not_an_object", "JSON lines instead of an array; read it with the form jsonl")
        if key := re.search(rb'"([^"\\\x00-\x1f]{1,80})"\s*:\s*\[', head):
            name = printable(key[1].decode("utf-8", "replace"))
            detail = f"an object with a list under {name!r}; convert it to jsonl: jq -c '.{name}[]'"
            return self._fault("not_an_object", detail)
        return self._fault("not_an_object", "an object instead of an array; one object per line is the form jsonl")


def _all_plain(rows: list[Row]) -> bool:
    """Return whether all are objects without a number that orjson may have changed."""
    for row in rows:
        if type(row) is not dict:
            return False
        for value in row.values():
            kind = type(value)
            if kind is not str and kind is not int and may_be_huge_number(value):
                return False
    return True
