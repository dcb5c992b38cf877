"""`z2all checkpoint list`, `show` and `verify`: describes checkpoints without loading them. Does not load torch."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.console import heartbeat, human_bytes
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.paths import expanded
from z2all_ds.base.reports import Shown, Table
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import layout, memory
from z2all_ds.checkpoint.retention import VALIDATION_LOSS


@dataclass(frozen=True)
class CheckpointFacts:
    """The facts about one checkpoint; None for those that cannot be read from a damaged one."""

    path: str
    problem: str | None
    """None for an intact one."""
    size_bytes: int
    step: int
    ranks: int | None = None
    deepspeed: str | None = None
    dtype: str | None = None
    optimizer: str | None = None
    states: tuple[str, ...] | None = None
    """Names of the optimizer states of each weight."""
    parameters: int | None = None
    sample: int | None = None
    """Position in the data: samples read so far."""
    validation_loss: float | None = None
    """None if the step was not validated."""
    in_memory: bool = False
    """Whether it is a snapshot of this machine's ranks in shared memory."""


def inspect(path: Path, verify_checksums: bool) -> list[CheckpointFacts]:
    """Return the facts about all checkpoints of a run folder, oldest first, or about one checkpoint."""
    path = expanded(path)
    folders = layout.step_folders(path / "checkpoints") if (path / "checkpoints").is_dir() else [path]
    if not folders or not folders[0].is_dir() or not layout.is_step_name(folders[0].name):
        raise CheckpointError(f"{path}", "has no checkpoints", "Give a run folder or a step_NNNNNNNN folder in it.")
    on_disk = [_facts(layout.Checkpoint(folder, layout.step_of(folder)), verify_checksums) for folder in folders]
    return [*on_disk, *_in_memory(memory.snapshot_folder(RunFolder(path)), verify_checksums)]


def _in_memory(folder: memory.SnapshotFolder | None, verify_checksums: bool) -> list[CheckpointFacts]:
    """Return the facts about snapshots; those that a run is overwriting are not verified."""
    if folder is None:
        return []
    verify_checksums = verify_checksums and not folder.is_in_use
    return [_facts(snapshot, verify_checksums) for snapshot in reversed(folder.snapshots())]


def require_intact(found: Sequence[CheckpointFacts]) -> None:
    """Raise if a checkpoint is damaged."""
    damaged = [one for one in found if one.problem]
    if damaged:
        raise CheckpointError(
            f"{damaged[0].path}",
            f"{damaged[0].problem}" + (f" (and {len(damaged) - 1} more)" if damaged[1:] else ""),
            "A run skips it and resumes from the one before.",
        )


def describe(found: Sequence[CheckpointFacts]) -> Shown:
    """Yield a table of checkpoints, with a column for validation losses if there are any."""
    is_validated = any(one.validation_loss is not None for one in found)
    rows = []
    for one in found:
        saved_by = f"{one.ranks} x {one.deepspeed}, {one.dtype}" if one.ranks else "?"
        sample = "?" if one.sample is None else f"{one.sample:,}"
        loss = ["-" if one.validation_loss is None else f"{one.validation_loss:.4f}"] if is_validated else []
        health = one.problem or ("in memory" if one.in_memory else "complete")
        rows.append(
            (f"{one.step:,}", human_bytes(one.size_bytes), saved_by, one.optimizer or "?", sample, *loss, health)
        )
    loss = ["validation loss"] if is_validated else []
    yield Table(("step", "size", "saved by", "optimizer", "sample", *loss, "health"), rows, "l")


def describe_one(found: Sequence[CheckpointFacts]) -> Shown:
    """Yield a line for each fact about one checkpoint."""
    (one,) = found
    facts = {**asdict(one), "size_bytes": human_bytes(one.size_bytes), "problem": one.problem or "none"}
    yield from (f"{name.replace('_', ' '):15} {_text(value)}" for name, value in facts.items())


def _text(value: Any) -> str:
    if value is None:
        return "?"
    return f"{value:,}" if isinstance(value, int) else ", ".join(value) if isinstance(value, tuple) else str(value)


def _facts(checkpoint: layout.Checkpoint, verify_checksums: bool) -> CheckpointFacts:
    path, problem = checkpoint.path, None
    with heartbeat(f"verifying checksums of {checkpoint.name}") if verify_checksums else nullcontext():
        if not checkpoint.is_in_memory:
            problem = layout.why_damaged(path, verify_checksums)
        elif verify_checksums:
            problem = memory.why_damaged(checkpoint, verify_checksums)
    try:
        index = checkpoint.state_index
        loss = checkpoint.trainer.get(VALIDATION_LOSS)
        known = {
            "ranks": int(index["ranks"]),
            "deepspeed": str(checkpoint.trainer["deepspeed"]),
            "dtype": str(checkpoint.trainer["dtype"]),
            "optimizer": str(index["optimizer"]),
            "states": tuple(sorted(set(index["pieces"]) - {layout.WEIGHT})),
            "parameters": sum(math.prod(shape) for shape in index["shapes"].values()),
            "sample": int(checkpoint.data_state["position"]),
            "validation_loss": None if loss is None else float(loss),
        }
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        known, problem = {}, problem or f"not readable ({type(error).__name__})"
    return CheckpointFacts(
        str(path), problem, layout.folder_bytes(path), checkpoint.step, in_memory=checkpoint.is_in_memory, **known
    )
