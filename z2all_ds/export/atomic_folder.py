"""Creates a folder atomically: it appears complete, replacing an earlier one, or not at all."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from z2all_ds.base.atomic import make_folder

UNFINISHED, REPLACED = ".exporting", ".replaced"


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out` and rename it to `out` at the end; delete it on an error or Ctrl-C.

    A killed process leaves its temporary folder without the lock. The next call with the same parent deletes it.
    """
    make_folder(out.parent)
    with ExitStack() as stack:
        with _locked(out.parent):  # otherwise another process could delete the new folder before it is locked
            _delete_leftovers(out.parent)
            temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=UNFINISHED, dir=out.parent))
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            stack.enter_context(_locked(temporary))
        temporary.chmod(0o755)  # mkdtemp makes it private
        yield temporary
        _replace(temporary, out)


def _delete_leftovers(parent: Path) -> None:
    """Delete the folders of killed processes; a folder in use is locked and stays."""
    for folder in [*parent.glob(f".*{UNFINISHED}"), *parent.glob(f".*{REPLACED}")]:
        with suppress(OSError), _locked(folder, fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, flags: int = 0) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(handle)


def _replace(temporary: Path, out: Path) -> None:
    """Replace `out` by two renames: for an instant it does not exist, but it is never incomplete."""
    old = temporary.with_suffix(REPLACED)
    if out.exists():
        out.rename(old)
    try:
        temporary.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
