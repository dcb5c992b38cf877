"""Turns a folder of .jsonl or .parquet files into a corpus in place; the files are not copied or changed.

Every file is read completely, to check its records, to count and hash it, and to make the line index of JSON Lines. The
manifest is written last. The domain of a file is its top-level subfolder, or its name without its number; files whose
name is only a number (000_00012.parquet) belong to one domain, named like the folder.
"""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from z2all_ds.base.atomic import TEMPORARY_SUFFIX, explain_disk_errors
from z2all_ds.base.console import say
from z2all_ds.base.errors import BadRecordError, ConfigError, DataError, MachineError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage import Folder, open_folder, reason
from z2all_ds.base.storage.folders import RangeFile
from z2all_ds.corpus.converters.generic import CONTENT_NAMES
from z2all_ds.corpus.executors import Executor, run_all
from z2all_ds.corpus.faults import ON_ERROR
from z2all_ds.corpus.forms.plan import check_file
from z2all_ds.corpus.line_index import store_index
from z2all_ds.corpus.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, ShardInfo, write_manifest
from z2all_ds.corpus.shard_check import check_shard, is_parquet
from z2all_ds.corpus.shard_text import (
    DEFAULT_TEXT_FIELD,
    check_text_column,
    no_field,
    open_parquet,
    read_errors,
    text_of_line,
)

FORMATS = (".jsonl", ".parquet")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".br")
FIRST_READ_BYTES = 1 << 16
FIRST_RECORDS = 100
FIRST_RECORDS_BYTES = 1 << 22
"""The text field is looked for in up to this many records or bytes, because some records may be invalid."""
LARGE_ROW_GROUP_BYTES = 128 * 10**6
_TEMPORARY = (TEMPORARY_SUFFIX, ".part", ".partial", ".incomplete", ".crdownload", "~")
_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_AFTER_PIECE = "|".join(f"(?<={word})" for word in ("batch", "chunk", "data", "file", "part", "shard", "split"))
# A number after a dot that follows a digit may be a version (v1.5), and one right after a letter part of a name (c4).
_NUMBERED = re.compile(
    rf"(.+?)([-_]\d+|\.\d{{3,}}|(?<!\d)\.\d+|({_AFTER_PIECE})\d+|[-_.]{_UUID})"
    r"([-_]of[-_]\d+)?(-[0-9a-f]{8}[0-9a-f-]*)?(-c\d+)?(\.(snappy|gz|zstd|lz4))?",
    re.IGNORECASE,
)
_NUMBER_INSIDE = re.compile(r"(.+?)[-_]\d{5,}([-_][A-Za-z_-]+)")
_ONLY_NUMBER = re.compile(rf"\d+([-_.]\d+)*|{_UUID}", re.IGNORECASE)
_YEAR = re.compile(r"(19|20)\d\d")
FILES_AS_DOMAINS, NUMBERED_FILES_AS_DOMAINS = 10, 3
"""If most files have a domain each, and they are at least this many, or this many with a digit in their name, their
names were probably not meant to name domains."""


class _Adopted(NamedTuple):
    """The entry of a file, and its largest row group in bytes of text (0 for JSON Lines)."""

    shard: ShardInfo
    largest_group_bytes: int
    bad: int
    """Records without a valid text."""


