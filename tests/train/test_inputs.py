"""Checks of a run's inputs before any rank starts; each error is one line."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_prefetch import wait_until
from tests.helpers.training import run_arguments
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.reading.verification import VERIFIER
from z2all_ds.data import data_plan
from z2all_ds.data.run_spec import stream_spec
from z2all_ds.train.inputs import check_data


def test_the_settings_of_every_stage_reach_the_data_stream(tmp_path: Path) -> None:
    second_stage = "{name: b, sequence_length: 64, global_batch: 4, temperature: 2}"
    stages = f"stages=[{{name: a, steps: 5, weights: {{en: 2}}}}, {second_stage}]"
    choices = ("data.packing=best_fit", "data.skip_samples=[[8, 16]]", "train.seed=9")
    run = load_run_config(None, run_arguments(tmp_path, tmp_path / "corpus", tmp_path, stages, *choices))
    spec = stream_spec(run)
    assert (spec.corpus_dir, spec.seed, spec.num_lanes) == (tmp_path / "corpus", 9, 64)
    assert (spec.packing, spec.skip) == ("best_fit", ((8, 16),))
    first, second = spec.stages
    assert (first.name, first.sequence_length, first.samples, first.weights) == ("a", 32, 40, {"en": 2.0})
    assert (second.name, second.sequence_length, second.samples, second.weights) == ("b", 64, 28, None)
    assert second.temperature == 2.0
    assert (spec.on_bad_record, spec.begin_of_text, spec.verify_shards, spec.even_epochs) == ("stop", None, True, True)


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("data.on_bad_record=skip", "on_bad_record", "skip"),
        ("data.begin_of_text=true", "begin_of_text", True),
        ("data.verify_shards=false", "verify_shards", False),
    ],
)
def test_a_setting_changes_its_own_field_of_the_stream_only(
    tmp_path: Path, override: str, field: str, value: Any
) -> None:
    plain = stream_spec(load_run_config(None, run_arguments(tmp_path, tmp_path, tmp_path)))
    changed = stream_spec(load_run_config(None, run_arguments(tmp_path, tmp_path, tmp_path, override)))
    assert changed == replace(plain, **{field: value})


def test_a_run_verifies_its_shards_by_default(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plan, "COUNTED_BYTES", 0)  # counting tokens would read the shards at once
    corpus = shutil.copytree(small_corpus, tmp_path / "corpus")
    shard = corpus / "en-00000.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b"e", b"a"))
    validation = f"validation.corpus={corpus}"
    for override in ("data.verify_shards=false", "data.verify_shards=true"):
        run = load_run_config(None, run_arguments(tmp_path, corpus, small_tokenizer, validation, override))
        data = check_data(run, 1)
        assert stream_spec(run).verify_shards is (override == "data.verify_shards=true")
        assert data.held_out is not None
        for documents in (data.documents, data.held_out):
            domain = documents.domains["en"]
            domain.open_block(0, 1)
            wait_until(lambda: VERIFIER._thread is None)
            if stream_spec(run).verify_shards:
                with pytest.raises(DataError, match=rf"{shard.name}: its SHA-256 differs from the manifest"):
                    domain.open_block(1, 2)
            else:
                domain.open_block(1, 2)
    assert load_run_config().data.verify_shards


def test_the_corpus_may_be_a_remote_url(tmp_path: Path) -> None:
    run = load_run_config(None, run_arguments(tmp_path, tmp_path, tmp_path, "data.corpus=s3://bucket/corpus"))
    assert stream_spec(run).corpus_dir == "s3://bucket/corpus"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages=[{name: a, steps: 5, weights: {poetry: 1}}, {name: b}]", ["'poetry'", "code, en, zh"]),
        ("stages=[{name: a, steps: 5, weights: {}}, {name: b}]", ["weights={}", "code, en, zh"]),
        ("stages=[{name: a, steps: 12}, {name: b}]", ["stage 'b'", "train.steps=12"]),
        ("stages=[{name: a, steps: 5, global_batch: 6}, {name: b}]", ["global_batch=6 of stage 'a'", "8"]),
        ("data.skip_samples=[[3, 6]]", ["[3, 6)", "2 ranks", "[2, 6)"]),
    ],
)
def test_invalid_data_settings_are_one_line_errors(
    override: str, words: list[str], tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    run = load_run_config(None, run_arguments(tmp_path, small_corpus, small_tokenizer, override))
    with pytest.raises(ConfigError) as caught:
        check_data(run, world_size=2)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert all(word in line for word in words), line


def test_a_missing_corpus_is_reported_before_a_small_vocabulary(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    small, missing = "model.vocab_size=64", f"data.corpus={tmp_path}/nope"
    run = load_run_config(None, run_arguments(tmp_path, small_corpus, small_tokenizer, small))
    with pytest.raises(DataError, match=r"does not fit model\.vocab_size=64"):
        check_data(run, world_size=2)
    run = load_run_config(None, run_arguments(tmp_path, small_corpus, small_tokenizer, small, missing))
    with pytest.raises(DataError, match=r"nope/MANIFEST\.json: no such file"):
        check_data(run, world_size=2)


def test_skipped_ranges_of_a_resumed_run_are_checked_from_its_checkpoint_on(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    skip = "data.skip_samples=[[21, 27]]"  # after 15 samples: two whole batches of 3 after the second one
    run = load_run_config(None, run_arguments(tmp_path, small_corpus, small_tokenizer, skip))
    check_data(run, 2, is_new=False)
    with pytest.raises(ConfigError, match=r"skip=\[21, 27\)"):
        check_data(run, 2)


def test_tokens_are_counted_for_a_new_run_only(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    """The state of a continued run decides about its order; the doctor starts no run."""
    corpus = shutil.copytree(small_corpus, tmp_path / "corpus", ignore=shutil.ignore_patterns("*.token-counts"))
    run, beats = load_run_config(None, run_arguments(tmp_path / "run", corpus, small_tokenizer)), list[int]()
    assert not check_data(run, 1).counted
    assert not check_data(run, 1, is_new=False, beat=lambda: beats.append(1)).counted
    assert not list(corpus.glob(".*.token-counts")) and not beats
    data = check_data(run, 1, beat=lambda: beats.append(1))
    assert data.counted == data.documents.domains.keys()
    assert len(list(corpus.glob(".*.token-counts"))) == len(data.counted) <= len(beats)
