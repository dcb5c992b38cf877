"""One run on the board: its files followed by a thread of its own, its state as the page wants it."""

import posixpath
import threading
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from z2all_ds.base.console import human_seconds
from z2all_ds.track.board.curves import Curves
from z2all_ds.track.board.events import EventLog
from z2all_ds.track.board.files import Files, Unreachable
from z2all_ds.track.board.health import HealthLog
from z2all_ds.track.board.mixture import domains_in, mixture_of
from z2all_ds.track.board.pace import Pace
from z2all_ds.track.board.probes import EvaluationFiles, probes_of
from z2all_ds.track.board.settings import Settings
from z2all_ds.track.fields import PROBE_PREFIX

LOOK_EVERY_SECONDS = 1.0
SILENT_AFTER_SECONDS, SILENT_AFTER_STEPS = 60.0, 20
RATE_RECORDS = 100
FILE_NAMES = ("metrics.jsonl", "events.jsonl", "health.jsonl", "run.yaml", "ds_config.json", "evaluations")


class WatchedRun:
    """Between `start` and `stop` it follows its folder, which may not be there yet."""

    def __init__(self, number: int, files: Files, folder: str, place: str, pace: Pace | None = None) -> None:
        self.id, self.folder, self.place = str(number), folder, place
        self._files, self._pace = files, pace or Pace()
        self._paths = [posixpath.join(folder, name) for name in FILE_NAMES]
        self.curves = Curves(files, self._paths[0])
        self.events = EventLog(files, self._paths[1])
        self.health = HealthLog(files, self._paths[2])
        self.settings = Settings(files, self._paths[3], self._paths[4])
        self.evaluations = EvaluationFiles(files, self._paths[5])
        self._trouble, self._unreachable = "", False
        self._now_there, self._written_there = 0.0, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"run {place}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                has_more = self.look()
                self._trouble, self._unreachable = "", False
            except Unreachable as error:
                self._trouble, self._unreachable, has_more = str(error), True, False
            except OSError as error:
                self._trouble, has_more = f"{error.strerror or error} ({error.filename or self.place})", False
            except Exception as error:  # a record nobody thought of: the other runs, and this one's next look, go on
                self._trouble, has_more = f"could not be read: {type(error).__name__}: {error}", False
            self._over.wait(self._pace.seconds_to_wait() if has_more else LOOK_EVERY_SECONDS)

    def look(self) -> bool:
        """One look at every file. True: there is more to read at once."""
        self._now_there, signs = self._files.signs(self._paths)
        self._written_there = max(sign[1] for sign in signs[:3])
        # Before events: a page that sees a run's first event asks for its settings, once.
        self.settings.look(signs[3:5])
        more_events = self.events.look(signs[1])
        more_health = self.health.look(signs[2])
        has_more = self.curves.look(signs[0]) or more_events or more_health
        self.evaluations.look(signs[5], self._now_there)
        return has_more

    # As the page wants it

    @property
    def start_unix(self) -> float:
        """What seconds are counted from."""
        return self.events.first_unix or self.curves.first.get("time_unix") or 0.0

    @property
    def is_far(self) -> bool:
        return self._files.is_far

    @property
    def is_empty(self) -> bool:
        return not self.curves.recent and not self.events.count and not self.settings.flat

    def summary(self, name: str) -> dict[str, Any]:
        recent = list(self.curves.recent)
        last = recent[-1] if recent else {}
        names = self.curves.names()
        status = self._status(recent)
        step, steps = last.get("step"), self._steps()
        written = [moment for moment in (last.get("time_unix"), self.events.last_unix) if moment]
        end = self._now_there if status == "running" else max(written, default=0.0)
        is_live = status == "running"
        return {
            "id": self.id,
            "name": name,
            "place": self.place,
            "status": status,
            "note": self._note(status),
            "step": step,
            "steps": steps,
            "tokens_seen": last.get("tokens_seen"),
            "loss": last.get("loss"),
            "tokens_per_second": last.get("tokens_per_second"),
            "mfu": last.get("mfu"),
            "eta_seconds": self._eta(recent, steps) if is_live else None,
            "elapsed_seconds": max(0.0, end - self.start_unix) if written else None,
            "started_unix": self.start_unix or None,
            "last_record_unix": max(written, default=None),
            "deepspeed": self.events.started.get("deepspeed"),
            "world_size": self.events.started.get("world_size"),
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
        """Curves; time counts from the run's start. A point of records before and after a restart stands before it."""
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
        for event, tokens in zip(events, self.curves.tokens_at(steps), strict=True):
            event["tokens_seen"] = tokens
        return events

    def shown_health(self) -> dict[str, Any]:
        hosts = self.events.started.get("hosts")
        return self.health.shown(hosts if isinstance(hosts, list) else [], self._now_there)

    def mixture(self) -> dict[str, Any]:
        stages = self.events.started.get("mixture")
        usable = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
        domains = domains_in(self.curves.names())
        recent, is_sample = list(self.curves.recent), self.curves.is_sample
        return mixture_of(usable, domains, recent, self.curves.total, is_sample)

    def probes(self) -> list[dict[str, Any]]:
        start = self.start_unix

        def seconds_at(steps: Sequence[float]) -> list[float | None]:
            return [None if time is None else time - start for time in self.curves.times_at(steps, start)]

        trained = self.curves.probes()
        return probes_of(self.events.probes, self.evaluations.contents(), trained, self.curves.tokens_at, seconds_at)

    # How it stands

    def _status(self, recent: Sequence[dict[str, Any]]) -> str:
        if self._unreachable:
            return "unreachable"
        if self.events.outcome in ("done", "stopped", "requeue"):
            return self.events.outcome
        if not recent and not self.events.count:
            return "empty"
        return "running" if self._silent_seconds(recent) < self._patience(recent) else "silent"

    def _silent_seconds(self, recent: Sequence[dict[str, Any]]) -> float:
        """Since anything was written. The writer's clock may differ from the file's machine's: the later one counts."""
        words = [recent[-1].get("time_unix") if recent else None, self.events.last_unix, self._written_there]
        return max(0.0, self._now_there - max(word for word in words if word is not None))

    def _patience(self, recent: Sequence[dict[str, Any]]) -> float:
        seconds = [record.get("step_seconds") for record in recent]
        known = [value for value in seconds if isinstance(value, int | float)]
        return max(SILENT_AFTER_SECONDS, SILENT_AFTER_STEPS * median(known) if known else 0.0)

    def _note(self, status: str) -> str:
        if self._trouble:
            return self._trouble
        notes = []
        if status == "empty":
            notes.append("no answer from there yet" if self.is_far and not self._now_there else "nothing written yet")
        if status == "silent":
            silence = human_seconds(self._silent_seconds(list(self.curves.recent)))
            notes.append(f"nothing written for {silence}, and no word that it has ended")
        if unparsable := self.curves.unparsable + self.events.unparsable:
            notes.append(f"{unparsable} line{'' if unparsable == 1 else 's'} could not be read and were passed over")
        return "; ".join(notes)

    def _steps(self) -> int | None:
        said = self.events.started.get("steps", self.settings.flat.get("train.steps"))
        return said if isinstance(said, int) else None

    def _eta(self, recent: Sequence[dict[str, Any]], steps: int | None) -> float | None:
        """From the clock over the last steps since the last start, so that checkpoints and validation count, too."""
        if steps is None or not recent:
            return None
        since = self.events.started.get("time_unix") or 0.0
        timed = [
            (record["step"], record["time_unix"])
            for record in recent[-RATE_RECORDS:]
            if isinstance(record.get("step"), int) and isinstance(record.get("time_unix"), int | float)
        ]
        timed = [(step, moment) for step, moment in timed if moment >= since]
        left = steps - (recent[-1].get("step") or 0)
        if len(timed) >= 2 and timed[-1][0] > timed[0][0]:
            return float(max(0, left) * (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0]))
        seconds = recent[-1].get("step_seconds")
        return max(0, left) * float(seconds) if isinstance(seconds, int | float) else None

    def _goodput(self, end_unix: float) -> float | None:
        """The run's own word where it has ended, else by the same rule from what was read."""
        if self.events.goodput is not None:
            return self.events.goodput
        counted, began = self.curves.counted_seconds(), self.events.process_unix
        return counted / (end_unix - began) if counted is not None and began and end_unix > began else None
