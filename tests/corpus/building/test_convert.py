"""Tests of complete builds from raw files to records: the known sources, invalid data, cleaning, and Ray."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.forms.reading import tar_of
from z2all_ds.base.errors import DataError
from z2all_ds.corpus import Executor, SourceSpec, audit_corpus, build_corpus, parse_record, read_report
from z2all_ds.corpus.building.report import full_lines, summary_lines
from z2all_ds.corpus.cleaning import CleaningRules
from z2all_ds.corpus.forms import ReadLimits
from z2all_ds.corpus.schema import Record

pytestmark = pytest.mark.usefixtures("a_unit_for_each_slice")
RAW = Path(__file__).parents[2] / "assets" / "raw"
SOURCES = {
    "baike2018qa": ("baike_qa.json",),
    "news2016zh": ("news2016zh_valid.json",),
    "webtext2019zh": ("web_text_zh_testa.json",),
    "wikipedia_cn": ("wiki_00",),
    "zhihu_kol": ("zhihu_kol.rows.json",),
    "wudao": ("part-2021009337.json",),
    "wikipedia_en": ("wikipedia_en.rows.json",),
    "github_python": ("github_python-000000000000.json",),
}


def raw_files(source: str, folder: Path) -> tuple[Path, ...]:
    """Return the raw files of a source; Parquet files are made from rows that are stored as JSON."""
    files = [RAW / name for name in SOURCES[source]]
    if source not in ("zhihu_kol", "wikipedia_en"):
        return tuple(files)
    path = folder / f"{source}.parquet"
    pq.write_table(pa.Table.from_pylist(json.loads(files[0].read_text("utf-8"))), path, row_group_size=2)
    return (path,)


def records(corpus: Path, domain: str | None = None) -> list[Record]:
    lines = [line for path in sorted(corpus.glob("*.jsonl")) for line in path.read_bytes().splitlines(keepends=True)]
    found = [parse_record(line, "x") for line in lines]
    return [record for record in found if domain in (None, record.data_src)]


def contents(corpus: Path) -> list[str]:
    return [record.content for record in records(corpus)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
    return path


def test_the_eight_known_sources_are_converted_into_one_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    for source in SOURCES:
        spec = SourceSpec(source, source, raw_files(source, tmp_path))
        build_corpus(corpus, [spec], add=True)
        expected = [json.loads(line) for line in (RAW / f"expected/{source}.jsonl").read_text("utf-8").splitlines()]
        found = records(corpus, source)
        assert [record.id for record in found] == sorted({record.id for record in found})
        as_draft = ("title", "content", "category", "desc", "others")
        assert [{name: getattr(record, name) for name in as_draft} for record in found] == expected
    gids = [record.gid for record in records(corpus)]
    assert len(set(gids)) == len(gids) > 8 * 4
    assert audit_corpus(corpus).ok


def test_several_wudao_files_are_converted_in_order(tmp_path: Path) -> None:
    files = (RAW / "part-2021009337.json", RAW / "part-2021009338.json")
    build_corpus(tmp_path / "two", [SourceSpec("wudao", "wudao", files)])
    texts = [row["content"] for file in files for row in json.loads(file.read_text("utf-8"))]
    assert contents(tmp_path / "two") == texts


def test_a_field_map_selects_the_fields_of_a_record(tmp_path: Path) -> None:
    raw = tmp_path / "odd.json"
    raw.write_text(json.dumps([{"body": "正文", "meta": {"subject": "题"}, "score": 3}], ensure_ascii=False))
    fields = (("content", "body"), ("title", "meta.subject"))
    build_corpus(tmp_path / "c", [SourceSpec("odd", "generic", (raw,), fields=fields)])
    (record,) = records(tmp_path / "c")
    assert (record.title, record.content, record.others["score"]) == ("题", "正文", 3)


def test_folders_and_archives_are_expanded_into_their_files(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    (raw / "deep").mkdir(parents=True)
    write_jsonl(raw / "deep" / "b.jsonl", ["b"])
    (raw / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (raw / "z.tar.gz").write_bytes(gzip.compress(tar_of({"../../evil.jsonl": b'{"text": "z"}\n'})))
    build_corpus(tmp_path / "c", [SourceSpec("x", "generic", (raw,))])
    assert contents(tmp_path / "c") == ["a", "b", "z"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "raw"]


def test_a_compose_template_puts_the_question_before_the_answer(tmp_path: Path) -> None:
    spec = SourceSpec(
        "qa", "baike2018qa", raw_files("baike2018qa", tmp_path), compose="问：{title}\n{desc}\n答：{content}"
    )
    build_corpus(tmp_path / "c", [spec])
    for record in records(tmp_path / "c"):
        assert record.content.startswith(f"问：{record.title}\n" + (f"{record.desc}\n答：" if record.desc else "答："))


def test_texts_marked_as_code_are_not_altered(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "x = '!!!!!!' # \x1b[33m  。。。。。。 characters"}) + "\n")
    spec = SourceSpec("x", "jsonl", (tmp_path / "x.jsonl",), cleaning=CleaningRules.parse(["all"]), is_code=True)
    manifest = build_corpus(tmp_path / "c", [spec])
    assert contents(tmp_path / "c") == [json.loads((tmp_path / "x.jsonl").read_text())["text"]]
    assert manifest.shards[0].text_bytes == len(contents(tmp_path / "c")[0].encode())


# Invalid data


def parquet_with_a_corrupt_group() -> bytes:
    sink = io.BytesIO()
    rows = [{"text": f"row {number} " * 50} for number in range(40)]
    settings = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=10, **settings)
    return sink.getvalue().replace(b"row 15 ", b"r0w 15 ", 1)


GOOD = b'{"text": "good"}\n'
INVALID: dict[str, tuple[str, bytes, str, str, int]] = {
    # name: (file, bytes, kind of fault, its location, valid records)
    "truncated line": ("x.jsonl", GOOD + b'{"text": "cu\n' + GOOD, "json", "x.jsonl:2", 2),
    "broken last line": ("x.jsonl", GOOD + b'{"text": "cu', "truncated", "x.jsonl:2", 1),
    "invalid UTF-8": ("x.jsonl", GOOD + b'{"text": "\xff\xfe"}\n' + GOOD, "utf8", "x.jsonl:2", 2),
    "NUL bytes": ("x.jsonl", GOOD + b'{"text": "\x00"}\n' + GOOD, "nul", "x.jsonl:2", 2),
    "wrong columns": ("x.jsonl", GOOD + b'{"txt": "a"}\n' + GOOD, "columns", "x.jsonl:2", 2),
    "no object": ("x.jsonl", GOOD + b"[1]\n" + GOOD, "not_an_object", "x.jsonl:2", 2),
    "long line": ("x.jsonl", GOOD + b'{"text": "' + b"x" * 3000 + b'"}\n' + GOOD, "too_long", "x.jsonl:2", 2),
    "cut array": ("x.json", b'[{"text": "good"}, {"text": "go', "truncated", "x.json", 1),
    "broken element": ("x.json", b'[{"text": "good"}, {"te": }, {"text": "good"}]', "json", "x.json", 2),
    "corrupt row group": ("x.parquet", parquet_with_a_corrupt_group(), "row_group", "x.parquet", 30),
    # The records before the error are kept: -1 means at least one.
    "cut gzip": ("x.jsonl.gz", gzip.compress(GOOD * 5000)[:-20], "container", "x.jsonl.gz", -1),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_data_stops_the_build_or_is_skipped(tmp_path: Path, name: str) -> None:
    file, data, kind, place, good = INVALID[name]
    (tmp_path / file).write_bytes(data)
    fine = write_jsonl(tmp_path / "fine.jsonl", ["fine"])
    limits = ReadLimits(max_record_bytes=2000)
    settings: dict[str, Any] = {"limits": limits, "max_bad_share": 0.5}
    sources = [SourceSpec("x", "generic", (fine, tmp_path / file), **settings)]
    with pytest.raises(DataError, match="--on-error skip") as caught:
        build_corpus(tmp_path / "c", sources)
    assert place in caught.value.what
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "c" / "MANIFEST.json").exists()
    sources = [SourceSpec("x", "generic", (fine, tmp_path / file), on_error="skip", **settings)]
    build_corpus(tmp_path / "c", sources)
    found = len(records(tmp_path / "c")) - 1
    assert found == good or (good < 0 and found >= -good)
    faults = read_report(tmp_path / "c", "x")["faults"]
    assert faults["counts"] == {kind: 1}
    assert place in faults["samples"][kind][0]
    assert any(place in line for line in summary_lines(read_report(tmp_path / "c", "x")))


def test_an_empty_file_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    fine = write_jsonl(tmp_path / "fine.jsonl", ["a", "b"])
    with pytest.raises(DataError, match=r"empty\.jsonl.*an empty file"):
        build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", (fine, tmp_path / "empty.jsonl"))])
    spec = SourceSpec("x", "jsonl", (fine, tmp_path / "empty.jsonl"), on_error="skip", max_bad_share=0.4)
    build_corpus(tmp_path / "c", [spec])
    assert contents(tmp_path / "c") == ["a", "b"]


def test_harmless_faults_are_counted(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + GOOD + b'{"text": "crlf"}\r\n\n{"text": " "}\n' + GOOD
    (tmp_path / "x.jsonl").write_bytes(data)
    build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", (tmp_path / "x.jsonl",))])
    assert contents(tmp_path / "c") == ["good", "crlf", "good"]
    assert read_report(tmp_path / "c", "x")["faults"]["counts"] == {"bom": 1, "line_ends": 1, "empty_text": 1}


def test_too_many_invalid_rows_stop_the_build(tmp_path: Path) -> None:
    lines = [GOOD if number % 20 else b"{\n" for number in range(2000)]
    (tmp_path / "x.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"rows.*100 x not JSON|not JSON.*allowed share of 0\.01.*x\.jsonl:1"):
        build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", (tmp_path / "x.jsonl",), on_error="skip")])
    spec = SourceSpec("x", "jsonl", (tmp_path / "x.jsonl",), on_error="skip", max_bad_share=0.06)
    build_corpus(tmp_path / "c", [spec])
    assert len(records(tmp_path / "c")) == 1900


def test_rows_skipped_by_an_earlier_build_stop_a_build_in_stop_mode(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(GOOD * 20 + b"{\n")
    raw = (tmp_path / "x.jsonl",)
    with pytest.raises(DataError, match="1 of 21 rows of domain x"):
        build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", raw, on_error="skip")])
    with pytest.raises(DataError, match=r"1 of 21 rows of domain x.*share of 0;.*x\.jsonl:21"):
        build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", raw, max_bad_share=0.5)])
    build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", raw, on_error="skip", max_bad_share=0.5)])
    assert len(records(tmp_path / "c")) == 20


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(GOOD + b" " * 10_000_000 + b"\n" + GOOD))
    limits = ReadLimits(max_expansion=20, expansion_allowance_bytes=1_000_000)
    with pytest.raises(DataError, match=r"x\.jsonl\.gz.*expands too much"):
        build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", (tmp_path / "x.jsonl.gz",), limits=limits)])


def test_unicode_line_separators_stay_in_the_text(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    raw = write_jsonl(tmp_path / "x.jsonl", [text])
    build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", (raw,))])
    (shard,) = (tmp_path / "c").glob("*.jsonl")
    with shard.open(encoding="utf-8") as lines:
        assert [json.loads(line)["content"] for line in lines] == [text]
    assert contents(tmp_path / "c") == [text]


def test_integers_beyond_64_bits_are_kept(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a", "key": 123456789012345678901234567890}\n')
    build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", (tmp_path / "x.jsonl",))])
    assert records(tmp_path / "c")[0].others == {"key": 123456789012345678901234567890}


# Cleaning


SENTENCES = [f"这是第{number}篇文章，讲的是第{number}件事，和别的都不一样，所以要留下来。" * 5 for number in range(12)]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_the_first_of_several_duplicates_is_kept(tmp_path: Path, workers: int) -> None:
    """Holds for any number of workers and any order of completion."""
    near = SENTENCES[3].replace("所以要留下来。", "所以要留下。", 1)
    files = (
        write_jsonl(tmp_path / "a.jsonl", SENTENCES[:6]),
        write_jsonl(tmp_path / "b.jsonl", [SENTENCES[2] + "\n", near, *SENTENCES[6:9]]),
        write_jsonl(tmp_path / "c.jsonl", [*SENTENCES[9:], SENTENCES[0], SENTENCES[7]]),
    )
    rules = CleaningRules(exact_duplicates=True, near_duplicates=0.8)
    build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", files, cleaning=rules)], executor=Executor(workers))
    assert contents(tmp_path / "c") == SENTENCES
    assert [record.gid for record in records(tmp_path / "c")] == [
        *range(6),
        *range(1_000_000_002, 1_000_000_005),
        *range(2_000_000_000, 2_000_000_003),
    ]
    dropped = read_report(tmp_path / "c", "x")["dropped"]
    assert (dropped["exact_duplicates"]["documents"], dropped["near_duplicates"]["documents"]) == (3, 1)
    assert dropped["exact_duplicates"]["samples"][0].startswith("1000000000 (这是第2篇")
    assert "repeats 2 (这是第2篇" in dropped["exact_duplicates"]["samples"][0]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_copy_of_another_domains_document_is_a_duplicate(tmp_path: Path, at_once: bool) -> None:
    rules = CleaningRules(exact_duplicates=True)
    first = SourceSpec("a", "jsonl", (write_jsonl(tmp_path / "a.jsonl", SENTENCES[:6]),), cleaning=rules)
    second = SourceSpec("b", "jsonl", (write_jsonl(tmp_path / "b.jsonl", SENTENCES[4:]),), cleaning=rules)
    if at_once:
        build_corpus(tmp_path / "c", [first, second])
    else:
        build_corpus(tmp_path / "c", [first], add=True)
        build_corpus(tmp_path / "c", [second], add=True)
    assert contents(tmp_path / "c") == SENTENCES
    assert [record.id for record in records(tmp_path / "c", "b")] == list(range(2, 8))
    dropped = read_report(tmp_path / "c", "b")["dropped"]["exact_duplicates"]
    assert dropped["documents"] == 2
    assert dropped["samples"][0].endswith("repeats one of another domain")


def test_the_report_has_counts_and_samples_of_each_cleaning_rule(tmp_path: Path) -> None:
    texts = [
        "好的 文章\x07，写完了。。。。。。。",
        "短",
        "锟斤拷锟斤拷锟斤拷锟斤拷",
        "一篇正常的文章，没有什么要改的。",
    ]
    raw = write_jsonl(tmp_path / "x.jsonl", texts)
    rules = CleaningRules.parse(["all", "min_chars=3", "near_duplicates=off"])
    build_corpus(tmp_path / "c", [SourceSpec("x", "jsonl", (raw,), cleaning=rules)])
    assert contents(tmp_path / "c") == ["好的文章，写完了。。。", texts[3]]
    report = read_report(tmp_path / "c", "x")
    rules_did = report["cleaning"]["rules"]
    assert rules_did["control_characters"]["records_changed"] == 1
    assert rules_did["min_chars"]["records_dropped"] == 1
    assert rules_did["garbled"]["records_dropped"] == 1
    lines = "\n".join(full_lines(report))
    assert "min_chars: 1 documents dropped, 3 B" in lines
    assert "\\x07" in lines


def test_code_is_never_altered(tmp_path: Path) -> None:
    code = 'def f():\r\n\tprint("你 好!!!!!!!!")  \x0c\n' * 3
    row = {"repo_name": "a/b", "ref": "refs/heads/master", "path": "f.py", "copies": "1", "content": code}
    (tmp_path / "x.json").write_text(json.dumps(row) + "\n")
    rules = CleaningRules.parse(["all"])
    build_corpus(tmp_path / "c", [SourceSpec("code", "github_python", (tmp_path / "x.json",), cleaning=rules)])
    assert contents(tmp_path / "c") == [code]
    lines = "\n".join(summary_lines(read_report(tmp_path / "c", "code")))
    assert "control_characters: not applied, code is never altered" in lines


# Ray


@pytest.mark.extended
def test_ray_gives_the_same_bytes(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    files = tuple(write_jsonl(tmp_path / f"{n}.jsonl", SENTENCES[n:]) for n in range(4))
    spec = [SourceSpec("x", "jsonl", files, cleaning=CleaningRules(exact_duplicates=True))]
    build_corpus(tmp_path / "here", spec, max_shard_bytes=1500)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        build_corpus(tmp_path / "ray", spec, max_shard_bytes=1500, executor=Executor(ray="local"))
    finally:
        ray.shutdown()
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "ray").iterdir())
    for path in (tmp_path / "here").glob("*.json*"):
        assert path.read_bytes() == (tmp_path / "ray" / path.name).read_bytes()
