"""Runs probes (`evaluate/probes.py`) during training, without affecting the training.

Every rank runs all of them: they are few, and ZeRO-3 needs all ranks in every forward pass. They are packed like
training samples, in batches of the same shape, so that nothing is recompiled. With document masking, many probes share
one sample; without it, each probe has its own sample, since it must not see the others.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import RunStage
from z2all_ds.checkpoint.rng import rng_state, set_rng_state
from z2all_ds.data.packing import Sample, best_fit, make_batch
from z2all_ds.evaluate.probe_rows import ProbeRow, expectations_met, read_value, summary_line
from z2all_ds.track.fields import PROBE_PREFIX
from z2all_ds.train.context import TrainContext
from z2all_ds.train.hooks.hook import Hook, Step
from z2all_ds.train.inputs import probes_asked


class RowPosition(NamedTuple):
    """Position of a row of tokens: the sample, and the first position in it."""

    sample: int
    start: int


class Probing(Hook):
    """The probes of a run, on one rank."""

    def __init__(self, context: TrainContext) -> None:
        super().__init__(context)
        self._asked = probes_asked(context.run, context.data.tokenizer)
        self._rows = [row for one in self._asked for row in one.rows]

    @classmethod
    def is_wanted(cls, run: RunConfig) -> bool:
        return bool(run.probes.file)

    def after_step(self, step: Step) -> None:
        run = self.context.run
        if step.number % run.probes.every_steps and step.number != run.train.steps:
            return
        with step.timed("validation"):
            found = self._measure(step.stage)
        step.record.update(found)
        self.context.recorder.say(f"probes: {self._verdict(found, step.number)}")

    def _measure(self, stage: RunStage) -> dict[str, float]:
        """Return values by the names of metrics.jsonl, without NaNs. All ranks must call it."""
        shares_samples, padding_id = self.context.run.data.document_mask, self.context.data.tokenizer.pad_id
        samples, places = pack(self._rows, stage.sequence_length, padding_id, shares_samples)
        samples += samples[-1:] * (-len(samples) % stage.micro_batch)
        randomness = rng_state()
        self.context.engine.eval()
        losses = []
        try:
            with torch.no_grad():
                for first in range(0, len(samples), stage.micro_batch):
                    batch = make_batch(samples[first : first + stage.micro_batch])
                    losses.append(self.context.forward.losses(batch).double().cpu())
        finally:
            self.context.engine.train()
            set_rng_state(randomness)
        of_samples = torch.cat(losses)
        scored = iter([_scored(of_samples, row, place) for row, place in zip(self._rows, places, strict=True)])
        values = {one.probe.name: read_value(one, [next(scored) for _ in one.rows]).value for one in self._asked}
        return {f"{PROBE_PREFIX}{name}": value for name, value in values.items() if math.isfinite(value)}

    def _verdict(self, found: dict[str, float], step: int) -> str:
        """Return how many probes are as expected, for the log."""
        values = {name.removeprefix(PROBE_PREFIX): value for name, value in found.items()}
        return summary_line(expectations_met(values, [one.probe for one in self._asked], step), len(values))


def pack(
    rows: Sequence[ProbeRow], sequence_length: int, padding_id: int, shares_samples: bool
) -> tuple[list[Sample], list[RowPosition]]:
    """Pack each row as a separate document; return the samples and the position of each row."""
    lengths = [len(row.ids) for row in rows]
    bins = best_fit(lengths, sequence_length) if shares_samples else [[number] for number in range(len(rows))]
    places: dict[int, RowPosition] = {}
    samples = []
    for sample, numbers in enumerate(bins):
        tokens = np.full(sequence_length + 1, padding_id, dtype=np.int32)
        start = 0
        for number in numbers:
            places[number] = RowPosition(sample, start)
            tokens[start : start + lengths[number]] = rows[number].ids
            start += lengths[number]
        empty = sequence_length - start
        pieces = [lengths[number] for number in numbers] + ([empty] if empty else [])
        samples.append(Sample(tokens, pieces, 0, continues=False, num_padding=empty))
    return samples, [places[number] for number in range(len(rows))]


def _scored(losses: torch.Tensor, row: ProbeRow, place: RowPosition) -> list[float]:
    """Return log-probabilities of the row's scored tokens; the loss of a token is one position before it."""
    first, end = place.start + row.first_scored - 1, place.start + len(row.ids) - 1
    found: list[float] = (-losses[place.sample, first:end]).tolist()
    return found
