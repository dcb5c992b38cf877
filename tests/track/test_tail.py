"""Incremental reading of a file that grows, is truncated, and grows beyond its previous size."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.track import tail as tail_module
from z2all_ds.track.board.events import EventLog
from z2all_ds.track.files import Files
from z2all_ds.track.tail import LineTail


def line(step: int, moment: float) -> bytes:
    return json.dumps({"step": step, "loss": 2.0, "time_unix": moment}).encode() + b"\n"


def steps(lines: list[bytes]) -> list[int]:
    return [json.loads(one)["step"] for one in lines]


def test_only_whole_lines_are_returned_each_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = LineTail(path)
    assert tail.read().lines == []
    path.write_bytes(line(1, 1.0) + line(2, 2.0)[:-5])
    assert steps(tail.read().lines) == [1]
    assert tail.read().lines == []
    path.write_bytes(line(1, 1.0) + line(2, 2.0))
    found = tail.read()
    assert steps(found.lines) == [2]
    assert found.is_all and not found.is_restarted


def test_a_file_that_was_truncated_and_grew_longer_is_read_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(step, float(step)) for step in range(1, 6)))
    tail = LineTail(path)
    tail.read()
    path.write_bytes(b"".join(line(step, step + (100.0 if step > 3 else 0.0)) for step in range(1, 9)))
    found = tail.read()
    assert found.is_restarted
    assert steps(found.lines) == list(range(1, 9))


def test_a_long_line_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'"' + b"x" * 100 + b'"\n' + line(2, 2.0))
    tail = LineTail(path)
    found = tail.read(most_bytes=8)
    assert (len(found.lines), found.is_all) == (1, False)
    rest = []
    while not found.is_all:
        found = tail.read(most_bytes=8)
        rest += found.lines
    assert steps(rest) == [2]


def test_reading_can_start_in_the_middle_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1, 1.0) + line(2, 2.0))
    tail = LineTail(path)
    tail.skip_to(len(line(1, 1.0)))
    assert steps(tail.read().lines) == [2]
    assert not tail.read().is_restarted


def test_a_line_that_is_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "LONGEST_LINE_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    whole = line(1, 1.0) + b"x" * 1000 + b"\n" + line(2, 2.0) + b"y" * 150
    for most_bytes in (8, 60, 1000, 10_000):
        path.write_bytes(whole)
        tail = LineTail(path)
        found: list[bytes] = []
        for text in (whole, whole + b"\n" + line(3, 3.0)):
            path.write_bytes(text)
            is_all = False
            while not is_all:
                new = tail.read(most_bytes)
                is_all = new.is_all
                begin = tail.offset - sum(len(one) + 1 for one in new.lines)
                assert not new.is_restarted and (not new.lines or text.startswith(new.lines[0], begin))
                found += new.lines
        short = [one for one in found if len(one) < 100]
        assert [json.loads(one)["step"] for one in short if one] == [1, 2, 3]
        assert len(found) == 5


def test_a_sparse_file_is_read_in_small_steps(tmp_path: Path) -> None:
    """A file of zeros takes no space, and its line has no end."""
    path = tmp_path / "events.jsonl"
    path.touch()
    os.truncate(path, 10**11)
    log, stat = EventLog(Files(), str(path)), [1e11, 0.0, 1.0]
    tracemalloc.start()
    try:
        assert all(log.update(stat) for _ in range(3))
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
        assert Files().lines_at(str(path), list(range(0, 10**11, 10**8))) == []
    finally:
        tracemalloc.stop()
    os.truncate(path, 10 << 20)
    with open(path, "ab") as file:
        file.write(b"\n" + json.dumps({"event": "done", "step": 3}).encode() + b"\n")
    log = EventLog(Files(), str(path))
    for _ in range(5):
        log.update(stat)
    assert (log.unparsable, log.count, log.outcome) == (1, 1, "done")


@settings(max_examples=60, deadline=None)
@given(
    acts=st.lists(st.tuples(st.sampled_from(["add", "cut", "look"]), st.integers(0, 12)), max_size=30),
    most_bytes=st.integers(1, 400),
)
def test_the_lines_read_are_the_lines_of_the_file(
    acts: list[tuple[str, int]], most_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For any sequence of growing, truncating and reading, the lines since the last restart are those of the file."""
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    tail, moment = LineTail(path), 0.0
    history: list[Any] = []
    seen: list[Any] = []
    for act, number in [*acts, ("look", 0)]:
        if act == "cut":
            history = history[:number]
        for _ in range(number if act == "add" else 0):
            moment += 1
            history.append(line(len(history) + 1, moment))
        path.write_bytes(b"".join(history))
        while act == "look":
            found = tail.read(most_bytes)
            seen = [*([] if found.is_restarted else seen), *found.lines]
            if found.is_all:
                break
    assert seen == [one.rstrip(b"\n") for one in history]
