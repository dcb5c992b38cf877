"""The training loop, to be read from top to bottom."""

import math
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.restore import check_shape, restore
from z2all_ds.checkpoint.save import save_checkpoint
from z2all_ds.config import RunConfig
from z2all_ds.data import BatchLoader, StreamState, merge_states
from z2all_ds.errors import TrainingError
from z2all_ds.ops.visibility import document_borders
from z2all_ds.run_folder import RunFolder
from z2all_ds.run_stages import RunStage, run_stages, stage_at, tokens_seen
from z2all_ds.track.plots import LOSS_PREFIX
from z2all_ds.track.sinks import WandbSink
from z2all_ds.track.writer import RunWriter, drop_metrics_after
from z2all_ds.train.channel_loss import ChannelLoss
from z2all_ds.train.ds_config import ResolvedDeepSpeed
from z2all_ds.train.engine import set_learning_rate
from z2all_ds.train.graphed import GraphedForward
from z2all_ds.train.logs import RankOutput
from z2all_ds.train.meters import Meters, StepCost, step_line
from z2all_ds.train.peers import others_speak_first
from z2all_ds.train.schedules import learning_rate
from z2all_ds.train.stages import begin_stage, check_stages_past
from z2all_ds.train.traces import drop_states_after, keep_state
from z2all_ds.world import World

