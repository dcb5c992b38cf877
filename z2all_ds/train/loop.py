"""The training loop, to be read from top to bottom."""

import math
import time
from typing import Any

import torch

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import RunStage, stage_at, tokens_seen
from z2all_ds.base.errors import TrainingError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.data import BatchLoader
from z2all_ds.ops.visibility import BORDERS_MULTIPLE, document_borders
from z2all_ds.track.fields import TOKENS_PREFIX
from z2all_ds.train.guard.guarded_steps import GuardedSteps, StepFigures
from z2all_ds.train.guard.spikes import Spikes
from z2all_ds.train.hooks.garbage import GarbageInStep
from z2all_ds.train.hooks.probing import Probing
from z2all_ds.train.hooks.profiling import ProfileWindow
from z2all_ds.train.hooks.validation import Validation
from z2all_ds.train.meters.channel_loss import ChannelLoss, RankCost, perplexities
from z2all_ds.train.meters.communication import CommunicationTime
from z2all_ds.train.meters.step_cost import Meters, step_line
from z2all_ds.train.meters.time_split import TimeSplit
from z2all_ds.train.processes.logs import RankOutput
from z2all_ds.train.processes.lost_peer import leave_together, others_speak_first
from z2all_ds.train.processes.progress import Progress
from z2all_ds.train.processes.startup import Startup
from z2all_ds.train.recorder import Recorder
from z2all_ds.train.run_state import RunState
from z2all_ds.train.schedules import learning_rate
from z2all_ds.train.speed.graphed import GraphedForward
from z2all_ds.zero.ds_config import ResolvedDeepSpeed
from z2all_ds.zero.engine import collectives_of_deepspeed, set_learning_rate
from z2all_ds.zero.stage_start import begin_stage

WORDS = {"done": "done", "stopped": "planned stop", "requeue": "stopped on request"}


