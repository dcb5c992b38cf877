"""Tests of adopting existing files as a corpus in place, and of reading them back."""

import hashlib
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.command import one_line, z2all
from tests.helpers.parquet_footers import with_false_size
from tests.helpers.stores import FlakyStore, flaky_store, put
from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.base.storage import folders, open_folder
from z2all_ds.corpus import adopt as adopt_module
from z2all_ds.corpus import shard_check
from z2all_ds.corpus.adopt import adopt_corpus, domains_of
from z2all_ds.corpus.audit import audit_corpus
from z2all_ds.corpus.executors import Executor
from z2all_ds.corpus.forms import ReadLimits
from z2all_ds.corpus.line_index import load_index
from z2all_ds.corpus.manifest import MANIFEST_NAME, load_manifest
from z2all_ds.corpus.reading.readers import open_domains

HERE = Executor(1)
TEXTS = [f"第{number}篇。" + "word " * number for number in range(20)]


def jsonl(texts: list[str], field: str = "content") -> bytes:
    return "".join(
        json.dumps({"n": n, field: text}, ensure_ascii=False) + "\n" for n, text in enumerate(texts)
    ).encode()


def parquet(texts: list[str], field: str = "content", **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": list(range(len(texts))), field: pa.array(texts, pa.string())}), sink, **options)
    return sink.getvalue().to_pybytes()


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def texts_by_domain(location: str | Path) -> dict[str, list[str]]:
    domains = open_domains(location, load_manifest(location))
    return {name: [domain.read(n) for n in range(domain.num_documents)] for name, domain in domains.items()}


FILES = {
    "zh/b.jsonl": jsonl(TEXTS[4:7]),
    "zh/a/deep.parquet": parquet(TEXTS[:4], row_group_size=3),
    "web-00001.jsonl": jsonl(TEXTS[12:15]),
    "web-00000.jsonl": jsonl(TEXTS[7:12])[:-1],  # without a final newline
    "train-00000-of-00002.parquet": parquet(TEXTS[15:]),
    "empty.jsonl": b"",
}
EXPECTED = {"train": TEXTS[15:], "web": TEXTS[7:15], "zh": TEXTS[:7]}


@pytest.mark.parametrize("workers", [1, 2])
def test_both_formats_are_adopted_and_read_back(tmp_path: Path, workers: int) -> None:
    fill(tmp_path, FILES)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    manifest = adopt_corpus(tmp_path, executor=Executor(workers))
    assert load_manifest(tmp_path) == manifest
    assert texts_by_domain(tmp_path) == EXPECTED
    assert [(shard.domain, shard.path) for shard in manifest.shards] == [
        ("empty", "empty.jsonl"),
        ("train", "train-00000-of-00002.parquet"),
        ("web", "web-00000.jsonl"),
        ("web", "web-00001.jsonl"),
        ("zh", "zh/a/deep.parquet"),
        ("zh", "zh/b.jsonl"),
    ]
    for shard in manifest.shards:
        assert shard.sha256 == hashlib.sha256(FILES[shard.path]).hexdigest()
        if shard.path.endswith(".jsonl"):
            assert shard.bytes == len(FILES[shard.path])
    assert (manifest.next_gid, manifest.text_field, manifest.build_keys) == (20, "content", {})
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_the_size_of_a_parquet_shard_is_that_of_its_uncompressed_text(tmp_path: Path) -> None:
    texts = ["0123456789" * 100] * 50
    fill(tmp_path, {"x.parquet": parquet(texts, use_dictionary=False, compression="zstd")})
    (shard,) = adopt_corpus(tmp_path, executor=HERE).shards
    assert 50_000 < shard.bytes < 53_000  # including page headers
    assert (tmp_path / "x.parquet").stat().st_size < 10_000


def test_line_indexes_are_stored(tmp_path: Path) -> None:
    fill(tmp_path, {"zh/b.jsonl": FILES["zh/b.jsonl"]})
    adopt_corpus(tmp_path, executor=HERE)
    folder = open_folder(tmp_path)
    index = load_index(folder, "zh/b.jsonl", folder.stamp("zh/b.jsonl"))
    assert index is not None and index.num_lines == 3


@pytest.mark.parametrize("location", ["memory://adopted", "file://{}"])
def test_urls_are_adopted(tmp_path: Path, location: str) -> None:
    location = location.format(tmp_path)
    for name, data in FILES.items():
        open_folder(location).write_whole(name, data)
    adopt_corpus(location, executor=HERE)
    assert texts_by_domain(location) == EXPECTED
    assert adopt_corpus(fill(tmp_path / "local", FILES), executor=HERE) == load_manifest(location)


def test_hidden_and_temporary_files_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, {"a.jsonl": jsonl(["a"]), ".b.jsonl": b"x", ".cache/c.jsonl": b"x", "d.jsonl.tmp": b"x"})
    fill(tmp_path, {"e.jsonl.part": b"x", "README.md": b"x", "f.csv": b"x"})
    assert [shard.path for shard in adopt_corpus(tmp_path, executor=HERE).shards] == ["a.jsonl"]
    assert "ignored 2 files that do not end in .jsonl or .parquet (README.md, f.csv)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "alone"),
    [
        (["book0", "book1"], 0),
        (["zh", "en", "code"], 0),
        (list("abcdefghij"), 10),
        (["book0", "book1", "book2"], 3),
        (["book0", "book1", "book2", "web-0", "web-1"], 3),
        (["book0", "book1", "web-0", "web-1"], 0),
        (["zh/a", "en/a", "fr/a"], 0),
        (["zh-0", "en-0", "fr-0"], 0),
    ],
)
def test_many_files_with_a_domain_each_are_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], alone: int
) -> None:
    adopt_corpus(fill(tmp_path, {f"{name}.jsonl": jsonl(["a"]) for name in names}), executor=HERE)
    warning = f"warning: {alone} of {len(names)} files are a domain of their own; --domain NAME makes all files one"
    said = capsys.readouterr().err
    assert warning in said if alone else "--domain" not in said


