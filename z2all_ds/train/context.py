"""The objects shared by the parts of one rank's training; passed to the loop and to every hook."""

from dataclasses import dataclass
from typing import Any

from z2all_ds.base.config import RunConfig
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.data import BatchLoader
from z2all_ds.train.forward import ForwardPass
from z2all_ds.train.guard.guarded_steps import GuardedSteps
from z2all_ds.train.inputs import RunData
from z2all_ds.train.meters.channel_loss import ChannelLoss
from z2all_ds.train.processes.progress import Progress
from z2all_ds.train.recorder import Recorder
from z2all_ds.train.run_state import RunState
from z2all_ds.train.speed.graphed import GraphedForward


@dataclass(frozen=True)
class TrainContext:
    """Created by `rank.py`."""

    run: RunConfig
    folder: RunFolder
    world: World
    data: RunData
    engine: Any
    """The DeepSpeed engine around the model."""
    loader: BatchLoader
    graphs: GraphedForward | None
    forward: ForwardPass
    channel_loss: ChannelLoss
    steps: GuardedSteps
    """Takes the optimizer steps, and refuses bad ones."""
    state: RunState
    """The step number, and the state saved and restored with it."""
    recorder: Recorder
    progress: Progress
