"""Stages of a run: the settings at each step, and invalid stages."""

from dataclasses import asdict
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.stages import RunStage, progress, run_stages, samples_seen, stage_at, tokens_seen
from z2all_ds.base.errors import ConfigError

BASE = ("train.steps=100", "train.sequence_length=64", "train.global_batch=32", "train.micro_batch=4")


def stages_of(stages: list[dict[str, Any]], *overrides: str) -> list[RunStage]:
    text = yaml.safe_dump(stages, default_flow_style=True, allow_unicode=True)
    return run_stages(load_run_config(None, [*BASE, *overrides, f"stages={text}"]))


def test_a_run_without_stages_is_one_stage() -> None:
    weights = "data.weights={code: 2}"
    (stage,) = run_stages(load_run_config(None, [*BASE, weights, "data.temperature=3", "model.rope_theta=5e5"]))
    assert asdict(stage) == {
        "name": "train",
        "first_step": 0,
        "end_step": 100,
        "sequence_length": 64,
        "global_batch": 32,
        "micro_batch": 4,
        "rope_theta": 5e5,
        "weights": {"code": 2.0},
        "temperature": 3.0,
        "anneal": None,
    }
    assert (stage.samples, stage.tokens_per_step) == (3200, 2048)


def test_a_stage_takes_omitted_settings_from_the_stage_before() -> None:
    first, second, third = stages_of(
        [
            {"name": "a", "steps": 60, "weights": {"en": 1.0}},
            {"name": "b", "steps": 30, "sequence_length": 128, "global_batch": 16, "rope_theta": 1e6},
            {"name": "c", "temperature": 2.0, "anneal": "linear"},
        ],
        "data.weights={code: 1, en: 3}",
        "data.temperature=5",
        "schedule.warmup_steps=90",
    )
    assert [(s.name, s.first_step, s.end_step) for s in (first, second, third)] == [
        ("a", 0, 60),
        ("b", 60, 90),
        ("c", 90, 100),
    ]
    assert (first.sequence_length, first.global_batch, first.micro_batch, first.rope_theta) == (64, 32, 4, 10000.0)
    assert (second.sequence_length, second.global_batch, second.micro_batch, second.rope_theta) == (128, 16, 2, 1e6)
    assert (third.sequence_length, third.global_batch, third.micro_batch, third.rope_theta) == (128, 16, 2, 1e6)
    assert (first.weights, second.weights) == ({"en": 1.0}, {"en": 1.0})
    # a stage that sets weights or a temperature inherits neither
    assert (first.temperature, third.weights, third.temperature) == (1.0, None, 2.0)
    assert (first.anneal, second.anneal, third.anneal) == (None, None, "linear")


