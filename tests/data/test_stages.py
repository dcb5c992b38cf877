"""Tests for the schedule: the stage of each sample, skipped samples, and invalid settings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base.errors import ConfigError
from z2all_ds.data.stages import Schedule, StageSpec, merged_ranges

SIZES = {"code": 300, "web": 700}


def schedule(*stages: StageSpec, skip: list[tuple[int, int]] | None = None) -> Schedule:
    return Schedule(stages or (StageSpec(8),), skip or [], SIZES, 4, 1)


ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=5
)


@settings(max_examples=100, deadline=None)
@given(skip=ranges)
def test_used_and_skipped_samples_match_a_full_enumeration(skip: list[tuple[int, int]]) -> None:
    made = schedule(skip=skip)
    given_out = [k for k in range(200) if not any(first <= k < end for first, end in skip)]
    assert [k for k in range(200) if not made.is_skipped(k)] == given_out
    for count, sample in enumerate(given_out):
        assert made.used_before(sample) == count
        assert made.sample_after(count) == sample


@settings(max_examples=60, deadline=None)
@given(skip=ranges, lengths=st.lists(st.integers(1, 30), max_size=3))
def test_a_stage_lasts_for_its_number_of_used_samples(skip: list[tuple[int, int]], lengths: list[int]) -> None:
    specs = [StageSpec(8 + n, samples=samples, name=f"s{n}") for n, samples in enumerate(lengths)]
    made = schedule(*specs, StageSpec(99, name="last"), skip=skip)
    names = [made.stage_of(k).name for k in range(300) if not made.is_skipped(k)]
    expected = [f"s{n}" for n, samples in enumerate(lengths) for _ in range(samples)]
    assert names == expected + ["last"] * (len(names) - len(expected))


def test_domains_are_those_of_all_stages() -> None:
    made = schedule(StageSpec(8, {"web": 1}, samples=10), StageSpec(16, {"code": 1, "web": 3}))
    assert made.domain_names == ["code", "web"]
    first, second = made.stages
    assert (first.mixture.shares, second.mixture.shares) == ((0.0, 1.0), (0.25, 0.75))
    assert (first.name, second.name, second.mixture.first_sample) == ("0", "1", 10)
    assert schedule(StageSpec(8, {"web": 1})).domain_names == ["web"]


def test_the_length_in_use_after_some_tokens_of_a_domain() -> None:
    made = schedule(
        StageSpec(8, {"web": 1}, samples=10), StageSpec(16, {"code": 1, "web": 3}, samples=4), StageSpec(32)
    )
    assert [made.length_after("web", tokens) for tokens in (0, 79, 80, 127, 128, 10**9)] == [8, 8, 16, 16, 32, 32]
    assert [made.length_after("code", tokens) for tokens in (0, 15, 16)] == [16, 16, 32]


def test_adjacent_and_overlapping_ranges_are_merged() -> None:
    assert merged_ranges([(30, 40), (0, 5), (5, 7), (35, 50)]) == [(0, 7), (30, 50)]


@pytest.mark.parametrize(
    ("stages", "skip", "words"),
    [
        ([], [], ["stages=[]"]),
        ([StageSpec(0)], [], ["sequence_length=0", "'0'"]),
        ([StageSpec(8, name="long"), StageSpec(8)], [], ["samples=None of stage 'long'"]),
        ([StageSpec(8, samples=0), StageSpec(8)], [], ["samples=0"]),
        ([StageSpec(8, {"wbe": 1})], [], ["'wbe'", "code, web"]),
        ([StageSpec(8)], [(4, 4)], ["skip=[4, 4)"]),
        ([StageSpec(8)], [(-1, 4)], ["skip=[-1, 4)"]),
    ],
)
def test_invalid_stages_and_skips_are_refused(
    stages: list[StageSpec], skip: list[tuple[int, int]], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Schedule(stages, skip, SIZES, 4, 1)
    assert all(word in str(caught.value) for word in words), caught.value


def test_stage_and_skip_borders_must_be_multiples_of_the_world_size() -> None:
    schedule(skip=[(8, 16)]).check_world_size(4)
    with pytest.raises(ConfigError, match=r"skip=\[6, 16\): .* the 4 ranks\. Skip \[4, 16\)"):
        schedule(skip=[(6, 16)]).check_world_size(4)
    with pytest.raises(ConfigError, match=r"stage '1' after 10 samples: .* the 4 ranks"):
        schedule(StageSpec(8, samples=10), StageSpec(8)).check_world_size(4)
    schedule(StageSpec(8, samples=10), StageSpec(8), skip=[(0, 3), (21, 29)]).check_world_size(4, begin=17)
    with pytest.raises(ConfigError, match=r"4 ranks, counted from sample 18 where the run continues.*Skip \[18, 30\)"):
        schedule(skip=[(21, 29)]).check_world_size(4, begin=18)
    with pytest.raises(ConfigError, match="counted from sample 7 where"):
        schedule(StageSpec(8, samples=10), StageSpec(8)).check_world_size(4, begin=7)
