"""Members of zip and tar archives as streams. Nothing is unpacked to disk, so no member's name can reach outside."""

import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.slices import ReadLimits
from z2all_ds.corpus.forms.streams import ByteStream, DiskFile, ExpansionGuard, GuardedStream, Peekable, Unreadable


@dataclass(frozen=True)
class Member:
    """One file in an archive: a stream, or why there is none."""

    name: str
    content: Peekable | Fault


def is_hidden(name: str) -> bool:
    """What tools leave in archives and folders beside the data."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return any(part == "__MACOSX" or (part.startswith(".") and part not in (".", "..")) for part in parts)


def open_zip(disk: DiskFile) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(disk)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise Unreadable("container", f"no readable zip archive ({error})") from None


def zip_files(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The members that hold data, in the archive's order; a slice counts in this list."""
    return [info for info in archive.infolist() if not info.is_dir() and not is_hidden(info.filename)]


def zip_members(disk: DiskFile, limits: ReadLimits, start: int, stop: int | None) -> Iterator[Member]:
    advance, disk.advance = disk.advance, lambda _: None  # the table of contents is no progress
    archive = open_zip(disk)
    disk.advance = advance
    guard = ExpansionGuard(disk, limits)
    with archive:
        for info in zip_files(archive)[start:stop]:
            if info.flag_bits & 0x1:
                yield Member(info.filename, Fault("container", "encrypted; unpack it with its password"))
                continue
            try:
                opened = archive.open(info)
            except _ZIP_ERRORS as error:
                yield Member(info.filename, _zip_fault(error))
                continue
            with opened:
                yield Member(info.filename, Peekable(GuardedStream(_ZipStream(opened), guard)))


_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)


def _zip_fault(error: BaseException) -> Fault:
    return Fault("container", f"the member cannot be read ({' '.join(str(error).split()) or type(error).__name__})")


class _ZipStream:
    """A zip member whose errors are faults, and stay so when it is asked again."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened
        self._end: Unreadable | None = None

    def read(self, size: int, /) -> bytes:
        if self._end:
            raise self._end
        try:
            data: bytes = self._opened.read1(size)
            # read1 may give nothing in the middle; read does so only at the end, and there checks the sum.
            return data or self._opened.read(size)
        except Unreadable as end:
            self._end = end
        except _ZIP_ERRORS as error:
            fault = _zip_fault(error)
            self._end = Unreadable(fault.kind, fault.detail)
        raise self._end


def tar_members(stream: ByteStream) -> Iterator[Member]:
    """In order of the stream; what is left of a member is passed over. Links and devices are, too."""
    source = _TarInput(stream)
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:  # type: ignore[call-overload]
            while (info := archive.next()) is not None:
                archive.members = []  # tarfile would keep every header it saw
                if not info.isreg() or is_hidden(info.name):
                    continue
                if info.issparse():  # a few bytes that can stand for exabytes of zeros
                    yield Member(info.name, Fault("container", "a sparse file; pack it without holes"))
                    continue
                archive.fileobj.seek(info.offset_data)
                yield Member(info.name, Peekable(_TarMember(archive.fileobj, info.size, source)))
    except (tarfile.TarError, EOFError, ValueError, OSError) as error:
        raise source.broken or Unreadable("container", f"broken tar archive ({error})") from None
    if source.broken:
        raise source.broken


class _TarInput:
    """To tarfile a broken stream just ends, because it would drop the good bytes of a read that raises."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self.broken: Unreadable | None = None

    def read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except Unreadable as end:
            self.broken = end
            return b""


class _TarMember:
    """The bytes of one member. Not tarfile's own file object, which gives nothing where it cannot give all."""

    def __init__(self, stream: Any, size: int, source: _TarInput) -> None:
        self._stream, self._left, self._source = stream, size, source

    def read(self, size: int, /) -> bytes:
        data: bytes = self._stream.read(min(size, self._left))
        self._left -= len(data)
        if not data and self._left:
            raise self._source.broken or Unreadable("container", "the tar archive ends inside this member")
        return data
