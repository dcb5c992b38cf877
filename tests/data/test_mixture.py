"""Tests for mixtures: token shares hold from the first batch on and in every lane; invalid weights are refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpus_maker import open_stream, write_corpus
from z2all_ds.base.errors import ConfigError
from z2all_ds.data.mixture import Mixture, resolve_shares

SIZES = {"web": 8000, "books": 1000, "code": 1000}


def test_default_shares_are_proportional_to_size() -> None:
    assert resolve_shares(None, 1.0, SIZES) == {"books": 0.1, "code": 0.1, "web": 0.8}


def test_temperature_raises_the_shares_of_small_domains() -> None:
    assert resolve_shares(None, 3.0, SIZES) == {"books": 0.25, "code": 0.25, "web": 0.5}
    assert resolve_shares(None, float("inf"), SIZES) == {"books": 0.333333334, "code": 0.333333333, "web": 0.333333333}


def test_weights_select_domains_and_are_normalized() -> None:
    assert resolve_shares({"web": 6, "code": 2}, 1.0, SIZES) == {"code": 0.25, "web": 0.75}


@given(weights=st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=12))
def test_shares_sum_to_one_and_none_is_zero(weights: list[float]) -> None:
    named = {f"d{n}": weight for n, weight in enumerate(weights)}
    units = [round(share * 10**9) for share in resolve_shares(named, 1.0, dict.fromkeys(named, 1)).values()]
    assert sum(units) == 10**9
    assert min(units) >= 1


@pytest.mark.parametrize(
    ("weights", "temperature", "words"),
    [
        ({"wbe": 1.0}, 1.0, ["'wbe'", "books, code, web"]),
        ({"web": 0.0}, 1.0, ["web=0.0", "above 0"]),
        ({"web": float("nan")}, 1.0, ["web=nan"]),
        ({"web": -1.0}, 1.0, ["web=-1.0"]),
        ({}, 1.0, ["at least one"]),
        ({"web": 1.0}, 2.0, ["temperature=2.0", "not both"]),
        (None, 0.0, ["temperature=0.0"]),
    ],
)
def test_invalid_weights_and_temperatures_are_refused(
    weights: dict | None, temperature: float, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_shares(weights, temperature, SIZES)
    assert all(word in str(caught.value) for word in words), caught.value


mixtures = st.builds(
    lambda weights, lanes, seed, first: Mixture(
        tuple(resolve_shares({f"d{n}": w for n, w in enumerate(weights)}, 1.0, dict.fromkeys(
            [f"d{n}" for n in range(len(weights))], 1)).values()), lanes, seed, first),
    st.lists(st.floats(0.001, 1), min_size=1, max_size=8),
    st.sampled_from([1, 2, 3, 8, 12, 48, 55, 64, 89, 96, 144, 233, 256, 384, 1000]),
    st.integers(0, 10**6),
    st.integers(0, 10**9),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(mixture=mixtures)
def test_shares_of_a_million_tokens_are_within_half_a_percent(mixture: Mixture) -> None:
    """The first 488 samples of a stage (2048 tokens each) are within 0.5 % of the shares, and so are longer runs."""
    numbers = [mixture.domain_of(mixture.first_sample + k) for k in range(20_000)]
    for count in (488, 489, 1000, 5000, 20_000):
        counts = np.bincount(numbers[:count], minlength=len(mixture.shares))
        assert np.abs(counts / count - np.array(mixture.shares)).max() < 0.005


@settings(max_examples=60, deadline=None)
@given(mixture=mixtures, data=st.data())
def test_shares_hold_in_every_lane(mixture: Mixture, data: st.DataObject) -> None:
    """A lane that rarely draws a domain would leave its documents of that domain unread."""
    lane = data.draw(st.integers(0, mixture.num_lanes - 1))
    first = mixture.first_sample + lane
    numbers = [mixture.domain_of(first + turn * mixture.num_lanes) for turn in range(400)]
    counts = np.bincount(numbers, minlength=len(mixture.shares))
    assert np.abs(counts - 400 * np.array(mixture.shares)).max() < 6


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_domain_without_a_share_is_never_drawn(place: int) -> None:
    shares = [0.5, 0.5]
    shares.insert(place, 0.0)
    mixture = Mixture(tuple(shares), 12, 1)
    counts = np.bincount([mixture.domain_of(k) for k in range(100_000)], minlength=3)
    assert counts[place] == 0
    assert abs(counts[(place + 1) % 3] - 50_000) < 5


def test_the_drawn_domains_are_those_of_earlier_versions() -> None:
    """A change of this sequence changes the data of existing runs."""
    mixture = Mixture((0.2, 0.3, 0.5), 64, 7, 1000)
    assert "".join(str(mixture.domain_of(k)) for k in range(1000, 1040)) == GOLDEN


GOLDEN = "0212122021210212102021220212102121220212"


def test_a_stream_keeps_the_shares_over_a_million_tokens(tmp_path: Path) -> None:
    """Shares are within 0.5 %, with documents of very different lengths and higher weights for small domains."""
    corpus = write_corpus(tmp_path, {"books": [900] * 20, "code": [150, 40] * 30, "web": [30, 60, 10] * 40}, 100)
    stream = open_stream(corpus, sequence_length=2048, num_lanes=4, weights={"books": 5, "code": 3, "web": 2})
    samples = iter(stream)
    tokens = np.zeros(3)
    for _ in range(1_000_000 // 2048 + 1):
        tokens += np.bincount(next(samples)["domain_ids"].numpy(), minlength=3)
    assert tokens.sum() >= 1_000_000
    np.testing.assert_allclose(tokens / tokens.sum(), [0.5, 0.3, 0.2], atol=0.005)


def test_the_first_batch_already_has_the_shares(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, {"rare": [100] * 10, "web": [100] * 90}, 1000)
    samples = iter(open_stream(corpus, sequence_length=50, num_lanes=100))
    first = [int(next(samples)["domain_ids"][0]) for _ in range(100)]
    assert 8 <= first.count(0) <= 12, first.count(0)
