"""Reader of plain text: one file, one row."""

from collections.abc import Iterator

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.judge import BOM, utf8_fault
from z2all_ds.corpus.forms.slices import ReadLimits, Row
from z2all_ds.corpus.forms.streams import ByteStream, Unreadable

_READ_BYTES = 2**20


class TextReader:
    """{"text": the whole file, "name": its name without endings}."""

    def __init__(self, stream: ByteStream, name: str, limits: ReadLimits, stem: str) -> None:
        self._stream, self._name, self._limits, self._stem = stream, name, limits, stem

    def where(self) -> str:
        return self._name

    def __iter__(self) -> Iterator[Row | Fault]:
        limit = self._limits.max_record_bytes
        pieces, size = [], 0
        try:
            while size <= limit and (piece := self._stream.read(_READ_BYTES)):
                pieces.append(piece)
                size += len(piece)
        except Unreadable as end:
            yield end.fault  # a part of a document is none
            return
        data = b"".join(pieces)
        del pieces
        if size > limit:
            yield Fault(
                "too_long", f"more than {limit:,} bytes in one document; cut it, or read it with the form lines"
            )
            return
        if not data:
            yield Fault("empty_file", "no bytes in it")
            return
        if data.startswith(BOM):
            yield Fault("bom", "before the text")
            data = data[len(BOM) :]
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            yield utf8_fault(error)
            return
        if "\0" in text:
            yield Fault("nul", f"a NUL byte at byte {data.index(0)}; a binary file?")
            return
        if b"\r\n" in data:
            yield Fault("line_ends", "CR LF")
            text = text.replace("\r\n", "\n")
        yield {"text": text, "name": self._stem}
