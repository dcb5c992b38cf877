"""Parquet files whose footer understates the size of a column."""

import io

import pyarrow.parquet as pq


def varint(number: int, size: int = 1) -> bytes:
    """Return at least `size` bytes."""
    found: list[int] = []
    while number or len(found) < size:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes(found[:-1]) + bytes([found[-1] & 127])


def with_false_size(data: bytes, group: int = 0, column: int = 0) -> bytes:
    """Return the file with a size of 30 bytes for a column of a row group."""
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") :]
    real = varint(2 * pq.read_metadata(io.BytesIO(data)).row_group(group).column(column).total_uncompressed_size)
    assert real in footer
    return data[: -len(footer)] + footer.replace(real, varint(60, len(real)))
