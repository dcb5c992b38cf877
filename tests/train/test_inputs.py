"""Checks of a run's inputs before any rank starts; each error is one line."""

from pathlib import Path

import pytest

from tests.helpers.training import run_arguments
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.data.run_spec import stream_spec
from z2all_ds.train.inputs import check_data


def test_the_settings_of_every_stage_reach_the_data_stream(tmp_path: Path) -> None:
    stages = "stages=[{name: a, steps: 5, weights: {en: 2}}, {name: b, sequence_length: 64, global_batch: 4}]"
    choices = ("data.packing=best_fit", "data.skip_samples=[[8, 16]]", "data.temperature=2", "train.seed=9")
    run = load_run_config(None, run_arguments(tmp_path, tmp_path / "corpus", tmp_path, stages, *choices))
    spec = stream_spec(run)
    assert (spec.corpus_dir, spec.seed, spec.num_lanes) == (tmp_path / "corpus", 9, 64)
    assert (spec.packing, spec.skip) == ("best_fit", ((8, 16),))
    first, second = spec.stages
    assert (first.name, first.sequence_length, first.samples, first.weights) == ("a", 32, 40, {"en": 2.0})
    assert (second.name, second.sequence_length, second.samples, second.weights) == ("b", 64, 28, None)
    assert second.temperature == 2.0


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
