"""`z2all bench shapes`: exact tests of candidates and advice, and measurements of tiny sizes."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.command import one_line, z2all
from tests.helpers.training import MICRO_OVERRIDES
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.reports import print_lines, to_json
from z2all_ds.bench.shapes import (
    MULTIPLES,
    NEAR,
    advise,
    describe,
    feed_forward_candidates,
    measure_shapes,
    vocabulary_candidates,
)

CPU = torch.device("cpu")
RUN = load_run_config(None, list(MICRO_OVERRIDES))


def test_feed_forward_candidates_around_eight_thirds_of_a_hidden_size() -> None:
    assert feed_forward_candidates(5461) == [5120, 5376, 5440, 5456, 5461, 5464, 5472, 5504, 5632]


def test_a_requested_size_that_is_a_large_multiple_also_has_neighbours() -> None:
    found = feed_forward_candidates(5632)
    assert found[0] == 5120 and found[-1] == 6144
    assert 5632 in found and len(found) == 15


def test_vocabulary_candidates_include_the_request_plus_one() -> None:
    assert vocabulary_candidates(64320) == [64320, 64321, 64328, 64336, 64352, 64384, 64512]
    assert vocabulary_candidates(64321) == [64321, 64322, 64328, 64336, 64352, 64384, 64512]


@given(st.integers(1, 300_000))
def test_candidates_are_near_the_requested_size_and_cover_every_multiple(wish: int) -> None:
    vocabularies, sizes = vocabulary_candidates(wish), feed_forward_candidates(wish)
    assert vocabularies[0] == wish and wish in sizes
    for found in (vocabularies, sizes):
        assert found == sorted(set(found))
        assert all(size > 0 and abs(size - wish) <= NEAR * wish for size in found)
    if wish >= 4 * max(MULTIPLES):  # from this size on, every multiple is near enough
        for step in MULTIPLES:
            assert any(size % step == 0 for size in vocabularies)
            assert any(size % step == 0 and size < wish for size in sizes)
            assert any(size % step == 0 and size > wish for size in sizes)


def test_the_feed_forward_size_is_chosen_by_time_per_parameter() -> None:
    advice = advise("model.intermediate_size", 100, {96: 9.6, 100: 20.0, 128: 12.8 * 0.8})
    assert [one["cost"] for one in advice["candidates"]] == pytest.approx([0.1 / 0.08, 0.2 / 0.08, 1.0])
    assert advice["recommended"] == 128
    assert advice["reason"] == "least time per parameter, 60.0% less per parameter than 100"


def test_the_requested_size_is_kept_if_it_is_as_good() -> None:
    advice = advise("model.intermediate_size", 100, {96: 9.6, 100: 10.05, 104: 10.5})
    assert advice["recommended"] == 100
    assert advice["reason"] == (
        "nearest to 100 of those within 1% of the least time per parameter, which is the requested size"
    )


def test_the_vocabulary_size_is_chosen_by_total_time() -> None:
    """A size of 128 takes the least time per column, but its extra columns would only be padding."""
    advice = advise("model.vocab_size", 101, {101: 20.0, 102: 19.0, 104: 10.05, 112: 10.0, 128: 11.0})
    assert advice["recommended"] == 104
    assert advice["reason"] == "smallest of those within 1% of the least time, 49.7% less in total than 101"
    assert [one["cost"] for one in advice["candidates"]] == pytest.approx([2.0, 1.9, 1.005, 1.0, 1.1])
    assert advice["candidates"][0]["milliseconds"] == 20_000


def test_tiny_sizes_are_measured_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = measure_shapes(RUN, CPU, 24, None, 97, rounds=1)
    assert (shapes["tokens"], shapes["hidden_size"]) == (64, 24)
    assert (shapes["feed_forward"]["wished"], shapes["vocabulary"]["wished"]) == (64, 97)
    assert [one["size"] for one in shapes["feed_forward"]["candidates"]] == [48, 56, 64, 72, 80]
    assert [one["size"] for one in shapes["vocabulary"]["candidates"]] == [97, 98, 104, 112]
    assert json.loads(to_json(shapes)) == shapes
    print_lines(describe(shapes))
    lines = capsys.readouterr().out.splitlines()
    for advice in (shapes["feed_forward"], shapes["vocabulary"]):
        assert advice["recommended"] in [one["size"] for one in advice["candidates"]]
        assert f"{advice['setting']}={advice['recommended']}: {advice['reason']}" in lines
    assert sum("requested" in line.replace(",", "").split()[-2:] for line in lines if line[:1].isdigit()) == 2


def test_the_command_takes_sizes_from_the_config(tmp_path: Path) -> None:
    answer = z2all("bench", "shapes", "--rounds", "1", "--json", "--ffn", "88", *MICRO_OVERRIDES, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert (found["hidden_size"], found["feed_forward"]["wished"], found["vocabulary"]["wished"]) == (32, 88, 1024)


def test_sizes_below_one_are_refused(tmp_path: Path) -> None:
    line = one_line(z2all("bench", "shapes", "--ffn", "-3", cwd=tmp_path), 2)
    assert line == "ConfigError: ffn=-3: must be at least 1. Give more."
    for option, sizes in {"hidden": (0, None, None), "vocab": (None, None, 0)}.items():
        with pytest.raises(ConfigError, match=f"^{option}=0: must be at least 1"):
            measure_shapes(RUN, CPU, *sizes, rounds=1)


def test_too_large_sizes_and_zero_rounds_are_refused_before_measuring() -> None:
    with pytest.raises(MachineError, match="needs"):
        measure_shapes(RUN, CPU, None, None, 10**12, rounds=1)
    with pytest.raises(ConfigError, match="rounds=0"):
        measure_shapes(RUN, CPU, None, None, None, rounds=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_sizes_are_measured_on_a_gpu() -> None:
    shapes = measure_shapes(RUN, torch.device("cuda", 0), 512, None, 4097, rounds=1)
    assert shapes["dtype"] == "bfloat16" and shapes["measured_on"]["cuda"]
    assert shapes["vocabulary"]["candidates"][0]["size"] == 4097
    candidates = shapes["feed_forward"]["candidates"] + shapes["vocabulary"]["candidates"]
    assert all(one["milliseconds"] > 0 for one in candidates)
