"""Tests for files that users name for output."""

from pathlib import Path

import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.outputs import check_output, require_writable, write_output


def test_a_new_and_an_existing_file_are_written(tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.json"
    for text in ("one", "two"):
        require_writable(out)
        assert write_output(out, text) == out
        assert out.read_text() == text
    assert list(tmp_path.rglob("*")) == [out.parent, out]


@pytest.mark.parametrize("target", ["x.json", "nothing", "target.json"])
def test_a_link_is_refused_and_stays(tmp_path: Path, target: str) -> None:
    out, there = tmp_path / "x.json", tmp_path / "target.json"
    there.write_text("mine")
    out.symlink_to(target)
    for refused in (check_output, require_writable, lambda path: write_output(path, "x")):
        with pytest.raises(ConfigError, match=r"^--out .*x\.json: is a link\. Give the file"):
            refused(out)
    assert out.readlink() == Path(target) and there.read_text() == "mine"


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
