"""Byte streams: a file on disk, what a decompressor makes of it, and the guard against files that grow too much.

Every stream has `read(n)` (at most n bytes; nothing at the end) and `peek(n)`. What cannot be read raises `Unreadable`
with the fault inside, but only after all bytes before the broken place were given out.
"""

import zlib
from pathlib import Path
from typing import Any, Protocol

from z2all_ds.base.errors import MachineError
from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.slices import Advance, ReadLimits

DISK_READ_BYTES = 256 * 2**10
GZIP_FEED_BYTES = 16 * 2**10
ZSTD_FEED_BYTES = 4096
"""Zstandard's binding gives out all that its input holds. A block of 128 KiB can come from 4 bytes, so the input is
small, and no call makes more than 128 MiB even of a bomb."""

GZIP_MAGIC, ZSTD_MAGIC, ZIP_MAGICS = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", (b"PK\x03\x04", b"PK\x05\x06")
ZSTD_SKIPPABLE = tuple(bytes([0x50 + n, 0x2A, 0x4D, 0x18]) for n in range(16))
TAR_PEEK_BYTES = 512


class Unreadable(Exception):
    """The rest of a file cannot be read; `fault` says why."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = Fault(kind, " ".join(detail.split()))


def os_fault(error: OSError) -> Unreadable:
    return Unreadable("container", f"cannot be read: {error.strerror or error}")


class ByteStream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class DiskFile:
    """A file on disk that counts what was read of it, for the progress bar and for the expansion guard."""

    def __init__(self, path: Path, advance: Advance) -> None:
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise os_fault(error) from None
        self.advance = advance
        self.bytes_read = 0

    def read(self, size: int = -1, /) -> bytes:
        """Fewer than `size` bytes only at the end: zipfile and tarfile count on that."""
        pieces, missing = [], size
        try:
            while missing != 0:
                piece = self._file.read(missing)
                if not piece:
                    break
                pieces.append(piece)
                missing -= len(piece) if size >= 0 else 0
        except OSError as error:
            raise os_fault(error) from None
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self.bytes_read += len(data)
        self.advance(len(data))
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()


class Peekable:
    """Looks ahead in any stream. Reads give exactly `size` bytes until the stream ends, as tarfile needs it."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._ahead = b""

    def peek(self, size: int) -> bytes:
        while len(self._ahead) < size:
            more = self._stream.read(size - len(self._ahead))
            if not more:
                break
            self._ahead += more
        return self._ahead[:size]

    def read(self, size: int, /) -> bytes:
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        if len(data) == size:
            return data
        pieces, missing = [data], size - len(data)
        try:
            while missing:
                piece = self._stream.read(missing)
                if not piece:
                    break
                pieces.append(piece)
                missing -= len(piece)
        except Unreadable:
            # Rows in front of the broken place count: give them out; the next read meets the same end again.
            if not any(pieces):
                raise
        return b"".join(pieces)


class ExpansionGuard:
    """Stops a stream that gives far more bytes than were read from disk for it."""

    def __init__(self, disk: DiskFile, limits: ReadLimits) -> None:
        self._disk, self._limits = disk, limits
        # Reading ahead may have begun before this stream did; one block is granted for that.
        self._disk_bytes_before = disk.bytes_read - DISK_READ_BYTES
        self._bytes_out = 0

    def count(self, size: int) -> None:
        self._bytes_out += size
        bytes_in = self._disk.bytes_read - self._disk_bytes_before
        if self._bytes_out <= self._limits.expansion_allowance_bytes:
            return
        if self._bytes_out > self._limits.max_expansion * bytes_in:
            rule = f"{self._bytes_out:,} bytes from {bytes_in:,} so far; the rest is not read"
            raise Unreadable("expansion", f"{rule}; unpack it by hand if it is honest")


class GuardedStream:
    """Bytes that someone else unpacks (a zip member), counted by the guard."""

    def __init__(self, stream: ByteStream, guard: ExpansionGuard) -> None:
        self._stream, self._guard = stream, guard

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        self._guard.count(len(data))
        return data


