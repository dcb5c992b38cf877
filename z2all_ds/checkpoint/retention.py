"""Which checkpoints stay, and how the others go. Loads no torch.

Whoever reads a checkpoint for long (an export, a copy) does so inside `held`; whoever deletes asks for the same lock.
"""

import errno
import fcntl
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from z2all_ds.base.atomic import force_to_disk
from z2all_ds.base.config.sections import CheckpointSection
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint import layout

FEWEST = 2
"""Whole checkpoints that are kept whatever the settings: if one turns out to be damaged, there is another."""
VALIDATION_LOSS = "validation_loss"
"""Key in trainer.json; it is there where the step was validated."""
LOCKS_UNKNOWN = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems answer that have no locks (some NFS, FUSE and parallel ones)."""


@dataclass(frozen=True)
class Retention:
    """What stays: a checkpoint that any of these asks for."""

    keep_last: int
    """The newest ones."""
    keep_every: int = 0
    """Those whose step is a multiple of it; 0: none."""
    keep_best: int = 0
    """Those with the lowest validation loss; 0: none."""

    @classmethod
    def of(cls, section: CheckpointSection) -> "Retention":
        return cls(section.keep_last, section.keep_every, section.keep_best)


@dataclass(frozen=True)
class Saved:
    """What the choice needs to know of a sealed checkpoint."""

    path: Path
    step: int
    validation_loss: float | None = None
    is_readable: bool = True
    """False where trainer.json says nothing: it may be the best of all."""


def reasons_to_keep(
    saved: Sequence[Saved], retention: Retention, newest_step: int, is_whole: Callable[[Path], bool]
) -> dict[Path, list[str]]:
    """The choice itself. `is_whole` is asked of few, as it may have many files to look at.

    `newest_step` is the one just saved. Later ones are damaged (the run went back behind them) or of another attempt:
    they stay, but they do not count, or they would push out the very checkpoint that was just saved.
    """
    reasons: dict[Path, list[str]] = {one.path: [] for one in saved}
    newest_first = sorted((s for s in saved if s.step <= newest_step), key=lambda s: s.step, reverse=True)
    newest_paths = [one.path for one in newest_first]
    last = {*newest_paths[: retention.keep_last], *_until_whole(newest_paths, FEWEST, is_whole)}
    for one in saved:
        if one.step > newest_step:
            reasons[one.path].append(f"later than {layout.step_name(newest_step)}")
        elif one.path in last:
            reasons[one.path].append("last")
        if retention.keep_every and one.step % retention.keep_every == 0:
            reasons[one.path].append(f"every {retention.keep_every}")
    if retention.keep_best:
        # Of equal ones the earlier: what was kept as the best stays the best until there is a better one.
        known = sorted((s.validation_loss, s.step, s.path) for s in newest_first if s.validation_loss is not None)
        losses = {path: loss for loss, _, path in known}
        for path in _until_whole(losses, retention.keep_best, is_whole):
            reasons[path].append(f"best {losses[path]:.4g}")
        for one in newest_first:
            if not one.is_readable:
                reasons[one.path].append("trainer.json cannot be read")
    return reasons


def judge(
    checkpoints: Path, retention: Retention, newest_step: int, verify_checksums: bool = False
) -> dict[Path, list[str]]:
    """Returns all sealed checkpoints, the oldest first, and why each stays. `verify_checksums`: of those that have to
    be whole."""
    look = _look_for_loss if retention.keep_best else lambda path: Saved(path, layout.step_of(path))

    @cache
    def is_whole(path: Path) -> bool:
        try:
            return layout.why_damaged(path, verify_checksums) is None
        except OSError:
            return False  # it stays, but another must be whole

    return reasons_to_keep(list(map(look, layout.sealed(checkpoints))), retention, newest_step, is_whole)


def prune(checkpoints: Path, retention: Retention, newest_step: int) -> list[str]:
    """Deletes what nothing asks for and returns the names. Never raises for the file system: a run does not end because
    it could not delete; what is left goes the next time, or as a leftover at the next start."""
    try:
        reasons = judge(checkpoints, retention, newest_step)
        return [path.name for path, why in reasons.items() if not why and remove(path)]
    except OSError:
        return []


def remove(path: Path) -> bool:
    """Deletes a checkpoint unless somebody holds it or the file system refuses; whether it is a checkpoint no more.

    The manifest goes first and for certain: half a deletion, even by a power cut, leaves no checkpoint.
    """
    manifest = path / layout.MANIFEST
    try:
        # NFS gives an exclusive lock only to who may write. Closed again before the folder goes: there a file that is
        # deleted while it is open stays under another name, and so would the folder.
        with _locked(manifest, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_there:
            if not is_there:
                return False
            manifest.unlink()
    except OSError:
        return False
    with suppress(OSError):
        force_to_disk(path)
        shutil.rmtree(path, ignore_errors=True)
    return True


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Inside, no retention of any process deletes this checkpoint; many may hold it at once.

    A shared lock of its manifest: the system lets go of it with the process, however that ends. Linux carries it over
    NFS to other hosts (but not where that is mounted with local_lock); where there are no locks, nothing is held.
    """
    try:
        with _locked(path / layout.MANIFEST, os.O_RDONLY, fcntl.LOCK_SH) as is_there:
            if is_there:
                yield
                return
    except FileNotFoundError:
        if (path / layout.MANIFEST).exists():
            raise  # the reader misses something else
    raise CheckpointError(f"checkpoint {path}", "has been deleted, or was never finished", "Take a newer one.")


@contextmanager
def _locked(manifest: Path, access: int, lock: int) -> Iterator[bool]:
    """Yields whether the file that is locked is still the one of that name, and not one deleted while we waited."""
    descriptor = os.open(manifest, access)
    try:
        try:
            fcntl.flock(descriptor, lock)
        except OSError as error:
            if error.errno not in LOCKS_UNKNOWN:
                raise
        ours = os.fstat(descriptor)
        try:
            there = os.stat(manifest)
        except FileNotFoundError:
            yield False
        else:
            yield (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
    finally:
        os.close(descriptor)


def _until_whole(candidates: Iterable[Path], count: int, is_whole: Callable[[Path], bool]) -> list[Path]:
    """From the first on until `count` are whole. The damaged ones among them stay too, but do not count."""
    found: list[Path] = []
    whole = 0
    for path in candidates:
        if whole == count:
            break
        found.append(path)
        whole += is_whole(path)
    return found


def _look_for_loss(path: Path) -> Saved:
    step = layout.step_of(path)
    try:
        loss = layout.Checkpoint(path, step).trainer.get(VALIDATION_LOSS)
        known = None if loss is None or not math.isfinite(loss) else float(loss)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return Saved(path, step, is_readable=False)
    return Saved(path, step, known)