BORDERS_MULTIPLE = 16
"""Borders of documents come in lengths of 16, 32 ...: few shapes, as a CUDA graph serves one shape. Kernels pay for the
empty documents added: with 64 on an H200, 2 x 2048 tokens, a backward pass of 0.40 ms instead of 0.32."""


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
        output: RankOutput,
    ) -> None:
        self.run, self.folder, self.world, self.resolved = run, folder, world, resolved
        self.engine, self.loader, self.graphs, self.output = engine, loader, graphs, output
        self.step = 0
        self.stages = run_stages(run)
        self.channel_loss = ChannelLoss(loader.stream.domain_names, engine.device)
        self.shape = {
            "world_size": world.world_size,
            "zero_stage": resolved.stage,
            "offload_optimizer": resolved.offload_optimizer,
            "dtype": resolved.dtype,
        }
        self.writer: RunWriter | None = None
        self.wandb: WandbSink | None = None

    @others_speak_first()
    def restore(self, resume: str) -> None:
        """Goes to where the last checkpoint left off; with `auto` and none there, stays at step 0."""
        checkpoints, verify = self.folder.checkpoints, self.run.checkpoint.verify_checksums
        checkpoint: layout.Checkpoint | None = None
        skipped: list[str] = []
        if resume == "auto":
            checkpoint, skipped = layout.find_latest(checkpoints, verify)
        else:
            checkpoint = None if resume == "never" else layout.open_checkpoint(Path(resume), verify)
            layout.refuse_to_fall_behind(checkpoints, checkpoint.step if checkpoint else 0)
        for line in skipped:
            self.output.say(line)
        if checkpoint:
            check_shape(checkpoint, self.shape)
            restore(self.engine, checkpoint)
            data_state = cast(StreamState, checkpoint.data_state)
            check_stages_past(self.stages, checkpoint.step, data_state)
            self.loader.load_state_dict(data_state, allow_data_change=self.run.data.allow_change)
            self.step = checkpoint.step
            self.output.say(f"resumed from {checkpoint.path.name}")
        if self.world.is_main:
            checkpoints.mkdir(parents=True, exist_ok=True)
            layout.remove_leftovers(checkpoints)
            dropped = drop_metrics_after(self.folder.metrics, self.step)
            drop_states_after(self.folder, self.step)
            self.writer = RunWriter(self.folder, warn=self.output.say)
            self.writer.event("started", step=self.step, **self.shape, deepspeed=self.resolved.name)
            if dropped:
                self.writer.event("metrics_dropped", records=dropped, after_step=self.step)
            self.wandb = WandbSink(self.run.track, self.run, self.output.say)

    @others_speak_first()
    def run_steps(self) -> None:
        """Trains up to the last step (or the planned stop), saving on the way."""
        train = self.run.train
        last_step = min(train.steps, train.stop_at_step or train.steps)
        stage, meters = None, None
        batches = iter(self.loader)
        while self.step < last_step:
            if stage is not stage_at(self.stages, self.step) or meters is None:
                stage = stage_at(self.stages, self.step)
                begin_stage(stage, self.engine)
                if self.graphs:
                    self.graphs.forget()
                meters = Meters(self.run, stage, self.world.world_size, self.engine.device, self.step)
                self._tell_stage(stage)
            lr = learning_rate(self.step, train.steps, self.run.optimizer.lr, self.run.schedule)
            set_learning_rate(self.engine, lr)
            for _ in range(self.resolved.accumulation):
                self._micro_step(next(batches))
            self.step += 1
            self._record(lr, meters.measure(self.graphs.pool_bytes if self.graphs else 0))
            is_last = self.step == last_step and self.run.checkpoint.at_end
            if self.step % self.run.checkpoint.every_steps == 0 or is_last:
                self._save()
        if self.writer:
            self.writer.event("done" if self.step >= train.steps else "stopped", step=self.step)
        self.output.say(f"{'done' if self.step >= train.steps else 'planned stop'} at step {self.step}")

    def _tell_stage(self, stage: RunStage) -> None:
        if len(self.stages) == 1:
            return
        shape = f"{stage.global_batch} x {stage.sequence_length} tokens a step, rope theta {stage.rope_theta:g}"
        self.output.say(f"stage {stage.name}: steps {stage.first_step + 1} to {stage.end_step}, {shape}")
        if self.writer:
            self.writer.event("stage", step=self.step, name=stage.name, sequence_length=stage.sequence_length)

    def _micro_step(self, batch: dict[str, torch.Tensor]) -> None:
        documents = document_borders(batch["document_ids"], BORDERS_MULTIPLE) if self.run.data.document_mask else None
        batch = {name: tensor.to(self.engine.device, non_blocking=True) for name, tensor in batch.items()}
        outputs = self.engine(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            document_ids=batch["document_ids"] if self.run.data.document_mask else None,
            cu_seqlens=None if documents is None else documents.to(self.engine.device, non_blocking=True),
            next_tokens=batch["labels"],
        )
        self.channel_loss.add(outputs.losses, batch["labels"], batch["domain_ids"])
        # Divided by all positions, not by the counted ones: a constant, so that the gradient of a step does not
        # depend on how its samples are dealt out to ranks and micro-batches.
        self.engine.backward(outputs.loss)
        self.engine.step()

    def _record(self, lr: float, cost: StepCost) -> None:
        loss, per_domain = self.channel_loss.take()
        if not math.isfinite(loss):
            raise TrainingError(
                f"loss {loss} at step {self.step}",
                "must be finite",
                "Lower optimizer.lr or look at the data; the last checkpoint is intact.",
            )
        if not self.writer or not self.wandb:
            return
        grad_norm = self.engine.get_global_grad_norm()
        record = {
            "step": self.step,
            "tokens_seen": tokens_seen(self.stages, self.step),
            "loss": loss,
            **{LOSS_PREFIX + name: value for name, value in per_domain.items()},
            "lr": lr,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "step_seconds": round(cost.step_seconds, 6),
            "tokens_per_second": round(cost.tokens_per_second, 1),
            "mfu": cost.mfu,
            "peak_memory_bytes": cost.peak_memory_bytes,
            "time_unix": round(time.time(), 3),
        }
        self.writer.metric(record)
        self.wandb.metric(record)
        if self.step % self.run.train.log_every == 0 or self.step == self.run.train.steps:
            self.output.say(step_line(self.step, self.run.train.steps, loss, lr, record["grad_norm"], cost))

    def _save(self) -> None:
        started = time.monotonic()
        states: list[Any] = [None] * self.world.world_size
        dist.all_gather_object(states, self.loader.state_dict())
        trainer = {**self.shape, "deepspeed": self.resolved.name}
        data_state = dict(merge_states(states))
        keep_last = self.run.checkpoint.keep_last
        path = save_checkpoint(self.engine, self.folder.checkpoints, self.step, trainer, data_state, keep_last)
        seconds = time.monotonic() - started
        if self.writer:
            keep_state(self.folder, self.step, data_state, self.output.say)
            self.writer.event("checkpoint", step=self.step, path=path.name, seconds=round(seconds, 3))
        self.output.say(f"saved {path.name} in {seconds:.1f} s")

    def close(self) -> None:
        """Ends threads and files; also after an error."""
        self.loader.close()
        if self.wandb:
            self.wandb.close()
        if self.writer:
            self.writer.close()