class Trainer:
    """One rank's training: steps, checkpoints, records."""

    def __init__(
        self,
        run: RunConfig,
        folder: RunFolder,
        world: World,
        resolved: ResolvedDeepSpeed,
        engine: Any,
        loader: BatchLoader,
        graphs: GraphedForward | None,
        validation: Validation | None,
        probing: Probing | None,
        output: RankOutput,
        startup: Startup,
        progress: Progress,
    ) -> None:
        self.run, self.folder, self.world, self.resolved = run, folder, world, resolved
        self.progress = progress
        self.engine, self.loader, self.graphs = engine, loader, graphs
        self.validation, self.probing = validation, probing
        self.recorder = Recorder(run, folder, world, output, startup)
        self.channel_loss = ChannelLoss(loader.stream.domain_names, engine.device, world)
        self.steps = GuardedSteps(engine, self.channel_loss, run.guard, scales_loss=resolved.dtype == "fp16")
        self.state = RunState(run, folder, world, resolved, engine, loader, self.steps.guard, self.recorder)
        self.spikes = Spikes(run, world, loader, self.steps, self.state, self.recorder)
        self.time_split = TimeSplit(engine.device)
        self.communication = CommunicationTime(collectives_of_deepspeed(), engine.device, world.world_size)
        self.profile = ProfileWindow(run.train.profile, folder, world, engine.device, self.recorder.say)
        self.garbage = GarbageInStep(run.train.collect_every)
        self.checkpoint_seconds = 0.0
        """Since the last step."""
        self.validation_seconds = 0.0
        """Of both, held-out text and probes."""
        self.has_ended = False
        """As it should: nothing is left to be gone on from in memory."""
        self.outcome = ""

    @others_speak_first()
    def restore(self, resume: str) -> None:
        self.state.resume(resume)

    @others_speak_first()
    def run_steps(self) -> str:
        """Trains up to the last step, saving on the way. Returns `done`, `stopped` (as planned) or `requeue`."""
        train, state = self.run.train, self.state
        last_step = min(train.steps, train.stop_at_step or train.steps)
        stage: RunStage | None = None
        meters = self._meters()
        while state.step < last_step:
            if stage is not stage_at(state.stages, state.step):
                stage = self._begin_stage(meters)
            lr = learning_rate(state.step, state.stages, *state.rate_settings)
            set_learning_rate(self.engine, lr)
            self.profile.before_step(state.step + 1)
            figures = self._take_step()
            self.profile.after_step(state.step)
            held_out = self._validate() | self._probe(stage)
            self._record(lr, meters, figures, held_out)
            self.garbage.after_step(state.step)
            if self.spikes.after_step(figures):
                stage, meters = None, self._meters()
                continue
            asked_to_stop = self.channel_loss.flag_was_raised
            state.after_step(figures.taken)
            self._save(figures, held_out.get("validation_loss"), is_last=state.step == last_step or asked_to_stop)
            if asked_to_stop and state.step < last_step:
                self.folder.stop_request.unlink(missing_ok=True)
                return self._end("requeue")
        if state.is_only_in_memory and self.run.checkpoint.at_end:
            self.checkpoint_seconds += state.save(wait=True)  # its last step was saved, but never came onto the disk
        return self._end("done" if state.step >= train.steps else "stopped")

    def _meters(self) -> Meters:
        backends = {choice.op: choice.backend for choice in self.engine.module.ops.choices}
        return Meters(self.run, self.world.world_size, self.engine.device, self.state.step, backends["cross_entropy"])

    def _begin_stage(self, meters: Meters) -> RunStage:
        stage = stage_at(self.state.stages, self.state.step)
        begin_stage(stage, self.engine)
        if self.graphs:
            self.graphs.forget()
        if stage.first_step == self.state.step:
            self.steps.guard.forget()  # other data, another loss
        meters.begin_stage(stage)
        if len(self.state.stages) > 1:
            self.recorder.stage(stage, self.state.step)
        return stage

    def _take_step(self) -> StepFigures:
        if self.world.is_main and self.folder.stop_request.exists():
            self.channel_loss.raise_flag()
        self.spikes.before_step()
        self.time_split.begin()
        for _ in range(self.engine.gradient_accumulation_steps()):
            batch = next(self.loader)
            self.time_split.done("data_wait")
            self._micro_step(batch)
            self.progress.beat(self.state.step)
        self.state.step += 1
        return self.steps.finish()

    def _to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.run.data.document_mask:
            # On the host, where their number is known without waiting.
            batch = {**batch, "cu_seqlens": document_borders(batch["document_ids"], BORDERS_MULTIPLE)}
        return {name: tensor.to(self.engine.device, non_blocking=True) for name, tensor in batch.items()}

    def _forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.engine(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            document_ids=batch["document_ids"] if self.run.data.document_mask else None,
            cu_seqlens=batch.get("cu_seqlens"),
            next_tokens=batch["labels"],
        )

    def _micro_step(self, batch: dict[str, torch.Tensor]) -> None:
        batch = self._to_device(batch)
        outputs = self._forward(batch)
        self.channel_loss.add(outputs.losses, batch["labels"], batch["domain_ids"])
        self.time_split.done("forward")
        # Divided by all positions, not by the counted ones: a constant, so that the gradient of a step does not
        # depend on how its samples are dealt out to ranks and micro-batches.
        self.engine.backward(outputs.loss)
        self.time_split.done("backward")
        self.engine.step()
        self.time_split.done("optimizer")

    def _validate(self) -> dict[str, float]:
        if not self.validation or self.state.step % self.validation.every_steps:
            return {}
        started = time.monotonic()
        found = self.validation.measure(self._held_out_losses)
        self.validation_seconds = time.monotonic() - started
        self.recorder.say(f"validation: loss {found['validation_loss']:.4f}")
        return found

    def _probe(self, stage: RunStage) -> dict[str, float]:
        if not self.probing or not self.probing.is_due(self.state.step):
            return {}
        started = time.monotonic()
        found = self.probing.measure(self._held_out_losses, stage)
        self.validation_seconds += time.monotonic() - started
        self.recorder.say(f"probes: {self.probing.verdict(found, self.state.step)}")
        return found

    def _held_out_losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.progress.beat()
        losses: torch.Tensor = self._forward(self._to_device(batch)).losses
        return losses

    def _record(self, lr: float, meters: Meters, figures: StepFigures, held_out: dict[str, float]) -> None:
        graph_bytes = self.graphs.pool_bytes if self.graphs else 0
        parts = self.time_split.take()
        sent = self.communication.take()
        cost = meters.measure(parts, sent, self.checkpoint_seconds, self.validation_seconds, graph_bytes)
        self.checkpoint_seconds = self.validation_seconds = 0.0
        work = max(0.0, parts["forward"] + parts["backward"] + parts["optimizer"] - sent)
        self.channel_loss.say_cost(RankCost(round(work, 6), round(parts["data_wait"], 6), cost.memory_bytes))
        step, steps = self.state.step, self.run.train.steps
        finite = {name: value for name, value in figures.values.items() if math.isfinite(value)}
        self.recorder.metric(
            {
                "step": step,
                "tokens_seen": tokens_seen(self.state.stages, step),
                "data_position": self.loader.stream.position,
                "loss": None,
                "grad_norm": None,
                **finite,
                **perplexities("", figures.loss, figures.per_domain),
                **{TOKENS_PREFIX + name: count for name, count in self.channel_loss.tokens.items()},
                **held_out,
                "lr": lr,
                "step_taken": figures.taken,
                **cost.as_record(),
                "time_unix": round(time.time(), 3),
            }
        )
        self.recorder.health(step - 1, self.channel_loss.rank_costs)
        if step % self.run.train.log_every == 0 or step == steps:
            self.recorder.say_step(step_line(step, steps, figures.loss, lr, figures.grad_norm, cost))

    def _save(self, figures: StepFigures, validation_loss: float | None, is_last: bool) -> None:
        checkpoint, step = self.run.checkpoint, self.state.step
        at_end = is_last and checkpoint.at_end
        to_disk = at_end or step % checkpoint.every_steps == 0
        if not to_disk and not (checkpoint.snapshot_every and step % checkpoint.snapshot_every == 0):
            return
        if math.isfinite(figures.loss):
            self.checkpoint_seconds += self.state.save(to_disk, at_end, validation_loss)
        elif step == self.run.train.steps:
            fix = "Lower optimizer.lr or look at the data; the last checkpoint is intact."
            raise TrainingError(f"loss {figures.loss} at the last step", "must be finite", fix)
        # Else the weights may be broken: the next checkpoint is that of a step that shows they are not.

    def _end(self, outcome: str) -> str:
        # Whoever asks a run to stop will not wait for an export, which can be made later.
        self.state.finish(waits_for_exports=outcome != "requeue")
        self.has_ended, self.outcome = True, outcome
        self.recorder.end(outcome, self.state.step, WORDS[outcome])
        return outcome

    def close(self) -> None:
        """Ends threads and files; also after an error."""
        self.state.close(keeps_memory=not self.has_ended)
        self.garbage.close()
        self.communication.close()
        self.profile.close()
        self.loader.close()
        if self.validation:
            self.validation.close()
        self.recorder.close(waits_for_sinks=self.has_ended, beat=self.progress.beat)
        if self.outcome == "requeue":
            leave_together(self.world, self.progress.beat)
