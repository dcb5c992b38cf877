"""Reports as JSON and as tables, which all verbs share."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

from z2all_ds.base.reports import Table, fitting_parts, print_as_measured, print_report, to_json


@dataclass(frozen=True)
class Figures:
    folder: Path
    rates: dict[str, float]
    parts: tuple[int, ...] = ()


def test_values_without_a_json_type_are_converted() -> None:
    found = Figures(Path("a/b"), {"good": 1.5, "nan": float("nan"), "far": float("-inf")}, (1, 2))
    expected = {"folder": "a/b", "rates": {"good": 1.5, "nan": None, "far": None}, "parts": [1, 2]}
    assert json.loads(to_json({"all": [found], "when": date(2026, 1, 2), "is": True})) == {
        "all": [expected],
        "when": "2026-01-02",
        "is": True,
    }
    assert "中" in to_json("中")
    assert json.loads(to_json("\x1b\x7f\x9b")) == "\x1b\x7f\x9b"
    assert to_json("\x1b\x7f\x9b") == '"\\u001b\\u007f\\u009b"'


def test_print_report_prints_text_tables_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[tuple[str | tuple[str, str], ...]] = [
        ("中文", "1", "x"),
        ("[b]a", "12,345", ("", "red")),
        ("c", "failed: a long text"),
    ]
    table = Table(("name", "count", "note"), rows, "lrl")
    print_report(3, False, lambda number: [f"{number} rows", table, Table((), [("a", "b")])])
    assert capsys.readouterr().out.splitlines() == [
        "3 rows",
        "name   count  note",
        "中文       1  x",
        "[b]a  12,345",
        "c     failed: a long text",
        "a  b",
    ]
    print_report(3, True, lambda number: [], lambda number: {"rows": number})
    assert json.loads(capsys.readouterr().out) == {"rows": 3}
    print_report(3, True, lambda number: [])
    assert capsys.readouterr().out == "3\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_each_result_is_printed_as_soon_as_it_is_measured(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def measured() -> Iterator[int]:
        yield 1
        out, error = capsys.readouterr()
        assert (error if as_json else out) == "head\n1\n"
        yield 2

    assert print_as_measured(measured(), as_json, "head", str) == [1, 2]
    capsys.readouterr()
    print_as_measured(["\x1b"], as_json, "head", str)
    assert "".join(capsys.readouterr()) == "head\n\\x1b\n"
    assert print_as_measured([], as_json, "head", str) == []


def test_a_table_wider_than_the_terminal_is_divided_into_parts_with_the_first_column() -> None:
    table = Table(("domain", "documents", "JSON", "mean", "longest"), [["百科", "12,345", "1.1 GiB", "9", "77"]], "lr")
    parts = fitting_parts(table, 30)
    assert [list(part.columns) for part in parts] == [["domain", "documents", "JSON"], ["domain", "mean", "longest"]]
    assert [list(map(list, part.rows)) for part in parts] == [[["百科", "12,345", "1.1 GiB"]], [["百科", "9", "77"]]]
    assert {part.align for part in parts} == {"lrr"}
    assert len(fitting_parts(table, 41)) == 1
    assert [len(part.columns) for part in fitting_parts(table, 1)] == [2, 2, 2, 2]
    with_text = Table(("a", "b", "c"), [["x" * 50, "y", "z"], ["free text"]])
    assert len(fitting_parts(with_text, 10)) == 1
