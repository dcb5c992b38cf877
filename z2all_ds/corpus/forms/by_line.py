"""Readers of line forms: JSON lines, and plain text with one document a line."""

from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.judge import BOM, fast_loads, judge_json, utf8_fault
from z2all_ds.corpus.forms.line_blocks import BLOCK_BYTES, LongLine, line_blocks
from z2all_ds.corpus.forms.slices import ReadLimits, Row
from z2all_ds.corpus.forms.streams import ByteStream, Unreadable
from z2all_ds.corpus.schema import may_be_huge_number


class _ByLine:
    """What both line forms share: blocks, line numbers, byte order marks, faults of the whole file."""

    def __init__(
        self,
        stream: ByteStream,
        name: str,
        limits: ReadLimits,
        *,
        start: int = 0,
        size: int | None = None,
        path: Path | None = None,
    ) -> None:
        """A slice that starts inside a file comes with a stream that stands one byte before `start`."""
        self._stream, self._name, self._limits = stream, name, limits
        self._start, self._size, self._path = start, size, path
        self._line = 0  # of the last row or fault, counted from the slice's first line
        self._lines_before: int | None = 0 if start == 0 else None

    def where(self) -> str:
        if self._lines_before is None:
            self._lines_before = _line_ends_before(self._path, self._start)
        return f"{self._name}:{self._lines_before + self._line}"

    def __iter__(self) -> Iterator[Row | Fault]:
        said_line_ends = False
        anything = False
        size = None if self._size is None else self._size + (self._start > 0)
        blocks = line_blocks(self._stream, self._limits.max_record_bytes, skip_first=self._start > 0, size=size)
        try:
            for block in blocks:
                anything = True
                if isinstance(block, LongLine):
                    self._line += 1
                    yield Fault("too_long", f"{block.size:,} bytes; the limit is {self._limits.max_record_bytes:,}")
                    continue
                if not said_line_ends and b"\r" in block and b"\r\n" in block:
                    said_line_ends = True
                    self._line += 1 + block.count(b"\n", 0, block.index(b"\r\n"))
                    yield Fault("line_ends", "CR LF")
                    self._line -= 1 + block.count(b"\n", 0, block.index(b"\r\n"))
                yield from self._rows(block)
        except Unreadable as end:
            self._line += 1
            yield end.fault
        else:
            if not anything and self._start == 0:
                self._line = 1
                yield Fault("empty_file", "no bytes in it")

    def _rows(self, block: bytes) -> Iterator[Row | Fault]:
        raise NotImplementedError


class JsonlReader(_ByLine):
    """One JSON object a line."""

    def _rows(self, block: bytes) -> Iterator[Row | Fault]:
        loads, line_number = fast_loads(), self._line
        # rfind: the backslash is rare and comes first, so looking from behind is twice as fast as `in`
        nul_inside = block.rfind(b"\\u0000") >= 0
        for line in BytesIO(block):
            line_number += 1
            self._line = line_number
            if nul_inside and b"\\u0000" in line:
                yield from self._slowly(line)
                continue
            try:
                row = loads(line)
            except ValueError:
                yield from self._slowly(line)
                continue
            if type(row) is not dict:
                yield from self._slowly(line)
                continue
            # Written out, because a call for each row costs a fifth of the speed on rows of 700 bytes.
            for value in row.values():
                kind = type(value)
                if kind is not str and kind is not int and may_be_huge_number(value):
                    yield from self._slowly(line)
                    break
            else:
                yield row

    def _slowly(self, line: bytes) -> Iterable[Row | Fault]:
        if line.startswith(BOM):
            yield Fault("bom", "before the text")
            line = line[len(BOM) :]
        if not line.strip():
            return
        item = judge_json(line)
        if isinstance(item, Fault) and item.kind in ("json", "utf8") and not line.endswith(b"\n"):
            item = Fault("truncated", f"the last line has no end and is not whole: {item.detail}")
        yield item


class LinesReader(_ByLine):
    """One document a line, as it stands."""

    def _rows(self, block: bytes) -> Iterator[Row | Fault]:
        for line in BytesIO(block):
            self._line += 1
            if line.startswith(BOM):
                yield Fault("bom", "before the text")
                line = line[len(BOM) :]
            if 0 in line:
                yield Fault("nul", f"a NUL byte at byte {line.index(0)}; a binary file?")
                continue
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                yield utf8_fault(error)
                continue
            text = text.removesuffix("\n").removesuffix("\r")
            if text and not text.isspace():
                yield {"text": text}


def _line_ends_before(path: Path | None, start: int) -> int:
    """In the bytes before the slice's first own line, which follows the first line end at or after start - 1."""
    assert path is not None
    count, left = 1, start - 1
    try:
        with path.open("rb") as file:
            while left and (block := file.read(min(BLOCK_BYTES, left))):
                count += block.count(b"\n")
                left -= len(block)
    except OSError:
        pass  # the place is then a guess, which is better than no report of the fault itself
    return count
