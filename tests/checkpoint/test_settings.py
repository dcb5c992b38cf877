"""The settings that a checkpoint stores: another model is refused, other changes are listed."""

from pathlib import Path

import pytest

from tests.checkpoint.making import seal, write_temporary
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.layout import Checkpoint
from z2all_ds.checkpoint.settings import changed_settings, model_of, recorded_settings


def saved(checkpoints: Path, run: RunConfig) -> Checkpoint:
    write_temporary(checkpoints, 5, **recorded_settings(run, run_stages(run)[0]))
    return Checkpoint(seal(checkpoints, 5), 5)


@pytest.mark.parametrize("change", ["rope_theta=500.0", "num_attention_heads=8", "rms_norm_eps=0.001"])
def test_another_model_is_refused_unless_allowed(change: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, load_run_config())
    name, _, value = change.partition("=")
    run = load_run_config(None, [f"model.{change}"])
    with pytest.raises(CheckpointError, match=rf"model\.{name}={value}: .*allow_model_change=true"):
        changed_settings(checkpoint, run, run_stages(run)[0])
    allowed = load_run_config(None, [f"model.{change}", "checkpoint.allow_model_change=true"])
    ((changed, (before, now)),) = changed_settings(checkpoint, allowed, run_stages(allowed)[0]).items()
    assert changed == f"model.{name}" and f"{now}" == value and before != now


def test_other_changes_are_listed(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, load_run_config())
    assert changed_settings(checkpoint, load_run_config(), run_stages(load_run_config())[0]) == {}
    changes = [
        "optimizer.betas=[0.9,0.99]",
        "optimizer.weight_decay=0.5",
        "data.document_mask=false",
        "model.dropout1=0.1",
    ]
    run = load_run_config(None, changes)
    found = changed_settings(checkpoint, run, run_stages(run)[0])
    assert sorted(found) == sorted(change.partition("=")[0] for change in changes)
    assert found["data.document_mask"] == [True, False]


def test_the_model_is_that_of_the_checkpoint_and_without_one_that_of_the_run(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "new", load_run_config(None, ["model.num_attention_heads=8"]))
    assert model_of(load_run_config(), checkpoint).num_attention_heads == 8
    write_temporary(tmp_path / "old", 5)
    older = Checkpoint(seal(tmp_path / "old", 5), 5)
    assert model_of(load_run_config(), older) == load_run_config().model
    write_temporary(tmp_path / "damaged", 5, model={"hidden_size": "wide"})
    with pytest.raises(CheckpointError, match="wrong model"):
        model_of(load_run_config(), Checkpoint(seal(tmp_path / "damaged", 5), 5))
