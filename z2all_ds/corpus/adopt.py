"""Turns a folder of .jsonl or .parquet files into a corpus in place; the files are not copied or changed.

Every file is read once, to count and hash it and to make the line index of JSON Lines. The manifest is written last.
The domain of a file is its top-level subfolder, or its name without a trailing number.
"""

import hashlib
import io
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from z2all_ds.base.atomic import TEMPORARY_SUFFIX, explain_disk_errors
from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.base.storage import Folder, open_folder, reason
from z2all_ds.base.storage.folders import RangeFile
from z2all_ds.corpus.executors import Executor, run_all
from z2all_ds.corpus.line_index import SCAN_BYTES, LineScan, store_index
from z2all_ds.corpus.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, ShardInfo, write_manifest
from z2all_ds.corpus.shard_text import (
    DEFAULT_TEXT_FIELD,
    check_text_column,
    open_parquet,
    read_errors,
    text_columns,
    text_of_line,
)

FORMATS = (".jsonl", ".parquet")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".br")
FIRST_READ_BYTES = 1 << 16
LARGE_ROW_GROUP_BYTES = 128 * 10**6
_TEMPORARY = (TEMPORARY_SUFFIX, ".part", ".partial", ".incomplete", ".crdownload", "~")
_NUMBERED = re.compile(r"(.+?)(-\d+(-of-\d+)?(-[0-9a-f]{8,})?)")


class _Adopted(NamedTuple):
    """The entry of a file, and its largest row group in bytes of text (0 for JSON Lines)."""

    shard: ShardInfo
    largest_group_bytes: int


def adopt_corpus(
    location: str | Path,
    text_field: str = DEFAULT_TEXT_FIELD,
    domain: str | None = None,
    executor: Executor | None = None,
    *,
    replace: bool = False,
) -> Manifest:
    """Write and return the manifest of the files at a path or URL. `domain` sets one domain for all files."""
    folder = open_folder(location)
    if not text_field or domain == "":
        raise ConfigError("text_field" if domain != "" else "domain", "is an empty name", "Omit it, or give a name.")
    sizes = _find_files(folder, replace)
    names = list(sizes)
    with (executor or Executor()).opened() as run:
        # A missing field should be reported before hours of counting.
        for _ in run(partial(_check_first_record, folder, text_field), names):
            pass
        work = partial(_adopt_file, folder, text_field, domain)
        adopted = run_all(run, work, names, "adopt", list(sizes.values()))
    _warn_of_large_groups(adopted)
    shards = tuple(sorted((one.shard for one in adopted), key=lambda shard: (shard.domain, shard.path)))
    documents = sum(shard.documents for shard in shards)
    if not documents:
        raise DataError(folder.location, "the files contain no documents", "Give a folder with text.")
    manifest = Manifest(FORMAT_VERSION, shards, next_gid=documents, text_field=text_field)
    try:
        with explain_disk_errors(Path(folder.location)):
            write_manifest(folder.location, manifest)
    except OSError as error:
        rule, fix = f"cannot be written ({reason(error)})", "Use a writable location, e.g. a copy."
        raise MachineError(folder.where(MANIFEST_NAME), rule, fix) from error
    return manifest


def domain_of(name: str) -> str:
    """Return zh for `zh/a/b.jsonl`, web for `web-00012.jsonl`, train for `train-00000-of-00064.parquet`."""
    parts = PurePosixPath(name).parts
    if len(parts) > 1:
        return parts[0]
    stem = PurePosixPath(name).stem
    numbered = _NUMBERED.fullmatch(stem)
    return numbered[1] if numbered else stem


