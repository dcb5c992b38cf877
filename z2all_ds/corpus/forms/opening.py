"""Opens a slice: its contents (the file itself, decompressed data, or archive members) with the readers of their forms.

Only packed Parquet is unpacked to disk, into a temporary file without a name, so no member can write outside a folder.
"""

import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.detect import HEAD_BYTES, form_of, packing_of, without_packing_endings
from z2all_ds.corpus.forms.json_array import JsonArrayReader
from z2all_ds.corpus.forms.parquet import ParquetReader
from z2all_ds.corpus.forms.slices import Advance, ReadLimits, Row, RowReader, Slice, printable
from z2all_ds.corpus.forms.streams import CHUNK_BYTES, DiskFile, ExpansionGuard, Stream, Unreadable, decompressed
from z2all_ds.corpus.forms.tar import tar_members
from z2all_ds.corpus.forms.text_files import JsonlReader, LinesReader, TextReader

_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
_COMPRESSED_TAR = (".tgz", ".tzst", ".tbz", ".tbz2", ".tar.gz", ".tar.zst", ".tar.bz2")
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
Members = Iterator[tuple[str, Stream]]
"""Names and streams of the members of an archive. Each stream must be read before the next is requested."""


class Content(NamedTuple):
    """The bytes of one file. `name` has no packing endings; `member` is empty outside archives."""

    name: str
    member: str
    stream: Stream

    def form(self) -> str:
        return form_of(self.name, self.stream.peek(HEAD_BYTES))


@contextmanager
def open_slice(
    slice_: Slice, limits: ReadLimits, advance: Advance, spool_folder: Path | None = None
) -> Iterator[RowReader]:
    """Yield the reader of a slice. Packed Parquet is first copied to a temporary file in `spool_folder`."""
    try:
        disk = DiskFile(Path(slice_.path), advance)
    except Unreadable as end:
        yield _only_fault(printable(slice_.path), end.fault)
        return
    with closing(disk):
        yield _SliceReader(disk, slice_, limits, spool_folder)


def _only_fault(name: str, fault: Fault) -> RowReader:
    """Return a reader that yields only this fault."""
    return TextReader(Stream((), fault), name, ReadLimits(), "")


class _SliceReader:
    """Reads all contents of a slice."""

    def __init__(self, disk: DiskFile, slice_: Slice, limits: ReadLimits, spool_folder: Path | None) -> None:
        self._disk, self._slice, self._limits, self._spool_folder = disk, slice_, limits, spool_folder
        self._name, self._guard = printable(slice_.path), ExpansionGuard(disk, limits, slice_.raw_bytes)
        self._current = _only_fault(self._name, Fault("empty_file", "the archive contains no file"))

    def where(self) -> str:
        return self._current.where()

    def __iter__(self) -> Iterator[Row | Fault]:
        item: Row | Fault | None = None
        anything = False
        try:
            for content in contents(self._disk, self._guard, self._slice.start, self._slice.stop):
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
        stream, form, limits, packing = content.stream, self._slice.form, self._limits, self._disk.packing
        # A zip slice counts members; other packings have one slice.
        start, stop = (0, None) if packing else (self._slice.start, self._slice.stop)
        try:
            if packing and not stream.peek(1) and stream.fault:
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
        elif not packing:
            yield ParquetReader(self._disk.path, name, limits, self._guard, self._disk.advance, slice(start, stop))
        else:
            with self._spooled(stream) as file:
                parquet = ParquetReader(file, name, limits, self._guard, lambda _: None, slice(None))
                yield _only_fault(name, stream.fault) if stream.fault else parquet

    def _spooled(self, stream: Stream) -> IO[bytes]:
        try:
            file = tempfile.TemporaryFile(dir=self._spool_folder)  # noqa: SIM115
            while data := stream.read(CHUNK_BYTES):
                file.write(data)
            file.flush()
        except OSError as error:
            rule = f"cannot be copied to a temporary file ({error.strerror})"
            fix = "Unpack it, or set TMPDIR to a disk with free space."
            raise MachineError("packed Parquet", rule, fix) from None
        return file


