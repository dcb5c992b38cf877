"""Detection of spikes from plain numbers, without training."""

import json
import math
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.sections import GuardSection
from z2all_ds.base.errors import ConfigError
from z2all_ds.train.guard.guarded_steps import GuardedSteps
from z2all_ds.train.guard.spike_guard import (
    LEAST_DEVIATION,
    LEAST_DEVIATION_OF_NORMS,
    TO_STANDARD_DEVIATION,
    Outlier,
    SpikeGuard,
)
from z2all_ds.train.hooks.spikes import SpikeHandling
from z2all_ds.train.run_state import RunState

SECTION = GuardSection(min_steps=8, window_steps=16)


def guard_after(*losses: float, section: GuardSection = SECTION) -> SpikeGuard:
    guard = SpikeGuard(section)
    for loss in losses:
        guard.accept({"loss": loss})
    return guard


def test_a_falling_loss_is_accepted_and_a_jump_is_an_outlier() -> None:
    guard = guard_after(*(8.0 - 0.1 * step for step in range(20)))
    assert guard.outliers({"loss": 6.1}) == []
    (found,) = guard.outliers({"loss": 12.0})
    assert found.name == "loss" and found.value == 12.0 and 6.5 < (found.limit or 0) < 12.0


def test_a_low_value_is_never_an_outlier() -> None:
    assert guard_after(*[5.0] * 10).outliers({"loss": 0.01}) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_an_outlier_from_the_first_step(value: float) -> None:
    (found,) = SpikeGuard(SECTION).outliers({"loss": value})
    assert found.limit is None


def test_finite_values_are_outliers_only_after_min_steps() -> None:
    assert guard_after(*[5.0] * 7).outliers({"loss": 1e9}) == []
    assert guard_after(*[5.0] * 8).outliers({"loss": 1e9})


def test_after_equal_values_small_changes_are_allowed() -> None:
    limit = guard_after(*[5.0] * 10).limit("loss")
    assert limit == pytest.approx(5.0 * math.exp(SECTION.deviations * LEAST_DEVIATION))


def test_gradient_norms_have_a_higher_limit_than_losses() -> None:
    guard = SpikeGuard(SECTION)
    for _ in range(10):
        guard.accept({"loss": 2.0, "grad_norm": 2.0})
    assert [found.name for found in guard.outliers({"loss": 6.0, "grad_norm": 6.0})] == ["loss"]
    assert guard.outliers({"grad_norm": 2.0 * math.exp(SECTION.deviations * LEAST_DEVIATION_OF_NORMS) + 0.1})


def test_each_domain_is_judged_by_its_own_values() -> None:
    guard = SpikeGuard(SECTION)
    for _ in range(10):
        guard.accept({"loss_of_zh": 3.0, "loss_of_code": 1.0})
    assert [found.name for found in guard.outliers({"loss_of_zh": 3.1, "loss_of_code": 3.1})] == ["loss_of_code"]


def test_a_loss_of_zero_is_accepted_and_not_remembered() -> None:
    guard = guard_after(0.0, *[1.0] * 8)
    assert guard.outliers({"loss": 0.0}) == [] and guard.limit("loss") is not None


@given(st.lists(st.floats(4.0, 5.0), min_size=16, max_size=16), st.integers(0, 15))
def test_an_extreme_value_in_the_window_hardly_moves_the_limit(usual: list[float], place: int) -> None:
    """It is at most one of the latest four values and affects two of fifteen changes, so both medians hardly change."""
    values = [*usual[:place], 1e30, *usual[place + 1 :]]
    limit = guard_after(*values).limit("loss")
    widest = TO_STANDARD_DEVIATION * math.log(5.0 / 4.0) / math.sqrt(2)
    assert limit is not None and limit <= 5.0 * math.exp(SECTION.deviations * widest) * (1 + 1e-12)


def test_the_state_survives_a_round_trip_through_json() -> None:
    guard = guard_after(*[5.0, 5.5, 4.5] * 5)
    for bad in (True, False, True):
        guard.count(bad)
    other = SpikeGuard(SECTION)
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert other.limit("loss") == guard.limit("loss")
    assert other.bad_steps == 2


def test_bad_steps_stay_counted_after_a_rollback_and_expire_with_the_window() -> None:
    guard = guard_after()
    saved = guard.state_dict()
    guard.count(bad=True)
    guard.load_state_dict(saved)
    assert guard.bad_steps == 1
    for _ in range(SECTION.window_steps):
        guard.count(bad=False)
    assert guard.bad_steps == 0


