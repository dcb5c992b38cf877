"""The settings that a checkpoint was made with. They are stored in it, since run.yaml may change afterwards."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.sections import GuardSection, ModelSection, OptimizerSection, ScheduleSection
from z2all_ds.base.config.stages import RunStage, run_stages, stage_at
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.base.paths import full_path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.layout import FIX_DAMAGED, TRAINER, Checkpoint, sealed_folders

NOT_THE_FUNCTION = ("initializer_range", "max_position_embeddings", "attention_dropout", "dropout1", "dropout2")
"""Settings of the model that do not change what given weights compute."""
OTHERS = {
    "optimizer": tuple(OptimizerSection.model_fields),
    "schedule": tuple(ScheduleSection.model_fields),
    "guard": tuple(GuardSection.model_fields),
    "data": ("document_mask", "skip_samples", "on_bad_record"),
    "ops": ("linear",),
    "train": ("gradient_clipping",),
}
"""Settings that change the training but not the model."""
OF_STAGE = ("global_batch", "sequence_length")
"""The same, of the stage in effect."""
MODEL, SETTINGS = "model", "settings"
"""Their keys in the trainer's record of a checkpoint."""


def recorded_settings(run: RunConfig, stage: RunStage) -> dict[str, Any]:
    """Return what a checkpoint stores: the model as of this stage, and other settings."""
    found = run.model_dump(mode="json")
    listed = {**OTHERS, "model": NOT_THE_FUNCTION}
    others = {f"{section}.{key}": found[section][key] for section, keys in listed.items() for key in keys}
    of_stage = {f"stage.{name}": getattr(stage, name) for name in OF_STAGE}
    return {MODEL: {**found["model"], "rope_theta": stage.rope_theta}, SETTINGS: {**others, **of_stage}}


def with_saved_lanes(run: RunConfig, resume: str) -> RunConfig:
    """Return the config with the number of lanes of the checkpoint on disk from which it resumes, unless it sets one:
    the default depends on the batch, which a resume may change."""
    found = sealed_folders(RunFolder(full_path(run.run_dir)).checkpoints) if resume == "auto" else [Path(resume)]
    if not found or run.data.num_lanes or resume == "never":
        return run
    lanes = None
    with suppress(CheckpointError, LookupError, TypeError):  # reported when it is loaded
        lanes = Checkpoint(found[-1], 0).data_state["num_lanes"]
    is_valid = type(lanes) is int and lanes > 0
    return run.model_copy(update={"data": run.data.model_copy(update={"num_lanes": lanes})}) if is_valid else run


def model_of(run: RunConfig, checkpoint: Checkpoint) -> ModelSection:
    """Return the model of a checkpoint; of one from before it was stored, that of the run at its step."""
    stored = checkpoint.trainer.get(MODEL)
    if stored is not None:
        with explain_content(CheckpointError, f"checkpoint {checkpoint.path}", f"{TRAINER}: wrong model", FIX_DAMAGED):
            return ModelSection(**stored)
    # The stage of the last completed step: a checkpoint at a boundary belongs to the stage that ended there.
    stage = stage_at(run_stages(run), max(checkpoint.step - 1, 0))
    return run.model.model_copy(update={"rope_theta": stage.rope_theta})


def changed_settings(checkpoint: Checkpoint, run: RunConfig, stage: RunStage) -> dict[str, list[Any]]:
    """Return [before, now] of each changed setting. Raise if the same weights would be another model."""
    now = recorded_settings(run, stage)
    model = _differences(checkpoint.trainer.get(MODEL, {}), now[MODEL])
    other_model = {f"model.{key}": change for key, change in model.items() if key not in NOT_THE_FUNCTION}
    if other_model and not run.checkpoint.allow_model_change:
        name, (before, after) = next(iter(other_model.items()))
        raise CheckpointError(
            f"{name}={after}",
            f"{checkpoint.name} was trained with {before}; its weights would compute something else",
            f"Set {name}={before}, or checkpoint.allow_model_change=true if you mean it.",
        )
    return {**other_model, **_differences(checkpoint.trainer.get(SETTINGS, {}), now[SETTINGS])}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [value, now[key]] for key, value in before.items() if key in now and now[key] != value}
