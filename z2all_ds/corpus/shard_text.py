"""The text of a record, in a line of JSON or in a column of Parquet, and what is said when it is not there."""

import json
from typing import Any

import orjson

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage.folders import Folder, RangeFile
from z2all_ds.corpus.schema import has_lone_surrogate

DEFAULT_TEXT_FIELD = "content"
REBUILD = "Restore the file, or build the corpus again."


def text_of_line(line: bytes, text_field: str, where: str) -> str:
    """`where` names the shard and the record."""
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
    raise DataError(where, f"`{text_field}` must be a text and is {type(text).__name__}", REBUILD)


def _read_slowly(line: bytes, where: str) -> Any:
    """What orjson refuses and other writers write: NaN, a byte order mark, half a surrogate pair in another field."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 both
        raise DataError(where, f"the line is not JSON in UTF-8 ({error})", REBUILD) from error
    if isinstance(record, dict):
        for name, value in record.items():
            if isinstance(value, str) and has_lone_surrogate(value):
                raise DataError(where, f"`{name}` holds half a surrogate pair, which is no Unicode", REBUILD)
    return record


def open_parquet(folder: Folder, name: str, size: int, where: str, metadata: Any = None) -> Any:
    """pyarrow's ParquetFile, set to read no more than it is asked for. `metadata` spares the footer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pa.PythonFile(RangeFile(folder, name, size), mode="r")
    try:
        return pq.ParquetFile(file, metadata=metadata, pre_buffer=False, page_checksum_verification=True)
    except pa.ArrowException as error:
        raise DataError(where, f"no readable Parquet file ({one_line(error)})", REBUILD) from error


def check_text_column(file: Any, text_field: str, where: str) -> None:
    """The column must be there and be one of texts."""
    import pyarrow as pa

    names = list(file.schema_arrow.names)
    if text_field not in names:
        raise _no_field(where, text_field, names)
    kind = file.schema_arrow.field(text_field).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(values) or pa.types.is_large_string(values) or values == pa.string_view()):
        fix = "Choose another column as the text, or make Parquet files with texts in it."
        raise DataError(where, f"the column `{text_field}` must be of texts and is of {kind}", fix)


def text_columns(metadata: Any, text_field: str) -> list[Any]:
    """What the footer says of the text column in each row group."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if not groups:
        return []
    paths = [groups[0].column(place).path_in_schema for place in range(groups[0].num_columns)]
    return [group.column(paths.index(text_field)) for group in groups]


def one_line(error: BaseException) -> str:
    """A library's message, without its line breaks."""
    return " ".join(str(error).split())[:300]


def _no_field(where: str, text_field: str, there: list[str]) -> DataError:
    rule = f"has no field `{text_field}`; there are: {', '.join(map(str, there)) or 'none'}"
    return DataError(where, rule, "Name the one that holds the text: `z2all corpus adopt ... --text-field NAME`.")
