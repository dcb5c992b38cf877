"""Lines in blocks: cuts a stream at line ends without ever holding more than one record and one block.

A slice of a file owns the lines whose first byte lies in it, so slices of any size give every line exactly once.
Blocks are handed on whole, because iterating an io.BytesIO gives lines at several GB/s, and bytes.split at 1 GB/s.
"""

from collections.abc import Iterator

from z2all_ds.corpus.forms.streams import ByteStream

BLOCK_BYTES = 262_144


class LongLine:
    """In place of a line that is longer than a record may be."""

    def __init__(self, size: int) -> None:
        self.size = size


def line_blocks(
    stream: ByteStream, max_line_bytes: int, *, skip_first: bool = False, size: int | None = None
) -> Iterator[bytes | LongLine]:
    """Blocks of whole lines with their ends (the very last may lack it), and the lines that are too long.

    `skip_first` leaves out everything up to the first line end; `size` is how far the slice goes from here: the line
    that is open at that place is read to its end, none after it.
    """
    block_bytes = min(BLOCK_BYTES, max_line_bytes)
    open_line: list[bytes] = []
    open_bytes = 0  # of the line that has begun and has no end yet, also when it is too long to be kept
    skipping = skip_first
    while size is None or size > 0 or (open_bytes and not skipping):
        last_line = size is not None and size <= 0
        data = stream.read(block_bytes if size is None or last_line else min(block_bytes, size))
        if not data:
            break
        if size is not None:
            size -= len(data)
        if skipping:
            line_end = data.find(b"\n")
            if line_end < 0:
                continue
            data, skipping = data[line_end + 1 :], False
        if last_line:
            line_end = data.find(b"\n")
            data = data[: line_end + 1] if line_end >= 0 else data
        # data: [rest of the open line] [whole lines] [begin of the next open line]
        first_end = data.find(b"\n") + 1
        if not first_end:
            open_bytes += len(data)
            open_line.append(data)
            if open_bytes > max_line_bytes:
                open_line.clear()
            continue
        whole_end = data.rfind(b"\n") + 1
        if open_bytes + first_end > max_line_bytes + 1:  # the line end is not part of the record
            yield LongLine(open_bytes + first_end - 1)
            whole = data[first_end:whole_end]
        else:
            whole = b"".join((*open_line, data[:whole_end]))
        if whole:
            yield whole
        open_bytes = len(data) - whole_end
        open_line = [data[whole_end:]] if open_bytes else []
        if last_line:
            return
    if open_bytes > max_line_bytes:
        yield LongLine(open_bytes)
    elif open_bytes and not skipping:
        yield b"".join(open_line)
