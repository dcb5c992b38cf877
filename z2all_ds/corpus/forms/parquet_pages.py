"""The decompressed size of a column chunk of a Parquet file, from the headers of its pages.

The footer gives this size too, but readers do not depend on it, so it may be false. They depend on the sizes in the
headers: a page that decompresses to more than its size is an error. A header is a struct of Thrift's compact protocol,
whose fields 2 and 3 are the decompressed and the compressed size of the page after it.
"""

from typing import Any, Protocol

BUFFER_BYTES = 1024
"""For files opened to read headers. Most of them have less than 100 bytes, and pages up to about 1 MB."""
_INT16, _INT32, _INT64, _BINARY, _STRUCT = 4, 5, 6, 8, 12
_BYTES_OF = {1: 0, 2: 0, 3: 1, 7: 8}
"""Bytes of a value by type: true, false, byte, double. Headers have no lists or maps."""
_MAX_DEPTH = 8


class BinaryFile(Protocol):
    """A file of bytes, with a buffer: the headers are read byte by byte."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def tell(self) -> int: ...


def chunk_bytes(file: BinaryFile, column: Any) -> int:
    """Return the decompressed size of the pages of a column chunk, given its metadata. Raise ValueError if a header is
    damaged."""
    position = column.data_page_offset
    if 0 < (column.dictionary_page_offset or 0) < position:
        position = column.dictionary_page_offset
    end, bytes_found = position + column.total_compressed_size, 0
    while position < end:
        file.seek(_in_range(position, 2**63))
        page = _read_struct(file)
        bytes_found += _in_range(page.get(2, -1), 2**31)
        position = file.tell() + _in_range(page.get(3, -1), 2**31)
    return bytes_found


def _in_range(number: int, limit: int) -> int:
    """Return the number. Others than these would be cut to fewer bits by pyarrow, which would find other pages."""
    if not 0 <= number < limit:
        raise ValueError(f"invalid page header: {number} instead of a number from 0 to {limit - 1}")
    return number


def _read_struct(file: BinaryFile, depth: int = 0) -> dict[int, int]:
    """Return the 32-bit fields of a struct by id."""
    found: dict[int, int] = {}
    field = 0
    while (head := _byte(file)) & 15:
        difference, kind = divmod(head, 16)
        field = _in_range(field + difference if difference else _signed(file), 2**15)
        if kind == _INT32:
            found[field] = _signed(file)
        elif kind in (_INT16, _INT64):
            _unsigned(file)
        elif kind == _BINARY:
            file.seek(_in_range(_unsigned(file), 2**31), 1)
        elif kind in _BYTES_OF:
            file.seek(_BYTES_OF[kind], 1)
        elif kind == _STRUCT and depth < _MAX_DEPTH:
            _read_struct(file, depth + 1)
        else:
            raise ValueError(f"invalid page header: a value of type {kind}")
    return found


def _byte(file: BinaryFile) -> int:
    data = file.read(1)
    if not data:
        raise ValueError("the file ends in a page header")
    return data[0]


def _unsigned(file: BinaryFile) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = _byte(file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("invalid page header: a number of more than 10 bytes")


def _signed(file: BinaryFile) -> int:
    """Read an integer in zigzag encoding: 0, -1, 1, -2 ..."""
    value = _unsigned(file)
    return (value >> 1) ^ -(value & 1)
