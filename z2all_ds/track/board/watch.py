"""All runs on the board: the folders given on the command line, and run folders in them, also those created later."""

import os
import posixpath
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from z2all_ds.base.errors import DataError
from z2all_ds.track.board.remote import RemoteFiles, parse_remote
from z2all_ds.track.board.run import Pace, WatchedRun
from z2all_ds.track.files import Files

SEARCH_EVERY_SECONDS = 3.0


@dataclass(frozen=True)
class WatchedFolder:
    """A run folder or a folder of runs, as given on the command line."""

    given: str
    files: Files
    folder: str

    @classmethod
    def parse(cls, given: str) -> "WatchedFolder":
        remote = parse_remote(given)
        if remote is None:
            if not os.path.isdir(os.path.expanduser(given)):
                raise DataError(given, "no such folder", "Give a run folder, or a folder where runs are or will be.")
            return cls(given, Files(), given.rstrip("/") or "/")
        return cls(given, RemoteFiles(remote), remote.folder)

    def name_of(self, folder: str) -> str:
        """Return a folder inside this one, written like `given`."""
        inside = folder.removeprefix(self.folder).lstrip("/")
        return self.given.rstrip("/") + (f"/{inside}" if inside else "")


class Watch:
    """Follows all runs between `start` and `stop`. Its list only grows, so a run keeps its number."""

    def __init__(self, given: Sequence[str]) -> None:
        self._folders = [WatchedFolder.parse(one) for one in dict.fromkeys(given)]
        self._runs: list[WatchedRun] = []
        self.pace = Pace()
        self._lock, self._over = threading.Lock(), threading.Event()

    def start(self) -> None:
        for watched in self._folders:
            if not watched.files.is_remote:
                self._search(watched)  # so that the first answer has them
            else:
                self._add(watched, watched.folder)  # shown until ssh has connected, and if it never does
            threading.Thread(target=self._keep_searching, args=[watched], daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        for run in self.runs():
            run.stop()
        for watched in self._folders:
            watched.files.close()

    def runs(self) -> list[WatchedRun]:
        with self._lock:
            return list(self._runs)

    def shown_runs(self) -> list[WatchedRun]:
        """Return all runs, without given folders that turned out to be folders of runs."""
        runs = self.runs()
        roots = {watched.given.rstrip("/") for watched in self._folders}
        parents = {posixpath.dirname(run.location) for run in runs}
        return [run for run in runs if not (run.location in roots & parents and run.is_empty)]

    def names(self) -> dict[str, str]:
        """Return the folder name of each run, or its whole path if two have the same name."""
        runs = self.runs()
        short = {run.id: _folder_name(run) for run in runs}
        names = list(short.values())
        return {run.id: short[run.id] if names.count(short[run.id]) == 1 else run.location for run in runs}

    def _keep_searching(self, watched: WatchedFolder) -> None:
        if watched.files.is_remote:
            self._search(watched)
        while not self._over.wait(SEARCH_EVERY_SECONDS):
            self._search(watched)

    def _search(self, watched: WatchedFolder) -> None:
        try:
            folders = watched.files.run_folders(watched.folder)
        except OSError:
            folders = [watched.folder]  # shown with the reason why it cannot be read
        for folder in folders:
            self._add(watched, folder)

    def _add(self, watched: WatchedFolder, folder: str) -> None:
        location = watched.name_of(folder)
        with self._lock:
            if self._over.is_set() or any(run.location == location for run in self._runs):
                return
            run = WatchedRun(len(self._runs), watched.files, folder, location, self.pace)
            self._runs.append(run)
        run.start()


def _folder_name(run: WatchedRun) -> str:
    name = posixpath.basename(run.folder)
    if name.strip(".~"):
        return name
    return run.location if run.is_remote else posixpath.basename(os.path.abspath(run.folder)) or run.location
