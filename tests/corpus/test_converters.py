import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from z2all_ds.corpus.converters import find_converter, read_chinese_texts
from z2all_ds.errors import ConfigError, DataError


def drafts(name: str, raw: list[Path], count: int = 10_000, wanted: int | None = None) -> list:
    return list(islice(find_converter(name).convert(raw, wanted), count))


def test_a_miss_lists_the_names_and_the_nearest() -> None:
    words = "'pyton_code'.*chinese_sample, jsonl, python_code, python_docstrings, text.*Did you mean python_code"
    with pytest.raises(ConfigError, match=words):
        find_converter("pyton_code")


def test_code_is_spread_over_the_library_and_always_the_same() -> None:
    first = drafts("python_code", [], 60)
    assert first == drafts("python_code", [], 60)
    assert len({draft.title[0] for draft in first}) > 10
    parts = {part for draft in drafts("python_code", []) for part in draft.title.split("/")[:-1]}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "lib2to3"}


def test_docstrings_are_prose_with_headings() -> None:
    some = drafts("python_docstrings", [], 20)
    assert some == drafts("python_docstrings", [], 20)
    modules = [draft for draft in some if draft.title.startswith("Documentation of ")]
    assert any("\n\n## Function " in draft.content or "\n\n## Class " in draft.content for draft in modules)
    assert all(draft.content.startswith("The module ") for draft in modules)


def test_chinese_begins_with_the_essays_and_goes_on_as_far_as_wanted() -> None:
    essays = read_chinese_texts()
    assert len({title for title, _ in essays}) == len(essays) == 50
    assert sum(len(content) for _, content in essays) > 24_000
    found = drafts("chinese_sample", [], wanted=120_000)
    assert [(d.title, d.content) for d in found[: len(essays)]] == essays
    assert 120_000 <= sum(len(d.content.encode()) for d in found) < 125_000


def test_jsonl_takes_text_or_content(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    path.write_text('{"text": "一", "title": "甲", "n": 1}\n\n{"content": "b\\ud800", "deep": ["\\udc00"]}\n', "utf-8")
    one, two = drafts("jsonl", [path])
    assert (one.title, one.content, one.others) == ("甲", "一", {"n": 1})
    assert (two.title, two.content, two.others) == ("", "b\ufffd", {"deep": ["\ufffd"]})


@pytest.mark.parametrize("line", ["{", "[]", '{"title": "x"}', '{"text": 3}', '{"text": "a", "title": null}', "\udcff"])
def test_jsonl_names_the_bad_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "raw.jsonl"
    path.write_bytes((json.dumps({"text": "ok"}) + "\n" + line + "\n").encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=r"raw\.jsonl:2"):
        drafts("jsonl", [path])


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "正文\r\n".encode())
    (tmp_path / "b.txt").write_bytes("正文".encode("gb18030"))
    assert [(d.title, d.content) for d in drafts("text", [tmp_path / "a.txt"])] == [("a", "正文\r\n")]
    with pytest.raises(DataError, match=r"b\.txt: not UTF-8.*iconv"):
        drafts("text", [tmp_path / "b.txt"])


def test_the_room_needs_no_torch_and_no_transformers() -> None:
    code = "import sys, z2all_ds.corpus; print([m for m in ('torch', 'transformers', 'deepspeed') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
