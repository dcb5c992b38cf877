import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.corpora import SMALL_SOURCES, build_small_corpus
from z2all_ds.corpus import Manifest, SourceSpec, audit_corpus, build_corpus, load_manifest, parse_record
from z2all_ds.corpus import build as build_module
from z2all_ds.errors import ConfigError, DataError, MachineError


def files(folder: Path) -> dict[str, bytes]:
    """What a build writes; the indices that readers keep beside the shards are not of it."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.endswith(".idx.npy")}


def records(folder: Path, manifest: Manifest) -> list:
    lines = [line for shard in manifest.shards for line in (folder / shard.path).read_bytes().splitlines(keepends=True)]
    return [parse_record(line, "x") for line in lines]


def raw_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_small_corpus_is_sound(small_corpus: Path) -> None:
    manifest = load_manifest(small_corpus)
    report = audit_corpus(small_corpus)
    assert report.problems == ()
    assert report.documents == sum(documents for documents, _ in manifest.domains.values())
    assert list(manifest.domains) == ["code", "en", "zh"]
    for spec in SMALL_SOURCES:
        assert 0.97 * spec.max_bytes < manifest.domains[spec.domain][1] <= spec.max_bytes
    assert max(shard.bytes for shard in manifest.shards) <= 120_000
    code = [shard.path for shard in manifest.shards if shard.domain == "code"]
    assert code == ["code-00000.jsonl", "code-00001.jsonl", "code-00002.jsonl"]
    found = records(small_corpus, manifest)
    assert [record.gid for record in found] == list(range(len(found)))
    for domain in manifest.domains:
        ids = [record.id for record in found if record.data_src == domain]
        assert ids == sorted(set(ids))


def test_same_sources_give_the_same_bytes(small_corpus: Path, tmp_path: Path) -> None:
    manifest = build_small_corpus(tmp_path / "again")
    assert files(tmp_path / "again") == files(small_corpus)
    assert manifest == load_manifest(small_corpus)


def test_a_finished_corpus_is_reused_at_once(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small_corpus, tmp_path / "copy")
    monkeypatch.setattr(build_module, "_build_domain", lambda *_: pytest.fail("built again"))
    assert build_small_corpus(tmp_path / "copy") == load_manifest(small_corpus)


def test_a_killed_build_goes_on_where_it_was(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real, built = tmp_path / "c", build_module._build_domain, []

    def build_or_die(out_dir: Path, spec: SourceSpec, *rest: int) -> list:
        if spec.domain == "zh":
            # what SIGKILL leaves: a finished shard of an unfinished domain, and half of the next
            (out_dir / "zh-00000.jsonl").write_text("old\n")
            (out_dir / "zh-00007.jsonl").write_text("old\n")
            (out_dir / "zh-00001.jsonl.tmp").write_text('{"gid": 1, "i')
            raise KeyboardInterrupt
        built.append(spec.domain)
        return real(out_dir, spec, *rest)

    monkeypatch.setattr(build_module, "_build_domain", build_or_die)
    with pytest.raises(KeyboardInterrupt):
        build_small_corpus(folder)
    assert built == ["code", "en"]
    with pytest.raises(DataError, match="no such file"):
        load_manifest(folder)

    def build_and_tell(out_dir: Path, spec: SourceSpec, *rest: int) -> list:
        built.append(spec.domain)
        return real(out_dir, spec, *rest)

    monkeypatch.setattr(build_module, "_build_domain", build_and_tell)
    build_small_corpus(folder)
    assert built == ["code", "en", "zh"]
    assert files(folder) == files(small_corpus)


def test_what_a_killed_build_of_other_sources_left_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["x"])
    monkeypatch.setattr(build_module, "write_manifest", _only_the_journal(build_module.write_manifest))
    with pytest.raises(KeyboardInterrupt):
        build_corpus(tmp_path / "c", [SourceSpec("old", "jsonl", (raw,))])
    assert sorted(files(tmp_path / "c")) == ["BUILDING.json", "old-00000.jsonl"]
    monkeypatch.undo()
    build_corpus(tmp_path / "c", [SourceSpec("new", "jsonl", (raw,))])
    assert sorted(files(tmp_path / "c")) == ["MANIFEST.json", "new-00000.jsonl"]


def _only_the_journal(write: Callable) -> Callable:
    def write_or_die(folder: Path, manifest: Manifest, name: str = "") -> None:
        if not name:
            raise KeyboardInterrupt
        write(folder, manifest, name)

    return write_or_die


def test_other_sources_do_not_overwrite_unless_told(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["one", "two"])
    build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,)), SourceSpec("b", "jsonl", (raw,))])
    with pytest.raises(ConfigError, match="other sources"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,))])
    build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,))], replace=True)
    assert sorted(files(tmp_path / "c")) == ["MANIFEST.json", "a-00000.jsonl"]
    assert audit_corpus(tmp_path / "c").ok


def test_a_changed_raw_file_is_noticed_and_a_lost_shard_is_built_again(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["one", "two"])
    spec = [SourceSpec("a", "jsonl", (raw,))]
    before = build_corpus(tmp_path / "c", spec)
    (tmp_path / "c" / "a-00000.jsonl").unlink()
    assert build_corpus(tmp_path / "c", spec) == before
    assert audit_corpus(tmp_path / "c").ok
    raw_jsonl(raw, ["one", "two", "three"])
    with pytest.raises(ConfigError, match="other sources or raw files"):
        build_corpus(tmp_path / "c", spec)


def test_max_bytes_takes_whole_documents_from_all_over(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", [f"document {n:04d} " * 5 for n in range(1000)])
    manifest = build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,), max_bytes=40_000)])
    assert 39_500 < manifest.domains["a"][1] <= 40_000
    ids = [record.id for record in records(tmp_path / "c", manifest)]
    assert ids == sorted(ids)
    for tenth in range(10):
        in_tenth = sum(tenth * 100 <= number < tenth * 100 + 100 for number in ids)
        assert 0.4 * len(ids) / 10 < in_tenth < 1.8 * len(ids) / 10


def test_max_bytes_above_the_source_takes_everything(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["a", "b", "c"])
    manifest = build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,), max_bytes=10**9)])
    assert [record.content for record in records(tmp_path / "c", manifest)] == ["a", "b", "c"]


def test_one_giant_does_not_end_a_limited_domain(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["x" * 300_000, *["small"] * 50])
    manifest = build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,), max_bytes=4_000)])
    assert manifest.domains["a"][0] > 25


def test_a_full_disk_is_one_line_and_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["a"])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=r"the disk or the quota is full. Free some space"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,))])
    assert files(tmp_path / "c") == {}


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([], "at least one"),
        ([SourceSpec("a", "nope")], "the converters are"),
        ([SourceSpec("a/b", "python_code")], "becomes a file name"),
        ([SourceSpec("a", "python_code"), SourceSpec("a", "chinese_sample")], "named by two sources"),
        ([SourceSpec("a", "jsonl")], "needs raw files"),
        ([SourceSpec("a", "python_code", (Path("x"),))], "takes no raw files"),
        ([SourceSpec("a", "python_code", max_bytes=0)], "must be positive"),
    ],
)
def test_senseless_sources(tmp_path: Path, specs: list[SourceSpec], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_corpus(tmp_path / "c", specs)
    assert not (tmp_path / "c").exists()


def test_data_that_cannot_be_built(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (tmp_path / "none",))])
    empty = raw_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError, match="gave no document"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (empty,))])
    big = raw_jsonl(tmp_path / "big.jsonl", ["small", "x" * 2000])
    with pytest.raises(DataError, match=r"document 1 of domain a.*more than a whole shard"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (big,))], max_shard_bytes=1000)
