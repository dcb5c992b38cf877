"""One run on the board: a thread follows its files, and its state is returned as the page expects it."""

import posixpath
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from z2all_ds.base.console import human_seconds
from z2all_ds.track.board.curves import Curves
from z2all_ds.track.board.events import EventLog
from z2all_ds.track.board.health import HealthLog
from z2all_ds.track.board.mixture import domains_in, mixture_of
from z2all_ds.track.board.probes import EvaluationFiles, probes_of
from z2all_ds.track.board.remote import Unreachable
from z2all_ds.track.board.settings import Settings
from z2all_ds.track.fields import PROBE_PREFIX
from z2all_ds.track.files import Files

UPDATE_EVERY_SECONDS = 1.0
SILENT_AFTER_SECONDS, SILENT_AFTER_STEPS = 60.0, 20
RATE_RECORDS = 100
FILE_NAMES = ("metrics.jsonl", "events.jsonl", "health.jsonl", "run.yaml", "ds_config.json", "evaluations")
BETWEEN_STEPS_SECONDS = 0.001
"""Lets requests run, which share this process's interpreter lock."""
YIELD_SECONDS = 2.0


class Pace:
    """Delays long reading while a page is being opened; shared by all runs."""

    def __init__(self) -> None:
        self._until = 0.0

    def yield_to_page(self) -> None:
        self._until = time.monotonic() + YIELD_SECONDS

    def seconds_to_wait(self) -> float:
        return max(BETWEEN_STEPS_SECONDS, self._until - time.monotonic())


