"""A folder that is seen when it is complete, in the place of an earlier one, and of which nothing is left otherwise."""

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
def folder_in_place_of(out: Path) -> Iterator[Path]:
    """Yields a new folder beside `out`, which becomes `out` at the end; on an error or a Ctrl-C it goes.

    Only a kill leaves one behind. Its lock went with the process, and the next export into the same parent removes it.
    """
    make_folder(out.parent)
    with ExitStack() as held:
        with _locked(out.parent):  # or another export could take the new folder, not locked yet, for a leftover
            _remove_leftovers(out.parent)
            temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=UNFINISHED, dir=out.parent))
            held.callback(shutil.rmtree, temporary, ignore_errors=True)
            held.enter_context(_locked(temporary))
        temporary.chmod(0o755)  # mkdtemp makes it private
        yield temporary
        _swap(temporary, out)


def _remove_leftovers(parent: Path) -> None:
    """Of exports that were killed; one that is being written holds its lock and stays."""
    for folder in [*parent.glob(f".*{UNFINISHED}"), *parent.glob(f".*{REPLACED}")]:
        with suppress(OSError), _locked(folder, fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, how: int = 0) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(handle)


def _swap(temporary: Path, out: Path) -> None:
    """Two renames: the place is empty for an instant, and never holds half a folder."""
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
