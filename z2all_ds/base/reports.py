"""Prints the result of a verb: as JSON for programs, as lines and tables for people."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from z2all_ds.base.console import printable

if TYPE_CHECKING:
    from rich.text import Text

Result = TypeVar("Result")
Cell = str | tuple[str, str]
"""Text, or text and its colour."""
GAP = "  "
NOT_PRINTABLE = re.compile("[\x7f-\x9f\ud800-\udfff]")
"""What JSON may contain: control characters of terminals, and lone surrogates (of file names that are not UTF-8)."""


@dataclass(frozen=True)
class Table:
    """Headings and rows. A row with fewer cells than headings ends with free text; an empty row is a blank line.

    Headings may have several lines.
    """

    columns: Sequence[str]
    rows: Iterable[Sequence[Cell]]
    align: str = "lr"
    """One letter per column, `l` or `r`; the last letter stands for all further columns."""


Shown = Iterable[str | Table]


def print_report(
    result: Result,
    as_json: bool,
    for_people: Callable[[Result], Shown],
    for_programs: Callable[[Result], Any] | None = None,
) -> None:
    """Print `result` on stdout: as JSON, or as the lines and tables that `for_people` makes of it.

    The JSON has the result's own fields unless `for_programs` gives other content.
    """
    if as_json:
        print(to_json(for_programs(result) if for_programs else result))
        return
    print_lines(for_people(result))


def print_lines(shown: Shown) -> None:
    """Print lines and tables on stdout."""
    for part in shown:
        if isinstance(part, Table):
            _print_table(part)
        else:
            print(printable(part))


def print_as_measured(
    results: Iterable[Result], as_json: bool, head: str, line: Callable[[Result], str]
) -> list[Result]:
    """Print `head` and a line per result as soon as it is known, and return all results.

    With `as_json` the lines go to stderr, because stdout is for the JSON.
    """
    file, found = sys.stderr if as_json else sys.stdout, list[Result]()
    for result in results:
        if not found:
            print(head, file=file)
        print(printable(line(result)), file=file, flush=True)
        found.append(result)
    return found


def to_json(value: Any) -> str:
    """Return indented JSON text of dataclasses, mappings, sequences and plain values."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    return NOT_PRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def plain(value: Any) -> Any:
    """Return `value` in types that JSON has. NaN and infinities become null, paths and other objects text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, Iterable):
        return [plain(one) for one in value]
    return str(value)


def _print_table(table: Table) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for number, part in enumerate(fitting_parts(table, console.width) if console.is_terminal else [table]):
        if number:
            console.print()
        for line in _table_lines(part):
            console.print(line, soft_wrap=True)  # a terminal folds a long line, nothing is cut off


def fitting_parts(table: Table, width: int) -> list[Table]:
    """Return the table, or if it is wider than `width` cells, several with some of its columns and always the first.

    A table with free text is not divided.
    """
    rows, count = list(table.rows), len(table.columns)
    if count < 3 or any(len(row) != count for row in rows):
        return [replace(table, rows=rows)]

    def part(numbers: list[int]) -> Table:
        align = "".join(table.align[min(number, len(table.align) - 1)] for number in numbers)
        return Table([table.columns[one] for one in numbers], [[row[one] for one in numbers] for row in rows], align)

    parts, chosen = list[Table](), [0]
    for number in range(1, count):
        widest = max((line.cell_len for line in _table_lines(part([*chosen, number]))), default=0)
        if len(chosen) > 1 and widest > width:
            parts.append(part(chosen))
            chosen = [0]
        chosen.append(number)
    return [*parts, part(chosen)]


def _table_lines(table: Table) -> "Iterator[Text]":
    from rich.text import Text

    heads = zip_longest(*(column.split("\n") for column in table.columns), fillvalue="") if any(table.columns) else ()
    cells = [[(one, "") if isinstance(one, str) else one for one in row] for row in (*heads, *table.rows)]
    rows = [[Text(printable(text), style) for text, style in row] for row in cells]
    count = len(table.columns)
    # The free text at the end of a short row takes no part in the widths.
    known = [row if len(row) == count else row[:-1] for row in rows]
    widths = [max(cell.cell_len for cell in column) for column in zip_longest(*known, fillvalue=Text())]
    for row in rows:
        line = Text()
        for number, cell in enumerate(row):
            room = " " * (widths[number] - cell.cell_len) if number < len(widths) else ""
            right = table.align[min(number, len(table.align) - 1)] == "r" and len(row) == count
            line.append(GAP if number else "")
            line = line + Text(room) + cell if right else line + cell + Text(room)
        line.rstrip()
        yield line