def test_outliers_are_readable_as_text() -> None:
    assert str(Outlier("loss_of_zh", 12.3456, 7.0)) == "loss_of_zh 12.35 (limit 7)"
    assert str(Outlier("grad_norm", math.nan, None)) == "grad_norm nan"


def test_a_window_too_short_to_judge_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"guard: min_steps=64 must not exceed window_steps=32"):
        load_run_config(None, ["guard.min_steps=64", "guard.window_steps=32"])


@pytest.mark.parametrize("max_bad_steps", [20, 200])
def test_a_new_level_is_learned_also_if_the_window_is_shorter_than_the_bad_steps(max_bad_steps: int) -> None:
    guard = SpikeGuard(GuardSection(window_steps=16, min_steps=8, max_bad_steps=max_bad_steps))
    assert not any(guard.count(bad=True) for _ in range(8))
    assert guard.count(bad=True)


def test_too_many_bad_steps_are_a_new_level_which_is_learned_again() -> None:
    section = GuardSection(min_steps=8, window_steps=16, max_bad_steps=3)
    guard = guard_after(*[1.0] * 16, section=section)
    assert guard.outliers({"loss": 4.0})
    assert [guard.count(bad=True) for _ in range(4)] == [False, False, False, True]
    assert guard.bad_steps == 0 and guard.outliers({"loss": 4.0}) == []
    for _ in range(8):
        guard.accept({"loss": 4.0})
    assert guard.outliers({"loss": 4.1}) == [] and guard.outliers({"loss": 8.0})


def test_the_limit_of_a_domain_is_wider_in_a_step_with_few_of_its_tokens() -> None:
    guard = SpikeGuard(SECTION)
    for loss in (2.0, 2.1) * 8:
        guard.accept({"loss_of_zh": loss}, {"loss_of_zh": 400})
    usual, few = guard.limit("loss_of_zh", 400), guard.limit("loss_of_zh", 100)
    assert usual and few
    assert usual == guard.limit("loss_of_zh", 800) == guard.limit("loss_of_zh")
    level = statistics.median([2.0, 2.1] * 2)
    assert math.log(few / level) == pytest.approx(2 * math.log(usual / level), rel=1e-3)


def test_a_step_with_more_of_a_domain_with_a_high_loss_is_not_an_outlier() -> None:
    guard = SpikeGuard(SECTION)
    only_zh = {"loss": 1.0, "loss_of_zh": 1.0}, {"loss_of_zh": 400}
    guard.accept({"loss": 5.0, "loss_of_en": 5.0}, {"loss_of_en": 400})
    for _ in range(16):
        guard.accept(*only_zh)
    only_en = {"loss": 5.0, "loss_of_en": 5.0}
    assert guard.outliers(only_en) != []  # by its loss alone
    assert guard.outliers(only_en, {"loss_of_en": 400}) == []
    mixed = {"loss_of_en": 100, "loss_of_zh": 300}
    assert guard.outliers({"loss": 2.0, "loss_of_en": 5.0, "loss_of_zh": 1.0}, mixed) == []
    assert guard.outliers({"loss": 4.0, "loss_of_en": 13.0, "loss_of_zh": 1.0}, mixed) != []
    assert guard.outliers({"loss": 5.0, "loss_of_code": 5.0}, {"loss_of_code": 400}) == []  # the first of its domain


@pytest.mark.parametrize(("policy", "taken"), [("warn", True), ("act", False)])
def test_an_outlier_of_one_domain_only_skips_a_step_if_asked_to(policy: str, taken: bool) -> None:
    section = GuardSection(min_steps=8, window_steps=16, domain_policy=policy)
    steps = GuardedStepsOf(section)
    for _ in range(10):
        steps.take({"zh": 3.0, "notes": 1.0})
    figures = steps.take({"zh": 3.0, "notes": 2.0})
    assert [outlier.name for outlier in figures.outliers] == ["loss_of_notes"]
    assert figures.taken is taken and figures.is_bad is not taken
    assert steps.take({"zh": 3.0, "notes": math.nan}).taken is False


