"""Puts a stage of the run into force: positions of the model, sizes of batches."""

from typing import Any

from z2all_ds.base.config.stages import RunStage, samples_seen
from z2all_ds.base.errors import ConfigError
from z2all_ds.data import StreamState


def begin_stage(stage: RunStage, engine: Any) -> None:
    """Called before the first step of a stage, and after a resume within one."""
    engine.module.set_rope_theta(stage.rope_theta)
    engine.set_train_micro_batch_size(stage.micro_batch)
    engine.set_train_batch_size(stage.global_batch)
    # DeepSpeed finds the ends of steps by counting micro-batches from the beginning of the run, as if their number in a
    # step were always the same.
    engine.micro_steps = 0


def check_stages_past(stages: list[RunStage], step: int, data_state: StreamState) -> None:
    """The model counts stages in steps, the data in samples: a border moved in the past would part them.

    A run of one stage has no border, and its batch may be changed when it goes on.
    """
    position = data_state["position"]
    given = position - sum(min(end, position) - first for first, end in data_state["skip"] if first < position)
    expected = samples_seen(stages, step)
    if len(stages) > 1 and given != expected:
        raise ConfigError(
            f"stages: {expected} samples in the first {step} steps",
            f"the checkpoint of step {step} was made of {given}",
            "Change the stages to come, and leave those past as they were.",
        )
