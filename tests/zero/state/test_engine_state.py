"""Tests of opaque states, which can be restored only into the same shape."""

import json
from pathlib import Path

import pytest
import torch

from tests.zero.engines import tiny_engine, train
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.world import World
from z2all_ds.checkpoint.layout import STATE_FOLDER, STATE_INDEX
from z2all_ds.checkpoint.memory import SnapshotFolder, new_lineage
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.zero.state.engine_state import read_state
from z2all_ds.zero.state.save import plan_save, save_checkpoint
from z2all_ds.zero.state.snapshots import Snapshots

BY_ROWS = ("deepspeed=zero0", "optimizer.kind=adafactor")


@pytest.mark.parametrize("in_memory", [False, True])
def test_opaque_states_are_restored_only_into_the_same_shape(in_memory: bool, tmp_path: Path) -> None:
    folder = SnapshotFolder(new_lineage())
    try:
        with tiny_engine("cpu", *BY_ROWS) as (engine, _):
            train(engine, 4)
            if in_memory:
                Snapshots(folder, tmp_path, World(), torch.device("cpu")).take(plan_save(engine, 4, {}, {}), None)
                saved = folder.snapshots()[0].path
            else:
                saved = save_checkpoint(engine, tmp_path, 4, {}, {}, Retention(2))
            expected = train(engine, 3)
        with tiny_engine("cpu", *BY_ROWS, "train.seed=5") as (engine, _):
            read_state(engine, saved)
            assert train(engine, 3) == expected
        index = json.loads((saved / STATE_FOLDER / STATE_INDEX).read_text())
        assert index["is_opaque"]
        (saved / STATE_FOLDER / STATE_INDEX).write_text(json.dumps({**index, "ranks": 2}))
        with tiny_engine("cpu", *BY_ROWS) as (engine, _):
            match = "the state of adafactor cannot be repartitioned"
            with pytest.raises(CheckpointError, match=match):
                read_state(engine, saved)
    finally:
        folder.remove()
