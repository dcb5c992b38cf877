"""What was in a step of a run: its samples, their documents, and the small states that make looking them up quick.

The state of the data at each checkpoint is also kept by itself (some ten kilobytes), as checkpoints are deleted and the
question comes later.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.config.stages import run_stages, stage_at
from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.data.data_plan import DataPlan
from z2all_ds.data.run_spec import open_tokenizer, stream_spec
from z2all_ds.data.state import StreamState
from z2all_ds.data.trace import SampleTrace, trace_sample
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer

CHARACTERS_SHOWN = 120


def keep_state(folder: RunFolder, step: int, state: dict[str, Any], warn: Callable[[str], None]) -> None:
    """A state that cannot be kept costs a warning: the checkpoint has it."""
    try:
        folder.data_states.mkdir(parents=True, exist_ok=True)
        write_whole(folder.data_states / f"step_{step:08d}.json", json.dumps(state))
    except OSError as error:
        warn(f"the data state of step {step} is not kept for traces ({error.strerror})")


def drop_states_after(folder: RunFolder, step: int) -> None:
    """Those of steps that will be taken again, perhaps with other data."""
    for path in folder.data_states.glob("step_*.json"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()


def trace_run(run_dir: Path, samples: Sequence[int], step: int | None = None) -> list[SampleTrace]:
    """Traces global samples of a run, or all of one step (the first step is 1)."""
    folder = RunFolder(run_dir.expanduser().resolve())
    if not folder.config.is_file():
        raise ConfigError(f"run folder {run_dir}", "it has no run.yaml", "Give the folder of a run that was started.")
    run = load_run_config(str(folder.config))
    plan = DataPlan.open(stream_spec(run), open_tokenizer(run))
    states = _states(folder)
    if states:  # the last one knows what the run has skipped
        plan, _ = plan.going_on(max(states, key=lambda state: state["position"]), [0])
    wanted = [*samples, *(samples_of_step(run, plan, step) if step is not None else ())]
    positions = sorted({0, *(state["position"] for state in states)})
    to_go = sum(sample - max(p for p in positions if p <= sample) for sample in wanted if sample >= 0)
    with progress("tracing", to_go, "samples") as advance:
        return [trace_sample(plan, sample, states, advance) for sample in wanted]


def samples_of_step(run: RunConfig, plan: DataPlan, step: int) -> list[int]:
    """Numbers of the global samples that a step consumes."""
    if not 1 <= step <= run.train.steps:
        raise ConfigError(f"step {step}", f"the run has steps 1 to {run.train.steps}", "Give one of these.")
    stages = run_stages(run)
    now = stage_at(stages, step - 1)
    given = sum(stage.samples for stage in stages[: stages.index(now)])
    given += (step - 1 - now.first_step) * now.global_batch
    return [plan.schedule.sample_after(given + number) for number in range(now.global_batch)]


def lines_of(traces: Sequence[SampleTrace], tokenizer: Z2allTokenizer) -> list[str]:
    """For people: each sample, the places of its documents, and how each begins there."""
    lines = []
    for trace in traces:
        skipped = ", skipped" if trace.skipped else ""
        head = f"sample {trace.sample}: domain {trace.domain}, stage {trace.stage}, lane {trace.lane}{skipped}"
        lines.append(head)
        at = 0
        for piece in trace.pieces:
            size = piece.end - piece.start
            text = tokenizer.decode(trace.token_ids[at : at + min(size, CHARACTERS_SHOWN)])[:CHARACTERS_SHOWN]
            at += size
            lines.append(
                f"  {piece.place.shard}, record {piece.place.record}, epoch {piece.epoch},"
                f" tokens {piece.start} to {piece.end - 1}: {text!r}"
            )
    return lines


def content_of(traces: Sequence[SampleTrace]) -> list[dict[str, Any]]:
    """Returns the traces for JSON, with shard and record of each document as keys of their own."""
    rows = [asdict(trace) for trace in traces]
    for piece in (piece for row in rows for piece in row["pieces"]):
        piece["shard"], piece["record"] = piece.pop("place")
    return rows


def tokenizer_of(run_dir: Path) -> Z2allTokenizer:
    return open_tokenizer(load_run_config(str(RunFolder(run_dir.expanduser().resolve()).config)))


def _states(folder: RunFolder) -> list[StreamState]:
    """Of all checkpoints, deleted ones too."""
    files = [*folder.data_states.glob("step_*.json"), *folder.checkpoints.glob("step_*/data_state.json")]
    by_position: dict[int, StreamState] = {}
    for file in sorted(files):
        state = cast(StreamState, json.loads(file.read_text(encoding="utf-8")))
        by_position[state["position"]] = state
    return list(by_position.values())