@pytest.mark.parametrize(
    ("name", "domain"),
    [
        ("web-00012.jsonl", "web"),
        ("web-zh-1.jsonl", "web-zh"),
        ("train-00000-of-00064.parquet", "train"),
        ("train-00000-of-00064-a09b74b3ef9c3b56.parquet", "train"),
        ("book.jsonl", "book"),
        ("2023.jsonl", "2023"),
        ("-1.jsonl", "-1"),
        ("v1.5-data.jsonl", "v1.5-data"),
        ("zh/web-0001.jsonl", "zh"),
        ("train_00012.parquet", "train"),
        ("part-00012-3f2504e0-4f89-11d3-9a0c-0305e82c3301-c000.snappy.parquet", "part"),
        ("shard_12.jsonl", "shard"),
        ("7.jsonl", "documents"),
        ("000_00012.parquet", "documents"),
        ("00012.parquet", "documents"),
        ("zh/a/b/c.parquet", "zh"),
        ("wiki_2021.jsonl", "wiki"),
        ("part.0.parquet", "part"),
        ("llama-3.1.jsonl", "llama-3.1"),
        ("c4.jsonl", "c4"),
        ("c4-train.00000-of-01024.jsonl", "c4-train"),
        ("chunk1.jsonl", "chunk"),
        ("web-Part12.jsonl", "web-Part"),
        ("shard_00000000_processed.jsonl", "shard_processed"),
        ("arxiv_024de5df-1b7f-4447-8c3a-51407d8d6732.jsonl", "arxiv"),
        ("024de5df-1b7f-4447-8c3a-51407d8d6732.jsonl", "documents"),
        ("1000.parquet", "documents"),
    ],
)
def test_domains_are_derived_from_file_names(name: str, domain: str) -> None:
    assert domains_of([name], "documents") == {name: domain}


