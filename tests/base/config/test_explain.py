"""Help for the settings: the config with comments, and options that are really settings."""

from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from z2all_ds.base.config import RunConfig, dump_yaml, load_run_config
from z2all_ds.base.config.explain import explained_yaml, refuse_option
from z2all_ds.base.config.section_errors import dotted_settings
from z2all_ds.base.config.sections import StageSection
from z2all_ds.base.errors import ConfigError

STAGES = "stages=[{name: a, steps: 5, weights: {中文: 1}}, {name: b}]"


def all_fields(section: type[BaseModel]) -> list[str]:
    """Return the help texts of all settings, those of stages included; fail where one is missing."""
    texts = []
    for name, field in section.model_fields.items():
        assert field.description, name
        inner: Any = field.annotation
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        texts += all_fields(inner) if is_section else [" ".join(field.description.split())]
    return texts


@pytest.mark.parametrize(
    "overrides", [[], ["preset=z2all_tiny", STAGES], ['run_dir="a\\nb"', "track.project='# 中文: x'"]]
)
def test_the_explained_config_is_the_config_with_the_help_of_every_setting(overrides: list[str]) -> None:
    run = load_run_config(None, overrides)
    text = explained_yaml(run)
    assert yaml.safe_load(text) == yaml.safe_load(dump_yaml(run))
    assert max(map(len, text.splitlines())) <= 110 or STAGES in overrides
    said = " ".join(line.strip().removeprefix("#").strip() for line in text.splitlines())
    missing = [one for one in all_fields(RunConfig) + all_fields(StageSection) if one not in said]
    assert missing == []


def test_the_explanation_names_choices_limits_and_defaults() -> None:
    text = explained_yaml(load_run_config("z2all_tiny"))
    assert "  # Number of optimizer steps in the whole run. Must be > 0. Default: 1000.\n  steps: 300\n" in text
    assert "One of auto, fp32, bf16. Default: auto.\n  precision: auto\n" in text
    assert "Must be >= 0 and < 1. Default: 0.0.\n  attention_dropout: 0.0\n" in text
    assert "#   name: Name shown in the log. Required.\n" in text


@pytest.mark.parametrize(
    ("option", "arguments", "fix"),
    [
        ("--steps", ["--steps", "5"], "Write train.steps=5."),
        ("--steps", ["a=b", "--steps=5", "c=d"], "Write train.steps=5."),
        ("--train.steps", ["--train.steps", "5"], "Write train.steps=5."),
        ("--sequence-length", ["--sequence-length"], "Write train.sequence_length=VALUE."),
        ("--weights", ["--weights", "a=1"], "Write data.weights.a=1."),
        ("--weights", ["--weights", "{a: 1}"], "Write 'data.weights={a: 1}'."),
        ("--lr", ["--lr", "3e-4", "--x"], "Write optimizer.lr=3e-4."),
        ("--run-dir", ["--run-dir", "my runs"], "Write 'run_dir=my runs'."),
        ("--kind", ["--kind", "lion"], "Write optimizer.kind=lion or schedule.kind=lion."),
    ],
)
def test_an_option_that_is_a_setting_is_answered_with_the_override(option: str, arguments: list[str], fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_option(option, arguments)
    assert str(caught.value) == f"{option}: is a setting, not an option. {fix}"


def test_a_dry_run_is_not_answered_with_the_setting_of_that_name() -> None:
    """It is true by default: whoever wrote it as advised would train."""
    with pytest.raises(ConfigError) as caught:
        refuse_option("--dry-run", ["--dry-run"])
    advice = "Use `z2all plan`, or `z2all launch --hostfile H --dry-run -- ...`; neither trains."
    assert str(caught.value) == f"--dry-run: is not an option here. {advice}"


def test_other_options_are_left_to_the_caller() -> None:
    refuse_option("--no-such-thing", ["--no-such-thing", "5"])


TYPOS = (
    ("stepss=5", "train.steps"),
    ("train.lrr=1", "optimizer.lr"),
    ("kindd=1", "optimizer.kind or schedule.kind"),
    ("trian.steps=5", "train"),
    ("rundir=x", "run_dir"),
)


def test_a_setting_without_its_section_is_found() -> None:
    assert {"run_dir", "train.steps", "stages"} <= set(dotted_settings(RunConfig))
    for override, meant in (("steps=5", "train.steps"), ("train.lr=1", "optimizer.lr"), *TYPOS):
        with pytest.raises(ConfigError, match=rf"no such setting\. Did you mean {meant}\?"):
            load_run_config(None, [override])