def adopt_corpus(
    location: str | Path,
    text_field: str | None = None,
    domain: str | None = None,
    executor: Executor | None = None,
    *,
    replace: bool = False,
    on_error: str = "stop",
    follow_links: bool = False,
) -> Manifest:
    """Write and return the manifest of the files at a path or URL.

    `text_field` is guessed from the first records by default, and `domain` sets one domain for all files. With
    `on_error="skip"`, files with invalid records are adopted too; a run then needs data.on_bad_record=skip.
    """
    folder = open_folder(location)
    if text_field == "" or domain == "":
        raise ConfigError("text_field" if domain != "" else "domain", "is an empty name", "Omit it, or give a name.")
    if on_error not in ON_ERROR:
        raise ConfigError(f"--on-error {on_error}", f"must be {' or '.join(ON_ERROR)}", "Omit it.")
    sizes = _find_files(folder, replace)
    names = list(sizes)
    if folder.is_local:
        for name in names:
            check_file(Path(folder.where(name)), None if follow_links else Path(folder.location))
    text_field = text_field or _guessed_field(folder, sizes)
    with (executor or Executor()).opened() as run:
        # A missing field should be reported before hours of counting.
        if on_error == "stop":
            for _ in run(partial(_check_field, folder, text_field), names):
                pass
        folder_name = Path(folder.location).resolve().name if folder.is_local else folder.location.rpartition("/")[2]
        domains = dict.fromkeys(names, domain) if domain else domains_of(names, folder_name or "documents")
        work = partial(_adopt_file, folder, text_field, on_error)
        adopted = run_all(run, work, list(domains.items()), "adopt", list(sizes.values()))
    if bad := sum(one.bad for one in adopted):
        say(f"warning: {bad:,} records have no valid text; a run reads this corpus only with data.on_bad_record=skip")
    _warn_of_large_groups(adopted)
    shards = tuple(sorted((one.shard for one in adopted), key=lambda shard: (shard.domain, shard.path)))
    _warn_of_files_as_domains(shards)
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


def domains_of(names: Iterable[str], folder_name: str) -> dict[str, str]:
    """Return the domain of each file: zh for `zh/a/b.jsonl`, web for `web-00012.jsonl`, and `folder_name` for
    `000_00012.parquet`. Years (`2023.jsonl`) are domains if all files that are named by a number are years."""
    paths = {name: PurePosixPath(name) for name in names}
    numbers = {path.stem for path in paths.values() if len(path.parts) == 1 and _ONLY_NUMBER.fullmatch(path.stem)}
    if all(map(_YEAR.fullmatch, numbers)):
        numbers = set()
    return {
        name: path.parts[0] if len(path.parts) > 1 else folder_name if path.stem in numbers else _unnumbered(path.stem)
        for name, path in paths.items()
    }


def _unnumbered(stem: str) -> str:
    """Return `web` for `web-00012`, and `web_clean` for `web_00012_clean`."""
    if found := _NUMBERED.fullmatch(stem):
        return found[1]
    inside = _NUMBER_INSIDE.fullmatch(stem)
    return inside[1] + inside[2] if inside else stem


def _find_files(folder: Folder, replace: bool) -> dict[str, int]:
    """Return file name -> size."""
    try:
        all_sizes = folder.list_files()
    except OSError as error:
        what = error.filename or folder.location
        if isinstance(error, FileNotFoundError) and not Path(folder.location).exists():
            raise DataError(folder.location, "no such folder", "Correct the path.") from None
        raise DataError(what, f"cannot be read ({reason(error)})", "Give a readable folder.") from None
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


def _check_field(folder: Folder, text_field: str, name: str) -> None:
    """Raise if no record at the beginning of the file has the text field."""
    where = folder.where(name)
    with read_errors(where, "Restore it, or remove it."):
        size = folder.stamp(name).size
        if is_parquet(name):
            check_text_column(open_parquet(folder, name, size, where), text_field, where)
            return
        lines, fields = list[bytes](), dict[str, None]()
        for line in first_lines(folder, name, size):
            lines.append(line)
            fields |= fields_of(line)
            if text_field in fields:
                return
    if fields:
        raise no_field(f"{where}, record 0", text_field, list(fields))
    if lines:
        _refuse_first(lines, text_field, f"{where}, record 0")


def _refuse_first(lines: Sequence[bytes], text_field: str, where: str) -> None:
    """Raise the error of the first of these lines, none of which is a record."""
    try:
        text_of_line(lines[0], text_field, where)
    except BadRecordError as error:
        fix = "Give files with a JSON object per line, or convert them with `z2all corpus convert`."
        raise DataError(where, f"{error.rule}; no valid record up to line {len(lines)}", fix) from None