@pytest.mark.parametrize(
    ("names", "domains"),
    [
        (["1999.jsonl", "2000.jsonl", "web-1.jsonl"], ["1999", "2000", "web"]),
        (["0999.parquet", "1000.parquet", "2000.parquet", "zh/2000.parquet"], ["c", "c", "c", "zh"]),
    ],
)
def test_years_are_domains_unless_other_files_have_other_numbers(names: list[str], domains: list[str]) -> None:
    assert domains_of(names, "c") == dict(zip(names, domains, strict=True))


def test_all_files_can_be_put_into_one_domain(tmp_path: Path) -> None:
    manifest = adopt_corpus(fill(tmp_path, FILES), domain="mix", executor=HERE)
    assert list(manifest.domains) == ["mix"]
    assert sorted(texts_by_domain(tmp_path)["mix"]) == sorted(TEXTS)


def test_the_text_field_is_guessed_unless_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"a.jsonl": jsonl(["a", "b"], "text"), "b.parquet": parquet(["c"], "text")}
    assert adopt_corpus(fill(tmp_path, files), executor=HERE).text_field == "text"
    assert "the text is in the field `text`" in capsys.readouterr().err
    assert texts_by_domain(tmp_path) == {"a": ["a", "b"], "b": ["c"]}
    for field in ("words", "content"):
        for name in files:
            folder = tmp_path / field / name[0]
            raw = jsonl(["a"], "words") if name == "a.jsonl" else parquet(["a"], "words")
            if field == "words":
                adopt_corpus(fill(folder, {name: raw}), field, executor=HERE)
            else:
                with pytest.raises(DataError, match=rf"{name}.*no field `content`; its fields are: n, words"):
                    adopt_corpus(fill(folder, {name: raw}), executor=HERE)
                assert not (folder / MANIFEST_NAME).exists()


def test_files_with_only_a_number_as_their_name_are_one_domain(tmp_path: Path) -> None:
    files = {f"00{number}_0000{number}.parquet": parquet([TEXTS[number]], "text") for number in range(3)}
    manifest = adopt_corpus(fill(tmp_path / "fineweb", files), executor=HERE)
    assert list(manifest.domains) == ["fineweb"]
    assert [shard.text_bytes for shard in manifest.shards] == [len(text.encode()) for text in TEXTS[:3]]


BAD_LINES = b'{"content": "ok", "other": "\\ud800"}\n{"content": null}\nbroken\n{"n": 1}\n{"content": "\\ud800"}\n'


def test_records_without_a_valid_text_are_found_at_adoption(tmp_path: Path) -> None:
    fill(tmp_path, {"a.jsonl": BAD_LINES, "b.jsonl": jsonl(["b"])})
    with pytest.raises(DataError, match=r"a\.jsonl, record 1: .*NoneType; 4 of 5 records are invalid.*--on-error skip"):
        adopt_corpus(tmp_path, executor=HERE)
    assert not (tmp_path / MANIFEST_NAME).exists()
    manifest = adopt_corpus(tmp_path, executor=HERE, on_error="skip")
    assert [(shard.documents, shard.text_bytes) for shard in manifest.shards] == [(5, 2), (1, 1)]
    assert open_domains(tmp_path, manifest)["a"].read(0) == "ok"  # half a surrogate in another field does not matter
    with pytest.raises(DataError, match=r"record 0: .*; 1 of 1 records are invalid\. Remove the file, .*--text-field"):
        adopt_corpus(fill(tmp_path / "all", {"c.jsonl": b"x\n"}), executor=HERE, on_error="skip")


