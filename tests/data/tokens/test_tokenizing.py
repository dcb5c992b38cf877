"""Tests for tokenizing a corpus: exactly the tokens of the tokenizer, even after interruptions."""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.tokens.text_corpora import ODD_TEXTS, files_in, write_text_corpus
from tests.helpers.command import COMMAND, environment
from tests.helpers.processes import ended
from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.base.machine import group_is_alive
from z2all_ds.base.reports import plain
from z2all_ds.corpus.building.folder import build_lock
from z2all_ds.corpus.manifest import Manifest, ShardInfo, load_manifest, write_manifest
from z2all_ds.corpus.reading.readers import open_domains
from z2all_ds.data.documents import as_document
from z2all_ds.data.tokens.manifest import files_of, write_token_manifest
from z2all_ds.data.tokens.reading import is_token_corpus, open_token_corpus
from z2all_ds.data.tokens.tokenizing import describe, figures_of, tokenize_corpus
from z2all_ds.tokenizer import load_tokenizer, train_tokenizer


def assert_equals_the_text(corpus: Path, tokenizer_dir: Path, tokens: Path) -> None:
    """Compare each document with its text, tokenized separately."""
    tokenizer, domains = load_tokenizer(tokenizer_dir), open_token_corpus(tokens).domains
    readers = open_domains(corpus, load_manifest(corpus))
    assert list(domains) == list(readers)
    for name, reader in readers.items():
        assert domains[name].num_documents == reader.num_documents
        block = domains[name].open_block(0, reader.num_documents)
        for number in range(reader.num_documents):
            expected = as_document(tokenizer.encode_batch([reader.read(number)])[0], tokenizer.eot_id)
            np.testing.assert_array_equal(block.tokens(number), expected)


