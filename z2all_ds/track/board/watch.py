"""All runs on the board: places that people give, and the run folders found there, also those that appear later."""

import os
import posixpath
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from z2all_ds.track.board.files import Files, LocalFiles
from z2all_ds.track.board.pace import Pace
from z2all_ds.track.board.remote import RemoteFiles, parse_place
from z2all_ds.track.board.run import WatchedRun

SEEK_EVERY_SECONDS = 3.0


@dataclass(frozen=True)
class WatchedFolder:
    """What a person gave: a run's folder, or a folder of runs, here or elsewhere."""

    given: str
    files: Files
    folder: str

    def name_of(self, folder: str) -> str:
        """As a person would write it."""
        inside = folder.removeprefix(self.folder).lstrip("/")
        return self.given.rstrip("/") + (f"/{inside}" if inside else "")


class Watch:
    """Between `start` and `stop` it follows every run. Its list only grows, so that a run keeps its number."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = [self._place(given) for given in dict.fromkeys(places)]
        self._runs: list[WatchedRun] = []
        self.pace = Pace()
        self._lock, self._over = threading.Lock(), threading.Event()

    def _place(self, given: str) -> WatchedFolder:
        far = parse_place(given)
        if far is None:
            return WatchedFolder(given, LocalFiles(), given.rstrip("/") or "/")
        return WatchedFolder(given, RemoteFiles(far), far.folder)

    def start(self) -> None:
        for place in self._places:
            if not place.files.is_far:
                self._seek(place)  # so that the first answer knows them
            else:
                self._add(place, place.folder)  # seen while ssh is on its way, and if it never gets there
            threading.Thread(target=self._keep_seeking, args=[place], daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        for run in self.runs():
            run.stop()
        for place in self._places:
            place.files.close()

    def runs(self) -> list[WatchedRun]:
        with self._lock:
            return list(self._runs)

    def shown_runs(self) -> list[WatchedRun]:
        """Without the places themselves where the runs in them have appeared."""
        runs = self.runs()
        roots = {place.given.rstrip("/") for place in self._places}
        parents = {posixpath.dirname(run.place) for run in runs}
        return [run for run in runs if not (run.place in roots & parents and run.is_empty)]

    def names(self) -> dict[str, str]:
        """Folder names by run; where two are the same, more of the path."""
        runs = self.runs()
        short = {run.id: _last_name(run) for run in runs}
        counts = {name: list(short.values()).count(name) for name in short.values()}
        return {run.id: short[run.id] if counts[short[run.id]] == 1 else run.place for run in runs}

    def _keep_seeking(self, place: WatchedFolder) -> None:
        if place.files.is_far and not self._over.is_set():
            self._seek(place)
        while not self._over.wait(SEEK_EVERY_SECONDS):
            self._seek(place)

    def _seek(self, place: WatchedFolder) -> None:
        try:
            folders = place.files.run_folders(place.folder)
        except OSError:
            folders = [place.folder]  # shown, with why it cannot be read
        for folder in folders:
            self._add(place, folder)

    def _add(self, place: WatchedFolder, folder: str) -> None:
        with self._lock:
            if self._over.is_set() or any(run.place == place.name_of(folder) for run in self._runs):
                return
            run = WatchedRun(len(self._runs), place.files, folder, place.name_of(folder), self.pace)
            self._runs.append(run)
        run.start()


def _last_name(run: WatchedRun) -> str:
    """The folder's; of one that is named by dots alone, here what it stands for."""
    name = posixpath.basename(run.folder)
    if name.strip(".~"):
        return name
    return run.place if run.is_far else posixpath.basename(os.path.abspath(run.folder)) or run.place
