"""Readers of text files: one JSON object per line, one document per line, or one document per file.

A slice of a file contains the lines whose first byte is in it, so slices of any size yield every line exactly once.
"""

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from functools import cached_property
from io import BytesIO
from pathlib import Path

import orjson

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.json_rows import decode_text, parse_row_slowly
from z2all_ds.corpus.forms.slices import ReadLimits, Row
from z2all_ds.corpus.forms.streams import Stream
from z2all_ds.corpus.schema import may_be_huge_number

BLOCK_BYTES = 262_144
_EMPTY_FILE = Fault("empty_file", "0 bytes")
_BOM_FAULT = Fault("bom", "before the text")
_LINE_ENDS_FAULT = Fault("line_ends", "CR LF")


class LongLine(int):
    """The size of a line that exceeds the limit of a record."""


def line_blocks(
    stream: Stream, max_line_bytes: int, *, skip_first: bool = False, size: int | None = None
) -> Iterator[bytes | LongLine]:
    """Yield blocks of whole lines with their line ends (the last may lack one), and the sizes of too long lines.

    `skip_first` drops everything up to the first line end. `size` is the number of bytes left in the slice; a line that
    crosses its end is read completely. At most one record and one block are in memory. Blocks are not split here:
    iterating an io.BytesIO yields lines at several GB/s, bytes.split only at 1 GB/s.
    """
    block_bytes = min(BLOCK_BYTES, max_line_bytes)
    open_line: list[bytes] = []
    open_bytes = 0  # of the unfinished line, also when it is too long to be kept
    skipping = skip_first
    while size is None or size > 0 or (open_bytes and not skipping):
        last_line = size is not None and size <= 0
        data = stream.read(block_bytes if size is None or last_line else min(block_bytes, size))
        if not data:
            break
        if size is not None:
            size -= len(data)
        if skipping:
            skipping = b"\n" not in data
            data = data.partition(b"\n")[2]
        # data: [rest of the open line] [whole lines] [start of the next open line]
        first_end = data.find(b"\n") + 1
        data = data[:first_end] if last_line and first_end else data
        if not first_end:
            open_bytes += len(data)
            open_line.append(data)
            if open_bytes > max_line_bytes:
                open_line.clear()
            continue
        whole_end = data.rfind(b"\n") + 1
        if open_bytes + first_end > max_line_bytes + 1:  # the line end is not part of the record
            yield LongLine(open_bytes + first_end - 1)
            whole = data[first_end:whole_end]
        else:
            whole = b"".join((*open_line, data[:whole_end]))
        if whole:
            yield whole
        open_bytes = len(data) - whole_end
        open_line = [data[whole_end:]] if open_bytes else []
        if last_line:
            return
    if stream.fault:
        return  # a partial line is not yielded
    if open_bytes > max_line_bytes:
        yield LongLine(open_bytes)
    elif open_bytes and not skipping:
        yield b"".join(open_line)


class _LineReader:
    """Base of both line readers: blocks, line numbers, faults of the whole file."""

    def __init__(self, stream: Stream, name: str, limits: ReadLimits, path: Path, start: int, stop: int | None) -> None:
        """Read the slice from byte `start` to `stop`. The stream starts one byte earlier, unless `start` is 0."""
        self._stream, self._name, self._limits, self._path = stream, name, limits, path
        self._start = start
        self._size = None if stop is None else stop - max(0, start - 1)
        self._line = 0  # of the last row or fault, counted from the first line of the slice

    def where(self) -> str:
        return f"{self._name}:{self._lines_before + self._line}"

    @cached_property
    def _lines_before(self) -> int:
        """Number of lines before the slice, which begins after the first line end at start - 1 or later."""
        if self._start == 0:
            return 0
        count, left = 1, self._start - 1
        try:
            with self._path.open("rb") as file:
                while left and (block := file.read(min(BLOCK_BYTES, left))):
                    count += block.count(b"\n")
                    left -= len(block)
        except OSError:
            pass  # a wrong line number is better than losing the fault
        return count

    def __iter__(self) -> Iterator[Row | Fault]:
        line_ends_known = False
        inside, limit = self._start > 0, self._limits.max_record_bytes
        block = None
        for block in line_blocks(self._stream, limit, skip_first=inside, size=self._size):
            if isinstance(block, LongLine):
                self._line += 1
                yield Fault("too_long", f"{block:,} bytes; the limit is {limit:,}")
                continue
            if not line_ends_known and b"\r" in block and b"\r\n" in block:
                line_ends_known = True
                lines = 1 + block.count(b"\n", 0, block.index(b"\r\n"))
                self._line += lines
                yield _LINE_ENDS_FAULT
                self._line -= lines
            yield from self._rows(block)
        if self._stream.fault:
            self._line += 1
            yield self._stream.fault
        elif block is None and not inside:
            self._line = 1
            yield _EMPTY_FILE

    def _rows(self, block: bytes) -> Iterator[Row | Fault]:
        raise NotImplementedError


