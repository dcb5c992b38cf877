"""Creates a folder atomically: it appears complete or not at all."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from z2all_ds.base.atomic import force_to_disk, make_folder

PREFIX, UNFINISHED, REPLACED = ".z2all_", ".unfinished", ".replaced"
MARK = ".z2all_temporary"
"""A file in temporary folders: only a folder that has it is deleted."""


@contextmanager
def atomic_folder(out: Path, replaces: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Yield a temporary folder next to `out` and rename it to `out` at the end; delete it on an error or Ctrl-C.

    `replaces`: raises unless it accepts that `out` is replaced as it is at the end; by default, a folder there must be
    empty. A killed process leaves its temporary folder without the lock. The next call with the same parent deletes it.
    """
    make_folder(out.parent)
    _delete_leftovers(out.parent)
    with ExitStack() as stack:
        temporary = Path(tempfile.mkdtemp(prefix=PREFIX, suffix=UNFINISHED, dir=out.parent))
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        stack.enter_context(_locked(temporary))
        (temporary / MARK).touch()  # after the lock: from now on another process may look whether it is a leftover
        temporary.chmod(0o755)  # mkdtemp makes it private
        yield temporary
        (temporary / MARK).unlink()
        if replaces:
            replaces(out)
        if replaces and out.exists():
            _replace(temporary, out)
        else:
            temporary.replace(out)  # an empty folder there is replaced, a filled one is an error
        force_to_disk(out.parent)


def _delete_leftovers(parent: Path) -> None:
    """Delete the folders of killed processes; a folder in use is locked and stays."""
    for folder in [*parent.glob(f"{PREFIX}*{UNFINISHED}"), *parent.glob(f"{PREFIX}*{REPLACED}")]:
        if folder.is_symlink() or not (folder / MARK).is_file():
            continue
        with suppress(OSError), _locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _replace(temporary: Path, out: Path) -> None:
    """Replace `out` by two renames: for an instant it does not exist, but it is never incomplete."""
    old = temporary.with_suffix(REPLACED)
    out.rename(old)
    try:
        temporary.rename(out)
    except BaseException:
        old.rename(out)
        raise
    (old / MARK).touch()
    shutil.rmtree(old, ignore_errors=True)
