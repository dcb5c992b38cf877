"""`z2all bench tokenizer` in a short real measurement; figures are only checked for plausibility."""

import json
from pathlib import Path

import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import to_json
from z2all_ds.bench.tokenizer import DEFAULT_TRAINERS, TRAINERS, bench_tokenizer, describe


def test_the_trainers_are_measured_on_the_same_text(small_corpus: Path) -> None:
    costs = bench_tokenizer([small_corpus], 300_000, 2500, names=list(TRAINERS))
    assert [one["trainer"] for one in costs["trainers"]] == ["bbpe", "hf_default", "spm"]
    assert 200_000 < costs["text_bytes"] < 330_000
    assert sum(costs["mix"].values()) == pytest.approx(1, abs=0.001)
    for one in costs["trainers"]:
        assert not one["failed"]
        assert 20_000_000 < one["peak_memory_bytes"] < 4_000_000_000
        assert one["encode_megabytes_per_second_per_core"] > 0
        assert one["bytes_per_token"].keys() == {"code", "en", "zh"}
        assert all(1 < value < 10 for value in one["bytes_per_token"].values())
    assert json.loads(to_json(costs))["trainers"][0]["trainer"] == "bbpe"
    assert sum("MB/s/core" in str(line) for line in describe(costs)) == 3


def test_a_failed_trainer_is_reported_with_the_reason_and_the_others_continue(small_corpus: Path) -> None:
    costs = bench_tokenizer([small_corpus], 60_000, 60_000, names=["spm", "hf_default"])
    spm, hf_default = costs["trainers"]
    assert spm["failed"].startswith("DataError: vocabulary size 60000: ") and not hf_default["failed"]
    assert f"spm: failed, {spm['failed']}" in describe(costs)


@pytest.mark.processes
def test_the_built_in_text_is_the_default_and_invalid_settings_are_refused() -> None:
    costs = bench_tokenizer([], 150_000, 400, names=["bbpe"])
    assert costs["mix"].keys() == {"code", "en", "zh"}
    with pytest.raises(ConfigError, match="trainer 'x'"):
        bench_tokenizer([], 1, 400, names=["x"])
    with pytest.raises(ConfigError, match="bytes=0: must be at least 1"):
        bench_tokenizer([], 0, 400, names=DEFAULT_TRAINERS)
