"""Cuts raw files into slices that workers can read on their own."""

from pathlib import Path

from z2all_ds.base.errors import DataError
from z2all_ds.corpus.forms.archives import open_zip, zip_files
from z2all_ds.corpus.forms.detect import check_form, detect
from z2all_ds.corpus.forms.parquet import open_parquet
from z2all_ds.corpus.forms.slices import Slice
from z2all_ds.corpus.forms.streams import DiskFile, Unreadable
from z2all_ds.corpus.forms.unpack import packing_of_file

DEFAULT_SLICE_BYTES = 128 * 2**20


def plan_slices(path: Path, form: str, slice_bytes: int = DEFAULT_SLICE_BYTES) -> list[Slice]:
    """Slices in the file's order; together they are the whole file. `form` may be auto."""
    check_form(form)
    assert slice_bytes > 0, slice_bytes
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(
            str(path), f"cannot be read ({error.strerror})", "Check the path and its permissions."
        ) from None
    packing = packing_of_file(path)
    if packing == "zip":
        return _plan_zip(path, form, size, slice_bytes)
    if form == "auto":
        form, is_archive = detect(path)
        if is_archive:
            form = "auto"
    if packing:
        return [Slice(str(path), form, raw_bytes=size)]
    if form in ("jsonl", "lines"):
        last = max(0, size - 1) // slice_bytes * slice_bytes
        return [
            Slice(str(path), form, start, stop if start < last else None, raw_bytes=min(stop, size) - start)
            for start, stop in ((start, start + slice_bytes) for start in range(0, last + 1, slice_bytes))
        ]
    if form == "parquet":
        return _plan_parquet(path, size, slice_bytes)
    return [Slice(str(path), form, raw_bytes=size)]


def _plan_parquet(path: Path, size: int, slice_bytes: int) -> list[Slice]:
    import pyarrow as pa

    try:
        with open_parquet(path) as table:
            groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
            sizes = [sum(group.column(n).total_compressed_size for n in range(group.num_columns)) for group in groups]
    except (pa.ArrowException, OSError):
        return [Slice(str(path), "parquet", raw_bytes=size)]  # reading it says what is wrong
    ranges = _together(sizes, slice_bytes)
    return [Slice(str(path), "parquet", start, stop, raw_bytes=sum(sizes[start:stop])) for start, stop in ranges]


def _plan_zip(path: Path, form: str, size: int, slice_bytes: int) -> list[Slice]:
    """Many small members make one slice: each slice reads the archive's table of contents anew."""
    try:
        disk = DiskFile(path, lambda _: None)
        try:
            with open_zip(disk) as archive:
                members = zip_files(archive)
        finally:
            disk.close()
    except Unreadable:
        return [Slice(str(path), form, raw_bytes=size)]
    slices = []
    for start, stop in _together([max(info.file_size, info.compress_size) for info in members], slice_bytes):
        raw_bytes = sum(info.compress_size for info in members[start:stop])
        slices.append(Slice(str(path), form, start, stop, members[start].filename, raw_bytes))
    return slices or [Slice(str(path), form, raw_bytes=size)]


def _together(sizes: list[int], slice_bytes: int) -> list[tuple[int, int]]:
    """Ranges of neighbours that stay within the slice size; one that is larger stands alone."""
    ranges: list[tuple[int, int]] = []
    start, total = 0, 0
    for number, size in enumerate(sizes):
        if number > start and total + size > slice_bytes:
            ranges.append((start, number))
            start, total = number, 0
        total += size
    return [*ranges, (start, len(sizes))] if sizes else []
