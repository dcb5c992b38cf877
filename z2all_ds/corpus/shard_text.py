"""Extracts the text of a record from a line of JSON or a column of Parquet, with errors if it is missing."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage.folders import Folder, RangeFile, reason
from z2all_ds.corpus.schema import has_lone_surrogate

DEFAULT_TEXT_FIELD = "content"
REBUILD = "Restore the file, or build the corpus again."


@contextmanager
def read_errors(where: str, fix: str = REBUILD) -> Iterator[None]:
    """Turn an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(where, f"the file cannot be read ({reason(error)})", fix) from error


def text_of_line(line: bytes, text_field: str, where: str) -> str:
    """Return the text of one line. `where` is the shard and the record, for errors."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = _read_slowly(line, where)
    if not isinstance(record, dict):
        raise DataError(where, "a record must be a JSON object", REBUILD)
    text = record.get(text_field)
    if type(text) is str:
        return text
    if text_field not in record:
        raise _no_field(where, text_field, list(record))
    raise DataError(where, f"`{text_field}` must be a string and is {type(text).__name__}", REBUILD)


def _read_slowly(line: bytes, where: str) -> Any:
    """Parse lines that orjson refuses: NaN, a byte order mark, half a surrogate pair."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: invalid JSON or UTF-8
        raise DataError(where, f"the line is not JSON in UTF-8 ({error})", REBUILD) from error
    if isinstance(record, dict):
        for name, value in record.items():
            if isinstance(value, str) and has_lone_surrogate(value):
                raise DataError(where, f"`{name}` contains half a surrogate pair, which is not valid Unicode", REBUILD)
    return record


def open_parquet(folder: Folder, name: str, size: int, where: str, metadata: Any = None) -> Any:
    """Open a ParquetFile without read-ahead. With `metadata`, the footer is not read again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pa.PythonFile(RangeFile(folder, name, size), mode="r")
    try:
        return pq.ParquetFile(file, metadata=metadata, pre_buffer=False, page_checksum_verification=True)
    except pa.ArrowException as error:
        raise DataError(where, f"not a readable Parquet file ({one_line(error)})", REBUILD) from error


def check_text_column(file: Any, text_field: str, where: str) -> None:
    """Raise unless the column exists and contains strings."""
    import pyarrow as pa

    names = list(file.schema_arrow.names)
    if text_field not in names:
        raise _no_field(where, text_field, names)
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


def _no_field(where: str, text_field: str, fields: list[str]) -> DataError:
    rule = f"has no field `{text_field}`; its fields are: {', '.join(map(str, fields)) or 'none'}"
    return DataError(where, rule, "Give the field with the text: `z2all corpus adopt ... --text-field NAME`.")
