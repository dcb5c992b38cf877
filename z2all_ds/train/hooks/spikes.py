"""Handles a bad step: reports it, records the data it used, and acts according to guard.policy."""

import math
from collections import deque
from typing import Any

from z2all_ds.base.errors import TrainingError
from z2all_ds.data import StreamState
from z2all_ds.data.trace import trace_sample
from z2all_ds.track.fields import LOSS_PREFIX
from z2all_ds.train.context import TrainContext
from z2all_ds.train.guard.guarded_steps import StepFigures
from z2all_ds.train.hooks.hook import Hook, Step

NOT_FINITE_IN_A_ROW = 3
"""After this many in a row the cause is not the data: the weights themselves are corrupt."""
SAMPLES_TRACED = 64
"""Limit for the event; `z2all corpus trace --step` shows all."""
WHAT_IS_DONE = {
    "warn": "the run continues",
    "skip": "the weights are not changed and the run continues",
    "rollback": "the run rolls back",
    "stop": "the run stops",
}


class SpikeHandling(Hook):
    """Remembers the data states before the last steps, and acts on bad steps. All ranks act alike."""

    def __init__(self, context: TrainContext) -> None:
        super().__init__(context)
        self._guard, self._world, self._loader = context.run.guard, context.world, context.loader
        self._state, self._recorder = context.state, context.recorder
        self._data_before: deque[StreamState] = deque(maxlen=self._guard.rollback_skips_steps)
        self._not_finite_in_a_row = 0
        self._level_step = 0
        """Last step at which a new level was declared. Checkpoints before it would bring back the old level."""

    def before_step(self, number: int) -> None:
        """Remember the data state, which is small; it identifies the documents of a step."""
        self._data_before.append(self._loader.state_dict())

    def after_record(self, step: Step) -> None:
        figures = step.figures
        self._not_finite_in_a_row = 0 if figures.is_finite else self._not_finite_in_a_row + 1
        if not figures.outliers:
            return
        policy = self._guard.policy if figures.is_bad else "warn"
        if figures.has_new_level and policy == "rollback":
            policy = "skip"  # going back would lead to the same level again
        what = ", ".join(map(str, figures.outliers))
        self._recorder.say(f"step {self._state.step}: {what}; {WHAT_IS_DONE[policy]}")
        self._record_event(figures, policy)
        self._stop_if_hopeless(what, policy)
        if figures.has_new_level:
            self._level_step = self._state.step
            self._report_new_level()
        if policy == "rollback":
            self._roll_back()

    def _record_event(self, figures: StepFigures, policy: str) -> None:
        whole = self._state.of_all_ranks(self._data_before[-1])
        samples = self._samples_since(self._data_before[-1])
        self._recorder.event(
            "spike",
            step=self._state.step,
            policy=policy,
            taken=figures.taken,
            values={name: _for_json(value) for name, value in figures.values.items()},
            outliers=[outlier.name for outlier in figures.outliers],
            limits={outlier.name: outlier.limit for outlier in figures.outliers},
            samples=samples,
            documents=self._documents(samples, figures, whole) if self._world.is_main else [],
        )

    def _samples_since(self, before: StreamState) -> list[int]:
        """Return [first, end) of the global samples, in the format of data.skip_samples."""
        return [before["position"], self._loader.stream.position]

    def _documents(self, samples: list[int], figures: StepFigures, state: StreamState) -> list[dict[str, Any]]:
        """Return the documents of the outlier domains, or of all domains if only the total is an outlier."""
        plan = self._loader.stream.plan
        names = {outlier.name.removeprefix(LOSS_PREFIX) for outlier in figures.outliers}
        domains = names & set(figures.per_domain) or set(figures.per_domain)
        found: list[dict[str, Any]] = []
        traced = 0
        for sample in range(*samples):
            stage = plan.schedule.stage_of(sample)
            if plan.schedule.domain_names[stage.mixture.domain_of(sample)] not in domains:
                continue
            trace = trace_sample(plan, sample, [state])
            for piece in trace.pieces:
                location = {"shard": piece.shard, "record": piece.record}
                found.append({"sample": sample, "domain": trace.domain, **location})
            traced += 1
            if traced == SAMPLES_TRACED:
                break
        return found

    def _report_new_level(self) -> None:
        bad, window, learned = self._guard.bad_steps_allowed, self._guard.window_steps, self._guard.min_steps
        self._recorder.event("new_level", step=self._state.step, bad_steps=bad + 1)
        self._recorder.say(
            f"warning: more than {bad} of the last {window} steps were bad"
            f" (guard.max_bad_steps={self._guard.max_bad_steps}, guard.policy={self._guard.policy}). The guard takes"
            f" this for the new level and learns it from the next {learned} steps."
            " If the loss does not recover, lower optimizer.lr or check the data (see events.jsonl)"
        )

    def _stop_if_hopeless(self, what: str, policy: str) -> None:
        where = f"{what} at step {self._state.step}"
        fix = (
            "Lower optimizer.lr or check the data (listed in events.jsonl), or set another guard.policy; the last"
            " checkpoint is intact."
        )
        if policy == "stop":
            raise TrainingError(where, "guard.policy=stop", fix)
        if self._not_finite_in_a_row >= NOT_FINITE_IN_A_ROW:
            raise TrainingError(where, f"not finite {NOT_FINITE_IN_A_ROW} times in a row: the weights are corrupt", fix)

    def _roll_back(self) -> None:
        first, end = self._samples_since(self._data_before[0])
        bad_step = self._state.step
        if not self._state.roll_back(first, end, self._level_step):
            since = f" since the new level at step {self._level_step}" if self._level_step else ""
            self._recorder.say(f"there is no checkpoint to roll back to yet{since}: the step is skipped")
            return
        self._data_before.clear()
        self._recorder.event("rolled_back", step=self._state.step, from_step=bad_step, skipped_samples=[first, end])
        self._recorder.say(f"back at step {self._state.step}; samples {first} to {end - 1} are skipped from now on")


def _for_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
