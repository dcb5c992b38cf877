"""How much memory the values of a Parquet file take, computed before they are decoded.

A file can be small in two ways: its pages are compressed, which the headers of the pages tell, and values are
references to a dictionary, so that a few bytes stand for a long text in every row.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

from z2all_ds.corpus.forms.parquet_pages import BUFFER_BYTES, chunk_bytes

BATCH_LIMIT_BYTES = 64 * 2**20
"""Upper limit of one batch, unless a single row is larger."""


def group_bytes(meta: Any, file: Path | IO[bytes]) -> int:
    """Return the decompressed size of a row group, in which dictionaries are not expanded. Raise ValueError if the file
    is damaged."""
    columns = [meta.column(number) for number in range(meta.num_columns)]
    with file.open("rb", BUFFER_BYTES) if isinstance(file, Path) else nullcontext(file) as opened:
        return sum(max(column.total_uncompressed_size, chunk_bytes(opened, column)) for column in columns)


def dictionary_columns(table: Any, in_lists: bool) -> list[str]:
    """Return the paths of texts that may refer to a dictionary: those inside of lists and maps, or the others.

    Texts in lists are kept as references, because a single row may have millions of them.
    """
    schema, groups = table.schema, range(table.metadata.num_row_groups)
    found = []
    for number in range(len(schema)):
        column = schema.column(number)
        is_wanted = column.physical_type == "BYTE_ARRAY" and (column.max_repetition_level > 0) == in_lists
        if is_wanted and any(table.metadata.row_group(group).column(number).has_dictionary_page for group in groups):
            found.append(column.path)
    return found


def rows_within_limit(table: Any, texts: Any, group: int, columns: list[str] | None = None) -> int:
    """Return how many rows of a row group can be decoded at once, whatever their references.

    `texts` is the same file, opened with `read_dictionary` for its dictionary columns; None if there are none. Only
    these `columns` of it count, by default all.
    """
    schema = table.schema
    largest = [
        schema.column(n).length for n in range(len(schema)) if schema.column(n).physical_type.startswith("FIXED")
    ]
    if texts is not None:
        # The first row comes with the whole dictionary of its column, also where it is null.
        first = next(texts.iter_batches(batch_size=1, row_groups=[group], columns=columns, use_threads=False), None)
        largest += [_longest(column) for column in first.columns] if first is not None else []
    return max(1, BATCH_LIMIT_BYTES // max(1, sum(largest)))


def _longest(array: Any) -> int:
    import pyarrow.compute as pc
    from pyarrow import types

    if types.is_struct(array.type):
        return sum(_longest(field) for field in array.flatten())
    return (pc.max(pc.binary_length(array.dictionary)).as_py() or 0) if types.is_dictionary(array.type) else 0


def expanded_bytes(array: Any) -> int:
    """Return the size of an array in which every reference to a dictionary is replaced by its text."""
    import pyarrow.compute as pc
    from pyarrow import types

    kind = array.type
    if types.is_dictionary(kind):
        return pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0
    if types.is_struct(kind):
        return sum(expanded_bytes(field) for field in array.flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = array.offsets
        first, end = offsets[0].as_py(), offsets[-1].as_py()
        return int(offsets.nbytes) + expanded_bytes(array.values.slice(first, end - first))
    return int(array.nbytes)
