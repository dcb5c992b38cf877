"""events.jsonl as the board shows it: marks on the curves, and the run's own last word."""

from collections import deque
from typing import Any

from z2all_ds.base.console import human_seconds
from z2all_ds.track.board.files import Files, OneFile
from z2all_ds.track.tables import parse_line
from z2all_ds.track.tail import LineTail
from z2all_ds.track.writer import OUTCOMES

MARKS_KEPT = 2000
MARKED = ("started", "stage", "checkpoint", "spike", "rolled_back", "fault", "recovered", "stopped", "requeue", "done")


class EventLog:
    """Follows the file; `look` is called by the run's thread."""

    def __init__(self, files: Files, path: str) -> None:
        self._tail = LineTail(OneFile(files, path))
        self._seen: list[float] | None = None
        self._forget()

    def _forget(self) -> None:
        self.count, self.unparsable = 0, 0
        self.marks: deque[dict[str, Any]] = deque(maxlen=MARKS_KEPT)
        """With `number` and, of every later start, the kind `restart`."""
        self.started: dict[str, Any] = {}
        """The last start's record."""
        self.probes: list[Any] = []
        """Of the last start that told them."""
        self.first_unix: float | None = None
        """The run's start."""
        self.process_unix: float | None = None
        """The first process's start, which is earlier; goodput counts from there."""
        self.last_unix: float | None = None
        self.outcome: str | None = None
        self.goodput: float | None = None
        self._starts = 0

    def look(self, sign: list[float]) -> bool:
        """True: there is more to read at once."""
        if sign == self._seen:
            return False
        found = self._tail.read()
        if found.begins_anew:
            self._forget()
        for line in found.lines:
            record = parse_line(line)
            if record is None or not isinstance(record.get("event"), str):
                self.unparsable += 1
            else:
                self._take(record)
        if found.is_all:
            self._seen = sign
        return not found.is_all

    def _take(self, record: dict[str, Any]) -> None:
        kind, moment = record["event"], record.get("time_unix")
        if isinstance(moment, int | float):
            self.last_unix = moment
            if self.first_unix is None:
                self.first_unix = self.process_unix = moment
            if kind == "first_step" and self._starts <= 1 and isinstance(record.get("seconds"), int | float):
                self.process_unix = min(self.process_unix or moment, moment - record["seconds"])
        if kind in OUTCOMES:
            self.outcome = kind
            self.goodput = record.get("goodput")
        if kind == "started":
            self.started = record
            probes = record.get("probes")
            self.probes = probes if isinstance(probes, list) and probes else self.probes
            self._starts += 1
        if kind in MARKED:
            shown = "restart" if kind == "started" and self._starts > 1 else kind
            self.marks.append({"number": self.count, "event": shown, "record": record})
        self.count += 1

    @property
    def restarts_unix(self) -> list[float]:
        moments = [mark["record"].get("time_unix") for mark in list(self.marks) if mark["event"] == "restart"]
        return [moment for moment in moments if isinstance(moment, int | float)]

    def shown(self) -> list[dict[str, Any]]:
        """Marks as the page wants them; tokens_seen is added by who knows it."""
        return [
            {
                "number": mark["number"],
                "event": mark["event"],
                "step": mark["record"].get("step"),
                "seconds": _since(mark["record"].get("time_unix"), self.first_unix),
                "title": title_of(mark["event"], mark["record"]),
                "details": mark["record"],
            }
            for mark in list(self.marks)
        ]


def _since(moment: Any, start: float | None) -> float | None:
    return round(moment - start, 3) if isinstance(moment, int | float) and start is not None else None


def title_of(kind: str, record: dict[str, Any]) -> str:
    """A few words for a person."""
    match kind:
        case "started" | "restart":
            ranks = record.get("world_size")
            where = f" on {ranks} rank{'' if ranks == 1 else 's'}" if ranks else ""
            return f"started{where}" if kind == "started" else f"started again at step {record.get('step')}{where}"
        case "stage":
            return f"stage {record.get('name', '')}".rstrip()
        case "checkpoint":
            return f"checkpoint {record.get('path', '')}".rstrip()
        case "spike":
            outliers = record.get("outliers")
            of_what = f" of {', '.join(map(str, outliers))}" if isinstance(outliers, list) and outliers else ""
            return f"spike{of_what}: {record.get('policy', '')}".rstrip(": ")
        case "rolled_back":
            return f"rolled back from step {record.get('from_step')}"
        case "fault":
            who = next((f" on {key} {record[key]}" for key in ("rank", "host") if record.get(key) is not None), "")
            return f"fault: {record.get('fault', 'unknown')}{who}"
        case "recovered":
            seconds = record.get("seconds")
            return f"recovered in {human_seconds(seconds)}" if isinstance(seconds, int | float) else "recovered"
        case "requeue":
            return "stopped on request, to be started again"
        case "done":
            share = record.get("goodput")
            return f"done, goodput {100 * share:.1f}%" if isinstance(share, int | float) else "done"
    return kind.replace("_", " ")
