"""The folder `.building` inside a corpus: unfinished work, and what is needed to continue after an interruption.

units/              parts of converted units, named by a hash of their inputs
DOMAIN-KEY-GID/     finished shards of a domain, with the first gid GID
PUBLISHING.json     files that are being moved into the corpus folder or removed from it
tokens/             unfinished work of a tokenization
lock                held by the running build
.z2all_temporary    mark of a folder that a build created
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import TEMPORARY_SUFFIX, make_folder, write_whole
from z2all_ds.base.atomic_folder import MARK
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.run_folder import open_lock_file
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.corpus.manifest import Manifest

BUILDING_NAME, LOCK_NAME = ".building", "lock"
_SHARDS_FOLDER = r"[^/]+-[0-9a-f]{32}-\d+"
_OWN_NAMES = re.compile(rf"units|tokens|PUBLISHING\.json(\.tmp)?|{_SHARDS_FOLDER}")
_SHARD_NAME = re.compile(r"[^/]+-\d{5,}\.jsonl")


@contextmanager
def build_lock(out_dir: Path) -> Iterator[None]:
    """Hold the lock of a corpus folder. A second build would delete files of the first, so it is refused."""
    path = out_dir / BUILDING_NAME / LOCK_NAME
    _refuse_foreign(path.parent)
    while True:
        make_folder(path.parent)
        try:
            lock = open_lock_file(path)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):
                raise
            raise ConfigError(f"{path}", "is not a lock file, but a link or a folder", "Remove it.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous build may have removed the folder between our open and our lock.
            if path.exists() and os.fstat(lock).st_ino == path.stat().st_ino:
                break
            os.close(lock)
        except BlockingIOError:
            os.close(lock)
            fix = "Wait until it has finished, or choose another folder."
            raise ConfigError(f"folder {out_dir}", "another build is in progress there", fix) from None
    try:
        (path.parent / MARK).touch()
        yield
    finally:
        os.close(lock)


def refuse_link(folder: Path, content: str = "unfinished work") -> None:
    """Refuse a folder that is a link: its files are going to be replaced or deleted."""
    if folder.is_symlink():
        raise ConfigError(f"{folder}", f"is a link, but {content} is a folder", "Remove the link.")


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that no build created. Earlier versions wrote no mark, but only known names."""
    refuse_link(folder)
    if not folder.is_dir() or (folder / MARK).is_file():
        return
    names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if name != LOCK_NAME and not _OWN_NAMES.fullmatch(name)]
    if foreign:
        fix = "Move it elsewhere, or choose another folder."
        raise ConfigError(f"{folder / foreign[0]}", "is not of a build, whose unfinished work this folder holds", fix)


def remove_if_done(out_dir: Path) -> None:
    """Remove `.building` unless something is left in it; the lock must be held."""
    folder = out_dir / BUILDING_NAME
    if {path.name for path in folder.iterdir()} <= {MARK, LOCK_NAME}:
        for name in (MARK, LOCK_NAME):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # another build has created a lock there
            folder.rmdir()


class BuildingFolder:
    """Paths and markers inside `.building`."""

    def __init__(self, out_dir: Path) -> None:
        self._out_dir = out_dir
        self._root = out_dir / BUILDING_NAME
        self._publishing = self._root / "PUBLISHING.json"
        self.units = self._root / "units"

    def recover(self, manifest: Manifest) -> None:
        """Clean up after an interrupted build. `manifest` is the current one; the lock must be held."""
        refuse_link(self.units)
        self.units.mkdir(parents=True, exist_ok=True)
        folders = [path for path in self._own_paths() if path.is_dir() and not path.is_symlink()]
        leftovers = [path for folder in folders for path in folder.rglob(f"*{TEMPORARY_SUFFIX}")]
        for leftover in [*leftovers, *self.units.glob("*.progress")]:
            leftover.unlink()
        if not self.is_publishing():
            return
        files = self._read_publishing()
        listed = {shard.path for shard in manifest.shards}
        for name, domain, key in files["new"]:
            moved = self._out_dir / name
            if name not in listed and moved.exists():  # interrupted before the manifest was written
                moved.replace(self.shards(domain, key) / name)
        for name in files["old"]:
            if name not in listed and _SHARD_NAME.fullmatch(name):  # interrupted after the manifest was written
                (self._out_dir / name).unlink(missing_ok=True)
        self._publishing.unlink()

    def _read_publishing(self) -> dict[str, list[Any]]:
        """Read the files to move or remove; they must be plain names, which cannot lead out of the corpus.

        Files to move must have names of shards, and come from folders for them.
        """
        try:
            files = load_json(read_regular(self._publishing))
            is_valid = all(isinstance(name, str) and Path(name).name == name for name in files["old"])
            for name, domain, key in files["new"]:
                folder = f"{domain}-{key}"
                is_valid &= bool(_SHARD_NAME.fullmatch(name) and re.fullmatch(_SHARDS_FOLDER, folder))
        except (OSError, ValueError, KeyError, TypeError):
            is_valid = False
        if not is_valid:
            fix = "Delete it if you know what it lists; then run the same command again."
            raise DataError(f"{self._publishing}", "is not a file of a build", fix)
        return dict(files)

    def is_publishing(self) -> bool:
        """Return whether a build was interrupted in its last step."""
        return self._publishing.exists()

    def shards(self, domain: str, key: str) -> Path:
        folder = self._root / f"{domain}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def begin_publishing(self, new: Sequence[tuple[str, str, str]], old: Sequence[str]) -> None:
        """Record the files to move or remove, so that `recover` can undo or complete an interrupted publication.

        `new` has (file, domain, key) of each new shard, `old` the shards that the new manifest does not list.
        """
        # Adopted files have other names and stay.
        own = [name for name in old if _SHARD_NAME.fullmatch(name)]
        write_whole(self._publishing, json.dumps({"new": new, "old": own}))

    def remove(self) -> None:
        """Remove all unfinished work."""
        for path in self._own_paths():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        remove_if_done(self._out_dir)

    def _own_paths(self) -> list[Path]:
        return [path for path in self._root.iterdir() if _OWN_NAMES.fullmatch(path.name)]