@pytest.mark.parametrize(
    ("first", "rule"),
    [
        (b'{"n": 0, "text": null}', "`text` must be a string and is NoneType"),
        (b'{"n": 0}', "has no field `text`; its fields are: n"),
        (b"", "the line is empty"),
        (b"[1]", "a record must be a JSON object"),
        (b'{"text": "cut', "the line is not JSON in UTF-8 (Invalid control character at: line 1 column 14 (char 13))"),
    ],
)
def test_a_file_is_adopted_without_its_first_record_if_that_is_asked_for(
    tmp_path: Path, first: bytes, rule: str
) -> None:
    fill(tmp_path, {"a.jsonl": first + b"\n" + jsonl(["x", "y"], "text")})
    with pytest.raises(DataError) as caught:
        adopt_corpus(tmp_path, executor=HERE)
    assert caught.value.what.endswith("a.jsonl, record 0")
    assert caught.value.rule == f"{rule}; 1 of 3 records are invalid"
    assert caught.value.fix.endswith("or accept them: --on-error skip.")
    manifest = adopt_corpus(tmp_path, executor=HERE, on_error="skip")
    assert (manifest.text_field, manifest.shards[0].documents, manifest.shards[0].text_bytes) == ("text", 3, 2)
    report = audit_corpus(tmp_path)
    assert report.problems == (f"a.jsonl, record 0: {rule}",)
    assert report.fix == "Repair the records and adopt the files again, or read them with data.on_bad_record=skip."
    fill(tmp_path, {"b.jsonl": b""})
    assert audit_corpus(tmp_path).fix == "Build or adopt it again."


def test_a_file_without_a_record_or_the_field_is_refused_before_it_is_read_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopt_module, "check_shard", None)
    with pytest.raises(DataError, match=r"record 0: the line is empty; no valid record up to line 100"):
        adopt_corpus(fill(tmp_path / "a", {"a.jsonl": b"\n" * 101}), executor=HERE)
    with pytest.raises(DataError, match=r"record 0: has no field `words`; its fields are: n, text\. Give the field"):
        adopt_corpus(fill(tmp_path / "b", {"b.jsonl": b"\n" + jsonl(["x"], "text")}), "words", executor=HERE)


def test_adopted_corpora_are_audited(tmp_path: Path) -> None:
    files = {"a.jsonl": jsonl(["a", "b"]), "b.parquet": parquet(["c", "d\ufffd"])}
    adopt_corpus(fill(tmp_path, files), executor=HERE)
    report = audit_corpus(tmp_path)
    assert (report.ok, report.documents, report.shards) == (True, 4, 2)
    assert "contain U+FFFD" in report.warnings[0]
    fill(tmp_path, {"a.jsonl": jsonl(["a", "x"]), "c.parquet": parquet(["e"])})
    fill(tmp_path, {"b.parquet": parquet(["c", None])})  # type: ignore[list-item]
    problems = "\n".join(audit_corpus(tmp_path).problems)
    for words in ("a.jsonl: its SHA-256 differs", "b.parquet, record 1: `content` is null", "c.parquet: not in the"):
        assert words in problems
    (tmp_path / "a.jsonl").unlink()
    os.mkfifo(tmp_path / "a.jsonl")
    assert any("not a regular file" in problem for problem in audit_corpus(tmp_path).problems)


def test_adopted_parquet_that_expands_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_check, "ReadLimits", lambda: ReadLimits(expansion_allowance_bytes=2**20))
    bomb = parquet(["x" * 100_000] * 100, dictionary_pagesize_limit=10**9, compression="zstd")
    with pytest.raises(DataError, match=r"x\.parquet: expands to"):
        adopt_corpus(fill(tmp_path, {"x.parquet": bomb}), executor=HERE)


def test_adopted_parquet_cannot_hide_its_size_in_its_footer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_check, "ReadLimits", lambda: ReadLimits(expansion_allowance_bytes=2**20))
    bomb = parquet(["x" * 3 * 2**20], use_dictionary=False, compression="zstd")
    with pytest.raises(DataError, match=r"x\.parquet: expands to 3,\d+,\d+ bytes"):
        adopt_corpus(fill(tmp_path, {"x.parquet": with_false_size(bomb)}), executor=HERE)


