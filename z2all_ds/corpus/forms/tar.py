"""Reader of tar archives as a stream in bounded memory.

`tarfile` follows the sizes in headers without limits: a member of 2^62 bytes, or a name of 150 MB, keeps it busy for
ever. Here only the header blocks are parsed by it; extended headers are limited and members end with the stream.
"""

import tarfile
from collections.abc import Iterator
from contextlib import suppress

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.streams import CHUNK_BYTES, Stream, Unreadable

BLOCK = tarfile.BLOCKSIZE
MAX_HEADER_BYTES = 2**20
"""Limit of an extended header: paths have at most 4,096 bytes, and other entries are small too."""
_LONG_NAME, _PAX = (tarfile.GNUTYPE_LONGNAME,), (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_IGNORED = (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE)


def tar_members(stream: Stream) -> Iterator[tuple[str, Stream]]:
    """Yield name and content of regular files; links and devices are skipped, and so is the unread rest of a member."""
    name, pax = "", dict[str, str]()
    while (info := _next_header(stream)) is not None:
        if info.type in (*_LONG_NAME, *_PAX, *_IGNORED):
            data = _extended_header(stream, info.size)
            if info.type in _LONG_NAME:
                name = data.partition(b"\0")[0].decode("utf-8", "surrogateescape")
            elif info.type in _PAX:
                pax = _pax_records(data)
            continue
        name, size = pax.get("path", name or info.name), _size(pax, info.size)
        is_sparse = info.issparse() or any(key.startswith("GNU.sparse") for key in pax)
        if info.type == tarfile.GNUTYPE_SPARSE:
            _skip_sparse_maps(stream, info)
        # As in tarfile: links, folders and devices have no data, whatever the size in their header.
        rest = _Rest(stream, size if info.isreg() or info.type not in tarfile.SUPPORTED_TYPES else 0)
        if is_sparse:  # a few bytes can describe exabytes of zeros
            yield name, Stream((), Fault("container", "a sparse file; pack it without --sparse"))
        elif info.isreg():
            yield name, Stream(rest.chunks())
        for _ in rest.chunks():
            pass
        _read(stream, -size % BLOCK if rest.had_data else 0, "inside a member")
        name, pax = "", {}


class _Rest:
    """The bytes of a member that were not read yet."""

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream, self._left, self.had_data = stream, size, size > 0

    def chunks(self) -> Iterator[bytes]:
        while self._left:
            data = self._stream.read(min(self._left, CHUNK_BYTES))
            if not data:
                fault = self._stream.fault or Fault("container", "the tar archive ends inside this member")
                raise Unreadable(fault.detail, fault.kind)
            self._left -= len(data)
            yield data


def _next_header(stream: Stream) -> tarfile.TarInfo | None:
    """Return the next header, or None at the end of the archive."""
    block = stream.read(BLOCK)
    if stream.fault:
        raise Unreadable(stream.fault.detail, stream.fault.kind)
    if not block.strip(b"\0"):  # a block of zeros, or the end of a file without one
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError) as error:
        raise Unreadable(f"broken tar archive ({error})") from None
    if info.size < 0:
        raise Unreadable(f"broken tar archive (a member of {info.size} bytes)")
    return info


def _extended_header(stream: Stream, size: int) -> bytes:
    if size > MAX_HEADER_BYTES:
        raise Unreadable(f"a header of {size:,} bytes in a tar archive; the limit is {MAX_HEADER_BYTES:,}", "expansion")
    return _read(stream, size + -size % BLOCK, "inside a header")[:size]


def _read(stream: Stream, size: int, where: str) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        fault = stream.fault or Fault("container", f"the tar archive ends {where}")
        raise Unreadable(fault.detail, fault.kind)
    return data


def _pax_records(data: bytes) -> dict[str, str]:
    """Return the entries of a pax header: lines `LENGTH KEY=VALUE`, where LENGTH counts the whole line."""
    found, at = dict[str, str](), 0
    while at < len(data):
        digits, _, _ = data[at : at + 20].partition(b" ")
        if not digits.isdigit() or int(digits) <= len(digits):
            break
        line = data[at + len(digits) + 1 : at + int(digits) - 1]
        key, _, value = line.partition(b"=")
        found[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        at += int(digits)
    return found


def _size(pax: dict[str, str], size: int) -> int:
    with suppress(ValueError):
        return max(0, int(pax.get("size", size)))
    return size


def _skip_sparse_maps(stream: Stream, info: tarfile.TarInfo) -> None:
    """Skip the blocks that continue the map of an old GNU sparse file."""
    more = info._sparse_structs[1]  # type: ignore[attr-defined]
    while more:
        more = _read(stream, BLOCK, "inside a header")[504]
