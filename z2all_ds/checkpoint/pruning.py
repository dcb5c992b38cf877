"""`z2all checkpoint prune`: applies retention to a run folder that no job is using. Does not load torch."""

import os
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.sections import CheckpointSection
from z2all_ds.base.console import heartbeat, human_bytes
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.paths import full_path
from z2all_ds.base.reports import Shown, Table
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import layout, memory
from z2all_ds.checkpoint.retention import Retention, remove, retention_reasons


@dataclass(frozen=True)
class PrunedCheckpoint:
    """One checkpoint and whether it was deleted (with --dry-run: would be)."""

    path: str
    step: int
    size_bytes: int
    stays: bool
    reasons: tuple[str, ...]
    """Why it was kept."""


@dataclass(frozen=True)
class PruneReport:
    """The result of a call."""

    dry_run: bool
    retention: Retention
    freed_bytes: int
    freed_memory_bytes: int
    """Those of `freed_bytes` in shared memory."""
    checkpoints: tuple[PrunedCheckpoint, ...]
    leftovers: tuple[str, ...]
    """Remains of interrupted saves and deletions, deleted too."""


def prune_run(root: Path, dry_run: bool, memory_too: bool = False, **overrides: int | None) -> PruneReport:
    """Delete the checkpoints that no rule keeps. `overrides`: fields of `Retention`; None: as in the run's run.yaml.

    `memory_too`: also free the in-memory snapshots of the run, and of runs whose folder was moved or deleted. A dry run
    may be done while a job uses the folder.
    """
    folder = RunFolder(full_path(root))
    if not folder.checkpoints.is_dir():
        raise CheckpointError(f"{folder.root}", "has no checkpoints", "Give a run folder.")
    section = load_run_config(str(folder.config)).checkpoint if folder.config.is_file() else CheckpointSection()
    section = section.model_copy(update={name: value for name, value in overrides.items() if value is not None})
    retention = Retention.of(section)
    with ExitStack() as stack:
        if not dry_run:
            stack.callback(os.close, folder.acquire_lock(patience_seconds=0.0))
        leftovers = layout.leftovers(folder.checkpoints)
        freed = sum(map(layout.folder_bytes, leftovers))
        reasons_of = _reasons_to_keep(folder.checkpoints, retention, section.verify_checksums)
        pruned = tuple(_prune(path, reasons, dry_run) for path, reasons in reasons_of.items())
        freed += sum(one.size_bytes for one in pruned if not one.stays)
        if not dry_run:
            layout.remove_leftovers(folder.checkpoints)
        snapshots = memory.unneeded_snapshots(folder) if memory_too else []
        in_memory = sum(one.size_bytes if dry_run else one.remove() for one in snapshots)
    names = tuple(path.name for path in leftovers)
    return PruneReport(dry_run, retention, freed + in_memory, in_memory, pruned, names)


def describe(report: PruneReport) -> Shown:
    """Yield what happens to each checkpoint, and the bytes that this frees."""
    rows = [
        (f"{one.step:,}", human_bytes(one.size_bytes), f"keep: {', '.join(one.reasons)}" if one.stays else "delete")
        for one in report.checkpoints
    ]
    yield Table(("step", "size", ""), rows, "l")
    yield from (f"{name}: delete, the remains of an interrupted save" for name in report.leftovers)
    reasons = [reason for one in report.checkpoints for reason in one.reasons]
    if report.retention.keep_best and not any(reason.startswith("best ") for reason in reasons):
        yield f"keep_best={report.retention.keep_best}: no checkpoint has a validation loss"
    deleted = sum(not one.stays for one in report.checkpoints)
    done = "would be freed by deleting" if report.dry_run else "freed: deleted"
    of_memory = f" and {human_bytes(report.freed_memory_bytes)} of snapshots" if report.freed_memory_bytes else ""
    yield f"{human_bytes(report.freed_bytes)} {done} {deleted} of {len(report.checkpoints)} checkpoints{of_memory}"


def _reasons_to_keep(checkpoints: Path, retention: Retention, verify_checksums: bool) -> dict[Path, list[str]]:
    """Unlike in a run, which has just saved it, the newest checkpoint may be old: whether it is intact is checked."""
    with heartbeat("verifying checksums of the checkpoints to keep") if verify_checksums else nullcontext():
        newest, _ = layout.find_latest(checkpoints, verify_checksums)
        return retention_reasons(checkpoints, retention, newest.step, verify_checksums) if newest else {}


def _prune(path: Path, reasons: list[str], dry_run: bool) -> PrunedCheckpoint:
    size = layout.folder_bytes(path)
    if not reasons and (foreign := layout.foreign_entry(path)):
        reasons = [f"{foreign} is not part of it"]
    if not reasons and not dry_run and not remove(path):
        reasons = ["another process is reading it, or it cannot be deleted"]
    return PrunedCheckpoint(str(path), layout.step_of(path), size, bool(reasons), tuple(reasons))