def test_links_and_fifos_are_not_adopted_silently(tmp_path: Path) -> None:
    fill(tmp_path, {"outside.jsonl": jsonl(["secret"]), "c/a.jsonl": jsonl(["a"])})
    (tmp_path / "c/b.jsonl").symlink_to(tmp_path / "outside.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl: leads out of .*--follow-links"):
        adopt_corpus(tmp_path / "c", executor=HERE)
    adopt_corpus(tmp_path / "c", executor=HERE, follow_links=True)
    (tmp_path / "c/b.jsonl").unlink()
    (tmp_path / "c/b.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"b\.jsonl: cannot be read \(No such file"):
        adopt_corpus(tmp_path / "c", executor=HERE, replace=True)
    (tmp_path / "c/b.jsonl").unlink()
    os.mkfifo(tmp_path / "c/b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl: not a regular file"):
        adopt_corpus(tmp_path / "c", executor=HERE, replace=True)


def test_an_existing_manifest_is_kept(tmp_path: Path) -> None:
    fill(tmp_path, {"a.jsonl": jsonl(["a"])})
    first = adopt_corpus(tmp_path, executor=HERE)
    fill(tmp_path, {"b.jsonl": jsonl(["b"])})
    with pytest.raises(ConfigError, match=r"MANIFEST\.json: exists already.*--replace"):
        adopt_corpus(tmp_path, executor=HERE)
    assert load_manifest(tmp_path) == first
    adopt_corpus(tmp_path, executor=HERE, replace=True)
    assert texts_by_domain(tmp_path) == {"a": ["a"], "b": ["b"]}


@pytest.mark.parametrize("name", ["x.jsonl.gz", "sub/x.json.zst", "x.tar"])
def test_compressed_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name}.*compressed files.*Decompress them.*z2all corpus convert"):
        adopt_corpus(fill(tmp_path, {"a.jsonl": jsonl(["a"]), name: b"x"}), executor=HERE)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.txt": b"x"}, r"contains no file that ends in \.jsonl or \.parquet"),
        ({"a.jsonl": b""}, "contain no documents"),
        ({"a.jsonl": jsonl(["a", "b"]) + b"\n"}, r"a\.jsonl, record 2: the line is empty; 1 of 3 records"),
        ({"a.jsonl": b"\r\n" + jsonl(["a"])}, r"a\.jsonl, record 0: the line is empty"),
        ({"a.jsonl": b"plain text\n"}, r"a\.jsonl, record 0: the line is not JSON"),
        ({"a.jsonl": b"[1]\n"}, r"a\.jsonl, record 0: a record must be a JSON object"),
        ({"a.jsonl": b'{"content": 1}\n'}, r"a\.jsonl, record 0: `content` must be a string and is int"),
        ({"a.parquet": b"PAR1 not really PAR1"}, r"a\.parquet: .*(Parquet|cannot be read)"),
        ({"a.parquet": b""}, r"a\.parquet: .*(Parquet|cannot be read)"),
        ({"a.parquet": parquet(["a", None, "c"])}, r"a\.parquet, record 1: `content` is null; 1 of 3 records"),  # type: ignore[list-item]
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    with pytest.raises(DataError, match=words):
        adopt_corpus(fill(tmp_path, files), executor=HERE)
    assert not (tmp_path / MANIFEST_NAME).exists()


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: no such folder\. Correct the path\."):
        adopt_corpus(tmp_path / "none", executor=HERE)
    with pytest.raises(ConfigError, match="domain: is an empty name"):
        adopt_corpus(tmp_path, domain="", executor=HERE)
    with pytest.raises(ConfigError, match="text_field: is an empty name"):
        adopt_corpus(tmp_path, "", executor=HERE)


def test_a_very_long_first_line_is_accepted(tmp_path: Path) -> None:
    texts = ["long " * 100_000, "short"]
    adopt_corpus(fill(tmp_path, {"a.jsonl": jsonl(texts)}), executor=HERE)
    assert texts_by_domain(tmp_path) == {"a": texts}


def test_large_row_groups_give_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopt_module, "LARGE_ROW_GROUP_BYTES", 1000)
    texts = [f"{number:0100d}" for number in range(100)]
    files = {"a.parquet": parquet(texts, row_group_size=5), "b.parquet": parquet(texts, row_group_size=100)}
    adopt_corpus(fill(tmp_path, files), executor=HERE)
    said = capsys.readouterr().err
    assert "warning: 1 of 2 files have row groups" in said and "b.parquet" in said and "row_group_size=1000" in said


