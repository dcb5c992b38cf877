"""Goodput: the share of a run's wall time that was spent on steps that counted.

The wall time goes from the first start of the run to its end, or to now. A failed attempt to start it does not begin
the wall time, and a later start that takes no step, such as that of a finished run, does not extend it. A step counts
if its record is in metrics.jsonl and it has changed the weights: steps repeated after a resume or a rollback count
once, steps skipped by the guard do not count. Waiting for data, checkpoints, validation and start-up do not count. The
remaining time is lost: repeated and skipped steps, the time between a stop and the next start, and everything that is
not measured.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from z2all_ds.base.console import human_seconds
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.writer import OUTCOMES, read_records

ENDS = frozenset(OUTCOMES) - {"started"}


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run by their purpose."""

    wall_seconds: float
    counted_seconds: float
    startup_seconds: float
    """Time of all starts, up to the first step."""
    checkpoint_seconds: float
    data_wait_seconds: float
    validation_seconds: float

    @property
    def share(self) -> float:
        return self.counted_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def lost_seconds(self) -> float:
        """Repeated and skipped steps, time between starts, everything that is not measured."""
        known = self.counted_seconds + self.startup_seconds + self.checkpoint_seconds
        return max(0.0, self.wall_seconds - known - self.data_wait_seconds - self.validation_seconds)

    def line(self) -> str:
        """Return a line for people; parts below half a second are left out."""
        others = {
            "start-up": self.startup_seconds,
            "checkpoints": self.checkpoint_seconds,
            "waiting for data": self.data_wait_seconds,
            "validation": self.validation_seconds,
            "lost": self.lost_seconds,
        }
        parts = [f"{name} {human_seconds(seconds)}" for name, seconds in others.items() if seconds >= 0.5]
        head = f"goodput {100 * self.share:.1f}% of {human_seconds(self.wall_seconds)}"
        return f"{head} ({', '.join(parts)})" if parts else head


def goodput(
    events: Iterable[dict[str, Any]], metrics: Iterable[dict[str, Any]], now_unix: float | None = None
) -> Goodput:
    """Compute the goodput from a run's records. `now_unix`: while it still runs; else its last record is its end."""
    began: float | None = None
    has_started = has_ended = False
    last = startup = checkpoints = counted = data_wait = validation = 0.0
    for event in events:
        has_started = has_started or event["event"] in ("started", "first_step")
        if event["event"] in ("failed", "fault") and not has_started:
            began, last = None, 0.0  # the run has not begun
            continue
        has_ended = has_ended and event["event"] != "first_step"
        last = last if has_ended else max(last, event["time_unix"])
        has_ended = has_ended or event["event"] in ENDS
        began = event["time_unix"] if began is None else began
        if event["event"] == "first_step":
            began = min(began, event["time_unix"] - event["seconds"])  # the process is older than its first event
            startup += event["seconds"] - event["first_step_seconds"]
        elif event["event"] == "saved":
            checkpoints += event["seconds"]
    for record in metrics:
        last = max(last, record["time_unix"])
        data_wait += record.get("data_wait_seconds", 0.0)
        validation += record.get("validation_seconds", 0.0)
        counted += counted_seconds(record)
    end = last if now_unix is None else now_unix
    wall = end - began if began is not None else 0.0
    return Goodput(wall, counted, startup, checkpoints, data_wait, validation)


def counted_seconds(record: dict[str, Any]) -> float:
    """Return the seconds of a step that count, from its record in metrics.jsonl."""
    if not record.get("step_taken", True):
        return 0.0
    others = record.get("data_wait_seconds", 0.0) + record.get("validation_seconds", 0.0)
    return float(record.get("step_seconds", 0.0) - others - record.get("checkpoint_seconds", 0.0))


def goodput_so_far(folder: RunFolder) -> Goodput:
    """Return the goodput of a run that ends now."""
    return goodput(read_records(folder.events), read_records(folder.metrics), time.time())
