"""The settings that a checkpoint stores: another model is refused, other changes are listed."""

from pathlib import Path

import pytest

from tests.checkpoint.making import make, seal, write_temporary
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.layout import Checkpoint
from z2all_ds.checkpoint.settings import changed_settings, model_of, recorded_settings, with_saved_lanes


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
        "optimizer.lr=0.001",
        "schedule.min_ratio=0.2",
        "guard.policy=warn",
        "data.skip_samples=[[16,40]]",
        "data.on_bad_record=skip",
        "ops.linear=fp8",
    ]
    run = load_run_config(None, changes)
    found = changed_settings(checkpoint, run, run_stages(run)[0])
    assert sorted(found) == sorted(change.partition("=")[0] for change in changes)
    assert found["data.document_mask"] == [True, False]


@pytest.mark.parametrize("change", ["train.global_batch=64", "stages=[{name: a, global_batch: 64}]"])
def test_another_batch_is_listed_however_it_is_set(change: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, load_run_config(None, ["train.global_batch=32"]))
    run = load_run_config(None, ["train.global_batch=32", change])
    assert changed_settings(checkpoint, run, run_stages(run)[0]) == {"stage.global_batch": [32, 64]}


def test_settings_that_an_earlier_version_did_not_store_are_not_listed(tmp_path: Path) -> None:
    """It stored the batch of the run, which may differ from that of the stage."""
    settings = {"optimizer.eps": 1e-8, "train.global_batch": 32, "train.sequence_length": 2048}
    write_temporary(tmp_path, 5, settings=settings)
    run = load_run_config(None, ["optimizer.lr=0.001", "train.global_batch=64", "optimizer.eps=1e-9"])
    found = changed_settings(Checkpoint(seal(tmp_path, 5), 5), run, run_stages(run)[0])
    assert found == {"optimizer.eps": [1e-8, 1e-9]}


def test_the_lanes_are_those_of_the_checkpoint_unless_they_are_set(tmp_path: Path) -> None:
    def lanes(resume: str, *overrides: str) -> int:
        return with_saved_lanes(load_run_config(None, [f"run_dir={tmp_path}", *overrides]), resume).num_lanes

    batch = "train.global_batch=448"
    assert lanes("auto", batch) == lanes("never", batch) == lanes("nowhere", batch) == 448
    checkpoint = make(tmp_path / "checkpoints", 5)[0]
    assert lanes("auto", batch) == 448  # its data state does not say
    (checkpoint / "data_state.json").write_text('{"num_lanes": 512}')
    assert lanes("auto", batch) == lanes(str(checkpoint), batch) == 512
    assert lanes("never", batch) == 448 and lanes("auto", batch, "data.num_lanes=64") == 64


def test_the_model_is_that_of_the_checkpoint_and_without_one_that_of_the_run(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "new", load_run_config(None, ["model.num_attention_heads=8"]))
    assert model_of(load_run_config(), checkpoint).num_attention_heads == 8
    write_temporary(tmp_path / "old", 5)
    older = Checkpoint(seal(tmp_path / "old", 5), 5)
    assert model_of(load_run_config(), older) == load_run_config().model
    write_temporary(tmp_path / "damaged", 5, model={"hidden_size": "wide"})
    with pytest.raises(CheckpointError, match="wrong model"):
        model_of(load_run_config(), Checkpoint(seal(tmp_path / "damaged", 5), 5))