def test_a_read_only_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "FIRST_WAIT_SECONDS", 0.001)
    with flaky_store():
        put("flaky://c", {"a.jsonl": jsonl(["a"])})
        monkeypatch.setattr(FlakyStore, "pipe_file", read_only)
        with pytest.raises(MachineError, match=r"flaky://c/MANIFEST\.json: cannot be written \(.*read-only"):
            adopt_corpus("flaky://c", executor=HERE)


def read_only(*_: object, **__: object) -> None:
    raise NotImplementedError("read-only store")


@pytest.mark.parametrize(
    "verb", [["stats"], ["sample"], ["split", "--out", "sides"], ["convert", "generic", "x.txt", "--out"]]
)
def test_commands_that_need_records_refuse_adopted_files(tmp_path: Path, verb: list[str]) -> None:
    fill(tmp_path / "c", {"web.jsonl": jsonl(["one", "two"], "body")})
    adopt_corpus(tmp_path / "c", "body", executor=Executor(1))
    (tmp_path / "x.txt").write_text("text")
    before = (tmp_path / "c" / MANIFEST_NAME).read_bytes()
    arguments = [*verb, "c"] if verb[0] == "convert" else [verb[0], "c", *verb[1:]]
    done = z2all("corpus", *arguments, cwd=tmp_path)
    assert "needs shards made by `corpus convert`, but this corpus was adopted. Convert" in one_line(done, 3)
    assert (tmp_path / "c" / MANIFEST_NAME).read_bytes() == before


def test_the_adopt_command_adopts_files_and_prints_the_domains(tmp_path: Path) -> None:
    fill(tmp_path / "raw", {"zh/a.jsonl": jsonl(TEXTS, "text"), "en.parquet": parquet(["a"], "text")})
    answer = z2all("corpus", "adopt", tmp_path / "raw", "--text-field", "words", cwd=tmp_path)
    assert "has no field `words`" in one_line(answer, DataError.exit_code)
    answer = z2all("corpus", "adopt", tmp_path / "raw", "--workers", "2", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    size = os.stat(tmp_path / "raw/zh/a.jsonl").st_size
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("en: 1 documents, ") and lines[0].endswith(" in 1 shards")
    assert lines[1:] == [f"zh: 20 documents, {size / 1024:.1f} KiB in 1 shards"]
    assert "adopt: " in answer.stderr
    assert texts_by_domain(tmp_path / "raw") == {"en": ["a"], "zh": TEXTS}


def test_any_damaged_byte_of_a_parquet_file_is_a_one_line_error(tmp_path: Path) -> None:
    """Such as a reference to a text that is not in the dictionary, or a byte of a column's name."""
    path = tmp_path / "rows.parquet"
    whole, rules = parquet(["one", "two", "three"] * 3, "text", compression="none", write_statistics=False), set()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x81]) + whole[position + 1 :])
        for field in ("text", None):
            try:
                adopt_corpus(tmp_path, field, executor=HERE, on_error="skip", replace=True)
                texts_by_domain(tmp_path)
            except DataError as error:
                rules.add(error.rule)
    assert any("out of bounds" in rule for rule in rules), rules
