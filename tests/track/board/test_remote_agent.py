"""What the board asks of the machine that holds a run."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.track.board import remote_agent


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=12), st.lists(st.integers(0, 30000), max_size=12))
def test_the_line_at_a_place(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], places: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(b"".join(b"x" * length + b"\n" for length in lengths) + b"torn")
    begins = [sum(lengths[:number]) + number for number in range(len(lengths))]
    places = sorted(places)
    expected = []
    for place in places:
        after = [begin for begin in begins if begin >= place]
        if after and after[0] not in expected:
            expected.append(after[0])
    found = remote_agent.lines_at(str(path), places)
    assert [offset for offset, _ in found] == expected
    assert [len(line) for _, line in found] == [lengths[begins.index(begin)] for begin in expected]


def test_lines_with_a_word(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"a": 1}', b'{"b": 1, "probe_x": 2}', b'{"a": 2}', b'{"probe_y": 1, "b": 1}', b'{"probe_torn']
    path.write_bytes(b"\n".join(lines))
    found = remote_agent.lines_with(str(path), ['"b"', '"probe_'], 0, 1000)
    assert found == [(9, lines[1]), (9 + len(lines[1]) + 1 + 9, lines[3])]
    assert remote_agent.lines_with(str(tmp_path / "missing"), ["x"], 0, 1000) == []


def test_folders_of_runs(tmp_path: Path) -> None:
    assert remote_agent.run_folders(str(tmp_path / "later")) == [str(tmp_path / "later")]
    for name, file in (("b", "metrics.jsonl"), ("a", "run.yaml"), ("no_run", "notes.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    assert remote_agent.run_folders(str(tmp_path)) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert remote_agent.run_folders(str(tmp_path / "a")) == [str(tmp_path / "a")]


def test_requests_and_answers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    asked = [
        {"ask": "read", "path": str(path), "offset": 4, "length": 3},
        {"ask": "read", "path": str(tmp_path), "offset": 0, "length": 3},
        {"ask": "lines_at", "path": str(path), "offsets": [0, 2]},
    ]
    answers = io.BytesIO()
    remote_agent.serve(io.BytesIO(b"".join(json.dumps(one).encode() + b"\n" for one in asked)), answers)
    answers.seek(0)
    assert answers.readline() == b"z2all board\n"
    assert json.loads(answers.readline()) == {"sizes": [3]}
    assert answers.read(3) == b"two"
    assert "directory" in json.loads(answers.readline())["error"]
    sizes = json.loads(answers.readline())["sizes"]
    assert [answers.read(size) for size in sizes] == [b"[0, 4]", b"one", b"two"]
