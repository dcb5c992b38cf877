"""The line index of a JSON Lines shard: offsets found in one pass, stored next to the shard, and read by ranges.

The index of `web-00000.jsonl` is `.web-00000.jsonl.idx`: little-endian 64-bit integers, first a header (mark, size and
version of the shard, number of lines), then the offset of each line and of the end of the file. It stays on disk, as a
corpus may have 10^9 documents; it is kept in memory only if it cannot be written.
"""

import posixpath
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt

from z2all_ds.base.console import progress
from z2all_ds.base.storage import Folder, Stamp

Offsets = npt.NDArray[np.uint64]

SCAN_BYTES = 16 << 20
SHOW_PROGRESS_ABOVE_BYTES = 256 << 20
"""Smaller files take less than a second."""
_WORD = np.dtype("<u8")
_HEADER_WORDS = 4
_MARK = int.from_bytes(b"z2lines2", "little")


class IndexDamaged(OSError):
    """The index file changed after it was opened."""


class LineIndex:
    """Offsets of the lines of a shard in the version `stamp`."""

    def __init__(self, folder: Folder, shard: str, stamp: Stamp, num_lines: int, kept: Offsets | None = None) -> None:
        """`kept` has the offsets if they could not be written."""
        self.stamp, self.num_lines = stamp, num_lines
        self._folder, self._name, self._kept = folder, index_name(shard), kept

    def offsets(self, first: int, end: int) -> Offsets:
        """Return the offsets of the lines `first` to `end` - 1 and the end of the last one, [end - first + 1]."""
        if self._kept is not None:
            return self._kept[first : end + 1]
        begin = (_HEADER_WORDS + first) * _WORD.itemsize
        data = self._folder.read_range(self._name, begin, begin + (end - first + 1) * _WORD.itemsize)
        if len(data) != (end - first + 1) * _WORD.itemsize:
            raise IndexDamaged(f"{self._folder.where(self._name)} is truncated")
        found = np.frombuffer(data, dtype=_WORD)
        if not (np.all(found[:-1] < found[1:]) and int(found[-1]) <= self.stamp.size):
            raise IndexDamaged(f"{self._folder.where(self._name)} contains invalid offsets")
        return found


class LineScan:
    """Finds the lines of a file from consecutive chunks of its bytes."""

    def __init__(self) -> None:
        self._starts = [np.zeros(1, dtype=_WORD)]
        self._position, self._last_byte = 0, b"\n"

    def feed(self, chunk: bytes) -> None:
        if chunk:
            newlines = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == 10)
            self._starts.append((newlines + (self._position + 1)).astype(_WORD))
            self._position += len(chunk)
            self._last_byte = chunk[-1:]

    def offsets(self) -> Offsets:
        """Return the offset of each line and of the end, [num_lines + 1]. A last line may have no line feed."""
        if self._last_byte != b"\n":
            self._starts.append(np.array([self._position], dtype=_WORD))
            self._last_byte = b"\n"
        self._starts = [np.concatenate(self._starts)]
        return self._starts[0]


def index_name(shard: str) -> str:
    """`zh/web-00000.jsonl` -> `zh/.web-00000.jsonl.idx`."""
    folder, name = posixpath.split(shard)
    return posixpath.join(folder, f".{name}.idx")


def load_or_build_index(folder: Folder, shard: str, stamp: Stamp) -> LineIndex:
    """Return the index of a shard whose current version is `stamp`."""
    return load_index(folder, shard, stamp) or build_index(folder, shard, stamp)


def load_index(folder: Folder, shard: str, stamp: Stamp) -> LineIndex | None:
    """Return the stored index; None if it is missing, damaged, or of another version of the shard."""
    name = index_name(shard)
    try:
        length = folder.stamp(name).size
        header = folder.read_range(name, 0, _HEADER_WORDS * _WORD.itemsize)
    except OSError:  # missing or not readable
        return None
    if len(header) != _HEADER_WORDS * _WORD.itemsize:
        return None
    mark, size, version, num_lines = (int(word) for word in np.frombuffer(header, dtype=_WORD))
    if (mark, size, version) != (_MARK, *stamp) or length != (_HEADER_WORDS + num_lines + 1) * _WORD.itemsize:
        return None
    return LineIndex(folder, shard, stamp, num_lines)


def build_index(folder: Folder, shard: str, stamp: Stamp) -> LineIndex:
    """Scan the shard. If its size has changed, the index has the new size and is not written."""
    scan, position, size = LineScan(), 0, stamp.size
    is_large = stamp.size > SHOW_PROGRESS_ABOVE_BYTES
    with progress(f"index {shard}", stamp.size, "bytes") if is_large else nullcontext() as advance:
        while position < size and (chunk := folder.read_range(shard, position, min(position + SCAN_BYTES, size))):
            scan.feed(chunk)
            position += len(chunk)
            if advance:
                advance(len(chunk))
            if position >= size:
                size = folder.stamp(shard).size
    offsets = scan.offsets()
    if position != stamp.size:
        return LineIndex(folder, shard, Stamp(position, stamp.version), len(offsets) - 1, offsets)
    return store_index(folder, shard, stamp, offsets)


def store_index(folder: Folder, shard: str, stamp: Stamp, offsets: Offsets) -> LineIndex:
    """Write the index next to its shard; keep it in memory if that fails."""
    header = np.array([_MARK, *stamp, len(offsets) - 1], dtype=_WORD)
    try:
        folder.write_whole(index_name(shard), np.concatenate([header, offsets]).tobytes())
    except OSError:
        return LineIndex(folder, shard, stamp, len(offsets) - 1, offsets)
    return LineIndex(folder, shard, stamp, len(offsets) - 1)
