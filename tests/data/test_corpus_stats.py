import json
import statistics
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.making import write_corpus
from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.reports import print_lines, to_json
from z2all_ds.corpus.manifest import FORMAT_VERSION, Manifest, load_manifest, write_manifest
from z2all_ds.data import corpus_stats as stats_module
from z2all_ds.data.corpus_stats import BIN_EDGES, corpus_stats, describe, draw_lengths, human_count

TEXTS = {"en": ["word " * n for n in range(100)], "中文": ["字" * n for n in range(1, 41)]}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", TEXTS, documents_per_shard=30)


def test_figures_match_the_texts(corpus: Path) -> None:
    stats = corpus_stats(corpus)
    manifest = load_manifest(corpus)
    for domain, texts in TEXTS.items():
        found, lengths = stats.domains[domain], [len(text) for text in texts]
        assert (found.documents, found.bytes) == manifest.domains[domain]
        assert found.content_bytes == sum(len(text.encode()) for text in texts)
        assert (found.characters, found.documents_read) == (sum(lengths), len(lengths))
        assert found.mean_length == statistics.mean(lengths)
        assert found.median_length == statistics.median_low(lengths)
        assert found.p95_length == sorted(lengths)[-(-95 * len(lengths) // 100) - 1]
        assert (found.max_length, found.tokens) == (max(lengths), None)
        for place, edge in enumerate(BIN_EDGES):
            end = BIN_EDGES[place + 1] if place + 1 < len(BIN_EDGES) else float("inf")
            assert found.histogram[place] == sum(edge <= length < end for length in lengths)
    assert stats.total.documents == 140
    assert stats.total.characters == sum(one.characters for one in stats.domains.values())
    assert stats.total.max_length == 495
    assert sum(stats.total.histogram) == 140


@pytest.mark.processes
def test_worker_processes_give_the_same_result(corpus: Path) -> None:
    assert corpus_stats(corpus, workers=2) == corpus_stats(corpus)


def test_token_counts_match_the_tokenizer(small_corpus: Path, small_tokenizer: Path) -> None:
    from z2all_ds.corpus.schema import parse_record
    from z2all_ds.tokenizer import load_tokenizer

    tokenizer, expected = load_tokenizer(small_tokenizer), dict[str, int]()
    for shard in load_manifest(small_corpus).shards:
        for line in (small_corpus / shard.path).read_bytes().splitlines():
            count = len(tokenizer.encode(parse_record(line, "x").content))
            expected[shard.domain] = expected.get(shard.domain, 0) + count
    for workers in (1, 2):
        stats = corpus_stats(small_corpus, small_tokenizer, workers=workers)
        assert {domain: one.tokens for domain, one in stats.domains.items()} == expected
        assert stats.total.tokens == sum(expected.values())


def test_a_share_of_the_corpus_is_read_and_scaled_to_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_module, "BLOCK_BYTES", 1000)
    write_corpus(tmp_path, {"a": [f"text {n} " * (n * 7919 % 13) for n in range(3000)]}, documents_per_shard=700)
    whole, part = corpus_stats(tmp_path).domains["a"], corpus_stats(tmp_path, sample_share=0.2).domains["a"]
    assert corpus_stats(tmp_path, sample_share=0.2).domains["a"] == part
    assert (part.documents, part.bytes) == (whole.documents, whole.bytes)
    assert 400 < part.documents_read < 800
    assert part.characters == pytest.approx(whole.characters, rel=0.1)
    assert part.mean_length == pytest.approx(whole.mean_length, rel=0.2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 4000))
def test_blocks_cover_the_whole_shard(lengths: list[int], block_bytes: int) -> None:
    """Every document begins in exactly one block, whatever the block size."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        corpus = write_corpus(Path(name), {"a": ["x" * length for length in lengths]}, documents_per_shard=50)
        shard = load_manifest(corpus).shards[0]
        patch.setattr(stats_module, "BLOCK_BYTES", block_bytes)
        blocks = stats_module._blocks(shard, 0.999999)
        assert blocks == [(b, min(b + block_bytes, shard.bytes)) for b in range(0, shard.bytes, block_bytes)]
        lines = list(stats_module._chosen_lines(corpus, shard, 0.999999))
        data = (corpus / shard.path).read_bytes()
        assert [line for _, line in lines] == data.splitlines(keepends=True)
        assert all(data[start : start + len(line)] == line for start, line in lines)


def test_the_smallest_share_still_reads_documents_of_every_domain(corpus: Path) -> None:
    assert all(one.documents_read > 0 for one in corpus_stats(corpus, sample_share=1e-9).domains.values())


def test_the_printed_table(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(share: float) -> str:
        print_lines(describe(corpus_stats(corpus, sample_share=share)))
        return capsys.readouterr().out

    rows = [line.split() for line in shown(1.0).splitlines()]
    assert rows[0] == ["domain", "documents", "JSON", "content", "chars", "mean", "median", "p95", "longest"]
    json_size = human_bytes(load_manifest(corpus).domains["en"][1]).split()
    assert rows[1] == ["en", "100", *json_size, "24.2", "KiB", "24.8K", "248", "245", "470", "495"]
    assert [row[0] for row in rows[1:]] == ["en", "中文", "all"]
    assert "estimated from 140 documents" in shown(0.5)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0K"), (999_949, "999.9K"), (999_950, "1.0M"), (31_520_000, "31.5M"),
     (2.5e12, "2.5T"), (7e15, "7000.0T")],
)  # fmt: skip
def test_human_count(count: float, text: str) -> None:
    assert human_count(count) == text


def test_stats_as_json(corpus: Path) -> None:
    values = json.loads(to_json(corpus_stats(corpus)))
    assert values["domains"]["中文"]["documents"] == 40
    assert len(values["bin_edges"]) == len(values["total"]["histogram"])
    assert values["sample_share"] == 1.0


@pytest.mark.filterwarnings("error")  # matplotlib warns about characters it cannot draw
def test_plots_are_written_as_png_or_svg(tmp_path: Path) -> None:
    odd = {"中文": ["字" * 9], "_$x$": ["", "a" * 10**6], "en": ["word"]}
    stats = corpus_stats(write_corpus(tmp_path / "c", odd))
    for name in ("a.png", "new/b.svg"):
        assert draw_lengths(stats, tmp_path / name).stat().st_size > 5000
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        draw_lengths(stats, tmp_path / "a.jpg")


def test_an_empty_corpus_has_zero_figures(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(FORMAT_VERSION, ()))
    stats = corpus_stats(tmp_path)
    assert (stats.domains, stats.total.documents, stats.total.max_length) == ({}, 0, 0)
    print_lines(describe(stats))
    draw_lengths(stats, tmp_path / "empty.png")


def test_invalid_shares_and_missing_files_are_refused(corpus: Path, tmp_path: Path) -> None:
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigError, match="must be above 0 and at most 1"):
            corpus_stats(corpus, sample_share=share)
    with pytest.raises(DataError, match="tokenizer"):
        corpus_stats(corpus, tmp_path / "none")
    (corpus / "en-00000.jsonl").unlink()
    with pytest.raises(DataError, match=r"en-00000\.jsonl: no such file, but the manifest lists it"):
        corpus_stats(corpus)
