"""A stop that is requested before the first step of a process, e.g. while torch is loaded, or in a step that ends with
a rollback."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from z2all_ds.base.config import load_run_config
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.train import loop
from z2all_ds.train.hooks.hook import Hook, Step


@pytest.mark.parametrize("is_only_in_memory", [False, True])
def test_no_step_is_taken_and_only_an_unsaved_state_is_saved(
    is_only_in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "from_rank_0", lambda value: value)
    saved: list[bool] = []

    def save(wait: bool) -> float:
        saved.append(wait)
        return 0.5

    trainer: Any = loop.Trainer.__new__(loop.Trainer)
    trainer.run, trainer.hooks, trainer.checkpoint_seconds = load_run_config(), [], 0.0
    trainer.state = SimpleNamespace(step=7, is_only_in_memory=is_only_in_memory, save=save)
    trainer.context = SimpleNamespace(folder=RunFolder(tmp_path))
    trainer._meters, trainer._end = lambda: None, lambda outcome: outcome
    trainer._begin_stage = lambda meters: pytest.fail("a step is begun")
    trainer.context.folder.stop_request.touch()
    assert trainer.run_steps() == "requeue"
    assert (trainer.state.step, saved) == (7, [True] if is_only_in_memory else [])
    assert not trainer.context.folder.stop_request.exists()


def test_a_stop_is_taken_after_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("from_rank_0", "stage_at", "learning_rate", "set_learning_rate"):
        monkeypatch.setattr(loop, name, lambda *values: False)
    trainer: Any = loop.Trainer.__new__(loop.Trainer)
    state = SimpleNamespace(step=7, stages=[], rate_settings=(), is_only_in_memory=False)
    trainer.run, trainer.engine, trainer.state = load_run_config(), None, state

    class RollsBack(Hook):
        def after_record(self, step: Step) -> None:
            assert step.number == 8, "a second step is taken"
            state.step = 5

    def take_step() -> None:
        state.step += 1

    trainer.hooks, trainer._take_step = [RollsBack(trainer)], take_step
    trainer.context = SimpleNamespace(folder=RunFolder(tmp_path), channel_loss=SimpleNamespace(flag_was_raised=True))
    trainer._meters, trainer._begin_stage, trainer._record = lambda: None, lambda meters: None, lambda *step: None
    trainer._end = lambda outcome: outcome
    assert trainer.run_steps() == "requeue"
    assert state.step == 5
