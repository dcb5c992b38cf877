"""Reports as JSON and as tables, which all verbs share."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

from z2all_ds.base.reports import Table, print_as_measured, print_report, to_json


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
    assert print_as_measured([], as_json, "head", str) == []
