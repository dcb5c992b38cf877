"""Opens a slice: finds out how it is packed and gives the reader of its form."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.by_line import JsonlReader, LinesReader
from z2all_ds.corpus.forms.detect import form_of
from z2all_ds.corpus.forms.json_array import JsonArrayReader
from z2all_ds.corpus.forms.naming import harmless
from z2all_ds.corpus.forms.parquet import ParquetReader
from z2all_ds.corpus.forms.slices import Advance, ReadLimits, Row, RowReader, Slice
from z2all_ds.corpus.forms.streams import ByteStream, DiskFile, Unreadable
from z2all_ds.corpus.forms.unpack import Content, contents, packing_of_file
from z2all_ds.corpus.forms.whole_text import TextReader

_COPY_BYTES = 2**20
_PEEK_BYTES = 4096
_LINE_READERS = {"jsonl": JsonlReader, "lines": LinesReader}


@contextmanager
def open_slice(
    slice_: Slice, limits: ReadLimits, advance: Advance, spool_folder: Path | None = None
) -> Iterator[RowReader]:
    """The reader of a slice. Packed Parquet is copied to a nameless file in `spool_folder` while it is read."""
    path = Path(slice_.path)
    try:
        disk = DiskFile(path, advance)
    except Unreadable as end:
        yield _OnlyFault(harmless(slice_.path), end.fault)
        return
    try:
        if packing_of_file(path):
            yield _PackedReader(disk, slice_, limits, spool_folder)
        elif slice_.form in _LINE_READERS:
            yield _line_slice(disk, slice_, limits)
        elif slice_.form == "parquet":
            name = harmless(slice_.path)
            yield ParquetReader(path, name, limits, advance, start=slice_.start, stop=slice_.stop)
        else:
            yield _PackedReader(disk, slice_, limits, spool_folder)
    finally:
        disk.close()


def _line_slice(disk: DiskFile, slice_: Slice, limits: ReadLimits) -> RowReader:
    start, stop = slice_.start, slice_.stop
    disk.seek(max(0, start - 1))  # the byte before tells whether a line begins here
    size = None if stop is None else stop - start
    reader = _LINE_READERS[slice_.form]
    return reader(disk, harmless(slice_.path), limits, start=start, size=size, path=Path(slice_.path))


class _OnlyFault:
    """The reader of what cannot be read at all."""

    def __init__(self, name: str, fault: Fault) -> None:
        self._name, self._fault = name, fault

    def where(self) -> str:
        return self._name

    def __iter__(self) -> Iterator[Row | Fault]:
        yield self._fault


class _PackedReader:
    """One reader after the other for all that a file contains."""

    def __init__(self, disk: DiskFile, slice_: Slice, limits: ReadLimits, spool_folder: Path | None) -> None:
        self._disk, self._slice, self._limits, self._spool_folder = disk, slice_, limits, spool_folder
        self._current: RowReader = _OnlyFault(harmless(slice_.path), Fault("container", ""))

    def where(self) -> str:
        return self._current.where()

    def __iter__(self) -> Iterator[Row | Fault]:
        item: Row | Fault | None = None
        anything = False
        slice_ = self._slice
        try:
            for content in contents(self._disk, Path(slice_.path), self._limits, slice_.start, slice_.stop):
                anything = True
                with self._reader(content) as self._current:
                    for item in self._current:
                        yield item
        except Unreadable as end:
            # a member that met the archive's end has said so already
            if not (isinstance(item, Fault) and item.kind == end.fault.kind):
                self._current = _OnlyFault(harmless(slice_.path), end.fault)
                yield end.fault
            return
        if not anything:
            self._current = _OnlyFault(harmless(slice_.path), Fault("empty_file", "no file in the archive"))
            yield from self._current

    @contextmanager
    def _reader(self, content: Content) -> Iterator[RowReader]:
        name = harmless(self._slice.path) + (f"!{harmless(content.member)}" if content.member else "")
        form, stream = self._slice.form, content.stream
        if isinstance(stream, Fault):
            yield _OnlyFault(name, stream)
            return
        try:
            if form == "auto":
                form = form_of(content.name, stream.peek(_PEEK_BYTES))
        except ConfigError as error:
            yield _OnlyFault(name, Fault("container", f"{error.rule}; {error.fix}"))
            return
        except Unreadable as end:
            yield _OnlyFault(name, end.fault)
            return
        if form == "json_array":
            yield JsonArrayReader(stream, name, self._limits)
        elif form == "txt":
            yield TextReader(stream, name, self._limits, harmless(Path(content.name).stem))
        elif form != "parquet":
            yield _LINE_READERS[form](stream, name, self._limits)
        else:
            with self._spool_file() as file:
                try:
                    _copy(stream, file)
                except Unreadable as end:
                    yield _OnlyFault(name, end.fault)
                else:
                    yield ParquetReader(file, name, self._limits, lambda _: None)

    def _spool_file(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(dir=self._spool_folder)
        except OSError as error:
            raise _no_spool(error) from None


def _copy(stream: ByteStream, file: IO[bytes]) -> None:
    while data := stream.read(_COPY_BYTES):
        try:
            file.write(data)
        except OSError as error:
            raise _no_spool(error) from None
    file.flush()


def _no_spool(error: OSError) -> MachineError:
    rule = f"cannot be copied to a temporary file to be read ({error.strerror})"
    return MachineError("packed Parquet", rule, "Unpack it, or point TMPDIR to a disk with room.")
