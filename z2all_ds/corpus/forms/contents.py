"""What a raw file contains: itself, what it packs, or the members of an archive, each as a stream.

Nothing is unpacked to disk, so the name of a member cannot reach outside.
"""

import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.detect import HEAD_BYTES, form_of, is_packed_tar, packing_of, without_packing_endings
from z2all_ds.corpus.forms.slices import ReadLimits
from z2all_ds.corpus.forms.streams import CHUNK_BYTES, DiskFile, ExpansionGuard, Stream, Unreadable, decompressed

_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
Members = Iterator[tuple[str, Stream]]
"""Names and bytes of the members of an archive. Each must be read before the next."""


@dataclass(frozen=True)
class Content:
    """The bytes of one file. `name` has no packing endings; `member` is empty unless it comes from an archive."""

    name: str
    member: str
    stream: Stream
    is_packed: bool

    def form(self) -> str:
        return form_of(self.name, self.stream.peek(HEAD_BYTES))


def contents(disk: DiskFile, limits: ReadLimits, start: int = 0, stop: int | None = None) -> Iterator[Content]:
    """Yields the contents of a file, of a zip only the members from `start` to `stop`.

    Each must be read before the next. Raises `Unreadable` where an archive is broken.
    """
    name = disk.path.name
    if disk.packing == "zip":
        members = _zip_members(disk, limits, start, stop)
    else:
        stream, packing = _decompress(Stream(disk.chunks()), disk.packing, name, disk, limits)
        if packing != "tar":
            if packing:
                stream = _faulty(f"{packing} data in packed data; unpack it once")
            yield Content(without_packing_endings(name), "", stream, bool(disk.packing))
            return
        members = _tar_members(stream)
    for member, stream in members:
        packing = packing_of(stream.peek(HEAD_BYTES), member)
        stream, packing = _decompress(stream, packing, member, disk, limits)
        if packing:
            stream = _faulty(f"{packing} inside an archive; unpack the outer one first")
        yield Content(without_packing_endings(member), member, stream, True)


def detect(disk: DiskFile) -> str:
    """Returns the form of a file, or auto for an archive. Raises ConfigError if nothing in it can be read."""
    refused: ConfigError | None = None
    try:
        for content in contents(disk, ReadLimits()):
            try:
                form = content.form()
                return "auto" if content.member else form
            except ConfigError as error:
                refused = refused or ConfigError(str(disk.path), error.rule, error.fix)
    except Unreadable:
        pass  # reading it says what is wrong
    if refused:
        raise refused
    return "auto"


def open_zip(disk: DiskFile) -> zipfile.ZipFile:
    advance, disk.advance = disk.advance, lambda _: None  # the table of contents is no progress
    try:
        return zipfile.ZipFile(disk)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise Unreadable(f"no readable zip archive ({error})") from None
    finally:
        disk.advance = advance


def zip_files(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Returns the members that hold data, in the order of the archive; slices count in this list."""
    return [info for info in archive.infolist() if not info.is_dir() and not _is_hidden(info.filename)]


def _decompress(stream: Stream, packing: str, name: str, disk: DiskFile, limits: ReadLimits) -> tuple[Stream, str]:
    """Returns the stream without its compression, and the packing of what is inside."""
    if packing not in ("gz", "zst"):
        return stream, packing
    stream = Stream(decompressed(stream, packing, ExpansionGuard(disk, limits)))
    return stream, packing_of(stream.peek(HEAD_BYTES), ".tar" if is_packed_tar(name) else "")


def _faulty(detail: str) -> Stream:
    return Stream((), Fault("container", detail))


def _is_hidden(name: str) -> bool:
    """Whether it is something that tools leave in archives next to the data."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return any(part == "__MACOSX" or (part.startswith(".") and part not in (".", "..")) for part in parts)


def _zip_members(disk: DiskFile, limits: ReadLimits, start: int, stop: int | None) -> Members:
    with open_zip(disk) as archive:
        guard = ExpansionGuard(disk, limits)
        for info in zip_files(archive)[start:stop]:
            if info.flag_bits & 0x1:
                yield info.filename, _faulty("encrypted; unpack it with its password")
            else:
                yield info.filename, Stream(_zip_chunks(archive, info, guard))


def _zip_chunks(archive: zipfile.ZipFile, info: zipfile.ZipInfo, guard: ExpansionGuard) -> Iterator[bytes]:
    size = HEAD_BYTES  # small at first: a read that fails loses all its bytes
    try:
        opened: Any = archive.open(info)
        with opened as file:
            # read1 may give nothing in the middle; read does so only at the end, and there checks the sum.
            while data := file.read1(size) or file.read(size):
                guard.count(len(data))
                yield data
                size = min(4 * size, CHUNK_BYTES)
    except _ZIP_ERRORS as error:
        raise Unreadable(f"the member cannot be read ({str(error) or type(error).__name__})") from None


def _tar_members(stream: Stream) -> Members:
    """Yields regular files. Links, devices and what is left of a member are passed over."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
            while (info := archive.next()) is not None:
                archive.members = []  # tarfile would keep every header it saw
                if not info.isreg() or _is_hidden(info.name):
                    continue
                if info.issparse():  # a few bytes that can stand for exabytes of zeros
                    yield info.name, _faulty("a sparse file; pack it without holes")
                    continue
                archive.fileobj.seek(info.offset_data)
                yield info.name, Stream(_tar_chunks(archive.fileobj, info.size, stream))
    except (tarfile.TarError, EOFError, ValueError, OSError) as error:
        if not stream.fault:
            raise Unreadable(f"broken tar archive ({error})") from None
    if stream.fault:
        raise Unreadable(stream.fault.detail, stream.fault.kind)


def _tar_chunks(file: Any, size: int, stream: Stream) -> Iterator[bytes]:
    """Yields the bytes of a member. The file object of tarfile returns nothing where it cannot return all."""
    while size:
        data: bytes = file.read(min(size, CHUNK_BYTES))
        if not data:
            fault = stream.fault or Fault("container", "the tar archive ends inside this member")
            raise Unreadable(fault.detail, fault.kind)
        size -= len(data)
        yield data
