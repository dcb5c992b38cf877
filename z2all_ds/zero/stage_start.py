"""Applies the settings of a stage: positions of the model, batch sizes."""

from typing import Any

from z2all_ds.base.config.stages import RunStage, samples_seen
from z2all_ds.base.errors import ConfigError
from z2all_ds.data import StreamState


def begin_stage(stage: RunStage, engine: Any) -> None:
    """Apply a stage before its first step, and after a resume within it."""
    engine.module.set_rope_theta(stage.rope_theta)
    engine.set_train_micro_batch_size(stage.micro_batch)
    engine.set_train_batch_size(stage.global_batch)
    # DeepSpeed finds the end of a step by counting micro-batches from the beginning of the run, assuming the same
    # number in every step.
    engine.micro_steps = 0


def check_stages_past(stages: list[RunStage], step: int, data_state: StreamState) -> None:
    """Check that past stage boundaries are unchanged: the model counts stages in steps, the data in samples.

    A run of one stage has no boundary, and its batch may change on resume.
    """
    position = data_state["position"]
    given = position - sum(min(end, position) - first for first, end in data_state["skip"] if first < position)
    expected = samples_seen(stages, step)
    if len(stages) > 1 and given != expected:
        raise ConfigError(
            f"stages: {expected} samples in the first {step} steps",
            f"the checkpoint of step {step} was made with {given}",
            "Change only future stages, and restore the past ones.",
        )
