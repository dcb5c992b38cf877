import json
import pickle
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpus.making import write_corpus, write_shard
from z2all_ds.base.errors import DataError
from z2all_ds.corpus import audit as audit_module
from z2all_ds.corpus.adopt import adopt_corpus
from z2all_ds.corpus.audit import as_runs, audit_corpus, audit_shard
from z2all_ds.corpus.executors import Executor
from z2all_ds.corpus.manifest import FORMAT_VERSION, Manifest, ShardInfo, load_manifest, write_manifest
from z2all_ds.corpus.schema import Record

CONTENTS = {"en": [f"the document {n}" for n in range(30)], "zh": [f"第 {n} 篇" for n in range(20)]}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", CONTENTS, documents_per_shard=15)


def test_an_intact_corpus_has_no_problems_or_warnings(corpus: Path) -> None:
    report = audit_corpus(corpus)
    size = sum(shard.bytes for shard in load_manifest(corpus).shards)
    assert (report.ok, report.shards, report.documents, report.bytes) == (True, 4, 50, size)
    assert (report.problems, report.warnings) == ((), ())


def test_a_flipped_byte_is_found(corpus: Path) -> None:
    path = corpus / "en-00000.jsonl"
    data = bytearray(path.read_bytes())
    data[data.index(b"the ")] ^= 0x20  # "the" -> "The": still a valid record, only the hash differs
    path.write_bytes(bytes(data))
    assert audit_corpus(corpus).problems == (
        "en-00000.jsonl: its SHA-256 differs from the manifest, the content has changed",
    )


def test_a_truncated_shard_is_found(corpus: Path) -> None:
    path = corpus / "zh-00000.jsonl"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-20])
    report = audit_corpus(corpus)
    assert not report.ok
    assert any(problem.startswith("zh-00000.jsonl:15: not JSON") for problem in report.problems)
    assert "zh-00000.jsonl: the last line has no line feed, the file is truncated" in report.problems
    assert f"zh-00000.jsonl: {size - 20} bytes, the manifest says {size}" in report.problems


def test_missing_and_unlisted_shards_are_found(corpus: Path) -> None:
    (corpus / "en-00001.jsonl").rename(corpus / "stray.jsonl")
    (corpus / ".building").mkdir()
    (corpus / ".building" / "fr-00000.jsonl").write_text("of a running build")
    assert audit_corpus(corpus).problems == ("en-00001.jsonl: missing", "stray.jsonl: not in the manifest")


def test_a_repeated_gid_and_a_wrong_count_are_found(corpus: Path) -> None:
    path = corpus / "zh-00000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    record = json.loads(lines[1])
    record["gid"] -= 1
    lines[1] = (json.dumps(record, ensure_ascii=False) + "\n").encode()
    path.write_bytes(b"".join(lines[:-1]))
    problems = audit_corpus(corpus).problems
    assert "zh-00000.jsonl:2: gid 30 is also used at zh-00000.jsonl:1" in problems
    assert "zh-00000.jsonl: 14 documents, the manifest says 15" in problems


def test_at_most_ten_invalid_lines_per_shard_are_listed(corpus: Path) -> None:
    path = corpus / "en-00000.jsonl"
    path.write_bytes(path.read_bytes() + b"{broken\n" * 25)
    problems = audit_corpus(corpus).problems
    assert sum("not JSON" in problem for problem in problems) == 10
    assert "en-00000.jsonl: 15 more invalid lines" in problems


def test_a_shard_listed_under_two_names_is_found(corpus: Path) -> None:
    manifest = load_manifest(corpus)
    (corpus / "copy.jsonl").write_bytes((corpus / "en-00001.jsonl").read_bytes())
    write_manifest(corpus, replace(manifest, shards=(*manifest.shards, replace(manifest.shards[1], path="copy.jsonl"))))
    assert audit_corpus(corpus).problems == ("copy.jsonl:1: gids 15 to 29 are also used at en-00001.jsonl:1",)


@pytest.mark.parametrize("first", ["broken", "[1]"])
def test_good_records_of_an_adopted_corpus_are_no_problem_after_a_bad_first_line(tmp_path: Path, first: str) -> None:
    (tmp_path / "a.jsonl").write_text(first + '\n{"content": "x", "title": "t"}\n{"content": "y", "title": "t"}\n')
    (tmp_path / "b.jsonl").write_text('{"content": "z"}\n')
    adopt_corpus(tmp_path, executor=Executor(1), on_error="skip")
    report = audit_corpus(tmp_path)
    assert (len(report.problems), report.bad_records, report.documents) == (1, 1, 3)
    assert report.problems[0].startswith("a.jsonl, record 0: ")
    (tmp_path / "a.jsonl").unlink()
    assert audit_corpus(tmp_path).problems == ("a.jsonl: missing",)