def contents(disk: DiskFile, guard: ExpansionGuard, start: int = 0, stop: int | None = None) -> Iterator[Content]:
    """Yield the contents of a file; for a zip only the members from `start` to `stop`.

    Each stream must be read before the next is requested. Raise `Unreadable` where an archive is broken.
    """
    name = disk.path.name
    if disk.packing == "zip":
        members = _zip_members(disk, guard, start, stop)
    else:
        stream, packing = _decompress(Stream(disk.chunks()), disk.packing, name, guard)
        if packing != "tar":
            if packing:
                stream = _faulty(f"compressed twice: {packing} data in {disk.packing} data; unpack it once")
            yield Content(without_packing_endings(name), "", stream)
            return
        members = ((member, one) for member, one in tar_members(stream) if not _is_hidden(member))
    for member, stream in members:
        packing = packing_of(stream.peek(HEAD_BYTES), member)
        stream, packing = _decompress(stream, packing, member, guard)
        if packing:
            stream = _faulty(f"{packing} file inside an archive; unpack the archive first")
        yield Content(without_packing_endings(member), member, stream)


def detect(disk: DiskFile) -> str:
    """Return the form of a file, or auto for an archive. Raise ConfigError if all its contents are unsupported."""
    refused: ConfigError | None = None
    try:
        for content in contents(disk, ExpansionGuard(disk, ReadLimits())):
            try:
                form = content.form()
                return "auto" if content.member else form
            except ConfigError as error:
                refused = refused or ConfigError(str(disk.path), error.rule, error.fix)
    except Unreadable:
        pass  # the reader reports the reason
    if refused:
        raise refused
    return "auto"


def open_zip(disk: DiskFile) -> zipfile.ZipFile:
    advance, disk.advance = disk.advance, lambda _: None  # reading the table of contents is not progress
    try:
        archive = zipfile.ZipFile(disk)
        compressed_bytes = sum(info.compress_size for info in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise Unreadable(f"not a readable zip archive ({error})") from None
    finally:
        disk.advance = advance
    if compressed_bytes > disk.size:
        raise Unreadable(f"its members overlap: {compressed_bytes:,} bytes in a file of {disk.size:,}", "expansion")
    return archive


def zip_files(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the members with data, in archive order; slices index into this list."""
    return [info for info in archive.infolist() if not info.is_dir() and not _is_hidden(info.filename)]


def _decompress(stream: Stream, packing: str, name: str, guard: ExpansionGuard) -> tuple[Stream, str]:
    """Return the decompressed stream and the packing of its data."""
    if packing not in ("gz", "zst", "bz2"):
        return stream, packing
    stream = Stream(decompressed(stream, packing, guard))
    return stream, packing_of(stream.peek(HEAD_BYTES), ".tar" if name.lower().endswith(_COMPRESSED_TAR) else "")


def _faulty(detail: str) -> Stream:
    return Stream((), Fault("container", detail))


def _is_hidden(name: str) -> bool:
    """Return whether a member is hidden or was added by an archive tool."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return any(part == "__MACOSX" or (part.startswith(".") and part not in (".", "..")) for part in parts)


def _zip_members(disk: DiskFile, guard: ExpansionGuard, start: int, stop: int | None) -> Members:
    with open_zip(disk) as archive:
        for info in zip_files(archive)[start:stop]:
            if info.flag_bits & 0x1:
                yield info.filename, _faulty("encrypted; unpack it with the password")
            elif info.compress_type not in _ZIP_METHODS:  # zipfile decompresses these without a limit
                method = zipfile.compressor_names.get(info.compress_type, info.compress_type)  # type: ignore[attr-defined]
                yield info.filename, _faulty(f"compressed by {method}; unpack the archive, or pack it with deflate")
            else:
                yield info.filename, Stream(_zip_chunks(archive, info, guard))


def _zip_chunks(archive: zipfile.ZipFile, info: zipfile.ZipInfo, guard: ExpansionGuard) -> Iterator[bytes]:
    size = HEAD_BYTES  # small at first: a failed read loses all its bytes
    try:
        opened: Any = archive.open(info)
        with opened as file:
            # read1 may return b"" before the end; read does so only at the end, where it verifies the checksum.
            while data := file.read1(size) or file.read(size):
                guard.count(len(data))
                yield data
                size = min(4 * size, CHUNK_BYTES)
    except _ZIP_ERRORS as error:
        raise Unreadable(f"the member cannot be read ({str(error) or type(error).__name__})") from None
