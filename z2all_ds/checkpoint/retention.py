"""Decides which checkpoints are kept, and deletes the others. Does not load torch.

Long reads of a checkpoint (an export, a copy) run inside `held`, which takes the lock that a deletion needs.
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
from z2all_ds.base.console import say
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.run_folder import wait_and_tell
from z2all_ds.checkpoint import layout

MIN_INTACT = 2
"""Intact checkpoints that are always kept, in case one turns out to be damaged."""
VALIDATION_LOSS = "validation_loss"
"""Key in trainer.json of steps that were validated."""
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without locks (some NFS, FUSE and parallel ones)."""


HOLD_PATIENCE_SECONDS = 20.0
"""A deletion holds the lock of a manifest only until it has deleted it."""
FIX_FOREIGN = "Move it elsewhere."


@dataclass(frozen=True)
class Retention:
    """The rules; a checkpoint is kept if any of them applies."""

    keep_last: int
    """Number of newest checkpoints."""
    keep_every: int = 0
    """Checkpoints whose step is a multiple of this; 0: none."""
    keep_best: int = 0
    """Number of checkpoints with the lowest validation loss; 0: none."""

    @classmethod
    def of(cls, section: CheckpointSection) -> "Retention":
        return cls(section.keep_last, section.keep_every, section.keep_best)


@dataclass(frozen=True)
class Saved:
    """The facts about a sealed checkpoint that the rules need."""

    path: Path
    step: int
    validation_loss: float | None = None
    is_readable: bool = True
    """False if trainer.json cannot be read: the checkpoint may be the best."""


def reasons_to_keep(
    saved: Sequence[Saved], retention: Retention, newest_step: int, is_intact: Callable[[Path], bool]
) -> dict[Path, list[str]]:
    """Return why each checkpoint is kept. `is_intact` is slow, and is called for few of them.

    `newest_step` is the one just saved. Later checkpoints are damaged (the run resumed from an earlier one) or from
    another attempt. They are kept but do not count, or else they would displace the checkpoint that was just saved.
    """
    reasons: dict[Path, list[str]] = {one.path: [] for one in saved}
    newest_first = sorted((s for s in saved if s.step <= newest_step), key=lambda s: s.step, reverse=True)
    newest_paths = [one.path for one in newest_first]
    last = {*newest_paths[: retention.keep_last], *_until_intact(newest_paths, MIN_INTACT, is_intact)}
    for one in saved:
        if one.step > newest_step:
            reasons[one.path].append(f"later than {layout.step_name(newest_step)}")
        elif one.path in last:
            reasons[one.path].append("last")
        if retention.keep_every and one.step % retention.keep_every == 0:
            reasons[one.path].append(f"every {retention.keep_every}")
    if retention.keep_best:
        # Of equal losses the earlier: the best checkpoint so far is kept until there is a better one.
        known = sorted((s.validation_loss, s.step, s.path) for s in newest_first if s.validation_loss is not None)
        losses = {path: loss for loss, _, path in known}
        for path in _until_intact(losses, retention.keep_best, is_intact):
            reasons[path].append(f"best {losses[path]:.4g}")
        for one in newest_first:
            if not one.is_readable:
                reasons[one.path].append("trainer.json cannot be read")
    return reasons


def retention_reasons(
    checkpoints: Path, retention: Retention, newest_step: int, verify_checksums: bool = False
) -> dict[Path, list[str]]:
    """Return why each sealed checkpoint is kept, oldest first. `verify_checksums`: of those that must be intact."""

    @cache
    def is_intact(path: Path) -> bool:
        try:
            return layout.why_damaged(path, verify_checksums) is None
        except OSError:
            return False  # it is kept, but does not count

    read = _read_loss if retention.keep_best else lambda path: Saved(path, layout.step_of(path))
    return reasons_to_keep(list(map(read, layout.sealed_folders(checkpoints))), retention, newest_step, is_intact)


def prune(checkpoints: Path, retention: Retention, newest_step: int) -> list[str]:
    """Delete the checkpoints that no rule keeps, and return their names. Never raises for the file system, so that a
    failed deletion does not end a run; the next call, or the next start, tries again."""
    try:
        reasons = retention_reasons(checkpoints, retention, newest_step)
        return [path.name for path, why in reasons.items() if not why and remove(path)]
    except OSError:
        return []


def remove(path: Path) -> bool:
    """Delete a checkpoint, unless a process holds it, it contains files of others or the file system refuses. Return
    whether it was deleted.

    The manifest is deleted and synced first, so an interrupted deletion, even by a power cut, leaves no checkpoint.
    """
    manifest = path / layout.MANIFEST
    try:
        if foreign := layout.foreign_entry(path):
            _say_once(
                str(CheckpointError(f"checkpoint {path}", f"not deleted: {foreign} is not part of it", FIX_FOREIGN))
            )
            return False
        # NFS requires write access for an exclusive lock. Closed before the folder is deleted: NFS keeps a file that is
        # deleted while open under another name, and so would keep the folder.
        with _locked(manifest, os.O_RDWR, fcntl.LOCK_EX) as is_current:
            if not is_current:
                return False
            manifest.unlink()
    except (OSError, CheckpointError):
        return False
    with suppress(OSError):
        force_to_disk(path)
        shutil.rmtree(path, ignore_errors=True)
    return True


@cache
def _say_once(line: str) -> None:
    say(line)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep the retention of all processes from deleting this checkpoint; several may hold it at once.

    A shared lock on its manifest, which the system releases when the process ends. It works across hosts on NFS, unless
    mounted with local_lock, and does nothing on file systems without locks.
    """
    try:
        with _locked(path / layout.MANIFEST, os.O_RDONLY, fcntl.LOCK_SH, HOLD_PATIENCE_SECONDS) as is_current:
            if is_current:
                yield
                return
    except FileNotFoundError:
        if (path / layout.MANIFEST).exists():
            raise  # the caller misses another file
    raise CheckpointError(f"checkpoint {path}", "has been deleted, or was never finished", "Use a newer one.")


@contextmanager
def _locked(manifest: Path, access: int, operation: int, patience_seconds: float = 0.0) -> Iterator[bool]:
    """Yield whether the locked file still is the manifest. Raise FileNotFoundError if that is deleted meanwhile, and a
    CheckpointError if another process holds the lock for longer than this."""
    descriptor = os.open(manifest, access)
    try:
        try:
            waiting = (
                f"checkpoint {manifest.parent} is locked by another process: waiting up to {patience_seconds:.0f} s"
            )
            if not wait_and_tell(descriptor, patience_seconds, waiting, operation):
                rule = f"another process holds the lock of its {layout.MANIFEST}"
                raise CheckpointError(f"checkpoint {manifest.parent}", rule, "End that process, or use another one.")
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield os.path.samestat(os.fstat(descriptor), os.stat(manifest))
    finally:
        os.close(descriptor)


def _until_intact(candidates: Iterable[Path], count: int, is_intact: Callable[[Path], bool]) -> list[Path]:
    """Return the first candidates up to the `count`-th intact one, including the damaged ones among them."""
    found: list[Path] = []
    intact = 0
    for path in candidates:
        if intact == count:
            break
        found.append(path)
        intact += is_intact(path)
    return found


def _read_loss(path: Path) -> Saved:
    step = layout.step_of(path)
    try:
        loss = layout.Checkpoint(path, step).trainer.get(VALIDATION_LOSS)
        known = None if loss is None or not math.isfinite(loss) else float(loss)
    except (CheckpointError, TypeError, OverflowError):
        return Saved(path, step, is_readable=False)
    return Saved(path, step, known)
