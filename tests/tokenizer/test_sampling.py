import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus import Executor, load_manifest, parse_record
from z2all_ds.corpus.adopt import adopt_corpus
from z2all_ds.tokenizer.sampling import check_weights, open_sources, parse_weights, share_budget

AVAILABLE = st.dictionaries(st.text(max_size=3), st.integers(1, 10**6), min_size=1, max_size=6)


def test_budget_that_small_domains_cannot_use_goes_to_larger_ones() -> None:
    assert share_budget({"a": 1000, "b": 1000, "c": 1000}, 300) == {"a": 100, "b": 100, "c": 100}
    assert share_budget({"a": 1000, "b": 10, "c": 1000}, 300) == {"a": 145, "b": 10, "c": 145}
    assert share_budget({"a": 5, "b": 7}, 300) == {"a": 5, "b": 7}


def test_the_budget_is_shared_by_weight() -> None:
    plenty = {"zh": 10**9, "en": 10**9, "code": 10**9}
    weights = {"zh": 0.5, "en": 0.3, "code": 0.2}
    shares = share_budget(plenty, 1000, weights)
    assert {name: round(share, -1) for name, share in shares.items()} == {"zh": 500, "en": 300, "code": 200}
    assert share_budget({**plenty, "zh": 100}, 1000, weights) == {"zh": 100, "en": 540, "code": 360}
    assert share_budget(plenty, 1000, {"zh": 2}) == {"zh": 1000, "en": 0, "code": 0}


@given(AVAILABLE, st.integers(0, 10**6), st.data())
def test_shares_use_the_whole_budget_and_never_exceed_it(
    available: dict[str, int], budget: int, data: st.DataObject
) -> None:
    positive = st.floats(0.001, 1000)
    weights = data.draw(st.none() | st.fixed_dictionaries(dict.fromkeys(available, positive)))
    shares = share_budget(available, budget, weights)
    assert shares.keys() == available.keys()
    assert all(0 <= shares[name] <= available[name] for name in available)
    assert min(budget, sum(available.values())) - len(available) < sum(shares.values()) <= budget


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"zn": 1.0}, "weight of 'zn': no such domain; there are zh, en, code. Did you mean 'zh'"),
        ({"pictures": 1.0}, "Use one of those names"),
        ({"zh": -0.1}, "weight zh=-0.1: must be zero or a positive number"),
        ({"zh": float("nan")}, "must be zero or a positive number"),
        ({"zh": 0, "en": 0}, "all are zero"),
    ],
)
def test_invalid_weights_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_weights(weights, ["zh", "en", "code"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_are_parsed_from_the_command_line() -> None:
    assert parse_weights("zh=0.5, en=2") == {"zh": 0.5, "en": 2.0}
    assert parse_weights('{"zh": 0.5, "a=b": 1}') == {"zh": 0.5, "a=b": 1.0}
    for text in ("", "zh", "zh=x", "{", "{}", '{"zh": null}', "[1]"):
        with pytest.raises(ConfigError, match="not NAME=NUMBER"):
            parse_weights(text)


def texts_of(inputs: object, domain: str, budget: int) -> list[str]:
    return [text for _, text in open_sources(inputs).domains[domain].sample(budget)]  # type: ignore[arg-type]


def test_a_sample_is_spread_over_all_shards(small_corpus: Path) -> None:
    manifest = load_manifest(small_corpus)
    everything = [
        parse_record(line, "x").content
        for shard in manifest.shards
        if shard.domain == "zh"
        for line in (small_corpus / shard.path).read_bytes().splitlines(keepends=True)
    ]
    size = manifest.domains["zh"][1]
    assert texts_of(small_corpus, "zh", size) == everything
    third = texts_of(small_corpus, "zh", size // 3)
    places = [everything.index(text) for text in third]
    assert places == sorted(places)
    assert 0.25 * len(everything) < len(third) < 0.4 * len(everything)
    assert places[0] < 3
    assert places[-1] > len(everything) - 12
    assert len(texts_of(small_corpus, "zh", 1)) == 1


def test_adopted_files_are_sampled_from_their_text_field(tmp_path: Path) -> None:
    """Parquet and JSON Lines files may use a custom text field."""
    texts = [f"text {number} " * 20 for number in range(600)]
    table = pa.table({"body": texts, "url": [""] * 600})
    pq.write_table(table, tmp_path / "web.parquet", row_group_size=100)
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts[:50]))
    adopt_corpus(tmp_path, "body", executor=Executor(1))
    domains = open_sources(tmp_path).domains
    assert [text for _, text in domains["web"].sample(10**9)] == texts
    assert [text for _, text in domains["code"].sample(10**9)] == texts[:50]
    some = [texts.index(text) for _, text in domains["web"].sample(domains["web"].bytes // 10)]
    assert some[-1] > 500
    assert 50 < len(some) < 70


def test_records_without_a_text_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_text('{"content": "one"}\n{"content": null}\n{"content": "two"}\n')
    adopt_corpus(tmp_path, executor=Executor(1), on_error="skip")
    assert texts_of(tmp_path, "web", 1000) == ["one", "", "two"]


def test_a_fifo_in_place_of_a_shard_is_refused(small_corpus: Path, tmp_path: Path) -> None:
    corpus = shutil.copytree(small_corpus, tmp_path / "corpus")
    shard = next(shard.path for shard in load_manifest(corpus).shards if shard.domain == "zh")
    (corpus / shard).unlink()
    os.mkfifo(corpus / shard)
    with pytest.raises(DataError, match="not a regular file"):
        texts_of(corpus, "zh", 100)


def test_files_are_grouped_into_domains_by_name(tmp_path: Path) -> None:
    (tmp_path / "en.txt").write_text("first\nsecond\n", "utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "一"}\n\n{"content": "二", "id": 1}\n', "utf-8")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "三"}) + "\n", "utf-8")
    given = [str(tmp_path / "en.txt"), f"zh={tmp_path / 'b.jsonl'}", f"zh={tmp_path / 'c.jsonl'}"]
    sources = open_sources(given)
    assert list(sources.domains) == ["en", "zh"]
    assert sources.domains["en"].bytes == 13
    assert texts_of(given, "en", 100) == ["first\nsecond\n"]
    assert texts_of(given, "zh", 1000) == ["一", "二", "三"]
    assert open_sources(given).fingerprint == sources.fingerprint
    moved = (tmp_path / "en.txt").rename(tmp_path / "x=y.txt")
    assert list(open_sources([moved]).domains) == ["x=y"]
    assert open_sources([f"en={moved}", *given[1:]]).fingerprint == sources.fingerprint
    moved.write_text("first\nother!\n", "utf-8")
    assert open_sources([f"en={moved}", *given[1:]]).fingerprint != sources.fingerprint


def test_missing_and_empty_inputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    mistakes: list[tuple[list[str | Path], type[Exception], str]] = [
        ([], ConfigError, "no input"),
        ([tmp_path / "empty.txt"], DataError, "it is empty"),
        ([f"zh={tmp_path / 'none'}"], DataError, "no such file"),
        ([tmp_path / "folder"], DataError, "no such file"),
        ([tmp_path / "none"], DataError, "no such file"),
        ([tmp_path / "folder", tmp_path / "empty.txt"], DataError, "it is a folder"),
    ]
    for inputs, error, message in mistakes:
        with pytest.raises(error) as caught:
            open_sources(inputs)
        assert message in str(caught.value)