def test_batch_warmup_adds_a_stage_for_each_batch_size() -> None:
    warmup = ("train.batch_warmup_from=8", "train.batch_warmup_steps=21")
    stages = stages_of([{"name": "a", "steps": 50}, {"name": "b"}], *warmup)
    assert [(stage.name, stage.first_step, stage.end_step, stage.global_batch) for stage in stages] == [
        ("a, batch 8", 0, 10, 8),
        ("a, batch 16", 10, 21, 16),
        ("a", 21, 50, 32),
        ("b", 50, 100, 32),
    ]
    assert {stage.micro_batch for stage in stages} == {4}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("train.batch_warmup_from=12", "train.batch_warmup_steps=9"), "batch_warmup_from=12: .* one of 16, 8, 4"),
        (("train.batch_warmup_from=2", "train.batch_warmup_steps=9"), "of micro_batch=4. Set it to one of 16"),
        (("train.batch_warmup_from=32", "train.batch_warmup_steps=9"), "batch_warmup_from=32: .* one of 16, 8, 4"),
        (("train.batch_warmup_from=4", "train.batch_warmup_steps=2"), "batch_warmup_steps=2: must be at least 3 "),
        (("train.batch_warmup_from=4", "train.batch_warmup_steps=100"), "less than the stage's 100 steps"),
        (("train.batch_warmup_from=4",), "must be given together"),
        (("train.batch_warmup_steps=4",), "must be given together"),
    ],
)
def test_an_invalid_batch_warmup_is_refused(overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        run_stages(load_run_config(None, [*BASE, *overrides]))


def test_the_last_stage_may_state_its_steps() -> None:
    assert stages_of([{"name": "a", "steps": 60}, {"name": "b", "steps": 40}])[1].end_step == 100


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        (
            [{"name": "a"}, {"name": "b"}],
            "stage 'a' without steps: every stage except the last needs a number of steps. Set it, e.g. steps: 1000.",
        ),
        (
            [{"name": "a", "steps": 100}, {"name": "b"}],
            "stage 'b': the earlier stages use 100 of train.steps=100. Raise train.steps or shorten a stage.",
        ),
        (
            [{"name": "a", "steps": 60}, {"name": "b", "steps": 50}, {"name": "c"}],
            "stage 'b' of 50 steps: the earlier stages use 60 of train.steps=100."
            " Raise train.steps or shorten a stage.",
        ),
        (
            [{"name": "a", "steps": 60}, {"name": "b", "steps": 30}],
            "steps=30 of the last stage: the stages add up to 90 steps, but train.steps=100."
            " Omit it, or make them equal.",
        ),
        (
            [{"name": "a", "steps": 60}, {"name": "b", "steps": 50}],
            "steps=50 of the last stage: the stages add up to 110 steps, but train.steps=100."
            " Omit it, or make them equal.",
        ),
        (
            [{"name": "a", "global_batch": 20}],
            "global_batch=20 of stage 'a': micro_batch=4 cannot be scaled in proportion from global_batch=32."
            " Choose it so that 4 x global_batch / 32 is a whole number.",
        ),
    ],
)
def test_invalid_stages_are_refused_with_one_line(stages: list[dict[str, Any]], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stages_of(stages)
    assert str(caught.value) == line


LONGER = [{"name": "a", "steps": 60}, {"name": "b", "sequence_length": 128, "anneal": "cosine"}]
"""A run of 60 x 2048 + 40 x 4096 = 286720 tokens."""
BY_TOKENS = ("schedule.by=tokens", "schedule.kind=wsd")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("schedule.kind=wsd", "schedule.warmup_steps=51", "schedule.decay_steps=50"),
            "schedule.warmup_steps=51 and schedule.decay_steps=50: together they exceed the run of 100 steps."
            " Shorten one of them, or raise train.steps.",
        ),
        (
            (*BY_TOKENS, "schedule.warmup_tokens=2048", "schedule.decay_tokens=284673"),
            "schedule.warmup_tokens=2048 and schedule.decay_tokens=284673: together they exceed the run of"
            " 286720 tokens. Shorten one of them, or raise train.steps.",
        ),
        (
            ("schedule.warmup_steps=61",),
            "anneal of stage 'b': it starts after 60 steps, during the warm-up."
            " Start it later, or lower schedule.warmup_steps=61.",
        ),
        (
            (*BY_TOKENS, "schedule.warmup_tokens=122881", "schedule.decay_tokens=1"),
            "anneal of stage 'b': it starts after 122880 tokens, during the warm-up."
            " Start it later, or lower schedule.warmup_tokens=122881.",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused_with_one_line(overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stages_of(LONGER, *overrides)
    assert str(caught.value) == line


def test_a_schedule_that_just_fits_the_run_is_accepted() -> None:
    stages_of(LONGER, "schedule.kind=wsd", "schedule.warmup_steps=50", "schedule.decay_steps=50")
    stages = stages_of(LONGER, *BY_TOKENS, "schedule.warmup_tokens=122880", "schedule.decay_tokens=163840")
    assert [progress(stages, "tokens", steps) for steps in (0, 1, 60, 61, 100)] == [0, 2048, 122880, 126976, 286720]
    assert progress(stages, "steps", 61) == 61
    # Without a decay, a warm-up may be longer than the run, as in a short trial of a long run's settings.
    assert len(stages_of([{"name": "a"}], "schedule.warmup_steps=2000")) == 1


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(2, 2048), st.integers(1, 8)), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(0, 120))
def test_every_step_belongs_to_one_stage_and_counts_add_up(lengths: list[tuple[int, int, int]], done: int) -> None:
    """Each stage is given as (steps, sequence length, global batch / 8)."""
    total = sum(steps for steps, *_ in lengths)
    stages = stages_of(
        [
            {"name": str(number), "steps": steps, "sequence_length": length, "global_batch": 8 * batch}
            for number, (steps, length, batch) in enumerate(lengths)
        ],
        f"train.steps={total}",
    )
    of_step = [number for number, (steps, *_) in enumerate(lengths) for _ in range(steps)]
    for step, number in enumerate(of_step):
        assert stage_at(stages, step) is stages[number]
    assert stage_at(stages, total) is stages[-1]
    taken = [lengths[number] for number in of_step[:done]]
    assert samples_seen(stages, done) == sum(8 * batch for _, _, batch in taken)
    assert tokens_seen(stages, done) == sum(8 * batch * length for _, length, batch in taken)
    assert sum(stage.samples for stage in stages) == samples_seen(stages, total)
    assert all(stage.global_batch == 8 * stage.micro_batch for stage in stages)  # accumulation x ranks is constant