@pytest.fixture(scope="module")
def odd_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a corpus of unusual texts, with a shard of only empty texts, a long shard, and shards without documents."""
    words = random.Random(3).choices(["alpha", "beta", "гамма", "分词", "= {}\n", "  "], k=300_000)
    long = [" ".join(words[at : at + 700]) for at in range(0, len(words), 700)]
    assert sum(len(text.encode()) for text in long) > 1_500_000
    shards: dict[str, list[Sequence[str]]] = {"odd": [ODD_TEXTS, ["", ""], []], "long": [[*long, ""]], "none": [[]]}
    return write_text_corpus(tmp_path_factory.mktemp("odd") / "语料", shards)


@pytest.fixture(scope="module")
def wide_tokenizer(small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the small tokenizer and give half of its text tokens ids that need more than 16 bits."""
    folder = tmp_path_factory.mktemp("wide") / "tokenizer"
    shutil.copytree(small_tokenizer, folder)
    values = json.loads((folder / "tokenizer.json").read_bytes())
    vocabulary = values["model"]["vocab"]
    for token, number in vocabulary.items():
        vocabulary[token] = number + 70_000 if number % 2 else number
    (folder / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def other_tokenizer(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other") / "tokenizer"
    train_tokenizer(small_corpus, folder, 400)
    return folder


# Output


@pytest.mark.parametrize("workers", [1, 2])
def test_every_document_has_the_tokens_of_the_tokenizer(
    odd_corpus: Path, small_tokenizer: Path, tmp_path: Path, workers: int
) -> None:
    manifest = tokenize_corpus(odd_corpus, small_tokenizer, tmp_path / "t", workers)
    assert_equals_the_text(odd_corpus, small_tokenizer, tmp_path / "t")
    raw = load_manifest(odd_corpus)
    assert manifest.dtype == "uint16"
    assert manifest.corpus_fingerprint == raw.fingerprint
    assert manifest.domain_fingerprints == raw.domain_fingerprints
    shards = [(shard.path, shard.domain, shard.documents, shard.bytes) for shard in manifest.shards]
    assert shards == [(s.path, s.domain, s.documents, s.bytes) for s in raw.shards if s.documents]
    names = {name for shard in manifest.shards for name in files_of(shard.path)}
    assert set(files_in(tmp_path / "t")) == {*names, "TOKENS.json"}
    assert not (tmp_path / "t" / ".building").exists()


def test_tokens_of_an_earlier_version_get_their_sizes_with_replace(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    """Without document sizes, the tokens are read in the order of that version."""
    written = tokenize_corpus(small_corpus, small_tokenizer, tmp_path, 1)
    shards = tuple(replace(shard, sizes_file=None, sizes_sha256=None) for shard in written.shards)
    old = replace(written, shards=shards)
    write_token_manifest(tmp_path, old)
    assert tokenize_corpus(small_corpus, small_tokenizer, tmp_path, 1) == old
    assert not any(domain.has_sizes for domain in open_token_corpus(tmp_path).domains.values())
    assert tokenize_corpus(small_corpus, small_tokenizer, tmp_path, 1, replace=True) == written
    assert all(domain.has_sizes for domain in open_token_corpus(tmp_path).domains.values())


def test_changed_text_of_the_same_size_is_not_tokenized(small_tokenizer: Path, tmp_path: Path) -> None:
    """The tokens would get the fingerprint of the original text."""
    corpus = write_text_corpus(tmp_path / "c", {"a": [["one", "two"], ["six"]]})
    file = corpus / "a-00001.jsonl"
    file.write_bytes(file.read_bytes().replace(b"six", b"ten"))
    with pytest.raises(DataError, match=r"a-00001\.jsonl: its SHA-256 differs from the manifest"):
        tokenize_corpus(corpus, small_tokenizer, tmp_path / "t", 1)
    assert not is_token_corpus(tmp_path / "t")


def test_empty_documents_are_one_token(odd_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    tokenize_corpus(odd_corpus, small_tokenizer, tmp_path / "t", 1)
    eot_id = load_tokenizer(small_tokenizer).eot_id
    domain = open_token_corpus(tmp_path / "t").domains["odd"]
    block = domain.open_block(len(ODD_TEXTS) - 1, domain.num_documents)
    assert [block.tokens(number).tolist() for number in (1, 2)] == [[eot_id], [eot_id]]
    assert [len(block.tokens(number)) for number in (1, 2)] == [1, 1]


def test_the_number_of_workers_changes_nothing(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    for workers in (1, 2, 3):
        tokenize_corpus(small_corpus, small_tokenizer, tmp_path / str(workers), workers)
    assert files_in(tmp_path / "1") == files_in(tmp_path / "2") == files_in(tmp_path / "3")
    assert multiprocessing.active_children() == []


def test_ids_above_16_bits_are_stored_as_uint32(small_corpus: Path, wide_tokenizer: Path, tmp_path: Path) -> None:
    manifest = tokenize_corpus(small_corpus, wide_tokenizer, tmp_path / "t", 1)
    assert (manifest.dtype, manifest.tokenizer_size) == ("uint32", load_tokenizer(wide_tokenizer).size)
    assert np.fromfile(tmp_path / "t" / manifest.shards[0].tokens_file, "<u4").max() > 70_000
    assert_equals_the_text(small_corpus, wide_tokenizer, tmp_path / "t")


def test_shards_in_subfolders_and_with_another_text_field_are_tokenized(small_tokenizer: Path, tmp_path: Path) -> None:
    raw = load_manifest(write_text_corpus(tmp_path / "c", {"a": [["one", "two"]]}))
    (tmp_path / "c" / "deep" / "er").mkdir(parents=True)
    moved = tmp_path / "c" / "deep" / "er" / "x.jsonl"
    moved.write_bytes((tmp_path / "c" / raw.shards[0].path).read_bytes().replace(b"content", b"my_text"))
    digest = hashlib.sha256(moved.read_bytes()).hexdigest()
    shard = ShardInfo("deep/er/x.jsonl", "a", 2, moved.stat().st_size, digest)
    write_manifest(tmp_path / "c", Manifest(1, (shard,), text_field="my_text"))
    (written,) = tokenize_corpus(tmp_path / "c", small_tokenizer, tmp_path / "t", 1).shards
    assert (written.tokens_file, written.ends_file) == ("deep/er/x.jsonl.tokens", "deep/er/x.jsonl.ends")
    assert_equals_the_text(tmp_path / "c", small_tokenizer, tmp_path / "t")


def test_figures_and_summary_match_the_texts(small_tokenizer: Path, tmp_path: Path) -> None:
    texts = ["ab", "汉", ""]
    write_text_corpus(tmp_path / "c", {"x": [texts, ["ab"]], "all": [["ab"]]})
    tokens = [len(ids) for ids in load_tokenizer(small_tokenizer).encode_batch(texts)]
    manifest = tokenize_corpus(tmp_path / "c", small_tokenizer, tmp_path / "t", 1)
    of_x = {
        "documents": 4,
        "tokens": sum(tokens) + tokens[0] + 4,
        "text_bytes": 7,
        "bytes_per_token": 7 / (sum(tokens) + tokens[0]),
    }
    figures = plain(figures_of(manifest))
    assert figures["domains"]["x"] == of_x
    assert list(figures["domains"]) == ["x", "all"]
    assert figures["total"]["tokens"] == of_x["tokens"] + tokens[0] + 1
    lines = list(describe(manifest))
    assert lines[0] == f"x: 4 documents, {of_x['tokens']} tokens, {of_x['bytes_per_token']:.2f} bytes per token"
    assert [line.split()[0] for line in lines] == ["x:", "all:", "all:"]


# Interrupted and repeated runs


def test_a_second_run_writes_nothing(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t"
    first = tokenize_corpus(small_corpus, small_tokenizer, out, 1)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    assert tokenize_corpus(small_corpus, small_tokenizer, out, 1, replace=True) == first
    assert capsys.readouterr().err == f"{out}: the tokens of all {len(first.shards)} shards exist\n"
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize("suffix", [".tokens", ".ends"])
@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 8)])
def test_missing_and_truncated_files_are_written_again(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, suffix: str, damage: Callable[[Path], None]
) -> None:
    out = tmp_path / "t"
    tokenize_corpus(small_corpus, small_tokenizer, out, 1)
    whole = files_in(out)
    damage(out / f"en-00000.jsonl{suffix}")
    others = {path: path.stat().st_mtime_ns for path in out.glob("*-*") if not path.name.startswith("en-00000")}
    tokenize_corpus(small_corpus, small_tokenizer, out, 1)
    assert files_in(out) == whole
    assert {path: path.stat().st_mtime_ns for path in others} == others


@pytest.fixture(scope="module")
def slow_corpus(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write ten shards that take long enough to interrupt the run between two of them."""
    readers = open_domains(small_corpus, load_manifest(small_corpus))
    texts = [reader.read(number) for reader in readers.values() for number in range(reader.num_documents)]
    draw = random.Random(1)
    shards = [draw.choices(texts, k=250) for _ in range(10)]
    return write_text_corpus(tmp_path_factory.mktemp("slow") / "c", {"slow": shards})


@pytest.fixture(scope="module")
def unbroken(slow_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("unbroken") / "t"
    tokenize_corpus(slow_corpus, small_tokenizer, folder, 2)
    return files_in(folder)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.extended) for number in (signal.SIGINT, signal.SIGTERM))],
)
def test_an_interrupted_run_continues_when_started_again(
    slow_corpus: Path, small_tokenizer: Path, unbroken: dict[str, bytes], tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "t"
    arguments = ["corpus", "tokenize", slow_corpus, "--tokenizer", small_tokenizer, "--out", out, "--workers", "2"]
    command = [*COMMAND, *map(str, arguments)]
    work = out / ".building" / "tokens"
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment()
    )
    with ended(process):
        deadline = time.monotonic() + 60
        while not (list(work.glob("0*.json")) and list(work.glob("*.tmp"))):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        if number == signal.SIGTERM:
            process.terminate()
        else:  # signal the whole group, as a terminal does on Ctrl-C
            os.killpg(process.pid, number)
        process.wait(30)
        while group_is_alive(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.stderr
        process.stderr.close()
    assert not is_token_corpus(out)
    finished = {path: path.stat().st_mtime_ns for path in work.glob("0*.json")}
    assert 0 < len(finished) < 10
    kinds = {path.suffix for path in out.iterdir() if not path.name.startswith(".")}
    assert kinds <= {".tokens", ".ends", ".sizes"}
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert not list(out.rglob("*.tmp")) and not list(out.rglob("*.progress"))
    done = {path: path.stat().st_mtime_ns for path in out.glob("slow-*.tokens")}
    again = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert again.returncode == 0, again.stderr
    assert f"continuing with {10 - len(finished)} of 10 shards" in again.stderr
    assert files_in(out) == unbroken
    kept = [path for path, changed in done.items() if path.stat().st_mtime_ns == changed]
    assert len(kept) >= len(finished)


def test_an_invalid_record_stops_the_run_and_finished_shards_are_kept(small_tokenizer: Path, tmp_path: Path) -> None:
    corpus = write_text_corpus(tmp_path / "c", {"a": [["one", "two"], ["three", "four", "five"]]})
    shard = corpus / "a-00001.jsonl"
    good = shard.read_bytes()
    shard.write_bytes(good.replace(b'"four"', b"[1, 2]"))
    with pytest.raises(DataError, match=r"a-00001\.jsonl, record 1: `content` must be a string and is list"):
        tokenize_corpus(corpus, small_tokenizer, tmp_path / "t", 1)
    assert not is_token_corpus(tmp_path / "t")
    assert not list((tmp_path / "t").rglob("*.tmp"))
    first = (tmp_path / "t" / "a-00000.jsonl.tokens").stat().st_mtime_ns
    shard.write_bytes(good)
    tokenize_corpus(corpus, small_tokenizer, tmp_path / "t", 1)
    assert_equals_the_text(corpus, small_tokenizer, tmp_path / "t")
    assert (tmp_path / "t" / "a-00000.jsonl.tokens").stat().st_mtime_ns == first


# Errors


def test_tokens_of_another_tokenizer_are_overwritten_only_with_replace(
    small_corpus: Path, small_tokenizer: Path, other_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t"
    tokenize_corpus(small_corpus, small_tokenizer, out, 1)
    before = files_in(out)
    with pytest.raises(ConfigError, match=r"contains tokens of another tokenizer.*--replace"):
        tokenize_corpus(small_corpus, other_tokenizer, out, 1)
    assert files_in(out) == before
    tokenize_corpus(small_corpus, other_tokenizer, out, 1, replace=True)
    assert_equals_the_text(small_corpus, other_tokenizer, out)
    tokenize_corpus(small_corpus, other_tokenizer, tmp_path / "fresh", 1)
    assert files_in(out) == files_in(tmp_path / "fresh")


def test_tokens_of_another_corpus_are_refused_even_if_unfinished(small_tokenizer: Path, tmp_path: Path) -> None:
    one = write_text_corpus(tmp_path / "one", {"a": [["one"], ["two"]], "b": [["three"]]})
    two = write_text_corpus(tmp_path / "two", {"a": [["four"]]})
    broken, out = one / "b-00000.jsonl", tmp_path / "t"
    good = broken.read_bytes()
    broken.write_bytes(b"?" * len(good))
    with pytest.raises(DataError):
        tokenize_corpus(one, small_tokenizer, out, 1)
    before = files_in(out)
    assert "a-00001.jsonl.tokens" in before
    with pytest.raises(ConfigError, match="contains tokens of another corpus"):
        tokenize_corpus(two, small_tokenizer, out, 1)
    assert files_in(out) == before
    tokenize_corpus(two, small_tokenizer, out, 1, replace=True)
    assert set(files_in(out)) == {"TOKENS.json", *files_of("a-00000.jsonl")}
    assert_equals_the_text(two, small_tokenizer, out)


def test_an_invalid_token_manifest_is_overwritten_only_with_replace(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    tokenize_corpus(small_corpus, small_tokenizer, tmp_path / "t", 1)
    whole = files_in(tmp_path / "t")
    (tmp_path / "t" / "TOKENS.json").write_text("{")
    with pytest.raises(ConfigError, match=r"TOKENS\.json: not a valid token manifest \(Invalid JSON.*--replace"):
        tokenize_corpus(small_corpus, small_tokenizer, tmp_path / "t", 1)
    tokenize_corpus(small_corpus, small_tokenizer, tmp_path / "t", 1, replace=True)
    assert files_in(tmp_path / "t") == whole


def test_a_second_tokenization_at_the_same_time_is_refused(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    with build_lock(tmp_path / "t"), pytest.raises(ConfigError, match="another build is in progress"):
        tokenize_corpus(small_corpus, small_tokenizer, tmp_path / "t", 1)
    tokenize_corpus(small_corpus, small_tokenizer, tmp_path / "t", 1)


def test_the_folder_of_a_text_corpus_is_refused_as_output(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    shutil.copytree(small_corpus, tmp_path / "c")
    before = files_in(tmp_path / "c")
    with pytest.raises(ConfigError, match="is a corpus of text"):
        tokenize_corpus(tmp_path / "c", small_tokenizer, tmp_path / "c", 1)
    assert files_in(tmp_path / "c") == before


def test_invalid_arguments_leave_no_folder(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    empty = write_text_corpus(tmp_path / "empty", {"a": [[]]})
    for corpus, tokenizer, message in (
        (empty, small_tokenizer, "it has no documents"),
        (tmp_path / "none", small_tokenizer, r"MANIFEST\.json: no such file"),
        (small_corpus, tmp_path / "none", "no such folder"),
    ):
        with pytest.raises(DataError, match=message):
            tokenize_corpus(corpus, tokenizer, tmp_path / "t", 1)
    with pytest.raises(ConfigError, match="workers 0"):
        tokenize_corpus(small_corpus, small_tokenizer, tmp_path / "t", 0)
    assert not (tmp_path / "t").exists()


def test_too_little_disk_space_is_reported_before_writing(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    raw = load_manifest(small_corpus)
    shutil.copytree(small_corpus, tmp_path / "c")
    write_manifest(tmp_path / "c", replace(raw, shards=(replace(raw.shards[0], bytes=10**18), *raw.shards[1:])))
    with pytest.raises(MachineError, match=r"the tokens of this corpus needs 5000\d+\.\d+ GB"):
        tokenize_corpus(tmp_path / "c", small_tokenizer, tmp_path / "t", 1)
    assert files_in(tmp_path / "t") == {}


@pytest.mark.parametrize("shard", ["../home/work", "link/work", "{absolute}"])
def test_unfinished_work_of_somebody_else_deletes_nothing_of_the_user(
    shard: str, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    """Not by names that lead out of the folder, and not through links."""
    home, out = tmp_path / "home", tmp_path / "tokens"
    (out / ".building" / "tokens").mkdir(parents=True)
    home.mkdir()
    (home / "work.tokens").write_text("precious")
    (out / "link").symlink_to(home)
    shards = [shard.replace("{absolute}", str(home / "work"))]
    job = {"tokenizer_fingerprint": "x", "corpus_fingerprint": "y", "shards": shards}
    (out / ".building" / "tokens" / "JOB.json").write_text(json.dumps(job))
    tokenize_corpus(small_corpus, small_tokenizer, out, 1, replace=True)
    assert (home / "work.tokens").read_text() == "precious"


def test_a_link_instead_of_unfinished_work_is_refused(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "work.tmp").write_text("precious")
    (tmp_path / "tokens" / ".building").mkdir(parents=True)
    (tmp_path / "tokens" / ".building" / "tokens").symlink_to(tmp_path / "home")
    with pytest.raises(ConfigError, match="is a link"):
        tokenize_corpus(small_corpus, small_tokenizer, tmp_path / "tokens", 1)
    assert (tmp_path / "home" / "work.tmp").read_text() == "precious"


def test_a_fifo_instead_of_the_manifest_is_refused(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "TOKENS.json")
    with pytest.raises(ConfigError, match=r"TOKENS\.json: cannot be read \(not a regular file"):
        tokenize_corpus(small_corpus, small_tokenizer, tmp_path, 1)
