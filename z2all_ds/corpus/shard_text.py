"""Extracts the text of a record from a line of JSON or a column of Parquet, with errors if it is missing."""

import codecs
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson

from z2all_ds.base.errors import BadRecordError, DataError, Z2allError
from z2all_ds.base.storage.folders import Folder, RangeFile, reason
from z2all_ds.corpus.schema import has_lone_surrogate

DEFAULT_TEXT_FIELD = "content"
REBUILD = "Restore the file, or build the corpus again."
REPAIR_OR_SKIP = "Repair the record, or skip such records: data.on_bad_record=skip in a run, else --on-bad-record skip."


@contextmanager
def read_errors(where: str, fix: str = REBUILD) -> Iterator[None]:
    """Turn an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(where, f"the file cannot be read ({reason(error)})", fix) from error


@contextmanager
def parquet_errors(where: str, fix: str = REBUILD) -> Iterator[None]:
    """Turn an error about the content of a Parquet file into a DataError. pyarrow raises many types, such as KeyError
    and UnicodeDecodeError for damaged names of columns."""
    try:
        yield
    except (Z2allError, OSError, MemoryError):
        raise
    except Exception as error:
        raise DataError(where, f"not a readable Parquet file ({one_line(error)})", fix) from error


def text_of_line(line: bytes, text_field: str, where: str) -> str:
    """Return the text of one line. `where` is the shard and the record, for errors."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = _read_slowly(line, text_field, where)
    if not isinstance(record, dict):
        raise BadRecordError(where, "a record must be a JSON object", REPAIR_OR_SKIP)
    text = record.get(text_field)
    if type(text) is str:
        return text
    if text_field not in record:
        raise no_field(where, text_field, list(record), REPAIR_OR_SKIP)
    raise BadRecordError(where, f"`{text_field}` must be a string and is {type(text).__name__}", REPAIR_OR_SKIP)


def _read_slowly(line: bytes, text_field: str, where: str) -> Any:
    """Parse lines that orjson refuses: NaN, a byte order mark, half a surrogate pair."""
    try:
        record = json.loads(line.decode("utf-8-sig", "surrogatepass"))  # of bytes it would accept UTF-16, too
    except (ValueError, RecursionError) as error:  # ValueError: invalid JSON or UTF-8
        raise BadRecordError(where, _why_not_json(line, error), REPAIR_OR_SKIP) from error
    text = record.get(text_field) if isinstance(record, dict) else None
    if isinstance(text, str) and has_lone_surrogate(text):
        rule = f"`{text_field}` contains half a surrogate pair, which is not valid Unicode"
        raise BadRecordError(where, rule, REPAIR_OR_SKIP)
    return record


def _why_not_json(line: bytes, error: Exception) -> str:
    if not line.strip():
        return "the line is empty"
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "the line is not UTF-8 (it begins with a UTF-16 mark)"
    return f"the line is not JSON in UTF-8 ({error})"


def open_parquet(
    folder: Folder, name: str, size: int, where: str, metadata: Any = None, source: Any = None, **options: Any
) -> Any:
    """Open a ParquetFile without read-ahead. With `metadata`, the footer is not read again. `source`: a file object to
    read it from."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pa.PythonFile(source or RangeFile(folder, name, size), mode="r")
    with parquet_errors(where):
        found = pq.ParquetFile(file, metadata=metadata, pre_buffer=False, page_checksum_verification=True, **options)
        list(found.schema_arrow.names)  # raises if they are damaged
        return found


def check_text_column(file: Any, text_field: str, where: str) -> None:
    """Raise unless the column exists and contains strings."""
    import pyarrow as pa

    names = list(file.schema_arrow.names)
    if text_field not in names:
        raise no_field(where, text_field, names)
    kind = file.schema_arrow.field(text_field).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(values) or pa.types.is_large_string(values) or values == pa.string_view()):
        fix = "Choose another column, or write it as strings."
        raise DataError(where, f"the column `{text_field}` must contain strings and has type {kind}", fix)


def text_columns(metadata: Any, text_field: str) -> list[Any]:
    """Return the metadata of the text column in each row group."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if not groups:
        return []
    paths = [groups[0].column(number).path_in_schema for number in range(groups[0].num_columns)]
    return [group.column(paths.index(text_field)) for group in groups]


def one_line(error: BaseException) -> str:
    """Return the message of a library error without line breaks."""
    return " ".join(str(error).split())[:300]


def no_field(where: str, text_field: str, fields: Sequence[str], further: str = "") -> BadRecordError:
    """Return the error for a record or a file without the field; `further` is another way to fix it."""
    rule = f"has no field `{text_field}`; its fields are: {', '.join(map(str, fields)) or 'none'}"
    fix = "Give the field with the text: `z2all corpus adopt ... --text-field NAME`."
    return BadRecordError(where, rule, f"{fix} {further}".rstrip())
