"""Finds the raw files of a domain and splits them into slices that workers read independently."""

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.paths import expanded
from z2all_ds.corpus.forms.detect import FORMS, form_of, without_packing_endings
from z2all_ds.corpus.forms.opening import detect, open_zip, zip_files
from z2all_ds.corpus.forms.parquet import open_parquet
from z2all_ds.corpus.forms.slices import Slice
from z2all_ds.corpus.forms.streams import DiskFile, Unreadable

DEFAULT_SLICE_BYTES = 128 * 2**20


def expand_raw(paths: Iterable[str | Path], follow_links: bool = False) -> list[Path]:
    """Return each file once. Folders give their files in sorted order without hidden ones; patterns are expanded.

    Links inside a folder or pattern that lead out of it are refused unless `follow_links`.
    """
    found: dict[str, Path] = {}  # by real path, because links give a file several names
    for given in paths:
        path = expanded(given)
        if path.exists():
            root, matches = path, [path]
        elif glob.has_magic(str(path)):
            root = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
            matches = [Path(match) for match in sorted(_matches(path, None if follow_links else root))]
        else:
            raise DataError(str(given), "does not exist", "Check the path; relative paths start at the current folder.")
        files = [file for match in matches for file in _files_in(match, None if follow_links else root)]
        if not files:
            raise DataError(str(given), "contains no file (hidden files are ignored)", "Check the path.")
        for file in files:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _matches(pattern: Path, root: Path | None) -> set[str]:
    """Return the files and folders that match. `**` stands for each folder once, also where links form loops."""
    if "**" not in pattern.parts:
        return set(glob.glob(str(pattern)))
    place = pattern.parts.index("**")
    above, below = Path(*pattern.parts[:place]), pattern.parts[place + 1 :]
    tops = filter(os.path.isdir, _matches(above, root) if glob.has_magic(str(above)) else {str(above)})
    if not below:
        return set(tops)
    folders = {folder for top in tops for folder, _ in _walk(Path(top), root)}
    return {match for folder in folders for match in _matches(Path(glob.escape(folder), *below), root)}


def _files_in(path: Path, root: Path | None) -> list[Path]:
    """Return the files in a folder, or the file itself. Links must stay inside `root`, if it is given."""
    if not path.is_dir():
        check_file(path, root)
        return [path]
    files = []
    for folder, names in _walk(path, root):
        found = [Path(folder, name) for name in names if not name.startswith(".")]
        for file in found:
            check_file(file, root)
        files += found
    return sorted(files)


def _walk(path: Path, root: Path | None) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder once, with the names of its files, also through links; hidden folders are left out."""

    def refuse(error: OSError) -> None:
        raise DataError(str(error.filename), f"cannot be read ({error.strerror})", "Check its permissions.") from None

    seen = set[str]()
    for folder, subfolders, names in os.walk(path, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()  # a link to a parent folder
            continue
        seen.add(real)
        check_inside(Path(folder), root)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield folder, names


def check_file(file: Path, root: Path | None) -> None:
    """Raise unless it is a regular file, or a link to one that does not lead out of the folder `root`."""
    if not file.is_file():
        is_lost = file.is_symlink() and not file.exists()
        rule = f"a link to {os.readlink(file)}, which does not exist" if is_lost else "not a regular file"
        raise DataError(str(file), rule, "Remove it, or name the files to read.")
    check_inside(file, root)


def check_inside(path: Path, root: Path | None) -> None:
    """Raise if the path leads out of the folder `root` by a link; not if it is the root itself."""
    if root is None or path == root:
        return
    real, real_root = os.path.realpath(path), os.path.realpath(root)
    if real != real_root and not real.startswith(os.path.join(real_root, "")):
        fix = "Give --follow-links if you want to read it."
        raise DataError(str(path), f"leads out of {root}, to {real}", fix)


def plan_slices(path: Path, form: str, slice_bytes: int = DEFAULT_SLICE_BYTES) -> list[Slice]:
    """Return the slices of the whole file, in order. `form` may be auto."""
    if form not in (*FORMS, "auto"):
        raise ConfigError(f"form {form!r}", f"must be one of {', '.join(FORMS)} or auto", "Leave it out.")
    assert slice_bytes > 0, slice_bytes
    try:
        size = path.stat().st_size
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise DataError(str(path), rule, "Check the path and its permissions.") from None
    try:
        disk = DiskFile(path)
    except Unreadable:  # the reader reports the reason
        form = form_of(without_packing_endings(path.name), b"") if form == "auto" else form
        return [Slice(str(path), form, raw_bytes=size)]
    with closing(disk):
        if disk.packing == "zip":
            return _plan_zip(disk, form, size, slice_bytes)
        form = detect(disk) if form == "auto" else form
    if form == "parquet" and not disk.packing:
        return _plan_parquet(path, size, slice_bytes)
    if form not in ("jsonl", "lines") or disk.packing:
        return [Slice(str(path), form, raw_bytes=size)]
    last = max(0, size - 1) // slice_bytes * slice_bytes
    return [
        Slice(str(path), form, start, stop if start < last else None, raw_bytes=min(stop, size) - start)
        for start, stop in ((start, start + slice_bytes) for start in range(0, last + 1, slice_bytes))
    ]


def _plan_parquet(path: Path, size: int, slice_bytes: int) -> list[Slice]:
    try:
        with open_parquet(path) as table:
            groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
            sizes = [sum(group.column(n).total_compressed_size for n in range(group.num_columns)) for group in groups]
    except Exception:
        return [Slice(str(path), "parquet", raw_bytes=size)]  # the reader reports the reason
    ranges = _group_neighbours(sizes, slice_bytes)
    return [Slice(str(path), "parquet", start, stop, raw_bytes=sum(sizes[start:stop])) for start, stop in ranges]


def _plan_zip(disk: DiskFile, form: str, size: int, slice_bytes: int) -> list[Slice]:
    """Combine small members into one slice, because each slice reads the table of contents again."""
    path = str(disk.path)
    try:
        with open_zip(disk) as archive:
            members = zip_files(archive)
    except Unreadable:
        members = []
    slices = []
    for start, stop in _group_neighbours([max(info.file_size, info.compress_size) for info in members], slice_bytes):
        raw_bytes = sum(info.compress_size for info in members[start:stop])
        slices.append(Slice(path, form, start, stop, members[start].filename, raw_bytes))
    return slices or [Slice(path, form, raw_bytes=size)]


def _group_neighbours(sizes: list[int], slice_bytes: int) -> list[tuple[int, int]]:
    """Return index ranges whose sums stay within `slice_bytes`; a larger item gets its own range."""
    ranges: list[tuple[int, int]] = []
    start, total = 0, 0
    for number, size in enumerate(sizes):
        if number > start and total + size > slice_bytes:
            ranges.append((start, number))
            start, total = number, 0
        total += size
    return [*ranges, (start, len(sizes))] if sizes else []
