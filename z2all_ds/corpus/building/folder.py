"""The folder `.building` inside a corpus: unfinished work, and what is needed to continue after an interruption.

units/              parts of converted units, named by a hash of their inputs
DOMAIN-KEY-GID/     finished shards of a domain, with the first gid GID
PUBLISHING.json     files that are being moved into the corpus folder or removed from it
lock                held by the running build
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from z2all_ds.base.atomic import TEMPORARY_SUFFIX, write_whole
from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.manifest import Manifest

BUILDING_NAME = ".building"


@contextmanager
def build_lock(out_dir: Path) -> Iterator[None]:
    """Hold the lock of a corpus folder. A second build would delete files of the first, so it is refused."""
    path = out_dir / BUILDING_NAME / "lock"
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
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
        yield
    finally:
        os.close(lock)


class BuildingFolder:
    """Paths and markers inside `.building`."""

    def __init__(self, out_dir: Path) -> None:
        self._out_dir = out_dir
        self._root = out_dir / BUILDING_NAME
        self._publishing = self._root / "PUBLISHING.json"
        self.units = self._root / "units"

    def recover(self, manifest: Manifest) -> None:
        """Clean up after an interrupted build. `manifest` is the current one; the lock must be held."""
        self.units.mkdir(parents=True, exist_ok=True)
        for leftover in [*self._root.rglob(f"*{TEMPORARY_SUFFIX}"), *self.units.glob("*.progress")]:
            leftover.unlink()
        if not self.is_publishing():
            return
        files = json.loads(self._publishing.read_bytes())
        listed = {shard.path for shard in manifest.shards}
        for name, domain, key in files["new"]:
            moved = self._out_dir / name
            if name not in listed and moved.exists():  # interrupted before the manifest was written
                moved.replace(self.shards(domain, key) / name)
        for name in files["old"]:
            if name not in listed:  # interrupted after the manifest was written
                (self._out_dir / name).unlink(missing_ok=True)
        self._publishing.unlink()

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
        write_whole(self._publishing, json.dumps({"new": new, "old": old}))
