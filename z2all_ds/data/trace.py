"""Finds the documents of global samples: of one sample, or of a step of a run.

A sample is reached from the nearest saved state before it (or from the start) by repeating the samples that its lane
took from its domain; no other lane and no other domain is read. A run keeps the small data state of every checkpoint in
its own folder, because checkpoints are deleted and traces are needed later.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.config.stages import run_stages, stage_at
from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.data.data_plan import DataPlan, Lane
from z2all_ds.data.documents import DocumentSpan
from z2all_ds.data.run_spec import open_tokenizer, stream_spec
from z2all_ds.data.state import StreamState
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer

CHARACTERS_SHOWN = 120


@dataclass(frozen=True)
class TracedPiece:
    """Tokens `start` to `end` - 1 of one document."""

    shard: str
    record: int
    document_index: int
    """Number within its domain."""
    epoch: int
    start: int
    end: int


@dataclass(frozen=True)
class SampleTrace:
    """The origin of a sample."""

    sample: int
    lane: int
    stage: str
    domain: str
    skipped: bool
    from_sample: int
    """Position of the state from which it was reached."""
    pieces: list[TracedPiece]
    token_ids: list[int]


def trace_sample(
    plan: DataPlan,
    sample: int,
    states: Sequence[StreamState] = (),
    advance: Callable[[int], None] = lambda samples: None,
) -> SampleTrace:
    """Trace global sample `sample`; call `advance` with the number of samples passed."""
    if sample < 0:
        raise ConfigError(f"sample {sample}", "samples are numbered from 0", "Give a number from 0 on.")
    num_lanes = plan.spec.num_lanes
    begin, plan, lane = _nearest_lane(plan, sample, states)
    domain_index = plan.schedule.stage_of(sample).mixture.domain_of(sample)
    for number in range(begin + (sample - begin) % num_lanes, sample, num_lanes):
        stage = plan.schedule.stage_of(number)
        if stage.mixture.domain_of(number) == domain_index:
            lane.next_sample(number, stage)
        advance(num_lanes)
    stage = plan.schedule.stage_of(sample)
    spans: list[DocumentSpan] = []
    made = lane.next_sample(sample, stage, spans)
    domain = plan.domains[domain_index]
    return SampleTrace(
        sample,
        lane.number,
        stage.name,
        domain.name,
        plan.schedule.is_skipped(sample),
        begin,
        [
            TracedPiece(*domain.location(span.document_index), span.document_index, span.epoch, span.start, span.end)
            for span in spans
        ],
        made.tokens[: stage.sequence_length - made.num_padding].tolist(),
    )


def _nearest_lane(plan: DataPlan, sample: int, states: Sequence[StreamState]) -> tuple[int, DataPlan, Lane]:
    """Return position, plan and lane of the last state that is not after the sample."""
    number = sample % plan.spec.num_lanes
    position, lanes = 0, plan.fresh_lanes([number])
    before = [state for state in states if state["position"] <= sample]
    if before:
        nearest = max(before, key=lambda state: state["position"])
        position = nearest["position"]
        plan, lanes = plan.resumed(nearest, [number])
    return position, plan, Lane(plan, number, lanes[number])


# Runs


def keep_state(folder: RunFolder, step: int, state: dict[str, Any], warn: Callable[[str], None]) -> None:
    """Save the data state of a checkpoint for traces; only warns on failure, as the checkpoint has it too."""
    try:
        folder.data_states.mkdir(parents=True, exist_ok=True)
        write_whole(folder.data_states / f"step_{step:08d}.json", json.dumps(state))
    except OSError as error:
        warn(f"the data state of step {step} is not kept for traces ({error.strerror})")


def drop_states_after(folder: RunFolder, step: int) -> None:
    """Remove the states of steps that will be repeated, possibly with other data."""
    for path in folder.data_states.glob("step_*.json"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()


def trace_run(run_dir: Path, samples: Sequence[int], step: int | None = None) -> list[SampleTrace]:
    """Trace global samples of a run, or all samples of one step (the first step is 1)."""
    folder = RunFolder(run_dir.expanduser().resolve())
    if not folder.config.is_file():
        raise ConfigError(f"run folder {run_dir}", "it has no run.yaml", "Give the folder of a run that was started.")
    run = load_run_config(str(folder.config))
    plan = DataPlan.open(stream_spec(run), open_tokenizer(run))
    states = _states(folder)
    if states:  # the last one has all ranges that the run skipped
        plan, _ = plan.resumed(max(states, key=lambda state: state["position"]), [0])
    wanted = [*samples, *(samples_of_step(run, plan, step) if step is not None else ())]
    positions = sorted({0, *(state["position"] for state in states)})
    to_pass = sum(sample - max(p for p in positions if p <= sample) for sample in wanted if sample >= 0)
    with progress("tracing", to_pass, "samples") as advance:
        return [trace_sample(plan, sample, states, advance) for sample in wanted]


def samples_of_step(run: RunConfig, plan: DataPlan, step: int) -> list[int]:
    """Return the numbers of the global samples that a step consumes."""
    if not 1 <= step <= run.train.steps:
        raise ConfigError(f"step {step}", f"the run has steps 1 to {run.train.steps}", "Give one of these.")
    stages = run_stages(run)
    now = stage_at(stages, step - 1)
    used = sum(stage.samples for stage in stages[: stages.index(now)]) + (step - 1 - now.first_step) * now.global_batch
    return [plan.schedule.sample_after(used + number) for number in range(now.global_batch)]


def describe(traces: Sequence[SampleTrace], tokenizer: Z2allTokenizer) -> Iterator[str]:
    """Yield a line per sample, and one per document with its location and the beginning of its text."""
    for trace in traces:
        skipped = ", skipped" if trace.skipped else ""
        yield f"sample {trace.sample}: domain {trace.domain}, stage {trace.stage}, lane {trace.lane}{skipped}"
        begin = 0
        for piece in trace.pieces:
            size = piece.end - piece.start
            text = tokenizer.decode(trace.token_ids[begin : begin + min(size, CHARACTERS_SHOWN)])[:CHARACTERS_SHOWN]
            begin += size
            yield (
                f"  {piece.shard}, record {piece.record}, epoch {piece.epoch},"
                f" tokens {piece.start} to {piece.end - 1}: {text!r}"
            )


def tokenizer_of(run_dir: Path) -> Z2allTokenizer:
    return open_tokenizer(load_run_config(str(RunFolder(run_dir.expanduser().resolve()).config)))


def _states(folder: RunFolder) -> list[StreamState]:
    """Return the states of all checkpoints, including deleted ones."""
    files = [*folder.data_states.glob("step_*.json"), *folder.checkpoints.glob("step_*/data_state.json")]
    found = [cast(StreamState, json.loads(file.read_text(encoding="utf-8"))) for file in sorted(files)]
    return list({state["position"]: state for state in found}.values())