@pytest.mark.parametrize(("every_steps", "rollbacks"), [(1, 2), (5, 2), (20, 2), (30, 1), (1000, 0)])
def test_rollbacks_end_when_a_new_level_is_declared(every_steps: int, rollbacks: int) -> None:
    """The loss is higher from sample 33 on: once that is learned, only the two real spikes are acted on."""
    section = GuardSection(min_steps=8, window_steps=16, max_bad_steps=3, policy="rollback")
    spikes = dict.fromkeys((60, 75), 40.0)
    run = RollingBack(section, every_steps, lambda sample: spikes.get(sample, 2.0 if sample < 33 else 4.0))
    run.train(100)
    assert [level["step"] for level in run.events["new_level"]] == [37 if every_steps == 1000 else 34]
    after = [event["samples"][0] for event in run.events["spike"] if event["samples"][0] > 40]
    assert after == [60, 75]
    back = [event for event in run.events.get("rolled_back", []) if event["from_step"] > 40]
    assert len(back) == rollbacks
    assert all(event["step"] >= 34 for event in back)


def test_ordinary_text_after_some_easy_steps_is_accepted_again_also_by_a_resumed_run() -> None:
    """Sixteen steps of easy text lower the level, so that ordinary text looks like spikes until it is a new level."""
    section = GuardSection()

    def loss(sample: int) -> float:
        return 0.4 if 128 <= sample < 144 else 1.0

    first, resumed = RollingBack(section, 1000, loss), RollingBack(section, 1000, loss)
    first.train(150)
    resumed.position, resumed.state.step = first.position, first.state.step
    resumed._guard.load_state_dict(json.loads(json.dumps(first._guard.state_dict())))
    resumed.train(300)
    spikes = [event["step"] for run in (first, resumed) for event in run.events["spike"]]
    assert spikes == list(range(145, 145 + section.max_bad_steps + 1))
    assert [level["step"] for level in resumed.events["new_level"]] == spikes[-1:]


class RollingBack:
    """Steps of one sample each, under the real hook and the real rollback, with a checkpoint every few steps."""

    def __init__(self, section: GuardSection, every_steps: int, loss: Callable[[int], float]) -> None:
        self._steps, self._every_steps, self._loss = GuardedStepsOf(section), every_steps, loss
        self._guard = self._steps.guard
        self._skip: list[list[int]] = []
        self._checkpoint: Any = None
        self.position, self.events = 0, dict[str, list[dict[str, Any]]]()
        self.state: Any = RunState.__new__(RunState)
        self.state.__dict__.update(step=0, _guard=self._guard, _recorder=self, _loader=self, _go_to=self._go_to)
        self.state.__dict__.update(_newest=lambda: (self._checkpoint, []), of_all_ranks=lambda state: state)
        context: Any = SimpleNamespace(run=SimpleNamespace(guard=section), loader=self, state=self.state, recorder=self)
        context.world = SimpleNamespace(is_main=False)
        self._hook = SpikeHandling(context)
        self.stream, self.say, self.go_back_to = self, lambda line: None, lambda step: None

    def train(self, steps: int) -> None:
        for _ in range(20 * steps):
            if self.state.step >= steps:
                return
            self._hook.before_step(self.state.step + 1)
            while any(first <= self.position < end for first, end in self._skip):
                self.position += 1
            self.position, number = self.position + 1, self.state.step + 1
            self.state.step = number
            step: Any = SimpleNamespace(figures=self._steps.take({"zh": self._loss(self.position - 1)}))
            self._hook.after_record(step)
            if self.state.step == number and number % self._every_steps == 0:
                trainer = json.loads(json.dumps({"guard": self._guard.state_dict()}))
                self._checkpoint = SimpleNamespace(step=number, trainer=trainer, data_state=self.state_dict())
        pytest.fail(f"still at step {self.state.step}")

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "skip": self._skip}

    def event(self, kind: str, **details: Any) -> None:
        self.events.setdefault(kind, []).append(details)

    def _go_to(self, checkpoint: Any, data_state: dict[str, Any]) -> None:
        self.position, self._skip, self.state.step = data_state["position"], data_state["skip"], checkpoint.step
        self._guard.load_state_dict(checkpoint.trainer["guard"])


class GuardedStepsOf:
    """Guarded steps without an engine: `take` feeds the figures of one step."""

    def __init__(self, section: GuardSection) -> None:
        self._losses: dict[str, float] = {}
        self._steps = object.__new__(GuardedSteps)
        self.guard = SpikeGuard(section)
        self._steps.__dict__.update(guard=self.guard, _section=section, _scales_loss=False)
        self._steps.__dict__.update(_channel_loss=self, _figures=None, _gate=self)
        self.tokens: dict[str, int] = {}

    def take(self, losses: dict[str, float] | None = None) -> Any:
        if losses is None:  # as the channel loss
            return self._losses["zh"], self._losses
        self._losses, self.tokens = losses, dict.fromkeys(losses, 100)
        self._steps._allows(1.0)
        return self._steps.finish()

    def take_answer(self) -> bool:
        return True
