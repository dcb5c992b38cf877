"""Byte streams: a file on disk, what a decompressor makes of it, and the guard against decompression bombs."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from z2all_ds.base.errors import MachineError
from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.detect import HEAD_BYTES, packing_of
from z2all_ds.corpus.forms.slices import Advance, ReadLimits

CHUNK_BYTES = 256 * 2**10
GZIP_FEED_BYTES = 16 * 2**10
ZSTD_FEED_BYTES = 4096
"""The binding of Zstandard returns all that its input holds. A block of 128 KiB can come from 4 bytes, so the input is
small, and no call makes more than 128 MiB even of a bomb."""


class Unreadable(Exception):
    """The rest of a file cannot be read; `fault` says why."""

    def __init__(self, detail: str, kind: str = "container") -> None:
        super().__init__(detail)
        self.fault = Fault(kind, " ".join(detail.split()))


def os_fault(error: OSError) -> Unreadable:
    return Unreadable(f"cannot be read: {error.strerror or error}")


class DiskFile:
    """A file on disk. It counts the bytes that are read, for the progress bar and for the expansion guard."""

    def __init__(self, path: Path, advance: Advance = lambda _: None) -> None:
        self.path, self.advance, self.bytes_read = path, advance, 0
        try:
            self._file = path.open("rb")
            self.packing = packing_of(self._file.read(HEAD_BYTES), path.name)
            self._file.seek(0)
        except OSError as error:
            raise os_fault(error) from None

    def read(self, size: int = -1, /) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            raise os_fault(error) from None
        self.bytes_read += len(data)
        self.advance(len(data))
        return data

    def chunks(self) -> Iterator[bytes]:
        while data := self.read(CHUNK_BYTES):
            yield data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()


class Stream:
    """Reads bytes from chunks. Where the chunks raise `Unreadable`, the stream ends and `fault` says why."""

    def __init__(self, chunks: Iterable[bytes], fault: Fault | None = None) -> None:
        self._chunks, self.fault = iter(chunks), fault
        self._ahead, self._at = b"", 0

    def peek(self, size: int) -> bytes:
        """Returns the next `size` bytes, fewer only at the end of the stream, and does not move on."""
        missing = self._at + size - len(self._ahead)
        if missing > 0:
            pieces = [self._ahead[self._at :]] if self._at < len(self._ahead) else []
            while missing > 0 and (piece := self._next_chunk()):
                pieces.append(piece)
                missing -= len(piece)
            self._ahead, self._at = b"".join(pieces), 0
        return self._ahead[self._at : self._at + size]

    def read(self, size: int, /) -> bytes:
        data = self.peek(size)
        self._at += len(data)
        return data

    def _next_chunk(self) -> bytes:
        try:
            return next(self._chunks, b"")
        except Unreadable as end:
            self.fault = end.fault
            return b""


class ExpansionGuard:
    """Stops a stream that gives far more bytes than were read from disk for it."""

    def __init__(self, disk: DiskFile, limits: ReadLimits) -> None:
        self._disk, self._limits = disk, limits
        # Reading ahead may have begun before this stream did; one chunk is granted for that.
        self._disk_bytes_before = disk.bytes_read - CHUNK_BYTES
        self._bytes_out = 0

    def count(self, size: int) -> None:
        self._bytes_out += size
        bytes_in = self._disk.bytes_read - self._disk_bytes_before
        if self._bytes_out > max(self._limits.expansion_allowance_bytes, self._limits.max_expansion * bytes_in):
            rule = f"{self._bytes_out:,} bytes from {bytes_in:,} so far; the rest is not read"
            raise Unreadable(f"{rule}; unpack it by hand if it is honest", "expansion")


def decompressed(stream: Stream, packing: str, guard: ExpansionGuard) -> Iterator[bytes]:
    """Yields the bytes of gzip members (`gz`) or Zstandard frames (`zst`), of any number of them."""
    new_decompressor, broken, feed_bytes = _codec(packing)
    decompressor: Any = None
    left = b""
    while data := left or stream.read(feed_bytes):
        left = b""
        if decompressor is None:
            if packing == "gz" and not (data := data.lstrip(b"\0")):
                continue  # tapes and some tools pad with zeros after a member
            decompressor = new_decompressor()
        try:
            if packing == "gz":
                output = decompressor.decompress(data, CHUNK_BYTES)
                left = decompressor.unconsumed_tail
            else:
                output = decompressor.decompress(data)
        except broken as error:
            raise Unreadable(f"broken {packing} data ({error})") from None
        if decompressor.eof:
            left, decompressor = decompressor.unused_data, None
        if output:
            guard.count(len(output))
            yield output
    if stream.fault:
        raise Unreadable(stream.fault.detail, stream.fault.kind)
    if decompressor is not None:
        raise Unreadable(f"the {packing} data ends in the middle")


def _codec(packing: str) -> tuple[Callable[[], Any], type[Exception], int]:
    """Returns what makes a decompressor, the error it raises, and how many bytes it takes at once."""
    if packing == "gz":
        return lambda: zlib.decompressobj(wbits=31), zlib.error, GZIP_FEED_BYTES
    try:
        import zstandard
    except ImportError:
        rule = "needs the library zstandard, which is not installed"
        raise MachineError("a .zst file", rule, "pip install 'z2all_ds[corpus]'") from None
    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError, ZSTD_FEED_BYTES
