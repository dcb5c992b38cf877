"""Parsing of sizes and counts with units."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.sizes import MOST, parse_count, parse_size


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        (80, 80 * 10**9),
        (1.5, 1_500_000_000),
        ("80", 80 * 10**9),
        (" 81559 MiB ", 81559 * 2**20),
        ("0.5tb", 5 * 10**11),
        ("512B", 512),
    ],
)
def test_sizes_with_and_without_units(size: str | float, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize(
    "size", ["80G", "80 gigs", "GB", "", "0", "-1GB", "nan", "1e9", "9" * 400, "10000000TB", math.inf, math.nan, True]
)
def test_invalid_sizes_are_refused(size: str | float) -> None:
    with pytest.raises(ConfigError, match=r"memory size .*GiB"):
        parse_size(size)


@given(st.integers(1, 10**6), st.sampled_from(["KB", "MB", "GB", "TB"]))
def test_binary_units_are_larger(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") < parse_size(f"{number}{unit[0]}iB")


@given(st.integers(1, MOST))
def test_a_count_without_a_unit_is_read_as_it_is(count: int) -> None:
    assert parse_count(str(count), "--tokens") == parse_count(f"{count:,}", "--tokens") == count
    assert parse_count(f" {count:_} ", "--tokens") == count


@given(st.integers(1, 999_999), st.sampled_from([("K", 3), ("M", 6), ("B", 9), ("T", 12)]))
def test_a_count_with_a_unit_letter_is_exact(thousandths: int, unit: tuple[str, int]) -> None:
    letter, power = unit
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}"
    expected = thousandths * 10 ** (power - 3)  # exact, since no float is involved
    assert parse_count(f"{text}{letter}", "--tokens") == parse_count(f"{text} {letter.lower()}", "--tokens") == expected


@given(st.text(max_size=12))
def test_any_text_is_a_valid_count_or_a_one_line_error(text: str) -> None:
    refusal = None
    try:
        count = parse_count(text, "--tokens")
    except ConfigError as error:
        count, refusal = 0, str(error)
    if refusal is None:
        assert 1 <= count <= MOST
    else:
        assert len(refusal.splitlines()) == 1 and refusal.startswith("--tokens ")


@pytest.mark.parametrize(
    "text", ["", "0", "0.1", "-5", "none", "1,5B", "1,2,3", "1__000", "2 G", "1e9", "9" * 500, "2000000T"]
)
def test_invalid_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a positive number up to 10"):
        parse_count(text, "--tokens")
