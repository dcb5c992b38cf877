"""Properties of learning rate curves: every kind of schedule, by steps and by tokens, with one or several stages."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.config.sections import ScheduleSection
from z2all_ds.base.config.stages import RunStage, tokens_seen
from z2all_ds.base.errors import ConfigError
from z2all_ds.train.schedules import HEIGHTS, check_no_jump, learning_rate, rates_around

TO_THE_LOWEST = ("cosine", "linear", "one_minus_sqrt", "wsd")
KINDS = (*TO_THE_LOWEST, "constant", "inverse_sqrt")
LARGEST_FALL = {
    "linear": lambda share: share,
    "cosine": lambda share: math.sin(math.pi / 2 * share),
    "one_minus_sqrt": math.sqrt,
}
"""The largest fall of each shape, as a fraction of its height, over any interval that is this share of its length."""
peaks = st.floats(1e-7, 10.0)
Flag = st.SearchStrategy[bool]
NEVER, AT_TIMES, ALWAYS = st.just(False), st.booleans(), st.just(True)


def stages_of(*parts: tuple[Any, ...]) -> list[RunStage]:
    """Return consecutive stages; each part is (steps, tokens per step, anneal)."""
    ends = [0, *itertools.accumulate(steps for steps, *_ in parts)]
    borders = itertools.pairwise(ends)
    return [
        RunStage(f"stage {first}", first, end, tokens, 1, 1, 1e4, None, 1.0, *anneal)
        for (first, end), (_, tokens, *anneal) in zip(borders, parts, strict=True)
    ]


def one_stage(steps: int) -> list[RunStage]:
    return stages_of((steps, 1, None))


def curve_of(stages: list[RunStage], peak: float, schedule: ScheduleSection) -> list[float]:
    return [learning_rate(step, stages, peak, schedule) for step in range(stages[-1].end_step)]


@dataclass(frozen=True)
class Curve:
    stages: list[RunStage]
    peak: float
    schedule: ScheduleSection

    @property
    def rates(self) -> list[float]:
        return curve_of(self.stages, self.peak, self.schedule)

    @property
    def lowest(self) -> float:
        return self.peak * self.schedule.min_ratio

    def done(self, steps: int) -> int:
        return tokens_seen(self.stages, steps) if self.schedule.by == "tokens" else steps

    @property
    def warm_steps(self) -> int:
        """Number of steps that begin within the warm-up."""
        return sum(self.done(step) < (self.schedule.warmup or 0) for step in range(self.stages[-1].end_step))


@st.composite
def curves(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, annealed: Flag = NEVER) -> Curve:
    """Draw a curve of up to three stages with different tokens per step and at least two steps after the warm-up."""
    parts = draw(st.lists(st.tuples(st.integers(1, 25), st.integers(1, 50)), min_size=1, max_size=3))
    stages = stages_of(*((steps + 2, tokens, None) for steps, tokens in parts))
    by, steps = draw(st.sampled_from(["steps", "tokens"])), stages[-1].end_step

    def length(steps_done: int) -> int:
        return tokens_seen(stages, steps_done) if by == "tokens" else steps_done

    warmup = draw(st.integers(0, length(steps - 2)))
    kind = draw(st.sampled_from(kinds))
    # The decay excludes the step in which the warm-up ends: that step has the peak rate, so the next step would fall by
    # the amount of two steps.
    warm = next(length(border) for border in range(steps) if length(border) >= warmup)
    decay = draw(st.integers(1, length(steps) - warm)) if kind == "wsd" else None
    chosen = {f"warmup_{by}": warmup, f"decay_{by}": decay, "decay_shape": draw(st.sampled_from(list(HEIGHTS)))}
    schedule = ScheduleSection(kind=kind, by=by, min_ratio=draw(st.floats(0, 1)), **chosen)
    can_anneal = [number for number, stage in enumerate(stages) if length(stage.first_step) >= warmup]
    if draw(annealed) and can_anneal:
        number = draw(st.sampled_from(can_anneal))
        shapes = [draw(st.sampled_from(list(HEIGHTS))) if here == number else None for here in range(len(stages))]
        stages = stages_of(
            *((s.end_step - s.first_step, s.tokens_per_step, a) for s, a in zip(stages, shapes, strict=True))
        )
    return Curve(stages, draw(peaks), schedule)


@given(curve=curves(annealed=AT_TIMES))
def test_rates_never_exceed_the_peak_and_respect_the_minimum_after_the_warm_up(curve: Curve) -> None:
    rates = curve.rates
    assert max(rates) <= curve.peak
    assert min(rates) > 0 or curve.lowest == 0
    assert min(rates[curve.warm_steps :]) >= curve.lowest


@given(curve=curves(annealed=AT_TIMES))
def test_the_warm_up_ends_exactly_at_the_peak(curve: Curve) -> None:
    rates, warm_steps = curve.rates, curve.warm_steps
    if warm_steps:
        assert rates[warm_steps - 1] == curve.peak
        assert rates[0] == pytest.approx(curve.peak * min(1, curve.done(1) / (curve.schedule.warmup or 0)), rel=1e-15)
        assert rates[:warm_steps] == sorted(rates[:warm_steps])


@given(curve=curves(annealed=AT_TIMES))
def test_the_rate_never_rises_after_the_warm_up(curve: Curve) -> None:
    for earlier, later in itertools.pairwise(curve.rates[max(0, curve.warm_steps - 1) :]):
        assert later <= earlier * (1 + 1e-15)  # allows for rounding where the curve is nearly flat


@given(curve=curves(TO_THE_LOWEST))
def test_the_last_step_has_exactly_the_minimum_rate(curve: Curve) -> None:
    steps = len(curve.rates)
    assert curve.rates[-1] == curve.lowest
    assert learning_rate(steps + 500, curve.stages, curve.peak, curve.schedule) == curve.lowest


@given(curve=curves(annealed=ALWAYS))
def test_an_annealing_stage_ends_at_the_minimum_and_later_stages_stay_there(curve: Curve) -> None:
    for stage in curve.stages:
        if stage.anneal:
            assert set(curve.rates[stage.end_step - 1 :]) == {curve.lowest}


@given(curve=curves(annealed=AT_TIMES))
def test_the_rate_never_jumps(curve: Curve) -> None:
    """Between two steps the rate changes by at most what its shape allows for the progress of one step."""
    schedule, warm, total_steps = curve.schedule, curve.schedule.warmup or 0, curve.stages[-1].end_step
    step_size = max(s.tokens_per_step for s in curve.stages) if schedule.by == "tokens" else 1
    moduli = [0.0]
    if schedule.kind == "wsd":
        moduli += [LARGEST_FALL[schedule.decay_shape](min(1, step_size / (schedule.decay or 1)))]
    elif schedule.kind == "inverse_sqrt":
        moduli += [step_size / (2 * max(warm, curve.done(1)))]
    elif schedule.kind != "constant":
        moduli += [LARGEST_FALL[schedule.kind](min(1, step_size / (curve.done(total_steps - 1) - warm)))]
    for stage in curve.stages:
        if stage.anneal:
            span = curve.done(stage.end_step) - curve.done(stage.first_step)
            moduli += [LARGEST_FALL[stage.anneal](min(1, step_size / span))]
    for step, (earlier, later) in enumerate(itertools.pairwise(curve.rates), start=1):
        allowed = step_size / warm if step < curve.warm_steps else max(moduli)
        assert abs(later - earlier) <= curve.peak * (allowed * (1 + 1e-9) + 1e-15), step


@given(curve=curves(annealed=AT_TIMES), tokens=st.integers(1, 10**7))
def test_by_tokens_equals_by_steps_if_all_steps_have_equal_tokens(curve: Curve, tokens: int) -> None:
    """The rates are equal bit for bit, because the quotient of two integers is rounded only once."""
    stages = stages_of(*((stage.end_step - stage.first_step, tokens, stage.anneal) for stage in curve.stages))
    shape = curve.schedule.model_dump(include={"kind", "decay_shape", "min_ratio"})
    warmup = curve.warm_steps
    decay = max(1, (stages[-1].end_step - warmup) // 2) if curve.schedule.kind == "wsd" else None
    by_steps = ScheduleSection(**shape, warmup_steps=warmup, decay_steps=decay)
    in_tokens = {"warmup_tokens": warmup * tokens, "decay_tokens": decay and decay * tokens}
    by_tokens = ScheduleSection(**shape, by="tokens", **in_tokens)
    assert curve_of(stages, curve.peak, by_tokens) == curve_of(stages, curve.peak, by_steps)


@given(curve=curves())
def test_stage_boundaries_change_nothing_if_no_stage_anneals(curve: Curve) -> None:
    split = stages_of(*((1, s.tokens_per_step, None) for s in curve.stages for _ in range(s.first_step, s.end_step)))
    assert curve_of(split, curve.peak, curve.schedule) == curve.rates


@given(peak=peaks, total=st.integers(2, 50), kind=st.sampled_from(KINDS), anneal=st.sampled_from([None, *HEIGHTS]))
def test_a_min_ratio_of_one_is_a_constant_rate(peak: float, total: int, kind: str, anneal: str | None) -> None:
    decay = 1 if kind == "wsd" else None
    schedule = ScheduleSection(kind=kind, warmup_steps=0, decay_steps=decay, min_ratio=1.0)
    assert set(curve_of(stages_of((1, 1, None), (total - 1, 1, anneal)), peak, schedule)) == {peak}


def test_rates_match_values_computed_by_hand() -> None:
    linear = ScheduleSection(kind="linear", warmup_steps=2, min_ratio=0.5)
    assert curve_of(one_stage(7), 1.0, linear) == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5]
    cosine = ScheduleSection(kind="cosine", warmup_steps=0, min_ratio=0.0)
    # 1 + cos of 0°, 30°, 60°, ..., 180°.
    found = curve_of(one_stage(7), 2.0, cosine)
    assert found == pytest.approx([2.0, 1.8660254, 1.5, 1.0, 0.5, 0.1339746, 0.0], abs=1e-7)
    constant = ScheduleSection(kind="constant", warmup_steps=4, min_ratio=0.1)
    assert curve_of(one_stage(6), 4.0, constant) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    root = ScheduleSection(kind="one_minus_sqrt", warmup_steps=1, min_ratio=0.0)
    fall = [1.0, 0.5857864, 0.2679492, 0.0]  # 2 minus the square roots of 1, 2, 3, 4
    assert curve_of(one_stage(6), 2.0, root) == pytest.approx([2.0, 2.0, *fall], abs=1e-7)
    wsd = ScheduleSection(kind="wsd", warmup_steps=1, decay_steps=4, min_ratio=0.0)
    assert curve_of(one_stage(7), 2.0, wsd) == pytest.approx([2.0, 2.0, 2.0, *fall], abs=1e-7)
    line = wsd.model_copy(update={"decay_shape": "linear"})
    assert curve_of(one_stage(7), 4.0, line) == [4.0, 4.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    inverse = ScheduleSection(kind="inverse_sqrt", warmup_steps=4, min_ratio=0.25)
    rates = curve_of(one_stage(100), 2.0, inverse)
    assert [rates[step] for step in (1, 3, 4, 9, 16, 64, 99)] == pytest.approx([1, 2, 2, 4 / 3, 1, 0.5, 0.5], rel=1e-15)
    without = ScheduleSection(kind="inverse_sqrt", warmup_steps=0, min_ratio=0.0)
    rates = curve_of(one_stage(17), 2.0, without)
    assert [rates[step] for step in (0, 1, 4, 16)] == [2.0, 2.0, 1.0, 0.5]


def test_rates_by_tokens_match_values_computed_by_hand() -> None:
    """Stages with more tokens per step move along the curve faster."""
    stages = stages_of((2, 10, None), (1, 20, None), (2, 40, None))
    linear = ScheduleSection(kind="linear", by="tokens", warmup_tokens=20, min_ratio=0.0)
    # Tokens before each step: 0, 10, 20, 40, 80.
    assert curve_of(stages, 3.0, linear) == [1.5, 3.0, 3.0, 2.0, 0.0]
    wsd = ScheduleSection(kind="wsd", by="tokens", warmup_tokens=15, decay_tokens=80, decay_shape="linear", min_ratio=0)
    # Tokens after each step: 10, 20, 40, 80, 120; the decay begins at 40.
    assert curve_of(stages, 3.0, wsd) == [2.0, 3.0, 3.0, 1.5, 0.0]


def test_annealing_begins_at_the_current_rate() -> None:
    stages = stages_of((5, 1, None), (2, 10, "linear"), (2, 3, None))
    linear = ScheduleSection(kind="linear", warmup_steps=0, min_ratio=0.25)
    # The linear schedule of 9 steps gives 4, 3.625, ..., 2.5; the annealing stage continues from 2.5 down to 1 in two
    # steps, and the last stage stays at 1.
    assert curve_of(stages, 4.0, linear) == [4.0, 3.625, 3.25, 2.875, 2.5, 1.75, 1.0, 1.0, 1.0]
    constant = ScheduleSection(kind="constant", warmup_steps=1, min_ratio=0.0)
    wsd = ScheduleSection(kind="wsd", warmup_steps=1, decay_steps=4, min_ratio=0.0)
    # A last stage that anneals is equivalent to the decay of wsd.
    assert curve_of(stages_of((3, 1, None), (4, 1, "one_minus_sqrt")), 2.0, constant) == curve_of(
        one_stage(7), 2.0, wsd
    )
    whole = stages_of((4, 1, "linear"))
    assert curve_of(whole, 4.0, constant.model_copy(update={"warmup_steps": 0})) == [3.0, 2.0, 1.0, 0.0]


def test_very_short_runs_have_a_valid_rate() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=0, min_ratio=0.0)
    assert curve_of(one_stage(1), 3.0, schedule) == [3.0]
    warming = ScheduleSection(kind="cosine", warmup_steps=100, min_ratio=0.1)
    assert curve_of(one_stage(10), 3.0, warming)[-1] == pytest.approx(0.3, rel=1e-15)


@given(curve=curves(annealed=AT_TIMES))
def test_unchanged_settings_cause_no_jump(curve: Curve) -> None:
    settings = curve.stages, curve.peak, curve.schedule
    for step in range(1, curve.stages[-1].end_step + 1):
        assert check_no_jump(rates_around(step, *settings), step, *settings) is None


@given(curve=curves(annealed=AT_TIMES), more=st.integers(1, 50))
def test_a_run_may_be_extended_only_without_a_jump(curve: Curve, more: int) -> None:
    """A resume is accepted only where the rate changes by no more than it does on one of the two curves."""
    *before, last = ((s.end_step - s.first_step, s.tokens_per_step, s.anneal) for s in curve.stages)
    longer = Curve(stages_of(*before, (last[0] + more, *last[1:])), curve.peak, curve.schedule)
    old, new, decay_from = curve.rates, longer.rates, curve.done(len(curve.rates)) - (curve.schedule.decay or 0)
    goes_on = set()
    for step in range(1, len(old)):
        try:
            saved = rates_around(step, curve.stages, curve.peak, curve.schedule)
            check_no_jump(saved, step, longer.stages, curve.peak, curve.schedule)
        except ConfigError:
            assert new[step] != old[step]
            continue
        goes_on.add(step)
        larger = max(abs(old[step] - old[step - 1]), abs(new[step] - new[step - 1]))
        assert abs(new[step] - old[step - 1]) <= larger + 1e-8 * curve.peak
    stable = {"constant": curve.done(len(old)), "inverse_sqrt": curve.done(len(old)), "wsd": decay_from}
    if curve.schedule.kind in stable and not any(stage.anneal for stage in curve.stages):
        assert goes_on >= {step for step in range(1, len(old)) if curve.done(step) <= stable[curve.schedule.kind]}


def test_a_jump_is_refused_in_one_line_or_reported_if_allowed() -> None:
    schedule = ScheduleSection(kind="linear", warmup_steps=0, min_ratio=0.0)
    saved = rates_around(3, one_stage(5), 4.0, schedule)
    assert saved == {"lr_of_last_step": 2.0, "lr_of_next_step": 1.0}
    says = "learning rate 2.5 for step 4: the checkpoint's settings give 1, after 2 in step 3"
    with pytest.raises(ConfigError) as caught:
        check_no_jump(saved, 3, one_stage(9), 4.0, schedule)
    fix = "Restore optimizer.lr, schedule, stages and train.steps, or set schedule.allow_jump=true."
    assert str(caught.value) == f"{says}. {fix}"
    allowed = schedule.model_copy(update={"allow_jump": True})
    assert check_no_jump(saved, 3, one_stage(9), 4.0, allowed) == f"{says} (schedule.allow_jump)"
    with pytest.raises(ConfigError):
        check_no_jump(saved, 3, one_stage(5), 4.1, schedule)


def test_checkpoints_without_rates_are_accepted() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=0)
    assert check_no_jump({"world_size": 2}, 3, one_stage(9), 4.0, schedule) is None
