"""The planner's arithmetic: the figures of the ZeRO paper, its laws, and sizes with units."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.sizes import parse_size
from z2all_ds.plan import zero_states


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figures_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    """7.5 B parameters, 64 GPUs, mixed precision Adam (K = 12); its text rounds 31.41, 16.64 and 1.875."""
    assert round(zero_states(7_500_000_000, 64, stage).gpu / 1e9, 1) == gigabytes


def test_offload_moves_the_optimizer_to_the_host() -> None:
    states = zero_states(1000, 4, 2, offload_optimizer=True)
    assert (states.gpu, states.weights, states.host) == (2000, 2000, 16 * 250)
    assert zero_states(1000, 4, 3, offload_optimizer=True).gpu == 500
    assert zero_states(1000, 4, 1, offload_optimizer=True).gpu == 4000  # stage 1 holds all gradients


def test_fp32_accumulation_is_split_like_the_gradients() -> None:
    assert zero_states(1000, 4, 1, "bf16", "fp32").accumulation == 4000
    assert zero_states(1000, 4, 2, "bf16", "fp32").accumulation == 1000
    assert zero_states(1000, 4, 2, "fp32", "fp32").accumulation == 0


def test_fp32_keeps_a_master_copy_at_stages_1_and_2_only() -> None:
    assert [zero_states(1000, 4, stage, "fp32").master_weights for stage in range(4)] == [0, 1000, 1000, 0]


@given(st.integers(1, 10**12), st.integers(1, 4096), st.sampled_from(["bf16", "fp16"]), st.sampled_from([None, "bf16"]))
def test_a_higher_stage_never_needs_more(parameters: int, gpus: int, dtype: str, accumulation: str | None) -> None:
    totals = [zero_states(parameters, gpus, stage, dtype, accumulation).gpu for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == 16 * parameters
    # All shares together hold every state once, and round up by less than one parameter a GPU.
    assert 16 * parameters <= totals[3] * gpus < 16 * (parameters + gpus)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1, 0), "parameters = 0"),
        ((10, 0, 0), "GPUs = 0"),
        ((10, -4, 0), "GPUs = -4"),
        ((10, 1, 4), "stage 4"),
        ((10, 1, 1, "int8"), "'int8'"),
        ((10, 1, 1, "bf16", "fp8"), "'fp8'"),
        ((10, 1, 0, "bf16", "fp32"), "refuses"),
        ((10, 1, 0, "bf16", None, True), "offload"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: tuple[object, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        zero_states(*arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


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
def test_sizes(size: str | float, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize(
    "size", ["80G", "80 gigs", "GB", "", "0", "-1GB", "nan", "1e9", "9" * 400, "10000000TB", math.inf, math.nan, True]
)
def test_sizes_that_cannot_be_meant(size: str | float) -> None:
    with pytest.raises(ConfigError, match=r"memory size .*GiB"):
        parse_size(size)


@given(st.integers(1, 10**6), st.sampled_from(["KB", "MB", "GB", "TB"]))
def test_binary_units_are_larger(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") < parse_size(f"{number}{unit[0]}iB")