class WatchedRun:
    """Follows a run folder between `start` and `stop`; on another machine, it need not exist yet."""

    def __init__(self, number: int, files: Files, folder: str, location: str, pace: Pace | None = None) -> None:
        self.id, self.folder, self.location = str(number), folder, location
        self._files, self._pace = files, pace or Pace()
        self._paths = [posixpath.join(folder, name) for name in FILE_NAMES]
        self.curves = Curves(files, self._paths[0])
        self.events = EventLog(files, self._paths[1])
        self.health = HealthLog(files, self._paths[2])
        self.settings = Settings(files, self._paths[3], self._paths[4])
        self.evaluations = EvaluationFiles(files, self._paths[5])
        self._problem, self._is_unreachable, self._exists = "", False, True
        self._now_unix, self._written_unix = 0.0, 0.0
        """By the clock of the machine that has the files."""
        self._over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._follow, name=f"run {self.location}", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _follow(self) -> None:
        while not self._over.is_set():
            has_more, problem, is_unreachable = False, "", False
            try:
                has_more = self.update()
            except Unreachable as error:
                problem, is_unreachable = str(error), True
            except OSError as error:
                problem = f"{error.strerror or error} ({error.filename or self.location})"
            except Exception as error:  # an unexpected record must not end this thread
                problem = f"could not be read: {type(error).__name__}: {error}"
            self._problem, self._is_unreachable = problem, is_unreachable
            self._over.wait(self._pace.seconds_to_wait() if has_more else UPDATE_EVERY_SECONDS)

    def update(self) -> bool:
        """Read new content of all files. Return whether there is more to read."""
        self._now_unix, (own, *stats) = self._files.stats([self.folder, *self._paths])
        self._exists = any(own)
        self._written_unix = max(stat[1] for stat in stats[:3])
        # Before events: when a page sees a run's first event, it asks for its settings, once.
        self.settings.update(stats[3:5])
        more_events = self.events.update(stats[1])
        more_health = self.health.update(stats[2])
        has_more = self.curves.update(stats[0]) or more_events or more_health
        self.evaluations.update(stats[5], self._now_unix)
        return has_more

    # For the page

    @property
    def start_unix(self) -> float:
        """The time that seconds are counted from."""
        return self.events.first_unix or self.curves.first.get("time_unix") or 0.0

    @property
    def is_remote(self) -> bool:
        return self._files.is_remote

    @property
    def is_empty(self) -> bool:
        return not self.curves.recent and not self.events.count and not self.settings.flat

    def summary(self, name: str) -> dict[str, Any]:
        recent = list(self.curves.recent)
        last = recent[-1] if recent else {}
        names = self.curves.names()
        status, steps = self._status(recent), self._steps()
        written = [moment for moment in (last.get("time_unix"), self.events.last_unix) if moment]
        is_live = status == "running"
        ends = [moment for moment in (last.get("time_unix"), self.events.end_unix) if moment]
        end = self._now_unix if is_live else max(ends, default=0.0)
        return {
            "id": self.id,
            "name": name,
            "location": self.location,
            "status": status,
            "note": self._note(status),
            "steps": steps,
            **{key: last.get(key) for key in ("step", "tokens_seen", "loss", "tokens_per_second", "mfu")},
            "eta_seconds": self._eta(recent, steps) if is_live else None,
            "elapsed_seconds": max(0.0, end - self.start_unix) if written else None,
            "started_unix": self.start_unix or None,
            "last_record_unix": max(written, default=None),
            "goodput": self._goodput(end),
            "history": self.curves.history,
            "records": self.curves.records,
            "events": self.events.count,
            "health_records": self.health.count,
            "evaluations": self.evaluations.version,
            "read_share": self.curves.read_share,
            "is_sample": self.curves.is_sample,
            "names": names,
            "domains": domains_in(names),
            "probes": [found.removeprefix(PROBE_PREFIX) for found in names if found.startswith(PROBE_PREFIX)],
        }

    def points(
        self, names: Sequence[str], axis: str, low: float | None, high: float | None, most: int
    ) -> dict[str, Any]:
        """Return curves; time counts from the run's start. A point with records before and after a restart is drawn
        before it."""
        start = self.start_unix if axis == "time" else 0.0
        low, high = (None if bound is None else bound + start for bound in (low, high))
        points = self.curves.points(names, axis, low, high, most)
        x, first, last = (points.pop(key) - start for key in ("x", "x_first", "x_last"))
        for again in self.events.restarts_unix if axis == "time" else ():
            x = np.where((first < again - start) & (again - start <= last), first, x)
        return {**points, "x": x}

    def shown_events(self) -> list[dict[str, Any]]:
        events = self.events.shown()
        steps = [event["step"] if isinstance(event["step"], int | float) else float("inf") for event in events]
        for event, tokens in zip(events, self.curves.values_at(steps, "tokens_seen"), strict=True):
            event["tokens_seen"] = tokens
        return events

    def shown_health(self) -> dict[str, Any]:
        hosts = self.events.started.get("hosts")
        return self.health.shown(hosts if isinstance(hosts, list) else [], self._now_unix)

    def mixture(self) -> dict[str, Any]:
        stages = self.events.started.get("mixture")
        usable = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
        domains = domains_in(self.curves.names())
        return mixture_of(usable, domains, list(self.curves.recent), self.curves.total, self.curves.is_sample)

    def probes(self) -> list[dict[str, Any]]:
        start = self.start_unix

        def tokens_at(steps: Sequence[float]) -> list[float | None]:
            return self.curves.values_at(steps, "tokens_seen")

        def seconds_at(steps: Sequence[float]) -> list[float | None]:
            moments = self.curves.values_at(steps, "time_unix", start)
            return [None if moment is None else moment - start for moment in moments]

        return probes_of(self.events.probes, self.evaluations.contents(), self.curves.probes(), tokens_at, seconds_at)

    # Status

    def _status(self, recent: Sequence[dict[str, Any]]) -> str:
        if self._is_unreachable:
            return "unreachable"
        if self.events.outcome in ("done", "stopped", "requeue", "failed"):
            return self.events.outcome
        if not recent and not self.events.count:
            return "empty"
        known = [seconds for record in recent if isinstance(seconds := record.get("step_seconds"), int | float)]
        patience = max(SILENT_AFTER_SECONDS, SILENT_AFTER_STEPS * median(known) if known else 0.0)
        return "running" if self._silent_seconds(recent) < patience else "silent"

    def _silent_seconds(self, recent: Sequence[dict[str, Any]]) -> float:
        """Return the seconds since the last write, by the later of the writer's and the file server's clock."""
        moments = [recent[-1].get("time_unix") if recent else None, self.events.last_unix, self._written_unix]
        return max(0.0, self._now_unix - max(moment for moment in moments if moment is not None))

    def _note(self, status: str) -> str:
        if self._problem:
            return self._problem
        notes = []
        if status == "empty":
            no_answer = self.is_remote and not self._now_unix
            written = "nothing written yet" if self._exists else "no such folder"
            notes.append("no answer yet" if no_answer else written)
        if status == "failed" and self.events.reason:
            notes.append(self.events.reason)
        if status == "silent":
            silence = human_seconds(self._silent_seconds(list(self.curves.recent)))
            notes.append(f"nothing written for {silence}, and no end was recorded")
        if unparsable := self.curves.unparsable + self.events.unparsable:
            notes.append(f"{unparsable} unreadable line{'' if unparsable == 1 else 's'} skipped")
        return "; ".join(notes)

    def _steps(self) -> int | None:
        steps = self.events.started.get("steps", self.settings.flat.get("train.steps"))
        return steps if isinstance(steps, int) else None

    def _eta(self, recent: Sequence[dict[str, Any]], steps: int | None) -> float | None:
        """Estimate from the wall time of the last steps since the last start, with checkpoints and validation."""
        if steps is None or not recent:
            return None
        since = self.events.started.get("time_unix") or 0.0
        timed = [
            record for record in recent[-RATE_RECORDS:] if "step" in record and record.get("time_unix", 0) >= since
        ]
        left = max(0, steps - (recent[-1].get("step") or 0))
        if len(timed) >= 2 and timed[-1]["step"] > timed[0]["step"]:
            seconds = timed[-1]["time_unix"] - timed[0]["time_unix"]
            return float(left * seconds / (timed[-1]["step"] - timed[0]["step"]))
        seconds = recent[-1].get("step_seconds")
        return None if seconds is None else left * float(seconds)

    def _goodput(self, end_unix: float) -> float | None:
        """Return the goodput that an ended run has recorded, else the same value from what was read."""
        if self.events.goodput is not None:
            return self.events.goodput
        counted, began = self.curves.counted_seconds(), self.events.process_unix
        return counted / (end_unix - began) if counted is not None and began and end_unix > began else None