def test_an_empty_corpus_is_intact(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(FORMAT_VERSION, ()))
    report = audit_corpus(tmp_path)
    assert (report.ok, report.documents, report.bytes) == (True, 0, 0)


def test_damaged_text_gives_a_warning(tmp_path: Path) -> None:
    texts = ["good"] * 10 + ["bad \ufffd", "", " \n\u3000", "nul \0", "\ufffd\0"]
    write_corpus(tmp_path, {"en": ["fine"], "zh": texts}, documents_per_shard=11)
    report = audit_corpus(tmp_path)
    assert report.ok
    assert report.warnings == (
        "zh: 2 of 15 documents (13.33%) contain U+FFFD, which stands for an undecodable character;"
        " the first is zh-00000.jsonl:11",
        "zh: 2 of 15 documents (13.33%) contain a NUL character; the first is zh-00001.jsonl:3",
        "zh: 2 of 15 documents (13.33%) have no content; the first is zh-00001.jsonl:1",
    )


@pytest.mark.processes
def test_several_processes_give_the_same_report_as_one(corpus: Path) -> None:
    (corpus / "en-00001.jsonl").write_bytes(b"{broken\n" + (corpus / "en-00000.jsonl").read_bytes())
    (corpus / "zh-00000.jsonl").unlink()
    alone = audit_corpus(corpus)
    assert len(alone.problems) > 5
    assert audit_corpus(corpus, workers=2) == alone


def test_a_gid_not_below_next_gid_is_found(corpus: Path) -> None:
    manifest = load_manifest(corpus)
    write_manifest(corpus, replace(manifest, build_keys={"zh": "key"}, next_gid=47))
    assert audit_corpus(corpus).problems == ("zh-00001.jsonl: has gid 49, but next_gid in the manifest is 47",)


def test_a_gid_beyond_64_bits_is_an_invalid_line(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, "a.jsonl", "a", [Record(2**63, 0, "a", "", "", "x", "", {})])
    found = audit_shard(tmp_path, shard)
    assert (found.documents, found.problems) == (0, [f"a.jsonl:1, gid {2**63}: it must fit into 64 bits"])


def test_the_audit_of_a_shard_has_one_run_of_gids_and_can_be_pickled(corpus: Path) -> None:
    found = audit_shard(corpus, load_manifest(corpus).shards[1])
    assert found.runs.tolist() == [[15, 1, 15]]
    assert pickle.loads(pickle.dumps(found)).problems == found.problems


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        audit_corpus(tmp_path)


GIDS = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**63), 2**63 - 2, 10**18, 10**18 + 1]))


RANGE = re.compile(r"(\d+)\.jsonl:(\d+): gids? (-?\d+)(?: to (-?\d+))? (?:is|are) also used at (\d+)\.jsonl:(\d+)")


@given(st.lists(st.lists(GIDS, max_size=12), max_size=5))
def test_exactly_the_repeated_gids_are_reported(gids_by_shard: list[list[int]]) -> None:
    shards = [ShardInfo(f"{n}.jsonl", "d", len(gids), 0, "0" * 64) for n, gids in enumerate(gids_by_shard)]
    runs = [as_runs(gids, range(1, len(gids) + 1)) for gids in gids_by_shard]
    reported = set[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_module, "MAX_SHOWN", 100)
        problems = audit_module._repeated_gids(shards, runs)
    for problem in problems:
        match = RANGE.fullmatch(problem)
        assert match, problem
        shard, line, first, last, other_shard, other_line = (int(value or match[3]) for value in match.groups())
        assert (shard, line) != (other_shard, other_line)
        assert gids_by_shard[shard][line - 1] == gids_by_shard[other_shard][other_line - 1] == first
        reported |= set(range(first, last + 1))
    counts = Counter(gid for gids in gids_by_shard for gid in gids)
    assert reported == {gid for gid, count in counts.items() if count > 1}


def test_repeated_gids_beyond_ten_are_only_counted() -> None:
    shards = [ShardInfo(f"{n}.jsonl", "d", 12, 0, "0" * 64) for n in range(2)]
    runs = [as_runs(range(0, 24, 2), range(1, 13))] * 2
    problems = audit_module._repeated_gids(shards, runs)
    assert problems[0] == "1.jsonl:1: gid 0 is also used at 0.jsonl:1"
    assert problems[10:] == ["2 more ranges of gids are used twice"]


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=30))
def test_runs_contain_every_gid_with_its_line_number(steps: list[tuple[int, bool]]) -> None:
    pairs, gid = list[tuple[int, int]](), 0
    for line, (step, is_invalid) in enumerate(steps, 1):
        gid += step
        if not is_invalid:
            pairs.append((gid, line))
    runs = as_runs([gid for gid, _ in pairs], [line for _, line in pairs])
    assert [(first + n, line + n) for first, line, length in runs.tolist() for n in range(length)] == pairs
