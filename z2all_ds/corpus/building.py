"""The folder `.building` inside a corpus: everything unfinished, and what is needed to go on after a stop.

units/            parts and their small files, named by what they depend on
DOMAIN-KEY/       shards of a domain; STARTED.json says with which numbers, DONE.json that all are there
PUBLISHING.json   shards on their way into the corpus folder
lock              held by the build at work
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import TEMPORARY_SUFFIX, write_whole
from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.manifest import Manifest, ShardInfo

BUILDING_NAME = ".building"


@contextmanager
def only_build(out_dir: Path) -> Iterator[None]:
    """Two builds into one folder would throw away each other's files: the second is refused."""
    path = out_dir / BUILDING_NAME / "lock"
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the build before us may have removed the folder between our open and our lock
            if path.exists() and os.fstat(lock).st_ino == path.stat().st_ino:
                break
            os.close(lock)
        except BlockingIOError:
            os.close(lock)
            fix = "Wait until it is finished, or choose another folder."
            raise ConfigError(f"folder {out_dir}", "another build is at work in it", fix) from None
    try:
        yield
    finally:
        os.close(lock)


class BuildingFolder:
    """Paths and marks inside `.building`."""

    def __init__(self, out_dir: Path) -> None:
        self._out_dir = out_dir
        self._root = out_dir / BUILDING_NAME
        self._publishing = self._root / "PUBLISHING.json"
        self.units = self._root / "units"

    def open(self, there: Manifest) -> None:
        """Call it with the lock held: clears away what a stopped build left half done."""
        self.units.mkdir(parents=True, exist_ok=True)
        for leftover in [*self._root.rglob(f"*{TEMPORARY_SUFFIX}"), *self.units.glob("*.progress")]:
            leftover.unlink()
        if not self.is_publishing():
            return
        on_the_way = json.loads(self._publishing.read_bytes())
        listed = {shard.path for shard in there.shards}
        for name, domain, key in on_the_way["new"]:
            moved = self._out_dir / name
            if name not in listed and moved.exists():  # stopped before the manifest: back to where it came from
                moved.replace(self.shards(domain, key) / name)
        for name in on_the_way["old"]:
            if name not in listed:  # stopped after the manifest: it was to be removed
                (self._out_dir / name).unlink(missing_ok=True)
        self._publishing.unlink()

    def is_publishing(self) -> bool:
        """Whether a build was stopped in its last step."""
        return self._publishing.exists()

    def shards(self, domain: str, key: str) -> Path:
        folder = self._root / f"{domain}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def claim(self, domain: str, key: str, numbers: dict[str, Any]) -> None:
        """Says with which numbers the shards are written; those written with others are thrown away."""
        folder = self.shards(domain, key)
        mark = folder / "STARTED.json"
        if mark.exists() and json.loads(mark.read_bytes()) == numbers:
            return
        for old in [*folder.glob("*.jsonl"), *folder.glob("*.json")]:
            old.unlink()
        write_whole(mark, json.dumps(numbers))

    def finish(
        self, domain: str, key: str, first_gid: int, shards: Sequence[ShardInfo], report: dict[str, Any]
    ) -> None:
        values = {"first_gid": first_gid, "shards": [asdict(shard) for shard in shards], "report": report}
        write_whole(self.shards(domain, key) / "DONE.json", json.dumps(values, ensure_ascii=False))

    def finished_shards(self, domain: str, key: str) -> tuple[int, list[ShardInfo]] | None:
        """(first gid, shards) of a domain that a stopped build had finished."""
        values = self._done(domain, key)
        if values is None:
            return None
        return values["first_gid"], [ShardInfo(**shard) for shard in values["shards"]]

    def report(self, domain: str, key: str) -> dict[str, Any]:
        values = self._done(domain, key)
        assert values is not None
        return dict(values["report"])

    def _done(self, domain: str, key: str) -> dict[str, Any] | None:
        try:
            values: dict[str, Any] = json.loads((self._root / f"{domain}-{key}" / "DONE.json").read_bytes())
        except FileNotFoundError:
            return None
        return values

    def forget(self, domain: str, key: str) -> None:
        shutil.rmtree(self.shards(domain, key))

    def announce(self, new: Sequence[tuple[str, str, str]], old: Sequence[str]) -> None:
        """Writes down what is about to be moved into the corpus folder or removed, so that a stop in between is mended.

        `new`: (file, domain, key) of each shard to come; `old`: shards that will not be listed any more.
        """
        write_whole(self._publishing, json.dumps({"new": new, "old": old}))
