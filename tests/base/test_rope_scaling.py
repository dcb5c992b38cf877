"""The rope scaling types and their fields, as checked for run configs and Hugging Face configs."""

from typing import Any

import pytest
import yaml

from z2all_ds.base.config import RunConfig, dump_yaml, load_run_config, merge_nested
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.rope_scaling import check_rope_fields, check_rope_scaling, with_rope_type

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GOOD: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2},
    {"rope_type": "dynamic", "factor": 1.0},
    YARN,
    {**YARN, "attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1, "truncate": False},
    {**YARN, "mscale": 0.7, "mscale_all_dim": None},
    LLAMA3,
]


@pytest.mark.parametrize("scaling", GOOD)
def test_valid_scaling_is_returned_unchanged(scaling: dict[str, Any]) -> None:
    assert check_rope_scaling(scaling, "here") == scaling


def test_the_older_key_type_becomes_rope_type() -> None:
    old = {"type": "linear", "factor": 2.0}
    assert check_rope_scaling(old, "here") == {"rope_type": "linear", "factor": 2.0}
    assert old == {"type": "linear", "factor": 2.0}
    assert with_rope_type({"type": "linear", "rope_type": "yarn"}) == {"rope_type": "yarn"}


@pytest.mark.parametrize(
    ("scaling", "line"),
    [
        ({"factor": 2}, "here: has no rope_type. Use one of linear, dynamic, yarn, llama3."),
        (
            {"rope_type": "ntk"},
            "here.rope_type=ntk: unknown scaling type. Use one of linear, dynamic, yarn, llama3.",
        ),
        ({"rope_type": ["yarn"]}, "here.rope_type=['yarn']: unknown scaling type"),
        ({"rope_type": "linear"}, "here: linear scaling needs factor. Set here.factor=..."),
        ({"rope_type": "yarn", "factor": 2}, "here: yarn scaling needs original_max_position_embeddings."),
        ({"rope_type": "linear", "facter": 2}, "here.facter: linear scaling has no such field. Did you mean factor?"),
        (
            {"rope_type": "linear", "factor": 2, "beta_fast": 3},
            "here.beta_fast: linear scaling has no such field. Known fields: factor.",
        ),
        ({"rope_type": "linear", "factor": "2"}, "here.factor='2': must be a number."),
        ({"rope_type": "linear", "factor": True}, "here.factor=True: must be a number."),
        ({"rope_type": "linear", "factor": float("nan")}, "here.factor=nan: must be a number."),
        ({"rope_type": "dynamic", "factor": 0.5}, "here.factor=0.5: must be at least 1."),
        ({**YARN, "original_max_position_embeddings": 0}, "here.original_max_position_embeddings=0: is a number of"),
        (
            {**YARN, "original_max_position_embeddings": 2.5},
            "here.original_max_position_embeddings=2.5: is a number of",
        ),
        ({**YARN, "truncate": 1}, "here.truncate=1: must be true or false."),
        ({**LLAMA3, "high_freq_factor": 1.0}, "here: low_freq_factor=1.0, high_freq_factor=1.0: both must be above 0"),
    ],
)
def test_invalid_scaling_is_refused_with_one_line(scaling: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rope_scaling(scaling, "here")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_check_rope_fields_ignores_unknown_fields() -> None:
    """A Hugging Face config may contain fields that transformers ignores."""
    check_rope_fields("linear", {"factor": 2.0, "finetuned": True, "original_max_position_embeddings": "?"}, "here")


def test_a_run_config_with_rope_scaling_survives_a_round_trip_through_yaml() -> None:
    run = load_run_config(None, ["model.rope_scaling={type: linear, factor: 4}"])
    assert run.model.rope_scaling == {"rope_type": "linear", "factor": 4}
    assert RunConfig.model_validate(yaml.safe_load(dump_yaml(run))) == run
    with pytest.raises(ConfigError, match=r"^model\.rope_scaling\.factor=0\.5: must be at least 1\."):
        load_run_config(None, ["model.rope_scaling={rope_type: dynamic, factor: 0.5}"])
    with pytest.raises(ConfigError, match=r"^model\.rope_scaling='yarn': Input should be a valid dictionary\."):
        load_run_config(None, ["model.rope_scaling=yarn"])


def test_a_later_config_layer_replaces_rope_scaling_completely() -> None:
    linear = {"rope_type": "linear", "factor": 2}
    merged = merge_nested({"model": {"rope_scaling": YARN, "hidden_size": 8}}, {"model": {"rope_scaling": linear}})
    assert merged == {"model": {"rope_scaling": linear, "hidden_size": 8}}