class JsonlReader(_LineReader):
    """Reads one JSON object per line."""

    def _rows(self, block: bytes) -> Iterator[Row | Fault]:
        loads, line_number = orjson.loads, self._line
        # rfind is twice as fast as `in`: the backslash is rare and is the last byte compared
        nul_inside = block.rfind(b"\\u0000") >= 0
        for line in BytesIO(block):
            line_number += 1
            self._line = line_number
            try:
                row = None if nul_inside and b"\\u0000" in line else loads(line)
            except ValueError:
                row = None
            if type(row) is not dict:
                yield from self._slowly(line)
                continue
            # Inlined: a function call per row costs 20 % of the speed on rows of 700 bytes.
            for value in row.values():
                kind = type(value)
                if kind is not str and kind is not int and may_be_huge_number(value):
                    yield from self._slowly(line)
                    break
            else:
                yield row

    def _slowly(self, line: bytes) -> Iterable[Row | Fault]:
        if line.startswith(BOM_UTF8):
            yield _BOM_FAULT
            line = line.removeprefix(BOM_UTF8)
        if not line.strip():
            return
        item = parse_row_slowly(line)
        if isinstance(item, Fault) and item.kind in ("json", "utf8") and not line.endswith(b"\n"):
            item = Fault("truncated", f"the last line has no line end and is incomplete: {item.detail}")
        yield item


class LinesReader(_LineReader):
    """Reads one document per line, unchanged."""

    def _rows(self, block: bytes) -> Iterator[Row | Fault]:
        for line in BytesIO(block):
            self._line += 1
            if line.startswith(BOM_UTF8):
                yield _BOM_FAULT
                line = line.removeprefix(BOM_UTF8)
            text = decode_text(line)
            if isinstance(text, Fault):
                yield text
                continue
            text = text.removesuffix("\n").removesuffix("\r")
            if text and not text.isspace():
                yield {"text": text}


class TextReader:
    """Reads one row: {"text": the whole file, "name": its name without suffixes}."""

    def __init__(self, stream: Stream, name: str, limits: ReadLimits, stem: str) -> None:
        self._stream, self._name, self._limits, self._stem = stream, name, limits, stem

    def where(self) -> str:
        return self._name

    def __iter__(self) -> Iterator[Row | Fault]:
        limit = self._limits.max_record_bytes
        data = self._stream.read(limit + 1)
        if len(data) > limit:
            fix = "split the file, or read it with the form lines"
            yield Fault("too_long", f"more than {limit:,} bytes in one document; {fix}")
            return
        if self._stream.fault or not data:
            yield self._stream.fault or _EMPTY_FILE  # a partial document is not yielded
            return
        if data.startswith(BOM_UTF8):
            yield _BOM_FAULT
            data = data.removeprefix(BOM_UTF8)
        text = decode_text(data)
        if isinstance(text, Fault):
            yield text
            return
        if "\r\n" in text:
            yield _LINE_ENDS_FAULT
            text = text.replace("\r\n", "\n")
        yield {"text": text, "name": self._stem}
