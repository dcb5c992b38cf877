"""The stages of a run: the settings in effect at each step, with omitted settings filled in."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.sections import AnnealShape, StageSection
from z2all_ds.base.errors import ConfigError


@dataclass(frozen=True)
class RunStage:
    """One stage. `first_step` is the number of steps done before it; it ends when `end_step` steps are done."""

    name: str
    first_step: int
    end_step: int
    sequence_length: int
    global_batch: int
    micro_batch: int
    rope_theta: float
    weights: dict[str, float] | None
    temperature: float
    anneal: AnnealShape | None

    @property
    def samples(self) -> int:
        return (self.end_step - self.first_step) * self.global_batch

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length


def run_stages(run: RunConfig) -> list[RunStage]:
    """Return the stages of the run, at least one; the last ends with the run."""
    sections = run.stages or (StageSection(name="train"),)
    stages: list[RunStage] = []
    first_step = 0
    for number, section in enumerate(sections):
        is_last = number == len(sections) - 1
        end_step = run.train.steps if is_last else first_step + _steps(section)
        if end_step > run.train.steps or (is_last and first_step >= end_step):
            what = f"stage {section.name!r}" + ("" if is_last else f" of {section.steps} steps")
            rule = f"the earlier stages use {first_step} of train.steps={run.train.steps}"
            raise ConfigError(what, rule, "Raise train.steps or shorten a stage.")
        if is_last and section.steps is not None and first_step + section.steps != end_step:
            rule = f"the stages add up to {first_step + section.steps} steps, but train.steps={run.train.steps}"
            raise ConfigError(f"steps={section.steps} of the last stage", rule, "Omit it, or make them equal.")
        stages.append(_filled_in(run, section, stages[-1] if stages else None, first_step, end_step))
        first_step = end_step
    if run.train.batch_warmup_from:
        stages[:1] = _with_batch_warmup(stages[0], run.train.batch_warmup_from, run.train.batch_warmup_steps)
    _check_schedule(run, stages)
    return stages


def stage_at(stages: list[RunStage], steps_done: int) -> RunStage:
    """Return the stage of the next step; after the last step, the last stage."""
    return stages[bisect_right([stage.first_step for stage in stages], steps_done) - 1]


def samples_seen(stages: list[RunStage], steps_done: int) -> int:
    return sum(_steps_within(stage, steps_done) * stage.global_batch for stage in stages)


def tokens_seen(stages: list[RunStage], steps_done: int) -> int:
    return sum(_steps_within(stage, steps_done) * stage.tokens_per_step for stage in stages)


def progress(stages: list[RunStage], by: Literal["steps", "tokens"], steps_done: int) -> int:
    """Return the progress of the run in the unit of its schedule."""
    return tokens_seen(stages, steps_done) if by == "tokens" else steps_done


def _with_batch_warmup(whole: RunStage, smallest: int, steps: int) -> list[RunStage]:
    """Return the stage preceded by one stage per smaller batch, each with about the same number of steps.

    The micro-batch stays the same and the accumulation grows, so no batch needs more memory than the full one.
    """
    what, times = f"train.batch_warmup_from={smallest}", whole.global_batch // smallest
    if smallest % whole.micro_batch or smallest * times != whole.global_batch or times & (times - 1) or times == 1:
        halves = [whole.global_batch >> times for times in range(1, whole.global_batch.bit_length())]
        fitting = [size for size in halves if size % whole.micro_batch == 0 and whole.global_batch % size == 0]
        raise ConfigError(
            what,
            f"doubling it must lead to {whole.global_batch}, always in multiples of micro_batch={whole.micro_batch}",
            f"Set it to one of {', '.join(map(str, fitting))}." if fitting else "Choose a smaller micro_batch.",
        )
    sizes = [smallest << doublings for doublings in range(times.bit_length() - 1)]
    if not len(sizes) <= steps < whole.end_step - whole.first_step:
        rule = f"must be at least {len(sizes)} (the smaller batches) and less than the stage's {whole.end_step} steps"
        raise ConfigError(f"train.batch_warmup_steps={steps}", rule, "Change one of the two.")
    borders = [whole.first_step + steps * number // len(sizes) for number in range(len(sizes) + 1)]
    smaller = [
        replace(
            whole, name=f"{whole.name}, batch {size}", first_step=first, end_step=end, global_batch=size, anneal=None
        )
        for size, (first, end) in zip(sizes, pairwise(borders), strict=True)
    ]
    return [*smaller, replace(whole, first_step=borders[-1])]


def _check_schedule(run: RunConfig, stages: list[RunStage]) -> None:
    """Check that warm-up and decay fit into the run. A warm-up without decay may be cut off by a short run."""
    by, warmup, decay = run.schedule.by, run.schedule.warmup or 0, run.schedule.decay
    total = progress(stages, by, run.train.steps)
    if decay is not None and warmup + decay > total:
        what = f"schedule.warmup_{by}={warmup} and schedule.decay_{by}={decay}"
        rule = f"together they exceed the run of {total} {by}"
        raise ConfigError(what, rule, "Shorten one of them, or raise train.steps.")
    for stage in stages:
        begin = progress(stages, by, stage.first_step)
        if stage.anneal and begin < warmup:
            what, rule = f"anneal of stage {stage.name!r}", f"it starts after {begin} {by}, during the warm-up"
            raise ConfigError(what, rule, f"Start it later, or lower schedule.warmup_{by}={warmup}.")


def _steps_within(stage: RunStage, steps_done: int) -> int:
    return max(0, min(stage.end_step, steps_done) - stage.first_step)


def _steps(section: StageSection) -> int:
    if section.steps is None:
        rule = "every stage except the last needs a number of steps"
        raise ConfigError(f"stage {section.name!r} without steps", rule, "Set it, e.g. steps: 1000.")
    return section.steps


def _filled_in(
    run: RunConfig, section: StageSection, before: RunStage | None, first_step: int, end_step: int
) -> RunStage:
    """Return the stage with omitted settings taken from the stage before, or for the first stage from the run."""
    train = run.train
    global_batch = section.global_batch or (before.global_batch if before else train.global_batch)
    if (train.micro_batch * global_batch) % train.global_batch:
        raise ConfigError(
            f"global_batch={global_batch} of stage {section.name!r}",
            f"micro_batch={train.micro_batch} cannot be scaled in proportion from global_batch={train.global_batch}",
            f"Choose it so that {train.micro_batch} x global_batch / {train.global_batch} is a whole number.",
        )
    by_itself = section.weights is not None or section.temperature is not None
    return RunStage(
        section.name,
        first_step,
        end_step,
        section.sequence_length or (before.sequence_length if before else train.sequence_length),
        global_batch,
        train.micro_batch * global_batch // train.global_batch,
        section.rope_theta or (before.rope_theta if before else run.model.rope_theta),
        section.weights if by_itself else (before.weights if before else run.data.weights),
        (section.temperature or 1.0) if by_itself else (before.temperature if before else run.data.temperature),
        section.anneal,
    )