def first_lines(folder: Folder, name: str, size: int) -> Iterator[bytes]:
    """Yield some lines from the beginning of the file: FIRST_RECORDS, or fewer if they are long."""
    stream, size_read = io.BufferedReader(RangeFile(folder, name, size), FIRST_READ_BYTES), 0
    for line in islice(stream, FIRST_RECORDS):
        yield line
        size_read += len(line)
        if size_read > FIRST_RECORDS_BYTES:
            return


def fields_of(line: bytes) -> dict[str, None]:
    """Return the fields of the record; none if the line is not a record."""
    with suppress(ValueError):
        record = load_json(line)
        return dict.fromkeys(record) if isinstance(record, dict) else {}
    return {}


def _guessed_field(folder: Folder, sizes: dict[str, int]) -> str:
    """Return `content`, or the first usual name of a text that the first records have."""
    name = next((name for name, size in sizes.items() if size), "")
    where = folder.where(name)
    fields: list[str] = []
    with read_errors(where, "Restore it, or remove it."):
        if is_parquet(name):
            fields = list(open_parquet(folder, name, sizes[name], where).schema_arrow.names)
        elif name:
            fields = [field for line in first_lines(folder, name, sizes[name]) for field in fields_of(line)]
    found = next((one for one in (DEFAULT_TEXT_FIELD, *CONTENT_NAMES) if one in fields), DEFAULT_TEXT_FIELD)
    if found != DEFAULT_TEXT_FIELD:
        say(f"the text is in the field `{found}`; --text-field chooses another")
    return found


def _adopt_file(folder: Folder, text_field: str, on_error: str, file: tuple[str, str]) -> _Adopted:
    """Check, count and hash a file, given as its name and domain, and store its line index."""
    name, domain = file
    where = folder.where(name)
    with read_errors(where, "Restore it, or remove it."):
        stamp = folder.stamp(name)
        found = check_shard(folder, name, text_field, stamp.size)
        if found.bytes != stamp.size or folder.stamp(name) != stamp:
            raise DataError(where, "the file changed while it was read", "Do not change files meanwhile; run it again.")
    is_all_bad = found.bad == found.documents
    if found.bad and (on_error == "stop" or is_all_bad):
        rule = f"{found.problems[0].partition(': ')[2]}; {found.bad:,} of {found.documents:,} records are invalid"
        fix = "Repair or remove them, convert the files with `z2all corpus convert`, or accept them: --on-error skip."
        if is_all_bad:
            fix = "Remove the file, convert it with `z2all corpus convert`, or name the field: --text-field NAME."
        raise DataError(f"{where}, {found.problems[0].partition(':')[0]}", rule, fix)
    size = sum(found.text_column_bytes) if is_parquet(name) else stamp.size
    shard = ShardInfo(name, domain, found.documents, size, found.sha256, found.text_bytes)
    if not is_parquet(name):
        store_index(folder, name, stamp, found.scan.offsets())
    return _Adopted(shard, max(found.text_column_bytes, default=0), found.bad)


def _warn_of_files_as_domains(shards: Sequence[ShardInfo]) -> None:
    """Files with a number (web-00000.jsonl) and files in subfolders do not count: these are meant to form domains."""
    files = Counter(shard.domain for shard in shards)
    alone = [one.domain for one in shards if files[one.domain] == 1 and one.path.rpartition(".")[0] == one.domain]
    with_digit = [name for name in alone if any(map(str.isdigit, name))]
    is_suspicious = len(alone) >= FILES_AS_DOMAINS or len(with_digit) >= NUMBERED_FILES_AS_DOMAINS
    if is_suspicious and len(alone) > len(shards) / 2:
        say(
            f"warning: {len(alone)} of {len(shards)} files are a domain of their own; --domain NAME makes all files one"
        )


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
