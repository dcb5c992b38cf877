"""Where a run stands: its step, weights, optimizer, data and guard. Saved together, gone back to together."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.restore import restore
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.checkpoint.save import save_checkpoint
from z2all_ds.config import RunConfig
from z2all_ds.data import BatchLoader, StreamState, merge_states
from z2all_ds.errors import CheckpointError
from z2all_ds.run_folder import RunFolder
from z2all_ds.run_stages import RunStage, run_stages, stage_at
from z2all_ds.train.continuity import MOST_TOKENS, Probe, measure, require_continuity
from z2all_ds.train.ds_config import ResolvedDeepSpeed
from z2all_ds.train.recorder import Recorder
from z2all_ds.train.schedules import check_no_jump, rates_around
from z2all_ds.train.spike_guard import SpikeGuard
from z2all_ds.train.stages import begin_stage, check_stages_past
from z2all_ds.world import World

T = TypeVar("T")


class RunState:
    """One rank's part of it; all methods are collective."""

    def __init__(
        self,
        run: RunConfig,
        folder: RunFolder,
        world: World,
        resolved: ResolvedDeepSpeed,
        engine: Any,
        loader: BatchLoader,
        guard: SpikeGuard,
        recorder: Recorder,
    ) -> None:
        self._run, self._folder, self._world, self._resolved = run, folder, world, resolved
        self._engine, self._loader, self._guard, self._recorder = engine, loader, guard, recorder
        self.step = 0
        """Steps done."""
        self.stages = run_stages(run)
        self.rate_settings = run.optimizer.lr, run.schedule
        self._shape = {
            "world_size": world.world_size,
            "zero_stage": resolved.stage,
            "offload_optimizer": resolved.offload_optimizer,
            "dtype": resolved.dtype,
        }

    def resume(self, resume: str) -> None:
        """Goes to where the last checkpoint left off; with `auto` and none there, stays at step 0."""
        checkpoints = self._folder.checkpoints
        checkpoint, damaged = self._found_by_rank_0(lambda: self._pick(resume))
        for line in damaged:
            self._recorder.say(line)
        if checkpoint:
            jump = check_no_jump(checkpoint.trainer, checkpoint.step, self.stages, *self.rate_settings)
            if jump:
                self._recorder.say(jump)
            self._go_to(checkpoint, cast(StreamState, checkpoint.data_state))
            proof = self._proof_of_continuity(checkpoint)
            self._recorder.say(f"resumed from {checkpoint.path.name}{self._other_shape(checkpoint.trainer)}{proof}")
        if self._world.is_main:
            checkpoints.mkdir(parents=True, exist_ok=True)
            layout.remove_leftovers(checkpoints)
        self._recorder.begin(self.step, **self._shape, deepspeed=self._resolved.name)

    def _pick(self, resume: str) -> tuple[layout.Checkpoint | None, list[str]]:
        """What to begin with, and a line for each damaged checkpoint passed over."""
        checkpoints, verify = self._folder.checkpoints, self._run.checkpoint.verify_checksums
        if resume == "auto":
            return layout.find_latest(checkpoints, verify)
        checkpoint = None if resume == "never" else layout.open_checkpoint(Path(resume), verify)
        layout.refuse_to_fall_behind(checkpoints, checkpoint.step if checkpoint else 0)
        return checkpoint, []

    def _found_by_rank_0(self, find: Callable[[], T]) -> T:
        """Checksums of whole checkpoints are compared once, not by every rank."""
        answer: list[Any] = [None, None]
        if self._world.is_main:
            try:
                answer = [find(), None]
            except CheckpointError as error:
                answer = [None, error]
        dist.broadcast_object_list(answer, src=0)
        if answer[1]:
            raise answer[1]
        found: T = answer[0]
        return found

    def _proof_of_continuity(self, checkpoint: layout.Checkpoint) -> str:
        if not self._run.checkpoint.check_continuity or "probe" not in checkpoint.trainer:
            return ""
        saved = Probe(**checkpoint.trainer["probe"])
        off = require_continuity(saved, measure(self._engine, saved.tokens, self._resolved.dtype), checkpoint.path.name)
        return f"; its loss on fixed tokens is {off:.1e} off"

    def _other_shape(self, saved: dict[str, Any]) -> str:
        """What is told of a checkpoint that was made under another JSON or by other ranks."""
        if all(saved.get(key) == value for key, value in self._shape.items()):
            return ""
        return f", saved by {saved['world_size']} ranks under {saved['deepspeed']} ({saved['dtype']})"

    def roll_back(self, first_sample: int, end_sample: int) -> bool:
        """Goes back to the newest checkpoint, and leaves these samples out on the way. False where there is none."""
        checkpoint, _ = self._found_by_rank_0(lambda: self._pick("auto"))
        if checkpoint is None:
            return False
        data_state = cast(StreamState, checkpoint.data_state)
        # What was left out since that checkpoint stays left out.
        skipped_so_far = self._loader.state_dict()["skip"]
        data_state["skip"] = [*skipped_so_far, [max(first_sample, data_state["position"]), end_sample]]
        self._go_to(checkpoint, data_state)
        self._recorder.go_back_to(self.step)
        return True

    def _go_to(self, checkpoint: layout.Checkpoint, data_state: StreamState) -> None:
        restore(self._engine, checkpoint)
        check_stages_past(self.stages, checkpoint.step, data_state)
        self._loader.load_state_dict(data_state, allow_data_change=self._run.data.allow_change)
        self._guard.load_state_dict(checkpoint.trainer.get("guard", self._guard.state_dict()))
        self.step = checkpoint.step
        begin_stage(self._stage_that_ended(), self._engine)

    def _stage_that_ended(self) -> RunStage:
        """Of the last step done: it made the weights. The next step may be another's."""
        return stage_at(self.stages, max(self.step - 1, 0))

    def save(self) -> float:
        """Returns the seconds it took."""
        started = time.monotonic()
        rates = rates_around(self.step, self.stages, *self.rate_settings)
        probe_tokens = min(self._stage_that_ended().sequence_length, MOST_TOKENS)
        trainer = {
            **self._shape,
            "deepspeed": self._resolved.name,
            **rates,
            "guard": self._guard.state_dict(),
            "probe": measure(self._engine, probe_tokens, self._resolved.dtype).as_record(),
        }
        data_state = dict(self.of_all_ranks(self._loader.state_dict()))
        retention = Retention.of(self._run.checkpoint)
        path = save_checkpoint(self._engine, self._folder.checkpoints, self.step, trainer, data_state, retention)
        seconds = time.monotonic() - started
        self._recorder.checkpoint(self.step, path.name, seconds, data_state)
        return seconds

    def of_all_ranks(self, data_state: StreamState) -> StreamState:
        """The whole state of the data, from each rank's part of it."""
        states: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(states, data_state)
        return merge_states(states)
