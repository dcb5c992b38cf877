"""Access to the files of runs, and requests to another machine."""

import ast
import io
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base import child_process
from z2all_ds.track import files
from z2all_ds.track.files import MARK, Files, LinkedFiles, serve


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=12), st.lists(st.integers(0, 30000), max_size=12))
def test_lines_at_returns_the_first_whole_line_at_or_after_each_offset(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], places: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(b"".join(b"x" * length + b"\n" for length in lengths) + b"torn")
    begins = [sum(lengths[:number]) + number for number in range(len(lengths))]
    places = sorted(places)
    expected = []
    for place in places:
        after = [begin for begin in begins if begin >= place]
        if after and after[0] not in expected:
            expected.append(after[0])
    found = Files().lines_at(str(path), places)
    assert [offset for offset, _ in found] == expected
    assert [len(line) for _, line in found] == [lengths[begins.index(begin)] for begin in expected]


def test_lines_with_returns_the_whole_lines_that_contain_a_word(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"a": 1}', b'{"b": 1, "probe_x": 2}', b'{"a": 2}', b'{"probe_y": 1, "b": 1}', b'{"probe_torn']
    path.write_bytes(b"\n".join(lines))
    found = Files().lines_with(str(path), ['"b"', '"probe_'], 0, 1000)
    assert found == [(9, lines[1]), (9 + len(lines[1]) + 1 + 9, lines[3])]
    assert Files().lines_with(str(tmp_path / "missing"), ["x"], 0, 1000) == []


def test_run_folders_finds_a_run_or_the_runs_inside_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Files().run_folders(str(tmp_path / "later"))
    for name, file in (("b", "metrics.jsonl"), ("a", "run.yaml"), ("no_run", "notes.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    assert Files().run_folders(str(tmp_path)) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert Files().run_folders(str(tmp_path / "a")) == [str(tmp_path / "a")]


def test_links_of_others_are_not_followed(tmp_path: Path) -> None:
    """A link to a run folder is followed if the board's own user has made it; one inside a run folder never."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.yaml").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to("../elsewhere")
    assert Files().run_folders(str(tmp_path / "runs")) == [str(tmp_path / "runs" / "linked")]
    assert Files().file_names(str(tmp_path / "elsewhere")) == ["run.yaml"]
    assert Files().file_names(str(tmp_path / "runs" / "linked")) == []
    if os.geteuid() == 0:
        os.lchown(tmp_path / "runs" / "linked", 12345, 12345)
        assert Files().run_folders(str(tmp_path / "runs")) == [str(tmp_path / "runs")]


def test_links_and_fifos_are_not_read(tmp_path: Path) -> None:
    """A link in a run folder could lead to any file of the user who runs the board."""
    (tmp_path / "secret").write_text("password: geheim\n")
    (tmp_path / "link").symlink_to("secret")
    os.mkfifo(tmp_path / "fifo")
    for name, rule in (("link", "a symbolic link"), ("fifo", "not a regular file")):
        with pytest.raises(OSError, match=rule):
            Files().read(str(tmp_path / name), 0, 100)
        with pytest.raises(OSError, match=rule):
            Files().lines_at(str(tmp_path / name), [0])
    assert LinkedFiles().read(str(tmp_path / "link"), 0, 100) == b"password: geheim\n"
    folder = tmp_path / "linked_folder"
    folder.symlink_to(tmp_path)
    assert Files().read(str(folder / "secret"), 0, 8) == b"password"


def test_serve_answers_requests_with_results_and_errors(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n\xff\xe4\xb8\xad\n")
    calls = [("read", str(path), 4, 2), ("read", str(tmp_path), 0, 3), ("lines_at", str(path), [0, 2])]
    requests = [json.dumps({"method": method, "arguments": arguments}) for method, *arguments in calls]
    answers = io.StringIO()
    serve(io.StringIO("".join(f"{MARK}{request}\n" for request in requests)), answers)
    ready, *found = [json.loads(line.removeprefix(MARK)) for line in answers.getvalue().splitlines()]
    assert ready == {}
    assert found[0]["result"].encode("utf-8", "surrogateescape") == b"\xff\xe4"
    assert "directory" in found[1]["error"]
    assert found[2]["result"] == [[0, "one"], [4, "\udcff中"]]


def test_files_py_needs_only_python_3_7_and_the_standard_library() -> None:
    tree = ast.parse(Path(files.__file__).read_text(encoding="utf-8"), feature_version=(3, 7))
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
    assert MARK == child_process.MARK