class CompressedStream:
    """gzip or Zstandard, with any number of members or frames one after the other."""

    def __init__(self, stream: ByteStream, packing: str, guard: ExpansionGuard) -> None:
        self._stream, self._packing, self._guard = stream, packing, guard
        self._new = _gzip_decompressor if packing == "gz" else _zstd_decompressor()
        self._feed_bytes = GZIP_FEED_BYTES if packing == "gz" else ZSTD_FEED_BYTES
        self._decompressor: Any = None
        self._input, self._input_used = b"", 0
        self._output, self._output_used = b"", 0
        self._ended: Unreadable | bool = False

    def read(self, size: int, /) -> bytes:
        while self._output_used == len(self._output):
            if isinstance(self._ended, Unreadable):
                raise self._ended
            if self._ended:
                return b""
            try:
                self._output, self._output_used = self._next(max(size, 2**16)), 0
                self._guard.count(len(self._output))
            except Unreadable as end:
                self._ended, self._output_used = end, len(self._output)
            except Exception as error:
                # ZstdError cannot be named where the library is missing
                if not isinstance(error, zlib.error) and type(error).__name__ != "ZstdError":
                    raise
                self._ended = Unreadable("container", f"broken {self._packing} data ({error})")
        data = self._output[self._output_used : self._output_used + size]
        self._output_used += len(data)
        return data

    def _next(self, size: int) -> bytes:
        """Some bytes out, perhaps none; sets `_ended` at the honest end."""
        if self._input_used == len(self._input):
            self._input, self._input_used = self._stream.read(DISK_READ_BYTES), 0
        if self._packing == "gz" and self._decompressor is None:
            # tapes and some tools pad with zeros after a member
            self._input, self._input_used = self._input[self._input_used :].lstrip(b"\0"), 0
        if not self._input:
            if self._decompressor is not None:
                raise Unreadable("container", f"the {self._packing} data ends in the middle")
            self._ended = True
            return b""
        if self._decompressor is None:
            self._decompressor = self._new()
        feed = self._input[self._input_used : self._input_used + self._feed_bytes]
        if self._packing == "gz":
            output = self._decompressor.decompress(feed, size)
            self._input_used += len(feed) - len(self._decompressor.unconsumed_tail)
        else:
            output = self._decompressor.decompress(feed)
            self._input_used += len(feed)
        if self._decompressor.eof:
            self._input_used -= len(self._decompressor.unused_data)
            self._decompressor = None
        return output


def _gzip_decompressor() -> Any:
    return zlib.decompressobj(wbits=31)


def _zstd_decompressor() -> Any:
    try:
        import zstandard
    except ImportError:
        raise MachineError(
            "a .zst file", "needs the library zstandard, which is not installed", "pip install 'z2all_ds[corpus]'"
        ) from None
    return zstandard.ZstdDecompressor().decompressobj


def packing_of(head: bytes, name: str) -> str:
    """gz, zst, zip, tar or nothing: by the first bytes; by the name where those do not tell."""
    if head.startswith(GZIP_MAGIC):
        return "gz"
    if head.startswith((ZSTD_MAGIC, *ZSTD_SKIPPABLE)):
        return "zst"
    if head.startswith(ZIP_MAGICS):
        return "zip"
    if head[257:262] == b"ustar":
        return "tar"
    name = name.lower()
    if not head:
        return ""  # an empty file is empty in every packing
    for packing, endings in PACKING_ENDINGS.items():
        if name.endswith(endings):
            return packing
    return ""


PACKING_ENDINGS = {"gz": (".gz", ".tgz"), "zst": (".zst", ".tzst"), "zip": (".zip",), "tar": (".tar",)}


def without_packing_endings(name: str) -> str:
    """a.tar.gz -> a, a.jsonl.zst -> a.jsonl."""
    for inner in (".gz", ".zst", ".zip", ".tar", ".tgz", ".tzst"):
        if name.lower().endswith(inner) and len(name) > len(inner):
            stripped = name[: -len(inner)]
            return stripped[:-4] if inner in (".gz", ".zst") and stripped.lower().endswith(".tar") else stripped
    return name
