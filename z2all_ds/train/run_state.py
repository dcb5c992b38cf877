"""State of a run: its step, weights, optimizer, data and guard. Saved together and restored together."""

import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import RunStage, run_stages, stage_at, tokens_seen
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.fixed_tokens import FP8, MOST_TOKENS, PROBE, stored_probe
from z2all_ds.checkpoint.retention import VALIDATION_LOSS, held
from z2all_ds.checkpoint.settings import changed_settings, recorded_settings
from z2all_ds.data import BatchLoader, StreamState, merge_states
from z2all_ds.data.state import data_changes
from z2all_ds.evaluate.probes import load_probes
from z2all_ds.train.continuity import measure, require_continuity
from z2all_ds.train.guard.spike_guard import SpikeGuard
from z2all_ds.train.recorder import Recorder
from z2all_ds.train.schedules import check_no_jump, rates_around
from z2all_ds.zero.ds_config import ResolvedDeepSpeed
from z2all_ds.zero.process_group import from_rank_0, gathered
from z2all_ds.zero.stage_start import begin_stage, check_stages_past
from z2all_ds.zero.state.manager import CheckpointManager
from z2all_ds.zero.state.save import restore

T = TypeVar("T")


class RunState:
    """One rank's part of the state; all methods are collective."""

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
        self._manager = CheckpointManager(folder, run.checkpoint, world, engine.device, recorder.say)
        self.on_checkpoint: Callable[[int, str], None] = lambda step, name: None
        """Called with step and name of each checkpoint that is complete on disk."""
        self._more_tokens = 0
        """Tokens seen in addition to those that the config gives: earlier steps had another batch."""
        self.on_accepted: Callable[[], None] = lambda: None
        """Called when a start is accepted, before anything of it is recorded."""
        self.is_only_in_memory = False
        """Whether the run started from an in-memory snapshot and has saved nothing since."""
        self._shape = {
            "world_size": world.world_size,
            "zero_stage": resolved.stage,
            "offload_optimizer": resolved.offload_optimizer,
            "dtype": resolved.dtype,
        }

    def tokens_seen(self, step: int) -> int:
        """Return the tokens of the first `step` steps, also if the batch has changed at a resume."""
        return tokens_seen(self.stages, step) + self._more_tokens

    def resume(self, resume: str) -> None:
        """Restore the last checkpoint; with `auto` and no checkpoint, stay at step 0."""
        checkpoints, changes, data_changed = self._folder.checkpoints, {}, list[str]()
        jump: str | None = None
        checkpoint, lines = self._newest() if resume == "auto" else (self._asked_for(resume), [])
        for line in lines:
            self._recorder.say(line)
        if checkpoint:
            changes = changed_settings(checkpoint, self._run, stage_at(self.stages, max(checkpoint.step - 1, 0)))
            jump = check_no_jump(checkpoint.trainer, checkpoint.step, self.stages, *self.rate_settings)
            if jump:
                self._recorder.say(jump)
            data_state = cast(StreamState, checkpoint.data_state)
            self._go_to(checkpoint, data_state)
            data_changed = data_changes(data_state, self._loader.state_dict())
            proof = self._check_continuity(checkpoint)
            self._recorder.say(f"resumed from {checkpoint.name}{self._other_shape(checkpoint.trainer)}{proof}")
            if changes:
                described = (f"{name} {before} -> {now}" for name, (before, now) in changes.items())
                self._recorder.say(f"settings changed since then: {', '.join(described)}")
            if data_changed:
                self._recorder.say(f"data changed since then: {'; '.join(data_changed)}")
        self._manager.begin_lineage(resumes_from_memory=self.is_only_in_memory)
        if self._world.is_main:
            checkpoints.mkdir(parents=True, exist_ok=True)
            for leftover in layout.remove_leftovers(checkpoints):
                self._recorder.say(f"removed {leftover}: its save was not finished")
        self.on_accepted()
        changed = {"changed_settings": changes, "changed_data": data_changed}
        facts = {**self._shape, **self._facts(), **{name: value for name, value in changed.items() if value}}
        facts |= {"learning_rate_jump": jump} if jump else {}
        self._recorder.begin(self.step, deepspeed=self._resolved.name, **facts)

    def _facts(self) -> dict[str, Any]:
        """Return facts for the record of the start."""
        data_stages = self._loader.stream.plan.schedule.stages  # one per run stage
        mixture = [
            {"name": stage.name, "first_step": stage.first_step, "shares": dict(data_stage.shares)}
            for stage, data_stage in zip(self.stages, data_stages, strict=True)
        ]
        hosts = gathered(socket.gethostname())
        probes = load_probes(self._run.probes.file) if self._run.probes.file else []
        asked = [probe.definition for probe in probes]
        return {"steps": self._run.train.steps, "hosts": hosts, "mixture": mixture, "probes": asked}

    def _newest(self) -> tuple[layout.Checkpoint | None, list[str]]:
        """Return the checkpoint to resume from, and a line for each damaged checkpoint that was skipped."""
        checkpoints, verify = self._folder.checkpoints, self._run.checkpoint.verify_checksums
        in_memory = self._manager.newest_in_memory(self._engine)
        if in_memory and in_memory.step >= from_rank_0(layout.newest_step(checkpoints)):
            return in_memory, []  # the disk is not read
        on_disk, damaged = self._found_by_rank_0(lambda: layout.find_latest(checkpoints, verify))
        if in_memory and not (on_disk and on_disk.step >= in_memory.step):
            return in_memory, damaged
        return on_disk, damaged

    def _asked_for(self, resume: str) -> layout.Checkpoint | None:
        checkpoints, verify = self._folder.checkpoints, self._run.checkpoint.verify_checksums
        return self._found_by_rank_0(lambda: layout.asked_checkpoint(checkpoints, resume, verify))

    def _found_by_rank_0(self, find: Callable[[], T]) -> T:
        """Call `find` on rank 0 only: checksums of whole checkpoints are compared once, not by every rank."""
        found: T | None = None
        error: CheckpointError | None = None
        if self._world.is_main:
            try:
                found = find()
            except CheckpointError as caught:
                error = caught
        found, error = from_rank_0((found, error))
        if error:
            raise error
        return cast(T, found)

    def _check_continuity(self, checkpoint: layout.Checkpoint) -> str:
        saved = stored_probe(checkpoint)
        section = self._run.checkpoint
        if saved is None or not section.check_continuity or section.allow_model_change:
            return ""
        off = require_continuity(saved, measure(self._engine, saved.tokens, self._probe_dtype), checkpoint.name)
        return f"; its loss on fixed tokens differs by {off:.1e}"

    def _other_shape(self, saved: dict[str, Any]) -> str:
        """Return a note on a checkpoint that was saved under another JSON or by a different number of ranks."""
        if all(saved.get(key) == value for key, value in self._shape.items()):
            return ""
        return f", saved by {saved['world_size']} ranks under {saved['deepspeed']} ({saved['dtype']})"

    def roll_back(self, first_sample: int, end_sample: int, oldest_step: int = 0) -> bool:
        """Restore the newest checkpoint and skip these samples from there on. Return False if there is none from
        `oldest_step` on."""
        checkpoint, _ = self._newest()
        if checkpoint is None or checkpoint.step < oldest_step:
            return False
        self._guard.will_repeat(self.step - checkpoint.step)
        data_state = cast(StreamState, checkpoint.data_state)
        # Samples skipped since that checkpoint stay skipped.
        skipped_so_far = self._loader.state_dict()["skip"]
        data_state["skip"] = [*skipped_so_far, [max(first_sample, data_state["position"]), end_sample]]
        self._go_to(checkpoint, data_state)
        self._recorder.go_back_to(self.step)
        return True

    def _go_to(self, checkpoint: layout.Checkpoint, data_state: StreamState) -> None:
        is_read = self._world.is_main and not checkpoint.is_in_memory
        with held(checkpoint.path) if is_read else nullcontext():  # keeps the retention of another run from deleting it
            restore(self._engine, checkpoint)
        check_stages_past(self.stages, checkpoint.step, data_state)
        self._loader.load_state_dict(data_state, allow_data_change=self._run.data.allow_change)
        self._guard.load_state_dict(checkpoint.trainer.get("guard", self._guard.state_dict()))
        self.step, self.is_only_in_memory = checkpoint.step, checkpoint.is_in_memory
        by_config = tokens_seen(self.stages, self.step)
        self._more_tokens = checkpoint.trainer.get("tokens_seen", by_config) - by_config
        begin_stage(self._stage_that_ended(), self._engine)

    def _stage_that_ended(self) -> RunStage:
        """Return the stage of the last step, which produced the weights. The next step may be in another stage."""
        return stage_at(self.stages, max(self.step - 1, 0))

    def save(self, to_disk: bool = True, wait: bool = False, validation_loss: float | None = None) -> float:
        """Save the state; return the seconds for which training was paused."""
        started = time.monotonic()
        trainer = self._trainer() | ({} if validation_loss is None else {VALIDATION_LOSS: validation_loss})
        data_state = dict(self.of_all_ranks(self._loader.state_dict()))
        is_saved = self._manager.save(self._engine, self.step, trainer, data_state, to_disk, wait)
        seconds = time.monotonic() - started
        self.is_only_in_memory = False
        if is_saved:
            self._recorder.saved(self.step, seconds)
        self.tell_news()
        return seconds

    def after_step(self, taken: bool) -> None:
        """Prepare saves during the first steps, and report checkpoints that are on disk."""
        if taken and self._saves_on_the_way:
            self._manager.prepare(self._engine)
        self.tell_news()

    def tell_news(self) -> None:
        """Report checkpoints that are now on disk."""
        for saved in self._manager.completed_saves():
            name = layout.step_name(saved.step)
            self._recorder.on_disk(saved.step, name, saved.seconds, saved.data_state)
            self.on_checkpoint(saved.step, name)

    def finish(self) -> None:
        """Wait at the end of the run until all saves are on disk."""
        self._manager.finish()
        self.tell_news()

    def let_saves_arrive(self) -> None:
        """Let pending saves finish before this rank fails; not collective."""
        self._manager.wait_for_pending_write()
        self.tell_news()

    def close(self, keeps_memory: bool) -> None:
        self._manager.close(keeps_memory)

    @property
    def _saves_on_the_way(self) -> bool:
        """Whether the run saves before its end; at the end, nothing can overlap with the write."""
        checkpoint = self._run.checkpoint
        return checkpoint.every_steps < self._run.train.last_step or checkpoint.snapshot_every > 0

    @property
    def _probe_dtype(self) -> str:
        """Precision of the loss on fixed tokens: that of the products."""
        return FP8 if self._run.ops.linear.startswith(FP8) else self._resolved.dtype

    def _trainer(self) -> dict[str, Any]:
        probe_tokens = min(self._stage_that_ended().sequence_length, MOST_TOKENS)
        return {
            **self._shape,
            "deepspeed": self._resolved.name,
            "tokens_seen": self.tokens_seen(self.step),
            **recorded_settings(self._run, self._stage_that_ended()),
            **rates_around(self.step, self.stages, *self.rate_settings),
            "guard": self._guard.state_dict(),
            PROBE: measure(self._engine, probe_tokens, self._probe_dtype).as_record(),
        }

    def of_all_ranks(self, data_state: StreamState) -> StreamState:
        """Return the complete data state, merged from the parts of all ranks."""
        return merge_states(gathered(data_state))
