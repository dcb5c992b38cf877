"""Finds the documents of global samples: of one sample, or of a step of a run.

A sample is reached from the nearest saved state before it (or from the start) by repeating the samples that its lane
took from its domain; no other lane and no other domain is read. A run keeps the small data state of every checkpoint in
its own folder, because checkpoints are deleted and traces are needed later. The state after the sample shows whether it
was read with the present corpus and mixture, which a resume may change.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.config.stages import run_stages, samples_seen, stage_at
from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.base.json_text import load_json
from z2all_ds.base.paths import full_path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.data.data_plan import DataPlan, Lane
from z2all_ds.data.documents import DocumentSpan
from z2all_ds.data.run_spec import open_tokenizer, stream_spec
from z2all_ds.data.state import StreamState, data_changes
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
    allow_data_change: bool = False,
) -> SampleTrace:
    """Trace global sample `sample`; call `advance` with the number of samples passed. `allow_data_change`: the data may
    have changed at the last of `states`, from which the run continued."""
    if sample < 0:
        raise ConfigError(f"sample {sample}", "samples are numbered from 0", "Give a number from 0 on.")
    num_lanes = plan.spec.num_lanes
    begin, plan, lane = _nearest_lane(plan, sample, states, allow_data_change)
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


def _nearest_lane(
    plan: DataPlan, sample: int, states: Sequence[StreamState], allow_data_change: bool
) -> tuple[int, DataPlan, Lane]:
    """Return position, plan and lane of the last state that is not after the sample. Raise if the data of the plan is
    not that of the sample."""
    after = [state for state in states if state["position"] > sample]
    if after:
        following = min(after, key=lambda state: state["position"])
        with explain_content(DataError, f"data state of sample {following['position']}", "is wrong", "Restore it."):
            changes = data_changes(following, plan.state_at(following["position"], {}))
        if changes:
            fix = "Trace it in a copy of the run folder, with the run.yaml and the corpus of that time."
            raise DataError(f"sample {sample}", f"the data has changed since it was read: {'; '.join(changes)}", fix)
    number = sample % plan.spec.num_lanes
    position, lanes = 0, plan.fresh_lanes([number])
    before = [state for state in states if state["position"] <= sample]
    if before:
        nearest = max(before, key=lambda state: state["position"])
        position = nearest["position"]
        plan, lanes = plan.resumed(nearest, [number], allow_data_change or bool(after))
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
    for saved_step, path in folder.data_state_files().items():
        if saved_step > step and not folder.data_states.is_symlink():
            path.unlink()


@dataclass(frozen=True)
class DomainCoverage:
    """How often a run has read a domain."""

    domain: str
    documents: int
    epochs: float
    """Average over the lanes."""
    least: float
    most: float
    """Of a lane: the parts of the domain between them have been read once more or less than others."""


def coverage_of_run(run_dir: Path) -> list[DomainCoverage]:
    """Return the coverage of each domain at the last checkpoint."""
    folder, run, plan, states = _open_run(run_dir)
    if not states:
        raise DataError(f"run folder {run_dir}", "it has no checkpoint yet", "Ask again after the first one.")
    last = max(states, key=lambda state: state["position"])
    with explain_content(DataError, f"{folder.root}", "has a wrong data state", "Remove it, or restore it."):
        plan, lanes = plan.resumed(last, range(run.num_lanes), run.data.allow_change)
        read = plan.epochs_read(lanes)
    return [
        DomainCoverage(domain.name, domain.num_documents, sum(epochs) / len(epochs), min(epochs), max(epochs))
        for domain, epochs in zip(plan.domains, read.values(), strict=True)
    ]


def describe_coverage(domains: Sequence[DomainCoverage]) -> Iterator[str]:
    """Yield a line per domain."""
    for one in domains:
        yield (
            f"{one.domain}: {one.documents:,} documents read {one.epochs:.3f} times"
            f" (lanes: {one.least:.3f} to {one.most:.3f})"
        )


def _open_run(run_dir: Path) -> tuple[RunFolder, RunConfig, DataPlan, list[StreamState]]:
    """Return the folder of a run, its config, its data from the start on, and the states of its checkpoints."""
    folder = RunFolder(full_path(run_dir))
    if not folder.config.is_file():
        raise ConfigError(f"run folder {run_dir}", "it has no run.yaml", "Give the folder of a run that was started.")
    run = load_run_config(str(folder.config))
    return folder, run, DataPlan.open(stream_spec(run), open_tokenizer(run)), _states(folder)


def trace_run(run_dir: Path, samples: Sequence[int], step: int | None = None) -> list[SampleTrace]:
    """Trace global samples of a run, or all samples of one step (the first step is 1)."""
    folder, run, plan, states = _open_run(run_dir)
    if states:  # the last one has all ranges that the run skipped
        with explain_content(DataError, f"{folder.root}", "has a wrong data state", "Remove it, or restore it."):
            plan, _ = plan.resumed(max(states, key=lambda state: state["position"]), [0], allow_data_change=True)
    positions = sorted({0, *(state["position"] for state in states)})
    end = max(positions[-1], plan.schedule.sample_after(samples_seen(run_stages(run), run.train.steps)))
    for sample in samples:
        if sample >= end:
            raise ConfigError(f"sample {sample}", f"the run has samples 0 to {end - 1}", "Give one of these.")
    wanted = [*samples, *(trained_samples(folder, run, plan, step) if step is not None else ())]
    to_pass = sum(sample - max(p for p in positions if p <= sample) for sample in wanted if sample >= 0)
    if not to_pass:
        return [trace_sample(plan, sample, states, allow_data_change=run.data.allow_change) for sample in wanted]
    with progress("tracing", to_pass, "samples") as advance:
        return [trace_sample(plan, sample, states, advance, run.data.allow_change) for sample in wanted]


def trained_samples(folder: RunFolder, run: RunConfig, plan: DataPlan, step: int) -> list[int]:
    """Return the global samples of a step as its records say, since the batch may have changed at a resume; those that
    the config gives, if the step is not recorded."""
    positions = {0: 0}
    if folder.metrics.is_file():
        with folder.metrics.open("rb") as file:
            for line in file:
                with suppress(ValueError, KeyError, TypeError):
                    record = load_json(line)
                    if record["step"] in (step - 1, step):
                        positions[record["step"]] = int(record["data_position"])
    if step - 1 in positions and step in positions:
        return [
            sample for sample in range(positions[step - 1], positions[step]) if not plan.schedule.is_skipped(sample)
        ]
    return samples_of_step(run, plan, step)


def samples_of_step(run: RunConfig, plan: DataPlan, step: int) -> list[int]:
    """Return the numbers of the global samples that a step consumes under this config."""
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
    return open_tokenizer(load_run_config(str(RunFolder(full_path(run_dir)).config)))


def _states(folder: RunFolder) -> list[StreamState]:
    """Return the states of all checkpoints, including deleted ones."""
    files = [*folder.data_state_files().values(), *folder.checkpoints.glob("step_*/data_state.json")]
    found: dict[int, StreamState] = {}
    for file in sorted(files):
        with explain_content(DataError, f"{file}", "is not a data state", "Remove it, or restore it from a copy."):
            state = cast(StreamState, load_json(read_regular(file)))
            if type(state["position"]) is not int or state["position"] < 0:
                raise ValueError(f"position {state['position']!r}")
            found[state["position"]] = state
    return list(found.values())
