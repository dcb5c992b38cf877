"""Opens a slice with the reader of its form."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.contents import Content, contents
from z2all_ds.corpus.forms.json_array import JsonArrayReader
from z2all_ds.corpus.forms.parquet import ParquetReader
from z2all_ds.corpus.forms.slices import Advance, ReadLimits, Row, RowReader, Slice, printable
from z2all_ds.corpus.forms.streams import DiskFile, Stream, Unreadable
from z2all_ds.corpus.forms.text_files import JsonlReader, LinesReader, TextReader

_COPY_BYTES = 2**20


@contextmanager
def open_slice(
    slice_: Slice, limits: ReadLimits, advance: Advance, spool_folder: Path | None = None
) -> Iterator[RowReader]:
    """Yields the reader of a slice. Packed Parquet is first copied to a temporary file in `spool_folder`."""
    try:
        disk = DiskFile(Path(slice_.path), advance)
    except Unreadable as end:
        yield _only_fault(printable(slice_.path), end.fault)
        return
    with closing(disk):
        yield _SliceReader(disk, slice_, limits, spool_folder)


def _only_fault(name: str, fault: Fault) -> RowReader:
    """Returns a reader that yields only this fault."""
    return TextReader(Stream((), fault), name, ReadLimits(), "")


class _SliceReader:
    """Reads all contents of a slice."""

    def __init__(self, disk: DiskFile, slice_: Slice, limits: ReadLimits, spool_folder: Path | None) -> None:
        self._disk, self._slice, self._limits, self._spool_folder = disk, slice_, limits, spool_folder
        self._name = printable(slice_.path)
        self._current = _only_fault(self._name, Fault("empty_file", "the archive contains no file"))

    def where(self) -> str:
        return self._current.where()

    def __iter__(self) -> Iterator[Row | Fault]:
        item: Row | Fault | None = None
        anything = False
        try:
            for content in contents(self._disk, self._limits, self._slice.start, self._slice.stop):
                anything = True
                with self._reader(content) as self._current:
                    for item in self._current:
                        yield item
        except Unreadable as end:
            # a member cut by the end of the archive has already reported it
            if not (isinstance(item, Fault) and item.kind == end.fault.kind):
                self._current = _only_fault(self._name, end.fault)
                yield end.fault
            return
        if not anything:
            yield from self._current

    @contextmanager
    def _reader(self, content: Content) -> Iterator[RowReader]:
        name = f"{self._name}!{printable(content.member)}" if content.member else self._name
        stream, form, limits = content.stream, self._slice.form, self._limits
        # A zip slice counts members; other packings have one slice.
        start, stop = (0, None) if content.is_packed else (self._slice.start, self._slice.stop)
        try:
            if content.is_packed and not stream.peek(1) and stream.fault:
                form = "txt"  # TextReader yields only the fault
            elif form == "auto":
                form = content.form()
        except ConfigError as error:
            form, stream = "txt", Stream((), Fault("container", f"{error.rule}; {error.fix}"))
        if form == "json_array":
            yield JsonArrayReader(stream, name, limits)
        elif form == "txt":
            yield TextReader(stream, name, limits, printable(Path(content.name).stem))
        elif form != "parquet":
            if start:
                self._disk.seek(start - 1)  # the byte before shows whether a line begins here
            line_reader = JsonlReader if form == "jsonl" else LinesReader
            yield line_reader(stream, name, limits, self._disk.path, start, stop)
        elif not content.is_packed:
            yield ParquetReader(self._disk.path, name, limits, self._disk.advance, slice(start, stop))
        else:
            with self._spooled(stream) as file:
                parquet = ParquetReader(file, name, limits, lambda _: None, slice(None))
                yield _only_fault(name, stream.fault) if stream.fault else parquet

    def _spooled(self, stream: Stream) -> IO[bytes]:
        try:
            file = tempfile.TemporaryFile(dir=self._spool_folder)  # noqa: SIM115
            while data := stream.read(_COPY_BYTES):
                file.write(data)
            file.flush()
        except OSError as error:
            rule = f"cannot be copied to a temporary file ({error.strerror})"
            fix = "Unpack it, or set TMPDIR to a disk with free space."
            raise MachineError("packed Parquet", rule, fix) from None
        return file
