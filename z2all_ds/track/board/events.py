"""events.jsonl for the board: marks on the curves, and the run's outcome."""

from collections import deque
from typing import Any

from z2all_ds.track.fields import MARKED, event_title
from z2all_ds.track.tail import RecordLog
from z2all_ds.track.writer import OUTCOMES

MARKS_KEPT = 2000


class EventLog(RecordLog):
    """Follows the file."""

    def reset(self) -> None:
        self.count, self.unparsable = 0, 0
        self.marks: deque[dict[str, Any]] = deque(maxlen=MARKS_KEPT)
        """For the page. `event` is `restart` for all starts but the first; `details` is the record."""
        self.started: dict[str, Any] = {}
        """The record of the last start."""
        self.probes: list[Any] = []
        """Probes of the last start that has any."""
        self.first_unix: float | None = None
        """Time of the first event; failed attempts to start the run come before it."""
        self.process_unix: float | None = None
        """Start of the first process, which is earlier; goodput counts from there."""
        self.last_unix: float | None = None
        self.end_unix: float | None = None
        """Time of the last event before an end, or of the end; a later start counts from its first step on."""
        self.outcome: str | None = None
        self.reason = ""
        """Why it failed."""
        self.goodput: float | None = None
        """Recorded at the last end; None while the run continues."""
        self._starts = 0
        self._has_ended = False

    def add(self, record: dict[str, Any] | None) -> None:
        if record is None or not isinstance(record.get("event"), str):
            self.unparsable += 1
            return
        kind, moment = record["event"], record.get("time_unix")
        if kind == "started" and not self._starts:
            self.first_unix, self._has_ended = None, False  # the run begins here
            for mark in self.marks:
                mark["seconds"] = 0.0
        self._has_ended = self._has_ended and kind != "first_step"
        if moment is not None:
            self.last_unix = moment
            self.end_unix = self.end_unix if self._has_ended else moment
            if self.first_unix is None:
                self.first_unix = self.process_unix = moment
            if kind == "first_step" and self._starts <= 1 and "seconds" in record:
                self.process_unix = min(self.process_unix or moment, moment - record["seconds"])
        if kind in OUTCOMES:
            self._has_ended = self._has_ended or kind != "started"
            self.outcome, self.reason = kind, str(record.get("reason", ""))
            self.goodput = record.get("goodput", self.goodput)  # a process without a step has not changed it
        if kind == "first_step":
            self.goodput = None
        if kind == "started":
            self.started = record
            probes = record.get("probes")
            self.probes = probes if isinstance(probes, list) and probes else self.probes
            self._starts += 1
        if kind in MARKED:
            name = "restart" if kind == "started" and self._starts > 1 else kind
            since_start = round(moment - self.first_unix, 3) if moment is not None and self.first_unix else None
            title = event_title(record, is_restart=name == "restart")
            mark = {"number": self.count, "event": name, "step": record.get("step"), "seconds": since_start}
            self.marks.append({**mark, "title": title, "details": record})
        self.count += 1

    @property
    def restarts_unix(self) -> list[float]:
        moments = [mark["details"].get("time_unix") for mark in list(self.marks) if mark["event"] == "restart"]
        return [moment for moment in moments if moment is not None]

    def shown(self) -> list[dict[str, Any]]:
        """Return the marks for the page, without `tokens_seen`."""
        return [{**mark} for mark in list(self.marks)]
