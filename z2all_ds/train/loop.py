"""The training loop. Optional features are in `hooks/`."""

import math
import time

import torch

from z2all_ds.base.config.stages import RunStage, stage_at
from z2all_ds.base.errors import TrainingError
from z2all_ds.track.fields import BAD_RECORDS_PREFIX, TOKENS_PREFIX
from z2all_ds.train.context import TrainContext
from z2all_ds.train.guard.guarded_steps import StepFigures
from z2all_ds.train.hooks.hook import Step
from z2all_ds.train.hooks.registry import make_hooks
from z2all_ds.train.meters.channel_loss import RankCost, perplexities
from z2all_ds.train.meters.step_cost import Meters, step_line
from z2all_ds.train.meters.time_split import TimeSplit
from z2all_ds.train.processes.lost_peer import defer_peer_errors, leave_together
from z2all_ds.train.schedules import learning_rate
from z2all_ds.zero.engine import set_learning_rate
from z2all_ds.zero.process_group import from_rank_0
from z2all_ds.zero.stage_start import begin_stage

WORDS = {"done": "done", "stopped": "planned stop", "requeue": "stopped on request"}


class Trainer:
    """One rank's training: steps, checkpoints, records."""

    def __init__(self, context: TrainContext) -> None:
        self.context = context
        self.run, self.engine, self.state, self.recorder = context.run, context.engine, context.state, context.recorder
        self.hooks = make_hooks(context)
        self.time_split = TimeSplit(context.engine.device)
        self.checkpoint_seconds = 0.0
        """Seconds since the last step."""
        self.has_ended = False
        """True after a clean finish; in-memory snapshots may be dropped."""
        self.outcome = ""
        self.state.on_checkpoint = self._notify_checkpoint

    @defer_peer_errors()
    def restore(self, resume: str) -> None:
        self.state.resume(resume)

    @defer_peer_errors()
    def run_steps(self) -> str:
        """Train up to the last step and save checkpoints. Return `done`, `stopped` (as planned) or `requeue`."""
        train, state = self.run.train, self.state
        last_step = train.last_step
        stage: RunStage | None = None
        meters = self._meters()
        for hook in self.hooks:
            hook.on_start()
        if state.step < last_step and from_rank_0(self.context.folder.stop_request.exists()):
            return self._stop_on_request()  # asked for before the first step: there is nothing new to save
        while state.step < last_step:
            if stage is not stage_at(state.stages, state.step):
                stage = self._begin_stage(meters)
            lr = learning_rate(state.step, state.stages, *state.rate_settings)
            set_learning_rate(self.engine, lr)
            for hook in self.hooks:
                hook.before_step(state.step + 1)
            step = Step(state.step + 1, stage, lr, self._take_step())
            for hook in self.hooks:
                hook.after_step(step)
            self._record(step, meters)
            for hook in self.hooks:
                hook.after_record(step)
            asked_to_stop = self.context.channel_loss.flag_was_raised
            if state.step != step.number:  # a hook rolled back to a checkpoint
                if asked_to_stop:
                    return self._stop_on_request()
                stage, meters = None, self._meters()
                continue
            state.after_step(step.figures.taken)
            self._save(step, is_last=state.step == last_step or asked_to_stop)
            if asked_to_stop and state.step < last_step:
                return self._stop_on_request()
        if state.is_only_in_memory and self.run.checkpoint.at_end:
            self.checkpoint_seconds += state.save(wait=True)  # the last step was saved, but not written to disk
        return self._end("done" if state.step >= train.steps else "stopped")

    def _stop_on_request(self) -> str:
        self.context.folder.stop_request.unlink(missing_ok=True)
        if self.state.is_only_in_memory and self.run.checkpoint.at_end:
            self.checkpoint_seconds += self.state.save(wait=True)
        return self._end("requeue")

    def _meters(self) -> Meters:
        backends = {choice.op: choice.backend for choice in self.engine.module.ops.choices}
        world_size = self.context.world.world_size
        return Meters(self.run, world_size, self.engine.device, self.state.step, backends["cross_entropy"])

    def _begin_stage(self, meters: Meters) -> RunStage:
        stage = stage_at(self.state.stages, self.state.step)
        begin_stage(stage, self.engine)
        if self.context.graphs:
            self.context.graphs.forget()
        if stage.first_step == self.state.step:
            self.context.steps.guard.forget()  # the loss level changes with the data
        meters.begin_stage(stage)
        if len(self.state.stages) > 1:
            self.recorder.stage(stage, self.state.step)
        return stage

    def _take_step(self) -> StepFigures:
        if self.context.world.is_main and self.context.folder.stop_request.exists():
            self.context.channel_loss.raise_flag()
        self.time_split.begin()
        for _ in range(self.engine.gradient_accumulation_steps()):
            batch = next(self.context.loader)
            self.time_split.done("data_wait")
            self.context.channel_loss.add_bad_records(self.context.loader.stream.take_bad_records())
            self._micro_step(batch)
            self.context.progress.beat(self.state.step)
        self.state.step += 1
        return self.context.steps.finish()

    def _micro_step(self, batch: dict[str, torch.Tensor]) -> None:
        batch = self.context.forward.to_device(batch)
        outputs = self.context.forward(batch)
        self.context.channel_loss.add(outputs.losses, batch["next_tokens"], batch["domain_ids"])
        self.time_split.done("forward")
        # The loss is divided by all positions, not by the counted ones: a constant, so that the gradient of a step
        # does not depend on how its samples are distributed over ranks and micro-batches.
        self.engine.backward(outputs.loss)
        self.time_split.done("backward")
        self.engine.step()
        self.time_split.done("optimizer")

    def _record(self, step: Step, meters: Meters) -> None:
        graphs, channel_loss, figures = self.context.graphs, self.context.channel_loss, step.figures
        parts = self.time_split.take()
        sent, validation = (step.seconds.get(part, 0.0) for part in ("communication", "validation"))
        cost = meters.measure(parts, sent, self.checkpoint_seconds, validation, graphs.pool_bytes if graphs else 0)
        self.checkpoint_seconds = 0.0
        work = max(0.0, parts["forward"] + parts["backward"] + parts["optimizer"] - sent)
        channel_loss.say_cost(RankCost(round(work, 6), round(parts["data_wait"], 6), cost.memory_bytes))
        finite = {name: value for name, value in figures.values.items() if math.isfinite(value)}
        self.recorder.metric(
            {
                "step": step.number,
                "tokens_seen": self.state.tokens_seen(step.number),
                "data_position": self.context.loader.stream.position,
                "loss": None,
                "grad_norm": None,
                **finite,
                **perplexities("", figures.loss, figures.per_domain),
                **{TOKENS_PREFIX + name: count for name, count in channel_loss.tokens.items()},
                **{BAD_RECORDS_PREFIX + name: count for name, count in channel_loss.bad_records.items()},
                **step.record,
                "lr": step.lr,
                "step_taken": figures.taken,
                **cost.as_record(),
                "time_unix": round(time.time(), 3),
            }
        )
        self.recorder.health(step.number - 1, channel_loss.rank_costs)
        steps = self.run.train.steps
        if step.number % self.run.train.log_every == 0 or step.number == steps:
            self.recorder.say_step(step_line(step.number, steps, figures.loss, step.lr, figures.grad_norm, cost))

    def _save(self, step: Step, is_last: bool) -> None:
        checkpoint, loss = self.run.checkpoint, step.figures.loss
        at_end = is_last and checkpoint.at_end
        to_disk = at_end or step.number % checkpoint.every_steps == 0
        if not to_disk and not (checkpoint.snapshot_every and step.number % checkpoint.snapshot_every == 0):
            return
        if math.isfinite(loss):
            self.checkpoint_seconds += self.state.save(to_disk, at_end, step.record.get("validation_loss"))
        elif step.number == self.run.train.steps:
            fix = "Lower optimizer.lr or check the data; the last checkpoint is intact."
            raise TrainingError(f"loss {loss} at the last step", "must be finite", fix)
        # Otherwise the weights may be corrupt: the next checkpoint waits for a step with a finite loss.

    def _notify_checkpoint(self, step: int, name: str) -> None:
        for hook in self.hooks:
            hook.on_checkpoint(step, name)

    def _end(self, outcome: str) -> str:
        self.state.finish()
        for hook in self.hooks:
            hook.on_end(outcome)
        self.has_ended, self.outcome = True, outcome
        self.recorder.end(outcome, self.state.step, WORDS[outcome])
        return outcome

    def close(self) -> None:
        """End threads and close files; also after an error."""
        self.state.close(keeps_memory=not self.has_ended)
        for hook in self.hooks:
            hook.close()
        self.context.loader.close()
        self.recorder.close(waits_for_sinks=self.has_ended, beat=self.context.progress.beat)
        if self.outcome == "requeue":
            leave_together(self.context.world, self.context.progress.beat)