def _find_files(folder: Folder, replace: bool) -> dict[str, int]:
    """Return file name -> size."""
    try:
        all_sizes = folder.list_files()
    except OSError as error:
        raise DataError(folder.location, f"cannot be read ({reason(error)})", "Check the path or URL.") from None
    if MANIFEST_NAME in all_sizes and not replace:
        rule = "exists already: this is a corpus"
        raise ConfigError(folder.where(MANIFEST_NAME), rule, "Use it as it is, or give --replace to overwrite it.")
    names = [name for name in all_sizes if not _is_hidden_or_temporary(name) and name != MANIFEST_NAME]
    compressed = [name for name in names if name.lower().endswith(COMPRESSED)]
    if compressed:
        rule = f"{len(compressed)} compressed files, which do not allow random access"
        fix = "Decompress them, or make a corpus from them with `z2all corpus convert`."
        raise DataError(folder.where(compressed[0]), rule, fix)
    sizes = {name: all_sizes[name] for name in names if name.lower().endswith(FORMATS)}
    others = [name for name in names if name not in sizes]
    if not sizes:
        fix = "Give another folder; `z2all corpus convert` reads other formats."
        raise DataError(folder.location, f"contains no file that ends in {' or '.join(FORMATS)}", fix)
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        say(f"ignored {len(others)} files that do not end in {' or '.join(FORMATS)} ({shown})")
    return sizes


def _is_hidden_or_temporary(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts) or name.endswith(_TEMPORARY)


def _check_first_record(folder: Folder, text_field: str, name: str) -> None:
    """Raise unless the first record has a text."""
    where = folder.where(name)
    with read_errors(where, "Restore it, or remove it."):
        size = folder.stamp(name).size
        if _is_parquet(name):
            check_text_column(open_parquet(folder, name, size, where), text_field, where)
        elif size:
            line = io.BufferedReader(RangeFile(folder, name, size), FIRST_READ_BYTES).readline()
            text_of_line(line, text_field, f"{where}, record 0")


def _adopt_file(folder: Folder, text_field: str, domain: str | None, name: str) -> _Adopted:
    """Count and hash a file, and store its line index."""
    where, domain = folder.where(name), domain or domain_of(name)
    with read_errors(where, "Restore it, or remove it."):
        stamp, scan = folder.stamp(name), LineScan()
        digest, position = hashlib.sha256(), 0
        while chunk := folder.read_range(name, position, position + SCAN_BYTES):
            digest.update(chunk)
            if not _is_parquet(name):
                scan.feed(chunk)
            position += len(chunk)
        if position != stamp.size or folder.stamp(name) != stamp:
            raise DataError(where, "the file changed while it was read", "Do not change files meanwhile; run it again.")
        if _is_parquet(name):
            metadata = open_parquet(folder, name, stamp.size, where).metadata
            columns = text_columns(metadata, text_field)
            if nulls := sum(column.statistics.null_count or 0 for column in columns if column.statistics):
                rule = f"{nulls} of {metadata.num_rows} rows have no `{text_field}`, but every record needs a text"
                raise DataError(where, rule, "Remove these rows, or make a corpus with `z2all corpus convert`.")
            sizes = [column.total_uncompressed_size for column in columns]
            shard = ShardInfo(name, domain, metadata.num_rows, sum(sizes), digest.hexdigest())
            return _Adopted(shard, max(sizes, default=0))
        offsets = scan.offsets()
        empty = np.flatnonzero(np.diff(offsets) <= len("\r\n"))
        if len(empty):
            fix = f"Remove them: sed -i '/^\\s*$/d' {name}"
            raise DataError(f"{where}, record {empty[0]}", f"the file has {len(empty)} empty lines", fix)
        store_index(folder, name, stamp, offsets)
        return _Adopted(ShardInfo(name, domain, len(offsets) - 1, stamp.size, digest.hexdigest()), 0)


def _is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


def _warn_of_large_groups(adopted: Sequence[_Adopted]) -> None:
    large = [one for one in adopted if one.largest_group_bytes > LARGE_ROW_GROUP_BYTES]
    if large:
        largest = max(large, key=lambda one: one.largest_group_bytes)
        say(
            f"warning: {len(large)} of {len(adopted)} files have row groups with more than 128 MB of text "
            f"({largest.shard.path}: {largest.largest_group_bytes / 1e6:.0f} MB). "
            "Reading in shuffled order will be slow, because a whole row group is decoded for few rows. Write smaller "
            "row groups with pyarrow.parquet.write_table(..., row_group_size=1000), or tokenize the corpus."
        )
