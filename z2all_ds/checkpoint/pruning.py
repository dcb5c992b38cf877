"""`z2all checkpoint prune`: retention by hand, on a run folder that no job is using. Loads no torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.sections import CheckpointSection
from z2all_ds.base.console import heartbeat, human_bytes
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.reports import Shown, Table
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import layout, memory
from z2all_ds.checkpoint.retention import Retention, judge, remove


@dataclass(frozen=True)
class Fate:
    """What became of one checkpoint, or would without --dry-run."""

    path: str
    step: int
    size_bytes: int
    stays: bool
    reasons: tuple[str, ...]
    """Why it stays."""


@dataclass(frozen=True)
class Pruning:
    """What was done."""

    dry_run: bool
    retention: Retention
    freed_bytes: int
    checkpoints: tuple[Fate, ...]
    leftovers: tuple[str, ...]
    """Of saves and deletions that were cut off; they go too."""


def prune_by_hand(
    root: Path,
    dry_run: bool,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    memory_too: bool = False,
) -> Pruning:
    """What is not given is as in the run's run.yaml. A dry run may look at a folder that a job is using."""
    folder = RunFolder(root.expanduser().resolve())
    if not folder.checkpoints.is_dir():
        raise CheckpointError(f"{folder.root}", "has no checkpoints", "Give a run folder.")
    section = load_run_config(str(folder.config)).checkpoint if folder.config.is_file() else CheckpointSection()
    asked = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best}
    section = section.model_copy(update={name: value for name, value in asked.items() if value is not None})
    retention = Retention.of(section)
    with nullcontext() if dry_run else _alone_in(folder):
        leftovers = layout.leftovers(folder.checkpoints)
        freed = sum(map(layout.size_of, leftovers))
        judged = _judge(folder.checkpoints, retention, section.verify_checksums)
        fates = tuple(_carry_out(path, reasons, dry_run) for path, reasons in judged.items())
        freed += sum(fate.size_bytes for fate in fates if not fate.stays)
        if memory_too:
            line = memory.line_of(folder)
            freed += line.size_bytes if line else 0
        if not dry_run:
            layout.remove_leftovers(folder.checkpoints)
        if memory_too and not dry_run:
            memory.remove_all_of(folder)
    return Pruning(dry_run, retention, freed, fates, tuple(path.name for path in leftovers))


def describe(pruning: Pruning) -> Shown:
    """Yields what happens to each checkpoint, and the bytes that this frees."""
    rows = []
    for one in pruning.checkpoints:
        fate = f"stays: {', '.join(one.reasons)}" if one.stays else "goes"
        rows.append((f"{one.step:,}", human_bytes(one.size_bytes), fate))
    yield Table(("step", "size", ""), rows, "l")
    yield from (f"{name}: a leftover, goes" for name in pruning.leftovers)
    if pruning.retention.keep_best and not any(_is_best(one) for one in pruning.checkpoints):
        yield f"keep_best={pruning.retention.keep_best}: no checkpoint has a validation loss"
    gone = sum(not one.stays for one in pruning.checkpoints)
    done = "would be freed by deleting" if pruning.dry_run else "freed: deleted"
    yield f"{human_bytes(pruning.freed_bytes)} {done} {gone} of {len(pruning.checkpoints)} checkpoints"


@contextmanager
def _alone_in(folder: RunFolder) -> Iterator[None]:
    lock = folder.acquire_lock(patience_seconds=0.0)
    try:
        yield
    finally:
        os.close(lock)


def _judge(checkpoints: Path, retention: Retention, verify_checksums: bool) -> dict[Path, list[str]]:
    """A run has just written its newest one; here it may be old, and must prove that it can be loaded."""
    with heartbeat("comparing checksums of what is to stay") if verify_checksums else nullcontext():
        newest, _ = layout.find_latest(checkpoints, verify_checksums)
        return judge(checkpoints, retention, newest.step, verify_checksums) if newest else {}


def _carry_out(path: Path, reasons: list[str], dry_run: bool) -> Fate:
    size = layout.size_of(path)
    if not reasons and not dry_run and not remove(path):
        reasons = ["another process is reading it, or it cannot be deleted"]
    return Fate(str(path), layout.step_of(path), size, bool(reasons), tuple(reasons))


def _is_best(fate: Fate) -> bool:
    return any(reason.startswith("best ") for reason in fate.reasons)
