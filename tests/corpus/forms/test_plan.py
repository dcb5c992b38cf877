"""Tests of expanding paths into files and detecting their form."""

import gzip
import os
from pathlib import Path

import pytest

from tests.corpus.forms.reading import tar_of, write, zip_of
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.forms import expand_raw, plan_slices


@pytest.mark.parametrize(
    ("name", "data", "form"),
    [
        ("a.jsonl", b"", "jsonl"),
        ("a.ndjson.gz", gzip.compress(b"{}", mtime=0), "jsonl"),
        ("a.json", b'\xef\xbb\xbf \n[{"a": 1}]', "json_array"),
        ("a.json", b'{"a": 1}', "jsonl"),
        ("a.json.gz", gzip.compress(b" [{}]", mtime=0), "json_array"),
        ("a.PARQUET", b"PAR1", "parquet"),
        ("a.pq", b"", "parquet"),
        ("a.md", b"x", "txt"),
        ("a.cpp", b"int x;", "txt"),
        ("wiki_00", b'{"id": 1}\n', "jsonl"),
        ("README", b"[see] text", "txt"),
        ("a.zip", zip_of({"x/": b"", "__MACOSX/x": b"", "p.png": b"\x89\0", "b.json": b"[]"}), "auto"),
        ("a.tar.gz", gzip.compress(tar_of({"p.png": b"\x89\0", "b.json": b"[]"}), mtime=0), "auto"),
        ("broken.json.gz", b"\x1f\x8bxx", "jsonl"),
    ],
)
def test_the_form_is_detected_from_the_name_and_content(tmp_path: Path, name: str, data: bytes, form: str) -> None:
    assert [piece.form for piece in plan_slices(write(tmp_path, name, data), "auto")] == [form]


@pytest.mark.parametrize(("name", "fix"), [("a.csv", "JSON lines"), ("a.xz", "unxz"), ("a.bin", "binary")])
def test_unknown_forms_are_refused_with_advice(tmp_path: Path, name: str, fix: str) -> None:
    path = write(tmp_path, name, b"\0\1\2")
    with pytest.raises(ConfigError, match=fix) as raised:
        plan_slices(path, "auto")
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="jsonl, json_array"):
        plan_slices(path, "yaml")


def test_folders_and_patterns_are_expanded_into_sorted_files(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/10.txt", "b/.hidden", ".git/x", "a.txt", "c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b/loop").symlink_to(tmp_path)

    def names(*given: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in expand_raw([tmp_path / one for one in given])]

    assert names(".") == ["a.txt", "b/10.txt", "b/2.txt", "c.jsonl"]
    assert names("c.jsonl", "b/?.txt", "*.txt", "c.jsonl") == ["c.jsonl", "b/2.txt", "a.txt"]
    assert names("**/*.txt") == ["a.txt", "b/10.txt", "b/2.txt"]
    for missing in ("nothing.txt", "*.nothing", ".git/y"):
        with pytest.raises(DataError, match=r"does not exist|contains no file"):
            names(missing)


def test_loops_of_links_end(tmp_path: Path) -> None:
    folder = tmp_path / "a[1]/b"
    folder.mkdir(parents=True)
    (folder / "x.txt").touch()
    for link in ("c", "d"):
        (folder / link).symlink_to(".")
        (tmp_path / link).symlink_to(".")
    for pattern in ("**/*.txt", "**", "**/b/**/x.txt", "*/**/x.*", "**/**/b/*.txt"):
        assert [path.name for path in expand_raw([tmp_path / pattern])] == ["x.txt"]
    for pattern in ("**/x.jsonl", "nothing/**"):
        with pytest.raises(DataError, match="contains no file"):
            expand_raw([tmp_path / pattern])


def test_links_out_of_a_folder_are_followed_only_if_asked(tmp_path: Path) -> None:
    raw, outside = tmp_path / "raw", tmp_path / "outside"
    for folder in (raw, outside):
        folder.mkdir()
        (folder / f"{folder.name}.txt").touch()
    for link, target in {"file.txt": outside / "outside.txt", "folder": outside}.items():
        (raw / link).symlink_to(target)
        with pytest.raises(DataError, match=f"{link}: leads out of .*--follow-links"):
            expand_raw([raw])
        with pytest.raises(DataError, match="leads out of"):
            expand_raw([raw / "f*"])
        assert [path.name for path in expand_raw([raw], follow_links=True)][-1] == "raw.txt"
        assert expand_raw([raw / link])  # named by the user
        (raw / link).unlink()
    (raw / "inside.txt").symlink_to("raw.txt")
    assert len(expand_raw([raw])) == 1


def test_dangling_links_and_fifos_in_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"a\.txt: a link to nowhere, which does not exist"):
        expand_raw([tmp_path])
    (tmp_path / "a.txt").unlink()
    os.mkfifo(tmp_path / "b.txt")
    for given in (tmp_path, tmp_path / "b.txt"):
        with pytest.raises(DataError, match=r"b\.txt: not a regular file"):
            expand_raw([given])
