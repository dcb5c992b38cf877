"""Loss and perplexity on held-out text during training, per domain, without affecting the training.

The samples are the same every time: the first ones of a separate stream over a separate corpus. Weights, optimizer,
order of the training data and random numbers are not changed.
"""

import torch

from z2all_ds.base.config import RunConfig
from z2all_ds.checkpoint.rng import rng_state, set_rng_state
from z2all_ds.data import BatchLoader, PackedStream
from z2all_ds.data.data_plan import StreamSpec
from z2all_ds.data.run_spec import corpus_location
from z2all_ds.data.stages import StageSpec
from z2all_ds.track.fields import LOSS_PREFIX
from z2all_ds.train.context import TrainContext
from z2all_ds.train.hooks.hook import Hook, Step
from z2all_ds.train.inputs import validation_batches
from z2all_ds.train.meters.channel_loss import ChannelLoss, perplexities


class Validation(Hook):
    """Held-out samples of one rank."""

    def __init__(self, context: TrainContext) -> None:
        super().__init__(context)
        run, world = context.run, context.world
        spec = StreamSpec(
            corpus_location(run.validation.corpus),
            [StageSpec(run.train.sequence_length, name="validation")],
            run.train.seed,
            run.num_lanes,
            run.data.packing,
            even_epochs=False,
            begin_of_text=run.data.begin_of_text,
        )
        stream = PackedStream(spec, context.data.tokenizer, world.rank, world.world_size, context.data.held_out)
        self._loader = BatchLoader(stream, run.train.micro_batch)
        self._first = stream.plan.state_at(0, stream.plan.fresh_lanes(range(run.num_lanes)))
        self._batches = validation_batches(run, world.world_size)
        self._channel_loss = ChannelLoss(self._loader.stream.domain_names, context.engine.device)

    @classmethod
    def is_wanted(cls, run: RunConfig) -> bool:
        return bool(run.validation.corpus)

    def after_step(self, step: Step) -> None:
        if step.number % self.context.run.validation.every_steps == 0:
            with step.timed("validation"):
                step.record.update(self._measure())
            self.context.recorder.say(f"validation: loss {step.record['validation_loss']:.4f}")

    def _measure(self) -> dict[str, float]:
        """Return values by the names of metrics.jsonl. All ranks must call it."""
        engine, randomness = self.context.engine, rng_state()
        engine.eval()
        try:
            with torch.no_grad():
                for _ in range(self._batches):
                    batch = next(self._loader)
                    losses = self.context.forward.losses(batch)
                    device = losses.device
                    self._channel_loss.add(losses, batch["next_tokens"].to(device), batch["domain_ids"].to(device))
        finally:
            engine.train()
            set_rng_state(randomness)
            self._loader.load_state_dict(self._first)
        loss, per_domain = self._channel_loss.take()
        return {
            "validation_loss": loss,
            **{f"validation_{LOSS_PREFIX}{name}": value for name, value in per_domain.items()},
            **perplexities("validation_", loss, per_domain),
        }

    def close(self) -> None:
        self._loader.close()
