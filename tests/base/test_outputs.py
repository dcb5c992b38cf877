"""Tests for files that users name for output."""

import os
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from z2all_ds.base import outputs
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.outputs import HEAD_BYTES, MARK, check_output, check_plot, require_writable, write_output, write_plot


def refusals(path: Path, rule: str) -> None:
    for refused in (check_output, require_writable, lambda path: write_output(path, "x")):
        with pytest.raises(ConfigError, match=f"^--out .*: {rule}"):
            refused(path)


def test_a_new_file_and_one_with_our_mark_are_written(tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.json"
    for text in (f"one {MARK}", f"two {MARK}", "three"):
        require_writable(out)
        assert write_output(out, text) == out
        assert out.read_text() == text
    assert list(tmp_path.rglob("*")) == [out.parent, out]


@pytest.mark.parametrize("target", ["x.json", "nothing", "target.json"])
def test_a_link_is_refused_and_stays(tmp_path: Path, target: str) -> None:
    out, there = tmp_path / "x.json", tmp_path / "target.json"
    there.write_text("mine")
    out.symlink_to(target)
    refusals(out, r"is a link\. Give the file")
    assert out.readlink() == Path(target) and there.read_text() == "mine"


@pytest.mark.parametrize("content", [b"mine", b"# written by z2all", b"\n" * HEAD_BYTES + MARK.encode()])
def test_a_file_without_our_mark_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "x.json"
    out.write_bytes(content)
    refusals(out, r"is there already and carries no mark of z2all\. Give another name, or remove it\.$")
    assert out.read_bytes() == content and list(tmp_path.iterdir()) == [out]


def test_an_empty_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.json").touch()
    require_writable(tmp_path / "x.json")
    assert write_output(tmp_path / "x.json", "x").read_text() == "x"


def test_a_pipe_is_refused_and_stays(tmp_path: Path) -> None:
    """So is a device: root could replace /dev/null."""
    os.mkfifo(tmp_path / "x.json")
    refusals(tmp_path / "x.json", "is not a regular file")
    assert (tmp_path / "x.json").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_appears_while_ours_is_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x.json"

    def write_slowly(temporary: Path, data: str, mode: int) -> None:
        temporary.write_text(data)
        out.write_text("mine")

    monkeypatch.setattr(outputs, "write_whole", write_slowly)
    with pytest.raises(ConfigError, match="is there already"):
        write_output(out, "x")
    assert out.read_text() == "mine" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", ["x.png", "x.svg"])
def test_a_plot_carries_the_mark(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    for width in (4, 5):
        check_plot(out)
        write_plot(Figure(figsize=(width, 4)), out)
    assert out.read_bytes().find(MARK.encode()) < 1000
    if name == "x.png":
        with Image.open(out) as picture:
            assert picture.info["Creator"] == MARK
            assert picture.size == (500, 400)


def test_other_places_that_cannot_be_written_are_named_with_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--write .*: is a folder\. Use a file in it\.$"):
        write_output(tmp_path, "x", "--write")
    with pytest.raises(ConfigError, match=r"^--write /proc/x: cannot be written \("):
        write_output(Path("/proc/x"), "x", "--write")


def test_a_file_next_to_the_output_stays(tmp_path: Path) -> None:
    notes = tmp_path / "loss.png.tmp"
    notes.write_text("of the user")
    require_writable(tmp_path / "loss.png")
    write_output(tmp_path / "loss.png", b"picture")
    assert notes.read_text() == "of the user"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "loss.png.tmp"]
