"""Where the lines of a JSON-lines shard begin: found in one pass, kept beside the shard, read by ranges.

The index of `web-00000.jsonl` is `.web-00000.jsonl.idx`: little-endian 64-bit numbers, first a header (mark, size and
version of the shard, number of lines), then the offset of each line and of the end of the file. It is never held in
memory whole, as a corpus may have 10^9 documents; only where it cannot be written, it is.
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
"""Below it a scan takes less than a second."""
_WORD = np.dtype("<u8")
_HEADER_WORDS = 4
_MARK = int.from_bytes(b"z2lines2", "little")


class IndexDamaged(OSError):
    """The file beside the shard is not the index it was."""


class LineIndex:
    """Offsets of the lines of a shard as it was at `stamp`."""

    def __init__(self, folder: Folder, shard: str, stamp: Stamp, num_lines: int, kept: Offsets | None = None) -> None:
        """`kept` holds the offsets where they could not be written."""
        self.stamp, self.num_lines = stamp, num_lines
        self._folder, self._name, self._kept = folder, index_name(shard), kept

    def offsets(self, first: int, end: int) -> Offsets:
        """Of the lines `first` to `end` - 1 and of where the last of them ends, [end - first + 1]."""
        if self._kept is not None:
            return self._kept[first : end + 1]
        begin = (_HEADER_WORDS + first) * _WORD.itemsize
        data = self._folder.read_range(self._name, begin, begin + (end - first + 1) * _WORD.itemsize)
        if len(data) != (end - first + 1) * _WORD.itemsize:
            raise IndexDamaged(f"{self._folder.where(self._name)} is torn")
        found = np.frombuffer(data, dtype=_WORD)
        if not (np.all(found[:-1] < found[1:]) and int(found[-1]) <= self.stamp.size):
            raise IndexDamaged(f"{self._folder.where(self._name)} holds offsets that cannot be")
        return found


class LineScan:
    """Finds the lines of a file whose bytes are fed to it from the beginning."""

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
        """Of each line and of the end, [num_lines + 1]. What stands after the last newline is a line."""
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
    """The index of a shard that is now as `stamp` says."""
    return load_index(folder, shard, stamp) or build_index(folder, shard, stamp)


def load_index(folder: Folder, shard: str, stamp: Stamp) -> LineIndex | None:
    """The index beside the shard; None if there is none, or it is torn, or not of the shard as it is now."""
    name = index_name(shard)
    try:
        length = folder.stamp(name).size
        header = folder.read_range(name, 0, _HEADER_WORDS * _WORD.itemsize)
    except OSError:  # not there, or not readable: making it anew says what is wrong, if anything is
        return None
    if len(header) != _HEADER_WORDS * _WORD.itemsize:
        return None
    mark, size, version, num_lines = (int(word) for word in np.frombuffer(header, dtype=_WORD))
    if (mark, size, version) != (_MARK, *stamp) or length != (_HEADER_WORDS + num_lines + 1) * _WORD.itemsize:
        return None
    return LineIndex(folder, shard, stamp, num_lines)


def build_index(folder: Folder, shard: str, stamp: Stamp) -> LineIndex:
    """Reads the shard once. If its size changed meanwhile, the index says so, and is not written."""
    scan, position = LineScan(), 0
    is_large = stamp.size > SHOW_PROGRESS_ABOVE_BYTES
    with progress(f"index {shard}", stamp.size, "bytes") if is_large else nullcontext() as advance:
        while chunk := folder.read_range(shard, position, position + SCAN_BYTES):
            scan.feed(chunk)
            position += len(chunk)
            if advance:
                advance(len(chunk))
    offsets = scan.offsets()
    if position != stamp.size:
        return LineIndex(folder, shard, Stamp(position, stamp.version), len(offsets) - 1, offsets)
    return store_index(folder, shard, stamp, offsets)


def store_index(folder: Folder, shard: str, stamp: Stamp, offsets: Offsets) -> LineIndex:
    """Writes the index beside its shard, or keeps it in memory where that cannot be."""
    header = np.array([_MARK, *stamp, len(offsets) - 1], dtype=_WORD)
    try:
        folder.write_whole(index_name(shard), np.concatenate([header, offsets]).tobytes())
    except OSError:
        return LineIndex(folder, shard, stamp, len(offsets) - 1, offsets)
    return LineIndex(folder, shard, stamp, len(offsets) - 1)
