"""Makes a corpus of a folder of raw .jsonl or .parquet files where they lie: nothing is copied or changed.

Every file is read once: counted, hashed, and for JSON lines the index of its lines is made on the way. The manifest is
written last. A domain is a sub-folder, or the files at the top whose names differ by a number.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from z2all_ds.base.atomic import TEMPORARY_SUFFIX, explain_disk_errors
from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.base.storage import Folder, Stamp, open_folder, reason
from z2all_ds.corpus.executors import Executor
from z2all_ds.corpus.line_index import SCAN_BYTES, LineScan, store_index
from z2all_ds.corpus.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, ShardInfo, write_manifest
from z2all_ds.corpus.shard_text import (
    DEFAULT_TEXT_FIELD,
    check_text_column,
    open_parquet,
    text_columns,
    text_of_line,
)

FORMATS = (".jsonl", ".parquet")
PACKED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".br")
LARGE_ROW_GROUP_BYTES = 128 * 10**6
_TEMPORARY = (TEMPORARY_SUFFIX, ".part", ".partial", ".incomplete", ".crdownload", "~")
_NUMBERED = re.compile(r"(.+?)(-\d+(-of-\d+)?(-[0-9a-f]{8,})?)")


class _File(NamedTuple):
    name: str
    domain: str


class _Found(NamedTuple):
    """What reading a file gave."""

    shard: ShardInfo
    largest_group_bytes: int
    """Of text in a row group; 0 for JSON lines."""


def adopt_corpus(
    location: str | Path,
    text_field: str = DEFAULT_TEXT_FIELD,
    domain: str | None = None,
    executor: Executor | None = None,
    *,
    replace: bool = False,
) -> Manifest:
    """Writes the manifest of the files under a folder or URL, and returns it. `domain` is that of all files."""
    folder = open_folder(location)
    if not text_field or domain == "":
        raise ConfigError("text_field" if domain != "" else "domain", "is an empty name", "Leave it out, or name one.")
    files, sizes = _find_files(folder, domain, replace)
    found: list[_Found | None] = [None] * len(files)
    with (executor or Executor()).opened() as run:
        # First a look into every file: a field that is not there is said before hours of counting.
        for _ in run(partial(_check_beginning, folder, text_field), files):
            pass
        with progress("adopt", sum(sizes), "bytes") as advance:
            for number, one in run(partial(_read_through, folder, text_field), files):
                found[number] = one
                advance(sizes[number], files[number].name)
    read = [one for one in found if one is not None]
    _warn_of_large_groups(read)
    shards = tuple(one.shard for one in sorted(read, key=lambda one: (one.shard.domain, one.shard.path)))
    documents = sum(shard.documents for shard in shards)
    if not documents:
        raise DataError(folder.location, "the files hold no documents", "Give a folder with text.")
    manifest = Manifest(FORMAT_VERSION, shards, next_gid=documents, text_field=text_field)
    _write(folder, manifest)
    return manifest


def domain_of(name: str) -> str:
    """`zh/a/b.jsonl` -> zh, `web-00012.jsonl` -> web, `train-00000-of-00064.parquet` -> train, `book.jsonl` -> book."""
    parts = PurePosixPath(name).parts
    if len(parts) > 1:
        return parts[0]
    stem = PurePosixPath(name).stem
    numbered = _NUMBERED.fullmatch(stem)
    return numbered[1] if numbered else stem


def _find_files(folder: Folder, domain: str | None, replace: bool) -> tuple[list[_File], list[int]]:
    try:
        there = folder.list_files()
    except OSError as error:
        raise DataError(folder.location, f"cannot be read ({reason(error)})", "Check the path or URL.") from None
    if MANIFEST_NAME in there and not replace:
        rule = "is there already: this is a corpus"
        raise ConfigError(folder.where(MANIFEST_NAME), rule, "Use it as it is, or give --replace to write another.")
    names = [name for name in there if not _is_hidden_or_temporary(name) and name != MANIFEST_NAME]
    packed = [name for name in names if name.lower().endswith(PACKED)]
    if packed:
        rule = f"{len(packed)} packed files, which cannot be read in any order but their own"
        fix = "Unpack them, or make a corpus of them with `z2all corpus convert`."
        raise DataError(folder.where(packed[0]), rule, fix)
    chosen = [name for name in names if name.lower().endswith(FORMATS)]
    others = [name for name in names if not name.lower().endswith(FORMATS)]
    if not chosen:
        fix = "Give another folder; `z2all corpus convert` reads other formats."
        raise DataError(folder.location, f"holds no file that ends in {' or '.join(FORMATS)}", fix)
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        say(f"left out, as they end neither in {' nor in '.join(FORMATS)}: {len(others)} files ({shown})")
    return [_File(name, domain or domain_of(name)) for name in chosen], [there[name] for name in chosen]


def _is_hidden_or_temporary(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts) or name.endswith(_TEMPORARY)


def _check_beginning(folder: Folder, text_field: str, file: _File) -> None:
    """The first record must have its text."""
    where = folder.where(file.name)
    with _errors_named(where):
        size = folder.stamp(file.name).size
        if _is_parquet(file):
            check_text_column(open_parquet(folder, file.name, size, where), text_field, where)
        elif size:
            text_of_line(_first_line(folder, file.name), text_field, f"{where}, record 0")


def _first_line(folder: Folder, name: str) -> bytes:
    line, wanted = b"", 1 << 16
    while True:
        part = folder.read_range(name, len(line), len(line) + wanted)
        head, newline, _ = part.partition(b"\n")
        line += head
        if newline or not part:
            return line
        wanted *= 2


def _read_through(folder: Folder, text_field: str, file: _File) -> _Found:
    """Counts and hashes a file, and keeps the index of its lines."""
    where = folder.where(file.name)
    with _errors_named(where):
        stamp = folder.stamp(file.name)
        scan = LineScan()
        digest = _digest(folder, file.name, stamp, (lambda _: None) if _is_parquet(file) else scan.feed)
        if _is_parquet(file):
            metadata = open_parquet(folder, file.name, stamp.size, where).metadata
            columns = text_columns(metadata, text_field)
            if nulls := sum(column.statistics.null_count or 0 for column in columns if column.statistics):
                rule = (
                    f"{nulls} of {metadata.num_rows} rows have no `{text_field}`, and every record must have its text"
                )
                raise DataError(where, rule, "Leave these rows out, or make a corpus with `z2all corpus convert`.")
            sizes = [column.total_uncompressed_size for column in columns]
            shard = ShardInfo(file.name, file.domain, metadata.num_rows, sum(sizes), digest)
            return _Found(shard, max(sizes, default=0))
        offsets = scan.offsets()
        too_short = np.flatnonzero(np.diff(offsets) <= len("\r\n"))
        if len(too_short):
            fix = f"Remove them: sed -i '/^\\s*$/d' {file.name}"
            raise DataError(f"{where}, record {too_short[0]}", f"the file has {len(too_short)} empty lines", fix)
        store_index(folder, file.name, stamp, offsets)
        return _Found(ShardInfo(file.name, file.domain, len(offsets) - 1, stamp.size, digest), 0)


def _digest(folder: Folder, name: str, stamp: Stamp, feed: Callable[[bytes], None]) -> str:
    digest, position = hashlib.sha256(), 0
    while chunk := folder.read_range(name, position, position + SCAN_BYTES):
        digest.update(chunk)
        feed(chunk)
        position += len(chunk)
    if position != stamp.size or folder.stamp(name) != stamp:
        fix = "Leave the files alone while they are adopted, and run it again."
        raise DataError(folder.where(name), "the file changed while it was read", fix)
    return digest.hexdigest()


def _is_parquet(file: _File) -> bool:
    return file.name.lower().endswith(".parquet")


@contextmanager
def _errors_named(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(where, f"the file cannot be read ({reason(error)})", "Restore it, or move it away.") from error


def _warn_of_large_groups(found: list[_Found]) -> None:
    large = [one for one in found if one.largest_group_bytes > LARGE_ROW_GROUP_BYTES]
    if large:
        most = max(large, key=lambda one: one.largest_group_bytes)
        say(
            f"warning: {len(large)} of {len(found)} files have row groups with more than 128 MB of text "
            f"({most.shard.path}: {most.largest_group_bytes / 1e6:.0f} MB). "
            "Reading them in shuffled order will be slow, as a row group is decoded for a few of its rows. Write them "
            "again with smaller ones: pyarrow.parquet.write_table(..., row_group_size=1000), or tokenize the corpus."
        )


def _write(folder: Folder, manifest: Manifest) -> None:
    try:
        with explain_disk_errors(Path(folder.location)):
            write_manifest(folder.location, manifest)
    except OSError as error:
        fix = "Give a place that can be written to, e.g. a copy."
        raise MachineError(folder.where(MANIFEST_NAME), f"cannot be written ({reason(error)})", fix) from error
