"""Byte streams: files on disk, decompressed data, and a guard against decompression bombs."""

import bz2
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from z2all_ds.base.errors import MachineError
from z2all_ds.base.storage.open_files import open_regular
from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.detect import HEAD_BYTES, packing_of
from z2all_ds.corpus.forms.slices import Advance, ReadLimits

CHUNK_BYTES = 256 * 2**10
GZIP_FEED_BYTES = 16 * 2**10
ZSTD_FEED_BYTES = 4096
"""The Zstandard binding returns all output of one input. 4 input bytes can hold a block of 128 KiB, so the input is
small: one call returns at most 128 MiB even for a bomb."""
SLICE_ALLOWANCE_BYTES = 16 * 2**20
"""Expansion that every slice of a file is allowed; all but the last slice have at least that much data."""


class Unreadable(Exception):
    """Raised when the rest of a file cannot be read; `fault` gives the reason."""

    def __init__(self, detail: str, kind: str = "container") -> None:
        super().__init__(detail)
        self.fault = Fault(kind, " ".join(detail.split()))


def read_failure(error: OSError) -> Unreadable:
    """Return the exception for a failed read."""
    return Unreadable(f"cannot be read: {error.strerror or error}")


class DiskFile(io.BufferedReader):
    """A file on disk that counts the bytes read, for the progress bar and the expansion guard."""

    def __init__(self, path: Path, advance: Advance = lambda _: None) -> None:
        self.path, self.advance, self.bytes_read = path, advance, 0
        try:
            super().__init__(io.FileIO(open_regular(path)))
            self.size = os.fstat(self.fileno()).st_size
            self.packing = packing_of(super().read(HEAD_BYTES), path.name)
            self.seek(0)
        except OSError as error:
            raise read_failure(error) from None

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            data = super().read(size)
        except OSError as error:
            raise read_failure(error) from None
        self.bytes_read += len(data)
        self.advance(len(data))
        return data

    def chunks(self) -> Iterator[bytes]:
        while data := self.read(CHUNK_BYTES):
            yield data


class Stream:
    """A byte stream over chunks. It ends where the chunks raise `Unreadable`; `fault` then gives the reason."""

    def __init__(self, chunks: Iterable[bytes], fault: Fault | None = None) -> None:
        self._chunks, self.fault = iter(chunks), fault
        self._ahead, self._at = b"", 0

    def peek(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end of the stream, without consuming them."""
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
    """The budget of a slice: stops it when all its members and levels of packing yield far more bytes than it has.

    The budgets of all slices of a file add up to about one budget of the whole file.
    """

    def __init__(self, disk: DiskFile, limits: ReadLimits, raw_bytes: int = 0) -> None:
        """`raw_bytes`: size of the slice on disk; 0 for the whole file."""
        self._disk, self._max_expansion = disk, limits.max_expansion
        self._raw_bytes = min(raw_bytes or disk.size, disk.size)
        allowance = limits.expansion_allowance_bytes
        shared = allowance * self._raw_bytes // max(1, disk.size)
        self._allowance = max(shared, min(allowance, SLICE_ALLOWANCE_BYTES))
        self._bytes_out = 0

    def count(self, size: int) -> None:
        """Add bytes; raise `Unreadable` if they exceed the budget."""
        self._bytes_out += size
        self.require(0)

    def require(self, size: int) -> None:
        """Raise `Unreadable` if `size` more bytes would exceed the budget."""
        # pyarrow reads unpacked Parquet by itself. Of other files one chunk may have been read ahead.
        bytes_in = min(self._raw_bytes, self._disk.bytes_read + CHUNK_BYTES) if self._disk.packing else self._raw_bytes
        bytes_out = self._bytes_out + size
        if bytes_out > max(self._allowance, self._max_expansion * bytes_in):
            detail = f"{bytes_out:,} bytes from {bytes_in:,} so far; the rest is not read"
            raise Unreadable(
                f"{detail}; unpack the file yourself if you trust it, or raise --max-expansion", "expansion"
            )


def decompressed(stream: Stream, packing: str, guard: ExpansionGuard) -> Iterator[bytes]:
    """Yield the decompressed bytes of any number of gzip members (`gz`), bzip2 streams or Zstandard frames."""
    new_decompressor, broken, feed_bytes = _codec(packing)
    decompressor: Any = None
    left = b""
    while data := left or stream.read(feed_bytes):
        left = b""
        if decompressor is None:
            if packing == "gz" and not (data := data.lstrip(b"\0")):
                continue  # tapes and some tools pad members with zeros
            decompressor = new_decompressor()
        try:
            if packing == "gz":
                output = decompressor.decompress(data, CHUNK_BYTES)
                left = decompressor.unconsumed_tail
            elif packing == "bz2":
                output = decompressor.decompress(data, CHUNK_BYTES)
                while not (decompressor.eof or decompressor.needs_input):
                    guard.count(len(output))
                    yield output
                    output = decompressor.decompress(b"", CHUNK_BYTES)
            else:
                output = decompressor.decompress(data)
        except broken as error:
            raise Unreadable(f"invalid {packing} data ({error})") from None
        if decompressor.eof:
            left, decompressor = decompressor.unused_data, None
        if output:
            guard.count(len(output))
            yield output
    if stream.fault:
        raise Unreadable(stream.fault.detail, stream.fault.kind)
    if decompressor is not None:
        raise Unreadable(f"the {packing} data is truncated")


def _codec(packing: str) -> tuple[Callable[[], Any], type[Exception], int]:
    """Return a factory of decompressors, the error they raise, and their input size in bytes."""
    if packing == "gz":
        return lambda: zlib.decompressobj(wbits=31), zlib.error, GZIP_FEED_BYTES
    if packing == "bz2":
        return bz2.BZ2Decompressor, OSError, GZIP_FEED_BYTES
    try:
        import zstandard
    except ImportError:
        rule = "needs the package zstandard, which is not installed"
        raise MachineError("a .zst file", rule, "pip install 'z2all_ds[corpus]'") from None
    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError, ZSTD_FEED_BYTES
